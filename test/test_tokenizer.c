/* test_tokenizer.c - the tokenizer against the plain algorithm, against hostile files, and against `tokenizers`.
 *
 *     test_tokenizer                                       the tests
 *     test_tokenizer compare TOKENIZER.json STRINGS.jsonl  ids and texts made by reference/tokenizer_strings.py
 *     test_tokenizer bench TOKENIZER.json TEXT             milliseconds to open, and to encode the file
 *
 * Tests on the real vocabulary need SHARED and G4_TOKENIZER_JSON, the file that $SHARED/tools/gemma4_tokenizer.py writes.
 * Reading order: strings and toys, the plain algorithm, the tests in the order of main.
 */
#include "gemma4.h"
#include "test.h"

#include <time.h>

#define TEMPORARY "test_tokenizer.tmp.json"

/* ---- Strings and toys ------------------------------------------------------------------------------------------------- */

typedef struct string {
    char *s; /* [n], then NUL */
    size_t n, capacity;
} string;

static void append(string *t, const char *s, size_t n) {
    if (t->n + n + 1 > t->capacity) {
        t->capacity = 2 * (t->n + n + 1);
        t->s = realloc(t->s, t->capacity);
        if (!t->s) abort();
    }
    if (n) memcpy(t->s + t->n, s, n);
    t->n += n;
    t->s[t->n] = 0;
}

static void append_format(string *t, const char *format, ...) {
    char line[4096];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    append(t, line, strlen(line));
}

static void append_quoted(string *t, const char *s) {
    append(t, "\"", 1);
    for (; *s; s++) {
        if ((unsigned char)*s < 0x20 || *s == '"' || *s == '\\') append_format(t, "\\u%04x", (unsigned char)*s);
        else append(t, s, 1);
    }
    append(t, "\"", 1);
}

static uint64_t random_state = 1;
static uint32_t random_below(uint32_t n) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((random_state >> 33) % n);
}

/* A tokenizer.json in parts, any of which a test may replace. Ids 0 .. 4 are <pad> <eos> <bos> <unk> <mask>, then come 256 bytes. */
typedef struct toy {
    const char *normalizer, *pre_tokenizer, *decoder, *type, *flags, *vocab, *merges, *added, *more;
} toy;

#define ADDED(id, text) "{\"id\":" #id ",\"content\":\"" text "\",\"single_word\":false,\"lstrip\":false,\"rstrip\":false,\"normalized\":false,\"special\":true}"
#define REPLACE "{\"type\":\"Replace\",\"pattern\":{\"String\":\"\xe2\x96\x81\"},\"content\":\" \"}"
#define SPLIT(invert) "{\"type\":\"Split\",\"pattern\":{\"String\":\" \"},\"behavior\":\"MergedWithPrevious\",\"invert\":" invert "}"

static const toy plain_toy = {
    "{\"type\":\"Replace\",\"pattern\":{\"String\":\" \"},\"content\":\"\xe2\x96\x81\"}",
    SPLIT("false"),
    "{\"type\":\"Sequence\",\"decoders\":[" REPLACE ",{\"type\":\"ByteFallback\"},{\"type\":\"Fuse\"}]}",
    "\"type\":\"BPE\",",
    "\"dropout\":null,\"unk_token\":\"<unk>\",\"continuing_subword_prefix\":null,\"end_of_word_suffix\":null,\"fuse_unk\":true,\"byte_fallback\":true,"
    "\"ignore_merges\":false,",
    "\"a\":261,\"b\":262,\"c\":263,\"\xe2\x96\x81\":264,\"ab\":265,\"bc\":266,\"abc\":267,\"aa\":268,\"\\n\":269,\"\\n\\n\":270,\"<\":271",
    "[[\"a\",\"b\"],[\"b\",\"c\"],[\"ab\",\"c\"],[\"a\",\"a\"],[\"\\n\",\"\\n\"]]",
    ADDED(0, "<pad>") "," ADDED(1, "<eos>") "," ADDED(2, "<bos>") "," ADDED(3, "<unk>") "," ADDED(4, "<mask>"),
    "",
};

/* without: a byte that is left out, -1 for none */
static string toy_json(const toy *t, int without) {
    string out = {0};
    append_format(&out, "{\"version\":\"1.0\",\"added_tokens\":[%s],\"normalizer\":%s,\"pre_tokenizer\":%s,\"decoder\":%s,%s\"model\":{",
        t->added, t->normalizer, t->pre_tokenizer, t->decoder, t->more);
    append_format(&out, "%s%s\"vocab\":{\"<pad>\":0,\"<eos>\":1,\"<bos>\":2,\"<unk>\":3,\"<mask>\":4,", t->type, t->flags);
    for (int x = 0; x < 256; x++)
        if (x != without) append_format(&out, "\"<0x%02X>\":%d,", x, 5 + x);
    append(&out, t->vocab, strlen(t->vocab));
    append_format(&out, "},\"merges\":");
    append(&out, t->merges, strlen(t->merges));
    append_format(&out, "}}");
    return out;
}

static g4_tokenizer *open_bytes(const char *s, size_t n, g4_error *err) {
    FILE *f = fopen(TEMPORARY, "wb");
    if (!f || fwrite(s, 1, n, f) != n || fclose(f)) {
        printf("cannot write %s here\n", TEMPORARY);
        exit(2);
    }
    g4_tokenizer *t = g4_tokenizer_open(TEMPORARY, err);
    remove(TEMPORARY);
    return t;
}

static g4_tokenizer *open_toy(const toy *t, g4_error *err) {
    string json = toy_json(t, -1);
    g4_tokenizer *tok = open_bytes(json.s, json.n, err);
    free(json.s);
    return tok;
}

/* The ids as a text, "9259 1902". */
static string encoded(const g4_tokenizer *t, const char *s, size_t n, int flags) {
    string out = {0};
    g4_error err;
    int32_t *ids;
    size_t n_ids;
    append(&out, "", 0);
    if (g4_encode(t, s, n, flags, &ids, &n_ids, &err)) {
        append_format(&out, "failed: %s", err.text);
        return out;
    }
    for (size_t i = 0; i < n_ids; i++) append_format(&out, "%s%d", i ? " " : "", (int)ids[i]);
    g4_free(ids);
    return out;
}

#define CHECK_IDS(tok, text, flags, expected) check_ids(tok, text, sizeof(text) - 1, flags, expected, __LINE__)
static void check_ids(const g4_tokenizer *t, const char *s, size_t n, int flags, const char *expected, int line) {
    string ids = encoded(t, s, n, flags);
    CHECK(!strcmp(ids.s, expected), "line %d: \"%s\" gave %s, expected %s", line, s, ids.s, expected);
    free(ids.s);
}

/* A whole character at p, by the table in the Unicode standard (well-formed UTF-8 byte sequences); 0: none. */
static size_t character(const unsigned char *p, size_t n) {
    static const unsigned char rows[][5] = {{0xc2, 0xdf, 0x80, 0xbf, 2}, {0xe0, 0xe0, 0xa0, 0xbf, 3}, {0xe1, 0xec, 0x80, 0xbf, 3}, {0xed, 0xed, 0x80, 0x9f, 3},
        {0xee, 0xef, 0x80, 0xbf, 3}, {0xf0, 0xf0, 0x90, 0xbf, 4}, {0xf1, 0xf3, 0x80, 0xbf, 4}, {0xf4, 0xf4, 0x80, 0x8f, 4}};
    if (n && p[0] < 0x80) return 1;
    for (size_t r = 0; r < sizeof rows / sizeof rows[0]; r++) {
        size_t size = rows[r][4], good = 2;
        if (p[0] < rows[r][0] || p[0] > rows[r][1] || n < size || p[1] < rows[r][2] || p[1] > rows[r][3]) continue;
        while (good < size && (p[good] & 0xc0) == 0x80) good++;
        return good == size ? size : 0;
    }
    return 0;
}

static int is_utf8(const char *s, size_t n) {
    size_t step;
    for (; n; s += step, n -= step)
        if (!(step = character((const unsigned char *)s, n))) return 0;
    return 1;
}

/* The text of ids, streamed; every chunk must be whole characters. */
static string decoded(const g4_tokenizer *t, const int32_t *ids, size_t n_ids, int flags) {
    string out = {0};
    g4_error err;
    const char *s;
    size_t n, broken = 0;
    g4_decoder *d = g4_decoder_open(t, flags, &err);
    append(&out, "", 0);
    for (size_t i = 0; i <= n_ids; i++) {
        if (i < n_ids ? g4_decode_push(d, ids[i], &s, &n, &err) : g4_decode_end(d, &s, &n, &err)) {
            append_format(&out, "failed: %s", err.text);
            break;
        }
        broken += !is_utf8(s, n) || s[n];
        append(&out, s, n);
    }
    g4_decoder_close(d);
    CHECK(broken == 0, "%zu chunks are not whole characters and a NUL", broken);
    return out;
}

/* ---- The plain algorithm ---------------------------------------------------------------------------------------------- */

enum { MAX_PIECES = 400, FIRST_ID = 261 };

/* A random vocabulary. Pieces are numbered from 0 here; in the file piece i has id FIRST_ID + id[i]. */
typedef struct vocabulary {
    char text[MAX_PIECES][64];
    int id[MAX_PIECES], n, n_chars;
    int rank[MAX_PIECES][MAX_PIECES], result[MAX_PIECES][MAX_PIECES]; /* of merging left, right; rank -1: they do not merge */
    int left[MAX_PIECES], right[MAX_PIECES], n_merges;                /* by rank */
} vocabulary;

static int find_text(const vocabulary *v, const char *s) {
    for (int i = 0; i < v->n; i++)
        if (!strcmp(v->text[i], s)) return i;
    return -1;
}

/* Merges of pieces that exist already, so that most can happen; several may give one piece; half of the vocabularies shuffle their ranks, so
 * that a merge can make a better one possible. */
static void random_vocabulary(vocabulary *v) {
    static const char *const chars[] = {"a", "b", "\xe2\x96\x81", "c", "\n", "\xc3\xa9", "\xea\xb9\xb0", "<"};
    size_t longest = random_below(2) ? 8 : 48;
    v->n_chars = v->n = 1 + (int)random_below(4);
    v->n_merges = 0;
    memset(v->rank, 0xff, sizeof v->rank);
    for (int i = 0, first = (int)random_below(2) * (int)random_below(4); i < v->n; i++) strcpy(v->text[i], chars[first + i]);
    for (int tries = 1 + (int)random_below(300); tries > 0 && v->n < MAX_PIECES && v->n_merges < MAX_PIECES; tries--) {
        char text[128];
        int l = (int)random_below((uint32_t)v->n), r = random_below(3) ? (int)random_below((uint32_t)v->n) : l;
        if (v->rank[l][r] >= 0 || strlen(v->text[l]) + strlen(v->text[r]) > longest) continue;
        sprintf(text, "%s%s", v->text[l], v->text[r]);
        if (find_text(v, text) < 0) strcpy(v->text[v->n++], text);
        v->left[v->n_merges] = l;
        v->right[v->n_merges] = r;
        v->result[l][r] = find_text(v, text);
        v->rank[l][r] = v->n_merges++;
    }
    for (int i = v->n_merges - 1, shuffle = (int)random_below(2); shuffle && i > 0; i--) {
        int j = (int)random_below((uint32_t)i + 1), l = v->left[i], r = v->right[i];
        v->left[i] = v->left[j], v->right[i] = v->right[j];
        v->left[j] = l, v->right[j] = r;
    }
    for (int i = 0; i < v->n_merges; i++) v->rank[v->left[i]][v->right[i]] = i;
    for (int i = 0; i < v->n; i++) {
        int j = (int)random_below((uint32_t)i + 1);
        v->id[i] = v->id[j];
        v->id[j] = i;
    }
}

static g4_tokenizer *open_vocabulary(const vocabulary *v, int strings, g4_error *err) {
    string vocab = {0}, merges = {0};
    toy t = plain_toy;
    for (int i = 0; i < v->n; i++) {
        append_format(&vocab, i ? "," : "");
        append_quoted(&vocab, v->text[i]);
        append_format(&vocab, ":%d", FIRST_ID + v->id[i]);
    }
    for (int i = 0; i < v->n_merges; i++) {
        char both[160];
        append_format(&merges, i ? "," : "[");
        sprintf(both, "%s %s", v->text[v->left[i]], v->text[v->right[i]]);
        if (strings) {
            append_quoted(&merges, both);
        } else {
            append_format(&merges, "[");
            append_quoted(&merges, v->text[v->left[i]]);
            append_format(&merges, ",");
            append_quoted(&merges, v->text[v->right[i]]);
            append_format(&merges, "]");
        }
    }
    append_format(&merges, "]");
    t.vocab = vocab.s;
    t.merges = merges.s;
    g4_tokenizer *tok = open_toy(&t, err);
    free(vocab.s);
    free(merges.s);
    return tok;
}

/* Merges the adjacent pair of the lowest rank, leftmost first, until there is none: the definition, in O(n^2). x [n] holds pieces, or -1 - byte. */
static int plain_bpe(const vocabulary *v, int *x, int n) {
    for (;;) {
        int best = -1;
        for (int i = 0; i + 1 < n; i++)
            if (x[i] >= 0 && x[i + 1] >= 0 && v->rank[x[i]][x[i + 1]] >= 0
                && (best < 0 || v->rank[x[i]][x[i + 1]] < v->rank[x[best]][x[best + 1]])) best = i;
        if (best < 0) return n;
        x[best] = v->result[x[best]][x[best + 1]];
        memmove(x + best + 1, x + best + 2, (size_t)(n - best - 2) * sizeof *x);
        n--;
    }
}

static void test_against_plain(int vocabularies, int texts, int longest) {
    static vocabulary v;
    int *x = malloc((size_t)longest * 4 * sizeof *x);
    for (int round = 0; round < vocabularies; round++) {
        g4_error err;
        random_vocabulary(&v);
        if (!v.n_merges) continue;
        g4_tokenizer *tok = open_vocabulary(&v, round & 1, &err);
        CHECK(tok, "vocabulary %d: %s", round, err.text);
        for (int k = 0; tok && k < texts; k++) {
            string text = {0};
            int n = 0, length = 1 + (int)random_below(random_below(3) ? 40 : (uint32_t)longest), period = random_below(3) ? length : 1 + (int)random_below(9);
            int draws[64];
            for (int i = 0; i < 64; i++) draws[i] = (int)random_below((uint32_t)v.n_chars * 8 + 1);
            for (int i = 0; i < length; i++) { /* now and then a character that the vocabulary lacks */
                int c = period < length ? draws[i % period] : (int)random_below((uint32_t)v.n_chars * 64 + 1);
                const char *s = c == 0 ? "\xc3\xbf" : v.text[c % v.n_chars];
                if (c == 0) x[n++] = -1 - 0xc3, x[n++] = -1 - 0xbf;
                else x[n++] = c % v.n_chars;
                if (!strcmp(s, "\xe2\x96\x81") && random_below(2)) s = " ";
                append(&text, s, strlen(s));
            }
            n = plain_bpe(&v, x, n);
            int32_t *ids = NULL;
            size_t n_ids = 0;
            int failed = g4_encode(tok, text.s, text.n, 0, &ids, &n_ids, &err);
            int same = !failed && n_ids == (size_t)n;
            for (int i = 0; same && i < n; i++) same = ids[i] == (x[i] < 0 ? 5 + (-1 - x[i]) : FIRST_ID + v.id[x[i]]);
            CHECK(same, "vocabulary %d (%d merges), text %d: %d tokens expected, got %zu: \"%.300s\"", round, v.n_merges, k, n, n_ids, text.s);
            g4_free(ids);
            free(text.s);
        }
        g4_tokenizer_close(tok);
    }
    free(x);
}

/* ---- Files that must be refused, or must not -------------------------------------------------------------------------- */

static void refused(toy t, const char *word, int line) {
    g4_error err = {"no message"};
    g4_tokenizer *tok = open_toy(&t, &err);
    CHECK(!tok && strstr(err.text, word) && strstr(err.text, TEMPORARY) && !strchr(err.text, '\n'), "line %d: expected a refusal that names %s, got: %s", line, word,
        tok ? "none" : err.text);
    g4_tokenizer_close(tok);
}

#define REFUSED(field, value, word) \
    do { \
        toy changed = plain_toy; \
        changed.field = value; \
        refused(changed, word, __LINE__); \
    } while (0)

#define EIGHT(s) s s s s s s s s

static void test_refusals(void) {
    g4_error err;
    REFUSED(normalizer, "null", "normalizer");
    REFUSED(normalizer, "{\"type\":\"NFKC\"}", "NFKC");
    REFUSED(normalizer, "{\"type\":\"Replace\",\"pattern\":{\"String\":\" \"},\"content\":\"_\"}", "normalizer");
    REFUSED(normalizer, "{\"type\":\"Replace\",\"pattern\":{\"Regex\":\" \"},\"content\":\"\xe2\x96\x81\"}", "normalizer");
    REFUSED(normalizer, "{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"Prepend\",\"prepend\":\"\xe2\x96\x81\"}]}", "Sequence");
    REFUSED(pre_tokenizer, "{\"type\":\"ByteLevel\",\"add_prefix_space\":false}", "ByteLevel");
    REFUSED(pre_tokenizer, "{\"type\":\"Foo\"}", "Foo");
    REFUSED(pre_tokenizer, "{\"type\":\"Split\",\"pattern\":{\"Regex\":\" \"},\"behavior\":\"Removed\",\"invert\":false}", "pre_tokenizer");
    REFUSED(pre_tokenizer, SPLIT("true"), "pre_tokenizer");
    REFUSED(decoder, "null", "decoder");
    REFUSED(decoder, "{\"type\":\"ByteLevel\"}", "ByteLevel");
    REFUSED(decoder, "{\"type\":\"Sequence\",\"decoders\":[]}", "decoder.decoders[0]");
    REFUSED(decoder, "{\"type\":\"Sequence\",\"decoders\":[" REPLACE ",{\"type\":\"Fuse\"}]}", "decoder.decoders[1]");
    REFUSED(decoder, "{\"type\":\"Sequence\",\"decoders\":[" REPLACE ",{\"type\":\"ByteFallback\"},{\"type\":\"Fuse\"},{\"type\":\"Strip\",\"content\":\" \"}]}", "Strip");
    REFUSED(type, "\"type\":\"Unigram\",", "Unigram");
    REFUSED(type, "\"type\":\"WordPiece\",", "WordPiece");
    REFUSED(type, "\"type\":7,", "model");
    REFUSED(flags, "\"byte_fallback\":false,", "byte_fallback");
    REFUSED(flags, "", "byte_fallback");
    REFUSED(flags, "\"byte_fallback\":true,\"dropout\":0.1,", "dropout");
    REFUSED(flags, "\"byte_fallback\":true,\"continuing_subword_prefix\":\"##\",", "continuing_subword_prefix");
    REFUSED(flags, "\"byte_fallback\":true,\"end_of_word_suffix\":\"</w>\",", "end_of_word_suffix");
    REFUSED(flags, "\"byte_fallback\":true,\"ignore_merges\":true,", "ignore_merges");
    REFUSED(vocab, "\"a\":-1", "\"a\"");
    REFUSED(vocab, "\"a\":1.5", "1.5");
    REFUSED(vocab, "\"a\":null", "null");
    REFUSED(vocab, "\"a\":16777216", "16777216");
    REFUSED(vocab, "\"a\":99999999999999999999", "\"a\"");
    REFUSED(vocab, "\"a\":261,\"b\":262,\"c\":262,\"ab\":263", "id 262 belongs to two pieces");
    REFUSED(vocab, "\"a\":261,\"a\":262", "\"a\"");
    REFUSED(merges, "[]", "merges is empty");
    REFUSED(merges, "{}", "merges");
    REFUSED(merges, "null", "merges");
    REFUSED(merges, "[[\"a\",\"b\"],[\"a\",\"b\",\"c\"]]", "merges[1]");
    REFUSED(merges, "[[\"a\",\"b\"],[\"a\"]]", "merges[1]");
    REFUSED(merges, "[[\"a\",\"b\"],[\"a\",1]]", "merges[1]");
    REFUSED(merges, "[\"a b\",\"ab\"]", "merges[1]");
    REFUSED(merges, "[\"a b\",\"a b c\"]", "merges[1]");
    REFUSED(merges, "[\"a b\",7]", "merges[1]");
    REFUSED(merges, "[\"a b\",\" a\"]", "empty part");
    REFUSED(merges, "[[\"a\",\"b\"],[\"x\",\"b\"]]", "merge 1, \"x\" + \"b\", has a left part");
    REFUSED(merges, "[[\"a\",\"b\"],[\"a\",\"x\"]]", "has a right part");
    REFUSED(merges, "[[\"a\",\"b\"],[\"b\",\"a\"]]", "gives a piece");
    REFUSED(merges, "[[\"a\",\"b\"],[\"b\",\"c\"],[\"a\",\"b\"]]", "merge 2, \"a\" + \"b\", is there twice");
    refused((toy){plain_toy.normalizer, plain_toy.pre_tokenizer, plain_toy.decoder, plain_toy.type, plain_toy.flags, "\"a\":261,\"a<0x41>\":262",
        "[[\"a\",\"<0x41>\"]]", plain_toy.added, ""}, "byte token", __LINE__);
    REFUSED(added, "{\"id\":0,\"content\":\"<pad>\",\"lstrip\":true}", "lstrip");
    REFUSED(added, "{\"id\":0,\"content\":\"<pad>\",\"rstrip\":true}", "rstrip");
    REFUSED(added, "{\"id\":0,\"content\":\"<pad>\",\"single_word\":true}", "single_word");
    REFUSED(added, "{\"id\":600,\"content\":\"x y\",\"normalized\":true}", "normalized");
    REFUSED(added, "{\"id\":0}", "added_tokens[0]");
    REFUSED(added, "{\"content\":\"<pad>\"}", "added_tokens[0]");
    REFUSED(added, "7", "added_tokens[0]");
    REFUSED(added, "{\"id\":600,\"content\":\"\"}", "no text");
    char longer[1200];
    sprintf(longer, "{\"id\":600,\"content\":\"%01100d\"}", 0);
    REFUSED(added, longer, "1100 bytes");
    REFUSED(merges, "[[\"a\",\"b\"],[\"a\",\"" EIGHT(EIGHT("xyz\\n")) "\"]]", "...");
    REFUSED(added, ADDED(0, "<pad>") "," ADDED(7, "<eos>"), "has id 7, but the vocabulary has it as 1");
    REFUSED(added, ADDED(0, "<pad>") "," ADDED(0, "<pad>"), "twice");
    REFUSED(added, ADDED(261, "<new>"), "belongs to two pieces");
    REFUSED(added, ADDED(16777216, "<new>"), "added_tokens[0]");
    for (int x = 0; x < 256; x += 51) {
        char name[8];
        string json = toy_json(&plain_toy, x);
        g4_tokenizer *tok = open_bytes(json.s, json.n, &err);
        sprintf(name, "<0x%02X>", x);
        CHECK(!tok && strstr(err.text, name), "without %s: %s", name, tok ? "no refusal" : err.text);
        g4_tokenizer_close(tok);
        free(json.s);
    }
    static const char *const others[] = {"", "[]", "{}", "null", "{\"model\":7}", "GGUF\3", "{\"model\":{\"type\":\"BPE\"}", "\"type\"", "{\"pattern\":{},\"String\":\" \"}"};
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        g4_tokenizer *tok = open_bytes(others[i], strlen(others[i]), &err);
        CHECK(!tok && strstr(err.text, TEMPORARY), "%s: %s", others[i], tok ? "no refusal" : err.text);
        g4_tokenizer_close(tok);
    }
    CHECK(!g4_tokenizer_open("no/such/place", &err) && strstr(err.text, "no/such/place"), "%s", err.text);
    CHECK(!g4_tokenizer_open("no/such.json", NULL), "an error nobody asked for");
}

/* The hash of the tables, once more: FNV-1a and a multiplication, of which the upper 32 bits choose the slot. */
static uint32_t upper_bits(uint64_t h) { return (uint32_t)((h ^ h >> 32) * 0x9e3779b97f4a7c15u >> 32); }
static uint64_t fnv(const char *s) {
    uint64_t h = 0xcbf29ce484222325u;
    for (; *s; s++) h = (h ^ (unsigned char)*s) * 0x100000001b3u;
    return h;
}

static g4_tokenizer *open_large(const char *vocab, const char *merges, g4_error *err) {
    toy t = plain_toy;
    t.vocab = t.merges = "@";
    string head = toy_json(&t, -1), json = {0};
    char *first = strchr(head.s, '@'), *second = strchr(first + 1, '@');
    append(&json, head.s, (size_t)(first - head.s));
    append(&json, vocab, strlen(vocab));
    append(&json, first + 1, (size_t)(second - first - 1));
    append(&json, merges, strlen(merges));
    append(&json, second + 1, strlen(second + 1));
    g4_tokenizer *tok = open_bytes(json.s, json.n, err);
    free(json.s);
    free(head.s);
    return tok;
}

/* Thousands of pieces, or of merges, that were chosen to share a few slots: refused, where looking each up would take minutes. */
static void test_collisions(void) {
    enum { N = 6000, SIDE = 1500 };
    g4_error err = {""};
    for (int kind = 0; kind < 4; kind++) { /* pieces, then merges; chosen to collide, then not */
        int collide = kind % 2 == 0, id = 261;
        string vocab = {0}, merges = {0};
        if (kind < 2) {
            append_format(&vocab, "\"a\":261,\"b\":262,\"ab\":263");
            append_format(&merges, "[\"a b\"]");
            for (int found = 0; found < N;) {
                char piece[9] = "";
                for (int i = 0; i < 8; i++) piece[i] = (char)('a' + random_below(26));
                if (collide && upper_bits(fnv(piece)) >= (uint32_t)1 << 22) continue;
                append_format(&vocab, ",\"%s\":%d", piece, 264 + found++);
            }
        } else { /* pieces are SIDE characters from U+4E00 on, and pairs of them */
            for (int i = 0; i < SIDE; i++, id++) append_format(&vocab, "%s\"\\u%04x\":%d", i ? "," : "", 0x4e00 + i, id);
            for (int left = 0; left < SIDE && id < 261 + SIDE + N; left++)
                for (int right = 0; right < SIDE && id < 261 + SIDE + N; right++) {
                    uint64_t pair = (uint64_t)(261 + left) << 32 | (uint64_t)(261 + right);
                    if (collide && upper_bits(pair * 0xff51afd7ed558ccdu) >= (uint32_t)1 << 25) continue;
                    append_format(&vocab, ",\"\\u%04x\\u%04x\":%d", 0x4e00 + left, 0x4e00 + right, id++);
                    append_format(&merges, "%s\"\\u%04x \\u%04x\"", merges.n ? "," : "[", 0x4e00 + left, 0x4e00 + right);
                }
            append_format(&merges, "]");
        }
        g4_tokenizer *tok = open_large(vocab.s, merges.s, &err);
        if (collide) CHECK(!tok && strstr(err.text, "thousands"), "%s that collide: %s", kind < 2 ? "pieces" : "merges", tok ? "no refusal" : err.text);
        else CHECK(tok, "%s that do not collide: %s", kind < 2 ? "pieces" : "merges", err.text);
        g4_tokenizer_close(tok);
        free(vocab.s);
        free(merges.s);
    }
}

/* Any file gives a tokenizer or an error, and neither a crash nor a hang. */
static void test_damaged_files(void) {
    string json = toy_json(&plain_toy, -1);
    int opened = 0, refusals = 0;
    for (size_t n = 0; n < json.n; n += 97) {
        g4_error err;
        g4_tokenizer *tok = open_bytes(json.s, n, &err);
        CHECK(!tok, "cut after %zu bytes: no refusal", n);
        g4_tokenizer_close(tok);
    }
    for (int k = 0; k < 400; k++) {
        g4_error err;
        size_t at = random_below((uint32_t)json.n);
        char was = json.s[at];
        json.s[at] = random_below(2) ? (char)random_below(256) : "0123456789\"[]{},:<>x"[random_below(20)];
        g4_tokenizer *tok = open_bytes(json.s, json.n, &err);
        if (tok) {
            string ids = encoded(tok, "abcab \n\xff<bos>", 13, 0);
            free(ids.s);
            opened++;
        } else {
            refusals++;
        }
        g4_tokenizer_close(tok);
        json.s[at] = was;
    }
    CHECK(opened + refusals == 400 && refusals > 50, "%d opened, %d refused", opened, refusals);
    free(json.s);
}

/* ---- Small facts ------------------------------------------------------------------------------------------------------ */

static void test_toy(void) {
    g4_error err = {""};
    g4_tokenizer *t = open_toy(&plain_toy, &err);
    CHECK(t, "%s", err.text);
    if (!t) return;
    CHECK_IDS(t, "", 0, "");
    CHECK_IDS(t, "abc", 0, "267");
    CHECK_IDS(t, "bcabcaaaab", 0, "266 267 268 261 265"); /* the rank of ab is better than that of aa */
    CHECK_IDS(t, "a b\xe2\x96\x81 ", 0, "261 264 262 264 264");
    CHECK_IDS(t, "\n\n\n", 0, "270 269");
    CHECK_IDS(t, "a\0b", 0, "261 5 262");
    CHECK_IDS(t, "\xea\xb9\xb0", 0, "239 190 181");
    CHECK_IDS(t, "\xff\xc3\x28", 0, "244 196 194 244 196 194 45"); /* two U+FFFD, EF BF BD each, and a parenthesis */
    CHECK_IDS(t, "\xe2\x96", 0, "244 196 194 244 196 194");
    CHECK_IDS(t, "<bos>a<eos><eos", 0, "2 261 1 271 106 116 120");
    CHECK_IDS(t, "<<bos>", 0, "271 2");
    CHECK_IDS(t, "ab<bos>bc<bos>aa<bos>ab", 0, "265 2 266 2 268 2 265"); /* nothing is kept from one stretch of text to the next */
    CHECK_IDS(t, "<bos>a", G4_PLAIN_TEXT, "271 262 116 120 67 261");
    CHECK(g4_tokenizer_size(t) == 272, "%d", g4_tokenizer_size(t));
    CHECK(g4_token_id(t, "abc") == 267 && g4_token_id(t, "<bos>") == 2 && g4_token_id(t, "") == -1 && g4_token_id(t, "abcd") == -1 && g4_token_id(t, " ") == -1,
        "ids by text");
    size_t n = 0;
    CHECK(!strcmp(g4_token_piece(t, 267, &n), "abc") && n == 3 && !g4_token_piece(t, -1, &n) && !g4_token_piece(t, 272, NULL), "texts by id");
    CHECK(g4_token_is_special(t, 2) && !g4_token_is_special(t, 267) && !g4_token_is_special(t, -1) && !g4_token_is_special(t, 1 << 30), "special");
    g4_tokenizer_close(t);

    /* What does not change the result is taken: a null pre_tokenizer, a missing type, keys of other versions, ids without a piece. */
    toy other = plain_toy;
    other.pre_tokenizer = "null";
    other.type = "";
    other.more = "\"truncation\":{\"max_length\":3},\"post_processor\":{\"type\":\"TemplateProcessing\"},";
    other.vocab = "\"a\":1000,\"b\":400,\"ab\":16777215,\"\":500";
    other.merges = "[\"a b\"]";
    t = open_toy(&other, &err);
    CHECK(t && g4_tokenizer_size(t) == 16777216, "%s", err.text);
    if (t) {
        const char *s;
        CHECK_IDS(t, "abba", 0, "16777215 400 1000");
        CHECK(!g4_token_piece(t, 401, &n) && !g4_token_is_special(t, 401), "401 has a piece");
        CHECK(g4_token_id(t, "") == 500 && g4_token_piece(t, 500, &n) && n == 0, "the empty piece");
        g4_decoder *d = g4_decoder_open(t, 0, &err);
        CHECK(g4_decode_push(d, 401, &s, &n, &err) == -1 && strstr(err.text, "401"), "%s", err.text);
        CHECK(!g4_decode_push(d, 400, &s, &n, &err) && n == 1 && *s == 'b', "the decoder goes on after an error");
        g4_decoder_close(d);
    }
    g4_tokenizer_close(t);
    g4_tokenizer_close(NULL);
    g4_decoder_close(NULL);
}

/* Added tokens: leftmost, longest; those matched after normalization come second; only special ones hide. */
static void test_added_tokens(void) {
    g4_error err = {""};
    toy with = plain_toy;
    with.added = ADDED(300, "<a>") "," ADDED(301, "<a>bb") "," ADDED(302, "<a>b") "," ADDED(303, "bbc") ",{\"id\":304,\"content\":\"<keep>\",\"special\":false},"
        "{\"id\":305,\"content\":\"cc\",\"normalized\":true},{\"id\":306,\"content\":\"c<a>\",\"normalized\":true},{\"id\":307,\"content\":\"\xe2\x98\x83\"}," ADDED(308, "a b");
    g4_tokenizer *t = open_toy(&with, &err);
    CHECK(t, "%s", err.text);
    if (!t) return;
    CHECK_IDS(t, "<a>", 0, "300");
    CHECK_IDS(t, "<a>bbc", 0, "301 263");
    CHECK_IDS(t, "<a>bc", 0, "302 263");
    CHECK_IDS(t, "bbbc", 0, "262 303");
    CHECK_IDS(t, "<a<a>", 0, "271 261 300");
    CHECK_IDS(t, "ccc<a>", 0, "305 263 300"); /* <a> first, although c<a> is further left */
    CHECK_IDS(t, "<a><keep>", G4_PLAIN_TEXT, "271 261 67 304");
    CHECK_IDS(t, "<a>bbc", G4_PLAIN_TEXT, "271 261 67 262 266"); /* stepped over as it was found: bbc is not looked for inside */
    CHECK_IDS(t, "\xe2\x98\x83", 0, "307");
    CHECK_IDS(t, "a b", 0, "308");
    CHECK_IDS(t, "a\xe2\x96\x81" "b", 0, "261 264 262");
    int32_t ids[] = {300, 304, 261, 307};
    string all = decoded(t, ids, 4, 0), some = decoded(t, ids, 4, G4_SKIP_SPECIAL);
    CHECK(!strcmp(all.s, "<a><keep>a\xe2\x98\x83") && !strcmp(some.s, "<keep>a\xe2\x98\x83"), "%s, %s", all.s, some.s);
    free(all.s);
    free(some.s);
    g4_tokenizer_close(t);

    /* thousands of them, as some vocabularies have */
    string many = {0};
    for (int i = 0; i < 3000; i++) append_format(&many, "%s{\"id\":%d,\"content\":\"<unused%d>\",\"special\":true}", i ? "," : "", 400 + i, 2999 - i);
    with.added = many.s;
    string json = {0};
    string head = toy_json(&plain_toy, -1);
    const char *at = strstr(head.s, plain_toy.added);
    append(&json, head.s, (size_t)(at - head.s));
    append(&json, many.s, many.n);
    append(&json, at + strlen(plain_toy.added), head.n - (size_t)(at - head.s) - strlen(plain_toy.added));
    t = open_bytes(json.s, json.n, &err);
    CHECK(t, "%s", err.text);
    for (int i = 0; t && i < 3000; i++) {
        char text[32], expected[32];
        sprintf(text, "<unused%d>", i);
        sprintf(expected, "%d", 400 + 2999 - i);
        string ids_text = encoded(t, text, strlen(text), 0);
        CHECK(!strcmp(ids_text.s, expected), "%s gave %s", text, ids_text.s);
        free(ids_text.s);
    }
    g4_tokenizer_close(t);
    free(many.s);
    free(json.s);
    free(head.s);
}

/* Byte tokens are 5 + byte. Pieces that look like byte tokens are, as for `tokenizers`, decoded as bytes. */
static void test_decoding(void) {
    static const struct {
        int32_t ids[8];
        int n, flags;
        const char *text;
    } rows[] = {
        {{239, 190, 181}, 3, 0, "\xea\xb9\xb0"},
        {{239, 190}, 2, 0, "\xef\xbf\xbd\xef\xbf\xbd"},
        {{239, 190, 181, 260}, 4, 0, "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"},
        {{70, 260, 261, 70}, 4, 0, "\xef\xbf\xbd\xef\xbf\xbd" "aA"},
        {{231, 155, 134}, 3, 0, "\xe2\x96\x81"},
        {{264, 261}, 2, 0, " a"},
        {{239, 2, 190, 181}, 4, 0, "\xef\xbf\xbd<bos>\xef\xbf\xbd\xef\xbf\xbd"},
        {{239, 2, 190, 181}, 4, G4_SKIP_SPECIAL, "\xea\xb9\xb0"},
        {{2, 261, 1}, 3, G4_SKIP_SPECIAL, "a"},
        {{242, 165, 133}, 3, 0, "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"}, /* ED A0 80, a surrogate */
        {{272, 273, 274, 275}, 4, 0, "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd<0xG1>"},
        {{273, 274}, 2, 0, "k\x0a"},
    };
    toy with = plain_toy;
    g4_error err;
    with.vocab = "\"a\":261,\"b\":262,\"ab\":263,\"\xe2\x96\x81\":264,\"<0xff>\":272,\"<0x6b>\":273,\"<0x+A>\":274,\"<0xG1>\":275";
    with.merges = "[\"a b\"]";
    g4_tokenizer *t = open_toy(&with, &err);
    CHECK(t, "%s", err.text);
    for (size_t i = 0; t && i < sizeof rows / sizeof rows[0]; i++) {
        string out = decoded(t, rows[i].ids, (size_t)rows[i].n, rows[i].flags);
        CHECK(!strcmp(out.s, rows[i].text), "row %zu: \"%s\"", i, out.s);
        free(out.s);
    }
    if (t) { /* a decoder starts again after its end */
        const char *s;
        size_t n;
        g4_decoder *d = g4_decoder_open(t, 0, &err);
        CHECK(!g4_decode_push(d, 239, &s, &n, &err) && n == 0, "half a character was given");
        CHECK(!g4_decode_end(d, &s, &n, &err) && n == 3, "%zu bytes", n);
        CHECK(!g4_decode_end(d, &s, &n, &err) && n == 0, "%zu bytes", n);
        CHECK(!g4_decode_push(d, 261, &s, &n, &err) && n == 1 && *s == 'a', "%zu bytes", n);
        g4_decoder_close(d);
    }
    g4_tokenizer_close(t);
}

/* Any bytes come back, but for U+2581 (a space), and U+FFFD for each byte that is no part of a character. */
static void test_any_bytes(const g4_tokenizer *t, int rounds) {
    for (int k = 0; k < rounds; k++) {
        string in = {0}, expected = {0};
        g4_error err;
        int32_t *ids;
        size_t n_ids;
        append(&in, "", 0);
        for (uint32_t i = random_below(200); i > 0; i--) {
            char byte = (char)(random_below(3) ? random_below(256) : (uint32_t)"\xe2\x96\x81 \xed\xa0\xf0\x9f\x98\xf4\x90\xc0\x80\xe0<|>"[random_below(17)]);
            append(&in, &byte, 1);
        }
        for (size_t i = 0, step; i < in.n; i += step) {
            const char *p = in.s + i;
            step = character((const unsigned char *)p, in.n - i);
            if (step == 3 && !memcmp(p, "\xe2\x96\x81", 3)) append(&expected, " ", 1);
            else append(&expected, step ? p : "\xef\xbf\xbd", step ? step : 3);
            if (!step) step = 1;
        }
        char *exact = malloc(in.n ? in.n : 1); /* no NUL behind it: reading on would be seen by a sanitizer */
        memcpy(exact, in.s, in.n);
        if (g4_encode(t, exact, in.n, k & 1, &ids, &n_ids, &err)) {
            CHECK(0, "%s", err.text);
        } else {
            string out = decoded(t, ids, n_ids, 0);
            CHECK(out.n == expected.n && !memcmp(out.s, expected.s ? expected.s : "", out.n), "round %d: %zu bytes came back as %zu", k, in.n, out.n);
            free(out.s);
            g4_free(ids);
        }
        free(exact);
        free(in.s);
        free(expected.s);
    }
}

/* A megabyte without a place to cut: neither slow nor deep. */
static void test_long_runs(const g4_tokenizer *t) {
    static const char *const units[] = {"a", " ", "\n", "ab", "<", "word ", "\xff", "\xea\xb9\xb0", "the", "<|turn"};
    for (size_t u = 0; u < sizeof units / sizeof units[0]; u++) {
        string in = {0};
        g4_error err;
        int32_t *ids;
        size_t n_ids;
        while (in.n < 1000000) append(&in, units[u], strlen(units[u]));
        int failed = g4_encode(t, in.s, in.n, 0, &ids, &n_ids, &err);
        CHECK(!failed, "%s", err.text);
        if (!failed) {
            string out = decoded(t, ids, n_ids, 0);
            CHECK(strcmp(units[u], "\xff") ? out.n == in.n && !memcmp(out.s, in.s, in.n) : out.n == 3 * in.n, "1 MB of \"%s\" came back as %zu bytes", units[u], out.n);
            free(out.s);
            g4_free(ids);
        }
        free(in.s);
    }
}

/* ---- Against `tokenizers` --------------------------------------------------------------------------------------------- */

static string read_file(const char *path) {
    string out = {0};
    char block[65536];
    FILE *f = fopen(path, "rb");
    if (!f) return out;
    append(&out, "", 0);
    for (size_t n; (n = fread(block, 1, sizeof block, f)) > 0;) append(&out, block, n);
    fclose(f);
    return out;
}

static int same_ids(const g4_json *j, uint32_t node, const int32_t *ids, size_t n) {
    size_t i = 0;
    for (uint32_t k = j->nodes[node].first; k; k = j->nodes[k].next, i++) {
        int64_t id;
        if (g4_json_int(j, k, &id) || i >= n || ids[i] != id) return 0;
    }
    return i == n;
}

static void compare_line(const g4_tokenizer *t, const char *line, size_t n, const char *where) {
    g4_json j;
    g4_error err;
    if (g4_json_parse(&j, line, n, where, &err)) {
        CHECK(0, "%s", err.text);
        return;
    }
    uint32_t text = g4_json_get(&j, 0, "text"), hex = g4_json_get(&j, 0, "hex"), ids = g4_json_get(&j, 0, "ids"), plain = g4_json_get(&j, 0, "plain_ids");
    int32_t *got, *expected = malloc((j.nodes[ids].size + 1) * sizeof *expected);
    size_t n_got, n_expected = 0;
    for (uint32_t k = j.nodes[ids].first; k; k = j.nodes[k].next) {
        int64_t id;
        if (!g4_json_int(&j, k, &id)) expected[n_expected++] = (int32_t)id;
    }
    CHECK(n_expected == j.nodes[ids].size && (text || hex || n_expected), "%s: no ids", where);
    if (text || hex) {
        char *bytes = j.text + j.nodes[text | hex].first;
        size_t size = j.nodes[text | hex].size;
        for (size_t i = 0; hex && i < size; i += 2) {
            char digits[3] = {bytes[i], bytes[i + 1], 0};
            bytes[i / 2] = (char)strtol(digits, NULL, 16);
        }
        if (hex) size /= 2;
        for (int flags = 0; flags < 2; flags++) {
            uint32_t wanted = flags == G4_PLAIN_TEXT && plain ? plain : ids;
            if (flags == G4_PLAIN_TEXT && !plain && memchr(bytes, '<', size)) continue; /* not all files tell */
            if (g4_encode(t, bytes, size, flags, &got, &n_got, &err)) {
                CHECK(0, "%s: %s", where, err.text);
                continue;
            }
            CHECK(same_ids(&j, wanted, got, n_got), "%s: other ids (flags %d, %zu of them) for %.200s", where, flags, n_got, bytes);
            g4_free(got);
        }
    }
    for (int flags = 0; flags < 2; flags++) {
        uint32_t wanted = g4_json_get(&j, 0, flags ? "decoded_skip" : "decoded");
        string out = decoded(t, expected, n_expected, flags);
        CHECK(wanted && out.n == j.nodes[wanted].size && !memcmp(out.s, g4_json_string(&j, wanted), out.n), "%s: decoded (flags %d) as %.200s", where, flags, out.s);
        free(out.s);
    }
    free(expected);
    g4_json_free(&j);
}

static void compare_file(const g4_tokenizer *t, const char *path) {
    string all = read_file(path);
    CHECK(all.n, "%s is empty or missing", path);
    int number = 1;
    for (size_t at = 0; at < all.n; number++) {
        const char *end = memchr(all.s + at, '\n', all.n - at);
        size_t n = end ? (size_t)(end - all.s) - at : all.n - at;
        char where[300];
        snprintf(where, sizeof where, "%s line %d", path, number);
        compare_line(t, all.s + at, n, where);
        at += n + 1;
    }
    free(all.s);
}

/* Texts between lines __ggml_vocab_test__, and a line of ids for each. */
static void compare_ggml(const g4_tokenizer *t, const char *texts_path, const char *ids_path) {
    static const char mark[] = "\n__ggml_vocab_test__\n";
    string texts = read_file(texts_path), ids = read_file(ids_path);
    int number = 0;
    CHECK(texts.n && ids.n, "%s or %s is missing", texts_path, ids_path);
    for (char *s = texts.s, *line = ids.s; texts.n && ids.n && s; number++) {
        char *end = strstr(s, mark), *line_end = strchr(line, '\n');
        size_t n = end ? (size_t)(end - s) : strlen(s);
        if (line_end) *line_end = 0;
        while (*line == ' ') line++;
        string got = encoded(t, s, n, 0);
        CHECK(!strcmp(got.s, line), "text %d: %s, expected %s", number, got.s, line);
        free(got.s);
        s = end ? end + sizeof mark - 1 : NULL;
        line = line_end ? line_end + 1 : "";
    }
    CHECK(number == 46, "%d texts", number);
    free(texts.s);
    free(ids.s);
}

/* Gemma 4's own, of 262144 pieces, at path; the texts and ids are in the folder `shared`. */
static void test_real_vocabulary(const char *path, const char *shared) {
    char name[3][1000];
    g4_error err;
    g4_tokenizer *t = g4_tokenizer_open(path, &err);
    CHECK(t && g4_tokenizer_size(t) == 262144, "%s", err.text);
    if (!t) return;
    snprintf(name[0], sizeof name[0], "%s/fixtures/tokens.jsonl", shared);
    compare_file(t, name[0]);
    snprintf(name[1], sizeof name[1], "%s/tokenizer/ggml-vocab-gemma-4.gguf.inp", shared);
    snprintf(name[2], sizeof name[2], "%s/tokenizer/ggml-vocab-gemma-4.gguf.out", shared);
    compare_ggml(t, name[1], name[2]);
    CHECK_IDS(t, "Hello, world!", 0, "9259 236764 1902 236888");
    CHECK_IDS(t, " Linus", 0, "9684 605");
    CHECK_IDS(t, "<|turn>user\nhi<turn|>", 0, "105 2364 107 2202 106");
    CHECK_IDS(t, "Hello world! Caf\xc3\xa9 d\xc3\xa9j\xc3\xa0 vu \xe2\x80\x94 123 \xf0\x9f\x98\x8a", 0,
        "9259 1902 236888 62367 29234 11042 2192 236743 236770 236778 236800 103453");
    CHECK_IDS(t, "a\xe2\x96\x81" "b", 0, "236746 518");
    for (int n = 1; n <= 99; n++) { /* runs of newlines are one piece up to 31 */
        char run[100], expected[100] = "";
        memset(run, '\n', sizeof run);
        for (int left = n; left > 0; left -= 31) sprintf(expected + strlen(expected), "%s%d", left < n ? " " : "", 106 + (left < 31 ? left : 31));
        string got = encoded(t, run, (size_t)n, 0);
        CHECK(!strcmp(got.s, expected), "%d newlines: %s, expected %s", n, got.s, expected);
        free(got.s);
    }
    for (int32_t id = 0; id < 262144; id++) /* every special token is found in a text */
        if (g4_token_is_special(t, id)) {
            char expected[16];
            size_t n;
            const char *s = g4_token_piece(t, id, &n);
            sprintf(expected, "%d", (int)id);
            string got = encoded(t, s, n, 0);
            CHECK(!strcmp(got.s, expected), "%s gave %s", s, got.s);
            free(got.s);
        }
    CHECK(!g4_token_is_special(t, 212) && g4_token_is_special(t, 106), "212 is text, 106 is special");
    test_any_bytes(t, 200);
    test_long_runs(t);
    g4_tokenizer_close(t);
}

static void test_real_vocabularies(void) {
    const char *shared = getenv("SHARED"), *json = getenv("G4_TOKENIZER_JSON");
    char command[1200];
    if (!shared || !*shared) {
        SKIP("the real vocabulary: SHARED is not set");
        return;
    }
    if (json && *json) test_real_vocabulary(json, shared);
    else SKIP("the real tokenizer.json: G4_TOKENIZER_JSON is not set");
    snprintf(command, sizeof command, "xz -dc '%s/tokenizer/ggml-vocab-gemma-4.gguf.xz' > " TEMPORARY, shared);
    if (!system(command)) test_real_vocabulary(TEMPORARY, shared);
    else SKIP("the real vocabulary as a GGUF file: xz did not unpack it");
    remove(TEMPORARY);
}

/* The tokenizer that the repository ships. */
static void test_shipped(void) {
    g4_error err;
    g4_tokenizer *t = g4_tokenizer_open("models/austen", &err), *same = g4_tokenizer_open("models/austen/tokenizer.json", &err);
    CHECK(t && same, "%s", err.text);
    if (t) {
        compare_file(t, "test/tokens_austen.jsonl");
        test_any_bytes(t, 300);
        test_long_runs(t);
    }
    g4_tokenizer_close(same);
    g4_tokenizer_close(t);
}

/* ---- Programs --------------------------------------------------------------------------------------------------------- */

static double milliseconds(void) { return 1e3 * (double)clock() / CLOCKS_PER_SEC; }

static int bench(const char *tokenizer, const char *path) {
    g4_error err;
    double open = 1e30, encode = 1e30;
    size_t n_ids = 0;
    string text = read_file(path);
    for (int k = 0; k < 5; k++) {
        double start = milliseconds();
        g4_tokenizer *t = g4_tokenizer_open(tokenizer, &err);
        if (!t) {
            printf("%s\n", err.text);
            return 2;
        }
        if (milliseconds() - start < open) open = milliseconds() - start;
        for (int i = 0; i < 5; i++) {
            int32_t *ids;
            start = milliseconds();
            if (g4_encode(t, text.s, text.n, 0, &ids, &n_ids, &err)) {
                printf("%s\n", err.text);
                return 2;
            }
            if (milliseconds() - start < encode) encode = milliseconds() - start;
            g4_free(ids);
        }
        g4_tokenizer_close(t);
    }
    printf("open %.1f ms, encode %zu bytes to %zu ids %.2f ms (processor time, best of 5 and 25)\n", open, text.n, n_ids, encode);
    free(text.s);
    return 0;
}

int main(int argc, char **argv) {
    g4_error err;
    if (argc == 4 && !strcmp(argv[1], "bench")) return bench(argv[2], argv[3]);
    if (argc == 4 && !strcmp(argv[1], "compare")) {
        g4_tokenizer *t = g4_tokenizer_open(argv[2], &err);
        CHECK(t, "%s", err.text);
        if (t) compare_file(t, argv[3]);
        g4_tokenizer_close(t);
        return test_done("test_tokenizer");
    }
    test_toy();
    test_added_tokens();
    test_decoding();
    test_refusals();
    test_damaged_files();
    test_collisions();
    test_against_plain(200, 12, 300);
    test_against_plain(20, 6, 2500);
    g4_tokenizer *t = open_toy(&plain_toy, &err);
    if (t) {
        test_any_bytes(t, 300);
        test_long_runs(t);
    }
    g4_tokenizer_close(t);
    test_shipped();
    test_real_vocabularies();
    return test_done("test_tokenizer");
}
