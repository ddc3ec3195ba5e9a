// window_many.cu: products of many rows with a matrix in the window layout (docs/windows.md 9), on Hopper GPUs.
//
// A kernel, `arrange`, writes x as `wgmma` takes it, in pieces of 64 columns; `many_product` multiplies. It adds up all
// columns one after the other, or those of a run (9.3): sums of 9.2's parts would take more registers than there are.
//
// A block takes a tile: WIDE stripes, one a warp, by NB rows of x. `wgmma` multiplies the words in the registers of a group
// of four warps by x in shared memory. One more warp has pieces of x copied while others are multiplied; they wait for each
// other by barriers in shared memory ("mbarrier").
//
// A warp copies halves of chunks to shared memory, each lane what it reads, and puts the entries of the next half while this
// one is multiplied. Ended sums pass through shared memory, so that 32 bytes are stored together.
//
// Where a last round would leave many blocks without a tile, tiles are cut: a block begins one that the next block ends, and
// writes its sums to memory, from where that one goes on. Columns follow each other as ever.
//
// With more blocks than tiles, as many have runs of a tile's columns. Each adds up the sums of some rows of x, in the order of
// runs; those of other rows it writes to memory. It waits a while for the others, not for long: they may not have started.
// Then it gives its own rows up to the last to come.
//
// Macros: those of window.cuh; NB, rows of x of a tile: 128 or 256; WIDE, warps that multiply: 8, or 12 with 128 rows of x.

#define FLAGS (WIDE * 256u)  // words, of warps: whether sums are there, of each block; of how many runs they are, of each tile

#include "window.cuh"
#include "hopper.cuh"
#include "window_halves.cuh"
#include "window_stages.cuh"
#include "window_turned.cuh"
#include "window_arrange.cuh"

#define ROOM (2 * HALF_PLANE + CHUNK_BYTES + ENDED)  // of a warp: two planes of escapes, a chunk, ended sums
#define POLLS 32u  // how often a block looks whether others have come: each takes as long as a load from the cache
#define SUM_BYTES (WIDE * NB * 64)  // of a tile

// Chunks of a tile that a block multiplies at a time, of its first warp's stripe and others'.
struct Item {
  u32 tile, chunk, end;
};

// What a block multiplies, in shared memory, as registers have no room for it: tiles that are as far apart as there are
// blocks, for some rounds, of each the same chunks. There are as many tiles as blocks at least, or each block has a run.
// If tiles that are left are cut, each block has as many of their chunks, from one on, as if tiles were in a row: those of
// one tile at least. So it has the beginning of a tile up to a chunk, if that is not 0, whole ones, and the one before
// these from a chunk on, if that is not 0.
struct Work {
  u32 first, rounds, begin, end, begun, to, whole, wholes, from;
};

// Whether a block has a run of a tile's columns.
__device__ __forceinline__ bool in_runs(u32 tiles) { return gridDim.x > tiles; }

// Blocks that are in different chunks at a time take longer, the more tiles are cut: they share less of what comes from
// memory. So tiles are cut where less than three quarters of a round are left (many-rows.md).
__device__ __forceinline__ Work work_of(u32 tiles, u32 chunks) {
  const u32 blocks = gridDim.x, over = tiles % blocks;
  if (in_runs(tiles)) {
    const u32 runs = blocks / tiles, run = blockIdx.x / tiles;
    return {blockIdx.x % tiles, 1, chunks * run / runs, chunks * (run + 1) / runs, 0, 0, 0, 0, 0};
  }
  if (4 * over >= 3 * blocks) return {blockIdx.x, (tiles - blockIdx.x + blocks - 1) / blocks, 0, chunks, 0, 0, 0, 0, 0};
  const u32 rounds = tiles / blocks - 1, others = rounds * blocks;
  const u64 left = (u64)(tiles - others) * chunks;
  const u32 low = (u32)(left * blockIdx.x / blocks), high = (u32)(left * (blockIdx.x + 1) / blocks);
  const u32 last = high / chunks, whole = (low + chunks - 1) / chunks;
  return {blockIdx.x, rounds, 0, chunks, others + last, high % chunks, others + whole, last - whole, low % chunks};
}

// The item of a number; false if there is none. Of a share, the beginning of a tile that the next block ends comes first,
// and the end of one that the block before has begun last: it is never waited for in a circle. Where not all blocks have
// room at a time, this needs the device to start them in order, as all do, though CUDA does not promise it.
__device__ __forceinline__ bool item_of(const Work& w, u32 k, Item& it) {
  const u32 begun = w.to ? 1 : 0;
  if (k < w.rounds) it = {k * gridDim.x + w.first, w.begin, w.end};
  else if ((k -= w.rounds) < begun) it = {w.begun, 0, w.to};
  else if ((k -= begun) < w.wholes) it = {w.whole + k, 0, w.end};
  else if (k == w.wholes && w.from) it = {w.whole - 1, w.from, w.end};
  else return false;
  return true;
}

// A chunk of an item, of a stripe; `end` is 0 after the last.
struct Cursor {
  u32 stripe, chunk, end, number;
};

// Sums between two blocks, of a warp: of as many tiles of eight rows of x.
template <u32 N, typename F>
__device__ __forceinline__ void for_sums(u8* at, float* sum, u32 lane, const F& take) {
  float4* const p = (float4*)at + lane;
#pragma unroll
  for (u32 t = 0; t < N; t++) take(p + 32 * t, sum + 4 * t);
}

__device__ __forceinline__ void load_sums(const float4* p, float* s) {
  const float4 v = *p;
  s[0] = v.x, s[1] = v.y, s[2] = v.z, s[3] = v.w;
}

template <u32 N> __device__ __forceinline__ void write_sums(u8* at, float* sum, u32 lane) {
  for_sums<N>(at, sum, lane, [](float4* p, const float* s) { __stcg(p, make_float4(s[0], s[1], s[2], s[3])); });
}

template <u32 N> __device__ __forceinline__ void take_sums(u8* at, float* sum, u32 lane) {
  for_sums<N>(at, sum, lane, [](const float4* p, float* s) {
    const float4 v = __ldcg(p);
    s[0] = v.x, s[1] = v.y, s[2] = v.z, s[3] = v.w;
  });
}

// Have the next block go on from a tile's beginning.
__device__ __forceinline__ void leave_sums(u8* at, u32* flag, float* sum, u32 lane) {
  write_sums<TILES>(at, sum, lane);
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

// Count a run whose sums were written; the runs that have given up, by bits, if it is the last, or 1 if others came in time.
#define TOO_EARLY 0u
#define IN_TIME 1u
__device__ __forceinline__ u32 come(u32* count, u32 runs, u32 lane) {
  u32 found = TOO_EARLY;
  wait_for_last();  // which has cleared the count
  __syncwarp();
  if (lane == 0) {
    __threadfence();
    const u32 before = atomicAdd(count, 1u);
    if (before % 256 + 1 == runs) found = before | IN_TIME;
#pragma unroll 1
    for (u32 i = 0; i < POLLS && !found; i++) found = *(volatile u32*)count % 256 == runs;
    __threadfence();
  }
  return __shfl_sync(~0u, found, 0);
}

// Give up what is a run's own and was written; whether all have come just then, and it is to be done here.
__device__ __forceinline__ bool came_late(u32* count, u32 run, u32 runs, u32 lane) {
  u32 before = 0;
  __syncwarp();
  if (lane == 0) {
    __threadfence();
    before = atomicOr(count, 256u << run);
    __threadfence();
  }
  return __shfl_sync(~0u, before, 0) % 256 == runs;
}

// Add up sums of 64 rows of x, of runs that are so many bytes apart; one may be in shared memory.
__device__ __forceinline__ void add_runs(u8* at, u64 apart, u32 runs, u8* own, u32 run, float* sum, u32 lane) {
#pragma unroll
  for (u32 i = 0; i < 32; i++) sum[i] = 0;
#pragma unroll 2
  for (u32 i = 0; i < runs; i++) {
    float one[32];
    if (i == run) for_sums<8>(own, one, lane, load_sums);
    else take_sums<8>(at + i * apart, one, lane);
#pragma unroll
    for (u32 k = 0; k < 32; k++) sum[k] += one[k];
  }
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
  Work& work = *(Work*)(rooms + WIDE * ROOM + 16 * STAGES);
  if (threadIdx.x == 0) {
    work = work_of(tiles, m.chunks);
    make_stages(filled, emptied);
  }
  follow_early();
  __syncthreads();
  if (warp >= WIDE) {
    take_registers<OTHER_REGISTERS, false>();
    if (warp > WIDE) return;
    wait_for_last();  // x was arranged by the last kernel; the weights were not
    Stages at = {filled, emptied, 0, 1};
    Item it;
#pragma unroll 1
    for (u32 k = 0; item_of(work, k, it); k++) {
      const u8* const from = x + ((u64)(it.tile % across) * m.chunks + it.chunk) * (4 * X_PIECE);
      copy_pieces(at, xs, from, it.chunk, it.end, X_PIECE, lane);
    }
    return;
  }
  take_registers<REGISTERS, true>();
  u8 *const planes = rooms + warp * ROOM, *const held = planes + 2 * HALF_PLANE;
  const u32 to = shared_address(held);
  const auto first_of = [&](u32 tile) { return tile / across * WIDE + warp; };
  const auto stripe_of = [&](u32 tile) { return min(first_of(tile), stripes - 1); };  // or the last again
  Item it;
  item_of(work, 0, it);
  Range after = {0, 0};
  const auto next_of = [&](Cursor c) {  // and its range of entries, to `after`
    if (++c.chunk == c.end) {
      Item item = {0, 0, 0};
      item_of(work, ++c.number, item);
      c.stripe = stripe_of(item.tile), c.chunk = item.chunk, c.end = item.end;
    }
    if (c.end) after = range_of(m, c.stripe, c.chunk);
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
  const Entries first_entries = load_entries(m, range_of(m, stripe, it.chunk), lane);
  Cursor then = next_of({stripe, it.chunk, it.end, 0});  // the next chunk
  __syncwarp();
  Escapes now = escapes_of(m, first_entries, lane);
  put_entries(planes, m, now.entries, now.a, now.b, 0, lane);
  const u64 x_there = descriptor(shared_address(xs), X_STEP);
  Stages at = {filled, emptied, 0, 0};
  u8* const sums = x + (u64)across * m.chunks * (4 * X_PIECE);
  const auto between = [&](u32 block) { return sums + 4 * FLAGS + (u64)block * SUM_BYTES + warp * (SUM_BYTES / WIDE); };
  const auto flag_of = [&](u32 block) { return (u32*)sums + WIDE * block + warp; };
#pragma unroll 1
  for (u32 number = 0; item_of(work, number, it); number++) {
    const u32 tile = it.tile, begin = it.chunk, end = it.end;
    float sum[TILES * 4];
#pragma unroll
    for (u32 t = 0; t < TILES * 4; t++) sum[t] = 0;
    if (begin && !in_runs(tiles)) {
      wait_for_sums(flag_of(blockIdx.x - 1), lane);
      take_sums<TILES>(between(blockIdx.x - 1), sum, lane);
    }
    const Rows r = rows_of(ahead, m.zero);
    Item following;
    if (item_of(work, number + 1, following)) ahead = records_of(m, stripe_of(following.tile), lane);
    u32 i = begin;
#pragma unroll 1
    do {  // a loop that might be left out would have the compiler wait for each product: sums that are loaded are no zeros
      const u32 pairs = pairs_of(m, i);
      Cursor far = then;
      Entries coming = {0, 0, 0, 0};
      if (then.end) {
        coming = load_entries(m, after, lane);
        far = next_of(then);
      }
      multiply_chunk(sum, at, x_there, X_STEP, i, begin, planes, held, pairs, r, m, now, m, coming, lane, [&](u32 half) {
        if (then.end) fetch_half(to, place_of(m, then.stripe, then.chunk), half, lane);
      });
      now = escapes_of(m, coming, lane);
      then = far;
    } while (++i < end);
    wait_for_products<0>();
    leave_piece(at, lane);
#pragma unroll
    for (u32 t = 0; t < TILES * 4; t++) keep_register(sum[t]);  // they are read here, not above
    if (end < m.chunks && !in_runs(tiles)) {
      leave_sums(between(blockIdx.x), flag_of(blockIdx.x), sum, lane);
      continue;
    }
    const u32 row = 16 * first_of(tile), first = tile % across * NB;
    const bool turned = row + 16 <= m.rows && y_stride % 8 == 0 && (u64)y % 16 == 0;
    // Write y of eight tiles of eight rows of x, those from `of` on.
    const auto end_rows = [&](const float* sum, u32 of) {
      if (turned) {
        end_turned(sum, held + CHUNK_BYTES, added_to(bias, row, lane), lane, [&](u32 i, u32 from, uint4 v) {
          const u32 k = first + 8 * of + i;
          if (k < n) *(uint4*)(y + k * y_stride + row + from) = v;
        });
      } else {
#pragma unroll
        for (u32 j = 0; j < 8; j++)
          store_ended(y, y_stride, n, m.rows, first + 8 * (of + j) + lane % 4 * 2, row + lane / 4,
                      make_float4(sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]), bias);
      }
    };
    if (!in_runs(tiles)) {
#pragma unroll
      for (u32 t = 0; t < TILES; t += 8) end_rows(sum + 4 * t, t);
      continue;
    }
    const u32 runs = gridDim.x / tiles, run = blockIdx.x / tiles;
    const auto owner_of = [&](u32 t) { return (t / 8 + warp) % runs; };
    const auto kept = [&](u32 t) { return planes + 4096 * (t / 8 / runs); };  // its own rows, where escapes and a chunk were
    __syncwarp();  // no lane wipes escapes any more
#pragma unroll
    for (u32 t = 0; t < TILES; t += 8) {
      if (first + 8 * t >= n) continue;
      if (owner_of(t) == run)
        for_sums<8>(kept(t), sum + 4 * t, lane, [](float4* p, const float* s) { *p = make_float4(s[0], s[1], s[2], s[3]); });
      else write_sums<8>(between(blockIdx.x) + 512 * t, sum + 4 * t, lane);
    }
    u32* const count = flag_of(tile);
    u32 came = come(count, runs, lane);
    float all[8 * 4];
    if (came == TOO_EARLY) {
#pragma unroll 1
      for (u32 t = 0; t < TILES && first + 8 * t < n; t += 8) {
        if (owner_of(t) != run) continue;
        for_sums<8>(kept(t), all, lane, load_sums);
        write_sums<8>(between(blockIdx.x) + 512 * t, all, lane);
      }
      if (!came_late(count, run, runs, lane)) return;
    }
#pragma unroll 1
    for (u32 t = 0; t < TILES && first + 8 * t < n; t += 8) {
      const u32 owner = owner_of(t);
      if (owner != run && !(came >> owner & 256)) continue;
      add_runs(between(tile) + 512 * t, (u64)tiles * SUM_BYTES, runs, kept(t), owner == run ? run : ~0u, all, lane);
      end_rows(all, t);
    }
    return;
  }
}
