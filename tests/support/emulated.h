/* VNNI's instructions in plain C, for a processor with AVX2: included before kernels, with -DEMULATE=256 (AVX-VNNI) or
 * -DEMULATE=512 (AVX-512). It shows that these branches of the kernels compute what the others do. */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#if EMULATE == 512
#define __AVX512VNNI__ 1
#define __AVX512BW__ 1
#else
#define __AVXVNNI__ 1
#endif

#define KEEP(x) /* a vector of 512 bits has no register here */

static inline __attribute__((always_inline)) void dot_bytes(int32_t *sum, const uint8_t *a, const int8_t *b, int lanes) {
    for (int i = 0; i < 4 * lanes; i++) sum[i / 4] += a[i] * b[i];
}

static inline __attribute__((always_inline)) void dot_words(int32_t *sum, const int16_t *a, const int16_t *b, int lanes) {
    for (int i = 0; i < 2 * lanes; i++) sum[i / 2] += a[i] * b[i];
}

#define EMULATED(name, vector, dot, left, right, lanes) \
    static inline __attribute__((always_inline)) vector name(vector sum, vector a, vector b) { \
        int32_t total[lanes]; \
        left x[sizeof a / sizeof(left)]; \
        right y[sizeof b / sizeof(right)]; \
        memcpy(total, &sum, sizeof sum); \
        memcpy(x, &a, sizeof a); \
        memcpy(y, &b, sizeof b); \
        dot(total, x, y, lanes); \
        memcpy(&sum, total, sizeof sum); \
        return sum; \
    }
EMULATED(emulated_bytes_256, __m256i, dot_bytes, uint8_t, int8_t, 8)
EMULATED(emulated_words_256, __m256i, dot_words, int16_t, int16_t, 8)
EMULATED(emulated_bytes_512, __m512i, dot_bytes, uint8_t, int8_t, 16)
EMULATED(emulated_words_512, __m512i, dot_words, int16_t, int16_t, 16)

typedef int32_t sixteen __attribute__((vector_size(64)));

#define _mm256_dpbusd_avx_epi32 emulated_bytes_256
#define _mm256_dpwssd_avx_epi32 emulated_words_256
#define _mm512_dpbusd_epi32 emulated_bytes_512
#define _mm512_dpwssd_epi32 emulated_words_512
#define _mm512_set1_epi32(x) ((__m512i)((x) + (sixteen){0}))
#define _mm512_add_epi32(a, b) ((__m512i)((sixteen)(a) + (sixteen)(b)))
#define _mm512_mullo_epi32(a, b) ((__m512i)((sixteen)(a) * (sixteen)(b)))
