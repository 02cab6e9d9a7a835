/* Runs schedules. See schedule.h.

   An all-reduce advances when a message has come, when something has been sent, and when a link has
   ended, in the thread that sees it. One thread at a time advances all schedules of a mesh. Another
   one that has news in the meantime leaves a note (`has_news`), and goes on.

   A round ends when all its messages have come and are sent. So no message is overwritten before it
   is sent, and all sums are of parts from before the round.

   Memory order: steps, memory and marks of an all-reduce are touched by the thread that holds
   `running` alone. It writes `state` last, with a release store; who reads the end there, with an
   acquire load, sees the sum. `has_news` is written after the news (seq_cst) and read after
   `running` was let go, so one of the two threads sees it. */

#include "schedule.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "futex.h"
#include "reduce.h"
#include "segment.h" /* PL_REACHED */

enum { LANDS = 256 << 10 }; /* bytes from which a message is received right in its place */
static const int64_t AT_ONCE = INT64_MAX / 2;
enum { KEY_BITS = 24 }; /* of a key: the message of the schedule; the others are its number */

/* What has happened to a step that sends or receives. */
typedef struct mark {
  int64_t unsent;  /* number of the message on its link, if it has to be sent yet; else 0 */
  int has_come;
  pl_arrival arrival;
} mark;

struct pl_schedule {
  pl_schedule *next;
  pl_schedules *owner;
  _Atomic int64_t state;
  int64_t link, came, wanted; /* see pl_progress; written before the state */
  pl_reduction reduction;
  char *memory;
  int64_t first, end; /* steps of the round */
  int64_t count;      /* steps of all rounds */
  int has_begun;      /* whether the messages of the round are on their way */
  mark *marks;        /* of each step */
  pl_step steps[];
};

struct pl_schedules {
  pl_mesh *mesh;
  pthread_mutex_t running; /* held by the thread that advances the schedules */
  pthread_mutex_t lock;    /* guards the list; taken after `running` */
  pl_schedule *oldest;
  _Atomic int has_news, count;
};

pl_schedules *pl_open_schedules(pl_mesh *mesh) {
  pl_schedules *schedules = calloc(1, sizeof *schedules);
  if (!schedules) return NULL;
  schedules->mesh = mesh;
  pthread_mutex_init(&schedules->running, NULL);
  pthread_mutex_init(&schedules->lock, NULL);
  return schedules;
}

void pl_free_schedules(pl_schedules *schedules) {
  if (!schedules) return;
  pthread_mutex_destroy(&schedules->running);
  pthread_mutex_destroy(&schedules->lock);
  free(schedules);
}

/* ---- the list */

static void append(pl_schedules *schedules, pl_schedule *schedule) {
  pthread_mutex_lock(&schedules->lock);
  pl_schedule **place = &schedules->oldest;
  while (*place) place = &(*place)->next;
  *place = schedule;
  atomic_fetch_add(&schedules->count, 1);
  pthread_mutex_unlock(&schedules->lock);
}

static void take_out(pl_schedules *schedules, pl_schedule *schedule) {
  pthread_mutex_lock(&schedules->lock);
  pl_schedule **place = &schedules->oldest;
  while (*place && *place != schedule) place = &(*place)->next;
  if (*place) {
    *place = schedule->next;
    atomic_fetch_sub(&schedules->count, 1);
  }
  pthread_mutex_unlock(&schedules->lock);
}

static pl_schedule *find_next(pl_schedules *schedules, const pl_schedule *after) {
  pthread_mutex_lock(&schedules->lock);
  pl_schedule *next = after ? after->next : schedules->oldest;
  pthread_mutex_unlock(&schedules->lock);
  return next;
}

/* ---- a round. These functions are called by the thread that holds `running`. */

static int64_t count_bytes(const pl_schedule *schedule, const pl_step *step) {
  return (step->b - step->a) * schedule->reduction.item;
}

static char *find_place(const pl_schedule *schedule, const pl_step *step) {
  return schedule->memory + step->a * schedule->reduction.item;
}

static int64_t make_key(const pl_schedule *schedule, const pl_step *step) {
  return schedule->reduction.number << KEY_BITS | step->message;
}

static void give_back(pl_schedule *schedule) {
  for (int64_t i = schedule->first; i < schedule->end; i++) {
    mark *each = &schedule->marks[i];
    if (each->has_come) pl_mesh_give_back(each->arrival.address);
    each->has_come = 0;
  }
}

/* End an all-reduce. The caller must not touch it afterwards: who reads the state may free it. */
static void finish(pl_schedule *schedule, int64_t state) {
  pl_schedules *owner = schedule->owner;
  give_back(schedule);
  take_out(owner, schedule);
  if (schedule->reduction.in_background) pl_mesh_count_reading(owner->mesh, -1);
  atomic_store_explicit(&schedule->state, state, memory_order_release);
  pl_mesh_wake(owner->mesh);
}

static void fail(pl_schedule *schedule, int64_t state, int64_t link) {
  schedule->link = link;
  finish(schedule, state);
}

static void find_round_end(pl_schedule *schedule) {
  schedule->end = schedule->first;
  while (schedule->end < schedule->count && schedule->steps[schedule->end].kind != PL_END)
    schedule->end++;
}

/* Send the messages of the round. Returns whether it could. */
static int begin_round(pl_schedule *schedule) {
  pl_mesh *mesh = schedule->owner->mesh;
  find_round_end(schedule);
  schedule->has_begun = 1;
  for (int64_t i = schedule->first; i < schedule->end; i++) {
    const pl_step *step = &schedule->steps[i];
    int64_t nbytes = count_bytes(schedule, step), key = make_key(schedule, step);
    if (step->kind == PL_REPLACE && step->n && nbytes >= LANDS)
      pl_mesh_expect(mesh, step->link, PL_SCHEDULES, key, find_place(schedule, step), nbytes);
  }
  for (int64_t i = schedule->first; i < schedule->end; i++) {
    const pl_step *step = &schedule->steps[i];
    if (step->kind != PL_SEND) continue;
    pl_piece piece = {find_place(schedule, step), count_bytes(schedule, step)};
    int64_t sent = pl_mesh_send(mesh, step->link, PL_SCHEDULES, make_key(schedule, step), &piece,
                                1, AT_ONCE, 0);
    if (sent == PL_NOT_SENT) {
      fail(schedule, PL_LINK_LOST, step->link);
      return 0;
    }
    schedule->marks[i].unsent = sent;
  }
  return 1;
}

/* Look whether the message of a step has come or is sent. Returns PL_ENDED if so, PL_RUNNING if it
   has to be waited for, or why it never will be. */
static int64_t look_at(pl_schedule *schedule, int64_t i) {
  pl_mesh *mesh = schedule->owner->mesh;
  const pl_step *step = &schedule->steps[i];
  mark *each = &schedule->marks[i];
  /* First the state of the link: what came before its end is there by now. */
  if (step->kind == PL_SEND && each->unsent) {
    int has_ended = pl_mesh_state(mesh, step->link) != PL_LINK_OPEN;
    if (pl_mesh_sent(mesh, step->link) < each->unsent)
      return has_ended ? PL_LINK_LOST : PL_RUNNING;
    each->unsent = 0;
  }
  if (step->kind != PL_RECEIVE && step->kind != PL_REPLACE) return PL_ENDED;
  if (each->has_come) return PL_ENDED;
  int has_ended = pl_mesh_state(mesh, step->link) != PL_LINK_OPEN;
  if (!pl_mesh_take_for_schedule(mesh, step->link, make_key(schedule, step), &each->arrival))
    return has_ended ? PL_LINK_LOST : PL_RUNNING;
  each->has_come = 1;
  schedule->came = each->arrival.nbytes;
  schedule->wanted = count_bytes(schedule, step);
  return schedule->came == schedule->wanted ? PL_ENDED : PL_WRONG_BYTES;
}

/* Add the terms of a sum, in their order. The result goes to the place of the own part. */
static void add_terms(pl_schedule *schedule, const pl_step *sum) {
  const pl_reduction *reduction = &schedule->reduction;
  const void *parts[sum->n];
  for (int64_t k = 0; k < sum->n; k++) {
    const pl_step *term = sum + 1 + k;
    const char *received =
        term->n < 0 ? NULL : schedule->marks[schedule->first + term->n].arrival.address;
    parts[k] = received ? received + term->a * reduction->item : find_place(schedule, sum);
  }
  void *out = find_place(schedule, sum);
  pl_reduce(&out, 1, parts, (int)sum->n, sum->b - sum->a, (int)reduction->dtype,
            (int)reduction->op);
}

/* Run rounds until one has to wait. */
static void advance(pl_schedule *schedule) {
  while (schedule->first < schedule->count) {
    if (!schedule->has_begun && !begin_round(schedule)) return;
    int has_to_wait = 0;
    for (int64_t i = schedule->first; i < schedule->end; i++) {
      int64_t state = look_at(schedule, i);
      if (state == PL_RUNNING) has_to_wait = 1;
      if (state != PL_RUNNING && state != PL_ENDED) {
        fail(schedule, state, schedule->steps[i].link);
        return;
      }
    }
    if (has_to_wait) return;
    for (int64_t i = schedule->first; i < schedule->end; i++) {
      const pl_step *step = &schedule->steps[i];
      if (step->kind == PL_ADD) add_terms(schedule, step);
      if (step->kind == PL_REPLACE && !schedule->marks[i].arrival.has_landed)
        pl_copy(find_place(schedule, step), schedule->marks[i].arrival.address,
                count_bytes(schedule, step));
    }
    give_back(schedule);
    schedule->first = schedule->end + 1;
    schedule->has_begun = 0;
  }
  finish(schedule, PL_ENDED);
}

/* Advance all schedules of a mesh, or let the thread do it that is at it. */
void pl_advance_schedules(pl_schedules *schedules) {
  if (!atomic_load(&schedules->count)) return;
  atomic_store(&schedules->has_news, 1);
  while (atomic_load(&schedules->has_news)) {
    if (pthread_mutex_trylock(&schedules->running)) return;
    while (atomic_exchange(&schedules->has_news, 0)) {
      for (pl_schedule *each = find_next(schedules, NULL), *next; each; each = next) {
        next = find_next(schedules, each);
        advance(each);
      }
    }
    pthread_mutex_unlock(&schedules->running);
  }
}

/* ---- for callers */

/* Begin an all-reduce of `memory`, in place. Steps and reduction are copied. The memory must stay as
   it is until the all-reduce has ended well, or the mesh is closed. Returns NULL without memory. */
pl_schedule *pl_schedule_begin(pl_mesh *mesh, const pl_step *steps, int64_t count,
                               const pl_reduction *reduction, void *memory) {
  pl_schedule *schedule = malloc(sizeof *schedule + (size_t)count * sizeof *steps);
  mark *marks = calloc((size_t)count + 1, sizeof *marks);
  if (!schedule || !marks) {
    free(schedule);
    free(marks);
    return NULL;
  }
  memset(schedule, 0, sizeof *schedule);
  schedule->owner = pl_mesh_schedules(mesh);
  schedule->reduction = *reduction;
  schedule->memory = memory;
  schedule->count = count;
  schedule->marks = marks;
  memcpy(schedule->steps, steps, (size_t)count * sizeof *steps);
  append(schedule->owner, schedule);
  if (reduction->in_background) pl_mesh_count_reading(mesh, 1);
  pl_advance_schedules(schedule->owner);
  return schedule;
}

/* Read the state of an all-reduce. */
int64_t pl_schedule_state(const pl_schedule *schedule) {
  return atomic_load_explicit(&schedule->state, memory_order_acquire);
}

void pl_schedule_progress(const pl_schedule *schedule, pl_progress *progress) {
  progress->state = pl_schedule_state(schedule);
  int has_failed = progress->state > PL_ENDED;
  progress->link = has_failed ? schedule->link : -1;
  progress->came = has_failed ? schedule->came : 0;
  progress->wanted = has_failed ? schedule->wanted : 0;
}

/* Read the state, after a look into the sockets. */
int64_t pl_schedule_poll(pl_schedule *schedule) {
  if (pl_schedule_state(schedule) == PL_RUNNING) pl_mesh_look(schedule->owner->mesh);
  return pl_schedule_state(schedule);
}

/* Wait for the end, at most `nanoseconds`. Returns the state. */
int64_t pl_schedule_wait(pl_schedule *schedule, int64_t nanoseconds) {
  pl_mesh *mesh = schedule->owner->mesh;
  int64_t begun = pl_now(), state;
  for (int result = PL_REACHED;;) {
    uint32_t seen = pl_mesh_changes(mesh); /* before the look, so that no change is missed */
    int64_t left = begun + nanoseconds - pl_now();
    state = pl_schedule_state(schedule);
    if (state != PL_RUNNING || left <= 0 || result != PL_REACHED) break;
    result = pl_mesh_wait_on(mesh, seen, left);
  }
  pl_mesh_hand_over(mesh);
  return state;
}

/* Free an all-reduce that has ended, or whose mesh is closed but not freed. */
void pl_schedule_free(pl_schedule *schedule) {
  if (pl_schedule_state(schedule) == PL_RUNNING) {
    pthread_mutex_lock(&schedule->owner->running);
    if (pl_schedule_state(schedule) == PL_RUNNING) fail(schedule, PL_LINK_LOST, -1);
    pthread_mutex_unlock(&schedule->owner->running);
  }
  free(schedule->marks);
  free(schedule);
}
