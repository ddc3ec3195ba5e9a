// window_held.cuh: matrices of a weight of experts, all of one shape.
//
// An expert has one, or several below each other, as gate and up of a checkpoint.

// One matrix, as src/tpde/cuda/window_experts.py writes it.
struct Held {
  u64 records, offsets, entries, bodies;  // addresses
  u64 table[2];
  u64 zero, unused;
};

__device__ __forceinline__ Matrix matrix_of(const Held& it, u32 rows, u32 columns) {
  return {it.records, it.offsets, it.entries, it.bodies, {it.table[0], it.table[1]}, rows, columns, (columns + 255) / 256,
          (columns + 63) / 64, (u32)it.zero};
}

__device__ __forceinline__ Matrix matrix_of(const Held* held, u32 number, u32 rows, u32 columns) {
  const Held* const p = held + number;
  return matrix_of({__ldg(&p->records), __ldg(&p->offsets), __ldg(&p->entries), __ldg(&p->bodies),
                    {__ldg(&p->table[0]), __ldg(&p->table[1])}, __ldg(&p->zero), 0}, rows, columns);
}

__device__ __forceinline__ u32 sum_to_lane(u32 value, u32 lane) {
#pragma unroll
  for (u32 far = 1; far < 32; far *= 2) {
    const u32 other = __shfl_up_sync(ALL, value, far);
    if (lane >= far) value += other;
  }
  return value;
}

// The expert of a row of y; `experts` if it has none: the number after the last, and those below 0.
__device__ __forceinline__ u32 expert_of(const void* ids, u32 wide, u32 i, u32 experts) {
  const long long id = wide ? ((const long long*)ids)[i] : ((const int*)ids)[i];
  if (id > (long long)experts) trap();
  return id < 0 ? experts : (u32)id;
}
