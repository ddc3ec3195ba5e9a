/* fuzz_window.c: the window layout (docs/windows.md). Any matrix is encoded, decoded and cut, and the words must come
 * back, whatever the threads. Then some bytes are changed: what is still taken for a blob is decoded and cut within
 * exactly sized buffers, and its parts have its words.
 *
 * Licence: Apache-2.0.
 */
#include "fuzz.h"

typedef struct matrix {
  uint64_t rows, columns;
  uint8_t *words;
} matrix;

static uint64_t bytes_of(const matrix *m) { return 2 * m->rows * m->columns; }

/* Words as weights have them, of a few exponents, with zeros, or the fuzzer's own. */
static matrix take_matrix(input *in) {
  const uint32_t mode = (uint32_t)take(in, 1);
  matrix m = {.rows = 1 + take(in, 1) % (mode & 1 ? 100 : 20), .columns = 1 + take(in, 2) % (mode & 2 ? 700 : 70)};
  uint64_t state = take(in, 4), every = 1 + take(in, 1);
  const uint32_t base = (uint32_t)take(in, 1);
  m.words = exact(bytes_of(&m));
  for (uint64_t i = 0; i < m.rows * m.columns; i++) {
    const uint32_t r = random32(&state), fall = (uint32_t)__builtin_ctz(r >> 8 | 1u << 20) / (1 + (mode >> 2 & 3));
    uint32_t exponent = (base + (uint32_t)(i / m.columns) * (mode >> 4 & 1) - fall) & 255;
    if (r % every == 0) exponent = mode & 32 ? 0 : r >> 5 & 255;
    store16(m.words + 2 * i, (uint16_t)(exponent << 7 | (r & 0x807F)));
    if (mode & 64 && r % every == 1 % every) store16(m.words + 2 * i, 0);
  }
  if (mode & 128) take_bytes(in, m.words, in->left / 2 < bytes_of(&m) ? in->left / 2 : bytes_of(&m));
  return m;
}

static uint8_t *encode(const matrix *m, int threads, tpde_window *w) {
  tpde_error error = {0};
  CHECK(!tpde_window_sections(m->rows, m->columns, 0, w));
  uint8_t *head = exact(w->offsets_at);
  uint64_t *starts = exact(8 * (w->stripes + 1));
  CHECK(!tpde_window_plan(m->words, m->rows, m->columns, head, starts, threads, &error));
  CHECK(!tpde_window_sections(m->rows, m->columns, starts[w->stripes], w));
  uint8_t *blob = exact(w->bytes);
  CHECK(!tpde_window_encode(m->words, head, starts, blob, w->bytes, threads, &error));
  free(head);
  free(starts);
  return blob;
}

/* Decode all rows, or some of them. */
static uint8_t *decode(const uint8_t *blob, const tpde_window *w, uint64_t first, uint64_t rows, int threads) {
  tpde_error error = {0};
  const uint64_t bytes = 2 * rows * w->columns;
  uint8_t *out = exact(bytes);
  CHECK(!tpde_window_decode(blob, w->bytes, first, rows, out, bytes, threads, &error));
  return out;
}

/* Cut a part that the fuzzer chooses, and compare it with the same part of all words. */
static void cut(input *in, const uint8_t *blob, const tpde_window *w, const uint8_t *words, int threads) {
  tpde_error error = {0};
  tpde_window part, checked;
  const uint64_t first_row = take(in, 1) % w->stripes * 16, first_column = take(in, 1) % ((w->columns + 63) / 64) * 64;
  uint64_t rows = 16 * (1 + take(in, 1) % 8), columns = 64 * (1 + take(in, 1) % 12);
  if (rows > w->rows - first_row) rows = w->rows - first_row;
  if (columns > w->columns - first_column) columns = w->columns - first_column;
  CHECK(!tpde_window_sections(rows, columns, 0, &part));
  uint8_t *head = exact(part.offsets_at);
  uint64_t *starts = exact(8 * (part.stripes + 1));
  CHECK(!tpde_window_cut_plan(blob, w->bytes, first_row, rows, first_column, columns, head, starts, threads, &error));
  CHECK(!tpde_window_sections(rows, columns, starts[part.stripes], &part));
  uint8_t *made = exact(part.bytes);
  CHECK(!tpde_window_cut(blob, w->bytes, first_row, first_column, head, starts, made, part.bytes, threads, &error));
  CHECK(!tpde_window_check(made, part.bytes, &checked, 1, &error));
  uint8_t *out = decode(made, &checked, 0, rows, 1);
  for (uint64_t r = 0; r < rows; r++)
    CHECK(!memcmp(out + 2 * r * columns, words + 2 * ((first_row + r) * w->columns + first_column), 2 * columns));
  free(head);
  free(starts);
  free(made);
  free(out);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
  input in = {bytes, size};
  tpde_error error = {0};
  tpde_window w, again, checked;
  const uint32_t mode = (uint32_t)take(&in, 1);
  const int threads = 1 + (int)(mode & 3);
  matrix m = take_matrix(&in);
  uint8_t *blob = encode(&m, 1, &w), *other = encode(&m, threads, &again);
  CHECK(w.bytes == again.bytes && !memcmp(blob, other, w.bytes));
  free(other);
  CHECK(!tpde_window_check(blob, w.bytes, &checked, threads, &error));
  CHECK(checked.rows == m.rows && checked.columns == m.columns && checked.entries == w.entries);
  uint8_t *out = decode(blob, &checked, 0, m.rows, threads);
  CHECK(!memcmp(out, m.words, bytes_of(&m)));
  free(out);
  const uint64_t first = take(&in, 1) % m.rows, rows = take(&in, 1) % (m.rows - first + 1);
  out = decode(blob, &checked, first, rows, threads);
  CHECK(!memcmp(out, m.words + 2 * first * m.columns, 2 * rows * m.columns));
  free(out);
  cut(&in, blob, &checked, m.words, threads);
  for (uint32_t i = take(&in, 1) % 8; i; i--) { /* anywhere, or before the bodies */
    const uint64_t end = take(&in, 1) & 1 ? w.bytes : w.bodies_at;
    blob[take(&in, 4) % end] ^= (uint8_t)take(&in, 1);
  }
  uint64_t left = w.bytes;
  if (mode & 4) left = take(&in, 4) % (w.bytes + 1);
  uint8_t *damaged = exact(left);
  memcpy(damaged, blob, left);
  const int code = tpde_window_check(damaged, left, &checked, 1, &error);
  CHECK(tpde_window_check(damaged, left, &again, threads, &error) == code);
  CHECK(left == w.bytes || code);
  if (!code) {
    out = decode(damaged, &checked, 0, checked.rows, 1);
    other = decode(damaged, &checked, 0, checked.rows, threads);
    CHECK(!memcmp(out, other, 2 * checked.rows * checked.columns));
    cut(&in, damaged, &checked, out, threads);
    free(out);
    free(other);
  } else if (left == w.bytes) { /* it may be refused, and is not read or written beyond its ends */
    const uint64_t room = 2 * m.rows * m.columns;
    out = exact(room);
    tpde_window_decode(damaged, left, 0, m.rows, out, room, threads, &error);
    free(out);
    uint8_t *head = exact(w.offsets_at);
    uint64_t *starts = exact(8 * (w.stripes + 1));
    if (!tpde_window_cut_plan(damaged, left, 0, m.rows, 0, m.columns, head, starts, threads, &error)) {
      CHECK(!tpde_window_sections(m.rows, m.columns, starts[w.stripes], &again));
      uint8_t *made = exact(again.bytes);
      CHECK(!tpde_window_cut(damaged, left, 0, 0, head, starts, made, again.bytes, threads, &error));
      free(made);
    }
    free(head);
    free(starts);
  }
  free(damaged);
  free(blob);
  free(m.words);
  return 0;
}
