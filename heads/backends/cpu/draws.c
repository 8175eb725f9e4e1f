/* Gumbel noise and choices with it, on a CPU: `heads.backends.torch.sampling` in one pass over a row.
 *
 *     G(seed, position, id) = -log(-log(1 - w)),  w = (k + 1/2) / 2^52,  k the high 52 bits of splitmix64
 *
 * Ids are processed in whole blocks, so each id goes through the same instructions at any index. The best score is the
 * same in any order, and sums run in an order that depends only on their own row. So a row's result is the same, to the
 * bit, whatever the other rows are.
 *
 * Letters: B batch rows, W positions per batch row, R = B * W rows, V columns of a row.
 */

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

enum { BLOCK = 64 };
#define GAMMA 0x9E3779B97F4A7C15u

typedef union {
    uint64_t bits;
    double value;
} Double;

static inline uint64_t mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

static uint64_t key_of(int64_t seed, int64_t position) { return mix(mix(seed) + (uint64_t)position * GAMMA); }

/* Logarithm of a normal number, to about one ulp of float64. With x = 2^e m, m from sqrt(1/2) to sqrt(2), f = m - 1
 * and s = f / (m + 1):  log m = 2 atanh s = 2 s + 2 s (s^2 / 3 + s^4 / 5 + ...)  and  2 s = f - s f. */
static inline double logarithm(double x)
{
    const Double given = {.value = x}, root = {.value = 0.70710678118654752440}, one = {.value = 1.0},
                 whole = {.value = 4503599627370496.0}; /* 2^52, whose low bits are units */
    const uint64_t shifted = given.bits - root.bits + one.bits; /* its exponent bits are those of 2^e */
    const Double exponent = {.bits = shifted >> 52 | whole.bits};
    const Double m = {.bits = given.bits - (shifted & ~(uint64_t)0 << 52) + one.bits};
    const double e = exponent.value - (4503599627370496.0 + 1023.0), f = m.value - 1.0, s = f / (2.0 + f), z = s * s;
    double p = 1.0 / 21;
    p = p * z + 1.0 / 19;
    p = p * z + 1.0 / 17;
    p = p * z + 1.0 / 15;
    p = p * z + 1.0 / 13;
    p = p * z + 1.0 / 11;
    p = p * z + 1.0 / 9;
    p = p * z + 1.0 / 7;
    p = p * z + 1.0 / 5;
    p = p * z + 1.0 / 3;
    const double log_2_high = 0x1.62e42fefa38p-1, log_2_low = 0x1.ef35793c7673p-45; /* e times the first is exact */
    return e * log_2_high + (f - (s * (f - 2.0 * z * p) - e * log_2_low));
}

/* noise[i] = G of ids[i], or of id i if ids is NULL. `noise` has room for whole blocks. */
static void make_noise(uint64_t key, const int64_t *ids, int64_t V, float *noise)
{
    for (int64_t from = 0; from < V; from += BLOCK) {
        uint64_t id[BLOCK];
        for (int64_t i = 0; i < BLOCK; i++)
            id[i] = from + i;
        if (ids) {
            memset(id, 0, sizeof id);
            memcpy(id, ids + from, (V - from < BLOCK ? V - from : BLOCK) * sizeof *id);
        }
        for (int i = 0; i < BLOCK; i++) {
            /* The bits form a number from 1 to 2. Every operation before the logarithms is exact. */
            const Double one_and = {.bits = mix(key + id[i] * GAMMA) >> 12 | (uint64_t)1023 << 52};
            const double w = one_and.value - 1.0 + 0x1p-53;
            noise[from + i] = (float)-logarithm(-logarithm(1.0 - w));
        }
    }
}

static int64_t padded(int64_t V) { return (V + BLOCK - 1) / BLOCK * BLOCK; }

/* Allocates a buffer for the noise of a row, followed by its scores. */
static float *make_room(int64_t V)
{
    float *room = malloc(2 * padded(V) * sizeof(float));
    if (!room)
        abort();
    return room;
}

/* noise (R, V) of seeds (B), positions (R) and ids (V) or NULL. */
void gumbel(const int64_t *seeds, const int64_t *positions, const int64_t *ids, float *noise, int64_t B, int64_t W,
            int64_t V)
{
    float *room = make_room(V);
    for (int64_t r = 0; r < B * W; r++) {
        make_noise(key_of(seeds[r / W], positions[r]), ids, V, room);
        memcpy(noise + r * V, room, V * sizeof(float));
    }
    free(room);
}

/* The highest of V numbers; NaN if any of them is NaN. */
static float highest(const float *x, int64_t V)
{
    float best = -INFINITY;
    int strange = 0;
#pragma omp simd reduction(max : best) reduction(| : strange)
    for (int64_t v = 0; v < V; v++) {
        best = x[v] > best ? x[v] : best;
        strange |= x[v] != x[v];
    }
    return strange ? NAN : best;
}

/* The first index of the highest number, or of the first NaN. */
static int64_t first_best(const float *x, int64_t V)
{
    const float best = highest(x, V);
    int64_t v = 0;
    while (v < V && !(best == best ? x[v] == best : x[v] != x[v]))
        v++;
    return v;
}

/* Noise of a row, reused if the previous row has the same key, as all nodes of a tree level do. */
typedef struct {
    float *noise;
    uint64_t key;
    int made;
} Noise;

static void noise_of(Noise *n, uint64_t key, const int64_t *ids, int64_t V)
{
    if (!n->made || n->key != key)
        make_noise(key, ids, V, n->noise);
    n->key = key, n->made = 1;
}

/* argmax_v((logits[v] - max) / T + G), the lowest id on ties. If a logit is NaN, id 0. Else, if the highest logit is
 * infinite, the first id with that logit. */
static int64_t choose_one(const float *logits, float temperature, const float *noise, int64_t V, float *score)
{
    const float top = highest(logits, V);
    if (!(fabsf(top) <= FLT_MAX))
        return top == top ? first_best(logits, V) : 0;
    for (int64_t v = 0; v < V; v++)
        score[v] = (logits[v] - top) / temperature + noise[v];
    return first_best(score, V);
}

/* logits (R, V), temperatures and seeds (B), positions (R) -> chosen (R). */
void choose(const float *logits, const float *temperatures, const int64_t *seeds, const int64_t *positions,
            int64_t *chosen, int64_t B, int64_t W, int64_t V, int64_t threads)
{
    (void)threads;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Noise noise = {.noise = make_room(V)};
#pragma omp for schedule(static)
        for (int64_t r = 0; r < B * W; r++) {
            const float *row = logits + r * V, temperature = temperatures[r / W];
            if (temperature > 0) {
                noise_of(&noise, key_of(seeds[r / W], positions[r]), NULL, V);
                chosen[r] = choose_one(row, temperature, noise.noise, V, noise.noise + padded(V));
            } else
                chosen[r] = first_best(row, V);
        }
        free(noise.noise);
    }
}

/* e^x for x <= 0, to about one ulp; 0 below -87. */
static inline float exponential(float x)
{
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    const float clamped = x < -87.0f ? -87.0f : x;
    const float n = (clamped * 1.44269504088896341f + magic) - magic;
    const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f; /* ln 2 in two parts */
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    union { int32_t i; float f; } power = {((int32_t)n + 127) << 23};
    return x < -87.0f ? 0 : (p * r * r + r + 1.0f) * power.f;
}

/* The `count` best of V scores in descending order, lowest columns first on ties, and the logarithms of
 * softmax(sharpness * score). */
static void take_best(const float *score, float sharpness, int64_t V, int64_t count, int64_t *columns, float *logp)
{
    float sum = 0;
    int64_t held = 0;
    for (int64_t from = 0; from < V; from += BLOCK) {
        const int64_t width = V - from < BLOCK ? V - from : BLOCK;
        if (held == count && !(highest(score + from, width) > logp[count - 1]))
            continue;
        for (int64_t v = from; v < from + width; v++) {
            if (held == count && !(score[v] > logp[count - 1]))
                continue;
            int64_t at = held < count ? held++ : count - 1;
            for (; at > 0 && score[v] > logp[at - 1]; at--)
                logp[at] = logp[at - 1], columns[at] = columns[at - 1];
            logp[at] = score[v], columns[at] = v;
        }
    }
    const float top = logp[0];
#pragma omp simd reduction(+ : sum)
    for (int64_t v = 0; v < V; v++)
        sum += exponential(sharpness * (score[v] - top));
    const float rest = logf(sum);
    for (int64_t i = 0; i < count; i++)
        logp[i] = sharpness * (logp[i] - top) - rest;
}

/* A draft's best columns, by logits / T + G, or by logits if T is 0: logits (R, V), positions (R), ids (V) the target
 * ids of the columns or NULL -> picked (R, count) ids, logp (R, count), with `sharpness` if T is 0. */
void pick(const Sampling *sampling, const float *logits, const int64_t *positions, const int64_t *ids, int64_t *picked,
          float *logp, int64_t B, int64_t W, int64_t V, int64_t count)
{
    Noise noise = {.noise = make_room(V)};
    float *warm = noise.noise + padded(V);
    for (int64_t r = 0; r < B * W; r++, picked += count, logp += count) {
        const float *score = logits + r * V, temperature = sampling->temperatures[r / W];
        if (temperature > 0) {
            noise_of(&noise, key_of(sampling->seeds[r / W], positions[r]), ids, V);
            for (int64_t v = 0; v < V; v++)
                warm[v] = score[v] / temperature + noise.noise[v];
            score = warm;
        }
        take_best(score, temperature > 0 ? 1 : sampling->sharpness, V, count, picked, logp);
        for (int64_t i = 0; ids && i < count; i++)
            picked[i] = ids[picked[i]];
    }
    free(noise.noise);
}
