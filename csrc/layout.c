/* layout.c: segments, chunks and the index map (format.md 4), errors, and the choice of instruction set. */
#include <stdio.h>
#if defined(TPDE_HAVE_AVX512)
#include <cpuid.h>
#endif

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
    uint32_t modes = load16(r + 8), fills = 0, coded = 0;
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
      coded += mode == MODE_CODED;
    }
    if (r[10] && (!coded || !layout->tables))
      return tpde_fail(error, TPDE_E_INDEX, "a table without a plane that it codes", i, -1, r[10], 0);
    if (!fills && r[11])
      return tpde_fail(error, TPDE_E_INDEX, "a fill value without a plane to fill", i, -1, r[11], 0);
  }
  return TPDE_OK;
}

/* ---- instruction sets ---- */

#define PATHS 3

#if defined(TPDE_HAVE_AVX512)
static int has_avx512(void) {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("bmi2");
}

/* Intel's since Sapphire Rapids, which are the first with AVX512-FP16. In AMD's a gather takes longer than its loads,
 * and in Intel's before since they were mended (CVE-2022-40982). */
static int gathers_pay(void) {
  static _Atomic int known; /* 1 or 2: a virtual machine may take 20 us for the instruction, and each call asks */
  unsigned a, b, c, d;
  if (!known) known = 1 + (__builtin_cpu_is("intel") && __get_cpuid_count(7, 0, &a, &b, &c, &d) && d >> 23 & 1);
  return known == 2;
}
#endif

/* The paths that this machine can run, best first. Returns how many. */
static int available(const kernels *paths[PATHS]) {
  int n = 0;
#if defined(TPDE_HAVE_AVX512)
  const int wide = has_avx512(), first = wide && gathers_pay();
  if (first) paths[n++] = &tpde_kernels_avx512;
#endif
#if defined(TPDE_HAVE_AVX2)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2")) paths[n++] = &tpde_kernels_avx2;
#endif
#if defined(TPDE_HAVE_AVX512)
  if (wide && !first) paths[n++] = &tpde_kernels_avx512;
#endif
  paths[n++] = &tpde_kernels_portable;
  return n;
}

static const kernels *selected;

const kernels *tpde_active(void) {
  const kernels *paths[PATHS];
  if (selected) return selected;
  available(paths);
  return paths[0];
}

const char *tpde_simd(void) { return tpde_active()->name; }

const char *tpde_simd_available(void) {
  const kernels *paths[PATHS];
  int n = available(paths);
  if (n == 1) return "portable";
  if (n == 2) return "avx2 portable"; /* what has AVX-512 has AVX2 */
  return strcmp(paths[0]->name, "avx2") ? "avx512 avx2 portable" : "avx2 avx512 portable";
}

int tpde_simd_select(const char *name) {
  const kernels *paths[PATHS];
  int n = available(paths);
  for (int i = 0; i < n; i++)
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
