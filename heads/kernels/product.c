/* Products of a few rows, normed before if wanted, with packed weights on a CPU.
 *
 * A step of 1 to 16 rows should cost the time to read the weights once. Libraries pack a weight again for each product,
 * which for few rows costs several times the arithmetic. Here weights are stored packed, in float32 or bfloat16, and
 * multiplied in float32.
 *
 * Every sum runs in an order that depends only on its own row. So a row's result is the same, to the bit, whatever the
 * other rows are.
 *
 * Letters: R rows, K inputs, O outputs.
 */

#include <math.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__AVX512F__)
enum { LANES = 16, VECTORS = 4 }; /* a tile of 6 rows: 24 sums and 4 weights in 32 registers */
#elif defined(__aarch64__)
enum { LANES = 4, VECTORS = 4 };
#else
enum { LANES = 8, VECTORS = 2 }; /* 12 sums, 2 weights and 1 input in 16 registers */
#endif
enum { BLOCK = LANES * VECTORS, TILE = 6, AHEAD = 4096 / BLOCK }; /* prefetch AHEAD inputs: 16 KB of float32 weights */

typedef float Vector __attribute__((vector_size(LANES * sizeof(float)), aligned(4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * sizeof(uint16_t)), aligned(2)));
typedef uint32_t Words __attribute__((vector_size(LANES * sizeof(uint32_t))));

/* Pointer to weight number `at`, for either width. */
static inline __attribute__((always_inline)) const void *beyond(const void *w, int64_t at, const int half)
{
    return half ? (const void *)((const uint16_t *)w + at) : (const float *)w + at;
}

/* LANES weights from number `at`. */
static inline __attribute__((always_inline)) Vector read(const void *w, int64_t at, const int half)
{
    if (half)
        return (Vector)(__builtin_convertvector(*(const Halves *)beyond(w, at, 1), Words) << 16);
    return *(const Vector *)beyond(w, at, 0);
}

/* sums[r] += x[r] W over `count` inputs. `rows`, `vectors`, `half` and `lines` are compile-time constants. Also
 * prefetches `lines` vectors per input from `soon`: from the inputs ahead, or from the next panel. */
static inline __attribute__((always_inline)) void add_tile(const float *x, int64_t x_stride, const void *w,
    int64_t w_stride, int count, float *sums, int64_t sums_stride, const int rows, const int vectors, const int half,
    const void *soon, int64_t soon_stride, const int lines)
{
    Vector sum[TILE][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            sum[r][v] = *(const Vector *)(sums + r * sums_stride + v * LANES);
    for (int k = 0; k < count; k++) {
        Vector weight[VECTORS];
        for (int v = 0; v < lines; v++) /* the more rows, the less far ahead the processor loads by itself */
            __builtin_prefetch(beyond(soon, k * soon_stride + v * LANES, half));
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

/* Number of rows in the next tile, given the number of rows left. */
static inline int tile_of(int rows)
{
    return rows <= TILE ? rows : rows <= 8 ? 4 : rows <= 10 ? 5 : TILE;
}

/* `add_tile` for any number of rows, tile by tile. */
static inline __attribute__((always_inline)) void add_rows(const float *x, int64_t x_stride, const void *w,
    int64_t w_stride, int count, float *sums, int64_t sums_stride, int rows, const int vectors, const int half)
{
    const void *soon = beyond(w, AHEAD * w_stride, half);
    for (int done; rows > 0; x += done * x_stride, sums += done * sums_stride, rows -= done)
        switch (done = tile_of(rows)) {
#define OF(n)                                                                                                          \
    case n:                                                                                                            \
        add_tile(x, x_stride, w, w_stride, count, sums, sums_stride, n, vectors, half, soon, w_stride, vectors);       \
        break
            OF(1); OF(2); OF(3); OF(4); OF(5); OF(6);
#undef OF
        }
}

/* `add_rows` for more rows than a tile, over a panel (count, BLOCK) that the next panel follows in memory. Without
 * prefetching, the first tile would wait for memory and the other tiles would leave it idle. So each tile prefetches a
 * part of the next panel. */
static inline __attribute__((always_inline)) void add_panel(const float *x, int64_t x_stride, const void *w, int count,
    float *sums, int rows, const int half)
{
    const int tiles = (rows + TILE - 1) / TILE, share = tiles < 4 ? VECTORS / 2 : 1;
    const void *soon = beyond(w, (int64_t)count * BLOCK, half);
    int fetched = 0;
    for (int done; rows > 0; x += done * x_stride, sums += done * BLOCK, rows -= done) {
        const int lines = fetched < VECTORS ? share : 0;
        done = tile_of(rows);
#define TILE_OF(n, m)                                                                                                  \
    add_tile(x, x_stride, w, BLOCK, count, sums, BLOCK, n, VECTORS, half, soon, (m) * LANES, m)
#define OF(n)                                                                                                          \
    case n:                                                                                                            \
        if (lines == 0)                                                                                                \
            TILE_OF(n, 0);                                                                                             \
        else if (lines == 1)                                                                                           \
            TILE_OF(n, 1);                                                                                             \
        else                                                                                                           \
            TILE_OF(n, VECTORS / 2);                                                                                   \
        break
        switch (done) { OF(1); OF(2); OF(3); OF(4); OF(5); OF(6); }
#undef OF
#undef TILE_OF
        soon = beyond(soon, (int64_t)lines * count * LANES, half), fetched += lines;
    }
}

enum { CHUNK = 8 * TILE, PANEL = 64 }; /* two panels of weights and the sums fit the L1 cache */

typedef struct {
    const void *weight; /* packed: block b holds columns b * BLOCK .. of W^T as (K, BLOCK), the last padded with 0 */
    const float *bias, *x, *residual;
    float *y;
    int64_t K, O, R, half;
} Product;

int block_size(void) { return BLOCK; }

/* sums (rows, BLOCK) += x W, for the block's columns. */
static inline __attribute__((always_inline)) void add_block(const Product *p, int block, const float *x, float *sums,
    int rows, const int half)
{
    const int K = p->K;
    const void *weight = beyond(p->weight, (int64_t)block * BLOCK * K, half);
    if (rows <= TILE)
        add_rows(x, K, weight, BLOCK, K, sums, BLOCK, rows, VECTORS, half);
    else
        for (int k = 0; k < K; k += PANEL)
            add_panel(x + k, K, beyond(weight, (int64_t)k * BLOCK, half), K - k < PANEL ? K - k : PANEL, sums,
                      rows, half);
}

static __attribute__((noinline)) void one_block(const Product *p, int block)
{
    const int from = block * BLOCK, width = p->O - from < BLOCK ? p->O - from : BLOCK, R = p->R;
    for (int at = 0; at < R; at += CHUNK) {
        const int rows = R - at < CHUNK ? R - at : CHUNK;
        const float *input = p->x + at * p->K;
        float sums[CHUNK][BLOCK] __attribute__((aligned(64)));
        for (int r = 0; r < rows; r++)
            for (int o = 0; o < BLOCK; o++)
                sums[r][o] = p->bias && o < width ? p->bias[from + o] : 0;
        if (p->half)
            add_block(p, block, input, sums[0], rows, 1);
        else
            add_block(p, block, input, sums[0], rows, 0);
        for (int r = 0; r < rows; r++) {
            const size_t row = (size_t)(at + r) * p->O + from;
            for (int o = 0; o < width; o++)
                p->y[row + o] = p->residual ? p->residual[row + o] + sums[r][o] : sums[r][o];
        }
    }
}

/* out = x / rms(x) * norm, for one row. */
static void normalise(const float *x, const float *norm, float eps, float *out, int64_t K)
{
    Vector squares = {0};
    float sum = 0;
    int64_t k = 0;
    for (; k + LANES <= K; k += LANES)
        squares += *(const Vector *)(x + k) * *(const Vector *)(x + k);
    for (; k < K; k++)
        sum += x[k] * x[k];
    for (int lane = 0; lane < LANES; lane++)
        sum += squares[lane];
    const float scale = 1 / sqrtf(sum / K + eps);
    for (k = 0; k < K; k++)
        out[k] = x[k] * scale * norm[k];
}

/* y = x W^T + bias + residual: weight packed in float32 or, if `half`, in bfloat16; bias (O) or NULL; x (R, K);
 * residual (R, O) or NULL; y (R, O), which may be the residual. With norm (K), not NULL, x / rms(x) * norm is
 * multiplied in the place of x: normed (R, K) is room for it. */
void multiply(const void *weight, const float *bias, const float *x, const float *residual, float *y,
              const float *norm, float *normed, int64_t K, int64_t O, int64_t R, int64_t half, int64_t threads,
              float eps)
{
    for (int64_t r = 0; norm && r < R; r++)
        normalise(x + r * K, norm, eps, normed + r * K, K);
    const Product p = {weight, bias, norm ? normed : x, residual, y, K, O, R, half};
    const int blocks = (O + BLOCK - 1) / BLOCK;
    if (threads > 1) {
#pragma omp parallel for schedule(static) num_threads(threads)
        for (int b = 0; b < blocks; b++)
            one_block(&p, b);
    } else /* directly, since even a team of one takes time to start */
        for (int b = 0; b < blocks; b++)
            one_block(&p, b);
}
