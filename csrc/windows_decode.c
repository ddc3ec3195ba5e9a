/* windows_decode.c: rows out of the window layout (windows.md). */
#include "windows.h"

typedef struct decoding {
  opened_window o;
  uint64_t first_row, rows; /* that are wanted */
  uint8_t *out;
} decoding;

/* Eight nibbles as bytes, of each the lowest three bits. */
static inline uint64_t spread(uint32_t codes) {
  uint64_t x = codes;
  x = (x | x << 16) & 0x0000FFFF0000FFFFull;
  x = (x | x << 8) & 0x00FF00FF00FF00FFull;
  return (x | x << 4) & 0x0707070707070707ull;
}

/* The high bytes that eight codes stand for. Of a window with pair 0, codes 1 to 3 are base to base + 2: no byte of the
 * product borrows from its neighbour, as each is at least 0 in the sum. */
static inline uint64_t look_up(uint32_t codes, uint32_t base, uint32_t zero) {
  const uint64_t x = spread(codes), number = x & 3 * ONES, sign = (x & 4 * ONES) << 5;
  const uint64_t counts = zero ? (number | number >> 1) & ONES : ONES;
  return (counts * ((uint64_t)base - zero) + number) | sign;
}

/* Decode a block of a chunk; rows go `stride` words apart. */
static void decode_block(const uint8_t *body, uint32_t pairs, uint32_t block, const uint8_t *records, uint32_t zero,
                         const uint8_t *xors, uint8_t *restrict out, uint64_t stride) {
  const uint32_t pair = block >> 2, k = block & 3, tile = block >> 1, half = block & 1;
  const size_t step = lane_step(pairs);
  const uint8_t *first = body + low_at(pairs, tile, 2 * half), *second = body + low_at(pairs, tile, 2 * half + 1);
  const uint8_t *code[3];
  for (uint32_t i = 0; i < 3; i++) code[i] = body + code_at(pairs, 3 * pair + i);
  for (uint32_t g = 0; g < 8; g++) {
    const uint8_t record = records[8 * half + g];
    const uint16_t more = (uint16_t)((record & 1) << 7);
    uint8_t high[BLOCK_COLUMNS], low[BLOCK_COLUMNS], *to = out + 2 * stride * g;
    for (uint32_t q = 0; q < 4; q++) {
      const size_t lane = 4 * g + q, at = lane * step;
      uint32_t codes;
      if (k < 3) codes = load32(code[k] + at);
      else codes = (load32(code[0] + at) >> 3 & 0x11111111u) | (load32(code[1] + at) >> 2 & 0x22222222u) |
                   (load32(code[2] + at) >> 1 & 0x44444444u);
      store64(high + 8 * q, look_up(codes, record >> 1, zero) ^ load64(xors + block * BLOCK + 8 * lane));
      memcpy(low + 8 * q, first + at, 4);
      memcpy(low + 8 * q + 4, second + at, 4);
    }
    for (uint32_t i = 0; i < BLOCK_COLUMNS; i++) store16(to + 2 * i, (uint16_t)((high[i] << 8 | low[i]) + more));
  }
}

/* Copy what is wanted of a decoded block. */
static void copy_block(const decoding *d, uint64_t row, uint64_t column, const uint8_t *words) {
  const uint64_t columns = d->o.w.columns;
  if (column >= columns) return;
  const size_t width = columns - column < BLOCK_COLUMNS ? (size_t)(columns - column) : BLOCK_COLUMNS;
  for (uint64_t g = 0; g < 8; g++)
    if (row + g >= d->first_row && row + g < d->first_row + d->rows)
      memcpy(d->out + 2 * ((row + g - d->first_row) * columns + column), words + 2 * BLOCK_COLUMNS * g, 2 * width);
}

static int decode_stripe(void *context, uint64_t number, tpde_error *error) {
  const decoding *d = context;
  const tpde_window *w = &d->o.w;
  const uint64_t stripe = d->first_row / STRIPE_ROWS + number;
  const uint8_t *records = d->o.blob + w->records_at + stripe * STRIPE_ROWS;
  uint8_t xors[PLACES] = {0}, some[2 * BLOCK];
  int code = tpde_window_records(w, d->o.blob + w->records_at, stripe * STRIPE_ROWS, (stripe + 1) * STRIPE_ROWS, error);
  for (uint64_t chunk = 0; chunk < w->stripe_chunks && !code; chunk++) {
    const uint32_t pairs = pairs_of(w, chunk);
    const uint8_t *body = d->o.blob + body_at(w, stripe, chunk);
    window_entries found;
    code = tpde_window_entries(&d->o, stripe, chunk, &found, error);
    if (code) break;
    for (uint32_t i = 0; i < found.count; i++) {
      const uint32_t entry = load16(found.at + 2 * (size_t)i);
      xors[entry & (PLACES - 1)] ^= w->table[entry >> 12];
    }
    for (uint32_t block = 0; block < 4 * pairs; block++) {
      const uint64_t row = stripe * STRIPE_ROWS + 8 * (block & 1),
                     column = chunk * CHUNK_COLUMNS + (block >> 1) * BLOCK_COLUMNS;
      if (row >= d->first_row && row + 8 <= d->first_row + d->rows && column + BLOCK_COLUMNS <= w->columns) {
        uint8_t *to = d->out + 2 * ((row - d->first_row) * w->columns + column);
        decode_block(body, pairs, block, records, w->flags & FLAG_ZERO, xors, to, w->columns);
      } else {
        decode_block(body, pairs, block, records, w->flags & FLAG_ZERO, xors, some, BLOCK_COLUMNS);
        copy_block(d, row, column, some);
      }
    }
    for (uint32_t i = 0; i < found.count; i++) xors[load16(found.at + 2 * (size_t)i) & (PLACES - 1)] = 0;
  }
  return code;
}

int tpde_window_decode(const uint8_t *blob, uint64_t bytes, uint64_t first_row, uint64_t rows, void *out,
                       uint64_t out_bytes, int threads, tpde_error *error) {
  decoding d = {.o = {.blob = blob}, .first_row = first_row, .rows = rows, .out = out};
  if (threads < 1 || (rows && !out))
    return tpde_fail(error, TPDE_E_ARGUMENT, "a null pointer or no thread", UINT64_MAX, -1, 0, 0);
  const int code = tpde_window_open(blob, bytes, &d.o.w, error);
  if (code) return code;
  if (first_row > d.o.w.rows || rows > d.o.w.rows - first_row)
    return tpde_fail(error, TPDE_E_ARGUMENT, "no such rows", UINT64_MAX, -1, first_row, d.o.w.rows);
  if (out_bytes != 2 * rows * d.o.w.columns)
    return tpde_fail(error, TPDE_E_ARGUMENT, "the output's size does not fit the rows", UINT64_MAX, -1, out_bytes,
                     2 * rows * d.o.w.columns);
  if (!rows) return TPDE_OK;
  const uint64_t stripes = (first_row + rows - 1) / STRIPE_ROWS - first_row / STRIPE_ROWS + 1;
  return tpde_each_stripe(decode_stripe, &d, stripes, d.o.w.columns, WORK_WORDS, threads, error);
}
