// window_cluster.cuh: what products by clusters of blocks share (docs/windows.md 9): each block takes a part of the columns,
// and sends its sums of a turn's stripes to the blocks of the cluster that end them.
//
// Macros: NB, the most rows of x; STRIPES, of a turn.

#define TILES (NB / 8u)
#define SUMS 512u                           // bytes of a part's sums of a stripe and eight rows of x, 16 a lane
#define SLOTS (STRIPES * TILES / CLUSTER)   // of those that a block ends in a turn
#define INBOX (SLOTS * PARTS * SUMS)        // bytes of all parts' sums of them
#define X_STEP (NB * 16u)                   // bytes between the words that wgmma takes of columns 0 to 7 and 8 to 15

// Room for a turn's sums in a block's shared memory, and the barriers that tell that they are there, and have been read.
struct Inbox {
  u32 at, full, read;
};

// Send a part's sums of a turn's stripe `beside`, and tell the blocks that end them.
__device__ __forceinline__ void send_sums(const float* sum, const Inbox& to, u32 part, u32 beside, u32 lane) {
#pragma unroll
  for (u32 t = 0; t < TILES; t++) {
    const u32 pair = beside * TILES + t, block = pair % CLUSTER;
    const u32 at = to.at + (pair / CLUSTER * PARTS + part) * SUMS + 16 * lane;
    send(in_block(at, block), in_block(to.full, block), sum + 4 * t);
  }
}

// Where y is stored, and of which rows.
struct Out {
  u16* __restrict__ y;
  u64 stride;
  u32 n, rows;
  const u16* __restrict__ bias;
};

// Add up the sums of a turn, of stripes from `first` on, as one of WARPS warps; tell all blocks that they have been read, if
// others come there; and store y. Nobody waits for what is stored.
template <u32 WARPS>
__device__ __forceinline__ void end_sums(const float4* sums, const Inbox& from, u32 parity, bool again, const Out& out, u32 first, u32 part, u32 warp, u32 lane) {
  float4 sum[(SLOTS + WARPS - 1) / WARPS];
  keep_register(warp), keep_register(part);  // places are computed here: before all turns they would take registers
  wait_on(from.full, parity);
#pragma unroll
  for (u32 i = 0; i * WARPS < SLOTS; i++) {
    const float4* const p = sums + min(WARPS * i + warp, SLOTS - 1) * PARTS * 32 + lane;
    float4 v[PARTS];
#pragma unroll
    for (u32 j = 0; j < PARTS; j++) v[j] = p[32 * j];
    sum[i] = pairwise(v);
  }
  if (again) {
    if (warp + lane == 0) expect(from.full, INBOX);
    __syncwarp();
    if (lane < CLUSTER) arrive_in(from.read, lane);
  }
#pragma unroll
  for (u32 i = 0; i * WARPS < SLOTS; i++) {
    // A stripe of the turn, and eight rows of x.
    const u32 slot = WARPS * i + warp, pair = slot * CLUSTER + part, k = pair % TILES * 8 + lane % 4 * 2;
    if (slot < SLOTS) store_ended(out.y, out.stride, out.n, out.rows, k, 16 * (first + pair / TILES) + lane / 4, sum[i], out.bias);
  }
}
