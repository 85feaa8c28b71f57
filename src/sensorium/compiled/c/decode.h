/* A decode step: what its files share. */

#ifndef SENSORIUM_DECODE_H
#define SENSORIUM_DECODE_H

#include "vectors.h"

struct norm {
    const float *weight; /* NULL: no such norm */
    double eps;
};

/* Weights [outer / COLUMNS, inner, COLUMNS], the last tile padded with zeros; bias [outer], or NULL. */
struct product {
    const float *weight, *bias;
    int64_t inner, outer;
};

struct layer {
    struct norm before, query, key, between;
    struct product query_key_value, out, gate_up, down;
    double scaling;
};

struct model {
    int64_t layers, width, heads, kv_heads, size;
    const struct layer *layer;
    const float *embedding;
    struct norm last;
    struct product head;
};

/* block [layers, 2, block_rows, kv_heads, capacity, size]; write [rows, kv_heads], places in it; table [known, 2 size]. */
struct tokens {
    const struct model *model;
    int64_t rows, block_rows, capacity;
    const int64_t *tokens, *positions, *write;
    float *block;
    const float *table;
    float *logits, *memory;
};

/* Sampling parameters that no row needs are NULL. packed [3, rows]: tokens, log-probs, sampled log-probs. */
struct draws {
    int64_t rows, vocab, unit_bits, forbidden_count, stop_count, kv_heads;
    const float *logits;
    const double *uniforms;
    const int64_t *forbidden, *stop;
    const float *temperature;
    const uint8_t *greedy, *stop_masked;
    const int64_t *top_k;
    const double *top_p;
    int64_t *tokens, *positions, *write, *see;
    float *bias;
    double *packed;
    int64_t *memory;
};

/* Work on rows from `first` up to `last`, for over_threads. */
void feed_rows(const void *tokens, int64_t worker, int64_t first, int64_t last);
void draw_rows(const void *draws, int64_t worker, int64_t first, int64_t last);

#endif
