/* test_checkpoint.c - from files to a g4_model: files, safetensors, config.json, generation_config.json, the names of tensors.
 *
 * The program writes tiny checkpoints of its own into a folder beside itself, whole ones and broken ones. What the fields of a model are
 * called in a file stands here a second time, in `fields`; the bytes of each tensor depend on its name, so a field bound to another's
 * data is seen. With SHARED set, the checkpoints that transformers wrote are opened too. */
#if !defined(_WIN32)
#define _FILE_OFFSET_BITS 64
#endif
#include "gemma4.h"
#include "test.h"

#include <errno.h>
#include <sys/stat.h>
#if defined(_WIN32)
#include <direct.h>
#define make_directory(path) _mkdir(path)
#else
#include <signal.h>
#include <unistd.h>
#define make_directory(path) mkdir(path, 0777)
#endif


static char dir[600];         /* where the files go */
static g4_error err;
static char warnings[8192];   /* of the last opening, a line each */
static int n_warnings;

static void on_warning(void *user, const char *text) {
    (void)user;
    size_t n = strlen(warnings);
    snprintf(warnings + n, sizeof warnings - n, "%s\n", text);
    n_warnings++;
}

static g4_options options = {.warn = on_warning};

static const char *in_dir(const char *name) {
    static char path[4][800];
    static int turn;
    turn = (turn + 1) % 4;
    snprintf(path[turn], sizeof path[turn], "%s/%s", dir, name);
    return path[turn];
}

/* A line made as printf does; good until the eighth call after this one. */
static const char *line(const char *format, ...) {
    static char text[8][400];
    static int turn;
    va_list args;
    turn = (turn + 1) % 8;
    va_start(args, format);
    vsnprintf(text[turn], sizeof text[turn], format, args);
    va_end(args);
    return text[turn];
}

/* Adds to a text in a block of room bytes. */
static void append(char *text, size_t room, const char *format, ...) {
    size_t n = strlen(text);
    va_list args;
    va_start(args, format);
    if (vsnprintf(text + n, room - n, format, args) >= (int)(room - n)) exit(2);
    va_end(args);
}

static void write_file(const char *name, const void *data, size_t n) {
    FILE *f = fopen(in_dir(name), "wb");
    if (!f || fwrite(data, 1, n, f) != n || fclose(f)) {
        printf("cannot write %s: %s\n", in_dir(name), strerror(errno));
        exit(2);
    }
}

static void write_text(const char *name, const char *text) { write_file(name, text, strlen(text)); }

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

/* ---- files ---- */

static void files(void) {
    g4_file f;
    write_text("five", "12345");
    write_text("empty", "");
    for (int no_mmap = 0; no_mmap < 2; no_mmap++) {
        int failed = g4_file_open(&f, in_dir("five"), no_mmap, &err);
        CHECK(!failed && f.size == 5 && !memcmp(f.data, "12345", 5) && f.mapped <= !no_mmap, "five bytes, no_mmap %d: %s", no_mmap,
              failed ? err.text : "other data");
        g4_file_close(&f);
        failed = g4_file_open(&f, in_dir("empty"), no_mmap, &err);
        CHECK(!failed && f.size == 0 && f.data, "an empty file, no_mmap %d: %s", no_mmap, failed ? err.text : "no data pointer");
        g4_file_close(&f);
        g4_file_close(&f); /* twice is fine */
        says(g4_file_open(&f, in_dir("none"), no_mmap, &err), "missing", "none: cannot open: ");
        CHECK(!f.data, "data after a failure");
        says(g4_file_open(&f, dir, no_mmap, &err), "directory", "is a directory; expected a file");
        says(g4_file_open(&f, "no\nsuch\x1b\x7f", no_mmap, &err), "a name of two lines", "no?such??: cannot open: ");
    }
#if !defined(_WIN32)
    says(g4_file_open(&f, in_dir("none"), 0, &err), "missing", strerror(ENOENT));
    says(g4_file_open(&f, in_dir("five/six"), 0, &err), "a file as a directory", strerror(ENOTDIR));
    if (mkfifo(in_dir("fifo"), 0666) && errno != EEXIST) {
        SKIP("a FIFO: %s", strerror(errno));
    } else {
        alarm(300); /* an open that waits for a writer ends the program here */
        says(g4_file_open(&f, in_dir("fifo"), 0, &err), "FIFO", "fifo: not a regular file");
        alarm(0);
        remove(in_dir("fifo"));
    }
    says(g4_file_open(&f, "/dev/null", 0, &err), "device", "/dev/null: not a regular file");
    write_text("secret", "x");
    chmod(in_dir("secret"), 0);
    FILE *readable = fopen(in_dir("secret"), "rb");
    if (readable) { /* root reads everything */
        fclose(readable);
        SKIP("a file without read permission: this user may read everything");
    } else {
        says(g4_file_open(&f, in_dir("secret"), 0, &err), "no permission", strerror(EACCES));
    }
    remove(in_dir("secret"));
#endif
}

/* ---- safetensors ---- */

/* Writes a file of header length, header and n bytes of data (their values 0, 1, 2, ...). */
static void write_st_n(const char *name, uint64_t length, const char *header, size_t header_size, size_t n) {
    unsigned char *all = malloc(8 + header_size + n + 1);
    if (!all) exit(2);
    for (int i = 0; i < 8; i++) all[i] = (unsigned char)(length >> 8 * i);
    memcpy(all + 8, header, header_size);
    for (size_t i = 0; i < n; i++) all[8 + header_size + i] = (unsigned char)i;
    write_file(name, all, 8 + header_size + n);
    free(all);
}

static void write_st(const char *name, const char *header, size_t n) { write_st_n(name, strlen(header), header, strlen(header), n); }

static void refuses_st(const char *header, size_t n, const char *parts) {
    g4_safetensors st;
    write_st("bad.safetensors", header, n);
    int failed = g4_safetensors_open(&st, in_dir("bad.safetensors"), 0, &err);
    says(failed, header, "bad.safetensors");
    says(failed, header, parts);
    if (!failed) g4_safetensors_close(&st);
    else CHECK(!st.tensors && !st.n && !st.names && !st.file.data, "something is left after a failure");
}

static void accepts_st(const char *header, size_t n, int tensors) {
    g4_safetensors st;
    write_st("good.safetensors", header, n);
    int failed = g4_safetensors_open(&st, in_dir("good.safetensors"), 0, &err);
    CHECK(!failed && st.n == tensors, "%s: %s", header, failed ? err.text : "another number of tensors");
    if (!failed) g4_safetensors_close(&st);
}

static void safetensors(void) {
    g4_safetensors st;
    for (int no_mmap = 0; no_mmap < 2; no_mmap++) {
        write_st("a.safetensors",
                 "{\"__metadata__\":{\"format\":\"pt\",\"\":\"\"},\"z\":{\"dtype\":\"BF16\",\"shape\":[2,3],\"data_offsets\":[4,16]},"
                 "\"a.b\":{\"data_offsets\":[0,4],\"dtype\":\"F32\",\"shape\":[]},\"none\":{\"dtype\":\"I64\",\"shape\":[3,0,5],\"data_"
                 "offsets\":[4,4]},"
                 "\"u\\u00e9\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1],\"data_offsets\":[16,17]}}  \n",
                 17);
        int failed = g4_safetensors_open(&st, in_dir("a.safetensors"), no_mmap, &err);
        CHECK(!failed, "a good file: %s", err.text);
        if (failed) continue;
        CHECK(st.n == 4 && !strcmp(st.tensors[0].name, "z") && !strcmp(st.tensors[3].name, "u\xc3\xa9"),
              "%d tensors, in the order of the header", st.n);
        const g4_st_tensor *t = g4_safetensors_find(&st, "z");
        CHECK(t == &st.tensors[0] && t->rank == 2 && t->shape[0] == 2 && t->shape[1] == 3 && !strcmp(t->dtype, "BF16") && t->bytes == 12 &&
                  t->data[0] == 4,
              "z");
        t = g4_safetensors_find(&st, "a.b");
        CHECK(t && t->rank == 0 && t->bytes == 4 && t->data[0] == 0 && t->data[3] == 3, "a.b");
        t = g4_safetensors_find(&st, "none");
        CHECK(t && t->rank == 3 && t->shape[1] == 0 && t->bytes == 0, "none");
        t = g4_safetensors_find(&st, "u\xc3\xa9");
        CHECK(t && t->rank == 8 && t->bytes == 1 && t->data[0] == 16, "u");
        CHECK(!g4_safetensors_find(&st, "") && !g4_safetensors_find(&st, "zz") && !g4_safetensors_find(&st, "a"),
              "a tensor that is not there is found");
        g4_safetensors_close(&st);
    }
    accepts_st("{}", 0, 0);
    accepts_st("{\"__metadata__\":null}", 0, 0);
    accepts_st("{\"metadata\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1]},\"__metadata__\":{\"a\":\"b\"}}", 1, 1);
    accepts_st(
        "{\"a\":{\"dtype\":\"F4\",\"shape\":[2],\"data_offsets\":[0,1]},\"b\":{\"dtype\":\"F6_E2M3\",\"shape\":[4],\"data_offsets\":[1,4]}}", 4,
        2);
    accepts_st("{\"a\":{\"dtype\":\"F64\",\"shape\":[1],\"data_offsets\":[0,8],\"more\":[1]}}", 8, 1);
    accepts_st("{\"b\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}",
               1, 2);

    accepts_st("{\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]},\"b\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, 2);

    /* A name of any length is cut between two characters. */
    for (int n = 100; n < 130; n++) {
        char name[200] = "";
        for (int i = 0; i < n; i++) name[i] = 'n';
        strcpy(name + n, "\xf0\x9f\x98\x80\xf0\x9f\x98\x80");
        int cut = n > 120 ? 120 : n + 4 > 120 ? n : n + 8 > 120 ? n + 4 : n + 8;
        refuses_st(line("{\"%s\":1}", name), 0, line("tensor %.*s%s: expected an object", cut, name, n + 8 > 120 ? "..." : ""));
    }

    /* The length of the header. */
    static const struct {
        uint64_t length;
        const char *parts;
    } lengths[] = {
        {0, "does not begin with '{'"},
        {1, "header: line 1 column 2"},
        {3, "1 bytes are missing"},
        {4, "2 bytes are missing"},
        {100000000, "99999998 bytes are missing"},
        {100000001, "100000001 bytes; at most 100000000"},
        {UINT64_C(1) << 31, "2147483648 bytes; at most"},
        {UINT64_C(1) << 32, "4294967296 bytes; at most"},
        {UINT64_C(1) << 63, "9223372036854775808 bytes; at most"},
        {UINT64_MAX, "18446744073709551615 bytes; at most"},
        {UINT64_MAX - 7, "at most 100000000"},
        {UINT64_MAX - 8, "at most 100000000"},
    };
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        write_st_n("bad.safetensors", lengths[i].length, "{}", 2, 0);
        int failed = g4_safetensors_open(&st, in_dir("bad.safetensors"), 0, &err);
        says(failed, "header length", lengths[i].parts);
        if (!failed) g4_safetensors_close(&st);
    }
    for (size_t n = 0; n < 10; n++) { /* "2" as length, then "{}" */
        write_file("bad.safetensors", "\2\0\0\0\0\0\0\0{", n);
        says(g4_safetensors_open(&st, in_dir("bad.safetensors"), 0, &err), "a short file",
             n < 8    ? "begins with 8 bytes"
             : n == 8 ? "2 bytes are missing"
                      : "1 bytes are missing");
    }
    says(g4_safetensors_open(&st, dir, 0, &err), "directory", "is a directory");
    write_text("bad.safetensors", "<!DOCTYPE html><html>404</html>");
    says(g4_safetensors_open(&st, in_dir("bad.safetensors"), 0, &err), "a web page", "not a safetensors file?");

    /* The header's text. */
    refuses_st(" {}", 0, "does not begin with '{'");
    refuses_st("[]", 0, "does not begin with '{'");
    refuses_st("{\"a\":\"\xff\"}", 0, "header: line 1 column|UTF-8");
    refuses_st("{} x", 0, "header: line 1 column 4");
    char *deep = malloc(500001);
    if (!deep) exit(2);
    for (int i = 0; i < 100000; i++) memcpy(deep + 5 * i, "{\"a\":", 5);
    deep[500000] = 0;
    refuses_st(deep, 0, "64 others");
    free(deep);
    refuses_st("{\"__metadata__\":[]}", 0, "__metadata__: expected an object of strings");
    refuses_st("{\"__metadata__\":{\"a\":1}}", 0, "__metadata__");
    refuses_st("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]}}",
               2, "\"a\" is there twice");
    refuses_st("{\"a\\u0000b\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "NUL");
    refuses_st("{\"a\":1}", 0, "tensor a: expected an object");
    refuses_st("{\"a\":{}}", 0, "tensor a|dtype");
    refuses_st("{\"a\":{\"dtype\":\"U8\",\"shape\":[1]}}", 1, "data_offsets");
    refuses_st("{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,1]}}", 1, "shape");
    refuses_st("{\"a\":{\"dtype\":8,\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "dtype");
    refuses_st("{\"a\":{\"dtype\":\"F128\",\"shape\":[1],\"data_offsets\":[0,16]}}", 16, "tensor a: unknown dtype \"F128\"");
    refuses_st("{\"a\":{\"dtype\":\"U8\\u0000\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "unknown dtype");
    refuses_st("{\"a\":{\"dtype\":\"f32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "unknown dtype \"f32\"");

    /* Shapes and places. */
#define ONE(dtype, shape, offsets) "{\"a\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}}"
    refuses_st(ONE("F32", "[32,8]", "[0,65536]"), 65536, "tensor a: F32 [32,8] takes 1024 bytes|[0,65536] hold 65536");
    refuses_st(ONE("F64", "[4]", "[0,16]"), 16, "tensor a: F64 [4] takes 32 bytes");
    refuses_st(ONE("U8", "[4294967296,4294967296]", "[0,0]"), 0, "tensor a|larger than 2^63");
    refuses_st(ONE("U8", "[9223372036854775807,2]", "[0,0]"), 0, "larger than 2^63");
    refuses_st(ONE("F32", "[18446744073709551615]", "[0,4]"), 4, "dimension 0 of its shape is not a size");
    refuses_st(ONE("F32", "[99999999999999999999]", "[0,4]"), 4, "not a size");
    refuses_st(ONE("F32", "[1152921504606846976]", "[0,0]"), 0, "larger than 2^63");
    refuses_st(ONE("U8", "[-1]", "[0,1]"), 1, "not a size");
    refuses_st(ONE("U8", "[1.5]", "[0,1]"), 1, "not a size");
    refuses_st(ONE("U8", "[1.0]", "[0,1]"), 1, "not a size");
    refuses_st(ONE("U8", "[1e0]", "[0,1]"), 1, "not a size");
    refuses_st(ONE("U8", "[-0]", "[0,0]"), 0, "not a size");
    refuses_st(ONE("U8", "[2,\"1\"]", "[0,2]"), 2, "dimension 1 of its shape is not a size");
    refuses_st(ONE("U8", "[true]", "[0,1]"), 1, "not a size");
    refuses_st(ONE("U8", "1", "[0,1]"), 1, "shape");
    refuses_st(ONE("U8", "[1,1,1,1,1,1,1,1,1]", "[0,1]"), 1, "9 dimensions");
    refuses_st(ONE("F4", "[3]", "[0,2]"), 2, "tensor a: F4 [3] takes 2 bytes");
    refuses_st(ONE("F4", "[3]", "[0,1]"), 1, "tensor a: F4 [3] takes 2 bytes");
    refuses_st(ONE("U8", "[8]", "[8,0]"), 8, "begin <= end");
    refuses_st(ONE("U8", "[1]", "[0]"), 1, "data_offsets");
    refuses_st(ONE("U8", "[1]", "[0,1,1]"), 1, "data_offsets");
    refuses_st(ONE("U8", "[1]", "[0.0,1]"), 1, "data_offsets");
    refuses_st(ONE("U8", "[1]", "[-1,0]"), 1, "data_offsets");
    refuses_st(ONE("U8", "[1]", "{\"0\":0,\"1\":1}"), 1, "data_offsets");
    refuses_st(ONE("U8", "[1]", "[9223372036854775807,9223372036854775808]"), 1, "data_offsets");
    refuses_st(ONE("U8", "[1]", "[9223372036854775806,9223372036854775807]"), 1, "tensor a begins at byte 9223372036854775806|there is a gap");
    refuses_st(ONE("U8", "[4]", "[0,4]"), 3, "promises 4 bytes of data, the file holds 3: 1 bytes are missing");
    refuses_st(ONE("U8", "[4]", "[0,4]"), 0, "4 bytes are missing");
    refuses_st(ONE("U8", "[4]", "[0,4]"), 5, "1 bytes follow the data of the last tensor");
    refuses_st(ONE("U8", "[4]", "[1,5]"), 5, "tensor a begins at byte 1 of the data|ends at 0: there is a gap");
    refuses_st(ONE("U8", "[1099511627776]", "[0,1099511627776]"), 5, "1099511627771 bytes are missing");
#define TWO(o1, o2)                                                                                                                            \
    "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":" o1 "},\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":" o2 "}}"
    accepts_st(TWO("[4,8]", "[0,4]"), 8, 2);
    refuses_st(TWO("[0,4]", "[3,7]"), 7, "tensor b begins at byte 3|ends at 4: they overlap");
    refuses_st(TWO("[0,4]", "[0,4]"), 4, "they overlap");
    refuses_st(TWO("[0,4]", "[5,9]"), 9, "tensor b begins at byte 5|there is a gap");
    refuses_st("{}", 1, "1 bytes follow");
#undef ONE
#undef TWO
#if defined(_WIN32)
#define SEEK64(f, at) _fseeki64(f, at, SEEK_SET)
#else
#define SEEK64(f, at) fseeko(f, (off_t)(at), SEEK_SET)
#endif
#if defined(_WIN32) || defined(__linux__)
    /* More than 4 GiB, as a file with a hole: nothing may be counted in 32 bits. */
    static const char big[] = "{\"a\":{\"dtype\":\"U8\",\"shape\":[5000000000],\"data_offsets\":[0,5000000000]},\"z\":{\"dtype\":\"U8\","
                              "\"shape\":[3],\"data_offsets\":[5000000000,5000000003]}}";
    write_st("big.safetensors", big, 0);
    FILE *f = fopen(in_dir("big.safetensors"), "r+b");
    int made = sizeof(size_t) == 8 && f && !SEEK64(f, 8 + (int64_t)sizeof big - 1 + 5000000000) && fwrite("end", 1, 3, f) == 3;
    if (f) made = !fclose(f) && made;
    int failed = made && g4_safetensors_open(&st, in_dir("big.safetensors"), 0, &err);
    if (!made) {
        SKIP("a file of 5 GB: it cannot be made here");
    } else if (failed && strstr(err.text, "memory")) {
        SKIP("a file of 5 GB: %s", err.text);
    } else {
        CHECK(!failed && st.tensors[0].bytes == 5000000000 && !memcmp(st.tensors[1].data, "end", 3), "5 GB: %s",
              failed ? err.text : "other data");
        if (!failed) g4_safetensors_close(&st);
    }
    remove(in_dir("big.safetensors"));
#endif
}

/* ---- config.json ---- */

/* A config as members in order; an entry without value is left out. */
typedef struct pair {
    const char *key, *value;
} pair;

enum { MAX_PAIRS = 40 };

/* Four layers (sliding, full, sliding, full), of which the last two share K/V and are twice as wide; per-layer inputs. */
static const pair small[MAX_PAIRS] = {
    {"model_type", "\"gemma4_text\""},
    {"vocab_size", "10"},
    {"vocab_size_per_layer_input", "9"},
    {"hidden_size", "8"},
    {"intermediate_size", "6"},
    {"num_hidden_layers", "4"},
    {"num_attention_heads", "4"},
    {"num_key_value_heads", "2"},
    {"head_dim", "4"},
    {"global_head_dim", "6"},
    {"num_global_key_value_heads", "null"},
    {"attention_k_eq_v", "false"},
    {"hidden_size_per_layer_input", "2"},
    {"num_kv_shared_layers", "2"},
    {"use_double_wide_mlp", "true"},
    {"sliding_window", "16"},
    {"max_position_embeddings", "64"},
    {"layer_types", "[\"sliding_attention\",\"full_attention\",\"sliding_attention\",\"full_attention\"]"},
    {"rope_parameters", "{\"sliding_attention\":{\"rope_type\":\"default\",\"rope_theta\":5000},"
                        "\"full_attention\":{\"rope_type\":\"proportional\",\"rope_theta\":70000.0,\"partial_rotary_factor\":0.5,\"factor\":8}}"},
    {"rms_norm_eps", "1e-5"},
    {"final_logit_softcapping", "20.0"},
    {"hidden_activation", "\"gelu_pytorch_tanh\""},
    {"attention_bias", "false"},
    {"use_bidirectional_attention", "null"},
    {"enable_moe_block", "false"},
    {"num_experts", "null"},
    {"tie_word_embeddings", "true"},
    {"eos_token_id", "[1,5]"},
};

/* Two layers; experts; K = V on full layers. */
static const pair experts[] = {
    {"hidden_size_per_layer_input", "0"}, {"num_hidden_layers", "2"}, {"num_kv_shared_layers", "0"}, {"use_double_wide_mlp", "false"},
    {"layer_types", "[\"sliding_attention\",\"full_attention\"]"}, {"attention_k_eq_v", "true"}, {"num_global_key_value_heads", "1"},
    {"enable_moe_block", "true"}, {"num_experts", "3"}, {"top_k_experts", "2"}, {"moe_intermediate_size", "5"}, {NULL, NULL},
};

static pair current[MAX_PAIRS];

static void reset(const pair *changes) {
    memcpy(current, small, sizeof current);
    for (; changes && changes->key; changes++) {
        int i = 0;
        while (i < MAX_PAIRS - 1 && current[i].key && strcmp(current[i].key, changes->key)) i++;
        current[i] = *changes;
    }
}

/* value NULL: the key is left out. */
static void set(const char *key, const char *value) {
    const pair change[] = {{key, value}, {NULL, NULL}};
    int i = 0;
    while (i < MAX_PAIRS - 1 && current[i].key && strcmp(current[i].key, key)) i++;
    current[i] = change[0];
}

static const char *config_text(const char *before, const char *after) {
    static char text[8192];
    int comma = 0;
    snprintf(text, sizeof text, "%s{", before);
    for (int i = 0; i < MAX_PAIRS && current[i].key; i++)
        if (current[i].value) append(text, sizeof text, "%s\n  \"%s\": %s", comma++ ? "," : "", current[i].key, current[i].value);
    append(text, sizeof text, "\n}%s", after);
    return text;
}

static int parse_text(g4_config *c, const char *text) {
    warnings[0] = 0;
    n_warnings = 0;
    size_t n = strlen(text);
    char *copy = malloc(n);
    if (!copy) exit(2);
    memcpy(copy, text, n);
    int failed = g4_config_parse(c, copy, n, "C", &options, &err);
    free(copy);
    if (failed) CHECK(!c->layers, "layers after a failure");
    return failed;
}

static void refuses_value(const char *key, const char *value, const char *parts) {
    g4_config c;
    const char *what = line("%s %s", key, value ? value : "absent");
    set(key, value);
    int failed = parse_text(&c, config_text("", ""));
    says(failed, what, "C: ");
    says(failed, what, parts);
    free(c.layers);
    reset(NULL);
}

static void accepts_value(const char *key, const char *value) {
    g4_config c;
    set(key, value);
    int failed = parse_text(&c, config_text("", ""));
    CHECK(!failed, "%s %s: %s", key, value ? value : "absent", err.text);
    free(c.layers);
    reset(NULL);
}

static void config_values(void) {
    g4_config c;
    reset(NULL);
    int failed = parse_text(&c, config_text("", ""));
    CHECK(!failed && !n_warnings, "a good config: %s%s", failed ? err.text : "", warnings);
    if (failed) return;
    CHECK(!strcmp(c.model_type, "gemma4_text") && c.vocab_size == 10 && c.vocab_size_per_layer_input == 9 && c.hidden_size == 8 &&
              c.num_hidden_layers == 4 && c.num_attention_heads == 4 && c.hidden_size_per_layer_input == 2 && c.sliding_window == 16 &&
              c.max_position_embeddings == 64 && c.num_kv_shared_layers == 2 && !c.attention_k_eq_v && c.use_double_wide_mlp &&
              c.tie_word_embeddings && !c.num_experts && !c.top_k_experts && !c.moe_intermediate_size,
          "sizes");
    CHECK(c.rms_norm_eps == 1e-5f && c.final_logit_softcapping == 20, "eps %g, cap %g", c.rms_norm_eps, c.final_logit_softcapping);
    CHECK(c.n_eos == 2 && c.eos_token_id[0] == 1 && c.eos_token_id[1] == 5 && c.do_sample == 1 && c.top_k == 64 && c.top_p == 0.95f &&
              c.temperature == 1 && !c.n_suppress,
          "generation");
    CHECK(c.rope[0].theta == 5000 && c.rope[0].factor == 1 && !c.rope[0].proportional, "sliding rope %g %g", c.rope[0].theta, c.rope[0].factor);
    CHECK(c.rope[1].theta == 70000 && c.rope[1].factor == 8 && c.rope[1].proportional && c.rope[1].partial_rotary_factor == 0.5, "full rope");
    static const g4_layer_config layers[] = {{G4_SLIDING_ATTENTION, 4, 2, 6, 0},
                                             {G4_FULL_ATTENTION, 6, 2, 6, 1},
                                             {G4_SLIDING_ATTENTION, 4, 2, 12, 0},
                                             {G4_FULL_ATTENTION, 6, 2, 12, 1}};
    for (int i = 0; i < 4; i++) {
        const g4_layer_config *a = &c.layers[i], *b = &layers[i];
        CHECK(a->type == b->type && a->head_dim == b->head_dim && a->num_key_value_heads == b->num_key_value_heads &&
                  a->intermediate_size == b->intermediate_size && a->kv_layer == b->kv_layer,
              "layer %d: %d %d %d %d %d", i, (int)a->type, a->head_dim, a->num_key_value_heads, a->intermediate_size, a->kv_layer);
    }
    free(c.layers);

    /* Each key left out: the default of transformers, or a named error. */
    for (int i = 0; small[i].key; i++) {
        reset(NULL);
        set(small[i].key, NULL);
        failed = parse_text(&c, config_text("", ""));
        if (!strcmp(small[i].key, "model_type")) says(failed, "model_type left out", "model_type: is missing");
        else if (!strcmp(small[i].key, "num_hidden_layers")) says(failed, "num_hidden_layers left out", "layer_types: expected an array of 30");
        else if (!strcmp(small[i].key, "layer_types"))
            says(failed, "layer_types left out", "num_kv_shared_layers 2: no layer before layer 2 is full_attention");
        else CHECK(!failed, "%s left out: %s", small[i].key, err.text);
        free(c.layers);
    }
    static const char *const flavours[] = {"gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"};
    /* found by fuzzing: stop ids that a vocabulary of one token has not, given or by default */
    for (int i = 0; i < 2; i++) {
        failed = parse_text(&c, line("{\"model_type\":\"gemma4_text\",\"vocab_size\":1%s}", i ? ",\"eos_token_id\":[0,1]" : ""));
        CHECK(!failed && c.n_eos == i && (!i || !c.eos_token_id[0]), "a vocabulary of one token: %d stop ids", c.n_eos);
        free(c.layers);
    }
    for (int i = 0; i < 4; i++) {
        failed = parse_text(&c, line("{\"model_type\":\"%s\"}", flavours[i]));
        int unified = i >= 2;
        CHECK(!failed && c.vocab_size == 262144 && c.vocab_size_per_layer_input == 262144 && c.hidden_size == 2304 &&
                  c.num_hidden_layers == 30 && c.num_attention_heads == 8 && c.hidden_size_per_layer_input == (unified ? 0 : 256) &&
                  c.sliding_window == (unified ? 1024 : 512) && c.max_position_embeddings == (unified ? 262144 : 131072) &&
                  c.num_kv_shared_layers == 0 && !c.attention_k_eq_v && !c.use_double_wide_mlp && c.tie_word_embeddings && !c.num_experts &&
                  c.rms_norm_eps == 1e-6f && c.final_logit_softcapping == 0 && c.n_eos == 1 && c.eos_token_id[0] == 1,
              "defaults of %s: %s", flavours[i], failed ? err.text : "other values");
        if (failed) continue;
        CHECK(c.rope[0].theta == 1e4 && !c.rope[0].proportional && c.rope[1].theta == 1e6 && c.rope[1].proportional &&
                  c.rope[1].partial_rotary_factor == 0.25,
              "rope");
        for (int l = 0; l < 30; l++)
            CHECK(c.layers[l].type == (l % 6 == 5 ? G4_FULL_ATTENTION : G4_SLIDING_ATTENTION) &&
                      c.layers[l].head_dim == (l % 6 == 5 ? 512 : 256) && c.layers[l].num_key_value_heads == 4 &&
                      c.layers[l].intermediate_size == 9216 && c.layers[l].kv_layer == l,
                  "layer %d of %s", l, flavours[i]);
        free(c.layers);
    }

    /* Values out of range or of another kind. */
    static const char *const sizes[] = {"vocab_size",
                                        "vocab_size_per_layer_input",
                                        "hidden_size",
                                        "intermediate_size",
                                        "num_hidden_layers",
                                        "num_attention_heads",
                                        "num_key_value_heads",
                                        "head_dim",
                                        "global_head_dim",
                                        "sliding_window",
                                        "max_position_embeddings"};
    static const char *const bad[] = {"0",     "-1",        "1.5", "\"8\"", "true", "null", "[8]", "{}", "2147483648", "99999999999999999999",
                                      "1e400", "4294967297"};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        for (size_t k = 0; k < sizeof bad / sizeof bad[0]; k++)
            refuses_value(sizes[i], bad[k], line("%s: expected an integer from |found ", sizes[i]));
    refuses_value("hidden_size_per_layer_input", "-1", "hidden_size_per_layer_input: expected an integer from 0 to 65536, found -1");
    refuses_value("num_kv_shared_layers", "-1", "num_kv_shared_layers: expected an integer from 0");
    refuses_value("num_kv_shared_layers", "4", "num_kv_shared_layers: expected less than num_hidden_layers 4, found 4");
    refuses_value("num_kv_shared_layers", "3", "num_kv_shared_layers 3: no layer before layer 1 is full_attention");
    accepts_value("num_kv_shared_layers", "1");
    accepts_value("num_kv_shared_layers", "0");
    refuses_value("num_key_value_heads", "3",
                  "num_attention_heads 4 is not a multiple of the 3 num_key_value_heads of layer 0 (sliding_attention)");
    refuses_value("num_key_value_heads", "8", "num_attention_heads 4 is not a multiple of the 8");
    refuses_value("head_dim", "5", "head_dim 5 of layer 0 (sliding_attention) is odd");
    refuses_value("global_head_dim", "7", "head_dim 7 of layer 1 (full_attention) is odd");
    refuses_value("attention_k_eq_v", "1", "attention_k_eq_v: expected true or false, found 1");
    refuses_value("head_dim", "false", "head_dim: expected an integer from 2 to 65536, found false");
    refuses_value("use_double_wide_mlp", "null", "use_double_wide_mlp: expected true or false, found null");
    refuses_value("tie_word_embeddings", "\"yes\"", "tie_word_embeddings: expected true or false, found \"yes\"");
    static const char *const bad_eps[] = {"0", "-1e-6", "2", "1e-60", "\"1e-6\"", "null", "1e999"};
    for (size_t i = 0; i < sizeof bad_eps / sizeof bad_eps[0]; i++)
        refuses_value("rms_norm_eps", bad_eps[i], "rms_norm_eps: expected a number from");
    static const char *const bad_cap[] = {"0", "-30", "\"30\"", "1e999", "1e-60", "true"};
    for (size_t i = 0; i < sizeof bad_cap / sizeof bad_cap[0]; i++)
        refuses_value("final_logit_softcapping", bad_cap[i], "final_logit_softcapping: expected a number above 0");
    accepts_value("final_logit_softcapping", "null");
    refuses_value("hidden_activation", "\"gelu\"", "hidden_activation: expected \"gelu_pytorch_tanh\", found \"gelu\"");
    refuses_value("hidden_activation", "null", "hidden_activation");
    refuses_value("attention_bias", "true", "attention_bias: expected false");
    refuses_value("use_bidirectional_attention", "\"all\"", "use_bidirectional_attention: expected null or \"vision\", found \"all\"");
    refuses_value("use_bidirectional_attention", "true", "use_bidirectional_attention");
    accepts_value("use_bidirectional_attention", "\"vision\"");
    refuses_value("quantization_config", "{\"quant_method\":\"fp8\"}", "quantization_config: expected none");
    accepts_value("quantization_config", "null");
    refuses_value("eos_token_id", "-1", "eos_token_id: expected a token id");
    refuses_value("eos_token_id", "\"1\"", "eos_token_id");
    refuses_value("eos_token_id", "[1,[2]]", "eos_token_id");
    refuses_value("eos_token_id", "[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]", "a list of at most 16");
    accepts_value("eos_token_id", "1");
    accepts_value("eos_token_id", "null");
    accepts_value("some_key_of_a_later_version", "[1,{}]");

    /* Layer types. */
    refuses_value("layer_types", "[\"sliding_attention\",\"full_attention\",\"full_attention\"]",
                  "layer_types: expected an array of 4, num_hidden_layers, found an array of 3");
    refuses_value("layer_types", "[\"full_attention\",\"full_attention\",\"full_attention\",\"full_attention\",\"full_attention\"]",
                  "found an array of 5");
    refuses_value("layer_types", "[]", "an array of 0");
    refuses_value("layer_types", "\"full_attention\"", "layer_types: expected an array of 4");
    refuses_value("layer_types", "[\"full_attention\",\"chunked_attention\",\"full_attention\",\"full_attention\"]",
                  "layer_types[1]: expected \"sliding_attention\" or \"full_attention\", found \"chunked_attention\"");
    refuses_value("layer_types", "[\"full_attention\",\"full_attention\",1,\"full_attention\"]", "layer_types[2]|found 1");
    set("layer_types", "[\"sliding_attention\",\"full_attention\",\"sliding_attention\",\"sliding_attention\"]");
    failed = parse_text(&c, config_text("", ""));
    CHECK(!failed && n_warnings == 1 && strstr(warnings, "the last layer is sliding_attention; it is forced") &&
              c.layers[3].type == G4_FULL_ATTENTION && c.layers[3].head_dim == 6 && c.layers[3].kv_layer == 1,
          "last layer sliding: %s%s", failed ? err.text : "", warnings);
    free(c.layers);
    reset(NULL);

    /* RoPE. */
    refuses_value("rope_parameters", "{\"rope_type\":\"default\",\"rope_theta\":10000}",
                  "rope_parameters.sliding_attention: is missing|one object for each layer type");
    refuses_value("rope_parameters", "{}", "rope_parameters.sliding_attention: is missing");
    refuses_value("rope_parameters", "[]", "rope_parameters: expected an object");
    refuses_value("rope_parameters", "{\"sliding_attention\":{\"rope_theta\":1e4}}", "rope_parameters.full_attention: is missing");
    refuses_value("rope_parameters", "{\"sliding_attention\":1,\"full_attention\":{}}",
                  "rope_parameters.sliding_attention: expected an object, found 1");
    refuses_value("rope_parameters", "{\"sliding_attention\":{},\"full_attention\":{}}",
                  "rope_parameters.sliding_attention.rope_theta: is missing");
    refuses_value("rope_parameters", "{\"sliding_attention\":{\"rope_theta\":0},\"full_attention\":{}}",
                  "rope_parameters.sliding_attention.rope_theta: expected a number");
    refuses_value("rope_parameters", "{\"sliding_attention\":{\"rope_theta\":1e4,\"rope_type\":\"yarn\"},\"full_attention\":{}}",
                  "rope_parameters.sliding_attention.rope_type: expected \"default\" or \"proportional\", found \"yarn\"");
    refuses_value(
        "rope_parameters",
        "{\"sliding_attention\":{\"rope_theta\":1e4},\"full_attention\":{\"rope_type\":\"proportional\",\"rope_theta\":1e6,\"factor\":0}}",
        "rope_parameters.full_attention.factor");
    refuses_value("rope_parameters",
                  "{\"sliding_attention\":{\"rope_theta\":1e4},\"full_attention\":{\"rope_type\":\"proportional\",\"rope_theta\":1e6,\"partial_"
                  "rotary_factor\":1.5}}",
                  "partial_rotary_factor: expected a number from 0 to 1, found 1.5");
    set("rope_parameters",
        "{\"sliding_attention\":{\"type\":\"proportional\",\"rope_theta\":1e4},\"full_attention\":{\"rope_theta\":2e6,\"factor\":4}}");
    failed = parse_text(&c, config_text("", ""));
    CHECK(!failed && c.rope[0].proportional && c.rope[0].partial_rotary_factor == 1 && c.rope[0].factor == 1 && !c.rope[1].proportional &&
              c.rope[1].factor == 1 && c.rope[1].theta == 2e6 && n_warnings == 1,
          "rope by type: %s%s", failed ? err.text : "", warnings);
    free(c.layers);
    reset(NULL);
    for (int n = 1; n <= 2; n++) { /* nested whatever layer types occur, and only those that do are needed */
        set("num_kv_shared_layers", "0");
        set("num_hidden_layers", n == 1 ? "1" : "2");
        set("layer_types", n == 1 ? "[\"full_attention\"]" : "[\"full_attention\",\"full_attention\"]");
        set("rope_parameters", "{\"full_attention\":{\"rope_type\":\"proportional\",\"rope_theta\":3e6}}");
        failed = parse_text(&c, config_text("", ""));
        CHECK(!failed && c.rope[1].theta == 3e6 && c.rope[1].partial_rotary_factor == 1, "%d full layers: %s", n, err.text);
        free(c.layers);
    }
    reset(NULL);

    /* Head geometry. */
    set("num_global_key_value_heads", "1");
    failed = parse_text(&c, config_text("", ""));
    CHECK(!failed && c.layers[1].num_key_value_heads == 2, "num_global_key_value_heads counts only where K = V");
    free(c.layers);
    set("attention_k_eq_v", "true");
    failed = parse_text(&c, config_text("", ""));
    CHECK(!failed && c.layers[1].num_key_value_heads == 1 && c.layers[0].num_key_value_heads == 2 && c.attention_k_eq_v,
          "num_global_key_value_heads");
    free(c.layers);
    set("per_layer_config", "{}");
    failed = parse_text(&c, config_text("", ""));
    CHECK(!failed && c.layers[1].num_key_value_heads == 2 && c.layers[1].head_dim == 4, "an empty per_layer_config decides alone");
    free(c.layers);
    static const char *const same[] = {
        "{\"1\":{\"head_dim\":10,\"num_key_value_heads\":1},\"3\":{\"head_dim\":10,\"num_key_value_heads\":1}}",
        "{\"03\":{\"num_key_value_heads\":1,\"head_dim\":10},\"01\":{\"head_dim\":10,\"num_key_value_heads\":1},\"0\":{}}"};
    for (int i = 0; i < 2; i++) {
        set("per_layer_config", same[i]);
        failed = parse_text(&c, config_text("", ""));
        CHECK(!failed && c.layers[1].num_key_value_heads == 1 && c.layers[3].head_dim == 10 && c.layers[0].head_dim == 4 &&
                  c.layers[2].num_key_value_heads == 2,
              "per_layer_config %d: %s", i, err.text);
        free(c.layers);
    }
    reset(NULL);
    refuses_value("per_layer_config", "[]", "per_layer_config: expected an object");
    refuses_value("per_layer_config", "{\"4\":{}}", "per_layer_config: key \"4\": expected the number of a layer, 0 to 3");
    refuses_value("per_layer_config", "{\"-1\":{}}", "key \"-1\"");
    refuses_value("per_layer_config", "{\"\":{}}", "key \"\"");
    refuses_value("per_layer_config", "{\"99999999999999999999\":{}}", "key \"99999999999999999999\"");
    refuses_value("per_layer_config", "{\"1\":{},\"01\":{}}", "key \"01\"|once each");
    refuses_value("per_layer_config", "{\"1\":8}", "per_layer_config.1: expected an object, found 8");
    refuses_value("per_layer_config", "{\"1\":{\"head_dim\":0}}", "per_layer_config.1.head_dim: expected an integer from 2");
    refuses_value("per_layer_config", "{\"1\":{\"head_dim\":null}}", "per_layer_config.1.head_dim");
    refuses_value("per_layer_config", "{\"1\":{\"num_key_value_heads\":\"1\"}}", "per_layer_config.1.num_key_value_heads");
    refuses_value("per_layer_config", "{\"1\":{\"sliding_window\":4}}",
                  "per_layer_config.1: key \"sliding_window\": expected head_dim or num_key_value_heads");
    refuses_value("per_layer_config", "{\"1\":{\"head_dim\":8}}", "layers 1 and 3 are both full_attention, but head_dim is 8 and 4");
    refuses_value("per_layer_config", "{\"2\":{\"num_key_value_heads\":1}}",
                  "layers 0 and 2 are both sliding_attention|num_key_value_heads 2 and 1");

    /* Experts. */
    static const char *const needed[] = {"num_experts", "top_k_experts", "moe_intermediate_size"};
    for (int i = 0; i < 3; i++) {
        reset(experts);
        refuses_value(needed[i], NULL, line("%s: is missing; enable_moe_block needs it", needed[i]));
        reset(experts);
        refuses_value(needed[i], "null", line("%s: is missing; enable_moe_block needs it", needed[i]));
        reset(experts);
        refuses_value(needed[i], "0", line("%s: expected an integer from 1", needed[i]));
    }
    reset(experts);
    refuses_value("top_k_experts", "4", "top_k_experts: expected at most num_experts 3, found 4");
    set("num_experts", "4");
    failed = parse_text(&c, config_text("", ""));
    CHECK(!failed && c.num_experts == 0, "experts without enable_moe_block");
    free(c.layers);
    reset(experts);
    set("model_type", "\"gemma4_unified_text\"");
    failed = parse_text(&c, config_text("", ""));
    CHECK(!failed && c.num_experts == 0 && strstr(warnings, "enable_moe_block"), "experts in gemma4_unified: %s", failed ? err.text : warnings);
    free(c.layers);
    reset(NULL);

    /* The outer form. */
    failed = parse_text(
        &c,
        config_text(
            "{\"model_type\":\"gemma4\",\"eos_token_id\":[1,7],\"vocab_size\":5,\"vision_config\":{\"hidden_size\":-1},\"text_config\":", "}"));
    CHECK(!failed && !strcmp(c.model_type, "gemma4") && c.vocab_size == 10 && c.n_eos == 2 && c.eos_token_id[1] == 7, "nested: %s", err.text);
    free(c.layers);
    says(parse_text(&c, config_text("{\"model_type\":\"gemma4_unified\",\"text_config\":", "}")), "gemma4_text in gemma4_unified",
         "text_config.model_type: expected gemma4_unified_text, found \"gemma4_text\"");
    set("head_dim", "0");
    says(parse_text(&c, config_text("{\"model_type\":\"gemma4\",\"text_config\":", "}")), "nested, head_dim 0",
         "C: text_config.head_dim: expected");
    reset(NULL);
    set("tie_word_embeddings", NULL);
    for (int tie = 0; tie < 2; tie++) {
        failed = parse_text(
            &c, config_text(line("{\"model_type\":\"gemma4\",\"tie_word_embeddings\":%s,\"text_config\":", tie ? "true" : "false"), "}"));
        CHECK(!failed && c.tie_word_embeddings == tie, "tie_word_embeddings outside: %s", err.text);
        free(c.layers);
    }
    reset(NULL);
    says(parse_text(&c, "{\"model_type\":\"gemma4\",\"text_config\":[]}"), "text_config []", "text_config: expected an object");
    says(parse_text(&c, config_text("{\"model_type\":\"gemma4\",\"quantization_config\":{\"a\":1},\"text_config\":", "}")), "quantised",
         "quantization_config: expected none");
    static const char *const others[] = {"llama", "gemma3_text", "gemma3n", "gemma2", "gemma4_assistant", "qwen3", "gemma4 ", "Gemma4"};
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        const char *value = line("\"%s\"", others[i]);
        refuses_value("model_type", value,
                      line("model_type: expected one of gemma4, gemma4_text, gemma4_unified, gemma4_unified_text|found %s", value));
    }
    refuses_value("model_type", "4", "model_type|found 4");
    says(parse_text(&c, "[]"), "an array", "C: expected an object, found an array of 0");
    says(parse_text(&c, "\"x\""), "a string", "C: expected an object, found \"x\"");
    says(parse_text(&c, ""), "nothing", "C: line 1 column 1");
    says(parse_text(&c, "{\"model_type\":\"gemma4\",\"model_type\":\"llama\"}"), "twice", "\"model_type\" is there twice");

    /* Random changes of a good config: an answer, whatever it is, and nothing worse. */
    char *text = malloc(8192);
    uint64_t seed = 3;
    if (!text) exit(2);
    for (int round = 0; round < 4000; round++) {
        strcpy(text, config_text("", ""));
        size_t n = strlen(text);
        for (int k = 0; k < 1 + round % 3; k++) {
            seed = seed * 6364136223846793005u + 1442695040888963407u;
            text[(seed >> 33) % n] = "0123456789-.e[]{}\",: lnt"[(seed >> 20) % 24];
        }
        parse_text(&c, text);
        free(c.layers);
    }
    free(text);
}

/* ---- whole checkpoints ---- */

/* The name of each field in a file (%d is the layer) and its shape by letters: V v (its per-layer sibling) D P L*P=M, Q=H*dh K=G*dh h=dh F,
 * E e=2*Fe f=Fe, 1. `when`: p per-layer inputs, m experts, o own K/V, v own V. */
static const struct {
    const char *name, *shape, *when;
    size_t field;
} fields[] = {
    {"embed_tokens.weight", "VD", "", offsetof(g4_model, embed_tokens)},
    {"embed_tokens_per_layer.weight", "vM", "p", offsetof(g4_model, embed_tokens_per_layer)},
    {"per_layer_model_projection.weight", "MD", "p", offsetof(g4_model, per_layer_model_projection)},
    {"per_layer_projection_norm.weight", "P", "p", offsetof(g4_model, per_layer_projection_norm)},
    {"norm.weight", "D", "", offsetof(g4_model, norm)},
    {"layers.%d.input_layernorm.weight", "D", "", offsetof(g4_layer, input_layernorm)},
    {"layers.%d.self_attn.q_proj.weight", "QD", "", offsetof(g4_layer, q_proj)},
    {"layers.%d.self_attn.k_proj.weight", "KD", "o", offsetof(g4_layer, k_proj)},
    {"layers.%d.self_attn.v_proj.weight", "KD", "v", offsetof(g4_layer, v_proj)},
    {"layers.%d.self_attn.o_proj.weight", "DQ", "", offsetof(g4_layer, o_proj)},
    {"layers.%d.self_attn.q_norm.weight", "h", "", offsetof(g4_layer, q_norm)},
    {"layers.%d.self_attn.k_norm.weight", "h", "o", offsetof(g4_layer, k_norm)},
    {"layers.%d.post_attention_layernorm.weight", "D", "", offsetof(g4_layer, post_attention_layernorm)},
    {"layers.%d.pre_feedforward_layernorm.weight", "D", "", offsetof(g4_layer, pre_feedforward_layernorm)},
    {"layers.%d.mlp.gate_proj.weight", "FD", "", offsetof(g4_layer, gate_proj)},
    {"layers.%d.mlp.up_proj.weight", "FD", "", offsetof(g4_layer, up_proj)},
    {"layers.%d.mlp.down_proj.weight", "DF", "", offsetof(g4_layer, down_proj)},
    {"layers.%d.post_feedforward_layernorm.weight", "D", "", offsetof(g4_layer, post_feedforward_layernorm)},
    {"layers.%d.router.proj.weight", "ED", "m", offsetof(g4_layer, router_proj)},
    {"layers.%d.router.scale", "D", "m", offsetof(g4_layer, router_scale)},
    {"layers.%d.router.per_expert_scale", "E", "m", offsetof(g4_layer, per_expert_scale)},
    {"layers.%d.experts.gate_up_proj", "EeD", "m", offsetof(g4_layer, experts_gate_up_proj)},
    {"layers.%d.experts.down_proj", "EDf", "m", offsetof(g4_layer, experts_down_proj)},
    {"layers.%d.post_feedforward_layernorm_1.weight", "D", "m", offsetof(g4_layer, post_feedforward_layernorm_1)},
    {"layers.%d.pre_feedforward_layernorm_2.weight", "D", "m", offsetof(g4_layer, pre_feedforward_layernorm_2)},
    {"layers.%d.post_feedforward_layernorm_2.weight", "D", "m", offsetof(g4_layer, post_feedforward_layernorm_2)},
    {"layers.%d.per_layer_input_gate.weight", "PD", "p", offsetof(g4_layer, per_layer_input_gate)},
    {"layers.%d.per_layer_projection.weight", "DP", "p", offsetof(g4_layer, per_layer_projection)},
    {"layers.%d.post_per_layer_input_norm.weight", "D", "p", offsetof(g4_layer, post_per_layer_input_norm)},
    {"layers.%d.layer_scalar", "1", "", offsetof(g4_layer, layer_scalar)},
};
enum { N_FIELDS = sizeof fields / sizeof fields[0], N_GLOBAL = 5, MAX_TENSORS = 400 };

/* A tensor to be written. */
typedef struct out_tensor {
    char name[160], dtype[8];
    int rank, file; /* file: which shard; -1: left out */
    int64_t shape[3];
} out_tensor;

static out_tensor tensors[MAX_TENSORS];
static int n_tensors;

static out_tensor *add_tensor(const char *name, int rank, int64_t d0, int64_t d1, int64_t d2) {
    out_tensor *t = &tensors[n_tensors++];
    if (n_tensors > MAX_TENSORS) exit(2);
    *t = (out_tensor){.dtype = "BF16", .rank = rank, .shape = {d0, d1, d2}};
    snprintf(t->name, sizeof t->name, "%s", name);
    return t;
}

static int is_moe;

static int has_field(int f, int layer) {
    const char *when = fields[f].when;
    if (*when == 'p') return !is_moe;
    if (*when == 'm') return is_moe;
    if (*when == 'o') return is_moe || layer < 2;
    if (*when == 'v') return is_moe ? layer == 0 : layer < 2;
    return 1;
}

static int64_t letter(char c, int layer) {
    int full = layer % 2, moe = is_moe;
    switch (c) {
    case 'V': return 10;
    case 'v': return 9;
    case 'D': return 8;
    case 'P': return 2;
    case 'M': return 4 * 2;
    case 'Q': return 4 * (full ? 6 : 4);
    case 'K': return full ? (moe ? 1 : 2) * 6 : 2 * 4;
    case 'h': return full ? 6 : 4;
    case 'F': return moe || layer < 2 ? 6 : 12;
    case 'E': return 3;
    case 'e': return 10;
    case 'f': return 5;
    default: return 1;
    }
}

/* All tensors of the model that the config describes. */
static void all_tensors(const char *prefix, int moe) {
    is_moe = moe;
    n_tensors = 0;
    reset(moe ? experts : NULL);
    for (int f = 0; f < N_FIELDS; f++)
        for (int layer = 0; layer < (f < N_GLOBAL ? 1 : moe ? 2 : 4); layer++) {
            const char *s = fields[f].shape;
            if (!has_field(f, layer)) continue;
            add_tensor(line("%s%s", prefix, line(fields[f].name, layer)), (int)strlen(s), letter(s[0], layer), s[1] ? letter(s[1], layer) : 0,
                       s[1] && s[2] ? letter(s[2], layer) : 0);
        }
}

static out_tensor *named(const char *name) {
    for (int i = 0; i < n_tensors; i++)
        if (!strcmp(tensors[i].name, name)) return &tensors[i];
    printf("test_checkpoint: no tensor %s\n", name);
    exit(2);
}

static int64_t byte_count(const out_tensor *t) {
    int64_t n = !strcmp(t->dtype, "F32") || !strcmp(t->dtype, "I32") ? 4 : 2;
    for (int i = 0; i < t->rank; i++) n *= t->shape[i];
    return n;
}

/* Byte i of a tensor: it depends on the name, but that lm_head repeats the embedding of the same file. */
static unsigned char byte_of(const char *name, int64_t i) {
    unsigned hash = 17;
    if (strstr(name, "lm_head")) name = tensors[0].name;
    for (; *name; name++) hash = hash * 31 + (unsigned char)*name;
    return (unsigned char)((hash >> 7) + (unsigned)i * 5);
}

static void write_weights(const char *name, int file) {
    enum { HEADER = 200 * MAX_TENSORS };
    char *header = malloc(HEADER);
    unsigned char *all = malloc(HEADER + (1 << 20));
    if (!header || !all) exit(2);
    long long at = 0;
    strcpy(header, "{\"__metadata__\":{\"format\":\"pt\"}");
    for (int i = 0; i < n_tensors; i++) {
        const out_tensor *t = &tensors[i];
        if (t->file != file) continue;
        append(header, HEADER, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", t->name, t->dtype);
        for (int k = 0; k < t->rank; k++) append(header, HEADER, k ? ",%lld" : "%lld", (long long)t->shape[k]);
        append(header, HEADER, "],\"data_offsets\":[%lld,%lld]}", at, at + (long long)byte_count(t));
        at += byte_count(t);
    }
    append(header, HEADER, "}");
    size_t n = strlen(header);
    for (int i = 0; i < 8; i++) all[i] = (unsigned char)((uint64_t)n >> 8 * i);
    memcpy(all + 8, header, n);
    n += 8;
    for (int i = 0; i < n_tensors; i++)
        for (int64_t k = 0; tensors[i].file == file && k < byte_count(&tensors[i]); k++) all[n++] = byte_of(tensors[i].name, k);
    write_file(name, all, n);
    free(header);
    free(all);
}

static const char *const every_file[] = {"config.json",
                                         "generation_config.json",
                                         "model.safetensors",
                                         "model.safetensors.index.json",
                                         "a.safetensors",
                                         "b.safetensors",
                                         "model-00001-of-00002.safetensors",
                                         "model-00002-of-00002.safetensors",
                                         "model.gguf"};

static void clear(void) {
    for (size_t i = 0; i < sizeof every_file / sizeof every_file[0]; i++) remove(in_dir(every_file[i]));
}

static g4_model model;

static int open_model(void) {
    memset(&model, 0, sizeof model);
    warnings[0] = 0;
    n_warnings = 0;
    err.text[0] = 0;
    return g4_checkpoint_open(&model, dir, &options, &err);
}

/* Writes config and weights as they stand, and opens them. */
static int open_written(void) {
    clear();
    write_text("config.json", config_text("", ""));
    write_weights("model.safetensors", 0);
    return open_model();
}

static void refuses_model(const char *what, const char *parts) {
    int failed = open_written();
    says(failed, what, parts);
    g4_checkpoint_close(&model);
}

/* Every field of an open model points at the bytes of the tensor that it is named after, with that tensor's shape. */
static void check_fields(const char *prefix) {
    for (int f = 0; f < N_FIELDS; f++)
        for (int layer = 0; layer < (f < N_GLOBAL ? 1 : model.config.num_hidden_layers); layer++) {
            const char *name = line("%s%s", prefix, line(fields[f].name, layer));
            g4_tensor t;
            memcpy(&t, (f < N_GLOBAL ? (char *)&model : (char *)&model.layers[layer]) + fields[f].field, sizeof t);
            if (!has_field(f, layer)) {
                CHECK(!t.data, "%s: expected none, found %s", name, t.name);
                continue;
            }
            const out_tensor *o = named(name);
            int64_t n = byte_count(o), same = 0;
            CHECK(t.data && !strcmp(t.name, name), "%s: found %s", name, t.data ? t.name : "nothing");
            CHECK(t.rows == (o->rank == 1   ? 1
                             : o->rank == 2 ? o->shape[0]
                                            : o->shape[0] * o->shape[1]) &&
                      t.cols == o->shape[o->rank - 1],
                  "%s: [%lld][%lld]", name, (long long)t.rows, (long long)t.cols);
            CHECK(t.type == (!strcmp(o->dtype, "F32")   ? G4_TYPE_F32
                             : !strcmp(o->dtype, "F16") ? G4_TYPE_F16
                                                        : G4_TYPE_BF16),
                  "%s: type %d", name, (int)t.type);
            for (int64_t i = 0; t.data && i < n; i++) same += ((const unsigned char *)t.data)[i] == byte_of(name, i);
            CHECK(same == n, "%s: %lld of %lld bytes are its own", name, (long long)same, (long long)n);
        }
}

static int is_ignored(const char *name) {
    const char *ignored;
    for (int i = 0; (ignored = g4_checkpoint_ignored(&model, i)); i++)
        if (!strcmp(ignored, name)) return 1;
    return 0;
}

static void checkpoints(void) {
    static const char *const prefixes[] = {"model.language_model.", "model.", "language_model.model."};
    for (int moe = 0; moe < 2; moe++)
        for (int p = 0; p < 3; p++)
            for (int no_mmap = 0; no_mmap < 2; no_mmap++) {
                all_tensors(prefixes[p], moe);
                for (int i = 0; i < n_tensors; i++) strcpy(tensors[i].dtype, i % 7 == 3 ? "F32" : i % 7 == 5 ? "F16" : "BF16");
                options.no_mmap = no_mmap;
                int failed = open_written();
                options.no_mmap = 0;
                CHECK(!failed && !n_warnings, "prefix %s, experts %d: %s%s", prefixes[p], moe, failed ? err.text : "", warnings);
                if (!failed) {
                    check_fields(prefixes[p]);
                    CHECK(model.lm_head.data == model.embed_tokens.data && model.lm_head.rows == 10 && model.lm_head.cols == 8, "tied head");
                    CHECK(!g4_checkpoint_ignored(&model, 0) && !g4_checkpoint_ignored(&model, -1), "%s is ignored",
                          g4_checkpoint_ignored(&model, 0));
                    CHECK(g4_checkpoint_bytes(&model) > 1000, "bytes");
                }
                g4_checkpoint_close(&model);
            }

    /* Each tensor left out, then each with a dimension changed, then with another rank. */
    for (int moe = 0; moe < 2; moe++) {
        all_tensors("model.", moe);
        int n = n_tensors;
        for (int i = 0; i < n; i++) {
            all_tensors("model.", moe);
            out_tensor *t = &tensors[i];
            t->file = -1;
            if (i == 0) refuses_model("no embedding", "no tensor embed_tokens.weight under any of the prefixes");
            else refuses_model("a missing tensor", line("tensor %s is missing", t->name));
            t->file = 0;
            for (int k = 0; k <= t->rank && k < 3; k++) { /* last: one dimension more */
                t->shape[k]++;
                t->rank += k == t->rank;
                refuses_model("a wrong shape", line("tensor %s: expected the shape [|found [", t->name));
                if (k + 1 == t->rank && t->shape[k] == 1) break;
                t->shape[k]--;
            }
        }
    }
    all_tensors("model.", 0);
    named("model.norm.weight")->rank = 2;
    named("model.norm.weight")->shape[1] = 1;
    refuses_model("[8,1] is not [8]", "/model.safetensors: tensor model.norm.weight: expected the shape [8] by config.json, found [8,1]");
    all_tensors("model.", 0);
    named("model.layers.0.layer_scalar")->rank = 0;
    refuses_model("a scalar", "tensor model.layers.0.layer_scalar: expected the shape [1] by config.json, found []");
    all_tensors("model.", 0);
    strcpy(named("model.layers.1.mlp.up_proj.weight")->dtype, "I32");
    refuses_model("another type", "tensor model.layers.1.mlp.up_proj.weight: expected BF16, F16 or F32, found I32");
    all_tensors("model.", 0);
    for (int i = 0; i < n_tensors; i++)
        if (strstr(tensors[i].name, "layers.2.")) tensors[i].file = -1;
    refuses_model("a layer is missing", "tensor model.layers.2.input_layernorm.weight is missing, and 13 more that config.json asks for");
    all_tensors("model.", 0);
    set("use_double_wide_mlp", "false");
    refuses_model("widths", "tensor model.layers.2.mlp.gate_proj.weight: expected the shape [6,8] by config.json, found [12,8]");
    all_tensors("other.", 0);
    refuses_model("another prefix",
                  "no tensor embed_tokens.weight under any of the prefixes|the first of 67 tensors is other.embed_tokens.weight");

    /* Tensors that nothing reads. */
    all_tensors("model.", 0);
    add_tensor("model.layers.2.self_attn.k_proj.weight", 2, 8, 8, 0);
    add_tensor("model.layers.2.self_attn.v_proj.weight", 2, 3, 1, 0);
    add_tensor("model.layers.3.self_attn.k_norm.weight", 1, 6, 0, 0);
    add_tensor("model.vision_tower.encoder.layers.0.x.weight", 1, 3, 0, 0);
    add_tensor("audio_tower.x", 1, 3, 0, 0);
    add_tensor("model.embed_vision.embedding_projection.weight", 1, 3, 0, 0);
    add_tensor("model.embed_audio.embedding_projection.weight", 1, 3, 0, 0);
    add_tensor("model.vision_embedder.x", 1, 3, 0, 0);
    int failed = open_written();
    CHECK(!failed && !n_warnings, "dead and other tensors: %s%s", failed ? err.text : "", warnings);
    if (!failed) {
        check_fields("model.");
        CHECK(g4_checkpoint_ignored(&model, 7) && !g4_checkpoint_ignored(&model, 8), "8 are ignored");
        CHECK(is_ignored("model.layers.2.self_attn.v_proj.weight") && is_ignored("audio_tower.x"), "their names");
    }
    g4_checkpoint_close(&model);
    add_tensor("model.layers.0.self_attn.rotary_emb.inv_freq", 1, 3, 0, 0);
    add_tensor("model.layers.4.input_layernorm.weight", 1, 8, 0, 0);
    add_tensor("model.layers.2.self_attn.k_proj.bias", 1, 8, 0, 0);
    add_tensor("model.vision_towers.x", 1, 8, 0, 0);
    failed = open_written();
    CHECK(!failed && n_warnings == 4 && strstr(warnings, "model.layers.0.self_attn.rotary_emb.inv_freq [3]") &&
              strstr(warnings, "model.layers.4.input_layernorm.weight") && strstr(warnings, "k_proj.bias") &&
              strstr(warnings, "vision_towers") && is_ignored("model.layers.4.input_layernorm.weight"),
          "unknown tensors: %s%s", failed ? err.text : "", warnings);
    g4_checkpoint_close(&model);
    all_tensors("model.", 1);
    add_tensor("model.layers.1.self_attn.v_proj.weight", 2, 6, 8, 0);
    failed = open_written();
    CHECK(!failed && n_warnings == 1 && strstr(warnings, "layers.1.self_attn.v_proj") && !model.layers[1].v_proj.data,
          "a v_proj where K = V: %s%s", failed ? err.text : "", warnings);
    g4_checkpoint_close(&model);
    all_tensors("model.", 0);
    for (int i = 0; i < 50; i++) {
        add_tensor(line("unknown.%d", i), 1, 1, 0, 0);
    }
    failed = open_written();
    CHECK(!failed && n_warnings == 21 && strstr(warnings, "30 more tensors are not read"), "50 unknown tensors: %d warnings", n_warnings);
    g4_checkpoint_close(&model);

    /* The head. */
    for (int p = 0; p < 3; p++)
        for (int tied = 0; tied < 2; tied++)
            for (int kind = 0; kind < 4; kind++) { /* absent, equal, different, equal but of another type */
                const char *const names[] = {"lm_head.weight", "lm_head.weight", "language_model.lm_head.weight"};
                all_tensors(prefixes[p], 0);
                set("tie_word_embeddings", tied ? "true" : "false");
                if (kind) add_tensor(names[p], 2, 10, 8, 0);
                if (kind == 3) strcpy(tensors[n_tensors - 1].dtype, "F16");
                clear();
                write_text("config.json", config_text("", ""));
                write_weights("model.safetensors", 0);
                if (kind == 2) { /* the head is last in the file */
                    FILE *f = fopen(in_dir("model.safetensors"), "r+b");
                    if (!f || fseek(f, -1, SEEK_END) || fputc(byte_of("lm_head", 159) ^ 1, f) == EOF || fclose(f)) exit(2);
                }
                failed = open_model();
                if (kind == 0 && !tied) {
                    says(failed, "untied and absent", "lm_head.weight is missing, and config.json has tie_word_embeddings false");
                } else {
                    int own = kind && !(tied && kind == 1);
                    CHECK(!failed, "head %d, tied %d: %s", kind, tied, err.text);
                    if (!failed) {
                        CHECK((model.lm_head.data != model.embed_tokens.data) == own &&
                                  !strcmp(model.lm_head.name + strlen(model.lm_head.name) - 6, "weight"),
                              "head %d, tied %d: reads %s", kind, tied, model.lm_head.name);
                        CHECK(n_warnings == (tied && kind >= 2) &&
                                  (!n_warnings || (strstr(warnings, names[p]) && strstr(warnings, "the stored head is used"))),
                              "head %d, tied %d: %s", kind, tied, warnings);
                        CHECK(is_ignored(names[p]) == (tied && kind == 1), "head %d, tied %d: ignored or not", kind, tied);
                    }
                }
                g4_checkpoint_close(&model);
            }
    all_tensors("model.", 0);
    add_tensor("lm_head.weight", 2, 9, 8, 0);
    refuses_model("a head of another size", "tensor lm_head.weight: expected the shape [10,8] by config.json, found [9,8]");
}

static void shards(void) {
    static const char *const index = "model.safetensors.index.json";
    enum { MAP = 200 * MAX_TENSORS };
    char *map = malloc(MAP);
    if (!map) exit(2);
    enum { GOOD, NO_FILE, MISSING_IN_SHARD, MISSING_IN_MAP, MISSING_IN_MAP_LAST, SWAPPED, WRONG_SHAPE, CUT_1, CUT_100, CUT_4096, N_CASES };
    for (int what = 0; what < N_CASES; what++) {
        all_tensors("model.", 0);
        for (int i = 0; i < n_tensors; i++) tensors[i].file = i % 3 == 1;
        clear();
        write_text("config.json", config_text("", ""));
        strcpy(map, "{\"metadata\":{\"total_size\":1},\"weight_map\":{");
        for (int i = 0; i < n_tensors; i++) {
            int file = tensors[i].file;
            if (what == MISSING_IN_MAP && !strcmp(tensors[i].name, "model.layers.1.layer_scalar")) continue;
            if (what == SWAPPED && !strcmp(tensors[i].name, "model.norm.weight")) file = !file;
            append(map, MAP, "\"%s\":\"%s\",", tensors[i].name, file ? "b.safetensors" : "a.safetensors");
        }
        if (what == MISSING_IN_SHARD) append(map, MAP, "\"model.none\":\"b.safetensors\",");
        strcpy(strrchr(map, ','), "}}");
        write_text(index, map);
        if (what == MISSING_IN_MAP_LAST) add_tensor("zzz", 1, 1, 0, 0)->file = 1;
        if (what == WRONG_SHAPE) named("model.layers.0.mlp.up_proj.weight")->shape[0] = 7;
        write_weights("a.safetensors", 0);
        write_weights("b.safetensors", 1);
        if (what == NO_FILE) remove(in_dir("b.safetensors"));
        if (what >= CUT_1) {
            static const int cuts[] = {1, 100, 4096};
            g4_file f;
            if (g4_file_open(&f, in_dir("b.safetensors"), 1, &err)) exit(2);
            size_t left = f.size > (size_t)cuts[what - CUT_1] ? f.size - (size_t)cuts[what - CUT_1] : f.size / 2;
            write_file("b.safetensors", f.data, left);
            g4_file_close(&f);
        }
        int failed = open_model();
        switch (what) {
        case GOOD:
            CHECK(!failed && !n_warnings, "two shards: %s%s", failed ? err.text : "", warnings);
            if (!failed) check_fields("model.");
            break;
        case NO_FILE: says(failed, "no file", "b.safetensors: cannot open"); break;
        case MISSING_IN_SHARD:
            says(failed, "not in the shard", "weight_map puts tensor model.none into b.safetensors, but that file does not hold it");
            break;
        case MISSING_IN_MAP:
            says(failed, "not in the map", "holds tensor model.layers.1.layer_scalar, which weight_map in|does not put there");
            break;
        case MISSING_IN_MAP_LAST: says(failed, "not in the map", "b.safetensors: holds tensor zzz, which weight_map in"); break;
        case SWAPPED: says(failed, "in the other shard", "model.norm.weight"); break;
        case WRONG_SHAPE:
            says(failed, "a shape in a shard",
                 line("%s.safetensors: tensor model.layers.0.mlp.up_proj.weight: expected the shape [6,8] by config.json, found [7,8]",
                      named("model.layers.0.mlp.up_proj.weight")->file ? "b" : "a"));
            break;
        default: says(failed, "a shard cut short", "b.safetensors: |bytes are missing"); break;
        }
        g4_checkpoint_close(&model);
    }

    static const char *const bad_maps[][2] = {
        {"{", "index.json: line 1"},
        {"[]", "weight_map: expected an object"},
        {"{}", "weight_map: expected an object of tensor names and their files, found none"},
        {"{\"weight_map\":{}}", "weight_map: expected"},
        {"{\"weight_map\":[]}", "weight_map: expected"},
        {"{\"weight_map\":{\"a\":1}}", "weight_map: a: expected the name of a file, found 1"},
        {"{\"weight_map\":{\"a\":\"../a.safetensors\"}}",
         "weight_map: a: expected the name of a .safetensors file in the same directory, found \"../a.safetensors\""},
        {"{\"weight_map\":{\"a\":\"/etc/passwd\"}}", "in the same directory, found \"/etc/passwd\""},
        {"{\"weight_map\":{\"a\":\"x\\\\a.safetensors\"}}", "in the same directory"},
        {"{\"weight_map\":{\"a\":\"C:a.safetensors\"}}", "in the same directory"},
        {"{\"weight_map\":{\"a\":\"\"}}", "in the same directory"},
        {"{\"weight_map\":{\"a\":\"config.json\"}}", "a .safetensors file"},
        {"{\"weight_map\":{\"a\":\"a.safetensors\\u0000\"}}", "in the same directory"},
        {"{\"weight_map\":{\"a\\u0000\":\"a.safetensors\"}}", "NUL"},
    };
    for (size_t i = 0; i < sizeof bad_maps / sizeof bad_maps[0]; i++) {
        write_text(index, bad_maps[i][0]);
        says(open_model(), bad_maps[i][0], bad_maps[i][1]);
        g4_checkpoint_close(&model);
    }

    all_tensors("model.", 0);
    write_weights("model.safetensors", 0);
    int failed = open_model();
    CHECK(!failed && n_warnings == 1 && strstr(warnings, "model.safetensors.index.json: is not read"),
          "model.safetensors beside an index: %s%s", failed ? err.text : "", warnings);
    g4_checkpoint_close(&model);

    /* Without an index: numbered shards, or a single file whatever its name. */
    all_tensors("model.", 0);
    for (int i = 0; i < n_tensors; i++) tensors[i].file = i % 2;
    clear();
    write_text("config.json", config_text("", ""));
    write_weights("model-00001-of-00002.safetensors", 0);
    write_weights("model-00002-of-00002.safetensors", 1);
    failed = open_model();
    CHECK(!failed, "numbered shards: %s", err.text);
    if (!failed) check_fields("model.");
    g4_checkpoint_close(&model);
    remove(in_dir("model-00002-of-00002.safetensors"));
    says(open_model(), "half of the shards", "model-00002-of-00002.safetensors: cannot open");
    g4_checkpoint_close(&model);
    write_weights("model-00002-of-00002.safetensors", 0);
    says(open_model(), "the same tensors twice", "tensor model.embed_tokens.weight is in two of the files");
    g4_checkpoint_close(&model);
    free(map);
}

static void directories(void) {
    remove(in_dir("good.safetensors"));
    remove(in_dir("bad.safetensors"));
    all_tensors("model.", 0);
    clear();
    says(open_model(), "an empty directory", "config.json: cannot open");
    g4_checkpoint_close(&model);
    write_text("model.gguf", "GGUF");
    says(open_model(), "a directory of GGUF files", ": has no config.json, but model.gguf: to run that, give the file itself");
    g4_checkpoint_close(&model);
    clear();
    char *blanks = malloc((16 << 20) + 1);
    if (!blanks) exit(2);
    memset(blanks, ' ', (16 << 20) + 1);
    write_file("config.json", blanks, (16 << 20) + 1);
    free(blanks);
    says(open_model(), "a config.json of more than 16 MiB", "config.json: 16777217 bytes; expected at most 16777216");
    g4_checkpoint_close(&model);
    write_text("config.json", config_text("", ""));
    says(open_model(), "no weights", "no weights: expected model.safetensors, or model.safetensors.index.json and its files, found neither");
    g4_checkpoint_close(&model);
    write_text("model.gguf", "GGUF");
    says(open_model(), "GGUF weights", "found model.gguf");
    g4_checkpoint_close(&model);
    write_weights("a.safetensors", 0);
    int failed = open_model();
    CHECK(!failed, "one file with another name: %s", err.text);
    g4_checkpoint_close(&model);
    write_weights("b.safetensors", 0);
    says(open_model(), "two files", "holds 2 .safetensors files, but neither model.safetensors nor");
    g4_checkpoint_close(&model);

    static const struct {
        const char *path, *parts;
    } paths[] = {{"model.gguf", "model.gguf: ends inside the header"},
                 {"a.safetensors", "is a file, and no GGUF file; expected one, or a directory"},
                 {"none", "none: cannot open: "}};
    for (int i = 0; i < 3; i++) {
        memset(&model, 0, sizeof model);
        says(g4_checkpoint_open(&model, in_dir(paths[i].path), NULL, &err), paths[i].path, paths[i].parts);
        g4_checkpoint_close(&model);
    }
    memset(&model, 0, sizeof model);
    says(g4_checkpoint_open(&model, "", NULL, &err), "no path", "cannot open");
    g4_checkpoint_close(&model);
    CHECK(g4_checkpoint_open(&model, in_dir("none"), NULL, NULL) == -1, "a failure without an error to fill");
    g4_checkpoint_close(&model);

    set("model_type", "\"llama\"");
    refuses_model("another model", "config.json: model_type: expected one of gemma4|found \"llama\"");
}

static void generation(void) {
    static const struct {
        const char *text, *parts; /* parts NULL: fine */
    } cases[] = {
        {"{}", NULL},
        {"{\"eos_token_id\":1}", NULL},
        {"{\"eos_token_id\":[1,7]}", NULL},
        {"{\"eos_token_id\":null,\"top_k\":null,\"top_p\":null,\"suppress_tokens\":null}", NULL},
        {"{\"eos_token_id\":[1,6,5],\"suppress_tokens\":[8,9],\"do_sample\":false,\"temperature\":0.5,\"top_k\":7,\"top_p\":0.25,\"x\":[]}",
         NULL},
        {"{\"eos_token_id\":[1,106],\"suppress_tokens\":[258883,3]}", NULL},
        {"", "generation_config.json: line 1"},
        {"[]", "generation_config.json: expected an object"},
        {"{\"eos_token_id\":\"1\"}", "eos_token_id: expected a token id"},
        {"{\"eos_token_id\":[1,-1]}", "eos_token_id"},
        {"{\"eos_token_id\":1.5}", "eos_token_id"},
        {"{\"eos_token_id\":99999999999}", NULL},
        {"{\"suppress_tokens\":{}}", "suppress_tokens"},
        {"{\"do_sample\":1}", "do_sample: expected true or false"},
        {"{\"temperature\":-1}", "temperature: expected a number from 0"},
        {"{\"temperature\":\"hot\"}", "temperature"},
        {"{\"top_k\":-1}", "top_k: expected an integer from 0"},
        {"{\"top_k\":1.5}", "top_k"},
        {"{\"top_p\":1.5}", "top_p"},
        {"{\"top_p\":1e999}", "top_p"},
    };
    all_tensors("model.", 0);
    clear();
    write_text("config.json", config_text("", ""));
    write_weights("model.safetensors", 0);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        write_text("generation_config.json", cases[i].text);
        int failed = open_model();
        const g4_config *c = &model.config;
        if (cases[i].parts) says(failed, cases[i].text, cases[i].parts);
        else CHECK(!failed, "%s: %s", cases[i].text, err.text);
        if (i == 0 || i == 3)
            CHECK(c->n_eos == 2 && c->eos_token_id[1] == 5 && c->do_sample && c->top_k == 64 && c->top_p == 0.95f && c->temperature == 1 &&
                      !c->n_suppress,
                  "%s", cases[i].text);
        if (i == 1) CHECK(c->n_eos == 1 && c->eos_token_id[0] == 1, "%s", cases[i].text);
        if (i == 2) CHECK(c->n_eos == 2 && c->eos_token_id[1] == 7, "%s", cases[i].text);
        if (i == 4)
            CHECK(c->n_eos == 3 && c->eos_token_id[1] == 6 && c->n_suppress == 2 && c->suppress_tokens[1] == 9 && !c->do_sample &&
                      c->temperature == 0.5f && c->top_k == 7 && c->top_p == 0.25f,
                  "%s", cases[i].text);
        if (i == 5)
            CHECK(c->n_eos == 1 && c->n_suppress == 1 && c->suppress_tokens[0] == 3 && n_warnings == 2 && strstr(warnings, "258883"),
                  "ids outside the vocabulary: %s", warnings);
        g4_checkpoint_close(&model);
    }
    remove(in_dir("generation_config.json"));
    if (!make_directory(in_dir("generation_config.json"))) {
        says(open_model(), "a directory as generation_config.json", "generation_config.json: is a directory");
        g4_checkpoint_close(&model);
#if defined(_WIN32)
        _rmdir(in_dir("generation_config.json"));
#else
        rmdir(in_dir("generation_config.json"));
#endif
    }
}

/* Random changes of the header of a whole checkpoint, and every length of it: an answer, and nothing worse. */
static void mutations(void) {
    g4_file f;
    all_tensors("model.", 0);
    clear();
    write_text("config.json", config_text("", ""));
    write_weights("model.safetensors", 0);
    if (g4_file_open(&f, in_dir("model.safetensors"), 1, &err)) exit(2);
    unsigned char *copy = malloc(f.size);
    uint64_t seed = 11;
    int opened = 0, refused = 0;
    if (!copy) exit(2);
    size_t header = (size_t)(f.data[0] | f.data[1] << 8) + 8;
    for (int round = 0; round < 1500; round++) {
        memcpy(copy, f.data, f.size);
        size_t n = f.size;
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        if (round % 5 == 0) n = (size_t)(seed >> 33) % f.size;
        else copy[(seed >> 33) % header] = round % 2 ? (unsigned char)(seed >> 20) : (unsigned char)"0123456789[],:\"{}"[(seed >> 20) % 17];
        write_file("model.safetensors", copy, n);
        if (open_model()) refused++;
        else opened++;
        CHECK(!(round % 5 == 0 && model.lm_head.data), "a file cut to %llu bytes is opened", (unsigned long long)n);
        g4_checkpoint_close(&model);
    }
    CHECK(refused > 500 && opened > 0, "%d refused, %d opened", refused, opened);
    free(copy);
    g4_file_close(&f);
}

static void shared_models(void) {
    static const char *const names[] = {"micro-e2b", "micro-e4b", "micro-12b", "micro-31b", "micro-26b-a4b"};
    static const int L[] = {10, 12, 6, 6, 6}, P[] = {16, 16, 0, 0, 0}, shared[] = {5, 5, 0, 0, 0}, full_heads[] = {1, 2, 1, 2, 2},
                     E[] = {0, 0, 0, 0, 8};
    const char *root = getenv("SHARED");
    if (!root || !*root) {
        SKIP("the checkpoints of SHARED: it is not set");
        return;
    }
    for (int i = 0; i < 5; i++) {
        const char *path = line("%s/fixtures/%s", root, names[i]);
        memset(&model, 0, sizeof model);
        warnings[0] = 0;
        n_warnings = 0;
        int failed = g4_checkpoint_open(&model, path, &options, &err);
        const g4_config *c = &model.config;
        CHECK(!failed && !n_warnings, "%s: %s%s", path, failed ? err.text : "", warnings);
        if (!failed) {
            int last = c->num_hidden_layers - 1;
            CHECK(c->num_hidden_layers == L[i] && c->hidden_size_per_layer_input == P[i] && c->num_kv_shared_layers == shared[i] &&
                      c->num_experts == E[i] && c->layers[last].type == G4_FULL_ATTENTION && c->layers[last].head_dim == 32 &&
                      c->layers[0].head_dim == 16 && c->layers[last].num_key_value_heads == full_heads[i],
                  "%s: the config", names[i]);
            CHECK(model.layers[last].layer_scalar.data && !g4_checkpoint_ignored(&model, 0), "%s: all tensors are read", names[i]);
        }
        g4_checkpoint_close(&model);
    }
    const char *path = line("%s/configs/gemma-4-E2B-it.config.json", root);
    g4_file f;
    g4_config c;
    if (g4_file_open(&f, path, 0, &err)) {
        CHECK(0, "%s", err.text);
        return;
    }
    warnings[0] = 0;
    n_warnings = 0;
    int failed = g4_config_parse(&c, (const char *)f.data, f.size, path, &options, &err);
    CHECK(!failed && !n_warnings, "%s%s", failed ? err.text : "", warnings);
    if (!failed) {
        CHECK(!strcmp(c.model_type, "gemma4") && c.num_hidden_layers == 35 && c.hidden_size == 1536 && c.num_attention_heads == 8 &&
                  c.hidden_size_per_layer_input == 256 && c.num_kv_shared_layers == 20 && c.sliding_window == 512 &&
                  c.final_logit_softcapping == 30 && c.n_eos == 2 && c.eos_token_id[1] == 106,
              "E2B");
        for (int l = 0; l < 35; l++) {
            int full = l % 5 == 4;
            CHECK(c.layers[l].type == (full ? G4_FULL_ATTENTION : G4_SLIDING_ATTENTION) && c.layers[l].head_dim == (full ? 512 : 256) &&
                      c.layers[l].num_key_value_heads == 1 && c.layers[l].intermediate_size == (l < 15 ? 6144 : 12288) &&
                      c.layers[l].kv_layer == (l < 15 ? l
                                               : full ? 14
                                                      : 13),
                  "E2B, layer %d", l);
        }
        free(c.layers);
    }
    g4_file_close(&f);
}

int main(int argc, char **argv) {
    (void)argc;
    snprintf(dir, sizeof dir, "%s.files", argv[0]);
    if (make_directory(dir) && errno != EEXIST) {
        printf("cannot make %s: %s\n", dir, strerror(errno));
        return 2;
    }
    static const char *const left[] = {"five", "empty", "a.safetensors", "good.safetensors", "bad.safetensors"};
    clear();
    files();
    safetensors();
    config_values();
    for (int i = 0; i < 5; i++) remove(in_dir(left[i]));
    checkpoints();
    shards();
    directories();
    generation();
    mutations();
    shared_models();
    clear();
#if defined(_WIN32)
    _rmdir(dir);
#else
    rmdir(dir);
#endif
    return test_done("checkpoint");
}
