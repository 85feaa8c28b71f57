/* Rows spread over threads. Each takes the next few rows until none are left, so one that wakes up late, or is held up,
   leaves its rows to the others.

   They are torch's own threads where it has OpenMP's (GOMP_parallel): these wait for work awake between two of its operations,
   and would keep others from the processors. Elsewhere, and in the child of a fork, which has none of torch's threads, they are
   ours: the caller works too, and returns when no thread is inside its work: a thread joins under the lock while the work is
   open, and the caller closes it under the lock before it waits for those who joined. One caller at a time has our threads;
   another one meanwhile works alone. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>

#include "vectors.h"

#define MOST_THREADS 64
#define PARTS_OF_A_THREAD 4
#define LOOKS 4000 /* at the others' progress, before the caller sleeps */

static pthread_mutex_t caller = PTHREAD_MUTEX_INITIALIZER, lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t opened = PTHREAD_COND_INITIALIZER, left = PTHREAD_COND_INITIALIZER;
static pthread_once_t prepared = PTHREAD_ONCE_INIT;
static void (*openmp)(void (*work)(void *), void *given, unsigned threads, unsigned flags);
static int64_t started;
static int watched;

struct shared_rows {
    row_work work;
    const void *given;
    int64_t rows, part;
    atomic_int_fast64_t next, joined;
};

static struct {
    struct shared_rows *shared;
    int64_t threads;
    atomic_int inside;
    int open;
    uint64_t count;
} job;

static void take_rows(struct shared_rows *s, int64_t worker) {
    for (int64_t first; (first = atomic_fetch_add(&s->next, s->part)) < s->rows;)
        s->work(s->given, worker, first, first + s->part < s->rows ? first + s->part : s->rows);
}

static void join(void *given) {
    struct shared_rows *s = given;
    take_rows(s, atomic_fetch_add(&s->joined, 1));
}

static void *wait_for_work(void *given) {
    const int64_t worker = (int64_t)(intptr_t)given;
    uint64_t known = 0;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!job.open || job.count == known || worker >= job.threads) pthread_cond_wait(&opened, &lock);
        known = job.count;
        atomic_fetch_add(&job.inside, 1);
        struct shared_rows *shared = job.shared;
        pthread_mutex_unlock(&lock);
        take_rows(shared, worker);
        pthread_mutex_lock(&lock);
        if (atomic_fetch_sub(&job.inside, 1) == 1) pthread_cond_signal(&left);
    }
    return NULL;
}

/* A child of a fork has none of the threads, and locks as they happened to be. */
static void begin_anew(void) {
    const pthread_mutex_t unlocked = PTHREAD_MUTEX_INITIALIZER;
    const pthread_cond_t unused = PTHREAD_COND_INITIALIZER;
    caller = lock = unlocked;
    opened = left = unused;
    openmp = NULL;
    started = 0;
    job.open = 0;
    atomic_store(&job.inside, 0);
}

static void prepare(void) {
    watched = !pthread_atfork(NULL, NULL, begin_anew);
    *(void **)&openmp = watched ? dlsym(RTLD_DEFAULT, "GOMP_parallel") : NULL;
}

/* When the library is loaded, so that a child of a fork knows that it is one. */
__attribute__((constructor)) static void prepare_at_load(void) { pthread_once(&prepared, prepare); }

static void start_threads(int64_t threads) {
    while (watched && started < threads - 1) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, wait_for_work, (void *)(intptr_t)(started + 1))) return;
        pthread_detach(thread);
        started++;
    }
}

static void share_with_ours(struct shared_rows *shared, int64_t threads) {
    start_threads(threads);
    pthread_mutex_lock(&lock);
    job.shared = shared, job.threads = threads;
    job.open = 1;
    job.count++;
    pthread_cond_broadcast(&opened);
    pthread_mutex_unlock(&lock);
    take_rows(shared, 0);
    pthread_mutex_lock(&lock);
    job.open = 0;
    pthread_mutex_unlock(&lock);
    for (int i = 0; i < LOOKS && atomic_load(&job.inside); i++) continue;
    pthread_mutex_lock(&lock);
    while (atomic_load(&job.inside)) pthread_cond_wait(&left, &lock);
    pthread_mutex_unlock(&lock);
}

void over_threads(row_work work, const void *given, int64_t rows, int64_t step, int64_t threads) {
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    struct shared_rows shared = {work, given, rows, 0, 0, 0};
    if (threads > 1 && rows > step) {
        shared.part = PADDED((rows + threads * PARTS_OF_A_THREAD - 1) / (threads * PARTS_OF_A_THREAD), step);
        pthread_once(&prepared, prepare);
        if (openmp) {
            openmp(join, &shared, (unsigned)threads, 0);
            return;
        }
        if (!pthread_mutex_trylock(&caller)) {
            share_with_ours(&shared, threads);
            pthread_mutex_unlock(&caller);
            return;
        }
    }
    work(given, 0, 0, rows);
}
