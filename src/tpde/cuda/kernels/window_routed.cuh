// window_routed.cuh: rows that a router has sent to experts, as kernels list them for each other.

// Of an expert that has `count` rows, the batches: as many rows each as kernels multiply at a time, or what is left. There are
// `batches` of them, from number `first` on; eights of rows begin with that numbered `octet`.
struct Batch {
  u32 expert, first, batches, octet, count, unused[3];
};

// How many there are, and how many eights of rows.
struct Head {
  u32 batches, octets, unused[2];
};
