// scatter.cu: sparse changes to a tensor, written in one launch over a chunk map.
//
// A chunk is a run of positions (u32, counted from the chunk's origin) and as many new words. Words are written,
// never added: the result is a matter of bits, and the order of writes does not matter, since positions are
// distinct. A position outside the tensor is reported and nothing is written for it.
//
// Macros: WORD, bytes of a word; THREADS of a block.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#if WORD == 1
typedef u8 word;
#elif WORD == 2
typedef u16 word;
#elif WORD == 4
typedef u32 word;
#else
typedef u64 word;
#endif

#define EACH 4  // positions of a thread, loaded before the first is used: 4 random writes under way

// src/tpde/cuda/scatter.py writes these.
struct Chunk {
  u64 positions, words;  // offsets from `data`
  u64 origin;            // the word that positions count from
  u32 changes, reserved;
};

// A tile is THREADS * EACH positions of a chunk; `tiles` of them hold the largest chunk.
extern "C" __global__ void __launch_bounds__(THREADS)
scatter(const Chunk* __restrict__ chunks, u64 first, u64 count, u64 tiles, u64 data, u64 out, u64 words, u32* status) {
  for (u64 i = blockIdx.x; i < count * tiles; i += gridDim.x) {
    const u64 number = first + i / tiles;
    const Chunk c = chunks[number];
    const u32* positions = (const u32*)(data + c.positions);
    const word* values = (const word*)(data + c.words);
    const u64 start = (i % tiles) * THREADS * EACH + threadIdx.x;
    u64 at[EACH];
    word value[EACH];
#pragma unroll
    for (int k = 0; k < EACH; k++) {
      const u64 j = start + k * THREADS;
      if (j >= c.changes) continue;
      at[k] = c.origin + __ldcs(positions + j);
      value[k] = __ldcs(values + j);
    }
#pragma unroll
    for (int k = 0; k < EACH; k++) {
      if (start + k * THREADS >= c.changes) continue;
      if (at[k] < words) {
        ((word*)out)[at[k]] = value[k];
      } else if (atomicCAS(status, 0u, 1u) == 0u) {
        status[1] = 0;
        status[2] = (u32)number;
        status[3] = (u32)(number >> 32);
      }
    }
  }
}
