// window_stages.cuh: what products of many rows of x share that take it in pieces, by turns in STAGES places of shared memory
// (window_many.cu, window_experts_many.cu). Barriers say of each whether it is filled, and whether nobody reads it.
//
// Macros: those of window_halves.cuh; WIDE, warps that multiply: 8 or 12.

#define TILES (NB / 8u)
#define OTHERS 4u  // warps that do not multiply: registers are shared out by four warps
#define STAGES 4u  // pieces of x in shared memory
// Registers of threads that multiply, and of others. All have 128 or 168 at first, and 64 Ki are there.
#define REGISTERS (WIDE == 12 ? 152 : 232)
#define OTHER_REGISTERS (WIDE == 12 ? 56 : 40)
static_assert(registers_suffice(WIDE, REGISTERS, OTHERS, OTHER_REGISTERS, WIDE == 12 ? 128 : 168));
// Tiles of the matrix that are decoded before their products begin, where registers have room for their words.
#define AT_ONCE (WIDE == 12 ? 1u : 2u)

// Where a warp is in pieces of x, and the barriers.
struct Stages {
  u32 filled, emptied;  // shared addresses
  u32 stage, parity;
};

__device__ __forceinline__ void make_stages(u32 filled, u32 emptied) {
  for (u32 i = 0; i < STAGES; i++) make_barrier(filled + 8 * i, 1), make_barrier(emptied + 8 * i, WIDE);
  fence_shared();
}

__device__ __forceinline__ void go_on(Stages& s) {
  if (++s.stage == STAGES) s.stage = 0, s.parity ^= 1;
}

// Copy the pieces of chunks, of so many bytes each, to the places that have been emptied.
__device__ __forceinline__ void copy_pieces(Stages& s, u8* xs, const u8* from, u32 begin, u32 end, u32 bytes, u32 lane) {
#pragma unroll 1
  for (u32 i = 4 * begin; i < 4 * end; i++) {
    wait_on(s.emptied + 8 * s.stage, s.parity);  // the first time nobody has read there
    if (lane == 0) {
      expect(s.filled + 8 * s.stage, bytes);
      copy_bulk(shared_address(xs) + s.stage * X_PIECE, from, bytes, s.filled + 8 * s.stage);
    }
    __syncwarp();
    from += bytes;
    go_on(s);
  }
}

// Leave the last piece: all its products have ended.
__device__ __forceinline__ void leave_piece(const Stages& s, u32 lane) {
  if (lane == 0) arrive_at(s.emptied + 8 * ((s.stage ? s.stage : STAGES) - 1));
}

// Entries of a chunk, of which a lane has two as they are put.
struct Escapes {
  Entries entries;
  Put a, b;
};

__device__ __forceinline__ Escapes escapes_of(const Matrix& m, const Entries& e, u32 lane) {
  return {e, put_of(m, e.first, lane < e.count), put_of(m, e.second, lane + 32 < e.count)};
}

// Add the products of a tile's chunk `i` to sums; `begin` is its first. The entries of the chunk's first half have been put;
// those of its second, and of the next chunk's first, are put meanwhile. `fetch` has what follows copied where a half was read.
// `x` describes the first place, `step` is between its columns.
template <typename F>
__device__ __forceinline__ void multiply_chunk(float* sum, Stages& s, u64 x, u32 step, u32 i, u32 begin, u8* planes,
                                               const u8* held, u32 pairs, const Rows& r, const Matrix& m, const Escapes& now,
                                               const Matrix& next, const Entries& coming, u32 lane, const F& fetch) {
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
      const u64 at = x + (s.stage * X_PIECE >> 4);
      Pair pair;
      take_pair(pair, held, pairs, plane, p, lane);
#pragma unroll
      for (u32 first = 0; first < 2; first += AT_ONCE) {
        u32 w[AT_ONCE][8];
#pragma unroll
        for (u32 t = 0; t < AT_ONCE; t++) words_of(codes, pair, r, p, first + t, w[t]);
        if (first == 0) wait_on(s.filled + 8 * s.stage, s.parity);
        registers_are_set();
#pragma unroll
        for (u32 t = 0; t < AT_ONCE; t++) multiply_tile(sum, w[t], at, first + t, step);
        commit();
        if (first == 0 && p == 0) put_entries(planes + HALF_PLANE, m, now.entries, now.a, now.b, 1, lane);
        if (first == 0 && p == 2) {
          const Escapes then = escapes_of(next, coming, lane);  // made again when they are needed: registers have no room
          put_entries(planes, next, coming, then.a, then.b, 0, lane);
        }
        wait_for_products<1>();  // those before have ended
        if (first == 0 && (i > begin || p)) leave_piece(s, lane);  // the one before
      }
      go_on(s);
    }
    __syncwarp();  // the next chunk comes where this one was read
    fetch(half);
    close_copies();
    wipe_entries(plane, m, now.entries, now.a, now.b, half, lane);
  }
}
