/* answer.c - the ids that a model answers with, to reasoning, content and tool calls.
 *
 * The parts are told apart by the ids of their markers, never by their text: a user may ask for an essay on <|channel>. A call's arguments, which come in
 * Gemma's own notation, are given as strict JSON; a call that cannot be read is given as it is, with the reason.
 *
 * One id at a time, with g4_answer_push, is the only way through; g4_answer_read pushes them all. The prompt that is answered is chat.c's.
 *
 * Reading order: g4_answer_push at the end of part 3 goes from state to state. Then:
 *     1. text      2. reasoning and content      3. calls, and the ids one by one      4. an answer as a whole
 */
#include "gemma4.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- 1. Text ---------------------------------------------------------------------------------------------------------- */

/* Something of a call for a message: one line, cut when it is long. */
typedef struct shown {
    char text[96];
} shown;

static shown show(const char *s, size_t n) {
    shown out;
    size_t most = sizeof out.text - 4, m = n < most ? n : most;
    for (size_t i = 0; i < m; i++) out.text[i] = (unsigned char)s[i] < 0x20 || s[i] == 0x7f ? '?' : s[i];
    if (n > most) {
        while (m > 0 && ((unsigned char)s[m] & 0xc0) == 0x80) m--; /* not inside a character */
        memcpy(out.text + m, "...", 3);
        m += 3;
    }
    out.text[m] = 0;
    return out;
}

/* A growing text. Once memory was refused it grows no more, and whoever takes it looks at no_memory. */
typedef struct text {
    char *s; /* [n], then NUL as soon as anything was appended, be it 0 bytes */
    size_t n, room;
    int no_memory;
} text;

static void append(text *t, const char *s, size_t n) {
    if (t->no_memory) return;
    if (t->room - t->n <= n) {
        size_t room = n < SIZE_MAX / 4 && t->n < SIZE_MAX / 4 ? 2 * (t->n + n) + 64 : 0;
        char *more = room ? realloc(t->s, room) : NULL;
        if (!more) {
            t->no_memory = 1;
            return;
        }
        t->s = more;
        t->room = room;
    }
    if (n) memcpy(t->s + t->n, s, n);
    t->n += n;
    t->s[t->n] = 0;
}

/* ---- 2. Reasoning and content ----------------------------------------------------------------------------------------- */

static const char thought[] = "thought\n"; /* the label behind <|channel> */

struct g4_answer {
    const g4_tokenizer *tok;
    g4_answer_fn *each;
    void *user;
    g4_decoder *decoder;  /* of what is being read now: content or reasoning */
    int32_t open_channel, close_channel, open_call, close_call, quote, end_of_turn, end_of_text, tool_response; /* -1: the tokenizer has none */
    enum { CONTENT, LABEL, REASONING, CALL } state;
    size_t n_label;       /* LABEL: bytes of `thought` so far */
    int newline;          /* REASONING: one is held back, for the last one belongs to the template */
    int32_t *ids;         /* [n_ids] CALL: from <|tool_call> on */
    size_t n_ids, room;
};

g4_answer *g4_answer_open(const g4_tokenizer *tok, int in_reasoning, g4_answer_fn *each, void *user, g4_error *err) {
    g4_answer *a = calloc(1, sizeof *a);
    if (!a) {
        g4_fail(err, "out of memory for reading an answer");
        return NULL;
    }
    a->tok = tok;
    a->each = each;
    a->user = user;
    a->state = in_reasoning ? REASONING : CONTENT;
    a->open_channel = g4_token_id(tok, "<|channel>");
    a->close_channel = g4_token_id(tok, "<channel|>");
    a->open_call = g4_token_id(tok, "<|tool_call>");
    a->close_call = g4_token_id(tok, "<tool_call|>");
    a->quote = g4_token_id(tok, "<|\"|>");
    a->end_of_turn = g4_token_id(tok, "<turn|>");
    a->end_of_text = g4_token_id(tok, "<eos>");
    a->tool_response = g4_token_id(tok, "<|tool_response>");
    a->decoder = g4_decoder_open(tok, G4_SKIP_SPECIAL, err);
    if (a->decoder) return a;
    free(a);
    return NULL;
}

void g4_answer_close(g4_answer *a) {
    if (!a) return;
    g4_decoder_close(a->decoder);
    free(a->ids);
    free(a);
}

static void give(const g4_answer *a, g4_part_kind kind, const char *s, size_t n) {
    if (n) a->each(a->user, &(g4_part){.kind = kind, .text = s, .n = n});
}

static void give_reasoning(g4_answer *a, const char *s, size_t n) {
    if (!n) return;
    if (a->newline) give(a, G4_PART_REASONING, "\n", 1);
    a->newline = s[n - 1] == '\n';
    give(a, G4_PART_REASONING, s, n - (size_t)a->newline);
}

/* Decoded text, to where it belongs in this state. */
static void take_text(g4_answer *a, const char *s, size_t n) {
    if (a->state == LABEL) {
        const size_t size = sizeof thought - 1;
        while (n && a->n_label < size && *s == thought[a->n_label]) a->n_label++, s++, n--;
        if (a->n_label < size && !n) return; /* still undecided */
        a->state = REASONING;
        if (a->n_label < size) give_reasoning(a, thought, a->n_label); /* it was no label */
    }
    if (a->state == REASONING) give_reasoning(a, s, n);
    else give(a, G4_PART_CONTENT, s, n);
}

/* What the decoder still holds. */
static int flush(g4_answer *a, g4_error *err) {
    const char *s;
    size_t n;
    if (g4_decode_end(a->decoder, &s, &n, err)) return -1;
    take_text(a, s, n);
    return 0;
}

/* <channel|>, or what can only stand behind it. */
static int end_reasoning(g4_answer *a, g4_error *err) {
    if (flush(a, err)) return -1;
    if (a->state == LABEL && a->n_label < sizeof thought - 2) give_reasoning(a, thought, a->n_label); /* the label may lack its newline, no more */
    a->state = CONTENT;
    a->newline = 0;
    return 0;
}

/* ---- 3. Calls, and the ids one by one --------------------------------------------------------------------------------- */

enum { MOST_DEPTH = 64 /* of a call's arguments, as of JSON */, QUOTE = 256, END = -1 };

/* The text of a call, in which the places of <|"|> are known from the ids: a string may hold anything else. */
typedef struct call_reader {
    text in, json, fault;
    size_t *quotes;          /* [n_quotes] where in `in` they stood, ascending */
    size_t n_quotes, quotes_room, next_quote;
    size_t at;
} call_reader;

/* The next of the input: a byte, QUOTE or END. */
static int peek(const call_reader *c) {
    if (c->next_quote < c->n_quotes && c->quotes[c->next_quote] == c->at) return QUOTE;
    return c->at < c->in.n ? (unsigned char)c->in.s[c->at] : END;
}

static void skip(call_reader *c) {
    if (peek(c) == QUOTE) c->next_quote++;
    else if (c->at < c->in.n) c->at++;
}

static int is_blank(int c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; }

static void skip_blanks(call_reader *c) {
    while (is_blank(peek(c))) skip(c);
}

static int fault(call_reader *c, const char *expected) {
    char line[256];
    int found = peek(c);
    if (c->fault.n) return -1;
    int n = snprintf(line, sizeof line, "byte %llu of the call: expected %s, found ", (unsigned long long)c->at, expected);
    append(&c->fault, line, (size_t)n);
    if (found == QUOTE || found == END) snprintf(line, sizeof line, "%s", found == QUOTE ? "<|\"|>" : "its end");
    else snprintf(line, sizeof line, "\"%s\"", show(c->in.s + c->at, c->in.n - c->at).text);
    append(&c->fault, line, strlen(line));
    return -1;
}

static void append_json_string(text *t, const char *s, size_t n) {
    char *quoted = n < SIZE_MAX / 8 ? malloc(6 * n + 3) : NULL;
    if (quoted) append(t, quoted, g4_json_quote(quoted, s, n));
    else t->no_memory = 1;
    free(quoted);
}

/* A string after its first quote, up to and with its second. */
static int read_quoted(call_reader *c) {
    size_t begin = c->at;
    if (c->next_quote == c->n_quotes) {
        c->at = c->in.n;
        return fault(c, "<|\"|> at the end of a string");
    }
    c->at = c->quotes[c->next_quote++];
    append_json_string(&c->json, c->in.s + begin, c->at - begin);
    return 0;
}

/* A member's key: bare up to the colon, or a string. */
static int read_key(call_reader *c) {
    skip_blanks(c);
    if (peek(c) == QUOTE) {
        skip(c);
        if (read_quoted(c)) return -1;
        skip_blanks(c);
    } else {
        size_t begin = c->at, end;
        int b;
        while ((b = peek(c)) != END && b != QUOTE && b != ':' && b != ',' && b != '{' && b != '}' && b != '[' && b != ']') skip(c);
        for (end = c->at; end > begin && is_blank(c->in.s[end - 1]); end--) {}
        if (end == begin) return fault(c, "a key");
        append_json_string(&c->json, c->in.s + begin, end - begin);
    }
    if (peek(c) != ':') return fault(c, "':' after a key");
    skip(c);
    append(&c->json, ":", 1);
    return 0;
}

static int read_value(call_reader *c, int depth) {
    skip_blanks(c);
    int b = peek(c), close = b == '{' ? '}' : ']';
    if (b == QUOTE) {
        skip(c);
        return read_quoted(c);
    }
    if (b != '{' && b != '[') { /* number, true, false, null: JSON's own, which g4_json_parse checks when all is read */
        size_t begin = c->at;
        while ((b = peek(c)) != END && b != QUOTE && b != ',' && b != '}' && b != ']' && !is_blank(b)) skip(c);
        const char *word = c->in.s + begin;
        size_t n = c->at - begin;
        if ((n == 4 && (!memcmp(word, "true", 4) || !memcmp(word, "null", 4))) || (n == 5 && !memcmp(word, "false", 5)) ||
            (n && (*word == '-' || (*word >= '0' && *word <= '9')))) {
            append(&c->json, word, n);
            return 0;
        }
        c->at = begin;
        return fault(c, "a value: <|\"|>, a number, true, false, null, '{' or '['");
    }
    if (depth == MOST_DEPTH) return fault(c, "no array or object inside 64 others");
    append(&c->json, b == '{' ? "{" : "[", 1);
    skip(c);
    skip_blanks(c);
    for (int first = 1; peek(c) != close; first = 0) {
        if (!first && peek(c) != ',') return fault(c, close == '}' ? "',' or '}'" : "',' or ']'");
        if (!first) skip(c), append(&c->json, ",", 1);
        if ((close == '}' && read_key(c)) || read_value(c, depth + 1)) return -1;
        skip_blanks(c);
    }
    skip(c);
    append(&c->json, close == '}' ? "}" : "]", 1);
    return 0;
}

/* call:NAME{...}; the name stands in `in` then. */
static int read_call(call_reader *c, const char **name, size_t *n_name) {
    g4_json j;
    g4_error err;
    skip_blanks(c);
    if (c->in.n - c->at < 5 || memcmp(c->in.s + c->at, "call:", 5) || (c->n_quotes && c->quotes[0] < c->at + 5)) return fault(c, "call:NAME{...}");
    c->at += 5;
    skip_blanks(c);
    size_t begin = c->at, end;
    for (int b; (b = peek(c)) != END && b != QUOTE && b != '{';) skip(c);
    for (end = c->at; end > begin && is_blank(c->in.s[end - 1]); end--) {}
    if (end == begin) return fault(c, "the name of a function");
    if (peek(c) != '{') return fault(c, "'{' after the name of the function");
    *name = c->in.s + begin;
    *n_name = end - begin;
    if (read_value(c, 0)) return -1;
    skip_blanks(c);
    if (peek(c) != END) return fault(c, "nothing after the arguments");
    if (c->json.no_memory) return 0;
    if (g4_json_parse(&j, c->json.s, c->json.n, "the arguments, as JSON", &err)) { /* a key twice, a number that is none */
        append(&c->fault, err.text, strlen(err.text));
        return -1;
    }
    g4_json_free(&j);
    return 0;
}

/* Decodes the ids of a call without its two markers into c->in, <|"|> into c->quotes; and all of them, markers too, into *raw. */
static int decode_call(const g4_answer *a, call_reader *c, text *raw, int closed, g4_error *err) {
    g4_decoder *d = g4_decoder_open(a->tok, 0, err);
    size_t n_inside = a->n_ids - (size_t)closed; /* ids[0] is the first marker */
    if (!d) return -1;
    int failed = 0;
    for (size_t i = 0; i <= a->n_ids && !failed; i++) {
        const char *s;
        size_t n;
        int marks = i == 0 || i >= n_inside || a->ids[i] == a->quote;
        if (marks) { /* a run of byte tokens ends here */
            failed = g4_decode_end(d, &s, &n, err);
            if (failed) break;
            append(&c->in, s, n);
            append(raw, s, n);
        }
        if (i == a->n_ids) break;
        failed = g4_decode_push(d, a->ids[i], &s, &n, err);
        if (failed) break;
        append(raw, s, n);
        if (!marks) {
            append(&c->in, s, n);
        } else if (i > 0 && i < n_inside) {
            if (c->n_quotes == c->quotes_room) {
                size_t room = 2 * c->quotes_room + 16, *more = realloc(c->quotes, room * sizeof *more);
                if (!more) {
                    failed = g4_fail(err, "out of memory for a tool call");
                    break;
                }
                c->quotes = more;
                c->quotes_room = room;
            }
            c->quotes[c->n_quotes++] = c->in.n;
        }
    }
    g4_decoder_close(d);
    return failed;
}

/* Gives the call that was collected. */
static int end_call(g4_answer *a, int closed, g4_error *err) {
    call_reader c = {0};
    text raw = {0};
    const char *name = "";
    size_t n_name = 0;
    int failed = decode_call(a, &c, &raw, closed, err);
    if (!failed) {
        append(&c.in, "", 0);
        append(&raw, "", 0);
        int bad = 1;
        if (closed && c.in.s) bad = read_call(&c, &name, &n_name);
        else append(&c.fault, "the answer ends inside the call", 31);
        if (c.in.no_memory || raw.no_memory || c.json.no_memory || c.fault.no_memory) failed = g4_fail(err, "out of memory for a tool call");
        else if (bad) a->each(a->user, &(g4_part){.kind = G4_PART_BAD_TOOL_CALL, .text = raw.s, .n = raw.n, .fault = c.fault.s});
        else a->each(a->user, &(g4_part){.kind = G4_PART_TOOL_CALL, .text = c.json.s, .n = c.json.n, .name = name, .n_name = n_name});
    }
    free(c.in.s);
    free(c.json.s);
    free(c.fault.s);
    free(c.quotes);
    free(raw.s);
    if (!failed) a->n_ids = 0, a->state = CONTENT;
    return failed;
}

static int keep_id(g4_answer *a, int32_t id, g4_error *err) {
    if (a->n_ids == a->room) {
        size_t room = 2 * a->room + 64;
        int32_t *more = room < SIZE_MAX / 2 / sizeof *more ? realloc(a->ids, room * sizeof *more) : NULL;
        if (!more) return g4_fail(err, "out of memory for a tool call of %llu ids", (unsigned long long)a->n_ids);
        a->ids = more;
        a->room = room;
    }
    a->ids[a->n_ids++] = id;
    return 0;
}

int g4_answer_push(g4_answer *a, int32_t id, g4_error *err) {
    const char *s;
    size_t n;
    if (!g4_token_piece(a->tok, id, &n)) return g4_fail(err, "token id %d has no piece; ids of this vocabulary are 0 .. %d", (int)id, g4_tokenizer_size(a->tok) - 1);
    if (a->state == CALL) {
        int ends = id == a->open_call || id == a->end_of_turn || id == a->end_of_text || id == a->tool_response;
        if (!ends && keep_id(a, id, err)) return -1;
        if (!ends && id != a->close_call) return 0;
        if (end_call(a, !ends, err)) return -1;
        if (!ends) return 0;
    }
    if (id == a->open_call) {
        if (end_reasoning(a, err) || keep_id(a, id, err)) return -1;
        a->state = CALL;
    } else if (id == a->open_channel) {
        if (end_reasoning(a, err)) return -1;
        a->state = LABEL;
        a->n_label = 0;
    } else if (id == a->close_channel) {
        return end_reasoning(a, err);
    } else {
        if (g4_decode_push(a->decoder, id, &s, &n, err)) return -1;
        take_text(a, s, n);
    }
    return 0;
}

int g4_answer_end(g4_answer *a, g4_error *err) {
    if (a->state == CALL) return end_call(a, 0, err);
    if (flush(a, err)) return -1;
    if (a->newline) give(a, G4_PART_REASONING, "\n", 1); /* cut off inside its reasoning: whose newline it was is not known */
    a->newline = 0;
    return 0;
}

/* ---- 4. An answer as a whole ------------------------------------------------------------------------------------------ */

typedef struct collector {
    text reasoning, content;
    g4_tool_call *calls; /* [n_calls] */
    int n_calls, room, no_memory;
} collector;

static char *copy(const char *s, size_t n) {
    char *c = malloc(n + 1);
    if (!c) return NULL;
    if (n) memcpy(c, s, n);
    c[n] = 0;
    return c;
}

static void collect(void *user, const g4_part *part) {
    collector *c = user;
    if (part->kind == G4_PART_REASONING) append(&c->reasoning, part->text, part->n);
    if (part->kind == G4_PART_CONTENT) append(&c->content, part->text, part->n);
    if (part->kind != G4_PART_TOOL_CALL && part->kind != G4_PART_BAD_TOOL_CALL) return;
    if (c->n_calls == c->room) {
        int room = 2 * c->room + 4;
        g4_tool_call *more = room < 1 << 24 ? realloc(c->calls, (size_t)room * sizeof *more) : NULL;
        if (!more) {
            c->no_memory = 1;
            return;
        }
        c->calls = more;
        c->room = room;
    }
    int bad = part->kind == G4_PART_BAD_TOOL_CALL;
    g4_tool_call *call = &c->calls[c->n_calls++];
    *call = (g4_tool_call){.text = copy(part->text, part->n), .n = part->n, .n_name = part->n_name};
    call->name = bad ? NULL : copy(part->name, part->n_name);
    call->fault = bad ? copy(part->fault, strlen(part->fault)) : NULL;
    if (!call->text || (bad ? !call->fault : !call->name)) c->no_memory = 1;
}

int g4_answer_read(const g4_tokenizer *tok, int in_reasoning, const int32_t *ids, size_t n, g4_message *message, g4_error *err) {
    collector c = {0};
    *message = (g4_message){0};
    g4_answer *a = g4_answer_open(tok, in_reasoning, collect, &c, err);
    int failed = !a;
    for (size_t i = 0; i < n && !failed; i++) failed = g4_answer_push(a, ids[i], err);
    if (!failed) failed = g4_answer_end(a, err);
    g4_answer_close(a);
    append(&c.reasoning, "", 0);
    append(&c.content, "", 0);
    *message = (g4_message){c.reasoning.s, c.reasoning.n, c.content.s, c.content.n, c.calls, c.n_calls};
    if (!failed && (c.no_memory || c.reasoning.no_memory || c.content.no_memory)) failed = g4_fail(err, "out of memory for an answer of %llu ids", (unsigned long long)n);
    if (failed) g4_message_free(message);
    return failed ? -1 : 0;
}

void g4_message_free(g4_message *message) {
    for (int i = 0; i < message->n_calls; i++) {
        free(message->calls[i].name);
        free(message->calls[i].text);
        free(message->calls[i].fault);
    }
    free(message->reasoning);
    free(message->content);
    free(message->calls);
    *message = (g4_message){0};
}
