/* A whole draft in one call: a trained head reads the committed rows that its plane lacks, then continues from its own
 * outputs, token by token, for several sequences at once, with one team of threads. A model does the same from its tokens
 * alone (`x` and `shown` are NULL).
 *
 * Promise: the same tokens and survival as by a pass for each depth, bit for bit. A chain ends at its budget, or where the
 * survival of its last token is below the floor of its length.
 *
 * Nothing but K and V of a committed row is ever read, so the last layer computes no more of it; only each sequence's last
 * one, which its draft begins with, runs through to its scores.
 */
#ifndef OUTRIDER_CHAIN_H
#define OUTRIDER_CHAIN_H

#include "pass.h"
#include "product.h"

typedef struct {
    Pass committed; /* without logits and taps. Wanted: the last row of each sequence, in order [R] */
    const int64_t *budgets; /* [R] tokens, at least one */
    const int32_t *slots; /* [R, longest] where the rows of drafted tokens go */
    const int64_t *ids; /* [D] the target's id of each draft id */
    const double *floors; /* [longest] the survival that a chain of 1, 2, … tokens needs to go on */
    const float *other_rows; /* [blocks, H, 16] as in product.h: output rows instead of the model's own, */
    const int64_t *other_places; /* [others] of these draft ids */
    int64_t *tokens; /* [2, R, longest] the likeliest at each place, which go on, and the second-likeliest, which end there */
    double *survival; /* [2, R, longest] */
    int64_t *lengths; /* [R] */
    int64_t others, longest, continues_normed; /* the last: drafted tokens continue from the output after the last norm */
    double scale; /* of scores */
} Chain;

typedef struct { /* a pass, with what it reads */
    Pass pass;
    State8 state;
    Plan plan;
    int64_t *chains; /* [rows] which sequence's chain a row continues */
    Sources sources; /* of BART's kind */
} Depth;

typedef struct {
    const Chain *c;
    State8 reading; /* fuses what the target has shown */
    Depth filling; /* K and V of committed rows */
    /* One for each token: a member that was interrupted may still read what was decided for an earlier one. */
    Depth *depths; /* [longest + 1] */
    float *features; /* [T, H] of committed rows; NULL: of a model, which reads tokens only */
    float *x; /* [R, H] what the rows of a depth continue from; NULL as above */
    float *scores, *normed, *other_scores; /* [R, D], [R, H], [R, others] */
    Best *bests; /* [R, piece_count] of pieces of scores */
    float *weights; /* the same */
    int64_t piece_count;
    char *memory; /* of the pass that runs */
} Drafting;

/* ---------------------------------------------------------------- committed rows */

static int add_halves(const void *job, int64_t t) {
    const Drafting *d = job;
    const int64_t n = d->c->committed.model->hidden;
    const float *high = d->reading.fused + 2 * t * n, *low = high + n;
    for (int64_t i = 0; i < n; i++) d->features[t * n + i] = high[i] + low[i];
    return 0;
}

typedef struct {
    Product product;
    int64_t first; /* block */
} Rest;

static int multiply_rest(const void *job, int64_t part) {
    const Rest *a = job;
    return (a->product.linear->pieces ? multiply_pieces : multiply_block)(&a->product, a->first + part);
}

/* K and V of a layer from the residual stream; queries too where these end within a block. */
static int keep_rows(Member *m, const State8 *shared, int64_t i) {
    State8 mine, *const s = &mine;
    int failed = own_state(s, shared);
    const Pass *p = s->p;
    const Model *model = p->model;
    const Layer *layer = model->layers + i;
    const Linear *qkv = &layer->qkv;
    const Work first = model->beside_norm && !i ? pack_pair : pack_row;
    const int64_t queries = model->heads * model->d, skipped = queries % OUTPUTS ? 0 : queries / OUTPUTS; /* blocks */
    const int64_t width = qkv->outputs - skipped * OUTPUTS;
    const float *norm = model->bart ? NULL : layer->attention_norm;
    failed |= pack(m, s, first, &(Packing){s, qkv, s->x, norm, NULL, model->hidden}, p->rows);
    Rest rest = {{qkv, s->packed, s->qkv - skipped * OUTPUTS, width, STORE}, skipped};
    rest.product.x.rows = p->rows;
    failed |= each(m, multiply_rest, &rest, blocks_of(qkv) - skipped);
    const Rope rope = {.qkv = s->qkv, .cos = s->cos, .sin = s->sin, .q = s->q, .k = p->planes[2 * i],
                       .v = p->planes[2 * i + 1], .slots = p->slots, .q_norm = layer->q_norm, .k_norm = layer->k_norm,
                       .rows = p->rows, .heads = skipped ? 0 : model->heads, .kv_heads = model->kv_heads,
                       .d = model->d, .half = layer->rope ? model->half : 0, .eps = model->eps};
    return failed | each(m, turn_row, &rope, p->rows);
}

static int read_committed(Member *m, const Drafting *d) {
    const Pass *p = &d->c->committed;
    int failed = 0;
    if (is_shown(p)) {
        State8 mine, *const s = &mine;
        failed |= own_state(s, &d->reading);
        failed |= pack(m, s, pack_shown, s, p->rows);
        failed |= multiply(m, s, &p->model->fuse, 2 * p->rows, s->fused, p->model->hidden, STORE);
        failed |= each(m, add_halves, d, p->rows);
    }
    if (!d->filling.pass.rows) return failed;
    failed |= run(m, &d->filling.state);
    return failed | keep_rows(m, &d->filling.state, p->stop - 1);
}

/* ---------------------------------------------------------------- one more token of each chain */

typedef struct {
    const Drafting *d;
    int64_t depth;
} At;

INLINE int goes_on(const Chain *c, int64_t chain, int64_t length) {
    const int64_t at = chain * c->longest + length - 1, token = c->tokens[at];
    const int known = token >= 0 && token < c->committed.model->words;
    return length < c->budgets[chain] && c->survival[at] >= c->floors[length - 1] && known;
}

/* Where the row of a chain at this depth is: the last committed one, then drafted ones. */
static void place_row(const Chain *c, Depth *to, int64_t chain, int64_t depth) {
    const Pass *p = &c->committed;
    const int64_t last = p->want[chain], at = chain * c->longest + depth - 1, row = to->pass.rows++;
    int64_t *numbers = (int64_t *)to->pass.tokens, count = p->wanted;
    const int64_t fields[] = {depth ? c->tokens[at] : p->tokens[last], p->positions[last] + depth,
                              depth ? c->slots[at] : p->slots[last], p->lines[last], p->positions[last] + 1, row};
    for (int i = 0; i < 6; i++) numbers[i * count + row] = fields[i];
    memcpy((int32_t *)to->pass.ancestors + row * depth, c->slots + chain * c->longest, (size_t)depth * sizeof *c->slots);
    to->chains[row] = chain;
    if (p->sources) ((int64_t *)to->sources.lengths)[row] = p->sources->lengths[last];
}

static int open_depth(Depth *depth, char *memory) {
    depth->state.p = &depth->pass;
    depth->state.own = depth->pass.rows <= OWN_ROWS;
    furnish(&depth->state, memory);
    return plan_attention(&depth->state, &depth->plan);
}

/* The best but one: the best once that one's score is gone. */
static Best second_best(const Drafting *d, int64_t row, Best best) {
    const int64_t width = d->c->committed.model->vocabulary, piece = best.place / PIECE;
    Best *bests = d->bests + row * d->piece_count;
    float *x = d->scores + row * width;
    x[best.place] = -INFINITY;
    bests[piece] = best_of_piece(x, piece * PIECE, width);
    return best_of_row(bests, d->piece_count);
}

/* Chooses a chain's tokens of a depth, from the pieces of its row. */
static void choose(const Drafting *d, int64_t depth, int64_t row) {
    const Chain *c = d->c;
    const int64_t chain = d->depths[depth].chains[row], token = chain * c->longest + depth;
    const int64_t second = token + c->committed.wanted * c->longest;
    const double before = depth ? c->survival[token - 1] : 1.0;
    float total = 0.0f;
    for (int64_t i = 0; i < d->piece_count; i++) total += d->weights[row * d->piece_count + i];
    const Best best = best_of_row(d->bests + row * d->piece_count, d->piece_count), other = second_best(d, row, best);
    c->tokens[token] = c->ids[best.place];
    c->survival[token] = (double)(1.0f / total) * before;
    c->tokens[second] = c->ids[other.place];
    c->survival[second] = (double)(expf(other.top - best.top) / total) * before;
    c->lengths[chain] = depth + 1;
}

/* Ends a depth: chooses its tokens, and places the rows of the next one. */
static int next_depth(const void *job, int64_t part) {
    const At *at = job;
    const Drafting *d = at->d;
    const Chain *c = d->c;
    const Model *model = c->committed.model;
    const int64_t n = model->hidden;
    Depth *to = d->depths + at->depth;
    const Depth *from = at->depth ? to - 1 : NULL;
    (void)part;
    for (int64_t i = 0; i < (from ? from->pass.rows : c->committed.wanted); i++) {
        const int64_t chain = from ? from->chains[i] : i;
        if (from) choose(d, at->depth - 1, i);
        if (from && !goes_on(c, chain, at->depth)) continue;
        if (d->x) {
            const float *feature = from ? from->state.x + i * n : d->features + c->committed.want[i] * n;
            float *x = d->x + to->pass.rows * n;
            if (from && c->continues_normed) normed(x, feature, model->norm, n, model->eps);
            else memcpy(x, feature, (size_t)n * sizeof *x);
        }
        place_row(c, to, chain, at->depth);
    }
    to->pass.wanted = to->pass.rows;
    if (!to->pass.rows || !open_depth(to, d->memory)) return 0;
    to->pass.rows = 0;
    return 1;
}

static int norm_output(const void *job, int64_t row) {
    const At *at = job;
    const Model *model = at->d->c->committed.model;
    const int64_t n = model->hidden;
    normed(at->d->normed + row * n, at->d->depths[at->depth].state.x + row * n, model->norm, n, model->eps);
    return 0;
}

static int search_piece(const void *job, int64_t part) {
    const Drafting *d = ((const At *)job)->d;
    const Chain *c = d->c;
    const int64_t width = c->committed.model->vocabulary, row = part / d->piece_count;
    const int64_t from = part % d->piece_count * PIECE, end = end_of_piece(from, width);
    float *x = d->scores + row * width;
    for (int64_t i = 0; i < c->others; i++)
        if (c->other_places[i] >= from && c->other_places[i] < end)
            x[c->other_places[i]] = d->other_scores[row * c->others + i];
    if (c->scale != 1.0)
        for (int64_t i = from; i < end; i++) x[i] *= (float)c->scale;
    d->bests[part] = best_of_piece(x, from, width);
    return 0;
}

static int weigh_piece(const void *job, int64_t part) {
    const Drafting *d = ((const At *)job)->d;
    const int64_t width = d->c->committed.model->vocabulary, row = part / d->piece_count;
    const float top = best_of_row(d->bests + row * d->piece_count, d->piece_count).top;
    d->weights[part] = weight_of_piece(d->scores + row * width, part % d->piece_count * PIECE, width, top);
    return 0;
}

static int draft_all(Member *m, const void *opaque) {
    const Drafting *d = opaque;
    const Chain *c = d->c;
    const int64_t n = c->committed.model->hidden;
    int failed = read_committed(m, d);
    for (int64_t i = 0;; i++) {
        const At at = {d, i};
        failed |= each(m, next_depth, &at, 1);
        const int64_t rows = d->depths[i].pass.rows;
        if (!rows) return failed;
        failed |= run(m, &d->depths[i].state);
        if (c->others) {
            const Dense others = {d->normed, c->other_rows, NULL, d->other_scores, rows, c->others, n, 0, 0};
            failed |= each(m, norm_output, &at, rows);
            failed |= each(m, multiply_dense, &others, dense_parts(&others));
        }
        failed |= each(m, search_piece, &at, rows * d->piece_count);
        failed |= each(m, weigh_piece, &at, rows * d->piece_count);
    }
}

/* ---------------------------------------------------------------- before the first token */

/* Rows whose K and V are kept: those up to the last one that is not wanted. */
static int64_t kept_rows(const Pass *p) {
    int64_t rows = p->rows, wanted = p->wanted;
    while (wanted && p->want[wanted - 1] == rows - 1) wanted--, rows--;
    return p->stop ? rows : 0;
}

/* Lays out the buffers in `memory`; returns their bytes. With NULL, only the size counts. */
static int64_t furnish_draft(Drafting *d, char *memory) {
    const Pass *p = &d->c->committed;
    const int64_t n = p->model->hidden, count = p->wanted;
    const Pass step = {.model = p->model, .rows = count, .wanted = count};
    State8 one = {.p = &step};
    char *at = memory;
    d->features = is_shown(p) ? cut(&at, 4 * p->rows * n) : (float *)p->x;
    d->x = is_shown(p) || p->x ? cut(&at, 4 * count * n) : NULL;
    d->normed = cut(&at, 4 * count * n);
    d->scores = cut(&at, 4 * count * p->model->vocabulary);
    d->other_scores = cut(&at, 4 * count * d->c->others);
    d->piece_count = pieces_of(p->model->vocabulary);
    d->bests = cut(&at, count * d->piece_count * (int64_t)sizeof *d->bests);
    d->weights = cut(&at, count * d->piece_count * (int64_t)sizeof *d->weights);
    d->memory = at;
    d->reading.p = p;
    d->reading.own = p->rows <= OWN_ROWS;
    at += most(furnish(&d->reading, d->memory), furnish(&one, NULL));
    return at - memory;
}

/* The numbers of each depth's rows: six for each row, then its chain, its source's length and its ancestors. */
static int open_depths(Drafting *d) {
    const Chain *c = d->c;
    const int64_t count = c->committed.wanted, each_depth = 8 * count + (count * c->longest + 1) / 2;
    d->depths = calloc((size_t)c->longest + 1, sizeof *d->depths + (size_t)each_depth * sizeof(int64_t));
    if (!d->depths) return 1;
    int64_t *numbers = (int64_t *)(d->depths + c->longest + 1);
    for (int64_t i = 0; i <= c->longest; i++, numbers += each_depth) {
        Pass *p = &d->depths[i].pass;
        *p = c->committed;
        p->shown = NULL;
        p->shown_in_slots = NULL;
        p->x = d->x;
        p->logits = d->scores;
        p->rows = 0;
        p->depth = i;
        p->tokens = numbers;
        p->positions = numbers + count;
        p->slots = numbers + 2 * count;
        p->lines = numbers + 3 * count;
        p->context = numbers + 4 * count;
        p->want = numbers + 5 * count;
        d->depths[i].chains = numbers + 6 * count;
        if (p->sources) {
            d->depths[i].sources = *p->sources;
            d->depths[i].sources.lengths = numbers + 7 * count;
            p->sources = &d->depths[i].sources;
        }
        p->ancestors = (int32_t *)(numbers + 8 * count);
    }
    return 0;
}

static int draft_chains(const Chain *c) { /* 1: no memory; 2: an index is out of its range */
    const Pass *p = &c->committed;
    if (is_outside(p)) return 2;
    for (int64_t i = 0; i < p->wanted; i++) {
        if (c->budgets[i] < 1 || c->budgets[i] > c->longest) return 2;
        if (p->positions[p->want[i]] + c->budgets[i] > p->model->length) return 2;
        for (int64_t j = 0; j + 1 < c->budgets[i]; j++)
            if (c->slots[i * c->longest + j] < 0 || c->slots[i * c->longest + j] >= p->slot_count) return 2;
    }
    Drafting d = {.c = c};
    char *memory = (char *)scratch(2, furnish_draft(&d, NULL) / 4);
    if (!memory) return 1;
    furnish_draft(&d, memory);
    if (open_depths(&d)) return 1;
    d.filling.pass = *p;
    d.filling.pass.shown = NULL;
    d.filling.pass.shown_in_slots = NULL;
    d.filling.pass.x = d.features;
    d.filling.pass.rows = kept_rows(p);
    d.filling.pass.stop = p->stop - 1;
    d.filling.pass.wanted = 0;
    int failed = d.filling.pass.rows && open_depth(&d.filling, d.memory);
    failed = failed || together(draft_all, &d, p->threads);
    free_plan(&d.filling.plan);
    for (int64_t i = 0; i <= c->longest; i++) free_plan(&d.depths[i].plan);
    free(d.depths);
    return failed;
}

#endif
