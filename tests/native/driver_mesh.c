/* Random messages between two meshes, in one process; and links that end in every way. */

#include "driver.h"

#include <errno.h>
#include <stdatomic.h>
#include <sys/socket.h>

#include "mesh.h"

enum { LINKS = 3, MESSAGES = 150, MOST_PIECES = 100, LARGEST = 1 << 20 };

static int eager; /* whether meshes are */
static pl_mesh *left, *right; /* links go from left to right */

static void connect_links(int64_t n_links) {
  left = pl_mesh_open(eager);
  right = pl_mesh_open(eager);
  CHECK(left && right);
  for (int64_t i = 0; i < n_links; i++) {
    int pair[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    CHECK(pl_mesh_add(left, pair[0], 0) == i);
    CHECK(pl_mesh_add(right, pair[1], LARGEST) == i);
  }
}

/* Bytes of message k of a link: mostly few, at times none, at times many. */
static int64_t message_bytes(int64_t link, int64_t k) {
  uint64_t number = mix(50, (uint64_t)link, (uint64_t)k);
  int64_t most = number % 16 == 0 ? LARGEST : number % 4 == 0 ? 50000 : 300;
  return (int64_t)(number / 16 % (uint64_t)most);
}

static char message_byte(int64_t link, int64_t k, int64_t i) { return (char)(link + 3 * k + i); }

static void check_message(int64_t link, int64_t k, const char *message, int64_t nbytes) {
  CHECK(nbytes == message_bytes(link, k));
  for (int64_t i = 0; i < nbytes; i++) CHECK(message[i] == message_byte(link, k, i));
}

static void wait_until_sent(pl_mesh *mesh, int64_t link, int64_t number) {
  for (;;) {
    uint32_t seen = pl_mesh_changes(mesh);
    if (pl_mesh_sent(mesh, link) >= number) return;
    CHECK(pl_mesh_wait_change(mesh, seen, FOREVER) == PL_REACHED);
  }
}

/* Send all messages of one link, each in some pieces of its own memory. */
static void *send_messages(void *link_) {
  int64_t link = (int64_t)(intptr_t)link_;
  for (int64_t k = 0; k < MESSAGES; k++) {
    int64_t nbytes = message_bytes(link, k), n_pieces = 0, at = 0;
    char *message = allocate(nbytes);
    for (int64_t i = 0; i < nbytes; i++) message[i] = message_byte(link, k, i);
    pl_piece pieces[MOST_PIECES + 1];
    int64_t wanted = (int64_t)(mix(51, (uint64_t)link, (uint64_t)k) % MOST_PIECES);
    for (; n_pieces < wanted; n_pieces++) {
      pieces[n_pieces] = (pl_piece){message + at, (nbytes - at) / (wanted - n_pieces) / 2};
      at += pieces[n_pieces].nbytes;
    }
    pieces[n_pieces++] = (pl_piece){message + at, nbytes - at};
    int64_t at_once = k % 3 ? 4096 : 0;
    int copies = k % 2;
    int64_t number = pl_mesh_send(left, link, 0, 0, pieces, n_pieces, at_once, copies);
    CHECK(number == PL_SENT || number == k + 1);
    if (!copies) wait_until_sent(left, link, k + 1);
    free(message); /* from now on it may change */
  }
  return NULL;
}

/* Take all messages of all links, with other threads that do the same. */
static pthread_mutex_t taking = PTHREAD_MUTEX_INITIALIZER;
static int64_t n_taken, next_message[LINKS];

static void *take_messages(void *nothing) {
  char *held = NULL; /* a message is kept while the next one comes */
  for (;;) {
    uint32_t seen = pl_mesh_changes(right);
    pl_arrival arrival;
    pthread_mutex_lock(&taking);
    int has_come = pl_mesh_take(right, &arrival);
    if (has_come) {
      check_message(arrival.link, next_message[arrival.link]++, arrival.address, arrival.nbytes);
      n_taken++;
    }
    int has_ended = n_taken == LINKS * MESSAGES;
    pthread_mutex_unlock(&taking);
    if (has_come) {
      if (held) pl_mesh_give_back(held);
      held = arrival.address;
    }
    if (has_ended) break;
    if (!has_come) CHECK(pl_mesh_wait_change(right, seen, FOREVER) == PL_REACHED);
  }
  pl_mesh_wake(right); /* the others look whether that was all */
  if (held) pl_mesh_give_back(held);
  return nothing;
}

static void exchange_messages(void) {
  connect_links(LINKS);
  pthread_t threads[2 * LINKS];
  for (int64_t i = 0; i < LINKS; i++) {
    void *link = (void *)(intptr_t)i;
    CHECK(pthread_create(&threads[2 * i], NULL, send_messages, link) == 0);
    CHECK(pthread_create(&threads[2 * i + 1], NULL, take_messages, NULL) == 0);
  }
  for (int64_t i = 0; i < 2 * LINKS; i++) pthread_join(threads[i], NULL);
  pl_mesh_free(left);
  pl_mesh_free(right);
}

/* Messages land where they are expected, in the order of their keys, before or after they are sent. */
static void expect_messages(void) {
  enum { KEYS = 3, SENT_EACH = 40, BYTES = 70000 };
  connect_links(1);
  char *message = allocate(BYTES), *places[KEYS * SENT_EACH];
  for (int64_t turn = 0; turn < SENT_EACH; turn++) {
    for (int64_t key = 0; key < KEYS; key++) {
      int64_t k = turn * KEYS + key;
      int is_early = mix(52, (uint64_t)k, 0) % 2;
      places[k] = allocate(BYTES);
      if (is_early) CHECK(pl_mesh_expect(right, 0, 7, key, places[k], BYTES) == 1);
      memset(message, (int)k, BYTES);
      pl_piece piece = {message, BYTES};
      pl_mesh_send(left, 0, 7, key, &piece, 1, k % 2 ? BYTES : 0, 1);
      if (!is_early) pl_mesh_expect(right, 0, 7, key, places[k], BYTES);
    }
    for (int64_t n = 0; n < KEYS;) {
      uint32_t seen = pl_mesh_changes(right);
      pl_arrival arrival;
      if (!pl_mesh_take(right, &arrival)) {
        CHECK(pl_mesh_wait_change(right, seen, FOREVER) == PL_REACHED);
        continue;
      }
      CHECK(arrival.channel == 7 && arrival.nbytes == BYTES);
      char *place = places[turn * KEYS + arrival.key];
      if (!arrival.has_landed) memcpy(place, arrival.address, BYTES);
      for (int64_t i = 0; i < BYTES; i++) CHECK(place[i] == (char)(turn * KEYS + arrival.key));
      pl_mesh_give_back(arrival.address);
      n++;
    }
  }
  for (int64_t k = 0; k < KEYS * SENT_EACH; k++) free(places[k]);
  free(message);
  pl_mesh_free(left);
  pl_mesh_free(right);
}

/* Wait in short turns, and look, until told to stop. */
static _Atomic int is_reading, n_received;

static void *read_for_a_while(void *seed) {
  for (uint64_t i = 0; atomic_load(&is_reading); i++) {
    uint64_t number = mix(53, (uint64_t)(uintptr_t)seed, i);
    uint32_t seen = pl_mesh_changes(right);
    pl_arrival arrival;
    if (number % 3) {
      pl_mesh_wait_change(right, seen, (int64_t)(number % 200000));
    } else if (pl_mesh_take(right, &arrival)) {
      pl_mesh_give_back(arrival.address);
      atomic_fetch_add(&n_received, 1);
    }
  }
  return NULL;
}

/* Callers read for a while, and stop at any moment. Then the thread has to read: else a sender is
   held up for ever, as its message is larger than the buffers of the sockets. */
static void stop_reading(void) {
  enum { TURNS = 300, READERS = 2 };
  connect_links(1);
  atomic_store(&n_received, 0);
  char *message = allocate(LARGEST), *place = allocate(LARGEST);
  memset(message, 1, LARGEST);
  pl_piece piece = {message, LARGEST};
  for (int64_t turn = 0; turn < TURNS; turn++) {
    pthread_t readers[READERS];
    uint64_t number = mix(54, (uint64_t)turn, 0);
    if (number % 2) pl_mesh_expect(right, 0, 7, 0, place, LARGEST);
    atomic_store(&is_reading, 1);
    for (int64_t i = 0; i < READERS; i++) {
      void *seed = (void *)(uintptr_t)(READERS * turn + i);
      CHECK(pthread_create(&readers[i], NULL, read_for_a_while, seed) == 0);
    }
    sleep_ns((int64_t)(number / 2 % 300000));
    if (number % 2 == 0) pl_mesh_expect(right, 0, 7, 0, place, LARGEST);
    if (number % 3) pl_mesh_send(left, 0, 7, 0, &piece, 1, number % 5 ? LARGEST : 0, 0);
    atomic_store(&is_reading, 0);
    if (number % 3 == 0) pl_mesh_send(left, 0, 7, 0, &piece, 1, LARGEST, 0);
    for (int64_t i = 0; i < READERS; i++) pthread_join(readers[i], NULL);
    wait_until_sent(left, 0, turn + 1);
    while (atomic_load(&n_received) <= turn) {
      pl_arrival arrival;
      if (!pl_mesh_take(right, &arrival)) {
        sleep_ns(MILLISECOND / 10);
        continue;
      }
      CHECK(arrival.nbytes == LARGEST);
      pl_mesh_give_back(arrival.address);
      atomic_fetch_add(&n_received, 1);
    }
  }
  free(message);
  free(place);
  pl_mesh_free(left);
  pl_mesh_free(right);
}

static void wait_for_end(pl_mesh *mesh, int64_t link) {
  for (;;) {
    uint32_t seen = pl_mesh_changes(mesh);
    if (pl_mesh_state(mesh, link) != PL_LINK_OPEN) return;
    CHECK(pl_mesh_wait_change(mesh, seen, FOREVER) == PL_REACHED);
  }
}

/* What was sent before the end arrives. A message outlives its mesh. */
static void end_in_good_order(void) {
  connect_links(1);
  pl_piece piece = {"last words", 10};
  CHECK(pl_mesh_send(left, 0, 0, 0, &piece, 1, 4096, 0) == PL_SENT);
  pl_mesh_free(left);
  wait_for_end(right, 0);
  CHECK(pl_mesh_state(right, 0) == PL_LINK_ENDED);
  CHECK(pl_mesh_send(right, 0, 0, 0, &piece, 1, 4096, 0) == PL_NOT_SENT);
  pl_arrival arrival, other;
  CHECK(pl_mesh_take(right, &arrival));
  CHECK(!pl_mesh_take(right, &other));
  pl_mesh_free(right);
  CHECK(arrival.nbytes == 10 && memcmp(arrival.address, "last words", 10) == 0);
  pl_mesh_give_back(arrival.address); /* frees the mesh, too */
}

/* A message that is not read is given up when the mesh closes; threads that wait return. */
static void *wait_for_close(void *changes) {
  uint32_t seen = *(uint32_t *)changes;
  while (pl_mesh_state(left, 0) == PL_LINK_OPEN) {
    pl_mesh_wait_change(left, seen, FOREVER);
    seen = pl_mesh_changes(left);
  }
  return NULL;
}

static void close_while_sending(void) {
  int pair[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
  left = pl_mesh_open(eager);
  CHECK(pl_mesh_add(left, pair[0], LARGEST) == 0);
  char *message = allocate(8 * LARGEST);
  memset(message, 1, 8 * LARGEST);
  pl_piece piece = {message, 8 * LARGEST};
  CHECK(pl_mesh_send(left, 0, 0, 0, &piece, 1, 0, 0) == 1);
  uint32_t seen = pl_mesh_changes(left);
  CHECK(pl_mesh_wait_change(left, seen, 10 * MILLISECOND) == PL_TIMEOUT);
  pthread_t threads[3];
  for (int i = 0; i < 3; i++)
    CHECK(pthread_create(&threads[i], NULL, wait_for_close, &seen) == 0);
  pl_mesh_close(left);
  for (int i = 0; i < 3; i++) pthread_join(threads[i], NULL);
  CHECK(pl_mesh_sent(left, 0) == 0);
  free(message);
  CHECK(pl_mesh_send(left, 0, 0, 0, &piece, 1, 0, 0) == PL_NOT_SENT);
  pl_mesh_free(left);
  close(pair[1]);
}

/* Bytes that are no frame, a frame that is too long, or one that ends too early end their link. */
static void read_wrong_bytes(const void *bytes, size_t nbytes, int state) {
  int pair[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
  right = pl_mesh_open(eager);
  CHECK(pl_mesh_add(right, pair[1], LARGEST) == 0);
  CHECK(write(pair[0], bytes, nbytes) == (ssize_t)nbytes);
  close(pair[0]);
  wait_for_end(right, 0);
  CHECK(pl_mesh_state(right, 0) == state);
  CHECK(!pl_mesh_take(right, &(pl_arrival){0}));
  pl_mesh_free(right);
}

static void read_wrong_frames(void) {
  struct {
    uint32_t magic, version;
    int64_t nbytes, channel, key;
    char zeros[32], message[4];
  } frame = {0x50434c31, 1, 5, 0, 0, {0}, {'f', 'o', 'u', 'r'}};
  read_wrong_bytes(&frame, sizeof frame, ECONNRESET);
  read_wrong_bytes(&frame, 7, ECONNRESET);
  frame.nbytes = LARGEST + 1;
  read_wrong_bytes(&frame, sizeof frame, PL_LINK_MALFORMED);
  frame.nbytes = -1;
  read_wrong_bytes(&frame, sizeof frame, PL_LINK_MALFORMED);
  frame.nbytes = 5;
  frame.version = 2;
  read_wrong_bytes(&frame, sizeof frame, PL_LINK_MALFORMED);
  frame.magic = 0x20544547;
  read_wrong_bytes(&frame, sizeof frame, PL_LINK_MALFORMED);
}

int main(void) {
  for (eager = 0; eager < 2; eager++) {
    n_taken = 0;
    memset(next_message, 0, sizeof next_message);
    exchange_messages();
    expect_messages();
    stop_reading();
    end_in_good_order();
    close_while_sending();
    read_wrong_frames();
  }
  return 0;
}
