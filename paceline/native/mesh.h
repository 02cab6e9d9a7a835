/* Framed messages between processes, over connected sockets, moved by a thread of C.

   A link is one socket. Messages of a link arrive in the order in which they were sent. An eager
   mesh reads them whether a caller waits for them or not, so a sender is never held up. Others read
   when a caller waits, or while messages are expected.

   frame   magic, version (4 bytes each), bytes of the message, channel, key (8 each), zeros
           |<------------------------------- 64 bytes ------------------------------------>|
           message | zeros to a multiple of 64 bytes

   Heads and messages begin at multiples of 64 bytes of the stream. The kernel copies aligned memory
   to aligned places of its buffers, which is up to 1.7 times as fast.

   A caller that knows what comes next may expect a message: it then lands in memory of the caller.

   The sockets come from Python, which has connected and authenticated them. */

#ifndef PL_MESH_H
#define PL_MESH_H

#include "core.h"

/* A piece of a message that is sent from where it lies. */
typedef struct pl_piece {
  const char *address;
  int64_t nbytes;
} pl_piece;

/* A message that has come. It belongs to the caller until `pl_mesh_give_back`. If it has landed
   where it was expected, `nbytes` is there, and nothing at `address`. */
typedef struct pl_arrival {
  void *address;
  int64_t nbytes, link, channel, key, has_landed;
} pl_arrival;

/* States of a link. Positive numbers are values of errno. */
enum { PL_LINK_OPEN = 0, PL_LINK_ENDED = -1, PL_LINK_MALFORMED = -2 };
/* Results of `pl_mesh_send` besides the number of a message. */
enum { PL_SENT = 0, PL_NOT_SENT = -1 };

/* The channel of messages that schedules take (schedule.h). Python doesn't see them. */
enum { PL_SCHEDULES = -1 };

typedef struct pl_mesh pl_mesh;

PL_EXPORT pl_mesh *pl_mesh_open(int eager);
PL_EXPORT void pl_mesh_close(pl_mesh *mesh);
PL_EXPORT void pl_mesh_free(pl_mesh *mesh);
PL_EXPORT int64_t pl_mesh_add(pl_mesh *mesh, int descriptor, int64_t largest);
PL_EXPORT int pl_mesh_state(pl_mesh *mesh, int64_t link);
PL_EXPORT int pl_mesh_ended(const pl_mesh *mesh);
PL_EXPORT int64_t pl_mesh_send(pl_mesh *mesh, int64_t link, int64_t channel, int64_t key,
                               const pl_piece *pieces, int64_t count, int64_t at_once, int copies);
PL_EXPORT int pl_mesh_expect(pl_mesh *mesh, int64_t link, int64_t channel, int64_t key,
                             void *address, int64_t nbytes);
PL_EXPORT int64_t pl_mesh_sent(pl_mesh *mesh, int64_t link);
PL_EXPORT int pl_mesh_take(pl_mesh *mesh, pl_arrival *arrival);
PL_EXPORT void pl_mesh_give_back(void *message);
PL_EXPORT uint32_t pl_mesh_changes(pl_mesh *mesh);
PL_EXPORT void pl_mesh_wake(pl_mesh *mesh);
PL_EXPORT int pl_mesh_wait_change(pl_mesh *mesh, uint32_t seen, int64_t nanoseconds);

#endif
