/* Several decode steps at once. Rows do not depend on each other, so a thread takes some of them through all steps, and what
   they read stays in its caches. */

#include "decode.h"

/* uniforms [steps, rows] and packed [steps, 3, rows] of `draws`. `stops`: whether stop ids end a row; `ended`: zeros. */
struct writes {
    struct tokens tokens;
    struct draws draws;
    int64_t steps;
    const uint8_t *stops;
    uint8_t *ended;
};

/* Mark the rows that end with what they drew; whether any is left. */
static int any_open(const struct writes *w, int64_t first, int64_t last) {
    const struct draws *d = &w->draws;
    int open = 0;
    for (int64_t row = first; row < last; row++) {
        for (int64_t j = 0; j < d->stop_count && w->stops[row]; j++) w->ended[row] |= d->tokens[row] == d->stop[j];
        open |= !w->ended[row];
    }
    return open;
}

/* Rows that ended go on beside the others, and what they draw is for the caller to drop; until all of them have. */
static void write_rows(const void *given, int64_t worker, int64_t first, int64_t last) {
    const struct writes *w = given;
    struct draws d = w->draws;
    for (int64_t step = 0; step < w->steps; step++) {
        feed_rows(&w->tokens, worker, first, last);
        draw_rows(&d, worker, first, last);
        if (!any_open(w, first, last)) return;
        d.uniforms += d.rows, d.packed += 3 * d.rows;
    }
}

void write_steps(const struct writes *w, int64_t threads) { over_threads(write_rows, w, w->draws.rows, TILE, threads); }
