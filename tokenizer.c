/* tokenizer.c - from text to ids and back: byte-pair encoding (BPE) by merge rank over a whole text, with byte fallback.
 *
 * It gives exactly the ids and the text of the Python package `tokenizers` on a tokenizer.json of Gemma 4's kind. It is not a general
 * tokenizer: there is no word splitting, no Unicode normalization, no prefix space, no other model than BPE. A file that asks for
 * anything else is refused by the name of the part that is not there.
 *
 * Reading order: g4_encode at the end of part 4 shows the steps; encode_long_stretch explains why a long text can be cut. Then, from the top:
 *     1. messages, UTF-8      2. the tables and how they are filled, whatever the file format      3. tokenizer.json, GGUF
 *     4. encoding             5. decoding
 */
#include "gemma4.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- 1. Messages, UTF-8 ----------------------------------------------------------------------------------------------- */

/* A piece in a message: quoted, on one line, cut when it is long. */
typedef struct shown {
    char text[112];
} shown;

static shown show(const char *s, size_t n) {
    shown out;
    char *o = out.text, *end = out.text + sizeof out.text - 12;
    *o++ = '"';
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)s[i];
        if (o >= end && ((c & 0xc0) != 0x80 || o >= end + 3)) { /* not inside a character */
            memcpy(o, "...", 3);
            o += 3;
            break;
        }
        if (c == '\n') o += sprintf(o, "\\n");
        else if (c < 0x20 || c == 0x7f) o += sprintf(o, "\\x%02x", c);
        else *o++ = (char)c;
    }
    *o++ = '"';
    *o = 0;
    return out;
}

#ifdef __GNUC__
#define PREFETCH(p) __builtin_prefetch(p)
#else
#define PREFETCH(p) ((void)(p))
#endif

enum { SPACE = 0x2581 /* LOWER ONE EIGHTH BLOCK: a space, inside the vocabulary */, REPLACEMENT = 0xfffd, N_CODE_POINTS = 0x110000 };

/* Bytes of the well-formed UTF-8 character at p < end (no overlong form, no surrogate, nothing above U+10FFFF); 0: there is none. */
static inline int utf8_decode(const unsigned char *p, const unsigned char *end, uint32_t *c) {
    uint32_t x = p[0];
    if (x < 0x80) {
        *c = x;
        return 1;
    }
    int n = x >= 0xc2 && x < 0xe0 ? 2 : x >= 0xe0 && x < 0xf0 ? 3 : x >= 0xf0 && x < 0xf5 ? 4 : 0;
    if (n == 0 || end - p < n) return 0;
    x &= 0x7fu >> n;
    for (int i = 1; i < n; i++) {
        if ((p[i] & 0xc0) != 0x80) return 0;
        x = x << 6 | (p[i] & 0x3f);
    }
    if ((n == 3 && (x < 0x800 || (x >= 0xd800 && x < 0xe000))) || (n == 4 && (x < 0x10000 || x >= N_CODE_POINTS))) return 0;
    *c = x;
    return n;
}

static int utf8_encode(uint32_t c, unsigned char out[4]) {
    int n = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    for (int i = n - 1; i > 0; i--, c >>= 6) out[i] = (unsigned char)(0x80 | (c & 0x3f));
    out[0] = (unsigned char)(n == 1 ? c : (0xf00u >> n & 0xf0u) | c);
    return n;
}

static int utf8_valid(const char *s, size_t n) {
    const unsigned char *p = (const unsigned char *)s, *end = p + n;
    uint32_t c;
    for (int step; p < end; p += step)
        if (!(step = utf8_decode(p, end, &c))) return 0;
    return 1;
}

/* ---- 2. The tables ---------------------------------------------------------------------------------------------------- */

enum {
    MAX_ID = (1 << 24) - 1,     /* bounds what a hostile file can make us allocate; ids without a piece are allowed */
    MAX_ADDED_BYTES = 1024,     /* of an added token's text; bounds the work per byte of text when they are looked for */
    MAX_PROBES = 4096           /* no honest file comes near it; one made to collide is refused instead of taking minutes */
};

/* An entry of the vocabulary. They lie one after another in `pieces`, so that looking one up touches memory in one place. */
typedef struct piece {
    int32_t id;
    uint32_t size : 31;    /* bytes */
    uint32_t special : 1;
    char text[];           /* [size], then NUL */
} piece;

typedef struct piece_slot {
    uint32_t hash;
    uint32_t at; /* in `pieces`; 0: empty */
} piece_slot;

typedef struct merge {
    int32_t left, right; /* left -1: empty */
    int32_t rank;        /* its place in the file: the lowest is merged first */
    int32_t result;
} merge;

/* Added tokens are looked for before anything else; sorted, those that begin with the same bytes are neighbours. */
typedef struct added_set {
    int32_t *id; /* [n], by text */
    int n;
    unsigned char begins[256]; /* 1: some begin with this byte */
} added_set;

struct g4_tokenizer {
    char *pieces;             /* [pieces_size] */
    size_t pieces_size;
    uint32_t *at;             /* [size] id -> where its piece begins in `pieces`; 0: there is none */
    int32_t size;
    piece_slot *piece_slots;  /* [n_piece_slots] text -> id, open addressing */
    uint32_t n_piece_slots;
    merge *merges;            /* [n_merge_slots] pair of ids -> rank and result, open addressing */
    uint32_t n_merge_slots;
    int32_t (*chars)[256];    /* [n_char_pages] code point -> id, -1: none; page 0 stands for all empty ones */
    int n_char_pages;
    uint16_t char_page[N_CODE_POINTS / 256];
    uint32_t *joins;          /* see joins() */
    int join_bits;
    int32_t byte_id[256];     /* the ids of <0x00> .. <0xFF> */
    added_set added[2];       /* looked for in the text itself; looked for in what these leave (normalized: true) */
};

/* The tables while they are filled. A reader of a file format calls tables_open, add_piece for the whole vocabulary, pieces_done,
 * add_merges in the order of rank, add_token for each added token, and tables_done. Each gives 0 or -1 with err filled. */
typedef struct builder {
    g4_tokenizer *tok;
    const char *path;
    g4_error *err;
    int32_t last_result;      /* what the last merge gave */
} builder;

/* FNV-1a, which can go on where it stopped: the hash of two texts in a row needs no copy of them. */
static const uint64_t HASH_BEGIN = 0xcbf29ce484222325u;
static uint64_t hash_text(uint64_t h, const char *s, size_t n) {
    for (size_t i = 0; i < n; i++) h = (h ^ (unsigned char)s[i]) * 0x100000001b3u;
    return h;
}
static inline uint32_t mix(uint64_t h) {
    h = (h ^ h >> 32) * 0x9e3779b97f4a7c15u;
    return (uint32_t)(h >> 32);
}
static inline uint32_t slot_of(uint32_t hash, uint32_t n_slots) { return (uint32_t)((uint64_t)hash * n_slots >> 32); }
static inline uint32_t slot_after(uint32_t slot, uint32_t n_slots) { return slot + 1 == n_slots ? 0 : slot + 1; }

static inline piece *piece_at(const g4_tokenizer *t, uint32_t at) { return (piece *)(t->pieces + at); }
static inline piece *piece_of(const g4_tokenizer *t, int32_t id) { return piece_at(t, t->at[id]); }

static int is_text(const piece *p, const char *a, size_t n_a, const char *b, size_t n_b) {
    return p->size == n_a + n_b && !memcmp(p->text, a, n_a) && !memcmp(p->text + n_a, b, n_b);
}

/* The slot of the piece whose text is a followed by b, or the empty one where it belongs; NULL: the table was made to collide. */
static piece_slot *find_hashed(const g4_tokenizer *t, uint32_t hash, const char *a, size_t n_a, const char *b, size_t n_b) {
    uint32_t i = slot_of(hash, t->n_piece_slots);
    for (int probes = 0; probes < MAX_PROBES; probes++, i = slot_after(i, t->n_piece_slots)) {
        piece_slot *s = &t->piece_slots[i];
        if (!s->at || (s->hash == hash && is_text(piece_at(t, s->at), a, n_a, b, n_b))) return s;
    }
    return NULL;
}

static inline uint32_t piece_hash(const char *s, size_t n) { return mix(hash_text(HASH_BEGIN, s, n)); }
static int32_t slot_id(const g4_tokenizer *t, const piece_slot *slot) { return slot && slot->at ? piece_at(t, slot->at)->id : -1; }
static int32_t piece_id(const g4_tokenizer *t, const char *s, size_t n) { return slot_id(t, find_hashed(t, piece_hash(s, n), s, n, "", 0)); }

static inline uint32_t first_merge_slot(const g4_tokenizer *t, int32_t left, int32_t right) {
    return slot_of(mix(((uint64_t)(uint32_t)left << 32 | (uint32_t)right) * 0xff51afd7ed558ccdu), t->n_merge_slots);
}

/* The slot of the merge of two ids, or the empty one where it belongs; NULL: the table was made to collide. */
static merge *merge_slot(const g4_tokenizer *t, int32_t left, int32_t right) {
    uint32_t i = first_merge_slot(t, left, right);
    for (int probes = 0; probes < MAX_PROBES; probes++, i = slot_after(i, t->n_merge_slots)) {
        merge *m = &t->merges[i];
        if (m->left < 0 || (m->left == left && m->right == right)) return m;
    }
    return NULL;
}

/* Where the bit of joins() for two characters is. Pairs of ASCII (and the space's stand-in) have one each, so that ordinary words are
 * always cut right; the others share hashed ones. */
static inline uint32_t join_bit(const g4_tokenizer *t, uint32_t a, uint32_t b) {
    if (a == SPACE) a = ' ';
    if (b == SPACE) b = ' ';
    if ((a | b) < 128) return a << 7 | b;
    return (128 << 7) + (uint32_t)(((uint64_t)a << 32 | b) * 0x9e3779b97f4a7c15u >> (64 - t->join_bits));
}

/* 0: no merge has a left part that ends in a and a right part that begins with b, so no token ever spans that place. 1: perhaps one does. */
static inline int joins(const g4_tokenizer *t, uint32_t a, uint32_t b) {
    uint32_t bit = join_bit(t, a, b);
    return t->joins[bit >> 5] >> (bit & 31) & 1;
}

static inline int32_t char_id(const g4_tokenizer *t, uint32_t c) { return t->chars[t->char_page[c >> 8]][c & 255]; }

/* 0 .. 255 if a piece with this text stands for a byte when it is decoded, else -1. The same texts as in `tokenizers`, whose Rust
 * takes either case and a plus sign for hexadecimal. */
static int byte_of(const char *s, size_t n) {
    int x = 0;
    if (n != 6 || memcmp(s, "<0x", 3) || s[5] != '>') return -1;
    for (int i = 3; i < 5; i++) {
        int c = s[i], digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
        if (i == 3 && c == '+') digit = 0;
        if (digit < 0) return -1;
        x = x << 4 | digit;
    }
    return x;
}

/* A piece with a text of n bytes takes this much of `pieces`. */
static size_t piece_bytes(size_t n) { return (sizeof(piece) + n + 1 + 3) / 4 * 4; }

/* n_ids: the highest id + 1. n_pieces, bytes (piece_bytes): of all pieces, added tokens included. n_added: added tokens. */
static int tables_open(builder *b, int64_t n_ids, size_t n_pieces, size_t bytes, size_t n_merges, size_t n_added) {
    g4_tokenizer *t = b->tok = calloc(1, sizeof *t);
    if (t) {
        t->size = (int32_t)n_ids;
        t->n_piece_slots = (uint32_t)n_pieces * 2 + 1;
        t->n_merge_slots = (uint32_t)(n_merges + n_merges / 2 + 1);
        for (t->join_bits = 10; (size_t)1 << t->join_bits < 2 * n_merges && t->join_bits < 24;) t->join_bits++;
        t->n_char_pages = 1;
        t->pieces_size = 4; /* no piece begins at 0 */
        t->pieces = malloc(t->pieces_size + bytes);
        t->at = calloc((size_t)t->size, sizeof *t->at);
        t->piece_slots = calloc(t->n_piece_slots, sizeof *t->piece_slots);
        t->merges = calloc(t->n_merge_slots, sizeof *t->merges);
        t->chars = malloc(sizeof *t->chars);
        t->joins = calloc(((128 << 7) + ((size_t)1 << t->join_bits)) / 32, sizeof *t->joins);
        for (int k = 0; k < 2; k++) t->added[k].id = calloc(n_added + 1, sizeof *t->added[k].id);
    }
    if (!t || !t->pieces || !t->at || !t->piece_slots || !t->merges || !t->chars || !t->joins || !t->added[0].id || !t->added[1].id)
        return g4_fail(b->err, "%s: out of memory for a vocabulary of %lld pieces (%lld bytes) and %lld merges", b->path, (long long)n_pieces,
            (long long)bytes, (long long)n_merges);
    for (uint32_t i = 0; i < t->n_merge_slots; i++) t->merges[i].left = -1;
    memset(t->chars[0], 0xff, sizeof t->chars[0]);
    return 0;
}

static shown show_piece(const g4_tokenizer *t, int32_t id) { return show(piece_of(t, id)->text, piece_of(t, id)->size); }

static int add_piece(builder *b, int32_t id, const char *s, size_t n) {
    g4_tokenizer *t = b->tok;
    if (!utf8_valid(s, n)) return g4_fail(b->err, "%s: the piece with id %d is not UTF-8", b->path, (int)id);
    if (t->at[id])
        return g4_fail(b->err, "%s: id %d belongs to two pieces, %s and %s", b->path, (int)id, show_piece(t, id).text, show(s, n).text);
    uint32_t hash = piece_hash(s, n);
    piece_slot *slot = find_hashed(t, hash, s, n, "", 0);
    if (!slot) return g4_fail(b->err, "%s: piece %s: thousands of pieces share one hash; this is no honest vocabulary", b->path, show(s, n).text);
    if (slot->at)
        return g4_fail(b->err, "%s: piece %s is there twice, as %d and as %d", b->path, show(s, n).text, (int)piece_at(t, slot->at)->id, (int)id);
    slot->hash = hash;
    slot->at = t->at[id] = (uint32_t)t->pieces_size;
    piece *p = piece_of(t, id);
    p->id = id;
    p->size = (uint32_t)n;
    p->special = 0;
    memcpy(p->text, s, n);
    p->text[n] = 0;
    t->pieces_size += piece_bytes(n);
    return 0;
}

static int pieces_done(builder *b) {
    g4_tokenizer *t = b->tok;
    for (int x = 0; x < 256; x++) {
        char name[8];
        snprintf(name, sizeof name, "<0x%02X>", x);
        t->byte_id[x] = piece_id(t, name, 6);
        if (t->byte_id[x] < 0) return g4_fail(b->err, "%s: the vocabulary has no %s; byte fallback needs all of <0x00> .. <0xFF>", b->path, name);
    }
    for (int32_t id = 0; id < t->size; id++) {
        const piece *p = piece_of(t, id);
        const unsigned char *s = (const unsigned char *)p->text;
        uint32_t c = 0;
        if (!t->at[id] || p->size == 0 || p->size > 4 || utf8_decode(s, s + p->size, &c) != (int)p->size) continue;
        if (!t->char_page[c >> 8]) {
            int32_t (*grown)[256] = realloc(t->chars, ((size_t)t->n_char_pages + 1) * sizeof *t->chars);
            if (!grown) return g4_fail(b->err, "%s: out of memory for the table of characters", b->path);
            t->chars = grown;
            memset(t->chars[t->n_char_pages], 0xff, sizeof t->chars[0]);
            t->char_page[c >> 8] = (uint16_t)t->n_char_pages++;
        }
        t->chars[t->char_page[c >> 8]][c & 255] = id;
    }
    return 0;
}

enum { MERGE_BATCH = 32 };

/* What one entry of a merge list says, and while it is added, what was found. */
typedef struct merge_text {
    const char *left, *right; /* [n_left], [n_right] */
    size_t n_left, n_right;
    uint32_t left_hash, right_hash;
    merge found;
} merge_text;

/* The result of a merge. Mostly it is the last one's or the next id: merges stand in the order of what they give. */
static int32_t find_result(const g4_tokenizer *t, const merge_text *m, int32_t last) {
    for (int32_t id = last; id < t->size && id < last + 2; id++)
        if (t->at[id] && is_text(piece_of(t, id), m->left, m->n_left, m->right, m->n_right)) return id;
    uint32_t hash = mix(hash_text(hash_text(HASH_BEGIN, m->left, m->n_left), m->right, m->n_right));
    return slot_id(t, find_hashed(t, hash, m->left, m->n_left, m->right, m->n_right));
}

static int bad_merge(const builder *b, int32_t rank, const merge_text *m, const char *fault) {
    return g4_fail(b->err, "%s: merge %d, %s + %s, %s", b->path, (int)rank, show(m->left, m->n_left).text, show(m->right, m->n_right).text,
        fault);
}

/* n merges of rank, rank + 1, ... at once: nearly every look-up misses the processor's caches, so each step asks for the memory of the
 * next. */
static int add_merges(builder *b, int32_t rank, merge_text *texts, int n) {
    g4_tokenizer *t = b->tok;
    merge_text *end = texts + n;
    for (merge_text *m = texts; m < end; m++) {
        m->left_hash = piece_hash(m->left, m->n_left);
        m->right_hash = piece_hash(m->right, m->n_right);
        PREFETCH(&t->piece_slots[slot_of(m->left_hash, t->n_piece_slots)]);
        PREFETCH(&t->piece_slots[slot_of(m->right_hash, t->n_piece_slots)]);
    }
    for (merge_text *m = texts; m < end; m++) {
        PREFETCH(t->pieces + t->piece_slots[slot_of(m->left_hash, t->n_piece_slots)].at);
        PREFETCH(t->pieces + t->piece_slots[slot_of(m->right_hash, t->n_piece_slots)].at);
    }
    for (merge_text *m = texts; m < end; m++) {
        int32_t left = slot_id(t, find_hashed(t, m->left_hash, m->left, m->n_left, "", 0));
        int32_t right = slot_id(t, find_hashed(t, m->right_hash, m->right, m->n_right, "", 0));
        int32_t result = b->last_result = find_result(t, m, b->last_result);
        const char *fault = !m->n_left || !m->n_right ? "has an empty part" : left < 0 ? "has a left part that the vocabulary lacks"
            : right < 0 ? "has a right part that the vocabulary lacks" : result < 0 ? "gives a piece that the vocabulary lacks"
            : byte_of(m->left, m->n_left) >= 0 || byte_of(m->right, m->n_right) >= 0 ? "joins a byte token, which is not supported" : NULL;
        if (fault) return bad_merge(b, rank + (int32_t)(m - texts), m, fault);
        m->found = (merge){left, right, rank + (int32_t)(m - texts), result};
        PREFETCH(&t->merges[first_merge_slot(t, left, right)]);
    }
    for (merge_text *m = texts; m < end; m++) {
        merge *slot = merge_slot(t, m->found.left, m->found.right);
        if (!slot || slot->left >= 0)
            return bad_merge(b, m->found.rank, m, slot ? "is there twice" : "is one of thousands that share one hash: no honest merge list");
        *slot = m->found;

        const unsigned char *left = (const unsigned char *)m->left, *right = (const unsigned char *)m->right, *p = left + m->n_left - 1;
        uint32_t last = 0, first = 0;
        while ((*p & 0xc0) == 0x80) p--;
        utf8_decode(p, left + m->n_left, &last); /* both are pieces, so they are UTF-8 */
        utf8_decode(right, right + m->n_right, &first);
        uint32_t bit = join_bit(t, last, first);
        t->joins[bit >> 5] |= 1u << (bit & 31);
    }
    return 0;
}

static int holds_space(const char *s, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (s[i] == ' ' || (n - i >= 3 && !memcmp(s + i, "\xe2\x96\x81", 3))) return 1;
    return 0;
}

/* index: of the entry in the file, for messages. An added token may also be a piece of the vocabulary, then with the same id. */
static int add_token(builder *b, int index, int32_t id, const char *s, size_t n, int special, int normalized) {
    g4_tokenizer *t = b->tok;
    int32_t known = piece_id(t, s, n);
    added_set *set = &t->added[normalized != 0];
    if (n == 0) return g4_fail(b->err, "%s: added token %d has no text", b->path, index);
    if (n > MAX_ADDED_BYTES)
        return g4_fail(b->err, "%s: added token %d, %s, has %lld bytes; at most %d are supported", b->path, index, show(s, n).text, (long long)n,
            MAX_ADDED_BYTES);
    if (known >= 0 && known != id)
        return g4_fail(b->err, "%s: added token %d, %s, has id %d, but the vocabulary has it as %d", b->path, index, show(s, n).text, (int)id,
            (int)known);
    if (known < 0 && add_piece(b, id, s, n)) return -1;
    /* In the normalized text a space is U+2581, so a token with one would match where it does not stand in the text. */
    if (normalized && holds_space(s, n))
        return g4_fail(b->err, "%s: added token %d, %s, holds a space and is \"normalized\": true, which is not supported", b->path, index,
            show(s, n).text);
    piece_of(t, id)->special = special != 0;
    set->id[set->n++] = id;
    set->begins[(unsigned char)s[0]] = 1;
    return 0;
}

static int compare_pieces(const g4_tokenizer *t, int32_t a, int32_t b) {
    const piece *x = piece_of(t, a), *y = piece_of(t, b);
    int order = memcmp(x->text, y->text, x->size < y->size ? x->size : y->size);
    return order ? order : (x->size > y->size) - (x->size < y->size);
}

/* Shell sort: the sets are small, and it neither recurses nor goes quadratic on the few thousand that some vocabularies have. */
static int tables_done(builder *b) {
    g4_tokenizer *t = b->tok;
    for (int k = 0; k < 2; k++) {
        int32_t *id = t->added[k].id;
        int n = t->added[k].n;
        for (int gap = n / 2; gap > 0; gap = gap == 2 ? 1 : (int)(gap / 2.2)) {
            for (int i = gap; i < n; i++) {
                int32_t x = id[i];
                int hole = i;
                for (; hole >= gap && compare_pieces(t, id[hole - gap], x) > 0; hole -= gap) id[hole] = id[hole - gap];
                id[hole] = x;
            }
        }
        for (int i = 1; i < n; i++)
            if (id[i - 1] == id[i])
                return g4_fail(b->err, "%s: added token %s is there twice", b->path, show_piece(t, id[i]).text);
    }
    return 0;
}

void g4_tokenizer_close(g4_tokenizer *t) {
    if (!t) return;
    free(t->pieces);
    free(t->at);
    free(t->piece_slots);
    free(t->merges);
    free(t->chars);
    free(t->joins);
    for (int k = 0; k < 2; k++) free(t->added[k].id);
    free(t);
}

int32_t g4_token_id(const g4_tokenizer *t, const char *s) { return piece_id(t, s, strlen(s)); }

const char *g4_token_piece(const g4_tokenizer *t, int32_t id, size_t *n) {
    if (id < 0 || id >= t->size || !t->at[id]) return NULL;
    if (n) *n = piece_of(t, id)->size;
    return piece_of(t, id)->text;
}

int g4_token_is_special(const g4_tokenizer *t, int32_t id) {
    return id >= 0 && id < t->size && t->at[id] && piece_of(t, id)->special;
}

int g4_tokenizer_size(const g4_tokenizer *t) { return t->size; }
void g4_free(void *p) { free(p); }

/* ---- 3. tokenizer.json ------------------------------------------------------------------------------------------------ */

/* A member of a node that may be none (0), where g4_json_get would take 0 for the root. */
static uint32_t member(const g4_json *j, uint32_t node, const char *key) { return node ? g4_json_get(j, node, key) : 0; }

static int is_string(const g4_json *j, uint32_t node, const char *expected) {
    return node && j->nodes[node].kind == G4_JSON_STRING && j->nodes[node].size == strlen(expected)
        && !memcmp(g4_json_string(j, node), expected, strlen(expected));
}

static int is_kind(const g4_json *j, uint32_t node, g4_json_kind kind) { return node && j->nodes[node].kind == kind; }

/* Absent, null, or "off": empty, 0 or false. */
static int is_off(const g4_json *j, uint32_t node) {
    double x;
    return !node || is_kind(j, node, G4_JSON_NULL) || is_kind(j, node, G4_JSON_FALSE) || is_string(j, node, "")
        || (!g4_json_double(j, node, &x) && x == 0);
}

/* What a component is, for a message: the name in its "type", or what kind of value stands there. */
static shown component(const g4_json *j, uint32_t node) {
    static const char *const kinds[] = {"null", "false", "true", "a number", "a string", "an array", "an object without a type"};
    uint32_t type = member(j, node, "type");
    shown out;
    if (is_kind(j, type, G4_JSON_STRING)) return show(g4_json_string(j, type), j->nodes[type].size);
    snprintf(out.text, sizeof out.text, "%s", node ? kinds[j->nodes[node].kind] : "nothing");
    return out;
}

static int refuse(const builder *b, const g4_json *j, const char *name, uint32_t node, const char *expected) {
    return g4_fail(b->err, "%s: %s: expected %s, found %s; only tokenizers of Gemma 4's kind are supported", b->path, name, expected,
        component(j, node).text);
}

/* {"type": "Replace", "pattern": {"String": from}, "content": to} */
static int is_replace(const g4_json *j, uint32_t node, const char *from, const char *to) {
    return is_string(j, member(j, node, "type"), "Replace") && is_string(j, member(j, member(j, node, "pattern"), "String"), from)
        && is_string(j, member(j, node, "content"), to);
}

/* Everything but the vocabulary. truncation and padding are for batches, and transformers sets them anew in each call; post_processor adds
 * tokens around a text, and g4_encode adds none; unk_token and fuse_unk are for characters without byte tokens, and there are none: all
 * these are not read. */
static int check_components(const builder *b, const g4_json *j) {
    uint32_t normalizer = g4_json_get(j, 0, "normalizer"), split = g4_json_get(j, 0, "pre_tokenizer");
    uint32_t decoder = g4_json_get(j, 0, "decoder"), model = g4_json_get(j, 0, "model");
    const char *const off[] = {"dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges"};
    char name[64];

    if (!model) return g4_fail(b->err, "%s: this is no tokenizer.json: expected an object with \"model\" in it", b->path);
    if (!is_replace(j, normalizer, " ", "\xe2\x96\x81")) return refuse(b, j, "normalizer", normalizer, "\"Replace\" of \" \" by U+2581");

    /* After the normalizer no space is left, so a split at spaces does nothing, whatever it would do with them. */
    if (split && !is_kind(j, split, G4_JSON_NULL)
        && !(is_string(j, member(j, split, "type"), "Split") && is_string(j, member(j, member(j, split, "pattern"), "String"), " ")
            && is_off(j, member(j, split, "invert"))))
        return refuse(b, j, "pre_tokenizer", split, "\"Split\" at \" \", not inverted, or null");

    const char *const steps[] = {"Replace", "ByteFallback", "Fuse"};
    uint32_t list = member(j, decoder, "decoders"), step = is_kind(j, list, G4_JSON_ARRAY) ? j->nodes[list].first : 0;
    if (!is_string(j, member(j, decoder, "type"), "Sequence"))
        return refuse(b, j, "decoder", decoder, "a \"Sequence\" of Replace, ByteFallback, Fuse");
    for (int i = 0; i < 3; i++, step = step ? j->nodes[step].next : 0) {
        snprintf(name, sizeof name, "decoder.decoders[%d]", i);
        if (i == 0 && !is_replace(j, step, "\xe2\x96\x81", " ")) return refuse(b, j, name, step, "\"Replace\" of U+2581 by \" \"");
        if (!is_string(j, member(j, step, "type"), steps[i])) return refuse(b, j, name, step, steps[i]);
    }
    if (step) return refuse(b, j, "decoder.decoders[3]", step, "no more than Replace, ByteFallback, Fuse");

    uint32_t type = member(j, model, "type");
    if (type ? !is_string(j, type, "BPE") : !member(j, model, "merges")) return refuse(b, j, "model", model, "\"BPE\"");
    if (!is_kind(j, member(j, model, "byte_fallback"), G4_JSON_TRUE))
        return refuse(b, j, "model.byte_fallback", member(j, model, "byte_fallback"), "true");
    for (size_t i = 0; i < sizeof off / sizeof off[0]; i++) {
        snprintf(name, sizeof name, "model.%s", off[i]);
        if (!is_off(j, member(j, model, off[i]))) return refuse(b, j, name, member(j, model, off[i]), "null or false");
    }
    return 0;
}

/* "a b": no piece holds a space, so the only one parts the two. `list` names the list of merges. */
static int split_merge(const builder *b, const char *list, int32_t rank, const char *s, size_t n, merge_text *text) {
    const char *space = memchr(s, ' ', n);
    size_t n_left = space ? (size_t)(space - s) : 0, n_right = space ? n - n_left - 1 : 0;
    if (!space || memchr(space + 1, ' ', n_right))
        return g4_fail(b->err, "%s: %s[%d]: expected two pieces and one space between them, found %s", b->path, list, (int)rank, show(s, n).text);
    *text = (merge_text){.left = s, .n_left = n_left, .right = space + 1, .n_right = n_right};
    return 0;
}

/* "a b" or ["a", "b"], which may stand side by side. An array can spell any text. */
static int read_merge(const builder *b, const g4_json *j, uint32_t node, int32_t rank, merge_text *text) {
    const g4_json_node *m = &j->nodes[node];
    if (m->kind == G4_JSON_STRING) return split_merge(b, "model.merges", rank, j->text + m->first, m->size, text);
    const g4_json_node *left = m->kind == G4_JSON_ARRAY && m->size == 2 ? &j->nodes[m->first] : NULL;
    const g4_json_node *right = left ? &j->nodes[left->next] : NULL;
    if (!left || left->kind != G4_JSON_STRING || right->kind != G4_JSON_STRING)
        return g4_fail(b->err, "%s: model.merges[%d]: expected \"a b\" or [\"a\", \"b\"], found %s", b->path, (int)rank,
            m->kind == G4_JSON_ARRAY ? "another array" : component(j, node).text);
    *text = (merge_text){.left = j->text + left->first, .n_left = left->size, .right = j->text + right->first, .n_right = right->size};
    return 0;
}

/* One entry of added_tokens. What would make it match elsewhere is refused. */
static int read_added_token(builder *b, const g4_json *j, uint32_t node, int index) {
    static const char *const off[] = {"single_word", "lstrip", "rstrip"};
    uint32_t content = member(j, node, "content");
    int64_t id;
    for (size_t i = 0; i < sizeof off / sizeof off[0]; i++)
        if (!is_off(j, member(j, node, off[i])))
            return g4_fail(b->err, "%s: added_tokens[%d], %s, has \"%s\": true, which is not supported", b->path, index,
                show(g4_json_string(j, content), j->nodes[content].size).text, off[i]);
    g4_json_int(j, member(j, node, "id"), &id); /* count_ids has seen it */
    return add_token(b, index, (int32_t)id, g4_json_string(j, content), j->nodes[content].size, !is_off(j, member(j, node, "special")),
        !is_off(j, member(j, node, "normalized")));
}

/* Checks all ids, and gives the sizes that tables_open needs. */
static int count_ids(const builder *b, const g4_json *j, uint32_t vocab, uint32_t added, int64_t *n_ids, size_t *n_pieces, size_t *bytes) {
    int index = 0;
    int64_t id;
    *n_ids = 1;
    *n_pieces = *bytes = 0;
    for (uint32_t i = j->nodes[vocab].first; i; i = j->nodes[i].next, (*n_pieces)++) {
        if (g4_json_int(j, i, &id) || id < 0 || id > MAX_ID)
            return g4_fail(b->err, "%s: model.vocab: the id of %s is %s; expected an integer 0 .. %d", b->path,
                show(j->text + j->nodes[i].key, j->nodes[i].key_size).text,
                is_kind(j, i, G4_JSON_NUMBER) ? show(g4_json_string(j, i), j->nodes[i].size).text : component(j, i).text, MAX_ID);
        if (id >= *n_ids) *n_ids = id + 1;
        *bytes += piece_bytes(j->nodes[i].key_size);
    }
    for (uint32_t i = added ? j->nodes[added].first : 0; i; i = j->nodes[i].next, index++, (*n_pieces)++) {
        uint32_t content = member(j, i, "content");
        if (!is_kind(j, content, G4_JSON_STRING)) return g4_fail(b->err, "%s: added_tokens[%d] has no text in \"content\"", b->path, index);
        if (g4_json_int(j, member(j, i, "id"), &id) || id < 0 || id > MAX_ID)
            return g4_fail(b->err, "%s: added_tokens[%d], %s: expected an \"id\" in 0 .. %d", b->path, index,
                show(g4_json_string(j, content), j->nodes[content].size).text, MAX_ID);
        if (id >= *n_ids) *n_ids = id + 1;
        *bytes += piece_bytes(j->nodes[content].size);
    }
    return 0;
}

static int read_json(builder *b, const g4_json *j) {
    if (check_components(b, j)) return -1;
    uint32_t model = g4_json_get(j, 0, "model"), vocab = member(j, model, "vocab"), merges = member(j, model, "merges");
    uint32_t added = g4_json_get(j, 0, "added_tokens");
    int64_t n_ids, id;
    size_t n_pieces, bytes;
    int32_t rank = 0;
    int n, index = 0;
    merge_text batch[MERGE_BATCH];

    if (!is_kind(j, vocab, G4_JSON_OBJECT)) return refuse(b, j, "model.vocab", vocab, "an object");
    if (!is_kind(j, merges, G4_JSON_ARRAY)) return refuse(b, j, "model.merges", merges, "an array");
    if (!j->nodes[merges].size) return g4_fail(b->err, "%s: model.merges is empty; every text would fall apart into characters", b->path);
    if (added && !is_kind(j, added, G4_JSON_ARRAY)) return refuse(b, j, "added_tokens", added, "an array");
    if (count_ids(b, j, vocab, added, &n_ids, &n_pieces, &bytes)) return -1;
    if (tables_open(b, n_ids, n_pieces, bytes, j->nodes[merges].size, added ? j->nodes[added].size : 0)) return -1;
    for (uint32_t i = j->nodes[vocab].first; i; i = j->nodes[i].next) {
        g4_json_int(j, i, &id);
        if (add_piece(b, (int32_t)id, j->text + j->nodes[i].key, j->nodes[i].key_size)) return -1;
    }
    if (pieces_done(b)) return -1;
    for (uint32_t i = j->nodes[merges].first; i; rank += n) {
        for (n = 0; i && n < MERGE_BATCH; i = j->nodes[i].next, n++)
            if (read_merge(b, j, i, rank + n, &batch[n])) return -1;
        if (add_merges(b, rank, batch, n)) return -1;
    }
    for (uint32_t i = added ? j->nodes[added].first : 0; i; i = j->nodes[i].next)
        if (read_added_token(b, j, i, index++)) return -1;
    return tables_done(b);
}

/* -- GGUF -- */

/* The texts that are found in a text before anything else: Gemma 4's added tokens. The list is the format's, not the file's: which of them a file marks
 * as control tokens depends on how it was converted. Others that it marks so, a fine-tuned model's own, are looked for too. */
static const char *const special_texts[] = {
    "<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", "<|\"|>",
    "<|think|>", "<|channel>", "<channel|>", "<|turn>", "<turn|>", "<|image>", "<|audio>", "<|image|>", "<|audio|>", "<image|>", "<audio|>", "<|video|>"};
enum { N_SPECIAL_TEXTS = sizeof special_texts / sizeof special_texts[0], TYPE_CONTROL = 3, TYPE_USER_DEFINED = 4 };

static int is_special_text(const char *s, size_t n) {
    if (n < 5 || s[0] != '<') return 0;
    for (int i = 0; i < N_SPECIAL_TEXTS; i++)
        if (n == strlen(special_texts[i]) && !memcmp(s, special_texts[i], n)) return 1;
    return 0;
}

static int holds_text(const g4_gguf_key *k, const char *text) {
    const unsigned char *p = k ? k->data : NULL;
    size_t n;
    if (!k || k->is_array || k->type != G4_GGUF_STRING) return 0;
    const char *s = g4_gguf_string(&p, &n);
    return n == strlen(text) && !memcmp(s, text, n);
}

/* An array of strings that must be there. */
static const g4_gguf_key *string_array(const builder *b, const g4_gguf *g, const char *name, uint64_t most) {
    const g4_gguf_key *k = g4_gguf_find(g, name);
    if (k && k->is_array && k->type == G4_GGUF_STRING && k->n > 0 && k->n <= most) return k;
    g4_fail(b->err, "%s: %s: expected an array of 1 to %lld strings, found %s", b->path, name, (long long)most,
        !k ? "no such key" : !k->is_array || k->type != G4_GGUF_STRING ? "another value" : k->n ? "more" : "none");
    return NULL;
}

static int read_gguf(builder *b, const g4_gguf *g) {
    const g4_gguf_key *model = g4_gguf_find(g, "tokenizer.ggml.model"), *types = g4_gguf_find(g, "tokenizer.ggml.token_type");
    /* Ollama calls it "llama" and puts Gemma 4's name under "pre". */
    if (!holds_text(model, "gemma4") && !holds_text(g4_gguf_find(g, "tokenizer.ggml.pre"), "gemma4"))
        return g4_fail(b->err, "%s: tokenizer.ggml.model: expected \"gemma4\"%s; only tokenizers of Gemma 4's kind are supported", b->path,
            model ? ", found another" : ", found no such key");
    const g4_gguf_key *tokens = string_array(b, g, "tokenizer.ggml.tokens", MAX_ID + 1);
    const g4_gguf_key *merges = tokens ? string_array(b, g, "tokenizer.ggml.merges", INT32_MAX / 2) : NULL;
    if (!merges) return -1;
    if (types && (!types->is_array || types->n != tokens->n))
        return g4_fail(b->err, "%s: tokenizer.ggml.token_type: expected an array of %lld, one for each of tokenizer.ggml.tokens", b->path, (long long)tokens->n);

    const int32_t n_ids = (int32_t)tokens->n;
    const unsigned char *p = tokens->data;
    size_t bytes = 0, n;
    int n_added = 0, count;
    merge_text batch[MERGE_BATCH];
    for (int32_t id = 0; id < n_ids; id++) {
        g4_gguf_string(&p, &n);
        bytes += piece_bytes(n);
    }
    if (tables_open(b, n_ids, (size_t)n_ids, bytes, (size_t)merges->n, (size_t)n_ids)) return -1;
    p = tokens->data;
    for (int32_t id = 0; id < n_ids; id++) {
        const char *s = g4_gguf_string(&p, &n);
        if (add_piece(b, id, s, n)) return -1;
    }
    if (pieces_done(b)) return -1;
    p = merges->data;
    for (int32_t rank = 0; rank < (int32_t)merges->n; rank += count) {
        for (count = 0; rank + count < (int32_t)merges->n && count < MERGE_BATCH; count++) {
            const char *s = g4_gguf_string(&p, &n);
            if (split_merge(b, "tokenizer.ggml.merges", rank + count, s, n, &batch[count])) return -1;
        }
        if (add_merges(b, rank, batch, count)) return -1;
    }
    p = tokens->data;
    for (int32_t id = 0; id < n_ids; id++) {
        const char *s = g4_gguf_string(&p, &n);
        int64_t type = 0;
        if (types && g4_gguf_int(types, (uint64_t)id, &type))
            return g4_fail(b->err, "%s: tokenizer.ggml.token_type: expected integers", b->path);
        int known = is_special_text(s, n);
        if ((known || type == TYPE_CONTROL || type == TYPE_USER_DEFINED) && add_token(b, n_added++, id, s, n, known || type == TYPE_CONTROL, 0)) return -1;
    }
    return tables_done(b);
}

/* The path may be the file or a directory that holds it; which, only opening it tells. The first guess is the one whose failure is reported. */
static int open_file(g4_file *f, const char *path, char **name, g4_error *err) {
    size_t n = strlen(path);
    int is_json = n >= 5 && (!strcmp(path + n - 5, ".json") || !strcmp(path + n - 5, ".gguf"));
    char *inside = malloc(n + sizeof "/tokenizer.json"), *itself = malloc(n + 1);
    int failed = -1;
    if (!inside || !itself) {
        g4_fail(err, "%s: out of memory", path);
    } else {
        sprintf(inside, "%s%stokenizer.json", path, n && path[n - 1] == '/' ? "" : "/");
        strcpy(itself, path);
        *name = is_json ? itself : inside;
        failed = g4_file_open(f, *name, 0, err);
        if (failed) {
            *name = is_json ? inside : itself;
            failed = g4_file_open(f, *name, 0, NULL);
        }
    }
    if (failed || *name != inside) free(inside);
    if (failed || *name != itself) free(itself);
    return failed;
}

g4_tokenizer *g4_tokenizer_parse(const char *text, size_t n, const char *what, g4_error *err) {
    g4_json j;
    builder b = {.path = what, .err = err};
    int failed;
    if (n >= 4 && !memcmp(text, "GGUF", 4)) {
        g4_gguf *g = g4_gguf_parse((const unsigned char *)text, n, what, 1, err);
        failed = g ? read_gguf(&b, g) : -1;
        g4_gguf_close(g);
    } else {
        if (g4_json_parse(&j, text, n, what, err)) return NULL;
        failed = read_json(&b, &j);
        g4_json_free(&j);
    }
    if (!failed) return b.tok;
    g4_tokenizer_close(b.tok);
    return NULL;
}

g4_tokenizer *g4_tokenizer_open(const char *path, g4_error *err) {
    g4_file file;
    char *name = NULL;
    if (open_file(&file, path, &name, err)) return NULL;
    g4_tokenizer *t = g4_tokenizer_parse((const char *)file.data, file.size, name, err);
    g4_file_close(&file);
    free(name);
    return t;
}

/* ---- 4. Encoding ------------------------------------------------------------------------------------------------------ */

static const uint32_t CUT = (uint32_t)1 << 31; /* in `symbols`: no token spans the place before this symbol */
static const uint32_t NONE = UINT32_MAX;

enum {
    BLOCK = 1 << 20,    /* symbols held at once, more only where no cut is found: bounds memory on long texts */
    WINDOW = 64,        /* symbols merged at once */
    CACHE_SIZE = 1 << 14
};

/* A symbol of a window: what BPE merges. Merged ones stay, linked out. */
typedef struct symbol {
    uint32_t id;
    uint32_t prev, next;   /* NONE at the ends */
    uint32_t rank, result; /* of merging it with the next one; rank NONE: they do not merge */
} symbol;

/* A stretch that was encoded before in this block; its ids are where they were written. */
typedef struct cached {
    uint32_t hash, at, ids;   /* first symbol; first id, counted from the block's */
    uint16_t n, n_ids;        /* n 0: empty */
} cached;

typedef struct encoder {
    const g4_tokenizer *tok;
    g4_error *err;
    int32_t *ids;             /* [n_ids] the result */
    size_t n_ids, ids_capacity;
    uint32_t *symbols;        /* [n_symbols] of the block: ids, with CUT */
    size_t n_symbols, symbols_capacity;
    cached *cache;            /* [cache_size] */
    uint32_t cache_size;
    symbol *window;           /* [window_capacity] */
    uint64_t *heap;           /* [3 * window_capacity] rank << 32 | place in window: the lowest rank first, leftmost on ties */
    int32_t *token;           /* [n_tokens] what the window was merged into, and where each begins */
    uint32_t *token_at;
    size_t window_capacity;
    uint32_t n_heap, n_tokens;
    const uint32_t *last;     /* [n_last] the symbols that `token` was made of */
    uint32_t n_last;
} encoder;

/* Room for n items of `size` bytes in p, which holds *capacity of them. NULL: no memory, p is as it was. */
static void *reserve(void *p, size_t *capacity, size_t n, size_t size) {
    size_t wanted = *capacity + *capacity / 2 > n ? *capacity + *capacity / 2 : n;
    if (n <= *capacity && p) return p;
    if (wanted < *capacity || wanted > SIZE_MAX / size) return NULL;
    void *grown = realloc(p, wanted * size);
    if (grown) *capacity = wanted;
    return grown;
}

static int no_memory(const encoder *e) {
    return g4_fail(e->err, "out of memory while encoding a text; %lld ids were made so far", (long long)e->n_ids);
}

static int reserve_ids(encoder *e, size_t more) {
    int32_t *ids = reserve(e->ids, &e->ids_capacity, e->n_ids + more, sizeof *e->ids);
    if (!ids) return no_memory(e);
    e->ids = ids;
    return 0;
}

/* Reads characters from *p on into symbols, to the end of the text, or to the first cut after BLOCK symbols. */
static int read_block(encoder *e, const unsigned char **p, const unsigned char *end) {
    const g4_tokenizer *t = e->tok;
    const uint32_t nothing = N_CODE_POINTS;
    uint32_t before = nothing;
    size_t n = 0;
    while (*p < end) {
        uint32_t c = 0;
        int step = utf8_decode(*p, end, &c);
        if (!step) {
            c = REPLACEMENT;
            step = 1;
        }
        if (c == ' ') c = SPACE;
        int32_t id = char_id(t, c);
        int cut = before == nothing || id < 0 || !joins(t, before, c);
        if (cut && n >= BLOCK) break;
        if (n + 4 > e->symbols_capacity) {
            size_t wanted = n ? n + 4 : (size_t)(end - *p) < BLOCK ? (size_t)(end - *p) + 4 : BLOCK + 4;
            uint32_t *symbols = n >= CUT / 4 ? NULL : reserve(e->symbols, &e->symbols_capacity, wanted, sizeof *symbols);
            if (!symbols) return no_memory(e);
            e->symbols = symbols;
        }
        if (id >= 0) {
            e->symbols[n++] = cut ? (uint32_t)id | CUT : (uint32_t)id;
            before = c;
        } else { /* no merge has a part that is a byte token, so these stay as they are */
            unsigned char bytes[4];
            for (int i = 0, size = utf8_encode(c, bytes); i < size; i++) e->symbols[n++] = (uint32_t)t->byte_id[bytes[i]] | CUT;
            before = nothing;
        }
        *p += step;
    }
    e->n_symbols = n;
    return 0;
}

static void heap_push(encoder *e, uint64_t x) {
    uint32_t i = e->n_heap++;
    for (uint32_t up; i > 0 && e->heap[up = (i - 1) / 2] > x; i = up) e->heap[i] = e->heap[up];
    e->heap[i] = x;
}

static uint64_t heap_pop(encoder *e) {
    uint64_t top = e->heap[0], x = e->heap[--e->n_heap];
    uint32_t i = 0, n = e->n_heap;
    for (uint32_t child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && e->heap[child + 1] < e->heap[child]) child++;
        if (e->heap[child] >= x) break;
        e->heap[i] = e->heap[child];
    }
    e->heap[i] = x;
    return top;
}

/* Looks up what merging window[i] with the next symbol would give, and puts that on the heap. */
static void offer(encoder *e, uint32_t i) {
    symbol *s = &e->window[i];
    const merge *m = s->next == NONE ? NULL : merge_slot(e->tok, (int32_t)s->id, (int32_t)e->window[s->next].id);
    s->rank = NONE;
    if (!m || m->left < 0) return;
    s->rank = (uint32_t)m->rank;
    s->result = (uint32_t)m->result;
    heap_push(e, (uint64_t)s->rank << 32 | i);
}

/* BPE of n symbols into token [n_tokens] and token_at: merge the adjacent pair of the lowest rank, the leftmost of equal ones, until none
 * is left. O(n log n). A pair on the heap whose symbols have changed since is known by its rank, which is no longer the symbol's. */
static int merge_window(encoder *e, const uint32_t *symbols, uint32_t n) {
    if (n == e->n_last && !memcmp(symbols, e->last, n * sizeof *symbols)) return 0; /* runs of one character */
    if (n > e->window_capacity) {
        size_t capacity = e->window_capacity;
        symbol *window = reserve(e->window, &capacity, n > WINDOW ? n : WINDOW, sizeof *window);
        if (window) e->window = window;
        uint64_t *heap = !window || capacity > SIZE_MAX / (3 * sizeof *heap) ? NULL : realloc(e->heap, 3 * capacity * sizeof *heap);
        if (heap) e->heap = heap;
        int32_t *token = heap ? realloc(e->token, capacity * sizeof *token) : NULL;
        if (token) e->token = token;
        uint32_t *token_at = token ? realloc(e->token_at, capacity * sizeof *token_at) : NULL;
        if (!token_at) return no_memory(e);
        e->token_at = token_at;
        e->window_capacity = capacity;
    }
    symbol *w = e->window;
    for (uint32_t i = 0; i < n; i++) w[i] = (symbol){symbols[i], i ? i - 1 : NONE, i + 1 < n ? i + 1 : NONE, NONE, 0};
    e->n_heap = 0;
    for (uint32_t i = 0; i + 1 < n; i++) offer(e, i);
    while (e->n_heap) {
        uint64_t top = heap_pop(e);
        uint32_t i = (uint32_t)top, rank = (uint32_t)(top >> 32), gone = w[i].next;
        if (w[i].rank != rank) continue;
        w[i].id = w[i].result;
        w[i].next = w[gone].next;
        w[gone].rank = NONE;
        if (w[i].next != NONE) w[w[i].next].prev = i;
        offer(e, i);
        if (w[i].prev != NONE) offer(e, w[i].prev);
    }
    e->n_tokens = 0;
    for (uint32_t i = 0; i != NONE; i = w[i].next) {
        e->token[e->n_tokens] = (int32_t)w[i].id;
        e->token_at[e->n_tokens++] = i;
    }
    e->last = symbols;
    e->n_last = n;
    return 0;
}

/* Symbols of a token that lies inside a stretch: characters, for a stretch of several symbols holds no byte tokens. */
static uint32_t token_length(const g4_tokenizer *t, int32_t id) {
    uint32_t n = 0;
    const piece *p = piece_of(t, id);
    for (uint32_t i = 0; i < p->size; i++) n += (p->text[i] & 0xc0) != 0x80;
    return n;
}

/* A stretch longer than a window, window by window, with the same result as merging it whole.
 *
 * Why that is possible: tokens t1 t2 .. tk are the BPE of their text if and only if each pair of neighbours is the BPE of its own
 * text. For as long as no merge has crossed a border between two of them, what happens inside two neighbours is what would happen if
 * they stood alone, step by step; so the first merge that crosses the border would cross it there too, and the other way round.
 * So if one window gives .. a b and the next, begun at b, gives b c .., then every pair in .. a b c .. is right. That token b is the
 * hinge. When a window does not begin with the hinge, what follows it reached further back: begin earlier and look further. The window
 * doubles each time and never shrinks, so there are at most log2(n) such steps, and O(n log n) work in all. */
static int encode_long_stretch(encoder *e, const uint32_t *symbols, uint32_t n) {
    size_t begin = e->n_ids;
    uint32_t at = 0, size = WINDOW; /* the window begins with the hinge, which is the last id written */
    for (;;) {
        uint32_t take = n - at < size ? n - at : size, hinge = 0;
        if (merge_window(e, symbols + at, take)) return -1;
        int first = e->n_ids > begin;
        if (first && e->ids[e->n_ids - 1] != e->token[0]) {
            uint32_t failed_at = at;
            do {
                e->n_ids--;
                if (e->n_ids > begin) at -= token_length(e->tok, e->ids[e->n_ids - 1]);
            } while (e->n_ids > begin && failed_at - at < size / 2);
            size *= 2;
            continue;
        }
        while (hinge + 1 < e->n_tokens && (hinge == 0 || at + take == n || e->token_at[hinge + 1] <= take / 2)) hinge++;
        for (uint32_t i = (uint32_t)first; i <= hinge; i++) e->ids[e->n_ids++] = e->token[i];
        if (at + take == n) return 0;
        at += e->token_at[hinge];
        if (hinge == 0) size *= 2; /* the whole window is one token */
    }
}

/* The block's symbols to ids, one stretch between cuts after the other. Short ones are mostly words, and come again. */
static int encode_block(encoder *e) {
    uint32_t n = (uint32_t)e->n_symbols, used = 16; /* entries of the cache: a short block between two added tokens must not clear them all */
    size_t base = e->n_ids;
    if (reserve_ids(e, n)) return -1;
    while (used < CACHE_SIZE && used < n / 4) used *= 2;
    if (used > e->cache_size) {
        cached *cache = realloc(e->cache, used * sizeof *cache);
        if (!cache) return no_memory(e);
        e->cache = cache;
        e->cache_size = used;
    }
    memset(e->cache, 0, used * sizeof *e->cache);
    e->n_last = 0;
    for (uint32_t i = 0, next; i < n; i = next) {
        uint32_t *s = e->symbols + i, length;
        uint64_t hash = s[0] &= ~CUT;
        for (next = i + 1; next < n && !(e->symbols[next] & CUT); next++) hash = (hash ^ e->symbols[next]) * 0x9e3779b97f4a7c15u;
        length = next - i;
        if (length == 1) {
            e->ids[e->n_ids++] = (int32_t)s[0];
            continue;
        }
        if (length > WINDOW) {
            if (encode_long_stretch(e, s, length)) return -1;
            continue;
        }
        cached *c = &e->cache[mix(hash) & (used - 1)];
        if (c->n != length || c->hash != (uint32_t)hash || memcmp(e->symbols + c->at, s, length * sizeof *s)) {
            if (merge_window(e, s, length)) return -1;
            *c = (cached){(uint32_t)hash, i, (uint32_t)(e->n_ids - base), (uint16_t)length, (uint16_t)e->n_tokens};
            memcpy(e->ids + e->n_ids, e->token, e->n_tokens * sizeof *e->ids);
        } else {
            memcpy(e->ids + e->n_ids, e->ids + base + c->ids, c->n_ids * sizeof *e->ids);
        }
        e->n_ids += c->n_ids;
    }
    return 0;
}

static int encode_text(encoder *e, const unsigned char *p, const unsigned char *end) {
    while (p < end)
        if (read_block(e, &p, end) || encode_block(e)) return -1;
    return 0;
}

/* The id of the longest added token that begins at p, or -1. Of the sorted tokens, [low, high) are those that agree with p so far. */
static int32_t match_added(const g4_tokenizer *t, const added_set *set, const unsigned char *p, const unsigned char *end) {
    int low = 0, high = set->n;
    int32_t found = -1;
    for (uint32_t i = 0; low < high; i++, p++) {
        if (piece_of(t, set->id[low])->size == i) found = set->id[low++];
        if (p == end) break;
        for (int side = 0; side < 2; side++) { /* first the lowest with a byte >= *p here, then the lowest with a byte > *p */
            int a = low, b = high;
            while (a < b) {
                int middle = a + (b - a) / 2;
                if ((unsigned char)piece_of(t, set->id[middle])->text[i] < *p + side) a = middle + 1;
                else b = middle;
            }
            *(side ? &high : &low) = a;
        }
    }
    return found;
}

/* Cuts the added tokens of set k out of the text, leftmost first and the longest at a place; what lies between them goes to the next set,
 * and at last to BPE. In plain text a special one is stepped over, as text. */
static int encode_around_added(encoder *e, const unsigned char *p, const unsigned char *end, int k, int flags) {
    const added_set *set = &e->tok->added[k];
    const unsigned char *text = p; /* where what is not encoded yet begins */
    while (p < end) {
        int32_t id = set->begins[*p] ? match_added(e->tok, set, p, end) : -1;
        if (id < 0) {
            p++;
            continue;
        }
        const piece *token = piece_of(e->tok, id);
        if (!(flags & G4_PLAIN_TEXT) || !token->special) {
            if ((k == 0 ? encode_around_added(e, text, p, 1, flags) : encode_text(e, text, p)) || reserve_ids(e, 1)) return -1;
            e->ids[e->n_ids++] = id;
            text = p + token->size;
        }
        p += token->size;
    }
    return k == 0 ? encode_around_added(e, text, end, 1, flags) : encode_text(e, text, end);
}

int g4_encode(const g4_tokenizer *t, const char *text, size_t n, int flags, int32_t **ids, size_t *n_ids, g4_error *err) {
    encoder e = {.tok = t, .err = err};
    const unsigned char *p = (const unsigned char *)(n ? text : "");
    int failed = encode_around_added(&e, p, p + n, 0, flags);
    if (!failed) failed = reserve_ids(&e, 1); /* not NULL for an empty text */
    free(e.symbols);
    free(e.cache);
    free(e.window);
    free(e.heap);
    free(e.token);
    free(e.token_at);
    if (failed) {
        free(e.ids);
        return -1;
    }
    int32_t *shrunk = realloc(e.ids, (e.n_ids ? e.n_ids : 1) * sizeof *e.ids);
    *ids = shrunk ? shrunk : e.ids;
    *n_ids = e.n_ids;
    return 0;
}

/* ---- 5. Decoding ------------------------------------------------------------------------------------------------------ */

struct g4_decoder {
    const g4_tokenizer *tok;
    int flags;
    unsigned char *run; /* [n_run] bytes of the byte tokens since the last other token: only the whole run shows what it is */
    size_t n_run, run_capacity;
    char *text;         /* what the last call gave */
    size_t text_capacity;
};

g4_decoder *g4_decoder_open(const g4_tokenizer *t, int flags, g4_error *err) {
    g4_decoder *d = calloc(1, sizeof *d);
    if (!d) {
        g4_fail(err, "out of memory for a decoder");
        return NULL;
    }
    d->tok = t;
    d->flags = flags;
    return d;
}

void g4_decoder_close(g4_decoder *d) {
    if (!d) return;
    free(d->run);
    free(d->text);
    free(d);
}

/* Gives the run as text, followed by the piece. */
static int give(g4_decoder *d, const char *s, size_t size, const char **text, size_t *n, g4_error *err) {
    char *o = d->n_run > SIZE_MAX / 4 ? NULL : reserve(d->text, &d->text_capacity, 3 * d->n_run + size + 1, 1);
    if (!o) return g4_fail(err, "out of memory while decoding (a run of %lld byte tokens)", (long long)d->n_run);
    d->text = o;
    if (d->n_run && utf8_valid((const char *)d->run, d->n_run)) {
        memcpy(o, d->run, d->n_run);
        o += d->n_run;
    } else {
        for (size_t i = 0; i < d->n_run; i++, o += 3) memcpy(o, "\xef\xbf\xbd", 3);
    }
    d->n_run = 0;
    for (size_t i = 0; i < size; i++) {
        int space = size - i >= 3 && !memcmp(s + i, "\xe2\x96\x81", 3);
        *o++ = space ? ' ' : s[i];
        if (space) i += 2;
    }
    *o = 0;
    *text = d->text;
    *n = (size_t)(o - d->text);
    return 0;
}

int g4_decode_push(g4_decoder *d, int32_t id, const char **text, size_t *n, g4_error *err) {
    size_t size = 0;
    const char *s = g4_token_piece(d->tok, id, &size);
    if (!s) return g4_fail(err, "token id %d has no piece; ids of this vocabulary are 0 .. %d", (int)id, (int)d->tok->size - 1);
    int byte = byte_of(s, size);
    *text = "";
    *n = 0;
    if ((d->flags & G4_SKIP_SPECIAL) && piece_of(d->tok, id)->special) return 0;
    if (byte < 0) return give(d, s, size, text, n, err);
    unsigned char *run = reserve(d->run, &d->run_capacity, d->n_run + 1, 1);
    if (!run) return g4_fail(err, "out of memory while decoding (a run of %lld byte tokens)", (long long)d->n_run);
    d->run = run;
    run[d->n_run++] = (unsigned char)byte;
    return 0;
}

int g4_decode_end(g4_decoder *d, const char **text, size_t *n, g4_error *err) { return give(d, "", 0, text, n, err); }
