/* Attention of packed rows over slots: each row reads a list of keys, its line's context and then its ancestors.
 *
 * This file only divides the work: into tiles of rows and, if those are too few for the threads, tiles into blocks of
 * keys. Blocks of a query are merged in order either way, so its bits do not depend on which thread computed them.
 */
#ifndef OUTRIDER_ATTEND_H
#define OUTRIDER_ATTEND_H

#include "tile.h"

enum {
    SMALL = 1 << 16, /* multiplications that are not worth waking another thread for */
    STATES = 1 << 22, /* the most floats for the states of single blocks */
};

typedef struct {
    int64_t first, count; /* queries, as in Tile */
} Range;

typedef struct {
    const Attend *a;
    int64_t *ends; /* [T] keys in a row's list */
    Range *tiles; /* [tile_count] the same for every kv head */
    int64_t tile_count, blocks, group, wide;
    float *states; /* [T * heads, blocks, 2 + wide] best, total, sum; NULL when whole tiles are computed at once */
} Job;

/* ---------------------------------------------------------------- one tile */

/* A tile with its queries loaded, and `spare` [TILE, wide] for the caller. */
static int open_tile(Tile *tile, const Job *job, int64_t kv, Range range, float **spare) {
    const int64_t wide = job->wide;
    float *at = scratch(0, (3 * TILE + VALUES) * wide + TILE * STRIDE);
    if (!at) return 1;
    *tile = (Tile){.a = job->a, .ends = job->ends, .kv = kv, .first = range.first, .count = range.count};
    tile->group = job->group;
    tile->wide = wide;
    tile->q = at;
    for (int64_t i = 0; i < TILE; i++) tile->state[i].sum = at + (TILE + i) * wide;
    *spare = at + 2 * TILE * wide;
    tile->copy = *spare + TILE * wide;
    tile->scores = tile->copy + VALUES * wide;
    load_queries(tile);
    return 0;
}

static void finish(const Job *job, int64_t head, State *state) { /* head: row * heads + head */
    const int64_t d = job->a->d;
    const float inverse = state->total == 0.0f ? 0.0f : 1.0f / state->total;
    for (int64_t c = 0; c < d; c++) state->sum[c] *= inverse;
    write_row(at(job->a->out, job->a->bf16, head * d), job->a->bf16, state->sum, d);
}

static int attend_whole(const void *opaque, int64_t part) {
    const Job *job = opaque;
    const Range range = job->tiles[job->tile_count - 1 - part % job->tile_count]; /* the longest lists first */
    Tile tile;
    State so_far[TILE];
    float *sums;
    if (open_tile(&tile, job, part / job->tile_count, range, &sums)) return 1;
    memset(sums, 0, (size_t)(tile.count * tile.wide) * sizeof *sums);
    for (int64_t i = 0; i < tile.count; i++) so_far[i] = before(job->a, head_of(&tile, i), sums + i * tile.wide);
    int64_t block = INT64_MAX, end = 0; /* the first block and the last key of any row */
    for (int64_t t = row_of(&tile, 0); t <= row_of(&tile, tile.count - 1); t++) {
        block = least(block, start_of(&tile, t) / BLOCK);
        end = most(end, job->ends[t]);
    }
    for (; block * BLOCK < end; block++) {
        attend_block(&tile, block);
        for (int64_t i = 0; i < tile.count; i++) merge(so_far + i, tile.state + i, tile.wide);
    }
    for (int64_t i = 0; i < tile.count; i++) finish(job, head_of(&tile, i), so_far + i);
    return 0;
}

static int attend_one_block(const void *opaque, int64_t part) {
    const Job *job = opaque;
    const int64_t whole = job->tile_count * job->a->kv_heads, block = part / whole, size = 2 + job->wide;
    const int64_t kv = part % whole / job->tile_count; /* a block's heads one after the other: they are neighbours */
    Tile tile;
    float *unused;
    if (open_tile(&tile, job, kv, job->tiles[part % job->tile_count], &unused)) return 1;
    attend_block(&tile, block);
    for (int64_t i = 0; i < tile.count; i++) {
        float *state = job->states + (head_of(&tile, i) * job->blocks + block) * size;
        state[0] = tile.state[i].best;
        state[1] = tile.state[i].total;
        memcpy(state + 2, tile.state[i].sum, (size_t)job->wide * sizeof *state);
    }
    return 0;
}

static int merge_row(const void *opaque, int64_t t) {
    const Job *job = opaque;
    const int64_t heads = job->a->heads, size = 2 + job->wide;
    float *sum = scratch(0, job->wide);
    if (!sum) return 1;
    for (int64_t head = t * heads; head < (t + 1) * heads; head++) {
        State so_far = before(job->a, head, sum);
        memset(sum, 0, (size_t)job->wide * sizeof *sum);
        for (int64_t block = 0; block < job->blocks; block++) {
            float *state = job->states + (head * job->blocks + block) * size;
            merge(&so_far, &(State){state[0], state[1], state + 2}, job->wide);
        }
        finish(job, head, &so_far);
    }
    return 0;
}

/* ---------------------------------------------------------------- all tiles */

static int64_t measure(Job *job) { /* fills ends and blocks; returns the number of all rows' keys */
    const Attend *a = job->a;
    int64_t keys = 0;
    for (int64_t t = 0; t < a->rows; t++) {
        int64_t own = 0;
        while (a->ancestors && own < a->depth && a->ancestors[t * a->depth + own] >= 0) own++;
        job->ends[t] = a->context[t] + own;
        job->blocks = most(job->blocks, (job->ends[t] + BLOCK - 1) / BLOCK);
        keys += a->window > 0 ? least(a->window, job->ends[t]) : job->ends[t];
    }
    return keys;
}

/* Rows of one line stay together, as many as fit, in tiles of about the same size: in twice as many where a thread would
 * otherwise wait for another's last tile. */
static void divide(Job *job, int64_t threads) {
    const Attend *a = job->a;
    for (int64_t t = 0, end; t < a->rows; t = end) {
        for (end = t + 1; end < a->rows && a->lines[end] == a->lines[t];) end++;
        const int64_t rows = end - t, fit = most(1, TILE / job->group), whole = (rows + fit - 1) / fit;
        const int uneven = rows == a->rows && rows >= 4 * whole && whole * a->kv_heads % threads;
        const int64_t tiles = uneven ? 2 * whole : whole;
        const int64_t size = least(TILE, (rows + tiles - 1) / tiles * job->group), last = end * job->group;
        for (int64_t i = t * job->group; i < last; i += size)
            job->tiles[job->tile_count++] = (Range){i, least(size, last - i)};
    }
}

/* Divides the rows, in the same way for every layer of a pass. The caller frees `memory`. */
static int plan(Job *job, const Attend *a, int64_t *threads, int64_t **memory) {
    const int64_t group = a->heads / a->kv_heads, queries = a->rows * group;
    if (!(*memory = malloc((size_t)(a->rows + 2 * queries + 1) * sizeof **memory))) return 1;
    *job = (Job){.a = a, .ends = *memory, .tiles = (Range *)(*memory + a->rows), .group = group, .wide = padded(a->d)};
    if (measure(job) * a->heads * a->d < SMALL) *threads = 1;
    divide(job, *threads);
    const int64_t whole = job->tile_count * a->kv_heads, floats = a->rows * a->heads * job->blocks * (2 + job->wide);
    if (*threads > 1 && job->blocks > 1 && whole < 4 * *threads && floats <= STATES)
        return !(job->states = scratch(1, floats));
    return 0;
}

static int attend(const Attend *a) {
    Job job;
    int64_t *memory, threads = a->threads;
    if (plan(&job, a, &threads, &memory)) {
        free(memory);
        return 1;
    }
    const int64_t whole = job.tile_count * a->kv_heads;
    int failed = 0;
    if (job.states)
        failed = spread(attend_one_block, &job, whole * job.blocks, threads) ||
                 spread(merge_row, &job, a->rows, threads);
    else failed = spread(attend_whole, &job, whole, threads);
    free(memory);
    return failed;
}

#endif
