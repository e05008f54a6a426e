/* quants.c - how weights lie in files: the table of types, and for each the formula that turns a block of bytes into floats.
 *
 * It is not arithmetic on quantised numbers: every type is widened to float32 before it meets an activation (gemma4.c, dot_row), so a product has
 * the same 16 lanes whatever the file holds. Nor does it quantise.
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

const g4_type g4_types[G4_N_TYPES] = {
    [G4_TYPE_F32] = {"F32", 0, 1, 4, widen_f32},
    [G4_TYPE_F16] = {"F16", 1, 1, 2, widen_f16},
    [G4_TYPE_BF16] = {"BF16", 30, 1, 2, widen_bf16},
};
