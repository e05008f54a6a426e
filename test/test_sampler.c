/* test_sampler.c - the sampler against transformers' processors, against hand-calculated cases, its sets against a plain restatement of the rules by full
 * sorting, and its draws against their probabilities.
 *
 *     build/test_sampler ./gemma4          test/sampling.safetensors and the rest
 *     build/test_sampler ./gemma4 FILE     a larger file of reference/sampling.py, and a million draws from each of five cases of the small one
 */
#define G4_EXACT_FLOAT
#include "gemma4.h"
#include "test.h"

#include <float.h>
#include <math.h>

static const g4_sampling off = {.temperature = 1, .top_k = 0, .top_p = 1, .min_p = 0, .repeat_penalty = 1};

/* g4_sample on a copy of logits. n is the position: the history is that many zeros, which a repeat penalty of 1 ignores. */
static int pick(g4_sampling how, const float *logits, int V, size_t n, g4_error *err) {
    static int32_t zeros[1];
    float copy[512];
    memcpy(copy, logits, (size_t)V * sizeof *copy);
    return g4_sample(&how, copy, V, zeros, n, NULL, 0, err);
}

static void test_greedy(void) {
    g4_error err;
    const float logits[6] = {1, 3, 2, 3, -1, 0};
    const float nan_at_2[3] = {0, 1, NAN}, all_nan[3] = {NAN, NAN, NAN}, infinite[3] = {0, INFINITY, 1}, none[2] = {-INFINITY, -INFINITY};
    const float zero_like[] = {0, -0.0f, 1e-7f, 1e-45f, 9.9e-6f};
    for (int i = 0; i < 5; i++) {
        g4_sampling how = off;
        how.temperature = zero_like[i];
        CHECK(pick(how, logits, 6, 3, &err) == 1, "temperature %g takes the lowest of the two best", (double)zero_like[i]);
    }
    const float wrong[] = {-1, -1e-7f, NAN, INFINITY, -INFINITY};
    for (int i = 0; i < 5; i++) {
        g4_sampling how = off;
        how.temperature = wrong[i];
        err.text[0] = 0;
        CHECK(pick(how, logits, 6, 0, &err) == -1 && strstr(err.text, "temperature"), "temperature %g: %s", (double)wrong[i], err.text);
    }
    g4_sampling greedy = off;
    greedy.temperature = 0;
    for (int i = 0; i < 2; i++) {
        g4_sampling how = i ? off : greedy;
        CHECK(pick(how, nan_at_2, 3, 0, &err) == -1 && strstr(err.text, "id 2"), "a NaN: %s", err.text);
        CHECK(pick(how, all_nan, 3, 0, &err) == -1, "only NaN");
        CHECK(pick(how, infinite, 3, 0, &err) == -1 && strstr(err.text, "id 1"), "an infinity: %s", err.text);
        CHECK(pick(how, none, 2, 0, &err) == -1, "nothing left");
        CHECK(pick(how, logits, 1, 0, &err) == 0, "one id");
        CHECK(pick(how, logits, 0, 0, &err) == -1, "no id");
    }
}

static void test_parameters(void) {
    g4_error err;
    const float logits[3] = {1, 2, 3};
    for (int i = 0; i < 10; i++) {
        g4_sampling how = off;
        if (i == 0) how.top_k = -1;
        if (i == 1) how.top_p = -0.1f;
        if (i == 2) how.top_p = 1.1f;
        if (i == 3) how.top_p = NAN;
        if (i == 4) how.min_p = -0.1f;
        if (i == 5) how.min_p = 1.1f;
        if (i == 6) how.min_p = NAN;
        if (i == 7) how.repeat_penalty = 0;
        if (i == 8) how.repeat_penalty = NAN;
        if (i == 9) how.repeat_penalty = -1;
        CHECK(pick(how, logits, 3, 0, &err) == -1, "parameter %d out of range", i);
    }
}

static void test_overflow(void) {
    g4_error err;
    const float large[3] = {1, 3e38f, 2};
    g4_sampling how = off;
    how.temperature = 0.5f;
    CHECK(pick(how, large, 3, 0, &err) == -1 && strstr(err.text, "id 1 overflows under repeat_penalty 1 and temperature 0.5"), "3e38 / 0.5: %s", err.text);
    how.temperature = 2;
    CHECK(pick(how, large, 3, 0, &err) == 1, "3e38 / 2");
    /* of the ids that top-k leaves, some may overflow to -infinity: they are never drawn */
    const float low[3] = {1, -3e38f, 2};
    how.temperature = 0.1f;
    for (size_t n = 0; n < 100; n++) CHECK(pick(how, low, 3, n, &err) != 1, "a logit that overflows to -infinity is drawn");
}

static void test_penalty(void) {
    g4_error err;
    g4_sampling how = off;
    how.temperature = 0;
    how.repeat_penalty = 2;
    /* 4 / 2 = 2 once, though 0 occurs three times; -1 * 2 = -2; 3 untouched */
    float logits[4] = {4, -1, 3, -1.5f};
    const int32_t history[4] = {0, 1, 0, 0};
    CHECK(g4_sample(&how, logits, 4, history, 4, NULL, 0, &err) == 2, "the penalised best loses");
    CHECK(logits[0] == 2 && logits[1] == -2 && logits[2] == 3 && logits[3] == -1.5f, "%g %g %g %g", (double)logits[0], (double)logits[1], (double)logits[2],
          (double)logits[3]);
    const int32_t outside[2] = {1, 4};
    CHECK(g4_sample(&how, logits, 4, outside, 2, NULL, 0, &err) == -1 && strstr(err.text, "id 4"), "history outside: %s", err.text);

    const int32_t suppress[4] = {2, 0, 99, -5};
    float again[4] = {4, -1, 3, -1.5f};
    CHECK(g4_sample(&how, again, 4, NULL, 0, suppress, 4, &err) == 1, "suppressed ids are never chosen, and ids outside do no harm");
    const int32_t all[4] = {0, 1, 2, 3};
    CHECK(g4_sample(&how, again, 4, NULL, 0, all, 4, &err) == -1, "all suppressed");
    how.temperature = 1;
    for (size_t n = 0; n < 200; n++) {
        float some[4] = {4, -1, 3, -1.5f};
        int32_t id = g4_sample(&off, some, 4, NULL, n, suppress, 4, &err);
        if (id != 1 && id != 3) {
            CHECK(0, "suppressed id %d was drawn", (int)id);
            return;
        }
    }
    CHECK(1, "suppressed ids are not drawn");
}

/* Which ids can come out: many draws. */
static uint64_t support(g4_sampling how, const float *logits, int V) {
    uint64_t set = 0;
    g4_error err;
    for (size_t n = 0; n < 4000; n++) {
        int id = pick(how, logits, V, n, &err);
        if (id < 0) return 0;
        set |= (uint64_t)1 << id;
    }
    return set;
}

static void test_sets(void) {
    /* probabilities 0.4 0.2 0.2 0.1 0.1 in the order of ids 3 0 4 1 2 */
    const float logits[5] = {logf(0.2f), logf(0.1f), logf(0.1f), logf(0.4f), logf(0.2f)};
    const struct {
        int top_k;
        float top_p, min_p;
        unsigned set;
        const char *what;
    } cases[] = {
        {0, 1, 0, 31, "everything"},
        {1, 1, 0, 8, "top-k 1"},
        {2, 1, 0, 25, "top-k 2: ids 0 and 4 tie for the second place, both stay"},
        {3, 1, 0, 25, "top-k 3"},
        {4, 1, 0, 31, "top-k 4: ids 1 and 2 tie for the fourth place"},
        {5, 1, 0, 31, "top-k 5"},
        {100, 1, 0, 31, "top-k above the vocabulary"},
        {0, 0, 0, 8, "top-p 0 keeps the best"},
        {0, 0.39f, 0, 8, "top-p below the best one's probability"},
        {0, 0.41f, 0, 9, "top-p 0.41: one more; of the tied ones the lower id"},
        {0, 0.59f, 0, 9, "top-p 0.59"},
        {0, 0.61f, 0, 25, "top-p 0.61"},
        {0, 0.81f, 0, 27, "top-p 0.81: id 1 before id 2"},
        {0, 0.91f, 0, 31, "top-p 0.91"},
        {0, 1, 1, 8, "min-p 1 keeps what ties with the best"},
        {0, 1, 0.51f, 8, "min-p 0.51"},
        {0, 1, 0.49f, 25, "min-p 0.49"},
        {0, 1, 0.26f, 25, "min-p 0.26"},
        {0, 1, 0.24f, 31, "min-p 0.24"},
        {3, 0.51f, 0, 9, "top-p is taken of what top-k left: 0.5 of 0.8 is reached by the best alone, 0.51 is not"},
        {3, 0.49f, 0, 8, "top-p of what top-k left"},
        {2, 1, 0.51f, 8, "top-k and min-p"},
        {0, 0.61f, 0.49f, 25, "top-p and min-p"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        g4_sampling how = off;
        how.top_k = cases[i].top_k;
        how.top_p = cases[i].top_p;
        how.min_p = cases[i].min_p;
        uint64_t set = support(how, logits, 5);
        CHECK(set == cases[i].set, "%s: ids %x, expected %x", cases[i].what, (unsigned)set, cases[i].set);
    }
    const float equal[4] = {7, 7, 7, 7};
    g4_sampling how = off;
    how.top_k = 1;
    CHECK(support(how, equal, 4) == 15, "top-k 1 of four equal ones keeps four");
    how.top_k = 0;
    how.min_p = 1;
    CHECK(support(how, equal, 4) == 15, "min-p 1 of four equal ones keeps four");
    how.min_p = 0;
    how.top_p = 0.3f;
    CHECK(support(how, equal, 4) == 3, "top-p 0.3 of four equal ones keeps the two lowest ids");
}

static uint32_t random_state = 1;
static float random_float(void) {
    random_state = random_state * 1664525u + 1013904223u;
    return (float)(random_state >> 8) / 16777216.0f;
}

/* The rules again, by full sorting: an independent text of what may survive. kept [512] flags. */
static const float *order_by;
static int descending(const void *a, const void *b) {
    float x = order_by[*(const int *)a], y = order_by[*(const int *)b];
    return x > y ? -1 : x < y ? 1 : *(const int *)a - *(const int *)b;
}

static void allowed(const g4_sampling *how, const float *logits, int V, char *kept) {
    int order[512], n = V;
    double p[512], total = 0, mass = 0;
    for (int i = 0; i < V; i++) order[i] = i;
    order_by = logits;
    qsort(order, (size_t)V, sizeof *order, descending);
    if (how->top_k > 0 && how->top_k < V)
        for (n = how->top_k; n < V && logits[order[n]] == logits[order[how->top_k - 1]];) n++;
    for (int i = 0; i < n; i++) total += p[i] = exp((double)logits[order[i]] / how->temperature - (double)logits[order[0]] / how->temperature);
    memset(kept, 0, 512);
    for (int i = 0; i < n; i++) {
        if (i && how->top_p < 1 && mass / total >= (double)how->top_p) break;
        mass += p[i];
        if (p[i] >= (double)how->min_p) kept[order[i]] = 1;
    }
}

static void test_random_sets(void) {
    int wrong = 0, draws = 0;
    g4_error err;
    for (int round = 0; round < 300; round++) {
        float logits[512];
        char kept[512];
        int V = 1 + (int)(random_float() * 511);
        for (int i = 0; i < V; i++) logits[i] = round % 3 ? random_float() * 12 : floorf(random_float() * 12); /* every third with many ties */
        g4_sampling how = off;
        how.temperature = round % 2 ? 0.5f : 2; /* powers of two: dividing is exact, so ties stay ties */
        how.top_k = round % 4 ? (int)(random_float() * 40) : 0;
        how.top_p = round % 5 ? random_float() : 1;
        how.min_p = round % 7 ? 0 : random_float() * 0.5f;
        allowed(&how, logits, V, kept);
        for (size_t n = 0; n < 100; n++, draws++) {
            int id = pick(how, logits, V, n, &err);
            wrong += id < 0 || !kept[id];
        }
    }
    CHECK(wrong == 0, "%d of %d draws were outside the set that sorting gives", wrong, draws);
}

/* The sum of (observed - expected)^2 / expected over 20 ids has 19 degrees of freedom; above 43.8 in one of 1000 fair cases. The draws are
 * fixed, so this cannot fail by chance tomorrow. */
static void test_draws(void) {
    enum { V = 20, N = 200000 };
    float logits[V];
    double p[V], total = 0;
    g4_error err;
    for (int i = 0; i < V; i++) logits[i] = 0.15f * (float)(i * 7 % V);
    for (int i = 0; i < V; i++) total += p[i] = exp((double)logits[i] / 0.8f);
    for (uint64_t seed = 0; seed < 3; seed++) {
        int seen[V] = {0};
        g4_sampling how = off;
        how.temperature = 0.8f;
        how.seed = seed;
        for (size_t n = 0; n < N; n++) seen[pick(how, logits, V, n, &err)]++;
        double chi = 0;
        for (int i = 0; i < V; i++) {
            double expected = N * p[i] / total;
            chi += (seen[i] - expected) * (seen[i] - expected) / expected;
        }
        CHECK(chi < 43.8, "chi-square of %d draws with seed %d: %.1f", (int)N, (int)seed, chi);
    }
    /* the other way: one position, many seeds; also with top-k and top-p, whose draw walks another order */
    for (int top = 0; top < 2; top++) {
        int seen[V] = {0};
        g4_sampling how = off;
        how.temperature = 0.8f;
        how.top_k = top ? V : 0;
        how.top_p = top ? 0.999999f : 1;
        for (int i = 0; i < N; i++) {
            how.seed = (uint64_t)i;
            seen[pick(how, logits, V, 5, &err)]++;
        }
        double chi = 0;
        for (int i = 0; i < V; i++) {
            double expected = N * p[i] / total;
            chi += (seen[i] - expected) * (seen[i] - expected) / expected;
        }
        CHECK(chi < 43.8, "chi-square over seeds, top-p %d: %.1f", top, chi);
    }
    /* neighbouring positions and seeds are not related */
    int same_position = 0, same_seed = 0, shifted = 0;
    const float flat[2] = {0, 0};
    for (int i = 0; i < 10000; i++) {
        g4_sampling a = off, b = off;
        a.seed = 1;
        b.seed = 2;
        int x = pick(a, flat, 2, (size_t)i, &err);
        same_seed += x == pick(a, flat, 2, (size_t)i + 1, &err);
        same_position += x == pick(b, flat, 2, (size_t)i, &err);
        shifted += pick(a, flat, 2, (size_t)i + 1, &err) == pick(b, flat, 2, (size_t)i, &err);
    }
    CHECK(abs(same_seed - 5000) < 200 && abs(same_position - 5000) < 200 && abs(shifted - 5000) < 200, "coins agree %d, %d, %d times of 10000", same_seed,
          same_position, shifted);
}

/* The draws themselves, so that a changed generator is a decision: any machine must give this text of ids. */
static void test_fixed_draws(void) {
    float logits[64];
    char text[128] = "";
    g4_error err;
    for (int i = 0; i < 64; i++) logits[i] = 0;
    g4_sampling how = off;
    how.seed = 42;
    for (size_t n = 0; n < 12; n++) sprintf(text + strlen(text), "%d ", pick(how, logits, 64, n, &err));
    /* the top 6 bits of SplitMix64's outputs from the state mix(42 + golden), by a few lines of Python */
    CHECK(!strcmp(text, "21 61 31 4 43 4 12 47 7 45 41 11 "), "%s", text);
}

static void test_functions(void) {
    double worst = 0;
    for (double x = -700; x < 700; x += 0.37) {
        double error = fabs(g4_exp(x) / exp(x) - 1);
        if (!(error <= worst)) worst = error;
    }
    CHECK(worst < 1e-15, "exp: relative error %g", worst);
    CHECK(g4_exp(0) == 1 && g4_exp(-INFINITY) == 0 && g4_exp(INFINITY) == (double)INFINITY && isnan(g4_exp(NAN)) && g4_exp(-1e9) == 0, "exp at the edges");
    worst = 0;
    for (int round = 0; round < 200; round++) {
        float x[300];
        int n = 1 + round;
        double max = -1e300, sum = 0;
        for (int i = 0; i < n; i++) {
            x[i] = (random_float() - 0.5f) * (float)round;
            if (x[i] > max) max = x[i];
        }
        for (int i = 0; i < n; i++) sum += exp(x[i] - max);
        double expected = max + log(sum), error = fabs(g4_log_sum_exp(x, n) - expected) / fmax(1, fabs(expected));
        if (!(error <= worst)) worst = error;
    }
    CHECK(worst < 1e-15, "log of a sum of exp: error %g", worst);
    const float with_nan[2] = {1, NAN}, nothing[2] = {-INFINITY, -INFINITY}, huge[2] = {3e38f, -3e38f};
    CHECK(isnan(g4_log_sum_exp(with_nan, 2)), "a NaN stays");
    CHECK(g4_log_sum_exp(nothing, 2) == (double)-INFINITY, "nothing");
    CHECK(g4_log_sum_exp(huge, 2) == (double)3e38f, "no overflow");
}

/* OpenAI's formula by hand, and that it counts what was generated and nothing else. */
static void test_openai_penalties(void) {
    g4_error err;
    g4_sampling how = off;
    const int32_t history[6] = {0, 0, 3, 1, 1, 2};
    for (int i = 0; i < 2; i++) {
        float logits[5] = {4, 4, 4, 4, 4};
        int32_t ids[10];
        how.n_prompt = i ? 0 : 3;
        how.frequency_penalty = 0.5f, how.presence_penalty = 0.25f;
        int n = g4_candidates(&how, logits, 5, history, 6, NULL, 0, ids, &err);
        const float expected[2][5] = {{4, 2.75f, 3.25f, 4, 4}, {2.75f, 2.75f, 3.25f, 3.25f, 4}};
        CHECK(n == 5 && !memcmp(logits, expected[i], sizeof logits), "n_prompt %d: %g %g %g %g %g", (int)how.n_prompt, (double)logits[0], (double)logits[1],
              (double)logits[2], (double)logits[3], (double)logits[4]);
    }
    float logits[5] = {0};
    how.n_prompt = 7;
    CHECK(g4_sample(&how, logits, 5, history, 6, NULL, 0, &err) == -1 && strstr(err.text, "n_prompt is 7"), "n_prompt beyond the history: %s", err.text);
    const float wrong[3] = {NAN, INFINITY, -INFINITY};
    for (int i = 0; i < 6; i++) {
        g4_sampling bad = off;
        *(i < 3 ? &bad.frequency_penalty : &bad.presence_penalty) = wrong[i % 3];
        CHECK(pick(bad, logits, 5, 0, &err) == -1 && strstr(err.text, i < 3 ? "frequency_penalty" : "presence_penalty"), "penalty %d: %s", i, err.text);
    }
}

static void test_bias(void) {
    g4_error err;
    g4_sampling how = off;
    how.temperature = 0;
    const float logits[4] = {1, 2, 3, 4};
    const g4_logit_bias some[4] = {{0, 3}, {0, 0.5f}, {3, -100}, {0, 0.5f}};
    how.logit_bias = some, how.n_logit_bias = 4;
    float copy[4];
    memcpy(copy, logits, sizeof copy);
    CHECK(g4_sample(&how, copy, 4, NULL, 0, NULL, 0, &err) == 0 && copy[0] == 5 && copy[3] == -96, "logit bias: %g %g", (double)copy[0], (double)copy[3]);
    const g4_logit_bias wrong[4] = {{4, 1}, {-1, 1}, {0, NAN}, {0, INFINITY}};
    for (int i = 0; i < 4; i++) {
        how.logit_bias = &wrong[i], how.n_logit_bias = 1;
        CHECK(pick(how, logits, 4, 0, &err) == -1 && strstr(err.text, "logit_bias"), "bias %d: %s", i, err.text);
    }
    /* a bias comes before the repetition penalty, so it can change the sign that decides how that one works */
    const g4_logit_bias sign = {0, -3};
    const int32_t history[1] = {0};
    how.logit_bias = &sign, how.repeat_penalty = 2;
    memcpy(copy, logits, sizeof copy);
    CHECK(g4_sample(&how, copy, 4, history, 1, NULL, 0, &err) == 3 && copy[0] == -4, "bias, then repeat penalty: %g", (double)copy[0]);
}

static void test_logprobs(void) {
    g4_error err;
    const float logits[6] = {1, 3, 2, 3, -1, 0}, broken[2] = {1, NAN}, infinite[2] = {0, INFINITY};
    const int order[6] = {1, 3, 2, 0, 5, 4};
    g4_logprob top[6];
    double one = 0, total = 0;
    for (int i = 0; i < 6; i++) total += exp((double)logits[i]);
    for (int n = 0; n <= 6; n++) {
        CHECK(!g4_logprobs(logits, 6, 4, &one, top, n, &err) && fabs(one - (-1 - log(total))) < 1e-14, "%d best: %.17g", n, one);
        for (int i = 0; i < n; i++)
            CHECK(top[i].id == order[i] && fabs(top[i].logprob - (logits[order[i]] - log(total))) < 1e-14, "best %d of %d: id %d", i, n, (int)top[i].id);
    }
    CHECK(!g4_logprobs(logits, 6, 99, NULL, top, 1, &err), "no id wanted: %s", err.text);
    CHECK(g4_logprobs(logits, 6, 6, &one, top, 1, &err) && g4_logprobs(logits, 6, -1, &one, top, 1, &err), "ids outside");
    CHECK(g4_logprobs(logits, 6, 0, &one, top, 7, &err) && g4_logprobs(logits, 6, 0, &one, top, -1, &err), "more than there are");
    CHECK(g4_logprobs(broken, 2, 0, &one, top, 1, &err) && g4_logprobs(infinite, 2, 0, &one, top, 1, &err), "NaN and infinity");
}

/* ---- transformers --------------------------------------------------------------------------------------------------------- */

static const g4_st_tensor *tensor_of(const g4_safetensors *st, const char *name, int rank, const char *dtype) {
    const g4_st_tensor *t = g4_safetensors_find(st, name);
    if (t && t->rank == rank && !strcmp(t->dtype, dtype)) return t;
    printf("FAILED test_sampler: no tensor %s %s of rank %d\n", dtype, name, rank);
    exit(1);
}

/* Row r of a tensor [n][width] of 4-byte elements, into memory of this machine's byte order; gives width. */
static int row_of(const g4_st_tensor *t, int64_t r, void *to) {
    int width = t->rank == 2 ? (int)t->shape[1] : 1;
    for (int i = 0; i < width; i++) {
        const unsigned char *p = t->data + 4 * ((size_t)r * (size_t)width + (size_t)i);
        uint32_t bits = p[0] | p[1] << 8 | p[2] << 16 | (uint32_t)p[3] << 24;
        memcpy((char *)to + 4 * i, &bits, 4);
    }
    return width;
}

static int without_padding(const int32_t *ids, int n) {
    while (n && ids[n - 1] < 0) n--;
    return n;
}

/* The statistic of N draws over the ids with probability p [V] as a normal deviate (Wilson and Hilferty 1931: within 0.01 here). Ids that are expected less
 * than 5 times count as one; one that cannot be drawn at all and was makes it infinite. */
static double chi_square_deviate(const int *seen, const float *p, int V, double N) {
    double chi = 0, rare = 0, rare_seen = 0, total = 0;
    int bins = 0;
    for (int i = 0; i < V; i++) total += p[i] > 0 ? p[i] : 0;
    for (int i = 0; i < V; i++) {
        double expected = p[i] > 0 ? N * p[i] / total : 0;
        if (!(p[i] > 0) && seen[i]) return INFINITY;
        if (expected < 5) {
            rare += expected, rare_seen += seen[i];
        } else {
            chi += (seen[i] - expected) * (seen[i] - expected) / expected;
            bins++;
        }
    }
    if (rare >= 5) chi += (rare_seen - rare) * (rare_seen - rare) / rare, bins++;
    if (bins < 2) return 0;
    double k = bins - 1;
    return (cbrt(chi / k) - (1 - 2 / (9 * k))) / sqrt(2 / (9 * k));
}

/* Every case of a file of reference/sampling.py: the same ids are left, with the same probabilities within 1e-6. million: also that many draws of each of the
 * first cases that leave more than 10 ids. */
static void test_file(const char *path, int million) {
    g4_error err;
    g4_safetensors st;
    if (g4_safetensors_open(&st, path, 0, &err)) {
        CHECK(0, "%s", err.text);
        return;
    }
    const g4_st_tensor *logits_at = tensor_of(&st, "logits", 2, "F32"), *history_at = tensor_of(&st, "history", 2, "I32");
    const g4_st_tensor *n_prompt_at = tensor_of(&st, "n_prompt", 1, "I32"), *top_k_at = tensor_of(&st, "top_k", 1, "I32");
    const g4_st_tensor *settings_at = tensor_of(&st, "settings", 2, "F32"), *suppress_at = tensor_of(&st, "suppress", 2, "I32");
    const g4_st_tensor *bias_id_at = tensor_of(&st, "bias_id", 2, "I32"), *bias_at = tensor_of(&st, "bias", 2, "F32");
    const g4_st_tensor *p_at = tensor_of(&st, "probabilities", 2, "F32");
    int V = (int)logits_at->shape[1], other_sets = 0, draws = 0;
    int64_t n_cases = logits_at->shape[0];
    double worst = 0;
    float *logits = malloc(4 * (size_t)V), *p = malloc(4 * (size_t)V), *ours = malloc(4 * (size_t)V);
    int32_t *ids = malloc(8 * (size_t)V);
    int *seen = malloc(sizeof *seen * (size_t)V);
    for (int64_t c = 0; c < n_cases; c++) {
        int32_t history[64], suppress[16], bias_id[16], n_prompt, top_k;
        float settings[6], bias[16];
        g4_logit_bias biases[16];
        int n = without_padding(history, row_of(history_at, c, history));
        int n_suppress = without_padding(suppress, row_of(suppress_at, c, suppress));
        int n_bias = without_padding(bias_id, row_of(bias_id_at, c, bias_id));
        row_of(bias_at, c, bias), row_of(settings_at, c, settings), row_of(n_prompt_at, c, &n_prompt), row_of(top_k_at, c, &top_k);
        row_of(logits_at, c, logits), row_of(p_at, c, p);
        for (int i = 0; i < n_bias; i++) biases[i] = (g4_logit_bias){bias_id[i], bias[i]};
        g4_sampling how = {.temperature = settings[0], .top_p = settings[1], .min_p = settings[2], .repeat_penalty = settings[3],
                           .frequency_penalty = settings[4], .presence_penalty = settings[5], .top_k = top_k, .n_prompt = (size_t)n_prompt,
                           .logit_bias = biases, .n_logit_bias = n_bias};
        int m = g4_candidates(&how, logits, V, history, (size_t)n, suppress, n_suppress, ids, &err);
        double total = 0;
        float best = -INFINITY;
        for (int i = 0; i < m; i++) best = fmaxf(best, logits[ids[i]]);
        for (int i = 0; i < V; i++) ours[i] = -1;
        for (int i = 0; i < m; i++) total += exp((double)logits[ids[i]] - best);
        for (int i = 0; i < m; i++) ours[ids[i]] = (float)(exp((double)logits[ids[i]] - best) / total);
        int same = m > 0;
        for (int i = 0; i < V; i++) {
            same &= (ours[i] < 0) == (p[i] < 0);
            double difference = fabs((double)ours[i] - p[i]);
            if (same && !(difference <= worst)) worst = difference;
        }
        other_sets += !same;
        if (!million || m <= 10 || draws == 5) continue;
        draws++;
        memset(seen, 0, sizeof *seen * (size_t)V);
        for (int i = 0; i < 1000000; i++) {
            row_of(logits_at, c, logits);
            how.seed = (uint64_t)i;
            int32_t id = g4_sample(&how, logits, V, history, (size_t)n, suppress, n_suppress, &err);
            if (id >= 0) seen[id]++;
        }
        double deviate = chi_square_deviate(seen, p, V, 1e6);
        CHECK(deviate < 3.09, "case %d: a million draws from %d ids are %.2f standard deviations off; 3.09 is p = 0.001", (int)c, m, deviate);
    }
    CHECK(n_cases >= 100 && other_sets == 0, "%s: of %d cases, %d leave other ids than transformers", path, (int)n_cases, other_sets);
    CHECK(worst < 1e-6, "%s: a probability is %.3g off", path, worst);
    printf("%s: %d cases, largest difference of a probability %.3g, %d times a million draws\n", path, (int)n_cases, worst, draws);
    free(logits), free(p), free(ours), free(ids), free(seen);
    g4_safetensors_close(&st);
}

int main(int argc, char **argv) {
    if (argc > 2) {
        test_file(argv[2], 0);
        test_file("test/sampling.safetensors", 1);
        return test_done("test_sampler");
    }
    test_file("test/sampling.safetensors", 0);
    test_openai_penalties();
    test_bias();
    test_logprobs();
    test_greedy();
    test_parameters();
    test_overflow();
    test_penalty();
    test_sets();
    test_random_sets();
    test_draws();
    test_fixed_draws();
    test_functions();
    return test_done("test_sampler");
}
