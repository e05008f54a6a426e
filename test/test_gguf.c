/* test_gguf.c - GGUF files: equal to transformers on every fixture, and refused by name when they are damaged. */
#include "gemma4.h"
#include "test.h"

#include <math.h>

static g4_error err;

static void *room(size_t n) {
    void *p = calloc(n ? n : 1, 1);
    if (!p) abort();
    return p;
}

/* ---- parity: FOLDER/NAME.gguf and FOLDER/NAME.expected.safetensors, ids [T] and logits [T][V] by transformers on the dequantised weights ---- */

static float load_f32(const unsigned char *p) {
    uint32_t bits = p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* The largest difference, relative to the largest expected logit, or NaN if there is one; -1: could not run. */
static double difference(const g4_model *m, const g4_safetensors *expected) {
    const g4_st_tensor *ids = g4_safetensors_find(expected, "ids"), *logits = g4_safetensors_find(expected, "logits");
    if (!ids || !logits || strcmp(logits->dtype, "F32") || (strcmp(ids->dtype, "I32") && strcmp(ids->dtype, "I64"))) return -1;
    int T = (int)ids->shape[0], V = g4_get_config(m)->vocab_size, step = strcmp(ids->dtype, "I64") ? 4 : 8;
    if (logits->bytes != sizeof(float) * (size_t)T * (size_t)V) return -1;
    g4_row *rows = room(sizeof *rows * (size_t)T);
    float *got = room(sizeof *got * (size_t)T * (size_t)V);
    for (int t = 0; t < T; t++) rows[t] = (g4_row){.token = ids->data[step * t] | ids->data[step * t + 1] << 8 | ids->data[step * t + 2] << 16, .pos = t, .want_logits = 1};
    g4_state *s = g4_state_open(m, &(g4_state_options){.chunk = 7}, &err);
    double worst = 0, largest = 0;
    if (!s || g4_forward(s, rows, T, got, &err)) worst = -1;
    for (size_t i = 0; worst != -1 && i < (size_t)T * (size_t)V; i++) {
        double x = (double)load_f32(logits->data + 4 * i), d = fabs(got[i] - x);
        if (!(d <= worst)) worst = d;
        if (fabs(x) > largest) largest = fabs(x);
    }
    g4_state_close(s);
    free(rows);
    free(got);
    return worst == -1 ? -1 : worst / largest;
}

static void check_parity(const char *folder, const char *name, double bar) {
    char path[2][1000];
    g4_safetensors expected;
    snprintf(path[0], sizeof path[0], "%s/%s.gguf", folder, name);
    snprintf(path[1], sizeof path[1], "%s/%s.expected.safetensors", folder, name);
    if (g4_safetensors_open(&expected, path[1], 0, &err)) {
        CHECK(0, "%s", err.text);
        return;
    }
    g4_model *m = g4_open(path[0], NULL, &err);
    CHECK(m, "%s", err.text);
    if (m) {
        double d = difference(m, &expected);
        CHECK(d >= 0 && d <= bar, "%s: logits differ by %g of the largest, at most %g allowed", path[0], d, bar);
        g4_close(m);
    }
    g4_safetensors_close(&expected);
}

static void test_shared_fixtures(void) {
    static const char *const names[] = {"ple-bf16"};
    const char *shared = getenv("SHARED");
    char folder[900];
    if (!shared || !*shared) {
        SKIP("the GGUF fixtures: SHARED is not set");
        return;
    }
    snprintf(folder, sizeof folder, "%s/fixtures/gguf", shared);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) check_parity(folder, names[i], 3e-5);
}

int main(void) {
    test_shared_fixtures();
    return test_done("test_gguf");
}
