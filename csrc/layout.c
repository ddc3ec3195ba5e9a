/* layout.c: segments, chunks and the index map (format.md 4), errors, and the choice of instruction set. */
#include <stdio.h>

#include "internal.h"

int tpde_abi(void) { return TPDE_ABI; }

int tpde_fail(tpde_error *error, int code, const char *what, uint64_t chunk, int plane, uint64_t found,
              uint64_t needed) {
  if (error) {
    error->code = code;
    error->plane = plane;
    error->chunk = chunk;
    error->found = found;
    error->needed = needed;
    snprintf(error->what, sizeof error->what, "%s", what);
  }
  return code;
}

int tpde_layout_valid(const tpde_layout *l) {
  int b = l->word_bytes;
  if (b != 1 && b != 2 && b != 4 && b != 8) return 0;
  if (l->words >= (1ull << 60) / (uint64_t)b || l->segment_words < 1) return 0;
  if (l->words && l->segment_words > l->words) return 0;
  if (l->rotate > 1 || l->unit_log2 < 4 || l->unit_log2 > 12 || l->tables > TPDE_MAX_TABLES) return 0;
  if (l->chunk_words < 512 || l->chunk_words > MAX_CHUNK_WORDS || (l->chunk_words & (l->chunk_words - 1)))
    return 0;
  for (int p = 0; p < b; p++)
    if (l->table_count[p] && l->first_table[p] + l->table_count[p] > l->tables) return 0;
  return 1;
}

uint64_t tpde_chunk_count(const tpde_layout *l) {
  if (!l || !tpde_layout_valid(l) || !l->words) return 0;
  uint64_t per = (l->segment_words - 1) / l->chunk_words + 1, full = l->words / l->segment_words,
           rest = l->words % l->segment_words;
  return full * per + (rest ? (rest - 1) / l->chunk_words + 1 : 0);
}

uint32_t tpde_chunk_words(const tpde_layout *l, uint64_t i, uint64_t *start) {
  uint64_t per = (l->segment_words - 1) / l->chunk_words + 1, segment = i / per,
           inside = (i % per) * l->chunk_words, begin = segment * l->segment_words;
  uint64_t words = l->words - begin < l->segment_words ? l->words - begin : l->segment_words;
  *start = begin + inside;
  return words - inside < l->chunk_words ? (uint32_t)(words - inside) : l->chunk_words;
}

int tpde_index_check(const tpde_layout *layout, const uint8_t *index, uint64_t first_offset,
                     uint64_t blob_bytes, uint32_t max_chunk_bytes, tpde_error *error) {
  if (!layout || !tpde_layout_valid(layout))
    return tpde_fail(error, TPDE_E_ARGUMENT, "the layout is not valid", UINT64_MAX, -1, 0, 0);
  uint64_t chunks = tpde_chunk_count(layout), at = first_offset;
  if (chunks && !index) return tpde_fail(error, TPDE_E_ARGUMENT, "no index map", UINT64_MAX, -1, 0, chunks);
  for (uint64_t i = 0; i < chunks; i++) {
    const uint8_t *r = index + TPDE_RECORD_BYTES * i;
    uint64_t offset = (uint64_t)load32(r) << layout->unit_log2,
             next = i + 1 < chunks ? (uint64_t)load32(r + TPDE_RECORD_BYTES) << layout->unit_log2 : blob_bytes;
    uint32_t modes = load16(r + 8), fills = 0;
    if (!i && offset != at)
      return tpde_fail(error, TPDE_E_INDEX, "the first chunk does not follow the index map", i, -1, offset, at);
    if (next < offset || next > blob_bytes)
      return tpde_fail(error, TPDE_E_INDEX, "a chunk ends before it starts, or outside the blob", i, -1, next,
                       blob_bytes);
    if (next - offset > max_chunk_bytes)
      return tpde_fail(error, TPDE_E_INDEX, "a chunk is larger than the header allows", i, -1, next - offset,
                       max_chunk_bytes);
    for (int p = 0; p < TPDE_MAX_PLANES; p++) {
      uint32_t mode = modes >> (2 * p) & 3;
      if (p >= layout->word_bytes ? mode != MODE_RAW : mode > MODE_CODED)
        return tpde_fail(error, TPDE_E_INDEX, "unknown mode of a plane", i, p, mode, MODE_CODED);
      fills += mode == MODE_FILL;
    }
    if (!fills && r[11])
      return tpde_fail(error, TPDE_E_INDEX, "a fill value without a plane to fill", i, -1, r[11], 0);
  }
  return TPDE_OK;
}

/* ---- instruction sets ---- */

static const kernels *best(void) {
#if defined(TPDE_HAVE_AVX512)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi") &&
      __builtin_cpu_supports("bmi2"))
    return &tpde_kernels_avx512;
#endif
#if defined(TPDE_HAVE_AVX2)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2")) return &tpde_kernels_avx2;
#endif
  return &tpde_kernels_portable;
}

static const kernels *selected;

const kernels *tpde_active(void) { return selected ? selected : best(); }
const char *tpde_simd(void) { return tpde_active()->name; }

static const kernels *const paths[] = {
#if defined(TPDE_HAVE_AVX512)
    &tpde_kernels_avx512,
#endif
#if defined(TPDE_HAVE_AVX2)
    &tpde_kernels_avx2,
#endif
    &tpde_kernels_portable};

#define PATHS (sizeof paths / sizeof *paths)

/* Paths are ordered, and a machine that has one has those after it. */
static size_t first_path(void) {
  size_t i = 0;
  while (paths[i] != best()) i++;
  return i;
}

const char *tpde_simd_available(void) {
  static const char *const lists[] = {
#if defined(TPDE_HAVE_AVX512)
      "avx512 avx2 portable",
#endif
#if defined(TPDE_HAVE_AVX2)
      "avx2 portable",
#endif
      "portable"};
  return lists[first_path()];
}

int tpde_simd_select(const char *name) {
  for (size_t i = first_path(); i < PATHS; i++)
    if (name && !strcmp(name, paths[i]->name)) {
      selected = paths[i];
      return TPDE_OK;
    }
  return TPDE_E_ARGUMENT;
}

uint32_t tpde_checksum(const void *words, uint64_t bytes) {
  return tpde_active()->checksum(words, (size_t)bytes);
}

static int plane_pointers(const tpde_layout *l, uint8_t *planes, uint64_t stride, uint8_t *at[TPDE_MAX_PLANES]) {
  if (!l || !tpde_layout_valid(l)) return TPDE_E_ARGUMENT;
  for (int p = 0; p < l->word_bytes; p++) at[p] = planes + (size_t)p * stride;
  return TPDE_OK;
}

int tpde_split(const tpde_layout *layout, const void *words, uint64_t n, uint8_t *planes, uint64_t stride) {
  uint8_t *at[TPDE_MAX_PLANES];
  int code = plane_pointers(layout, planes, stride, at);
  if (!code && n) tpde_active()->split(layout->word_bytes, layout->rotate, words, n, at);
  return code;
}

int tpde_merge(const tpde_layout *layout, const uint8_t *planes, uint64_t stride, uint64_t n, void *words) {
  uint8_t *at[TPDE_MAX_PLANES];
  int code = plane_pointers(layout, (uint8_t *)(uintptr_t)planes, stride, at);
  if (!code && n) tpde_active()->merge(layout->word_bytes, layout->rotate, at, n, words);
  return code;
}
