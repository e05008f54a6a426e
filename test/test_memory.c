/* test_memory.c - the engine where memory runs out: each allocation in turn is refused, and what asked for it must say so, lose nothing and go on.
 *
 * It includes engine.c, whose allocations are counted here; those of the state and the tokenizer are not.
 */
#include "test.h"

static long allocations_left = -1; /* allocations until one is refused; -1: none is */
static int refuse(void) { return allocations_left >= 0 && !allocations_left--; }
static void *test_malloc(size_t n) { return refuse() ? NULL : malloc(n); }
static void *test_calloc(size_t n, size_t size) { return refuse() ? NULL : calloc(n, size); }
static void *test_realloc(void *p, size_t n) { return refuse() ? NULL : realloc(p, n); }
#define malloc(n) test_malloc(n)
#define calloc(n, size) test_calloc(n, size)
#define realloc(p, n) test_realloc(p, n)
#include "engine.c"
#undef malloc
#undef calloc
#undef realloc

enum { REQUESTS = 3, NEW = 12 };

/* Three requests of two sequences, the allocation `at` (from 0 on) refused; *text [1024] is what the first and the last gave. 1: all allocations were made before. */
static int play(g4_state *s, const g4_tokenizer *tok, long at, char *text) {
    static const int32_t prompt[] = {2, 1149, 480, 380, 1236};
    static const char *const stop[] = {"never in it"};
    static const int32_t stop_ids[] = {1};
    static const g4_logit_bias bias[] = {{5, -1}};
    g4_error err = {{0}};
    size_t n = 0;
    int refused = 0;
    allocations_left = at;
    g4_engine *e = g4_engine_open(s, tok, &(g4_engine_options){.speculate = 4}, &err);
    *text = 0;
    if (!e) {
        CHECK(allocations_left < 0 && strstr(err.text, "out of memory for an engine"), "allocation %ld: %s", at, err.text);
        return 0;
    }
    for (int i = 0; i < REQUESTS; i++) {
        g4_request r = {.prompt = prompt, .n_prompt = 5, .sampling = {.top_p = 1, .repeat_penalty = 1, .logit_bias = bias, .n_logit_bias = 1}, .max_new = NEW, .ignore_eos = 1,
                        .stop = stop, .n_stop = 1, .stop_ids = stop_ids, .n_stop_ids = 1, .top_logprobs = 2, .user = (void *)(intptr_t)i};
        int64_t number = g4_engine_add(e, &r, &err);
        if (number > 0) continue;
        CHECK(number == -2 && strstr(err.text, "memory"), "allocation %ld: g4_engine_add gives %lld: %s", at, (long long)number, err.text);
        CHECK(!refused++ && g4_engine_pending(e) == i, "allocation %ld: one request is lost, not more", at);
        i--; /* again */
    }
    int ended = 0, errors = 0;
    while (g4_engine_pending(e)) {
        const g4_event *event;
        int events = g4_engine_step(e, &event);
        for (int i = 0; i < events; i++) {
            if (event[i].finish != G4_RUNNING) ended++;
            if (event[i].finish == G4_FINISH_ERROR) errors++, refused++;
            if (event[i].finish == G4_FINISH_ERROR) CHECK(strstr(event[i].error, "memory"), "allocation %ld: %s", at, event[i].error);
            if (event[i].user == (void *)(intptr_t)(REQUESTS - 1) && n + event[i].n_text < 1023) memcpy(text + n, event[i].text, event[i].n_text), n += event[i].n_text;
        }
    }
    text[n] = 0;
    CHECK(ended == REQUESTS && errors <= 2, "allocation %ld: %d requests ended, %d with an error", at, ended, errors);
    int over = allocations_left >= 0;
    allocations_left = -1;
    CHECK(over ? !refused : refused > 0, "allocation %ld: it was %s", at, over ? "not reached, but something failed" : "refused, and nobody said so");
    g4_engine_close(e);
    return over;
}

int main(void) {
    g4_error err;
    char whole[1024], text[1024];
    g4_model *m = g4_open("models/austen", NULL, &err);
    g4_tokenizer *tok = g4_tokenizer_open("models/austen", &err);
    g4_state *s = m ? g4_state_open(m, &(g4_state_options){.ctx = 64, .n_seqs = 2, .threads = 1}, &err) : NULL;
    CHECK(m && tok && s, "%s", err.text);
    if (!m || !tok || !s) return test_done("test_memory");
    CHECK(play(s, tok, 1 << 20, whole) && *whole, "a text: %s", whole);
    long at = 0;
    for (int over = 0; !over && at < 1000; at++) {
        over = play(s, tok, at, text);
        CHECK(!over || !strcmp(text, whole), "the same text when nothing fails: %s", text);
    }
    CHECK(at > 20 && at < 1000, "%ld allocations", at);
    CHECK(play(s, tok, 1 << 20, text) && !strcmp(text, whole), "the same text after all that: %s", text);
    g4_state_close(s);
    g4_tokenizer_close(tok);
    g4_close(m);
    return test_done("test_memory");
}
