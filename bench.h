/* bench.h - measuring: --profile and `gemma4 bench`. Part of the program, not of the library. */
#ifndef BENCH_H
#define BENCH_H

#include "gemma4.h"

#include <stdio.h>

/* Where the time goes, by operation of the forward pass.
 *
 *     profile *p = profile_open(model, 1, &err);    before g4_state_open: it puts itself in the place of the model's backend
 *     profile_start(p);                             the clock runs
 *     g4_forward(...); profile_sampling(p, begin);
 *     profile_stop(p);
 *     profile_print(p, stderr);
 *     profile_write(&p, 1, file, path, &err);       every single call, if profile_open was to record them
 *     profile_close(p);                             after g4_state_close, before g4_close
 *
 * Without a profile (NULL) the functions that return nothing do nothing. */
typedef struct profile profile;
profile *profile_open(g4_model *model, int record, g4_error *err);
void profile_start(profile *p);
void profile_stop(profile *p);
void profile_sampling(profile *p, double begin); /* sampling that began at that time of seconds() has ended */
void profile_print(const profile *p, FILE *out);
/* Chrome's trace format, for chrome://tracing or ui.perfetto.dev. Closes the file; path is for messages. */
int profile_write(profile *const *p, int n, FILE *file, const char *path, g4_error *err);
void profile_close(profile *p);

typedef struct bench_options {
    const char *path;        /* of the model */
    const char *only;        /* names of cells, parted by commas; NULL: all */
    int profile;             /* a table of operations for each cell */
    FILE *trace;             /* NULL, or where profile_write is to write */
    const char *trace_path;
    g4_state_options state;  /* ctx: no cell needs more; 0: no limit */
    double token_bytes;      /* as `info` counts them */
    double seconds;          /* for each cell, all backends together, roughly */
    int full, json;
} bench_options;

/* models [n]: one checkpoint, opened once for each backend. Results go to stdout. */
int bench(g4_model *const *models, int n, const bench_options *o, g4_error *err);

/* Opening the file at o->path, a matrix-vector product of each type of weights, and with o->full attention over a million keys, by the model's backend. */
int bench_kernels(const g4_model *model, const bench_options *o, g4_error *err);

extern const char *const precision_names[]; /* by g4_precision */

/* -- what bench.c uses of main.c -- */

double seconds(void);             /* of a clock that never goes back */
void put_json_string(const char *text, size_t n);
void flush_results(void);
double type_bytes(g4_dtype type); /* of one weight */

#endif
