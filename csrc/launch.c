/* launch.c: launching kernels by the CUDA driver, whose types are declared here as its documentation has them ("CUDA
 * Driver API", cuLaunchKernelEx): the core needs no CUDA. */
#include <string.h>

#include "tpde.h"

enum { PARAMETERS = 32 };

enum { CLUSTER_DIMENSION = 4, PROGRAMMATIC_STREAM_SERIALIZATION = 6 }; /* CUlaunchAttributeID */

typedef struct attribute { /* CUlaunchAttribute */
  int32_t id;
  char gap[4];
  union {
    char room[64];
    struct {
      uint32_t x, y, z;
    } cluster;
    int32_t allowed;
    void *aligned;
  } value;
} attribute;

typedef struct config { /* CUlaunchConfig */
  uint32_t grid[3], block[3], shared;
  void *stream;
  attribute *attributes;
  uint32_t count;
} config;

_Static_assert(sizeof(attribute) == 72 && sizeof(config) == 56, "as the driver has them");

typedef int driver(const config *how, void *kernel, void **parameters, void **extra); /* cuLaunchKernelEx */

int tpde_launch_start(const tpde_launch *launch, uint64_t stream, const uint8_t *values, uint64_t bytes) {
  uint64_t words[PARAMETERS] = {0};
  void *at[PARAMETERS];
  attribute attributes[2];
  uint32_t count = 0;
  if (bytes > sizeof words) return -1;
  memcpy(words, values, bytes);
  for (uint32_t i = 0; i < PARAMETERS; i++) at[i] = words + i;
  memset(attributes, 0, sizeof attributes);
  if (launch->early) attributes[count].id = PROGRAMMATIC_STREAM_SERIALIZATION, attributes[count++].value.allowed = 1;
  if (launch->cluster > 1) {
    attributes[count].id = CLUSTER_DIMENSION;
    attributes[count].value.cluster.x = launch->cluster;
    attributes[count].value.cluster.y = attributes[count].value.cluster.z = 1;
    count++;
  }
  const config how = {{launch->grid, 1, 1}, {launch->block, 1, 1},     launch->shared,
                      (void *)(uintptr_t)stream, count ? attributes : NULL, count};
  /* A function's address is no object's, and C has no cast between them. */
  driver *start;
  memcpy(&start, &launch->driver, sizeof start);
  return start(&how, (void *)(uintptr_t)launch->kernel, at, NULL);
}
