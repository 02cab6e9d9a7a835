/* Random reductions and messages, one after another, compared with plain loops. */

#include "driver.h"
#include "operations.h"
#include "reduce.h"

enum { ROUNDS = 150, ALL = -1 };

/* ---- elements of each dtype

   fill_*: the elements of a rank. check_*: whether `out` holds the results from element `first` on,
   folded in rank order. */

#define FOLD_ROUND(T, name, RANDOM, IS_FLOAT)                                                     \
  static T value_##name(int64_t rank, int64_t k, int64_t i) {                                     \
    uint64_t number = mix((uint64_t)rank + 10, (uint64_t)k, (uint64_t)i);                         \
    return RANDOM;                                                                                \
  }                                                                                               \
  static void fill_##name(void *x, int64_t count, int64_t rank, int64_t k) {                      \
    for (int64_t i = 0; i < count; i++) ((T *)x)[i] = value_##name(rank, k, i);                   \
  }                                                                                               \
  static void check_##name(const void *out, int64_t first, int64_t count, int64_t size,           \
                           int64_t k, int op) {                                                   \
    for (int64_t i = first; i < first + count; i++) {                                             \
      T total = value_##name(0, k, i);                                                            \
      for (int64_t rank = 1; rank < size; rank++) {                                               \
        T value = value_##name(rank, k, i);                                                       \
        if (op == PL_MIN || op == PL_MAX)                                                         \
          total = (value < total) == (op == PL_MIN) ? value : total;                              \
        else                                                                                      \
          total = (T)(total + value);                                                             \
      }                                                                                           \
      if (IS_FLOAT && op == PL_MEAN)                                                              \
        total = size == 3 ? total / (T)size : total * ((T)1 / (T)size);                           \
      CHECK(((const T *)out)[i - first] == total);                                                \
    }                                                                                             \
  }

FOLD_ROUND(float, f32, (float)(number % 20001) / 7 - 1000, 1)
FOLD_ROUND(double, f64, (double)(number % 20001) / 7 - 1000, 1)
FOLD_ROUND(int32_t, i32, (int32_t)(number % 20001) - 10000, 0)
FOLD_ROUND(uint8_t, u8, (uint8_t)(number % 64), 0)

typedef struct element_kind {
  int dtype;
  int64_t item;
  void (*fill)(void *x, int64_t count, int64_t rank, int64_t k);
  void (*check)(const void *out, int64_t first, int64_t count, int64_t size, int64_t k, int op);
} element_kind;

static const element_kind kinds[] = {{PL_F32, 4, fill_f32, check_f32},
                                     {PL_F64, 8, fill_f64, check_f64},
                                     {PL_I32, 4, fill_i32, check_i32},
                                     {PL_U8, 1, fill_u8, check_u8}};

static const element_kind *pick_kind(int64_t k) { return &kinds[mix(20, (uint64_t)k, 0) % 4]; }

static int pick_op(int64_t k) {
  static const int ops[] = {PL_SUM, PL_MIN, PL_MAX, PL_MEAN};
  int is_float = pick_kind(k)->dtype <= PL_F64;
  return ops[mix(21, (uint64_t)k, 0) % (is_float ? 4 : 3)];
}

/* A number below `limit`, at times 0 or 1; the same on all ranks. */
static int64_t pick_count(int64_t k, int64_t i, int64_t limit) {
  uint64_t number = mix(22, (uint64_t)k, (uint64_t)i);
  return (int64_t)(number % 8 == 0 ? number / 8 % 2 : number / 8 % (uint64_t)limit);
}

/* ---- running an operation */

static void meet(pl_segment *segment) {
  int64_t target = pl_begin_meeting(segment, 0, NULL, 0);
  CHECK(pl_wait(segment, PL_OPERATIONS, target, FOREVER) == PL_REACHED);
}

/* Advance to the end. Now and then a rank is late. Returns 0, or -1 if marks differ. */
static int64_t run_to_end(pl_operation *operation, pl_segment *segment, int64_t k) {
  int64_t target;
  while ((target = pl_advance(operation)) > 0) {
    if (mix(23, (uint64_t)k, (uint64_t)target) % 40 == (uint64_t)segment->rank)
      sleep_ns(MILLISECOND / 5);
    CHECK(pl_wait(segment, PL_OPERATIONS, target, FOREVER) == PL_REACHED);
  }
  return target;
}

static void all_reduce(pl_operation *operation, pl_segment *segment, int64_t k, int64_t count) {
  const element_kind *kind = pick_kind(k);
  void *x = allocate(count * kind->item);
  void *out = k % 3 ? allocate(count * kind->item) : x;
  kind->fill(x, count, segment->rank, k);
  pl_begin_all_reduce(operation, segment, x, out, count, kind->item, kind->dtype, pick_op(k));
  meet(segment);
  CHECK(run_to_end(operation, segment, k) == 0);
  kind->check(out, 0, count, segment->size, k, pick_op(k));
  if (out != x) free(out);
  free(x);
}

static void all_reduce_staged(pl_operation *operation, pl_segment *segment, int64_t k) {
  all_reduce(operation, segment, k, pick_count(k, 0, 9 * segment->block / pick_kind(k)->item));
}

static void all_reduce_small(pl_operation *operation, pl_segment *segment, int64_t k) {
  const element_kind *kind = pick_kind(k);
  int64_t count = k % 20 ? pick_count(k, 0, 200) : PL_SMALL / kind->item; /* at times the most */
  void *x = allocate(count * kind->item), *out = k % 3 ? allocate(count * kind->item) : x;
  kind->fill(x, count, segment->rank, k);
  int64_t mark = k % 7 == 0 && segment->rank == 1 ? -5 : k;
  pl_small small = {count, count * kind->item, mark, kind->dtype, pick_op(k)};
  pl_begin_small(operation, segment, &small, x, out);
  if (run_to_end(operation, segment, k) == 0)
    kind->check(out, 0, count, segment->size, k, pick_op(k));
  else
    CHECK(k % 7 == 0); /* rank 1 has another mark: all ranks are told */
  if (out != x) free(out);
  free(x);
}

static void reduce_scatter(pl_operation *operation, pl_segment *segment, int64_t k) {
  const element_kind *kind = pick_kind(k);
  int64_t bounds[MOST_RANKS + 1] = {0}, size = segment->size;
  for (int64_t rank = 0; rank < size; rank++)
    bounds[rank + 1] = bounds[rank] + pick_count(k, rank, 4 * segment->block / kind->item);
  int64_t first = bounds[segment->rank], count = bounds[segment->rank + 1] - first;
  void *x = allocate(bounds[size] * kind->item), *out = allocate(count * kind->item);
  kind->fill(x, bounds[size], segment->rank, k);
  pl_begin_reduce_scatter(operation, segment, x, out, bounds, kind->item, kind->dtype, pick_op(k));
  meet(segment);
  CHECK(run_to_end(operation, segment, k) == 0);
  kind->check(out, first, count, size, k, pick_op(k));
  free(out);
  free(x);
}

/* ---- messages */

enum { MOST_MESSAGES = 5, MOST_STRETCHES = 400 };

/* Message m of a rank: its receiver, or ALL, and its bytes. */
static int64_t message_receiver(int64_t rank, int64_t size, int64_t k, int64_t m) {
  return (int64_t)(mix(30 + (uint64_t)rank, (uint64_t)k, (uint64_t)m) % (uint64_t)(size + 1)) + ALL;
}

static int64_t message_bytes(const pl_segment *segment, int64_t rank, int64_t k, int64_t m) {
  if (m >= pick_count(k, 100 + rank, MOST_MESSAGES + 1)) return 0; /* ranks send more, or fewer */
  return pick_count(k, 200 + 10 * rank + m, 3 * segment->block);
}

/* Append the windows' parts of a message, which begins at byte `at` of the stream of `rank`. */
static void cut_message(const pl_segment *segment, pl_stretch *stretches, int64_t *n, int64_t rank,
                        int64_t at, char *address, int64_t nbytes) {
  for (int64_t done = 0; done < nbytes;) {
    int64_t offset = (at + done) % segment->block, length = segment->block - offset;
    length = length < nbytes - done ? length : nbytes - done;
    CHECK(*n < MOST_STRETCHES);
    stretches[(*n)++] =
        (pl_stretch){(at + done) / segment->block, rank, offset, address + done, length};
    done += length;
  }
}

static int compare_windows(const void *a, const void *b) {
  int64_t left = ((const pl_stretch *)a)->window, right = ((const pl_stretch *)b)->window;
  return (left > right) - (left < right);
}

static void send_messages(pl_operation *operation, pl_segment *segment, int64_t k) {
  static const element_kind *kind = &kinds[3]; /* bytes */
  pl_stretch *departures = allocate(MOST_STRETCHES * (int64_t)sizeof(pl_stretch));
  pl_stretch *arrivals = allocate(MOST_STRETCHES * (int64_t)sizeof(pl_stretch));
  char *rooms[MOST_RANKS][MOST_MESSAGES];
  int64_t n_departures = 0, n_arrivals = 0, windows = 0;
  for (int64_t rank = 0; rank < segment->size; rank++) {
    int64_t at = 0;
    for (int64_t m = 0; m < MOST_MESSAGES; m++) {
      int64_t to = message_receiver(rank, segment->size, k, m);
      int64_t nbytes = message_bytes(segment, rank, k, m);
      rooms[rank][m] = allocate(nbytes);
      if (rank == segment->rank) { /* sent; also received if it is for the rank itself */
        kind->fill(rooms[rank][m], nbytes, rank, k + m);
        cut_message(segment, departures, &n_departures, rank, at, rooms[rank][m], nbytes);
      } else if (to == segment->rank || to == ALL) {
        cut_message(segment, arrivals, &n_arrivals, rank, at, rooms[rank][m], nbytes);
      }
      at += nbytes;
    }
    int64_t longest = (at + segment->block - 1) / segment->block;
    windows = windows > longest ? windows : longest;
  }
  qsort(arrivals, (size_t)n_arrivals, sizeof *arrivals, compare_windows);
  pl_begin_messages(operation, segment, departures, n_departures);
  meet(segment);
  pl_set_arrivals(operation, arrivals, n_arrivals, windows);
  CHECK(run_to_end(operation, segment, k) == 0);
  for (int64_t rank = 0; rank < segment->size; rank++) {
    for (int64_t m = 0; m < MOST_MESSAGES; m++) {
      int64_t to = message_receiver(rank, segment->size, k, m);
      int64_t nbytes = message_bytes(segment, rank, k, m);
      if (rank != segment->rank && (to == segment->rank || to == ALL)) {
        for (int64_t i = 0; i < nbytes; i++)
          CHECK((uint8_t)rooms[rank][m][i] == value_u8(rank, k + m, i));
      }
      free(rooms[rank][m]);
    }
  }
  free(departures);
  free(arrivals);
}

/* ---- bodies */

/* A random sequence of operations. Small blocks make many phases of little data. */
static void run_random(pl_segment *segment) {
  pl_operation *operation = allocate(pl_operation_bytes());
  for (int64_t k = 1; k <= ROUNDS; k++) {
    segment->block = PL_LINE * segment->size * (1 + (int64_t)(mix(24, (uint64_t)k, 0) % 8));
    switch (mix(25, (uint64_t)k, (uint64_t)segment->size) % 4) {
      case 0: all_reduce_small(operation, segment, k); break;
      case 1: all_reduce_staged(operation, segment, k); break;
      case 2: reduce_scatter(operation, segment, k); break;
      default: send_messages(operation, segment, k);
    }
  }
  free(operation);
}

/* Blocks of their real size, which fill a stage. */
static void run_large(pl_segment *segment) {
  pl_operation *operation = allocate(pl_operation_bytes());
  for (int64_t k = 1; k <= 2; k++)
    all_reduce(operation, segment, k, 5 * segment->block / pick_kind(k)->item / 2 - k);
  free(operation);
}

int main(void) {
  for (int64_t size = 1; size <= MOST_RANKS; size++) run_threads(size, run_random);
  run_threads(2, run_large);
  run_processes(3, run_random);
  return 0;
}
