/* tracefile.c - trace files: safetensors written chunk by chunk while a prompt runs, and their comparison.
 *
 * Writing: one row is run first to learn every tensor's name and shape from forward() itself, so that this file holds no second
 * list of them that could disagree. The header is then complete, and each chunk of rows is written at its place: nothing of size
 * T x V is ever in memory. The file is PATH.part until it is whole.
 *
 * Comparing: both files are mapped and read block by block in double, whatever their types.
 *
 * Not here: reading safetensors (checkpoint.c). Read trace_start and trace_rows, then trace_diff.
 */
#if !defined(_WIN32) && !defined(_FILE_OFFSET_BITS)
#define _FILE_OFFSET_BITS 64
#endif
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L /* fseeko */
#endif
#include "tracefile.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- What the systems spell differently: UTF-8 paths, 64-bit offsets, renaming over an existing file ---- */

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

static int seek_file(FILE *f, int64_t offset) { return _fseeki64(f, offset, SEEK_SET); }

static int move_file(const char *from, const char *to) {
    wchar_t *a = wide(from), *b = wide(to);
    int ok = a && b && MoveFileExW(a, b, MOVEFILE_REPLACE_EXISTING);
    free(a);
    free(b);
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
#include <sys/types.h>

static FILE *create_file(const char *path) { return fopen(path, "wb"); }
static int seek_file(FILE *f, int64_t offset) { return (int64_t)(off_t)offset == offset ? fseeko(f, (off_t)offset, SEEK_SET) : -1; }
static int move_file(const char *from, const char *to) { return rename(from, to); }
static void remove_file(const char *path) { remove(path); }

static int is_special_file(const char *path) {
    struct stat st;
    return !stat(path, &st) && !S_ISREG(st.st_mode);
}
#endif

/* ---- Writing ---- */

typedef struct entry {
    char name[64];
    int rank;
    int64_t shape[8]; /* shape[0] is T once the layout is done */
    int64_t width;    /* values of one row */
    int64_t offset;   /* in the file, of row 0 */
    int64_t rows;     /* written so far */
} entry;

struct trace_file {
    entry *entries; /* [n], in the order of the forward pass, ids first when picked */
    int n, capacity;
    int has_ids;
    const int32_t *ids; /* [T], the caller's */
    int T;
    const char *glob;
    char *path, *part; /* part: what is being written; path itself if that is a device */
    FILE *out;
    int failed; /* a callback failed: err tells */
    g4_error err;
};

/* '*' any run, '?' any one byte. Goes back to the last star only, which is enough: linear memory, at most n * m steps. */
static int matches_one(const char *pattern, const char *end, const char *name) {
    const char *star = NULL, *resume = NULL;
    while (*name) {
        if (pattern < end && *pattern == '*') {
            star = pattern++;
            resume = name;
        } else if (pattern < end && (*pattern == '?' || *pattern == *name)) {
            pattern++;
            name++;
        } else if (star) {
            pattern = star + 1;
            name = ++resume;
        } else {
            return 0;
        }
    }
    while (pattern < end && *pattern == '*') pattern++;
    return pattern == end;
}

/* Any of the alternatives, which commas part. */
static int matches(const char *glob, const char *name) {
    if (!glob) return 1;
    for (const char *end;; glob = end + 1) {
        end = glob + strcspn(glob, ",");
        if (matches_one(glob, end, name)) return 1;
        if (!*end) return 0;
    }
}

static void add_entry(trace_file *f, const char *name, int rank, const int64_t *shape) {
    if (f->failed || !matches(f->glob, name)) return;
    if (f->n == f->capacity) {
        int capacity = f->capacity ? 2 * f->capacity : 64;
        entry *entries = realloc(f->entries, (size_t)capacity * sizeof *entries);
        if (!entries) {
            f->failed = g4_fail(&f->err, "trace: no memory for %d tensors", capacity);
            return;
        }
        f->entries = entries;
        f->capacity = capacity;
    }
    entry *e = &f->entries[f->n];
    memset(e, 0, sizeof *e);
    if (rank < 1 || rank > 8 || strlen(name) >= sizeof e->name) {
        f->failed = g4_fail(&f->err, "trace: tensor %s of rank %d: expected a name of at most 63 bytes and rank 1 to 8", name, rank);
        return;
    }
    strcpy(e->name, name);
    e->rank = rank;
    e->width = 1;
    for (int i = 0; i < rank; i++) {
        e->shape[i] = i ? shape[i] : f->T;
        if (i) e->width *= shape[i]; /* a buffer of this many floats exists, so it fits */
    }
    f->n++;
}

trace_file *trace_open(const int32_t *ids, int T, const char *glob, g4_error *err) {
    trace_file *f = calloc(1, sizeof *f);
    if (!f) {
        g4_fail(err, "trace: no memory");
        return NULL;
    }
    f->ids = ids;
    f->T = T;
    f->glob = glob;
    int64_t shape[1] = {T};
    add_entry(f, "ids", 1, shape);
    f->has_ids = f->n == 1;
    return f;
}

void trace_layout(void *file, const char *name, const float *data, int rank, const int64_t *shape) {
    (void)data;
    add_entry(file, name, rank, shape);
}

/* Little-endian, whatever the host. words [n] are 32-bit values. */
static void write_words(trace_file *f, const void *words, int64_t n, int64_t offset) {
    if (f->failed) return;
    unsigned char bytes[16384];
    const char *from = words;
    int bad = seek_file(f->out, offset);
    while (!bad && n > 0) {
        size_t count = n < (int64_t)sizeof bytes / 4 ? (size_t)n : sizeof bytes / 4;
        for (size_t i = 0; i < count; i++) {
            uint32_t w;
            memcpy(&w, from + 4 * i, 4);
            for (int b = 0; b < 4; b++) bytes[4 * i + b] = (unsigned char)(w >> 8 * b);
        }
        bad = fwrite(bytes, 4, count, f->out) != count;
        from += 4 * count;
        n -= (int64_t)count;
    }
    if (bad) f->failed = g4_fail(&f->err, "cannot write %s: %s", f->part, strerror(errno));
}

int trace_start(trace_file *f, const char *path, const char *metadata, g4_error *err) {
    if (trace_error(f, err)) return -1;
    if (f->n == 0)
        return g4_fail(err, "--tensors %s matches no tensor; the names are like ids, embeddings, layers.0.output, norm, logits", f->glob ? f->glob : "*");
    size_t room = strlen(path) + sizeof ".part";
    f->path = malloc(room);
    f->part = malloc(room);
    size_t header_room = 256 + strlen(metadata) + (size_t)f->n * 400; /* an entry: a name of 63, 8 + 2 numbers of 20 digits, 60 of text */
    char *header = malloc(header_room);
    if (!f->path || !f->part || !header) {
        free(header);
        return g4_fail(err, "trace: no memory for the header");
    }
    strcpy(f->path, path);
    /* A device (/dev/null, /dev/full) is written to; renaming over it would replace it. */
    snprintf(f->part, room, is_special_file(path) ? "%s" : "%s.part", path);

    int n = snprintf(header, header_room, "{\"__metadata__\":%s", metadata);
    int64_t offset = 0;
    for (int i = 0; i < f->n; i++) {
        entry *e = &f->entries[i];
        const char *type = i == 0 && f->has_ids ? "I32" : "F32";
        n += snprintf(header + n, header_room - (size_t)n, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", e->name, type);
        for (int d = 0; d < e->rank; d++)
            n += snprintf(header + n, header_room - (size_t)n, "%s%lld", d ? "," : "", (long long)e->shape[d]);
        if (e->width && f->T > (INT64_MAX / 8 - offset) / 4 / e->width) {
            free(header);
            return g4_fail(err, "trace: the tensors up to %s do not fit a file", e->name);
        }
        int64_t end = offset + 4 * f->T * e->width;
        n += snprintf(header + n, header_room - (size_t)n, "],\"data_offsets\":[%lld,%lld]}", (long long)offset, (long long)end);
        e->offset = offset;
        offset = end;
    }
    n += snprintf(header + n, header_room - (size_t)n, "}");
    while (n % 8) header[n++] = ' '; /* the data section begins at a multiple of 8 */

    f->out = create_file(f->part);
    if (!f->out) {
        free(header);
        return g4_fail(err, "cannot create %s: %s", f->part, strerror(errno));
    }
    unsigned char length[8];
    for (int b = 0; b < 8; b++) length[b] = (unsigned char)((uint64_t)n >> 8 * b);
    if (fwrite(length, 1, 8, f->out) != 8 || fwrite(header, 1, (size_t)n, f->out) != (size_t)n)
        f->failed = g4_fail(&f->err, "cannot write %s: %s", f->part, strerror(errno));
    free(header);
    for (int i = 0; i < f->n; i++) f->entries[i].offset += 8 + n;
    if (f->has_ids) {
        write_words(f, f->ids, f->T, f->entries[0].offset);
        f->entries[0].rows = f->T;
    }
    return trace_error(f, err);
}

void trace_rows(void *file, const char *name, const float *data, int rank, const int64_t *shape) {
    trace_file *f = file;
    if (f->failed || !matches(f->glob, name)) return;
    entry *e = f->entries, *end = f->entries + f->n;
    while (e < end && strcmp(e->name, name)) e++;
    if (e == end || rank != e->rank || shape[0] > f->T - e->rows) {
        f->failed = g4_fail(&f->err, "trace: %s came with other rows than the layout's", name);
        return;
    }
    write_words(f, data, shape[0] * e->width, e->offset + 4 * e->rows * e->width);
    e->rows += shape[0];
}

int trace_error(const trace_file *f, g4_error *err) {
    if (f->failed && err) *err = f->err;
    return f->failed ? -1 : 0;
}

static void free_trace(trace_file *f) {
    free(f->entries);
    free(f->path);
    free(f->part);
    free(f);
}

void trace_discard(trace_file *f) {
    if (!f) return;
    if (f->out) {
        fclose(f->out);
        if (strcmp(f->part, f->path)) remove_file(f->part);
    }
    free_trace(f);
}

int trace_finish(trace_file *f, g4_error *err) {
    for (int i = 0; i < f->n && !f->failed; i++) {
        const entry *e = &f->entries[i];
        if (e->rows != f->T) f->failed = g4_fail(&f->err, "trace: %s has %lld of %d rows", e->name, (long long)e->rows, f->T);
    }
    if (!f->failed) {
        int bad = fclose(f->out);
        f->out = NULL;
        if (bad) f->failed = g4_fail(&f->err, "cannot write %s: %s", f->part, strerror(errno));
        else if (strcmp(f->part, f->path) && move_file(f->part, f->path))
            f->failed = g4_fail(&f->err, "cannot rename %s to %s: %s", f->part, f->path, strerror(errno));
        if (f->failed && strcmp(f->part, f->path)) remove_file(f->part);
    }
    int failed = trace_error(f, err);
    trace_discard(f);
    return failed;
}

/* ---- Comparing ---- */

/* The order of the forward pass within a layer; what forward() adds later sorts before `output`, by name. */
static const char *const inner_names[] = {"k", "v", "q", "attention", "o_proj", "attn_residual", "mlp", "router_index", "router_weight",
                                          "experts", "ffn_residual", "ple_gate", "ple", "", "output"};
enum { N_INNER = sizeof inner_names / sizeof *inner_names, INNER_UNKNOWN = N_INNER - 2 };

typedef struct place {
    int group;  /* ids, embeddings, per_layer_inputs, layers, norm, logits, anything else */
    long layer;
    int inner;
} place;

static place place_of(const char *name) {
    static const char *const groups[] = {"ids", "embeddings", "per_layer_inputs", "layers.", "norm", "logits"};
    place p = {6, 0, 0};
    for (int g = 0; g < 6; g++)
        if (g != 3 && !strcmp(name, groups[g])) p.group = g;
    size_t digits = strncmp(name, "layers.", 7) ? 0 : strspn(name + 7, "0123456789");
    if (digits < 1 || digits > 8 || name[7 + digits] != '.') return p;
    p.group = 3;
    p.layer = strtol(name + 7, NULL, 10);
    p.inner = INNER_UNKNOWN;
    for (int i = 0; i < N_INNER; i++)
        if (i != INNER_UNKNOWN && !strcmp(name + 7 + digits + 1, inner_names[i])) p.inner = i;
    return p;
}

static int compare_names(const void *a, const void *b) {
    const char *x = (*(const g4_st_tensor *const *)a)->name, *y = (*(const g4_st_tensor *const *)b)->name;
    place p = place_of(x), q = place_of(y);
    if (p.group != q.group) return p.group - q.group;
    if (p.layer != q.layer) return p.layer < q.layer ? -1 : 1;
    if (p.inner != q.inner) return p.inner - q.inner;
    return strcmp(x, y);
}

typedef enum kind { F64, F32, F16, BF16, I64, I32, I16, I8, U8, UNKNOWN } kind;
static const char *const kind_names[] = {"F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8"};
static const int kind_bytes[] = {8, 4, 2, 2, 8, 4, 2, 1, 1};

static kind kind_of(const g4_st_tensor *t) {
    for (int k = 0; k < UNKNOWN; k++)
        if (!strcmp(t->dtype, kind_names[k])) return k;
    return UNKNOWN;
}

static double half_value(uint32_t h) {
    int exponent = h >> 10 & 31;
    double fraction = h & 1023, value = exponent == 31 ? (fraction != 0 ? NAN : INFINITY)
                                      : exponent       ? ldexp(1024 + fraction, exponent - 25)
                                                       : ldexp(fraction, -24);
    return h >> 15 ? -value : value;
}

/* Values i .. i + n - 1 of t, in double. */
static void read_values(const g4_st_tensor *t, kind k, int64_t i, int n, double *out) {
    const unsigned char *p = t->data + i * kind_bytes[k];
    for (int j = 0; j < n; j++, p += kind_bytes[k]) {
        uint64_t w = 0;
        for (int b = 0; b < kind_bytes[k]; b++) w |= (uint64_t)p[b] << 8 * b;
        float f;
        uint32_t w32 = (uint32_t)(k == BF16 ? w << 16 : w);
        memcpy(&f, &w32, 4);
        switch (k) {
        case F64: memcpy(&out[j], &w, 8); break;
        case F32: case BF16: out[j] = f; break;
        case F16: out[j] = half_value(w32); break;
        case I64: out[j] = (double)(int64_t)w; break;
        case I32: out[j] = (int32_t)w; break;
        case I16: out[j] = (int16_t)w; break;
        case I8: out[j] = (int8_t)w; break;
        default: out[j] = (double)w; break;
        }
    }
}

static int same_shape(const g4_st_tensor *a, const g4_st_tensor *b) {
    return a->rank == b->rank && (a->rank == 0 || !memcmp(a->shape, b->shape, (size_t)a->rank * sizeof *a->shape));
}

static const char *shape_text(const g4_st_tensor *t, char text[200]) {
    int n = 0;
    text[0] = 0;
    for (int d = 0; d < t->rank; d++) n += snprintf(text + n, 200 - (size_t)n, "[%lld]", (long long)t->shape[d]);
    return t->rank ? text : "[]";
}

/* A name comes from a file: no control character of it reaches the terminal, and no newline makes two lines of one. */
static void print_name(FILE *out, const char *name, int width) {
    int n = 0;
    for (; name[n]; n++) fputc((unsigned char)name[n] < 0x20 || name[n] == 0x7f ? '?' : name[n], out);
    for (; n < width; n++) fputc(' ', out);
}

/* Writes one line; returns 1 if in tolerance, 0 if not, -1 on an error. */
static int diff_tensor(const g4_st_tensor *a, const g4_st_tensor *b, double rtol, double atol, int width, FILE *out, g4_error *err) {
    enum { BLOCK = 1024 };
    double x[BLOCK], y[BLOCK];
    char text_a[200], text_b[200];
    kind ka = kind_of(a), kb = kind_of(b);
    if (ka == UNKNOWN || kb == UNKNOWN)
        return g4_fail(err, "diff: tensor %s has type %s, which is not among F64, F32, F16, BF16, I64, I32, I16, I8, U8", a->name,
                       ka == UNKNOWN ? a->dtype : b->dtype);
    if (!same_shape(a, b)) {
        print_name(out, a->name, width);
        fprintf(out, "  shape %s in A, %s in B  FAILED\n", shape_text(a, text_a), shape_text(b, text_b));
        return 0;
    }
    int64_t n = 1, first = -1, not_finite = 0;
    for (int d = 0; d < a->rank; d++) n *= a->shape[d]; /* bounded by the file's size: checked when it was opened */
    double max = 0, largest = 0, dd = 0, bb = 0, aa = 0, ab = 0;
    for (int64_t i = 0; i < n; i += BLOCK) {
        int count = n - i < BLOCK ? (int)(n - i) : BLOCK;
        read_values(a, ka, i, count, x);
        read_values(b, kb, i, count, y);
        for (int j = 0; j < count; j++) {
            double d = fabs(x[j] - y[j]);
            if (first < 0 && !(d == 0)) first = i + j;
            if (!isfinite(x[j]) || !isfinite(y[j])) not_finite++;
            if (d > max) max = d;
            if (fabs(y[j]) > largest) largest = fabs(y[j]);
            dd += d * d;
            aa += x[j] * x[j];
            bb += y[j] * y[j];
            ab += x[j] * y[j];
        }
    }
    if (not_finite) max = dd = aa = bb = NAN; /* a NaN or an infinity is a failure before any tolerance */
    int exact = ka >= I64 && kb >= I64;
    int ok = max <= (exact ? 0 : atol + rtol * (largest > 1 ? largest : 1));
    double nmse = bb > 0 ? dd / bb : dd > 0 ? INFINITY : dd;
    double cosine = aa > 0 && bb > 0 ? ab / (sqrt(aa) * sqrt(bb)) : aa == bb ? 1 : aa + bb > 0 ? 0 : NAN;
    char first_text[24] = "-";
    if (first >= 0) snprintf(first_text, sizeof first_text, "%lld", (long long)first);
    print_name(out, a->name, width);
    double rms = n ? sqrt(dd / (double)n) : 0;
    fprintf(out, "  %10.3e  %10.3e  %10.3e  %12.9f  %12s  %s", max, rms, nmse, cosine, first_text, ok ? "ok" : "FAILED");
    if (first >= 0 && a->rank > 1) {
        int64_t rest = first, index[8];
        for (int d = a->rank - 1; d >= 0; d--) {
            index[d] = rest % a->shape[d];
            rest /= a->shape[d];
        }
        fputs("  first at ", out);
        for (int d = 0; d < a->rank; d++) fprintf(out, "[%lld]", (long long)index[d]);
    }
    if (not_finite) fprintf(out, "  %lld not finite", (long long)not_finite);
    fputc('\n', out);
    return ok;
}

/* The tensors of st in the order of the forward pass. */
static const g4_st_tensor **sorted(const g4_safetensors *st, g4_error *err) {
    const g4_st_tensor **list = malloc(((size_t)st->n + 1) * sizeof *list);
    if (!list) {
        g4_fail(err, "diff: no memory for %d names", st->n);
        return NULL;
    }
    for (int i = 0; i < st->n; i++) list[i] = &st->tensors[i];
    qsort(list, (size_t)st->n, sizeof *list, compare_names);
    return list;
}

static void print_missing(const g4_st_tensor **list, int n, const g4_safetensors *other, const char *which, FILE *out) {
    for (int i = 0; i < n; i++) {
        if (g4_safetensors_find(other, list[i]->name)) continue;
        fprintf(out, "only in %s: ", which);
        print_name(out, list[i]->name, 0);
        fputc('\n', out);
    }
}

int trace_compare(const g4_safetensors *a, const char *name_a, const g4_safetensors *b, const char *name_b, double rtol, double atol, FILE *out,
                  g4_error *err) {
    const g4_st_tensor **list_a = sorted(a, err), **list_b = list_a ? sorted(b, err) : NULL;
    int result = list_b ? 0 : -1, common = 0, width = 6;
    for (int i = 0; result == 0 && i < a->n; i++) {
        if (!g4_safetensors_find(b, list_a[i]->name)) continue;
        common++;
        if ((int)strlen(list_a[i]->name) > width) width = (int)strlen(list_a[i]->name);
    }
    if (width > 64) width = 64; /* longer names push their line to the right */
    if (result == 0 && !common)
        result = g4_fail(err, "diff: %s (%d tensors) and %s (%d tensors) have no tensor in common", name_a, a->n, name_b, b->n);
    if (result == 0) fprintf(out, "%-*s  %10s  %10s  %10s  %12s  %12s\n", width, "tensor", "max abs", "rms", "NMSE", "cosine", "first index");
    const char *failed = NULL; /* the first one */
    for (int i = 0; result == 0 && i < a->n; i++) {
        const g4_st_tensor *t = g4_safetensors_find(b, list_a[i]->name);
        int ok = t ? diff_tensor(list_a[i], t, rtol, atol, width, out, err) : 1;
        if (ok < 0) result = -1;
        if (ok == 0 && !failed) failed = t->name;
    }
    if (result == 0) {
        print_missing(list_a, a->n, b, "A", out);
        print_missing(list_b, b->n, a, "B", out);
        if (failed) {
            fputs("first out of tolerance: ", out);
            print_name(out, failed, 0);
            fputc('\n', out);
        } else {
            fprintf(out, "all %d in tolerance\n", common);
        }
        result = failed != NULL;
    }
    free(list_a);
    free(list_b);
    return result;
}

int trace_diff(const char *path_a, const char *path_b, double rtol, double atol, FILE *out, g4_error *err) {
    g4_safetensors a, b;
    if (g4_safetensors_open(&a, path_a, 0, err)) return -1;
    if (g4_safetensors_open(&b, path_b, 0, err)) {
        g4_safetensors_close(&a);
        return -1;
    }
    int result = trace_compare(&a, path_a, &b, path_b, rtol, atol, out, err);
    g4_safetensors_close(&a);
    g4_safetensors_close(&b);
    return result;
}
