/* test_profile.c - the parts of --profile that a process cannot be made to show: energy, from counters in a folder of the test's own, and waiting threads.
 *
 * It includes bench.c. What that takes from main.c stands here: a clock that the test moves by hand.
 */
#define POWERCAP "build/test_profile.files"
#include "../bench.c"
#include "test.h"

#ifdef _WIN32
#include <direct.h>
#define make_directory(path) _mkdir(path)
#else
#include <sys/stat.h>
#define make_directory(path) mkdir(path, 0777)
#endif

static double now;
double seconds(void) { return now; }
void put_json_string(const char *text, size_t n) { (void)text, (void)n; }
void flush_results(void) {}
double type_bytes(g4_dtype type) { return (double)g4_types[type].bytes / g4_types[type].block; }

static g4_error err;
static char table[1 << 14];

static void set_counter(int zone, const char *name, const char *value) {
    char path[256];
    make_directory("build"); /* where the program was built may be elsewhere */
    make_directory(POWERCAP);
    snprintf(path, sizeof path, POWERCAP "/intel-rapl:%d", zone);
    make_directory(path);
    snprintf(path, sizeof path, POWERCAP "/intel-rapl:%d/%s", zone, name);
    if (!value) {
        remove(path);
        return;
    }
    FILE *f = fopen(path, "w");
    if (f) fprintf(f, "%s\n", value), fclose(f);
}

static void print_table(const profile *p) {
    FILE *f = tmpfile();
    memset(table, 0, sizeof table);
    if (!f) return;
    profile_print(p, f);
    rewind(f);
    table[fread(table, 1, sizeof table - 1, f)] = 0;
    fclose(f);
}

static void test_energy(g4_model *m) {
    set_counter(0, "name", NULL);
    profile *p = profile_open(m, 0, &err);
    profile_start(p), profile_stop(p);
    print_table(p);
    CHECK(!p->energy.known && strstr(table, "energy") && strstr(table, "not readable here"), "no counters: %s", table);
    profile_close(p);

    set_counter(0, "name", "package-0"), set_counter(0, "energy_uj", "1000000"), set_counter(0, "max_energy_range_uj", "262143328850");
    set_counter(1, "name", "psys"), set_counter(1, "energy_uj", "5000000"), set_counter(1, "max_energy_range_uj", "262143328850");
    set_counter(2, "name", "package-1"), set_counter(2, "energy_uj", "9000000"), set_counter(2, "max_energy_range_uj", "10000000");
    set_counter(3, "name", "package-2"); /* not readable: energy_uj is root's on many systems */
    p = profile_open(m, 0, &err);
    profile_start(p);
    now += 2;
    set_counter(0, "energy_uj", "3500000"), set_counter(1, "energy_uj", "8000000"), set_counter(2, "energy_uj", "500000");
    profile_stop(p);
    CHECK(p->energy.known == 5 && fabs(p->energy.joules - 4) < 1e-9, "2.5 J, and 1.5 J of a counter that began again: %g J of zones %x", p->energy.joules, p->energy.known);
    print_table(p);
    CHECK(strstr(table, "4.000 J, 2.0 W"), "%s", table);
    set_counter(0, "energy_uj", "9500000"); /* between two spans: somebody else's */
    profile_start(p);
    set_counter(0, "energy_uj", "9600000");
    profile_stop(p);
    CHECK(fabs(p->energy.joules - 4.1) < 1e-9, "0.1 J more: %g", p->energy.joules);
    reset(p);
    CHECK(p->energy.joules == 0, "a new cell begins with 0 J, not %g", p->energy.joules);
    profile_close(p);
    for (int zone = 0; zone < 4; zone++) {
        char path[256];
        set_counter(zone, "name", NULL), set_counter(zone, "energy_uj", NULL), set_counter(zone, "max_energy_range_uj", NULL);
        snprintf(path, sizeof path, POWERCAP "/intel-rapl:%d", zone);
        remove(path);
    }
    remove(POWERCAP);
}

/* A backend whose threads need 1 and 3 seconds for a product, and that says nothing about anything else, which takes 0.5. */
static void matmul(const g4_run *run, float *y, const g4_tensor *W, const float *x, int T) {
    g4_run alone = {.backend = run->backend, .threads = 1};
    double begin = g4_part_begins(run);
    now += 1;
    g4_part_ends(run, 0, begin);
    now -= 1; /* they run at the same time */
    begin = g4_part_begins(run);
    now += 3;
    if (run->threads > 1) g4_part_ends(run, 1, begin);
    g4_backend_scalar.matmul(&alone, y, W, x, T);
}
static void norm(const g4_run *run, float *y, const float *x, const g4_tensor *w, int n, int dim, float eps) {
    now += 0.5;
    g4_backend_scalar.norm(run, y, x, w, n, dim, eps);
}
static const g4_backend uneven = {.name = "uneven", .host_memory = 1, .matmul = matmul, .norm = norm};

static void test_waiting(g4_model *m) {
    for (int threads = 1; threads <= 2; threads++) {
        profile *p = profile_open(m, 0, &err);
        g4_state *s = g4_state_open(m, &(g4_state_options){.ctx = 4, .threads = threads}, &err);
        float *logits = malloc(sizeof *logits * (size_t)g4_get_config(m)->vocab_size);
        g4_row row = {.token = 2, .want_logits = 1};
        profile_start(p);
        CHECK(p && s && logits && !g4_forward(s, &row, 1, logits, &err), "%s", err.text);
        profile_stop(p);
        const sums *q = &p->sum[Q_PROJ], *n = &p->sum[NORM], all = total(p);
        CHECK(q->calls == 8 && fabs(q->seconds - 3 * q->calls) < 1e-9, "%g products, %g s", q->calls, q->seconds);
        CHECK(fabs(q->waiting - (threads - 1) * q->calls) < 1e-9, "one thread of %d waits 2 s of 3, %g on average, not %g", threads, q->calls, q->waiting);
        CHECK(n->calls > 0 && fabs(n->seconds - 0.5 * n->calls) < 1e-9 && n->waiting == 0, "norm: %g s, waiting %g", n->seconds, n->waiting);
        CHECK(fabs(all.seconds - p->wall) < 1e-9 && all.waiting >= q->waiting, "the parts add up: %g s of %g", all.seconds, p->wall);
        free(logits);
        g4_state_close(s);
        profile_close(p);
    }
}

int main(void) {
    g4_model *m = g4_open_with("models/austen", NULL, &uneven, &err);
    CHECK(m, "%s", err.text);
    if (m) test_energy(m), test_waiting(m);
    g4_close(m);
    return test_done("test_profile");
}
