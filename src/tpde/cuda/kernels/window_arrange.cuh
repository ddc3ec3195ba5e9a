// window_arrange.cuh: x as products of many rows take it: in pieces of 64 columns, as `wgmma` takes these.
//
// Macros: NB, rows of x in a piece; FLAGS, words after x that are cleared.

#define ARRANGERS 256  // threads of a block

// Write x in pieces, NB rows after the others, with zeros for rows and columns that are not there.
extern "C" __global__ void __launch_bounds__(ARRANGERS)
arrange(const u16* x, u64 x_stride, u32 n, u32 columns, u8* to) {
  follow_early();  // the next kernel's first weights come while this one waits: 2 us less a product
  wait_for_last();
  const u32 octets = (columns + 255) / 256 * 32, there = (columns + 7) / 8, tile = octets * NB, all = (n + NB - 1) / NB * tile;
  const u32 start = blockIdx.x * ARRANGERS + threadIdx.x, step = gridDim.x * ARRANGERS;
#ifdef FLAGS
  for (u32 i = start; i < FLAGS; i += step) ((u32*)(to + (u64)all * 16))[i] = 0;
#endif
  for (u32 i = start; i < all; i += step) {
    // Four octets of eight rows are 128 bytes of each product's words.
    const u32 of = i / tile, j = i % tile, row = j / 32 % (NB / 8) * 8 + j / 4 % 8, octet = j / (4 * NB) * 4 + j % 4;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (of * NB + row < n && octet < there) v = load_16(x + (of * NB + row) * x_stride + 8 * octet);
    arrange_octet(to + (u64)of * tile * 16, X_STEP, row, octet, v);
  }
}
