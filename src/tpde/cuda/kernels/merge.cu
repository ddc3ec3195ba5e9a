// merge.cu: byte planes to words, for blobs whose planes another decoder has decoded (docs/format.md 2.3, 4 and 6).
//
// A block takes a chunk. Raw planes are read from the blob, coded planes from the slots where they were decoded.
// Every chunk's checksum is compared: it is all that tells whether the other decoder met damage.
//
// Any bytes are safe: records are compared with the blob's size, and with the number of slots that the host found.
//
// Macros: WORD, bytes of a word; ROTATE.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define THREADS 128  // the checksum's accumulators, format.md 4.5: each thread keeps one
#define AHEAD 8      // loads of a thread under way
#define GOLDEN 0x9E3779B1u

struct Blob {  // src/tpde/cuda/nvcomp.py writes this
  u64 words, segment_words, blob_bytes, chunks, index_at;
  u32 chunk_words, segment_chunks, unit_log2, number;
  u64 reserved;
};

// The 32 bits number i of the chunk's original bytes, before they are rotated back. Bytes past the end are not zero.
__device__ __forceinline__ u32 gather(const u8* const plane[WORD], u32 fill, u32 i) {
#if WORD == 1
  return plane[0] ? ((const u32*)plane[0])[i] : fill * 0x01010101u;
#elif WORD == 2
  u32 a = plane[0] ? ((const u16*)plane[0])[i] : fill * 0x0101u;
  u32 b = plane[1] ? ((const u16*)plane[1])[i] : fill * 0x0101u;
  return __byte_perm(a, b, 0x5140);
#else
  u32 word = WORD == 4 ? i : i / 2, x = 0;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const u8* p = WORD == 8 && i & 1 ? plane[j + WORD - 4] : plane[j];
    x |= (p ? (u32)p[word] : fill) << (8 * j);
  }
  return x;
#endif
}

__device__ __forceinline__ u32 rotate_back(u32 x, u32 i) {
  if (!ROTATE) return x;
  if (WORD == 1) return (x >> 1 & 0x7f7f7f7fu) | (x << 7 & 0x80808080u);
  if (WORD == 2) return (x >> 1 & 0x7fff7fffu) | (x << 15 & 0x80008000u);
  if (WORD == 8 && !(i & 1)) return x;
  return (x & 0xffffu) | (x >> 1 & 0x7fff0000u) | (x << 15 & 0x80000000u);
}

__device__ __forceinline__ u32 rotl5(u32 x) { return x << 5 | x >> 27; }

// Chunks `first` to `first + gridDim.x - 1`. Behind `header` lie `slot[0]` to `slot[chunks]`: chunk k's coded planes
// are in slots `slot[k]` to `slot[k + 1] - 1`. Slot `base` is at `planes`, and each has chunk_words bytes.
extern "C" __global__ void __launch_bounds__(THREADS, 8)
merge(const Blob* __restrict__ header, u64 blob, u64 first, u64 base, u64 planes, u64 out, u32* status) {
  __shared__ u32 total;
  const Blob t = *header;
  const u64* slot = (const u64*)(header + 1);
  const u64 number = first + blockIdx.x;
  const u32* record = (const u32*)(blob + t.index_at) + 3 * number;
  const u32 sum = record[1], modes = record[2] & 0xffff, fill = record[2] >> 24;
  const u64 segment = number / t.segment_chunks, start = segment * t.segment_words;
  const u64 word = start + (number - segment * t.segment_chunks) * t.chunk_words;
  const u32 n = (u32)min((u64)t.chunk_words, min(start + t.segment_words, t.words) - word);
  const u64 begin = (u64)record[0] << t.unit_log2;
  const u64 end = number + 1 < t.chunks ? (u64)record[3] << t.unit_log2 : t.blob_bytes;
  bool good = begin <= end && end <= t.blob_bytes;
  const u8* plane[WORD];
  u64 raw = 0, coded = slot[number];
#pragma unroll
  for (int p = 0; p < WORD; p++) {
    const u32 mode = modes >> (2 * p) & 3;
    plane[p] = 0;
    if (mode == 0) {
      plane[p] = (const u8*)(blob + begin + raw);
      raw += (n + 15) & ~15u;
    } else if (mode == 2) {
      plane[p] = (const u8*)(planes + (coded++ - base) * t.chunk_words);
    } else if (mode == 3) {
      good = false;
    }
  }
  good = good && raw <= end - begin && coded == slot[number + 1];
  if (threadIdx.x == 0) total = 0;
  __syncthreads();
  if (good) {
    const u32 bytes = n * WORD, steps = (bytes + 3) / 4;
    u8* to = (u8*)(out + word * WORD);
    const bool aligned = ((u64)to & 3) == 0;
    u32 h = (threadIdx.x + 1) * GOLDEN;
    for (u32 i = threadIdx.x; i < steps; i += THREADS * AHEAD) {
      u32 x[AHEAD];
#pragma unroll
      for (int k = 0; k < AHEAD; k++)
        if (i + k * THREADS < steps) x[k] = gather(plane, fill, i + k * THREADS);
#pragma unroll
      for (int k = 0; k < AHEAD; k++) {
        const u32 at = i + k * THREADS;
        if (at >= steps) continue;
        u32 v = rotate_back(x[k], at);
        const u32 have = min(bytes - 4 * at, 4u);
        if (have < 4) v &= (1u << (8 * have)) - 1;
        h = (rotl5(h) ^ v) * GOLDEN;
        if (aligned && have == 4) {
          ((u32*)to)[at] = v;
        } else {
          for (u32 j = 0; j < have; j++) to[4 * at + j] = (u8)(v >> (8 * j));
        }
      }
    }
    const u32 g = (h ^ (h >> 15)) * 0x85EBCA77u;
    const u32 mine = __reduce_add_sync(~0u, g ^ (g >> 13));
    if (threadIdx.x % 32 == 0) atomicAdd(&total, mine);
  }
  __syncthreads();
  if (threadIdx.x == 0 && (!good || total != sum) && atomicCAS(status, 0u, 1u) == 0u) {
    status[1] = t.number;
    status[2] = (u32)number;
    status[3] = (u32)(number >> 32);
  }
}
