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

/* Table construction, shared by plan.c and table.c. */
int tpde_table_parse(const uint8_t *p, size_t bytes, table *t, const uint8_t **values, size_t *used,
                     uint64_t number, tpde_error *error);

static inline uint32_t load32(const uint8_t *p) { uint32_t v; memcpy(&v, p, 4); return v; }
static inline uint64_t load64(const uint8_t *p) { uint64_t v; memcpy(&v, p, 8); return v; }
static inline uint16_t load16(const uint8_t *p) { uint16_t v; memcpy(&v, p, 2); return v; }
static inline void store64(uint8_t *p, uint64_t v) { memcpy(p, &v, 8); }
static inline void store32(uint8_t *p, uint32_t v) { memcpy(p, &v, 4); }
static inline void store16(uint8_t *p, uint16_t v) { memcpy(p, &v, 2); }
static inline uint32_t align_up(uint32_t n, uint32_t a) { return (n + a - 1) & ~(a - 1); }

#endif
