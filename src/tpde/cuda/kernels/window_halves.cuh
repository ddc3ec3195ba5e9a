// window_halves.cuh: what products of many rows of x share (docs/windows.md 9): chunks whose halves are copied, put and
// multiplied by turns, by pieces of x.
//
// Macros: those of window.cuh; NB, rows of x in a piece, at most.

#define HALF_PLANE 2048u  // bytes: the places of half a chunk
#define WARP_ROOM (HALF_PLANE + CHUNK_BYTES)
#define LOW_AT 1536u       // where the low bytes of a chunk are
#define X_PIECE (8 * X_STEP)

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

// Have the entries of half a chunk put, or wiped.
__device__ __forceinline__ void put_entries(u8* plane, const Matrix& m, const Entries& e, const Put& a, const Put& b, u32 half, u32 lane) {
  put_half(plane, a, half), put_half(plane, b, half);
  if (e.count > 64) for_more(m, e, lane, [&](u32 entry) { put_half(plane, put_of(m, entry, true), half); });
}

__device__ __forceinline__ void wipe_entries(u8* plane, const Matrix& m, const Entries& e, const Put& a, const Put& b, u32 half, u32 lane) {
  wipe_half(plane, a, half), wipe_half(plane, b, half);
  if (e.count > 64) for_more(m, e, lane, [&](u32 entry) { wipe_half(plane, {entry & 4095, 0}, half); });
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

// What a lane has of a pair of tiles, but its codes: low bytes, and what is XORed to high ones.
struct Pair {
  uint4 low[2];
  uint2 escapes[4];
};

__device__ __forceinline__ void take_pair(Pair& v, const u8* from, u32 pairs, const u8* plane, u32 p, u32 lane) {
  const uint2* const escapes = (const uint2*)plane + lane;
#pragma unroll
  for (u32 t = 0; t < 2; t++) v.low[t] = take_low(from, pairs, 2 * p + t, lane);
#pragma unroll
  for (u32 t = 0; t < 4; t++) v.escapes[t] = escapes[128 * (p % 2) + 32 * t];
}

// The words of tile t of pair p.
__device__ __forceinline__ void words_of(const uint4* codes, const Pair& v, const Rows& r, u32 p, u32 t, u32* w) {
  tile_of(t, word_of(codes, 3 * p), word_of(codes, 3 * p + 1), word_of(codes, 3 * p + 2), v.low[t], r, v.escapes[2 * t], v.escapes[2 * t + 1], w);
}

// Begin the products of a tile's words, and of its part of a piece of x.
__device__ __forceinline__ void multiply_tile(float* sum, const u32* w, u64 piece, u32 t, u32 step = X_STEP) {
  wgmma<NB>(sum, w[0], w[4], w[1], w[5], piece + (4 * t * step >> 4));
  wgmma<NB>(sum, w[2], w[6], w[3], w[7], piece + ((4 * t + 2) * step >> 4));
}
