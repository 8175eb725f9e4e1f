/* Drafting of chains, token by token; steps and logits of heads that recycle their state; and draft models, which have
 * an embedding, a few decoder layers and an output head of their own. */

#include <string.h>

#include "kernels.h"

static void begin_chain(const Chain *c, int64_t B)
{
    for (int64_t b = 0; b < B; b++)
        c->tokens[b * (c->depth + 1)] = c->root[b], c->scores[b * (c->depth + 1)] = 0;
}

/* Draws the tokens of one level, counted from 1, from the logits. */
static void draw(const Chain *c, int64_t B, int64_t level)
{
    for (int64_t b = 0; b < B; b++)
        c->positions[b] = c->length[b] + level;
    pick(&c->sampling, c->logits, c->positions, c->kept, c->ids, c->logp, B, 1, c->V, 1);
    for (int64_t b = 0; b < B; b++) {
        const int64_t at = b * (c->depth + 1) + level;
        c->tokens[at] = c->ids[b], c->scores[at] = c->scores[at - 1] + c->logp[b];
    }
}

int64_t module_room(const Module *m, int64_t B, int64_t N, int64_t D, int64_t E)
{
    return scratch_size(&m->layer, B, N, D, E) + B * N * 2 * D;
}

/* One step of a module: made (R, D) from states (R, D) and the embeddings table[tokens]; without tokens, from the rows
 * of `table`. */
void recycle(const Module *m, const Pass *given, const int64_t *tokens, const float *table, const float *states,
             float *made, float *keys, float *values)
{
    Pass p = *given;
    const int64_t R = p.B * p.N, D = p.D, first = m->state_first ? D : 0;
    float *halves = p.scratch;
    for (int64_t r = 0; r < R; r++) {
        const float *embedding = table + (tokens ? tokens[r] : r) * D;
        float *half = halves + r * 2 * D + first;
        if (m->zero_first && p.positions[r] == 0)
            memset(half, 0, D * sizeof(float)); /* the norm of zeros */
        else
            normalise_rows(embedding, D, m->token_norm, m->token_eps, half, D, 1, D);
    }
    normalise_rows(states, D, m->state_norm, m->state_eps, halves + D - first, 2 * D, R, D);
    if (m->project.K)
        multiply(&m->project, halves, 2 * D, NULL, made, R, p.threads);
    else
        for (int64_t r = 0; r < R; r++)
            memcpy(made + r * D, m->normed_residual ? halves + r * 2 * D + D - first : states + r * D,
                   D * sizeof(float));
    p.x = made, p.input = halves, p.scratch = halves + R * 2 * D;
    decoder_layers(&m->layer, 1, &p, keys, 0, values, 0, NULL, 0, NULL);
    if (m->leave_norm)
        normalise_rows(made, D, m->leave_norm, m->leave_eps, made, D, R, D);
}

/* logits (R, O) of states (R, D); scratch of R * D floats. */
void read_out(const Module *m, const float *states, float *scratch, float *logits, int64_t R, int64_t D,
              int64_t threads)
{
    if (m->read_norm) {
        normalise_rows(states, D, m->read_norm, m->read_eps, scratch, D, R, D);
        states = scratch;
    }
    multiply(&m->output, states, D, NULL, logits, R, threads);
}

/* Drafts a chain from the states (B, D) that the first step recycles. The pass has one token per row; room of 3 B D
 * floats. */
void draft_chain(const Module *m, const Pass *given, const Chain *c, const float *table, const float *recycled,
                 float *keys, float *values, float *room)
{
    Pass p = *given;
    const int64_t B = p.B, D = p.D;
    float *made = room, *next = made + B * D, *normed = next + B * D;
    p.positions = p.slots = c->slots; /* a chain's tokens use the slots that they keep if they are accepted */
    begin_chain(c, B);
    for (int64_t level = 1; level <= c->depth; level++) {
        read_out(m, level > 1 ? made : recycled, normed, c->logits, B, D, p.threads);
        draw(c, B, level);
        if (level < c->depth) {
            for (int64_t b = 0; b < B; b++)
                c->slots[b] = c->positions[b] - 1;
            recycle(m, &p, c->ids, table, level > 1 ? made : recycled, next, keys, values);
            float *swap = made;
            made = next, next = swap;
        }
    }
}

/* Extends with tokens (B, N + 1) from position start[b] on, of which count[b] + 1 are valid, and states (B, N, D) from
 * the target's features. Updates the start of the next draft: recycled (B, D), root (B), length (B). Buffers: `made` of
 * B * N * D floats, `room` of 3 B N ids. */
void extend(const Module *m, const Pass *given, const int64_t *tokens, const int64_t *start, const int64_t *count,
             const float *table, const float *states, float *made, int64_t *room, float *keys, float *values,
             float *recycled, int64_t *root, int64_t *length)
{
    Pass p = *given;
    const int64_t B = p.B, N = p.N, D = p.D;
    int64_t *ids = room, *positions = ids + B * N, *slots = positions + B * N;
    for (int64_t r = 0; r < B * N; r++) {
        const int64_t b = r / N, n = r % N, place = start[b] + n;
        ids[r] = tokens[b * (N + 1) + n + 1];
        positions[r] = place < p.S ? place : p.S - 1;
        slots[r] = n < count[b] ? positions[r] : -1;
    }
    p.positions = positions, p.slots = slots;
    recycle(m, &p, ids, table, states, made, keys, values);
    for (int64_t b = 0; b < B; b++)
        if (count[b] > 0) {
            memcpy(recycled + b * D, made + (b * N + count[b] - 1) * D, D * sizeof(float));
            root[b] = tokens[b * (N + 1) + count[b]];
            length[b] = start[b] + count[b];
        }
}

/* Drafts a chain after each root and `previous` (B), the token before the root, which may not be in the cache yet. The
 * pass has two tokens per row; room of 3 B D floats. */
void model_chain(const Model *m, const Pass *given, const Chain *c, const int64_t *previous, float *keys,
                 int64_t key_stride, float *values, int64_t value_stride, float *room)
{
    Pass p = *given;
    const int64_t B = p.B, D = p.D;
    float *x = room, *normed = x + 2 * B * D;
    p.x = x, p.positions = p.slots = c->slots;
    begin_chain(c, B);
    for (int64_t b = 0; b < B; b++)
        for (int64_t n = 0; n < 2; n++) {
            const int64_t place = c->length[b] + n - 1;
            c->slots[2 * b + n] = place > 0 ? place : 0; /* a row without a prompt is at 0 */
            memcpy(x + (2 * b + n) * D, m->table + (n ? c->root : previous)[b] * D, D * sizeof *x);
        }
    for (int64_t level = 1; level <= c->depth; level++) {
        if (level > 1) {
            p.N = 1;
            for (int64_t b = 0; b < B; b++) {
                c->slots[b] = c->positions[b];
                memcpy(x + b * D, m->table + c->ids[b] * D, D * sizeof *x);
            }
        }
        decoder_layers(m->layers, m->count, &p, keys, key_stride, values, value_stride, NULL, 0, NULL);
        normalise_rows(x + (p.N - 1) * D, p.N * D, m->norm, m->eps, normed, D, B, D);
        multiply(&m->output, normed, D, NULL, c->logits, B, p.threads);
        draw(c, B, level);
    }
}

/* Continues after the accepted tokens: rows (B, M + 1) begin at position `start`. The first count[b] of them entered
 * the cache, and the next one is the root. */
void advance(const int64_t *rows, const int64_t *start, const int64_t *count, int64_t *previous, int64_t *root,
             int64_t *length, int64_t B, int64_t M)
{
    for (int64_t b = 0; b < B; b++)
        if (count[b] > 0) {
            const int64_t *newest = rows + b * (M + 1) + count[b];
            previous[b] = newest[-1], root[b] = newest[0], length[b] = start[b] + count[b];
        }
}
