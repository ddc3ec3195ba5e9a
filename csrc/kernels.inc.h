/* kernels.inc.h: the inner loops in portable C. Each kernels_*.c includes this file once, is compiled for its
 * instruction set, and may put a hand-written loop in the place of one of these. */
#include "internal.h"

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

static inline uint32_t absorb(uint32_t h, uint32_t x) { return (((h << 5) | (h >> 27)) ^ x) * GOLDEN; }

static uint32_t checksum(const uint8_t *words, size_t bytes) {
  uint32_t h[128], sum = 0;
  size_t whole = bytes / 512, rest = bytes % 512, i;
  for (uint32_t a = 0; a < 128; a++) h[a] = (a + 1) * GOLDEN;
  for (size_t b = 0; b < 128; b += 32) {
    uint32_t k[32]; /* 32 accumulators at a time stay in registers */
    memcpy(k, h + b, sizeof k);
    for (i = 0; i < whole; i++)
      for (size_t a = 0; a < 32; a++) k[a] = absorb(k[a], load32(words + 512 * i + 4 * (b + a)));
    memcpy(h + b, k, sizeof k);
  }
  words += 512 * whole;
  for (i = 0; i + 4 <= rest; i += 4) h[i / 4] = absorb(h[i / 4], load32(words + i));
  if (i < rest) {
    uint8_t last[4] = {0};
    memcpy(last, words + i, rest - i);
    h[i / 4] = absorb(h[i / 4], load32(last));
  }
  for (i = 0; i < 128; i++) {
    uint32_t g = (h[i] ^ (h[i] >> 15)) * 0x85EBCA77u;
    sum += g ^ (g >> 13);
  }
  return sum;
}

/* ---- lanes, format.md 5 ---- */

static void lane_bits(const table *t, const uint8_t *plane, int places, int groups,
                      uint32_t bits[TPDE_LANES]) {
  const uint32_t *restrict enc = t->encode;
  for (int l = 0; l < TPDE_LANES; l++) {
    uint32_t sum = 0;
    for (int g = 0; g < groups; g++) {
      const uint8_t *s = plane + ((size_t)g * TPDE_LANES + l) * places;
      if (t->kind == 2)
        for (int j = 0; j < places; j += 2) sum += enc[load16(s + j)] >> CODE_SHIFT;
      else
        for (int j = 0; j < places; j++) sum += enc[s[j]] >> CODE_SHIFT;
    }
    bits[l] = sum;
  }
}

/* A run of bits being written: acc holds the last `n` bits that are not stored yet. */
#define PUT(entry)                                     \
  do {                                                 \
    uint32_t e_ = (entry);                             \
    acc |= (uint64_t)(e_ & CODE_MASK) << n;            \
    n += e_ >> CODE_SHIFT;                             \
  } while (0)
#define FLUSH()                                        \
  do {                                                 \
    store64(out, acc);                                 \
    out += n >> 3;                                     \
    acc >>= n & 56;                                    \
    n &= 7;                                            \
  } while (0)

static void write_lanes(const table *t, const uint8_t *plane, int places, int groups,
                        const uint32_t bits[TPDE_LANES], uint8_t *out) {
  const uint32_t *restrict enc = t->encode;
  uint64_t acc = 0;
  uint32_t n = 0;
  for (int l = 0; l < TPDE_LANES; l++) {
    uint64_t at = (uint64_t)(uintptr_t)out * 8 + n, end = at + bits[l];
    for (int g = 0; g < groups; g++) {
      const uint8_t *s = plane + ((size_t)g * TPDE_LANES + l) * places;
      if (t->kind == 2) {
        int j = 0;
        for (; j + 4 <= places; j += 4) { /* 7 + 2 * 27 bits fit */
          uint32_t four = load32(s + j);
          PUT(enc[four & 0xffff]);
          PUT(enc[four >> 16]);
          FLUSH();
        }
        for (; j < places; j += 2) {
          PUT(enc[load16(s + j)]);
          FLUSH();
        }
      } else {
        for (int j = 0; j < places; j += 2) { /* 7 + 2 * 20 bits fit */
          PUT(enc[s[j]]);
          PUT(enc[s[j + 1]]);
          FLUSH();
        }
      }
    }
    at = (uint64_t)(uintptr_t)out * 8 + n;
    while (at < end) { /* zeros up to the lane's rounded length */
      uint32_t z = end - at < 48 ? (uint32_t)(end - at) : 48;
      n += z;
      at += z;
      FLUSH();
    }
  }
  store64(out, acc);
}

/* One step of a lane: `count` symbols from the bits at pos. An escape takes 8 or 16 more bits. 64 bits hold
 * two steps of kind 2 (2 * 28 bits) or of kind 1 (2 * 20), whatever they are, after a shift of up to 7. */
static inline uint32_t look_up(const table *t, uint64_t w, uint32_t *taken) {
  uint32_t e = t->decode[w & ((1u << t->index_bits) - 1)], bits = ENTRY_BITS(e);
  if (__builtin_expect(e & ENTRY_ESCAPE, 0)) {
    uint32_t v = (uint32_t)(w >> bits);
    if (t->kind == 2) {
      *taken = bits + 16;
      return v & 0xffff;
    }
    *taken = bits + 8;
    v &= 0xff;
    return ((v << t->raw_bits) | (v >> (8 - t->raw_bits))) & 0xff;
  }
  *taken = bits;
  return e & 0xffff;
}

/* Two symbols of each of `lanes` lanes from `lane` on at place j of group g. */
static inline void step_pair(const table *t, const uint8_t *stream, uint32_t limit, uint32_t *pos, int kind,
                             uint8_t *at) {
  uint32_t byte = *pos >> 3, a, b;
  uint64_t w = load64(stream + (byte < limit ? byte : limit)) >> (*pos & 7);
  uint32_t x = look_up(t, w, &a);
  if (kind == 1) {
    x |= look_up(t, w >> a, &b) << 8;
    a += b;
  }
  *pos += a;
  store16(at, (uint16_t)x);
}

static inline void read_some(const table *t, const uint8_t *stream, uint32_t limit, uint32_t *pos, int lane,
                             int lanes, int places, int groups, int kind, uint8_t *plane) {
  for (int g = 0; g < groups; g++) {
    uint8_t *at = plane + ((size_t)g * TPDE_LANES + lane) * places;
    for (int j = 0; j < places; j += 2)
      for (int l = 0; l < lanes; l++) step_pair(t, stream, limit, pos + l, kind, at + l * places + j);
  }
}

static int lanes_end(const uint32_t pos[TPDE_LANES], const uint32_t start[TPDE_LANES + 1]) {
  for (int l = 0; l < TPDE_LANES; l++)
    if (pos[l] > start[l + 1]) return l + 1;
  return 0;
}

/* Four lanes at a time: their look-ups do not wait for one another. */
static int read_lanes(const table *t, const uint8_t *stream, const uint32_t start[TPDE_LANES + 1],
                      int places, int groups, uint8_t *plane) {
  uint32_t pos[TPDE_LANES], limit = (start[TPDE_LANES] + 7) / 8;
  memcpy(pos, start, sizeof pos);
  for (int l = 0; l < TPDE_LANES; l += 4) {
    if (t->kind == 2) read_some(t, stream, limit, pos + l, l, 4, places, groups, 2, plane);
    else read_some(t, stream, limit, pos + l, l, 4, places, groups, 1, plane);
  }
  return lanes_end(pos, start);
}
