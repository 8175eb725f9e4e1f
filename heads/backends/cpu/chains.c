/* What all drafts have in common that are chains: each token is picked by the distribution that the ones before it gave. */

#include "kernels.h"

void begin_chain(const Chain *c, int64_t B)
{
    for (int64_t b = 0; b < B; b++)
        c->tokens[b * (c->depth + 1)] = c->root[b], c->scores[b * (c->depth + 1)] = 0;
}

/* The tokens of one level, counted from 1, by the logits. */
void draw(const Chain *c, int64_t B, int64_t level)
{
    for (int64_t b = 0; b < B; b++)
        c->positions[b] = c->length[b] + level;
    pick(&c->sampling, c->logits, c->positions, c->kept, c->ids, c->logp, B, 1, c->V, 1);
    for (int64_t b = 0; b < B; b++) {
        const int64_t at = b * (c->depth + 1) + level;
        c->tokens[at] = c->ids[b], c->scores[at] = c->scores[at - 1] + c->logp[b];
    }
}
