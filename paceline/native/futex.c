/* Words of shared memory: reading, writing and sleeping on them; and the clock. See futex.h. */

#define _GNU_SOURCE
#include "futex.h"

#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Nanoseconds of the monotonic clock. */
int64_t pl_now(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Read a word of 8 bytes. Acquire: the caller then sees all that was written before it. */
int64_t pl_load(const void *word) {
  return atomic_load_explicit((const _Atomic int64_t *)word, memory_order_acquire);
}

/* Write a word of 8 bytes. Release: who reads it sees all that the caller wrote before. */
void pl_store(void *word, int64_t value) {
  atomic_store_explicit((_Atomic int64_t *)word, value, memory_order_release);
}

/* Sleep until the word is woken, or `nanoseconds` pass. Not if it no longer has `value`. The call
   is a full fence: the kernel compares the word under a lock of its own. */
void pl_futex_wait(void *word, uint32_t value, int64_t nanoseconds) {
  if (nanoseconds <= 0) return;
  struct timespec limit = {nanoseconds / 1000000000, nanoseconds % 1000000000};
  syscall(SYS_futex, word, FUTEX_WAIT, value, &limit, NULL, 0);
}

/* Wake all that sleep on the word, in every process. */
void pl_futex_wake(void *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }
