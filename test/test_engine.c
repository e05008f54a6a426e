/* test_engine.c - the engine: each request must give what it gives alone, token by token through g4_forward and g4_sample, whatever else runs, is cached or is
 * drafted; texts must be those that decoding and searching afterwards gives; caches copied, saved and loaded must go on with the same bits.
 *
 * Read alone() first: it is what everything is compared with.
 */
#define G4_EXACT_FLOAT
#include "gemma4.h"
#include "test.h"

#include <math.h>
#ifdef _WIN32
#include <direct.h>
#include <process.h>
#define make_directory(path) _mkdir(path)
static char dir[64];
static void make_dir(void) {
    snprintf(dir, sizeof dir, "test-engine-%d", _getpid());
    make_directory(dir);
}
#else
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#define make_directory(path) mkdir(path, 0777)
static char dir[] = "/tmp/gemma4-engine-XXXXXX";
static void make_dir(void) {
    if (!mkdtemp(dir)) printf("no directory %s\n", dir);
}
#endif
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#define MIN(a, b) ((a) < (b) ? (a) : (b))

static g4_error err;

static uint64_t rng_state = 1;
static uint32_t rng(void) { /* xorshift64*: only to choose */
    rng_state ^= rng_state >> 12, rng_state ^= rng_state << 25, rng_state ^= rng_state >> 27;
    return (uint32_t)(rng_state * 2685821657736338717u >> 32);
}
static int below(int n) { return (int)(rng() % (uint32_t)n); }

static g4_model *open_model(const char *path, const char *backend) {
    g4_model *m = g4_open(path, &(g4_options){.backend = backend}, &err);
    if (m) return m;
    printf("FAILED test_engine: %s\n", err.text);
    exit(1);
}

static g4_state *open_state(const g4_model *m, int ctx, int chunk, int n_seqs) {
    g4_state *s = g4_state_open(m, &(g4_state_options){.ctx = ctx, .chunk = chunk, .n_seqs = n_seqs, .threads = 1 + !below(4)}, &err);
    if (s) return s;
    printf("FAILED test_engine: %s\n", err.text);
    exit(1);
}

static g4_engine *open_engine(g4_state *s, const g4_tokenizer *tok, g4_engine_options o) {
    g4_engine *e = g4_engine_open(s, tok, &o, &err);
    if (e) return e;
    printf("FAILED test_engine: %s\n", err.text);
    exit(1);
}

enum { CTX = 72 };

/* What a request must give, and what it gave. */
typedef struct text {
    int32_t prompt[CTX], ids[CTX], got[CTX];
    int n_prompt, n, n_got, n_cached;
    g4_finish finish, ended; /* expected, seen */
    int32_t stop, stopped;
    g4_sampling how;
    g4_logit_bias bias[3];
    int max_new;
    int32_t stop_id;         /* -1: none beside the model's */
    int64_t number;
    int cancelled;
} text;

/* The request by itself: one row after the other, no engine. scratch [V]. */
static void alone(g4_state *s, text *t, float *logits) {
    const g4_config *c = g4_get_config(g4_state_get_model(s));
    int32_t history[CTX];
    t->n = 0, t->finish = G4_FINISH_LENGTH, t->stop = 0;
    t->how.n_prompt = (size_t)t->n_prompt;
    memcpy(history, t->prompt, sizeof *history * (size_t)t->n_prompt);
    g4_truncate(s, 0, 0, NULL);
    for (int pos = 0; t->n < t->max_new && t->n_prompt + t->n < CTX; pos++) {
        g4_row row = {history[pos], 0, pos, pos >= t->n_prompt - 1};
        CHECK(!g4_forward(s, &row, 1, logits, &err), "%s", err.text);
        if (!row.want_logits) continue;
        int32_t id = g4_sample(&t->how, logits, c->vocab_size, history, (size_t)pos + 1, c->suppress_tokens, c->n_suppress, &err);
        int is_stop = id == t->stop_id;
        for (int i = 0; i < c->n_eos; i++) is_stop |= id == c->eos_token_id[i];
        if (is_stop) {
            t->finish = G4_FINISH_STOP_ID, t->stop = id;
            return;
        }
        if (id >= c->vocab_size_per_layer_input && c->hidden_size_per_layer_input) {
            t->finish = G4_FINISH_ERROR;
            return;
        }
        history[pos + 1] = t->ids[t->n++] = id;
    }
}

static g4_sampling random_sampling(void) {
    g4_sampling how = {.temperature = below(3) ? 0.3f * (float)below(5) : 0, .top_k = below(2) ? below(20) : 0, .top_p = below(2) ? 0.9f : 1, .repeat_penalty = 1,
                       .seed = rng()};
    if (!below(4)) how.repeat_penalty = 1.3f;
    if (!below(4)) how.frequency_penalty = 0.5f, how.presence_penalty = 0.25f;
    return how;
}

/* A prompt that may begin like others, may repeat itself, may go on where another text ended; its ids are few, the stop id among them. Half of the texts are
 * biased towards three ids, so that they repeat themselves. */
static void random_request(text *t, const text *before, int n_before, int V) {
    static int32_t base[3][CTX];
    if (!base[0][0])
        for (int b = 0; b < 3; b++)
            for (int i = 0; i < CTX; i++) base[b][i] = i && below(3) ? base[b][below(i)] : 2 + below(140); /* ids of every fixture */
    memset(t, 0, sizeof *t);
    int kind = below(4), limit = 1 + below(CTX - 20);
    const text *other = n_before ? &before[below(n_before)] : NULL;
    if (kind == 0 && other) {
        for (int i = 0; i < other->n_prompt && t->n_prompt < limit; i++) t->prompt[t->n_prompt++] = other->prompt[i];
        for (int i = 0; i < other->n && t->n_prompt < limit; i++) t->prompt[t->n_prompt++] = other->ids[i];
    } else {
        int b = below(3), n = below(limit + 1);
        while (t->n_prompt < n) t->prompt[t->n_prompt] = base[b][t->n_prompt], t->n_prompt++;
    }
    int tail = !t->n_prompt + below(6), period = 1 + below(4);
    for (int i = 0; i < tail && t->n_prompt < CTX; i++)
        t->prompt[t->n_prompt] = t->n_prompt >= period && below(2) ? t->prompt[t->n_prompt - period] : 1 + below(9), t->n_prompt++;
    t->how = random_sampling();
    t->max_new = below(8) ? below(40) : CTX;
    t->stop_id = below(2) ? below(V) : -1;
    if (below(2)) {
        for (int i = 0; i < 3; i++) t->bias[i] = (g4_logit_bias){1 + below(9), below(8) ? 12 : 50};
        t->how.logit_bias = t->bias, t->how.n_logit_bias = 3;
    }
}

static int64_t add(g4_engine *e, text *t) {
    g4_request r = {.prompt = t->prompt, .n_prompt = (size_t)t->n_prompt, .sampling = t->how, .max_new = t->max_new, .stop_ids = &t->stop_id, .n_stop_ids = 1, .user = t};
    return t->number = g4_engine_add(e, &r, &err);
}

/* One step; every event goes to its text. Gives the number of events that make no sense. */
static int step(g4_engine *e, int *events) {
    const g4_event *event;
    int n = g4_engine_step(e, &event), bad = 0;
    for (int i = 0; i < n; i++) {
        const g4_event *v = &event[i];
        text *t = v->user;
        bad += v->request != t->number || t->ended != G4_RUNNING || v->n_prompt != t->n_prompt || v->n_cached >= t->n_prompt + (v->n_cached == 0) || !v->text;
        bad += (v->finish == G4_FINISH_ERROR) != (v->error != NULL) || (v->token < 0 && v->finish == G4_RUNNING) || v->n_text != 0;
        if (v->token >= 0) t->got[t->n_got++] = v->token;
        bad += v->n_new != t->n_got;
        t->ended = v->finish, t->stopped = v->stop, t->n_cached = v->n_cached;
    }
    if (events) *events += n;
    return bad;
}

/* Requests that come and go at random; those that were not cancelled must give what they give alone, the others the beginning of it. */
static void check_schedules(const char *name, int rounds) {
    char path[128];
    snprintf(path, sizeof path, "test/fixtures/%s", name);
    g4_model *oracle = open_model(path, "scalar");
    g4_state *one = open_state(oracle, CTX, 4, 1);
    int V = g4_get_config(oracle)->vocab_size, known = V;
    if (g4_get_config(oracle)->hidden_size_per_layer_input) known = MIN(V, g4_get_config(oracle)->vocab_size_per_layer_input);
    float *logits = malloc(sizeof *logits * (size_t)V);
    uint64_t proposed = 0, accepted = 0, cached = 0, computed = 0;
    int finishes[6] = {0};
    for (int round = 0; round < rounds; round++) {
        enum { N = 14 };
        static text texts[N];
        g4_model *m = round % 2 ? open_model(path, NULL) : oracle;
        int n_seqs = 1 + below(4), chunk = 1 + below(12), added = 0, ended = 0, bad = 0, steps = 0;
        g4_state *s = open_state(m, CTX, chunk, n_seqs);
        g4_engine *e = open_engine(s, NULL, (g4_engine_options){.budget = below(3) ? 0 : 1 + below(12), .speculate = below(3) ? 1 + below(8) : 0, .no_prefix_reuse = !below(4)});
        while (ended < N && steps++ < 3000) {
            for (int k = below(3); k > 0 && added < N; k--) {
                text *t = &texts[added];
                random_request(t, texts, added, known);
                alone(one, t, logits);
                CHECK(add(e, t) == added + 1, "%s: %s", name, err.text);
                added++;
            }
            if (added && !below(12)) {
                text *t = &texts[below(added)];
                int status = g4_engine_cancel(e, t->number);
                bad += (status == 0) != (t->ended == G4_RUNNING);
                t->cancelled |= status == 0;
            }
            bad += step(e, NULL);
            ended = 0;
            for (int i = 0; i < added; i++) ended += texts[i].ended != G4_RUNNING;
            bad += g4_engine_pending(e) != added - ended;
        }
        CHECK(ended == N && !bad, "%s, round %d: %d of %d ended, %d events or answers make no sense", name, round, ended, (int)N, bad);
        for (int i = 0; i < N; i++) {
            const text *t = &texts[i];
            int same = t->n_got <= t->n && !memcmp(t->got, t->ids, sizeof *t->ids * (size_t)t->n_got);
            same &= t->ended == G4_FINISH_CANCELLED ? t->cancelled : t->n_got == t->n && t->ended == t->finish && t->stopped == t->stop;
            CHECK(same, "%s, round %d, request %d: %d tokens, finish %d; alone %d tokens, finish %d", name, round, i, t->n_got, (int)t->ended, t->n, (int)t->finish);
            finishes[t->ended]++;
        }
        g4_engine_stats stats;
        g4_engine_get_stats(e, &stats);
        CHECK(stats.forwards <= (uint64_t)steps && stats.active == 0 && stats.waiting == 0, "%s: %d steps, %d forward calls", name, steps, (int)stats.forwards);
        proposed += stats.proposed, accepted += stats.accepted, cached += stats.cached_tokens, computed += stats.prompt_tokens;
        g4_engine_close(e);
        g4_state_close(s);
        if (m != oracle) g4_close(m);
    }
    CHECK(proposed > accepted && accepted > 20 && cached > 20, "%s: the schedules were too tame: %d drafted, %d accepted, %d cached", name, (int)proposed, (int)accepted,
          (int)cached);
    CHECK(finishes[G4_FINISH_STOP_ID] && finishes[G4_FINISH_LENGTH] && finishes[G4_FINISH_CANCELLED], "%s: no request ended so", name);
    free(logits);
    g4_state_close(one);
    g4_close(oracle);
}

/* ---- Limits, errors, fairness ------------------------------------------------------------------------------------------------- */

static void run_all(g4_engine *e) {
    int bad = 0;
    for (int i = 0; i < 3000 && g4_engine_pending(e); i++) bad += step(e, NULL);
    CHECK(!bad && !g4_engine_pending(e), "%d events make no sense, %d requests pend", bad, g4_engine_pending(e));
}

static text new_text(int n_prompt, int max_new) {
    text t = {.n_prompt = n_prompt, .max_new = max_new, .how = {.top_p = 1, .repeat_penalty = 1}, .stop_id = -1};
    for (int i = 0; i < n_prompt; i++) t.prompt[i] = 3 + (i * i + i) % 50;
    return t;
}

static void check_limits(void) {
    g4_model *m = open_model("test/fixtures/untied-f32", NULL);
    g4_state *s = open_state(m, 64, 8, 2);
    g4_engine *e = open_engine(s, NULL, (g4_engine_options){.speculate = 4});
    int V = g4_get_config(m)->vocab_size;
    const struct {
        int n_prompt, max_new, expected;
    } cases[] = {{60, 100, 4}, {63, 100, 1}, {64, 100, 0}, {5, 0, 0}, {5, 1, 1}, {5, 1000000000, 59}};
    for (int i = 0; i < 6; i++) {
        text t = new_text(cases[i].n_prompt, cases[i].max_new);
        t.how.logit_bias = &(g4_logit_bias){1, -1000}, t.how.n_logit_bias = 1; /* 1 is the stop id */
        CHECK(add(e, &t) > 0, "%s", err.text);
        run_all(e);
        CHECK(t.ended == G4_FINISH_LENGTH && t.n_got == cases[i].expected, "%d of 64, max_new %d: %d tokens, finish %d", t.n_prompt, t.max_new, t.n_got, (int)t.ended);
    }
    text t = new_text(65, 4);
    CHECK(add(e, &t) == -1 && strstr(err.text, "n_prompt 65, n_ctx 64"), "a prompt too long: %s", err.text);
    t = new_text(0, 4);
    CHECK(add(e, &t) == -1 && strstr(err.text, "empty"), "an empty prompt: %s", err.text);
    for (int i = 0; i < 2; i++) {
        t = new_text(5, 4);
        t.prompt[3] = i ? V : -1;
        CHECK(add(e, &t) == -1 && strstr(err.text, "item 4"), "an id outside: %s", err.text);
    }
    t = new_text(5, 4);
    t.how.temperature = NAN;
    CHECK(add(e, &t) == -1 && strstr(err.text, "temperature"), "%s", err.text);
    t = new_text(5, -1);
    CHECK(add(e, &t) == -1 && strstr(err.text, "max_new"), "%s", err.text);
    const char *const stops[] = {"", "\x80x", NULL};
    const int32_t prompt[2] = {5, 6};
    g4_request r = {.prompt = prompt, .n_prompt = 2, .sampling = {.repeat_penalty = 1}, .max_new = 3, .n_stop = 1, .stop = stops};
    CHECK(g4_engine_add(e, &r, &err) == -1 && strstr(err.text, "tokenizer"), "stop strings without a tokenizer: %s", err.text);
    r.n_stop = 0, r.top_logprobs = V + 1;
    CHECK(g4_engine_add(e, &r, &err) == -1 && strstr(err.text, "top_logprobs"), "%s", err.text);
    r.top_logprobs = 0, r.decode_flags = 2;
    CHECK(g4_engine_add(e, &r, &err) == -1 && strstr(err.text, "decode_flags"), "%s", err.text);
    r.decode_flags = 0, r.n_stop_ids = -1;
    CHECK(g4_engine_add(e, &r, &err) == -1 && strstr(err.text, "negative"), "%s", err.text);
    CHECK(g4_engine_pending(e) == 0 && g4_engine_cancel(e, 1) == -1 && g4_engine_cancel(e, 99) == -1, "nothing pends");

    /* one request's sampling overflows: it ends with an error, its neighbour does not notice */
    text bad = new_text(9, 9), good = new_text(7, 9), again = new_text(7, 9);
    bad.how.temperature = 0.5f;
    bad.how.logit_bias = &(g4_logit_bias){9, 3e38f}, bad.how.n_logit_bias = 1;
    CHECK(add(e, &good) > 0, "%s", err.text);
    run_all(e);
    CHECK(add(e, &bad) > 0 && add(e, &again) > 0, "%s", err.text);
    run_all(e);
    CHECK(bad.ended == G4_FINISH_ERROR && bad.n_got == 0 && again.ended == good.ended && again.n_got == good.n_got && !memcmp(again.got, good.got, sizeof again.got),
          "an overflow: finish %d", (int)bad.ended);
#if defined(__SSE__)
    text failing = new_text(9, 9), after = new_text(7, 9);
    CHECK(add(e, &failing) > 0 && add(e, &after) > 0 && !step(e, NULL), "%s", err.text);
    unsigned mode = _mm_getcsr();
    _mm_setcsr(mode | 0x8000); /* flush to zero: g4_forward refuses */
    const g4_event *event;
    int n = g4_engine_step(e, &event);
    _mm_setcsr(mode);
    CHECK(n == 2 && event[0].finish == G4_FINISH_ERROR && event[1].finish == G4_FINISH_ERROR && strstr(event[0].error, "floating-point"), "%d events when g4_forward fails", n);
    CHECK(g4_engine_pending(e) == 0, "both have ended");
    after = new_text(7, 9);
    CHECK(add(e, &after) > 0, "%s", err.text);
    run_all(e);
    CHECK(after.n_cached == 0 && after.n_got == good.n_got && !memcmp(after.got, good.got, sizeof after.got), "after that it works as before, with an empty cache");
#else
    SKIP("flush-to-zero: no way to switch it on here");
#endif
    g4_engine_close(e);
    const g4_engine_options wrong[2] = {{.budget = -1}, {.speculate = -1}};
    for (int i = 0; i < 2; i++) CHECK(!g4_engine_open(s, NULL, &wrong[i], &err) && strstr(err.text, i ? "speculate" : "budget"), "%s", err.text);

    /* an engine that is closed with requests of all kinds in it leaks nothing (sanitizers look) */
    e = open_engine(s, NULL, (g4_engine_options){0});
    text many[4];
    for (int i = 0; i < 4; i++) many[i] = new_text(20 + i, 5), add(e, &many[i]);
    CHECK(!step(e, NULL) && g4_engine_pending(e) == 4, "four pend");
    g4_engine_close(e);
    g4_engine_close(NULL);
    g4_state_close(s);
    g4_close(m);
}

/* While a long prompt is computed, a text gets a token in every step, and a short prompt does not wait for the long one's end. */
static void check_fairness(void) {
    g4_model *m = open_model("test/fixtures/e2b", NULL);
    g4_state *s = open_state(m, CTX, 8, 3);
    g4_engine *e = open_engine(s, NULL, (g4_engine_options){.budget = 8});
    text writing = new_text(2, 60), longer = new_text(60, 2), brief = new_text(6, 2);
    writing.how.logit_bias = longer.how.logit_bias = brief.how.logit_bias = &(g4_logit_bias){1, -1000};
    writing.how.n_logit_bias = longer.how.n_logit_bias = brief.how.n_logit_bias = 1;
    longer.prompt[0] = 90, brief.prompt[0] = 91;
    add(e, &writing);
    CHECK(!step(e, NULL) && writing.n_got == 1, "a short prompt has its first token after one step");
    add(e, &longer), add(e, &brief);
    int steps = 0, brief_ended = 0;
    while (longer.n_got == 0 && steps < 100) {
        CHECK(!step(e, NULL) && writing.n_got == ++steps + 1, "step %d beside a long prompt: %d tokens", steps, writing.n_got);
        if (!brief_ended && brief.n_got) brief_ended = steps;
    }
    CHECK(steps >= 9 && steps <= 13, "60 tokens of prompt by 7 rows and less: %d steps", steps);
    CHECK(brief_ended == 2, "6 tokens beside it, half of 7 rows: %d steps", brief_ended);
    run_all(e);
    g4_engine_close(e);

    /* more texts than the budget has rows: each still gets its row, and a prompt one */
    e = open_engine(s, NULL, (g4_engine_options){.budget = 1});
    text a = new_text(1, 20), b = new_text(2, 20), c = new_text(5, 3);
    b.prompt[0] = 44, c.prompt[0] = 45;
    a.how.logit_bias = b.how.logit_bias = c.how.logit_bias = &(g4_logit_bias){1, -1000};
    a.how.n_logit_bias = b.how.n_logit_bias = c.how.n_logit_bias = 1;
    add(e, &a), add(e, &b), add(e, &c);
    for (int i = 0; i < 7; i++) step(e, NULL);
    CHECK(a.n_got == 7 && b.n_got == 6 && c.n_got == 3 && c.ended, "a budget of 1: %d, %d, %d tokens", a.n_got, b.n_got, c.n_got);
    g4_engine_close(e);
    g4_state_close(s);
    g4_close(m);
}

/* What was computed is not computed again, where the rings still hold it. */
static void check_prefixes(void) {
    g4_model *m = open_model("test/fixtures/e2b", NULL); /* W is 6 */
    enum { CHUNK = 8, W = 6 };
    g4_state *s = open_state(m, CTX, CHUNK, 3);
    g4_engine *e = open_engine(s, NULL, (g4_engine_options){0});
    text a = new_text(40, 1), b = new_text(40, 1), c = new_text(40, 1), d = new_text(30, 1), f = new_text(33, 1);
    add(e, &a);
    run_all(e);
    CHECK(a.n_cached == 0, "the first time: %d cached", a.n_cached);
    add(e, &b);
    run_all(e);
    CHECK(b.n_cached == 39, "the same prompt again: %d cached; all but one row, which gives the logits", b.n_cached);
    for (int i = 35; i < 40; i++) c.prompt[i] = 99;
    add(e, &c);
    run_all(e);
    CHECK(c.n_cached == 35, "another end: %d cached", c.n_cached);
    add(e, &d);
    run_all(e);
    CHECK(d.n_cached == 0, "30 tokens of 40: the ring does not hold what position 29 sees: %d cached", d.n_cached);
    g4_engine_stats stats;
    g4_engine_get_stats(e, &stats);
    CHECK(stats.cached_tokens == 39 + 35 && stats.prompt_tokens == 40 + 1 + 5 + 30, "counted: %d, %d", (int)stats.cached_tokens, (int)stats.prompt_tokens);

    /* of a text that is just being written, and of a prompt that is just being computed */
    text w = new_text(20, 30), x = new_text(20, 3), y = new_text(50, 2), z = new_text(50, 2);
    w.how.logit_bias = x.how.logit_bias = y.how.logit_bias = z.how.logit_bias = &(g4_logit_bias){1, -1000};
    w.how.n_logit_bias = x.how.n_logit_bias = y.how.n_logit_bias = z.how.n_logit_bias = 1;
    w.prompt[0] = x.prompt[0] = 80;
    add(e, &w);
    for (int i = 0; i < 4; i++) step(e, NULL);
    add(e, &x);
    step(e, NULL);
    text all_of_it = new_text(20, 1); /* all that is known of it, though the last token is not computed yet */
    all_of_it.prompt[0] = 80;
    for (int i = 0; i < w.n_got; i++) all_of_it.prompt[all_of_it.n_prompt++] = w.got[i];
    int known = w.n_got;
    all_of_it.prompt[all_of_it.n_prompt++] = 98;
    CHECK(w.n_got == 3 && x.n_got == 1 && x.n_cached == 19 && x.got[0] == w.got[0], "20 tokens shared with a text at work: %d cached", x.n_cached);
    add(e, &all_of_it), step(e, NULL);
    CHECK(w.ended == G4_RUNNING && all_of_it.n_cached == 20 + known - 1, "%d cached of a text of 20 + %d tokens at work", all_of_it.n_cached, known);
    run_all(e);
    CHECK(!memcmp(x.got, w.got, 3 * sizeof *x.got), "and the same tokens");
    y.prompt[0] = z.prompt[0] = 81, z.prompt[45] = 99;
    add(e, &y), add(e, &z);
    run_all(e);
    CHECK(y.n_cached == 0 && z.n_cached <= 45 && z.n_cached >= 45 - 16, "a prompt that another one is computing is waited for: %d cached", z.n_cached);
    /* it is waited for no longer when the other one is cancelled */
    text u = new_text(60, 2), v = new_text(60, 2);
    u.prompt[0] = v.prompt[0] = 82;
    add(e, &u), add(e, &v);
    step(e, NULL);
    g4_engine_cancel(e, u.number);
    run_all(e);
    CHECK(u.ended == G4_FINISH_CANCELLED && v.n_got > 0 && v.n_cached == 8, "half of it was computed: %d cached", v.n_cached);
    g4_engine_close(e);

    /* a long text that shares little is not lost for it while another slot is free; a short one goes on in its place */
    e = open_engine(s, NULL, (g4_engine_options){0});
    text p = new_text(12, 1), q = new_text(12, 1), r = new_text(12, 1);
    for (int i = 5; i < 12; i++) q.prompt[i] = 70, r.prompt[i] = i < 9 ? p.prompt[i] : 71;
    add(e, &p), run_all(e), add(e, &q), run_all(e);
    CHECK(q.n_cached == 5 && g4_length(s, 0) == 12 && g4_length(s, 1) == 12, "5 of 12: in another slot, %d cached", q.n_cached);
    add(e, &r), run_all(e);
    CHECK(r.n_cached == 9 && g4_length(s, 2) == 0, "9 of 12: in the same slot, %d cached", r.n_cached);
    g4_engine_close(e);
    /* the longest prefix is of no use when the ring has moved on; a shorter one is */
    e = open_engine(s, NULL, (g4_engine_options){0});
    text moved = new_text(40, 1), shorter = new_text(20, 1), wanted = new_text(31, 1);
    shorter.prompt[19] = 97, wanted.prompt[30] = 96;
    add(e, &moved), run_all(e), add(e, &shorter), run_all(e), add(e, &wanted), run_all(e);
    CHECK(shorter.n_cached == 0 && wanted.n_cached == 19, "%d and %d cached", shorter.n_cached, wanted.n_cached);
    g4_engine_close(e);

    /* a request that is cancelled while it waits ends with the next step, and nothing is computed for it */
    e = open_engine(s, NULL, (g4_engine_options){0});
    text busy[3], late = new_text(10, 5);
    for (int i = 0; i < 3; i++) busy[i] = new_text(30, 9), busy[i].prompt[0] = 50 + i, add(e, &busy[i]);
    late.prompt[0] = 53;
    add(e, &late), step(e, NULL);
    CHECK(g4_engine_cancel(e, late.number) == 0, "it waits");
    step(e, NULL);
    CHECK(late.ended == G4_FINISH_CANCELLED && busy[0].ended == G4_RUNNING, "cancelled in the queue: finish %d", (int)late.ended);
    run_all(e);
    g4_engine_close(e);

    /* of three that are taken, the one used longest ago makes room */
    e = open_engine(s, NULL, (g4_engine_options){0});
    text in[5];
    for (int i = 0; i < 5; i++) {
        in[i] = new_text(20 + (i == 4), 1);
        in[i].prompt[0] = 60 + (i < 4 ? i : 1);
        if (i == 3) {
            text once_more = in[0]; /* the first is used again before the fourth comes */
            once_more.n_got = 0, once_more.ended = G4_RUNNING;
            add(e, &once_more), run_all(e);
        }
        add(e, &in[i]), run_all(e);
    }
    CHECK(in[4].n_cached == 0 && g4_engine_save(e, in[0].prompt, 20, dir, &err) == -1 && strstr(err.text, "cannot"), "the second is gone: %d cached; the first is there: %s",
          in[4].n_cached, err.text);
    g4_engine_close(e);
    e = open_engine(s, NULL, (g4_engine_options){.no_prefix_reuse = 1});
    add(e, &f), run_all(e);
    f = new_text(33, 1), add(e, &f), run_all(e);
    CHECK(f.n_cached == 0, "reuse can be switched off: %d cached", f.n_cached);
    g4_engine_close(e);
    g4_state_close(s);
    g4_close(m);
}

/* ---- Drafts ------------------------------------------------------------------------------------------------------------------- */

/* On text that repeats itself drafts save forward calls; where none is ever right they cost an eighth of a row for each. */
static void check_drafts(void) {
    g4_model *m = open_model("models/austen", NULL);
    g4_state *s = open_state(m, 512, 32, 1);
    for (int kind = 0; kind < 2; kind++) {
        g4_engine_stats stats[2];
        int32_t prompt[200];
        static int32_t got[2][256];
        int n[2] = {0};
        for (int i = 0; i < 200; i++) prompt[i] = kind ? 10 + below(3) : 40 + i % 7;
        for (int with = 0; with < 2; with++) {
            g4_engine *e = open_engine(s, NULL, (g4_engine_options){.speculate = with ? 8 : 0});
            /* seven ids in turn, which a bias makes the text go on with; or three ids at random, so that every pair has occurred */
            g4_logit_bias bias[7];
            for (int i = 0; i < 7; i++) bias[i] = (g4_logit_bias){kind ? 10 + i % 3 : 40 + i, 100};
            g4_request r = {.prompt = prompt, .n_prompt = 200, .sampling = {.temperature = kind ? 30 : 0, .top_p = 1, .repeat_penalty = 1, .logit_bias = bias, .n_logit_bias = kind ? 3 : 7},
                            .max_new = 200, .ignore_eos = 1};
            r.sampling.top_k = kind ? 3 : 0;
            CHECK(g4_engine_add(e, &r, &err) > 0, "%s", err.text);
            const g4_event *event;
            while (g4_engine_pending(e))
                for (int i = 0, k = g4_engine_step(e, &event); i < k; i++)
                    if (event[i].token >= 0 && n[with] < 256) got[with][n[with]++] = event[i].token;
            g4_engine_get_stats(e, &stats[with]);
            g4_engine_close(e);
        }
        const g4_engine_stats *x = &stats[1];
        int wrong = (int)(x->proposed - x->accepted);
        CHECK(n[0] == 200 && n[1] == 200 && !memcmp(got[0], got[1], sizeof *got[0] * 200), "drafts change the text");
        CHECK(stats[0].proposed == 0 && stats[0].forwards == 7 - 1 + 200, "without: %d calls", (int)stats[0].forwards);
        CHECK(x->accepted + x->forwards == stats[0].forwards, "each right one saves a call: %d + %d", (int)x->accepted, (int)x->forwards);
        CHECK(wrong <= 2 + (int)x->forwards / 8 + 2 * (int)x->accepted, "the account of wrong ones: %d of %d in %d calls", wrong, (int)x->proposed, (int)x->forwards);
        CHECK(x->rows == stats[0].rows + (uint64_t)wrong, "the only rows too many are those of wrong ones: %d, %d", (int)x->rows, (int)stats[0].rows);
        if (!kind) CHECK(x->accepted > 100 && x->forwards < 50, "text that repeats itself: %d of %d were right", (int)x->accepted, (int)x->proposed);
    }
    g4_state_close(s);
    g4_close(m);
}

/* ---- Text --------------------------------------------------------------------------------------------------------------------- */

/* The place where the first of the stop strings ends first; of those that end there the longest. -1: none. */
static int search(const char *data, size_t n, const char *const *stop, int n_stop, size_t *cut) {
    for (size_t end = 1; end <= n; end++) {
        int found = -1;
        for (int i = 0; i < n_stop; i++) {
            size_t k = strlen(stop[i]);
            if (k <= end && !memcmp(data + end - k, stop[i], k) && (found < 0 || k > strlen(stop[found]))) found = i;
        }
        if (found >= 0) {
            *cut = end - strlen(stop[found]);
            return found;
        }
    }
    return -1;
}

static size_t decode_all(const g4_tokenizer *tok, const int32_t *ids, int n, int flags, char *to) {
    g4_decoder *d = g4_decoder_open(tok, flags, &err);
    size_t size = 0, k;
    const char *piece;
    for (int i = 0; i <= n; i++) {
        CHECK(!(i < n ? g4_decode_push(d, ids[i], &piece, &k, &err) : g4_decode_end(d, &piece, &k, &err)), "%s", err.text);
        memcpy(to + size, piece, k);
        size += k;
    }
    g4_decoder_close(d);
    return size;
}

/* One request; its pieces joined in out, ids in ids. */
/* An id that was sampled and has no per-layer embedding cannot be gone on with: that text ends, and nobody else's. */
static void check_unknown(void) {
    g4_model *m = open_model("test/fixtures/odd", NULL);
    g4_state *s = open_state(m, 32, 8, 2);
    g4_engine *e = open_engine(s, NULL, (g4_engine_options){0});
    int known = g4_get_config(m)->vocab_size_per_layer_input;
    CHECK(known < g4_get_config(m)->vocab_size && g4_get_config(m)->hidden_size_per_layer_input, "the fixture has such ids");
    text alone = new_text(7, 6), unknown = new_text(5, 6), beside = new_text(7, 6);
    CHECK(add(e, &alone) > 0, "%s", err.text);
    run_all(e);
    unknown.how.logit_bias = &(g4_logit_bias){known, 1000}, unknown.how.n_logit_bias = 1;
    CHECK(add(e, &unknown) > 0 && add(e, &beside) > 0, "%s", err.text);
    run_all(e);
    CHECK(unknown.ended == G4_FINISH_ERROR && unknown.n_got == 0, "id %d: finish %d after %d tokens", known, (int)unknown.ended, unknown.n_got);
    CHECK(beside.ended != G4_FINISH_ERROR && beside.ended == alone.ended && beside.n_got == alone.n_got && !memcmp(beside.got, alone.got, sizeof beside.got),
          "the text beside it: finish %d after %d tokens", (int)beside.ended, beside.n_got);
    g4_engine_close(e);
    g4_state_close(s);
    g4_close(m);
}

typedef struct outcome {
    char out[4096];
    size_t n;
    int32_t ids[128];
    int n_ids, whole, late; /* every piece was whole characters; times that more was held back than what a stop string begins with */
    g4_finish finish;
    int32_t stop;
} outcome;

static int is_utf8(const char *p, size_t n) {
    for (size_t i = 0; i < n;) {
        unsigned char c = (unsigned char)p[i];
        size_t more = c < 0x80 ? 0 : c >= 0xf0 ? 3 : c >= 0xe0 ? 2 : c >= 0xc0 ? 1 : 9;
        if (more > n - i - 1) return 0;
        for (size_t k = 1; k <= more; k++)
            if (((unsigned char)p[i + k] & 0xc0) != 0x80) return 0;
        i += more + 1;
    }
    return 1;
}

static void run_text(g4_engine *e, const g4_tokenizer *tok, const g4_request *r, outcome *o) {
    const g4_event *event;
    static char all[4096]; /* [n] decoded so far */
    size_t n_all = 0, k;
    const char *piece;
    g4_decoder *d = g4_decoder_open(tok, r->decode_flags, &err);
    memset(o, 0, sizeof *o);
    o->whole = 1;
    CHECK(g4_engine_add(e, r, &err) > 0, "%s", err.text);
    while (g4_engine_pending(e))
        for (int i = 0, n = g4_engine_step(e, &event); i < n; i++) {
            memcpy(o->out + o->n, event[i].text, event[i].n_text);
            o->n += event[i].n_text;
            o->whole &= is_utf8(event[i].text, event[i].n_text);
            o->finish = event[i].finish, o->stop = event[i].stop;
            if (event[i].token < 0 || g4_decode_push(d, event[i].token, &piece, &k, &err)) continue;
            o->ids[o->n_ids++] = event[i].token;
            memcpy(all + n_all, piece, k);
            n_all += k;
            size_t held = n_all - o->n;
            int begins = !held || event[i].finish;
            for (int j = 0; j < r->n_stop; j++) begins |= held < strlen(r->stop[j]) && !memcmp(all + o->n, r->stop[j], held);
            o->late += !begins;
        }
    g4_decoder_close(d);
}

/* Random texts with random stop strings, taken from the text itself across tokens and characters, or nearly. */
static void check_text(void) {
    g4_model *m = open_model("models/austen", NULL);
    g4_tokenizer *tok = g4_tokenizer_open("models/austen", &err);
    CHECK(tok, "%s", err.text);
    if (!tok) return;
    g4_state *s = open_state(m, 128, 16, 1);
    g4_engine *e = open_engine(s, tok, (g4_engine_options){.speculate = 4});
    CHECK(g4_get_config(m)->n_suppress == 0, "the model suppresses nothing");
    int stopped = 0, not_stopped = 0, by_length = 0, broken = 0, other = 0, split = 0, late = 0;
    static outcome free_run, o;
    for (int seed = 0; seed < 30; seed++) {
        int32_t prompt[3] = {2, 300 + below(1000), 300 + below(1000)};
        g4_sampling how = {.temperature = seed % 3 ? 1 : 30, .top_p = 1, .repeat_penalty = 1, .seed = (uint64_t)seed}; /* a third is noise: bytes that are no characters */
        g4_request r = {.prompt = prompt, .n_prompt = 3, .sampling = how, .max_new = 25, .ignore_eos = 1, .decode_flags = seed % 2 ? G4_SKIP_SPECIAL : 0};
        run_text(e, tok, &r, &free_run);
        char whole[4096];
        size_t n = decode_all(tok, free_run.ids, free_run.n_ids, r.decode_flags, whole);
        CHECK(free_run.n == n && !memcmp(free_run.out, whole, n) && free_run.whole && !free_run.late && free_run.n_ids == 25 && free_run.finish == G4_FINISH_LENGTH,
              "seed %d: the pieces are not the text of the ids", seed);
        for (int k = 0; k < 17; k++) {
            char strings[4][64];
            const char *stop[4];
            int n_stop = 1 + below(4);
            for (int i = 0; i < n_stop; i++) {
                size_t from, size;
                do from = (size_t)below((int)n), size = 1 + (size_t)below(below(3) ? 6 : 40);
                while ((whole[from] & 0xc0) == 0x80);
                if (size > n - from) size = n - from;
                if (size > 60) size = 60;
                memcpy(strings[i], whole + from, size);
                strings[i][size] = 0;
                if (memchr(strings[i], 0, size)) strcpy(strings[i], "no"); /* NUL cannot be in a C string */
                if (!below(3)) strcat(strings[i], below(2) ? "q" : "\xc3\xa9");
                stop[i] = strings[i];
                if (g4_token_id(tok, stop[i]) >= 0 && g4_token_is_special(tok, g4_token_id(tok, stop[i]))) strcpy(strings[i], "no"); /* that is another rule, below */
            }
            r.stop = stop, r.n_stop = n_stop, r.max_new = below(3) ? 25 : 1 + below(25);
            size_t size = decode_all(tok, free_run.ids, r.max_new, r.decode_flags, whole), cut = size;
            int expected = search(whole, size, stop, n_stop, &cut);
            run_text(e, tok, &r, &o);
            int same = o.n == cut && !memcmp(o.out, whole, cut) && (expected < 0 ? o.finish == G4_FINISH_LENGTH : o.finish == G4_FINISH_STOP_STRING && !strcmp(stop[o.stop], stop[expected]));
            same &= !memcmp(o.ids, free_run.ids, sizeof *o.ids * (size_t)o.n_ids);
            other += !same, broken += !o.whole, late += o.late;
            if (expected >= 0) stopped++;
            else not_stopped++, by_length += r.max_new < 25;
            decode_all(tok, free_run.ids, free_run.n_ids, r.decode_flags, whole);
            split += expected >= 0 && strlen(stop[expected]) > 8;
        }
    }
    CHECK(!other && !broken && !late, "of 510 texts with stop strings %d differ from searching afterwards, %d have split characters; %d times too much was held back", other, broken, late);
    CHECK(stopped > 100 && not_stopped > 20 && by_length > 5 && split > 20, "the stop strings were too tame: %d, %d, %d, %d", stopped, not_stopped, by_length, split);

    /* a stop string that is a special token is its id, also where its text is left out */
    const char *special = "<bos>", *const stop[1] = {special};
    int32_t id = g4_token_id(tok, special), prompt[1] = {id};
    g4_request r = {.prompt = prompt, .n_prompt = 1, .sampling = {.repeat_penalty = 1, .logit_bias = &(g4_logit_bias){id, 1000}, .n_logit_bias = 1}, .max_new = 5, .stop = stop, .n_stop = 1,
                    .decode_flags = G4_SKIP_SPECIAL};
    run_text(e, tok, &r, &o);
    CHECK(o.finish == G4_FINISH_STOP_ID && o.stop == id && !o.n && !o.n_ids, "a special token as stop string: finish %d, %d tokens", (int)o.finish, o.n_ids);

    /* the first byte of a character is held back, and at the end it is U+FFFD: which may be a stop string */
    int32_t byte = g4_token_id(tok, "<0xE2>");
    CHECK(byte >= 0, "the shipped model has tokens for bytes");
    for (int i = 0; i < 2; i++) {
        const char *const replacement[1] = {i ? "\xef\xbf\xbd" : "x"};
        r = (g4_request){.prompt = prompt, .n_prompt = 1, .sampling = {.repeat_penalty = 1, .logit_bias = &(g4_logit_bias){byte, 1000}, .n_logit_bias = 1}, .max_new = 1, .stop = replacement, .n_stop = 1};
        run_text(e, tok, &r, &o);
        CHECK(o.n_ids == 1 && (i ? o.finish == G4_FINISH_STOP_STRING && !o.n : o.finish == G4_FINISH_LENGTH && o.n == 3 && !memcmp(o.out, "\xef\xbf\xbd", 3)),
              "half a character at the end: finish %d, %zu bytes", (int)o.finish, o.n);
    }

    /* log-probabilities are the model's own, whatever the sampling; held against teacher forcing. A penalty that rewards repetition makes drafts right */
    r = (g4_request){.prompt = prompt, .n_prompt = 1, .sampling = {.temperature = 2, .top_k = 50, .top_p = 0.9f, .repeat_penalty = 0.1f, .seed = 4}, .max_new = 20, .top_logprobs = 3, .ignore_eos = 1};
    int V = g4_get_config(m)->vocab_size, wrong = 0, n = 0;
    static double logprob[20];
    static g4_logprob top[20][3];
    int32_t ids[21] = {id};
    g4_engine_stats before;
    g4_engine_get_stats(e, &before);
    uint64_t accepted = before.accepted;
    CHECK(g4_engine_add(e, &r, &err) > 0, "%s", err.text);
    const g4_event *event;
    while (g4_engine_pending(e))
        for (int i = 0, k = g4_engine_step(e, &event); i < k && n < 20; i++) {
            wrong += event[i].n_top != 3 || event[i].token < 0;
            memcpy(top[n], event[i].top, sizeof top[n]);
            logprob[n++] = event[i].logprob;
            ids[n] = event[i].token;
        }
    g4_engine_stats stats;
    g4_engine_get_stats(e, &stats);
    CHECK(stats.accepted > accepted, "with some drafts that were right");
    g4_engine_close(e);
    float *logits = malloc(sizeof *logits * (size_t)V);
    g4_truncate(s, 0, 0, NULL);
    for (int t = 0; t < n; t++) {
        CHECK(!g4_forward(s, &(g4_row){ids[t], 0, t, 1}, 1, logits, &err), "%s", err.text);
        double sum = g4_log_sum_exp(logits, V);
        wrong += logprob[t] != logits[ids[t + 1]] - sum;
        for (int k = 0; k < 3; k++) {
            int better = 0, at = top[t][k].id;
            for (int i = 0; i < V; i++) better += logits[i] > logits[at] || (logits[i] == logits[at] && i < at);
            wrong += better != k || top[t][k].logprob != logits[at] - sum;
        }
    }
    CHECK(n == 20 && !wrong, "log-probabilities: %d wrong in %d tokens", wrong, n);
    free(logits);
    g4_state_close(s);
    g4_tokenizer_close(tok);
    g4_close(m);
}

/* ---- Copies and files ----------------------------------------------------------------------------------------------------------- */

/* The logits of ids [T] after what the sequence holds. */
static int go_on(g4_state *s, int seq, const int32_t *ids, int T, float *logits) {
    g4_row rows[CTX];
    for (int t = 0; t < T; t++) rows[t] = (g4_row){ids[t], seq, g4_length(s, seq) + t, 1};
    return g4_forward(s, rows, T, logits, &err);
}

static void check_copies(const char *name) {
    char path[128];
    snprintf(path, sizeof path, "test/fixtures/%s", name);
    g4_model *m = open_model(path, NULL);
    enum { T = 40, MORE = 9, CHUNK = 7 };
    const g4_config *c = g4_get_config(m);
    size_t row = sizeof(float) * (size_t)c->vocab_size;
    int32_t ids[T + MORE], other[T];
    for (int i = 0; i < T + MORE; i++) ids[i] = 3 + below(100);
    for (int i = 0; i < T; i++) other[i] = 3 + below(100);
    float *expected = malloc(row * (T + MORE)), *got = malloc(row * (T + MORE));
    g4_state *s = open_state(m, CTX, CHUNK, 3);
    CHECK(!go_on(s, 0, ids, T + MORE, expected), "%s", err.text);
    for (int length = 1; length <= T; length += 3) {
        g4_truncate(s, 0, 0, NULL), g4_truncate(s, 2, 0, NULL), g4_truncate(s, 1, 0, NULL);
        CHECK(!go_on(s, 0, ids, T, got) && !go_on(s, 2, other, 11, got), "%s", err.text);
        int truncated = g4_state_check(s, 0, length, NULL), copied = g4_copy(s, 0, 2, length, &err);
        CHECK(truncated == copied && g4_length(s, 2) == (copied ? 11 : length) && g4_length(s, 0) == T, "%s: %d of %d tokens: %s", name, length, (int)T, err.text);
        if (copied) continue;
        CHECK(!go_on(s, 2, ids + length, MORE, got) && !memcmp(got, expected + (size_t)length * (size_t)c->vocab_size, row * MORE), "%s: a copy of %d tokens goes on with other bits",
              name, length);
        CHECK(g4_state_check(s, 2, length, NULL) == 0 || MORE > CHUNK, "%s: and can be truncated again", name);
        /* what the source lacks the copy lacks too */
        int lost = c->sliding_window + 1;
        CHECK((g4_truncate(s, 0, lost, NULL) != 0) <= (g4_truncate(s, 2, lost, NULL) != 0), "%s: a copy of %d tokens claims to hold what its source has lost", name, length);
    }
    CHECK(g4_copy(s, 0, 3, 1, &err) && g4_copy(s, -1, 0, 1, &err) && g4_copy(s, 0, 1, T + 99, &err) && g4_copy(s, 0, 1, -1, &err), "nonsense copies");
    int length = g4_length(s, 0);
    CHECK(!g4_copy(s, 0, 0, length, &err) && g4_length(s, 0) == length && !g4_copy(s, 0, 1, 0, &err) && g4_length(s, 1) == 0, "to itself, and nothing: %s", err.text);

    /* to a file and back, into a state of another size, alone */
    char file[128];
    snprintf(file, sizeof file, "%s/%s", dir, name);
    for (int n = 1; n <= T; n += 13) {
        g4_truncate(s, 1, 0, NULL);
        CHECK(!go_on(s, 1, ids, n, got) && !g4_sequence_save(s, 1, n, ids, file, &err), "%s", err.text);
        for (int chunk = 1; chunk < 30; chunk += 14) {
            g4_state *z = open_state(m, T + MORE, chunk, 2);
            int32_t *list = NULL;
            size_t n_list = 0;
            CHECK(!go_on(z, 1, other, 25, got) && !g4_sequence_load(z, 1, file, &list, &n_list, &err) && n_list == (size_t)n && !memcmp(list, ids, sizeof *ids * (size_t)n) && g4_length(z, 1) == n,
                  "%s: %s", name, err.text);
            CHECK(!go_on(z, 1, ids + n, MORE, got) && !memcmp(got, expected + (size_t)n * (size_t)c->vocab_size, row * MORE), "%s: %d tokens from a file, chunk %d: other bits", name, n, chunk);
            if (n > c->sliding_window && g4_state_check(s, 1, 1, NULL)) CHECK(g4_truncate(z, 1, 1, NULL), "%s: a file holds what the next token sees, and no more", name);
            g4_free(list);
            g4_state_close(z);
        }
    }
    free(expected);
    free(got);
    g4_state_close(s);
    g4_close(m);
}

static size_t read_file(const char *path, unsigned char *to, size_t room) {
    FILE *f = fopen(path, "rb");
    size_t n = f ? fread(to, 1, room, f) : 0;
    if (f) fclose(f);
    return n;
}

static void write_file(const char *path, const unsigned char *data, size_t n) {
    FILE *f = fopen(path, "wb");
    if (f) fwrite(data, 1, n, f), fclose(f);
}

/* Every way in which a file can be the wrong one. */
static void check_files(void) {
    char file[128], bad[128], absent[160];
    snprintf(file, sizeof file, "%s/good", dir), snprintf(bad, sizeof bad, "%s/bad", dir), snprintf(absent, sizeof absent, "%s/no/such", dir);
    g4_model *m = open_model("test/fixtures/31b", NULL), *scalar = open_model("test/fixtures/31b", "scalar"), *others = open_model("test/fixtures/12b", NULL);
    g4_state *s = open_state(m, CTX, 8, 2), *other = open_state(others, CTX, 8, 1), *cpu = open_state(scalar, CTX, 8, 1), *tiny = open_state(m, 9, 8, 1);
    g4_state *bf16 = g4_state_open(m, &(g4_state_options){.ctx = CTX, .precision = G4_BF16}, &err);
    float *logits = malloc(sizeof *logits * (size_t)(g4_get_config(m)->vocab_size * 20));
    int32_t ids[10] = {5, 6, 7, 8, 9, 10, 11, 12, 13, 14}, *list = NULL;
    size_t n_list = 0;
    CHECK(!go_on(s, 0, ids, 10, logits) && !go_on(s, 1, ids, 3, logits) && !g4_sequence_save(s, 0, 10, ids, file, &err), "%s", err.text);
    static unsigned char good[1 << 20], changed[1 << 20];
    size_t size = read_file(file, good, sizeof good);
    CHECK(size > 1000 && size < sizeof good, "%zu bytes", size);
    CHECK(!g4_sequence_load(cpu, 0, file, &list, &n_list, &err) && n_list == 10, "from one backend to another: %s", err.text);
    g4_free(list);
    const struct {
        g4_state *state;
        const char *why;
    } states[] = {{other, "another model"}, {bf16, "precision"}, {tiny, "the state's ctx"}};
    for (int i = 0; i < 3; i++)
        CHECK(g4_sequence_load(states[i].state, 0, file, &list, &n_list, &err) && strstr(err.text, states[i].why) && strstr(err.text, file), "%s: %s", states[i].why, err.text);
    const struct {
        size_t at;
        int add;
        const char *why;
    } bytes[] = {{0, 1, "begin with"}, {8, 1, "version 3"}, {12, 1, "precision"}, {16, 1, "another model"}, {23, 128, "another model"}, {24, 1, "bytes"}, {24, -10, "holds 0 tokens"},
                 {27, 128, "tokens"}, {28, 1, "damaged"}, {36, 1, "damaged"}, {76, 1, "damaged"}, {0, 0, NULL}};
    for (int i = 0; bytes[i].why; i++) {
        memcpy(changed, good, size);
        changed[bytes[i].at] = (unsigned char)(changed[bytes[i].at] + bytes[i].add);
        write_file(bad, changed, size);
        CHECK(g4_sequence_load(s, 1, bad, &list, &n_list, &err) && strstr(err.text, bytes[i].why) && g4_length(s, 1) == 3, "byte %zu changed: %s", bytes[i].at, err.text);
    }
    memcpy(changed, good, size);
    for (int i = 0; i < 200; i++) {
        size_t cut = (size_t)below((int)size);
        write_file(bad, good, cut);
        if (!g4_sequence_load(s, 1, bad, &list, &n_list, &err)) CHECK(0, "%zu of %zu bytes were loaded", cut, size);
        size_t at = (size_t)below((int)size);
        changed[at] ^= (unsigned char)(1 << below(8));
        write_file(bad, changed, size);
        if (!g4_sequence_load(s, 1, bad, &list, &n_list, &err)) CHECK(0, "a bit of byte %zu changed, and the file was loaded", at);
        changed[at] = good[at];
    }
    write_file(bad, good, size), write_file(bad, memcpy(changed, good, size), size + 1);
    CHECK(g4_sequence_load(s, 1, bad, &list, &n_list, &err) && g4_length(s, 1) == 3, "a byte too many: %s", err.text);
    CHECK(g4_sequence_load(s, 1, absent, &list, &n_list, &err) && strstr(err.text, absent), "%s", err.text);
    CHECK(g4_sequence_load(s, 2, file, &list, &n_list, &err) && g4_sequence_save(s, 2, 1, ids, file, &err) && g4_sequence_save(s, 0, 11, ids, file, &err)
              && g4_sequence_save(s, 0, 0, ids, file, &err), "no such sequence or length: %s", err.text);
    CHECK(g4_sequence_save(s, 0, 10, ids, absent, &err) && strstr(err.text, absent), "%s", err.text);
#ifndef _WIN32
    if (!access("/dev/full", W_OK)) CHECK(g4_sequence_save(s, 0, 10, ids, "/dev/full", &err) && strstr(err.text, "cannot write") && !access("/dev/full", W_OK), "a full disk: %s", err.text);
    else SKIP("no /dev/full");
    /* a disk that is full before the end, by way of the limit of a file's size; its signal would end the program */
    struct rlimit had, little;
    CHECK(!getrlimit(RLIMIT_FSIZE, &had), "RLIMIT_FSIZE");
    little = had;
    little.rlim_cur = 1000;
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &little);
    int written = !g4_sequence_save(s, 0, 10, ids, file, &err);
    setrlimit(RLIMIT_FSIZE, &had);
    signal(SIGXFSZ, handler);
    CHECK(!written && strstr(err.text, "cannot write"), "a disk that is full before the end: %s", err.text);
#endif
    CHECK(read_file(file, changed, sizeof changed) == size && !memcmp(changed, good, size), "what failed did not touch the file");

    /* the same config, but other weights: each number's last bit flipped */
    char copy[128], name[160];
    static unsigned char weights[1 << 20];
    snprintf(copy, sizeof copy, "%s/copy", dir);
    make_directory(copy);
    snprintf(name, sizeof name, "%s/config.json", copy);
    write_file(name, weights, read_file("test/fixtures/31b/config.json", weights, sizeof weights));
    snprintf(name, sizeof name, "%s/model.safetensors", copy);
    size_t n_weights = read_file("test/fixtures/31b/model.safetensors", weights, sizeof weights), data = 8 + weights[0] + 256u * weights[1];
    CHECK(n_weights > data && n_weights < sizeof weights, "%zu bytes of weights", n_weights);
    for (size_t i = data; i < n_weights; i += 2) weights[i] ^= 1;
    write_file(name, weights, n_weights);
    g4_model *tuned = open_model(copy, NULL);
    g4_state *of_tuned = open_state(tuned, CTX, 8, 1);
    CHECK(g4_sequence_load(of_tuned, 0, file, &list, &n_list, &err) && strstr(err.text, "another model"), "other weights: %s", err.text);
    g4_state_close(of_tuned);
    g4_close(tuned);

    /* the engine: a saved prefix counts as cached */
    g4_engine *e = open_engine(s, NULL, (g4_engine_options){0});
    text a = new_text(30, 5), b = new_text(30, 5), c = new_text(36, 1);
    add(e, &a), run_all(e);
    CHECK(g4_engine_save(e, a.prompt, 30, file, &err) == 30, "%s", err.text);
    CHECK(g4_engine_save(e, ids + 5, 4, file, &err) == -1 && strstr(err.text, "nothing to save"), "%s", err.text);
    g4_engine_close(e);
    e = open_engine(s, NULL, (g4_engine_options){0});
    CHECK(g4_engine_load(e, file, &err) == 30, "%s", err.text);
    CHECK(g4_engine_load(e, absent, &err) == -1, "%s", err.text);
    add(e, &b), run_all(e);
    CHECK(b.n_cached == 0 && b.n_got == a.n_got && !memcmp(b.got, a.got, sizeof a.got), "30 of 30 cannot be used, the last row is needed, and the ring has not what it sees: %d cached", b.n_cached);
    g4_engine_close(e);
    e = open_engine(s, NULL, (g4_engine_options){0});
    CHECK(g4_engine_load(e, file, &err) == 30, "%s", err.text);
    add(e, &c), run_all(e);
    CHECK(c.n_cached == 30, "a prompt that goes on: %d cached", c.n_cached);
    text x = new_text(3, 20), y = new_text(4, 20);
    y.prompt[0] = 77;
    add(e, &x), add(e, &y), step(e, NULL);
    CHECK(g4_engine_load(e, file, &err) == -1 && strstr(err.text, "at work"), "no idle slot: %s", err.text);
    g4_engine_close(e);
    free(logits);
    g4_state_close(s), g4_state_close(other), g4_state_close(cpu), g4_state_close(tiny), g4_state_close(bf16);
    g4_close(m), g4_close(scalar), g4_close(others);
}

int main(int argc, char **argv) {
    int rounds = argc > 2 ? atoi(argv[2]) : 6;
    if (argc > 3) rng_state = strtoull(argv[3], NULL, 10) * 2 + 1;
    make_dir();
    static const char *const models[] = {"e2b", "26b-a4b", "31b", "window-1-top-1", "untied-f32"};
    for (int i = 0; i < 5; i++) check_schedules(models[i], rounds);
    check_limits();
    check_fairness();
    check_prefixes();
    check_drafts();
    check_unknown();
    check_text();
    for (int i = 0; i < 5; i++) check_copies(models[i]);
    check_files();
    char command[100];
#ifdef _WIN32
    snprintf(command, sizeof command, "rmdir /s /q %s", dir);
#else
    snprintf(command, sizeof command, "rm -r %s", dir);
#endif
    if (system(command)) printf("%s was left behind\n", dir);
    return test_done("test_engine");
}
