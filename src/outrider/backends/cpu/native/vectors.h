/* Building blocks of the kernels: vectors with a fixed order of operations, rows in two types, scratch, threads.
 *
 * A sum's order depends on the width W: x86 machines from AVX2 on agree in every bit, others may differ in the last one;
 * calls on one machine never do. It does not know what the numbers mean.
 */
#ifndef OUTRIDER_VECTORS_H
#define OUTRIDER_VECTORS_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX2__) && defined(__FMA__)
#define W 8 /* with AVX-512 too: the same bits on every such machine */
#if defined(__AVX512F__)
#define ISA "AVX512"
#else
#define ISA "AVX2"
#endif
#elif defined(__aarch64__)
#define W 4
#define ISA "NEON"
#else
#define W 4
#define ISA "128-bit vectors"
#endif

#define INLINE static inline __attribute__((always_inline))
typedef float vf __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
#if defined(__AVX512F__) /* two vectors in one register: each half computes what a vector would */
#define TWIN
typedef float vt __attribute__((vector_size(8 * W)));
typedef uint32_t vtu __attribute__((vector_size(8 * W)));
#endif

/* ---------------------------------------------------------------- vectors */

INLINE vf load(const float *p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void store(float *p, vf v) { memcpy(p, &v, sizeof v); }

INLINE vf load_some(const float *p, int64_t n) { /* n < W values, then zeros */
    vf v = {0};
    memcpy(&v, p, (size_t)n * sizeof *p);
    return v;
}

INLINE vf all(float x) { return x - (vf){0}; }

INLINE vf fma_(vf a, vf b, vf c) { /* a * b + c, rounded once where the machine can */
#if defined(__AVX2__) && defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE vf either(vu mask, vf yes, vf no) { return (vf)((mask & (vu)yes) | (~mask & (vu)no)); }

INLINE float lanes_sum(vf v) {
    float lane[W];
    memcpy(lane, &v, sizeof v);
    for (int step = W / 2; step; step /= 2)
        for (int i = 0; i < step; i++) lane[i] += lane[i + step];
    return lane[0];
}

INLINE float lanes_top(vf v) {
    float lane[W];
    memcpy(lane, &v, sizeof v);
    for (int step = W / 2; step; step /= 2)
        for (int i = 0; i < step; i++) lane[i] = lane[i] > lane[i + step] ? lane[i] : lane[i + step];
    return lane[0];
}

/* Folds halve the number of vectors: lanes of (a, b) are summed in pairs. log2(W) folds turn W vectors into one whose
 * lane i is the sum of vector i, always by the same tree. Lanes are picked within fours, then among fours. */
#define SINGLES(i, off) ((i) / 4 * 4 + (i) % 4 / 2 + (i) % 2 * W + 2 * (off)) /* a0 b0 a1 b1, or a2 b2 a3 b3 */
#define PAIRS(i, off) ((i) / 4 * 4 + (i) % 2 + (i) % 4 / 2 * W + 2 * (off)) /* a0 a1 b0 b1, or a2 a3 b2 b3 */
#define QUADS(i, off) ((i) % 4 + (i) % (W / 2) / 4 * 8 + (i) / (W / 2) * W + 4 * (off)) /* even fours, or odd ones */
#define FOUR(F, i, off) F(i, off), F((i) + 1, off), F((i) + 2, off), F((i) + 3, off)
#if W == 8
#define ORDER(F, off) FOUR(F, 0, off), FOUR(F, 4, off)
#else
#define ORDER(F, off) FOUR(F, 0, off)
#endif
#if defined(__clang__) || __GNUC__ >= 12
#define PICK(F, a, b, off) __builtin_shufflevector(a, b, ORDER(F, off))
#else
#define PICK(F, a, b, off) __builtin_shuffle(a, b, (vu){ORDER(F, off)})
#endif
#define FOLD(F, a, b) (PICK(F, a, b, 0) + PICK(F, a, b, 1))

/* Keeps a value in its register: compilers tend to load it again for every use. */
#if defined(KEEP) /* a test emulates wider registers */
#elif defined(__AVX512F__)
#define KEEP(x) __asm__("" : "+v"(x))
#elif defined(__SSE__)
#define KEEP(x) __asm__("" : "+x"(x))
#elif defined(__aarch64__)
#define KEEP(x) __asm__("" : "+w"(x))
#else
#define KEEP(x)
#endif

/* e to the x: about 1 ulp; 0 below -87.3, infinity above 88.3, NaN stays NaN. V: a vector of floats, U: of its bits. */
#define EXP(V, U, FMA, x) \
    ({ \
        const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer kept in the low bits */ \
        const V zero = {0}, t = FMA(x, zero + 1.44269504f, zero + shift), n = t - shift; \
        const V r = FMA(n, zero + 2.12194440e-4f, FMA(n, zero - 0.693359375f, x)); \
        V p = FMA(zero + 1.9875691500e-4f, r, zero + 1.3981999507e-3f); \
        p = FMA(p, r, zero + 8.3334519073e-3f); \
        p = FMA(p, r, zero + 4.1665795894e-2f); \
        p = FMA(p, r, zero + 1.6666665459e-1f); \
        p = FMA(p, r, zero + 5.0000001201e-1f); \
        p = (FMA(p, r * r, r) + 1.0f) * (V)(((U)t << 23) + 0x3f800000u); \
        const U low = (U)(x < -87.3f), high = (U)(x > 88.3f); \
        (V)((high & (U)(zero + INFINITY)) | (~(low | high) & (U)p)); \
    })

INLINE vf exp_(vf x) { return EXP(vf, vu, fma_, x); }

#ifdef TWIN
INLINE vt twin_fma(vt a, vt b, vt c) { return (vt)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }

INLINE vt twin_exp(vt x) { return EXP(vt, vtu, twin_fma, x); }

INLINE vt twin_load(const float *p) {
    vt v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void twin_store(float *p, vt v) { memcpy(p, &v, sizeof v); }

/* Two vectors that were stored one by one: a load that spans two stores waits until both have left the processor. */
INLINE vt twin_join(const float *p) {
    return (vt)_mm512_insertf64x4(_mm512_castpd256_pd512((__m256d)load(p)), (__m256d)load(p + W), 1);
}

INLINE vf lower_half(vt v) { return (vf)_mm512_castps512_ps256((__m512)v); }

INLINE vf upper_half(vt v) { return (vf)_mm512_extractf64x4_pd((__m512d)v, 1); }
#endif

/* ---------------------------------------------------------------- rows in two types, scratch, threads */

static void read_row(float *restrict out, const void *row, int64_t bf16, int64_t n) {
    if (!bf16) {
        memcpy(out, row, (size_t)n * sizeof *out);
        return;
    }
    const uint16_t *half = row;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = (uint32_t)half[i] << 16;
        memcpy(out + i, &bits, sizeof bits);
    }
}

static void write_row(void *out, int64_t bf16, const float *restrict row, int64_t n) { /* to nearest, ties to even */
    if (!bf16) {
        memcpy(out, row, (size_t)n * sizeof *row);
        return;
    }
    uint16_t *restrict half = out;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, row + i, sizeof bits);
        uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        half[i] = (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
    }
}

INLINE void *at(const void *base, int64_t bf16, int64_t i) { return (char *)base + i * (bf16 ? 2 : 4); }

/* ---------------------------------------------------------------- planes: K and V in 32 or 16 bits */

/* Values of a plane are float32 or, where its address is odd, IEEE's 16 bits at the address before: allocations are
 * aligned, so the lowest bit is free. Each is rounded once, when it is stored. Finite values stay finite. */
INLINE int is_half(const void *plane) { return (int)((uintptr_t)plane & 1); }

INLINE const char *in_plane(const void *plane, int64_t i) { /* where value i is */
    return (const char *)plane + (is_half(plane) ? 2 * i - 1 : 4 * i);
}

INLINE float half_to_float(uint16_t h) {
    uint32_t bits = (uint32_t)(h & 0x7fffu) << 13;
    float x;
    memcpy(&x, &bits, sizeof x);
    x *= 0x1p112f; /* the exponents differ by 112; denormals become normal numbers */
    memcpy(&bits, &x, sizeof bits);
    bits |= (h & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
    bits |= (uint32_t)(h & 0x8000u) << 16;
    memcpy(&x, &bits, sizeof x);
    return x;
}

INLINE uint16_t float_to_half(float x) { /* to nearest, ties to even; |x| <= 65504 or NaN */
    uint32_t bits, sign;
    memcpy(&bits, &x, sizeof bits);
    sign = bits >> 16 & 0x8000u;
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
    if (bits < 0x38800000u) { /* denormal in 16 bits: the sum with 0.5 has its last bit where they have theirs */
        float sum;
        memcpy(&sum, &bits, sizeof sum);
        sum += 0.5f;
        memcpy(&bits, &sum, sizeof bits);
        return (uint16_t)(sign | (bits - 0x3f000000u));
    }
    return (uint16_t)(sign | ((bits + 0xfffu + (bits >> 13 & 1u) - 0x38000000u) >> 13));
}

#ifdef TWIN
INLINE vt half_twin(const void *h) { return (vt)_mm512_cvtph_ps(_mm256_loadu_si256(h)); }

INLINE vt half_pair(const void *low, const void *high) { /* W values each */
    const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(low)), _mm_loadu_si128(high), 1);
    return (vt)_mm512_cvtph_ps(both);
}
#endif

/* n values from `at` on, which `in_plane` found. */
static void read_plane(float *restrict out, const char *at, int64_t n, int half) {
    if (!half) {
        memcpy(out, at, (size_t)n * sizeof *out);
        return;
    }
    const uint16_t *h = (const uint16_t *)at;
    int64_t i = 0;
#if defined(TWIN)
    for (; i + 16 <= n; i += 16) twin_store(out + i, half_twin(h + i));
#endif
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const void *)(h + i))));
#elif defined(__aarch64__)
    for (; i + 4 <= n; i += 4) vst1q_f32(out + i, vcvt_f32_f16(vld1_f16((const float16_t *)(h + i))));
#endif
    for (; i < n; i++) out[i] = half_to_float(h[i]);
}

static void write_plane(void *plane, int64_t at, const float *restrict row, int64_t n) {
    char *to = (char *)in_plane(plane, at);
    if (!is_half(plane)) {
        memcpy(to, row, (size_t)n * sizeof *row);
        return;
    }
    uint16_t *h = (uint16_t *)to;
    int64_t i = 0;
#if defined(__F16C__) && W == 8
    for (; i + W <= n; i += W) {
        vf x = load(row + i), most = all(65504.0f);
        x = either((vu)(x > most), most, either((vu)(x < -most), -most, x));
        x = either((vu)(x != x), (vf)(((vu)x & 0x80000000u) | 0x7fc00000u), x); /* one NaN, as below */
        _mm_storeu_si128((void *)(h + i), _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
    }
#endif
    for (; i < n; i++) {
        const float x = row[i] > 65504.0f ? 65504.0f : row[i] < -65504.0f ? -65504.0f : row[i];
        h[i] = float_to_half(x);
    }
}

INLINE int64_t padded(int64_t n) { return (n + W - 1) / W * W; }

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* Growing buffers that each thread keeps for the next call: new ones would cost page faults in every layer. */
static _Thread_local char *scratch_base[4];

static float *scratch(int which, int64_t floats) {
    static _Thread_local size_t held[4];
    char **base = scratch_base;
    const size_t need = (size_t)floats * sizeof(float) + 64;
    if (need > held[which]) {
        free(base[which]);
        base[which] = malloc(need + need / 2);
        held[which] = base[which] ? need + need / 2 : 0;
    }
    return base[which] ? (float *)(((uintptr_t)base[which] + 63) & ~(uintptr_t)63) : NULL;
}

static void free_scratch(void) { /* at the end of a thread of our own */
    for (int i = 0; i < 4; i++) free(scratch_base[i]);
}

/* Threads may differ in how they treat denormals (torch.set_flush_denormal); all work runs in one mode. */
#if defined(__SSE__)
#define PLAIN_MODE \
    unsigned mode = _mm_getcsr(); \
    _mm_setcsr(0x1f80)
#define OLD_MODE _mm_setcsr(mode)
#elif defined(__aarch64__)
#define PLAIN_MODE \
    uint64_t mode; \
    __asm__ volatile("mrs %0, fpcr\n\tmsr fpcr, xzr" : "=r"(mode))
#define OLD_MODE __asm__ volatile("msr fpcr, %0" : : "r"(mode))
#else
#define PLAIN_MODE
#define OLD_MODE
#endif

typedef int (*Work)(const void *job, int64_t part); /* non-zero: no memory */

static int spread(Work work, const void *job, int64_t parts, int64_t threads) {
    int failed = 0;
    if (parts <= 1 || threads <= 1) {
        PLAIN_MODE;
        for (int64_t i = 0; i < parts; i++) failed |= work(job, i);
        OLD_MODE;
        return failed;
    }
#pragma omp parallel for schedule(dynamic) num_threads((int)threads) reduction(| : failed)
    for (int64_t i = 0; i < parts; i++) {
        PLAIN_MODE;
        failed |= work(job, i);
        OLD_MODE;
    }
    return failed;
}

#endif
