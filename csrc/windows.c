/* windows.c: blobs in the window layout (windows.md): where everything is, whether it can be, and work on stripes of 16
 * rows, which are encoded, checked, decoded and cut independently of each other, each by one thread. */
#include <stdatomic.h>

#include "windows.h"

/* ---- where things are ---- */

static uint64_t aligned(uint64_t n) { return (n + 127) / 128 * 128; } /* windows.md 5.2 */

int tpde_window_sections(uint64_t rows, uint64_t columns, uint64_t entries, tpde_window *w) {
  if (!w || rows < 1 || columns < 1 || rows >= SIDE_LIMIT || columns >= SIDE_LIMIT || rows * columns >= WORDS_LIMIT ||
      entries >= ENTRIES_LIMIT)
    return TPDE_E_ARGUMENT;
  memset(w, 0, sizeof *w);
  w->rows = rows;
  w->columns = columns;
  w->entries = entries;
  w->stripes = (rows + STRIPE_ROWS - 1) / STRIPE_ROWS;
  w->stripe_chunks = (columns + CHUNK_COLUMNS - 1) / CHUNK_COLUMNS;
  w->stripe_bytes = (columns + PAIR_COLUMNS - 1) / PAIR_COLUMNS * PAIR_BYTES;
  w->records_at = HEADER_BYTES;
  w->offsets_at = w->records_at + aligned(w->stripes * STRIPE_ROWS);
  w->entries_at = w->offsets_at + aligned(4 * (w->stripes * w->stripe_chunks + 1));
  w->bodies_at = w->entries_at + aligned(2 * entries);
  w->bytes = w->bodies_at + w->stripes * w->stripe_bytes;
  return TPDE_OK;
}

/* ---- stripes on threads ---- */

typedef struct striped {
  on_stripe job;
  void *context;
  uint64_t count, run;
  _Atomic uint64_t next, failed; /* the lowest stripe that failed */
} striped;

static void run_stripes(void *context, int thread) {
  striped *s = context;
  (void)thread;
  for (uint64_t at; (at = atomic_fetch_add(&s->next, s->run)) < s->count && at < s->failed;) {
    const uint64_t end = s->count - at < s->run ? s->count : at + s->run;
    for (; at < end; at++) {
      if (!s->job(s->context, at, NULL)) continue;
      uint64_t lowest = s->failed;
      while (at < lowest && !atomic_compare_exchange_weak(&s->failed, &lowest, at)) {}
      return; /* the stripes below have all been taken */
    }
  }
}

int tpde_each_stripe(on_stripe job, void *context, uint64_t count, uint64_t columns, uint64_t least, int threads,
                     tpde_error *error) {
  striped s = {.job = job, .context = context, .count = count, .failed = UINT64_MAX};
  s.run = 1 + least / (STRIPE_ROWS * columns);
  const uint64_t runs = (count + s.run - 1) / s.run;
  if (threads > TPDE_MAX_THREADS) threads = TPDE_MAX_THREADS;
  if ((uint64_t)threads > runs) threads = (int)runs;
  if (threads <= 1) run_stripes(&s, 0);
  else tpde_parallel(threads, run_stripes, &s);
  return s.failed == UINT64_MAX ? TPDE_OK : job(context, s.failed, error);
}

/* ---- reading a blob ---- */

static int refuse(tpde_error *error, const char *what, uint64_t chunk, uint64_t found, uint64_t needed) {
  return tpde_fail(error, TPDE_E_WINDOW, what, chunk, -1, found, needed);
}

static int all_zero(const uint8_t *p, uint64_t n) {
  uint8_t any = 0;
  for (uint64_t i = 0; i < n; i++) any |= p[i];
  return !any;
}

/* The header (5.1), which may be all there is. */
int tpde_window_header(const uint8_t *p, uint64_t bytes, tpde_window *w, tpde_error *error) {
  if (!w || (bytes && !p)) return tpde_fail(error, TPDE_E_ARGUMENT, "a null pointer", UINT64_MAX, -1, 0, 0);
  if (bytes && memcmp(p, WINDOW_MAGIC, bytes < 8 ? bytes : 8))
    return refuse(error, "no magic of windows", UINT64_MAX, 0, 0);
  if (bytes >= 10 && load16(p + 8) != WINDOW_VERSION)
    return tpde_fail(error, TPDE_E_VERSION, "windows of another version", UINT64_MAX, -1, load16(p + 8),
                     WINDOW_VERSION);
  if (bytes < HEADER_BYTES)
    return tpde_fail(error, TPDE_E_TRUNCATED, "it ends inside its header", UINT64_MAX, -1, bytes, HEADER_BYTES);
  const uint32_t flags = load16(p + 10);
  if (flags > FLAG_ZERO) return refuse(error, "flags that are not known", UINT64_MAX, flags, FLAG_ZERO);
  if (tpde_window_sections(load64(p + 16), load64(p + 24), load64(p + 32), w))
    return refuse(error, "rows, columns or entries out of range", UINT64_MAX, load64(p + 16), SIDE_LIMIT);
  w->flags = flags;
  memcpy(w->table, p + 48, sizeof w->table);
  if (!all_zero(p + 12, 4) || !all_zero(p + 40, 8) || !all_zero(p + 64, HEADER_BYTES - 64))
    return refuse(error, "reserved bytes are not zero", UINT64_MAX, 1, 0);
  uint32_t units = 0;
  for (uint32_t i = 0; i < TPDE_WINDOW_TABLE; i++) {
    const uint32_t x = w->table[i];
    if (x >= XORS || x <= (i ? w->table[i - 1] : 0u))
      return refuse(error, "its table does not ascend from 1 to 127", UINT64_MAX, x, XORS - 1);
    if (!(x & (x - 1))) units |= x;
  }
  if (units != XORS - 1) return refuse(error, "its table lacks a power of two", UINT64_MAX, units, XORS - 1);
  return TPDE_OK;
}

/* The records of some rows (5.2), those of rows that are not there included. */
int tpde_window_records(const tpde_window *w, const uint8_t *records, uint64_t first, uint64_t end, tpde_error *error) {
  for (uint64_t i = first; i < end; i++)
    if (i < w->rows ? records[i] >> 1 > MAX_BASE : records[i])
      return refuse(error, "a row's window is out of range", UINT64_MAX, records[i], 2 * MAX_BASE + 1);
  return TPDE_OK;
}

int tpde_window_open(const uint8_t *blob, uint64_t bytes, tpde_window *w, tpde_error *error) {
  const int code = tpde_window_header(blob, bytes, w, error);
  if (code) return code;
  if (bytes < w->bytes)
    return tpde_fail(error, TPDE_E_TRUNCATED, "it ends before its last chunk does", UINT64_MAX, -1, bytes, w->bytes);
  if (bytes > w->bytes) return refuse(error, "bytes behind its last chunk", UINT64_MAX, bytes, w->bytes);
  return TPDE_OK;
}

/* The entries of a chunk, checked (4.4). */
int tpde_window_entries(const opened_window *o, uint64_t stripe, uint64_t chunk, window_entries *found,
                        tpde_error *error) {
  const tpde_window *w = &o->w;
  const uint64_t number = stripe * w->stripe_chunks + chunk;
  const uint8_t *offset = o->blob + w->offsets_at + 4 * number;
  const uint32_t begin = load32(offset), end = load32(offset + 4);
  if (begin > end || end > w->entries)
    return refuse(error, "a chunk's entries are out of range", number, end, w->entries);
  *found = (window_entries){o->blob + w->entries_at + 2 * (uint64_t)begin, end - begin};
  int32_t last = -1;
  for (uint32_t i = 0; i < found->count; i++) {
    const uint32_t entry = load16(found->at + 2 * (size_t)i);
    const int32_t key = (int32_t)((entry << 4 | entry >> 12) & 0xFFFF); /* place, index */
    if (key <= last) return refuse(error, "a chunk's entries do not ascend", number, entry, 0);
    last = key;
  }
  const uint64_t rows = w->rows - stripe * STRIPE_ROWS, columns = w->columns - chunk * CHUNK_COLUMNS;
  if (rows >= STRIPE_ROWS && columns >= CHUNK_COLUMNS) return TPDE_OK;
  for (uint32_t i = 0; i < found->count; i++) {
    const uint32_t place = load16(found->at + 2 * (size_t)i) & (PLACES - 1);
    const uint32_t row = (place >> 8 & 1) * 8 + (place >> 5 & 7), column = (place >> 9) * BLOCK_COLUMNS + (place & 31);
    if (row >= rows || column >= columns)
      return refuse(error, "an entry of a word that is not there", number, place, 0);
  }
  return TPDE_OK;
}

static int check_stripe(void *context, uint64_t stripe, tpde_error *error) {
  const opened_window *o = context;
  window_entries found;
  const uint64_t row = stripe * STRIPE_ROWS;
  int code = tpde_window_records(&o->w, o->blob + o->w.records_at, row, row + STRIPE_ROWS, error);
  for (uint64_t c = 0; c < o->w.stripe_chunks && !code; c++) code = tpde_window_entries(o, stripe, c, &found, error);
  return code;
}

int tpde_window_check(const uint8_t *blob, uint64_t bytes, tpde_window *window, int threads, tpde_error *error) {
  if (threads < 1) return tpde_fail(error, TPDE_E_ARGUMENT, "no thread", UINT64_MAX, -1, 0, 1);
  int code = tpde_window_open(blob, bytes, window, error);
  if (code) return code;
  const tpde_window *w = window;
  const uint64_t records_end = w->records_at + w->stripes * STRIPE_ROWS, chunks = w->stripes * w->stripe_chunks,
                 offsets_end = w->offsets_at + 4 * (chunks + 1), entries_end = w->entries_at + 2 * w->entries;
  if (!all_zero(blob + records_end, w->offsets_at - records_end) ||
      !all_zero(blob + offsets_end, w->entries_at - offsets_end) ||
      !all_zero(blob + entries_end, w->bodies_at - entries_end))
    return refuse(error, "padding is not zero", UINT64_MAX, 1, 0);
  if (load32(blob + w->offsets_at)) return refuse(error, "entries of no chunk", 0, load32(blob + w->offsets_at), 0);
  if (load32(blob + offsets_end - 4) != w->entries)
    return refuse(error, "entries of no chunk", chunks - 1, load32(blob + offsets_end - 4), w->entries);
  opened_window o = {*w, blob};
  return tpde_each_stripe(check_stripe, &o, w->stripes, w->columns, CHECK_WORDS, threads, error);
}
