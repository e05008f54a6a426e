/* backend_cpu.c - the fast backend for the host's own processor: the bits of the scalar backend, computed in vectors and in cache-sized blocks.
 *
 * It is not another arithmetic: every float of every operation is the one that gemma4.c computes (test/test_backend.c compares them all). The 16
 * lanes of a dot product are 16 / LANES vectors here, a product and a sum are still rounded one by one, and a thread still owns whole outputs.
 * Sums of quantised weights are integers, which any instructions may add in any order: each version takes those that its processor is best at.
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
#include <stdlib.h>
#include <string.h>
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

#if defined(__GNUC__)
#define INLINE inline __attribute__((always_inline))
#define NOINLINE __attribute__((noinline))
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif
#define IN_ORDER __asm__ volatile("") /* the compiler moves nothing across */
#define PREFETCH(p) __builtin_prefetch(p)
#define PREFETCH_2(p) __builtin_prefetch(p, 0, 2) /* into the second cache: the first can have only so many requests under way */
#if defined(__clang__)
#define SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
#define SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, (int32_t __attribute__((vector_size(16)))){i, j, k, l})
#endif
#else
#define INLINE inline
#define NOINLINE
#define UNROLL
#define IN_ORDER
#define PREFETCH(p) ((void)(p))
#define PREFETCH_2(p) ((void)(p))
#endif

/* How the weights of a product lie in memory. */
enum { HOST_FLOATS, LITTLE_BF16, LITTLE_F16 };

/* y = W x for some rows of W and all tokens. The element for row o and token t goes to y[t * y_stride + o]. */
typedef struct product {
    float *y;
    size_t y_stride;          /* in floats */
    const unsigned char *w;   /* [rows][n] */
    size_t w_stride;          /* in bytes */
    g4_dtype type;
    int widen;                /* the weights are neither HOST_FLOATS nor LITTLE_BF16: they are widened block by block, unless a version knows better */
    const float *x;           /* [T][n] */
    size_t x_stride;          /* in floats */
    int T, n;
    int q16;                  /* quantised weights meet activations of 16 bits */
    int round;                /* results, and weights that are not bfloat16 already, are rounded to bfloat16 */
} product;

/* For products of MANY tokens or more: PANEL rows of BLOCK weights, widened, stay in the second cache while up to MOST tokens meet them, and the lanes of all these
 * wait there for the next BLOCK. Both weights and x are copied in the order in which they are used: what lies a power of two apart falls into the same few
 * lines of the nearest cache. */
enum { MANY = 24, PANEL = 16, BLOCK = 512, MOST = 132, WORK = PANEL * BLOCK + MOST * PANEL * 16 };

/* In floats: the integers of a token, 19 numbers for 16 activations at most, rows being filled up to 512. Quantised rows of fewer than kernels.many tokens are
 * taken apart one by one and meet all tokens; for more tokens 16 of them are, lane by lane, for up to MOST tokens. */
static INLINE size_t integer_tokens(int cols) { return ((size_t)cols + 511) / 512 * 608; }

typedef struct kernels {
    void (*products)(const product *m, int begin, int end);
    void (*pack)(const product *m, float *packed, int worker, int workers);
    void (*packed_products)(const product *m, const float *packed, float *work, int begin, int end);
    void (*integers_of)(const product *m, const float *x, float *memory);
    void (*integer_products)(const product *m, float *memory, int begin, int end);
    void (*pack_as_integers)(const product *m, float *to, float *temporary, int worker, int workers);
    void (*packed_integer_products)(const product *m, const float *packed, float *work, int begin, int end);
    int weight_bytes; /* of a quantised weight, packed */
    int many;         /* so many tokens are worth packing integers for */
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

/* A row of packed floats is a whole number of steps of 16. */
static INLINE size_t whole_steps(int n) { return ((size_t)n + 15) / 16 * 16; }

static INLINE int host_is_little(void) {
    const uint16_t one = 1;
    return *(const unsigned char *)&one;
}

/* g4_bf16_round, to be inlined. */
static INLINE float round_one(float x) {
    uint32_t bits = bits_of(x), sum = (bits + 0x7fffu + (bits >> 16 & 1)) & 0xffff0000u;
    return float_of((bits & 0x7fffffffu) > 0x7f800000u ? bits : sum);
}

/* Exact, without branches and without arithmetic on subnormal numbers, which is slow on some processors: a subnormal half is
 * (1 + its bits) 2^-14 - 2^-14. */
static INLINE float float_of_half(uint32_t h) {
    uint32_t rest = h & 0x7fff, bits = (rest << 13) + (112u << 23), small = bits_of(float_of(bits + (1u << 23)) - 0x1p-14f);
    bits = rest < 0x0400 ? small : bits;
    bits |= rest >= 0x7c00 ? 0x7f800000u : 0;
    return float_of(bits | (h & 0x8000) << 16);
}

/* Compilers and processors whose vectors are known to be IEEE. */
#if defined(__GNUC__) && (defined(__SSE2__) || defined(__aarch64__) || defined(__wasm_simd128__) || defined(__riscv_vector)) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define HAVE_VECTORS
#endif

/* What the kernels know of a quantised type; the first four are g4_types' too, but here the compiler sees them. */
typedef struct format {
    int block, bytes, group, mins;
    int offset;        /* weights are multiplied as integers from 0 on: those of quants.c plus this */
    int first, stride; /* where integers are nibbles: bytes before those of the first 32 weights, and from there to the next */
    uint8_t level[16]; /* what nibbles stand for, offset included */
} format;

#define FROM_0 {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#define IQ4 {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241}
static const format formats[G4_N_TYPES] = {
    [G4_TYPE_Q4_0] = {32, 18, 32, 0, 8, 2, 18, FROM_0},
    [G4_TYPE_Q4_1] = {32, 20, 32, 1, 0, 4, 20, FROM_0},
    [G4_TYPE_Q5_0] = {32, 22, 32, 0, 16, 0, 0, {0}},
    [G4_TYPE_Q5_1] = {32, 24, 32, 1, 0, 0, 0, {0}},
    [G4_TYPE_Q8_0] = {32, 34, 32, 0, 128, 0, 0, {0}},
    [G4_TYPE_Q2_K] = {256, 84, 16, 1, 0, 0, 0, {0}},
    [G4_TYPE_Q3_K] = {256, 110, 16, 0, 4, 0, 0, {0}},
    [G4_TYPE_Q4_K] = {256, 144, 32, 1, 0, 0, 0, {0}},
    [G4_TYPE_Q5_K] = {256, 176, 32, 1, 0, 0, 0, {0}},
    [G4_TYPE_Q6_K] = {256, 210, 16, 0, 32, 0, 0, {0}},
    [G4_TYPE_IQ4_NL] = {32, 18, 32, 0, 128, 2, 18, IQ4},
    [G4_TYPE_IQ4_XS] = {256, 136, 32, 0, 128, 8, 16, IQ4},
    [G4_TYPE_MXFP4] = {32, 17, 32, 0, 12, 1, 17, {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0}},
};

/* 16 groups of a row, a step: 512 or 256 weights. */
typedef struct taken {
    float scale[16], min[16];
    uint8_t q[512];
} taken;

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
#define exp_wide VERSION(exp_wide, ISA)
#define exp_half VERSION(exp_half, ISA)
#define tanh_half VERSION(tanh_half, ISA)
#define gelu_half VERSION(gelu_half, ISA)
#define load_weights VERSION(load_weights, ISA)
#define step VERSION(step, ISA)
#define tile VERSION(tile, ISA)
#define tile_of VERSION(tile_of, ISA)
#define rows_of VERSION(rows_of, ISA)
#define groups_of VERSION(groups_of, ISA)
#define fetch VERSION(fetch, ISA)
#define widen_row VERSION(widen_row, ISA)
#define add_lanes VERSION(add_lanes, ISA)
#define finish VERSION(finish, ISA)
#define byte_vec VERSION(byte_vec, ISA)
#define short_vec VERSION(short_vec, ISA)
#define load_bytes VERSION(load_bytes, ISA)
#define store_bytes VERSION(store_bytes, ISA)
#define shift_left VERSION(shift_left, ISA)
#define shift_right VERSION(shift_right, ISA)
#define masked_or VERSION(masked_or, ISA)
#define split VERSION(split, ISA)
#define half_at VERSION(half_at, ISA)
#define halves_at VERSION(halves_at, ISA)
#define bytes32 VERSION(bytes32, ISA)
#define where VERSION(where, ISA)
#define or32 VERSION(or32, ISA)
#define store32 VERSION(store32, ISA)
#define scale_eight VERSION(scale_eight, ISA)
#define scales_q4_k VERSION(scales_q4_k, ISA)
#define minus_32 VERSION(minus_32, ISA)
#define scales_q3_k VERSION(scales_q3_k, ISA)
#define scales_iq4_xs VERSION(scales_iq4_xs, ISA)
#define twice VERSION(twice, ISA)
#define shifted VERSION(shifted, ISA)
#define masked_or64 VERSION(masked_or64, ISA)
#define nibbles64 VERSION(nibbles64, ISA)
#define weights64 VERSION(weights64, ISA)
#define halves16 VERSION(halves16, ISA)
#define scale16 VERSION(scale16, ISA)
#define take_whole_step VERSION(take_whole_step, ISA)
#define multiplied VERSION(multiplied, ISA)
#define take VERSION(take, ISA)
#define take_functions VERSION(take_functions, ISA)
#define multiply VERSION(multiply, ISA)
#define multiply_by VERSION(multiply_by, ISA)
#define one_token VERSION(one_token, ISA)
#define add_groups VERSION(add_groups, ISA)
#define take_apart VERSION(take_apart, ISA)
#define take_step VERSION(take_step, ISA)
#define digit VERSION(digit, ISA)
#define integers VERSION(integers, ISA)
#define groups_in VERSION(groups_in, ISA)
#define integers_size VERSION(integers_size, ISA)
#define integers_at VERSION(integers_at, ISA)
#define make_integers VERSION(make_integers, ISA)
#define make_integers_of VERSION(make_integers_of, ISA)
#define digits_of VERSION(digits_of, ISA)
#define digits_vec VERSION(digits_vec, ISA)
#define greater VERSION(greater, ISA)
#define ints VERSION(ints, ISA)
#define uints VERSION(uints, ISA)
#define load_uints VERSION(load_uints, ISA)
#define dot VERSION(dot, ISA)
#define load_ints VERSION(load_ints, ISA)
#define group_sums VERSION(group_sums, ISA)
#define integer_rows VERSION(integer_rows, ISA)
#define integer_rows_of VERSION(integer_rows_of, ISA)
#define tokens_bytes VERSION(tokens_bytes, ISA)
#define rows_bytes VERSION(rows_bytes, ISA)
#define lane_order VERSION(lane_order, ISA)
#define token_groups VERSION(token_groups, ISA)
#define pack_integers VERSION(pack_integers, ISA)
#define pack_rows VERSION(pack_rows, ISA)
#define transpose VERSION(transpose, ISA)
#define integer_tile VERSION(integer_tile, ISA)
#define packed_rows_of VERSION(packed_rows_of, ISA)
#define packed_integer_rows VERSION(packed_integer_rows, ISA)
#define product_widened VERSION(product_widened, ISA)
#define product_rows VERSION(product_rows, ISA)
#define pack_tokens VERSION(pack_tokens, ISA)
#define pack_weights VERSION(pack_weights, ISA)
#define packed_tile VERSION(packed_tile, ISA)
#define packed_rows VERSION(packed_rows, ISA)
#define sum_tile VERSION(sum_tile, ISA)
#define sum_over_keys VERSION(sum_over_keys, ISA)
#define softmax_row VERSION(softmax_row, ISA)
#define gelu_mul_row VERSION(gelu_mul_row, ISA)
#define softcap_row VERSION(softcap_row, ISA)
#define norm_row VERSION(norm_row, ISA)
#define rope_row VERSION(rope_row, ISA)
#define exp_row VERSION(exp_row, ISA)
#define table VERSION(table, ISA)

/* The instruction sets. Sums of quantised weights take NEIGHBOURS weights in a lane, by activations of DIGITS digits. LANES floats are one vector; a tile is ROWS rows by up to GROUP tokens, or FEWER_ROWS by up to TOKENS, as many as the registers hold. ARMv7 is missing on purpose:
 * its vectors flush subnormals. So are gcc's AVX versions for Windows: gcc aligns the stack there to 16 bytes only and crashes when it spills a vector. */
#if defined(__GNUC__) && defined(__x86_64__) && !(defined(_WIN32) && !defined(__clang__))
#define HAVE_AVX
#include <immintrin.h>

#define ISA avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma,f16c")))
#define LANES 16
#define ROWS 4
#define GROUP 6
#define FEWER_ROWS 3
#define TOKENS 8
#define ROW_TOKENS 8
#define DIGITS 3
#define NEIGHBOURS 4
#include "backend_cpu.c"
#undef ISA
#undef TARGET
#undef LANES
#undef ROWS
#undef GROUP
#undef FEWER_ROWS
#undef TOKENS
#undef ROW_TOKENS
#undef DIGITS
#undef NEIGHBOURS

#define ISA avx2
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define LANES 8
#define ROWS 2
#define GROUP 3
#define FEWER_ROWS 2
#define TOKENS 3
#define ROW_TOKENS 4
#define DIGITS 2
#define NEIGHBOURS 2
#include "backend_cpu.c"
#undef ISA
#undef TARGET
#undef LANES
#undef ROWS
#undef GROUP
#undef FEWER_ROWS
#undef TOKENS
#undef ROW_TOKENS
#undef DIGITS
#undef NEIGHBOURS
#endif

#define ISA base
#define ROW_TOKENS 4
#define DIGITS 1
#define NEIGHBOURS 1
#define TARGET
#ifdef HAVE_VECTORS
#define LANES 4
#define GROUP 3
#define TOKENS 3
#if defined(__aarch64__) || defined(__riscv_vector) /* 32 registers */
#define ROWS 2
#else
#define ROWS 1
#endif
#else
#define LANES 1
#define ROWS 1
#define GROUP 2
#define TOKENS 2
#endif
#define FEWER_ROWS ROWS
#include "backend_cpu.c"

/* ---- Part 3: the operations --------------------------------------------------------------------------------------------- */

static const kernels *choose_kernels(void) {
#ifdef HAVE_AVX
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni"))
        return &table_avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &table_avx2;
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

/* What a thread needs to multiply packed integers: sums that wait, 16 rows with their scales and minimums, or one token. */
static size_t integer_work(const kernels *k, int cols) { return MOST * 64 + ((size_t)cols + 511) / 512 * 512 * (4 * (size_t)k->weight_bytes + 2) + integer_tokens(cols); }

static size_t scratch(int T, int cols, int threads) {
    const uint64_t tokens = (uint64_t)MIN(T, MOST);
    const uint64_t floats = T >= MANY ? (uint64_t)MOST * whole_steps(cols) + (uint64_t)threads * WORK : 0;
    const uint64_t by_integers = tokens * integer_tokens(cols) + (T >= KERNELS->many ? (uint64_t)threads * integer_work(KERNELS, cols) : 0);
    return (size_t)MAX(floats, by_integers) == MAX(floats, by_integers) ? (size_t)MAX(floats, by_integers) : SIZE_MAX;
}

/* Quantised weights: rows are multiplied as integers. */
static void matmul_integers(const g4_run *run, const product *all, int rows) {
    const kernels *k = KERNELS;
    const size_t size = integer_tokens(all->n), work_size = integer_work(k, all->n);
    for (int round = 0, rounds = (all->T + MOST - 1) / MOST; round < rounds; round++) {
        const int first = (int)((int64_t)all->T * round / rounds);
        product some = *all, *m = &some;
        m->x += (size_t)first * m->x_stride, m->y += (size_t)first * m->y_stride, m->T = (int)((int64_t)all->T * (round + 1) / rounds) - first;
        const int packed = m->T >= k->many;
        float *work = run->scratch + (size_t)m->T * size;
        const int share = worth_sharing((size_t)rows * (size_t)m->n * (size_t)m->T);
        (void)share; /* without OpenMP */
        if (packed) {
#pragma omp parallel for schedule(static) num_threads(run->threads) if (share)
            for (int part = 0; part < run->threads; part++) k->pack_as_integers(m, run->scratch, work + (size_t)part * work_size, part, run->threads);
        } else {
            for (int t = 0; t < m->T; t++) k->integers_of(m, m->x + (size_t)t * m->x_stride, run->scratch + (size_t)t * size);
        }
#pragma omp parallel for schedule(static) num_threads(run->threads) if (share)
        for (int part = 0; part < run->threads; part++) {
            double begin = g4_part_begins(run);
            const int from = part_begin(rows, part, run->threads), to = part_begin(rows, part + 1, run->threads);
            if (packed) k->packed_integer_products(m, run->scratch, work + (size_t)part * work_size, from, to);
            else k->integer_products(m, run->scratch, from, to);
            g4_part_ends(run, part, begin);
        }
    }
}

static void matmul(const g4_run *run, float *y, const g4_tensor *W, const float *x, int T) {
    const kernels *k = KERNELS;
    int rows = (int)W->rows, cols = (int)W->cols, bf16 = run->precision == G4_BF16;
    const product m = {.y = y, .y_stride = (size_t)rows, .w = W->data, .w_stride = g4_row_bytes(W), .type = W->type,
                       .widen = W->type != G4_TYPE_BF16 && (W->type != G4_TYPE_F32 || bf16 || !host_is_little()),
                       .x = x, .x_stride = (size_t)cols, .T = T, .n = cols, .round = bf16, .q16 = run->precision == G4_Q16};
    if (W->type > G4_TYPE_BF16 && !bf16) {
        if (run->scratch) matmul_integers(run, &m, rows);
        else g4_backend_scalar.matmul(run, y, W, x, T);
        return;
    }
    if (T >= MANY && run->scratch) {
        float *packed = run->scratch, *work = packed + MOST * whole_steps(cols);
        for (int round = 0, rounds = (T + MOST - 1) / MOST; round < rounds; round++) {
            const int first = (int)((int64_t)T * round / rounds);
            product some = m;
            some.x += (size_t)first * m.x_stride, some.y += (size_t)first * m.y_stride, some.T = (int)((int64_t)T * (round + 1) / rounds) - first;
#pragma omp parallel for schedule(static) num_threads(run->threads) if (worth_sharing((size_t)rows * cols * some.T))
            for (int part = 0; part < run->threads; part++) k->pack(&some, packed, part, run->threads);
#pragma omp parallel for schedule(static) num_threads(run->threads) if (worth_sharing((size_t)rows * cols * some.T))
            for (int part = 0; part < run->threads; part++) {
                double begin = g4_part_begins(run);
                k->packed_products(&some, packed, work + (size_t)part * WORK, part_begin(rows, part, run->threads), part_begin(rows, part + 1, run->threads));
                g4_part_ends(run, part, begin);
            }
        }
        return;
    }
#pragma omp parallel for schedule(static) num_threads(run->threads) if (worth_sharing((size_t)rows * cols * T))
    for (int part = 0; part < run->threads; part++) {
        double begin = g4_part_begins(run);
        k->products(&m, part_begin(rows, part, run->threads), part_begin(rows, part + 1, run->threads));
        g4_part_ends(run, part, begin);
    }
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
        n = MIN(16, b->n - j);
        size_t at = find_keys(a->kv, b, j, &n);
        k->weighted_sum(o, score + j, stride, a->kv->v + at, b->heads, dh, n, begin, end);
    }
    for (int h = 0; round && h < b->heads; h++)
        for (int i = begin; i < end; i++) o[(size_t)h * dh + i] = round_one(o[(size_t)h * dh + i]);
}

static void attention(const g4_run *run, const g4_attention_args *a) {
    const kernels *k = KERNELS;
    const int threads = run->threads, groups = a->rows->T * a->kv->G, dh = a->kv->dh, round = run->precision == G4_BF16;
    int longest = 1;
    for (int t = 0; t < a->rows->T; t++) longest = MAX(longest, MIN(a->rows->pos[t] + 1, a->kv->window));
    const size_t stride = (size_t)longest;
    const int share = worth_sharing((size_t)a->rows->T * a->H * longest * dh);

    if (groups >= 2 * threads || !share) { /* each thread takes whole groups */
#pragma omp parallel for schedule(static) num_threads(threads) if (share)
        for (int worker = 0; worker < threads; worker++) {
            double begin = g4_part_begins(run);
            for (int i = worker; i < groups; i += threads) {
                group b = find_group(a, i);
                float *score = a->scores + (size_t)worker * a->score_rows * a->ctx;
                find_scores(k, a, &b, score, stride, 0, b.n, round);
                for (int h = 0; h < b.heads; h++) k->softmax(score + h * stride, b.n, round);
                sum_values(k, a, &b, score, stride, 0, dh, round);
            }
            g4_part_ends(run, worker, begin);
        }
        return;
    }

    /* Few rows, as in decoding: all threads work on one group, first by keys, then by heads, then by columns; each loop ends when all have finished. */
#pragma omp parallel num_threads(threads)
    for (int i = 0; i < groups; i++) {
        const group b = find_group(a, i);
#pragma omp for schedule(static)
        for (int part = 0; part < threads; part++)
            find_scores(k, a, &b, a->scores, stride, part_begin(b.n, part, threads), part_begin(b.n, part + 1, threads), round);
#pragma omp for schedule(static)
        for (int h = 0; h < b.heads; h++) k->softmax(a->scores + h * stride, b.n, round);
#pragma omp for schedule(static)
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
    enum { SOME = 16 };
    const int E = (int)(a->layer->experts_down_proj.rows / a->D), most = MIN(SOME, a->room);
    memset(a->y, 0, sizeof(float) * (size_t)a->T * (size_t)a->D);
    for (int e = 0; e < E; e++) {
        int pair[SOME], n = 0;
        for (int i = 0; i < a->T * a->K; i++) {
            if (a->index[i] == e) pair[n++] = i;
            if (n == most || (n && i == a->T * a->K - 1)) one_expert(run, a, e, pair, n), n = 0;
        }
    }
}

/* At the beginning of a cache line, which calloc does not promise: half of all loads would straddle two. The byte before it says how much was skipped. */
static void *alloc(size_t bytes) {
    unsigned char *p = bytes <= SIZE_MAX - 64 ? calloc(1, bytes + 64) : NULL;
    if (!p) return NULL;
    unsigned char skip = (unsigned char)(64 - (uintptr_t)p % 64);
    p += skip;
    p[-1] = skip;
    return p;
}

static void release(void *p) {
    unsigned char *from = p;
    if (from) free(from - from[-1]);
}

static int copy(void *dst, const void *src, size_t bytes) {
    memcpy(dst, src, bytes);
    return 0;
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
    .name = "cpu", .host_memory = 1, .unusable = unusable, .alloc = alloc, .release = release, .upload = copy, .download = copy,
    .scratch = scratch, .matmul = matmul, .norm = norm, .rope = rope, .attention = attention, .gelu_mul = gelu_mul, .experts = experts, .softcap = softcap,
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
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t uints __attribute__((vector_size(4 * LANES)));
typedef uint64_t wide_bits __attribute__((vector_size(8 * HALF)));
typedef int64_t wide_mask __attribute__((vector_size(8 * HALF)));
typedef uint8_t byte_vec __attribute__((vector_size(LANES == 4 ? 16 : 32)));
typedef uint16_t short_vec __attribute__((vector_size(LANES == 4 ? 16 : 32)));
typedef struct bytes32 {
    byte_vec part[32 / sizeof(byte_vec)];
} bytes32;
#define TO_WIDE(x) __builtin_convertvector(x, wide)
#define TO_HALF(x) __builtin_convertvector(x, half_vec)
#define TO_VEC(x) __builtin_convertvector(x, vec)
#define TO_INTS(x) __builtin_convertvector(x, ints)
#define VEC_SELECT(m, a, b) ((vec)(((m) & (ints)(a)) | (~(m) & (ints)(b))))
#define BITS(type, x) ((type)(x))
#else
#define HALF 1
typedef float vec;
typedef float half_vec;
typedef uint32_t half_uvec;
typedef int half_mask;
typedef double wide;
typedef int32_t ints;
typedef uint32_t uints;
typedef uint64_t wide_bits;
typedef int wide_mask;
#define TO_WIDE(x) ((wide)(x))
#define TO_HALF(x) ((half_vec)(x))
#define TO_VEC(x) ((vec)(x))
#define TO_INTS(x) ((ints)(x))
#define VEC_SELECT(m, a, b) ((m) ? (a) : (b))
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

/* ---- Quantised weights -------------------------------------------------------------------------------------------------------
 *
 * quants.c shows how the types lie in memory. A row is taken apart into scales, minimums and integers, one step after the other, and then the types do not
 * matter any more.
 */
#if LANES > 1

static INLINE TARGET byte_vec load_bytes(const void *p) {
    byte_vec b;
    memcpy(&b, p, sizeof b);
    return b;
}

static INLINE TARGET void store_bytes(void *p, byte_vec b) { memcpy(p, &b, sizeof b); }

/* Of each byte; processors shift no smaller numbers than 16 bits, so the caller masks what comes from the neighbour. */
static INLINE TARGET byte_vec shift_left(byte_vec b, int n) { return (byte_vec)((short_vec)b << n); }
static INLINE TARGET byte_vec shift_right(byte_vec b, int n) { return (byte_vec)((short_vec)b >> n); }

/* (a & mask) | b */
static INLINE TARGET byte_vec masked_or(byte_vec a, uint8_t mask, byte_vec b) {
#if LANES == 16
    return (byte_vec)_mm256_ternarylogic_epi32((__m256i)a, _mm256_set1_epi8((char)mask), (__m256i)b, 0xea);
#else
    return (a & mask) | b;
#endif
}

/* The nibbles of 16 bytes: first the low ones. */
static INLINE TARGET bytes32 split(const unsigned char *p) {
    bytes32 r;
#if LANES > 4
    __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)p));
    r.part[0] = (byte_vec)_mm256_srlv_epi64(twice, _mm256_set_epi64x(4, 4, 0, 0)) & 15;
#else
    byte_vec b = load_bytes(p);
    r.part[0] = b & 15;
    r.part[1] = shift_right(b, 4) & 15;
#endif
    return r;
}

static INLINE TARGET void store32(uint8_t *q, bytes32 r) { memcpy(q, &r, sizeof r); }

/* 32 bytes that are `value` where a bit is set */
static INLINE TARGET bytes32 where(uint32_t bits, uint8_t value) {
    bytes32 r;
#if LANES == 16
    r.part[0] = (byte_vec)_mm256_maskz_set1_epi8(bits, (char)value);
#elif LANES == 8
    const __m256i own_byte = _mm256_set_epi64x(0x0303030303030303, 0x0202020202020202, 0x0101010101010101, 0), own_bit = _mm256_set1_epi64x((int64_t)0x8040201008040201);
    __m256i mine = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32((int)bits), own_byte), own_bit);
    r.part[0] = (byte_vec)_mm256_cmpeq_epi8(mine, own_bit) & value;
#else
    typedef uint64_t two __attribute__((vector_size(16)));
    const uint64_t ones = 0x0101010101010101, own_bit = 0x8040201008040201;
    for (int i = 0; i < 2; i++, bits >>= 16) { /* a byte of `mine` is its bit or 0; adding 127 carries any bit to the highest */
        two mine = {(bits & 255) * ones & own_bit, (bits >> 8 & 255) * ones & own_bit};
        r.part[i] = (byte_vec)(((mine + 0x7f * ones) >> 7 & ones) * value);
    }
#endif
    return r;
}

static INLINE TARGET bytes32 or32(bytes32 a, bytes32 b) {
    UNROLL for (int i = 0; i < (int)(32 / sizeof(byte_vec)); i++) a.part[i] |= b.part[i];
    return a;
}

/* to [8] = factor * the signed bytes of q */
static INLINE TARGET void scale_eight(float *to, uint64_t q, float factor) {
#if LANES > 4
    _mm256_storeu_ps(to, _mm256_mul_ps(_mm256_set1_ps(factor), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128((int64_t)q)))));
#else
    for (int i = 0; i < 8; i++) to[i] = factor * (float)(int8_t)(q >> 8 * i & 255);
#endif
}

static INLINE TARGET float half_at(const unsigned char *p) {
#if LANES > 4
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(load16(p))));
#else
    return float_of_half(load16(p));
#endif
}

/* to [8] = factor times n <= 8 halves, `stride` bytes apart; 0 for those that are missing */
static INLINE TARGET void halves_at(float *to, const unsigned char *p, int stride, int n, float factor) {
#if LANES > 4
    if (n == 8) {
        uint64_t four[2] = {0};
        UNROLL for (int i = 0; i < 8; i++) four[i / 4] |= (uint64_t)load16(p + i * stride) << 16 * (i % 4);
        __asm__("" : "+r"(four[0]), "+r"(four[1])); /* gcc would do this with vectors, which are busy */
        __m256 eight = _mm256_cvtph_ps(_mm_set_epi64x((int64_t)four[1], (int64_t)four[0]));
        _mm256_storeu_ps(to, factor == 1 ? eight : _mm256_mul_ps(eight, _mm256_set1_ps(factor)));
        return;
    }
#endif
    for (int i = 0; i < 8; i++) to[i] = i < n ? factor * half_at(p + i * stride) : 0;
}

/* s [2]: 8 scales and 8 minimums of a Q4_K or Q5_K, of 6 bits each, in bytes */
static INLINE TARGET void scales_q4_k(uint64_t *s, const unsigned char *p) {
    uint64_t low, high, end; /* first 4 bytes for scales, then 4 for minimums */
    uint32_t c;
    memcpy(&low, p, sizeof low);
    memcpy(&c, p + 8, sizeof c);
    end = (c | (uint64_t)c << 28) & 0x0f0f0f0f0f0f0f0f;
    high = end | (low >> 6 & 0x0303030303030303) << 4;
    low &= 0x3f3f3f3f3f3f3f3f;
    s[0] = (low & 0xffffffff) | high << 32, s[1] = low >> 32 | (high & 0xffffffff00000000);
}

/* 32 less than each byte, which is below 64 */
static INLINE TARGET uint64_t minus_32(uint64_t b) { return ((b | 0x8080808080808080) - 0x2020202020202020) ^ 0x8080808080808080; }

/* s [2]: the 16 scales of a Q3_K, in bytes */
static INLINE TARGET void scales_q3_k(uint64_t *s, const unsigned char *p) {
    uint64_t low;
    uint32_t end;
    memcpy(&low, p, sizeof low);
    memcpy(&end, p + 8, sizeof end);
    s[0] = minus_32((low & 0x0f0f0f0f0f0f0f0f) | ((end | (uint64_t)end << 30) & 0x0303030303030303) << 4);
    s[1] = minus_32((low >> 4 & 0x0f0f0f0f0f0f0f0f) | ((end >> 4 | (uint64_t)end << 26) & 0x0303030303030303) << 4);
}

/* The 8 scales of an IQ4_XS, in bytes: 4 bits and 2 bits are spread out */
static INLINE TARGET uint64_t scales_iq4_xs(const unsigned char *p) {
    uint32_t l;
    memcpy(&l, p + 4, sizeof l);
    uint64_t low = l, high = load16(p + 2);
    low = (low | low << 16) & 0x0000ffff0000ffff, low = (low | low << 8) & 0x00ff00ff00ff00ff, low = (low | low << 4) & 0x0f0f0f0f0f0f0f0f;
    high = (high | high << 24) & 0x000000ff000000ff, high = (high | high << 12) & 0x000f000f000f000f, high = (high | high << 6) & 0x0303030303030303;
    return minus_32(low | high << 4);
}

/* Half number `half` of a step, or all of it where 256 weights are a step: n <= 256 weights at p, whole blocks; missing ones are zeros. */
static INLINE TARGET void take_apart(taken *to, int half, g4_dtype type, const unsigned char *p, int n) {
    enum { STEP = sizeof(byte_vec) };
    const int runs = n / 32;
    float *scale = to->scale + 8 * half, *min = to->min + 8 * half;
    uint8_t *q = to->q + 256 * half;
    uint64_t six_bits[2];
    if (n < 256) memset(q, 0, 256);
    switch (type) {
    case G4_TYPE_Q4_0: case G4_TYPE_IQ4_NL:
        halves_at(scale, p, 18, runs, 1);
        break;
    case G4_TYPE_Q8_0:
        halves_at(scale, p, 34, runs, 1);
        for (int k = 0; k < runs; k++, p += 34, q += 32)
            UNROLL for (int i = 0; i < 32; i += STEP) store_bytes(q + i, load_bytes(p + 2 + i) ^ 128);
        break;
    case G4_TYPE_Q4_1:
        halves_at(scale, p, 20, runs, 1);
        halves_at(min, p + 2, 20, runs, -1);
        break;
    case G4_TYPE_MXFP4:
        for (int k = 0; k < 8; k++) {
            uint32_t e = k < runs ? p[17 * k] : 0, bits = (e - 1) << 23;
            scale[k] = k < runs ? float_of(e < 2 ? 0x00200000u << e : bits) : 0; /* 2^(e - 128) */
        }
        break;
    case G4_TYPE_Q5_0:
        halves_at(scale, p, 22, runs, 1);
        for (int k = 0; k < runs; k++, p += 22, q += 32) store32(q, or32(split(p + 6), where(load16(p + 2) | (uint32_t)load16(p + 4) << 16, 16)));
        break;
    case G4_TYPE_Q5_1:
        halves_at(scale, p, 24, runs, 1);
        halves_at(min, p + 2, 24, runs, -1);
        for (int k = 0; k < runs; k++, p += 24, q += 32) store32(q, or32(split(p + 8), where(load16(p + 4) | (uint32_t)load16(p + 6) << 16, 16)));
        break;
    case G4_TYPE_Q2_K: {
        uint64_t four[4]; /* scales and minimums of 4 bits, 8 bytes of each */
        store32((uint8_t *)four, split(p));
        for (int k = 0; k < 2; k++) {
            scale_eight(scale + 8 * k, four[k], half_at(p + 80));
            scale_eight(min + 8 * k, four[2 + k], half_at(p + 82));
        }
        for (int i = 0; i < 64; i += STEP) {
            byte_vec b = load_bytes(p + 16 + i);
            UNROLL for (int k = 0; k < 4; k++) store_bytes(q + i / 32 * 128 + i % 32 + 32 * k, shift_right(b, 2 * k) & 3);
        }
        break;
    }
    case G4_TYPE_Q3_K: {
        uint64_t s[2];
        scales_q3_k(s, p + 96);
        for (int k = 0; k < 2; k++) scale_eight(scale + 8 * k, s[k], half_at(p + 108));
        for (int i = 0; i < 32; i += STEP) {
            byte_vec h = load_bytes(p + i), two[2] = {load_bytes(p + 32 + i), load_bytes(p + 64 + i)};
            UNROLL for (int k = 0; k < 8; k++) {
                byte_vec third = (k < 2 ? shift_left(h, 2 - k) : shift_right(h, k - 2)) & 4;
                store_bytes(q + i + 32 * k, masked_or(shift_right(two[k / 4], k % 4 * 2), 3, third));
            }
        }
        break;
    }
    case G4_TYPE_Q4_K:
        scales_q4_k(six_bits, p + 4);
        scale_eight(scale, six_bits[0], half_at(p));
        scale_eight(min, six_bits[1], half_at(p + 2));
        for (int i = 0; i < 128; i += STEP) {
            byte_vec b = load_bytes(p + 16 + i);
            store_bytes(q + i / 32 * 64 + i % 32, b & 15);
            store_bytes(q + i / 32 * 64 + i % 32 + 32, shift_right(b, 4) & 15);
        }
        break;
    case G4_TYPE_Q5_K:
        scales_q4_k(six_bits, p + 4);
        scale_eight(scale, six_bits[0], half_at(p));
        scale_eight(min, six_bits[1], half_at(p + 2));
        for (int i = 0; i < 32; i += STEP) {
            byte_vec h = load_bytes(p + 16 + i);
            UNROLL for (int k = 0; k < 8; k++) {
                byte_vec fifth = (k < 4 ? shift_left(h, 4 - k) : shift_right(h, k - 4)) & 16;
                store_bytes(q + i + 32 * k, masked_or(shift_right(load_bytes(p + 48 + 32 * (k / 2) + i), k % 2 * 4), 15, fifth));
            }
        }
        break;
    case G4_TYPE_Q6_K: {
        uint64_t bytes[2];
        memcpy(bytes, p + 192, sizeof bytes);
        for (int k = 0; k < 2; k++) scale_eight(scale + 8 * k, bytes[k], half_at(p + 208));
        for (int i = 0; i < 64; i += STEP) {
            byte_vec h = load_bytes(p + 128 + i);
            UNROLL for (int k = 0; k < 4; k++) {
                byte_vec low = load_bytes(p + i / 32 * 64 + i % 32 + 32 * (k % 2)), high = (k < 2 ? shift_left(h, 4 - 2 * k) : shift_right(h, 2 * k - 4)) & 48;
                store_bytes(q + i / 32 * 128 + i % 32 + 32 * k, masked_or(k < 2 ? low : shift_right(low, 4), 15, high));
            }
        }
        break;
    }
    case G4_TYPE_IQ4_XS: scale_eight(scale, scales_iq4_xs(p), half_at(p)); break;
    default: break;
    }
    const format *f = &formats[type];
    const unsigned char *nibbles = p + f->first;
    for (int k = 0; f->stride && k < runs; k++, q += 32, nibbles += f->stride) {
        bytes32 r = split(nibbles);
        if (f->level[15] != 15) { /* else they stand for themselves */
#if LANES > 4
            const __m256i level = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)f->level));
            r.part[0] = (byte_vec)_mm256_shuffle_epi8(level, (__m256i)r.part[0]);
#elif defined(__aarch64__)
            for (int i = 0; i < 2; i++) r.part[i] = (byte_vec)vqtbl1q_u8(vld1q_u8(f->level), (uint8x16_t)r.part[i]);
#else
            uint8_t index[32];
            memcpy(index, &r, sizeof r);
            for (int i = 0; i < 32; i++) index[i] = f->level[index[i]];
            memcpy(&r, index, sizeof r);
#endif
        }
        store32(q, r);
    }
}

#else

static void take_apart(taken *to, int half, g4_dtype type, const unsigned char *p, int n) {
    const g4_type *t = &g4_types[type];
    float *scale = to->scale + 8 * half, *min = to->min + 8 * half;
    uint8_t *q = to->q + 256 * half;
    memset(q, 0, 256);
    for (int g = 0; g < 256 / t->group; g++) scale[g] = min[g] = 0;
    for (; n > 0; n -= t->block, p += t->bytes, q += t->block, scale += t->block / t->group, min += t->block / t->group) {
        g4_block b;
        t->unpack(&b, p);
        for (int i = 0; i < t->block; i++) q[i] = (uint8_t)(b.q[i] + formats[type].offset);
        for (int g = 0; g < t->block / t->group; g++) scale[g] = b.scale[g], min[g] = t->mins ? b.min[g] : 0;
    }
}

#endif

#if LANES == 16
/* Whole steps need no memory in between: what take_apart() does, 64 bytes at once. */

/* 32 bytes twice */
static INLINE TARGET __m512i twice(const unsigned char *p) { return _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(const void *)p)); }

/* The bytes at p, each shifted right by `low` bits in the first 32 of them and by `high` bits in the others; to the left, if negative. What comes from a neighbour is to be masked. */
static INLINE TARGET __m512i shifted(__m512i b, int low, int high) {
    return _mm512_rorv_epi64(b, _mm512_set_epi64(high & 63, high & 63, high & 63, high & 63, low & 63, low & 63, low & 63, low & 63));
}

/* (a & mask) | b */
static INLINE TARGET __m512i masked_or64(__m512i a, char mask, __m512i b) { return _mm512_ternarylogic_epi32(a, _mm512_set1_epi8(mask), b, 0xea); }

/* The nibbles of two runs of 16 bytes: for each run first the low ones. */
static INLINE TARGET __m512i nibbles64(const unsigned char *p, const unsigned char *q) {
    __m512i b = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)p))),
                                   _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)q)), 1);
    return _mm512_and_si512(_mm512_srlv_epi64(b, _mm512_set_epi64(4, 4, 0, 0, 4, 4, 0, 0)), _mm512_set1_epi8(15));
}

/* Weights 64 k .. 64 k + 63 of 256, whose blocks begin at p */
static INLINE TARGET __m512i weights64(g4_dtype type, const unsigned char *p, int k) {
    const int run = k % 2 * 4; /* of the types in which 4 runs of 32 weights share bytes */
    const format *f = &formats[type];
    __m512i q;
    switch (type) {
    case G4_TYPE_Q4_0: case G4_TYPE_Q4_1: case G4_TYPE_IQ4_NL: case G4_TYPE_IQ4_XS: case G4_TYPE_MXFP4:
        p += f->first + 2 * k * f->stride;
        q = nibbles64(p, p + f->stride);
        return f->level[15] == 15 ? q : _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(const void *)f->level)), q);
    case G4_TYPE_Q5_0: case G4_TYPE_Q5_1: {
        const int first = type == G4_TYPE_Q5_0 ? 2 : 4, stride = 20 + first;
        uint32_t a, b;
        p += 2 * k * stride + first;
        memcpy(&a, p, sizeof a);
        memcpy(&b, p + stride, sizeof b);
        return _mm512_or_si512(nibbles64(p + 4, p + 4 + stride), _mm512_maskz_set1_epi8(a | (uint64_t)b << 32, 16));
    }
    case G4_TYPE_Q8_0:
        p += 2 * k * 34 + 2;
        q = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)(const void *)p)), _mm256_loadu_si256((const __m256i *)(const void *)(p + 34)), 1);
        return _mm512_xor_si512(q, _mm512_set1_epi8(-128));
    case G4_TYPE_Q2_K: return _mm512_and_si512(shifted(twice(p + 16 + k / 2 * 32), run, run + 2), _mm512_set1_epi8(3));
    case G4_TYPE_Q3_K:
        q = _mm512_and_si512(shifted(twice(p), 2 * k - 2, 2 * k - 1), _mm512_set1_epi8(4));
        return masked_or64(shifted(twice(p + 32 + k / 2 * 32), run, run + 2), 3, q);
    case G4_TYPE_Q4_K: return _mm512_and_si512(shifted(twice(p + 16 + 32 * k), 0, 4), _mm512_set1_epi8(15));
    case G4_TYPE_Q5_K:
        q = _mm512_and_si512(shifted(twice(p + 16), 2 * k - 4, 2 * k - 3), _mm512_set1_epi8(16));
        return masked_or64(shifted(twice(p + 48 + 32 * k), 0, 4), 15, q);
    case G4_TYPE_Q6_K:
        q = _mm512_and_si512(shifted(twice(p + 128 + k / 2 * 32), run - 4, run - 2), _mm512_set1_epi8(48));
        return masked_or64(_mm512_srli_epi64(_mm512_loadu_si512(p + k / 2 * 64), k % 2 * 4), 15, q);
    default: return _mm512_setzero_si512();
    }
}

/* 16 halves, `stride` bytes apart */
static INLINE TARGET vec halves16(const unsigned char *p, int stride) {
    uint64_t four[4];
    UNROLL for (int i = 0; i < 4; i++, p += 4 * stride) {
        four[i] = load16(p) | (uint64_t)load16(p + stride) << 16 | (uint64_t)load16(p + 2 * stride) << 32 | (uint64_t)load16(p + 3 * stride) << 48;
        __asm__("" : "+r"(four[i])); /* gcc would do this with vectors, which are busy */
    }
    return (vec)_mm512_cvtph_ps(_mm256_set_epi64x((int64_t)four[3], (int64_t)four[2], (int64_t)four[1], (int64_t)four[0]));
}

/* 16 signed bytes, the first 8 times a, the others times b */
static INLINE TARGET vec scale16(uint64_t first, uint64_t second, float a, float b) {
    __m512i q = _mm512_cvtepi8_epi32(_mm_set_epi64x((int64_t)second, (int64_t)first));
    return (vec)_mm512_mul_ps(_mm512_cvtepi32_ps(q), _mm512_mask_blend_ps(0xff00, _mm512_set1_ps(a), _mm512_set1_ps(b)));
}

/* All 16 groups of a step. q [group / 4] */
static INLINE TARGET void take_whole_step(__m512i *q, vec *scale, vec *min, g4_dtype type, const unsigned char *p) {
    const unsigned char *next = p + 256 / formats[type].block * formats[type].bytes; /* the second half's, if it has one */
    uint64_t s[4];
    UNROLL for (int k = 0; k < 4; k++) q[k] = weights64(type, p, k);
    if (formats[type].group == 32)
        UNROLL for (int k = 0; k < 4; k++) q[4 + k] = weights64(type, next, k);
    switch (type) {
    case G4_TYPE_Q4_0: case G4_TYPE_IQ4_NL: *scale = halves16(p, 18); break;
    case G4_TYPE_Q5_0: *scale = halves16(p, 22); break;
    case G4_TYPE_Q8_0: *scale = halves16(p, 34); break;
    case G4_TYPE_Q4_1: *scale = halves16(p, 20), *min = -halves16(p + 2, 20); break;
    case G4_TYPE_Q5_1: *scale = halves16(p, 24), *min = -halves16(p + 2, 24); break;
    case G4_TYPE_MXFP4: {
        __m128i bytes = _mm_set_epi8((char)p[255], (char)p[238], (char)p[221], (char)p[204], (char)p[187], (char)p[170], (char)p[153], (char)p[136], (char)p[119],
                                     (char)p[102], (char)p[85], (char)p[68], (char)p[51], (char)p[34], (char)p[17], (char)p[0]);
        __m512i e = _mm512_cvtepu8_epi32(bytes), normal = _mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(1)), 23);
        *scale = (vec)_mm512_mask_sllv_epi32(normal, _mm512_cmplt_epu32_mask(e, _mm512_set1_epi32(2)), _mm512_set1_epi32(0x00200000), e);
        break;
    }
    case G4_TYPE_Q2_K: {
        memcpy(s, p, 16);
        const uint64_t low = 0x0f0f0f0f0f0f0f0f;
        *scale = scale16(s[0] & low, s[1] & low, half_at(p + 80), half_at(p + 80)), *min = scale16(s[0] >> 4 & low, s[1] >> 4 & low, half_at(p + 82), half_at(p + 82));
        break;
    }
    case G4_TYPE_Q3_K:
        scales_q3_k(s, p + 96);
        *scale = scale16(s[0], s[1], half_at(p + 108), half_at(p + 108));
        break;
    case G4_TYPE_Q4_K: case G4_TYPE_Q5_K:
        scales_q4_k(s, p + 4);
        scales_q4_k(s + 2, next + 4);
        *scale = scale16(s[0], s[2], half_at(p), half_at(next)), *min = scale16(s[1], s[3], half_at(p + 2), half_at(next + 2));
        break;
    case G4_TYPE_Q6_K:
        memcpy(s, p + 192, 16);
        *scale = scale16(s[0], s[1], half_at(p + 208), half_at(p + 208));
        break;
    case G4_TYPE_IQ4_XS: *scale = scale16(scales_iq4_xs(p), scales_iq4_xs(next), half_at(p), half_at(next)); break;
    default: break;
    }
}
#endif

/* A step of a row of n weights, from weight i on. One function for each type, so that its formula and its sizes are constants there. */
static INLINE TARGET void take_step(taken *to, g4_dtype type, const unsigned char *row, int i, int n) {
    const format *f = &formats[type];
    row += (size_t)(i / f->block) * (size_t)f->bytes;
#if LANES == 16
    if (n - i >= 16 * f->group) {
        __m512i q[8];
        vec scale, min = {0};
        take_whole_step(q, &scale, &min, type, row);
        UNROLL for (int k = 0; k < f->group / 4; k++) _mm512_storeu_si512(to->q + 64 * k, q[k]);
        store(to->scale, scale), store(to->min, min);
        return;
    }
#endif
    if (n - i >= 512 && f->group == 32) { /* what is mostly the case, with numbers that the compiler knows */
        take_apart(to, 0, type, row, 256);
        take_apart(to, 1, type, row + 256 / f->block * f->bytes, 256);
        return;
    }
    take_apart(to, 0, type, row, MIN(256, n - i));
    if (f->group == 16) return;
    if (n - i > 256) take_apart(to, 1, type, row + 256 / f->block * f->bytes, MIN(256, n - i - 256));
    else memset(to->q + 256, 0, 256), memset(to->scale + 8, 0, 32), memset(to->min + 8, 0, 32);
}

#define EACH_TYPE(f) \
    f(q4_0, G4_TYPE_Q4_0) f(q4_1, G4_TYPE_Q4_1) f(q5_0, G4_TYPE_Q5_0) f(q5_1, G4_TYPE_Q5_1) f(q8_0, G4_TYPE_Q8_0) f(q2_k, G4_TYPE_Q2_K) f(q3_k, G4_TYPE_Q3_K) \
    f(q4_k, G4_TYPE_Q4_K) f(q5_k, G4_TYPE_Q5_K) f(q6_k, G4_TYPE_Q6_K) f(iq4_nl, G4_TYPE_IQ4_NL) f(iq4_xs, G4_TYPE_IQ4_XS) f(mxfp4, G4_TYPE_MXFP4)
#define TAKE(name, type) \
    static NOINLINE TARGET void VERSION(take_##name, ISA)(taken *to, const unsigned char *row, int i, int n) { take_step(to, type, row, i, n); }
EACH_TYPE(TAKE)
#define TAKE_OF(name, type) [type] = VERSION(take_##name, ISA),
static void (*const take_functions[G4_N_TYPES])(taken *to, const unsigned char *row, int i, int n) = {EACH_TYPE(TAKE_OF)};

/* A file's weights begin anywhere in a cache line, so they may lie in one line more than their number says. */
static INLINE TARGET void fetch(const unsigned char *p, int bytes) {
    bytes += (int)((uintptr_t)p % 64);
    p -= (uintptr_t)p % 64;
    for (int i = 0; i < bytes; i += 64) PREFETCH_2(p + i);
}

/* y [rows] = the lanes of one token of N, added */
static TARGET void finish(float *y, const float *lanes, int N, int rows, int round) {
    int r = 0;
#if LANES > 1
    for (; r + 4 <= rows; r += 4) {
        quad s[4];
        UNROLL for (int i = 0; i < 4; i++) {
            const float *lane = lanes + (r + i) * N * 16;
            s[i] = (quad_load(lane) + quad_load(lane + 8)) + (quad_load(lane + 4) + quad_load(lane + 12));
        }
        quad ab = SHUFFLE(s[0], s[1], 0, 4, 1, 5) + SHUFFLE(s[0], s[1], 2, 6, 3, 7);
        quad cd = SHUFFLE(s[2], s[3], 0, 4, 1, 5) + SHUFFLE(s[2], s[3], 2, 6, 3, 7);
        s[0] = SHUFFLE(ab, cd, 0, 1, 4, 5) + SHUFFLE(ab, cd, 2, 3, 6, 7);
        memcpy(y + r, &s[0], sizeof s[0]);
    }
#endif
    for (; r < rows; r++) y[r] = add_lanes(lanes + r * N * 16);
    for (r = 0; round && r < rows; r++) y[r] = round_one(y[r]);
}

/* ---- Products of integers -----------------------------------------------------------------------------------------------------
 *
 * An activation's integer (gemma4.c, to_integers) is cut into signed digits, as wide as what the processor multiplies best: three bytes, two halves, or itself.
 * Sums of the highest digit, shifted left, go on with the next one. The sum of a group fits 32 bits with its sign; on the way numbers are without one and may wrap.
 */
#if LANES == 16
typedef int8_t digit;
enum { VERSION(bits, ISA) = 8, VERSION(chunk, ISA) = 64 };
#elif LANES == 8
typedef int16_t digit;
enum { VERSION(bits, ISA) = 11, VERSION(chunk, ISA) = 16 };
#else
typedef int32_t digit;
enum { VERSION(bits, ISA) = 0, VERSION(chunk, ISA) = 16 };
#endif
#if LANES > 1
typedef digit digits_vec __attribute__((vector_size(LANES * sizeof(digit))));
#define TO_DIGITS(x) __builtin_convertvector(x, digits_vec)
#else
typedef digit digits_vec;
#define TO_DIGITS(x) (x)
#endif
#define SHIFT VERSION(bits, ISA)
#define CHUNK VERSION(chunk, ISA)
#define X_BYTES (DIGITS * sizeof(digit)) /* of an activation */

/* Activations of T tokens, after one another. */
typedef struct integers {
    float *s;       /* [groups]: what the integers of a group are multiplied by */
    float *sum;     /* [groups]: s times the sum of the integers */
    int32_t *times; /* [groups]: the weights' offset times that sum */
    digit *x;       /* [steps of 16 groups][...][DIGITS][CHUNK]: of CHUNK activations the highest digits, then the next, and so on */
} integers;

/* Where those of a token lie in memory [integers_size()]. */
static INLINE size_t groups_in(int n, int group) { return ((size_t)n / (size_t)group + 15) / 16 * 16; }
static INLINE size_t integers_size(int n, int group) { return groups_in(n, group) * (3 + (size_t)group * X_BYTES / 4); } /* in floats */
static INLINE integers integers_at(float *p, int n, int group) {
    const size_t groups = groups_in(n, group);
    return (integers){.x = (digit *)p, .s = p + groups * (size_t)group * X_BYTES / 4, .sum = p + integers_size(n, group) - 2 * groups,
                      .times = (int32_t *)(void *)(p + integers_size(n, group) - groups)};
}

static INLINE TARGET ints load_ints(const void *p) {
    ints x;
    memcpy(&x, p, sizeof x);
    return x;
}

static INLINE TARGET uints load_uints(const void *p) {
    uints x;
    memcpy(&x, p, sizeof x);
    return x;
}

static INLINE TARGET ints greater(ints a, ints b) {
#if LANES > 1
    const ints is = a > b;
    return (a & is) | (b & ~is);
#else
    return a > b ? a : b;
#endif
}

/* One less for integers of 16 bits, where it takes more than one at all. */
static INLINE int digits_of(const product *m) { return DIGITS - (m->q16 && DIGITS > 1); }

/* The integers of x [m->n]. */
static INLINE TARGET void make_integers_of(int group, int q16, const product *m, const float *x, float *memory) {
    const int bits_of_x = g4_types[m->type].bits, digits = DIGITS - (q16 && DIGITS > 1);
    const float to_integer = 12582912.0f, limit = q16 ? 32639 : (float)((1 << bits_of_x) - 1);
    const integers to = integers_at(memory, m->n, group);
    const vec zero = {0}, low_limit = zero - limit, high_limit = zero + limit;
    for (int g = 0, i = 0; g < (int)groups_in(m->n, group); g++, i += group) {
        ints bits = {0}, sum = {0};
        int32_t max = 0, sum_x = 0;
#if LANES < 16
        int32_t each[LANES];
#endif
        if (i < m->n)
            UNROLL for (int k = 0; k < group; k += LANES) bits = greater(bits, load_ints(x + i + k) & 0x7fffffff);
#if LANES == 16
        max = _mm512_reduce_max_epi32((__m512i)bits);
#else
        memcpy(each, &bits, sizeof bits);
        for (int k = 0; k < LANES; k++) max = MAX(max, each[k]);
#endif
        const int finite = max < 0x7f800000, e = MAX(max >> 23, 24) - 126, whole = i < m->n && finite;
        const float largest = max > (int32_t)bits_of(0x1p-102f) ? float_of((uint32_t)max) : 0x1p-102f;
        const float one_over_s = q16 ? limit / largest : float_of((uint32_t)(127 + bits_of_x - e) << 23);
        const float s = i >= m->n ? 0 : !finite ? NAN : q16 ? largest / limit : float_of((uint32_t)(127 + e - bits_of_x) << 23);
        UNROLL for (int k = 0; k < group; k += LANES) {
            digit *at = to.x + ((unsigned)(i + k) / CHUNK * (unsigned)digits * CHUNK + (unsigned)(i + k) % CHUNK);
            vec v = whole ? (load(x + i + k) * one_over_s + to_integer) - to_integer : zero;
            v = VEC_SELECT(v > high_limit, high_limit, v);
            ints X = TO_INTS(VEC_SELECT(v < low_limit, low_limit, v));
            sum += X;
            UNROLL for (int d = digits - 1; d >= 0; d--) {
                const ints low = d ? ((X + (1 << SHIFT >> 1)) & ((1 << SHIFT) - 1)) - (1 << SHIFT >> 1) : X;
                const digits_vec stored = TO_DIGITS(low);
                memcpy(at + d * CHUNK, &stored, sizeof stored);
                X = (X - low) >> SHIFT;
            }
        }
#if LANES == 16
        sum_x = _mm512_reduce_add_epi32((__m512i)sum);
#else
        memcpy(each, &sum, sizeof sum);
        for (int k = 0; k < LANES; k++) sum_x += each[k];
#endif
        to.s[g] = s, to.sum[g] = (float)sum_x * s, to.times[g] = sum_x * formats[m->type].offset;
    }
}

static TARGET void make_integers(const product *m, const float *x, float *memory) {
    if (formats[m->type].group == 32) {
        if (m->q16) make_integers_of(32, 1, m, x, memory);
        else make_integers_of(32, 0, m, x, memory);
    } else {
        if (m->q16) make_integers_of(16, 1, m, x, memory);
        else make_integers_of(16, 0, m, x, memory);
    }
}

/* s + products of NEIGHBOURS weights and activations in each lane */
static INLINE TARGET uints dot(uints s, uints w, uints x) {
#if LANES == 16
    return (uints)_mm512_dpbusd_epi32((__m512i)s, (__m512i)w, (__m512i)x); /* unsigned bytes by signed ones */
#elif LANES == 8
    return s + (uints)_mm256_madd_epi16((__m256i)w, (__m256i)x);
#else
    return s + w * x;
#endif
}

#if LANES == 16
/* A step of a row, and its products with the activations of the step whose first group is `at`. */
typedef struct multiplied {
    __m512i q[8], product[8];
    vec scale, min;
    int at;
} multiplied;

static INLINE TARGET void take(multiplied *m, g4_dtype type, const unsigned char *row, int step, int n) {
    const format *f = &formats[type];
    const int weights = 16 * f->group, i = step * weights;
    m->at = 16 * step;
    if (n - i >= weights) {
        take_whole_step(m->q, &m->scale, &m->min, type, row + (size_t)(i / f->block) * (size_t)f->bytes);
    } else {
        taken w;
        take_functions[type](&w, row, i, n);
        UNROLL for (int k = 0; k < f->group / 4; k++) m->q[k] = _mm512_loadu_si512(w.q + 64 * k);
        m->scale = load(w.scale);
        if (f->mins) m->min = load(w.min);
    }
}

static INLINE TARGET void multiply_by(int digits, multiplied *m, const digit *x, int group) {
    UNROLL for (int i = 0; i < group / 4; i++, x += digits * CHUNK) {
        const uints q = (uints)m->q[i];
        uints s = dot((uints){0}, q, load_uints(x));
        UNROLL for (int d = 1; d < digits; d++) s = dot(s << SHIFT, q, load_uints(x + d * CHUNK));
        m->product[i] = (__m512i)s;
    }
}

static INLINE TARGET void multiply(int digits, multiplied *m, const digit *x, int group) {
    x += m->at * group * digits;
    __asm__("" : "+r"(x)); /* one address, not one for each of the loads */
    if (digits == 3) multiply_by(3, m, x, group);
    else multiply_by(2, m, x, group);
}

/* lane [16] + what a step adds to it */
static INLINE TARGET vec add_groups(vec lane, const multiplied *m, const integers *x, int mins, int group) {
    __m512i four[2] = {_mm512_setzero_si512()}, sums;
    UNROLL for (int i = 0; i < group / 16; i++) { /* number k of a vector's four quarters: the four sums of quarter k of 4 of them */
        const __m512i *a = m->product + 4 * i;
        __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a[0], a[1]), _mm512_unpackhi_epi32(a[0], a[1]));
        __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(a[2], a[3]), _mm512_unpackhi_epi32(a[2], a[3]));
        four[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    }
    if (group == 16) {
        sums = _mm512_permutexvar_epi32(_mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0), four[0]);
    } else { /* a group has two quarters */
        sums = _mm512_add_epi32(_mm512_shuffle_i32x4(four[0], four[1], 0x88), _mm512_shuffle_i32x4(four[0], four[1], 0xdd));
        sums = _mm512_permutexvar_epi32(_mm512_set_epi32(15, 11, 14, 10, 13, 9, 12, 8, 7, 3, 6, 2, 5, 1, 4, 0), sums);
    }
    const vec y = TO_VEC((ints)((uints)sums - load_uints(x->times + m->at))) * m->scale * load(x->s + m->at);
    return lane + (mins ? y - load(x->sum + m->at) * m->min : y);
}

/* Rows begin .. end - 1 for one token. SOME rows pass by a part of its integers that the nearest cache holds, then by the next part. A step's sums are added while the
 * next one is multiplied: processors do not look so far ahead themselves. */
static INLINE TARGET void one_token(g4_dtype type, const product *m, float *memory, int begin, int end) {
    enum { SOME = 32, AHEAD = 3 };
    const format *f = &formats[type];
    const int group = f->group, mins = f->mins, steps = (int)groups_in(m->n, group) / 16, parts = (16 * group * steps + 4095) / 4096;
    const int bytes = 16 * group / f->block * f->bytes, digits = digits_of(m);
    const integers x = integers_at(memory, m->n, group);
    for (int o = begin; o < end; o += SOME) {
        const int rows = MIN(SOME, end - o);
        float lanes[SOME][16];
        for (int part = 0; part < parts; part++) {
            const int from = steps * part / parts, to = steps * (part + 1) / parts;
            const unsigned char *row = m->w + (size_t)o * m->w_stride;
            multiplied last, next = {.at = 0};
            take(&last, type, row, from, m->n);
            multiply(digits, &last, x.x, group);
            for (int r = 0; r < rows; r++) {
                vec lane = part ? load(lanes[r]) : (vec){0};
                /* After these rows comes their next part, after the last part the next rows. */
                const unsigned char *soon = r + AHEAD < rows ? row + AHEAD * m->w_stride : part + 1 < parts ? row + (AHEAD - rows) * (ptrdiff_t)m->w_stride + (to - from) * bytes
                                                                                                            : row + AHEAD * m->w_stride - from * bytes;
                for (int step = from + 1; step <= to; step++) {
                    const int first = step == to; /* of the next row; after the last one the same once more, for nothing */
                    for (int i = 0; i < bytes; i += 64) {
                        if (bytes <= 10 * group) PREFETCH(soon + (step - 1) * bytes + i); /* 5 bits and less: the nearest cache has room for them too */
                        else PREFETCH_2(soon + (step - 1) * bytes + i);
                    }
                    if (first && r + 1 < rows) row += m->w_stride;
                    take(&next, type, row, first ? from : step, m->n);
                    multiply(digits, &next, x.x, group);
                    lane = add_groups(lane, &last, &x, mins, group);
                    last = next;
                }
                store(lanes[r], lane);
            }
        }
        finish(m->y + o, lanes[0], 1, rows, 0);
    }
}

#define FOR_TYPE(name, type) \
    static NOINLINE TARGET void VERSION(name, ISA)(const product *m, float *memory, int begin, int end) { one_token(type, m, memory, begin, end); }
EACH_TYPE(FOR_TYPE)
#else
/* to [16] = the sums of the groups of a step */
static INLINE TARGET void group_sums(int digits, int32_t *to, const uint8_t *w, const digit *x, int group) {
#if LANES == 8
    UNROLL for (int i = 0; i < 2; i++) {
        __m256i a[8];
        UNROLL for (int g = 0; g < 8; g++) {
            uints high = {0}, low = {0};
            UNROLL for (int k = 0; k < group; k += 16, w += 16, x += digits * CHUNK) {
                const uints q = (uints)_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(const void *)w));
                low = dot(low, q, load_uints(x + (digits - 1) * CHUNK));
                if (digits > 1) high = dot(high, q, load_uints(x));
            }
            a[g] = (__m256i)(digits > 1 ? (high << SHIFT) + low : low);
        }
        __m256i first = _mm256_hadd_epi32(_mm256_hadd_epi32(a[0], a[1]), _mm256_hadd_epi32(a[2], a[3]));
        __m256i second = _mm256_hadd_epi32(_mm256_hadd_epi32(a[4], a[5]), _mm256_hadd_epi32(a[6], a[7]));
        first = _mm256_add_epi32(_mm256_permute2x128_si256(first, second, 0x20), _mm256_permute2x128_si256(first, second, 0x31));
        _mm256_storeu_si256((__m256i *)(void *)(to + 8 * i), first);
    }
#else
    (void)digits;
    for (int g = 0; g < 16; g++, w += group, x += group) {
        uint32_t sum = 0;
        for (int k = 0; k < group; k++) sum += w[k] * (uint32_t)x[k];
        to[g] = (int32_t)sum;
    }
#endif
}

/* lane [16] += a step of a row by a token, whose step's first group is `at` */
static INLINE TARGET void add_groups(int digits, float *lane, const taken *w, const integers *x, int at, int mins, int group) {
    int32_t sums[16];
    if (digits == 2) group_sums(2, sums, w->q, x->x + at * group * 2, group);
    else group_sums(1, sums, w->q, x->x + at * group, group);
    UNROLL for (int p = 0; p < PARTS; p++) {
        uints s, times;
        memcpy(&s, sums + p * LANES, sizeof s);
        memcpy(&times, x->times + at + p * LANES, sizeof times);
        vec y = TO_VEC((ints)(s - times)) * load(w->scale + p * LANES) * load(x->s + at + p * LANES);
        if (mins) y -= load(x->sum + at + p * LANES) * load(w->min + p * LANES);
        store(lane + p * LANES, load(lane + p * LANES) + y);
    }
}
#endif

/* Rows begin .. end - 1 for up to MOST tokens, whose integers lie one after the other. */
static INLINE TARGET void integer_rows_of(int group, const product *m, float *memory, int begin, int end) {
    const format *f = &formats[m->type];
    const int step = 16 * group, mins = f->mins, bytes = step / f->block * f->bytes, digits = digits_of(m);
    const size_t size = integer_tokens(m->n);
    const integers first = integers_at(memory, m->n, group);
    for (int o = begin; o < end; o++) {
        const unsigned char *row = m->w + (size_t)o * m->w_stride, *soon = row + m->w_stride;
        float lanes[MOST][16];
        memset(lanes, 0, sizeof lanes[0] * (size_t)m->T);
        for (int i = 0; i < m->n; i += step, soon += bytes) {
            taken w;
            take_functions[m->type](&w, row, i, m->n);
            for (int k = 0; k < bytes; k += 64) PREFETCH_2(soon + k);
#if LANES == 16
            multiplied v = {.at = i / group, .scale = load(w.scale)};
            if (mins) v.min = load(w.min);
            UNROLL for (int k = 0; k < group / 4; k++) v.q[k] = _mm512_loadu_si512(w.q + 64 * k);
#endif
            for (int t = 0; t < m->T; t++) {
                integers x = first;
                x.x = (digit *)((float *)(void *)x.x + t * size), x.s += t * size, x.sum += t * size, x.times += t * size;
#if LANES == 16
                multiply(digits, &v, x.x, group);
                store(lanes[t], add_groups(load(lanes[t]), &v, &x, mins, group));
#else
                add_groups(digits, lanes[t], &w, &x, i / group, mins, group);
#endif
            }
        }
        for (int t = 0; t < m->T; t++) m->y[t * m->y_stride + o] = add_lanes(lanes[t]);
    }
}

static TARGET void integer_rows(const product *m, float *memory, int begin, int end) {
#if LANES == 16
#define ONE_TOKEN(name, type) [type] = VERSION(name, ISA),
    static void (*const one_token_functions[G4_N_TYPES])(const product *, float *, int, int) = {EACH_TYPE(ONE_TOKEN)};
    if (m->T == 1) {
        one_token_functions[m->type](m, memory, begin, end);
        return;
    }
#endif
    if (formats[m->type].group == 32) integer_rows_of(32, m, memory, begin, end);
    else integer_rows_of(16, m, memory, begin, end);
}

/* For many tokens, a lane is a row: NEIGHBOURS weights of 16 rows meet the same activations. All that lane l of the 16 of a dot product needs lies together, group
 * after group, both of the weights and of N tokens; and lanes follow in the order in which they are added. */
static const unsigned char lane_order[16] = {0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15};

static INLINE int token_groups(int T) { return (T + ROW_TOKENS - 1) / ROW_TOKENS; }

/* Bytes of a group: of N tokens [digits][N][group], s [N], sum [N] and times [N]; of 16 rows [group / NEIGHBOURS][16] in numbers of 32 bits, scale [16], min [16]. */
static INLINE size_t tokens_bytes(int digits, int N, int group) { return (size_t)N * ((size_t)(group * digits) * sizeof(digit) + 12); }
static INLINE size_t rows_bytes(int group) { return 64 * (size_t)group / NEIGHBOURS + 128; }

/* The integers of all tokens, a group of N after the other. The workers share these; temporary [integers_size()] is each one's own. */
static TARGET void pack_integers(const product *m, float *to, float *temporary, int worker, int workers) {
    const int group = formats[m->type].group, groups = token_groups(m->T), steps = (int)groups_in(m->n, group) / 16;
    const int digits = digits_of(m);
    const integers from = integers_at(temporary, m->n, group);
    for (int g = worker; g < groups; g += workers) {
        const int t = m->T * g / groups, N = m->T * (g + 1) / groups - t;
        for (int j = 0; j < N; j++) {
            unsigned char *p = (unsigned char *)(to + (size_t)t * integer_tokens(m->n));
            make_integers(m, m->x + (size_t)(t + j) * m->x_stride, temporary);
            for (int l = 0; l < 16; l++)
                for (int k = 0; k < steps; k++, p += tokens_bytes(digits, N, group)) {
                    const int at = 16 * k + lane_order[l], i = at * group;
                    float *numbers = (float *)(void *)(p + (size_t)(N * group * digits) * sizeof(digit));
                    for (int d = 0; d < digits; d++)
                        for (int c = 0; c < group; c += MIN(group, CHUNK)) /* a chunk may be less than a group */
                            memcpy((digit *)(void *)p + (d * N + j) * group + c, from.x + ((i + c) / CHUNK * digits + d) * CHUNK + (i + c) % CHUNK, sizeof(digit) * (size_t)MIN(group, CHUNK));
                    numbers[j] = from.s[at], numbers[N + j] = from.sum[at];
                    memcpy(numbers + 2 * N + j, from.times + at, sizeof from.times[at]);
                }
        }
    }
}

#if LANES == 16
/* q [16] = number i of each of the 16 vectors */
static INLINE TARGET void transpose(__m512i *q) {
    __m512i a[16];
    UNROLL for (int i = 0; i < 16; i += 2) a[i] = _mm512_unpacklo_epi32(q[i], q[i + 1]), a[i + 1] = _mm512_unpackhi_epi32(q[i], q[i + 1]);
    UNROLL for (int i = 0; i < 16; i += 4) /* q[4 k + j]: in quarter m, numbers 4 m + j of vectors 4 k .. 4 k + 3 */
        UNROLL for (int j = 0; j < 2; j++) q[i + 2 * j] = _mm512_unpacklo_epi64(a[i + j], a[i + 2 + j]), q[i + 2 * j + 1] = _mm512_unpackhi_epi64(a[i + j], a[i + 2 + j]);
    UNROLL for (int j = 0; j < 4; j++) {
        __m512i even[2], odd[2]; /* quarters 0 and 2, 1 and 3; of vectors 0 .. 7, 8 .. 15 */
        UNROLL for (int k = 0; k < 2; k++)
            even[k] = _mm512_shuffle_i32x4(q[8 * k + j], q[8 * k + 4 + j], 0x88), odd[k] = _mm512_shuffle_i32x4(q[8 * k + j], q[8 * k + 4 + j], 0xdd);
        a[j] = _mm512_shuffle_i32x4(even[0], even[1], 0x88), a[8 + j] = _mm512_shuffle_i32x4(even[0], even[1], 0xdd);
        a[4 + j] = _mm512_shuffle_i32x4(odd[0], odd[1], 0x88), a[12 + j] = _mm512_shuffle_i32x4(odd[0], odd[1], 0xdd);
    }
    UNROLL for (int i = 0; i < 16; i++) q[i] = a[i];
}
#endif

/* to = n <= 16 rows from number `row` on; those that are missing are zeros */
static INLINE TARGET void pack_rows(unsigned char *to, const product *m, int row, int rows, int group) {
    const int steps = (int)groups_in(m->n, group) / 16;
    for (int k = 0; k < steps; k++) {
        taken w[16];
        for (int r = 0; r < 16; r++)
            if (r < rows) take_functions[m->type](&w[r], m->w + (size_t)(row + r) * m->w_stride, k * 16 * group, m->n);
            else memset(&w[r], 0, sizeof w[r]);
        for (int l = 0; l < 16; l++) {
            float *numbers = (float *)(void *)(to + (size_t)(l * steps + k + 1) * rows_bytes(group) - 128);
            for (int r = 0; r < 16; r++) numbers[r] = w[r].scale[lane_order[l]], numbers[16 + r] = w[r].min[lane_order[l]];
        }
#if LANES == 16
        for (int i = 0; i < group / 4; i++) {
            __m512i q[16];
            UNROLL for (int r = 0; r < 16; r++) q[r] = _mm512_loadu_si512(w[r].q + 64 * i);
            transpose(q);
            UNROLL for (int j = 0; j < 16; j++) {
                const int at = 64 * i + 4 * j, l = lane_order[at / group]; /* the order is its own inverse */
                _mm512_storeu_si512(to + (size_t)(l * steps + k) * rows_bytes(group) + 16 * (at % group), q[j]);
            }
        }
#else
        for (int l = 0; l < 16; l++) {
            uint32_t *p = (uint32_t *)(void *)(to + (size_t)(l * steps + k) * rows_bytes(group));
            for (int i = lane_order[l] * group; i < (lane_order[l] + 1) * group; i += NEIGHBOURS, p += 16)
                for (int r = 0; r < 16; r++) p[r] = NEIGHBOURS == 1 ? w[r].q[i] : w[r].q[i] | (uint32_t)w[r].q[i + 1] << 16;
        }
#endif
    }
}

/* sums [N][16 rows] of one lane */
static INLINE TARGET void integer_tile(int digits, int N, int group, int mins, float *sums, const unsigned char *w, const unsigned char *x, int steps) {
    UNROLL for (int part = 0; part < PARTS; part++) {
        const unsigned char *wp = w + 4 * LANES * part, *xp = x;
        vec total[ROW_TOKENS];
        UNROLL for (int t = 0; t < N; t++) total[t] = (vec){0};
        for (int k = 0; k < steps; k++, wp += rows_bytes(group), xp += tokens_bytes(digits, N, group)) {
            const float *numbers = (const float *)(const void *)(xp + (size_t)(N * group * digits) * sizeof(digit));
            uints a[ROW_TOKENS];
            UNROLL for (int t = 0; t < N; t++) a[t] = (uints){0};
            UNROLL for (int d = 0; d < digits; d++) {
                if (d)
                    UNROLL for (int t = 0; t < N; t++) a[t] <<= SHIFT;
                UNROLL for (int i = 0; i < group / NEIGHBOURS; i++) {
                    const uints q = load_uints(wp + 64 * i);
                    UNROLL for (int t = 0; t < N; t++) {
                        uint32_t each;
                        memcpy(&each, xp + ((d * N + t) * group / NEIGHBOURS + i) * 4, sizeof each);
                        a[t] = dot(a[t], q, (uints){0} + each);
                        if (DIGITS < 3) KEEP(a[t]); /* gcc would add in another order, of which it does not have the registers */
                    }
                }
            }
            const float *own = (const float *)(const void *)(wp + rows_bytes(group) - 128);
            const vec scale = load(own), min = load(own + 16);
            UNROLL for (int t = 0; t < N; t++) {
                uint32_t times;
                memcpy(&times, numbers + 2 * N + t, sizeof times);
                vec y = TO_VEC((ints)(a[t] - times)) * scale * numbers[t];
                if (mins) y -= numbers[N + t] * min;
                total[t] += y;
            }
        }
        UNROLL for (int t = 0; t < N; t++) store(sums + 16 * t + LANES * part, total[t]);
    }
}

/* Rows begin .. end - 1 of a product of at most MOST tokens, packed by pack_integers(). work is the thread's own. */
static INLINE TARGET void packed_rows_of(int digits, int group, const product *m, const float *packed, float *work, int begin, int end) {
    const int mins = formats[m->type].mins, groups = token_groups(m->T), steps = (int)groups_in(m->n, group) / 16;
    float *waiting = work; /* [MOST][4][16]: sums of 1, 2, 4 and 8 lanes that wait for as many others */
    unsigned char *panel = (unsigned char *)(work + MOST * 64);
    for (int o = begin; o < end; o += 16) {
        const int rows = MIN(16, end - o);
        pack_rows(panel, m, o, rows, group);
        for (int l = 0; l < 16; l++) {
            const unsigned char *w = panel + (size_t)(l * steps) * rows_bytes(group), *soon = m->w + (size_t)(o + 16 + l) * m->w_stride;
            for (int g = 0; g < groups; g++) {
                const int t = m->T * g / groups, N = m->T * (g + 1) / groups - t;
                const unsigned char *x = (const unsigned char *)(packed + (size_t)t * integer_tokens(m->n)) + (size_t)(l * steps) * tokens_bytes(digits, N, group);
                float sums[ROW_TOKENS * 16];
                fetch(soon + m->w_stride * (size_t)g / (size_t)groups, (int)(m->w_stride / (size_t)groups));
                switch (lane_order[l] * group < m->n ? N : 0) {
                case 0: memset(sums, 0, sizeof sums); break; /* a short row has nothing in this lane */
#if ROW_TOKENS > 4
                case 8: integer_tile(digits, 8, group, mins, sums, w, x, steps); break;
                case 7: integer_tile(digits, 7, group, mins, sums, w, x, steps); break;
                case 6: integer_tile(digits, 6, group, mins, sums, w, x, steps); break;
                case 5: integer_tile(digits, 5, group, mins, sums, w, x, steps); break;
#endif
                case 4: integer_tile(digits, 4, group, mins, sums, w, x, steps); break;
                case 3: integer_tile(digits, 3, group, mins, sums, w, x, steps); break;
                default: integer_tile(digits, 2, group, mins, sums, w, x, steps); break;
                }
                for (int j = 0; j < N; j++)
                    UNROLL for (int part = 0; part < PARTS; part++) {
                        float *level = waiting + (t + j) * 64 + LANES * part;
                        vec sum = load(sums + 16 * j + LANES * part);
                        for (int done = l; done & 1; done >>= 1, level += 16) sum = load(level) + sum;
                        if (l < 15) store(level, sum);
                        else
                            for (int r = LANES * part; r < MIN(rows, LANES * (part + 1)); r++) {
                                float each[LANES];
                                store(each, sum);
                                m->y[(size_t)(t + j) * m->y_stride + o + r] = each[r - LANES * part];
                            }
                    }
            }
        }
    }
}
static TARGET void packed_integer_rows(const product *m, const float *packed, float *work, int begin, int end) {
    const int group = formats[m->type].group;
#if DIGITS > 1
    if (m->q16) {
        if (group == 32) packed_rows_of(DIGITS - 1, 32, m, packed, work, begin, end);
        else packed_rows_of(DIGITS - 1, 16, m, packed, work, begin, end);
        return;
    }
#endif
    if (group == 32) packed_rows_of(DIGITS, 32, m, packed, work, begin, end);
    else packed_rows_of(DIGITS, 16, m, packed, work, begin, end);
}

/* ---- Products --------------------------------------------------------------------------------------------------------------- */

/* w [n] = weights, widened, and rounded where loading with dtype=bfloat16 does it. Without branches, so that compilers make vectors of it. */
static TARGET void widen_row(float *w, const unsigned char *p, g4_dtype type, int round, int n) {
    if (type == G4_TYPE_BF16) {
        for (int i = 0; i < n; i++) w[i] = float_of((uint32_t)load16(p + 2 * i) << 16);
        return;
    }
    if (type == G4_TYPE_F16) {
        for (int i = 0; i < n; i++) w[i] = float_of_half(load16(p + 2 * i));
    } else if (type == G4_TYPE_F32) {
        for (int i = 0; i < n; i++) w[i] = float_of(load16(p + 4 * i) | (uint32_t)load16(p + 4 * i + 2) << 16);
    } else {
        g4_widen(type, w, p, n);
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
    if (kind == LITTLE_F16) return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
    const __m512i halves = _mm512_set_epi32(0xf0000, 0xe0000, 0xd0000, 0xc0000, 0xb0000, 0xa0000, 0x90000, 0x80000, 0x70000, 0x60000, 0x50000, 0x40000, 0x30000, 0x20000, 0x10000, 0);
    return (vec)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, halves, _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)p)));
#elif LANES == 8
    if (kind == LITTLE_F16) return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
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

/* lanes [R][N][16], which begin with 0 if `fresh`, += R rows of weights by N tokens, n elements of each. What lies at `soon` in the same way comes next and is
 * fetched meanwhile: short rows as one run of bytes, long ones row by row, whichever memory likes better. */
static INLINE TARGET void tile(int R, int N, int kind, int fresh, float *lanes, const unsigned char *w, size_t w_stride, const unsigned char *soon, const float *x,
                               size_t x_stride, int n) {
    const size_t size = kind == HOST_FLOATS ? 4 : 2;
    const int together = (size_t)n * size == w_stride && R * w_stride <= 16384;
    const size_t soon_row = together ? 16 * size : w_stride, soon_step = together ? R * 16 * size : 16 * size;
    vec a[4][TOKENS][PARTS];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int t = 0; t < N; t++)
            UNROLL for (int p = 0; p < PARTS; p++) a[r][t][p] = (vec){0};
    if (!fresh)
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int t = 0; t < N; t++)
                UNROLL for (int p = 0; p < PARTS; p++) a[r][t][p] = load(lanes + (r * N + t) * 16 + p * LANES);
    int i = 0;
    for (; i + 16 <= n; i += 16, soon += soon_step) {
        UNROLL for (int r = 0; r < R; r++) PREFETCH_2(soon + r * soon_row);
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
            UNROLL for (int p = 0; p < PARTS; p++) store(lanes + (r * N + t) * 16 + p * LANES, a[r][t][p]);
}

/* The same for R = 1 row, or rows_of(N). */
static INLINE TARGET void tile_of(int R, int N, int kind, int fresh, float *lanes, const unsigned char *w, size_t w_stride, const unsigned char *soon, const float *x,
                                  size_t x_stride, int n) {
    switch (R == 1 ? N : N + 8) {
    case 1: tile(1, 1, kind, fresh, lanes, w, w_stride, soon, x, x_stride, n); break;
    case 2: tile(1, 2, kind, fresh, lanes, w, w_stride, soon, x, x_stride, n); break;
    case 9: tile(4, 1, kind, fresh, lanes, w, w_stride, soon, x, x_stride, n); break;
    case 10: tile(ROWS, 2, kind, fresh, lanes, w, w_stride, soon, x, x_stride, n); break;
#if TOKENS > 2
    case 3: tile(1, 3, kind, fresh, lanes, w, w_stride, soon, x, x_stride, n); break;
    case 11: tile(ROWS, 3, kind, fresh, lanes, w, w_stride, soon, x, x_stride, n); break;
#endif
#if TOKENS > 3
    case 4: tile(1, 4, kind, fresh, lanes, w, w_stride, soon, x, x_stride, n); break;
    case 5: tile(1, 5, kind, fresh, lanes, w, w_stride, soon, x, x_stride, n); break;
    case 6: tile(1, 6, kind, fresh, lanes, w, w_stride, soon, x, x_stride, n); break;
    case 7: tile(1, 7, kind, fresh, lanes, w, w_stride, soon, x, x_stride, n); break;
    case 8: tile(1, 8, kind, fresh, lanes, w, w_stride, soon, x, x_stride, n); break;
    case 12: tile(ROWS, 4, kind, fresh, lanes, w, w_stride, soon, x, x_stride, n); break;
    case 13: tile(ROWS, 5, kind, fresh, lanes, w, w_stride, soon, x, x_stride, n); break;
    case 14: tile(ROWS, 6, kind, fresh, lanes, w, w_stride, soon, x, x_stride, n); break;
    case 15: tile(FEWER_ROWS, 7, kind, fresh, lanes, w, w_stride, soon, x, x_stride, n); break;
    case 16: tile(FEWER_ROWS, 8, kind, fresh, lanes, w, w_stride, soon, x, x_stride, n); break;
#endif
    }
}

/* T tokens are cut into groups, each of which meets as many rows at once as there are registers for. */
static INLINE int groups_of(int T) { return T <= TOKENS ? 1 : T / GROUP + (T % GROUP > 0); }
static INLINE int rows_of(int N) { return N == 1 ? 4 : N <= GROUP ? ROWS : FEWER_ROWS; }

/* Rows begin .. end - 1 of a product whose weights are widened first, SOME rows of BLOCK elements at a time, for up to MANY tokens: all of them meet the
 * weights while these are in the cache, and their lanes wait for the next ones. */
static TARGET void product_widened(const product *m, int begin, int end) {
    enum { SOME = LANES > 4 ? 12 : 8 };
    float w[SOME * BLOCK], lanes[MANY * SOME * 16];
    const g4_type *type = &g4_types[m->type];
    for (int first = 0; first < m->T; first += MANY) {
        const int T = MIN(MANY, m->T - first), groups = groups_of(T);
        for (int o = begin; o < end; o += SOME) {
            const int rows = MIN(SOME, end - o);
            for (int i = 0; i < m->n; i += BLOCK) {
                const int n = MIN(BLOCK, m->n - i), bytes = BLOCK / type->block * type->bytes;
                const unsigned char *from = m->w + (size_t)o * m->w_stride + (size_t)(i / type->block) * (size_t)type->bytes;
                const unsigned char *soon = i + BLOCK < m->n ? from + bytes : m->w + (size_t)(o + SOME) * m->w_stride;
                for (int r = 0; r < rows; r++) widen_row(w + r * BLOCK, from + r * m->w_stride, m->type, m->round, n);
                for (int g = 0; g < groups; g++) {
                    const int t = T * g / groups, N = T * (g + 1) / groups - t;
                    const float *x = m->x + (size_t)(first + t) * m->x_stride + i;
                    for (int r = SOME * g / groups; r < SOME * (g + 1) / groups; r++) fetch(soon + r * m->w_stride, bytes);
                    for (int r = 0, R; r < rows; r += R) {
                        const unsigned char *at = (const unsigned char *)(w + r * BLOCK);
                        R = rows - r >= rows_of(N) ? rows_of(N) : 1;
                        tile_of(R, N, HOST_FLOATS, i == 0, lanes + (t * SOME + r * N) * 16, at, sizeof(float) * BLOCK, at, x, m->x_stride, n);
                    }
                }
            }
            for (int g = 0; g < groups; g++) {
                const int t = T * g / groups, N = T * (g + 1) / groups - t;
                for (int j = 0; j < N; j++)
                    finish(m->y + (size_t)(first + t + j) * m->y_stride + o, lanes + (t * SOME + j) * 16, N, rows, m->round);
            }
        }
    }
}

/* Rows begin .. end - 1 of a product, in panels of rows. A panel meets a few tokens at a time, block by block of BLOCK elements: the tokens' block stays in
 * the nearest cache while the panel's rows pass by, the panel stays in the next one until all tokens have met it, and memory is read once. */
static TARGET void product_rows(const product *m, int begin, int end) {
    const int halves = LANES > 4 && m->type == G4_TYPE_F16 && !m->round;
    if (m->widen && !halves) {
        product_widened(m, begin, end);
        return;
    }
    float lanes[PANEL * TOKENS * 16];
    const int groups = groups_of(m->T);
    const size_t size = (size_t)g4_types[m->type].bytes;
    const int block = groups > 1 ? 2 * BLOCK : MAX(m->n, 1), panel = groups == 1 && rows_of(m->T) == 3 ? 12 : PANEL;
    for (int o = begin; o < end; o += panel) {
        const int rows = MIN(panel, end - o);
        for (int g = 0; g < groups; g++) {
            const int t = (int)((int64_t)m->T * g / groups), N = (int)((int64_t)m->T * (g + 1) / groups) - t;
            for (int i = 0; i < m->n; i += block) {
                const int n = MIN(block, m->n - i);
                const float *x = m->x + (size_t)t * m->x_stride + i;
                for (int r = 0, R; r < rows; r += R) {
                    R = rows - r >= rows_of(N) && (N > 1 || m->n > 2048) ? rows_of(N) : 1;
                    const unsigned char *at = m->w + (size_t)(o + r) * m->w_stride + (size_t)i * size, *soon = at + R * m->w_stride;
                    float *to = lanes + r * N * 16;
                    if (m->type == G4_TYPE_F32) tile_of(R, N, HOST_FLOATS, i == 0, to, at, m->w_stride, soon, x, m->x_stride, n);
                    else if (halves) tile_of(R, N, LITTLE_F16, i == 0, to, at, m->w_stride, soon, x, m->x_stride, n);
                    else tile_of(R, N, LITTLE_BF16, i == 0, to, at, m->w_stride, soon, x, m->x_stride, n);
                }
            }
            for (int j = 0; j < N; j++) finish(m->y + (size_t)(t + j) * m->y_stride + o, lanes + j * 16, N, rows, m->round);
        }
    }
}

/* to [groups][steps of 16][N][16] = x, a group of N tokens after the other, filled up with zeros. The workers share the groups. */
static TARGET void pack_tokens(const product *m, float *to, int worker, int workers) {
    const int groups = groups_of(m->T);
    const size_t size = whole_steps(m->n);
    for (int g = worker; g < groups; g += workers) {
        const int t = m->T * g / groups, N = m->T * (g + 1) / groups - t;
        for (int j = 0; j < N; j++) {
            const float *x = m->x + (size_t)(t + j) * m->x_stride;
            float *p = to + (size_t)t * size + j * 16;
            int i = 0;
            for (; i + 16 <= m->n; i += 16, p += N * 16)
                for (int part = 0; part < PARTS; part++) store(p + part * LANES, load(x + i + part * LANES));
            for (int k = 0; i < m->n && k < 16; k++) p[k] = i + k < m->n ? x[i + k] : 0;
        }
    }
}

/* to [PANEL / ROWS][BLOCK / 16][ROWS][16] = n <= BLOCK weights, from element `first` on, of `rows` rows from `row` on, widened; missing ones are zeros */
static TARGET void pack_weights(float *to, const product *m, int row, int rows, int first, int n) {
    const g4_type *type = &g4_types[m->type];
    const unsigned char *from = m->w + (size_t)row * m->w_stride + (size_t)(first / type->block) * (size_t)type->bytes;
    float w[BLOCK];
    for (int r = 0; r < (rows + ROWS - 1) / ROWS * ROWS; r++) {
        if (r < rows) widen_row(w, from + r * m->w_stride, m->type, m->round, n);
        else memset(w, 0, sizeof w);
        for (int k = n; k % 16; k++) w[k] = 0;
        float *p = to + r / ROWS * ROWS * BLOCK + r % ROWS * 16;
        for (int k = 0; k < n; k += 16, p += ROWS * 16)
            for (int part = 0; part < PARTS; part++) store(p + part * LANES, load(w + k + part * LANES));
    }
}

/* lanes [ROWS][N][16], which begin with 0 if `fresh`, += ROWS rows of packed weights by N packed tokens */
static INLINE TARGET void packed_tile(int N, int fresh, float *lanes, const float *w, const float *x, int steps) {
    vec a[4][TOKENS][PARTS];
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int t = 0; t < N; t++)
            UNROLL for (int p = 0; p < PARTS; p++) a[r][t][p] = fresh ? (vec){0} : load(lanes + (r * N + t) * 16 + p * LANES);
    for (int i = 0; i < steps; i++, w += ROWS * 16, x += N * 16) step(ROWS, N, HOST_FLOATS, a, (const unsigned char *)w, 64, x, 16);
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int t = 0; t < N; t++)
            UNROLL for (int p = 0; p < PARTS; p++) store(lanes + (r * N + t) * 16 + p * LANES, a[r][t][p]);
}

/* Rows begin .. end - 1 of a product of at most MOST tokens, packed by pack_tokens(). work [WORK] is the thread's own. */
static TARGET void packed_rows(const product *m, const float *packed, float *work, int begin, int end) {
    const g4_type *type = &g4_types[m->type];
    const int groups = groups_of(m->T);
    float *w = work, *lanes = work + PANEL * BLOCK;
    for (int o = begin; o < end; o += PANEL) {
        const int rows = MIN(PANEL, end - o);
        for (int i = 0; i < m->n; i += BLOCK) {
            const int n = MIN(BLOCK, m->n - i), steps = (n + 15) / 16;
            pack_weights(w, m, o, rows, i, n);
            /* The next block of these rows, or the first of the rows after them, is fetched while this one is used. */
            const int next = i + BLOCK < m->n ? i + BLOCK : 0, bytes = (MIN(BLOCK, m->n - next) + type->block - 1) / type->block * type->bytes;
            const unsigned char *soon = m->w + (size_t)(next ? o : o + PANEL) * m->w_stride + (size_t)(next / type->block) * (size_t)type->bytes;
            for (int g = 0; g < groups; g++) {
                const int t = m->T * g / groups, N = m->T * (g + 1) / groups - t;
                const float *x = packed + (size_t)t * whole_steps(m->n) + (size_t)i * N;
                for (int r = PANEL * g / groups; r < PANEL * (g + 1) / groups; r++) fetch(soon + r * m->w_stride, bytes);
                for (int r = 0; r < rows; r += ROWS) {
                    float *to = lanes + (t * PANEL + r * N) * 16;
                    const float *from = w + (size_t)r * BLOCK;
                    if (N == GROUP) packed_tile(GROUP, i == 0, to, from, x, steps);
                    else if (N == GROUP - 1) packed_tile(GROUP - 1, i == 0, to, from, x, steps);
#if GROUP > 3
                    else packed_tile(GROUP - 2, i == 0, to, from, x, steps);
#endif
                }
            }
        }
        for (int g = 0; g < groups; g++) {
            const int t = m->T * g / groups, N = m->T * (g + 1) / groups - t;
            for (int j = 0; j < N; j++) finish(m->y + (size_t)(t + j) * m->y_stride + o, lanes + (t * PANEL + j) * 16, N, rows, m->round);
        }
    }
}

/* ---- The sum over V --------------------------------------------------------------------------------------------------------- */

/* o [heads][dh] += p [heads][n] v [n][dh] for VECTORS vectors of columns, key after key. As many bytes of v as that are fetched from `soon` on. */
static INLINE TARGET void sum_tile(int heads, int VECTORS, float *o, const float *p, size_t p_stride, const float *v, int dh, int n, const float *soon) {
    vec a[4][4];
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int c = 0; c < VECTORS; c++) a[h][c] = load(o + (size_t)h * dh + c * LANES);
    for (int j = 0; j < n; j++) {
        vec x[4];
        UNROLL for (int c = 0; c < VECTORS; c++) {
            x[c] = load(v + (size_t)j * dh + c * LANES);
            if (c * LANES % 16 == 0 && soon) PREFETCH_2(soon + (j * VECTORS + c) * LANES);
        }
        UNROLL for (int h = 0; h < heads; h++) {
            float weight = p[h * p_stride + j];
            UNROLL for (int c = 0; c < VECTORS; c++) a[h][c] += weight * x[c];
        }
    }
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int c = 0; c < VECTORS; c++) store(o + (size_t)h * dh + c * LANES, a[h][c]);
}

/* o [heads][dh] += p [heads][n] v [n][dh], columns begin .. end - 1. The n keys after these come next: each column fetches as many of their bytes. */
static TARGET void sum_over_keys(float *o, const float *p, size_t p_stride, const float *v, int heads, int dh, int n, int begin, int end) {
    enum { VECTORS = LANES == 16 ? 4 : 2, WIDTH = VECTORS * LANES };
    for (int h = 0, some; h < heads; h += some) {
        some = heads - h >= 4 ? 4 : heads - h >= 2 ? 2 : 1;
        float *oh = o + (size_t)h * dh;
        const float *ph = p + h * p_stride;
        int c = begin;
        for (; c + WIDTH <= end; c += WIDTH) {
            const float *soon = h ? NULL : v + (size_t)n * dh + (size_t)n * c;
            if (some == 4) sum_tile(4, VECTORS, oh + c, ph, p_stride, v + c, dh, n, soon);
            else if (some == 2) sum_tile(2, VECTORS, oh + c, ph, p_stride, v + c, dh, n, soon);
            else sum_tile(1, VECTORS, oh + c, ph, p_stride, v + c, dh, n, soon);
        }
        for (; c + LANES <= end; c += LANES) {
            if (some == 4) sum_tile(4, 1, oh + c, ph, p_stride, v + c, dh, n, NULL);
            else if (some == 2) sum_tile(2, 1, oh + c, ph, p_stride, v + c, dh, n, NULL);
            else sum_tile(1, 1, oh + c, ph, p_stride, v + c, dh, n, NULL);
        }
        for (; c < end; c++)
            for (int i = 0; i < some; i++)
                for (int j = 0; j < n; j++) oh[(size_t)i * dh + c] += ph[i * p_stride + j] * v[(size_t)j * dh + c];
    }
}

static const kernels table = {.products = product_rows, .pack = pack_tokens, .packed_products = packed_rows, .integers_of = make_integers, .integer_products = integer_rows,
                              .pack_as_integers = pack_integers, .packed_integer_products = packed_integer_rows, .weight_bytes = 4 / NEIGHBOURS, .many = LANES == 8 ? 12 : 6,
                              .weighted_sum = sum_over_keys, .softmax = softmax_row, .gelu_mul = gelu_mul_row, .softcap = softcap_row,
                              .norm = norm_row, .rope = rope_row, .exp = exp_row};

#undef PARTS
#undef KEEP
#undef SHIFT
#undef CHUNK
#undef X_BYTES
#undef EACH_TYPE
#undef TAKE
#undef TAKE_OF
#undef ONE_TOKEN
#undef FOR_TYPE
#undef HALF
#undef TO_WIDE
#undef TO_HALF
#undef TO_VEC
#undef TO_INTS
#undef TO_DIGITS
#undef VEC_SELECT
#undef BITS

#endif
