// window_wide.cu: products of up to 128 rows with a matrix in the window layout (docs/windows.md 9), on Hopper GPUs.
//
// Eight blocks, a cluster, take four stripes at a time together, a turn, each of them one part of their columns. A group of
// four warps multiplies a turn: `wgmma` multiplies the words in their registers by x in shared memory, and adds 16 products
// at a time to the bits that `mma.m16n8k16` gives. Groups of a block take turns. The eight partial sums of a stripe and
// eight rows of x go to one block of the cluster, which ends them.
//
// A block has MULTIPLIERS warps that multiply, and four more, which copy x, add partial sums up, and store y. A piece of x,
// 64 columns, is multiplied while the ones after it are copied; where there is room for all pieces of a part, each is
// copied once. All wait for each other by barriers in shared memory ("mbarrier").
//
// Macros: those of window.cuh; NB, the most rows of x: 64 or 128; MULTIPLIERS, 8 or 12; STAGES, how many pieces of x are in
// shared memory; STREAMS, whether a part has more; INBOXES, how many turns' partial sums there is room for.

#include "window.cuh"
#include "hopper.cuh"

#define OTHERS 4u  // warps that do not multiply
#define ALL_WARPS (MULTIPLIERS + OTHERS)
#define GROUPS (MULTIPLIERS / 4u)
#define TILES (NB / 8u)
#define SUMS 512u                        // bytes of a part's sums of a stripe and eight rows of x
#define SLOTS (4 * TILES / CLUSTER)      // of those that a block ends in a turn
#define INBOX (SLOTS * PARTS * SUMS)
// Barriers of room for sums: a turn's group waits for each of its own once, whichever groups were there before.
#define ROOMS (INBOXES % GROUPS == 0 ? INBOXES : GROUPS % INBOXES == 0 ? GROUPS : INBOXES * GROUPS)
#define HALF_PLANE 2048u                 // bytes: the places of half a chunk
#define WARP_ROOM (HALF_PLANE + CHUNK_BYTES)
#define X_STEP (NB * 16u)                // bytes between the words that wgmma takes of columns 0 to 7 and 8 to 15
#define X_TILE (4 * X_STEP)
#define X_PIECE (2 * X_TILE)
#define UNITS (NB / 16u)  // 16 bytes of a piece that a thread copies
// Registers of threads that multiply, and of others. All have 168 or 128 at first, and 64 Ki are there.
#define REGISTERS (MULTIPLIERS == 12 ? 136 : 200)
#define OTHER_REGISTERS 104

// ---- x ----

// Rows of x, where they lie, and how many columns can be read.
struct X {
  const u16* at;
  u64 stride;
  u32 rows, columns;
};

// What a warp copies of a piece: eight rows of a tile at a time, lane / 4 the row, lane % 4 an octet of columns.
__device__ __forceinline__ void load_x(uint4* v, const X& x, u32 chunk, u32 piece, u32 warp, u32 lane) {
#pragma unroll
  for (u32 i = 0; i < UNITS; i++) {
    const u32 unit = OTHERS * i + warp, row = unit / 2 * 8 + lane / 4;
    const u32 column = 256 * chunk + 64 * piece + unit % 2 * 32 + lane % 4 * 8;
    v[i] = make_uint4(0, 0, 0, 0);
    if (row < x.rows && column < x.columns) v[i] = load_16(x.at + row * x.stride + column);
  }
}

// wgmma takes elements 0 to 3 of an octet q as columns 2q, 2q + 1, 2q + 8, 2q + 9 of the first product, 4 to 7 as those of
// the second one (windows.md 2.2).
__device__ __forceinline__ void store_x(u32 to, const uint4* v, u32 warp, u32 lane) {
  const u32 at = to + lane / 8 * X_STEP + lane % 8 * 16;
#pragma unroll
  for (u32 i = 0; i < UNITS; i++) {
    const u32 unit = OTHERS * i + warp;
    store_blocks(at + unit % 2 * X_TILE + unit / 2 * 128, v[i].x, v[i].y, v[i].z, v[i].w);
  }
}

// ---- decoding ----

// An entry as it is put: its place, or NOWHERE, and what is XORed to the word there.
struct Put {
  u32 place, value;
};

#define NOWHERE 0x1000u

__device__ __forceinline__ Put put_of(const Matrix& m, u32 entry, bool there) {
  return {there ? entry & 4095 : NOWHERE, xor_of(m, entry) << entry % 4 * 8};
}

__device__ __forceinline__ void put_half(u8* plane, const Put& a, u32 half) {
  if (a.place >> 11 == half) atomicXor((u32*)plane + (a.place & 2047) / 4, a.value);
}

__device__ __forceinline__ void wipe_half(u8* plane, const Put& a, u32 half) {
  if (a.place >> 11 == half) plane[a.place & 2047] = 0;
}

// Have a function take the entries after a chunk's first 64.
template <typename F>
__device__ __forceinline__ void for_more(const Matrix& m, u32 stripe, u32 chunk, u32 lane, const F& take) {
  const Range r = range_of(m, stripe, chunk);
#pragma unroll 1
  for (u32 i = r.at + lane + 64; i < r.end; i += 32) take(__ldg((const u16*)m.entries + i));
}

// Where a lane's words lie in a chunk of so many pairs: without branches, which would have products wait for each other.
struct Lane {
  u32 codes, low, step;
};

__device__ __forceinline__ Lane lane_of(u32 pairs, u32 lane) {
  if (pairs == 4) return {16 * lane, 1536 + 16 * lane, 4};
  return {4 * lane, 384 * pairs + 4 * lane, 128};
}

// Four code words, from the one numbered k on. Words of columns beyond a chunk's pairs are as padding is, finite numbers.
__device__ __forceinline__ uint4 take_codes(const u8* from, const Lane& at, u32 pairs, u32 k) {
#if TAIL
  u32 v[4];
#pragma unroll
  for (u32 i = 0; i < 4; i++) {
    const u32 word = *(const u32*)(from + at.codes + 128 * (at.step == 4 ? k : k + i) + (at.step == 4 ? 4 * i : 0));
    v[i] = k + i < 3 * pairs ? word : 0;
  }
  return make_uint4(v[0], v[1], v[2], v[3]);
#else
  return *(const uint4*)(from + at.codes + 128 * k);
#endif
}

// The low bytes of tile j.
__device__ __forceinline__ uint4 take_low(const u8* from, const Lane& at, u32 pairs, u32 j) {
#if TAIL
  u32 v[4];
#pragma unroll
  for (u32 i = 0; i < 4; i++) {
    const u32 word = *(const u32*)(from + at.low + 512 * j + at.step * i);
    v[i] = j < 2 * pairs ? word : 0;
  }
  return make_uint4(v[0], v[1], v[2], v[3]);
#else
  return *(const uint4*)(from + at.low + 512 * j);
#endif
}

// Bytes of a chunk's body before the second half of its low bytes.
__device__ __forceinline__ u32 first_bytes(u32 pairs) { return 384 * pairs + 1024 * min(pairs, 2u); }

// Copy half a chunk to shared memory, meanwhile, and tell a barrier: the codes and half the low bytes, or what is left.
__device__ __forceinline__ void bring_half(u32 to, u32 barrier, const Matrix& m, u32 stripe, u32 chunk, u32 half, u32 lane) {
  const u32 pairs = pairs_of(m, chunk), split = first_bytes(pairs), all = PAIR_BYTES * pairs;
  const u32 at = half ? split : 0, bytes = half ? all - split : split;
  if (lane || !bytes) return;
  expect(barrier, bytes);
  copy_bulk(to + at, body_of(m, stripe, chunk) + at, bytes, barrier);
}

// ---- products ----

// d += A x, of 64 rows by 16 columns by NB: a lane has four words of A, and of d what it has with mma.m16n8k16.
__device__ __forceinline__ void wgmma(float* d, u32 a, u32 b, u32 c, u32 e, u64 x) {
#if NB == 64
  wgmma_64(d, a, b, c, e, x);
#else
  wgmma_128(d, a, b, c, e, x);
#endif
}

// As `product` of window.cu.
extern "C" __global__ void __launch_bounds__(32 * ALL_WARPS, 1)
wide_product(MATRIX, const u16* x_at, u64 x_stride, u32 n, u16* __restrict__ y, u64 y_stride, const u16* __restrict__ bias) {
  DYNAMIC_SHARED;
  const Matrix m = THE_MATRIX;
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, stripes = (m.rows + 15) / 16;
  const u32 part = rank_in_cluster();
  // This block's chunks of a stripe are `part`, `part + PARTS`, ... A turn takes four stripes, the first one from `start`
  // on; a round is a turn of each group, which passes over x once.
  const u32 own = (m.chunks - part + PARTS - 1) / PARTS;
  const u32 step = gridDim.x / CLUSTER * 4, start = blockIdx.x / CLUSTER * 4;
  const u32 turns = (stripes - start + step - 1) / step;
  u8* const xs = shared;                        // [STAGES] pieces of x
  u8* const inbox = xs + STAGES * X_PIECE;      // [INBOXES][SLOTS][PARTS] partial sums that this block adds up, 16 bytes a lane
  u8* const rooms = inbox + INBOXES * INBOX;    // [MULTIPLIERS] planes of escapes, and chunks
  // Barriers: an inbox is full, all have read theirs, halves of a warp's chunk have come, a stage is filled, nobody reads it.
  const u32 full = shared_address(rooms + MULTIPLIERS * WARP_ROOM), read = full + 8 * INBOXES;
  const u32 come = read + 8 * ROOMS + 16 * warp, filled = read + 8 * (ROOMS + 2 * MULTIPLIERS), emptied = filled + 8 * STAGES;
  const auto chunk_of = [&](u32 i) { return part + PARTS * i; };
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < INBOXES; i++) make_barrier(full + 8 * i, 1);
    for (u32 i = 0; i < ROOMS; i++) make_barrier(read + 8 * i, CLUSTER * OTHERS);
    for (u32 i = 0; i < STAGES; i++) make_barrier(filled + 8 * i, OTHERS), make_barrier(emptied + 8 * i, MULTIPLIERS);
    fence_barriers();
    for (u32 i = 0; i < INBOXES; i++) expect(full + 8 * i, INBOX);
  }
  follow_early();
  if (warp >= MULTIPLIERS) {
    __syncthreads();
    arrive();
    take_registers<OTHER_REGISTERS, false>();
    const u32 other = warp - MULTIPLIERS;
    wait_for_last();  // x is the last kernel's; the weights are not
    const X x = {x_at, x_stride, n, (m.columns + 7) / 8 * 8};
    // Add up a turn's partial sums, and store y.
    const auto end = [&](u32 turn) {
      const u32 box = turn % INBOXES;
      float4 sum[SLOTS / OTHERS];
      wait_on(full + 8 * box, turn / INBOXES % 2);
#pragma unroll
      for (u32 i = 0; i < SLOTS / OTHERS; i++) {
        const float4* const p = (const float4*)(inbox + box * INBOX) + (OTHERS * i + other) * PARTS * 32 + lane;
        float4 v[PARTS];
#pragma unroll
        for (u32 j = 0; j < PARTS; j++) v[j] = p[32 * j];
        sum[i] = pairwise(v);
        keep_register(sum[i].x), keep_register(sum[i].y), keep_register(sum[i].z), keep_register(sum[i].w);
      }
      if (turn + INBOXES < turns) {
        if (threadIdx.x == 32 * MULTIPLIERS) expect(full + 8 * box, INBOX);
        __syncwarp();
        if (lane < CLUSTER) arrive_in(read + 8 * ((turn + INBOXES) % ROOMS), lane);
      }
#pragma unroll
      for (u32 i = 0; i < SLOTS / OTHERS; i++) {
        // A stripe of the turn, and eight rows of x.
        const u32 pair = (OTHERS * i + other) * CLUSTER + part, k = pair % TILES * 8 + lane % 4 * 2;
        const u32 row = 16 * (start + turn * step + pair / TILES) + lane / 4;
        const float4 s = sum[i];
        if (k >= n || row >= m.rows) continue;
        u16* const to = y + k * y_stride + row;
        to[0] = ended(s.x, bias, row);
        if (k + 1 < n) to[y_stride] = ended(s.y, bias, row);
        if (row + 8 >= m.rows) continue;
        to[8] = ended(s.z, bias, row + 8);
        if (k + 1 < n) to[y_stride + 8] = ended(s.w, bias, row + 8);
      }
    };
    // Copy pieces of x; one comes while the one before it is stored, where nobody reads.
    const u32 pass = 4 * own, steps = STREAMS ? (turns + GROUPS - 1) / GROUPS * pass : pass;
    u32 stage = 0, parity = 1, next = 0, over = 0, bound = STAGES + pass;  // steps after which a round has been multiplied
    uint4 v[2][UNITS];
    const auto load = [&](uint4* to) {
      load_x(to, x, chunk_of(next / 4), next % 4, other, lane);
      if (++next == pass) next = 0;
    };
    load(v[0]);
    wait_for_cluster();  // all have their barriers
#pragma unroll 1
    for (u32 s = 0; s < steps; s += 2) {
#pragma unroll
      for (u32 h = 0; h < 2; h++) {
        if (s + h + 1 < steps) load(v[1 - h]);
        if (STREAMS && s + h >= STAGES) wait_on(emptied + 8 * stage, parity);
        store_x(shared_address(xs) + stage * X_PIECE, v[h], other, lane);
        fence_shared();
        __syncwarp();
        if (lane == 0) arrive_at(filled + 8 * stage);
        if (++stage == STAGES) stage = 0, parity ^= 1;
        if (STREAMS && s + h + 1 == bound) {
          bound += pass;
          for (u32 i = 0; i < GROUPS; i++) end(over++);
        }
      }
    }
    while (over < turns) end(over++);
  } else {
    const u32 group = warp / 4, beside = warp % 4;
    u8 *const plane = rooms + warp * WARP_ROOM, *const held = plane + HALF_PLANE;
    const auto stripe_of = [&](u32 turn) { return min(start + turn * step + beside, stripes - 1); };  // or the last again
    // A chunk of this warp's: of which turn, and which of the part's.
    u32 next_turn = group, next = 0;
    const auto advance = [&] {
      if (++next == own) next = 0, next_turn += GROUPS;
    };
    if (lane == 0) {
      make_barrier(come, 1), make_barrier(come + 8, 1);
      fence_shared();
    }
    for (u32 i = lane; i < HALF_PLANE / 16; i += 32) ((uint4*)plane)[i] = make_uint4(0, 0, 0, 0);
    __syncwarp();
    Entries coming = {0, 0, 0, 0};
    Range after = {0, 0};
    Records ahead = {0, 0};
    if (group < turns) {
      bring_half(shared_address(held), come, m, stripe_of(group), part, 0, lane);
      bring_half(shared_address(held), come + 8, m, stripe_of(group), part, 1, lane);
      ahead = records_of(m, stripe_of(group), lane);
      coming = load_entries(m, range_of(m, stripe_of(group), part), lane);
      advance();
      if (next_turn < turns) after = range_of(m, stripe_of(next_turn), chunk_of(next));
    }
    __syncthreads();
    arrive();
    take_registers<REGISTERS, true>();
    wait_for_cluster();
    const uint2* const escapes = (const uint2*)plane + lane;
    u32 parities = 0, stage = 0, again = 0;
#pragma unroll 1
    for (u32 turn = group; turn < turns; turn += GROUPS) {
      float sum[TILES * 4];
#pragma unroll
      for (u32 t = 0; t < TILES * 4; t++) sum[t] = 0;
      const Rows r = rows_of(ahead, m.zero);
      if (turn + GROUPS < turns) ahead = records_of(m, stripe_of(turn + GROUPS), lane);
#if !STREAMS
      stage = 0;
#endif
#pragma unroll 1
      for (u32 i = 0; i < own; i++) {
        const u32 pairs = pairs_of(m, chunk_of(i));
        const Lane at_lane = lane_of(pairs, lane);
        const Put a = put_of(m, coming.first, lane < coming.count), b = put_of(m, coming.second, lane + 32 < coming.count);
        const bool more = coming.count > 64;
        const u32 from_turn = next_turn, from = next;  // the chunk after this one
        const bool there = next_turn < turns;
        if (there) {
          coming = load_entries(m, after, lane);
          advance();
          if (next_turn < turns) after = range_of(m, stripe_of(next_turn), chunk_of(next));
        }
        uint4 codes[3] = {};
        const auto code = [&](u32 k) { return k % 4 == 0 ? codes[k / 4].x : k % 4 == 1 ? codes[k / 4].y : k % 4 == 2 ? codes[k / 4].z : codes[k / 4].w; };
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
          // The plane is XORed with the entries of half a chunk.
          put_half(plane, a, half), put_half(plane, b, half);
          if (more) for_more(m, stripe_of(turn), chunk_of(i), lane, [&](u32 entry) { put_half(plane, put_of(m, entry, true), half); });
          __syncwarp();
          if (half == 0 || pairs > 2) {
            wait_on(come + 8 * half, parities >> half & 1);
            parities ^= 1 << half;
          }
          if (half == 0)
#pragma unroll
            for (u32 k = 0; k < 3; k++) codes[k] = take_codes(held, at_lane, pairs, 4 * k);
#pragma unroll
          for (u32 p = 2 * half; p < 2 * half + 2; p++) {
            u32 w[16];
#pragma unroll
            for (u32 t = 0; t < 2; t++)
              tile_of(t, code(3 * p), code(3 * p + 1), code(3 * p + 2), take_low(held, at_lane, pairs, 2 * p + t), r,
                      escapes + 64 * (2 * p + t - 4 * half), w + 8 * t);
            wait_on(filled + 8 * stage, again);
            const u32 at = shared_address(xs) + stage * X_PIECE;
            registers_are_set();
#pragma unroll
            for (u32 k = 0; k < 4; k++)
              wgmma(sum, w[8 * (k / 2) + k % 2 * 2], w[8 * (k / 2) + 4 + k % 2 * 2], w[8 * (k / 2) + 1 + k % 2 * 2],
                    w[8 * (k / 2) + 5 + k % 2 * 2], descriptor(at + 2 * k * X_STEP, X_STEP));
            commit();
            wait_for_products<1>();  // those of the piece before have ended
#if STREAMS
            if (i + p && lane == 0) arrive_at(emptied + 8 * ((stage ? stage : STAGES) - 1));
            if (++stage == STAGES) stage = 0, again ^= 1;
#else
            stage++;
#endif
          }
#ifdef FENCE
          fence_shared();
#endif
          __syncwarp();  // the next chunk comes where this one was read
          if (there) bring_half(shared_address(held), come + 8 * half, m, stripe_of(from_turn), chunk_of(from), half, lane);
          wipe_half(plane, a, half), wipe_half(plane, b, half);
          if (more) for_more(m, stripe_of(turn), chunk_of(i), lane, [&](u32 entry) { wipe_half(plane, {entry & 4095, 0}, half); });
          __syncwarp();
        }
      }
      wait_for_products<0>();
#if STREAMS
      if (lane == 0) arrive_at(emptied + 8 * ((stage ? stage : STAGES) - 1));
#endif
#pragma unroll
      for (u32 t = 0; t < TILES * 4; t++) keep_register(sum[t]);  // they are read below, not above
      const u32 box = turn % INBOXES, to = shared_address(inbox) + box * INBOX + part * SUMS + 16 * lane;
      if (turn >= INBOXES) wait_on(read + 8 * (turn % ROOMS), (turn / ROOMS - (turn % ROOMS < INBOXES)) % 2);
#pragma unroll
      for (u32 t = 0; t < TILES; t++) {
        const u32 pair = beside * TILES + t, block = pair % CLUSTER;
        send(in_block(to + pair / CLUSTER * PARTS * SUMS, block), in_block(full + 8 * box, block), sum + 4 * t);
      }
    }
#if STREAMS
    if (turns % GROUPS && group >= turns % GROUPS)  // others have one turn more
#pragma unroll 1
      for (u32 i = 0; i < 4 * own; i++) {
        wait_on(filled + 8 * stage, again);
        if (lane == 0) arrive_at(emptied + 8 * stage);
        if (++stage == STAGES) stage = 0, again ^= 1;
      }
#endif
  }
  __syncwarp();
  arrive();  // no block ends while another one sends to it
  wait_for_cluster();
}
