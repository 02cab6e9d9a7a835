/* What all drivers share: checks, random numbers, and ranks that are threads or processes. */

#ifndef DRIVER_H
#define DRIVER_H

#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "futex.h"
#include "segment.h"

enum { MOST_RANKS = 4 };
static const int64_t MILLISECOND = 1000000, FOREVER = 60LL * 1000000000;

/* End the program if a condition does not hold. NDEBUG can't switch it off. */
#define CHECK(condition)                                                  \
  do {                                                                    \
    if (!(condition)) {                                                   \
      fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      _exit(1);                                                           \
    }                                                                     \
  } while (0)

/* Mix numbers to a random one, the same on every rank: so ranks know what the others have. */
static inline uint64_t mix(uint64_t a, uint64_t b, uint64_t c) {
  uint64_t x = a * 0x9e3779b97f4a7c15u ^ b * 0xc2b2ae3d27d4eb4fu ^ c * 0x165667b19e3779f9u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

/* Memory of its exact size, so that the address sanitizer sees each byte too many. */
static inline void *allocate(int64_t nbytes) {
  void *memory = malloc(nbytes ? (size_t)nbytes : 1);
  CHECK(memory);
  return memory;
}

static inline void sleep_ns(int64_t nanoseconds) {
  struct timespec limit = {nanoseconds / 1000000000, nanoseconds % 1000000000};
  nanosleep(&limit, NULL);
}

/* ---- ranks */

typedef void rank_body(pl_segment *segment);

typedef struct rank_start {
  rank_body *body;
  void *base;
  int64_t rank, size;
} rank_start;

static inline void *run_rank(void *start_) {
  rank_start *start = start_;
  pl_segment segment;
  pl_open_segment(&segment, start->base, start->rank, start->size);
  start->body(&segment);
  return NULL;
}

/* Map new memory of zeros, which forked processes share. */
static inline void *map_segment(int64_t size) {
  void *base = mmap(NULL, (size_t)pl_segment_bytes(size), PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(base != MAP_FAILED);
  return base;
}

/* Run `body` in `size` threads, each with its own view of one segment. The thread sanitizer sees
   all their accesses. */
static inline void run_threads(int64_t size, rank_body *body) {
  void *base = map_segment(size);
  pthread_t threads[MOST_RANKS];
  rank_start starts[MOST_RANKS];
  for (int64_t rank = 0; rank < size; rank++) {
    starts[rank] = (rank_start){body, base, rank, size};
    CHECK(pthread_create(&threads[rank], NULL, run_rank, &starts[rank]) == 0);
  }
  for (int64_t rank = 0; rank < size; rank++) pthread_join(threads[rank], NULL);
  munmap(base, (size_t)pl_segment_bytes(size));
}

/* Run `body` in `size` processes. */
static inline void run_processes(int64_t size, rank_body *body) {
  void *base = map_segment(size);
  pid_t children[MOST_RANKS];
  for (int64_t rank = 0; rank < size; rank++) {
    children[rank] = fork();
    CHECK(children[rank] >= 0);
    if (children[rank] == 0) {
      rank_start start = {body, base, rank, size};
      run_rank(&start);
      exit(0); /* the sanitizer looks for leaks, and then calls this a failure */
    }
  }
  for (int64_t rank = 0; rank < size; rank++) {
    int status;
    CHECK(waitpid(children[rank], &status, 0) == children[rank]);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  munmap(base, (size_t)pl_segment_bytes(size));
}

#endif
