/* windows_encode.c: a matrix into the window layout (windows.md 1 to 4), its windows being chosen. */
#include "windows.h"

#define ESCAPE 8u /* beside a code of three bits: the word is none of the window */

/* ---- what a blob begins with ---- */

/* Head and starts (tpde_window_plan), checked, and written into a blob without entries and bodies. */
int tpde_window_begin(const uint8_t *head, const uint64_t *starts, uint8_t *out, uint64_t out_bytes, tpde_window *w,
                      tpde_error *error) {
  int code = tpde_window_header(head, HEADER_BYTES, w, error);
  if (!code) code = tpde_window_records(w, head + w->records_at, 0, w->stripes * STRIPE_ROWS, error);
  if (code) return code;
  if (out_bytes != w->bytes)
    return tpde_fail(error, TPDE_E_ARGUMENT, "the output's size is not the blob's", UINT64_MAX, -1, out_bytes,
                     w->bytes);
  uint64_t last = 0;
  for (uint64_t s = 0; s <= w->stripes; last = starts[s++])
    if (s ? starts[s] < last || starts[s] > w->entries : starts[s] != 0)
      return tpde_fail(error, TPDE_E_ARGUMENT, "entries that do not start in order", UINT64_MAX, -1, starts[s], last);
  if (last != w->entries)
    return tpde_fail(error, TPDE_E_ARGUMENT, "starts of other entries", UINT64_MAX, -1, last, w->entries);
  const uint64_t chunks = w->stripes * w->stripe_chunks, offsets_end = w->offsets_at + 4 * (chunks + 1),
                 entries_end = w->entries_at + 2 * w->entries;
  memcpy(out, head, w->offsets_at);
  memset(out + offsets_end, 0, w->entries_at - offsets_end);
  memset(out + entries_end, 0, w->bodies_at - entries_end);
  store32(out + offsets_end - 4, (uint32_t)w->entries);
  return TPDE_OK;
}

/* ---- encoding ---- */

typedef struct encoding {
  tpde_window w;
  const uint8_t *words;
  const uint64_t *starts;
  uint8_t *out;
  uint16_t said[XORS];
} encoding;

/* What a thread needs for a stripe. */
typedef struct coder {
  const encoding *e;
  row_window rows[STRIPE_ROWS];
  uint8_t codes[STRIPE_ROWS][256]; /* of the high byte of a row's word, with ESCAPE */
  uint64_t first_row;
  uint32_t height; /* rows that are there */
  entry_writer to;
} coder;

static void open_rows(coder *c, uint64_t stripe) {
  const tpde_window *w = &c->e->w;
  const uint64_t left = w->rows - stripe * STRIPE_ROWS;
  c->first_row = stripe * STRIPE_ROWS;
  c->height = left < STRIPE_ROWS ? (uint32_t)left : STRIPE_ROWS;
  for (uint32_t r = 0; r < STRIPE_ROWS; r++) {
    c->rows[r] = window_of(c->e->out[w->records_at + c->first_row + r], w->flags);
    memset(c->codes[r], ESCAPE, 128);
    memset(c->codes[r] + 128, ESCAPE | 4, 128);
    for (uint32_t k = 4; k--;) {
      c->codes[r][c->rows[r].pairs[k]] = (uint8_t)k;
      c->codes[r][128 | c->rows[r].pairs[k]] = (uint8_t)(4 | k);
    }
  }
}

/* A word's entries (4.3). */
static int escape(coder *c, uint32_t place, uint32_t xor) {
  for (uint32_t set = c->e->said[xor]; set; set &= set - 1)
    if (!put_entry(&c->to, place | (uint32_t)__builtin_ctz(set) << 12)) return 0;
  return 1;
}

/* Eight codes, a byte each, as nibbles. */
static inline uint32_t together(uint64_t x) {
  x = (x | x >> 4) & 0x00FF00FF00FF00FFull;
  x = (x | x >> 8) & 0x0000FFFF0000FFFFull;
  return (uint32_t)(x | x >> 16);
}

/* Encode a block: 8 rows from `row` of the stripe, 32 columns, `words` its first, rows `stride` words apart. */
static int encode_block(coder *c, uint32_t row, uint32_t block, const uint8_t *restrict words, uint64_t stride,
                        uint32_t *restrict codes, uint8_t *restrict low) {
  const uint32_t zero = c->e->w.flags;
  for (uint32_t g = 0; g < 8; g++) {
    const row_window *window = &c->rows[row + g];
    const uint8_t *from = words + 2 * stride * g, *code_of = c->codes[row + g];
    const uint16_t less = window->less;
    const uint64_t below = (128u - window->pairs[0]) * ONES;
    uint8_t high[BLOCK_COLUMNS], *to = low + BLOCK_COLUMNS * g;
    for (uint32_t i = 0; i < BLOCK_COLUMNS; i++) {
      const uint16_t v = (uint16_t)(load16(from + 2 * i) - less);
      to[i] = (uint8_t)v;
      high[i] = (uint8_t)(v >> 8);
    }
    for (uint32_t q = 0; q < 4; q++) {
      const uint8_t *h = high + 8 * q;
      uint32_t eight = 0;
      /* Byte by byte 128 and the pair's number in the window, if it is in it. */
      const uint64_t signs = load64(h) & 0x80 * ONES, number = (load64(h) ^ signs) + below;
      if (!zero && !((number ^ 0x80 * ONES) & 0xFC * ONES)) {
        codes[4 * g + q] = together((number & 3 * ONES) | signs >> 5);
        continue;
      }
      for (uint32_t i = 0; i < 8; i++) eight |= (uint32_t)code_of[h[i]] << 4 * i;
      for (uint32_t escapes = eight & 0x88888888u; escapes; escapes &= escapes - 1) {
        const uint32_t i = (uint32_t)__builtin_ctz(escapes) / 4, place = block * BLOCK + BLOCK_COLUMNS * g + 8 * q + i;
        if (!escape(c, place, (h[i] & 127u) ^ window->pairs[0])) return 0;
      }
      codes[4 * g + q] = eight & 0x77777777u;
    }
  }
  return 1;
}

/* The words of a block of which some are not there: these become what code 0 and low byte 0 stand for (2.3). */
static void pad_block(const coder *c, uint32_t row, uint64_t column, uint8_t to[2 * BLOCK]) {
  const tpde_window *w = &c->e->w;
  const uint64_t left = column < w->columns ? w->columns - column : 0;
  const uint32_t width = left < BLOCK_COLUMNS ? (uint32_t)left : BLOCK_COLUMNS;
  for (uint32_t g = 0; g < 8; g++) {
    const row_window *window = &c->rows[row + g];
    uint8_t *out = to + 2 * BLOCK_COLUMNS * g;
    uint32_t i = 0;
    if (row + g < c->height && width) {
      memcpy(out, c->e->words + 2 * ((c->first_row + row + g) * w->columns + column), 2 * width);
      i = width;
    }
    for (; i < BLOCK_COLUMNS; i++) store16(out + 2 * i, (uint16_t)((window->pairs[0] << 8) + window->less));
  }
}

/* Encode a pair of tiles of a stripe's chunk: four blocks. */
static int encode_pair(coder *c, uint64_t chunk, uint32_t pairs, uint32_t pair, uint8_t *body) {
  const tpde_window *w = &c->e->w;
  const size_t step = lane_step(pairs);
  uint32_t codes[4][TPDE_LANES];
  for (uint32_t k = 0; k < 4; k++) {
    const uint32_t tile = 2 * pair + (k >> 1), half = k & 1, row = 8 * half;
    const uint64_t column = chunk * CHUNK_COLUMNS + tile * BLOCK_COLUMNS;
    uint8_t low[BLOCK], padded[2 * BLOCK];
    const uint8_t *words = padded;
    uint64_t stride = BLOCK_COLUMNS;
    if (row + 8 <= c->height && column + BLOCK_COLUMNS <= w->columns) {
      stride = w->columns;
      words = c->e->words + 2 * ((c->first_row + row) * stride + column);
    } else {
      pad_block(c, row, column, padded);
    }
    if (!encode_block(c, row, 4 * pair + k, words, stride, codes[k], low)) return 0;
    uint8_t *first = body + low_at(pairs, tile, 2 * half), *second = body + low_at(pairs, tile, 2 * half + 1);
    for (uint32_t lane = 0; lane < TPDE_LANES; lane++) {
      memcpy(first + lane * step, low + 8 * lane, 4);
      memcpy(second + lane * step, low + 8 * lane + 4, 4);
    }
  }
  for (uint32_t k = 0; k < 3; k++) { /* the fourth block's codes, a bit in each of the others' nibbles (3.2) */
    uint8_t *to = body + code_at(pairs, 3 * pair + k);
    for (uint32_t lane = 0; lane < TPDE_LANES; lane++)
      store32(to + lane * step, codes[k][lane] | (codes[3][lane] & 0x11111111u << k) << (3 - k));
  }
  return 1;
}

static int encode_stripe(void *context, uint64_t stripe, tpde_error *error) {
  encoding *e = context;
  coder c = {.e = e, .to = entries_into(&e->w, e->starts, e->out, stripe)};
  open_rows(&c, stripe);
  for (uint64_t chunk = 0; chunk < e->w.stripe_chunks; chunk++) {
    const uint32_t pairs = pairs_of(&e->w, chunk);
    uint8_t *body = e->out + body_at(&e->w, stripe, chunk);
    start_chunk(&e->w, e->out, stripe * e->w.stripe_chunks + chunk, &c.to);
    for (uint32_t pair = 0; pair < pairs; pair++)
      if (!encode_pair(&c, chunk, pairs, pair, body)) return other_entries(error, stripe);
  }
  return c.to.at == c.to.end ? TPDE_OK : other_entries(error, stripe);
}

int tpde_window_encode(const void *words, const uint8_t *head, const uint64_t *starts, uint8_t *out, uint64_t out_bytes,
                       int threads, tpde_error *error) {
  encoding e = {.words = words, .starts = starts, .out = out};
  if (!words || !head || !starts || !out || threads < 1)
    return tpde_fail(error, TPDE_E_ARGUMENT, "a null pointer or no thread", UINT64_MAX, -1, 0, 0);
  const int code = tpde_window_begin(head, starts, out, out_bytes, &e.w, error);
  if (code) return code;
  tpde_window_say(e.w.table, e.said);
  return tpde_each_stripe(encode_stripe, &e, e.w.stripes, e.w.columns, WORK_WORDS, threads, error);
}
