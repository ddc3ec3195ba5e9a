/* plan.c: choosing planes and tables for a tensor from a sample of its chunks. Integers only, so that every
 * machine writes the same file. */
#include <stdlib.h>

#include "internal.h"

#define PAIR_VARIANTS 2
#define SINGLE_VARIANTS 4
#define WORTH_PERCENT 97  /* a plane is coded if it shrinks below this: else look-ups cost more than they save */
#define MAX_SCALE (1u << 24) /* beyond this a table costs nothing, and products stay below 2^63 */
#define PAIR_BITS 9       /* a pair of symbols with more than these together has too many values for a table */
#define MAX_SAMPLE_CHUNKS 4096 /* counters have 32 bits, and chunks are sorted by insertion */
#define ROUNDS 6          /* of reassigning chunks to variants */

/* ---- the sample ---- */

typedef struct sampled {
  const uint8_t *plane; /* symbols of all chunks, one chunk after the other */
  uint32_t (*counts)[256]; /* by chunk */
  uint8_t *group;       /* variant of each chunk, NONE for one that is constant */
  uint32_t chunks, chunk_words, last_words;
  uint32_t *pairs;      /* 65536 counters */
  counted_value *found;         /* 65536 */
  uint64_t scale;
  int starved;          /* there was no memory for grouping: another plan would do, but it would be another file */
} sampled;

#define NONE 255

static uint32_t words_of(const sampled *s, uint32_t chunk) {
  return chunk + 1 < s->chunks ? s->chunk_words : s->last_words;
}

static void count_symbols(sampled *s, uint32_t chunk) {
  uint32_t part[4][256] = {{0}}; /* four counters for each symbol: runs of one symbol don't wait */
  const uint8_t *p = s->plane + (size_t)chunk * s->chunk_words;
  uint32_t n = words_of(s, chunk), i = 0;
  for (; i + 4 <= n; i += 4)
    for (uint32_t k = 0; k < 4; k++) part[k][p[i + k]]++;
  for (; i < n; i++) part[0][p[i]]++;
  for (int v = 0; v < 256; v++) s->counts[chunk][v] = part[0][v] + part[1][v] + part[2][v] + part[3][v];
  s->group[chunk] = s->counts[chunk][p[0]] == n ? NONE : 0;
}

/* The code of all chunks of one group. Returns its bits, 0 if the group is empty. */
static uint64_t group_code(sampled *s, int group, int kind, int raw_bits, prefix_code *c) {
  uint64_t total = 0;
  int distinct = 0;
  if (kind == 2) {
    uint32_t *pairs = s->pairs;
    memset(pairs, 0, 65536 * sizeof *pairs);
    for (uint32_t i = 0; i < s->chunks; i++) {
      const uint8_t *p = s->plane + (size_t)i * s->chunk_words;
      if (s->group[i] != group) continue;
      for (uint32_t k = 0, n = words_of(s, i); k + 2 <= n; k += 2) pairs[load16(p + k)]++;
    }
    for (uint32_t at = 0, any; at < 65536; at += 8) {
      any = 0;
      for (int k = 0; k < 8; k++) any |= pairs[at + k];
      for (uint32_t v = at; any && v < at + 8; v++) { /* most eights are zeros */
        if (!pairs[v]) continue;
        s->found[distinct++] = (counted_value){pairs[v], (uint16_t)v};
        total += pairs[v];
      }
    }
  } else {
    uint32_t counts[256] = {0};
    for (uint32_t i = 0; i < s->chunks; i++)
      if (s->group[i] == group)
        for (int v = 0; v < 256; v++) counts[v >> raw_bits] += s->counts[i][v];
    for (int v = 0; v < 256 >> raw_bits; v++) {
      if (!counts[v]) continue;
      s->found[distinct++] = (counted_value){counts[v], (uint16_t)v};
      total += counts[v];
    }
  }
  if (!distinct) return 0;
  return tpde_code_build(c, s->found, distinct, total, kind, raw_bits, s->scale);
}

/* Group chunks by which of `variants` single-symbol codes suits them: start from their mean symbol, then
 * reassign, as k-means does, with code lengths for distances. Returns 0 if a group ran empty. */
static int group_chunks(sampled *s, int variants, int raw_bits) {
  uint32_t live = 0, (*by_mean)[2] = malloc(sizeof *by_mean * s->chunks);
  prefix_code *c = malloc(sizeof *c);
  int ok = c && by_mean;
  s->starved |= !ok;
  for (uint32_t i = 0; ok && i < s->chunks; i++) {
    uint64_t sum = 0;
    uint32_t k = live;
    if (s->group[i] == NONE) continue;
    for (uint32_t v = 0; v < 256; v++) sum += (uint64_t)s->counts[i][v] * v;
    sum = sum * 4096 / words_of(s, i);
    for (; k > 0 && by_mean[k - 1][0] > sum; k--) memcpy(by_mean[k], by_mean[k - 1], sizeof *by_mean);
    by_mean[k][0] = (uint32_t)sum;
    by_mean[k][1] = i;
    live++;
  }
  if (live < 2u * (uint32_t)variants) ok = 0;
  for (uint32_t k = 0; ok && k < live; k++) s->group[by_mean[k][1]] = (uint8_t)(k * (uint32_t)variants / live);
  for (int round = 0, moved = 1; ok && moved && round < ROUNDS; round++) { /* else a round would repeat the last */
    uint8_t bits[SINGLE_VARIANTS][256];
    for (int g = 0; ok && g < variants; g++) {
      if (!group_code(s, g, 1, raw_bits, c)) ok = 0;
      else memset(bits[g], c->escape_bits + 8, 256);
      for (int i = 0; ok && i < c->n; i++)
        memset(bits[g] + (c->values[i] << raw_bits), c->bits[i] + raw_bits, (size_t)1 << raw_bits);
    }
    moved = 0;
    for (uint32_t i = 0; ok && i < s->chunks; i++) {
      uint64_t best = UINT64_MAX;
      uint8_t before = s->group[i];
      if (before == NONE) continue;
      for (int g = 0; g < variants; g++) {
        uint64_t cost = 0;
        for (int v = 0; v < 256; v++) cost += (uint64_t)s->counts[i][v] * bits[g][v];
        if (cost < best) {
          best = cost;
          s->group[i] = (uint8_t)g;
        }
      }
      moved |= s->group[i] != before;
    }
  }
  free(c);
  free(by_mean);
  return ok;
}

/* Choose the tables of one plane. Returns how many (0: it stays raw), with the plane's expected bits. */
static int plan_plane(sampled *s, int max_variants, int rotated_byte, prefix_code *codes, uint64_t *plane_bits) {
  uint64_t words = 0, best, bits;
  int kind = 1, raw_bits = 0, tables = 1;
  prefix_code *trial = codes + SINGLE_VARIANTS;
  for (uint32_t i = 0; i < s->chunks; i++) {
    count_symbols(s, i);
    if (s->group[i] != NONE) words += words_of(s, i);
  }
  *plane_bits = words * 8;
  if (!words) return 0;
  best = group_code(s, 0, 1, 0, &codes[0]);
  if (rotated_byte) { /* the lowest bit is the sign: no code shortens it */
    bits = group_code(s, 0, 1, 1, trial);
    if (bits <= best) {
      best = bits;
      raw_bits = 1;
      codes[0] = *trial;
    }
  }
  if (best * 100 > words * 8 * WORTH_PERCENT) return 0;
  bits = best * 2 <= words * PAIR_BITS ? group_code(s, 0, 2, 0, trial) : UINT64_MAX / 200;
  if (bits * 200 <= best * 201) { /* half the look-ups are worth half a percent */
    best = bits;
    kind = 2;
    raw_bits = 0;
    codes[0] = *trial;
  }
  int most = kind == 2 ? PAIR_VARIANTS : SINGLE_VARIANTS;
  if (most > max_variants) most = max_variants;
  for (int variants = 2; variants <= most; variants *= 2) {
    uint64_t sum = 0, extra = 0;
    if (!group_chunks(s, variants, raw_bits)) break;
    for (int g = 0; g < variants && sum != UINT64_MAX; g++) {
      bits = group_code(s, g, kind, raw_bits, &trial[g]);
      sum = bits ? sum + bits : UINT64_MAX;
      extra += bits ? 8 * tpde_code_bytes(&trial[g]) : 0;
    }
    /* Twice the tables must save this much of the plane, or a GPU's shared memory is worth more. */
    uint64_t least = kind == 2 ? 995 : 999;
    if (sum == UINT64_MAX || (sum * s->scale + extra) * 1000 > best * s->scale * least) break;
    best = sum;
    tables = variants;
    memcpy(codes, trial, sizeof *codes * (size_t)variants);
  }
  *plane_bits = best;
  return tables;
}

int tpde_plan(tpde_layout *layout, const void *sample, uint64_t sample_words, int max_variants, uint8_t *section,
              uint32_t *section_bytes, uint64_t *estimate, tpde_error *error) {
  sampled s = {0};
  uint8_t *planes = NULL, *at[TPDE_MAX_PLANES];
  prefix_code *codes = NULL;
  uint32_t used = 0;
  if (layout) layout->tables = 0; /* what it held before does not matter */
  for (int p = 0; layout && p < TPDE_MAX_PLANES; p++) layout->first_table[p] = layout->table_count[p] = 0;
  if (!layout || !tpde_layout_valid(layout) || !sample || !sample_words || sample_words > layout->words ||
      sample_words / layout->chunk_words >= MAX_SAMPLE_CHUNKS || max_variants < 1 || max_variants > SINGLE_VARIANTS ||
      !section || !section_bytes || !estimate)
    return tpde_fail(error, TPDE_E_ARGUMENT, "no valid layout, sample or place for tables", UINT64_MAX, -1, 0, 0);
  s.chunk_words = layout->chunk_words;
  s.chunks = (uint32_t)((sample_words - 1) / s.chunk_words + 1);
  s.last_words = (uint32_t)(sample_words - (uint64_t)(s.chunks - 1) * s.chunk_words);
  s.scale = layout->words / sample_words;
  if (s.scale > MAX_SCALE) s.scale = MAX_SCALE;
  planes = malloc((size_t)sample_words * layout->word_bytes);
  s.counts = malloc(sizeof *s.counts * s.chunks);
  s.group = malloc(s.chunks);
  s.pairs = malloc(65536 * sizeof *s.pairs);
  s.found = malloc(65536 * sizeof *s.found);
  codes = malloc(2 * SINGLE_VARIANTS * sizeof *codes);
  int status = TPDE_OK;
  if (!planes || !s.counts || !s.group || !s.pairs || !s.found || !codes) {
    status = tpde_fail(error, TPDE_E_MEMORY, "out of memory", UINT64_MAX, -1, 0,
                       sample_words * layout->word_bytes);
    goto out;
  }
  for (int p = 0; p < layout->word_bytes; p++) at[p] = planes + (size_t)p * sample_words;
  tpde_active()->split(layout->word_bytes, layout->rotate, sample, (size_t)sample_words, at);
  uint64_t bits = 0;
  int coded = 0;
  /* From the symbol plane down: if tables run out, the planes that matter least stay raw. */
  for (int p = layout->word_bytes - 1; p >= 0; p--) {
    uint64_t plane_bits;
    s.plane = at[p];
    int n = plan_plane(&s, max_variants, layout->rotate && layout->word_bytes == 1, codes, &plane_bits);
    if (layout->tables + n > TPDE_MAX_TABLES) {
      n = 0;
      plane_bits = sample_words * 8;
    }
    for (int i = 0; i < n; i++) {
      used += tpde_code_write(&codes[i], section + used);
    }
    layout->first_table[p] = n ? layout->tables : 0;
    layout->table_count[p] = (uint8_t)n;
    layout->tables = (uint8_t)(layout->tables + n);
    bits += plane_bits;
    coded += n > 0;
  }
  if (s.starved) {
    status = tpde_fail(error, TPDE_E_MEMORY, "out of memory", UINT64_MAX, -1, 0, s.chunks);
    goto out;
  }
  memset(section + used, 0, align_up(used, 16) - used);
  *section_bytes = align_up(used, 16);
  /* A coded plane's lane header, half a lane's last byte, an index record, and half a unit, each chunk. */
  uint64_t chunks = tpde_chunk_count(layout);
  *estimate = bits / 8 * (layout->words / sample_words) +
              bits / 8 * (layout->words % sample_words) / sample_words + *section_bytes +
              chunks * (TPDE_RECORD_BYTES + (uint64_t)coded * (LANE_HEADER + 2) + (8u << (layout->unit_log2 - 4)));
out:
  free(planes);
  free(s.counts);
  free(s.group);
  free(s.pairs);
  free(s.found);
  free(codes);
  return status;
}
