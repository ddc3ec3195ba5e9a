/* kernels_portable.c: the path that runs everywhere. */
#include "kernels.inc.h"

static void copy_out(uint8_t *to, const uint8_t *from, size_t bytes) { memcpy(to, from, bytes); }

const kernels tpde_kernels_portable = {"portable",  split,      merge, checksum, lane_bits,
                                       write_lanes, read_lanes, NULL,  copy_out,
                                       symbols,     changed,    ADD_TERMS, tell_changes, write_changes, apply_changes,
                                       list_changes};
