// digest.cu: XXH3-128 (seed 0) of tensors on the device, as blob headers have it (docs/format.md 2).
//
// XXH3 goes over blocks of 1 KiB. What a block adds to the eight accumulators does not depend on them: `sums` computes it
// for all blocks at once, at the speed of memory. Between two blocks the accumulators are scrambled, which no order but
// theirs gives: `chain` takes a block of threads for each tensor, in which eight threads go over the sums, and does the
// rest of more than 240 bytes. The host merges the accumulators.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

#define ALL 0xFFFFFFFFu
#define BLOCK 1024u // bytes
#define STRIPE 64u
#define LANES 8u    // accumulators
#define PRIME32_1 0x9E3779B1ull
#define SUM_WARPS 8u
#define TOGETHER 4u // blocks that a warp takes at a time
#define CHAIN_THREADS 256u
#define STAGE 1024u // numbers that are staged at a time: of 128 blocks
#define OWN (STAGE / 2 / CHAIN_THREADS)

// The first 192 bytes of XXH3's secret, and what the accumulators start with.
__device__ const u64 SECRET[24] = {
    0xbe4ba423396cfeb8ull, 0x1cad21f72c81017cull, 0xdb979083e96dd4deull, 0x1f67b3b7a4a44072ull, 0x78e5c0cc4ee679cbull,
    0x2172ffcc7dd05a82ull, 0x8e2443f7744608b8ull, 0x4c263a81e69035e0ull, 0xcb00c391bb52283cull, 0xa32e531b8b65d088ull,
    0x4ef90da297486471ull, 0xd8acdea946ef1938ull, 0x3f349ce33f76faa8ull, 0x1d4f0bc7c7bbdcf9ull, 0x3159b4cd4be0518aull,
    0x647378d9c97e9fc8ull, 0xc3ebd33483acc5eaull, 0xeb6313faffa081c5ull, 0x49daf0b751dd0d17ull, 0x9e68d429265516d3ull,
    0xfca1477d58be162bull, 0xce31d07ad1b8f88full, 0x280416958f3acb45ull, 0x7e404bbbcafbd7afull};
__device__ const u64 START[LANES] = {0xC2B2AE3Dull,         0x9E3779B185EBCA87ull, 0xC2B2AE3D27D4EB4Full,
                                     0x165667B19E3779F9ull, 0x85EBCA77C2B2AE63ull, 0x85EBCA77ull,
                                     0x27D4EB2F165667C5ull, 0x9E3779B1ull};

// A tensor; src/tpde/cuda/digest.py writes these.
struct Item {
  u64 at, nbytes;
  u64 sums;  // offset in scratch memory
};

__device__ __forceinline__ u64 product(u64 data, u64 key) {
  const u64 x = data ^ key;
  return (u64)(u32)x * (u32)(x >> 32);
}

// Eight bytes at any address.
__device__ __forceinline__ u64 load8(const u8* p) {
  u64 x = 0;
#pragma unroll
  for (u32 j = 0; j < 8; j++) x |= (u64)p[j] << 8 * j;
  return x;
}

template <bool WIDE>
__device__ __forceinline__ ulonglong2 load16(const u8* p) {
  if (WIDE) return __ldg((const ulonglong2*)p);
  return {load8(p), load8(p + 8)};
}

// A lane has 16 bytes of two stripes of each block, for two accumulators.
template <bool WIDE>
__device__ __forceinline__ void sum_blocks(const u8* from, u64 blocks, ulonglong2* to) {
  const u32 lane = threadIdx.x % 32, stripe = lane / 4, part = lane % 4;
  const u64 step = (u64)gridDim.x * SUM_WARPS * TOGETHER;
  u64 keys[4];
#pragma unroll
  for (u32 k = 0; k < 4; k++) keys[k] = SECRET[stripe + 8 * (k / 2) + 2 * part + k % 2];
  for (u64 first = ((u64)blockIdx.x * SUM_WARPS + threadIdx.x / 32) * TOGETHER; first < blocks; first += step) {
    ulonglong2 x[2 * TOGETHER];
#pragma unroll
    for (u32 k = 0; k < 2 * TOGETHER; k++)
      if (first + k / 2 < blocks) x[k] = load16<WIDE>(from + (first + k / 2) * BLOCK + 512 * (k % 2) + 16 * lane);
#pragma unroll
    for (u32 k = 0; k < TOGETHER; k++) {
      if (first + k >= blocks) break;
      const ulonglong2 y = x[2 * k], z = x[2 * k + 1];
      u64 a = product(y.x, keys[0]) + product(z.x, keys[2]) + y.y + z.y;
      u64 b = product(y.y, keys[1]) + product(z.y, keys[3]) + y.x + z.x;
#pragma unroll
      for (int d = 4; d < 32; d *= 2) {
        a += __shfl_xor_sync(ALL, a, d);
        b += __shfl_xor_sync(ALL, b, d);
      }
      if (lane < 4) to[4 * (first + k) + lane] = ulonglong2{a, b};
    }
  }
}

// What each whole block before the last adds to the accumulators.
extern "C" __global__ void __launch_bounds__(32 * SUM_WARPS, 4)
sums(u64 at, u64 blocks, ulonglong2* to) {
  if (at % 16 == 0) sum_blocks<true>((const u8*)at, blocks, to);
  else sum_blocks<false>((const u8*)at, blocks, to);
}

// The accumulators of tensors, from the start of scratch memory on.
extern "C" __global__ void __launch_bounds__(CHAIN_THREADS)
chain(const Item* items, u8* scratch) {
  __shared__ u64 stage[STAGE];
  const Item item = items[blockIdx.x];
  const u32 i = threadIdx.x;
  const u64 blocks = (item.nbytes - 1) / BLOCK, numbers = LANES * blocks;
  const u64* given = (const u64*)(scratch + item.sums);
  const u64 key = SECRET[16 + i % LANES];
  u64 sum = START[i % LANES];
  ulonglong2 next[OWN];
#pragma unroll
  for (u32 k = 0; k < OWN; k++) {
    const u64 at = 2 * (i + k * CHAIN_THREADS);
    if (at < numbers) next[k] = *(const ulonglong2*)(given + at);
  }
  for (u64 first = 0; first < numbers; first += STAGE) {
    __syncthreads();
#pragma unroll
    for (u32 k = 0; k < OWN; k++) {
      const u32 at = 2 * (i + k * CHAIN_THREADS);
      stage[at] = next[k].x;
      stage[at + 1] = next[k].y;
    }
    __syncthreads();
#pragma unroll
    for (u32 k = 0; k < OWN; k++) {
      const u64 at = first + STAGE + 2 * (i + k * CHAIN_THREADS);
      if (at < numbers) next[k] = *(const ulonglong2*)(given + at);
    }
    if (i >= LANES) continue;
    const u32 count = (u32)(numbers - first < STAGE ? numbers - first : STAGE);
#pragma unroll 8
    for (u32 k = i; k < count; k += LANES) {
      sum += stage[k];
      sum = (sum ^ sum >> 47 ^ key) * PRIME32_1;
    }
  }
  if (i >= LANES) return;
  const u8* rest = (const u8*)(item.at + BLOCK * blocks);
  const u32 left = (u32)(item.nbytes - BLOCK * blocks), stripes = (left - 1) / STRIPE;
#pragma unroll 1
  for (u32 s = 0; s < stripes; s++) {
    const u8* stripe = rest + STRIPE * s;
    sum += product(load8(stripe + 8 * i), SECRET[s + i]) + load8(stripe + 8 * (i ^ 1));
  }
  // The last 64 bytes, with the secret from byte 121 on.
  const u8* last = rest + left - STRIPE;
  sum += product(load8(last + 8 * i), SECRET[15 + i] >> 8 | SECRET[16 + i] << 56) + load8(last + 8 * (i ^ 1));
  ((u64*)scratch)[LANES * blockIdx.x + i] = sum;
}
