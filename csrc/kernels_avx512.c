/* kernels_avx512.c: the plain loops, compiled for AVX-512 and BMI2, and lanes read sixteen at a time by gathers. */
#if defined(TPDE_HAVE_AVX512)
#include <immintrin.h>

#include "internal.h"

/* ---- deltas ---- */

static inline uint64_t class_mask(const uint8_t *s, uint8_t first, uint8_t width) {
  __m512i x = _mm512_sub_epi8(_mm512_loadu_si512(s), _mm512_set1_epi8((char)first));
  return _mm512_cmple_epu8_mask(x, _mm512_set1_epi8((char)width));
}
#define CLASS_MASK class_mask

static inline uint64_t changed_block(int word_bytes, const uint8_t *a, const uint8_t *b) {
  uint64_t mask = 0;
  for (int i = 0; i < word_bytes; i++) {
    __m512i x = _mm512_loadu_si512(a + 64 * i), y = _mm512_loadu_si512(b + 64 * i);
    if (word_bytes == 1) mask = _mm512_cmpneq_epi8_mask(x, y);
    else if (word_bytes == 2) mask |= (uint64_t)_mm512_cmpneq_epi16_mask(x, y) << 32 * i;
    else if (word_bytes == 4) mask |= (uint64_t)_mm512_cmpneq_epi32_mask(x, y) << 16 * i;
    else mask |= (uint64_t)_mm512_cmpneq_epi64_mask(x, y) << 8 * i;
  }
  return mask;
}
#define CHANGED_BLOCK changed_block

static void add_terms(const uint8_t *data, size_t n, uint64_t first, uint64_t sum[2]) {
  uint64_t keys[8];
  for (uint64_t i = 0; i < 8; i++) keys[i] = (first + i + 1) * GOLDEN64;
  __m512i a = _mm512_setzero_si512(), b = a, k = _mm512_loadu_si512(keys),
          step = _mm512_set1_epi64((long long)(8 * GOLDEN64));
  for (size_t i = 0; i < n; i += 8, k = _mm512_add_epi64(k, step)) {
    __mmask8 in = n - i >= 8 ? 0xff : (__mmask8)((1u << (n - i)) - 1);
    __m512i x = _mm512_maskz_loadu_epi64(in, data + 8 * i), y = _mm512_xor_si512(x, k), z = _mm512_add_epi64(x, k);
    a = _mm512_add_epi64(a, _mm512_maskz_mul_epu32(in, y, _mm512_srli_epi64(y, 32)));
    b = _mm512_add_epi64(b, _mm512_maskz_mul_epu32(in, z, _mm512_srli_epi64(z, 32)));
  }
  sum[0] += (uint64_t)_mm512_reduce_add_epi64(a);
  sum[1] += (uint64_t)_mm512_reduce_add_epi64(b);
}
#define ADD_TERMS add_terms

#define LOW_BITS(x, bits) _bzhi_u64(x, bits)
#define AT_ONCE 64
#define read_lanes read_lanes_plainly
#include "kernels.inc.h"
#undef read_lanes

/* A gather looks up for 16 lanes, but the next one waits until all of its loads are there. So both halves of the lanes
 * stand side by side, what they read next is fetched while they look up, and words are made meanwhile. */
#define LANES 16
#define ALWAYS static inline __attribute__((always_inline)) /* with constants for the kind and the places */

/* GCC would make constants anew wherever they are used, and shuffles wait for that. Where it knows that a gather's mask
 * is full, it gathers into whatever register is free, and the gather waits for what was in there. */
#if defined(__clang__)
#define HOLD(x) (void)0
#define HOLD_MASK(x) (void)0
#else
#define HOLD(x) __asm__("" : "+v"(x))
#define HOLD_MASK(x) __asm__("" : "+Yk"(x))
#endif

/* Sixteen lanes being read. They are at `bit` of the stream; `near` has the 32 bits from there on, `far` the 32 after
 * those. */
typedef struct lanes {
  __m512i bit, near, far;
  __m512i next, beyond, inside; /* 64 bits from the byte on that lies 8 bytes further, and where in a byte a lane is */
  __m512i entries[4];           /* looked up, but not settled */
  __m512i first, last;          /* the symbols of the last two steps or of one, four bytes a lane */
} lanes;

static inline __m512i load_line(const void *p) { return _mm512_loadu_si512(p); }
static inline void store_line(void *p, __m512i v) { _mm512_storeu_si512(p, v); }
static inline __m512i each(int x) { return _mm512_set1_epi32(x); }

/* What does not change while lanes are read. */
typedef struct source {
  const table *t;
  const uint8_t *stream;
  const uint32_t *decode;
  __m512i mask, in_byte, length, escape, golden;
  __mmask16 all;
} source;

ALWAYS source source_of(const table *t, const uint8_t *stream) {
  source from = {t,       stream,   t->decode,        each((1 << t->index_bits) - 1),
                 each(7), each(63), each(ANY_ESCAPE), each((int)GOLDEN), 0xffff};
  HOLD(from.in_byte);
  HOLD(from.length);
  HOLD(from.escape);
  HOLD(from.golden);
  HOLD_MASK(from.all);
  return from;
}

/* The 64 bits from the byte on that each lane's bit lies in, the lower half and the upper. */
ALWAYS void load_bits(const uint8_t *stream, __mmask16 all, __m512i bit, __m512i *low, __m512i *high) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  __m512i none = _mm512_setzero_si512(), byte = _mm512_srli_epi32(bit, 3);
  __m256i first = _mm512_castsi512_si256(byte), last = _mm512_extracti64x4_epi64(byte, 1);
  __m512i a = _mm512_mask_i32gather_epi64(none, (__mmask8)all, first, (const void *)stream, 1),
          b = _mm512_mask_i32gather_epi64(none, (__mmask8)all, last, (const void *)stream, 1);
  *low = _mm512_permutex2var_epi32(a, even, b);
  *high = _mm512_permutex2var_epi32(a, _mm512_add_epi32(even, each(1)), b);
}

/* Fetch what is used up in the next four look-ups: at most 48 bits. */
ALWAYS void look_ahead(lanes *l, const source *from) {
  load_bits(from->stream + 8, from->all, l->bit, &l->next, &l->beyond);
  l->inside = _mm512_and_si512(l->bit, from->in_byte);
}

ALWAYS void start_at(lanes *l, const source *from, __m512i bit) {
  __m512i low, high;
  l->bit = bit;
  load_bits(from->stream, from->all, bit, &low, &high);
  look_ahead(l, from);
  l->near = _mm512_shrdv_epi32(low, high, l->inside);
  l->far = _mm512_shrdv_epi32(high, l->next, l->inside);
}

ALWAYS __m512i look_up(const source *from, __m512i bits) {
  return _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), from->all, _mm512_and_si512(bits, from->mask),
                                     (const void *)from->decode, 4);
}

/* Two look-ups take 24 bits at most, and the first leaves enough for the second. Shifts take the lowest 5 bits of a
 * count: an entry's length, or that of two, whatever else is in there. */
ALWAYS void look_up_first(lanes *l, const source *from, int i) { l->entries[i] = look_up(from, l->near); }

ALWAYS void look_up_second(lanes *l, const source *from, int i) {
  l->entries[i + 1] = look_up(from, _mm512_shrdv_epi32(l->near, l->near, l->entries[i]));
}

ALWAYS void move_on(lanes *l, int i) {
  __m512i bits = _mm512_add_epi32(l->entries[i], l->entries[i + 1]);
  l->near = _mm512_shrdv_epi32(l->near, l->far, bits);
  l->far = _mm512_shrdv_epi32(l->far, _mm512_shrdv_epi32(l->next, l->beyond, l->inside), bits);
  l->inside = _mm512_add_epi32(l->inside, bits);
}

ALWAYS __m512i put_lane(__m512i v, __mmask16 lane, uint32_t x) { return _mm512_mask_set1_epi32(v, lane, (int)x); }

/* Look up again, value by value, for the lanes of a mask that met an escape, from where they were. Of bf16 that is every
 * tenth step of 16 lanes, so what is found goes to the vectors from registers: memory would not be there in time. */
ALWAYS void look_up_escapes(lanes *l, const source *from, uint32_t met, __m512i before) {
  uint32_t bits[LANES];
  store_line(bits, before);
  for (; met; met &= met - 1) {
    int k = __builtin_ctz(met);
    const __mmask16 lane = (__mmask16)(1u << k);
    uint32_t bit = bits[k];
    l->entries[0] = put_lane(l->entries[0], lane, take_value(from->t, from->stream, &bit) << 16);
    l->entries[1] = put_lane(l->entries[1], lane, take_value(from->t, from->stream, &bit) << 16);
    l->entries[2] = put_lane(l->entries[2], lane, take_value(from->t, from->stream, &bit) << 16);
    l->entries[3] = put_lane(l->entries[3], lane, take_value(from->t, from->stream, &bit) << 16);
    const uint8_t *at = from->stream + (bit >> 3);
    uint64_t w = load64(at) >> (bit & 7) | (uint64_t)at[8] << 1 << (63 - (bit & 7));
    l->near = put_lane(l->near, lane, (uint32_t)w);
    l->far = put_lane(l->far, lane, (uint32_t)(w >> 32));
    l->bit = put_lane(l->bit, lane, bit);
  }
}

/* Bytes or pairs of bytes from the upper halves of two entries. */
ALWAYS __m512i join(__m512i a, __m512i b) { return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(a, 16), b); }

/* Advance the lanes by their entries, and collect the symbols. */
ALWAYS void settle(lanes *l, const source *from, int kind) {
  __m512i before = l->bit, sum = _mm512_add_epi32(_mm512_add_epi32(l->entries[0], l->entries[1]),
                                                  _mm512_add_epi32(l->entries[2], l->entries[3]));
  uint32_t met = _mm512_test_epi32_mask(sum, from->escape);
  move_on(l, 2);
  l->bit = _mm512_add_epi32(before, _mm512_and_si512(sum, from->length));
  if (__builtin_expect(met != 0, 0)) look_up_escapes(l, from, met, before);
  if (kind == 2) {
    l->first = join(l->entries[0], l->entries[1]);
    l->last = join(l->entries[2], l->entries[3]);
  } else {
    l->first = l->last;
    l->last = _mm512_or_si512(join(l->entries[0], l->entries[2]),
                              _mm512_slli_epi32(join(l->entries[1], l->entries[3]), 8));
  }
}

/* The symbols of lanes as `order` has them for lanes 0 to 7, from lane `lane` on. */
ALWAYS __m512i arrange(const lanes *l, __m512i order, int lane) {
  return _mm512_permutex2var_epi32(l->first, _mm512_add_epi32(order, each(lane)), l->last);
}

/* Write the symbols of a step to a plane. `place` is the first one's in its lane, `lane` the first of the lanes. */
ALWAYS void put_symbols(const lanes *l, uint8_t *plane, int lane, int place, int kind, int places) {
  uint8_t *at = plane + TPDE_LANES * (place - place % places) + lane * places;
  if (places == 4 && kind == 2) {
    store_line(at, l->first);
    store_line(at + TPDE_LANES * 4, l->last); /* in the next group */
  } else if (places == 4) {
    store_line(at, l->last);
  } else if (places == 8 && (kind == 2 || place % 8)) {
    const __m512i order = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    store_line(at, arrange(l, order, 0));
    store_line(at + 64, arrange(l, order, 8));
  } else if (places == 16) { /* 4 or 8 bytes of each lane's 16 */
    const __m512i two = _mm512_setr_epi32(0, 16, 0, 16, 1, 17, 1, 17, 2, 18, 2, 18, 3, 19, 3, 19),
                  one = _mm512_setr_epi32(16, 16, 16, 16, 17, 17, 17, 17, 18, 18, 18, 18, 19, 19, 19, 19);
    const __mmask16 these = (__mmask16)((kind == 2 ? 0x3333 : 0x1111) << place % 16 / 4);
    for (int i = 0; i < 4; i++)
      _mm512_mask_storeu_epi32(at + 64 * i, these, arrange(l, kind == 2 ? two : one, 4 * i));
  }
}

/* Merge the words of eight lanes, from lane `lane` on, and absorb them (format.md 2.3 and 4.5). */
ALWAYS void put_words(const lanes *l, int lane, const uint8_t *low, uint8_t *words, uint32_t sums[2 * LANES],
                      __m512i golden) {
  /* Lanes 0 4 1 5 2 6 3 7: unpacking then gives lanes 0 to 3, and 4 to 7. */
  const __m512i symbols = _mm512_setr_epi32(0, 16, 4, 20, 1, 17, 5, 21, 2, 18, 6, 22, 3, 19, 7, 23),
                bytes = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  __m512i upper = arrange(l, symbols, lane), lower = _mm512_permutexvar_epi64(bytes, load_line(low)),
          x[2] = {_mm512_unpacklo_epi8(lower, upper), _mm512_unpackhi_epi8(lower, upper)};
  for (int i = 0; i < 2; i++) {
    __m512i h = _mm512_rol_epi32(load_line(sums + i * LANES), 5), word = _mm512_shrdi_epi16(x[i], x[i], 1);
    store_line(words + 64 * i, word);
    store_line(sums + i * LANES, _mm512_mullo_epi32(_mm512_xor_si512(h, word), golden));
  }
}

/* How far ahead lines of the output are asked for: on a Xeon of 2023 buffers that are written again are then decoded to
 * 31 % faster, new memory 6 %. */
#define OUTPUT_AHEAD 16384

/* A quarter of a group's words, once the symbols are there, and of what is read and written next. */
ALWAYS void put_quarter(const lanes *l, int lane, halves *to, uint32_t sums[2 * LANES], __m512i golden, int ready) {
  __builtin_prefetch(to->ahead);
  __builtin_prefetch(to->ahead + to->ahead_bytes / 2);
  __builtin_prefetch(to->words + OUTPUT_AHEAD, 1);
  __builtin_prefetch(to->words + OUTPUT_AHEAD + 64, 1);
  to->ahead += to->ahead_bytes;
  if (!ready) return;
  put_words(l, lane, to->low, to->words, sums, golden);
  to->low += 64;
  to->words += 128;
}

/* Four look-ups of all lanes at a time. Words are made of the symbols before, between the look-ups: a processor then
 * finds them while it waits for gathers. */
ALWAYS int take_steps(const table *t, const uint8_t *stream, const uint32_t start[TPDE_LANES + 1], int groups,
                      uint8_t *plane, halves *to, uint32_t sums[ACCUMULATORS], int kind, int places) {
  const source from = source_of(t, stream);
  const int end = groups * places;
  lanes a = {.last = each(0)}, b = a;
  start_at(&a, &from, load_line(start));
  start_at(&b, &from, load_line(start + LANES));
  if (to) to->ahead_bytes /= (size_t)(end / kind); /* about two lines at most */
  for (int place = 0; place < end; place += 4 * kind) {
    const int ready = place && place % 8 == 0;
    look_up_first(&a, &from, 0);
    look_up_first(&b, &from, 0);
    look_ahead(&a, &from);
    look_ahead(&b, &from);
    if (to) put_quarter(&a, 0, to, sums, from.golden, ready);
    look_up_second(&a, &from, 0);
    look_up_second(&b, &from, 0);
    if (to) put_quarter(&a, 8, to, sums + 2 * LANES, from.golden, ready);
    move_on(&a, 0);
    move_on(&b, 0);
    look_up_first(&a, &from, 2);
    look_up_first(&b, &from, 2);
    if (to) put_quarter(&b, 0, to, sums + 4 * LANES, from.golden, ready);
    look_up_second(&a, &from, 2);
    look_up_second(&b, &from, 2);
    if (to) put_quarter(&b, 8, to, sums + 6 * LANES, from.golden, ready);
    settle(&a, &from, kind);
    settle(&b, &from, kind);
    if (to) continue;
    put_symbols(&a, plane, 0, place, kind, places);
    put_symbols(&b, plane, LANES, place, kind, places);
  }
  if (to) {
    put_quarter(&a, 0, to, sums, from.golden, 1);
    put_quarter(&a, 8, to, sums + 2 * LANES, from.golden, 1);
    put_quarter(&b, 0, to, sums + 4 * LANES, from.golden, 1);
    put_quarter(&b, 8, to, sums + 6 * LANES, from.golden, 1);
  }
  uint32_t bit[TPDE_LANES];
  store_line(bit, a.bit);
  store_line(bit + LANES, b.bit);
  for (int l = 0; l < TPDE_LANES; l++)
    if (bit[l] > start[l + 1]) return l + 1;
  return 0;
}

static int read_lanes(const table *t, const uint8_t *stream, const uint32_t start[TPDE_LANES + 1], int places,
                      int groups, uint8_t *plane) {
  if (places == 2 || (places == 4 && t->kind == 2 && groups % 2))
    return read_lanes_plainly(t, stream, start, places, groups, plane);
  if (t->kind == 2 && places == 8) return take_steps(t, stream, start, groups, plane, NULL, NULL, 2, 8);
  if (t->kind == 2 && places == 4) return take_steps(t, stream, start, groups, plane, NULL, NULL, 2, 4);
  if (t->kind == 2) return take_steps(t, stream, start, groups, plane, NULL, NULL, 2, 16);
  if (places == 16) return take_steps(t, stream, start, groups, plane, NULL, NULL, 1, 16);
  if (places == 8) return take_steps(t, stream, start, groups, plane, NULL, NULL, 1, 8);
  return take_steps(t, stream, start, groups, plane, NULL, NULL, 1, 4);
}

static int read_halves(const table *t, const uint8_t *stream, const uint32_t start[TPDE_LANES + 1], int groups,
                       halves *to) {
  _Alignas(64) uint32_t sums[ACCUMULATORS];
  halves at = *to; /* in registers */
  start_sums(sums);
  int lane = t->kind == 2 ? take_steps(t, stream, start, groups, NULL, &at, sums, 2, 8)
                          : take_steps(t, stream, start, groups, NULL, &at, sums, 1, 8);
  to->checksum = sum_up(sums);
  return lane;
}

/* Past the caches: lines that are overwritten are not read first. */
static void copy_out(uint8_t *to, const uint8_t *from, size_t bytes) {
  size_t head = -(uintptr_t)to % 64;
  if (head > bytes) head = bytes;
  memcpy(to, from, head);
  for (to += head, from += head, bytes -= head; bytes >= 64; to += 64, from += 64, bytes -= 64)
    _mm512_stream_si512((__m512i *)to, load_line(from));
  memcpy(to, from, bytes);
  _mm_sfence(); /* before another thread is told */
}

const kernels tpde_kernels_avx512 = {"avx512",    split,      merge,       checksum, lane_bits,
                                     write_lanes, read_lanes, read_halves, copy_out,
                                     symbols,     changed,    ADD_TERMS, tell_changes, write_changes, apply_changes,
                                     list_changes};
#endif
