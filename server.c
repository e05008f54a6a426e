/* server.c - `gemma4 serve`: the HTTP API that programs written for OpenAI's speak, and a page to chat in.
 *
 * It is not an HTTP implementation (that is libmicrohttpd), nor a generator (engine.c), nor a template (chat.c): it turns JSON into requests of the
 * engine and events of the engine into JSON. It needs POSIX threads and signals; where libmicrohttpd is missing, the program is built without it.
 *
 * Threads: libmicrohttpd runs one for each connection; it reads the request into a job and then only waits for bytes to send. The thread that called serve
 * owns the engine (`work`): it takes new jobs from the inbox, makes steps, and writes each event as JSON into its job. A third waits for signals. One mutex
 * guards all that they share.
 *
 * Reading order: strings, errors, parameters, jobs (one for each request of a client, with one choice for each answer), what the engine's thread does
 * with an event, the endpoints, the daemon.
 */
#define _GNU_SOURCE /* MSG_DONTWAIT, pthread_condattr_setclock, pipe2 */
#include "server.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <microhttpd.h>
#include <netdb.h>
#include <netinet/in.h>
#include <arpa/inet.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

extern const unsigned char page_html[]; /* page.html */
extern const size_t page_html_size;

enum {
    MAX_CHOICES = 16,        /* answers of one request */
    MAX_STOPS = 16,
    MAX_TOP_LOGPROBS = 20,
    MAX_CONNECTIONS = 256,
    LOOK_MS = 200            /* how often a waiting connection looks whether its client is still there */
};

/* ---- Strings that grow -------------------------------------------------------------------------------------------------- */

typedef struct string {
    char *data; /* [n] */
    size_t n, room;
    int failed; /* memory ran out: what was put since is lost, and the answer must not be sent */
} string;

static void put_bytes(string *s, const char *data, size_t n) {
    if (s->failed) return;
    if (s->room - s->n < n) {
        size_t room = s->n + n < s->n ? 0 : (s->n + n) / 2 * 3 + 256;
        char *more = room ? realloc(s->data, room) : NULL;
        if (!more) {
            s->failed = 1;
            return;
        }
        s->data = more;
        s->room = room;
    }
    if (n) memcpy(s->data + s->n, data, n);
    s->n += n;
}

static void put(string *s, const char *text) { put_bytes(s, text, strlen(text)); }

/* For numbers and short names: no more than 1023 bytes. */
G4_PRINTF(2, 3) static void putf(string *s, const char *format, ...) {
    char text[1024];
    va_list args;
    va_start(args, format);
    int n = vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (n < 0 || n >= (int)sizeof text) s->failed = 1;
    else put_bytes(s, text, (size_t)n);
}

static void put_json(string *s, const char *text, size_t n) {
    char *quoted = n > SIZE_MAX / 8 ? NULL : malloc(6 * n + 3);
    if (quoted) put_bytes(s, quoted, g4_json_quote(quoted, text ? text : "", n));
    else s->failed = 1;
    free(quoted);
}

static void put_json_text(string *s, const char *text) { put_json(s, text, strlen(text)); }

/* ---- What is shared ------------------------------------------------------------------------------------------------------ */

typedef struct job job;

enum { ENDPOINT_CHAT, ENDPOINT_COMPLETIONS, ENDPOINT_TOKENIZE, ENDPOINT_DETOKENIZE, ENDPOINT_MODELS, ENDPOINT_HEALTH, ENDPOINT_METRICS, ENDPOINT_PAGE, ENDPOINT_OTHER, N_ENDPOINTS };
static const char *const endpoint_names[N_ENDPOINTS] = {"chat", "completions", "tokenize", "detokenize", "models", "health", "metrics", "page", "other"};

typedef struct server {
    serve_options o;
    int ctx, vocab_size;
    int32_t bos;
    int check_host;              /* only this machine can connect, and no key is asked for */
    struct MHD_Daemon *daemon;
    long long started;           /* Unix time */

    pthread_mutex_t preparing;   /* one body at a time becomes a job: parsed, it takes many times its size, and hundreds may come at once. Taken before `mutex` */
    pthread_mutex_t mutex;       /* guards all that follows, and the jobs */
    pthread_cond_t work_to_do;   /* the engine's thread waits for it */
    job *inbox;                  /* new jobs, the oldest first */
    job **inbox_end;
    int in_flight;               /* answers accepted and not ended */
    int exchanges;               /* requests whose answer is not sent to its end */
    int cancelling;              /* a client has gone: the engine's thread looks through `active` */
    job *active;                 /* jobs that the engine works on */
    int stopping;                /* 1: no new jobs; 2: those in progress are cancelled; 3: the engine's thread ends */
    uint64_t next_id;
    g4_engine_stats stats;       /* a copy, for /metrics */
    uint64_t requests[N_ENDPOINTS][6]; /* by the first digit of the status */
    uint64_t refused, gone;      /* by a full queue; clients that left before the end */

    g4_engine *engine;           /* the engine's thread only */
} server;

static void log_line(const server *s, const char *format, ...) G4_PRINTF(2, 3);
static void log_line(const server *s, const char *format, ...) {
    char text[2048];
    va_list args;
    if (!s->o.log) return;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    s->o.log(text);
}

static double monotonic(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* ---- Errors, as OpenAI's API gives them ----------------------------------------------------------------------------------- */

typedef struct failure {
    int status;          /* 0: none */
    const char *type, *code;
    char param[64];      /* "": none */
    char message[1024];
} failure;

/* Always -1. */
G4_PRINTF(5, 6) static int fail(failure *f, int status, const char *code, const char *param, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(f->message, sizeof f->message, format, args);
    va_end(args);
    f->status = status;
    f->code = code;
    f->type = status == 429 ? "rate_limit_error" : status >= 500 ? "server_error" : "invalid_request_error";
    snprintf(f->param, sizeof f->param, "%s", param ? param : "");
    return -1;
}

static void put_failure(string *out, const failure *f) {
    put(out, "{\"error\":{\"message\":");
    put_json_text(out, f->message);
    putf(out, ",\"type\":\"%s\",\"param\":", f->type);
    if (*f->param) put_json_text(out, f->param);
    else put(out, "null");
    if (f->code) putf(out, ",\"code\":\"%s\"}}", f->code);
    else put(out, ",\"code\":null}}");
}

/* ---- Parameters ------------------------------------------------------------------------------------------------------------ */

/* A request's members, each looked up once: what was never asked for is unknown and gets a warning. */
typedef struct body {
    g4_json json;
    unsigned char *used; /* [json.n_nodes] */
    failure *f;
} body;

static const char *kind_name(const g4_json *j, uint32_t node) {
    static const char *const names[] = {"null", "false", "true", "a number", "a string", "an array", "an object"};
    return names[j->nodes[node].kind];
}

/* The member's node; 0 if it is missing or null. */
static uint32_t member(body *b, const char *name) {
    uint32_t node = g4_json_get(&b->json, 0, name);
    if (node) b->used[node] = 1;
    return node && b->json.nodes[node].kind != G4_JSON_NULL ? node : 0;
}

static int get_number(body *b, const char *name, double min, double max, double *value) {
    uint32_t node = member(b, name);
    double x;
    if (!node) return 0;
    if (b->json.nodes[node].kind != G4_JSON_NUMBER) return fail(b->f, 400, NULL, name, "%s: expected a number, found %s", name, kind_name(&b->json, node));
    if (g4_json_double(&b->json, node, &x) || !(x >= min && x <= max)) return fail(b->f, 400, NULL, name, "%s: expected a number from %g to %g, found %.40s", name, min, max, g4_json_string(&b->json, node));
    *value = x;
    return 0;
}

static int get_float(body *b, const char *name, double min, double max, float *value) {
    double x = *value;
    if (get_number(b, name, min, max, &x)) return -1;
    *value = (float)x;
    return 0;
}

static int get_int(body *b, const char *name, int64_t min, int64_t max, int64_t *value) {
    uint32_t node = member(b, name);
    int64_t n;
    if (!node) return 0;
    if (b->json.nodes[node].kind != G4_JSON_NUMBER) return fail(b->f, 400, NULL, name, "%s: expected an integer, found %s", name, kind_name(&b->json, node));
    if (g4_json_int(&b->json, node, &n) || n < min || n > max)
        return fail(b->f, 400, NULL, name, "%s: expected an integer from %lld to %lld, found %.40s", name, (long long)min, (long long)max, g4_json_string(&b->json, node));
    *value = n;
    return 0;
}

static int get_bool(body *b, const char *name, int *value) {
    uint32_t node = member(b, name);
    if (!node) return 0;
    int kind = b->json.nodes[node].kind;
    if (kind != G4_JSON_TRUE && kind != G4_JSON_FALSE) return fail(b->f, 400, NULL, name, "%s: expected true or false, found %s", name, kind_name(&b->json, node));
    *value = kind == G4_JSON_TRUE;
    return 0;
}

/* *text stays as it is if there is none. What is inside may hold NUL. */
static int get_string(body *b, const char *name, const char **text, size_t *n) {
    uint32_t node = member(b, name);
    if (!node) return 0;
    if (b->json.nodes[node].kind != G4_JSON_STRING) return fail(b->f, 400, NULL, name, "%s: expected a string, found %s", name, kind_name(&b->json, node));
    *text = g4_json_string(&b->json, node);
    *n = b->json.nodes[node].size;
    return 0;
}

static int parse_body(body *b, const string *text, failure *f) {
    g4_error err;
    memset(b, 0, sizeof *b);
    b->f = f;
    if (g4_json_parse(&b->json, text->data ? text->data : "", text->n, "the request's body", &err)) return fail(f, 400, NULL, NULL, "%s", err.text);
    if (b->json.nodes[0].kind != G4_JSON_OBJECT) return fail(f, 400, NULL, NULL, "the request's body: expected a JSON object, found %s", kind_name(&b->json, 0));
    b->used = calloc(b->json.n_nodes, 1);
    return b->used ? 0 : fail(f, 500, NULL, NULL, "out of memory");
}

static void free_body(body *b) {
    g4_json_free(&b->json);
    free(b->used);
}

/* After all parameters were looked up. */
static void warn_of_unknown(const server *s, const body *b) {
    for (uint32_t i = b->json.nodes[0].first; i; i = b->json.nodes[i].next)
        if (!b->used[i]) log_line(s, "warning: parameter \"%.80s\" is not known here and has no effect", b->json.text + b->json.nodes[i].key);
}

/* ---- Jobs ------------------------------------------------------------------------------------------------------------------- */

/* Holds text back while it may yet become a stop string. The engine does this for the text of a completion; in a chat the strings are looked for in
 * the content only, which the engine does not know from the rest of an answer. */
typedef struct stop_matcher {
    string held;
    int hit;
} stop_matcher;

typedef struct choice {
    job *job;
    int index;
    int64_t request;       /* the engine's number; 0: not added yet */
    g4_request r;          /* its prompt is the job's */
    g4_answer *answer;     /* chats */
    stop_matcher stops;
    int began;             /* the engine gave an event, or it streams: the role was sent */
    int done;
    const char *finish_reason;
    string content, reasoning, calls, logprobs; /* calls, logprobs: items of a JSON array; streamed: since the last chunk */
    int n_calls, n_logprobs, n_reasoning_tokens;
    size_t text_offset;    /* completions: characters of text that the tokens before made */
    string lp_tokens, lp_values, lp_tops, lp_offsets; /* completions: the four arrays of the older format */
    int n_prompt, n_cached, n_new;
} choice;

typedef struct prompt {
    int32_t *ids;          /* [n] */
    size_t n;
    string echo;           /* completions with echo: its text */
} prompt;

struct job {
    server *s;
    job *next;             /* in the inbox, or among the active */
    int refs;              /* connection, engine */
    int chat, stream, include_usage, logprobs, echo;
    int prompts_n;
    prompt *prompts;       /* [prompts_n] */
    int n_choices, open;   /* choices, those not done */
    choice *choices;       /* [n_choices]: prompt by prompt */
    char *stops[MAX_STOPS];
    size_t stop_sizes[MAX_STOPS];
    int n_stops;
    int32_t stop_ids[MAX_STOPS];
    int n_stop_ids;
    g4_logit_bias *bias;
    char id[48];
    long long created;
    int in_reasoning;

    string out;            /* bytes to send from `sent` on */
    size_t sent;
    int finished;          /* nothing will be added to out */
    int gone;              /* the client left */
    failure failure;       /* not streamed: instead of out */
    pthread_cond_t changed;
};

static void free_string(string *s) {
    free(s->data);
    memset(s, 0, sizeof *s);
}

static void free_job(job *j) {
    for (int i = 0; i < j->n_choices && j->choices; i++) {
        choice *c = &j->choices[i];
        g4_answer_close(c->answer);
        string *const strings[] = {&c->stops.held, &c->content, &c->reasoning, &c->calls, &c->logprobs, &c->lp_tokens, &c->lp_values, &c->lp_tops, &c->lp_offsets};
        for (size_t k = 0; k < sizeof strings / sizeof *strings; k++) free_string(strings[k]);
    }
    for (int i = 0; i < j->prompts_n && j->prompts; i++) {
        free(j->prompts[i].ids);
        free_string(&j->prompts[i].echo);
    }
    for (int i = 0; i < j->n_stops; i++) free(j->stops[i]);
    free(j->prompts);
    free(j->choices);
    free(j->bias);
    free_string(&j->out);
    pthread_cond_destroy(&j->changed);
    free(j);
}

/* With the mutex held. */
static void release_job(job *j) {
    if (!--j->refs) free_job(j);
}

static job *new_job(server *s) {
    job *j = calloc(1, sizeof *j);
    if (!j) return NULL;
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&j->changed, &attr);
    pthread_condattr_destroy(&attr);
    j->s = s;
    j->refs = 1;
    j->created = (long long)time(NULL);
    return j;
}

/* ---- From a token to bytes ---------------------------------------------------------------------------------------------------- */

/* What one id stands for by itself: U+2581 is a space, <0xHH> a byte. out holds it, and whoever passes it on looks whether it failed: it may succeed the next time. */
static void token_bytes(const g4_tokenizer *tok, int32_t id, string *out) {
    size_t n = 0;
    const char *piece = g4_token_piece(tok, id, &n);
    unsigned value;
    char end;
    out->n = 0;
    out->failed = 0;
    if (!piece) return;
    if (n == 6 && sscanf(piece, "<0x%2X%c", &value, &end) == 2 && end == '>') {
        char byte = (char)value;
        put_bytes(out, &byte, 1);
        return;
    }
    for (size_t i = 0; i < n; i++) {
        if (n - i >= 3 && !memcmp(piece + i, "\xe2\x96\x81", 3)) put(out, " "), i += 2;
        else put_bytes(out, piece + i, 1);
    }
}

/* As the older format writes a token. A byte by itself must not look like others, nor like a character: the tokens of top_logprobs are keys. */
static void token_key(const g4_tokenizer *tok, int32_t id, string *out) {
    size_t n = 0;
    g4_token_piece(tok, id, &n);
    token_bytes(tok, id, out);
    if (n != 6 || out->n != 1) return;
    unsigned char byte = (unsigned char)*out->data;
    out->n = 0;
    putf(out, "bytes:\\x%02x", byte);
}

/* Of a character in several tokens the first counts it. */
static size_t count_characters(const string *text) {
    size_t n = 0;
    for (size_t i = 0; i < text->n; i++) n += ((unsigned char)text->data[i] & 0xc0) != 0x80;
    return n;
}

/* JSON has no infinity; OpenAI's API writes -9999. */
static double finite_logprob(double logprob) { return logprob > -9999.0 ? logprob : -9999.0; }

/* "token":..,"logprob":..,"bytes":[..] */
static void put_token_logprob(string *out, const g4_tokenizer *tok, int32_t id, double logprob, string *scratch) {
    token_bytes(tok, id, scratch);
    put(out, "\"token\":");
    put_json(out, scratch->data, scratch->n);
    putf(out, ",\"logprob\":%.9g,\"bytes\":[", finite_logprob(logprob));
    for (size_t i = 0; i < scratch->n; i++) putf(out, "%s%d", i ? "," : "", (unsigned char)scratch->data[i]);
    put(out, "]");
    out->failed |= scratch->failed;
}

/* ---- Events: what the engine's thread writes into a job --------------------------------------------------------------------------- */

static void put_head(string *out, const job *j, const char *object) {
    putf(out, "{\"id\":\"%s\",\"object\":\"%s\",\"created\":%lld,\"model\":", j->id, object, j->created);
    put_json_text(out, j->s->o.name);
    put(out, ",\"system_fingerprint\":\"gemma4-" G4_VERSION "\"");
}

static void put_usage(string *out, const job *j) {
    long long prompts = 0, cached = 0, new_tokens = 0, reasoning = 0;
    for (int i = 0; i < j->n_choices; i++) {
        const choice *c = &j->choices[i];
        if (i % (j->n_choices / j->prompts_n) == 0) prompts += c->n_prompt, cached += c->n_cached; /* the choices of one prompt share it */
        new_tokens += c->n_new;
        reasoning += c->n_reasoning_tokens;
    }
    putf(out, "\"usage\":{\"prompt_tokens\":%lld,\"completion_tokens\":%lld,\"total_tokens\":%lld,\"prompt_tokens_details\":{\"cached_tokens\":%lld}", prompts, new_tokens,
         prompts + new_tokens, cached);
    if (j->chat) putf(out, ",\"completion_tokens_details\":{\"reasoning_tokens\":%lld}", reasoning);
    put(out, "}");
}

static void put_choice_logprobs(string *out, choice *c) {
    if (!c->job->logprobs) {
        put(out, ",\"logprobs\":null");
    } else if (c->job->chat) {
        put(out, ",\"logprobs\":{\"content\":[");
        put_bytes(out, c->logprobs.data, c->logprobs.n);
        put(out, "],\"refusal\":null}");
    } else {
        const struct { const char *name; const string *items; } parts[] = {
            {"tokens", &c->lp_tokens}, {"token_logprobs", &c->lp_values}, {"top_logprobs", &c->lp_tops}, {"text_offset", &c->lp_offsets}};
        put(out, ",\"logprobs\":{");
        for (int i = 0; i < 4; i++) {
            putf(out, "%s\"%s\":[", i ? "," : "", parts[i].name);
            put_bytes(out, parts[i].items->data, parts[i].items->n);
            put(out, "]");
        }
        put(out, "}");
    }
}

/* One server-sent event with what a choice has gathered since the last; finish_reason NULL: it goes on. */
static void put_chunk(choice *c, const char *finish_reason) {
    job *j = c->job;
    string *out = &j->out;
    if (!finish_reason && !c->content.n && !c->reasoning.n && !c->calls.n && c->began) return;
    put(out, "data: ");
    put_head(out, j, j->chat ? "chat.completion.chunk" : "text_completion");
    putf(out, ",\"choices\":[{\"index\":%d,", c->index);
    if (j->chat) {
        const char *comma = "";
        put(out, "\"delta\":{");
        if (!c->began) put(out, "\"role\":\"assistant\""), comma = ",";
        if (c->reasoning.n) putf(out, "%s\"reasoning_content\":", comma), put_json(out, c->reasoning.data, c->reasoning.n), comma = ",";
        if (c->content.n || !c->began) putf(out, "%s\"content\":", comma), put_json(out, c->content.data, c->content.n), comma = ",";
        if (c->calls.n) putf(out, "%s\"tool_calls\":[", comma), put_bytes(out, c->calls.data, c->calls.n), put(out, "]");
        put(out, "}");
    } else {
        put(out, "\"text\":");
        put_json(out, c->content.data, c->content.n);
    }
    put_choice_logprobs(out, c);
    if (finish_reason) putf(out, ",\"finish_reason\":\"%s\"}]", finish_reason);
    else put(out, ",\"finish_reason\":null}]");
    if (j->include_usage) put(out, ",\"usage\":null");
    put(out, "}\n\n");
    c->began = 1;
    c->n_logprobs = 0;
    string *const sent[] = {&c->content, &c->reasoning, &c->calls, &c->logprobs, &c->lp_tokens, &c->lp_values, &c->lp_tops, &c->lp_offsets};
    for (size_t i = 0; i < sizeof sent / sizeof *sent; i++) sent[i]->n = 0;
}

/* The whole answer of a job that is not streamed. */
static void put_answer(job *j) {
    string *out = &j->out;
    put_head(out, j, j->chat ? "chat.completion" : "text_completion");
    put(out, ",\"choices\":[");
    for (int i = 0; i < j->n_choices; i++) {
        choice *c = &j->choices[i];
        putf(out, "%s{\"index\":%d,", i ? "," : "", c->index);
        if (j->chat) {
            put(out, "\"message\":{\"role\":\"assistant\",\"content\":");
            if (c->content.n || !c->n_calls) put_json(out, c->content.data, c->content.n);
            else put(out, "null");
            put(out, ",\"refusal\":null");
            if (c->reasoning.n) put(out, ",\"reasoning_content\":"), put_json(out, c->reasoning.data, c->reasoning.n);
            if (c->n_calls) put(out, ",\"tool_calls\":["), put_bytes(out, c->calls.data, c->calls.n), put(out, "]");
            put(out, "}");
        } else {
            put(out, "\"text\":");
            put_json(out, c->content.data, c->content.n);
        }
        put_choice_logprobs(out, c);
        putf(out, ",\"finish_reason\":\"%s\"}", c->finish_reason);
    }
    put(out, "],");
    put_usage(out, j);
    put(out, "}\n");
}

/* A chat's content goes on to the client but for the end of it with which a stop string may begin. As in engine.c, of stop strings that overlap that counts which
 * ends first, of those that end together the longest: so it does not matter in which pieces the text came. */
static void add_content(choice *c, const char *text, size_t n) {
    const job *j = c->job;
    string *held = &c->stops.held;
    size_t from = held->n, stop = 0, keep = 0;
    if (c->stops.hit) return;
    put_bytes(held, text, n);
    if (held->failed) return;
    for (size_t end = from + 1; end <= held->n && !stop; end++) {
        for (int i = 0; i < j->n_stops; i++) {
            size_t size = j->stop_sizes[i];
            if (size <= end && size > stop && !memcmp(held->data + end - size, j->stops[i], size)) stop = size;
        }
        if (stop) held->n = end - stop;
    }
    for (int i = 0; i < j->n_stops && !stop; i++)
        for (size_t k = j->stop_sizes[i] - 1 < held->n ? j->stop_sizes[i] - 1 : held->n; k > keep; k--)
            if (!memcmp(held->data + held->n - k, j->stops[i], k)) keep = k;
    put_bytes(&c->content, held->data, held->n - keep);
    if (keep) memmove(held->data, held->data + held->n - keep, keep);
    held->n = keep;
    c->stops.hit = stop > 0;
}

/* A part of a chat's answer. */
static void on_part(void *user, const g4_part *part) {
    choice *c = user;
    if (c->stops.hit) return;
    switch (part->kind) {
    case G4_PART_REASONING: put_bytes(&c->reasoning, part->text, part->n); break;
    case G4_PART_CONTENT: add_content(c, part->text, part->n); break;
    case G4_PART_TOOL_CALL:
        if (c->calls.n) put(&c->calls, ",");
        put(&c->calls, "{");
        if (c->job->stream) putf(&c->calls, "\"index\":%d,", c->n_calls);
        putf(&c->calls, "\"id\":\"call_%s_%d_%d\",\"type\":\"function\",\"function\":{\"name\":", c->job->id + strcspn(c->job->id, "-") + 1, c->index, c->n_calls);
        put_json(&c->calls, part->name, part->n_name);
        put(&c->calls, ",\"arguments\":");
        put_json(&c->calls, part->text, part->n);
        put(&c->calls, "}}");
        c->n_calls++;
        break;
    case G4_PART_BAD_TOOL_CALL: /* nothing that the model wrote is lost */
        log_line(c->job->s, "warning: %s: a tool call that is none (%s) is given as content", c->job->id, part->fault);
        add_content(c, part->text, part->n);
        break;
    }
}

static void add_logprob(choice *c, const g4_event *e, string *scratch) {
    const g4_tokenizer *tok = c->job->s->o.tok;
    if (c->job->chat) {
        if (c->n_logprobs++) put(&c->logprobs, ",");
        put(&c->logprobs, "{");
        put_token_logprob(&c->logprobs, tok, e->token, e->logprob, scratch);
        put(&c->logprobs, ",\"top_logprobs\":[");
        for (int i = 0; i < e->n_top; i++) {
            put(&c->logprobs, i ? ",{" : "{");
            put_token_logprob(&c->logprobs, tok, e->top[i].id, e->top[i].logprob, scratch);
            put(&c->logprobs, "}");
        }
        put(&c->logprobs, "]}");
        return;
    }
    const char *comma = c->n_logprobs++ ? "," : "";
    putf(&c->lp_offsets, "%s%zu", comma, c->text_offset);
    token_bytes(tok, e->token, scratch);
    c->text_offset += count_characters(scratch);
    token_key(tok, e->token, scratch);
    put(&c->lp_tokens, comma);
    put_json(&c->lp_tokens, scratch->data, scratch->n);
    c->lp_tokens.failed |= scratch->failed;
    putf(&c->lp_values, "%s%.9g", comma, finite_logprob(e->logprob));
    putf(&c->lp_tops, "%s{", comma);
    for (int i = 0, given = 0; i <= e->n_top; i++) { /* the chosen one comes last if it is none of the best */
        if (i == e->n_top && given) break;
        const g4_logprob top = i < e->n_top ? e->top[i] : (g4_logprob){e->token, e->logprob};
        given |= top.id == e->token;
        token_key(tok, top.id, scratch);
        if (i) put(&c->lp_tops, ",");
        put_json(&c->lp_tops, scratch->data, scratch->n);
        c->lp_tops.failed |= scratch->failed;
        putf(&c->lp_tops, ":%.9g", finite_logprob(top.logprob));
    }
    put(&c->lp_tops, "}");
}

static int out_of_memory(const choice *c) {
    const string *const strings[] = {&c->stops.held, &c->content, &c->reasoning, &c->calls, &c->logprobs, &c->lp_tokens, &c->lp_values, &c->lp_tops, &c->lp_offsets, &c->job->out};
    for (size_t i = 0; i < sizeof strings / sizeof *strings; i++)
        if (strings[i]->failed) return 1;
    return 0;
}

/* With the mutex held: the job ends, with an error if `f` is not NULL. */
static void finish_job(job *j, const failure *f) {
    if (j->finished) return;
    if (f) {
        j->failure = *f;
        if (j->stream && !j->out.failed) put(&j->out, "data: "), put_failure(&j->out, f), put(&j->out, "\n\n");
    } else if (!j->stream) {
        put_answer(j);
    } else {
        if (j->include_usage) {
            put(&j->out, "data: ");
            put_head(&j->out, j, j->chat ? "chat.completion.chunk" : "text_completion");
            put(&j->out, ",\"choices\":[],");
            put_usage(&j->out, j);
            put(&j->out, "}\n\n");
        }
        put(&j->out, "data: [DONE]\n\n");
    }
    if (j->out.failed) fail(&j->failure, 500, NULL, NULL, "out of memory");
    j->finished = 1;
}

/* With the mutex held, in the engine's thread. */
static void take_event(choice *c, const g4_event *e, string *scratch) {
    job *j = c->job;
    g4_error err;
    failure f = {0};
    c->n_prompt = e->n_prompt;
    c->n_cached = e->n_cached;
    if (e->finish != G4_RUNNING) c->request = 0;
    if (c->done) return;
    c->n_new = e->n_new;
    int is_stop = e->finish == G4_FINISH_STOP_ID;
    if (e->finish == G4_FINISH_ERROR) fail(&f, 500, NULL, NULL, "%s", e->error);
    if (e->token >= 0 && !is_stop && !f.status) {
        if (j->logprobs) add_logprob(c, e, scratch);
        if (j->chat) {
            size_t before = c->reasoning.n;
            if (g4_answer_push(c->answer, e->token, &err)) fail(&f, 500, NULL, NULL, "%s", err.text);
            c->n_reasoning_tokens += c->reasoning.n > before;
        }
    }
    if (!j->chat) put_bytes(&c->content, e->text, e->n_text);
    int ends = e->finish != G4_RUNNING || c->stops.hit;
    if (ends && !f.status) {
        if (j->chat && g4_answer_end(c->answer, &err)) fail(&f, 500, NULL, NULL, "%s", err.text);
        if (!c->stops.hit) put_bytes(&c->content, c->stops.held.data, c->stops.held.n);
        c->finish_reason = e->finish == G4_FINISH_LENGTH && !c->stops.hit ? "length" : c->n_calls ? "tool_calls" : "stop";
        if (e->finish == G4_FINISH_CANCELLED && !c->stops.hit) fail(&f, 503, NULL, NULL, "the server is shutting down, and the answer was not finished in time");
    }
    if (!f.status && out_of_memory(c)) fail(&f, 500, NULL, NULL, "out of memory for the answer");
    if (f.status) {
        for (int i = 0; i < j->n_choices; i++) j->choices[i].done = 1;
        j->open = 0;
        finish_job(j, &f);
    } else {
        if (j->stream) put_chunk(c, ends ? c->finish_reason : NULL);
        if (ends) {
            c->done = 1;
            if (!--j->open) finish_job(j, NULL);
        }
    }
    if (j->stream || j->finished) pthread_cond_broadcast(&j->changed); /* each waking takes time from the next step */
}

/* ---- The engine's thread ------------------------------------------------------------------------------------------------------------ */

static void cancel_job(server *s, job *j) {
    for (int i = 0; i < j->n_choices; i++)
        if (j->choices[i].request) g4_engine_cancel(s->engine, j->choices[i].request);
}

/* Takes the jobs in the inbox over. With the mutex held. */
static void begin_jobs(server *s) {
    while (s->inbox) {
        job *j = s->inbox;
        s->inbox = j->next;
        if (!s->inbox) s->inbox_end = &s->inbox;
        j->next = s->active;
        s->active = j;
        for (int i = 0; i < j->n_choices && !j->gone && !j->finished; i++) {
            choice *c = &j->choices[i];
            g4_error err;
            failure f;
            c->request = g4_engine_add(s->engine, &c->r, &err);
            if (c->request > 0) continue;
            fail(&f, c->request == -1 ? 400 : 500, NULL, NULL, "%s", err.text);
            c->request = 0;
            cancel_job(s, j);
            for (int k = 0; k < j->n_choices; k++) j->choices[k].done = 1;
            j->open = 0;
            finish_job(j, &f);
            pthread_cond_broadcast(&j->changed);
        }
    }
}

/* Lets go of jobs that are over, once the engine has no request of theirs. With the mutex held. */
static void drop_jobs(server *s) {
    for (job **at = &s->active; *at;) {
        job *j = *at;
        int held = 0;
        for (int i = 0; i < j->n_choices; i++) held |= j->choices[i].request > 0;
        if (held || (!j->finished && !j->gone)) {
            at = &j->next;
            continue;
        }
        *at = j->next;
        s->in_flight -= j->n_choices;
        release_job(j);
    }
}

static void work(server *s) {
    string scratch = {0};
    pthread_mutex_lock(&s->mutex);
    for (;;) {
        while (!s->inbox && !g4_engine_pending(s->engine) && s->stopping < 3) pthread_cond_wait(&s->work_to_do, &s->mutex);
        if (s->stopping >= 3 && !g4_engine_pending(s->engine) && !s->inbox) break;
        begin_jobs(s);
        if (s->cancelling || s->stopping >= 2) {
            s->cancelling = 0;
            for (job *j = s->active; j; j = j->next)
                if (j->gone || s->stopping >= 2) cancel_job(s, j);
        }
        pthread_mutex_unlock(&s->mutex);
        const g4_event *event;
        int n = g4_engine_step(s->engine, &event);
        pthread_mutex_lock(&s->mutex);
        for (int i = 0; i < n; i++) take_event(event[i].user, &event[i], &scratch);
        /* a choice that is done while the engine goes on with it: a stop string was found, or another choice failed */
        for (job *j = s->active; j; j = j->next)
            for (int i = 0; i < j->n_choices; i++)
                if (j->choices[i].request && j->choices[i].done) g4_engine_cancel(s->engine, j->choices[i].request);
        drop_jobs(s);
        g4_engine_get_stats(s->engine, &s->stats);
    }
    pthread_mutex_unlock(&s->mutex);
    free_string(&scratch);
}

/* ---- From a request's body to a job ------------------------------------------------------------------------------------------------------- */

static int get_sampling(server *s, body *b, job *j, g4_sampling *how) {
    *how = g4_default_sampling(s->o.model);
    int64_t seed = 0, top_k = how->top_k;
    uint32_t bias = member(b, "logit_bias"), has_seed = member(b, "seed");
    if (get_float(b, "temperature", 0, 100, &how->temperature) || get_float(b, "top_p", 0, 1, &how->top_p) || get_float(b, "min_p", 0, 1, &how->min_p) ||
        get_int(b, "top_k", 0, INT32_MAX, &top_k) || get_float(b, "repeat_penalty", 0.01, 100, &how->repeat_penalty) ||
        get_float(b, "repetition_penalty", 0.01, 100, &how->repeat_penalty) || get_float(b, "frequency_penalty", -2, 2, &how->frequency_penalty) ||
        get_float(b, "presence_penalty", -2, 2, &how->presence_penalty) || get_int(b, "seed", INT64_MIN, INT64_MAX, &seed))
        return -1;
    how->top_k = (int)top_k;
    how->seed = (uint64_t)seed;
    if (!has_seed) { /* another text each time */
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        pthread_mutex_lock(&s->mutex);
        how->seed = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec + s->next_id * UINT64_C(0x9e3779b97f4a7c15);
        pthread_mutex_unlock(&s->mutex);
    }
    if (bias) {
        const g4_json_node *node = &b->json.nodes[bias];
        if (node->kind != G4_JSON_OBJECT) return fail(b->f, 400, NULL, "logit_bias", "logit_bias: expected an object of token ids and numbers, found %s", kind_name(&b->json, bias));
        j->bias = calloc(node->size + 1, sizeof *j->bias);
        if (!j->bias) return fail(b->f, 500, NULL, NULL, "out of memory");
        for (uint32_t i = node->first, n = 0; i; i = b->json.nodes[i].next, n++) {
            const char *key = b->json.text + b->json.nodes[i].key;
            char *end;
            errno = 0;
            long id = strtol(key, &end, 10);
            double value;
            if (key[strspn(key, "0123456789")] || !*key || errno || id >= s->vocab_size)
                return fail(b->f, 400, NULL, "logit_bias", "logit_bias: expected token ids from 0 to %d, found \"%.40s\"", s->vocab_size - 1, key);
            if (b->json.nodes[i].kind != G4_JSON_NUMBER || g4_json_double(&b->json, i, &value) || !(value >= -100 && value <= 100))
                return fail(b->f, 400, NULL, "logit_bias", "logit_bias: id %ld: expected a number from -100 to 100", id);
            j->bias[n] = (g4_logit_bias){(int32_t)id, (float)value};
        }
        how->logit_bias = j->bias;
        how->n_logit_bias = (int)node->size;
    }
    g4_error err;
    return g4_check_sampling(how, s->vocab_size, &err) ? fail(b->f, 400, NULL, NULL, "%s", err.text) : 0;
}

static int add_stop(server *s, body *b, job *j, uint32_t node) {
    const g4_json_node *v = &b->json.nodes[node];
    const char *text = g4_json_string(&b->json, node);
    if (v->kind != G4_JSON_STRING) return fail(b->f, 400, NULL, "stop", "stop: expected a string or an array of strings, found %s", kind_name(&b->json, node));
    if (!v->size) return fail(b->f, 400, NULL, "stop", "stop: an empty string would end every text before it begins");
    if (strlen(text) != v->size) return fail(b->f, 400, NULL, "stop", "stop: a stop string holds a NUL byte");
    if (j->n_stops + j->n_stop_ids == MAX_STOPS) return fail(b->f, 400, NULL, "stop", "stop: expected at most %d strings", MAX_STOPS);
    int32_t id = g4_token_id(s->o.tok, text);
    if (j->chat && id >= 0 && g4_token_is_special(s->o.tok, id)) {
        j->stop_ids[j->n_stop_ids++] = id;
        return 0;
    }
    char *copy = malloc(v->size + 1);
    if (!copy) return fail(b->f, 500, NULL, NULL, "out of memory");
    memcpy(copy, text, v->size + 1);
    j->stop_sizes[j->n_stops] = v->size;
    j->stops[j->n_stops++] = copy;
    return 0;
}

/* What chats and completions have in common; *n answers for each prompt. */
static int get_common(server *s, body *b, job *j, g4_request *r, int64_t *n, int64_t default_max) {
    int64_t max = default_max, completion_max = -1;
    uint32_t stop = member(b, "stop"), format = member(b, "response_format"), stream_options = member(b, "stream_options");
    const char *model = NULL;
    size_t n_model;
    static const char *const no_effect[] = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"};
    static const char *const not_built[] = {"functions", "function_call", "audio", "prediction", "web_search_options", "suffix", "grammar", "json_schema", "guided_json"};
    for (size_t i = 0; i < sizeof no_effect / sizeof *no_effect; i++) member(b, no_effect[i]);
    for (size_t i = 0; i < sizeof not_built / sizeof *not_built; i++)
        if (member(b, not_built[i])) return fail(b->f, 400, "unsupported_parameter", not_built[i], "%s is not built into this server", not_built[i]);
    if (get_string(b, "model", &model, &n_model)) return -1;
    if (model && (n_model != strlen(s->o.name) || memcmp(model, s->o.name, n_model)))
        return fail(b->f, 404, "model_not_found", "model", "this server has the model \"%.200s\", not \"%.200s\"", s->o.name, model);
    if (get_bool(b, "stream", &j->stream) || get_int(b, "n", 1, MAX_CHOICES, n) || get_int(b, "max_tokens", 0, INT32_MAX, &max) ||
        get_int(b, "max_completion_tokens", 0, INT32_MAX, &completion_max) || get_bool(b, "ignore_eos", &r->ignore_eos))
        return -1;
    if (completion_max >= 0) max = completion_max;
    r->max_new = (int)max;
    if (stream_options) {
        uint32_t usage = g4_json_get(&b->json, stream_options, "include_usage");
        int kind = usage ? b->json.nodes[usage].kind : G4_JSON_FALSE;
        if (b->json.nodes[stream_options].kind != G4_JSON_OBJECT || (kind != G4_JSON_TRUE && kind != G4_JSON_FALSE && kind != G4_JSON_NULL))
            return fail(b->f, 400, NULL, "stream_options", "stream_options: expected an object with include_usage, true or false");
        if (!j->stream) return fail(b->f, 400, NULL, "stream_options", "stream_options: only allowed where stream is true");
        j->include_usage = kind == G4_JSON_TRUE;
    }
    if (format) {
        uint32_t type = b->json.nodes[format].kind == G4_JSON_OBJECT ? g4_json_get(&b->json, format, "type") : 0;
        if (!type || b->json.nodes[type].kind != G4_JSON_STRING) return fail(b->f, 400, NULL, "response_format", "response_format: expected an object with a type");
        if (strcmp(g4_json_string(&b->json, type), "text"))
            return fail(b->f, 400, "unsupported_parameter", "response_format", "response_format: only the type \"text\" is built, not \"%.40s\"", g4_json_string(&b->json, type));
    }
    if (stop && b->json.nodes[stop].kind == G4_JSON_ARRAY) {
        for (uint32_t i = b->json.nodes[stop].first; i; i = b->json.nodes[i].next)
            if (add_stop(s, b, j, i)) return -1;
    } else if (stop && add_stop(s, b, j, stop)) {
        return -1;
    }
    return get_sampling(s, b, j, &r->sampling);
}

/* Choices for the prompts, n for each. */
static int make_choices(server *s, job *j, const g4_request *like, int n, failure *f) {
    j->choices = calloc((size_t)j->prompts_n * (size_t)n, sizeof *j->choices);
    if (!j->choices) return fail(f, 500, NULL, NULL, "out of memory");
    j->n_choices = j->open = j->prompts_n * n;
    for (int i = 0; i < j->n_choices; i++) {
        choice *c = &j->choices[i];
        const prompt *p = &j->prompts[i / n];
        if (p->n > (size_t)s->ctx)
            return fail(f, 400, "context_length_exceeded", j->chat ? "messages" : "prompt", "the prompt is longer than the context: n_prompt %zu, n_ctx %d", p->n, s->ctx);
        c->job = j;
        c->index = i;
        c->n_prompt = (int)p->n;
        c->r = *like;
        c->r.prompt = p->ids;
        c->r.n_prompt = p->n;
        c->r.sampling.seed += (uint64_t)(i % n); /* the same request again gives the same answers, but these differ */
        c->r.user = c;
        c->r.stop_ids = j->stop_ids;
        c->r.n_stop_ids = j->n_stop_ids;
        if (!j->chat) c->r.stop = (const char *const *)j->stops, c->r.n_stop = j->n_stops;
        c->r.logprobs = j->logprobs;
        g4_error err;
        if (j->chat && !(c->answer = g4_answer_open(s->o.tok, j->in_reasoning, on_part, c, &err))) return fail(f, 500, NULL, NULL, "%s", err.text);
        if (j->echo) put_bytes(&c->content, p->echo.data, p->echo.n), c->content.failed |= p->echo.failed, c->text_offset = count_characters(&p->echo);
    }
    return 0;
}

/* Writes a value as JSON again. `arguments`: where OpenAI's API has the arguments of a call as JSON in a string, the template wants the object itself. Values
 * are nested at most as deep as g4_json_parse lets them be. */
static int rewrite(string *out, const g4_json *j, uint32_t node, int in_calls, int arguments, failure *f) {
    static const char *const words[] = {"null", "false", "true"};
    const g4_json_node *v = &j->nodes[node];
    int object = v->kind == G4_JSON_OBJECT, failed = 0;
    if (v->kind <= G4_JSON_TRUE) put(out, words[v->kind]);
    else if (v->kind == G4_JSON_NUMBER) put(out, g4_json_string(j, node));
    else if (v->kind == G4_JSON_STRING && !arguments) put_json(out, g4_json_string(j, node), v->size);
    if (v->kind == G4_JSON_STRING && arguments) {
        g4_json inner;
        g4_error err;
        if (g4_json_parse(&inner, g4_json_string(j, node), v->size, "a tool call's arguments", &err)) return fail(f, 400, NULL, "messages", "messages: %s", err.text);
        if (inner.nodes[0].kind != G4_JSON_OBJECT) failed = fail(f, 400, NULL, "messages", "messages: a tool call's arguments: expected an object, found %s", kind_name(&inner, 0));
        else failed = rewrite(out, &inner, 0, 0, 0, f);
        g4_json_free(&inner);
    }
    if (v->kind < G4_JSON_ARRAY) return failed;
    put(out, object ? "{" : "[");
    for (uint32_t i = v->first; i && !failed; i = j->nodes[i].next) {
        const char *key = object ? j->text + j->nodes[i].key : "";
        if (i != v->first) put(out, ",");
        if (object) put_json(out, key, j->nodes[i].key_size), put(out, ":");
        int are_arguments = in_calls && object && !strcmp(key, "arguments"); /* what is inside them is the function's, whatever it is called */
        failed = rewrite(out, j, i, !are_arguments && (in_calls || (object && !strcmp(key, "tool_calls"))), are_arguments, f);
    }
    put(out, object ? "}" : "]");
    return failed;
}

/* The request's messages and tools as the template's request. */
static int template_request(body *b, string *out, failure *f) {
    uint32_t tools = g4_json_get(&b->json, 0, "tools");
    put(out, "{\"messages\":");
    if (rewrite(out, &b->json, g4_json_get(&b->json, 0, "messages"), 0, 0, f)) return -1;
    if (tools) put(out, ",\"tools\":");
    if (tools && rewrite(out, &b->json, tools, 0, 0, f)) return -1;
    put(out, "}");
    return out->failed ? fail(f, 500, NULL, NULL, "out of memory") : 0;
}

static int make_chat(server *s, body *b, job *j, failure *f) {
    g4_request r = {.max_new = 0};
    int64_t n = 1, top = 0;
    int parallel = 1, tools_off = 0;
    g4_chat_settings settings = {.add_generation_prompt = 1, .enable_thinking = -1, .preserve_thinking = -1};
    uint32_t messages = member(b, "messages"), choice_node = member(b, "tool_choice"), kwargs = member(b, "chat_template_kwargs"), modalities = member(b, "modalities");
    const char *effort = NULL;
    size_t n_effort;
    j->chat = 1;
    if (get_common(s, b, j, &r, &n, INT32_MAX) || get_bool(b, "logprobs", &j->logprobs) || get_int(b, "top_logprobs", 0, MAX_TOP_LOGPROBS, &top) ||
        get_bool(b, "parallel_tool_calls", &parallel) || get_bool(b, "enable_thinking", &settings.enable_thinking) ||
        get_bool(b, "preserve_thinking", &settings.preserve_thinking) || get_bool(b, "add_generation_prompt", &settings.add_generation_prompt) ||
        get_string(b, "reasoning_effort", &effort, &n_effort))
        return -1;
    if (!messages || b->json.nodes[messages].kind != G4_JSON_ARRAY || !b->json.nodes[messages].size)
        return fail(f, 400, NULL, "messages", "messages: expected an array of at least one message");
    if (top && !j->logprobs) return fail(f, 400, NULL, "top_logprobs", "top_logprobs: only allowed where logprobs is true");
    if (!parallel) return fail(f, 400, "unsupported_parameter", "parallel_tool_calls", "parallel_tool_calls: false is not built into this server");
    if (choice_node) {
        const char *text = b->json.nodes[choice_node].kind == G4_JSON_STRING ? g4_json_string(&b->json, choice_node) : "{...}";
        tools_off = !strcmp(text, "none");
        if (!tools_off && strcmp(text, "auto"))
            return fail(f, 400, "unsupported_parameter", "tool_choice", "tool_choice: \"auto\" and \"none\" are built, not %.40s", text);
    }
    if (modalities) {
        uint32_t first = b->json.nodes[modalities].kind == G4_JSON_ARRAY ? b->json.nodes[modalities].first : 0;
        if (!first || b->json.nodes[modalities].size != 1 || b->json.nodes[first].kind != G4_JSON_STRING || strcmp(g4_json_string(&b->json, first), "text"))
            return fail(f, 400, "unsupported_parameter", "modalities", "modalities: only [\"text\"] is built");
    }
    if (kwargs) {
        if (b->json.nodes[kwargs].kind != G4_JSON_OBJECT) return fail(f, 400, NULL, "chat_template_kwargs", "chat_template_kwargs: expected an object, found %s", kind_name(&b->json, kwargs));
        for (uint32_t i = b->json.nodes[kwargs].first; i; i = b->json.nodes[i].next) {
            const char *key = b->json.text + b->json.nodes[i].key;
            int kind = b->json.nodes[i].kind, *setting = !strcmp(key, "enable_thinking") ? &settings.enable_thinking : !strcmp(key, "preserve_thinking") ? &settings.preserve_thinking : NULL;
            if (!setting) log_line(s, "warning: chat_template_kwargs: \"%.80s\" is not known here and has no effect", key);
            else if (kind != G4_JSON_TRUE && kind != G4_JSON_FALSE) return fail(f, 400, NULL, "chat_template_kwargs", "chat_template_kwargs: %s: expected true or false, found %s", key, kind_name(&b->json, i));
            else *setting = kind == G4_JSON_TRUE;
        }
    }
    if (effort && settings.enable_thinking < 0) settings.enable_thinking = strcmp(effort, "none") != 0;
    member(b, "tools"); /* the template reads it */
    settings.no_tools = tools_off;

    g4_chat_prompt rendered = {0};
    g4_error err;
    string request = {0};
    g4_json json;
    int failed = template_request(b, &request, f);
    if (!failed && g4_json_parse(&json, request.data, request.n, "the request", &err)) failed = fail(f, 400, NULL, "messages", "%s", err.text);
    free_string(&request);
    if (failed) return -1;
    failed = g4_chat_render_json(&json, 0, s->o.family, &settings, &rendered, &err);
    g4_json_free(&json);
    if (failed) return fail(f, 400, NULL, "messages", "%s", err.text);
    if (rendered.n_media || rendered.n_unknown)
        failed = fail(f, 400, NULL, "messages", "messages: %s: this model takes text only", rendered.n_media ? "an image, audio or video" : "a content part of an unknown type");
    j->in_reasoning = rendered.in_reasoning;
    j->prompts = calloc(1, sizeof *j->prompts);
    j->prompts_n = j->prompts != NULL;
    if (!failed && (!j->prompts || g4_chat_encode(s->o.tok, &rendered, 0, &j->prompts[0].ids, &j->prompts[0].n, &err)))
        failed = fail(f, 500, NULL, NULL, "%s", j->prompts ? err.text : "out of memory");
    g4_chat_prompt_free(&rendered);
    r.top_logprobs = (int)top;
    return failed ? -1 : make_choices(s, j, &r, (int)n, f);
}

/* A prompt as text: <bos> and what the text says, in which special tokens are recognised. Never two of them. */
static int encode_text(server *s, const char *text, size_t n, int bos, int flags, int32_t **ids, size_t *count, failure *f) {
    int32_t *list;
    size_t m;
    g4_error err;
    if (g4_encode(s->o.tok, text, n, flags, &list, &m, &err)) return fail(f, 500, NULL, NULL, "%s", err.text);
    int add = bos && !(m && list[0] == s->bos);
    *ids = malloc((m + 1) * sizeof **ids);
    if (*ids) {
        if (add) (*ids)[0] = s->bos;
        if (m) memcpy(*ids + add, list, m * sizeof **ids);
        *count = m + (size_t)add;
    }
    g4_free(list);
    return *ids ? 0 : fail(f, 500, NULL, NULL, "out of memory");
}

static int read_ids(server *s, body *b, const char *param, uint32_t array, prompt *p) {
    const g4_json_node *node = &b->json.nodes[array];
    p->ids = malloc(((size_t)node->size + 1) * sizeof *p->ids);
    if (!p->ids) return fail(b->f, 500, NULL, NULL, "out of memory");
    for (uint32_t i = node->first; i; i = b->json.nodes[i].next) {
        int64_t id;
        if (b->json.nodes[i].kind != G4_JSON_NUMBER || g4_json_int(&b->json, i, &id) || id < 0 || id >= s->vocab_size)
            return fail(b->f, 400, NULL, param, "%s: item %zu: expected a token id from 0 to %d", param, p->n + 1, s->vocab_size - 1);
        p->ids[p->n++] = (int32_t)id;
    }
    return 0;
}

/* The bytes of a list of ids may be asked for only where each has some. */
static int check_pieces(server *s, failure *f, const char *param, const prompt *p) {
    size_t n;
    for (size_t i = 0; i < p->n; i++)
        if (!g4_token_piece(s->o.tok, p->ids[i], &n)) return fail(f, 400, NULL, param, "%s: item %zu: the tokenizer has no token %d", param, i + 1, (int)p->ids[i]);
    return 0;
}

static int add_prompt(server *s, body *b, job *j, uint32_t node) {
    prompt *p = &j->prompts[j->prompts_n++];
    if (b->json.nodes[node].kind == G4_JSON_STRING) {
        const char *text = g4_json_string(&b->json, node);
        if (j->echo) put_bytes(&p->echo, text, b->json.nodes[node].size);
        return encode_text(s, text, b->json.nodes[node].size, 1, 0, &p->ids, &p->n, b->f);
    }
    if (b->json.nodes[node].kind != G4_JSON_ARRAY) return fail(b->f, 400, NULL, "prompt", "prompt: expected strings or arrays of token ids, found %s", kind_name(&b->json, node));
    if (read_ids(s, b, "prompt", node, p)) return -1;
    if (!p->n) return fail(b->f, 400, NULL, "prompt", "prompt: an array of token ids is empty");
    string piece = {0};
    for (size_t i = 0; j->echo && i < p->n; i++) {
        token_bytes(s->o.tok, p->ids[i], &piece);
        put_bytes(&p->echo, piece.data, piece.n);
        p->echo.failed |= piece.failed;
    }
    free_string(&piece);
    return 0;
}

static int make_completion(server *s, body *b, job *j, failure *f) {
    g4_request r = {.max_new = 0};
    int64_t n = 1, best_of = -1, top = -1;
    uint32_t node = member(b, "prompt");
    if (get_common(s, b, j, &r, &n, 16) || get_int(b, "logprobs", 0, MAX_TOP_LOGPROBS, &top) || get_bool(b, "echo", &j->echo) || get_int(b, "best_of", 1, MAX_CHOICES, &best_of))
        return -1;
    if (best_of >= 0 && best_of != n) return fail(f, 400, "unsupported_parameter", "best_of", "best_of: only the value of n, %lld, is built", (long long)n);
    if (top >= 0 && j->echo) return fail(f, 400, "unsupported_parameter", "echo", "echo: with logprobs it is not built");
    j->logprobs = top >= 0;
    r.top_logprobs = top > 0 ? (int)top : 0;
    if (!node) return fail(f, 400, NULL, "prompt", "prompt: expected a string, an array of strings or of token ids, found nothing");
    const g4_json_node *v = &b->json.nodes[node];
    int several = v->kind == G4_JSON_ARRAY && v->first && b->json.nodes[v->first].kind != G4_JSON_NUMBER;
    if (several && v->size > MAX_CHOICES) return fail(f, 400, NULL, "prompt", "prompt: expected at most %d prompts, found %u", MAX_CHOICES, (unsigned)v->size);
    j->prompts = calloc(several ? v->size : 1, sizeof *j->prompts);
    if (!j->prompts) return fail(f, 500, NULL, NULL, "out of memory");
    if (!several && add_prompt(s, b, j, node)) return -1;
    for (uint32_t i = v->first; several && i; i = b->json.nodes[i].next)
        if (add_prompt(s, b, j, i)) return -1;
    return make_choices(s, j, &r, (int)n, f);
}

/* Into the inbox, unless there are too many already. */
static int submit(server *s, job *j, failure *f) {
    int failed = 0;
    pthread_mutex_lock(&s->mutex);
    int most = g4_state_get_options(s->o.state)->n_seqs + s->o.queue;
    if (s->stopping) {
        failed = fail(f, 503, NULL, NULL, "the server is shutting down");
    } else if (j->n_choices > most) { /* trying again would not help */
        failed = fail(f, 400, NULL, j->prompts_n > 1 ? "prompt" : "n", "%d answers are asked for, and this server takes at most %d at a time", j->n_choices, most);
    } else if (s->in_flight + j->n_choices > most) {
        s->refused++;
        failed = fail(f, 429, "queue_full", NULL, "%d answers are being computed or wait, and at most %d may; try again later", s->in_flight, most);
    } else {
        snprintf(j->id, sizeof j->id, "%s-%llx%06llx", j->chat ? "chatcmpl" : "cmpl", (unsigned long long)s->started, (unsigned long long)s->next_id++);
        s->in_flight += j->n_choices;
        j->refs++;
        j->next = NULL;
        *s->inbox_end = j;
        s->inbox_end = &j->next;
        pthread_cond_signal(&s->work_to_do);
    }
    pthread_mutex_unlock(&s->mutex);
    return failed;
}

/* ---- The other endpoints --------------------------------------------------------------------------------------------------------------------- */

static int tokenize(server *s, body *b, string *out, failure *f) {
    const char *text = NULL;
    size_t n = 0, count;
    int bos = 0, special = 1, pieces = 0;
    int32_t *ids;
    if (get_string(b, "content", &text, &n) || get_bool(b, "add_special", &bos) || get_bool(b, "parse_special", &special) || get_bool(b, "with_pieces", &pieces)) return -1;
    if (!text) return fail(f, 400, NULL, "content", "content: expected a string, found nothing");
    if (encode_text(s, text, n, bos, special ? 0 : G4_PLAIN_TEXT, &ids, &count, f)) return -1;
    string piece = {0};
    put(out, "{\"tokens\":[");
    for (size_t i = 0; i < count; i++) {
        putf(out, pieces ? "%s{\"id\":%d,\"piece\":" : "%s%d", i ? "," : "", (int)ids[i]);
        if (!pieces) continue;
        token_bytes(s->o.tok, ids[i], &piece);
        put_json(out, piece.data, piece.n);
        put(out, "}");
        out->failed |= piece.failed;
    }
    put(out, "]}\n");
    free_string(&piece);
    free(ids);
    return 0;
}

static int detokenize(server *s, body *b, string *out, failure *f) {
    uint32_t node = member(b, "tokens");
    prompt p = {0};
    string text = {0};
    g4_error err;
    if (!node || b->json.nodes[node].kind != G4_JSON_ARRAY) return fail(f, 400, NULL, "tokens", "tokens: expected an array of token ids");
    int failed = read_ids(s, b, "tokens", node, &p) || check_pieces(s, f, "tokens", &p) ? -1 : 0;
    g4_decoder *d = failed ? NULL : g4_decoder_open(s->o.tok, 0, &err);
    if (!failed && !d) failed = fail(f, 500, NULL, NULL, "%s", err.text);
    for (size_t i = 0; !failed && i <= p.n; i++) {
        const char *piece;
        size_t n;
        if (i < p.n ? g4_decode_push(d, p.ids[i], &piece, &n, &err) : g4_decode_end(d, &piece, &n, &err)) failed = fail(f, 500, NULL, NULL, "%s", err.text);
        else put_bytes(&text, piece, n);
    }
    if (!failed) {
        put(out, "{\"content\":");
        put_json(out, text.data, text.n);
        put(out, "}\n");
        out->failed |= text.failed;
    }
    if (d) g4_decoder_close(d);
    free_string(&text);
    free(p.ids);
    return failed;
}

static void put_model(string *out, const server *s) {
    put(out, "{\"id\":");
    put_json_text(out, s->o.name);
    putf(out, ",\"object\":\"model\",\"created\":%lld,\"owned_by\":\"gemma4.c\",\"max_model_len\":%d}", s->started, s->ctx);
}

static void put_metric(string *out, const char *name, const char *kind, const char *help, double value) {
    putf(out, "# HELP gemma4_%s %s\n# TYPE gemma4_%s %s\ngemma4_%s %.17g\n", name, help, name, kind, name, value);
}

static void put_metrics(string *out, server *s) {
    pthread_mutex_lock(&s->mutex);
    const g4_engine_stats *e = &s->stats;
    put(out, "# HELP gemma4_requests_total HTTP requests by endpoint and kind of status\n# TYPE gemma4_requests_total counter\n");
    for (int i = 0; i < N_ENDPOINTS; i++)
        for (int k = 1; k < 6; k++)
            if (s->requests[i][k]) putf(out, "gemma4_requests_total{endpoint=\"%s\",status=\"%dxx\"} %llu\n", endpoint_names[i], k, (unsigned long long)s->requests[i][k]);
    put_metric(out, "answers_in_flight", "gauge", "Answers being computed or waiting", s->in_flight);
    put_metric(out, "answers_active", "gauge", "Answers that have a sequence", e->active);
    put_metric(out, "answers_waiting", "gauge", "Answers that wait for a sequence", e->waiting);
    put_metric(out, "refused_total", "counter", "Requests refused because the queue was full", (double)s->refused);
    put_metric(out, "clients_gone_total", "counter", "Clients that left before their answer was complete", (double)s->gone);
    put_metric(out, "forwards_total", "counter", "Calls of the forward pass", (double)e->forwards);
    put_metric(out, "rows_total", "counter", "Rows computed", (double)e->rows);
    put_metric(out, "prompt_tokens_total", "counter", "Tokens of prompts that were computed", (double)e->prompt_tokens);
    put_metric(out, "cached_tokens_total", "counter", "Tokens of prompts that were in the cache", (double)e->cached_tokens);
    put_metric(out, "new_tokens_total", "counter", "Tokens generated", (double)e->new_tokens);
    put_metric(out, "proposed_tokens_total", "counter", "Tokens proposed by look-up", (double)e->proposed);
    put_metric(out, "accepted_tokens_total", "counter", "Of these, accepted", (double)e->accepted);
    put_metric(out, "prompt_seconds_total", "counter", "Time in forward passes with rows of prompts", e->prompt_seconds);
    put_metric(out, "decode_seconds_total", "counter", "Time in forward passes without", e->decode_seconds);
    put_metric(out, "sampling_seconds_total", "counter", "Time outside forward passes", e->sampling_seconds);
    pthread_mutex_unlock(&s->mutex);
}

/* ---- Connections: what libmicrohttpd calls ------------------------------------------------------------------------------------------------------ */

typedef struct exchange {
    server *s;
    struct MHD_Connection *connection;
    int endpoint;
    string body;
    size_t received;             /* bytes of the body; of one that is too large none are kept */
    job *job;
    struct timespec look;        /* when to look next whether the client is still there */
} exchange;

static int send_text(exchange *x, int status, const char *type, const char *data, size_t n, enum MHD_ResponseMemoryMode mode, const char *header, const char *value) {
    struct MHD_Response *r = MHD_create_response_from_buffer(n, (void *)(uintptr_t)data, mode);
    if (!r) return MHD_NO;
    MHD_add_response_header(r, "Content-Type", type);
    MHD_add_response_header(r, "Cache-Control", "no-store");
    if (header) MHD_add_response_header(r, header, value);
    int queued = MHD_queue_response(x->connection, (unsigned)status, r);
    MHD_destroy_response(r);
    pthread_mutex_lock(&x->s->mutex);
    x->s->requests[x->endpoint][status / 100]++;
    pthread_mutex_unlock(&x->s->mutex);
    return queued;
}

static int send_string(exchange *x, int status, const char *type, string *out) {
    static const char lost[] = "{\"error\":{\"message\":\"out of memory\",\"type\":\"server_error\",\"param\":null,\"code\":null}}";
    int sent = out->failed ? send_text(x, 500, "application/json", lost, sizeof lost - 1, MHD_RESPMEM_PERSISTENT, NULL, NULL)
                           : send_text(x, status, type, out->data ? out->data : "", out->n, MHD_RESPMEM_MUST_COPY, NULL, NULL);
    free_string(out);
    return sent;
}

static int send_failure(exchange *x, const failure *f) {
    string out = {0};
    put_failure(&out, f);
    put(&out, "\n");
    const char *header = f->status == 429 || f->status == 503 ? "Retry-After" : f->status == 401 ? "WWW-Authenticate" : f->status == 405 ? "Allow" : NULL;
    const char *value = f->status == 401 ? "Bearer" : f->status == 405 ? (x->endpoint <= ENDPOINT_DETOKENIZE ? "POST" : "GET, HEAD") : "1";
    if (out.failed) return send_string(x, 500, "application/json", &out);
    int sent = send_text(x, f->status, "application/json", out.data, out.n, MHD_RESPMEM_MUST_COPY, header, value);
    free_string(&out);
    return sent;
}

/* Has the client closed its end? A client that only stopped sending (it may) looks the same and is taken for gone: no HTTP library does that. */
static int client_left(struct MHD_Connection *connection) {
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
    char byte;
    if (!info) return 0;
    ssize_t n = recv(info->connect_fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    return n == 0 || (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
}

/* With the mutex held: waits until the job has something to send or is finished; -1 if the client left first. While it waits the connection must not
 * be closed for being silent. */
static int wait_for_job(exchange *x) {
    job *j = x->job;
    MHD_set_connection_option(x->connection, MHD_CONNECTION_OPTION_TIMEOUT, 0u);
    while (!j->finished && !j->gone && (!j->stream || j->sent == j->out.n)) {
        if (pthread_cond_timedwait(&j->changed, &x->s->mutex, &x->look) != ETIMEDOUT) continue; /* and tokens must not put off the next look */
        clock_gettime(CLOCK_MONOTONIC, &x->look);
        x->look.tv_nsec += LOOK_MS * 1000000L;
        if (x->look.tv_nsec >= 1000000000L) x->look.tv_sec++, x->look.tv_nsec -= 1000000000L;
        if (client_left(x->connection)) {
            j->gone = 1;
            x->s->gone++;
            x->s->cancelling = 1;
        }
    }
    MHD_set_connection_option(x->connection, MHD_CONNECTION_OPTION_TIMEOUT, (unsigned)x->s->o.timeout);
    return j->gone && !j->finished ? -1 : 0;
}

static ssize_t read_stream(void *user, uint64_t at, char *to, size_t max) {
    exchange *x = user;
    job *j = x->job;
    (void)at;
    pthread_mutex_lock(&x->s->mutex);
    ssize_t n = MHD_CONTENT_READER_END_WITH_ERROR;
    if (!wait_for_job(x) && !j->out.failed) {
        size_t left = j->out.n - j->sent;
        n = left ? (ssize_t)(left < max ? left : max) : MHD_CONTENT_READER_END_OF_STREAM;
        if (left) memcpy(to, j->out.data + j->sent, (size_t)n);
        if (left) j->sent += (size_t)n;
        if (j->sent == j->out.n) j->sent = j->out.n = 0;
    }
    pthread_mutex_unlock(&x->s->mutex);
    return n;
}

static int send_job(exchange *x) {
    job *j = x->job;
    if (j->stream) {
        struct MHD_Response *r = MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 16384, read_stream, x, NULL);
        if (!r) return MHD_NO;
        MHD_add_response_header(r, "Content-Type", "text/event-stream; charset=utf-8");
        MHD_add_response_header(r, "Cache-Control", "no-store");
        int queued = MHD_queue_response(x->connection, 200, r);
        MHD_destroy_response(r);
        pthread_mutex_lock(&x->s->mutex);
        x->s->requests[x->endpoint][2]++;
        pthread_mutex_unlock(&x->s->mutex);
        return queued;
    }
    pthread_mutex_lock(&x->s->mutex);
    int left = wait_for_job(x);
    failure f = j->failure;
    string out = j->out;
    memset(&j->out, 0, sizeof j->out);
    pthread_mutex_unlock(&x->s->mutex);
    if (left) {
        free_string(&out);
        return MHD_NO;
    }
    if (!f.status) return send_string(x, 200, "application/json", &out);
    free_string(&out);
    return send_failure(x, &f);
}

static int find_endpoint(const char *url) {
    static const struct { const char *path; int endpoint; } paths[] = {
        {"/v1/chat/completions", ENDPOINT_CHAT}, {"/v1/completions", ENDPOINT_COMPLETIONS}, {"/tokenize", ENDPOINT_TOKENIZE}, {"/detokenize", ENDPOINT_DETOKENIZE},
        {"/v1/models", ENDPOINT_MODELS}, {"/health", ENDPOINT_HEALTH}, {"/metrics", ENDPOINT_METRICS}, {"/", ENDPOINT_PAGE}};
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++)
        if (!strcmp(url, paths[i].path)) return paths[i].endpoint;
    return strncmp(url, "/v1/models/", 11) ? ENDPOINT_OTHER : ENDPOINT_MODELS;
}

/* A page of any site may let its name stand for this machine's own address (DNS rebinding): its browser then takes this server for a part of that site, and gives it the
 * answers. What it cannot change is the header Host. So a name that is not this machine's is refused where nothing else keeps strangers out; an address is no name, and
 * a request without Host comes from no browser. */
static int is_own_host(const server *s, const char *host) {
    char name[256];
    unsigned char address[4];
    if (!host || *host == '[') return 1; /* an IPv6 address */
    size_t n = strcspn(host, ":"), suffix = strlen(".localhost");
    if (n >= sizeof name) return 0;
    memcpy(name, host, n);
    name[n] = 0;
    return inet_pton(AF_INET, name, address) == 1 || !strcasecmp(name, "localhost") || (n > suffix && !strcasecmp(name + n - suffix, ".localhost")) || !strcasecmp(name, s->o.host);
}

/* In a time that does not depend on where they differ. */
static int same_key(const char *a, const char *b) {
    size_t n = strlen(a), m = strlen(b), different = n ^ m;
    for (size_t i = 0; i < n; i++) different |= (size_t)(unsigned char)(a[i] ^ (m ? b[i % m] : 0));
    return !different;
}

/* What can be refused before the body is read. */
static int check_head(exchange *x, const char *url, const char *method, failure *f) {
    const server *s = x->s;
    const char *length = MHD_lookup_connection_value(x->connection, MHD_HEADER_KIND, "Content-Length");
    const char *type = MHD_lookup_connection_value(x->connection, MHD_HEADER_KIND, "Content-Type");
    const char *key = MHD_lookup_connection_value(x->connection, MHD_HEADER_KIND, "Authorization");
    const char *host = MHD_lookup_connection_value(x->connection, MHD_HEADER_KIND, "Host");
    int post = x->endpoint <= ENDPOINT_DETOKENIZE;
    if (s->check_host && !is_own_host(s, host))
        return fail(f, 403, "host_not_allowed", NULL, "Host: %.200s is no name of this machine; a server that is to be reached under another name, through a proxy, needs --api-key", host);
    if (x->endpoint == ENDPOINT_OTHER) return fail(f, 404, NULL, NULL, "there is no %.200s here", url);
    if (post ? strcmp(method, "POST") != 0 : strcmp(method, "GET") && strcmp(method, "HEAD"))
        return fail(f, 405, NULL, NULL, "%.200s: expected the method %s, found %.20s", url, post ? "POST" : "GET", method);
    if (s->o.api_key && x->endpoint != ENDPOINT_PAGE && x->endpoint != ENDPOINT_HEALTH && !(key && !strncasecmp(key, "Bearer ", 7) && same_key(key + 7, s->o.api_key)))
        return fail(f, 401, "invalid_api_key", NULL, "expected the header Authorization: Bearer and this server's API key");
    /* a page of another origin can send any other type without asking the browser's leave */
    if (post && (!type || strncasecmp(type, "application/json", 16) || !strchr("; \t", type[16])))
        return fail(f, 415, NULL, NULL, "expected Content-Type: application/json, found %.80s", type ? type : "none");
    /* a body that is a little too large is read to its end (on_request): many clients look for an answer only when all is sent */
    if (post && length && (strlen(length) > 18 || strtoull(length, NULL, 10) / 2 > s->o.max_body))
        return fail(f, 413, NULL, NULL, "the request has %.20s bytes; at most %zu are taken", length, s->o.max_body);
    return 0;
}

static int answer_get(exchange *x, const char *url) {
    server *s = x->s;
    string out = {0};
    failure f;
    switch (x->endpoint) {
    case ENDPOINT_PAGE:
        return send_text(x, 200, "text/html; charset=utf-8", (const char *)page_html, page_html_size, MHD_RESPMEM_PERSISTENT, "Content-Security-Policy",
                         "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:");
    case ENDPOINT_HEALTH:
        pthread_mutex_lock(&s->mutex);
        int stopping = s->stopping;
        pthread_mutex_unlock(&s->mutex);
        if (stopping) {
            fail(&f, 503, NULL, NULL, "the server is shutting down");
            return send_failure(x, &f);
        }
        put(&out, "{\"status\":\"ok\"}\n");
        break;
    case ENDPOINT_METRICS:
        put_metrics(&out, s);
        return send_string(x, 200, "text/plain; version=0.0.4; charset=utf-8", &out);
    default: /* /v1/models, /v1/models/NAME */
        if (url[10] && strcmp(url + 11, s->o.name)) {
            fail(&f, 404, "model_not_found", "model", "this server has the model \"%.200s\", not \"%.200s\"", s->o.name, url + 11);
            return send_failure(x, &f);
        }
        if (!url[10]) put(&out, "{\"object\":\"list\",\"data\":[");
        put_model(&out, s);
        put(&out, url[10] ? "\n" : "]}\n");
    }
    return send_string(x, 200, "application/json", &out);
}

static int answer_post(exchange *x) {
    server *s = x->s;
    failure f = {0};
    body b;
    string out = {0};
    job *j = NULL;
    if (x->received > s->o.max_body) {
        fail(&f, 413, NULL, NULL, "the request has more than the %zu bytes that are taken", s->o.max_body);
        return send_failure(x, &f);
    }
    pthread_mutex_lock(&s->preparing);
    int failed = parse_body(&b, &x->body, &f);
    free_string(&x->body);
    if (!failed && x->endpoint == ENDPOINT_TOKENIZE) failed = tokenize(s, &b, &out, &f);
    else if (!failed && x->endpoint == ENDPOINT_DETOKENIZE) failed = detokenize(s, &b, &out, &f);
    else if (!failed && !(j = new_job(s))) failed = fail(&f, 500, NULL, NULL, "out of memory");
    else if (!failed) failed = x->endpoint == ENDPOINT_CHAT ? make_chat(s, &b, j, &f) : make_completion(s, &b, j, &f);
    if (!failed) warn_of_unknown(s, &b);
    free_body(&b);
    pthread_mutex_unlock(&s->preparing);
    if (!failed && j) failed = submit(s, j, &f);
    if (failed) {
        if (j) free_job(j);
        free_string(&out);
        return send_failure(x, &f);
    }
    if (!j) return send_string(x, 200, "application/json", &out);
    x->job = j;
    return send_job(x);
}

static enum MHD_Result on_request(void *user, struct MHD_Connection *connection, const char *url, const char *method, const char *version, const char *data, size_t *n,
                                  void **context) {
    exchange *x = *context;
    failure f = {0};
    (void)version;
    if (!x) { /* the head has come */
        x = calloc(1, sizeof *x);
        if (!x) return MHD_NO;
        *context = x;
        x->s = user;
        x->connection = connection;
        x->endpoint = find_endpoint(url);
        pthread_mutex_lock(&x->s->mutex);
        x->s->exchanges++;
        pthread_mutex_unlock(&x->s->mutex);
        return check_head(x, url, method, &f) ? send_failure(x, &f) : MHD_YES;
    }
    if (*n) {
        const size_t max = x->s->o.max_body;
        x->received += *n;
        if (x->received <= max) put_bytes(&x->body, data, *n);
        else free_string(&x->body);
        *n = 0;
        /* a body whose length the head does not say may go on for ever: it is read a little further, so that its client gets to the answer, and no more */
        return x->body.failed || x->received / 2 > max ? MHD_NO : MHD_YES;
    }
    return x->endpoint <= ENDPOINT_DETOKENIZE ? answer_post(x) : answer_get(x, url);
}

static void on_completed(void *user, struct MHD_Connection *connection, void **context, enum MHD_RequestTerminationCode code) {
    exchange *x = *context;
    (void)user, (void)connection, (void)code;
    if (!x) return;
    server *s = x->s;
    pthread_mutex_lock(&s->mutex);
    s->exchanges--;
    if (x->job) {
        if (!x->job->finished && !x->job->gone) {
            x->job->gone = 1;
            s->gone++;
            s->cancelling = 1;
        }
        release_job(x->job);
        pthread_cond_signal(&s->work_to_do);
    }
    pthread_mutex_unlock(&s->mutex);
    free_string(&x->body);
    free(x);
    *context = NULL;
}

/* ---- The daemon --------------------------------------------------------------------------------------------------------------------------------- */

static void ignore(void *user, const char *format, va_list args) { (void)user, (void)format, (void)args; }

/* The listening socket, or -1. *local: nobody but this machine can connect. */
static int open_socket(const serve_options *o, char *url, size_t room, int *local, g4_error *err) {
    char port[16], host[INET6_ADDRSTRLEN];
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE}, *list = NULL;
    snprintf(port, sizeof port, "%d", o->port);
    int status = getaddrinfo(o->host, port, &hints, &list);
    if (status) return g4_fail(err, "--host %s: expected an address or a name that has one: %s", o->host, gai_strerror(status));
    int fd = -1, reason = 0;
    for (struct addrinfo *a = list; a && fd < 0; a = a->ai_next) {
        int on = 1;
        fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (fd < 0) {
            reason = errno;
            continue;
        }
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        if (!bind(fd, a->ai_addr, a->ai_addrlen) && !listen(fd, 512)) break;
        reason = errno;
        close(fd);
        fd = -1;
    }
    freeaddrinfo(list);
    if (fd < 0) return g4_fail(err, "--host %s --port %d: cannot listen there: %s", o->host, o->port, strerror(reason));
    struct sockaddr_storage bound;
    socklen_t n = sizeof bound;
    if (getsockname(fd, (struct sockaddr *)&bound, &n) || getnameinfo((struct sockaddr *)&bound, n, host, sizeof host, port, sizeof port, NI_NUMERICHOST | NI_NUMERICSERV)) {
        close(fd);
        return g4_fail(err, "--host %s --port %d: the system does not tell the address of the socket", o->host, o->port);
    }
    *local = bound.ss_family == AF_INET6 ? IN6_IS_ADDR_LOOPBACK(&((struct sockaddr_in6 *)&bound)->sin6_addr) : ntohl(((struct sockaddr_in *)&bound)->sin_addr.s_addr) >> 24 == 127;
    snprintf(url, room, bound.ss_family == AF_INET6 ? "http://[%s]:%s" : "http://%s:%s", host, port);
    return fd;
}

/* SIGTERM and SIGINT, a byte each. Not blocked and waited for: a signal that this server's threads block goes to one of OpenMP's, which may be older than the server
 * and then block none, and ends the process. A handler does its work in any thread. */
static int signal_pipe[2];

static void on_signal(int number) {
    int before = errno;
    unsigned char byte = (unsigned char)number;
    if (write(signal_pipe[1], &byte, 1) < 0) {} /* it is full: nobody waits for one more */
    errno = before;
}

/* The next signal; 0: none came in that time. ms -1: however long it takes. */
static int next_signal(int ms) {
    struct pollfd p = {.fd = signal_pipe[0], .events = POLLIN};
    unsigned char byte;
    return poll(&p, 1, ms) > 0 && read(signal_pipe[0], &byte, 1) == 1 ? byte : 0;
}

/* Until every answer is sent, at most so many seconds, or till the next signal. With the mutex held. */
static void wait_for_answers(server *s, double seconds) {
    for (double end = monotonic() + seconds; (s->in_flight || s->exchanges) && monotonic() < end;) {
        pthread_mutex_unlock(&s->mutex);
        int again = next_signal(20);
        pthread_mutex_lock(&s->mutex);
        if (again) break;
    }
}

/* A thread of its own: waits for SIGTERM or SIGINT, and then for the answers in progress (a second signal ends those at once), and ends the server. */
static void *wait_for_the_end(void *user) {
    enum { LAST_WORDS = 5 }; /* seconds to tell clients that their answer is cancelled; a step in progress comes to its end first */
    server *s = user;
    int number;
    while (!(number = next_signal(-1))) {}
    log_line(s, "%s: no new requests; answers in progress have %d s", number == SIGINT ? "SIGINT" : "SIGTERM", s->o.grace);
    pthread_mutex_lock(&s->mutex);
    s->stopping = 1;
    wait_for_answers(s, s->o.grace);
    if (s->in_flight) log_line(s, "answers that are cancelled: %d", s->in_flight);
    s->stopping = 2;
    pthread_cond_signal(&s->work_to_do);
    wait_for_answers(s, LAST_WORDS);
    pthread_mutex_unlock(&s->mutex);
    MHD_socket listening = MHD_quiesce_daemon(s->daemon);
    MHD_stop_daemon(s->daemon); /* waits for the connections, which wait for their jobs, which are cancelled now */
    if (listening != MHD_INVALID_SOCKET) close(listening);
    pthread_mutex_lock(&s->mutex);
    s->stopping = 3;
    pthread_cond_signal(&s->work_to_do);
    pthread_mutex_unlock(&s->mutex);
    return NULL;
}

int serve(const serve_options *o, g4_error *err) {
    char url[128];
    g4_engine_options how = {.speculate = o->speculate, .clock = monotonic};
    server s = {.o = *o, .ctx = g4_state_get_options(o->state)->ctx, .vocab_size = g4_get_config(o->model)->vocab_size, .started = (long long)time(NULL)};
    s.inbox_end = &s.inbox;
    s.bos = g4_token_id(o->tok, "<bos>");
    if (s.bos < 0) return g4_fail(err, "the tokenizer has no token <bos>, with which a text must begin");
    s.engine = g4_engine_open(o->state, o->tok, &how, err);
    if (!s.engine) return -1;
    int local = 0, fd = open_socket(o, url, sizeof url, &local, err);
    if (fd >= 0 && pipe2(signal_pipe, O_CLOEXEC | O_NONBLOCK)) {
        close(fd);
        fd = g4_fail(err, "a pipe for signals cannot be had: %s", strerror(errno));
    }
    if (fd < 0) {
        g4_engine_close(s.engine);
        return -1;
    }
    s.check_host = local && !o->api_key;
    pthread_mutex_init(&s.preparing, NULL);
    pthread_mutex_init(&s.mutex, NULL);
    pthread_cond_init(&s.work_to_do, NULL);

    /* A client that goes away is no reason to die. */
    struct sigaction old_pipe, old_term, old_int, no_pipe = {.sa_handler = SIG_IGN}, to_the_end = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    sigaction(SIGPIPE, &no_pipe, &old_pipe);
    sigaction(SIGTERM, &to_the_end, &old_term);
    sigaction(SIGINT, NULL, &old_int);
    if (old_int.sa_handler != SIG_IGN) sigaction(SIGINT, &to_the_end, NULL); /* as it is behind nohup */

    pthread_t keeper;
    int failed = 0;
    s.daemon = MHD_start_daemon(MHD_USE_THREAD_PER_CONNECTION | MHD_USE_INTERNAL_POLLING_THREAD | MHD_USE_POLL | MHD_USE_ITC | MHD_USE_ERROR_LOG, 0, NULL, NULL,
                                on_request, &s, MHD_OPTION_EXTERNAL_LOGGER, ignore, NULL, MHD_OPTION_LISTEN_SOCKET, fd, MHD_OPTION_CONNECTION_LIMIT,
                                (unsigned)MAX_CONNECTIONS, MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)o->timeout, MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)65536,
                                MHD_OPTION_NOTIFY_COMPLETED, on_completed, NULL, MHD_OPTION_STRICT_FOR_CLIENT, 1, MHD_OPTION_END);
    if (!s.daemon) {
        close(fd);
        failed = g4_fail(err, "libmicrohttpd cannot be started on %s", url);
    } else if (pthread_create(&keeper, NULL, wait_for_the_end, &s)) {
        MHD_stop_daemon(s.daemon);
        failed = g4_fail(err, "a thread cannot be started");
    } else {
        if (o->listening) o->listening(url);
        work(&s); /* here, in the thread that opened the model: OpenMP's threads belong to it, and with those of another thread there would be too many to spin */
        pthread_join(keeper, NULL);
    }
    sigaction(SIGINT, &old_int, NULL);
    sigaction(SIGTERM, &old_term, NULL);
    sigaction(SIGPIPE, &old_pipe, NULL);
    close(signal_pipe[0]);
    close(signal_pipe[1]);
    g4_engine_close(s.engine);
    pthread_cond_destroy(&s.work_to_do);
    pthread_mutex_destroy(&s.mutex);
    pthread_mutex_destroy(&s.preparing);
    return failed;
}
