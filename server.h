/* server.h - `gemma4 serve`, for main.c. What it does stands in server.c. */
#ifndef SERVER_H
#define SERVER_H

#include "gemma4.h"

typedef struct serve_options {
    g4_model *model;
    g4_state *state;             /* its n_seqs is how many answers are computed at once */
    const g4_tokenizer *tok;
    g4_chat_family family;
    const char *name;            /* of the model, in /v1/models and in answers */
    const char *host;            /* an address, or a name that has one */
    int port;                    /* 0: any that is free */
    const char *api_key;         /* NULL: none is asked for */
    int queue;                   /* answers that may wait; more are refused with 429 */
    size_t max_body;             /* bytes of a request */
    int timeout;                 /* seconds without a byte after which a connection is closed */
    int grace;                   /* seconds that answers in progress get after SIGTERM */
    int speculate;               /* g4_engine_options */
    void (*log)(const char *line);   /* what is worth a line; NULL: nothing */
    void (*listening)(const char *url);
} serve_options;

/* Serves until SIGTERM or SIGINT. -1: it could not begin, or the engine could not go on. */
int serve(const serve_options *options, g4_error *err);

#endif
