/* Instructions of hopper.cuh, for emulated.h: clusters, barriers in shared memory, copies that tell them, and `wgmma`.
 *
 * Copies come late, and not in their order. A lane that has waited for copies must end its reads by `fence_shared` before
 * its warp begins others that tell the same barrier. Products read what they multiply when they are waited for; that nobody
 * has changed it since they were begun is checked. */

namespace fibers {
struct Barrier { unsigned at, count, left, phase; long bytes; bool reads[MOST_THREADS]; };
struct Barriers { unsigned count; Barrier made[256]; };
static Barriers barriers[MOST_BLOCKS];
struct Delivery { unsigned block, to, barrier, bytes; const void *from; float values[4]; };
static struct { unsigned count; Delivery waiting[1 << 16]; } deliveries;
static unsigned drawn, gathered, gatherings, cluster_alive;

static unsigned draw() { return (drawn = drawn * 1664525u + 1013904223u) >> 16; }

static void begin_cluster(unsigned blocks, unsigned threads) {
  memset(barriers, 0, sizeof barriers);
  deliveries.count = gathered = gatherings = 0;
  cluster_alive = blocks * threads;
}

static Barrier &barrier_of(unsigned block, unsigned at) {
  Barriers &all = barriers[block];
  for (unsigned i = 0; i < all.count; i++)
    if (all.made[i].at == at) return all.made[i];
  fail("no barrier there");
}

static void settle(Barrier &b) {
  if (b.left == 0 && b.bytes == 0) b.phase++, b.left = b.count;
  moved = true;
}

static void arrive_on(unsigned block, unsigned at, long bytes) {
  Barrier &b = barrier_of(block, at);
  if (b.left == 0) fail("too many arrive at a barrier");
  b.left--;
  b.bytes += bytes;
  settle(b);
}

/* Some of what is under way arrives; all of it if nothing else moves. */
static bool deliver(bool all) {
  bool some = false;
  for (unsigned i = 0; i < deliveries.count;) {
    if (!all && draw() % 4) {
      i++;
      continue;
    }
    const Delivery d = deliveries.waiting[i];
    deliveries.waiting[i] = deliveries.waiting[--deliveries.count];
    memcpy(blocks[d.block].shared + d.to, d.from ? d.from : d.values, d.bytes);
    Barrier &b = barrier_of(d.block, d.barrier);
    b.bytes -= d.bytes;
    settle(b);
    some = true;
  }
  return some;
}

static void under_way(const Delivery &d) {
  if (d.to % 16 || d.bytes % 16 || (unsigned long long)d.from % 16 || d.to + d.bytes > shared_bytes) fail("a wrong copy");
  if (deliveries.count == sizeof deliveries.waiting / sizeof *deliveries.waiting) fail("too many copies");
  deliveries.waiting[deliveries.count++] = d;
}

static unsigned rank() { return (unsigned)(here - blocks); }

/* Products that a lane has begun: of two rows of A, of B at `at`, and what B's bytes were. */
struct Product { float *sum; double rows[2][16]; unsigned at, step, width, hash, group; };
struct Products { unsigned count, groups; Product begun[64]; };
static Products products[MOST_BLOCKS][MOST_THREADS];
static unsigned words[MOST_BLOCKS][MOST_THREADS][4];

static const unsigned char *word_of_b(const Product &p, unsigned n, unsigned k) {
  return here->shared + p.at + k / 8 * p.step + n / 8 * 128 + n % 8 * 16 + k % 8 * 2;
}

static unsigned hash_of_b(const Product &p) {
  unsigned hash = 1;
  for (unsigned n = 0; n < p.width; n++)
    for (unsigned k = 0; k < 16; k += 8)
      for (unsigned i = 0; i < 4; i++) hash = hash * 31 + ((const unsigned *)word_of_b(p, n, k))[i];
  return hash;
}

/* All lanes of a warp multiply by the same bytes: two of them look. */
static bool looks() { return threadIdx.x % 32 % 31 == 0; }

static void add_up(const Product &p) {
  if (looks() && hash_of_b(p) != p.hash) fail("what is multiplied was changed");
  for (unsigned t = 0; t < p.width / 8; t++) {
    double made[4] = {};
    for (unsigned k = 0; k < 16; k++) {
      unsigned short words[2];
      memcpy(words, word_of_b(p, 8 * t + threadIdx.x % 4 * 2, k), 2);
      memcpy(words + 1, word_of_b(p, 8 * t + threadIdx.x % 4 * 2 + 1, k), 2);
      const double v = bf16(words[0]), w = bf16(words[1]);
      made[0] += p.rows[0][k] * v, made[1] += p.rows[0][k] * w, made[2] += p.rows[1][k] * v, made[3] += p.rows[1][k] * w;
    }
    for (unsigned i = 0; i < 4; i++) p.sum[4 * t + i] = (float)((double)p.sum[4 * t + i] + made[i]);
  }
}
}  // namespace fibers

static unsigned rank_in_cluster() { return fibers::rank(); }
static unsigned in_block(unsigned at, unsigned rank) { return (rank + 1) << 24 | at; }
static void make_barrier(unsigned barrier, unsigned count) {
  using namespace fibers;
  Barriers &all = barriers[rank()];
  if (barrier % 8 || barrier + 8 > shared_bytes || all.count == 256) fail("a wrong barrier");
  all.made[all.count++] = {barrier, count, count, 0, 0, {}};
}
static void fence_barriers() {}
static void expect(unsigned barrier, unsigned bytes) { fibers::arrive_on(fibers::rank(), barrier, bytes); }
static void wait_on(unsigned barrier, unsigned parity) {
  while ((fibers::barrier_of(fibers::rank(), barrier).phase & 1) == parity) fibers::yield();
  fibers::barrier_of(fibers::rank(), barrier).reads[threadIdx.x] = true;
  fibers::moved = true;
}
static void arrive_at(unsigned barrier) { fibers::arrive_on(fibers::rank(), barrier, 0); }
static void arrive_in(unsigned barrier, unsigned rank) { fibers::arrive_on(rank, barrier, 0); }
static unsigned gathering_of[MOST_BLOCKS][MOST_THREADS];
static void arrive() {
  using namespace fibers;
  gathering_of[rank()][threadIdx.x] = gatherings;
  if (++gathered == cluster_alive) gathered = 0, gatherings++;
  moved = true;
}
static void wait_for_cluster() {
  while (fibers::gatherings == gathering_of[fibers::rank()][threadIdx.x]) fibers::yield();
}
static void fence_shared() {
  fibers::Barriers &all = fibers::barriers[fibers::rank()];
  for (unsigned i = 0; i < all.count; i++) all.made[i].reads[threadIdx.x] = false;
}
static void follow_early() {}
static void wait_for_last() {}
static uint4 load_16(const unsigned short *p) { return __ldg((const uint4 *)p); }
template <int COUNT, bool MORE> void take_registers() {}
static void copy_bulk(unsigned to, const unsigned char *from, unsigned bytes, unsigned barrier) {
  const fibers::Barrier &told = fibers::barrier_of(fibers::rank(), barrier);
  for (unsigned i = 0; i < 32; i++)
    if (told.reads[threadIdx.x / 32 * 32 + i]) fibers::fail("a copy comes where a lane may still read");
  fibers::under_way({fibers::rank(), to, barrier, bytes, from, {}});
}
static void store_shared(unsigned to, const float *v) {
  if (to % 16 || to + 16 > shared_bytes) fibers::fail("a wrong store");
  memcpy(fibers::here->shared + to, v, 16);
}
/* Copies of a lane that were closed come when it waits for them, and what it reads meanwhile is not them. */
static void close_copies() {
  auto &mine = fibers::here->pending[threadIdx.x];
  for (unsigned i = 0; i < mine.count; i++)
    if (!mine.copies[i].group) mine.copies[i].group = mine.groups + 1;
  mine.groups++;
}
template <int LEFT> void wait_for_copies() {
  auto &mine = fibers::here->pending[threadIdx.x];
  unsigned kept = 0;
  for (unsigned i = 0; i < mine.count; i++) {
    const auto &it = mine.copies[i];
    if (it.group && it.group + LEFT <= mine.groups) memcpy(fibers::here->shared + it.to, it.from, 16);
    else mine.copies[kept++] = it;
  }
  mine.count = kept;
}
static void store_turned(unsigned to, unsigned a, unsigned b, unsigned c, unsigned d) {
  using namespace fibers;
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x - lane, values[4] = {a, b, c, d};
  if (to % 16 || to + 16 > shared_bytes) fail("a wrong store");
  memcpy(words[rank()][threadIdx.x], values, sizeof values);
  meet(0xFFFFFFFFu, 0);
  for (unsigned i = 0; i < 8; i++) {  // word i of this lane's row is that of row i's column `lane % 8`
    const unsigned word = words[rank()][warp + 4 * i + lane % 8 / 2][lane / 8];
    const unsigned short half = (unsigned short)(word >> lane % 2 * 16);
    memcpy(here->shared + to + 2 * i, &half, 2);
  }
  meet(0xFFFFFFFFu, 0);
}
static void send(unsigned to, unsigned barrier, const float *v) {
  if (to >> 24 != barrier >> 24 || !(to >> 24)) fibers::fail("a barrier of another block");
  fibers::under_way({(to >> 24) - 1, to & 0xFFFFFF, barrier & 0xFFFFFF, 16, nullptr, {v[0], v[1], v[2], v[3]}});
}
static void wgmma_of(unsigned width, float *d, unsigned a, unsigned b, unsigned c, unsigned e, unsigned long long x) {
  using namespace fibers;
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x - lane, values[4] = {a, b, c, e};
  memcpy(words[rank()][threadIdx.x], values, sizeof values);
  meet(0xFFFFFFFFu, 0);
  Products &mine = products[rank()][threadIdx.x];
  if (mine.count == 64) fail("too many products");
  Product &p = mine.begun[mine.count++];
  p.sum = d, p.at = (unsigned)(x & 0x3FFF) << 4, p.step = (unsigned)(x >> 16 & 0x3FFF) << 4, p.group = mine.groups, p.width = width;
  if ((x >> 32) != 128 >> 4) fail("a wrong descriptor");
  for (unsigned half = 0; half < 2; half++)
    for (unsigned k = 0; k < 16; k++) {
      const unsigned *of = words[rank()][warp + lane / 4 * 4 + k / 2 % 4];
      p.rows[half][k] = bf16(of[half + k / 8 * 2] >> k % 2 * 16 & 0xFFFF);
    }
  p.hash = looks() ? hash_of_b(p) : 0;
  meet(0xFFFFFFFFu, 0);
}
static void wgmma_16(float *d, unsigned a, unsigned b, unsigned c, unsigned e, unsigned long long x) { wgmma_of(16, d, a, b, c, e, x); }
static void wgmma_32(float *d, unsigned a, unsigned b, unsigned c, unsigned e, unsigned long long x) { wgmma_of(32, d, a, b, c, e, x); }
static void wgmma_64(float *d, unsigned a, unsigned b, unsigned c, unsigned e, unsigned long long x) { wgmma_of(64, d, a, b, c, e, x); }
static void wgmma_128(float *d, unsigned a, unsigned b, unsigned c, unsigned e, unsigned long long x) { wgmma_of(128, d, a, b, c, e, x); }
static void wgmma_256(float *d, unsigned a, unsigned b, unsigned c, unsigned e, unsigned long long x) { wgmma_of(256, d, a, b, c, e, x); }
static void registers_are_set() {}
static void commit() { fibers::products[fibers::rank()][threadIdx.x].groups++; }
template <int LEFT> void wait_for_products() {
  using namespace fibers;
  Products &mine = products[rank()][threadIdx.x];
  unsigned done = 0;
  while (done < mine.count && mine.begun[done].group + LEFT < mine.groups) add_up(mine.begun[done++]);
  memmove(mine.begun, mine.begun + done, (mine.count - done) * sizeof *mine.begun);
  mine.count -= done;
  meet(0xFFFFFFFFu, 0);
}
template <typename T> void keep_register(T &) {}
