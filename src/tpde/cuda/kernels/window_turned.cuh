// window_turned.cuh: sums as `wgmma` leaves them, ended, turned and stored, so that 32 bytes of a row of y come together.

#define ENDED 2048u  // bytes of a warp's ended sums: 16 rows of the matrix, 64 of x

// What is added to sums of a lane's two rows of the matrix, if there is a bias.
struct Added {
  float low, high;
  bool there;
};

__device__ __forceinline__ Added added_to(const u16* bias, u32 row, u32 lane) {
  if (!bias) return {0, 0, false};
  const u16* const p = bias + row + lane / 4;
  return {__uint_as_float((u32)__ldg(p) << 16), __uint_as_float((u32)__ldg(p + 8) << 16), true};
}

// Two sums of a row of the matrix, as they are stored.
__device__ __forceinline__ u32 two_ended(float a, float b, float bias, bool add) {
  return rounded(add ? a + bias : a) | (u32)rounded(add ? b + bias : b) << 16;
}

// What 16 rows of the matrix give with 64 rows of x, for a function that stores it: eight words of one of these, from the first
// or from the eighth on.
template <typename F>
__device__ __forceinline__ void end_turned(const float* sum, u8* ended, const Added& bias, u32 lane, const F& store) {
  // 64 rows of x: 32 bytes each, whose halves trade places in every other four, so that they meet no bank.
  const u32 made = shared_address(ended), k = lane / 16 * 8 + lane % 8, half = lane / 8 % 2 ^ k / 4 % 2;
#pragma unroll
  for (u32 j = 0; j < 8; j += 2) {
    const float* const s = sum + 4 * j;
    store_turned(made + 256 * j + 32 * k + 16 * half, two_ended(s[0], s[1], bias.low, bias.there),
                 two_ended(s[2], s[3], bias.high, bias.there), two_ended(s[4], s[5], bias.low, bias.there),
                 two_ended(s[6], s[7], bias.high, bias.there));
  }
  __syncwarp();
#pragma unroll
  for (u32 j = 0; j < 4; j++) {
    const u32 i = 16 * j + lane / 2;
    const uint4 v = *(const uint4*)(ended + 32 * i + 16 * (lane % 2 ^ i / 4 % 2));
    store(i, 8 * (lane % 2), v);
  }
  __syncwarp();
}
