/* main.c - the command line: gemma4 COMMAND [MODEL] [options].
 *
 * Results go to stdout and every write is checked; all else goes to stderr, and -q silences it but for errors. Status 0: done; 1: the
 * comparison failed; 2: everything else, with one line "gemma4: ..." that says what, where, expected and found.
 *
 * Nothing is computed here: that is gemma4.h. Trace files are tracefile.c, measuring is bench.c.
 *
 * Read the tables of commands and options first (they are the manual too), then any command; each is one function. Above those are
 * the helpers that they share, and one section with all that differs between systems.
 */
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif
#include "bench.h"
#include "gemma4.h"
#include "server.h"
#include "terminal.h"
#include "tracefile.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ---- Messages and results ------------------------------------------------------------------------------------------------ */

static int quiet; /* -q */

/* One line on stderr: what a file or an argument smuggled in cannot make it two. */
static void print_line(const char *prefix, const char *format, va_list args) {
    char text[2048];
    vsnprintf(text, sizeof text, format, args);
    for (char *c = text; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f) *c = '?';
    fprintf(stderr, "%s%s\n", prefix, text);
}

G4_PRINTF(1, 2)
static _Noreturn void fatal(const char *format, ...) {
    va_list args;
    va_start(args, format);
    fflush(stdout); /* what was found so far comes before the error where both go to one terminal */
    print_line("gemma4: ", format, args);
    va_end(args);
    exit(2);
}

G4_PRINTF(1, 2)
static void note(const char *format, ...) {
    va_list args;
    va_start(args, format);
    if (!quiet) print_line("", format, args);
    va_end(args);
}

static void warn(void *user, const char *text) {
    (void)user;
    note("warning: %s", text);
}

/* Of g4_open, once a second and not in the first: most models are open before. */
static void show_progress(void *user, const char *path, uint64_t done, uint64_t total) {
    double *next = user;
    if (seconds() < *next) return;
    *next = seconds() + 1;
    note("%s: %.0f of %.0f MB", path, 1e-6 * (double)done, 1e-6 * (double)total);
}

/* Sends on what was printed. A reader that went away (head, less) is no news to anybody: no message, but the status tells. */
void flush_results(void) {
    if (!fflush(stdout) && !ferror(stdout)) return;
    if (errno == EPIPE) exit(2);
    fatal("cannot write the results to standard output: %s", strerror(errno));
}

static void *allocate(size_t n, size_t size) {
    void *p = size && n > SIZE_MAX / 2 / size ? NULL : malloc(n * size + 1);
    if (!p) fatal("out of memory: %zu times %zu bytes could not be had", n, size);
    return p;
}

void put_json_string(const char *text, size_t n) {
    char *quoted = allocate(n + 1, 6);
    fwrite(quoted, 1, g4_json_quote(quoted, text, n), stdout);
    free(quoted);
}

/* JSON has no infinity. */
static void put_json_number(double x) {
    if (isfinite(x)) printf("%.10g", x);
    else printf("null");
}

/* ---- What the systems spell differently ---------------------------------------------------------------------------------- */

enum { PATH_ROOM = 4096 };

#ifdef _WIN32
#include <fcntl.h>
#include <io.h>
#include <windows.h>
#include <shellapi.h>

static int is_terminal(FILE *f) { return _isatty(_fileno(f)); }

double seconds(void) {
    LARGE_INTEGER now, per_second;
    QueryPerformanceCounter(&now);
    QueryPerformanceFrequency(&per_second);
    return (double)now.QuadPart / (double)per_second.QuadPart;
}

static FILE *create_file(const char *path) {
    int n = MultiByteToWideChar(CP_UTF8, 0, path, -1, NULL, 0);
    wchar_t *w = allocate((size_t)n, sizeof *w);
    MultiByteToWideChar(CP_UTF8, 0, path, -1, w, n);
    FILE *f = _wfopen(w, L"wb");
    free(w);
    return f;
}

static char *narrow(const wchar_t *w) {
    int n = WideCharToMultiByte(CP_UTF8, 0, w, -1, NULL, 0, NULL, NULL);
    char *text = allocate((size_t)n, 1);
    WideCharToMultiByte(CP_UTF8, 0, w, -1, text, n, NULL, NULL);
    return text;
}

static FILE *open_to_read(const char *path) {
    wchar_t w[PATH_ROOM];
    return MultiByteToWideChar(CP_UTF8, 0, path, -1, w, PATH_ROOM) ? _wfopen(w, L"rb") : NULL;
}

static void program_path(const char *argv0, char path[PATH_ROOM]) {
    wchar_t w[PATH_ROOM];
    DWORD n = GetModuleFileNameW(NULL, w, PATH_ROOM);
    char *text = n && n < PATH_ROOM ? narrow(w) : NULL;
    snprintf(path, PATH_ROOM, "%s", text ? text : argv0);
    for (char *c = path; *c; c++)
        if (*c == '\\') *c = '/';
    free(text);
}

/* Arguments in UTF-8 whatever the code page, bytes on the standard streams, UTF-8 on the console. */
static void prepare_system(int *argc, char ***argv) {
    int n;
    wchar_t **w = CommandLineToArgvW(GetCommandLineW(), &n);
    if (w) {
        *argv = allocate((size_t)n + 1, sizeof **argv);
        for (int i = 0; i < n; i++) (*argv)[i] = narrow(w[i]);
        (*argv)[n] = NULL;
        *argc = n;
        LocalFree(w);
    }
    _setmode(_fileno(stdin), _O_BINARY);
    _setmode(_fileno(stdout), _O_BINARY);
    SetConsoleOutputCP(CP_UTF8);
}
#else
#include <fcntl.h>
#include <unistd.h>
#ifndef __wasi__ /* has no signals */
#include <signal.h>
#endif
#ifdef __APPLE__
int _NSGetExecutablePath(char *path, uint32_t *size); /* mach-o/dyld.h, which clashes with strict POSIX */
#endif

static int is_terminal(FILE *f) { return isatty(fileno(f)); }

double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static FILE *open_to_read(const char *path) { return fopen(path, "rb"); }

static FILE *create_file(const char *path) { return fopen(path, "wb"); }

static void program_path(const char *argv0, char path[PATH_ROOM]) {
#ifdef __APPLE__
    uint32_t size = PATH_ROOM;
    if (!_NSGetExecutablePath(path, &size)) return;
#endif
    ssize_t n = readlink("/proc/self/exe", path, PATH_ROOM - 1);
    if (n > 0) path[n] = 0;
    else snprintf(path, PATH_ROOM, "%s", argv0);
}

static void prepare_system(int *argc, char ***argv) {
    (void)argc;
    (void)argv;
#ifdef SIGPIPE
    signal(SIGPIPE, SIG_IGN); /* a closed pipe is then an error of write, which flush_results sees */
#endif
    /* With a standard stream closed, the next file opened would get its number, and results would be written into it. */
    for (int fd = 0; fd < 3; fd++)
        if (fcntl(fd, F_GETFD) == -1) open("/dev/null", O_RDONLY);
}
#endif

/* -1: there is no such precision */
static int precision_of(const char *name) {
    for (int i = 0; i < 3; i++)
        if (!strcmp(name, precision_names[i])) return i;
    return -1;
}

/* ---- Options ------------------------------------------------------------------------------------------------------------- */

enum { DRAFT_TOKENS = 8 }; /* --speculate */
enum { RUN = 1, TOKENIZE = 2, DETOKENIZE = 4, LOGITS = 8, TRACE = 16, DIFF = 32, HASH = 64, SCORE = 128, INFO = 256, HELP = 512, BENCH = 1024, TEMPLATE = 4096, CHAT = 8192, SERVE = 16384 };
enum { FORWARD = RUN | LOGITS | TRACE | HASH | SCORE, SAMPLED = RUN | CHAT, SIZED = FORWARD | INFO | BENCH | CHAT | SERVE };

typedef struct arguments {
    const char *model;              /* NULL: the shipped one */
    const char **rest;              /* [n_rest] other arguments without a dash */
    int n_rest;
    const char *prompt, *file, *ids, *seed, *output, *tensors, *backend, *precision, *only, *profile, *family, *logit_bias, *prefetch, *speculate, *system, *host, *api_key, *name;
    const char **stop;              /* [n_stop] */
    int n_stop;
    int64_t n, top_k, threads, ctx, chunk, port, parallel, queue, max_body, timeout, grace; /* -1: not given */
    double temp, top_p, min_p, repeat_penalty, rtol, atol, seconds; /* -1: not given */
    double frequency_penalty, presence_penalty;
    int ignore_eos, escape, bos, jsonl, skip_special, json, check, no_mmap, full, kernels, thinking, quiet, help;
} arguments;

typedef enum option_kind { FLAG, TEXT, OPTIONAL_TEXT /* "" without =TEXT */, LIST /* --stop: all that are given */, INTEGER, NUMBER } option_kind;

typedef struct option {
    const char *letter, *name, *value; /* "-p", "--prompt", "TEXT"; "a|b": one of these; FILE: the completions offer files */
    option_kind kind;
    size_t field;                      /* in arguments */
    double min, max;                   /* INTEGER, NUMBER */
    int commands;                      /* that take it */
    const char *help;
} option;

#define AT(field) offsetof(arguments, field)
static const option options[] = {
    {"-p", "--prompt", "TEXT", TEXT, AT(prompt), 0, 0, FORWARD | TOKENIZE | CHAT, "the text, as it is (but see -e)"},
    {"-f", "--file", "FILE", TEXT, AT(file), 0, 0, FORWARD | TOKENIZE | CHAT, "the text is the content of FILE, to the last byte"},
    {"-e", "--escape", NULL, FLAG, AT(escape), 0, 0, FORWARD | TOKENIZE | CHAT,
     "in -p and --stop, \\n \\t \\r \\\\ and \\xHH mean what they mean in C; without -e a backslash is one"},
    {NULL, "--ids", "A,B,...", TEXT, AT(ids), 0, 0, FORWARD, "token ids instead of text, used as given: no BOS is added, no tokenizer needed"},
    {"-n", "--n-predict", "N", INTEGER, AT(n), 0, INT_MAX, SAMPLED, "new tokens at most (128; chat: as many as the context has room for)"},
    {NULL, "--temp", "X", NUMBER, AT(temp), 0, 1e6, SAMPLED, "temperature; 0 picks the best token each time (generation_config.json)"},
    {NULL, "--top-k", "N", INTEGER, AT(top_k), 0, INT_MAX, SAMPLED, "only the N best tokens; 0: all (generation_config.json)"},
    {NULL, "--top-p", "X", NUMBER, AT(top_p), 0, 1, SAMPLED, "only the best that together reach probability X; 1: all (generation_config.json)"},
    {NULL, "--min-p", "X", NUMBER, AT(min_p), 0, 1, SAMPLED, "only tokens with at least X times the probability of the best (0)"},
    {NULL, "--repeat-penalty", "X", NUMBER, AT(repeat_penalty), 1e-6, 1e6, SAMPLED, "above 1 makes tokens that occurred less likely (1)"},
    {NULL, "--frequency-penalty", "X", NUMBER, AT(frequency_penalty), -100, 100, SAMPLED, "taken from a token's logit for each time it was generated (0)"},
    {NULL, "--presence-penalty", "X", NUMBER, AT(presence_penalty), -100, 100, SAMPLED, "taken from the logit of each token that was generated (0)"},
    {NULL, "--logit-bias", "ID:X,...", TEXT, AT(logit_bias), 0, 0, SAMPLED, "added to the logits of these ids; -100 as good as forbids one"},
    {NULL, "--seed", "N", TEXT, AT(seed), 0, 0, SAMPLED, "0 to 2^64 - 1; one seed gives one text everywhere (from the clock, and reported)"},
    {NULL, "--stop", "TEXT", LIST, AT(stop), 0, 0, RUN, "end before this text; may be given more than once"},
    {NULL, "--speculate", "N|off", TEXT, AT(speculate), 0, 0, RUN | CHAT | SERVE, "draft up to N tokens from what the text said before; changes the speed, never the text (8; serve: off)"},
    {NULL, "--ignore-eos", NULL, FLAG, AT(ignore_eos), 0, 0, RUN, "do not end at a stop id"},
    {NULL, "--system", "TEXT", TEXT, AT(system), 0, 0, CHAT, "the system message"},
    {NULL, "--thinking", NULL, FLAG, AT(thinking), 0, 0, CHAT, "let the model think before it answers"},
    {NULL, "--host", "ADDRESS", TEXT, AT(host), 0, 0, SERVE, "the address to listen at (127.0.0.1: this machine only)"},
    {NULL, "--port", "N", INTEGER, AT(port), 0, 65535, SERVE, "the port; 0: any that is free (8080)"},
    {NULL, "--api-key", "KEY", TEXT, AT(api_key), 0, 0, SERVE, "asked for in the header Authorization: Bearer KEY (GEMMA4_API_KEY, which `ps` does not show)"},
    {NULL, "--name", "NAME", TEXT, AT(name), 0, 0, SERVE, "what the model is called in the API (the last part of MODEL)"},
    {NULL, "--parallel", "N", INTEGER, AT(parallel), 1, 256, SERVE, "answers computed at once, each with a context of its own (8)"},
    {NULL, "--queue", "N", INTEGER, AT(queue), 0, 100000, SERVE, "answers that may wait; more are refused with status 429 (64)"},
    {NULL, "--max-body", "BYTES", INTEGER, AT(max_body), 1024, 1 << 30, SERVE, "the largest request taken (8388608)"},
    {NULL, "--timeout", "SECONDS", INTEGER, AT(timeout), 1, 86400, SERVE, "a connection on which nothing moves is closed after this (60)"},
    {NULL, "--grace", "SECONDS", INTEGER, AT(grace), 0, 86400, SERVE, "what answers in progress get after SIGTERM (30)"},
    {NULL, "--bos", NULL, FLAG, AT(bos), 0, 0, TOKENIZE, "begin with <bos>, unless the text does"},
    {NULL, "--jsonl", NULL, FLAG, AT(jsonl), 0, 0, TOKENIZE | DETOKENIZE, 
     "one JSON object a line on stdin, one a line on stdout: {\"text\": ...} and {\"ids\": [...]}"},
    {NULL, "--skip-special", NULL, FLAG, AT(skip_special), 0, 0, DETOKENIZE, "leave special tokens out"},
    {"-o", "--output", "FILE", TEXT, AT(output), 0, 0, LOGITS | TRACE, "write the tensors of all positions to this safetensors file"},
    {NULL, "--tensors", "GLOB", TEXT, AT(tensors), 0, 0, TRACE, "only tensors with such names: * and ?, alternatives parted by commas"},
    {NULL, "--rtol", "X", NUMBER, AT(rtol), 0, 1e30, DIFF, "the bar: max abs <= X * max(1, largest abs of B) (1e-5 without --atol)"},
    {NULL, "--atol", "X", NUMBER, AT(atol), 0, 1e30, DIFF, "the bar: max abs <= X; with --rtol the two are added"},
    {NULL, "--json", NULL, FLAG, AT(json), 0, 0, SCORE | INFO | BENCH, "one line of JSON"},
    {NULL, "--check", NULL, FLAG, AT(check), 0, 0, INFO, "read every weight, and fail at the first that is infinite or no number: a damaged file"},
    {NULL, "--only", "NAME,...", TEXT, AT(only), 0, 0, BENCH, "only these cells, like prefill128,decode0"},
    {NULL, "--seconds", "X", NUMBER, AT(seconds), 0.001, 3600, BENCH, "for each cell, all backends together, roughly (2)"},
    {NULL, "--kernels", NULL, FLAG, AT(kernels), 0, 0, BENCH, "instead: opening the file, products of each type of weights, with --full a million keys"},
    {NULL, "--full", NULL, FLAG, AT(full), 0, 0, BENCH, "longer prompts, larger batches, and cells that would take long"},
    {NULL, "--profile", "[=FILE]", OPTIONAL_TEXT, AT(profile), 0, 0, RUN | LOGITS | BENCH,
     "where the time goes, by operation; FILE gets every single one, for chrome://tracing"},
    {NULL, "--backend", "NAME", TEXT, AT(backend), 0, 0, SIZED,
     "who computes; `list` prints those built in (GEMMA4_BACKEND, else the fastest exact one)"},
    {NULL, "--threads", "N", INTEGER, AT(threads), 1, 1024, SIZED, "threads (GEMMA4_THREADS, else one per processor)"},
    {NULL, "--ctx", "N", INTEGER, AT(ctx), 1, INT_MAX, SIZED,
     "positions for the prompt and new tokens (4096 or what the model allows; logits, trace, hash, score: the prompt)"},
    {NULL, "--chunk", "N", INTEGER, AT(chunk), 1, 65536, SIZED, "prompt tokens computed at once (128); changes speed and memory, never a bit"},
    {NULL, "--precision", "f32|bf16|q16", TEXT, AT(precision), 0, 0, SIZED, "bf16 rounds where transformers with dtype=bfloat16 does; q16: 16 bits beside quantised weights, faster (f32)"},
    {NULL, "--no-mmap", NULL, FLAG, AT(no_mmap), 0, 0, SIZED, "read the weights into memory instead of mapping them"},
    {NULL, "--family", "small|large", TEXT, AT(family), 0, 0, TEMPLATE, "Google's template for E2B and E4B, or for the larger models; MODEL is not opened"},
    {NULL, "--prefetch", "none|head|all", TEXT, AT(prefetch), 0, 0, SIZED,
     "what the system is asked to read before the first token needs it (auto: all if the model fits half of the memory, else head)"},
    {"-q", "--quiet", NULL, FLAG, AT(quiet), 0, 0, ~0, "nothing on stderr but errors"},
    {"-h", "--help", NULL, FLAG, AT(help), 0, 0, ~0, "this text"},
};
enum { N_OPTIONS = sizeof options / sizeof *options };

typedef struct command {
    const char *name;
    int bit;
    int (*function)(const arguments *a);
    int takes_model, max_rest;
    const char *usage, *help;
    const char *examples; /* lines for a shell, which test_manual runs; each must work on the shipped model */
} command;

static int is_number(const char *s) { return *s && !s[strspn(s, "0123456789")]; }

/* A whole decimal number up to max, which `what` names in messages. */
static uint64_t parse_whole(const char *what, const char *text, uint64_t max) {
    uint64_t value = 0;
    if (!is_number(text)) fatal("%s: expected a whole number from 0 to %llu, found \"%s\"", what, (unsigned long long)max, text);
    for (const char *c = text; *c; c++) {
        unsigned digit = (unsigned)(*c - '0');
        if (value > (max - digit) / 10) fatal("%s: %s is too large; the most is %llu", what, text, (unsigned long long)max);
        value = value * 10 + digit;
    }
    return value;
}

/* A number as JSON spells it, "0." before a point and nothing else added: no locale, no hexadecimal, no nan. */
static double parse_number(const char *what, const char *text, double min, double max) {
    char spelled[64];
    g4_json j;
    double value = NAN;
    int n = snprintf(spelled, sizeof spelled, "%s%s", *text == '.' ? "0" : "", text);
    if (n > 0 && n < (int)sizeof spelled && strpbrk(spelled, "0123456789") && !g4_json_parse(&j, spelled, (size_t)n, what, NULL)) {
        if (g4_json_double(&j, 0, &value)) value = NAN;
        g4_json_free(&j);
    }
    if (!(value >= min && value <= max)) fatal("%s: expected a number from %g to %g, found \"%s\"", what, min, max, text);
    return value;
}

static void set_option(arguments *a, const option *o, const char *name, const char *value) {
    char *field = (char *)a + o->field;
    if (o->kind == FLAG) *(int *)field = 1;
    if (o->kind == TEXT || o->kind == OPTIONAL_TEXT) *(const char **)field = value;
    if (o->kind == LIST) {
        const char ***list = (const char ***)(void *)field;
        *list = realloc(*list, ((size_t)a->n_stop + 1) * sizeof **list);
        if (!*list) fatal("out of memory for %d times %s", a->n_stop + 1, name);
        (*list)[a->n_stop++] = value;
    }
    if (o->kind == NUMBER) *(double *)field = parse_number(name, value, o->min, o->max);
    if (o->kind == INTEGER) {
        uint64_t n = parse_whole(name, value, (uint64_t)o->max);
        if ((double)n < o->min) fatal("%s: expected a whole number from %.0f to %.0f, found %s", name, o->min, o->max, value);
        *(int64_t *)field = (int64_t)n;
    }
}

static arguments parse_arguments(const command *c, int argc, char **argv) {
    arguments a = {.n = -1, .top_k = -1, .threads = -1, .ctx = -1, .chunk = -1, .port = -1, .parallel = -1, .queue = -1, .max_body = -1, .timeout = -1, .grace = -1, .temp = -1, .top_p = -1, .min_p = -1, .repeat_penalty = -1,
                   .rtol = -1, .atol = -1, .seconds = -1};
    a.rest = allocate((size_t)argc, sizeof *a.rest);
    for (int i = 2; i < argc; i++) {
        const char *arg = argv[i];
        if (*arg != '-') {
            int first = i == 2 && c->takes_model;
            if (first && !(c->bit == DETOKENIZE && is_number(arg))) a.model = arg;
            else if (a.n_rest < c->max_rest) a.rest[a.n_rest++] = arg;
            else if (c->takes_model) fatal("%s: unexpected argument \"%s\": MODEL comes right after the command, text after -p", c->name, arg);
            else fatal("%s: unexpected argument \"%s\"; usage: gemma4 %s %s", c->name, arg, c->name, c->usage);
            continue;
        }
        size_t length = !strncmp(arg, "--", 2) ? strcspn(arg, "=") : strlen(arg); /* --name=value and --name value */
        const option *o = options, *end = options + N_OPTIONS;
        while (o < end && !(o->letter && !strcmp(arg, o->letter)) && !(strlen(o->name) == length && !strncmp(arg, o->name, length))) o++;
        if (o == end) fatal("%s: unknown option %s; `gemma4 help %s` lists what there is", c->name, arg, c->name);
        if (!(o->commands & c->bit)) fatal("%s: does not take %s; `gemma4 help %s` lists what it takes", c->name, o->name, c->name);
        const char *value = arg[length] == '=' ? arg + length + 1 : NULL;
        if (o->kind == FLAG && value) fatal("%s: %s takes no value, found \"%s\"", c->name, o->name, value);
        if (o->kind == OPTIONAL_TEXT && !value) value = "";
        if (o->kind != FLAG && !value && i + 1 == argc) fatal("%s: %s needs a value: %s", c->name, arg, o->value);
        if (o->kind != FLAG && !value) value = argv[++i];
        set_option(&a, o, o->letter && !strcmp(arg, o->letter) ? o->letter : o->name, value);
    }
    if ((a.prompt != NULL) + (a.file != NULL) + (a.ids != NULL) > 1) fatal("%s: give one of -p, -f and --ids", c->name);
    const char *backend = getenv("GEMMA4_BACKEND"), *threads = getenv("GEMMA4_THREADS");
    if (!a.backend && backend && *backend) a.backend = backend;
    if (a.threads < 0 && threads && *threads && (c->bit & SIZED)) {
        a.threads = (int64_t)parse_whole("GEMMA4_THREADS", threads, 1024);
        if (a.threads < 1) fatal("GEMMA4_THREADS: expected a whole number from 1 to 1024, found %s", threads);
    }
    return a;
}

/* ---- Inputs -------------------------------------------------------------------------------------------------------------- */

typedef struct buffer {
    char *data; /* [n], counted: NUL is a byte like others */
    size_t n;
} buffer;

/* Appends the next byte; the room is a power of two that is not kept anywhere. */
static void push_byte(buffer *t, int byte) {
    if (!(t->n & (t->n + 1))) {
        size_t room = 2 * (t->n + 1);
        char *data = t->n < SIZE_MAX / 4 ? realloc(t->data, room) : NULL;
        if (!data) fatal("out of memory after %zu bytes of input", t->n);
        t->data = data;
    }
    t->data[t->n++] = (char)byte;
}

static buffer new_buffer(void) { return (buffer){allocate(1, 1), 0}; }

static void check_stdin(void) {
    if (ferror(stdin)) fatal("cannot read standard input: %s", strerror(errno));
}

/* One line without its \n; 0 at the end. */
static int read_line(buffer *line) {
    int c;
    line->n = 0;
    while ((c = getchar()) != EOF && c != '\n') push_byte(line, c);
    check_stdin();
    return c != EOF || line->n > 0;
}

/* All of a file, a pipe too, to its end; path NULL: of standard input. */
static buffer read_input(const char *path) {
    FILE *f = path ? open_to_read(path) : stdin;
    const char *name = path ? path : "standard input";
    buffer t = new_buffer();
    char part[65536];
    if (!path && is_terminal(stdin)) note("reading standard input up to its end (Ctrl-D)");
    for (size_t n; f && (n = fread(part, 1, sizeof part, f)) > 0;)
        for (size_t i = 0; i < n; i++) push_byte(&t, part[i]);
    if (!f || ferror(f)) fatal("cannot read %s: %s", name, strerror(errno));
    if (path) fclose(f);
    return t;
}

static int hex_digit(char c) {
    static const char digits[] = "0123456789abcdef0123456789ABCDEF";
    const char *at = c ? strchr(digits, c) : NULL;
    return at ? (int)(at - digits) % 16 : -1;
}

/* `name` is the option's, for messages. */
static buffer unescape(const char *name, const char *from) {
    static const char letters[] = "ntr\\", values[] = "\n\t\r\\";
    buffer t = new_buffer();
    for (const char *c = from; *c; c++) {
        const char *letter = *c == '\\' && c[1] ? strchr(letters, c[1]) : NULL;
        if (*c != '\\') push_byte(&t, *c);
        else if (letter) push_byte(&t, values[letter - letters]), c++;
        else if (c[1] == 'x' && hex_digit(c[2]) >= 0 && hex_digit(c[3]) >= 0) push_byte(&t, hex_digit(c[2]) << 4 | hex_digit(c[3])), c += 3;
        else fatal("%s with -e: at byte %zu, expected \\n, \\t, \\r, \\\\ or \\xHH, found \"%.4s\"", name, (size_t)(c - from), c);
    }
    return t;
}

static buffer input_text(const arguments *a) {
    if (a->prompt && a->escape) return unescape("-p", a->prompt);
    if (a->prompt) {
        buffer t = {allocate(strlen(a->prompt), 1), strlen(a->prompt)};
        memcpy(t.data, a->prompt, t.n);
        return t;
    }
    return read_input(a->file);
}

typedef struct id_list {
    int32_t *data; /* [n] */
    size_t n;
} id_list;

/* Appends a list like 2,818,5279 to *list. */
static void parse_ids(id_list *list, const char *what, const char *text, size_t length) {
    size_t commas = 0, item = 0;
    for (size_t i = 0; i < length; i++) commas += text[i] == ',';
    list->data = realloc(list->data, (list->n + commas + 1) * sizeof *list->data);
    if (!list->data) fatal("out of memory for %zu ids", list->n + commas + 1);
    if (!length) fatal("%s: the list is empty; expected ids parted by commas, like 2,818,5279", what);
    for (const char *c = text, *end = text + length;; c++) {
        const char *begin = c;
        int64_t value = 0;
        for (; c < end && *c >= '0' && *c <= '9'; c++) {
            value = value * 10 + (*c - '0');
            if (value > INT32_MAX) fatal("%s: item %zu does not fit 32 bits", what, item + 1);
        }
        if (c == begin || (c < end && *c != ',')) {
            int shown = 0;
            while (shown < 40 && begin + shown < end && begin[shown] != ',') shown++;
            fatal("%s: item %zu: expected a decimal integer, found \"%.*s\"", what, item + 1, shown, begin);
        }
        list->data[list->n++] = (int32_t)value;
        item++;
        if (c == end) return;
    }
}

static int has_file(const char *directory, const char *name) {
    char path[PATH_ROOM];
    g4_file f;
    if (snprintf(path, sizeof path, "%s/%s", directory, name) >= (int)sizeof path || g4_file_open(&f, path, 0, NULL)) return 0;
    g4_file_close(&f);
    return 1;
}

#ifndef G4_MODEL_DIR
#define G4_MODEL_DIR "" /* where `make install` puts the shipped model */
#endif
static const char *program_name = "gemma4"; /* argv[0] */

/* MODEL, or the shipped one: beside the program, where it was installed, or below the current directory. */
static const char *model_path(const arguments *a) {
    static char path[PATH_ROOM + 64];
    static const char *const below_program[] = {"models/austen", "../share/gemma4/austen"};
    if (a->model) return a->model;
    char directory[PATH_ROOM];
    program_path(program_name, directory);
    char *slash = strrchr(directory, '/');
    if (slash) *slash = 0;
    else strcpy(directory, ".");
    for (int i = 0; i < 4; i++) {
        if (i < 2) snprintf(path, sizeof path, "%s/%s", directory, below_program[i]);
        else snprintf(path, sizeof path, "%s", i == 2 ? G4_MODEL_DIR : "models/austen");
        if (*path && (has_file(path, "config.json") || has_file(path, "tokenizer.json"))) return path;
    }
    fatal("no MODEL was given after the command, and the shipped one, models/austen, is not beside the program in %s", directory);
}

/* ---- What the commands that run the model share ----------------------------------------------------------------------- */

typedef struct session {
    const char *path;
    g4_model *model;
    const g4_config *config;
    g4_tokenizer *tokenizer; /* NULL: none needed, or with --ids none found */
    g4_state *state;
    profile *profile;        /* NULL without --profile */
    FILE *trace;             /* of --profile=FILE */
    id_list prompt;
    int ctx, chunk;          /* of the state */
} session;

static session open_model(const arguments *a) {
    session s = {0};
    g4_error err;
    if (a->precision && precision_of(a->precision) < 0)
        fatal("--precision: expected f32, bf16 or q16, found \"%s\"", a->precision);
    s.path = model_path(a);
    double next = seconds() + 1; /* when progress is shown */
    static const char *const modes[] = {"auto", "none", "head", "all"}; /* g4_prefetch */
    int mode = 0;
    while (a->prefetch && mode < 4 && strcmp(a->prefetch, modes[mode])) mode++;
    if (mode == 4) fatal("--prefetch: expected none, head, all or auto, found \"%s\"", a->prefetch);
    s.model = g4_open(s.path, &(g4_options){.backend = a->backend, .no_mmap = a->no_mmap, .prefetch = (g4_prefetch)mode, .warn = warn,
                                            .progress = show_progress, .user = &next}, &err);
    if (!s.model) fatal("%s", err.text);
    s.config = g4_get_config(s.model);
    if (a->ctx > s.config->max_position_embeddings)
        fatal("--ctx: expected at most max_position_embeddings, %d, found %lld", s.config->max_position_embeddings, (long long)a->ctx);
    return s;
}

/* ctx is for when --ctx is not given; 0: the library's default. */
static g4_state_options state_options(const arguments *a, int ctx) {
    return (g4_state_options){.ctx = a->ctx > 0 ? (int)a->ctx : ctx,
                              .chunk = a->chunk > 0 ? (int)a->chunk : 0,
                              .threads = a->threads > 0 ? (int)a->threads : 0,
                              .precision = a->precision ? (g4_precision)precision_of(a->precision) : G4_F32};
}

/* Raw text gets one BOS, and never a second when it begins with one. */
static id_list encode(const g4_tokenizer *tok, const char *data, size_t n, int bos, g4_error *err) {
    int32_t *list, first = bos ? g4_token_id(tok, "<bos>") : -1;
    id_list result = {0};
    if (bos && first < 0) {
        g4_fail(err, "the tokenizer has no token <bos>, with which a text must begin");
        return result;
    }
    size_t count;
    if (g4_encode(tok, data, n, 0, &list, &count, err)) return result;
    int add = bos && !(count && list[0] == first);
    result.data = allocate(count + 1, sizeof *result.data);
    result.n = count + (size_t)add;
    if (add) result.data[0] = first;
    if (count) memcpy(result.data + add, list, count * sizeof *list);
    g4_free(list);
    return result;
}

/* Before anything slow, so that a path that cannot be written to is told at once. NULL without --profile=FILE. */
static FILE *open_profile_file(const arguments *a) {
    if (!a->profile || !*a->profile) return NULL;
    FILE *f = create_file(a->profile);
    if (!f) fatal("%s: cannot be created: %s", a->profile, strerror(errno));
    return f;
}

enum {
    FIT_PROMPT = 1, /* without --ctx the context is as long as the prompt */
    PIECES = 2      /* with --ids the tokenizer is opened too, if there is one, to show what ids stand for */
};

/* Model, ids and state. */
static session open_session(const arguments *a, int flags) {
    session s = open_model(a);
    g4_error err;
    const g4_config *c = s.config;
    if (!a->ids || (flags & PIECES)) s.tokenizer = g4_tokenizer_open(s.path, &err);
    if (a->ids) {
        parse_ids(&s.prompt, "--ids", a->ids, strlen(a->ids));
    } else {
        if (!s.tokenizer) fatal("%s (text needs a tokenizer; --ids does not)", err.text);
        buffer t = input_text(a);
        s.prompt = encode(s.tokenizer, t.data, t.n, 1, &err);
        if (!s.prompt.data) fatal("%s", err.text);
        free(t.data);
    }
    int32_t end = c->vocab_size;
    if (c->hidden_size_per_layer_input && c->vocab_size_per_layer_input < end) end = c->vocab_size_per_layer_input;
    for (size_t i = 0; i < s.prompt.n; i++)
        if (s.prompt.data[i] >= end)
            fatal("%s: item %zu: id %d is outside the vocabulary, expected 0 to %d", a->ids ? "--ids" : "the text's ids", i + 1,
                  (int)s.prompt.data[i], (int)end - 1);

    size_t n = s.prompt.n, most = (size_t)c->max_position_embeddings;
    g4_state_options o = state_options(a, !(flags & FIT_PROMPT) ? 0 : n < most ? (int)n : (int)most);
    size_t ctx = o.ctx ? (size_t)o.ctx : most < 4096 ? most : 4096;
    if (n > ctx) fatal("the prompt is longer than the context: n_prompt %zu, n_ctx %zu; --ctx N may be up to %zu here", n, ctx, most);
    s.trace = open_profile_file(a);
    if (a->profile && !(s.profile = profile_open(s.model, s.trace != NULL, &err))) fatal("%s", err.text);
    s.state = g4_state_open(s.model, &o, &err);
    if (!s.state) fatal("%s", err.text);
    const g4_state_options *got = g4_state_get_options(s.state);
    s.ctx = got->ctx;
    s.chunk = got->chunk;
#ifdef _OPENMP
    const char *built = "";
#else
    const char *built = " (built without OpenMP: one is used)";
#endif
    note("%s: backend %s, threads %d%s, %s, context %d", s.path, g4_model_backend(s.model), got->threads, built,
         precision_names[got->precision], s.ctx);
    return s;
}

/* For the end of a message about logits that are no numbers: mostly a weight of a damaged file is none either. Only then are all read. */
static const char *about_weights(const session *s) {
    static char text[sizeof(g4_error) + 4];
    g4_error err;
    if (!s->model->backend->host_memory || !g4_check_weights(s->model, &err)) return "";
    snprintf(text, sizeof text, "; %s", err.text);
    return text;
}

static void close_session(session *s) {
    free(s->prompt.data);
    g4_state_close(s->state);
    profile_close(s->profile);
    g4_tokenizer_close(s->tokenizer);
    g4_close(s->model);
}

static void report_profile(const session *s, const char *trace_path) {
    g4_error err;
    if (!s->profile) return;
    if (!quiet) profile_print(s->profile, stderr);
    if (s->trace && profile_write(&s->profile, 1, s->trace, trace_path, &err)) fatal("%s", err.text);
}

static float *new_logits(const session *s, size_t rows) { return allocate((size_t)s->config->vocab_size, rows * sizeof(float)); }

/* The whole prompt; logits [V] of its last token. */
static int forward_prompt(session *s, float *logits, g4_error *err) {
    int T = (int)s->prompt.n;
    g4_row *rows = allocate((size_t)T, sizeof *rows);
    for (int t = 0; t < T; t++) rows[t] = (g4_row){.token = s->prompt.data[t], .pos = t, .want_logits = t == T - 1};
    int failed = g4_forward(s->state, rows, T, logits, err);
    free(rows);
    return failed;
}

/* The whole prompt; each(user, t, logits [V]) for every token in order. Holds a chunk of logits, and of a large vocabulary less. */
static int forward_each(session *s, void (*each)(void *user, int t, const float *logits), void *user, g4_error *err) {
    int T = (int)s->prompt.n, V = s->config->vocab_size, step = (64 << 20) / 4 / V;
    if (step < 1) step = 1;
    if (step > s->chunk) step = s->chunk;
    g4_row *rows = allocate((size_t)step, sizeof *rows);
    float *logits = new_logits(s, (size_t)step);
    int failed = 0;
    for (int begin = 0; begin < T && !failed; begin += step) {
        int n = T - begin < step ? T - begin : step;
        for (int i = 0; i < n; i++) rows[i] = (g4_row){.token = s->prompt.data[begin + i], .pos = begin + i, .want_logits = 1};
        failed = g4_forward(s->state, rows, n, logits, err);
        for (int i = 0; i < n && !failed; i++) each(user, begin + i, logits + (size_t)i * V);
    }
    free(rows);
    free(logits);
    return failed;
}

static buffer decode(const g4_tokenizer *tok, const id_list *list, int flags, const char *what) {
    g4_error err;
    buffer t = new_buffer();
    const char *piece;
    size_t n;
    g4_decoder *d = g4_decoder_open(tok, flags, &err);
    if (!d) fatal("%s: %s", what, err.text);
    for (size_t i = 0; i <= list->n; i++) {
        if (i < list->n && list->data[i] >= g4_tokenizer_size(tok))
            fatal("%s: item %zu: id %d is outside the tokenizer's vocabulary, expected 0 to %d", what, i + 1, (int)list->data[i],
                  g4_tokenizer_size(tok) - 1);
        int failed = i < list->n ? g4_decode_push(d, list->data[i], &piece, &n, &err) : g4_decode_end(d, &piece, &n, &err);
        if (failed) fatal("%s: %s", what, err.text);
        for (size_t k = 0; k < n; k++) push_byte(&t, piece[k]);
    }
    g4_decoder_close(d);
    return t;
}

/* What an id stands for, as JSON; nothing without a tokenizer. */
static void put_piece(const g4_tokenizer *tok, int32_t id) {
    if (!tok || id >= g4_tokenizer_size(tok)) return;
    buffer t = decode(tok, &(id_list){&id, 1}, 0, "piece");
    put_json_string(t.data, t.n);
    free(t.data);
}

/* ---- run ----------------------------------------------------------------------------------------------------------------- */

/* An instruction-tuned checkpoint brings a chat template, of its own file or inside tokenizer_config.json or GGUF's keys. */
static int has_chat_template(const char *path) {
    char name[PATH_ROOM];
    g4_file f;
    g4_json j;
    char *template;
    size_t size;
    if (g4_is_gguf(path)) {
        int found = !g4_gguf_text(path, "tokenizer.chat_template", &template, &size, NULL) && template;
        g4_free(template);
        return found;
    }
    if (has_file(path, "chat_template.jinja")) return 1;
    if (snprintf(name, sizeof name, "%s/tokenizer_config.json", path) >= (int)sizeof name || g4_file_open(&f, name, 0, NULL)) return 0;
    int found = 0;
    if (!g4_json_parse(&j, (const char *)f.data, f.size, name, NULL)) {
        found = g4_json_get(&j, 0, "chat_template") != 0;
        g4_json_free(&j);
    }
    g4_file_close(&f);
    return found;
}

/* A list like 5:-100,17:2.5. */
static g4_logit_bias *parse_logit_bias(const char *text, int V, int *n) {
    g4_logit_bias *list = allocate(strlen(text) / 2 + 1, sizeof *list);
    char what[48], number[64];
    *n = 0;
    for (const char *c = text;; c++) {
        int32_t id = 0;
        const char *begin = c;
        snprintf(what, sizeof what, "--logit-bias, item %d", *n + 1);
        for (; *c >= '0' && *c <= '9'; c++)
            if ((id = id * 10 + (*c - '0')) >= V) fatal("%s: expected an id from 0 to %d", what, V - 1);
        size_t length = *c == ':' ? strcspn(c + 1, ",") : 0;
        if (c == begin || !length || length >= sizeof number) fatal("%s: expected ID:NUMBER, like 5:-100, found \"%.40s\"", what, begin);
        memcpy(number, c + 1, length);
        number[length] = 0;
        list[(*n)++] = (g4_logit_bias){id, (float)parse_number(what, number, -1e6, 1e6)};
        c += 1 + length;
        if (!*c) return list;
    }
}

/* logit_bias in it is the caller's to free. */
static g4_sampling sampling_of(const arguments *a, const g4_model *model) {
    g4_sampling how = g4_default_sampling(model);
    if (a->temp >= 0) how.temperature = (float)a->temp;
    if (a->top_k >= 0) how.top_k = (int)a->top_k;
    if (a->top_p >= 0) how.top_p = (float)a->top_p;
    if (a->min_p >= 0) how.min_p = (float)a->min_p;
    if (a->repeat_penalty >= 0) how.repeat_penalty = (float)a->repeat_penalty;
    how.frequency_penalty = (float)a->frequency_penalty, how.presence_penalty = (float)a->presence_penalty;
    if (a->logit_bias) how.logit_bias = parse_logit_bias(a->logit_bias, g4_get_config(model)->vocab_size, &how.n_logit_bias);
    how.seed = a->seed ? parse_whole("--seed", a->seed, UINT64_MAX) : (uint64_t)time(NULL) * 1000003u + (uint64_t)(seconds() * 1e9);
    return how;
}

/* "off", or tokens that a step may draft. */
static int parse_speculate(const char *text) {
    if (!strcmp(text, "off")) return 0;
    return (int)parse_whole("--speculate (or off)", text, 64);
}

/* For one text at a time. The scalar backend takes as long for two rows in one step as in two: there drafts cannot pay. */
static int draft_tokens(const arguments *a, const g4_model *model) {
    if (a->speculate) return parse_speculate(a->speculate);
    return strcmp(g4_model_backend(model), "scalar") ? DRAFT_TOKENS : 0;
}

static int command_run(const arguments *a) {
    if (a->seed) parse_whole("--seed", a->seed, UINT64_MAX); /* before anything slow */
    if (a->speculate) parse_speculate(a->speculate);
    g4_error err;
    session s = open_session(a, 0);
    g4_engine_options eo = {.speculate = draft_tokens(a, s.model), .clock = seconds};
    g4_sampling how = sampling_of(a, s.model);
    if (!a->ids && has_chat_template(s.path))
        note("hint: this model is instruction-tuned, and run continues raw text; chat speaks with it through its template");
    int n_prompt = (int)s.prompt.n, wanted = a->n >= 0 ? (int)a->n : 128, n = 0;
    g4_tokenizer *tok = a->ids ? NULL : s.tokenizer;
    if (a->n_stop && !tok) fatal("--stop: the new text is searched for it, and with --ids there is none");
    const char **stop = allocate((size_t)a->n_stop, sizeof *stop);
    for (int i = 0; i < a->n_stop; i++) {
        buffer t = a->escape ? unescape("--stop", a->stop[i]) : new_buffer();
        for (const char *c = a->stop[i]; !a->escape && *c; c++) push_byte(&t, *c);
        push_byte(&t, 0);
        if (strlen(t.data) + 1 < t.n) fatal("--stop: \\x00 cannot be looked for");
        stop[i] = t.data;
    }
    g4_request request = {.prompt = s.prompt.data, .n_prompt = s.prompt.n, .sampling = how, .max_new = wanted, .ignore_eos = a->ignore_eos, .stop = stop, .n_stop = a->n_stop};
    g4_engine *e = g4_engine_open(s.state, tok, &eo, &err);
    if (!e || g4_engine_add(e, &request, &err) < 0) fatal("%s", err.text);
    g4_finish finish = G4_RUNNING;
    g4_engine_stats stats = {0};
    profile_start(s.profile);
    while (g4_engine_pending(e)) {
        const g4_event *event;
        double sampled = stats.sampling_seconds;
        int n_events = g4_engine_step(e, &event);
        g4_engine_get_stats(e, &stats);
        if (n_events) profile_sampling(s.profile, seconds() - (stats.sampling_seconds - sampled));
        for (int i = 0; i < n_events; i++) {
            if (event[i].finish == G4_FINISH_ERROR) fatal("%s%s", event[i].error, about_weights(&s));
            fwrite(event[i].text, 1, event[i].n_text, stdout);
            if (!tok && event[i].token >= 0) printf("%s%d", event[i].n_new > 1 ? " " : "", (int)event[i].token);
            n = event[i].n_new;
            finish = event[i].finish;
        }
        if (n_events) flush_results();
    }
    profile_stop(s.profile);
    if (!tok || is_terminal(stdout)) putchar('\n');
    flush_results();
    if (finish == G4_FINISH_LENGTH && n < wanted)
        note("stopped: the context is full (n_prompt %d, %d new, n_ctx %d); --ctx N makes it longer", n_prompt, n, s.ctx);
    char drafts[128] = "";
    if (stats.proposed)
        snprintf(drafts, sizeof drafts, "; drafted %llu, right %llu, %.2f tokens per step", (unsigned long long)stats.proposed, (unsigned long long)stats.accepted,
                 (double)n / (double)(n - (int)stats.accepted));
    note("prompt %d tokens, %.2f/s; decode %d tokens, %.2f/s%s; seed %llu", n_prompt, stats.prompt_seconds > 0 ? n_prompt / stats.prompt_seconds : 0, n,
         stats.decode_seconds > 0 ? (n - (finish != G4_FINISH_STOP_ID)) / stats.decode_seconds : 0, drafts, (unsigned long long)how.seed);
    report_profile(&s, a->profile);
    g4_engine_close(e);
    for (int i = 0; i < a->n_stop; i++) free((void *)stop[i]);
    free(stop);
    free((void *)how.logit_bias);
    close_session(&s);
    return 0;
}

/* ---- tokenize, detokenize -------------------------------------------------------------------------------------------------- */

static g4_tokenizer *open_tokenizer(const arguments *a) {
    g4_error err;
    g4_tokenizer *tok = g4_tokenizer_open(model_path(a), &err);
    if (!tok) fatal("%s", err.text);
    return tok;
}

static void put_ids(const id_list *list, const char *separator) {
    for (size_t i = 0; i < list->n; i++) printf("%s%d", i ? separator : "", (int)list->data[i]);
}

/* Standard input as JSON objects, one a line. */
typedef struct json_lines {
    buffer line;
    g4_json json; /* the line, parsed */
    size_t number;
    char what[48]; /* "standard input, line 3" */
} json_lines;

/* The next line's member `key`, which must be of that kind; 0 at the end. */
static uint32_t next_json(json_lines *in, const char *key, g4_json_kind kind, const char *kind_text) {
    g4_error err;
    if (in->number) g4_json_free(&in->json);
    if (!read_line(&in->line)) return 0;
    snprintf(in->what, sizeof in->what, "standard input, line %zu", ++in->number);
    if (g4_json_parse(&in->json, in->line.data, in->line.n, in->what, &err)) fatal("%s", err.text);
    uint32_t node = g4_json_get(&in->json, 0, key);
    if (!node || in->json.nodes[node].kind != kind) fatal("%s: expected an object in which \"%s\" is %s", in->what, key, kind_text);
    return node;
}

static int command_tokenize(const arguments *a) {
    g4_error err;
    json_lines in = {.line = new_buffer()};
    uint32_t node;
    if (a->jsonl && (a->prompt || a->file)) fatal("tokenize: --jsonl reads standard input; leave out -p and -f");
    g4_tokenizer *tok = open_tokenizer(a);
    if (!a->jsonl) {
        buffer t = input_text(a);
        id_list list = encode(tok, t.data, t.n, a->bos, &err);
        if (!list.data) fatal("%s", err.text);
        put_ids(&list, " ");
        putchar('\n');
        free(list.data);
        free(t.data);
    }
    while (a->jsonl && (node = next_json(&in, "text", G4_JSON_STRING, "a string"))) {
        id_list list = encode(tok, g4_json_string(&in.json, node), in.json.nodes[node].size, a->bos, &err);
        if (!list.data) fatal("%s: %s", in.what, err.text);
        printf("{\"ids\": [");
        put_ids(&list, ", ");
        printf("]}\n");
        flush_results();
        free(list.data);
    }
    free(in.line.data);
    g4_tokenizer_close(tok);
    return 0;
}

static int command_detokenize(const arguments *a) {
    json_lines in = {.line = new_buffer()};
    uint32_t array;
    int flags = a->skip_special ? G4_SKIP_SPECIAL : 0;
    if (a->jsonl && a->n_rest) fatal("detokenize: --jsonl reads standard input; leave out the ids");
    g4_tokenizer *tok = open_tokenizer(a);
    if (!a->jsonl) {
        id_list list = {0};
        for (int i = 0; i < a->n_rest; i++) parse_ids(&list, "ids", a->rest[i], strlen(a->rest[i]));
        buffer t = a->n_rest ? new_buffer() : read_input(NULL);
        for (size_t i = 0, end; i < t.n; i = end + 1) {
            for (end = i; end < t.n && !strchr(" \t\r\n", t.data[end]); end++) {}
            if (end > i) parse_ids(&list, "standard input", t.data + i, end - i);
        }
        buffer result = decode(tok, &list, flags, "ids");
        fwrite(result.data, 1, result.n, stdout);
        if (is_terminal(stdout)) putchar('\n');
        free(result.data);
        free(t.data);
        free(list.data);
    }
    while (a->jsonl && (array = next_json(&in, "ids", G4_JSON_ARRAY, "an array"))) {
        const g4_json_node *nodes = in.json.nodes;
        id_list list = {allocate(nodes[array].size, sizeof *list.data), 0};
        for (uint32_t node = nodes[array].first; node; node = nodes[node].next) {
            int64_t id;
            if (g4_json_int(&in.json, node, &id) || id < 0 || id > INT32_MAX)
                fatal("%s: item %zu of \"ids\": expected an integer that is an id", in.what, list.n + 1);
            list.data[list.n++] = (int32_t)id;
        }
        buffer result = decode(tok, &list, flags, in.what);
        printf("{\"text\": ");
        put_json_string(result.data, result.n);
        printf("}\n");
        flush_results();
        free(result.data);
        free(list.data);
    }
    free(in.line.data);
    g4_tokenizer_close(tok);
    return 0;
}

/* ---- logits, trace, hash, score --------------------------------------------------------------------------------------------- */

static void need_input(const arguments *a, const char *name) {
    if (!a->prompt && !a->file && !a->ids) fatal("%s: give --ids A,B,..., -p TEXT or -f FILE", name);
}

/* The five best, ties to the lowest id. */
static void print_best(const session *s, const float *logits) {
    int V = s->config->vocab_size, best[5], n = 0, at_cap = 0;
    float cap = s->config->final_logit_softcapping;
    for (int i = 0; i < V; i++) {
        if (!isfinite(logits[i])) fatal("the logit of id %d is %g: the model's output is broken%s", i, (double)logits[i], about_weights(s));
        at_cap += cap > 0 && fabsf(logits[i]) > 0.99f * cap;
        int k = n < 5 ? n++ : 5;
        for (; k > 0 && logits[i] > logits[best[k - 1]]; k--)
            if (k < 5) best[k] = best[k - 1];
        if (k < 5) best[k] = i;
    }
    for (int k = 0; k < n; k++) {
        printf("%6d  %11.6f  ", best[k], (double)logits[best[k]]);
        put_piece(s->tokenizer, best[k]);
        putchar('\n');
    }
    flush_results();
    if (at_cap > V / 100)
        note("warning: %d of %d logits are within 1 %% of the softcap %g; are weights scaled twice?", at_cap, V, (double)cap);
}

static void keep_last(void *user, int t, const float *logits) {
    const session *s = ((void **)user)[0];
    if (t == (int)s->prompt.n - 1) memcpy(((void **)user)[1], logits, (size_t)s->config->vocab_size * sizeof *logits);
}

/* Every position's tensors into a file; logits [V] of the last one. The first id runs once more, ahead, for the layout. */
static int write_trace(session *s, const char *path, const char *glob, float *logits, g4_error *err) {
    char metadata[256];
    g4_row row = {.token = s->prompt.data[0], .want_logits = 1};
    trace_file *f = trace_open(s->prompt.data, (int)s->prompt.n, glob, err);
    if (!f) return -1;
    snprintf(metadata, sizeof metadata, "{\"program\":\"gemma4.c %s\",\"backend\":\"%s\",\"precision\":\"%s\"}", G4_VERSION,
             g4_model_backend(s->model), precision_names[g4_state_get_options(s->state)->precision]);
    g4_set_trace(s->state, trace_layout, f);
    int failed = g4_forward(s->state, &row, 1, logits, err) || g4_truncate(s->state, 0, 0, err) || trace_start(f, path, metadata, err);
    if (!failed) {
        g4_set_trace(s->state, trace_rows, f);
        failed = forward_each(s, keep_last, (void *[]){s, logits}, err);
    }
    g4_set_trace(s->state, NULL, NULL);
    if (!failed) return trace_finish(f, err);
    trace_discard(f);
    return -1;
}

static int logits_or_trace(const arguments *a, const char *name, const char *glob) {
    g4_error err;
    need_input(a, name);
    if (!a->output && !strcmp(name, "trace")) note("hint: no -o FILE was given, so the intermediate tensors go nowhere");
    session s = open_session(a, FIT_PROMPT | PIECES);
    float *logits = new_logits(&s, 1);
    profile_start(s.profile);
    if (a->output ? write_trace(&s, a->output, glob, logits, &err) : forward_prompt(&s, logits, &err)) fatal("%s", err.text);
    profile_stop(s.profile);
    print_best(&s, logits);
    report_profile(&s, a->profile);
    free(logits);
    close_session(&s);
    return 0;
}

static int command_logits(const arguments *a) { return logits_or_trace(a, "logits", "ids,logits"); }

static int command_trace(const arguments *a) {
    return logits_or_trace(a, "trace", a->tensors);
}

static int command_diff(const arguments *a) {
    g4_error err;
    if (a->n_rest != 2) fatal("diff: expected two files, found %d; usage: gemma4 diff A B", a->n_rest);
    double rtol = a->rtol, atol = a->atol;
    if (rtol < 0) rtol = atol < 0 ? 1e-5 : 0;
    if (atol < 0) atol = 0;
    int result = trace_diff(a->rest[0], a->rest[1], rtol, atol, stdout, &err);
    if (result < 0) fatal("%s", err.text);
    return result;
}

typedef struct hash_state {
    uint64_t hash;
    int V, finite;
} hash_state;

static void hash_row(void *user, int t, const float *logits) {
    hash_state *h = user;
    (void)t;
    for (int i = 0; i < h->V; i++) {
        uint32_t bits;
        memcpy(&bits, &logits[i], 4);
        h->finite &= !!isfinite(logits[i]);
        for (int b = 0; b < 32; b += 8) h->hash = (h->hash ^ (bits >> b & 255)) * 0x100000001b3u; /* FNV-1a, little-endian on every host */
    }
}

static int command_hash(const arguments *a) {
    g4_error err;
    need_input(a, "hash");
    session s = open_session(a, FIT_PROMPT);
    hash_state h = {0xcbf29ce484222325u, s.config->vocab_size, 1};
    if (forward_each(&s, hash_row, &h, &err)) fatal("%s", err.text);
    if (!h.finite) fatal("hash: logits that are not finite numbers: the model's output is broken%s", about_weights(&s));
    printf("%016llx\n", (unsigned long long)h.hash);
    close_session(&s);
    return 0;
}

typedef struct score_state {
    const id_list *prompt;
    int V;
    double *logprob; /* [T]; 0 has none */
} score_state;

static void score_row(void *user, int t, const float *logits) {
    score_state *s = user;
    if ((size_t)t + 1 < s->prompt->n) s->logprob[t + 1] = logits[s->prompt->data[t + 1]] - g4_log_sum_exp(logits, s->V);
}

static int command_score(const arguments *a) {
    g4_error err;
    session s = open_session(a, FIT_PROMPT | PIECES);
    size_t T = s.prompt.n;
    if (T < 2) fatal("score: %zu token has none before it to be judged by; expected two at least", T);
    score_state score = {&s.prompt, s.config->vocab_size, allocate(T, sizeof(double))};
    if (forward_each(&s, score_row, &score, &err)) fatal("%s", err.text);
    double sum = 0;
    for (size_t t = 1; t < T; t++) {
        if (isnan(score.logprob[t])) fatal("score: the logits at position %zu are not numbers: the model's output is broken%s", t - 1, about_weights(&s));
        sum += score.logprob[t];
    }
    double perplexity = g4_exp(-sum / (double)(T - 1));
    if (a->json) printf("{\"tokens\": [");
    for (size_t t = 0; t < T; t++) {
        if (a->json) {
            printf("%s{\"id\": %d, \"logprob\": ", t ? ", " : "", (int)s.prompt.data[t]);
            put_json_number(t ? score.logprob[t] : NAN);
            if (s.tokenizer && s.prompt.data[t] < g4_tokenizer_size(s.tokenizer)) {
                printf(", \"piece\": ");
                put_piece(s.tokenizer, s.prompt.data[t]);
            }
            putchar('}');
        } else {
            printf("%6zu %7d  ", t, (int)s.prompt.data[t]);
            if (t) printf("%12.6f  ", score.logprob[t]);
            else printf("%12s  ", "-");
            put_piece(s.tokenizer, s.prompt.data[t]);
            putchar('\n');
        }
    }
    if (a->json) {
        printf("], \"scored\": %zu, \"sum\": ", T - 1);
        put_json_number(sum);
        printf(", \"perplexity\": ");
        put_json_number(perplexity);
        printf("}\n");
    } else {
        printf("scored %zu\nsum %.6f\nperplexity %.6f\n", T - 1, sum, perplexity);
    }
    free(score.logprob);
    close_session(&s);
    return 0;
}

/* ---- info ----------------------------------------------------------------------------------------------------------------- */

typedef struct sizes {
    double parameters, embedding, per_layer_table; /* doubles: exact up to 2^53 */
    double streamed, streamed_bytes, row_bytes;    /* read for each token; rows of the two tables beside that */
} sizes;

double type_bytes(g4_dtype type) { return (double)g4_types[type].bytes / g4_types[type].block; }

static double count(const g4_tensor *t) { return t->data ? (double)t->rows * (double)t->cols : 0; }

static void add_streamed(sizes *s, const g4_tensor *t, double share) {
    s->streamed += share * count(t);
    s->streamed_bytes += share * count(t) * type_bytes(t->type);
}

static sizes measure(const g4_model *m) {
    const g4_config *c = &m->config;
    sizes s = {.embedding = count(&m->embed_tokens), .per_layer_table = count(&m->embed_tokens_per_layer)};
    s.parameters = s.embedding + s.per_layer_table;
    const g4_tensor *single[] = {&m->per_layer_model_projection, &m->per_layer_projection_norm, &m->norm};
    for (int i = 0; i < 3; i++) {
        s.parameters += count(single[i]);
        add_streamed(&s, single[i], 1);
    }
    if (m->lm_head.data != m->embed_tokens.data) s.parameters += count(&m->lm_head);
    add_streamed(&s, &m->lm_head, 1);
    for (int l = 0; l < c->num_hidden_layers; l++) {
        const g4_tensor *t = (const g4_tensor *)&m->layers[l]; /* a g4_layer is tensors only */
        for (; t < (const g4_tensor *)&m->layers[l + 1]; t++) {
            int expert = t == &m->layers[l].experts_gate_up_proj || t == &m->layers[l].experts_up_proj || t == &m->layers[l].experts_down_proj;
            s.parameters += count(t);
            add_streamed(&s, t, expert && c->num_experts ? (double)c->top_k_experts / c->num_experts : 1);
        }
    }
    s.row_bytes = (double)m->embed_tokens.cols * type_bytes(m->embed_tokens.type);
    if (m->embed_tokens_per_layer.data) s.row_bytes += (double)m->embed_tokens_per_layer.cols * type_bytes(m->embed_tokens_per_layer.type);
    return s;
}

/* The model's tensors by what they are for, with the types that a GGUF file mixes. */
typedef struct tensor_group {
    const char *name;
    double parameters, bytes, per_token; /* bytes read for each token: of the tables a row, of the experts those chosen */
    int types[G4_N_TYPES];               /* tensors of each type */
} tensor_group;
enum { EMBED_TOKENS, EMBED_PER_LAYER, LM_HEAD, ATTENTION, MLP, EXPERTS, PER_LAYER_INPUTS, NORMS, ALL_GROUPS, N_TENSOR_GROUPS };

/* All matrices of a layer; the rest of it is vectors, and the router. */
static const struct {
    int group;
    size_t field;
} matrices[] = {
    {ATTENTION, offsetof(g4_layer, q_proj)}, {ATTENTION, offsetof(g4_layer, k_proj)}, {ATTENTION, offsetof(g4_layer, v_proj)},
    {ATTENTION, offsetof(g4_layer, o_proj)}, {MLP, offsetof(g4_layer, gate_proj)}, {MLP, offsetof(g4_layer, up_proj)},
    {MLP, offsetof(g4_layer, down_proj)}, {EXPERTS, offsetof(g4_layer, experts_gate_up_proj)}, {EXPERTS, offsetof(g4_layer, experts_up_proj)},
    {EXPERTS, offsetof(g4_layer, experts_down_proj)}, {PER_LAYER_INPUTS, offsetof(g4_layer, per_layer_input_gate)},
    {PER_LAYER_INPUTS, offsetof(g4_layer, per_layer_projection)},
};

static void add_to_group(tensor_group *groups, int which, const g4_tensor *t, double share) {
    double bytes = count(t) * type_bytes(t->type);
    if (!t->data) return;
    for (tensor_group *g = &groups[which];; g = &groups[ALL_GROUPS]) {
        g->parameters += count(t);
        g->bytes += bytes;
        g->per_token += share * bytes;
        g->types[t->type]++;
        if (g == &groups[ALL_GROUPS]) return;
    }
}

static void group_tensors(const g4_model *m, tensor_group groups[N_TENSOR_GROUPS]) {
    static const char *const names[] = {"embed_tokens", "embed_tokens_per_layer", "lm_head", "attention", "mlp", "experts", "per-layer inputs", "norms, scales, router", "all"};
    const g4_config *c = &m->config;
    const int tied = m->lm_head.data == m->embed_tokens.data;
    for (int i = 0; i < N_TENSOR_GROUPS; i++) groups[i] = (tensor_group){.name = names[i]};
    add_to_group(groups, EMBED_TOKENS, &m->embed_tokens, (tied ? 1 : 0) + 1.0 / (double)m->embed_tokens.rows); /* a row, and as the head all of it */
    if (m->embed_tokens_per_layer.data) add_to_group(groups, EMBED_PER_LAYER, &m->embed_tokens_per_layer, 1.0 / (double)m->embed_tokens_per_layer.rows);
    if (!tied) add_to_group(groups, LM_HEAD, &m->lm_head, 1);
    add_to_group(groups, PER_LAYER_INPUTS, &m->per_layer_model_projection, 1);
    add_to_group(groups, NORMS, &m->per_layer_projection_norm, 1);
    add_to_group(groups, NORMS, &m->norm, 1);
    for (int l = 0; l < c->num_hidden_layers; l++)
        for (const g4_tensor *t = (const g4_tensor *)&m->layers[l]; t < (const g4_tensor *)&m->layers[l + 1]; t++) {
            size_t field = (size_t)((const char *)t - (const char *)&m->layers[l]), k = 0;
            while (k < sizeof matrices / sizeof matrices[0] && matrices[k].field != field) k++;
            int group = k < sizeof matrices / sizeof matrices[0] ? matrices[k].group : NORMS;
            add_to_group(groups, group, t, group == EXPERTS && c->num_experts ? (double)c->top_k_experts / c->num_experts : 1);
        }
}

static const char *kind_name(const g4_layer_config *l) { return l->type == G4_SLIDING_ATTENTION ? "sliding_attention" : "full_attention"; }

typedef struct figure {
    const char *name, *unit;
    double value;
} figure;

static int decimals(double x) { return x == floor(x) ? 0 : 6; }

static int command_info(const arguments *a) {
    g4_error err;
    session s = open_model(a);
    const g4_config *c = s.config;
    if (a->check && !s.model->backend->host_memory) fatal("info: --check reads weights in the memory of this machine; choose --backend scalar");
    if (a->check && g4_check_weights(s.model, &err)) fatal("%s: %s", s.path, err.text);
    sizes z = measure(s.model);
    tensor_group groups[N_TENSOR_GROUPS];
    group_tensors(s.model, groups);
    g4_state_options o = state_options(a, c->max_position_embeddings < 4096 ? c->max_position_embeddings : 4096);
    size_t kv = 0, memory = g4_state_bytes(s.model, &o, &kv);
    if (!memory) fatal("info: a state with --ctx %d and --chunk %d would not fit the address space", o.ctx, o.chunk);
    g4_tokenizer *tok = g4_tokenizer_open(s.path, &err);
    const figure figures[] = {
        {"vocab_size", "", c->vocab_size}, {"hidden_size", "", c->hidden_size}, {"num_hidden_layers", "", c->num_hidden_layers},
        {"num_attention_heads", "", c->num_attention_heads}, {"hidden_size_per_layer_input", "", c->hidden_size_per_layer_input},
        {"vocab_size_per_layer_input", "", c->hidden_size_per_layer_input ? c->vocab_size_per_layer_input : 0},
        {"sliding_window", "", c->sliding_window}, {"num_kv_shared_layers", "", c->num_kv_shared_layers},
        {"max_position_embeddings", "", c->max_position_embeddings}, {"num_experts", "", c->num_experts},
        {"top_k_experts", "", c->top_k_experts}, {"moe_intermediate_size", "", c->moe_intermediate_size},
        {"final_logit_softcapping", "", (double)c->final_logit_softcapping},
        {"parameters", "", z.parameters}, {"embedding_parameters", "", z.embedding}, {"per_layer_table_parameters", "", z.per_layer_table},
        {"streamed_parameters_per_token", "", z.streamed}, {"streamed_bytes_per_token", " bytes", z.streamed_bytes},
        {"table_row_bytes_per_token", " bytes", z.row_bytes}, {"file_bytes", " bytes", (double)g4_checkpoint_bytes(s.model)},
        {"ctx", "", o.ctx}, {"kv_bytes", " bytes", (double)kv}, {"state_bytes", " bytes, K/V included", (double)memory},
    };
    const int n_figures = sizeof figures / sizeof *figures;
    if (a->json) {
        printf("{\"model\": ");
        put_json_string(s.path, strlen(s.path));
        printf(", \"model_type\": ");
        put_json_string(c->model_type, strlen(c->model_type));
        for (const figure *f = figures; f < figures + n_figures; f++) printf(", \"%s\": %.*f", f->name, decimals(f->value), f->value);
        printf(", \"backend\": \"%s\", \"tokenizer_size\": %d", g4_model_backend(s.model), tok ? g4_tokenizer_size(tok) : 0);
        printf(", \"attention_k_eq_v\": %s", c->attention_k_eq_v ? "true" : "false");
        printf(", \"tie_word_embeddings\": %s, \"eos_token_id\": [", c->tie_word_embeddings ? "true" : "false");
        for (int i = 0; i < c->n_eos; i++) printf("%s%d", i ? ", " : "", (int)c->eos_token_id[i]);
        printf("], \"layers\": [");
        for (int l = 0; l < c->num_hidden_layers; l++) {
            const g4_layer_config *lc = &c->layers[l];
            printf("%s{\"type\": \"%s\", \"head_dim\": %d, \"num_key_value_heads\": %d", l ? ", " : "", kind_name(lc), lc->head_dim, lc->num_key_value_heads);
            printf(", \"intermediate_size\": %d, \"kv_layer\": %d}", lc->intermediate_size, lc->kv_layer);
        }
        printf("], \"tensors\": [");
        for (const tensor_group *g = groups; g < groups + N_TENSOR_GROUPS; g++) {
            const char *comma = "";
            if (!g->parameters) continue;
            printf("%s{\"name\": \"%s\", \"parameters\": %.0f, \"bytes\": %.0f, \"bits_per_weight\": %.4f, \"bytes_per_token\": %.0f, \"types\": {",
                   g == groups ? "" : ", ", g->name, g->parameters, g->bytes, 8 * g->bytes / g->parameters, g->per_token);
            for (int t = 0; t < G4_N_TYPES; t++) {
                if (!g->types[t]) continue;
                printf("%s\"%s\": %d", comma, g4_types[t].name, g->types[t]);
                comma = ", ";
            }
            printf("}}");
        }
        printf("], \"ignored\": [");
        const char *name;
        for (int i = 0; (name = g4_checkpoint_ignored(s.model, i)); i++) {
            if (i) printf(", ");
            put_json_string(name, strlen(name));
        }
        printf("]}\n");
    } else {
        printf("%-30s %s\n%-30s %s\n%-30s %s\n", "model", s.path, "model_type", c->model_type, "backend", g4_model_backend(s.model));
        if (tok) printf("%-30s %d ids\n", "tokenizer", g4_tokenizer_size(tok));
        else printf("%-30s none: %s\n", "tokenizer", err.text);
        printf("%-30s", "eos_token_id");
        for (int i = 0; i < c->n_eos; i++) printf(" %d", (int)c->eos_token_id[i]);
        printf("%s\n", c->n_eos ? "" : " none");
        for (const figure *f = figures; f < figures + n_figures; f++) printf("%-30s %.*f%s\n", f->name, decimals(f->value), f->value, f->unit);
        printf("\nlayer  type               head_dim  kv_heads  intermediate  keys and values\n");
        for (int l = 0; l < c->num_hidden_layers; l++) {
            const g4_layer_config *lc = &c->layers[l];
            printf("%5d  %-17s  %8d  %8d  %12d  ", l, kind_name(lc), lc->head_dim, lc->num_key_value_heads, lc->intermediate_size);
            if (lc->kv_layer != l) printf("of layer %d\n", lc->kv_layer);
            else printf("own%s\n", s.model->layers[l].v_proj.data ? "" : ", V from k_proj");
        }
        printf("\n%-24s %13s %13s %12s %13s  types, number of tensors\n", "tensors", "parameters", "bytes", "bits/weight", "bytes/token");
        for (const tensor_group *g = groups; g < groups + N_TENSOR_GROUPS; g++) {
            const char *comma = " ";
            if (!g->parameters) continue;
            printf("%-24s %13.0f %13.0f %12.2f %13.0f ", g->name, g->parameters, g->bytes, 8 * g->bytes / g->parameters, g->per_token);
            for (int t = 0; t < G4_N_TYPES; t++) {
                if (!g->types[t]) continue;
                printf("%s%s %d", comma, g4_types[t].name, g->types[t]);
                comma = ", ";
            }
            printf("\n");
        }
        const char *name;
        for (int i = 0; (name = g4_checkpoint_ignored(s.model, i)); i++)
            printf("%s%s\n", i ? "" : "\ntensors of the checkpoint that are not read:\n", name);
    }
    g4_tokenizer_close(tok);
    g4_close(s.model);
    return 0;
}

/* ---- template ------------------------------------------------------------------------------------------------------------- */

static int command_template(const arguments *a) {
    g4_error err;
    g4_chat_prompt prompt;
    g4_chat_family family = a->family && !strcmp(a->family, "large") ? G4_CHAT_LARGE : G4_CHAT_SMALL;
    if (a->family && strcmp(a->family, "small") && strcmp(a->family, "large")) fatal("--family: expected small or large, found \"%s\"", a->family);
    if (!a->family && g4_chat_family_of(model_path(a), NULL, &(g4_options){.warn = warn}, &family, &err)) fatal("%s", err.text);
    buffer request = read_input(NULL);
    if (g4_chat_render(request.data, request.n, family, &prompt, &err)) fatal("%s", err.text);
    if (prompt.n_media) note("warning: %u images, audio or video have only a placeholder in this text", (unsigned)prompt.n_media);
    if (prompt.n_unknown) note("warning: the template passed over %u parts of a type that it does not know", (unsigned)prompt.n_unknown);
    fwrite(prompt.text, 1, prompt.n, stdout);
    g4_chat_prompt_free(&prompt);
    free(request.data);
    return 0;
}

/* ---- bench ---------------------------------------------------------------------------------------------------------------- */

static int command_bench(const arguments *a) {
    enum { MOST = 16 };
    g4_error err;
    g4_model *models[MOST];
    const char *name = a->backend, *why, *path = model_path(a);
    int n = 0;
    if (name) models[n++] = open_model(a).model;
    for (int i = 0; !a->backend && n < MOST && (name = g4_backend_name(i, &why)); i++) {
        arguments with = *a;
        with.backend = name;
        if (*why) note("backend %s cannot run here: %s", name, why);
        else models[n++] = open_model(&with).model;
    }
    sizes z = measure(models[0]);
    bench_options o = {.path = path, .only = a->only, .profile = a->profile != NULL, .trace = open_profile_file(a), .trace_path = a->profile,
                       .state = state_options(a, 0), .token_bytes = z.streamed_bytes + z.row_bytes, .seconds = a->seconds > 0 ? a->seconds : 2,
                       .full = a->full, .json = a->json};
    if (a->kernels ? bench_kernels(models[0], &o, &err) : bench(models, n, &o, &err)) fatal("%s", err.text);
    for (int i = 0; i < n; i++) g4_close(models[i]);
    return 0;
}

/* ---- chat and serve ------------------------------------------------------------------------------------------------------- */

/* The model with its tokenizer, its template's family, and a state of n_seqs sequences. */
static session open_conversation(const arguments *a, int n_seqs, g4_chat_family *family) {
    session s = open_model(a);
    g4_error err;
    g4_state_options o = state_options(a, 0);
    s.tokenizer = g4_tokenizer_open(s.path, &err);
    if (!s.tokenizer) fatal("%s", err.text);
    if (g4_chat_family_of(s.path, s.config, &(g4_options){.warn = warn}, family, &err)) fatal("%s", err.text);
    o.n_seqs = n_seqs;
    s.state = g4_state_open(s.model, &o, &err);
    if (!s.state) fatal("%s", err.text);
    const g4_state_options *got = g4_state_get_options(s.state);
    s.ctx = got->ctx;
    s.chunk = got->chunk;
    note("%s: backend %s, threads %d, %s, context %d%s, template for the %s models", s.path, g4_model_backend(s.model), got->threads,
         precision_names[got->precision], s.ctx, n_seqs > 1 ? " for each answer" : "", *family == G4_CHAT_SMALL ? "small" : "large");
    return s;
}

static int command_chat(const arguments *a) {
    if (a->seed) parse_whole("--seed", a->seed, UINT64_MAX);
    g4_chat_family family;
    g4_error err;
    session s = open_conversation(a, 1, &family);
    terminal_options o = {.model = s.model, .state = s.state, .tok = s.tokenizer, .family = family, .sampling = sampling_of(a, s.model), .system = a->system,
                          .thinking = a->thinking, .max_new = a->n >= 0 ? (int)a->n : INT_MAX, .quiet = quiet, .clock = seconds,
                          .speculate = draft_tokens(a, s.model)};
    buffer text = {0};
    if (a->prompt || a->file) {
        text = input_text(a);
        o.prompt = text.data;
        o.n_prompt = text.n;
    }
    if (terminal_chat(&o, &err)) fatal("%s", err.text);
    free(text.data);
    free((void *)o.sampling.logit_bias);
    close_session(&s);
    return 0;
}

#ifdef G4_SERVER
static void log_note(const char *line) { note("%s", line); }

/* Printed with -q too: with --port 0 nobody knows it otherwise. */
static void print_listening(const char *url) { fprintf(stderr, "listening on %s\n", url); }
#endif

static int command_serve(const arguments *a) {
#ifdef G4_SERVER
    g4_chat_family family;
    g4_error err;
    if (a->api_key && !*a->api_key) fatal("--api-key: the key is empty; leave the option out to ask for none");
    session s = open_conversation(a, a->parallel > 0 ? (int)a->parallel : 8, &family);
    const char *key = a->api_key ? a->api_key : getenv("GEMMA4_API_KEY");
    size_t end = strlen(s.path), begin;
    while (end > 1 && s.path[end - 1] == '/') end--; /* as shells complete it */
    for (begin = end; begin > 0 && s.path[begin - 1] != '/'; begin--) {}
    char *name = allocate(end - begin + 1, 1);
    memcpy(name, s.path + begin, end - begin);
    name[end - begin] = 0;
    serve_options o = {.model = s.model, .state = s.state, .tok = s.tokenizer, .family = family, .name = a->name ? a->name : name,
                       .host = a->host ? a->host : "127.0.0.1", .port = a->port >= 0 ? (int)a->port : 8080, .api_key = key && *key ? key : NULL,
                       .queue = a->queue >= 0 ? (int)a->queue : 64, .max_body = a->max_body > 0 ? (size_t)a->max_body : 8 << 20,
                       .timeout = a->timeout > 0 ? (int)a->timeout : 60, .grace = a->grace >= 0 ? (int)a->grace : 30, .log = log_note, .listening = print_listening,
                       .speculate = a->speculate ? parse_speculate(a->speculate) : 0};
    if (serve(&o, &err)) fatal("%s", err.text);
    free(name);
    close_session(&s);
    return 0;
#else
    (void)a;
    fatal("serve: this program was built without it; install libmicrohttpd's development files and build again (make SERVER=1 says what is missing)");
#endif
}

/* ---- help, and main ------------------------------------------------------------------------------------------------------- */

static int command_help(const arguments *a);

static const command commands[] = {
    {"run", RUN, command_run, 1, 0, "[MODEL] [-p TEXT | -f FILE | --ids A,B,...] [options]",
     "Continues a text, which is raw and gets one <bos>: -p, -f or standard input. With --ids the new ids are printed. A stop id ends it.",
     "gemma4 run -p \"It is a truth universally acknowledged, that\" -n 40 --seed 10\n"
     "gemma4 run --ids 2,1149,480 -n 8 --temp 0"},
    {"tokenize", TOKENIZE, command_tokenize, 1, 0, "[MODEL] [-p TEXT | -f FILE] [options]",
     "A text to ids, on one line. MODEL may also be a tokenizer.json.",
     "gemma4 tokenize --bos -p \"It is a truth\"\n"
     "printf '{\"text\": \"It is\"}\\n' | gemma4 tokenize --jsonl"},
    {"detokenize", DETOKENIZE, command_detokenize, 1, INT_MAX, "[MODEL] [ID ...] [options]",
     "Ids, given or from standard input, to the bytes of their text.",
     "gemma4 detokenize 1149 480 380 1236 1568\n"
     "gemma4 tokenize -p \"It is a truth\" | gemma4 detokenize"},
    {"logits", LOGITS, command_logits, 1, 0, "[MODEL] (-p TEXT | -f FILE | --ids A,B,...) [-o FILE] [options]",
     "The five best next tokens: id, logit, piece. -o writes ids [T] and logits [T][V] of all positions.",
     "gemma4 logits -p \"It is a truth universally\"\n"
     "gemma4 logits --ids 2,1149,480 -o logits.safetensors"},
    {"trace", TRACE, command_trace, 1, 0, "[MODEL] (-p TEXT | -f FILE | --ids A,B,...) -o FILE [options]",
     "As logits, with every intermediate tensor in the file, in the order of the forward pass.",
     "gemma4 trace --ids 2,1149,480 -o ours.safetensors\n"
     "gemma4 trace -p \"It is\" --tensors 'layers.0.*,logits' -o layer0.safetensors"},
    {"diff", DIFF, command_diff, 0, 2, "A B [options]",
     "Compares two files of logits or trace, whoever wrote them. Status 1 and the first tensor's name when out of tolerance.",
     "gemma4 trace --ids 2,5 -o a.safetensors && gemma4 trace --ids 2,5 --threads 1 -o b.safetensors\n"
     "gemma4 diff a.safetensors b.safetensors --rtol 0 --atol 0"},
    {"hash", HASH, command_hash, 1, 0, "[MODEL] (-p TEXT | -f FILE | --ids A,B,...) [options]",
     "FNV-1a 64 of all logits of all positions: equal on two machines when every bit is.",
     "gemma4 hash --ids 2,1149,480\n"
     "gemma4 hash -p \"It is a truth\" --backend scalar --threads 1"},
    {"score", SCORE, command_score, 1, 0, "[MODEL] [-p TEXT | -f FILE | --ids A,B,...] [options]",
     "The log-probability of each token given those before it, their sum, and the perplexity.",
     "gemma4 score -p \"It is a truth universally acknowledged\"\n"
     "echo It is a truth | gemma4 score --json"},
    {"info", INFO, command_info, 1, 0, "[MODEL] [options]", "What the model is: layers, parameters, bytes read per token, memory at this --ctx.",
     "gemma4 info\n"
     "gemma4 info --json --ctx 131072"},
    {"template", TEMPLATE, command_template, 1, 0, "[MODEL] [--family NAME]",
     "A chat to the text that the model reads: one JSON request on standard input (messages, tools, enable_thinking, preserve_thinking, add_generation_prompt).",
     "echo '{\"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}], \"add_generation_prompt\": true}' | gemma4 template --family small"},
    {"chat", CHAT, command_chat, 1, 0, "[MODEL] [-p TEXT | -f FILE] [options]",
     "A conversation in the terminal; /help there lists its commands. With -p or -f one answer, then the end.",
     "gemma4 chat -p \"Hello\" -n 20 --seed 1\n"
     "printf 'Hello\\nHow do you do?\\n' | gemma4 chat -n 20 --temp 0"},
    {"serve", SERVE, command_serve, 1, 0, "[MODEL] [options]", "An HTTP server for clients of OpenAI's API, and a page to chat in at /.",
     "gemma4 serve --port 8080 --parallel 4"},
    {"bench", BENCH, command_bench, 1, 0, "[MODEL] [options]",
     "Tokens per second of prompts, decoding and batches, by all backends in turns, beside what this machine can read and compute.",
     "gemma4 bench --only prefill128,decode0 --seconds 1\n"
     "gemma4 bench --backend cpu --only decode0 --seconds 0.5 --json"},
    {"help", HELP, command_help, 0, 1, "[COMMAND]", "This text, or that of a command.", "gemma4 help run"},
};
enum { N_COMMANDS = sizeof commands / sizeof *commands };

static const command *find_command(const char *name) {
    for (int i = 0; i < N_COMMANDS; i++)
        if (!strcmp(commands[i].name, name)) return &commands[i];
    fatal("there is no command \"%s\"; `gemma4 help` lists them", name);
}

static void print_help(const command *c) {
    printf("gemma4 %s %s\n\n%s\n\n", c->name, c->usage, c->help);
    for (int i = 0; i < N_OPTIONS; i++) {
        const option *o = &options[i];
        char name[64];
        if (!(o->commands & c->bit)) continue;
        snprintf(name, sizeof name, "%s%s%s", o->name, o->value && o->kind != OPTIONAL_TEXT ? " " : "", o->value ? o->value : "");
        printf("  %s%s%-22s  %s\n", o->letter ? o->letter : "  ", o->letter ? ", " : "  ", name, o->help);
    }
    printf("\nExamples:\n");
    for (const char *line = c->examples, *end; line; line = *end ? end + 1 : NULL) {
        end = line + strcspn(line, "\n");
        printf("  %.*s\n", (int)(end - line), line);
    }
}

static int command_help(const arguments *a) {
    if (a->n_rest) {
        print_help(find_command(a->rest[0]));
        return 0;
    }
    printf("gemma4 COMMAND [MODEL] [options]\n\n"
           "Gemma 4 text models in plain C. MODEL is a directory in Hugging Face layout (config.json, *.safetensors,\n"
           "tokenizer.json) or a GGUF file; left out, it is the small model that comes with the program.\n\n");
    for (int i = 0; i < N_COMMANDS; i++) printf("  %-11s %s\n", commands[i].name, commands[i].help);
    printf("\n`gemma4 help COMMAND` lists its options and has examples. `gemma4 --version` prints the version.\n");
    return 0;
}

static void list_backends(void) {
    const char *name, *why;
    for (int i = 0; (name = g4_backend_name(i, &why)); i++) printf("%-8s %s%s\n", name, *why ? "cannot run here: " : "can run here", why);
}

int main(int argc, char **argv) {
    prepare_system(&argc, &argv);
    if (argc > 0) program_name = argv[0];
    if (argc < 2) fatal("no command was given; `gemma4 help` lists them");
    if (!strcmp(argv[1], "--version")) {
        printf("gemma4 %s\n", G4_VERSION);
        flush_results();
        return 0;
    }
    const command *c = find_command(!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h") ? "help" : argv[1]);
    arguments a = parse_arguments(c, argc, argv);
    quiet = a.quiet;
    int status = 0;
    if (a.help && c->bit != HELP) print_help(c);
    else if ((c->bit & SIZED) && a.backend && !strcmp(a.backend, "list")) list_backends();
    else status = c->function(&a);
    free(a.rest);
    free(a.stop);
    flush_results();
    if (fclose(stdout)) fatal("cannot write the results to standard output: %s", strerror(errno));
    return status;
}
