/* The best of noisy scores on a CPU, without the noise of those that cannot win.
 *
 * A score's noise is -log(-log(1 - w)) for a uniform w, and takes two logarithms in double precision. It is at most
 * -log(w), whose bound the exponent of w gives. So w is computed for every score, and the logarithms for the few scores
 * that the bound allows to exceed the best one so far, which begins with that of the highest score.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { BLOCK = 128 };

static const uint64_t STRIDE = 0x9E3779B97F4A7C15; /* splitmix64's; as in gumbel.py */
static const float LOG_2 = 0.6931472f, ROUNDING = 1e-3f;

/* w * 2^52, a number of 52 bits and a half: the high bits of splitmix64's finaliser. */
static inline __attribute__((always_inline)) double uniform(uint64_t x)
{
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
    x = (x ^ x >> 27) * 0x94D049BB133111EB;
    x = (x ^ x >> 31) >> 12 | 0x4330000000000000; /* 2^52 plus the 52 bits, as a double */
    double number;
    memcpy(&number, &x, sizeof number);
    return number - 0x1p52 + 0.5;
}

static float noise(double w)
{
    return (float)-log(-log1p(-w * 0x1p-52));
}

/* An upper bound of the noise. */
static inline __attribute__((always_inline)) float bound(double w)
{
    uint64_t bits;
    memcpy(&bits, &w, sizeof bits);
    return LOG_2 * (float)(52 + 1023 - (int32_t)(bits >> 52));
}

static int64_t best_of(const float *logits, int64_t V, int64_t top, float temperature, uint64_t key, const int64_t *ids)
{
    const float highest = logits[top];
    float best = noise(uniform(key + STRIDE * (uint64_t)(ids ? ids[top] : top)));
    int64_t chosen = highest == highest ? top : 0; /* beside a NaN all scores are NaN, and torch takes the first */
    for (int64_t from = 0; from < V; from += BLOCK) {
        const int count = V - from < BLOCK ? (int)(V - from) : BLOCK;
        double w[BLOCK];
        float score[BLOCK], most[BLOCK];
        int any = 0;
        if (ids)
            for (int i = 0; i < count; i++)
                w[i] = uniform(key + STRIDE * (uint64_t)ids[from + i]);
        else
            for (int i = 0; i < count; i++)
                w[i] = uniform(key + STRIDE * (uint64_t)(from + i));
        for (int i = 0; i < count; i++) {
            score[i] = (logits[from + i] - highest) / temperature;
            most[i] = score[i] + bound(w[i]) + ROUNDING;
            any |= most[i] >= best;
        }
        for (int i = 0; any && i < count; i++)
            if (most[i] >= best) {
                const float sum = noise(w[i]) + score[i];
                if (sum > best || (sum == best && from + i < chosen))
                    best = sum, chosen = from + i;
            }
    }
    return chosen;
}

/* out (R): for each row of logits (R, V) the column of the highest (logits - highest) / temperature + noise, the lowest
 * on ties; at temperature 0 the highest logit's. top (R): the column of the highest logit; temperature (R); key (R): of
 * the noise at the row's place; ids (V): the columns' token ids, or NULL for 0 .. V - 1. */
void noisy_argmax(const float *logits, const int64_t *top, const float *temperature, const uint64_t *key,
                  const int64_t *ids, int64_t *out, int64_t R, int64_t V, int64_t threads)
{
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t r = 0; r < R; r++)
        out[r] = temperature[r] > 0 ? best_of(logits + r * V, V, top[r], temperature[r], key[r], ids) : top[r];
}
