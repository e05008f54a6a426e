/* test_bf16.c - `--precision bf16`: each operation, given transformers' own bfloat16 inputs, must give transformers' bfloat16 outputs.
 *
 *     build/test_bf16 ./gemma4             the data of test/bf16, and the bits of whole models over threads, chunks and backends
 *     build/test_bf16 ./gemma4 FILE...     other files of reference/bf16_ops.py, which describes them; prints a table
 *
 * The bar, for each kind of operation: at least 99.9 % of the outputs have equal bits, the rest are one bfloat16 ulp away. What is left open is
 * the order of the sums inside (ours is fixed, torch's depends on the processor), which now and then moves a result across a tie. Where a sum
 * cancels to nearly nothing the same error is many ulps: for FILE an ulp is not taken smaller than that of 1/256 of the tensor's root mean square.
 *
 * An operation that rounds inside is given transformers' own inner values, or one sum that crosses a tie would count once for every output
 * behind it: the router and the experts get transformers' products through a matmul that hands them out; rows of attention with a score or a
 * weight on the other side of a tie are left out (`moved`), and scores and weights are counted by themselves. In the committed data no row is
 * moved.
 *
 * That the bar can be missed is checked too: the same operations without the roundings inside, only the result rounded, must miss it.
 *
 * Reading order: files, counting, the operations in the order of g4_backend, then whole models.
 */
#define G4_EXACT_FLOAT
#include "gemma4.h"

#include "test.h"

#include <math.h>

#define MAX(a, b) ((a) > (b) ? (a) : (b))

static void *room(size_t n) {
    void *p = calloc(n ? n : 1, 1);
    if (!p) {
        printf("FAILED test_bf16: out of memory for %zu bytes\n", n);
        exit(1);
    }
    return p;
}

/* ---- Files --------------------------------------------------------------------------------------------------------------- */

/* One line of `ops`: OP NAME KEY=VALUE ... */
typedef struct line {
    const g4_safetensors *st;
    const char *op, *name;
    const char *key[24], *value[24];
    int n;
    int broken; /* something that it should name is not there */
    unsigned char *moved; /* [outputs] not to be counted; NULL: all are */
} line;

static const char *field(line *l, const char *key) {
    for (int i = 0; i < l->n; i++)
        if (!strcmp(l->key[i], key)) return l->value[i];
    return NULL;
}

static double number(line *l, const char *key) {
    const char *text = field(l, key);
    if (!text) l->broken = 1;
    return text ? atof(text) : 1;
}

static const g4_st_tensor *tensor(line *l, const char *key, const char *dtype) {
    const char *name = field(l, key);
    const g4_st_tensor *t = name ? g4_safetensors_find(l->st, name) : NULL;
    if (t && (!dtype || !strcmp(t->dtype, dtype))) return t;
    l->broken = 1;
    return NULL;
}

static uint32_t little(const unsigned char *p, size_t size) {
    uint32_t bits = 0;
    for (size_t b = 0; b < size; b++) bits |= (uint32_t)p[b] << 8 * b;
    return bits;
}

static float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* The tensor that a key names, widened to floats [*n]. NULL, and the line is broken, if there is none. */
static float *floats(line *l, const char *key, size_t *n) {
    const g4_st_tensor *t = tensor(l, key, NULL);
    if (!t || (strcmp(t->dtype, "BF16") && strcmp(t->dtype, "F32"))) {
        l->broken = 1;
        return NULL;
    }
    size_t size = strcmp(t->dtype, "F32") ? 2 : 4;
    float *x = room(t->bytes / size * sizeof *x);
    *n = t->bytes / size;
    for (size_t i = 0; i < *n; i++) x[i] = float_of(little(t->data + i * size, size) << (size == 2 ? 16 : 0));
    return x;
}

static int32_t *ints(line *l, const char *key, size_t *n) {
    const g4_st_tensor *t = tensor(l, key, "I32");
    if (!t) return NULL;
    int32_t *x = room(t->bytes);
    *n = t->bytes / 4;
    for (size_t i = 0; i < *n; i++) x[i] = (int32_t)little(t->data + i * 4, 4);
    return x;
}

static g4_tensor weight(line *l, const char *key, int64_t cols) {
    const g4_st_tensor *t = tensor(l, key, "BF16");
    if (!t || cols < 1 || t->bytes / 2 % (size_t)cols) {
        l->broken = 1;
        return (g4_tensor){0};
    }
    return (g4_tensor){.data = t->data, .type = G4_TYPE_BF16, .rows = (int64_t)(t->bytes / 2) / cols, .cols = cols, .name = t->name};
}

/* ---- Counting ------------------------------------------------------------------------------------------------------------ */

static const char *const kinds[] = {"embed", "matmul", "norm", "rope_table", "rope", "scores", "attention", "softmax", "gelu", "gelu_mul",
                                    "add", "scale", "ple", "router", "experts", "softcap"};
enum { N_KINDS = sizeof kinds / sizeof *kinds };

typedef struct tally {
    size_t outputs, equal, one, cancelled, more; /* cancelled: more than an ulp of themselves, not of 1/256 of the tensor's size */
    size_t moved;                                /* not counted */
    size_t loose;                                /* outputs that are not equal without the roundings inside */
    double worst;                                /* router: relative difference of the float32 weights */
    char where[128];                             /* the first operation with `more` */
} tally;

static tally counted[N_KINDS];

static int kind_of(const char *op) {
    for (int i = 0; i < N_KINDS; i++)
        if (!strcmp(op, kinds[i])) return i;
    return -1;
}

/* A bfloat16's place among all of them. */
static int32_t place(float x) {
    int32_t magnitude = (int32_t)(bits_of(x) >> 16 & 0x7fff);
    return bits_of(x) >> 31 ? -magnitude : magnitude;
}

/* Counts ours [n] against theirs [n]; strict: with the roundings inside, else only how many differ. */
static void count(const line *l, const char *kind, const float *ours, const float *theirs, size_t n, int strict) {
    tally *c = &counted[kind_of(kind)];
    double squares = 0;
    for (size_t i = 0; i < n; i++) squares += (double)theirs[i] * theirs[i];
    float small = (float)sqrt(squares / (double)n) / 256;
    for (size_t i = 0; i < n; i++) {
        int whole = !(bits_of(ours[i]) & 0xffff), equal = whole && ours[i] == theirs[i];
        if (!strict) {
            c->loose += !equal;
            continue;
        }
        if (l->moved && l->moved[i]) {
            c->moved++;
            continue;
        }
        int32_t apart = whole && ours[i] - theirs[i] == ours[i] - theirs[i] ? abs(place(ours[i]) - place(theirs[i])) : INT32_MAX;
        c->outputs++;
        c->equal += equal;
        if (equal) continue;
        if (apart <= 1) c->one++;
        else if (whole && fabsf(ours[i] - theirs[i]) <= ldexpf(small, -7)) c->cancelled++;
        else if (!c->more++) snprintf(c->where, sizeof c->where, "%s: %zu: %.9g, expected %.9g", l->name, i, ours[i], theirs[i]);
    }
}

/* ---- The operations ------------------------------------------------------------------------------------------------------- */

static const g4_backend *const op = &g4_backend_scalar;

/* A matmul for operations that call run->backend->matmul: it counts what it computes, and gives what transformers computed. */
static struct {
    const line *l;
    const float *next[2]; /* the results of every second call, from the first and from the second on */
    int parts;            /* 1: next[0] holds the results of all calls */
    int call;
} handed_out;

static void hand_out(const g4_run *run, float *y, const g4_tensor *W, const float *x, int T) {
    const float **from = &handed_out.next[handed_out.call++ % handed_out.parts];
    size_t n = (size_t)T * (size_t)W->rows;
    op->matmul(run, y, W, x, T);
    if (run->precision == G4_F32) return;
    count(handed_out.l, "matmul", y, *from, n, 1);
    memcpy(y, *from, n * sizeof *y);
    *from += n;
}

static void round_all(float *y, size_t n) {
    for (size_t i = 0; i < n; i++) y[i] = g4_bf16_round(y[i]);
}

/* A cache with T positions of one sequence, filled with k and v [T][G][dh]. */
static g4_kv cache(const g4_run *run, const float *k, const float *v, int T, int G, int dh, int window, const g4_rows *rows) {
    size_t bytes = sizeof(float) * (size_t)T * G * dh;
    g4_kv kv = {.k = room(bytes), .v = room(bytes), .G = G, .dh = dh, .R = T, .window = window};
    op->kv_store(run, &kv, k, v, rows);
    return kv;
}

/* y [T][H*dh] of the attention over k and v [T][G][dh] */
static void attend(const g4_run *run, float *y, const float *q, const float *k, const float *v, int T, int H, int G, int dh, int window) {
    g4_rows rows = {.token = room(4 * (size_t)T), .seq = room(4 * (size_t)T), .pos = room(4 * (size_t)T), .T = T};
    for (int t = 0; t < T; t++) rows.pos[t] = t;
    g4_kv kv = cache(run, k, v, T, G, dh, window, &rows);
    float *scores = room(sizeof *scores * (size_t)run->threads * (H / G) * T);
    op->attention(run, &(g4_attention_args){.o = y, .q = q, .kv = &kv, .rows = &rows, .H = H, .scores = scores, .score_rows = H / G, .ctx = T});
    free(rows.token), free(rows.seq), free(rows.pos), free(kv.k), free(kv.v), free(scores);
}

/* The softmax weights y [H][T][T]: what attention gives when V holds the rows of the identity, dh keys at a time. */
static void weights(const g4_run *run, float *y, const float *q, const float *k, int T, int H, int G, int dh, int window) {
    float *v = room(sizeof *v * (size_t)T * G * dh), *o = room(sizeof *o * (size_t)T * H * dh);
    for (int begin = 0; begin < T; begin += dh) {
        for (int t = 0; t < T; t++)
            for (int i = 0; i < G * dh; i++) v[(size_t)t * G * dh + i] = t - begin == i % dh;
        attend(run, o, q, k, v, T, H, G, dh, window);
        for (int h = 0; h < H; h++)
            for (int t = 0; t < T; t++)
                for (int j = begin; j < T && j < begin + dh; j++) y[((size_t)h * T + t) * T + j] = o[((size_t)t * H + h) * dh + j - begin];
    }
    free(v), free(o);
}

static void do_embed(line *l, const g4_run *run, float **y, size_t *n) {
    g4_tensor w = weight(l, "w", (int64_t)number(l, "cols"));
    size_t T = 0;
    int32_t *ids = ints(l, "ids", &T);
    *n = T * (size_t)w.cols;
    if (!l->broken) op->embed(run, *y = room(*n * sizeof **y), &w, ids, (int)T, (float)number(l, "scale"));
    free(ids);
}

static void do_matmul(line *l, const g4_run *run, float **y, size_t *n) {
    g4_tensor w = weight(l, "w", (int64_t)number(l, "cols"));
    size_t size = 0;
    float *x = floats(l, "x", &size);
    size_t T = l->broken ? 0 : size / (size_t)w.cols;
    *n = T * (size_t)w.rows;
    if (!l->broken) op->matmul(run, *y = room(*n * sizeof **y), &w, x, (int)T);
    free(x);
}

static void do_norm(line *l, const g4_run *run, float **y, size_t *n) {
    int dim = (int)number(l, "dim");
    g4_tensor w = {0};
    if (field(l, "w")) w = weight(l, "w", dim);
    *y = floats(l, "x", n);
    if (!l->broken) op->norm(run, *y, *y, w.data ? &w : NULL, (int)(*n / (size_t)dim), dim, (float)number(l, "eps"));
}

/* cos, then sin */
static void do_rope_table(line *l, const g4_run *run, float **y, size_t *n) {
    size_t half = 0, T = 0;
    float *inv_freq = floats(l, "inv_freq", &half);
    int32_t *pos = ints(l, "pos", &T);
    *n = 2 * T * half;
    if (!l->broken) *y = room(*n * sizeof **y), op->rope_table(run, *y, *y + T * half, inv_freq, pos, (int)T, (int)half);
    free(inv_freq), free(pos);
}

static void do_rope(line *l, const g4_run *run, float **y, size_t *n) {
    int heads = (int)number(l, "heads"), dh = (int)number(l, "dh");
    size_t size = 0;
    float *c = floats(l, "cos", &size), *s = floats(l, "sin", &size);
    *y = floats(l, "x", n);
    if (!l->broken) op->rope(run, *y, c, s, (int)(*n / (size_t)(heads * dh)), heads, dh);
    free(c), free(s);
}

/* Counts the visible scores against transformers' [H][T][T], and marks in moved [T][H] the rows where one is not equal. */
static void compare_scores(line *l, const g4_run *run, unsigned char *moved, const float *theirs, const float *q, const float *k, int T, int H,
                           int G, int dh, int window) {
    unsigned char *keys = room(2 * (size_t)T * dh); /* of one head, as a weight [T][dh] */
    float *x = room(sizeof *x * (size_t)T * dh), *y = room(sizeof *y * (size_t)T * T);
    g4_tensor W = {.data = keys, .type = G4_TYPE_BF16, .rows = T, .cols = dh};
    for (int h = 0; h < H; h++) {
        for (int t = 0; t < T; t++)
            for (int i = 0; i < dh; i++) {
                uint32_t bits = bits_of(k[((size_t)t * G + h / (H / G)) * dh + i]);
                keys[2 * ((size_t)t * dh + i)] = (unsigned char)(bits >> 16), keys[2 * ((size_t)t * dh + i) + 1] = (unsigned char)(bits >> 24);
                x[(size_t)t * dh + i] = q[((size_t)t * H + h) * dh + i];
            }
        op->matmul(run, y, &W, x, T);
        for (int t = 0; t < T; t++) {
            int first = MAX(0, t - window + 1);
            const float *a = y + (size_t)t * T + first, *b = theirs + ((size_t)h * T + t) * T + first;
            count(l, "scores", a, b, (size_t)(t - first + 1), 1);
            for (int j = 0; j <= t - first; j++) moved[(size_t)t * H + h] |= a[j] != b[j];
        }
    }
    free(keys), free(x), free(y);
}

static void do_attention(line *l, const g4_run *run, float **y, size_t *n) {
    int H = (int)number(l, "H"), G = (int)number(l, "G"), dh = (int)number(l, "dh"), window = (int)number(l, "window");
    int only_weights = !strcmp(l->op, "softmax");
    size_t size = 0, n_scores = 0;
    float *q = floats(l, "q", n), *k = floats(l, "k", &size), *v = only_weights ? NULL : floats(l, "v", &size);
    float *scores = floats(l, "scores", &n_scores);
    size_t T = *n / (size_t)(H * dh);
    if (only_weights) *n = (size_t)H * T * T;
    if (!l->broken) *y = room(*n * sizeof **y);
    if (!l->broken && only_weights) weights(run, *y, q, k, (int)T, H, G, dh, window);
    if (!l->broken && !only_weights) attend(run, *y, q, k, v, (int)T, H, G, dh, window);
    if (!l->broken && run->precision == G4_BF16) {
        unsigned char *moved = room(T * (size_t)H), *all = room(*n);
        compare_scores(l, run, moved, scores, q, k, (int)T, H, G, dh, window);
        if (!only_weights) { /* [H][T][T]; they are counted as softmax */
            float *theirs = floats(l, "weights", &size), *ours = room(size * sizeof *ours);
            if (!l->broken && size == (size_t)H * T * T) {
                weights(run, ours, q, k, (int)T, H, G, dh, window);
                for (size_t i = 0; i < size; i++) moved[i / T % T * (size_t)H + i / (T * T)] |= ours[i] != theirs[i];
            }
            l->broken |= size != (size_t)H * T * T;
            free(theirs), free(ours);
        }
        for (size_t i = 0; i < *n; i++) /* [H][T][T] or [T][H][dh] */
            all[i] = only_weights ? moved[i / T % T * (size_t)H + i / (T * T)] : moved[i / (size_t)dh];
        free(moved);
        l->moved = all;
    }
    free(q), free(k), free(v), free(scores);
}

/* `gelu` is gelu_mul times 1. */
static void do_gelu_mul(line *l, const g4_run *run, float **y, size_t *n) {
    *y = floats(l, "gate", n);
    float *up = NULL;
    if (!strcmp(l->op, "gelu_mul")) {
        up = floats(l, "up", n);
    } else {
        up = room(*n * sizeof *up);
        for (size_t i = 0; i < *n; i++) up[i] = 1;
    }
    if (!l->broken) op->gelu_mul(run, *y, up, 1, (int)*n, *n);
    free(up);
}

static void do_add(line *l, const g4_run *run, float **y, size_t *n) {
    float *x = floats(l, "x", n);
    *y = floats(l, "r", n);
    if (!l->broken) op->add(run, *y, x, *n);
    free(x);
}

static void do_scale(line *l, const g4_run *run, float **y, size_t *n) {
    g4_tensor s = weight(l, "s", 1);
    *y = floats(l, "x", n);
    if (!l->broken) op->scale(run, *y, &s, *n);
}

static void do_ple(line *l, const g4_run *run, float **y, size_t *n) {
    int L = (int)number(l, "L"), P = (int)number(l, "P");
    g4_tensor norm = weight(l, "norm", P);
    float *b = floats(l, "b", n);
    *y = floats(l, "a", n);
    if (!l->broken)
        op->ple(run, &(g4_ple_args){.p = *y, .b = b, .norm = &norm, .T = (int)(*n / (size_t)(L * P)), .L = L, .P = P,
                                    .D = (int)number(l, "D"), .eps = (float)number(l, "eps")});
    free(b);
}

/* The weights of the chosen experts, and the normed and scaled input of the router's matrix. The weights are float32 in transformers too: they
 * are counted rounded, and `worst` keeps how far they are apart before that. */
static void do_router(line *l, const g4_run *run, float **y, size_t *n) {
    int D = (int)number(l, "D"), E = (int)number(l, "E"), K = (int)number(l, "K");
    size_t size = 0, m = 0;
    g4_layer layer = {.router_proj = weight(l, "proj", D), .router_scale = weight(l, "scale", D),
                      .per_expert_scale = weight(l, "per_expert_scale", E)};
    float *h = floats(l, "h", &size), *expected = floats(l, "weight", &m), *normed = floats(l, "n", &size);
    float *products = floats(l, "logits", &m);
    int32_t *index = ints(l, "index", n);
    size_t T = size / (size_t)D;
    if (!l->broken && *n == T * (size_t)K && m == T * (size_t)E) {
        g4_backend handing = *op;
        g4_run inner = *run;
        handing.matmul = hand_out, inner.backend = &handing;
        handed_out.l = l, handed_out.call = 0, handed_out.parts = 1, handed_out.next[0] = products;
        float *scratch = room(size * sizeof *scratch), *logits = room(T * (size_t)E * sizeof *logits);
        int32_t *chosen = room(*n * sizeof *chosen);
        *y = room(*n * sizeof **y);
        op->router(&inner, &(g4_router_args){.index = chosen, .weight = *y, .h = h, .layer = &layer, .T = (int)T, .D = D, .E = E, .K = K,
                                          .eps = (float)number(l, "eps"), .n = scratch, .logits = logits});
        for (size_t i = 0; i < *n; i++) {
            if (chosen[i] != index[i]) (*y)[i] = NAN; /* another expert: counted as wrong */
            else if (run->precision == G4_BF16) {
                double apart = fabs((double)(*y)[i] / expected[i] - 1);
                if (!(apart <= counted[kind_of("router")].worst)) counted[kind_of("router")].worst = apart;
            }
            (*y)[i] = g4_bf16_round((*y)[i]);
        }
        count(l, "router", scratch, normed, size, run->precision == G4_BF16);
        free(scratch), free(logits), free(chosen);
    } else {
        l->broken = 1;
    }
    free(h), free(expected), free(normed), free(products), free(index);
}

static void do_experts(line *l, const g4_run *run, float **y, size_t *n) {
    int D = (int)number(l, "D"), K = (int)number(l, "K"), Fe = (int)number(l, "Fe");
    size_t size = 0;
    g4_layer layer = {.experts_gate_up_proj = weight(l, "gate_up", D), .experts_down_proj = weight(l, "down", Fe)};
    float *x = floats(l, "x", n), *w = floats(l, "weight", &size);
    float *gate_ups = floats(l, "gate_ups", &size), *downs = floats(l, "downs", &size);
    int32_t *index = ints(l, "index", &size);
    g4_backend handing = *op;
    g4_run inner = *run;
    handing.matmul = hand_out, inner.backend = &handing;
    handed_out.l = l, handed_out.call = 0, handed_out.parts = 2, handed_out.next[0] = gate_ups, handed_out.next[1] = downs;
    float *gate_up = room(sizeof(float) * 2 * (size_t)Fe), *down = room(sizeof(float) * (size_t)D);
    if (!l->broken)
        op->experts(&inner, &(g4_experts_args){.y = *y = room(*n * sizeof **y), .x = x, .index = index, .weight = w, .layer = &layer,
                                            .T = (int)(*n / (size_t)D), .D = D, .K = K, .Fe = Fe, .gate_up = gate_up, .down = down});
    free(x), free(w), free(gate_ups), free(downs), free(index), free(gate_up), free(down);
}

static void do_softcap(line *l, const g4_run *run, float **y, size_t *n) {
    *y = floats(l, "x", n);
    if (!l->broken) op->softcap(run, *y, *n, (float)number(l, "c"));
}

/* What each kind runs, and whether it rounds inside: then it must miss the bar without that. */
static const struct {
    void (*run)(line *l, const g4_run *run, float **y, size_t *n);
    int inside;
} runs[N_KINDS] = {{do_embed, 1},     {do_matmul, 0},    {do_norm, 0},     {do_rope_table, 0}, {do_rope, 1},  {NULL, 0},
                   {do_attention, 1}, {do_attention, 1}, {do_gelu_mul, 0}, {do_gelu_mul, 1},   {do_add, 0},   {do_scale, 0},
                   {do_ple, 1},       {do_router, 1},    {do_experts, 1},  {do_softcap, 1}};

static void expected_of(line *l, float **y, size_t *n) {
    if (strcmp(l->op, "rope_table")) {
        *y = floats(l, !strcmp(l->op, "router") ? "weight" : "y", n);
        if (*y) round_all(*y, *n); /* only the router's are not bfloat16 already */
        return;
    }
    float *c = floats(l, "cos", n), *s = floats(l, "sin", n);
    if (!l->broken) {
        *y = room(2 * *n * sizeof **y);
        memcpy(*y, c, *n * sizeof **y), memcpy(*y + *n, s, *n * sizeof **y);
    }
    *n *= 2;
    free(c), free(s);
}

static void check_line(line *l, int threads) {
    int kind = kind_of(l->op);
    CHECK(kind >= 0 && runs[kind].run, "\"%s\" is no operation", l->op);
    if (kind < 0 || !runs[kind].run) return;
    for (int strict = 1; strict >= 0 && (strict || runs[kind].inside); strict--) {
        g4_run run = {.backend = op, .threads = threads, .precision = strict ? G4_BF16 : G4_F32};
        size_t n = 0, m = 0;
        float *ours = NULL, *theirs = NULL;
        expected_of(l, &theirs, &m);
        runs[kind].run(l, &run, &ours, &n);
        CHECK(!l->broken && ours && theirs && n == m, "%s %s: the line is incomplete, or %zu outputs are not %zu", l->op, l->name, n, m);
        if (!l->broken && ours && theirs && n == m) {
            if (!strict) round_all(ours, n);
            count(l, l->op, ours, theirs, n, strict);
        }
        free(ours), free(theirs), free(l->moved);
        l->moved = NULL;
    }
}

static void check_file(const char *path, int threads) {
    g4_safetensors st;
    g4_error err;
    int failed = g4_safetensors_open(&st, path, 0, &err);
    CHECK(!failed, "%s", err.text);
    if (failed) return;
    const g4_st_tensor *ops = g4_safetensors_find(&st, "ops");
    CHECK(ops, "%s: there is no tensor \"ops\"", path);
    if (ops) {
        char *text = room(ops->bytes + 1), *at = text;
        memcpy(text, ops->data, ops->bytes);
        while (*at) {
            char *end = at + strcspn(at, "\n"), *word = at;
            at = *end ? end + 1 : end;
            *end = 0;
            line l = {.st = &st};
            for (int i = 0; *word; i++) {
                char *stop = word + strcspn(word, " "), *equals = strchr(word, '=');
                char *next = *stop ? stop + 1 : stop;
                *stop = 0;
                if (i == 0) l.op = word;
                else if (i == 1) l.name = word;
                else if (equals && l.n < 24) *equals = 0, l.key[l.n] = word, l.value[l.n++] = equals + 1;
                word = next;
            }
            if (l.name) check_line(&l, threads);
        }
        free(text);
    }
    g4_safetensors_close(&st);
}

/* The bars, for what was counted. committed: each kind must have been there, ulps are taken as they are, and the bar must be one that can be
 * missed. */
static void judge(int committed) {
    if (!committed)
        printf("%-10s %12s %10s %8s %10s %6s %10s %10s\n", "operation", "outputs", "equal", "1 ulp", "cancelled", "more", "moved", "unrounded");
    for (int i = 0; i < N_KINDS; i++) {
        const tally *c = &counted[i];
        if (!committed && !c->outputs) continue;
        double equal = 100.0 * (double)c->equal / (double)MAX(c->outputs, 1), loose = 100.0 * (double)c->loose / (double)MAX(c->outputs, 1);
        if (!committed) {
            printf("%-10s %12zu %9.4f%% %8zu %10zu %6zu %10zu ", kinds[i], c->outputs, equal, c->one, c->cancelled, c->more, c->moved);
            if (runs[i].inside) printf("%9.4f%%", 100 - loose);
            printf("\n");
        }
        CHECK(c->outputs > 0, "no data for %s", kinds[i]);
        CHECK(equal >= 99.9, "%s: %.4f %% of %zu outputs have transformers' bits, the bar is 99.9 %%", kinds[i], equal, c->outputs);
        /* torch's vectors take tanh for -1 a little early: GELU of -5.0625 to -5.15625, four values of all, is -0 there and -1.5e-7 here */
        size_t known = strcmp(kinds[i], "gelu") ? 0 : 4;
        CHECK(!c->more && !(committed && c->cancelled > known), "%s: %zu outputs are more than 1 bf16 ulp away; %s", kinds[i],
              c->more + c->cancelled, c->where);
        CHECK(c->moved <= (committed ? 0 : c->outputs / 4), "%s: scores differ in the rows of %zu outputs", kinds[i], c->moved);
        if (committed && runs[i].inside)
            CHECK(loose > 0.1, "%s: the data do not show whether it rounds inside: %.4f %% differ without", kinds[i], loose);
    }
    const tally *router = &counted[kind_of("router")];
    if (committed) CHECK(router->worst < 1e-6, "router: the float32 weights differ by %.3g", router->worst);
    else if (router->outputs) printf("router: float32 weights apart by at most %.3g\n", router->worst);
}

/* ---- Whole models ---------------------------------------------------------------------------------------------------------- */

/* All logits of ids [T], in calls of `step` rows. NULL after a failed check. */
static float *logits_of(const g4_model *m, const int32_t *ids, int T, g4_precision precision, int threads, int chunk, int step) {
    g4_error err;
    int V = g4_get_config(m)->vocab_size;
    g4_state *s = g4_state_open(m, &(g4_state_options){.ctx = T, .chunk = chunk, .threads = threads, .precision = precision}, &err);
    CHECK(s, "%s", err.text);
    if (!s) return NULL;
    float *logits = room((size_t)T * V * sizeof *logits);
    int failed = 0;
    for (int t = 0; t < T && !failed; t += step) {
        g4_row *rows = room((size_t)T * sizeof *rows);
        int n = t + step < T ? step : T - t;
        for (int i = 0; i < n; i++) rows[i] = (g4_row){.token = ids[t + i], .pos = t + i, .want_logits = 1};
        failed = g4_forward(s, rows, n, logits + (size_t)t * V, &err);
        CHECK(!failed, "%s", err.text);
        free(rows);
    }
    g4_state_close(s);
    return logits;
}

static void check_bits(const char *name) {
    static const struct { int threads, chunk, step; } how[] = {{1, 128, 1000}, {1, 1, 1000}, {1, 7, 5}, {2, 128, 1000}, {3, 9, 1000}};
    char path[128], file[160];
    g4_error err;
    g4_safetensors st;
    snprintf(path, sizeof path, "test/fixtures/%s", name);
    snprintf(file, sizeof file, "%s/expected.safetensors", path);
    int failed = g4_safetensors_open(&st, file, 0, &err);
    CHECK(!failed, "%s", err.text);
    if (failed) return;
    line l = {.st = &st, .key = {"ids", "logits"}, .value = {"ids", "logits_bf16"}, .n = 2};
    size_t T = 0, n = 0;
    int32_t *ids = ints(&l, "ids", &T);
    float *expected = floats(&l, "logits", &n), *first = NULL;
    const char *why, *backend;
    for (int b = 0; ids && expected && (backend = g4_backend_name(b, &why)); b++) {
        if (*why || (strcmp(backend, "scalar") && strcmp(backend, "cpu"))) continue; /* the backends that promise equal bits */
        g4_model *m = g4_open(path, &(g4_options){.backend = backend}, &err);
        CHECK(m, "%s", err.text);
        if (!m) continue;
        for (size_t i = 0; i < sizeof how / sizeof *how; i++) {
            float *logits = logits_of(m, ids, (int)T, G4_BF16, how[i].threads, how[i].chunk, how[i].step);
            if (logits && first)
                CHECK(!memcmp(first, logits, n * sizeof *logits), "%s: other bf16 bits with backend %s, %d threads, chunks of %d, %d rows a call",
                      name, backend, how[i].threads, how[i].chunk, how[i].step);
            if (first) free(logits);
            else first = logits;
        }
        float *single = logits_of(m, ids, (int)T, G4_F32, 1, 128, 1000);
        CHECK(single && first && memcmp(first, single, n * sizeof *single), "%s: bf16 gives the bits of f32", name);
        double ours = 0, theirs = 0;
        for (size_t i = 0; single && first && i < n; i++) {
            ours += ((double)first[i] - expected[i]) * ((double)first[i] - expected[i]);
            theirs += ((double)single[i] - expected[i]) * ((double)single[i] - expected[i]);
        }
        CHECK(sqrt(ours / theirs) <= 1, "%s: RMS(ours - transformers' bf16) is %.3g of RMS(bf16 - f32)", name, sqrt(ours / theirs));
        free(single);
        g4_close(m);
    }
    CHECK(first, "%s: no logits", name);
    free(ids), free(expected), free(first);
    g4_safetensors_close(&st);
}

int main(int argc, char **argv) {
    for (int i = 2; i < argc; i++) check_file(argv[i], 2);
    if (argc <= 2) {
        check_file("test/bf16/ple.safetensors", 1);
        check_file("test/bf16/moe.safetensors", 1);
        check_file("test/bf16/functions.safetensors", 1);
    }
    judge(argc <= 2);
    if (argc <= 2) {
        check_bits("e2b");
        check_bits("26b-a4b");
        check_bits("f16"); /* weights that are not bfloat16 already */
        check_bits("untied-f32");
    }
    return test_done("bf16");
}
