/* test_seam.c - forward() must run on memory that the host cannot read: a backend whose addresses are not addresses.
 *
 * "remote" gives out pointers from which OFFSET has been taken away (nothing is mapped there), and each of its operations adds it again
 * before it calls the scalar one. If forward() or the state looked into a buffer, or mixed host and device pointers, this program would die;
 * if an entry were bypassed, the count below would tell. The logits must be the scalar backend's bits.
 */
#include "gemma4.h"
#include "test.h"

static g4_error err;
static int calls, live;
enum { OFFSET = 1 };
static const uintptr_t far_away = (uintptr_t)OFFSET << (sizeof(void *) * 8 - 2); /* a quarter of the address space */

static void *remote(const void *host) { return host ? (void *)((uintptr_t)host ^ far_away) : NULL; }
#define HERE(p) ((void *)remote(p))

static g4_run scalar_run(const g4_run *run) {
    calls++;
    return (g4_run){.backend = &g4_backend_scalar, .threads = run->threads, .precision = run->precision};
}
static g4_tensor here_tensor(const g4_tensor *t) {
    g4_tensor copy = *t;
    copy.data = HERE(t->data);
    return copy;
}
static g4_rows here_rows(const g4_rows *r) { return (g4_rows){HERE(r->token), HERE(r->seq), HERE(r->pos), r->T}; }

static void *r_alloc(size_t bytes) {
    live++;
    return remote(calloc(1, bytes ? bytes : 1));
}
static void r_release(void *p) {
    live--;
    free(HERE(p));
}
static int r_upload(void *dst, const void *src, size_t bytes) { return memcpy(HERE(dst), src, bytes) == NULL; }
static int r_download(void *dst, const void *src, size_t bytes) { return memcpy(dst, HERE(src), bytes) == NULL; }

static void r_embed(const g4_run *run, float *y, const g4_tensor *table, const int32_t *token, int T, float scale) {
    g4_run r = scalar_run(run);
    g4_tensor t = here_tensor(table);
    g4_backend_scalar.embed(&r, HERE(y), &t, HERE(token), T, scale);
}
static void r_matmul(const g4_run *run, float *y, const g4_tensor *W, const float *x, int T) {
    g4_run r = scalar_run(run);
    g4_tensor t = here_tensor(W);
    g4_backend_scalar.matmul(&r, HERE(y), &t, HERE(x), T);
}
static void r_norm(const g4_run *run, float *y, const float *x, const g4_tensor *w, int n, int dim, float eps) {
    g4_run r = scalar_run(run);
    g4_tensor t = w ? here_tensor(w) : (g4_tensor){0};
    g4_backend_scalar.norm(&r, HERE(y), HERE(x), w ? &t : NULL, n, dim, eps);
}
static void r_rope_table(const g4_run *run, float *c, float *s, const float *inv_freq, const int32_t *pos, int T, int half) {
    g4_run r = scalar_run(run);
    g4_backend_scalar.rope_table(&r, HERE(c), HERE(s), HERE(inv_freq), HERE(pos), T, half);
}
static void r_rope(const g4_run *run, float *x, const float *c, const float *s, int T, int heads, int dh) {
    g4_run r = scalar_run(run);
    g4_backend_scalar.rope(&r, HERE(x), HERE(c), HERE(s), T, heads, dh);
}
static g4_kv here_kv(const g4_kv *kv) {
    g4_kv copy = *kv;
    copy.k = HERE(kv->k), copy.v = HERE(kv->v);
    return copy;
}
static void r_kv_store(const g4_run *run, const g4_kv *kv, const float *k, const float *v, const g4_rows *rows) {
    g4_run r = scalar_run(run);
    g4_kv cache = here_kv(kv);
    g4_rows meta = here_rows(rows);
    g4_backend_scalar.kv_store(&r, &cache, HERE(k), HERE(v), &meta);
}
static void r_attention(const g4_run *run, const g4_attention_args *a) {
    g4_run r = scalar_run(run);
    g4_kv cache = here_kv(a->kv);
    g4_rows meta = here_rows(a->rows);
    g4_attention_args b = {.o = HERE(a->o), .q = HERE(a->q), .kv = &cache, .rows = &meta, .H = a->H, .scores = HERE(a->scores), .score_rows = a->score_rows, .ctx = a->ctx};
    g4_backend_scalar.attention(&r, &b);
}
static void r_gelu_mul(const g4_run *run, float *gate, const float *up, int T, int n, size_t stride) {
    g4_run r = scalar_run(run);
    g4_backend_scalar.gelu_mul(&r, HERE(gate), HERE(up), T, n, stride);
}
static void r_add(const g4_run *run, float *y, const float *x, size_t n) {
    g4_run r = scalar_run(run);
    g4_backend_scalar.add(&r, HERE(y), HERE(x), n);
}
static void r_scale(const g4_run *run, float *y, const g4_tensor *s, size_t n) {
    g4_run r = scalar_run(run);
    g4_tensor t = here_tensor(s);
    g4_backend_scalar.scale(&r, HERE(y), &t, n);
}
static void r_ple(const g4_run *run, const g4_ple_args *a) {
    g4_run r = scalar_run(run);
    g4_tensor t = here_tensor(a->norm);
    g4_ple_args b = *a;
    b.p = HERE(a->p), b.b = HERE(a->b), b.norm = &t;
    g4_backend_scalar.ple(&r, &b);
}
static void r_router(const g4_run *run, const g4_router_args *a) {
    g4_run r = scalar_run(run);
    g4_layer layer = {.router_proj = here_tensor(&a->layer->router_proj), .router_scale = here_tensor(&a->layer->router_scale),
                      .per_expert_scale = here_tensor(&a->layer->per_expert_scale)};
    g4_router_args b = *a;
    b.index = HERE(a->index), b.weight = HERE(a->weight), b.h = HERE(a->h), b.n = HERE(a->n), b.logits = HERE(a->logits), b.layer = &layer;
    g4_backend_scalar.router(&r, &b);
}
static void r_experts(const g4_run *run, const g4_experts_args *a) {
    g4_run r = scalar_run(run);
    g4_layer layer = {.experts_gate_up_proj = here_tensor(&a->layer->experts_gate_up_proj), .experts_up_proj = here_tensor(&a->layer->experts_up_proj),
                      .experts_down_proj = here_tensor(&a->layer->experts_down_proj)};
    g4_experts_args b = *a;
    b.y = HERE(a->y), b.x = HERE(a->x), b.index = HERE(a->index), b.weight = HERE(a->weight), b.layer = &layer;
    b.gate_up = HERE(a->gate_up), b.down = HERE(a->down);
    g4_backend_scalar.experts(&r, &b);
}
static void r_gather_rows(const g4_run *run, float *y, const float *x, const int32_t *index, int n, size_t width) {
    g4_run r = scalar_run(run);
    g4_backend_scalar.gather_rows(&r, HERE(y), HERE(x), HERE(index), n, width);
}
static void r_softcap(const g4_run *run, float *y, size_t n, float c) {
    g4_run r = scalar_run(run);
    g4_backend_scalar.softcap(&r, HERE(y), n, c);
}

static const g4_backend remote_backend = {
    .name = "remote", .alloc = r_alloc, .release = r_release, .upload = r_upload, .download = r_download, .embed = r_embed, .matmul = r_matmul,
    .norm = r_norm, .rope_table = r_rope_table, .rope = r_rope, .kv_store = r_kv_store, .attention = r_attention, .gelu_mul = r_gelu_mul, .add = r_add,
    .scale = r_scale, .ple = r_ple, .router = r_router, .experts = r_experts, .gather_rows = r_gather_rows, .softcap = r_softcap,
};

static uint64_t traced;
static void sum_trace(void *user, const char *name, const float *data, int rank, const int64_t *shape) {
    (void)user;
    size_t n = 1;
    for (int i = 0; i < rank; i++) n *= (size_t)shape[i];
    for (; *name; name++) traced = (traced ^ (unsigned char)*name) * 1099511628211u;
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &data[i], 4);
        traced = (traced ^ bits) * 1099511628211u;
    }
}

/* Logits [T][V] of some rows, then of the rest, on one backend; the hash of the whole trace in *hash. */
static float *run_on(const char *path, const g4_backend *backend, uint64_t *hash) {
    enum { T = 23 };
    g4_model *m = g4_open_with(path, NULL, backend, &err);
    CHECK(m, "%s: %s", path, err.text);
    if (!m) return NULL;
    int V = g4_get_config(m)->vocab_size;
    float *logits = calloc((size_t)T * (size_t)V, sizeof *logits);
    g4_state *s = g4_state_open(m, &(g4_state_options){.ctx = 64, .chunk = 9, .n_seqs = 3, .threads = 2}, &err);
    g4_row rows[T];
    int wanted = 0;
    for (int i = 0; i < T; i++) wanted += rows[i].want_logits = i % 3 == 0, rows[i].token = (i * 7 + 2) % 90, rows[i].seq = 0, rows[i].pos = i;
    g4_set_trace(s, sum_trace, NULL);
    traced = 14695981039346656037u;
    CHECK(s && logits && !g4_forward(s, rows, T - 1, logits, &err) && !g4_forward(s, rows + T - 1, 1, logits, &err), "%s: %s", path, err.text);
    *hash = traced;

    /* caches cross the seam too: a copy, and a file, go on as the sequence itself does */
    const char *file = "seam-sequence.tmp";
    int32_t ids[T], *loaded = NULL;
    size_t n_loaded = 0;
    float *next = calloc(3 * (size_t)V, sizeof *next);
    for (int i = 0; i < T; i++) ids[i] = rows[i].token;
    CHECK(!g4_copy(s, 0, 1, T, &err) && !g4_sequence_save(s, 0, T, ids, file, &err) && !g4_sequence_load(s, 2, file, &loaded, &n_loaded, &err) && n_loaded == T, "%s: %s", path, err.text);
    for (int i = 0; i < 3; i++) rows[i] = (g4_row){.token = 7, .seq = i, .pos = T, .want_logits = 1};
    CHECK(!g4_forward(s, rows, 3, next, &err) && !memcmp(next, next + V, sizeof *next * (size_t)V) && !memcmp(next, next + 2 * V, sizeof *next * (size_t)V),
          "%s: a copy or a loaded sequence goes on with other bits: %s", path, err.text);
    g4_free(loaded);
    free(next);
    remove(file);
    g4_state_close(s);
    g4_close(m);
    return logits;
}

int main(void) {
    static const char *const models[] = {"e2b", "26b-a4b", "31b", "untied-f32", "f16"};
    for (int i = 0; i < 5; i++) {
        char path[200];
        uint64_t near_hash, far_hash;
        snprintf(path, sizeof path, "test/fixtures/%s", models[i]);
        float *near_logits = run_on(path, &g4_backend_scalar, &near_hash);
        int before = calls;
        float *far_logits = run_on(path, &remote_backend, &far_hash);
        CHECK(near_logits && far_logits && near_hash == far_hash && calls > before, "%s: a device's memory gives other bits", path);
        CHECK(live == 0, "%s: %d device allocations were not released", path, live);
        free(near_logits);
        free(far_logits);
    }
    return test_done("seam");
}
