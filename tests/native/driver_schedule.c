/* All-reduces by schedules between ranks that are threads, each with a mesh; and how they fail. */

#include "driver.h"

#include <sys/socket.h>

#include "reduce.h"
#include "schedule.h"

enum { TURNS = 12, UNDER_WAY = 4, MOST_STEPS = 64, LARGEST = 4 << 20 };
enum { OWNERS, RING, DIRECT, KINDS };

static int eager; /* whether meshes are */
static int64_t size;
static pl_mesh *meshes[MOST_RANKS];

static int64_t link_to(int64_t rank, int64_t peer) { return peer < rank ? peer : peer - 1; }

static void connect_ranks(void) {
  for (int64_t rank = 0; rank < size; rank++) CHECK(meshes[rank] = pl_mesh_open(eager));
  /* Each mesh gets its links in the order of its peers. */
  for (int64_t high = 1; high < size; high++) {
    for (int64_t low = 0; low < high; low++) {
      int pair[2];
      CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
      CHECK(pl_mesh_add(meshes[low], pair[0], LARGEST) == high - 1);
      CHECK(pl_mesh_add(meshes[high], pair[1], LARGEST) == low);
    }
  }
}

static void free_meshes(void) {
  for (int64_t rank = 0; rank < size; rank++) pl_mesh_free(meshes[rank]);
}

/* ---- steps */

typedef struct plan {
  pl_step steps[MOST_STEPS];
  int64_t count;
} plan;

static void add_step(plan *made, pl_step step) {
  CHECK(made->count < MOST_STEPS);
  made->steps[made->count++] = step;
}

static int64_t edge(int64_t chunk, int64_t count) { return count * chunk / size; }

/* A step that sends or receives chunk `chunk` of `count` elements. */
static pl_step move(int64_t kind, int64_t link, int64_t message, int64_t chunk, int64_t count) {
  return (pl_step){kind, link, message, edge(chunk, count), edge(chunk + 1, count), 1};
}

/* Everyone sends each chunk to its owner, which adds, and sends the sum to all. */
static void plan_owners(plan *made, int64_t rank, int64_t count) {
  int64_t n = size * size;
  for (int64_t peer = 0; peer < size; peer++)
    if (peer != rank)
      add_step(made, move(PL_SEND, link_to(rank, peer), rank * size + peer, peer, count));
  for (int64_t peer = 0; peer < size; peer++)
    if (peer != rank)
      add_step(made, move(PL_RECEIVE, link_to(rank, peer), peer * size + rank, rank, count));
  add_step(made, (pl_step){PL_ADD, 0, 0, edge(rank, count), edge(rank + 1, count), size});
  for (int64_t peer = 0; peer < size; peer++) {
    int64_t received = size - 1 + link_to(rank, peer);
    add_step(made, (pl_step){PL_TERM, 0, 0, 0, 0, peer == rank ? -1 : received});
  }
  add_step(made, (pl_step){PL_END, 0, 0, 0, 0, 0});
  for (int64_t peer = 0; peer < size; peer++)
    if (peer != rank)
      add_step(made, move(PL_SEND, link_to(rank, peer), n + rank * size + peer, rank, count));
  for (int64_t peer = 0; peer < size; peer++)
    if (peer != rank)
      add_step(made, move(PL_REPLACE, link_to(rank, peer), n + peer * size + rank, peer, count));
  add_step(made, (pl_step){PL_END, 0, 0, 0, 0, 0});
}

static void plan_ring(plan *made, int64_t rank, int64_t count) {
  int64_t right = (rank + 1) % size, left = (rank + size - 1) % size;
  for (int64_t turn = 0; turn < 2 * (size - 1); turn++) {
    int adds = turn < size - 1;
    int64_t sent = (rank + 2 * size - turn + !adds * (size - 1) + !adds) % size;
    int64_t comes = (sent + size - 1) % size;
    add_step(made, move(PL_SEND, link_to(rank, right), turn * size + rank, sent, count));
    int64_t kind = adds ? PL_RECEIVE : PL_REPLACE;
    add_step(made, move(kind, link_to(rank, left), turn * size + left, comes, count));
    if (adds) {
      add_step(made, (pl_step){PL_ADD, 0, 0, edge(comes, count), edge(comes + 1, count), 2});
      add_step(made, (pl_step){PL_TERM, 0, 0, 0, 0, 1});
      add_step(made, (pl_step){PL_TERM, 0, 0, 0, 0, -1});
    }
    add_step(made, (pl_step){PL_END, 0, 0, 0, 0, 0});
  }
}

static void plan_direct(plan *made, int64_t rank, int64_t count) {
  for (int64_t peer = 0; peer < size; peer++)
    if (peer != rank)
      add_step(made, (pl_step){PL_SEND, link_to(rank, peer), rank, 0, count, 0});
  for (int64_t peer = 0; peer < size; peer++)
    if (peer != rank) add_step(made, (pl_step){PL_RECEIVE, link_to(rank, peer), peer, 0, count, 0});
  add_step(made, (pl_step){PL_ADD, 0, 0, 0, count, size});
  for (int64_t peer = 0; peer < size; peer++) {
    int64_t received = size - 1 + link_to(rank, peer);
    add_step(made, (pl_step){PL_TERM, 0, 0, 0, 0, peer == rank ? -1 : received});
  }
  add_step(made, (pl_step){PL_END, 0, 0, 0, 0, 0});
}

static pl_schedule *begin(int64_t rank, int64_t number, int kind, int64_t *memory, int64_t count,
                          int in_background) {
  plan made = {.count = 0};
  void (*const planners[])(plan *, int64_t, int64_t) = {plan_owners, plan_ring, plan_direct};
  planners[kind](&made, rank, count);
  pl_reduction reduction = {number, 8, PL_I64, PL_SUM, in_background};
  pl_schedule *begun =
      pl_schedule_begin(meshes[rank], made.steps, made.count, &reduction, memory);
  CHECK(begun);
  return begun;
}

/* ---- sums */

static int64_t value(int64_t rank, int64_t number, int64_t i) {
  return (int64_t)(mix(60, (uint64_t)(rank + 10 * number), (uint64_t)i) % 1000);
}

static int64_t count_of(int64_t number) {
  uint64_t random = mix(61, (uint64_t)number, (uint64_t)size);
  int64_t most = random % 5 == 0 ? 200000 : random % 2 ? 3000 : 5;
  return (int64_t)(random / 16 % (uint64_t)most);
}

static int64_t *make_memory(int64_t rank, int64_t number) {
  int64_t count = count_of(number), *memory = allocate(8 * count);
  for (int64_t i = 0; i < count; i++) memory[i] = value(rank, number, i);
  return memory;
}

static void check_sum(const int64_t *memory, int64_t number) {
  for (int64_t i = 0; i < count_of(number); i++) {
    int64_t sum = 0;
    for (int64_t rank = 0; rank < size; rank++) sum += value(rank, number, i);
    CHECK(memory[i] == sum);
  }
}

/* Some are under way at a time, and are waited for in another order on each rank. In the background
   all but the last rank only look whether they have ended. */
static void *reduce_turns(void *rank_) {
  int64_t rank = (int64_t)(intptr_t)rank_;
  for (int64_t turn = 0; turn < TURNS; turn++) {
    int64_t *memory[UNDER_WAY];
    pl_schedule *begun[UNDER_WAY];
    int in_background = turn % 2;
    for (int64_t k = 0; k < UNDER_WAY; k++) {
      int64_t number = turn * UNDER_WAY + k;
      memory[k] = make_memory(rank, number);
      int kind = (int)(mix(62, (uint64_t)number, 0) % KINDS);
      begun[k] = begin(rank, number, kind, memory[k], count_of(number), in_background);
    }
    for (int64_t i = 0; i < UNDER_WAY; i++) {
      int64_t k = (i + rank) % UNDER_WAY;
      if (in_background)
        while (pl_schedule_state(begun[k]) == PL_RUNNING) sleep_ns(MILLISECOND / 10);
      else if (turn % 4 == 0)
        while (pl_schedule_poll(begun[k]) == PL_RUNNING) sleep_ns(MILLISECOND / 10);
      CHECK(pl_schedule_wait(begun[k], FOREVER) == PL_ENDED);
      check_sum(memory[k], turn * UNDER_WAY + k);
    }
    for (int64_t k = 0; k < UNDER_WAY; k++) {
      pl_schedule_free(begun[k]);
      free(memory[k]);
    }
  }
  return NULL;
}

static void reduce_on_threads(void) {
  connect_ranks();
  pthread_t threads[MOST_RANKS];
  for (int64_t rank = 0; rank < size; rank++)
    CHECK(pthread_create(&threads[rank], NULL, reduce_turns, (void *)(intptr_t)rank) == 0);
  for (int64_t rank = 0; rank < size; rank++) pthread_join(threads[rank], NULL);
  free_meshes();
}

/* ---- failures, between two ranks */

/* A rank that leaves in the middle ends the all-reduce of the other, which says over which link. */
static void lose_a_link(int comes_first) {
  size = 2;
  connect_ranks();
  enum { COUNT = 500000 };
  int64_t *left = allocate(8 * COUNT), *right = allocate(8 * COUNT);
  memset(left, 1, 8 * COUNT);
  memset(right, 1, 8 * COUNT);
  pl_schedule *begun = comes_first ? begin(0, 1, OWNERS, left, COUNT, 1) : NULL;
  pl_schedule *other = begin(1, 1, OWNERS, right, COUNT, 0);
  pl_mesh_close(meshes[1]);
  if (!begun) begun = begin(0, 1, OWNERS, left, COUNT, 0);
  CHECK(pl_schedule_wait(begun, FOREVER) == PL_LINK_LOST);
  pl_progress progress;
  pl_schedule_progress(begun, &progress);
  CHECK(progress.state == PL_LINK_LOST && progress.link == 0);
  pl_schedule_free(begun);
  pl_schedule_free(other);
  free_meshes();
  free(left);
  free(right);
}

/* A message of another size ends the all-reduce: nothing is written beyond the tensor. */
static void receive_wrong_bytes(void) {
  size = 2;
  connect_ranks();
  int64_t *left = allocate(8 * 100), *right = allocate(8 * 101);
  memset(left, 1, 8 * 100);
  memset(right, 1, 8 * 101);
  pl_schedule *begun = begin(0, 1, DIRECT, left, 100, 0);
  pl_schedule *other = begin(1, 1, DIRECT, right, 101, 0);
  CHECK(pl_schedule_wait(begun, FOREVER) == PL_WRONG_BYTES);
  pl_progress progress;
  pl_schedule_progress(begun, &progress);
  CHECK(progress.link == 0 && progress.came == 808 && progress.wanted == 800);
  CHECK(pl_schedule_wait(other, FOREVER) == PL_WRONG_BYTES);
  pl_schedule_free(begun);
  pl_schedule_free(other);
  free_meshes();
  free(left);
  free(right);
}

/* A wait with a limit ends while the other rank is absent, and can be taken up again. */
static void wait_for_the_absent(void) {
  size = 2;
  connect_ranks();
  int64_t left[3] = {1, 2, 3}, right[3] = {10, 20, 30};
  pl_schedule *begun = begin(0, 1, OWNERS, left, 3, 1);
  CHECK(pl_schedule_wait(begun, 5 * MILLISECOND) == PL_RUNNING);
  pl_schedule *other = begin(1, 1, OWNERS, right, 3, 1);
  CHECK(pl_schedule_wait(begun, FOREVER) == PL_ENDED && left[2] == 33);
  CHECK(pl_schedule_wait(other, FOREVER) == PL_ENDED && right[0] == 11);
  pl_schedule_free(begun);
  pl_schedule_free(other);
  free_meshes();
}

/* One that is still running when its mesh closes may be freed. */
static void close_while_running(void) {
  size = 2;
  connect_ranks();
  int64_t *left = allocate(8 * 1000);
  memset(left, 1, 8 * 1000);
  pl_schedule *begun = begin(0, 1, RING, left, 1000, 1);
  pl_mesh_close(meshes[0]);
  pl_schedule_free(begun);
  free_meshes();
  free(left);
}

int main(void) {
  for (eager = 0; eager < 2; eager++) {
    for (size = 2; size <= MOST_RANKS; size++) reduce_on_threads();
    lose_a_link(0);
    lose_a_link(1);
    receive_wrong_bytes();
    wait_for_the_absent();
    close_while_running();
  }
  return 0;
}
