/* kernels_avx2.c: AVX2. The plain loops, compiled for it, and lanes read eight at a time by gathers. */
#include <immintrin.h>

#include "kernels.inc.h"

#define STORE(at, v) _mm256_storeu_si256((__m256i *)(void *)(at), v)

/* Read four symbols of eight lanes at the bits *pos: one dword a lane. */
static inline __m256i four_symbols(const table *t, const uint8_t *stream, __m256i limit, __m256i *pos,
                                   int kind) {
  const int *lut = (const int *)t->decode;
  const __m256i mask = _mm256_set1_epi32((1 << t->index_bits) - 1), seven = _mm256_set1_epi32(7),
                bits31 = _mm256_set1_epi32(31);
  __m256i p = *pos, x = _mm256_setzero_si256(), escapes = x;
  for (int half = 0; half < 2; half++) {
    /* Two look-ups of at most 12 bits fit the 25 bits that a dword at a byte position surely has; kind 2
     * needs one such read for four symbols, kind 1 two. */
    if (kind == 2 && half) break;
    __m256i byte = _mm256_min_epu32(_mm256_srli_epi32(p, 3), limit);
    __m256i w = _mm256_srlv_epi32(_mm256_i32gather_epi32((const int *)(const void *)stream, byte, 1),
                                  _mm256_and_si256(p, seven));
    __m256i e0 = _mm256_i32gather_epi32(lut, _mm256_and_si256(w, mask), 4);
    __m256i n0 = _mm256_and_si256(_mm256_srli_epi32(e0, 16), bits31);
    w = _mm256_srlv_epi32(w, n0);
    __m256i e1 = _mm256_i32gather_epi32(lut, _mm256_and_si256(w, mask), 4);
    __m256i n1 = _mm256_and_si256(_mm256_srli_epi32(e1, 16), bits31);
    p = _mm256_add_epi32(p, _mm256_add_epi32(n0, n1));
    escapes = _mm256_or_si256(escapes, _mm256_or_si256(e0, e1));
    if (kind == 2) {
      x = _mm256_blend_epi16(e0, _mm256_slli_epi32(e1, 16), 0xAA);
    } else {
      const __m256i low = _mm256_set1_epi32(0xff);
      __m256i two = _mm256_or_si256(_mm256_and_si256(e0, low),
                                    _mm256_slli_epi32(_mm256_and_si256(e1, low), 8));
      x = half ? _mm256_or_si256(x, _mm256_slli_epi32(two, 16)) : two;
    }
  }
  if (__builtin_expect(_mm256_movemask_ps(_mm256_castsi256_ps(escapes)), 0)) {
    /* A few in a thousand: all eight lanes again, one by one. */
    uint32_t at[8], top[8];
    uint8_t symbols[32];
    _mm256_storeu_si256((__m256i *)(void *)at, *pos);
    _mm256_storeu_si256((__m256i *)(void *)top, limit);
    for (int l = 0; l < 8; l++) {
      step_pair(t, stream, top[l], at + l, kind, symbols + 4 * l);
      step_pair(t, stream, top[l], at + l, kind, symbols + 4 * l + 2);
    }
    *pos = _mm256_loadu_si256((const __m256i *)(const void *)at);
    return _mm256_loadu_si256((const __m256i *)(const void *)symbols);
  }
  *pos = p;
  return x;
}

static inline void read_groups(const table *t, const uint8_t *stream, uint32_t limit, uint32_t *pos,
                               int places, int groups, int kind, uint8_t *plane) {
  const __m256i top = _mm256_set1_epi32((int)limit);
  __m256i p[4];
  for (int q = 0; q < 4; q++) p[q] = _mm256_loadu_si256((const __m256i *)(const void *)(pos + 8 * q));
  for (int g = 0; g < groups; g++) {
    for (int q = 0; q < 4; q++) {
      uint8_t *at = plane + ((size_t)g * TPDE_LANES + 8 * q) * places;
      __m256i a = four_symbols(t, stream, top, &p[q], kind);
      if (places == 4) {
        STORE(at, a);
        continue;
      }
      __m256i b = four_symbols(t, stream, top, &p[q], kind);
      __m256i ab_lo = _mm256_unpacklo_epi32(a, b), ab_hi = _mm256_unpackhi_epi32(a, b);
      if (places == 8) {
        STORE(at, _mm256_permute2x128_si256(ab_lo, ab_hi, 0x20));
        STORE(at + 32, _mm256_permute2x128_si256(ab_lo, ab_hi, 0x31));
        continue;
      }
      __m256i c = four_symbols(t, stream, top, &p[q], kind);
      __m256i d = four_symbols(t, stream, top, &p[q], kind);
      __m256i cd_lo = _mm256_unpacklo_epi32(c, d), cd_hi = _mm256_unpackhi_epi32(c, d);
      __m256i l04 = _mm256_unpacklo_epi64(ab_lo, cd_lo), l15 = _mm256_unpackhi_epi64(ab_lo, cd_lo);
      __m256i l26 = _mm256_unpacklo_epi64(ab_hi, cd_hi), l37 = _mm256_unpackhi_epi64(ab_hi, cd_hi);
      STORE(at, _mm256_permute2x128_si256(l04, l15, 0x20));
      STORE(at + 32, _mm256_permute2x128_si256(l26, l37, 0x20));
      STORE(at + 64, _mm256_permute2x128_si256(l04, l15, 0x31));
      STORE(at + 96, _mm256_permute2x128_si256(l26, l37, 0x31));
    }
  }
  for (int q = 0; q < 4; q++) _mm256_storeu_si256((__m256i *)(void *)(pos + 8 * q), p[q]);
}

static int read_lanes_avx2(const table *t, const uint8_t *stream, const uint32_t start[TPDE_LANES + 1],
                           int places, int groups, uint8_t *plane) {
  uint32_t pos[TPDE_LANES], limit = (start[TPDE_LANES] + 7) / 8;
  if (places == 2) return read_lanes(t, stream, start, places, groups, plane);
  memcpy(pos, start, sizeof pos);
  if (t->kind == 2) {
    if (places == 8) read_groups(t, stream, limit, pos, 8, groups, 2, plane);
    else read_groups(t, stream, limit, pos, places, groups, 2, plane);
  } else {
    read_groups(t, stream, limit, pos, places, groups, 1, plane);
  }
  return lanes_end(pos, start);
}

const kernels tpde_kernels_avx2 = {"avx2",    split,       merge,          checksum,
                                   lane_bits, write_lanes, read_lanes_avx2};
