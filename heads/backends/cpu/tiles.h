/* The innermost loop of all products: a few rows times a few vectors of a packed weight. */

#include "kernels.h"

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

/* Runs `call` for each i below `count`, divided among `threads`. One thread runs it directly, since even a team of one
 * takes time to start. */
#define SHARED(i, count, threads, call)                                                                                \
    do {                                                                                                               \
        if ((threads) > 1) {                                                                                           \
            _Pragma("omp parallel for schedule(static) num_threads(threads)") for (int i = 0; i < (count); i++) call;  \
        } else                                                                                                         \
            for (int i = 0; i < (count); i++)                                                                          \
                call;                                                                                                  \
    } while (0)
