/* What feed.c and draw.c share: vectors of the processor's width, exp, and rows spread over threads. */

#ifndef SENSORIUM_VECTORS_H
#define SENSORIUM_VECTORS_H

#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

/* Aligned as floats are, so that any place in memory may be read as a vector. */
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float vec4 __attribute__((vector_size(16), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define PADDED(n, step) (((n) + (step) - 1) / (step) * (step))

INLINE vec all_of(float x) { return (vec){0} + x; }

INLINE vec chosen(ivec mask, vec yes, vec no) { return (vec)((mask & (ivec)yes) | (~mask & (ivec)no)); }

INLINE vec larger(vec one, vec other) { return chosen(one > other, one, other); }

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLED(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
#define SHUFFLED(a, b, i, j, k, l) __builtin_shuffle(a, b, (int32_t __attribute__((vector_size(16)))){i, j, k, l})
#endif

/* The sum of a vector's quarters, or of however many vec4 it has. */
INLINE vec4 folded(vec x) {
    vec4 part[LANES / 4];
    memcpy(part, &x, sizeof part);
#if LANES == 16
    return (part[0] + part[1]) + (part[2] + part[3]);
#elif LANES == 8
    return part[0] + part[1];
#else
    return part[0];
#endif
}

/* The sum of each of four vectors. */
INLINE vec4 totals(vec4 a, vec4 b, vec4 c, vec4 d) {
    const vec4 ab = SHUFFLED(a, b, 0, 4, 1, 5) + SHUFFLED(a, b, 2, 6, 3, 7);
    const vec4 cd = SHUFFLED(c, d, 0, 4, 1, 5) + SHUFFLED(c, d, 2, 6, 3, 7);
    return SHUFFLED(ab, cd, 0, 1, 4, 5) + SHUFFLED(ab, cd, 2, 3, 6, 7);
}

INLINE float total(vec x) {
    const vec4 four = folded(x);
    return (four[0] + four[1]) + (four[2] + four[3]);
}

/* exp within two units of the last place. exp(0) is 1, below -87 it is 0, NaN stays NaN. */
INLINE vec exp_of(vec x) {
    const vec low = all_of(-87.0f), high = all_of(88.0f), shift = all_of(12582912.0f); /* 1.5 * 2^23 rounds to integers */
    const ivec tiny = x < low;
    x = chosen(tiny, low, chosen(x > high, high, x));
    const vec n = (x * 1.44269504f + shift) - shift;
    const vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f; /* x - n log 2, with log 2 in two parts */
    vec p = all_of(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    const vec power = (vec)((__builtin_convertvector(n, ivec) + 127) << 23);
    return chosen(tiny, (vec){0}, p * power);
}

/* Work on rows first … last, by one of the threads 0 … threads - 1. */
typedef void (*row_work)(const void *given, int64_t worker, int64_t first, int64_t last);

/* All rows, in parts of whole steps, by at most so many threads. */
void over_threads(row_work work, const void *given, int64_t rows, int64_t step, int64_t threads);

#endif
