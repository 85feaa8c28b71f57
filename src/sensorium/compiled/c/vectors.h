/* What all files share: vectors of the processor's width, exp, and rows spread over threads. */

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

/* Rows of a product that are computed together, two vectors of each. */
#if defined(__AVX512F__) || defined(__aarch64__)
#define TILE 8
#else
#define TILE 4 /* 16 registers hold no more sums */
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

/* Fours of two vectors, side by side: of each four of a and b the numbers i, j, k, l, where b's count from 4. */
#define AT(p, four, lanes) ((p) < 4 ? 4 * (four) + (p) : (lanes) + 4 * (four) + (p) - 4)
#define OF_FOUR(four, lanes, i, j, k, l) AT(i, four, lanes), AT(j, four, lanes), AT(k, four, lanes), AT(l, four, lanes)
#if LANES == 16
#define OF_ALL(i, j, k, l) \
    OF_FOUR(0, 16, i, j, k, l), OF_FOUR(1, 16, i, j, k, l), OF_FOUR(2, 16, i, j, k, l), OF_FOUR(3, 16, i, j, k, l)
#elif LANES == 8
#define OF_ALL(i, j, k, l) OF_FOUR(0, 8, i, j, k, l), OF_FOUR(1, 8, i, j, k, l)
#else
#define OF_ALL(i, j, k, l) OF_FOUR(0, 4, i, j, k, l)
#endif
#if defined(__clang__) || __GNUC__ >= 12
#define MIXED(a, b, ...) __builtin_shufflevector(a, b, OF_ALL(__VA_ARGS__))
#else
#define MIXED(a, b, ...) __builtin_shuffle(a, b, (ivec){OF_ALL(__VA_ARGS__)})
#endif

/* The sum of the fours of a vector. */
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
INLINE vec4 totals(vec a, vec b, vec c, vec d) {
    const vec ab = MIXED(a, b, 0, 4, 1, 5) + MIXED(a, b, 2, 6, 3, 7);
    const vec cd = MIXED(c, d, 0, 4, 1, 5) + MIXED(c, d, 2, 6, 3, 7);
    return folded(MIXED(ab, cd, 0, 1, 4, 5) + MIXED(ab, cd, 2, 3, 6, 7));
}

INLINE vec4 totals_of_fours(vec4 a, vec4 b, vec4 c, vec4 d) {
    return (vec4){(a[0] + a[1]) + (a[2] + a[3]), (b[0] + b[1]) + (b[2] + b[3]), (c[0] + c[1]) + (c[2] + c[3]),
                  (d[0] + d[1]) + (d[2] + d[3])};
}

INLINE float total(vec x) {
    const vec4 four = folded(x);
    return (four[0] + four[1]) + (four[2] + four[3]);
}

/* The largest number of a vector. One that is not a number is passed over, or comes out, as it happens. */
INLINE float largest(vec x) {
    float part[LANES];
    for (int half = LANES / 2; half >= 4; half /= 2) {
        memcpy(part, &x, sizeof part);
        for (int i = 0; i < half; i++) part[i] = part[i] > part[half + i] ? part[i] : part[half + i];
        memcpy(&x, part, sizeof part);
    }
    const float one = x[0] > x[1] ? x[0] : x[1], other = x[2] > x[3] ? x[2] : x[3];
    return one > other ? one : other;
}

/* 0, 1, 2, … */
INLINE ivec places(void) {
    ivec found;
    for (int i = 0; i < LANES; i++) found[i] = i;
    return found;
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
