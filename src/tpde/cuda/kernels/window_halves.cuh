// window_halves.cuh: what products of many rows of x share (docs/windows.md 9): x in pieces, as `wgmma` takes it, and chunks
// whose halves are copied, put and multiplied by turns.
//
// Macros: those of window.cuh; NB, rows of x in a piece.

#define HALF_PLANE 2048u  // bytes: the places of half a chunk
#define WARP_ROOM (HALF_PLANE + CHUNK_BYTES)
#define LOW_AT 1536u       // where the low bytes of a chunk are
#define X_PIECE (8 * X_STEP)
#define ARRANGERS 256  // threads of a block of `arrange`

// ---- x ----

// Write x in pieces, NB rows after the others, with zeros for rows and columns that are not there. A thread takes eight columns of a row, an octet q
// of four: wgmma takes elements 0 to 3 as columns 2q, 2q + 1, 2q + 8, 2q + 9 of a product, 4 to 7 as those of the next one
// (windows.md 2.2).
extern "C" __global__ void __launch_bounds__(ARRANGERS)
arrange(const u16* x, u64 x_stride, u32 n, u32 columns, u8* to) {
  follow_early();  // the next kernel's first weights come while this one waits: 2 us less a product
  wait_for_last();
  const u32 octets = (columns + 255) / 256 * 32, there = (columns + 7) / 8, tile = octets * NB;
  for (u32 i = blockIdx.x * ARRANGERS + threadIdx.x; i < (n + NB - 1) / NB * tile; i += gridDim.x * ARRANGERS) {
    // Four octets of eight rows are 128 bytes of each product's words.
    const u32 of = i / tile, j = i % tile, row = j / 32 % (NB / 8) * 8 + j / 4 % 8, octet = j / (4 * NB) * 4 + j % 4;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (of * NB + row < n && octet < there) v = load_16(x + (of * NB + row) * x_stride + 8 * octet);
    u8* const p = to + (u64)of * tile * 16 + (u64)(octet / 4) * (4 * X_STEP) + 16 * row + 4 * (octet % 4);
    *(u32*)p = v.x;
    *(u32*)(p + X_STEP) = v.y;
    *(u32*)(p + 2 * X_STEP) = v.z;
    *(u32*)(p + 3 * X_STEP) = v.w;
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
__device__ __forceinline__ void for_more(const Matrix& m, const Entries& e, u32 lane, const F& take) {
#pragma unroll 1
  for (u32 i = lane + 64; i < e.count; i += 32) take(__ldg((const u16*)m.entries + e.at + i));
}

// A lane's four code words from the one numbered k on, and its low bytes of tile j, of a chunk of so many pairs: without
// branches, which would have products wait for each other. Words of columns beyond them are as padding is, finite numbers.
__device__ __forceinline__ uint4 take_codes(const u8* from, u32 pairs, u32 k, u32 lane) {
#if TAIL
  const bool whole = pairs == 4;
  const u8* const p = from + 128 * k + (whole ? 16 : 4) * lane;
  const u32 step = whole ? 4 : 128;
  u32 v[4];
#pragma unroll
  for (u32 i = 0; i < 4; i++) {
    const u32 word = *(const u32*)(p + step * i);
    v[i] = k + i < 3 * pairs ? word : 0;
  }
  return make_uint4(v[0], v[1], v[2], v[3]);
#else
  return *(const uint4*)(from + 128 * k + 16 * lane);
#endif
}

__device__ __forceinline__ uint4 take_low(const u8* from, u32 pairs, u32 j, u32 lane) {
#if TAIL
  const bool whole = pairs == 4;
  const u8* const p = from + LOW_AT + 512 * j + (whole ? 16 : 4) * lane;
  const u32 step = whole ? 4 : 128;
  u32 v[4];
#pragma unroll
  for (u32 i = 0; i < 4; i++) {
    const u32 word = *(const u32*)(p + step * i);
    v[i] = j < 2 * pairs ? word : 0;
  }
  return make_uint4(v[0], v[1], v[2], v[3]);
#else
  return *(const uint4*)(from + LOW_AT + 512 * j + 16 * lane);
#endif
}

// A chunk, and where it lies.
struct Place {
  const u8* body;
  u32 pairs;  // of tiles
};

__device__ __forceinline__ Place place_of(const Matrix& m, u32 stripe, u32 chunk) {
  return {body_of(m, stripe, chunk), pairs_of(m, chunk)};
}
