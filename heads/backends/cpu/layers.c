/* Decoder layers over a few rows, their attention, and moves between cache slots. */

#include <math.h>
#include <string.h>

#include "tiles.h"

/* With fewer gates, or fewer multiplications of queries and keys, a second thread costs more to wake than it saves. */
enum { SHARED_GATES = 1 << 14, SHARED_SCORES = 1 << 17, GATES = 512 };

static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* e^x to about one ulp; 0 below -87. */
static inline float exponential(float x)
{
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    const float clamped = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    const float n = (clamped * 1.44269504088896341f + magic) - magic;
    const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f; /* ln 2 in two parts */
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union { int32_t i; float f; } power = {((int32_t)n + 127) << 23};
    return x < -87.0f ? 0 : p * power.f;
}

/* (R, 2 I) -> (R, I): silu of the first half times the second half. Computes one share: GATES columns of a row. */
static __attribute__((noinline)) void gate(const float *rows, float *out, int64_t I, int share)
{
    const int64_t shares = (I + GATES - 1) / GATES, r = share / shares, from = share % shares * GATES;
    const float *g = rows + r * 2 * I + from, *up = g + I;
    const int count = least(GATES, I - from);
    float *o = out + r * I + from;
    for (int i = 0; i < count; i++)
        o[i] = g[i] / (1 + exponential(-g[i])) * up[i];
}

static void gates(const float *rows, float *out, int64_t R, int64_t I, int64_t given)
{
    const int64_t threads = R * I >= SHARED_GATES ? given : 1;
    SHARED(share, R * ((I + GATES - 1) / GATES), threads, gate(rows, out, I, share));
}

/* Applies the rotary embedding to one head, pairing the first half with the second. */
static void turn(float *head, const float *cosine, const float *sine, int d)
{
    const int half = d / 2;
    for (int i = 0; i < half; i++) {
        const float a = head[i], b = head[half + i];
        head[i] = a * cosine[i] + b * sine[i];
        head[half + i] = b * cosine[half + i] + a * sine[half + i];
    }
}

/* Score of a masked slot, before or after scaling: far below all other scores, and finite. */
#define HIDDEN (-1e30f)

/* Number of slots up to the last one that any of `count` tokens sees, in whole blocks. */
static int extent(const Pass *p, const float *mask, int64_t token, int count)
{
    const int E = p->E;
    int last = 0;
    for (int64_t at = token; at < token + count; at++) {
        int e = mask ? E : p->slots[at] + 1;
        if (mask)
            for (const float *row = mask + at * E; e > last && row[e - 1] < HIDDEN;)
                e--;
        last = most(last, e);
    }
    const int used = (most(1, last) + BLOCK - 1) / BLOCK * BLOCK;
    return used < E ? used : E;
}

/* Turns the scores of one query into attention weights of the first `used` slots; 0 for slots that it does not see. */
static void weigh(float *score, const float *mask, int64_t slot, int64_t window, float scale, int used)
{
    const int from = window && slot >= window ? slot - window + 1 : 0, to = most(slot, 0);
    float highest = HIDDEN, sum = 0;
    if (mask)
        for (int e = 0; e < used; e++)
            score[e] = mask[e] < HIDDEN ? HIDDEN : score[e] * scale + mask[e];
    else
        for (int e = 0; e < used; e++)
            score[e] = e < from || e > to ? HIDDEN : score[e] * scale;
#pragma omp simd reduction(max : highest)
    for (int e = 0; e < used; e++)
        highest = score[e] > highest ? score[e] : highest;
#pragma omp simd reduction(+ : sum)
    for (int e = 0; e < used; e++) {
        score[e] = exponential(score[e] - highest);
        sum += score[e];
    }
    for (int e = 0; e < used; e++)
        score[e] /= sum;
}

/* Normalizes and rotates head `h` of a token's queries and keys in place. */
static void place(const Layer *l, const Pass *p, int64_t token, int h, float *head)
{
    const int64_t at = p->positions[token] * l->d;
    if (l->head_norm)
        normalise_rows(head, l->d, l->head_norm + h * l->d, l->head_eps, head, l->d, 1, l->d);
    turn(head, p->cosines + at, p->sines + at, l->d);
}

static int64_t deep_of(const Layer *l) { return (l->d + LANES - 1) / LANES * LANES; }

/* Index in the cache of one key head of a batch row. */
static size_t store_of(const Layer *l, const Pass *p, int pair)
{
    return (size_t)(p->first_row + pair / l->Hkv) * l->Hkv + pair % l->Hkv;
}

/* Writes one key head of a batch row to the cache: keys (.., S / BLOCK, d, BLOCK), values (.., S, deep). */
static void keep(const Layer *l, const Pass *p, int pair, float *qkv, float *keys, float *values)
{
    const int d = l->d, deep = deep_of(l), head = l->H + pair % l->Hkv;
    keys += store_of(l, p, pair) * p->S * d, values += store_of(l, p, pair) * p->S * deep;
    for (int n = 0; n < p->N; n++) {
        const int64_t token = (int64_t)(pair / l->Hkv) * p->N + n, slot = p->slots[token];
        float *key = qkv + token * l->qkv.O + head * d, *goal = keys + slot / BLOCK * BLOCK * d + slot % BLOCK;
        if (slot < 0)
            continue;
        place(l, p, token, head, key);
        for (int i = 0; i < d; i++)
            goal[i * BLOCK] = key[i];
        memcpy(values + slot * deep, key + l->Hkv * d, d * sizeof(float));
    }
}

/* Attention with one key head of a batch row, for `count` of its tokens from `first` on. All queries that share the key
 * head go through two products; q and scores are buffers for them. */
static void attend(const Layer *l, const Pass *p, int pair, int first, int count, const float *qkv, const float *keys,
                   const float *values, float *q, float *scores, float *out)
{
    const int d = l->d, G = l->H / l->Hkv, E = p->E, rows = count * G, deep = deep_of(l);
    const int64_t token = (int64_t)(pair / l->Hkv) * p->N + first, head = pair % l->Hkv * G;
    const float *mask = l->window ? p->near_mask : p->mask;
    const int used = extent(p, mask, token, count);
    keys += store_of(l, p, pair) * p->S * d, values += store_of(l, p, pair) * p->S * deep;
    for (int row = 0; row < rows; row++) {
        const int64_t h = head + row % G;
        memcpy(q + row * d, qkv + (token + row / G) * l->qkv.O + h * d, d * sizeof(float));
        place(l, p, token + row / G, h, q + row * d);
    }
    for (int e = 0; e < used; e += BLOCK) {
        for (int row = 0; row < rows; row++)
            memset(scores + (size_t)row * E + e, 0, BLOCK * sizeof(float));
        add_rows(q, d, keys + (size_t)e * d, BLOCK, d, scores + e, E, rows, VECTORS, 0);
    }
    for (int row = 0; row < rows; row++) {
        const int64_t at = token + row / G;
        weigh(scores + (size_t)row * E, mask ? mask + at * E : NULL, p->slots[at], l->window, l->scale, used);
    }
    float *sums = q; /* (rows, deep): the queries are no longer needed */
    memset(sums, 0, (size_t)rows * deep * sizeof(float));
    int i = 0;
    for (; i + BLOCK <= deep; i += BLOCK)
        add_rows(scores, E, values + i, deep, used, sums + i, deep, rows, VECTORS, 0);
    for (; i < deep; i += LANES)
        add_rows(scores, E, values + i, deep, used, sums + i, deep, rows, 1, 0);
    for (int row = 0; row < rows; row++)
        memcpy(out + ((token + row / G) * l->H + head + row % G) * d, sums + row * deep, d * sizeof(float));
}

static int64_t room_of(const Layer *l, int64_t N, int64_t E) /* of one key head */
{
    return N * (l->H / l->Hkv) * (deep_of(l) + E);
}

/* One share of out (R, H * d) from qkv (R, (H + 2 Hkv) * d). A share is one key head of a batch row, or one of `parts`
 * groups of its tokens; with several parts, `keep` must have run before. */
static __attribute__((noinline)) void attend_share(const Layer *l, const Pass *p, float *qkv, float *keys,
                                                   float *values, float *rooms, float *out, int share, int parts)
{
    const int64_t N = p->N, E = p->E, G = l->H / l->Hkv;
    const int pair = share / parts, first = N * (share % parts) / parts;
    const int count = N * (share % parts + 1) / parts - first;
    float *q = rooms + pair * room_of(l, N, E) + first * G * (deep_of(l) + E);
    if (parts == 1)
        keep(l, p, pair, qkv, keys, values);
    attend(l, p, pair, first, count, qkv, keys, values, q, q + count * G * deep_of(l), out);
}

/* Attention of all rows. Threads divide the key heads. If there are fewer key heads than threads and enough work, they
 * also divide the tokens. */
static void attention(const Layer *l, const Pass *p, float *qkv, float *keys, float *values, float *rooms, float *out)
{
    const int64_t pairs = p->B * l->Hkv, work = p->N * (l->H / l->Hkv) * p->E * l->d;
    const int parts = pairs < p->threads && work >= SHARED_SCORES ? least(p->N, (p->threads + pairs - 1) / pairs) : 1;
    const int threads = least(p->threads, pairs * parts);
    for (int pair = 0; pair < pairs && parts > 1; pair++)
        keep(l, p, pair, qkv, keys, values);
    SHARED(share, pairs * parts, threads, attend_share(l, p, qkv, keys, values, rooms, out, share, parts));
}

/* One side of a convolution, in place: x (R, D), with the coefficients (R, 2 * taps * groups) added to the base. */
static void convolve(const Convolution *c, const Pass *p, const float *coefficients, int side, float *x)
{
    const int64_t D = p->D, wide = D / c->groups, T = c->taps, G = c->groups;
    for (int64_t r = p->B * p->N - 1; r >= 0; r--) { /* the rows before r are still unchanged */
        const float *own = coefficients + (r * 2 + side) * T * G;
        for (int64_t i = 0; i < T && i <= r % p->N; i++)
            for (int64_t g = 0; g < G; g++) {
                const float *base = c->base + (side * T + i) * D + g * wide, added = own[i * G + g];
                const float *from = x + (r - i) * D + g * wide;
                float *to = x + r * D + g * wide;
                for (int64_t o = 0; o < wide; o++)
                    to[o] = (i ? to[o] : 0) + (base[o] + added) * from[o];
            }
    }
}

/* Convolves the normalized input of a sublayer in place, and computes the coefficients of both sides. Does nothing
 * without a convolution. */
static void enter(const Convolution *c, const Pass *p, float *input, float *coefficients)
{
    if (!c->taps)
        return;
    multiply(&c->project, input, p->D, NULL, coefficients, p->B * p->N, p->threads);
    convolve(c, p, coefficients, 0, input);
}

/* x += the output of a sublayer's last product, convolved if the sublayer has a convolution. */
static void leave(const Convolution *c, const Pass *p, const Product *last, const float *input,
                  const float *coefficients, float *made)
{
    const int64_t R = p->B * p->N;
    multiply(last, input, last->K, c->taps ? NULL : p->x, c->taps ? made : p->x, R, p->threads);
    if (!c->taps)
        return;
    convolve(c, p, coefficients, 1, made);
    for (int64_t i = 0; i < R * p->D; i++)
        p->x[i] += made[i];
}

/* Scratch floats per token for its coefficients and a sublayer's output; 0 without convolutions. */
static int64_t convolved_of(const Layer *l, int64_t D)
{
    const int64_t most_coefficients = most(l->attention_conv.project.O, l->feedforward_conv.project.O);
    return most_coefficients ? most_coefficients + D : 0;
}

static int64_t width_of(const Layer *l) { return most(most(l->qkv.O, 2 * l->down.K), l->qkv.K); }

static int64_t narrow_of(const Layer *l, int64_t D) { return most(most(l->H * l->d, l->down.K), D); }

int64_t scratch_size(const Layer *l, int64_t B, int64_t N, int64_t D, int64_t E)
{
    return B * N * (width_of(l) + narrow_of(l, D) + convolved_of(l, D)) + B * l->Hkv * room_of(l, N, E);
}

/* keys (rows, Hkv, S / BLOCK, d, BLOCK), values (rows, Hkv, S, d rounded up to LANES). The pass uses B of these rows,
 * from first_row on. */
static void decoder_layer(const Layer *l, const Pass *p, float *keys, float *values)
{
    const int64_t R = p->B * p->N, D = p->D, threads = p->threads;
    float *wide = p->scratch, *narrow = wide + R * width_of(l), *made = narrow + R * narrow_of(l, D);
    float *coefficients = made + (convolved_of(l, D) ? R * D : 0);
    float *rooms = made + R * convolved_of(l, D);
    if (l->attention_norm)
        normalise_rows(p->x, D, l->attention_norm, l->attention_eps, narrow, D, R, D);
    enter(&l->attention_conv, p, narrow, coefficients);
    multiply(&l->qkv, l->attention_norm ? narrow : p->input, l->qkv.K, NULL, wide, R, threads);
    attention(l, p, wide, keys, values, rooms, narrow);
    leave(&l->attention_conv, p, &l->out, narrow, coefficients, made);
    normalise_rows(p->x, D, l->feedforward_norm, l->feedforward_eps, narrow, D, R, D);
    enter(&l->feedforward_conv, p, narrow, coefficients);
    multiply(&l->gate_up, narrow, D, NULL, wide, R, threads);
    gates(wide, narrow, R, l->down.K, threads);
    leave(&l->feedforward_conv, p, &l->down, narrow, coefficients, made);
}

/* Runs the layers in order. Their keys and values are key_stride and value_stride apart. The residual stream that
 * enters layer aux_layer_ids[i] (ascending; `count` is the stream after the last layer) goes to columns i * D .. of
 * aux_hidden_states (R, num_aux_layers * D). */
void decoder_layers(const Layer *layers, int64_t count, const Pass *p, float *keys, int64_t key_stride, float *values,
                    int64_t value_stride, const int64_t *aux_layer_ids, int64_t num_aux_layers, float *aux_hidden_states)
{
    const int64_t R = p->B * p->N;
    int64_t next = 0;
    for (int64_t i = 0; i <= count; i++) {
        for (; next < num_aux_layers && aux_layer_ids[next] == i; next++)
            for (int64_t r = 0; r < R; r++)
                memcpy(aux_hidden_states + (r * num_aux_layers + next) * p->D, p->x + r * p->D, p->D * sizeof(float));
        if (i < count)
            decoder_layer(layers + i, p, keys + i * key_stride, values + i * value_stride);
    }
}

/* Copies one slot of a head, keys (S / BLOCK, d, BLOCK) and values (S, deep), out of the cache or into it. */
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

/* Moves slot from[b, i] of every row b to to[b, i], (B, P) each. All slots are read before any is written. keys
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
