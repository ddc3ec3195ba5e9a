// window_cluster.cuh: what products by clusters of blocks share (docs/windows.md 9): each block takes parts of the columns,
// and sends its sums of a turn's stripes to the blocks of the cluster that end them.
//
// Macros: NB, the most rows of x; STRIPES, of a turn; CLUSTER, blocks.

#define TILES (NB / 8u)
#define SUMS 512u                            // bytes of a block's sums of a stripe and eight rows of x, 16 a lane
#define SLOTS (STRIPES * TILES / CLUSTER)    // of those that a block ends in a turn
#define TURN_SUMS (SLOTS * CLUSTER * SUMS)   // bytes of all blocks' sums of them
#define SENT (SLOTS * (CLUSTER - 1) * SUMS)  // of them, those that other blocks send
// Who arrive at barriers of a block: that sums are there, who expects those of others, and lanes that stored its own; that
// sums are read, for each warp that ends some a lane of each other block, and all lanes of its own. One lane a warp would do,
// but `racecheck` does not see that it arrives for others; all take no longer.
#define TELLING (1 + 32 * STRIPES)
#define READING (CLUSTER - 1 + 32)

// Room for a turn's sums in a block's shared memory, and the barriers that tell that they are there, and have been read.
struct Room {
  u32 at, there, read;
};

// Where y is stored, and of which rows.
struct Out {
  u16* __restrict__ y;
  u64 stride;
  u32 n, rows;
  const u16* __restrict__ bias;
};

// The sums of eight blocks added up, or of four, whose two parts are added up already: in the order of `pairwise`.
__device__ __forceinline__ float4 of_blocks(const float4* v) {
  if constexpr (CLUSTER == PARTS) return pairwise(v);
  else return plus(plus(v[0], v[1]), plus(v[2], v[3]));
}

// Send a warp's sums of its stripe, `beside` others of the turn, to the blocks that end them, meanwhile. Its own block's it
// stores: sending those as well took 4 us of 96, of 28672 x 4096 words when clusters had 128 rows of x, on an H100.
__device__ __forceinline__ void send_sums(const float* sum, const Room& to, u32 rank, u32 beside, u32 lane) {
#pragma unroll
  for (u32 t = 0; t < TILES; t++) {
    const u32 pair = beside * TILES + t, block = pair % CLUSTER;
    const u32 at = to.at + (pair / CLUSTER * CLUSTER + rank) * SUMS + 16 * lane;
    if (block == rank) store_shared(at, sum + 4 * t);
    else send(in_block(at, block), in_block(to.there, block), sum + 4 * t);
  }
  arrive_at(to.there);
}

// End a turn's sums, of stripes from `first` on, as one of WARPS warps; tell all blocks that they have been read, if others
// come there, `next` bytes from other blocks; and store y. Nobody waits for what is stored. Where a turn has fewer stripes,
// what nobody sent is read, too: it is of rows that `out` leaves out.
template <u32 WARPS>
__device__ __forceinline__ void end_sums(const float4* sums, const Room& from, u32 parity, u32 next, const Out& out, u32 first, u32 rank, u32 warp, u32 lane) {
  float4 sum[(SLOTS + WARPS - 1) / WARPS];
  // Places are computed here: before all turns they would take registers.
  keep_register(warp), keep_register(rank), keep_register(lane);
  wait_on(from.there, parity);
#pragma unroll
  for (u32 i = 0; i * WARPS < SLOTS; i++) {
    const float4* const p = sums + min(WARPS * i + warp, SLOTS - 1) * CLUSTER * 32 + lane;
    float4 v[CLUSTER];
#pragma unroll
    for (u32 j = 0; j < CLUSTER; j++) v[j] = p[32 * j];
    sum[i] = of_blocks(v);
  }
  if (next) {
    if (warp + lane == 0) expect(from.there, next);
    __syncwarp();
    if (lane < CLUSTER && lane != rank) arrive_in(from.read, lane);
    arrive_at(from.read);
  }
#pragma unroll
  for (u32 i = 0; i * WARPS < SLOTS; i++) {
    // A stripe of the turn, and eight rows of x.
    const u32 slot = WARPS * i + warp, pair = slot * CLUSTER + rank, k = pair % TILES * 8 + lane % 4 * 2;
    if (slot < SLOTS) store_ended(out.y, out.stride, out.n, out.rows, k, 16 * (first + pair / TILES) + lane / 4, sum[i], out.bias);
  }
}
