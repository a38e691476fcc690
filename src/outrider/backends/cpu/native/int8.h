/* Products of quantised rows with quantised weights: exact integer sums, then one float epilogue in fixed order.
 *
 * A weight is w = scale[n] * (byte - 128). A row is x = scale * q, where q fits a signed byte except in a few inputs
 * (outliers, the same for every row) whose q has two bytes: q = 256 * high + low. A packed row is [highs, lows], and
 * the outliers' columns of the weights are stored again for the highs. So
 *
 *     y[n] = scale * weight_scale[n] * (256 * sum(high * w) + sum(low * w)) + bias[n]
 *
 * Integer sums do not depend on the order: every instruction set, tile and thread count gives the same bits. Weights
 * are read from memory once for all rows, in its order: [blocks of 32 outputs][inputs / 4][32][4].
 */
#ifndef OUTRIDER_INT8_H
#define OUTRIDER_INT8_H

#include "vectors.h"

enum {
    OUTPUTS = 32, /* outputs of a block */
    STEP = 4 * OUTPUTS, /* bytes that four inputs of it take */
    CHUNK = 64, /* steps whose weights all rows of a call use before the next ones: 8 KB, a part of the L1 cache */
    MANY = 48, /* rows of a call, at most */
};

INLINE int32_t four_bytes(const void *x) {
    int32_t bits;
    memcpy(&bits, x, sizeof bits);
    return bits;
}

/* dot: sum += four products in each lane. OFFSET: what it adds to every weight; OFFSET * the row's sum is subtracted
 * afterwards. ROWS x VECTORS sums fit the registers. WIDE: an input has 16 bits, so that an outlier needs no second
 * one. widened: done once for all rows of a tile. */
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define DOT_ISA "VNNI"
enum { BYTES = 64, OFFSET = 128, ROWS = 12, VECTORS = 2, WIDE = 0 };
typedef __m512i vi, Weights, Inputs;
typedef int8_t Input;
INLINE Weights widened(vi w) { return w; }
INLINE Inputs four_inputs(const Input *x) { return _mm512_set1_epi32(four_bytes(x)); }
INLINE vi dot(vi sum, Weights w, Inputs x) { return _mm512_dpbusd_epi32(sum, w, x); }
#elif defined(__AVXVNNI__)
#define DOT_ISA "AVX-VNNI"
enum { BYTES = 32, OFFSET = 128, ROWS = 6, VECTORS = 2, WIDE = 0 };
typedef __m256i vi, Weights, Inputs;
typedef int8_t Input;
INLINE Weights widened(vi w) { return w; }
INLINE Inputs four_inputs(const Input *x) { return _mm256_set1_epi32(four_bytes(x)); }
INLINE vi dot(vi sum, Weights w, Inputs x) { return _mm256_dpbusd_avx_epi32(sum, w, x); }
#elif defined(__AVX2__)
/* Two products of bytes fill 16 bits, so that bytes would have to be widened for each row. Weights of 16 bits need it
 * once: bytes 0 and 2 of a lane are masked, 1 and 3 shifted. Rows store their fours in the order 0 2 1 3. */
#define DOT_ISA "AVX2"
enum { BYTES = 32, OFFSET = 128, ROWS = 5, VECTORS = 2, WIDE = 1 };
typedef __m256i vi;
typedef struct {
    vi even, odd;
} Weights, Inputs;
typedef int16_t Input;
INLINE Weights widened(vi w) {
    return (Weights){_mm256_and_si256(w, _mm256_set1_epi16(0xff)), _mm256_srli_epi16(w, 8)};
}
INLINE Inputs four_inputs(const Input *x) {
    return (Inputs){_mm256_set1_epi32(four_bytes(x)), _mm256_set1_epi32(four_bytes(x + 2))};
}
INLINE vi dot(vi sum, Weights w, Inputs x) {
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(w.even, x.even));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(w.odd, x.odd));
}
#elif defined(__ARM_FEATURE_DOTPROD)
#if defined(__ARM_FEATURE_MATMUL_INT8)
#define DOT_ISA "i8mm"
#define PAIRED 1
enum { BYTES = 16, OFFSET = 0, ROWS = 10, VECTORS = 2, WIDE = 0 };
#else
#define DOT_ISA "dotprod"
enum { BYTES = 16, OFFSET = 0, ROWS = 5, VECTORS = 4, WIDE = 0 };
#endif
typedef int32x4_t vi;
typedef int8x16_t Weights, Inputs;
typedef int8_t Input;
INLINE Weights widened(vi w) { return veorq_s8(vreinterpretq_s8_s32(w), vdupq_n_s8((int8_t)0x80)); }
INLINE Inputs four_inputs(const Input *x) { return vreinterpretq_s8_s32(vdupq_n_s32(four_bytes(x))); }
INLINE vi dot(vi sum, Weights w, Inputs x) { return vdotq_s32(sum, w, x); }
#else
#define DOT_ISA "plain C"
enum { BYTES = 16, OFFSET = 0, ROWS = 2, VECTORS = 2, WIDE = 0 };
typedef int32_t vi __attribute__((vector_size(16)));
typedef vi Weights, Inputs;
typedef int8_t Input;
INLINE Weights widened(vi w) { return w ^ (int32_t)0x80808080u; }
INLINE Inputs four_inputs(const Input *x) { return four_bytes(x) + (vi){0}; }
INLINE vi four_products(vi w, vi x) { /* of signed bytes: two are at most 2 * 128 * 127, which fit 16 bits */
    typedef int16_t vh16 __attribute__((vector_size(16)));
    const vh16 a = (vh16)w, b = (vh16)x, even = ((a << 8) >> 8) * ((b << 8) >> 8), pairs = even + (a >> 8) * (b >> 8);
    return (((vi)pairs << 16) >> 16) + ((vi)pairs >> 16);
}
INLINE vi dot(vi sum, Weights w, Inputs x) { return sum + four_products(w, x); }
#endif

/* PAIRED: an instruction adds the products of two rows, two outputs and eight inputs. Rows are then taken in pairs and
 * steps in pairs; an odd row or step is left to `dot`. Meanwhile the sums of two rows are crossed: the first vector has
 * outputs 0 and 1 of both rows, the second outputs 2 and 3. `cross` does that and undoes it. */
#ifdef PAIRED
INLINE Inputs two_rows(const void *x, int64_t bytes) { /* eight inputs of a row and of the one `bytes` after it */
    return vcombine_s8(vld1_s8(x), vld1_s8((const int8_t *)x + bytes));
}
INLINE void dot_pair(vi *first, vi *second, Weights even, Weights odd, Inputs x) { /* of two steps' weights */
    const vi e = vreinterpretq_s32_s8(even), o = vreinterpretq_s32_s8(odd);
    *first = vmmlaq_s32(*first, x, vreinterpretq_s8_s32(vzip1q_s32(e, o)));
    *second = vmmlaq_s32(*second, x, vreinterpretq_s8_s32(vzip2q_s32(e, o)));
}
INLINE void cross(vi *first, vi *second) {
    const int64x2_t a = vreinterpretq_s64_s32(*first), b = vreinterpretq_s64_s32(*second);
    *first = vreinterpretq_s32_s64(vzip1q_s64(a, b));
    *second = vreinterpretq_s32_s64(vzip2q_s64(a, b));
}
#else
#define PAIRED 0
#endif

typedef struct {
    const uint8_t *weight, *high; /* [blocks, inputs / 4, 32, 4], and [blocks, outliers / 4, 32, 4] for high bytes */
    const float *scale, *bias; /* [blocks * 32]; bias may be NULL */
    const int64_t *outliers; /* [outlier_count] which inputs have two bytes */
    int64_t outputs, inputs, outlier_count; /* the count is a multiple of 4 */
    const struct Piece *pieces; /* [ceil(outputs / 16)] blocks of a GGUF file (blocks.h) instead of bytes; or NULL */
} Linear;

typedef struct {
    Input *inputs; /* [T, stride] the high bytes of outliers, then all inputs; WIDE: all inputs */
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

enum { ALL = STEP / BYTES, FEW_VECTORS = PAIRED ? 4 : VECTORS }; /* vectors of a block; of a tile of three or four rows */

INLINE int64_t steps_of(const Linear *a) { return (a->inputs + 3) / 4; }

INLINE int64_t blocks_of(const Linear *a) { return (a->outputs + OUTPUTS - 1) / OUTPUTS; }

/* How many of the rows that are left the next tile takes, at most `most_rows`: 13 are 7 + 6, not 12 + 1.
 * PAIRED: an even number, so that at most one row is odd. */
INLINE int64_t tile_of(int64_t left, int64_t most_rows) {
    const int64_t turns = (left + most_rows - 1) / most_rows, n = (left + turns - 1) / turns;
    return PAIRED ? least(left, n + n % 2) : n;
}

/* ---------------------------------------------------------------- a register tile */

#if PAIRED
INLINE void cross_rows(int R, int V, vi sum[ROWS][ALL]) {
#pragma GCC unroll 5
    for (int i = 0; i + 1 < R; i += 2)
#pragma GCC unroll 8
        for (int j = 0; j < V; j++) cross(&sum[i][j], &sum[i + 1][j]);
}

/* Adds the products of all pairs of steps, where there are pairs of rows. Returns how many steps these are. */
INLINE int64_t sum_pairs(int R, int V, int ask, const uint8_t *w, const Input *x, int64_t stride, int64_t steps,
                         vi sum[ROWS][ALL]) {
    const int64_t end = R > 1 ? steps / 2 * 2 : 0;
    cross_rows(R, V, sum);
    for (int64_t s = 0; s < end; s += 2) {
        Weights even[ALL], odd[ALL];
#pragma GCC unroll 8
        for (int j = 0; j < V; j++) {
            vi packed[2];
            memcpy(packed, w + s * STEP + j * BYTES, BYTES);
            memcpy(packed + 1, w + (s + 1) * STEP + j * BYTES, BYTES);
            even[j] = widened(packed[0]);
            odd[j] = widened(packed[1]);
        }
#pragma GCC unroll 4
        for (int line = 0; ask && line < 2 * STEP; line += 64)
            __builtin_prefetch(w + (s + CHUNK) * STEP + line, 0, 2);
#pragma GCC unroll 5
        for (int i = 0; i + 1 < R; i += 2) {
            const Inputs input = two_rows(x + i * stride + 4 * s, stride);
#pragma GCC unroll 8
            for (int j = 0; j < V; j++) dot_pair(&sum[i][j], &sum[i + 1][j], even[j], odd[j], input);
        }
        if (R % 2) {
            const Inputs first = four_inputs(x + (R - 1) * stride + 4 * s);
            const Inputs second = four_inputs(x + (R - 1) * stride + 4 * s + 4);
#pragma GCC unroll 8
            for (int j = 0; j < V; j++) sum[R - 1][j] = dot(dot(sum[R - 1][j], even[j], first), odd[j], second);
        }
    }
    cross_rows(R, V, sum);
    return end;
}
#endif

/* Adds the products of some steps to sums of R rows and V vectors. With `ask`, the steps after them are prefetched. */
INLINE void sum_tile(int R, int V, int ask, const uint8_t *w, const Input *x, int64_t stride, int64_t steps,
                     int32_t (*out)[OUTPUTS]) {
    vi sum[ROWS][ALL];
#pragma GCC unroll 12
    for (int i = 0; i < R; i++)
#pragma GCC unroll 8
        for (int j = 0; j < V; j++) memcpy(&sum[i][j], out[i] + j * (BYTES / 4), BYTES);
    int64_t s = 0;
#if PAIRED
    s = sum_pairs(R, V, ask, w, x, stride, steps, sum);
#endif
    for (; s < steps; s++) {
        Weights weight[ALL];
#pragma GCC unroll 8
        for (int j = 0; j < V; j++) {
            vi packed;
            memcpy(&packed, w + s * STEP + j * BYTES, BYTES);
            weight[j] = widened(packed);
        }
#pragma GCC unroll 2
        for (int line = 0; ask && line < STEP; line += 64)
            __builtin_prefetch(w + (s + CHUNK) * STEP + line, 0, 2);
#pragma GCC unroll 12
        for (int i = 0; i < R; i++) {
            const Inputs input = four_inputs(x + i * stride + 4 * s);
#pragma GCC unroll 8
            for (int j = 0; j < V; j++) sum[i][j] = dot(sum[i][j], weight[j], input);
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < R; i++)
#pragma GCC unroll 8
        for (int j = 0; j < V; j++) memcpy(out[i] + j * (BYTES / 4), &sum[i][j], BYTES);
}

/* The same for up to ROWS rows and a whole block. Few rows leave registers for all of its vectors: then memory is read
 * in one stream. */
static void sum_tiles(int64_t rows, int ask, const uint8_t *w, const Input *x, int64_t stride, int64_t steps,
                      int32_t (*sums)[OUTPUTS]) {
#define TILE_OF(R, V) \
    case R: \
        for (int j = 0; j < ALL; j += V) { \
            int32_t(*out)[OUTPUTS] = (int32_t(*)[OUTPUTS])(sums[0] + j * (BYTES / 4)); \
            if (ask && !j) sum_tile(R <= ROWS ? R : ROWS, V, 1, w, x, stride, steps, out); \
            else sum_tile(R <= ROWS ? R : ROWS, V, 0, w + j * BYTES, x, stride, steps, out); \
        } \
        break
    switch (rows) {
        TILE_OF(1, ALL);
        TILE_OF(2, ALL);
        TILE_OF(3, FEW_VECTORS);
        TILE_OF(4, FEW_VECTORS);
        TILE_OF(5, VECTORS);
        TILE_OF(6, VECTORS);
        TILE_OF(7, VECTORS);
        TILE_OF(8, VECTORS);
        TILE_OF(9, VECTORS);
        TILE_OF(10, VECTORS);
        TILE_OF(11, VECTORS);
        TILE_OF(12, VECTORS);
    }
}

/* The same for n rows. */
static void sum_chunk(const uint8_t *w, const Input *x, int64_t stride, int64_t n, int64_t steps,
                      int32_t (*sums)[OUTPUTS]) {
    for (int64_t t = 0, tile; t < n; t += tile) {
        tile = tile_of(n - t, ROWS);
        sum_tiles(tile, !t, w, x + t * stride, stride, steps, sums + t);
    }
}

typedef int32_t vl __attribute__((vector_size(4 * W)));

/* Writes the results y [32] of one row and one block to the output. */
static void emit(const Product *a, int64_t t, int64_t block, const float *y) {
    if (a->kind == SILU) {
        float *out = a->out + t * a->out_stride + block * (OUTPUTS / 2);
        for (int j = 0; j < OUTPUTS / 2; j += W) {
            const vf gate = load(y + j);
            store(out + j, gate / (1.0f + exp_(-gate)) * load(y + OUTPUTS / 2 + j));
        }
        return;
    }
    float *out = a->out + t * a->out_stride + block * OUTPUTS;
    const int64_t n = least(OUTPUTS, a->linear->outputs - block * OUTPUTS);
    if (a->kind == ADD)
        for (int64_t i = 0; i < n; i++) out[i] += y[i];
    else if (n == OUTPUTS) memcpy(out, y, OUTPUTS * sizeof *out); /* a constant number needs no call */
    else memcpy(out, y, (size_t)n * sizeof *out);
}

/* Scales the sums of one row and one block. */
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
    emit(a, t, block, y);
}

/* Sums of n rows with one block. Where outliers have a second byte, that comes first. */
static void sum_block(const Linear *linear, int64_t block, const Input *x, int64_t stride, int64_t n,
                      int32_t (*sums)[OUTPUTS]) {
    const int64_t high = WIDE ? 0 : linear->outlier_count / 4, steps = steps_of(linear);
    const uint8_t *w = linear->weight + block * steps * STEP;
    memset(sums, 0, (size_t)n * sizeof *sums);
    if (high) {
        sum_chunk(linear->high + block * high * STEP, x, stride, n, high, sums);
        for (int64_t t = 0; t < n; t++)
            for (int j = 0; j < OUTPUTS; j++) sums[t][j] *= 256;
    }
    for (int64_t s = 0; s < steps; s += CHUNK)
        sum_chunk(w + s * STEP, x + 4 * (high + s), stride, n, least(CHUNK, steps - s), sums);
}

/* One block of outputs for all rows. */
static int multiply_block(const void *job, int64_t block) {
    const Product *a = job;
    int32_t sums[MANY][OUTPUTS];
    for (int64_t t = 0; t < a->x.rows; t += MANY) {
        const int64_t n = least(MANY, a->x.rows - t);
        sum_block(a->linear, block, a->x.inputs + t * a->x.stride, a->x.stride, n, sums);
        for (int64_t i = 0; i < n; i++) finish_row(a, t + i, block, sums[i]);
    }
    return 0;
}

/* ---------------------------------------------------------------- rows to integers */

INLINE vf larger(vf a, vf b) { return either((vu)(a > b), a, b); }

INLINE vf magnitude(vf x) { return (vf)((vu)x & 0x7fffffffu); }

INLINE vl nearest(vf x) { /* to nearest, ties to even; |x| < 2^22 */
    const float shift = 12582912.0f;
    return (vl)(x + shift) - 0x4b400000;
}

INLINE int64_t place(int64_t i) { return WIDE ? i / 4 * 4 + i % 2 * 2 + i % 4 / 2 : i; } /* of an input in its row */

#define MIDDLES(i, off) ((i) / 4 * 4 + (i) % 2 * 2 + (i) % 4 / 2) /* the same for lanes */

INLINE void put(Input *out, vl q) {
    typedef Input vs __attribute__((vector_size(W * sizeof(Input))));
    const vs narrow = __builtin_convertvector(WIDE ? PICK(MIDDLES, q, q, 0) : q, vs);
    memcpy(out, &narrow, sizeof narrow);
}

/* Row t of `out` from n floats, which are overwritten and readable up to padded(n). NaN and infinity give NaN. */
static void quantise(const Linear *linear, float *x, const Packed *out, int64_t t) {
    const int64_t n = linear->inputs, count = linear->outlier_count, wide = padded(n);
    float strong[64], top = 0.0f;
    Input *high = out->inputs + t * out->stride, *low = WIDE ? high : high + count;
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
        put(low + i, q);
    }
    int32_t sum = 0;
    for (int i = 0; i < W; i++) sum += total[i];
    for (int64_t i = 0; i < count; i++) {
        const int32_t q = (int32_t)rintf(strong[i] * inverse), upper = (q + 128) >> 8;
        if (!WIDE) high[i] = (Input)upper;
        low[place(linear->outliers[i])] = (Input)(WIDE ? q : q - 256 * upper);
        sum += q;
    }
    out->scale[t] = scale + lanes_sum(odd);
    out->offset[t] = OFFSET * sum;
}

#endif
