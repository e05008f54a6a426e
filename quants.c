/* quants.c - how weights lie in files: the table of types, and for each how a block of bytes comes apart into integers, scales and minimums.
 *
 * It multiplies nothing and does not quantise. Products take the integers as they are (gemma4.c, "Products with quantised weights"); g4_widen makes floats of
 * them, by the one formula that all types share: w = scale q - min.
 *
 * Reading order: the blocks of 32, of which Q4_0 shows what they share; then those of 256, in which each 16 or 32 values have a small integer scale of
 * their own. A struct is the block as it lies in the file: it has bytes only, so it has no padding, no byte order and any address.
 *
 * Every product is exact: a half has 11 bits, scale times value at most 12, a float 24. Only the difference to a minimum rounds. So a finite weight is its
 * formula's value rounded once, whatever the order, and has the bits of `gguf.quants.dequantize`, the sign of a zero too. Where a scale is infinite or
 * NaN the result is what IEEE 754 says, NaN where gguf-py has NaN; which of the NaNs is the processor's choice.
 */
#define G4_EXACT_FLOAT
#include "gemma4.h"

#include <string.h>

/* Fields are little-endian in every file and lie at any address. */
static uint16_t load16(const unsigned char *p) { return (uint16_t)(p[0] | p[1] << 8); }
static uint32_t load32(const unsigned char *p) { return load16(p) | (uint32_t)load16(p + 2) << 16; }

static float float_of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Exact. A subnormal half is its 10 bits times 2^-24. */
static float float_of_half(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
    if (rest < 0x0400) return float_of_bits(sign | 0x3f800000u) * ((float)rest * 0x1p-24f);
    if (rest >= 0x7c00) return float_of_bits(sign | 0x7f800000u | (rest & 0x3ff) << 13);
    return float_of_bits(sign | ((rest << 13) + (112u << 23)));
}

static void widen_f32(float *w, const unsigned char *p, int n) {
    for (int i = 0; i < n; i++) w[i] = float_of_bits(load32(p + 4 * i));
}

static void widen_f16(float *w, const unsigned char *p, int n) {
    for (int i = 0; i < n; i++) w[i] = float_of_half(load16(p + 2 * i));
}

/* The upper half of a float. */
static void widen_bf16(float *w, const unsigned char *p, int n) {
    for (int i = 0; i < n; i++) w[i] = float_of_bits((uint32_t)load16(p + 2 * i) << 16);
}

static float half(const unsigned char *p) { return float_of_half(load16(p)); }

/* ---- Blocks of 32 ------------------------------------------------------------------------------------------------------------
 *
 * Where a value has 4 bits, byte j of qs [16] holds values j (low nibble) and j + 16 (high): the first half of a block lies in the low nibbles.
 * Where it has 5, its highest is bit i of qh, a little-endian number of 32 bits.
 *
 *       bit     7  6  5  4   3  2  1  0
 *     qs[j]   [ value j+16 | value j    ]
 *
 * All 32 share the one scale, and the one minimum: m[0] is minus what the types with an m add.
 */

/* w = d (q - 8) */
struct q4_0 {
    unsigned char d[2]; /* half */
    unsigned char qs[16];
};

static void unpack_q4_0(g4_block *restrict to, const unsigned char *restrict p) {
    const struct q4_0 *b = (const void *)p;
    to->scale[0] = half(b->d);
    for (int j = 0; j < 16; j++) to->q[j] = (int8_t)((b->qs[j] & 15) - 8);
    for (int j = 0; j < 16; j++) to->q[j + 16] = (int8_t)((b->qs[j] >> 4) - 8);
}

/* w = d q + m */
struct q4_1 {
    unsigned char d[2], m[2]; /* halves */
    unsigned char qs[16];
};

static void unpack_q4_1(g4_block *restrict to, const unsigned char *restrict p) {
    const struct q4_1 *b = (const void *)p;
    to->scale[0] = half(b->d), to->min[0] = -half(b->m);
    for (int j = 0; j < 16; j++) to->q[j] = (int8_t)(b->qs[j] & 15);
    for (int j = 0; j < 16; j++) to->q[j + 16] = (int8_t)(b->qs[j] >> 4);
}

/* w = d (q - 16) */
struct q5_0 {
    unsigned char d[2];  /* half */
    unsigned char qh[4]; /* bit i: bit 4 of value i */
    unsigned char qs[16];
};

static void unpack_q5_0(g4_block *restrict to, const unsigned char *restrict p) {
    const struct q5_0 *b = (const void *)p;
    uint32_t qh = load32(b->qh);
    to->scale[0] = half(b->d);
    for (int j = 0; j < 16; j++) {
        int low = (b->qs[j] & 15) | (int)(qh >> j & 1) << 4, high = b->qs[j] >> 4 | (int)(qh >> (j + 16) & 1) << 4;
        to->q[j] = (int8_t)(low - 16);
        to->q[j + 16] = (int8_t)(high - 16);
    }
}

/* w = d q + m */
struct q5_1 {
    unsigned char d[2], m[2]; /* halves */
    unsigned char qh[4];      /* bit i: bit 4 of value i */
    unsigned char qs[16];
};

static void unpack_q5_1(g4_block *restrict to, const unsigned char *restrict p) {
    const struct q5_1 *b = (const void *)p;
    uint32_t qh = load32(b->qh);
    to->scale[0] = half(b->d), to->min[0] = -half(b->m);
    for (int j = 0; j < 16; j++) {
        int low = (b->qs[j] & 15) | (int)(qh >> j & 1) << 4, high = b->qs[j] >> 4 | (int)(qh >> (j + 16) & 1) << 4;
        to->q[j] = (int8_t)low;
        to->q[j + 16] = (int8_t)high;
    }
}

/* w = d q */
struct q8_0 {
    unsigned char d[2];  /* half */
    signed char qs[32];
};

static void unpack_q8_0(g4_block *restrict to, const unsigned char *restrict p) {
    const struct q8_0 *b = (const void *)p;
    to->scale[0] = half(b->d);
    for (int i = 0; i < 32; i++) to->q[i] = b->qs[i];
}

/* w = d iq4_values[q]: levels that lie closer together near 0, as weights do */
struct iq4_nl {
    unsigned char d[2]; /* half */
    unsigned char qs[16];
};

static const int8_t iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

static void unpack_iq4_nl(g4_block *restrict to, const unsigned char *restrict p) {
    const struct iq4_nl *b = (const void *)p;
    to->scale[0] = half(b->d);
    for (int j = 0; j < 16; j++) to->q[j] = iq4_values[b->qs[j] & 15];
    for (int j = 0; j < 16; j++) to->q[j + 16] = iq4_values[b->qs[j] >> 4];
}

/* w = 2^(e - 127) times a float of 4 bits: 1 sign, 2 exponent, 1 mantissa. The table has twice that float, and the scale is halved for it. */
struct mxfp4 {
    unsigned char e[1];
    unsigned char qs[16];
};

static const int8_t mxfp4_values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}; /* nibble 8 is +0 too */

static void unpack_mxfp4(g4_block *restrict to, const unsigned char *restrict p) {
    const struct mxfp4 *b = (const void *)p;
    uint32_t e = b->e[0];
    /* 2^(e - 128), which is subnormal for e = 0 and 1. 255 is no NaN here, other than in the OCP format. */
    to->scale[0] = float_of_bits(e < 2 ? 0x00200000u << e : (e - 1) << 23);
    for (int j = 0; j < 16; j++) to->q[j] = mxfp4_values[b->qs[j] & 15];
    for (int j = 0; j < 16; j++) to->q[j + 16] = mxfp4_values[b->qs[j] >> 4];
}

/* ---- Blocks of 256 -----------------------------------------------------------------------------------------------------------
 *
 * Sub-block j has 16 values (Q2_K, Q3_K, Q6_K) or 32 (the others) and its own integer scale, and d turns that into a float. The low bits of several
 * sub-blocks share bytes: value l of a run of 32 values and value l of the next run lie in the same byte at another shift.
 */

/* Sixteen sub-blocks of 16: w = (d scale) q - dmin min
 *
 *             bit     7  6   5  4   3  2   1  0
 *     scales[j]     [ min        | scale        ]    of sub-block j
 *     qs[l]         [ l+96 | l+64 | l+32 | l    ]    2 bits each of the values 0..127; qs[32 + l]: of 128..255
 */
struct q2_k {
    unsigned char scales[16];
    unsigned char qs[64];
    unsigned char d[2], dmin[2]; /* halves */
};

static void unpack_q2_k(g4_block *restrict to, const unsigned char *restrict p) {
    const struct q2_k *b = (const void *)p;
    float d = half(b->d), dmin = half(b->dmin);
    for (int j = 0; j < 16; j++) {
        const unsigned char *q = b->qs + j / 8 * 32 + j % 2 * 16;
        int shift = j / 2 % 4 * 2;
        to->scale[j] = d * (float)(b->scales[j] & 15), to->min[j] = dmin * (float)(b->scales[j] >> 4);
        for (int i = 0; i < 16; i++) to->q[16 * j + i] = (int8_t)(q[i] >> shift & 3);
    }
}

/* Sixteen sub-blocks of 16: w = (d (scale - 32)) (q - 4)
 *
 *             bit     7  6   5  4   3  2   1  0
 *     hmask[l]      bit k: bit 2 of value 32 k + l
 *     qs            bits 0 and 1 of the values, as in Q2_K
 *     scales[j]     [ j+8        | j            ]    bits 0..3 of the 6 bits of a scale, j = 0..7
 *     scales[8 + j] [ j+12 | j+8 | j+4  | j     ]    bits 4 and 5, j = 0..3
 */
struct q3_k {
    unsigned char hmask[32];
    unsigned char qs[64];
    unsigned char scales[12];
    unsigned char d[2]; /* half */
};

static void unpack_q3_k(g4_block *restrict to, const unsigned char *restrict p) {
    const struct q3_k *b = (const void *)p;
    float d = half(b->d);
    for (int j = 0; j < 16; j++) {
        const unsigned char *q = b->qs + j / 8 * 32 + j % 2 * 16, *h = b->hmask + j % 2 * 16;
        int shift = j / 2 % 4 * 2, bit = j / 2;
        int low = b->scales[j % 8] >> j / 8 * 4 & 15, high = b->scales[8 + j % 4] >> j / 4 * 2 & 3;
        to->scale[j] = d * (float)((low | high << 4) - 32);
        for (int i = 0; i < 16; i++) to->q[16 * j + i] = (int8_t)(((q[i] >> shift & 3) | (h[i] >> bit & 1) << 2) - 4);
    }
}

/* Eight sub-blocks of 32: w = (d scale) q - dmin min
 *
 *             bit     7  6   5  4   3  2   1  0
 *     scales[j]     [ J    | j                  ]    j: scale of sub-block j = 0..3;  J: bits 4 and 5 of scale j + 4
 *     scales[4 + j] [ J    | j                  ]    the same of the mins
 *     scales[8 + j] [ min j+4    | scale j+4    ]    bits 0..3
 *     qs[l]         [ l+32       | l            ]    the values 0..63; qs[32 + l]: of 64..127, and so on
 */
struct q4_k {
    unsigned char d[2], dmin[2]; /* halves */
    unsigned char scales[12];
    unsigned char qs[128];
};

/* Scale and min of sub-block j of a Q4_K or Q5_K. */
static int scale_6(const unsigned char *s, int j) { return j < 4 ? s[j] & 63 : (s[j + 4] & 15) | s[j - 4] >> 6 << 4; }
static int min_6(const unsigned char *s, int j) { return j < 4 ? s[j + 4] & 63 : s[j + 4] >> 4 | s[j] >> 6 << 4; }

static void unpack_q4_k(g4_block *restrict to, const unsigned char *restrict p) {
    const struct q4_k *b = (const void *)p;
    float d = half(b->d), dmin = half(b->dmin);
    for (int j = 0; j < 8; j++) {
        const unsigned char *q = b->qs + j / 2 * 32;
        int shift = j % 2 * 4;
        to->scale[j] = d * (float)scale_6(b->scales, j), to->min[j] = dmin * (float)min_6(b->scales, j);
        for (int i = 0; i < 32; i++) to->q[32 * j + i] = (int8_t)(q[i] >> shift & 15);
    }
}

/* As Q4_K, with a fifth bit: bit j of qh[l] is bit 4 of value l of sub-block j. */
struct q5_k {
    unsigned char d[2], dmin[2]; /* halves */
    unsigned char scales[12];
    unsigned char qh[32];
    unsigned char qs[128];
};

static void unpack_q5_k(g4_block *restrict to, const unsigned char *restrict p) {
    const struct q5_k *b = (const void *)p;
    float d = half(b->d), dmin = half(b->dmin);
    for (int j = 0; j < 8; j++) {
        const unsigned char *q = b->qs + j / 2 * 32;
        int shift = j % 2 * 4;
        to->scale[j] = d * (float)scale_6(b->scales, j), to->min[j] = dmin * (float)min_6(b->scales, j);
        for (int i = 0; i < 32; i++) to->q[32 * j + i] = (int8_t)((q[i] >> shift & 15) | (b->qh[i] >> j & 1) << 4);
    }
}

/* Sixteen sub-blocks of 16: w = (d scale) (q - 32)
 *
 *             bit     7  6   5  4   3  2   1  0
 *     ql[l]         [ l+64       | l            ]    bits 0..3, l = 0..63, of the values 0..127; ql[64 + l]: of 128..255
 *     qh[l]         [ l+96 | l+64 | l+32 | l    ]    bits 4 and 5, l = 0..31; qh[32 + l]: of 128..255
 */
struct q6_k {
    unsigned char ql[128];
    unsigned char qh[64];
    signed char scales[16];
    unsigned char d[2]; /* half */
};

static void unpack_q6_k(g4_block *restrict to, const unsigned char *restrict p) {
    const struct q6_k *b = (const void *)p;
    float d = half(b->d);
    for (int j = 0; j < 16; j++) {
        const unsigned char *l = b->ql + j / 8 * 64 + j % 4 * 16, *h = b->qh + j / 8 * 32 + j % 2 * 16;
        int l_shift = j / 4 % 2 * 4, h_shift = j / 2 % 4 * 2;
        to->scale[j] = d * (float)b->scales[j];
        for (int i = 0; i < 16; i++) to->q[16 * j + i] = (int8_t)(((l[i] >> l_shift & 15) | (h[i] >> h_shift & 3) << 4) - 32);
    }
}

/* Eight sub-blocks of 32, each with its 16 bytes of qs as a block of IQ4_NL: w = (d (scale - 32)) iq4_values[q]
 *
 *     scales_l[j]   bits 0..3 of the 6 bits of scales 2 j (low nibble) and 2 j + 1
 *     scales_h      bits 2 j and 2 j + 1 of this little-endian number of 16 bits: bits 4 and 5 of scale j
 */
struct iq4_xs {
    unsigned char d[2]; /* half */
    unsigned char scales_h[2];
    unsigned char scales_l[4];
    unsigned char qs[128];
};

static void unpack_iq4_xs(g4_block *restrict to, const unsigned char *restrict p) {
    const struct iq4_xs *b = (const void *)p;
    float d = half(b->d);
    for (int j = 0; j < 8; j++) {
        const unsigned char *q = b->qs + j * 16;
        int low = b->scales_l[j / 2] >> j % 2 * 4 & 15, high = load16(b->scales_h) >> j * 2 & 3;
        to->scale[j] = d * (float)((low | high << 4) - 32);
        for (int i = 0; i < 16; i++) to->q[32 * j + i] = iq4_values[q[i] & 15];
        for (int i = 0; i < 16; i++) to->q[32 * j + 16 + i] = iq4_values[q[i] >> 4];
    }
}

/* ---- The table ---------------------------------------------------------------------------------------------------------------
 *
 * The weights that share a scale; the bits of the integers that activations become beside them, as many as a sum of 32 products leaves; a minimum or none.
 */

const g4_type g4_types[G4_N_TYPES] = {
    [G4_TYPE_F32] = {"F32", 0, 1, 4, 0, 0, 0, widen_f32, NULL},
    [G4_TYPE_F16] = {"F16", 1, 1, 2, 0, 0, 0, widen_f16, NULL},
    [G4_TYPE_BF16] = {"BF16", 30, 1, 2, 0, 0, 0, widen_bf16, NULL},
    [G4_TYPE_Q4_0] = {"Q4_0", 2, 32, sizeof(struct q4_0), 32, 21, 0, NULL, unpack_q4_0},
    [G4_TYPE_Q4_1] = {"Q4_1", 3, 32, sizeof(struct q4_1), 32, 21, 1, NULL, unpack_q4_1},
    [G4_TYPE_Q5_0] = {"Q5_0", 6, 32, sizeof(struct q5_0), 32, 21, 0, NULL, unpack_q5_0},
    [G4_TYPE_Q5_1] = {"Q5_1", 7, 32, sizeof(struct q5_1), 32, 21, 1, NULL, unpack_q5_1},
    [G4_TYPE_Q8_0] = {"Q8_0", 8, 32, sizeof(struct q8_0), 32, 19, 0, NULL, unpack_q8_0},
    [G4_TYPE_Q2_K] = {"Q2_K", 10, 256, sizeof(struct q2_k), 16, 21, 1, NULL, unpack_q2_k},
    [G4_TYPE_Q3_K] = {"Q3_K", 11, 256, sizeof(struct q3_k), 16, 21, 0, NULL, unpack_q3_k},
    [G4_TYPE_Q4_K] = {"Q4_K", 12, 256, sizeof(struct q4_k), 32, 21, 1, NULL, unpack_q4_k},
    [G4_TYPE_Q5_K] = {"Q5_K", 13, 256, sizeof(struct q5_k), 32, 21, 1, NULL, unpack_q5_k},
    [G4_TYPE_Q6_K] = {"Q6_K", 14, 256, sizeof(struct q6_k), 16, 21, 0, NULL, unpack_q6_k},
    [G4_TYPE_IQ4_NL] = {"IQ4_NL", 20, 32, sizeof(struct iq4_nl), 32, 19, 0, NULL, unpack_iq4_nl},
    [G4_TYPE_IQ4_XS] = {"IQ4_XS", 23, 256, sizeof(struct iq4_xs), 32, 19, 0, NULL, unpack_iq4_xs},
    [G4_TYPE_MXFP4] = {"MXFP4", 39, 32, sizeof(struct mxfp4), 32, 21, 0, NULL, unpack_mxfp4},
};

void g4_widen(g4_dtype number, float *w, const unsigned char *p, int n) {
    const g4_type *type = &g4_types[number];
    g4_block b = {.min = {0}};
    if (type->widen) type->widen(w, p, n);
    else
        for (; n > 0; n -= type->block, w += type->block, p += type->bytes) {
            type->unpack(&b, p);
            for (int i = 0; i < type->block; i++) w[i] = b.scale[i / type->group] * (float)b.q[i] - b.min[i / type->group];
        }
}
