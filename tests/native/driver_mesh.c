/* Random messages between two meshes, in one process; and links that end in every way. */

#include "driver.h"

#include <errno.h>
#include <sys/socket.h>

#include "mesh.h"

enum { LINKS = 3, MESSAGES = 150, MOST_PIECES = 100, LARGEST = 1 << 20 };

static pl_mesh *left, *right; /* links go from left to right */

static void connect_links(int64_t n_links) {
  left = pl_mesh_open();
  right = pl_mesh_open();
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
    int64_t number = pl_mesh_send(left, link, pieces, n_pieces, at_once);
    CHECK(number == k + 1);
    CHECK(pl_mesh_wait_sent(left, link, number, FOREVER) == PL_REACHED);
    CHECK(pl_mesh_sent(left, link) == number);
    free(message); /* from now on it may change */
  }
  return NULL;
}

/* Take the next message of a link, and wait for it. */
static char *take_message(pl_mesh *mesh, int64_t link, int64_t *nbytes) {
  for (;;) {
    uint32_t seen = pl_mesh_changes(mesh);
    char *message = pl_mesh_take(mesh, link, nbytes);
    if (message) return message;
    CHECK(pl_mesh_wait_change(mesh, seen, FOREVER) == PL_REACHED);
  }
}

static void *take_messages(void *link_) {
  int64_t link = (int64_t)(intptr_t)link_, nbytes;
  char *held = NULL; /* at times a message is kept while the next ones come */
  for (int64_t k = 0; k < MESSAGES; k++) {
    char *message = take_message(right, link, &nbytes);
    check_message(link, k, message, nbytes);
    if (held) pl_mesh_give_back(held);
    held = message;
  }
  pl_mesh_give_back(held);
  return NULL;
}

static void exchange_messages(void) {
  connect_links(LINKS);
  pthread_t threads[2 * LINKS];
  for (int64_t i = 0; i < LINKS; i++) {
    void *link = (void *)(intptr_t)i;
    CHECK(pthread_create(&threads[2 * i], NULL, send_messages, link) == 0);
    CHECK(pthread_create(&threads[2 * i + 1], NULL, take_messages, link) == 0);
  }
  for (int64_t i = 0; i < 2 * LINKS; i++) pthread_join(threads[i], NULL);
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
  int64_t nbytes;
  connect_links(1);
  pl_piece piece = {"last words", 10};
  CHECK(pl_mesh_send(left, 0, &piece, 1, 4096) == 1);
  pl_mesh_free(left);
  wait_for_end(right, 0);
  CHECK(pl_mesh_state(right, 0) == PL_LINK_ENDED);
  CHECK(pl_mesh_send(right, 0, &piece, 1, 4096) == -1);
  char *message = take_message(right, 0, &nbytes);
  CHECK(pl_mesh_take(right, 0, &nbytes) == NULL);
  pl_mesh_free(right);
  CHECK(memcmp(message, "last words", 10) == 0);
  pl_mesh_give_back(message); /* frees the mesh, too */
}

/* Messages that nobody reads are given up when the mesh closes, with those who wait for them. */
static void *wait_until_sent(void *result) {
  *(int *)result = pl_mesh_wait_sent(left, 0, 1, FOREVER);
  return NULL;
}

static void close_while_sending(void) {
  int pair[2], result = -1;
  CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
  left = pl_mesh_open();
  CHECK(pl_mesh_add(left, pair[0], LARGEST) == 0);
  char *message = allocate(8 * LARGEST);
  memset(message, 1, 8 * LARGEST);
  pl_piece piece = {message, 8 * LARGEST};
  CHECK(pl_mesh_send(left, 0, &piece, 1, 0) == 1);
  CHECK(pl_mesh_wait_sent(left, 0, 1, 10 * MILLISECOND) == PL_TIMEOUT);
  pthread_t thread;
  CHECK(pthread_create(&thread, NULL, wait_until_sent, &result) == 0);
  pl_mesh_close(left);
  pthread_join(thread, NULL);
  CHECK(result == PL_INTERRUPTED);
  free(message);
  pl_mesh_free(left);
  close(pair[1]);
}

/* Bytes that are no frame, a frame that is too long, or one that ends too early end their link. */
static void read_wrong_bytes(const void *bytes, size_t nbytes, int state) {
  int pair[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
  right = pl_mesh_open();
  CHECK(pl_mesh_add(right, pair[1], LARGEST) == 0);
  CHECK(write(pair[0], bytes, nbytes) == (ssize_t)nbytes);
  close(pair[0]);
  wait_for_end(right, 0);
  CHECK(pl_mesh_state(right, 0) == state);
  CHECK(pl_mesh_take(right, 0, &(int64_t){0}) == NULL);
  pl_mesh_free(right);
}

static void read_wrong_frames(void) {
  struct __attribute__((packed)) {
    uint32_t magic;
    int64_t nbytes;
    char message[4];
  } frame = {0x50434c31, 5, {'f', 'o', 'u', 'r'}};
  read_wrong_bytes("GET / HTTP/1.1\r\n\r\n", 18, PL_LINK_MALFORMED);
  read_wrong_bytes(&frame, sizeof frame, ECONNRESET);
  read_wrong_bytes(&frame, 7, ECONNRESET);
  frame.nbytes = LARGEST + 1;
  read_wrong_bytes(&frame, sizeof frame, PL_LINK_MALFORMED);
  frame.nbytes = -1;
  read_wrong_bytes(&frame, sizeof frame, PL_LINK_MALFORMED);
}

int main(void) {
  exchange_messages();
  end_in_good_order();
  close_while_sending();
  read_wrong_frames();
  return 0;
}
