/* test_load.c - opening a model: what the system is asked to read ahead, and what is reported while it takes long. Neither may change a bit or be needed.
 *
 * posix_madvise is this program's own: it notes what it is asked for, and refuses it. So a system that does not know the call is tested along.
 */
#define _FILE_OFFSET_BITS 64
#include "gemma4.h"
#include "test.h"

#if defined(_WIN32) || defined(__wasi__)
int main(void) {
    SKIP("this system has no posix_madvise");
    return test_done("test_load");
}
#else
#include <errno.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static g4_error err;

typedef struct range {
    uintptr_t begin, end;
} range;
static range will_need[4096], random_one;
static int n_will_need, n_random;

int posix_madvise(void *address, size_t size, int advice) {
    range r = {(uintptr_t)address, (uintptr_t)address + size};
    if (advice == POSIX_MADV_WILLNEED && n_will_need < 4096) will_need[n_will_need++] = r;
    if (advice == POSIX_MADV_RANDOM) random_one = r, n_random++;
    return EINVAL;
}

static uint64_t last_done, last_total;
static int reports, fell;
static void note_progress(void *user, const char *path, uint64_t done, uint64_t total) {
    fell += done > total || (done < last_done && last_done < last_total);
    last_done = done, last_total = total;
    reports += user == &reports && *path;
}

static g4_model *open_model(const char *path, g4_prefetch prefetch, int no_mmap) {
    n_will_need = n_random = reports = fell = 0;
    last_done = last_total = 0;
    g4_model *m = g4_open(path, &(g4_options){.prefetch = prefetch, .no_mmap = no_mmap, .progress = note_progress, .user = &reports}, &err);
    CHECK(m, "%s: %s", path, err.text);
    return m;
}

/* Whether an advice of the list, or several in a row, covers t. */
static int is_covered(const g4_tensor *t) {
    uintptr_t at = (uintptr_t)t->data, end = at + (size_t)t->rows * g4_row_bytes(t);
    for (int i = 0; i < n_will_need && at < end; i++)
        if (will_need[i].begin <= at && at < will_need[i].end) at = will_need[i].end;
    return !t->data || at >= end;
}

static uint64_t streamed_bytes(const g4_model *m) {
    const int per_layer = sizeof(g4_layer) / sizeof(g4_tensor), n = m->config.num_hidden_layers * per_layer;
    uint64_t sum = 0;
    for (int i = -1; i <= n; i++) {
        const g4_tensor *t = i < 0 ? &m->per_layer_model_projection : i < n ? &m->layers[i / per_layer].input_layernorm + i % per_layer : &m->lm_head;
        if (t->data) sum += (uint64_t)t->rows * g4_row_bytes(t);
    }
    return sum;
}

static uint64_t logits_hash(g4_model *m) {
    enum { T = 9 };
    uint64_t hash = 14695981039346656037u;
    size_t n = T * (size_t)g4_get_config(m)->vocab_size;
    float *logits = malloc(n * sizeof *logits);
    g4_state *s = g4_state_open(m, &(g4_state_options){.ctx = 16, .threads = 1}, &err);
    g4_row rows[T];
    for (int i = 0; i < T; i++) rows[i] = (g4_row){.token = 5 + 7 * i, .pos = i, .want_logits = 1};
    CHECK(logits && s && !g4_forward(s, rows, T, logits, &err), "forward: %s", err.text);
    for (size_t i = 0; logits && i < n * sizeof *logits; i++) hash = (hash ^ ((unsigned char *)logits)[i]) * 1099511628211u;
    g4_state_close(s);
    free(logits);
    return hash;
}

static void test_modes(const char *path, int files) {
    static const char *const names[] = {"auto", "none", "head", "all", "no_mmap"};
    uint64_t first = 0;
    for (int mode = 0; mode < 5; mode++) {
        g4_model *m = open_model(path, mode < 4 ? (g4_prefetch)mode : G4_PREFETCH_ALL, mode == 4);
        if (!m) continue;
        uint64_t hash = logits_hash(m), streamed = streamed_bytes(m);
        if (mode == 0) first = hash;
        CHECK(hash == first, "%s: other bits with %s", path, names[mode]);
        const g4_tensor *table = &m->embed_tokens_per_layer;
        const int advised = mode != G4_PREFETCH_NONE && mode != 4;
        CHECK(advised ? n_will_need > 0 : !n_will_need && !n_random, "%s, %s: %d times asked to read, %d times not to", path, names[mode], n_will_need, n_random);
        for (int l = 0; advised && l < m->config.num_hidden_layers; l++)
            for (size_t i = 0; i < sizeof(g4_layer) / sizeof(g4_tensor); i++) {
                const g4_tensor *t = &m->layers[l].input_layernorm + i;
                CHECK(is_covered(t), "%s, %s: %s is not read ahead", path, names[mode], t->name);
            }
        if (advised) CHECK(is_covered(&m->lm_head), "%s, %s: the head is not read ahead", path, names[mode]);
        if (advised && table->data)
            CHECK(n_random == 1 && random_one.begin <= (uintptr_t)table->data && (uintptr_t)table->data - random_one.begin < 1 << 16 &&
                      random_one.end == (uintptr_t)table->data + (size_t)table->rows * g4_row_bytes(table),
                  "%s, %s: the per-layer embeddings are read a row at a time", path, names[mode]);
        if (advised) CHECK(last_done == streamed && last_total == streamed && !fell, "%s, %s: %llu of %llu bytes reported, %llu expected", path, names[mode],
                           (unsigned long long)last_done, (unsigned long long)last_total, (unsigned long long)streamed);
        if (mode == 4) CHECK(reports == files && last_done == last_total && !fell, "%s: %d reports of %d files", path, reports, files);
        if (mode == G4_PREFETCH_NONE) CHECK(!reports, "%s: %d reports of nothing", path, reports);
        g4_close(m);
    }
}

/* A model with layers of 227 MB, all holes: "head" is some of them, in the order of the forward pass, and each byte is asked for once. */
static void test_large(void) {
    enum { TIMES = 16384, HEAD = 256 << 20, PIECE = 64 << 20 };
    static const char from[] = "test/fixtures/31b";
    char path[64], dir[] = "/tmp/gemma4-load-XXXXXX", *config = NULL;
    g4_safetensors st;
    g4_file file;
    CHECK(mkdtemp(dir), "%s: %s", dir, strerror(errno));
    snprintf(path, sizeof path, "%s/config.json", from);
    int failed = g4_file_open(&file, path, 1, &err);
    CHECK(!failed, "%s", err.text);
    if (failed) return;
    const char *at = NULL, *key = "\"intermediate_size\": 64,";
    config = calloc(1, file.size + 1);
    if (config) memcpy(config, file.data, file.size), at = strstr(config, key);
    CHECK(at, "%s: %s", path, key);
    snprintf(path, sizeof path, "%s/config.json", dir);
    FILE *out = fopen(path, "wb");
    if (out && at) fprintf(out, "%.*s\"intermediate_size\": %d,%s", (int)(at - config), config, 64 * TIMES, at + strlen(key));
    if (out) fclose(out);
    g4_file_close(&file);
    free(config);

    snprintf(path, sizeof path, "%s/model.safetensors", from);
    failed = g4_safetensors_open(&st, path, 0, &err);
    CHECK(!failed, "%s", err.text);
    if (failed) return;
    char *header = malloc(1 << 20);
    size_t n = 8;
    int64_t offset = 0;
    for (int i = 0; header && i < st.n; i++) {
        const g4_st_tensor *t = &st.tensors[i];
        int64_t bytes = (int64_t)t->bytes;
        n += (size_t)sprintf(header + n, "%c\"%s\":{\"dtype\":\"%s\",\"shape\":[", i ? ',' : '{', t->name, t->dtype);
        for (int d = 0; d < t->rank; d++) {
            int grows = strstr(t->name, ".mlp.") && t->shape[d] == 64;
            if (grows) bytes *= TIMES;
            n += (size_t)sprintf(header + n, "%s%lld", d ? "," : "", (long long)t->shape[d] * (grows ? TIMES : 1));
        }
        n += (size_t)sprintf(header + n, "],\"data_offsets\":[%lld,%lld]}", (long long)offset, (long long)(offset + bytes));
        offset += bytes;
    }
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    out = fopen(path, "wb");
    if (header && out) {
        header[n++] = '}';
        for (int i = 0; i < 8; i++) header[i] = (char)((n - 8) >> 8 * i);
        failed = fwrite(header, 1, n, out) != n || fflush(out) || ftruncate(fileno(out), (off_t)n + offset);
    }
    if (out) fclose(out);
    free(header);
    g4_safetensors_close(&st);

    for (int mode = G4_PREFETCH_NONE; mode <= G4_PREFETCH_ALL && !failed; mode++) {
        n_will_need = 0, last_done = 0;
        g4_model *m = g4_open(dir, &(g4_options){.prefetch = (g4_prefetch)mode, .progress = note_progress, .user = &reports}, &err);
        if (!m && strstr(err.text, "memory")) {
            SKIP("a model of %lld bytes: %s", (long long)offset, err.text);
            break;
        }
        CHECK(m, "%s", err.text);
        if (!m) continue;
        int covered = 0;
        while (covered < 6 && is_covered(&m->layers[covered].gate_proj) && is_covered(&m->layers[covered].down_proj)) covered++;
        uint64_t asked = 0;
        for (int i = 0; i < n_will_need; i++) asked += will_need[i].end - will_need[i].begin;
        uint64_t least = mode == G4_PREFETCH_HEAD ? HEAD : mode == G4_PREFETCH_ALL ? streamed_bytes(m) : 0;
        uint64_t most = mode == G4_PREFETCH_HEAD ? HEAD + PIECE : least;
        CHECK(covered == (mode == G4_PREFETCH_ALL ? 6 : mode == G4_PREFETCH_HEAD), "mode %d: the first %d layers are read ahead", mode, covered);
        CHECK(last_done >= least && last_done <= most && asked >= last_done && asked <= last_done + (uint64_t)n_will_need * 65536,
              "mode %d: %llu bytes asked for, %llu reported", mode, (unsigned long long)asked, (unsigned long long)last_done);
        g4_close(m);
    }
    if (failed) SKIP("a sparse file cannot be made in %s", dir);
    remove(path);
    snprintf(path, sizeof path, "%s/config.json", dir);
    remove(path);
    rmdir(dir);
}

int main(void) {
    test_modes("test/fixtures/e2b", 1);
    test_modes("test/fixtures/sharded", 3);
    test_large();
    return test_done("test_load");
}
#endif
