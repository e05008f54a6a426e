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
        op->attention(&run, &(g4_attention_args){.o = o, .q = q, .kv = &kv, .rows = &rows, .H = 1, .scores = scores, .ctx = T});
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

/* Everything that is checked on one fixture. Returns 1 if the folder holds one. */
static int check_fixture(const char *folder, const char *name) {
    char path[1200];
    g4_safetensors st;
    int T, n_greedy;
    snprintf(path, sizeof path, "%s/%s/expected.safetensors", folder, name);
    if (g4_safetensors_open(&st, path, 0, &err)) return 0;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    g4_model *m = g4_open(path, NULL, &err);
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
    for (struct dirent *e; d && (e = readdir(d));) n += e->d_name[0] != '.' && check_fixture(folder, e->d_name);
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

int main(void) {
    const char *shared = getenv("SHARED");
    char path[1000];
    check_functions();
    check_operations();
    int n = check_folder("test/fixtures");
    CHECK(n >= 5, "test/fixtures holds %d fixtures", n);
    if (shared && *shared) {
        snprintf(path, sizeof path, "%s/fixtures", shared);
        CHECK(check_folder(path) >= 5, "%s holds no fixtures", path);
    } else {
        SKIP("SHARED is not set: its fixtures");
    }
    g4_model *m = g4_open("models/austen", NULL, &err);
    CHECK(m, "%s", err.text);
    if (m) check_model(m);
    g4_close(m);
    return test_done("gemma4");
}
