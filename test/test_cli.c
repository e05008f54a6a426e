/* test_cli.c - ./gemma4 as a process: what it prints, where, and its status, for every command and every kind of error.
 *
 * Uses the shipped model (models/austen), test/fixtures/e2b and 26b-a4b with transformers' results beside them, and files that are
 * written here byte by byte. Values that a command must print are worked out here again. Needs a POSIX shell.
 */
#define G4_EXACT_FLOAT
#include "gemma4.h"
#include "test.h"

#include <math.h>

#ifdef _WIN32
int main(void) {
    SKIP("test_cli needs a POSIX shell");
    return test_done("test_cli");
}
#else
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static const char *gemma4;                /* path of the program */
static char dir[] = "/tmp/gemma4-cli-XXXXXX";
static char out[1 << 20], err_text[1 << 16]; /* of the last run */
static size_t out_size;
static int status;
static char e2b[512] = "test/fixtures/e2b";
static const char *moe = "test/fixtures/26b-a4b";

static size_t slurp(const char *name, char *to, size_t room) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "rb");
    size_t n = f ? fread(to, 1, room - 1, f) : 0;
    if (f) fclose(f);
    to[n] = 0;
    return n;
}

static void put_file(const char *name, const char *data, size_t n) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(data, 1, n, f) != n || fclose(f)) {
        printf("FAILED: cannot write %s\n", path);
        exit(1);
    }
}

/* Runs a shell line. $G is the program, $D the directory for files, $M the fixture e2b; standard input is empty unless the line says otherwise.
 * Fills out, err_text, status. */
static void sh(const char *format, ...) {
    char line[8192];
    va_list args;
    int n = snprintf(line, sizeof line, "G='%s' D='%s' M='%s'; { ", gemma4, dir, e2b);
    va_start(args, format);
    n += vsnprintf(line + n, sizeof line - (size_t)n, format, args);
    va_end(args);
    snprintf(line + n, sizeof line - (size_t)n, "\n} > '%s/out' 2> '%s/err' < /dev/null", dir, dir);
    fflush(stdout);
    int result = system(line);
    status = WIFEXITED(result) ? WEXITSTATUS(result) : 1000 + result;
    out_size = slurp("out", out, sizeof out);
    slurp("err", err_text, sizeof err_text);
}

/* Status 2, nothing on stdout, one line on stderr that begins "gemma4: " and holds `part`. `command` gets -q. */
static void expect_error(const char *part, const char *format, ...) {
    char command[4096];
    va_list args;
    va_start(args, format);
    vsnprintf(command, sizeof command, format, args);
    va_end(args);
    sh("%s", command);
    char *newline = strchr(err_text, '\n');
    CHECK(status == 2, "%s: status %d, stderr %s", command, status, err_text);
    CHECK(out_size == 0, "%s: stdout %s", command, out);
    CHECK(!strncmp(err_text, "gemma4: ", 8) && newline && !newline[1], "%s: stderr is one line \"gemma4: ...\": %s", command, err_text);
    CHECK(strstr(err_text, part), "%s: the line names %s: %s", command, part, err_text);
}

static int lines(const char *text) {
    int n = 0;
    for (; *text; text++) n += *text == '\n';
    return n;
}

/* ---- Command line ---- */

static void test_help(void) {
    sh("$G --version");
    CHECK(status == 0 && !strcmp(out, "gemma4 " G4_VERSION "\n") && !*err_text, "--version: %d %s%s", status, out, err_text);
    static const char *const commands[] = {"run", "tokenize", "detokenize", "logits", "trace", "diff", "hash", "score", "info", "help"};
    sh("$G help");
    CHECK(status == 0 && !*err_text, "help: %d %s", status, err_text);
    for (int i = 0; i < 10; i++) CHECK(strstr(out, commands[i]), "help names %s", commands[i]);
    for (int i = 0; i < 10; i++) {
        static char text[sizeof out];
        sh("$G help %s", commands[i]);
        CHECK(status == 0 && strstr(out, commands[i]) && strstr(out, "--quiet"), "help %s: %d", commands[i], status);
        strcpy(text, out);
        if (i < 9) sh("$G %s --help", commands[i]);
        CHECK(status == 0 && !strcmp(out, text), "%s --help is help %s", commands[i], commands[i]);
    }
    sh("$G --help && $G -h");
    CHECK(status == 0 && strstr(out, "detokenize"), "--help");
    expect_error("nosuch", "$G help nosuch");
    expect_error("nosuch", "$G nosuch");
    expect_error("help", "$G");
    expect_error("unexpected", "$G help run trace");
}

static void test_options(void) {
    expect_error("--nosuch", "$G run --nosuch");
    expect_error("--nosuch", "$G info --nosuch=3");
    expect_error("unknown option -x", "$G run -x");
    expect_error("unknown option -", "$G run -");
    expect_error("does not take --temp", "$G tokenize --temp 1");
    expect_error("does not take --ids", "$G tokenize --ids 1");
    expect_error("does not take --tensors", "$G logits --tensors x");
    expect_error("does not take --rtol", "$G run --rtol 1");
    expect_error("does not take --ctx", "$G diff --ctx 1 a b");
    static const char *const with_value[] = {
        "-p", "-f", "--ids", "-n", "--temp", "--top-k", "--top-p", "--min-p", "--repeat-penalty", "--seed", "--backend", "--threads",
        "--ctx", "--chunk", "--precision", "--frequency-penalty", "--presence-penalty", "--logit-bias",
        "--prefetch", "--stop", "--speculate"
    };
    for (int i = 0; i < 21; i++) expect_error("needs a value", "$G run $M %s", with_value[i]);
    expect_error("takes no value", "$G run --ignore-eos=1");
    expect_error("one of -p, -f and --ids", "$G run -p x -f y");
    expect_error("one of -p, -f and --ids", "$G hash -p x --ids 1");
    expect_error("right after the command", "$G run -p x $M");
    expect_error("right after the command", "$G run $M other");
    static const char *const wrong[] = {
        "-n -1", "-n 2147483648", "-n 1.5", "-n ''", "-n 0x10", "-n ' 1'", "-n +1", "--temp -1", "--temp nan", "--temp inf",
        "--temp 1e999", "--temp 0x1", "--temp 1,5", "--temp ''", "--temp 1e", "--temp true", "--temp '1 2'", "--top-k -1",
        "--top-k 99999999999", "--top-p 1.01", "--top-p -0.1", "--min-p 2", "--repeat-penalty 0", "--repeat-penalty -1", "--seed -1",
        "--seed 18446744073709551616", "--seed x", "--threads 0", "--threads 1025", "--threads x", "--ctx 0", "--ctx -1",
        "--ctx 2147483648", "--ctx 1099511627776", "--chunk 0", "--chunk 65537", "--precision f16", "--precision ''", "--prefetch most", "--frequency-penalty 101", "--frequency-penalty x", "--presence-penalty -101", "--logit-bias ''",
        "--logit-bias 5", "--logit-bias 5:", "--logit-bias :5", "--logit-bias 160:1", "--logit-bias 99999999999:1", "--logit-bias 5:nan", "--logit-bias 5:1,",
        "--logit-bias 5:1,,6:1", "--logit-bias -5:1", "--logit-bias 5:1e7", "--speculate 65", "--speculate on", "--speculate ''", "--stop x"
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        char name[32];
        snprintf(name, sizeof name, "%.*s", (int)strcspn(wrong[i], " "), wrong[i]);
        expect_error(name, "$G run $M --ids 1 -q %s", wrong[i]);
    }
    expect_error("4096", "$G run $M --ids 1 -q --ctx 4097");
    sh("$G run $M --ids 1 -q -n 3 --temp=0 --seed=18446744073709551615 --top-k 0 --top-p .5 --min-p 0.0 --repeat-penalty 1.0e0 --threads 1 --ctx 4096 --chunk 65536 --precision f32");
    CHECK(status == 0 && lines(out) == 1, "good values: %d %s", status, err_text);
    for (int i = 0; i < 5; i++) {
        static const char *const zero[] = {"0", "-0.0", "1e-7", "1e-45", "0e5"};
        static char first[sizeof out];
        sh("$G run $M --ids 1,2,3 -q -n 8 --temp %s --seed %d", zero[i], i);
        if (i == 0) strcpy(first, out);
        CHECK(status == 0 && !strcmp(out, first), "--temp %s is greedy: %s", zero[i], out);
    }

    sh("$G run --backend list; GEMMA4_BACKEND=list $G hash");
    CHECK(status == 0 && strstr(out, "scalar") && strstr(out, "can run here") && !*err_text, "--backend list: %d %s%s", status, out,
          err_text);
    expect_error("nosuch", "$G run $M --ids 1 --backend nosuch");
    expect_error("nosuch", "GEMMA4_BACKEND=nosuch $G run $M --ids 1");
    sh("GEMMA4_BACKEND=nosuch $G hash $M --ids 1 --backend scalar -q");
    CHECK(status == 0, "the option outranks the environment: %s", err_text);
    expect_error("GEMMA4_THREADS", "GEMMA4_THREADS=0 $G hash $M --ids 1");
    expect_error("GEMMA4_THREADS", "GEMMA4_THREADS=two $G hash $M --ids 1");
    sh("GEMMA4_THREADS=3 $G hash $M --ids 1");
    CHECK(status == 0 && strstr(err_text, "threads 3"), "GEMMA4_THREADS: %s", err_text);
    sh("GEMMA4_THREADS=3 $G hash $M --ids 1 --threads 2");
    CHECK(status == 0 && strstr(err_text, "threads 2"), "--threads outranks it: %s", err_text);
}

static void test_ids(void) {
    static const char *const wrong[] = {
        "", ",", "1,", ",1", "1,,2", "+1", "-1", "1,-1", " 1", "1 ", "1, 2", "0x1", "1.0", "1a", "1;2", "99999999999", "2147483648",
        "18446744073709551617", "\t1", "1\n2", "١"
    };
    static const char *const commands[] = {"run", "hash", "logits", "trace", "score"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) expect_error("--ids", "$G %s $M -q --ids '%s'", commands[i % 5], wrong[i]);
    for (int i = 0; i < 5; i++) {
        expect_error("item 2: id 160 is outside", "$G %s $M -q --ids 159,160", commands[i]);
        expect_error("outside", "$G %s $M -q --ids 2147483647", commands[i]);
    }
    sh("$G hash $M -q --ids 159,0,007");
    CHECK(status == 0, "the first and last id: %s", err_text);
    for (int i = 0; i < 3; i++) expect_error("--ids", "$G %s $M", commands[1 + i]);
}

static void test_missing(void) {
    expect_error("/nosuch/model", "$G run /nosuch/model --ids 1");
    expect_error("/nosuch/model", "$G info /nosuch/model");
    expect_error("/nosuch/model", "$G tokenize /nosuch/model -p x");
    expect_error("tokenizer", "$G run $M -p x");
    expect_error("tokenizer", "$G tokenize $M -p x");
    sh("cp $G $D/alone && cd $D && ./alone run --ids 1");
    if (status == 2) CHECK(strstr(err_text, "models/austen") && lines(err_text) == 1, "no shipped model: %s", err_text);
    else SKIP("a shipped model is installed, so its absence cannot be seen");
}

/* ---- Numbers ---- */

static g4_safetensors open_file(const char *name) {
    char path[256];
    g4_error err;
    g4_safetensors st = {0};
    snprintf(path, sizeof path, "%s/%s", dir, name);
    CHECK(g4_safetensors_open(&st, path, 1, &err) == 0, "%s: %s", name, err.text);
    return st;
}

static float f32_at(const g4_st_tensor *t, int64_t i) {
    const unsigned char *p = t->data + 4 * i;
    uint32_t w = (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
    float f;
    memcpy(&f, &w, 4);
    return f;
}

static int is_shape(const g4_st_tensor *t, const char *dtype, int rank, int64_t a, int64_t b, int64_t c) {
    const int64_t shape[3] = {a, b, c};
    return t && !strcmp(t->dtype, dtype) && t->rank == rank && !memcmp(t->shape, shape, (size_t)rank * sizeof *shape);
}

/* ids of the fixture, as a list for the command line. */
static void fixture_ids(const char *model, char *list, size_t room, const char *tensor) {
    char path[512];
    g4_error err;
    g4_safetensors st = {0};
    snprintf(path, sizeof path, "%s/expected.safetensors", model);
    CHECK(!g4_safetensors_open(&st, path, 1, &err), "%s", err.text);
    const g4_st_tensor *t = g4_safetensors_find(&st, tensor);
    size_t n = 0;
    list[0] = 0;
    for (int64_t i = 0; t && i < t->shape[0]; i++)
        n += (size_t)snprintf(list + n, room - n, "%s%d", i ? tensor[0] == 'i' ? "," : " " : "",
            (int)(t->data[4 * i] | t->data[4 * i + 1] << 8));
    g4_safetensors_close(&st);
}

static void test_trace(void) {
    char ids[512], greedy[512];
    fixture_ids(e2b, ids, sizeof ids, "ids");
    fixture_ids(e2b, greedy, sizeof greedy, "greedy");

    sh("$G trace $M --ids %s -o $D/t.safetensors -q && ls $D", ids);
    CHECK(status == 0 && !*err_text && lines(out) >= 5, "trace: %d %s", status, err_text);
    CHECK(!strstr(out, ".part"), "nothing else is left: %s", out);
    g4_safetensors t = open_file("t.safetensors");
    static const char *const first[] = {
        "ids", "embeddings", "per_layer_inputs", "layers.0.k", "layers.0.v", "layers.0.q", "layers.0.attention", "layers.0.o_proj",
        "layers.0.attn_residual", "layers.0.mlp", "layers.0.ffn_residual", "layers.0.ple_gate", "layers.0.ple", "layers.0.output",
        "layers.1.k"
    };
    for (int i = 0; i < 15; i++) {
        const char *name = i < t.n ? t.tensors[i].name : "-";
        CHECK(!strcmp(name, first[i]), "tensor %d is %s, expected %s", i, name, first[i]);
    }
    CHECK(t.n > 2 && !strcmp(t.tensors[t.n - 2].name, "norm") && !strcmp(t.tensors[t.n - 1].name, "logits"), "norm and logits come last");
    CHECK(is_shape(g4_safetensors_find(&t, "ids"), "I32", 1, 20, 0, 0), "ids [T]");
    CHECK(is_shape(g4_safetensors_find(&t, "embeddings"), "F32", 2, 20, 36, 0), "embeddings [T][D]");
    CHECK(is_shape(g4_safetensors_find(&t, "per_layer_inputs"), "F32", 3, 20, 10, 8), "per_layer_inputs [T][L][P]");
    CHECK(is_shape(g4_safetensors_find(&t, "layers.9.output"), "F32", 2, 20, 36, 0), "layers.9.output [T][D]");
    CHECK(is_shape(g4_safetensors_find(&t, "norm"), "F32", 2, 20, 36, 0), "norm [T][D]");
    CHECK(is_shape(g4_safetensors_find(&t, "logits"), "F32", 2, 20, 160, 0), "logits [T][V]");
    CHECK(g4_safetensors_find(&t, "layers.4.k") && !g4_safetensors_find(&t, "layers.5.k") && g4_safetensors_find(&t, "layers.5.q"),
          "k only where a layer owns it");

    /* the hash, again; and the five best, again */
    const g4_st_tensor *logits = g4_safetensors_find(&t, "logits");
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; logits && i < logits->bytes; i++) hash = (hash ^ logits->data[i]) * 0x100000001b3u;
    char expected[64], more[256];
    snprintf(expected, sizeof expected, "%016llx\n", (unsigned long long)hash);
    static const char *const ways[] = {
        "", "--chunk 1", "--chunk 3 --threads 1", "--chunk 7 --threads 3", "--ctx 20", "--no-mmap", "--backend scalar", "--prefetch none", "--prefetch all"
    };
    for (int i = 0; i < 9; i++) {
        sh("$G hash $M --ids %s -q %s", ids, ways[i]);
        CHECK(status == 0 && !strcmp(out, expected) && !*err_text, "hash %s: %s%s, expected %s", ways[i], out, err_text, expected);
    }
    sh("$G logits $M --ids %s -q -o $D/l.safetensors", ids);
    char *line = out;
    float last = INFINITY;
    CHECK(status == 0 && lines(out) == 5, "five best: %s", out);
    for (int k = 0; k < 5 && logits; k++) {
        int id = -1, better = 0;
        float value = NAN;
        CHECK(sscanf(line, "%d %f", &id, &value) == 2 && id >= 0 && id < 160, "line %d: %s", k + 1, line);
        if (id < 0 || id >= 160) break;
        float exact = f32_at(logits, 19 * 160 + id);
        for (int i = 0; i < 160; i++) better += f32_at(logits, 19 * 160 + i) > exact;
        CHECK(better == k && fabsf(exact - value) < 1e-6f && exact <= last, "number %d is id %d with %g", k + 1, id, (double)value);
        last = exact;
        line += strcspn(line, "\n");
        line += *line == '\n';
    }
    strcpy(more, out);
    sh("$G logits $M --ids %s -q", ids);
    CHECK(!strcmp(out, more), "without -o only the last position is computed, to the same logits: %s", out);
    g4_safetensors l = open_file("l.safetensors");
    CHECK(l.n == 2 && is_shape(&l.tensors[0], "I32", 1, 20, 0, 0) && is_shape(&l.tensors[1], "F32", 2, 20, 160, 0) && logits
          && !memcmp(l.tensors[1].data, logits->data, logits->bytes),
          "logits -o holds ids and logits");
    g4_safetensors_close(&l);

    sh("$G trace $M --ids %s -o $D/c.safetensors -q --chunk 3 && cmp $D/t.safetensors $D/c.safetensors", ids);
    CHECK(status == 0, "the chunk changes no byte of a trace: %s", out);
    sh("$G trace $M --ids %s -o $D/g.safetensors -q --tensors 'layers.?.out*,norm'", ids);
    g4_safetensors g = open_file("g.safetensors");
    CHECK(status == 0 && g.n == 11 && !strcmp(g.tensors[0].name, "layers.0.output") && !strcmp(g.tensors[10].name, "norm"),
          "--tensors: %d tensors %s", g.n, err_text);
    g4_safetensors_close(&g);
    sh("$G trace $M --ids %s -o $D/g.safetensors -q --tensors '*.k' && $G diff $D/g.safetensors $D/t.safetensors | tail -n 1", ids);
    CHECK(status == 0 && !strcmp(out + strlen(out) - 19, "all 5 in tolerance\n"), "--tensors '*.k': %s", out);
    expect_error("matches no tensor", "$G trace $M --ids 1 -o $D/n.safetensors -q --tensors 'nosuch*'");
    sh("ls $D/n.safetensors*");
    CHECK(status != 0, "and nothing is written");
    g4_safetensors_close(&t);

    sh("$G diff $D/t.safetensors $M/expected.safetensors --rtol 2.7e-5"); /* 3 x noise_f32, transformers' own distance from float64 */
    CHECK(status == 0 && strstr(out, "\nall ") && strstr(out, "only in B: greedy"), "diff with transformers: %d %s", status, out);
    sh("$G run $M --ids %s -q --temp 0 -n 16 --ignore-eos", ids);
    out[strcspn(out, "\n")] = 0;
    CHECK(status == 0 && !strcmp(out, greedy), "greedy ids are transformers': %s, expected %s", out, greedy);

    fixture_ids(moe, ids, sizeof ids, "ids");
    sh("$G trace %s --ids %s -o $D/m.safetensors -q && $G diff $D/m.safetensors %s/expected.safetensors", moe, ids, moe);
    CHECK(status == 0, "a MoE: %d %s%s", status, out, err_text);
    g4_safetensors m = open_file("m.safetensors");
    int at = 0;
    while (at < m.n && strcmp(m.tensors[at].name, "layers.0.mlp")) at++;
    CHECK(at + 4 < m.n && !strcmp(m.tensors[at + 1].name, "layers.0.router_index") && !strcmp(m.tensors[at + 2].name,
          "layers.0.router_weight")
              && !strcmp(m.tensors[at + 3].name, "layers.0.experts") && !strcmp(m.tensors[at + 4].name, "layers.0.ffn_residual"),
          "the MoE's tensors follow the MLP's");
    g4_safetensors_close(&m);
}

static void test_writing(void) {
    static const char *const commands[] = {
        "run $M --ids 1 -n 4", "hash $M --ids 1", "logits $M --ids 1", "trace $M --ids 1 -o $D/w.safetensors", "score $M --ids 1,2",
        "score $M --ids 1,2 --json", "info $M", "info $M --json", "help", "help run", "--version", "run --backend list",
        "diff $D/t.safetensors $D/t.safetensors"
    };
    if (access("/dev/full", W_OK)) {
        SKIP("no /dev/full");
    } else {
        for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
            sh("$G %s > /dev/full", commands[i]);
            CHECK(status == 2 && strstr(err_text, "gemma4: cannot write"), "%s > /dev/full: %d %s", commands[i], status, err_text);
        }
        /* through a link: a program that replaced its output by renaming would replace the link, not the device */
        expect_error("full", "ln -s /dev/full $D/full; $G logits $M --ids 1 -q -o $D/full");
        sh("test -L $D/full && test -c $D/full");
        CHECK(status == 0, "a device is written to and stays where it is");
    }
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
        sh("$G %s >&-", commands[i]);
        CHECK(status == 2, "%s with stdout closed: %d %s", commands[i], status, err_text);
    }
    sh("ln -s /dev/null $D/null; $G logits $M --ids 1 -q -o $D/null && test -L $D/null && test -c $D/null");
    CHECK(status == 0, "-o to the null device: %s", err_text);
    expect_error("/nosuch/dir", "$G logits $M --ids 1 -q -o /nosuch/dir/x.safetensors");
    expect_error("cannot create", "$G logits $M --ids 1 -q -o $D");
    sh("$G logits $M --ids 1 -q -o $D/o.safetensors >&- ; $G diff $D/o.safetensors $D/o.safetensors -q");
    CHECK(status == 0, "with stdout closed nothing strays into the file: %s", err_text);
    sh("($G run models/austen --ids 2 -n 30000 --ctx 32768 --ignore-eos; echo $? > $D/st) | head -c 1; cat $D/st");
    CHECK(!strcmp(out + 1, "2\n"), "a reader that goes away: status %s", out);
    CHECK(!strstr(err_text, "gemma4: "), "and no message: %s", err_text);
}

static void test_context(void) {
    char ids[64 * 5 + 1] = "";
    for (int i = 0; i < 63; i++) sprintf(ids + strlen(ids), "%s%d", i ? "," : "", i + 3);
    const struct {
        const char *more;
        int n_prompt, n;
    } cases[] = {{"", 63, 1}, {",1", 64, 0}, {",1,2", 65, -1}};
    for (int i = 0; i < 3; i++) {
        if (cases[i].n < 0) {
            expect_error("n_prompt 65, n_ctx 64", "$G run $M --ids %s%s -q --ctx 64 -n 100 --ignore-eos", ids, cases[i].more);
            expect_error("n_prompt 65, n_ctx 64", "$G score $M --ids %s%s -q --ctx 64", ids, cases[i].more);
            continue;
        }
        sh("$G run $M --ids %s%s --ctx 64 -n 100 --ignore-eos", ids, cases[i].more);
        int n = out[0] == '\n' ? 0 : 1;
        for (char *c = out; *c; c++) n += *c == ' ';
        CHECK(status == 0 && n == cases[i].n, "%d of 64: %d new ids: %s", cases[i].n_prompt, n, out);
        CHECK(strstr(err_text, "context is full") && strstr(err_text, "n_ctx 64"), "and it says so: %s", err_text);
    }
    ids[strlen(ids) - 1] = 0; /* the last id of 63 loses a digit */
    sh("$G run $M --ids %s --ctx 64 -n 1 --ignore-eos", ids);
    CHECK(status == 0 && !strstr(err_text, "context is full"), "-n reached: no word of the context: %s", err_text);
    sh("$G run $M --ids 5,6,7 -n 0");
    CHECK(status == 0 && !strcmp(out, "\n"), "-n 0: %s", out);
    sh("$G run $M --ids 5,6,7 -n 1000000000 --ctx 8 --ignore-eos -q");
    CHECK(status == 0 && !*err_text, "-n of a billion ends with the context, -q says nothing: %s", err_text);
    sh("$G hash $M --ids 5 --ctx 1 -q && $G run $M --ids 5 --ctx 1 -q");
    CHECK(status == 0, "a context of one: %s", err_text);

    /* teacher forcing has the context of its prompt, more than the 4096 that run would have only if the model allows it */
    static char many[4097 * 2 + 1];
    for (int i = 0; i < 4097; i++) memcpy(many + 2 * i, i < 4096 ? "5," : "5", i < 4096 ? 3 : 2);
    put_file("many", many, strlen(many));
    expect_error("n_prompt 4097, n_ctx 4096", "$G hash $M -q --ids $(cat $D/many)");
}

static void test_run(void) {
    static char first[sizeof out];
    sh("$G run $M --ids 1,2,3 -n 40 --seed 7 --temp 1.5 --ignore-eos");
    strcpy(first, out);
    CHECK(status == 0 && strstr(err_text, "seed 7") && strstr(err_text, "/s") && strstr(err_text, "backend "), "the summary: %s", err_text);
    sh("$G run $M --ids 1,2,3 -n 40 --seed 7 --temp 1.5 --ignore-eos -q --chunk 2 --threads 1");
    CHECK(!strcmp(out, first) && !*err_text, "a seed gives one text");
    sh("$G run $M --ids 1,2,3 -n 40 --seed 8 --temp 1.5 --ignore-eos -q");
    CHECK(strcmp(out, first), "another seed gives another");
    sh("$G run $M --ids 1,2,3 -n 40 --seed 0 --temp 1.5 --ignore-eos -q; $G run $M --ids 1,2,3 -n 40 --seed 0 --temp 1.5 --ignore-eos -q");
    size_t half = out_size / 2;
    CHECK(!memcmp(out, out + half, half) && memcmp(out, first, half), "0 is a seed");
    sh("$G run $M --ids 1,2,3 -n 40 --temp 1.5 --ignore-eos -q");
    strcpy(first, out);
    sh("$G run $M --ids 1,2,3 -n 40 --temp 1.5 --ignore-eos -q");
    CHECK(strcmp(out, first), "no seed: another text each time");

    /* greedy until the stop id of config.json, which is 1: a copy of the model whose stop id is the third greedy id */
    sh("$G run $M --ids 9,8,7 -n 12 --temp 0 --ignore-eos -q");
    int id[3];
    char *third = out;
    CHECK(sscanf(out, "%d %d %d", &id[0], &id[1], &id[2]) == 3, "three ids: %s", out);
    for (int k = 0; k < 2; k++) third = strchr(third, ' ') + 1;
    int stop = id[2], repeated = id[2] == id[0] || id[2] == id[1];
    strcpy(first, out);
    if (repeated) {
        SKIP("the third greedy id repeats an earlier one");
    } else {
        first[third - out - 1] = 0;
        sh("mkdir -p $D/stop && cp $M/config.json $M/model.safetensors $D/stop && echo '{\"eos_token_id\": [3, %d], \"do_sample\": false}' > $D/stop/generation_config.json && $G run $D/stop --ids 9,8,7 -n 12 -q", stop);
        CHECK(status == 0 && !strncmp(out, first, strlen(first)) && !strcmp(out + strlen(first), "\n"),
              "the stop id ends and is not printed: %s", out);
        sh("echo '{\"eos_token_id\": 3, \"suppress_tokens\": [%d]}' > $D/stop/generation_config.json && $G run $D/stop --ids 9,8,7 -n 12 -q --temp 0", id[0]);
        CHECK(status == 0 && atoi(out) != id[0], "suppress_tokens: %s", out);
        sh("$G logits $D/stop --ids 9,8,7 -q | head -n 1");
        CHECK(atoi(out) == id[0], "which a logits dump does not show");
    }
    sh("$G run $M --ids 9,8,7 -n 12 --temp 0 --ignore-eos -q --repeat-penalty 100 | tr ' ' '\\n' | sort -n | uniq -d");
    CHECK(status == 0 && !*out, "--repeat-penalty: %s", out);
    for (int i = 0; i < 2; i++) {
        sh("$G run $M --ids 9,8,7 -n 12 --temp 0 --ignore-eos -q --%s-penalty 100 | tr ' ' '\\n' | sort -n | uniq -d", i ? "presence" : "frequency");
        CHECK(status == 0 && !*out, "--%s-penalty: %s", i ? "presence" : "frequency", out);
    }
    sh("$G run $M --ids 9,8,7 -n 3 --temp 0 --ignore-eos -q --logit-bias 5:1000,%d:1; $G run $M --ids 9,8,7 -n 1 --ignore-eos -q --temp 0 --logit-bias %d:-1e3", id[0], id[0]);
    CHECK(status == 0 && !strncmp(out, "5 5 5\n", 6) && atoi(out + 6) != id[0], "--logit-bias: %s", out);

    /* drafts change the speed and the summary, not the text */
    sh("$G run $M --ids 9,8,7,9,8 -n 40 --seed 4 --ignore-eos --logit-bias 9:20,8:20 --speculate off");
    CHECK(status == 0 && !strstr(err_text, "drafted"), "--speculate off: %s", err_text);
    strcpy(first, out);
    for (int i = 1; i < 9; i += 3) {
        sh("$G run $M --ids 9,8,7,9,8 -n 40 --seed 4 --ignore-eos --logit-bias 9:20,8:20 --speculate %d", i);
        CHECK(status == 0 && !strcmp(out, first) && strstr(err_text, "drafted") && strstr(err_text, "tokens per step"), "--speculate %d: %s", i, err_text);
    }
}

static void test_score(void) {
    char ids[512];
    fixture_ids(e2b, ids, sizeof ids, "ids");
    sh("$G score $M -q --ids %s", ids);
    g4_safetensors l = open_file("l.safetensors");
    const g4_st_tensor *t = g4_safetensors_find(&l, "logits"), *list = g4_safetensors_find(&l, "ids");
    double sum = 0, printed = NAN, perplexity = NAN;
    char *line = strchr(out, '\n');
    CHECK(status == 0 && lines(out) == 23 && line, "score: %d %s", status, err_text);
    for (int i = 1; t && list && line && i < 20; i++, line = strchr(line + 1, '\n')) {
        int id = list->data[4 * i] | list->data[4 * i + 1] << 8, n, seen;
        double total = 0, value = NAN;
        for (int v = 0; v < 160; v++) total += exp((double)f32_at(t, (i - 1) * 160 + v));
        double expected = (double)f32_at(t, (i - 1) * 160 + id) - log(total);
        sum += expected;
        CHECK(sscanf(line, "%d %d %lf", &n, &seen, &value) == 3 && n == i && seen == id && fabs(value - expected) < 1e-6,
              "token %d: %.60s, expected %f", i, line, expected);
    }
    CHECK(line && sscanf(line, "\nscored 19\nsum %lf\nperplexity %lf", &printed, &perplexity) == 2 && fabs(printed - sum) < 1e-5
          && fabs(perplexity / exp(-sum / 19) - 1) < 1e-6,
          "the sum %f and the perplexity %f: %s", sum, exp(-sum / 19), line);
    g4_safetensors_close(&l);
    sh("$G score $M -q --json --ids %s", ids);
    g4_json j;
    g4_error err;
    double value = NAN;
    CHECK(status == 0 && lines(out) == 1 && !g4_json_parse(&j, out, out_size, "score --json", &err), "JSON: %s", err.text);
    CHECK(!g4_json_double(&j, g4_json_get(&j, 0, "sum"), &value) && fabs(value - sum) < 1e-6, "sum %f", value);
    CHECK(j.nodes[g4_json_get(&j, 0, "tokens")].size == 20, "20 tokens");
    CHECK(j.nodes[g4_json_get(&j, j.nodes[g4_json_get(&j, 0, "tokens")].first, "logprob")].kind == G4_JSON_NULL, "the first has none");
    g4_json_free(&j);
    expect_error("two at least", "$G score $M -q --ids 5");
}

/* What a checkpoint holds beyond the text model, and what is odd about its config, is said. */
static void test_notices(void) {
    sh("$G info ${M%%e2b}multimodal -q");
    char *list = strstr(out, "tensors of the checkpoint that are not read:\n");
    CHECK(status == 0 && list && strstr(list, "\nmodel.vision_tower.patch_embedder.input_proj.weight\n"), "info lists what is not read: %s", out);
    g4_json j;
    g4_error err;
    sh("$G info ${M%%e2b}multimodal -q --json");
    CHECK(status == 0 && !g4_json_parse(&j, out, out_size, "info --json", &err), "info --json: %d %s", status, err_text);
    uint32_t ignored = g4_json_get(&j, 0, "ignored");
    int found = 0;
    for (uint32_t i = j.nodes[ignored].first; i; i = j.nodes[i].next) found += !strcmp(g4_json_string(&j, i), "model.embed_vision.embedding_projection.weight");
    CHECK(ignored && j.nodes[ignored].size > 2 && found == 1, "and as JSON: %s", out);
    g4_json_free(&j);
    sh("$G hash ${M%%e2b}bare --ids 5,6");
    CHECK(status == 0 && strstr(err_text, "warning: ") && strstr(err_text, "the last layer is sliding_attention; it is forced to full_attention"), "a warning: %s", err_text);
    sh("$G hash ${M%%e2b}bare --ids 5,6 -q");
    CHECK(status == 0 && !*err_text, "and none with -q: %s", err_text);
}

static void test_info(void) {
    g4_json j;
    g4_error err;
    int64_t n = 0;
    sh("$G info $M --json -q --ctx 100 --chunk 5");
    CHECK(status == 0 && lines(out) == 1 && !*err_text && !g4_json_parse(&j, out, out_size, "info --json", &err), "info --json: %d %s",
          status, err_text);
    const struct {
        const char *key;
        int64_t value;
    } expected[] = {
        {"vocab_size", 160}, {"hidden_size", 36}, {"num_hidden_layers", 10}, {"num_attention_heads", 4},
        {"hidden_size_per_layer_input", 8}, {"sliding_window", 6}, {"num_kv_shared_layers", 5}, {"max_position_embeddings", 4096},
        {"num_experts", 0}, {"embedding_parameters", 160 * 36}, {"per_layer_table_parameters", 160 * 80}, {"ctx", 100}
    };
    for (size_t i = 0; i < sizeof expected / sizeof *expected; i++)
        CHECK(!g4_json_int(&j, g4_json_get(&j, 0, expected[i].key), &n) && n == expected[i].value, "%s is %lld, expected %lld",
              expected[i].key, (long long)n, (long long)expected[i].value);
    /* 4 sliding layers with own K/V of 16 in rings of 6 - 1 + 5, one full of 32 with 100 rows; 4 bytes, K and V; each rounded up to 64 bytes */
    CHECK(!g4_json_int(&j, g4_json_get(&j, 0, "kv_bytes"), &n) && n == 4 * 2 * 640 + 2 * 100 * 32 * 4, "kv_bytes %lld", (long long)n);
    uint32_t layer = j.nodes[g4_json_get(&j, 0, "layers")].first;
    for (int i = 0; i < 8; i++) layer = j.nodes[layer].next;
    CHECK(!g4_json_int(&j, g4_json_get(&j, layer, "kv_layer"), &n) && n == 3, "layer 8 reads layer 3: %lld", (long long)n);
    CHECK(!g4_json_int(&j, g4_json_get(&j, layer, "intermediate_size"), &n) && n == 64, "and is twice as wide: %lld", (long long)n);
    layer = j.nodes[layer].next;
    CHECK(!g4_json_int(&j, g4_json_get(&j, layer, "kv_layer"), &n) && n == 4, "layer 9 reads layer 4");
    CHECK(!g4_json_int(&j, g4_json_get(&j, layer, "head_dim"), &n) && n == 32, "with heads of 32");
    int64_t parameters = 0, streamed = 0;
    g4_json_int(&j, g4_json_get(&j, 0, "parameters"), &parameters);
    g4_json_int(&j, g4_json_get(&j, 0, "streamed_parameters_per_token"), &streamed);
    g4_json_free(&j);
    /* against the checkpoint's own list, less k and v of the layers that share */
    char path[600];
    snprintf(path, sizeof path, "%s/model.safetensors", e2b);
    g4_safetensors st;
    int64_t total = 0;
    CHECK(!g4_safetensors_open(&st, path, 0, &err), "%s", err.text);
    for (int i = 0; i < st.n; i++) {
        const char *at = strstr(st.tensors[i].name, "layers.");
        int shared = at && atoi(at + 7) >= 5 && (strstr(at, ".k_proj") || strstr(at, ".v_proj") || strstr(at, ".k_norm"));
        int64_t count = 1;
        for (int d = 0; d < st.tensors[i].rank; d++) count *= st.tensors[i].shape[d];
        if (!shared) total += count;
    }
    g4_safetensors_close(&st);
    CHECK(parameters == total && streamed == total - 160 * 80, "parameters %lld, streamed %lld; the file has %lld", (long long)parameters,
          (long long)streamed, (long long)total);
    sh("$G info $M -q");
    CHECK(status == 0 && strstr(out, "of layer 3") && strstr(out, "none: "), "info: %s", out);
}

/* The groups of info's "tensors" add up, and to what the other figures say. */
static void check_groups(const char *model) {
    g4_json j;
    g4_error err;
    double sums[3] = {0}, all[3] = {0}, parameters = 0, streamed = 0, rows = 0, types = 0, all_types = 0;
    static const char *const keys[] = {"parameters", "bytes", "bytes_per_token"};
    sh("$G info %s --json -q", model);
    CHECK(status == 0 && !g4_json_parse(&j, out, out_size, "info --json", &err), "info %s: %d %s", model, status, err_text);
    if (status) return;
    uint32_t list = g4_json_get(&j, 0, "tensors");
    for (uint32_t i = list ? j.nodes[list].first : 0; i; i = j.nodes[i].next) {
        double x[3] = {0}, bits = 0, n = 0;
        for (int k = 0; k < 3; k++) g4_json_double(&j, g4_json_get(&j, i, keys[k]), &x[k]);
        g4_json_double(&j, g4_json_get(&j, i, "bits_per_weight"), &bits);
        CHECK(fabs(bits - 8 * x[1] / x[0]) < 1e-3, "%s: %g bits per weight", model, bits);
        int last = !strcmp(g4_json_string(&j, g4_json_get(&j, i, "name")), "all");
        for (int k = 0; k < 3; k++) (last ? all : sums)[k] += x[k];
        for (uint32_t t = j.nodes[g4_json_get(&j, i, "types")].first; t; t = j.nodes[t].next)
            if (!g4_json_double(&j, t, &n)) *(last ? &all_types : &types) += n;
    }
    g4_json_double(&j, g4_json_get(&j, 0, "parameters"), &parameters);
    g4_json_double(&j, g4_json_get(&j, 0, "streamed_bytes_per_token"), &streamed);
    g4_json_double(&j, g4_json_get(&j, 0, "table_row_bytes_per_token"), &rows);
    CHECK(all[0] > 0 && all[0] == sums[0] && all[1] == sums[1] && all_types == types && all[0] == parameters, "%s: all %g, groups %g, parameters %g", model, all[0], sums[0],
          parameters);
    CHECK(fabs(all[2] - sums[2]) <= 4 && fabs(all[2] - streamed - rows) <= 1, "%s: bytes per token %g, %g + %g", model, all[2], streamed, rows);
    g4_json_free(&j);
}

/* ---- GGUF files ---- */

static void test_gguf(void) {
    static const char *const models[] = {"ple", "moe"};
    char ids[2][200], hash[32];
    for (int i = 0; i < 2; i++) {
        g4_safetensors st;
        g4_error err;
        char path[100];
        snprintf(path, sizeof path, "test/gguf/%s.expected.safetensors", models[i]);
        CHECK(!g4_safetensors_open(&st, path, 0, &err), "%s", err.text);
        const g4_st_tensor *t = g4_safetensors_find(&st, "ids");
        *ids[i] = 0;
        for (int64_t k = 0; t && k < t->shape[0]; k++) sprintf(ids[i] + strlen(ids[i]), "%s%d", k ? "," : "", t->data[4 * k] | t->data[4 * k + 1] << 8);
        g4_safetensors_close(&st);
        sh("$G trace test/gguf/%s.gguf --ids %s -o $D/t.safetensors -q && $G diff $D/t.safetensors %s", models[i], ids[i], path);
        CHECK(status == 0 && strstr(out, "logits"), "diff with transformers: %d %s%s", status, out, err_text);
        sh("$G hash test/gguf/%s.gguf --ids %s -q", models[i], ids[i]);
        CHECK(status == 0 && strlen(out) == 17, "hash: %s%s", out, err_text);
        snprintf(hash, sizeof hash, "%.17s", out);
        sh("$G hash test/gguf/%s.gguf --ids %s -q --backend scalar --no-mmap --chunk 3", models[i], ids[i]);
        CHECK(status == 0 && !strcmp(out, hash), "other bits of the scalar backend: %s, expected %s", out, hash);
        sh("$G score test/gguf/%s.gguf --ids %s -q", models[i], ids[i]);
        CHECK(status == 0 && strstr(out, "perplexity "), "score: %s%s", out, err_text);
        sh("$G run test/gguf/%s.gguf --ids 2,5 -n 4 --temp 0 -q --profile=$D/p.json", models[i]);
        CHECK(status == 0 && lines(out) == 1, "run: %s%s", out, err_text);
        sh("$G run test/gguf/%s.gguf -p It -q", models[i]);
        CHECK(status == 2 && strstr(err_text, "tokenizer.ggml.model: expected \"gemma4\", found no such key;") && strstr(err_text, "(text needs a tokenizer; --ids does not)"), "%s", err_text);
        snprintf(path, sizeof path, "test/gguf/%s.gguf", models[i]);
        check_groups(path);
    }
    sh("$G info test/gguf/moe.gguf -q");
    CHECK(status == 0 && strstr(out, "\nexperts ") && strstr(out, " Q4_1 6, Q5_0 4, MXFP4 2\n") && strstr(out, "\nall "), "info: %s", out);
    sh("cp test/gguf/ple.gguf $D/without-suffix && $G hash $D/without-suffix --ids %s -q", ids[0]);
    CHECK(status == 0, "a file without the suffix: %s", err_text);
    /* the last tensor is a norm: its last number becomes a NaN */
    sh("$G info test/gguf/moe.gguf --check -q");
    CHECK(status == 0, "--check: %s", err_text);
    sh("size=$(wc -c < test/gguf/moe.gguf); head -c $((size - 4)) test/gguf/moe.gguf > $D/nan.gguf; printf '\\377\\377\\377\\177' >> $D/nan.gguf");
    static const char *const commands[] = {"info --check", "hash --ids 2,5", "logits --ids 2,5", "score --ids 2,5,7", "run --ids 2,5 -n 1"};
    for (int i = 0; i < 5; i++) {
        char name[16];
        snprintf(name, sizeof name, "%.*s", (int)strcspn(commands[i], " "), commands[i]);
        expect_error("tensor output_norm.weight (F32): row 0, element 95, which is in block 95, is", "$G %s $D/nan.gguf %s -q", name, commands[i] + strlen(name));
    }
    expect_error("is no GGUF file", "cp test/gguf/ple.expected.safetensors $D/other.gguf; $G hash $D/other.gguf --ids 1");
    expect_error("incomplete download?", "head -c 200000 test/gguf/ple.gguf > $D/cut.gguf; $G hash $D/cut.gguf --ids 1");
    check_groups("$M");
}

/* ---- diff ---- */

/* A safetensors file from a header and data, put together here. */
static void put_safetensors(const char *name, const char *header, const void *data, size_t n) {
    static char file[65536];
    size_t length = strlen(header);
    for (int b = 0; b < 8; b++) file[b] = (char)((uint64_t)length >> 8 * b);
    memcpy(file + 8, header, length);
    memcpy(file + 8 + length, data, n);
    put_file(name, file, 8 + length + n);
}

/* One F32 tensor "logits" [2][3]. */
static void put_six(const char *name, float a, float b, float c, float d, float e, float f) {
    const float values[6] = {a, b, c, d, e, f};
    unsigned char bytes[24];
    for (int i = 0; i < 6; i++) {
        uint32_t w;
        memcpy(&w, &values[i], 4);
        for (int k = 0; k < 4; k++) bytes[4 * i + k] = (unsigned char)(w >> 8 * k);
    }
    put_safetensors(name, "{\"logits\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]}}", bytes, 24);
}

static void test_diff(void) {
    put_six("a", 1, 2, 3, 4, 5, 6);
    put_six("b", 1, 2, 3, 4, 5.0003f, 6);
    put_six("tiny", 1, 2, 3, 4, 5.00003f, 6);
    put_six("nan", 1, 2, 3, 4, NAN, 6);
    put_six("inf", 1, 2, 3, INFINITY, 5, 6);
    put_six("small", 0.001f, 0, 0, 0, 0, 0);
    put_six("smaller", 0.001009f, 0, 0, 0, 0, 0);

    sh("$G diff $D/a $D/a");
    CHECK(status == 0 && strstr(out, "all 1 in tolerance\n"), "equal: %d %s", status, out);
    sh("$G diff $D/a $D/b");
    double max = NAN, rms = NAN, nmse = NAN, cosine = NAN;
    int first = -1;
    char *row = strstr(out, "\nlogits");
    CHECK(status == 1 && row && sscanf(row, "\nlogits %lf %lf %lf %lf %d", &max, &rms, &nmse, &cosine, &first) == 5, "unequal: %d %s",
          status, out);
    CHECK(fabs(max - 3e-4) < 1e-6 && fabs(rms - 3e-4 / sqrt(6)) < 1e-6 && fabs(nmse / (9e-8 / 91.003) - 1) < 0.01
          && fabs(cosine - 1) < 1e-8 && first == 4, "its figures: %s", row);
    CHECK(strstr(out, "[1][1]") && !strcmp(out + strlen(out) - 32, "\nfirst out of tolerance: logits\n"), "the last line: %s", out);
    sh("$G diff $D/a $D/tiny");
    CHECK(status == 0, "3e-5 is within 1e-5 times 6: %s", out);
    sh("$G diff $D/small $D/smaller");
    CHECK(status == 0, "9e-6 is within 1e-5 times max(1, 0.001): %s", out);
    const struct {
        const char *options;
        int status;
    } bars[] = {
        {"--rtol 1e-4", 0}, {"--rtol 1e-5", 1}, {"--rtol 4e-5", 1}, {"--rtol 6e-5", 0}, {"--atol 1e-3", 0}, {"--atol 1e-4", 1},
        {"--rtol 4e-5 --atol 1e-4", 0}, {"--rtol 0", 1}, {"--atol 0", 1}
    };
    for (int i = 0; i < 9; i++) {
        sh("$G diff $D/a $D/b %s", bars[i].options);
        CHECK(status == bars[i].status, "%s: status %d", bars[i].options, status);
    }
    sh("$G diff --atol 0 --rtol 0 $D/a $D/a");
    CHECK(status == 0, "a bar of nothing lets equal ones pass: %s", out);
    static const char *const broken[] = {"a $D/nan", "nan $D/a", "nan $D/nan", "inf $D/a", "a $D/inf", "inf $D/inf"};
    for (int i = 0; i < 6; i++) {
        sh("$G diff $D/%s --atol 1e30", broken[i]);
        CHECK(status == 1 && strstr(out, "1 not finite") && strstr(out, "first out of tolerance: logits"), "%s: %d %s", broken[i], status,
              out);
    }
    put_safetensors("shape", "{\"logits\":{\"dtype\":\"F32\",\"shape\":[3,2],\"data_offsets\":[0,24]}}",
        "\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", 24);
    sh("$G diff $D/a $D/shape");
    CHECK(status == 1 && strstr(out, "[2][3]") && strstr(out, "[3][2]"), "another shape: %d %s", status, out);
    put_safetensors("rank", "{\"logits\":{\"dtype\":\"F32\",\"shape\":[6],\"data_offsets\":[0,24]}}",
        "\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", 24);
    sh("$G diff $D/a $D/rank");
    CHECK(status == 1, "another rank: %d", status);
    put_safetensors("other", "{\"norm\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", "\0\0\0", 4);
    expect_error("no tensor in common", "$G diff $D/a $D/other");
    expect_error("nosuch", "$G diff $D/a $D/nosuch");
    expect_error("nosuch", "$G diff $D/nosuch $D/a");
    put_file("text", "hello, world, not a file of tensors", 35);
    expect_error("text", "$G diff $D/a $D/text");
    put_file("empty", "", 0);
    expect_error("empty", "$G diff $D/empty $D/a");
    expect_error("two files", "$G diff $D/a");
    expect_error("two files", "$G diff");
    expect_error("unexpected", "$G diff $D/a $D/a $D/a");
    put_safetensors("bool", "{\"logits\":{\"dtype\":\"BOOL\",\"shape\":[2,3],\"data_offsets\":[0,6]}}", "\1\1\0\0\0", 6);
    sh("$G diff $D/bool $D/bool");
    CHECK(status == 2 && strstr(err_text, "BOOL"), "a type that is not read: %d %s", status, err_text);

    /* other types: 1, 2, -3 in each */
    static const struct {
        const char *type, *bytes;
        int size;
    } types[] = {
        {"F64", "\0\0\0\0\0\0\360\77\0\0\0\0\0\0\0\100\0\0\0\0\0\0\10\300", 8}, {"F32", "\0\0\200\77\0\0\0\100\0\0\100\300", 4},
        {"F16", "\0\74\0\100\0\302", 2}, {"BF16", "\200\77\0\100\100\300", 2},
        {"I64", "\1\0\0\0\0\0\0\0\2\0\0\0\0\0\0\0\375\377\377\377\377\377\377\377", 8}, {"I32", "\1\0\0\0\2\0\0\0\375\377\377\377", 4},
        {"I16", "\1\0\2\0\375\377", 2}, {"I8", "\1\2\375", 1}
    };
    for (int i = 0; i < 8; i++) {
        char header[128], name[16];
        snprintf(header, sizeof header, "{\"norm\":{\"dtype\":\"%s\",\"shape\":[3],\"data_offsets\":[0,%d]}}", types[i].type,
            3 * types[i].size);
        snprintf(name, sizeof name, "type%d", i);
        put_safetensors(name, header, types[i].bytes, 3 * (size_t)types[i].size);
        sh("$G diff $D/type%d $D/type0 --atol 0", i);
        CHECK(status == 0, "%s reads as F64: %s%s", types[i].type, out, err_text);
    }
    /* ids are compared exactly: 200000 and 200001 are within 1e-5 of each other */
    put_safetensors("ids1", "{\"ids\":{\"dtype\":\"I32\",\"shape\":[1],\"data_offsets\":[0,4]}}", "\100\15\3\0", 4);
    put_safetensors("ids2", "{\"ids\":{\"dtype\":\"I32\",\"shape\":[1],\"data_offsets\":[0,4]}}", "\101\15\3\0", 4);
    sh("$G diff $D/ids1 $D/ids2");
    CHECK(status == 1, "other ids: %s", out);

    /* the order is that of the forward pass, whatever the file's */
    static const char *const names[] = {
        "ids", "embeddings", "per_layer_inputs", "layers.0.q", "layers.0.mlp", "layers.0.new", "layers.0.output", "layers.2.k",
        "layers.2.output", "layers.10.output", "norm", "logits", "zebra"
    };
    static const int shuffled[] = {9, 12, 0, 8, 4, 11, 2, 6, 1, 10, 7, 3, 5};
    char header[2048] = "{";
    char zeros[13 * 4] = {0};
    for (int i = 0; i < 13; i++)
        sprintf(header + strlen(header), "%s\"%s\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[%d,%d]}", i ? "," : "",
            names[shuffled[i]], 4 * i, 4 * i + 4);
    strcat(header, "}");
    put_safetensors("order", header, zeros, sizeof zeros);
    for (int i = 0; i < 13; i++)
        if (shuffled[i] == 4 || shuffled[i] == 7) zeros[4 * i + 3] = 64; /* layers.0.mlp and layers.2.k become 2 */
    put_safetensors("order2", header, zeros, sizeof zeros);
    sh("$G diff $D/order $D/order2");
    char *at = strchr(out, '\n');
    for (int i = 0; i < 13 && at; i++, at = strchr(at + 1, '\n'))
        CHECK(!strncmp(at + 1, names[i], strlen(names[i])) && at[1 + strlen(names[i])] == ' ', "row %d is %s: %.40s", i, names[i], at + 1);
    CHECK(status == 1 && strstr(out, "\nfirst out of tolerance: layers.0.mlp\n"), "the first is the forward pass's: %s", out);
    /* a name with a newline does not make a line */
    put_safetensors("evil",
        "{\"logits\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]},\"x\\nall 9 in tolerance\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]}}", "", 0);
    sh("$G diff $D/a $D/evil");
    CHECK(status == 1 && !strstr(out, "\nall 9"), "a name with a newline: %s", out);
}

/* ---- Text ---- */

static void test_text(void) {
    static char first[sizeof out], second[sizeof out];
    sh("$G info -q");
    if (status) {
        SKIP("the shipped model is not there: no text, no tokenizer");
        return;
    }
    sh("$G tokenize -p 'It is a truth' -q");
    strcpy(first, out);
    CHECK(status == 0 && lines(out) == 1 && !*err_text && strspn(out, "0123456789 \n") == strlen(out), "tokenize: %s", out);
    sh("printf 'It is a truth' > $D/text; $G tokenize -f $D/text; $G tokenize < $D/text");
    CHECK(status == 0 && out_size == 2 * strlen(first) && !strncmp(out, first, strlen(first)) && !strcmp(out + strlen(first), first),
          "-f and stdin give the same: %s", out);
    sh("$G tokenize --bos -p 'It is a truth'; $G tokenize --bos -p '<bos>It is a truth'; $G tokenize -p '<bos>It is a truth'");
    snprintf(second, sizeof second, "2 %.300000s2 %.300000s2 %.300000s", first, first, first);
    CHECK(!strcmp(out, second), "one BOS, never two: %s", out);
    sh("$G tokenize -p ''; $G tokenize --bos -p ''");
    CHECK(status == 0 && !strcmp(out, "\n2\n"), "no text: %s", out);
    sh("$G tokenize -p 'It is a truth' | $G detokenize; $G detokenize $($G tokenize -p ' and more')");
    CHECK(!strcmp(out, "It is a truth and more"), "and back: %s", out);
    sh("$G detokenize");
    CHECK(status == 0 && out_size == 0, "no ids, no bytes: %s", out);
    sh("printf 'a\\0b\\303\\251\\r\\n' | $G tokenize | $G detokenize");
    CHECK(out_size == 7 && !memcmp(out, "a\0b\303\251\r\n", 7), "NUL and all come back: %zu bytes", out_size);
    sh("$G detokenize 2 2; $G detokenize 2 2 --skip-special");
    CHECK(!strcmp(out, "<bos><bos>"), "special tokens: %s", out);
    expect_error("outside", "$G detokenize 99999999");
    expect_error("ids", "$G detokenize 1 x");
    expect_error("standard input", "echo 1 -2 | $G detokenize");
    expect_error("standard input", "echo 99999999999 | $G detokenize");

    /* a backslash is a backslash, unless -e */
    sh("$G tokenize -p 'a\\nb' | $G detokenize; $G tokenize -e -p 'a\\nb\\x41\\\\' | $G detokenize; printf 'a\\\\nb' > $D/text; $G tokenize -e -f $D/text | $G detokenize");
    CHECK(!strcmp(out, "a\\nba\nbA\\a\\nb"), "escapes: %s", out);
    expect_error("-e", "$G tokenize -e -p 'a\\q'");
    expect_error("-e", "$G tokenize -e -p 'a\\'");
    expect_error("-e", "$G tokenize -e -p 'a\\x4'");
    sh("$G tokenize -p --bos | $G detokenize");
    CHECK(!strcmp(out, "--bos"), "a value may begin with a dash: %s", out);
    sh("LC_ALL=C $G tokenize -p 'Напиши 日本 é'; LC_ALL=en_US.UTF-8 $G tokenize -p 'Напиши 日本 é'; printf 'Напиши 日本 é' | LC_ALL=de_DE.UTF-8 $G tokenize");
    char *line2 = strchr(out, '\n');
    CHECK(line2 && lines(out) == 3 && !strncmp(out, line2 + 1, (size_t)(line2 - out + 1)), "no locale changes ids: %s", out);

    /* JSON lines */
    sh("printf '%%s\\n%%s\\r\\n%%s' '{\"text\": \"It is a truth\"}' '{\"text\":\"\",\"more\":[1]}' '{\"text\":\"\\u00e9\\ud83d\\ude00\\u0000\\\"\\\\\\u007f\\n\"}' > $D/j; $G tokenize --jsonl < $D/j");
    CHECK(status == 0 && lines(out) == 3 && !strncmp(out, "{\"ids\": [", 9) && strstr(out, "\n{\"ids\": []}\n"), "tokenize --jsonl: %s%s",
          out, err_text);
    sh("$G tokenize --jsonl < $D/j | $G detokenize --jsonl");
    CHECK(!strcmp(out,
          "{\"text\": \"It is a truth\"}\n{\"text\": \"\"}\n{\"text\": \"\\u00e9\\ud83d\\ude00\\u0000\\\"\\\\\\u007f\\u000a\"}\n"),
          "and back: %s", out);
    sh("echo '{\"text\": \"<bos>x\"}' | $G tokenize --jsonl --bos; echo '{\"ids\": [2]}' | $G detokenize --jsonl --skip-special");
    CHECK(strstr(out, "{\"ids\": [2, ") && !strstr(out, "2, 2") && strstr(out, "{\"text\": \"\"}"), "with --bos and --skip-special: %s",
          out);
    static const char *const bad_text[] = {
        "", "x", "[]", "null", "{}", "{\"text\": 1}", "{\"text\": null}", "{\"text\": \"a\"", "{\"text\": \"a\"}}",
        "{\"text\": \"\\ud800\"}", "{\"text\": \"a\", \"text\": \"b\"}", "{\"txt\": \"a\"}"
    };
    for (size_t i = 0; i < sizeof bad_text / sizeof *bad_text; i++) {
        sh("printf '%%s\\n' '{\"text\": \"a\"}' '%s' | $G tokenize --jsonl", bad_text[i]);
        CHECK(status == 2 && lines(out) == 1 && strstr(err_text, "line 2") && lines(err_text) == 1, "%s: %d %s", bad_text[i], status,
              err_text);
    }
    static const char *const bad_ids[] = {
        "{\"ids\": 1}", "{\"ids\": [1.5]}", "{\"ids\": [-1]}", "{\"ids\": [\"1\"]}", "{\"ids\": [99999999]}",
        "{\"ids\": [99999999999999999999]}", "{\"ids\": [1,]}", "{\"text\": \"a\"}"
    };
    for (size_t i = 0; i < sizeof bad_ids / sizeof *bad_ids; i++) {
        sh("printf '%%s\\n' '{\"ids\": []}' '%s' | $G detokenize --jsonl", bad_ids[i]);
        CHECK(status == 2 && lines(out) == 1 && strstr(err_text, "line 2") && lines(err_text) == 1, "%s: %d %s", bad_ids[i], status,
              err_text);
    }
    expect_error("--jsonl", "$G tokenize --jsonl -p x");
    expect_error("--jsonl", "$G detokenize --jsonl 1");

    /* the model itself */
    sh("$G run -p 'It is a truth' -n 12 --seed 3 -q");
    strcpy(first, out);
    CHECK(status == 0 && *out && !*err_text, "run: %s%s", out, err_text);
    sh("printf 'It is a truth' | $G run -n 12 --seed 3 -q; $G run -p '<bos>It is a truth' -n 12 --seed 3 -q; $G run --ids $($G tokenize --bos -p 'It is a truth' | tr ' ' ,) -n 12 --seed 3 -q | $G detokenize");
    snprintf(second, sizeof second, "%.300000s%.300000s%.300000s", first, first, first);
    CHECK(!strcmp(out, second), "stdin, a BOS of one's own, and ids give the same: %s", out);
    /* a stop string ends the text before it; several may be given, and -e holds for them too */
    sh("$G run -p 'It is a truth' -n 40 --temp 0 -q");
    char whole[2048], stop[9] = "", *end = whole;
    snprintf(whole, sizeof whole, "%s", out);
    if (out_size > 48) end = strstr(whole, memcpy(stop, whole + 40, 8));
    CHECK(end > whole && !strpbrk(stop, "'"), "a greedy text, and 8 characters of it: %s", whole);
    sh("$G run -p 'It is a truth' -n 40 --temp 0 -q --stop nosuchtext --stop '%s'", stop);
    CHECK(status == 0 && out_size == (size_t)(end - whole) && !strncmp(out, whole, out_size), "--stop '%s': %s", stop, out);
    sh("$G run -p 'It is a truth' -n 40 --temp 0 -q -e --stop '\\x%02x%s'", (unsigned)(unsigned char)stop[0], stop + 1);
    CHECK(status == 0 && out_size == (size_t)(end - whole), "--stop with -e: %s", out);
    expect_error("empty", "$G run -p It -n 1 -q --stop ''");
    expect_error("x00", "$G run -p It -n 1 -q -e --stop 'a\\x00b'");
    sh("$G run -n 4 -q --temp 0 -p '' && $G run -n 4 -q --temp 0 < /dev/null");
    CHECK(status == 0 && out_size % 2 == 0 && !memcmp(out, out + out_size / 2, out_size / 2), "no text: the model begins by itself");
    sh("$G logits -p 'It is' -q; $G logits -q --ids $($G tokenize --bos -p 'It is' | tr ' ' ,)");
    CHECK(status == 0 && lines(out) == 10 && !memcmp(out, out + out_size / 2, out_size / 2) && strchr(out, '"'), "logits of text: %s", out);
    sh("$G score -p 'It is a truth' -q --json");
    CHECK(status == 0 && lines(out) == 1 && strstr(out, "\"piece\": \"<bos>\"") && strstr(out, "\"piece\": \"It\""),
          "score of text: %s", out);
    expect_error("two at least", "$G score -p '' -q");
    expect_error("nosuch", "$G run -f $D/nosuch");
    expect_error("n_ctx 4", "$G run -q --ctx 4 -p 'It is a truth universally acknowledged'");

    /* a chat template makes a hint that names chat; without one there is none */
    sh("mkdir -p $D/it && cp $(dirname $G)/models/austen/* $D/it && touch $D/it/chat_template.jinja && $G run $D/it -p It -n 1");
    if (status) SKIP("the shipped model is not beside the program");
    else CHECK(strstr(err_text, "; chat speaks"), "the hint: %s", err_text);
    sh("$G run -p It -n 1");
    CHECK(!strstr(err_text, "hint:"), "no hint: %s", err_text);
}

int main(int argc, char **argv) {
    char *path = realpath(argc > 1 ? argv[1] : "./gemma4", NULL);
    gemma4 = path;
    if (!path || !mkdtemp(dir) || !realpath("test/fixtures/e2b", e2b)) {
        printf("FAILED: usage: test_cli GEMMA4, in the directory that holds test/fixtures\n");
        return 1;
    }
    unsetenv("GEMMA4_BACKEND");
    setenv("GEMMA4_THREADS", "1", 1); /* threads that wait for each other on a busy machine take most of the time */
    test_help();
    test_options();
    test_ids();
    test_missing();
    test_trace();
    test_score();
    test_info();
    test_gguf();
    test_notices();
    test_writing();
    test_context();
    test_run();
    test_diff();
    test_text();
    char remove_all[64];
    snprintf(remove_all, sizeof remove_all, "rm -rf '%s'", dir);
    if (system(remove_all)) printf("%s is left\n", dir);
    free(path);
    return test_done("test_cli");
}
#endif
