/* test_json.c - the JSON reader: what it accepts, what it refuses and where it says so, and its numbers to the bit.
 *
 * Every text is parsed from a block of exactly its size, so that a sanitizer sees a read past the end. */
#include "gemma4.h"
#include "test.h"

#include <locale.h>

static g4_error err;

static int parse_n(g4_json *j, const char *text, size_t n) {
    char *copy = malloc(n ? n : 1);
    if (!copy) exit(2);
    memcpy(copy, text, n);
    err.text[0] = 0;
    int failed = g4_json_parse(j, copy, n, "T", &err);
    free(copy);
    return failed;
}

static int parse(g4_json *j, const char *text) { return parse_n(j, text, strlen(text)); }

/* Writes the tree in one fixed form, strings with their bytes counted: two trees are equal iff these are. */
static void dump(const g4_json *j, uint32_t root, char *out, size_t room) {
    uint32_t stack[80], depth = 0;
    size_t n = 0;
#define PUT(...) n += (size_t)snprintf(out + n, n < room ? room - n : 0, __VA_ARGS__)
    out[0] = 0;
    for (uint32_t node = root;;) {
        const g4_json_node *x = &j->nodes[node];
        if (depth && j->nodes[stack[depth - 1]].kind == G4_JSON_OBJECT) PUT("%u'%s':", (unsigned)x->key_size, j->text + x->key);
        if (x->kind == G4_JSON_STRING) PUT("%u\"%s\"", (unsigned)x->size, g4_json_string(j, node));
        else if (x->kind == G4_JSON_NUMBER) PUT("#%s", g4_json_string(j, node));
        else if (x->kind == G4_JSON_ARRAY) PUT("[%u ", (unsigned)x->size);
        else if (x->kind == G4_JSON_OBJECT) PUT("{%u ", (unsigned)x->size);
        else PUT("%s", x->kind == G4_JSON_NULL ? "null" : x->kind == G4_JSON_TRUE ? "true" : "false");
        if ((x->kind == G4_JSON_ARRAY || x->kind == G4_JSON_OBJECT) && x->first) {
            stack[depth++] = node;
            node = x->first;
            continue;
        }
        if (x->kind == G4_JSON_ARRAY || x->kind == G4_JSON_OBJECT) PUT("]");
        while (depth && !j->nodes[node].next) {
            node = stack[--depth];
            PUT("]");
        }
        if (!depth) return;
        PUT(",");
        node = j->nodes[node].next;
    }
#undef PUT
}

static void accepts(const char *text, const char *tree) {
    g4_json j;
    char got[4096];
    int failed = parse(&j, text);
    CHECK(!failed, "%s: %s", text, err.text);
    if (failed) return;
    dump(&j, 0, got, sizeof got);
    CHECK(!strcmp(got, tree), "%s: expected %s, found %s", text, tree, got);
    g4_json_free(&j);
}

/* `says`: parts of the message, separated by '|'. */
static void refuses_n(const char *text, size_t n, const char *says) {
    g4_json j;
    int failed = parse_n(&j, text, n);
    CHECK(failed, "%.60s: is accepted", text);
    if (!failed) {
        g4_json_free(&j);
        return;
    }
    CHECK(!j.nodes && !j.text, "%.60s: something is left after a failure", text);
    CHECK(!strchr(err.text, '\n'), "a message of two lines: %s", err.text);
    for (const char *part = says; *part;) {
        char want[128];
        size_t m = strcspn(part, "|");
        snprintf(want, sizeof want, "%.*s", (int)m, part);
        CHECK(strstr(err.text, want), "%.60s: expected '%s' in: %s", text, want, err.text);
        part += m + (part[m] == '|');
    }
}

static void refuses(const char *text, const char *says) { refuses_n(text, strlen(text), says); }

static void structure(void) {
    accepts("null", "null");
    accepts(" \t\r\n true \n", "true");
    accepts("false", "false");
    accepts("0", "#0");
    accepts("-12.5e+3", "#-12.5e+3");
    accepts("\"\"", "0\"\"");
    accepts("[]", "[0 ]");
    accepts("{}", "{0 ]");
    accepts("[ ]", "[0 ]");
    accepts("[[],{},[[]]]", "[3 [0 ],{0 ],[1 [0 ]]]");
    accepts("[1,[2,3],\"x\",{\"a\":null}]", "[4 #1,[2 #2,#3],1\"x\",{1 1'a':null]]");
    accepts("{\"a\":{\"b\":[1]},\"c\":2, \"\" : 3}", "{3 1'a':{1 1'b':[1 #1]],1'c':#2,0'':#3]");
    accepts("{\"a\":1,\"A\":2,\"aa\":3,\"\\u0000\":4,\"\":5}", "{5 1'a':#1,1'A':#2,2'aa':#3,1'':#4,0'':#5]");

    refuses("", "T: line 1 column 1|a value|the end of the text");
    refuses("   ", "line 1 column 4|a value|the end of the text");
    refuses("[1,]", "line 1 column 4|a value|']'");
    refuses("[,1]", "line 1 column 2|a value|','");
    refuses("[1 2]", "line 1 column 4|',' or ']'|'2'");
    refuses("[1", "line 1 column 3|',' or ']'|the end of the text");
    refuses("[1}", "line 1 column 3|',' or ']'|'}'");
    refuses("{\"a\":1]", "',' or '}'|']'");
    refuses("{\"a\" 1}", "line 1 column 6|':'|'1'");
    refuses("{\"a\":}", "line 1 column 6|a value|'}'");
    refuses("{a:1}", "line 1 column 2|a key in double quotes|'a'");
    refuses("{\"a\":1,}", "line 1 column 8|a key in double quotes|'}'");
    refuses("{1:2}", "a key in double quotes");
    refuses("{", "a key in double quotes|the end of the text");
    refuses("1 2", "line 1 column 3|nothing after the value|'2'");
    refuses("{}}", "line 1 column 3|nothing after the value|'}'");
    refuses("[1,\n 2,\n  oops]", "line 3 column 3|a value|'o'");
    refuses("[\"h\xc3\xa9\", x]", "line 1 column 8|'x'"); /* characters, not bytes */
    refuses("nul", "a value");
    refuses("nulls", "nothing after the value|'s'");
    refuses("True", "a value|'T'");
    refuses("NaN", "a value|'N'");
    refuses("Infinity", "a value");
    refuses("-Infinity", "a digit|'I'");
    refuses("'a'", "a value|'''");
    refuses("// x\n1", "a value|'/'");
    refuses("[1] /* x */", "nothing after the value|'/'");
    refuses("\xef\xbb\xbf{}", "byte order mark");
    refuses_n("1\0", 2, "nothing after the value|byte 0x00");
    refuses_n("[1\0]", 4, "byte 0x00");
}

static void strings(void) {
    accepts("\"\\\"\\\\\\/\\b\\f\\n\\r\\t\"", "8\"\"\\/\b\f\n\r\t\"");
    accepts("\"\\u0041\\u00e9\\u20ac\\ud83d\\ude00\\uD834\\uDD1E\"", "14\"A\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\xf0\x9d\x84\x9e\"");
    accepts("\"\\ud7ff\\ue000\\uffff\\udbff\\udfff\"", "13\"\xed\x9f\xbf\xee\x80\x80\xef\xbf\xbf\xf4\x8f\xbf\xbf\"");
    accepts("\"h\xc3\xa9 \xe2\x96\x81 \xf0\x9f\x98\x80 \x7f\"", "14\"h\xc3\xa9 \xe2\x96\x81 \xf0\x9f\x98\x80 \x7f\"");
    accepts("\"\xc2\x80\xdf\xbf\xe0\xa0\x80\xed\x9f\xbf\xee\x80\x80\xf0\x90\x80\x80\xf4\x8f\xbf\xbf\"",
            "21\"\xc2\x80\xdf\xbf\xe0\xa0\x80\xed\x9f\xbf\xee\x80\x80\xf0\x90\x80\x80\xf4\x8f\xbf\xbf\"");
    accepts("\"\\u0000\"", "1\"\"");

    static const char *const bad[] = {
        "\x80",
        "\xbf",
        "\xc0\x80",
        "\xc1\xbf",
        "\xc2",
        "\xc3(",
        "\xe0\x9f\xbf",
        "\xe0\x80\x80",
        "\xe2\x82",
        "\xe2\x28\xa1",
        "\xe2\x82(",
        "\xed\xa0\x80",
        "\xed\xbf\xbf",
        "\xf0\x8f\xbf\xbf",
        "\xf0\x9f\x98",
        "\xf0\x28\x8c\xbc",
        "\xf4\x90\x80\x80",
        "\xf5\x80\x80\x80",
        "\xf8\x88\x80\x80\x80",
        "\xfe",
        "\xff",
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        char text[64], key[64];
        snprintf(text, sizeof text, "[1,\"ab%s\"]", bad[i]);
        refuses(text, "line 1 column 7|valid UTF-8|byte 0x");
        snprintf(text, sizeof text, "[1,\"ab%s", bad[i]);
        refuses(text, "valid UTF-8");
        snprintf(key, sizeof key, "{\"%s\":1}", bad[i]);
        refuses(key, "valid UTF-8");
    }
    refuses("\"abc", "line 1 column 5|the closing quote|the end of the text");
    refuses("\"a\nb\"", "line 1 column 3|control character|byte 0x0a");
    refuses("\"a\tb\"", "control character|byte 0x09");
    refuses_n("\"a\0b\"", 5, "control character|byte 0x00");
    refuses("\"\\x41\"", "after a backslash|'x'");
    refuses("\"\\", "after a backslash|the end of the text");
    refuses_n("\"\\\0\"", 4, "after a backslash|byte 0x00");
    refuses("\"\\u12", "four hex digits");
    refuses("\"\\u12g4\"", "four hex digits");
    refuses("\"\\u+123\"", "four hex digits");
    refuses("\"\\ud800\"", "surrogate pair");
    refuses("\"\\ud800x\"", "surrogate pair");
    refuses("\"\\ud800\\n\"", "surrogate pair");
    refuses("\"\\ud800\\u0041\"", "surrogate pair");
    refuses("\"\\ud800\\ud800\"", "surrogate pair");
    refuses("\"\\udc00\"", "surrogate pair");
    refuses("\"\\udc00\\ud800\"", "surrogate pair");
    refuses("\"\\udc00\\udc00\"", "surrogate pair");
    refuses("\"\\udfff\\udfff\"", "surrogate pair");
    refuses("\"\\ud800\\udc", "surrogate pair");
}

static void nesting(void) {
    char *deep = malloc(200001);
    if (!deep) exit(2);
    g4_json j;
    /* found by fuzzing: a text that ends with everything open has more values than half of its bytes */
    for (int before = 0; before < 70; before++)
        for (int depth = 1; depth <= 64; depth++) {
            deep[0] = 0;
            for (int i = 0; i < before; i++) strcat(deep, i ? ",0" : "[0");
            if (before) strcat(deep, ",");
            for (int i = before > 0; i < depth; i++) strcat(deep, "[");
            refuses(deep, "expected");
        }
    for (int open = 0; open < 2; open++) {
        const char *one = open ? "{\"a\":" : "[";
        for (int depth = 64; depth <= 65; depth++) {
            deep[0] = 0;
            for (int i = 0; i < depth; i++) strcat(deep, one);
            if (open) strcat(deep, "0");
            for (int i = 0; i < depth; i++) strcat(deep, open ? "}" : "]");
            if (depth == 65) refuses(deep, "64 others");
            else {
                int failed = parse(&j, deep);
                CHECK(!failed, "%d deep: %s", depth, err.text);
                g4_json_free(&j);
            }
        }
    }
    memset(deep, '[', 200000);
    refuses_n(deep, 200000, "64 others|column 65");
    for (int i = 0; i < 40000; i++) memcpy(deep + 5 * i, "{\"a\":", 5);
    refuses_n(deep, 200000, "64 others");
    free(deep);
}

static void duplicates(void) {
    refuses("{\"a\":1,\"a\":1}", "line 1 column 1|\"a\" is there twice");
    refuses("{\"a\":1,\"b\":{\"x\":1,\"y\":2,\n\"x\":3}}", "line 1 column 12|\"x\" is there twice");
    refuses("{\"\":1,\"\":2}", "\"\" is there twice");
    refuses("{\"a\":1,\"\\u0061\":2}", "\"a\" is there twice");
    refuses("{\"a\\nb\":1,\"a\\nb\":2}", "\"a?b\" is there twice");

    /* Many members: among them none twice, then one, in whatever places. */
    size_t room = 1 << 20;
    char *text = malloc(room);
    if (!text) exit(2);
    static const int counts[] = {8, 9, 10, 33, 1000, 20000}, twins[][2] = {{-1, -1}, {0, 1}, {0, 7}, {3, 7}, {1, -2}, {-3, -2}};
    for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
        for (size_t t = 0; t < sizeof twins / sizeof twins[0]; t++) {
            int a = twins[t][0] < -1 ? counts[c] + twins[t][0] + 1 : twins[t][0],
                b = twins[t][1] < -1 ? counts[c] + twins[t][1] + 1 : twins[t][1];
            size_t n = 0;
            for (int i = 0; i < counts[c]; i++)
                n += (size_t)snprintf(text + n, room - n, "%s\"key %d\":%d", i ? "," : "{", i == b && b >= 0 ? a : i, i);
            n += (size_t)snprintf(text + n, room - n, "}");
            g4_json j;
            if (b >= 0) {
                char says[64];
                snprintf(says, sizeof says, "\"key %d\" is there twice", a);
                refuses_n(text, n, says);
            } else {
                int failed = parse_n(&j, text, n);
                CHECK(!failed && (int)j.nodes[0].size == counts[c], "%d members: %s", counts[c], err.text);
                uint32_t last = g4_json_get(&j, 0, "key 7");
                int64_t value = -1;
                CHECK(last && !g4_json_int(&j, last, &value) && value == 7, "key 7 is %lld", (long long)value);
                CHECK(!g4_json_get(&j, 0, "key") && !g4_json_get(&j, 0, "key 77777"), "a key that is not there is found");
                g4_json_free(&j);
            }
        }
    }

    /* Keys of 16 bytes that the reader's hash throws together: it must notice, and still tell equal from different ones. */
    for (int twice = 0; twice < 2; twice++) {
        const uint64_t k = 0x9e3779b97f4a7c15u;
        uint64_t seed = 1;
        size_t n = 0;
        int found = 0;
        while (found < 2000) {
            char key[17] = {0};
            for (int i = 0; i < 8; i++) {
                seed = seed * 6364136223846793005u + 1442695040888963407u;
                key[i] = (char)('a' + (seed >> 59) % 26);
            }
            uint64_t w;
            memcpy(&w, key, 8);
            w = (16 ^ w) * k;
            w ^= w >> 32;
            w ^= 0x6161616161616161u; /* the second word that gives one sum for all */
            memcpy(key + 8, &w, 8);
            int fine = 1;
            for (int i = 8; i < 16; i++) fine &= (unsigned char)key[i] >= 0x20 && (unsigned char)key[i] < 0x7f && key[i] != '"' && key[i] != '\\';
            if (!fine) continue;
            n += (size_t)snprintf(text + n, room - n, "%s\"%s\":0", found ? "," : "{", key);
            if (twice && found == 1500) n += (size_t)snprintf(text + n, room - n, ",\"%s\":1", key);
            found++;
        }
        n += (size_t)snprintf(text + n, room - n, "}");
        g4_json j;
        if (twice) {
            refuses_n(text, n, "is there twice");
        } else {
            int failed = parse_n(&j, text, n);
            CHECK(!failed && j.nodes[0].size == 2000, "2000 colliding keys: %s", err.text);
            g4_json_free(&j);
        }
    }
    free(text);
}

static void numbers(void) {
    static const char *const bad[] = {"-",   "+1",  ".5",   "1.",    "1.e5", "01",    "-01", "00",    "1e",
                                      "1e+", "1E-", "0x10", "1_000", "1,5",  "1e5.5", "--1", "1e400x"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) refuses(bad[i], "T: line 1 column");

    static const struct {
        const char *text;
        int fits;
        int64_t value;
    } ints[] = {
        {"0", 1, 0},
        {"-0", 1, 0},
        {"-0.0e5", 1, 0},
        {"7", 1, 7},
        {"-7", 1, -7},
        {"1e3", 1, 1000},
        {"1.5e1", 1, 15},
        {"1500e-2", 1, 15},
        {"1.5", 0, 0},
        {"1e-1", 0, 0},
        {"15e-1", 0, 0},
        {"2.0", 1, 2},
        {"9223372036854775807", 1, INT64_MAX},
        {"9223372036854775808", 0, 0},
        {"-9223372036854775808", 1, INT64_MIN},
        {"-9223372036854775809", 0, 0},
        {"18446744073709551616", 0, 0},
        {"1e18", 1, 1000000000000000000},
        {"1e19", 0, 0},
        {"1e99999999999999999999", 0, 0},
        {"0e99999999999999999999", 1, 0},
        {"0.000e-99999999999999999999", 1, 0},
        {"1e-99999999999999999999", 0, 0},
        {"100000000000000000000000000000e-28", 1, 10},
        {"0.00000000000000000001e20", 1, 1},
    };
    for (size_t i = 0; i < sizeof ints / sizeof ints[0]; i++) {
        g4_json j;
        int64_t value = 123;
        if (parse(&j, ints[i].text)) {
            CHECK(0, "%s: %s", ints[i].text, err.text);
            continue;
        }
        int failed = g4_json_int(&j, 0, &value);
        CHECK(failed == (ints[i].fits ? 0 : -1) && value == (ints[i].fits ? ints[i].value : 123), "%s: %d, %lld", ints[i].text, failed,
              (long long)value);
        g4_json_free(&j);
    }

    /* The right column is the compiler's reading, written in binary where the decimal one is a tie or nearly one. */
    static const struct {
        const char *text;
        double value;
    } doubles[] = {
        {"0", 0.0},
        {"-0", -0.0},
        {"0e999999999999", 0.0},
        {"1", 1.0},
        {"-1", -1.0},
        {"0.1", 0.1},
        {"1e-6", 1e-6},
        {"0.95", 0.95},
        {"30.0", 30.0},
        {"1000000.0", 1e6},
        {"3.141592653589793238462643383279", 3.141592653589793},
        {"1e22", 1e22},
        {"1e23", 1e23},
        {"8.5e22", 8.5e22},
        {"123456789012345678901234567890", 123456789012345678901234567890.0},
        {"9007199254740993", 0x1p53}, /* 2^53 + 1, a tie: to even */
        {"9007199254740995", 0x1.0000000000002p53},
        {"9007199254740993.00000000000000000000000000000000000001", 0x1.0000000000001p53},
        {"1.7976931348623157e308", 0x1.fffffffffffffp1023},
        {"1.7976931348623158e308", 0x1.fffffffffffffp1023},
        {"2.2250738585072014e-308", 0x1p-1022},
        {"2.2250738585072011e-308", 0x0.fffffffffffffp-1022},
        {"4.9406564584124654e-324", 0x1p-1074},
        {"2.4703282292062328e-324", 0x1p-1074},
        {"2.4703282292062327e-324", 0.0},
        {"1e-400", 0.0},
        {"-1e-400", -0.0},
        {"1e-99999999999999999999", 0.0},
        {"7.4109846876186981626e-324", 0x1p-1074},
        {"7.4109846876186982e-324", 0x1p-1073},                                             /* beside 1.5 of the least step */
        {"0.500000000000000166533453693773481063544750213623046875", 0x1.0000000000002p-1}, /* 1/2 + 1.5 steps: to even */
        {"0.500000000000000055511151231257827021181583404541015625", 0x1p-1},               /* 1/2 + half a step: to even */
        {"0.5000000000000000555111512312578270211815834045410156250000000000000000000000000000001", 0x1.0000000000001p-1},
    };
    for (int german = 0; german < 2; german++) {
        if (german && !setlocale(LC_NUMERIC, "de_DE.UTF-8") && !setlocale(LC_NUMERIC, "de_DE")) {
            SKIP("numbers under a locale with a decimal comma: de_DE is not installed");
            break;
        }
        for (size_t i = 0; i < sizeof doubles / sizeof doubles[0]; i++) {
            g4_json j;
            double value = 123;
            if (parse(&j, doubles[i].text)) {
                CHECK(0, "%s: %s", doubles[i].text, err.text);
                continue;
            }
            int failed = g4_json_double(&j, 0, &value);
            CHECK(!failed && !memcmp(&value, &doubles[i].value, sizeof value), "%s: expected %a, found %a", doubles[i].text, doubles[i].value,
                  value);
            g4_json_free(&j);
        }
    }
    setlocale(LC_NUMERIC, "C");

    static const char *const too_large[] = {"1e309", "-1e309", "1.7976931348623159e308", "1e99999999999999999999", "17976931348623159e292"};
    for (size_t i = 0; i < sizeof too_large / sizeof too_large[0]; i++) {
        g4_json j;
        double value = 123;
        if (parse(&j, too_large[i])) {
            CHECK(0, "%s: %s", too_large[i], err.text);
            continue;
        }
        CHECK(g4_json_double(&j, 0, &value) == -1 && value == 123, "%s: %a", too_large[i], value);
        g4_json_free(&j);
    }

    /* A tie of 400 digits, and the same with one more digit far behind: only the second one rounds up. */
    char *text = malloc(5000);
    if (!text) exit(2);
    for (int more = 0; more < 2; more++) {
        g4_json j;
        double value = 0;
        strcpy(text, "9007199254740993");
        strcat(text, ".");
        for (int i = 0; i < 3000; i++) strcat(text, "0");
        strcat(text, more ? "1" : "0");
        int failed = parse(&j, text) || g4_json_double(&j, 0, &value);
        CHECK(!failed && value == (more ? 0x1.0000000000001p53 : 0x1p53), "a tie and %d: %a", more, value);
        g4_json_free(&j);
    }
    free(text);

    g4_json j;
    int64_t i = 5;
    double d = 5;
    if (!parse(&j, "[\"1\",null,true,[],{}]")) {
        for (uint32_t node = 0; node < j.n_nodes + 2; node++)
            CHECK(g4_json_int(&j, node, &i) == -1 && g4_json_double(&j, node, &d) == -1 && !g4_json_get(&j, node, "1"),
                  "node %u is taken for a number", (unsigned)node);
        g4_json_free(&j);
    }
}

/* Whatever the bytes are: an answer, and no read or write outside. Each prefix of the text is refused; random changes may be either. */
static void mutations(void) {
    static const char text[] = "{\"a\": [1, -2.5e-3, true, null, \"x\\n\\u00e9\\ud83d\\ude00\"], \"b\xc3\xa9\": {\"c\": {}, \"d\": [], \"e\": "
                               "[[[\"deep\"]]]}, \"f\": false}";
    size_t n = sizeof text - 1;
    char changed[sizeof text];
    uint64_t seed = 7;
    int accepted = 0, refused = 0;
    for (size_t i = 0; i < n; i++) refuses_n(text, i, "T: line 1 column");
    for (int round = 0; round < 30000; round++) {
        g4_json j;
        memcpy(changed, text, n);
        for (int k = 0; k < 1 + round % 3; k++) {
            seed = seed * 6364136223846793005u + 1442695040888963407u;
            changed[(seed >> 33) % n] = round % 2 ? (char)(seed >> 20) : "{}[]\",:\\u0e1-.9 \n"[(seed >> 20) % 17];
        }
        if (parse_n(&j, changed, n)) {
            refused++;
        } else {
            char out[4096];
            accepted++;
            dump(&j, 0, out, sizeof out);
            g4_json_free(&j);
        }
    }
    CHECK(accepted > 1000 && refused > 1000, "%d accepted, %d refused", accepted, refused);
    CHECK(g4_json_parse(&(g4_json){0}, "[", 1, "T", NULL) == -1, "a failure without an error to fill");
}

int main(void) {
    structure();
    strings();
    nesting();
    duplicates();
    numbers();
    mutations();
    return test_done("json");
}
