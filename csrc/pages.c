/* pages.c: bringing mapped pages into the process's page tables. */
#include <errno.h>
#include <sys/mman.h>

#include "internal.h"

/* As many pages as the kernel maps for one fault of a file's page. While a call lasts, no other thread can map or unmap
 * memory, and drivers do whenever they load a kernel; where calls follow each other, the kernel lets the next one in
 * before a thread that waits, for up to 4 ms. With calls of 8 MiB that thread took 1 to 10 ms to map and unmap 64 KiB,
 * with these 0.03 to 0.3, without any 0.006 (means, two processors: python -m benchmarks pages). */
#define STEP_BYTES 65536u

int tpde_populate(void *address, uint64_t bytes) {
#if defined(__linux__)
  enum { POPULATE_READ = 22 }; /* MADV_POPULATE_READ, of Linux 5.14: older headers do not name it */
  uint8_t *at = address;
  for (uint64_t left = bytes; left;) {
    uint64_t step = left < STEP_BYTES ? left : STEP_BYTES;
    if (madvise(at, step, POPULATE_READ)) return errno;
    at += step;
    left -= step;
  }
  return 0;
#else
  (void)address, (void)bytes;
  return ENOSYS;
#endif
}
