/* gguf.c - from a GGUF file to a g4_model: llama.cpp's format, which holds config, tokenizer and weights in one file.
 *
 * Nothing here computes, and no tensor is touched but the few numbers of rope_freqs: weights stay where the system mapped them. It is not a
 * writer, and no reader of other architectures. As in checkpoint.c every byte is hostile: a header is taken whole or refused by
 * one line that names the fault. What a file leaves out gets llama.cpp's default; what llama.cpp would not load is refused, with a
 * few exceptions that cost nothing (a key's integer type; tensors of other modalities).
 *
 * Reading order: g4_gguf_bind at the end shows the steps. Then, from the top:
 *     1. messages      2. the container: keys, tensors, the parts of a split file      3. the values of keys
 *     4. config        5. weights
 */
#include "gemma4.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- 1. Messages -------------------------------------------------------------------------------------------------------- */

/* A text from the file in a message: one short line. */
typedef struct shown {
    char text[160];
} shown;

static shown show(const char *s, size_t n) {
    shown out;
    size_t max = 100, m = n < max ? n : max;
    for (size_t i = 0; i < m; i++) out.text[i] = (unsigned char)s[i] < 0x20 || s[i] == 0x7f ? '?' : s[i];
    if (n > max) {
        while (m > 0 && ((unsigned char)s[m] & 0xc0) == 0x80) m--; /* not inside a character */
        memcpy(out.text + m, "...", 3);
        m += 3;
    }
    out.text[m] = 0;
    return out;
}

/* ---- 2. The container --------------------------------------------------------------------------------------------------- */

enum { VALUE_U8, VALUE_I8, VALUE_U16, VALUE_I16, VALUE_U32, VALUE_I32, VALUE_F32, VALUE_BOOL, VALUE_STRING, VALUE_ARRAY, VALUE_U64, VALUE_I64, VALUE_F64, N_VALUES };

static const struct {
    const char *name;
    int bytes;
} values[N_VALUES] = {{"u8", 1},   {"i8", 1},     {"u16", 2}, {"i16", 2}, {"u32", 4}, {"i32", 4}, {"f32", 4},
                      {"bool", 1}, {"string", 0}, {"array", 0}, {"u64", 8}, {"i64", 8}, {"f64", 8}};

/* Every type of a tensor that ggml knows, by its number: to measure tensors that are not read, and to name a type that g4_types lacks. */
static const struct {
    const char *name; /* NULL: withdrawn */
    int block, bytes;
} ggml_types[] = {
    [0] = {"F32", 1, 4},         [1] = {"F16", 1, 2},        [2] = {"Q4_0", 32, 18},      [3] = {"Q4_1", 32, 20},     [6] = {"Q5_0", 32, 22},
    [7] = {"Q5_1", 32, 24},      [8] = {"Q8_0", 32, 34},     [9] = {"Q8_1", 32, 36},      [10] = {"Q2_K", 256, 84},   [11] = {"Q3_K", 256, 110},
    [12] = {"Q4_K", 256, 144},   [13] = {"Q5_K", 256, 176},  [14] = {"Q6_K", 256, 210},   [15] = {"Q8_K", 256, 292},  [16] = {"IQ2_XXS", 256, 66},
    [17] = {"IQ2_XS", 256, 74},  [18] = {"IQ3_XXS", 256, 98}, [19] = {"IQ1_S", 256, 50},  [20] = {"IQ4_NL", 32, 18},  [21] = {"IQ3_S", 256, 110},
    [22] = {"IQ2_S", 256, 82},   [23] = {"IQ4_XS", 256, 136}, [24] = {"I8", 1, 1},        [25] = {"I16", 1, 2},       [26] = {"I32", 1, 4},
    [27] = {"I64", 1, 8},        [28] = {"F64", 1, 8},       [29] = {"IQ1_M", 256, 56},   [30] = {"BF16", 1, 2},      [34] = {"TQ1_0", 256, 54},
    [35] = {"TQ2_0", 256, 66},   [39] = {"MXFP4", 32, 17},   [40] = {"NVFP4", 64, 36},    [41] = {"Q1_0", 128, 18},   [42] = {"Q2_0", 64, 18},
};

enum {
    N_GGML_TYPES = sizeof ggml_types / sizeof ggml_types[0],
    NAME_MAX_BYTES = 64,  /* of a tensor's name, its NUL included */
    COUNT_MAX = 1 << 20,  /* keys, and tensors, of a file: honest ones have 60 and 1000 */
    ALIGNMENT = 32        /* unless general.alignment says otherwise */
};

enum { UNREAD, READ, DEAD }; /* DEAD: belongs to the model, but nothing reads it */

typedef struct tensor {
    char name[NAME_MAX_BYTES];
    int type, rank;              /* ggml's number; 1 .. 4 */
    uint64_t ne[4];              /* ne[0] is the contiguous one: the reverse of a shape here; 1 from rank on */
    uint64_t offset, bytes;      /* from the beginning of the part's data */
    const unsigned char *data;
    int part, use;
} tensor;

/* One file: the only one, or one of a split model. */
typedef struct part {
    char *path;
    const unsigned char *data; /* [size] */
    size_t size;
    g4_file file;      /* where the data is; zero if it is the caller's */
    g4_gguf_key *keys; /* [n_keys] */
    uint32_t n_keys;
} part;

struct g4_gguf {
    part *parts;      /* [n_parts]; the keys that count are the first one's */
    int n_parts;
    tensor *tensors;  /* [n] of all parts, in the order of the files */
    uint32_t n;
    uint32_t *order;  /* [n] the tensors by name */
    const char **ignored; /* [n_ignored] names of those that are not READ */
    int n_ignored;
};

static uint32_t load32(const unsigned char *p) { return p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24; }
static uint64_t load64(const unsigned char *p) { return load32(p) | (uint64_t)load32(p + 4) << 32; }

/* Where the reader stands, and in what: "tensor 7 (blk.0.attn_q.weight)". */
typedef struct cursor {
    const unsigned char *begin, *p, *end;
    const char *what;      /* "key", "tensor"; NULL: the counts at the beginning */
    uint32_t index;
    const char *name;      /* [name_size]; NULL: not read yet */
    size_t name_size;
    const char *path;
    g4_error *err;
} cursor;

static shown place(const cursor *c) {
    shown out;
    if (!c->what) snprintf(out.text, sizeof out.text, "the header");
    else if (!c->name) snprintf(out.text, sizeof out.text, "%s %u", c->what, (unsigned)c->index);
    else snprintf(out.text, sizeof out.text, "%.8s %u (%.110s)", c->what, (unsigned)c->index, show(c->name, c->name_size).text);
    return out;
}

static int cut_short(const cursor *c, uint64_t wanted, const char *thing) {
    return g4_fail(c->err, "%s: ends inside %s: %llu %s are announced, but only %llu bytes follow (incomplete download?)", c->path, place(c).text,
                   (unsigned long long)wanted, thing, (unsigned long long)(c->end - c->p));
}

/* The next n bytes; NULL: they are not there. */
static const unsigned char *take(cursor *c, int n) {
    if (c->end - c->p < n) return cut_short(c, (uint64_t)n, "bytes"), NULL;
    c->p += n;
    return c->p - n;
}

static int take32(cursor *c, uint32_t *x) {
    const unsigned char *p = take(c, 4);
    *x = p ? load32(p) : 0;
    return p ? 0 : -1;
}

static int take64(cursor *c, uint64_t *x) {
    const unsigned char *p = take(c, 8);
    *x = p ? load64(p) : 0;
    return p ? 0 : -1;
}

static int take_string(cursor *c, const char **s, size_t *size) {
    uint64_t n;
    if (take64(c, &n)) return -1;
    if (n > (uint64_t)(c->end - c->p)) return cut_short(c, n, "bytes of text");
    *s = (const char *)c->p;
    *size = (size_t)n;
    c->p += n;
    return 0;
}

static int read_key(cursor *c, g4_gguf_key *k) {
    uint32_t type;
    *k = (g4_gguf_key){.n = 1};
    if (take_string(c, &k->name, &k->name_size)) return -1;
    if (!k->name_size) return g4_fail(c->err, "%s: %s has an empty name", c->path, place(c).text);
    c->name = k->name;
    c->name_size = k->name_size;
    if (take32(c, &type)) return -1;
    if (type == VALUE_ARRAY) {
        k->is_array = 1;
        if (take32(c, &type) || take64(c, &k->n)) return -1;
        if (type == VALUE_ARRAY) return g4_fail(c->err, "%s: %s is an array of arrays, which no GGUF of a model holds", c->path, place(c).text);
    }
    if (type >= N_VALUES)
        return g4_fail(c->err, "%s: %s has a value of type %u; expected 0 to %d", c->path, place(c).text, (unsigned)type, N_VALUES - 1);
    k->type = (int)type;
    k->data = c->p;
    if (type != VALUE_STRING) {
        if (k->n > (uint64_t)(c->end - c->p) / (unsigned)values[type].bytes) return cut_short(c, k->n, values[type].name);
        c->p += k->n * (unsigned)values[type].bytes;
        return 0;
    }
    if (k->n > (uint64_t)(c->end - c->p) / 8) return cut_short(c, k->n, "strings");
    for (uint64_t i = 0; i < k->n; i++) { /* nearly all of the time that opening a file takes: 777048 strings in a real one */
        uint64_t size = c->end - c->p < 8 ? UINT64_MAX : load64(c->p);
        if (c->end - c->p < 8) return cut_short(c, 8, "bytes");
        c->p += 8;
        if (size > (uint64_t)(c->end - c->p)) return cut_short(c, size, "bytes of text");
        c->p += size;
    }
    return 0;
}

/* A tensor's description; its place in the data is checked later. */
static int read_tensor(cursor *c, tensor *t) {
    const char *name = NULL;
    size_t size = 0;
    uint32_t rank, type;
    uint64_t elements = 1;
    *t = (tensor){.ne = {1, 1, 1, 1}};
    if (take_string(c, &name, &size)) return -1;
    if (size == 0 || size >= NAME_MAX_BYTES || memchr(name, 0, size))
        return g4_fail(c->err, "%s: %s: expected a name of 1 to %d bytes without NUL, found %llu bytes: %s", c->path, place(c).text,
                       NAME_MAX_BYTES - 1, (unsigned long long)size, show(name, size).text);
    memcpy(t->name, name, size);
    c->name = name;
    c->name_size = size;
    if (take32(c, &rank)) return -1;
    if (rank < 1 || rank > 4) return g4_fail(c->err, "%s: %s has %u dimensions; expected 1 to 4", c->path, place(c).text, (unsigned)rank);
    t->rank = (int)rank;
    for (uint32_t i = 0; i < rank; i++) {
        if (take64(c, &t->ne[i])) return -1;
        if (t->ne[i] == 0 || t->ne[i] > INT64_MAX / elements)
            return g4_fail(c->err, "%s: %s: dimension %u is %llu; expected 1 or more, and no product above 2^63", c->path, place(c).text, (unsigned)i,
                           (unsigned long long)t->ne[i]);
        elements *= t->ne[i];
    }
    if (take32(c, &type) || take64(c, &t->offset)) return -1;
    if (type >= N_GGML_TYPES || !ggml_types[type].name)
        return g4_fail(c->err, "%s: %s has the type %u, which ggml does not define (a newer file than this program?)", c->path, place(c).text,
                       (unsigned)type);
    t->type = (int)type;
    uint64_t block = (uint64_t)ggml_types[type].block, bytes = (uint64_t)ggml_types[type].bytes;
    if (t->ne[0] % block)
        return g4_fail(c->err, "%s: %s: rows of %llu elements, but %s comes in blocks of %d", c->path, place(c).text, (unsigned long long)t->ne[0],
                       ggml_types[type].name, ggml_types[type].block);
    if (elements / block > INT64_MAX / bytes)
        return g4_fail(c->err, "%s: %s: %llu elements of %s take more than 2^63 bytes", c->path, place(c).text, (unsigned long long)elements,
                       ggml_types[type].name);
    t->bytes = elements / block * bytes;
    return 0;
}

static int compare_keys(const void *context, uint32_t a, uint32_t b) {
    const g4_gguf_key *x = (const g4_gguf_key *)context + a, *y = (const g4_gguf_key *)context + b;
    if (x->name_size != y->name_size) return x->name_size < y->name_size ? -1 : 1;
    return memcmp(x->name, y->name, x->name_size);
}

static int compare_tensors(const void *context, uint32_t a, uint32_t b) {
    const tensor *t = context;
    return strcmp(t[a].name, t[b].name);
}

static const g4_gguf_key *find_key(const part *f, const char *name) {
    size_t n = strlen(name);
    for (uint32_t i = 0; i < f->n_keys; i++)
        if (f->keys[i].name_size == n && !memcmp(f->keys[i].name, name, n)) return &f->keys[i];
    return NULL;
}

const g4_gguf_key *g4_gguf_find(const g4_gguf *g, const char *name) { return find_key(&g->parts[0], name); }

/* What stands at a key, for a message. */
static shown show_value(const g4_gguf_key *k) {
    shown out;
    int64_t i = 0;
    double x = 0;
    const unsigned char *p = k->data;
    size_t n;
    if (k->is_array) {
        snprintf(out.text, sizeof out.text, "an array of %llu %s", (unsigned long long)k->n, values[k->type].name);
    } else if (k->type == VALUE_STRING) {
        const char *s = g4_gguf_string(&p, &n);
        snprintf(out.text, sizeof out.text, "\"%.130s\"", show(s, n).text);
    } else if (k->type == VALUE_BOOL) {
        snprintf(out.text, sizeof out.text, *p ? "true" : "false");
    } else if (!g4_gguf_int(k, 0, &i)) {
        snprintf(out.text, sizeof out.text, "%lld", (long long)i);
    } else if (!g4_gguf_double(k, 0, &x)) {
        snprintf(out.text, sizeof out.text, "%g", x);
    } else {
        snprintf(out.text, sizeof out.text, "a number above 2^63");
    }
    return out;
}

static int wrong(const part *f, const char *name, const char *expected, g4_error *err) {
    const g4_gguf_key *k = find_key(f, name);
    if (!k) return g4_fail(err, "%s: %s: is missing; expected %s", f->path, name, expected);
    return g4_fail(err, "%s: %s: expected %s, found %s", f->path, name, expected, show_value(k).text);
}

/* An integer of a part's own header; *value is left as it is where the key is absent. */
static int part_int(const part *f, const char *name, int64_t lowest, int64_t highest, int64_t *value, g4_error *err) {
    const g4_gguf_key *k = find_key(f, name);
    int64_t x;
    char expected[64];
    if (!k) return 0;
    if (k->is_array || g4_gguf_int(k, 0, &x) || x < lowest || x > highest) {
        snprintf(expected, sizeof expected, "an integer from %lld to %lld", (long long)lowest, (long long)highest);
        return wrong(f, name, expected, err);
    }
    *value = x;
    return 0;
}

/* Counts and keys. On success c stands before the tensors. */
static int read_keys(cursor *c, part *f, uint64_t *n_tensors) {
    uint32_t version;
    uint64_t n_keys;
    if (c->end - c->p < 4 || memcmp(c->p, "GGUF", 4))
        return g4_fail(c->err, "%s: is no GGUF file: expected it to begin with \"GGUF\", found \"%s\"", c->path,
                       show((const char *)c->p, c->end - c->p < 4 ? (size_t)(c->end - c->p) : 4).text);
    c->p += 4;
    if (take32(c, &version)) return -1;
    if (version && !(version & 0xffff))
        return g4_fail(c->err, "%s: a big-endian GGUF file; expected a little-endian one (convert it with gguf_convert_endian.py of llama.cpp)", c->path);
    if (version < 2 || version > 3) return g4_fail(c->err, "%s: GGUF version %u; expected 2 or 3", c->path, (unsigned)version);
    if (take64(c, n_tensors) || take64(c, &n_keys)) return -1;
    uint64_t room = (uint64_t)(c->end - c->p);
    if (n_keys > COUNT_MAX || n_keys > room / 13 || *n_tensors > COUNT_MAX || *n_tensors > room / 33) /* the shortest that either can be */
        return g4_fail(c->err, "%s: the header announces %llu keys and %llu tensors; %llu bytes follow, and at most %d of each are read", c->path,
                       (unsigned long long)n_keys, (unsigned long long)*n_tensors, (unsigned long long)room, COUNT_MAX);
    f->keys = calloc((size_t)n_keys + 1, sizeof *f->keys);
    uint32_t *order = malloc(((size_t)n_keys + 1) * sizeof *order);
    int failed = !f->keys || !order ? g4_fail(c->err, "%s: no memory for %llu keys", c->path, (unsigned long long)n_keys) : 0;
    c->what = "key";
    for (c->index = 0; !failed && c->index < n_keys; c->index++) {
        c->name = NULL;
        failed = read_key(c, &f->keys[c->index]);
        order[c->index] = c->index;
    }
    if (!failed) {
        f->n_keys = (uint32_t)n_keys;
        g4_sort(order, f->n_keys, compare_keys, f->keys);
        for (uint32_t i = 1; i < n_keys && !failed; i++) {
            const g4_gguf_key *k = &f->keys[order[i]];
            if (!compare_keys(f->keys, order[i - 1], order[i])) failed = g4_fail(c->err, "%s: the key %s is there twice", c->path, show(k->name, k->name_size).text);
        }
    }
    free(order);
    return failed;
}

/* The n tensors that one file describes, and where they lie. llama.cpp's rule: each begins where the one before it ended, rounded up to the
 * alignment; the last need not be padded. */
static int read_tensors(cursor *c, const part *f, tensor *tensors, uint64_t n) {
    int64_t alignment = ALIGNMENT;
    uint64_t at = 0;
    if (part_int(f, "general.alignment", 1, (int64_t)1 << 31, &alignment, c->err)) return -1;
    if (alignment & (alignment - 1)) return wrong(f, "general.alignment", "a power of two", c->err);
    const uint64_t mask = (uint64_t)alignment - 1;
    c->what = "tensor";
    for (c->index = 0; c->index < n; c->index++) {
        tensor *t = &tensors[c->index];
        c->name = NULL;
        if (read_tensor(c, t)) return -1;
        if (t->offset != at)
            return g4_fail(c->err, "%s: %s begins at offset %llu of the data; expected %llu, the end of the one before it rounded up to a multiple of %lld: %s",
                           c->path, place(c).text, (unsigned long long)t->offset, (unsigned long long)at, (long long)alignment,
                           t->offset & mask ? "it is not aligned" : t->offset < at ? "they overlap" : "there is a gap");
        if (t->bytes > (uint64_t)INT64_MAX - mask - at) return g4_fail(c->err, "%s: %s ends beyond 2^63 bytes", c->path, place(c).text);
        at += (t->bytes + mask) & ~mask;
    }
    uint64_t size = f->size, begin = ((uint64_t)(c->p - c->begin) + mask) & ~mask;
    for (uint64_t i = 0; i < n; i++) {
        tensor *t = &tensors[i];
        if (begin > size || t->offset > size - begin || t->bytes > size - begin - t->offset)
            return g4_fail(c->err, "%s: tensor %s ends at byte %llu, but the file has %llu (incomplete download?)", c->path, t->name,
                           (unsigned long long)(begin + t->offset + t->bytes), (unsigned long long)size);
        t->data = f->data + begin + t->offset;
    }
    return 0;
}

/* One more part of the model: data [size], or with data NULL the file. */
static int add_part(g4_gguf *g, const char *path, const unsigned char *data, size_t size, int keys_only, const g4_options *options, g4_error *err) {
    uint64_t n = 0;
    part *f = &g->parts[g->n_parts++];
    f->path = malloc(strlen(path) + 1);
    if (!f->path) return g4_fail(err, "%s: out of memory", path);
    strcpy(f->path, path);
    if (!data && g4_file_load(&f->file, path, options, err)) return -1;
    f->data = data ? data : f->file.data;
    f->size = data ? size : f->file.size;
    cursor c = {.begin = f->data, .p = f->data, .end = f->data + f->size, .path = path, .err = err};
    if (read_keys(&c, f, &n)) return -1;
    if (keys_only) return 0;
    if (g->n + n > COUNT_MAX) return g4_fail(err, "%s: with the parts before it more than %d tensors", path, COUNT_MAX);
    tensor *tensors = realloc(g->tensors, ((size_t)g->n + (size_t)n + 1) * sizeof *tensors);
    if (!tensors) return g4_fail(err, "%s: no memory for %llu tensors", path, (unsigned long long)n);
    g->tensors = tensors;
    if (read_tensors(&c, f, tensors + g->n, n)) return -1;
    for (uint32_t i = g->n; i < g->n + n; i++) tensors[i].part = g->n_parts - 1;
    g->n += (uint32_t)n;
    return 0;
}

/* The other parts of a split file, NAME-00001-of-00003.gguf and so on, beside the first. */
static int add_other_parts(g4_gguf *g, const char *path, int count, const g4_options *options, g4_error *err) {
    char tail[32];
    size_t n = strlen(path), m = (size_t)snprintf(tail, sizeof tail, "-00001-of-%05d.gguf", count);
    if (n < m || strcmp(path + n - m, tail))
        return g4_fail(err, "%s: is the first of %d parts (split.count); expected its name to end in %s, and the others beside it", path, count, tail);
    part *parts = realloc(g->parts, (size_t)count * sizeof *parts);
    char *name = malloc(n + 8);
    int64_t total = -1, no, parts_of;
    int failed = !parts || !name ? g4_fail(err, "%s: out of memory", path) : 0;
    if (parts) {
        g->parts = parts;
        memset(parts + 1, 0, ((size_t)count - 1) * sizeof *parts);
    }
    for (int i = 1; i < count && !failed; i++) {
        snprintf(tail, sizeof tail, "-%05d-of-%05d.gguf", i + 1, count);
        memcpy(name, path, n - m);
        strcpy(name + n - m, tail);
        failed = add_part(g, name, NULL, 0, 0, options, err);
        const part *f = &g->parts[i];
        no = -1, parts_of = count;
        if (!failed) failed = part_int(f, "split.no", 0, 65535, &no, err) || part_int(f, "split.count", 0, 65535, &parts_of, err) ? -1 : 0;
        if (!failed && (no != i || parts_of != count))
            failed = g4_fail(err, "%s: split.no %lld, split.count %lld; expected %d and %d, as its name and the first part have it", f->path, (long long)no,
                             (long long)parts_of, i, count);
    }
    free(name);
    if (!failed) failed = part_int(&g->parts[0], "split.tensors.count", 0, INT_MAX, &total, err);
    if (!failed && total >= 0 && total != g->n)
        failed = g4_fail(err, "%s: split.tensors.count is %lld, but the %d parts hold %u tensors", path, (long long)total, count, (unsigned)g->n);
    return failed;
}

static g4_gguf *open_all(const char *path, const unsigned char *data, size_t size, int keys_only, const g4_options *options, g4_error *err) {
    g4_gguf *g = calloc(1, sizeof *g);
    int64_t no = 0, count = 1;
    if (g) g->parts = calloc(1, sizeof *g->parts);
    int failed = !g || !g->parts ? g4_fail(err, "%s: out of memory", path) : add_part(g, path, data, size, keys_only, options, err);
    if (!failed) failed = part_int(&g->parts[0], "split.no", 0, 65535, &no, err) || part_int(&g->parts[0], "split.count", 0, 65535, &count, err) ? -1 : 0;
    if (!failed && no > 0)
        failed = g4_fail(err, "%s: is part %lld of the %lld that a model was split into; give the first, whose name ends in -00001-of-%05lld.gguf", path,
                         (long long)no + 1, (long long)count, (long long)count);
    if (!failed && count > 1 && !keys_only && data) failed = g4_fail(err, "%s: is the first of %lld parts (split.count); expected a whole model", path, (long long)count);
    if (!failed && count > 1 && !keys_only) failed = add_other_parts(g, path, (int)count, options, err);
    if (!failed) {
        g->order = malloc(((size_t)g->n + 1) * sizeof *g->order);
        g->ignored = malloc(((size_t)g->n + 1) * sizeof *g->ignored);
        if (!g->order || !g->ignored) failed = g4_fail(err, "%s: no memory for %u tensors", path, (unsigned)g->n);
    }
    if (!failed) {
        for (uint32_t i = 0; i < g->n; i++) g->order[i] = i;
        g4_sort(g->order, g->n, compare_tensors, g->tensors);
        for (uint32_t i = 1; i < g->n && !failed; i++)
            if (!compare_tensors(g->tensors, g->order[i - 1], g->order[i]))
                failed = g4_fail(err, "%s: the tensor %s is there twice", path, show(g->tensors[g->order[i]].name, strlen(g->tensors[g->order[i]].name)).text);
    }
    if (!failed) return g;
    g4_gguf_close(g);
    return NULL;
}

g4_gguf *g4_gguf_open(const char *path, int keys_only, const g4_options *options, g4_error *err) { return open_all(path, NULL, 0, keys_only, options, err); }

g4_gguf *g4_gguf_parse(const unsigned char *data, size_t size, const char *what, int keys_only, g4_error *err) {
    return open_all(what, data, size, keys_only, NULL, err);
}

void g4_gguf_close(g4_gguf *g) {
    if (!g) return;
    for (int i = 0; i < g->n_parts; i++) {
        g4_file_close(&g->parts[i].file);
        free(g->parts[i].path);
        free(g->parts[i].keys);
    }
    free(g->parts);
    free(g->tensors);
    free(g->order);
    free(g->ignored);
    free(g);
}

size_t g4_gguf_bytes(const g4_gguf *g) {
    size_t bytes = 0;
    for (int i = 0; i < g->n_parts; i++) bytes += g->parts[i].size;
    return bytes;
}

const char *g4_gguf_ignored(const g4_gguf *g, int i) { return i >= 0 && i < g->n_ignored ? g->ignored[i] : NULL; }

/* ---- 3. The values of keys ---------------------------------------------------------------------------------------------- */

const char *g4_gguf_string(const unsigned char **p, size_t *n) {
    const char *s = (const char *)*p + 8;
    *n = (size_t)load64(*p);
    *p += 8 + *n;
    return s;
}

int g4_gguf_int(const g4_gguf_key *k, uint64_t i, int64_t *x) {
    if (i >= k->n || k->type == VALUE_STRING || k->type == VALUE_F32 || k->type == VALUE_F64) return -1;
    const unsigned char *p = k->data + i * (unsigned)values[k->type].bytes;
    switch (k->type) {
    case VALUE_U8: *x = p[0]; return 0;
    case VALUE_I8: *x = (int8_t)p[0]; return 0;
    case VALUE_U16: *x = p[0] | p[1] << 8; return 0;
    case VALUE_I16: *x = (int16_t)(p[0] | p[1] << 8); return 0;
    case VALUE_U32: *x = load32(p); return 0;
    case VALUE_I32: *x = (int32_t)load32(p); return 0;
    case VALUE_BOOL: *x = p[0] != 0; return 0;
    default: *x = (int64_t)load64(p); return k->type == VALUE_U64 && *x < 0 ? -1 : 0;
    }
}

int g4_gguf_double(const g4_gguf_key *k, uint64_t i, double *x) {
    int64_t whole;
    if (i < k->n && k->type == VALUE_F32) {
        uint32_t bits = load32(k->data + 4 * i);
        float f;
        memcpy(&f, &bits, sizeof f);
        *x = f;
        return 0;
    }
    if (i < k->n && k->type == VALUE_F64) {
        uint64_t bits = load64(k->data + 8 * i);
        memcpy(x, &bits, sizeof bits);
        return 0;
    }
    if (k->type == VALUE_BOOL || g4_gguf_int(k, i, &whole)) return -1;
    *x = (double)whole;
    return 0;
}

int g4_gguf_text(const char *path, const char *key, char **text, size_t *n, g4_error *err) {
    g4_gguf *g = g4_gguf_open(path, 1, 0, err);
    const g4_gguf_key *k = g ? g4_gguf_find(g, key) : NULL;
    int failed = g ? 0 : -1;
    *text = NULL;
    *n = 0;
    if (k && (k->is_array || k->type != VALUE_STRING)) {
        failed = wrong(&g->parts[0], key, "a string", err);
    } else if (k) {
        const unsigned char *p = k->data;
        const char *s = g4_gguf_string(&p, n);
        *text = malloc(*n + 1);
        if (!*text) failed = g4_fail(err, "%s: %s: no memory for %llu bytes", path, key, (unsigned long long)*n);
        if (*text) memcpy(*text, s, *n), (*text)[*n] = 0;
    }
    g4_gguf_close(g);
    return failed;
}

/* ---- 4. Config ---------------------------------------------------------------------------------------------------------- */

enum { LAYERS_MAX = 4096, HEADS_MAX = 4096, HEAD_DIM_MAX = 1 << 16, WIDTH_MAX = 1 << 24 };

/* What reading a model needs and finds. */
typedef struct reader {
    g4_gguf *g;
    g4_model *m;
    const g4_options *options;
    g4_error *err;
    int key_length[2];  /* by g4_layer_type */
    /* weights: after the first fault that ends it, every call does nothing */
    int layer;          /* -1: a tensor of no layer */
    int failed, n_missing;
    char missing[NAME_MAX_BYTES];
} reader;

static int is_text(const g4_gguf_key *k, const char *text) {
    return k && !k->is_array && k->type == VALUE_STRING && load64(k->data) == strlen(text) && !memcmp(k->data + 8, text, strlen(text));
}

/* The readers below leave *value as it is, the default, when the key is absent and need not be there. */

static int read_int(const reader *r, const char *key, int required, int lowest, int highest, int *value) {
    int64_t x = *value;
    if (required && !g4_gguf_find(r->g, key)) return wrong(&r->g->parts[0], key, "an integer", r->err);
    if (part_int(&r->g->parts[0], key, lowest, highest, &x, r->err)) return -1;
    *value = (int)x;
    return 0;
}

/* lowest <= value <= highest; `expected` says so in words. */
static int read_double(const reader *r, const char *key, double lowest, double highest, const char *expected, double *value) {
    const g4_gguf_key *k = g4_gguf_find(r->g, key);
    double x;
    if (!k) return 0;
    if (k->is_array || g4_gguf_double(k, 0, &x) || !(x >= lowest && x <= highest)) return wrong(&r->g->parts[0], key, expected, r->err);
    *value = x;
    return 0;
}

static int read_float(const reader *r, const char *key, double lowest, double highest, const char *expected, float *value) {
    double x = *value;
    if (read_double(r, key, lowest, highest, expected, &x)) return -1;
    *value = (float)x;
    return 0;
}

/* One number for all layers, or an array of one for each: value [L]. *present may be NULL: then the key must be there. */
static int read_per_layer(const reader *r, const char *key, int lowest, int highest, int *value, int *present) {
    int L = r->m->config.num_hidden_layers;
    const g4_gguf_key *k = g4_gguf_find(r->g, key);
    char expected[96];
    snprintf(expected, sizeof expected, "an integer from %d to %d, or an array of %d such, block_count", lowest, highest, L);
    if (present) *present = k != NULL;
    if (!k && present) return 0;
    if (!k || (k->is_array && k->n != (uint64_t)L)) return wrong(&r->g->parts[0], key, expected, r->err);
    for (int i = 0; i < L; i++) {
        int64_t x;
        if (g4_gguf_int(k, k->is_array ? (uint64_t)i : 0, &x)) return wrong(&r->g->parts[0], key, expected, r->err);
        if (x < lowest || x > highest)
            return g4_fail(r->err, "%s: %s: expected integers from %d to %d, found %lld for layer %d", r->g->parts[0].path, key, lowest, highest,
                           (long long)x, i);
        value[i] = (int)x;
    }
    return 0;
}

/* A number that may be an array of one for each layer, where this program has one for all. */
static int read_uniform(const reader *r, const char *key, int required, int lowest, int highest, int *value) {
    int all[LAYERS_MAX] = {0}, present = 1;
    if (read_per_layer(r, key, lowest, highest, all, required ? NULL : &present)) return -1;
    if (!present) return 0;
    for (int i = 1; i < r->m->config.num_hidden_layers; i++)
        if (all[i] != all[0])
            return g4_fail(r->err, "%s: %s: expected the same for all layers, found %d for layer 0 and %d for layer %d", r->g->parts[0].path, key, all[0],
                           all[i], i);
    *value = all[0];
    return 0;
}

static const struct {
    const char *key;
    size_t field;
    int required, lowest, highest;
} sizes[] = {
    {"gemma4.block_count", offsetof(g4_config, num_hidden_layers), 1, 1, LAYERS_MAX},
    {"gemma4.context_length", offsetof(g4_config, max_position_embeddings), 1, 1, 1 << 30},
    {"gemma4.embedding_length", offsetof(g4_config, hidden_size), 1, 1, 1 << 18},
    {"gemma4.attention.sliding_window", offsetof(g4_config, sliding_window), 1, 1, 1 << 30},
    {"gemma4.embedding_length_per_layer_input", offsetof(g4_config, hidden_size_per_layer_input), 1, 0, 1 << 16},
    {"gemma4.attention.shared_kv_layers", offsetof(g4_config, num_kv_shared_layers), 0, 0, LAYERS_MAX},
    {"gemma4.expert_count", offsetof(g4_config, num_experts), 0, 0, 1 << 16},
};
enum { N_SIZES = sizeof sizes / sizeof sizes[0] };

/* Only the text model, by the name that llama.cpp runs it under. A projector and a drafter lie beside it in the same directory. */
static int check_architecture(const reader *r) {
    const part *f = &r->g->parts[0];
    const g4_gguf_key *type = g4_gguf_find(r->g, "general.type"), *architecture = g4_gguf_find(r->g, "general.architecture");
    const char *expected = "\"gemma4\" (this program runs no other architecture)";
    if (is_text(architecture, "clip")) expected = "\"gemma4\": this is the vision and audio projector (mmproj) of a model; give the model's own file";
    if (is_text(architecture, "gemma4-assistant")) expected = "\"gemma4\": this drafts tokens for a model; give the model's own file";
    if (!is_text(architecture, "gemma4")) return wrong(f, "general.architecture", expected, r->err);
    if (type && !is_text(type, "model")) return wrong(f, "general.type", "\"model\" (not an adapter, a projector or an importance matrix)", r->err);
    if (!r->g->n) return g4_fail(r->err, "%s: holds no tensors: a vocabulary alone, which only tokenize and detokenize can use", f->path);
    return 0;
}

static int read_layer_types(const reader *r, g4_config *c) {
    static const char *const key = "gemma4.attention.sliding_window_pattern";
    int pattern[LAYERS_MAX] = {0}, L = c->num_hidden_layers, period = 0;
    const g4_gguf_key *k = g4_gguf_find(r->g, key);
    if (k && !k->is_array) { /* as earlier Gemmas have it: every period-th layer is full. llama.cpp refuses it here */
        if (k->type == VALUE_BOOL || read_int(r, key, 1, 1, LAYERS_MAX, &period))
            return wrong(&r->g->parts[0], key, "an array of one bool for each layer, or a period", r->err);
        for (int i = 0; i < L; i++) pattern[i] = (i + 1) % period != 0;
    } else if (read_per_layer(r, key, 0, 1, pattern, NULL)) {
        return -1;
    }
    for (int i = 0; i < L; i++) c->layers[i].type = pattern[i] ? G4_SLIDING_ATTENTION : G4_FULL_ATTENTION;
    return 0;
}

/* head_dim and num_key_value_heads of each layer. */
static int read_heads(reader *r, g4_config *c) {
    static const char *const keys[2][3] = {
        {"gemma4.attention.key_length_swa", "gemma4.attention.value_length_swa", "gemma4.rope.dimension_count_swa"},
        {"gemma4.attention.key_length", "gemma4.attention.value_length", "gemma4.rope.dimension_count"}};
    const part *f = &r->g->parts[0];
    int kv_heads[LAYERS_MAX], present, rotated = 0;
    if (read_uniform(r, "gemma4.attention.head_count", 1, 1, HEADS_MAX, &c->num_attention_heads)) return -1;
    if (read_per_layer(r, "gemma4.attention.head_count_kv", 1, HEADS_MAX, kv_heads, &present)) return -1;
    for (int type = G4_FULL_ATTENTION; type >= G4_SLIDING_ATTENTION; type--) {
        int length[2], sliding = type == G4_SLIDING_ATTENTION;
        for (int i = 0; i < 2; i++) {
            length[i] = c->hidden_size / c->num_attention_heads;
            if (read_int(r, keys[type][i], sliding, 2, HEAD_DIM_MAX, &length[i])) return -1;
        }
        if (!rotated) rotated = length[0]; /* dimension_count is by default key_length, dimension_count_swa is dimension_count */
        if (read_int(r, keys[type][2], 0, 1, HEAD_DIM_MAX, &rotated)) return -1;
        int used = 0;
        for (int i = 0; i < c->num_hidden_layers; i++) used |= (int)c->layers[i].type == type;
        r->key_length[type] = length[0];
        if (!used) continue;
        if (length[0] != length[1])
            return g4_fail(r->err, "%s: %s is %d, but %s is %d; expected the same", f->path, keys[type][0], length[0], keys[type][1], length[1]);
        if (rotated != length[0])
            return g4_fail(r->err, "%s: %s: expected %d, %s, found %d (which part of it turns, rope_freqs says)", f->path, keys[type][2], length[0],
                           keys[type][0], rotated);
        if (length[0] % 2 || length[0] < 2)
            return g4_fail(r->err, "%s: %s: expected an even number of at least 2, found %d; RoPE rotates pairs", f->path, keys[type][0], length[0]);
    }
    int first[2] = {-1, -1};
    for (int i = 0; i < c->num_hidden_layers; i++) {
        g4_layer_config *l = &c->layers[i];
        l->head_dim = r->key_length[l->type];
        l->num_key_value_heads = present ? kv_heads[i] : c->num_attention_heads;
        if (first[l->type] < 0) first[l->type] = i;
        int same = c->layers[first[l->type]].num_key_value_heads;
        if (l->num_key_value_heads != same)
            return g4_fail(r->err, "%s: gemma4.attention.head_count_kv: layers %d and %d are of one kind, but have %d and %d", f->path, first[l->type], i,
                           same, l->num_key_value_heads);
        if (c->num_attention_heads % l->num_key_value_heads)
            return g4_fail(r->err, "%s: gemma4.attention.head_count %d is not a multiple of the %d K/V heads of layer %d", f->path, c->num_attention_heads,
                           l->num_key_value_heads, i);
    }
    return 0;
}

/* Layers from first_shared on read the K/V of layer first_shared - 2 if they slide and first_shared - 1 if they are full. That is
 * llama.cpp's rule and so the format's; transformers takes the last layer before first_shared that is of the same kind, which is another one
 * only where two layers of a kind come last. Where the rule leads to a layer of the other kind, llama.cpp stops; then transformers' holds. */
static int find_donors(const reader *r, g4_config *c) {
    int L = c->num_hidden_layers, first_shared = L - c->num_kv_shared_layers, last[2] = {-1, -1}, told = 0;
    if (c->num_kv_shared_layers >= L)
        return g4_fail(r->err, "%s: gemma4.attention.shared_kv_layers: expected less than block_count %d, found %d", r->g->parts[0].path, L,
                       c->num_kv_shared_layers);
    for (int i = 0; i < L; i++) {
        g4_layer_config *l = &c->layers[i];
        const char *kind = l->type == G4_FULL_ATTENTION ? "full" : "sliding";
        l->kv_layer = i;
        if (i < first_shared) {
            last[l->type] = i;
            continue;
        }
        if (last[l->type] < 0)
            return g4_fail(r->err, "%s: gemma4.attention.shared_kv_layers %d: no layer before layer %d is %s, so layer %d has nobody to share K/V with",
                           r->g->parts[0].path, c->num_kv_shared_layers, first_shared, kind, i);
        int donor = first_shared - (l->type == G4_SLIDING_ATTENTION ? 2 : 1);
        l->kv_layer = donor >= 0 && c->layers[donor].type == l->type ? donor : last[l->type];
        if (l->kv_layer != last[l->type] && !told++)
            g4_warn(r->options, "%s: layer %d (%s) shares the K/V of layer %d, as llama.cpp has it; in transformers it would be layer %d", r->g->parts[0].path,
                    i, kind, l->kv_layer, last[l->type]);
    }
    return 0;
}

/* The base frequencies, and a factor that only full layers obey. */
static int read_rope(const reader *r, g4_config *c) {
    static const char *const number = "a number from 0.001 to 1e30";
    const part *f = &r->g->parts[0];
    const g4_gguf_key *type = g4_gguf_find(r->g, "gemma4.rope.scaling.type");
    const char *factor_key = g4_gguf_find(r->g, "gemma4.rope.scaling.factor") ? "gemma4.rope.scaling.factor" : "gemma4.rope.scale_linear";
    double factor = 0;
    c->rope[G4_SLIDING_ATTENTION] = (g4_rope_config){.theta = 1e4, .factor = 1, .partial_rotary_factor = 1};
    c->rope[G4_FULL_ATTENTION] = (g4_rope_config){.theta = 1e4, .factor = 1, .proportional = 1, .partial_rotary_factor = 1};
    if (read_double(r, "gemma4.rope.freq_base", 1e-3, 1e30, number, &c->rope[G4_FULL_ATTENTION].theta)) return -1;
    if (read_double(r, "gemma4.rope.freq_base_swa", 1e-3, 1e30, number, &c->rope[G4_SLIDING_ATTENTION].theta)) return -1;
    if (type && !is_text(type, "none") && !is_text(type, "linear")) return wrong(f, "gemma4.rope.scaling.type", "\"linear\" or \"none\"", r->err);
    if (read_double(r, factor_key, 0, 1e6, "a number from 0.001 to 1e6, or 0 for none", &factor)) return -1;
    if (factor != 0 && factor < 1e-3) return wrong(f, factor_key, "a number from 0.001 to 1e6, or 0 for none", r->err);
    if (factor != 0 && !is_text(type, "none")) c->rope[G4_FULL_ATTENTION].factor = factor;
    return 0;
}

static int read_sizes(reader *r, g4_config *c) {
    static const char *const causal = "gemma4.attention.causal";
    double eps = -1;
    int width[LAYERS_MAX];
    for (int i = 0; i < N_SIZES; i++) {
        int value = 0;
        if (read_int(r, sizes[i].key, sizes[i].required, sizes[i].lowest, sizes[i].highest, &value)) return -1;
        memcpy((char *)c + sizes[i].field, &value, sizeof value);
    }
    const g4_gguf_key *k = g4_gguf_find(r->g, causal);
    if (k && (k->is_array || k->type != VALUE_BOOL || !k->data[0])) return wrong(&r->g->parts[0], causal, "true", r->err);
    if (!g4_gguf_find(r->g, "gemma4.attention.layer_norm_rms_epsilon"))
        return wrong(&r->g->parts[0], "gemma4.attention.layer_norm_rms_epsilon", "a number", r->err);
    if (read_double(r, "gemma4.attention.layer_norm_rms_epsilon", 1e-30, 1, "a number from 1e-30 to 1", &eps)) return -1;
    c->rms_norm_eps = (float)eps;
    c->final_logit_softcapping = 30; /* what llama.cpp takes where the key is absent: a model without a cap has 0 there */
    if (read_float(r, "gemma4.final_logit_softcapping", 0, 1e30, "a number above 0, or 0 for none", &c->final_logit_softcapping)) return -1;
    c->layers = calloc((size_t)c->num_hidden_layers, sizeof *c->layers);
    if (!c->layers) return g4_fail(r->err, "%s: no memory for %d layers", r->g->parts[0].path, c->num_hidden_layers);
    if (read_layer_types(r, c) || read_heads(r, c) || find_donors(r, c) || read_rope(r, c)) return -1;
    if (read_per_layer(r, "gemma4.feed_forward_length", 1, WIDTH_MAX, width, NULL)) return -1;
    for (int i = 0; i < c->num_hidden_layers; i++) c->layers[i].intermediate_size = width[i];
    c->use_double_wide_mlp = c->num_kv_shared_layers > 0 && width[c->num_hidden_layers - 1] == 2 * width[0];
    if (!c->num_experts) return 0;
    if (read_uniform(r, "gemma4.expert_used_count", 1, 1, c->num_experts, &c->top_k_experts)) return -1;
    return read_uniform(r, "gemma4.expert_feed_forward_length", 1, 1, WIDTH_MAX, &c->moe_intermediate_size);
}

/* An id where generation ends; one outside the vocabulary never occurs. */
static void add_stop_id(g4_config *c, int64_t id) {
    for (int i = 0; i < c->n_eos; i++)
        if (c->eos_token_id[i] == id) return;
    if (id >= 0 && id < c->vocab_size && c->n_eos < (int)(sizeof c->eos_token_id / sizeof c->eos_token_id[0])) c->eos_token_id[c->n_eos++] = (int32_t)id;
}

/* Where a text ends, what is never chosen, and how to sample. vocab_size is known. */
static int read_generation(const reader *r, g4_config *c) {
    static const char *const stop_keys[] = {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"};
    static const char *const stop_texts[] = {"<eos>", "<turn|>", "<|tool_response>"}; /* whatever the keys say, as in llama.cpp */
    enum { ROOM = sizeof c->suppress_tokens / sizeof c->suppress_tokens[0] };
    const part *f = &r->g->parts[0];
    for (int i = 0; i < 3; i++) {
        int64_t id = -1;
        if (part_int(f, stop_keys[i], -1, UINT32_MAX, &id, r->err)) return -1;
        add_stop_id(c, id);
    }
    const g4_gguf_key *tokens = g4_gguf_find(r->g, "tokenizer.ggml.tokens"), *suppressed = g4_gguf_find(r->g, "tokenizer.ggml.suppress_tokens");
    if (tokens) {
        char expected[96];
        snprintf(expected, sizeof expected, "an array of %d strings, the rows of token_embd.weight", c->vocab_size);
        if (!tokens->is_array || tokens->type != VALUE_STRING || tokens->n != (uint64_t)c->vocab_size) return wrong(f, "tokenizer.ggml.tokens", expected, r->err);
        const unsigned char *p = tokens->data;
        for (int id = 0; id < c->vocab_size; id++) {
            size_t n;
            const char *s = g4_gguf_string(&p, &n);
            for (int i = 0; i < 3; i++)
                if (n == strlen(stop_texts[i]) && !memcmp(s, stop_texts[i], n)) add_stop_id(c, id);
        }
    }
    if (suppressed && (!suppressed->is_array || suppressed->n > ROOM)) return wrong(f, "tokenizer.ggml.suppress_tokens", "an array of at most 64 ids", r->err);
    for (uint64_t i = 0; suppressed && i < suppressed->n; i++) {
        int64_t id;
        if (g4_gguf_int(suppressed, i, &id)) return wrong(f, "tokenizer.ggml.suppress_tokens", "an array of at most 64 ids", r->err);
        if (id >= 0 && id < c->vocab_size) c->suppress_tokens[c->n_suppress++] = (int32_t)id;
    }
    c->do_sample = 1;
    c->top_k = 64;
    c->top_p = 0.95f;
    c->temperature = 1;
    if (read_int(r, "general.sampling.top_k", 0, 0, INT_MAX, &c->top_k)) return -1;
    if (read_float(r, "general.sampling.top_p", 0, 1, "a number from 0 to 1", &c->top_p)) return -1;
    return read_float(r, "general.sampling.temp", 0, 1e6, "a number from 0 to 1e6", &c->temperature);
}

/* ---- 5. Weights --------------------------------------------------------------------------------------------------------- */

/* A tensor by name; NULL: there is none. */
static tensor *find_tensor(const g4_gguf *g, const char *name) {
    for (uint32_t low = 0, high = g->n; low < high;) {
        uint32_t middle = low + (high - low) / 2;
        tensor *t = &g->tensors[g->order[middle]];
        int order = strcmp(name, t->name);
        if (order == 0) return t;
        if (order < 0) high = middle;
        else low = middle + 1;
    }
    return NULL;
}

/* "blk.LAYER.NAME", or NAME. */
static tensor *find_here(const reader *r, const char *name, char full[NAME_MAX_BYTES]) {
    if (r->layer >= 0) snprintf(full, NAME_MAX_BYTES, "blk.%d.%s", r->layer, name);
    else snprintf(full, NAME_MAX_BYTES, "%s", name);
    return find_tensor(r->g, full);
}

/* "[256,320]", ne[0] first, as GGUF has it */
static shown show_shape(const uint64_t *ne, int rank) {
    shown out = {"["};
    size_t n = 1;
    for (int i = 0; i < rank; i++) n += (size_t)snprintf(out.text + n, sizeof out.text - n, i ? ",%llu" : "%llu", (unsigned long long)ne[i]);
    snprintf(out.text + n, sizeof out.text - n, "]");
    return out;
}

enum { ANY = 0, PLAIN = 1 /* F32, F16 or BF16: what is read number by number */, OPTIONAL = 2 };

/* A tensor as section 5's list has it: `in` columns, `out` rows (0: a vector), `experts` matrices (0: one). */
static void bind(reader *r, g4_tensor *w, const char *name, int64_t in, int64_t out, int64_t experts, int flags) {
    char full[NAME_MAX_BYTES];
    const uint64_t expected[4] = {(uint64_t)in, out ? (uint64_t)out : 1, experts ? (uint64_t)experts : 1, 1};
    int type = 0, plain = (flags & PLAIN) || !out;
    if (r->failed) return;
    tensor *t = find_here(r, name, full);
    if (!t) {
        if (!(flags & OPTIONAL) && !r->n_missing++) memcpy(r->missing, full, sizeof full);
        return;
    }
    const char *path = r->g->parts[t->part].path;
    if (memcmp(t->ne, expected, sizeof expected)) {
        r->failed = g4_fail(r->err, "%s: tensor %s: expected the shape %s by the file's keys, found %s", path, full,
                            show_shape(expected, experts ? 3 : out ? 2 : 1).text, show_shape(t->ne, t->rank).text);
        return;
    }
    while (type < G4_N_TYPES && !(g4_types[type].name && g4_types[type].ggml == t->type)) type++;
    if (type == G4_N_TYPES || (plain && type > G4_TYPE_BF16)) {
        r->failed = g4_fail(r->err, "%s: tensor %s: its type %s is not supported%s", path, full, ggml_types[t->type].name,
                            plain ? " here; expected F32, F16 or BF16" : " by this version; get or make a file without it");
        return;
    }
    t->use = READ;
    *w = (g4_tensor){.data = t->data, .type = (g4_dtype)type, .rows = (int64_t)(expected[1] * expected[2]), .cols = in, .name = t->name};
}

/* Rows first .. first + rows - 1 of a matrix. */
static g4_tensor rows_of(const g4_tensor *w, int64_t first, int64_t rows) {
    g4_tensor part_of = *w;
    part_of.data = (const unsigned char *)w->data + (size_t)first * g4_row_bytes(w);
    part_of.rows = rows;
    return part_of;
}

/* q, k and v, which may be one matrix: first q's rows, then k's, then v's. */
static void bind_qkv(reader *r, g4_layer *w, int64_t D, int64_t Q, int64_t KV, int owns) {
    static const char *const dead[] = {"attn_k.weight", "attn_v.weight", "attn_k_norm.weight"};
    char full[NAME_MAX_BYTES];
    g4_tensor qkv = {0};
    bind(r, &qkv, "attn_qkv.weight", D, Q + 2 * KV, 0, OPTIONAL);
    if (qkv.data) {
        w->q_proj = rows_of(&qkv, 0, Q);
        if (owns) {
            w->k_proj = rows_of(&qkv, Q, KV);
            w->v_proj = rows_of(&qkv, Q + KV, KV);
        }
    } else {
        bind(r, &w->q_proj, "attn_q.weight", D, Q, 0, ANY);
        if (owns) {
            bind(r, &w->k_proj, "attn_k.weight", D, KV, 0, ANY);
            bind(r, &w->v_proj, "attn_v.weight", D, KV, 0, OPTIONAL); /* without it V is made from K */
        }
    }
    for (int i = 0; i < 3 && !owns; i++) { /* some files carry them for layers that share K/V */
        tensor *t = find_here(r, dead[i], full);
        if (t) t->use = DEAD;
    }
}

static void bind_layer(reader *r, const g4_config *c, int i, g4_layer *w) {
    static const unsigned char one[4] = {0, 0, 0x80, 0x3f}; /* 1.0, as a file has it */
    const g4_layer_config *l = &c->layers[i];
    int64_t D = c->hidden_size, P = c->hidden_size_per_layer_input, E = c->num_experts, Fe = c->moe_intermediate_size;
    int64_t dh = l->head_dim, F = l->intermediate_size, Q = c->num_attention_heads * dh, KV = l->num_key_value_heads * dh;
    char full[NAME_MAX_BYTES];
    int owns = l->kv_layer == i;
    r->layer = i;
    bind(r, &w->input_layernorm, "attn_norm.weight", D, 0, 0, ANY);
    bind_qkv(r, w, D, Q, KV, owns);
    bind(r, &w->o_proj, "attn_output.weight", Q, D, 0, ANY);
    bind(r, &w->q_norm, "attn_q_norm.weight", dh, 0, 0, ANY);
    if (owns) bind(r, &w->k_norm, "attn_k_norm.weight", dh, 0, 0, ANY);
    bind(r, &w->post_attention_layernorm, "post_attention_norm.weight", D, 0, 0, ANY);
    bind(r, &w->pre_feedforward_layernorm, "ffn_norm.weight", D, 0, 0, ANY);
    bind(r, &w->gate_proj, "ffn_gate.weight", D, F, 0, ANY);
    bind(r, &w->up_proj, "ffn_up.weight", D, F, 0, ANY);
    bind(r, &w->down_proj, "ffn_down.weight", F, D, 0, ANY);
    bind(r, &w->post_feedforward_layernorm, "post_ffw_norm.weight", D, 0, 0, ANY);
    if (E) {
        int apart = !find_here(r, "ffn_gate_up_exps.weight", full) && find_here(r, "ffn_gate_exps.weight", full);
        bind(r, &w->router_proj, "ffn_gate_inp.weight", D, E, 0, PLAIN);
        bind(r, &w->router_scale, "ffn_gate_inp.scale", D, 0, 0, ANY);
        bind(r, &w->per_expert_scale, "ffn_down_exps.scale", E, 0, 0, ANY);
        if (apart) {
            bind(r, &w->experts_gate_up_proj, "ffn_gate_exps.weight", D, Fe, E, ANY);
            bind(r, &w->experts_up_proj, "ffn_up_exps.weight", D, Fe, E, ANY);
        } else {
            bind(r, &w->experts_gate_up_proj, "ffn_gate_up_exps.weight", D, 2 * Fe, E, ANY);
        }
        bind(r, &w->experts_down_proj, "ffn_down_exps.weight", Fe, D, E, ANY);
        bind(r, &w->post_feedforward_layernorm_1, "post_ffw_norm_1.weight", D, 0, 0, ANY);
        bind(r, &w->pre_feedforward_layernorm_2, "pre_ffw_norm_2.weight", D, 0, 0, ANY);
        bind(r, &w->post_feedforward_layernorm_2, "post_ffw_norm_2.weight", D, 0, 0, ANY);
    }
    if (P) {
        bind(r, &w->per_layer_input_gate, "inp_gate.weight", D, P, 0, ANY);
        bind(r, &w->per_layer_projection, "proj.weight", P, D, 0, ANY);
        bind(r, &w->post_per_layer_input_norm, "post_norm.weight", D, 0, 0, ANY);
    }
    bind(r, &w->layer_scalar, "layer_output_scale.weight", 1, 0, 0, OPTIONAL);
    if (!w->layer_scalar.data) w->layer_scalar = (g4_tensor){.data = one, .type = G4_TYPE_F32, .rows = 1, .cols = 1, .name = "layer_output_scale.weight"};
}

/* rope_freqs divides the angles of full layers: 1 for the pairs that turn, 1e30 for those that stand still. That is transformers'
 * "proportional" with a partial_rotary_factor, and other divisors are something that no Gemma 4 has. */
static int read_rope_freqs(reader *r, g4_config *c) {
    g4_tensor freqs = {0};
    int dh = r->key_length[G4_FULL_ATTENTION], half = dh / 2, used = 0, turning = 0;
    for (int i = 0; i < c->num_hidden_layers; i++) used |= c->layers[i].type == G4_FULL_ATTENTION;
    r->layer = -1;
    if (!used) return 0;
    bind(r, &freqs, "rope_freqs.weight", half, 0, 0, ANY);
    if (r->failed || !freqs.data) return r->failed;
    for (int i = 0; i < half; i++) {
        float x;
        g4_widen(freqs.type, &x, (const unsigned char *)freqs.data + (size_t)i * (size_t)g4_types[freqs.type].bytes, 1);
        if (x == 1 && turning == i) turning++;
        else if (!(x >= 1e29f))
            return g4_fail(r->err, "%s: tensor rope_freqs.weight: expected some times 1 and then 1e30 to the end, found %g at %d", r->g->parts[0].path,
                           (double)x, i);
    }
    double *factor = &c->rope[G4_FULL_ATTENTION].partial_rotary_factor;
    *factor = 2.0 * turning / dh;
    if (floor(*factor * dh / 2) < turning) *factor = nextafter(*factor, 2); /* how gemma4.c gets back to the number of pairs */
    return 0;
}

static int is_other_modality(const char *name) { return !strncmp(name, "v.", 2) || !strncmp(name, "a.", 2) || !strncmp(name, "mm.", 3); }

/* What is left over. A factor beside a weight that was read may not be left: the weight would be wrong without it. */
static int check_unread(const reader *r) {
    enum { NAMED = 20 };
    g4_gguf *g = r->g;
    int unknown = 0;
    for (uint32_t i = 0; i < g->n; i++) {
        const tensor *t = &g->tensors[g->order[i]];
        size_t n = strlen(t->name);
        if (t->use == READ) continue;
        g->ignored[g->n_ignored++] = t->name;
        if (t->use == DEAD || is_other_modality(t->name)) continue;
        if (n > 6 && !strcmp(t->name + n - 6, ".scale")) {
            char weight[NAME_MAX_BYTES + 1];
            snprintf(weight, sizeof weight, "%.*s.weight", (int)n - 6, t->name);
            const tensor *w = find_tensor(g, weight);
            if (w && w->use == READ)
                return g4_fail(r->err, "%s: tensor %s scales %s, which is not supported by this version; get or make a file without it", g->parts[t->part].path,
                               t->name, weight);
        }
        if (unknown++ < NAMED)
            g4_warn(r->options, "%s: tensor %s %s is no part of the text model that the file's keys describe; it is not read", g->parts[t->part].path,
                    show(t->name, n).text, show_shape(t->ne, t->rank).text);
    }
    if (unknown > NAMED) g4_warn(r->options, "%s: %d more tensors are not read", g->parts[0].path, unknown - NAMED);
    return 0;
}

/* The rows of a table are not in any key: the vocabulary is as large as its table. */
static int rows_of_table(const reader *r, const char *name, int *rows) {
    const tensor *t = find_tensor(r->g, name);
    if (!t) return g4_fail(r->err, "%s: tensor %s is missing", r->g->parts[0].path, name);
    if (t->ne[1] > 1 << 24)
        return g4_fail(r->err, "%s: tensor %s: expected at most %d rows, found %llu", r->g->parts[t->part].path, name, 1 << 24, (unsigned long long)t->ne[1]);
    *rows = (int)t->ne[1];
    return 0;
}

int g4_gguf_bind(g4_gguf *g, g4_model *m, const g4_options *options, g4_error *err) {
    g4_config *c = &m->config;
    reader reading = {.g = g, .m = m, .options = options, .err = err, .layer = -1}, *r = &reading;
    if (check_architecture(r)) return -1;
    snprintf(c->model_type, sizeof c->model_type, "gemma4");
    if (read_sizes(r, c) || rows_of_table(r, "token_embd.weight", &c->vocab_size)) return -1;
    int64_t D = c->hidden_size, P = c->hidden_size_per_layer_input, L = c->num_hidden_layers;
    c->vocab_size_per_layer_input = c->vocab_size;
    if (P && rows_of_table(r, "per_layer_token_embd.weight", &c->vocab_size_per_layer_input)) return -1;
    if (read_generation(r, c)) return -1;

    m->layers = calloc((size_t)L, sizeof *m->layers);
    if (!m->layers) return g4_fail(err, "%s: no memory for %d layers", g->parts[0].path, c->num_hidden_layers);
    bind(r, &m->embed_tokens, "token_embd.weight", D, c->vocab_size, 0, ANY);
    if (P) {
        bind(r, &m->embed_tokens_per_layer, "per_layer_token_embd.weight", L * P, c->vocab_size_per_layer_input, 0, ANY);
        bind(r, &m->per_layer_model_projection, "per_layer_model_proj.weight", D, L * P, 0, ANY);
        bind(r, &m->per_layer_projection_norm, "per_layer_proj_norm.weight", P, 0, 0, ANY);
    }
    bind(r, &m->norm, "output_norm.weight", D, 0, 0, ANY);
    bind(r, &m->lm_head, "output.weight", D, c->vocab_size, 0, OPTIONAL);
    for (int i = 0; i < c->num_hidden_layers; i++) {
        bind_layer(r, c, i, &m->layers[i]);
        if (c->layers[i].kv_layer == i && !m->layers[i].v_proj.data) c->attention_k_eq_v = 1;
    }
    if (r->failed || read_rope_freqs(r, c)) return -1;
    if (r->n_missing)
        return g4_fail(err,
                       r->n_missing > 1 ? "%s: tensor %s is missing, and %d more that the file's keys ask for"
                                        : "%s: tensor %s is missing; the file's keys ask for it",
                       g->parts[0].path, r->missing, r->n_missing - 1);
    c->tie_word_embeddings = !m->lm_head.data;
    if (!m->lm_head.data) m->lm_head = m->embed_tokens;
    return check_unread(r);
}
