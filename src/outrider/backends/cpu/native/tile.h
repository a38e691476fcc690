/* Attention of a few queries that share a line and a kv head, one block of keys at a time.
 *
 * Lists of keys are divided into blocks by a key's index in its list. Within a block a score is one sum over d, a
 * weight one exponential, an output one sum over the keys in order; a key's index decides its lane in the sum of the
 * weights. None of it depends on the tile: its rows are processed together only so that K and V are read once.
 * A key outside a row's list is never multiplied.
 */
#ifndef OUTRIDER_TILE_H
#define OUTRIDER_TILE_H

#include "vectors.h"

/* Queries that share a register tile: 32 registers hold 6 x 4 sums, 16 registers 2 x 4. */
#if defined(__AVX512F__)
#define QUERIES 6
#elif defined(__aarch64__)
#define QUERIES 4
#else
#define QUERIES 2
#endif

enum {
    BLOCK = 256, /* keys of a block; a multiple of W. Another number gives other bits */
    VALUES = 64, /* value rows that are read together */
    AHEAD = 64, /* keys that are prefetched before they are needed */
    TILE = 48, /* queries of a tile, at most */
    STRIDE = BLOCK + 16, /* scores are written W at a time, and may run over */
};

typedef struct {
    const float *q; /* [T, heads, d] */
    const void *k, *v; /* [S, kv_heads, d] planes */
    const int32_t *table; /* [lines, table_stride] */
    const int64_t *lines, *context; /* [T], [T] */
    const int32_t *ancestors; /* [T, depth] or NULL */
    const float *sinks; /* [heads] or NULL: a score of each head that takes its share of the weights and adds nothing */
    const float *bias; /* [heads, bias_stride] or NULL: added to a score, at index shift - key's index in the list */
    const int64_t *shift; /* [T] */
    void *out; /* [T, heads, d] */
    int64_t table_stride, depth, rows, heads, kv_heads, d, window;
    double scale, cap; /* cap > 0: a score s becomes cap * tanh(s / cap) */
    int64_t bias_stride, bf16, threads;
} Attend;

typedef struct {
    float best, total; /* the largest score; the sum of exp(score - best) */
    float *sum; /* [wide] of exp(score - best) * value */
} State; /* of a query, after some of its keys */

/* Consecutive queries of one line and one kv head, row by row. */
typedef struct {
    const Attend *a;
    const int64_t *ends; /* [T] keys in a row's list */
    int64_t kv, first, count, group; /* first: row * group + head in group */
    int64_t from, to, low, high; /* the block's keys; keys low .. high-1 are in every row's list */
    int64_t wide; /* d, padded */
    float *q, *scores, *copy; /* [TILE, wide], [TILE, STRIDE], [VALUES, wide] */
    int64_t offsets[BLOCK]; /* where keys of the block begin in the planes, in values; see `locate` */
    State state[TILE]; /* of this block */
} Tile;

INLINE int64_t row_of(const Tile *tile, int64_t query) { return (tile->first + query) / tile->group; }

INLINE int64_t head_of(const Tile *tile, int64_t query) { /* row * heads + head */
    return row_of(tile, query) * tile->a->heads + tile->kv * tile->group + (tile->first + query) % tile->group;
}

/* A row's keys within the block are start .. end-1: none, if end <= start. */
INLINE int64_t start_of(const Tile *tile, int64_t t) {
    return most(tile->from, tile->a->window > 0 ? tile->ends[t] - tile->a->window : 0);
}

INLINE int64_t end_of(const Tile *tile, int64_t t) { return least(tile->to, tile->ends[t]); }

/* ---------------------------------------------------------------- a register tile */

/* W scores for each of Q queries: lane by lane over d, then a tree of folds. */
INLINE void score(int Q, const float *q, int64_t wide, const float *const *keys, float *scores) {
    vf part[QUERIES][W / 4];
    for (int quad = 0; quad < W / 4; quad++) {
        vf sum[QUERIES][4] = {{{0}}};
        const float *const *key = keys + 4 * quad;
        for (int64_t c = 0; c < wide; c += W) {
            vf k[4];
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                k[j] = load(key[j] + c);
                KEEP(k[j]);
            }
#pragma GCC unroll 6
            for (int i = 0; i < Q; i++) {
                vf x = load(q + i * wide + c);
                KEEP(x);
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++) sum[i][j] = fma_(x, k[j], sum[i][j]);
            }
        }
#pragma GCC unroll 6
        for (int i = 0; i < Q; i++)
            part[i][quad] = FOLD(PAIRS, FOLD(SINGLES, sum[i][0], sum[i][1]), FOLD(SINGLES, sum[i][2], sum[i][3]));
    }
#pragma GCC unroll 6
    for (int i = 0; i < Q; i++) {
#if W == 8
        part[i][0] = FOLD(QUADS, part[i][0], part[i][1]);
#endif
        store(scores + i * STRIDE, part[i][0]);
    }
}

#ifdef TWIN
/* As FOLD, in each half. */
#define TWIN_AT(F, i, off) \
    (F((i) % W, off) % W + (i) / W * W + F((i) % W, off) / W * 2 * W)
#define TWIN_FOUR(F, i, off) TWIN_AT(F, i, off), TWIN_AT(F, (i) + 1, off), TWIN_AT(F, (i) + 2, off), TWIN_AT(F, (i) + 3, off)
#define TWIN_ORDER(F, off) \
    TWIN_FOUR(F, 0, off), TWIN_FOUR(F, 4, off), TWIN_FOUR(F, 8, off), TWIN_FOUR(F, 12, off)
#define TWIN_PICK(F, a, b, off) __builtin_shuffle(a, b, (vtu){TWIN_ORDER(F, off)})
#define TWIN_FOLD(F, a, b) (TWIN_PICK(F, a, b, 0) + TWIN_PICK(F, a, b, 1))

/* 2W scores for each of Q queries, as `score` computes them. pairs: [wide / W][W][2][W], keys i and i + W side by side;
 * or NULL: `halves` points to 2W keys of 16 bits. */
INLINE void score_pairs(int Q, const float *q, int64_t wide, const float *pairs, const char *const *halves,
                        float *scores) {
    vt part[QUERIES][W / 4];
#pragma GCC unroll 2
    for (int quad = 0; quad < W / 4; quad++) {
        vt sum[QUERIES][4] = {{{0}}};
        for (int64_t c = 0; c < wide; c += W) {
            vt k[4];
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                const int i = 4 * quad + j;
                k[j] = pairs ? twin_load(pairs + 2 * W * (c + i)) : half_pair(halves[i] + 2 * c, halves[i + W] + 2 * c);
                KEEP(k[j]);
            }
#pragma GCC unroll 6
            for (int i = 0; i < Q; i++) {
                vt x = (vt)_mm512_broadcast_f64x4(_mm256_loadu_pd((const void *)(q + i * wide + c)));
                KEEP(x);
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++) sum[i][j] = twin_fma(x, k[j], sum[i][j]);
            }
        }
#pragma GCC unroll 6
        for (int i = 0; i < Q; i++)
            part[i][quad] = TWIN_FOLD(PAIRS, TWIN_FOLD(SINGLES, sum[i][0], sum[i][1]),
                                      TWIN_FOLD(SINGLES, sum[i][2], sum[i][3]));
    }
#pragma GCC unroll 6
    for (int i = 0; i < Q; i++) twin_store(scores + i * STRIDE, TWIN_FOLD(QUADS, part[i][0], part[i][1]));
}

/* `weigh` for pairs of vectors. half: values of 16 bits. */
INLINE void weigh_pairs(int Q, int C, int half, const float *p, const char *const *values, int64_t n,
                        const State *state, int64_t c) {
    vt sum[QUERIES][4];
#pragma GCC unroll 6
    for (int i = 0; i < Q; i++)
#pragma GCC unroll 4
        for (int j = 0; j < C; j++) sum[i][j] = twin_load(state[i].sum + c + 2 * j * W);
    for (int64_t key = 0; key < n; key++) {
        vt value[4];
#pragma GCC unroll 4
        for (int j = 0; j < C; j++) {
            value[j] = half ? half_twin(values[key] + 2 * (c + 2 * j * W))
                            : twin_load((const float *)values[key] + c + 2 * j * W);
            KEEP(value[j]);
        }
#pragma GCC unroll 6
        for (int i = 0; i < Q; i++) {
            const vt weight = p[i * STRIDE + key] - (vt){0};
#pragma GCC unroll 4
            for (int j = 0; j < C; j++) sum[i][j] = twin_fma(weight, value[j], sum[i][j]);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < Q; i++)
#pragma GCC unroll 4
        for (int j = 0; j < C; j++) twin_store(state[i].sum + c + 2 * j * W, sum[i][j]);
}
#endif

/* Sums of p * values for Q queries and C vectors of d, one key after the other. */
INLINE void weigh(int Q, int C, const float *p, const float *const *values, int64_t n, const State *state, int64_t c) {
    vf sum[QUERIES][4];
    for (int i = 0; i < Q; i++)
        for (int j = 0; j < C; j++) sum[i][j] = load(state[i].sum + c + j * W);
    for (int64_t key = 0; key < n; key++) {
        vf value[4];
#pragma GCC unroll 4
        for (int j = 0; j < C; j++) {
            value[j] = load(values[key] + c + j * W);
            KEEP(value[j]);
        }
#pragma GCC unroll 6
        for (int i = 0; i < Q; i++) {
            const vf weight = all(p[i * STRIDE + key]);
#pragma GCC unroll 4
            for (int j = 0; j < C; j++) sum[i][j] = fma_(weight, value[j], sum[i][j]);
        }
    }
    for (int i = 0; i < Q; i++)
        for (int j = 0; j < C; j++) store(state[i].sum + c + j * W, sum[i][j]);
}

#define BY_QUERIES(n, CALL) /* the number of queries, as a constant */ \
    do { \
        if (n == 1) CALL(1); \
        else if (n == 2 || QUERIES == 2) CALL(2); \
        else if (n == 3) CALL(3 < QUERIES ? 3 : QUERIES); \
        else if (n == 4) CALL(4 < QUERIES ? 4 : QUERIES); \
        else if (n == 5) CALL(5 < QUERIES ? 5 : QUERIES); \
        else CALL(QUERIES); \
    } while (0)

INLINE int64_t take(int64_t left) { /* how many queries next: with tiles of 4, 9 are 3 + 3 + 3, not 4 + 4 + 1 */
    const int64_t turns = (left + QUERIES - 1) / QUERIES;
    return (left + turns - 1) / turns;
}

/* ---------------------------------------------------------------- ranges of keys */

/* Notes where keys j .. end-1 of row t begin: in the slots of its line, then in those of its ancestors. */
static void locate(Tile *tile, int64_t t, int64_t j, int64_t end) {
    const Attend *a = tile->a;
    const int32_t *line = a->table + a->lines[t] * a->table_stride, *own = a->ancestors + t * a->depth;
    const int64_t slot = a->kv_heads * a->d, head = tile->kv * a->d, context = a->context[t];
    for (int64_t i = j; i < least(end, context); i++) tile->offsets[i - tile->from] = line[i] * slot + head;
    for (int64_t i = most(j, context); i < end; i++) tile->offsets[i - tile->from] = own[i - context] * slot + head;
}

INLINE const char *located(const Tile *tile, const void *plane, int64_t j) {
    return in_plane(plane, tile->offsets[j - tile->from]);
}

/* n keys from j on in float32. */
static void find(const Tile *tile, const void *plane, int64_t j, int64_t n, const char **found) {
    const Attend *a = tile->a;
    const int half = is_half(plane);
    for (int64_t i = 0; i < n; i++) {
        found[i] = located(tile, plane, j + i);
        if (tile->wide == a->d && !half) continue;
        float *copy = tile->copy + i * tile->wide; /* the last vector is padded with zeros */
        read_plane(copy, found[i], a->d, half);
        for (int64_t c = a->d; c < tile->wide; c++) copy[c] = 0.0f;
        found[i] = (const char *)copy;
    }
}

/* Prefetches keys, which are scattered, and which the pass over the weights has evicted from the caches. */
INLINE void ask(const Tile *tile, const void *plane, int64_t j, int64_t end) {
    const int64_t bytes = tile->a->d * (is_half(plane) ? 2 : 4);
    for (; j < end; j++) {
        const char *values = located(tile, plane, j);
        for (int64_t c = 0; c < bytes; c += 64) __builtin_prefetch(values + c, 0, 2);
    }
}

#ifdef TWIN
/* n <= 2W keys from j on in the order of `score_pairs`; what is there of others is never used. */
static void pair_keys(const Tile *tile, int64_t j, int64_t n) {
    const int64_t d = tile->a->d;
    const int half = is_half(tile->a->k);
    for (int64_t i = 0; i < n; i++) {
        const char *values = located(tile, tile->a->k, j + i);
        float *to = tile->copy + (2 * (i % W) + i / W) * W;
        int64_t c = 0;
        for (; c + 2 * W <= d; c += 2 * W) {
            const vt v = half ? half_twin(values + 2 * c) : twin_load((const float *)values + c);
            store(to + 2 * W * c, lower_half(v));
            store(to + 2 * W * (c + W), upper_half(v));
        }
        for (; c < d; c += W) {
            float some[W] = {0};
            read_plane(some, values + c * (half ? 2 : 4), least(W, d - c), half);
            store(to + 2 * W * c, load(some));
        }
    }
}

/* Scores of 2W keys from j on, for queries first .. last-1; fewer keys if fewer are left before `end`. */
static void score_pair(const Tile *tile, int64_t first, int64_t last, int64_t j, int64_t end) {
    const int64_t wide = tile->wide, n = least(2 * W, end - j);
    const int few = last - first <= QUERIES && is_half(tile->a->k) && wide == tile->a->d;
    const char *halves[2 * W];
    if (few)
        for (int64_t i = 0; i < 2 * W; i++) halves[i] = located(tile, tile->a->k, j + least(i, n - 1));
    else pair_keys(tile, j, n);
    for (int64_t i = first, queries; i < last; i += queries) {
        queries = take(last - i);
        float *scores = tile->scores + i * STRIDE + (j - tile->from);
#define SCORE_FEW(Q) score_pairs(Q, tile->q + i * wide, wide, NULL, halves, scores)
#define SCORE_PAIRS(Q) score_pairs(Q, tile->q + i * wide, wide, tile->copy, NULL, scores)
        if (few) BY_QUERIES(queries, SCORE_FEW);
        else BY_QUERIES(queries, SCORE_PAIRS);
    }
}
#endif

/* Scores of keys j .. end-1 of row t for queries first .. last-1; up to 2W-1 scores after them are overwritten. */
static void score_keys(Tile *tile, int64_t first, int64_t last, int64_t t, int64_t j, int64_t end) {
    const char *keys[W];
    const int64_t wide = tile->wide;
    if (j >= end) return;
    locate(tile, t, j, end);
    ask(tile, tile->a->k, j, least(end, j + AHEAD));
    for (int64_t step = W; j < end; j += step) {
#ifdef TWIN
        step = end - j > W ? 2 * W : W;
#endif
        ask(tile, tile->a->k, j + AHEAD, least(end, j + AHEAD + step));
        ask(tile, tile->a->v, j, least(end, j + step));
#ifdef TWIN
        if (step == 2 * W) {
            score_pair(tile, first, last, j, end);
            continue;
        }
#endif
        const int64_t n = least(W, end - j);
        find(tile, tile->a->k, j, n, keys);
        for (int64_t i = n; i < W; i++) keys[i] = keys[n - 1];
        for (int64_t i = first, queries; i < last; i += queries) {
            queries = take(last - i);
            float *scores = tile->scores + i * STRIDE + (j - tile->from);
#define SCORE(Q) score(Q, tile->q + i * wide, wide, (const float *const *)keys, scores)
            BY_QUERIES(queries, SCORE);
        }
    }
}

static void weigh_keys(Tile *tile, int64_t first, int64_t last, int64_t t, int64_t j, int64_t end) {
    const char *values[VALUES];
    const int64_t wide = tile->wide;
    int few = 0; /* values of 16 bits are read by one group of queries: as they are */
    if (j >= end) return;
    locate(tile, t, j, end);
#ifdef TWIN
    few = last - first <= QUERIES && is_half(tile->a->v) && tile->a->d % (2 * W) == 0;
#endif
    for (; j < end; j += VALUES) {
        const int64_t keys = least(VALUES, end - j);
        if (few)
            for (int64_t i = 0; i < keys; i++) values[i] = located(tile, tile->a->v, j + i);
        else find(tile, tile->a->v, j, keys, values);
        for (int64_t i = first, n; i < last; i += n) {
            n = take(last - i);
            const float *p = tile->scores + i * STRIDE + (j - tile->from);
            const State *state = tile->state + i;
            int64_t c = 0;
#ifdef TWIN
#define TWIN_WEIGH4(Q) weigh_pairs(Q, 4, 0, p, values, keys, state, c)
#define TWIN_WEIGH1(Q) weigh_pairs(Q, 1, 0, p, values, keys, state, c)
#define HALF_WEIGH4(Q) weigh_pairs(Q, 4, 1, p, values, keys, state, c)
#define HALF_WEIGH1(Q) weigh_pairs(Q, 1, 1, p, values, keys, state, c)
            if (few) {
                for (; c + 8 * W <= wide; c += 8 * W) BY_QUERIES(n, HALF_WEIGH4);
                for (; c < wide; c += 2 * W) BY_QUERIES(n, HALF_WEIGH1);
            }
            for (; c + 8 * W <= wide; c += 8 * W) BY_QUERIES(n, TWIN_WEIGH4);
            for (; c + 2 * W <= wide; c += 2 * W) BY_QUERIES(n, TWIN_WEIGH1);
#endif
#define WEIGH4(Q) weigh(Q, 4, p, (const float *const *)values, keys, state, c)
#define WEIGH1(Q) weigh(Q, 1, p, (const float *const *)values, keys, state, c)
            for (; c + 4 * W <= wide; c += 4 * W) BY_QUERIES(n, WEIGH4);
            for (; c < wide; c += W) BY_QUERIES(n, WEIGH1);
        }
    }
}

/* Every row processes its own keys in order; the keys that all rows of the tile share are processed together.
 *
 *     row 0   start ......[low ........ high]. end
 *     row 1      start ...[low ........ high]...... end
 */
typedef void (*Walk)(Tile *tile, int64_t first, int64_t last, int64_t t, int64_t j, int64_t end);

static void walk_own(Tile *tile, Walk keys, int after) {
    for (int64_t first = 0, last; first < tile->count; first = last) {
        const int64_t t = row_of(tile, first), start = start_of(tile, t), end = end_of(tile, t);
        last = least(tile->count, (t + 1) * tile->group - tile->first);
        if (after) keys(tile, first, last, t, most(tile->high, start), end);
        else keys(tile, first, last, t, start, least(tile->low, end));
    }
}

static void walk(Tile *tile, Walk keys) {
    walk_own(tile, keys, 0);
    keys(tile, 0, tile->count, row_of(tile, 0), tile->low, tile->high);
    walk_own(tile, keys, 1);
}

/* Scores start .. end-1 and their neighbours in the same vectors, softly limited. */
static void soften(float *scores, int64_t start, int64_t end, float cap) {
    for (int64_t j = start / W * W; j < padded(end); j += W)
        store(scores + j, cap - 2.0f * cap / (1.0f + exp_(load(scores + j) * (2.0f / cap))));
}

/* Adds to scores start .. end-1 what the distance between query and key is worth. */
static void bend(const Tile *tile, int64_t query, float *scores, int64_t start, int64_t end) {
    const Attend *a = tile->a;
    const int64_t head = head_of(tile, query) % a->heads;
    const float *bias = a->bias + head * a->bias_stride + a->shift[row_of(tile, query)] - tile->from;
    for (int64_t j = start; j < end; j++) scores[j] += bias[-j];
}

/* Scores start .. end-1 become weights. */
static void softmax(State *state, float *scores, int64_t start, int64_t end) {
    const int64_t low = start / W * W, high = padded(end);
    for (int64_t j = low; j < start; j++) scores[j] = -INFINITY;
    for (int64_t j = end; j < high; j++) scores[j] = -INFINITY;
    vf top = all(-INFINITY), sum = {0};
    for (int64_t j = low; j < high; j += W) {
        const vf x = load(scores + j);
        top = either((vu)(x > top), x, top);
    }
    state->best = lanes_top(top);
    int64_t j = low;
#ifdef TWIN
    for (; j + 2 * W <= high; j += 2 * W) {
        const vt p = twin_exp(twin_load(scores + j) - state->best);
        twin_store(scores + j, p);
        sum += lower_half(p);
        sum += upper_half(p);
    }
#endif
    for (; j < high; j += W) {
        const vf p = exp_(load(scores + j) - state->best);
        store(scores + j, p);
        sum += p;
    }
    state->total = lanes_sum(sum);
}

static void load_queries(Tile *tile) {
    const Attend *a = tile->a;
    const float scale = (float)a->scale;
    for (int64_t i = 0; i < tile->count; i++) {
        float *q = tile->q + i * tile->wide;
        for (int64_t c = 0; c < a->d; c++) q[c] = a->q[head_of(tile, i) * a->d + c] * scale;
        for (int64_t c = a->d; c < tile->wide; c++) q[c] = 0.0f;
    }
}

/* The states of one block. A query without keys in it has total 0; then its best and sum mean nothing. */
static void attend_block(Tile *tile, int64_t block) {
    tile->from = tile->low = block * BLOCK;
    tile->to = tile->high = tile->from + BLOCK;
    for (int64_t t = row_of(tile, 0); t <= row_of(tile, tile->count - 1); t++) {
        tile->low = most(tile->low, start_of(tile, t));
        tile->high = least(tile->high, least(tile->a->context[t], end_of(tile, t)));
    }
    tile->high = most(tile->low, tile->high);
    walk(tile, score_keys);
    for (int64_t i = 0; i < tile->count; i++) {
        const int64_t t = row_of(tile, i), start = start_of(tile, t), end = end_of(tile, t);
        tile->state[i].total = 0.0f;
        float *scores = tile->scores + i * STRIDE;
        if (start < end && tile->a->cap > 0.0) soften(scores, start - tile->from, end - tile->from, (float)tile->a->cap);
        if (start < end && tile->a->bias) bend(tile, i, scores, start - tile->from, end - tile->from);
        if (start < end) softmax(tile->state + i, scores, start - tile->from, end - tile->from);
        memset(tile->state[i].sum, 0, (size_t)tile->wide * sizeof(float));
    }
    walk(tile, weigh_keys);
}

/* The state of a query before its first key; head: row * heads + head. */
INLINE State before(const Attend *a, int64_t head, float *sum) {
    return a->sinks ? (State){a->sinks[head % a->heads], 1.0f, sum} : (State){-INFINITY, 0.0f, sum};
}

/* Merges a query's next block into its state. */
static void merge(State *so_far, const State *next, int64_t wide) {
    if (next->total == 0.0f) return;
    const float best = next->best > so_far->best ? next->best : so_far->best;
    const vf factors = exp_((vf){so_far->best - best, next->best - best});
    const float old = factors[0], new = factors[1];
    so_far->best = best;
    so_far->total = so_far->total * old + next->total * new;
    for (int64_t c = 0; c < wide; c += W)
        store(so_far->sum + c, load(so_far->sum + c) * old + load(next->sum + c) * new);
}

#endif
