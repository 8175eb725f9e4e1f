/* Choosing the nodes of a dynamic draft tree on a CPU: what `heads.backends.triton.select` says of `widen` and `prune`.
 *
 * Letters: B rows, T nodes drawn, N of them kept, W nodes expanded above, K children of each, C = W * K.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { MOST_CHILDREN = 1024 };

typedef struct { /* `LevelStruct` of trees.py; draws are (B, W, K) by their strides */
    const int64_t *root, *above_nodes, *above_paths, *picked; /* (B), (B, W), (B, W, level - 1) */
    const float *above_scores, *logp;                         /* (B, W) */
    int64_t *tokens, *parents, *places;                       /* (B, T) */
    float *scores;
    int64_t *next_tokens, *next_nodes, *next_rows, *next_paths; /* (B, K), paths (B, K, level) */
    float *next_scores;
    int64_t B, W, K, T, first, level, last, picked_strides[3], logp_strides[3];
} Level;

void widen(const Level *s)
{
    const int64_t K = s->K, C = s->W * K, level = s->level;
    for (int64_t b = 0; b < s->B; b++) {
        const float *above = s->above_scores + b * s->W, *logp = s->logp + b * s->logp_strides[0];
        const int64_t *picked = s->picked + b * s->picked_strides[0];
        int64_t *tokens = s->tokens + b * s->T, *parents = s->parents + b * s->T, *places = s->places + b * s->T;
        float *scores = s->scores + b * s->T;
        if (level == 1)
            tokens[0] = s->root[b], parents[0] = 0, places[0] = -1, scores[0] = 0;
        tokens += s->first, parents += s->first, places += s->first, scores += s->first;
        int64_t best[MOST_CHILDREN], kept = 0; /* the K likeliest draws so far, in order */
        for (int64_t c = 0; c < C; c++) {
            const int64_t w = c / K, k = c % K;
            float total = logp[w * s->logp_strides[1] + k * s->logp_strides[2]];
            if (level > 1)
                total = above[w] + total;
            scores[c] = isnan(total) ? -INFINITY : total;
            tokens[c] = picked[w * s->picked_strides[1] + k * s->picked_strides[2]];
            parents[c] = level > 1 ? s->above_nodes[b * s->W + w] : 0;
            places[c] = -1;
            if (level == 1) { /* all are expanded, in the order they were drawn in */
                best[kept++] = c;
                continue;
            }
            if (kept == K && scores[c] <= scores[best[K - 1]])
                continue;
            int64_t at = kept < K ? kept++ : K - 1;
            for (; at > 0 && scores[best[at - 1]] < scores[c]; at--)
                best[at] = best[at - 1];
            best[at] = c;
        }
        if (s->last)
            continue;
        for (int64_t k = 0; k < K; k++) {
            const int64_t c = best[k], w = c / K, to = b * K + k;
            int64_t *path = s->next_paths + to * level;
            places[c] = (level - 1) * K + k;
            s->next_tokens[to] = tokens[c], s->next_nodes[to] = s->first + c, s->next_rows[to] = w;
            s->next_scores[to] = scores[c];
            if (level > 1)
                memcpy(path, s->above_paths + (b * s->W + w) * (level - 1), (level - 1) * sizeof *path);
            path[level - 1] = places[c];
        }
    }
}

/* Whole numbers in the order of the floats. */
static uint32_t key_of(float x)
{
    uint32_t bits;
    x = x == 0 ? 0 : x; /* of the two zeros, the positive */
    memcpy(&bits, &x, sizeof bits);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

typedef struct { /* `TreeStruct` of trees.py */
    const int64_t *tokens, *parents, *places, *depths; /* (B, T), depths (T) */
    const float *scores, *penalties;                   /* (B, T), (T) */
    int64_t *kept_tokens, *kept_parents, *kept_places, *kept_depths; /* (B, N) */
    float *kept_scores;
    int64_t *order; /* (T), for a node kept its place */
    uint32_t *keys; /* (T) */
    int64_t B, T, N;
} Tree;

void prune(const Tree *s)
{
    const int64_t T = s->T, N = s->N;
    for (int64_t b = 0; b < s->B; b++) {
        const int64_t *parents = s->parents + b * T;
        const float *scores = s->scores + b * T;
        uint32_t least = 0; /* the N-th best key, bit by bit from the highest */
        memset(s->order, 0, T * sizeof *s->order);
        s->keys[0] = UINT32_MAX;
        for (int64_t t = 1; t < T; t++)
            s->keys[t] = key_of(scores[t] - s->penalties[t]);
        for (int bit = 31; bit >= 0; bit--) {
            const uint32_t trial = least | 1u << bit;
            int64_t reached = 0;
            for (int64_t t = 0; t < T; t++)
                reached += s->keys[t] >= trial;
            if (reached >= N)
                least = trial;
        }
        int64_t equal = N, n = 0; /* how many as good as the last may stay: the first of them */
        for (int64_t t = 0; t < T; t++)
            equal -= s->keys[t] > least;
        for (int64_t t = 0; t < T; t++) {
            if (s->keys[t] < least || (s->keys[t] == least && equal-- <= 0))
                continue;
            const int64_t to = b * N + n;
            s->order[t] = n++;
            s->kept_tokens[to] = s->tokens[b * T + t], s->kept_parents[to] = s->order[parents[t]];
            s->kept_places[to] = s->places[b * T + t], s->kept_depths[to] = s->depths[t];
            s->kept_scores[to] = scores[t];
        }
    }
}
