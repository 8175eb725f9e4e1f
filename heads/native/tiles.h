/* The innermost loop of all products here: a few rows times a few vectors of a packed weight. */

#include "kernels.h"

#if defined(__AVX512F__)
enum { LANES = 16, VECTORS = 4 }; /* a tile of 6 rows: 24 sums and 4 weights in 32 registers */
#elif defined(__aarch64__)
enum { LANES = 4, VECTORS = 4 };
#else
enum { LANES = 8, VECTORS = 2 }; /* 12 sums, 2 weights and 1 input in 16 registers */
#endif
enum { BLOCK = LANES * VECTORS, TILE = 6, AHEAD = 64 };

typedef float Vector __attribute__((vector_size(LANES * sizeof(float)), aligned(4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * sizeof(uint16_t)), aligned(2)));
typedef uint32_t Words __attribute__((vector_size(LANES * sizeof(uint32_t))));

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
