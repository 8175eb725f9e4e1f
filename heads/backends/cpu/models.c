/* Draft models: a few decoder layers of their own, an embedding before them and an output head behind. */

#include <string.h>

#include "kernels.h"

/* A chain behind each root and `previous` (B), the token before it, which may not have been read; the pass is of two
 * tokens; room of 3 B D floats. */
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
            c->slots[2 * b + n] = place > 0 ? place : 0; /* a row without a prompt stands at 0 */
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

/* Go on behind the accepted tokens: rows (B, M + 1) from `start` on, of which count[b] came into the cache and the next
 * is the root. */
void advance(const int64_t *rows, const int64_t *start, const int64_t *count, int64_t *previous, int64_t *root,
             int64_t *length, int64_t B, int64_t M)
{
    for (int64_t b = 0; b < B; b++)
        if (count[b] > 0) {
            const int64_t *newest = rows + b * (M + 1) + count[b];
            previous[b] = newest[-1], root[b] = newest[0], length[b] = start[b] + count[b];
        }
}
