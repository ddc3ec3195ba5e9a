/* kernels_avx2.c: the plain loops, compiled for AVX2 and BMI2 (-mavx2 -mbmi2), and lanes read in batches. */
#if defined(TPDE_HAVE_AVX2)
#include <immintrin.h>

#include "internal.h"

/* ---- deltas ---- */

static inline uint64_t class_mask(const uint8_t *s, uint8_t first, uint8_t width) {
  const __m256i low = _mm256_set1_epi8((char)first), most = _mm256_set1_epi8((char)width);
  __m256i a = _mm256_sub_epi8(_mm256_loadu_si256((const __m256i *)s), low),
          b = _mm256_sub_epi8(_mm256_loadu_si256((const __m256i *)(s + 32)), low);
  a = _mm256_cmpeq_epi8(_mm256_min_epu8(a, most), a);
  b = _mm256_cmpeq_epi8(_mm256_min_epu8(b, most), b);
  return (uint32_t)_mm256_movemask_epi8(a) | (uint64_t)(uint32_t)_mm256_movemask_epi8(b) << 32;
}
#define CLASS_MASK class_mask

static void add_terms(const uint8_t *data, size_t n, uint64_t first, uint64_t sum[2]) {
  __m256i a = _mm256_setzero_si256(), b = a, step = _mm256_set1_epi64x((long long)(4 * GOLDEN64));
  __m256i k = _mm256_set_epi64x((long long)((first + 4) * GOLDEN64), (long long)((first + 3) * GOLDEN64),
                                (long long)((first + 2) * GOLDEN64), (long long)((first + 1) * GOLDEN64));
  size_t i = 0;
  for (; i + 4 <= n; i += 4, k = _mm256_add_epi64(k, step)) {
    __m256i x = _mm256_loadu_si256((const __m256i *)(data + 8 * i)), y = _mm256_xor_si256(x, k),
            z = _mm256_add_epi64(x, k);
    a = _mm256_add_epi64(a, _mm256_mul_epu32(y, _mm256_srli_epi64(y, 32)));
    b = _mm256_add_epi64(b, _mm256_mul_epu32(z, _mm256_srli_epi64(z, 32)));
  }
  uint64_t parts[2][4];
  _mm256_storeu_si256((__m256i *)parts[0], a);
  _mm256_storeu_si256((__m256i *)parts[1], b);
  for (int s = 0; s < 2; s++) sum[s] += parts[s][0] + parts[s][1] + parts[s][2] + parts[s][3];
  for (; i < n; i++) {
    uint64_t x = load64(data + 8 * i), key = (first + i + 1) * GOLDEN64, y = x ^ key, z = x + key;
    sum[0] += (y & 0xffffffff) * (y >> 32);
    sum[1] += (z & 0xffffffff) * (z >> 32);
  }
}
#define ADD_TERMS add_terms

#define LOW_BITS(x, bits) _bzhi_u64(x, bits)
#define AT_ONCE 64 /* 0.039 ns a word, 32 take 0.055 */
#define read_lanes read_lanes_plainly
#include "kernels.inc.h"
#undef read_lanes

/* Four look-ups of a lane take 40 cycles, one after the other. What a processor looks ahead holds few of the plain
 * loop's lanes, so look-ups of eight lanes stand side by side here, and vectors do the rest for all eight: on Zen 3
 * 0.27 ns a word of bf16, where the plain loop takes 0.45 and gathers take 0.88. */
#define LANES 8
#define BATCHES (TPDE_LANES / LANES)
#define EACH(lane) lane(0) lane(1) lane(2) lane(3) lane(4) lane(5) lane(6) lane(7)
#define ALWAYS static inline __attribute__((always_inline)) /* with constants for the kind and the places */

/* GCC would collect entries in a vector before it stores them: decoding takes 20 % longer. */
#if defined(__clang__)
#define IN_REGISTER(x) (void)0
#else
#define IN_REGISTER(x) __asm__("" : "+r"(x))
#endif

/* Eight lanes being read; each is at bit 0 to 7 of a byte of the stream. */
typedef struct batch {
  uint32_t byte[LANES], bit[LANES];
  uint32_t entries[4][LANES];      /* looked up, but not settled */
  uint32_t before[LANES];          /* kind 1: the four symbols before */
  uint32_t sums[4][LANES];         /* of the checksum, those that take the words of these lanes */
} batch;

static inline __m256i load8(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
static inline void store8(void *p, __m256i v) { _mm256_storeu_si256((__m256i *)p, v); }

/* Look up four entries of each of eight lanes. A plain mask: Zen 3 has two units for shifts and BZHI, four for AND,
 * and decodes 7 % faster with it. */
ALWAYS void look_up(const uint32_t *decode, uint64_t mask, const uint8_t *stream, batch *now) {
#define START(k) uint64_t w##k = load64(stream + now->byte[k]) >> now->bit[k];
#define NEXT(k)                           \
  {                                       \
    uint32_t entry = decode[w##k & mask]; \
    w##k >>= entry & 63;                  \
    IN_REGISTER(entry);                   \
    now->entries[i][k] = entry;           \
  }
  EACH(START)
  for (int i = 0; i < 4; i++) { EACH(NEXT) }
#undef START
#undef NEXT
}

/* Look up again, value by value, for the lanes of a mask that met an escape. Their entries then have no bits. */
static __attribute__((noinline)) void look_up_escapes(const table *t, const uint8_t *stream, batch *now,
                                                      uint32_t lanes) {
  for (; lanes; lanes &= lanes - 1) {
    int k = __builtin_ctz(lanes);
    uint32_t pos = 8 * now->byte[k] + now->bit[k];
    for (int i = 0; i < 4; i++) now->entries[i][k] = take_value(t, stream, &pos) << 16;
    now->byte[k] = pos >> 3;
    now->bit[k] = pos & 7;
  }
}

/* Merge 32 words, of which the upper bytes are given, and absorb them (format.md 2.3 and 4.5). */
ALWAYS void put_words(const uint8_t *low, __m256i upper, uint8_t *words, uint32_t sums[2][LANES]) {
  __m256i lower = load8(low), a = _mm256_unpacklo_epi8(lower, upper), b = _mm256_unpackhi_epi8(lower, upper),
          x[2] = {_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31)};
  for (int i = 0; i < 2; i++) {
    __m256i h = load8(sums[i]), word = _mm256_or_si256(_mm256_srli_epi16(x[i], 1), _mm256_slli_epi16(x[i], 15));
    store8(words + 32 * i, word);
    h = _mm256_xor_si256(_mm256_or_si256(_mm256_slli_epi32(h, 5), _mm256_srli_epi32(h, 27)), word);
    store8(sums[i], _mm256_mullo_epi32(h, _mm256_set1_epi32((int)GOLDEN)));
  }
}

/* Advance the lanes by their entries, and write the symbols to byte `at` of the plane and beyond, or words. `place` is
 * the first symbol's in its lane. */
ALWAYS void settle(const table *t, const uint8_t *stream, batch *now, uint8_t *plane, const halves *to, size_t at,
                   int place, int kind, int places) {
  const __m256i escape = _mm256_set1_epi32(ANY_ESCAPE);
  __m256i v[4], sum, low, high;
  for (;;) {
    for (int i = 0; i < 4; i++) v[i] = load8(now->entries[i]);
    sum = _mm256_add_epi32(_mm256_add_epi32(v[0], v[1]), _mm256_add_epi32(v[2], v[3]));
    if (__builtin_expect(_mm256_testz_si256(sum, escape), 1)) break;
    __m256i met = _mm256_cmpgt_epi32(_mm256_and_si256(sum, escape), _mm256_setzero_si256());
    look_up_escapes(t, stream, now, (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(met)));
  }
  sum = _mm256_add_epi32(load8(now->bit), _mm256_and_si256(sum, _mm256_set1_epi32(63)));
  store8(now->byte, _mm256_add_epi32(load8(now->byte), _mm256_srli_epi32(sum, 3)));
  store8(now->bit, _mm256_and_si256(sum, _mm256_set1_epi32(7)));
  if (kind == 1) { /* four bytes a lane */
    low = _mm256_blend_epi16(_mm256_srli_epi32(v[0], 16), v[2], 0xaa);
    high = _mm256_blend_epi16(_mm256_srli_epi32(v[1], 16), v[3], 0xaa);
    high = _mm256_or_si256(low, _mm256_slli_epi32(high, 8));
    if (places == 4) store8(plane + at, high);
    if (places == 8) low = load8(now->before); /* used from the second time on */
    store8(now->before, high);
    if (places == 16)
      for (int k = 0; k < LANES; k++) store32(plane + at + k * 16, now->before[k]);
    if (places != 8 || place % 8 == 0) return;
    at -= 4;
  } else { /* four bytes a lane, and the next four */
    low = _mm256_blend_epi16(_mm256_srli_epi32(v[0], 16), v[1], 0xaa);
    high = _mm256_blend_epi16(_mm256_srli_epi32(v[2], 16), v[3], 0xaa);
    if (places == 4) {
      store8(plane + at, low);
      store8(plane + at + TPDE_LANES * 4, high); /* in the next group */
      return;
    }
  }
  __m256i a = _mm256_unpacklo_epi32(low, high), b = _mm256_unpackhi_epi32(low, high), /* lanes 0 1 4 5, 2 3 6 7 */
          first = _mm256_permute2x128_si256(a, b, 0x20), last = _mm256_permute2x128_si256(a, b, 0x31);
  if (to) {
    put_words(to->low + at, first, to->words + 2 * at, now->sums);
    put_words(to->low + at + 32, last, to->words + 2 * at + 64, now->sums + 2);
  } else if (places == 8) {
    store8(plane + at, first);
    store8(plane + at + 32, last);
  } else {
    uint64_t symbols[LANES];
    store8(symbols, first);
    store8(symbols + 4, last);
    for (int k = 0; k < LANES; k++) store64(plane + at + k * places, symbols[k]);
  }
}

/* A batch is settled after the next one is looked up: its vectors would wait for the stores of their entries. */
ALWAYS void take_batches(const table *t, const uint8_t *stream, batch lanes[BATCHES], int groups, uint8_t *plane,
                         const halves *to, int kind, int places) {
  const uint32_t *const decode = t->decode;
  const uint64_t mask = (1ull << t->index_bits) - 1;
  const batch *const end = lanes + BATCHES;
  const uint8_t *ahead = to ? to->ahead : NULL; /* asked for evenly, 11 % faster than all at once or not at all */
  const size_t step = to ? to->ahead_bytes / (size_t)(groups * places / kind) : 0; /* about two lines at most */
  batch *before = lanes, *now = lanes;
  size_t at = 0; /* of the lane before */
  look_up(decode, mask, stream, lanes);
  for (int place = 0; place < groups * places;) {
    if (++now == end) now = lanes;
    look_up(decode, mask, stream, now); /* at the end the first again, for nothing: it is not settled */
    if (to) {
      __builtin_prefetch(ahead);
      __builtin_prefetch(ahead + step / 2);
      ahead += step;
    }
    settle(t, stream, before, plane, to, at, place, kind, places);
    before = now;
    at += (size_t)(LANES * places);
    if (now != lanes) continue;
    place += 4 * kind;
    if (4 * kind > places) at += (size_t)(TPDE_LANES * places);
    else if (place % places) at -= (size_t)(TPDE_LANES * places - 4 * kind);
    else at -= (size_t)(places - 4 * kind);
  }
}

static void start_at(batch lanes[BATCHES], const uint32_t start[TPDE_LANES + 1]) {
  for (int l = 0; l < TPDE_LANES; l++) {
    lanes[l / LANES].byte[l % LANES] = start[l] >> 3;
    lanes[l / LANES].bit[l % LANES] = start[l] & 7;
  }
}

static int overrun(batch lanes[BATCHES], const uint32_t start[TPDE_LANES + 1]) {
  for (int l = 0; l < TPDE_LANES; l++)
    if (8 * lanes[l / LANES].byte[l % LANES] + lanes[l / LANES].bit[l % LANES] > start[l + 1]) return l + 1;
  return 0;
}

static int read_lanes(const table *t, const uint8_t *stream, const uint32_t start[TPDE_LANES + 1], int places,
                      int groups, uint8_t *plane) {
  _Alignas(64) batch lanes[BATCHES];
  if (places == 2 || (places == 4 && t->kind == 2 && groups % 2))
    return read_lanes_plainly(t, stream, start, places, groups, plane);
  start_at(lanes, start);
  if (t->kind == 2 && places == 8) take_batches(t, stream, lanes, groups, plane, NULL, 2, 8);
  else if (t->kind == 2 && places == 4) take_batches(t, stream, lanes, groups, plane, NULL, 2, 4);
  else if (t->kind == 2) take_batches(t, stream, lanes, groups, plane, NULL, 2, 16);
  else if (places == 16) take_batches(t, stream, lanes, groups, plane, NULL, 1, 16);
  else if (places == 8) take_batches(t, stream, lanes, groups, plane, NULL, 1, 8);
  else take_batches(t, stream, lanes, groups, plane, NULL, 1, 4);
  return overrun(lanes, start);
}

static int read_halves(const table *t, const uint8_t *stream, const uint32_t start[TPDE_LANES + 1], int groups,
                       halves *to) {
  _Alignas(64) batch lanes[BATCHES];
  uint32_t sums[ACCUMULATORS];
  start_at(lanes, start);
  start_sums(sums);
  for (int b = 0; b < BATCHES; b++) memcpy(lanes[b].sums, sums + b * 4 * LANES, sizeof lanes[b].sums);
  if (t->kind == 2) take_batches(t, stream, lanes, groups, NULL, to, 2, 8);
  else take_batches(t, stream, lanes, groups, NULL, to, 1, 8);
  for (int b = 0; b < BATCHES; b++) memcpy(sums + b * 4 * LANES, lanes[b].sums, sizeof lanes[b].sums);
  to->checksum = sum_up(sums);
  return overrun(lanes, start);
}

/* Past the caches: lines that are overwritten are not read first. 87 KiB take two thirds of memcpy's time. */
static void copy_out(uint8_t *to, const uint8_t *from, size_t bytes) {
  size_t head = -(uintptr_t)to % 64;
  if (head > bytes) head = bytes;
  memcpy(to, from, head);
  for (to += head, from += head, bytes -= head; bytes >= 64; to += 64, from += 64, bytes -= 64) {
    __m256i low = load8(from), high = load8(from + 32);
    _mm256_stream_si256((__m256i *)to, low);
    _mm256_stream_si256((__m256i *)(to + 32), high);
  }
  memcpy(to, from, bytes);
  _mm_sfence(); /* before another thread is told */
}

const kernels tpde_kernels_avx2 = {"avx2",      split,      merge,       checksum, lane_bits,
                                   write_lanes, read_lanes, read_halves, copy_out,
                                   symbols,     changed,    ADD_TERMS, tell_changes, write_changes, apply_changes,
                                   list_changes};
#endif
