/* The acceptance rule `match` on a CPU: what accept.py says of it.
 *
 * Letters: B rows, N nodes, M = K + 1 levels, the root's included.
 */

#include <stdint.h>

enum { MOST_NODES = 1024 };

int most_nodes(void) { return MOST_NODES; }

/* tokens, parents, depths and the target's choice (B, N) -> accepted (B), path and emitted (B, M). */
void match(const int64_t *tokens, const int64_t *parents, const int64_t *depths, const int64_t *choice,
           int64_t *accepted, int64_t *path, int64_t *emitted, int64_t B, int64_t N, int64_t M)
{
    for (int64_t b = 0; b < B; b++, tokens += N, parents += N, depths += N, choice += N, path += M, emitted += M) {
        char alive[MOST_NODES] = {1}; /* whether a node and all above it were chosen */
        int64_t best = 0;
        for (int64_t j = 1; j < N; j++) {
            const int64_t up = parents[j];
            alive[j] = alive[up] && tokens[j] == choice[up] && depths[j] == depths[up] + 1 && depths[j] < M;
            if (alive[j] && depths[j] > depths[best])
                best = j;
        }
        accepted[b] = depths[best];
        for (int64_t level = depths[best], node = best; level >= 0; level--, node = parents[node])
            path[level] = node;
        for (int64_t level = depths[best] + 1; level < M; level++)
            path[level] = 0;
        for (int64_t level = 0; level < M; level++)
            emitted[level] = choice[path[level]];
    }
}
