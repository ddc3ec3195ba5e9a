/* fuzz.h: what the fuzz targets share: taking values from the fuzzer's bytes, and making layouts, tables and
 * words of them that are valid often enough for the code behind the checks to be reached.
 *
 * Licence: Apache-2.0.
 */
#ifndef TPDE_FUZZ_H
#define TPDE_FUZZ_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "internal.h"

/* assert that stays in every build, and says which property broke. */
#define CHECK(ok)                                                            \
  do {                                                                       \
    if (!(ok)) {                                                             \
      fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #ok);       \
      abort();                                                               \
    }                                                                        \
  } while (0)

#define MAX_PATHS 4
#define MAX_OUTPUT (1u << 20) /* bytes of a tensor: enough for every kind of chunk, and fast */

/* ---- the fuzzer's bytes: zeros once they are used up ---- */

typedef struct input {
  const uint8_t *at;
  size_t left;
} input;

static inline uint64_t take(input *in, int bytes) {
  uint64_t v = 0;
  for (int i = 0; i < bytes && in->left; i++, in->at++, in->left--) v |= (uint64_t)*in->at << (8 * i);
  return v;
}

static inline void take_bytes(input *in, uint8_t *out, size_t n) {
  size_t have = n < in->left ? n : in->left;
  if (have) memcpy(out, in->at, have);
  memset(out + have, 0, n - have);
  in->at += have;
  in->left -= have;
}

/* malloc of exactly n bytes: ASan reports an access one byte past them. malloc(0) may be NULL, which the API
 * takes for a mistake of the caller. */
static inline void *exact(size_t n) {
  void *p = malloc(n ? n : 1);
  CHECK(p);
  return p;
}

/* A copy of n bytes that ends where a page without access starts. ASan does not see the loads of gathers and
 * masked vectors; the machine does. Valid until the next call. */
static inline uint8_t *guarded(const uint8_t *bytes, size_t n) {
  static uint8_t *end;
  const size_t room = 4u << 20;
  if (!end) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    uint8_t *p = mmap(NULL, room + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(p != MAP_FAILED && !mprotect(p + room, page, PROT_NONE));
    end = p + room;
  }
  CHECK(n <= room);
  memcpy(end - n, bytes, n);
  return end - n;
}

/* ---- SIMD paths ---- */

/* The names of all paths, "portable" last; returns how many. */
static inline int simd_paths(char names[MAX_PATHS][16]) {
  int n = 0;
  for (const char *p = tpde_simd_available(); *p; n++) {
    size_t length = strcspn(p, " ");
    CHECK(n < MAX_PATHS && length < 16);
    memcpy(names[n], p, length);
    names[n][length] = 0;
    p += length + (p[length] == ' ');
  }
  CHECK(n && !strcmp(names[n - 1], "portable"));
  return n;
}

/* ---- layouts ---- */

/* A valid layout without tables, of at most MAX_OUTPUT bytes and max_chunks chunks. */
static inline tpde_layout take_layout(input *in, uint64_t max_chunks) {
  tpde_layout l = {0};
  uint32_t a = (uint32_t)take(in, 1), b = (uint32_t)take(in, 1), large = b >= 248;
  l.word_bytes = (uint8_t)(1u << (a & 3));
  l.rotate = a >> 2 & 1;
  l.unit_log2 = (uint8_t)(4 + (a >> 3) % 9);
  l.chunk_words = 512u << (large ? b % 7 : b % 2);
  l.words = 1 + take(in, 3) % (large ? MAX_OUTPUT / l.word_bytes : 6 * l.chunk_words);
  if (l.words * l.word_bytes > MAX_OUTPUT) l.words = MAX_OUTPUT / l.word_bytes;
  l.segment_words = 1 + take(in, 2) % l.words;
  if (tpde_chunk_count(&l) > max_chunks) l.segment_words = l.words;
  return l;
}

/* ---- tables ---- */

/* Write a valid table, on request one that a writer takes too: with an escape. Returns its size,
 * at most 4 + 24 + 2 * 512. */
static inline uint32_t take_table(input *in, int writable, uint8_t *out) {
  uint32_t a = (uint32_t)take(in, 1), b = (uint32_t)take(in, 1), splits = (uint32_t)take(in, 1);
  uint32_t kind = 1 + (a & 1), raw_bits = kind == 1 && (a & 2) ? (a >> 2) % 8 : 0;
  uint32_t max_bits = 1 + b % (MAX_BITS - raw_bits), values = kind == 2 ? 65536 : 256u >> raw_bits;
  uint32_t counts[MAX_BITS + 1] = {0}, codes = 2, escape = 0, at = 0;
  counts[1] = 2;
  if (kind == 2) splits *= 2;
  for (uint32_t i = 0, l = 1; i < splits && codes < values; i++) { /* a leaf becomes two that are longer */
    l = a & 128 ? l % max_bits + 1 : 1 + (uint32_t)take(in, 1) % max_bits;
    for (uint32_t tries = 0; tries < max_bits && !counts[l]; tries++) l = l % max_bits + 1;
    if (l == max_bits || !counts[l]) continue;
    counts[l]--;
    counts[l + 1] += 2;
    codes++;
  }
  if (writable || a & 64 || codes > values) {
    escape = 1 + (uint32_t)take(in, 1) % max_bits;
    while (!counts[escape]) escape = escape % max_bits + 1;
    counts[escape]--;
    codes--;
  }
  out[at++] = (uint8_t)kind;
  out[at++] = (uint8_t)max_bits;
  out[at++] = (uint8_t)raw_bits;
  out[at++] = (uint8_t)escape;
  for (uint32_t l = 1; l <= max_bits; l++, at += 2) store16(out + at, (uint16_t)counts[l]);
  uint32_t first = (uint32_t)take(in, 2), step = (uint32_t)take(in, 2) | 1; /* odd: all values are distinct */
  for (uint32_t i = 0; i < codes; i++, at += kind) {
    uint32_t v = (first + i * step) & (values - 1);
    if (kind == 2) store16(out + at, (uint16_t)v);
    else out[at] = (uint8_t)v;
  }
  while (at % 4) out[at++] = 0;
  return at;
}

/* A section of up to 16 valid tables, in TPDE_MAX_TABLE_SECTION bytes; returns its size. */
static inline uint32_t take_section(input *in, tpde_layout *l, int writable, uint8_t *section) {
  uint32_t at = 0, tables = 1 + (uint32_t)take(in, 1) % 6;
  if (tables == 6) tables = TPDE_MAX_TABLES;
  for (uint32_t i = 0; i < tables; i++) at += take_table(in, writable, section + at);
  l->tables = (uint8_t)tables;
  while (at % 16) section[at++] = 0;
  return at;
}

/* Planes that use the tables of the section in any way. */
static inline void take_planes(input *in, tpde_layout *l) {
  for (int p = 0; l->tables && p < l->word_bytes; p++) {
    uint32_t x = (uint32_t)take(in, 1);
    l->first_table[p] = (uint8_t)(x % l->tables);
    l->table_count[p] = (uint8_t)((x >> 4) % (l->tables - l->first_table[p] + 1u));
  }
}

/* ---- words ---- */

static inline uint32_t random32(uint64_t *state) {
  *state = *state * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)(*state >> 33);
}

/* Words whose planes are constant, skewed, uniform, repeated bytes of the fuzzer, or other in each chunk: what
 * makes the planner take one table, several, or none. */
static inline uint8_t *take_words(input *in, const tpde_layout *l) {
  uint8_t *planes = exact(l->words * l->word_bytes), *words = exact(l->words * l->word_bytes);
  uint64_t state = take(in, 4);
  for (int p = 0; p < l->word_bytes; p++) {
    uint8_t *plane = planes + (size_t)p * l->words, base = (uint8_t)take(in, 1), pattern[16];
    uint32_t recipe = (uint32_t)take(in, 1), width = recipe >> 3 & 7, drift = recipe >> 6;
    if ((recipe & 7) == 1) take_bytes(in, pattern, sizeof pattern);
    for (uint64_t i = 0; i < l->words; i++) {
      uint32_t r = random32(&state), shift = (uint32_t)(i / l->chunk_words) * drift * 37;
      switch (recipe & 7) {
        case 0: plane[i] = (uint8_t)(base + shift); break;
        case 1: plane[i] = pattern[i % sizeof pattern]; break;
        case 2: plane[i] = (uint8_t)r; break;
        case 3: plane[i] = (uint8_t)(base + (r % 1021 == 0)); break; /* nearly constant */
        case 4: plane[i] = (uint8_t)(base + shift + (r & (r >> 8) & ((2u << width) - 1))); break;
        case 5: plane[i] = (uint8_t)(i ? (r % 8 ? plane[i - 1] : r >> 8) : base); break; /* runs */
        default: plane[i] = (uint8_t)(base + shift + (r >> 8) % (width + 1) + (r >> 16 & 1) * (r & 31)); break;
      }
    }
  }
  CHECK(!tpde_merge(l, planes, l->words, l->words, words));
  free(planes);
  return words;
}

/* ---- encoded tensors ---- */

typedef struct encoded {
  uint8_t *data, *index;
  uint64_t bytes, chunks;
  uint32_t max_chunk, max_stream;
} encoded;

/* Encode all words, from `offset` on. */
static inline encoded encode_all(const tpde_codec *codec, const tpde_layout *l, const uint8_t *words,
                                 uint64_t offset, int threads) {
  encoded e = {.chunks = tpde_chunk_count(l)};
  uint64_t bound = tpde_encode_bound(l, l->words, e.chunks);
  uint8_t *out = exact(bound);
  tpde_error error = {0};
  e.index = exact(e.chunks * TPDE_RECORD_BYTES);
  CHECK(!tpde_encode(codec, words, 0, e.chunks, offset, out, bound, &e.bytes, e.index, &e.max_chunk, &e.max_stream,
                     threads, &error));
  CHECK(e.bytes <= bound);
  e.data = exact(e.bytes);
  memcpy(e.data, out, e.bytes);
  free(out);
  return e;
}

static inline void encoded_free(encoded *e) {
  free(e->data);
  free(e->index);
}

#endif
