/* Kernels of tpde/cuda/kernels as C++ for a processor: each thread of a block is a fiber, and clusters of blocks run one
 * after the other. What meets elsewhere meets here: a collective waits for all lanes of its warp, a barrier for all threads.
 * Misaligned loads and threads that wait for ever end the process with a message, as do bytes that are written behind a
 * block's shared memory. Copies to shared memory come when they are waited for, not before.
 *
 * Included before a kernel's source; `run` is called from Python. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <setjmp.h>
#include <ucontext.h>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define MOST_THREADS 1024
#define MOST_BLOCKS 8  // of a cluster
#define MOST_SHARED (227u << 10)
#define STACK (64 << 10)

struct Index { unsigned x; };
struct ulonglong2 { unsigned long long x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static Index threadIdx, blockIdx, blockDim, gridDim;

namespace fibers {
struct Meeting {  // what all of a group must reach
  unsigned arrived, turn;
  unsigned long long values[2][32];  // of this turn and the one before
};
struct Copy { unsigned to; const void *from; unsigned group; };
struct Copies { unsigned count, groups; Copy copies[32]; };
struct Block {
  ucontext_t contexts[MOST_THREADS];
  jmp_buf places[MOST_THREADS];
  bool begun[MOST_THREADS], ended[MOST_THREADS];
  Meeting warps[MOST_THREADS / 32], all;
  unsigned number, alive;
  Copies pending[MOST_THREADS];
  alignas(128) unsigned char shared[MOST_SHARED];
};
static ucontext_t first;  // where a fiber was begun
static jmp_buf scheduler;
static char *stacks;
static bool moved;
static Block blocks[MOST_BLOCKS], *here = blocks;

/* Let others run. A context asks the system for its signals each time: it is for a fiber's first one alone. */
static void yield() {
  if (!_setjmp(here->places[threadIdx.x])) _longjmp(scheduler, 1);
}

__attribute__((noinline)) static void enter(Block &b, unsigned i) {
  if (_setjmp(scheduler)) return;
  if (b.begun[i]) _longjmp(b.places[i], 1);
  b.begun[i] = true;
  swapcontext(&first, &b.contexts[i]);
}

[[noreturn]] static void fail(const char *what) {
  fprintf(stderr, "kernel, block %u, thread %u: %s\n", blockIdx.x, threadIdx.x, what);
  abort();
}

static void wait(Meeting &m, unsigned members) {
  const unsigned turn = m.turn;
  moved = true;
  if (++m.arrived == members) {
    m.arrived = 0;
    m.turn++;
    return;
  }
  while (m.turn == turn) yield();
}

/* The values of all lanes of the warp. */
static const unsigned long long *meet(unsigned mask, unsigned long long value) {
  if (mask != 0xFFFFFFFFu) fail("a collective of a part of a warp");
  Meeting &m = here->warps[threadIdx.x / 32];
  unsigned long long *values = m.values[m.turn % 2];
  values[threadIdx.x % 32] = value;
  wait(m, 32);
  return values;
}
}  // namespace fibers

#define __syncthreads() fibers::wait(fibers::here->all, fibers::here->alive)
#define __threadfence() ((void)0)
#define __syncwarp() ((void)fibers::meet(0xFFFFFFFFu, 0))

template <class T> T __shfl_xor_sync(unsigned mask, T value, int other) {
  return (T)fibers::meet(mask, (unsigned long long)value)[threadIdx.x % 32 ^ other];
}
template <class T> T __shfl_up_sync(unsigned mask, T value, int up) {
  const unsigned lane = threadIdx.x % 32, from = lane < (unsigned)up ? lane : lane - up;
  return (T)fibers::meet(mask, (unsigned long long)value)[from];
}
template <class T> T __shfl_sync(unsigned mask, T value, int from) {
  return (T)fibers::meet(mask, (unsigned long long)value)[from % 32];
}
static unsigned __ballot_sync(unsigned mask, unsigned long long value) {
  const unsigned long long *values = fibers::meet(mask, value);
  unsigned found = 0;
  for (int i = 0; i < 32; i++) found |= (values[i] != 0 ? 1u : 0u) << i;
  return found;
}
static unsigned __match_any_sync(unsigned mask, unsigned value) {
  const unsigned long long *values = fibers::meet(mask, value);
  unsigned same = 0;
  for (int i = 0; i < 32; i++) same |= ((unsigned)values[i] == value ? 1u : 0u) << i;
  return same;
}
static unsigned __reduce_add_sync(unsigned mask, unsigned value) {
  const unsigned long long *values = fibers::meet(mask, value);
  unsigned sum = 0;
  for (int i = 0; i < 32; i++) sum += (unsigned)values[i];
  return sum;
}
static unsigned __reduce_max_sync(unsigned mask, unsigned value) {
  const unsigned long long *values = fibers::meet(mask, value);
  unsigned most = 0;
  for (int i = 0; i < 32; i++) most = values[i] > most ? (unsigned)values[i] : most;
  return most;
}
static unsigned __reduce_or_sync(unsigned mask, unsigned value) {
  const unsigned long long *values = fibers::meet(mask, value);
  unsigned any = 0;
  for (int i = 0; i < 32; i++) any |= (unsigned)values[i];
  return any;
}
static unsigned __reduce_min_sync(unsigned mask, unsigned value) { return ~__reduce_max_sync(mask, ~value); }
static unsigned __byte_perm(unsigned x, unsigned y, unsigned select) {
  const unsigned long long both = (unsigned long long)y << 32 | x;
  unsigned made = 0;
  for (int i = 0; i < 4; i++) made |= (unsigned)(both >> 8 * (select >> 4 * i & 7) & 255) << 8 * i;
  return made;
}
template <class T> T __ldg(const T *p) {
  if ((unsigned long long)p % sizeof(T)) fibers::fail("a misaligned load");
  T value;
  memcpy(&value, p, sizeof value);
  return value;
}
template <class T> void __stcs(T *p, T value) {
  if ((unsigned long long)p % sizeof(T)) fibers::fail("a misaligned store");
  memcpy(p, &value, sizeof value);
}
template <class T> T __ldcs(const T *p) { return __ldg(p); }
template <class T> void __stcg(T *p, T value) { __stcs(p, value); }
template <class T> T __ldcg(const T *p) { return __ldg(p); }
template <class T> T atomicAdd(T *p, T value) { T old = *p; *p += value; return old; }
template <class T> T atomicOr(T *p, T value) { T old = *p; *p |= value; return old; }
template <class T> T atomicXor(T *p, T value) { T old = *p; *p ^= value; return old; }
template <class T> T atomicMax(T *p, T value) { T old = *p; if (old < value) *p = value; return old; }
template <class T> T atomicMin(T *p, T value) { T old = *p; if (value < old) *p = value; return old; }
static int __popc(unsigned x) { return __builtin_popcount(x); }
static int __ffs(unsigned x) { return __builtin_ffs((int)x); }
static int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
template <class T> T min(T a, T b) { return b < a ? b : a; }

/* Instructions of window.cuh. */
#define EMULATED
#define DYNAMIC_SHARED unsigned char *const shared = fibers::here->shared
namespace fibers {
static double bf16(unsigned word) {
  const unsigned bits = word << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
struct Fragment { double a[8], x[4]; };
static Fragment fragments[MOST_THREADS];
}  // namespace fibers
extern "C" unsigned shared_bytes;
unsigned shared_bytes = 0;  // of a block
static unsigned shared_address(const void *p) { return (unsigned)((const unsigned char *)p - fibers::here->shared); }
static void copy_16(unsigned to, const void *from) {
  auto &mine = fibers::here->pending[threadIdx.x];
  if (to % 16 || (unsigned long long)from % 16 || to + 16 > shared_bytes || mine.count == 32) fibers::fail("a wrong copy");
  mine.copies[mine.count++] = {to, from};
}
static void wait_for_fetched() {
  auto &mine = fibers::here->pending[threadIdx.x];
  for (unsigned i = 0; i < mine.count; i++) memcpy(fibers::here->shared + mine.copies[i].to, mine.copies[i].from, 16);
  mine.count = 0;
}
static void trap() { fibers::fail("a trap"); }
static void follow() {}
static float __uint_as_float(unsigned bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
static float __fadd_rn(float a, float b) { return a + b; }
static float __fmul_rn(float a, float b) { return a * b; }
static unsigned short rounded(float value) {
  unsigned bits;
  memcpy(&bits, &value, 4);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FFF;
  return (unsigned short)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
/* mma.m16n8k16: the order of its sums is this one's own, the same for all kernels. */
static void mma(float *sum, unsigned a, unsigned b, unsigned c, unsigned d, unsigned x, unsigned y) {
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x - lane, g = lane / 4, q = lane % 4;
  const unsigned words[] = {a, b, c, d, x, y};
  fibers::Fragment &mine = fibers::fragments[threadIdx.x];
  for (unsigned i = 0; i < 12; i++) (i < 8 ? mine.a[i] : mine.x[i - 8]) = fibers::bf16(words[i / 2] >> i % 2 * 16 & 0xFFFF);
  fibers::meet(0xFFFFFFFFu, 0);
  double made[4] = {};
  for (unsigned k = 0; k < 16; k++) {  // k is column 2q + k % 2 of the first eight, or of the others
    const unsigned from = warp + k / 2 % 4, word = k / 8;
    const double *row = fibers::fragments[from + 4 * g].a + 4 * word + k % 2;
    const double v = fibers::fragments[from + 8 * q].x[2 * word + k % 2], w = fibers::fragments[from + 8 * q + 4].x[2 * word + k % 2];
    made[0] += row[0] * v, made[1] += row[0] * w, made[2] += row[2] * v, made[3] += row[2] * w;
  }
  for (unsigned i = 0; i < 4; i++) sum[i] = (float)((double)sum[i] + made[i]);
  fibers::meet(0xFFFFFFFFu, 0);
}

#include "emulated_hopper.h"

namespace fibers {
typedef unsigned long long u64;
typedef void (*Kernel)(u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64);
static Kernel kernel;
static u64 arguments[16];

static void begin() {
  const u64 *a = arguments;  // a kernel takes the first ones: all are addresses
  kernel(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15]);
  here->ended[threadIdx.x] = true;
  here->alive--;
  moved = true;
  _longjmp(scheduler, 1);
}

static void start(Block &b, unsigned number, unsigned threads, char *stacks) {
  memset(b.warps, 0, sizeof b.warps);
  memset(&b.all, 0, sizeof b.all);
  memset(b.begun, 0, sizeof b.begun);
  memset(b.ended, 0, sizeof b.ended);
  memset(b.pending, 0, sizeof b.pending);
  memset(b.shared, 0xA5, sizeof b.shared);
  b.number = number;
  b.alive = threads;
  for (unsigned i = 0; i < threads; i++) {
    getcontext(&b.contexts[i]);
    b.contexts[i].uc_stack.ss_sp = stacks + (size_t)i * STACK;
    b.contexts[i].uc_stack.ss_size = STACK;
    b.contexts[i].uc_link = nullptr;
    makecontext(&b.contexts[i], begin, 0);
  }
}

static bool resume(Block &b, unsigned threads) {
  here = &b;
  blockIdx.x = b.number;
  for (unsigned i = 0; i < threads; i++) {
    threadIdx.x = b.number % 2 ? threads - 1 - i : i;  // no order may matter
    if (!b.ended[threadIdx.x]) enter(b, threadIdx.x);
  }
  return b.alive != 0;
}
}  // namespace fibers

extern "C" void run(void *kernel, const unsigned long long *arguments, int count, unsigned grid, unsigned threads, unsigned cluster) {
  using namespace fibers;
  if (!stacks) stacks = (char *)malloc((size_t)MOST_BLOCKS * MOST_THREADS * STACK);
  memset(fibers::arguments, 0, sizeof fibers::arguments);
  memcpy(fibers::arguments, arguments, 8 * (size_t)count);
  fibers::kernel = (Kernel)kernel;
  blockDim.x = threads;
  gridDim.x = grid;
  for (unsigned first = 0; first < grid; first += cluster) {
    begin_cluster(cluster, threads);
    for (unsigned i = 0; i < cluster; i++) start(blocks[i], first + i, threads, stacks + (size_t)i * threads * STACK);
    for (bool alive = true; alive;) {
      moved = alive = false;
      for (unsigned i = 0; i < cluster; i++) alive |= resume(blocks[i], threads);
      if (alive && !moved && !deliver(true)) fail("all threads wait");
      deliver(false);
    }
    for (unsigned b = 0; b < cluster; b++)
      for (unsigned i = shared_bytes; i < MOST_SHARED; i++)
        if (blocks[b].shared[i] != 0xA5) fail("bytes behind the shared memory are written");
  }
}
