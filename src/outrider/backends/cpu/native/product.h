/* y = x Wᵀ + b in float32, with weights in float32 or bfloat16, for any number of rows.
 *
 * Promise: an element is one chain of multiply-adds over the inputs, in their order, then the bias. Tiles of rows,
 * chunks of inputs and threads decide when a link of that chain is computed, never which; so a row's bits do not depend
 * on its neighbours. Weights are read once for up to HELD rows, from blocks of 16 outputs: a pass over few rows takes
 * the time of reading them.
 */
#ifndef OUTRIDER_PRODUCT_H
#define OUTRIDER_PRODUCT_H

#include "vectors.h"

#if defined(__AVX512F__)
#define HELD 12 /* rows whose sums are in registers: 32 of them hold 12 x 2, 16 hold 6 x 2 */
#elif defined(__AVX2__) || defined(__aarch64__)
#define HELD 6
#else
#define HELD 3
#endif

enum {
    COLUMNS = 16, /* outputs of a block */
    STRETCH = 1024, /* inputs whose weights stay in the cache while all rows read them */
    NEXT = 512, /* floats that are prefetched ahead; rows in plenty hide the memory by themselves */
    SHARE = 1 << 18, /* multiplications of one part of the work */
};

typedef struct {
    const float *x; /* [T, inputs] */
    const void *weight; /* [blocks, inputs, 16] */
    const float *bias; /* [outputs] or NULL */
    float *out; /* [T, outputs] */
    int64_t rows, outputs, inputs, bf16, threads;
} Dense;

typedef uint16_t Halves __attribute__((vector_size(2 * W)));

INLINE vf load_weights(const void *weight, int bf16, int64_t i) {
    if (!bf16) return load((const float *)weight + i);
    Halves half;
    memcpy(&half, (const uint16_t *)weight + i, sizeof half);
    return (vf)(__builtin_convertvector(half, vu) << 16);
}

/* Adds inputs 0 .. n-1 to the sums [R, 16] of R rows. */
INLINE void add_inputs(int R, const void *weight, int bf16, const float *x, int64_t stride, int64_t n, float *sums) {
    vf sum[HELD][COLUMNS / W];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < COLUMNS / W; c++) sum[r][c] = load(sums + r * COLUMNS + c * W);
    for (int64_t k = 0; k < n; k++) {
        vf w[COLUMNS / W];
#pragma GCC unroll 4
        for (int c = 0; c < COLUMNS / W; c++) {
            w[c] = load_weights(weight, bf16, k * COLUMNS + c * W);
            KEEP(w[c]);
        }
        if (R < 4) __builtin_prefetch(at(weight, bf16, k * COLUMNS + NEXT), 0, 3);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            vf one = all(x[r * stride + k]);
            KEEP(one);
#pragma GCC unroll 4
            for (int c = 0; c < COLUMNS / W; c++) sum[r][c] = fma_(one, w[c], sum[r][c]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < COLUMNS / W; c++) store(sums + r * COLUMNS + c * W, sum[r][c]);
}

INLINE void add_rows(int64_t rows, const void *weight, int bf16, const float *x, int64_t stride, int64_t n, float *sums) {
    switch (rows) { /* as a constant: sums in registers need one */
#define CASE(R) \
    case R: add_inputs(R, weight, bf16, x, stride, n, sums); break;
        CASE(1) CASE(2) CASE(3)
#if HELD >= 6
        CASE(4) CASE(5) CASE(6)
#endif
#if HELD >= 12
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
    }
}

INLINE int64_t dense_group(const Dense *a) { /* blocks of one part */
    return most(1, SHARE / most(1, COLUMNS * a->inputs * a->rows));
}

INLINE int64_t dense_blocks(const Dense *a) { return (a->outputs + COLUMNS - 1) / COLUMNS; }

static int multiply_dense(const void *job, int64_t part) {
    const Dense *a = job;
    const int64_t group = dense_group(a), last = least(dense_blocks(a), (part + 1) * group);
    float *sums = scratch(0, a->rows * COLUMNS); /* [T, 16] */
    if (!sums) return 1;
    for (int64_t block = part * group; block < last; block++) {
        const int64_t first = block * COLUMNS, width = least(COLUMNS, a->outputs - first);
        memset(sums, 0, (size_t)(a->rows * COLUMNS) * sizeof *sums);
        for (int64_t k = 0; k < a->inputs; k += STRETCH) {
            const void *weight = at(a->weight, a->bf16, (block * a->inputs + k) * COLUMNS);
            const int64_t inputs = least(STRETCH, a->inputs - k);
            for (int64_t t = 0, n; t < a->rows; t += n) {
                const int64_t left = a->rows - t, turns = (left + HELD - 1) / HELD;
                n = (left + turns - 1) / turns; /* 8 rows are 4 + 4, not 6 + 2 */
                const float *x = a->x + t * a->inputs + k;
                if (a->bf16) add_rows(n, weight, 1, x, a->inputs, inputs, sums + t * COLUMNS);
                else add_rows(n, weight, 0, x, a->inputs, inputs, sums + t * COLUMNS);
            }
        }
        for (int64_t t = 0; t < a->rows; t++) {
            float *out = a->out + t * a->outputs + first;
            for (int64_t c = 0; c < width; c++) out[c] = sums[t * COLUMNS + c] + (a->bias ? a->bias[first + c] : 0.0f);
        }
    }
    return 0;
}

INLINE int64_t dense_parts(const Dense *a) { return (dense_blocks(a) + dense_group(a) - 1) / dense_group(a); }

static int dense(const Dense *a) { return spread(multiply_dense, a, dense_parts(a), a->threads); }

#endif
