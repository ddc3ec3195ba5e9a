// window_experts_many.cu: products of many rows of x that a router has sent to experts (docs/windows.md 9.3, 11), on Hopper
// GPUs.
//
// window_listed.cu lists rows, and writes x as it is taken here. A block takes a tile: WIDE stripes of an expert, one a warp,
// by a batch of its rows, as in window_many.cu; and all columns, one after the other.
//
// Macros: those of window.cuh, without ZERO; NB, rows of x of a batch, at most: 64, 128 or 256; WIDE, warps that multiply: 8,
// or with 64 rows 12.

#include "window.cuh"
#include "hopper.cuh"
#include "window_halves.cuh"
#include "window_stages.cuh"
#include "window_turned.cuh"
#include "window_held.cuh"
#include "window_routed.cuh"

// Of a warp: two planes of escapes, a chunk, ended sums, and two matrices, for which registers have no room.
#define ROOM (2 * HALF_PLANE + CHUNK_BYTES + ENDED + 2 * sizeof(Held))

// A tile: stripes from `WIDE * group` on of an expert, and a batch's rows. None if there are no rows.
struct Item {
  u32 expert, group, octet, count;
};

// As `experts_product` of window_experts.cu, of rows that were arranged, with at least two chunks a stripe.
extern "C" __global__ void __launch_bounds__(32 * (WIDE + OTHERS), 1)
experts_many(const Held* held, u32 parts, u32 rows, u32 columns, const Head* head, const Batch* list, const u32* order,
             const u8* x, u16* __restrict__ y, const u16* __restrict__ bias) {
  DYNAMIC_SHARED;
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, stripes = (rows + 15) / 16, every = parts * stripes;
  const u32 chunks = (columns + 255) / 256, groups = (every + WIDE - 1) / WIDE, width = parts * rows;
  u8* const xs = shared;                    // [STAGES] pieces of x
  u8* const rooms = xs + STAGES * X_PIECE;  // [WIDE] what warps have for themselves
  // Barriers: a stage is filled, nobody reads it.
  const u32 filled = shared_address(rooms + WIDE * ROOM), emptied = filled + 8 * STAGES;
  if (threadIdx.x == 0) make_stages(filled, emptied);
  follow_early();
  __syncthreads();
  wait_for_last();  // the list and x are the last kernels'
  const u32 items = *(volatile const u32*)&head->batches * groups;
  // An expert's batches follow each other for the same stripes, so that these come from memory once.
  const auto item_of = [&](u32 k) -> Item {
    const u32 number = blockIdx.x + k * gridDim.x;
    if (number >= items) return {0, 0, 0, 0};
    const uint4 v = load_16((const u16*)(list + number / groups));
    const u32 batches = v.z, own = number - v.y * groups, of = own % batches;
    const u32 all = *(volatile const u32*)&list[number / groups].count;
    return {v.x, own / batches, v.w + of * TILES, min(all - of * NB, (u32)NB)};
  };
  if (warp >= WIDE) {
    take_registers<OTHER_REGISTERS, false>();
    if (warp > WIDE) return;
    Stages at = {filled, emptied, 0, 1};
#pragma unroll 1
    for (u32 k = 0;; k++) {
      const Item it = item_of(k);
      if (!it.count) break;
      const u32 bytes = (it.count + 7) / 8 * (X_PIECE / TILES);
      copy_pieces(at, xs, x + (u64)it.octet * chunks * (4 * X_PIECE / TILES), 0, chunks, bytes, lane);
    }
    return;
  }
  take_registers<REGISTERS, true>();
  u8 *const planes = rooms + warp * ROOM, *const chunk_held = planes + 2 * HALF_PLANE;
  const u32 to = shared_address(chunk_held);
  // A warp's stripe among an expert's, or the last again; and where it is.
  const auto number_of = [&](const Item& it) { return min(it.group * WIDE + warp, every - 1); };
  Held* const matrices = (Held*)(chunk_held + CHUNK_BYTES + ENDED);
  const auto keep_matrix = [&](const Item& it, u32 number) {
    const u64* const from = (const u64*)(held + it.expert * parts + (parts > 1 ? number_of(it) / stripes : 0));
    __syncwarp();  // nobody reads what was there
    if (lane < sizeof(Held) / 8) ((u64*)(matrices + number % 2))[lane] = __ldg(from + lane);
    __syncwarp();
  };
  const auto matrix = [&](u32 number) { return matrix_of(matrices[number % 2], rows, columns); };
  const auto stripe_of = [&](const Item& it) { return parts > 1 ? number_of(it) % stripes : number_of(it); };
  Item it = item_of(0);
  if (!it.count) return;
  keep_matrix(it, 0);
  u32 stripe = stripe_of(it);
  const Matrix first_matrix = matrix(0);
  const Place beginning = place_of(first_matrix, stripe, 0);
#pragma unroll
  for (u32 half = 0; half < 2; half++) {
    fetch_half(to, beginning, half, lane);
    close_copies();
  }
  for (u32 i = lane; i < 2 * HALF_PLANE / 16; i += 32) ((uint4*)planes)[i] = make_uint4(0, 0, 0, 0);
  Records ahead = records_of(first_matrix, stripe, lane);
  const Entries first_entries = load_entries(first_matrix, range_of(first_matrix, stripe, 0), lane);
  Range after = range_of(first_matrix, stripe, 1);
  __syncwarp();
  Escapes now = escapes_of(first_matrix, first_entries, lane);
  put_entries(planes, first_matrix, now.entries, now.a, now.b, 0, lane);
  Stages at = {filled, emptied, 0, 0};
#pragma unroll 1
  for (u32 number = 0; it.count; number++) {
    float sum[TILES * 4];
#pragma unroll
    for (u32 t = 0; t < TILES * 4; t++) sum[t] = 0;
    const Rows r = rows_of(ahead, matrix(number).zero);
    // A batch that is not whole has smaller pieces. What products read beyond one is of rows that are not stored. The shuffle
    // tells the compiler that lanes agree, and it need not ask for each product: 2 to 4 % on an H200.
    const u32 x_step = __shfl_sync(ALL, (it.count + 7) / 8 * 128, 0);
    const u64 x_there = descriptor(shared_address(xs), x_step);
    const Item following = item_of(number + 1);
    u32 next_stripe = stripe;
    if (following.count) {
      keep_matrix(following, number + 1);
      next_stripe = stripe_of(following);
      ahead = records_of(matrix(number + 1), next_stripe, lane);
    }
    u32 i = 0;
#pragma unroll 1
    do {
      const Matrix m = matrix(number);
      const u32 pairs = pairs_of(m, i);
      const bool last = i + 1 == chunks, more = !last || following.count;
      const Matrix then = matrix(number + last);  // the next chunk's
      const u32 then_chunk = last ? 0 : i + 1, then_stripe = last ? next_stripe : stripe;
      Entries coming = {0, 0, 0, 0};
      if (more) {
        coming = load_entries(then, after, lane);
        if (i + 2 < chunks) after = range_of(m, stripe, i + 2);
        else if (following.count) after = range_of(matrix(number + 1), next_stripe, i + 2 - chunks);
      }
      multiply_chunk(sum, at, x_there, x_step, i, 0, planes, chunk_held, pairs, r, m, now, then, coming, lane, [&](u32 half) {
        if (more) fetch_half(to, place_of(then, then_stripe, then_chunk), half, lane);
      });
      now = escapes_of(then, coming, lane);
    } while (++i < chunks);
    wait_for_products<0>();
    leave_piece(at, lane);
#pragma unroll
    for (u32 t = 0; t < TILES * 4; t++) keep_register(sum[t]);  // they are read here, not above
    const u32 own = it.group * WIDE + warp, row = 16 * stripe;
    if (own < every) {
      const u32 first_row = parts > 1 ? own / stripes * rows : 0;
      u16* const out = y + first_row + row;
      const u16* const added = bias ? bias + (u64)it.expert * width + first_row : 0;
      const u32* const of_y = order + 8 * it.octet;
      const bool turned = row + 16 <= rows && width % 8 == 0 && (u64)out % 16 == 0;
      if (turned) {
        const Added ends = added_to(added, row, lane);
#pragma unroll
        for (u32 t = 0; t < TILES; t += 8) {
          if (8 * t >= it.count) break;
          end_turned(sum + 4 * t, chunk_held + CHUNK_BYTES, ends, lane, [&](u32 k, u32 from, uint4 v) {
            if (8 * t + k < it.count) *(uint4*)(out + (u64)((const volatile u32*)of_y)[8 * t + k] * width + from) = v;
          });
        }
      } else {
#pragma unroll
        for (u32 t = 0; t < TILES; t++)
#pragma unroll
          for (u32 j = 0; j < 4; j++) {
            const u32 k = 8 * t + lane % 4 * 2 + j % 2, below = lane / 4 + j / 2 * 8;
            if (k < it.count && row + below < rows)
              out[(u64)((const volatile u32*)of_y)[k] * width + below] = ended(sum[4 * t + j], added, row + below);
          }
      }
    }
    it = following, stripe = next_stripe;
  }
}
