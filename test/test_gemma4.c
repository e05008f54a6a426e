/* test_gemma4.c - the forward pass: equal to transformers on every fixture, and one set of bits however the rows are fed.
 *
 * Fixtures are the folders of test/fixtures (made by reference/make_fixtures.py) and, when SHARED is set, of $SHARED/fixtures: each a
 * model with expected.safetensors from transformers. Order: the helpers, single operations, parity, bits, truncation, errors.
 */
#include "gemma4.h"
#include "test.h"

#include <dirent.h>
#include <float.h>
#include <math.h>
#if defined(__SSE__)
#include <xmmintrin.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#endif

static g4_error err;

static uint64_t rng_state = 1;
static uint32_t rng(void) { /* xorshift64*: only to choose ids */
    rng_state ^= rng_state >> 12, rng_state ^= rng_state << 25, rng_state ^= rng_state >> 27;
    return (uint32_t)((rng_state * 2685821657736338717u) >> 32);
}

static void *room(size_t n) {
    void *p = calloc(n ? n : 1, 1);
    if (!p) abort();
    return p;
}

static g4_state *new_state(const g4_model *m, int ctx, int chunk, int n_seqs, int threads) {
    g4_state_options o = {.ctx = ctx, .chunk = chunk, .n_seqs = n_seqs, .threads = threads};
    g4_state *s = g4_state_open(m, &o, &err);
    CHECK(s, "%s", err.text);
    if (!s) abort();
    return s;
}

/* Appends ids [T] to sequence 0 of s, wanting all logits [T][V]. */
static int feed(g4_state *s, const int32_t *ids, int T, float *logits) {
    g4_row *rows = room(sizeof *rows * (size_t)T);
    for (int i = 0; i < T; i++) rows[i] = (g4_row){ids[i], 0, g4_length(s, 0) + i, 1};
    int status = g4_forward(s, rows, T, logits, &err);
    free(rows);
    return status;
}

/* ---- single operations, against values worked out by hand or by others -------------------------------------------------- */

static void check_functions(void) {
    CHECK(g4_expf(0) == 1 && g4_expf(-200) == 0 && g4_expf(-INFINITY) == 0 && isinf(g4_expf(100)) && isnan(g4_expf(NAN)), "exp's corners");
    CHECK(g4_expf(1) == 2.71828175f, "exp(1) = %.9g", g4_expf(1));
    CHECK(g4_expf(-100) == 3.78350585e-44f, "exp(-100) is a subnormal: %.9g", g4_expf(-100));
    CHECK(g4_tanhf(0.5f) == 0.462117165f && g4_tanhf(-20) == -1 && g4_tanhf(1e-20f) == 1e-20f && isnan(g4_tanhf(NAN)), "tanh");
    CHECK(g4_tanhf(0x1.713758p-12f) == 0x1.713756p-12f, "tanh near 0, where (y - 1) / (y + 1) would be 0.5000012 ulp off");
    CHECK(g4_logf(10) == 2.30258512f && g4_logf(1) == 0 && g4_logf(1e-40f) == -92.1034088f, "log: %.9g", g4_logf(1e-40f));
    CHECK(g4_powf(10000, 0.5f) == 100 && g4_powf(1e6f, 0) == 1, "pow");
    float s, c;
    g4_sincosf(131071, &s, &c); /* sin and cos of 131071 by mpmath */
    CHECK(s == -0.575241685f && c == -0.817983508f, "sincos(131071) = %.9g %.9g", s, c);
    float big[] = {50, 1e4f, 1e13f};
    for (int i = 0; i < 3; i++)
        CHECK(g4_gelu_tanh(big[i]) == big[i] && g4_gelu_tanh(-big[i]) == 0, "gelu_tanh(+-%g) = %g %g", big[i], g4_gelu_tanh(big[i]), g4_gelu_tanh(-big[i]));
    CHECK(fabsf(g4_gelu_tanh(1) - 0.841191991f) < 1e-7f, "gelu_tanh(1) = %.9g", g4_gelu_tanh(1)); /* the exact GELU gives 0.841344746 */
    CHECK(g4_bf16_round(1.00390625f) == 1 && g4_bf16_round(1.01171875f) == 1.015625f && isnan(g4_bf16_round(NAN)) && isinf(g4_bf16_round(FLT_MAX)), "bf16: ties to even");
}

static void check_operations(void) {
    const g4_backend *op = &g4_backend_scalar;
    const g4_run run = {.backend = op, .threads = 2};
    /* softcap is c tanh(x / c) */
    float caps[] = {15, 124, -124, 1e4f, 1e30f, -1e30f};
    const float capped[] = {13.863515f, 29.984588f, -29.984588f, 30, 30, -30};
    op->softcap(&run, caps, 6, 30);
    for (int i = 0; i < 6; i++) CHECK(fabsf(caps[i] - capped[i]) <= 2e-6f, "softcap %d: %.9g, expected %.9g", i, caps[i], capped[i]);
    /* norm: eps inside the root, weight as it is */
    float x[20], y[20], w[20], zero[20] = {0};
    for (int i = 0; i < 20; i++) x[i] = 1e-4f, w[i] = 1;
    g4_tensor weight = {.data = w, .type = G4_TYPE_F32, .rows = 1, .cols = 20}, none = {.data = zero, .type = G4_TYPE_F32, .rows = 1, .cols = 20};
    const uint16_t endian = 1;
    if (*(const unsigned char *)&endian == 0) /* weights are little-endian: bytes of 1.0f */
        for (int i = 0; i < 20; i++) memcpy(&w[i], "\0\0\x80\x3f", 4);
    op->norm(&run, y, x, &weight, 1, 20, 1e-6f);
    CHECK(fabsf(y[7] - 0.0995037f) < 1e-6f, "norm of 1e-4 with eps 1e-6: %g", y[7]);
    op->norm(&run, y, x, &none, 1, 20, 1e-6f);
    CHECK(y[7] == 0, "a norm weight of 0 gives 0, not x: %g", y[7]);
    /* rope: pairs (i, i + dh/2); pairs with frequency 0 stay */
    float head[16], cos[8], sin[8], inv_freq[8] = {1, 0.5f};
    int32_t pos = 5;
    for (int i = 0; i < 16; i++) head[i] = (float)i + 1;
    op->rope_table(&run, cos, sin, inv_freq, &pos, 1, 8);
    op->rope(&run, head, cos, sin, 1, 1, 16);
    for (int i = 0; i < 16; i++) CHECK((head[i] != (float)i + 1) == (i % 8 < 2), "rope: dim %d is %g", i, head[i]);
    CHECK(fabsf(head[0] - (1 * 0.28366219f - 9 * -0.95892427f)) < 1e-5f && fabsf(head[8] - (9 * 0.28366219f + 1 * -0.95892427f)) < 1e-5f,
          "rope: %g %g", head[0], head[8]);
    /* the window: with equal scores the output is the mean of the values seen */
    enum { T = 10 };
    for (int W = 1; W <= 12; W++) {
        float k[T * 2] = {0}, v[T * 2], q[T * 2] = {0}, o[T * 2], scores[2 * T];
        float cache_k[T * 2], cache_v[T * 2];
        int32_t seq[T] = {0}, p[T];
        for (int i = 0; i < T; i++) p[i] = i, v[2 * i] = v[2 * i + 1] = (float)i;
        g4_kv kv = {.k = cache_k, .v = cache_v, .G = 1, .dh = 2, .R = T, .window = W};
        g4_rows rows = {.seq = seq, .pos = p, .T = T};
        op->kv_store(&run, &kv, k, v, &rows);
        op->attention(&run, &(g4_attention_args){.o = o, .q = q, .kv = &kv, .rows = &rows, .H = 1, .scores = scores, .score_rows = 1, .ctx = T});
        for (int i = 0; i < T; i++) {
            int first = i - W + 1 < 0 ? 0 : i - W + 1;
            CHECK(fabsf(o[2 * i] - (float)(first + i) / 2) < 1e-5f, "window %d, query %d: mean %g, expected keys %d..%d", W, i, o[2 * i], first, i);
        }
    }
    /* the 16 lanes: 1e8 and -1e8 in one lane cancel before the 1 of that lane is added; any other order gives 0 or another sum */
    float a[48] = {0}, ones[48];
    for (int i = 0; i < 48; i++) memcpy(&ones[i], "\0\0\x80\x3f", 4);
    a[3] = 1e8f, a[19] = -1e8f, a[35] = 1, a[4] = 3e7f, a[12] = 1;
    g4_tensor row = {.data = ones, .type = G4_TYPE_F32, .rows = 1, .cols = 48};
    op->matmul(&run, y, &row, a, 1);
    CHECK(y[0] == 30000001.0f + 1.0f || y[0] == 30000002.0f, "lanes: %.9g, expected 30000002", y[0]);
}

/* ---- parity with transformers ------------------------------------------------------------------------------------------- */

typedef struct comparison {
    const g4_safetensors *expected;
    double bar;
    const char *model;
    int seen;
} comparison;

static void compare(void *user, const char *name, const float *data, int rank, const int64_t *shape) {
    comparison *c = user;
    const g4_st_tensor *t = g4_safetensors_find(c->expected, name);
    if (!t) return;
    c->seen++;
    int same = t->rank == rank && !strcmp(t->dtype, "F32");
    size_t n = 1;
    for (int i = 0; i < rank && same; i++) same = t->shape[i] == shape[i], n *= (size_t)shape[i];
    CHECK(same, "%s %s: another shape or type than transformers'", c->model, name);
    if (!same) return;
    double worst = 0, largest = 1;
    int finite = 1;
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = t->data[4 * i] | (uint32_t)t->data[4 * i + 1] << 8 | (uint32_t)t->data[4 * i + 2] << 16 | (uint32_t)t->data[4 * i + 3] << 24;
        float e;
        memcpy(&e, &bits, 4);
        double d = fabs((double)data[i] - e);
        finite &= isfinite(data[i]) && isfinite(e);
        if (d > worst) worst = d;
        if (fabs(e) > largest) largest = fabs(e);
    }
    CHECK(finite && worst <= c->bar * largest, "%s %s: max abs %g, allowed %g", c->model, name, worst, c->bar * largest);
}

/* int32 or int64 tensor `name` as int32; *n elements. */
static int32_t *ints(const g4_safetensors *st, const char *name, int *n) {
    const g4_st_tensor *t = g4_safetensors_find(st, name);
    *n = 0;
    if (!t || t->rank != 1) return NULL;
    int size = !strcmp(t->dtype, "I64") ? 8 : 4;
    *n = (int)t->shape[0];
    int32_t *out = room(sizeof *out * (size_t)*n);
    for (int i = 0; i < *n; i++) {
        const unsigned char *p = t->data + (size_t)size * (size_t)i;
        out[i] = (int32_t)(p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24);
    }
    return out;
}

/* The number under __metadata__.key in a safetensors header; 0 if there is none. */
static double metadata(const g4_safetensors *st, const char *key) {
    uint64_t size = 0;
    for (int i = 7; i >= 0; i--) size = size << 8 | st->file.data[i];
    g4_json j;
    double value = 0;
    if (g4_json_parse(&j, (const char *)st->file.data + 8, (size_t)size, "header", &err)) return 0;
    uint32_t node = g4_json_get(&j, g4_json_get(&j, 0, "__metadata__"), key);
    if (node) value = atof(g4_json_string(&j, node));
    g4_json_free(&j);
    return value;
}

static int argmax(const float *x, int n) {
    int best = 0;
    for (int i = 1; i < n; i++)
        if (x[i] > x[best]) best = i;
    return best;
}

static void check_bits(const g4_model *m, const char *name, const int32_t *ids, int T);
static void check_truncation(const g4_model *m, const char *name, const int32_t *ids, int T);
static void check_memory(const g4_model *m, const char *name);

/* Everything that is checked on one fixture, by one backend (NULL: the default). Returns 1 if the folder holds one. */
static int check_fixture(const char *folder, const char *name, const char *backend) {
    char path[1200];
    g4_safetensors st;
    int T, n_greedy;
    snprintf(path, sizeof path, "%s/%s/expected.safetensors", folder, name);
    if (g4_safetensors_open(&st, path, 0, &err)) return 0;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    const g4_options options = {.backend = backend};
    g4_model *m = g4_open(path, &options, &err);
    CHECK(m, "%s: %s", path, err.text);
    int32_t *ids = ints(&st, "ids", &T), *greedy = ints(&st, "greedy", &n_greedy);
    CHECK(ids && T > 0, "%s: no ids", path);
    if (m && ids) {
        int V = g4_get_config(m)->vocab_size;
        double noise = metadata(&st, "noise_f32");
        comparison c = {.expected = &st, .bar = 3 * noise > 1e-5 ? 3 * noise : 1e-5, .model = path};
        CHECK(noise > 0 && noise < 1e-4, "%s: noise_f32 is %g", path, noise);
        float *logits = room(sizeof(float) * (size_t)(T + 1) * (size_t)V);
        g4_state *s = new_state(m, T + n_greedy + 1, T, 1, 2);
        g4_set_trace(s, compare, &c);
        CHECK(!feed(s, ids, T, logits), "%s: %s", path, err.text);
        int expected = 0;
        for (int i = 0; i < st.n; i++) {
            const char *t = st.tensors[i].name;
            expected += strcmp(t, "ids") && strcmp(t, "greedy") && strcmp(t, "logits_bf16");
        }
        CHECK(c.seen == expected && expected >= 3, "%s: %d of %d tensors of transformers were met", path, c.seen, expected);
        g4_set_trace(s, NULL, NULL);
        const float *last = logits + (size_t)(T - 1) * V;
        for (int i = 0; i < n_greedy; i++) {
            int32_t next = argmax(last, V);
            CHECK(next == greedy[i], "%s: greedy token %d is %d, transformers says %d", path, i, (int)next, (int)greedy[i]);
            if (feed(s, &next, 1, logits)) break;
            last = logits;
        }
        g4_state_close(s);
        free(logits);
        check_bits(m, path, ids, T);
        check_truncation(m, path, ids, T);
        check_memory(m, path);
    }
    free(ids);
    free(greedy);
    g4_close(m);
    g4_safetensors_close(&st);
    return 1;
}

static int check_folder(const char *folder) {
    int n = 0;
    DIR *d = opendir(folder);
    for (struct dirent *e; d && (e = readdir(d));) n += e->d_name[0] != '.' && check_fixture(folder, e->d_name, "scalar") && check_fixture(folder, e->d_name, NULL);
    if (d) closedir(d);
    return n;
}

/* ---- one set of bits ---------------------------------------------------------------------------------------------------- */

static void check_bits(const g4_model *m, const char *name, const int32_t *ids, int T) {
    size_t V = (size_t)g4_get_config(m)->vocab_size, row = sizeof(float) * V;
    float *whole = room(row * (size_t)T), *other = room(row * (size_t)T);
    g4_state *s = new_state(m, T, T, 1, 1);
    CHECK(!feed(s, ids, T, whole), "%s: %s", name, err.text);
    g4_state_close(s);

    static const int chunks[] = {1, 2, 3, 7, 16};
    for (int i = 0; i < 5; i++) {
        s = new_state(m, T, chunks[i], 1, 1 + i % 3);
        CHECK(!feed(s, ids, T, other) && !memcmp(whole, other, row * (size_t)T), "%s: chunk %d, %d threads: other bits", name, chunks[i], 1 + i % 3);
        g4_state_close(s);
    }
    /* one token per call, then only the last row of a prompt: rows that nobody wants are cut off after the last K/V layer */
    s = new_state(m, T, 4, 1, 2);
    for (int t = 0; t < T; t++) CHECK(!feed(s, ids + t, 1, other + V * (size_t)t), "%s", err.text);
    CHECK(!memcmp(whole, other, row * (size_t)T), "%s: token by token: other bits", name);
    g4_row *rows = room(sizeof *rows * (size_t)T * 3);
    for (int want = 0; want < 3; want++) {
        CHECK(!g4_truncate(s, 0, 0, &err), "%s", err.text);
        int n = 0;
        for (int t = 0; t < T; t++) n += rows[t].want_logits = t == T - 1 || (want && t % 5 == want), rows[t].token = ids[t], rows[t].pos = t, rows[t].seq = 0;
        memset(other, 0xff, row * (size_t)T);
        CHECK(!g4_forward(s, rows, T, other, &err), "%s", err.text);
        for (int t = 0, i = 0; t < T; t++)
            if (rows[t].want_logits) CHECK(!memcmp(whole + V * (size_t)t, other + V * (size_t)i++, row), "%s: pattern %d, row %d alone: other bits", name, want, t);
        CHECK(n == T || *(uint32_t *)(other + V * (size_t)n) == 0xffffffffu, "%s: more rows than asked for", name);
    }
    g4_state_close(s);

    /* three sequences of one batch: the same prompt from the start, the same one joining later, and another one; rows interleaved */
    s = new_state(m, T, 9, 3, 2);
    int at[3] = {0, 0, 0}, bad = 0;
    for (int step = 0; at[0] < T || at[1] < T || at[2] < T; step++) {
        int n = 0, which[3];
        for (int q = 2; q >= 0; q--) {
            if ((q == 1 && step < 5) || at[q] >= T) continue;
            rows[n] = (g4_row){q == 2 ? ids[T - 1 - at[q]] : ids[at[q]], q, at[q], q != 2};
            which[n++] = q;
        }
        if (!n) continue; /* the late sequence has not joined yet */
        CHECK(!g4_forward(s, rows, n, other, &err), "%s", err.text);
        for (int i = 0, k = 0; i < n; i++) {
            if (which[i] != 2) bad += memcmp(whole + V * (size_t)at[which[i]], other + V * (size_t)k++, row) != 0;
            at[which[i]]++;
        }
    }
    CHECK(!bad, "%s: %d rows of a batch differ from running alone", name, bad);
    g4_state_close(s);

    /* causality: what comes later changes nothing before it, and does change what comes after */
    const g4_config *c = g4_get_config(m);
    int known = c->hidden_size_per_layer_input && c->vocab_size_per_layer_input < c->vocab_size ? c->vocab_size_per_layer_input : c->vocab_size;
    int32_t *changed = room(sizeof *changed * (size_t)T);
    for (int t = 1; t < T; t += 1 + T / 6) {
        memcpy(changed, ids, sizeof *ids * (size_t)T);
        for (int i = t; i < T; i++) changed[i] = (ids[i] + 1) % known;
        s = new_state(m, T, 5, 1, 1);
        CHECK(!feed(s, changed, T, other), "%s: %s", name, err.text);
        CHECK(!memcmp(whole, other, row * (size_t)t) && memcmp(whole + V * (size_t)t, other + V * (size_t)t, row), "%s: tokens from %d on leak", name, t);
        g4_state_close(s);
    }
    free(changed);
    free(rows);
    free(whole);
    free(other);
}

/* ---- truncation, memory -------------------------------------------------------------------------------------------------- */

static void check_truncation(const g4_model *m, const char *name, const int32_t *ids, int T) {
    const g4_config *c = g4_get_config(m);
    size_t V = (size_t)c->vocab_size, row = sizeof(float) * V;
    float *whole = room(row * (size_t)T), *other = room(row * (size_t)T);
    int chunk = 6;
    g4_state *s = new_state(m, T, chunk, 1, 1);
    CHECK(!feed(s, ids, T, whole), "%s", err.text);
    int sliding = 0;
    for (int l = 0; l < c->num_hidden_layers; l++) sliding |= c->layers[l].type == G4_SLIDING_ATTENTION && c->layers[l].kv_layer == l;
    int R = c->sliding_window - 1 + chunk < T && sliding ? c->sliding_window - 1 + chunk : T;
    int lowest = R < T ? T - R + c->sliding_window - 1 : 0; /* the ring's oldest position is the first that a query at `lowest` sees */
    for (int length = T - 1; length > 0; length--) {
        int status = g4_truncate(s, 0, length, &err);
        CHECK((status == 0) == (length >= lowest), "%s: truncating %d to %d: %d", name, T, length, status);
        CHECK(g4_length(s, 0) == (status ? T : length), "%s: length %d", name, g4_length(s, 0));
        if (status) continue;
        CHECK(!feed(s, ids + length, T - length, other) && !memcmp(whole + V * (size_t)length, other, row * (size_t)(T - length)),
              "%s: after truncating to %d: other bits", name, length);
    }
    CHECK(g4_truncate(s, 0, T + 1, &err) && g4_truncate(s, 0, -1, &err) && g4_truncate(s, 1, 0, &err) && g4_length(s, 0) == T, "%s: nonsense truncations", name);
    CHECK(!g4_truncate(s, 0, 0, &err) && !feed(s, ids, T, other) && !memcmp(whole, other, row * (size_t)T), "%s: from 0 again: other bits", name);
    g4_state_close(s);
    free(whole);
    free(other);
}

/* The caches are what the formula says: two of float32 [G][dh], times ctx on full layers, times min(ctx, W - 1 + chunk) on sliding ones, nothing on
 * layers that share. */
static void check_memory(const g4_model *m, const char *name) {
    const g4_config *c = g4_get_config(m);
    g4_state_options o = {.ctx = c->max_position_embeddings < 3000 ? c->max_position_embeddings : 3000, .chunk = 5, .n_seqs = 2, .threads = 1};
    size_t kv = 0, expected = 0, padding = 0, total = g4_state_bytes(m, &o, &kv);
    for (int l = 0; l < c->num_hidden_layers; l++) {
        const g4_layer_config *lc = &c->layers[l];
        if (l >= c->num_hidden_layers - c->num_kv_shared_layers) continue;
        size_t rows = (size_t)(lc->type == G4_FULL_ATTENTION ? o.ctx : c->sliding_window - 1 + o.chunk < o.ctx ? c->sliding_window - 1 + o.chunk : o.ctx);
        expected += 2 * 2 * rows * (size_t)lc->num_key_value_heads * (size_t)lc->head_dim * 4;
        padding += 128;
    }
    CHECK(kv >= expected && kv <= expected + padding && total > kv, "%s: caches take %zu bytes, the formula says %zu", name, kv, expected);
}

/* ---- a longer run, errors, two at once ----------------------------------------------------------------------------------- */

static void check_model(const g4_model *m) {
    const g4_config *c = g4_get_config(m);
    size_t V = (size_t)c->vocab_size;
    /* the window crossed several times: ring against a cache that keeps everything */
    int T = 4 * c->sliding_window + 13;
    int32_t *ids = room(sizeof *ids * (size_t)T);
    for (int i = 0; i < T; i++) ids[i] = (int32_t)(rng() % V);
    float *ring = room(sizeof(float) * V), *all = room(sizeof(float) * V);
    g4_row *rows = room(sizeof *rows * (size_t)T);
    for (int i = 0; i < T; i++) rows[i] = (g4_row){ids[i], 0, i, i == T - 1};
    g4_state *a = new_state(m, T, 3, 1, 2), *b = new_state(m, T, T, 1, 1);
    CHECK(!g4_forward(a, rows, T, ring, &err) && !g4_forward(b, rows, T, all, &err) && !memcmp(ring, all, sizeof(float) * V), "%d tokens, window %d: ring and full cache differ", T, c->sliding_window);
    g4_state_close(b);

    /* one model read by several threads, each with a state of its own */
    float *each[4];
    int failed = 0;
    for (int i = 0; i < 4; i++) each[i] = room(sizeof(float) * V);
#pragma omp parallel for num_threads(4) reduction(+ : failed)
    for (int i = 0; i < 4; i++) {
        g4_state_options o = {.ctx = T, .chunk = 5 + i, .threads = 1};
        g4_error e;
        g4_state *s = g4_state_open(m, &o, &e);
        failed += !s || g4_forward(s, rows, T, each[i], &e) || memcmp(each[i], all, sizeof(float) * V);
        g4_state_close(s);
    }
    CHECK(!failed, "%d of 4 states that share a model give other bits", failed);
    for (int i = 0; i < 4; i++) free(each[i]);

    /* errors change nothing */
    g4_row bad[] = {{5, 0, T, 0}, {-1, 0, T, 0}, {(int32_t)V, 0, T, 0}, {5, 1, 0, 0}, {5, -1, 0, 0}, {5, 0, T - 1, 0}};
    static const char *const why[] = {"context", "token id -1", "vocab_size", "sequence 1", "sequence -1", "position"};
    for (int i = 0; i < 6; i++) {
        CHECK(g4_forward(a, &bad[i], 1, ring, &err) && strstr(err.text, why[i]), "bad row %d: \"%s\" should speak of %s", i, err.text, why[i]);
        CHECK(g4_length(a, 0) == T, "bad row %d changed the state", i);
    }
    CHECK(g4_forward(a, rows, 0, ring, &err), "no rows");
    CHECK(!g4_truncate(a, 0, 0, &err) && g4_forward(a, rows, T, NULL, &err) && g4_length(a, 0) == 0, "no room for logits: %s", err.text);
    g4_state_close(a);
    static const g4_state_options wrong[] = {{.ctx = -1}, {.ctx = 1 << 30}, {.chunk = -1}, {.chunk = 1 << 20}, {.n_seqs = -1}, {.threads = -1}, {.threads = 5000}, {.precision = (g4_precision)7}};
    for (int i = 0; i < 8; i++) CHECK(!g4_state_open(m, &wrong[i], &err) && err.text[0], "state options %d", i);
    g4_options no_such = {.backend = "xyz"};
    CHECK(!g4_open("models/austen", &no_such, &err) && strstr(err.text, "xyz") && strstr(err.text, "scalar"), "%s", err.text);
#if defined(__SSE__)
    a = new_state(m, 4, 4, 1, 1);
    unsigned mode = _mm_getcsr();
    _mm_setcsr(mode | 0x8000); /* flush to zero */
    int flushed = g4_forward(a, rows, 1, NULL, &err);
    _mm_setcsr(mode | 0x2000); /* round down */
    int rounded = g4_forward(a, rows, 1, NULL, &err);
    _mm_setcsr(mode);
    CHECK(flushed && rounded && !g4_forward(a, rows, 1, NULL, &err), "a flushing or misrounding caller is told: %d %d %s", flushed, rounded, err.text);
    g4_state_close(a);
#else
    SKIP("flush-to-zero: no way to switch it on here");
#endif
    free(rows);
    free(ring);
    free(all);
    free(ids);
}

/* ---- what the fixtures are too small or too tame to show ----------------------------------------------------------------- */

static const g4_run oracle = {.backend = &g4_backend_scalar, .threads = 1}, oracle_bf16 = {.backend = &g4_backend_scalar, .threads = 1, .precision = G4_BF16};

static uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* A weight as files have it, little-endian: float32, or the upper half of it. */
static void put_f32(unsigned char *p, float x) {
    for (int i = 0; i < 4; i++) p[i] = (unsigned char)(bits_of(x) >> 8 * i);
}
static void put_bf16(unsigned char *p, float x) { p[0] = (unsigned char)(bits_of(x) >> 16), p[1] = (unsigned char)(bits_of(x) >> 24); }

static g4_tensor tensor(const void *data, g4_dtype type, int64_t rows, int64_t cols) { return (g4_tensor){.data = data, .type = type, .rows = rows, .cols = cols}; }

static void check_halves(void) {
    static unsigned char table[65536][2];
    static float y[65536];
    static int32_t token[65536];
    int wrong = 0, wrong_bf16 = 0;
    for (int i = 0; i < 65536; i++) table[i][0] = (unsigned char)i, table[i][1] = (unsigned char)(i >> 8), token[i] = i;
    g4_tensor halves = tensor(table, G4_TYPE_F16, 65536, 1);
    for (int bf16 = 0; bf16 < 2; bf16++) {
        g4_backend_scalar.embed(bf16 ? &oracle_bf16 : &oracle, y, &halves, token, 65536, 1);
        for (int i = 0; i < 65536; i++) {
            int e = i >> 10 & 31, m = i & 1023;
            float x = (float)(e == 31 ? m ? NAN : INFINITY : e ? ldexp(1024 + m, e - 25) : ldexp(m, -24));
            if (i & 0x8000) x = -x;
            if (bf16) wrong_bf16 += isnan(x) ? !isnan(y[i]) : bits_of(y[i]) != bits_of(g4_bf16_round(x));
            else wrong += isnan(x) ? !isnan(y[i]) : bits_of(y[i]) != bits_of(x);
        }
    }
    CHECK(!wrong && !wrong_bf16, "%d of all halves are widened wrong, %d in bf16 precision", wrong, wrong_bf16);
    static const uint32_t nans[] = {0x7f800001, 0x7fffffff, 0xff800001, 0xffffffff};
    for (int i = 0; i < 4; i++) {
        float x;
        memcpy(&x, &nans[i], 4);
        CHECK(isnan(g4_bf16_round(x)), "the NaN %08x becomes %g in bfloat16", (unsigned)nans[i], (double)g4_bf16_round(x));
    }
    CHECK(isinf(g4_expf(89)) && g4_expf(88) == 1.65163627e38f, "exp above the largest float is infinity: %g", (double)g4_expf(89));
    /* the factor is rounded before it is used: sqrt(1536) = 39.19 is 39.25 in bfloat16, and 1.5 of those are 59, not 58.75 */
    unsigned char one_and_half[2];
    put_bf16(one_and_half, 1.5f);
    g4_tensor small = tensor(one_and_half, G4_TYPE_BF16, 1, 1);
    g4_backend_scalar.embed(&oracle_bf16, y, &small, (int32_t[]){0}, 1, 39.191836f);
    CHECK(y[0] == 59, "an embedding in bf16 precision: %g", (double)y[0]);
}

/* The rule of the 16 lanes once more, element by element, for all lengths and types. */
static void check_lanes(void) {
    enum { MOST = 1100 };
    static unsigned char f32[2][MOST][4], bf16[2][MOST][2];
    static float w[2][MOST], x[MOST];
    int wrong[2][2] = {{0}};
    for (int n = 1; n <= MOST; n += n < 70 ? 1 : n % 2 ? 171 : 100) {
        unsigned char *p = f32[0][0], *q = bf16[0][0];
        for (int r = 0; r < 2; r++)
            for (int i = 0; i < n; i++, p += 4, q += 2) {
                x[i] = ((float)rng() - 2147483648.0f) * 0x1p-30f;
                w[r][i] = ((float)rng() - 2147483648.0f) * 0x1p-30f;
                put_f32(p, w[r][i]);
                put_bf16(q, g4_bf16_round(w[r][i]));
            }
        for (int type = 0; type < 2; type++)
            for (int precision = 0; precision < 2; precision++) {
                g4_tensor W = type ? tensor(bf16, G4_TYPE_BF16, 2, n) : tensor(f32, G4_TYPE_F32, 2, n);
                float y[2];
                g4_backend_scalar.matmul(precision ? &oracle_bf16 : &oracle, y, &W, x, 1);
                for (int r = 0; r < 2; r++) {
                    float lane[16] = {0};
                    for (int i = 0; i < n; i++) {
                        volatile float product = (type || precision ? g4_bf16_round(w[r][i]) : w[r][i]) * x[i];
                        lane[i % 16] += product;
                    }
                    for (int k = 8; k; k /= 2)
                        for (int j = 0; j < k; j++) lane[j] += lane[j + k];
                    wrong[type][precision] += bits_of(y[r]) != bits_of(precision ? g4_bf16_round(lane[0]) : lane[0]);
                }
            }
    }
    CHECK(!wrong[0][0] && !wrong[0][1] && !wrong[1][0] && !wrong[1][1], "dot products with other bits: float32 %d, in bf16 precision %d; bfloat16 %d, %d", wrong[0][0], wrong[0][1],
          wrong[1][0], wrong[1][1]);
}

/* Rows wider than the 512 weights that are widened at once; scores and router logits whose exponentials overflow; ties. */
static void check_extremes(void) {
    enum { D = 700, E = 5, K = 2 };
    static unsigned char w[D][4], proj[E][D][4], scale[E][4];
    static float x[D], y[D], n[D], logits[E];
    static const float scales[E] = {2, 3, 5, 7, 11};
    int wrong = 0;
    for (int i = 0; i < D; i++) put_f32(w[i], (float)i), x[i] = 1;
    g4_tensor weight = tensor(w, G4_TYPE_F32, 1, D);
    g4_backend_scalar.norm(&oracle, y, x, &weight, 1, D, 1e-12f);
    for (int i = 0; i < D; i++) wrong += fabsf(y[i] - (float)i) > 1e-3f;
    CHECK(!wrong, "norm of a wide row: %d of %d are wrong", wrong, D);

    /* only x[D - 1] is not 0, so its norm is sqrt(D), and the router's logits are {0, factor, 0, 0, 0} */
    static const float factors[] = {3, 1000, -1000};
    for (int f = 0; f < 3; f++) {
        int32_t index[K];
        float chosen[K];
        memset(x, 0, sizeof x), memset(proj, 0, sizeof proj), memset(w, 0, sizeof w);
        x[D - 1] = 17;
        put_f32(proj[1][D - 1], 1);
        put_f32(w[D - 1], factors[f]);
        for (int e = 0; e < E; e++) put_f32(scale[e], scales[e]);
        g4_layer layer = {.router_proj = tensor(proj, G4_TYPE_F32, E, D), .router_scale = weight, .per_expert_scale = tensor(scale, G4_TYPE_F32, 1, E)};
        g4_backend_scalar.router(&oracle, &(g4_router_args){.index = index, .weight = chosen, .h = x, .layer = &layer, .T = 1, .D = D, .E = E, .K = K, .eps = 1e-12f, .n = n,
                                                            .logits = logits});
        if (f < 2) {
            double share = 1 / (1 + exp(-(double)factors[f]));
            CHECK(index[0] == 0 && index[1] == 1 && fabs(chosen[0] - 2 * (1 - share)) < 1e-5 && fabs(chosen[1] - 3 * share) < 1e-5,
                  "router with a logit of %g: experts %d and %d, weights %g and %g", (double)factors[f], (int)index[0], (int)index[1], (double)chosen[0], (double)chosen[1]);
        } else {
            CHECK(index[0] == 0 && index[1] == 2 && chosen[0] == 1 && chosen[1] == 2.5f, "router with equal ones: experts %d and %d, weights %g and %g", (int)index[0], (int)index[1],
                  (double)chosen[0], (double)chosen[1]);
        }
    }

    for (int sign = -1; sign <= 1; sign += 2) { /* scores +-1000 and +-1001 */
        float k[4] = {10, 0, 10.01f, 0}, v[4] = {0, 5, 1, 5}, cache[8], o[2], q[2] = {100 * (float)sign, 0}, scores[2];
        int32_t seq[2] = {0, 0}, pos[2] = {0, 1};
        g4_kv kv = {.k = cache, .v = cache + 4, .G = 1, .dh = 2, .R = 2, .window = 2};
        g4_backend_scalar.kv_store(&oracle, &kv, k, v, &(g4_rows){.seq = seq, .pos = pos, .T = 2});
        g4_backend_scalar.attention(&oracle, &(g4_attention_args){.o = o, .q = q, .kv = &kv, .rows = &(g4_rows){.seq = seq, .pos = pos + 1, .T = 1}, .H = 1, .scores = scores, .score_rows = 1, .ctx = 2});
        double share = 1 / (1 + exp(-(double)sign));
        CHECK(fabs(o[0] - share) < 1e-3 && fabsf(o[1] - 5) < 1e-5f, "attention over scores of %d: %g, expected %g", 1000 * sign, (double)o[0], share);
    }
}

/* n bytes that cost nothing until they are touched. NULL: the system has no such thing. */
static unsigned char *reserve(uint64_t n) {
#if defined(__linux__) && UINTPTR_MAX > 0xffffffffu
    void *p = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? NULL : p;
#else
    (void)n;
    return NULL;
#endif
}

static void release(void *p, uint64_t n) {
#if defined(__linux__) && UINTPTR_MAX > 0xffffffffu
    if (p) munmap(p, n);
#else
    (void)p, (void)n;
#endif
}

/* Tables, caches and experts of more than 2^31 elements or bytes: what lies at their end is found. */
static void check_large_offsets(void) {
    enum { N = 1024, R = 1 << 20, Fe = 512, LAST = 1100 };
    const uint64_t table_bytes = (uint64_t)N * 2 * ((1 << 21) + 8), cache_bytes = (uint64_t)4 * N * ((uint64_t)3 * R + 8), gate_bytes = (uint64_t)2 * 2 * Fe * N * (LAST + 1),
                   down_bytes = (uint64_t)2 * N * Fe * (LAST + 1);
    unsigned char *table = reserve(table_bytes), *k = reserve(cache_bytes), *v = reserve(cache_bytes), *gate_up = reserve(gate_bytes), *down = reserve(down_bytes);
    static float y[2 * N], x[N], gate[2 * Fe], z[N];
    if (table && k && v && gate_up && down) {
        int32_t token = (1 << 21) + 5, seq = 1, pos = 3, expert = LAST;
        put_bf16(table + 2 * ((size_t)token * N + 7), 3);
        g4_tensor large = tensor(table, G4_TYPE_BF16, token + 1, N);
        g4_backend_scalar.embed(&oracle, y, &large, &token, 1, 2);
        CHECK(y[7] == 6 && y[6] == 0, "row %d of a table: %g", (int)token, (double)y[7]);

        g4_kv kv = {.k = (float *)(void *)k, .v = (float *)(void *)v, .G = 2, .dh = N, .R = R, .window = 1};
        float o[2 * N], score;
        for (int i = 0; i < 2 * N; i++) y[i] = (float)i;
        g4_rows row = {.seq = &seq, .pos = &pos, .T = 1};
        g4_backend_scalar.kv_store(&oracle, &kv, y, y, &row);
        CHECK(kv.k[((size_t)2 * R + 3) * N + 9] == 9 && kv.v[((size_t)3 * R + 3) * N + 9] == N + 9, "the second sequence of a large cache is stored elsewhere");
        g4_backend_scalar.attention(&oracle, &(g4_attention_args){.o = o, .q = y, .kv = &kv, .rows = &row, .H = 2, .scores = &score, .score_rows = 1, .ctx = 1});
        CHECK(!memcmp(o, y, sizeof o), "the second sequence of a large cache is read elsewhere");

        put_bf16(gate_up + (size_t)2 * 2 * Fe * N * LAST, 1);           /* gate row 0 is 1 0 0 ... */
        put_bf16(gate_up + (size_t)2 * N * (2 * (size_t)Fe * LAST + Fe), 2); /* up row 0 is 2 0 0 ... */
        put_bf16(down + 2 * ((size_t)N * LAST + 3) * Fe, 1);            /* down row 3 is 1 0 0 ... */
        g4_layer layer = {.experts_gate_up_proj = tensor(gate_up, G4_TYPE_BF16, (int64_t)(LAST + 1) * 2 * Fe, N), .experts_down_proj = tensor(down, G4_TYPE_BF16, (int64_t)(LAST + 1) * N, Fe)};
        float weight = 0.5f;
        x[0] = 1.5f;
        g4_backend_scalar.experts(&oracle, &(g4_experts_args){.y = z, .x = x, .index = &expert, .weight = &weight, .layer = &layer, .T = 1, .D = N, .K = 1, .Fe = Fe, .gate_up = gate, .down = y});
        CHECK(z[3] == g4_gelu_tanh(1.5f) * 3 * 0.5f && z[2] == 0, "expert %d: %g", LAST, (double)z[3]);
    } else {
        SKIP("offsets beyond 2^31: no memory that costs nothing here");
    }
    release(table, table_bytes), release(k, cache_bytes), release(v, cache_bytes), release(gate_up, gate_bytes), release(down, down_bytes);
}

/* What a state remembers of its past: truncated, refilled in part, truncated again. And its defaults and bounds. */
static void check_state(void) {
    g4_model *m = g4_open("test/fixtures/e2b", NULL, &err);
    CHECK(m, "%s", err.text);
    if (!m) return;
    const g4_config *c = g4_get_config(m);
    enum { T = 30, CHUNK = 6 };
    size_t V = (size_t)c->vocab_size, row = sizeof(float) * V;
    int32_t ids[T];
    float *whole = room(row * T), *other = room(row * T);
    for (int i = 0; i < T; i++) ids[i] = (int32_t)(rng() % V);
    g4_state *s = new_state(m, T, CHUNK, 1, 1);
    int lowest = T - CHUNK; /* the ring holds W - 1 + CHUNK positions, and the next token needs W - 1 of them */
    CHECK(!feed(s, ids, T, whole) && g4_truncate(s, 0, lowest - 1, &err) && !g4_truncate(s, 0, lowest, &err), "%d tokens: %s", T, err.text);
    CHECK(!feed(s, ids + lowest, 1, other) && g4_truncate(s, 0, lowest - 1, &err), "what was overwritten before the last truncation is not there again");
    CHECK(!g4_truncate(s, 0, lowest, &err) && !feed(s, ids + lowest, CHUNK, other) && !memcmp(whole + V * (size_t)lowest, other, row * CHUNK), "truncated twice: other bits");
    CHECK(!g4_truncate(s, 0, 0, &err) && !feed(s, ids, 3, other) && !g4_truncate(s, 0, 2, &err) && !feed(s, ids + 2, 2, other) && !memcmp(whole + V * 2, other, row * 2),
          "an emptied sequence forgets its past: %s", err.text);
    CHECK(g4_length(s, 0) == 4 && g4_length(s, 1) == -1 && g4_length(s, -1) == -1, "lengths");
    g4_state_close(s);

    s = g4_state_open(m, NULL, &err);
    CHECK(s, "%s", err.text);
    if (s) {
        const g4_state_options *o = g4_state_get_options(s);
        CHECK(o->ctx == (c->max_position_embeddings < 4096 ? c->max_position_embeddings : 4096) && o->chunk == 128 && o->n_seqs == 1 && o->threads >= 1 && o->precision == G4_F32,
              "defaults: ctx %d, chunk %d, n_seqs %d, threads %d", o->ctx, o->chunk, o->n_seqs, o->threads);
    }
    g4_state_close(s);
    g4_state_close(NULL);
    g4_close(NULL);
    for (int i = 0; i < 4; i++) {
        const g4_state_options o[] = {{.ctx = c->max_position_embeddings + 1}, {.chunk = 65537}, {.n_seqs = 65537}, {.threads = 1025}};
        static const char *const why[] = {"max_position_embeddings", "1..65536", "1..65536", "1..1024"};
        s = g4_state_open(m, &o[i], &err);
        CHECK(!s && strstr(err.text, why[i]), "state options %d just above the bound: %s", i, s ? "opened" : err.text);
        g4_state_close(s);
    }

    /* sizes that no size_t holds: as a product, and only once a float has 4 bytes */
    g4_model huge = *m;
    g4_layer_config *layers = room(sizeof *layers * (size_t)c->num_hidden_layers);
    static const int heads[] = {4096, 2};
    for (int i = 0; i < 2; i++) {
        memcpy(layers, c->layers, sizeof *layers * (size_t)c->num_hidden_layers);
        for (int l = 0; l < c->num_hidden_layers; l++) layers[l].num_key_value_heads = heads[i], layers[l].head_dim = 65536;
        huge.config.layers = layers;
        huge.config.max_position_embeddings = 1 << 30;
        g4_state_options o = {.ctx = 1 << 30, .n_seqs = 65536, .threads = 1};
        CHECK(!g4_state_bytes(&huge, &o, NULL), "2^%d floats for each cache are said to fit", i ? 63 : 74);
        s = g4_state_open(&huge, &o, &err);
        CHECK(!s && strstr(err.text, "more than can be addressed"), "2^%d floats for each cache: %s", i ? 63 : 74, s ? "opened" : err.text);
        g4_state_close(s);
    }
    free(layers);
    free(whole);
    g4_close(m);

    /* rows whose fault is one thing only, where all else would fit; this model has fewer per-layer ids than ids */
    m = g4_open("test/fixtures/odd", NULL, &err);
    CHECK(m, "%s", err.text);
    if (m) {
        c = g4_get_config(m);
        s = new_state(m, 8, 8, 2, 1);
        const g4_row rows[][2] = {{{5, 0, 1, 0}, {5, 0, 2, 0}}, {{5, 0, 0, 0}, {5, 0, 2, 0}}, {{5, 0, 0, 0}, {5, 0, 0, 0}}, {{5, 0, 0, 0}, {5, 1, 1, 0}},
                                  {{5, 0, 0, 0}, {c->vocab_size_per_layer_input, 0, 1, 0}}, {{5, 0, 0, 0}, {c->vocab_size - 1, 0, 1, 0}}};
        static const char *const why[] = {"row 0: position 1 of sequence 0; expected 0", "row 1: position 2 of sequence 0; expected 1", "row 1: position 0 of sequence 0; expected 1",
                                          "row 1: position 1 of sequence 1; expected 0", "vocab_size_per_layer_input", "vocab_size_per_layer_input"};
        CHECK(c->vocab_size_per_layer_input < c->vocab_size, "the fixture has vocabularies of one size");
        for (int i = 0; i < 6; i++) {
            CHECK(g4_forward(s, rows[i], 2, NULL, &err) && strstr(err.text, why[i]), "rows %d: \"%s\" should say %s", i, err.text, why[i]);
            CHECK(g4_length(s, 0) == 0 && g4_length(s, 1) == 0, "rows %d changed the state", i);
        }
        const g4_row good[] = {{5, 1, 0, 0}, {c->vocab_size_per_layer_input - 1, 0, 0, 0}, {5, 1, 1, 0}};
        CHECK(!g4_forward(s, good, 3, NULL, &err) && g4_length(s, 0) == 1 && g4_length(s, 1) == 2, "%s", err.text);
        g4_state_close(s);
    }
    g4_close(m);
    free(other);
}

int main(void) {
    const char *shared = getenv("SHARED");
    char path[1000];
    check_functions();
    check_operations();
    check_halves();
    check_lanes();
    check_extremes();
    check_large_offsets();
    check_state();
    int n = check_folder("test/fixtures");
    CHECK(n >= 5, "test/fixtures holds %d fixtures", n);
    if (shared && *shared) {
        snprintf(path, sizeof path, "%s/fixtures", shared);
        CHECK(check_folder(path) >= 5, "%s holds no fixtures", path);
    } else {
        SKIP("SHARED is not set: its fixtures");
    }
    g4_model *m = g4_open("models/austen", NULL, &err), *second = g4_open("models/austen", &(g4_options){.no_mmap = 1}, &err);
    CHECK(m && second, "%s", err.text);
    if (m) check_model(m);
    g4_close(m);
    if (second) check_model(second); /* two at once, one of them outlives the other, and its files are read instead of mapped */
    g4_close(second);
    return test_done("gemma4");
}
