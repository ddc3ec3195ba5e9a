/* threads.c: running a job on several threads. */
#include <pthread.h>

#include "internal.h"

typedef struct worker {
  pthread_t id;
  void (*job)(void *, int);
  void *context;
  int number;
} worker;

static void *run(void *p) {
  worker *w = p;
  w->job(w->context, w->number);
  return NULL;
}

/* Starting and joining a thread takes about 30 us, a chunk 10 us; the callers start no thread for less than a batch of
 * chunks, so that a kept pool (and what it does to a forking process) is not needed. */
void tpde_parallel(int threads, void (*job)(void *context, int thread), void *context) {
  worker w[TPDE_MAX_THREADS];
  int started = 0;
  if (threads > TPDE_MAX_THREADS) threads = TPDE_MAX_THREADS;
  for (; started < threads - 1; started++) {
    w[started] = (worker){.job = job, .context = context, .number = started};
    if (pthread_create(&w[started].id, NULL, run, &w[started])) break;
  }
  for (int i = started; i < threads; i++) job(context, i);
  for (int i = 0; i < started; i++) pthread_join(w[i].id, NULL);
}
