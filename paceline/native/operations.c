/* Reductions and messages through the stages of a segment. See operations.h.

   Each rank adds its own part of every block, in rank order, so all ranks get the same bits.

   block k, 2 ranks                    phase   rank 0                rank 1
   stage    the others' parts of x     k - 2   s0 = x0, part 1       s1 = x1, part 0
   add      the own part, all ranks'   k       s0 = out0 = x0 + s1   s1 = out1 = s0 + x1
   collect  the others' sums           k + 2   out0 = s1             out1 = s0

   (s0, s1: the stages of ranks 0 and 1; part r of a block is added by rank r)

   In phase k a rank stages block k + 2, adds block k and collects block k - 2, then posts. It may
   be one phase ahead of the slowest rank, so one late wake-up doesn't stop the others. Stages stay
   in the cache; x and out are read and written once.

   Why nothing is overwritten too early: a rank in phase k knows that all ranks have ended phase
   k - 2, so the others are in phases k - 1 to k + 1. There they read the stages of blocks k - 1 to
   k + 1 (adding) and k - 3 to k - 1 (collecting). This rank stages block k + 2, in the slot of
   block k - 2, as there are four slots. No other rank adds from that slot. One may still collect
   from it, but only this rank's own part, which staging does not touch.

   Messages go the same way: a rank's stream of messages is cut into windows of one stage each,
   which are staged by the sender and added, that is copied, by their receivers.

   Memory order: stages are plain memory. They are ordered by the counters alone: pl_post releases
   what this rank has written, and pl_has_reached acquires what the others have. */

#include "operations.h"

#include <string.h>

#include "reduce.h"

enum { PL_DEPTH = PL_SLOTS / 2 }; /* phases from staging to adding, and from adding to collecting */
enum { SMALL, ALL_REDUCE, REDUCE_SCATTER, MESSAGES };

struct pl_operation {
  pl_segment *segment;
  int kind, dtype, op;
  int64_t item;            /* bytes of an element */
  int64_t base;            /* turn of block 0 */
  int64_t blocks, phases;  /* phases: blocks, and some more if sums are collected */
  int64_t phase;           /* the next one */
  int64_t target;          /* post that all ranks must have reached before the next phase */
  const char *x;
  char *out;
  int64_t count;           /* elements of x */
  int64_t width;           /* elements of a block (all-reduce), or of a part of it (scatter) */
  int64_t part;            /* elements of a rank's part of a block */
  const int64_t *bounds;   /* scatter: piece r is x[bounds[r]] to x[bounds[r + 1]] */
  int64_t mark, parity;    /* small: what ranks compare, and the half */
  const pl_stretch *departures, *arrivals; /* messages, by window */
  int64_t n_departures, n_arrivals, next_departure, next_arrival;
};

int64_t pl_operation_bytes(void) { return (int64_t)sizeof(pl_operation); }

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static void reset(pl_operation *operation, pl_segment *segment, int kind) {
  memset(operation, 0, sizeof *operation);
  operation->segment = segment;
  operation->kind = kind;
  operation->base = segment->turn;
}

/* ---- all-reduce */

static int64_t block_length(const pl_operation *operation, int64_t k) {
  return least(operation->width, operation->count - k * operation->width);
}

/* Copy a block to the stage, but for this rank's own part, which is read from `x` itself. */
static void stage_block(pl_operation *operation, int64_t k) {
  pl_segment *segment = operation->segment;
  int64_t length = block_length(operation, k) * operation->item;
  int64_t part = operation->part * operation->item;
  int64_t low = least(segment->rank * part, length), high = least(low + part, length);
  char *stage = pl_stage(segment, segment->rank, operation->base + k);
  const char *x = operation->x + k * operation->width * operation->item;
  if (low) pl_copy(stage, x, low);
  if (high < length) pl_copy(stage + high, x + high, length - high);
}

/* Add this rank's part of a block. The sum goes to the stage, for the others, and to `out`. */
static void add_block(pl_operation *operation, int64_t k) {
  pl_segment *segment = operation->segment;
  int64_t length = block_length(operation, k);
  int64_t low = least(segment->rank * operation->part, length);
  int64_t high = least(low + operation->part, length);
  if (high == low) return;
  const void *parts[segment->size];
  int64_t at = low * operation->item, block = k * operation->width * operation->item;
  for (int64_t rank = 0; rank < segment->size; rank++)
    parts[rank] = pl_stage(segment, rank, operation->base + k) + at;
  void *outs[2] = {pl_stage(segment, segment->rank, operation->base + k) + at,
                   operation->out + block + at};
  parts[segment->rank] = operation->x + block + at;
  pl_reduce(outs, 2, parts, (int)segment->size, high - low, operation->dtype, operation->op);
}

/* Copy the other ranks' sums of a block from their stages. */
static void collect_block(pl_operation *operation, int64_t k) {
  pl_segment *segment = operation->segment;
  int64_t length = block_length(operation, k) * operation->item;
  int64_t part = operation->part * operation->item;
  char *out = operation->out + k * operation->width * operation->item;
  for (int64_t rank = 0; rank < segment->size; rank++) {
    int64_t low = least(rank * part, length), high = least(low + part, length);
    if (rank != segment->rank && high > low)
      pl_copy(out + low, pl_stage(segment, rank, operation->base + k) + low, high - low);
  }
}

/* Begin to reduce `x` into `out`, which is `x` itself or memory apart from it. Stages the first
   blocks; the caller then meets with all ranks, and advances the operation. */
void pl_begin_all_reduce(pl_operation *operation, pl_segment *segment, const void *x, void *out,
                         int64_t count, int64_t item, int dtype, int op) {
  reset(operation, segment, ALL_REDUCE);
  operation->x = x;
  operation->out = out;
  operation->count = count;
  operation->item = item;
  operation->dtype = dtype;
  operation->op = op;
  /* All blocks but the last have the same width, in which each part is whole cache lines. */
  int64_t blocks = (count * item + segment->block - 1) / segment->block;
  operation->blocks = blocks > 1 ? blocks : 1;
  int64_t line = PL_LINE / item * segment->size, step = operation->blocks * line;
  operation->width = (count + step - 1) / step * line;
  operation->part = operation->width / segment->size;
  operation->phases = operation->blocks + PL_DEPTH;
  for (int64_t k = 0; k < least(PL_DEPTH, operation->blocks); k++) stage_block(operation, k);
}

/* ---- reduce-scatter */

/* Copy the next part of every other rank's piece to the stage. */
static void stage_pieces(pl_operation *operation, int64_t k) {
  pl_segment *segment = operation->segment;
  char *stage = pl_stage(segment, segment->rank, operation->base + k);
  for (int64_t rank = 0; rank < segment->size; rank++) {
    int64_t low = operation->bounds[rank] + k * operation->width;
    int64_t high = least(low + operation->width, operation->bounds[rank + 1]);
    if (rank != segment->rank && high > low)
      pl_copy(stage + rank * operation->part, operation->x + low * operation->item,
                    (high - low) * operation->item);
  }
}

static void add_piece(pl_operation *operation, int64_t k) {
  pl_segment *segment = operation->segment;
  int64_t first = operation->bounds[segment->rank];
  int64_t low = first + k * operation->width;
  int64_t high = least(low + operation->width, operation->bounds[segment->rank + 1]);
  if (high <= low) return;
  const void *parts[segment->size];
  for (int64_t rank = 0; rank < segment->size; rank++)
    parts[rank] =
        pl_stage(segment, rank, operation->base + k) + segment->rank * operation->part;
  parts[segment->rank] = operation->x + low * operation->item;
  void *out = operation->out + (low - first) * operation->item;
  pl_reduce(&out, 1, parts, (int)segment->size, high - low, operation->dtype, operation->op);
}

/* Begin to reduce `x`; this rank's piece goes to `out`. `bounds` has size + 1 entries, and stays
   alive with the operation. The caller meets with all ranks, then advances it. */
void pl_begin_reduce_scatter(pl_operation *operation, pl_segment *segment, const void *x, void *out,
                             const int64_t *bounds, int64_t item, int dtype, int op) {
  reset(operation, segment, REDUCE_SCATTER);
  operation->x = x;
  operation->out = out;
  operation->bounds = bounds;
  operation->item = item;
  operation->dtype = dtype;
  operation->op = op;
  operation->part = segment->block / segment->size; /* bytes, here */
  operation->width = operation->part / item;
  int64_t longest = 0;
  for (int64_t rank = 0; rank < segment->size; rank++) {
    int64_t length = bounds[rank + 1] - bounds[rank];
    longest = length > longest ? length : longest;
  }
  int64_t blocks = (longest + operation->width - 1) / operation->width;
  operation->blocks = operation->phases = blocks > 1 ? blocks : 1;
  for (int64_t k = 0; k < least(PL_DEPTH, operation->blocks); k++) stage_pieces(operation, k);
}

/* ---- messages */

static void write_window(pl_operation *operation, int64_t window) {
  while (operation->next_departure < operation->n_departures &&
         operation->departures[operation->next_departure].window <= window) {
    const pl_stretch *stretch = &operation->departures[operation->next_departure++];
    pl_copy(pl_stage(operation->segment, stretch->rank, operation->base + stretch->window) +
                      stretch->offset,
                  stretch->address, stretch->nbytes);
  }
}

static void read_window(pl_operation *operation, int64_t window) {
  while (operation->next_arrival < operation->n_arrivals &&
         operation->arrivals[operation->next_arrival].window <= window) {
    const pl_stretch *stretch = &operation->arrivals[operation->next_arrival++];
    pl_copy(stretch->address,
                  pl_stage(operation->segment, stretch->rank, operation->base + stretch->window) +
                      stretch->offset,
                  stretch->nbytes);
  }
}

/* Begin to send messages: write the first windows. `departures` are sorted by window, and stay
   alive with the operation. The caller meets with all ranks, which tell each other what they
   send, then calls `pl_set_arrivals`. */
void pl_begin_messages(pl_operation *operation, pl_segment *segment, const pl_stretch *departures,
                       int64_t count) {
  reset(operation, segment, MESSAGES);
  operation->departures = departures;
  operation->n_departures = count;
  write_window(operation, PL_DEPTH - 1);
}

/* Say which parts of the others' windows this rank copies, and the most windows of any rank. */
void pl_set_arrivals(pl_operation *operation, const pl_stretch *arrivals, int64_t count,
                     int64_t windows) {
  operation->arrivals = arrivals;
  operation->n_arrivals = count;
  operation->blocks = operation->phases = windows;
}

/* ---- small all-reduce */

/* Begin to reduce at most PL_SMALL bytes: every rank adds all of it, so ranks meet only once. The
   next meeting has the other half, so nothing is overwritten before it is read. Returns the post
   that all ranks must have reached. */
int64_t pl_begin_small(pl_operation *operation, pl_segment *segment, const pl_small *small,
                       const void *x, void *out) {
  reset(operation, segment, SMALL);
  operation->out = out;
  operation->count = small->count;
  operation->dtype = (int)small->dtype;
  operation->op = (int)small->op;
  operation->mark = small->mark;
  operation->parity = segment->meetings & 1;
  if (small->nbytes)
    memcpy(pl_part(segment, segment->rank, PL_SMALLS + operation->parity * PL_SMALL), x,
           (size_t)small->nbytes);
  operation->target = pl_begin_meeting(segment, small->mark, NULL, 0);
  return operation->target;
}

static int64_t end_small(pl_operation *operation) {
  pl_segment *segment = operation->segment;
  if (!pl_marks_agree(segment, operation->parity, operation->mark)) return -1;
  const void *parts[segment->size];
  for (int64_t rank = 0; rank < segment->size; rank++)
    parts[rank] = pl_part(segment, rank, PL_SMALLS + operation->parity * PL_SMALL);
  void *out = operation->out;
  pl_reduce(&out, 1, parts, (int)segment->size, operation->count, operation->dtype,
            operation->op);
  return 0;
}

/* ---- phases */

static void run_phase(pl_operation *operation, int64_t k) {
  int adds = k < operation->blocks, stages = k + PL_DEPTH < operation->blocks;
  switch (operation->kind) {
    case ALL_REDUCE:
      if (stages) stage_block(operation, k + PL_DEPTH);
      if (adds) add_block(operation, k);
      if (k >= PL_DEPTH) collect_block(operation, k - PL_DEPTH);
      break;
    case REDUCE_SCATTER:
      if (stages) stage_pieces(operation, k + PL_DEPTH);
      add_piece(operation, k);
      break;
    default:
      write_window(operation, k + PL_DEPTH);
      read_window(operation, k);
  }
}

/* Advance an operation as far as it goes, without waiting. Returns the post that all ranks must
   have reached before it goes on; 0 if it has ended; -1 if ranks have different marks. */
int64_t pl_advance(pl_operation *operation) {
  pl_segment *segment = operation->segment;
  while (pl_has_reached(segment, PL_OPERATIONS, operation->target)) {
    if (operation->kind == SMALL) return end_small(operation);
    if (operation->phase == operation->phases) return 0;
    run_phase(operation, operation->phase++);
    if (operation->phase < operation->phases) {
      /* DEPTH - 1 posts behind this one: the others may be one phase behind. */
      operation->target = pl_post(segment) - (PL_DEPTH - 1);
    } else {
      segment->turn += operation->blocks;
      return 0;
    }
  }
  return operation->target;
}

/* Wait at most `nanoseconds` for the other ranks, then advance. Returns what `pl_advance` does. */
int64_t pl_finish(pl_operation *operation, int64_t nanoseconds) {
  if (pl_wait(operation->segment, PL_OPERATIONS, operation->target, nanoseconds) != PL_REACHED)
    return operation->target;
  return pl_advance(operation);
}
