/* kernels.inc.h: the inner loops in portable C. Each kernels_*.c includes this file once, is compiled for its
 * instruction set, and may put a hand-written loop in the place of one of these. */
#include "internal.h"

#ifndef LOW_BITS
#define LOW_BITS(x, bits) ((x) & ((1ull << (bits)) - 1))
#endif

#define ROTL16(x) ((uint16_t)((uint16_t)((x) << 1) | ((x) >> 15)))
#define ROTR16(x) ((uint16_t)(((x) >> 1) | (uint16_t)((x) << 15)))

/* ---- planes, format.md 2.3 ---- */

static void split1(int rotate, const uint8_t *restrict w, size_t n, uint8_t *restrict p) {
  if (!rotate) {
    memcpy(p, w, n);
    return;
  }
  for (size_t i = 0; i < n; i++) p[i] = (uint8_t)((w[i] << 1) | (w[i] >> 7));
}

static void split2(int rotate, const uint8_t *restrict w, size_t n, uint8_t *restrict p0,
                   uint8_t *restrict p1) {
  for (size_t i = 0; i < n; i++) {
    uint16_t x = load16(w + 2 * i);
    if (rotate) x = ROTL16(x);
    p0[i] = (uint8_t)x;
    p1[i] = (uint8_t)(x >> 8);
  }
}

static void split4(int rotate, const uint8_t *restrict w, size_t n, uint8_t *restrict p0,
                   uint8_t *restrict p1, uint8_t *restrict p2, uint8_t *restrict p3) {
  for (size_t i = 0; i < n; i++) {
    uint32_t x = load32(w + 4 * i);
    uint16_t h = (uint16_t)(x >> 16);
    if (rotate) h = ROTL16(h);
    p0[i] = (uint8_t)x;
    p1[i] = (uint8_t)(x >> 8);
    p2[i] = (uint8_t)h;
    p3[i] = (uint8_t)(h >> 8);
  }
}

static void split8(int rotate, const uint8_t *restrict w, size_t n, uint8_t *const planes[]) {
  for (size_t i = 0; i < n; i++) {
    uint64_t x = load64(w + 8 * i);
    uint16_t h = (uint16_t)(x >> 48);
    if (rotate) h = ROTL16(h);
    for (int p = 0; p < 6; p++) planes[p][i] = (uint8_t)(x >> (8 * p));
    planes[6][i] = (uint8_t)h;
    planes[7][i] = (uint8_t)(h >> 8);
  }
}

static void split(int word_bytes, int rotate, const uint8_t *words, size_t n, uint8_t *const planes[]) {
  if (word_bytes == 1) split1(rotate, words, n, planes[0]);
  else if (word_bytes == 2) split2(rotate, words, n, planes[0], planes[1]);
  else if (word_bytes == 4) split4(rotate, words, n, planes[0], planes[1], planes[2], planes[3]);
  else split8(rotate, words, n, planes);
}

static void merge1(int rotate, const uint8_t *restrict p, size_t n, uint8_t *restrict w) {
  if (!rotate) {
    memcpy(w, p, n);
    return;
  }
  for (size_t i = 0; i < n; i++) w[i] = (uint8_t)((p[i] >> 1) | (p[i] << 7));
}

static void merge2(int rotate, const uint8_t *restrict p0, const uint8_t *restrict p1, size_t n,
                   uint8_t *restrict w) {
  for (size_t i = 0; i < n; i++) {
    uint16_t x = (uint16_t)(p0[i] | (p1[i] << 8));
    store16(w + 2 * i, rotate ? ROTR16(x) : x);
  }
}

static void merge4(int rotate, const uint8_t *restrict p0, const uint8_t *restrict p1,
                   const uint8_t *restrict p2, const uint8_t *restrict p3, size_t n, uint8_t *restrict w) {
  for (size_t i = 0; i < n; i++) {
    uint16_t h = (uint16_t)(p2[i] | (p3[i] << 8));
    if (rotate) h = ROTR16(h);
    store32(w + 4 * i, p0[i] | ((uint32_t)p1[i] << 8) | ((uint32_t)h << 16));
  }
}

static void merge8(int rotate, uint8_t *const planes[], size_t n, uint8_t *restrict w) {
  for (size_t i = 0; i < n; i++) {
    uint16_t h = (uint16_t)(planes[6][i] | (planes[7][i] << 8));
    uint64_t x = 0;
    if (rotate) h = ROTR16(h);
    for (int p = 0; p < 6; p++) x |= (uint64_t)planes[p][i] << (8 * p);
    store64(w + 8 * i, x | ((uint64_t)h << 48));
  }
}

static void merge(int word_bytes, int rotate, uint8_t *const planes[], size_t n, uint8_t *words) {
  if (word_bytes == 1) merge1(rotate, planes[0], n, words);
  else if (word_bytes == 2) merge2(rotate, planes[0], planes[1], n, words);
  else if (word_bytes == 4) merge4(rotate, planes[0], planes[1], planes[2], planes[3], n, words);
  else merge8(rotate, planes, n, words);
}

/* ---- the checksum, format.md 4.5 ---- */

#define GOLDEN 0x9E3779B1u
#ifndef AT_ONCE
#define AT_ONCE 32 /* accumulators: enough that a multiplication does not wait for the one before */
#endif

static inline uint32_t absorb(uint32_t h, uint32_t x) { return (((h << 5) | (h >> 27)) ^ x) * GOLDEN; }

#define ACCUMULATORS 128

static inline void start_sums(uint32_t h[ACCUMULATORS]) {
  for (uint32_t a = 0; a < ACCUMULATORS; a++) h[a] = (a + 1) * GOLDEN;
}

static inline uint32_t sum_up(const uint32_t h[ACCUMULATORS]) {
  uint32_t sum = 0;
  for (int i = 0; i < ACCUMULATORS; i++) {
    uint32_t g = (h[i] ^ (h[i] >> 15)) * 0x85EBCA77u;
    sum += g ^ (g >> 13);
  }
  return sum;
}

static uint32_t checksum(const uint8_t *words, size_t bytes) {
  uint32_t h[ACCUMULATORS];
  size_t whole = bytes / 512, rest = bytes % 512, i;
  start_sums(h);
  for (size_t b = 0; b < ACCUMULATORS; b += AT_ONCE) {
    uint32_t k[AT_ONCE]; /* stay in registers */
    memcpy(k, h + b, sizeof k);
    for (i = 0; i < whole; i++)
      for (size_t a = 0; a < AT_ONCE; a++) k[a] = absorb(k[a], load32(words + 512 * i + 4 * (b + a)));
    memcpy(h + b, k, sizeof k);
  }
  if (whole) words += 512 * whole; /* without bytes it may be NULL, which takes no offset */
  for (i = 0; i + 4 <= rest; i += 4) h[i / 4] = absorb(h[i / 4], load32(words + i));
  if (i < rest) {
    uint8_t last[4] = {0};
    memcpy(last, words + i, rest - i);
    h[i / 4] = absorb(h[i / 4], load32(last));
  }
  return sum_up(h);
}

/* ---- lanes, format.md 5 ---- */

/* A step is four look-ups, or as many as a lane has in a group if that is fewer. Codewords have at most 12
 * bits, so that four without an escape fit 64 bits together with a bit position's 7. */
#define STEP(kind, places) ((places) < 4 * (kind) ? (places) / (kind) : 4)

/* Call an inline function with constants for a table's kind and the places. */
#define CALL_SHAPED(f, ...)                                                            \
  do {                                                                                 \
    if (t->kind == 2 && places == 8) f(__VA_ARGS__, 2, 8);                             \
    else if (t->kind == 2 && places == 4) f(__VA_ARGS__, 2, 4);                        \
    else if (t->kind == 2 && places == 2) f(__VA_ARGS__, 2, 2);                        \
    else if (t->kind == 2) f(__VA_ARGS__, 2, 16);                                      \
    else if (places == 16) f(__VA_ARGS__, 1, 16);                                      \
    else if (places == 8) f(__VA_ARGS__, 1, 8);                                        \
    else if (places == 4) f(__VA_ARGS__, 1, 4);                                        \
    else f(__VA_ARGS__, 1, 2);                                                         \
  } while (0)

static inline uint32_t value_at(const uint8_t *s, int kind) { return kind == 2 ? load16(s) : *s; }

static inline void count_bits(const table *t, const uint8_t *plane, int groups,
                              uint32_t bits[TABLES_AT_ONCE][TPDE_LANES], int kind, int places) {
  const uint32_t *const lengths = t->lengths, bytes = 0x00ff00ff;
  const int step = STEP(kind, places);
  for (int l = 0; l < TPDE_LANES; l++) {
    const uint8_t *s = plane + l * places;
    uint32_t even = 0, odd = 0; /* of two tables each: a lane of at most 1024 symbols has fewer than 2^16 bits */
    for (int g = 0; g < groups; g++, s += TPDE_LANES * places)
      for (int j = 0; j < places; j += step * kind) {
        uint32_t sum = 0;
        for (int i = 0; i < step; i++) sum += lengths[value_at(s + j + i * kind, kind)];
        even += sum & bytes;
        odd += sum >> 8 & bytes;
      }
    bits[0][l] = even & 0xffff;
    bits[1][l] = odd & 0xffff;
    bits[2][l] = even >> 16;
    bits[3][l] = odd >> 16;
  }
}

static void lane_bits(const table *t, const uint8_t *plane, int places, int groups,
                      uint32_t bits[TABLES_AT_ONCE][TPDE_LANES]) {
  CALL_SHAPED(count_bits, t, plane, groups, bits);
}

/* A run of bits being written: the topmost `n` bits of acc, the last one topmost, are not stored yet. */
typedef struct run {
  uint64_t acc;
  uint32_t n;
  uint8_t *out;
} run;

/* Append 1 to 56 bits, which are topmost in `code`, above zeros. */
static inline void put(run *r, uint64_t code, uint32_t bits) {
  r->acc = (r->acc >> bits) | code;
  r->n += bits;
  store64(r->out, r->acc >> (64 - r->n));
  r->out += r->n >> 3;
  r->n &= 7;
}

/* What `put` takes for one value that may be an escape. */
static uint64_t code_of(const table *t, uint32_t v, uint32_t *bits) {
  uint32_t e = t->encode[v];
  uint64_t code = e ^ ENTRY_BITS(e);
  *bits = ENTRY_BITS(e);
  if (e & ENTRY_ESCAPE) {
    if (t->kind == 1) v = v >> t->raw_bits | (v << (8 - t->raw_bits) & 0xff);
    code = (uint64_t)(t->escape | v << t->escape_bits) << (32 - *bits);
  }
  return code << 32;
}

static inline void put_step(run *r, const table *t, const uint8_t *s, int kind, int step) {
  uint32_t e[4] = {0}, sum = 0;
  for (int i = 0; i < step; i++) sum += e[i] = t->encode[value_at(s + i * kind, kind)];
  if (__builtin_expect(sum & ANY_ESCAPE, 0)) {
    for (int i = 0; i < step; i++) {
      uint32_t bits;
      uint64_t code = code_of(t, value_at(s + i * kind, kind), &bits);
      put(r, code, bits);
    }
    return;
  }
  const uint32_t codes = 0xffffff00u; /* two of at most 12 bits */
  uint64_t a = (e[0] >> ENTRY_BITS(e[1]) | e[1]) & codes, b = (e[2] >> ENTRY_BITS(e[3]) | e[3]) & codes;
  if (step == 4) put(r, (a << 32 >> ((e[2] + e[3]) & 63)) | b << 32, sum & 63);
  else if (step == 2) put(r, a << 32, sum & 63);
  else put(r, (uint64_t)(e[0] & codes) << 32, sum & 63);
}

/* A lane's share of the lines. */
static inline void ask_for(const upcoming *next, int lane) {
  for (size_t at = 64u * (size_t)lane; at < next->bytes; at += 64u * TPDE_LANES) {
    if (next->read) __builtin_prefetch(next->read + at);
    if (next->write) __builtin_prefetch(next->write + at, 1);
  }
}

static inline void put_lanes(const table *t, const uint8_t *plane, int groups, uint32_t *bits, uint8_t *out,
                             const upcoming *next, int kind, int places) {
  run r = {0, 0, out};
  for (int l = 0; l < TPDE_LANES; l++) {
    ask_for(next, l);
    uint64_t begin = (uint64_t)(r.out - out) * 8 + r.n;
    const uint8_t *s = plane + l * places;
    for (int g = 0; g < groups; g++, s += TPDE_LANES * places)
      for (int j = 0; j < places; j += STEP(kind, places) * kind)
        put_step(&r, t, s + j, kind, STEP(kind, places));
    uint32_t have;
    while ((have = (uint32_t)((uint64_t)(r.out - out) * 8 + r.n - begin)) < bits[l])
      put(&r, 0, bits[l] - have < 48 ? bits[l] - have : 48);
    bits[l] = have;
  }
  store64(r.out, r.n ? r.acc >> (64 - r.n) : 0);
}

static void write_lanes(const table *t, const uint8_t *plane, int places, int groups, uint32_t bits[TPDE_LANES],
                        uint8_t *out, const upcoming *next) {
  CALL_SHAPED(put_lanes, t, plane, groups, bits, out, next);
}

/* One look-up that may be an escape, which takes 8 or 16 more bits, at any position. */
static uint32_t take_value(const table *t, const uint8_t *stream, uint32_t *pos) {
  uint64_t w = load64(stream + (*pos >> 3)) >> (*pos & 7);
  uint32_t e = t->decode[LOW_BITS(w, t->index_bits)], v = (uint32_t)(w >> ENTRY_BITS(e));
  *pos += ENTRY_BITS(e);
  if (!(e & ENTRY_ESCAPE)) return e >> 16;
  *pos += 8u * t->kind;
  if (t->kind == 2) return v & 0xffff;
  v &= 0xff;
  return (v << t->raw_bits | v >> (8 - t->raw_bits)) & 0xff;
}

static __attribute__((noinline)) void take_slowly(const table *t, const uint8_t *stream, uint32_t *pos, int step,
                                                  uint8_t *at) {
  for (int i = 0; i < step; i++, at += t->kind) {
    uint32_t v = take_value(t, stream, pos);
    if (t->kind == 2) store16(at, (uint16_t)v);
    else *at = (uint8_t)v;
  }
}

/* Positions are not checked against the stream's end here: it has LANE_SLACK bytes to run into. */
static inline void take_lanes(const table *t, const uint8_t *stream, uint32_t *pos, int groups, uint8_t *plane,
                              int kind, int places) {
  const uint32_t *const decode = t->decode; /* which stores to the plane cannot change */
  const uint32_t bits = t->index_bits;
  const int step = STEP(kind, places);
  for (int g = 0; g < groups; g++, plane += TPDE_LANES * places)
    for (int j = 0; j < places; j += step * kind) {
      uint8_t *at = plane + j;
      for (uint32_t *p = pos; p < pos + TPDE_LANES; p++, at += places) {
        uint32_t e[4], sum = 0;
        uint64_t w = load64(stream + (*p >> 3)) >> (*p & 7);
        for (int i = 0; i < step; i++) {
          sum += e[i] = decode[LOW_BITS(w, bits)];
          w >>= e[i] & 63;
        }
        if (__builtin_expect(sum & ANY_ESCAPE, 0)) {
          take_slowly(t, stream, p, step, at);
          continue;
        }
        *p += sum & 63;
        if (kind == 2) { /* each store's first half is overwritten by the next one: that saves shifts */
          for (int i = step - 1; i > 0; i--) store32(at + 2 * i - 2, e[i]);
          store16(at, (uint16_t)(e[0] >> 16));
        } else {
          for (int i = 0; i < step; i++) at[i] = (uint8_t)(e[i] >> 16);
        }
      }
    }
}

/* A step of each lane in turn: a processor works on several at once, as none waits for another. */
static int read_lanes(const table *t, const uint8_t *stream, const uint32_t start[TPDE_LANES + 1],
                      int places, int groups, uint8_t *plane) {
  uint32_t pos[TPDE_LANES];
  memcpy(pos, start, sizeof pos);
  CALL_SHAPED(take_lanes, t, stream, pos, groups, plane);
  for (int l = 0; l < TPDE_LANES; l++)
    if (pos[l] > start[l + 1]) return l + 1;
  return 0;
}

#include "deltas.inc.h"
