/* What a cache holds, moved from slot to slot. */

#include <string.h>

#include "tiles.h"

/* One slot of a head: keys (S / BLOCK, d, BLOCK) and values (S, deep), out of the cache or into it. */
static void carry(float *keys, float *values, int64_t slot, int64_t d, int64_t deep, float *held, const int into)
{
    float *key = keys + slot / BLOCK * BLOCK * d + slot % BLOCK, *value = values + slot * deep;
    for (int64_t i = 0; i < d; i++) {
        if (into)
            key[i * BLOCK] = held[i];
        else
            held[i] = key[i * BLOCK];
    }
    memcpy(into ? value : held + d, into ? held + d : value, deep * sizeof *value);
}

/* Of every row b, from[b, i] goes to to[b, i], (B, P) each; all is read before any is written. keys
 * (layers, B, Hkv, S / BLOCK, d, BLOCK), values (layers, B, Hkv, S, deep); room of P (d + deep) floats. */
void move_slots(float *keys, float *values, const int64_t *from, const int64_t *to, float *room, int64_t layers,
                int64_t B, int64_t Hkv, int64_t S, int64_t d, int64_t P)
{
    const int64_t deep = (d + LANES - 1) / LANES * LANES;
    for (int64_t head = 0; head < layers * B * Hkv; head++, keys += S * d, values += S * deep) {
        const int64_t *of = from + head / Hkv % B * P, *goal = to + head / Hkv % B * P;
        for (int into = 0; into < 2; into++)
            for (int64_t i = 0; i < P; i++)
                if (of[i] != goal[i])
                    carry(keys, values, into ? goal[i] : of[i], d, deep, room + i * (d + deep), into);
    }
}
