/* Heads that recycle their state: what a module makes of a token and a state, and what is read of that. */

#include <string.h>

#include "kernels.h"

int64_t module_room(const Module *m, int64_t B, int64_t N, int64_t D, int64_t E)
{
    return scratch_size(&m->layer, B, N, D, E) + B * N * 2 * D;
}

/* made (R, D) of the embeddings table[tokens], or of the rows of `table` without tokens, and of states (R, D). */
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

/* logits (R, O) of states (R, D); scratch of as many floats. */
void read_out(const Module *m, const float *states, float *scratch, float *logits, int64_t R, int64_t D,
              int64_t threads)
{
    if (m->read_norm) {
        normalise_rows(states, D, m->read_norm, m->read_eps, scratch, D, R, D);
        states = scratch;
    }
    multiply(&m->output, states, D, NULL, logits, R, threads);
}

/* A chain from the states (B, D) that the first step recycles; the pass is of one token; room of 3 B D floats. */
void draft_chain(const Module *m, const Pass *given, const Chain *c, const float *table, const float *recycled,
                 float *keys, float *values, float *room)
{
    Pass p = *given;
    const int64_t B = p.B, D = p.D;
    float *made = room, *next = made + B * D, *normed = next + B * D;
    p.positions = p.slots = c->slots; /* a chain's tokens stand in the slots that they keep if they are accepted */
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

/* Take in the true states (B, N, D) of tokens (B, N + 1) from start[b] on, of which count[b] are true, and renew what is
 * drafted from: recycled (B, D), root (B), length (B). Rooms of B * N * D floats and 3 B N ids. */
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
