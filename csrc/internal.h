/* internal.h: what the core's files share. */
#ifndef TPDE_INTERNAL_H
#define TPDE_INTERNAL_H

#include <string.h>

#include "tpde.h"

_Static_assert(sizeof(size_t) == 8, "sizes have 64 bits");
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the core needs a little-endian machine"
#endif

#define MAX_BITS 12         /* format.md 3 */
#define MAX_CHUNK_WORDS 65536u /* format.md 4.1 */
#define MAX_PREFIX_CHUNK_WORDS 32768u
#define LANE_HEADER 36u     /* format.md 5.2: shortest, shift, zero, excess[32] */
#define MAX_SHIFT 8
/* How far beyond the stream a damaged lane of `symbols` may read: 20 bits for each (a pair has at most 28), and
 * one load. */
#define LANE_SLACK(symbols) (3u * (symbols) + 8u)
/* Of a table's values, by its kind: bytes, and bits after an escape, those that are raw included. */
#define VALUE_BYTES(kind) ((kind) == 1 ? 1 : 2)
#define VALUE_BITS(kind) ((kind) == 1 ? 8 : (kind) == 2 ? 16 : 14)
#define KIND_TOKENS 3       /* delta.md 2.2 */
#define DELTA_CHUNK_WORDS 65536u /* delta.md 3.1 */
#define DELTA_BLOCKS (DELTA_CHUNK_WORDS / 64)
#define TOKENS 16384u       /* delta.md 1.3 */
#define GOLDEN64 0x9E3779B97F4A7C15ull /* delta.md 4 */
#define MODE_RAW 0u         /* format.md 4.3 */
#define MODE_FILL 1u
#define MODE_CODED 2u

/* Entries of expanded tables. The loops look up four at a time, and add them up to have the bits that the
 * four take and whether there is an escape among them, so both have room for such a sum:
 *   decoding: bits | escape << 8 | first symbol << 16 | second << 24
 *   encoding: bits | escape << 8 | the codeword's bits from bit 31 down, the last one topmost
 * With kind 1 the codeword and `bits` include the raw bits. In decoding, the `bits` of an escape are those of
 * its codeword, and the table's index has max_bits + raw_bits bits. In encoding, they include what follows
 * the codeword, and the codeword is left out. */
#define ENTRY_BITS(e) ((e) & 31u)
#define ENTRY_ESCAPE 0x100u
#define ANY_ESCAPE 0x700u   /* of a sum of four entries */
#define TABLES_AT_ONCE 4

typedef struct table {
  uint8_t kind, max_bits, raw_bits, escape_bits;
  uint8_t index_bits;
  uint32_t *decode; /* 1 << index_bits entries */
  uint32_t *encode; /* 256 or 65536 entries, or NULL */
  /* Where that is there: the bits that a value takes, escapes included, in byte `counted` of as many entries. Up to four
   * tables of a kind that follow each other share them, so that one pass over a plane counts for all. */
  uint32_t *lengths;
  uint8_t counted;
  uint16_t escape;  /* its codeword, as it is written */
  uint16_t pad;     /* what fills a lane beyond the chunk: a byte, or a pair (format.md 5.1) */
} table;

struct tpde_codec {
  tpde_layout layout;
  table tables[TPDE_MAX_TABLES];
};

/* Words of 16 bits, rotated, whose lower plane is raw: what is read of the upper one becomes words at once. Memory is
 * read and written while the lanes compute, and asked for ahead. */
typedef struct halves {
  const uint8_t *low;
  uint8_t *words;
  const uint8_t *ahead; /* what is read next, as many bytes */
  size_t ahead_bytes;
  uint32_t checksum; /* of the words: the result */
} halves;

/* What is read and written next, as many bytes, or NULL: asked for while lanes are written. By itself a processor asks
 * for lines of one page, as they are read; with this one thread of a Xeon of 2023 encodes bf16 by a quarter faster. */
typedef struct upcoming {
  const uint8_t *read, *write;
  size_t bytes;
} upcoming;

#define MOST_BYTES 13 /* of a change: 12 bits, 14 after an escape, 14 of the gap, 62 of the size, one of the kind */

/* Classes of symbols: each begins at its first one and ends before the next class (delta.md 2). */
typedef struct classes {
  int count;
  uint8_t first[TPDE_MAX_CLASSES];
} classes;

struct tpde_delta_model {
  int word_bytes, rotate, folded;
  classes classes;
  table tables[TPDE_MAX_CLASSES];
};

/* A chunk of up to DELTA_CHUNK_WORDS words, and what changed in it. */
typedef struct altered {
  const uint8_t *symbols; /* of the base, to a multiple of 64, or anything if there is one class */
  uint32_t words, count;
  const uint64_t *changed; /* `count` words, 64 a number */
} altered;

/* What is told of a change: the class and the length of its gap, and where it is. */
typedef void (*take_change)(void *context, int class, uint32_t gap, uint32_t position);

/* Where changes are written to. */
typedef struct writer {
  const tpde_delta_model *model;
  const uint8_t *base, *target;
  uint8_t *at, *end; /* MOST_BYTES + 16 are left beyond the end */
  uint64_t held;     /* bits that are not written, fewer than 8 after each change */
  uint32_t bits;
  int full;
  uint64_t first, check; /* words of the tensor before the chunk; of its changes under a model of one class */
} writer;

/* Changes as they are read: where the words are in the tensor, what they become, and the check (delta.md 4). */
typedef struct listing {
  uint64_t first; /* words of the tensor before the chunk */
  uint64_t *positions;
  uint8_t *targets;
  uint64_t check;
} listing;

/* The paths that differ by instruction set; every function gives the same results in all of them. */
typedef struct kernels {
  const char *name;
  void (*split)(int word_bytes, int rotate, const uint8_t *words, size_t n, uint8_t *const planes[]);
  void (*merge)(int word_bytes, int rotate, uint8_t *const planes[], size_t n, uint8_t *words);
  uint32_t (*checksum)(const uint8_t *words, size_t bytes);
  /* A plane has groups * 32 * places bytes (format.md 5.1). Bits that each lane takes under the tables that share
   * their `lengths` with this one: */
  void (*lane_bits)(const table *t, const uint8_t *plane, int places, int groups,
                    uint32_t bits[TABLES_AT_ONCE][TPDE_LANES]);
  /* Write all lanes from out on, lane l padded with zeros to bits[l], which becomes what it has if that is more;
   * writes zeros to the end of the last byte, and 7 or 8 bytes beyond. */
  void (*write_lanes)(const table *t, const uint8_t *plane, int places, int groups, uint32_t bits[TPDE_LANES],
                      uint8_t *out, const upcoming *next);
  /* Read all lanes; lane l has the bits start[l] to start[l + 1] of the stream, which has LANE_SLACK
   * readable bytes after the last. Returns 0, or 1 + the first lane whose codewords end after its bits. */
  int (*read_lanes)(const table *t, const uint8_t *stream, const uint32_t start[TPDE_LANES + 1],
                    int places, int groups, uint8_t *plane);
  /* As read_lanes, for whole groups: NULL where merging afterwards is as fast. */
  int (*read_halves)(const table *t, const uint8_t *stream, const uint32_t start[TPDE_LANES + 1], int groups,
                     halves *to);
  /* As memcpy, where nobody reads the copy soon. */
  void (*copy_out)(uint8_t *to, const uint8_t *from, size_t bytes);
  /* The symbols of n words (delta.md 2.3). */
  void (*symbols)(int word_bytes, int rotate, const uint8_t *words, size_t n, uint8_t *out);
  /* Which of n words differ, 64 a number; returns how many. */
  uint32_t (*changed)(int word_bytes, const uint8_t *a, const uint8_t *b, size_t n, uint64_t *masks);
  /* Add the terms of n values to a fingerprint (delta.md 4); the first has the number `first`. */
  void (*add_terms)(const uint8_t *data, size_t n, uint64_t first, uint64_t sum[2]);
  /* Tell, or write, the changes of a chunk in the order of their places (delta.md 3.2). */
  void (*tell_changes)(const classes *c, const altered *chunk, take_change take, void *context);
  void (*write_changes)(struct writer *w, const altered *chunk);
  /* Read the changes of a chunk of n words from the bits at `at`, and unless `check` is nonzero, make them. Bytes up to
   * `limit` may be read. Returns whether they end in the last of the bits. `symbols` is room for those of a chunk. */
  int (*apply_changes)(const tpde_delta_model *m, const uint8_t *at, uint64_t bits, const uint8_t *limit, uint8_t *words,
                       uint32_t n, uint32_t changes, int check, uint8_t *symbols);
  /* Read them likewise under a model of one class, and list them. */
  int (*list_changes)(const tpde_delta_model *m, const uint8_t *at, uint64_t bits, const uint8_t *limit,
                      const uint8_t *words, uint32_t n, uint32_t changes, listing *list);
} kernels;

extern const kernels tpde_kernels_portable;
#if defined(TPDE_HAVE_AVX2)
extern const kernels tpde_kernels_avx2;
#endif
#if defined(TPDE_HAVE_AVX512)
extern const kernels tpde_kernels_avx512;
#endif
const kernels *tpde_active(void);

int tpde_fail(tpde_error *error, int code, const char *what, uint64_t chunk, int plane, uint64_t found,
              uint64_t needed);

/* The words of chunk i, and where it starts among the tensor's words. */
uint32_t tpde_chunk_words(const tpde_layout *layout, uint64_t i, uint64_t *start);
int tpde_layout_valid(const tpde_layout *layout);

/* Run job(context, thread) for thread 0 to threads - 1, the last on the calling thread. Runs all of them
 * on the calling thread where threads cannot be had. */
void tpde_parallel(int threads, void (*job)(void *context, int thread), void *context);

#define WRITER_BITS 11    /* 2 pair tables, or 4 of single symbols, take the 16 KiB of one of 12 bits */
#define MAX_VALUES 512    /* codewords that a table may have; more never paid on weights */

typedef struct counted_value {
  uint32_t count;
  uint16_t value;
} counted_value;

/* A code under construction: values by falling count, with the lengths of their codewords. */
typedef struct prefix_code {
  int kind, raw_bits, escape_bits, n;
  uint16_t values[MAX_VALUES];
  uint8_t bits[MAX_VALUES];
} prefix_code;

/* The best code of values, which are sorted by falling count, over how many get a codeword of their own: it weighs a
 * table's bytes against what it saves, with `scale` the size of the tensor over that of the sample. Returns the bits that
 * all values take, without the table. */
uint64_t tpde_code_build(prefix_code *c, counted_value *found, int distinct, uint64_t total, int kind, int raw_bits, uint64_t scale);
uint32_t tpde_code_bytes(const prefix_code *c);
uint32_t tpde_code_write(const prefix_code *c, uint8_t *out);

/* Check the first table of some bytes, and expand it, for decoding and with `encode` for encoding too. `used` becomes the
 * bytes it takes. */
int tpde_table_open(const uint8_t *p, size_t bytes, int encode, table *t, size_t *used, uint64_t number,
                    tpde_error *error);


/* A change of a word (delta.md 1.1). */
typedef struct word_step {
  uint32_t kind;
  uint64_t size;
} word_step;

static inline uint32_t load32(const uint8_t *p) { uint32_t v; memcpy(&v, p, 4); return v; }
static inline uint64_t load64(const uint8_t *p) { uint64_t v; memcpy(&v, p, 8); return v; }
static inline uint16_t load16(const uint8_t *p) { uint16_t v; memcpy(&v, p, 2); return v; }
static inline void store64(uint8_t *p, uint64_t v) { memcpy(p, &v, 8); }
static inline void store32(uint8_t *p, uint32_t v) { memcpy(p, &v, 4); }
static inline void store16(uint8_t *p, uint16_t v) { memcpy(p, &v, 2); }
static inline uint64_t low_bits(uint64_t x, uint32_t bits) { return x & ((1ull << bits) - 1); }
static inline uint64_t load_word(const uint8_t *p, int bytes) {
  return bytes == 2 ? load16(p) : bytes == 4 ? load32(p) : bytes == 1 ? *p : load64(p);
}
static inline void store_word(uint8_t *p, uint64_t v, int bytes) {
  if (bytes == 2) store16(p, (uint16_t)v);
  else if (bytes == 4) store32(p, (uint32_t)v);
  else if (bytes == 1) *p = (uint8_t)v;
  else store64(p, v);
}

/* The step between two different words of `bytes` bytes. */
static inline word_step step_between(uint64_t base, uint64_t target, int bytes, int rotate) {
  const uint64_t sign = 1ull << (8 * bytes - 1);
  int64_t d;
  if (rotate) {
    d = (int64_t)((target & (sign - 1)) - (base & (sign - 1)));
    if ((base ^ target) & sign) return d >= 0 ? (word_step){2, (uint64_t)d} : (word_step){3, ~(uint64_t)d};
  } else {
    d = (int64_t)((target - base) << (64 - 8 * bytes)) >> (64 - 8 * bytes);
  }
  return d > 0 ? (word_step){0, (uint64_t)d - 1} : (word_step){1, ~(uint64_t)d};
}

static inline uint64_t take_step(uint64_t base, word_step s, int bytes, int rotate) {
  const uint64_t sign = 1ull << (8 * bytes - 1), low = sign - 1;
  uint64_t d = (s.kind & 1 ? ~s.size : s.size) + !s.kind;
  if (!rotate) return (base + d) & (sign | low);
  return ((base ^ (s.kind >= 2 ? sign : 0)) & sign) | ((base + d) & low);
}

static inline uint32_t bucket_of(uint64_t x) { /* delta.md 1.2 */
  if (x < 2) return (uint32_t)x;
  int k = 63 - __builtin_clzll(x);
  return (uint32_t)(2 * k) + (uint32_t)(x >> (k - 1) & 1);
}
static inline uint32_t extra_bits(uint32_t bucket) { return bucket < 4 ? 0 : bucket / 2 - 1; }
/* The first number of a bucket. */
static inline uint64_t bucket_start(uint32_t bucket) {
  return bucket < 2 ? bucket : (2ull + (bucket & 1)) << (bucket / 2 - 1);
}
static inline uint32_t token_of(uint32_t gap, word_step s) { return bucket_of(gap) << 9 | s.kind << 7 | bucket_of(s.size); }

static inline uint32_t align_up(uint32_t n, uint32_t a) { return (n + a - 1) & ~(a - 1); }

#endif
