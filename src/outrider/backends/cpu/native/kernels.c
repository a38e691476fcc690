/* The operations of a decoder pass between its products, on a CPU: norm, rope, attention, gated activation.
 *
 * Promise: a row's result is the same bits whichever rows share the call and however many threads there are.
 * It holds by construction. Every sum has one order, given by the row alone: W lanes, each in ascending order, then
 * one fixed tree. Short tails are padded with zeros and run through the same instructions. Products and sums fuse
 * only where `fma_` is written (build with -ffp-contract=off, never with -ffast-math). Blocks, tiles and parts decide
 * which thread computes a number, never how.
 *
 * It knows rows, slots and planes; it does not know models, sequences or drafts. Callers check shapes and types. Every
 * function takes one struct whose fields are 8 bytes each, and returns non-zero if there is no memory.
 */
#include "vectors.h"

#include "attend.h"

/* Rows of one part of a job: enough elements to be worth waking another thread for. */
INLINE int64_t block_of(int64_t width) { return most(1, 32768 / most(1, width)); }

static int by_blocks(Work work, const void *job, int64_t rows, int64_t block, int64_t threads) {
    return spread(work, job, (rows + block - 1) / block, threads);
}

static float inverse_rms(const float *x, int64_t n, float eps) {
    vf sum = {0};
    int64_t i = 0;
    for (; i + W <= n; i += W) sum = fma_(load(x + i), load(x + i), sum);
    const vf rest = load_some(x + i, n - i);
    sum = fma_(rest, rest, sum);
    return 1.0f / sqrtf(lanes_sum(sum) / (float)n + eps);
}

/* ---------------------------------------------------------------- x += delta, then norm */

typedef struct {
    float *x; /* [T, H] */
    const void *delta; /* [T, H] or NULL */
    const float *weight; /* [H] */
    const float *bias; /* [H], or NULL: an RMS norm; else a layer norm, which subtracts the mean */
    void *out; /* [T, H] */
    int64_t rows, width;
    double eps;
    int64_t delta_bf16, out_bf16, threads;
} Norm;

static float mean(const float *x, int64_t n) {
    vf sum = {0};
    int64_t i = 0;
    for (; i + W <= n; i += W) sum += load(x + i);
    sum += load_some(x + i, n - i);
    return lanes_sum(sum) / (float)n;
}

/* x - its mean, scaled to a variance of one; then gain and bias. `row` may be x. */
static void layer_normed(float *row, const float *x, const float *weight, const float *bias, int64_t n, float eps) {
    const float middle = mean(x, n);
    for (int64_t i = 0; i < n; i++) row[i] = x[i] - middle;
    const float scale = inverse_rms(row, n, eps);
    for (int64_t i = 0; i < n; i++) row[i] = row[i] * scale * weight[i] + bias[i];
}

static int norm_rows(const void *job, int64_t part) {
    const Norm *a = job;
    const int64_t n = a->width, block = block_of(n);
    float *restrict row = scratch(0, n);
    if (!row) return 1;
    for (int64_t t = part * block; t < least(a->rows, (part + 1) * block); t++) {
        float *restrict x = a->x + t * n;
        if (a->delta) {
            read_row(row, at(a->delta, a->delta_bf16, t * n), a->delta_bf16, n);
            for (int64_t i = 0; i < n; i++) x[i] += row[i];
        }
        if (a->bias) layer_normed(row, x, a->weight, a->bias, n, (float)a->eps);
        else {
            const float scale = inverse_rms(x, n, (float)a->eps);
            for (int64_t i = 0; i < n; i++) row[i] = x[i] * scale * a->weight[i];
        }
        write_row(at(a->out, a->out_bf16, t * n), a->out_bf16, row, n);
    }
    return 0;
}

int outrider_add_norm(const Norm *a) { return by_blocks(norm_rows, a, a->rows, block_of(a->width), a->threads); }

/* ---------------------------------------------------------------- activation(gate) * up, or activation(x) */

typedef struct {
    const void *gate_up; /* [T, 2I]; unpaired: [T, I] */
    void *out; /* [T, I] */
    /* kind: 0 silu, 1 gelu by its tanh approximation, 2 silu with limits, 3 relu, 4 gelu */
    int64_t rows, width, bf16, kind, paired, threads;
} Gate;

INLINE int64_t gate_block(int64_t width) { return block_of(4 * width); } /* an exponential costs several sums */

INLINE vf limited(vf x, float low) { /* to low .. 7; NaN stays NaN */
    x = either((vu)(x > 7.0f), all(7.0f), x);
    return either((vu)(x < low), all(low), x);
}

/* Most activations are g * sigmoid(s) * u: s is g, twice gelu's inner polynomial, or 1.702 g where both are limited. */
INLINE vf gated(vf g, vf u, int64_t kind) {
    if (kind == 3) return either((vu)(g < 0.0f), all(0.0f), g) * u;
    if (kind == 4) {
        for (int lane = 0; lane < W; lane++) g[lane] *= 0.5f * erfcf(g[lane] * -0.70710678118654752f);
        return g * u;
    }
    if (kind == 2) {
        g = limited(g, -INFINITY);
        return g / (1.0f + exp_(-1.702f * g)) * (limited(u, -7.0f) + 1.0f);
    }
    const vf s = kind ? 1.5957691216057308f * (g + 0.044715f * g * g * g) : g;
    return g / (1.0f + exp_(-s)) * u;
}

static int gate_rows(const void *job, int64_t part) {
    const Gate *a = job;
    const int64_t n = a->width, wide = padded(n), block = gate_block(n);
    float *gate = scratch(0, 2 * wide), *up = gate + wide;
    if (!gate) return 1;
    memset(gate, 0, (size_t)(2 * wide) * sizeof *gate);
    for (int64_t t = part * block; t < least(a->rows, (part + 1) * block); t++) {
        read_row(gate, at(a->gate_up, a->bf16, (1 + a->paired) * t * n), a->bf16, n);
        if (a->paired) read_row(up, at(a->gate_up, a->bf16, (2 * t + 1) * n), a->bf16, n);
        for (int64_t i = 0; i < wide; i += W)
            store(gate + i, gated(load(gate + i), a->paired ? load(up + i) : all(1.0f), a->kind));
        write_row(at(a->out, a->bf16, t * n), a->bf16, gate, n);
    }
    return 0;
}

int outrider_gate_mul(const Gate *a) { return by_blocks(gate_rows, a, a->rows, gate_block(a->width), a->threads); }

/* ---------------------------------------------------------------- each row's largest value and its first index */

typedef struct {
    const float *x; /* [R, V] */
    float *top; /* [R]; NaN if there is one in the row */
    int64_t *place; /* [R] */
    float *share; /* [R] the largest one's part of the row's softmax; or NULL */
    int64_t rows, width, threads;
} Top;

enum {
    PIECE = 2048, /* values of a row that are searched and summed apart, so that threads can share a row */
    STRIP = 16 * W, /* values that are searched for the place of the largest one */
};

typedef struct {
    float top; /* the largest value; NaN if there is one */
    int64_t place; /* the first in the row that has it */
} Best;

INLINE Best better(Best first, Best second) { return first.top != first.top || second.top <= first.top ? first : second; }

INLINE int64_t pieces_of(int64_t width) { return (width + PIECE - 1) / PIECE; }

INLINE Best best_of_row(const Best *pieces, int64_t count) {
    Best best = pieces[0];
    for (int64_t i = 1; i < count; i++) best = better(best, pieces[i]);
    return best;
}

INLINE int64_t end_of_piece(int64_t from, int64_t width) { return least(from + PIECE, width); }

/* Of the piece of a row that begins at `from`. */
static Best best_of_piece(const float *x, int64_t from, int64_t width) {
    const int64_t end = end_of_piece(from, width);
    Best best = {-INFINITY, from};
    int64_t nan = 0, i = from;
    vu strange = {0};
    for (; i + STRIP <= end; i += STRIP) {
        vf most_of = all(-INFINITY);
        for (int64_t j = i; j < i + STRIP; j += W) {
            const vf v = load(x + j);
            strange |= (vu)(v != v);
            most_of = either((vu)(v > most_of), v, most_of);
        }
        best = better(best, (Best){lanes_top(most_of), i});
    }
    for (int lane = 0; lane < W; lane++) nan |= strange[lane];
    for (; i < end; i++) {
        nan |= x[i] != x[i];
        best = better(best, (Best){x[i], i});
    }
    if (nan) return (Best){NAN, 0};
    while (x[best.place] != best.top) best.place++; /* within its strip */
    return best;
}

/* Of the same: the sum of exponentials, each divided by that of `top`. */
static float weight_of_piece(const float *x, int64_t from, int64_t width, float top) {
    const int64_t end = end_of_piece(from, width);
    vf sum = {0};
    int64_t i = from;
#ifdef TWIN
    for (; i + 2 * W <= end; i += 2 * W) {
        const vt both = twin_exp(twin_load(x + i) - top);
        sum += lower_half(both);
        sum += upper_half(both);
    }
#endif
    for (; i + W <= end; i += W) sum += exp_(load(x + i) - top);
    float total = lanes_sum(sum);
    for (; i < end; i++) total += expf(x[i] - top);
    return total;
}

static int top_of_row(const void *job, int64_t t) {
    const Top *a = job;
    const float *x = a->x + t * a->width;
    Best best = {-INFINITY, 0};
    for (int64_t from = 0; from < a->width; from += PIECE) best = better(best, best_of_piece(x, from, a->width));
    a->top[t] = best.top;
    a->place[t] = best.place;
    if (!a->share) return 0;
    float total = 0.0f;
    for (int64_t from = 0; from < a->width; from += PIECE) total += weight_of_piece(x, from, a->width, best.top);
    a->share[t] = 1.0f / total;
    return 0;
}

int outrider_top(const Top *a) { return spread(top_of_row, a, a->rows, a->threads); }

/* ---------------------------------------------------------------- a choice under keyed noise: engine.sampling */

typedef struct {
    const float *x; /* [R, V] without NaN */
    const uint64_t *keys; /* [R] */
    const double *temperatures; /* [R] 0: the row is left alone */
    int64_t *place; /* [R] in: the first index of the largest value; out: that of the largest x / T + noise */
    int64_t rows, width, threads;
} Choice;

static inline uint32_t noise_bits(uint64_t key, int64_t token) {
    uint64_t z = (uint64_t)token * 0x9E3779B97F4A7C15u + key;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (uint32_t)((z ^ (z >> 31)) >> 32);
}

static inline double gumbel(uint32_t bits) { return -log(-log(((double)bits + 0.5) / 4294967296.0)); }

/* No noise exceeds -log(1 - u), and 1 - u is at least 2^-(n + 1) where the inverted bits begin with n zeros: most
   tokens are out of reach by that alone, without a logarithm. */
static int choose_in_row(const void *job, int64_t t) {
    const Choice *a = job;
    const float *x = a->x + t * a->width;
    const double temperature = a->temperatures[t], per = 1.0 / temperature, slack = 1e-9;
    if (temperature == 0.0) return 0;
    const uint64_t key = a->keys[t];
    int64_t best = a->place[t];
    double most = (double)x[best] / temperature + gumbel(noise_bits(key, best));
    for (int64_t i = 0; i < a->width; i++) {
        const uint32_t bits = noise_bits(key, i);
        const int zeros = bits == UINT32_MAX ? 32 : __builtin_clz(~bits);
        if ((double)x[i] * per + 0.69314718055994531 * (zeros + 1) + slack < most) continue;
        const double noised = (double)x[i] / temperature + gumbel(bits);
        if (noised > most || (noised == most && i < best)) {
            most = noised;
            best = i;
        }
    }
    a->place[t] = best;
    return 0;
}

int outrider_choose(const Choice *a) { return spread(choose_in_row, a, a->rows, a->threads); }

/* ---------------------------------------------------------------- rope; k and v into their slots */

typedef struct {
    const void *qkv; /* [T, (heads + 2 kv_heads) d] */
    const float *cos, *sin; /* [T, half] */
    float *q; /* [T, heads, d] */
    void *k, *v; /* [S, kv_heads, d] planes */
    const int64_t *slots; /* [T] */
    const float *q_norm, *k_norm; /* [d] or NULL */
    int64_t rows, heads, kv_heads, d, half;
    double eps;
    int64_t bf16, threads;
} Rope;

INLINE int64_t rope_width(const Rope *a) { return (a->heads + 2 * a->kv_heads) * a->d; }

static void turn_head(const Rope *a, float *restrict x, int64_t t, const float *weight) {
    if (weight) {
        const float scale = inverse_rms(x, a->d, (float)a->eps);
        for (int64_t i = 0; i < a->d; i++) x[i] = x[i] * scale * weight[i];
    }
    const float *restrict cos = a->cos + t * a->half, *restrict sin = a->sin + t * a->half;
    for (int64_t i = 0; i < a->half; i++) {
        const float first = x[i], second = x[i + a->half];
        x[i] = first * cos[i] - second * sin[i];
        x[i + a->half] = second * cos[i] + first * sin[i];
    }
}

/* A kv head of a row, and the queries that read it. head: d floats of scratch. */
static void rope_group(const Rope *a, int64_t t, int64_t kv, float *head) {
    const int64_t d = a->d, group = a->heads / a->kv_heads, first = t * rope_width(a), to = a->slots[t] * a->kv_heads + kv;
    for (int64_t h = kv * group; h < (kv + 1) * group; h++) {
        float *q = a->q + (t * a->heads + h) * d;
        read_row(q, at(a->qkv, a->bf16, first + h * d), a->bf16, d);
        turn_head(a, q, t, a->q_norm);
    }
    read_row(head, at(a->qkv, a->bf16, first + (a->heads + kv) * d), a->bf16, d);
    turn_head(a, head, t, a->k_norm);
    write_plane(a->k, to * d, head, d);
    read_row(head, at(a->qkv, a->bf16, first + (a->heads + a->kv_heads + kv) * d), a->bf16, d);
    write_plane(a->v, to * d, head, d);
}

static void rope_row(const Rope *a, int64_t t, float *head) {
    for (int64_t kv = 0; kv < a->kv_heads; kv++) rope_group(a, t, kv, head);
}

static int rope_rows(const void *job, int64_t part) {
    const Rope *a = job;
    const int64_t width = rope_width(a), block = block_of(width);
    float *head = scratch(0, a->d);
    if (!head) return 1;
    for (int64_t t = part * block; t < least(a->rows, (part + 1) * block); t++) rope_row(a, t, head);
    return 0;
}

int outrider_rope_store(const Rope *a) { return by_blocks(rope_rows, a, a->rows, block_of(rope_width(a)), a->threads); }

/* ---------------------------------------------------------------- attention, in attend.h */

int outrider_attend(const Attend *a) { return attend(a); }

/* ---------------------------------------------------------------- a product in float32, in product.h */

#include "product.h"

int outrider_product(const Dense *a) { return dense(a); }

/* ---------------------------------------------------------------- a whole quantised pass, in pass.h */

#include "pass.h"

int outrider_int8_pass(const Pass *p) { return int8_pass(p); }

/* ---------------------------------------------------------------- a head's whole draft, in chain.h */

#include "chain.h"

int outrider_chain(const Chain *c) { return draft_chains(c); }

const char *outrider_dot_isa(void) { return DOT_ISA; }

const char *outrider_isa(void) { return ISA; }
