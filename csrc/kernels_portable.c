/* kernels_portable.c: the path that runs everywhere. */
#include "kernels.inc.h"

const kernels tpde_kernels_portable = {"portable", split,     merge,     checksum,
                                       lane_bits,  write_lanes, read_lanes, NULL};
