/* test_blis.c - backend_blis.c against the scalar backend: not the same bits, but an NMSE of at most 1e-7, for products of many shapes and for whole models.
 *
 * It includes backend_blis.c, so that products of few tokens go through the library too. A build without BLIS=1 has nothing to test.
 */
#include "gemma4.h"
#include "test.h"

#ifndef G4_BLIS
int main(void) {
    SKIP("this build has no backend \"blis\"; make BLIS=1");
    return test_done("test_blis");
}
#else
#define FROM_TOKENS 2
#include "backend_blis.c"

#include <dirent.h>
#include <math.h>

static g4_error err;

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

/* Of y beside what is expected; NaN if either has one. */
static double nmse(const float *y, const float *expected, size_t n) {
    double error = 0, norm = 0;
    for (size_t i = 0; i < n; i++) {
        double d = (double)y[i] - (double)expected[i];
        error += d * d, norm += (double)expected[i] * (double)expected[i];
    }
    return norm > 0 ? error / norm : error;
}

/* Rows and columns on both sides of a panel's size, and tokens on both sides of FROM_TOKENS; y has room to show that nothing behind it is written. */
static void test_products(void) {
    static const int widths[] = {1, 31, 48, 511, 512, 513, 1024, 1536, 2051}, heights[] = {1, 16, 127, 128, 129, 700};
    static const g4_dtype types[] = {G4_TYPE_F32, G4_TYPE_F16, G4_TYPE_BF16};
    for (int round = 0; round < 120; round++) {
        int cols = widths[pick(0, 8)], rows = heights[pick(0, 5)], T = round % 10 ? pick(2, 20) : pick(1, 90), threads = pick(1, 3), bf16 = round % 4 == 3;
        g4_tensor W = {.type = types[round % 3], .rows = rows, .cols = cols};
        size_t n = (size_t)T * (size_t)rows, weights = (size_t)rows * (size_t)cols, size = (size_t)g4_types[W.type].bytes;
        unsigned char *w = room(weights * size + 1);
        float *x = room(sizeof *x * (size_t)T * (size_t)cols), *y = room(sizeof *y * (n + 8)), *expected = room(sizeof *y * n);
        for (size_t i = 0; i < weights; i++) { /* at an odd address; halves of any bits but NaN and infinity */
            float value = (float)(int32_t)rng() * 0x1p-31f;
            uint32_t bits;
            memcpy(&bits, &value, sizeof bits);
            if (W.type == G4_TYPE_BF16) bits >>= 16;
            if (W.type == G4_TYPE_F16) bits = rng() & 0xbfff;
            for (size_t b = 0; b < size; b++) w[1 + i * size + b] = (unsigned char)(bits >> 8 * b);
        }
        W.data = w + 1;
        for (size_t i = 0; i < (size_t)T * (size_t)cols; i++) x[i] = (float)(int32_t)rng() * 0x1p-31f;
        for (size_t i = 0; i < n + 8; i++) y[i] = NAN;
        g4_run run = {.backend = &g4_backend_blis, .threads = threads, .precision = bf16 ? G4_BF16 : G4_F32};
        size_t scratch = g4_backend_blis.scratch(T, cols, threads), changed = 0;
        float *work = room(sizeof *work * (scratch + 8));
        for (size_t i = 0; i < scratch + 8; i++) work[i] = NAN;
        run.scratch = work;
        g4_backend_blis.matmul(&run, y, &W, x, T);
        for (size_t i = scratch; i < scratch + 8; i++) changed += !isnan(work[i]);
        CHECK(!changed, "matmul [%d][%d], T %d, threads %d writes behind its scratch", rows, cols, T, threads);
        run.threads = 1;
        g4_backend_scalar.matmul(&run, expected, &W, x, T);
        double e = nmse(y, expected, n), bar = bf16 ? 1e-5 : 1e-12; /* bfloat16: a sum on the other side of a tie is 2^-8 off */
        CHECK(e <= bar, "matmul [%d][%d] of %s, T %d, threads %d, bf16 %d: NMSE %g", rows, cols, g4_types[W.type].name, T, threads, bf16, e);
        int inexact = 0, touched = 0;
        for (size_t i = 0; bf16 && i < n; i++) inexact += y[i] != g4_bf16_round(y[i]);
        for (size_t i = n; i < n + 8; i++) touched += !isnan(y[i]);
        CHECK(!inexact && !touched, "matmul [%d][%d], T %d: %d results are no bfloat16, %d were written behind the last", rows, cols, T, inexact, touched);
        free(w), free(x), free(y), free(expected), free(work);
    }
}

/* Logits [T][V] of T tokens in one chunk; NULL with err filled. */
static float *logits_of(const char *path, const g4_backend *backend, int threads, g4_precision precision, int T, int *V) {
    g4_model *m = g4_open_with(path, NULL, backend, &err);
    g4_state_options o = {.ctx = T, .chunk = 128, .threads = threads, .precision = precision};
    g4_state *s = m ? g4_state_open(m, &o, &err) : NULL;
    float *logits = NULL;
    if (s) {
        const g4_config *c = g4_get_config(m);
        uint32_t ids = (uint32_t)(c->hidden_size_per_layer_input ? MIN(c->vocab_size, c->vocab_size_per_layer_input) : c->vocab_size);
        g4_row *rows = room(sizeof *rows * (size_t)T);
        for (int i = 0; i < T; i++) rows[i] = (g4_row){(int32_t)((uint32_t)(i * 7919 + 3) % ids), 0, i, 1};
        *V = c->vocab_size;
        logits = room(sizeof *logits * (size_t)T * (size_t)*V);
        if (g4_forward(s, rows, T, logits, &err)) free(logits), logits = NULL;
        free(rows);
    }
    g4_state_close(s);
    g4_close(m);
    return logits;
}

/* The two best tokens of a row agree unless they lie closer together than the row's largest error. */
static int other_choices(const float *y, const float *expected, int T, int V) {
    int wrong = 0;
    for (int t = 0; t < T; t++, y += V, expected += V) {
        int best = 0, ours = 0;
        double error = 0;
        for (int i = 0; i < V; i++) {
            error = fmax(error, fabs((double)y[i] - (double)expected[i]));
            if (expected[i] > expected[best]) best = i;
            if (y[i] > y[ours]) ours = i;
        }
        wrong += expected[best] - expected[ours] > 2 * error;
    }
    return wrong;
}

static double distance(const float *a, const float *b, size_t n) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
    return sqrt(sum);
}

/* In float32 the bar is the NMSE. In bfloat16 a sum on the other side of a tie goes on through the layers: no more than the roundings themselves do. */
static void test_model(const char *path) {
    enum { T = 70 };
    int V = 0;
    float *oracle[2] = {logits_of(path, &g4_backend_scalar, 1, G4_F32, T, &V), logits_of(path, &g4_backend_scalar, 1, G4_BF16, T, &V)};
    CHECK(oracle[0] && oracle[1], "%s: %s", path, err.text);
    for (int bf16 = 0; bf16 < 2 && oracle[0] && oracle[1]; bf16++) {
        const size_t n = (size_t)T * (size_t)V;
        float *first = NULL;
        for (int threads = 1; threads <= 4; threads *= 2) {
            float *y = logits_of(path, &g4_backend_blis, threads, bf16 ? G4_BF16 : G4_F32, T, &V);
            CHECK(y, "%s: %s", path, err.text);
            if (!y) continue;
            double e = nmse(y, oracle[bf16], n), ratio = distance(y, oracle[1], n) / distance(oracle[0], oracle[1], n);
            if (bf16) CHECK(ratio <= 1, "%s in bf16, %d threads: as far from the scalar backend as %g times float32 is", path, threads, ratio);
            else CHECK(e <= 1e-7 && !other_choices(y, oracle[0], T, V), "%s, %d threads: NMSE %g, or another best token", path, threads, e);
            CHECK(!first || !memcmp(y, first, n * sizeof *y), "%s, bf16 %d: %d threads give other bits than one", path, bf16, threads);
            if (first) free(y);
            else first = y;
        }
        free(first);
    }
    free(oracle[0]), free(oracle[1]);
}

/* Whatever the library's own settings ask for, it stays on the thread that calls it. */
static int threads_of_process(void) {
    char line[256];
    int n = 0;
    FILE *f = fopen("/proc/self/status", "r");
    while (f && fgets(line, sizeof line, f))
        if (!strncmp(line, "Threads:", 8)) n = atoi(line + 8);
    if (f) fclose(f);
    return n;
}

static void test_threads(void) {
    enum { N = 1024 };
    float *x = room(sizeof *x * N * N), *y = room(sizeof *y * N * N);
    const g4_tensor W = {.data = x, .type = G4_TYPE_F32, .rows = N, .cols = N};
    const g4_run run = {.backend = &g4_backend_blis, .threads = 1};
    int before = threads_of_process();
    g4_backend_blis.matmul(&run, y, &W, x, N);
    if (before) CHECK(threads_of_process() == before, "a product with one thread left %d threads, %d before", threads_of_process(), before);
    else SKIP("no /proc/self/status to count threads");
    free(x), free(y);
}

int main(void) {
    setenv("BLIS_NUM_THREADS", "3", 1), setenv("OPENBLAS_NUM_THREADS", "3", 1);
    CHECK(!unusable(), "%s", unusable());
    test_threads();
    test_products();
    static const char *const folders[] = {"test/fixtures", "models"};
    for (int f = 0; f < 2; f++) {
        DIR *d = opendir(folders[f]);
        CHECK(d, "%s is there", folders[f]);
        for (struct dirent *e; d && (e = readdir(d));) {
            char path[1024];
            snprintf(path, sizeof path, "%s/%s/config.json", folders[f], e->d_name);
            FILE *config = e->d_name[0] == '.' ? NULL : fopen(path, "rb");
            if (!config) continue;
            fclose(config);
            path[strlen(path) - strlen("/config.json")] = 0;
            test_model(path);
        }
        if (d) closedir(d);
    }
    return test_done("test_blis");
}
#endif
