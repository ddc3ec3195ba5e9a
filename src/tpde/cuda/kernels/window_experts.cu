// window_experts.cu: weights of experts, each of which lies in the window layout (docs/windows.md): products with rows of x
// that a router has sent to experts, and the weights plain.
//
// All matrices of a weight have one shape. An expert has one, or several below each other, as gate and up of a checkpoint.
// A product's block makes the list of what there is to do itself, from the router's numbers: nobody waits for them.
//
// Macros: those of window.cuh, without ZERO. Of products: NB, 8 or 16, rows of x at a time; BLOCKS of a multiprocessor.

#include "window.cuh"

#define WARPS 8u  // of a block

// One matrix, as src/tpde/cuda/window_experts.py writes it.
struct Held {
  u64 records, offsets, entries, bodies;  // addresses
  u64 table[2];
  u64 zero, unused;
};

__device__ __forceinline__ Matrix matrix_of(const Held* held, u32 number, u32 rows, u32 columns) {
  const Held* const p = held + number;
  return {__ldg(&p->records), __ldg(&p->offsets), __ldg(&p->entries), __ldg(&p->bodies),
          {__ldg(&p->table[0]), __ldg(&p->table[1])}, rows, columns, (columns + 255) / 256, (columns + 63) / 64,
          (u32)__ldg(&p->zero)};
}

// ---- plain ----

// A chunk of an expert.
struct Place { u32 expert, part, stripe, chunk; };

// Decode `count` experts to `out`, the first word of expert 0: those of `numbers`, or without, those from `first` on. Rows
// of `rows` x `columns`, `parts` of them below each other; TURNED: an expert is stored as columns, of one part.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 2)
experts_rows(const Held* held, u32 parts, u32 rows, u32 columns, const u32* __restrict__ numbers, u32 first, u32 count,
             u16* __restrict__ out, u32 turned) {
  DYNAMIC_SHARED;
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, step = gridDim.x * WARPS;
  const u32 stripes = (rows + 15) / 16, chunks = (columns + 255) / 256, all = count * parts * stripes * chunks;
  u8 *const plane = shared + warp * (PLANE + CHUNK_BYTES), *const held_chunk = plane + PLANE;
  const uint2* const escapes = (const uint2*)plane + lane;
  clear(plane, lane);
  const auto place = [&](u32 i) -> Place {
    const u32 chunk = i % chunks, above = i / chunks, stripe = above % stripes, matrix = above / stripes;
    const u32 index = matrix / parts;
    return {numbers ? __ldg(numbers + index) : first + index, matrix % parts, stripe, chunk};
  };
  const auto matrix = [&](const Place& p) { return matrix_of(held, p.expert * parts + p.part, rows, columns); };
  u32 i = blockIdx.x * WARPS + warp;
  if (i >= all) return;
  Place now = place(i);
  Entries coming;
  {
    const Matrix m = matrix(now);
    coming = load_entries(m, range_of(m, now.stripe, now.chunk), lane);
    fetch(held_chunk, m, now.stripe, now.chunk, lane);
  }
  Place next = place(i + step < all ? i + step : i);
  Range after = range_of(matrix(next), next.stripe, next.chunk);
  for (; i < all; i += step) {
    const Entries e = coming;
    const Matrix m = matrix(now);
    Chunk c;
    wait_for_fetched();
    take(c, held_chunk, pairs_of(m, now.chunk), lane);
    scatter(e, plane, m, lane);
    const Place here = now;
    if (i + step < all) {
      const Matrix n = matrix(next);
      coming = load_entries(n, after, lane);
      fetch(held_chunk, n, next.stripe, next.chunk, lane);
      now = next;
      if (i + 2 * step < all) {
        next = place(i + 2 * step);
        after = range_of(matrix(next), next.stripe, next.chunk);
      }
    }
    const Rows r = rows_of(records_of(m, here.stripe, lane), m.zero);
    const u32 row = 16 * here.stripe + lane / 4, tiles = 2 * pairs_of(m, here.chunk);
    u16* const expert = out + ((u64)here.expert * parts + here.part) * rows * columns;
#pragma unroll
    for (u32 j = 0; j < 8; j++) {
      if (TAIL && j >= tiles) break;
      u32 w[8];
      tile(c, j, r, escapes, w);
      const u32 column = 256 * here.chunk + 32 * j + lane % 4 * 8;
#pragma unroll
      for (u32 half = 0; half < 2; half++) {
        if (row + 8 * half >= rows) continue;
        const u32* const v = w + 4 * half;
        u16* const to = turned ? expert + (u64)column * rows + row + 8 * half : expert + (u64)(row + 8 * half) * columns + column;
        if (!turned && columns % 8 == 0 && (u64)expert % 16 == 0) {
          if (!TAIL || column < columns) __stcs((uint4*)to, make_uint4(v[0], v[1], v[2], v[3]));
        } else {
          const u64 apart = turned ? rows : 1;
#pragma unroll
          for (u32 k = 0; k < 8; k++)
            if (!TAIL || column + k < columns) to[k * apart] = (u16)(v[k / 2] >> k % 2 * 16);
        }
      }
    }
    wipe(e, plane, m, lane);
  }
}

// ---- products, 9 ----

#ifdef NB
#define TILES (NB / 8)  // of mma, beside each other

// What a warp fetches next: a chunk of a stripe, for some rows of x.
struct Visit { u32 item, group, chunk, rows, matrix, stripe; };

// y = x W^T + bias, row by row: row i of y is of row i / `per` of x and of expert `ids[i]`. The number after the last stands
// for none, and gives zeros. Rows of x lie at multiples of 16 bytes; so many words of each are read as a matrix has columns,
// and zeros to a multiple of 8. An expert's rows of y and bias are `parts` x `rows` long.
extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
experts_product(const Held* held, u32 experts, u32 parts, u32 rows, u32 columns, const u16* x, u64 x_stride,
                u32 per, const long long* ids, u32 count, u16* __restrict__ y, const u16* __restrict__ bias) {
  DYNAMIC_SHARED;
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, width = parts * rows;
  const u32 chunks = (columns + 255) / 256, sums_of_row = min(chunks, PARTS), side = WARPS / sums_of_row;
  const u32 part = warp % sums_of_row, slot = warp / sums_of_row;  // `side` stripes are beside each other
  const u32 readable = (columns + 7) / 8 * 8;
  u8 *const plane = shared + warp * (PLANE + CHUNK_BYTES), *const held_chunk = plane + PLANE;
  float* const sums = (float*)(shared + WARPS * (PLANE + CHUNK_BYTES));  // [2][WARPS][TILES][16][8]
  u32* const found = (u32*)(sums + 2 * WARPS * TILES * 128);             // how many experts are used
  u32* const ends = found + 1;                                           // where in `order` each expert's rows end
  u16* const used = (u16*)(ends + experts);                              // which are
  u16* const order = used + experts;                                     // rows of y by experts
  const uint2* const escapes = (const uint2*)plane + lane;
  clear(plane, lane);
  for (u32 e = threadIdx.x; e < experts; e += 32 * WARPS) ends[e] = 0;
  __syncthreads();
  follow();  // x and numbers are the last kernel's
  for (u32 i = threadIdx.x; i < count; i += 32 * WARPS) {
    const u64 id = (u64)ids[i];
    if (id > experts) trap();
    if (id < experts) atomicAdd(ends + id, 1u);
  }
  __syncthreads();
  if (warp == 0) {  // counts become places; blocks agree on the order of experts
    u32 before = 0, number = 0;
    for (u32 first = 0; first < experts; first += 32) {
      const u32 e = first + lane, mine = e < experts ? ends[e] : 0;
      u32 sum = mine;
#pragma unroll
      for (u32 far = 1; far < 32; far *= 2) {
        const u32 other = __shfl_up_sync(ALL, sum, far);
        if (lane >= far) sum += other;
      }
      const u32 some = __ballot_sync(ALL, mine != 0);
      if (mine) used[number + __popc(some & ((1u << lane) - 1))] = (u16)e;
      if (e < experts) ends[e] = before + sum - mine;
      before += __shfl_sync(ALL, sum, 31);
      number += __popc(some);
    }
    if (lane == 0) *found = number;
  }
  __syncthreads();
  for (u32 i = threadIdx.x; i < count; i += 32 * WARPS) {
    const u64 id = (u64)ids[i];
    if (id < experts) order[atomicAdd(ends + id, 1u)] = (u16)i;  // in any order: a row's sum has no other row
  }
  __syncthreads();
  if (blockIdx.x == 0 && ends[experts - 1] < count)
    for (u32 i = 0; i < count; i++)
      if ((u64)ids[i] >= experts)
        for (u32 j = threadIdx.x; j < width; j += 32 * WARPS) y[(u64)i * width + j] = 0;

  // An item is a slab of an expert that is used, `side` stripes of it: this block's are every gridDim.x'th.
  const u32 stripes = (rows + 15) / 16, every = parts * stripes, slabs = (every + side - 1) / side;
  const u32 items = *found * slabs;
  const auto begin_of = [&](u32 expert) { return expert ? ends[expert - 1] : 0; };
  // The first item from one on of which this warp has a stripe.
  const auto enter = [&](u32 item) -> Visit {
    while (slot < side && item < items && item % slabs * side + slot >= every) item += gridDim.x;
    if (slot >= side || item >= items) return {items, 0, 0, 0, 0, 0};
    const u32 expert = used[item / slabs], stripe = item % slabs * side + slot;
    return {item, 0, part, ends[expert] - begin_of(expert), expert * parts + stripe / stripes, stripe % stripes};
  };
  const auto advance = [&](Visit& v) {
    v.chunk += PARTS;
    if (v.chunk < chunks) return;
    v.chunk = part;
    v.group += NB;
    if (v.group >= v.rows) v = enter(v.item + gridDim.x);
  };
  const auto range = [&](const Visit& v) { return range_of(matrix_of(held, v.matrix, rows, columns), v.stripe, v.chunk); };
  Visit next = enter(blockIdx.x);
  Entries coming = {0, 0, 0, 0};
  Range after = {0, 0};
  if (next.item < items) {
    const Matrix m = matrix_of(held, next.matrix, rows, columns);
    coming = load_entries(m, range_of(m, next.stripe, next.chunk), lane);
    fetch(held_chunk, m, next.stripe, next.chunk, lane);
    advance(next);
    if (next.item < items) after = range(next);
  }
  u32 turn = 0;
  for (u32 item = blockIdx.x; item < items; item += gridDim.x) {
    const u32 expert = used[item / slabs], slab = item % slabs, own = slab * side + slot, end = ends[expert];
    const bool works = slot < side && own < every;
    for (u32 first = begin_of(expert); first < end; first += NB, turn ^= 1) {
      const u32 n = min(end - first, (u32)NB);
      float sum[TILES][4];
#pragma unroll
      for (u32 t = 0; t < TILES; t++) sum[t][0] = sum[t][1] = sum[t][2] = sum[t][3] = 0;
      if (works) {
        const Matrix m = matrix_of(held, expert * parts + own / stripes, rows, columns);
        const Rows r = rows_of(records_of(m, own % stripes, lane), m.zero);
        const u16* xs[TILES];
#pragma unroll
        for (u32 t = 0; t < TILES; t++) {
          const u32 k = 8 * t + lane / 4;
          xs[t] = k < n ? x + order[first + k] / per * x_stride + lane % 4 * 8 : 0;
        }
#pragma unroll 1
        for (u32 chunk = part; chunk < chunks; chunk += PARTS) {
          const Entries e = coming;
          Chunk c;
          wait_for_fetched();
          take(c, held_chunk, pairs_of(m, chunk), lane);
          scatter(e, plane, m, lane);
          if (next.item < items) {
            const Matrix o = matrix_of(held, next.matrix, rows, columns);
            coming = load_entries(o, after, lane);
            fetch(held_chunk, o, next.stripe, next.chunk, lane);
            advance(next);
            if (next.item < items) after = range(next);
          }
          const u32 tiles = 2 * pairs_of(m, chunk);
#pragma unroll
          for (u32 j = 0; j < 8; j++) {
            if (TAIL && j >= tiles) break;
            u32 w[8];
            tile(c, j, r, escapes, w);
            const u32 column = 256 * chunk + 32 * j;
#pragma unroll
            for (u32 t = 0; t < TILES; t++) {
              uint4 v = make_uint4(0, 0, 0, 0);
              if (xs[t] && (!TAIL || column + lane % 4 * 8 < readable)) v = *(const uint4*)(xs[t] + column);
              mma(sum[t], w[0], w[4], w[1], w[5], v.x, v.y);
              mma(sum[t], w[2], w[6], w[3], w[7], v.z, v.w);
            }
          }
          wipe(e, plane, m, lane);
        }
      }
      float* const mine = sums + (turn * WARPS + warp) * TILES * 128;
      const u32 g = lane / 4, q = lane % 4 * 2;
#pragma unroll
      for (u32 t = 0; t < TILES; t++) {
        *(float2*)(mine + t * 128 + g * 8 + q) = make_float2(sum[t][0], sum[t][1]);
        *(float2*)(mine + t * 128 + (g + 8) * 8 + q) = make_float2(sum[t][2], sum[t][3]);
      }
      __syncthreads();
      for (u32 i = threadIdx.x; i < side * 16 * n; i += 32 * WARPS) {
        const u32 row = i % 16, beside = i / 16 % side, k = i / 16 / side, stripe = slab * side + beside;
        const u32 inside = stripe % stripes * 16 + row, number = stripe / stripes * rows + inside;
        if (stripe >= every || inside >= rows) continue;
        const float* const p = sums + (turn * WARPS + beside * sums_of_row) * TILES * 128 + k / 8 * 128 + row * 8 + k % 8;
        float v[PARTS];
#pragma unroll
        for (u32 j = 0; j < PARTS; j++) v[j] = j < sums_of_row ? p[j * TILES * 128] : 0;
        y[(u64)order[first + k] * width + number] = ended(pairwise(v), bias ? bias + (u64)expert * width : 0, number);
      }
    }
  }
}
#endif
