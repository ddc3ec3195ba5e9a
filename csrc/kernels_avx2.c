/* kernels_avx2.c: the plain loops, compiled for AVX2 and BMI2. */
#include <immintrin.h>

#define LOW_BITS(x, bits) _bzhi_u64(x, bits)
#include "kernels.inc.h"

const kernels tpde_kernels_avx2 = {"avx2",    split,       merge,     checksum,
                                   lane_bits, write_lanes, read_lanes};
