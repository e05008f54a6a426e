/* tracefile.h - trace files: written by `gemma4 logits` and `gemma4 trace`, compared by `gemma4 diff`. Part of the program, not of
 * the library. */
#ifndef TRACEFILE_H
#define TRACEFILE_H

#include "gemma4.h"

#include <stdio.h>

/* The tensors of a run of T ids that match glob (NULL: all): first layout, then rows.
 *
 *     trace_file *f = trace_open(ids, T, glob, &err);
 *     g4_set_trace(state, trace_layout, f);     forward any one row; every name and shape is known then; truncate
 *     trace_start(f, path, metadata, &err);     writes the header
 *     g4_set_trace(state, trace_rows, f);       forward the T rows, in any chunks
 *     trace_finish(f, &err);                    or trace_discard(f)
 */
typedef struct trace_file trace_file;
trace_file *trace_open(const int32_t *ids, int T, const char *glob, g4_error *err);
void trace_layout(void *file, const char *name, const float *data, int rank, const int64_t *shape);
int trace_start(trace_file *f, const char *path, const char *metadata, g4_error *err); /* metadata: a JSON object */
void trace_rows(void *file, const char *name, const float *data, int rank, const int64_t *shape);
int trace_error(const trace_file *f, g4_error *err); /* what a callback could not return */
int trace_finish(trace_file *f, g4_error *err);      /* frees f, whatever it returns */
void trace_discard(trace_file *f);                   /* frees f and leaves no file behind; NULL is fine */

/* The comparison as a table on out. A tensor passes when max abs <= atol + rtol * max(1, largest abs of b's); integers must be equal.
 * 0: all in tolerance, 1: not, -1: err is filled. */
int trace_diff(const char *a, const char *b, double rtol, double atol, FILE *out, g4_error *err);
/* The same of files that are open; the names are for messages. */
int trace_compare(const g4_safetensors *a, const char *name_a, const g4_safetensors *b, const char *name_b, double rtol, double atol, FILE *out,
                  g4_error *err);

#endif
