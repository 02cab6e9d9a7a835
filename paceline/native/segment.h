/* The control segment of a group inside one host: its layout, and this process's view of it.

   rank r  | cells: operations, agreements, left, pid, marks x 2, note, bell |
           | text | note | meta x 2 | mailbox x 2 | small x 2 | stage x 4 |

   Each cell is written by rank r alone. Two channels run over the segment, each with a counter of
   every rank: operations on tensors, whose ranks post and go on, and agreements, which block.

   Memory order: a rank writes its data first, then raises its counter with a release store. A rank
   that reads the counter with an acquire load sees the data. This holds on every processor.

   Marks, metas, mailboxes and small stages exist twice, for even and odd meetings. A rank writes a
   half again only after all ranks have posted for the meeting in between, and a rank posts for that
   one only after it has read this half. So nothing is overwritten before it is read. */

#ifndef PL_SEGMENT_H
#define PL_SEGMENT_H

#include <stdatomic.h>
#include <stdint.h>

#include "core.h"

enum {
  PL_LINE = 64,              /* bytes of a cache line: cells of different uses share none */
  PL_SLOTS = 4,              /* stages of a rank, used in turn */
  PL_STAGE = 2 << 20,        /* bytes of a stage */
  PL_SMALL = 256 << 10,      /* bytes of each half of a small stage */
  PL_META = 16 << 10,        /* bytes of each half of a rank's meta */
  PL_MAIL = 16 << 10,        /* bytes of each half of a rank's mailbox */
  PL_TEXT = 4096,            /* bytes of a rank's text, and of its note */
  PL_PIECE = 384 << 10,      /* bytes of a rank's part of a block: it fits a core's cache */
  /* Where the parts of a rank begin, in bytes from the rank's begin. */
  PL_TEXTS = 512,
  PL_NOTES = PL_TEXTS + PL_TEXT,
  PL_METAS = PL_NOTES + PL_TEXT,
  PL_MAILS = PL_METAS + 2 * PL_META,
  PL_SMALLS = PL_MAILS + 2 * PL_MAIL,
  PL_STAGES = PL_SMALLS + 2 * PL_SMALL,
  PL_SPAN = PL_STAGES + PL_SLOTS * PL_STAGE, /* bytes of a rank */
};

/* Cells of a rank, as numbers of cache lines. */
enum { PL_OPERATIONS, PL_AGREEMENTS, PL_LEFT, PL_PID, PL_MARKS, PL_NOTE, PL_BELL };

/* Results of a wait. */
enum { PL_REACHED = 0, PL_TIMEOUT = 1, PL_INTERRUPTED = 2 };

/* One process's view of a segment. Python has a ctypes structure with the same fields. */
typedef struct pl_segment {
  char *base;           /* address of the segment in this process */
  int64_t rank, size;
  int64_t posted;       /* posts of this rank for operations */
  int64_t meetings;     /* meetings so far; the parity picks a half */
  int64_t mail_turns;   /* turns of agreements so far */
  int64_t turn;         /* stages used so far, the same on all ranks; the next is turn % PL_SLOTS */
  int64_t block;        /* bytes of a block: each rank's part is a whole number of lines */
  _Atomic int64_t spin_ns;     /* how long the next wait polls; several threads may wait */
  _Atomic int64_t interrupted; /* whether waits of this process end at once */
} pl_segment;

static inline char *pl_part(const pl_segment *segment, int64_t rank, int64_t offset) {
  return segment->base + rank * (int64_t)PL_SPAN + offset;
}

static inline _Atomic int64_t *pl_cell(const pl_segment *segment, int64_t rank, int line) {
  return (_Atomic int64_t *)(void *)pl_part(segment, rank, (int64_t)line * PL_LINE);
}

static inline char *pl_stage(const pl_segment *segment, int64_t rank, int64_t turn) {
  return pl_part(segment, rank, PL_STAGES + turn % PL_SLOTS * (int64_t)PL_STAGE);
}

PL_EXPORT int64_t pl_segment_bytes(int64_t size);
PL_EXPORT void pl_open_segment(pl_segment *segment, void *base, int64_t rank, int64_t size);
PL_EXPORT int64_t pl_post(pl_segment *segment);
PL_EXPORT int pl_has_reached(const pl_segment *segment, int channel, int64_t target);
PL_EXPORT int64_t pl_find_behind(const pl_segment *segment, int channel, int64_t target,
                                 int64_t *ranks);
PL_EXPORT int pl_wait(pl_segment *segment, int channel, int64_t target, int64_t nanoseconds);
PL_EXPORT void pl_interrupt(pl_segment *segment);
PL_EXPORT int64_t pl_begin_meeting(pl_segment *segment, int64_t mark, const void *meta,
                                   int64_t nbytes);
PL_EXPORT int pl_marks_agree(const pl_segment *segment, int64_t parity, int64_t mark);
PL_EXPORT int64_t pl_post_mail(pl_segment *segment, int64_t mark, const void *payload,
                               int64_t nbytes, int64_t total);
PL_EXPORT void pl_read_mail_heads(const pl_segment *segment, int64_t turn, int64_t *marks,
                                  int64_t *totals);
PL_EXPORT void pl_leave(pl_segment *segment);
PL_EXPORT int pl_has_left(const pl_segment *segment, int64_t rank);
PL_EXPORT void pl_set_pid(pl_segment *segment, int64_t pid);
PL_EXPORT int64_t pl_get_pid(const pl_segment *segment, int64_t rank);
PL_EXPORT void pl_write_note(pl_segment *segment, const void *text, int64_t nbytes);
PL_EXPORT int64_t pl_read_note(const pl_segment *segment, int64_t rank, void *text);

#endif
