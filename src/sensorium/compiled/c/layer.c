/* Between the products of a decoder layer: norms, rotation, gate, and their gradients.

   Sums over all rows are taken in parts of SUMMED rows, one after the other, so that no bit depends on threads. */

#include "vectors.h"

#define SUMMED 64

/* x and residual [rows, width]; residual and summed are NULL where nothing is added. */
struct norms {
    int64_t rows, width;
    double eps;
    const float *x, *residual, *weight;
    float *out, *summed, *scales;
};

/* `more` is added to the input's gradient, `result` is the norm again; either may be NULL. sums [rows / SUMMED, width]. */
struct norm_gradients {
    int64_t rows, width;
    const float *x, *weight, *scales, *gradient, *more;
    float *out, *result, *sums;
};

struct gates {
    int64_t count;
    const float *gate, *up, *gradient;
    float *out, *gate_gradient, *up_gradient;
};

/* joined [rows, (heads + 2 kv_heads) size]; cosine and sine [rows, size]. */
struct rotations {
    int64_t rows, heads, kv_heads, size;
    const float *cosine, *sine;
    float *joined, *query, *key, *value;
};

int64_t rows_of_a_sum(void) { return SUMMED; }

static void norm_rows(const void *given, int64_t worker, int64_t first, int64_t last) {
    (void)worker;
    const struct norms *n = given;
    const int64_t width = n->width, whole = width / LANES * LANES;
    for (int64_t r = first; r < last; r++) {
        const float *x = n->x + r * width;
        float *out = n->out + r * width, rest = 0.0f;
        vec squares = {0};
        if (n->residual) {
            const float *residual = n->residual + r * width;
            float *summed = n->summed + r * width;
            for (int64_t j = 0; j < whole; j += LANES) *(vec *)(summed + j) = *(const vec *)(residual + j) + *(const vec *)(x + j);
            for (int64_t j = whole; j < width; j++) summed[j] = residual[j] + x[j];
            x = summed;
        }
        for (int64_t j = 0; j < whole; j += LANES) squares += *(const vec *)(x + j) * *(const vec *)(x + j);
        for (int64_t j = whole; j < width; j++) rest += x[j] * x[j];
        const float scale = 1.0f / sqrtf((rest + total(squares)) / (float)width + (float)n->eps);
        n->scales[r] = scale;
        for (int64_t j = 0; j < whole; j += LANES) *(vec *)(out + j) = *(const vec *)(n->weight + j) * (*(const vec *)(x + j) * scale);
        for (int64_t j = whole; j < width; j++) out[j] = n->weight[j] * (x[j] * scale);
    }
}

void norm(const struct norms *n, int64_t threads) { over_threads(norm_rows, n, n->rows, 1, threads); }

static void norm_gradient_parts(const void *given, int64_t worker, int64_t first, int64_t last) {
    (void)worker;
    const struct norm_gradients *n = given;
    const int64_t width = n->width, whole = width / LANES * LANES;
    for (int64_t part = first; part < last; part++) {
        float *sums = n->sums + part * width;
        const int64_t end = (part + 1) * SUMMED < n->rows ? (part + 1) * SUMMED : n->rows;
        memset(sums, 0, width * sizeof *sums);
        for (int64_t r = part * SUMMED; r < end; r++) {
            const float *x = n->x + r * width, *gradient = n->gradient + r * width, scale = n->scales[r];
            const float *more = n->more ? n->more + r * width : NULL;
            float *out = n->out + r * width, rest = 0.0f;
            vec products = {0};
            for (int64_t j = 0; j < whole; j += LANES) {
                const vec normed = *(const vec *)(x + j) * scale, pull = *(const vec *)(gradient + j);
                *(vec *)(sums + j) += pull * normed;
                products += pull * *(const vec *)(n->weight + j) * normed;
            }
            for (int64_t j = whole; j < width; j++) {
                const float normed = x[j] * scale;
                sums[j] += gradient[j] * normed;
                rest += gradient[j] * n->weight[j] * normed;
            }
            const float mean = (rest + total(products)) / (float)width;
            for (int64_t j = 0; j < whole; j += LANES) {
                const vec normed = *(const vec *)(x + j) * scale, weight = *(const vec *)(n->weight + j);
                vec found = scale * (*(const vec *)(gradient + j) * weight - normed * mean);
                if (more) found += *(const vec *)(more + j);
                *(vec *)(out + j) = found;
                if (n->result) *(vec *)(n->result + r * width + j) = weight * normed;
            }
            for (int64_t j = whole; j < width; j++) {
                const float normed = x[j] * scale, found = scale * (gradient[j] * n->weight[j] - normed * mean);
                if (n->result) n->result[r * width + j] = n->weight[j] * normed;
                out[j] = more ? found + more[j] : found;
            }
        }
    }
}

void norm_gradient(const struct norm_gradients *n, int64_t threads) {
    over_threads(norm_gradient_parts, n, (n->rows + SUMMED - 1) / SUMMED, 1, threads);
}

/* One vector; the last may be cut off, and is then computed in a copy with room for a whole one. */
INLINE void gate_vector(const struct gates *g, const float *gate, const float *up, const float *gradient, float *out,
                        float *gate_gradient, float *up_gradient) {
    const vec opened = *(const vec *)gate, other = *(const vec *)up;
    const vec sigmoid = 1.0f / (1.0f + exp_of(-opened)), silu = opened * sigmoid;
    if (g->out) *(vec *)out = silu * other;
    if (!g->gradient) return;
    const vec pull = *(const vec *)gradient;
    *(vec *)gate_gradient = pull * other * (sigmoid + silu * (1.0f - sigmoid));
    *(vec *)up_gradient = pull * silu;
}

static void gate_numbers(const void *given, int64_t worker, int64_t first, int64_t last) {
    (void)worker;
    const struct gates *g = given;
    int64_t at = first;
    for (; at + LANES <= last; at += LANES)
        gate_vector(g, g->gate + at, g->up + at, g->gradient + at, g->out + at, g->gate_gradient + at, g->up_gradient + at);
    if (at == last) return;
    const size_t bytes = (last - at) * sizeof(float);
    float from[3][LANES] = {{0}}, to[3][LANES];
    memcpy(from[0], g->gate + at, bytes);
    memcpy(from[1], g->up + at, bytes);
    if (g->gradient) memcpy(from[2], g->gradient + at, bytes);
    gate_vector(g, from[0], from[1], from[2], to[0], to[1], to[2]);
    if (g->out) memcpy(g->out + at, to[0], bytes);
    if (g->gradient) memcpy(g->gate_gradient + at, to[1], bytes);
    if (g->gradient) memcpy(g->up_gradient + at, to[2], bytes);
}

/* silu(gate) · up to `out`, where it is not NULL; with a gradient of that, those of gate and up. */
void gate_values(const struct gates *g, int64_t threads) { over_threads(gate_numbers, g, g->count, LANES, threads); }

INLINE void turn(const float *from, float *to, const float *cosine, const float *sine, int64_t size, int back) {
    const int64_t half = size / 2;
    for (int64_t j = 0; j < half; j++) {
        const float one = from[j], two = from[j + half];
        to[j] = back ? one * cosine[j] + two * sine[j + half] : one * cosine[j] - two * sine[j];
        to[j + half] = back ? two * cosine[j + half] - one * sine[j] : two * cosine[j + half] + one * sine[j + half];
    }
}

INLINE void rotate_rows(const struct rotations *t, int64_t first, int64_t last, int back) {
    const int64_t size = t->size, all = t->heads + 2 * t->kv_heads;
    for (int64_t r = first; r < last; r++)
        for (int64_t h = 0; h < all; h++) {
            float *joined = t->joined + (r * all + h) * size, *apart;
            if (h < t->heads) apart = t->query + (r * t->heads + h) * size;
            else if (h < t->heads + t->kv_heads) apart = t->key + (r * t->kv_heads + h - t->heads) * size;
            else apart = t->value + (r * t->kv_heads + h - t->heads - t->kv_heads) * size;
            if (h >= t->heads + t->kv_heads) memcpy(back ? joined : apart, back ? apart : joined, size * sizeof(float));
            else turn(back ? apart : joined, back ? joined : apart, t->cosine + r * size, t->sine + r * size, size, back);
        }
}

static void split_rows(const void *given, int64_t worker, int64_t first, int64_t last) {
    (void)worker;
    rotate_rows(given, first, last, 0);
}

static void join_rows(const void *given, int64_t worker, int64_t first, int64_t last) {
    (void)worker;
    rotate_rows(given, first, last, 1);
}

/* Rotated queries and keys, and values, of what one product gave. */
void split_rotated(const struct rotations *t, int64_t threads) { over_threads(split_rows, t, t->rows, 1, threads); }

/* The gradient of what was split. */
void join_rotated(const struct rotations *t, int64_t threads) { over_threads(join_rows, t, t->rows, 1, threads); }
