/* backend_cpu.c - the fast backend for the host's own processor: the bits of the scalar backend, computed in vectors and in cache-sized blocks.
 *
 * It is not another arithmetic: every float of every operation is the one that gemma4.c computes (test/test_backend.c compares them all). The 16
 * lanes of a dot product are 16 / LANES vectors here, a product and a sum are still rounded one by one, and a thread still owns whole outputs.
 *
 * The file includes itself once for each instruction set, so the kernels exist in several versions made from one text; which one runs is
 * asked of the processor. A compiler or a processor without vectors known to be IEEE gets the version with vectors of one float.
 *
 * Reading order: part 1, what a kernel is given; part 2, the kernels (the text that is included again); part 3, the operations, which cut the
 * work into parts for the threads and call kernels.
 */
#ifndef ISA

/* ---- Part 1 ------------------------------------------------------------------------------------------------------------- */

#define G4_EXACT_FLOAT
#include "gemma4.h"

#include <math.h>
#include <string.h>

#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

#if defined(__GNUC__)
#define INLINE inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif
#define PREFETCH(p) __builtin_prefetch(p)
#if defined(__clang__)
#define SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
#define SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, (int32_t __attribute__((vector_size(16)))){i, j, k, l})
#endif
#else
#define INLINE inline
#define UNROLL
#define PREFETCH(p) ((void)(p))
#endif

/* How the weights of a product lie in memory. */
enum { HOST_FLOATS, LITTLE_BF16 };

/* y = W x for some rows of W and all tokens. The element for row o and token t goes to y[t * y_stride + o]. */
typedef struct product {
    float *y;
    size_t y_stride;          /* in floats */
    const unsigned char *w;   /* [rows][n] */
    size_t w_stride;          /* in bytes */
    g4_dtype type;
    int widen;                /* the weights are neither HOST_FLOATS nor LITTLE_BF16: they are widened block by block */
    const float *x;           /* [T][n] */
    size_t x_stride;          /* in floats */
    int T, n;
    int round;                /* results, and weights that are not bfloat16 already, are rounded to bfloat16 */
} product;

typedef struct kernels {
    void (*products)(const product *m, int begin, int end);
    void (*weighted_sum)(float *o, const float *p, size_t p_stride, const float *v, int heads, int dh, int n, int begin, int end);
    void (*softmax)(float *s, int n, int round);
    void (*gelu_mul)(float *gate, const float *up, int n, int round);
    void (*softcap)(float *y, size_t n, float c, int round);
    void (*norm)(float *y, const float *x, const g4_tensor *w, int dim, float eps, int round);
    void (*rope)(float *x, const float *c, const float *s, int half, int round);
    void (*exp)(float *s, int n, float max);
} kernels;

static INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static INLINE float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* A little-endian field of a file; the branch is decided by the compiler. */
static INLINE uint16_t load16(const unsigned char *p) {
    const uint16_t one = 1;
    uint16_t v;
    memcpy(&v, p, sizeof v);
    return *(const unsigned char *)&one ? v : (uint16_t)(v << 8 | v >> 8);
}

static INLINE int host_is_little(void) {
    const uint16_t one = 1;
    return *(const unsigned char *)&one;
}

/* g4_bf16_round, to be inlined. */
static INLINE float round_one(float x) {
    uint32_t bits = bits_of(x), sum = (bits + 0x7fffu + (bits >> 16 & 1)) & 0xffff0000u;
    return float_of((bits & 0x7fffffffu) > 0x7f800000u ? bits : sum);
}

#define PASTE(a, b) a##_##b
#define VERSION(name, isa) PASTE(name, isa)

/* Each version's kernels and types have names of their own. */
#define vec VERSION(vec, ISA)
#define half_vec VERSION(half_vec, ISA)
#define half_uvec VERSION(half_uvec, ISA)
#define half_mask VERSION(half_mask, ISA)
#define wide VERSION(wide, ISA)
#define wide_bits VERSION(wide_bits, ISA)
#define wide_mask VERSION(wide_mask, ISA)
#define quad VERSION(quad, ISA)
#define quad_load VERSION(quad_load, ISA)
#define load VERSION(load, ISA)
#define store VERSION(store, ISA)
#define half_load VERSION(half_load, ISA)
#define half_store VERSION(half_store, ISA)
#define half_select VERSION(half_select, ISA)
#define half_round VERSION(half_round, ISA)
#define wide_select VERSION(wide_select, ISA)
#define wide_abs VERSION(wide_abs, ISA)
#define to_wide VERSION(to_wide, ISA)
#define to_half VERSION(to_half, ISA)
#define exp_wide VERSION(exp_wide, ISA)
#define exp_half VERSION(exp_half, ISA)
#define tanh_half VERSION(tanh_half, ISA)
#define gelu_half VERSION(gelu_half, ISA)
#define load_weights VERSION(load_weights, ISA)
#define step VERSION(step, ISA)
#define tile VERSION(tile, ISA)
#define tile_any VERSION(tile_any, ISA)
#define widen_row VERSION(widen_row, ISA)
#define add_lanes VERSION(add_lanes, ISA)
#define finish VERSION(finish, ISA)
#define product_rows VERSION(product_rows, ISA)
#define sum_tile VERSION(sum_tile, ISA)
#define sum_over_keys VERSION(sum_over_keys, ISA)
#define softmax_row VERSION(softmax_row, ISA)
#define gelu_mul_row VERSION(gelu_mul_row, ISA)
#define softcap_row VERSION(softcap_row, ISA)
#define norm_row VERSION(norm_row, ISA)
#define rope_row VERSION(rope_row, ISA)
#define exp_row VERSION(exp_row, ISA)
#define table VERSION(table, ISA)

/* The instruction sets. LANES floats are one vector; a tile is up to ROWS rows by TOKENS tokens, as many as the registers hold. ARMv7 is missing on purpose:
 * its vectors flush subnormals. So are gcc's AVX versions for Windows: gcc aligns the stack there to 16 bytes only and crashes when it spills a vector. */
#if defined(__GNUC__) && defined(__x86_64__) && !(defined(_WIN32) && !defined(__clang__))
#define HAVE_AVX
#include <immintrin.h>

#define ISA avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))
#define LANES 16
#define ROWS 4
#define TOKENS 6
#include "backend_cpu.c"
#undef ISA
#undef TARGET
#undef LANES
#undef ROWS
#undef TOKENS

#define ISA avx2
#define TARGET __attribute__((target("avx2")))
#define LANES 8
#define ROWS 2
#define TOKENS 3
#include "backend_cpu.c"
#undef ISA
#undef TARGET
#undef LANES
#undef ROWS
#undef TOKENS
#endif

#define ISA base
#define TARGET
#if defined(__GNUC__) && (defined(__SSE2__) || defined(__aarch64__) || defined(__wasm_simd128__)) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define LANES 4
#define TOKENS 3
#if defined(__aarch64__)
#define ROWS 2
#else
#define ROWS 1
#endif
#else
#define LANES 1
#define ROWS 1
#define TOKENS 2
#endif
#include "backend_cpu.c"

/* ---- Part 3: the operations --------------------------------------------------------------------------------------------- */

static const kernels *choose_kernels(void) {
#ifdef HAVE_AVX
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return &table_avx512;
    if (__builtin_cpu_supports("avx2")) return &table_avx2;
#endif
    return &table_base;
}

#ifndef KERNELS /* test/test_backend.c tries each version, and threads on small work */
#define KERNELS choose_kernels()
#endif

#ifndef SHARE_FROM /* waking the threads costs about as much time as this many products */
#define SHARE_FROM 65536
#endif

/* All threads or one: OpenMP's pool is slow to change its size. */
static int worth_sharing(size_t products) { return products >= SHARE_FROM; }

/* Rows are shared out in multiples of 16, so that no two threads write to one cache line. */
static int part_begin(int rows, int part, int parts) {
    int64_t panels = ((int64_t)rows + 15) / 16;
    return (int)MIN(panels * part / parts * 16, rows);
}

static void matmul(const g4_run *run, float *y, const g4_tensor *W, const float *x, int T) {
    const kernels *k = KERNELS;
    int rows = (int)W->rows, cols = (int)W->cols, bf16 = run->precision == G4_BF16;
    const product m = {.y = y, .y_stride = (size_t)rows, .w = W->data, .w_stride = g4_row_bytes(W), .type = W->type,
                       .widen = W->type != G4_TYPE_BF16 && (W->type != G4_TYPE_F32 || bf16 || !host_is_little()),
                       .x = x, .x_stride = (size_t)cols, .T = T, .n = cols, .round = bf16};
#pragma omp parallel for schedule(static) num_threads(run->threads) if (worth_sharing((size_t)rows * cols * T))
    for (int part = 0; part < run->threads; part++) k->products(&m, part_begin(rows, part, run->threads), part_begin(rows, part + 1, run->threads));
}

static void norm(const g4_run *run, float *y, const float *x, const g4_tensor *w, int n, int dim, float eps) {
    const kernels *k = KERNELS;
#pragma omp parallel for schedule(static) num_threads(run->threads) if (worth_sharing((size_t)n * dim * 4))
    for (int t = 0; t < n; t++) k->norm(y + (size_t)t * dim, x + (size_t)t * dim, w, dim, eps, run->precision == G4_BF16);
}

static void rope(const g4_run *run, float *x, const float *c, const float *s, int T, int heads, int dh) {
    const kernels *k = KERNELS;
    int half = dh / 2;
#pragma omp parallel for schedule(static) num_threads(run->threads) if (worth_sharing((size_t)T * heads * dh * 4))
    for (int t = 0; t < T; t++)
        for (int h = 0; h < heads; h++)
            k->rope(x + ((size_t)t * heads + h) * dh, c + (size_t)t * half, s + (size_t)t * half, half, run->precision == G4_BF16);
}

static void gelu_mul(const g4_run *run, float *gate, const float *up, int T, int n, size_t stride) {
    const kernels *k = KERNELS;
#pragma omp parallel for schedule(static) num_threads(run->threads) if (worth_sharing((size_t)T * n * 32))
    for (int part = 0; part < run->threads; part++) {
        int begin = part_begin(n, part, run->threads), end = part_begin(n, part + 1, run->threads);
        for (int t = 0; t < T && begin < end; t++)
            k->gelu_mul(gate + (size_t)t * n + begin, up + t * stride + begin, end - begin, run->precision == G4_BF16);
    }
}

static void softcap(const g4_run *run, float *y, size_t n, float c) {
    const kernels *k = KERNELS;
#pragma omp parallel for schedule(static) num_threads(run->threads) if (worth_sharing(n * 32))
    for (int part = 0; part < run->threads; part++) {
        size_t begin = n / 16 * (size_t)part / (size_t)run->threads * 16;
        size_t end = part + 1 == run->threads ? n : n / 16 * (size_t)(part + 1) / (size_t)run->threads * 16;
        k->softcap(y + begin, end - begin, c, run->precision == G4_BF16);
    }
}

/* Attention. A group is the heads of one row that share a K/V head: they are computed together, and K and V are read once for them. */
typedef struct group {
    int seq, first, n;  /* it sees the keys at positions first .. first + n - 1 */
    int g, heads;
    size_t q;           /* its place in q and o */
} group;

static group find_group(const g4_attention_args *a, int number) {
    int G = a->kv->G, heads = a->H / G, t = number / G, g = number % G, pos = a->rows->pos[t];
    group b = {.seq = a->rows->seq[t], .first = MAX(0, pos - a->kv->window + 1), .g = g, .heads = heads};
    b.n = pos - b.first + 1;
    b.q = ((size_t)t * a->H + (size_t)g * heads) * a->kv->dh;
    return b;
}

/* Where key number j of a group lies in k and v; *n, the number of keys wanted from there on, ends at the end of the ring. */
static size_t find_keys(const g4_kv *kv, const group *b, int j, int *n) {
    int row = (b->first + j) % kv->R;
    *n = MIN(*n, kv->R - row);
    return (((size_t)b->seq * kv->G + b->g) * kv->R + (size_t)row) * kv->dh;
}

/* score [heads][stride] of keys begin .. end - 1. The scale is 1. */
static void find_scores(const kernels *k, const g4_attention_args *a, const group *b, float *score, size_t stride, int begin, int end, int round) {
    for (int j = begin, n; j < end; j += n) {
        n = end - j;
        size_t at = find_keys(a->kv, b, j, &n), dh = (size_t)a->kv->dh;
        const product m = {.y = score + j, .y_stride = stride, .w = (const unsigned char *)(a->kv->k + at), .w_stride = sizeof(float) * dh,
                           .type = G4_TYPE_F32, .x = a->q + b->q, .x_stride = dh, .T = b->heads, .n = (int)dh, .round = round};
        k->products(&m, 0, n);
    }
}

/* Columns begin .. end - 1 of o [heads][dh] = score V, a few keys at a time, so that the cache holds them for all heads. */
static void sum_values(const kernels *k, const g4_attention_args *a, const group *b, const float *score, size_t stride, int begin, int end, int round) {
    int dh = a->kv->dh;
    float *o = a->o + b->q;
    for (int h = 0; h < b->heads; h++) memset(o + (size_t)h * dh + begin, 0, sizeof *o * (size_t)(end - begin));
    for (int j = 0, n; j < b->n; j += n) {
        n = MIN(32, b->n - j);
        size_t at = find_keys(a->kv, b, j, &n);
        k->weighted_sum(o, score + j, stride, a->kv->v + at, b->heads, dh, n, begin, end);
    }
    for (int h = 0; round && h < b->heads; h++)
        for (int i = begin; i < end; i++) o[(size_t)h * dh + i] = round_one(o[(size_t)h * dh + i]);
}

static void attention(const g4_run *run, const g4_attention_args *a) {
    enum { KEYS = 64 };
    const kernels *k = KERNELS;
    const int threads = run->threads, groups = a->rows->T * a->kv->G, dh = a->kv->dh, round = run->precision == G4_BF16;
    int longest = 1;
    for (int t = 0; t < a->rows->T; t++) longest = MAX(longest, MIN(a->rows->pos[t] + 1, a->kv->window));
    const size_t stride = (size_t)longest;
    const int share = worth_sharing((size_t)a->rows->T * a->H * longest * dh);

    if (groups >= 2 * threads || !share) { /* each thread takes whole groups */
#pragma omp parallel for schedule(static) num_threads(threads) if (share)
        for (int worker = 0; worker < threads; worker++)
            for (int i = worker; i < groups; i += threads) {
                group b = find_group(a, i);
                float *score = a->scores + (size_t)worker * a->score_rows * a->ctx;
                find_scores(k, a, &b, score, stride, 0, b.n, round);
                for (int h = 0; h < b.heads; h++) k->softmax(score + h * stride, b.n, round);
                sum_values(k, a, &b, score, stride, 0, dh, round);
            }
        return;
    }

    /* Few rows, as in decoding: all threads work on one group, first by keys, then by heads, then by columns. */
    for (int i = 0; i < groups; i++) {
        const group b = find_group(a, i);
#pragma omp parallel for schedule(static) num_threads(threads)
        for (int block = 0; block < (b.n + KEYS - 1) / KEYS; block++) find_scores(k, a, &b, a->scores, stride, block * KEYS, MIN(b.n, (block + 1) * KEYS), round);
#pragma omp parallel for schedule(static) num_threads(threads)
        for (int h = 0; h < b.heads; h++) k->softmax(a->scores + h * stride, b.n, round);
#pragma omp parallel for schedule(static) num_threads(threads)
        for (int part = 0; part < threads; part++) sum_values(k, a, &b, a->scores, stride, part_begin(dh, part, threads), part_begin(dh, part + 1, threads), round);
    }
}

/* Rows first .. first + rows - 1 of matrix e of a weight that holds one [all][cols] matrix per expert. */
static g4_tensor expert_rows(const g4_tensor *W, int e, int all, int first, int rows) {
    g4_tensor some = *W;
    some.data = (const unsigned char *)W->data + ((size_t)e * (size_t)all + (size_t)first) * g4_row_bytes(W);
    some.rows = rows;
    return some;
}

/* y += those rows that chose expert e: pair[i] is the place of the i-th in index and weight. */
static void one_expert(const g4_run *run, const g4_experts_args *a, int e, const int *pair, int n) {
    const g4_tensor *both = &a->layer->experts_gate_up_proj;
    const int D = a->D, Fe = a->Fe, apart = a->layer->experts_up_proj.data != NULL, all = apart ? Fe : 2 * Fe;
    const g4_tensor gate = expert_rows(both, e, all, 0, Fe), up = apart ? expert_rows(&a->layer->experts_up_proj, e, Fe, 0, Fe) : expert_rows(both, e, all, Fe, Fe);
    const g4_tensor gate_up = expert_rows(both, e, all, 0, all), down = expert_rows(&a->layer->experts_down_proj, e, D, 0, D);
    const float *x = a->x + (size_t)(pair[0] / a->K) * D;
    for (int i = 0; n > 1 && i < n; i++) memcpy(a->down + (size_t)i * D, a->x + (size_t)(pair[i] / a->K) * D, sizeof(float) * (size_t)D);
    if (n > 1) x = a->down; /* until the last product writes there */
    float *to = a->gate_up + (size_t)n * Fe;
    if (n == 1 && !apart) { /* both halves at once: of one row they lie one after the other */
        matmul(run, a->gate_up, &gate_up, x, 1);
    } else {
        matmul(run, a->gate_up, &gate, x, n);
        matmul(run, to, &up, x, n);
    }
    gelu_mul(run, a->gate_up, to, n, Fe, (size_t)Fe);
    matmul(run, a->down, &down, a->gate_up, n);
    for (int i = 0; i < n; i++) {
        float *y = a->y + (size_t)(pair[i] / a->K) * D, weight = a->weight[pair[i]];
        const float *from = a->down + (size_t)i * D;
        if (run->precision == G4_BF16)
            for (int j = 0; j < D; j++) y[j] = round_one(y[j] + round_one(from[j] * weight));
        else
            for (int j = 0; j < D; j++) y[j] += from[j] * weight;
    }
}

/* Expert by expert and not row by row: the weights of one are read once for up to 16 rows that chose it. Each row still adds its experts in ascending order. */
static void experts(const g4_run *run, const g4_experts_args *a) {
    enum { MOST = 16 };
    const int E = (int)(a->layer->experts_down_proj.rows / a->D), most = MIN(MOST, a->room);
    memset(a->y, 0, sizeof(float) * (size_t)a->T * (size_t)a->D);
    for (int e = 0; e < E; e++) {
        int pair[MOST], n = 0;
        for (int i = 0; i < a->T * a->K; i++) {
            if (a->index[i] == e) pair[n++] = i;
            if (n == most || (n && i == a->T * a->K - 1)) one_expert(run, a, e, pair, n), n = 0;
        }
    }
}

/* A product and a sum in one rounding would give another result here: 2^-24 in each lane instead of 0. */
static const char *unusable(void) {
    const kernels *k = KERNELS;
    float w[32], x[32], y;
    for (int i = 0; i < 16; i++) w[i] = 1, x[i] = -(1 + 0x1p-11f), w[16 + i] = x[16 + i] = 1 + 0x1p-12f;
    const product m = {.y = &y, .y_stride = 1, .w = (const unsigned char *)w, .w_stride = sizeof w, .type = G4_TYPE_F32, .x = x, .x_stride = 32, .T = 1, .n = 32};
    k->products(&m, 0, 1);
    return y == 0 ? NULL : "backend_cpu.c was compiled with a * b + c in one rounding: build it with -ffp-contract=off and without -ffast-math";
}

const g4_backend g4_backend_cpu = {
    .name = "cpu", .host_memory = 1, .unusable = unusable,
    .matmul = matmul, .norm = norm, .rope = rope, .attention = attention, .gelu_mul = gelu_mul, .experts = experts, .softcap = softcap,
};

#else /* ISA */

/* ---- Part 2: the kernels, for one instruction set -------------------------------------------------------------------------
 *
 * vec is LANES floats. half_vec is as many floats as `wide` has doubles: the elementwise functions are computed in double.
 */

#define PARTS (16 / LANES)

/* Keeps a value in its register: compilers like to load it again for each use, and then loads are what the loop waits for. */
#if LANES == 16
#define KEEP(v) __asm__("" : "+v"(v))
#elif LANES > 1 && defined(__SSE2__)
#define KEEP(v) __asm__("" : "+x"(v))
#else
#define KEEP(v) ((void)0)
#endif

#if LANES > 1
#define HALF (LANES / 2)
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float quad __attribute__((vector_size(16)));
typedef float half_vec __attribute__((vector_size(4 * HALF)));
typedef uint32_t half_uvec __attribute__((vector_size(4 * HALF)));
typedef int32_t half_mask __attribute__((vector_size(4 * HALF)));
typedef double wide __attribute__((vector_size(8 * HALF)));
typedef uint64_t wide_bits __attribute__((vector_size(8 * HALF)));
typedef int64_t wide_mask __attribute__((vector_size(8 * HALF)));
#define TO_WIDE(x) __builtin_convertvector(x, wide)
#define TO_HALF(x) __builtin_convertvector(x, half_vec)
#define BITS(type, x) ((type)(x))
#else
#define HALF 1
typedef float vec;
typedef float half_vec;
typedef uint32_t half_uvec;
typedef int half_mask;
typedef double wide;
typedef uint64_t wide_bits;
typedef int wide_mask;
#define TO_WIDE(x) ((wide)(x))
#define TO_HALF(x) ((half_vec)(x))
#define BITS(type, x) (x)
#endif

static INLINE TARGET vec load(const float *p) {
    vec x;
    memcpy(&x, p, sizeof x);
    return x;
}

static INLINE TARGET void store(float *p, vec x) { memcpy(p, &x, sizeof x); }

#if LANES > 1
static INLINE TARGET quad quad_load(const float *p) {
    quad x;
    memcpy(&x, p, sizeof x);
    return x;
}
#endif

static INLINE TARGET half_vec half_load(const float *p) {
    half_vec x;
    memcpy(&x, p, sizeof x);
    return x;
}

static INLINE TARGET void half_store(float *p, half_vec x) { memcpy(p, &x, sizeof x); }

/* ---- Elementwise: the formulas of gemma4.c, in the same order, with selections for branches --------------------------------- */

#if LANES > 1
static INLINE TARGET half_vec half_select(half_mask m, half_vec a, half_vec b) { return (half_vec)((m & (half_mask)a) | (~m & (half_mask)b)); }
static INLINE TARGET wide wide_select(wide_mask m, wide a, wide b) { return (wide)((m & (wide_mask)a) | (~m & (wide_mask)b)); }
static INLINE TARGET wide wide_abs(wide x) { return (wide)((wide_mask)x & INT64_MAX); }
#else
static INLINE half_vec half_select(half_mask m, half_vec a, half_vec b) { return m ? a : b; }
static INLINE wide wide_select(wide_mask m, wide a, wide b) { return m ? a : b; }
static INLINE wide wide_abs(wide x) { return fabs(x); }
#endif

/* g4_bf16_round */
static INLINE TARGET half_vec half_round(half_vec x) {
    half_uvec bits;
    memcpy(&bits, &x, sizeof x);
    half_uvec sum = (bits + 0x7fffu + (bits >> 16 & 1)) & 0xffff0000u;
    half_vec rounded;
    memcpy(&rounded, &sum, sizeof x);
    return half_select(BITS(half_mask, x != x), x, rounded);
}

/* exp_double for -110 <= x <= 90 */
static INLINE TARGET wide exp_wide(wide x) {
    wide shifted = x * 1.4426950408889634 + 6755399441055744.0, k = shifted - 6755399441055744.0;
    wide r = (x - k * 0x1.62e42fee00000p-1) - k * 0x1.a39ef35793c76p-33;
    wide y = r * (1.0 / 479001600) + 1.0 / 39916800;
    y = y * r + 1.0 / 3628800;
    y = y * r + 1.0 / 362880;
    y = y * r + 1.0 / 40320;
    y = y * r + 1.0 / 5040;
    y = y * r + 1.0 / 720;
    y = y * r + 1.0 / 120;
    y = y * r + 1.0 / 24;
    y = y * r + 1.0 / 6;
    y = y * r + 0.5;
    y = y * r + 1.0;
    y = y * r + 1.0;
    wide_bits bits; /* the low bits of `shifted` are k, and those above are shifted out */
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 1023) << 52;
    wide power;
    memcpy(&power, &bits, sizeof bits);
    return y * power;
}

/* g4_expf: at -110 the result rounds to 0, at 90 to infinity */
static INLINE TARGET half_vec exp_half(half_vec x) {
    const half_vec zero = {0}, low = zero - 110.0f, high = zero + 90.0f;
    half_vec inside = half_select(BITS(half_mask, x < -110.0f), low, x);
    inside = half_select(BITS(half_mask, inside > 90.0f), high, inside);
    return half_select(BITS(half_mask, x != x), x, TO_HALF(exp_wide(TO_WIDE(inside))));
}

/* g4_tanhf: from 10 on the quotient rounds to 1 */
static INLINE TARGET half_vec tanh_half(half_vec x) {
    wide d = TO_WIDE(x), t = wide_abs(d), z = t * t, zero = {0}, ten = zero + 10.0;
    wide y = exp_wide(2.0 * wide_select(BITS(wide_mask, t > 10.0), ten, t));
    wide q = (y - 1.0) / (y + 1.0), series = d - d * z * (1.0 / 3 - z * (2.0 / 15 - z * (17.0 / 315)));
    wide result = wide_select(BITS(wide_mask, t < 0.02), series, wide_select(BITS(wide_mask, d > 0.0), q, -q));
    return half_select(BITS(half_mask, x != x), x, TO_HALF(result));
}

/* g4_gelu_tanh */
static INLINE TARGET half_vec gelu_half(half_vec x) {
    half_vec inner = 0.7978845608f * (x + 0.044715f * (x * x * x));
    return 0.5f * x * (1.0f + tanh_half(inner));
}

/* gate [n] = gelu_tanh(gate) * up */
static TARGET void gelu_mul_row(float *gate, const float *up, int n, int round) {
    int i = 0;
    for (; i + HALF <= n; i += HALF) {
        half_vec y = gelu_half(half_load(gate + i));
        if (round) y = half_round(y);
        y = y * half_load(up + i);
        if (round) y = half_round(y);
        half_store(gate + i, y);
    }
    for (; i < n; i++) {
        float y = g4_gelu_tanh(gate[i]);
        gate[i] = round ? round_one(round_one(y) * up[i]) : y * up[i];
    }
}

static TARGET void softcap_row(float *y, size_t n, float c, int round) {
    size_t i = 0;
    for (; i + HALF <= n; i += HALF) {
        half_vec x = half_load(y + i) / c;
        if (round) x = half_round(x);
        x = tanh_half(x);
        if (round) x = half_round(x);
        x = x * c;
        if (round) x = half_round(x);
        half_store(y + i, x);
    }
    for (; i < n; i++) y[i] = round ? round_one(round_one(g4_tanhf(round_one(y[i] / c))) * c) : g4_tanhf(y[i] / c) * c;
}

/* s [n] = exp(s - max) */
static TARGET void exp_row(float *s, int n, float max) {
    int i = 0;
    for (; i + HALF <= n; i += HALF) half_store(s + i, exp_half(half_load(s + i) - max));
    for (; i < n; i++) s[i] = g4_expf(s[i] - max);
}

/* lane [16] added pairwise: 8, 4, 2, 1 */
static INLINE TARGET float add_lanes(const float *lane) {
    float s[8];
    for (int j = 0; j < 8; j++) s[j] = lane[j] + lane[j + 8];
    for (int j = 0; j < 4; j++) s[j] += s[j + 4];
    return (s[0] + s[2]) + (s[1] + s[3]);
}

/* s [n] = softmax(s) */
static TARGET void softmax_row(float *s, int n, int round) {
    float max = -INFINITY, lane[16] = {0};
    int j = 0;
    if (n >= HALF) { /* the order of a maximum does not matter */
        half_vec m = half_load(s);
        m = half_select(BITS(half_mask, m > -INFINITY), m, (half_vec){0} - INFINITY);
        for (j = HALF; j + HALF <= n; j += HALF) {
            half_vec x = half_load(s + j);
            m = half_select(BITS(half_mask, x > m), x, m);
        }
        float each[HALF];
        half_store(each, m);
        for (int i = 0; i < HALF; i++) max = each[i] > max ? each[i] : max;
    }
    for (; j < n; j++) max = s[j] > max ? s[j] : max;

    exp_row(s, n, max);
    vec sums[PARTS] = {0};
    for (j = 0; j + 16 <= n; j += 16)
        UNROLL for (int p = 0; p < PARTS; p++) sums[p] += load(s + j + p * LANES);
    for (int p = 0; p < PARTS; p++) store(lane + p * LANES, sums[p]);
    for (; j < n; j++) lane[j % 16] += s[j];
    float sum = add_lanes(lane);
    for (j = 0; j + HALF <= n; j += HALF) {
        half_vec p = half_load(s + j) / sum;
        half_store(s + j, round ? half_round(p) : p);
    }
    for (; j < n; j++) s[j] = round ? round_one(s[j] / sum) : s[j] / sum;
}

/* x [2 * half]: rotates the pairs (i, i + half) */
static TARGET void rope_row(float *x, const float *c, const float *s, int half, int round) {
    int i = 0;
    for (; i + HALF <= half; i += HALF) {
        half_vec a = half_load(x + i), b = half_load(x + half + i), ci = half_load(c + i), si = half_load(s + i);
        half_vec ac = a * ci, bs = b * si, bc = b * ci, as = a * si;
        if (round) ac = half_round(ac), bs = half_round(bs), bc = half_round(bc), as = half_round(as);
        a = ac - bs, b = bc + as;
        if (round) a = half_round(a), b = half_round(b);
        half_store(x + i, a);
        half_store(x + half + i, b);
    }
    for (; i < half; i++) {
        float a = x[i], b = x[half + i], ac = a * c[i], bs = b * s[i], bc = b * c[i], as = a * s[i];
        x[i] = round ? round_one(round_one(ac) - round_one(bs)) : ac - bs;
        x[half + i] = round ? round_one(round_one(bc) + round_one(as)) : bc + as;
    }
}

/* ---- Products --------------------------------------------------------------------------------------------------------------- */

/* w [n] = weights, widened, and rounded where loading with dtype=bfloat16 does it. Without branches, so that compilers make vectors of it. */
static TARGET void widen_row(float *w, const unsigned char *p, g4_dtype type, int round, int n) {
    if (type == G4_TYPE_BF16) {
        for (int i = 0; i < n; i++) w[i] = float_of((uint32_t)load16(p + 2 * i) << 16);
        return;
    }
    if (type == G4_TYPE_F16) {
        for (int i = 0; i < n; i++) {
            uint32_t h = load16(p + 2 * i), rest = h & 0x7fff;
            uint32_t finite = bits_of(float_of(rest << 13) * 0x1p112f); /* 112 more in the exponent; a subnormal half is a subnormal float before that */
            w[i] = float_of(finite | (rest >= 0x7c00 ? 0x7f800000u : 0) | (h & 0x8000) << 16);
        }
    } else if (type == G4_TYPE_F32) {
        for (int i = 0; i < n; i++) w[i] = float_of(load16(p + 4 * i) | (uint32_t)load16(p + 4 * i + 2) << 16);
    } else {
        g4_types[type].widen(w, p, n);
    }
    for (int i = 0; round && i < n; i++) w[i] = round_one(w[i]);
}

/* y [dim] = x / sqrt(mean(x^2) + eps) * w */
static TARGET void norm_row(float *y, const float *x, const g4_tensor *w, int dim, float eps, int round) {
    float lane[16] = {0}, weight[512];
    vec sums[PARTS] = {0};
    int i = 0;
    for (; i + 16 <= dim; i += 16)
        UNROLL for (int p = 0; p < PARTS; p++) {
            vec v = load(x + i + p * LANES);
            sums[p] += v * v;
        }
    for (int p = 0; p < PARTS; p++) store(lane + p * LANES, sums[p]);
    for (int j = 0; i + j < dim; j++) lane[j] += x[i + j] * x[i + j];
    float inverse = 1.0f / sqrtf(add_lanes(lane) / (float)dim + eps);
    for (int first = 0; first < dim; first += 512) {
        int m = MIN(512, dim - first);
        if (w) widen_row(weight, (const unsigned char *)w->data + (size_t)first * (w->type == G4_TYPE_F32 ? 4 : 2), w->type, round, m);
        const float *in = x + first;
        float *out = y + first;
        int j = 0;
        for (; j + HALF <= m; j += HALF) {
            half_vec v = half_load(in + j) * inverse;
            if (w) v = v * half_load(weight + j);
            half_store(out + j, round ? half_round(v) : v);
        }
        for (; j < m; j++) {
            float v = w ? in[j] * inverse * weight[j] : in[j] * inverse;
            out[j] = round ? round_one(v) : v;
        }
    }
}

/* Vector number `part` of the 16 weights at p. A bfloat16 is the upper half of a float. */
static INLINE TARGET vec load_weights(int kind, const unsigned char *p, int part) {
    if (kind == HOST_FLOATS) {
        vec w;
        memcpy(&w, p + part * sizeof w, sizeof w);
        return w;
    }
    p += 2 * LANES * part;
#if LANES == 16
    const __m512i halves = _mm512_set_epi32(0xf0000, 0xe0000, 0xd0000, 0xc0000, 0xb0000, 0xa0000, 0x90000, 0x80000, 0x70000, 0x60000, 0x50000, 0x40000, 0x30000, 0x20000, 0x10000, 0);
    return (vec)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, halves, _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)p)));
#elif LANES == 8
    return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16); /* a shuffle's mask would be a register too many */
#elif LANES == 4
    typedef uint16_t eight __attribute__((vector_size(16)));
    typedef uint64_t two __attribute__((vector_size(16)));
    uint64_t four;
    memcpy(&four, p, sizeof four);
    const eight zero = {0}, h = (eight)(two){four, 0};
#ifdef __clang__
    return (vec)__builtin_shufflevector(zero, h, 0, 8, 1, 9, 2, 10, 3, 11);
#else
    return (vec)__builtin_shuffle(zero, h, (eight){0, 8, 1, 9, 2, 10, 3, 11});
#endif
#else
    return float_of((uint32_t)load16(p) << 16);
#endif
}

/* a [R][N] += 16 elements. R, N and kind are constants wherever this is inlined. */
static INLINE TARGET void step(int R, int N, int kind, vec a[4][TOKENS][PARTS], const unsigned char *w, size_t w_stride, const float *x, size_t x_stride) {
    UNROLL for (int p = 0; p < PARTS; p++) {
        vec b[4];
        UNROLL for (int r = 0; r < R; r++) b[r] = load_weights(kind, w + r * w_stride, p);
        UNROLL for (int t = 0; t < N; t++) {
            vec v = load(x + t * x_stride + p * LANES);
            KEEP(v);
            UNROLL for (int r = 0; r < R; r++) a[r][t][p] += b[r] * v;
        }
    }
}

/* lanes [R][TOKENS][16], which begin with 0 if `fresh`, += R rows of weights by N tokens, n elements of each. */
static INLINE TARGET void tile(int R, int N, int kind, int fresh, float *lanes, const unsigned char *w, size_t w_stride, const float *x, size_t x_stride, int n) {
    const size_t size = kind == HOST_FLOATS ? 4 : 2;
    vec a[4][TOKENS][PARTS];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int t = 0; t < N; t++)
            UNROLL for (int p = 0; p < PARTS; p++) a[r][t][p] = (vec){0};
    if (!fresh)
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int t = 0; t < N; t++)
                UNROLL for (int p = 0; p < PARTS; p++) a[r][t][p] = load(lanes + (r * TOKENS + t) * 16 + p * LANES);
    int i = 0;
    for (; i + 16 <= n; i += 16) {
        UNROLL for (int r = 0; r < R; r++) PREFETCH(w + r * w_stride + i * size + 512);
        step(R, N, kind, a, w + i * size, w_stride, x + i, x_stride);
    }
    if (i < n) { /* zeros fill the step up: a lane is never -0, so adding 0 leaves it alone */
        unsigned char w_end[4 * 64] = {0};
        float x_end[TOKENS * 16] = {0};
        for (int r = 0; r < R; r++) memcpy(w_end + r * 64, w + r * w_stride + i * size, (size_t)(n - i) * size);
        for (int t = 0; t < N; t++) memcpy(x_end + t * 16, x + t * x_stride + i, sizeof(float) * (size_t)(n - i));
        step(R, N, kind, a, w_end, 64, x_end, 16);
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int t = 0; t < N; t++)
            UNROLL for (int p = 0; p < PARTS; p++) store(lanes + (r * TOKENS + t) * 16 + p * LANES, a[r][t][p]);
}

/* The same for R = 1 or ROWS and N up to TOKENS. */
static INLINE TARGET void tile_any(int R, int N, int kind, int fresh, float *lanes, const unsigned char *w, size_t w_stride, const float *x, size_t x_stride, int n) {
    switch (N) {
    case 1: tile(R, 1, kind, fresh, lanes, w, w_stride, x, x_stride, n); break;
    case 2: tile(R, 2, kind, fresh, lanes, w, w_stride, x, x_stride, n); break;
#if TOKENS > 2
    case 3: tile(R, 3, kind, fresh, lanes, w, w_stride, x, x_stride, n); break;
#endif
#if TOKENS > 3
    case 4: tile(R, 4, kind, fresh, lanes, w, w_stride, x, x_stride, n); break;
    case 5: tile(R, 5, kind, fresh, lanes, w, w_stride, x, x_stride, n); break;
    case 6: tile(R, 6, kind, fresh, lanes, w, w_stride, x, x_stride, n); break;
#endif
    }
}

/* y [rows] = the lanes of one token, added */
static TARGET void finish(float *y, const float *lanes, int rows) {
    int r = 0;
#if LANES > 1
    for (; r + 4 <= rows; r += 4) {
        quad s[4];
        UNROLL for (int i = 0; i < 4; i++) {
            const float *lane = lanes + (r + i) * TOKENS * 16;
            s[i] = (quad_load(lane) + quad_load(lane + 8)) + (quad_load(lane + 4) + quad_load(lane + 12));
        }
        quad ab = SHUFFLE(s[0], s[1], 0, 4, 1, 5) + SHUFFLE(s[0], s[1], 2, 6, 3, 7);
        quad cd = SHUFFLE(s[2], s[3], 0, 4, 1, 5) + SHUFFLE(s[2], s[3], 2, 6, 3, 7);
        s[0] = SHUFFLE(ab, cd, 0, 1, 4, 5) + SHUFFLE(ab, cd, 2, 3, 6, 7);
        memcpy(y + r, &s[0], sizeof s[0]);
    }
#endif
    for (; r < rows; r++) y[r] = add_lanes(lanes + r * TOKENS * 16);
}

/* Rows begin .. end - 1 of a product, in panels of 16 rows. A panel meets a few tokens at a time, block by block of BLOCK elements: the tokens' block stays in
 * the nearest cache while the panel's rows pass by, the panel stays in the next one until all tokens have met it, and memory is read once. */
static TARGET void product_rows(const product *m, int begin, int end) {
    enum { BLOCK = 1024 };
    float lanes[16 * TOKENS * 16], w[4 * BLOCK];
    const int groups = (m->T + TOKENS - 1) / TOKENS, kind = m->widen || m->type == G4_TYPE_F32 ? HOST_FLOATS : LITTLE_BF16;
    const int block = groups > 1 || m->widen ? BLOCK : MAX(m->n, 1);
    for (int o = begin; o < end; o += 16) {
        const int rows = MIN(16, end - o);
        for (int g = 0; g < groups; g++) {
            const int t = (int)((int64_t)m->T * g / groups), N = (int)((int64_t)m->T * (g + 1) / groups) - t;
            for (int i = 0; i < m->n; i += block) {
                const int n = MIN(block, m->n - i);
                const float *x = m->x + (size_t)t * m->x_stride + i;
                for (int r = 0, R; r < rows; r += R) {
                    R = N == 1 ? (m->n > 4096 && rows - r >= 4 ? 4 : 1) : rows - r >= ROWS ? ROWS : 1;
                    float *to = lanes + r * TOKENS * 16;
                    const unsigned char *from = m->w + (size_t)(o + r) * m->w_stride + (size_t)(i / g4_types[m->type].block) * (size_t)g4_types[m->type].bytes;
                    size_t stride = m->w_stride;
                    if (m->widen) {
                        for (int j = 0; j < R; j++) widen_row(w + j * BLOCK, from + j * m->w_stride, m->type, m->round, n);
                        from = (const unsigned char *)w, stride = sizeof(float) * BLOCK;
                    }
                    if (kind == HOST_FLOATS) {
                        if (R == 1) tile_any(1, N, HOST_FLOATS, i == 0, to, from, stride, x, m->x_stride, n);
                        else if (N == 1) tile(4, 1, HOST_FLOATS, i == 0, to, from, stride, x, m->x_stride, n);
                        else tile_any(ROWS, N, HOST_FLOATS, i == 0, to, from, stride, x, m->x_stride, n);
                    } else {
                        if (R == 1) tile_any(1, N, LITTLE_BF16, i == 0, to, from, stride, x, m->x_stride, n);
                        else if (N == 1) tile(4, 1, LITTLE_BF16, i == 0, to, from, stride, x, m->x_stride, n);
                        else tile_any(ROWS, N, LITTLE_BF16, i == 0, to, from, stride, x, m->x_stride, n);
                    }
                }
            }
            for (int j = 0; j < N; j++) {
                float *y = m->y + (size_t)(t + j) * m->y_stride + o;
                finish(y, lanes + j * 16, rows);
                for (int r = 0; m->round && r < rows; r++) y[r] = round_one(y[r]);
            }
        }
    }
}

/* ---- The sum over V --------------------------------------------------------------------------------------------------------- */

/* o [heads][dh] += p [heads][n] v [n][dh] for VECTORS vectors of columns, key after key. */
static INLINE TARGET void sum_tile(int heads, int VECTORS, float *o, const float *p, size_t p_stride, const float *v, int dh, int n) {
    vec a[4][4];
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int c = 0; c < VECTORS; c++) a[h][c] = load(o + (size_t)h * dh + c * LANES);
    for (int j = 0; j < n; j++) {
        vec x[4];
        UNROLL for (int c = 0; c < VECTORS; c++) x[c] = load(v + (size_t)j * dh + c * LANES);
        UNROLL for (int h = 0; h < heads; h++) {
            float weight = p[h * p_stride + j];
            UNROLL for (int c = 0; c < VECTORS; c++) a[h][c] += weight * x[c];
        }
    }
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int c = 0; c < VECTORS; c++) store(o + (size_t)h * dh + c * LANES, a[h][c]);
}

/* o [heads][dh] += p [heads][n] v [n][dh], columns begin .. end - 1 */
static TARGET void sum_over_keys(float *o, const float *p, size_t p_stride, const float *v, int heads, int dh, int n, int begin, int end) {
    enum { VECTORS = LANES == 16 ? 4 : 2 };
    for (int h = 0, some; h < heads; h += some) {
        some = heads - h >= 4 ? 4 : heads - h >= 2 ? 2 : 1;
        float *oh = o + (size_t)h * dh;
        const float *ph = p + h * p_stride;
        int c = begin;
        for (; c + VECTORS * LANES <= end; c += VECTORS * LANES) {
            if (some == 4) sum_tile(4, VECTORS, oh + c, ph, p_stride, v + c, dh, n);
            else if (some == 2) sum_tile(2, VECTORS, oh + c, ph, p_stride, v + c, dh, n);
            else sum_tile(1, VECTORS, oh + c, ph, p_stride, v + c, dh, n);
        }
        for (; c + LANES <= end; c += LANES) {
            if (some == 4) sum_tile(4, 1, oh + c, ph, p_stride, v + c, dh, n);
            else if (some == 2) sum_tile(2, 1, oh + c, ph, p_stride, v + c, dh, n);
            else sum_tile(1, 1, oh + c, ph, p_stride, v + c, dh, n);
        }
        for (; c < end; c++)
            for (int i = 0; i < some; i++)
                for (int j = 0; j < n; j++) oh[(size_t)i * dh + c] += ph[i * p_stride + j] * v[(size_t)j * dh + c];
    }
}

static const kernels table = {.products = product_rows, .weighted_sum = sum_over_keys, .softmax = softmax_row, .gelu_mul = gelu_mul_row, .softcap = softcap_row,
                              .norm = norm_row, .rope = rope_row, .exp = exp_row};

#undef PARTS
#undef KEEP
#undef HALF
#undef TO_WIDE
#undef TO_HALF
#undef BITS

#endif
