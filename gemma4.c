/* gemma4.c - the forward pass of the Gemma 4 text models, from config and weights to logits, in scalar C.
 *
 * This file is the project's oracle: whatever the compiler, processor, thread count, chunk size or batch, it gives the same
 * bits, and every other backend is judged against it. To be so it keeps a few rules (README, "One set of bits"):
 *   - float is IEEE binary32, no contraction, no reassociation;
 *   - every dot product adds into 16 lanes, element i into lane i % 16, and the lanes are then added pairwise (8, 4, 2, 1);
 *   - quantised weights meet activations as integers, group by group, where no order changes a sum; a group's sum is then one such element;
 *   - exp, tanh, sin, cos, log and pow are our own, made of + - * / and sqrt, so no libm decides a bit;
 *   - a thread owns whole outputs: there is no reduction across threads.
 *
 * It is not fast where that would cost a reader anything: fast paths live in the backend files and give the same bits.
 *
 * Reading order: forward() is the model, read that first. Above it stand the operations it lists, each one loop nest; above those the
 * elementwise functions. Below it: the state (caches, scratch), rows and truncation, and opening a model.
 */
#define G4_EXACT_FLOAT
#include "gemma4.h"

#include <float.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

int g4_fail(g4_error *err, const char *format, ...) {
    if (err) {
        va_list args;
        va_start(args, format);
        vsnprintf(err->text, sizeof err->text, format, args);
        va_end(args);
        for (char *c = err->text; *c; c++) /* one line, whatever a path or a name in a file holds */
            if ((unsigned char)*c < 0x20 || *c == 0x7f) *c = '?';
    }
    return -1;
}

/* ---- Elementwise functions --------------------------------------------------------------------------------------------
 *
 * Computed in binary64 and rounded once: each result is the float32 nearest to the exact value, but for 6 of the 1.1e10 inputs that
 * test/test_ulp.c tries, whose exact value lies within 1e-9 ulp of a tie. Beside each function stands its worst error in ulp, of all
 * float32 inputs in the range, and where that is.
 */

/* 2^k, -1022 <= k <= 1023. */
static double power_of_two(int k) {
    uint64_t bits = (uint64_t)(k + 1023) << 52;
    double y;
    memcpy(&y, &bits, sizeof y);
    return y;
}

/* e^x for |x| <= 700. x = k ln 2 + r, |r| <= ln 2 / 2, then the Taylor series of e^r up to r^12 / 12!: what is left out is below 2e-16. */
static double exp_double(double x) {
    const double to_integer = 6755399441055744.0; /* 1.5 * 2^52: adding it rounds to an integer */
    double k = (x * 1.4426950408889634 + to_integer) - to_integer;
    /* ln 2 in two parts, the first short enough that k times it is exact */
    double r = (x - k * 0x1.62e42fee00000p-1) - k * 0x1.a39ef35793c76p-33;
    double y = 1.0 / 479001600;
    y = y * r + 1.0 / 39916800;
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
    return y * power_of_two((int)k);
}

/* ln x for normal x > 0. x = m 2^e, sqrt(1/2) <= m < sqrt 2; ln m = 2 (s + s^3/3 + s^5/5 + ...) with s = (m - 1) / (m + 1), |s| <= 0.172. */
static double log_double(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    int e = (int)(bits >> 52) - 1023;
    bits = (bits & 0xfffffffffffffu) | 0x3ff0000000000000u;
    double m;
    memcpy(&m, &bits, sizeof m);
    if (m > 1.4142135623730951) {
        m *= 0.5;
        e++;
    }
    double s = (m - 1) / (m + 1), z = s * s, sum = 0;
    for (int i = 21; i >= 3; i -= 2) sum = (sum + 1.0 / i) * z;
    return e * 0x1.62e42fee00000p-1 + (e * 0x1.a39ef35793c76p-33 + 2 * s * (1 + sum));
}

double g4_exp(double x) { return x != x ? x : x < -700 ? 0 : x > 700 ? HUGE_VAL : exp_double(x); }

double g4_log(double x) { return log_double(x); }

/* -104 to 88.7228: 0.4999999976 ulp at -0x1.d2259ap+3. Results below the smallest subnormal are 0, above FLT_MAX infinity. */
float g4_expf(float x) {
    if (!(x > -110)) return x != x ? x : 0;
    if (x > 90) return INFINITY;
    return (float)exp_double(x);
}

/* -12 to 12: 0.4999999906 ulp at 0x1.86fbc4p-10. */
float g4_tanhf(float x) {
    double t = fabs((double)x), z = t * t, y;
    if (t < 0.02) return (float)(x - x * z * (1.0 / 3 - z * (2.0 / 15 - z * (17.0 / 315)))); /* the quotient below would cancel */
    if (t > 10) return x > 0 ? 1.0f : -1.0f;
    if (x != x) return x;
    y = exp_double(2 * t);
    y = (y - 1) / (y + 1);
    return (float)(x > 0 ? y : -y);
}

/* 0 to 4e7: sin 0.5000000007 ulp at 0x1.33333p+13, cos 0.4999999983 ulp at 0x1.20ffccp-7. x = n pi/2 + r, |r| <= pi/4: pi/2 in three parts, the first two short enough (28 bits) that n times them is
 * exact; then Taylor series. What is left out is below 1e-16. */
void g4_sincosf(float x, float *sin_x, float *cos_x) {
    const double to_integer = 6755399441055744.0;
    double n = (x * 0.63661977236758134 + to_integer) - to_integer;
    double r = ((x - n * 0x1.921fb54000000p+0) - n * 0x1.10b4610000000p-30) - n * 0x1.a62633145c06ep-58;
    double z = r * r;
    double s = -1.0 / 1307674368000;
    s = s * z + 1.0 / 6227020800;
    s = s * z - 1.0 / 39916800;
    s = s * z + 1.0 / 362880;
    s = s * z - 1.0 / 5040;
    s = s * z + 1.0 / 120;
    s = s * z - 1.0 / 6;
    s = s * z * r + r;
    double c = 1.0 / 20922789888000;
    c = c * z - 1.0 / 87178291200;
    c = c * z + 1.0 / 479001600;
    c = c * z - 1.0 / 3628800;
    c = c * z + 1.0 / 40320;
    c = c * z - 1.0 / 720;
    c = c * z + 1.0 / 24;
    c = c * z - 0.5;
    c = c * z + 1.0;
    int quadrant = (int)n & 3;
    double a = quadrant & 1 ? c : s, b = quadrant & 1 ? s : c;
    *sin_x = (float)(quadrant & 2 ? -a : a);
    *cos_x = (float)(quadrant == 1 || quadrant == 2 ? -b : b);
}

/* All x > 0: 0.5000000009 ulp at 0x1.6351d8p+95. */
float g4_logf(float x) { return (float)log_double(x); }

/* Exponents 0 to 1, as for inv_freq: base 1e4 0.4999999961 ulp at 0x1.62623ep-22, base 1e6 0.4999999967 ulp at 0x1.5d0024p-7. */
float g4_powf(float base, float exponent) { return (float)exp_double(exponent * log_double(base)); }

/* As torch writes it, so that float32 rounds at the same places. -100 to 100, in ulp of x: 1.6213 at 0x1.fff298p-1. */
float g4_gelu_tanh(float x) {
    float inner = 0.7978845608f * (x + 0.044715f * (x * x * x)); /* sqrt(2 / pi) */
    return 0.5f * x * (1.0f + g4_tanhf(inner));
}

float g4_bf16_round(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return x; /* the sum below could turn a NaN into infinity */
    bits = (bits + 0x7fffu + (bits >> 16 & 1)) & 0xffff0000u;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* ---- Weights ----------------------------------------------------------------------------------------------------------- */

/* A little-endian field of a file; the branch is decided by the compiler. */
static inline uint16_t load16(const unsigned char *p) {
    const uint16_t one = 1;
    uint16_t v;
    memcpy(&v, p, sizeof v);
    return *(const unsigned char *)&one ? v : (uint16_t)(v << 8 | v >> 8);
}

static inline float float_of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* w [n] = elements first .. first + n - 1 of a row-major weight, whole blocks of its type; in bf16 precision rounded, as loading with
 * dtype=bfloat16 does. */
static void widen(const g4_run *run, const g4_tensor *W, size_t first, int n, float *w) {
    const g4_type *type = &g4_types[W->type];
    g4_widen(W->type, w, (const unsigned char *)W->data + first / (size_t)type->block * (size_t)type->bytes, n);
    if (run->precision == G4_BF16 && W->type != G4_TYPE_BF16)
        for (int i = 0; i < n; i++) w[i] = g4_bf16_round(w[i]);
}

/* An activation as the chosen precision stores it. */
static inline float rounded(const g4_run *run, float x) { return run->precision == G4_BF16 ? g4_bf16_round(x) : x; }

/* ---- The dot product: 16 lanes ----------------------------------------------------------------------------------------- */

/* lane [16] += a [n] * b [n], element i into lane i % 16, one rounding for the product and one for the sum. */
static inline void dot_lanes(float *lane, const float *a, const float *b, int n) {
    int i = 0;
    for (; i + 16 <= n; i += 16)
        for (int j = 0; j < 16; j++) lane[j] += a[i + j] * b[i + j];
    for (int j = 0; i + j < n; j++) lane[j] += a[i + j] * b[i + j];
}

static inline float add_lanes(float *lane) {
    for (int k = 8; k; k /= 2)
        for (int j = 0; j < k; j++) lane[j] += lane[j + k];
    return lane[0];
}

static float dot(const float *a, const float *b, int n) {
    float lane[16] = {0};
    dot_lanes(lane, a, b, n);
    return add_lanes(lane);
}

/* Row `row` of W times x [W->cols]. bfloat16, which most checkpoints are, is widened on the way; other types block by block. */
static float dot_row(const g4_run *run, const g4_tensor *W, int64_t row, const float *x) {
    float lane[16] = {0};
    int n = (int)W->cols;
    if (W->type == G4_TYPE_BF16) {
        const unsigned char *p = (const unsigned char *)W->data + 2 * (size_t)row * n;
        int i = 0;
        for (; i + 16 <= n; i += 16)
            for (int j = 0; j < 16; j++) lane[j] += float_of_bits((uint32_t)load16(p + 2 * (i + j)) << 16) * x[i + j];
        for (int j = 0; i + j < n; j++) lane[j] += float_of_bits((uint32_t)load16(p + 2 * (i + j)) << 16) * x[i + j];
        return add_lanes(lane);
    }
    float w[512]; /* a multiple of 16, so that the lanes go on where they stopped, and of every block */
    for (int i = 0; i < n; i += 512) {
        int m = MIN(512, n - i);
        widen(run, W, (size_t)row * n + i, m, w);
        dot_lanes(lane, w, x + i, m);
    }
    return add_lanes(lane);
}

/* ---- Products with quantised weights -----------------------------------------------------------------------------------
 *
 * A group of weights is a scale times small integers, so what costs is done in integers, in which a sum is the same in any order and with any instruction:
 *     x[i] = s X[i],  s a power of two,  |X[i]| < 2^bits           for a group of activations
 *     sum of (scale q[i] - min) x[i] = scale s (sum of q[i] X[i]) - min s (sum of X[i])
 * With 21 bits (19 where q has 8) the error is a few times that of float32 sums, some ten-thousandth of that of 8 bits; README, "Quantised weights".
 */

/* X [n] and s for x [n]. A group that is not finite gets NaN for s; X keeps fewer bits where all of x is below 2^-102, so that 1 / s is a float. In q16
 * precision X is at most what two signed bytes hold, and s no power of two: the largest of x gets exactly that, since here each bit counts. */
static float to_integers(const g4_run *run, int32_t *X, const float *x, int n, int bits) {
    const float to_integer = 12582912.0f, limit = run->precision == G4_Q16 ? 32639 : (float)((1 << bits) - 1); /* 1.5 * 2^23: adding it rounds to an integer, ties to even */
    uint32_t max = 0;
    for (int i = 0; i < n; i++) {
        uint32_t magnitude;
        memcpy(&magnitude, &x[i], sizeof magnitude);
        max = MAX(max, magnitude & 0x7fffffff); /* positive floats are ordered as their bits are */
    }
    int finite = max < 0x7f800000, e = MAX((int)(max >> 23), 24) - 126; /* |x| < 2^e */
    float one_over_s = (float)power_of_two(bits - e), s = (float)power_of_two(e - bits);
    if (run->precision == G4_Q16) {
        float largest = MAX(float_of_bits(max), 0x1p-102f);
        one_over_s = limit / largest, s = largest / limit;
    }
    for (int i = 0; i < n; i++) {
        float rounded_x = finite ? (x[i] * one_over_s + to_integer) - to_integer : 0;
        X[i] = (int32_t)MAX(-limit, MIN(limit, rounded_x));
    }
    return finite ? s : NAN;
}

/* y [T][rows] = W x. Rows are taken SOME at a time, so that their activations are made integers once. */
static void matmul_quantised(const g4_run *run, float *y, const g4_tensor *W, const float *x, int T) {
    enum { SOME = 32 };
    const g4_type *type = &g4_types[W->type];
    const int rows = (int)W->rows, cols = (int)W->cols, group = type->group, groups = type->block / group;
    const size_t row_bytes = g4_row_bytes(W);
#pragma omp parallel for schedule(static) num_threads(run->threads)
    for (int first = 0; first < rows; first += SOME)
        for (int t = 0; t < T; t++) {
            float lane[SOME][16] = {{0}};
            const int some = MIN(SOME, rows - first);
            const unsigned char *block = (const unsigned char *)W->data + (size_t)first * row_bytes;
            for (int i = 0, number = 0; i < cols; i += type->block, number += groups, block += type->bytes) {
                int32_t X[256], sum_X[16] = {0};
                float s[16];
                for (int g = 0; g < groups; g++) {
                    s[g] = to_integers(run, X + g * group, x + (size_t)t * cols + i + g * group, group, type->bits);
                    for (int k = 0; k < group; k++) sum_X[g] += X[g * group + k];
                }
                for (int r = 0; r < some; r++) {
                    g4_block b;
                    type->unpack(&b, block + (size_t)r * row_bytes);
                    for (int g = 0; g < groups; g++) {
                        int32_t sum = 0;
                        for (int k = 0; k < group; k++) sum += b.q[g * group + k] * X[g * group + k];
                        float product = (float)sum * b.scale[g] * s[g];
                        if (type->mins) product -= (float)sum_X[g] * s[g] * b.min[g];
                        lane[r][(number + g) % 16] += product;
                    }
                }
            }
            for (int r = 0; r < some; r++) y[(size_t)t * rows + first + r] = add_lanes(lane[r]);
        }
}

/* ---- The operations, in the order in which forward() meets them --------------------------------------------------------
 *
 * Each is the scalar version of the entry of g4_backend that bears its name; the shapes stand there. Loops over threads are OpenMP's when the compiler has
 * it; the pragma is ignored when it has not.
 */

static void embed(const g4_run *run, float *y, const g4_tensor *table, const int32_t *token, int T, float scale) {
    int n = (int)table->cols;
    scale = rounded(run, scale); /* transformers keeps the factor in the dtype of the table */
#pragma omp parallel for schedule(static) num_threads(run->threads)
    for (int t = 0; t < T; t++) {
        float *row = y + (size_t)t * n;
        widen(run, table, (size_t)token[t] * n, n, row);
        for (int i = 0; i < n; i++) row[i] = rounded(run, row[i] * scale);
    }
}

static void matmul(const g4_run *run, float *y, const g4_tensor *W, const float *x, int T) {
    int rows = (int)W->rows, cols = (int)W->cols;
    if (g4_types[W->type].unpack && run->precision != G4_BF16) {
        matmul_quantised(run, y, W, x, T);
        return;
    }
#pragma omp parallel for schedule(static) num_threads(run->threads)
    for (int o = 0; o < rows; o++)
        for (int t = 0; t < T; t++) y[(size_t)t * rows + o] = rounded(run, dot_row(run, W, o, x + (size_t)t * cols));
}

/* RMSNorm. The weight is used as it is: no (1 + w), unlike Gemma 1 to 3. eps stands inside the root. */
static void norm(const g4_run *run, float *y, const float *x, const g4_tensor *w, int n, int dim, float eps) {
#pragma omp parallel for schedule(static) num_threads(run->threads)
    for (int t = 0; t < n; t++) {
        const float *in = x + (size_t)t * dim;
        float *out = y + (size_t)t * dim, weight[512];
        float inverse = 1.0f / sqrtf(dot(in, in, dim) / (float)dim + eps);
        for (int i = 0; i < dim; i += 512) {
            int m = MIN(512, dim - i);
            if (w) widen(run, w, (size_t)i, m, weight);
            for (int j = 0; j < m; j++) out[i + j] = rounded(run, w ? in[i + j] * inverse * weight[j] : in[i + j] * inverse);
        }
    }
}

/* The angle is a float32 product, as in transformers: "better" angles in float64 would be other angles. */
static void rope_table(const g4_run *run, float *c, float *s, const float *inv_freq, const int32_t *pos, int T, int half) {
#pragma omp parallel for schedule(static) num_threads(run->threads)
    for (int t = 0; t < T; t++)
        for (int i = 0; i < half; i++) {
            size_t at = (size_t)t * half + i;
            g4_sincosf((float)pos[t] * inv_freq[i], &s[at], &c[at]);
            s[at] = rounded(run, s[at]);
            c[at] = rounded(run, c[at]);
        }
}

/* Pairs are (i, i + dh/2) across the whole head, also where only a part of it rotates (there the other angles are 0). */
static void rope(const g4_run *run, float *x, const float *c, const float *s, int T, int heads, int dh) {
    int half = dh / 2;
#pragma omp parallel for schedule(static) num_threads(run->threads)
    for (int t = 0; t < T; t++)
        for (int h = 0; h < heads; h++) {
            float *a = x + ((size_t)t * heads + h) * dh, *b = a + half;
            const float *ct = c + (size_t)t * half, *st = s + (size_t)t * half;
            for (int i = 0; i < half; i++) {
                float ai = a[i], bi = b[i];
                a[i] = rounded(run, rounded(run, ai * ct[i]) - rounded(run, bi * st[i]));
                b[i] = rounded(run, rounded(run, bi * ct[i]) + rounded(run, ai * st[i]));
            }
        }
}

/* Where head g of position pos of sequence seq begins in a cache [n_seqs][G][R][dh]. */
static size_t kv_offset(const g4_kv *kv, int seq, int g, int pos) {
    return (((size_t)seq * kv->G + g) * kv->R + (size_t)(pos % kv->R)) * kv->dh;
}

static void kv_store(const g4_run *run, const g4_kv *kv, const float *k, const float *v, const g4_rows *rows) {
    (void)run;
    for (int t = 0; t < rows->T; t++)
        for (int g = 0; g < kv->G; g++) {
            size_t from = ((size_t)t * kv->G + g) * kv->dh, to = kv_offset(kv, rows->seq[t], g, rows->pos[t]);
            memcpy(kv->k + to, k + from, sizeof(float) * kv->dh);
            memcpy(kv->v + to, v + from, sizeof(float) * kv->dh);
        }
}

/* Query i sees the keys j with j <= i and, on sliding layers, j > i - W: W keys, itself included. */
static void attention(const g4_run *run, const g4_attention_args *a) {
    const g4_kv *kv = a->kv;
    int H = a->H, dh = kv->dh, items = a->rows->T * H;
#pragma omp parallel for schedule(static) num_threads(run->threads)
    for (int worker = 0; worker < run->threads; worker++) {
        float *score = a->scores + (size_t)worker * a->score_rows * a->ctx;
        for (int item = worker; item < items; item += run->threads) {
            int t = item / H, g = item % H / (H / kv->G); /* H / G query heads share a K/V head */
            int seq = a->rows->seq[t], pos = a->rows->pos[t], first = MAX(0, pos - kv->window + 1), n = pos - first + 1;
            const float *q = a->q + (size_t)item * dh;
            float *o = a->o + (size_t)item * dh, max = -INFINITY, lane[16] = {0};
            for (int j = 0; j < n; j++) {
                /* the scale is 1.0: q_norm and k_norm stand in for 1 / sqrt(dh) */
                score[j] = rounded(run, dot(q, kv->k + kv_offset(kv, seq, g, first + j), dh));
                if (score[j] > max) max = score[j];
            }
            for (int j = 0; j < n; j++) {
                score[j] = g4_expf(score[j] - max);
                lane[j % 16] += score[j];
            }
            float sum = add_lanes(lane);
            for (int i = 0; i < dh; i++) o[i] = 0;
            for (int j = 0; j < n; j++) {
                float p = rounded(run, score[j] / sum);
                const float *v = kv->v + kv_offset(kv, seq, g, first + j);
                for (int i = 0; i < dh; i++) o[i] += p * v[i];
            }
            for (int i = 0; i < dh; i++) o[i] = rounded(run, o[i]);
        }
    }
}

static void gelu_mul(const g4_run *run, float *gate, const float *up, int T, int n, size_t stride) {
#pragma omp parallel for schedule(static) num_threads(run->threads)
    for (int part = 0; part < run->threads; part++) { /* by columns, so that one row keeps all threads busy */
        int begin = (int)((int64_t)n * part / run->threads), end = (int)((int64_t)n * (part + 1) / run->threads);
        for (int t = 0; t < T; t++)
            for (int i = begin; i < end; i++) {
                float *g = gate + (size_t)t * n + i;
                *g = rounded(run, rounded(run, g4_gelu_tanh(*g)) * up[t * stride + i]);
            }
    }
}

static void add(const g4_run *run, float *y, const float *x, size_t n) {
    for (size_t i = 0; i < n; i++) y[i] = rounded(run, y[i] + x[i]);
}

static void scale(const g4_run *run, float *y, const g4_tensor *s, size_t n) {
    float factor;
    widen(run, s, 0, 1, &factor);
    for (size_t i = 0; i < n; i++) y[i] = rounded(run, y[i] * factor);
}

/* Three factors: 1/sqrt(D) on the projection, sqrt(P) on the table's row (embed applied it), 1/sqrt(2) on their sum. */
static void ple(const g4_run *run, const g4_ple_args *a) {
    size_t n = (size_t)a->T * a->L * a->P;
    float root = (float)(1 / sqrt((double)a->D));
    for (size_t i = 0; i < n; i++) a->b[i] = rounded(run, a->b[i] * root);
    norm(run, a->b, a->b, a->norm, a->T * a->L, a->P, a->eps);
    for (size_t i = 0; i < n; i++) a->p[i] = rounded(run, rounded(run, a->b[i] + a->p[i]) * 0.70710678f);
}

/* Softmax over all experts, the K largest, divided by their sum, then times per_expert_scale: not normalised again. */
static void router(const g4_run *run, const g4_router_args *a) {
    int D = a->D, E = a->E;
    float root = (float)(1 / sqrt((double)D)), w[512];
    norm(run, a->n, a->h, NULL, a->T, D, a->eps);
    for (int t = 0; t < a->T; t++)
        for (int i = 0; i < D; i += 512) {
            int m = MIN(512, D - i);
            widen(run, &a->layer->router_scale, (size_t)i, m, w);
            float *n = a->n + (size_t)t * D + i;
            for (int j = 0; j < m; j++) n[j] = rounded(run, rounded(run, n[j] * w[j]) * root);
        }
    run->backend->matmul(run, a->logits, &a->layer->router_proj, a->n, a->T);
    for (int t = 0; t < a->T; t++) {
        float *p = a->logits + (size_t)t * E, max = -INFINITY, lane[16] = {0};
        for (int e = 0; e < E; e++) max = MAX(max, p[e]);
        for (int e = 0; e < E; e++) {
            p[e] = g4_expf(p[e] - max);
            lane[e % 16] += p[e];
        }
        float sum = add_lanes(lane), chosen = 0;
        for (int e = 0; e < E; e++) p[e] /= sum;
        int n = 0;
        for (int e = 0; e < E && n < a->K; e++) { /* ascending; e is chosen if fewer than K come before it, ties to the lowest */
            int before = 0;
            for (int f = 0; f < E; f++) before += p[f] > p[e] || (p[f] == p[e] && f < e);
            if (before < a->K) a->index[t * a->K + n++] = e;
        }
        for (int k = 0; k < a->K; k++) chosen += p[a->index[t * a->K + k]];
        for (int k = 0; k < a->K; k++) {
            int e = a->index[t * a->K + k];
            widen(run, &a->layer->per_expert_scale, (size_t)e, 1, w);
            a->weight[t * a->K + k] = p[e] / chosen * w[0];
        }
    }
}

/* Matrix e of a weight that holds one [rows][cols] matrix per expert. */
static g4_tensor expert_matrix(const g4_tensor *W, int e, int64_t rows) {
    g4_tensor one = *W;
    one.data = (const unsigned char *)W->data + (size_t)e * (size_t)rows * g4_row_bytes(W);
    one.rows = rows;
    return one;
}

static void experts(const g4_run *run, const g4_experts_args *a) {
    int D = a->D, Fe = a->Fe;
    for (int t = 0; t < a->T; t++) {
        float *y = a->y + (size_t)t * D;
        for (int i = 0; i < D; i++) y[i] = 0;
        for (int k = 0; k < a->K; k++) { /* in ascending expert order */
            int e = a->index[t * a->K + k];
            float weight = a->weight[t * a->K + k];
            const g4_layer *layer = a->layer;
            int apart = layer->experts_up_proj.data != NULL;
            g4_tensor gate_up = expert_matrix(&layer->experts_gate_up_proj, e, apart ? Fe : 2 * Fe);
            g4_tensor up = expert_matrix(&layer->experts_up_proj, e, Fe);
            g4_tensor down = expert_matrix(&layer->experts_down_proj, e, D);
            run->backend->matmul(run, a->gate_up, &gate_up, a->x + (size_t)t * D, 1);
            if (apart) run->backend->matmul(run, a->gate_up + Fe, &up, a->x + (size_t)t * D, 1);
            run->backend->gelu_mul(run, a->gate_up, a->gate_up + Fe, 1, Fe, 0);
            run->backend->matmul(run, a->down, &down, a->gate_up, 1);
            for (int i = 0; i < D; i++) y[i] = rounded(run, y[i] + rounded(run, a->down[i] * weight));
        }
    }
}

static void gather_rows(const g4_run *run, float *y, const float *x, const int32_t *index, int n, size_t width) {
    (void)run;
    for (int t = 0; t < n; t++) memcpy(y + t * width, x + index[t] * width, sizeof(float) * width);
}

/* c * tanh(y / c), not y * tanh(y / c). */
static void softcap(const g4_run *run, float *y, size_t n, float c) {
#pragma omp parallel for schedule(static) num_threads(run->threads)
    for (int64_t i = 0; i < (int64_t)n; i++) y[i] = rounded(run, rounded(run, g4_tanhf(rounded(run, y[i] / c))) * c);
}

static void *scalar_alloc(size_t bytes) { return calloc(1, bytes); }

static int scalar_copy(void *dst, const void *src, size_t bytes) {
    memcpy(dst, src, bytes);
    return 0;
}

const g4_backend g4_backend_scalar = {
    .name = "scalar", .host_memory = 1, .alloc = scalar_alloc, .release = free, .upload = scalar_copy, .download = scalar_copy,
    .embed = embed, .matmul = matmul, .norm = norm, .rope_table = rope_table, .rope = rope, .kv_store = kv_store, .attention = attention,
    .gelu_mul = gelu_mul, .add = add, .scale = scale, .ple = ple, .router = router, .experts = experts, .gather_rows = gather_rows,
    .softcap = softcap,
};

/* ---- The state --------------------------------------------------------------------------------------------------------- */

struct g4_state {
    const g4_model *model;
    g4_state_options options; /* defaults filled in */
    g4_run run;
    int logit_rows;           /* rows of the head computed at once */
    int half[2];              /* dh/2, by g4_layer_type; 0: no such layer */
    int score_rows;           /* the largest H / G of any layer */
    int expert_rows;          /* rows of one expert computed at once, at most */

    /* in the backend's memory: one allocation, laid out by lay_out(). C is options.chunk. */
    void *memory;
    g4_kv *kv;                /* [L], host; k and v NULL on layers that share */
    g4_rows rows, wanted;     /* all rows of a step; those that want logits */
    int32_t *wanted_index;    /* [C] row numbers of `wanted` in `rows` */
    float *h, *n, *t;         /* [C][D] residual stream; normed input; output of a block */
    float *q, *o;             /* [C][H][dh] */
    float *k, *v;             /* [C][G][dh] */
    float *gate, *up;         /* [C][F] */
    float *p, *b;             /* [C][L][P] */
    float *cos[2], *sin[2];   /* [C][dh/2], by g4_layer_type */
    float *scores;            /* [threads][score_rows][ctx] */
    int32_t *expert_index;    /* [C][K] */
    float *expert_weight;     /* [C][K] */
    float *router_logits;     /* [C][E] */
    float *expert_gate_up;    /* [expert_rows][2*Fe] */
    float *expert_down;       /* [expert_rows][D] */
    float *moe;               /* [C][D] sum of the experts */
    float *logits;            /* [logit_rows][V]; device backends only */

    /* host */
    int *length;              /* [n_seqs] tokens held */
    int *oldest;              /* [n_seqs] the first position that the sliding layers' rings still hold; what was before it is overwritten */
    int ring;                 /* R of the sliding layers; ctx if there are none */
    int *count;               /* [n_seqs] scratch of g4_forward */
    int32_t *host_rows;       /* [6][C] scratch of g4_forward: token, seq, pos, index of the wanted rows, their seq and pos */

    g4_trace_fn *trace;
    void *trace_user;
};

/* ---- forward ----------------------------------------------------------------------------------------------------------- */

/* Gives one buffer of the step, [T][a][b] (b 0: [T][a]), to the trace callback. */
static void trace(const g4_state *s, int layer, const char *name, const float *data, int T, int a, int b) {
    if (!s->trace) return;
    char full[64];
    int64_t shape[3] = {T, a, b};
    size_t bytes = sizeof(float) * (size_t)T * a * (b ? b : 1);
    float *host = NULL;
    if (layer < 0) snprintf(full, sizeof full, "%s", name);
    else snprintf(full, sizeof full, "layers.%d.%s", layer, name);
    if (!s->run.backend->host_memory) {
        host = malloc(bytes);
        if (!host || s->run.backend->download(host, data, bytes)) {
            free(host);
            return;
        }
    }
    s->trace(s->trace_user, full, host ? host : data, b ? 3 : 2, shape);
    free(host);
}

/* The same for what the router chose, as floats. */
static void trace_router(const g4_state *s, int layer, int T) {
    int K = s->model->config.top_k_experts;
    size_t n = (size_t)T * K;
    int32_t *index = s->trace ? malloc(n * sizeof *index) : NULL;
    float *as_float = s->trace ? malloc(n * sizeof *as_float) : NULL;
    if (index && as_float && !s->run.backend->download(index, s->expert_index, n * sizeof *index)) {
        char name[64];
        snprintf(name, sizeof name, "layers.%d.router_index", layer);
        for (size_t i = 0; i < n; i++) as_float[i] = (float)index[i];
        s->trace(s->trace_user, name, as_float, 2, (int64_t[]){T, K});
    }
    free(index);
    free(as_float);
    trace(s, layer, "router_weight", s->expert_weight, T, K, 0);
}

/* Two RoPE tables, one for each kind of layer: they differ in theta, head_dim and the share that rotates. */
static void rope_tables(g4_state *s, const g4_rows *rows) {
    for (int kind = 0; kind < 2; kind++)
        if (s->half[kind])
            s->run.backend->rope_table(&s->run, s->cos[kind], s->sin[kind], s->model->inv_freq[kind], rows->pos, rows->T, s->half[kind]);
}

/* One step: the rows in s->rows (T of them, at most a chunk) go through all layers; K/V caches grow; logits [s->wanted.T][V], host memory. The
 * straight list of operations below is the model. It never looks into a buffer: a device backend can run it as it stands. */
static int forward(g4_state *s, float *logits, g4_error *err) {
    const g4_model *m = s->model;
    const g4_config *c = &m->config;
    const g4_run *run = &s->run;
    const g4_backend *op = run->backend;
    const g4_rows *rows = &s->rows;
    const int D = c->hidden_size, L = c->num_hidden_layers, H = c->num_attention_heads, P = c->hidden_size_per_layer_input;
    const float eps = c->rms_norm_eps;
    const int last_kv_layer = L - c->num_kv_shared_layers - 1;
    int T = rows->T;
    float *h = s->h, *n = s->n, *t = s->t, *p = s->p, *b = s->b;

    /* Token embeddings, times sqrt(D): the looked-up row only, the table also serves as the head. */
    op->embed(run, h, &m->embed_tokens, rows->token, T, sqrtf((float)D));
    trace(s, -1, "embeddings", h, T, D, 0);

    /* Per-layer inputs: a second embedding with P numbers for each layer, mixed with a projection of the first. */
    if (P) {
        op->embed(run, p, &m->embed_tokens_per_layer, rows->token, T, sqrtf((float)P));
        op->matmul(run, b, &m->per_layer_model_projection, h, T);
        op->ple(run, &(g4_ple_args){.p = p, .b = b, .norm = &m->per_layer_projection_norm, .T = T, .L = L, .P = P, .D = D, .eps = eps});
        trace(s, -1, "per_layer_inputs", p, T, L, P);
    }

    rope_tables(s, rows);

    for (int l = 0; l < L; l++) {
        const g4_layer *w = &m->layers[l];
        const g4_layer_config *lc = &c->layers[l];
        const int dh = lc->head_dim, G = lc->num_key_value_heads, F = lc->intermediate_size;
        const float *cos = s->cos[lc->type], *sin = s->sin[lc->type];

        op->norm(run, n, h, &w->input_layernorm, T, D, eps);

        /* K and V, on layers that own them. V has a norm without weight and is not rotated; where K = V it starts from the raw K. */
        if (lc->kv_layer == l) {
            op->matmul(run, s->k, &w->k_proj, n, T);
            if (w->v_proj.data) op->matmul(run, s->v, &w->v_proj, n, T);
            op->norm(run, s->v, w->v_proj.data ? s->v : s->k, NULL, T * G, dh, eps);
            op->norm(run, s->k, s->k, &w->k_norm, T * G, dh, eps);
            op->rope(run, s->k, cos, sin, T, G, dh);
            op->kv_store(run, &s->kv[l], s->k, s->v, rows);
            trace(s, l, "k", s->k, T, G, dh);
            trace(s, l, "v", s->v, T, G, dh);
        }

        /* No later layer writes to a cache, so from here on only the rows whose logits are wanted matter. On E2B this spares a prompt
         * 20 of 35 layers, the wide ones. */
        if (l == last_kv_layer && s->wanted.T < T) {
            rows = &s->wanted;
            T = rows->T;
            if (!T) return 0;
            op->gather_rows(run, t, h, s->wanted_index, T, (size_t)D);
            op->gather_rows(run, h, n, s->wanted_index, T, (size_t)D);
            float *free_again = n;
            n = h, h = t, t = free_again;
            if (P) {
                op->gather_rows(run, b, p, s->wanted_index, T, (size_t)L * P);
                p = b;
            }
            rope_tables(s, rows);
        }

        /* Attention. Layers without K and V read their donor's, which are normed and rotated already. */
        op->matmul(run, s->q, &w->q_proj, n, T);
        op->norm(run, s->q, s->q, &w->q_norm, T * H, dh, eps);
        op->rope(run, s->q, cos, sin, T, H, dh);
        trace(s, l, "q", s->q, T, H, dh);
        op->attention(run, &(g4_attention_args){
            .o = s->o, .q = s->q, .kv = &s->kv[lc->kv_layer], .rows = rows, .H = H, .scores = s->scores, .score_rows = s->score_rows,
            .ctx = s->options.ctx});
        trace(s, l, "attention", s->o, T, H * dh, 0);
        op->matmul(run, t, &w->o_proj, s->o, T);
        trace(s, l, "o_proj", t, T, D, 0);
        op->norm(run, t, t, &w->post_attention_layernorm, T, D, eps);
        op->add(run, h, t, (size_t)T * D);
        trace(s, l, "attn_residual", h, T, D, 0);

        /* MLP: GeGLU, between two norms. */
        op->norm(run, n, h, &w->pre_feedforward_layernorm, T, D, eps);
        op->matmul(run, s->gate, &w->gate_proj, n, T);
        op->matmul(run, s->up, &w->up_proj, n, T);
        op->gelu_mul(run, s->gate, s->up, T, F, (size_t)F);
        op->matmul(run, t, &w->down_proj, s->gate, T);
        trace(s, l, "mlp", t, T, D, 0);

        /* MoE: experts beside the MLP, not instead of it. They and the router see the residual stream, each through a norm of its own. */
        if (c->num_experts) {
            op->norm(run, t, t, &w->post_feedforward_layernorm_1, T, D, eps);
            op->router(run, &(g4_router_args){
                .index = s->expert_index, .weight = s->expert_weight, .h = h, .layer = w, .T = T, .D = D, .E = c->num_experts,
                .K = c->top_k_experts, .eps = eps, .n = n, .logits = s->router_logits});
            trace_router(s, l, T);
            op->norm(run, n, h, &w->pre_feedforward_layernorm_2, T, D, eps);
            op->experts(run, &(g4_experts_args){
                .y = s->moe, .x = n, .index = s->expert_index, .weight = s->expert_weight, .layer = w, .T = T, .D = D,
                .K = c->top_k_experts, .Fe = c->moe_intermediate_size, .room = s->expert_rows, .gate_up = s->expert_gate_up, .down = s->expert_down});
            trace(s, l, "experts", s->moe, T, D, 0);
            op->norm(run, s->moe, s->moe, &w->post_feedforward_layernorm_2, T, D, eps);
            op->add(run, t, s->moe, (size_t)T * D);
        }
        op->norm(run, t, t, &w->post_feedforward_layernorm, T, D, eps);
        op->add(run, h, t, (size_t)T * D);
        trace(s, l, "ffn_residual", h, T, D, 0);

        /* This layer's P numbers of the token enter through a gate. */
        if (P) {
            op->matmul(run, s->gate, &w->per_layer_input_gate, h, T);
            op->gelu_mul(run, s->gate, p + (size_t)l * P, T, P, (size_t)L * P);
            trace(s, l, "ple_gate", s->gate, T, P, 0);
            op->matmul(run, t, &w->per_layer_projection, s->gate, T);
            trace(s, l, "ple", t, T, D, 0);
            op->norm(run, t, t, &w->post_per_layer_input_norm, T, D, eps);
            op->add(run, h, t, (size_t)T * D);
        }

        /* The whole residual stream, last of all. */
        op->scale(run, h, &w->layer_scalar, (size_t)T * D);
        trace(s, l, "output", h, T, D, 0);
    }

    /* The head: the embedding table again, unless the checkpoint unties it; then the cap. */
    op->norm(run, n, h, &m->norm, T, D, eps);
    trace(s, -1, "norm", n, T, D, 0);
    for (int i = 0; i < T; i += s->logit_rows) {
        int some = MIN(s->logit_rows, T - i);
        size_t size = (size_t)some * c->vocab_size;
        float *out = op->host_memory ? logits + (size_t)i * c->vocab_size : s->logits;
        op->matmul(run, out, &m->lm_head, n + (size_t)i * D, some);
        if (c->final_logit_softcapping > 0) op->softcap(run, out, size, c->final_logit_softcapping);
        trace(s, -1, "logits", out, some, c->vocab_size, 0);
        if (!op->host_memory && op->download(logits + (size_t)i * c->vocab_size, out, sizeof(float) * size))
            return g4_fail(err, "%s: copying the logits from the device failed", op->name);
    }
    return 0;
}

/* ---- Rows --------------------------------------------------------------------------------------------------------------- */

/* A thread that flushes subnormals or does not round to nearest would give other bits. Any library linked with -ffast-math can
 * switch that on behind our back, so every call looks. */
static const char *float_mode_fault(void) {
    volatile float smallest = FLT_MIN, half = 0.5f, one = 1.0f, tie = 0x1p-24f;
    volatile float subnormal = smallest * half, up = one + tie, down = -one - tie, above = one + 1.5f * tie;
    if (!(subnormal > 0) || !(subnormal * 2 == smallest)) return "flushes subnormal numbers to zero (FTZ or DAZ)";
    if (up != one || down != -one || above == one) return "does not round to nearest even";
    return NULL;
}

static int check_threads(const g4_run *run, g4_error *err) {
    int faults = 0;
#pragma omp parallel for schedule(static) num_threads(run->threads) reduction(+ : faults)
    for (int worker = 0; worker < run->threads; worker++) faults += float_mode_fault() != NULL;
    if (!faults) return 0;
    const char *mine = float_mode_fault();
    return g4_fail(err, "the floating-point mode of %s %s, which changes results: something in this program switched it (torch.set_flush_denormal, "
                        "a library built with -ffast-math); switch it back", mine ? "this thread" : "a worker thread",
                   mine ? mine : "flushes subnormal numbers or does not round to nearest");
}

static int check_rows(g4_state *s, const g4_row *rows, int T, const float *logits, g4_error *err) {
    const g4_config *c = &s->model->config;
    if (T < 1) return g4_fail(err, "g4_forward was given %d rows; at least 1 is needed", T);
    memset(s->count, 0, sizeof *s->count * (size_t)s->options.n_seqs);
    for (int i = 0; i < T; i++) {
        const g4_row *r = &rows[i];
        if (r->token < 0 || r->token >= c->vocab_size)
            return g4_fail(err, "row %d: token id %d is not in 0..%d (vocab_size %d)", i, (int)r->token, c->vocab_size - 1, c->vocab_size);
        if (c->hidden_size_per_layer_input && r->token >= c->vocab_size_per_layer_input)
            return g4_fail(err, "row %d: token id %d is not in 0..%d (vocab_size_per_layer_input %d)", i, (int)r->token,
                           c->vocab_size_per_layer_input - 1, c->vocab_size_per_layer_input);
        if (r->seq < 0 || r->seq >= s->options.n_seqs)
            return g4_fail(err, "row %d: sequence %d is not in 0..%d", i, (int)r->seq, s->options.n_seqs - 1);
        int expected = s->length[r->seq] + s->count[r->seq]++;
        if (r->pos != expected)
            return g4_fail(err, "row %d: position %d of sequence %d; expected %d, the number of tokens before it", i, (int)r->pos, (int)r->seq, expected);
        if (expected >= s->options.ctx)
            return g4_fail(err, "row %d: position %d does not fit a context of %d tokens; open the state with a larger ctx", i, expected, s->options.ctx);
        if (r->want_logits && !logits) return g4_fail(err, "row %d wants logits, but no room for them was given", i);
    }
    return 0;
}

int g4_forward(g4_state *s, const g4_row *rows, int T, float *logits, g4_error *err) {
    const g4_backend *op = s->run.backend;
    int C = s->options.chunk;
    int32_t *token = s->host_rows, *seq = token + C, *pos = seq + C, *index = pos + C, *compact = index + C;
    if (check_threads(&s->run, err) || check_rows(s, rows, T, logits, err)) return -1;
    for (int begin = 0; begin < T; begin += C) {
        int n = MIN(C, T - begin), wanted = 0;
        for (int i = 0; i < n; i++) {
            token[i] = rows[begin + i].token, seq[i] = rows[begin + i].seq, pos[i] = rows[begin + i].pos;
            if (rows[begin + i].want_logits) index[wanted++] = i;
        }
        s->rows.T = n, s->wanted.T = wanted;
        for (int i = 0; i < wanted; i++) compact[i] = seq[index[i]], compact[C + i] = pos[index[i]];
        size_t all = sizeof(int32_t) * (size_t)n, some = sizeof(int32_t) * (size_t)wanted;
        if (op->upload(s->rows.token, token, all) || op->upload(s->rows.seq, seq, all) || op->upload(s->rows.pos, pos, all)
            || op->upload(s->wanted_index, index, some) || op->upload(s->wanted.seq, compact, some) || op->upload(s->wanted.pos, compact + C, some))
            return g4_fail(err, "%s: copying the rows to the device failed", op->name);
        if (forward(s, logits, err)) return -1;
        if (logits) logits += (size_t)wanted * s->model->config.vocab_size;
        for (int i = 0; i < n; i++) {
            int length = ++s->length[seq[i]];
            s->oldest[seq[i]] = MAX(s->oldest[seq[i]], length - s->ring);
        }
    }
    return 0;
}

int g4_length(const g4_state *s, int seq) { return seq < 0 || seq >= s->options.n_seqs ? -1 : s->length[seq]; }

/* The first `length` tokens are there if all that the next token would see is. */
int g4_state_check(const g4_state *s, int seq, int length, g4_error *err) {
    int window = s->model->config.sliding_window, oldest;
    if (seq < 0 || seq >= s->options.n_seqs) return g4_fail(err, "sequence %d is not in 0..%d", seq, s->options.n_seqs - 1);
    if (length < 0 || length > s->length[seq])
        return g4_fail(err, "sequence %d holds %d tokens and cannot be truncated to %d", seq, s->length[seq], length);
    oldest = s->oldest[seq];
    if (length && MAX(0, length - window + 1) < oldest)
        return g4_fail(err, "sequence %d cannot be truncated to %d tokens: the sliding layers still hold positions %d to %d, so lengths from %d on work, and 0; "
                            "a larger chunk keeps more", seq, length, oldest, s->length[seq] - 1, oldest + window - 1);
    return 0;
}

int g4_truncate(g4_state *s, int seq, int length, g4_error *err) {
    if (g4_state_check(s, seq, length, err)) return -1;
    g4_state_set(s, seq, length, length ? s->oldest[seq] : 0);
    return 0;
}

int g4_state_rows(g4_state *s, int store, int layer, int seq, int first, int n, float *k, float *v) {
    const g4_backend *op = s->run.backend;
    const g4_kv *kv = &s->kv[layer];
    for (int g = 0; g < kv->G; g++)
        for (int i = 0, run; i < n; i += run) {
            run = MIN(n - i, kv->R - (first + i) % kv->R); /* up to where the ring begins again */
            size_t at = kv_offset(kv, seq, g, first + i), host = ((size_t)g * n + i) * kv->dh, bytes = sizeof(float) * (size_t)run * kv->dh;
            if (store ? op->upload(kv->k + at, k + host, bytes) || op->upload(kv->v + at, v + host, bytes)
                      : op->download(k + host, kv->k + at, bytes) || op->download(v + host, kv->v + at, bytes)) return -1;
        }
    return 0;
}

void g4_state_set(g4_state *s, int seq, int length, int oldest) { s->length[seq] = length, s->oldest[seq] = oldest; }

const g4_model *g4_state_get_model(const g4_state *s) { return s->model; }

int g4_copy(g4_state *s, int from, int to, int length, g4_error *err) {
    const g4_config *c = &s->model->config;
    if (to < 0 || to >= s->options.n_seqs) return g4_fail(err, "sequence %d is not in 0..%d", to, s->options.n_seqs - 1);
    if (g4_state_check(s, from, length, err)) return -1;
    if (from == to || !length) return g4_truncate(s, to, length, err);
    size_t most = 0;
    for (int l = 0; l < c->num_hidden_layers; l++) most = MAX(most, (size_t)s->kv[l].G * s->kv[l].dh);
    float *k = most && (size_t)length <= SIZE_MAX / 8 / most ? malloc(2 * sizeof *k * most * (size_t)length) : NULL, *v = k ? k + most * (size_t)length : NULL;
    if (!k) return g4_fail(err, "out of memory for copying %d tokens", length);
    int failed = 0;
    g4_state_set(s, to, 0, 0);
    for (int l = 0; l < c->num_hidden_layers && !failed; l++) {
        if (!s->kv[l].k) continue;
        int first = c->layers[l].type == G4_SLIDING_ATTENTION ? s->oldest[from] : 0;
        failed = g4_state_rows(s, 0, l, from, first, length - first, k, v) || g4_state_rows(s, 1, l, to, first, length - first, k, v);
    }
    free(k);
    if (failed) return g4_fail(err, "%s: copying a sequence failed", s->run.backend->name);
    g4_state_set(s, to, length, s->oldest[from]);
    return 0;
}

void g4_set_trace(g4_state *s, g4_trace_fn *fn, void *user) {
    s->trace = fn;
    s->trace_user = user;
}

/* ---- Making a state ----------------------------------------------------------------------------------------------------- */

typedef struct layout {
    char *base;
    size_t used;
    int overflow;
} layout;

/* Room for [n][a][b] elements of 4 bytes, at the next multiple of 64. With base NULL it only counts. */
static void *take(layout *at, size_t n, size_t a, size_t b) {
    size_t count = n;
    at->overflow |= a && count > SIZE_MAX / a;
    count *= a;
    at->overflow |= b && count > SIZE_MAX / b;
    count *= b;
    at->overflow |= count > (SIZE_MAX - at->used) / 4 - 64;
    char *p = at->base && count ? at->base + at->used : NULL;
    at->used += (4 * count + 63) / 64 * 64;
    return p;
}

/* Lays the buffers of a state out from `base` on (NULL: only counts); gives their size, 0 when that does not fit size_t. kv_bytes gets the caches' part. */
static size_t lay_out(g4_state *s, char *base, size_t *kv_bytes) {
    const g4_config *c = &s->model->config;
    const g4_state_options *o = &s->options;
    layout at = {base, 0, 0};
    s->ring = o->ctx;
    size_t C = (size_t)o->chunk, D = (size_t)c->hidden_size, LP = (size_t)c->num_hidden_layers * c->hidden_size_per_layer_input;
    size_t H = (size_t)c->num_attention_heads, q = 0, kv = 0, F = (size_t)c->hidden_size_per_layer_input, K = (size_t)c->top_k_experts;
    for (int l = 0; l < c->num_hidden_layers; l++) {
        const g4_layer_config *lc = &c->layers[l];
        q = MAX(q, H * lc->head_dim), kv = MAX(kv, (size_t)lc->num_key_value_heads * lc->head_dim), F = MAX(F, (size_t)lc->intermediate_size);
        s->half[lc->type] = lc->head_dim / 2;
        s->score_rows = MAX(s->score_rows, c->num_attention_heads / lc->num_key_value_heads);
        if (lc->kv_layer != l) continue;
        /* a ring keeps what the first row of a chunk still sees while the last one is written */
        int window = lc->type == G4_SLIDING_ATTENTION ? c->sliding_window : o->ctx;
        int64_t R = lc->type == G4_SLIDING_ATTENTION ? MIN((int64_t)o->ctx, (int64_t)window - 1 + o->chunk) : o->ctx;
        s->ring = MIN(s->ring, (int)R);
        s->kv[l] = (g4_kv){.G = lc->num_key_value_heads, .dh = lc->head_dim, .R = (int)R, .window = window};
        size_t row = (size_t)lc->num_key_value_heads * lc->head_dim;
        s->kv[l].k = take(&at, (size_t)o->n_seqs, (size_t)R, row);
        s->kv[l].v = take(&at, (size_t)o->n_seqs, (size_t)R, row);
    }
    if (kv_bytes) *kv_bytes = at.used;
    for (int i = 0; i < 2; i++) {
        g4_rows *r = i ? &s->wanted : &s->rows;
        r->token = take(&at, C, i ? 0 : 1, 1), r->seq = take(&at, C, 1, 1), r->pos = take(&at, C, 1, 1);
        s->cos[i] = take(&at, C, (size_t)s->half[i], 1), s->sin[i] = take(&at, C, (size_t)s->half[i], 1);
    }
    s->wanted_index = take(&at, C, 1, 1);
    s->h = take(&at, C, D, 1), s->n = take(&at, C, D, 1), s->t = take(&at, C, D, 1);
    s->q = take(&at, C, q, 1), s->o = take(&at, C, q, 1), s->k = take(&at, C, kv, 1), s->v = take(&at, C, kv, 1);
    s->gate = take(&at, C, F, 1), s->up = take(&at, C, F, 1), s->p = take(&at, C, LP, 1), s->b = take(&at, C, LP, 1);
    s->scores = take(&at, (size_t)o->threads, (size_t)s->score_rows, (size_t)o->ctx);
    if (c->num_experts) {
        s->expert_index = take(&at, C, K, 1), s->expert_weight = take(&at, C, K, 1), s->router_logits = take(&at, C, (size_t)c->num_experts, 1);
        s->expert_rows = MIN(o->chunk, 16);
        s->expert_gate_up = take(&at, (size_t)s->expert_rows, 2, (size_t)c->moe_intermediate_size), s->expert_down = take(&at, (size_t)s->expert_rows, D, 1);
        s->moe = take(&at, C, D, 1);
    }
    size_t most = MAX(MAX(D, q), MAX(F, (size_t)c->moe_intermediate_size));
    if (s->run.backend->scratch) s->run.scratch = take(&at, s->run.backend->scratch(o->chunk, (int)most, o->threads), 1, 1);
    s->logit_rows = s->run.backend->host_memory ? o->chunk : MIN(o->chunk, 8);
    if (!s->run.backend->host_memory) s->logits = take(&at, (size_t)s->logit_rows, (size_t)c->vocab_size, 1);
    return at.overflow ? 0 : at.used;
}

/* How many threads OpenMP would use; 1 without it. */
static int default_threads(void) {
    int n = 0;
#pragma omp parallel reduction(+ : n)
    n += 1;
    return n;
}

/* The host's part of a state, options checked and completed. */
static g4_state *begin_state(const g4_model *model, const g4_state_options *options, g4_error *err) {
    const g4_config *c = &model->config;
    g4_state_options o = options ? *options : (g4_state_options){0};
    if (!o.ctx) o.ctx = MIN(c->max_position_embeddings, 4096);
    if (!o.chunk) o.chunk = 128;
    if (!o.n_seqs) o.n_seqs = 1;
    if (!o.threads) o.threads = MIN(default_threads(), 1024);
    if (o.ctx < 1 || o.ctx > c->max_position_embeddings)
        return g4_fail(err, "ctx %d is not in 1..%d (max_position_embeddings)", o.ctx, c->max_position_embeddings), NULL;
    if (o.chunk < 1 || o.chunk > 65536) return g4_fail(err, "chunk %d is not in 1..65536", o.chunk), NULL;
    if (o.n_seqs < 1 || o.n_seqs > 65536) return g4_fail(err, "n_seqs %d is not in 1..65536", o.n_seqs), NULL;
    if (o.threads < 1 || o.threads > 1024) return g4_fail(err, "threads %d is not in 1..1024", o.threads), NULL;
    if (o.precision != G4_F32 && o.precision != G4_BF16 && o.precision != G4_Q16) return g4_fail(err, "precision %d is none of G4_F32, G4_BF16, G4_Q16", (int)o.precision), NULL;
    o.chunk = (int)MIN((int64_t)o.chunk, (int64_t)o.ctx * o.n_seqs);
    g4_state *s = calloc(1, sizeof *s);
    if (s) {
        s->model = model, s->options = o;
        s->run = (g4_run){.backend = model->backend, .threads = o.threads, .precision = o.precision};
        s->kv = calloc((size_t)c->num_hidden_layers, sizeof *s->kv);
        s->length = calloc((size_t)o.n_seqs, sizeof(int)), s->oldest = calloc((size_t)o.n_seqs, sizeof(int)), s->count = calloc((size_t)o.n_seqs, sizeof(int));
        s->host_rows = calloc((size_t)o.chunk * 6, sizeof(int32_t));
    }
    if (!s || !s->kv || !s->length || !s->oldest || !s->count || !s->host_rows) {
        g4_state_close(s);
        return g4_fail(err, "out of memory for a state of %d sequences", o.n_seqs), NULL;
    }
    return s;
}

g4_state *g4_state_open(const g4_model *model, const g4_state_options *options, g4_error *err) {
    g4_state *s = begin_state(model, options, err);
    if (!s) return NULL;
    size_t bytes = lay_out(s, NULL, NULL);
    if (bytes) s->memory = s->run.backend->alloc(bytes);
    if (!s->memory) {
        g4_fail(err, "out of memory: a context of %d tokens for %d sequences and chunks of %d need %zu bytes (%s); choose a smaller ctx or chunk", s->options.ctx,
                s->options.n_seqs, s->options.chunk, bytes, bytes ? "the allocation failed" : "more than can be addressed");
        g4_state_close(s);
        return NULL;
    }
    lay_out(s, s->memory, NULL);
    return s;
}

void g4_state_close(g4_state *s) {
    if (!s) return;
    if (s->memory) s->run.backend->release(s->memory);
    free(s->kv), free(s->length), free(s->oldest), free(s->count), free(s->host_rows);
    free(s);
}

size_t g4_state_bytes(const g4_model *model, const g4_state_options *options, size_t *kv_bytes) {
    g4_state *s = begin_state(model, options, NULL);
    size_t bytes = s ? lay_out(s, NULL, kv_bytes) : 0;
    g4_state_close(s);
    return bytes;
}

const g4_state_options *g4_state_get_options(const g4_state *s) { return &s->options; }

/* ---- Opening a model ---------------------------------------------------------------------------------------------------- */

/* Every backend compiled in; the first that can run here is the default. */
static const g4_backend *const registry[] = {
    &g4_backend_cpu, &g4_backend_scalar,
#ifdef G4_BLIS
    &g4_backend_blis,
#endif
};

const char *g4_backend_name(int i, const char **why) {
    if (i < 0 || i >= (int)(sizeof registry / sizeof *registry)) return NULL;
    const char *fault = registry[i]->unusable ? registry[i]->unusable() : NULL;
    if (why) *why = fault ? fault : "";
    return registry[i]->name;
}

const char *g4_model_backend(const g4_model *model) { return model->backend->name; }

static const g4_backend *find_backend(const char *name, g4_error *err) {
    char known[256] = "";
    for (int i = 0; i < (int)(sizeof registry / sizeof *registry); i++) {
        const g4_backend *b = registry[i];
        const char *fault = b->unusable ? b->unusable() : NULL;
        if (name ? !strcmp(name, b->name) : !fault) {
            if (fault) g4_fail(err, "backend %s cannot run here: %s", name, fault);
            return fault ? NULL : b;
        }
        snprintf(known + strlen(known), sizeof known - strlen(known), "%s%s", i ? ", " : "", b->name);
    }
    g4_fail(err, "there is no backend \"%s\" in this build; it has: %s", name ? name : "", known);
    return NULL;
}

static void inherit(g4_backend *all, const g4_backend *base) {
    if (!all->alloc) all->alloc = base->alloc, all->release = base->release, all->upload = base->upload, all->download = base->download;
    if (!all->scratch) all->scratch = base->scratch;
    if (!all->embed) all->embed = base->embed;
    if (!all->matmul) all->matmul = base->matmul;
    if (!all->norm) all->norm = base->norm;
    if (!all->rope_table) all->rope_table = base->rope_table;
    if (!all->rope) all->rope = base->rope;
    if (!all->kv_store) all->kv_store = base->kv_store;
    if (!all->attention) all->attention = base->attention;
    if (!all->gelu_mul) all->gelu_mul = base->gelu_mul;
    if (!all->add) all->add = base->add;
    if (!all->scale) all->scale = base->scale;
    if (!all->ple) all->ple = base->ple;
    if (!all->router) all->router = base->router;
    if (!all->experts) all->experts = base->experts;
    if (!all->gather_rows) all->gather_rows = base->gather_rows;
    if (!all->softcap) all->softcap = base->softcap;
}

/* The backend's table with the entries that it inherits filled in. */
static g4_backend *complete(const g4_backend *b) {
    g4_backend *all = malloc(sizeof *all);
    if (!all) return NULL;
    *all = *b;
    if (b->base) inherit(all, b->base);
    inherit(all, &g4_backend_scalar);
    return all;
}

/* inv_freq [dh/2] of one kind of layer, rounded where transformers rounds. The exponent divides by the whole head_dim also where only a
 * part rotates: "proportional" is not ordinary partial RoPE. */
static int make_inv_freq(g4_model *m, g4_layer_type type, int dh, g4_error *err) {
    const g4_rope_config *rope = &m->config.rope[type];
    int half = dh / 2, rotated = rope->proportional ? (int)floor(rope->partial_rotary_factor * dh / 2) : half;
    float *f = calloc((size_t)half, sizeof *f);
    m->inv_freq[type] = m->backend->alloc(sizeof *f * (size_t)half);
    for (int i = 0; f && i < MIN(rotated, half); i++) {
        f[i] = 1.0f / g4_powf((float)rope->theta, (float)(2 * i) / (float)dh);
        if (rope->proportional) f[i] /= (float)rope->factor; /* transformers ignores it for "default" */
    }
    int failed = !f || !m->inv_freq[type] || m->backend->upload(m->inv_freq[type], f, sizeof *f * (size_t)half);
    free(f);
    return failed ? g4_fail(err, "out of memory for the RoPE frequencies") : 0;
}

/* With contraction the compiler makes one rounding of a product and a sum, and the bits are no longer ours. */
static int check_compiler(g4_error *err) {
    volatile float va = 1 + 0x1p-12f, vc = -(1 + 0x1p-11f);
    float a = va, b = va, c = vc, d = a * b + c;
    if (d != 0) return g4_fail(err, "gemma4.c was compiled with a * b + c in one rounding: build it with -ffp-contract=off and without -ffast-math");
    return 0;
}

/* A device keeps its own copy of the weights: each tensor's data becomes an address there. */
static int upload_weights(g4_model *m, g4_error *err) {
    g4_tensor *const top[] = {&m->embed_tokens, &m->embed_tokens_per_layer, &m->per_layer_model_projection, &m->per_layer_projection_norm, &m->norm, &m->lm_head};
    const int n_top = sizeof top / sizeof *top, per_layer = sizeof(g4_layer) / sizeof(g4_tensor); /* a g4_layer is nothing but tensors */
    const void *embed_tokens = m->embed_tokens.data;
    int n = 0, total = n_top + per_layer * m->config.num_hidden_layers;
    m->device = calloc((size_t)total + 1, sizeof *m->device);
    if (!m->device) return g4_fail(err, "out of memory");
    for (int i = 0; i < total; i++) {
        g4_tensor *t = i < n_top ? top[i] : (g4_tensor *)&m->layers[(i - n_top) / per_layer] + (i - n_top) % per_layer;
        if (!t->data) continue;
        size_t bytes = (size_t)t->rows * g4_row_bytes(t);
        if (t == &m->lm_head && t->data == embed_tokens) {
            t->data = m->embed_tokens.data;
            continue;
        }
        void *there = m->device[n++] = m->backend->alloc(bytes);
        if (!there || m->backend->upload(there, t->data, bytes))
            return g4_fail(err, "%s: %s (%zu bytes) does not fit the device", m->backend->name, t->name, bytes);
        t->data = there;
    }
    return 0;
}

g4_model *g4_open_with(const char *path, const g4_options *options, const g4_backend *backend, g4_error *err) {
    const g4_run here = {.threads = 1};
    if (check_compiler(err) || check_threads(&here, err)) return NULL;
    g4_model *m = calloc(1, sizeof *m);
    if (!m) return g4_fail(err, "out of memory"), NULL;
    int failed = !(m->backend = complete(backend)) ? g4_fail(err, "out of memory") : g4_checkpoint_open(m, path, options, err);
    if (!failed && !backend->host_memory) failed = upload_weights(m, err);
    for (int l = 0; !failed && l < m->config.num_hidden_layers; l++) {
        const g4_layer_config *lc = &m->config.layers[l];
        if (!m->inv_freq[lc->type]) failed = make_inv_freq(m, lc->type, lc->head_dim, err);
    }
    if (!failed) return m;
    g4_close(m);
    return NULL;
}

g4_model *g4_open(const char *path, const g4_options *options, g4_error *err) {
    const g4_backend *backend = find_backend(options ? options->backend : NULL, err);
    return backend ? g4_open_with(path, options, backend, err) : NULL;
}

void g4_close(g4_model *m) {
    if (!m) return;
    for (int kind = 0; kind < 2; kind++)
        if (m->inv_freq[kind]) m->backend->release(m->inv_freq[kind]);
    for (void **p = m->device; p && *p; p++) m->backend->release(*p);
    free(m->device);
    g4_checkpoint_close(m);
    free((void *)m->backend);
    free(m);
}

const g4_config *g4_get_config(const g4_model *m) { return &m->config; }

const char *g4_version(void) { return G4_VERSION; }
