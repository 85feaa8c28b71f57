/* Attention over trees of token runs that lie flat, and its gradients: a run sees its ancestors, and itself causally.

   A tree and a key head are one worker's, from beginning to end, so no sum depends on threads. Its runs' keys and values are
   laid out anew, an ancestors' part once for all runs below it: rows of whole vectors, and transposed. */

#include "vectors.h"

#define BLOCK 64 /* queries whose scores are held at a time: whole tiles */
#define STEP (TILE > LANES ? TILE : LANES) /* places of the context are whole vectors, and whole tiles of rows */

/* Runs of tree i are first_run[i] … first_run[i + 1] - 1, ancestors before those below them; `above` is a run, or -1.
   query, out and gradients of them [tokens, heads, size], key and value [tokens, kv_heads, size], logs [tokens, heads]. */
struct trees {
    int64_t trees, heads, kv_heads, size, longest;
    double scaling;
    const int64_t *first_run, *start, *length, *prefix, *above;
    const float *query, *key, *value;
    float *out, *logs;
    const float *gradient;
    float *query_gradient, *key_gradient, *value_gradient, *memory;
};

/* What a worker holds: keys and values of a run's whole context, and a block of queries. */
struct held {
    int64_t wide, context;                       /* size and longest context as whole vectors */
    float *key, *value, *key_across, *value_across; /* [context, wide], and [size, context] */
    float *key_gradient, *value_gradient;
    float *query, *out, *scores, *slopes; /* [BLOCK, wide] and [BLOCK, context] */
    float *query_gradient;
};

static int64_t room_of(int64_t size, int64_t longest) {
    const int64_t wide = PADDED(size, LANES), context = PADDED(longest, STEP);
    return 4 * context * wide + 2 * size * context + BLOCK * (3 * wide + 2 * context);
}

/* Floats of `memory` for every thread. */
int64_t tree_memory(int64_t size, int64_t longest) { return room_of(size, longest); }

static struct held hold(const struct trees *t, int64_t worker) {
    struct held h = {.wide = PADDED(t->size, LANES), .context = PADDED(t->longest, STEP)};
    float *at = t->memory + worker * room_of(t->size, t->longest);
    float **rows[] = {&h.key, &h.value, &h.key_gradient, &h.value_gradient};
    for (int i = 0; i < 4; i++, at += h.context * h.wide) *rows[i] = at;
    h.key_across = at, at += t->size * h.context;
    h.value_across = at, at += t->size * h.context;
    h.query = at, at += BLOCK * h.wide;
    h.out = at, at += BLOCK * h.wide;
    h.query_gradient = at, at += BLOCK * h.wide;
    h.scores = at, at += BLOCK * h.context;
    h.slopes = at;
    return h;
}

/* One tile of c = a · b, or of c += a · b. `across`: a is given transposed. */
INLINE void tile(const int vectors, const int across, int64_t inner, const float *a, int64_t a_step,
                 const float *b, int64_t b_step, float *c, int64_t c_step, int add) {
    vec sum[TILE][2];
    for (int r = 0; r < TILE; r++)
        for (int v = 0; v < vectors; v++) sum[r][v] = (vec){0};
    for (int64_t k = 0; k < inner; k++)
        for (int v = 0; v < vectors; v++) {
            const vec x = *(const vec *)(b + k * b_step + v * LANES);
            for (int r = 0; r < TILE; r++) sum[r][v] += (across ? a[k * a_step + r] : a[r * a_step + k]) * x;
        }
    for (int r = 0; r < TILE; r++)
        for (int v = 0; v < vectors; v++) {
            vec *to = (vec *)(c + r * c_step + v * LANES);
            if (add) sum[r][v] += *to; /* as a whole: added one by one, they would be rounded to what is there */
            *to = sum[r][v];
        }
}

INLINE void tiles(const int across, int64_t columns, int64_t inner, const float *a, int64_t a_step,
                  const float *b, int64_t b_step, float *c, int64_t c_step, int add) {
    int64_t j = 0;
    for (; j + 2 * LANES <= columns; j += 2 * LANES)
        tile(2, across, inner, a, a_step, b + j, b_step, c + j, c_step, add);
    if (j < columns) tile(1, across, inner, a, a_step, b + j, b_step, c + j, c_step, add);
}

/* `columns` is a multiple of LANES; rows are computed in whole tiles, and there is room for them. */
INLINE void product(const int across, int64_t rows, int64_t columns, int64_t inner, const float *a, int64_t a_step,
                    const float *b, int64_t b_step, float *c, int64_t c_step, int add) {
    for (int64_t r = 0; r < rows; r += TILE)
        tiles(across, columns, inner, a + r * (across ? 1 : a_step), a_step, b, b_step, c + r * c_step, c_step, add);
}

static void multiply(int64_t rows, int64_t columns, int64_t inner, const float *a, int64_t a_step, const float *b,
                     int64_t b_step, float *c, int64_t c_step) {
    product(0, rows, columns, inner, a, a_step, b, b_step, c, c_step, 0);
}

/* c += transposed a · b */
static void add_product_across(int64_t rows, int64_t columns, int64_t inner, const float *a, int64_t a_step, const float *b,
                               int64_t b_step, float *c, int64_t c_step) {
    product(1, rows, columns, inner, a, a_step, b, b_step, c, c_step, 1);
}

/* A run's own tokens to place `at` of the context. */
static void lay(const struct trees *t, struct held *h, int64_t run, int64_t head, int64_t at) {
    const int64_t size = t->size;
    for (int64_t i = 0; i < t->length[run]; i++, at++) {
        const int64_t from = ((t->start[run] + i) * t->kv_heads + head) * size;
        memset(h->key + at * h->wide + size, 0, (h->wide - size) * sizeof(float));
        memset(h->value + at * h->wide + size, 0, (h->wide - size) * sizeof(float));
        memcpy(h->key + at * h->wide, t->key + from, size * sizeof(float));
        memcpy(h->value + at * h->wide, t->value + from, size * sizeof(float));
        for (int64_t d = 0; d < size; d++) {
            h->key_across[d * h->context + at] = t->key[from + d];
            h->value_across[d * h->context + at] = t->value[from + d];
        }
    }
}

static void lay_ancestors(const struct trees *t, struct held *h, int64_t run, int64_t head) {
    for (int64_t above = t->above[run]; above >= 0; above = t->above[above]) lay(t, h, above, head, t->prefix[above]);
}

/* Gradients of places `at` … of the context are added to those of a run's tokens. */
static void give_back(const struct trees *t, const struct held *h, int64_t run, int64_t head, int64_t at) {
    for (int64_t i = 0; i < t->length[run]; i++, at++) {
        const int64_t to = ((t->start[run] + i) * t->kv_heads + head) * t->size;
        for (int64_t d = 0; d < t->size; d++) {
            t->key_gradient[to + d] += h->key_gradient[at * h->wide + d];
            t->value_gradient[to + d] += h->value_gradient[at * h->wide + d];
        }
    }
}

static void give_back_to_ancestors(const struct trees *t, const struct held *h, int64_t run, int64_t head) {
    for (int64_t above = t->above[run]; above >= 0; above = t->above[above]) give_back(t, h, above, head, t->prefix[above]);
}

/* Rows of a block: row `first` + i of a run is query head head · share + `nth` of its token `token`. */
#define FOR_ROWS(first, rows, share)                                                         \
    for (int64_t i = 0, token = (first) / (share), nth = (first) % (share); i < (rows); i++, \
                 nth = nth + 1 < (share) ? nth + 1 : (token++, 0))

/* Where such a row stands among all tokens' heads. */
#define PLACE ((t->start[run] + token) * t->heads + head * share + nth)

/* Queries, or gradients, of a block; up to a whole tile others are zero. */
static void take_queries(const struct trees *t, const float *from, float *to, int64_t wide, int64_t run, int64_t head,
                         int64_t first, int64_t rows) {
    const int64_t share = t->heads / t->kv_heads;
    if (wide > t->size || rows % TILE) memset(to, 0, PADDED(rows, TILE) * wide * sizeof(float));
    FOR_ROWS(first, rows, share) memcpy(to + i * wide, from + PLACE * t->size, t->size * sizeof(float));
}

static void give_queries(const struct trees *t, const float *from, float *to, int64_t wide, int64_t run, int64_t head,
                         int64_t first, int64_t rows) {
    const int64_t share = t->heads / t->kv_heads;
    FOR_ROWS(first, rows, share) memcpy(to + PLACE * t->size, from + i * wide, t->size * sizeof(float));
}

/* What a row does not see weighs nothing. */
INLINE void hide(float *scores, int64_t seen, int64_t columns) {
    for (int64_t s = seen / LANES * LANES; s < columns; s += LANES)
        *(vec *)(scores + s) = chosen(places() < (int32_t)(seen - s), *(vec *)(scores + s), all_of(-INFINITY));
}

/* Scores become their exponentials below the row's largest. What these sum up to is kept as a logarithm, and over it
   `parts` are one. */
static void weigh(const struct trees *t, struct held *h, int64_t run, int64_t head, int64_t first, int64_t rows,
                  int64_t columns, float *parts) {
    const int64_t share = t->heads / t->kv_heads;
    FOR_ROWS(first, rows, share) {
        float *scores = h->scores + i * h->context;
        vec tops = all_of(-INFINITY), sums = {0};
        hide(scores, t->prefix[run] + token + 1, columns);
        for (int64_t s = 0; s < columns; s += LANES) tops = larger(*(vec *)(scores + s), tops);
        const float top = largest(tops);
        for (int64_t s = 0; s < columns; s += LANES) sums += *(vec *)(scores + s) = exp_of(*(vec *)(scores + s) - top);
        const float sum = total(sums);
        parts[i] = 1.0f / sum;
        t->logs[PLACE] = top + logf(sum);
    }
}

/* Scores become attention weights, by these logarithms. */
static void weigh_again(const struct trees *t, struct held *h, int64_t run, int64_t head, int64_t first, int64_t rows,
                        int64_t columns) {
    const int64_t share = t->heads / t->kv_heads;
    FOR_ROWS(first, rows, share) {
        float *scores = h->scores + i * h->context;
        const float log = t->logs[PLACE];
        hide(scores, t->prefix[run] + token + 1, columns);
        for (int64_t s = 0; s < columns; s += LANES) *(vec *)(scores + s) = exp_of(*(vec *)(scores + s) - log);
    }
}

/* Slopes of the weights become slopes of the scores: weight · (slope - the row's mean slope) · scaling. */
static void soften_slopes(const struct trees *t, struct held *h, int64_t rows, int64_t columns) {
    for (int64_t i = 0; i < rows; i++) {
        float *slopes = h->slopes + i * h->context;
        const float *weights = h->scores + i * h->context;
        vec sums = {0};
        for (int64_t s = 0; s < columns; s += LANES) sums += *(vec *)(slopes + s) * *(const vec *)(weights + s);
        const float mean = total(sums), scaling = (float)t->scaling;
        for (int64_t s = 0; s < columns; s += LANES)
            *(vec *)(slopes + s) = *(const vec *)(weights + s) * (*(vec *)(slopes + s) - mean) * scaling;
    }
}

/* Scores of a block of a run's queries; returns how many places of the context the block sees, as whole vectors. */
static int64_t score(const struct trees *t, struct held *h, int64_t run, int64_t head, int64_t first, int64_t rows) {
    const int64_t share = t->heads / t->kv_heads, seen = t->prefix[run] + (first + rows - 1) / share + 1;
    const int64_t columns = PADDED(seen, STEP), all = rows * h->wide;
    take_queries(t, t->query, h->query, h->wide, run, head, first, rows);
    for (int64_t j = 0; j < all; j += LANES) *(vec *)(h->query + j) *= (float)t->scaling;
    multiply(rows, columns, t->size, h->query, h->wide, h->key_across, h->context, h->scores, h->context);
    return columns;
}

static void attend_run(const struct trees *t, struct held *h, int64_t run, int64_t head) {
    const int64_t all = t->length[run] * (t->heads / t->kv_heads);
    for (int64_t first = 0; first < all; first += BLOCK) {
        const int64_t rows = all - first < BLOCK ? all - first : BLOCK;
        const int64_t columns = score(t, h, run, head, first, rows);
        float parts[BLOCK];
        weigh(t, h, run, head, first, rows, columns, parts);
        multiply(rows, h->wide, columns, h->scores, h->context, h->value, h->wide, h->out, h->wide);
        for (int64_t i = 0; i < rows; i++)
            for (int64_t d = 0; d < h->wide; d += LANES) *(vec *)(h->out + i * h->wide + d) *= parts[i];
        give_queries(t, h->out, t->out, h->wide, run, head, first, rows);
    }
}

static void pull_run(const struct trees *t, struct held *h, int64_t run, int64_t head) {
    const int64_t all = t->length[run] * (t->heads / t->kv_heads);
    for (int64_t first = 0; first < all; first += BLOCK) {
        const int64_t rows = all - first < BLOCK ? all - first : BLOCK;
        const int64_t columns = score(t, h, run, head, first, rows);
        weigh_again(t, h, run, head, first, rows, columns);
        take_queries(t, t->gradient, h->out, h->wide, run, head, first, rows);
        multiply(rows, columns, t->size, h->out, h->wide, h->value_across, h->context, h->slopes, h->context);
        add_product_across(columns, h->wide, rows, h->scores, h->context, h->out, h->wide, h->value_gradient, h->wide);
        soften_slopes(t, h, rows, columns);
        multiply(rows, h->wide, columns, h->slopes, h->context, h->key, h->wide, h->query_gradient, h->wide);
        take_queries(t, t->query, h->query, h->wide, run, head, first, rows);
        add_product_across(columns, h->wide, rows, h->slopes, h->context, h->query, h->wide, h->key_gradient, h->wide);
        give_queries(t, h->query_gradient, t->query_gradient, h->wide, run, head, first, rows);
    }
}

static void forget(struct held *h, int64_t from, int64_t to) {
    memset(h->key_gradient + from * h->wide, 0, (to - from) * h->wide * sizeof(float));
    memset(h->value_gradient + from * h->wide, 0, (to - from) * h->wide * sizeof(float));
}

/* One tree and key head. Runs below the same one stand next to each other, or their ancestors are laid out again. */
static void walk(const struct trees *t, struct held *h, int64_t tree, int64_t head, int back) {
    int64_t above = -1;
    /* Beyond a run's tokens lies what an earlier one left; it weighs nothing, but it must be a number. */
    memset(h->key, 0, 4 * h->context * h->wide * sizeof(float));
    memset(h->key_across, 0, 2 * t->size * h->context * sizeof(float));
    for (int64_t run = t->first_run[tree]; run < t->first_run[tree + 1]; run++) {
        const int64_t prefix = t->prefix[run];
        if (t->above[run] != above) {
            if (back && run > t->first_run[tree]) give_back_to_ancestors(t, h, run - 1, head);
            above = t->above[run];
            lay_ancestors(t, h, run, head);
            if (back) forget(h, 0, prefix);
        }
        lay(t, h, run, head, prefix);
        if (!back) {
            attend_run(t, h, run, head);
            continue;
        }
        forget(h, prefix, PADDED(prefix + t->length[run], STEP));
        pull_run(t, h, run, head);
        give_back(t, h, run, head, prefix);
    }
    if (back && t->first_run[tree] < t->first_run[tree + 1]) give_back_to_ancestors(t, h, t->first_run[tree + 1] - 1, head);
}

INLINE void walk_units(const struct trees *t, int64_t worker, int64_t first, int64_t last, int back) {
    struct held h = hold(t, worker);
    for (int64_t unit = first; unit < last; unit++) walk(t, &h, unit / t->kv_heads, unit % t->kv_heads, back);
}

static void attend_units(const void *given, int64_t worker, int64_t first, int64_t last) {
    walk_units(given, worker, first, last, 0);
}

static void pull_units(const void *given, int64_t worker, int64_t first, int64_t last) {
    walk_units(given, worker, first, last, 1);
}

/* Attention to `out`, and the logarithms of the weights' sums to `logs`. */
void attend_trees(const struct trees *t, int64_t threads) {
    over_threads(attend_units, t, t->trees * t->kv_heads, 1, threads);
}

/* Gradients of queries, keys and values; those of keys and values are added to what is there. */
void attend_trees_back(const struct trees *t, int64_t threads) {
    over_threads(pull_units, t, t->trees * t->kv_heads, 1, threads);
}
