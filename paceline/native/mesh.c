/* Threads that move messages between sockets and memory. See mesh.h.

   Callers write messages to the socket themselves, if nothing waits in front of them; the thread of
   the mesh writes the rest. Of the callers that wait for a change, one reads all sockets, the
   leader, which so hears of its message without a switch between threads. When no caller waits, the
   thread reads: always in an eager mesh, so nothing stays in the sockets and senders are never held
   up; in others while messages are expected. The thread sleeps in the epoll of writers, which has
   the epoll of readers in it. A leader takes the readers out of it while it reads, so that a message
   wakes one thread only.

   Messages of the channel PL_SCHEDULES are for schedules (schedule.c). They wait in a list of their
   own. The thread that has read them, or sees that something was sent, advances the schedules.

   Locks, taken in this order: `link->reading` is held by the thread that reads a link; that of the
   schedules; `link->lock` guards its messages to send and its state; `mesh->lock` guards the list
   of links, the messages that have come, and the pool of free memory. None is held while a caller
   waits.

   Memory order: everything that threads share is guarded by a lock, but for `changes`, on which
   waiters sleep. It is raised (seq_cst) after a message, or a state, is there; a waiter reads it
   before it looks, so a change in between makes its wait return at once. */

#define _GNU_SOURCE
#include "mesh.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "futex.h"
#include "schedule.h"
#include "segment.h" /* PL_REACHED, PL_TIMEOUT */

enum {
  MAGIC = 0x50434c31,      /* the first word of every frame */
  WIRE_VERSION = 1,        /* the second one */
  HEAD = 64,               /* bytes before a message */
  ALIGNMENT = 64,          /* of a message in memory and in the stream */
  BLOCK_HEAD = 128,        /* bytes before a message in memory */
  LOOKAHEAD = 16 << 10,    /* bytes that are read at once while no long message is under way */
  BATCH = 256 << 10,       /* bytes of a long message that are worth a read */
  SMALLEST = 4 << 10,      /* bytes of the smallest block */
  PIECES = 64,             /* pieces of one call of sendmsg */
  TURN = 8 << 20,          /* bytes that one link may move before the others have their turn */
  SPIN = 300000,           /* nanoseconds for which a leader polls, if the last wait was shorter */
  CROWDED = 50000,         /* nanoseconds of a yield if another thread has used the core meanwhile */
  CLASSES = 4 * 40,        /* sizes of blocks: four from each power of two to the next */
};
static _Thread_local int is_leader;
static const int64_t KEPT = (int64_t)256 << 20; /* bytes of free memory that a mesh keeps */

/* Memory of a message. The message begins BLOCK_HEAD bytes after it. */
typedef struct block {
  pl_mesh *mesh;
  struct block *next;
  int64_t room;   /* bytes after this header */
  int64_t nbytes; /* of the message */
  int64_t link, channel, key;
  char *landing;  /* where the message goes, if it was expected; else NULL: into this block */
  int is_claimed; /* whether a caller has expected it, before or after its head had come */
  int is_counted; /* whether it counts among `n_expected` */
  int size_class;
} block;
_Static_assert(sizeof(block) <= BLOCK_HEAD, "the head of a block is too long");

/* Messages, the oldest first. */
typedef struct queue {
  block *first, *last;
} queue;

/* A message that is expected. */
typedef struct landing {
  struct landing *next;
  int64_t channel, key, nbytes;
  char *address;
} landing;

/* The head of a frame, in the byte order of the machine: torch runs on machines of one order. */
typedef struct frame_head {
  uint32_t magic, version;
  int64_t nbytes, channel, key;
  char zeros[HEAD - 32];
} frame_head;

static const char ZEROS[ALIGNMENT];

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

typedef struct outgoing {
  struct outgoing *next;
  char *copy;           /* memory of the rest, if it was copied */
  int64_t count, first; /* pieces, and the first one that isn't sent yet */
  frame_head head;
  pl_piece pieces[];
} outgoing;

typedef struct pl_link {
  pthread_mutex_t lock, reading;
  int descriptor;
  int state;
  int64_t number;
  int64_t largest;        /* bytes of the largest message that may come */
  outgoing *first, *last; /* messages that are not sent yet */
  landing *expected, *last_expected; /* messages that have not begun to come */
  int64_t posted, sent;   /* messages */
  int wants_to_write;     /* whether epoll tells when there is room */
  /* From here on: for the thread that holds `reading`; it sets `part` with `lock` as well. */
  block *part;            /* the message under way; NULL while its head is awaited */
  int64_t received;       /* bytes of it */
  int low_water;          /* bytes that must be there before epoll tells of them */
  int64_t ahead_begin, ahead_end; /* bytes in `ahead` that are not used yet */
  char ahead[LOOKAHEAD];
} pl_link;

struct pl_mesh {
  pthread_mutex_t lock;
  pthread_t thread;
  int eager;
  int readers, bell; /* epoll of the leader, and the eventfd that wakes it */
  int writers, kick; /* epoll of the thread, and what wakes it */
  int is_listening;  /* whether epoll tells the thread of bytes to read; guarded by `lock` */
  int was_short;     /* whether the last wait of a leader was shorter than SPIN; for the leader */
  _Atomic int closing, n_ended; /* whether it closes; links that have ended */
  _Atomic int n_expected; /* messages: until they have come, the thread of a lazy mesh reads, too */
  _Atomic uint32_t changes;
  _Atomic int waiters, has_leader; /* threads that sleep until a change; whether one is in epoll */
  pl_link **links;
  int64_t n_links;
  queue arrived, for_schedules; /* messages that have come */
  pl_schedules *schedules;
  block *free[CLASSES];
  int64_t free_bytes;
  int64_t lent; /* blocks that callers hold, and one for the open mesh */
};

/* ---- queues of messages */

static queue *find_queue(pl_mesh *mesh, int64_t channel) {
  return channel == PL_SCHEDULES ? &mesh->for_schedules : &mesh->arrived;
}

static void append(queue *messages, block *added) {
  *(messages->last ? &messages->last->next : &messages->first) = added;
  messages->last = added;
}

/* Take out the message behind `before`, or the first one if that is NULL. */
static block *take_out(queue *messages, block *before) {
  block *taken = before ? before->next : messages->first;
  *(before ? &before->next : &messages->first) = taken->next;
  if (!taken->next) messages->last = before;
  taken->next = NULL;
  return taken;
}

/* ---- memory */

/* The class of a size, and the room of its blocks: SMALLEST, or 5/4, 6/4, 7/4 or 8/4 of a power of
   two. So at most a quarter of a block is unused. */
static int find_class(int64_t nbytes, int64_t *room) {
  *room = SMALLEST;
  int size_class = 0;
  for (int64_t power = SMALLEST; *room < nbytes; size_class++) {
    if (size_class && size_class % 4 == 0) power *= 2;
    *room = power + power / 4 * (size_class % 4 + 1);
  }
  return size_class;
}

static block *take_block(pl_mesh *mesh, int64_t nbytes) {
  int64_t room;
  int size_class = find_class(nbytes, &room);
  pthread_mutex_lock(&mesh->lock);
  block *found = mesh->free[size_class];
  if (found) {
    mesh->free[size_class] = found->next;
    mesh->free_bytes -= found->room;
  }
  mesh->lent++;
  pthread_mutex_unlock(&mesh->lock);
  if (!found) {
    void *memory = NULL;
    if (posix_memalign(&memory, ALIGNMENT, (size_t)(BLOCK_HEAD + room))) memory = NULL;
    found = memory;
    if (!found) {
      pthread_mutex_lock(&mesh->lock);
      mesh->lent--;
      pthread_mutex_unlock(&mesh->lock);
      return NULL;
    }
    found->mesh = mesh;
    found->room = room;
    found->size_class = size_class;
  }
  found->next = NULL;
  found->nbytes = nbytes;
  found->landing = NULL;
  found->is_claimed = found->is_counted = 0;
  return found;
}

static void close_descriptors(pl_mesh *mesh) {
  pthread_mutex_lock(&mesh->lock);
  int *descriptors[] = {&mesh->readers, &mesh->bell, &mesh->kick, &mesh->writers};
  for (int i = 0; i < 4; i++) {
    if (*descriptors[i] >= 0) close(*descriptors[i]);
    *descriptors[i] = -1;
  }
  pthread_mutex_unlock(&mesh->lock);
}

static void free_mesh(pl_mesh *mesh) {
  close_descriptors(mesh);
  for (int i = 0; i < CLASSES; i++) {
    for (block *each = mesh->free[i], *next; each; each = next) {
      next = each->next;
      free(each);
    }
  }
  for (int64_t i = 0; i < mesh->n_links; i++) {
    pthread_mutex_destroy(&mesh->links[i]->lock);
    pthread_mutex_destroy(&mesh->links[i]->reading);
    free(mesh->links[i]);
  }
  free(mesh->links);
  pthread_mutex_destroy(&mesh->lock);
  pl_free_schedules(mesh->schedules);
  free(mesh);
}

static void release_block(block *used) {
  pl_mesh *mesh = used->mesh;
  pthread_mutex_lock(&mesh->lock);
  int keep = mesh->free_bytes + used->room <= KEPT && !atomic_load(&mesh->closing);
  if (keep) {
    used->next = mesh->free[used->size_class];
    mesh->free[used->size_class] = used;
    mesh->free_bytes += used->room;
  }
  int64_t lent = --mesh->lent;
  pthread_mutex_unlock(&mesh->lock);
  if (!keep) free(used);
  if (!lent) free_mesh(mesh);
}

/* ---- waking */

/* Wake the threads that wait for an eventfd, which another thread may be closing. */
static void ring(pl_mesh *mesh, const int *bell) {
  uint64_t one = 1;
  pthread_mutex_lock(&mesh->lock);
  while (*bell >= 0 && write(*bell, &one, sizeof one) < 0 && errno == EINTR) continue;
  pthread_mutex_unlock(&mesh->lock);
}

/* Tell all threads that wait for a change. The leader sees its own changes by itself. */
static void announce(pl_mesh *mesh) {
  atomic_fetch_add(&mesh->changes, 1);
  if (atomic_load(&mesh->waiters)) pl_futex_wake((void *)&mesh->changes);
  if (!is_leader && atomic_load(&mesh->has_leader)) ring(mesh, &mesh->bell);
}

/* The bytes that a message takes in the stream. */
static int64_t padded(int64_t nbytes) { return (nbytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

static void free_outgoing(outgoing *message) {
  free(message->copy);
  free(message);
}

/* A message is no longer expected, as it has come, or never will. Called with the link's lock. */
static void stop_counting(pl_mesh *mesh, block *part) {
  if (part && part->is_counted) atomic_fetch_sub(&mesh->n_expected, 1);
  if (part) part->is_counted = 0;
}

/* Forget the messages that are not sent or have not begun to come. Called with the link's lock. */
static void drop_messages(pl_mesh *mesh, pl_link *each) {
  for (outgoing *message = each->first, *next; message; message = next) {
    next = message->next;
    free_outgoing(message);
  }
  each->first = each->last = NULL;
  for (landing *place = each->expected, *next; place; place = next) {
    next = place->next;
    free(place);
    atomic_fetch_sub(&mesh->n_expected, 1);
  }
  each->expected = each->last_expected = NULL;
  stop_counting(mesh, each->part);
}

/* End a link. From then on nothing of a message that waits to be sent is read any more. */
static void end_link(pl_mesh *mesh, pl_link *each, int state) {
  pthread_mutex_lock(&each->lock);
  if (each->state == PL_LINK_OPEN) {
    each->state = state;
    atomic_fetch_add(&mesh->n_ended, 1);
  }
  drop_messages(mesh, each);
  pthread_mutex_unlock(&each->lock);
  epoll_ctl(mesh->readers, EPOLL_CTL_DEL, each->descriptor, NULL);
  epoll_ctl(mesh->writers, EPOLL_CTL_DEL, each->descriptor, NULL);
  pl_advance_schedules(mesh->schedules);
  announce(mesh);
}

/* ---- sending */

/* Let epoll tell when a link can be written to, if there is something to write. Called with its
   lock. */
static void arm(pl_mesh *mesh, pl_link *each) {
  each->wants_to_write = each->first != NULL;
  struct epoll_event event = {.events = EPOLLONESHOT | (each->wants_to_write ? EPOLLOUT : 0),
                              .data.u64 = (uint64_t)each->number};
  epoll_ctl(mesh->writers, EPOLL_CTL_MOD, each->descriptor, &event);
}

/* Write what the network takes, at most `most` bytes. Returns 0, or errno. Called with the lock. */
static int write_some(pl_link *each, int64_t most) {
  while (each->first && most > 0) {
    outgoing *message = each->first;
    struct iovec vectors[PIECES];
    int count = 0;
    int64_t total = 0;
    for (int64_t i = message->first; i < message->count && count < PIECES && total < most; i++) {
      vectors[count].iov_base = (void *)message->pieces[i].address;
      vectors[count++].iov_len = (size_t)message->pieces[i].nbytes;
      total += message->pieces[i].nbytes;
    }
    struct msghdr header = {.msg_iov = vectors, .msg_iovlen = (size_t)count};
    ssize_t sent = sendmsg(each->descriptor, &header, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno == EINTR) continue;
      return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : errno;
    }
    most -= sent;
    while (message->first < message->count && sent >= message->pieces[message->first].nbytes)
      sent -= message->pieces[message->first++].nbytes;
    if (message->first < message->count) {
      message->pieces[message->first].address += sent;
      message->pieces[message->first].nbytes -= sent;
    } else {
      each->first = message->next;
      if (!each->first) each->last = NULL;
      free_outgoing(message);
      each->sent++;
    }
  }
  return 0;
}

static pl_link *get_link(pl_mesh *mesh, int64_t number) {
  pthread_mutex_lock(&mesh->lock);
  pl_link *each = mesh->links[number];
  pthread_mutex_unlock(&mesh->lock);
  return each;
}

/* Copy what is left of a message. Returns whether there was memory for it. */
static int copy_rest(outgoing *message) {
  int64_t nbytes = 0;
  for (int64_t i = message->first; i < message->count; i++) nbytes += message->pieces[i].nbytes;
  char *at = message->copy = malloc((size_t)nbytes + 1);
  if (!at) return 0;
  for (int64_t i = message->first; i < message->count; i++) {
    memcpy(at, message->pieces[i].address, (size_t)message->pieces[i].nbytes);
    message->pieces[i].address = at;
    at += message->pieces[i].nbytes;
  }
  return 1;
}

/* Send a message with a channel and a key of the caller's choice. If nothing waits in front of it
   and it has at most `at_once` bytes, the caller writes what the network takes; the rest is left to
   the thread. With `copies` the rest is copied; else the pieces must stay as they are until it is
   sent.

   Returns PL_SENT; or the number of the message on its link, from 1 on, of which something is left
   to send; or PL_NOT_SENT if the link has ended, or there is no memory. */
int64_t pl_mesh_send(pl_mesh *mesh, int64_t number, int64_t channel, int64_t key,
                     const pl_piece *pieces, int64_t count, int64_t at_once, int copies) {
  pl_link *each = get_link(mesh, number);
  outgoing *message = malloc(sizeof *message + (size_t)(count + 2) * sizeof(pl_piece));
  if (!message) {
    end_link(mesh, each, ENOMEM);
    return PL_NOT_SENT;
  }
  int64_t nbytes = 0;
  for (int64_t i = 0; i < count; i++) nbytes += pieces[i].nbytes;
  message->head = (frame_head){MAGIC, WIRE_VERSION, nbytes, channel, key, {0}};
  message->next = NULL;
  message->copy = NULL;
  message->first = 0;
  message->count = count + 2;
  message->pieces[0] = (pl_piece){(const char *)&message->head, HEAD};
  memcpy(message->pieces + 1, pieces, (size_t)count * sizeof *pieces);
  message->pieces[count + 1] = (pl_piece){ZEROS, padded(nbytes) - nbytes};
  pthread_mutex_lock(&each->lock);
  if (each->state != PL_LINK_OPEN) {
    pthread_mutex_unlock(&each->lock);
    free(message);
    return PL_NOT_SENT;
  }
  int is_first = each->first == NULL;
  if (is_first) each->first = message;
  else each->last->next = message;
  each->last = message;
  int64_t result = ++each->posted;
  /* An error is left to the thread, which sees it, too. */
  if (is_first && nbytes <= at_once) write_some(each, padded(at_once) + HEAD);
  if (each->sent == result) {
    result = PL_SENT;
  } else if (copies && !copy_rest(message)) {
    result = PL_NOT_SENT; /* a part may be sent already, so the link can't go on */
  }
  if (each->first && !each->wants_to_write) arm(mesh, each);
  pthread_mutex_unlock(&each->lock);
  if (result == PL_NOT_SENT) end_link(mesh, each, ENOMEM);
  return result;
}

/* Count the messages of a link that have been handed to the network. */
int64_t pl_mesh_sent(pl_mesh *mesh, int64_t number) {
  pl_link *each = get_link(mesh, number);
  pthread_mutex_lock(&each->lock);
  int64_t sent = each->sent;
  pthread_mutex_unlock(&each->lock);
  return sent;
}

static void write_link(pl_mesh *mesh, pl_link *each) {
  pthread_mutex_lock(&each->lock);
  int64_t before = each->sent;
  int error = write_some(each, TURN);
  int has_sent = each->sent > before;
  pthread_mutex_unlock(&each->lock);
  if (has_sent) pl_advance_schedules(mesh->schedules);
  if (error) end_link(mesh, each, error);
  else if (has_sent) announce(mesh);
}

/* ---- receiving */

/* Store the message under way, which is complete. */
static void finish_message(pl_mesh *mesh, pl_link *each) {
  pthread_mutex_lock(&each->lock);
  stop_counting(mesh, each->part);
  pthread_mutex_lock(&mesh->lock);
  append(find_queue(mesh, each->part->channel), each->part);
  pthread_mutex_unlock(&mesh->lock);
  each->part = NULL;
  pthread_mutex_unlock(&each->lock);
}

/* Begin a message whose head has come, where it is expected, or in memory of its own. Returns 0, or
   the state of a link that can't go on. Bounds: the head is checked before memory is allocated. */
static int begin_message(pl_mesh *mesh, pl_link *each, const frame_head *head) {
  if (head->magic != MAGIC || head->version != WIRE_VERSION || head->nbytes < 0 ||
      head->nbytes > each->largest)
    return PL_LINK_MALFORMED;
  pthread_mutex_lock(&each->lock);
  landing *before = NULL, *place = each->expected;
  while (place && (place->channel != head->channel || place->key != head->key)) {
    before = place;
    place = place->next;
  }
  if (place) {
    *(before ? &before->next : &each->expected) = place->next;
    if (!place->next) each->last_expected = before;
  }
  /* A message of another size than the expected one goes to memory of its own. */
  int lands = place && place->nbytes == head->nbytes;
  block *part = take_block(mesh, lands ? 0 : head->nbytes);
  if (part) {
    part->nbytes = head->nbytes;
    part->link = each->number;
    part->channel = head->channel;
    part->key = head->key;
    part->landing = lands ? place->address : NULL;
    part->is_claimed = part->is_counted = place != NULL;
    each->part = part;
    each->received = 0;
  }
  pthread_mutex_unlock(&each->lock);
  free(place);
  return part ? 0 : ENOMEM;
}

/* Where the next byte of the message under way goes. */
static char *next_place(const pl_link *each) {
  char *begin = each->part->landing ? each->part->landing : (char *)each->part + BLOCK_HEAD;
  return begin + each->received;
}

/* Take messages out of the bytes that were read ahead. Returns as `begin_message`. */
static int parse_ahead(pl_mesh *mesh, pl_link *each, int *arrivals) {
  for (;;) {
    int64_t there = each->ahead_end - each->ahead_begin;
    if (!each->part) {
      if (there < HEAD) return 0;
      frame_head head;
      memcpy(&head, each->ahead + each->ahead_begin, HEAD);
      int state = begin_message(mesh, each, &head);
      if (state) return state;
      each->ahead_begin += HEAD;
      there -= HEAD;
    }
    int64_t rest = each->part->nbytes - each->received; /* below 0: zeros behind the message */
    int64_t part = least(there, padded(each->part->nbytes) - each->received);
    if (least(part, rest) > 0)
      memcpy(next_place(each), each->ahead + each->ahead_begin, (size_t)least(part, rest));
    each->received += part;
    each->ahead_begin += part;
    if (each->received < padded(each->part->nbytes)) return 0;
    finish_message(mesh, each);
    ++*arrivals;
  }
}

/* Let epoll tell of bytes only when many of a long message are there: fewer, longer reads. */
static void set_low_water(pl_link *each) {
  int64_t left = each->part ? each->part->nbytes - each->received : 0;
  int wanted = left >= 2 * LOOKAHEAD ? (int)(left < BATCH ? left : BATCH) : 1;
  if (wanted == each->low_water) return;
  if (setsockopt(each->descriptor, SOL_SOCKET, SO_RCVLOWAT, &wanted, sizeof wanted) == 0)
    each->low_water = wanted;
}

static void read_link(pl_mesh *mesh, pl_link *each) {
  int arrivals = 0, state = PL_LINK_OPEN;
  for (int64_t moved = 0; moved < TURN && state == PL_LINK_OPEN;) {
    int64_t left = each->part ? each->part->nbytes - each->received : 0;
    char *into;
    size_t room;
    if (left >= LOOKAHEAD) { /* a long message goes right to its place */
      into = next_place(each);
      room = (size_t)left;
    } else { /* what is left in `ahead` is less than a head */
      int64_t there = each->ahead_end - each->ahead_begin;
      memmove(each->ahead, each->ahead + each->ahead_begin, (size_t)there);
      each->ahead_begin = 0;
      each->ahead_end = there;
      into = each->ahead + there;
      room = (size_t)(LOOKAHEAD - there);
    }
    ssize_t count = recv(each->descriptor, into, room, MSG_DONTWAIT);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      if (errno != EAGAIN && errno != EWOULDBLOCK) state = errno;
      break;
    }
    if (count == 0) {
      /* The end between two messages is in good order; within one it isn't. */
      state = each->part || each->ahead_end > each->ahead_begin ? ECONNRESET : PL_LINK_ENDED;
      break;
    }
    moved += count;
    if (left >= LOOKAHEAD) {
      each->received += count;
      if (each->received == padded(each->part->nbytes)) {
        finish_message(mesh, each);
        arrivals++;
      }
    } else {
      each->ahead_end += count;
      state = parse_ahead(mesh, each, &arrivals);
    }
    if ((size_t)count < room) break; /* the socket is empty */
  }
  if (arrivals) {
    pl_advance_schedules(mesh->schedules);
    announce(mesh);
  }
  if (state != PL_LINK_OPEN) end_link(mesh, each, state);
  else set_low_water(each);
}

/* Whether a message is the next one of its channel and key that nobody has expected. Claims it. */
static int claim(block *message, int64_t link, int64_t channel, int64_t key) {
  if (!message || message->is_claimed || message->link != link || message->channel != channel ||
      message->key != key)
    return 0;
  return message->is_claimed = 1;
}

/* Expect a message of `nbytes` on a link, and give it a place. The place must stay as it is until
   the message has come, or the mesh is closed. Messages of one channel and key land in the order of
   these calls. Returns 1; or 0 if the message has begun to come, or the link has ended: then
   nothing is written to the place, and the message comes in memory of its own. */
int pl_mesh_expect(pl_mesh *mesh, int64_t number, int64_t channel, int64_t key, void *address,
                   int64_t nbytes) {
  pl_link *each = get_link(mesh, number);
  landing *place = malloc(sizeof *place);
  if (!place) return 0;
  *place = (landing){NULL, channel, key, nbytes, address};
  pthread_mutex_lock(&each->lock);
  pthread_mutex_lock(&mesh->lock);
  int has_begun = each->state != PL_LINK_OPEN;
  block *message = find_queue(mesh, channel)->first;
  for (; message && !has_begun; message = message->next)
    has_begun = claim(message, number, channel, key);
  pthread_mutex_unlock(&mesh->lock);
  has_begun = has_begun || claim(each->part, number, channel, key);
  if (!has_begun) {
    *(each->last_expected ? &each->last_expected->next : &each->expected) = place;
    each->last_expected = place;
  }
  int was_idle = !has_begun && atomic_fetch_add(&mesh->n_expected, 1) == 0;
  pthread_mutex_unlock(&each->lock);
  if (was_idle) pl_mesh_hand_over(mesh);
  if (has_begun) free(place);
  return !has_begun;
}

/* Give the memory of a message back. It may be called after the mesh was closed. */
void pl_mesh_give_back(void *message) { release_block((block *)((char *)message - BLOCK_HEAD)); }

/* ---- the threads that read and write */

static const uint64_t BELL = UINT64_MAX, KICK = UINT64_MAX - 1, READABLE = UINT64_MAX - 2;

static int is_open(pl_link *each) {
  pthread_mutex_lock(&each->lock);
  int state = each->state;
  pthread_mutex_unlock(&each->lock);
  return state == PL_LINK_OPEN;
}

static void serve_link(pl_mesh *mesh, pl_link *each, uint32_t events) {
  pthread_mutex_lock(&each->reading);
  /* The link may have ended before, and its descriptor be that of another file by now. */
  if (is_open(each) && events & (EPOLLIN | EPOLLHUP | EPOLLERR)) read_link(mesh, each);
  if (is_open(each) && events & EPOLLOUT) write_link(mesh, each);
  pthread_mutex_lock(&each->lock);
  if (each->state == PL_LINK_OPEN && events & EPOLLOUT) arm(mesh, each);
  pthread_mutex_unlock(&each->lock);
  pthread_mutex_unlock(&each->reading);
}

/* Serve what epoll tells of. Returns whether there are bytes for the thread to read. */
static int serve(pl_mesh *mesh, const struct epoll_event *events, int count) {
  int is_readable = 0;
  for (int i = 0; i < count; i++) {
    uint64_t number = events[i].data.u64, rings;
    if (number == BELL || number == KICK) {
      if (read(number == BELL ? mesh->bell : mesh->kick, &rings, sizeof rings) < 0) continue;
    } else if (number == READABLE) {
      is_readable = 1;
    } else {
      serve_link(mesh, get_link(mesh, (int64_t)number), events[i].events);
    }
  }
  return is_readable;
}

/* Wait for events of the sockets, at most `milliseconds`. A thread that sleeps takes tens of
   microseconds to wake up, and finds cold caches. So the leader polls first, if its last wait was
   short. It stops if the core is needed by others, which may be those that it waits for. Returns as
   epoll_wait. */
static int wait_for_events(pl_mesh *mesh, struct epoll_event *events, int room, int milliseconds) {
  int64_t begun = pl_now(), now = begun;
  int count = 0;
  while (mesh->was_short && !count && now - begun < SPIN) {
    int64_t before = now;
    count = epoll_wait(mesh->readers, events, room, 0);
    if (!count) sched_yield();
    now = pl_now();
    if (now - before > CROWDED) break;
  }
  if (!count) count = epoll_wait(mesh->readers, events, room, milliseconds);
  mesh->was_short = count > 0 && pl_now() - begun < SPIN;
  return count;
}

/* Whether the thread reads when no caller does. */
static int needs_thread(pl_mesh *mesh) {
  return mesh->eager || atomic_load(&mesh->n_expected) > 0;
}

/* Let epoll tell the thread once that there are bytes in some socket, or not tell it any more. */
static void listen_to_readers(pl_mesh *mesh, int wanted) {
  struct epoll_event event = {.events = wanted ? EPOLLIN | EPOLLONESHOT : EPOLLONESHOT,
                              .data.u64 = READABLE};
  pthread_mutex_lock(&mesh->lock);
  if (mesh->is_listening != wanted && mesh->writers >= 0)
    epoll_ctl(mesh->writers, EPOLL_CTL_MOD, mesh->readers, &event);
  mesh->is_listening = wanted;
  pthread_mutex_unlock(&mesh->lock);
}

/* Read the sockets for at most `milliseconds`, unless another thread does. Returns whether this one
   did. Changes before this thread became the leader rang no bell for it: it stops if there are.
   A caller has to call `pl_mesh_hand_over` when it doesn't read any more. */
static int lead(pl_mesh *mesh, uint32_t seen, int milliseconds) {
  int nobody = 0;
  if (!atomic_compare_exchange_strong(&mesh->has_leader, &nobody, 1)) return 0;
  is_leader = 1;
  if (atomic_load(&mesh->changes) == seen && !atomic_load(&mesh->closing)) {
    struct epoll_event events[16];
    if (milliseconds) listen_to_readers(mesh, 0);
    int count = milliseconds ? wait_for_events(mesh, events, 16, milliseconds)
                             : epoll_wait(mesh->readers, events, 16, 0);
    serve(mesh, events, count);
  }
  is_leader = 0;
  atomic_store(&mesh->has_leader, 0);
  /* A caller that sleeps as there was a leader takes its place. */
  if (atomic_load(&mesh->waiters)) {
    atomic_fetch_add(&mesh->changes, 1);
    pl_futex_wake((void *)&mesh->changes);
  }
  return 1;
}

/* Let the thread read from now on, if it is needed, and no caller reads. Order (seq_cst): a leader
   leaves (store `has_leader`) before it looks whether the thread is needed (load `n_expected`). A
   caller that needs the thread raises `n_expected` before it looks for a leader. So at least one of
   the two sees what the other has stored, and hands over. */
void pl_mesh_hand_over(pl_mesh *mesh) {
  if (needs_thread(mesh) && !atomic_load(&mesh->has_leader)) listen_to_readers(mesh, 1);
}

/* The thread of the mesh. It writes what callers could not write at once. If it is needed, it also
   reads while no caller does, so messages come while callers compute. If a caller has become the
   leader meanwhile, that one hands over to it. */
static void *run(void *argument) {
  pl_mesh *mesh = argument;
  struct epoll_event events[16];
  while (!atomic_load(&mesh->closing)) {
    pl_mesh_hand_over(mesh);
    if (!serve(mesh, events, epoll_wait(mesh->writers, events, 16, -1))) continue;
    pthread_mutex_lock(&mesh->lock);
    mesh->is_listening = 0; /* epoll has told it once */
    pthread_mutex_unlock(&mesh->lock);
    if (needs_thread(mesh)) lead(mesh, atomic_load(&mesh->changes), 0);
  }
  return NULL;
}

static block *take_oldest(pl_mesh *mesh, queue *messages) {
  pthread_mutex_lock(&mesh->lock);
  block *oldest = messages->first ? take_out(messages, NULL) : NULL;
  pthread_mutex_unlock(&mesh->lock);
  return oldest;
}

static void describe_arrival(block *message, pl_arrival *arrival) {
  *arrival = (pl_arrival){(char *)message + BLOCK_HEAD, message->nbytes, message->link,
                          message->channel, message->key, message->landing != NULL};
}

/* Take the oldest message for schedules of this link and key. Returns whether there was one. */
int pl_mesh_take_for_schedule(pl_mesh *mesh, int64_t link, int64_t key, pl_arrival *arrival) {
  pthread_mutex_lock(&mesh->lock);
  block *before = NULL, *message = mesh->for_schedules.first;
  while (message && (message->link != link || message->key != key)) {
    before = message;
    message = message->next;
  }
  if (message) describe_arrival(take_out(&mesh->for_schedules, before), arrival);
  pthread_mutex_unlock(&mesh->lock);
  return message != NULL;
}

/* Count schedules that need messages although no caller waits: until they have ended, the thread of
   a lazy mesh reads, too. */
void pl_mesh_count_reading(pl_mesh *mesh, int change) {
  if (atomic_fetch_add(&mesh->n_expected, change) == 0) pl_mesh_hand_over(mesh);
}

pl_schedules *pl_mesh_schedules(pl_mesh *mesh) { return mesh->schedules; }

/* Read what lies in the sockets, unless another caller does. */
void pl_mesh_look(pl_mesh *mesh) {
  if (!mesh->eager && lead(mesh, atomic_load(&mesh->changes), 0)) pl_mesh_hand_over(mesh);
}

/* Take the oldest message that has come over any link. Returns whether there was one. */
int pl_mesh_take(pl_mesh *mesh, pl_arrival *arrival) {
  block *oldest = take_oldest(mesh, &mesh->arrived);
  if (!oldest) {
    pl_mesh_look(mesh);
    oldest = take_oldest(mesh, &mesh->arrived);
  }
  if (!oldest) return 0;
  describe_arrival(oldest, arrival);
  return 1;
}

/* ---- waiting for a change */

/* Read the number of changes so far: messages that came or were sent, and links that ended. */
uint32_t pl_mesh_changes(pl_mesh *mesh) { return atomic_load(&mesh->changes); }

/* Make waits for a change return. */
void pl_mesh_wake(pl_mesh *mesh) { announce(mesh); }

/* As `pl_mesh_wait_change`, for a caller that waits again, or calls `pl_mesh_hand_over`. */
int pl_mesh_wait_on(pl_mesh *mesh, uint32_t seen, int64_t nanoseconds) {
  int64_t begun = pl_now();
  for (;;) {
    if (atomic_load(&mesh->changes) != seen) return PL_REACHED;
    int64_t left = begun + nanoseconds - pl_now();
    if (left <= 0 || atomic_load(&mesh->closing)) return PL_TIMEOUT;
    if (lead(mesh, seen, (int)(left / 1000000) + 1)) continue;
    atomic_fetch_add(&mesh->waiters, 1);
    if (atomic_load(&mesh->changes) == seen && atomic_load(&mesh->has_leader))
      pl_futex_wait((void *)&mesh->changes, seen, left);
    atomic_fetch_sub(&mesh->waiters, 1);
  }
}

/* Wait until the number of changes is another one than `seen`. One caller at a time serves links
   while it waits; the others sleep. */
int pl_mesh_wait_change(pl_mesh *mesh, uint32_t seen, int64_t nanoseconds) {
  int result = pl_mesh_wait_on(mesh, seen, nanoseconds);
  pl_mesh_hand_over(mesh);
  return result;
}

/* ---- opening and closing */

static int add_descriptor(int epoll, int descriptor, uint32_t events, uint64_t number) {
  struct epoll_event event = {.events = events, .data.u64 = number};
  return epoll_ctl(epoll, EPOLL_CTL_ADD, descriptor, &event);
}

/* Make a mesh without links, and its thread. NULL if the system has no room.

   eager: Whether messages are read although no caller waits for one. */
pl_mesh *pl_mesh_open(int eager) {
  pl_mesh *mesh = calloc(1, sizeof *mesh);
  if (!mesh) return NULL;
  mesh->lent = 1;
  mesh->eager = eager;
  mesh->schedules = pl_open_schedules(mesh);
  pthread_mutex_init(&mesh->lock, NULL);
  mesh->readers = epoll_create1(EPOLL_CLOEXEC);
  mesh->writers = epoll_create1(EPOLL_CLOEXEC);
  mesh->bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  mesh->kick = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  /* Signals are for the threads of Python. */
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &before);
  int failed = !mesh->schedules || mesh->readers < 0 || mesh->writers < 0 || mesh->bell < 0 || mesh->kick < 0 ||
               add_descriptor(mesh->readers, mesh->bell, EPOLLIN, BELL) ||
               add_descriptor(mesh->writers, mesh->kick, EPOLLIN, KICK) ||
               add_descriptor(mesh->writers, mesh->readers, EPOLLONESHOT, READABLE) ||
               pthread_create(&mesh->thread, NULL, run, mesh);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (!failed) return mesh;
  free_mesh(mesh);
  return NULL;
}

/* Add a link over a connected socket, which belongs to the mesh from then on. Messages of more
   than `largest` bytes end it. Returns its number, or -1 if there is no room. */
int64_t pl_mesh_add(pl_mesh *mesh, int descriptor, int64_t largest) {
  pl_link *each = calloc(1, sizeof *each);
  if (!each) return -1;
  pthread_mutex_init(&each->lock, NULL);
  pthread_mutex_init(&each->reading, NULL);
  each->descriptor = descriptor;
  each->low_water = 1;
  each->largest = largest;
  pthread_mutex_lock(&mesh->lock);
  int64_t number = mesh->n_links;
  /* While the mesh is closing, the list of links is read without the lock. */
  int failed = atomic_load(&mesh->closing);
  pl_link **links =
      failed ? NULL : realloc(mesh->links, (size_t)(number + 1) * sizeof *links);
  each->number = number;
  if (links) {
    mesh->links = links;
    mesh->links[number] = each;
  }
  uint64_t tag = (uint64_t)number;
  failed = failed || !links || add_descriptor(mesh->writers, descriptor, EPOLLONESHOT, tag) ||
           add_descriptor(mesh->readers, descriptor, EPOLLIN, tag);
  if (!failed) mesh->n_links++;
  else epoll_ctl(mesh->writers, EPOLL_CTL_DEL, descriptor, NULL);
  pthread_mutex_unlock(&mesh->lock);
  if (!failed) return number;
  pthread_mutex_destroy(&each->lock);
  pthread_mutex_destroy(&each->reading);
  free(each);
  return -1;
}

/* Read the state of a link: open, ended in good order, malformed, or errno. */
int pl_mesh_state(pl_mesh *mesh, int64_t number) {
  pl_link *each = get_link(mesh, number);
  pthread_mutex_lock(&each->lock);
  int state = each->state;
  pthread_mutex_unlock(&each->lock);
  return state;
}

/* Tell the other side that this is the end, even if a fork still holds the socket. Some unread
   bytes are read first: the kernel resets a connection that is closed with any, and messages to the
   other side could be lost. A sender of many is told by such a reset. */
static void hang_up(int descriptor) {
  char nothing[4096];
  shutdown(descriptor, SHUT_WR);
  for (int i = 0; i < 32 && recv(descriptor, nothing, sizeof nothing, MSG_DONTWAIT) > 0;) i++;
  shutdown(descriptor, SHUT_RDWR);
}

/* Count the links that have ended. */
int pl_mesh_ended(const pl_mesh *mesh) { return atomic_load(&mesh->n_ended); }

/* End the thread, and close all sockets. Waits return, and links have ended from then on. Messages
   that were taken stay valid. The memory of the mesh stays until `pl_mesh_free`. */
void pl_mesh_close(pl_mesh *mesh) {
  pthread_mutex_lock(&mesh->lock);
  int has_closed = atomic_exchange(&mesh->closing, 1);
  int64_t n_links = mesh->n_links; /* none is added any more */
  pthread_mutex_unlock(&mesh->lock);
  if (has_closed) return;
  ring(mesh, &mesh->kick);
  pthread_join(mesh->thread, NULL);
  for (int64_t i = 0; i < n_links; i++) {
    pl_link *each = mesh->links[i];
    pthread_mutex_lock(&each->reading); /* the leader may be reading */
    int was_open = is_open(each);
    end_link(mesh, each, PL_LINK_ENDED);
    if (was_open) hang_up(each->descriptor);
    close(each->descriptor);
    if (each->part) release_block(each->part);
    each->part = NULL;
    pthread_mutex_unlock(&each->reading);
  }
  announce(mesh);
  /* The leader leaves, as it hears the bell; later ones see that the mesh is closing. */
  while (atomic_load(&mesh->has_leader)) sched_yield();
  close_descriptors(mesh);
  pl_arrival message;
  while (pl_mesh_take(mesh, &message)) pl_mesh_give_back(message.address);
  for (block *rest; (rest = take_oldest(mesh, &mesh->for_schedules));) release_block(rest);
}

/* Close the mesh, and free its memory once all messages have been given back. No other call may use
   it meanwhile, or afterwards. */
void pl_mesh_free(pl_mesh *mesh) {
  pl_mesh_close(mesh);
  pthread_mutex_lock(&mesh->lock);
  int64_t lent = --mesh->lent;
  pthread_mutex_unlock(&mesh->lock);
  if (!lent) free_mesh(mesh);
}
