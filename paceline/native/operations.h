/* Operations on tensors inside one host: reductions and messages, as small state machines. */

#ifndef PL_OPERATIONS_H
#define PL_OPERATIONS_H

#include "segment.h"

/* A part of a message in one window of a rank's stream. */
typedef struct pl_stretch {
  int64_t window;  /* number of the window, from the begin of the operation */
  int64_t rank;    /* the sender, whose stage it lies in */
  int64_t offset;  /* in the stage, bytes */
  char *address;   /* in private memory */
  int64_t nbytes;
} pl_stretch;

/* A small all-reduce. */
typedef struct pl_small {
  int64_t count, nbytes;  /* of the tensor */
  int64_t mark;           /* what ranks compare */
  int64_t dtype, op;      /* numbers of reduce.h */
} pl_small;

typedef struct pl_operation pl_operation;

PL_EXPORT int64_t pl_operation_bytes(void);
PL_EXPORT int64_t pl_begin_small(pl_operation *operation, pl_segment *segment,
                                 const pl_small *small, const void *x, void *out);
PL_EXPORT void pl_begin_all_reduce(pl_operation *operation, pl_segment *segment, const void *x,
                                   void *out, int64_t count, int64_t item, int dtype, int op);
PL_EXPORT void pl_begin_reduce_scatter(pl_operation *operation, pl_segment *segment, const void *x,
                                       void *out, const int64_t *bounds, int64_t item, int dtype,
                                       int op);
PL_EXPORT void pl_begin_messages(pl_operation *operation, pl_segment *segment,
                                 const pl_stretch *departures, int64_t count);
PL_EXPORT void pl_set_arrivals(pl_operation *operation, const pl_stretch *arrivals, int64_t count,
                               int64_t windows);
PL_EXPORT int64_t pl_advance(pl_operation *operation);
PL_EXPORT int64_t pl_finish(pl_operation *operation, int64_t nanoseconds);

#endif
