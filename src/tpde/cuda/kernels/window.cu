// window.cu: the window layout (docs/windows.md): products with a matrix that lies in it, and its rows.
//
// A warp takes a chunk, 16 rows x 256 columns, whose words a lane gets in the order in which tensor cores take them. A
// high byte is one of eight: PRMT looks four of them up at a time, by their codes. The chunk's entries are XORed to a
// plane of bytes in shared memory, which is XORed to all high bytes, and wiped after. So every weight is exact in its
// register. The next chunk is copied to shared memory while one is multiplied.
//
// Any bodies are safe, whatever they decode to; offsets and entries are checked before (windows.md 8).
//
// Macros: ZERO, the flag; TAIL, whether columns are no multiple of 256. Of products: NB, a multiple of 8, the most rows of
// x. Of `product`: SHARED, whether x is copied to shared memory; BLOCKS of a multiprocessor; CLUSTER is 0. Of `wide_product`:
// CLUSTER, the blocks that share x: 1, 2, 4 or 8; WIDE, the warps of each, a multiple of 8 / CLUSTER.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define ALL 0xFFFFFFFFu
#define WARPS 8u            // of a block
#define PARTS 8u            // sums of a row, windows.md 9.2
#define PLANE 4096u         // bytes: the places of a chunk
#define PAIR_BYTES 1408u    // of a body: a pair of tiles
#define CHUNK_BYTES 5632u   // four of them
#if ZERO
#define STEPS 0x02010000u
#define MASK 0xFFFFFF00u
#else
#define STEPS 0x03020100u
#define MASK 0xFFFFFFFFu
#endif

struct Matrix {
  u64 records, offsets, entries, bodies;  // addresses
  u64 table[2];
  u32 rows, columns;
  u32 chunks, pairs;  // of a stripe
};

// What each kernel is given of one, by src/tpde/cuda/windows.py.
#define MATRIX u64 records, u64 offsets, u64 entries, u64 bodies, u64 table_low, u64 table_high, u32 row_count, u32 columns
#define THE_MATRIX \
  {records, offsets, entries, bodies, {table_low, table_high}, row_count, columns, (columns + 255) / 256, (columns + 63) / 64}

// ---- chunks, 2 and 3 ----

// What a lane has of a chunk: 12 code words and 32 words of low bytes, as they are loaded.
struct Chunk {
  uint4 codes[3], low[8];
};

// The entries of a chunk: two a lane, how many there are, and where.
struct Entries {
  u32 first, second, count, at;
};

__device__ __forceinline__ const u8* body_of(const Matrix& m, u32 stripe, u32 chunk) {
  return (const u8*)m.bodies + (u64)stripe * (PAIR_BYTES * m.pairs) + CHUNK_BYTES * chunk;
}

__device__ __forceinline__ u32 pairs_of(const Matrix& m, u32 chunk) {
#if TAIL
  return min(m.pairs - 4 * chunk, 4u);
#else
  return 4;
#endif
}

// Copy a chunk to shared memory, meanwhile.
__device__ __forceinline__ void fetch(u8* to, const Matrix& m, u32 stripe, u32 chunk, u32 lane) {
  const u8* const from = body_of(m, stripe, chunk);
  const u32 address = (u32)__cvta_generic_to_shared(to), pieces = PAIR_BYTES / 16 * pairs_of(m, chunk);
#pragma unroll
  for (u32 i = 0; i < CHUNK_BYTES / 512; i++)
    if (!TAIL || 32 * i + lane < pieces)
      asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;"
                   :: "r"(address + 512 * i + 16 * lane), "l"(from + 512 * i + 16 * lane) : "memory");
}

__device__ __forceinline__ void wait_for_fetched() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Take a chunk that has been fetched.
__device__ __forceinline__ void take(Chunk& c, const u8* from, u32 pairs, u32 lane) {
  if (TAIL) __syncwarp();  // a lane takes what others fetched
  if (pairs == 4) {
#pragma unroll
    for (u32 i = 0; i < 3; i++) c.codes[i] = *(const uint4*)(from + 512 * i + 16 * lane);
#pragma unroll
    for (u32 i = 0; i < 8; i++) c.low[i] = *(const uint4*)(from + 1536 + 512 * i + 16 * lane);
    return;
  }
#if TAIL
  const u32 *const codes = (const u32*)from + lane, *const low = codes + 96 * pairs;
#pragma unroll
  for (u32 i = 0; i < 3; i++) c.codes[i] = make_uint4(codes[128 * i], codes[128 * i + 32], codes[128 * i + 64], codes[128 * i + 96]);
#pragma unroll
  for (u32 i = 0; i < 6; i++) c.low[i] = make_uint4(low[128 * i], low[128 * i + 32], low[128 * i + 64], low[128 * i + 96]);
#endif
}

struct Range { u32 at, end; };

__device__ __forceinline__ Range range_of(const Matrix& m, u32 stripe, u32 chunk) {
  const u32* const p = (const u32*)m.offsets + (u64)stripe * m.chunks + chunk;
  return {__ldg(p), __ldg(p + 1)};
}

__device__ __forceinline__ Entries load_entries(const Matrix& m, Range r, u32 lane) {
  const u16* const p = (const u16*)m.entries + r.at;
  Entries e = {0, 0, r.end - r.at, r.at};
  if (lane < e.count) e.first = __ldg(p + lane);
  if (lane + 32 < e.count) e.second = __ldg(p + lane + 32);
  return e;
}

__device__ __forceinline__ u32 xor_of(const Matrix& m, u32 entry) {
  return (u32)((entry & 0x8000 ? m.table[1] : m.table[0]) >> (entry >> 12 & 7) * 8) & 255;
}

__device__ __forceinline__ void put(u8* plane, const Matrix& m, u32 entry) {
  const u32 place = entry & 4095;
  atomicXor((u32*)plane + place / 4, xor_of(m, entry) << place % 4 * 8);
}

// XOR a chunk's entries to the plane, which has zeros.
__device__ __forceinline__ void scatter(const Entries& e, u8* plane, const Matrix& m, u32 lane) {
  if (lane < e.count) put(plane, m, e.first);
  if (lane + 32 < e.count) put(plane, m, e.second);
  for (u32 i = lane + 64; i < e.count; i += 32) put(plane, m, __ldg((const u16*)m.entries + e.at + i));
  __syncwarp();
}

// Have zeros there again.
__device__ __forceinline__ void wipe(const Entries& e, u8* plane, const Matrix& m, u32 lane) {
  __syncwarp();
  if (lane < e.count) plane[e.first & 4095] = 0;
  if (lane + 32 < e.count) plane[e.second & 4095] = 0;
  for (u32 i = lane + 64; i < e.count; i += 32) plane[__ldg((const u16*)m.entries + e.at + i) & 4095] = 0;
  __syncwarp();
}

__device__ __forceinline__ void clear(u8* plane, u32 lane) {
  for (u32 i = lane; i < PLANE / 16; i += 32) ((uint4*)plane)[i] = make_uint4(0, 0, 0, 0);
  __syncwarp();
}

// ---- words, 1 ----

// Of a lane's two rows of a stripe: the pairs of their windows, and what parity adds to two words.
struct Rows {
  u32 window[2], add[2];
};

__device__ __forceinline__ Rows rows_of(const Matrix& m, u32 stripe, u32 lane) {
  Rows r;
#pragma unroll
  for (u32 half = 0; half < 2; half++) {
    const u32 record = __ldg((const u8*)m.records + 16 * (u64)stripe + 8 * half + lane / 4);
    r.window[half] = ((record >> 1) * 0x01010101u + STEPS) & MASK;
    r.add[half] = (record & 1) * 0x00800080u;
  }
  return r;
}

// Eight words of a row, from their codes in the nibbles of `codes`.
__device__ __forceinline__ void octet(u32 codes, u32 window, u32 low, u32 high, uint2 escapes, u32 add, u32* w) {
  const u32 negative = window | 0x80808080u;
  const u32 a = __byte_perm(window, negative, codes) ^ escapes.x;
  const u32 b = __byte_perm(window, negative, codes >> 16) ^ escapes.y;
  w[0] = __byte_perm(low, a, 0x5140) + add;
  w[1] = __byte_perm(low, a, 0x7362) + add;
  w[2] = __byte_perm(high, b, 0x5140) + add;
  w[3] = __byte_perm(high, b, 0x7362) + add;
}

__device__ __forceinline__ u32 code_word(const Chunk& c, u32 i) {
  const uint4& v = c.codes[i / 4];
  return i % 4 == 0 ? v.x : i % 4 == 1 ? v.y : i % 4 == 2 ? v.z : v.w;
}

// The 16 words that a lane has of tile j: four numbers of each half.
__device__ __forceinline__ void tile(const Chunk& c, u32 j, const Rows& r, const uint2* escapes, u32* w) {
  const u32 k = j / 2 * 3, x = code_word(c, k), y = code_word(c, k + 1), z = code_word(c, k + 2);
  u32 a, b;
  if (j % 2) {
    a = z & 0x77777777u;
    b = (x >> 3 & 0x11111111u) | (y >> 2 & 0x22222222u) | (z >> 1 & 0x44444444u);
  } else {
    a = x & 0x77777777u;
    b = y & 0x77777777u;
  }
  octet(a, r.window[0], c.low[j].x, c.low[j].y, escapes[64 * j], r.add[0], w);
  octet(b, r.window[1], c.low[j].z, c.low[j].w, escapes[64 * j + 32], r.add[1], w + 4);
}

// ---- rows ----

// Decode chunks to rows of `stride` words each. WIDE: 8 words of them lie at a multiple of 16 bytes.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 2)
rows(MATRIX, u16* __restrict__ out, u64 stride, u32 wide) {
  extern __shared__ __align__(16) u8 shared[];
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
    const Rows r = rows_of(m, stripe, lane);
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
  extern __shared__ __align__(16) u8 shared[];
  const Matrix m = THE_MATRIX;
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u8 *const plane = shared + warp * (PLANE + CHUNK_BYTES), *const held = plane + PLANE;
  const uint2* const escapes = (const uint2*)plane + lane;
  clear(plane, lane);
  for (u64 i = (u64)blockIdx.x * WARPS + warp; i < count * m.chunks; i += (u64)gridDim.x * WARPS) {
    const u64 place = i / m.chunks;
    const u32 chunk = i % m.chunks;
    const long long id = __ldg(ids + place);
    if ((u64)id >= m.rows) asm volatile("trap;");
    const u32 stripe = (u32)id / 16, inside = (u32)id % 16;
    const Entries e = load_entries(m, range_of(m, stripe, chunk), lane);
    Chunk c;
    fetch(held, m, stripe, chunk, lane);
    wait_for_fetched();
    take(c, held, pairs_of(m, chunk), lane);
    scatter(e, plane, m, lane);
    const Rows r = rows_of(m, stripe, lane);
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

__device__ __forceinline__ void mma(float* sum, u32 a, u32 b, u32 c, u32 d, u32 x, u32 y) {
#if CLUSTER == 0
  asm volatile(
#else  // of many rows of x: the compiler may put other work between
  asm(
#endif
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : "r"(a), "r"(b), "r"(c), "r"(d), "r"(x), "r"(y));
}

__device__ __forceinline__ u16 rounded(float x) {
  u16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ u16 ended(float sum, const u16* bias, u32 row) {
  return rounded(bias ? sum + __uint_as_float((u32)__ldg(bias + row) << 16) : sum);
}

__device__ __forceinline__ float plus(float a, float b) { return a + b; }
__device__ __forceinline__ float4 plus(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// The partial sums of one row, or of four: ((v0 + v1) + (v2 + v3)) + ((v4 + v5) + (v6 + v7)).
template <typename T>
__device__ __forceinline__ T pairwise(const T* v) {
  return plus(plus(plus(v[0], v[1]), plus(v[2], v[3])), plus(plus(v[4], v[5]), plus(v[6], v[7])));
}

#if CLUSTER == 0

// y = x W^T + bias, of `n` rows of x, `x_stride` and `y_stride` words apart. Rows of x lie at multiples of 16 bytes; so
// many words of each are read as the matrix has columns, and zeros to a multiple of 8.
extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
product(MATRIX, const u16* __restrict__ x, u64 x_stride, u32 n, u16* __restrict__ y, u64 y_stride,
        const u16* __restrict__ bias) {
  extern __shared__ __align__(16) u8 shared[];
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
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");  // x is the last kernel's; the weights are not
  asm volatile("griddepcontrol.launch_dependents;");
#endif
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
      const Rows r = rows_of(m, stripe, lane);
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

#else

// ---- products of more rows of x, 9 ----

#define OWN (PARTS / CLUSTER)  // parts of a block
#define SIDE (WIDE / OWN)      // stripes that a cluster takes at a time

__device__ __forceinline__ u32 rank_in_cluster() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void wait_for_others() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// Four floats of another block's shared memory, from the same address as here.
__device__ __forceinline__ float4 of_block(const float* p, u32 rank) {
  float4 v;
  asm volatile("{ .reg .u32 a; mapa.shared::cluster.u32 a, %4, %5; ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [a]; }"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"((u32)__cvta_generic_to_shared(p)), "r"(rank) : "memory");
  return v;
}

// Words `k` to `k + 3` of a row of the matrix, as far as there are rows of x.
__device__ __forceinline__ void store4(u16* y, u64 stride, u32 k, u32 n, u32 row, float4 s, const u16* bias) {
  u16* const to = y + k * stride + row;
  to[0] = ended(s.x, bias, row);
  if (k + 1 < n) to[stride] = ended(s.y, bias, row);
  if (k + 2 < n) to[2 * stride] = ended(s.z, bias, row);
  if (k + 3 < n) to[3 * stride] = ended(s.w, bias, row);
}

// Add up the partial sums of the cluster's stripes from `first` on, every CLUSTER-th of them, and store y.
__device__ __forceinline__ void end_stripes(const Matrix& m, const float* sums, u32 first, u32 rank, u32 n, u16* y, u64 stride, const u16* bias) {
#pragma unroll 1
  for (u32 i = threadIdx.x; i < (SIDE - rank + CLUSTER - 1) / CLUSTER * TILES * 32; i += 32 * WIDE) {
    const u32 row = i % 16, t = i / 32 % TILES, k = 8 * t + i / 16 % 2 * 4, beside = i / (32 * TILES) * CLUSTER + rank;
    const u32 number = 16 * (first + beside) + row;
    if (k >= n || number >= m.rows) continue;
    const float* const p = sums + (beside * OWN * TILES + t) * 128 + row * 8 + k % 8;
    float4 v[PARTS];
#pragma unroll
    for (u32 j = 0; j < PARTS; j++) v[j] = of_block(p + j % OWN * TILES * 128, j / OWN);
    store4(y, stride, k, n, number, pairwise(v), bias);
  }
}

// As `product`. The blocks of a cluster share x: each keeps the columns of its parts in shared memory, and its warps take
// those parts of some stripes. One of the blocks adds a stripe's partial sums up, while all are at the next stripes.
extern "C" __global__ void __launch_bounds__(32 * WIDE, 1)
wide_product(MATRIX, const u16* __restrict__ x, u64 x_stride, u32 n, u16* __restrict__ y, u64 y_stride,
             const u16* __restrict__ bias) {
  extern __shared__ __align__(16) u8 shared[];
  const Matrix m = THE_MATRIX;
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, stripes = (m.rows + 15) / 16;
  const u32 rank = rank_in_cluster(), slot = warp / OWN, part = rank * OWN + warp % OWN;
  const u32 step = gridDim.x / CLUSTER * SIDE, start = blockIdx.x / CLUSTER * SIDE;
  const u32 readable = (m.columns + 7) / 8 * 8, mine = (m.chunks + PARTS - 1) / PARTS * OWN;
  const u32 x_bytes = 512 * mine + 64;  // lanes that read rows beside each other meet no bank
  u8 *const plane = shared + warp * (PLANE + CHUNK_BYTES), *const held = plane + PLANE;
  float* const sums = (float*)(shared + WIDE * (PLANE + CHUNK_BYTES));  // [2][SIDE][OWN][TILES][16][8]
  u8* const copy = (u8*)(sums + 2 * WIDE * TILES * 128);                // of x: chunks of this block's parts
  const uint2* const escapes = (const uint2*)plane + lane;
  const bool works = part < m.chunks;
  clear(plane, lane);
  Entries coming = {0, 0, 0, 0};
  Range after = {0, 0};
  u32 next_stripe = works ? start + slot : stripes, next_chunk = part;
  if (next_stripe < stripes) {
    coming = load_entries(m, range_of(m, next_stripe, part), lane);
    fetch(held, m, next_stripe, part, lane);
    ADVANCE(next_stripe, next_chunk)
    if (next_stripe < stripes) after = range_of(m, next_stripe, next_chunk);
  }
  asm volatile("griddepcontrol.wait;" ::: "memory");  // x is the last kernel's; the weights are not
  asm volatile("griddepcontrol.launch_dependents;");
  for (u32 i = threadIdx.x; i < NB * mine * 32; i += 32 * WIDE) {
    const u32 row = i / (32 * mine), at = i / 32 % mine, piece = i % 32;
    const u32 column = 256 * (at / OWN * PARTS + rank * OWN + at % OWN) + 8 * piece;
    const bool have = row < n && column < readable;  // zeros else
    const u32 to = (u32)__cvta_generic_to_shared(copy + row * x_bytes + 512 * at + 16 * piece);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(to), "l"(have ? x + row * x_stride + column : x), "r"(have ? 16 : 0) : "memory");
  }
  wait_for_fetched();
  __syncthreads();
  u32 turn = 0, before = stripes;  // `before`: the first of the stripes whose sums are not added up yet
  for (u32 first = start; first < stripes; first += step, turn ^= 1) {
    float sum[TILES][4];
#pragma unroll
    for (u32 t = 0; t < TILES; t++) sum[t][0] = sum[t][1] = sum[t][2] = sum[t][3] = 0;
    const u32 stripe = first + slot;
    if (works && stripe < stripes) {
      const Rows r = rows_of(m, stripe, lane);
      const u8* xs = copy + lane / 4 * x_bytes + 512 * (warp % OWN) + lane % 4 * 16;
#pragma unroll 1
      for (u32 chunk = part; chunk < m.chunks; chunk += PARTS, xs += 512 * OWN) {
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
        const u32 tiles = 2 * pairs_of(m, chunk);
#pragma unroll
        for (u32 j = 0; j < 8; j++) {
          if (TAIL && j >= tiles) break;
          u32 w[8];
          tile(c, j, r, escapes, w);
          uint4 v[TILES];
#pragma unroll
          for (u32 t = 0; t < TILES; t++) v[t] = *(const uint4*)(xs + t * 8 * x_bytes + 64 * j);
#pragma unroll
          for (u32 t = 0; t < TILES; t++) mma(sum[t], w[0], w[4], w[1], w[5], v[t].x, v[t].y);
#pragma unroll
          for (u32 t = 0; t < TILES; t++) mma(sum[t], w[2], w[6], w[3], w[7], v[t].z, v[t].w);
        }
        wipe(e, plane, m, lane);
      }
    }
    if (before < stripes) {
      wait_for_others();
      end_stripes(m, sums + (turn ^ 1) * WIDE * TILES * 128, before, rank, n, y, y_stride, bias);
    }
    float* const to = sums + (turn * WIDE + warp) * TILES * 128;
    const u32 g = lane / 4, q = lane % 4 * 2;
#pragma unroll
    for (u32 t = 0; t < TILES; t++) {
      *(float2*)(to + t * 128 + g * 8 + q) = make_float2(sum[t][0], sum[t][1]);
      *(float2*)(to + t * 128 + (g + 8) * 8 + q) = make_float2(sum[t][2], sum[t][3]);
    }
    arrive();
    before = first;
  }
  if (before < stripes) {
    wait_for_others();
    end_stripes(m, sums + (turn ^ 1) * WIDE * TILES * 128, before, rank, n, y, y_stride, bias);
  }
  arrive();  // no block ends while another one reads its sums
  wait_for_others();
}
#endif
