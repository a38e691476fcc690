/* Products of rows with the blocks of a GGUF file: its own four to eight bits, never rounded again.
 *
 * Weights are repacked (blocks.py), not converted: a piece is 16 outputs, [units of inputs][header, bits], so that one
 * vector lane is one output; the units of two neighbouring pieces alternate in memory. A unit has 256 inputs (Q4_K, Q5_K,
 * Q6_K) or 32 (Q4_0, Q4_1, Q8_0). Rows are rounded to signed bytes with one scale per unit, as in llama.cpp.
 *
 * Promise: the same bits for every number of rows and threads and for every instruction set. Within a unit all sums are
 * integers, scales of sub-blocks included (at most 256 * 63 * 127 * 128 < 2^31). Between units each lane adds in
 * ascending order with one rounding per addition (`fused`). Weights are unpacked in registers, once for a tile of rows.
 */
#ifndef OUTRIDER_BLOCKS_H
#define OUTRIDER_BLOCKS_H

#include "int8.h"

enum Bits { Q4_0, Q4_1, Q8_0, Q4_K, Q5_K, Q6_K, F16, BF16, F32 }; /* in the order of blocks.py; no pieces of the last three */

enum {
    LANES = 16, /* outputs of a piece */
    LINE = 4 * LANES, /* bytes of four inputs, unpacked: a cache line */
    SPAN = 256, /* inputs of a large unit */
    REUSED = 1024, /* inputs whose weights stay in the L1 cache for all rows of a call */
    STEPS = SPAN / 4,
    PARTS16 = LINE / BYTES, /* vectors of a line */
    FURTHER = 8192, /* bytes: how far ahead packed weights are prefetched */
};

struct Piece {
    const uint8_t *data;
    int64_t bits; /* enum Bits */
    int64_t step; /* bytes from a unit to the next: twice a unit's where two pieces lie side by side */
};

typedef struct { /* 256 inputs of a row */
    int8_t q[SPAN];
    union { /* for Q6_K, whose weights are stored + 32; see `sum_super` */
        int32_t starts[16]; /* -32 * the sum of each 16 of q */
        int16_t sums16[16]; /* WIDE: these sums */
    };
    int16_t sums32[8]; /* of q */
    float scale, unused[3];
} Super;

typedef struct { /* 32 inputs of a row */
    int8_t q[32];
    float scale, sum; /* sum of q */
    int32_t whole, unused; /* the same */
} Small;

INLINE int is_super(int64_t bits) { return bits >= Q4_K; }

INLINE int64_t unit_bytes(int64_t bits) {
    static const int64_t sizes[] = {288, 320, 544, 2368, 2880, 3392};
    return sizes[bits];
}

/* ---------------------------------------------------------------- fields of a unit, one lane for each output */

enum { PER = BYTES / 4, SIDE = PER == LANES ? 2 : 1 }; /* lanes of a vector; pieces whose sums are in registers at once */
typedef float vo __attribute__((vector_size(BYTES)));
typedef int32_t Wholes __attribute__((vector_size(BYTES)));
typedef int16_t Words __attribute__((vector_size(BYTES)));
typedef uint16_t Sixteens __attribute__((vector_size(BYTES)));

INLINE float from_half(const uint8_t *p) {
    uint16_t h;
    memcpy(&h, p, sizeof h);
    return half_to_float(h);
}

INLINE vo half_lanes(const uint8_t *p, int j) {
    p += 2 * j * PER;
#if defined(__AVX512F__) && defined(__AVX512VNNI__)
    return (vo)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)p));
#elif defined(__F16C__) && !defined(__AVX512VNNI__)
    return (vo)_mm256_cvtph_ps(_mm_loadu_si128((const void *)p));
#elif defined(__aarch64__)
    return (vo)vcvt_f32_f16(vld1_f16((const float16_t *)p));
#else
    vo v;
    for (int n = 0; n < PER; n++) v[n] = from_half(p + 2 * n);
    return v;
#endif
}

INLINE vi lanes_at(const void *p, int j) {
    vi v;
    memcpy(&v, (const char *)p + j * BYTES, BYTES);
    return v;
}

/* Small integers of PER lanes, in 32 bits; of 2 PER, in 16 bits. */
#if defined(__AVX512F__) && defined(__AVX512VNNI__)
INLINE Wholes from_bytes(const uint8_t *p) { return (Wholes)_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)p)); }
INLINE Wholes from_words(const uint8_t *p) { return (Wholes)_mm512_cvtepi16_epi32(_mm256_loadu_si256((const void *)p)); }
INLINE vi words(const uint8_t *p) { return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const void *)p)); }
INLINE vi signed_words(const uint8_t *p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)p)); }
#elif defined(__AVX2__) && !defined(__AVX512VNNI__)
INLINE Wholes from_bytes(const uint8_t *p) { return (Wholes)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)p)); }
INLINE Wholes from_words(const uint8_t *p) { return (Wholes)_mm256_cvtepi16_epi32(_mm_loadu_si128((const void *)p)); }
INLINE vi words(const uint8_t *p) { return _mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)p)); }
INLINE vi signed_words(const uint8_t *p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)p)); }
#else
#define NARROW(type, count, p) ({ type __attribute__((vector_size((count) * sizeof(type)))) v; memcpy(&v, p, sizeof v); v; })
#if defined(__aarch64__) /* gcc would widen them one by one */
INLINE Wholes from_bytes(const uint8_t *p) {
    return (Wholes)vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_s32(vdup_n_s32(four_bytes(p))))));
}
#else
INLINE Wholes from_bytes(const uint8_t *p) { return __builtin_convertvector(NARROW(uint8_t, PER, p), Wholes); }
#endif
INLINE Wholes from_words(const uint8_t *p) { return __builtin_convertvector(NARROW(int16_t, PER, p), Wholes); }
INLINE vi words(const uint8_t *p) { return (vi)__builtin_convertvector(NARROW(uint8_t, 2 * PER, p), Words); }
INLINE vi signed_words(const uint8_t *p) { return (vi)__builtin_convertvector(NARROW(int8_t, 2 * PER, p), Words); }
#endif

/* The integer scale of a sub-block (WIDE: twice, in 16 bits). Q4_K, Q5_K: [8][LANES]. */
INLINE vi scale_lanes(Wholes v) { return (vi)(WIDE ? (v & 0xffff) | v << 16 : v); }

INLINE vi scale_of(int64_t bits, const uint8_t *p, int64_t line, int half, int j) {
    if (bits != Q6_K) return scale_lanes(from_bytes(p + 64 + line * LANES + j * PER));
    const Wholes pair = from_words(p + 64 + 2 * (line * LANES + j * PER)); /* [8][LANES][2] signed bytes */
    return scale_lanes(half ? pair >> 8 : (pair << 24) >> 24);
}

/* Two sub-blocks' minima (Q4_K, Q5_K) or scales (Q6_K), in 16 bits each. */
INLINE vi pair_lanes(int64_t bits, const uint8_t *p, int pair, int j) {
    const int64_t at = 2 * (pair * LANES + j * PER);
    return bits == Q6_K ? signed_words(p + 64 + at) : words(p + 192 + at);
}

INLINE vi lower_nibbles(vi v) { return (vi)((Sixteens)v & 0x0f0f); }

INLINE vi upper_nibbles(vi v) { return (vi)(((Sixteens)v >> 4) & 0x0f0f); }

/* The bits above a nibble. Q5_K: bit s of a byte belongs to step s of eight; Q6_K: bits 2s, 2s + 1 to step s of four. */
INLINE vi upper_bits(int64_t bits, vi line, int s) {
    const Sixteens v = (Sixteens)line;
    const int up = bits == Q5_K ? 4 - s : 4 - 2 * s;
    return (vi)((up > 0 ? v << up : v >> -up) & (uint16_t)(bits == Q5_K ? 0x1010 : 0x3030));
}

/* Weights of steps s and s + 1 of a sub-block, in unsigned bytes. upper: the bits above its nibbles. */
INLINE void two_steps(int64_t bits, const uint8_t *nibbles, const uint8_t *upper, int s, int j, vi *even, vi *odd) {
    vi line = lanes_at(nibbles, j);
    KEEP(line);
    *even = lower_nibbles(line);
    *odd = upper_nibbles(line);
    if (bits == Q4_K) return;
    *even |= upper_bits(bits, lanes_at(upper, j), s);
    *odd |= upper_bits(bits, lanes_at(upper, j), s + 1);
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
enum { TILE_ROWS = PAIRED ? 4 : 3 };
INLINE vi step(vi part, vi w, vi x) { return vdotq_s32(part, vreinterpretq_s8_s32(w), vreinterpretq_s8_s32(x)); }
INLINE vi step8(vi sum, vi w, vi x) { return step(sum, veorq_s32(w, vdupq_n_s32((int32_t)0x80808080u)), x); }
INLINE vi scaled(vi total, vi part, vi scale) { return vmlaq_s32(total, part, scale); }
INLINE vi low_half(vi pair) { return vshrq_n_s32(vshlq_n_s32(pair, 16), 16); }
INLINE vi high_half(vi pair) { return vshrq_n_s32(pair, 16); }
INLINE vi paired(vi total, vi pairs, vi x) {
    return vmlaq_s32(vmlaq_s32(total, low_half(pairs), low_half(x)), high_half(pairs), high_half(x));
}
#else
#define UNROLLED _Pragma("GCC unroll 1") /* else it would take a compiler half a minute */
enum { TILE_ROWS = 1 };
INLINE vi step(vi part, vi w, vi x) { return part + four_products(w, x); }
INLINE vi step8(vi sum, vi w, vi x) { return dot(sum, widened(w), x); }
INLINE vi scaled(vi total, vi part, vi scale) { return total + part * scale; }
INLINE vi paired(vi total, vi pairs, vi x) {
    return total + ((pairs << 16) >> 16) * ((x << 16) >> 16) + (pairs >> 16) * (x >> 16);
}
#endif
#ifndef UNROLLED
#define UNROLLED _Pragma("GCC unroll 8")
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

enum { TILE_VECTORS = SIDE * PARTS16 }; /* vectors of the pieces whose sums are in registers */

enum Use { ONCE, FIRST, AGAIN }; /* of weights: by these rows alone, by more rows later, by others before */

/* How weights are read that one tile of rows needs. On AMD they pass the L2 cache by. An Intel core has few such requests
 * in flight, and its L3 cache only gets what the L2 cache gives up: plain decoding was 1.8 to 2.7 times slower so. */
INLINE enum Use single_use(void) {
#if defined(__x86_64__)
    return __builtin_cpu_is("amd") ? ONCE : FIRST;
#else
    return ONCE;
#endif
}

typedef struct { /* rows, and one or two pieces that lie side by side */
    const uint8_t *piece[2]; /* where their next units are */
    int64_t step;
    const char *x; /* where the first row's inputs are */
    int64_t stride;
    float (*out[2])[LANES]; /* [R] each */
    enum Use use;
} Span;

/* Asks for one of `parts` parts of what is FURTHER ahead of a unit: more than a few lines at once fill the queue to the
 * memory, which holds up the loads behind them. Weights that one tile reads alone are not wanted in the L2 cache. */
INLINE void prefetch_part(const Span *t, int g, int64_t bytes, int64_t part, int parts) {
    const uint8_t *p = t->piece[g] + FURTHER + part * (bytes / parts);
    if (t->use == ONCE)
#pragma GCC unroll 16
        for (int64_t line = 0; line < bytes / parts; line += 64) __builtin_prefetch(p + line, 0, 0);
    else if (t->use == FIRST)
#pragma GCC unroll 16
        for (int64_t line = 0; line < bytes / parts; line += 64) __builtin_prefetch(p + line, 0, 2);
}

/* Adds one step of R rows and V vectors. x: where their inputs are. */
INLINE void add_step(int R, int V, int wide, const vi weight[TILE_VECTORS], const char *x, int64_t stride,
                     vi part[TILE_ROWS][TILE_VECTORS]) {
#pragma GCC unroll 8
    for (int i = 0; i < R; i++) {
        const vi input = same_fours(x + i * stride);
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
            part[i][v] = (wide ? step8 : step)(part[i][v], weight[v], input);
            KEEP(part[i][v]); /* in this order: another one needs more registers than there are */
        }
    }
}

/* Adds n steps, from step s of `x` on: two, or one where `odd` is none. PAIRED: two; until `uncross`, the sums of pairs of
 * rows are crossed (int8.h). Elsewhere macros: functions here change what gcc makes of the loops around them. */
#if PAIRED
INLINE void add_steps(int n, int R, int V, int wide, const vi even[TILE_VECTORS], const vi odd[TILE_VECTORS],
                      const char *x, int s, int64_t stride, vi part[TILE_ROWS][TILE_VECTORS]) {
    (void)n;
    x += 4 * s;
#pragma GCC unroll 4
    for (int i = 0; i + 1 < R; i += 2) {
        const Inputs input = two_rows(x + i * stride, stride);
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
            const Weights e = wide ? widened(even[v]) : (Weights)even[v], o = wide ? widened(odd[v]) : (Weights)odd[v];
            dot_pair(&part[i][v], &part[i + 1][v], e, o, input);
        }
    }
    add_step(R % 2, V, wide, even, x + (R - 1) * stride, stride, part + R - 1);
    add_step(R % 2, V, wide, odd, x + (R - 1) * stride + 4, stride, part + R - 1);
}

INLINE void uncross(int R, int V, vi part[TILE_ROWS][TILE_VECTORS]) {
#pragma GCC unroll 4
    for (int i = 0; i + 1 < R; i += 2)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) cross(&part[i][v], &part[i + 1][v]);
}
#else
#define add_steps(n, R, V, wide, even, odd, x, s, stride, part) \
    add_step(R, V, wide, even, x + 4 * s, stride, part); \
    if (n == 2) add_step(R, V, wide, odd, x + 4 * (s + 1), stride, part)
#define uncross(R, V, part)
#endif

INLINE void clear(int R, int V, vi part[TILE_ROWS][TILE_VECTORS]) {
#pragma GCC unroll 8
    for (int i = 0; i < R; i++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) part[i][v] = (vi){0};
}

INLINE vo fused(vo a, vo b, vo c) { /* rounded once on every machine */
#if defined(__AVX512F__) && defined(__AVX512VNNI__)
    return (vo)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__) && !defined(__AVX512VNNI__)
    return (vo)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vo)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    for (int i = 0; i < PER; i++) c[i] = fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

INLINE vo numbers(vi whole) { return __builtin_convertvector((Wholes)whole, vo); }

/* out += v * scale */
INLINE void add_scaled(float *out, vo v, float scale) {
    vo sum;
    memcpy(&sum, out, sizeof sum);
    sum = fused(v, scale - (vo){0}, sum);
    memcpy(out, &sum, sizeof sum);
}

/* Adds 256 inputs to the outputs of R rows, from their integer sums. */
INLINE void finish_super(int R, int64_t bits, const Span *t, int g, int v, vi total[TILE_ROWS][TILE_VECTORS]) {
    const int j = v % PARTS16, count = bits != Q6_K ? 4 : WIDE ? 8 : 0;
    const uint8_t *p = t->piece[g + v / PARTS16];
    const vo d = half_lanes(p, j), m = bits == Q6_K ? (vo){0} : half_lanes(p + 32, j);
    vi pairs[8];
#pragma GCC unroll 8
    for (int q = 0; q < count; q++) pairs[q] = pair_lanes(bits, p, q, j);
#pragma GCC unroll 8
    for (int i = 0; i < R; i++) {
        const Super *x = (const Super *)(t->x + i * t->stride);
        const int16_t *sums = bits == Q6_K ? x->sums16 : x->sums32;
        vi low = {0};
#pragma GCC unroll 8
        for (int q = 0; q < count; q++) low = paired(low, pairs[q], same_fours(sums + 2 * q));
        const vo number = bits == Q6_K ? numbers((vi)((Wholes)total[i][v] - 32 * (Wholes)low)) * d
                                       : fused(numbers(total[i][v]), d, -(numbers(low) * m));
        add_scaled(t->out[g + v / PARTS16][i] + j * PER, number, x->scale);
    }
}

/* Where the sums of a sub-block begin. Q6_K: at -32 * the sum of its inputs, so that nothing is left to subtract; WIDE:
 * 16 bits do not hold that, and it is subtracted at the unit's end. */
INLINE void start(int R, int V, int64_t bits, const Span *t, int64_t sub_block, vi part[TILE_ROWS][TILE_VECTORS]) {
    if (bits != Q6_K || WIDE) {
        clear(R, V, part);
        return;
    }
#pragma GCC unroll 8
    for (int i = 0; i < R; i++) {
        const vi from = same_fours(((const Super *)(t->x + i * t->stride))->starts + sub_block);
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) part[i][v] = from;
    }
    uncross(R, V, part); /* which crosses, too */
}

/* Integer sums of R rows over the 256 inputs of a unit. A line has 32 inputs: a sub-block, or two (Q6_K). */
INLINE void sum_super(int R, int V, int64_t bits, const Span *t, int g, vi total[TILE_ROWS][TILE_VECTORS]) {
    const int sub = bits == Q6_K ? 4 : 8; /* steps of a sub-block */
    const int chain = WIDE ? bits == Q4_K ? 8 : bits == Q5_K ? 4 : 2 : sub;
    const int64_t nibbles = 320, upper = nibbles + STEPS / 2 * LINE; /* where they begin */
    clear(R, V, total);
    for (int64_t line = 0; line < STEPS / 8; line++) {
        const int64_t low = nibbles + line * 4 * LINE, high = upper + line * (8 / sub) * LINE;
        const char *x = t->x + 32 * line;
#pragma GCC unroll 4
        for (int c = 0; c < 8; c += chain) {
            vi part[TILE_ROWS][TILE_VECTORS];
            start(R, V, bits, t, 2 * line + c / sub, part);
            UNROLLED
            for (int s = c; s < c + chain; s += 2) {
                vi even[TILE_VECTORS], odd[TILE_VECTORS];
                prefetch_part(t, g, V / PARTS16 * unit_bytes(bits), 4 * line + s / 2, STEPS / 2);
#pragma GCC unroll 4
                for (int v = 0; v < V; v++) {
                    const uint8_t *p = t->piece[g + v / PARTS16];
                    two_steps(bits, p + low + s / 2 * LINE, p + high + s / sub * LINE, s % sub, v % PARTS16, even + v, odd + v);
                }
                add_steps(2, R, V, 0, even, odd, x, s, t->stride, part);
            }
            uncross(R, V, part);
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) {
                const vi scale = scale_of(bits, t->piece[g + v / PARTS16], line, c / sub, v % PARTS16);
#pragma GCC unroll 8
                for (int i = 0; i < R; i++) total[i][v] = scaled(total[i][v], part[i][v], scale);
            }
        }
    }
}

INLINE void next_unit(Span *t, int G, int64_t bytes) {
    t->x += bytes;
    for (int g = 0; g < G; g++) t->piece[g] += t->step;
}

INLINE void super_tile(int R, int G, int64_t bits, Span t, int64_t units) {
    const int side = G < SIDE ? G : SIDE, V = side * PARTS16;
    for (int64_t u = 0; u < units; u++, next_unit(&t, G, sizeof(Super)))
        for (int g = 0; g < G; g += side) {
            vi total[TILE_ROWS][TILE_VECTORS];
            sum_super(R, V, bits, &t, g, total);
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) finish_super(R, bits, &t, g, v, total);
        }
}

INLINE vi whole_sums(vi part) { /* in 32 bits */
#if defined(__AVX2__) && !defined(__AVXVNNI__) && !defined(__AVX512VNNI__)
    return _mm256_madd_epi16(part, _mm256_set1_epi16(1));
#else
    return part;
#endif
}

/* Adds 32 inputs to the outputs of R rows, from their integer sums. */
INLINE void finish_small(int R, int64_t bits, const Span *t, int g, int v, vi part[TILE_ROWS][TILE_VECTORS]) {
    const int32_t offset = bits == Q4_0 ? 8 : bits == Q8_0 && !WIDE ? OFFSET : 0;
    const int j = v % PARTS16;
    const uint8_t *p = t->piece[g + v / PARTS16];
    const vo d = half_lanes(p, j), m = bits == Q4_1 ? half_lanes(p + 32, j) : (vo){0};
#pragma GCC unroll 8
    for (int i = 0; i < R; i++) {
        const Small *x = (const Small *)(t->x + i * t->stride);
        const vi whole = bits == Q8_0 ? part[i][v] : whole_sums(part[i][v]);
        const vo number = numbers((vi)((Wholes)whole - offset * x->whole));
        const vo value = bits == Q4_1 ? fused(number, d, m * x->sum) : number * d;
        add_scaled(t->out[g + v / PARTS16][i] + j * PER, value, x->scale);
    }
}

/* Integer sums of R rows over the 32 inputs of a unit. */
INLINE void sum_small(int R, int V, int64_t bits, const Span *t, int g, vi part[TILE_ROWS][TILE_VECTORS]) {
    const int header = bits == Q4_1 ? 64 : 32, each = bits == Q8_0 ? 1 : 2; /* steps of a line */
    const int together = PAIRED ? 2 : each; /* steps */
    clear(R, V, part);
    UNROLLED
    for (int s = 0; s < 8; s += together) {
        vi even[TILE_VECTORS], odd[TILE_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
            vi line = lanes_at(t->piece[g + v / PARTS16] + header + s / each * LINE, v % PARTS16);
            KEEP(line);
            even[v] = bits == Q8_0 ? line : lower_nibbles(line);
            odd[v] = upper_nibbles(line);
            if (PAIRED && bits == Q8_0) odd[v] = lanes_at(t->piece[g + v / PARTS16] + header + (s + 1) * LINE, v % PARTS16);
        }
        add_steps(together, R, V, bits == Q8_0, even, odd, t->x, s, t->stride, part);
    }
    uncross(R, V, part);
}

INLINE void small_tile(int R, int G, int64_t bits, Span t, int64_t units) {
    const int side = G < SIDE ? G : SIDE, V = side * PARTS16;
    for (int64_t u = 0; u < units; u++, next_unit(&t, G, sizeof(Small)))
        for (int g = 0; g < G; g += side) {
            vi part[TILE_ROWS][TILE_VECTORS];
            prefetch_part(&t, g, side * unit_bytes(bits), 0, 1);
            sum_small(R, V, bits, &t, g, part);
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) finish_small(R, bits, &t, g, v, part);
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

/* G pieces of one type, all rows. */
INLINE void span_rows(int G, int64_t bits, const Span *first, int64_t units, int64_t rows) {
    Span t = *first;
    t.use = rows > TILE_ROWS ? FIRST : single_use();
    for (int64_t done = 0, n; done < rows; done += n) {
        n = tile_of(rows - done, TILE_ROWS);
#define SUPER_TILE(R) super_tile(R, G, bits, t, units)
#define SMALL_TILE(R) small_tile(R, G, bits, t, units)
        if (is_super(bits)) BY_ROWS(n, SUPER_TILE)
        else BY_ROWS(n, SMALL_TILE)
        t.use = AGAIN;
        t.x += n * t.stride;
        for (int g = 0; g < G; g++) t.out[g] += n;
    }
}

typedef void (*SpanRows)(const Span *t, int64_t units, int64_t rows);

#define SPAN_ROWS(BITS) \
    static void one_##BITS(const Span *t, int64_t units, int64_t rows) { span_rows(1, BITS, t, units, rows); } \
    static void two_##BITS(const Span *t, int64_t units, int64_t rows) { span_rows(2, BITS, t, units, rows); }
SPAN_ROWS(Q4_0)
SPAN_ROWS(Q4_1)
SPAN_ROWS(Q8_0)
SPAN_ROWS(Q4_K)
SPAN_ROWS(Q5_K)
SPAN_ROWS(Q6_K)

/* out [G][rows, 16]: products of one piece, or of two side by side, with rows at `x`. */
static void multiply_group(const struct Piece *pieces, int G, int64_t inputs, const char *x, int64_t stride,
                           int64_t rows, float (*out)[MANY][LANES]) {
    static const SpanRows by_bits[2][6] = {{one_Q4_0, one_Q4_1, one_Q8_0, one_Q4_K, one_Q5_K, one_Q6_K},
                                           {two_Q4_0, two_Q4_1, two_Q8_0, two_Q4_K, two_Q5_K, two_Q6_K}};
    const int64_t bits = pieces->bits, size = is_super(bits) ? SPAN : 32, units = inputs / size, each = REUSED / size;
    const int64_t unit = is_super(bits) ? (int64_t)sizeof(Super) : (int64_t)sizeof(Small);
    Span t = {.step = pieces->step, .x = x, .stride = stride};
    for (int g = 0; g < G; g++) {
        t.piece[g] = pieces[g].data;
        t.out[g] = out[g];
        memset(out[g], 0, (size_t)rows * sizeof *out[g]);
    }
    for (int64_t u = 0, n; u < units; u += n) {
        n = least(each, units - u);
        by_bits[G - 1][bits](&t, n, rows);
        for (int g = 0; g < G; g++) t.piece[g] += n * t.step;
        t.x += n * unit;
    }
}

/* One block of 32 outputs for all rows: two pieces. */
static int multiply_pieces(const void *job, int64_t block) {
    const Product *a = job;
    const Linear *linear = a->linear;
    const int64_t count = least(2, (linear->outputs + LANES - 1) / LANES - 2 * block);
    const int64_t stride = a->x.stride * (int64_t)sizeof(Input);
    const struct Piece *pieces = linear->pieces + 2 * block;
    const int G = pieces->step > unit_bytes(pieces->bits) ? 2 : 1;
    float sums[2][MANY][LANES], y[OUTPUTS];
    for (int64_t t = 0; t < a->x.rows; t += MANY) {
        const int64_t n = least(MANY, a->x.rows - t);
        for (int64_t i = 0; i < count; i += G)
            multiply_group(pieces + i, G, linear->inputs, (const char *)a->x.inputs + t * stride, stride, n, sums + i);
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

INLINE Wholes larger_of(Wholes a, Wholes b) {
#if defined(__AVX512F__) && defined(__AVX512VNNI__)
    return (Wholes)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && !defined(__AVX512VNNI__)
    return (Wholes)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
    return ((a > b) & a) | (~(a > b) & b);
#endif
}

INLINE int32_t largest(Wholes v) {
#if defined(__AVX512F__) && defined(__AVX512VNNI__)
    return _mm512_reduce_max_epi32((__m512i)v);
#else
    int32_t lane[PER];
    memcpy(lane, &v, sizeof v);
    for (int step = PER / 2; step; step /= 2)
        for (int i = 0; i < step; i++) lane[i] = lane[i] > lane[i + step] ? lane[i] : lane[i + step];
    return lane[0];
#endif
}

INLINE void put_bytes(int8_t *q, Wholes v) { /* |v| <= 127 */
#if defined(__AVX512F__) && defined(__AVX512VNNI__)
    _mm_storeu_si128((void *)q, _mm512_cvtepi32_epi8((__m512i)v));
#elif defined(__AVX2__) && !defined(__AVX512VNNI__)
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
    _mm_storel_epi64((void *)q, _mm_packs_epi16(words, words));
#else
    for (int i = 0; i < PER; i++) q[i] = (int8_t)v[i];
#endif
}

static const float to_low_bits = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer, ties to even, in the low bits */

/* Rounds n values to signed bytes; returns their scale. NaN and infinity make it NaN: as integers, the bits of numbers
 * without their sign are in the order of the numbers, and these come last. */
INLINE float quantise_unit(const float *x, int n, int8_t *q) {
    Wholes top = {0};
    vo v;
    for (int i = 0; i < n; i += PER) {
        memcpy(&v, x + i, sizeof v);
        top = larger_of(top, (Wholes)v & 0x7fffffff);
    }
    const int32_t bits = largest(top);
    float most_of_all;
    memcpy(&most_of_all, &bits, sizeof bits);
    const float scale = most_of_all / 127.0f, inverse = scale > 1e-30f && bits < 0x7f800000 ? 1.0f / scale : 0.0f;
    for (int i = 0; i < n; i += PER) {
        memcpy(&v, x + i, sizeof v);
        put_bytes(q + i, (Wholes)(v * inverse + to_low_bits) - 0x4b400000);
    }
    return bits < 0x7f800000 ? scale : NAN;
}

/* The sums of each eight of n bytes. */
INLINE void sums_of_eight(const int8_t *q, int n, int32_t *sums) {
#if defined(__AVX2__)
    for (int i = 0; i < n; i += 32) { /* q + 128 is not negative: its bytes are summed by their distance from zero */
        const __m256i bytes = _mm256_xor_si256(_mm256_loadu_si256((const void *)(q + i)), _mm256_set1_epi8((char)0x80));
        int64_t four[4];
        _mm256_storeu_si256((void *)four, _mm256_sad_epu8(bytes, _mm256_setzero_si256()));
        for (int j = 0; j < 4; j++) sums[i / 8 + j] = (int32_t)four[j] - 8 * 128;
    }
#else
    for (int i = 0; i < n / 8; i++) {
        sums[i] = 0;
        for (int j = 0; j < 8; j++) sums[i] += q[8 * i + j];
    }
#endif
}

INLINE void set_scale(char *unit, int whole, float scale) {
    if (whole) ((Super *)unit)->scale = scale;
    else ((Small *)unit)->scale = scale;
}

/* Adds the sums to units whose bytes are there: all at the end, when the bytes' stores have left the processor. */
INLINE void describe_units(char *unit, int whole, int64_t count) {
    int32_t eights[SPAN / 8];
    for (; count; count--, unit += whole ? sizeof(Super) : sizeof(Small)) {
        sums_of_eight((const int8_t *)unit, whole ? SPAN : 32, eights);
        if (whole) {
            Super *s = (Super *)unit;
            for (int j = 0; j < 16; j++) {
                const int32_t sum = eights[2 * j] + eights[2 * j + 1];
                if (WIDE) s->sums16[j] = (int16_t)sum;
                else s->starts[j] = -32 * sum;
            }
            for (int j = 0; j < 8; j++)
                s->sums32[j] = (int16_t)(eights[4 * j] + eights[4 * j + 1] + eights[4 * j + 2] + eights[4 * j + 3]);
        } else {
            Small *s = (Small *)unit;
            s->whole = eights[0] + eights[1] + eights[2] + eights[3];
            s->sum = (float)s->whole;
        }
    }
}

INLINE void quantise_row(const float *x, int whole, int64_t inputs, char *out) {
    const int size = whole ? SPAN : 32;
    const int64_t count = inputs / size, bytes = whole ? (int64_t)sizeof(Super) : (int64_t)sizeof(Small);
    for (int64_t u = 0; u < count; u++)
        set_scale(out + u * bytes, whole, quantise_unit(x + u * size, size, (int8_t *)(out + u * bytes)));
    describe_units(out, whole, count);
}

static void quantise_units(const Linear *linear, const float *x, char *out) {
    if (is_super(linear->pieces->bits)) quantise_row(x, 1, linear->inputs, out);
    else quantise_row(x, 0, linear->inputs, out);
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
    for (int i = 0; i < n; i += PER) {
        vo v;
        memcpy(&v, x + i, sizeof v);
        const Wholes q = (Wholes)(v * inverse + to_low_bits) - 0x4b400000, away = q + 126 + ((q < 0) & -252);
        const Wholes upper = __builtin_convertvector(__builtin_convertvector(away, vo) / 254.0f, Wholes);
        put_bytes(high + i, upper);
        put_bytes(low + i, q - 254 * upper); /* never -128, whose sign cannot be changed */
    }
    return scale + bad;
}

/* A row whose inputs differ by orders of magnitude even within a unit, as two rows that add up to it. */
static void quantise_units_twice(const Linear *linear, const float *x, char *high, char *low) {
    const int whole = is_super(linear->pieces->bits), size = whole ? SPAN : 32;
    const int64_t bytes = whole ? (int64_t)sizeof(Super) : (int64_t)sizeof(Small);
    const int64_t count = linear->inputs / size;
    for (int64_t u = 0; u < count; u++) {
        const float scale = halve_unit(x + u * size, size, (int8_t *)(high + u * bytes), (int8_t *)(low + u * bytes));
        set_scale(high + u * bytes, whole, 254.0f * scale);
        set_scale(low + u * bytes, whole, scale);
    }
    describe_units(high, whole, count);
    describe_units(low, whole, count);
}

/* ---------------------------------------------------------------- one row of an embedding */

INLINE int nibble(const uint8_t *lines, int64_t i, int64_t lane) { /* of input i */
    return lines[i / 8 * LINE + 4 * lane + i % 4] >> (i % 8 / 4 * 4) & 15;
}

/* Output `lane` of a piece in float: w = d * q + m, as `gguf` computes it. */
static void read_piece(const struct Piece *piece, int64_t lane, int64_t inputs, float *out) {
    const int64_t bits = piece->bits, size = is_super(bits) ? SPAN : 32;
    const uint8_t *p = piece->data;
    for (int64_t from = 0; from < inputs; from += size, p += piece->step, out += size) {
        const float d = from_half(p + 2 * lane), m = from_half(p + 32 + 2 * lane);
        for (int64_t i = 0; i < size; i++) {
            const uint8_t *tail = p + 320 + 2048; /* after the nibbles of large units */
            const int64_t line = 4 * lane + i % 4, j = i / 32;
            if (bits == Q4_0) out[i] = d * (float)(nibble(p + 32, i, lane) - 8);
            else if (bits == Q4_1) out[i] = d * (float)nibble(p + 64, i, lane) + m;
            else if (bits == Q8_0) out[i] = d * (float)(p[32 + i / 4 * LINE + line] - 128);
            else if (bits == Q6_K) {
                const int high = tail[i / 16 * LINE + line] >> (i / 4 % 4 * 2) & 3;
                const int8_t scale = (int8_t)p[64 + (i / 32 * LANES + lane) * 2 + i / 16 % 2];
                out[i] = d * (float)scale * (float)((nibble(p + 320, i, lane) | high << 4) - 32);
            } else {
                const int fifth = bits == Q5_K ? tail[j * LINE + line] >> (i / 4 % 8) & 1 : 0;
                const float least = m * (float)p[192 + (j / 2 * LANES + lane) * 2 + j % 2];
                out[i] = d * (float)p[64 + j * LANES + lane] * (float)(nibble(p + 320, i, lane) | fifth << 4) - least;
            }
        }
    }
}

/* ---------------------------------------------------------------- one row of an embedding that stays in its file */

typedef struct {
    const uint8_t *rows; /* [V, bytes], as in the file; or NULL */
    int64_t bytes, bits;
} Stored;

INLINE int stored_nibble(const uint8_t *qs, int64_t i, int64_t half) { /* the low ones of `half` bytes, then the high */
    return i < half ? qs[i] & 15 : qs[i - half] >> 4;
}

/* The six-bit scale (0) or minimum (1) of sub-block j of Q4_K and Q5_K. */
INLINE int six_bits(const uint8_t *q, int64_t j, int minimum) {
    if (j < 4) return q[j + 4 * minimum] & 63;
    return (minimum ? q[j + 4] >> 4 : q[j + 4] & 15) | q[j - 4 + 4 * minimum] >> 6 << 4;
}

/* Input i of a block. */
INLINE float stored_value(int64_t bits, const uint8_t *p, int64_t i) {
    const float d = from_half(bits == Q6_K ? p + 208 : p), m = from_half(p + 2);
    if (bits == Q4_0) return d * (float)(stored_nibble(p + 2, i, 16) - 8);
    if (bits == Q4_1) return d * (float)stored_nibble(p + 4, i, 16) + m;
    if (bits == Q8_0) return d * (float)(int8_t)p[2 + i];
    if (bits == Q6_K) {
        const int64_t half = i / 128, r = i % 128;
        const int low = stored_nibble(p + 64 * half, r, 64), high = p[128 + 32 * half + r % 32] >> (r / 32 * 2) & 3;
        return d * (float)(int8_t)p[192 + i / 16] * (float)((low | high << 4) - 32);
    }
    const int64_t j = i / 32;
    const int low = stored_nibble(p + (bits == Q5_K ? 48 : 16) + j / 2 * 32, i % 64, 32);
    const int fifth = bits == Q5_K ? p[16 + i % 32] >> j & 1 : 0;
    const float least = m * (float)six_bits(p + 4, j, 1);
    return d * (float)six_bits(p + 4, j, 0) * (float)(low | fifth << 4) - least;
}

/* Row `row` in float, as `gguf` computes it. */
static void read_stored(const Stored *a, int64_t row, int64_t inputs, float *out) {
    static const int64_t sizes[] = {18, 20, 34, 144, 176, 210};
    const uint8_t *p = a->rows + row * a->bytes;
    if (a->bits == F32) memcpy(out, p, (size_t)inputs * sizeof *out);
    else if (a->bits == BF16) read_row(out, p, 1, inputs);
    else if (a->bits == F16)
        for (int64_t i = 0; i < inputs; i++) out[i] = from_half(p + 2 * i);
    else {
        const int64_t size = is_super(a->bits) ? SPAN : 32;
        for (int64_t from = 0; from < inputs; from += size, p += sizes[a->bits])
            switch (a->bits) { /* as a constant, so that a block's fields are read once */
#define STORED_BLOCK(BITS) \
    case BITS: \
        for (int64_t i = 0; i < (is_super(BITS) ? SPAN : 32); i++) out[from + i] = stored_value(BITS, p, i); \
        break
                STORED_BLOCK(Q4_0);
                STORED_BLOCK(Q4_1);
                STORED_BLOCK(Q8_0);
                STORED_BLOCK(Q4_K);
                STORED_BLOCK(Q5_K);
                STORED_BLOCK(Q6_K);
            }
    }
}

#endif
