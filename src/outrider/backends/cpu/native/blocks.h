/* Products of rows with the blocks of a GGUF file: its own four to eight bits, never rounded again.
 *
 * Weights are repacked (blocks.py), not converted: a piece is 16 outputs, [units of inputs][header, bits], so that one
 * vector lane is one output. A unit has 256 inputs (Q4_K, Q5_K, Q6_K) or 32 (Q4_0, Q4_1, Q8_0). Rows are rounded to
 * signed bytes with one scale per unit, as in llama.cpp.
 *
 * Promise: the same bits for every number of rows and threads and for every instruction set. Within a unit all sums are
 * integers, scales of sub-blocks included (at most 256 * 63 * 127 * 128 < 2^31). Between units each lane adds in
 * ascending order with one rounding per addition (`fused`). Four and eight bits are unpacked in registers for a tile of
 * rows, five and six in the L1 cache for all rows of a call.
 */
#ifndef OUTRIDER_BLOCKS_H
#define OUTRIDER_BLOCKS_H

#include "int8.h"

enum Bits { Q4_0, Q4_1, Q8_0, Q4_K, Q5_K, Q6_K }; /* in the order of blocks.py */

enum {
    LANES = 16, /* outputs of a piece */
    LINE = 4 * LANES, /* bytes of four inputs, unpacked: a cache line */
    SPAN = 256, /* inputs that are unpacked at once */
    STEPS = SPAN / 4,
    PARTS16 = LINE / BYTES, /* vectors of a line */
    FURTHER = 8192, /* bytes: how far ahead packed weights are prefetched */
};

struct Piece {
    const uint8_t *data;
    int64_t bits; /* enum Bits */
};

typedef struct { /* 256 inputs of a row */
    int8_t q[SPAN];
    int16_t sums16[16], sums32[8]; /* of q */
    float scale, unused[3];
} Super;

typedef struct { /* 32 inputs of a row */
    int8_t q[32];
    float scale, sum; /* sum of q */
    int32_t whole, unused; /* the same */
} Small;

typedef struct {
    _Alignas(64) uint8_t bytes[STEPS][LINE]; /* Q5_K, Q6_K: [step][16 outputs][4] */
    int32_t scale[16 * LANES]; /* [sub-block][lane]; WIDE: twice 16 bits */
    int16_t pairs[8 * LANES * 2]; /* [8][lane][2] minima (Q4_K, Q5_K) or scales (Q6_K) of two sub-blocks */
    float d[8][LANES], m[8][LANES]; /* one per unit */
} Unpacked;

INLINE int is_super(int64_t bits) { return bits >= Q4_K; }

INLINE int64_t unit_bytes(int64_t bits) {
    static const int64_t sizes[] = {288, 320, 544, 2368, 2880, 3360};
    return sizes[bits];
}

/* ---------------------------------------------------------------- weights to bytes */

#if defined(__AVX2__)
enum { HALVES = 32 }; /* bytes of a vector */
#else
enum { HALVES = 16 };
#endif
typedef uint16_t vh __attribute__((vector_size(HALVES)));

INLINE vh halves(const uint8_t *p) {
    vh v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void put_halves(uint8_t *p, vh v) { memcpy(p, &v, sizeof v); }

INLINE float from_half(const uint8_t *p) {
    uint16_t h;
    memcpy(&h, p, sizeof h);
    return half_to_float(h);
}

INLINE void read_halves(float *out, const uint8_t *p) {
#if defined(__F16C__) || defined(__AVX512F__)
    for (int n = 0; n < LANES; n += 8)
        _mm256_storeu_ps(out + n, _mm256_cvtph_ps(_mm_loadu_si128((const void *)(p + 2 * n))));
#else
    for (int n = 0; n < LANES; n++) out[n] = from_half(p + 2 * n);
#endif
}

/* n lines of nibbles: the low ones are an even step, the high ones the next. */
INLINE void nibbles(uint8_t (*out)[LINE], const uint8_t *p, int n) {
    for (int i = 0; i < n; i++)
#pragma GCC unroll 4
        for (int j = 0; j < LINE; j += HALVES) {
            const vh v = halves(p + i * LINE + j);
            put_halves(out[2 * i] + j, v & 0x0f0f);
            put_halves(out[2 * i + 1] + j, (v >> 4) & 0x0f0f);
        }
}

INLINE void add_bits(uint8_t *out, vh bits) { put_halves(out, halves(out) | bits); }

static void fifth_bits(uint8_t (*out)[LINE], const uint8_t *p) { /* bit s of a byte belongs to step s of eight */
    for (int i = 0; i < 8; i++, out += 8, p += LINE)
        for (int j = 0; j < LINE; j += HALVES) {
            const vh v = halves(p + j);
#pragma GCC unroll 4
            for (int s = 0; s < 4; s++) {
                add_bits(out[s] + j, (v << (4 - s)) & 0x1010);
                add_bits(out[s + 4] + j, (v >> s) & 0x1010);
            }
        }
}

static void upper_two_bits(uint8_t (*out)[LINE], const uint8_t *p) { /* bits 2s, 2s + 1 belong to step s of four */
    for (int i = 0; i < 16; i++, out += 4, p += LINE)
        for (int j = 0; j < LINE; j += HALVES) {
            const vh v = halves(p + j);
            add_bits(out[0] + j, (v << 4) & 0x3030);
            add_bits(out[1] + j, (v << 2) & 0x3030);
            add_bits(out[2] + j, v & 0x3030);
            add_bits(out[3] + j, (v >> 2) & 0x3030);
        }
}

INLINE int32_t scale_lane(int32_t v) { return WIDE ? (int32_t)(((uint32_t)v & 0xffffu) * 0x10001u) : v; }

static void unpack_super(Unpacked *out, const uint8_t *p, int64_t bits) {
    read_halves(out->d[0], p);
    if (bits == Q6_K) {
        for (int i = 0; i < 16 * LANES; i++) out->pairs[i] = (int8_t)p[32 + i]; /* [8][LANES][2] */
        for (int j = 0; j < 8; j++)
            for (int n = 0; n < LANES; n++) {
                const int32_t pair = four_bytes(out->pairs + 2 * (j * LANES + n));
                out->scale[2 * j * LANES + n] = scale_lane((int16_t)pair);
                out->scale[(2 * j + 1) * LANES + n] = scale_lane(pair >> 16);
            }
        nibbles(out->bytes, p + 288, STEPS / 2);
        upper_two_bits(out->bytes, p + 288 + 2048);
        return;
    }
    read_halves(out->m[0], p + 32);
    for (int i = 0; i < 8 * LANES; i++) out->scale[i] = scale_lane(p[64 + i]); /* [8][LANES] */
    for (int i = 0; i < 8 * LANES; i++) out->pairs[i] = p[192 + i]; /* [4][LANES][2] */
    if (bits == Q4_K) return;
    nibbles(out->bytes, p + 320, STEPS / 2);
    fifth_bits(out->bytes, p + 320 + 2048);
}

static void unpack_small(Unpacked *out, const uint8_t *p, int64_t bits, int64_t units) {
    for (int64_t u = 0; u < units; u++, p += unit_bytes(bits)) {
        read_halves(out->d[u], p);
        if (bits == Q4_1) read_halves(out->m[u], p + 32);
    }
}

/* ---------------------------------------------------------------- sums */

/* Part: sums of products of a chain of steps with weights of up to six bits; where parts have 16 bits, a chain is as
 * long as these suffice. step8: the same for Q8_0, in 32 bits; its weights are w + 128. */
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
enum { TILE_ROWS = 8 };
INLINE vi step(vi part, vi w, vi x) { return _mm512_dpbusd_epi32(part, w, x); }
INLINE vi step8(vi sum, vi w, vi x) { return step(sum, w, x); }
INLINE vi scaled(vi total, vi part, vi scale) { return _mm512_add_epi32(total, _mm512_mullo_epi32(part, scale)); }
INLINE vi paired(vi total, vi pairs, vi x) { return _mm512_dpwssd_epi32(total, pairs, x); }
#elif defined(__AVXVNNI__)
enum { TILE_ROWS = 3 };
INLINE vi step(vi part, vi w, vi x) { return _mm256_dpbusd_avx_epi32(part, w, x); }
INLINE vi step8(vi sum, vi w, vi x) { return step(sum, w, x); }
INLINE vi scaled(vi total, vi part, vi scale) { return _mm256_add_epi32(total, _mm256_mullo_epi32(part, scale)); }
INLINE vi paired(vi total, vi pairs, vi x) { return _mm256_dpwssd_avx_epi32(total, pairs, x); }
#elif defined(__AVX2__)
enum { TILE_ROWS = 4 };
INLINE vi step(vi part, vi w, vi x) { return _mm256_add_epi16(part, _mm256_maddubs_epi16(w, x)); }
INLINE vi step8(vi sum, vi w, vi x) { /* |w| * (x with w's sign): pairs are at most 2 * 128 * 127, which fit 16 bits */
    const vi signed_w = _mm256_xor_si256(w, _mm256_set1_epi8((char)0x80));
    const vi pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(signed_w), _mm256_sign_epi8(x, signed_w));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
INLINE vi paired(vi total, vi pairs, vi x) { return _mm256_add_epi32(total, _mm256_madd_epi16(pairs, x)); }
INLINE vi scaled(vi total, vi part, vi scale) { return _mm256_add_epi32(total, _mm256_madd_epi16(part, scale)); }
#elif defined(__ARM_FEATURE_DOTPROD)
enum { TILE_ROWS = 3 };
INLINE vi step(vi part, vi w, vi x) { return vdotq_s32(part, vreinterpretq_s8_s32(w), vreinterpretq_s8_s32(x)); }
INLINE vi step8(vi sum, vi w, vi x) { return step(sum, veorq_s32(w, vdupq_n_s32((int32_t)0x80808080u)), x); }
INLINE vi scaled(vi total, vi part, vi scale) { return vmlaq_s32(total, part, scale); }
INLINE vi low_half(vi pair) { return vshrq_n_s32(vshlq_n_s32(pair, 16), 16); }
INLINE vi high_half(vi pair) { return vshrq_n_s32(pair, 16); }
INLINE vi paired(vi total, vi pairs, vi x) {
    return vmlaq_s32(vmlaq_s32(total, low_half(pairs), low_half(x)), high_half(pairs), high_half(x));
}
#else
#define ROLLED /* unrolled, it would take a compiler half a minute */
enum { TILE_ROWS = 1 };
INLINE vi step(vi part, vi w, vi x) { return part + four_products(w, x); }
INLINE vi step8(vi sum, vi w, vi x) { return dot(sum, widened(w), x); }
INLINE vi scaled(vi total, vi part, vi scale) { return total + part * scale; }
INLINE vi paired(vi total, vi pairs, vi x) {
    return total + ((pairs << 16) >> 16) * ((x << 16) >> 16) + (pairs >> 16) * (x >> 16);
}
#endif

INLINE vi same_fours(const void *x) { /* four bytes, or two of 16 bits, for every lane */
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    return _mm512_set1_epi32(four_bytes(x));
#elif defined(__AVX2__)
    return _mm256_set1_epi32(four_bytes(x));
#elif defined(__ARM_FEATURE_DOTPROD)
    return vdupq_n_s32(four_bytes(x));
#else
    return four_bytes(x) + (vi){0};
#endif
}

typedef uint16_t Sixteens __attribute__((vector_size(BYTES)));

INLINE vi lower_nibbles(vi v) { return (vi)((Sixteens)v & 0x0f0f); }

INLINE vi upper_nibbles(vi v) { return (vi)(((Sixteens)v >> 4) & 0x0f0f); }

INLINE vi lanes_at(const void *p, int j) {
    vi v;
    memcpy(&v, (const char *)p + j * BYTES, BYTES);
    return v;
}

enum Form { NIBBLES, SMALL_BYTES, BYTES8 }; /* of weights: two steps in a line, or one in a line */

/* Adds one step of R rows. x: where their inputs are. */
INLINE void add_step(int R, enum Form form, const vi weight[PARTS16], const char *x, int64_t stride,
                     vi part[TILE_ROWS][PARTS16]) {
#pragma GCC unroll 8
    for (int i = 0; i < R; i++) {
        const vi input = same_fours(x + i * stride);
#pragma GCC unroll 4
        for (int j = 0; j < PARTS16; j++) {
            part[i][j] = (form == BYTES8 ? step8 : step)(part[i][j], weight[j], input);
            KEEP(part[i][j]); /* in this order: another one needs more registers than there are */
        }
    }
}

/* Parts of R rows over `count` steps. x: where the rows' inputs of the first step are. */
INLINE void sum_steps(int R, enum Form form, int count, const uint8_t *w, const char *x, int64_t stride,
                      vi part[TILE_ROWS][PARTS16]) {
    const int each = form == NIBBLES ? 2 : 1;
#ifdef ROLLED
#pragma GCC unroll 1
#else
#pragma GCC unroll 8
#endif
    for (int s = 0; s < count; s += each, w += LINE) {
        vi weight[PARTS16], next[PARTS16];
#pragma GCC unroll 4
        for (int j = 0; j < PARTS16; j++) {
            weight[j] = lanes_at(w, j);
            KEEP(weight[j]);
            if (form != NIBBLES) continue;
            next[j] = upper_nibbles(weight[j]);
            weight[j] = lower_nibbles(weight[j]);
        }
        add_step(R, form, weight, x + 4 * s, stride, part);
        if (form == NIBBLES) add_step(R, form, next, x + 4 * (s + 1), stride, part);
    }
}

INLINE void clear(int R, vi part[TILE_ROWS][PARTS16]) {
#pragma GCC unroll 8
    for (int i = 0; i < R; i++)
#pragma GCC unroll 4
        for (int j = 0; j < PARTS16; j++) part[i][j] = (vi){0};
}

INLINE vf fused(vf a, vf b, vf c) { /* rounded once on every machine */
#if defined(__FMA__) || defined(__AVX512F__) || defined(__aarch64__)
    return fma_(a, b, c);
#else
    for (int i = 0; i < W; i++) c[i] = fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

INLINE vf numbers(const int32_t *whole) {
    vl v;
    memcpy(&v, whole, sizeof v);
    return __builtin_convertvector(v, vf);
}

/* out [16] += the products of one row and 256 inputs, from the integer sums. */
INLINE void finish_super(int64_t bits, const Unpacked *w, const Super *x, const int32_t *total, float *out) {
    _Alignas(64) int32_t least[LANES];
#pragma GCC unroll 4
    for (int j = 0; j < PARTS16; j++) {
        vi sum = {0};
        for (int p = 0; p < (bits == Q6_K ? 8 : 4); p++)
            sum = paired(sum, lanes_at(w->pairs + 2 * LANES * p, j), same_fours((bits == Q6_K ? x->sums16 : x->sums32) + 2 * p));
        memcpy(least + j * (BYTES / 4), &sum, BYTES);
    }
    for (int n = 0; n < LANES; n += W) {
        vf v;
        if (bits == Q6_K) {
            vl whole, low;
            memcpy(&whole, total + n, sizeof whole);
            memcpy(&low, least + n, sizeof low);
            v = __builtin_convertvector(whole - 32 * low, vf) * load(w->d[0] + n);
        } else v = fused(numbers(total + n), load(w->d[0] + n), -(numbers(least + n) * load(w->m[0] + n)));
        store(out + n, fused(v, all(x->scale), load(out + n)));
    }
}

INLINE void super_tile(int R, int64_t bits, const Unpacked *w, const uint8_t *p, const char *x, int64_t stride,
                       float (*out)[LANES]) {
    const int sub = bits == Q6_K ? 4 : 8; /* steps of a sub-block */
    const int chain = WIDE ? bits == Q4_K ? 8 : bits == Q5_K ? 4 : 2 : sub;
    vi total[TILE_ROWS][PARTS16];
    _Alignas(64) int32_t sums[LANES];
    clear(R, total);
    for (int s = 0; s < STEPS; s += chain) {
        vi part[TILE_ROWS][PARTS16];
        clear(R, part);
        if (bits == Q4_K) sum_steps(R, NIBBLES, chain, p + 320 + s / 2 * LINE, x + 4 * s, stride, part);
        else sum_steps(R, SMALL_BYTES, chain, w->bytes[s], x + 4 * s, stride, part);
#pragma GCC unroll 8
        for (int i = 0; i < R; i++)
#pragma GCC unroll 4
            for (int j = 0; j < PARTS16; j++)
                total[i][j] = scaled(total[i][j], part[i][j], lanes_at(w->scale + s / sub * LANES, j));
    }
#pragma GCC unroll 8
    for (int i = 0; i < R; i++) {
#pragma GCC unroll 4
        for (int j = 0; j < PARTS16; j++) memcpy(sums + j * (BYTES / 4), &total[i][j], BYTES);
        finish_super(bits, w, (const Super *)(x + i * stride), sums, out[i]);
    }
}

INLINE vi whole_sums(vi part) { /* in 32 bits */
#if defined(__AVX2__) && !defined(__AVXVNNI__) && !defined(__AVX512VNNI__)
    return _mm256_madd_epi16(part, _mm256_set1_epi16(1));
#else
    return part;
#endif
}

INLINE void finish_small(int64_t bits, const Unpacked *w, int64_t u, const Small *x, const int32_t *sums, float *out) {
    const int32_t offset = bits == Q4_0 ? 8 : bits == Q8_0 && !WIDE ? OFFSET : 0;
    for (int n = 0; n < LANES; n += W) {
        vl whole;
        memcpy(&whole, sums + n, sizeof whole);
        const vf number = __builtin_convertvector(whole - offset * x->whole, vf), d = load(w->d[u] + n);
        const vf v = bits == Q4_1 ? fused(number, d, load(w->m[u] + n) * x->sum) : number * d;
        store(out + n, fused(v, all(x->scale), load(out + n)));
    }
}

INLINE void small_tile(int R, int64_t bits, const Unpacked *w, const uint8_t *p, int64_t units, const char *x,
                       int64_t stride, float (*out)[LANES]) {
    const int header = bits == Q4_1 ? 64 : 32;
    for (int64_t u = 0; u < units; u++, x += sizeof(Small), p += unit_bytes(bits)) {
        vi part[TILE_ROWS][PARTS16];
        _Alignas(64) int32_t sums[LANES];
        clear(R, part);
        sum_steps(R, bits == Q8_0 ? BYTES8 : NIBBLES, 8, p + header, x, stride, part);
#pragma GCC unroll 8
        for (int i = 0; i < R; i++) {
#pragma GCC unroll 4
            for (int j = 0; j < PARTS16; j++) {
                const vi whole = bits == Q8_0 ? part[i][j] : whole_sums(part[i][j]);
                memcpy(sums + j * (BYTES / 4), &whole, BYTES);
            }
            finish_small(bits, w, u, (const Small *)(x + i * stride), sums, out[i]);
        }
    }
}

/* ---------------------------------------------------------------- a product */

#define ROWS_OF(n, k, CALL) \
    if (n == k && k <= TILE_ROWS) CALL((k <= TILE_ROWS ? k : 1));
#define BY_ROWS(n, CALL) /* the number of rows of a tile, as a constant */ \
    { \
        ROWS_OF(n, 1, CALL) \
        ROWS_OF(n, 2, CALL) \
        ROWS_OF(n, 3, CALL) \
        ROWS_OF(n, 4, CALL) \
        ROWS_OF(n, 5, CALL) \
        ROWS_OF(n, 6, CALL) \
        ROWS_OF(n, 7, CALL) \
        ROWS_OF(n, 8, CALL) \
    }

INLINE void span_rows(int64_t bits, const Unpacked *w, const uint8_t *p, int64_t units, const char *x, int64_t stride,
                      int64_t rows, float (*out)[LANES]) {
    for (int64_t t = 0, n; t < rows; t += n) {
        const int64_t left = rows - t, turns = (left + TILE_ROWS - 1) / TILE_ROWS;
        n = (left + turns - 1) / turns;
#define SUPER_TILE(R) super_tile(R, bits, w, p, x + t * stride, stride, out + t)
#define SMALL_TILE(R) small_tile(R, bits, w, p, units, x + t * stride, stride, out + t)
        if (is_super(bits)) BY_ROWS(n, SUPER_TILE)
        else BY_ROWS(n, SMALL_TILE)
    }
}

#define SPAN_ROWS(BITS) \
    static void rows_##BITS(const Unpacked *w, const uint8_t *p, int64_t units, const char *x, int64_t stride, \
                            int64_t rows, float (*out)[LANES]) { \
        span_rows(BITS, w, p, units, x, stride, rows, out); \
    }
SPAN_ROWS(Q4_0)
SPAN_ROWS(Q4_1)
SPAN_ROWS(Q8_0)
SPAN_ROWS(Q4_K)
SPAN_ROWS(Q5_K)
SPAN_ROWS(Q6_K)

typedef void (*SpanRows)(const Unpacked *w, const uint8_t *p, int64_t units, const char *x, int64_t stride,
                         int64_t rows, float (*out)[LANES]);

/* out [rows, 16]: products of one piece with rows at `x`. */
static void multiply_piece(const struct Piece *piece, int64_t inputs, const char *x, int64_t stride, int64_t rows,
                           float (*out)[LANES]) {
    static const SpanRows by_bits[] = {rows_Q4_0, rows_Q4_1, rows_Q8_0, rows_Q4_K, rows_Q5_K, rows_Q6_K};
    const int64_t bits = piece->bits, each = is_super(bits) ? 1 : SPAN / 32;
    const int64_t units = inputs / (is_super(bits) ? SPAN : 32), bytes = unit_bytes(bits);
    Unpacked w;
    memset(out, 0, (size_t)rows * sizeof *out);
    for (int64_t u = 0; u < units; u += each) {
        const int64_t n = least(each, units - u);
        const uint8_t *p = piece->data + u * bytes;
        for (int64_t line = 0; line < n * bytes; line += 64) __builtin_prefetch(p + FURTHER + line, 0, 2);
        if (is_super(bits)) unpack_super(&w, p, bits);
        else unpack_small(&w, p, bits, n);
        by_bits[bits](&w, p, n, x, stride, rows, out);
        x += is_super(bits) ? (int64_t)sizeof(Super) : n * (int64_t)sizeof(Small);
    }
}

/* One block of 32 outputs for all rows: two pieces. */
static int multiply_pieces(const void *job, int64_t block) {
    const Product *a = job;
    const Linear *linear = a->linear;
    const int64_t pieces = (linear->outputs + LANES - 1) / LANES, stride = a->x.stride * (int64_t)sizeof(Input);
    float sums[2][MANY][LANES], y[OUTPUTS];
    for (int64_t t = 0; t < a->x.rows; t += MANY) {
        const int64_t n = least(MANY, a->x.rows - t);
        for (int64_t i = 0; i < 2 && 2 * block + i < pieces; i++)
            multiply_piece(linear->pieces + 2 * block + i, linear->inputs, (const char *)a->x.inputs + t * stride,
                           stride, n, sums[i]);
        for (int64_t r = 0; r < n; r++) {
            for (int i = 0; i < OUTPUTS; i += W) {
                const vf bias = linear->bias ? load(linear->bias + block * OUTPUTS + i) : (vf){0};
                store(y + i, load(sums[i / LANES][r] + i % LANES) + bias);
            }
            emit(a, t + r, block, y);
        }
    }
    return 0;
}

/* ---------------------------------------------------------------- rows to bytes */

/* Rounds n values to signed bytes; returns their scale. NaN and infinity make it NaN. */
INLINE float quantise_unit(const float *x, int n, int8_t *q) {
    vf best = {0}, odd = {0};
    for (int i = 0; i < n; i += W) {
        best = larger(magnitude(load(x + i)), best);
        odd += load(x + i) * 0.0f;
    }
    const float scale = lanes_top(best) / 127.0f, inverse = scale > 1e-30f ? 1.0f / scale : 0.0f;
    for (int i = 0; i < n; i += W) {
        typedef int8_t vb __attribute__((vector_size(W)));
        const vb bytes = __builtin_convertvector(nearest(load(x + i) * inverse), vb);
        memcpy(q + i, &bytes, sizeof bytes);
    }
    return scale + lanes_sum(odd);
}

INLINE int32_t sum_of(const int8_t *q, int n) {
    int32_t sum = 0;
    for (int i = 0; i < n; i++) sum += q[i];
    return sum;
}

/* Completes a unit whose bytes are there: its scale and its sums. */
INLINE void describe_unit(char *unit, int whole, float scale) {
    if (whole) {
        Super *s = (Super *)unit;
        s->scale = scale;
        for (int j = 0; j < 16; j++) s->sums16[j] = (int16_t)sum_of(s->q + 16 * j, 16);
        for (int j = 0; j < 8; j++) s->sums32[j] = (int16_t)(s->sums16[2 * j] + s->sums16[2 * j + 1]);
        return;
    }
    Small *s = (Small *)unit;
    s->scale = scale;
    s->whole = sum_of(s->q, 32);
    s->sum = (float)s->whole;
}

static void quantise_units(const Linear *linear, const float *x, char *out) {
    const int64_t n = linear->inputs;
    if (is_super(linear->pieces->bits))
        for (int64_t i = 0; i < n; i += SPAN, out += sizeof(Super))
            describe_unit(out, 1, quantise_unit(x + i, SPAN, (int8_t *)out));
    else
        for (int64_t i = 0; i < n; i += 32, out += sizeof(Small))
            describe_unit(out, 0, quantise_unit(x + i, 32, (int8_t *)out));
}

/* One unit of n values as two rows of bytes: x = scale * (254 * high + low). */
INLINE float halve_unit(const float *x, int n, int8_t *high, int8_t *low) {
    vf best = {0}, odd = {0};
    for (int i = 0; i < n; i += W) {
        best = larger(magnitude(load(x + i)), best);
        odd += load(x + i) * 0.0f;
    }
    const float bad = lanes_sum(odd), scale = lanes_top(best) / 32385.0f; /* 254 * 127 + 127 */
    const float inverse = scale > 1e-30f && bad == 0.0f ? 1.0f / scale : 0.0f;
    for (int i = 0; i < n; i++) {
        const int32_t q = (int32_t)rintf(x[i] * inverse), upper = (q + (q < 0 ? -126 : 126)) / 254;
        high[i] = (int8_t)upper;
        low[i] = (int8_t)(q - 254 * upper); /* never -128, whose sign cannot be changed */
    }
    return scale + bad;
}

/* A row whose inputs differ by orders of magnitude even within a unit, as two rows that add up to it. */
static void quantise_units_twice(const Linear *linear, const float *x, char *high, char *low) {
    const int whole = is_super(linear->pieces->bits), size = whole ? SPAN : 32;
    const int64_t bytes = whole ? (int64_t)sizeof(Super) : (int64_t)sizeof(Small);
    for (int64_t i = 0; i < linear->inputs; i += size, high += bytes, low += bytes) {
        const float scale = halve_unit(x + i, size, (int8_t *)high, (int8_t *)low);
        describe_unit(high, whole, 254.0f * scale);
        describe_unit(low, whole, scale);
    }
}

/* ---------------------------------------------------------------- one row of an embedding */

INLINE int nibble(const uint8_t *lines, int64_t i, int64_t lane) { /* of input i */
    return lines[i / 8 * LINE + 4 * lane + i % 4] >> (i % 8 / 4 * 4) & 15;
}

/* Output `lane` of a piece in float: w = d * q + m, as `gguf` computes it. */
static void read_piece(const struct Piece *piece, int64_t lane, int64_t inputs, float *out) {
    const int64_t bits = piece->bits, bytes = unit_bytes(bits), size = is_super(bits) ? SPAN : 32;
    const uint8_t *p = piece->data;
    for (int64_t from = 0; from < inputs; from += size, p += bytes, out += size) {
        const float d = from_half(p + 2 * lane), m = from_half(p + 32 + 2 * lane);
        for (int64_t i = 0; i < size; i++) {
            const uint8_t *tail = p + 320 + 2048; /* after the nibbles of Q4_K and Q5_K */
            const int64_t line = 4 * lane + i % 4, j = i / 32;
            if (bits == Q4_0) out[i] = d * (float)(nibble(p + 32, i, lane) - 8);
            else if (bits == Q4_1) out[i] = d * (float)nibble(p + 64, i, lane) + m;
            else if (bits == Q8_0) out[i] = d * (float)(p[32 + i / 4 * LINE + line] - 128);
            else if (bits == Q6_K) {
                const int high = p[288 + 2048 + i / 16 * LINE + line] >> (i / 4 % 4 * 2) & 3;
                const int8_t scale = (int8_t)p[32 + (i / 32 * LANES + lane) * 2 + i / 16 % 2];
                out[i] = d * (float)scale * (float)((nibble(p + 288, i, lane) | high << 4) - 32);
            } else {
                const int fifth = bits == Q5_K ? tail[j * LINE + line] >> (i / 4 % 8) & 1 : 0;
                const float least = m * (float)p[192 + (j / 2 * LANES + lane) * 2 + j % 2];
                out[i] = d * (float)p[64 + j * LANES + lane] * (float)(nibble(p + 320, i, lane) | fifth << 4) - least;
            }
        }
    }
}

#endif
