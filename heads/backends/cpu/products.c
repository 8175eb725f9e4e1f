/* Products with packed weights, and norms, for a few rows. */

#include <math.h>

#include "tiles.h"

enum { CHUNK = 8 * TILE, PANEL = 64 }; /* two panels of weights and the sums fit the L1 cache */

int block_size(void) { return BLOCK; }
int lanes(void) { return LANES; }

/* sums (rows, BLOCK) += x W, for the block's columns. */
static inline __attribute__((always_inline)) void add_block(const Product *p, int block, const float *x,
    int64_t x_stride, float *sums, int rows, const int half)
{
    const int K = p->K;
    const void *weight = beyond(p->weight, (int64_t)block * BLOCK * K, half);
    if (rows <= TILE)
        add_rows(x, x_stride, weight, BLOCK, K, sums, BLOCK, rows, VECTORS, half);
    else
        for (int k = 0; k < K; k += PANEL)
            add_panel(x + k, x_stride, beyond(weight, (int64_t)k * BLOCK, half), K - k < PANEL ? K - k : PANEL, sums,
                      rows, half);
}

static __attribute__((noinline)) void one_block(const Product *p, int block, const float *x, int64_t x_stride,
                                                const float *residual, float *y, int R)
{
    const int from = block * BLOCK, width = p->O - from < BLOCK ? p->O - from : BLOCK;
    for (int at = 0; at < R; at += CHUNK) {
        const int rows = R - at < CHUNK ? R - at : CHUNK;
        const float *input = x + at * x_stride;
        float sums[CHUNK][BLOCK] __attribute__((aligned(64)));
        for (int r = 0; r < rows; r++)
            for (int o = 0; o < BLOCK; o++)
                sums[r][o] = p->bias && o < width ? p->bias[from + o] : 0;
        if (p->half)
            add_block(p, block, input, x_stride, sums[0], rows, 1);
        else
            add_block(p, block, input, x_stride, sums[0], rows, 0);
        for (int r = 0; r < rows; r++) {
            const size_t row = (size_t)(at + r) * p->O + from;
            for (int o = 0; o < width; o++)
                y[row + o] = residual ? residual[row + o] + sums[r][o] : sums[r][o];
        }
    }
}

/* y = x W^T + bias + residual: x (R, K) with row stride x_stride, residual (R, O) or NULL, y (R, O), which may be the
 * residual. */
void multiply(const Product *p, const float *x, int64_t x_stride, const float *residual, float *y, int64_t R,
              int64_t threads)
{
    const int blocks = (p->O + BLOCK - 1) / BLOCK;
    SHARED(b, blocks, threads, one_block(p, b, x, x_stride, residual, y, R));
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
