/* Commit of a round's result to the state of all rows: `heads.backends.torch.commit` on a CPU.
 *
 * Letters: B rows, N nodes, M tokens that a round can emit, T tokens of a report.
 */

#include <string.h>

#include "kernels.h"

static int ends(const State *s, int64_t token)
{
    for (int64_t i = 0; i < s->num_eos; i++)
        if (token == s->eos[i])
            return 1;
    return 0;
}

static void publish(const State *s, int64_t b)
{
    int64_t *report = s->report + b * s->report_width;
    const int64_t T = s->report_width - 3, from = s->output_length[b] - T;
    report[0] = s->done[b], report[1] = s->output_length[b], report[2] = s->length[b];
    for (int64_t t = 0; t < T; t++)
        report[3 + t] = s->output[b * s->output_width + (from + t > 0 ? from + t : 0)];
}

/* accepted (B), emitted (B, M); depths (B, N) of each tree's nodes, or NULL if all trees have M - 1 levels. */
void commit(const State *s, const int64_t *accepted, const int64_t *emitted, const int64_t *depths, int64_t N)
{
    const int64_t M = s->M;
    for (int64_t b = 0; b < s->B; b++) {
        const int64_t *tokens = emitted + b * M, count = accepted[b] + 1, room = s->limit[b] - s->output_length[b];
        int64_t kept = count < room ? count : room;
        int ended = count >= room;
        for (int64_t i = 0; s->stops_at_eos[b] && i < kept; i++)
            if (ends(s, tokens[i]))
                kept = i + 1, ended = 1;
        if (s->done[b])
            kept = 0;
        if (M > 1) {
            const int64_t at = b * s->record_width + s->rounds[b], tested = count < kept ? count : kept;
            int64_t levels = depths ? 0 : M - 1;
            for (int64_t j = 0; depths && j < N; j++)
                levels = depths[b * N + j] > levels ? depths[b * N + j] : levels;
            s->accepted[at] = accepted[b] < kept ? accepted[b] : kept;
            s->reached[at] = tested < levels ? tested : levels;
        }
        memcpy(s->output + b * s->output_width + s->output_length[b], tokens, M * sizeof *tokens);
        s->output_length[b] += kept;
        s->rounds[b] += !s->done[b];
        s->done[b] |= ended;
        s->tokens[b * (M + 1)] = s->root[b];
        memcpy(s->tokens + b * (M + 1) + 1, tokens, M * sizeof *tokens);
        s->start[b] = s->length[b];
        s->count[b] = s->done[b] ? 0 : count;
        s->length[b] += s->count[b];
        s->root[b] = tokens[accepted[b]];
        publish(s, b);
    }
}
