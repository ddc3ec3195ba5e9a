// window_listed.cu: rows that a router has sent to experts, listed and arranged for `experts_many` of window_experts_many.cu, on
// Hopper GPUs.
//
// `experts_listed` sorts the router's numbers, and lists batches. `experts_arranged` writes rows of x in that order, as `wgmma`
// takes them, in pieces of a batch's rows and 64 columns.

#define TAIL 0  // of window.cuh; no chunks are taken here
#include "window.cuh"
#include "hopper.cuh"
#include "window_held.cuh"
#include "window_routed.cuh"

#define LISTERS 1024u   // threads of a block of `experts_listed`
#define ARRANGERS 256u  // and of `experts_arranged`
#define NOBODY 0xFFFFFFFFu
// Of eight rows: the number of their batch's first eight, and how many eights that has.
#define OF_BATCH(first, octets) ((first) << 6 | (octets))

// Sort rows of y by experts, at most `most` in a batch, a multiple of 8. `order` has the row of y of each place; an expert's
// places begin at a multiple of eight.
extern "C" __global__ void __launch_bounds__(LISTERS)
experts_listed(const void* ids, u32 wide, u32 count, u32 experts, u32 most, Head* head, Batch* list, u32* eights, u32* order) {
  DYNAMIC_SHARED;
  u32* const places = (u32*)shared;  // of each expert, how many rows it has, then where the next one goes
  const u32 lane = threadIdx.x % 32;
  for (u32 e = threadIdx.x; e < experts; e += LISTERS) places[e] = 0;
  follow_early();
  wait_for_last();  // numbers are the last kernel's
  __syncthreads();
  for (u32 i = threadIdx.x; i < count; i += LISTERS) {
    const u32 id = expert_of(ids, wide, i, experts);
    if (id < experts) atomicAdd(places + id, 1u);
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    u32 octets = 0, batches = 0;
#pragma unroll 1
    for (u32 first = 0; first < experts; first += 32) {
      const u32 e = first + lane, mine = e < experts ? places[e] : 0, own = (mine + 7) / 8, some = (mine + most - 1) / most;
      const u32 octet_end = octets + sum_to_lane(own, lane), end = batches + sum_to_lane(some, lane), octet = octet_end - own;
      for (u32 i = end - some; i < end; i++) list[i] = {e, end - some, some, octet, mine, {0, 0, 0}};
      for (u32 i = mine; i < 8 * own; i++) order[8 * octet + i] = NOBODY;
      if (e < experts) places[e] = 8 * octet;
      octets = __shfl_sync(ALL, octet_end, 31), batches = __shfl_sync(ALL, end, 31);
    }
    if (lane == 0) *head = {batches, octets, {0, 0}};
  }
  __syncthreads();
  for (u32 i = threadIdx.x, all = head->batches; i < all; i += LISTERS) {
    const Batch it = list[i];
    const u32 before = (i - it.first) * (most / 8), own = min((it.count + 7) / 8 - before, most / 8), first = it.octet + before;
    for (u32 k = 0; k < own; k++) eights[first + k] = OF_BATCH(first, own);
  }
  // In any order: a row's sum has no other row.
  for (u32 i = threadIdx.x; i < count; i += LISTERS) {
    const u32 id = expert_of(ids, wide, i, experts);
    if (id < experts) order[atomicAdd(places + id, 1u)] = i;
  }
}

// Write x by experts, with zeros for columns that are not there and rows that are nobody's; and zeros for rows of y that have
// no expert. Row i of y is of row i / `per` of x.
extern "C" __global__ void __launch_bounds__(ARRANGERS)
experts_arranged(const u16* x, u64 x_stride, u32 per, u32 columns, const void* ids, u32 wide, u32 count, u32 experts,
                 const Head* head, const u32* eights, const u32* order, u8* to, u16* y, u32 width) {
  follow_early();
  wait_for_last();
  const u32 start = blockIdx.x * ARRANGERS + threadIdx.x, step = gridDim.x * ARRANGERS;
  const u32 octets = (columns + 255) / 256 * 32, there = (columns + 7) / 8, tile = 8 * octets;
  const u64 all = (u64)*(volatile const u32*)&head->octets * tile;
  for (u64 i = start; i < all; i += step) {
    // Four octets of eight rows are 128 bytes of each product's words.
    const u32 of = (u32)(i / tile), j = (u32)(i % tile), row = j / 4 % 8, octet = j / 32 * 4 + j % 4;
    const u32 from = ((const volatile u32*)order)[8 * of + row], batch = ((const volatile u32*)eights)[of];
    const u32 first = batch / OF_BATCH(1, 0), own = batch % OF_BATCH(1, 0);
    uint4 v = make_uint4(0, 0, 0, 0);
    if (from != NOBODY && octet < there) v = load_16(x + from / per * x_stride + 8 * octet);
    arrange_octet(to + (u64)first * tile * 16, 128 * own, 8 * (of - first) + row, octet, v);
  }
  for (u32 i = start / 32; i < count; i += step / 32)
    if (expert_of(ids, wide, i, experts) == experts)
      for (u32 j = threadIdx.x % 32; j < width; j += 32) y[(u64)i * width + j] = 0;
}
