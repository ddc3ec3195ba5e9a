// window_wide.cu: products of up to 64 rows with a matrix in the window layout (docs/windows.md 9), on Hopper GPUs.
//
// A kernel, `arrange`, writes x as `wgmma` takes it, in pieces of 64 columns; `wide_product` multiplies.
//
// A cluster of blocks takes four stripes at a time together, a turn, each block one part of their columns or two. A group of
// four warps multiplies a turn: `wgmma` multiplies the words in their registers by x in shared memory, and adds 16 products
// at a time to the bits that `mma.m16n8k16` gives. Groups of a block take turns. Each lane copies what it reads of a chunk,
// half of it at a time. All blocks' sums of a stripe and eight rows of x go to one of them, which ends them.
//
// A block has WIDE warps that multiply, one that has pieces of x copied while others are multiplied, and three that add
// sums up and store y. All wait for each other by barriers in shared memory ("mbarrier").
//
// Macros: those of window.cuh; NB, the most rows of x: 64; CLUSTER, blocks: 8, or 4 with two parts each.

#define STRIPES 4u
#include "window.cuh"
#include "hopper.cuh"
#include "window_cluster.cuh"
#include "window_halves.cuh"
#include "window_arrange.cuh"

#define EACH (PARTS / CLUSTER)  // parts of a block
#define WIDE 12u                // warps that multiply
#define OTHERS 4u               // and those that do not
#define ENDERS 3u               // of them, those that end sums
#define ALL_WARPS (WIDE + OTHERS)
#define GROUPS (WIDE / 4u)
#define STAGES 4u                 // pieces of x in shared memory: a chunk's
#define ROOMS 2u                  // for turns' sums
// Barriers of rooms that have been read: a turn's group waits for each of its own once, whichever groups were there before.
#define READS (ROOMS * GROUPS)
// Registers of threads that multiply, and of others. All have 128 at first, and 64 Ki are there.
#define REGISTERS 152
#define OTHER_REGISTERS 56
static_assert(registers_suffice(WIDE, REGISTERS, OTHERS, OTHER_REGISTERS, 128));

// As `product` of window.cu, of rows that were arranged.
extern "C" __global__ void __launch_bounds__(32 * ALL_WARPS, 1)
wide_product(MATRIX, const u8* x, u32 n, u16* __restrict__ y, u64 y_stride, const u16* __restrict__ bias) {
  DYNAMIC_SHARED;
  const Matrix m = THE_MATRIX;
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, stripes = (m.rows + 15) / 16;
  const u32 rank = rank_in_cluster();
  // A part's chunks of a stripe are `part`, `part + PARTS`, ... A turn takes four stripes, the first one from `start` on; a
  // round is a turn of each group, which passes over x once.
  const auto chunk_of = [&](u32 h, u32 i) { return EACH * rank + h + PARTS * i; };  // of this block's parts
  const auto count_of = [&](u32 h) { return (m.chunks - chunk_of(h, 0) + PARTS - 1) / PARTS; };
  const u32 own = count_of(0) + (EACH == 2 ? count_of(1) : 0);
  const u32 step = gridDim.x / CLUSTER * 4, start = blockIdx.x / CLUSTER * 4;
  const u32 turns = (stripes - start + step - 1) / step, rounds = (turns + GROUPS - 1) / GROUPS;
  u8* const xs = shared;                      // [STAGES] pieces of x
  u8* const sums = xs + STAGES * X_PIECE;     // [ROOMS][SLOTS][CLUSTER] that this block adds up
  u8* const planes = sums + ROOMS * TURN_SUMS;  // [WIDE] planes of escapes, and chunks
  // Barriers: sums are there, all blocks have read theirs, a stage is filled, nobody reads it.
  const u32 ready = shared_address(planes + WIDE * WARP_ROOM), read = ready + 8 * ROOMS;
  const u32 filled = read + 8 * READS, emptied = filled + 8 * STAGES;
  const auto room_of = [&](u32 turn, u32 reader) -> Room {
    return {shared_address(sums) + turn % ROOMS * TURN_SUMS, ready + 8 * (turn % ROOMS), read + 8 * (reader % READS)};
  };
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < ROOMS; i++) make_barrier(ready + 8 * i, TELLING);
    for (u32 i = 0; i < READS; i++) make_barrier(read + 8 * i, READING * ENDERS);
    for (u32 i = 0; i < STAGES; i++) make_barrier(filled + 8 * i, 1), make_barrier(emptied + 8 * i, WIDE);
    fence_barriers();
    for (u32 i = 0; i < ROOMS; i++) expect(ready + 8 * i, SENT);
  }
  follow_early();
  if (warp >= WIDE) {
    take_registers<OTHER_REGISTERS, false>();
    __syncthreads();
    arrive();
    wait_for_cluster();  // all have their barriers
    const u32 other = warp - WIDE;
    if (other == ENDERS) {
      // Have pieces of x copied to stages that nobody reads.
      wait_for_last();  // x was arranged by the last kernel; the weights were not
      u32 stage = 0, parity = 1;
#pragma unroll 1
      for (u32 round = 0; round < rounds; round++)
#pragma unroll 1
        for (u32 i = 0; i < 4 * own; i++) {
          const u32 k = i / 4, first = count_of(0), chunk = k < first ? chunk_of(0, k) : chunk_of(1, k - first);
          wait_on(emptied + 8 * stage, parity);  // the first time nobody has read there
          if (lane == 0) {
            expect(filled + 8 * stage, X_PIECE);
            copy_bulk(shared_address(xs) + stage * X_PIECE, x + (u64)(4 * chunk + i % 4) * X_PIECE, X_PIECE, filled + 8 * stage);
          }
          __syncwarp();
          if (++stage == STAGES) stage = 0, parity ^= 1;
        }
    } else {
      const Out out = {y, y_stride, n, m.rows, bias};
#pragma unroll 1
      for (u32 turn = 0; turn < turns; turn++) {
        // The next turn's group that stores there waits for a barrier of its own.
        const float4* const from = (const float4*)(sums + turn % ROOMS * TURN_SUMS);
        end_sums<ENDERS>(from, room_of(turn, turn + ROOMS), turn / ROOMS % 2, turn + ROOMS < turns ? SENT : 0, out, start + turn * step, rank, other, lane);
      }
    }
  } else {
    take_registers<REGISTERS, true>();
    const u32 group = warp / 4, beside = warp % 4;
    u8 *const plane = planes + warp * WARP_ROOM, *const held = plane + HALF_PLANE;
    const auto stripe_of = [&](u32 turn) { return min(start + turn * step + beside, stripes - 1); };  // or the last again
    Entries coming = {0, 0, 0, 0};
    Range after = {0, 0};
    Records ahead = {0, 0};
    // This warp's next chunk: of which turn and part, and which of the part's; and where its entries are.
    u32 next_turn = group, next_part = 0, next = 0;
    const auto advance = [&] {
      if (++next == count_of(next_part)) {
        next = 0;
        if (++next_part == EACH) next_part = 0, next_turn += GROUPS;
      }
      if (next_turn < turns) after = range_of(m, stripe_of(next_turn), chunk_of(next_part, next));
    };
    for (u32 i = lane; i < HALF_PLANE / 16; i += 32) ((uint4*)plane)[i] = make_uint4(0, 0, 0, 0);
    __syncwarp();
    if (group < turns) {
      const Place first = place_of(m, stripe_of(group), chunk_of(0, 0));
#pragma unroll
      for (u32 half = 0; half < 2; half++) {
        fetch_half(shared_address(held), first, half, lane);
        close_copies();
      }
      ahead = records_of(m, stripe_of(group), lane);
      coming = load_entries(m, range_of(m, stripe_of(group), chunk_of(0, 0)), lane);
      advance();
    }
    __syncthreads();
    arrive();
    wait_for_cluster();
    const u64 x_there = descriptor(shared_address(xs), X_STEP);
    u32 parity = 0;  // of stages: a chunk's pieces of x are in as many
    // Of the stage before one: all products of it have ended.
    const auto leave = [&](u32 stage) {
      if (lane == 0) arrive_at(emptied + 8 * ((stage + STAGES - 1) % STAGES));
    };
#pragma unroll 1
    for (u32 turn = group; turn < turns; turn += GROUPS) {
      float sum[EACH][TILES * 4];
#pragma unroll
      for (u32 t = 0; t < EACH * TILES * 4; t++) sum[t / (TILES * 4)][t % (TILES * 4)] = 0;
      const Rows r = rows_of(ahead, m.zero);
      if (turn + GROUPS < turns) ahead = records_of(m, stripe_of(turn + GROUPS), lane);
#pragma unroll
      for (u32 h = 0; h < EACH; h++) {
        // A part has a chunk: the compiler, which does not know, would have products wait for sums of none.
        const u32 count = count_of(h);
#pragma unroll 1
        for (u32 i = 0; EACH == 1 ? i < own : i == 0 || i < count; i++) {
          const u32 pairs = pairs_of(m, chunk_of(h, i));
          const Put a = put_of(m, coming.first, lane < coming.count), b = put_of(m, coming.second, lane + 32 < coming.count);
          const Entries now = coming;
          if (next_turn < turns) {
            coming = load_entries(m, after, lane);
            advance();
          }
          // The chunk after this one: the part's, or the next part's first, or that of the next turn.
          const bool more = i + 1 < count, same = more || h + 1 < EACH;
          const u32 then_turn = same ? turn : turn + GROUPS, then = more ? chunk_of(h, i + 1) : chunk_of((h + 1) % EACH, 0);
          uint4 codes[3] = {};
#pragma unroll
          for (u32 half = 0; half < 2; half++) {
            // The plane is XORed with the entries of half a chunk.
            put_entries(plane, m, now, a, b, half, lane);
            wait_for_copies<1>();
            __syncwarp();  // other lanes have put theirs; of a chunk that is not whole they copied some
            if (half == 0)
#pragma unroll
              for (u32 k = 0; k < 3; k++) codes[k] = take_codes(held, pairs, 4 * k, lane);
#pragma unroll
            for (u32 p = 2 * half; p < 2 * half + 2; p++) {
              const u64 at = x_there + (p * X_PIECE >> 4);
              Pair pair;
              take_pair(pair, held, pairs, plane, p, lane);
#pragma unroll
              for (u32 t = 0; t < 2; t++) {
                u32 w[8];
                words_of(codes, pair, r, p, t, w);
                if (t == 0) wait_on(filled + 8 * p, parity);
                registers_are_set();
                multiply_tile(sum[h], w, at, t);
                commit();
                wait_for_products<1>();  // those before have ended
                if (t == 0 && h + i + p) leave(p);
              }
            }
            __syncwarp();  // the next chunk comes where this one was read
            if (then_turn < turns) fetch_half(shared_address(held), place_of(m, stripe_of(then_turn), then), half, lane);
            close_copies();
            wipe_entries(plane, m, now, a, b, half, lane);
            __syncwarp();
          }
          parity ^= 1;
        }
      }
      wait_for_products<0>();
      leave(0);
#pragma unroll
      for (u32 t = 0; t < TILES * 4; t++) {
        keep_register(sum[0][t]);  // they are read here, not above
        if constexpr (EACH == 2) keep_register(sum[1][t]), sum[0][t] += sum[1][t];
      }
      const Room room = room_of(turn, turn);
      if (turn >= ROOMS) wait_on(room.read, (turn / READS - (turn % READS < ROOMS)) % 2);
      send_sums(sum[0], room, rank, beside, lane);
    }
    if ((rounds - 1) * GROUPS + group >= turns)  // others have one turn more
#pragma unroll 1
      for (u32 i = 0; i < own; i++, parity ^= 1)
#pragma unroll
        for (u32 p = 0; p < STAGES; p++) {
          wait_on(filled + 8 * p, parity);
          __syncwarp();
          leave(p + 1);
        }
  }
  __syncwarp();
  arrive();  // no block ends while another one sends to it
  wait_for_cluster();
}
