/* checkpoint.c - from files to a g4_model: config.json, generation_config.json and *.safetensors, or through gguf.c a GGUF file.
 *
 * Nothing here computes: a weight stays where the system mapped it, and opening a model reads headers only. Every byte of every
 * file is taken for hostile; a parser here either gives exactly what the file says or one line that names the fault.
 *
 * Read from the bottom up to follow g4_checkpoint_open, or from the top down for the parts it stands on:
 *     1. messages and a sort      2. JSON      3. numbers      4. files (the only code here that knows the operating system)
 *     5. safetensors, one file and sharded      6. config.json      7. weights
 */
#if !defined(_WIN32)
#define _FILE_OFFSET_BITS 64
#endif

#include "gemma4.h"

#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#else
#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#if !defined(__wasi__)
#include <sys/mman.h>
#endif
#endif
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MIN(a, b) ((a) < (b) ? (a) : (b))

/* ---- 1. Messages, and a sort -------------------------------------------------------------------------------------------- */

/* A name from a file may hold anything; in a message it is one short line. */
typedef struct shown {
    char text[160];
} shown;

static shown show_n(const char *s, size_t n) {
    shown out;
    size_t max = 120, m = n < max ? n : max;
    for (size_t i = 0; i < m; i++) out.text[i] = (unsigned char)s[i] < 0x20 || s[i] == 0x7f ? '?' : s[i];
    if (n > max) {
        while (m > 0 && ((unsigned char)s[m] & 0xc0) == 0x80) m--; /* not inside a character */
        memcpy(out.text + m, "...", 3);
        m += 3;
    }
    out.text[m] = 0;
    return out;
}

static shown show(const char *s) { return show_n(s, strlen(s)); }

void g4_warn(const g4_options *options, const char *format, ...) {
    g4_error line;
    va_list args;
    char text[sizeof line.text];
    if (!options || !options->warn) return;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    g4_fail(&line, "%s", text); /* which keeps it on one line */
    options->warn(options->user, line.text);
}

void g4_sort(uint32_t *a, uint32_t n, int (*compare)(const void *context, uint32_t x, uint32_t y), const void *context) {
    for (uint32_t start = n / 2, end = n; end > 1;) {
        uint32_t x, hole = 0;
        if (start > 0) {
            hole = --start;
            x = a[hole];
        } else {
            x = a[--end];
            a[end] = a[0];
        }
        for (uint32_t child; (child = 2 * hole + 1) < end; hole = child) {
            if (child + 1 < end && compare(context, a[child], a[child + 1]) < 0) child++;
            if (compare(context, x, a[child]) >= 0) break;
            a[hole] = a[child];
        }
        a[hole] = x;
    }
}

/* ---- 2. JSON ---------------------------------------------------------------------------------------------------------- */

enum { JSON_DEPTH = 64, JSON_MAX = 1 << 30 };

typedef struct reader {
    const unsigned char *begin, *p, *end;
    char *text;            /* [end - begin + 1]: a string loses its quotes and gains a NUL, a number gains a NUL where a delimiter stood */
    uint32_t used;         /* bytes of text */
    g4_json_node *nodes;   /* [capacity] */
    uint32_t n;
    size_t capacity;
    const char *what;
    g4_error *err;
} reader;

/* "WHAT: line 3 column 7: expected ..., found ...": the position is that of `at`, counted in characters. */
static int json_fail(const reader *r, const unsigned char *at, const char *expected) {
    unsigned long long line = 1, column = 1;
    char found[32] = "the end of the text";
    for (const unsigned char *q = r->begin; q < at; q++) {
        if (*q == '\n') {
            line++;
            column = 1;
        } else if ((*q & 0xc0) != 0x80) {
            column++;
        }
    }
    if (at < r->end) snprintf(found, sizeof found, *at > 0x20 && *at < 0x7f ? "'%c'" : "byte 0x%02x", *at);
    return g4_fail(r->err, "%s: line %llu column %llu: expected %s, found %s", r->what, line, column, expected, found);
}

static void skip_blanks(reader *r) {
    while (r->p < r->end && (*r->p == ' ' || *r->p == '\n' || *r->p == '\r' || *r->p == '\t')) r->p++;
}

/* Bytes of the well-formed UTF-8 character at p: no overlong forms, no surrogates, nothing above U+10FFFF. 0: not one. */
static int utf8_length(const unsigned char *p, const unsigned char *end) {
    unsigned c = p[0], lowest = 0x80, highest = 0xbf;
    int n = c < 0x80 ? 1 : c >= 0xc2 && c <= 0xdf ? 2 : c >= 0xe0 && c <= 0xef ? 3 : c >= 0xf0 && c <= 0xf4 ? 4 : 0;
    if (n == 0 || end - p < n) return 0;
    if (c == 0xe0) lowest = 0xa0;
    if (c == 0xed) highest = 0x9f;
    if (c == 0xf0) lowest = 0x90;
    if (c == 0xf4) highest = 0x8f;
    if (n > 1 && (p[1] < lowest || p[1] > highest)) return 0;
    for (int i = 2; i < n; i++)
        if ((p[i] & 0xc0) != 0x80) return 0;
    return n;
}

/* Four hex digits at p; -1: not there. */
static int hex4(const unsigned char *p, const unsigned char *end) {
    int x = 0;
    if (end - p < 4) return -1;
    for (int i = 0; i < 4; i++) {
        int c = p[i], digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
        if (digit < 0) return -1;
        x = x << 4 | digit;
    }
    return x;
}

/* 1: a byte that stands for itself in a string. */
static const unsigned char plain[256] = {
#define ROW8 1, 1, 1, 1, 1, 1, 1, 1
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    1, 1, 0 /* " */, 1, 1, 1, 1, 1, ROW8, ROW8, ROW8,
    ROW8, ROW8, ROW8, 1, 1, 1, 1, 0 /* \ */, 1, 1, 1,
    ROW8, ROW8, ROW8, ROW8,
#undef ROW8
};

/* The escape at p (its backslash) as UTF-8 at *out, both moved on. */
static int read_escape(reader *r, char **out) {
    const unsigned char *p = r->p + 1;
    char *o = *out;
    if (p < r->end && *p == 'u') {
        int code = hex4(p + 1, r->end);
        if (code < 0) return json_fail(r, r->p, "four hex digits after \\u");
        p += 5;
        if (code >= 0xd800 && code <= 0xdfff) {
            int low = code < 0xdc00 && r->end - p >= 6 && p[0] == '\\' && p[1] == 'u' ? hex4(p + 2, r->end) : -1;
            if (low < 0xdc00 || low > 0xdfff) return json_fail(r, r->p, "a surrogate pair (\\ud800-\\udbff, then \\udc00-\\udfff)");
            code = 0x10000 + ((code - 0xd800) << 10 | (low - 0xdc00));
            p += 6;
        }
        if (code < 0x80) {
            *o++ = (char)code;
        } else if (code < 0x800) {
            *o++ = (char)(0xc0 | code >> 6);
            *o++ = (char)(0x80 | (code & 63));
        } else if (code < 0x10000) {
            *o++ = (char)(0xe0 | code >> 12);
            *o++ = (char)(0x80 | (code >> 6 & 63));
            *o++ = (char)(0x80 | (code & 63));
        } else {
            *o++ = (char)(0xf0 | code >> 18);
            *o++ = (char)(0x80 | (code >> 12 & 63));
            *o++ = (char)(0x80 | (code >> 6 & 63));
            *o++ = (char)(0x80 | (code & 63));
        }
    } else {
        static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
        const char *hit = p < r->end && *p ? strchr(from, *p) : NULL;
        if (!hit) return json_fail(r, p, "one of \"\\/bfnrtu after a backslash");
        *o++ = to[hit - from];
        p++;
    }
    r->p = p;
    *out = o;
    return 0;
}

/* The string at p (its quote) into text. */
static int read_string(reader *r, uint32_t *offset, uint32_t *size) {
    char *o = r->text + r->used;
    r->p++;
    for (;;) {
        while (r->p < r->end && plain[*r->p]) *o++ = (char)*r->p++;
        if (r->p == r->end) return json_fail(r, r->p, "the closing quote of a string");
        if (*r->p == '"') break;
        if (*r->p == '\\') {
            if (read_escape(r, &o)) return -1;
        } else if (*r->p < 0x20) {
            return json_fail(r, r->p, "no raw control character in a string (write it as \\u00XX)");
        } else {
            int n = utf8_length(r->p, r->end);
            if (!n) return json_fail(r, r->p, "valid UTF-8");
            memcpy(o, r->p, (size_t)n);
            o += n;
            r->p += n;
        }
    }
    r->p++;
    *o++ = 0;
    *offset = r->used;
    *size = (uint32_t)(o - r->text) - r->used - 1;
    r->used += *size + 1;
    return 0;
}

static int is_digit(const reader *r, const unsigned char *p) { return p < r->end && *p >= '0' && *p <= '9'; }

/* The number at p into text, as it is written. */
static int read_number(reader *r, uint32_t *offset, uint32_t *size) {
    const unsigned char *p = r->p;
    if (*p == '-') p++;
    if (!is_digit(r, p)) return json_fail(r, p, "a digit");
    if (*p == '0' && is_digit(r, p + 1)) return json_fail(r, p, "no leading zero in a number");
    while (is_digit(r, p)) p++;
    if (p < r->end && *p == '.') {
        p++;
        if (!is_digit(r, p)) return json_fail(r, p, "a digit after the decimal point");
        while (is_digit(r, p)) p++;
    }
    if (p < r->end && (*p == 'e' || *p == 'E')) {
        p++;
        if (p < r->end && (*p == '+' || *p == '-')) p++;
        if (!is_digit(r, p)) return json_fail(r, p, "a digit in the exponent");
        while (is_digit(r, p)) p++;
    }
    *offset = r->used;
    *size = (uint32_t)(p - r->p);
    memcpy(r->text + r->used, r->p, *size);
    r->text[r->used + *size] = 0;
    r->used += *size + 1;
    r->p = p;
    return 0;
}

static int same_key(const reader *r, uint32_t a, uint32_t b) {
    const g4_json_node *x = &r->nodes[a], *y = &r->nodes[b];
    return x->key_size == y->key_size && !memcmp(r->text + x->key, r->text + y->key, x->key_size);
}

static int compare_keys(const void *context, uint32_t a, uint32_t b) {
    const reader *r = context;
    const g4_json_node *x = &r->nodes[a], *y = &r->nodes[b];
    if (x->key_size != y->key_size) return x->key_size < y->key_size ? -1 : 1;
    return memcmp(r->text + x->key, r->text + y->key, x->key_size);
}

/* Gives in *twin a member of the object whose key another member has too, or 0. */
static int find_duplicate(const reader *r, uint32_t object, uint32_t *twin) {
    const g4_json_node *nodes = r->nodes;
    uint32_t members = nodes[object].size, mask = 63;
    *twin = 0;
    if (members <= 8) {
        for (uint32_t a = nodes[object].first; a; a = nodes[a].next)
            for (uint32_t b = nodes[a].next; b; b = nodes[b].next)
                if (same_key(r, a, b)) *twin = b;
        return 0;
    }
    while (mask / 2 < members) mask = mask * 2 + 1;
    uint32_t *table = calloc((size_t)mask + 1, sizeof *table);
    if (!table) return g4_fail(r->err, "%s: out of memory for an object of %u members", r->what, (unsigned)members);
    /* At most half full, so a key needs less than two looks on average. Keys that were chosen to collide need more: then sort. */
    uint64_t looks = 0, allowed = 16 * (uint64_t)members;
    for (uint32_t a = nodes[object].first; a && !*twin && looks <= allowed; a = nodes[a].next) {
        const char *key = r->text + nodes[a].key;
        uint64_t hash = nodes[a].key_size, word = 0;
        for (uint32_t i = 0; i < nodes[a].key_size; i += 8) {
            uint32_t rest = nodes[a].key_size - i;
            word = 0;
            memcpy(&word, key + i, rest < 8 ? rest : 8);
            hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
            hash ^= hash >> 32;
        }
        uint32_t slot = (uint32_t)(hash * 0x9e3779b97f4a7c15u >> 32) & mask;
        for (; table[slot] && !*twin && ++looks <= allowed; slot = (slot + 1) & mask)
            if (same_key(r, table[slot], a)) *twin = a;
        if (!table[slot]) table[slot] = a;
    }
    if (looks > allowed && !*twin) {
        uint32_t n = 0;
        for (uint32_t a = nodes[object].first; a; a = nodes[a].next) table[n++] = a;
        g4_sort(table, n, compare_keys, r);
        for (uint32_t i = 1; i < n; i++)
            if (same_key(r, table[i - 1], table[i])) *twin = table[i];
    }
    free(table);
    return 0;
}

static int new_node(reader *r) {
    if (r->n == r->capacity) {
        /* A value takes two bytes, one for itself and one for its comma or bracket; but those of arrays that are still open are yet to come. */
        const size_t most = (size_t)(r->end - r->begin) / 2 + 1 + JSON_DEPTH;
        size_t capacity = r->capacity < most / 2 ? 2 * r->capacity : most;
        g4_json_node *nodes = capacity > SIZE_MAX / sizeof *nodes ? NULL : realloc(r->nodes, capacity * sizeof *nodes);
        if (!nodes) return g4_fail(r->err, "%s: out of memory for %llu JSON values", r->what, (unsigned long long)capacity);
        r->nodes = nodes;
        r->capacity = capacity;
    }
    r->nodes[r->n++] = (g4_json_node){0};
    return 0;
}

/* The values of the text, first to last. The open arrays and objects stand on a small stack instead of on C's. */
static int read_values(reader *r) {
    struct {
        uint32_t node, last; /* the array or object; its last child so far, 0: none */
        int is_object;
        const unsigned char *at;
    } open[JSON_DEPTH], *top = NULL;
    int depth = 0;

    for (;;) {
        /* One value; inside an object its key comes first. */
        uint32_t key = 0, key_size = 0;
        skip_blanks(r);
        if (top && top->is_object) {
            if (r->p == r->end || *r->p != '"') return json_fail(r, r->p, "a key in double quotes");
            if (read_string(r, &key, &key_size)) return -1;
            skip_blanks(r);
            if (r->p == r->end || *r->p != ':') return json_fail(r, r->p, "':'");
            r->p++;
            skip_blanks(r);
        }
        if (new_node(r)) return -1;
        uint32_t id = r->n - 1;
        g4_json_node *node = &r->nodes[id];
        node->key = key;
        node->key_size = key_size;
        if (top) {
            if (top->last) r->nodes[top->last].next = id;
            else r->nodes[top->node].first = id;
            top->last = id;
            r->nodes[top->node].size++;
        }
        int c = r->p < r->end ? *r->p : -1;
        if (c == '"') {
            node->kind = G4_JSON_STRING;
            if (read_string(r, &node->first, &node->size)) return -1;
        } else if (c == '-' || (c >= '0' && c <= '9')) {
            node->kind = G4_JSON_NUMBER;
            if (read_number(r, &node->first, &node->size)) return -1;
        } else if (c == '{' || c == '[') {
            if (depth == JSON_DEPTH) return json_fail(r, r->p, "no array or object inside 64 others");
            node->kind = c == '{' ? G4_JSON_OBJECT : G4_JSON_ARRAY;
            top = &open[depth++];
            top->node = id;
            top->last = 0;
            top->is_object = c == '{';
            top->at = r->p++;
            skip_blanks(r);
            if (r->p == r->end || *r->p != (c == '{' ? '}' : ']')) continue;
        } else {
            static const struct {
                const char *word;
                g4_json_kind kind;
            } words[] = {{"null", G4_JSON_NULL}, {"false", G4_JSON_FALSE}, {"true", G4_JSON_TRUE}};
            size_t i = 0, left = (size_t)(r->end - r->p);
            while (i < 3 && (left < strlen(words[i].word) || memcmp(r->p, words[i].word, strlen(words[i].word)))) i++;
            if (i == 3) return json_fail(r, r->p, "a value");
            node->kind = (uint8_t)words[i].kind;
            r->p += strlen(words[i].word);
        }
        /* What may follow a value: the ends of what it is in, and a comma before the next one. */
        for (;;) {
            skip_blanks(r);
            if (!top) return r->p == r->end ? 0 : json_fail(r, r->p, "nothing after the value");
            c = r->p < r->end ? *r->p : -1;
            if (c == ',') break;
            if (c != (top->is_object ? '}' : ']')) return json_fail(r, r->p, top->is_object ? "',' or '}'" : "',' or ']'");
            uint32_t twin = 0;
            if (top->is_object && find_duplicate(r, top->node, &twin)) return -1;
            if (twin) {
                shown name = show_n(r->text + r->nodes[twin].key, r->nodes[twin].key_size);
                char expected[sizeof name + 64];
                snprintf(expected, sizeof expected, "different keys in this object (\"%s\" is there twice)", name.text);
                return json_fail(r, top->at, expected);
            }
            r->p++;
            depth--;
            top = depth ? &open[depth - 1] : NULL;
        }
        r->p++;
    }
}

int g4_json_parse(g4_json *j, const char *text, size_t n, const char *what, g4_error *err) {
    reader r = {0};
    r.begin = r.p = (const unsigned char *)text;
    r.end = r.begin + n;
    r.what = what;
    r.err = err;
    *j = (g4_json){0};
    if (n > JSON_MAX) return g4_fail(err, "%s: %llu bytes of JSON; at most %d are read", what, (unsigned long long)n, JSON_MAX);
    if (n >= 3 && !memcmp(text, "\xef\xbb\xbf", 3)) return json_fail(&r, r.p, "JSON without a byte order mark (save the file as plain UTF-8)");
    r.capacity = n / 16 + 16;
    r.text = malloc(n + 1);
    r.nodes = r.capacity > SIZE_MAX / sizeof *r.nodes ? NULL : malloc(r.capacity * sizeof *r.nodes);
    int failed = !r.text || !r.nodes ? g4_fail(err, "%s: out of memory for %llu bytes of JSON", what, (unsigned long long)n) : read_values(&r);
    j->text = r.text;
    j->nodes = r.nodes;
    j->n_nodes = r.n;
    if (failed) g4_json_free(j);
    return failed;
}

void g4_json_free(g4_json *j) {
    free(j->nodes);
    free(j->text);
    *j = (g4_json){0};
}

size_t g4_json_quote(char *out, const char *text, size_t n) {
    static const uint32_t least[4] = {0, 0x80, 0x800, 0x10000};
    const unsigned char *p = (const unsigned char *)text, *end = p + n;
    char *to = out;
    *to++ = '"';
    while (p < end) {
        int more = *p < 0x80 ? 0 : *p >= 0xc2 && *p < 0xe0 ? 1 : *p >= 0xe0 && *p < 0xf0 ? 2 : *p >= 0xf0 && *p < 0xf5 ? 3 : -1;
        uint32_t c = more > 0 ? *p & (0x3fu >> more) : *p;
        if (more >= end - p) more = -1;
        for (int i = 1; i <= more; i++) {
            if ((p[i] & 0xc0) != 0x80) {
                more = -1;
                break;
            }
            c = c << 6 | (p[i] & 0x3f);
        }
        if (more < 0 || c < least[more] || c > 0x10ffff || (c >= 0xd800 && c < 0xe000)) c = 0xfffd, more = 0;
        p += more + 1;
        if (c == '"' || c == '\\') *to++ = '\\', *to++ = (char)c;
        else if (c >= 0x20 && c < 0x7f) *to++ = (char)c;
        else if (c < 0x10000) to += sprintf(to, "\\u%04x", (unsigned)c);
        else to += sprintf(to, "\\u%04x\\u%04x", (unsigned)(0xd7c0 + (c >> 10)), (unsigned)(0xdc00 + (c & 0x3ff)));
    }
    *to++ = '"';
    return (size_t)(to - out);
}

uint32_t g4_json_get(const g4_json *j, uint32_t object, const char *key) {
    size_t n = strlen(key);
    if (object >= j->n_nodes || j->nodes[object].kind != G4_JSON_OBJECT) return 0;
    for (uint32_t i = j->nodes[object].first; i; i = j->nodes[i].next)
        if (j->nodes[i].key_size == n && !memcmp(j->text + j->nodes[i].key, key, n)) return i;
    return 0;
}

static int is_string(const g4_json *j, uint32_t node, const char *text) {
    return j->nodes[node].kind == G4_JSON_STRING && j->nodes[node].size == strlen(text) && !memcmp(g4_json_string(j, node), text, strlen(text));
}

/* ---- 3. Numbers ------------------------------------------------------------------------------------------------------- */

/* A number of the JSON text: 0.DIGITS x 10^point, without zeros at either end. Digits past the 800th count as one nonzero digit: that is
 * more than the 767 that decide how a double rounds. */
typedef struct decimal {
    int negative, n;
    int64_t point;
    unsigned char digits[801]; /* 0 .. 9 */
} decimal;

static void read_decimal(const char *s, decimal *d) {
    int64_t exponent = 0, sign = 1;
    int seen_point = 0;
    *d = (decimal){0};
    if (*s == '-') {
        d->negative = 1;
        s++;
    }
    for (; (*s >= '0' && *s <= '9') || *s == '.'; s++) {
        if (*s == '.') {
            seen_point = 1;
            continue;
        }
        if (d->n == 0 && *s == '0') {
            d->point -= seen_point;
            continue;
        }
        if (d->n < 800) d->digits[d->n++] = (unsigned char)(*s - '0');
        else if (*s != '0') {
            d->digits[800] = 1;
            d->n = 801;
        }
        d->point += !seen_point;
    }
    if (*s) { /* e or E */
        s++;
        if (*s == '-') sign = -1;
        if (*s == '-' || *s == '+') s++;
        for (; *s; s++)
            if (exponent < (int64_t)1 << 40) exponent = exponent * 10 + (*s - '0'); /* far more than the text has digits */
    }
    d->point += sign * exponent;
    while (d->n > 0 && d->digits[d->n - 1] == 0) d->n--;
}

int g4_json_int(const g4_json *j, uint32_t node, int64_t *value) {
    decimal d;
    uint64_t x = 0;
    if (node >= j->n_nodes || j->nodes[node].kind != G4_JSON_NUMBER) return -1;
    read_decimal(g4_json_string(j, node), &d);
    if (d.n == 0) {
        *value = 0;
        return 0;
    }
    if (d.point < d.n || d.point > 19) return -1; /* a fraction; more than 19 digits */
    for (int i = 0; i < d.point; i++) x = x * 10 + (i < d.n ? d.digits[i] : 0);
    if (x > (uint64_t)INT64_MAX + (unsigned)d.negative) return -1;
    *value = d.negative ? (int64_t)(0 - x) : (int64_t)x;
    return 0;
}

/* An unsigned integer of up to 4096 bits, the lowest word first; words above n are not used. */
typedef struct big {
    int n;
    uint32_t word[128];
} big;

static void big_mul_add(big *a, uint32_t factor, uint32_t addend) {
    uint64_t carry = addend;
    for (int i = 0; i < a->n; i++) {
        carry += (uint64_t)a->word[i] * factor;
        a->word[i] = (uint32_t)carry;
        carry >>= 32;
    }
    if (carry) a->word[a->n++] = (uint32_t)carry;
}

static void big_pow10(big *a, int64_t n) {
    for (; n >= 9; n -= 9) big_mul_add(a, 1000000000, 0);
    for (; n > 0; n--) big_mul_add(a, 10, 0);
}

static void big_shift(big *a, int bits) {
    int words = bits / 32;
    big_mul_add(a, (uint32_t)1 << bits % 32, 0);
    if (!words) return;
    memmove(a->word + words, a->word, (size_t)a->n * sizeof a->word[0]);
    memset(a->word, 0, (size_t)words * sizeof a->word[0]);
    a->n += words;
}

static int big_bits(const big *a) {
    int bits = a->n * 32;
    for (uint32_t top = a->word[a->n - 1]; !(top >> 31); top <<= 1) bits--;
    return bits;
}

static int big_compare(const big *a, const big *b) {
    if (a->n != b->n) return a->n < b->n ? -1 : 1;
    for (int i = a->n - 1; i >= 0; i--)
        if (a->word[i] != b->word[i]) return a->word[i] < b->word[i] ? -1 : 1;
    return 0;
}

static void big_subtract(big *a, const big *b) { /* a >= b */
    int64_t borrow = 0;
    for (int i = 0; i < a->n; i++) {
        int64_t x = (int64_t)a->word[i] - (i < b->n ? b->word[i] : 0) + borrow;
        a->word[i] = (uint32_t)x;
        borrow = x < 0 ? -1 : 0;
    }
    while (a->n > 0 && !a->word[a->n - 1]) a->n--;
}

/* The value is a quotient of integers num / den; scaled by a power of two into [1, 2) its bits come out one by one, exactly. strtod would
 * obey the locale, and arithmetic in double would round twice on x87. */
int g4_json_double(const g4_json *j, uint32_t node, double *value) {
    decimal d;
    big num = {0}, den = {1, {1}};
    uint64_t bits = 0;
    if (node >= j->n_nodes || j->nodes[node].kind != G4_JSON_NUMBER) return -1;
    read_decimal(g4_json_string(j, node), &d);
    if (d.n > 0 && d.point > 310) return -1; /* beyond the largest double */
    if (d.n > 0 && d.point > -330) {         /* else 0 */
        for (int i = 0; i < d.n; i++) {
            if (num.n) big_mul_add(&num, 10, d.digits[i]);
            else num = (big){1, {d.digits[i]}};
        }
        if (d.point > d.n) big_pow10(&num, d.point - d.n);
        else big_pow10(&den, d.n - d.point);
        int exponent = big_bits(&num) - big_bits(&den);
        if (exponent < 0) big_shift(&num, -exponent);
        else big_shift(&den, exponent);
        if (big_compare(&num, &den) < 0) {
            exponent--;
            big_shift(&num, 1);
        }
        /* 2^exponent <= value < 2^(exponent + 1): 53 bits are kept, fewer below 2^-1022 */
        int keep = exponent >= -1022 ? 53 : 53 - (-1022 - exponent);
        for (int i = 0; i < keep; i++) {
            bits <<= 1;
            if (big_compare(&num, &den) >= 0) {
                big_subtract(&num, &den);
                bits |= 1;
            }
            big_shift(&num, 1);
        }
        if (keep >= 0) {
            int rest = big_compare(&num, &den);
            if (exponent >= -1022) bits += (uint64_t)(exponent + 1022) << 52; /* the leading bit adds the missing 1 */
            bits += rest > 0 || (rest == 0 && (bits & 1));
        }
        if (bits >= (uint64_t)0x7ff << 52) return -1;
    }
    bits |= (uint64_t)d.negative << 63;
    memcpy(value, &bits, sizeof bits);
    return 0;
}

/* ---- 4. Files ---------------------------------------------------------------------------------------------------------
 *
 * os_open opens a regular file and nothing else; a directory, a FIFO or a device is refused, and never waited for. os_map gives NULL
 * where the system cannot map; os_read gives the bytes read, 0 at the end, -1 for an error. os_list gives the names in a directory.
 */

enum { PATH_MISSING, PATH_FILE, PATH_DIRECTORY };

#if defined(_WIN32)

typedef HANDLE os_file;

static const char *os_error(char text[256]) {
    DWORD code = GetLastError();
    wchar_t message[256];
    DWORD n = FormatMessageW(FORMAT_MESSAGE_FROM_SYSTEM | FORMAT_MESSAGE_IGNORE_INSERTS, NULL, code, 0, message, 256, NULL);
    while (n > 0 && (message[n - 1] <= ' ' || message[n - 1] == '.')) n--;
    int m = WideCharToMultiByte(CP_UTF8, 0, message, (int)n, text, 255, NULL, NULL);
    if (n == 0 || m <= 0) snprintf(text, 256, "Windows error %lu", (unsigned long)code);
    else text[m] = 0;
    return text;
}

/* A UTF-8 path as the system wants it; free it. NULL: not UTF-8, or no memory. */
static wchar_t *wide_path(const char *path) {
    int n = MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, path, -1, NULL, 0);
    wchar_t *wide = n > 0 ? malloc((size_t)n * sizeof *wide) : NULL;
    if (wide) MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, path, -1, wide, n);
    return wide;
}

static int os_kind(const char *path) {
    wchar_t *wide = wide_path(path);
    DWORD attributes = wide ? GetFileAttributesW(wide) : INVALID_FILE_ATTRIBUTES;
    free(wide);
    return attributes == INVALID_FILE_ATTRIBUTES ? PATH_MISSING : attributes & FILE_ATTRIBUTE_DIRECTORY ? PATH_DIRECTORY : PATH_FILE;
}

static int os_open(os_file *file, const char *path, uint64_t *size, g4_error *err) {
    char text[256];
    LARGE_INTEGER n;
    *file = INVALID_HANDLE_VALUE;
    wchar_t *wide = wide_path(path);
    if (!wide) return g4_fail(err, "%s: not a UTF-8 path", path);
    if (os_kind(path) == PATH_DIRECTORY) {
        free(wide);
        return g4_fail(err, "%s: is a directory; expected a file", path);
    }
    *file = CreateFileW(wide, GENERIC_READ, FILE_SHARE_READ | FILE_SHARE_DELETE, NULL, OPEN_EXISTING, FILE_ATTRIBUTE_NORMAL, NULL);
    free(wide);
    if (*file == INVALID_HANDLE_VALUE) return g4_fail(err, "%s: cannot open: %s", path, os_error(text));
    int regular = GetFileType(*file) == FILE_TYPE_DISK;
    if (!regular || !GetFileSizeEx(*file, &n)) {
        g4_fail(err, "%s: %s", path, regular ? os_error(text) : "not a regular file");
        CloseHandle(*file);
        return -1;
    }
    *size = (uint64_t)n.QuadPart;
    return 0;
}

static void os_close(os_file file) { CloseHandle(file); }

static const unsigned char *os_map(os_file file, size_t size) {
    HANDLE mapping = CreateFileMappingW(file, NULL, PAGE_READONLY, 0, 0, NULL);
    const unsigned char *data = mapping ? MapViewOfFile(mapping, FILE_MAP_READ, 0, 0, size) : NULL;
    if (mapping) CloseHandle(mapping); /* the view keeps it alive */
    return data;
}

static void os_unmap(const unsigned char *data, size_t size) {
    (void)size;
    UnmapViewOfFile(data);
}

/* PrefetchVirtualMemory: since Windows 8, so it is asked for by name. */
static void os_prefetch(const unsigned char *data, size_t size) {
    struct {
        const void *address;
        SIZE_T size;
    } range = {data, size};
    FARPROC address = GetProcAddress(GetModuleHandleA("kernel32"), "PrefetchVirtualMemory");
    BOOL(WINAPI *prefetch)(HANDLE, ULONG_PTR, void *, ULONG) = NULL;
    memcpy(&prefetch, &address, sizeof prefetch);
    if (prefetch) prefetch(GetCurrentProcess(), 1, &range, 0);
}

static void os_expect_random(const unsigned char *data, size_t size) { (void)data, (void)size; }

static uint64_t os_memory(void) {
    MEMORYSTATUSEX status = {.dwLength = sizeof status};
    return GlobalMemoryStatusEx(&status) ? status.ullTotalPhys : 0;
}

static int64_t os_read(os_file file, unsigned char *to, size_t n) {
    DWORD got = 0;
    return ReadFile(file, to, n < 1 << 30 ? (DWORD)n : 1 << 30, &got, NULL) ? (int64_t)got : -1;
}

static int os_list(const char *path, void (*each)(void *user, const char *name), void *user) {
    WIN32_FIND_DATAW found;
    char name[1024];
    size_t n = strlen(path);
    char *pattern = malloc(n + 3);
    if (!pattern) return -1;
    memcpy(pattern, path, n);
    memcpy(pattern + n, "/*", 3);
    wchar_t *wide = wide_path(pattern);
    HANDLE list = wide ? FindFirstFileW(wide, &found) : INVALID_HANDLE_VALUE;
    free(wide);
    free(pattern);
    if (list == INVALID_HANDLE_VALUE) return -1;
    do {
        if (WideCharToMultiByte(CP_UTF8, 0, found.cFileName, -1, name, sizeof name, NULL, NULL) > 0) each(user, name);
    } while (FindNextFileW(list, &found));
    FindClose(list);
    return 0;
}

#else

typedef int os_file;

static const char *os_error(char text[256]) {
    snprintf(text, 256, "%s", strerror(errno));
    return text;
}

static int os_kind(const char *path) {
    struct stat st;
    return stat(path, &st) ? PATH_MISSING : S_ISDIR(st.st_mode) ? PATH_DIRECTORY : PATH_FILE;
}

static int os_open(os_file *file, const char *path, uint64_t *size, g4_error *err) {
    char text[256];
    struct stat st;
    *file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* without O_NONBLOCK a FIFO without a writer would block here */
    if (*file < 0) return g4_fail(err, "%s: cannot open: %s", path, os_error(text));
    int known = !fstat(*file, &st);
    if (!known || !S_ISREG(st.st_mode)) {
        g4_fail(err, "%s: %s", path,
                !known                ? os_error(text)
                : S_ISDIR(st.st_mode) ? "is a directory; expected a file"
                                      : "not a regular file (a FIFO, a socket or a device)");
        close(*file);
        return -1;
    }
    *size = (uint64_t)st.st_size;
    return 0;
}

static void os_close(os_file file) { close(file); }

#if defined(__wasi__) /* has no memory mapping */
static const unsigned char *os_map(os_file file, size_t size) {
    (void)file, (void)size;
    return NULL;
}
static void os_unmap(const unsigned char *data, size_t size) { (void)data, (void)size; }
static void os_prefetch(const unsigned char *data, size_t size) { (void)data, (void)size; }
static void os_expect_random(const unsigned char *data, size_t size) { (void)data, (void)size; }
#else
static const unsigned char *os_map(os_file file, size_t size) {
    void *data = mmap(NULL, size, PROT_READ, MAP_PRIVATE, file, 0);
    return data == MAP_FAILED ? NULL : data;
}
static void os_unmap(const unsigned char *data, size_t size) { munmap((void *)data, size); }

/* Advice for the pages that hold data [size] of a mapping. It may be refused: then they are read when they are touched. */
static void advise(const unsigned char *data, size_t size, int advice) {
    long page = sysconf(_SC_PAGESIZE);
    size_t before = page > 0 ? (uintptr_t)data % (size_t)page : 0;
    (void)!posix_madvise((void *)(data - before), size + before, advice);
}

/* The system begins to read data [size]. */
static void os_prefetch(const unsigned char *data, size_t size) { advise(data, size, POSIX_MADV_WILLNEED); }

/* Here and there a little of data [size] will be read: nothing is to be read ahead. */
static void os_expect_random(const unsigned char *data, size_t size) { advise(data, size, POSIX_MADV_RANDOM); }
#endif

/* Bytes of this machine; 0: not known. */
static uint64_t os_memory(void) {
#ifdef _SC_PHYS_PAGES
    long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    if (pages > 0 && page > 0) return (uint64_t)pages * (uint64_t)page;
#endif
    return 0;
}

static int64_t os_read(os_file file, unsigned char *to, size_t n) {
    ssize_t got;
    do got = read(file, to, n < 1 << 30 ? n : 1 << 30);
    while (got < 0 && errno == EINTR);
    return got;
}

static int os_list(const char *path, void (*each)(void *user, const char *name), void *user) {
    DIR *list = opendir(path);
    if (!list) return -1;
    for (struct dirent *entry; (entry = readdir(list));) each(user, entry->d_name);
    closedir(list);
    return 0;
}

#endif

enum { PIECE = 64 << 20 }; /* bytes between two reports of progress */

static void report(const g4_options *options, const char *path, uint64_t done, uint64_t total) {
    if (options && options->progress) options->progress(options->user, path, done, total);
}

/* The size is asked for once, here; whoever shortens a mapped file afterwards stops the process that reads it (no_mmap does not). */
int g4_file_load(g4_file *f, const char *path, const g4_options *options, g4_error *err) {
    char text[256];
    os_file file = 0;
    uint64_t size = 0;
    const int no_mmap = options && options->no_mmap;
    *f = (g4_file){0};
    if (os_open(&file, path, &size, err)) return -1;
    int failed = 0;
    if (size > PTRDIFF_MAX) {
        failed = g4_fail(err, "%s: %llu bytes do not fit the address space of this machine", path, (unsigned long long)size);
    } else if (size > 0 && !no_mmap && (f->data = os_map(file, (size_t)size))) {
        f->mapped = 1;
    } else {
        os_error(text); /* of the mapping, if that was tried */
        unsigned char *data = malloc(size ? (size_t)size : 1);
        size_t have = 0;
        int64_t got = 1;
        while (data && have < size && (got = os_read(file, data + have, (size_t)MIN(size - have, PIECE))) > 0) {
            have += (size_t)got;
            report(options, path, have, size);
        }
        if (!data)
            failed = g4_fail(err, "%s: no memory for its %llu bytes%s%s", path, (unsigned long long)size,
                             no_mmap ? "" : ", and it cannot be mapped: ", no_mmap ? "" : text);
        else if (got < 0) failed = g4_fail(err, "%s: cannot read: %s", path, os_error(text));
        else if (have < size)
            failed = g4_fail(err, "%s: ends after %llu bytes; it had %llu when it was opened", path, (unsigned long long)have,
                             (unsigned long long)size);
        if (failed) free(data);
        else f->data = data;
    }
    if (!failed) f->size = (size_t)size;
    os_close(file);
    return failed;
}

int g4_path_is_file(const char *path) { return os_kind(path) == PATH_FILE; }
int g4_file_open(g4_file *f, const char *path, int no_mmap, g4_error *err) { return g4_file_load(f, path, &(g4_options){.no_mmap = no_mmap}, err); }

void g4_file_close(g4_file *f) {
    if (f->mapped) os_unmap(f->data, f->size);
    else free((void *)f->data);
    *f = (g4_file){0};
}

/* By its first bytes: Ollama's files have no suffix. */
int g4_is_gguf(const char *path) {
    os_file file;
    uint64_t size;
    unsigned char magic[4];
    if (os_open(&file, path, &size, NULL)) return 0;
    int yes = os_read(file, magic, 4) == 4 && !memcmp(magic, "GGUF", 4);
    os_close(file);
    return yes;
}

/* DIRECTORY/NAME; free it. */
static char *join_path(const char *directory, const char *name) {
    size_t n = strlen(directory), m = strlen(name);
    char *path = malloc(n + m + 2);
    if (!path) return NULL;
    memcpy(path, directory, n);
    if (n > 0 && directory[n - 1] != '/') path[n++] = '/';
    memcpy(path + n, name, m + 1);
    return path;
}

/* ---- 5. safetensors --------------------------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    int bits;
} st_types[] = {{"BOOL", 8},    {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},   {"I8", 8},   {"F8_E5M2", 8},
                {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16}, {"BF16", 16}, {"I32", 32},
                {"U32", 32},    {"F32", 32},    {"C64", 64},    {"F64", 64},    {"I64", 64}, {"U64", 64}};

enum { ST_HEADER_MAX = 100000000, ST_TYPES = sizeof st_types / sizeof st_types[0] };

/* "[320,48]" */
static shown show_shape(int rank, const int64_t *shape) {
    shown out = {"["};
    size_t n = 1;
    for (int i = 0; i < rank && n < sizeof out.text - 24; i++)
        n += (size_t)snprintf(out.text + n, sizeof out.text - n, i ? ",%lld" : "%lld", (long long)shape[i]);
    snprintf(out.text + n, sizeof out.text - n, "]");
    return out;
}

/* A size as safetensors has it: decimal digits alone, no sign, point or exponent. */
static int read_size(const g4_json *j, uint32_t node, int64_t *value) {
    const char *s = g4_json_string(j, node);
    return j->nodes[node].kind != G4_JSON_NUMBER || strspn(s, "0123456789") != j->nodes[node].size || g4_json_int(j, node, value) ? -1 : 0;
}

/* One member of the header, all but its place in the data: that is in `range` [2]. */
static int read_st_tensor(const g4_json *j, uint32_t node, g4_st_tensor *t, int64_t *range, const char *path, g4_error *err) {
    const g4_json_node *nodes = j->nodes;
    shown name = show_n(t->name, nodes[node].key_size);
    if (strlen(t->name) != nodes[node].key_size) return g4_fail(err, "%s: the name of tensor %s... holds a NUL byte", path, name.text);
    uint32_t type = g4_json_get(j, node, "dtype"), shape = g4_json_get(j, node, "shape"), offsets = g4_json_get(j, node, "data_offsets");
    if (!type || nodes[type].kind != G4_JSON_STRING || !shape || nodes[shape].kind != G4_JSON_ARRAY || !offsets ||
        nodes[offsets].kind != G4_JSON_ARRAY)
        return g4_fail(err, "%s: tensor %s: expected an object with dtype (string), shape and data_offsets (arrays)", path, name.text);
    int known = 0;
    while (known < ST_TYPES && !is_string(j, type, st_types[known].name)) known++;
    if (known == ST_TYPES) return g4_fail(err, "%s: tensor %s: unknown dtype \"%s\"", path, name.text, show(g4_json_string(j, type)).text);
    snprintf(t->dtype, sizeof t->dtype, "%s", st_types[known].name);

    int64_t bits = st_types[known].bits;
    if (nodes[shape].size > 8)
        return g4_fail(err, "%s: tensor %s has %u dimensions; at most 8 are read", path, name.text, (unsigned)nodes[shape].size);
    for (uint32_t i = nodes[shape].first; i; i = nodes[i].next) {
        int64_t *size = &t->shape[t->rank++];
        if (read_size(j, i, size)) return g4_fail(err, "%s: tensor %s: dimension %d of its shape is not a size", path, name.text, t->rank - 1);
        if (*size > 0 && bits > INT64_MAX / *size) return g4_fail(err, "%s: tensor %s: its shape is larger than 2^63 bits", path, name.text);
        bits *= *size;
    }
    uint32_t first = nodes[offsets].first;
    if (nodes[offsets].size != 2 || read_size(j, first, &range[0]) || read_size(j, nodes[first].next, &range[1]) || range[0] > range[1])
        return g4_fail(err, "%s: tensor %s: data_offsets: expected [begin,end], two sizes, begin <= end", path, name.text);
    if (bits % 8 || range[1] - range[0] != bits / 8)
        return g4_fail(err, "%s: tensor %s: %s %s takes %lld bytes, but its data_offsets [%lld,%lld] hold %lld", path, name.text, t->dtype,
                       show_shape(t->rank, t->shape).text, (long long)(bits / 8 + (bits % 8 != 0)), (long long)range[0], (long long)range[1],
                       (long long)(range[1] - range[0]));
    return 0;
}

static int compare_ranges(const void *context, uint32_t a, uint32_t b) {
    const int64_t *x = (const int64_t *)context + 2 * (size_t)a, *y = (const int64_t *)context + 2 * (size_t)b;
    return x[0] != y[0] ? (x[0] < y[0] ? -1 : 1) : x[1] != y[1] ? (x[1] < y[1] ? -1 : 1) : 0;
}

static int compare_st_names(const void *context, uint32_t a, uint32_t b) {
    const g4_st_tensor *t = context;
    return strcmp(t[a].name, t[b].name);
}

/* The tensors by name: numbers that stand behind the array itself, in the same allocation. */
static uint32_t *st_order(const g4_safetensors *st) { return (uint32_t *)(st->tensors + st->n); }

/* Fills tensors from the header. range [n][2] and order [n] are scratch. */
static int read_st_header(g4_safetensors *st, const g4_json *j, int64_t *range, uint32_t *order, const unsigned char *data, size_t size,
                          const char *path, g4_error *err) {
    uint32_t n = 0;
    for (uint32_t i = j->nodes[0].first; i; i = j->nodes[i].next) {
        const char *key = j->text + j->nodes[i].key;
        if (j->nodes[i].key_size == 12 && !memcmp(key, "__metadata__", 12)) {
            int strings = j->nodes[i].kind == G4_JSON_OBJECT || j->nodes[i].kind == G4_JSON_NULL;
            for (uint32_t k = strings ? j->nodes[i].first : 0; k; k = j->nodes[k].next) strings &= j->nodes[k].kind == G4_JSON_STRING;
            if (!strings) return g4_fail(err, "%s: __metadata__: expected an object of strings", path);
            continue;
        }
        st->tensors[n] = (g4_st_tensor){.name = key};
        if (read_st_tensor(j, i, &st->tensors[n], range + 2 * (size_t)n, path, err)) return -1;
        order[n] = n;
        n++;
    }
    g4_sort(order, n, compare_ranges, range);
    int64_t end = 0;
    for (uint32_t i = 0; i < n; i++) {
        const int64_t *r = range + 2 * (size_t)order[i];
        if (r[0] != end)
            return g4_fail(err, "%s: tensor %s begins at byte %lld of the data, but the one before it ends at %lld: %s", path,
                           show(st->tensors[order[i]].name).text, (long long)r[0], (long long)end,
                           r[0] < end ? "they overlap" : "there is a gap");
        end = r[1];
    }
    if ((uint64_t)end > size)
        return g4_fail(err, "%s: the header promises %lld bytes of data, the file holds %llu: %llu bytes are missing (incomplete download?)",
                       path, (long long)end, (unsigned long long)size, (unsigned long long)((uint64_t)end - size));
    if ((uint64_t)end < size)
        return g4_fail(err, "%s: %llu bytes follow the data of the last tensor; expected the end of the file", path,
                       (unsigned long long)(size - (uint64_t)end));
    for (uint32_t i = 0; i < n; i++) {
        st->tensors[i].data = data + range[2 * (size_t)i];
        st->tensors[i].bytes = (size_t)(range[2 * (size_t)i + 1] - range[2 * (size_t)i]);
    }
    return 0;
}

int g4_safetensors_parse(g4_safetensors *st, const unsigned char *data, size_t size, const char *path, g4_error *err) {
    *st = (g4_safetensors){0};
    g4_json j = {0};
    int64_t *range = NULL;
    uint32_t *order = NULL;
    uint64_t header = 0;
    for (size_t i = 0; i < 8 && i < size; i++) header |= (uint64_t)data[i] << 8 * i;
    if (size < 8) {
        g4_fail(err, "%s: %llu bytes; a safetensors file begins with 8 bytes that give the length of its header", path, (unsigned long long)size);
        goto fail;
    }
    if (header > ST_HEADER_MAX) {
        g4_fail(err, "%s: a header of %llu bytes; at most %d are allowed (not a safetensors file?)", path, (unsigned long long)header,
                ST_HEADER_MAX);
        goto fail;
    }
    if (header > size - 8) {
        g4_fail(err, "%s: the header has %llu bytes, but only %llu follow: %llu bytes are missing (incomplete download?)", path,
                (unsigned long long)header, (unsigned long long)(size - 8), (unsigned long long)(header - (size - 8)));
        goto fail;
    }
    if (header == 0 || data[8] != '{') {
        g4_fail(err, "%s: the header does not begin with '{' (not a safetensors file?)", path);
        goto fail;
    }
    char what[512];
    snprintf(what, sizeof what, "%s: header", path);
    if (g4_json_parse(&j, (const char *)data + 8, (size_t)header, what, err)) goto fail;
    size_t n = j.nodes[0].size; /* at most one too many: __metadata__ */
    for (uint32_t i = j.nodes[0].first; i; i = j.nodes[i].next) {
        int64_t place[2];
        int is_metadata = j.nodes[i].key_size == 12 && !memcmp(j.text + j.nodes[i].key, "__metadata__", 12);
        /* Once for nothing: members that are no tensors may be tiny, and many, and would be given much memory before they are refused. */
        if (!is_metadata && read_st_tensor(&j, i, &(g4_st_tensor){.name = j.text + j.nodes[i].key}, place, path, err)) goto fail;
        n -= (size_t)is_metadata;
    }
    st->n = (int)n; /* a member takes more than 40 of at most 100 MB */
    st->tensors = malloc((n + 1) * (sizeof *st->tensors + sizeof(uint32_t)));
    range = malloc((n + 1) * 2 * sizeof *range);
    order = malloc((n + 1) * sizeof *order);
    if (!st->tensors || !range || !order) {
        g4_fail(err, "%s: no memory for the names of %llu tensors", path, (unsigned long long)n);
        goto fail;
    }
    if (read_st_header(st, &j, range, order, data + 8 + header, (size_t)(size - 8 - header), path, err)) goto fail;
    g4_sort(order, (uint32_t)n, compare_st_names, st->tensors);
    memcpy(st_order(st), order, n * sizeof *order);
    st->names = j.text; /* the names lie in it */
    j.text = NULL;
    g4_json_free(&j);
    free(range);
    free(order);
    return 0;
fail:
    g4_json_free(&j);
    free(range);
    free(order);
    g4_safetensors_close(st);
    return -1;
}

int g4_safetensors_open(g4_safetensors *st, const char *path, int no_mmap, g4_error *err) {
    g4_file file;
    *st = (g4_safetensors){0};
    if (g4_file_open(&file, path, no_mmap, err)) return -1;
    int failed = g4_safetensors_parse(st, file.data, file.size, path, err);
    if (failed) g4_file_close(&file);
    else st->file = file;
    return failed;
}

void g4_safetensors_close(g4_safetensors *st) {
    g4_file_close(&st->file);
    free(st->tensors);
    free(st->names);
    *st = (g4_safetensors){0};
}

const g4_st_tensor *g4_safetensors_find(const g4_safetensors *st, const char *name) {
    for (int low = 0, high = st->n; low < high;) {
        int middle = low + (high - low) / 2;
        const g4_st_tensor *t = &st->tensors[st_order(st)[middle]];
        int order = strcmp(name, t->name);
        if (order == 0) return t;
        if (order < 0) high = middle;
        else low = middle + 1;
    }
    return NULL;
}

/* ---- 6. config.json and generation_config.json ------------------------------------------------------------------------ */

enum { LAYERS_MAX = 4096, CONFIG_MAX = 16 << 20 };

/* An object of a parsed text, and how messages call it. */
typedef struct section {
    const g4_json *j;
    uint32_t object;
    const char *file, *prefix; /* "DIR/config.json", "text_config." */
    g4_error *err;
} section;

/* What stands at a node, for a message. */
static shown show_value(const g4_json *j, uint32_t node) {
    shown out;
    switch (j->nodes[node].kind) {
    case G4_JSON_NULL: return show("null");
    case G4_JSON_FALSE: return show("false");
    case G4_JSON_TRUE: return show("true");
    case G4_JSON_NUMBER: return show_n(g4_json_string(j, node), j->nodes[node].size);
    case G4_JSON_STRING:
        snprintf(out.text, sizeof out.text, "\"%.130s\"", show_n(g4_json_string(j, node), j->nodes[node].size).text);
        return out;
    case G4_JSON_ARRAY: snprintf(out.text, sizeof out.text, "an array of %u", (unsigned)j->nodes[node].size); return out;
    default: snprintf(out.text, sizeof out.text, "an object of %u", (unsigned)j->nodes[node].size); return out;
    }
}

/* "FILE: text_config.KEY: expected ..., found ..." */
static int wrong(const section *s, const char *key, uint32_t node, const char *expected) {
    return g4_fail(s->err, "%s: %s%s: expected %s, found %s", s->file, s->prefix, key, expected, show_value(s->j, node).text);
}

/* The member, or 0 where it is absent or, if that means the same, null. */
static uint32_t member(const section *s, const char *key, int or_null) {
    uint32_t node = g4_json_get(s->j, s->object, key);
    return node && or_null && s->j->nodes[node].kind == G4_JSON_NULL ? 0 : node;
}

/* The readers below leave *value as it is, the default, when the key is absent. */

static int read_int(const section *s, const char *key, uint32_t node, int lowest, int highest, int *value) {
    int64_t x;
    char expected[64];
    if (!node) return 0;
    if (g4_json_int(s->j, node, &x) || x < lowest || x > highest) {
        snprintf(expected, sizeof expected, "an integer from %d to %d", lowest, highest);
        return wrong(s, key, node, expected);
    }
    *value = (int)x;
    return 0;
}

static int read_bool(const section *s, const char *key, int *value) {
    uint32_t node = member(s, key, 0);
    if (!node) return 0;
    if (s->j->nodes[node].kind != G4_JSON_TRUE && s->j->nodes[node].kind != G4_JSON_FALSE) return wrong(s, key, node, "true or false");
    *value = s->j->nodes[node].kind == G4_JSON_TRUE;
    return 0;
}

/* lowest <= value <= highest; `expected` says so in words. */
static int read_double(const section *s, const char *key, uint32_t node, double lowest, double highest, const char *expected, double *value) {
    double x;
    if (!node) return 0;
    if (g4_json_double(s->j, node, &x) || !(x >= lowest && x <= highest)) return wrong(s, key, node, expected);
    *value = x;
    return 0;
}

static int read_float(const section *s, const char *key, uint32_t node, double lowest, double highest, const char *expected, float *value) {
    double x = *value;
    if (read_double(s, key, node, lowest, highest, expected, &x)) return -1;
    *value = (float)x;
    return 0;
}

/* One id, or a list of at most `room`. Those outside the vocabulary never occur: they are left out, aloud. */
static int read_ids(const section *s, const char *key, const g4_config *c, const g4_options *options, int room, int32_t *ids, int *n) {
    uint32_t node = member(s, key, 1);
    char expected[64];
    if (!node) return 0;
    int list = s->j->nodes[node].kind == G4_JSON_ARRAY;
    snprintf(expected, sizeof expected, "a token id, or a list of at most %d", room);
    *n = 0;
    for (uint32_t i = list ? s->j->nodes[node].first : node; i; i = list ? s->j->nodes[i].next : 0) {
        int64_t id;
        if (g4_json_int(s->j, i, &id) || id < 0 || *n == room) return wrong(s, key, *n == room ? node : i, expected);
        if (id < c->vocab_size) ids[(*n)++] = (int32_t)id;
        else g4_warn(options, "%s: %s%s: token id %lld is left out: vocab_size is %d", s->file, s->prefix, key, (long long)id, c->vocab_size);
    }
    return 0;
}

/* The sizes with their defaults: those of transformers' Gemma4TextConfig and, for gemma4_unified, Gemma4UnifiedTextConfig. The bounds only
 * keep products of two sizes inside an int; what a size must really be, the tensors say. */
static const struct {
    const char *key;
    size_t field;
    int fallback, unified, lowest, highest;
} sizes[] = {
    {"vocab_size", offsetof(g4_config, vocab_size), 262144, 262144, 1, 1 << 24},
    {"vocab_size_per_layer_input", offsetof(g4_config, vocab_size_per_layer_input), 262144, 262144, 1, 1 << 24},
    {"hidden_size", offsetof(g4_config, hidden_size), 2304, 2304, 1, 1 << 18},
    {"num_hidden_layers", offsetof(g4_config, num_hidden_layers), 30, 30, 1, LAYERS_MAX},
    {"num_attention_heads", offsetof(g4_config, num_attention_heads), 8, 8, 1, 4096},
    {"hidden_size_per_layer_input", offsetof(g4_config, hidden_size_per_layer_input), 256, 0, 0, 1 << 16},
    {"sliding_window", offsetof(g4_config, sliding_window), 512, 1024, 1, 1 << 30},
    {"max_position_embeddings", offsetof(g4_config, max_position_embeddings), 131072, 262144, 1, 1 << 30},
    {"num_kv_shared_layers", offsetof(g4_config, num_kv_shared_layers), 0, 0, 0, LAYERS_MAX},
};
enum { N_SIZES = sizeof sizes / sizeof sizes[0], HEADS_MAX = 4096, HEAD_DIM_MAX = 1 << 16, WIDTH_MAX = 1 << 24 };

/* Things that other models have and that this program would compute wrongly. */
static int refuse_foreign(const section *s) {
    uint32_t node = member(s, "hidden_activation", 0);
    if (node && !is_string(s->j, node, "gelu_pytorch_tanh")) return wrong(s, "hidden_activation", node, "\"gelu_pytorch_tanh\"");
    node = member(s, "attention_bias", 0);
    if (node && s->j->nodes[node].kind != G4_JSON_FALSE) return wrong(s, "attention_bias", node, "false (there are no biases in Gemma 4)");
    node = member(s, "use_bidirectional_attention", 1); /* "vision" concerns image tokens only */
    if (node && !is_string(s->j, node, "vision")) return wrong(s, "use_bidirectional_attention", node, "null or \"vision\"");
    node = member(s, "quantization_config", 1);
    if (node) return wrong(s, "quantization_config", node, "none (only BF16, F16 and F32 weights are read; convert the checkpoint)");
    return 0;
}

static int read_layer_types(const section *s, g4_config *c, const g4_options *options) {
    int L = c->num_hidden_layers, i = 0;
    uint32_t node = member(s, "layer_types", 1);
    char expected[64];
    for (i = 0; i < L; i++) c->layers[i].type = (i + 1) % 6 ? G4_SLIDING_ATTENTION : G4_FULL_ATTENTION;
    if (node) {
        snprintf(expected, sizeof expected, "an array of %d, num_hidden_layers", L);
        if (s->j->nodes[node].kind != G4_JSON_ARRAY || s->j->nodes[node].size != (uint32_t)L) return wrong(s, "layer_types", node, expected);
        i = 0;
        for (uint32_t item = s->j->nodes[node].first; item; item = s->j->nodes[item].next, i++) {
            int sliding = is_string(s->j, item, "sliding_attention");
            char key[32];
            snprintf(key, sizeof key, "layer_types[%d]", i);
            if (!sliding && !is_string(s->j, item, "full_attention")) return wrong(s, key, item, "\"sliding_attention\" or \"full_attention\"");
            c->layers[i].type = sliding ? G4_SLIDING_ATTENTION : G4_FULL_ATTENTION;
        }
    }
    if (c->layers[L - 1].type != G4_FULL_ATTENTION) {
        g4_warn(options, "%s: %slayer_types: the last layer is sliding_attention; it is forced to full_attention, as transformers does", s->file,
             s->prefix);
        c->layers[L - 1].type = G4_FULL_ATTENTION;
    }
    return 0;
}

/* head_dim and num_key_value_heads of each layer, in either spelling. */
static int read_heads(const section *s, g4_config *c) {
    int head_dim = 256, kv_heads = 4, global_head_dim = 512, global_kv_heads;
    if (read_int(s, "head_dim", member(s, "head_dim", 0), 2, HEAD_DIM_MAX, &head_dim)) return -1;
    if (read_int(s, "num_key_value_heads", member(s, "num_key_value_heads", 0), 1, HEADS_MAX, &kv_heads)) return -1;
    uint32_t overrides = member(s, "per_layer_config", 0);
    if (!overrides) {
        global_kv_heads = kv_heads;
        if (read_int(s, "global_head_dim", member(s, "global_head_dim", 0), 2, HEAD_DIM_MAX, &global_head_dim)) return -1;
        uint32_t node = c->attention_k_eq_v ? member(s, "num_global_key_value_heads", 1) : 0;
        if (read_int(s, "num_global_key_value_heads", node, 1, HEADS_MAX, &global_kv_heads)) return -1;
    } else { /* it alone decides: a layer that is not in it is like any other */
        global_head_dim = head_dim;
        global_kv_heads = kv_heads;
    }
    for (int i = 0; i < c->num_hidden_layers; i++) {
        int full = c->layers[i].type == G4_FULL_ATTENTION;
        c->layers[i].head_dim = full ? global_head_dim : head_dim;
        c->layers[i].num_key_value_heads = full ? global_kv_heads : kv_heads;
    }
    const g4_json_node *nodes = s->j->nodes;
    if (!overrides || nodes[overrides].kind == G4_JSON_NULL) return 0;
    if (nodes[overrides].kind != G4_JSON_OBJECT) return wrong(s, "per_layer_config", overrides, "an object");
    unsigned char seen[LAYERS_MAX] = {0};
    for (uint32_t node = nodes[overrides].first; node; node = nodes[node].next) {
        const char *number = s->j->text + nodes[node].key;
        shown name = show_n(number, nodes[node].key_size);
        int layer = 0;
        char key[sizeof name + 64];
        for (uint32_t i = 0; i < nodes[node].key_size && layer < LAYERS_MAX; i++)
            layer = number[i] < '0' || number[i] > '9' ? LAYERS_MAX : layer * 10 + (number[i] - '0');
        if (nodes[node].key_size == 0 || layer >= c->num_hidden_layers || seen[layer]++)
            return g4_fail(s->err, "%s: %sper_layer_config: key \"%s\": expected the number of a layer, 0 to %d, once each", s->file, s->prefix,
                           name.text, c->num_hidden_layers - 1);
        snprintf(key, sizeof key, "per_layer_config.%s", name.text);
        if (nodes[node].kind != G4_JSON_OBJECT) return wrong(s, key, node, "an object");
        for (uint32_t item = nodes[node].first; item; item = nodes[item].next) {
            const char *inner = s->j->text + nodes[item].key;
            int is_dim = nodes[item].key_size == 8 && !memcmp(inner, "head_dim", 8);
            snprintf(key, sizeof key, "per_layer_config.%d.%s", layer, is_dim ? "head_dim" : "num_key_value_heads");
            if (!is_dim && !(nodes[item].key_size == 19 && !memcmp(inner, "num_key_value_heads", 19)))
                return g4_fail(s->err, "%s: %sper_layer_config.%d: key \"%s\": expected head_dim or num_key_value_heads", s->file, s->prefix,
                               layer, show_n(inner, nodes[item].key_size).text);
            if (read_int(s, key, item, is_dim ? 2 : 1, is_dim ? HEAD_DIM_MAX : HEADS_MAX,
                         is_dim ? &c->layers[layer].head_dim : &c->layers[layer].num_key_value_heads))
                return -1;
        }
    }
    return 0;
}

/* rope_parameters, for the layer types that occur. */
static int read_rope(const section *s, g4_config *c, const g4_options *options) {
    static const char *const names[2] = {"sliding_attention", "full_attention"};
    c->rope[G4_SLIDING_ATTENTION] = (g4_rope_config){.theta = 1e4, .factor = 1, .proportional = 0, .partial_rotary_factor = 1};
    c->rope[G4_FULL_ATTENTION] = (g4_rope_config){.theta = 1e6, .factor = 1, .proportional = 1, .partial_rotary_factor = 0.25};
    uint32_t all = member(s, "rope_parameters", 1);
    if (!all) return 0;
    if (s->j->nodes[all].kind != G4_JSON_OBJECT) return wrong(s, "rope_parameters", all, "an object");
    for (int type = 0; type < 2; type++) {
        int used = 0;
        char key[64];
        g4_rope_config *rope = &c->rope[type];
        for (int i = 0; i < c->num_hidden_layers; i++) used |= (int)c->layers[i].type == type;
        if (!used) continue;
        uint32_t node = g4_json_get(s->j, all, names[type]);
        snprintf(key, sizeof key, "rope_parameters.%s", names[type]);
        if (!node)
            return g4_fail(s->err,
                           "%s: %s%s: is missing; expected one object for each layer type (sliding_attention, full_attention), not one for all",
                           s->file, s->prefix, key);
        if (s->j->nodes[node].kind != G4_JSON_OBJECT) return wrong(s, key, node, "an object");
        section r = *s;
        char prefix[96];
        snprintf(prefix, sizeof prefix, "%s%s.", s->prefix, key);
        r.object = node;
        r.prefix = prefix;
        *rope = (g4_rope_config){.factor = 1, .partial_rotary_factor = 1};
        const char *spelled =
            member(&r, "rope_type", 0) || !member(&r, "type", 0) ? "rope_type" : "type"; /* the older name, which transformers reads too */
        uint32_t kind = member(&r, spelled, 0);
        if (kind && is_string(r.j, kind, "proportional")) rope->proportional = 1;
        else if (kind && !is_string(r.j, kind, "default")) return wrong(&r, spelled, kind, "\"default\" or \"proportional\"");
        if (!member(&r, "rope_theta", 0)) return g4_fail(s->err, "%s: %srope_theta: is missing", s->file, prefix);
        double factor = 1;
        if (read_double(&r, "rope_theta", member(&r, "rope_theta", 0), 1e-3, 1e30, "a number from 0.001 to 1e30", &rope->theta)) return -1;
        if (read_double(&r, "factor", member(&r, "factor", 0), 1e-3, 1e6, "a number from 0.001 to 1e6", &factor)) return -1;
        if (read_double(&r, "partial_rotary_factor", member(&r, "partial_rotary_factor", 0), 0, 1, "a number from 0 to 1",
                        &rope->partial_rotary_factor))
            return -1;
        if (rope->proportional) rope->factor = factor;
        else if (factor != 1 || rope->partial_rotary_factor != 1)
            g4_warn(options, "%s: %srope_type default: factor and partial_rotary_factor are not used, as in transformers", s->file, prefix);
    }
    return 0;
}

/* Widths and donors, and what must fit together. */
static int finish_layers(const section *s, g4_config *c, int intermediate_size) {
    int L = c->num_hidden_layers, first_shared = L - c->num_kv_shared_layers;
    int last[2] = {-1, -1}, reference[2] = {-1, -1}; /* by layer type: the last layer with K/V of its own; the first layer */
    for (int i = 0; i < L; i++) {
        g4_layer_config *l = &c->layers[i];
        const char *type = l->type == G4_FULL_ATTENTION ? "full_attention" : "sliding_attention";
        if (reference[l->type] < 0) reference[l->type] = i;
        const g4_layer_config *first = &c->layers[reference[l->type]];
        if (l->head_dim != first->head_dim || l->num_key_value_heads != first->num_key_value_heads)
            return g4_fail(s->err,
                           "%s: %sper_layer_config: layers %d and %d are both %s, but head_dim is %d and %d, num_key_value_heads %d and %d",
                           s->file, s->prefix, reference[l->type], i, type, first->head_dim, l->head_dim, first->num_key_value_heads,
                           l->num_key_value_heads);
        if (c->num_attention_heads % l->num_key_value_heads)
            return g4_fail(s->err, "%s: %snum_attention_heads %d is not a multiple of the %d num_key_value_heads of layer %d (%s)", s->file,
                           s->prefix, c->num_attention_heads, l->num_key_value_heads, i, type);
        if (l->head_dim % 2)
            return g4_fail(s->err, "%s: %shead_dim %d of layer %d (%s) is odd; RoPE rotates pairs", s->file, s->prefix, l->head_dim, i, type);
        if (i < first_shared) last[l->type] = i;
        l->kv_layer = i < first_shared ? i : last[l->type];
        l->intermediate_size = intermediate_size * (i >= first_shared && c->use_double_wide_mlp ? 2 : 1);
    }
    for (int type = 0; type < 2; type++)
        if (c->num_kv_shared_layers && (last[type] < 0) != (reference[type] < 0))
            return g4_fail(
                s->err,
                "%s: %snum_kv_shared_layers %d: no layer before layer %d is %s, so the %s layers after it have nobody to share K/V with",
                s->file, s->prefix, c->num_kv_shared_layers, first_shared, type ? "full_attention" : "sliding_attention",
                type ? "full_attention" : "sliding_attention");
    return 0;
}

/* The text model's part, `s`. */
static int read_text_config(const section *s, int unified, g4_config *c, const g4_options *options) {
    int intermediate_size = 9216, moe = 0;
    if (refuse_foreign(s)) return -1;
    for (int i = 0; i < N_SIZES; i++) {
        int value = unified ? sizes[i].unified : sizes[i].fallback;
        if (read_int(s, sizes[i].key, member(s, sizes[i].key, 0), sizes[i].lowest, sizes[i].highest, &value)) return -1;
        memcpy((char *)c + sizes[i].field, &value, sizeof value);
    }
    if (read_int(s, "intermediate_size", member(s, "intermediate_size", 0), 1, WIDTH_MAX, &intermediate_size)) return -1;
    if (c->num_kv_shared_layers >= c->num_hidden_layers)
        return g4_fail(s->err, "%s: %snum_kv_shared_layers: expected less than num_hidden_layers %d, found %d", s->file, s->prefix,
                       c->num_hidden_layers, c->num_kv_shared_layers);
    if (read_bool(s, "attention_k_eq_v", &c->attention_k_eq_v) || read_bool(s, "use_double_wide_mlp", &c->use_double_wide_mlp)) return -1;
    if (read_bool(s, "enable_moe_block", &moe)) return -1;
    if (unified && (moe || c->hidden_size_per_layer_input)) { /* transformers takes no notice of the keys: the class lacks them */
        g4_warn(options,
             "%s: %s: gemma4_unified has no experts and no per-layer inputs; enable_moe_block and hidden_size_per_layer_input are not used",
             s->file, moe ? "enable_moe_block" : "hidden_size_per_layer_input");
        c->hidden_size_per_layer_input = moe = 0;
    }
    if (moe) {
        const struct {
            const char *key;
            int highest, *value;
        } moe_sizes[] = {{"num_experts", 1 << 16, &c->num_experts}, {"top_k_experts", 1 << 16, &c->top_k_experts},
                         {"moe_intermediate_size", WIDTH_MAX, &c->moe_intermediate_size}};
        for (int i = 0; i < 3; i++) {
            if (!member(s, moe_sizes[i].key, 1))
                return g4_fail(s->err, "%s: %s%s: is missing; enable_moe_block needs it", s->file, s->prefix, moe_sizes[i].key);
            if (read_int(s, moe_sizes[i].key, member(s, moe_sizes[i].key, 0), 1, moe_sizes[i].highest, moe_sizes[i].value)) return -1;
        }
        if (c->top_k_experts > c->num_experts)
            return g4_fail(s->err, "%s: %stop_k_experts: expected at most num_experts %d, found %d", s->file, s->prefix, c->num_experts,
                           c->top_k_experts);
    }
    c->rms_norm_eps = 1e-6f;
    if (read_float(s, "rms_norm_eps", member(s, "rms_norm_eps", 0), 1e-30, 1, "a number from 1e-30 to 1", &c->rms_norm_eps)) return -1;
    if (read_float(s, "final_logit_softcapping", member(s, "final_logit_softcapping", 1), 1e-6, 1e30, "a number above 0 (1e-6 to 1e30), or null",
                   &c->final_logit_softcapping))
        return -1;
    c->layers = calloc((size_t)c->num_hidden_layers, sizeof *c->layers);
    if (!c->layers) return g4_fail(s->err, "%s: no memory for %d layers", s->file, c->num_hidden_layers);
    return read_layer_types(s, c, options) || read_heads(s, c) || read_rope(s, c, options) || finish_layers(s, c, intermediate_size) ? -1 : 0;
}

static int read_config(const section *root, g4_config *c, const g4_options *options) {
    static const char *const known[] = {"gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"};
    const char *const expected = "one of gemma4, gemma4_text, gemma4_unified, gemma4_unified_text (this program runs no other architecture)";
    const g4_json *j = root->j;
    int which = 0, inner = 0;
    if (j->nodes[0].kind != G4_JSON_OBJECT) return g4_fail(root->err, "%s: expected an object, found %s", root->file, show_value(j, 0).text);
    uint32_t type = member(root, "model_type", 0);
    if (!type) return g4_fail(root->err, "%s: model_type: is missing; expected %s", root->file, expected);
    while (which < 4 && !is_string(j, type, known[which])) which++;
    if (which == 4) return wrong(root, "model_type", type, expected);
    snprintf(c->model_type, sizeof c->model_type, "%s", known[which]);

    section text = *root;
    uint32_t nested = member(root, "text_config", 1);
    c->tie_word_embeddings = 1;
    c->do_sample = 1;
    c->top_k = 64;
    c->top_p = 0.95f;
    c->temperature = 1;
    if (nested) {
        if (j->nodes[nested].kind != G4_JSON_OBJECT) return wrong(root, "text_config", nested, "an object");
        text.object = nested;
        text.prefix = "text_config.";
        type = member(&text, "model_type", 1);
        while (type && inner < 4 && !is_string(j, type, known[inner])) inner++;
        if (type && (inner == 4 || inner / 2 != which / 2))
            return wrong(&text, "model_type", type, which < 2 ? "gemma4_text" : "gemma4_unified_text");
        if (refuse_foreign(root)) return -1;
        if (read_bool(&text, "tie_word_embeddings", &c->tie_word_embeddings)) return -1; /* the outer one, below, has the last word */
    }
    if (read_bool(root, "tie_word_embeddings", &c->tie_word_embeddings)) return -1;
    if (read_text_config(&text, which >= 2, c, options)) return -1;
    c->eos_token_id[0] = 1;
    c->n_eos = c->vocab_size > 1; /* the default, where there is such a token */
    if (read_ids(&text, "eos_token_id", c, options, 16, c->eos_token_id, &c->n_eos)) return -1;
    return nested && read_ids(root, "eos_token_id", c, options, 16, c->eos_token_id, &c->n_eos) ? -1 : 0;
}

int g4_config_parse(g4_config *config, const char *json, size_t n, const char *what, const g4_options *options, g4_error *err) {
    g4_json j;
    *config = (g4_config){0};
    if (g4_json_parse(&j, json, n, what, err)) return -1;
    section root = {&j, 0, what, "", err};
    int failed = read_config(&root, config, options);
    if (failed) {
        free(config->layers);
        *config = (g4_config){0};
    }
    g4_json_free(&j);
    return failed;
}

/* A small JSON file, as a whole. */
static int open_text(g4_file *file, const char *path, const g4_options *options, g4_error *err) {
    if (g4_file_open(file, path, options && options->no_mmap, err)) return -1;
    if (file->size <= CONFIG_MAX) return 0;
    g4_fail(err, "%s: %llu bytes; expected at most %d", path, (unsigned long long)file->size, CONFIG_MAX);
    g4_file_close(file);
    return -1;
}

static int read_generation_config(g4_config *c, const char *path, const g4_options *options, g4_error *err) {
    g4_file file = {0};
    g4_json j;
    if (open_text(&file, path, options, err)) return -1;
    int failed = g4_json_parse(&j, (const char *)file.data, file.size, path, err);
    g4_file_close(&file);
    if (failed) return -1;
    section s = {&j, 0, path, "", err};
    uint32_t sample = 0;
    if (j.nodes[0].kind != G4_JSON_OBJECT) {
        failed = g4_fail(err, "%s: expected an object, found %s", path, show_value(&j, 0).text);
    } else {
        sample = member(&s, "do_sample", 1);
        failed = read_ids(&s, "eos_token_id", c, options, 16, c->eos_token_id, &c->n_eos) ||
                 read_ids(&s, "suppress_tokens", c, options, 64, c->suppress_tokens, &c->n_suppress) ||
                 (sample && read_bool(&s, "do_sample", &c->do_sample)) || read_int(&s, "top_k", member(&s, "top_k", 1), 0, INT_MAX, &c->top_k) ||
                 read_float(&s, "top_p", member(&s, "top_p", 1), 0, 1, "a number from 0 to 1", &c->top_p) ||
                 read_float(&s, "temperature", member(&s, "temperature", 1), 0, 1e6, "a number from 0 to 1e6", &c->temperature);
    }
    g4_json_free(&j);
    return failed ? -1 : 0;
}

/* ---- 7. Weights ------------------------------------------------------------------------------------------------------- */

enum { UNREAD, READ, DEAD }; /* DEAD: belongs to the model, but nothing reads it */

typedef struct weights_file {
    char *path;
    g4_safetensors st;
} weights_file;

struct g4_checkpoint {
    weights_file *files; /* [n_files] */
    int n_files;
    const g4_st_tensor **tensors; /* [n], of all files, by name */
    unsigned char *use;           /* [n] UNREAD, READ, DEAD */
    uint32_t n;
    const char **ignored;         /* [n_ignored] names of those that are not READ */
    int n_ignored;
    size_t bytes;
    g4_gguf *gguf;                /* NULL: the files above */
};

static int has_suffix(const char *s, const char *suffix) {
    size_t n = strlen(s), m = strlen(suffix);
    return n >= m && !strcmp(s + n - m, suffix);
}

/* Opens one more file of weights. */
static int add_file(g4_checkpoint *k, const char *directory, const char *name, const g4_options *options, g4_error *err) {
    weights_file *files = realloc(k->files, ((size_t)k->n_files + 1) * sizeof *files);
    if (!files) return g4_fail(err, "%s: out of memory", directory);
    k->files = files;
    weights_file *f = &files[k->n_files++];
    *f = (weights_file){.path = join_path(directory, name)};
    if (!f->path) return g4_fail(err, "%s: out of memory", directory);
    g4_file file;
    if (g4_file_load(&file, f->path, options, err)) return -1;
    if (g4_safetensors_parse(&f->st, file.data, file.size, f->path, err)) {
        g4_file_close(&file);
        return -1;
    }
    f->st.file = file;
    k->bytes += f->st.file.size;
    return 0;
}

/* Entries of weight_map, by file and then by name. */
static int compare_entries(const void *context, uint32_t a, uint32_t b) {
    const g4_json *j = context;
    int order = strcmp(g4_json_string(j, a), g4_json_string(j, b));
    return order ? order : strcmp(j->text + j->nodes[a].key, j->text + j->nodes[b].key);
}

/* The files that weight_map names; each must hold the tensors that the map gives it, and no others. entry [n] is scratch. */
static int add_mapped_files(g4_checkpoint *k, const g4_json *j, uint32_t map, uint32_t *entry, const char *directory, const char *path,
                            const g4_options *options, g4_error *err) {
    uint32_t n = 0;
    for (uint32_t i = j->nodes[map].first; i; i = j->nodes[i].next) {
        shown name = show_n(j->text + j->nodes[i].key, j->nodes[i].key_size);
        const char *file = g4_json_string(j, i);
        if (j->nodes[i].kind != G4_JSON_STRING)
            return g4_fail(err, "%s: weight_map: %s: expected the name of a file, found %s", path, name.text, show_value(j, i).text);
        if (strlen(j->text + j->nodes[i].key) != j->nodes[i].key_size)
            return g4_fail(err, "%s: weight_map: the key %s... holds a NUL byte", path, name.text);
        if (strlen(file) != j->nodes[i].size || strpbrk(file, "/\\:") || strlen(file) > 255 || !has_suffix(file, ".safetensors"))
            return g4_fail(err, "%s: weight_map: %s: expected the name of a .safetensors file in the same directory, found %s", path, name.text,
                           show_value(j, i).text);
        entry[n++] = i;
    }
    g4_sort(entry, n, compare_entries, j);
    for (uint32_t i = 0; i < n;) {
        const char *file = g4_json_string(j, entry[i]);
        if (add_file(k, directory, file, options, err)) return -1;
        const g4_safetensors *st = &k->files[k->n_files - 1].st;
        uint32_t t = 0;
        for (; i < n && !strcmp(g4_json_string(j, entry[i]), file); i++, t++) {
            const char *mapped = j->text + j->nodes[entry[i]].key, *stored = t < (uint32_t)st->n ? st->tensors[st_order(st)[t]].name : NULL;
            int order = stored ? strcmp(mapped, stored) : -1;
            if (order < 0)
                return g4_fail(err, "%s: weight_map puts tensor %s into %s, but that file does not hold it", path, show(mapped).text, file);
            if (order > 0)
                return g4_fail(err, "%s/%s: holds tensor %s, which weight_map in %s does not put there", directory, file, show(stored).text,
                               path);
        }
        if (t < (uint32_t)st->n)
            return g4_fail(err, "%s/%s: holds tensor %s, which weight_map in %s does not put there", directory, file,
                           show(st->tensors[st_order(st)[t]].name).text, path);
    }
    return 0;
}

static int add_indexed_files(g4_checkpoint *k, const char *directory, const char *path, const g4_options *options, g4_error *err) {
    g4_file file = {0};
    g4_json j;
    if (open_text(&file, path, options, err)) return -1;
    int failed = g4_json_parse(&j, (const char *)file.data, file.size, path, err);
    g4_file_close(&file);
    if (failed) return -1;
    uint32_t map = g4_json_get(&j, 0, "weight_map");
    if (!map || j.nodes[map].kind != G4_JSON_OBJECT || !j.nodes[map].size) {
        failed = g4_fail(err, "%s: weight_map: expected an object of tensor names and their files, found %s", path,
                         map ? show_value(&j, map).text : "none");
    } else {
        uint32_t *entry = malloc(j.nodes[map].size * sizeof *entry);
        failed = entry ? add_mapped_files(k, &j, map, entry, directory, path, options, err) : g4_fail(err, "%s: out of memory", path);
        free(entry);
    }
    g4_json_free(&j);
    return failed;
}

/* What a directory without model.safetensors and without an index holds instead. */
typedef struct listing {
    int n;            /* *.safetensors files */
    int shards;       /* STEM-00001-of-NNNNN.safetensors */
    char name[256];   /* one of them, the first shard where there is one */
    char other[256];  /* a file of weights in a format that is not read */
} listing;

static int shard_total(const char *name) { /* NNNNN of STEM-00001-of-NNNNN.safetensors; 0: not such a name */
    size_t n = strlen(name), tail = strlen("-00001-of-00001.safetensors");
    int total = 0;
    if (n < tail || memcmp(name + n - tail, "-00001-of-", 10)) return 0;
    for (const char *p = name + n - tail + 10; p < name + n - tail + 15; p++) {
        if (*p < '0' || *p > '9') return 0;
        total = total * 10 + (*p - '0');
    }
    return total;
}

static void look_at_name(void *user, const char *name) {
    listing *l = user;
    size_t n = strlen(name);
    if (n >= sizeof l->name) return;
    if (has_suffix(name, ".gguf") || has_suffix(name, ".bin") || has_suffix(name, ".pt") || has_suffix(name, ".pth"))
        memcpy(l->other, name, n + 1);
    if (!has_suffix(name, ".safetensors")) return;
    int shard = shard_total(name) > 0;
    if (shard || !l->shards) memcpy(l->name, name, n + 1);
    l->n++;
    l->shards += shard;
}

static int add_listed_files(g4_checkpoint *k, const char *directory, const g4_options *options, g4_error *err) {
    listing l = {0};
    char text[256];
    if (os_list(directory, look_at_name, &l)) return g4_fail(err, "%s: cannot list the directory: %s", directory, os_error(text));
    if (l.shards == 1) {
        int total = shard_total(l.name);
        char *number = l.name + strlen(l.name) - strlen("00001-of-00001.safetensors");
        for (int i = 1; i <= total; i++) {
            char digits[16];
            snprintf(digits, sizeof digits, "%05d", i);
            memcpy(number, digits, 5);
            if (add_file(k, directory, l.name, options, err)) return -1;
        }
        return 0;
    }
    if (l.n == 1) return add_file(k, directory, l.name, options, err);
    if (l.n > 1)
        return g4_fail(
            err, "%s: holds %d .safetensors files, but neither model.safetensors nor model.safetensors.index.json to say which are the weights",
            directory, l.n);
    return g4_fail(err, "%s: no weights: expected model.safetensors, or model.safetensors.index.json and its files, found %s", directory,
                   *l.other ? l.other : "neither");
}

static int compare_pointers(const void *context, uint32_t a, uint32_t b) {
    const g4_st_tensor *const *t = context;
    return strcmp(t[a]->name, t[b]->name);
}

/* All tensors of all files in one table. */
static int make_table(g4_checkpoint *k, const char *directory, g4_error *err) {
    size_t n = 0;
    for (int f = 0; f < k->n_files; f++) n += (size_t)k->files[f].st.n;
    if (n > INT_MAX / 2) return g4_fail(err, "%s: %llu tensors are too many", directory, (unsigned long long)n);
    const g4_st_tensor **unsorted = malloc((n + 1) * sizeof *unsorted);
    uint32_t *order = malloc((n + 1) * sizeof *order);
    k->tensors = malloc((n + 1) * sizeof *k->tensors);
    k->ignored = malloc((n + 1) * sizeof *k->ignored);
    k->use = calloc(n + 1, 1);
    int failed = !unsorted || !order || !k->tensors || !k->ignored || !k->use ? g4_fail(err, "%s: out of memory", directory) : 0;
    if (!failed) {
        for (int f = 0; f < k->n_files; f++)
            for (int i = 0; i < k->files[f].st.n; i++) {
                order[k->n] = k->n;
                unsorted[k->n++] = &k->files[f].st.tensors[i];
            }
        g4_sort(order, k->n, compare_pointers, unsorted);
        for (uint32_t i = 0; i < k->n; i++) k->tensors[i] = unsorted[order[i]];
        for (uint32_t i = 1; i < k->n && !failed; i++)
            if (!strcmp(k->tensors[i - 1]->name, k->tensors[i]->name))
                failed = g4_fail(err, "%s: tensor %s is in two of the files", directory, show(k->tensors[i]->name).text);
    }
    free(unsorted);
    free(order);
    return failed;
}

/* The place of a tensor in the table; n: there is none. */
static uint32_t find_tensor(const g4_checkpoint *k, const char *name) {
    for (uint32_t low = 0, high = k->n; low < high;) {
        uint32_t middle = low + (high - low) / 2;
        int order = strcmp(name, k->tensors[middle]->name);
        if (order == 0) return middle;
        if (order < 0) high = middle;
        else low = middle + 1;
    }
    return k->n;
}

static const char *file_of(const g4_checkpoint *k, const g4_st_tensor *t) {
    int f = 0;
    while (f < k->n_files - 1 && !((uintptr_t)t - (uintptr_t)k->files[f].st.tensors < (size_t)k->files[f].st.n * sizeof *t)) f++;
    return k->files[f].path;
}

/* What binding a checkpoint's tensors to a model's fields needs and finds. After the first fault that ends it, every call does nothing. */
typedef struct binder {
    g4_checkpoint *k;
    const char *directory, *prefix;
    int layer; /* -1: a tensor of no layer */
    int failed, n_missing;
    char missing[256];
    g4_error *err;
} binder;

/* Name and shape as section "Tensors" of the model's description has them; d1, d2 0: fewer dimensions. */
static void bind(binder *b, g4_tensor *t, const char *name, int64_t d0, int64_t d1, int64_t d2) {
    char full[256];
    int64_t expected[3] = {d0, d1, d2};
    int rank = d2 ? 3 : d1 ? 2 : 1, type = 0;
    if (b->failed) return;
    if (b->layer >= 0) snprintf(full, sizeof full, "%slayers.%d.%s", b->prefix, b->layer, name);
    else snprintf(full, sizeof full, "%s%s", b->prefix, name);
    uint32_t i = find_tensor(b->k, full);
    if (i == b->k->n) {
        if (!b->n_missing++) memcpy(b->missing, full, sizeof full);
        return;
    }
    const g4_st_tensor *st = b->k->tensors[i];
    if (st->rank != rank || memcmp(st->shape, expected, (size_t)rank * sizeof expected[0])) {
        b->failed = g4_fail(b->err, "%s: tensor %s: expected the shape %s by config.json, found %s", file_of(b->k, st), full,
                            show_shape(rank, expected).text, show_shape(st->rank, st->shape).text);
        return;
    }
    while (type <= G4_TYPE_BF16 && strcmp(g4_types[type].name, st->dtype)) type++;
    if (type > G4_TYPE_BF16) {
        b->failed =
            g4_fail(b->err, "%s: tensor %s: expected BF16, F16 or F32, found %s; convert the checkpoint", file_of(b->k, st), full, st->dtype);
        return;
    }
    b->k->use[i] = READ;
    *t = (g4_tensor){.data = st->data,
                     .type = (g4_dtype)type,
                     .rows = rank == 1   ? 1
                             : rank == 2 ? d0
                                         : d0 * d1,
                     .cols = expected[rank - 1],
                     .name = st->name};
}

static void bind_layer(binder *b, const g4_config *c, int i, g4_layer *l) {
    const g4_layer_config *lc = &c->layers[i];
    int64_t D = c->hidden_size, P = c->hidden_size_per_layer_input, E = c->num_experts, Fe = c->moe_intermediate_size;
    int64_t dh = lc->head_dim, F = lc->intermediate_size, Q = c->num_attention_heads * dh, KV = lc->num_key_value_heads * dh;
    b->layer = i;
    bind(b, &l->input_layernorm, "input_layernorm.weight", D, 0, 0);
    bind(b, &l->q_proj, "self_attn.q_proj.weight", Q, D, 0);
    if (lc->kv_layer == i) {
        bind(b, &l->k_proj, "self_attn.k_proj.weight", KV, D, 0);
        if (!c->attention_k_eq_v || lc->type != G4_FULL_ATTENTION) bind(b, &l->v_proj, "self_attn.v_proj.weight", KV, D, 0);
        bind(b, &l->k_norm, "self_attn.k_norm.weight", dh, 0, 0);
    } else { /* Google's files carry them for layers that share K/V, files saved by transformers do not */
        static const char *const dead[] = {"k_proj", "v_proj", "k_norm"};
        for (int d = 0; d < 3; d++) {
            char name[256];
            snprintf(name, sizeof name, "%slayers.%d.self_attn.%s.weight", b->prefix, i, dead[d]);
            b->k->use[find_tensor(b->k, name)] = DEAD; /* use [n] is there for those that are not found */
        }
    }
    bind(b, &l->o_proj, "self_attn.o_proj.weight", D, Q, 0);
    bind(b, &l->q_norm, "self_attn.q_norm.weight", dh, 0, 0);
    bind(b, &l->post_attention_layernorm, "post_attention_layernorm.weight", D, 0, 0);
    bind(b, &l->pre_feedforward_layernorm, "pre_feedforward_layernorm.weight", D, 0, 0);
    bind(b, &l->gate_proj, "mlp.gate_proj.weight", F, D, 0);
    bind(b, &l->up_proj, "mlp.up_proj.weight", F, D, 0);
    bind(b, &l->down_proj, "mlp.down_proj.weight", D, F, 0);
    bind(b, &l->post_feedforward_layernorm, "post_feedforward_layernorm.weight", D, 0, 0);
    if (E) {
        bind(b, &l->router_proj, "router.proj.weight", E, D, 0);
        bind(b, &l->router_scale, "router.scale", D, 0, 0);
        bind(b, &l->per_expert_scale, "router.per_expert_scale", E, 0, 0);
        bind(b, &l->experts_gate_up_proj, "experts.gate_up_proj", E, 2 * Fe, D);
        bind(b, &l->experts_down_proj, "experts.down_proj", E, D, Fe);
        bind(b, &l->post_feedforward_layernorm_1, "post_feedforward_layernorm_1.weight", D, 0, 0);
        bind(b, &l->pre_feedforward_layernorm_2, "pre_feedforward_layernorm_2.weight", D, 0, 0);
        bind(b, &l->post_feedforward_layernorm_2, "post_feedforward_layernorm_2.weight", D, 0, 0);
    }
    if (P) {
        bind(b, &l->per_layer_input_gate, "per_layer_input_gate.weight", P, D, 0);
        bind(b, &l->per_layer_projection, "per_layer_projection.weight", D, P, 0);
        bind(b, &l->post_per_layer_input_norm, "post_per_layer_input_norm.weight", D, 0, 0);
    }
    bind(b, &l->layer_scalar, "layer_scalar", 1, 0, 0);
}

/* A tied head need not be stored; a stored one is used unless it is the embedding table again, which is then read only once. */
static void bind_lm_head(binder *b, g4_model *m, const g4_options *options) {
    const g4_config *c = &m->config;
    const g4_tensor *embed = &m->embed_tokens;
    binder head = *b;
    head.layer = -1;
    head.n_missing = 0;
    head.prefix = !strcmp(b->prefix, "language_model.model.") ? "language_model." : "";
    bind(&head, &m->lm_head, "lm_head.weight", c->vocab_size, c->hidden_size, 0);
    if (head.n_missing && *head.prefix) {
        head.n_missing = 0;
        head.prefix = "";
        bind(&head, &m->lm_head, "lm_head.weight", c->vocab_size, c->hidden_size, 0);
    }
    b->failed = head.failed;
    if (b->failed) return;
    if (head.n_missing && !c->tie_word_embeddings) {
        b->failed = g4_fail(b->err, "%s: tensor lm_head.weight is missing, and config.json has tie_word_embeddings false", b->directory);
    } else if (head.n_missing) {
        m->lm_head = *embed;
    } else if (c->tie_word_embeddings && embed->data) {
        size_t bytes = b->k->tensors[find_tensor(b->k, m->lm_head.name)]->bytes;
        if (m->lm_head.type == embed->type && !memcmp(m->lm_head.data, embed->data, bytes)) {
            b->k->use[find_tensor(b->k, m->lm_head.name)] = DEAD;
            m->lm_head = *embed;
        } else {
            g4_warn(options, "%s: tie_word_embeddings is true, but tensor %s is stored and differs from %s; the stored head is used", b->directory,
                 show(m->lm_head.name).text, show(embed->name).text);
        }
    }
}

static int is_other_modality(const char *name) {
    static const char *const parts[] = {"vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.", "vision_embedder."};
    if (!strncmp(name, "model.", 6)) name += 6;
    for (int i = 0; i < 5; i++)
        if (!strncmp(name, parts[i], strlen(parts[i]))) return 1;
    return 0;
}

static int bind_model(g4_model *m, const char *directory, const g4_options *options, g4_error *err) {
    static const char *const prefixes[] = {"model.language_model.", "model.", "language_model.model."};
    enum { NAMED = 20 };
    g4_checkpoint *k = m->checkpoint;
    const g4_config *c = &m->config;
    int64_t D = c->hidden_size, P = c->hidden_size_per_layer_input, LP = c->num_hidden_layers * P;
    binder b = {.k = k, .directory = directory, .prefix = prefixes[0], .layer = -1, .err = err};
    int which = 0, unknown = 0;
    char name[64];
    for (; which < 3; which++) {
        snprintf(name, sizeof name, "%sembed_tokens.weight", prefixes[which]);
        if (find_tensor(k, name) < k->n) break;
    }
    if (which == 3)
        return g4_fail(err,
                       "%s: no tensor embed_tokens.weight under any of the prefixes model.language_model., model., language_model.model.; the "
                       "first of %u tensors is %s",
                       directory, (unsigned)k->n, k->n ? show(k->tensors[0]->name).text : "absent");
    b.prefix = prefixes[which];
    m->layers = calloc((size_t)c->num_hidden_layers, sizeof *m->layers);
    if (!m->layers) return g4_fail(err, "%s: no memory for %d layers", directory, c->num_hidden_layers);

    bind(&b, &m->embed_tokens, "embed_tokens.weight", c->vocab_size, D, 0);
    if (P) {
        bind(&b, &m->embed_tokens_per_layer, "embed_tokens_per_layer.weight", c->vocab_size_per_layer_input, LP, 0);
        bind(&b, &m->per_layer_model_projection, "per_layer_model_projection.weight", LP, D, 0);
        bind(&b, &m->per_layer_projection_norm, "per_layer_projection_norm.weight", P, 0, 0);
    }
    bind(&b, &m->norm, "norm.weight", D, 0, 0);
    for (int i = 0; i < c->num_hidden_layers; i++) bind_layer(&b, c, i, &m->layers[i]);
    if (!b.failed && b.n_missing)
        return g4_fail(err,
                       b.n_missing > 1 ? "%s: tensor %s is missing, and %d more that config.json asks for"
                                       : "%s: tensor %s is missing; config.json asks for it",
                       directory, b.missing, b.n_missing - 1);
    bind_lm_head(&b, m, options);
    if (b.failed) return -1;

    for (uint32_t i = 0; i < k->n; i++) {
        if (k->use[i] == READ) continue;
        k->ignored[k->n_ignored++] = k->tensors[i]->name;
        if (k->use[i] == DEAD || is_other_modality(k->tensors[i]->name)) continue;
        if (unknown++ < NAMED)
            g4_warn(options, "%s: tensor %s %s is no part of the text model that config.json describes; it is not read", file_of(k, k->tensors[i]),
                 show(k->tensors[i]->name).text, show_shape(k->tensors[i]->rank, k->tensors[i]->shape).text);
    }
    if (unknown > NAMED) g4_warn(options, "%s: %d more tensors are not read", directory, unknown - NAMED);
    return 0;
}

static int open_config(g4_model *m, const char *directory, const g4_options *options, g4_error *err) {
    char *path = join_path(directory, "config.json"), *generation = join_path(directory, "generation_config.json");
    g4_file file = {0};
    listing l = {0};
    int failed = !path || !generation ? g4_fail(err, "%s: out of memory", directory) : 0;
    if (!failed && os_kind(path) == PATH_MISSING && !os_list(directory, look_at_name, &l) && has_suffix(l.other, ".gguf"))
        failed = g4_fail(err, "%s: has no config.json, but %s: to run that, give the file itself", directory, show(l.other).text);
    if (!failed) failed = open_text(&file, path, options, err);
    if (!failed) {
        failed = g4_config_parse(&m->config, (const char *)file.data, file.size, path, options, err);
        g4_file_close(&file);
    }
    if (!failed && os_kind(generation) != PATH_MISSING) failed = read_generation_config(&m->config, generation, options, err);
    free(path);
    free(generation);
    return failed;
}

static int open_weights(g4_model *m, const char *directory, const g4_options *options, g4_error *err) {
    g4_checkpoint *k = m->checkpoint;
    char *single = join_path(directory, "model.safetensors"), *index = join_path(directory, "model.safetensors.index.json");
    int failed;
    if (!single || !index) {
        failed = g4_fail(err, "%s: out of memory", directory);
    } else if (os_kind(single) != PATH_MISSING) { /* it goes first, as in transformers */
        if (os_kind(index) != PATH_MISSING) g4_warn(options, "%s: is not read: model.safetensors is there too", index);
        failed = add_file(k, directory, "model.safetensors", options, err);
    } else if (os_kind(index) != PATH_MISSING) {
        failed = add_indexed_files(k, directory, index, options, err);
    } else {
        failed = add_listed_files(k, directory, options, err);
    }
    free(single);
    free(index);
    return failed || make_table(k, directory, err) || bind_model(m, directory, options, err) ? -1 : 0;
}

/* Asks for the weights in the order in which the first token will read them; the system reads on while it computes. Of a row of the table of per-layer
 * embeddings nothing tells which will come next, so that reading ahead there is for nothing. */
static void prefetch(const g4_model *m, const char *path, const g4_options *options) {
    enum { HEAD = 256 << 20 };
    const int per_layer = sizeof(g4_layer) / sizeof(g4_tensor), n = m->config.num_hidden_layers * per_layer; /* a g4_layer is nothing but tensors */
    const g4_tensor *table = &m->embed_tokens_per_layer;
    g4_prefetch mode = options ? options->prefetch : G4_PREFETCH_AUTO;
    uint64_t total = 0, done = 0, bytes = g4_checkpoint_bytes(m);
    if ((options && options->no_mmap) || mode == G4_PREFETCH_NONE) return;
    if (mode == G4_PREFETCH_AUTO) mode = bytes <= os_memory() / 2 ? G4_PREFETCH_ALL : G4_PREFETCH_HEAD;
    if (table->data) os_expect_random(table->data, (size_t)table->rows * g4_row_bytes(table));
    for (int pass = 0; pass < 2; pass++)
        for (int i = -1; i <= n; i++) {
            const g4_tensor *t = i < 0 ? &m->per_layer_model_projection : i < n ? &m->layers[i / per_layer].input_layernorm + i % per_layer : &m->lm_head;
            size_t size = t->data ? (size_t)t->rows * g4_row_bytes(t) : 0;
            if (pass == 0) total += size;
            for (size_t at = 0; pass == 1 && at < size; at += MIN(size - at, PIECE)) {
                if (mode == G4_PREFETCH_HEAD && done >= HEAD) return;
                os_prefetch((const unsigned char *)t->data + at, MIN(size - at, PIECE));
                done += MIN(size - at, PIECE);
                report(options, path, done, total);
            }
        }
}

int g4_checkpoint_open(g4_model *m, const char *path, const g4_options *options, g4_error *err) {
    char text[256];
    int kind = os_kind(path);
    if (kind == PATH_MISSING) return g4_fail(err, "%s: cannot open: %s", path, os_error(text));
    int gguf = kind == PATH_FILE && (has_suffix(path, ".gguf") || has_suffix(path, ".GGUF") || g4_is_gguf(path));
    if (kind == PATH_FILE && !gguf)
        return g4_fail(err, "%s: is a file, and no GGUF file; expected one, or a directory with config.json and model.safetensors", path);
    g4_checkpoint *k = m->checkpoint = calloc(1, sizeof *k);
    if (!k) return g4_fail(err, "%s: out of memory", path);
    if (gguf) {
        k->gguf = g4_gguf_open(path, 0, options, err);
        if (!k->gguf || g4_gguf_bind(k->gguf, m, options, err)) return -1;
    } else if (open_config(m, path, options, err) || open_weights(m, path, options, err)) {
        return -1;
    }
    prefetch(m, path, options);
    return 0;
}

void g4_checkpoint_close(g4_model *m) {
    g4_checkpoint *k = m->checkpoint;
    if (k) {
        for (int f = 0; f < k->n_files; f++) {
            free(k->files[f].path);
            g4_safetensors_close(&k->files[f].st);
        }
        free(k->files);
        free(k->tensors);
        free(k->use);
        free(k->ignored);
        g4_gguf_close(k->gguf);
        free(k);
    }
    free(m->config.layers);
    free(m->layers);
    m->checkpoint = NULL;
    m->config.layers = NULL;
    m->layers = NULL;
}

size_t g4_checkpoint_bytes(const g4_model *m) { return m->checkpoint->gguf ? g4_gguf_bytes(m->checkpoint->gguf) : m->checkpoint->bytes; }

const char *g4_checkpoint_ignored(const g4_model *m, int i) {
    if (m->checkpoint->gguf) return g4_gguf_ignored(m->checkpoint->gguf, i);
    return i >= 0 && i < m->checkpoint->n_ignored ? m->checkpoint->ignored[i] : NULL;
}

/* Nothing in a file tells that a bit of it has flipped; in a scale or an exponent it mostly shows like this. */
static int check_tensor(const g4_tensor *t, g4_error *err) {
    enum { STEP = 512 }; /* whole blocks of every type */
    const g4_type *type = &g4_types[t->type];
    float w[STEP];
    for (int64_t row = 0; row < t->rows; row++)
        for (int64_t at = 0; at < t->cols; at += STEP) {
            int n = t->cols - at < STEP ? (int)(t->cols - at) : STEP, i = 0;
            g4_widen(t->type, w, (const unsigned char *)t->data + (size_t)row * g4_row_bytes(t) + (size_t)at / (size_t)type->block * (size_t)type->bytes, n);
            while (i < n && isfinite(w[i])) i++;
            if (i < n)
                return g4_fail(err, "tensor %s (%s): row %lld, element %lld, which is in block %lld, is %g: the file is damaged", show(t->name).text, type->name,
                               (long long)row, (long long)(at + i), (long long)((at + i) / type->block), (double)w[i]);
        }
    return 0;
}

int g4_check_weights(const g4_model *m, g4_error *err) {
    const g4_tensor *const top[] = {&m->embed_tokens, &m->embed_tokens_per_layer, &m->per_layer_model_projection, &m->per_layer_projection_norm, &m->norm, &m->lm_head};
    for (int i = 0; i < 6; i++)
        if (top[i]->data && !(i == 5 && top[i]->data == m->embed_tokens.data) && check_tensor(top[i], err)) return -1;
    for (int l = 0; l < m->config.num_hidden_layers; l++) /* a g4_layer is nothing but tensors */
        for (const g4_tensor *t = (const g4_tensor *)&m->layers[l]; t < (const g4_tensor *)&m->layers[l + 1]; t++)
            if (t->data && check_tensor(t, err)) return -1;
    return 0;
}
