/* statefile.c - one sequence of a state in a file: its ids and its K/V cache, so that a long prompt is computed once and read back later, by
 * another program, on another machine, into a state of another size.
 *
 * Not here: whole states, other sequences, what was sampled and how. What the state itself does for this is g4_state_rows and g4_state_set (gemma4.c).
 *
 * All numbers are little-endian:
 *
 *     0  "gemma4sq"
 *     8  u32 version, 2; it is another whenever the same tokens would give other bits (1: quantised weights were multiplied as floats)
 *    12  u32 precision (g4_precision)
 *    16  u64 fingerprint of the model: config and some of each weight
 *    24  u32 tokens, T
 *    28  u64 hash of all that follows
 *    36  i32 ids [T]
 *        for each layer that owns its K/V: f32 k [G][n][dh], f32 v [G][n][dh]; n = T on full layers, min(T, W - 1) on sliding ones
 *
 * and nothing after that. Of a sliding layer's ring only the rows that the next token sees are written, in the order of their positions, which is why ctx
 * and chunk do not matter. Read g4_sequence_save and g4_sequence_load; what they share stands above.
 */
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif
#if !defined(_WIN32) && !defined(_FILE_OFFSET_BITS)
#define _FILE_OFFSET_BITS 64
#endif
#include "gemma4.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HEADER = 36, VERSION = 2 };
static const char magic[] = "gemma4sq";

/* ---- What the systems spell differently: UTF-8 paths, renaming over an existing file ------------------------------------- */

#ifdef _WIN32
#include <windows.h>

static wchar_t *wide(const char *text) {
    int n = MultiByteToWideChar(CP_UTF8, 0, text, -1, NULL, 0);
    wchar_t *w = n > 0 ? malloc((size_t)n * sizeof *w) : NULL;
    if (w) MultiByteToWideChar(CP_UTF8, 0, text, -1, w, n);
    return w;
}

static FILE *create_file(const char *path) {
    wchar_t *w = wide(path);
    FILE *f = w ? _wfopen(w, L"wb") : NULL;
    free(w);
    return f;
}

static int move_file(const char *from, const char *to) {
    wchar_t *a = wide(from), *b = wide(to);
    int ok = a && b && MoveFileExW(a, b, MOVEFILE_REPLACE_EXISTING);
    free(a), free(b);
    if (!ok) errno = EACCES;
    return ok ? 0 : -1;
}

static void remove_file(const char *path) {
    wchar_t *w = wide(path);
    if (w) DeleteFileW(w);
    free(w);
}

static int is_special_file(const char *path) {
    wchar_t *w = wide(path);
    DWORD kind = w ? GetFileAttributesW(w) : INVALID_FILE_ATTRIBUTES;
    free(w);
    return kind != INVALID_FILE_ATTRIBUTES && (kind & (FILE_ATTRIBUTE_DEVICE | FILE_ATTRIBUTE_DIRECTORY));
}
#else
#include <sys/stat.h>

static FILE *create_file(const char *path) { return fopen(path, "wb"); }
static int move_file(const char *from, const char *to) { return rename(from, to); }
static void remove_file(const char *path) { remove(path); }

static int is_special_file(const char *path) {
    struct stat st;
    return !stat(path, &st) && !S_ISREG(st.st_mode);
}
#endif

/* ---- Words ---------------------------------------------------------------------------------------------------------------- */

static void put32(unsigned char *p, uint32_t x) {
    for (int i = 0; i < 4; i++) p[i] = (unsigned char)(x >> 8 * i);
}

static void put64(unsigned char *p, uint64_t x) { put32(p, (uint32_t)x), put32(p + 4, (uint32_t)(x >> 32)); }
static uint32_t get32(const unsigned char *p) { return p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24; }
static uint64_t get64(const unsigned char *p) { return get32(p) | (uint64_t)get32(p + 4) << 32; }

/* FNV-1a, word by word instead of byte by byte. */
static const uint64_t empty_hash = 0xcbf29ce484222325u;
static uint64_t add_to_hash(uint64_t hash, uint64_t word) { return (hash ^ word) * 0x100000001b3u; }

static uint64_t add_double(uint64_t hash, double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return add_to_hash(hash, bits);
}

/* ---- What is checked ------------------------------------------------------------------------------------------------------ */

/* The type, the shape and the beginning of four rows of a weight. */
static uint64_t add_weight(uint64_t hash, const g4_backend *op, const g4_tensor *t) {
    unsigned char part[256];
    if (!t->data) return add_to_hash(hash, 0);
    hash = add_to_hash(add_to_hash(add_to_hash(hash, (uint64_t)t->type + 1), (uint64_t)t->rows), (uint64_t)t->cols);
    size_t row = g4_row_bytes(t), n = row < sizeof part ? row : sizeof part;
    for (int64_t i = 0; i < 4 && i < t->rows; i++) {
        const unsigned char *from = (const unsigned char *)t->data + (size_t)(t->rows * i / 4) * row;
        if (op->download(part, from, n)) return 0;
        for (size_t k = 0; k < n; k++) hash = add_to_hash(hash, part[k]);
    }
    return hash;
}

/* Equal for models whose caches may be exchanged: the same layers, with the same weights in the same types. Names of tensors and files are not part of it. */
static uint64_t fingerprint(const g4_model *m) {
    const g4_config *c = &m->config;
    const g4_tensor *const top[] = {&m->embed_tokens, &m->embed_tokens_per_layer, &m->per_layer_model_projection, &m->per_layer_projection_norm};
    const int sizes[] = {c->vocab_size, c->hidden_size, c->num_hidden_layers, c->num_attention_heads, c->hidden_size_per_layer_input, c->sliding_window,
                         c->num_experts, c->top_k_experts, c->moe_intermediate_size};
    uint64_t hash = empty_hash;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) hash = add_to_hash(hash, (uint64_t)sizes[i]);
    hash = add_double(hash, (double)c->rms_norm_eps);
    for (int i = 0; i < 2; i++) {
        const g4_rope_config *r = &c->rope[i];
        hash = add_to_hash(add_double(add_double(add_double(hash, r->theta), r->factor), r->partial_rotary_factor), (uint64_t)r->proportional);
    }
    for (size_t i = 0; i < sizeof top / sizeof *top; i++) hash = add_weight(hash, m->backend, top[i]);
    for (int l = 0; l < c->num_hidden_layers; l++) {
        const g4_layer_config *lc = &c->layers[l];
        hash = add_to_hash(add_to_hash(add_to_hash(hash, (uint64_t)lc->type), (uint64_t)lc->num_key_value_heads), (uint64_t)lc->kv_layer);
        const g4_tensor *t = (const g4_tensor *)&m->layers[l], *end = (const g4_tensor *)&m->layers[l + 1]; /* a g4_layer is nothing but tensors */
        for (; t < end; t++) hash = add_weight(hash, m->backend, t);
    }
    return hash;
}

/* The first position whose K/V the file has of a layer: on sliding layers the first one that token `length` sees. */
static int first_of(const g4_config *c, int layer, int length) {
    int first = c->layers[layer].type == G4_SLIDING_ATTENTION ? length - c->sliding_window + 1 : 0;
    return first > 0 ? first : 0;
}

/* Numbers in K, and as many in V; 0: the layer has none of its own. */
static size_t floats_of(const g4_config *c, int layer, int length) {
    const g4_layer_config *lc = &c->layers[layer];
    return lc->kv_layer == layer ? (size_t)(length - first_of(c, layer, length)) * (size_t)lc->num_key_value_heads * (size_t)lc->head_dim : 0;
}

/* Bytes of a whole file. No overflow: the caches of a state that is open are larger. */
static size_t file_bytes(const g4_config *c, int length) {
    size_t bytes = HEADER + 4 * (size_t)length;
    for (int l = 0; l < c->num_hidden_layers; l++) bytes += 8 * floats_of(c, l, length);
    return bytes;
}

/* ---- Saving --------------------------------------------------------------------------------------------------------------- */

/* n words of 4 bytes, little-endian, into f. */
static int put_words(FILE *f, uint64_t *hash, const void *words, size_t n) {
    unsigned char bytes[4096];
    for (size_t done = 0, some; done < n; done += some) {
        some = n - done < sizeof bytes / 4 ? n - done : sizeof bytes / 4;
        for (size_t i = 0; i < some; i++) {
            uint32_t word;
            memcpy(&word, (const char *)words + 4 * (done + i), 4);
            put32(bytes + 4 * i, word);
            *hash = add_to_hash(*hash, word);
        }
        if (fwrite(bytes, 4, some, f) != some) return -1;
    }
    return 0;
}

static int write_sequence(FILE *f, g4_state *s, int seq, const int32_t *ids, int length, const char *path, g4_error *err) {
    const g4_model *m = g4_state_get_model(s);
    const g4_config *c = &m->config;
    unsigned char header[HEADER] = {0};
    uint64_t hash = empty_hash;
    int failed = fwrite(header, 1, HEADER, f) != HEADER || put_words(f, &hash, ids, (size_t)length);
    for (int l = 0; l < c->num_hidden_layers && !failed; l++) {
        size_t floats = floats_of(c, l, length);
        int first = first_of(c, l, length);
        if (!floats) continue;
        float *k = malloc(2 * floats * sizeof *k);
        if (!k) return g4_fail(err, "%s: out of memory for the K/V of layer %d", path, l);
        if (g4_state_rows(s, 0, l, seq, first, length - first, k, k + floats)) {
            free(k);
            return g4_fail(err, "%s: copying the K/V of layer %d failed", m->backend->name, l);
        }
        failed = put_words(f, &hash, k, 2 * floats);
        free(k);
    }
    memcpy(header, magic, 8);
    put32(header + 8, VERSION), put32(header + 12, (uint32_t)g4_state_get_options(s)->precision), put64(header + 16, fingerprint(m));
    put32(header + 24, (uint32_t)length), put64(header + 28, hash);
    if (!failed) failed = fseek(f, 0, SEEK_SET) || fwrite(header, 1, HEADER, f) != HEADER || fflush(f);
    return failed ? g4_fail(err, "cannot write %s: %s", path, strerror(errno)) : 0;
}

int g4_sequence_save(g4_state *s, int seq, int length, const int32_t *ids, const char *path, g4_error *err) {
    if (g4_state_check(s, seq, length, err)) return -1;
    if (!length) return g4_fail(err, "no tokens of sequence %d were to be saved in %s; expected 1 to %d", seq, path, g4_length(s, seq));
    char *part = malloc(strlen(path) + sizeof ".part");
    if (!part) return g4_fail(err, "out of memory");
    /* A file that is there is replaced when the new one is whole; a device is written to, or renaming would replace it. */
    int device = is_special_file(path);
    sprintf(part, device ? "%s" : "%s.part", path);
    FILE *f = create_file(part);
    int failed = f ? write_sequence(f, s, seq, ids, length, part, err) : g4_fail(err, "cannot create %s: %s", part, strerror(errno));
    if (f && fclose(f) && !failed) failed = g4_fail(err, "cannot write %s: %s", part, strerror(errno));
    if (!failed && !device && move_file(part, path)) failed = g4_fail(err, "cannot rename %s to %s: %s", part, path, strerror(errno));
    if (f && failed && !device) remove_file(part);
    free(part);
    return failed;
}

/* ---- Loading -------------------------------------------------------------------------------------------------------------- */

/* Everything that can be wrong with the file, before anything is changed. */
static int check_file(const g4_state *s, const g4_file *f, const char *path, g4_error *err) {
    const g4_model *m = g4_state_get_model(s);
    const g4_config *c = &m->config;
    const g4_state_options *o = g4_state_get_options(s);
    const unsigned char *p = f->data;
    if (f->size < HEADER || memcmp(p, magic, 8)) return g4_fail(err, "%s: not a saved sequence: expected it to begin with \"%s\"", path, magic);
    if (get32(p + 8) != VERSION)
        return g4_fail(err, "%s: version %lu of the format; this program reads version %d: save it anew", path, (unsigned long)get32(p + 8), VERSION);
    if (get32(p + 12) != (uint32_t)o->precision)
        return g4_fail(err, "%s: saved with precision %lu (0 f32, 1 bf16, 2 q16), but this state computes with %d", path, (unsigned long)get32(p + 12), (int)o->precision);
    if (get64(p + 16) != fingerprint(m))
        return g4_fail(err, "%s: saved by another model: its fingerprint is %016llx, this one's %016llx", path, (unsigned long long)get64(p + 16),
                       (unsigned long long)fingerprint(m));
    uint32_t length = get32(p + 24);
    if (length < 1 || length > (uint32_t)o->ctx)
        return g4_fail(err, "%s: holds %lu tokens; expected 1 to %d, the state's ctx", path, (unsigned long)length, o->ctx);
    if (f->size != file_bytes(c, (int)length))
        return g4_fail(err, "%s: %zu bytes; expected %zu for %lu tokens: it was cut off, or something was added", path, f->size,
                       file_bytes(c, (int)length), (unsigned long)length);
    uint64_t hash = empty_hash;
    for (size_t at = HEADER; at < f->size; at += 4) hash = add_to_hash(hash, get32(p + at));
    if (hash != get64(p + 28)) return g4_fail(err, "%s: damaged: the hash of its content is not the one in its header", path);
    for (uint32_t i = 0; i < length; i++)
        if (get32(p + HEADER + 4 * i) >= (uint32_t)c->vocab_size)
            return g4_fail(err, "%s: id %lu at position %lu is outside the vocabulary of %d", path, (unsigned long)get32(p + HEADER + 4 * i),
                           (unsigned long)i, c->vocab_size);
    return 0;
}

static void get_words(void *words, const unsigned char *p, size_t n) {
    for (size_t i = 0; i < n; i++) {
        uint32_t word = get32(p + 4 * i);
        memcpy((char *)words + 4 * i, &word, 4);
    }
}

/* A file that was checked. */
static int read_sequence(g4_state *s, int seq, const g4_file *f, int32_t *ids, const char *path, g4_error *err) {
    const g4_model *m = g4_state_get_model(s);
    const g4_config *c = &m->config;
    const unsigned char *p = f->data + HEADER;
    int length = (int)get32(f->data + 24), oldest = 0;
    size_t most = 0;
    for (int l = 0; l < c->num_hidden_layers; l++) {
        size_t floats = floats_of(c, l, length);
        if (floats > most) most = floats;
    }
    float *k = malloc(2 * most * sizeof *k + 1);
    if (!k) return g4_fail(err, "%s: out of memory for %zu numbers", path, 2 * most);
    get_words(ids, p, (size_t)length);
    p += 4 * (size_t)length;
    int failed = g4_truncate(s, seq, 0, err);
    for (int l = 0; l < c->num_hidden_layers && !failed; l++) {
        size_t floats = floats_of(c, l, length);
        int first = first_of(c, l, length);
        if (c->layers[l].kv_layer == l && first > oldest) oldest = first;
        if (!floats) continue;
        get_words(k, p, 2 * floats);
        p += 8 * floats;
        if (g4_state_rows(s, 1, l, seq, first, length - first, k, k + floats)) failed = g4_fail(err, "%s: copying the K/V of layer %d failed", m->backend->name, l);
    }
    free(k);
    if (!failed) g4_state_set(s, seq, length, oldest);
    return failed;
}

int g4_sequence_load(g4_state *s, int seq, const char *path, int32_t **ids, size_t *n_ids, g4_error *err) {
    g4_file f;
    if (g4_length(s, seq) < 0) return g4_fail(err, "sequence %d is not in 0..%d", seq, g4_state_get_options(s)->n_seqs - 1);
    if (g4_file_open(&f, path, 0, err)) return -1;
    int failed = check_file(s, &f, path, err);
    size_t n = failed ? 0 : get32(f.data + 24);
    int32_t *list = failed ? NULL : malloc(n * sizeof *list);
    if (!failed && !list) failed = g4_fail(err, "out of memory for %zu ids", n);
    if (!failed) failed = read_sequence(s, seq, &f, list, path, err);
    g4_file_close(&f);
    if (failed) {
        free(list);
        return -1;
    }
    *ids = list, *n_ids = n;
    return 0;
}
