/* Rounds that drafted nothing, kept for a head that is told of them later: `eval.runtime.pending` on a CPU.
 *
 * Letters: B rows, S tokens kept of each.
 */

#include <stdint.h>
#include <string.h>

typedef struct { /* `BacklogStruct` of backlog.py */
    int64_t *tokens, *count;            /* (B, S + 1), (B) */
    char *aux_hidden_states, *hidden;                /* (B, S) of so many bytes each */
    int64_t B, S, aux_size, hidden_size;
} Pending;

/* One token more of each row: tokens (B, 2), it and the root after it; count (B), 0 where nothing is to be counted. */
void keep(const Pending *s, const int64_t *tokens, const char *aux_hidden_states, const char *hidden, const int64_t *count)
{
    for (int64_t b = 0; b < s->B; b++) {
        const int64_t at = s->count[b] < s->S ? s->count[b] : s->S - 1;
        memcpy(s->tokens + b * (s->S + 1) + at, tokens + 2 * b, 2 * sizeof *tokens);
        memcpy(s->aux_hidden_states + (b * s->S + at) * s->aux_size, aux_hidden_states + b * s->aux_size, s->aux_size);
        memcpy(s->hidden + (b * s->S + at) * s->hidden_size, hidden + b * s->hidden_size, s->hidden_size);
        s->count[b] += count[b];
    }
}
