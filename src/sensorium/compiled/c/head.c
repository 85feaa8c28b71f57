/* Log-probs and entropies of tokens from logits, and the gradient of the log-probs. */

#include "vectors.h"

#define SUMMED 1024 /* exponentials that are summed up in float32: a whole vocabulary would lose two digits */

/* logits and probs [rows, vocab]; scaled logits are bias + logits · scale. */
struct token_probs {
    int64_t rows, vocab;
    double scale;
    const float *logits, *bias;
    const int64_t *targets;
    float *probs, *logprobs, *entropies, *largest;
};

/* out = gradient · scale · (one at the target - probs) */
struct token_gradients {
    int64_t rows, vocab;
    double scale;
    const float *probs, *gradient;
    const int64_t *targets;
    float *out;
};

INLINE vec size_of(vec x) { return (vec)((ivec)x & 0x7fffffff); }

/* The numbers of a row from `at` on, as many as there are; others stand at `rest`. */
INLINE vec some(const float *from, int64_t count, float rest) {
    vec x = all_of(rest);
    if (count >= LANES) return *(const vec *)from;
    memcpy(&x, from, count * sizeof(float));
    return x;
}

static void token_rows(const void *given, int64_t worker, int64_t first, int64_t last) {
    (void)worker;
    const struct token_probs *t = given;
    const float scale = (float)t->scale;
    const int64_t vocab = t->vocab, whole = vocab / LANES * LANES;
    for (int64_t r = first; r < last; r++) {
        const float *logits = t->logits + r * vocab;
        float *probs = t->probs + r * vocab;
        vec tops = all_of(-INFINITY), sizes = {0};
        double sum = 0.0, product = 0.0;
        for (int64_t j = 0; j < vocab; j += LANES) {
            const vec scaled = some(logits + j, vocab - j, 0.0f) * scale;
            const vec biased = scaled + some(t->bias + j, vocab - j, -INFINITY);
            sizes = chosen(~(sizes > size_of(scaled)), size_of(scaled), sizes);
            tops = chosen(~(tops > biased), biased, tops);
            if (j < whole) *(vec *)(probs + j) = biased;
            else memcpy(probs + j, &biased, (vocab - j) * sizeof(float));
        }
        const float top = largest(tops), at_target = probs[t->targets[r]] - top;
        for (int64_t part = 0; part < vocab; part += SUMMED) {
            const int64_t end = vocab - part < SUMMED ? vocab : part + SUMMED;
            vec sums = {0}, products = {0};
            for (int64_t j = part; j < end; j += LANES) {
                const vec shifted = some(probs + j, vocab - j, -INFINITY) - top, weight = exp_of(shifted);
                sums += weight;
                products += chosen(weight > 0.0f, shifted * weight, weight);
                if (j < whole) *(vec *)(probs + j) = weight;
                else memcpy(probs + j, &weight, (vocab - j) * sizeof(float));
            }
            sum += (double)total(sums);
            product += (double)total(products);
        }
        const float share = (float)(1.0 / sum), log_sum = (float)log(sum);
        for (int64_t j = 0; j < whole; j += LANES) *(vec *)(probs + j) *= share;
        for (int64_t j = whole; j < vocab; j++) probs[j] *= share;
        t->logprobs[r] = at_target - log_sum;
        t->entropies[r] = (float)(log(sum) - product / sum);
        t->largest[r] = largest(sizes);
    }
}

void token_probs(const struct token_probs *t, int64_t threads) { over_threads(token_rows, t, t->rows, 1, threads); }

static void token_gradient_rows(const void *given, int64_t worker, int64_t first, int64_t last) {
    (void)worker;
    const struct token_gradients *t = given;
    const int64_t vocab = t->vocab, whole = vocab / LANES * LANES;
    for (int64_t r = first; r < last; r++) {
        const float *probs = t->probs + r * vocab, pull = t->gradient[r] * (float)t->scale;
        float *out = t->out + r * vocab;
        for (int64_t j = 0; j < whole; j += LANES) *(vec *)(out + j) = *(const vec *)(probs + j) * -pull;
        for (int64_t j = whole; j < vocab; j++) out[j] = probs[j] * -pull;
        out[t->targets[r]] += pull;
    }
}

void token_gradients(const struct token_gradients *t, int64_t threads) {
    over_threads(token_gradient_rows, t, t->rows, 1, threads);
}
