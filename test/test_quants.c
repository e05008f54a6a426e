/* test_quants.c - quantised weights: each type of quants.c against blocks worked out by hand and against gguf-py, and the operations of the oracle on them.
 *
 *     build/test_quants ./gemma4             all of that, with the data of test/quants.safetensors
 *     build/test_quants ./gemma4 FILE...     other files of reference/quants.py, which describes them
 *
 * The bar is equal bits, zeros with their sign; a NaN must be a NaN, whichever.
 *
 * Reading order: the blocks by hand, which show the layouts; the files; the operations.
 */
#define G4_EXACT_FLOAT
#include "gemma4.h"

#include "test.h"

#include <math.h>

enum { FIRST = G4_TYPE_Q4_0 };

/* The bits of a float; of every NaN the same. */
static uint32_t canonical(uint32_t bits) { return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc00000 : bits; }

static uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return canonical(bits);
}

static void *room(size_t n) {
    void *p = calloc(n ? n : 1, 1);
    if (!p) {
        printf("FAILED test_quants: out of memory for %zu bytes\n", n);
        exit(1);
    }
    return p;
}

/* w [n] = the elements of blocks, from an odd address and with nothing behind the last byte, so that sanitizers see a read too many. */
static void widen(g4_dtype type, float *w, const unsigned char *blocks, int n) {
    size_t bytes = (size_t)(n / g4_types[type].block) * (size_t)g4_types[type].bytes;
    unsigned char *copy = room(bytes + 1);
    memcpy(copy + 1, blocks, bytes);
    g4_widen(type, w, copy + 1, n);
    free(copy);
}

/* ---- By hand --------------------------------------------------------------------------------------------------------------- */

/* A block that is 0 but for some bytes, and its values: later ranges overrule earlier ones. As halves, 2^-24 is 0x0001, 0.5 0x3800, 1 0x3c00, 2 0x4000,
 * 4 0x4400; their upper byte lies behind the lower one. */
static const struct by_hand {
    g4_dtype type;
    struct { int at, byte; } bytes[24];
    struct { int first, last; float value; } values[40];
} by_hand[] = {
    /* d = 1, then d = -2^-24: a nibble 8 is a zero, here of the negative sign */
    {G4_TYPE_Q4_0, {{1, 0x3c}, {2, 0x9f}, {17, 0x70}}, {{0, 31, -8}, {0, 0, 7}, {16, 16, 1}, {31, 31, -1}}},
    {G4_TYPE_Q4_0, {{0, 0x01}, {1, 0x80}, {5, 0x8f}}, {{0, 31, 0x1p-21f}, {3, 3, -0x7p-24f}, {19, 19, -0.0f}}},
    /* d = 2, m = -1 */
    {G4_TYPE_Q4_1, {{1, 0x40}, {3, 0xbc}, {4, 0x31}, {19, 0xf0}}, {{0, 31, -1}, {0, 0, 1}, {16, 16, 5}, {31, 31, 29}}},
    /* the fifth bits of values 0, 15 and 31 */
    {G4_TYPE_Q5_0, {{1, 0x3c}, {2, 0x01}, {3, 0x80}, {5, 0x80}, {6, 0xc3}, {21, 0x20}}, {{0, 31, -16}, {0, 0, 3}, {15, 15, 0}, {16, 16, -4}, {31, 31, 2}}},
    /* d = 0.5, m = 4; of values 1 and 16 */
    {G4_TYPE_Q5_1, {{1, 0x38}, {3, 0x44}, {4, 0x02}, {6, 0x01}, {8, 0xf2}, {23, 0x40}}, {{0, 31, 4}, {0, 0, 5}, {1, 1, 12}, {16, 16, 19.5f}, {31, 31, 6}}},
    {G4_TYPE_Q8_0, {{1, 0x38}, {2, 0x80}, {3, 0xff}, {33, 0x7f}}, {{0, 31, 0}, {0, 0, -64}, {1, 1, -0.5f}, {31, 31, 63.5f}}},
    {G4_TYPE_Q8_0, {{1, 0xb8}, {33, 0x01}}, {{0, 31, -0.0f}, {31, 31, -0.5f}}},
    /* the whole table: byte j has entry 2 j in its low nibble and 2 j + 1 in its high one */
    {G4_TYPE_IQ4_NL, {{1, 0x3c}, {2, 0x10}, {3, 0x32}, {4, 0x54}, {5, 0x76}, {6, 0x98}, {7, 0xba}, {8, 0xdc}, {9, 0xfe}},
     {{0, 31, -127}, {1, 1, -83}, {2, 2, -49}, {3, 3, -22}, {4, 4, 1}, {5, 5, 25}, {6, 6, 53}, {7, 7, 89},
      {16, 16, -104}, {17, 17, -65}, {18, 18, -35}, {19, 19, -10}, {20, 20, 13}, {21, 21, 38}, {22, 22, 69}, {23, 23, 113}}},
    /* scale 1 is e = 127, and stands for the floats 0, 0.5, 1, 1.5, 2, 3, 4, 6 */
    {G4_TYPE_MXFP4, {{0, 127}, {1, 0x10}, {2, 0x32}, {3, 0x54}, {4, 0x76}, {5, 0x98}, {6, 0xba}, {7, 0xdc}, {8, 0xfe}},
     {{0, 31, 0}, {1, 1, 1}, {2, 2, 2}, {3, 3, 4}, {4, 4, 0}, {5, 5, -1}, {6, 6, -2}, {7, 7, -4},
      {16, 16, 0.5f}, {17, 17, 1.5f}, {18, 18, 3}, {19, 19, 6}, {20, 20, -0.5f}, {21, 21, -1.5f}, {22, 22, -3}, {23, 23, -6}}},
    {G4_TYPE_MXFP4, {{1, 0x91}}, {{0, 31, 0}, {0, 0, 0x1p-128f}, {16, 16, -0x1p-128f}}},
    {G4_TYPE_MXFP4, {{0, 1}, {16, 0x71}}, {{0, 31, 0}, {15, 15, 0x1p-127f}, {31, 31, 12 * 0x1p-127f}}},
    {G4_TYPE_MXFP4, {{0, 2}, {16, 0x01}}, {{0, 31, 0}, {15, 15, 0x1p-126f}}},
    {G4_TYPE_MXFP4, {{0, 255}, {1, 0x21}}, {{0, 31, 0}, {0, 0, 0x1p127f}, {16, 16, INFINITY}}},
    /* d = 1, dmin = 2. Sub-blocks 0: scale 5, min 3; 1: min 1; 2, 4, 8: scale 1; 6, 15: scale 2. Byte 16 has the values 0, 32, 64, 96: 3, 1, 2, 3. */
    {G4_TYPE_Q2_K, {{81, 0x3c}, {83, 0x40}, {0, 0x35}, {1, 0x10}, {2, 0x01}, {4, 0x01}, {6, 0x02}, {8, 0x01}, {15, 0x02}, {16, 0xe7}, {48, 0x02}, {79, 0xc0}},
     {{0, 255, 0}, {0, 15, -6}, {16, 31, -2}, {0, 0, 9}, {32, 32, 1}, {64, 64, 2}, {96, 96, 6}, {128, 128, 2}, {255, 255, 6}}},
    /* Scales without their 32 are -32 but for sub-blocks 0: -31, 4: -16, 8: 2, 12: 16. Values are -4 but for 0, 159, 224: 0 (hmask), 32: -3, 64: -2,
     * 96: -1 (byte 32) and 255: -3. */
    {G4_TYPE_Q3_K, {{109, 0x3c}, {0, 0x81}, {31, 0x10}, {32, 0xe4}, {95, 0x40}, {96, 0x21}, {104, 0xe4}},
     {{0, 255, 128}, {0, 15, 124}, {64, 79, 64}, {128, 143, -8}, {192, 207, -64}, {0, 0, -0.0f}, {32, 32, 96}, {64, 64, 32}, {96, 96, 32}, {159, 159, -0.0f},
      {224, 224, -0.0f}, {255, 255, 96}}},
    {G4_TYPE_Q3_K, {{109, 0x3c}, {0, 0x01}, {103, 0xf0}, {107, 0x80}}, {{0, 255, 128}, {0, 0, -0.0f}, {240, 255, -60}}},
    /* d = 1, dmin = 0.5. Scale and min of sub-blocks 0: 5, 2; 3: 63, 63; 4: 9 + 48, 3 + 32; 7: 1, 15. */
    {G4_TYPE_Q4_K, {{1, 0x3c}, {3, 0x38}, {4, 0xc5}, {7, 0x3f}, {8, 0x82}, {11, 0x3f}, {12, 0x39}, {15, 0xf1}, {16, 0x21}, {79, 0xf0}, {80, 0x03}, {143, 0xa0}},
     {{0, 255, 0}, {0, 31, -1}, {96, 127, -31.5f}, {128, 159, -17.5f}, {224, 255, -7.5f}, {0, 0, 4}, {127, 127, 913.5f}, {128, 128, 153.5f}, {255, 255, 2.5f}}},
    /* the same, with the fifth bits of 0, 128 and 255 */
    {G4_TYPE_Q5_K, {{1, 0x3c}, {3, 0x38}, {4, 0xc5}, {7, 0x3f}, {8, 0x82}, {11, 0x3f}, {12, 0x39}, {15, 0xf1}, {16, 0x11}, {47, 0x80}, {48, 0x21}, {111, 0xf0}, {112, 0x03},
                    {175, 0xa0}},
     {{0, 255, 0}, {0, 31, -1}, {96, 127, -31.5f}, {128, 159, -17.5f}, {224, 255, -7.5f}, {0, 0, 84}, {127, 127, 913.5f}, {128, 128, 1065.5f}, {255, 255, 18.5f}}},
    /* Scales 0: 1, 2: -1, 4: 2, 6: -128, 8: 1, 15: 1, the others 0, times -32. Bits 4 and 5 of 32: 1, 64: 2, 96: 3 (byte 128), 128: 3, 255: 2. */
    {G4_TYPE_Q6_K, {{209, 0x3c}, {192, 0x01}, {194, 0xff}, {196, 0x02}, {198, 0x80}, {200, 0x01}, {207, 0x01}, {0, 0xba}, {64, 0x05}, {127, 0x70}, {128, 0xe4}, {160, 0x03},
                    {191, 0x80}},
     {{0, 255, -0.0f}, {0, 15, -32}, {32, 47, 32}, {64, 79, -64}, {96, 111, 4096}, {128, 143, -32}, {240, 255, -32}, {0, 0, -22}, {32, 32, 16}, {64, 64, 22},
      {96, 96, -2048}, {128, 128, 21}, {255, 255, 7}}},
    /* Scales 0: 1 + 32 - 32, 1: 2 - 32, 7: 32 - 32, the others -32, times -127. */
    {G4_TYPE_IQ4_XS, {{1, 0x3c}, {2, 0x02}, {3, 0x80}, {4, 0x21}, {8, 0x8f}, {24, 0x10}, {135, 0xf0}},
     {{0, 255, 4064}, {0, 31, -127}, {32, 63, 3810}, {224, 255, -0.0f}, {0, 0, 113}, {16, 16, 1}, {48, 48, 3120}, {255, 255, 0}}},
};

static void check_by_hand(void) {
    int seen[G4_N_TYPES] = {0};
    for (size_t c = 0; c < sizeof by_hand / sizeof *by_hand; c++) {
        const struct by_hand *h = &by_hand[c];
        const g4_type *type = &g4_types[h->type];
        unsigned char block[256] = {0};
        float w[256], expected[256] = {0};
        for (int i = 0; i < 24 && (h->bytes[i].at || h->bytes[i].byte); i++) block[h->bytes[i].at] = (unsigned char)h->bytes[i].byte;
        for (int i = 0; i < 40 && (!i || h->values[i].last || bits_of(h->values[i].value)); i++)
            for (int j = h->values[i].first; j <= h->values[i].last; j++) expected[j] = h->values[i].value;
        widen(h->type, w, block, type->block);
        int i = 0;
        while (i < type->block && bits_of(w[i]) == bits_of(expected[i])) i++;
        CHECK(i == type->block, "%s, block %zu of the list: value %d is %a, expected %a", type->name, c, i, (double)w[i], (double)expected[i]);
        seen[h->type]++;
    }
    for (int t = FIRST; t < G4_N_TYPES; t++) CHECK(seen[t], "%s is not in the list", g4_types[t].name);
}

/* The numbers of ggml, which GGUF files have, and the sizes, which place every row; how many weights share a scale, and the bits of the activations beside them. */
static const struct { const char *name; int ggml, block, bytes, group, bits; } expected[] = {
    {"F32", 0, 1, 4, 0, 0}, {"F16", 1, 1, 2, 0, 0}, {"BF16", 30, 1, 2, 0, 0}, {"Q4_0", 2, 32, 18, 32, 21}, {"Q4_1", 3, 32, 20, 32, 21}, {"Q5_0", 6, 32, 22, 32, 21},
    {"Q5_1", 7, 32, 24, 32, 21}, {"Q8_0", 8, 32, 34, 32, 19}, {"Q2_K", 10, 256, 84, 16, 21}, {"Q3_K", 11, 256, 110, 16, 21}, {"Q4_K", 12, 256, 144, 32, 21},
    {"Q5_K", 13, 256, 176, 32, 21}, {"Q6_K", 14, 256, 210, 16, 21}, {"IQ4_NL", 20, 32, 18, 32, 19}, {"IQ4_XS", 23, 256, 136, 32, 19}, {"MXFP4", 39, 32, 17, 32, 21}};

static void check_table(void) {
    CHECK(sizeof expected / sizeof *expected == G4_N_TYPES, "%d types", (int)G4_N_TYPES);
    for (int t = 0; t < G4_N_TYPES; t++) {
        const g4_type *type = &g4_types[t];
        CHECK(type->name && !strcmp(type->name, expected[t].name) && type->ggml == expected[t].ggml && type->block == expected[t].block && type->bytes == expected[t].bytes,
              "type %d: %s, ggml's %d, %d values in %d bytes; expected %s, %d, %d, %d", t, type->name, type->ggml, type->block, type->bytes, expected[t].name, expected[t].ggml,
              expected[t].block, expected[t].bytes);
        CHECK(type->group == expected[t].group && type->bits == expected[t].bits, "%s: groups of %d, activations of %d bits; expected %d, %d", type->name, type->group, type->bits,
              expected[t].group, expected[t].bits);
        CHECK(!type->widen == !!type->group && !type->unpack == !type->group, "%s: widened or unpacked", type->name);
    }
}

/* ---- Files of reference/quants.py ------------------------------------------------------------------------------------------- */

static uint32_t little(const unsigned char *p) { return p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24; }

static const g4_st_tensor *find(const g4_safetensors *st, const g4_type *type, const char *what) {
    char name[32];
    snprintf(name, sizeof name, "%s.%s", type->name, what);
    return g4_safetensors_find(st, name);
}

/* FNV-1a 64 over the values of the blocks that reference/quants.py describes. */
static uint64_t hash_of(g4_dtype t) {
    enum { BLOCKS = 512 };
    const g4_type *type = &g4_types[t];
    size_t bytes = (size_t)BLOCKS * (size_t)type->bytes, n = (size_t)BLOCKS * (size_t)type->block;
    unsigned char *blocks = room(bytes);
    float *w = room(n * sizeof *w);
    uint32_t s = 1;
    for (size_t i = 0; i < bytes; i++) {
        s = s * 1664525u + 1013904223u;
        blocks[i] = (unsigned char)(s >> 24);
    }
    widen(t, w, blocks, (int)n);
    uint64_t h = 0xcbf29ce484222325u;
    for (size_t i = 0; i < n; i++)
        for (int b = 0; b < 4; b++) h = (h ^ (bits_of(w[i]) >> 8 * b & 255)) * 0x100000001b3u;
    free(blocks), free(w);
    return h;
}

static void check_file(const char *path, int whole) {
    g4_safetensors st;
    g4_error err;
    int failed = g4_safetensors_open(&st, path, 0, &err), types = 0;
    CHECK(!failed, "%s", err.text);
    if (failed) return;
    for (int t = FIRST; t < G4_N_TYPES; t++) {
        const g4_type *type = &g4_types[t];
        const g4_st_tensor *blocks = find(&st, type, "blocks"), *values = find(&st, type, "values"), *hash = find(&st, type, "hash");
        if (!blocks && !values && !whole) continue;
        size_t n = values ? values->bytes / 4 : 0, off = 0, first = 0;
        int fits = blocks && values && !strcmp(blocks->dtype, "U8") && !strcmp(values->dtype, "F32") && n && n % (size_t)type->block == 0 && n < INT32_MAX &&
                   blocks->bytes == n / (size_t)type->block * (size_t)type->bytes;
        CHECK(fits, "%s: no blocks of %s with their values", path, type->name);
        if (!fits) continue;
        types++;
        float *w = room((n + 1) * sizeof *w), *piece = room((size_t)type->block * sizeof *piece);
        w[n] = 12345;
        widen((g4_dtype)t, w, blocks->data, (int)n);
        for (size_t i = 0; i < n; i++)
            if (bits_of(w[i]) != canonical(little(values->data + 4 * i)) && !off++) first = i;
        CHECK(!off, "%s: %zu values of %s have other bits than gguf-py's; the first, value %zu of block %zu, is %a", path, off, type->name, first % (size_t)type->block,
              first / (size_t)type->block, (double)w[first]);
        CHECK(w[n] == 12345, "%s: widen writes behind its last value", type->name);
        size_t last = n - (size_t)type->block;
        widen((g4_dtype)t, piece, blocks->data + blocks->bytes - type->bytes, type->block);
        off = 0;
        for (int i = 0; i < type->block; i++) off += bits_of(piece[i]) != bits_of(w[last + (size_t)i]);
        CHECK(!off, "%s: the last block by itself differs in %zu values", type->name, off);
        free(w), free(piece);
        if (!hash && !whole) continue;
        char digits[17];
        snprintf(digits, sizeof digits, "%016llx", (unsigned long long)hash_of((g4_dtype)t));
        CHECK(hash && hash->bytes == 16 && !memcmp(digits, hash->data, 16), "%s: the hash over 512 blocks is %s, of gguf-py's values %.16s", type->name, digits,
              hash && hash->bytes == 16 ? (const char *)hash->data : "missing");
    }
    CHECK(types && (!whole || types == G4_N_TYPES - FIRST), "%s: %d types", path, types);
    g4_safetensors_close(&st);
}

/* ---- The oracle's operations ------------------------------------------------------------------------------------------------ */

/* The rule for products with quantised weights (README, "Quantised weights"), written once more: with the C library, 64 bits, one result at a time. */
static int sums_too_large;

static float by_rule(const g4_tensor *W, int64_t row, const float *x, int q16) {
    const g4_type *type = &g4_types[W->type];
    const int group = expected[W->type].group, bits = expected[W->type].bits;
    volatile float lane[16] = {0}; /* volatile: one rounding for each operation, whatever the compiler likes */
    for (int i = 0; i < W->cols; i += group) {
        const int j = i % type->block / group * group; /* where the group begins in its block */
        double max = 0, s;
        int64_t sum = 0, sum_x = 0;
        int e, finite = 1;
        g4_block b = {.min = {0}};
        type->unpack(&b, (const unsigned char *)W->data + (size_t)row * g4_row_bytes(W) + (size_t)(i / type->block) * (size_t)type->bytes);
        for (int k = 0; k < group; k++) {
            if (!isfinite(x[i + k])) finite = 0;
            else if (fabs((double)x[i + k]) > max) max = fabs((double)x[i + k]);
        }
        frexp(max, &e); /* max < 2^e */
        if (e < -102 || max == 0) e = -102;
        s = ldexp(1, e - bits);
        if (q16) s = (float)(fmax(max, ldexp(1, -102)) / 32639); /* a float32 quotient, as the number that multiplies is */
        for (int k = 0; finite && k < group; k++) {
            double X = fmin(fmax(rint((double)x[i + k] / s), 1 - ldexp(1, bits)), ldexp(1, bits) - 1);
            if (q16) X = rint((float)((double)x[i + k] * (float)(32639 / fmax(max, ldexp(1, -102)))));
            sum += b.q[j + k] * (int64_t)X;
            sum_x += (int64_t)X;
        }
        sums_too_large += sum < INT32_MIN || sum > INT32_MAX;
        volatile float product = (float)sum, with_x = (float)sum_x, scale = finite ? (float)s : NAN;
        product = product * b.scale[j / group];
        product = product * scale;
        with_x = with_x * scale;
        with_x = with_x * b.min[j / group];
        if (type->mins) product = product - with_x;
        lane[i / group % 16] = lane[i / group % 16] + product;
    }
    for (int k = 8; k; k /= 2)
        for (int j = 0; j < k; j++) lane[j] = lane[j] + lane[j + k];
    return lane[0];
}

static void matmul_by_rule(const g4_run *run, float *y, const g4_tensor *W, const float *x, int T) {
    for (int t = 0; t < T; t++)
        for (int64_t o = 0; o < W->rows; o++) y[t * W->rows + o] = by_rule(W, o, x + t * W->cols, run->precision == G4_Q16);
}

static const g4_run oracle = {.backend = &g4_backend_scalar, .threads = 1}, oracle_bf16 = {.backend = &g4_backend_scalar, .threads = 1, .precision = G4_BF16},
                    oracle_q16 = {.backend = &g4_backend_scalar, .threads = 1, .precision = G4_Q16};

/* rows x cols quantised weights and the same as float32; `rounded`: to bfloat16. Rows come in groups; one that is not in use (its bit of `used` is clear) is
 * bytes 0xff and NaN, so that whoever reads it shows it. */
typedef struct weights {
    g4_tensor blocks, floats;
    unsigned char *bytes, *plain;
} weights;

static weights make_weights(g4_dtype t, int rows, int cols, int group, unsigned used, int rounded) {
    static const int halves[G4_N_TYPES][2] = {[G4_TYPE_Q4_1] = {0, 2}, [G4_TYPE_Q5_1] = {0, 2}, [G4_TYPE_Q2_K] = {80, 82}, [G4_TYPE_Q3_K] = {108, 108}, [G4_TYPE_Q4_K] = {0, 2},
                                              [G4_TYPE_Q5_K] = {0, 2}, [G4_TYPE_Q6_K] = {208, 208}};
    const g4_type *type = &g4_types[t];
    size_t row_bytes = (size_t)(cols / type->block) * (size_t)type->bytes;
    weights m = {.bytes = room((size_t)rows * row_bytes), .plain = room((size_t)rows * (size_t)cols * 4)};
    float *w = room((size_t)cols * sizeof *w);
    uint32_t seed = (uint32_t)(rows + cols);
    for (int o = 0; o < rows; o++) {
        unsigned char *row = m.bytes + (size_t)o * row_bytes;
        memset(row, 0xff, row_bytes);
        memset(m.plain + (size_t)o * (size_t)cols * 4, 0xff, (size_t)cols * 4);
        if (!(used >> o / group & 1)) continue;
        for (size_t i = 0; i < row_bytes; i++) row[i] = (unsigned char)((seed = seed * 1664525u + 1013904223u) >> 24);
        for (unsigned char *b = row; b < row + row_bytes; b += type->bytes) {
            if (t == G4_TYPE_MXFP4) b[0] = (unsigned char)(120 + b[0] % 8);
            else b[halves[t][0] + 1] = (unsigned char)(0x24 | (b[halves[t][0] + 1] & 0x83)), b[halves[t][1] + 1] = (unsigned char)(0x24 | (b[halves[t][1] + 1] & 0x83));
        }
        g4_widen(t, w, row, cols);
        for (int i = 0; i < cols; i++) {
            float x = rounded ? g4_bf16_round(w[i]) : w[i];
            uint32_t bits;
            memcpy(&bits, &x, sizeof bits);
            for (int b = 0; b < 4; b++) m.plain[((size_t)o * (size_t)cols + (size_t)i) * 4 + (size_t)b] = (unsigned char)(bits >> 8 * b);
        }
    }
    free(w);
    m.blocks = (g4_tensor){.data = m.bytes, .type = t, .rows = rows, .cols = cols};
    m.floats = (g4_tensor){.data = m.plain, .type = G4_TYPE_F32, .rows = rows, .cols = cols};
    return m;
}

static void free_weights(weights m) { free(m.bytes), free(m.plain); }

/* What differs, NaN included. */
static int differing(const float *a, const float *b, int n) {
    int off = 0;
    for (int i = 0; i < n; i++) off += isnan(a[i]) || bits_of(a[i]) != bits_of(b[i]);
    return off;
}

/* In bf16 precision each operation gives on quantised weights what it gives on the floats that they stand for; in float32 products are those of the rule. None
 * reads a row but its own. Rows of 768 weights are not a multiple of the 512 that are widened at once, nor of 16 groups of 32. */
static void check_operations(g4_dtype t, int bf16) {
    enum { N = 768, M = 5, T = 3, E = 3, K = 2 };
    const int D = g4_types[t].block, Fe = D == 32 ? 704 : D; /* 704 is 26B-A4B's, whose experts cannot have blocks of 256 */
    const g4_run *run = bf16 ? &oracle_bf16 : &oracle;
    const char *name = g4_types[t].name, *precision = bf16 ? "bf16" : "f32";
    static float x[T * N], a[T * N], b[T * N], gate_up[2 * 704], down[256];
    for (int i = 0; i < T * N; i++) x[i] = (float)(i * 7919 % 1000 - 500) / 256;

    weights w = make_weights(t, M, N, 1, 31, bf16);
    g4_backend_scalar.matmul(run, a, &w.blocks, x, T);
    if (bf16) g4_backend_scalar.matmul(run, b, &w.floats, x, T);
    else matmul_by_rule(run, b, &w.blocks, x, T);
    CHECK(!differing(a, b, T * M), "matmul of %s, %s: %d of %d results differ", name, precision, differing(a, b, T * M), T * M);
    free_weights(w);

    static const int32_t token[T] = {4, 1, 4};
    w = make_weights(t, M, N, 1, 1 << 4 | 1 << 1, bf16);
    g4_backend_scalar.embed(run, a, &w.blocks, token, T, 39.191835f);
    g4_backend_scalar.embed(run, b, &w.floats, token, T, 39.191835f);
    CHECK(!differing(a, b, T * N), "embed of %s, %s: %d of %d results differ", name, precision, differing(a, b, T * N), T * N);
    free_weights(w);

    static const int32_t index[T * K] = {0, 2, 0, 2, 0, 2};
    static const float weight[T * K] = {0.75f, 0.25f, 0.5f, 0.5f, 1.25f, 0.125f};
    for (int apart = 0; apart < 2; apart++) { /* gate and up in one tensor, or in two */
        int rows = apart ? Fe : 2 * Fe;
        weights gate = make_weights(t, E * rows, D, rows, 5, bf16), up = make_weights(t, E * Fe, D, Fe, 5, bf16), out = make_weights(t, E * D, Fe, D, 5, bf16);
        g4_layer blocks = {.experts_gate_up_proj = gate.blocks, .experts_down_proj = out.blocks}, floats = {.experts_gate_up_proj = gate.floats, .experts_down_proj = out.floats};
        if (apart) blocks.experts_up_proj = up.blocks, floats.experts_up_proj = up.floats;
        g4_experts_args args = {.y = a, .x = x, .index = index, .weight = weight, .layer = &blocks, .T = T, .D = D, .K = K, .Fe = Fe, .room = 1, .gate_up = gate_up, .down = down};
        g4_backend_scalar.experts(run, &args);
        args.y = b, args.layer = &floats;
        g4_backend again = g4_backend_scalar;
        g4_run with_rule = {.backend = &again, .threads = 1};
        again.matmul = matmul_by_rule;
        if (!bf16) args.layer = &blocks;
        g4_backend_scalar.experts(bf16 ? run : &with_rule, &args);
        CHECK(!differing(a, b, T * D), "experts of %s, %s, %s: %d of %d results differ", name, precision, apart ? "two tensors" : "one tensor", differing(a, b, T * D), T * D);
        free_weights(gate), free_weights(up), free_weights(out);
    }
}

/* Products with activations of every size, some of them no numbers: the rule's bits, and beside float64 the error that the rule allows. */
static void check_products(g4_dtype t, const g4_run *run) {
    enum { N = 1536, M = 40, T = 14 };
    static float x[T * N], y[T * M], z[T * M];
    const g4_type *type = &g4_types[t];
    uint32_t seed = 7;
    for (int i = 0; i < T * N; i++) {
        seed = seed * 1664525u + 1013904223u;
        float uniform = (float)(seed >> 8) * 0x1p-24f - 0.5f;
        seed = seed * 1664525u + 1013904223u;
        x[i] = i < 4 * N ? uniform : ldexpf(uniform, (int)(seed >> 24) % (i < 8 * N ? 40 : 250) - (i < 8 * N ? 20 : 140)); /* some below 2^-126 */
    }
    for (int i = 0; i < N; i++) x[8 * N + i] = i % 64 == 5 ? 0x1.fffffep0f : i % 64 == 37 ? -0x1.fffffep0f : 0; /* which round up to the next power of two */
    for (int i = 0; i < 32; i++) x[9 * N + i] = 0x1.fffffep127f;
    x[10 * N + 700] = INFINITY, x[11 * N + 1] = NAN;
    for (int i = 12 * N; i < T * N; i++) { /* groups of nothing but zeros or less than 2^-90, down to the smallest floats */
        seed = seed * 1664525u + 1013904223u;
        x[i] = i / 32 % 8 == 7 ? (i % 2 ? 0 : -0.0f) : ldexpf((float)(seed >> 8) * 0x1p-24f - 0.5f, -90 - i / 32 % 59);
    }

    weights w = make_weights(t, M, N, M, 1, 0);
    if (t == G4_TYPE_Q8_0) memset(w.bytes + 2, 0x80, 32); /* -128, which meets the largest activations */
    for (int i = 0; t == G4_TYPE_MXFP4 && i < N / 32; i++) w.bytes[(M - 1) * g4_row_bytes(&w.blocks) + (size_t)i * 17] = (unsigned char)(i % 16); /* down to 2^-128 */
    g4_backend_scalar.matmul(run, y, &w.blocks, x, T);
    matmul_by_rule(run, z, &w.blocks, x, T);
    int off = 0, numbers = 0;
    for (int i = 0; i < T * M; i++) off += bits_of(y[i]) != bits_of(z[i]), numbers += i >= 10 * M && i < 12 * M && !isnan(y[i]);
    CHECK(!off, "products of %s: %d of %d have other bits than the rule's", type->name, off, T * M);
    CHECK(!numbers, "products of %s: %d with an infinity or NaN are numbers", type->name, numbers);

    double error = 0, square = 0;
    float *row = room(N * sizeof *row);
    for (int o = 0; o < M; o++) {
        g4_widen(t, row, w.bytes + (size_t)o * g4_row_bytes(&w.blocks), N);
        for (int k = 0; k < 4; k++) {
            double exact = 0;
            for (int i = 0; i < N; i++) exact += (double)row[i] * (double)x[k * N + i];
            error += (y[k * M + o] - exact) * (y[k * M + o] - exact), square += exact * exact;
        }
    }
    error = sqrt(error / square);
    const double bar = run->precision == G4_Q16 ? 2e-5 : type->bits == 21 ? 6e-7 : 2e-6;
    CHECK(error < bar && error > bar / 20, "products of %s: relative error %.2g", type->name, error);
    free(row), free_weights(w);
}

int main(int argc, char **argv) {
    for (int i = 2; i < argc; i++) check_file(argv[i], 0);
    if (argc > 2) return test_done("quants");
    check_table();
    check_by_hand();
    check_file("test/quants.safetensors", 1);
    for (int t = FIRST; t < G4_N_TYPES; t++)
        for (int bf16 = 0; bf16 < 2; bf16++) check_operations((g4_dtype)t, bf16);
    for (int t = FIRST; t < G4_N_TYPES; t++) check_products((g4_dtype)t, &oracle), check_products((g4_dtype)t, &oracle_q16);
    CHECK(!sums_too_large, "%d sums of a group leave 32 bits", sums_too_large);
    return test_done("quants");
}
