/* windows_cut.c: parts of blobs in the window layout (windows.md 7), without decoding them. */
#include "windows.h"

typedef struct cutting {
  opened_window o; /* what is cut */
  tpde_window w; /* the part */
  uint64_t first_stripe, first_pair;
  uint64_t *counts; /* of each stripe's entries, or NULL: they and bodies are written */
  const uint64_t *starts;
  uint8_t *out;
} cutting;

/* The entries of those pairs of a chunk's that go into the part's chunk from its pair `to` on; returns 0 if there is no
 * room for them. */
static int cut_entries(const window_entries *found, uint32_t first, uint32_t count, uint32_t to, uint64_t *sum,
                       entry_writer *out) {
  for (uint32_t i = 0; i < found->count; i++) {
    const uint32_t entry = load16(found->at + 2 * (size_t)i), pair = entry >> 10 & 3;
    if (pair < first || pair >= first + count) continue;
    ++*sum;
    if (out && !put_entry(out, (entry & ~0xC00u) | (pair - first + to) << 10)) return 0;
  }
  return 1;
}

static void cut_pair(const uint8_t *from, uint32_t from_pairs, uint32_t from_pair, uint8_t *to, uint32_t to_pairs,
                     uint32_t to_pair) {
  const size_t from_step = lane_step(from_pairs), to_step = lane_step(to_pairs);
  for (uint32_t i = 0; i < 11; i++) { /* three words of codes, eight of low bytes */
    const uint32_t tile = (i - 3) >> 2, part = (i - 3) & 3;
    const size_t a = i < 3 ? code_at(from_pairs, 3 * from_pair + i) : low_at(from_pairs, 2 * from_pair + tile, part),
                 b = i < 3 ? code_at(to_pairs, 3 * to_pair + i) : low_at(to_pairs, 2 * to_pair + tile, part);
    for (uint32_t lane = 0; lane < TPDE_LANES; lane++) memcpy(to + b + lane * to_step, from + a + lane * from_step, 4);
  }
}

static int cut_stripe(void *context, uint64_t stripe, tpde_error *error) {
  cutting *c = context;
  const tpde_window *w = &c->w, *whole = &c->o.w;
  const uint64_t source = c->first_stripe + stripe;
  entry_writer to = {0};
  uint64_t sum = 0;
  if (c->out) to = entries_into(w, c->starts, c->out, stripe);
  for (uint64_t chunk = 0; chunk < w->stripe_chunks; chunk++) {
    const uint32_t pairs = pairs_of(w, chunk);
    if (c->out) start_chunk(w, c->out, stripe * w->stripe_chunks + chunk, &to);
    for (uint32_t pair = 0; pair < pairs;) { /* of one chunk or two */
      const uint64_t at = c->first_pair + 4 * chunk + pair, from_chunk = at / 4;
      const uint32_t first = (uint32_t)(at % 4), from_pairs = pairs_of(whole, from_chunk),
                     count = from_pairs - first < pairs - pair ? from_pairs - first : pairs - pair;
      window_entries found;
      const int code = tpde_window_entries(&c->o, source, from_chunk, &found, error);
      if (code) return code;
      if (!cut_entries(&found, first, count, pair, &sum, c->out ? &to : NULL)) return other_entries(error, stripe);
      if (c->out) {
        const uint8_t *from = c->o.blob + body_at(whole, source, from_chunk);
        uint8_t *body = c->out + body_at(w, stripe, chunk);
        if (count == pairs && count == from_pairs) memcpy(body, from, pairs * PAIR_BYTES);
        else
          for (uint32_t i = 0; i < count; i++) cut_pair(from, from_pairs, first + i, body, pairs, pair + i);
      }
      pair += count;
    }
  }
  if (c->counts) c->counts[stripe] = sum;
  return !c->out || to.at == to.end ? TPDE_OK : other_entries(error, stripe);
}

/* Whether a part begins and ends where it can (7.1). */
static int can_cut(uint64_t first, uint64_t count, uint64_t all, uint64_t unit) {
  return count >= 1 && first <= all && count <= all - first && first % unit == 0 &&
         (first + count == all || (first + count) % unit == 0);
}

int tpde_window_cut_plan(const uint8_t *blob, uint64_t bytes, uint64_t first_row, uint64_t rows, uint64_t first_column,
                         uint64_t columns, uint8_t *head, uint64_t *starts, int threads, tpde_error *error) {
  cutting c = {.o = {.blob = blob}};
  if (!head || !starts || threads < 1)
    return tpde_fail(error, TPDE_E_ARGUMENT, "a null pointer or no thread", UINT64_MAX, -1, 0, 0);
  int code = tpde_window_open(blob, bytes, &c.o.w, error);
  if (!code) code = tpde_window_records(&c.o.w, blob + c.o.w.records_at, 0, c.o.w.stripes * STRIPE_ROWS, error);
  if (code) return code;
  if (!can_cut(first_row, rows, c.o.w.rows, STRIPE_ROWS) ||
      !can_cut(first_column, columns, c.o.w.columns, PAIR_COLUMNS))
    return tpde_fail(error, TPDE_E_ARGUMENT, "a part that begins or ends inside a tile", UINT64_MAX, -1, first_row,
                     first_column);
  tpde_window_sections(rows, columns, 0, &c.w);
  c.first_stripe = first_row / STRIPE_ROWS;
  c.first_pair = first_column / PAIR_COLUMNS;
  c.counts = starts + 1;
  code = tpde_each_stripe(cut_stripe, &c, c.w.stripes, columns, CHECK_WORDS, threads, error);
  if (code) return code;
  starts[0] = 0;
  for (uint64_t s = 0; s < c.w.stripes; s++) starts[s + 1] += starts[s];
  if (starts[c.w.stripes] > c.o.w.entries)
    return tpde_fail(error, TPDE_E_WINDOW, "entries of more than one chunk", UINT64_MAX, -1, starts[c.w.stripes],
                     c.o.w.entries);
  memset(head, 0, c.w.offsets_at);
  memcpy(head, blob, HEADER_BYTES);
  store64(head + 16, rows);
  store64(head + 24, columns);
  store64(head + 32, starts[c.w.stripes]);
  memcpy(head + HEADER_BYTES, blob + c.o.w.records_at + first_row, c.w.stripes * STRIPE_ROWS);
  return TPDE_OK;
}

int tpde_window_cut(const uint8_t *blob, uint64_t bytes, uint64_t first_row, uint64_t first_column, const uint8_t *head,
                    const uint64_t *starts, uint8_t *out, uint64_t out_bytes, int threads, tpde_error *error) {
  cutting c = {.o = {.blob = blob}, .starts = starts, .out = out};
  if (!head || !starts || !out || threads < 1)
    return tpde_fail(error, TPDE_E_ARGUMENT, "a null pointer or no thread", UINT64_MAX, -1, 0, 0);
  int code = tpde_window_open(blob, bytes, &c.o.w, error);
  if (!code) code = tpde_window_begin(head, starts, out, out_bytes, &c.w, error);
  if (code) return code;
  if (!can_cut(first_row, c.w.rows, c.o.w.rows, STRIPE_ROWS) ||
      !can_cut(first_column, c.w.columns, c.o.w.columns, PAIR_COLUMNS))
    return tpde_fail(error, TPDE_E_ARGUMENT, "a part that begins or ends inside a tile", UINT64_MAX, -1, first_row,
                     first_column);
  c.first_stripe = first_row / STRIPE_ROWS;
  c.first_pair = first_column / PAIR_COLUMNS;
  return tpde_each_stripe(cut_stripe, &c, c.w.stripes, c.w.columns, WORK_WORDS, threads, error);
}
