/* Products of quantised rows with quantised weights: exact integer sums, then one float epilogue in fixed order.
 *
 * A weight is w = scale[n] * (byte - 128). A row is x = scale * q, where q fits a signed byte except in a few inputs
 * (outliers, the same for every row) whose q has two bytes: q = 256 * high + low. A packed row is [highs, lows]; the
 * weights' columns of the outliers stand twice accordingly. So
 *
 *     y[n] = scale * weight_scale[n] * (256 * sum(high * w) + sum(low * w)) + bias[n]
 *
 * Integer sums do not depend on the order: every instruction set, tile and thread count gives the same bits. Weights
 * are read once for all rows of a tile, in memory order: [blocks of 32 outputs][inputs / 4][32][4].
 */
#ifndef OUTRIDER_INT8_H
#define OUTRIDER_INT8_H

#include "vectors.h"

enum {
    OUTPUTS = 32, /* outputs of a block */
    STEP = 4 * OUTPUTS, /* bytes that four inputs of it take */
    FEW = 4, /* up to this many rows, hardware prefetching alone is faster */
};

/* dot: sum += four products in each lane. OFFSET: what it adds to every weight; OFFSET * the row's sum is subtracted
 * afterwards. ROWS x (STEP / BYTES) sums fit the registers. */
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define DOT_ISA "VNNI"
enum { BYTES = 64, OFFSET = 128, ROWS = 12 };
typedef __m512i vi;
INLINE vi dot(vi sum, vi w, vi x) { return _mm512_dpbusd_epi32(sum, w, x); }
INLINE vi four_bytes(const int8_t *x) {
    int32_t bits;
    memcpy(&bits, x, sizeof bits);
    return _mm512_set1_epi32(bits);
}
INLINE vi times256(vi sum) { return _mm512_slli_epi32(sum, 8); }
#elif defined(__AVXVNNI__)
#define DOT_ISA "AVX-VNNI"
enum { BYTES = 32, OFFSET = 128, ROWS = 2 };
typedef __m256i vi;
INLINE vi dot(vi sum, vi w, vi x) { return _mm256_dpbusd_avx_epi32(sum, w, x); }
INLINE vi times256(vi sum) { return _mm256_slli_epi32(sum, 8); }
#elif defined(__AVX2__)
#define DOT_ISA "AVX2"
enum { BYTES = 32, OFFSET = 0, ROWS = 2 };
typedef __m256i vi;
INLINE vi dot(vi sum, vi w, vi x) { /* |x| * (w with x's sign): pairs are at most 2 * 128 * 127, which fits 16 bits */
    const vi signed_w = _mm256_sign_epi8(_mm256_xor_si256(w, _mm256_set1_epi8((char)0x80)), x);
    const vi pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(x), signed_w);
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
INLINE vi times256(vi sum) { return _mm256_slli_epi32(sum, 8); }
#elif defined(__ARM_FEATURE_DOTPROD)
#define DOT_ISA "dotprod"
enum { BYTES = 16, OFFSET = 0, ROWS = 2 };
typedef int32x4_t vi;
INLINE vi dot(vi sum, vi w, vi x) {
    const int8x16_t signed_w = veorq_s8(vreinterpretq_s8_s32(w), vdupq_n_s8((int8_t)0x80));
    return vdotq_s32(sum, signed_w, vreinterpretq_s8_s32(x));
}
INLINE vi times256(vi sum) { return vshlq_n_s32(sum, 8); }
#else
#define DOT_ISA "plain C"
enum { BYTES = 16, OFFSET = 0, ROWS = 1 };
typedef int32_t vi __attribute__((vector_size(16)));
INLINE vi dot(vi sum, vi w, vi x) {
    uint8_t weights[16];
    int8_t inputs[16];
    memcpy(weights, &w, sizeof w);
    memcpy(inputs, &x, sizeof x);
    for (int i = 0; i < 16; i++) sum[i / 4] += ((int32_t)weights[i] - 128) * inputs[i];
    return sum;
}
INLINE vi times256(vi sum) { return sum * 256; }
#endif
#if !(defined(__AVX512VNNI__) && defined(__AVX512BW__))
INLINE vi four_bytes(const int8_t *x) {
    int32_t bits, lanes[BYTES / 4];
    vi v;
    memcpy(&bits, x, sizeof bits);
    for (int i = 0; i < BYTES / 4; i++) lanes[i] = bits;
    memcpy(&v, lanes, sizeof v);
    return v;
}
#endif
enum { VECTORS = STEP / BYTES };

typedef struct {
    const uint8_t *weight; /* [blocks, (outliers + inputs) / 4, 32, 4] */
    const float *scale, *bias; /* [blocks * 32]; bias may be NULL */
    const int64_t *outliers; /* [outlier_count] which inputs have two bytes */
    int64_t outputs, inputs, outlier_count; /* the count is a multiple of 4 */
} Linear;

typedef struct {
    int8_t *bytes; /* [T, stride] */
    float *scale; /* [T] */
    int32_t *offset; /* [T] OFFSET * the row's sum */
    int64_t stride, rows;
} Packed; /* quantised rows */

enum Kind { STORE, ADD, SILU };

typedef struct {
    const Linear *linear;
    Packed x;
    float *out; /* [T, out_stride] */
    int64_t out_stride;
    enum Kind kind; /* SILU: a block is 16 gates, then 16 ups */
} Product;

INLINE int64_t steps_of(const Linear *a) { return a->outlier_count / 4 + (a->inputs + 3) / 4; }

INLINE int64_t blocks_of(const Linear *a) { return (a->outputs + OUTPUTS - 1) / OUTPUTS; }

/* ---------------------------------------------------------------- a register tile */

/* Sums of R rows and one block. With `ask`, the next block is prefetched meanwhile. */
INLINE void sum_rows(int R, int ask, const uint8_t *w, const int8_t *x, int64_t stride, int64_t high, int64_t steps,
                     int32_t out[][OUTPUTS]) {
    vi sum[ROWS][VECTORS];
    memset(sum, 0, sizeof sum);
    for (int64_t from = 0, to = high;; from = to, to = steps) {
        for (int64_t s = from; s < to; s++) {
            vi weight[VECTORS];
#pragma GCC unroll 8
            for (int j = 0; j < VECTORS; j++) memcpy(&weight[j], w + s * STEP + j * BYTES, BYTES);
#pragma GCC unroll 2
            for (int line = 0; ask && line < STEP; line += 64)
                __builtin_prefetch(w + (steps + s) * STEP + line, 0, 2);
#pragma GCC unroll 12
            for (int i = 0; i < R; i++) {
                const vi input = four_bytes(x + i * stride + 4 * s);
#pragma GCC unroll 8
                for (int j = 0; j < VECTORS; j++) sum[i][j] = dot(sum[i][j], weight[j], input);
            }
        }
        if (to == steps) break;
#pragma GCC unroll 12
        for (int i = 0; i < R; i++)
#pragma GCC unroll 8
            for (int j = 0; j < VECTORS; j++) sum[i][j] = times256(sum[i][j]);
    }
#pragma GCC unroll 12
    for (int i = 0; i < R; i++) memcpy(out[i], sum[i], sizeof sum[i]);
}

typedef int32_t vl __attribute__((vector_size(4 * W)));

/* Scales the sums of one row and one block, and writes them to the output. */
static void finish_row(const Product *a, int64_t t, int64_t block, const int32_t *sums) {
    const Linear *linear = a->linear;
    const int64_t first = block * OUTPUTS;
    float y[OUTPUTS];
    for (int j = 0; j < OUTPUTS; j += W) {
        vl whole;
        memcpy(&whole, sums + j, sizeof whole);
        const vf number = __builtin_convertvector(whole - a->x.offset[t], vf) * a->x.scale[t];
        const vf bias = linear->bias ? load(linear->bias + first + j) : (vf){0};
        store(y + j, fma_(number, load(linear->scale + first + j), bias));
    }
    if (a->kind == SILU) {
        float *out = a->out + t * a->out_stride + block * (OUTPUTS / 2);
        for (int j = 0; j < OUTPUTS / 2; j += W) {
            const vf gate = load(y + j);
            store(out + j, gate / (1.0f + exp_(-gate)) * load(y + OUTPUTS / 2 + j));
        }
        return;
    }
    float *out = a->out + t * a->out_stride + first;
    const int64_t n = least(OUTPUTS, linear->outputs - first);
    if (a->kind == ADD)
        for (int64_t i = 0; i < n; i++) out[i] += y[i];
    else memcpy(out, y, (size_t)n * sizeof *out);
}

/* One block of outputs for all rows: its weights stay in the L1 cache. */
static int multiply_block(const void *job, int64_t block) {
    const Product *a = job;
    const Linear *linear = a->linear;
    const int64_t steps = steps_of(linear), high = linear->outlier_count / 4;
    const uint8_t *w = linear->weight + block * steps * STEP;
    int32_t sums[ROWS][OUTPUTS];
    for (int64_t t = 0, n; t < a->x.rows; t += n) {
        const int64_t left = a->x.rows - t, turns = (left + ROWS - 1) / ROWS;
        n = (left + turns - 1) / turns; /* 13 rows are 7 + 6, not 12 + 1 */
        const int8_t *x = a->x.bytes + t * a->x.stride;
        const int ask = a->x.rows > FEW && left == n; /* only in the last tile: the others still read this block */
        switch (n) {
#define SUM(R, ask) sum_rows(R <= ROWS ? R : ROWS, ask, w, x, a->x.stride, high, steps, sums)
#define TILE_OF(R) \
    case R: \
        if (ask) SUM(R, 1); \
        else SUM(R, 0); \
        break
            TILE_OF(1);
            TILE_OF(2);
            TILE_OF(3);
            TILE_OF(4);
            TILE_OF(5);
            TILE_OF(6);
            TILE_OF(7);
            TILE_OF(8);
            TILE_OF(9);
            TILE_OF(10);
            TILE_OF(11);
            TILE_OF(12);
        }
        for (int64_t i = 0; i < n; i++) finish_row(a, t + i, block, sums[i]);
    }
    return 0;
}

/* ---------------------------------------------------------------- rows to bytes */

INLINE vf larger(vf a, vf b) { return either((vu)(a > b), a, b); }

INLINE vf magnitude(vf x) { return (vf)((vu)x & 0x7fffffffu); }

INLINE vl nearest(vf x) { /* to nearest, ties to even; |x| < 2^22 */
    const float shift = 12582912.0f;
    return (vl)(x + shift) - 0x4b400000;
}

/* Row t of `out` from n floats, which are overwritten and readable up to padded(n). NaN and infinity give NaN. */
static void quantise(const Linear *linear, float *x, const Packed *out, int64_t t) {
    const int64_t n = linear->inputs, count = linear->outlier_count, wide = padded(n);
    float strong[64], top = 0.0f;
    int8_t *high = out->bytes + t * out->stride, *low = high + count;
    for (int64_t i = n; i < wide; i++) x[i] = 0.0f;
    for (int64_t i = 0; i < count; i++) {
        strong[i] = x[linear->outliers[i]];
        x[linear->outliers[i]] = 0.0f;
    }
    vf best = {0}, odd = {0};
    for (int64_t i = 0; i < wide; i += W) {
        best = larger(magnitude(load(x + i)), best);
        odd += load(x + i) * 0.0f;
    }
    for (int64_t i = 0; i < count; i++) {
        top = fabsf(strong[i]) > top ? fabsf(strong[i]) : top;
        odd[0] += strong[i] * 0.0f;
    }
    const float few = top / 32639.0f, many = lanes_top(best) / 127.0f;
    const float scale = few > many ? few : many, inverse = scale > 1e-30f ? 1.0f / scale : 0.0f;
    vl total = {0};
    for (int64_t i = 0; i < wide; i += W) {
        const vl q = nearest(load(x + i) * inverse);
        total += q;
        typedef int8_t vb __attribute__((vector_size(W)));
        const vb bytes = __builtin_convertvector(q, vb);
        memcpy(low + i, &bytes, sizeof bytes);
    }
    int32_t sum = 0;
    for (int i = 0; i < W; i++) sum += total[i];
    for (int64_t i = 0; i < count; i++) {
        const int32_t q = (int32_t)rintf(strong[i] * inverse), upper = (q + 128) >> 8;
        high[i] = (int8_t)upper;
        low[linear->outliers[i]] = (int8_t)(q - 256 * upper);
        sum += q;
    }
    out->scale[t] = scale + lanes_sum(odd);
    out->offset[t] = OFFSET * sum;
}

#endif
