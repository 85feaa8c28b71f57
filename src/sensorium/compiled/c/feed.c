/* One token per row through a decoder: its keys and values to the cache, the logits of the next.

   Every product is computed in tiles of TILE × COLUMNS, one input after the other. Missing rows of the last tile are
   computed like the others and dropped. So the bits of a row depend neither on its neighbours nor on threads. */

#include "decode.h"

#define VECTORS 2
#define COLUMNS (VECTORS * LANES)
#define LINE 16 /* floats of a cache line */

/* Floats that a row needs while it is computed. */
struct room {
    int64_t wide, narrow, scores, all;
};

int64_t tile_columns(void) { return COLUMNS; }

static struct room room_of(const struct model *m, int64_t capacity) {
    const int64_t attended = m->heads * m->size;
    struct room room = {(m->heads + 2 * m->kv_heads) * m->size, m->width > attended ? m->width : attended, 0, 0};
    for (int64_t i = 0; i < m->layers; i++) {
        if (m->layer[i].gate_up.outer > room.wide) room.wide = m->layer[i].gate_up.outer;
        if (m->layer[i].down.inner > room.narrow) room.narrow = m->layer[i].down.inner;
    }
    room.wide += LANES; /* `gate` reads and writes whole vectors */
    room.narrow += LANES;
    room.scores = PADDED(capacity, LANES);
    room.all = m->width + room.wide + room.narrow + room.scores;
    return room;
}

/* Floats of `memory` for so many rows. */
int64_t feed_memory(const struct model *m, int64_t rows, int64_t capacity) {
    return PADDED(rows, TILE) * room_of(m, capacity).all;
}

/* y = x · weight + bias, of `rows` rows; x has room for whole tiles of rows. With `add` it is added to y. */
static void multiply(const struct product *p, const float *x, int64_t x_step, float *y, int64_t y_step, int64_t rows,
                     int add) {
    for (int64_t c = 0; c < p->outer; c += COLUMNS) {
        const float *weight = p->weight + c * p->inner;
        const int64_t width = p->outer - c < COLUMNS ? p->outer - c : COLUMNS;
        for (int64_t r = 0; r < rows; r += TILE) {
            vec sum[TILE][VECTORS] = {{{0}}};
            for (int64_t k = 0; k < p->inner; k++)
                for (int i = 0; i < TILE; i++)
                    for (int v = 0; v < VECTORS; v++)
                        sum[i][v] += x[(r + i) * x_step + k] * *(const vec *)(weight + k * COLUMNS + v * LANES);
            for (int i = 0; i < TILE && r + i < rows; i++) {
                float *to = y + (r + i) * y_step + c;
                const float *given = (const float *)sum[i];
                for (int64_t j = 0; j < width; j++) {
                    const float value = p->bias ? given[j] + p->bias[c + j] : given[j];
                    to[j] = add ? to[j] + value : value;
                }
            }
        }
    }
}

/* y = weight · x / rms(x) */
static void normalise(const struct norm *norm, const float *x, float *y, int64_t width) {
    vec squares = {0};
    float sum = 0.0f;
    int64_t j = 0;
    for (; j + LANES <= width; j += LANES) squares += *(const vec *)(x + j) * *(const vec *)(x + j);
    for (; j < width; j++) sum += x[j] * x[j];
    const float scale = 1.0f / sqrtf((sum + total(squares)) / (float)width + (float)norm->eps);
    for (j = 0; j < width; j++) y[j] = norm->weight[j] * (x[j] * scale);
}

/* x · cos + (x₂, x₁) · (-sin₁, sin₂), as the table has them. */
static void rotate(float *x, const float *table, int64_t size) {
    const int64_t half = size / 2;
    const float *cosine = table, *sine = table + size;
    for (int64_t j = 0; j < half; j++) {
        const float one = x[j], two = x[j + half];
        x[j] = one * cosine[j] + two * sine[j];
        x[j + half] = two * cosine[j + half] + one * sine[j + half];
    }
}

/* Scores become their exponentials below the largest; the sum of these. Room for whole vectors is at the end. */
static float soften(float *scores, int64_t seen) {
    vec tops = all_of(-INFINITY), sums = {0};
    for (int64_t s = seen; s < PADDED(seen, LANES); s++) scores[s] = -INFINITY;
    for (int64_t s = 0; s < seen; s += LANES) tops = larger(*(vec *)(scores + s), tops);
    const float top = largest(tops);
    for (int64_t s = 0; s < seen; s += LANES) sums += *(vec *)(scores + s) = exp_of(*(vec *)(scores + s) - top);
    return total(sums);
}

/* Attention of one query over `seen` entries, in vectors of a width that divides the head's size. Four entries at a time;
   in place of those that the last four lack, the last one is taken again, and dropped. */
#define ATTEND(NAME, VEC, WIDTH, TOTALS)                                                                                \
    static void NAME(const float *query, const float *keys, const float *values, int64_t seen, int64_t size,            \
                     float scaling, float *scores, float *out) {                                                        \
        for (int64_t s = 0; s < seen; s += 4) {                                                                         \
            VEC sums[4] = {{0}};                                                                                        \
            const float *key[4];                                                                                        \
            for (int i = 0; i < 4; i++) key[i] = keys + (s + i < seen ? s + i : seen - 1) * size;                       \
            for (int64_t d = 0; d < 4 * size; d += LINE) __builtin_prefetch(values + s * size + d);                     \
            for (int64_t d = 0; d < size; d += WIDTH)                                                                   \
                for (int i = 0; i < 4; i++) sums[i] += *(const VEC *)(query + d) * *(const VEC *)(key[i] + d);          \
            *(vec4 *)(scores + s) = TOTALS(sums[0], sums[1], sums[2], sums[3]) * scaling;                            \
        }                                                                                                               \
        const float share = 1.0f / soften(scores, seen);                                                                \
        for (int64_t d = 0; d < size; d += WIDTH) {                                                                     \
            VEC sums[4] = {{0}};                                                                                        \
            int64_t s = 0;                                                                                              \
            for (; s + 4 <= seen; s += 4)                                                                               \
                for (int i = 0; i < 4; i++) sums[i] += scores[s + i] * *(const VEC *)(values + (s + i) * size + d);     \
            for (; s < seen; s++) sums[0] += scores[s] * *(const VEC *)(values + s * size + d);                         \
            *(VEC *)(out + d) = ((sums[0] + sums[1]) + (sums[2] + sums[3])) * share;                                    \
        }                                                                                                               \
    }

ATTEND(attend_wide, vec, LANES, totals)
ATTEND(attend_narrow, vec4, 4, totals_of_fours)

/* Keys and values of one row to the cache, then its heads' attention to `out`. */
static void attend_row(const struct tokens *t, const struct layer *layer, int64_t index, int64_t row, float *heads,
                       float *scores, float *out) {
    const struct model *m = t->model;
    const int64_t size = m->size, half = t->block_rows * m->kv_heads * t->capacity * size;
    const float *table = t->table + t->positions[row] * 2 * size;
    float *keys = t->block + 2 * index * half, *values = keys + half;
    float *key = heads + m->heads * size, *value = key + m->kv_heads * size;
    for (int64_t h = 0; h < m->heads + m->kv_heads; h++) {
        const struct norm *norm = h < m->heads ? &layer->query : &layer->key;
        if (norm->weight) normalise(norm, heads + h * size, heads + h * size, size);
        rotate(heads + h * size, table, size);
    }
    const int64_t sharing = m->heads / m->kv_heads;
    for (int64_t h = 0; h < m->kv_heads; h++) {
        const int64_t place = t->write[row * m->kv_heads + h], start = (row * m->kv_heads + h) * t->capacity;
        memcpy(keys + place * size, key + h * size, size * sizeof(float));
        memcpy(values + place * size, value + h * size, size * sizeof(float));
        for (int64_t q = h * sharing; q < (h + 1) * sharing; q++)
            (size % LANES ? attend_narrow : attend_wide)(heads + q * size, keys + start * size, values + start * size,
                                                         place - start + 1, size, (float)layer->scaling, scores,
                                                         out + q * size);
    }
}

/* silu(gate) · up; what is computed past `inner` is not used. */
static void gate(const float *gate_up, float *out, int64_t inner) {
    for (int64_t j = 0; j < inner; j += LANES) {
        const vec x = *(const vec *)(gate_up + j);
        *(vec *)(out + j) = x / (1.0f + exp_of(-x)) * *(const vec *)(gate_up + inner + j);
    }
}

void feed_rows(const void *given, int64_t worker, int64_t first, int64_t last) {
    (void)worker; /* rows have memory of their own */
    const struct tokens *t = given;
    const struct model *m = t->model;
    const struct room room = room_of(m, t->capacity);
    const int64_t rows = last - first, computed = PADDED(rows, TILE), width = m->width;
    float *x = t->memory + first * room.all, *wide = x + computed * width, *narrow = wide + computed * room.wide;
    float *scores = narrow + computed * room.narrow;
    for (int64_t r = 0; r < rows; r++)
        memcpy(x + r * width, m->embedding + t->tokens[first + r] * width, width * sizeof(float));
    memset(narrow + rows * room.narrow, 0, (computed - rows) * room.narrow * sizeof(float));
    for (int64_t i = 0; i < m->layers; i++) {
        const struct layer *layer = &m->layer[i];
        for (int64_t r = 0; r < rows; r++) normalise(&layer->before, x + r * width, narrow + r * room.narrow, width);
        multiply(&layer->query_key_value, narrow, room.narrow, wide, room.wide, rows, 0);
        for (int64_t r = 0; r < rows; r++)
            attend_row(t, layer, i, first + r, wide + r * room.wide, scores, narrow + r * room.narrow);
        multiply(&layer->out, narrow, room.narrow, x, width, rows, 1);
        for (int64_t r = 0; r < rows; r++) normalise(&layer->between, x + r * width, narrow + r * room.narrow, width);
        multiply(&layer->gate_up, narrow, room.narrow, wide, room.wide, rows, 0);
        for (int64_t r = 0; r < rows; r++) gate(wide + r * room.wide, narrow + r * room.narrow, layer->down.inner);
        multiply(&layer->down, narrow, room.narrow, x, width, rows, 1);
    }
    for (int64_t r = 0; r < rows; r++) normalise(&m->last, x + r * width, narrow + r * room.narrow, width);
    multiply(&m->head, narrow, room.narrow, t->logits + first * m->head.outer, m->head.outer, rows, 0);
}

void feed(const struct tokens *t, int64_t threads) { over_threads(feed_rows, t, t->rows, TILE, threads); }
