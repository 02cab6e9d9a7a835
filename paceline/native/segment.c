/* Counters, waits, meetings, mail and notes of the ranks of one host. See segment.h. */

#define _GNU_SOURCE
#include "segment.h"

#include <sched.h>
#include <string.h>

#include "futex.h"

enum {
  SPIN_LEAST = 4000,    /* nanoseconds of polling, after waits that polls did not end */
  SPIN_MOST = 100000,   /* and after waits that they did end */
  SPIN_HARD = 3000,     /* nanoseconds of polling before a wait begins to yield its core */
  CROWDED = 50000,      /* nanoseconds of a yield if another thread has used the core meanwhile */
};

static inline void relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

int64_t pl_segment_bytes(int64_t size) { return size * (int64_t)PL_SPAN; }

void pl_open_segment(pl_segment *segment, void *base, int64_t rank, int64_t size) {
  memset(segment, 0, sizeof *segment);
  segment->base = base;
  segment->rank = rank;
  segment->size = size;
  atomic_init(&segment->spin_ns, SPIN_MOST);
  int64_t block = PL_PIECE * size < PL_STAGE ? PL_PIECE * size : PL_STAGE;
  segment->block = block / (PL_LINE * size) * (PL_LINE * size);
}

/* ---- counters */

/* The bell of a rank is two words on one line: how many of its threads sleep, and a futex. */
static inline _Atomic uint32_t *bell_word(const pl_segment *segment, int64_t rank) {
  return (_Atomic uint32_t *)(void *)(pl_cell(segment, rank, PL_BELL) + 1);
}

/* Wake the other ranks that sleep. Order: the caller has raised a counter (store), and this reads
   `asleep` of others (load). A sleeper raises `asleep` (store), then reads the counter (load). The
   two full fences make at least one of them see the other's store, so no post is slept through. */
static void ring_bell(pl_segment *segment) {
  atomic_thread_fence(memory_order_seq_cst);
  for (int64_t rank = 0; rank < segment->size; rank++) {
    if (rank == segment->rank) continue;
    if (atomic_load_explicit(pl_cell(segment, rank, PL_BELL), memory_order_relaxed) > 0) {
      atomic_fetch_add_explicit(bell_word(segment, rank), 1, memory_order_release);
      pl_futex_wake((void *)bell_word(segment, rank));
    }
  }
}

/* Raise this rank's counter of operations. Release: others then see all that it wrote before. */
int64_t pl_post(pl_segment *segment) {
  segment->posted++;
  atomic_store_explicit(pl_cell(segment, segment->rank, PL_OPERATIONS), segment->posted,
                        memory_order_release);
  ring_bell(segment);
  return segment->posted;
}

/* Whether all other ranks have raised their counter to `target`. Acquire: the caller then sees all
   that they wrote before. */
int pl_has_reached(const pl_segment *segment, int channel, int64_t target) {
  for (int64_t rank = 0; rank < segment->size; rank++) {
    if (rank != segment->rank &&
        atomic_load_explicit(pl_cell(segment, rank, channel), memory_order_acquire) < target)
      return 0;
  }
  return 1;
}

/* List the ranks whose counter is below `target`; return how many they are. */
int64_t pl_find_behind(const pl_segment *segment, int channel, int64_t target, int64_t *ranks) {
  int64_t count = 0;
  for (int64_t rank = 0; rank < segment->size; rank++) {
    if (rank != segment->rank &&
        atomic_load_explicit(pl_cell(segment, rank, channel), memory_order_acquire) < target)
      ranks[count++] = rank;
  }
  return count;
}

/* ---- waits */

/* Poll until `target` is reached. Ends early if the core is needed by others, which may be the
   ranks that this one waits for. */
static int poll_counters(pl_segment *segment, int channel, int64_t target, int64_t begun,
                         int64_t nanoseconds) {
  int64_t spin = atomic_load_explicit(&segment->spin_ns, memory_order_relaxed);
  spin = spin < nanoseconds ? spin : nanoseconds;
  int64_t now = begun;
  for (;;) {
    for (int i = 0; i < 32; i++) {
      if (pl_has_reached(segment, channel, target)) {
        if (now > begun)
          atomic_store_explicit(&segment->spin_ns, 2 * spin < SPIN_MOST ? 2 * spin : SPIN_MOST,
                                memory_order_relaxed);
        return 1;
      }
      relax();
    }
    int64_t before = now;
    now = pl_now();
    if (now - begun > spin) break;
    if (now - begun > SPIN_HARD) {
      sched_yield();
      now = pl_now();
      if (now - before > CROWDED) break;
    }
  }
  spin = atomic_load_explicit(&segment->spin_ns, memory_order_relaxed) / 2;
  atomic_store_explicit(&segment->spin_ns, spin > SPIN_LEAST ? spin : SPIN_LEAST,
                        memory_order_relaxed);
  return pl_has_reached(segment, channel, target);
}

/* Wait until all other ranks have raised their counter to `target`.

   Polls at first, then sleeps until another rank posts something. Several threads may wait at the
   same time. Order of a sleep: the bell is read before the counters, so a post in between changes
   the bell, and the kernel does not sleep. See `ring_bell` for the fence. */
int pl_wait(pl_segment *segment, int channel, int64_t target, int64_t nanoseconds) {
  if (pl_has_reached(segment, channel, target)) return PL_REACHED;
  int64_t begun = pl_now();
  if (poll_counters(segment, channel, target, begun, nanoseconds)) return PL_REACHED;
  _Atomic int64_t *asleep = pl_cell(segment, segment->rank, PL_BELL);
  _Atomic uint32_t *bell = bell_word(segment, segment->rank);
  int result = PL_TIMEOUT;
  atomic_fetch_add_explicit(asleep, 1, memory_order_seq_cst);
  for (;;) {
    uint32_t heard = atomic_load_explicit(bell, memory_order_acquire);
    atomic_thread_fence(memory_order_seq_cst);
    if (pl_has_reached(segment, channel, target)) {
      result = PL_REACHED;
      break;
    }
    if (atomic_load_explicit(&segment->interrupted, memory_order_acquire)) {
      result = PL_INTERRUPTED;
      break;
    }
    int64_t left = begun + nanoseconds - pl_now();
    if (left <= 0) break;
    pl_futex_wait((void *)bell, heard, left);
  }
  atomic_fetch_sub_explicit(asleep, 1, memory_order_release);
  return result;
}

/* End the waits of this process, now and later. Any thread may call it. */
void pl_interrupt(pl_segment *segment) {
  atomic_store_explicit(&segment->interrupted, 1, memory_order_release);
  atomic_fetch_add_explicit(bell_word(segment, segment->rank), 1, memory_order_release);
  pl_futex_wake((void *)bell_word(segment, segment->rank));
}

/* ---- meetings, which begin an operation */

/* Write this rank's mark and meta of the next meeting, and post. Returns the post that all ranks
   must have reached before they are read. `meta` has at most PL_META - 8 bytes. */
int64_t pl_begin_meeting(pl_segment *segment, int64_t mark, const void *meta, int64_t nbytes) {
  int64_t parity = segment->meetings & 1;
  char *place = pl_part(segment, segment->rank, PL_METAS + parity * PL_META);
  segment->meetings++;
  memcpy(place, &nbytes, sizeof nbytes);
  if (nbytes) memcpy(place + 8, meta, (size_t)nbytes);
  /* Relaxed: the release store of `pl_post` orders it. */
  atomic_store_explicit(pl_cell(segment, segment->rank, PL_MARKS) + parity, mark,
                        memory_order_relaxed);
  return pl_post(segment);
}

/* Whether all ranks have this mark. Relaxed: the caller has seen their posts with acquire. */
int pl_marks_agree(const pl_segment *segment, int64_t parity, int64_t mark) {
  for (int64_t rank = 0; rank < segment->size; rank++) {
    if (rank != segment->rank &&
        atomic_load_explicit(pl_cell(segment, rank, PL_MARKS) + parity, memory_order_relaxed) !=
            mark)
      return 0;
  }
  return 1;
}

/* ---- agreements */

/* Write a piece of a payload to this rank's mailbox, and raise its counter (release). Returns the
   turn that all ranks must have reached. `nbytes` is at most PL_MAIL - 16. */
int64_t pl_post_mail(pl_segment *segment, int64_t mark, const void *payload, int64_t nbytes,
                     int64_t total) {
  int64_t turn = ++segment->mail_turns;
  char *place = pl_part(segment, segment->rank, PL_MAILS + (turn & 1) * PL_MAIL);
  memcpy(place, &mark, sizeof mark);
  memcpy(place + 8, &total, sizeof total);
  if (nbytes) memcpy(place + 16, payload, (size_t)nbytes);
  atomic_store_explicit(pl_cell(segment, segment->rank, PL_AGREEMENTS), turn, memory_order_release);
  ring_bell(segment);
  return turn;
}

/* Read every rank's mark and total length of a turn that all have reached. */
void pl_read_mail_heads(const pl_segment *segment, int64_t turn, int64_t *marks, int64_t *totals) {
  for (int64_t rank = 0; rank < segment->size; rank++) {
    const char *place = pl_part(segment, rank, PL_MAILS + (turn & 1) * PL_MAIL);
    memcpy(&marks[rank], place, sizeof marks[rank]);
    memcpy(&totals[rank], place + 8, sizeof totals[rank]);
  }
}

/* ---- facts of a rank */

void pl_leave(pl_segment *segment) {
  atomic_store_explicit(pl_cell(segment, segment->rank, PL_LEFT), 1, memory_order_release);
}

int pl_has_left(const pl_segment *segment, int64_t rank) {
  return atomic_load_explicit(pl_cell(segment, rank, PL_LEFT), memory_order_acquire) != 0;
}

void pl_set_pid(pl_segment *segment, int64_t pid) {
  atomic_store_explicit(pl_cell(segment, segment->rank, PL_PID), pid, memory_order_release);
}

int64_t pl_get_pid(const pl_segment *segment, int64_t rank) {
  return atomic_load_explicit(pl_cell(segment, rank, PL_PID), memory_order_acquire);
}

/* ---- notes

   A note is guarded by a counter, which is odd while the note is being written. The note itself is
   copied by relaxed atomic bytes, as a reader may read while the writer writes. */

static void copy_in(char *to, const char *from, int64_t nbytes) {
  for (int64_t i = 0; i < nbytes; i++)
    atomic_store_explicit((_Atomic char *)(void *)(to + i), from[i], memory_order_relaxed);
}

static void copy_out(char *to, const char *from, int64_t nbytes) {
  for (int64_t i = 0; i < nbytes; i++)
    to[i] = atomic_load_explicit((const _Atomic char *)(const void *)(from + i),
                                 memory_order_relaxed);
}

/* Replace this rank's note. A note that is too long is left out. One thread at a time. */
void pl_write_note(pl_segment *segment, const void *text, int64_t nbytes) {
  _Atomic int64_t *guard = pl_cell(segment, segment->rank, PL_NOTE);
  char *place = pl_part(segment, segment->rank, PL_NOTES);
  if (nbytes > PL_TEXT - 8) nbytes = 0;
  int64_t before = atomic_load_explicit(guard, memory_order_relaxed);
  atomic_store_explicit(guard, before + 1, memory_order_relaxed);
  atomic_thread_fence(memory_order_release); /* the odd number is seen before the new bytes */
  atomic_store_explicit((_Atomic int64_t *)(void *)place, nbytes, memory_order_relaxed);
  copy_in(place + 8, text, nbytes);
  atomic_store_explicit(guard, before + 2, memory_order_release);
}

/* Read the note of a rank into `text`, which has room for PL_TEXT bytes. Returns its length; 0 if
   there is none, or if its writer has died, or was stopped, in the middle of it. */
int64_t pl_read_note(const pl_segment *segment, int64_t rank, void *text) {
  _Atomic int64_t *guard = pl_cell(segment, rank, PL_NOTE);
  const char *place = pl_part(segment, rank, PL_NOTES);
  for (int tries = 0; tries < 100; tries++) {
    int64_t before = atomic_load_explicit(guard, memory_order_acquire);
    int64_t nbytes =
        atomic_load_explicit((const _Atomic int64_t *)(const void *)place, memory_order_relaxed);
    if (before % 2 == 0 && nbytes >= 0 && nbytes <= PL_TEXT - 8) {
      copy_out(text, place + 8, nbytes);
      atomic_thread_fence(memory_order_acquire); /* the bytes are read before the second look */
      if (atomic_load_explicit(guard, memory_order_relaxed) == before) return nbytes;
    }
    sched_yield();
  }
  return 0;
}
