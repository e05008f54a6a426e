/* test_backend.c - backend_cpu.c against the scalar operations of gemma4.c: not close, the same bits.
 *
 *     build/test_backend ./gemma4 [exhaustive]     exhaustive: exp, tanh and GELU for all 2^32 floats (some minutes)
 *
 * It includes backend_cpu.c to reach each version of the kernels that this processor can run, not only the one that would be chosen. Two NaN count as
 * equal: which NaN an operation gives is up to the processor. Order: helpers, elementwise functions, operations, whole models.
 */
#include <stddef.h>

static const struct kernels *version; /* the kernels under test */
static size_t share_from;             /* work from this size on is shared by the threads */
#define KERNELS version
#define SHARE_FROM share_from
#include "backend_cpu.c"

#include "test.h"

#include <dirent.h>

static uint64_t rng_state = 1;
static uint32_t rng(void) { /* xorshift64* */
    rng_state ^= rng_state >> 12, rng_state ^= rng_state << 25, rng_state ^= rng_state >> 27;
    return (uint32_t)((rng_state * 2685821657736338717u) >> 32);
}
static int pick(int low, int high) { return low + (int)(rng() % (uint32_t)(high - low + 1)); }

static void *room(size_t n) {
    void *p = calloc(n ? n : 1, 1);
    if (!p) abort();
    return p;
}

/* Values of one kind: 0 ordinary, 1 tiny (sums and products are subnormal), 2 huge (they overflow), 3 all of these, zeros of both signs and infinities. */
static float value(int kind) {
    float x = (float)(int32_t)rng() * 0x1p-31f;
    if (kind == 1) return x * 0x1p-75f;
    if (kind == 2) return x * 0x1p70f;
    if (kind == 3)
        switch (rng() % 12) {
        case 0: return x * 0x1p-75f;
        case 1: return x * 0x1p-140f;
        case 2: return x * 0x1p70f;
        case 3: return x * 0x1p126f;
        case 4: return 0;
        case 5: return -0.0f;
        case 6: return rng() % 8 ? x : x < 0 ? -INFINITY : INFINITY;
        default: return x * 8;
        }
    return x * 4;
}

static float *values(size_t n, int kind) {
    float *x = room(n * sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = value(kind);
    return x;
}

/* A weight of a type, at an odd address. Halves are any bits but those of NaN: subnormals and infinities too. Blocks of quantised types are any bits; the
 * halves in them, which are NaN or infinite only for kind 3, stand at their first 4 or last 4 bytes, or are no halves. */
static g4_tensor weight(int64_t rows, int64_t cols, g4_dtype type, int kind, void **memory) {
    size_t n = (size_t)(rows * cols), size = (size_t)g4_types[type].bytes, block = (size_t)g4_types[type].block;
    unsigned char *p = room(n / block * size + 1);
    *memory = p++;
    for (size_t i = 0; type > G4_TYPE_BF16 && i < n / block; i++, p += size) {
        for (size_t b = 0; b < size; b++) p[b] = (unsigned char)rng();
        if (type == G4_TYPE_MXFP4 && kind == 2) p[0] &= 3; /* scales of 2^-128 to 2^-125, beside large activations */
        const size_t at[] = {1, 3, size - 1, size - 3}; /* the upper bytes of what may be halves */
        for (int k = 0; k < 4; k++) p[at[k]] &= kind == 3 ? 0xff : kind == 1 ? 0x83 : kind == 2 ? 0xfb : 0xa3; /* any; subnormal; large; less than 1 */
    }
    p = (unsigned char *)*memory + 1;
    for (size_t i = 0; type <= G4_TYPE_BF16 && i < n; i++) {
        uint32_t bits = bits_of(value(kind));
        if (type == G4_TYPE_BF16) bits >>= 16;
        if (type == G4_TYPE_F16) {
            bits = rng() & 0xffff;
            if ((bits & 0x7c00) == 0x7c00) bits &= kind == 3 ? 0xfc00 : 0xbfff;
        }
        for (size_t b = 0; b < size; b++) p[i * size + b] = (unsigned char)(bits >> 8 * b);
    }
    return (g4_tensor){.data = p, .type = type, .rows = rows, .cols = cols};
}

/* Whole blocks. */
static int fit_width(int cols, g4_dtype type) { return (cols + g4_types[type].block - 1) / g4_types[type].block * g4_types[type].block; }

/* The first place where two arrays differ, -1 if none. */
static int64_t difference(const float *a, const float *b, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (bits_of(a[i]) != bits_of(b[i]) && !(a[i] != a[i] && b[i] != b[i])) return (int64_t)i;
    return -1;
}

#define CHECK_SAME(a, b, n, ...) \
    do { \
        int64_t at = difference(a, b, n); \
        char what[256]; \
        snprintf(what, sizeof what, __VA_ARGS__); \
        CHECK(at < 0, "%s: element %lld is %a, scalar %a", what, (long long)at, (double)(a)[at], (double)(b)[at]); \
    } while (0)

static const g4_backend *fast = &g4_backend_cpu, *scalar = &g4_backend_scalar;

static g4_run run_of(const g4_backend *b, int threads, int precision) { return (g4_run){.backend = b, .threads = threads, .precision = (g4_precision)precision}; }

/* Mostly 1: threads that wait for each other on small work are slow where the processor is busy. */
static int pick_threads(void) {
    share_from = rng() % 10 ? 65536 : 0;
    return share_from ? 1 : pick(2, 4);
}

/* ---- elementwise: every stride-th float ---------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    const kernels *k;
} versions[] = {
#ifdef HAVE_AVX
    {"avx512", &table_avx512},
    {"avx2", &table_avx2},
#endif
    {"base", &table_base},
};
enum { N_VERSIONS = (int)(sizeof versions / sizeof *versions) };

static int count_differences(const float *y, const float *expected, int n) {
    int wrong = 0;
    for (int i = 0; i < n; i++) wrong += bits_of(y[i]) != bits_of(expected[i]) && !(y[i] != y[i] && expected[i] != expected[i]);
    return wrong;
}

static void check_elementwise(int first_version, uint64_t stride) {
    enum { N = 4096, JOBS = 256 };
    const uint64_t all = ((uint64_t)1 << 32) / stride;
    static int wrong[JOBS][N_VERSIONS][3];
#pragma omp parallel for schedule(dynamic)
    for (int job = 0; job < JOBS; job++) {
        float x[N], y[N], ones[N], expected[3][N];
        for (int i = 0; i < N; i++) ones[i] = 1;
        for (uint64_t at = all * (uint64_t)job / JOBS, end = all * (uint64_t)(job + 1) / JOBS; at < end; at += N) {
            int n = (int)(end - at < N ? end - at : N);
            for (int i = 0; i < n; i++) x[i] = float_of((uint32_t)((at + (uint64_t)i) * stride));
            if (stride > 1 && job < 2) x[n / 2] = job ? INFINITY : -INFINITY;
            for (int i = 0; i < n; i++) expected[0][i] = g4_expf(x[i]), expected[1][i] = g4_tanhf(x[i]), expected[2][i] = g4_gelu_tanh(x[i]);
            for (int v = first_version; v < N_VERSIONS; v++) {
                memcpy(y, x, sizeof y);
                versions[v].k->exp(y, n, 0);
                wrong[job][v][0] += count_differences(y, expected[0], n);
                memcpy(y, x, sizeof y);
                versions[v].k->softcap(y, (size_t)n, 1, 0); /* tanh(x / 1) * 1 */
                wrong[job][v][1] += count_differences(y, expected[1], n);
                memcpy(y, x, sizeof y);
                versions[v].k->gelu_mul(y, ones, n, 0);
                wrong[job][v][2] += count_differences(y, expected[2], n);
            }
        }
    }
    for (int v = first_version; v < N_VERSIONS; v++)
        for (int f = 0; f < 3; f++) {
            static const char *const names[] = {"exp", "tanh", "gelu_tanh"};
            int sum = 0;
            for (int job = 0; job < JOBS; job++) sum += wrong[job][v][f];
            CHECK(!sum, "%s: %s differs for %d of %llu floats", versions[v].name, names[f], sum, (unsigned long long)all);
            if (stride == 1) printf("%s: %s compared for all %llu floats\n", versions[v].name, names[f], (unsigned long long)all);
        }
}

/* ---- operations ------------------------------------------------------------------------------------------------------------ */

static void check_matmul(const char *name) {
    static const int widths[] = {1, 2, 15, 16, 17, 31, 48, 64, 100, 300, 511, 930, 1024, 1025, 1536, 2051, 4700, 9300}; /* the last two: in parts */
    for (int round = 0; round < 800; round++) {
        g4_dtype type = (g4_dtype)(round % G4_N_TYPES);
        const int which = round % 17 == 0 ? pick(16, 17) : pick(0, 15), cols = fit_width(widths[which], type);
        int rows = pick(1, round % 11 ? 40 : 200), T = round % 3 ? pick(1, round % 7 || which > 15 ? 20 : 300) : 1;
        int kind = round % 5 < 2 ? 0 : round % 5 - 1, precision = pick(0, 3) % 3, threads = pick_threads(); /* f32 more often */
        void *memory;
        g4_tensor W = weight(rows, cols, type, kind, &memory);
        float *x = values((size_t)T * cols, kind), *y = values((size_t)T * rows + 8, 0), *expected = values((size_t)T * rows + 8, 0);
        if (type > G4_TYPE_BF16 && round / G4_N_TYPES % 4 == 0) { /* the largest sums of integers: all weights the same, all activations as far from 0 */
            const float far = pick(0, 1) ? 0x1.fffffep0f : -0x1.fffffep-100f;
            memset((unsigned char *)memory + 1, pick(0, 1) ? 0x80 : 0x77, (size_t)rows * g4_row_bytes(&W));
            for (int i = 0; i < T * cols; i++) x[i] = round / G4_N_TYPES % 8 || i % 2 ? far : -far;
        }
        for (int i = 0; type > G4_TYPE_BF16 && kind == 1 && i < T * cols; i++) x[i] = i / 32 % 5 ? ldexpf(x[i], -15 * (i / 32 % 5)) : 0; /* whole groups of tiny ones, and of zeros */
        memcpy(expected, y, sizeof *y * ((size_t)T * rows + 8)); /* what lies behind y must stay */
        g4_run a = run_of(fast, threads, precision), b = run_of(scalar, 1, precision);
        size_t scratch = round % 13 ? fast->scratch(T, cols, threads) : 0; /* or there is none */
        float behind[8], *work = values(scratch + 8, 0);
        memcpy(behind, work + scratch, sizeof behind);
        if (scratch) a.scratch = work;
        fast->matmul(&a, y, &W, x, T);
        scalar->matmul(&b, expected, &W, x, T);
        CHECK(!memcmp(behind, work + scratch, sizeof behind), "%s: matmul [%d][%d], T %d, threads %d writes behind its scratch", name, rows, cols, T, threads);
        CHECK_SAME(y, expected, (size_t)T * rows + 8, "%s: matmul [%d][%d], T %d, type %s, values %d, precision %d, threads %d", name, rows, cols, T,
                   g4_types[type].name, kind, precision, threads);
        free(memory), free(x), free(y), free(expected), free(work);
    }
}

static void check_rows(const char *name) {
    for (int round = 0; round < 200; round++) {
        int n = pick(1, 20), dim = pick(1, round % 4 ? 80 : 1200), kind = round % 4, precision = pick(0, 1), threads = pick_threads(), with_weight = pick(0, 3);
        void *memory;
        size_t size = (size_t)n * dim;
        g4_tensor w = weight(1, dim, (g4_dtype)(round % 3), kind, &memory);
        float *x = values(size, kind), *y = values(size, 0), *expected = values(size, 0), *up = values(size * 2, kind);
        g4_run a = run_of(fast, threads, precision), b = run_of(scalar, 1, precision);
        fast->norm(&a, y, x, with_weight ? &w : NULL, n, dim, 1e-6f);
        scalar->norm(&b, expected, x, with_weight ? &w : NULL, n, dim, 1e-6f);
        CHECK_SAME(y, expected, size, "%s: norm [%d][%d], values %d, precision %d, threads %d", name, n, dim, kind, precision, threads);

        memcpy(y, x, sizeof *x * size), memcpy(expected, x, sizeof *x * size);
        fast->gelu_mul(&a, y, up, n, dim, (size_t)dim * (1 + round % 2));
        scalar->gelu_mul(&b, expected, up, n, dim, (size_t)dim * (1 + round % 2));
        CHECK_SAME(y, expected, size, "%s: gelu_mul [%d][%d], values %d, precision %d, threads %d", name, n, dim, kind, precision, threads);

        memcpy(y, x, sizeof *x * size), memcpy(expected, x, sizeof *x * size);
        fast->softcap(&a, y, size, 30);
        scalar->softcap(&b, expected, size, 30);
        CHECK_SAME(y, expected, size, "%s: softcap [%d][%d], values %d, precision %d, threads %d", name, n, dim, kind, precision, threads);

        if (dim >= 2) {
            int heads = pick(1, n), T = n / heads, dh = dim / 2 * 2;
            memcpy(y, x, sizeof *x * size), memcpy(expected, x, sizeof *x * size);
            fast->rope(&a, y, up, up + size, T, heads, dh);
            scalar->rope(&b, expected, up, up + size, T, heads, dh);
            CHECK_SAME(y, expected, size, "%s: rope [%d][%d][%d], values %d, precision %d, threads %d", name, T, heads, dh, kind, precision, threads);
        }
        free(memory), free(x), free(y), free(expected), free(up);
    }
}

static void check_attention(const char *name) {
    for (int round = 0; round < 150; round++) {
        int G = pick(1, 3), H = G * pick(1, 9), dh = 2 * pick(1, round % 5 ? 40 : 130), ctx = pick(1, 300), n_seqs = pick(1, 2), T = pick(1, 6);
        int window = pick(0, 1) ? pick(1, ctx) : ctx, R = MIN(ctx, window == ctx ? ctx : window - 1 + T), precision = pick(0, 1), threads = pick_threads();
        int kind = round % 4 == 3 ? 3 : 0, score_rows = H / G + pick(0, 1); /* another layer may have more heads for a K/V head */
        size_t cache = (size_t)n_seqs * G * R * dh, size = (size_t)T * H * dh;
        g4_kv kv = {.k = values(cache, kind), .v = values(cache, kind), .G = G, .dh = dh, .R = R, .window = window};
        int32_t seq[6], pos[6];
        T = MIN(T, ctx);
        int last = pick(T - 1, ctx - 1);
        for (int t = 0; t < T; t++) seq[t] = n_seqs > 1 ? pick(0, 1) : 0, pos[t] = last - (T - 1) + t;
        g4_rows rows = {.seq = seq, .pos = pos, .T = T};
        float *q = values(size, kind), *o = values(size, 0), *expected = values(size, 0), *scores = values((size_t)threads * score_rows * ctx + 8, 0);
        float behind[8];
        memcpy(behind, scores + (size_t)threads * score_rows * ctx, sizeof behind);
        for (size_t i = 0; i < size && kind == 0; i++) q[i] *= 0.2f; /* else softmax sees one key only */
        g4_run a = run_of(fast, threads, precision), b = run_of(scalar, 1, precision);
        g4_attention_args args = {.o = o, .q = q, .kv = &kv, .rows = &rows, .H = H, .scores = scores, .score_rows = score_rows, .ctx = ctx};
        fast->attention(&a, &args);
        args.o = expected;
        scalar->attention(&b, &args);
        CHECK_SAME(o, expected, (size_t)T * H * dh, "%s: attention T %d, H %d, G %d, dh %d, ctx %d, window %d, values %d, precision %d, threads %d", name, T, H, G, dh, ctx,
                   window, kind, precision, threads);
        CHECK(!memcmp(behind, scores + (size_t)threads * score_rows * ctx, sizeof behind), "%s: attention wrote behind the scores", name);
        free(kv.k), free(kv.v), free(q), free(o), free(expected), free(scores);
    }
}

static void check_experts(const char *name) {
    for (int round = 0; round < 60; round++) {
        int T = pick(1, round % 3 ? 9 : 50), D = pick(1, 70), Fe = pick(1, 40), E = pick(1, 9), many = pick(1, 20), K = pick(1, E);
        int precision = pick(0, 1), threads = pick_threads(), type = round % 3, apart = pick(0, 1);
        void *memory[3] = {NULL};
        g4_layer layer = {.experts_gate_up_proj = weight((int64_t)E * (apart ? 1 : 2) * Fe, D, (g4_dtype)type, 0, &memory[0]),
                          .experts_down_proj = weight((int64_t)E * D, Fe, (g4_dtype)type, 0, &memory[1])};
        if (apart) layer.experts_up_proj = weight((int64_t)E * Fe, D, (g4_dtype)type, 0, &memory[2]);
        int32_t *index = room(sizeof *index * (size_t)T * K);
        for (int t = 0; t < T; t++) /* K of E, ascending */
            for (int e = 0, k = 0; k < K; e++)
                if (pick(1, E - e) <= K - k) index[t * K + k++] = e;
        float *x = values((size_t)T * D, 0), *w = values((size_t)T * K, 0), *y = values((size_t)T * D, 0), *expected = values((size_t)T * D, 0);
        float *gate_up = values(2 * (size_t)Fe * many + 8, 0), *down = values((size_t)D * many + 8, 0), behind[2][8];
        memcpy(behind[0], gate_up + 2 * (size_t)Fe * many, sizeof behind[0]), memcpy(behind[1], down + (size_t)D * many, sizeof behind[1]);
        g4_run a = run_of(fast, threads, precision), b = run_of(scalar, 1, precision);
        g4_experts_args args = {.y = y, .x = x, .index = index, .weight = w, .layer = &layer, .T = T, .D = D, .K = K, .Fe = Fe, .room = many, .gate_up = gate_up, .down = down};
        fast->experts(&a, &args);
        args.y = expected;
        scalar->experts(&b, &args);
        CHECK_SAME(y, expected, (size_t)T * D, "%s: experts T %d, D %d, Fe %d, E %d, K %d, room %d, apart %d, precision %d, threads %d", name, T, D, Fe, E, K, many, apart, precision, threads);
        CHECK(!memcmp(behind[0], gate_up + 2 * (size_t)Fe * many, sizeof behind[0]) && !memcmp(behind[1], down + (size_t)D * many, sizeof behind[1]),
              "%s: experts wrote behind their scratch", name);
        free(memory[0]), free(memory[1]), free(memory[2]), free(index), free(x), free(w), free(y), free(expected), free(gate_up), free(down);
    }
}

/* ---- whole models ------------------------------------------------------------------------------------------------------------ */

static void check_model(const char *name, const char *path, int threads) {
    g4_error err = {""};
    share_from = 65536;
    for (int precision = 0; precision < 2; precision++) {
        enum { T = 70 };
        float *logits[2] = {NULL, NULL};
        size_t V = 0;
        int length = 0;
        for (int fast_one = 0; fast_one < 2; fast_one++) {
            g4_options options = {.backend = fast_one ? "cpu" : "scalar"};
            g4_model *m = g4_open(path, &options, &err);
            CHECK(m, "%s", err.text);
            if (!m) continue;
            const g4_config *c = g4_get_config(m);
            length = MIN(T, c->max_position_embeddings);
            g4_state_options o = {.ctx = length, .chunk = fast_one ? 33 : 7, .threads = fast_one ? threads : 1, .precision = (g4_precision)precision};
            g4_state *s = g4_state_open(m, &o, &err);
            CHECK(s, "%s", err.text);
            if (s) {
                g4_row rows[T];
                V = (size_t)c->vocab_size;
                int32_t ids = c->hidden_size_per_layer_input ? MIN(c->vocab_size, c->vocab_size_per_layer_input) : c->vocab_size;
                for (int i = 0; i < length; i++) rows[i] = (g4_row){(int32_t)((uint32_t)(i * 7919 + 3) % (uint32_t)ids), 0, i, 1};
                logits[fast_one] = room(sizeof(float) * V * T);
                CHECK(!g4_forward(s, rows, length, logits[fast_one], &err), "%s", err.text);
            }
            g4_state_close(s);
            g4_close(m);
        }
        if (logits[0] && logits[1])
            CHECK_SAME(logits[1], logits[0], V * (size_t)length, "%s: logits of %s, precision %d", name, path, precision);
        free(logits[0]), free(logits[1]);
    }
}

static void check_models(const char *name) {
    int known = 0;
    for (int i = 0; g4_backend_name(i, NULL); i++) known |= !strcmp(g4_backend_name(i, NULL), "cpu");
    if (!known) {
        SKIP("%s: this build has no backend \"cpu\"", name);
        return;
    }
    static const char *const folders[] = {"test/fixtures", "models"};
    for (int f = 0; f < 2; f++) {
        DIR *d = opendir(folders[f]);
        for (struct dirent *e; d && (e = readdir(d));) {
            char path[1024];
            if (e->d_name[0] == '.') continue;
            snprintf(path, sizeof path, "%s/%s/config.json", folders[f], e->d_name);
            FILE *config = fopen(path, "rb");
            if (!config) continue;
            fclose(config);
            path[strlen(path) - strlen("/config.json")] = 0;
            check_model(name, path, 1 + f);
        }
        if (d) closedir(d);
        else SKIP("%s: no folder %s", name, folders[f]);
    }
}

int main(int argc, char **argv) {
    int first = 0, exhaustive = argc > 2 && !strcmp(argv[2], "exhaustive");
    while (versions[first].k != choose_kernels()) SKIP("%s: this processor does not have it", versions[first++].name); /* it runs those after its own */
    for (int t = 0; t < G4_N_TYPES; t++) {
        const g4_type *type = &g4_types[t];
        const format *f = &formats[t];
        CHECK(!type->group || (f->block == type->block && f->bytes == type->bytes && f->group == type->group && f->mins == type->mins), "%s: other sizes than in the table of types", type->name);
    }
    check_elementwise(first, exhaustive ? 1 : 20011);
    for (int v = first; v < N_VERSIONS; v++) {
        const char *name = versions[v].name;
        version = versions[v].k;
        CHECK(!fast->unusable(), "%s: %s", name, fast->unusable());
        check_matmul(name);
        check_rows(name);
        check_attention(name);
        check_experts(name);
        check_models(name);
    }
    return test_done("backend");
}
