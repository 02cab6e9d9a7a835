/* All-reduces between processes, by schedules that Python gives as data.

   A rank's part of a schedule is a list of steps, round by round. All steps of a round begin with
   the memory as it was before the round. 2 ranks, each adds up a half and sends it to the other:

   round 0   PL_SEND     elements of the other half
             PL_RECEIVE  the other rank's part of the own half, which waits for the sum
             PL_ADD      own half = PL_TERM own part + PL_TERM part received
             PL_END
   round 1   PL_SEND     own half
             PL_REPLACE  elements of the other half
             PL_END

   The threads of the mesh run the rounds (mesh.c): the one that reads the last message of a round
   adds, and sends the messages of the next round. A caller only waits for the end. */

#ifndef PL_SCHEDULE_H
#define PL_SCHEDULE_H

#include "mesh.h"

enum { PL_SEND, PL_RECEIVE, PL_REPLACE, PL_ADD, PL_TERM, PL_END };

/* A step. Elements are counted from the begin of the tensor.

   PL_SEND      a, b: the elements from a to b, as message `message` of the schedule
   PL_RECEIVE   a, b: message `message` has as many elements as there are from a to b
   PL_REPLACE   the same, and the message replaces these elements; n: whether it may do so before
                the round has ended
   PL_ADD       a, b: elements that are added; n: terms, which are the next n steps, in their order
   PL_TERM      n: the step of this round that receives the term, counted from the round's first
                one, or -1 for the own part; a: element of the message where the term begins */
typedef struct pl_step {
  int64_t kind, link, message, a, b, n;
} pl_step;

/* What is reduced, and how. */
typedef struct pl_reduction {
  int64_t number;         /* of the all-reduce in its mesh, the same on all ranks */
  int64_t item;           /* bytes of an element */
  int64_t dtype, op;      /* numbers of reduce.h. A mean is divided by the terms of its sum */
  int64_t in_background;  /* whether the thread of a lazy mesh reads until this has ended */
} pl_reduction;

/* States of an all-reduce. */
enum { PL_RUNNING, PL_ENDED, PL_LINK_LOST, PL_WRONG_BYTES, PL_OUT_OF_MEMORY };

/* How an all-reduce stands. After PL_LINK_LOST: the link; after PL_WRONG_BYTES also the bytes that
   have come and those that should have. */
typedef struct pl_progress {
  int64_t state, link, came, wanted;
} pl_progress;

typedef struct pl_schedule pl_schedule;   /* an all-reduce under way */
typedef struct pl_schedules pl_schedules; /* those of a mesh */

PL_EXPORT pl_schedule *pl_schedule_begin(pl_mesh *mesh, const pl_step *steps, int64_t count,
                                         const pl_reduction *reduction, void *memory);
PL_EXPORT int64_t pl_schedule_wait(pl_schedule *schedule, int64_t nanoseconds);
PL_EXPORT int64_t pl_schedule_poll(pl_schedule *schedule);
PL_EXPORT int64_t pl_schedule_state(const pl_schedule *schedule);
PL_EXPORT void pl_schedule_progress(const pl_schedule *schedule, pl_progress *progress);
PL_EXPORT void pl_schedule_free(pl_schedule *schedule);

/* For mesh.c. */
pl_schedules *pl_open_schedules(pl_mesh *mesh);
void pl_free_schedules(pl_schedules *schedules);
void pl_advance_schedules(pl_schedules *schedules);

/* Of mesh.c. */
pl_schedules *pl_mesh_schedules(pl_mesh *mesh);
int pl_mesh_take_for_schedule(pl_mesh *mesh, int64_t link, int64_t key, pl_arrival *arrival);
void pl_mesh_count_reading(pl_mesh *mesh, int change);
void pl_mesh_look(pl_mesh *mesh);
int pl_mesh_wait_on(pl_mesh *mesh, uint32_t seen, int64_t nanoseconds);
void pl_mesh_hand_over(pl_mesh *mesh);

#endif
