/* engine.c - generation: many texts at once on one state, each as if it were alone.
 *
 * A request waits in a queue until a sequence of the state (a slot) is idle. Each step then is one g4_forward with the rows of all slots: one row of every text
 * that is being written, some more that are drafts of how it goes on, and parts of prompts. What comes out are events: a token, the text that is
 * certain now, the end of a request.
 *
 * Why a request's output does not depend on the others: a row's logits are the same bits in any company (gemma4.c), and a draw depends on the seed and
 * the position alone (sampler.c). The same two facts make drafts lossless: a draft is only asked whether it is what the sampler takes anyway.
 *
 * Not here: text to tokens, chat templates, threads, sockets. Read g4_engine_step first; above it stands what it calls, in the order of the calls; below it the
 * ways in and out of the engine.
 */
#include "gemma4.h"

#include <stdlib.h>
#include <string.h>

#define MIN(a, b) ((a) < (b) ? (a) : (b))

/* A prefix that another request is just computing is waited for if it is that much longer than the one that is there. */
enum { WORTH_WAITING = 16 };

/* Look-up: a draft needs so many equal tokens before it, and more than the second number do not make it better. */
enum { NGRAM_LEAST = 2, NGRAM_MOST = 8 };

/* Drafts cost rows, and rows time. A text has an account of rows: it begins with some, earns a part of one with each step and more with each drafted token that
 * is right, and pays one for each that is wrong. Where none is ever right, a step wastes 1 / CREDIT_STEPS of a row on average. If one row more makes a step
 * longer by a third at most (a fifth on E2B by backend cpu, most of which reads weights), a right one is worth two rows, and the waste is below 5 %. */
enum { CREDIT_STEPS = 8, CREDIT_BEGIN = 2 * CREDIT_STEPS, CREDIT_RIGHT = 2 * CREDIT_STEPS, CREDIT_WRONG = CREDIT_STEPS, CREDIT_MOST = 16 * CREDIT_STEPS };

typedef struct stop_string {
    char *text;
    size_t size;
} stop_string;

/* A request from g4_engine_add until its last event has been read. */
typedef struct job {
    struct job *next;         /* in the queue, or among the ended ones */
    int64_t number;
    void *user;
    int32_t *prompt;          /* [n_prompt] */
    int n_prompt, max_new, n_cached, n_new;
    g4_sampling how;
    g4_logit_bias *bias;
    int logprobs, n_top;
    int32_t *stop_ids;        /* [n_stop_ids] the model's own included */
    int n_stop_ids;
    stop_string *stop;        /* [n_stop] */
    int n_stop;
    g4_decoder *decoder;      /* NULL: no tokenizer */
    char *text;               /* [n_text] of this step and what was held back before; up to n_given it is in events */
    size_t n_text, n_given, room;
    int cancelled;
    int draft_length, credit; /* tokens to draft next time; the account, in rows / CREDIT_STEPS */
    g4_error err;
} job;

/* One sequence of the state. Its cache holds the first g4_length of ids; of a text that is being written the last id is not computed yet. */
typedef struct slot {
    job *job;                 /* NULL: idle, and what it holds may be the beginning of another prompt */
    int32_t *ids;             /* [n], room for ctx */
    int n;
    uint64_t used;            /* the step that used it last */
    int rows, n_draft;        /* in this step: rows of ids, drafts behind them */
    int32_t *draft;           /* [n_draft] */
} slot;

typedef struct text_place {   /* of an event, until the buffers stand still */
    job *job;
    size_t at;
} text_place;

struct g4_engine {
    g4_state *state;
    const g4_model *model;
    const g4_tokenizer *tok;  /* NULL: no text */
    int V, n_ids, ctx, n_slots, budget, speculate, reuse;
    double (*clock)(void);
    slot *slots;              /* [n_slots] */
    job *queue, *ended;       /* those with an event that may still be read */
    int64_t last_number;
    int pending;
    g4_row *rows;             /* [n_slots + budget + speculate] */
    float *logits;            /* [n_slots + speculate][V] */
    float *scratch;           /* [V] the sampler changes what it is given */
    int32_t *drafts;         /* [n_slots][speculate] */
    g4_event *events;         /* [n_events] */
    text_place *places;       /* [n_events] */
    int n_events, event_room;
    g4_logprob *tops;         /* [n_tops] */
    size_t n_tops, top_room;
    g4_engine_stats stats;
    uint64_t steps;
};

/* ---- Events --------------------------------------------------------------------------------------------------------------- */

/* An event with the text up to `end`. g4_engine_add made room for it. */
static g4_event *add_event(g4_engine *e, job *j, int32_t token, size_t end) {
    e->places[e->n_events] = (text_place){j, j->n_given};
    g4_event *event = &e->events[e->n_events++];
    *event = (g4_event){.request = j->number, .user = j->user, .token = token, .n_text = end - j->n_given,
                        .n_prompt = j->n_prompt, .n_cached = j->n_cached, .n_new = j->n_new};
    j->n_given = end;
    return event;
}

static void free_job(job *j) {
    if (!j) return;
    for (int i = 0; i < j->n_stop; i++) free(j->stop[i].text);
    g4_decoder_close(j->decoder);
    free(j->prompt), free(j->bias), free(j->stop_ids), free(j->stop), free(j->text);
    free(j);
}

/* The last event of a request that has left the queue or its slot. */
static void end_job(g4_engine *e, job *j, g4_event *event, g4_finish finish, int32_t stop) {
    event->finish = finish, event->stop = stop;
    if (finish == G4_FINISH_ERROR) event->error = j->err.text;
    j->next = e->ended;
    e->ended = j;
    e->pending--;
}

static void leave_slot(g4_engine *e, slot *s) {
    s->job = NULL;
    s->n = g4_length(e->state, (int)(s - e->slots));
}

/* ---- Text: what is certain, and what may become a stop string --------------------------------------------------------------- */

static int append_text(job *j, const char *text, size_t n) {
    if (n > j->room - j->n_text) {
        size_t room = 2 * (j->n_text + n);
        char *grown = n < SIZE_MAX / 4 ? realloc(j->text, room) : NULL;
        if (!grown) return g4_fail(&j->err, "out of memory for the text");
        j->text = grown;
        j->room = room;
    }
    if (n) memcpy(j->text + j->n_text, text, n);
    j->n_text += n;
    return 0;
}

/* The first place behind `from` where a stop string ends, the longest of those that end there: so it does not matter in which pieces the text came.
 * Cuts the text before it and gives its number; -1: none. */
static int find_stop(job *j, size_t from) {
    for (size_t end = from + 1; end <= j->n_text; end++) {
        int found = -1;
        for (int i = 0; i < j->n_stop; i++) {
            const stop_string *s = &j->stop[i];
            if (s->size <= end - j->n_given && !memcmp(j->text + end - s->size, s->text, s->size) && (found < 0 || s->size > j->stop[found].size)) found = i;
        }
        if (found >= 0) {
            j->n_text = end - j->stop[found].size;
            return found;
        }
    }
    return -1;
}

/* How much of the text may be given out: all but the longest end of it with which a stop string begins. */
static size_t certain_text(const job *j) {
    size_t hold = 0;
    for (int i = 0; i < j->n_stop; i++) {
        const stop_string *s = &j->stop[i];
        for (size_t k = MIN(s->size - 1, j->n_text - j->n_given); k > hold; k--)
            if (!memcmp(j->text + j->n_text - k, s->text, k)) hold = k;
    }
    return j->n_text - hold;
}

/* The text of one more token, or (id -1) what the decoder has held back. Gives the number of a stop string that it completes, -1 if none, -2 after an error. */
static int decode(job *j, int32_t id) {
    const char *text;
    size_t n, from = j->n_text;
    if (!j->decoder) return -1;
    if (id < 0 ? g4_decode_end(j->decoder, &text, &n, &j->err) : g4_decode_push(j->decoder, id, &text, &n, &j->err)) return -2;
    return append_text(j, text, n) ? -2 : find_stop(j, from);
}

/* The end of a request that is no error: what was held back is text after all, unless it now makes a stop string. */
static void end_text(g4_engine *e, job *j, int32_t token, g4_finish finish, int32_t stop, const g4_event *with) {
    int found = decode(j, -1);
    if (found == -2) finish = G4_FINISH_ERROR;
    if (found >= 0) finish = G4_FINISH_STOP_STRING, stop = found;
    g4_event *event = add_event(e, j, token, j->n_text);
    if (with) event->logprob = with->logprob, event->top = with->top, event->n_top = with->n_top;
    end_job(e, j, event, finish, stop);
}

static void end_with_error(g4_engine *e, job *j) { end_job(e, j, add_event(e, j, -1, j->n_given), G4_FINISH_ERROR, 0); }

/* ---- Prompts, and what of them is there already ------------------------------------------------------------------------------ */

static int common(const int32_t *a, int n, const int32_t *b, int m) {
    int i = 0;
    while (i < n && i < m && a[i] == b[i]) i++;
    return i;
}

/* The slot that holds most of the first n of ids, and how much; -1 if none does. */
static int find_prefix(const g4_engine *e, const int32_t *ids, int n, int *length) {
    int best = -1;
    *length = 0;
    for (int i = 0; i < e->n_slots; i++) {
        const slot *s = &e->slots[i];
        int held = g4_length(e->state, i), here = common(ids, n, s->ids, MIN(s->n, held));
        if (here > *length && !g4_state_check(e->state, i, here, NULL)) best = i, *length = here;
    }
    return best;
}

/* The idle slot whose loss is the least: an empty one, else that used longest ago; not `keep` if there is another. -1: none is idle. */
static int idle_slot(const g4_engine *e, int keep) {
    int best = -1;
    for (int i = 0; i < e->n_slots; i++) {
        const slot *s = &e->slots[i], *b = &e->slots[best < 0 ? 0 : best];
        if (s->job) continue;
        if (best < 0 || best == keep || (i != keep && ((b->n && !s->n) || (!b->n == !s->n && s->used < b->used)))) best = i;
    }
    return best;
}

/* Gives a waiting request a slot. 0: not now. */
static int begin(g4_engine *e, job *j) {
    int length = 0, source = -1, awaited = 0;
    if (e->reuse) {
        source = find_prefix(e, j->prompt, j->n_prompt - 1, &length); /* one row is computed in any case, for its logits */
        for (int i = 0; i < e->n_slots; i++) {
            const slot *s = &e->slots[i];
            int known = s->job ? common(j->prompt, j->n_prompt - 1, s->ids, s->job->n_prompt) : 0;
            if (known > g4_length(e->state, i) && known > awaited) awaited = known;
        }
        if (awaited > length + WORTH_WAITING) return 0;
    }
    int to = idle_slot(e, source);
    if (to < 0) return 0;
    /* A slot of which less than half would be lost goes on itself; else its text may yet be gone on with, and a copy is made. */
    if (source >= 0 && !e->slots[source].job && 2 * length >= e->slots[source].n) to = source;
    if (source < 0 || g4_copy(e->state, source, to, length, NULL)) {
        g4_truncate(e->state, to, 0, NULL); /* always works */
        length = 0;
    }
    slot *s = &e->slots[to];
    memcpy(s->ids, j->prompt, (size_t)j->n_prompt * sizeof *s->ids);
    s->n = j->n_prompt;
    s->job = j;
    j->n_cached = length;
    e->stats.cached_tokens += (uint64_t)length;
    e->stats.prompt_tokens += (uint64_t)(j->n_prompt - length);
    return 1;
}

/* Those who were cancelled leave, those who wait come in. */
static void leave_and_come(g4_engine *e) {
    int idle = 0;
    for (int i = 0; i < e->n_slots; i++) {
        job *j = e->slots[i].job;
        if (j && j->cancelled) {
            leave_slot(e, &e->slots[i]);
            end_text(e, j, -1, G4_FINISH_CANCELLED, 0, NULL);
        }
        idle += !e->slots[i].job;
    }
    for (job **at = &e->queue; *at;) {
        job *j = *at;
        int over = j->cancelled || !j->max_new, begins = !over && idle > 0 && begin(e, j);
        if (!over && !begins) {
            at = &j->next;
            continue;
        }
        idle -= begins;
        *at = j->next;
        if (over) end_text(e, j, -1, j->cancelled ? G4_FINISH_CANCELLED : G4_FINISH_LENGTH, 0, NULL);
    }
}

/* ---- Drafts ------------------------------------------------------------------------------------------------------------------ */

/* How the text went on where it last read as it does now: the longest equal stretch counts, of equally long ones the latest. Where the text repeats itself the
 * draft goes on with itself. Gives its length, up to `most`. */
static int look_up(const int32_t *ids, int n, int32_t *draft, int most) {
    int best = 0, at = 0;
    for (int i = n - 2; i >= 0 && best < NGRAM_MOST; i--) {
        int k = 0;
        while (k <= i && k < NGRAM_MOST && ids[i - k] == ids[n - 1 - k]) k++;
        if (k > best) best = k, at = i + 1;
    }
    if (best < NGRAM_LEAST) return 0;
    for (int k = 0; k < most; k++) draft[k] = at + k < n ? ids[at + k] : draft[at + k - n];
    return most;
}

/* Of n drafted tokens `right` were. */
static void settle(job *j, int n, int right) {
    j->credit = MIN(j->credit + 1 + right * CREDIT_RIGHT - (n - right) * CREDIT_WRONG, CREDIT_MOST);
    if (n) j->draft_length = right == n ? 2 * n : right + 1;
}

/* ---- A step ------------------------------------------------------------------------------------------------------------------ */

/* Who gets which rows; gives their number. One for each text; drafts; the rest in equal parts to the prompts. */
static int plan(g4_engine *e) {
    int left = e->budget, drafts = e->speculate, texts = 0, T = 0, more = 1;
    for (int i = 0; i < e->n_slots; i++) {
        slot *s = &e->slots[i];
        s->rows = s->job != NULL, s->n_draft = 0;
        left -= s->rows;
        texts += s->job && s->n - g4_length(e->state, i) == 1;
    }
    for (int i = 0; i < e->n_slots && drafts > 0; i++) {
        slot *s = &e->slots[i];
        job *j = s->job;
        if (!j || s->n - g4_length(e->state, i) > 1) continue;
        int most = MIN(MIN(j->draft_length, j->credit / CREDIT_STEPS), MIN((drafts + texts - 1) / texts, j->max_new - j->n_new - 1));
        s->n_draft = most > 0 ? look_up(s->ids, s->n, s->draft, MIN(most, drafts)) : 0;
        drafts -= s->n_draft, left -= s->n_draft, texts--;
    }
    while (left > 0 && more) {
        more = 0;
        for (int i = 0; i < e->n_slots && left > 0; i++) {
            slot *s = &e->slots[i];
            if (!s->job || s->rows >= s->n - g4_length(e->state, i)) continue;
            s->rows++, left--, more = 1;
        }
    }
    for (int i = 0; i < e->n_slots; i++) {
        slot *s = &e->slots[i];
        int pos = g4_length(e->state, i);
        for (int k = 0; k < s->rows; k++, pos++) e->rows[T++] = (g4_row){s->ids[pos], i, pos, pos == s->n - 1};
        for (int k = 0; k < s->n_draft; k++, pos++) e->rows[T++] = (g4_row){s->draft[k], i, pos, 1};
    }
    return T;
}

static int is_stop_id(const job *j, int32_t id) {
    for (int i = 0; i < j->n_stop_ids; i++)
        if (j->stop_ids[i] == id) return 1;
    return 0;
}

/* The next token of a slot's text from logits [V]. 1: the text goes on, 0: it has ended. */
static int next_token(g4_engine *e, slot *s, const float *logits) {
    const g4_config *c = &e->model->config;
    job *j = s->job;
    g4_event with = {.n_top = j->n_top, .top = e->tops + e->n_tops};
    memcpy(e->scratch, logits, (size_t)e->V * sizeof *logits);
    int32_t id = g4_sample(&j->how, e->scratch, e->V, s->ids, (size_t)s->n, c->suppress_tokens, c->n_suppress, &j->err);
    if (id >= e->n_ids && !is_stop_id(j, id)) {
        g4_fail(&j->err, "id %d was sampled, which the per-layer embeddings do not have (vocab_size_per_layer_input %d)", (int)id, e->n_ids);
        id = -1;
    }
    if (id >= 0 && j->logprobs && g4_logprobs(logits, e->V, id, &with.logprob, e->tops + e->n_tops, j->n_top, &j->err)) id = -1;
    if (id < 0) {
        end_with_error(e, j);
        return 0;
    }
    if (is_stop_id(j, id)) {
        end_text(e, j, -1, G4_FINISH_STOP_ID, id, NULL);
        return 0;
    }
    e->n_tops += (size_t)j->n_top;
    s->ids[s->n++] = id;
    j->n_new++;
    e->stats.new_tokens++;
    int found = decode(j, id), last = j->n_new == j->max_new;
    if (found == -2) {
        end_with_error(e, j);
        return 0;
    }
    if (found < 0 && last) {
        end_text(e, j, id, G4_FINISH_LENGTH, 0, &with);
        return 0;
    }
    g4_event *event = add_event(e, j, id, found < 0 ? certain_text(j) : j->n_text);
    event->logprob = with.logprob, event->n_top = with.n_top, event->top = with.top;
    if (found >= 0) end_job(e, j, event, G4_FINISH_STOP_STRING, found);
    return found < 0;
}

/* What the step's logits say about slot i; they begin at *logits. A drafted token counts when the sampler takes it, and then the row
 * behind it counts too. */
static void take(g4_engine *e, int i, const float **logits) {
    slot *s = &e->slots[i];
    job *j = s->job;
    int first = s->n, drafts = s->n_draft, right = 0, goes_on = 1;
    s->used = e->steps;
    if (g4_length(e->state, i) < first) return; /* a prompt, not at its end */
    const float *row = *logits;
    *logits += (size_t)e->V * (size_t)(drafts + 1);
    while ((goes_on = next_token(e, s, row)) && right < drafts && s->ids[s->n - 1] == s->draft[right]) right++, row += e->V;
    /* The cache holds the row before the first new token, and one for each draft that was right; a text that has ended needs no more than the state can give. */
    g4_truncate(e->state, i, first + right, NULL);
    e->stats.proposed += (uint64_t)drafts, e->stats.accepted += (uint64_t)right;
    if (goes_on) settle(j, drafts, right);
    else leave_slot(e, s);
}

static void end_all(g4_engine *e, const char *why) {
    for (int i = 0; i < e->n_slots; i++) {
        job *j = e->slots[i].job;
        if (!j) continue;
        g4_fail(&j->err, "%s", why);
        g4_truncate(e->state, i, 0, NULL);
        leave_slot(e, &e->slots[i]);
        end_with_error(e, j);
    }
}

/* What the last step left behind; texts begin with what was held back. */
static void tidy(g4_engine *e) {
    while (e->ended) {
        job *next = e->ended->next;
        free_job(e->ended);
        e->ended = next;
    }
    for (int i = 0; i < e->n_slots; i++) {
        job *j = e->slots[i].job;
        if (!j || !j->n_given) continue;
        memmove(j->text, j->text + j->n_given, j->n_text - j->n_given);
        j->n_text -= j->n_given, j->n_given = 0;
    }
    e->n_events = 0, e->n_tops = 0;
}

/* Room for the best of each token of this step. */
static int reserve_tops(g4_engine *e) {
    size_t n = 0;
    for (int i = 0; i < e->n_slots; i++)
        if (e->slots[i].job) n += (size_t)e->slots[i].job->n_top * (size_t)(e->slots[i].n_draft + 1);
    if (n <= e->top_room) return 0;
    g4_logprob *grown = n < SIZE_MAX / sizeof *grown ? realloc(e->tops, n * sizeof *grown) : NULL;
    if (!grown) return -1;
    e->tops = grown, e->top_room = n;
    return 0;
}

static double now(const g4_engine *e) { return e->clock ? e->clock() : 0; }

int g4_engine_step(g4_engine *e, const g4_event **events) {
    g4_error err;
    tidy(e);
    e->steps++;
    leave_and_come(e);
    int T = plan(e), of_prompts = 0;
    for (int i = 0; i < e->n_slots; i++) of_prompts |= e->slots[i].job && !e->slots[i].job->n_new;
    double begun = now(e), computed = begun;
    if (T && reserve_tops(e)) {
        end_all(e, "out of memory for log-probabilities");
    } else if (T && g4_forward(e->state, e->rows, T, e->logits, &err)) {
        end_all(e, err.text);
    } else if (T) {
        const float *logits = e->logits;
        computed = now(e);
        e->stats.forwards++, e->stats.rows += (uint64_t)T;
        for (int i = 0; i < e->n_slots; i++)
            if (e->slots[i].job) take(e, i, &logits);
    }
    *(of_prompts ? &e->stats.prompt_seconds : &e->stats.decode_seconds) += computed - begun;
    e->stats.sampling_seconds += now(e) - computed;
    for (int i = 0; i < e->n_events; i++) e->events[i].text = e->places[i].job->text + e->places[i].at;
    *events = e->events;
    return e->n_events;
}

/* ---- Ways in and out ------------------------------------------------------------------------------------------------------- */

static void *copy_of(const void *from, size_t n, size_t size) {
    void *p = n < SIZE_MAX / 2 / size ? malloc(n * size + 1) : NULL;
    if (p && n) memcpy(p, from, n * size);
    return p;
}

/* What cannot be asked for. */
static int check_request(const g4_engine *e, const g4_request *r, g4_error *err) {
    if (!r->n_prompt) return g4_fail(err, "the prompt is empty; a text begins with one token at least, <bos>");
    if (r->n_prompt > (size_t)e->ctx)
        return g4_fail(err, "the prompt is longer than the context: n_prompt %zu, n_ctx %d", r->n_prompt, e->ctx);
    for (size_t i = 0; i < r->n_prompt; i++)
        if (r->prompt[i] < 0 || r->prompt[i] >= e->n_ids)
            return g4_fail(err, "the prompt's item %zu: id %d is outside the vocabulary, expected 0 to %d", i + 1, (int)r->prompt[i], e->n_ids - 1);
    if (g4_check_sampling(&r->sampling, e->V, err)) return -1;
    if (r->max_new < 0) return g4_fail(err, "max_new must be 0 or more, found %d", r->max_new);
    if (r->top_logprobs < 0 || r->top_logprobs > e->V) return g4_fail(err, "top_logprobs must be 0 to %d, found %d", e->V, r->top_logprobs);
    if (r->decode_flags & ~G4_SKIP_SPECIAL) return g4_fail(err, "decode_flags must be 0 or G4_SKIP_SPECIAL, found %d", r->decode_flags);
    if (r->n_stop_ids < 0 || r->n_stop < 0) return g4_fail(err, "the number of stop ids or strings is negative");
    if (r->n_stop && !e->tok) return g4_fail(err, "stop strings need a tokenizer");
    for (int i = 0; i < r->n_stop; i++) {
        const char *stop = r->stop[i];
        if (!stop || !*stop || (*stop & 0xc0) == 0x80) return g4_fail(err, "stop string %d is %s", i + 1, stop && *stop ? "not UTF-8" : "empty");
    }
    return 0;
}

/* A copy of the request; 0 if memory was there. */
static int fill_job(const g4_engine *e, job *j, const g4_request *r, g4_error *err) {
    const g4_config *c = &e->model->config;
    int n_eos = r->ignore_eos ? 0 : c->n_eos;
    j->user = r->user;
    j->n_prompt = (int)r->n_prompt;
    j->max_new = MIN(r->max_new, e->ctx - j->n_prompt);
    j->how = r->sampling;
    j->how.n_prompt = r->n_prompt;
    j->logprobs = r->logprobs || r->top_logprobs, j->n_top = r->top_logprobs;
    j->draft_length = e->speculate, j->credit = CREDIT_BEGIN;
    j->prompt = copy_of(r->prompt, r->n_prompt, sizeof *j->prompt);
    j->bias = copy_of(r->sampling.logit_bias, r->sampling.n_logit_bias > 0 ? (size_t)r->sampling.n_logit_bias : 0, sizeof *j->bias);
    j->how.logit_bias = j->bias;
    j->stop_ids = malloc(((size_t)n_eos + (size_t)r->n_stop_ids + (size_t)r->n_stop + 1) * sizeof *j->stop_ids);
    j->stop = calloc((size_t)r->n_stop + 1, sizeof *j->stop);
    if (!j->prompt || !j->bias || !j->stop_ids || !j->stop) return g4_fail(err, "out of memory for a request");
    for (int i = 0; i < n_eos; i++) j->stop_ids[j->n_stop_ids++] = c->eos_token_id[i];
    for (int i = 0; i < r->n_stop_ids; i++) j->stop_ids[j->n_stop_ids++] = r->stop_ids[i];
    for (int i = 0; i < r->n_stop; i++) {
        int32_t id = g4_token_id(e->tok, r->stop[i]);
        stop_string *s = &j->stop[j->n_stop++];
        s->size = strlen(r->stop[i]);
        if (!(s->text = copy_of(r->stop[i], s->size, 1))) return g4_fail(err, "out of memory for a request");
        if (id >= 0 && g4_token_is_special(e->tok, id)) j->stop_ids[j->n_stop_ids++] = id; /* its text may be left out of what is decoded */
    }
    if (e->tok && !(j->decoder = g4_decoder_open(e->tok, r->decode_flags, err))) return -1;
    j->room = 16; /* text is never NULL */
    return (j->text = malloc(j->room)) ? 0 : g4_fail(err, "out of memory for a request");
}

int64_t g4_engine_add(g4_engine *e, const g4_request *request, g4_error *err) {
    if (check_request(e, request, err)) return -1;
    int most = e->pending + 1 + e->n_slots + e->speculate; /* events of a step: one for each drafted token, and a last one for each request */
    if (most > e->event_room) {
        g4_event *events = realloc(e->events, 2 * (size_t)most * sizeof *events);
        if (events) e->events = events;
        text_place *places = events ? realloc(e->places, 2 * (size_t)most * sizeof *places) : NULL;
        if (!places) return g4_fail(err, "out of memory for the events of %d requests", e->pending + 1), -2;
        e->places = places;
        e->event_room = 2 * most;
    }
    job *j = calloc(1, sizeof *j);
    if (!j) return g4_fail(err, "out of memory for a request"), -2;
    if (fill_job(e, j, request, err)) {
        free_job(j);
        return -2;
    }
    job **end = &e->queue;
    while (*end) end = &(*end)->next;
    *end = j;
    e->pending++;
    return j->number = ++e->last_number;
}

int g4_engine_cancel(g4_engine *e, int64_t request) {
    job *found = NULL;
    for (job *j = e->queue; j; j = j->next)
        if (j->number == request) found = j;
    for (int i = 0; i < e->n_slots; i++)
        if (e->slots[i].job && e->slots[i].job->number == request) found = e->slots[i].job;
    if (found) found->cancelled = 1;
    return found ? 0 : -1;
}

int g4_engine_pending(const g4_engine *e) { return e->pending; }

void g4_engine_get_stats(const g4_engine *e, g4_engine_stats *stats) {
    *stats = e->stats;
    stats->active = 0;
    for (int i = 0; i < e->n_slots; i++) stats->active += e->slots[i].job != NULL;
    stats->waiting = e->pending - stats->active;
}

int g4_engine_save(g4_engine *e, const int32_t *ids, size_t n, const char *path, g4_error *err) {
    int length, seq = find_prefix(e, ids, (int)MIN(n, (size_t)e->ctx), &length);
    if (seq < 0) return g4_fail(err, "%s: nothing to save: the first of these %zu ids are not in the cache", path, n);
    return g4_sequence_save(e->state, seq, length, ids, path, err) ? -1 : length;
}

int g4_engine_load(g4_engine *e, const char *path, g4_error *err) {
    int32_t *ids;
    size_t n;
    int to = idle_slot(e, -1);
    if (to < 0) return g4_fail(err, "%s: all %d sequences are at work; load it when one is idle", path, e->n_slots);
    slot *s = &e->slots[to];
    if (g4_sequence_load(e->state, to, path, &ids, &n, err)) {
        s->n = g4_length(e->state, to); /* 0 if it failed half-way */
        return -1;
    }
    memcpy(s->ids, ids, n * sizeof *ids);
    s->n = (int)n, s->used = e->steps;
    g4_free(ids);
    return (int)n;
}

g4_engine *g4_engine_open(g4_state *state, const g4_tokenizer *tok, const g4_engine_options *options, g4_error *err) {
    const g4_state_options *so = g4_state_get_options(state);
    g4_engine_options o = options ? *options : (g4_engine_options){0};
    if (o.budget < 0) return g4_fail(err, "budget must be 0 (the state's chunk) or more, found %d", o.budget), NULL;
    if (o.speculate < 0) return g4_fail(err, "speculate must be 0 (off) or more, found %d", o.speculate), NULL;
    g4_engine *e = calloc(1, sizeof *e);
    if (!e) return g4_fail(err, "out of memory for an engine"), NULL;
    e->state = state, e->model = g4_state_get_model(state), e->tok = tok;
    const g4_config *c = &e->model->config;
    e->V = e->n_ids = c->vocab_size;
    if (c->hidden_size_per_layer_input) e->n_ids = MIN(e->n_ids, c->vocab_size_per_layer_input);
    e->ctx = so->ctx, e->n_slots = so->n_seqs;
    e->budget = o.budget ? MIN(o.budget, so->chunk) : so->chunk;
    e->speculate = MIN(o.speculate, so->chunk - 1); /* so many rows the rings can forget */
    e->reuse = !o.no_prefix_reuse, e->clock = o.clock;
    size_t n = (size_t)e->n_slots, k = (size_t)e->speculate, V = (size_t)e->V;
    e->slots = calloc(n, sizeof *e->slots);
    e->rows = malloc((n + k + (size_t)e->budget) * sizeof *e->rows);
    e->logits = (n + k) < SIZE_MAX / sizeof(float) / V ? malloc((n + k) * V * sizeof(float)) : NULL;
    e->scratch = malloc(V * sizeof(float));
    e->drafts = malloc((n * k + 1) * sizeof *e->drafts);
    int no_memory = !e->slots || !e->rows || !e->logits || !e->scratch || !e->drafts;
    for (size_t i = 0; i < n && !no_memory; i++) {
        e->slots[i].draft = e->drafts + i * k;
        e->slots[i].ids = malloc((size_t)e->ctx * sizeof *e->slots[i].ids);
        no_memory = !e->slots[i].ids;
        g4_truncate(state, (int)i, 0, NULL); /* always works */
    }
    if (!no_memory) return e;
    g4_fail(err, "out of memory for an engine of %d sequences of %d tokens", e->n_slots, e->ctx);
    g4_engine_close(e);
    return NULL;
}

void g4_engine_close(g4_engine *e) {
    if (!e) return;
    for (int i = 0; i < e->n_slots && e->slots; i++) {
        free_job(e->slots[i].job);
        free(e->slots[i].ids);
    }
    for (int i = 0; i < 2; i++)
        for (job *j = i ? e->ended : e->queue, *next; j; j = next) {
            next = j->next;
            free_job(j);
        }
    free(e->slots), free(e->rows), free(e->logits), free(e->scratch), free(e->drafts);
    free(e->events), free(e->places), free(e->tops);
    free(e);
}
