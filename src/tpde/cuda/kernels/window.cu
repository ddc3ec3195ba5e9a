// window.cu: the window layout (docs/windows.md): products of few rows with a matrix that lies in it, and its rows.
//
// The next chunk is copied to shared memory while one is multiplied.
//
// Macros: those of window.cuh. Of products: NB, 8 or 16, the most rows of x; SHARED, whether x is copied to shared memory;
// BLOCKS of a multiprocessor.

#include "window.cuh"

#define WARPS 8u  // of a block

// ---- rows ----

// Decode chunks to rows of `stride` words each. WIDE: 8 words of them lie at a multiple of 16 bytes.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 2)
rows(MATRIX, u16* __restrict__ out, u64 stride, u32 wide) {
  DYNAMIC_SHARED;
  const Matrix m = THE_MATRIX;
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, step = gridDim.x * WARPS;
  const u32 count = (m.rows + 15) / 16 * m.chunks;
  u8 *const plane = shared + warp * (PLANE + CHUNK_BYTES), *const held = plane + PLANE;
  const uint2* const escapes = (const uint2*)plane + lane;
  clear(plane, lane);
  u32 i = blockIdx.x * WARPS + warp;
  if (i >= count) return;
  Entries coming = load_entries(m, range_of(m, i / m.chunks, i % m.chunks), lane);
  fetch(held, m, i / m.chunks, i % m.chunks, lane);
  Range after = {0, 0};
  if (i + step < count) after = range_of(m, (i + step) / m.chunks, (i + step) % m.chunks);
  for (; i < count; i += step) {
    const u32 stripe = i / m.chunks, chunk = i % m.chunks, n = i + step, nn = n + step;
    const Entries e = coming;
    Chunk c;
    wait_for_fetched();
    take(c, held, pairs_of(m, chunk), lane);
    scatter(e, plane, m, lane);
    if (n < count) {
      coming = load_entries(m, after, lane);
      fetch(held, m, n / m.chunks, n % m.chunks, lane);
      if (nn < count && nn > n) after = range_of(m, nn / m.chunks, nn % m.chunks);
    }
    const Rows r = rows_of(records_of(m, stripe, lane), m.zero);
    const u32 row = 16 * stripe + lane / 4, tiles = 2 * pairs_of(m, chunk);
#pragma unroll
    for (u32 j = 0; j < 8; j++) {
      if (TAIL && j >= tiles) break;
      u32 w[8];
      tile(c, j, r, escapes, w);
      const u32 column = 256 * chunk + 32 * j + lane % 4 * 8;
#pragma unroll
      for (u32 half = 0; half < 2; half++) {
        if (row + 8 * half >= m.rows) continue;
        u16* const to = out + (row + 8 * half) * stride + column;
        const u32* const v = w + 4 * half;
        if (wide && column + 8 <= m.columns) {
          __stcs((uint4*)to, make_uint4(v[0], v[1], v[2], v[3]));
        } else {
#pragma unroll
          for (u32 k = 0; k < 8; k++)
            if (column + k < m.columns) to[k] = (u16)(v[k / 2] >> k % 2 * 16);
        }
      }
    }
    wipe(e, plane, m, lane);
  }
}

// Decode rows `ids` of the matrix, `count` of them, to rows of its columns. A warp decodes a chunk for each, and stores one
// row of sixteen.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 2)
lookup(MATRIX, const long long* __restrict__ ids, u64 count, u16* __restrict__ out) {
  DYNAMIC_SHARED;
  const Matrix m = THE_MATRIX;
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u8 *const plane = shared + warp * (PLANE + CHUNK_BYTES), *const held = plane + PLANE;
  const uint2* const escapes = (const uint2*)plane + lane;
  clear(plane, lane);
  for (u64 i = (u64)blockIdx.x * WARPS + warp; i < count * m.chunks; i += (u64)gridDim.x * WARPS) {
    const u64 place = i / m.chunks;
    const u32 chunk = i % m.chunks;
    const long long id = __ldg(ids + place);
    if ((u64)id >= m.rows) trap();
    const u32 stripe = (u32)id / 16, inside = (u32)id % 16;
    const Entries e = load_entries(m, range_of(m, stripe, chunk), lane);
    Chunk c;
    fetch(held, m, stripe, chunk, lane);
    wait_for_fetched();
    take(c, held, pairs_of(m, chunk), lane);
    scatter(e, plane, m, lane);
    const Rows r = rows_of(records_of(m, stripe, lane), m.zero);
    const u32 tiles = 2 * pairs_of(m, chunk);
#pragma unroll
    for (u32 j = 0; j < 8; j++) {
      if (TAIL && j >= tiles) break;
      u32 w[8];
      tile(c, j, r, escapes, w);
      const u32 column = 256 * chunk + 32 * j + lane % 4 * 8;
      if (lane / 4 != inside % 8) continue;
      u16* const to = out + place * m.columns + column;
#pragma unroll
      for (u32 k = 0; k < 8; k++)
        if (!TAIL || column + k < m.columns) to[k] = (u16)((inside < 8 ? w[k / 2] : w[4 + k / 2]) >> k % 2 * 16);
    }
    wipe(e, plane, m, lane);
  }
}

// ---- products, 9 ----

#define TILES (NB / 8)  // of mma, beside each other

// To a warp's next chunk: of its part, or of the next stripe.
#define ADVANCE(s, c) { c += PARTS; if (c >= m.chunks) { c = part; s += step; } }

// y = x W^T + bias, of `n` rows of x, `x_stride` and `y_stride` words apart. Rows of x lie at multiples of 16 bytes; so
// many words of each are read as the matrix has columns, and zeros to a multiple of 8.
extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
product(MATRIX, const u16* x, u64 x_stride, u32 n, u16* __restrict__ y, u64 y_stride,
        const u16* __restrict__ bias) {
  DYNAMIC_SHARED;
  const Matrix m = THE_MATRIX;
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, stripes = (m.rows + 15) / 16;
  const u32 parts = min(m.chunks, PARTS), side = WARPS / parts;  // stripes beside each other
  const u32 part = warp % parts, slot = warp / parts, step = gridDim.x * side;
  const u32 readable = (m.columns + 7) / 8 * 8;
  const bool works = slot < side;
  u8 *const plane = shared + warp * (PLANE + CHUNK_BYTES), *const held = plane + PLANE;
  float* const sums = (float*)(shared + WARPS * (PLANE + CHUNK_BYTES));  // [2][WARPS][TILES][16][8]
  u8* const copy = (u8*)(sums + 2 * WARPS * TILES * 128);                // of x, rows of x_bytes
  const u64 x_bytes = SHARED ? 2 * readable + 64 : 2 * x_stride;
  const u8* const from = SHARED ? copy : (const u8*)x;
  const uint2* const escapes = (const uint2*)plane + lane;
  clear(plane, lane);
  // This warp's chunks: `part`, `part + PARTS`, ... of one stripe after the other.
  u32 stripe = blockIdx.x * side + slot, chunk = part;
  Entries coming = {0, 0, 0, 0};
  Range after = {0, 0};
  bool more = works && stripe < stripes;
  u32 next_stripe = stripe, next_chunk = chunk;
  if (more) {
    coming = load_entries(m, range_of(m, stripe, chunk), lane);
    fetch(held, m, stripe, chunk, lane);
    ADVANCE(next_stripe, next_chunk)
    if (next_stripe < stripes) after = range_of(m, next_stripe, next_chunk);
  }
  follow();  // x is the last kernel's; the weights are not
#if SHARED
  for (u32 i = threadIdx.x; i < n * (readable / 8); i += 32 * WARPS) {
    const u32 row = i / (readable / 8), at = i % (readable / 8);
    *(uint4*)(copy + row * x_bytes + 16 * at) = *(const uint4*)(x + row * x_stride + 8 * at);
  }
#endif
  __syncthreads();
  u32 turn = 0;
  for (u32 first = blockIdx.x * side; first < stripes; first += step, turn ^= 1) {
    float sum[TILES][4];
#pragma unroll
    for (u32 t = 0; t < TILES; t++) sum[t][0] = sum[t][1] = sum[t][2] = sum[t][3] = 0;
    stripe = first + slot;
    if (works && stripe < stripes) {
      const Rows r = rows_of(records_of(m, stripe, lane), m.zero);
#pragma unroll 1
      for (chunk = part; chunk < m.chunks; chunk += PARTS) {
        const Entries e = coming;
        Chunk c;
        wait_for_fetched();
        take(c, held, pairs_of(m, chunk), lane);
        scatter(e, plane, m, lane);
        if (next_stripe < stripes) {
          coming = load_entries(m, after, lane);
          fetch(held, m, next_stripe, next_chunk, lane);
          ADVANCE(next_stripe, next_chunk)
          if (next_stripe < stripes) after = range_of(m, next_stripe, next_chunk);
        }
        const u32 tiles = 2 * pairs_of(m, chunk), column = 256 * chunk + lane % 4 * 8;
        const u8* const xs = from + lane / 4 * x_bytes + 2 * column;
#pragma unroll
        for (u32 j = 0; j < 8; j++) {
          if (TAIL && j >= tiles) break;
          u32 w[8];
          tile(c, j, r, escapes, w);
#pragma unroll
          for (u32 t = 0; t < TILES; t++) {
            uint4 v = make_uint4(0, 0, 0, 0);
            if (8 * t + lane / 4 < n && (!TAIL || column + 32 * j < readable))
              v = *(const uint4*)(xs + t * 8 * x_bytes + 64 * j);
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
      const u32 row = i % 16, beside = i / 16 % side, k = i / 16 / side, number = 16 * (first + beside) + row;
      const float* const p = sums + (turn * WARPS + beside * parts) * TILES * 128 + k / 8 * 128 + row * 8 + k % 8;
      float v[PARTS];
#pragma unroll
      for (u32 j = 0; j < PARTS; j++) v[j] = j < parts ? p[j * TILES * 128] : 0;
      if (number < m.rows) y[k * y_stride + number] = ended(pairwise(v), bias, number);
    }
  }
}
