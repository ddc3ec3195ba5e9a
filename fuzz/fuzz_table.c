/* fuzz_table.c: table sections (format.md 3): any bytes, and valid ones with a few bytes changed. What opens
 * must be a code that takes every symbol there and back.
 *
 * Licence: Apache-2.0.
 */
#include "fuzz.h"

/* All symbols, or all pairs of symbols, by way of the lanes: whatever a table costs, unlike in tpde_encode, which
 * leaves a plane raw where coding does not pay. The buffers are as small as kernels may ask for. */
static void check_table(const table *t, const kernels *k, int places, uint32_t first) {
  int groups = t->kind == 2 ? 256 : 1;
  size_t n = (size_t)groups * TPDE_LANES * (size_t)places;
  uint32_t counted[TABLES_AT_ONCE][TPDE_LANES], *bits = counted[t->counted], found[TPDE_LANES] = {0}, start[TPDE_LANES + 1] = {0};
  uint8_t *plane = exact(n), *back = exact(n);
  for (uint32_t i = 0; i < n; i += (uint32_t)t->kind) {
    if (t->kind == 2) store16(plane + i, (uint16_t)(first + i / 2 * 40503)); /* odd: all are met */
    else plane[i] = (uint8_t)(first + i);
  }
  k->lane_bits(t, plane, places, groups, counted);
  for (int l = 0; l < TPDE_LANES; l++) start[l + 1] = start[l] + bits[l];
  size_t stream = (start[TPDE_LANES] + 7) / 8;
  size_t size = stream + LANE_SLACK((uint32_t)(places * groups));
  uint8_t *out = exact(size);
  memset(out, 0xff, size);
  k->write_lanes(t, plane, places, groups, found, out, &(upcoming){0});
  CHECK(!memcmp(bits, found, sizeof found));
  CHECK(!k->read_lanes(t, out, start, places, groups, back));
  CHECK(!memcmp(plane, back, n));
  start[TPDE_LANES]--; /* a lane without its last bit */
  CHECK(k->read_lanes(t, out, start, places, groups, back) == TPDE_LANES);
  free(plane);
  free(back);
  free(out);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
  input in = {bytes, size};
  tpde_layout l = {.words = 1, .segment_words = 1, .chunk_words = 512, .word_bytes = 1, .unit_log2 = 4};
  uint8_t made[TPDE_MAX_TABLE_SECTION], *section;
  uint32_t mode = (uint32_t)take(&in, 1), n;
  if (mode & 1) {
    n = take_section(&in, &l, mode & 16, made);
    for (uint32_t i = mode >> 1 & 3; i; i--) {
      uint32_t at = (uint32_t)take(&in, 2) % n;
      made[at] ^= (uint8_t)take(&in, 1);
    }
    if (mode & 8) n = (uint32_t)take(&in, 2) % (n + 1);
    section = exact(n);
    memcpy(section, made, n);
  } else {
    l.tables = (uint8_t)((mode >> 1) % 18); /* 17 are too many */
    n = (uint32_t)in.left;
    section = exact(n);
    take_bytes(&in, section, n);
  }
  tpde_codec *reader = NULL, *writer = NULL;
  tpde_error error = {0}, again = {0};
  int code = tpde_codec_open(&l, n ? section : NULL, n, 0, &reader, &error);
  int both = tpde_codec_open(&l, n ? section : NULL, n, 1, &writer, &again);
  CHECK(code == error.code && both == again.code);
  CHECK(!code == (reader != NULL) && !both == (writer != NULL));
  /* A writer may refuse tables that a reader takes, as the caller's mistake; never the other way round. */
  CHECK(both == code || both == TPDE_E_ARGUMENT);
  char names[MAX_PATHS][16];
  int paths = simd_paths(names);
  uint32_t which = (uint32_t)take(&in, 1), places = 2u << (which >> 4 & 3), seed = (uint32_t)take(&in, 2);
  for (int i = 0; writer && l.tables && i < paths; i++) {
    CHECK(!tpde_simd_select(names[i]));
    check_table(&writer->tables[which % l.tables], tpde_active(), (int)places, seed);
  }
  tpde_codec_close(reader);
  tpde_codec_close(writer);
  free(section);
  return 0;
}
