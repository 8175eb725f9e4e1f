/* Decoder layers over a few rows, and their attention. */

#include <math.h>
#include <string.h>

#include "tiles.h"

static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* e^x to about an ulp; 0 below -87. */
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

/* (R, 2 I) -> (R, I): silu of the first half times the second. */
static void gate(const float *rows, float *out, int R, int I)
{
    for (int r = 0; r < R; r++) {
        const float *g = rows + (size_t)r * 2 * I, *up = g + I;
        float *o = out + (size_t)r * I;
        for (int i = 0; i < I; i++)
            o[i] = g[i] / (1 + exponential(-g[i])) * up[i];
    }
}

/* Turn one head, first half against second. */
static void turn(float *head, const float *cosine, const float *sine, int d)
{
    const int half = d / 2;
    for (int i = 0; i < half; i++) {
        const float a = head[i], b = head[half + i];
        head[i] = a * cosine[i] + b * sine[i];
        head[half + i] = b * cosine[half + i] + a * sine[half + i];
    }
}

/* Score of a hidden slot, before or after scaling: far below all others, and finite. */
#define HIDDEN (-1e30f)

/* The slots up to the last that any of the N queries sees, in whole blocks. */
static int extent(const Pass *p, const float *mask, int b)
{
    const int N = p->N, E = p->E;
    int last = 0;
    for (int n = 0; n < N; n++) {
        int e = mask ? E : p->slots[b * N + n] + 1;
        if (mask)
            for (const float *row = mask + (size_t)(b * N + n) * E; e > last && row[e - 1] < HIDDEN;)
                e--;
        last = most(last, e);
    }
    const int used = (most(1, last) + BLOCK - 1) / BLOCK * BLOCK;
    return used < E ? used : E;
}

/* Scores of one query into weights of the first `used` slots, those it sees and 0 for all others. */
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

/* One key head of batch row b: keys (S / BLOCK, d, BLOCK), values (S, d rounded up to LANES). The G * N queries that
 * share it take part in two products; q and scores are room for them. */
static void attend(const Layer *l, const Pass *p, int b, int head, const float *qkv, const float *keys,
                   const float *values, float *q, float *scores, float *out)
{
    const int d = l->d, G = l->H / l->Hkv, N = p->N, E = p->E, rows = N * G, deep = (d + LANES - 1) / LANES * LANES;
    const float *mask = l->window ? p->near_mask : p->mask;
    const int used = extent(p, mask, b);
    for (int row = 0; row < rows; row++)
        memcpy(q + row * d, qkv + (size_t)(row / G) * l->qkv.O + (head * G + row % G) * d, d * sizeof(float));
    for (int e = 0; e < used; e += BLOCK) {
        for (int row = 0; row < rows; row++)
            memset(scores + (size_t)row * E + e, 0, BLOCK * sizeof(float));
        add_rows(q, d, keys + (size_t)e * d, BLOCK, d, scores + e, E, rows, VECTORS, 0);
    }
    for (int row = 0; row < rows; row++) {
        const int64_t at = (int64_t)b * N + row / G;
        weigh(scores + (size_t)row * E, mask ? mask + at * E : NULL, p->slots[at], l->window, l->scale, used);
    }
    float *sums = q; /* (rows, deep): the queries are done with */
    memset(sums, 0, (size_t)rows * deep * sizeof(float));
    int i = 0;
    for (; i + BLOCK <= deep; i += BLOCK)
        add_rows(scores, E, values + i, deep, used, sums + i, deep, rows, VECTORS, 0);
    for (; i < deep; i += LANES)
        add_rows(scores, E, values + i, deep, used, sums + i, deep, rows, 1, 0);
    for (int row = 0; row < rows; row++)
        memcpy(out + ((size_t)(row / G) * l->H + head * G + row % G) * d, sums + row * deep, d * sizeof(float));
}

static int64_t width_of(const Layer *l) { return most(most(l->qkv.O, 2 * l->down.K), l->qkv.K); }

static int64_t narrow_of(const Layer *l, int64_t D) { return most(most(l->H * l->d, l->down.K), D); }

static int64_t room_of(const Layer *l, int64_t N, int64_t E) /* of one key head */
{
    return N * (l->H / l->Hkv) * ((l->d + LANES - 1) / LANES * LANES + E);
}

int64_t scratch_size(const Layer *l, int64_t B, int64_t N, int64_t D, int64_t E)
{
    return B * N * (width_of(l) + narrow_of(l, D)) + B * l->Hkv * room_of(l, N, E);
}

/* keys (rows, Hkv, S / BLOCK, d, BLOCK), values (rows, Hkv, S, d rounded up to LANES), of which the pass has the B rows
 * from first_row on. */
static void decoder_layer(const Layer *l, const Pass *p, float *keys, float *values)
{
    const int B = p->B, N = p->N, R = B * N, D = p->D, d = l->d, H = l->H, Hkv = l->Hkv, I = l->down.K;
    const int deep = (d + LANES - 1) / LANES * LANES, threads = p->threads;
    float *wide = p->scratch, *narrow = wide + R * width_of(l), *rooms = narrow + R * narrow_of(l, D);
    const float *input = p->input;
    if (l->attention_norm) {
        normalise_rows(p->x, D, l->attention_norm, l->attention_eps, narrow, D, R, D);
        input = narrow;
    }
    multiply(&l->qkv, input, l->qkv.K, NULL, wide, R, threads);
    for (int r = 0; r < R; r++) {
        float *heads = wide + (size_t)r * l->qkv.O;
        const int64_t slot = p->slots[r], at = p->positions[r] * d;
        for (int h = 0; h < H + Hkv; h++) {
            if (l->head_norm)
                normalise_rows(heads + h * d, d, l->head_norm + h * d, l->head_eps, heads + h * d, d, 1, d);
            turn(heads + h * d, p->cosines + at, p->sines + at, d);
        }
        for (int h = 0; h < Hkv && slot >= 0; h++) {
            const size_t head = (size_t)(p->first_row + r / N) * Hkv + h;
            float *key = keys + (head * p->S + slot / BLOCK * BLOCK) * d + slot % BLOCK;
            for (int i = 0; i < d; i++)
                key[i * BLOCK] = heads[(H + h) * d + i];
            memcpy(values + (head * p->S + slot) * deep, heads + (H + Hkv + h) * d, d * sizeof(float));
        }
    }
    const int64_t room = room_of(l, N, p->E);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && B * Hkv > 1)
    for (int pair = 0; pair < B * Hkv; pair++) {
        const int b = pair / Hkv, h = pair % Hkv;
        const size_t head = (size_t)(p->first_row + b) * Hkv + h;
        float *q = rooms + pair * room;
        attend(l, p, b, h, wide + (size_t)b * N * l->qkv.O, keys + head * p->S * d, values + head * p->S * deep, q,
               q + (size_t)N * (H / Hkv) * deep, narrow + (size_t)b * N * H * d);
    }
    multiply(&l->out, narrow, (int64_t)H * d, p->x, p->x, R, threads);
    normalise_rows(p->x, D, l->feedforward_norm, l->feedforward_eps, narrow, D, R, D);
    multiply(&l->gate_up, narrow, D, NULL, wide, R, threads);
    gate(wide, narrow, R, I);
    multiply(&l->down, narrow, I, p->x, p->x, R, threads);
}

/* Layers one after another, whose keys and values lie key_stride and value_stride apart. The stream that enters layer
 * taps[i] (ascending; `count` is what leaves the last) goes to columns i * D .. of tapped (R, num_taps * D). */
void decoder_layers(const Layer *layers, int64_t count, const Pass *p, float *keys, int64_t key_stride, float *values,
                    int64_t value_stride, const int64_t *taps, int64_t num_taps, float *tapped)
{
    const int64_t R = p->B * p->N;
    int64_t tap = 0;
    for (int64_t i = 0; i <= count; i++) {
        for (; tap < num_taps && taps[tap] == i; tap++)
            for (int64_t r = 0; r < R; r++)
                memcpy(tapped + (r * num_taps + tap) * p->D, p->x + r * p->D, p->D * sizeof(float));
        if (i < count)
            decoder_layer(layers + i, p, keys + i * key_stride, values + i * value_stride);
    }
}
