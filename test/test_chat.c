/* test_chat.c - chats: requests to prompts against transformers' rendering, prompts to ids, answers from ids to parts, `gemma4 template`.
 *
 *     test_chat [GEMMA4]             the tests; test/chats.jsonl is what transformers rendered, test/answers.jsonl what it read
 *     test_chat compare FILE.jsonl   prompts or answers made by reference/chats.py, any number of them
 *
 * With SHARED set, $SHARED/fixtures/chats.jsonl is compared too and the templates there must be recognised; with G4_TOKENIZER_JSON set to a tokenizer.json
 * of the real vocabulary, the tests on answers are made with it as well.
 *
 * Reading order: tools of the tests, prompts, ids, templates of checkpoints, answers (against a plain reading of the same ids), tool calls there and back,
 * hostile input, the program.
 */
#include "gemma4.h"
#include "test.h"

#include <math.h>

static g4_error err;
static g4_tokenizer *shipped; /* models/austen */

/* ---- Tools ------------------------------------------------------------------------------------------------------------ */

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

static void append_text(string *t, const char *s) { append(t, s, strlen(s)); }

static void append_quoted(string *t, const char *s, size_t n) {
    char *quoted = malloc(6 * n + 3);
    if (!quoted) abort();
    append(t, quoted, g4_json_quote(quoted, s, n));
    free(quoted);
}

static string read_file(const char *path) {
    string t = {0};
    char part[65536];
    FILE *f = fopen(path, "rb");
    append(&t, "", 0);
    for (size_t n; f && (n = fread(part, 1, sizeof part, f)) > 0;) append(&t, part, n);
    if (f) fclose(f);
    return t;
}

static uint64_t random_state = 1;
static uint32_t random_below(uint32_t n) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((random_state >> 33) % n);
}

static int is_utf8(const char *s, size_t n) {
    for (size_t i = 0; i < n;) {
        unsigned char c = (unsigned char)s[i];
        size_t size = c < 0x80 ? 1 : c >= 0xc2 && c < 0xe0 ? 2 : c >= 0xe0 && c < 0xf0 ? 3 : c >= 0xf0 && c < 0xf5 ? 4 : 0;
        if (!size || size > n - i) return 0;
        for (size_t k = 1; k < size; k++)
            if (((unsigned char)s[i + k] & 0xc0) != 0x80) return 0;
        unsigned char d = size > 1 ? (unsigned char)s[i + 1] : 0;
        if ((c == 0xe0 && d < 0xa0) || (c == 0xed && d > 0x9f) || (c == 0xf0 && d < 0x90) || (c == 0xf4 && d > 0x8f)) return 0;
        i += size;
    }
    return 1;
}

static int is_line(const char *s) {
    if (!*s) return 0;
    for (; *s; s++)
        if ((unsigned char)*s < 0x20 || *s == 0x7f) return 0;
    return 1;
}

static g4_chat_prompt rendered(const char *request, g4_chat_family family) {
    g4_chat_prompt p;
    if (g4_chat_render(request, strlen(request), family, &p, &err)) p = (g4_chat_prompt){0};
    return p;
}

/* Both families render the request to the text. */
static void check_text(const char *request, const char *text) {
    for (int family = 0; family < 2; family++) {
        g4_chat_prompt p = rendered(request, (g4_chat_family)family);
        CHECK(p.text && !strcmp(p.text, text), "%s gives %s, expected %s", request, p.text ? p.text : err.text, text);
        g4_chat_prompt_free(&p);
    }
}

static void check_refused(const char *request, size_t n, const char *because) {
    g4_chat_prompt p = {.text = (char *)1};
    err.text[0] = 0;
    CHECK(g4_chat_render(request, n, G4_CHAT_SMALL, &p, &err) == -1 && strstr(err.text, because), "%.100s: \"%s\", expected \"%s\"", request, err.text, because);
    CHECK(is_line(err.text) && !p.text && !p.markers, "%s", err.text);
}

static int count(const char *s, const char *what) {
    int n = 0;
    for (size_t m = strlen(what); *s; s++) n += !strncmp(s, what, m);
    return n;
}

/* ---- Prompts ---------------------------------------------------------------------------------------------------------- */

/* What must be true of any prompt. */
static int is_sound(const g4_chat_prompt *p) {
    if (!p->text || p->text[p->n] || !is_utf8(p->text, p->n) || p->n_markers < 1 || p->markers[0].at || p->markers[0].n != 5) return 0;
    for (size_t i = 0, end = 0; i < p->n_markers; end = p->markers[i].at + p->markers[i].n, i++) {
        g4_chat_marker m = p->markers[i];
        if (m.at < end || m.n < 4 || m.n > p->n || m.at > p->n - m.n || p->text[m.at] != '<' || p->text[m.at + m.n - 1] != '>') return 0;
    }
    return 1;
}

/* Equal but for the order of members; numbers by their value. */
static int is_equal(const g4_json *a, uint32_t x, const g4_json *b, uint32_t y) {
    const g4_json_node *m = &a->nodes[x], *n = &b->nodes[y];
    double p = 0, q = 0;
    if (m->kind != n->kind) return 0;
    if (m->kind == G4_JSON_NUMBER) return !g4_json_double(a, x, &p) && !g4_json_double(b, y, &q) && p == q;
    if (m->size != n->size) return 0;
    if (m->kind == G4_JSON_STRING) return !memcmp(g4_json_string(a, x), g4_json_string(b, y), m->size);
    for (uint32_t i = m->kind >= G4_JSON_ARRAY ? m->first : 0, k = n->first; i; i = a->nodes[i].next) {
        if (m->kind == G4_JSON_OBJECT) k = g4_json_get(b, y, a->text + a->nodes[i].key);
        if (!k || !is_equal(a, i, b, k)) return 0;
        if (m->kind == G4_JSON_ARRAY) k = b->nodes[k].next;
    }
    return 1;
}

/* s [n] without its ends' white space is the string of the node. */
static int is_stripped(const char *s, size_t n, const g4_json *j, uint32_t node) {
    while (n && strchr(" \t\n", *s)) s++, n--;
    while (n && strchr(" \t\n", s[n - 1])) n--;
    return n == j->nodes[node].size && !memcmp(s, g4_json_string(j, node), n);
}

/* A line with an answer: what transformers' parser reads. */
static int compare_answer(const g4_json *j, const char *name, int number) {
    uint32_t text = g4_json_get(j, 0, "answer"), calls = g4_json_get(j, 0, "calls");
    int32_t *ids = NULL;
    size_t n = 0;
    g4_message m = {0};
    if (g4_encode(shipped, g4_json_string(j, text), j->nodes[text].size, 0, &ids, &n, &err) || g4_answer_read(shipped, 0, ids, n, &m, &err)) {
        printf("%s:%d: %s\n", name, number, err.text);
        return 1;
    }
    int bad = !is_stripped(m.reasoning, m.n_reasoning, j, g4_json_get(j, 0, "reasoning")) || !is_stripped(m.content, m.n_content, j, g4_json_get(j, 0, "content")) ||
              j->nodes[calls].size != (uint32_t)m.n_calls;
    uint32_t call = j->nodes[calls].first;
    for (int i = 0; i < m.n_calls && !bad; i++, call = j->nodes[call].next) {
        g4_json arguments = {0};
        bad = !m.calls[i].name || strcmp(m.calls[i].name, g4_json_string(j, g4_json_get(j, call, "name"))) ||
              g4_json_parse(&arguments, m.calls[i].text, m.calls[i].n, "arguments", &err) || !is_equal(&arguments, 0, j, g4_json_get(j, call, "arguments"));
        g4_json_free(&arguments);
    }
    if (bad) printf("%s:%d: reasoning \"%s\", content \"%s\", %d calls, the first %s\n", name, number, m.reasoning, m.content, m.n_calls, m.n_calls ? m.calls[0].text : "");
    g4_message_free(&m);
    g4_free(ids);
    return bad;
}

/* One line of reference/chats.py, or of the shared chats, which have one family each. */
static int compare_line(const char *line, size_t n, const char *name, int number) {
    g4_json j;
    int bad = 0;
    if (g4_json_parse(&j, line, n, "line", &err)) {
        printf("%s:%d: %s\n", name, number, err.text);
        return 1;
    }
    if (g4_json_get(&j, 0, "answer")) {
        bad = compare_answer(&j, name, number);
        g4_json_free(&j);
        return bad;
    }
    uint32_t request = g4_json_get(&j, 0, "request"), template_name = g4_json_get(&j, 0, "template");
    for (int family = 0; family < 2; family++) {
        uint32_t node = g4_json_get(&j, 0, family ? "large" : "small");
        if (template_name) {
            if (!strcmp(g4_json_string(&j, template_name), family ? "e2b" : "31b")) continue;
            node = g4_json_get(&j, 0, "rendered"); /* none: refused */
        }
        int refused = !node || j.nodes[node].kind == G4_JSON_NULL;
        g4_chat_prompt p;
        int failed = g4_chat_render_json(&j, request, (g4_chat_family)family, NULL, &p, &err);
        if (!failed != !refused) {
            printf("%s:%d: %s, expected %s\n", name, number, failed ? err.text : "rendered", refused ? "an error" : "a text");
            bad = 1;
        } else if (failed) {
            bad |= !is_line(err.text) || p.text;
        } else {
            const char *want = g4_json_string(&j, node);
            size_t at = 0;
            while (at < p.n && at < j.nodes[node].size && p.text[at] == want[at]) at++;
            if (at < p.n || at < j.nodes[node].size) {
                printf("%s:%d: differs at byte %zu: \"%.60s\", expected \"%.60s\"\n", name, number, at, p.text + at, want + at);
                bad = 1;
            }
            bad |= !is_sound(&p);
        }
        g4_chat_prompt_free(&p);
    }
    g4_json_free(&j);
    return bad;
}

static void compare_file(const char *path) {
    string t = read_file(path);
    int number = 0;
    for (size_t begin = 0; begin < t.n;) {
        const char *end = memchr(t.s + begin, '\n', t.n - begin);
        size_t n = end ? (size_t)(end - t.s) - begin : t.n - begin;
        number++;
        CHECK(!compare_line(t.s + begin, n, path, number), "%s line %d", path, number);
        begin += n + 1;
    }
    CHECK(number > 0, "%s: no lines could be read", path);
    free(t.s);
}

#define USER(text) "{\"role\":\"user\",\"content\":\"" text "\"}"
#define MODEL(text) "{\"role\":\"assistant\",\"content\":\"" text "\"}"
#define PARTS(role, text) "{\"role\":\"" role "\",\"content\":[{\"type\":\"text\",\"text\":\"" text "\"}]}"
#define CHAT(messages) "{\"messages\":[" messages "],\"add_generation_prompt\":true}"

static void test_prompts(void) {
    check_text("{\"messages\":[" USER(" Hello\\n") "]}", "<bos><|turn>user\nHello<turn|>\n");
    /* string and parts are one prompt, whoever speaks; null and nothing are empty */
    check_text("{\"messages\":[" USER("U") "," MODEL("A") "]}", "<bos><|turn>user\nU<turn|>\n<|turn>model\nA<turn|>\n");
    check_text("{\"messages\":[" PARTS("user", "U") "," PARTS("assistant", "A") "]}", "<bos><|turn>user\nU<turn|>\n<|turn>model\nA<turn|>\n");
    check_text("{\"messages\":[{\"role\":\"user\",\"content\":null}]}", "<bos><|turn>user\n<turn|>\n");
    check_text("{\"messages\":[{\"role\":\"user\",\"content\":[]}]}", "<bos><|turn>user\n<turn|>\n");
    check_text("{\"messages\":[{\"role\":\"user\"}],\"tools\":null,\"enable_thinking\":null,\"model\":\"x\",\"stream\":false}", "<bos><|turn>user\n<turn|>\n");

    /* thinking on, off, absent: what stands behind the last <|turn>model */
    static const char *const thinking[] = {",\"enable_thinking\":true}", ",\"enable_thinking\":false}", "}"};
    for (int i = 0; i < 3; i++) {
        for (int family = 0; family < 2; family++) {
            char request[256];
            snprintf(request, sizeof request, "{\"messages\":[" USER("a") "],\"add_generation_prompt\":true%s", thinking[i]);
            g4_chat_prompt p = rendered(request, (g4_chat_family)family);
            const char *tail = p.text ? strstr(p.text, "<|turn>model\n") : NULL;
            const char *expected = family == G4_CHAT_LARGE && i > 0 ? "<|turn>model\n<|channel>thought\n<channel|>" : "<|turn>model\n";
            CHECK(tail && !strcmp(tail, expected), "family %d, thinking %d: %s", family, i, p.text ? p.text : err.text);
            CHECK(p.text && !strncmp(p.text, "<bos><|turn>system\n<|think|>\n<turn|>\n", 36) == (i == 0) && !p.in_reasoning, "%s", p.text);
            CHECK(p.text && !strstr(p.text, "im_start") && !strstr(p.text, "start_of_turn") && count(p.text, "<bos>") == 1, "%s", p.text);
            g4_chat_prompt_free(&p);
        }
    }
    /* earlier thoughts are not sent back */
    g4_chat_prompt p = rendered(CHAT(USER("a") "," MODEL("<|channel>thought\\nhidden<channel|>shown") "," USER("b")), G4_CHAT_SMALL);
    CHECK(p.text && !strstr(p.text, "hidden") && !strstr(p.text, "<|channel>") && strstr(p.text, "model\nshown<turn|>"), "%s", p.text);
    g4_chat_prompt_free(&p);
    /* after a tool's answer a thinking model goes on inside its thought */
    p = rendered("{\"messages\":[" USER("a") ",{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{\"name\":\"f\",\"arguments\":{}}}]},{\"role\":\"tool\",\"content\":\"x\"}],"
                 "\"add_generation_prompt\":true,\"enable_thinking\":true}", G4_CHAT_SMALL);
    CHECK(p.text && p.in_reasoning && !strcmp(p.text + p.n - 18, "<|channel>thought\n"), "%s", p.text ? p.text : err.text);
    g4_chat_prompt_free(&p);
    /* what has only a placeholder, and what has not even that */
    p = rendered(CHAT("{\"role\":\"user\",\"content\":[{\"type\":\"image\"},{\"type\":\"file\"},{\"type\":\"video\"},{\"type\":\"input_audio\"},{}]}"), G4_CHAT_SMALL);
    CHECK(p.n_media == 3 && p.n_unknown == 2 && strstr(p.text, "user\n<|image|><|video|><|audio|><turn|>"), "%u %u %s", (unsigned)p.n_media, (unsigned)p.n_unknown, p.text);
    g4_chat_prompt_free(&p);
    /* settings go before what the request says */
    g4_json asked;
    const char *all = "{\"messages\":[" USER("x") "],\"add_generation_prompt\":true,\"enable_thinking\":true,\"tools\":[{\"function\":{\"name\":\"f\",\"description\":\"d\"}}]}";
    CHECK(!g4_json_parse(&asked, all, strlen(all), "all", &err), "%s", err.text);
    g4_chat_settings settings = {.add_generation_prompt = 0, .enable_thinking = 0, .preserve_thinking = -1, .no_tools = 1};
    CHECK(!g4_chat_render_json(&asked, 0, G4_CHAT_LARGE, &settings, &p, &err) && !strcmp(p.text, "<bos><|turn>user\nx<turn|>\n"), "%s", p.text ? p.text : err.text);
    g4_chat_prompt_free(&p);
    settings = (g4_chat_settings){-1, -1, -1, 0};
    CHECK(!g4_chat_render_json(&asked, 0, G4_CHAT_LARGE, &settings, &p, &err) && strstr(p.text, "<|think|>\n<|tool>declaration:f{") && strstr(p.text, "<|turn>model\n"), "%s",
          p.text ? p.text : err.text);
    g4_chat_prompt_free(&p);
    g4_json_free(&asked);
    /* a request inside another value */
    g4_json j;
    const char *outer = "{\"a\":[1,{\"messages\":[" USER("x") ",{\"role\":7}]}]}";
    CHECK(!g4_json_parse(&j, outer, strlen(outer), "outer", &err), "%s", err.text);
    CHECK(g4_chat_render_json(&j, j.nodes[j.nodes[g4_json_get(&j, 0, "a")].first].next, G4_CHAT_SMALL, NULL, &p, &err) == -1 && !strncmp(err.text, "messages[1].role: ", 18), "%s", err.text);
    g4_json_free(&j);
}

static void test_refusals(void) {
    static const struct {
        const char *request, *because;
    } cases[] = {
        {CHAT(USER("a") ",{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{\"name\":\"f\",\"arguments\":\"{}\"}}]}"),
         "messages[1].tool_calls[0].function.arguments: expected an object"},
        {CHAT("{\"content\":\"a\"}"), "messages[0]: has no member \"role\""},
        {CHAT("{\"role\":5}"), "messages[0].role: expected a string, found a number"},
        {CHAT("\"a\""), "messages[0]: expected an object, found a string"},
        {CHAT(""), "messages: expected one message at least"},
        {"{}", "the request: has no member \"messages\""},
        {"[]", "the request: expected an object with messages, found an array"},
        {"null", "found null"},
        {"{\"messages\":{}}", "messages: expected an array of messages, found an object"},
        {"{\"messages\":[" USER("a") "],\"tools\":[5]}", "tools[0]: expected an array of objects, found a number"},
        {"{\"messages\":[" USER("a") "],\"tools\":\"f\"}", "tools: expected an array of objects, found a string"},
        {"{\"messages\":[" USER("a") "],\"tools\":[{}]}", "tools[0]: has no member \"function\""},
        {CHAT(USER("a") ",{\"role\":\"assistant\",\"tool_calls\":[{\"id\":[],\"function\":{\"name\":\"f\",\"arguments\":{}}}]},{\"role\":\"tool\"}"),
         "messages[1].tool_calls[0].id: expected a string, found an array"},
        {CHAT(USER("a") ",{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{\"name\":\"f\",\"arguments\":{\"x\":1e999}}}]}"),
         "messages[1].tool_calls[0].function.arguments.x: 1e999 is too large for a double"},
        {CHAT(USER("a") ",{\"role\":\"tool\",\"content\":\"x\"},{\"role\":\"assistant\",\"content\":5,\"reasoning\":[1]}"), "messages[2].reasoning: expected a string"},
        {CHAT(USER("a")) "}", "line 1 column"}, /* one brace too many */
        {"", "expected a value"},
        {"{\"messages\":[" USER("a") "],\"messages\":[]}", "\"messages\" is there twice"},
        {CHAT(USER("\\ud800")), "surrogate"},
        {CHAT(USER("\xff")), "valid UTF-8"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) check_refused(cases[i].request, strlen(cases[i].request), cases[i].because);

    /* a long path is cut between two characters */
    string path = {0};
    append_text(&path, "{\"messages\":[{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{\"name\":\"f\",\"arguments\":{\"x");
    for (int i = 0; i < 100; i++) append_text(&path, "\xc3\xbc");
    append_text(&path, "\":1e999}}}]}]}");
    check_refused(path.s, path.n, "\xc3\xbc...: 1e999 is too large");
    CHECK(is_utf8(err.text, strlen(err.text)), "%s", err.text);
    free(path.s);

    /* as deep as JSON may be, and deeper; a large text; NUL inside a text */
    string deep = {0};
    append_text(&deep, "{\"messages\":[" USER("a") ",{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{\"name\":\"f\",\"arguments\":{\"x\":");
    size_t head = deep.n;
    for (int depth = 57; depth < 59; depth++) {
        deep.n = head;
        for (int i = 0; i < depth; i++) append_text(&deep, i % 2 ? "[" : "{\"k\":");
        append_text(&deep, "1");
        for (int i = depth; i-- > 0;) append_text(&deep, i % 2 ? "]" : "}");
        append_text(&deep, "}}}]}]}");
        g4_chat_prompt p;
        int failed = g4_chat_render(deep.s, deep.n, G4_CHAT_SMALL, &p, &err);
        CHECK(!failed == (depth == 57), "depth %d: %s", depth, failed ? err.text : "rendered");
        if (!failed) CHECK(count(p.text, "{k:[") == 28 && is_sound(&p), "%s", p.text);
        if (!failed) g4_chat_prompt_free(&p);
    }
    deep.n = 0;
    for (int i = 0; i < 1 << 20; i++) append(&deep, "[", 1);
    check_refused(deep.s, deep.n, "inside 64 others");
    deep.n = 0;
    append_text(&deep, "{\"messages\":[{\"role\":\"user\",\"content\":\"\\u0000");
    for (int i = 0; i < 1 << 22; i++) append(&deep, "x", 1);
    append_text(&deep, "\"}]}");
    g4_chat_prompt p;
    CHECK(!g4_chat_render(deep.s, deep.n, G4_CHAT_SMALL, &p, &err) && p.n == 5 + 12 + 1 + (1 << 22) + 8 && !p.text[17], "%s", err.text);
    g4_chat_prompt_free(&p);
    /* more messages than Jinja's sandbox counts, and just as many */
    for (int extra = 0; extra < 2; extra++) {
        deep.n = 0;
        append_text(&deep, "{\"messages\":[{\"role\":\"system\"}");
        for (int i = 0; i < 100000 + extra; i++) append_text(&deep, ",{\"role\":\"user\"}");
        append_text(&deep, "]}");
        int failed = g4_chat_render(deep.s, deep.n, G4_CHAT_SMALL, &p, &err);
        CHECK(!failed == !extra, "%d: %s", extra, failed ? err.text : "rendered");
        g4_chat_prompt_free(&p);
    }
    /* a name that a hundred messages repeat is no way to fill the memory; calls times messages are no way to take the time */
    deep.n = 0;
    append_text(&deep, "{\"messages\":[{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{\"name\":\"");
    for (int i = 0; i < 4 << 20; i++) append(&deep, "x", 1);
    append_text(&deep, "\",\"arguments\":{}}}]}");
    for (int i = 0; i < 100; i++) append_text(&deep, ",{\"role\":\"tool\"}");
    append_text(&deep, "]}");
    check_refused(deep.s, deep.n, "the prompt would have more than");
    deep.n = 0;
    append_text(&deep, "{\"messages\":[{\"role\":\"assistant\",\"tool_calls\":[");
    for (int i = 0; i < 50000; i++) append_text(&deep, i ? ",{\"id\":\"a\",\"function\":{\"name\":\"f\",\"arguments\":{}}}" : "{\"id\":\"a\",\"function\":{\"name\":\"g\",\"arguments\":null}}");
    append_text(&deep, "]}");
    for (int i = 0; i < 50000; i++) append_text(&deep, ",{\"role\":\"tool\",\"tool_call_id\":\"b\"}");
    append_text(&deep, "]}");
    CHECK(!g4_chat_render(deep.s, deep.n, G4_CHAT_SMALL, &p, &err) && count(p.text, "response:unknown{value:null}") == 50000, "%s", err.text);
    g4_chat_prompt_free(&p);
    free(deep.s);
}

/* Not by strtod, which the C library of Windows rounds otherwise. */
static double read_number(const char *s, size_t n) {
    g4_json j;
    double x = NAN;
    if (g4_json_parse(&j, s, n, "number", &err)) return x;
    if (g4_json_double(&j, 0, &x)) x = NAN;
    g4_json_free(&j);
    return x;
}

/* Numbers: read back equal, and no shorter spelling does. */
static void test_numbers(void) {
    for (int i = 0; i < 3000; i++) {
        uint64_t bits = (uint64_t)random_below(1u << 31) << 33 ^ (uint64_t)random_below(1u << 31) << 11 ^ random_below(1u << 31);
        if (i % 3 == 0) bits &= ~(uint64_t)0 << 52; /* powers of two */
        double x, back;
        memcpy(&x, &bits, sizeof x);
        if (!isfinite(x)) continue;
        char request[256];
        snprintf(request, sizeof request, "{\"messages\":[{\"role\":\"user\",\"tool_responses\":[{\"response\":%.17e}]}]}", x);
        g4_chat_prompt p = rendered(request, G4_CHAT_SMALL);
        char *at = p.text ? strstr(p.text, "{value:") : NULL;
        CHECK(at != NULL, "%s: %s", request, p.text ? p.text : err.text);
        if (!at) continue;
        at += 7;
        const char *end = strchr(at, '}');
        back = read_number(at, (size_t)(end - at));
        CHECK(!memcmp(&x, &back, sizeof x), "%s: %s", request, p.text);
        int digits = 0, leading = 1, trailing = 0;
        for (char *c = at; c < end && *c != 'e'; c++) {
            if (*c < '0' || *c > '9' || (leading && *c == '0')) continue;
            leading = 0;
            digits++;
            trailing = *c == '0' ? trailing + 1 : 0;
        }
        digits -= trailing;
        if (digits > 1) {
            char shorter[64];
            snprintf(shorter, sizeof shorter, "%.*e", digits - 2, x);
            CHECK(read_number(shorter, strlen(shorter)) != x, "%.17g is spelled %.30s, and %s would do", x, at, shorter);
        }
        g4_chat_prompt_free(&p);
    }
}

/* ---- Ids -------------------------------------------------------------------------------------------------------------- */

static void test_ids(const g4_tokenizer *tok) {
    string t = read_file("test/chats.jsonl");
    int compared = 0, with_lookalikes = 0;
    for (char *line = strtok(t.s, "\n"); line; line = strtok(NULL, "\n")) {
        g4_json j;
        if (g4_json_parse(&j, line, strlen(line), "line", &err)) abort();
        g4_chat_prompt p;
        int failed = g4_chat_render_json(&j, g4_json_get(&j, 0, "request"), G4_CHAT_LARGE, NULL, &p, &err);
        g4_json_free(&j);
        if (failed) continue;
        int32_t *ids = NULL, *whole = NULL, *parsed = NULL;
        size_t n = 0, n_whole = 0, n_parsed = 0, special = 0, in_whole = 0;
        CHECK(!g4_chat_encode(tok, &p, 0, &ids, &n, &err) && !g4_encode(tok, p.text, p.n, 0, &whole, &n_whole, &err) &&
              !g4_chat_encode(tok, &p, G4_CHAT_PARSE_REQUEST, &parsed, &n_parsed, &err), "%s", err.text);
        CHECK(n_parsed == n_whole && !memcmp(parsed, whole, n_whole * sizeof *whole), "%s", p.text);
        for (size_t i = 0; i < n; i++) special += (size_t)g4_token_is_special(tok, ids[i]);
        for (size_t i = 0; i < n_whole; i++) in_whole += (size_t)g4_token_is_special(tok, whole[i]);
        /* what the template wrote is special, what came with the request is not */
        CHECK(special == p.n_markers && n > 0 && ids[0] == g4_token_id(tok, "<bos>") && n > 1 && ids[1] != ids[0], "%zu of %zu: %s", special, p.n_markers, p.text);
        if (in_whole == special) {
            CHECK(n == n_whole && !memcmp(ids, whole, n * sizeof *ids), "%s", p.text);
            compared++;
        } else {
            with_lookalikes++;
        }
        g4_free(ids);
        g4_free(whole);
        g4_free(parsed);
        g4_chat_prompt_free(&p);
    }
    /* markers that a caller made up */
    char text[] = "<bos>a<turn|>";
    static const g4_chat_marker made_up[][2] = {{{0, 5}, {6, 7}}, {{6, 7}, {0, 5}}, {{0, 5}, {4, 5}}, {{0, 5}, {6, 8}}, {{0, 5}, {14, 0}}, {{0, 5}, {SIZE_MAX, 2}}, {{0, SIZE_MAX}, {1, 1}}};
    for (int i = 0; i < 7; i++) {
        g4_chat_marker markers[2] = {made_up[i][0], made_up[i][1]};
        int32_t *ids = NULL;
        size_t n = 0;
        int failed = g4_chat_encode(tok, &(g4_chat_prompt){.text = text, .n = 13, .markers = markers, .n_markers = 2}, 0, &ids, &n, &err);
        CHECK(i ? failed && is_line(err.text) && strstr(err.text, "marker ") : !failed && n == 3, "markers %d: %d %s", i, failed, failed ? err.text : "taken");
        if (!failed) g4_free(ids);
    }
    CHECK(compared > 20 && with_lookalikes > 5, "%d prompts compared, %d with text that looks like special tokens", compared, with_lookalikes);
    free(t.s);
}

/* ---- Which template a checkpoint has ----------------------------------------------------------------------------------- */

#ifndef _WIN32
#include <sys/stat.h>
#include <unistd.h>

static char dir[] = "/tmp/gemma4-chat-XXXXXX";

static char warnings[4096];
static void on_warning(void *user, const char *text) {
    (void)user;
    snprintf(warnings + strlen(warnings), sizeof warnings - strlen(warnings), "%s\n", text);
}

static const char *in_dir(const char *name) {
    static char path[4][256];
    static int turn;
    turn = (turn + 1) % 4;
    snprintf(path[turn], sizeof path[turn], "%s/%s", dir, name);
    return path[turn];
}

static void put_file(const char *name, const char *s, size_t n) {
    FILE *f = fopen(in_dir(name), "wb");
    if (!f || fwrite(s, 1, n, f) != n || fclose(f)) {
        printf("FAILED: cannot write %s\n", in_dir(name));
        exit(1);
    }
}

static void check_family(const char *path, const g4_config *config, int family, const char *warning) {
    g4_chat_family got = (g4_chat_family)7;
    warnings[0] = 0;
    int failed = g4_chat_family_of(path, config, &(g4_options){.warn = on_warning}, &got, &err);
    CHECK(!failed && (int)got == family, "family %d, expected %d: %s", (int)got, family, failed ? err.text : "");
    CHECK(*warning ? strstr(warnings, warning) != NULL : !*warnings, "\"%s\", expected \"%s\"", warnings, warning);
}

/* A GGUF file of one or two keys and no tensors. */
static void put_gguf(const char *name, const char *template_text, size_t n, int per_layer) {
    string t = {0};
    append(&t, "GGUF\3\0\0\0\0\0\0\0\0\0\0\0\2\0\0\0\0\0\0\0", 24);
    append(&t, "\x27\0\0\0\0\0\0\0gemma4.embedding_length_per_layer_input\4\0\0\0", 8 + 39 + 4);
    append(&t, (char[4]){(char)per_layer, 0, 0, 0}, 4);
    append(&t, "\x17\0\0\0\0\0\0\0tokenizer.chat_template\x08\0\0\0", 8 + 23 + 4);
    append(&t, (char[8]){(char)(n & 255), (char)(n >> 8 & 255), (char)(n >> 16 & 255)}, 8);
    append(&t, template_text, n);
    put_file(name, t.s, t.n);
    free(t.s);
}

static void test_families(void) {
    static const char other[] = "{{ bos_token }}{% for m in messages %}<|im_start|>{% endfor %}";
    static const char named[] = "the template in chat_template.jinja (3f94ac2136fefae7) is not known here; Google's for the small Gemma 4 models (2026-07-09, b5a7c4713578081c) is used";
    g4_chat_family family;
    /* no template at all: the width of the per-layer inputs decides, and the warning says what is used */
    check_family("test/fixtures/e2b", NULL, G4_CHAT_SMALL, "has no chat template; Google's for the small");
    check_family("test/fixtures/31b/", NULL, G4_CHAT_LARGE, "has no chat template; Google's for the large");
    check_family(dir, &(g4_config){.hidden_size_per_layer_input = 4}, G4_CHAT_SMALL, "has no chat template");
    CHECK(g4_chat_family_of(dir, NULL, NULL, &family, &err) == -1 && strstr(err.text, "config.json"), "%s", err.text);
    /* another one: both are named */
    put_file("chat_template.jinja", other, sizeof other - 1);
    check_family(dir, &(g4_config){.hidden_size_per_layer_input = 4}, G4_CHAT_SMALL, named);
    CHECK(!g4_chat_recognise(other, sizeof other - 1, &family), "another template was recognised");
    put_gguf("other.gguf", other, sizeof other - 1, 0);
    check_family(in_dir("other.gguf"), NULL, G4_CHAT_LARGE, "the template in tokenizer.chat_template (3f94ac2136fefae7) is not known here; Google's for the large");
    put_gguf("other.gguf", other, sizeof other - 1, 8);
    check_family(in_dir("other.gguf"), NULL, G4_CHAT_SMALL, "Google's for the small");
    remove(in_dir("chat_template.jinja"));
    put_file("tokenizer_config.json", "{\"chat_template\":[{\"name\":\"rag\",\"template\":\"x\"},{\"name\":\"default\",\"template\":\"a\"}]}", 83);
    check_family(dir, &(g4_config){0}, G4_CHAT_LARGE, "the template in tokenizer_config.json (af63dc4c8601ec8c) is not known");
    static const char *const none[] = {"{\"chat_template\":null}", "{\"chat_template\":[{\"name\":\"rag\",\"template\":\"x\"},5]}", "{\"chat_template\":[{\"name\":\"default\"}]}", "[]"};
    for (int i = 0; i < 4; i++) {
        put_file("tokenizer_config.json", none[i], strlen(none[i]));
        check_family(dir, &(g4_config){0}, G4_CHAT_LARGE, "has no chat template");
    }
    put_file("tokenizer_config.json", "{\"chat_template\":", 17);
    CHECK(g4_chat_family_of(dir, NULL, NULL, &family, &err) == -1 && strstr(err.text, "tokenizer_config.json"), "%s", err.text);
    remove(in_dir("tokenizer_config.json"));

    const char *shared = getenv("SHARED");
    if (!shared || !*shared) {
        SKIP("SHARED is not set: its chats, and the two templates themselves");
        return;
    }
    char path[600];
    snprintf(path, sizeof path, "%s/fixtures/chats.jsonl", shared);
    compare_file(path);
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/templates/gemma4_%s_chat_template.jinja", shared, i ? "31b" : "e2b");
        string t = read_file(path), crlf = {0};
        CHECK(t.n > 10000 && g4_chat_recognise(t.s, t.n, &family) && (int)family == i, "%s", path);
        CHECK(t.n && g4_chat_recognise(t.s, t.n - 1, &family) && (int)family == i, "%s without its last newline", path);
        for (size_t k = 0; k < t.n; k++) {
            if (t.s[k] == '\n') append(&crlf, "\r", 1);
            append(&crlf, t.s + k, 1);
        }
        CHECK(g4_chat_recognise(crlf.s, crlf.n, &family) && (int)family == i, "%s with the line ends of Windows", path);
        for (size_t k = 0; k < t.n; k += 997) {
            t.s[k] ^= 1;
            CHECK(!g4_chat_recognise(t.s, t.n, &family), "%s with byte %zu changed was recognised", path, k);
            t.s[k] ^= 1;
        }
        put_file("chat_template.jinja", t.s, t.n);
        check_family(dir, NULL, i, "");
        remove(in_dir("chat_template.jinja"));
        string json = {0};
        append_text(&json, "{\"chat_template\":");
        append_quoted(&json, t.s, t.n);
        append_text(&json, "}");
        put_file("tokenizer_config.json", json.s, json.n);
        check_family(dir, NULL, i, "");
        remove(in_dir("tokenizer_config.json"));
        put_gguf("own.gguf", t.s, t.n, !i);
        check_family(in_dir("own.gguf"), NULL, i, "");
        free(json.s);
        free(crlf.s);
        free(t.s);
    }
}
#endif

/* ---- Answers ---------------------------------------------------------------------------------------------------------- */

/* What an answer's parts add up to; each part a line in `log` too. */
typedef struct heard {
    string reasoning, content, log;
    int bad_utf8;
} heard;

static void hear(void *user, const g4_part *part) {
    heard *h = user;
    h->bad_utf8 += !is_utf8(part->text, part->n);
    if (part->kind == G4_PART_REASONING) append(&h->reasoning, part->text, part->n);
    if (part->kind == G4_PART_CONTENT) append(&h->content, part->text, part->n);
    if (part->kind == G4_PART_TOOL_CALL) {
        append_text(&h->log, "call ");
        append(&h->log, part->name, part->n_name);
        append_text(&h->log, " ");
        append(&h->log, part->text, part->n);
        append_text(&h->log, "\n");
    }
    if (part->kind == G4_PART_BAD_TOOL_CALL) {
        append_text(&h->log, "bad ");
        append(&h->log, part->text, part->n);
        append_text(&h->log, "\n");
        h->bad_utf8 += !is_line(part->fault);
    }
}

static heard read_streaming(const g4_tokenizer *tok, int in_reasoning, const int32_t *ids, size_t n) {
    heard h = {0};
    g4_answer *a = g4_answer_open(tok, in_reasoning, hear, &h, &err);
    int failed = !a;
    for (size_t i = 0; i < n && !failed; i++) failed = g4_answer_push(a, ids[i], &err);
    if (!failed) failed = g4_answer_end(a, &err);
    CHECK(!failed, "%s", err.text);
    g4_answer_close(a);
    append(&h.reasoning, "", 0);
    append(&h.content, "", 0);
    append(&h.log, "", 0);
    return h;
}

static void free_heard(heard *h) {
    free(h->reasoning.s);
    free(h->content.s);
    free(h->log.s);
}

static void decode_into(string *t, const g4_tokenizer *tok, const int32_t *ids, size_t n, int flags) {
    const char *s;
    size_t size;
    g4_decoder *d = g4_decoder_open(tok, flags, &err);
    for (size_t i = 0; i <= n; i++) {
        if (i < n ? g4_decode_push(d, ids[i], &s, &size, &err) : g4_decode_end(d, &s, &size, &err)) abort();
        append(t, s, size);
    }
    g4_decoder_close(d);
}

/* The same reading, plainly: whole segments between the markers, each decoded at once. Calls are only counted. */
static int read_plainly(const g4_tokenizer *tok, int in_reasoning, const int32_t *ids, size_t n, string *reasoning, string *content, string *calls) {
    int32_t open = g4_token_id(tok, "<|channel>"), close = g4_token_id(tok, "<channel|>"), call = g4_token_id(tok, "<|tool_call>"), end = g4_token_id(tok, "<tool_call|>");
    int32_t stop[3] = {g4_token_id(tok, "<turn|>"), g4_token_id(tok, "<eos>"), g4_token_id(tok, "<|tool_response>")};
    int labelled = 0, n_calls = 0;
    append(reasoning, "", 0);
    append(content, "", 0);
    append(calls, "", 0);
    for (size_t i = 0; i <= n;) {
        size_t k = i;
        while (k < n && ids[k] != open && ids[k] != close && ids[k] != call) k++;
        string t = {0};
        append(&t, "", 0);
        decode_into(&t, tok, ids + i, k - i, G4_SKIP_SPECIAL);
        if (in_reasoning) {
            size_t skip = 0;
            if (labelled) {
                int closed = k < n;
                if (t.n >= 8 && !memcmp(t.s, "thought\n", 8)) skip = 8;
                else if (t.n < 8 && !memcmp(t.s, "thought", t.n) && (!closed || t.n == 7)) skip = t.n;
            }
            append(reasoning, t.s + skip, t.n - skip);
            if (k < n && t.n > skip && t.s[t.n - 1] == '\n') reasoning->s[--reasoning->n] = 0;
        } else {
            append(content, t.s, t.n);
        }
        free(t.s);
        if (k == n) break;
        in_reasoning = ids[k] == open;
        labelled = in_reasoning;
        i = k + 1;
        if (ids[k] != call) continue;
        n_calls++;
        while (i < n && ids[i] != end && ids[i] != call && ids[i] != stop[0] && ids[i] != stop[1] && ids[i] != stop[2]) i++;
        i += i < n && ids[i] == end;
        decode_into(calls, tok, ids + k, i - k, 0);
        append_text(calls, "\n");
    }
    return n_calls;
}

/* The text's ids, special tokens parsed. */
static size_t encode(const g4_tokenizer *tok, const char *text, int32_t **ids) {
    size_t n = 0;
    *ids = NULL;
    if (g4_encode(tok, text, strlen(text), 0, ids, &n, &err)) abort();
    return n;
}

#define Q "<|\"|>"
#define CALL(inside) "<|tool_call>" inside "<tool_call|>"

static void test_answers(const g4_tokenizer *tok) {
    static const struct {
        const char *answer;
        int in_reasoning;
        const char *reasoning, *content, *log;
    } cases[] = {
        {"<|channel>thought\nX<channel|>Y<turn|>", 0, "X", "Y", ""},
        {"<|channel>thought\nX\n\n<channel|>Y", 0, "X\n", "Y", ""}, /* one newline is the template's */
        {"Y<turn|>", 0, "", "Y", ""},
        {"", 0, "", "", ""},
        {"<|channel>thought\n<channel|>Y", 0, "", "Y", ""},
        {"<|channel>thought<channel|>Y", 0, "", "Y", ""},
        {"<|channel>thoughts\n<channel|>Y", 0, "thoughts", "Y", ""},
        {"<|channel>plan\nX<channel|>Y", 0, "plan\nX", "Y", ""},
        {"<|channel>thou<channel|>Y", 0, "thou", "Y", ""},
        {"<|channel><channel|>Y", 0, "", "Y", ""},
        {"more\n<channel|>Y", 1, "more", "Y", ""},
        {"<|channel>thought\ncut off", 0, "cut off", "", ""},
        {"<|channel>thought\ncut off\n", 0, "cut off\n", "", ""},
        {"<|channel>tho", 0, "", "", ""},
        {"a<|channel>thought\nb<channel|>c<|channel>thought\nd<channel|>e", 0, "bd", "ace", ""},
        {"<think>no</think> <|think|>\n", 0, "", "<think>no</think> \n", ""},
        {"</s>a<channel|>b", 0, "", "</s>ab", ""},
        {CALL("call:f{}") "<|tool_response>", 0, "", "", "call f {}\n"},
        {"<|channel>thought\nX\n<channel|>Let me. " CALL("call:get_weather{city:" Q "Zürich" Q ",days:3}") CALL("call:g{}"), 0, "X", "Let me. ",
         "call get_weather {\"city\":\"Z\\u00fcrich\",\"days\":3}\ncall g {}\n"},
        {"<|channel>thought\nX" CALL("call:f{}") "Y", 0, "X", "Y", "call f {}\n"}, /* a thought that was never closed */
        {CALL("call:f{a:" Q "he said \"hi\"" Q "}"), 0, "", "", "call f {\"a\":\"he said \\\"hi\\\"\"}\n"},
        {CALL("call:f{a:" Q "}{,:[]call:\\n\n" Q "}"), 0, "", "", "call f {\"a\":\"}{,:[]call:\\\\n\\u000a\"}\n"},
        {CALL("call:f{a:[1,-2.5e3,true,false,null,[],{}," Q Q "],b:{c:{d:[" Q "x" Q "]}}}"), 0, "", "",
         "call f {\"a\":[1,-2.5e3,true,false,null,[],{},\"\"],\"b\":{\"c\":{\"d\":[\"x\"]}}}\n"},
        {CALL(" call: f { a : 1 , " Q "b c" Q " : [ 1 , 2 ] } "), 0, "", "", "call f {\"a\":1,\"b c\":[1,2]}\n"},
        {CALL("call:ns.f-2:x{größe:1}"), 0, "", "", "call ns.f-2:x {\"gr\\u00f6\\u00dfe\":1}\n"},
        /* reported, never lost */
        {"a" CALL("call:f{a:1") "b", 0, "", "ab", "bad <|tool_call>call:f{a:1<tool_call|>\n"},
        {CALL("call:f{a:1}}"), 0, "", "", "bad <|tool_call>call:f{a:1}}<tool_call|>\n"},
        {CALL("call:f{a:hello}"), 0, "", "", "bad <|tool_call>call:f{a:hello}<tool_call|>\n"},
        {CALL("call:f{a:" Q "x}"), 0, "", "", "bad <|tool_call>call:f{a:" Q "x}<tool_call|>\n"},
        {CALL("call:f{a:" Q "x" Q Q "y" Q "}"), 0, "", "", "bad <|tool_call>call:f{a:" Q "x" Q Q "y" Q "}<tool_call|>\n"},
        {CALL("call:f{a:1,a:2}"), 0, "", "", "bad <|tool_call>call:f{a:1,a:2}<tool_call|>\n"},
        {CALL("call:f{a:01}"), 0, "", "", "bad <|tool_call>call:f{a:01}<tool_call|>\n"},
        {CALL("call:f{a:-}"), 0, "", "", "bad <|tool_call>call:f{a:-}<tool_call|>\n"},
        {CALL("call:f{a:1,}"), 0, "", "", "bad <|tool_call>call:f{a:1,}<tool_call|>\n"},
        {CALL("call:f{a:1 b:2}"), 0, "", "", "bad <|tool_call>call:f{a:1 b:2}<tool_call|>\n"},
        {CALL("call:f{a:[1 2]}"), 0, "", "", "bad <|tool_call>call:f{a:[1 2]}<tool_call|>\n"},
        {CALL("call:f{,}"), 0, "", "", "bad <|tool_call>call:f{,}<tool_call|>\n"},
        {CALL("call:f{:1}"), 0, "", "", "bad <|tool_call>call:f{:1}<tool_call|>\n"},
        {CALL("call:f{a}"), 0, "", "", "bad <|tool_call>call:f{a}<tool_call|>\n"},
        {CALL("call:f[1]"), 0, "", "", "bad <|tool_call>call:f[1]<tool_call|>\n"},
        {CALL("call:{}"), 0, "", "", "bad <|tool_call>call:{}<tool_call|>\n"},
        {CALL("call:" Q "f" Q "{}"), 0, "", "", "bad <|tool_call>call:" Q "f" Q "{}<tool_call|>\n"},
        {CALL("c" Q "all:f{}"), 0, "", "", "bad <|tool_call>c" Q "all:f{}<tool_call|>\n"},
        {CALL("{\"name\":\"f\",\"arguments\":{}}"), 0, "", "", "bad <|tool_call>{\"name\":\"f\",\"arguments\":{}}<tool_call|>\n"},
        {CALL(""), 0, "", "", "bad <|tool_call><tool_call|>\n"},
        {"<|tool_call>call:f{a:" Q "x", 0, "", "", "bad <|tool_call>call:f{a:" Q "x\n"},
        {"<|tool_call>call:f{<turn|>", 0, "", "", "bad <|tool_call>call:f{\n"},
        {"<|tool_call>call:f{<eos>z", 0, "", "z", "bad <|tool_call>call:f{\n"},
        {"<|tool_call>call:f{<|tool_response>", 0, "", "", "bad <|tool_call>call:f{\n"},
        {"<|tool_call>call:f{" CALL("call:g{}"), 0, "", "", "bad <|tool_call>call:f{\ncall g {}\n"},
        {CALL("call:run:\nBEGIN_ARG:\n<|channel>thought\n<channel|>ls\nEND_ARG"), 0, "", "",
         "bad <|tool_call>call:run:\nBEGIN_ARG:\n<|channel>thought\n<channel|>ls\nEND_ARG<tool_call|>\n"},
        {"<channel|>call:f{}<tool_call|>", 0, "", "call:f{}", ""}, /* without the marker it is text */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int32_t *ids;
        size_t n = encode(tok, cases[i].answer, &ids);
        heard h = read_streaming(tok, cases[i].in_reasoning, ids, n);
        CHECK(!strcmp(h.reasoning.s, cases[i].reasoning) && !strcmp(h.content.s, cases[i].content) && !strcmp(h.log.s, cases[i].log) && !h.bad_utf8,
              "%s: reasoning \"%s\", content \"%s\", %s; expected \"%s\", \"%s\", %s", cases[i].answer, h.reasoning.s, h.content.s, h.log.s, cases[i].reasoning,
              cases[i].content, cases[i].log);
        free_heard(&h);
        g4_free(ids);
    }
    /* the delimiter is a token: the same characters as ordinary text are not one */
    int32_t ids[256], *piece;
    size_t n = 0, n_piece;
    ids[n++] = g4_token_id(tok, "<|tool_call>");
    for (int i = 0; i < 3; i++) {
        static const char *const texts[] = {"call:f{a:", "<|\"|><tool_call|>", "}"};
        if (g4_encode(tok, texts[i], strlen(texts[i]), G4_PLAIN_TEXT, &piece, &n_piece, &err)) abort();
        if (i == 1) ids[n++] = g4_token_id(tok, Q);
        for (size_t k = 0; k < n_piece; k++) ids[n++] = piece[k];
        if (i == 1) ids[n++] = g4_token_id(tok, Q);
        g4_free(piece);
    }
    ids[n++] = g4_token_id(tok, "<tool_call|>");
    heard h = read_streaming(tok, 0, ids, n);
    CHECK(!strcmp(h.log.s, "call f {\"a\":\"<|\\\"|><tool_call|>\"}\n"), "%s", h.log.s);
    free_heard(&h);
    /* faults say what and where */
    static const char *const faults[][2] = {{CALL("call:f{a:hello}"), "byte 9 of the call: expected a value: <|\"|>, a number, true, false, null, '{' or '[', found \"hello}\""},
                                            {CALL("call:f{a:1,a:2}"), "\"a\" is there twice"},
                                            {"<|tool_call>call:f{", "the answer ends inside the call"},
                                            {CALL("call:f{a:" Q "x}"), "expected <|\"|> at the end of a string, found its end"}};
    for (int i = 0; i < 4; i++) {
        g4_message m;
        size_t n_ids = encode(tok, faults[i][0], &piece);
        CHECK(!g4_answer_read(tok, 0, piece, n_ids, &m, &err) && m.n_calls == 1 && !m.calls[0].name && m.calls[0].fault && strstr(m.calls[0].fault, faults[i][1]),
              "%s: %s", faults[i][0], m.n_calls ? m.calls[0].fault : "no call");
        g4_message_free(&m);
        g4_free(piece);
    }
    /* what is long is cut between two characters */
    for (int shift = 0; shift < 2; shift++) {
        string s = {0};
        append_text(&s, "<|tool_call>call:f{a:");
        append(&s, "x", (size_t)shift);
        for (int i = 0; i < 100; i++) append_text(&s, "\xc3\xbc");
        append_text(&s, "}<tool_call|>");
        g4_message long_call;
        size_t n_ids = encode(tok, s.s, &piece);
        CHECK(!g4_answer_read(tok, 0, piece, n_ids, &long_call, &err) && long_call.n_calls == 1 && long_call.calls[0].fault, "%s", err.text);
        const char *text = long_call.n_calls && long_call.calls[0].fault ? long_call.calls[0].fault : "";
        CHECK(is_utf8(text, strlen(text)) && strlen(text) < 250 && strstr(text, "\xc3\xbc...\""), "%s", text);
        g4_message_free(&long_call);
        g4_free(piece);
        free(s.s);
    }
    /* an id that is none */
    g4_message m;
    CHECK(g4_answer_read(tok, 0, (int32_t[]){g4_tokenizer_size(tok)}, 1, &m, &err) == -1 && is_line(err.text) && !m.content, "%s", err.text);
    CHECK(g4_answer_read(tok, 0, (int32_t[]){-1}, 1, &m, &err) == -1, "id -1");
}

/* Random ids, most of them markers: streaming, at once and plainly give the same, wherever the answer is cut. */
static void test_random_answers(const g4_tokenizer *tok, int rounds) {
    static const char *const markers[] = {"<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", Q, "<turn|>", "<eos>", "<|tool_response>", "<bos>", "<|image|>"};
    static const char *const words[] = {"thought\n", "thought", "th", "\n", "call:f{", "}", "a:1", ",", "\xf0\x9f\x91\xa9\xe2\x80\x8d", "call:g{x:[", "]}", "{", "hello", " ", "true", "\n\n",
                                        CALL("call:h{}"), CALL("call:h{a:[1," Q "x" Q "]}"), "<|channel>thought\n"};
    int whole_calls = 0;
    for (int round = 0; round < rounds; round++) {
        int32_t ids[96];
        size_t n = 0;
        int in_reasoning = round % 3 == 0;
        while (n < 40) {
            uint32_t kind = random_below(8);
            if (kind < 3) {
                ids[n++] = g4_token_id(tok, markers[random_below(sizeof markers / sizeof *markers)]);
            } else if (kind < 7) {
                int32_t *piece;
                size_t n_piece = encode(tok, words[random_below(sizeof words / sizeof *words)], &piece);
                for (size_t k = 0; k < n_piece && n < 90; k++) ids[n++] = piece[k];
                g4_free(piece);
            } else { /* a byte, which may be no character */
                char name[8];
                snprintf(name, sizeof name, "<0x%02X>", 0x80 + (unsigned)random_below(128));
                ids[n++] = g4_token_id(tok, name);
            }
        }
        for (size_t cut = 0; cut <= n; cut += 1 + random_below(3)) {
            heard h = read_streaming(tok, in_reasoning, ids, cut);
            g4_message m;
            string reasoning = {0}, content = {0}, calls = {0}, log = {0};
            int n_calls = read_plainly(tok, in_reasoning, ids, cut, &reasoning, &content, &calls), failed = g4_answer_read(tok, in_reasoning, ids, cut, &m, &err);
            CHECK(!failed && m.n_calls == n_calls, "%d calls, expected %d", m.n_calls, n_calls);
            CHECK(reasoning.n == h.reasoning.n && !memcmp(reasoning.s, h.reasoning.s, reasoning.n) && content.n == h.content.n && !memcmp(content.s, h.content.s, content.n),
                  "round %d, %zu ids: reasoning \"%s\", content \"%s\", expected \"%s\", \"%s\"", round, cut, h.reasoning.s, h.content.s, reasoning.s, content.s);
            CHECK(!failed && m.n_reasoning == h.reasoning.n && m.n_content == h.content.n && !memcmp(m.reasoning, h.reasoning.s, m.n_reasoning) &&
                  !memcmp(m.content, h.content.s, m.n_content) && !h.bad_utf8, "round %d, %zu ids: streaming and not", round, cut);
            /* every call is in the text of the calls, and as a message in the same words as when streamed */
            append(&log, "", 0);
            for (int i = 0; i < m.n_calls; i++) {
                g4_tool_call *c = &m.calls[i];
                append_text(&log, c->name ? "call " : "bad ");
                if (c->name) append(&log, c->name, c->n_name), append_text(&log, " ");
                append(&log, c->text, c->n);
                append_text(&log, "\n");
                g4_json j;
                if (c->name) {
                    CHECK(!g4_json_parse(&j, c->text, c->n, "arguments", &err) && j.nodes[0].kind == G4_JSON_OBJECT, "%s: %s", c->text, err.text);
                    g4_json_free(&j);
                    whole_calls++;
                } else {
                    CHECK(strstr(calls.s, c->text) || memchr(c->text, 0, c->n), "lost: %s of %s", c->text, calls.s);
                }
            }
            CHECK(log.n == h.log.n && !memcmp(log.s, h.log.s, log.n), "round %d: %s, expected %s", round, log.s, h.log.s);
            free(reasoning.s);
            free(content.s);
            free(calls.s);
            free(log.s);
            g4_message_free(&m);
            free_heard(&h);
        }
    }
    CHECK(whole_calls > rounds / 4, "only %d whole calls in %d random answers", whole_calls, rounds);
}

/* ---- Tool calls there and back ----------------------------------------------------------------------------------------- */

static void append_random_text(string *t, int key) {
    static const char *const pieces[] = {"a", "b", "Z", "_", "é", "日本", "\xf0\x9f\x98\x80", "x1", "Σ", "\xc2\xa0", " ", "\n", "{", "}", "[", "]", ":", ",", "\"", "\\", "'", "<|\"|>", "<tool_call|>", "call:", "\t", "\1", "<turn|>"};
    int n = (int)random_below(6) + key;
    for (int i = 0; i < n; i++) append_text(t, pieces[random_below(key ? 9 : sizeof pieces / sizeof *pieces)]); /* bare keys hold no signs */
}

static void append_random_value(string *json, int depth, int object) {
    uint32_t kind = object ? 6 : random_below(depth > 3 ? 5 : 7);
    string t = {0};
    if (kind < 2) {
        append(&t, "", 0);
        append_random_text(&t, 0);
        append_quoted(json, t.s, t.n);
    } else if (kind == 2) {
        static const char *const numbers[] = {"0", "-1", "3.5", "1e+16", "1e-05", "12345678901234567890", "0.1", "-2.5e-07"};
        append_text(json, numbers[random_below(8)]);
    } else if (kind < 5) {
        static const char *const words[] = {"null", "true", "false"};
        append_text(json, words[random_below(3)]);
    } else {
        uint32_t n = random_below(4);
        append_text(json, kind == 6 ? "{" : "[");
        for (uint32_t i = 0; i < n; i++) {
            if (i) append_text(json, ",");
            if (kind == 6) {
                char number[8];
                t.n = 0;
                append_random_text(&t, 1);
                append(&t, number, (size_t)snprintf(number, sizeof number, "%u", (unsigned)i)); /* no key twice */
                append_quoted(json, t.s, t.n);
                append_text(json, ":");
            }
            append_random_value(json, depth + 1, 0);
        }
        append_text(json, kind == 6 ? "}" : "]");
    }
    free(t.s);
}

/* A call that is rendered into a prompt and read from its ids is the same call, whatever its strings hold. */
static void test_there_and_back(const g4_tokenizer *tok, int rounds) {
    for (int round = 0; round < rounds; round++) {
        string json = {0}, request = {0};
        append_random_value(&json, 0, 1);
        append_text(&request, "{\"messages\":[{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{\"name\":\"fn\",\"arguments\":");
        append(&request, json.s, json.n);
        append_text(&request, "}}]}]}");
        g4_chat_prompt p = rendered(request.s, G4_CHAT_SMALL);
        int32_t *ids = NULL;
        size_t n = 0, skip = 0;
        g4_message m = {0};
        int ok = p.text && !g4_chat_encode(tok, &p, 0, &ids, &n, &err);
        while (ok && skip < n && ids[skip] != g4_token_id(tok, "<|tool_call>")) skip++;
        ok = ok && !g4_answer_read(tok, 0, ids + skip, n - skip, &m, &err);
        g4_json a = {0}, b = {0};
        CHECK(ok && m.n_calls == 1 && m.calls[0].name && !strcmp(m.calls[0].name, "fn"), "%s: %s: %s", json.s, p.text, m.n_calls ? m.calls[0].fault : err.text);
        CHECK(ok && m.n_calls == 1 && m.calls[0].name && !g4_json_parse(&a, json.s, json.n, "a", &err) && !g4_json_parse(&b, m.calls[0].text, m.calls[0].n, "b", &err) &&
              is_equal(&a, 0, &b, 0), "%s became %s", json.s, m.n_calls ? m.calls[0].text : "nothing");
        g4_json_free(&a);
        g4_json_free(&b);
        g4_message_free(&m);
        g4_free(ids);
        g4_chat_prompt_free(&p);
        free(json.s);
        free(request.s);
    }
}

/* ---- Hostile input ----------------------------------------------------------------------------------------------------- */

/* Any bytes: a sound prompt that becomes ids, or one line. */
static void render_anything(const g4_tokenizer *tok, const char *data, size_t n, int *n_rendered) {
    for (int family = 0; family < 2; family++) {
        g4_chat_prompt p;
        err.text[0] = 0;
        if (g4_chat_render(data, n, (g4_chat_family)family, &p, &err)) {
            CHECK(is_line(err.text), "%s", err.text);
            continue;
        }
        int32_t *ids = NULL;
        size_t n_ids = 0, special = 0;
        CHECK(is_sound(&p) && !g4_chat_encode(tok, &p, 0, &ids, &n_ids, &err), "%s", p.text);
        for (size_t i = 0; i < n_ids; i++) special += (size_t)g4_token_is_special(tok, ids[i]);
        CHECK(special == p.n_markers, "%zu special ids of %zu: %s", special, p.n_markers, p.text);
        g4_free(ids);
        g4_chat_prompt_free(&p);
        ++*n_rendered;
    }
}

/* Requests of the file with bytes changed, taken out and doubled, and with values of another type. */
static void test_hostile(const g4_tokenizer *tok, int rounds) {
    static const char *const values[] = {"null", "true", "0", "-1.5", "\"\"", "\"<|turn>\"", "[]", "[[]]", "{}", "{\"text\":null}", "1e400", "\"\\u0000\"", "[null,{\"type\":\"text\"}]"};
    string t = read_file("test/chats.jsonl");
    char *lines[100];
    int n_lines = 0, n_rendered = 0;
    for (char *line = strtok(t.s, "\n"); line && n_lines < 100; line = strtok(NULL, "\n")) lines[n_lines++] = line;
    for (int round = 0; round < rounds; round++) {
        char *line = lines[random_below((uint32_t)n_lines)] + strlen("{\"request\": ");
        size_t n = (size_t)(strstr(line, ", \"small\": ") - line);
        string s = {0};
        if (n > 6000) continue;
        append(&s, line, n);
        for (int change = (int)random_below(3); change >= 0; change--) {
            size_t at = random_below((uint32_t)s.n), size = 1 + random_below(8);
            if (size > s.n - at) size = s.n - at;
            if (random_below(3)) { /* a value begins behind a colon */
                while (at < s.n && s.s[at] != ':') at++;
                if (at + 2 > s.n) continue;
                const char *value = values[random_below(sizeof values / sizeof *values)];
                string changed = {0};
                append(&changed, s.s, at + 1);
                append_text(&changed, value);
                size_t end = at + 1;
                int depth = 0, quoted = 0;
                for (; end < s.n; end++) {
                    char c = s.s[end];
                    if (c == '"' && s.s[end - 1] != '\\') quoted = !quoted;
                    if (quoted) continue;
                    if (!depth && (c == ',' || c == '}' || c == ']')) break;
                    depth += (c == '{' || c == '[') - (c == '}' || c == ']');
                }
                append(&changed, s.s + end, s.n - end);
                free(s.s);
                s = changed;
            } else if (random_below(2)) {
                s.s[at] = (char)random_below(256);
            } else {
                memmove(s.s + at, s.s + at + size, s.n - at - size);
                s.n -= size;
            }
            if (!s.n) break;
        }
        render_anything(tok, s.s, s.n, &n_rendered);
        free(s.s);
    }
    CHECK(n_rendered > rounds / 10, "only %d of %d changed requests could be rendered", n_rendered, 2 * rounds);
    free(t.s);
}

/* ---- The program ------------------------------------------------------------------------------------------------------- */

#ifndef _WIN32
static void check_program(const char *gemma4, const char *arguments, const char *request, int status, const char *out, const char *message) {
    char line[1024];
    put_file("in", request, strlen(request));
    snprintf(line, sizeof line, "'%s' template %s < '%s' > '%s' 2> '%s'", gemma4, arguments, in_dir("in"), in_dir("out"), in_dir("err"));
    int got = system(line);
    string o = read_file(in_dir("out")), e = read_file(in_dir("err"));
    CHECK(got == status << 8 && !strcmp(o.s, out), "%s: status %d, \"%s\"", line, got >> 8, o.s);
    CHECK(*message ? strstr(e.s, message) != NULL : !e.n, "%s: \"%s\", expected \"%s\"", line, e.s, message);
    CHECK(status == 0 || (!strncmp(e.s, "gemma4: ", 8) && count(e.s, "\n") == 1), "%s: \"%s\"", line, e.s);
    free(o.s);
    free(e.s);
}

static void test_program(const char *gemma4) {
    static const char hello[] = CHAT(USER("Hello"));
    static const char small[] = "<bos><|turn>user\nHello<turn|>\n<|turn>model\n", large[] = "<bos><|turn>user\nHello<turn|>\n<|turn>model\n<|channel>thought\n<channel|>";
    check_program(gemma4, "--family small", hello, 0, small, "");
    check_program(gemma4, "--family=large", hello, 0, large, "");
    check_program(gemma4, "/nowhere --family small", hello, 0, small, ""); /* no model is opened */
    check_program(gemma4, "test/fixtures/e2b", hello, 0, small, "has no chat template; Google's for the small");
    check_program(gemma4, "test/fixtures/31b -q", hello, 0, large, "");
    check_program(gemma4, "models/austen -q", "{\"messages\":[" USER("Hello") "]}", 0, "<bos><|turn>user\nHello<turn|>\n", "");
    check_program(gemma4, "--family small", CHAT("{\"role\":\"user\",\"content\":[{\"type\":\"image\"},{\"type\":\"x\"}]}"), 0,
                  "<bos><|turn>user\n<|image|><turn|>\n<|turn>model\n", "1 images");
    check_program(gemma4, "--family small", "", 2, "", "expected a value");
    check_program(gemma4, "--family small -q", "{\"messages\":", 2, "", "line 1 column");
    check_program(gemma4, "--family small", CHAT(USER("a") ",{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{\"name\":\"f\",\"arguments\":\"{}\"}}]}"), 2, "",
                  "messages[1].tool_calls[0].function.arguments: expected an object");
    check_program(gemma4, "--family medium", hello, 2, "", "--family: expected small or large");
    check_program(gemma4, "/nowhere", hello, 2, "", "/nowhere");
    check_program(gemma4, "--family small extra", hello, 2, "", "unexpected argument");
}
#endif

static void test_with(const g4_tokenizer *tok, int rounds) {
    test_ids(tok);
    test_answers(tok);
    test_random_answers(tok, rounds);
    test_there_and_back(tok, rounds);
}

int main(int argc, char **argv) {
    shipped = g4_tokenizer_open("models/austen", &err);
    if (!shipped) {
        CHECK(shipped != NULL, "%s", err.text);
        return test_done("test_chat");
    }
    if (argc == 3 && !strcmp(argv[1], "compare")) {
        compare_file(argv[2]);
        g4_tokenizer_close(shipped);
        return test_done("test_chat");
    }
    compare_file("test/chats.jsonl");
    compare_file("test/answers.jsonl");
    test_prompts();
    test_refusals();
    test_numbers();
    test_with(shipped, 300);
    test_hostile(shipped, 4000);
    g4_tokenizer_close(shipped);
    const char *real = getenv("G4_TOKENIZER_JSON");
    g4_tokenizer *tok;
    if (real && (tok = g4_tokenizer_open(real, &err))) {
        static const int32_t hello[] = {2, 105, 2364, 107, 9259, 106, 107, 105, 4368, 107};
        int32_t *ids = NULL;
        size_t n = 0;
        g4_chat_prompt p = rendered(CHAT(USER("Hello")), G4_CHAT_SMALL);
        CHECK(!g4_chat_encode(tok, &p, 0, &ids, &n, &err) && n == 10 && !memcmp(ids, hello, sizeof hello), "the ids of Hello, %zu", n);
        g4_free(ids);
        g4_chat_prompt_free(&p);
        test_with(tok, 100);
        g4_tokenizer_close(tok);
    } else {
        SKIP("the real vocabulary: %s", real ? err.text : "G4_TOKENIZER_JSON is not set");
    }
#ifdef _WIN32
    SKIP("templates of checkpoints and the program need a POSIX system");
#else
    if (!mkdtemp(dir)) {
        CHECK(0, "no directory in /tmp");
        return test_done("test_chat");
    }
    test_families();
    test_program(argc > 1 ? argv[1] : "./gemma4");
    char line[64];
    snprintf(line, sizeof line, "rm -rf '%s'", dir);
    CHECK(!system(line), "%s", line);
#endif
    return test_done("test_chat");
}
