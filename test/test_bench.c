/* test_bench.c - `gemma4 bench` and --profile as processes: what they print is well formed, complete and possible. No speed is asserted.
 *
 * What a cell says it reads and computes is worked out here again, from `gemma4 info --json` of the shipped model. Needs a POSIX shell.
 */
#include "gemma4.h"
#include "test.h"

#include <math.h>

#ifdef _WIN32
int main(void) {
    SKIP("test_bench needs a POSIX shell");
    return test_done("test_bench");
}
#else
#include <sys/wait.h>
#include <unistd.h>

static const char *gemma4;
static char dir[] = "/tmp/gemma4-bench-XXXXXX";
static char out[1 << 20], err_text[1 << 16]; /* of the last run */
static int status;

static size_t slurp(const char *name, char *to, size_t room) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "rb");
    size_t n = f ? fread(to, 1, room - 1, f) : 0;
    if (f) fclose(f);
    to[n] = 0;
    return n;
}

static void run(const char *arguments) {
    char command[1024];
    snprintf(command, sizeof command, "'%s' %s > '%s/out' 2> '%s/err' < /dev/null", gemma4, arguments, dir, dir);
    int result = system(command);
    status = WIFEXITED(result) ? WEXITSTATUS(result) : 1000 + result;
    slurp("out", out, sizeof out);
    slurp("err", err_text, sizeof err_text);
}

static double number(const g4_json *j, uint32_t object, const char *key) {
    double value = NAN;
    uint32_t node = g4_json_get(j, object, key);
    if (!node || g4_json_double(j, node, &value)) return NAN;
    return value;
}

static const char *text(const g4_json *j, uint32_t object, const char *key) {
    uint32_t node = g4_json_get(j, object, key);
    return node && j->nodes[node].kind == G4_JSON_STRING ? g4_json_string(j, node) : "";
}

static int parse(g4_json *j, const char *from, const char *what) {
    g4_error err = {{0}};
    int failed = g4_json_parse(j, from, strlen(from), what, &err);
    CHECK(!failed, "%s is JSON: %s", what, err.text);
    return failed;
}

/* The cell of that name and backend; 0 none. */
static uint32_t find_cell(const g4_json *j, const char *name, const char *backend) {
    uint32_t list = g4_json_get(j, 0, "cells");
    for (uint32_t c = list ? j->nodes[list].first : 0; c; c = j->nodes[c].next)
        if (!strcmp(text(j, c, "cell"), name) && !strcmp(text(j, c, "backend"), backend)) return c;
    return 0;
}

static void check_rate(const g4_json *j, const char *name) {
    uint32_t r = g4_json_get(j, 0, name);
    double best = number(j, r, "best"), middle = number(j, r, "median");
    CHECK(r && middle > 0 && best >= middle && best < 1e16, "%s: best %g, median %g", name, best, middle);
}

/* The figures of a cell agree with each other. */
static void check_cell(const g4_json *j, uint32_t c, double tokens) {
    const char *name = text(j, c, "cell");
    double time = number(j, c, "seconds"), rate = number(j, c, "tokens_per_second"), bytes = number(j, c, "bytes"), flops = number(j, c, "flops");
    double read = number(j, g4_json_get(j, 0, "read_bytes_per_second"), "best"), peak = number(j, g4_json_get(j, 0, "flops_per_second"), "best");
    int samples = (int)number(j, c, "samples");
    CHECK(number(j, c, "tokens") == tokens, "%s: %g tokens", name, number(j, c, "tokens"));
    CHECK(samples > 0 && samples % 2 == 1, "%s: an odd number of samples, %d", name, samples);
    CHECK(time > 0 && fabs(rate * time / tokens - 1) < 1e-4, "%s: %g tokens/s in %g s", name, rate, time);
    CHECK(number(j, c, "min") > 0 && number(j, c, "min") <= rate && rate <= number(j, c, "max"), "%s: min, median, max", name);
    CHECK(fabs(number(j, c, "gb_per_second") * 1e9 * time / bytes - 1) < 1e-4, "%s: GB/s", name);
    CHECK(fabs(number(j, c, "gflop_per_second") * 1e9 * time / flops - 1) < 1e-4, "%s: GFLOP/s", name);
    CHECK(fabs(number(j, c, "read_share") * read * time / bytes - 1) < 1e-4, "%s: share of the read bandwidth", name);
    CHECK(fabs(number(j, c, "peak_share") * peak * time / flops - 1) < 1e-4, "%s: share of the peak", name);
}

/* Per token, as `info` counts; and the keys and values of one position, over all layers. */
static double info_bytes, position_bytes;

static void read_info(const char *model) {
    g4_json j;
    char command[256];
    snprintf(command, sizeof command, "info %s --json", model);
    run(command);
    info_bytes = position_bytes = 0;
    if (parse(&j, out, "info --json")) return;
    info_bytes = number(&j, 0, "streamed_bytes_per_token") + number(&j, 0, "table_row_bytes_per_token");
    uint32_t layers = g4_json_get(&j, 0, "layers");
    for (uint32_t l = j.nodes[layers].first; l; l = j.nodes[l].next)
        position_bytes += 2 * sizeof(float) * number(&j, l, "num_key_value_heads") * number(&j, l, "head_dim");
    g4_json_free(&j);
    CHECK(info_bytes > 0 && position_bytes > 0, "info: %g and %g bytes", info_bytes, position_bytes);
}

static void test_json(void) {
    g4_json j;
    run("bench --json --seconds 0.05 --only prefill1,prefill8,logits128,decode0,batch4");
    CHECK(status == 0, "bench --json: status %d: %s", status, err_text);
    CHECK(strchr(out, '\n') && !strchr(out, '\n')[1], "one line: %s", out);
    if (parse(&j, out, "bench --json")) return;
    static const char *const rates[] = {"read_bytes_per_second", "read_bytes_per_second_1_thread", "flops_per_second", "flops_per_second_1_thread"};
    for (int i = 0; i < 4; i++) check_rate(&j, rates[i]);
    CHECK(*text(&j, 0, "processor") && number(&j, 0, "threads") >= 1, "processor and threads");
    CHECK(strstr(text(&j, 0, "model"), "austen") && !strcmp(text(&j, 0, "weights"), "BF16") && !strcmp(text(&j, 0, "precision"), "f32"), "file and dtype");
    CHECK(number(&j, 0, "bytes_per_token") == info_bytes, "bytes per token: %g, info counts %g", number(&j, 0, "bytes_per_token"), info_bytes);
    const char *name, *why;
    int usable = 0;
    for (int i = 0; (name = g4_backend_name(i, &why)); i++) {
        static const char *const cells[] = {"prefill1", "prefill8", "logits128", "decode0", "batch4"};
        static const double tokens[] = {1, 8, 128, 1, 4};
        if (*why) continue;
        usable++;
        for (int k = 0; k < 5; k++) {
            uint32_t c = find_cell(&j, cells[k], name);
            CHECK(c, "%s of backend %s is there", cells[k], name);
            if (c) check_cell(&j, c, tokens[k]);
        }
        uint32_t one = find_cell(&j, "prefill1", name);
        CHECK(number(&j, one, "bytes") == info_bytes + position_bytes, "prefill1 reads %g bytes; info counts %g and K and V of one position are %g",
              number(&j, one, "bytes"), info_bytes, position_bytes);
    }
    CHECK((int)j.nodes[g4_json_get(&j, 0, "cells")].size == 5 * usable, "nothing else was measured");
    g4_json_free(&j);
}

/* The same of a model with experts, of which a token reads some only. */
static void test_experts(void) {
    g4_json j;
    read_info("test/fixtures/26b-a4b");
    run("bench test/fixtures/26b-a4b --backend scalar --threads 1 --json --seconds 0.01 --only prefill1");
    CHECK(status == 0, "bench of 26b-a4b: %s", err_text);
    if (parse(&j, out, "bench --json")) return;
    uint32_t c = find_cell(&j, "prefill1", "scalar");
    CHECK(c && number(&j, c, "bytes") == info_bytes + position_bytes, "26b-a4b: prefill1 reads %g bytes; info counts %g, K and V are %g",
          number(&j, c, "bytes"), info_bytes, position_bytes);
    g4_json_free(&j);
}

static void test_table(void) {
    run("bench --backend scalar --threads 1 --seconds 0.01 --only decode0,decode8192 --ctx 100");
    CHECK(status == 0 && strstr(out, "\nreads ") && strstr(out, "\ncomputes ") && strstr(out, "threads 1\n"), "bench: %d: %s%s", status, out, err_text);
    CHECK(strstr(out, "\ndecode0 ") && strstr(out, "scalar") && !strstr(out, " cpu "), "only what was asked for: %s", out);
    CHECK(strstr(out, "\ndecode8192  scalar   skipped: needs a context of"), "a context that --ctx forbids: %s", out);
    CHECK(!strstr(out, "prefill"), "no other cell: %s", out);
    run("bench --only decode0,nosuch");
    CHECK(status == 2 && !*out && strstr(err_text, "\"nosuch\"") && strstr(err_text, "prefill128"), "a cell that is not there: %s", err_text);
    run("bench --only ''");
    CHECK(status == 2 && !*out, "an empty list: %d %s", status, err_text);
    run("bench --seconds 0");
    CHECK(status == 2 && !*out, "no time: %d %s", status, err_text);
    run("run --profile=/nosuch/file.json -p x");
    CHECK(status == 2 && !*out && strstr(err_text, "/nosuch/file.json"), "a file that cannot be: %s", err_text);
}

/* A line of the table: its calls and milliseconds; 0 if it is not there. */
static int find_line(const char *table, const char *name, double *calls, double *ms) {
    for (const char *at = table; at && *at; at = strchr(at, '\n'), at += at != NULL) {
        size_t n = strlen(name);
        if (!strncmp(at, name, n) && at[n] == ' ') return sscanf(at + n, "%lf %lf", calls, ms) == 2;
    }
    return 0;
}

/* The lines of the table up to `wall`: milliseconds of all but `other`. */
static double add_lines(const char *table) {
    double sum = 0;
    const char *at = strstr(table, "operation ");
    for (at = at ? strchr(at, '\n') : NULL; at && *++at; at = strchr(at, '\n')) {
        char name[64];
        double calls, ms;
        if (sscanf(at, "%63s %lf %lf", name, &calls, &ms) != 3 || !strcmp(name, "other") || !strcmp(name, "wall")) break;
        sum += ms;
    }
    return sum;
}

static void test_profile(void) {
    double calls, ms, wall, other;
    /* A prompt of one id and three more tokens: four steps, the last token is not run. Eight layers, of which four own K and V. */
    run("run --threads 1 --ids 2 -n 4 --temp 0 --ignore-eos --profile");
    CHECK(status == 0 && find_line(err_text, "wall", &calls, &wall), "run --profile: %d %s", status, err_text);
    CHECK(find_line(err_text, "sampling", &calls, &ms) && calls == 4, "four tokens are sampled: %g", calls);
    CHECK(find_line(err_text, "lm_head", &calls, &ms) && calls == 4, "four steps: %g", calls);
    CHECK(find_line(err_text, "q_proj", &calls, &ms) && calls == 4 * 8, "q_proj: %g", calls);
    CHECK(find_line(err_text, "k_proj", &calls, &ms) && calls == 4 * 4, "k_proj: %g", calls);
    CHECK(find_line(err_text, "sliding_attention", &calls, &ms) && calls == 4 * 6, "sliding_attention: %g", calls);
    CHECK(find_line(err_text, "full_attention", &calls, &ms) && calls == 4 * 2, "full_attention: %g", calls);
    CHECK(find_line(err_text, "per_layer_input_gate", &calls, &ms) && calls == 4 * 8, "per_layer_input_gate: %g", calls);

    /* The parts add up: what is left over is small, unless the machine took the processor away just then, which it does not do every time. */
    double least = INFINITY;
    for (int i = 0; i < 99 && !(least < 0.02); i++) {
        run("logits --threads 1 -f README.md --profile");
        if (!find_line(err_text, "wall", &calls, &wall) || !find_line(err_text, "other", &calls, &other)) break;
        double sum = add_lines(err_text);
        CHECK(fabs(sum + other - wall) < 0.1, "%g ms and %g other, %g in all", sum, other, wall);
        if (wall > 0) least = fmin(least, fabs(1 - sum / wall));
    }
    CHECK(least < 0.02, "the parts add up to the wall time within 2 %%, not %g %%", 100 * least);
    run("logits -q --ids 2 --profile");
    CHECK(status == 0 && !*err_text, "-q: %s", err_text);

    g4_json j;
    static char plain[sizeof out];
    run("logits --ids 2,3 -q");
    strcpy(plain, out);
    char command[512];
    snprintf(command, sizeof command, "logits --ids 2,3 -q --profile='%s/trace.json'", dir);
    run(command);
    CHECK(status == 0 && *plain && !strcmp(plain, out), "a profile changes no logit: %s", out);
    slurp("trace.json", out, sizeof out);
    if (parse(&j, out, "the trace")) return;
    uint32_t list = g4_json_get(&j, 0, "traceEvents");
    int events = 0, ordered = 1, q = 0;
    double last = 0;
    for (uint32_t e = list ? j.nodes[list].first : 0; e; e = j.nodes[e].next) {
        if (strcmp(text(&j, e, "ph"), "X")) continue;
        double ts = number(&j, e, "ts"), dur = number(&j, e, "dur");
        ordered &= ts >= last - 0.002 && dur >= 0;
        last = ts + dur;
        if (!strcmp(text(&j, e, "name"), "q_proj")) q += number(&j, g4_json_get(&j, e, "args"), "layer") == q;
        events++;
    }
    CHECK(events > 100 && ordered, "%d events, one after the other", events);
    CHECK(q == 8, "q_proj once in each layer, in order: %d", q);
    g4_json_free(&j);

    run("bench --json --backend scalar --threads 1 --seconds 0.01 --only decode0 --profile");
    CHECK(status == 0, "bench --profile: %s", err_text);
    if (parse(&j, out, "bench --json --profile")) return;
    uint32_t c = find_cell(&j, "decode0", "scalar"), parts = g4_json_get(&j, c, "profile");
    CHECK(parts && j.nodes[parts].size > 20, "the parts are there");
    double bytes = 0;
    for (uint32_t p = parts ? j.nodes[parts].first : 0; p; p = j.nodes[p].next) bytes += number(&j, p, "bytes");
    double forwards = number(&j, c, "samples") * number(&j, c, "calls_per_sample");
    CHECK(fabs(bytes / (number(&j, c, "bytes") * forwards) - 1) < 1e-6, "they read %g bytes, the cell says %g for each of %g", bytes, number(&j, c, "bytes"), forwards);
    g4_json_free(&j);
}

static void test_kernels(void) {
    g4_json j;
    int seen[G4_N_TYPES] = {0};
    run("bench --kernels --json --seconds 0.01 --threads 2");
    CHECK(status == 0, "bench --kernels: status %d: %s", status, err_text);
    if (parse(&j, out, "bench --kernels --json")) return;
    CHECK(number(&j, 0, "open_ms") > 0 && number(&j, 0, "tokenizer_ms") > 0, "the times of opening");
    uint32_t products = g4_json_get(&j, 0, "products");
    for (uint32_t p = j.nodes[products].first; p; p = j.nodes[p].next) {
        double bytes = number(&j, p, "bytes_per_second"), weights = number(&j, p, "weights_per_second");
        int type = 0;
        while (type < G4_N_TYPES && strcmp(g4_types[type].name, text(&j, p, "weights"))) type++;
        CHECK(type < G4_N_TYPES, "a type that is none: %s", text(&j, p, "weights"));
        if (type == G4_N_TYPES) continue;
        seen[type]++;
        CHECK(weights > 0 && fabs(bytes / weights - (double)g4_types[type].bytes / g4_types[type].block) < 1e-3 * bytes / weights, "%s: %g bytes, %g weights", g4_types[type].name, bytes, weights);
    }
    for (int type = 0; type < G4_N_TYPES; type++) CHECK(seen[type] == 2, "%s: %d products, expected one thread and two", g4_types[type].name, seen[type]);
    g4_json_free(&j);
    run("bench --kernels --seconds 0.01");
    CHECK(status == 0 && strstr(out, "opens ") && strstr(out, "\nMXFP4 "), "bench --kernels as text: %s", out);
}

int main(int argc, char **argv) {
    gemma4 = argc > 1 ? argv[1] : "./gemma4";
    if (!mkdtemp(dir)) {
        printf("FAILED: cannot make %s\n", dir);
        return 1;
    }
    read_info("");
    test_json();
    test_kernels();
    test_experts();
    test_table();
    test_profile();
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", dir);
    if (system(command)) printf("%s is left over\n", dir);
    return test_done("test_bench");
}
#endif
