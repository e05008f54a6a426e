/* bench.c - measuring: where the time of a forward pass goes (--profile), and how fast the model runs on this machine (`gemma4 bench`).
 *
 * The profile is a backend around the backend: its operations read the clock, call the real ones and read the clock again, so forward() is measured as
 * it stands. It also counts what an operation must read and compute, from the tensors that it is given: nothing here knows the model's structure.
 *
 * A figure is a median of an odd number of samples, with the lowest and the highest; backends take turns sample by sample, because other work on the
 * machine comes and goes. Gigabytes per second stand beside what the same run could read from memory, and operations beside what it could compute.
 *
 * Not here: any claim about the results, which test/ compares bit by bit. Reading order: part 1, the profile; part 2, the machine; part 3, the cells; part 4, the kernels.
 */
#define G4_EXACT_FLOAT /* the peak is that of a product and a sum, not of both in one */
#include "bench.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

const char *const precision_names[] = {"f32", "bf16", "q16"};

/* ---- Part 1: the profile ------------------------------------------------------------------------------------------------- */

/* The lines of the table, in the order of the forward pass. */
enum {
    EMBED_TOKENS, EMBED_TOKENS_PER_LAYER, PER_LAYER_MODEL_PROJECTION, PER_LAYER_INPUTS, ROPE, NORM, K_PROJ, V_PROJ, KV_STORE, GATHER_ROWS, Q_PROJ,
    SLIDING_ATTENTION, FULL_ATTENTION, O_PROJ, GATE_PROJ, UP_PROJ, GELU_MUL, DOWN_PROJ, ROUTER, EXPERTS, PER_LAYER_INPUT_GATE, PER_LAYER_PROJECTION,
    ADD, SCALE, LM_HEAD, SOFTCAP, SAMPLING, N_LINES
};

typedef struct table_line {
    const char *name;
    size_t field; /* of a product: its weight's place in g4_layer; 0: not one of a layer's products (input_layernorm is there) */
} table_line;

static const table_line lines[N_LINES] = {
    [EMBED_TOKENS] = {"embed_tokens", 0},
    [EMBED_TOKENS_PER_LAYER] = {"embed_tokens_per_layer", 0},
    [PER_LAYER_MODEL_PROJECTION] = {"per_layer_model_projection", 0},
    [PER_LAYER_INPUTS] = {"per_layer_inputs", 0},
    [ROPE] = {"rope", 0},
    [NORM] = {"norm", 0},
    [K_PROJ] = {"k_proj", offsetof(g4_layer, k_proj)},
    [V_PROJ] = {"v_proj", offsetof(g4_layer, v_proj)},
    [KV_STORE] = {"kv_store", 0},
    [GATHER_ROWS] = {"gather_rows", 0},
    [Q_PROJ] = {"q_proj", offsetof(g4_layer, q_proj)},
    [SLIDING_ATTENTION] = {"sliding_attention", 0},
    [FULL_ATTENTION] = {"full_attention", 0},
    [O_PROJ] = {"o_proj", offsetof(g4_layer, o_proj)},
    [GATE_PROJ] = {"gate_proj", offsetof(g4_layer, gate_proj)},
    [UP_PROJ] = {"up_proj", offsetof(g4_layer, up_proj)},
    [GELU_MUL] = {"gelu_mul", 0},
    [DOWN_PROJ] = {"down_proj", offsetof(g4_layer, down_proj)},
    [ROUTER] = {"router", 0},
    [EXPERTS] = {"experts", 0},
    [PER_LAYER_INPUT_GATE] = {"per_layer_input_gate", offsetof(g4_layer, per_layer_input_gate)},
    [PER_LAYER_PROJECTION] = {"per_layer_projection", offsetof(g4_layer, per_layer_projection)},
    [ADD] = {"add", 0},
    [SCALE] = {"scale", 0},
    [LM_HEAD] = {"lm_head", 0},
    [SOFTCAP] = {"softcap", 0},
    [SAMPLING] = {"sampling", 0},
};

typedef struct sums {
    double calls, seconds;
    double waiting; /* of seconds: threads that had done their part, on average; counted where the backend tells about parts */
    double bytes; /* of weights, keys and values read */
    double flops; /* products and sums of matrix products and attention */
} sums;

typedef struct event {
    double begin, end;
    int16_t line, layer; /* layer -1: none */
    int32_t T;
} event;

typedef enum profile_mode {
    TIME,     /* clock, count and compute */
    COUNT,    /* count only; but K and V are stored, so that the caches are memory that was written to */
    STAND_BY  /* compute only, without a detour */
} profile_mode;

#ifndef POWERCAP /* test/test_profile.c has a folder of its own */
#define POWERCAP "/sys/class/powercap"
#endif

/* The energy counters of Linux, one for each package (the processor with its caches; not memory, not the rest of the machine). */
typedef struct energy {
    int known;         /* the counters that could be read, as bits */
    double last[8];    /* microjoules */
    double joules;     /* of all spans that ended */
} energy;

enum { MOST_THREADS = 1024 }; /* as main.c */

struct profile {
    g4_backend table;   /* first: an operation finds the profile at run->backend */
    const g4_backend *inner;
    g4_model *model;
    profile_mode mode;
    int layer;          /* of the weights seen last */
    double begin, wall; /* of the running span; of all spans that ended */
    energy energy;
    double busy[MOST_THREADS]; /* of the operation that runs */
    sums sum[N_LINES];
    event *events;      /* [n_events], if they are recorded */
    size_t n_events, room, lost;
    int record;
};

static double tensor_bytes(const g4_tensor *t) { return t && t->data ? (double)t->rows * (double)t->cols * type_bytes(t->type) : 0; }

/* One call of an operation. */
typedef struct span {
    profile *p;
    g4_run run; /* for the real operation: what it calls itself belongs to it and is not timed again */
    int line, T;
    double begin;
    int compute;
} span;

static span enter(const g4_run *run, int line, int T, double bytes, double flops) {
    profile *p = (profile *)run->backend;
    span s = {.p = p, .run = *run, .line = line, .T = T, .compute = p->mode != COUNT || line == KV_STORE};
    s.run.backend = p->inner;
    if (run->threads > 1 && run->threads <= MOST_THREADS && p->mode == TIME) {
        memset(p->busy, 0, sizeof *p->busy * (size_t)run->threads);
        s.run.busy = p->busy, s.run.clock = seconds;
    }
    p->sum[line].calls++;
    p->sum[line].bytes += bytes;
    p->sum[line].flops += flops;
    s.begin = seconds();
    return s;
}

static void record(profile *p, int line, int T, double begin, double end) {
    p->sum[line].seconds += end - begin;
    if (!p->record) return;
    if (p->n_events == p->room) {
        size_t room = p->room ? 2 * p->room : 4096;
        event *events = room < SIZE_MAX / 2 / sizeof *events ? realloc(p->events, room * sizeof *events) : NULL;
        if (!events) {
            p->lost++;
            return;
        }
        p->events = events, p->room = room;
    }
    p->events[p->n_events++] = (event){.begin = begin, .end = end, .line = (int16_t)line, .layer = (int16_t)p->layer, .T = T};
}

/* result: where the operation writes. A device has only been told what to do so far; reading waits until it is done. */
static void leave(const span *s, const void *result) {
    uint32_t word;
    if (s->p->mode == COUNT) return;
    if (!s->p->inner->host_memory) s->p->inner->download(&word, result, sizeof word);
    double end = seconds(), busy = 0;
    for (int i = 0; s->run.busy && i < s->run.threads; i++) busy += s->run.busy[i];
    if (busy > 0) s->p->sum[s->line].waiting += MAX(end - s->begin - busy / s->run.threads, 0);
    record(s->p, s->line, s->T, s->begin, end);
}

/* Notes the layer that owns W, and gives W's place in it; (size_t)-1 if none does. */
static size_t find_field(profile *p, const g4_tensor *W) {
    uintptr_t at = (uintptr_t)W - (uintptr_t)p->model->layers;
    int inside = W && at < (uintptr_t)p->model->config.num_hidden_layers * sizeof(g4_layer);
    if (W) p->layer = inside ? (int)(at / sizeof(g4_layer)) : -1;
    return inside ? at % sizeof(g4_layer) : (size_t)-1;
}

static int find_line(profile *p, const g4_tensor *W) {
    size_t field = find_field(p, W);
    if (W == &p->model->per_layer_model_projection) return PER_LAYER_MODEL_PROJECTION;
    for (int i = 0; i < N_LINES; i++)
        if (lines[i].field && lines[i].field == field) return i;
    return LM_HEAD;
}

static void timed_embed(const g4_run *run, float *y, const g4_tensor *table, const int32_t *token, int T, float scale) {
    profile *p = (profile *)run->backend;
    find_field(p, table);
    int line = table == &p->model->embed_tokens ? EMBED_TOKENS : EMBED_TOKENS_PER_LAYER;
    span s = enter(run, line, T, (double)T * (double)table->cols * type_bytes(table->type), 0);
    if (s.compute) p->inner->embed(&s.run, y, table, token, T, scale);
    leave(&s, y);
}

static void timed_matmul(const g4_run *run, float *y, const g4_tensor *W, const float *x, int T) {
    span s = enter(run, find_line((profile *)run->backend, W), T, tensor_bytes(W), 2.0 * T * (double)W->rows * (double)W->cols);
    if (s.compute) s.run.backend->matmul(&s.run, y, W, x, T);
    leave(&s, y);
}

static void timed_norm(const g4_run *run, float *y, const float *x, const g4_tensor *w, int n, int dim, float eps) {
    find_field((profile *)run->backend, w);
    span s = enter(run, NORM, n, tensor_bytes(w), 0);
    if (s.compute) s.run.backend->norm(&s.run, y, x, w, n, dim, eps);
    leave(&s, y);
}

static void timed_rope_table(const g4_run *run, float *cos, float *sin, const float *inv_freq, const int32_t *pos, int T, int half) {
    span s = enter(run, ROPE, T, 0, 0);
    if (s.compute) s.run.backend->rope_table(&s.run, cos, sin, inv_freq, pos, T, half);
    leave(&s, sin);
}

static void timed_rope(const g4_run *run, float *x, const float *cos, const float *sin, int T, int heads, int dh) {
    span s = enter(run, ROPE, T, 0, 0);
    if (s.compute) s.run.backend->rope(&s.run, x, cos, sin, T, heads, dh);
    leave(&s, x);
}

static void timed_kv_store(const g4_run *run, const g4_kv *kv, const float *k, const float *v, const g4_rows *rows) {
    span s = enter(run, KV_STORE, rows->T, 0, 0);
    if (s.compute) s.run.backend->kv_store(&s.run, kv, k, v, rows);
    leave(&s, kv->v);
}

static void timed_attention(const g4_run *run, const g4_attention_args *a) {
    profile *p = (profile *)run->backend;
    const g4_kv *kv = a->kv;
    const g4_rows *rows = a->rows;
    double seen = 0, read = 0; /* keys of all rows; the same where consecutive rows share what they see */
    for (int t = 0; p->inner->host_memory && t < rows->T; t++) {
        double n = MIN(rows->pos[t] + 1, kv->window);
        int goes_on = t && rows->seq[t] == rows->seq[t - 1] && rows->pos[t] == rows->pos[t - 1] + 1;
        seen += n;
        read += goes_on ? 1 : n;
    }
    int full = p->layer >= 0 && p->model->config.layers[p->layer].type == G4_FULL_ATTENTION;
    double row = 2 * sizeof(float) * (double)kv->G * kv->dh;
    span s = enter(run, full ? FULL_ATTENTION : SLIDING_ATTENTION, rows->T, read * row, seen * 4.0 * a->H * kv->dh);
    if (s.compute) s.run.backend->attention(&s.run, a);
    leave(&s, a->o);
}

static void timed_gelu_mul(const g4_run *run, float *gate, const float *up, int T, int n, size_t stride) {
    span s = enter(run, GELU_MUL, T, 0, 0);
    if (s.compute) s.run.backend->gelu_mul(&s.run, gate, up, T, n, stride);
    leave(&s, gate);
}

static void timed_add(const g4_run *run, float *y, const float *x, size_t n) {
    span s = enter(run, ADD, (int)(n / (size_t)((profile *)run->backend)->model->config.hidden_size), 0, 0);
    if (s.compute) s.run.backend->add(&s.run, y, x, n);
    leave(&s, y);
}

static void timed_scale(const g4_run *run, float *y, const g4_tensor *factor, size_t n) {
    span s = enter(run, SCALE, (int)(n / (size_t)((profile *)run->backend)->model->config.hidden_size), tensor_bytes(factor), 0);
    if (s.compute) s.run.backend->scale(&s.run, y, factor, n);
    leave(&s, y);
}

static void timed_ple(const g4_run *run, const g4_ple_args *a) {
    span s = enter(run, PER_LAYER_INPUTS, a->T, tensor_bytes(a->norm), 0);
    if (s.compute) s.run.backend->ple(&s.run, a);
    leave(&s, a->p);
}

static void timed_router(const g4_run *run, const g4_router_args *a) {
    const g4_layer *w = a->layer;
    double bytes = tensor_bytes(&w->router_proj) + tensor_bytes(&w->router_scale) + tensor_bytes(&w->per_expert_scale);
    span s = enter(run, ROUTER, a->T, bytes, 2.0 * a->T * a->E * a->D);
    if (s.compute) s.run.backend->router(&s.run, a);
    leave(&s, a->weight);
}

/* Every row is taken to read its K experts anew. */
static void timed_experts(const g4_run *run, const g4_experts_args *a) {
    const g4_tensor *up = &a->layer->experts_gate_up_proj, *down = &a->layer->experts_down_proj;
    double pairs = (double)a->T * a->K, one = (double)a->Fe * a->D;
    span s = enter(run, EXPERTS, a->T, pairs * one * (2 * type_bytes(up->type) + type_bytes(down->type)), pairs * one * 6);
    if (s.compute) s.run.backend->experts(&s.run, a);
    leave(&s, a->y);
}

static void timed_gather_rows(const g4_run *run, float *y, const float *x, const int32_t *index, int n, size_t width) {
    span s = enter(run, GATHER_ROWS, n, 0, 0);
    if (s.compute) s.run.backend->gather_rows(&s.run, y, x, index, n, width);
    leave(&s, y);
}

static void timed_softcap(const g4_run *run, float *y, size_t n, float c) {
    span s = enter(run, SOFTCAP, (int)(n / (size_t)((profile *)run->backend)->model->config.vocab_size), 0, 0);
    if (s.compute) s.run.backend->softcap(&s.run, y, n, c);
    leave(&s, y);
}

static void set_mode(profile *p, profile_mode mode) {
    p->mode = mode;
    p->table = *p->inner;
    if (mode == STAND_BY) return;
    p->table.embed = timed_embed, p->table.matmul = timed_matmul, p->table.norm = timed_norm, p->table.rope_table = timed_rope_table;
    p->table.rope = timed_rope, p->table.kv_store = timed_kv_store, p->table.attention = timed_attention, p->table.gelu_mul = timed_gelu_mul;
    p->table.add = timed_add, p->table.scale = timed_scale, p->table.ple = timed_ple, p->table.router = timed_router;
    p->table.experts = timed_experts, p->table.gather_rows = timed_gather_rows, p->table.softcap = timed_softcap;
}

profile *profile_open(g4_model *model, int record_all, g4_error *err) {
    profile *p = calloc(1, sizeof *p);
    if (!p) return g4_fail(err, "out of memory for the profile"), NULL;
    p->inner = model->backend;
    p->model = model;
    p->layer = -1;
    p->record = record_all;
    set_mode(p, TIME);
    model->backend = &p->table;
    return p;
}

void profile_close(profile *p) {
    if (!p) return;
    p->model->backend = p->inner;
    free(p->events);
    free(p);
}

/* A number in a file of zone `zone`; -1: there is none, or this user may not read it. */
static double read_counter(int zone, const char *name) {
    char path[256];
    double value = -1;
    snprintf(path, sizeof path, POWERCAP "/intel-rapl:%d/%s", zone, name); /* so it is called on AMD's processors too */
    FILE *f = fopen(path, "r");
    if (f && fscanf(f, "%lf", &value) != 1) value = -1;
    if (f) fclose(f);
    return value;
}

/* Whether the zone is a package; "psys" would count packages again. */
static int is_package(int zone) {
    char path[256], name[16] = "";
    snprintf(path, sizeof path, POWERCAP "/intel-rapl:%d/name", zone);
    FILE *f = fopen(path, "r");
    int yes = f && fscanf(f, "%15s", name) == 1 && !strncmp(name, "package", 7);
    if (f) fclose(f);
    return yes;
}

static void energy_start(energy *e) {
    e->known = 0;
    for (int i = 0; i < (int)(sizeof e->last / sizeof *e->last); i++) {
        e->last[i] = is_package(i) ? read_counter(i, "energy_uj") : -1;
        e->known |= (e->last[i] >= 0) << i;
    }
}

static void energy_add(energy *e) {
    for (int i = 0; i < (int)(sizeof e->last / sizeof *e->last); i++) {
        double now = e->known >> i & 1 ? read_counter(i, "energy_uj") : -1, used = now - e->last[i];
        if (now < 0) continue;
        if (used < 0) used += read_counter(i, "max_energy_range_uj"); /* it began again at 0 */
        e->joules += 1e-6 * MAX(used, 0);
        e->last[i] = now;
    }
}

void profile_start(profile *p) {
    if (!p) return;
    if (p->mode == TIME) energy_start(&p->energy);
    p->begin = seconds();
}

void profile_stop(profile *p) {
    if (!p) return;
    p->wall += seconds() - p->begin;
    if (p->mode == TIME) energy_add(&p->energy);
}

void profile_sampling(profile *p, double begin) {
    if (!p) return;
    p->sum[SAMPLING].calls++;
    p->layer = -1;
    record(p, SAMPLING, 1, begin, seconds());
}

/* Forgets the sums, not the events. */
static void reset(profile *p) {
    memset(p->sum, 0, sizeof p->sum);
    p->wall = p->energy.joules = 0;
}

static sums total(const profile *p) {
    sums all = {0};
    for (int i = 0; i < N_LINES; i++) {
        all.calls += p->sum[i].calls, all.seconds += p->sum[i].seconds, all.waiting += p->sum[i].waiting;
        all.bytes += p->sum[i].bytes, all.flops += p->sum[i].flops;
    }
    return all;
}

static double ratio(double a, double b) { return b > 0 ? a / b : 0; }

static void print_sums(FILE *out, const char *name, const sums *s, double wall) {
    fprintf(out, "%-27s %9.0f %12.3f %6.1f%%", name, s->calls, 1e3 * s->seconds, 100 * ratio(s->seconds, wall));
    if (s->waiting > 0) fprintf(out, " %9.3f", 1e3 * s->waiting);
    else fprintf(out, " %9s", "-");
    if (s->bytes > 0) fprintf(out, " %12.3f %8.2f", 1e-6 * s->bytes, ratio(1e-9 * s->bytes, s->seconds));
    else fprintf(out, " %12s %8s", "-", "-");
    if (s->flops > 0) fprintf(out, " %8.2f\n", ratio(1e-9 * s->flops, s->seconds));
    else fprintf(out, " %8s\n", "-");
}

void profile_print(const profile *p, FILE *out) {
    if (!p) return;
    sums all = total(p), other = {.seconds = p->wall - all.seconds};
    fprintf(out, "%-27s %9s %12s %7s %9s %12s %8s %8s\n", "operation", "calls", "ms", "share", "waiting", "MB", "GB/s", "GFLOP/s");
    for (int i = 0; i < N_LINES; i++)
        if (p->sum[i].calls > 0) print_sums(out, lines[i].name, &p->sum[i], p->wall);
    print_sums(out, "other", &other, p->wall);
    all.seconds = p->wall;
    print_sums(out, "wall", &all, p->wall);
    if (p->energy.known) fprintf(out, "%-27s %.3f J, %.1f W on average, all that the processor did meanwhile\n", "energy", p->energy.joules, ratio(p->energy.joules, p->wall));
    else fprintf(out, "%-27s not readable here (%s)\n", "energy", POWERCAP);
}

static void put_sums(const char *name, const sums *s) {
    printf("{\"operation\": \"%s\", \"calls\": %.0f, \"seconds\": %.9f, \"waiting\": %.9f, \"bytes\": %.0f, \"flops\": %.0f}", name, s->calls, s->seconds, s->waiting,
           s->bytes, s->flops);
}

static void put_profile(const profile *p) {
    sums all = total(p), other = {.seconds = p->wall - all.seconds};
    printf(", \"profile\": [");
    for (int i = 0; i < N_LINES; i++) {
        if (!(p->sum[i].calls > 0)) continue;
        put_sums(lines[i].name, &p->sum[i]);
        printf(", ");
    }
    put_sums("other", &other);
    printf("], \"joules\": ");
    if (p->energy.known) printf("%.6f", p->energy.joules);
    else printf("null");
}

int profile_write(profile *const *profiles, int n, FILE *out, const char *path, g4_error *err) {
    double first = INFINITY;
    size_t kept = 0, lost = 0;
    for (int i = 0; i < n; i++) {
        kept += profiles[i]->n_events, lost += profiles[i]->lost;
        for (size_t k = 0; k < profiles[i]->n_events; k++) first = MIN(first, profiles[i]->events[k].begin);
    }
    fprintf(out, "{\"displayTimeUnit\": \"ms\", \"traceEvents\": [\n");
    for (int i = 0; i < n; i++) {
        fprintf(out, "{\"name\": \"thread_name\", \"ph\": \"M\", \"pid\": 1, \"tid\": %d, \"args\": {\"name\": \"%s\"}}", i + 1, profiles[i]->inner->name);
        for (size_t k = 0; k < profiles[i]->n_events; k++) {
            const event *e = &profiles[i]->events[k];
            fprintf(out, ",\n{\"name\": \"%s\", \"ph\": \"X\", \"pid\": 1, \"tid\": %d, \"ts\": %.3f, \"dur\": %.3f, \"args\": {\"rows\": %d", lines[e->line].name, i + 1,
                    1e6 * (e->begin - first), 1e6 * (e->end - e->begin), (int)e->T);
            if (e->layer >= 0) fprintf(out, ", \"layer\": %d", e->layer);
            fprintf(out, "}}");
        }
        fprintf(out, i + 1 < n ? ",\n" : "\n");
    }
    fprintf(out, "]}\n");
    int failed = ferror(out);
    if (fclose(out) || failed) return g4_fail(err, "%s: cannot be written: %s", path, strerror(errno));
    return lost ? g4_fail(err, "%s: out of memory after %zu operations, %zu more are missing; run fewer tokens", path, kept, lost) : 0;
}

/* ---- Part 2: the machine -------------------------------------------------------------------------------------------------- */

typedef struct rate {
    double best, median;
} rate;

typedef struct machine {
    char processor[128];
    int threads;
    size_t buffer;         /* bytes that were read */
    rate read[2], peak[2]; /* bytes and operations per second: of one thread, of all */
} machine;

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* x [n], n odd; sorts it */
static double median(double *x, int n) {
    qsort(x, (size_t)n, sizeof *x, compare_doubles);
    return x[n / 2];
}

/* "model name" of /proc/cpuinfo; systems without it mostly have PROCESSOR_IDENTIFIER or nothing. */
static void find_processor(char name[128]) {
    char text[512];
    const char *environment = getenv("PROCESSOR_IDENTIFIER");
    snprintf(name, 128, "%s", environment ? environment : "unknown processor");
    FILE *f = fopen("/proc/cpuinfo", "r");
    while (f && fgets(text, sizeof text, f)) {
        char *colon = strchr(text, ':');
        if (strncmp(text, "model name", 10) || !colon || colon[1] != ' ') continue;
        colon[strcspn(colon, "\n")] = 0;
        snprintf(name, 128, "%.120s", colon + 2);
        break;
    }
    if (f) fclose(f);
}

/* The sum of words [n], eight at a time: the cheapest use of a word that a compiler cannot leave out. */
static uint64_t add_words(const uint64_t *words, size_t n) {
    uint64_t sum[8] = {0};
    for (size_t i = 0; i + 8 <= n; i += 8)
        for (int j = 0; j < 8; j++) sum[j] += words[i + j];
    return sum[0] + sum[1] + sum[2] + sum[3] + sum[4] + sum[5] + sum[6] + sum[7];
}

static volatile uint64_t used;      /* results that nobody looks at, where the compiler thinks that somebody does */
static volatile float used_float;

/* Bytes per second of one pass over words [n], each thread its own part. */
static double read_once(const uint64_t *words, size_t n, int threads) {
    uint64_t sum = 0;
    double begin = seconds();
#pragma omp parallel for schedule(static) num_threads(threads) reduction(+ : sum)
    for (int part = 0; part < threads; part++) {
        size_t from = n / 8 * (size_t)part / (size_t)threads * 8, to = n / 8 * (size_t)(part + 1) / (size_t)threads * 8;
        sum += add_words(words + from, to - from);
    }
    double time = seconds() - begin;
    used = sum;
    return time > 0 ? 8 * (double)n / time : 0;
}

/* Twelve chains of a product and a sum, n steps long: as many as hide the latency and still fit the registers. */
enum { CHAINS = 12 };
#define PEAK(name, target, type) \
    target static void name(int n) { \
        type x[CHAINS], factor = (type){0} + 0.75f, term = (type){0} + 0.25f; \
        for (int i = 0; i < CHAINS; i++) x[i] = (type){0} + (float)i; \
        for (int step = 0; step < n; step++) \
            for (int i = 0; i < CHAINS; i++) x[i] = x[i] * factor + term; \
        for (int i = 1; i < CHAINS; i++) x[0] += x[i]; \
        float first; \
        memcpy(&first, &x[0], sizeof first); \
        used_float = first; \
    }

#ifdef __GNUC__
typedef float four_floats __attribute__((vector_size(16)));
#else
typedef float four_floats;
#endif
PEAK(peak_base, , four_floats)

/* gcc on Windows aligns the stack to 16 bytes only, which its wider vectors do not survive. */
#if defined(__GNUC__) && defined(__x86_64__) && !(defined(_WIN32) && !defined(__clang__))
#define HAVE_AVX
typedef float eight_floats __attribute__((vector_size(32)));
typedef float sixteen_floats __attribute__((vector_size(64)));
PEAK(peak_avx2, __attribute__((target("avx2"))), eight_floats)
PEAK(peak_avx512, __attribute__((target("avx512f"))), sixteen_floats)
#endif

/* Operations per second. */
static double compute_once(int steps, int threads) {
    void (*function)(int) = peak_base;
    int width = (int)(sizeof(four_floats) / sizeof(float));
#ifdef HAVE_AVX
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) function = peak_avx512, width = 16;
    else if (__builtin_cpu_supports("avx2")) function = peak_avx2, width = 8;
#endif
    double begin = seconds();
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int part = 0; part < threads; part++) function(steps);
    double time = seconds() - begin;
    return time > 0 ? 2.0 * CHAINS * width * steps * threads / time : 0;
}

static int measure_machine(machine *m, int threads, double budget, g4_error *err) {
    enum { MOST = 25 };
    double read[2][MOST], peak[2][MOST], begin = seconds();
    int n = 0, steps = 1 << 16;
    *m = (machine){.threads = threads, .buffer = (size_t)256 << 20};
    find_processor(m->processor);
    uint64_t *words = malloc(m->buffer);
    while (!words && m->buffer > (1 << 20)) words = malloc(m->buffer /= 2);
    if (!words) return g4_fail(err, "out of memory for a buffer of %zu bytes with which the read bandwidth is measured", m->buffer);
    memset(words, 1, m->buffer);
    while (steps < 1 << 26 && 2.0 * CHAINS * steps / compute_once(steps, 1) < 0.003) steps *= 2; /* long beside the start of threads */
    do {
        for (int all = 0; all < 2; all++) {
            read[all][n] = read_once(words, m->buffer / sizeof *words, all ? threads : 1);
            peak[all][n] = compute_once(steps, all ? threads : 1);
        }
        n++;
    } while (n < MOST && (n < 3 || n % 2 == 0 || seconds() - begin < budget));
    free(words);
    for (int all = 0; all < 2; all++) {
        m->read[all].median = median(read[all], n), m->read[all].best = read[all][n - 1];
        m->peak[all].median = median(peak[all], n), m->peak[all].best = peak[all][n - 1];
    }
    return 0;
}

/* ---- Part 3: the cells ---------------------------------------------------------------------------------------------------- */

typedef struct cell {
    const char *name;
    enum { PREFILL, DECODE, BATCH } kind;
    int n;          /* tokens of the prompt; of the context; sequences */
    int all_logits; /* of every token of the prompt, not of its last one only */
    int full;       /* with --full, or when asked for by name */
} cell;

static const cell cells[] = {
    {"prefill1", PREFILL, 1, 0, 0},       {"prefill8", PREFILL, 8, 0, 0},       {"prefill20", PREFILL, 20, 0, 1},     {"prefill32", PREFILL, 32, 0, 0},
    {"prefill128", PREFILL, 128, 0, 0},   {"prefill512", PREFILL, 512, 0, 0},   {"prefill2048", PREFILL, 2048, 0, 1},
    {"logits128", PREFILL, 128, 1, 0},    {"decode0", DECODE, 0, 0, 0},         {"decode1024", DECODE, 1024, 0, 0},
    {"decode8192", DECODE, 8192, 0, 0},   {"batch1", BATCH, 1, 0, 0},           {"batch2", BATCH, 2, 0, 0},
    {"batch4", BATCH, 4, 0, 0},           {"batch8", BATCH, 8, 0, 0},           {"batch16", BATCH, 16, 0, 1},
};
enum { N_CELLS = sizeof cells / sizeof *cells };

enum {
    MOST_SAMPLES = 25,
    MOST_STEPS = 32, /* decoded in one sample */
    TOO_LONG = 10    /* times the seconds of a cell: no single call is to take longer */
};

/* A backend in the cell that is being measured. */
typedef struct lane {
    g4_model *model;
    profile *profile;
    g4_state *state;       /* NULL: the cell is skipped, and `why` tells */
    char why[1024];
    double flops_rate;     /* of the cell measured last; 0: none yet */
    int calls;             /* g4_forward in one sample */
    double bytes, flops;   /* of one call */
    double sample[MOST_SAMPLES]; /* [n] seconds of one call */
    int n, wanted;
} lane;

/* What lanes share. */
typedef struct stage {
    const bench_options *o;
    machine machine;
    lane *lanes;           /* [n_lanes] */
    int n_lanes;
    const cell *cell;
    g4_row *rows;          /* [longest prompt or context] */
    float *logits;         /* [most rows with logits][V] */
    int printed;
} stage;

static int max_calls(const cell *c, int chunk) { return c->kind == PREFILL ? 1000 : MIN(MOST_STEPS, chunk); }

static int context(const cell *c) { return c->kind == PREFILL ? c->n : (c->kind == DECODE ? c->n : 0) + MOST_STEPS; }

/* Ids that jump about in the tables, as those of a text do. */
static int32_t some_token(const g4_config *c, int i) {
    int end = c->hidden_size_per_layer_input ? MIN(c->vocab_size, c->vocab_size_per_layer_input) : c->vocab_size;
    return (int32_t)(((uint32_t)i + 1) * 2654435761u % (uint32_t)end);
}

/* Back to where the cell begins. */
static int restart(const lane *b, const cell *c, g4_error *err) {
    int n_seqs = c->kind == BATCH ? c->n : 1;
    for (int seq = 0; seq < n_seqs; seq++)
        if (g4_truncate(b->state, seq, c->kind == DECODE ? c->n : 0, err)) return -1;
    return 0;
}

/* calls [n] of g4_forward; *time gets the seconds of one. */
static int take_sample(stage *s, lane *b, int calls, double *time, g4_error *err) {
    const cell *c = s->cell;
    int T = c->kind == DECODE ? 1 : c->n;
    profile_start(b->profile);
    double begin = seconds();
    for (int k = 0; k < calls; k++) {
        if ((!k || c->kind == PREFILL) && restart(b, c, err)) return -1;
        for (int t = 0; t < T; t++)
            s->rows[t] = (g4_row){.token = some_token(&b->model->config, k * T + t), .seq = c->kind == BATCH ? t : 0,
                                  .pos = c->kind == PREFILL ? t : c->kind == DECODE ? c->n + k : k,
                                  .want_logits = c->kind != PREFILL || c->all_logits || t == T - 1};
        if (g4_forward(b->state, s->rows, T, s->logits, err)) return -1;
    }
    *time = (seconds() - begin) / calls;
    profile_stop(b->profile);
    return 0;
}

/* What the calls of a sample read and compute, without computing it. */
static int count_sample(stage *s, lane *b, int calls, g4_error *err) {
    double time;
    set_mode(b->profile, COUNT);
    reset(b->profile);
    if (take_sample(s, b, calls, &time, err)) return -1;
    sums all = total(b->profile);
    b->bytes = all.bytes / calls, b->flops = all.flops / calls;
    return 0;
}

/* The context of a decoding cell: tokens whose K and V are written to the caches, though not computed. Their values do not matter to the time. */
static int fill_context(stage *s, lane *b, g4_error *err) {
    const cell *c = s->cell;
    if (c->kind != DECODE || !c->n) return 0;
    for (int t = 0; t < c->n; t++) s->rows[t] = (g4_row){.token = some_token(&b->model->config, t), .pos = t};
    set_mode(b->profile, COUNT);
    return g4_forward(b->state, s->rows, c->n, NULL, err);
}

/* Opens the lane's state, tries the cell once or twice, and decides how many samples of how many calls there are to be. Every sample is its own
 * measurement: where one call lasts longer than the budget, the trial is the only one. */
static int prepare(stage *s, lane *b, g4_error *err) {
    const bench_options *o = s->o;
    const cell *c = s->cell;
    const g4_config *config = &b->model->config;
    double budget = o->seconds / s->n_lanes, time;
    int limit = o->state.ctx ? o->state.ctx : config->max_position_embeddings;
    g4_state_options options = o->state;
    options.ctx = context(c), options.n_seqs = c->kind == BATCH ? c->n : 1;
    b->state = NULL, b->n = b->wanted = 0;
    if (options.ctx > limit) {
        snprintf(b->why, sizeof b->why, "needs a context of %d, the limit is %d", options.ctx, limit);
        return 0;
    }
    b->state = g4_state_open(b->model, &options, err);
    if (!b->state) {
        snprintf(b->why, sizeof b->why, "%s", err->text);
        return 0;
    }
    const int most = max_calls(c, g4_state_get_options(b->state)->chunk);
    if (fill_context(s, b, err) || count_sample(s, b, 1, err)) return -1;
    double expected = ratio(b->flops, b->flops_rate);
    if (expected > TOO_LONG * o->seconds && !o->full && !o->only) {
        snprintf(b->why, sizeof b->why, "would take about %.0f s; --full or --only %s measures it", expected, c->name);
        g4_state_close(b->state);
        b->state = NULL;
        return 0;
    }
    set_mode(b->profile, o->profile ? TIME : STAND_BY);
    reset(b->profile);
    if (take_sample(s, b, 1, &time, err)) return -1;
    if (time >= budget * 2) {
        b->calls = 1;
        b->sample[b->n++] = time;
        b->wanted = 1;
        return 0;
    }
    if (take_sample(s, b, 1, &time, err)) return -1; /* the first one had fresh memory to fetch */
    double calls = ceil(budget / MOST_SAMPLES / MAX(time, 1e-9));
    b->calls = calls < most ? (int)calls : most;
    if (count_sample(s, b, b->calls, err)) return -1;
    set_mode(b->profile, o->profile ? TIME : STAND_BY);
    reset(b->profile);
    double samples = budget / (b->calls * MAX(time, 1e-9));
    b->wanted = samples < 3 ? 3 : samples < MOST_SAMPLES ? (int)samples - 1 + (int)samples % 2 : MOST_SAMPLES;
    return 0;
}

/* The samples of all lanes, in turns; a lane that gets fewer has them spread over the whole time. */
static int take_samples(stage *s, g4_error *err) {
    int rounds = 0;
    for (int i = 0; i < s->n_lanes; i++)
        if (s->lanes[i].state && !s->lanes[i].n) rounds = MAX(rounds, s->lanes[i].wanted);
    for (int round = 0; round < rounds; round++)
        for (int i = 0; i < s->n_lanes; i++) {
            lane *b = &s->lanes[i];
            if (!b->state || b->n >= (b->wanted * (round + 1) + rounds - 1) / rounds) continue;
            if (take_sample(s, b, b->calls, &b->sample[b->n], err)) return -1;
            b->n++;
        }
    return 0;
}

static void report(stage *s, lane *b) {
    const cell *c = s->cell;
    const machine *m = &s->machine;
    const char *backend = b->profile->inner->name;
    const int json = s->o->json;
    if (json) {
        printf("%s{\"cell\": \"%s\", \"backend\": \"%s\"", s->printed++ ? ", " : "", c->name, backend);
    } else {
        printf("%-11s %-8s ", c->name, backend);
    }
    if (!b->state) {
        if (json) {
            printf(", \"skipped\": ");
            put_json_string(b->why, strlen(b->why));
            printf("}");
        } else {
            printf("skipped: %s\n", b->why);
        }
        return;
    }
    double time = median(b->sample, b->n), tokens = c->kind == DECODE ? 1 : c->n;
    double fastest = b->sample[0], slowest = b->sample[b->n - 1];
    b->flops_rate = ratio(b->flops, time);
    if (json) {
        printf(", \"tokens\": %.0f, \"samples\": %d, \"calls_per_sample\": %d, \"seconds\": %.9f", tokens, b->n, b->calls, time);
        printf(", \"tokens_per_second\": %.6g, \"min\": %.6g, \"max\": %.6g", ratio(tokens, time), ratio(tokens, slowest), ratio(tokens, fastest));
        printf(", \"bytes\": %.0f, \"flops\": %.0f, \"gb_per_second\": %.6g, \"read_share\": %.6g", b->bytes, b->flops, ratio(1e-9 * b->bytes, time),
               ratio(b->bytes / m->read[1].best, time));
        printf(", \"gflop_per_second\": %.6g, \"peak_share\": %.6g", ratio(1e-9 * b->flops, time), ratio(b->flops / m->peak[1].best, time));
        if (s->o->profile) put_profile(b->profile);
        printf("}");
        return;
    }
    printf("%9.2f %9.2f .. %-9.2f %4d %8.2f %5.0f%% %8.2f %5.0f%%\n", ratio(tokens, time), ratio(tokens, slowest), ratio(tokens, fastest), b->n,
           ratio(1e-9 * b->bytes, time), 100 * ratio(b->bytes / m->read[1].best, time), ratio(1e-9 * b->flops, time),
           100 * ratio(b->flops / m->peak[1].best, time));
    if (s->o->profile) {
        printf("\n");
        profile_print(b->profile, stdout);
        printf("\n");
    }
}

/* Whether `name` is in the list; names parted by commas. */
static int is_listed(const char *list, const char *name) {
    size_t n = strlen(name);
    for (const char *at = list; at; at = strchr(at, ','), at += at != NULL)
        if (!strncmp(at, name, n) && (!at[n] || at[n] == ',')) return 1;
    return 0;
}

static int is_chosen(const bench_options *o, const cell *c) { return o->only ? is_listed(o->only, c->name) : o->full || !c->full; }

static int check_only(const bench_options *o, g4_error *err) {
    char known[512] = "";
    for (int i = 0; i < N_CELLS; i++) snprintf(known + strlen(known), sizeof known - strlen(known), "%s%s", i ? ", " : "", cells[i].name);
    for (const char *at = o->only; at; at = strchr(at, ','), at += at != NULL) {
        int n = (int)strcspn(at, ","), found = 0;
        for (int i = 0; i < N_CELLS; i++) found |= (int)strlen(cells[i].name) == n && !strncmp(cells[i].name, at, (size_t)n);
        if (!found) return g4_fail(err, "--only: there is no cell \"%.*s\"; there are %s", MIN(n, 40), at, known);
    }
    return 0;
}

static void put_rate(const char *name, const rate *r) { printf("\"%s\": {\"best\": %.6g, \"median\": %.6g}", name, r->best, r->median); }

static void put_heading(const stage *s) {
    const bench_options *o = s->o;
    const machine *m = &s->machine;
    const char *weights = g4_types[s->lanes[0].model->layers[0].q_proj.type].name, *precision = precision_names[o->state.precision];
    if (o->json) {
        printf("{\"model\": ");
        put_json_string(o->path, strlen(o->path));
        printf(", \"weights\": \"%s\", \"precision\": \"%s\", \"bytes_per_token\": %.0f, \"processor\": ", weights, precision, o->token_bytes);
        put_json_string(m->processor, strlen(m->processor));
        printf(", \"threads\": %d, \"read_buffer_bytes\": %zu, ", m->threads, m->buffer);
        put_rate("read_bytes_per_second_1_thread", &m->read[0]);
        printf(", ");
        put_rate("read_bytes_per_second", &m->read[1]);
        printf(", ");
        put_rate("flops_per_second_1_thread", &m->peak[0]);
        printf(", ");
        put_rate("flops_per_second", &m->peak[1]);
        printf(", \"cells\": [");
        return;
    }
    printf("model      %s: %s weights, %.3f MB read per token; computed in %s\n", o->path, weights, 1e-6 * o->token_bytes, precision);
    printf("machine    %s, threads %d\n", m->processor, m->threads);
    printf("reads      1 thread %.2f GB/s (median %.2f), all %.2f (median %.2f), from %zu MB\n", 1e-9 * m->read[0].best, 1e-9 * m->read[0].median,
           1e-9 * m->read[1].best, 1e-9 * m->read[1].median, m->buffer >> 20);
    printf("computes   1 thread %.2f GFLOP/s (median %.2f), all %.2f (median %.2f), float32 products and sums, not fused\n\n", 1e-9 * m->peak[0].best,
           1e-9 * m->peak[0].median, 1e-9 * m->peak[1].best, 1e-9 * m->peak[1].median);
    printf("%-11s %-8s %9s %9s .. %-9s %4s %8s %6s %8s %6s\n", "cell", "backend", "tokens/s", "min", "max", "n", "GB/s", "read", "GFLOP/s", "peak");
}

static int measure_cells(stage *s, g4_error *err) {
    for (int i = 0; i < N_CELLS; i++) {
        int failed = 0;
        s->cell = &cells[i];
        if (!is_chosen(s->o, s->cell)) continue;
        for (int k = 0; k < s->n_lanes && !failed; k++) failed = prepare(s, &s->lanes[k], err);
        failed = failed || take_samples(s, err);
        for (int k = 0; k < s->n_lanes; k++) {
            if (!failed) report(s, &s->lanes[k]);
            g4_state_close(s->lanes[k].state);
            s->lanes[k].state = NULL;
        }
        if (failed) return -1;
        flush_results();
    }
    return 0;
}

/* One token, so that no cell waits for weights to come from the disk. *threads gets the number, default filled in, that a state has. */
static int touch_weights(stage *s, lane *b, int *threads, g4_error *err) {
    g4_state_options options = s->o->state;
    options.ctx = 1;
    g4_state *state = g4_state_open(b->model, &options, err);
    if (!state) return -1;
    *threads = g4_state_get_options(state)->threads;
    set_mode(b->profile, STAND_BY);
    s->rows[0] = (g4_row){.token = some_token(&b->model->config, 0), .want_logits = 1};
    int failed = g4_forward(state, s->rows, 1, s->logits, err);
    g4_state_close(state);
    return failed;
}

int bench(g4_model *const *models, int n, const bench_options *o, g4_error *err) {
    stage s = {.o = o, .n_lanes = n};
    profile **profiles = calloc((size_t)n, sizeof *profiles);
    int longest = 1, logit_rows = 1, failed = check_only(o, err);
    for (int i = 0; i < N_CELLS; i++) {
        if (!is_chosen(o, &cells[i])) continue;
        longest = MAX(longest, cells[i].n);
        if (cells[i].kind == BATCH || cells[i].all_logits) logit_rows = MAX(logit_rows, cells[i].n);
    }
    size_t V = (size_t)g4_get_config(models[0])->vocab_size;
    s.lanes = calloc((size_t)n, sizeof *s.lanes);
    s.rows = malloc((size_t)longest * sizeof *s.rows);
    s.logits = V < SIZE_MAX / sizeof(float) / (size_t)logit_rows ? malloc(V * sizeof(float) * (size_t)logit_rows) : NULL;
    if (!failed && (!profiles || !s.lanes || !s.rows || !s.logits)) failed = g4_fail(err, "out of memory for the logits of %d tokens", logit_rows);
    for (int i = 0; i < n && !failed; i++) {
        profiles[i] = profile_open(models[i], o->trace != NULL, err);
        s.lanes[i] = (lane){.model = models[i], .profile = profiles[i]};
        failed = !profiles[i];
    }
    int threads = 1;
    for (int i = 0; i < n && !failed; i++) failed = touch_weights(&s, &s.lanes[i], &threads, err);
    failed = failed || measure_machine(&s.machine, threads, o->seconds, err);
    if (!failed) {
        put_heading(&s);
        flush_results();
        failed = measure_cells(&s, err);
    }
    if (!failed && o->json) printf("]}\n");
    if (!failed && o->trace) failed = profile_write(profiles, n, o->trace, o->trace_path, err);
    for (int i = 0; i < n && profiles; i++) profile_close(profiles[i]);
    free(profiles), free(s.lanes), free(s.rows), free(s.logits);
    return failed ? -1 : 0;
}

/* ---- Part 4: the kernels -------------------------------------------------------------------------------------------------------
 *
 * What a model is made of, by itself: opening its file, a matrix-vector product for each type of weights, a query over very many keys.
 */

enum { SAMPLES = 5 };

static int time_opening(const char *path, int json, g4_error *err) {
    double model[SAMPLES], tokenizer[SAMPLES];
    int has_tokenizer = 1;
    for (int i = 0; i < SAMPLES; i++) {
        const g4_options options = {.prefetch = G4_PREFETCH_NONE};
        double begin = seconds();
        g4_model *m = g4_open(path, &options, err);
        model[i] = seconds() - begin;
        if (!m) return -1;
        g4_close(m);
        begin = seconds();
        g4_tokenizer *t = has_tokenizer ? g4_tokenizer_open(path, NULL) : NULL;
        tokenizer[i] = seconds() - begin;
        if (!t) has_tokenizer = 0;
        g4_tokenizer_close(t);
    }
    double ms = 1e3 * median(model, SAMPLES), tokenizer_ms = 1e3 * median(tokenizer, SAMPLES);
    if (json) printf("\"open_ms\": %.6g, \"tokenizer_ms\": %.6g, ", ms, has_tokenizer ? tokenizer_ms : 0);
    else if (has_tokenizer) printf("opens      in %.2f ms, headers read and weights mapped; the tokenizer in %.2f ms (medians, the file in the cache)\n\n", ms, tokenizer_ms);
    else printf("opens      in %.2f ms, headers read and weights mapped (median, the file in the cache)\n\n", ms);
    return 0;
}

/* One product of W and a vector, in seconds; x [cols], y [rows]. */
static double product_once(const g4_run *run, float *y, const g4_tensor *W, const float *x) {
    double begin = seconds();
    run->backend->matmul(run, y, W, x, 1);
    return seconds() - begin;
}

static int time_products(const g4_backend *backend, const machine *m, const bench_options *o, g4_error *err) {
    enum { COLS = 6144 };
    const size_t size = MIN(m->buffer, (size_t)(MAX(o->seconds, 0.01) * (double)((size_t)128 << 20))); /* large beside the caches, unless there is little time */
    unsigned char *data = malloc(size);
    int64_t most_rows = 0;
    for (int type = 0; type < G4_N_TYPES; type++) most_rows = MAX(most_rows, (int64_t)size / (COLS / g4_types[type].block * g4_types[type].bytes));
    float *y = malloc(sizeof *y * (size_t)most_rows), *x = malloc(sizeof *x * COLS);
    float *scratch = calloc((backend->scratch ? backend->scratch(1, COLS, m->threads) : 0) + 1, sizeof *scratch);
    if (!data || !y || !x || !scratch) {
        free(data), free(y), free(x), free(scratch);
        return g4_fail(err, "out of memory for a matrix of %zu bytes", size);
    }
    for (size_t i = 0; i < size; i++) data[i] = (unsigned char)(0x30 + (i * 2654435761u >> 28)); /* scales and floats of ordinary size: subnormals are slow */
    for (int i = 0; i < COLS; i++) x[i] = 1.0f + (float)(i % 13) / 8;
    if (o->json) printf("\"products\": [");
    else printf("%-8s %-7s %9s %6s %8s %9s %8s %6s   a matrix of %zu MB times one vector\n", "weights", "threads", "GB/s", "read", "Gweights", "GFLOP/s", "per core", "peak", size >> 20);
    for (int type = 0, count = 0; type < G4_N_TYPES; type++)
        for (int all = 0; all < (m->threads > 1 ? 2 : 1); all++, count++) {
            const int threads = all ? m->threads : 1;
            g4_tensor W = {.data = data, .type = (g4_dtype)type, .cols = COLS, .name = "bench"};
            W.rows = (int64_t)(size / g4_row_bytes(&W)) / 16 * 16;
            const g4_run run = {.backend = backend, .threads = threads, .precision = o->state.precision, .scratch = scratch};
            double time[SAMPLES], bytes = (double)W.rows * (double)g4_row_bytes(&W), weights = (double)W.rows * COLS;
            for (int i = 0; i < SAMPLES; i++) time[i] = product_once(&run, y, &W, x);
            const double t = median(time, SAMPLES);
            if (o->json) {
                printf("%s{\"weights\": \"%s\", \"threads\": %d, \"bytes_per_second\": %.6g, \"weights_per_second\": %.6g}", count ? ", " : "", g4_types[type].name, threads, bytes / t,
                       weights / t);
            } else {
                printf("%-8s %7d %9.2f %5.0f%% %8.2f %9.2f %8.2f %5.0f%%\n", g4_types[type].name, threads, 1e-9 * bytes / t, 100 * bytes / t / m->read[all].best, 1e-9 * weights / t,
                       2e-9 * weights / t, 2e-9 * weights / t / threads, 200 * weights / t / m->peak[all].best);
            }
            flush_results();
        }
    if (o->json) printf("]");
    used_float = y[0];
    free(data), free(y), free(x), free(scratch);
    return 0;
}

/* One query of one head over n keys of 512 dimensions: what a full-attention layer of a very long text costs. */
static int time_attention(const g4_backend *backend, const machine *m, const bench_options *o, g4_error *err) {
    enum { DH = 512, KEYS = 1 << 20 };
    const size_t floats = (size_t)KEYS * DH;
    const int fits = floats <= PTRDIFF_MAX / sizeof(float); /* not on machines of 32 bits */
    float *k = fits ? malloc(floats * sizeof *k) : NULL, *v = fits ? malloc(floats * sizeof *v) : NULL;
    float *scores = malloc(sizeof *scores * KEYS * (size_t)m->threads), q[DH], out[DH];
    int32_t token = 0, seq = 0, pos = KEYS - 1;
    int failed = !k || !v || !scores ? g4_fail(err, "out of memory for the keys and values of %d positions, %.1f GB", KEYS, 8e-9 * (double)floats) : 0;
    if (!failed) {
        for (size_t i = 0; i < floats; i++) k[i] = (float)(i * 2654435761u % 1024) / 16384, v[i] = 1;
        for (int i = 0; i < DH; i++) q[i] = 1;
        const g4_kv kv = {.k = k, .v = v, .G = 1, .dh = DH, .R = KEYS, .window = KEYS};
        const g4_rows rows = {.token = &token, .seq = &seq, .pos = &pos, .T = 1};
        const g4_run run = {.backend = backend, .threads = m->threads};
        const g4_attention_args a = {.o = out, .q = q, .kv = &kv, .rows = &rows, .H = 1, .scores = scores, .score_rows = 1, .ctx = KEYS};
        double time[3];
        for (int i = 0; i < 3; i++) {
            double begin = seconds();
            backend->attention(&run, &a);
            time[i] = seconds() - begin;
        }
        double t = median(time, 3), bytes = 8.0 * (double)floats, scratch = 4.0 * KEYS * m->threads;
        used_float = out[0];
        if (o->json) printf(", \"attention\": {\"keys\": %d, \"head_dim\": %d, \"seconds\": %.6g, \"bytes_per_second\": %.6g, \"scratch_bytes\": %.0f}", KEYS, DH, t, bytes / t, scratch);
        else printf("\nattention  one head over %d keys of %d: %.1f ms, %.2f GB/s (%.0f%% of what all threads read), scratch %.0f MB\n", KEYS, DH, 1e3 * t, 1e-9 * bytes / t,
                    100 * bytes / t / m->read[1].best, 1e-6 * scratch);
    }
    free(k), free(v), free(scores);
    return failed;
}

int bench_kernels(const g4_model *model, const bench_options *o, g4_error *err) {
    machine m;
    g4_state *s = g4_state_open(model, &o->state, err);
    if (!s) return -1;
    int threads = g4_state_get_options(s)->threads;
    g4_state_close(s);
    if (measure_machine(&m, threads, o->seconds, err)) return -1;
    if (o->json) {
        printf("{\"processor\": ");
        put_json_string(m.processor, strlen(m.processor));
        printf(", \"backend\": \"%s\", \"threads\": %d, \"read_bytes_per_second\": %.6g, \"flops_per_second\": %.6g, ", model->backend->name, threads, m.read[1].best, m.peak[1].best);
    } else {
        printf("machine    %s, threads %d, backend %s\n", m.processor, threads, model->backend->name);
        printf("reads      1 thread %.2f GB/s, all %.2f\ncomputes   1 thread %.2f GFLOP/s, all %.2f, float32 products and sums, not fused\n", 1e-9 * m.read[0].best, 1e-9 * m.read[1].best,
               1e-9 * m.peak[0].best, 1e-9 * m.peak[1].best);
    }
    int failed = time_opening(o->path, o->json, err) || time_products(model->backend, &m, o, err) || (o->full && time_attention(model->backend, &m, o, err));
    if (!failed && o->json) printf("}\n");
    return failed ? -1 : 0;
}
