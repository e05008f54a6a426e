/* test_gguf.c - GGUF files: a model written as one gives the bits that its directory gives, in every spelling that there is; files made by
 * gguf-py and llama.cpp give transformers' logits; damaged ones are refused by name.
 *
 * The program writes its files itself, into a folder beside itself: `sheet` is a file before it is written. The names of keys and tensors
 * stand here a second time, so that a field bound to another's data is seen. Files by others: test/gguf (reference/make_gguf.py), and with
 * SHARED set those of llama.cpp's converter and quantiser.
 */
#include "gemma4.h"
#include "test.h"

#include <errno.h>
#include <math.h>
#include <stddef.h>
#include <sys/stat.h>
#if defined(_WIN32)
#include <direct.h>
#define make_directory(path) _mkdir(path)
#else
#include <unistd.h>
#define make_directory(path) mkdir(path, 0777)
#endif

static char dir[600]; /* where the files go */
static g4_error err;
static char warnings[8192]; /* of the last opening, a line each */
static int n_warnings;

static void on_warning(void *user, const char *text) {
    (void)user;
    size_t n = strlen(warnings);
    snprintf(warnings + n, sizeof warnings - n, "%s\n", text);
    n_warnings++;
}

static void *room(size_t n) {
    void *p = calloc(n ? n : 1, 1);
    if (!p) abort();
    return p;
}

static uint64_t rng_state = 1;
static uint32_t rng(void) {
    rng_state ^= rng_state >> 12, rng_state ^= rng_state << 25, rng_state ^= rng_state >> 27;
    return (uint32_t)((rng_state * 2685821657736338717u) >> 32);
}

static const char *in_dir(const char *name) {
    static char path[4][800];
    static int turn;
    turn = (turn + 1) % 4;
    snprintf(path[turn], sizeof path[turn], "%s/%s", dir, name);
    return path[turn];
}

/* ---- files before they are written ---------------------------------------------------------------------------------------- */

typedef struct bytes {
    unsigned char *p; /* [n] */
    size_t n, room;
} bytes;

static void put(bytes *b, const void *p, size_t n) {
    if (b->n + n > b->room) {
        b->room = 2 * (b->n + n) + 64;
        b->p = realloc(b->p, b->room);
        if (!b->p) abort();
    }
    if (n) memcpy(b->p + b->n, p, n);
    b->n += n;
}

static void put_int(bytes *b, uint64_t x, int size) {
    unsigned char little[8];
    for (int i = 0; i < size; i++) little[i] = (unsigned char)(x >> 8 * i);
    put(b, little, (size_t)size);
}

static void put_text(bytes *b, const char *s, size_t n) {
    put_int(b, n, 8);
    put(b, s, n);
}

enum { U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 };
static const int value_bytes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

static void put_number(bytes *b, int type, double x) {
    float f = (float)x;
    uint32_t bits32;
    uint64_t bits64;
    memcpy(&bits32, &f, 4);
    memcpy(&bits64, &x, 8);
    put_int(b, type == F32 ? bits32 : type == F64 ? bits64 : x < 0 ? (uint64_t)(int64_t)x : (uint64_t)x, value_bytes[type]);
}

enum { MAX_KEYS = 80, MAX_ITEMS = 500 };

typedef struct key {
    char name[80];
    bytes value; /* with its type */
} key;

typedef struct item {
    char name[80];
    uint32_t type, rank;
    uint64_t ne[4];
    const unsigned char *data; /* [bytes]; another's, or `own` */
    unsigned char *own;
    size_t bytes;
    int part;
} item;

typedef struct sheet {
    uint32_t version, alignment;
    key keys[MAX_KEYS];
    int n_keys;
    item items[MAX_ITEMS];
    int n_items;
} sheet;

/* The named key, new or emptied. */
static bytes *set_key(sheet *s, const char *name) {
    int i = 0;
    while (i < s->n_keys && strcmp(s->keys[i].name, name)) i++;
    if (i == MAX_KEYS) abort();
    if (i == s->n_keys) snprintf(s->keys[s->n_keys++].name, sizeof s->keys[i].name, "%s", name);
    s->keys[i].value.n = 0;
    return &s->keys[i].value;
}

static void drop_key(sheet *s, const char *name) {
    for (int i = 0; i < s->n_keys; i++) {
        if (strcmp(s->keys[i].name, name)) continue;
        free(s->keys[i].value.p);
        memmove(&s->keys[i], &s->keys[i + 1], sizeof(key) * (size_t)(s->n_keys - i - 1));
        memset(&s->keys[--s->n_keys], 0, sizeof(key));
        return;
    }
    CHECK(0, "%s is no key", name);
}

static void set_number(sheet *s, const char *name, int type, double x) {
    bytes *b = set_key(s, name);
    put_int(b, (uint64_t)type, 4);
    put_number(b, type, x);
}

static void set_text(sheet *s, const char *name, const char *text) {
    bytes *b = set_key(s, name);
    put_int(b, STRING, 4);
    put_text(b, text, strlen(text));
}

static bytes *set_array(sheet *s, const char *name, int type, uint64_t n) {
    bytes *b = set_key(s, name);
    put_int(b, ARRAY, 4);
    put_int(b, (uint64_t)type, 4);
    put_int(b, n, 8);
    return b;
}

static void set_numbers(sheet *s, const char *name, int type, int n, const int *x) {
    bytes *b = set_array(s, name, type, (size_t)n);
    for (int i = 0; i < n; i++) put_number(b, type, x[i]);
}

static item *find_item(sheet *s, const char *name) {
    for (int i = 0; i < s->n_items; i++)
        if (!strcmp(s->items[i].name, name)) return &s->items[i];
    return NULL;
}

static item *add_item(sheet *s, const char *name, int type, int rank, uint64_t n0, uint64_t n1, uint64_t n2, const void *data, size_t n) {
    if (s->n_items == MAX_ITEMS) abort();
    item *t = &s->items[s->n_items++];
    *t = (item){.type = (uint32_t)type, .rank = (uint32_t)rank, .ne = {n0, n1, n2, 1}, .data = data, .bytes = n};
    snprintf(t->name, sizeof t->name, "%s", name);
    return t;
}

static void drop_item(sheet *s, const char *name) {
    item *t = find_item(s, name);
    CHECK(t, "%s is no tensor", name);
    if (!t) return;
    free(t->own);
    memmove(t, t + 1, sizeof *t * (size_t)(s->items + s->n_items - t - 1));
    s->n_items--;
}

/* n float32 from x, as a tensor's data has them. */
static void set_data(item *t, const float *x, size_t n) {
    bytes b = {0};
    for (size_t i = 0; i < n; i++) put_number(&b, F32, (double)x[i]);
    free(t->own);
    t->own = b.p;
    t->data = b.p;
    t->bytes = b.n;
    t->type = 0;
}

static void clear(sheet *s) {
    for (int i = 0; i < s->n_keys; i++) free(s->keys[i].value.p);
    for (int i = 0; i < s->n_items; i++) free(s->items[i].own);
    memset(s, 0, sizeof *s);
    s->version = 3;
    s->alignment = 32;
}

static void pad(bytes *b, size_t alignment) {
    while (b->n % alignment) put_int(b, 0, 1);
}

/* Part `part` of the file as bytes; the keys stand in part 0. *infos and *data (either may be NULL): where those begin. */
static bytes image(const sheet *s, int part, size_t *infos, size_t *data) {
    bytes b = {0};
    uint64_t offset = 0, n = 0;
    for (int i = 0; i < s->n_items; i++) n += s->items[i].part == part;
    put(&b, "GGUF", 4);
    put_int(&b, s->version, 4);
    put_int(&b, n, 8);
    put_int(&b, part ? 0 : (uint64_t)s->n_keys, 8);
    for (int i = 0; i < s->n_keys && !part; i++) {
        put_text(&b, s->keys[i].name, strlen(s->keys[i].name));
        put(&b, s->keys[i].value.p, s->keys[i].value.n);
    }
    if (infos) *infos = b.n;
    for (int i = 0; i < s->n_items; i++) {
        const item *t = &s->items[i];
        if (t->part != part) continue;
        put_text(&b, t->name, strlen(t->name));
        put_int(&b, t->rank, 4);
        for (uint32_t k = 0; k < t->rank; k++) put_int(&b, t->ne[k % 4], 8);
        put_int(&b, t->type, 4);
        put_int(&b, offset, 8);
        offset = (offset + t->bytes + s->alignment - 1) / s->alignment * s->alignment;
    }
    if (n) pad(&b, s->alignment);
    if (data) *data = b.n;
    for (int i = 0; i < s->n_items; i++) {
        if (s->items[i].part != part) continue;
        pad(&b, s->alignment); /* the last one is not padded */
        put(&b, s->items[i].data, s->items[i].bytes);
    }
    return b;
}

static void write_bytes(const char *name, const void *p, size_t n) {
    remove(in_dir(name)); /* some systems write a file to the disk at once when it replaces its own old content */
    FILE *f = fopen(in_dir(name), "wb");
    if (!f || fwrite(p, 1, n, f) != n || fclose(f)) {
        printf("cannot write %s: %s\n", in_dir(name), strerror(errno));
        exit(2);
    }
}

static void write_sheet(const char *name, const sheet *s) {
    bytes b = image(s, 0, NULL, NULL);
    write_bytes(name, b.p, b.n);
    free(b.p);
}

static g4_model *open_file(const char *name) {
    warnings[0] = 0;
    n_warnings = 0;
    err.text[0] = 0;
    return g4_open(in_dir(name), &(g4_options){.backend = "scalar", .warn = on_warning}, &err);
}

static g4_model *open_sheet(const sheet *s) {
    write_sheet("model.gguf", s);
    return open_file("model.gguf");
}

/* The last call failed with one line that has all these parts, separated by '|'. */
static void says(int failed, const char *what, const char *parts) {
    CHECK(failed, "%s: no error (expected '%s')", what, parts);
    if (!failed) return;
    CHECK(!strchr(err.text, '\n') && strlen(err.text) < sizeof err.text - 1, "%s: not one line: %s", what, err.text);
    while (*parts) {
        char want[300];
        size_t m = strcspn(parts, "|");
        snprintf(want, sizeof want, "%.*s", (int)m, parts);
        CHECK(strstr(err.text, want), "%s: expected '%s' in: %s", what, want, err.text);
        parts += m + (parts[m] == '|');
    }
}

static void refuses(const sheet *s, const char *what, const char *parts) {
    g4_model *m = open_sheet(s);
    says(!m, what, parts);
    g4_close(m);
}

/* ---- models as sheets ----------------------------------------------------------------------------------------------------- */

/* What the fields of a layer are called in a file. */
static const struct {
    size_t field;
    const char *name;
} layer_names[] = {
    {offsetof(g4_layer, input_layernorm), "attn_norm.weight"},
    {offsetof(g4_layer, q_proj), "attn_q.weight"},
    {offsetof(g4_layer, k_proj), "attn_k.weight"},
    {offsetof(g4_layer, v_proj), "attn_v.weight"},
    {offsetof(g4_layer, o_proj), "attn_output.weight"},
    {offsetof(g4_layer, q_norm), "attn_q_norm.weight"},
    {offsetof(g4_layer, k_norm), "attn_k_norm.weight"},
    {offsetof(g4_layer, post_attention_layernorm), "post_attention_norm.weight"},
    {offsetof(g4_layer, pre_feedforward_layernorm), "ffn_norm.weight"},
    {offsetof(g4_layer, gate_proj), "ffn_gate.weight"},
    {offsetof(g4_layer, up_proj), "ffn_up.weight"},
    {offsetof(g4_layer, down_proj), "ffn_down.weight"},
    {offsetof(g4_layer, post_feedforward_layernorm), "post_ffw_norm.weight"},
    {offsetof(g4_layer, router_proj), "ffn_gate_inp.weight"},
    {offsetof(g4_layer, router_scale), "ffn_gate_inp.scale"},
    {offsetof(g4_layer, per_expert_scale), "ffn_down_exps.scale"},
    {offsetof(g4_layer, experts_gate_up_proj), "ffn_gate_up_exps.weight"},
    {offsetof(g4_layer, experts_up_proj), "ffn_up_exps.weight"},
    {offsetof(g4_layer, experts_down_proj), "ffn_down_exps.weight"},
    {offsetof(g4_layer, post_feedforward_layernorm_1), "post_ffw_norm_1.weight"},
    {offsetof(g4_layer, pre_feedforward_layernorm_2), "pre_ffw_norm_2.weight"},
    {offsetof(g4_layer, post_feedforward_layernorm_2), "post_ffw_norm_2.weight"},
    {offsetof(g4_layer, per_layer_input_gate), "inp_gate.weight"},
    {offsetof(g4_layer, per_layer_projection), "proj.weight"},
    {offsetof(g4_layer, post_per_layer_input_norm), "post_norm.weight"},
    {offsetof(g4_layer, layer_scalar), "layer_output_scale.weight"},
};
enum { N_LAYER_NAMES = sizeof layer_names / sizeof layer_names[0] };

static void describe_tensor(sheet *s, const char *name, const g4_tensor *t, int64_t experts) {
    if (!t->data) return;
    int rank = t->rows == 1 && !experts ? 1 : experts ? 3 : 2;
    uint64_t out = rank == 1 ? 1 : (uint64_t)(t->rows / (experts ? experts : 1));
    add_item(s, name, g4_types[t->type].ggml, rank, (uint64_t)t->cols, out, experts ? (uint64_t)experts : 1, t->data, (size_t)t->rows * g4_row_bytes(t));
}

static int head_dim_of(const g4_config *c, g4_layer_type type, int otherwise) {
    for (int i = 0; i < c->num_hidden_layers; i++)
        if (c->layers[i].type == type) return c->layers[i].head_dim;
    return otherwise;
}

/* A model as llama.cpp's converter writes it. */
static void describe(sheet *s, const g4_model *m) {
    const g4_config *c = &m->config;
    int L = c->num_hidden_layers, full = head_dim_of(c, G4_FULL_ATTENTION, 512), sliding = head_dim_of(c, G4_SLIDING_ATTENTION, 256);
    int width[64] = {0}, kv_heads[64] = {0}, pattern[64], wide = 0, grouped = 0;
    float freqs[512];
    clear(s);
    for (int i = 0; i < L; i++) {
        width[i] = c->layers[i].intermediate_size;
        kv_heads[i] = c->layers[i].num_key_value_heads;
        pattern[i] = c->layers[i].type == G4_SLIDING_ATTENTION;
        wide |= width[i] != width[0];
        grouped |= kv_heads[i] != kv_heads[0];
    }
    set_text(s, "general.architecture", "gemma4");
    set_text(s, "general.type", "model");
    set_text(s, "general.name", "Micro");
    set_number(s, "gemma4.block_count", U32, L);
    set_number(s, "gemma4.context_length", U32, c->max_position_embeddings);
    set_number(s, "gemma4.embedding_length", U32, c->hidden_size);
    if (wide) set_numbers(s, "gemma4.feed_forward_length", I32, L, width);
    else set_number(s, "gemma4.feed_forward_length", U32, width[0]);
    set_number(s, "gemma4.attention.head_count", U32, c->num_attention_heads);
    if (grouped) set_numbers(s, "gemma4.attention.head_count_kv", I32, L, kv_heads);
    else set_number(s, "gemma4.attention.head_count_kv", U32, kv_heads[0]);
    set_number(s, "gemma4.rope.freq_base", F32, c->rope[G4_FULL_ATTENTION].theta);
    set_number(s, "gemma4.rope.freq_base_swa", F32, c->rope[G4_SLIDING_ATTENTION].theta);
    set_number(s, "gemma4.attention.layer_norm_rms_epsilon", F32, (double)c->rms_norm_eps);
    if (c->num_experts) {
        set_number(s, "gemma4.expert_count", U32, c->num_experts);
        set_number(s, "gemma4.expert_used_count", U32, c->top_k_experts);
        set_number(s, "gemma4.expert_feed_forward_length", U32, c->moe_intermediate_size);
    }
    set_number(s, "gemma4.attention.key_length", U32, full);
    set_number(s, "gemma4.attention.value_length", U32, full);
    set_number(s, "gemma4.final_logit_softcapping", F32, (double)c->final_logit_softcapping);
    set_number(s, "gemma4.attention.sliding_window", U32, c->sliding_window);
    set_number(s, "gemma4.attention.shared_kv_layers", U32, c->num_kv_shared_layers);
    set_number(s, "gemma4.embedding_length_per_layer_input", U32, c->hidden_size_per_layer_input);
    set_numbers(s, "gemma4.attention.sliding_window_pattern", BOOL, L, pattern);
    set_number(s, "gemma4.attention.key_length_swa", U32, sliding);
    set_number(s, "gemma4.attention.value_length_swa", U32, sliding);
    set_number(s, "gemma4.rope.dimension_count", U32, full);
    set_number(s, "gemma4.rope.dimension_count_swa", U32, sliding);
    if (c->rope[G4_FULL_ATTENTION].factor != 1) set_number(s, "gemma4.rope.scaling.factor", F32, c->rope[G4_FULL_ATTENTION].factor);

    int turning = c->rope[G4_FULL_ATTENTION].proportional ? (int)(c->rope[G4_FULL_ATTENTION].partial_rotary_factor * full / 2) : full / 2;
    for (int i = 0; i < full / 2; i++) freqs[i] = i < turning ? 1 : 1e30f;
    set_data(add_item(s, "rope_freqs.weight", 0, 1, (uint64_t)full / 2, 1, 1, NULL, 0), freqs, (size_t)full / 2);
    describe_tensor(s, "token_embd.weight", &m->embed_tokens, 0);
    describe_tensor(s, "per_layer_token_embd.weight", &m->embed_tokens_per_layer, 0);
    for (int i = 0; i < L; i++)
        for (int k = 0; k < N_LAYER_NAMES; k++) {
            const g4_tensor *t = (const g4_tensor *)((const char *)&m->layers[i] + layer_names[k].field);
            char name[80];
            snprintf(name, sizeof name, "blk.%d.%s", i, layer_names[k].name);
            describe_tensor(s, name, t, strstr(name, "_exps.weight") ? c->num_experts : 0);
        }
    describe_tensor(s, "output_norm.weight", &m->norm, 0);
    describe_tensor(s, "per_layer_model_proj.weight", &m->per_layer_model_projection, 0);
    describe_tensor(s, "per_layer_proj_norm.weight", &m->per_layer_projection_norm, 0);
    if (m->lm_head.data != m->embed_tokens.data) describe_tensor(s, "output.weight", &m->lm_head, 0);
}

enum { PROMPT = 20 };

/* Logits [PROMPT][V] of fixed ids; free them. NULL: an error, which is counted. */
static float *logits_of(const g4_model *m) {
    int V = m->config.vocab_size, end = m->config.hidden_size_per_layer_input ? m->config.vocab_size_per_layer_input : V;
    float *logits = room(sizeof *logits * PROMPT * (size_t)V);
    g4_row rows[PROMPT];
    for (int i = 0; i < PROMPT; i++) rows[i] = (g4_row){.token = (i * 37 + 5) % (end < V ? end : V), .pos = i, .want_logits = 1};
    g4_state *s = g4_state_open(m, &(g4_state_options){.ctx = PROMPT, .threads = 1}, &err);
    int failed = !s || g4_forward(s, rows, PROMPT, logits, &err);
    CHECK(!failed, "%s", err.text);
    g4_state_close(s);
    if (!failed) return logits;
    free(logits);
    return NULL;
}

/* The file that s describes gives the logits `expected`, without a warning. */
static void gives(const sheet *s, const char *what, const float *expected) {
    g4_model *m = open_sheet(s);
    CHECK(m, "%s: %s", what, err.text);
    if (!m) return;
    float *got = logits_of(m);
    CHECK(got && expected && !memcmp(got, expected, sizeof *got * PROMPT * (size_t)m->config.vocab_size), "%s: other logits", what);
    CHECK(!n_warnings, "%s: %s", what, warnings);
    free(got);
    g4_close(m);
}

/* ---- every fixture as a GGUF file ----------------------------------------------------------------------------------------- */

static g4_model *open_fixture(const char *name) {
    char path[200];
    snprintf(path, sizeof path, "test/fixtures/%s", name);
    g4_model *m = g4_open(path, &(g4_options){.backend = "scalar"}, &err);
    CHECK(m, "%s", err.text);
    if (!m) exit(test_done("gguf"));
    return m;
}

static void same_config(const char *what, const g4_config *a, const g4_config *b) {
    CHECK(a->vocab_size == b->vocab_size && a->hidden_size == b->hidden_size && a->num_hidden_layers == b->num_hidden_layers &&
              a->num_attention_heads == b->num_attention_heads && a->hidden_size_per_layer_input == b->hidden_size_per_layer_input &&
              (!b->hidden_size_per_layer_input || a->vocab_size_per_layer_input == b->vocab_size_per_layer_input) &&
              a->sliding_window == b->sliding_window && a->max_position_embeddings == b->max_position_embeddings &&
              a->num_kv_shared_layers == b->num_kv_shared_layers && a->num_experts == b->num_experts && a->top_k_experts == b->top_k_experts &&
              a->moe_intermediate_size == b->moe_intermediate_size && a->rms_norm_eps == b->rms_norm_eps &&
              a->final_logit_softcapping == b->final_logit_softcapping && a->use_double_wide_mlp == b->use_double_wide_mlp,
          "%s: another config", what);
    for (int i = 0; i < b->num_hidden_layers && i < a->num_hidden_layers; i++) {
        const g4_layer_config *x = &a->layers[i], *y = &b->layers[i];
        CHECK(x->type == y->type && x->head_dim == y->head_dim && x->num_key_value_heads == y->num_key_value_heads &&
                  x->intermediate_size == y->intermediate_size && x->kv_layer == y->kv_layer,
              "%s: layer %d: type %d dh %d G %d F %d of %d, expected %d %d %d %d %d", what, i, x->type, x->head_dim, x->num_key_value_heads,
              x->intermediate_size, x->kv_layer, y->type, y->head_dim, y->num_key_value_heads, y->intermediate_size, y->kv_layer);
    }
}

static sheet s; /* half a megabyte: not on the stack */

static void test_fixtures(void) {
    static const char *const names[] = {"12b",  "26b-a4b", "31b",        "bare",         "e2b",        "e4b",     "everything", "f16",          "multimodal", "odd",
                                        "old-spelling", "one-token", "other-head", "rope-default", "same-heads", "sharded", "untied-f32", "window-1-top-1", "window-all-top-all"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        g4_model *m = open_fixture(names[i]);
        float *expected = logits_of(m);
        describe(&s, m);
        gives(&s, names[i], expected);
        g4_model *again = open_file("model.gguf");
        if (again) {
            same_config(names[i], &again->config, &m->config);
            CHECK(again->config.tie_word_embeddings == (m->lm_head.data == m->embed_tokens.data), "%s: tie_word_embeddings", names[i]);
            CHECK(!g4_checkpoint_ignored(again, 0), "%s: %s is ignored", names[i], g4_checkpoint_ignored(again, 0));
            CHECK(!strcmp(again->config.model_type, "gemma4"), "model_type %s", again->config.model_type);
        }
        g4_close(again);
        free(expected);
        g4_close(m);
    }
    clear(&s);
}

/* ---- the same model, spelled otherwise -------------------------------------------------------------------------------------- */

/* The per-layer keys as one number or as an array, of every integer type. */
static void test_spellings(void) {
    static const int integers[] = {U8, I8, U16, I16, U32, I32, U64, I64};
    g4_model *m = open_fixture("31b"); /* one width, two numbers of K/V heads, period 6 */
    const g4_config *c = &m->config;
    int L = c->num_hidden_layers, width[64], pattern[64], heads[64];
    float *expected = logits_of(m);
    for (int i = 0; i < L; i++) {
        width[i] = c->layers[i].intermediate_size;
        pattern[i] = c->layers[i].type == G4_SLIDING_ATTENTION;
        heads[i] = c->num_attention_heads;
    }
    for (int way = 0; way < 8; way++) {
        int type = integers[way];
        describe(&s, m);
        set_number(&s, "gemma4.block_count", type, L);
        set_number(&s, "gemma4.embedding_length", type, c->hidden_size);
        set_number(&s, "gemma4.attention.sliding_window", type, c->sliding_window);
        set_number(&s, "gemma4.attention.key_length_swa", type, c->layers[0].head_dim);
        if (way & 1) set_numbers(&s, "gemma4.feed_forward_length", type, L, width);
        else set_number(&s, "gemma4.feed_forward_length", type, width[0]);
        if (way & 2) set_numbers(&s, "gemma4.attention.head_count", type, L, heads);
        if (way & 4) set_number(&s, "gemma4.attention.sliding_window_pattern", type, 6);
        else set_numbers(&s, "gemma4.attention.sliding_window_pattern", type, L, pattern);
        set_number(&s, "gemma4.attention.layer_norm_rms_epsilon", F64, (double)c->rms_norm_eps);
        set_number(&s, "gemma4.final_logit_softcapping", way & 1 ? type : F64, (double)c->final_logit_softcapping);
        gives(&s, "another spelling", expected);
    }
    free(expected);
    g4_close(m);

    m = open_fixture("26b-a4b");
    c = &m->config;
    expected = logits_of(m);
    describe(&s, m);
    int used[64], moe_width[64];
    for (int i = 0; i < c->num_hidden_layers; i++) used[i] = c->top_k_experts, moe_width[i] = c->moe_intermediate_size;
    set_numbers(&s, "gemma4.expert_used_count", I32, c->num_hidden_layers, used);
    set_numbers(&s, "gemma4.expert_feed_forward_length", U32, c->num_hidden_layers, moe_width);
    gives(&s, "arrays for the experts", expected);
    used[c->num_hidden_layers - 1]++;
    set_numbers(&s, "gemma4.expert_used_count", I32, c->num_hidden_layers, used);
    refuses(&s, "another number of experts in one layer", "gemma4.expert_used_count: expected the same for all layers, found 3 for layer 0 and 4 for layer 5");
    free(expected);
    g4_close(m);
}

/* attn_qkv in place of three, ffn_gate_exps and ffn_up_exps in place of one. */
static void test_other_tensors(void) {
    static const char *const models[] = {"e2b", "26b-a4b"};
    for (int k = 0; k < 2; k++) {
        g4_model *m = open_fixture(models[k]);
        const g4_config *c = &m->config;
        float *expected = logits_of(m);
        describe(&s, m);
        for (int i = 0; i < c->num_hidden_layers; i++) {
            const g4_layer *l = &m->layers[i];
            const g4_tensor *parts[] = {&l->q_proj, &l->k_proj, &l->v_proj};
            char name[80];
            bytes all = {0};
            if (!l->v_proj.data) continue;
            for (int j = 0; j < 3; j++) put(&all, parts[j]->data, (size_t)parts[j]->rows * g4_row_bytes(parts[j]));
            for (int j = 0; j < 3; j++) {
                snprintf(name, sizeof name, "blk.%d.attn_%c.weight", i, "qkv"[j]);
                drop_item(&s, name);
            }
            snprintf(name, sizeof name, "blk.%d.attn_qkv.weight", i);
            item *t = add_item(&s, name, g4_types[l->q_proj.type].ggml, 2, (uint64_t)l->q_proj.cols, (uint64_t)(l->q_proj.rows + 2 * l->k_proj.rows), 1, all.p, all.n);
            t->own = all.p;
        }
        for (int i = 0; i < c->num_hidden_layers && c->num_experts; i++) {
            const g4_tensor *w = &m->layers[i].experts_gate_up_proj;
            size_t half = (size_t)c->moe_intermediate_size * g4_row_bytes(w);
            char name[80];
            snprintf(name, sizeof name, "blk.%d.ffn_gate_up_exps.weight", i);
            drop_item(&s, name);
            for (int up = 0; up < 2; up++) {
                bytes all = {0};
                for (int e = 0; e < c->num_experts; e++) put(&all, (const unsigned char *)w->data + half * (size_t)(2 * e + up), half);
                snprintf(name, sizeof name, "blk.%d.ffn_%s_exps.weight", i, up ? "up" : "gate");
                item *t = add_item(&s, name, g4_types[w->type].ggml, 3, (uint64_t)w->cols, (uint64_t)c->moe_intermediate_size, (uint64_t)c->num_experts, all.p, all.n);
                t->own = all.p;
            }
        }
        gives(&s, "matrices fused and apart", expected);
        if (c->num_experts) {
            drop_item(&s, "blk.1.ffn_up_exps.weight");
            refuses(&s, "gate without up", "tensor blk.1.ffn_up_exps.weight is missing; the file's keys ask for it");
        }
        free(expected);
        g4_close(m);
    }

    /* a layer without an output scale has 1; what shared layers carry is not read; a projector in the same file is not read */
    g4_model *m = open_fixture("e2b");
    const float one = 1, junk[64] = {NAN, NAN};
    describe(&s, m);
    for (int i = 0; i < 10; i += 3) {
        char name[80];
        snprintf(name, sizeof name, "blk.%d.layer_output_scale.weight", i);
        set_data(find_item(&s, name), &one, 1);
    }
    g4_model *scaled = open_sheet(&s);
    float *expected = scaled ? logits_of(scaled) : NULL;
    g4_close(scaled);
    for (int i = 0; i < 10; i += 3) {
        char name[80];
        snprintf(name, sizeof name, "blk.%d.layer_output_scale.weight", i);
        drop_item(&s, name);
    }
    gives(&s, "layers without an output scale", expected);
    static const char *const unread[] = {"a.blk.0.attn_q.weight", "blk.7.attn_k.weight", "blk.7.attn_k_norm.weight", "blk.9.attn_v.weight", "mm.input_projection.weight", "v.blk.0.ln1.weight"};
    for (int i = 0; i < 6; i++) set_data(add_item(&s, unread[i], 0, 1, 64, 1, 1, NULL, 0), junk, 64);
    gives(&s, "tensors that belong to nothing that is computed", expected);
    g4_model *all = open_file("model.gguf");
    for (int i = 0; all && i < 7; i++) {
        const char *name = g4_checkpoint_ignored(all, i);
        CHECK(i < 6 ? name && !strcmp(name, unread[i]) : !name, "ignored %d: %s", i, name ? name : "none");
    }
    g4_close(all);
    add_item(&s, "v.patch", 16, 2, 512, 3, 1, room(3 * 2 * 66), 3 * 2 * 66);
    s.items[s.n_items - 1].own = (unsigned char *)s.items[s.n_items - 1].data;
    gives(&s, "a tensor of a type that is not built, not read", expected);
    set_data(add_item(&s, "blk.3.surprise", 0, 2, 32, 2, 1, NULL, 0), junk, 64);
    all = open_sheet(&s);
    CHECK(all && n_warnings == 1 && strstr(warnings, "tensor blk.3.surprise [32,2] is no part of the text model"), "%s%s", warnings, all ? "" : err.text);
    g4_close(all);
    for (int i = 0; i < 25; i++) {
        char name[80];
        snprintf(name, sizeof name, "surprise.%d", i);
        set_data(add_item(&s, name, 0, 1, 1, 1, 1, NULL, 0), junk, 1);
    }
    all = open_sheet(&s);
    CHECK(all && n_warnings == 21 && strstr(warnings, ": 6 more tensors are not read"), "%d warnings", n_warnings);
    g4_close(all);
    set_data(add_item(&s, "blk.3.ffn_up.scale", 0, 1, 1, 1, 1, NULL, 0), &one, 1);
    refuses(&s, "a scale beside a weight", "tensor blk.3.ffn_up.scale scales blk.3.ffn_up.weight, which is not supported");
    free(expected);
    g4_close(m);
}

/* What llama.cpp takes where a key is absent. */
static void test_defaults(void) {
    g4_model *m = open_fixture("untied-f32"); /* theta, head sizes and softcap are replaced below; its heads are as wide as head_count allows */
    g4_config *c = &m->config;
    describe(&s, m);
    drop_key(&s, "gemma4.final_logit_softcapping");
    drop_key(&s, "gemma4.rope.freq_base");
    drop_key(&s, "gemma4.rope.freq_base_swa");
    drop_key(&s, "gemma4.attention.shared_kv_layers");
    drop_key(&s, "general.type");
    g4_model *plain = open_sheet(&s);
    CHECK(plain, "%s", err.text);
    float *expected = NULL;
    if (plain) {
        const g4_config *got = &plain->config;
        CHECK(got->final_logit_softcapping == 30, "softcap %g", (double)got->final_logit_softcapping);
        CHECK(got->rope[0].theta == 1e4 && got->rope[1].theta == 1e4 && got->rope[1].factor == 1, "theta %g %g", got->rope[0].theta, got->rope[1].theta);
        CHECK(got->num_kv_shared_layers == 0, "shared %d", got->num_kv_shared_layers);
        CHECK(got->do_sample == 1 && got->top_k == 64 && got->top_p == 0.95f && got->temperature == 1 && got->n_eos == 0 && got->n_suppress == 0, "sampling");
        expected = logits_of(plain);
    }
    g4_close(plain);
    set_number(&s, "gemma4.final_logit_softcapping", F32, 30);
    set_number(&s, "gemma4.rope.freq_base", F32, 10000);
    set_number(&s, "gemma4.rope.freq_base_swa", F64, 10000);
    gives(&s, "the defaults said", expected);
    free(expected);
    set_number(&s, "gemma4.final_logit_softcapping", F32, 0);
    g4_model *uncapped = open_sheet(&s);
    CHECK(uncapped && uncapped->config.final_logit_softcapping == 0, "no softcap: %s", err.text);
    g4_close(uncapped);

    /* dimension_count is key_length; factor: also under its old name, and 0 is none */
    describe(&s, m);
    expected = logits_of(m);
    drop_key(&s, "gemma4.rope.dimension_count");
    gives(&s, "without dimension_count", expected);
    set_number(&s, "gemma4.rope.scaling.factor", F32, 0);
    set_text(&s, "gemma4.rope.scaling.type", "linear");
    gives(&s, "factor 0", expected);
    set_number(&s, "gemma4.rope.scaling.factor", F32, 4);
    g4_model *scaled = open_sheet(&s);
    CHECK(scaled && scaled->config.rope[1].factor == 4 && scaled->config.rope[0].factor == 1, "factor 4 on full layers");
    g4_close(scaled);
    set_text(&s, "gemma4.rope.scaling.type", "none");
    gives(&s, "factor 4 of no scaling", expected);
    drop_key(&s, "gemma4.rope.scaling.type");
    drop_key(&s, "gemma4.rope.scaling.factor");
    set_number(&s, "gemma4.rope.scale_linear", F32, 2);
    scaled = open_sheet(&s);
    CHECK(scaled && scaled->config.rope[1].factor == 2, "factor by its old name");
    g4_close(scaled);
    set_text(&s, "gemma4.rope.scaling.type", "yarn");
    refuses(&s, "yarn", "gemma4.rope.scaling.type: expected \"linear\" or \"none\", found \"yarn\"");
    free(expected);

    /* key_length is embedding_length / head_count, head_count_kv is head_count: a config that says so says the same */
    int D = c->hidden_size, dh = c->layers[1].head_dim;
    describe(&s, m);
    drop_key(&s, "gemma4.attention.key_length");
    g4_model *defaulted = open_sheet(&s);
    CHECK(D / c->num_attention_heads != dh && !defaulted, "the fixture's heads are another size than the default");
    char text[200];
    snprintf(text, sizeof text, "gemma4.attention.key_length is %d, but gemma4.attention.value_length is %d; expected the same", D / c->num_attention_heads, dh);
    says(!defaulted, "key_length by default", text);
    g4_close(defaulted);
    describe(&s, m);
    drop_key(&s, "gemma4.attention.head_count_kv");
    snprintf(text, sizeof text, "blk.0.attn_k.weight: expected the shape [%d,%d]", D, c->num_attention_heads * c->layers[0].head_dim);
    refuses(&s, "head_count_kv by default", text);
    g4_close(m);
}

/* ---- models of this program's own ------------------------------------------------------------------------------------------- */

enum { TINY_V = 270 };

/* L layers, pattern "SSFF": S slides; `shared` share K/V. Random weights. */
static void describe_tiny(sheet *to, const char *pattern, int shared, int P) {
    enum { D = 8, H = 2, G = 1, F = 12 };
    static const int dims[2] = {4, 8};
    int L = (int)strlen(pattern);
    g4_layer_config layers[16] = {{0}};
    g4_layer weights[16];
    g4_model m = {.config = {.num_hidden_layers = L, .hidden_size = D, .num_attention_heads = H, .hidden_size_per_layer_input = P, .vocab_size = TINY_V,
                             .sliding_window = 5, .max_position_embeddings = 64, .num_kv_shared_layers = shared, .rms_norm_eps = 1e-6f, .final_logit_softcapping = 9,
                             .rope = {{.theta = 1e4, .factor = 1}, {.theta = 1e6, .factor = 1, .proportional = 1, .partial_rotary_factor = 0.5}}, .layers = layers}};
    enum { MOST = TINY_V * 64 };
    static unsigned char junk[4 * MOST]; /* float32 in -0.5 .. 0.5 */
    bytes b = {0};
    rng_state = 7;
    for (int i = 0; i < MOST; i++) put_number(&b, F32, rng() / 4294967296.0 - 0.5);
    memcpy(junk, b.p, sizeof junk);
    free(b.p);
#define RANDOM(rows_, cols_) (g4_tensor){.data = junk + 4 * (rng() % 64), .type = G4_TYPE_F32, .rows = rows_, .cols = cols_}
    memset(weights, 0, sizeof weights);
    m.layers = weights;
    for (int i = 0; i < L; i++) {
        g4_layer *w = &weights[i];
        int full = pattern[i] == 'F', dh = dims[full];
        layers[i] = (g4_layer_config){full ? G4_FULL_ATTENTION : G4_SLIDING_ATTENTION, dh, G, F, i};
        g4_tensor *const of_width[] = {&w->input_layernorm, &w->post_attention_layernorm, &w->pre_feedforward_layernorm, &w->post_feedforward_layernorm};
        for (int k = 0; k < 4; k++) *of_width[k] = RANDOM(1, D);
        w->q_proj = RANDOM(H * dh, D), w->o_proj = RANDOM(D, H * dh), w->q_norm = RANDOM(1, dh);
        if (i < L - shared) w->k_proj = RANDOM(G * dh, D), w->v_proj = RANDOM(G * dh, D), w->k_norm = RANDOM(1, dh);
        w->gate_proj = RANDOM(F, D), w->up_proj = RANDOM(F, D), w->down_proj = RANDOM(D, F), w->layer_scalar = RANDOM(1, 1);
        if (P) w->per_layer_input_gate = RANDOM(P, D), w->per_layer_projection = RANDOM(D, P), w->post_per_layer_input_norm = RANDOM(1, D);
    }
    m.embed_tokens = m.lm_head = RANDOM(TINY_V, D);
    m.norm = RANDOM(1, D);
    if (P) m.embed_tokens_per_layer = RANDOM(TINY_V, L * P), m.per_layer_model_projection = RANDOM(L * P, D), m.per_layer_projection_norm = RANDOM(1, P);
    describe(to, &m);
#undef RANDOM
}

/* A sliding layer shares with the layer before the last that owns K/V, a full one with the last. */
static void test_donors(void) {
    static const struct {
        const char *pattern;
        int shared, donors[16], warns;
    } cases[] = {
        {"SSSFSSSF", 4, {0, 1, 2, 3, 2, 2, 2, 3}, 0},
        {"SFSF", 2, {0, 1, 0, 1}, 0},
        {"SSSS", 2, {0, 1, 0, 0}, 1},       /* not transformers' layer 1 */
        {"SSSSS", 2, {0, 1, 2, 1, 1}, 1},
        {"SFFSF", 2, {0, 1, 2, 0, 2}, 0},   /* layer 1 does not slide: transformers' rule, layer 0 */
        {"FSFS", 2, {0, 1, 0, 1}, 0},       /* neither rule's place is of the right kind */
        {"SFSFSF", 3, {0, 1, 2, 1, 2, 1}, 0},
        {"FFFF", 2, {0, 1, 1, 1}, 0},
        {"SF", 0, {0, 1}, 0},
        {"FF", 1, {0, 0}, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        describe_tiny(&s, cases[i].pattern, cases[i].shared, 4);
        if (!strchr(cases[i].pattern, 'F')) drop_item(&s, "rope_freqs.weight"); /* nobody needs it */
        g4_model *m = open_sheet(&s);
        CHECK(m, "%s: %s", cases[i].pattern, err.text);
        for (int l = 0; m && l < m->config.num_hidden_layers; l++)
            CHECK(m->config.layers[l].kv_layer == cases[i].donors[l], "%s, %d shared: layer %d reads the K/V of %d, expected %d", cases[i].pattern, cases[i].shared, l,
                  m->config.layers[l].kv_layer, cases[i].donors[l]);
        CHECK(n_warnings == cases[i].warns && (!n_warnings || strstr(warnings, "as llama.cpp has it; in transformers it would be layer")), "%s: %s", cases[i].pattern, warnings);
        float *logits = m ? logits_of(m) : NULL;
        for (int k = 0; logits && k < PROMPT * TINY_V; k++)
            if (!(fabsf(logits[k]) <= 9)) {
                CHECK(0, "%s: logit %d is %g", cases[i].pattern, k, (double)logits[k]);
                break;
            }
        free(logits);
        g4_close(m);
    }
    describe_tiny(&s, "SSF", 1, 0);
    refuses(&s, "no donor", "gemma4.attention.shared_kv_layers 1: no layer before layer 2 is full, so layer 2 has nobody to share K/V with");
    set_number(&s, "gemma4.attention.shared_kv_layers", U32, 3);
    refuses(&s, "all shared", "gemma4.attention.shared_kv_layers: expected less than block_count 3, found 3");
}

/* Every partial factor that there is: the ones of rope_freqs are counted. */
static void test_rope_freqs(void) {
    describe_tiny(&s, "SF", 0, 0);
    for (int half = 1; half <= 200; half += half < 66 ? 1 : 67) { /* factor and count must agree for any head size */
        for (int n = 0; n <= half; n++) {
            double factor = 2.0 * n / (2 * half);
            if (floor(factor * (2 * half) / 2) < n) factor = nextafter(factor, 2);
            CHECK((int)floor(factor * (2 * half) / 2) == n, "%d of %d", n, half);
        }
    }
    for (int n = 0; n <= 4; n++) {
        float freqs[4];
        for (int i = 0; i < 4; i++) freqs[i] = i < n ? 1 : i & 1 ? 1e30f : INFINITY;
        set_data(find_item(&s, "rope_freqs.weight"), freqs, 4);
        g4_model *m = open_sheet(&s);
        CHECK(m && (int)floor(m->config.rope[1].partial_rotary_factor * 8 / 2) == n, "%d pairs turn: %s", n, err.text);
        for (int i = 0; m && i < 4; i++) CHECK((m->inv_freq[1][i] != 0) == (i < n), "pair %d of %d: %g", i, n, (double)m->inv_freq[1][i]);
        g4_close(m);
    }
    static const struct {
        float freqs[4];
        const char *parts;
    } bad[] = {{{1, 2, 1e30f, 1e30f}, "found 2 at 1"}, {{1, 1e30f, 1, 1e30f}, "found 1 at 2"}, {{NAN, 1, 1, 1}, "found"}, {{1, 1, 1, 1e28f}, "found 1e+28 at 3"}, {{0.5f, 1e30f, 1e30f, 1e30f}, "found 0.5 at 0"},
               {{1, 1, -1e30f, 1e30f}, "at 2"}};
    for (int i = 0; i < 6; i++) {
        set_data(find_item(&s, "rope_freqs.weight"), bad[i].freqs, 4);
        refuses(&s, "other divisors", bad[i].parts);
        says(1, "other divisors", "tensor rope_freqs.weight: expected some times 1 and then 1e30 to the end");
    }
    const float five[5] = {1, 1, 1, 1, 1};
    for (int n = 3; n <= 5; n += 2) {
        set_data(find_item(&s, "rope_freqs.weight"), five, (size_t)n);
        find_item(&s, "rope_freqs.weight")->ne[0] = (uint64_t)n;
        refuses(&s, "too long or short", n == 3 ? "tensor rope_freqs.weight: expected the shape [4]|found [3]" : "tensor rope_freqs.weight: expected the shape [4]|found [5]");
    }
    drop_item(&s, "rope_freqs.weight");
    refuses(&s, "none", "tensor rope_freqs.weight is missing; the file's keys ask for it");
}

/* Where a text ends, what is not said, and how. */
static void test_generation(void) {
    describe_tiny(&s, "SF", 0, 0);
    bytes *b = set_array(&s, "tokenizer.ggml.tokens", STRING, TINY_V);
    for (int i = 0; i < TINY_V; i++) {
        char text[32];
        snprintf(text, sizeof text, "piece%d", i);
        const char *t = i == 11 ? "<eos>" : i == 40 ? "<|tool_response>" : i == 50 ? "<turn|>" : i == 51 ? "</s>" : text;
        put_text(b, t, strlen(t));
    }
    set_number(&s, "tokenizer.ggml.eos_token_id", U32, 50);
    set_number(&s, "tokenizer.ggml.eot_token_id", U32, 60);
    set_number(&s, "tokenizer.ggml.eom_token_id", I32, 61);
    set_numbers(&s, "tokenizer.ggml.suppress_tokens", I32, 4, (int[]){7, -1, TINY_V, 8});
    set_number(&s, "general.sampling.top_k", I32, 3);
    set_number(&s, "general.sampling.top_p", F32, 0.5);
    set_number(&s, "general.sampling.temp", F32, 0.25);
    g4_model *m = open_sheet(&s);
    CHECK(m, "%s", err.text);
    if (m) {
        static const int stops[] = {50, 60, 61, 11, 40};
        const g4_config *c = &m->config;
        CHECK(c->n_eos == 5, "%d stop ids", c->n_eos);
        for (int i = 0; i < 5; i++) CHECK(c->eos_token_id[i] == stops[i], "stop id %d is %d, expected %d", i, (int)c->eos_token_id[i], stops[i]);
        CHECK(c->n_suppress == 2 && c->suppress_tokens[0] == 7 && c->suppress_tokens[1] == 8, "suppressed");
        CHECK(c->top_k == 3 && c->top_p == 0.5f && c->temperature == 0.25f && c->do_sample == 1, "sampling");
    }
    g4_close(m);
    set_number(&s, "tokenizer.ggml.eos_token_id", U32, 4000000000.0); /* outside the vocabulary: never chosen */
    m = open_sheet(&s);
    CHECK(m && m->config.n_eos == 5 && m->config.eos_token_id[0] == 60, "%s", err.text);
    g4_close(m);
    set_text(&s, "tokenizer.ggml.eos_token_id", "1");
    refuses(&s, "eos is a text", "tokenizer.ggml.eos_token_id: expected an integer from|found \"1\"");
    drop_key(&s, "tokenizer.ggml.eos_token_id");
    set_numbers(&s, "tokenizer.ggml.suppress_tokens", I32, 65, (int[65]){0});
    refuses(&s, "65 suppressed", "tokenizer.ggml.suppress_tokens: expected an array of at most 64 ids, found an array of 65 i32");
    set_numbers(&s, "tokenizer.ggml.suppress_tokens", F32, 1, (int[]){7});
    refuses(&s, "a float suppressed", "tokenizer.ggml.suppress_tokens: expected an array of at most 64 ids");
    drop_key(&s, "tokenizer.ggml.suppress_tokens");
    b = set_array(&s, "tokenizer.ggml.tokens", STRING, TINY_V - 1);
    for (int i = 0; i < TINY_V - 1; i++) put_text(b, "", 0);
    refuses(&s, "a vocabulary of another size", "tokenizer.ggml.tokens: expected an array of 270 strings, the rows of token_embd.weight, found an array of 269 string");
}

/* ---- the container ---------------------------------------------------------------------------------------------------------- */

static void test_container(void) {
    static const uint32_t alignments[] = {1, 8, 32, 64, 4096};
    describe_tiny(&s, "SFSF", 2, 4);
    g4_model *m = open_sheet(&s);
    float *expected = m ? logits_of(m) : NULL;
    size_t bytes_of_file = m ? g4_checkpoint_bytes(m) : 0;
    g4_close(m);
    bytes b = image(&s, 0, NULL, NULL);
    CHECK(bytes_of_file == b.n, "%zu bytes, expected %zu", bytes_of_file, b.n);
    /* any name, with and without mapping; Ollama's files have no suffix */
    write_bytes("sha256-1234", b.p, b.n);
    for (int no_mmap = 0; no_mmap < 2; no_mmap++) {
        m = g4_open(in_dir("sha256-1234"), &(g4_options){.no_mmap = no_mmap}, &err);
        CHECK(m, "%s", err.text);
        g4_close(m);
    }
    /* bytes after the last tensor are no fault: some writers pad it */
    write_bytes("model.gguf", b.p, b.n);
    FILE *f = fopen(in_dir("model.gguf"), "ab");
    if (f) fwrite("0123456789", 1, 10, f), fclose(f);
    m = open_file("model.gguf");
    CHECK(m, "%s", err.text);
    g4_close(m);
    remove(in_dir("sha256-1234"));
    free(b.p);
    for (s.version = 2; s.version <= 3; s.version++) gives(&s, "versions 2 and 3", expected);
    s.version = 3;
    for (int i = 0; i < 5; i++) {
        s.alignment = alignments[i];
        set_number(&s, "general.alignment", i & 1 ? U32 : U64, alignments[i]);
        gives(&s, "alignment", expected);
    }
    s.alignment = 32;
    drop_key(&s, "general.alignment");
    for (int i = 0; i < 3; i++) { /* the order of tensors is no matter */
        for (int k = s.n_items - 1; k > 0; k--) {
            int other = (int)(rng() % (uint32_t)(k + 1));
            item t = s.items[k];
            s.items[k] = s.items[other];
            s.items[other] = t;
        }
        gives(&s, "tensors in another order", expected);
    }
    /* Ollama's tokenizer keys; every other kind of value somewhere */
    set_text(&s, "tokenizer.ggml.model", "llama");
    set_text(&s, "tokenizer.ggml.pre", "gemma4");
    set_number(&s, "gemma4.vision.block_count", U32, 16);
    set_number(&s, "a.u64", U64, 1e18);
    set_number(&s, "a.i8", I8, -5);
    set_number(&s, "a.f64", F64, 0.1);
    set_array(&s, "a.none", STRING, 0);
    set_numbers(&s, "a.bools", BOOL, 3, (int[]){1, 0, 1});
    gives(&s, "other keys", expected);
    free(expected);
}

/* Every type of value, by the two functions that read them. */
static void test_values(void) {
    static const struct {
        int type;
        double x;
        int whole; /* it can be asked for as an integer */
    } cases[] = {{U8, 255, 1},     {I8, -5, 1},         {I8, -128, 1},      {U16, 65535, 1}, {I16, -300, 1}, {U32, 4294967295.0, 1}, {I32, -2147483648.0, 1},
                 {F32, 0.5, 0},    {F64, -1e300, 0},    {U64, 1e18, 1},     {I64, -1e18, 1}, {I64, -1, 1},   {BOOL, 1, 1},           {U64, 9223372036854775808.0, 0}};
    clear(&s);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char name[8];
        snprintf(name, sizeof name, "n%zu", i);
        set_number(&s, name, cases[i].type, cases[i].x);
    }
    set_text(&s, "text", "7");
    set_numbers(&s, "several", I16, 3, (int[]){1, -2, 3});
    bytes b = image(&s, 0, NULL, NULL);
    g4_gguf *g = g4_gguf_parse(b.p, b.n, "memory", 0, &err);
    CHECK(g, "%s", err.text);
    for (size_t i = 0; g && i < sizeof cases / sizeof cases[0]; i++) {
        char name[8];
        int64_t whole = 0;
        double x = 0;
        snprintf(name, sizeof name, "n%zu", i);
        const g4_gguf_key *k = g4_gguf_find(g, name);
        int none = g4_gguf_int(k, 0, &whole), no_number = g4_gguf_double(k, 0, &x);
        CHECK(none == -!cases[i].whole && (none || whole == (int64_t)cases[i].x), "%s: %lld, expected %g", name, (long long)whole, cases[i].x);
        if (cases[i].type == BOOL || cases[i].x > 9e18) CHECK(no_number, "%s is %g", name, x);
        else CHECK(!no_number && x == cases[i].x, "%s: %g, expected %g", name, x, cases[i].x);
        CHECK(g4_gguf_int(k, 1, &whole) && g4_gguf_double(k, 1, &x), "%s has a second element", name);
    }
    if (g) {
        int64_t whole = 0;
        double x;
        const g4_gguf_key *k = g4_gguf_find(g, "several");
        CHECK(k->is_array && k->n == 3 && !g4_gguf_int(k, 1, &whole) && whole == -2 && g4_gguf_int(k, 3, &whole), "an array of three");
        k = g4_gguf_find(g, "text");
        CHECK(g4_gguf_int(k, 0, &whole) && g4_gguf_double(k, 0, &x), "a text that is no number");
        CHECK(!g4_gguf_find(g, "sever") && !g4_gguf_find(g, "severals"), "a name in part");
    }
    g4_gguf_close(g);
    free(b.p);
}

/* Three parts: the first holds only keys, as some are published. */
static void test_splits(void) {
    static const char *const names[] = {"split-00001-of-00003.gguf", "split-00002-of-00003.gguf", "split-00003-of-00003.gguf"};
    describe_tiny(&s, "SFSF", 2, 4);
    g4_model *m = open_sheet(&s);
    float *expected = m ? logits_of(m) : NULL;
    g4_close(m);
    for (int way = 0; way < 7; way++) {
        describe_tiny(&s, "SFSF", 2, 4);
        for (int i = 0; i < s.n_items; i++) s.items[i].part = way ? 1 + i % 2 : i % 3;
        set_number(&s, "split.no", U16, 0);
        set_number(&s, "split.count", U16, 3);
        set_number(&s, "split.tensors.count", I32, s.n_items - (way == 2) + (way == 5));
        sheet *other = room(sizeof *other);
        for (int part = 0; part < 3; part++) {
            bytes b = image(&s, part, NULL, NULL);
            if (part) { /* a part's own keys */
                clear(other);
                set_number(other, "split.no", U16, way == 3 ? 2 : part);
                set_number(other, "split.count", U16, way == 4 && part == 2 ? 4 : 3);
                for (int i = 0; i < s.n_items; i++)
                    if (s.items[i].part == part || (way == 5 && i == 1 && part == 1)) {
                        other->items[other->n_items] = s.items[i];
                        other->items[other->n_items].own = NULL;
                        other->items[other->n_items++].part = 0;
                    }
                free(b.p);
                b = image(other, 0, NULL, NULL);
            }
            write_bytes(names[part], b.p, b.n);
            free(b.p);
        }
        if (way == 5) CHECK(s.items[1].part == 2, "the tensor that is in two parts");
        if (way == 6) remove(in_dir(names[2]));
        clear(other);
        free(other);
        m = open_file(names[0]);
        static const char *const parts[] = {NULL, NULL, "split.tensors.count is", "split-00002-of-00003.gguf: split.no 2, split.count 3; expected 1 and 3",
                                            "split-00003-of-00003.gguf: split.no 2, split.count 4; expected 2 and 3", "is there twice", "split-00003-of-00003.gguf: cannot open"};
        if (way < 2) {
            float *got = m ? logits_of(m) : NULL;
            CHECK(got && expected && !memcmp(got, expected, sizeof *got * PROMPT * TINY_V) && !n_warnings, "in three parts: %s%s", err.text, warnings);
            free(got);
        } else {
            says(!m, "a bad split", parts[way]);
        }
        g4_close(m);
        if (way == 0) {
            m = open_file(names[1]);
            says(!m, "the second part", "split-00002-of-00003.gguf: is part 2 of the 3 that a model was split into; give the first, whose name ends in -00001-of-00003.gguf");
            g4_close(m);
        }
    }
    write_sheet("model.gguf", &s);
    bytes b = image(&s, 0, NULL, NULL);
    g4_gguf *g = g4_gguf_parse(b.p, b.n, "memory", 0, &err);
    says(!g, "a part in memory", "memory: is the first of 3 parts (split.count); expected a whole model");
    g4_gguf_close(g);
    g = g4_gguf_parse(b.p, b.n, "memory", 1, &err);
    CHECK(g, "the keys of a part in memory: %s", err.text);
    g4_gguf_close(g);
    free(b.p);
    m = open_file("model.gguf");
    says(!m, "a part with another name", "model.gguf: is the first of 3 parts (split.count); expected its name to end in -00001-of-00003.gguf");
    g4_close(m);
    for (int i = 0; i < 3; i++) remove(in_dir(names[i]));
    free(expected);
}

/* ---- refusals --------------------------------------------------------------------------------------------------------------- */

static void tiny(void) { describe_tiny(&s, "SFSF", 2, 4); }

static void test_refused_keys(void) {
    static const char *const required[] = {
        "gemma4.block_count", "gemma4.context_length", "gemma4.embedding_length", "gemma4.attention.sliding_window", "gemma4.attention.sliding_window_pattern",
        "gemma4.attention.layer_norm_rms_epsilon", "gemma4.attention.key_length_swa", "gemma4.attention.value_length_swa", "gemma4.embedding_length_per_layer_input",
        "gemma4.attention.head_count", "gemma4.feed_forward_length", "general.architecture"};
    char text[200];
    for (size_t i = 0; i < sizeof required / sizeof required[0]; i++) {
        tiny();
        drop_key(&s, required[i]);
        snprintf(text, sizeof text, "model.gguf: %s: is missing; expected", required[i]);
        refuses(&s, required[i], text);
    }
    static const struct {
        const char *name;
        int type;
        double x;
        const char *parts;
    } numbers[] = {
        {"gemma4.block_count", U32, 0, "gemma4.block_count: expected an integer from 1 to 4096, found 0"},
        {"gemma4.block_count", U32, 5000, "found 5000"},
        {"gemma4.block_count", F32, 4, "gemma4.block_count: expected an integer from 1 to 4096, found 4"},
        {"gemma4.block_count", BOOL, 1, "found"},
        {"gemma4.block_count", U32, 5, "gemma4.attention.sliding_window_pattern: expected an integer from 0 to 1, or an array of 5 such, block_count, found an array of 4 bool"},
        {"gemma4.block_count", I64, -4, "found -4"},
        {"gemma4.block_count", U64, 1e19, "found a number above 2^63"},
        {"gemma4.context_length", U32, 0, "gemma4.context_length: expected an integer from 1"},
        {"gemma4.embedding_length", U32, 9, "expected the shape [9"},
        {"gemma4.attention.sliding_window", U32, 0, "gemma4.attention.sliding_window: expected an integer from 1"},
        {"gemma4.attention.sliding_window_pattern", U32, 0, "gemma4.attention.sliding_window_pattern: expected an array of one bool for each layer, or a period, found 0"},
        {"gemma4.attention.sliding_window_pattern", BOOL, 1, "gemma4.attention.sliding_window_pattern: expected an array of one bool for each layer, or a period, found true"},
        {"gemma4.attention.layer_norm_rms_epsilon", F32, 0, "gemma4.attention.layer_norm_rms_epsilon: expected a number from 1e-30 to 1, found 0"},
        {"gemma4.attention.layer_norm_rms_epsilon", F32, NAN, "gemma4.attention.layer_norm_rms_epsilon: expected a number"},
        {"gemma4.attention.head_count", U32, 0, "gemma4.attention.head_count: expected integers from 1 to 4096, found 0 for layer 0"},
        {"gemma4.attention.head_count", U32, 3, "blk.0.attn_q.weight: expected the shape [8,12]"},
        {"gemma4.attention.head_count_kv", U32, 3, "gemma4.attention.head_count 2 is not a multiple of the 3 K/V heads of layer 0"},
        {"gemma4.attention.key_length", U32, 6, "gemma4.attention.key_length is 6, but gemma4.attention.value_length is 8; expected the same"},
        {"gemma4.attention.value_length_swa", U32, 8, "gemma4.attention.key_length_swa is 4, but gemma4.attention.value_length_swa is 8; expected the same"},
        {"gemma4.rope.dimension_count", U32, 4, "gemma4.rope.dimension_count: expected 8, gemma4.attention.key_length, found 4"},
        {"gemma4.rope.dimension_count_swa", U32, 8, "gemma4.rope.dimension_count_swa: expected 4, gemma4.attention.key_length_swa, found 8"},
        {"gemma4.feed_forward_length", U32, 0, "gemma4.feed_forward_length: expected integers from 1 to 16777216, found 0 for layer 0"},
        {"gemma4.feed_forward_length", U32, 13, "blk.0.ffn_gate.weight: expected the shape [8,13] by the file's keys, found [8,12]"},
        {"gemma4.final_logit_softcapping", F32, -1, "gemma4.final_logit_softcapping: expected a number above 0, or 0 for none, found -1"},
        {"gemma4.rope.freq_base", F32, 0, "gemma4.rope.freq_base: expected a number from 0.001 to 1e30, found 0"},
        {"gemma4.rope.freq_base_swa", STRING, 0, "gemma4.rope.freq_base_swa: expected a number from 0.001 to 1e30, found \"\""},
        {"gemma4.rope.scaling.factor", F32, 1e-9, "gemma4.rope.scaling.factor: expected a number from 0.001 to 1e6, or 0 for none"},
        {"gemma4.embedding_length_per_layer_input", U32, 5, "per_layer_token_embd.weight: expected the shape [20,270]"},
        {"gemma4.attention.shared_kv_layers", U32, 1, "tensor blk.2.attn_k.weight is missing, and 1 more that the file's keys ask for"},
        {"gemma4.attention.causal", BOOL, 0, "gemma4.attention.causal: expected true, found false"},
        {"gemma4.expert_count", U32, 3, "gemma4.expert_used_count: is missing"},
        {"general.sampling.top_p", F32, 2, "general.sampling.top_p: expected a number from 0 to 1, found 2"},
        {"general.sampling.top_k", F32, 2, "general.sampling.top_k: expected an integer"},
        {"general.alignment", U32, 0, "general.alignment: expected an integer from 1 to 2147483648, found 0"},
        {"general.alignment", U32, 48, "general.alignment: expected a power of two, found 48"},
        {"general.alignment", F32, 32, "general.alignment: expected an integer"},
        {"split.count", U16, 2, "is the first of 2 parts (split.count)"},
        {"split.count", I32, -1, "split.count: expected an integer from 0 to 65535, found -1"},
    };
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        tiny();
        if (numbers[i].type == STRING) set_text(&s, numbers[i].name, "");
        else set_number(&s, numbers[i].name, numbers[i].type, numbers[i].x);
        refuses(&s, numbers[i].name, numbers[i].parts);
    }
    static const struct {
        const char *name, *text, *parts;
    } texts[] = {
        {"general.architecture", "llama", "general.architecture: expected \"gemma4\" (this program runs no other architecture), found \"llama\""},
        {"general.architecture", "clip", "this is the vision and audio projector (mmproj) of a model; give the model's own file, found \"clip\""},
        {"general.architecture", "gemma4-assistant", "this drafts tokens for a model; give the model's own file, found \"gemma4-assistant\""},
        {"general.architecture", "gemma4\nx", "found \"gemma4?x\""},
        {"general.type", "adapter", "general.type: expected \"model\""},
        {"general.type", "mmproj", "found \"mmproj\""},
        {"gemma4.attention.head_count_kv", "1", "gemma4.attention.head_count_kv: expected an integer from 1 to 4096, or an array of 4 such, block_count, found \"1\""},
    };
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        tiny();
        set_text(&s, texts[i].name, texts[i].text);
        refuses(&s, texts[i].name, texts[i].parts);
    }
    tiny();
    set_numbers(&s, "gemma4.block_count", U32, 1, (int[]){4});
    refuses(&s, "an array of one", "gemma4.block_count: expected an integer from 1 to 4096, found an array of 1 u32");
    tiny();
    set_number(&s, "general.architecture", U32, 4);
    refuses(&s, "an architecture of 4", "general.architecture: expected \"gemma4\" (this program runs no other architecture), found 4");
    static const int lists[][5] = {{2, 1, 1, 1}, {1, 1, 2, 1}, {1, 1, 1, 1, 1}, {0, 1, 0, 1}};
    static const char *const kv_parts[] = {"gemma4.attention.head_count_kv: layers 0 and 2 are of one kind, but have 2 and 1", "layers 0 and 2 are of one kind, but have 1 and 2",
                                           "gemma4.attention.head_count_kv: expected an integer from 1 to 4096, or an array of 4 such, block_count, found an array of 5 i32", "found 0 for layer 0"};
    for (int i = 0; i < 4; i++) {
        tiny();
        set_numbers(&s, "gemma4.attention.head_count_kv", I32, i == 2 ? 5 : 4, lists[i]);
        refuses(&s, "K/V heads", kv_parts[i]);
    }
    tiny();
    set_numbers(&s, "gemma4.attention.head_count_kv", I32, 3, lists[2]);
    refuses(&s, "three numbers of K/V heads", "gemma4.attention.head_count_kv|found an array of 3 i32");
    tiny();
    set_numbers(&s, "gemma4.attention.sliding_window_pattern", I32, 4, (int[]){1, 0, 2, 0});
    refuses(&s, "neither 0 nor 1", "gemma4.attention.sliding_window_pattern: expected integers from 0 to 1, found 2 for layer 2");
    tiny();
    drop_key(&s, "gemma4.rope.dimension_count_swa");
    refuses(&s, "dimension_count_swa is dimension_count", "gemma4.rope.dimension_count_swa: expected 4, gemma4.attention.key_length_swa, found 8");
    static const char *const lengths[] = {"gemma4.attention.key_length", "gemma4.attention.value_length", "gemma4.rope.dimension_count"};
    tiny();
    for (int i = 0; i < 3; i++) set_number(&s, lengths[i], U32, 7);
    refuses(&s, "odd heads", "gemma4.attention.key_length: expected an even number of at least 2, found 7; RoPE rotates pairs");
    tiny();
    set_array(&s, "a", ARRAY, 0);
    refuses(&s, "an array of arrays", "(a) is an array of arrays");
    for (int type = 13; type < 300; type += 57) {
        tiny();
        bytes *b = set_key(&s, "a");
        put_int(b, (uint64_t)type, 4);
        refuses(&s, "an unknown type of value", "(a) has a value of type|expected 0 to 12");
    }
    tiny();
    set_number(&s, "", U8, 1);
    refuses(&s, "an empty key", "has an empty name");
    tiny();
    set_number(&s, "twice", U8, 1);
    set_number(&s, "once", U8, 1);
    strcpy(s.keys[s.n_keys - 1].name, "twice");
    refuses(&s, "a key twice", "the key twice is there twice");
    for (int i = 1; i < 20; i++) { /* wherever the two stand */
        tiny();
        strcpy(s.keys[i].name, s.keys[(i * 7 - 7) % i].name);
        refuses(&s, "a key twice", "is there twice");
    }
}

/* A tensor's description, changed. */
static void test_refused_tensors(void) {
    static const struct {
        const char *name;
        uint32_t rank;
        uint64_t ne[4];
        uint32_t type;
        const char *parts;
    } cases[] = {
        {"output_norm.weight", 0, {8}, 0, "(output_norm.weight) has 0 dimensions; expected 1 to 4"},
        {"output_norm.weight", 5, {8, 1, 1, 1}, 0, "(output_norm.weight) has 5 dimensions; expected 1 to 4"},
        {"output_norm.weight", 1, {0}, 0, "dimension 0 is 0; expected 1 or more"},
        {"output_norm.weight", 2, {8, 0}, 0, "dimension 1 is 0; expected 1 or more"},
        {"output_norm.weight", 2, {UINT64_MAX, 2}, 0, "dimension 0 is 18446744073709551615; expected 1 or more, and no product above 2^63"},
        {"output_norm.weight", 2, {(uint64_t)1 << 33, (uint64_t)1 << 33}, 0, "dimension 1 is 8589934592; expected 1 or more, and no product above 2^63"},
        {"output_norm.weight", 4, {(uint64_t)1 << 20, (uint64_t)1 << 20, (uint64_t)1 << 20, 8}, 0, "dimension 3 is 8"},
        {"output_norm.weight", 1, {(uint64_t)1 << 62}, 0, "take more than 2^63 bytes"},
        {"output_norm.weight", 1, {((uint64_t)1 << 61) - 1}, 0, "ends beyond 2^63 bytes"},
        {"output_norm.weight", 1, {(uint64_t)1 << 59}, 0, "begins at offset"},
        {"output_norm.weight", 1, {9}, 0, "tensor output_norm.weight: expected the shape [8] by the file's keys, found [9]"},
        {"output_norm.weight", 2, {8, 1}, 0, NULL},
        {"output_norm.weight", 1, {8}, 4, "has the type 4, which ggml does not define"},
        {"output_norm.weight", 1, {8}, 43, "has the type 43, which ggml does not define"},
        {"output_norm.weight", 1, {8}, 255, "has the type 255"},
        {"output_norm.weight", 1, {8}, 0xffffffff, "has the type 4294967295"},
        {"output_norm.weight", 1, {8}, 8, "rows of 8 elements, but Q8_0 comes in blocks of 32"},
        {"output_norm.weight", 1, {8}, 26, "tensor output_norm.weight: its type I32 is not supported here; expected F32, F16 or BF16"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        tiny();
        item *t = find_item(&s, cases[i].name);
        t->rank = cases[i].rank;
        memcpy(t->ne, cases[i].ne, sizeof t->ne);
        t->type = cases[i].type;
        if (t->ne[0] == 9 || t->type == 26) t->bytes = 4 * t->ne[0];
        if (cases[i].parts) {
            refuses(&s, cases[i].parts, cases[i].parts);
        } else {
            g4_model *m = open_sheet(&s);
            CHECK(m, "a dimension of 1 at the end: %s", err.text);
            g4_close(m);
        }
    }
    static const char *const names[] = {"", "0123456789012345678901234567890123456789012345678901234567890123"}; /* 64 bytes */
    for (int i = 0; i < 2; i++) {
        tiny();
        strcpy(find_item(&s, "output_norm.weight")->name, names[i]);
        refuses(&s, "a bad name", i ? "expected a name of 1 to 63 bytes without NUL, found 64 bytes" : "expected a name of 1 to 63 bytes without NUL, found 0 bytes");
    }
    tiny();
    strcpy(find_item(&s, "blk.1.ffn_norm.weight")->name, "blk.0.ffn_norm.weight");
    refuses(&s, "a tensor twice", "the tensor blk.0.ffn_norm.weight is there twice");
    tiny();
    while (s.n_items) drop_item(&s, s.items[0].name);
    refuses(&s, "no tensors", "holds no tensors: a vocabulary alone, which only tokenize and detokenize can use");
    tiny();
    drop_item(&s, "token_embd.weight");
    refuses(&s, "no embeddings", "tensor token_embd.weight is missing");
    tiny();
    item *large = find_item(&s, "token_embd.weight"); /* of bytes, I8, which nothing else here is */
    large->type = 24;
    large->ne[0] = 1;
    large->ne[1] = large->bytes = (1 << 24) + 1;
    large->data = large->own = room(large->bytes);
    refuses(&s, "too many rows", "tensor token_embd.weight: expected at most 16777216 rows, found 16777217");
    tiny();
    drop_item(&s, "per_layer_token_embd.weight");
    refuses(&s, "no per-layer embeddings", "tensor per_layer_token_embd.weight is missing");
    int n = 0;
    tiny();
    for (int i = 0; i < s.n_items; i++) n += !strncmp(s.items[i].name, "blk.3.", 6);
    for (int i = 0; i < n; i++) { /* each tensor of a layer is needed, but for the scale */
        char name[80], text[200];
        tiny();
        for (int k = 0, seen = 0; k < s.n_items; k++)
            if (!strncmp(s.items[k].name, "blk.3.", 6) && seen++ == i) strcpy(name, s.items[k].name);
        drop_item(&s, name);
        if (!strcmp(name, "blk.3.layer_output_scale.weight")) continue;
        snprintf(text, sizeof text, "tensor %s is missing; the file's keys ask for it", name);
        refuses(&s, name, text);
    }
    /* a type that is not built, where it is needed: 1-bit weights */
    tiny();
    item *t = find_item(&s, "token_embd.weight");
    t->type = 16; /* IQ2_XXS */
    t->ne[0] = 256;
    t->bytes = TINY_V * 66;
    t->data = t->own = room(t->bytes);
    set_number(&s, "gemma4.embedding_length", U32, 256);
    refuses(&s, "a type that is not built", "tensor token_embd.weight: its type IQ2_XXS is not supported by this version");
}

static size_t find_bytes(const bytes *b, const char *what) {
    size_t n = strlen(what);
    for (size_t i = 0; i + n <= b->n; i++)
        if (!memcmp(b->p + i, what, n)) return i;
    return 0;
}

static void patched(const bytes *b, size_t at, uint64_t x, int size, const char *what, const char *parts) {
    bytes copy = {0}, patch = {0};
    put(&copy, b->p, b->n);
    put_int(&patch, x, size);
    memcpy(copy.p + at, patch.p, (size_t)size);
    write_bytes("model.gguf", copy.p, copy.n);
    g4_model *m = open_file("model.gguf");
    says(!m, what, parts);
    g4_close(m);
    free(copy.p);
    free(patch.p);
}

/* Offsets, counts and lengths that lie. */
static void test_lies(void) {
    size_t infos, data;
    tiny();
    bytes b = image(&s, 0, &infos, &data);
    patched(&b, 0, 0x46554748, 4, "another magic", "is no GGUF file: expected it to begin with \"GGUF\", found \"HGUF\"");
    static const uint64_t versions[] = {0, 1, 4, 0xffffffff};
    for (int i = 0; i < 4; i++) patched(&b, 4, versions[i], 4, "another version", "GGUF version|expected 2 or 3");
    patched(&b, 4, 0x03000000, 4, "big-endian", "a big-endian GGUF file; expected a little-endian one");
    patched(&b, 8, (uint64_t)1 << 63, 8, "2^63 tensors", "the header announces 23 keys and 9223372036854775808 tensors");
    patched(&b, 16, (uint64_t)1 << 63, 8, "2^63 keys", "the header announces 9223372036854775808 keys and");
    patched(&b, 16, UINT64_MAX, 8, "2^64 - 1 keys", "the header announces 18446744073709551615 keys and");
    patched(&b, 16, 24, 8, "one key more", "model.gguf: tensor 0: expected a name of 1 to 63 bytes without NUL");
    patched(&b, 8, (uint64_t)s.n_items + 1, 8, "one tensor more", "model.gguf: tensor 68: expected a name of 1 to 63 bytes without NUL");
    patched(&b, 24, (uint64_t)1 << 63, 8, "a key of 2^63 bytes", "ends inside key 0: 9223372036854775808 bytes of text are announced, but only");
    patched(&b, 24, b.n - 32 + 1, 8, "a key one byte longer than the file", "bytes of text are announced, but only");
    size_t at = find_bytes(&b, "general.architecture") + strlen("general.architecture") + 4;
    patched(&b, at, UINT64_MAX, 8, "a value of 2^64 - 1 bytes", "ends inside key 0 (general.architecture): 18446744073709551615 bytes of text are announced");
    at = find_bytes(&b, "sliding_window_pattern") + strlen("sliding_window_pattern") + 8;
    patched(&b, at, UINT64_MAX, 8, "an array of 2^64 - 1", "(gemma4.attention.sliding_window_pattern): 18446744073709551615 bool are announced");
    patched(&b, infos, (uint64_t)1 << 62, 8, "a tensor's name of 2^62 bytes", "ends inside tensor 0: 4611686018427387904 bytes of text are announced");
    at = find_bytes(&b, "output_norm.weight") + strlen("output_norm.weight") + 4 + 8 + 4;
    uint64_t offset = 0;
    for (int i = 0; i < 8; i++) offset |= (uint64_t)b.p[at + (size_t)i] << 8 * i;
    patched(&b, at, offset + 1, 8, "an unaligned offset", "rounded up to a multiple of 32: it is not aligned");
    patched(&b, at, offset + 32, 8, "a gap", ": there is a gap");
    patched(&b, at, offset - 32, 8, "an overlap", ": they overlap");
    patched(&b, at, (uint64_t)1 << 40, 8, "far away", ": there is a gap");
    patched(&b, at, offset + ((uint64_t)1 << 32), 8, "2^32 further", ": there is a gap");
    patched(&b, at, 0, 8, "the first one's place", ": they overlap");
    free(b.p);

    b = image(&s, 0, NULL, NULL); /* the last tensor, whole and cut */
    for (size_t cut = 1; cut < 40; cut += 13) {
        write_bytes("model.gguf", b.p, b.n - cut);
        g4_model *m = open_file("model.gguf");
        char text[300];
        snprintf(text, sizeof text, "tensor per_layer_proj_norm.weight ends at byte %zu, but the file has %zu (incomplete download?)", b.n, b.n - cut);
        if (cut < 16) says(!m, "cut in the last tensor", text);
        else says(!m, "cut before the last tensor", "(incomplete download?)");
        g4_close(m);
    }
    free(b.p);
    tiny();
    set_array(&s, "a", I32, (uint64_t)1 << 62); /* its bytes are 0 in 64 bits */
    refuses(&s, "an array of 2^62 numbers", "(a): 4611686018427387904 i32 are announced");
    tiny();
    put_text(set_array(&s, "tokenizer.ggml.tokens", STRING, (uint64_t)1 << 60), "x", 1);
    refuses(&s, "an array of 2^60 strings", "(tokenizer.ggml.tokens): 1152921504606846976 strings are announced");
    put_text(set_array(&s, "tokenizer.ggml.tokens", STRING, 100), "x", 1);
    refuses(&s, "a string array that is too short", "(tokenizer.ggml.tokens): |bytes of text are announced, but only");
}

/* A header cut at every place, and one with every byte changed: refused with a line that names the file, or opened; never a crash. */
static void test_damage(void) {
    size_t infos, data;
    describe_tiny(&s, "SFSF", 2, 0);
    bytes b = image(&s, 0, &infos, &data);
    int opened = 0, refused = 0;
#if defined(__SANITIZE_ADDRESS__)
    const size_t step = 5;
#else
    const size_t step = 1;
#endif
    for (size_t n = 0; n < b.n; n += n < data ? step : 997) {
        write_bytes("model.gguf", b.p, n);
        g4_model *m = open_file("model.gguf");
        if (m || !strstr(err.text, "model.gguf: ") || strchr(err.text, '\n')) CHECK(0, "cut after %zu of %zu bytes: %s", n, b.n, m ? "opened" : err.text);
        refused += !m;
        g4_close(m);
    }
    CHECK(refused > 100, "%d cut files", refused);
    for (size_t at = 0; at < data; at += step) {
        static const int changes[] = {0x01, 0x80, 0xff, 0x20};
        for (int i = 0; i < 4; i++) {
            b.p[at] ^= (unsigned char)changes[i];
            write_bytes("model.gguf", b.p, b.n);
            g4_model *m = open_file("model.gguf");
            if (!m && (!strstr(err.text, "model.gguf: ") || strchr(err.text, '\n'))) CHECK(0, "byte %zu changed: %s", at, err.text);
            *(m ? &opened : &refused) += 1;
            g4_close(m);
            b.p[at] ^= (unsigned char)changes[i];
        }
    }
    CHECK(opened > 0 && refused > 1000, "%d opened, %d refused", opened, refused);
    for (int round = 0; round < 2000; round++) { /* several at once, anywhere */
        unsigned char before[4];
        size_t at[4];
        for (int i = 0; i < 4; i++) at[i] = rng() % data, before[i] = b.p[at[i]], b.p[at[i]] = (unsigned char)rng();
        write_bytes("model.gguf", b.p, b.n);
        g4_model *m = open_file("model.gguf");
        g4_close(m);
        for (int i = 3; i >= 0; i--) b.p[at[i]] = before[i];
    }
    free(b.p);
}

/* ---- the tokenizer ---------------------------------------------------------------------------------------------------------- */

/* models/austen/tokenizer.json as keys of a GGUF file. types: token_type is written, honestly. */
static void describe_tokenizer(sheet *to, int types) {
    g4_file f;
    g4_json j;
    if (g4_file_open(&f, "models/austen/tokenizer.json", 0, &err) || g4_json_parse(&j, (const char *)f.data, f.size, "tokenizer.json", &err)) {
        CHECK(0, "%s", err.text);
        exit(test_done("gguf"));
    }
    g4_file_close(&f);
    uint32_t model = g4_json_get(&j, 0, "model"), vocab = g4_json_get(&j, model, "vocab"), merges = g4_json_get(&j, model, "merges"), n = j.nodes[vocab].size;
    uint32_t added = g4_json_get(&j, 0, "added_tokens");
    uint32_t *by_id = room(sizeof *by_id * n);
    int *type = room(sizeof *type * n);
    for (uint32_t i = j.nodes[vocab].first; i; i = j.nodes[i].next) {
        int64_t id = 0;
        g4_json_int(&j, i, &id);
        by_id[id] = i;
        type[id] = j.nodes[i].key_size == 6 && !memcmp(j.text + j.nodes[i].key, "<0x", 3) ? 6 : 1;
    }
    for (uint32_t i = j.nodes[added].first; i; i = j.nodes[i].next) {
        int64_t id = 0;
        g4_json_int(&j, g4_json_get(&j, i, "id"), &id);
        type[id] = id % 2 ? 3 : 4; /* which of them is control differs from file to file */
    }
    set_text(to, "tokenizer.ggml.model", "gemma4");
    bytes *b = set_array(to, "tokenizer.ggml.tokens", STRING, n);
    for (uint32_t i = 0; i < n; i++) put_text(b, j.text + j.nodes[by_id[i]].key, j.nodes[by_id[i]].key_size);
    b = set_array(to, "tokenizer.ggml.merges", STRING, j.nodes[merges].size);
    for (uint32_t i = j.nodes[merges].first; i; i = j.nodes[i].next) {
        char text[200];
        uint32_t left = j.nodes[i].first, right = j.nodes[i].kind == G4_JSON_ARRAY ? j.nodes[left].next : 0;
        if (right) put_text(b, text, (size_t)snprintf(text, sizeof text, "%s %s", g4_json_string(&j, left), g4_json_string(&j, right)));
        else put_text(b, g4_json_string(&j, i), j.nodes[i].size);
    }
    if (types) set_numbers(to, "tokenizer.ggml.token_type", I32, (int)n, type);
    free(by_id);
    free(type);
    g4_json_free(&j);
}

static g4_tokenizer *open_tokenizer(const sheet *from) {
    write_sheet("vocabulary.gguf", from);
    return g4_tokenizer_open(in_dir("vocabulary.gguf"), &err);
}

static void refuses_tokenizer(const char *what, const char *parts) {
    g4_tokenizer *t = open_tokenizer(&s);
    says(!t, what, parts);
    g4_tokenizer_close(t);
}

static void same_ids(const g4_tokenizer *a, const g4_tokenizer *b, const char *text, size_t n, int flags) {
    int32_t *x = NULL, *y = NULL;
    size_t n_x = 0, n_y = 0;
    int failed = g4_encode(a, text, n, flags, &x, &n_x, &err) || g4_encode(b, text, n, flags, &y, &n_y, &err);
    CHECK(!failed && n_x == n_y && !memcmp(x, y, n_x * sizeof *x), "%.60s: other ids", text);
    g4_free(x);
    g4_free(y);
}

static void test_tokenizer(void) {
    static const char *const texts[] = {"", "It is a truth universally acknowledged, that a single man", " a  b\n\n\nc\t\xe2\x96\x81", "<bos><|turn>user\nhi<turn|>\n<eos>", "\xff\xc3(\xf0\x9f\x98\x8a",
                                        "<|tool_response>x<|\"|>y<|channel>z<mask>"};
    g4_tokenizer *json = g4_tokenizer_open("models/austen", &err);
    for (int way = 0; way < 4; way++) {
        clear(&s);
        describe_tokenizer(&s, way > 0);
        if (way == 2) set_text(&s, "tokenizer.ggml.model", "llama"), set_text(&s, "tokenizer.ggml.pre", "gemma4"); /* Ollama's */
        if (way == 3) set_number(&s, "tokenizer.ggml.add_bos_token", BOOL, 0), set_text(&s, "general.architecture", "gemma4");
        g4_tokenizer *t = open_tokenizer(&s);
        CHECK(t && json, "%s", err.text);
        if (!t || !json) return;
        CHECK(g4_tokenizer_size(t) == g4_tokenizer_size(json), "%d ids", g4_tokenizer_size(t));
        for (int32_t id = 0; id < g4_tokenizer_size(json); id++) {
            size_t n = 0, m = 0;
            const char *x = g4_token_piece(t, id, &n), *y = g4_token_piece(json, id, &m);
            if (n != m || memcmp(x, y, n) || g4_token_is_special(t, id) != g4_token_is_special(json, id)) CHECK(0, "id %d: %s, expected %s", (int)id, x, y);
        }
        for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++)
            for (int flags = 0; flags < 2; flags++) same_ids(t, json, texts[i], strlen(texts[i]), flags);
        for (int i = 0; i < 300; i++) {
            char text[64];
            size_t n = rng() % sizeof text;
            for (size_t k = 0; k < n; k++) text[k] = rng() % 4 ? (char)(' ' + rng() % 95) : (char)rng();
            same_ids(t, json, text, n, 0);
        }
        g4_tokenizer_close(t);
    }
    g4_tokenizer_close(json);

    /* a token of the file's own */
    int type[2048];
    for (int i = 0; i < 2048; i++) type[i] = i == 700 ? 3 : i == 701 ? 4 : 1;
    set_numbers(&s, "tokenizer.ggml.token_type", I32, 2048, type);
    g4_tokenizer *t = open_tokenizer(&s);
    CHECK(t && g4_token_is_special(t, 700) && !g4_token_is_special(t, 701) && g4_token_is_special(t, 2), "%s", err.text);
    g4_tokenizer_close(t);

    bytes b = image(&s, 0, NULL, NULL);
    for (size_t n = 0; n < b.n; n += n < 200 ? 1 : 1009) {
        write_bytes("vocabulary.gguf", b.p, n);
        t = g4_tokenizer_open(in_dir("vocabulary.gguf"), &err);
        if (t || !strstr(err.text, "vocabulary.gguf: ")) CHECK(0, "cut after %zu bytes: %s", n, t ? "opened" : err.text);
        g4_tokenizer_close(t);
    }
    free(b.p);
    clear(&s);
    describe_tokenizer(&s, 1);
    set_text(&s, "tokenizer.ggml.model", "llama");
    refuses_tokenizer("another model", "vocabulary.gguf: tokenizer.ggml.model: expected \"gemma4\", found another");
    drop_key(&s, "tokenizer.ggml.model");
    refuses_tokenizer("no model", "tokenizer.ggml.model: expected \"gemma4\", found no such key");
    set_text(&s, "tokenizer.ggml.model", "gemma4");
    set_numbers(&s, "tokenizer.ggml.token_type", I32, 2047, type);
    refuses_tokenizer("too few types", "tokenizer.ggml.token_type: expected an array of 2048, one for each of tokenizer.ggml.tokens");
    set_numbers(&s, "tokenizer.ggml.token_type", F32, 2048, type);
    refuses_tokenizer("types that are no integers", "tokenizer.ggml.token_type: expected integers");
    drop_key(&s, "tokenizer.ggml.token_type");
    put_text(set_array(&s, "tokenizer.ggml.merges", STRING, 1), "ab", 2);
    refuses_tokenizer("a merge of one piece", "tokenizer.ggml.merges[0]: expected two pieces and one space between them, found \"ab\"");
    put_text(set_array(&s, "tokenizer.ggml.merges", STRING, 1), "a b c", 5);
    refuses_tokenizer("a merge of three pieces", "tokenizer.ggml.merges[0]: expected two pieces and one space between them, found \"a b c\"");
    set_array(&s, "tokenizer.ggml.merges", STRING, 0);
    refuses_tokenizer("no merges", "tokenizer.ggml.merges: expected an array of 1 to|found none");
    set_numbers(&s, "tokenizer.ggml.merges", I32, 1, type);
    refuses_tokenizer("merges that are numbers", "tokenizer.ggml.merges: expected an array of|found another value");
    drop_key(&s, "tokenizer.ggml.merges");
    refuses_tokenizer("merges are not there", "tokenizer.ggml.merges: expected an array of|found no such key");
    drop_key(&s, "tokenizer.ggml.tokens");
    refuses_tokenizer("tokens are not there", "tokenizer.ggml.tokens: expected an array of 1 to 16777216 strings, found no such key");
    put_text(set_array(&s, "tokenizer.ggml.tokens", STRING, 1), "a", 1);
    describe_tokenizer(&s, 0);
    put_text(set_array(&s, "tokenizer.ggml.tokens", STRING, 1), "a", 1);
    refuses_tokenizer("one token", "the vocabulary has no <0x00>");
    t = g4_tokenizer_open(in_dir("none.gguf"), &err);
    says(!t, "no file", "none.gguf: cannot open");
    CHECK(!strstr(err.text, "tokenizer.json"), "%s", err.text);
}

/* Flipped bits: no number in a norm, or in the scale of a block, is named by tensor and place. */
static void test_flipped_bits(void) {
    static const unsigned char inf[4] = {0, 0, 0x80, 0x7f}, nan_half[2] = {0x00, 0x7e};
    for (int way = 0; way < 3; way++) {
        g4_file f;
        g4_model *m = g4_open("test/gguf/ple.gguf", NULL, &err);
        if (!m || g4_file_open(&f, "test/gguf/ple.gguf", 0, &err)) {
            CHECK(0, "%s", err.text);
            return;
        }
        const g4_tensor *t = way == 1 ? &m->layers[2].post_feedforward_layernorm : &m->layers[0].o_proj;
        size_t at = 0;
        CHECK(!g4_check_weights(m, &err), "%s", err.text);
        while (memcmp(f.data + at, t->data, 32)) at++; /* where it is in the file */
        unsigned char *copy = room(f.size);
        memcpy(copy, f.data, f.size);
        if (way == 1) memcpy(copy + at + 4 * 200, inf, 4);
        if (way == 2) memcpy(copy + at + 34 * 5, nan_half, 2);
        write_bytes("model.gguf", copy, f.size);
        free(copy);
        g4_file_close(&f);
        g4_close(m);
        m = open_file("model.gguf");
        CHECK(m, "%s", err.text);
        if (!m) return;
        int failed = g4_check_weights(m, &err);
        if (!way) CHECK(!failed, "%s", err.text);
        else says(failed, "a flipped bit", way == 1 ? "tensor blk.2.post_ffw_norm.weight (F32): row 0, element 200, which is in block 200, is inf: the file is damaged"
                                                    : "tensor blk.0.attn_output.weight (Q8_0): row 5, element 0, which is in block 0, is|the file is damaged");
        g4_close(m);
    }
}

/* The chat template, and any other text, without the weights. */
static void test_texts(void) {
    char *text = NULL;
    size_t n = 0;
    describe_tiny(&s, "SF", 0, 0);
    set_text(&s, "tokenizer.chat_template", "{{ bos_token }}\n");
    write_sheet("model.gguf", &s);
    int failed = g4_gguf_text(in_dir("model.gguf"), "tokenizer.chat_template", &text, &n, &err);
    CHECK(!failed && text && n == 16 && !strcmp(text, "{{ bos_token }}\n"), "%s", failed ? err.text : "another text");
    g4_free(text);
    failed = g4_gguf_text(in_dir("model.gguf"), "tokenizer.none", &text, &n, &err);
    CHECK(!failed && !text, "no such key");
    says(g4_gguf_text(in_dir("model.gguf"), "gemma4.block_count", &text, &n, &err), "no text", "gemma4.block_count: expected a string, found 2");
    says(g4_gguf_text(in_dir("none.gguf"), "a", &text, &n, &err), "no file", "none.gguf: cannot open");
    CHECK(g4_is_gguf(in_dir("model.gguf")) && !g4_is_gguf(in_dir("none.gguf")) && !g4_is_gguf(dir) && !g4_is_gguf("models/austen/config.json"), "which files are GGUF");
}

/* ---- parity: FOLDER/NAME.gguf and FOLDER/NAME.expected.safetensors, ids [T] and logits [T][V] by transformers on the dequantised weights ---- */

static float load_f32(const unsigned char *p) {
    uint32_t bits = p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* The largest difference, relative to the largest expected logit, or NaN if there is one; -1: could not run. */
static double difference(const g4_model *m, g4_precision precision, const g4_safetensors *expected) {
    const g4_st_tensor *ids = g4_safetensors_find(expected, "ids"), *logits = g4_safetensors_find(expected, "logits");
    if (!ids || !logits || strcmp(logits->dtype, "F32") || (strcmp(ids->dtype, "I32") && strcmp(ids->dtype, "I64"))) return -1;
    int T = (int)ids->shape[0], V = g4_get_config(m)->vocab_size, step = strcmp(ids->dtype, "I64") ? 4 : 8;
    if (logits->bytes != sizeof(float) * (size_t)T * (size_t)V) return -1;
    g4_row *rows = room(sizeof *rows * (size_t)T);
    float *got = room(sizeof *got * (size_t)T * (size_t)V);
    for (int t = 0; t < T; t++) rows[t] = (g4_row){.token = ids->data[step * t] | ids->data[step * t + 1] << 8 | ids->data[step * t + 2] << 16, .pos = t, .want_logits = 1};
    g4_state *state = g4_state_open(m, &(g4_state_options){.chunk = 7, .ctx = T, .precision = precision}, &err);
    double worst = 0, largest = 0;
    if (!state || g4_forward(state, rows, T, got, &err)) worst = -1;
    for (size_t i = 0; worst != -1 && i < (size_t)T * (size_t)V; i++) {
        double x = (double)load_f32(logits->data + 4 * i), d = fabs(got[i] - x);
        if (!(d <= worst)) worst = d;
        if (fabs(x) > largest) largest = fabs(x);
    }
    g4_state_close(state);
    free(rows);
    free(got);
    return worst == -1 ? -1 : worst / largest;
}

static void check_parity(const char *folder, const char *name, double bar, double bar_16) {
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
        double d = difference(m, G4_F32, &expected), d_16 = difference(m, G4_Q16, &expected);
        CHECK(d >= 0 && d <= bar, "%s: logits differ by %g of the largest, at most %g allowed", path[0], d, bar);
        CHECK(d_16 >= 0 && d_16 <= bar_16, "%s, q16: logits differ by %g of the largest, at most %g allowed", path[0], d_16, bar_16);
        g4_close(m);
    }
    g4_safetensors_close(&expected);
}

static void test_shared_fixtures(void) {
    static const char *const names[] = {"ple-bf16", "ple-Q8_0", "ple-Q6_K", "ple-Q4_K_M", "ple-Q4_0", "moe-Q8_0", "moe-Q6_K", "moe-Q4_K_M", "moe-Q4_0"};
    const char *shared = getenv("SHARED");
    char folder[900];
    if (!shared || !*shared) {
        SKIP("the GGUF files of llama.cpp's converter: SHARED is not set");
        return;
    }
    snprintf(folder, sizeof folder, "%s/fixtures/gguf", shared);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) check_parity(folder, names[i], 3e-5, 3e-5);
}

int main(int argc, char **argv) {
    char *slash;
    (void)argc;
    snprintf(dir, sizeof dir, "%s", argv[0]);
    for (char *p = dir; *p; p++)
        if (*p == '\\') *p = '/';
    slash = strrchr(dir, '/');
    snprintf(slash ? slash + 1 : dir, sizeof dir - (size_t)(slash ? slash + 1 - dir : 0), "test_gguf.files");
    if (make_directory(dir) && errno != EEXIST) {
        printf("cannot make %s: %s\n", dir, strerror(errno));
        return 2;
    }
    test_fixtures();
    test_spellings();
    test_other_tensors();
    test_defaults();
    test_donors();
    test_rope_freqs();
    test_generation();
    test_container();
    test_values();
    test_splits();
    test_refused_keys();
    test_refused_tensors();
    test_lies();
    test_damage();
    test_tokenizer();
    test_texts();
    test_flipped_bits();
    /* large weights: 16 bits give 2.9e-4 and 8.9e-5 here */
    check_parity("test/gguf", "ple", 1e-5, 5e-4);
    check_parity("test/gguf", "moe", 1e-5, 2e-4);
    test_shared_fixtures();
    clear(&s);
    remove(in_dir("model.gguf"));
    remove(in_dir("vocabulary.gguf"));
    return test_done("gguf");
}
