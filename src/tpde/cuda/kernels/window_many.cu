// window_many.cu: products of many rows with a matrix in the window layout (docs/windows.md 9), on Hopper GPUs.
//
// A kernel, `arrange`, writes x as `wgmma` takes it, in pieces of 64 columns; `many_product` multiplies. It adds up all
// columns one after the other (9.3): sums of parts would take more registers than there are.
//
// A block takes a tile: eight stripes, one a warp, by NB rows of x. `wgmma` multiplies the words in the registers of a group
// of four warps by x in shared memory. One more warp has pieces of x copied while others are multiplied; they wait for each
// other by barriers in shared memory ("mbarrier").
//
// A warp copies halves of chunks to shared memory, each lane what it reads, and puts the entries of the next half while this
// one is multiplied. Ended sums pass through shared memory, so that 32 bytes are stored together.
//
// Where a last round would leave many blocks without a tile, tiles are cut: a block begins one that the next block ends, and
// writes its sums to memory, from where that one goes on. Columns follow each other as ever.
//
// Macros: those of window.cuh; NB, rows of x of a tile: 256.

#define FLAGS 2048u  // words: whether sums are there, of each block's warps

#include "window.cuh"
#include "hopper.cuh"
#include "window_halves.cuh"

#define TILES (NB / 8u)
#define WIDE 8u    // warps that multiply
#define OTHERS 4u  // and those that do not: registers are shared out by four warps
#define STAGES 4u  // pieces of x in shared memory
#define ENDED 2048u  // bytes of a warp's ended sums: 16 rows of the matrix, 64 of x
#define ROOM (2 * HALF_PLANE + CHUNK_BYTES + ENDED)  // of a warp: two planes of escapes, a chunk, ended sums
// Registers of threads that multiply, and of others. All have 168 at first, and 64 Ki are there.
#define REGISTERS 224
#define OTHER_REGISTERS 56

#define SUM_BYTES (WIDE * NB * 64)  // of a tile

// Chunks of a tile that a block multiplies at a time, of its first warp's stripe and others'.
struct Item {
  u32 tile, chunk, end;
};

// What a block multiplies: tiles that are as far apart as there are blocks, for some rounds. If those that are left are cut,
// each block has as many of their chunks, from one on, as if tiles were in a row: those of one tile at least. There are as
// many tiles as blocks at least.
struct Work {
  u32 chunks, rounds, first, low, high;
};

// Blocks that are in different chunks at a time take longer, the more tiles are cut: they share less of what comes from
// memory. So tiles are cut where less than three quarters of a round are left (many-rows.md).
__device__ __forceinline__ Work work_of(u32 tiles, u32 chunks) {
  const u32 blocks = gridDim.x, over = tiles % blocks;
  if (4 * over >= 3 * blocks) return {chunks, (tiles - blockIdx.x + blocks - 1) / blocks, 0, 0, 0};
  const u32 rounds = tiles / blocks - 1, first = rounds * blocks;
  const u64 left = (u64)(tiles - first) * chunks;
  return {chunks, rounds, first, (u32)(left * blockIdx.x / blocks), (u32)(left * (blockIdx.x + 1) / blocks)};
}

// The item of a number; false if there is none. Of a share, the beginning of a tile that the next block ends comes first,
// and the end of one that the block before has begun last: it is never waited for in a circle. Where not all blocks have
// room at a time, this needs the device to start them in order, as all do, though CUDA does not promise it.
__device__ __forceinline__ bool item_of(u32 tiles, u32 chunks, u32 k, Item& it) {
  const Work w = work_of(tiles, chunks);  // for each item: there are no registers to keep it in
  const u32 from = w.low % w.chunks, to = w.high % w.chunks, last = w.high / w.chunks;
  const u32 begun = to ? 1 : 0, whole = (w.low + w.chunks - 1) / w.chunks;
  if (k < w.rounds) it = {k * gridDim.x + blockIdx.x, 0, w.chunks};
  else if ((k -= w.rounds) < begun) it = {w.first + last, 0, to};
  else if ((k -= begun) < last - whole) it = {w.first + whole + k, 0, w.chunks};
  else if (k == last - whole && from) it = {w.first + whole - 1, from, w.chunks};
  else return false;
  return true;
}

// A chunk of an item, of a stripe, and whether it is there.
struct Cursor {
  u32 stripe, chunk, end, number;
  bool there;
};

// Sums of a tile's beginning, between two blocks: of a warp.
template <typename F>
__device__ __forceinline__ void for_sums(u8* at, float* sum, u32 lane, const F& take) {
  float4* const p = (float4*)at + lane;
#pragma unroll
  for (u32 t = 0; t < TILES; t++) take(p + 32 * t, sum + 4 * t);
}

__device__ __forceinline__ void leave_sums(u8* at, u32* flag, float* sum, u32 lane) {
  for_sums(at, sum, lane, [](float4* p, const float* s) { __stcg(p, make_float4(s[0], s[1], s[2], s[3])); });
  __syncwarp();
  if (lane == 0) {
    __threadfence();
    *(volatile u32*)flag = 1;
  }
}

__device__ __forceinline__ void wait_for_sums(u32* flag, u32 lane) {
  wait_for_last();  // which has cleared the flag
  if (lane == 0) {
    while (!*(volatile u32*)flag) {}
    __threadfence();
  }
  __syncwarp();
}

__device__ __forceinline__ void take_sums(u8* at, float* sum, u32 lane) {
  for_sums(at, sum, lane, [](const float4* p, float* s) {
    const float4 v = __ldcg(p);
    s[0] = v.x, s[1] = v.y, s[2] = v.z, s[3] = v.w;
  });
}

// Copy a lane's share of half a chunk, meanwhile: the codes and half the low bytes, or what is left.
__device__ __forceinline__ void fetch_half(u32 to, const Place& p, u32 half, u32 lane) {
  const u32 at = LOW_AT + 2048 * half, codes = 384 * p.pairs, low = 1024 * (half ? p.pairs - min(p.pairs, 2u) : min(p.pairs, 2u));
  const u8* const from = p.body + codes + 2048 * half;
  if (half == 0)
#pragma unroll
    for (u32 i = 0; i < 3; i++)
      if (!TAIL || 512 * i + 16 * lane < codes) copy_16(to + 512 * i + 16 * lane, p.body + 512 * i + 16 * lane);
#pragma unroll
  for (u32 i = 0; i < 4; i++)
    if (!TAIL || 512 * i + 16 * lane < low) copy_16(to + at + 512 * i + 16 * lane, from + 512 * i + 16 * lane);
}

// Two sums of a row of the matrix, as they are stored.
__device__ __forceinline__ u32 two_ended(float a, float b, float bias, bool add) {
  return rounded(add ? a + bias : a) | (u32)rounded(add ? b + bias : b) << 16;
}

// `y = x W^T + bias`, of rows that were arranged.
extern "C" __global__ void __launch_bounds__(32 * (WIDE + OTHERS), 1)
many_product(MATRIX, u8* x, u32 n, u16* __restrict__ y, u64 y_stride, const u16* __restrict__ bias) {
  DYNAMIC_SHARED;
  const Matrix m = THE_MATRIX;
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, stripes = (m.rows + 15) / 16;
  // Tiles of the same stripes follow each other, so that these come from memory once.
  const u32 across = (n + NB - 1) / NB;
  const u32 tiles = (stripes + WIDE - 1) / WIDE * across;
  u8* const xs = shared;                    // [STAGES] pieces of x
  u8* const rooms = xs + STAGES * X_PIECE;  // [WIDE] what warps have for themselves
  // Barriers: a stage is filled, nobody reads it.
  const u32 filled = shared_address(rooms + WIDE * ROOM), emptied = filled + 8 * STAGES;
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < STAGES; i++) make_barrier(filled + 8 * i, 1), make_barrier(emptied + 8 * i, WIDE);
    fence_shared();
  }
  follow_early();
  __syncthreads();
  if (warp >= WIDE) {
    take_registers<OTHER_REGISTERS, false>();
    if (warp > WIDE) return;
    wait_for_last();  // x was arranged by the last kernel; the weights were not
    u32 stage = 0, parity = 1;
    Item it;
#pragma unroll 1
    for (u32 k = 0; item_of(tiles, m.chunks, k, it); k++) {
      const u8* from = x + ((u64)(it.tile % across) * m.chunks + it.chunk) * (4 * X_PIECE);
#pragma unroll 1
      for (u32 i = 4 * it.chunk; i < 4 * it.end; i++) {
        wait_on(emptied + 8 * stage, parity);  // the first time nobody has read there
        if (lane == 0) {
          expect(filled + 8 * stage, X_PIECE);
          copy_bulk(shared_address(xs) + stage * X_PIECE, from, X_PIECE, filled + 8 * stage);
        }
        __syncwarp();
        from += X_PIECE;
        if (++stage == STAGES) stage = 0, parity ^= 1;
      }
    }
    return;
  }
  take_registers<REGISTERS, true>();
  u8 *const planes = rooms + warp * ROOM, *const held = planes + 2 * HALF_PLANE;
  const u32 to = shared_address(held), made = to + CHUNK_BYTES;
  const auto first_of = [&](u32 tile) { return tile / across * WIDE + warp; };
  const auto stripe_of = [&](u32 tile) { return min(first_of(tile), stripes - 1); };  // or the last again
  Item it;
  item_of(tiles, m.chunks, 0, it);
  Range after = {0, 0};
  const auto next_of = [&](Cursor c) {  // and its range of entries, to `after`
    if (++c.chunk == c.end) {
      Item item = {0, 0, 0};
      c.there = item_of(tiles, m.chunks, ++c.number, item);
      c.stripe = stripe_of(item.tile), c.chunk = item.chunk, c.end = item.end;
    }
    if (c.there) after = range_of(m, c.stripe, c.chunk);
    return c;
  };
  const u32 stripe = stripe_of(it.tile);
  const Place beginning = place_of(m, stripe, it.chunk);
#pragma unroll
  for (u32 half = 0; half < 2; half++) {
    fetch_half(to, beginning, half, lane);
    close_copies();
  }
  for (u32 i = lane; i < 2 * HALF_PLANE / 16; i += 32) ((uint4*)planes)[i] = make_uint4(0, 0, 0, 0);
  Records ahead = records_of(m, stripe, lane);
  Entries now = load_entries(m, range_of(m, stripe, it.chunk), lane), coming = {0, 0, 0, 0};
  Cursor then = next_of({stripe, it.chunk, it.end, 0, true});  // the next chunk
  __syncwarp();
  Put a = put_of(m, now.first, lane < now.count), b = put_of(m, now.second, lane + 32 < now.count);
  put_entries(planes, m, now, a, b, 0, lane);
  const u64 x_there = descriptor(shared_address(xs), X_STEP);
  u32 parity = 0, stage = 0;
  // Of the last stage: all products of it have ended.
  const auto leave = [&] {
    if (lane == 0) arrive_at(emptied + 8 * ((stage ? stage : STAGES) - 1));
  };
  u8* const sums = x + (u64)across * m.chunks * (4 * X_PIECE);
  const auto between = [&](u32 block) { return sums + 4 * FLAGS + (u64)block * SUM_BYTES + warp * (SUM_BYTES / WIDE); };
  const auto flag_of = [&](u32 block) { return (u32*)sums + WIDE * block + warp; };
#pragma unroll 1
  for (u32 number = 0; item_of(tiles, m.chunks, number, it); number++) {
    const u32 tile = it.tile, begin = it.chunk, end = it.end;
    float sum[TILES * 4];
#pragma unroll
    for (u32 t = 0; t < TILES * 4; t++) sum[t] = 0;
    if (begin) {
      wait_for_sums(flag_of(blockIdx.x - 1), lane);
      take_sums(between(blockIdx.x - 1), sum, lane);
    }
    const Rows r = rows_of(ahead, m.zero);
    Item following;
    if (item_of(tiles, m.chunks, number + 1, following)) ahead = records_of(m, stripe_of(following.tile), lane);
    u32 i = begin;
#pragma unroll 1
    do {  // a loop that might be left out would have the compiler wait for each product: sums that are loaded are no zeros
      const u32 pairs = pairs_of(m, i);
      Cursor far = then;
      coming = {0, 0, 0, 0};
      if (then.there) {
        coming = load_entries(m, after, lane);
        far = next_of(then);
      }
      uint4 codes[3] = {};
#pragma unroll
      for (u32 half = 0; half < 2; half++) {
        u8* const plane = planes + half * HALF_PLANE;
        wait_for_copies<1>();
        __syncwarp();  // this half's entries are put, and what other lanes copied has come
        if (half == 0)
#pragma unroll
          for (u32 k = 0; k < 3; k++) codes[k] = take_codes(held, pairs, 4 * k, lane);
#pragma unroll
        for (u32 p = 2 * half; p < 2 * half + 2; p++) {
          const u64 at = x_there + (stage * X_PIECE >> 4);
          Pair pair;
          take_pair(pair, held, pairs, plane, p, lane);
          u32 w[2][8];
#pragma unroll
          for (u32 t = 0; t < 2; t++) words_of(codes, pair, r, p, t, w[t]);
          wait_on(filled + 8 * stage, parity);
          registers_are_set();
#pragma unroll
          for (u32 t = 0; t < 2; t++) multiply_tile(sum, w[t], at, t);
          commit();
          if (p == 0) put_entries(planes + HALF_PLANE, m, now, a, b, 1, lane);
          if (p == 2) {
            const Put c = put_of(m, coming.first, lane < coming.count), d = put_of(m, coming.second, lane + 32 < coming.count);
            put_entries(planes, m, coming, c, d, 0, lane);
          }
          wait_for_products<1>();  // those of the piece before have ended
          if (i > begin || p) leave();
          if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        __syncwarp();  // the next chunk comes where this one was read
        if (then.there) fetch_half(to, place_of(m, then.stripe, then.chunk), half, lane);
        close_copies();
        wipe_entries(plane, m, now, a, b, half, lane);
      }
      now = coming;
      a = put_of(m, now.first, lane < now.count), b = put_of(m, now.second, lane + 32 < now.count);
      then = far;
    } while (++i < end);
    wait_for_products<0>();
    leave();
#pragma unroll
    for (u32 t = 0; t < TILES * 4; t++) keep_register(sum[t]);  // they are read here, not above
    if (end < m.chunks) {
      leave_sums(between(blockIdx.x), flag_of(blockIdx.x), sum, lane);
      continue;
    }
    const u32 row = 16 * first_of(tile), first = tile % across * NB;
    if (row + 16 <= m.rows && y_stride % 8 == 0 && (u64)y % 16 == 0) {
      const bool add = bias;
      const float low = add ? __uint_as_float((u32)__ldg(bias + row + lane / 4) << 16) : 0;
      const float high = add ? __uint_as_float((u32)__ldg(bias + row + lane / 4 + 8) << 16) : 0;
#pragma unroll
      for (u32 t = 0; t < TILES; t += 8) {
        // 64 rows of x: 32 bytes each, whose halves trade places in every other four, so that they meet no bank.
        const u32 k = lane / 16 * 8 + lane % 8, half = lane / 8 % 2 ^ k / 4 % 2;
#pragma unroll
        for (u32 j = 0; j < 8; j += 2) {
          const float* const s = sum + 4 * (t + j);
          store_turned(made + 256 * j + 32 * k + 16 * half, two_ended(s[0], s[1], low, add), two_ended(s[2], s[3], high, add),
                       two_ended(s[4], s[5], low, add), two_ended(s[6], s[7], high, add));
        }
        __syncwarp();
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
          const u32 of = 16 * j + lane / 2, k = first + 8 * t + of;
          const uint4 v = *(const uint4*)(held + CHUNK_BYTES + 32 * of + 16 * (lane % 2 ^ of / 4 % 2));
          if (k < n) *(uint4*)(y + k * y_stride + row + 8 * (lane % 2)) = v;
        }
        __syncwarp();
      }
    } else {
#pragma unroll
      for (u32 t = 0; t < TILES; t++)
        store_ended(y, y_stride, n, m.rows, first + 8 * t + lane % 4 * 2, row + lane / 4, make_float4(sum[4 * t], sum[4 * t + 1], sum[4 * t + 2], sum[4 * t + 3]), bias);
    }
  }
}
