/* terminal.h - `gemma4 chat`, for main.c. What it does stands in terminal.c. */
#ifndef TERMINAL_H
#define TERMINAL_H

#include "gemma4.h"

typedef struct terminal_options {
    g4_model *model;
    g4_state *state;             /* of one sequence */
    const g4_tokenizer *tok;
    g4_chat_family family;
    g4_sampling sampling;        /* the seed is raised by one for each answer */
    const char *system;          /* the system message; NULL: none */
    const char *prompt;          /* [n_prompt]: the only message, then the end; NULL: messages are read from stdin */
    size_t n_prompt;
    int thinking, max_new, speculate, quiet;
    double (*clock)(void);       /* seconds */
} terminal_options;

/* Talks until stdin ends or /quit. -1: it could not begin or go on. */
int terminal_chat(const terminal_options *options, g4_error *err);

#endif
