/* codes.c: making prefix codes of counted values, and writing them as tables (format.md 3). Integers only. */
#include <stdlib.h>

#include "internal.h"

/* Of fp16 weights of which half are zeros, a code of one value is better than one of two, and one of 96 than both. */
#define MIN_VALUES 32

static int by_count(const void *a, const void *b) {
  const counted_value *x = a, *y = b;
  if (x->count != y->count) return x->count < y->count ? 1 : -1;
  return x->value < y->value ? -1 : x->value > y->value;
}

/* Lengths of an optimal code of at most WRITER_BITS bits for n counts in ascending order: package-merge
 * (Larmore and Hirschberg, 1990). A level's list merges the n coins with pairs of the level below; of the
 * last level's first 2n - 2 entries, and of what their packages hold, each coin counts one bit. */
static void package_merge(const uint64_t *count, int n, uint8_t *bits) {
  static const int levels = WRITER_BITS;
  uint8_t coin[WRITER_BITS][2 * (MAX_VALUES + 1)];
  uint64_t list[2][2 * (MAX_VALUES + 1)];
  int size = 0;
  for (int l = 0; l < levels; l++) {
    const uint64_t *below = list[(l + 1) & 1];
    uint64_t *now = list[l & 1];
    int packages = size / 2, i = 0, k = 0;
    size = 0;
    while (i < n || k < packages) {
      int take = k >= packages || (i < n && count[i] <= below[2 * k] + below[2 * k + 1]);
      coin[l][size] = (uint8_t)take;
      now[size++] = take ? count[i] : below[2 * k] + below[2 * k + 1];
      if (take) i++;
      else k++;
    }
  }
  memset(bits, 0, (size_t)n);
  for (int l = levels - 1, take = 2 * n - 2; l >= 0; l--) {
    int coins = 0;
    for (int i = 0; i < take; i++) coins += coin[l][i];
    for (int i = 0; i < coins; i++) bits[i]++;
    take = 2 * (take - coins);
  }
}

/* Build the code of the first n of `sorted` (falling counts) and an escape for the rest; returns the bits
 * that all of them take, counting each occurrence. */
static uint64_t build(prefix_code *c, const counted_value *sorted, int n, uint64_t total, int kind, int raw_bits) {
  uint64_t count[MAX_VALUES + 1], covered = 0, sum = 0;
  uint8_t bits[MAX_VALUES + 1];
  int escape = 0, literal = VALUE_BITS(kind) - raw_bits;
  c->kind = kind;
  c->raw_bits = raw_bits;
  c->n = n;
  for (int i = 0; i < n; i++) covered += sorted[i].count;
  uint64_t rest = total > covered ? total - covered : 1; /* the escape is always there: a sample isn't all */
  for (int i = n - 1, at = 0, put = 0; at <= n; at++) {
    if (!put && (i < 0 || rest <= sorted[i].count)) {
      count[at] = rest;
      escape = at;
      put = 1;
    } else {
      count[at] = sorted[i--].count;
    }
  }
  package_merge(count, n + 1, bits);
  for (int at = 0, i = n - 1; at <= n; at++) {
    if (at == escape) {
      c->escape_bits = bits[at];
      sum += (total - covered) * (uint64_t)(bits[at] + literal);
      continue;
    }
    c->values[i] = sorted[i].value;
    c->bits[i] = bits[at];
    sum += sorted[i--].count * (uint64_t)bits[at];
  }
  return sum + total * (uint64_t)raw_bits;
}

uint32_t tpde_code_bytes(const prefix_code *c) {
  return align_up(4 + 2 * WRITER_BITS + (uint32_t)(c->n * VALUE_BYTES(c->kind)), 4);
}

/* The best code over how many values get a codeword of their own. `scale` is tensor over sample. */
uint64_t tpde_code_build(prefix_code *c, counted_value *found, int distinct, uint64_t total, int kind, int raw_bits,
                           uint64_t scale) {
  static const int sizes[] = {1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 384, 512};
  uint64_t least = UINT64_MAX, best = 0;
  prefix_code trial;
  int last = 0;
  qsort(found, (size_t)distinct, sizeof *found, by_count);
  for (size_t k = 0; k < sizeof sizes / sizeof *sizes && !last; k++) {
    int n = sizes[k];
    if (n >= distinct) {
      n = distinct;
      last = 1;
    }
    uint64_t bits = build(&trial, found, n, total, kind, raw_bits), cost = bits * scale + 8u * tpde_code_bytes(&trial);
    if (cost < least) {
      least = cost;
      best = bits;
      *c = trial;
    } else if (n >= MIN_VALUES && cost > least + least / 64) {
      break; /* past the minimum */
    }
  }
  return best;
}

static int value_order(const prefix_code *c, int a, int b) {
  if (c->bits[a] != c->bits[b]) return c->bits[a] < c->bits[b];
  return c->values[a] < c->values[b];
}

/* Write a table (format.md 3): values by length, then by value. Returns its size. */
uint32_t tpde_code_write(const prefix_code *c, uint8_t *out) {
  int order[MAX_VALUES];
  uint32_t size = tpde_code_bytes(c);
  memset(out, 0, size);
  out[0] = (uint8_t)c->kind;
  out[1] = WRITER_BITS;
  out[2] = (uint8_t)c->raw_bits;
  out[3] = (uint8_t)c->escape_bits;
  for (int i = 0; i < c->n; i++) {
    uint8_t *count = out + 4 + 2 * (c->bits[i] - 1);
    int k = i;
    store16(count, (uint16_t)(load16(count) + 1));
    for (; k > 0 && value_order(c, i, order[k - 1]); k--) order[k] = order[k - 1];
    order[k] = i;
  }
  for (int i = 0; i < c->n; i++) {
    uint8_t *at = out + 4 + 2 * WRITER_BITS + i * VALUE_BYTES(c->kind);
    if (VALUE_BYTES(c->kind) == 2) store16(at, c->values[order[i]]);
    else *at = (uint8_t)c->values[order[i]];
  }
  return size;
}
