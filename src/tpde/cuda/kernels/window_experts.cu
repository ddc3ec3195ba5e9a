// window_experts.cu: weights of experts, each of which lies in the window layout (docs/windows.md): products with rows of x
// that a router has sent to experts, what the router's weights make of these, and the weights plain.
//
// A product's block makes the list of what there is to do itself, from the router's numbers: nobody waits for them.
//
// Macros: those of window.cuh, without ZERO. Of products, which are compiled without the others: NB, 8, 16 or 32, rows of x at
// a time; WARPS of a block; BLOCKS of a multiprocessor; ALONE, whether a warp has all parts of a stripe's sums, or eight share
// them.

#include "window.cuh"
#include "window_held.cuh"

#ifndef NB
#define WARPS 8u  // of a block
#endif

// ---- plain ----

#ifndef NB

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

// ---- sums of rows ----

#define SUM_THREADS 128u
#define SUM_COLUMNS (4 * SUM_THREADS)  // of a block

// Row i of `out` is the sum of `each` rows of y, from row i * `each` on, each times its number of `scores`: products and sums
// are rounded to fp32, one after the other.
extern "C" __global__ void __launch_bounds__(SUM_THREADS)
experts_sum(const u16* y, const float* scores, u32 each, u32 width, u16* __restrict__ out) {
  const u32 across = (width + SUM_COLUMNS - 1) / SUM_COLUMNS, row = blockIdx.x / across;
  const u32 column = blockIdx.x % across * SUM_COLUMNS + threadIdx.x * 4;
  follow();  // y is the last kernel's
  if (column >= width) return;
  const u16* const from = y + (u64)row * each * width + column;
  u16* const to = out + (u64)row * width + column;
  const u32 some = min(width - column, 4u);
  const bool whole = width % 4 == 0;
  float sum[4] = {0, 0, 0, 0};
#pragma unroll 4
  for (u32 k = 0; k < each; k++) {
    const float score = scores[(u64)row * each + k];
    u16 v[4] = {0, 0, 0, 0};
    if (whole) {
      const uint2 both = *(const uint2*)(from + (u64)k * width);
      v[0] = (u16)both.x, v[1] = (u16)(both.x >> 16), v[2] = (u16)both.y, v[3] = (u16)(both.y >> 16);
    } else {
      for (u32 j = 0; j < some; j++) v[j] = from[(u64)k * width + j];
    }
#pragma unroll
    for (u32 j = 0; j < 4; j++) sum[j] = __fadd_rn(sum[j], __fmul_rn(score, __uint_as_float((u32)v[j] << 16)));
  }
  for (u32 j = 0; j < some; j++) to[j] = rounded(sum[j]);
}

#else

// ---- products, 9 ----

#define TILES (NB / 8)            // of mma, beside each other
#define STEP (ALONE ? WARPS : 1)  // from a warp's unit to its next

// A unit of an expert that is used, by its index among them, and how many a block has from there on; none if it is negative.
struct Turn { int left; u32 index, unit; };

// What a warp fetches next: a chunk of a stripe, for some rows of x.
struct Visit { Turn at; u32 group, chunk; };

// The lists of a product's blocks, which each makes for itself.
struct Lists {
  u32* found;   // how many experts are used
  u32* ends;    // of each of these, where in `order` its rows end, and above 16 bits how many groups there are by then
  u32* places;  // of each expert, how many rows it has, then where the next one goes; nobody's when all are in order
  u16* used;    // which experts are used
  u16* order;   // rows of y by experts
};

// A number of rows, and above 16 bits, of groups of them that are multiplied at a time.
__device__ __forceinline__ u32 with_groups(u32 rows) { return (rows + NB - 1) / NB << 16 | rows; }

// Sort as many rows as a warp has lanes.
__device__ __forceinline__ void sort_few(const Lists& l, u32 id, u32 experts, u32 lane) {
  const u32 same = __match_any_sync(ALL, id), below = (1u << lane) - 1;
  const bool routed = id < experts, first = routed && !(same & below);
  const u32 firsts = __ballot_sync(ALL, first), size = first ? with_groups(__popc(same)) : 0, end = sum_to_lane(size, lane);
  const u32 begin = __shfl_sync(ALL, end - size, __ffs(same) - 1);
  if (routed) l.order[(begin & 0xFFFF) + __popc(same & below)] = (u16)lane;
  if (first) {
    const u32 index = __popc(firsts & below);
    l.used[index] = (u16)id;
    l.ends[index] = end;
  }
  if (lane == 0) *l.found = __popc(firsts);
}

// Counts become places.
__device__ __forceinline__ void list_used(const Lists& l, u32 experts, u32 lane) {
  u32 before = 0, number = 0;
  for (u32 first = 0; first < experts; first += 32) {
    const u32 e = first + lane, mine = e < experts ? l.places[e] : 0;
    const u32 size = with_groups(mine), end = before + sum_to_lane(size, lane);
    const u32 some = __ballot_sync(ALL, mine != 0);
    if (mine) {
      const u32 index = number + __popc(some & ((1u << lane) - 1));
      l.used[index] = (u16)e;
      l.ends[index] = end;
      l.places[e] = (end - size) & 0xFFFF;
    }
    before = __shfl_sync(ALL, end, 31);
    number += __popc(some);
  }
  if (lane == 0) *l.found = number;
}

// y = x W^T + bias, row by row: row i of y is of row i / `per` of x and of expert `ids[i]`, of 64 bits where they are WIDE.
// The number after the last and those below 0 stand for none, and give zeros. Rows of x lie at multiples of 16 bytes; so
// many words of each are read as a matrix has columns, and zeros to a multiple of 8. An expert's rows of y and bias are
// `parts` x `rows` long.
extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
experts_product(const Held* held, u32 experts, u32 parts, u32 rows, u32 columns, const u16* x, u64 x_stride,
                u32 per, const void* ids, u32 wide, u32 count, u16* __restrict__ y, const u16* __restrict__ bias) {
  DYNAMIC_SHARED;
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, width = parts * rows;
  const u32 chunks = (columns + 255) / 256, sums_of_row = min(chunks, PARTS), side = ALONE ? 1 : WARPS / sums_of_row;
  const u32 slot = ALONE ? 0 : warp / sums_of_row;  // `side` stripes are beside each other
  const u32 part = ALONE ? 0 : warp % sums_of_row, last_part = ALONE ? sums_of_row : part + 1;
  const u32 readable = (columns + 7) / 8 * 8;
  u8 *const plane = shared + warp * (PLANE + CHUNK_BYTES), *const held_chunk = plane + PLANE;
  // [2][WARPS][TILES][16][8], or of warps that are alone, [WARPS][3][TILES][32][4].
  float* const sums = (float*)(shared + WARPS * (PLANE + CHUNK_BYTES));
  u32* const numbers = (u32*)(sums + (ALONE ? 3 : 2) * WARPS * TILES * 128);
  u16* const short_numbers = (u16*)(numbers + 1 + experts);
  const Lists l = {numbers, numbers + 1, (u32*)sums, short_numbers, short_numbers + experts};
  const uint2* const escapes = (const uint2*)plane + lane;
  const auto id_of = [&](u32 i) { return expert_of(ids, wide, i, experts); };
  clear(plane, lane);
  for (u32 e = threadIdx.x; e < experts; e += 32 * WARPS) l.places[e] = 0;
  __syncthreads();
  follow();  // x and numbers are the last kernel's
  if (count <= 32) {
    if (warp == 0) sort_few(l, lane < count ? id_of(lane) : experts, experts, lane);
  } else {
    for (u32 i = threadIdx.x; i < count; i += 32 * WARPS) {
      const u32 id = id_of(i);
      if (id < experts) atomicAdd(l.places + id, 1u);
    }
    __syncthreads();
    if (warp == 0) list_used(l, experts, lane);  // blocks agree on the order of experts
    __syncthreads();
    for (u32 i = threadIdx.x; i < count; i += 32 * WARPS) {
      const u32 id = id_of(i);
      // In any order: a row's sum has no other row, and a block that has a stripe takes all of its expert's rows.
      if (id < experts) l.order[atomicAdd(l.places + id, 1u)] = (u16)i;
    }
  }
  __syncthreads();
  const u32 found = *l.found;
  if (blockIdx.x == 0 && (found ? l.ends[found - 1] & 0xFFFF : 0) < count)
    for (u32 i = 0; i < count; i++)
      if (id_of(i) == experts)
        for (u32 j = threadIdx.x; j < width; j += 32 * WARPS) y[(u64)i * width + j] = 0;

  // A unit is `side` stripes of an expert. A block's units follow each other, so that it has the same rows of x for a while;
  // blocks have as many, each counted as often as its expert has groups of rows.
  const u32 stripes = (rows + 15) / 16, every = parts * stripes, units = (every + side - 1) / side;
  const u64 all = (u64)(found ? l.ends[found - 1] >> 16 : 0) * units;
  const auto before = [&](u32 index) { return index ? l.ends[index - 1] : 0; };
  const auto stripe_of = [&](const Turn& p) { return p.unit * side + slot; };
  const auto matrix_at = [&](const Turn& p) { return l.used[p.index] * parts + (parts > 1 ? stripe_of(p) / stripes : 0); };
  const auto inside = [&](u32 stripe) { return parts > 1 ? stripe % stripes : stripe; };
  const auto first_of = [&](u32 stripe) { return parts > 1 ? stripe / stripes * rows : 0; };  // row of its matrix
  const auto bias_of = [&](const Turn& p) { return bias ? bias + (u64)l.used[p.index] * width : 0; };
  const auto matrix = [&](u32 number) { return matrix_of(held, number, rows, columns); };
  const auto to_next = [&](Turn& p) {
    p.left -= STEP;
    p.unit += STEP;
    while (p.unit >= units) p.unit -= units, p.index++;
  };
  const auto turn_of = [&](u32 block) -> Turn {  // whose `left` is how many there are before
    const u64 from = all * block / gridDim.x;
    u32 index = 0;
    for (u32 most = found; index < most;) {  // the first one that has not ended by then
      const u32 middle = (index + most) / 2;
      if ((u64)(l.ends[middle] >> 16) * units > from) most = middle;
      else index = middle + 1;
    }
    u32 unit = 0;
    if (index < found) {
      const u32 sooner = before(index) >> 16, groups = (l.ends[index] >> 16) - sooner;
      unit = ((u32)(from - (u64)sooner * units) + groups - 1) / groups;
    }
    return {(int)(index * units + unit), index, unit};
  };
  // The first turn from one on of which this warp has a stripe.
  const auto enter = [&](Turn p) -> Visit {
    while (p.left > 0 && stripe_of(p) >= every) to_next(p);
    if (slot >= side) p.left = 0;
    return {p, 0, part};
  };
  const auto advance = [&](Visit& v) {
    v.chunk += PARTS;
    if (v.chunk < chunks) return;
    v.chunk = v.chunk % PARTS + 1;
    if (v.chunk < last_part) return;
    v.chunk = part;
    v.group++;
    if (v.group < (l.ends[v.at.index] >> 16) - (before(v.at.index) >> 16)) return;
    Turn p = v.at;
    to_next(p);
    v = enter(p);
  };
  const auto range = [&](const Visit& v) { return range_of(matrix(matrix_at(v.at)), inside(stripe_of(v.at)), v.chunk); };
  Turn here = turn_of(blockIdx.x);
  const u32 skipped = ALONE ? warp : 0;
  here.left = turn_of(blockIdx.x + 1).left - here.left - skipped;
  here.unit += skipped;
  while (here.unit >= units) here.unit -= units, here.index++;
  Visit next = enter(here);
  Entries coming = {0, 0, 0, 0};
  Records ahead = {0, 0};
  Range after = {0, 0};
  const auto request = [&] {  // what `next` says, of whose entries the range is there
    if (next.at.left <= 0) return;
    const Matrix m = matrix(matrix_at(next.at));
    const u32 stripe = inside(stripe_of(next.at));
    coming = load_entries(m, after, lane);
    ahead = records_of(m, stripe, lane);
    fetch(held_chunk, m, stripe, next.chunk, lane);
    advance(next);
    if (next.at.left > 0) after = range(next);
  };
  if (next.at.left > 0) after = range(next);
  request();
  u32 turn = 0;
  for (; here.left > 0; to_next(here)) {
    const u32 last = l.ends[here.index] & 0xFFFF;
    for (u32 first = before(here.index) & 0xFFFF; first < last; first += NB, turn ^= 1) {
      const u32 n = min(last - first, (u32)NB);
      const u16* xs[TILES];
#pragma unroll
      for (u32 t = 0; t < TILES; t++) {
        const u32 k = 8 * t + lane / 4;
        xs[t] = k < n ? x + l.order[first + k] / per * x_stride + lane % 4 * 8 : 0;
      }
      float sum[TILES][4];
#pragma unroll 1
      for (u32 p = part; p < (ALONE ? PARTS : last_part); p++) {
#pragma unroll
        for (u32 t = 0; t < TILES; t++) sum[t][0] = sum[t][1] = sum[t][2] = sum[t][3] = 0;
#pragma unroll 1
        for (u32 chunk = p; slot < side && stripe_of(here) < every && chunk < chunks; chunk += PARTS) {
          const Matrix m = matrix(matrix_at(here));
          const Entries e = coming;
          const Rows r = rows_of(ahead, m.zero);
          Chunk c;
          wait_for_fetched();
          take(c, held_chunk, pairs_of(m, chunk), lane);
          scatter(e, plane, m, lane);
          request();
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
#if ALONE
        // As `pairwise` adds: a sum waits for the one that it is added to.
#pragma unroll
        for (u32 t = 0; t < TILES; t++) {
          float4* const waiting = (float4*)sums + (warp * 3 * TILES + t) * 32 + lane;
          float4 s = make_float4(sum[t][0], sum[t][1], sum[t][2], sum[t][3]);
          u32 level = 0;
          for (; p >> level & 1; level++) s = plus(waiting[level * TILES * 32], s);
          if (p < PARTS - 1) {
            waiting[level * TILES * 32] = s;
          } else {
            const u32 own = stripe_of(here), row = inside(own) * 16 + lane / 4, number = first_of(own) + row;
            const u16* const added = bias_of(here);
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
              const u32 k = 8 * t + lane % 4 * 2 + i % 2, below = i / 2 * 8;
              if (k < n && row + below < rows)
                y[(u64)l.order[first + k] * width + number + below] = ended((&s.x)[i], added, number + below);
            }
          }
        }
#endif
      }
#if !ALONE
      float* const mine = sums + (turn * WARPS + warp) * TILES * 128;
      const u32 g = lane / 4, q = lane % 4 * 2;
#pragma unroll
      for (u32 t = 0; t < TILES; t++) {
        *(float2*)(mine + t * 128 + g * 8 + q) = make_float2(sum[t][0], sum[t][1]);
        *(float2*)(mine + t * 128 + (g + 8) * 8 + q) = make_float2(sum[t][2], sum[t][3]);
      }
      __syncthreads();
      for (u32 i = threadIdx.x; i < side * 16 * n; i += 32 * WARPS) {
        const u32 row = i % 16, beside = i / 16 % side, k = i / 16 / side, stripe = here.unit * side + beside;
        const u32 in_matrix = inside(stripe) * 16 + row, number = first_of(stripe) + in_matrix;
        if (stripe >= every || in_matrix >= rows) continue;
        const float* const p = sums + (turn * WARPS + beside * sums_of_row) * TILES * 128 + k / 8 * 128 + row * 8 + k % 8;
        float v[PARTS];
#pragma unroll
        for (u32 j = 0; j < PARTS; j++) v[j] = j < sums_of_row ? p[j * TILES * 128] : 0;
        y[(u64)l.order[first + k] * width + number] = ended(pairwise(v), bias_of(here), number);
      }
#endif
    }
  }
}
#endif
