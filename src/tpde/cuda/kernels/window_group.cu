// window_group.cu: products of 9 to 64 rows with a matrix in the window layout (docs/windows.md 9), on Hopper GPUs.
//
// Eight blocks, a cluster, take some stripes together, each of them one part of their columns, so that a block keeps but
// an eighth of x in shared memory. A group of four warps takes four stripes: `wgmma` multiplies the words in their
// registers by x in shared memory, and adds 16 products at a time to the bits that `mma.m16n8k16` gives. The eight partial
// sums of a stripe and eight rows of x go to one block of the cluster, which ends them.
//
// A block has WIDE warps that multiply, and four more, which add partial sums up, store y, and copy what x lacks: of
// long rows STAGES chunks are there at a time. All wait for each other by barriers in shared memory ("mbarrier"), whose
// phases are a turn, a step or a chunk; none waits for what a turn stores.
//
// Macros: those of window.cuh; NB, the most rows of x: 16, 32 or 64; WIDE, 8 or 12; EACH, how many stripes a warp takes
// beside each other, 1 or 2; STAGES, how many chunks of x are in shared memory; STREAMS, whether a part has more; INBOXES,
// how many turns' partial sums there is room for.

#define CLUSTER 8u  // blocks, one for each part
#define STRIPES WIDE
#include "window.cuh"
#include "hopper.cuh"
#include "window_cluster.cuh"

#define OTHERS 4u  // warps that do not multiply
#define ALL_WARPS (WIDE + OTHERS)
#define X_TILE (4 * X_STEP)
#define X_CHUNK (8 * X_TILE)
#define PIECES (WIDE == 8 ? 12 : 8)  // 16 bytes of x that a thread loads at a time, at first
#define DEPTH (WIDE == 8 && EACH == 1 ? 4 : 2)  // tiles that are decoded before they are multiplied
// Registers of threads that multiply, and of others. All have 168 or 128 at first, and 64 Ki are there.
#define REGISTERS (WIDE == 12 ? 152 : EACH == 2 ? 192 : 200)
#define OTHER_REGISTERS (WIDE == 12 ? 56 : EACH == 2 ? 120 : 104)
static_assert(registers_suffice(WIDE, REGISTERS, OTHERS, OTHER_REGISTERS, WIDE == 12 ? 128 : 168));

// ---- copies ----

// Rows of x, where they lie, and how many columns can be read.
struct X {
  const u16* at;
  u64 stride;
  u32 rows, columns;
};

// What a warp copies of x, as one of `warps` warps: pieces `first`, `first + warps`, ... below `end`. A piece is eight rows
// of a tile, lane / 4 the row, lane % 4 = q eight columns; there are NB of them in a chunk, and unless ONE the part's next
// chunk follows. wgmma takes elements 0 to 3 of an octet as columns 2q, 2q + 1, 2q + 8, 2q + 9 of the first product, 4 to 7 as those
// of the second one (windows.md 2.2).
template <u32 COUNT, bool ONE>
__device__ __forceinline__ void load_x(uint4* v, const X& x, u32 chunk, u32 first, u32 end, u32 warps, u32 lane) {
#pragma unroll
  for (u32 i = 0; i < COUNT; i++) {
    const u32 k = first + i * warps, row = (ONE ? k : k % NB) / 8 * 8 + lane / 4;
    const u32 column = 256 * (ONE ? chunk : chunk + k / NB * PARTS) + k % 8 * 32 + lane % 4 * 8;
    v[i] = make_uint4(0, 0, 0, 0);
    if (k < end && row < x.rows && column < x.columns) v[i] = *(const uint4*)(x.at + row * x.stride + column);
  }
}

template <u32 COUNT, bool ONE>
__device__ __forceinline__ void store_x(u8* to, const uint4* v, u32 first, u32 end, u32 warps, u32 lane) {
#pragma unroll
  for (u32 i = 0; i < COUNT; i++) {
    const u32 k = first + i * warps;
    if (k >= end) break;
    u8* const p = to + (ONE ? 0 : k / NB * X_CHUNK) + k % 8 * X_TILE + (ONE ? k : k % NB) / 8 * 128 + 4 * lane;
    *(u32*)p = v[i].x;
    *(u32*)(p + X_STEP) = v[i].y;
    *(u32*)(p + 2 * X_STEP) = v[i].z;
    *(u32*)(p + 3 * X_STEP) = v[i].w;
  }
  fence_shared();
}

// Copy a chunk to shared memory, meanwhile, and tell a barrier.
__device__ __forceinline__ void bring(u32 to, u32 barrier, const Matrix& m, u32 stripe, u32 chunk, u32 lane) {
  if (lane) return;
  const u32 bytes = PAIR_BYTES * pairs_of(m, chunk);
  expect(barrier, bytes);
  copy_bulk(to, body_of(m, stripe, chunk), bytes, barrier);
}

// As `product` of window.cu.
extern "C" __global__ void __launch_bounds__(32 * ALL_WARPS, 1)
group_product(MATRIX, const u16* x_at, u64 x_stride, u32 n, u16* __restrict__ y, u64 y_stride,
              const u16* __restrict__ bias) {
  DYNAMIC_SHARED;
  const Matrix m = THE_MATRIX;
  const X x = {x_at, x_stride, n, (m.columns + 7) / 8 * 8};
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, stripes = (m.rows + 15) / 16;
  const u32 part = rank_in_cluster();
  // This block's chunks of a stripe are `part`, `part + PARTS`, ... A cluster takes WIDE stripes a turn, beside those of
  // others; EACH turns are a round, which passes over x once. Clusters share what is left in the end by fours, a group's: one
  // has `last` stripes in its last turn, or no such turn. Two divisions more would take up to 2 us of a product.
  const u32 own = (m.chunks - part + PARTS - 1) / PARTS;
  const u32 clusters = gridDim.x / CLUSTER, cluster = blockIdx.x / CLUSTER, step = clusters * WIDE, whole = stripes / step;
  const u32 left = (stripes - whole * step + 3) / 4, fours = (left >= clusters) + (left >= 2 * clusters), rest = left - fours * clusters;
  const u32 last = 4 * (fours + (cluster < rest)), from = fours * cluster + min(cluster, rest);
  const u32 turns = whole + (last != 0);
  const auto first_of = [&](u32 turn) { return turn * step + (turn < whole ? WIDE * cluster : 4 * from); };
  u8* const xs = shared;                   // [STAGES] chunks of x
  u8* const inbox = xs + STAGES * X_CHUNK;  // [INBOXES][SLOTS][CLUSTER] partial sums that this block adds up
  u8* const planes = inbox + INBOXES * TURN_SUMS;  // [WIDE] planes of escapes, and chunks
  u8 *const plane = planes + warp * (PLANE + CHUNK_BYTES), *const held = plane + PLANE;
  // Barriers: an inbox is full, all have read theirs, a warp's chunk has come, a stage is filled, nobody reads it.
  const u32 full = shared_address(planes + WIDE * (PLANE + CHUNK_BYTES)), read = full + 8 * INBOXES;
  const u32 come = read + 8 * INBOXES + 8 * warp, filled = read + 8 * (INBOXES + WIDE), emptied = filled + 8 * STAGES;
  const auto stripe_of = [&](u32 turn) { return min(first_of(turn) + warp, stripes - 1); };  // or the last again
  const auto chunk_of = [&](u32 i) { return part + PARTS * i; };
  // Bytes of sums that other blocks send in a turn: none if there is no such turn.
  const auto sent_in = [&](u32 turn) { return turn < whole ? SENT : turn < turns ? SENT / WIDE * last : 0; };
  const auto room_of = [&](u32 turn) -> Room {
    const u32 box = turn % INBOXES;
    return {shared_address(inbox) + box * TURN_SUMS, full + 8 * box, read + 8 * box};
  };
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < INBOXES; i++) make_barrier(full + 8 * i, TELLING), make_barrier(read + 8 * i, READING * OTHERS);
    for (u32 i = 0; i < STAGES; i++) make_barrier(filled + 8 * i, OTHERS), make_barrier(emptied + 8 * i, WIDE);
    fence_barriers();
    for (u32 i = 0; i < INBOXES; i++) expect(full + 8 * i, sent_in(i));
  }
  Entries coming = {0, 0, 0, 0};
  Range after = {0, 0};
  Records ahead[EACH];
  u32 next_round = 0, next = 0, next_beside = 0;
  const u32 taken = whole + (__shfl_sync(ALL, warp, 0) < last);  // turns in which a warp that multiplies has a stripe
  // To a warp's next chunk: of the stripe beside, or of its part, or of the next round.
  const auto advance = [&] {
    if (++next_beside < EACH && next_round + next_beside < taken) return;
    next_beside = 0;
    if (++next == own) next = 0, next_round += EACH;
  };
  const auto range_ahead = [&] { return range_of(m, stripe_of(next_round + next_beside), chunk_of(next)); };
  if (warp < WIDE) {
    if (lane == 0) {
      make_barrier(come, 1);
      fence_shared();
    }
    clear(plane, lane);
#pragma unroll
    for (u32 h = 0; h < EACH; h++) ahead[h] = records_of(m, stripe_of(h), lane);
    coming = load_entries(m, range_of(m, stripe_of(0), part), lane);
    if (taken) bring(shared_address(held), come, m, stripe_of(0), part, lane);
    advance();
    if (next_round < taken) after = range_ahead();
  }
  arrive();
  wait_for_last();  // x is the last kernel's; the weights are not
  follow_early();
  const u32 pieces = min(own, (u32)STAGES) * NB;
#pragma unroll 1
  for (u32 first = warp; first < pieces; first += PIECES * ALL_WARPS) {
    uint4 v[PIECES];
    load_x<PIECES, false>(v, x, part, first, pieces, ALL_WARPS, lane);
    store_x<PIECES, false>(xs, v, first, pieces, ALL_WARPS, lane);
  }
  wait_for_cluster();  // all have their barriers
  __syncthreads();
  if (warp >= WIDE) {
    take_registers<OTHER_REGISTERS, false>();
    const u32 other = warp - WIDE;
    const Out out = {y, y_stride, n, last ? min(m.rows, 16 * (first_of(whole) + last)) : m.rows, bias};
    const auto finish = [&](u32 turn) {
      const float4* const sums = (const float4*)(inbox + turn % INBOXES * TURN_SUMS);
      end_sums<OTHERS>(sums, room_of(turn), turn / INBOXES % 2, sent_in(turn + INBOXES), out, first_of(turn), part, other, lane);
    };
#if STREAMS
    // Copy chunks of x to stages that nobody reads; one comes while its stage is read. A round ends when all have begun the
    // next one: x does not wait.
    for (u32 i = 0; i < STAGES; i++)
      if (lane == 0) arrive_at(filled + 8 * i);
    const u32 steps = (turns + EACH - 1) / EACH * own, ends_at = min((u32)STAGES, own - 1);
    u32 i = STAGES % own, round = STAGES / own * EACH, stage = 0, parity = 0, over = 0;
    for (u32 s = STAGES; s < steps; s++) {
      uint4 v[NB / OTHERS];
      load_x<NB / OTHERS, true>(v, x, chunk_of(i), warp - WIDE, NB, OTHERS, lane);
      wait_on(emptied + 8 * stage, parity);
      store_x<NB / OTHERS, true>(xs + stage * X_CHUNK, v, warp - WIDE, NB, OTHERS, lane);
      __syncwarp();
      if (lane == 0) arrive_at(filled + 8 * stage);
      if (++stage == STAGES) stage = 0, parity ^= 1;
      if (i == ends_at)
        while (over < round) finish(over++);
      if (++i == own) i = 0, round += EACH;
    }
    while (over < turns) finish(over++);
#else
    for (u32 turn = 0; turn < turns; turn++) finish(turn);
#endif
  } else {
    take_registers<REGISTERS, true>();
    const uint2* const escapes = (const uint2*)plane + lane;
    u32 parity = 0;
#if STREAMS
    u32 stage = 0, again = 0;
#endif
    for (u32 round = 0; round < taken; round += EACH) {
      float sum[EACH][TILES * 4];
      Rows r[EACH];
#pragma unroll
      for (u32 h = 0; h < EACH; h++) {
#pragma unroll
        for (u32 t = 0; t < TILES * 4; t++) sum[h][t] = 0;
        r[h] = rows_of(ahead[h], m.zero);
        if (round + EACH < taken) ahead[h] = records_of(m, stripe_of(round + EACH + h), lane);
      }
#pragma unroll 1
      for (u32 i = 0; i < own; i++) {
        const u32 pairs = pairs_of(m, chunk_of(i));
#if STREAMS
        wait_on(filled + 8 * stage, again);
#else
        const u32 stage = i;
#endif
        const u32 at = shared_address(xs + stage * X_CHUNK);
#pragma unroll
        for (u32 h = 0; h < EACH; h++) {
          if (h && round + h >= taken) break;
          const Entries e = coming;
          Chunk c;
          scatter(e, plane, m, lane);
          wait_on(come, parity);
          parity ^= 1;
          take(c, held, pairs, lane);
          leave_to_copies();  // the next chunk comes there
          if (next_round < taken) {
            coming = load_entries(m, after, lane);
            bring(shared_address(held), come, m, stripe_of(next_round + next_beside), chunk_of(next), lane);
            advance();
            if (next_round < taken) after = range_ahead();
          }
#pragma unroll
          for (u32 first = 0; first < 8; first += DEPTH) {
            u32 w[DEPTH][8];
            wait_for_products<1>();  // the registers of those before the last are free
#if STREAMS
            if (h == 0 && first == DEPTH && round + i && lane == 0)  // all products of the step before have ended
              arrive_at(emptied + 8 * ((stage ? stage : STAGES) - 1));
#endif
#pragma unroll
            for (u32 j = 0; j < DEPTH; j++) tile(c, first + j, r[h], escapes, w[j]);  // as finite numbers, where none are
            registers_are_set();
#pragma unroll
            for (u32 j = 0; j < DEPTH; j++) {
              const u64 there = descriptor(at + (first + j) * X_TILE, X_STEP);
              wgmma<NB>(sum[h], w[j][0], w[j][4], w[j][1], w[j][5], there);
              wgmma<NB>(sum[h], w[j][2], w[j][6], w[j][3], w[j][7], there + (2 * X_STEP >> 4));
            }
            commit();
          }
          wipe(e, plane, m, lane);
        }
#if STREAMS
        if (++stage == STAGES) stage = 0, again ^= 1;
#endif
      }
      wait_for_products<0>();
#pragma unroll
      for (u32 h = 0; h < EACH; h++) {
        const u32 turn = round + h;
        if (turn >= taken) break;
#pragma unroll
        for (u32 t = 0; t < TILES * 4; t++) keep_register(sum[h][t]);  // they are read below, not above
        const Room to = room_of(turn);
        if (turn >= INBOXES) wait_on(to.read, (turn / INBOXES - 1) % 2);
        send_sums(sum[h], to, part, warp, lane);
      }
    }
    if (taken < turns) {  // others have one turn more
#if STREAMS
      if (taken % EACH == 0)
        for (u32 i = 0; i < own; i++) {
          wait_on(filled + 8 * stage, again);
          __syncwarp();
          if (taken + i && lane == 0) arrive_at(emptied + 8 * ((stage ? stage : STAGES) - 1));
          if (++stage == STAGES) stage = 0, again ^= 1;
        }
#endif
      const Room to = room_of(taken);
      if (taken >= INBOXES) wait_on(to.read, (taken / INBOXES - 1) % 2);
      arrive_at(to.there);
    }
  }
  __syncwarp();
  arrive();  // no block ends while another one sends to it
  wait_for_cluster();
}
