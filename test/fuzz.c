/* fuzz.c - the parsers under libFuzzer, with address and undefined-behaviour sanitizers: what test/fuzz.sh builds and runs.
 *
 *     build/fuzz/fuzz --list                      one line for each target: its name and the longest input
 *     build/fuzz/fuzz --target=json CORPUS        looks for faults in one target, with any option of libFuzzer
 *     build/fuzz/fuzz --target=json FILE          runs one input again
 *
 * A target is one function below and one row of `targets`: it hands the input to a parser, and then asks more of the result than that nothing
 * crashed: REQUIRE stops at the first thing that is not so. Inputs are in memory; a parser that reads only files has a _parse beside its _open.
 * Not a test by itself: what was found stands in the test program of the file that it was found in.
 */
#include "gemma4.h"
#include "tracefile.h"

#include <float.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define REQUIRE(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
            abort(); \
        } \
    } while (0)

/* For definitions that a parser is compared with: they need no sanitizer, and are not to guide the search. */
#define UNWATCHED __attribute__((no_sanitize("address", "undefined", "coverage")))

enum { LONGEST = 4096 }; /* input of any target */

/* The fast backend is left out: it reads no file, and sanitizers make minutes of compiling its vectors. */
const g4_backend g4_backend_cpu = {.name = "cpu"};

/* ---- What several targets ask ------------------------------------------------------------------------------------------- */

/* The promise of g4_error: one line, and it says something. */
static void require_line(const char *text) {
    REQUIRE(*text);
    for (; *text; text++) REQUIRE((unsigned char)*text >= 0x20 && *text != 0x7f);
}

static void require_warning(void *user, const char *text) {
    (void)user;
    require_line(text);
}

/* Bytes of the well-formed UTF-8 character at p [n], 0: none. By code point: what a shorter form or no character has is not well-formed. */
UNWATCHED static size_t utf8_size(const unsigned char *p, size_t n) {
    static const uint32_t least[5] = {0, 0, 0x80, 0x800, 0x10000};
    size_t size = !n ? 0 : p[0] < 0x80 ? 1 : p[0] >> 5 == 6 ? 2 : p[0] >> 4 == 14 ? 3 : p[0] >> 3 == 30 ? 4 : 0;
    if (size <= 1) return size;
    if (size > n) return 0;
    uint32_t c = p[0] & (0x7f >> size);
    for (size_t i = 1; i < size; i++) {
        if (p[i] >> 6 != 2) return 0;
        c = c << 6 | (p[i] & 63);
    }
    return c < least[size] || c > 0x10ffff || (c >= 0xd800 && c < 0xe000) ? 0 : size;
}

UNWATCHED static int is_utf8(const char *s, size_t n) {
    size_t i = 0, step = 1;
    for (; i < n && step; i += step) step = utf8_size((const unsigned char *)s + i, n - i);
    return i == n;
}

typedef struct string {
    char *s; /* [n] */
    size_t n, room;
} string;

UNWATCHED static void append(string *t, const void *s, size_t n) {
    if (t->n + n > t->room) {
        t->room = 2 * (t->n + n);
        t->s = realloc(t->s, t->room);
        REQUIRE(t->s);
    }
    if (n) memcpy(t->s + t->n, s, n);
    t->n += n;
}

/* ---- json --------------------------------------------------------------------------------------------------------------- */

static void fuzz_json(const uint8_t *data, size_t n) {
    g4_json j;
    g4_error err = {""};
    if (g4_json_parse(&j, (const char *)data, n, "input", &err)) {
        require_line(err.text);
        return;
    }
    uint32_t children = 0;
    for (uint32_t i = 0; i < j.n_nodes; i++) {
        const g4_json_node *node = &j.nodes[i];
        uint32_t found = 0;
        if (node->kind >= G4_JSON_ARRAY) {
            for (uint32_t c = node->first; c; c = j.nodes[c].next, found++) {
                REQUIRE(c > i && c < j.n_nodes);
                if (node->kind == G4_JSON_ARRAY) continue;
                const char *key = j.text + j.nodes[c].key;
                REQUIRE(key[j.nodes[c].key_size] == 0 && is_utf8(key, j.nodes[c].key_size));
                if (strlen(key) == j.nodes[c].key_size) REQUIRE(g4_json_get(&j, i, key) == c);
            }
            REQUIRE(found == node->size);
            children += found;
        } else if (node->kind == G4_JSON_STRING) {
            const char *s = g4_json_string(&j, i);
            REQUIRE(s[node->size] == 0 && is_utf8(s, node->size));
        } else if (node->kind == G4_JSON_NUMBER) { /* the C library rounds correctly too, in the locale "C" */
            double x = 0, y = strtod(g4_json_string(&j, i), NULL);
            int64_t whole;
            int failed = g4_json_double(&j, i, &x);
            REQUIRE(failed ? y > DBL_MAX || y < -DBL_MAX : !memcmp(&x, &y, sizeof x));
            if (!g4_json_int(&j, i, &whole)) REQUIRE(!failed && (double)whole == x);
        }
    }
    REQUIRE(children + 1 == j.n_nodes);
    g4_json_free(&j);
}

/* ---- config ------------------------------------------------------------------------------------------------------------- */

/* What the rest of the library takes for granted about a config. */
static void require_config(const g4_config *c) {
    for (int i = 0; i < c->num_hidden_layers; i++) {
        const g4_layer_config *l = &c->layers[i], *donor = &c->layers[l->kv_layer];
        REQUIRE(l->kv_layer >= 0 && l->kv_layer <= i && donor->kv_layer == l->kv_layer && donor->type == l->type);
        REQUIRE(l->head_dim > 0 && l->head_dim % 2 == 0 && l->intermediate_size > 0 && c->num_attention_heads % l->num_key_value_heads == 0);
        REQUIRE(donor->head_dim == l->head_dim && donor->num_key_value_heads == l->num_key_value_heads);
    }
    REQUIRE(c->layers[c->num_hidden_layers - 1].type == G4_FULL_ATTENTION && c->top_k_experts <= c->num_experts);
    REQUIRE(c->n_eos <= 16 && c->n_suppress <= 64);
    for (int i = 0; i < c->n_eos; i++) REQUIRE(c->eos_token_id[i] >= 0 && c->eos_token_id[i] < c->vocab_size);
    for (int i = 0; i < 2; i++) REQUIRE(c->rope[i].theta > 0 && c->rope[i].factor > 0);
}

static void fuzz_config(const uint8_t *data, size_t n) {
    g4_model m = {.backend = &g4_backend_scalar};
    g4_config *c = &m.config;
    g4_error err = {""};
    if (g4_config_parse(c, (const char *)data, n, "config.json", &(g4_options){.warn = require_warning}, &err)) {
        require_line(err.text);
        REQUIRE(!c->layers);
        return;
    }
    require_config(c);
    g4_state_options o = {.threads = 1};
    for (int large = 0; large < 2; large++) {
        size_t kv = 0, bytes = g4_state_bytes(&m, &o, &kv);
        REQUIRE(bytes > kv || bytes == 0);
        o = (g4_state_options){.threads = 1024, .ctx = c->max_position_embeddings, .chunk = 1024, .n_seqs = 1024};
    }
    free(c->layers);
}

/* ---- safetensors, and diff of two files, which "====" parts --------------------------------------------------------------- */

static void fuzz_safetensors(const uint8_t *data, size_t n) {
    g4_safetensors st;
    g4_error err = {""};
    if (g4_safetensors_parse(&st, data, n, "input", &err)) {
        require_line(err.text);
        REQUIRE(!st.tensors && !st.names);
        return;
    }
    size_t bytes = 0;
    for (int i = 0; i < st.n; i++) {
        const g4_st_tensor *t = &st.tensors[i];
        REQUIRE(t->data >= data && t->bytes <= n && t->data <= data + n - t->bytes && t->rank <= 8);
        REQUIRE(g4_safetensors_find(&st, t->name) == t);
        bytes += t->bytes;
    }
    uint64_t header = 0;
    for (int i = 8; i-- > 0;) header = header << 8 | data[i];
    REQUIRE(8 + header + bytes == n);
    g4_safetensors_close(&st);
}

static void fuzz_diff(const uint8_t *data, size_t n) {
    static FILE *out;
    if (!out) out = fopen("/dev/null", "w");
    size_t middle = 0;
    while (middle + 4 <= n && memcmp(data + middle, "====", 4)) middle++;
    if (middle + 4 > n) return;
    g4_error err = {""};
    g4_safetensors a, b;
    if (g4_safetensors_parse(&a, data, middle, "A", &err)) return;
    if (!g4_safetensors_parse(&b, data + middle + 4, n - middle - 4, "B", &err)) {
        if (trace_compare(&a, "A", &b, "B", 1e-5, 0, out, &err) < 0) require_line(err.text);
        g4_safetensors_close(&b);
    }
    g4_safetensors_close(&a);
}

/* ---- tokenizer ---------------------------------------------------------------------------------------------------------- */

static void decode_all(const g4_tokenizer *t, const int32_t *ids, size_t n, int flags, string *out) {
    g4_error err = {""};
    const char *s;
    size_t size;
    g4_decoder *d = g4_decoder_open(t, flags, &err);
    REQUIRE(d);
    for (size_t i = 0; i <= n; i++) {
        if (i == n) {
            REQUIRE(!g4_decode_end(d, &s, &size, &err));
        } else if (g4_decode_push(d, ids[i], &s, &size, &err)) {
            REQUIRE(!g4_token_piece(t, ids[i], NULL));
            require_line(err.text);
            continue;
        }
        REQUIRE(is_utf8(s, size) && s[size] == 0);
        append(out, s, size);
    }
    g4_decoder_close(d);
}

/* tokenizer.json. The first byte 1, which JSON does not allow anywhere, stands for the 256 entries of the vocabulary that every file
 * needs, with the ids of the shipped one, so that inputs stay short. The text that is then encoded is the input itself. */
static void fuzz_tokenizer(const uint8_t *data, size_t n) {
    string json = {0};
    g4_error err = {""};
    int bytes_given = 0;
    for (size_t i = 0; i < n; i++) {
        if (data[i] != 1 || bytes_given++) append(&json, data + i, 1);
        for (int x = 0; data[i] == 1 && bytes_given == 1 && x < 256; x++) {
            char entry[32];
            append(&json, entry, (size_t)snprintf(entry, sizeof entry, "%s\"<0x%02X>\":%d", x ? "," : "", (unsigned)x, 24 + x));
        }
    }
    char *exact = malloc(json.n + 1); /* so that the byte after the text is out of bounds */
    REQUIRE(exact);
    exact = realloc(exact, json.n ? json.n : 1);
    if (json.n) memcpy(exact, json.s, json.n);
    g4_tokenizer *t = g4_tokenizer_parse(exact, json.n, "tokenizer.json", &err);
    free(exact);
    free(json.s);
    if (!t) {
        require_line(err.text);
        return;
    }
    for (int flags = 0; flags < 2; flags++) {
        int32_t *ids = NULL;
        size_t n_ids = 0;
        string out = {0};
        REQUIRE(!g4_encode(t, (const char *)data, n, flags, &ids, &n_ids, &err));
        for (size_t i = 0; i < n_ids; i++) {
            size_t size = 0;
            const char *piece = g4_token_piece(t, ids[i], &size);
            REQUIRE(piece && piece[size] == 0 && (strlen(piece) < size || g4_token_id(t, piece) == ids[i]));
        }
        decode_all(t, ids, n_ids, flags, &out);
        free(out.s);
        g4_free(ids);
    }
    g4_tokenizer_close(t);
}

/* ---- GGUF: the container, the model in it and the tokenizer in it --------------------------------------------------------- */

static void fuzz_gguf(const uint8_t *data, size_t n) {
    g4_model m = {.backend = &g4_backend_scalar};
    g4_config *c = &m.config;
    g4_error err = {""};
    g4_tokenizer *t = g4_tokenizer_parse((const char *)data, n, "input.gguf", &err);
    if (!t) require_line(err.text);
    g4_tokenizer_close(t);
    g4_gguf *g = g4_gguf_parse(data, n, "input.gguf", 0, &err);
    if (!g) {
        require_line(err.text);
        return;
    }
    REQUIRE(g4_gguf_bytes(g) == n);
    if (g4_gguf_bind(g, &m, &(g4_options){.warn = require_warning}, &err)) {
        require_line(err.text);
    } else {
        require_config(c);
        for (int i = 0; i < c->num_hidden_layers; i++) {
            REQUIRE((m.layers[i].k_proj.data != NULL) == (c->layers[i].kv_layer == i));
            for (const g4_tensor *w = (const g4_tensor *)&m.layers[i]; w < (const g4_tensor *)&m.layers[i + 1]; w++) {
                const unsigned char *p = w->data;
                size_t bytes = p ? (size_t)w->rows * g4_row_bytes(w) : 0;
                if (!p || w == &m.layers[i].layer_scalar) continue; /* that one may be the reader's own 1 */
                REQUIRE(p >= data && bytes > 0 && bytes <= n && p <= data + n - bytes && w->cols % g4_types[w->type].block == 0);
            }
        }
        REQUIRE(m.embed_tokens.data && m.lm_head.data && m.norm.data);
    }
    free(c->layers);
    free(m.layers);
    g4_gguf_close(g);
}

/* ---- encode, decode: the shipped tokenizer, against the definition of what it does ----------------------------------------- */

enum { IDS = 2048 }; /* of the shipped vocabulary */

static g4_tokenizer *shipped;
static uint16_t merge_rank[IDS][IDS], merge_result[IDS][IDS]; /* of two ids; rank 0: they do not merge; from 1, the lowest first */
static int32_t byte_id[256];
static const char *added[64]; /* [n_added] */
static int n_added;

static void open_shipped(void) {
    static const char path[] = "models/austen/tokenizer.json";
    g4_error err;
    g4_file file;
    g4_json j;
    if (shipped) return;
    shipped = g4_tokenizer_open(path, &err);
    if (!shipped || g4_file_open(&file, path, 0, &err) || g4_json_parse(&j, (const char *)file.data, file.size, path, &err)) {
        fprintf(stderr, "%s (to be run from the top of the project)\n", err.text);
        exit(2);
    }
    REQUIRE(g4_tokenizer_size(shipped) == IDS);
    uint32_t merges = g4_json_get(&j, g4_json_get(&j, 0, "model"), "merges");
    uint16_t rank = 1;
    for (uint32_t i = j.nodes[merges].first; i; i = j.nodes[i].next, rank++) {
        const char *left = g4_json_string(&j, j.nodes[i].first), *right = g4_json_string(&j, j.nodes[j.nodes[i].first].next);
        char both[256];
        int32_t l = g4_token_id(shipped, left), r = g4_token_id(shipped, right);
        snprintf(both, sizeof both, "%s%s", left, right);
        merge_rank[l][r] = rank;
        merge_result[l][r] = (uint16_t)g4_token_id(shipped, both);
    }
    for (int x = 0; x < 256; x++) {
        char name[8];
        snprintf(name, sizeof name, "<0x%02X>", (unsigned)x);
        byte_id[x] = g4_token_id(shipped, name);
        REQUIRE(byte_id[x] == byte_id[0] + x);
    }
    for (uint32_t i = j.nodes[g4_json_get(&j, 0, "added_tokens")].first; i; i = j.nodes[i].next)
        added[n_added++] = g4_token_piece(shipped, g4_token_id(shipped, g4_json_string(&j, g4_json_get(&j, i, "content"))), NULL);
    g4_json_free(&j);
    g4_file_close(&file);
}

/* Merges the pair of the lowest rank, the leftmost of equal ones, until none is left. */
UNWATCHED static size_t plain_bpe(int32_t *x, size_t n) {
    static uint16_t rank[4 * LONGEST]; /* [n - 1] of x[i] with x[i + 1], 0xffff: they do not merge */
    for (size_t i = 0; i + 1 < n; i++) rank[i] = (uint16_t)(merge_rank[x[i]][x[i + 1]] - 1);
    for (;;) {
        uint16_t lowest = 0xffff;
        size_t best = 0;
        for (size_t i = 0; i + 1 < n; i++) lowest = rank[i] < lowest ? rank[i] : lowest;
        if (lowest == 0xffff) return n;
        while (rank[best] != lowest) best++;
        x[best] = merge_result[x[best]][x[best + 1]];
        n--;
        memmove(x + best + 1, x + best + 2, (n - best - 1) * sizeof *x);
        memmove(rank + best, rank + best + 1, (n - best) * sizeof *rank);
        if (best) rank[best - 1] = (uint16_t)(merge_rank[x[best - 1]][x[best]] - 1);
        if (best + 1 < n) rank[best] = (uint16_t)(merge_rank[x[best]][x[best + 1]] - 1);
    }
}

/* The text of the input, as ids into out [4 * n], and as it must come back out of the decoder. The added tokens of this vocabulary are all
 * special. */
UNWATCHED static size_t plain_encode(const uint8_t *data, size_t n, int flags, int32_t *out, string *back) {
    size_t n_out = 0, begin = 0; /* what was written before begin is not merged any more */
    for (size_t i = 0; i < n;) {
        size_t longest = 0, size;
        const char *found = NULL;
        for (int k = 0; k < n_added && !(flags & G4_PLAIN_TEXT); k++) {
            if (added[k][0] != data[i]) continue;
            size = strlen(added[k]);
            if (size > longest && size <= n - i && !memcmp(data + i, added[k], size)) longest = size, found = added[k];
        }
        if (found) {
            n_out = begin + plain_bpe(out + begin, n_out - begin);
            out[n_out++] = g4_token_id(shipped, found);
            begin = n_out;
            append(back, data + i, longest);
            i += longest;
            continue;
        }
        char c[5] = "\xef\xbf\xbd"; /* what a byte that is no character becomes */
        size = utf8_size(data + i, n - i);
        if (size) memcpy(c, data + i, size), c[size] = 0;
        i += size ? size : 1;
        if (!size) size = 3;
        append(back, !strcmp(c, "\xe2\x96\x81") ? " " : c, !strcmp(c, "\xe2\x96\x81") ? 1 : size);
        int32_t id = !c[0] ? -1 : g4_token_id(shipped, c[0] == ' ' ? "\xe2\x96\x81" : c);
        if (id >= 0) out[n_out++] = id;
        for (size_t k = 0; id < 0 && k < size; k++) out[n_out++] = byte_id[(unsigned char)c[k]];
    }
    return begin + plain_bpe(out + begin, n_out - begin);
}

/* The first byte: flags. The rest is the text. */
static void fuzz_encode(const uint8_t *data, size_t n) {
    open_shipped();
    if (!n) return;
    int flags = data[0] & G4_PLAIN_TEXT;
    int32_t *ids = NULL, *expected = malloc((4 * n + 1) * sizeof *expected);
    size_t n_ids = 0;
    string back = {0}, out = {0};
    g4_error err = {""};
    REQUIRE(expected && !g4_encode(shipped, (const char *)data + 1, n - 1, flags, &ids, &n_ids, &err));
    size_t n_expected = plain_encode(data + 1, n - 1, flags, expected, &back);
    REQUIRE(n_ids == n_expected && !memcmp(ids, expected, n_ids * sizeof *ids));
    decode_all(shipped, ids, n_ids, 0, &out);
    REQUIRE(out.n == back.n && (!out.n || !memcmp(out.s, back.s, out.n)));
    free(out.s);
    free(back.s);
    free(expected);
    g4_free(ids);
}

/* The first byte: flags. The rest are ids of two bytes, some of them outside the vocabulary. */
static void fuzz_decode(const uint8_t *data, size_t n) {
    open_shipped();
    if (!n) return;
    int flags = data[0] & G4_SKIP_SPECIAL;
    size_t n_ids = (n - 1) / 2, n_run = 0;
    int32_t *ids = malloc((n_ids + 1) * sizeof *ids);
    char *run = malloc(n_ids + 1);
    string out = {0}, expected = {0};
    REQUIRE(ids && run);
    for (size_t i = 0; i < n_ids; i++) ids[i] = (data[1 + 2 * i] | data[2 + 2 * i] << 8) % (IDS + 2) - 1;
    decode_all(shipped, ids, n_ids, flags, &out);
    for (size_t i = 0; i <= n_ids; i++) {
        size_t size = 0;
        const char *piece = i < n_ids ? g4_token_piece(shipped, ids[i], &size) : "";
        int byte = -1;
        if (!piece || (i < n_ids && (flags & G4_SKIP_SPECIAL) && g4_token_is_special(shipped, ids[i]))) continue;
        if (i < n_ids && ids[i] >= byte_id[0] && ids[i] <= byte_id[255]) byte = ids[i] - byte_id[0];
        if (byte >= 0) {
            run[n_run++] = (char)byte;
            continue;
        }
        if (is_utf8(run, n_run)) append(&expected, run, n_run);
        else
            for (size_t k = 0; k < n_run; k++) append(&expected, "\xef\xbf\xbd", 3);
        n_run = 0;
        for (size_t k = 0; k < size;) {
            int space = size - k >= 3 && !memcmp(piece + k, "\xe2\x96\x81", 3);
            append(&expected, space ? " " : piece + k, 1);
            k += space ? 3 : 1;
        }
    }
    REQUIRE(out.n == expected.n && (!out.n || !memcmp(out.s, expected.s, out.n)));
    free(out.s);
    free(expected.s);
    free(run);
    free(ids);
}

/* ---- chat: a request through both templates, and to ids; answer: ids, and what a reader of the answer is given ------------- */

static void fuzz_chat(const uint8_t *data, size_t n) {
    open_shipped();
    for (int family = G4_CHAT_SMALL; family <= G4_CHAT_LARGE; family++) {
        g4_chat_prompt p = {0};
        g4_error err = {""};
        if (g4_chat_render((const char *)data, n, (g4_chat_family)family, &p, &err)) {
            require_line(err.text);
            continue;
        }
        REQUIRE(p.text[p.n] == 0 && is_utf8(p.text, p.n) && !strncmp(p.text, "<bos>", 5));
        size_t end = 0, plain = 0;
        for (size_t i = 0; i < p.n_markers; i++) {
            REQUIRE(p.markers[i].at >= end && p.markers[i].n <= p.n && p.markers[i].at <= p.n - p.markers[i].n);
            end = p.markers[i].at + p.markers[i].n;
        }
        for (int flags = 0; flags < 2; flags++) {
            int32_t *ids = NULL;
            size_t n_ids = 0, special = 0;
            string back = {0};
            if (g4_chat_encode(shipped, &p, flags, &ids, &n_ids, &err)) {
                require_line(err.text);
                continue;
            }
            for (size_t i = 0; i < n_ids; i++) special += (size_t)g4_token_is_special(shipped, ids[i]);
            REQUIRE(flags ? special >= plain : special == p.n_markers); /* the request's own text has none, unless it may */
            plain = special;
            decode_all(shipped, ids, n_ids, 0, &back);
            REQUIRE(back.n <= p.n); /* U+2581 becomes a space */
            free(back.s);
            g4_free(ids);
        }
        g4_chat_prompt_free(&p);
    }
}

/* The first byte: does the answer begin inside of reasoning? The rest is the answer as text, which is encoded first. */
static void fuzz_answer(const uint8_t *data, size_t n) {
    open_shipped();
    if (!n) return;
    int32_t *ids = NULL;
    size_t n_ids = 0;
    g4_message m;
    g4_error err = {""};
    REQUIRE(!g4_encode(shipped, (const char *)data + 1, n - 1, 0, &ids, &n_ids, &err));
    if (g4_answer_read(shipped, data[0] & 1, ids, n_ids, &m, &err)) {
        require_line(err.text);
        g4_free(ids);
        return;
    }
    g4_free(ids);
    REQUIRE(is_utf8(m.reasoning, m.n_reasoning) && m.reasoning[m.n_reasoning] == 0);
    REQUIRE(is_utf8(m.content, m.n_content) && m.content[m.n_content] == 0);
    for (int i = 0; i < m.n_calls; i++) {
        const g4_tool_call *call = &m.calls[i];
        g4_json j;
        if (!call->name) {
            require_line(call->fault);
            continue;
        }
        REQUIRE(!call->fault && is_utf8(call->name, call->n_name));
        REQUIRE(!g4_json_parse(&j, call->text, call->n, "arguments", &err) && j.nodes[0].kind == G4_JSON_OBJECT);
        g4_json_free(&j);
    }
    g4_message_free(&m);
}

/* ---- ids: the program's --ids ----------------------------------------------------------------------------------------------
 *
 * main.c as a whole, where an error of the program ends the input and not the process, and writes nothing. */

static jmp_buf program_ended;
static int written_nowhere(FILE *f, const char *format, ...) {
    (void)f;
    (void)format;
    return 0;
}
#define main program_main
#define exit(status) longjmp(program_ended, 1)
#define fprintf written_nowhere
int program_main(int argc, char **argv);
#include "../main.c"
#undef main
#undef exit
#undef fprintf

static void fuzz_ids(const uint8_t *data, size_t n) {
    static id_list list;
    size_t commas = 0, digits = 0;
    free(list.data);
    list = (id_list){0};
    for (size_t i = 0; i < n; i++) commas += data[i] == ',', digits += data[i] >= '0' && data[i] <= '9';
    if (setjmp(program_ended)) return;
    parse_ids(&list, "--ids", (const char *)data, n);
    REQUIRE(list.n == commas + 1 && digits + commas == n);
    for (size_t i = 0; i < list.n; i++) REQUIRE(list.data[i] >= 0);
}

/* ---- The targets ---------------------------------------------------------------------------------------------------------- */

static const struct target {
    const char *name;
    void (*run)(const uint8_t *data, size_t n);
    int longest; /* input */
} targets[] = {
    {"json", fuzz_json, 512},
    {"config", fuzz_config, 2048},
    {"safetensors", fuzz_safetensors, 1024},
    {"diff", fuzz_diff, 2048},
    {"tokenizer", fuzz_tokenizer, 3072},
    {"gguf", fuzz_gguf, 4096},
    {"encode", fuzz_encode, 512},
    {"decode", fuzz_decode, 256},
    {"chat", fuzz_chat, 2048},
    {"answer", fuzz_answer, 512},
    {"ids", fuzz_ids, 128},
};
enum { N_TARGETS = sizeof targets / sizeof *targets };

static const struct target *target;

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerInitialize(int *argc, char ***argv) {
    for (int i = 1; i < *argc; i++) {
        const char *arg = (*argv)[i];
        for (int k = 0; k < N_TARGETS; k++) {
            if (!strcmp(arg, "--list")) printf("%s %d\n", targets[k].name, targets[k].longest);
            if (!strncmp(arg, "--target=", 9) && !strcmp(arg + 9, targets[k].name)) target = &targets[k];
        }
        if (!strcmp(arg, "--list")) exit(0);
    }
    if (target) return 0;
    fprintf(stderr, "give --target=NAME; --list shows the names\n");
    exit(2);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    target->run(data, n);
    return 0;
}
