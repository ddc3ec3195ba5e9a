/* windows_plan.c: choosing windows, the table of XORs and the flag (windows.md 6). Integers only. */
#include <stdlib.h>

#include "windows.h"

/* ---- escapes ---- */

/* Which entries of the table say each XOR (6.3): the fewest, of these the first in the order of their lists. */
void tpde_window_say(const uint8_t *values, uint16_t said[XORS]) {
  uint32_t found = 1;
  memset(said, 0, XORS * sizeof *said);
  for (uint32_t size = 1; found < XORS; size++) {
    uint32_t list[7] = {0, 1, 2, 3, 4, 5, 6}; /* seven will do: the powers of two are there */
    for (;;) {
      uint32_t x = 0, set = 0, i = size;
      for (uint32_t k = 0; k < size; k++) {
        x ^= values[list[k]];
        set |= 1u << list[k];
      }
      if (x && !said[x]) {
        said[x] = (uint16_t)set;
        found++;
      }
      while (i && list[i - 1] == TPDE_WINDOW_TABLE - size + i - 1) i--;
      if (!i) break;
      list[i - 1]++;
      for (; i < size; i++) list[i] = list[i - 1] + 1;
    }
  }
}

/* The powers of two, and the nine other XORs that occur most often (6.2). */
static void make_table(const uint64_t counts[XORS], uint8_t *values) {
  uint8_t taken[XORS] = {0};
  for (uint32_t x = 1; x < XORS; x <<= 1) taken[x] = 1;
  for (int i = 7; i < TPDE_WINDOW_TABLE; i++) {
    uint32_t best = 0;
    for (uint32_t x = 1; x < XORS; x++)
      if (!taken[x] && (!best || counts[x] > counts[best])) best = x;
    taken[best] = 1;
  }
  for (uint32_t x = 1, i = 0; x < XORS; x++)
    if (taken[x]) values[i++] = (uint8_t)x;
}

/* ---- choosing ---- */

/* What is known of a stripe with and without the flag. */
typedef struct counted {
  uint32_t xors[2][XORS];
  uint8_t records[2][STRIPE_ROWS];
} counted;

typedef struct planning {
  const uint8_t *words;
  tpde_window w;
  counted *stripes;
} planning;

/* How many of a row's words have each exponent. All counters but those from `lowest` to `highest` are zero. */
typedef struct exponents {
  uint32_t counts[256], more[3][256]; /* four counters each: neighbours of one exponent do not wait for each other */
  uint32_t lowest, highest;
} exponents;

static void count_exponents(const uint8_t *words, uint64_t n, exponents *x) {
  int16_t low = INT16_MAX, high = 0;
  uint64_t i = 0;
  for (; i < n; i++) {
    const int16_t magnitude = (int16_t)(load16(words + 2 * i) & 0x7FFF);
    if (magnitude < low) low = magnitude;
    if (magnitude > high) high = magnitude;
  }
  x->lowest = (uint32_t)low >> 7;
  x->highest = (uint32_t)high >> 7;
  for (i = 0; i + 4 <= n; i += 4) {
    const uint64_t four = load64(words + 2 * i);
    x->counts[four >> 7 & 255]++;
    x->more[0][four >> 23 & 255]++;
    x->more[1][four >> 39 & 255]++;
    x->more[2][four >> 55 & 255]++;
  }
  for (; i < n; i++) x->counts[load16(words + 2 * i) >> 7 & 255]++;
  for (uint32_t e = x->lowest; e <= x->highest; e++) {
    x->counts[e] += x->more[0][e] + x->more[1][e] + x->more[2][e];
    x->more[0][e] = x->more[1][e] = x->more[2][e] = 0;
  }
}

/* A row's record (6.1): the window that holds most of its words, of these the lowest. */
static uint8_t choose(const exponents *x, int zero) {
  const uint32_t width = zero ? 6 : 8, step = x->counts[0] ? 2 : 1, first = zero && x->lowest < 2 ? 2 : x->lowest;
  uint32_t before[257 + 8], most = 0, best = 0, at = x->lowest < width ? 0 : x->lowest - width + 1;
  at += at & (step - 1); /* windows below hold nothing */
  for (uint32_t e = at, sum = 0; e <= x->highest + width; e++) { /* words of the exponents below e */
    before[e] = sum;
    if (e >= first && e <= x->highest) sum += x->counts[e];
  }
  for (; at <= x->highest && at <= 2 * MAX_BASE + 1; at += step) {
    const uint32_t sum = before[at + width] - before[at];
    if (sum <= most) continue;
    most = sum;
    best = at;
  }
  return (uint8_t)best;
}

static int count_stripe(void *context, uint64_t stripe, tpde_error *error) {
  const planning *p = context;
  counted *s = &p->stripes[stripe];
  exponents x;
  (void)error;
  memset(&x, 0, sizeof x);
  for (uint64_t r = 0; r < STRIPE_ROWS && stripe * STRIPE_ROWS + r < p->w.rows; r++) {
    count_exponents(p->words + 2 * p->w.columns * (stripe * STRIPE_ROWS + r), p->w.columns, &x);
    for (uint32_t zero = 0; zero < 2; zero++) {
      const uint8_t record = choose(&x, (int)zero);
      const row_window window = window_of(record, zero);
      s->records[zero][r] = record;
      for (uint32_t e = x.lowest; e <= x.highest; e++) {
        const uint32_t pair = (e - (record & 1)) >> 1;
        if (pair == window.pairs[0] || (pair >= window.pairs[1] && pair <= window.pairs[3])) continue;
        s->xors[zero][pair ^ window.pairs[0]] += x.counts[e];
      }
    }
    memset(x.counts + x.lowest, 0, (x.highest - x.lowest + 1) * sizeof *x.counts);
  }
  return TPDE_OK;
}

/* Table and flag (6.2 to 6.4), and what follows of them. */
int tpde_window_choose(uint64_t rows, uint64_t columns, const uint64_t *counts, tpde_window *window, uint16_t *said,
                       tpde_error *error) {
  if (!counts || !window || !said || tpde_window_sections(rows, columns, 0, window))
    return tpde_fail(error, TPDE_E_ARGUMENT, "a null pointer, or no matrix", UINT64_MAX, -1, rows, columns);
  uint8_t tables[2][TPDE_WINDOW_TABLE];
  uint16_t ways[2][XORS];
  uint64_t sums[2] = {0};
  for (int zero = 0; zero < 2; zero++) {
    make_table(counts + zero * XORS, tables[zero]);
    tpde_window_say(tables[zero], ways[zero]);
    for (uint32_t x = 0; x < XORS; x++)
      sums[zero] += counts[zero * XORS + x] * (uint64_t)__builtin_popcount(ways[zero][x]);
  }
  const int zero = sums[1] < sums[0];
  if (sums[zero] >= ENTRIES_LIMIT)
    return tpde_fail(error, TPDE_E_SPACE, "more entries than a blob can have", UINT64_MAX, -1, sums[zero],
                     ENTRIES_LIMIT);
  tpde_window_sections(rows, columns, sums[zero], window);
  window->flags = zero ? FLAG_ZERO : 0;
  memcpy(window->table, tables[zero], sizeof tables[zero]);
  memcpy(said, ways[zero], sizeof ways[zero]);
  return TPDE_OK;
}

int tpde_window_plan(const void *words, uint64_t rows, uint64_t columns, uint8_t *head, uint64_t *starts, int threads,
                     tpde_error *error) {
  planning p = {.words = words};
  if (!words || !head || !starts || threads < 1 || tpde_window_sections(rows, columns, 0, &p.w))
    return tpde_fail(error, TPDE_E_ARGUMENT, "a null pointer, no thread, or no matrix", UINT64_MAX, -1, rows, columns);
  const uint64_t stripes = p.w.stripes;
  p.stripes = calloc(stripes, sizeof *p.stripes);
  if (!p.stripes)
    return tpde_fail(error, TPDE_E_MEMORY, "out of memory", UINT64_MAX, -1, 0, stripes * sizeof *p.stripes);
  tpde_each_stripe(count_stripe, &p, stripes, columns, WORK_WORDS, threads, error);
  uint64_t counts[2 * XORS] = {0};
  for (uint64_t s = 0; s < stripes; s++)
    for (uint32_t x = 0; x < XORS; x++) {
      counts[x] += p.stripes[s].xors[0][x];
      counts[XORS + x] += p.stripes[s].xors[1][x];
    }
  uint16_t said[XORS];
  const int code = tpde_window_choose(rows, columns, counts, &p.w, said, error);
  if (code) {
    free(p.stripes);
    return code;
  }
  memset(head, 0, p.w.offsets_at);
  memcpy(head, WINDOW_MAGIC, sizeof WINDOW_MAGIC);
  store16(head + 8, WINDOW_VERSION);
  store16(head + 10, (uint16_t)p.w.flags);
  store64(head + 16, rows);
  store64(head + 24, columns);
  store64(head + 32, p.w.entries);
  memcpy(head + 48, p.w.table, sizeof p.w.table);
  starts[0] = 0;
  for (uint64_t s = 0; s < stripes; s++) {
    memcpy(head + HEADER_BYTES + STRIPE_ROWS * s, p.stripes[s].records[p.w.flags], STRIPE_ROWS);
    starts[s + 1] = starts[s];
    for (uint32_t x = 0; x < XORS; x++)
      starts[s + 1] += p.stripes[s].xors[p.w.flags][x] * (uint64_t)__builtin_popcount(said[x]);
  }
  free(p.stripes);
  return TPDE_OK;
}
