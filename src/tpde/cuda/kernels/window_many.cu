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
// Macros: those of window.cuh; NB, rows of x of a tile: 256.

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
many_product(MATRIX, const u8* x, u32 n, u16* __restrict__ y, u64 y_stride, const u16* __restrict__ bias) {
  DYNAMIC_SHARED;
  const Matrix m = THE_MATRIX;
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, stripes = (m.rows + 15) / 16;
  // Tiles of the same stripes follow each other, so that these come from memory once.
  const u32 across = (n + NB - 1) / NB, tiles = (stripes + WIDE - 1) / WIDE * across, start = blockIdx.x, step = gridDim.x;
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
#pragma unroll 1
    for (u32 tile = start; tile < tiles; tile += step) {
      const u8* from = x + (u64)(tile % across) * (4 * m.chunks) * X_PIECE;
#pragma unroll 1
      for (u32 i = 0; i < 4 * m.chunks; i++) {
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
  u32 next_tile = start, next = 0;  // this warp's next chunk, whose entries are in `after`
  Range after = {0, 0};
  const auto advance = [&] {
    if (++next == m.chunks) next = 0, next_tile += step;
    if (next_tile < tiles) after = range_of(m, stripe_of(next_tile), next);
  };
  const Place beginning = place_of(m, stripe_of(start), 0);
#pragma unroll
  for (u32 half = 0; half < 2; half++) {
    fetch_half(to, beginning, half, lane);
    close_copies();
  }
  for (u32 i = lane; i < 2 * HALF_PLANE / 16; i += 32) ((uint4*)planes)[i] = make_uint4(0, 0, 0, 0);
  Records ahead = records_of(m, stripe_of(start), lane);
  Entries now = load_entries(m, range_of(m, stripe_of(start), 0), lane), coming = {0, 0, 0, 0};
  advance();
  __syncwarp();
  Put a = put_of(m, now.first, lane < now.count), b = put_of(m, now.second, lane + 32 < now.count);
  put_entries(planes, m, now, a, b, 0, lane);
  const u64 x_there = descriptor(shared_address(xs), X_STEP);
  u32 parity = 0, stage = 0;
  // Of the last stage: all products of it have ended.
  const auto leave = [&] {
    if (lane == 0) arrive_at(emptied + 8 * ((stage ? stage : STAGES) - 1));
  };
#pragma unroll 1
  for (u32 tile = start; tile < tiles; tile += step) {
    float sum[TILES * 4];
#pragma unroll
    for (u32 t = 0; t < TILES * 4; t++) sum[t] = 0;
    const Rows r = rows_of(ahead, m.zero);
    if (tile + step < tiles) ahead = records_of(m, stripe_of(tile + step), lane);
#pragma unroll 1
    for (u32 i = 0; i < m.chunks; i++) {
      const u32 pairs = pairs_of(m, i);
      coming = {0, 0, 0, 0};
      if (next_tile < tiles) {
        coming = load_entries(m, after, lane);
        advance();
      }
      // The chunk after this one, of this tile or the next one.
      const bool more = i + 1 < m.chunks;
      const u32 then_tile = more ? tile : tile + step, then = more ? i + 1 : 0;
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
          if (i + p) leave();
          if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        __syncwarp();  // the next chunk comes where this one was read
        if (then_tile < tiles) fetch_half(to, place_of(m, stripe_of(then_tile), then), half, lane);
        close_copies();
        wipe_entries(plane, m, now, a, b, half, lane);
      }
      now = coming;
      a = put_of(m, now.first, lane < now.count), b = put_of(m, now.second, lane + 32 < now.count);
    }
    wait_for_products<0>();
    leave();
#pragma unroll
    for (u32 t = 0; t < TILES * 4; t++) keep_register(sum[t]);  // they are read here, not above
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
