/* gemma4.h - Gemma 4 text models in plain C: the whole interface.
 *
 * Read first: the letters below, then part 1 (what a program needs: open a model, make a state, forward rows, tokenize,
 * sample). Part 2 is for the project's own files: the model's struct with the name of every tensor, and the table of
 * operations that a backend fills. What is computed, and why, is in gemma4.c.
 *
 * It is not a framework: no graph, no autograd, no other architecture, no vision or audio.
 *
 *     g4_error err;
 *     g4_model *m = g4_open("models/austen", NULL, &err);
 *     g4_state *s = m ? g4_state_open(m, NULL, &err) : NULL;
 *     float *logits = malloc(sizeof *logits * g4_get_config(m)->vocab_size);
 *     g4_row row = {.token = 2, .seq = 0, .pos = 0, .want_logits = 1};
 *     if (!s || g4_forward(s, &row, 1, logits, &err)) fprintf(stderr, "%s\n", err.text);
 *
 * Letters, here and everywhere:
 *     T  rows (tokens) of one call          W  sliding_window
 *     D  hidden_size                        V  vocab_size
 *     L  num_hidden_layers                  P  hidden_size_per_layer_input
 *     H  num_attention_heads                E  num_experts
 *     G  num_key_value_heads of a layer     K  top_k_experts
 *     dh head_dim of a layer                Fe moe_intermediate_size
 *     F  intermediate_size of a layer       R  rows of a layer's K/V cache
 * [T][H][dh] is row-major, the last index fastest. A weight [out][in] gives y[o] = sum_i W[o][i] x[i]. There is no bias.
 */
#ifndef GEMMA4_H
#define GEMMA4_H

#include <stddef.h>
#include <stdint.h>

#define G4_VERSION "0.1.0"

#if defined(_WIN32) || !defined(__GNUC__)
#define G4_API
#else
#define G4_API __attribute__((visibility("default")))
#endif

/* Positions of a function's format and of its first argument. On Windows "printf" would mean Microsoft's, which has no %zu; gcc needs the other
 * name, clang has only this one. */
#if defined(__MINGW32__) && !defined(__clang__)
#define G4_PRINTF(format_at, first) __attribute__((format(gnu_printf, format_at, first)))
#elif defined(__GNUC__)
#define G4_PRINTF(format_at, first) __attribute__((format(printf, format_at, first)))
#else
#define G4_PRINTF(format_at, first)
#endif

#ifdef G4_EXACT_FLOAT
/* For the files whose float arithmetic must give the same bits everywhere: no a * b + c in one rounding, whatever flags the file is
 * built with (gcc ignores the standard pragma), and no wider intermediate results. g4_open checks that the compiler obeyed. */
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#elif defined(_MSC_VER)
#pragma fp_contract(off)
#endif
#ifdef __FLT_EVAL_METHOD__
_Static_assert(__FLT_EVAL_METHOD__ == 0, "float must be evaluated as float: on 32-bit x86 build with -msse2 -mfpmath=sse");
#endif
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Part 1: for programs ---------------------------------------------------------------------------------------------
 *
 * No function prints, exits or keeps state of its own. One that can fail returns 0 or a pointer when it succeeds, and -1 or
 * NULL with err->text filled when it does not; nothing that it was given is changed then. Two models may be open at once; a model is read-only after g4_open, so any
 * number of threads may use it, each with a state of its own.
 */

typedef struct g4_model g4_model;         /* weights and config; from g4_open */
typedef struct g4_state g4_state;         /* caches and scratch of some sequences; from g4_state_open */
typedef struct g4_tokenizer g4_tokenizer; /* from g4_tokenizer_open */

/* One line without newline: what is wrong, where, what was expected and found, what to do. */
typedef struct g4_error {
    char text[1024];
} g4_error;

typedef enum g4_precision {
    G4_F32,  /* activations in float32: the oracle's arithmetic */
    G4_BF16, /* rounds to bfloat16 where transformers with dtype=bfloat16 does; sums stay float32 */
    G4_Q16   /* as G4_F32, but beside quantised weights an activation has 16 bits: faster. Without such weights it is G4_F32 */
} g4_precision;

/* What the system is asked to read ahead of the first token from a mapped checkpoint. Advice: no bit depends on it. */
typedef enum g4_prefetch {
    G4_PREFETCH_AUTO, /* all if the checkpoint fits half of this machine's memory, else head */
    G4_PREFETCH_NONE, /* nothing: pages are read when they are touched */
    G4_PREFETCH_HEAD, /* the first layers; the rest when it is touched */
    G4_PREFETCH_ALL   /* every weight that a token may read, in the order of the forward pass; not the table of per-layer embeddings */
} g4_prefetch;

typedef struct g4_options {
    const char *backend;                          /* NULL: the fastest exact one that can run here */
    int no_mmap;                                  /* read the files into memory instead of mapping them */
    g4_prefetch prefetch;
    void (*warn)(void *user, const char *text);   /* one line each; NULL: warnings are dropped */
    /* While g4_open reads a file or asks for weights, `done` of `total` bytes so far, a few times a second; NULL: nobody asks. */
    void (*progress)(void *user, const char *path, uint64_t done, uint64_t total);
    void *user;
} g4_options;

/* Opens a directory in Hugging Face layout (config.json and *.safetensors) or a GGUF file. options may be NULL (all zero). */
G4_API g4_model *g4_open(const char *path, const g4_options *options, g4_error *err);
G4_API void g4_close(g4_model *model); /* NULL is fine; close its states first */

typedef enum g4_layer_type { G4_SLIDING_ATTENTION, G4_FULL_ATTENTION } g4_layer_type;

typedef struct g4_layer_config {
    g4_layer_type type;        /* layer_types[i] */
    int head_dim;              /* dh */
    int num_key_value_heads;   /* G */
    int intermediate_size;     /* F, doubled already where use_double_wide_mlp applies */
    int kv_layer;              /* the layer whose K/V this one reads: itself, or its donor */
} g4_layer_config;

typedef struct g4_rope_config {
    double theta;                 /* rope_theta */
    double factor;                /* divides inv_freq */
    int proportional;             /* rope_type: 0 default, 1 proportional */
    double partial_rotary_factor; /* used by proportional only */
} g4_rope_config;

/* config.json, every default filled in, spelled as transformers spells it. */
typedef struct g4_config {
    char model_type[32];
    int vocab_size, vocab_size_per_layer_input, hidden_size, num_hidden_layers, num_attention_heads;
    int hidden_size_per_layer_input;      /* P; 0: no per-layer inputs */
    int sliding_window, max_position_embeddings;
    int num_kv_shared_layers;
    int attention_k_eq_v, use_double_wide_mlp, tie_word_embeddings;
    int num_experts, top_k_experts, moe_intermediate_size; /* 0: no MoE */
    float rms_norm_eps;
    float final_logit_softcapping;        /* 0: none */
    g4_rope_config rope[2];               /* by g4_layer_type */
    g4_layer_config *layers;              /* [L] */
    int32_t eos_token_id[16];             /* stop ids: generation_config.json, else config.json */
    int n_eos;
    int32_t suppress_tokens[64];          /* generation_config.json; a sampler never picks them */
    int n_suppress;
    int do_sample, top_k;                 /* generation_config.json; do_sample 1, top_k 64, top_p 0.95, temperature 1 when absent */
    float temperature, top_p;
} g4_config;

/* Valid as long as the model is. */
G4_API const g4_config *g4_get_config(const g4_model *model);

typedef struct g4_state_options {
    int ctx;                /* positions per sequence; 0: min(max_position_embeddings, 4096) */
    int chunk;              /* rows computed at once, at most; 0: 128 */
    int n_seqs;             /* sequences, numbered from 0; 0: 1 */
    int threads;            /* 0: one per available processor; without OpenMP always 1 */
    g4_precision precision;
} g4_state_options;

/* options may be NULL. Allocates all that the state will ever need. */
G4_API g4_state *g4_state_open(const g4_model *model, const g4_state_options *options, g4_error *err);
G4_API void g4_state_close(g4_state *state);
/* Bytes that g4_state_open would allocate, caches and scratch: exact. kv_bytes (may be NULL) gets the caches' part. 0: would not fit size_t. */
G4_API size_t g4_state_bytes(const g4_model *model, const g4_state_options *options, size_t *kv_bytes);
G4_API const g4_state_options *g4_state_get_options(const g4_state *state); /* with the defaults filled in */

typedef struct g4_row {
    int32_t token;      /* 0 .. vocab_size - 1 */
    int32_t seq;        /* 0 .. n_seqs - 1 */
    int32_t pos;        /* the sequence's length, plus its rows before this one in the same call */
    int32_t want_logits;
} g4_row;

/* Appends T >= 1 rows to their sequences. logits [number of rows that want them][V], in the order of the rows; NULL if none does.
 * Any T is fine: the work is cut into chunks. The bits do not depend on how rows are spread over calls, chunks, sequences or threads. */
G4_API int g4_forward(g4_state *state, const g4_row *rows, int T, float *logits, g4_error *err);
G4_API int g4_length(const g4_state *state, int seq); /* tokens held; -1 if there is no such sequence */

/* Forgets all tokens of a sequence from position `length` on. Fails when the sliding layers' rings no longer hold what the next
 * token at that position would see; 0 always works. */
G4_API int g4_truncate(g4_state *state, int seq, int length, g4_error *err);

G4_API const g4_model *g4_state_get_model(const g4_state *state);

/* Makes sequence `to` hold the first `length` tokens of sequence `from`, as if they had been computed there; what it held is forgotten. Fails as
 * g4_truncate does. from == to truncates. */
G4_API int g4_copy(g4_state *state, int from, int to, int length, g4_error *err);

/* The first `length` tokens of a sequence to a file and back (statefile.c). ids [length] are the caller's: the state does not know them. A file is tied to the
 * weights and to the precision, not to ctx, chunk, backend or machine. Saving fails as g4_truncate does. Loading replaces what seq held; *ids [*n_ids] is
 * freed with g4_free. */
G4_API int g4_sequence_save(g4_state *state, int seq, int length, const int32_t *ids, const char *path, g4_error *err);
G4_API int g4_sequence_load(g4_state *state, int seq, const char *path, int32_t **ids, size_t *n_ids, g4_error *err);

/* Called for each intermediate tensor, in the order of the forward pass, once per chunk. data [shape[0]]...[shape[rank-1]] is valid during
 * the call; shape[0] is the number of rows. Ask for the logits of all rows, or the last layers show only the rows asked for.
 * Names are those of `gemma4 trace`: embeddings, per_layer_inputs, layers.N.q, ..., layers.N.output, norm, logits. */
typedef void g4_trace_fn(void *user, const char *name, const float *data, int rank, const int64_t *shape);
G4_API void g4_set_trace(g4_state *state, g4_trace_fn *fn, void *user); /* fn NULL: off */

/* Names of the backends compiled in, i = 0, 1, ...; NULL after the last. *why is "" if it can run here, else the reason. */
G4_API const char *g4_backend_name(int i, const char **why);
G4_API const char *g4_model_backend(const g4_model *model);
G4_API const char *g4_version(void); /* of the library that runs: for programs that do not get G4_VERSION from this header */

/* -- tokenizer (tokenizer.c) -- */

/* Opens tokenizer.json, the file itself or in a directory, or the tokenizer of a GGUF file. Reads nothing else. */
G4_API g4_tokenizer *g4_tokenizer_open(const char *path, g4_error *err);
G4_API void g4_tokenizer_close(g4_tokenizer *tok);

enum { G4_PLAIN_TEXT = 1 /* text that looks like a special token is ordinary text */ };

/* text [n] bytes, any content, NUL included; no BOS is added. *ids is malloc'd, free it with g4_free. Bytes that are not UTF-8 become U+FFFD each. */
G4_API int g4_encode(const g4_tokenizer *tok, const char *text, size_t n, int flags, int32_t **ids, size_t *n_ids, g4_error *err);

enum { G4_SKIP_SPECIAL = 1 /* leave special tokens out */ };

/* Incremental decoding. g4_decode_push appends what is certain so far to an internal buffer and gives the new bytes (valid
 * until the next call with this decoder); they are always whole UTF-8 characters. g4_decode_end gives what was held back. */
typedef struct g4_decoder g4_decoder;
G4_API g4_decoder *g4_decoder_open(const g4_tokenizer *tok, int flags, g4_error *err);
G4_API void g4_decoder_close(g4_decoder *d);
G4_API int g4_decode_push(g4_decoder *d, int32_t id, const char **text, size_t *n, g4_error *err);
G4_API int g4_decode_end(g4_decoder *d, const char **text, size_t *n, g4_error *err);

G4_API int32_t g4_token_id(const g4_tokenizer *tok, const char *piece);           /* exact vocabulary entry; -1: none */
G4_API const char *g4_token_piece(const g4_tokenizer *tok, int32_t id, size_t *n); /* NULL: no such id */
G4_API int g4_token_is_special(const g4_tokenizer *tok, int32_t id);
G4_API int g4_tokenizer_size(const g4_tokenizer *tok);                            /* highest id + 1 */
G4_API void g4_free(void *p);

/* -- sampler (sampler.c) -- */

/* Added to the logit of one id. */
typedef struct g4_logit_bias {
    int32_t id;
    float bias; /* finite; OpenAI's range is -100 .. 100 */
} g4_logit_bias;

/* All zero but repeat_penalty (1) is greedy. Applied in the order of transformers' generate(): logit_bias, repeat_penalty, frequency and presence
 * penalty, suppressed ids, temperature, top_k, top_p, min_p, then one draw. */
typedef struct g4_sampling {
    float temperature;    /* 0 (or below 1e-5): greedy, ties to the lowest id */
    int top_k;            /* 0: off */
    float top_p, min_p;   /* 1: off; 0: off */
    float repeat_penalty; /* 1: off; as transformers' repetition_penalty, over all of history */
    uint64_t seed;
    float frequency_penalty, presence_penalty; /* 0: off. As OpenAI: a logit loses count * frequency + (count > 0) * presence */
    size_t n_prompt;      /* ids at the beginning of history that those two do not count: they count what was generated */
    const g4_logit_bias *logit_bias; /* [n_logit_bias]; an id that occurs twice gets both */
    int n_logit_bias;
} g4_sampling;

/* What generation_config.json asks for, with seed 0. */
G4_API g4_sampling g4_default_sampling(const g4_model *model);

/* Chooses the next token from logits [V] (changed in place), or -1 with err filled (NaN, nothing left). history [n] are the ids so far; the draw
 * depends on seed and n alone, so a seed gives one text on every machine. suppress [n_suppress] are never chosen. */
G4_API int32_t g4_sample(const g4_sampling *how, float *logits, int V, const int32_t *history, size_t n, const int32_t *suppress, int n_suppress, g4_error *err);

typedef struct g4_logprob {
    int32_t id;
    double logprob; /* natural logarithm of the probability */
} g4_logprob;

/* The model's own distribution: the softmax of logits [V] as g4_forward gave them (call it before g4_sample). *logprob gets that of id, and
 * top [n] the n best, the best first, ties to the lowest id; NULL for what is not wanted. n <= V. */
G4_API int g4_logprobs(const float *logits, int V, int32_t id, double *logprob, g4_logprob *top, int n, g4_error *err);

/* -- engine (engine.c): many texts at once -- */

/* Requests share one state. They are added at any time and leave at any step; each step is one g4_forward with the rows of all of them. What a
 * request gives is the same to the bit as if it were alone, whatever runs beside it, was cached before or is drafted by look-up.
 *
 *     g4_engine *e = g4_engine_open(state, tok, NULL, &err);
 *     g4_request r = {.prompt = ids, .n_prompt = n, .sampling = g4_default_sampling(model), .max_new = 100};
 *     if (g4_engine_add(e, &r, &err) < 0) fprintf(stderr, "%s\n", err.text);
 *     const g4_event *event;
 *     while (g4_engine_pending(e))
 *         for (int i = 0, n = g4_engine_step(e, &event); i < n; i++) fwrite(event[i].text, 1, event[i].n_text, stdout);
 *
 * One thread at a time may call these functions for one engine; a step takes as long as a g4_forward does. */
typedef struct g4_engine g4_engine;

typedef struct g4_engine_options {
    int budget;             /* rows of one step: every running text has one, prompts get what is left, in equal parts (and a row at least). The most,
                               and what 0 means, is the state's chunk; less makes the others wait less for a long prompt, which then takes longer */
    int speculate;          /* tokens that a step may draft by look-up in the text so far, all requests together; 0: off */
    int no_prefix_reuse;    /* every prompt is computed from its first token */
    double (*clock)(void);  /* seconds that never go back, for the times in g4_engine_stats; NULL: they stay 0 */
} g4_engine_options;

typedef struct g4_request {
    const int32_t *prompt;      /* [n_prompt], 1 .. ctx ids, BOS included where it belongs */
    size_t n_prompt;
    g4_sampling sampling;       /* n_prompt in it is set by the engine */
    int max_new;                /* new tokens at most, and no more than the context has room for; 0: none */
    int ignore_eos;             /* the model's own stop ids (g4_config.eos_token_id) do not end it */
    const int32_t *stop_ids;    /* [n_stop_ids] others that do */
    int n_stop_ids;
    const char *const *stop;    /* [n_stop] strings that end the text before them, wherever tokens begin and end; UTF-8, not empty; they
                                   need a tokenizer. One that is exactly a special token counts as that token's id */
    int n_stop;
    int logprobs;               /* 1: events carry the log-probability of their token in the model's own distribution */
    int top_logprobs;           /* and those of this many best ones */
    int decode_flags;           /* G4_SKIP_SPECIAL or 0 */
    void *user;                 /* comes back in each event */
} g4_request;

typedef enum g4_finish {
    G4_RUNNING,
    G4_FINISH_STOP_ID,
    G4_FINISH_STOP_STRING,
    G4_FINISH_LENGTH,       /* max_new was reached, or the context is full */
    G4_FINISH_CANCELLED,
    G4_FINISH_ERROR
} g4_finish;

typedef struct g4_event {
    int64_t request;        /* what g4_engine_add gave */
    void *user;
    int32_t token;          /* the new token; -1: none, the event only ends the request */
    g4_finish finish;       /* not G4_RUNNING: this is the request's last event */
    int32_t stop;           /* G4_FINISH_STOP_ID: the id, which is not part of the text; G4_FINISH_STOP_STRING: its number in the request */
    const char *text;       /* [n_text] what is certain now and was not before, whole characters, no NUL after it. A stop string, and what may yet become
                               one, is never in it. All pieces together are the text; without a tokenizer they are empty */
    size_t n_text;
    double logprob;         /* of token, if asked for */
    const g4_logprob *top;  /* [n_top], best first */
    int n_top;
    int n_prompt, n_cached, n_new; /* tokens of the prompt, those of them that were not computed again, tokens given so far */
    const char *error;      /* G4_FINISH_ERROR: one line; else NULL */
} g4_event;

typedef struct g4_engine_stats {
    int waiting, active;    /* requests now: without a sequence yet, with one */
    uint64_t forwards, rows; /* the rest since g4_engine_open: calls of g4_forward and their rows */
    uint64_t prompt_tokens, cached_tokens; /* of all prompts: computed, taken over */
    uint64_t new_tokens;
    uint64_t proposed, accepted; /* drafted tokens, and those of them that were right */
    double prompt_seconds, decode_seconds, sampling_seconds; /* g4_forward with rows of prompts, without; all else that a step does after it */
} g4_engine_stats;

/* All sequences of the state become the engine's until it is closed; how many there are (n_seqs) is how many requests run at once. tok may be NULL. */
G4_API g4_engine *g4_engine_open(g4_state *state, const g4_tokenizer *tok, const g4_engine_options *options, g4_error *err);
G4_API void g4_engine_close(g4_engine *e); /* the state and the tokenizer stay open */
/* Everything in the request is copied. Gives its number, from 1 on; -1: it asks for what cannot be; -2: memory ran out. Nothing is computed yet; requests begin in the
 * order in which they came. */
G4_API int64_t g4_engine_add(g4_engine *e, const g4_request *request, g4_error *err);
/* Its last event comes with the next step, which does not compute for it any more. -1: it has ended already, or never was. */
G4_API int g4_engine_cancel(g4_engine *e, int64_t request);
G4_API int g4_engine_pending(const g4_engine *e); /* requests whose last event has not come yet */
/* One step. Gives the number of events, 0 while only prompts are in progress; *events is valid until the next call with this engine. What
 * goes wrong ends the requests concerned with G4_FINISH_ERROR. */
G4_API int g4_engine_step(g4_engine *e, const g4_event **events);
G4_API void g4_engine_get_stats(const g4_engine *e, g4_engine_stats *stats);

/* The longest beginning of ids [n] that is in the cache goes to a file; a file becomes a prefix that later prompts may begin with. Give the
 * number of tokens, or -1 (nothing cached; no idle sequence; what g4_sequence_save and g4_sequence_load refuse). */
G4_API int g4_engine_save(g4_engine *e, const int32_t *ids, size_t n, const char *path, g4_error *err);
G4_API int g4_engine_load(g4_engine *e, const char *path, g4_error *err);

/* -- chat (chat.c) -- */

/* Google's two chat templates for Gemma 4: E2B and E4B have one, the larger models the other. */
typedef enum g4_chat_family { G4_CHAT_SMALL, G4_CHAT_LARGE } g4_chat_family;

typedef struct g4_chat_marker {
    size_t at, n; /* bytes of the prompt's text */
} g4_chat_marker;

typedef struct g4_chat_prompt {
    char *text;              /* [n], then NUL; begins with <bos> */
    size_t n;
    g4_chat_marker *markers; /* [n_markers] the special tokens that the template wrote, in order; what looks like one elsewhere came with the request */
    size_t n_markers;
    int in_reasoning;        /* the prompt ends inside <|channel>thought: the answer goes on there */
    uint32_t n_media;        /* images, audio, video: the text has placeholders, which this model cannot fill */
    uint32_t n_unknown;      /* parts of a content that the template passes over */
} g4_chat_prompt;

/* request [n]: a JSON object with messages, and if wanted tools, enable_thinking, preserve_thinking, add_generation_prompt; other members are passed over.
 * What transformers' apply_chat_template renders, to the byte; what it refuses is refused. */
G4_API int g4_chat_render(const char *request, size_t n, g4_chat_family family, g4_chat_prompt *prompt, g4_error *err);
G4_API void g4_chat_prompt_free(g4_chat_prompt *prompt);

enum { G4_CHAT_PARSE_REQUEST = 1 /* text of the request that looks like a special token is one, as in transformers; else it is ordinary text */ };

/* The prompt's ids, from <bos> on; nothing is to be added. *ids is malloc'd, free it with g4_free. */
G4_API int g4_chat_encode(const g4_tokenizer *tok, const g4_chat_prompt *prompt, int flags, int32_t **ids, size_t *n_ids, g4_error *err);

/* Whether a chat template's Jinja text is one of the two. */
G4_API int g4_chat_recognise(const char *template_text, size_t n, g4_chat_family *family);
/* The family of a checkpoint: by its chat_template.jinja, tokenizer_config.json or GGUF key; where it has none, or one that is not known here, by its
 * per-layer inputs, with a warning that says which template is used. config may be NULL: the width of those inputs is then read from the files. */
G4_API int g4_chat_family_of(const char *path, const g4_config *config, const g4_options *options, g4_chat_family *family, g4_error *err);

/* Reading the ids that a model answers with, one by one. Parts are told apart by the ids of <|channel>, <|tool_call> and the like, never by their text. */
typedef enum g4_part_kind {
    G4_PART_REASONING,     /* text [n]: more of it, in whole characters, without the label and the newline that the template puts around it */
    G4_PART_CONTENT,       /* text [n]: more of it */
    G4_PART_TOOL_CALL,     /* a whole call of `name`: text [n] is its arguments, an object in strict JSON */
    G4_PART_BAD_TOOL_CALL  /* text [n]: a call as the model wrote it, markers too; `fault` says why it is none */
} g4_part_kind;

typedef struct g4_part {
    g4_part_kind kind;
    const char *text, *name; /* valid during the call */
    size_t n, n_name;
    const char *fault;       /* one line */
} g4_part;

typedef void g4_answer_fn(void *user, const g4_part *part);
typedef struct g4_answer g4_answer;

/* in_reasoning: the prompt's. Ids that end a turn may be pushed or not. g4_answer_end gives what was held back, once. */
G4_API g4_answer *g4_answer_open(const g4_tokenizer *tok, int in_reasoning, g4_answer_fn *each, void *user, g4_error *err);
G4_API void g4_answer_close(g4_answer *a);
G4_API int g4_answer_push(g4_answer *a, int32_t id, g4_error *err);
G4_API int g4_answer_end(g4_answer *a, g4_error *err);

typedef struct g4_tool_call {
    char *name, *text;      /* as in g4_part; name NULL: a bad call */
    size_t n_name, n;
    char *fault;            /* NULL: none */
} g4_tool_call;

typedef struct g4_message {
    char *reasoning;        /* [n_reasoning], then NUL */
    size_t n_reasoning;
    char *content;          /* [n_content], then NUL */
    size_t n_content;
    g4_tool_call *calls;    /* [n_calls] in the order of the answer */
    int n_calls;
} g4_message;

/* All ids at once: what the parts would add up to. */
G4_API int g4_answer_read(const g4_tokenizer *tok, int in_reasoning, const int32_t *ids, size_t n, g4_message *message, g4_error *err);
G4_API void g4_message_free(g4_message *message);

/* ---- Part 2: for the project's own files, and for backends --------------------------------------------------------------- */

typedef enum g4_dtype {
    G4_TYPE_F32, G4_TYPE_F16, G4_TYPE_BF16,
    G4_TYPE_Q4_0, G4_TYPE_Q4_1, G4_TYPE_Q5_0, G4_TYPE_Q5_1, G4_TYPE_Q8_0,                   /* blocks of 32 */
    G4_TYPE_Q2_K, G4_TYPE_Q3_K, G4_TYPE_Q4_K, G4_TYPE_Q5_K, G4_TYPE_Q6_K,                   /* of 256 */
    G4_TYPE_IQ4_NL, G4_TYPE_IQ4_XS, G4_TYPE_MXFP4,                                          /* of 32, 256, 32 */
    G4_N_TYPES
} g4_dtype;

/* A block of a quantised type: weight i is scale[i / group] * q[i] - min[i / group]. */
typedef struct g4_block {
    int8_t q[256];
    float scale[16], min[16];
} g4_block;

/* quants.c: how the weights of a type lie in a file. A row is cols / block blocks, one after the other. p need not be aligned. */
typedef struct g4_type {
    const char *name;  /* as safetensors and ggml write it */
    int ggml;          /* its number in a GGUF file */
    int block, bytes;  /* elements of a block, and the bytes that they take */
    /* of quantised types; 0 for floats */
    int group;         /* weights that share a scale: 16 or 32 */
    int bits;          /* an activation that meets them becomes an integer below 2^bits (G4_Q16: 15): then no sum of a group's products leaves 32 bits */
    int mins;          /* there are minimums; else unpack leaves them alone */
    void (*widen)(float *w, const unsigned char *p, int n);    /* floats: w [n] = the elements at p, exact */
    void (*unpack)(g4_block *to, const unsigned char *p);      /* the others: one block */
} g4_type;
extern const g4_type g4_types[G4_N_TYPES];
/* w [n] = the elements of n / block blocks at p: exact, or by the block's formula in float32, its sum rounded once. */
void g4_widen(g4_dtype type, float *w, const unsigned char *p, int n);

/* A weight as it lies in the file: little-endian on every host, not necessarily aligned. A 3-D one is [E * out][in]. */
typedef struct g4_tensor {
    const void *data; /* an address in the backend's memory; NULL: this model has no such tensor */
    g4_dtype type;
    int64_t rows, cols; /* [out][in]; a vector is [1][n] */
    const char *name;   /* as in the file, prefix included; owned by the model */
} g4_tensor;
static inline size_t g4_row_bytes(const g4_tensor *W) { return (size_t)(W->cols / g4_types[W->type].block) * (size_t)g4_types[W->type].bytes; }

typedef struct g4_layer {
    g4_tensor input_layernorm;            /* layers.N.input_layernorm.weight [D] */
    g4_tensor q_proj;                     /* layers.N.self_attn.q_proj.weight [H*dh][D] */
    g4_tensor k_proj, v_proj;             /* layers.N.self_attn.{k,v}_proj.weight [G*dh][D]; none on layers that share K/V; no v_proj where K = V */
    g4_tensor o_proj;                     /* layers.N.self_attn.o_proj.weight [D][H*dh] */
    g4_tensor q_norm, k_norm;             /* layers.N.self_attn.{q,k}_norm.weight [dh] */
    g4_tensor post_attention_layernorm;   /* layers.N.post_attention_layernorm.weight [D] */
    g4_tensor pre_feedforward_layernorm;  /* layers.N.pre_feedforward_layernorm.weight [D] */
    g4_tensor gate_proj, up_proj;         /* layers.N.mlp.{gate,up}_proj.weight [F][D] */
    g4_tensor down_proj;                  /* layers.N.mlp.down_proj.weight [D][F] */
    g4_tensor post_feedforward_layernorm; /* layers.N.post_feedforward_layernorm.weight [D] */
    /* MoE */
    g4_tensor router_proj;                /* layers.N.router.proj.weight [E][D] */
    g4_tensor router_scale;               /* layers.N.router.scale [D] */
    g4_tensor per_expert_scale;           /* layers.N.router.per_expert_scale [E] */
    g4_tensor experts_gate_up_proj;       /* layers.N.experts.gate_up_proj [E][2*Fe][D]: rows 0..Fe-1 gate, Fe..2Fe-1 up */
    g4_tensor experts_up_proj;            /* only where a GGUF file stores the halves apart: [E][Fe][D], and experts_gate_up_proj is the gate's [E][Fe][D] */
    g4_tensor experts_down_proj;          /* layers.N.experts.down_proj [E][D][Fe] */
    g4_tensor post_feedforward_layernorm_1, pre_feedforward_layernorm_2, post_feedforward_layernorm_2; /* layers.N.NAME.weight [D] */
    /* P > 0 */
    g4_tensor per_layer_input_gate;       /* layers.N.per_layer_input_gate.weight [P][D] */
    g4_tensor per_layer_projection;       /* layers.N.per_layer_projection.weight [D][P] */
    g4_tensor post_per_layer_input_norm;  /* layers.N.post_per_layer_input_norm.weight [D] */
    g4_tensor layer_scalar;               /* layers.N.layer_scalar [1] */
} g4_layer;

typedef struct g4_backend g4_backend;
typedef struct g4_checkpoint g4_checkpoint; /* the mapped files; checkpoint.c */

struct g4_model {
    g4_config config;
    g4_tensor embed_tokens;               /* embed_tokens.weight [V][D] */
    g4_tensor embed_tokens_per_layer;     /* embed_tokens_per_layer.weight [V_ple][L*P] */
    g4_tensor per_layer_model_projection; /* per_layer_model_projection.weight [L*P][D] */
    g4_tensor per_layer_projection_norm;  /* per_layer_projection_norm.weight [P] */
    g4_tensor norm;                       /* norm.weight [D] */
    g4_tensor lm_head;                    /* lm_head.weight [V][D], or embed_tokens again */
    g4_layer *layers;                     /* [L] */
    const g4_backend *backend;            /* with the entries that it inherits filled in; owned by the model */
    float *inv_freq[2];                   /* by g4_layer_type, [dh/2], in the backend's memory */
    void **device;                        /* the weights' copies on a device, NULL after the last; NULL on host backends */
    g4_checkpoint *checkpoint;
};

/* -- checkpoint.c -- */

/* Fills config, every weight and checkpoint of a zeroed model; on failure the caller still calls g4_checkpoint_close. */
int g4_checkpoint_open(g4_model *model, const char *path, const g4_options *options, g4_error *err);
void g4_checkpoint_close(g4_model *model); /* frees config.layers and layers too */
/* For `info`: bytes of all files, and the tensors of the file that are not read; i = 0, 1, ...; NULL after the last. */
size_t g4_checkpoint_bytes(const g4_model *model);
const char *g4_checkpoint_ignored(const g4_model *model, int i);
/* Reads every weight of a model on a host backend; -1, and the line names the tensor and the place, at the first that is infinite or no number. */
int g4_check_weights(const g4_model *model, g4_error *err);
int g4_is_gguf(const char *path); /* a file that begins as GGUF files do */
/* Sorts a [n] by compare(context, a[i], a[j]). Heapsort: no recursion, and no input makes it slow. */
void g4_sort(uint32_t *a, uint32_t n, int (*compare)(const void *context, uint32_t x, uint32_t y), const void *context);
G4_PRINTF(2, 3) void g4_warn(const g4_options *options, const char *format, ...);

/* Fills a config from the text of a config.json, with the defaults of generation_config.json. The caller frees config->layers; on failure there
 * are none. */
int g4_config_parse(g4_config *config, const char *json, size_t n, const char *what, const g4_options *options, g4_error *err);

/* A file in memory, mapped where the system can, else read. data [size]; size 0 gives a non-NULL data. */
typedef struct g4_file {
    const unsigned char *data;
    size_t size;
    int mapped;
} g4_file;
int g4_file_open(g4_file *f, const char *path, int no_mmap, g4_error *err);
int g4_file_load(g4_file *f, const char *path, const g4_options *options, g4_error *err); /* the same with its no_mmap and progress; NULL: none */
void g4_file_close(g4_file *f);
int g4_path_is_file(const char *path); /* it is there, and no directory */

/* safetensors, for checkpoints and for trace files. Tensors cover the data section exactly; anything else is an error. */
typedef struct g4_st_tensor {
    const char *name;  /* NUL-terminated; a name that holds NUL is refused */
    char dtype[8];     /* "F32", "BF16", "I32", ... */
    int rank;          /* 0 .. 8 */
    int64_t shape[8];
    const unsigned char *data; /* little-endian, not aligned */
    size_t bytes;
} g4_st_tensor;
typedef struct g4_safetensors {
    g4_file file;
    g4_st_tensor *tensors; /* [n], in the order of the header */
    int n;
    char *names;           /* storage of the names */
} g4_safetensors;
int g4_safetensors_open(g4_safetensors *st, const char *path, int no_mmap, g4_error *err);
/* The same from data [size], which st then points into and does not own; `what` names it in messages. */
int g4_safetensors_parse(g4_safetensors *st, const unsigned char *data, size_t size, const char *what, g4_error *err);
void g4_safetensors_close(g4_safetensors *st);
const g4_st_tensor *g4_safetensors_find(const g4_safetensors *st, const char *name);

/* JSON: a whole text parsed into an array of nodes. Node 0 is the root. Children of an array or object are linked by `next`
 * in the order of the text; a member's value node carries its key. Strings are unescaped UTF-8, counted, and NUL-terminated after the count. */
typedef enum g4_json_kind { G4_JSON_NULL, G4_JSON_FALSE, G4_JSON_TRUE, G4_JSON_NUMBER, G4_JSON_STRING, G4_JSON_ARRAY, G4_JSON_OBJECT } g4_json_kind;
typedef struct g4_json_node {
    uint8_t kind;        /* g4_json_kind */
    uint32_t next;       /* the next sibling; 0: none */
    uint32_t first;      /* array, object: first child, 0: none. string, number: offset of its text in `text` */
    uint32_t size;       /* array, object: children. string, number: bytes */
    uint32_t key;        /* offset of the member's key in `text`; only inside an object */
    uint32_t key_size;
} g4_json_node;
typedef struct g4_json {
    g4_json_node *nodes;
    char *text;          /* unescaped strings and number texts, each NUL-terminated */
    uint32_t n_nodes;
} g4_json;
/* `what` names the text in messages, which give line and column. Strict JSON: no comments, no trailing commas, no duplicate keys, valid UTF-8, paired
 * surrogates, nesting up to 64 deep, at most 1 GiB. */
int g4_json_parse(g4_json *j, const char *text, size_t n, const char *what, g4_error *err);
void g4_json_free(g4_json *j);
uint32_t g4_json_get(const g4_json *j, uint32_t object, const char *key); /* the member's node, 0: none (or not an object) */
/* 0 if the node is a number that is an integer in range (1e3 is, 1.5 is not), else -1. */
int g4_json_int(const g4_json *j, uint32_t node, int64_t *value);
int g4_json_double(const g4_json *j, uint32_t node, double *value); /* correctly rounded, whatever the locale */
/* Writes text [n] as a JSON string in printable ASCII, without NUL; a byte that is not UTF-8 becomes U+FFFD. out has room for 6 * n + 3 bytes; gives
 * how many were written. */
size_t g4_json_quote(char *out, const char *text, size_t n);
static inline const char *g4_json_string(const g4_json *j, uint32_t node) { return j->text + j->nodes[node].first; }

/* -- tokenizer.c -- */

/* g4_tokenizer_open from the text of a tokenizer.json, or from the bytes of a GGUF file; `what` names it in messages. */
g4_tokenizer *g4_tokenizer_parse(const char *text, size_t n, const char *what, g4_error *err);

/* -- gguf.c -- */

/* A key of a GGUF file. Name and value lie in the file, little-endian, not aligned; g4_gguf_open has seen that they lie in it whole. */
typedef struct g4_gguf_key {
    const char *name;          /* [name_size], without a NUL */
    size_t name_size;
    int type, is_array;        /* GGUF's number for the type of the value, or of the array's elements */
    uint64_t n;                /* elements; 1 unless it is an array */
    const unsigned char *data;
} g4_gguf_key;
enum { G4_GGUF_STRING = 8 };   /* a type */
typedef struct g4_gguf g4_gguf;

/* Reads the header of a file and, of a split model's first part, those of the others. keys_only: nothing behind the keys is looked at, and no other part. */
g4_gguf *g4_gguf_open(const char *path, int keys_only, const g4_options *options, g4_error *err);
/* The same from memory, which must stay; `what` names it in messages. */
g4_gguf *g4_gguf_parse(const unsigned char *data, size_t size, const char *what, int keys_only, g4_error *err);
void g4_gguf_close(g4_gguf *g);
const g4_gguf_key *g4_gguf_find(const g4_gguf *g, const char *name); /* NULL: no such key */
/* Element i of a key's value, of any integer type or bool, or of any number's: 0, or -1 if it is none. */
int g4_gguf_int(const g4_gguf_key *k, uint64_t i, int64_t *x);
int g4_gguf_double(const g4_gguf_key *k, uint64_t i, double *x);
/* The string at *p, which begins at data and is moved on to the next one. */
const char *g4_gguf_string(const unsigned char **p, size_t *n);
/* Fills config and every weight of a zeroed model. The weights lie in the file: close it after the model. */
int g4_gguf_bind(g4_gguf *g, g4_model *model, const g4_options *options, g4_error *err);
/* The text at a key of a file, like tokenizer.chat_template; only the keys are read. *text is malloc'd, free it with g4_free; NULL: there is no such key. */
int g4_gguf_text(const char *path, const char *key, char **text, size_t *n, g4_error *err);
size_t g4_gguf_bytes(const g4_gguf *g);
const char *g4_gguf_ignored(const g4_gguf *g, int i);

/* -- chat.c -- */

typedef struct g4_chat_settings {
    int add_generation_prompt, enable_thinking, preserve_thinking; /* 0, 1; -1: as the request says */
    int no_tools; /* the request's tools are passed over */
} g4_chat_settings;
/* g4_chat_render for a request that is parsed already, and may be part of another value. settings NULL: all as it says. */
int g4_chat_render_json(const g4_json *j, uint32_t request, g4_chat_family family, const g4_chat_settings *settings, g4_chat_prompt *prompt, g4_error *err);

/* -- gemma4.c -- */

G4_PRINTF(2, 3) int g4_fail(g4_error *err, const char *format, ...); /* fills err (which may be NULL) and returns -1 */

/* g4_open for a backend that need not be in the registry. */
g4_model *g4_open_with(const char *path, const g4_options *options, const g4_backend *backend, g4_error *err);

/* Elementwise functions, the same bits everywhere; errors in ulp stand beside them in gemma4.c. */
float g4_expf(float x);
float g4_tanhf(float x);
void g4_sincosf(float x, float *sin_x, float *cos_x);
float g4_powf(float base, float exponent); /* base > 0 */
float g4_logf(float x);                    /* x > 0 */
float g4_gelu_tanh(float x);
/* For what is computed from logits (sampler.c, `score`): relative error below 1e-14. */
double g4_exp(double x);
double g4_log(double x); /* normal x > 0 */
double g4_log_sum_exp(const float *x, int n); /* sampler.c */
int g4_check_sampling(const g4_sampling *how, int V, g4_error *err); /* sampler.c: what g4_sample would refuse whatever the logits are */
/* sampler.c: g4_sample without the draw. logits [V] become what the penalties and the temperature make of them; the ids that may be drawn are left at the
 * front of ids [2 * V], in the order of the draw; gives their number. */
int g4_candidates(const g4_sampling *how, float *logits, int V, const int32_t *history, size_t n, const int32_t *suppress, int n_suppress, int32_t *ids,
                  g4_error *err);
float g4_bf16_round(float x);              /* to the nearest bfloat16, ties to even */

/* 0 if a sequence can be truncated to that length: its first `length` tokens are still there. */
int g4_state_check(const g4_state *s, int seq, int length, g4_error *err);
/* K/V rows first .. first + n - 1 of a sequence, of a layer that owns its K/V: from the cache into k, v [G][n][dh], host memory, or (store) back. */
int g4_state_rows(g4_state *s, int store, int layer, int seq, int first, int n, float *k, float *v);
/* How many tokens a sequence holds from now on, and the first position whose K/V the sliding layers hold: for whoever stored rows. */
void g4_state_set(g4_state *s, int seq, int length, int oldest);

/* One layer's K/V cache. Position p of sequence s lies in row p % R. Sliding layers: R = min(ctx, W - 1 + chunk), a ring; full ones: R = ctx. */
typedef struct g4_kv {
    float *k, *v; /* [n_seqs][G][R][dh] */
    int G, dh, R;
    int window;   /* keys that a query sees, itself included; full layers: ctx */
} g4_kv;

/* The rows of one step, in the backend's memory. */
typedef struct g4_rows {
    int32_t *token, *seq, *pos; /* [T] */
    int T;
} g4_rows;

/* What every operation gets besides its own arguments. */
typedef struct g4_run {
    const g4_backend *backend;
    int threads;
    g4_precision precision;
    float *scratch;         /* in the backend's memory, as many floats as backend->scratch() asks for; NULL: none, then products of many rows and those of quantised weights are slow */
    double *busy;           /* [threads] seconds that each part of an operation took; NULL: nobody asks (--profile does) */
    double (*clock)(void);
} g4_run;

/* Around each thread's part of an operation. What the threads did not spend inside they spent waiting for each other. */
static inline double g4_part_begins(const g4_run *run) { return run->busy ? run->clock() : 0; }
static inline void g4_part_ends(const g4_run *run, int part, double begin) {
    if (run->busy) run->busy[part] += run->clock() - begin;
}

typedef struct g4_attention_args {
    float *o;           /* [T][H][dh] */
    const float *q;     /* [T][H][dh] */
    const g4_kv *kv;
    const g4_rows *rows;
    int H;
    float *scores;      /* scratch [threads][score_rows][ctx] */
    int score_rows;     /* the largest H / G of any layer: a backend may compute all heads of a K/V head at once */
    int ctx;
} g4_attention_args;

typedef struct g4_router_args {
    int32_t *index;     /* [T][K] chosen experts, ascending */
    float *weight;      /* [T][K] */
    const float *h;     /* [T][D], not normed */
    const g4_layer *layer;
    int T, D, E, K;
    float eps;
    float *n;           /* scratch [T][D] */
    float *logits;      /* scratch [T][E] */
} g4_router_args;

typedef struct g4_experts_args {
    float *y;           /* [T][D] */
    const float *x;     /* [T][D] */
    const int32_t *index; /* [T][K] */
    const float *weight;  /* [T][K] */
    const g4_layer *layer;
    int T, D, K, Fe;
    int room;           /* rows that the scratch holds: a backend may compute that many rows of one expert at once */
    float *gate_up;     /* scratch [room][2*Fe] */
    float *down;        /* scratch [room][D] */
} g4_experts_args;

typedef struct g4_ple_args {
    float *p;           /* [T][L][P]; holds a = E_ple[token] * sqrt(P) on entry */
    float *b;           /* [T][L][P]: per_layer_model_projection h; changed */
    const g4_tensor *norm; /* [P] */
    int T, L, P, D;
    float eps;
} g4_ple_args;

/* A backend: the operations that forward() lists. An entry left NULL is the base's, then the scalar one. All pointers to data are addresses in the
 * backend's memory, which only it dereferences. Operations are enqueued in order; results may be read after `download`, which waits.
 * A host backend (host_memory = 1) may leave alloc .. download NULL, and every operation has finished when it returns. */
struct g4_backend {
    const char *name;
    int host_memory;
    const g4_backend *base;         /* NULL: none */
    const char *(*unusable)(void);  /* NULL or a function that gives NULL: can run here; else the reason */
    void *(*alloc)(size_t bytes);   /* zeroed; NULL: no memory */
    void (*release)(void *p);
    int (*upload)(void *dst, const void *src, size_t bytes);
    int (*download)(void *dst, const void *src, size_t bytes);
    /* How many floats matmul would like to work with, for products of at most T rows of at most cols columns; SIZE_MAX: more than
     * can be addressed. NULL: none. */
    size_t (*scratch)(int T, int cols, int threads);
    /* y [T][cols] = table[token] * scale */
    void (*embed)(const g4_run *, float *y, const g4_tensor *table, const int32_t *token, int T, float scale);
    /* y [T][W.rows] = W x, x [T][W.cols] */
    void (*matmul)(const g4_run *, float *y, const g4_tensor *W, const float *x, int T);
    /* y [n][dim] = x / sqrt(mean(x^2) + eps) * w; w [dim] or NULL; y may be x */
    void (*norm)(const g4_run *, float *y, const float *x, const g4_tensor *w, int n, int dim, float eps);
    /* c, s [T][half] = cos, sin of pos * inv_freq */
    void (*rope_table)(const g4_run *, float *c, float *s, const float *inv_freq, const int32_t *pos, int T, int half);
    /* x [T][heads][dh]: rotates the pairs (i, i + dh/2) */
    void (*rope)(const g4_run *, float *x, const float *c, const float *s, int T, int heads, int dh);
    /* k, v [T][G][dh] into the cache */
    void (*kv_store)(const g4_run *, const g4_kv *kv, const float *k, const float *v, const g4_rows *rows);
    void (*attention)(const g4_run *, const g4_attention_args *a);
    /* gate [T][n] = gelu_tanh(gate) * up; row t of up begins at up + t * stride */
    void (*gelu_mul)(const g4_run *, float *gate, const float *up, int T, int n, size_t stride);
    /* y [n] += x */
    void (*add)(const g4_run *, float *y, const float *x, size_t n);
    /* y [n] *= s [1] */
    void (*scale)(const g4_run *, float *y, const g4_tensor *s, size_t n);
    /* p = (norm(b / sqrt(D)) + p) / sqrt(2) */
    void (*ple)(const g4_run *, const g4_ple_args *a);
    void (*router)(const g4_run *, const g4_router_args *a);
    void (*experts)(const g4_run *, const g4_experts_args *a);
    /* y [n][width] = x[index] */
    void (*gather_rows)(const g4_run *, float *y, const float *x, const int32_t *index, int n, size_t width);
    /* y [n] = c * tanh(y / c) */
    void (*softcap)(const g4_run *, float *y, size_t n, float c);
};

extern const g4_backend g4_backend_scalar; /* gemma4.c: the oracle */
extern const g4_backend g4_backend_cpu;    /* backend_cpu.c: the same bits, faster */
extern const g4_backend g4_backend_blis;   /* backend_blis.c, in builds that have it: other bits, by way of a BLAS */

#ifdef __cplusplus
}
#endif
#endif
