/* terminal.c - `gemma4 chat`: a conversation on stdin and stdout, terminals or not.
 *
 * The answer goes to stdout; the prompt sign, thoughts, figures and messages go to stderr where stdout is not a terminal, so that `gemma4 chat < questions`
 * gives the answers and nothing else. There is no line editor in it (rlwrap is one).
 *
 * The conversation is kept as the JSON of a request and rendered anew for each answer; what the cache knows of it is not computed again (engine.c).
 *
 * Reading order: terminal_chat at the end, then upwards.
 */
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif
#include "terminal.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(_WIN32)
#include <fcntl.h>
#include <io.h>
#include <sys/stat.h>
#include <windows.h>
#define isatty _isatty
#define fileno _fileno
#else
#include <unistd.h>
#endif

typedef struct string {
    char *data; /* [n], then NUL */
    size_t n, room;
} string;

typedef struct terminal {
    const terminal_options *o;
    g4_engine *engine;
    string system, messages; /* JSON: a string, or nothing; objects with commas between them */
    string line, content;
    int in_tty, out_tty;
    int reasoning;           /* a thought was shown last */
    int column;              /* stdout does not stand at the beginning of a line */
    int failed;              /* memory, or stdout */
    uint64_t answers;
} terminal;

/* Ctrl-C: set by the handler; forgotten before each prompt sign, so that it stops the answer to what was typed then, however early it comes. */
static volatile sig_atomic_t interrupted;

#ifdef _WIN32
static void on_interrupt(int number) {
    signal(number, on_interrupt); /* it is forgotten each time */
    interrupted = 1;
}

static void catch_interrupts(int on) { signal(SIGINT, on ? on_interrupt : SIG_DFL); }

/* A file that is not there yet; the path is UTF-8. */
static FILE *create_new_file(const char *path) {
    wchar_t w[4096];
    int fd = MultiByteToWideChar(CP_UTF8, 0, path, -1, w, 4096) ? _wopen(w, _O_WRONLY | _O_CREAT | _O_EXCL | _O_BINARY, _S_IREAD | _S_IWRITE) : -1;
    return fd < 0 ? NULL : _fdopen(fd, "wb");
}
#else
static void on_interrupt(int number) {
    (void)number;
    interrupted = 1;
}

/* Without SA_RESTART: a line that is being typed ends with EINTR, on all systems alike. */
static void catch_interrupts(int on) {
    struct sigaction how = {.sa_handler = on ? on_interrupt : SIG_DFL};
    sigemptyset(&how.sa_mask);
    sigaction(SIGINT, &how, NULL);
}

static FILE *create_new_file(const char *path) { return fopen(path, "wbx"); }
#endif

static void put(terminal *t, string *s, const char *data, size_t n) {
    if (s->room - s->n <= n) {
        size_t room = (s->n + n) / 2 * 3 + 256;
        char *more = room > n ? realloc(s->data, room) : NULL;
        if (!more) {
            t->failed = 1;
            return;
        }
        s->data = more;
        s->room = room;
    }
    if (n) memcpy(s->data + s->n, data, n);
    s->n += n;
    s->data[s->n] = 0;
}

static void put_text(terminal *t, string *s, const char *text) { put(t, s, text, strlen(text)); }

static void put_json(terminal *t, string *s, const char *text, size_t n) {
    char *quoted = n > SIZE_MAX / 8 ? NULL : malloc(6 * n + 3);
    if (quoted) put(t, s, quoted, g4_json_quote(quoted, text, n));
    else t->failed = 1;
    free(quoted);
}

static void add_message(terminal *t, const char *role, const char *text, size_t n) {
    if (t->messages.n) put_text(t, &t->messages, ",");
    put_text(t, &t->messages, "{\"role\":\"");
    put_text(t, &t->messages, role);
    put_text(t, &t->messages, "\",\"content\":");
    put_json(t, &t->messages, text, n);
    put_text(t, &t->messages, "}");
}

static void make_request(terminal *t, string *request, int with_settings) {
    put_text(t, request, "{\"messages\":[");
    if (t->system.n) {
        put_text(t, request, "{\"role\":\"system\",\"content\":");
        put(t, request, t->system.data, t->system.n);
        put_text(t, request, t->messages.n ? "}," : "}");
    }
    put(t, request, t->messages.data ? t->messages.data : "", t->messages.n);
    put_text(t, request, "]");
    if (with_settings) put_text(t, request, t->o->thinking ? ",\"add_generation_prompt\":true,\"enable_thinking\":true" : ",\"add_generation_prompt\":true");
    put_text(t, request, "}");
}

/* ---- The answer ---------------------------------------------------------------------------------------------------------- */

static void print(terminal *t, const char *text, size_t n) {
    if (n && (fwrite(text, 1, n, stdout) != n || fflush(stdout))) t->failed = 1;
    if (n) t->column = text[n - 1] != '\n';
}

/* Thoughts are grey on a terminal; elsewhere they go to stderr. */
static void show_reasoning(terminal *t, const char *text, size_t n) {
    if (!t->out_tty) {
        if (!t->o->quiet) fwrite(text, 1, n, stderr);
    } else {
        if (!t->reasoning) print(t, "\033[2m", 4);
        print(t, text, n);
    }
    t->reasoning = 1;
}

static void end_reasoning(terminal *t) {
    if (!t->reasoning) return;
    t->reasoning = 0;
    if (t->out_tty) print(t, "\033[0m\n\n", 6);
    else if (!t->o->quiet) fputs("\n\n", stderr);
}

static void on_part(void *user, const g4_part *part) {
    terminal *t = user;
    if (part->kind == G4_PART_REASONING) {
        show_reasoning(t, part->text, part->n);
        return;
    }
    end_reasoning(t);
    if (part->kind == G4_PART_TOOL_CALL) { /* no tools were offered, but a model may call one all the same */
        if (t->column) print(t, "\n", 1);
        print(t, part->name, part->n_name);
        print(t, "(", 1);
        print(t, part->text, part->n);
        print(t, ")\n", 2);
        return;
    }
    print(t, part->text, part->n);
    put(t, &t->content, part->text, part->n);
}

/* The ids of the conversation so far; -1 with a reason. */
static int make_prompt(terminal *t, int32_t **ids, size_t *n, int *in_reasoning, g4_error *err) {
    string request = {0};
    g4_chat_prompt rendered;
    make_request(t, &request, 1);
    int failed = t->failed ? g4_fail(err, "out of memory") : g4_chat_render(request.data, request.n, t->o->family, &rendered, err);
    if (!failed) {
        failed = g4_chat_encode(t->o->tok, &rendered, 0, ids, n, err);
        *in_reasoning = rendered.in_reasoning;
        g4_chat_prompt_free(&rendered);
    }
    free(request.data);
    return failed;
}

/* Prints an answer to the conversation and adds it there. -1: there is none, and err says why. */
static int answer(terminal *t, g4_error *err) {
    int32_t *ids = NULL;
    size_t n = 0;
    int in_reasoning = 0, ctx = g4_state_get_options(t->o->state)->ctx;
    if (make_prompt(t, &ids, &n, &in_reasoning, err)) return -1;
    if (n >= (size_t)ctx) {
        g4_free(ids);
        return g4_fail(err, "the conversation is longer than the context: n_prompt %zu, n_ctx %d; /reset begins a new one, --ctx N makes more room", n, ctx);
    }
    g4_request r = {.prompt = ids, .n_prompt = n, .sampling = t->o->sampling, .max_new = t->o->max_new};
    r.sampling.seed += t->answers++;
    g4_answer *reader = g4_answer_open(t->o->tok, in_reasoning, on_part, t, err);
    int64_t request = reader ? g4_engine_add(t->engine, &r, err) : -1;
    g4_free(ids);
    int failed = request < 0 ? -1 : 0, cancelled = 0, n_new = 0, n_cached = 0;
    g4_finish finish = G4_RUNNING;
    double start = t->o->clock(), first = 0;
    t->content.n = 0;
    t->reasoning = t->column = 0;
    while (request >= 0 && g4_engine_pending(t->engine)) {
        const g4_event *event;
        int events = g4_engine_step(t->engine, &event);
        for (int i = 0; i < events; i++) {
            if (event[i].token >= 0 && !first) first = t->o->clock();
            if (event[i].token >= 0 && event[i].finish != G4_FINISH_STOP_ID && !failed && !cancelled) failed = g4_answer_push(reader, event[i].token, err);
            if (event[i].finish == G4_FINISH_ERROR) failed = g4_fail(err, "%s", event[i].error);
            n_new = event[i].n_new, n_cached = event[i].n_cached, finish = event[i].finish;
        }
        if ((interrupted || failed || t->failed) && !cancelled) {
            cancelled = 1;
            g4_engine_cancel(t->engine, request);
        }
    }
    if (!failed && reader) failed = g4_answer_end(reader, err);
    g4_answer_close(reader);
    end_reasoning(t);
    if (t->column) print(t, "\n", 1);
    if (t->failed) return g4_fail(err, "%s", ferror(stdout) ? "cannot write the answer to standard output" : "out of memory");
    if (failed) return -1;
    add_message(t, "assistant", t->content.data ? t->content.data : "", t->content.n);
    double end = t->o->clock();
    if (!t->o->quiet) {
        fprintf(stderr, "[%s%zu tokens read, %d of them known; %d written", cancelled ? "stopped; " : finish == G4_FINISH_LENGTH ? "cut off; " : "", n, n_cached, n_new);
        if (first > 0 && n_new > 1 && end > first) fprintf(stderr, ", %.1f tokens/s; first after %.2f s", (n_new - 1) / (end - first), first - start);
        fprintf(stderr, "]\n");
    }
    return 0;
}

/* ---- What is typed --------------------------------------------------------------------------------------------------------- */

enum { INTERRUPTED = -1 }; /* Ctrl-C while something was typed, which is dropped */

/* One line is added to t->line, without its end, after a sign that asks for it. 0: stdin has ended. */
static int read_line(terminal *t, const char *sign) {
    int c = EOF, any = 0;
    interrupted = 0;
    if (t->in_tty && !t->o->quiet) fputs(sign, stderr);
    while ((any || !interrupted) && (c = getchar()) != EOF) { /* a line that is there already is read to its end */
        char byte = (char)c;
        any = 1;
        if (c == '\n') break;
        put(t, &t->line, &byte, 1);
    }
    if (interrupted && c != '\n') {
        clearerr(stdin);
        if (!t->o->quiet) fputs("\n[/quit or Ctrl-D ends]\n", stderr);
        return INTERRUPTED;
    }
    if (t->line.n && t->line.data[t->line.n - 1] == '\r') t->line.data[--t->line.n] = 0;
    return any && !t->failed;
}

/* A message: a line; lines that end in a backslash go on; between two lines of """ anything goes. 0: stdin has ended. */
static int read_message(terminal *t) {
    static const char fence[] = "\"\"\"";
    t->line.n = 0;
    put(t, &t->line, "", 0);
    int more = read_line(t, "> ");
    if (more <= 0) return more;
    if (!strcmp(t->line.data, fence)) {
        size_t begin = t->line.n = 0;
        t->line.data[0] = 0;
        for (;;) {
            more = read_line(t, ". ");
            if (more < 0) return more;
            if (!more || !strcmp(t->line.data + begin, fence)) break;
            put_text(t, &t->line, "\n");
            begin = t->line.n;
        }
        t->line.n = begin ? begin - 1 : 0;
        t->line.data[t->line.n] = 0;
        return 1;
    }
    while (t->line.n && t->line.data[t->line.n - 1] == '\\') {
        t->line.data[t->line.n - 1] = '\n';
        more = read_line(t, ". ");
        if (more < 0) return more;
        if (!more) break;
    }
    return 1;
}

static void save(terminal *t, const char *path) {
    string request = {0};
    make_request(t, &request, 0);
    put_text(t, &request, "\n");
    FILE *f = *path && !t->failed ? create_new_file(path) : NULL;
    if (t->failed) fprintf(stderr, "%s: out of memory\n", path);
    else if (!*path) fprintf(stderr, "/save FILE: expected the name of a file that is not there yet\n");
    else if (!f) fprintf(stderr, "%s: cannot be created: %s\n", path, strerror(errno));
    else if ((fwrite(request.data, 1, request.n, f) != request.n) | fclose(f)) fprintf(stderr, "%s: cannot be written: %s\n", path, strerror(errno));
    else fprintf(stderr, "[saved: `gemma4 template < %s` renders it]\n", path);
    free(request.data);
}

static void set_system(terminal *t, const char *text) {
    t->system.n = 0;
    if (*text) put_json(t, &t->system, text, strlen(text));
}

/* 1: it was a command; -1: /quit; 0: it is a message. */
static int command(terminal *t) {
    const char *line = t->line.data, *word_end = line + strcspn(line, " \t"), *rest = word_end + strspn(word_end, " \t");
    size_t n = (size_t)(word_end - line);
#define IS(name) (n == sizeof name - 1 && !memcmp(line, name, n))
    if (*line != '/') return 0;
    if (IS("/quit") || IS("/exit")) return -1;
    if (IS("/help")) {
        fputs("/system TEXT   sets the system message (nothing: none) and begins a new conversation\n"
              "/reset         begins a new conversation\n"
              "/save FILE     writes the conversation as JSON\n"
              "/quit          ends, as the end of the input does\n"
              "A line that ends in \\ goes on in the next; lines between two lines of \"\"\" are one message. Ctrl-C stops an answer, or drops what was typed.\n"
              "To say something that begins with /, begin it with a blank.\n",
              stderr);
    } else if (IS("/system")) {
        set_system(t, rest);
        t->messages.n = 0;
    } else if (IS("/reset")) {
        t->messages.n = 0;
    } else if (IS("/save")) {
        save(t, rest);
    } else {
        fprintf(stderr, "there is no command %.*s; /help lists them\n", (int)(n < 40 ? n : 40), line);
    }
#undef IS
    return 1;
}

int terminal_chat(const terminal_options *o, g4_error *err) {
    terminal t = {.o = o, .in_tty = isatty(fileno(stdin)), .out_tty = isatty(fileno(stdout))};
    t.engine = g4_engine_open(o->state, o->tok, &(g4_engine_options){.speculate = o->speculate}, err);
    if (!t.engine) return -1;
    int failed = 0, catching = t.in_tty || o->prompt; /* who sends a file in can stop the whole with Ctrl-C, and not only answer by answer */
    if (catching) catch_interrupts(1);
    if (o->system) set_system(&t, o->system);
    if (o->prompt) {
        add_message(&t, "user", o->prompt, o->n_prompt);
        failed = answer(&t, err);
    } else {
        if (t.in_tty && !o->quiet) fputs("/help lists the commands.\n", stderr);
        for (int read; !t.failed && (read = read_message(&t)) != 0;) {
            if (read == INTERRUPTED) continue;
            int was = command(&t);
            if (was < 0) break;
            if (was || !t.line.n) continue;
            size_t length = t.messages.n;
            add_message(&t, "user", t.line.data, t.line.n);
            failed = answer(&t, err);
            if (failed && t.in_tty && !t.failed) { /* the conversation stands as before */
                fprintf(stderr, "%s\n", err->text);
                t.messages.n = length;
                failed = 0;
            }
            if (failed) break;
        }
        if (t.failed && !failed) failed = g4_fail(err, "out of memory");
        if (t.in_tty && !o->quiet) fputs("\n", stderr);
    }
    if (catching) catch_interrupts(0);
    g4_engine_close(t.engine);
    free(t.system.data), free(t.messages.data), free(t.line.data), free(t.content.data);
    return failed;
}
