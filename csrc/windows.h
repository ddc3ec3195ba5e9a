/* windows.h: what the files of the window layout share (windows.md). */
#ifndef TPDE_WINDOWS_H
#define TPDE_WINDOWS_H

#include "internal.h"

#define STRIPE_ROWS 16u     /* windows.md 2.1 */
#define CHUNK_COLUMNS 256u
#define PAIR_COLUMNS 64u    /* of a pair of tiles */
#define BLOCK_COLUMNS 32u   /* of a tile; a block is a half of it: 8 x 32 words, in the order of their places */
#define BLOCK 256u
#define PLACES 4096u        /* of a full chunk */
#define PAIR_BYTES 1408u    /* windows.md 3.1 */
#define HEADER_BYTES 128u   /* windows.md 5.1 */
#define WINDOW_VERSION 1u
#define FLAG_ZERO 1u
#define SIDE_LIMIT (1ull << 27) /* windows.md 8 */
#define WORDS_LIMIT (1ull << 40)
#define ENTRIES_LIMIT (1ull << 32)
#define MAX_BASE 124u       /* windows.md 1.3 */
#define XORS 128u           /* windows.md 4.1: their values, and 0 */
#define ONES 0x0101010101010101ull

static const uint8_t WINDOW_MAGIC[8] = {0x89, 0x54, 0x50, 0x44, 0x57, 0x0D, 0x0A, 0x1A};

/* Pairs of tiles of a stripe's chunk. */
static inline uint32_t pairs_of(const tpde_window *w, uint64_t chunk) {
  const uint64_t left = (w->columns - chunk * CHUNK_COLUMNS + PAIR_COLUMNS - 1) / PAIR_COLUMNS;
  return left < 4 ? (uint32_t)left : 4;
}

/* Where a chunk's body starts in the blob. */
static inline uint64_t body_at(const tpde_window *w, uint64_t stripe, uint64_t chunk) {
  return w->bodies_at + stripe * w->stripe_bytes + chunk * 4 * PAIR_BYTES;
}

/* Where the body of a chunk of so many pairs has code word k of its first lane, four low bytes of it, and how far lanes
 * are apart (windows.md 3.4). */
static inline size_t code_at(uint32_t pairs, uint32_t k) { return pairs == 4 ? (k >> 2) * 512 + (k & 3) * 4 : k * 128; }
static inline size_t low_at(uint32_t pairs, uint32_t tile, uint32_t part) {
  return pairs == 4 ? 1536 + tile * 512 + part * 4 : pairs * 384 + (tile * 4 + part) * 128;
}
static inline size_t lane_step(uint32_t pairs) { return pairs == 4 ? 16 : 4; }

/* A row's window (windows.md 1.3). */
typedef struct row_window {
  uint8_t pairs[4];
  uint16_t less; /* what its words are coded less */
} row_window;

static inline row_window window_of(uint8_t record, uint32_t flags) {
  const uint8_t base = record >> 1;
  const uint16_t less = (uint16_t)((record & 1) << 7);
  if (flags & FLAG_ZERO) return (row_window){{0, base, (uint8_t)(base + 1), (uint8_t)(base + 2)}, less};
  return (row_window){{base, (uint8_t)(base + 1), (uint8_t)(base + 2), (uint8_t)(base + 3)}, less};
}

/* Words that a thread takes at a time, at least: some 40 us, as long as it takes to start. Of entries alone, 1.3 % of
 * the words, more. */
#ifndef WORK_WORDS
#define WORK_WORDS 32768u
#define CHECK_WORDS (1u << 21)
#endif

/* Do something for each of `count` stripes of so many columns; a thread takes `least` words at a time. What fails first,
 * of all that would, is done again to say what is wrong. */
typedef int (*on_stripe)(void *context, uint64_t stripe, tpde_error *error);
int tpde_each_stripe(on_stripe job, void *context, uint64_t count, uint64_t columns, uint64_t least, int threads,
                     tpde_error *error);

/* A blob whose sizes fit: its header is checked, nothing else. */
typedef struct opened_window {
  tpde_window w;
  const uint8_t *blob;
} opened_window;

typedef struct window_entries {
  const uint8_t *at;
  uint32_t count;
} window_entries;

/* The header alone (windows.md 5.1). */
int tpde_window_header(const uint8_t *p, uint64_t bytes, tpde_window *w, tpde_error *error);

/* Check the records of some rows, those of rows that are not there included. */
int tpde_window_records(const tpde_window *w, const uint8_t *records, uint64_t first, uint64_t end, tpde_error *error);

/* The entries of a chunk, checked (windows.md 4.4). */
int tpde_window_entries(const opened_window *o, uint64_t stripe, uint64_t chunk, window_entries *found,
                        tpde_error *error);

/* Which entries of a table say each XOR (windows.md 6.3): bits of their indices. */
void tpde_window_say(const uint8_t *values, uint16_t said[XORS]);

/* Write a blob's head, and zeros where it has padding; its head and starts (tpde_window_plan) are checked. */
int tpde_window_begin(const uint8_t *head, const uint64_t *starts, uint8_t *out, uint64_t out_bytes, tpde_window *w,
                      tpde_error *error);

/* Where a stripe's entries go. */
typedef struct entry_writer {
  uint8_t *at, *end;
} entry_writer;

static inline entry_writer entries_into(const tpde_window *w, const uint64_t *starts, uint8_t *out, uint64_t stripe) {
  uint8_t *section = out + w->entries_at;
  return (entry_writer){section + 2 * starts[stripe], section + 2 * starts[stripe + 1]};
}

/* Write a chunk's offset. */
static inline void start_chunk(const tpde_window *w, uint8_t *out, uint64_t number, const entry_writer *to) {
  store32(out + w->offsets_at + 4 * number, (uint32_t)((uint64_t)(to->at - (out + w->entries_at)) / 2));
}

/* Put an entry down; 0 if there is no room for it. */
static inline int put_entry(entry_writer *to, uint32_t entry) {
  if (to->at == to->end) return 0;
  store16(to->at, (uint16_t)entry);
  to->at += 2;
  return 1;
}

static inline int other_entries(tpde_error *error, uint64_t stripe) {
  return tpde_fail(error, TPDE_E_ARGUMENT, "not what the entries were counted in", UINT64_MAX, -1, stripe, 0);
}

#endif
