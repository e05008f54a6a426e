/* sampler.c - from the logits of one position to one token id.
 *
 * The order is that of transformers' generate(): logit bias (its sequence_bias, one id long), repetition penalty, suppressed ids, temperature,
 * top-k, top-p, min-p, then one draw. OpenAI's frequency and presence penalties, which transformers has not, stand where generate() puts a processor
 * that its caller brings: after the penalties and before the temperature. Which ids survive is decided as transformers decides it, ties
 * included; the draw itself is ours.
 *
 * Not here: beams, n-gram penalties, stop ids and strings (engine.c looks at those).
 *
 * Nothing here asks libm for a bit, and the random number is a function of (seed, position) alone: a seed gives one text on every
 * machine, whatever was sampled before it. Read g4_sample first, then upwards.
 */
#define G4_EXACT_FLOAT
#include "gemma4.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* log(sum of e^x[i]) in double, added in the order of the indices; x [n]. -infinity if all x are, NaN if one is. */
double g4_log_sum_exp(const float *x, int n) {
    float max = -INFINITY;
    for (int i = 0; i < n; i++) {
        if (isnan(x[i])) return NAN;
        if (x[i] > max) max = x[i];
    }
    if (isinf(max)) return max;
    double sum = 0;
    for (int i = 0; i < n; i++) sum += g4_exp((double)x[i] - max);
    return max + g4_log(sum);
}

/* The finaliser of SplitMix64 (Steele, Lea, Flood 2014): every bit of x reaches every bit of the result. */
static uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* The generator has no state: number n of a seed, uniform in [0, 1) with 53 bits. The seed is mixed first so that neighbouring
 * seeds do not give one sequence shifted by a place. */
static double uniform(uint64_t seed, uint64_t n) {
    const uint64_t golden = 0x9e3779b97f4a7c15u; /* 2^64 / golden ratio, odd: n * golden visits all of 2^64 */
    return (double)(mix(mix(seed + golden) + (n + 1) * golden) >> 11) * 0x1p-53;
}

/* The repetition penalty as transformers has it: over all of history, an id counts once however often it occurred, a negative logit is multiplied and others are
 * divided. Then frequency and presence as OpenAI has them: over what was generated, so many times as it was. */
static int penalise(const g4_sampling *how, float *logits, int V, const int32_t *history, size_t n, g4_error *err) {
    int32_t *count = calloc((size_t)V, sizeof *count);
    if (!count) return g4_fail(err, "sampling: no memory for the penalties' %d counts", V);
    for (size_t i = 0; i < n; i++) {
        int32_t id = history[i];
        if (id < 0 || id >= V) {
            free(count);
            return g4_fail(err, "sampling: history item %zu is id %d, outside the vocabulary of %d", i, (int)id, V);
        }
        if (how->repeat_penalty == 1 || count[id]++) continue;
        logits[id] = logits[id] < 0 ? logits[id] * how->repeat_penalty : logits[id] / how->repeat_penalty;
    }
    for (size_t i = how->n_prompt; i < n; i++) count[history[i]] = 0;
    for (size_t i = how->n_prompt; i < n; i++) count[history[i]]++;
    for (size_t i = how->n_prompt; i < n; i++) {
        int32_t id = history[i];
        if (!count[id]) continue;
        logits[id] = logits[id] - (float)count[id] * how->frequency_penalty - how->presence_penalty;
        count[id] = 0;
    }
    free(count);
    return 0;
}

/* The k-th largest of x [n], 1 <= k <= n: a heap of the indices of the k largest so far, the smallest on top. heap [k] is scratch. */
static float kth_largest(const float *x, int n, int k, int32_t *heap) {
    int size = 0;
    for (int i = 0; i < n; i++) {
        if (size < k) {
            int c = size++;
            for (; c > 0 && x[heap[(c - 1) / 2]] > x[i]; c = (c - 1) / 2) heap[c] = heap[(c - 1) / 2];
            heap[c] = i;
        } else if (x[i] > x[heap[0]]) {
            int p = 0;
            for (int c; (c = 2 * p + 1) < size; p = c) {
                if (c + 1 < size && x[heap[c + 1]] < x[heap[c]]) c++;
                if (x[heap[c]] >= x[i]) break;
                heap[p] = heap[c];
            }
            heap[p] = i;
        }
    }
    return x[heap[0]];
}

/* a goes before b: the higher logit, then the lower id. */
static int before(const float *logits, int32_t a, int32_t b) {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
}

static void sift_down(const float *logits, int32_t *heap, int size, int p) {
    int32_t id = heap[p];
    for (int c; (c = 2 * p + 1) < size; p = c) {
        if (c + 1 < size && before(logits, heap[c + 1], heap[c])) c++;
        if (!before(logits, heap[c], id)) break;
        heap[p] = heap[c];
    }
    heap[p] = id;
}

/* Keeps the fewest of ids [n], best first, whose probabilities reach top_p; they are left at the front of ids, and their number is
 * returned. An id goes when those before it have reached top_p already: transformers says the same from the other end (it
 * removes an id when it and all worse ones together stay within 1 - top_p). The best one always stays.
 * A heap instead of a sort: V + m log V steps for the m that are kept. */
static int keep_top_p(const float *logits, int32_t *ids, int n, float max, float top_p, int32_t *kept) {
    double total = 0, mass = 0;
    for (int i = 0; i < n; i++) total += g4_exp((double)logits[ids[i]] - max);
    for (int p = n / 2 - 1; p >= 0; p--) sift_down(logits, ids, n, p);
    int m = 0;
    do {
        kept[m++] = ids[0];
        mass += g4_exp((double)logits[ids[0]] - max);
        ids[0] = ids[--n];
        if (n) sift_down(logits, ids, n, 0);
    } while (n && mass < (double)top_p * total);
    memcpy(ids, kept, (size_t)m * sizeof *ids);
    return m;
}

/* The ids that may be drawn, in the order of the draw, at the front of ids [2 * V]; gives their number. logits [V] are divided by the temperature
 * already, max is the largest. */
static int survivors(const g4_sampling *how, const float *logits, int V, float max, int32_t *ids) {
    int n = 0, m = 0;
    float least = -FLT_MAX; /* leaves out what was suppressed */
    if (how->top_k > 0 && how->top_k < V) {
        float kth = kth_largest(logits, V, how->top_k, ids);
        if (kth > least) least = kth;
    }
    for (int i = 0; i < V; i++)
        if (logits[i] >= least) ids[n++] = i; /* >=: all that tie with the k-th stay, as in transformers */
    if (how->top_p < 1) n = keep_top_p(logits, ids, n, max, how->top_p, ids + V);
    /* The probabilities are e^(logit - max) over their sum; min-p's threshold is a share of the best one's, which is 1 over it. */
    for (int i = 0; i < n; i++)
        if (!(g4_exp((double)logits[ids[i]] - max) < (double)how->min_p)) ids[m++] = ids[i];
    return m;
}

int g4_check_sampling(const g4_sampling *how, int V, g4_error *err) {
    /* Written so that a NaN fails each of them. */
    if (!(how->temperature >= 0 && how->temperature <= FLT_MAX))
        return g4_fail(err, "sampling: temperature must be 0 or more, found %g", (double)how->temperature);
    if (how->top_k < 0) return g4_fail(err, "sampling: top_k must be 0 (off) or more, found %d", how->top_k);
    if (!(how->top_p >= 0 && how->top_p <= 1)) return g4_fail(err, "sampling: top_p must be 0 to 1, found %g", (double)how->top_p);
    if (!(how->min_p >= 0 && how->min_p <= 1)) return g4_fail(err, "sampling: min_p must be 0 to 1, found %g", (double)how->min_p);
    if (!(how->repeat_penalty > 0 && how->repeat_penalty <= FLT_MAX))
        return g4_fail(err, "sampling: repeat_penalty must be above 0, found %g", (double)how->repeat_penalty);
    if (!(fabsf(how->frequency_penalty) <= FLT_MAX))
        return g4_fail(err, "sampling: frequency_penalty must be a finite number, found %g", (double)how->frequency_penalty);
    if (!(fabsf(how->presence_penalty) <= FLT_MAX))
        return g4_fail(err, "sampling: presence_penalty must be a finite number, found %g", (double)how->presence_penalty);
    for (int i = 0; i < how->n_logit_bias; i++) {
        const g4_logit_bias *b = &how->logit_bias[i];
        if (b->id < 0 || b->id >= V) return g4_fail(err, "sampling: logit_bias item %d is for id %d, outside the vocabulary of %d", i, (int)b->id, V);
        if (!(fabsf(b->bias) <= FLT_MAX)) return g4_fail(err, "sampling: logit_bias of id %d must be a finite number, found %g", (int)b->id, (double)b->bias);
    }
    return 0;
}

/* Everything up to the temperature, in place. Gives the best id, ties to the lowest. */
static int32_t prepare(const g4_sampling *how, float *logits, int V, const int32_t *history, size_t n, const int32_t *suppress, int n_suppress,
                       g4_error *err) {
    if (V < 1) return g4_fail(err, "sampling: there are no logits");
    if (g4_check_sampling(how, V, err)) return -1;
    if (how->n_prompt > n) return g4_fail(err, "sampling: n_prompt is %zu, but the history has %zu ids", how->n_prompt, n);
    for (int i = 0; i < V; i++)
        if (!(logits[i] <= FLT_MAX))
            return g4_fail(err, "sampling: the logit of id %d is %g; the model's output is broken", i, (double)logits[i]);
    for (int i = 0; i < how->n_logit_bias; i++) logits[how->logit_bias[i].id] += how->logit_bias[i].bias;
    if ((how->repeat_penalty != 1 || how->frequency_penalty != 0 || how->presence_penalty != 0) && penalise(how, logits, V, history, n, err)) return -1;
    for (int i = 0; i < n_suppress; i++)
        if (suppress[i] >= 0 && suppress[i] < V) logits[suppress[i]] = -INFINITY;

    /* Below 1e-5 the best id's probability is 1 in double unless the logits tie, so dividing would only risk overflow. */
    if (how->temperature >= 1e-5f && how->temperature != 1)
        for (int i = 0; i < V; i++) logits[i] /= how->temperature;
    int best = 0;
    for (int i = 1; i < V; i++)
        if (logits[i] > logits[best]) best = i; /* >: ties go to the lowest id */
    if (logits[best] == -INFINITY) return g4_fail(err, "sampling: every id is suppressed or has the logit -infinity");
    if (!(logits[best] <= FLT_MAX))
        return g4_fail(err, "sampling: the logit of id %d overflows under repeat_penalty %g and temperature %g", best, (double)how->repeat_penalty,
                       (double)how->temperature);
    return best;
}

int g4_candidates(const g4_sampling *how, float *logits, int V, const int32_t *history, size_t n, const int32_t *suppress, int n_suppress, int32_t *ids,
                  g4_error *err) {
    int32_t best = prepare(how, logits, V, history, n, suppress, n_suppress, err);
    if (best < 0) return -1;
    if (how->temperature >= 1e-5f) return survivors(how, logits, V, logits[best], ids);
    ids[0] = best;
    return 1;
}

int32_t g4_sample(const g4_sampling *how, float *logits, int V, const int32_t *history, size_t n, const int32_t *suppress, int n_suppress,
                  g4_error *err) {
    int32_t best = prepare(how, logits, V, history, n, suppress, n_suppress, err);
    if (best < 0 || how->temperature < 1e-5f) return best;
    int32_t *ids = V <= INT32_MAX / 8 ? malloc((size_t)V * 2 * sizeof *ids) : NULL;
    if (!ids) return g4_fail(err, "sampling: no memory for %d candidates", V);
    float max = logits[best];
    int m = survivors(how, logits, V, max, ids);
    double total = 0, mass = 0;
    for (int i = 0; i < m; i++) total += g4_exp((double)logits[ids[i]] - max);
    double target = uniform(how->seed, n) * total;
    int32_t id = ids[m - 1]; /* should u * total be rounded up to total */
    for (int i = 0; i < m; i++) {
        mass += g4_exp((double)logits[ids[i]] - max);
        if (mass > target) {
            id = ids[i];
            break;
        }
    }
    free(ids);
    return id;
}

g4_sampling g4_default_sampling(const g4_model *model) {
    const g4_config *c = &model->config;
    return (g4_sampling){.temperature = c->do_sample ? c->temperature : 0, .top_k = c->top_k, .top_p = c->top_p, .repeat_penalty = 1};
}

int g4_logprobs(const float *logits, int V, int32_t id, double *logprob, g4_logprob *top, int n, g4_error *err) {
    if (n < 0 || n > V) return g4_fail(err, "logprobs: %d alternatives were asked for, of %d ids", n, V);
    if (logprob && (id < 0 || id >= V)) return g4_fail(err, "logprobs: id %d is outside the vocabulary of %d", (int)id, V);
    double sum = g4_log_sum_exp(logits, V);
    if (!isfinite(sum)) return g4_fail(err, "logprobs: the logits are not finite numbers; the model's output is broken");
    if (logprob) *logprob = logits[id] - sum;
    if (!n) return 0;
    int32_t *heap = malloc((size_t)V * sizeof *heap);
    if (!heap) return g4_fail(err, "logprobs: no memory for %d ids", V);
    for (int i = 0; i < V; i++) heap[i] = i;
    for (int p = V / 2 - 1; p >= 0; p--) sift_down(logits, heap, V, p);
    for (int i = 0, size = V; i < n; i++) {
        top[i] = (g4_logprob){heap[0], logits[heap[0]] - sum};
        heap[0] = heap[--size];
        if (size) sift_down(logits, heap, size, 0);
    }
    free(heap);
    return 0;
}
