/* A decoder layer over few rows on a CPU, in float32.
 *
 * A step of 1 to 16 rows ought to cost the time to read the weights once. Libraries pack a weight anew at each product,
 * which for few rows costs several times the arithmetic, and twenty small operations a layer cost as much again in
 * dispatch. Here weights and keys lie packed, and a layer is one call.
 *
 * Every sum runs in an order that depends on nothing but its own row: a row's result is the same, to the bit, whatever
 * rows stand beside it.
 *
 * Letters: B batch rows, N tokens of each, R = B * N rows, K inputs, O outputs, D hidden, I intermediate width, H query
 * heads, Hkv key heads, G = H / Hkv, d head dimension, E slots shown, S slots a batch row.
 */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
enum { LANES = 16, VECTORS = 4 }; /* a tile of 6 rows: 24 sums and 4 weights in 32 registers */
#elif defined(__aarch64__)
enum { LANES = 4, VECTORS = 4 };
#else
enum { LANES = 8, VECTORS = 2 }; /* 12 sums, 2 weights and 1 input in 16 registers */
#endif
enum { BLOCK = LANES * VECTORS, TILE = 6, CHUNK = 4 * TILE, PANEL = 256, AHEAD = 64 };


typedef float Vector __attribute__((vector_size(LANES * sizeof(float)), aligned(4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * sizeof(uint16_t)), aligned(2)));
typedef uint32_t Words __attribute__((vector_size(LANES * sizeof(uint32_t))));

typedef struct {
    const void *weight; /* packed: block b holds columns b * BLOCK .. of W^T as (K, BLOCK), the last padded with 0 */
    const float *bias;  /* (O) or NULL */
    int64_t K, O, half; /* half: weights in bfloat16, which a draft may have */
} Product;

typedef struct {
    Product qkv, out, gate_up, down;
    const float *attention_norm, *feedforward_norm; /* (D); the first NULL where the input comes normed */
    const float *head_norm;                         /* (H + Hkv, d) or NULL */
    float attention_eps, feedforward_eps, head_eps, scale;
    int64_t H, Hkv, d, window; /* window: 0 for none */
} Layer;

typedef struct {
    float *x;                     /* (R, D) the residual stream, updated */
    const float *input;           /* (R, K of qkv), where the layer has no norm of its own */
    const float *cosines, *sines; /* (positions, d), the first half of the sines negative */
    const int64_t *positions;     /* (R) */
    const int64_t *slots;         /* (R), of each batch row; -1: the token is kept nowhere, and what it gives is junk */
    const float *mask, *near_mask; /* (B, N, E), to be added to scores, the second in layers with a window; */
                                   /* NULL: a token sees the slots up to its own, within the window */
    float *scratch;               /* `scratch_size` floats */
    int64_t B, first_row, N, D, E, S, threads;
} Pass;

int block_size(void) { return BLOCK; }
int lanes(void) { return LANES; }

static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* LANES weights from `at` on, of either width. */
static inline __attribute__((always_inline)) Vector read(const void *w, int64_t at, const int half)
{
    if (half)
        return (Vector)(__builtin_convertvector(*(const Halves *)((const uint16_t *)w + at), Words) << 16);
    return *(const Vector *)((const float *)w + at);
}

/* sums[r] += x[r] W over `count` inputs; `rows`, `vectors` and `half` known beforehand. */
static inline __attribute__((always_inline)) void add_tile(const float *x, int64_t x_stride, const void *w,
    int64_t w_stride, int count, float *sums, int64_t sums_stride, const int rows, const int vectors, const int half)
{
    Vector sum[TILE][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            sum[r][v] = *(const Vector *)(sums + r * sums_stride + v * LANES);
    for (int k = 0; k < count; k++) {
        Vector weight[VECTORS];
        for (int v = 0; v < vectors; v++) { /* the more rows, the less of what is to come fits the processor's view */
            const int64_t ahead = (k + AHEAD) * w_stride + v * LANES;
            __builtin_prefetch(half ? (const void *)((const uint16_t *)w + ahead) : (const float *)w + ahead);
        }
        for (int v = 0; v < vectors; v++)
            weight[v] = read(w, k * w_stride + v * LANES, half);
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++)
                sum[r][v] += x[r * x_stride + k] * weight[v];
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            *(Vector *)(sums + r * sums_stride + v * LANES) = sum[r][v];
}

/* The same for any number of rows, tile by tile. */
static inline __attribute__((always_inline)) void add_rows(const float *x, int64_t x_stride, const void *w,
    int64_t w_stride, int count, float *sums, int64_t sums_stride, int rows, const int vectors, const int half)
{
    while (rows > 0) {
        int done;
        switch (rows) {
#define OF(n) add_tile(x, x_stride, w, w_stride, count, sums, sums_stride, done = n, vectors, half); break
        case 1: OF(1);
        case 2: OF(2);
        case 3: OF(3);
        case 4: case 7: case 8: OF(4);
        case 5: case 9: case 10: OF(5);
        default: OF(6);
#undef OF
        }
        x += done * x_stride, sums += done * sums_stride, rows -= done;
    }
}

static void one_block(const Product *p, int block, const float *x, int64_t x_stride, const float *residual, float *y,
                      int R)
{
    const int from = block * BLOCK, width = p->O - from < BLOCK ? p->O - from : BLOCK, K = p->K;
    for (int at = 0; at < R; at += CHUNK) {
        const int rows = R - at < CHUNK ? R - at : CHUNK;
        float sums[CHUNK][BLOCK] __attribute__((aligned(64)));
        for (int r = 0; r < rows; r++)
            for (int o = 0; o < BLOCK; o++)
                sums[r][o] = p->bias && o < width ? p->bias[from + o] : 0;
        for (int k = 0; k < K; k += PANEL) { /* a panel stays in the nearest cache while all rows use it */
            const int panel = K - k < PANEL ? K - k : PANEL;
            const float *input = x + at * x_stride + k;
            const int64_t place = (int64_t)from * K + (int64_t)k * BLOCK;
            if (p->half)
                add_rows(input, x_stride, (const uint16_t *)p->weight + place, BLOCK, panel, sums[0], BLOCK, rows,
                         VECTORS, 1);
            else
                add_rows(input, x_stride, (const float *)p->weight + place, BLOCK, panel, sums[0], BLOCK, rows,
                         VECTORS, 0);
        }
        for (int r = 0; r < rows; r++) {
            const size_t row = (size_t)(at + r) * p->O + from;
            for (int o = 0; o < width; o++)
                y[row + o] = residual ? residual[row + o] + sums[r][o] : sums[r][o];
        }
    }
}

/* y = x W^T + bias + residual: x (R, K) with rows x_stride apart, residual (R, O) or NULL, y (R, O), which may be the
 * residual. */
void multiply(const Product *p, const float *x, int64_t x_stride, const float *residual, float *y, int64_t R,
              int64_t threads)
{
    const int blocks = (p->O + BLOCK - 1) / BLOCK;
    (void)threads;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int b = 0; b < blocks; b++)
        one_block(p, b, x, x_stride, residual, y, R);
}

/* y = x / rms(x) * weight, over n values. */
static void normalise(const float *x, const float *weight, float eps, float *y, int n)
{
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int i = 0; i < n; i++)
        squares += x[i] * x[i];
    const float scale = 1 / sqrtf(squares / n + eps);
    for (int i = 0; i < n; i++)
        y[i] = x[i] * scale * weight[i];
}

void normalise_rows(const float *x, int64_t x_stride, const float *weight, float eps, float *y, int64_t y_stride,
                    int64_t R, int64_t n)
{
    for (int64_t r = 0; r < R; r++)
        normalise(x + r * x_stride, weight, eps, y + r * y_stride, n);
}

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
                normalise(heads + h * d, l->head_norm + h * d, l->head_eps, heads + h * d, d);
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

/* A module of a head that recycles its state: what is made of a token and a state, and what is read of that. */
typedef struct {
    Layer layer;
    Product project, output; /* project: K = 0 where the layer reads the two halves themselves beside the state */
    const float *token_norm, *state_norm;         /* (D) */
    const float *leave_norm, *read_norm;          /* (D) or NULL: of the state to recycle, and of what is read of it */
    float token_eps, state_eps, leave_eps, read_eps;
    int64_t state_first;                          /* which half comes first */
} Module;

int64_t module_room(const Module *m, int64_t B, int64_t N, int64_t D, int64_t E)
{
    return scratch_size(&m->layer, B, N, D, E) + B * N * 2 * D;
}

/* made (R, D) of the embeddings table[tokens], or of the rows of `table` without tokens, and of states (R, D). */
void recycle(const Module *m, const Pass *given, const int64_t *tokens, const float *table, const float *states,
             float *made, float *keys, float *values)
{
    Pass p = *given;
    const int64_t R = p.B * p.N, D = p.D;
    float *halves = p.scratch;
    for (int64_t r = 0; r < R; r++) {
        float *half = halves + r * 2 * D;
        normalise(table + (tokens ? tokens[r] : r) * D, m->token_norm, m->token_eps, half + (m->state_first ? D : 0), D);
        normalise(states + r * D, m->state_norm, m->state_eps, half + (m->state_first ? 0 : D), D);
    }
    if (m->project.K)
        multiply(&m->project, halves, 2 * D, NULL, made, R, p.threads);
    else
        memcpy(made, states, R * D * sizeof(float));
    p.x = made, p.input = halves, p.scratch = halves + R * 2 * D;
    decoder_layer(&m->layer, &p, keys, values);
    if (m->leave_norm)
        normalise_rows(made, D, m->leave_norm, m->leave_eps, made, D, R, D);
}

/* logits (R, O) of states (R, D); scratch of as many floats. */
void read_out(const Module *m, const float *states, float *scratch, float *logits, int64_t R, int64_t D,
              int64_t threads)
{
    if (m->read_norm) {
        normalise_rows(states, D, m->read_norm, m->read_eps, scratch, D, R, D);
        states = scratch;
    }
    multiply(&m->output, states, D, NULL, logits, R, threads);
}

/* `heads.tree.CompiledPick`. */
typedef void Pick(const void *context, const float *logits, const int64_t *positions, const int64_t *ids,
                  int64_t *picked, float *logp, int64_t B, int64_t W, int64_t V, int64_t count);

/* A chain behind each root (B), which stands at `length` (B), from the states (B, D) that the first step recycles:
 * tokens and scores (B, depth + 1), the root first. The target's ids `kept` are the draft's; the pass is of one token;
 * rooms of B * (3 D + V + 1) floats and 3 B ids. */
void draft_chain(const Module *m, const Pass *given, Pick *pick, const void *context, const int64_t *kept,
                 const float *table, const float *recycled, const int64_t *root, const int64_t *length, int64_t depth,
                 float *keys, float *values, float *room, int64_t *ids, int64_t *tokens, float *scores)
{
    Pass p = *given;
    const int64_t B = p.B, D = p.D, V = m->output.O;
    float *made = room, *next = made + B * D, *normed = next + B * D, *logits = normed + B * D, *logp = logits + B * V;
    int64_t *own = ids + B, *child = own + B;
    p.positions = p.slots = own; /* a chain's tokens stand in the slots that they keep if they are accepted */
    for (int64_t b = 0; b < B; b++)
        tokens[b * (depth + 1)] = root[b], scores[b * (depth + 1)] = 0;
    for (int64_t level = 1; level <= depth; level++) {
        for (int64_t b = 0; b < B; b++)
            child[b] = length[b] + level, own[b] = child[b] - 1;
        read_out(m, level > 1 ? made : recycled, normed, logits, B, D, p.threads);
        pick(context, logits, child, kept, ids, logp, B, 1, V, 1);
        for (int64_t b = 0; b < B; b++) {
            const int64_t at = b * (depth + 1) + level;
            tokens[at] = ids[b], scores[at] = scores[at - 1] + logp[b];
        }
        if (level < depth) {
            recycle(m, &p, ids, table, level > 1 ? made : recycled, next, keys, values);
            float *swap = made;
            made = next, next = swap;
        }
    }
}

/* Take in the true states (B, N, D) of tokens (B, N + 1) from start[b] on, of which count[b] are true, and renew what is
 * drafted from: recycled (B, D), root (B), length (B). Rooms of B * N * D floats and 3 B N ids. */
void observe(const Module *m, const Pass *given, const int64_t *tokens, const int64_t *start, const int64_t *count,
             const float *table, const float *states, float *made, int64_t *room, float *keys, float *values,
             float *recycled, int64_t *root, int64_t *length)
{
    Pass p = *given;
    const int64_t B = p.B, N = p.N, D = p.D;
    int64_t *ids = room, *places = ids + B * N, *slots = places + B * N;
    for (int64_t r = 0; r < B * N; r++) {
        const int64_t b = r / N, n = r % N, place = start[b] + n;
        ids[r] = tokens[b * (N + 1) + n + 1];
        places[r] = place < p.S ? place : p.S - 1;
        slots[r] = n < count[b] ? places[r] : -1;
    }
    p.positions = places, p.slots = slots;
    recycle(m, &p, ids, table, states, made, keys, values);
    for (int64_t b = 0; b < B; b++)
        if (count[b] > 0) {
            memcpy(recycled + b * D, made + (b * N + count[b] - 1) * D, D * sizeof(float));
            root[b] = tokens[b * (N + 1) + count[b]];
            length[b] = start[b] + count[b];
        }
}
