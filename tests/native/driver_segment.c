/* Counters, waits, meetings, mail and notes of ranks that are threads, then processes. */

#include "driver.h"

enum { ROUNDS = 300 };

/* Post, and wait until all others have posted as often. */
static void meet(pl_segment *segment) {
  CHECK(pl_wait(segment, PL_OPERATIONS, pl_post(segment), FOREVER) == PL_REACHED);
}

/* Plain memory written before a post is seen after the wait for it. */
static void post_and_read(pl_segment *segment) {
  for (int64_t k = 1; k <= ROUNDS; k++) {
    *(int64_t *)(void *)pl_stage(segment, segment->rank, k) = k * 10 + segment->rank;
    CHECK(pl_post(segment) == k);
    CHECK(pl_wait(segment, PL_OPERATIONS, k, FOREVER) == PL_REACHED);
    CHECK(pl_has_reached(segment, PL_OPERATIONS, k));
    for (int64_t rank = 0; rank < segment->size; rank++)
      CHECK(*(int64_t *)(void *)pl_stage(segment, rank, k) == k * 10 + rank);
    /* Now and then a rank is late, so that the others go to sleep. */
    if (mix(1, k, 0) % 50 == 0 && (uint64_t)segment->rank == mix(2, k, 0) % segment->size)
      sleep_ns(MILLISECOND);
  }
}

/* A wait ends at its deadline, neither much earlier nor much later, and says whom it missed. The
   last rank is late: it posts only after the others have looked. */
static void wait_for_the_late(pl_segment *segment) {
  int64_t last = segment->size - 1, ranks[MOST_RANKS];
  char *looked = pl_part(segment, segment->rank, PL_TEXTS);
  meet(segment);
  if (segment->rank < last) {
    int64_t begun = pl_now(), target = pl_post(segment);
    CHECK(pl_wait(segment, PL_OPERATIONS, target + 5, 20 * MILLISECOND) == PL_TIMEOUT);
    CHECK(pl_now() - begun >= 20 * MILLISECOND && pl_now() - begun < FOREVER / 2);
    CHECK(pl_wait(segment, PL_OPERATIONS, target + 5, 0) == PL_TIMEOUT);
    CHECK(!pl_has_reached(segment, PL_OPERATIONS, target));
    int64_t count = pl_find_behind(segment, PL_OPERATIONS, target, ranks);
    CHECK(count >= 1 && ranks[count - 1] == last);
    CHECK(pl_find_behind(segment, PL_OPERATIONS, target - 1, ranks) == 0);
    pl_store(looked, 1);
    CHECK(pl_wait(segment, PL_OPERATIONS, target, FOREVER) == PL_REACHED);
  } else {
    for (int64_t rank = 0; rank < last; rank++)
      while (!pl_load(pl_part(segment, rank, PL_TEXTS))) sleep_ns(MILLISECOND);
    pl_post(segment);
  }
  meet(segment);
}

typedef struct waiter {
  pl_segment *segment;
  int channel, result;
} waiter;

static void *wait_long(void *waiter_) {
  waiter *waiter = waiter_;
  waiter->result = pl_wait(waiter->segment, waiter->channel, 1 << 30, FOREVER);
  return NULL;
}

/* Any thread may end the waits of its rank, of which there may be several. */
static void interrupt_waits(pl_segment *segment) {
  meet(segment);
  if (segment->rank == 0) {
    pthread_t threads[2];
    waiter waiters[2] = {{segment, PL_OPERATIONS, -1}, {segment, PL_AGREEMENTS, -1}};
    for (int i = 0; i < 2; i++)
      CHECK(pthread_create(&threads[i], NULL, wait_long, &waiters[i]) == 0);
    sleep_ns(10 * MILLISECOND);
    pl_interrupt(segment);
    for (int i = 0; i < 2; i++) {
      pthread_join(threads[i], NULL);
      CHECK(waiters[i].result == PL_INTERRUPTED);
    }
    CHECK(pl_wait(segment, PL_OPERATIONS, 1 << 30, FOREVER) == PL_INTERRUPTED); /* later ones too */
  }
}

static int64_t meta_length(int64_t rank, int64_t k) { return mix(3, rank, k) % 200; }

/* Each meeting tells every rank's mark and meta. */
static void meet_with_metas(pl_segment *segment) {
  int64_t begun = segment->posted;
  for (int64_t k = 0; k < ROUNDS; k++) {
    unsigned char meta[200];
    int64_t parity = segment->meetings & 1, nbytes = meta_length(segment->rank, k);
    memset(meta, (int)(segment->rank * 50 + k % 50), sizeof meta);
    int differs = k % 10 == 9;
    int64_t mark = differs && segment->rank == 1 ? -7 : k;
    int64_t target = pl_begin_meeting(segment, mark, meta, nbytes);
    CHECK(target == begun + k + 1);
    CHECK(pl_wait(segment, PL_OPERATIONS, target, FOREVER) == PL_REACHED);
    CHECK(pl_marks_agree(segment, parity, mark) == !differs);
    for (int64_t rank = 0; rank < segment->size; rank++) {
      const char *place = pl_part(segment, rank, PL_METAS + parity * PL_META);
      memcpy(&nbytes, place, sizeof nbytes);
      CHECK(nbytes == meta_length(rank, k));
      memset(meta, (int)(rank * 50 + k % 50), sizeof meta);
      CHECK(memcmp(place + 8, meta, (size_t)nbytes) == 0);
    }
  }
}

static int64_t mail_length(int64_t rank, int64_t k) {
  uint64_t number = mix(4, rank, k);
  return number % 8 ? (int64_t)(number % 100) : PL_MAIL - 16; /* at times as long as it may be */
}

/* Mail reaches all ranks, beside a thread of the same rank that posts operations. */
static void exchange_mail(pl_segment *segment) {
  unsigned char *payload = allocate(PL_MAIL);
  for (int64_t k = 0; k < ROUNDS; k++) {
    int64_t marks[MOST_RANKS], totals[MOST_RANKS], nbytes = mail_length(segment->rank, k);
    memset(payload, (int)(segment->rank * 50 + k % 50), PL_MAIL);
    int64_t turn = pl_post_mail(segment, k - segment->rank, payload, nbytes, 2 * nbytes);
    CHECK(turn == k + 1);
    CHECK(pl_wait(segment, PL_AGREEMENTS, turn, FOREVER) == PL_REACHED);
    pl_read_mail_heads(segment, turn, marks, totals);
    for (int64_t rank = 0; rank < segment->size; rank++) {
      nbytes = mail_length(rank, k);
      CHECK(marks[rank] == k - rank && totals[rank] == 2 * nbytes);
      memset(payload, (int)(rank * 50 + k % 50), PL_MAIL);
      const char *place = pl_part(segment, rank, PL_MAILS + (turn & 1) * PL_MAIL);
      CHECK(memcmp(place + 16, payload, (size_t)nbytes) == 0);
    }
  }
  free(payload);
}

static void *exchange_mail_in_thread(void *segment) {
  exchange_mail(segment);
  return NULL;
}

/* The two channels don't disturb each other: one thread of a rank agrees, the other operates. */
static void use_both_channels(pl_segment *segment) {
  pthread_t thread;
  CHECK(pthread_create(&thread, NULL, exchange_mail_in_thread, segment) == 0);
  meet_with_metas(segment);
  pthread_join(thread, NULL);
}

/* A note is read whole, though its writer goes on. */
static void write_and_read_notes(pl_segment *segment) {
  unsigned char text[PL_TEXT];
  meet(segment);
  for (int64_t k = 1; k <= ROUNDS; k++) {
    if (segment->rank == 0) {
      memset(text, (int)(k % 200), sizeof text);
      pl_write_note(segment, text, k % 200);
      if (k % 100 == 0) sleep_ns(MILLISECOND);
    } else {
      int64_t nbytes = pl_read_note(segment, 0, text);
      CHECK(nbytes >= 0 && nbytes < 200);
      for (int64_t i = 0; i < nbytes; i++) CHECK(text[i] == nbytes);
    }
  }
  meet(segment);
  if (segment->rank == 0) {
    memset(text, 1, sizeof text);
    pl_write_note(segment, text, PL_TEXT - 8);
  }
  meet(segment);
  CHECK(pl_read_note(segment, 0, text) == PL_TEXT - 8);
  meet(segment);
  if (segment->rank == 0) pl_write_note(segment, text, PL_TEXT - 7); /* too long: left out */
  meet(segment);
  CHECK(pl_read_note(segment, 0, text) == 0);
}

/* A writer that died in the middle of a note costs its readers the note, and no more. */
static void read_half_a_note(pl_segment *segment) {
  char text[PL_TEXT];
  if (segment->rank == 0) {
    pl_write_note(segment, "whole", 5);
    atomic_fetch_add(pl_cell(segment, 0, PL_NOTE), 1);
  }
  meet(segment);
  CHECK(pl_read_note(segment, 0, text) == 0);
}

static void tell_facts(pl_segment *segment) {
  int64_t other = (segment->rank + 1) % segment->size;
  CHECK(!pl_has_left(segment, other));
  meet(segment);
  pl_set_pid(segment, 100 + segment->rank);
  meet(segment);
  CHECK(pl_get_pid(segment, other) == 100 + other);
  pl_leave(segment);
  meet(segment);
  CHECK(pl_has_left(segment, other));
}

static void check_layout(pl_segment *segment) {
  int64_t block = segment->block, unit = PL_LINE * segment->size;
  CHECK(pl_segment_bytes(segment->size) == segment->size * (int64_t)PL_SPAN);
  CHECK(block > 0 && block <= PL_STAGE && block % unit == 0);
  char *end = pl_stage(segment, segment->size - 1, PL_SLOTS - 1) + PL_STAGE;
  CHECK(end == segment->base + pl_segment_bytes(segment->size));
}

/* Sleeping on a word ends by a wake, by another value, and after its time. */
static void sleep_on_a_word(pl_segment *segment) {
  uint32_t *word = (uint32_t *)(void *)pl_part(segment, 0, PL_TEXTS);
  int64_t *flag = (int64_t *)(void *)pl_part(segment, 0, PL_TEXTS + 8);
  if (segment->rank == 0) {
    int64_t begun = pl_now();
    pl_futex_wait(word, 0, 5 * MILLISECOND);
    CHECK(pl_now() - begun >= 5 * MILLISECOND);
    pl_futex_wait(word, 1, FOREVER); /* has another value */
    pl_store(flag, 1);
    while (pl_load(flag) != 2) pl_futex_wait(flag, 1, FOREVER);
  } else if (segment->rank == 1) {
    while (pl_load(flag) != 1) sleep_ns(MILLISECOND);
    sleep_ns(5 * MILLISECOND);
    pl_store(flag, 2);
    pl_futex_wake(flag);
  }
}

int main(void) {
  rank_body *bodies[] = {check_layout,      post_and_read,        wait_for_the_late,
                         interrupt_waits,   meet_with_metas,      exchange_mail,
                         use_both_channels, write_and_read_notes, read_half_a_note,
                         tell_facts,        sleep_on_a_word};
  for (size_t i = 0; i < sizeof bodies / sizeof *bodies; i++) {
    for (int64_t size = 2; size <= MOST_RANKS; size++) run_threads(size, bodies[i]);
  }
  for (size_t i = 0; i < sizeof bodies / sizeof *bodies; i++) run_processes(3, bodies[i]);
  return 0;
}
