/* backend_blis.c - prefill and batches through a BLAS: products of many tokens by cblas_sgemm, everything else as backend_cpu.c does it.
 *
 * It is not another forward pass, and it is not exact: sgemm adds in an order of its own, so its logits agree with the scalar backend's within an NMSE of
 * 1e-7 and not bit by bit (test/test_blis.c). What it gains, and where, stands in README, "Numbers". Built by `make BLIS=1`. Any library with a CBLAS
 * interface will do; BLIS and OpenBLAS can be told to keep to one thread.
 *
 * That is how threads work here: each of ours takes panels of rows and calls a BLAS that stays where it was called. So --threads is what runs, one pool
 * never waits for another, and the sums do not depend on the number. Reading order: from the top down.
 */
#include "gemma4.h"

#include <cblas.h>
#include <string.h>

#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

#ifndef FROM_TOKENS /* test/test_blis.c has it lower */
#define FROM_TOKENS 64 /* for fewer, backend_cpu.c is faster */
#endif

enum {
    ROWS = 128, COLS = 512, /* of a panel: a quarter of a megabyte stays in the second cache; COLS is a multiple of every type's block */
    SPARE = 16              /* BLIS 0.9 reads up to a row behind the last one of a small matrix: as many rows of memory follow each of them here */
};

#if defined(G4_BLAS_BLIS)
void bli_thread_set_num_threads(intptr_t n); /* of blis.h, which defines too much to be included; its integers are as wide as an address */
#elif defined(G4_BLAS_OPENBLAS)
void openblas_set_num_threads(int n);
#endif

static void keep_to_one_thread(void) {
#if defined(G4_BLAS_BLIS)
    bli_thread_set_num_threads(1);
#elif defined(G4_BLAS_OPENBLAS)
    openblas_set_num_threads(1);
#endif
}

/* y [T][rows of W], columns first .. first + rows - 1, for the tokens of x [T][cols]; of which the last few lie in end [1 .. SPARE][cols] instead.
 * The panel [ROWS + SPARE][COLS] is scratch. */
static void panel_product(const g4_run *run, float *y, const g4_tensor *W, const float *x, const float *end, int T, int first, int rows, float *panel) {
    const g4_type *type = &g4_types[W->type];
    const int cols = (int)W->cols, stride = (int)W->rows, bf16 = run->precision == G4_BF16, last = MIN(SPARE, T), T_x = T - last;
    const unsigned char *w = (const unsigned char *)W->data + (size_t)first * g4_row_bytes(W);
    float *y_end = y + (size_t)T_x * (size_t)stride;
    for (int i = 0; i < cols; i += COLS) {
        const int n = MIN(COLS, cols - i);
        for (int r = 0; r < rows; r++) g4_widen(W->type, panel + (size_t)r * n, w + (size_t)r * g4_row_bytes(W) + (size_t)(i / type->block) * (size_t)type->bytes, n);
        if (bf16 && W->type != G4_TYPE_BF16)
            for (int k = 0; k < rows * n; k++) panel[k] = g4_bf16_round(panel[k]);
        const float sum = i > 0; /* y = sum * y + x times the panel's transpose */
        if (T_x) cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, T_x, rows, n, 1, x + i, cols, panel, n, sum, y + first, stride);
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, last, rows, n, 1, end + i, cols, panel, n, sum, y_end + first, stride);
    }
    for (int t = 0; bf16 && t < T; t++)
        for (int r = first; r < first + rows; r++) y[(size_t)t * (size_t)stride + (size_t)r] = g4_bf16_round(y[(size_t)t * (size_t)stride + (size_t)r]);
}

/* A panel for each thread, and two times SPARE rows of x. */
static size_t scratch(int T, int cols, int threads) {
    const uint64_t floats = T < FROM_TOKENS ? 0 : (uint64_t)threads * (ROWS + SPARE) * COLS + (uint64_t)2 * SPARE * (uint64_t)cols;
    const size_t cpu = g4_backend_cpu.scratch(T, cols, threads); /* for fewer tokens */
    return (size_t)floats == floats ? MAX((size_t)floats, cpu) : SIZE_MAX;
}

static void matmul(const g4_run *run, float *y, const g4_tensor *W, const float *x, int T) {
    const int panels = (int)((W->rows + ROWS - 1) / ROWS), threads = MIN(run->threads, panels);
    const size_t cols = (size_t)W->cols, last = (size_t)MIN(SPARE, T), panel = (ROWS + SPARE) * COLS;
    if (T < FROM_TOKENS || !run->scratch) {
        g4_backend_cpu.matmul(run, y, W, x, T);
        return;
    }
    float *end = run->scratch + panel * (size_t)threads;
    memcpy(end, x + ((size_t)T - last) * cols, sizeof *end * last * cols);
    keep_to_one_thread();
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int worker = 0; worker < threads; worker++) {
        double begin = g4_part_begins(run);
        for (int p = worker; p < panels; p += threads)
            panel_product(run, y, W, x, end, T, p * ROWS, (int)MIN(ROWS, W->rows - (int64_t)p * ROWS), run->scratch + panel * (size_t)worker);
        g4_part_ends(run, worker, begin);
    }
}

/* A library with integers of another size than its header says would read other sizes than it was given. */
static const char *unusable(void) {
    float a[64] = {1, 2, 3, 4, 5, 6}, b[64] = {1, 0, 2, 0, 1, 3}, y[64] = {1, 1, 1, 1}; /* [2][3], [2][3], [2][2], and memory behind them */
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, 2, 2, 3, 1, a, 3, b, 3, 1, y, 2);
    return y[0] == 8 && y[1] == 12 && y[2] == 17 && y[3] == 24 ? NULL : "cblas_sgemm of the library that was linked does not give the product of two small matrices";
}

const g4_backend g4_backend_blis = {.name = "blis", .host_memory = 1, .base = &g4_backend_cpu, .unusable = unusable, .scratch = scratch, .matmul = matmul};
