/* The next token of every row, as sampler.py defines it; then the rows' tensors are moved on to the next step. */

#include "decode.h"

#define LOG_2 0.6931471805599453
#define SKIPPED 32 /* tokens that are passed over at once where the uniform lands beyond them */

struct weighed {
    int64_t weight, token;
};

/* Integers of `memory` for every thread: for each token its place when sorted, its weight and its logit. */
int64_t draw_memory(int64_t vocab) { return PADDED(vocab, LANES) * 4; }

typedef int64_t weights_vec __attribute__((vector_size(8 * LANES), aligned(8), may_alias));

/* Heavier first; of equal ones the smaller token. */
static int heavier(const void *one, const void *other) {
    const struct weighed *a = one, *b = other;
    if (a->weight != b->weight) return a->weight < b->weight ? 1 : -1;
    return a->token < b->token ? -1 : 1;
}

/* The policy's logits: over the temperature, masked ids at -inf, and -inf up to whole vectors. */
static void scale(const struct draws *d, int64_t row, float *scaled) {
    const float *logits = d->logits + row * d->vocab, temperature = d->temperature ? d->temperature[row] : 1.0f;
    if (temperature == 1.0f) memcpy(scaled, logits, d->vocab * sizeof *scaled);
    else
        for (int64_t j = 0; j < d->vocab; j++) scaled[j] = logits[j] / temperature;
    for (int64_t j = d->vocab; j < PADDED(d->vocab, LANES); j++) scaled[j] = -INFINITY;
    for (int64_t j = 0; j < d->forbidden_count; j++) scaled[d->forbidden[j]] = -INFINITY;
    if (d->stop_masked && d->stop_masked[row])
        for (int64_t j = 0; j < d->stop_count; j++) scaled[d->stop[j]] = -INFINITY;
}

/* Weights with top-k, then top-p within it. */
static void truncate_weights(int64_t *weights, int64_t vocab, int64_t top_k, double top_p, struct weighed *sorted) {
    int64_t count = 0, total = 0, before = 0;
    for (int64_t j = 0; j < vocab; j++)
        if (weights[j] > 0) sorted[count++] = (struct weighed){weights[j], j};
    qsort(sorted, count, sizeof *sorted, heavier);
    memset(weights, 0, vocab * sizeof *weights);
    if (count > top_k) count = top_k;
    for (int64_t i = 0; i < count; i++) total += sorted[i].weight;
    int64_t mass = total;
    if (top_p < 1) {
        mass = (int64_t)ceil((double)total * top_p);
        if (mass < 1) mass = 1;
    }
    for (int64_t i = 0; i < count && before < mass; before += sorted[i++].weight) weights[sorted[i].token] = sorted[i].weight;
}

/* One row's token; its log-prob as policy, and as sampled. Logits that are not finite give log-probs that are not. */
static int64_t draw_row(const struct draws *d, int64_t row, float *scaled, int64_t *weights, struct weighed *sorted,
                        double *logprob, double *sampled) {
    int64_t all = 0, total, token;
    scale(d, row, scaled);
    vec tops = all_of(-INFINITY);
    ivec ordered = ~(ivec){0}; /* where no NaN was met */
    for (int64_t j = 0; j < d->vocab; j += LANES) {
        const vec x = *(vec *)(scaled + j);
        tops = larger(x, tops);
        ordered &= x == x;
    }
    float top = tops[0];
    int finite = 1;
    for (int i = 0; i < LANES; i++) {
        top = tops[i] > top ? tops[i] : top;
        finite &= ordered[i] != 0;
    }
    if (!finite || isinf(top)) {
        *logprob = *sampled = NAN;
        return 0;
    }
    const float unit = ldexpf(1.0f, (int)d->unit_bits);
    weights_vec sums = {0};
    for (int64_t j = 0; j < d->vocab; j += LANES) {
        const vec shifted = *(vec *)(scaled + j) - top;
        *(vec *)(scaled + j) = shifted;
        sums += *(weights_vec *)(weights + j) = __builtin_convertvector(exp_of(shifted) * unit, weights_vec);
    }
    for (int i = 0; i < LANES; i++) all += sums[i];
    total = all;
    if (d->top_k && (d->top_k[row] < d->vocab || d->top_p[row] < 1)) {
        truncate_weights(weights, d->vocab, d->top_k[row], d->top_p[row], sorted);
        for (total = 0, token = 0; token < d->vocab; token++) total += weights[token];
    }
    const int greedy = d->greedy && d->greedy[row];
    if (greedy) {
        for (token = 0; scaled[token] < 0;) token++;
    } else {
        int64_t target = (int64_t)(d->uniforms[row] * (double)total), sum = 0;
        if (target > total - 1) target = total - 1;
        for (token = 0; token + SKIPPED < d->vocab; token += SKIPPED) {
            int64_t next = sum;
            for (int i = 0; i < SKIPPED; i++) next += weights[token + i];
            if (next > target) break;
            sum = next;
        }
        for (; token < d->vocab - 1 && (sum += weights[token]) <= target;) token++;
    }
    const double of_unit = (double)scaled[token] + (double)d->unit_bits * LOG_2;
    *logprob = of_unit - log((double)all);
    *sampled = greedy ? 0.0 : of_unit - log((double)total);
    return token;
}

void draw_rows(const void *given, int64_t worker, int64_t first, int64_t last) {
    const struct draws *d = given;
    const int64_t room = PADDED(d->vocab, LANES);
    struct weighed *sorted = (struct weighed *)(d->memory + worker * draw_memory(d->vocab));
    int64_t *weights = (int64_t *)(sorted + room);
    float *scaled = (float *)(weights + room);
    for (int64_t row = first; row < last; row++) {
        double *packed = d->packed + row;
        const int64_t token = draw_row(d, row, scaled, weights, sorted, packed + d->rows, packed + 2 * d->rows);
        packed[0] = (double)token;
        d->tokens[row] = token;
        d->positions[row] += 1;
        for (int64_t h = 0; h < d->kv_heads; h++) d->write[row * d->kv_heads + h] += 1;
        d->bias[d->see[row] += 1] = 0.0f;
    }
}

void draw(const struct draws *d, int64_t threads) { over_threads(draw_rows, d, d->rows, 1, threads); }
