// window.cuh: chunks and words of the window layout (docs/windows.md), for the kernels that include it.
//
// A warp takes a chunk, 16 rows x 256 columns, whose words a lane gets in the order in which tensor cores take them. A
// high byte is one of eight: PRMT looks four of them up at a time, by their codes. The chunk's entries are XORed to a
// plane of bytes in shared memory, which is XORed to all high bytes, and wiped after. So every weight is exact in its
// register.
//
// Any bodies are safe, whatever they decode to; offsets and entries are checked before (windows.md 8).
//
// Macros: TAIL, whether columns are no multiple of 256; of kernels of one matrix: ZERO, the flag.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define ALL 0xFFFFFFFFu
#define PARTS 8u            // sums of a row, windows.md 9.2
#define PLANE 4096u         // bytes: the places of a chunk
#define PAIR_BYTES 1408u    // of a body: a pair of tiles
#define CHUNK_BYTES 5632u   // four of them

struct Matrix {
  u64 records, offsets, entries, bodies;  // addresses
  u64 table[2];
  u32 rows, columns;
  u32 chunks, pairs;  // of a stripe
  u32 zero;           // the flag
};

// What each kernel is given of one, by src/tpde/cuda/window_products.py.
#define MATRIX u64 records, u64 offsets, u64 entries, u64 bodies, u64 table_low, u64 table_high, u32 row_count, u32 columns
#define THE_MATRIX \
  {records, offsets, entries, bodies, {table_low, table_high}, row_count, columns, (columns + 255) / 256, (columns + 63) / 64, ZERO}

// ---- instructions ----

// Tests that run kernels on a processor have functions of their own for these.
#ifndef EMULATED
#define DYNAMIC_SHARED extern __shared__ __align__(128) u8 shared[]

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Copy 16 bytes to shared memory, meanwhile.
__device__ __forceinline__ void copy_16(u32 to, const u8* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" :: "r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void wait_for_fetched() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ void trap() { asm volatile("trap;"); }

// Wait for the kernel before, and let the one after start. Pointers to what that one writes have no `__restrict__`: loads of
// what is constant in a kernel need not wait, and the assembler may have them come first.
__device__ __forceinline__ void follow() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// sum += A x, of a fragment A of 16 rows x 16 columns and of 8 rows of x.
__device__ __forceinline__ void mma(float* sum, u32 a, u32 b, u32 c, u32 d, u32 x, u32 y) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : "r"(a), "r"(b), "r"(c), "r"(d), "r"(x), "r"(y));
}

__device__ __forceinline__ u16 rounded(float x) {
  u16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}
#endif

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
  const u32 address = shared_address(to), pieces = PAIR_BYTES / 16 * pairs_of(m, chunk);
#pragma unroll
  for (u32 i = 0; i < CHUNK_BYTES / 512; i++)
    if (!TAIL || 32 * i + lane < pieces) copy_16(address + 512 * i + 16 * lane, from + 512 * i + 16 * lane);
}

// Take a chunk that has been fetched. Words of columns beyond its pairs are as padding is, finite numbers.
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
  for (u32 i = 0; i < 12; i++) (&c.codes[i / 4].x)[i % 4] = i < 3 * pairs ? codes[32 * i] : 0;
#pragma unroll
  for (u32 i = 0; i < 32; i++) (&c.low[i / 4].x)[i % 4] = i < 8 * pairs ? low[32 * i] : 0;
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
  const u64 half = entry & 0x8000 ? m.table[1] : m.table[0];
  return __byte_perm((u32)half, (u32)(half >> 32), entry >> 12 & 7) & 255;
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

// The records of a lane's two rows.
struct Records { u32 low, high; };

__device__ __forceinline__ Records records_of(const Matrix& m, u32 stripe, u32 lane) {
  const u8* const p = (const u8*)m.records + 16 * (u64)stripe + lane / 4;
  return {__ldg(p), __ldg(p + 8)};
}

__device__ __forceinline__ Rows rows_of(Records records, u32 zero) {
  const u32 steps = zero ? 0x02010000u : 0x03020100u, mask = zero ? 0xFFFFFF00u : ALL;
  Rows r;
#pragma unroll
  for (u32 half = 0; half < 2; half++) {
    const u32 record = half ? records.high : records.low;
    r.window[half] = ((record >> 1) * 0x01010101u + steps) & mask;
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

// A word of those that a lane loaded by fours.
__device__ __forceinline__ u32 word_of(const uint4* loaded, u32 i) {
  const uint4& v = loaded[i / 4];
  return i % 4 == 0 ? v.x : i % 4 == 1 ? v.y : i % 4 == 2 ? v.z : v.w;
}

// The 16 words that a lane has of tile j, four numbers of each half, from the code words of its pair of tiles, and what is
// XORed to each half.
__device__ __forceinline__ void tile_of(u32 j, u32 x, u32 y, u32 z, uint4 low, const Rows& r, uint2 first, uint2 second, u32* w) {
  u32 a, b;
  if (j % 2) {
    a = z & 0x77777777u;
    b = (x >> 3 & 0x11111111u) | (y >> 2 & 0x22222222u) | (z >> 1 & 0x44444444u);
  } else {
    a = x & 0x77777777u;
    b = y & 0x77777777u;
  }
  octet(a, r.window[0], low.x, low.y, first, r.add[0], w);
  octet(b, r.window[1], low.z, low.w, second, r.add[1], w + 4);
}

__device__ __forceinline__ void tile(const Chunk& c, u32 j, const Rows& r, const uint2* escapes, u32* w) {
  const u32 k = j / 2 * 3;
  escapes += 64 * j;
  tile_of(j, word_of(c.codes, k), word_of(c.codes, k + 1), word_of(c.codes, k + 2), c.low[j], r, escapes[0], escapes[32], w);
}

// ---- sums, 9 ----

__device__ __forceinline__ u16 ended(float sum, const u16* bias, u32 row) {
  return rounded(bias ? sum + __uint_as_float((u32)__ldg(bias + row) << 16) : sum);
}

// Of a stripe and eight rows of x, what a lane has with mma.m16n8k16: two rows of y from row k on, and two places of each.
__device__ __forceinline__ void store_ended(u16* y, u64 y_stride, u32 n, u32 rows, u32 k, u32 row, float4 s, const u16* bias) {
  if (k >= n || row >= rows) return;
  u16* const to = y + k * y_stride + row;
  to[0] = ended(s.x, bias, row);
  if (k + 1 < n) to[y_stride] = ended(s.y, bias, row);
  if (row + 8 >= rows) return;
  to[8] = ended(s.z, bias, row + 8);
  if (k + 1 < n) to[y_stride + 8] = ended(s.w, bias, row + 8);
}

__device__ __forceinline__ float plus(float a, float b) { return a + b; }
__device__ __forceinline__ float4 plus(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// The partial sums of one row, or of four: ((v0 + v1) + (v2 + v3)) + ((v4 + v5) + (v6 + v7)).
template <typename T>
__device__ __forceinline__ T pairwise(const T* v) {
  return plus(plus(plus(v[0], v[1]), plus(v[2], v[3])), plus(plus(v[4], v[5]), plus(v[6], v[7])));
}
