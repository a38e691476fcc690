/* All layers of a quantised decoder in one call: rows in, logits out, K and V into their planes.
 *
 * Promise: a row's logits are the same bits whichever rows share the pass and however many threads there are.
 * Products are exact (int8.h), attention and norms have a fixed order (tile.h, kernels.c), and everything else is
 * computed row by row. The residual stream is float32; K and V are what their planes hold.
 */
#ifndef OUTRIDER_PASS_H
#define OUTRIDER_PASS_H

#include "attend.h"
#include "blocks.h"
#include "int8.h"
#include "team.h"

enum { OWN_ROWS = 3 }; /* rows that are packed by every member: as many as take less time than a phase, some 1 us */

typedef struct {
    const float *attention_norm, *mlp_norm, *q_norm, *k_norm; /* [H], [H], [d] or NULL, [d] or NULL */
    Linear qkv, out, gate_up, down;
    int64_t rope, window;
} Layer;

typedef struct { /* what a layer of BART's kind has beside the fields of `Layer` */
    const float *attention_bias, *mlp_bias; /* [H] of the layer norms whose gains are there */
    const float *cross_norm, *cross_bias; /* [H] */
    Linear cross_q, cross_out; /* of attention to the source */
} BartLayer;

typedef struct { /* BART and Marian: the sum of the stream and a block is normed, and is the stream from there on */
    const BartLayer *layers;
    const float *positions; /* [length, H] */
    const float *embed_norm, *embed_bias; /* [H] or NULL */
    double embedding_scale;
    int64_t activation; /* of the MLP, as in Gate */
} Bart;

typedef struct { /* slots of the sources that rows read, whose K and V are in the planes */
    const int32_t *table; /* [lines, stride] */
    const int64_t *lengths; /* [T] tokens of each row's source */
    int64_t stride;
} Sources;

typedef struct {
    const Layer *layers;
    const float *norm; /* [H], or NULL: the stream is normed already */
    const uint16_t *embedding; /* [V, H] bfloat16; or NULL: `word_pieces`, or `stored` */
    const float *cos, *sin; /* [length, half] */
    Linear head;
    int64_t hidden, heads, kv_heads, d, half, middle, vocabulary, length;
    double eps;
    /* Of a trained head: its first layer reads the token's embedding and the residual stream, each with its own norm. */
    const float *beside_norm; /* [H] the stream's norm there, or NULL: an ordinary decoder */
    const float *mask_embedding, *mask_stream; /* [H] values of a row whose token is -1, or NULL: no such rows */
    int64_t words; /* rows of `embedding` */
    Linear fuse; /* from the tapped states of the target's layers to the head's residual stream */
    int64_t begins_normed; /* the residual stream begins with the normed feature */
    const struct Piece *word_pieces; /* [ceil(words / 16)], or NULL */
    Stored stored;
    const Bart *bart; /* or NULL: layers of Llama's kind */
} Model;

typedef struct {
    const Model *model;
    const int64_t *tokens, *positions, *slots, *lines, *context, *want; /* [T] each, want [R] */
    const int32_t *table, *ancestors; /* [lines, table_stride], [T, depth] or NULL */
    const float *x; /* [T, H], or NULL: the tokens' embeddings */
    const float *shown; /* [T, inputs of `fuse`], or NULL */
    const float *const *shown_in_slots; /* the same in parts [S, H] side by side, row t's in its slot; then NULL. Or NULL */
    void *const *planes; /* [layers][2] k and v [S, kv_heads, d], as in vectors.h */
    float *logits; /* [R, V], or NULL: no head */
    float *highest; /* [R] each row's largest logit, NaN if there is one; or NULL */
    int64_t *leaders; /* [R] its first index */
    float *const *taps; /* [stop] where the stream after a layer goes [T, H], or NULL; all of it may be NULL */
    float *const *streams; /* the same [S, H], each row in its slot; of ordinary decoders */
    const uint8_t *skips; /* [stop] 1: no attention, 2: no mlp; or NULL */
    int64_t table_stride, depth, slot_count, rows, wanted, start, stop, threads;
    const Sources *sources; /* of BART's kind */
} Pass;

typedef struct {
    const Pass *p;
    Job job, across; /* attention to the text and to the source, divided; their `a` is set for each layer */
    Packed packed; /* rows of the next product: one buffer for all members, or one for each */
    int own; /* each has its own */
    float *fused; /* [2T, H]: products of the high bytes of `shown`, and of the low bytes */
    float *x, *qkv, *q, *mixed, *middle, *cos, *sin; /* [T, H], [T, (heads + 2 kv_heads) d], [T, heads d] twice, ... */
    Best *bests; /* [R, pieces of a row of logits], where `highest` is wanted */
    int64_t middle_stride;
} State8;

/* ---------------------------------------------------------------- buffers */

INLINE void *cut(char **memory, int64_t bytes) { /* the next piece of scratch memory, aligned to a cache line */
    void *piece = *memory;
    *memory += (bytes + 63) / 64 * 64;
    return piece;
}

/* Lays out `packed` at `at`. */
static void furnish_packed(State8 *s, char **at, int64_t rows) {
    s->packed.inputs = cut(at, rows * s->packed.stride * (int64_t)sizeof(Input));
    s->packed.scale = cut(at, 4 * rows);
    s->packed.offset = cut(at, 4 * rows);
}

INLINE int is_shown(const Pass *p) { return p->shown || p->shown_in_slots; } /* else x is fused already */

static int64_t packed_rows(const Pass *p) { return most(is_shown(p) ? 2 * p->rows : p->rows, p->wanted); }

/* A member's copy of the state, with a buffer of its own for packed rows where each has one. Nobody's is in memory that
 * is shared: a member that is late may still write to it when others run the next pass there. */
static int own_state(State8 *s, const State8 *shared) {
    *s = *shared;
    if (!s->own) return 0;
    const int64_t rows = packed_rows(s->p);
    char *at = NULL;
    furnish_packed(s, &at, rows);
    if (!(at = (char *)scratch(3, (at - (char *)NULL) / 4))) return 1;
    furnish_packed(s, &at, rows);
    return 0;
}

/* ---------------------------------------------------------------- work by row */

typedef struct {
    const State8 *s;
    const Linear *linear; /* the product that reads the rows */
    const float *from; /* [T, from_stride] */
    const float *norm; /* [H] or NULL */
    const int64_t *pick; /* which rows, or NULL: all */
    int64_t from_stride;
} Packing;

INLINE void normed(float *row, const float *x, const float *norm, int64_t n, double eps) {
    const float scale = inverse_rms(x, n, (float)eps);
    for (int64_t i = 0; i < n; i++) row[i] = x[i] * scale * norm[i];
}

INLINE char *packed_row(const Packing *a, int64_t t) {
    const Packed *packed = &a->s->packed;
    return (char *)(packed->inputs + t * packed->stride);
}

static void to_integers(const Packing *a, float *row, int64_t t) { /* changes `row` */
    if (a->linear->pieces) quantise_units(a->linear, row, packed_row(a, t));
    else quantise(a->linear, row, &a->s->packed, t);
}

INLINE void embed(const Model *model, int64_t token, float *out) {
    if (model->embedding) read_row(out, model->embedding + token * model->hidden, 1, model->hidden);
    else if (model->stored.rows) read_stored(&model->stored, token, model->hidden, out);
    else read_piece(model->word_pieces + token / LANES, token % LANES, model->hidden, out);
}

static int pack_row(const void *job, int64_t t) {
    const Packing *a = job;
    const int64_t n = a->linear->inputs;
    const float *x = a->from + (a->pick ? a->pick[t] : t) * a->from_stride;
    if (a->linear->pieces && !a->norm) {
        quantise_units(a->linear, x, packed_row(a, t));
        return 0;
    }
    float *row = scratch(0, padded(n));
    if (!row) return 1;
    if (a->norm) normed(row, x, a->norm, n, a->s->p->model->eps);
    else memcpy(row, x, (size_t)n * sizeof *row);
    to_integers(a, row, t);
    return 0;
}

static int pack_pair(const void *job, int64_t t) { /* a head's first layer: [the token's embedding, the stream] */
    const Packing *a = job;
    const Model *model = a->s->p->model;
    const int64_t n = model->hidden, token = a->s->p->tokens[t];
    float *row = scratch(0, padded(2 * n) + n), *word = row + padded(2 * n);
    if (!row) return 1;
    if (token < 0) memcpy(word, model->mask_embedding, (size_t)n * sizeof *word);
    else embed(model, token, word);
    normed(row, word, a->norm, n, model->eps);
    const float *stream = a->from + t * a->from_stride;
    if (model->begins_normed) memcpy(row + n, stream, (size_t)n * sizeof *row);
    else normed(row + n, stream, model->beside_norm, n, model->eps);
    to_integers(a, row, t);
    return 0;
}

INLINE const float *shown_row(const Pass *p, int64_t t, float *row) {
    const int64_t n = p->model->fuse.inputs;
    if (p->shown) return p->shown + t * n;
    int64_t parts = 0;
    while (p->shown_in_slots[parts]) parts++;
    for (int64_t i = 0, width = n / parts; i < parts; i++)
        memcpy(row + i * width, p->shown_in_slots[i] + p->slots[t] * width, (size_t)width * sizeof *row);
    return row;
}

/* Tapped states have a few inputs that are a thousand times larger than the rest, so every input gets two bytes. */
static int pack_shown(const void *job, int64_t t) {
    const State8 *s = job;
    const Packed *out = &s->packed;
    const int64_t n = s->p->model->fuse.inputs;
    float *row = scratch(0, n);
    if (!row) return 1;
    const float *x = shown_row(s->p, t, row);
    if (s->p->model->fuse.pieces) {
        char *twice = (char *)(out->inputs + 2 * t * out->stride);
        quantise_units_twice(&s->p->model->fuse, x, twice, twice + out->stride * (int64_t)sizeof(Input));
        return 0;
    }
    Input *high = out->inputs + 2 * t * out->stride, *low = high + out->stride;
    float top = 0.0f, odd = 0.0f;
    int32_t highs = 0, lows = 0;
    for (int64_t i = 0; i < n; i++) {
        top = fabsf(x[i]) > top ? fabsf(x[i]) : top;
        odd += x[i] * 0.0f;
    }
    const float scale = top / 32639.0f, inverse = scale > 1e-30f && odd == 0.0f ? 1.0f / scale : 0.0f;
    for (int64_t i = 0; i < n; i++) {
        const int32_t q = (int32_t)rintf(x[i] * inverse), upper = (q + 128) >> 8;
        high[place(i)] = (Input)upper;
        low[place(i)] = (Input)(q - 256 * upper);
        highs += upper;
        lows += q - 256 * upper;
    }
    for (int64_t i = n; i < (n + 3) / 4 * 4; i++) high[place(i)] = low[place(i)] = 0;
    out->scale[2 * t] = 256.0f * scale + odd;
    out->scale[2 * t + 1] = scale + odd;
    out->offset[2 * t] = OFFSET * highs;
    out->offset[2 * t + 1] = OFFSET * lows;
    return 0;
}

static void place_word(const Model *model, int64_t position, float *x) { /* x: the token's embedding */
    const Bart *bart = model->bart;
    const int64_t n = model->hidden;
    const float scale = (float)bart->embedding_scale, *at = bart->positions + position * n;
    for (int64_t i = 0; i < n; i++) x[i] = x[i] * scale + at[i];
    if (bart->embed_norm) layer_normed(x, x, bart->embed_norm, bart->embed_bias, n, (float)model->eps);
}

static int embed_row(const void *job, int64_t t) {
    const State8 *s = job;
    const Pass *p = s->p;
    const int64_t n = p->model->hidden, half = p->model->half;
    const int head = p->model->beside_norm != NULL;
    if (head && p->tokens[t] < 0) memcpy(s->x + t * n, p->model->mask_stream, (size_t)n * sizeof *s->x);
    else if (is_shown(p))
        for (int64_t i = 0; i < n; i++) s->x[t * n + i] = s->fused[2 * t * n + i] + s->fused[(2 * t + 1) * n + i];
    else if (p->x) memcpy(s->x + t * n, p->x + t * n, (size_t)n * sizeof *s->x);
    else embed(p->model, p->tokens[t], s->x + t * n);
    if (p->model->bart && !p->x) place_word(p->model, p->positions[t], s->x + t * n);
    if (head && p->model->begins_normed) normed(s->x + t * n, s->x + t * n, p->model->beside_norm, n, p->model->eps);
    memcpy(s->cos + t * half, p->model->cos + p->positions[t] * half, (size_t)half * sizeof *s->cos);
    memcpy(s->sin + t * half, p->model->sin + p->positions[t] * half, (size_t)half * sizeof *s->sin);
    return 0;
}

typedef struct {
    const State8 *s;
    float *out; /* [T, H], or with slots [S, H] */
    const int64_t *slots;
} Tap;

static int tap_row(const void *job, int64_t t) {
    const Tap *a = job;
    const int64_t n = a->s->p->model->hidden;
    memcpy(a->out + (a->slots ? a->slots[t] : t) * n, a->s->x + t * n, (size_t)n * sizeof *a->out);
    return 0;
}

static int turn_row(const void *job, int64_t t) {
    const Rope *a = job;
    float *head = scratch(0, a->d);
    if (head) rope_row(a, t, head);
    return !head;
}

typedef struct {
    const Rope *rope;
    const Job *job;
} Mix;

static int turn_and_attend(const void *opaque, int64_t kv) { /* all rows are in one tile, which reads this head alone */
    const Mix *mix = opaque;
    float *head = scratch(0, mix->rope->d);
    if (!head) return 1;
    for (int64_t t = 0; t < mix->rope->rows; t++) rope_group(mix->rope, t, kv, head);
    return attend_whole(mix->job, kv);
}

/* ---------------------------------------------------------------- work by layer; every team member runs all of it */

/* Rows for the next product. Few are packed by every member for itself, which takes less time than to wait for others. A
 * member that is late may pack what is something else by then; it finds no part left to multiply it with. */
static int pack(Member *m, const State8 *s, Work work, const void *job, int64_t rows) {
    if (!s->own) return each(m, work, job, rows);
    int failed = 0;
    for (int64_t t = 0; t < rows; t++) failed |= work(job, t);
    return failed;
}

static int multiply(Member *m, const State8 *s, const Linear *linear, int64_t rows, float *out, int64_t stride,
                    enum Kind kind) {
    Product product = {linear, s->packed, out, stride, kind};
    product.x.rows = rows;
    return each(m, linear->pieces ? multiply_pieces : multiply_block, &product, blocks_of(linear));
}

static int mix(Member *m, const State8 *s, const Layer *layer, void *const *planes) {
    const Pass *p = s->p;
    const Model *model = p->model;
    const Rope rope = {.qkv = s->qkv, .cos = s->cos, .sin = s->sin, .q = s->q, .k = planes[0], .v = planes[1],
                       .slots = p->slots, .q_norm = layer->q_norm, .k_norm = layer->k_norm, .rows = p->rows,
                       .heads = model->heads, .kv_heads = model->kv_heads, .d = model->d,
                       .half = layer->rope ? model->half : 0, .eps = model->eps};
    Attend a = *s->job.a;
    a.k = planes[0];
    a.v = planes[1];
    a.window = layer->window;
    Job job = s->job;
    job.a = &a;
    const int64_t whole = job.tile_count * a.kv_heads;
    if (whole == a.kv_heads && !job.states) return each(m, turn_and_attend, &(Mix){&rope, &job}, whole);
    int failed = each(m, turn_row, &rope, p->rows);
    if (!job.states) return failed | each(m, attend_whole, &job, whole);
    failed |= each(m, attend_one_block, &job, whole * job.blocks);
    return failed | each(m, merge_row, &job, a.rows);
}

static int attention(Member *m, const State8 *s, const Layer *layer, void *const *planes) {
    const int64_t hidden = s->p->model->hidden, rows = s->p->rows, width = layer->out.inputs;
    const Work first = s->p->model->beside_norm && layer == s->p->model->layers ? pack_pair : pack_row;
    int failed = pack(m, s, first, &(Packing){s, &layer->qkv, s->x, layer->attention_norm, NULL, hidden}, rows);
    failed |= multiply(m, s, &layer->qkv, rows, s->qkv, layer->qkv.outputs, STORE);
    failed |= mix(m, s, layer, planes);
    failed |= pack(m, s, pack_row, &(Packing){s, &layer->out, s->mixed, NULL, NULL, width}, rows);
    return failed | multiply(m, s, &layer->out, rows, s->x, hidden, ADD);
}

static int mlp(Member *m, const State8 *s, const Layer *layer) {
    const int64_t hidden = s->p->model->hidden, rows = s->p->rows, wide = s->middle_stride;
    int failed = pack(m, s, pack_row, &(Packing){s, &layer->gate_up, s->x, layer->mlp_norm, NULL, hidden}, rows);
    failed |= multiply(m, s, &layer->gate_up, rows, s->middle, wide, SILU);
    failed |= pack(m, s, pack_row, &(Packing){s, &layer->down, s->middle, NULL, NULL, wide}, rows);
    return failed | multiply(m, s, &layer->down, rows, s->x, hidden, ADD);
}

/* ---------------------------------------------------------------- the same for layers of BART's kind */

typedef struct {
    const State8 *s;
    const float *gain, *bias; /* [H] */
} StreamNorm;

static int norm_stream(const void *job, int64_t t) {
    const StreamNorm *a = job;
    const Model *model = a->s->p->model;
    float *x = a->s->x + t * model->hidden;
    layer_normed(x, x, a->gain, a->bias, model->hidden, (float)model->eps);
    return 0;
}

static int pack_active(const void *job, int64_t t) { /* rows of the MLP, after its activation */
    const Packing *a = job;
    const int64_t n = a->linear->inputs, wide = padded(n), kind = a->s->p->model->bart->activation;
    float *row = scratch(0, wide);
    if (!row) return 1;
    memcpy(row, a->from + t * a->from_stride, (size_t)n * sizeof *row);
    memset(row + n, 0, (size_t)(wide - n) * sizeof *row);
    for (int64_t i = 0; i < wide; i += W) store(row + i, gated(load(row + i), all(1.0f), kind));
    to_integers(a, row, t);
    return 0;
}

/* Adds a product of these rows to the stream, and norms it. */
static int close_block(Member *m, const State8 *s, const Linear *linear, Work packing, const float *from, int64_t stride,
                       const float *gain, const float *bias) {
    const int64_t hidden = s->p->model->hidden, rows = s->p->rows;
    int failed = pack(m, s, packing, &(Packing){s, linear, from, NULL, NULL, stride}, rows);
    failed |= multiply(m, s, linear, rows, s->x, hidden, ADD);
    return failed | each(m, norm_stream, &(StreamNorm){s, gain, bias}, rows);
}

/* A product of the stream. */
static int open_block(Member *m, const State8 *s, const Linear *linear, float *out, int64_t stride) {
    const int64_t hidden = s->p->model->hidden, rows = s->p->rows;
    const int failed = pack(m, s, pack_row, &(Packing){s, linear, s->x, NULL, NULL, hidden}, rows);
    return failed | multiply(m, s, linear, rows, out, stride, STORE);
}

static int bart_attention(Member *m, const State8 *s, int64_t i) {
    const Pass *p = s->p;
    const Layer *layer = p->model->layers + i;
    const BartLayer *own = p->model->bart->layers + i;
    const int64_t inner = p->model->heads * p->model->d;
    int failed = open_block(m, s, &layer->qkv, s->qkv, layer->qkv.outputs);
    failed |= mix(m, s, layer, p->planes + 2 * i);
    failed |= close_block(m, s, &layer->out, pack_row, s->mixed, inner, layer->attention_norm, own->attention_bias);
    failed |= open_block(m, s, &own->cross_q, s->q, inner);
    Attend a = *s->across.a;
    a.k = p->planes[2 * i];
    a.v = p->planes[2 * i + 1];
    Job job = s->across;
    job.a = &a;
    failed |= each(m, attend_whole, &job, job.tile_count * a.kv_heads);
    return failed | close_block(m, s, &own->cross_out, pack_row, s->mixed, inner, own->cross_norm, own->cross_bias);
}

static int bart_mlp(Member *m, const State8 *s, int64_t i) {
    const Layer *layer = s->p->model->layers + i;
    const float *bias = s->p->model->bart->layers[i].mlp_bias;
    const int failed = open_block(m, s, &layer->gate_up, s->middle, s->middle_stride);
    return failed | close_block(m, s, &layer->down, pack_active, s->middle, s->middle_stride, layer->mlp_norm, bias);
}

/* ---------------------------------------------------------------- all layers */

static int run_layer(Member *m, const State8 *s, int64_t i) {
    const Pass *p = s->p;
    const Model *model = p->model;
    const int skips = p->skips ? p->skips[i] : 0;
    int failed = 0;
    if (!(skips & 1))
        failed |= model->bart ? bart_attention(m, s, i) : attention(m, s, model->layers + i, p->planes + 2 * i);
    if (!(skips & 2)) failed |= model->bart ? bart_mlp(m, s, i) : mlp(m, s, model->layers + i);
    return failed;
}

static int search_logits(const void *job, int64_t part) {
    const State8 *s = job;
    const int64_t width = s->p->model->vocabulary, pieces = pieces_of(width);
    s->bests[part] = best_of_piece(s->p->logits + part / pieces * width, part % pieces * PIECE, width);
    return 0;
}

static int run(Member *m, const void *opaque) {
    State8 mine, *const s = &mine;
    int failed = own_state(s, opaque);
    const Pass *p = s->p;
    const Model *model = p->model;
    if (is_shown(p)) {
        failed |= pack(m, s, pack_shown, s, p->rows);
        failed |= multiply(m, s, &model->fuse, 2 * p->rows, s->fused, model->hidden, STORE);
    }
    failed |= each(m, embed_row, s, p->rows);
    for (int64_t i = p->start; i < p->stop; i++) {
        failed |= run_layer(m, s, i);
        if (p->taps && p->taps[i]) failed |= each(m, tap_row, &(Tap){s, p->taps[i], NULL}, p->rows);
        if (p->streams && p->streams[i]) failed |= each(m, tap_row, &(Tap){s, p->streams[i], p->slots}, p->rows);
    }
    if (!p->logits || !p->wanted) return failed;
    const Packing last = {s, &model->head, s->x, model->norm, p->want, model->hidden};
    failed |= pack(m, s, pack_row, &last, p->wanted);
    failed |= multiply(m, s, &model->head, p->wanted, p->logits, model->vocabulary, STORE);
    if (!p->highest) return failed;
    return failed | each(m, search_logits, s, p->wanted * pieces_of(model->vocabulary));
}

/* ---------------------------------------------------------------- before the first layer */

static int outside(const int64_t *x, int64_t n, int64_t end) {
    for (int64_t i = 0; i < n; i++)
        if (x[i] < 0 || x[i] >= end) return 1;
    return 0;
}

/* Lays out the buffers of the pass in `memory`; returns their bytes. With NULL, only the size counts. */
static int64_t furnish(State8 *s, char *memory) {
    const Model *model = s->p->model;
    const int64_t rows = s->p->rows, twice = is_shown(s->p) ? 2 * rows : 0, d = model->d;
    const int64_t shown = twice ? model->fuse.inputs : 0;
    const int64_t qkv = (model->heads + 2 * model->kv_heads) * d;
    char *at = memory;
    s->middle_stride = (model->middle + 15) / 16 * 16;
    const int64_t first = model->beside_norm ? 2 * model->hidden : model->hidden;
    const int64_t widest = most(most(first, model->heads * d), most(model->middle, shown));
    s->packed.stride = (widest * 3 / 2 + 64 + 63 + W) / 64 * 64; /* a unit's scale and sums take up to half as much */
    s->fused = cut(&at, 4 * twice * model->hidden);
    s->x = cut(&at, 4 * rows * model->hidden);
    s->qkv = cut(&at, 4 * rows * qkv);
    s->q = cut(&at, 4 * rows * model->heads * d);
    s->mixed = cut(&at, 4 * rows * model->heads * d);
    s->middle = cut(&at, 4 * rows * s->middle_stride);
    s->cos = cut(&at, 4 * rows * model->half);
    s->sin = cut(&at, 4 * rows * model->half);
    s->bests = cut(&at, s->p->highest ? s->p->wanted * pieces_of(model->vocabulary) * (int64_t)sizeof *s->bests : 0);
    furnish_packed(s, &at, packed_rows(s->p));
    return at - memory;
}

static int is_outside(const Pass *p) { /* whether an index is out of its range */
    const Model *model = p->model;
    if (outside(p->positions, p->rows, model->length) || outside(p->slots, p->rows, p->slot_count) ||
        outside(p->want, p->wanted, p->rows) || (!p->x && !is_shown(p) && outside(p->tokens, p->rows, model->words)))
        return 1;
    const int64_t lowest = model->mask_embedding ? -1 : 0;
    for (int64_t t = 0; model->beside_norm && t < p->rows; t++)
        if (p->tokens[t] < lowest || p->tokens[t] >= model->words) return 1;
    return 0;
}

typedef struct { /* what a pass's attention is planned with; the caller keeps it as long as the state, then frees it */
    Attend text, source;
    int64_t *memory[2];
} Plan;

static void free_plan(Plan *plan) {
    free(plan->memory[0]);
    free(plan->memory[1]);
}

/* After `furnish`. */
static int plan_attention(State8 *s, Plan *to) {
    const Pass *p = s->p;
    const Model *model = p->model;
    to->memory[0] = to->memory[1] = NULL;
    to->text = (Attend){.q = s->q, .table = p->table, .lines = p->lines, .context = p->context,
                  .ancestors = p->ancestors, .out = s->mixed, .table_stride = p->table_stride, .depth = p->depth,
                  .rows = p->rows, .heads = model->heads, .kv_heads = model->kv_heads, .d = model->d,
                  .scale = 1.0 / sqrt((double)model->d)};
    int64_t threads = p->threads, one = 1; /* one: tiles are not divided, because each head is a part of its own */
    if (plan(&s->job, &to->text, &threads, &to->memory[0])) return 1;
    if (!model->bart) return 0;
    to->source = to->text;
    to->source.table = p->sources->table;
    to->source.context = p->sources->lengths;
    to->source.table_stride = p->sources->stride;
    to->source.ancestors = NULL;
    to->source.depth = 0;
    return plan(&s->across, &to->source, &one, &to->memory[1]);
}

static int int8_pass(const Pass *p) { /* 1: no memory; 2: an index is out of its range */
    if (is_outside(p)) return 2;
    State8 s = {.p = p, .own = p->rows <= OWN_ROWS};
    Plan plan;
    char *memory = (char *)scratch(2, furnish(&s, NULL) / 4);
    if (!memory) return 1;
    furnish(&s, memory);
    int failed = plan_attention(&s, &plan) || together(run, &s, p->threads);
    free_plan(&plan);
    for (int64_t row = 0; p->highest && row < p->wanted; row++) {
        const int64_t pieces = pieces_of(p->model->vocabulary);
        const Best best = best_of_row(s.bests + row * pieces, pieces);
        p->highest[row] = best.top;
        p->leaders[row] = best.place;
    }
    return failed;
}

#endif
