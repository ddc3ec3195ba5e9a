/* encode.c: words to chunks, format.md 4.4 and 5. */
#include <stdatomic.h>
#include <stdlib.h>

#include "internal.h"

#define MIN_CHUNKS 8u /* a thread is worth starting, and a range taking, for this many */

typedef struct range {
  uint64_t first, count; /* chunks */
  uint64_t start, used;  /* bytes of the output */
  uint32_t max_chunk, max_stream;
  int code;
} range;

typedef struct encoding {
  const tpde_codec *codec;
  const kernels *k;
  const uint8_t *words;
  uint64_t first, words_start;
  uint8_t *out, *index;
  range *ranges;
  int count;
  atomic_int next;
} encoding;

/* How a coded plane would be written (format.md 5.2, 5.3). */
typedef struct lanes {
  uint32_t bits[TPDE_LANES]; /* rounded up */
  uint32_t shortest, size;
  uint8_t shift;
} lanes;

static void round_lanes(lanes *c) {
  uint32_t low = UINT32_MAX, high = 0, total = 0;
  for (int l = 0; l < TPDE_LANES; l++) {
    if (c->bits[l] < low) low = c->bits[l];
    if (c->bits[l] > high) high = c->bits[l];
  }
  c->shortest = low;
  c->shift = 0;
  while (((high - low + (1u << c->shift) - 1) >> c->shift) > 255) c->shift++;
  for (int l = 0; l < TPDE_LANES; l++) {
    c->bits[l] = low + align_up(c->bits[l] - low, 1u << c->shift);
    total += c->bits[l];
  }
  c->size = align_up(LANE_HEADER + (total + 7) / 8, 4);
  if (low > UINT16_MAX || c->shift > MAX_SHIFT) c->size = UINT32_MAX; /* no code this bad is worth it */
}

/* Fill the lanes' places beyond the chunk's n words (format.md 5.1). */
static void pad_plane(const table *t, uint8_t *plane, uint32_t n, uint32_t padded) {
  if (t->kind == 1) {
    memset(plane + n, t->pad, padded - n);
    return;
  }
  if (n % 2) {
    plane[n] = plane[n - 1];
    n++;
  }
  for (; n < padded; n += 2) store16(plane + n, t->pad);
}

static void write_plane(const kernels *k, const table *t, const lanes *c, const uint8_t *plane, int places,
                        int groups, uint8_t *out) {
  store16(out, (uint16_t)c->shortest);
  out[2] = c->shift;
  out[3] = 0;
  for (int l = 0; l < TPDE_LANES; l++) out[4 + l] = (uint8_t)((c->bits[l] - c->shortest) >> c->shift);
  store32(out + c->size - 4, 0); /* the last bytes may be beyond the lanes' bits */
  k->write_lanes(t, plane, places, groups, c->bits, out + LANE_HEADER);
}

/* Encode one chunk; returns its bytes. */
static uint32_t encode_chunk(const encoding *e, uint64_t i, uint8_t *scratch, uint8_t *out, uint8_t *record,
                             uint32_t *max_stream) {
  const tpde_layout *l = &e->codec->layout;
  const table *tables = e->codec->tables;
  uint64_t start;
  uint32_t n = tpde_chunk_words(l, i, &start), raw = align_up(n, 16), modes = 0, unit = 1u << l->unit_log2;
  int b = l->word_bytes, places = 16 / b, groups = (int)((n + TPDE_LANES * places - 1) / (TPDE_LANES * places));
  uint32_t padded = (uint32_t)(groups * TPDE_LANES * places), variants = 1, best = 0;
  uint64_t best_size = UINT64_MAX;
  const uint8_t *words = e->words + (start - e->words_start) * (uint64_t)b;
  uint8_t *planes[TPDE_MAX_PLANES], *at = out, fill = 0;
  lanes sized[TPDE_MAX_PLANES], kept[TPDE_MAX_PLANES]; /* of this variant, and of the best */

  for (int p = 0; p < b; p++) planes[p] = scratch + (size_t)p * l->chunk_words;
  e->k->split(b, l->rotate, words, n, planes);
  for (int p = 0, filled = 0; p < b; p++) {
    if (memcmp(planes[p], planes[p] + 1, n - 1)) continue;
    if (!filled++) fill = planes[p][0];
    if (planes[p][0] == fill) modes |= MODE_FILL << (2 * p);
  }
  for (int p = 0; p < b; p++)
    if (l->table_count[p] > variants) variants = l->table_count[p];
  for (uint32_t v = 0; v < variants; v++) {
    uint64_t size = 0;
    for (int p = 0; p < b; p++) {
      if ((modes >> (2 * p) & 3) == MODE_FILL || !l->table_count[p]) continue;
      if (v < l->table_count[p]) { /* else as with the variant before */
        const table *t = &tables[l->first_table[p] + v];
        pad_plane(t, planes[p], n, padded);
        e->k->lane_bits(t, planes[p], places, groups, sized[p].bits);
        round_lanes(&sized[p]);
      }
      size += sized[p].size < raw ? sized[p].size : raw;
    }
    if (size < best_size) {
      best_size = size;
      best = v;
      memcpy(kept, sized, sizeof kept);
    }
  }
  for (int p = 0; p < b; p++) {
    if ((modes >> (2 * p) & 3) == MODE_FILL) continue;
    if (l->table_count[p] && kept[p].size < raw) {
      modes |= MODE_CODED << (2 * p);
      continue;
    }
    memcpy(at, planes[p], n);
    memset(at + n, 0, raw - n);
    at += raw;
  }
  for (int p = 0; p < b; p++) {
    if ((modes >> (2 * p) & 3) != MODE_CODED) continue;
    const table *t = &tables[l->first_table[p] + (best < l->table_count[p] ? best : l->table_count[p] - 1u)];
    pad_plane(t, planes[p], n, padded);
    write_plane(e->k, t, &kept[p], planes[p], places, groups, at);
    at += kept[p].size;
    if (kept[p].size > *max_stream) *max_stream = kept[p].size;
  }
  uint32_t size = align_up((uint32_t)(at - out), unit);
  memset(at, 0, size - (size_t)(at - out));
  store32(record + 4, e->k->checksum(words, (size_t)n * b));
  store16(record + 8, (uint16_t)modes);
  record[10] = (uint8_t)best;
  record[11] = fill;
  return size;
}

static void encode_range(encoding *e, range *r, uint8_t *scratch) {
  const tpde_layout *l = &e->codec->layout;
  for (uint64_t i = r->first; i < r->first + r->count; i++) {
    uint8_t *record = e->index + TPDE_RECORD_BYTES * (i - e->first);
    uint32_t size = encode_chunk(e, i, scratch, e->out + r->start + r->used, record, &r->max_stream);
    store32(record, (uint32_t)(r->used >> l->unit_log2)); /* made absolute when all sizes are known */
    r->used += size;
    if (size > r->max_chunk) r->max_chunk = size;
  }
}

/* Threads take one range after the other: one that is held up does not hold up all. */
static void job(void *context, int thread) {
  encoding *e = context;
  const tpde_layout *l = &e->codec->layout;
  uint8_t *scratch = malloc((size_t)l->word_bytes * l->chunk_words);
  (void)thread;
  for (int i; (i = atomic_fetch_add(&e->next, 1)) < e->count;) {
    if (scratch) encode_range(e, &e->ranges[i], scratch);
    else e->ranges[i].code = TPDE_E_MEMORY;
  }
  free(scratch);
}

uint64_t tpde_encode_bound(const tpde_layout *layout, uint64_t words, uint64_t chunks) {
  if (!layout || !tpde_layout_valid(layout)) return 0;
  /* Every plane raw and padded, the chunk padded to a unit, and what write_lanes may touch beyond. */
  return words * layout->word_bytes + chunks * (16u * layout->word_bytes + (1u << layout->unit_log2) + 16u);
}

int tpde_encode(const tpde_codec *codec, const void *words, uint64_t first, uint64_t count, uint64_t offset,
                uint8_t *out, uint64_t out_bytes, uint8_t *index, tpde_extent *extents, int *extent_count,
                uint32_t *max_chunk, uint32_t *max_stream, int threads, tpde_error *error) {
  encoding e = {.codec = codec, .k = tpde_active(), .words = words, .first = first, .out = out, .index = index};
  if (!codec || !words || !out || !index || !extents || !extent_count || !max_chunk || !max_stream || threads < 1)
    return tpde_fail(error, TPDE_E_ARGUMENT, "a null pointer or no thread", UINT64_MAX, -1, 0, 0);
  const tpde_layout *l = &codec->layout;
  uint64_t chunks = tpde_chunk_count(l), unit = 1ull << l->unit_log2, at = 0, start, i = first;
  if (first > chunks || count > chunks - first || offset % unit || offset >> l->unit_log2 > UINT32_MAX ||
      l->chunk_words > MAX_PREFIX_CHUNK_WORDS)
    return tpde_fail(error, TPDE_E_ARGUMENT, "no such chunks, or an offset or chunk size that cannot be",
                     UINT64_MAX, -1, first + count, chunks);
  for (int t = 0; t < l->tables; t++)
    if (!codec->tables[t].encode)
      return tpde_fail(error, TPDE_E_ARGUMENT, "the codec was opened for decoding only", UINT64_MAX, -1, 0, 1);
  *extent_count = 0;
  if (!count) return TPDE_OK;
  if (threads > TPDE_MAX_THREADS) threads = TPDE_MAX_THREADS;
  e.count = threads == 1 ? 1 : threads * TPDE_EXTENTS;
  if ((uint64_t)e.count > (count + MIN_CHUNKS - 1) / MIN_CHUNKS)
    e.count = (int)((count + MIN_CHUNKS - 1) / MIN_CHUNKS);
  if (threads > e.count) threads = e.count;
  e.ranges = calloc((size_t)e.count, sizeof *e.ranges);
  if (!e.ranges) return tpde_fail(error, TPDE_E_MEMORY, "out of memory", UINT64_MAX, -1, 0, sizeof *e.ranges);
  atomic_init(&e.next, 0);
  tpde_chunk_words(l, first, &e.words_start);
  for (int t = 0; t < e.count; t++) {
    range *r = &e.ranges[t];
    uint64_t stop = first + count * (uint64_t)(t + 1) / (uint64_t)e.count, begin, end;
    r->first = i;
    r->count = stop - i;
    r->start = at;
    tpde_chunk_words(l, i, &begin);
    end = begin;
    if (r->count) end = tpde_chunk_words(l, stop - 1, &start) + start;
    at += tpde_encode_bound(l, end - begin, r->count);
    i = stop;
  }
  int code = TPDE_OK;
  if (at > out_bytes)
    code = tpde_fail(error, TPDE_E_SPACE, "the output buffer is too small", UINT64_MAX, -1, out_bytes, at);
  if (!code) tpde_parallel(threads, job, &e);
  for (int t = 0; t < e.count && !code; t++) {
    range *r = &e.ranges[t];
    if (r->code) {
      code = tpde_fail(error, r->code, "out of memory", UINT64_MAX, -1, 0, 0);
      break;
    }
    if ((offset + r->used) >> l->unit_log2 > UINT32_MAX) {
      code = tpde_fail(error, TPDE_E_SPACE, "the blob outgrows its 32-bit offsets", r->first, -1,
                       offset + r->used, (uint64_t)UINT32_MAX << l->unit_log2);
      break;
    }
    for (uint64_t c = r->first; c < r->first + r->count; c++) {
      uint8_t *record = index + TPDE_RECORD_BYTES * (c - first);
      store32(record, load32(record) + (uint32_t)(offset >> l->unit_log2));
    }
    extents[t] = (tpde_extent){.start = r->start, .bytes = r->used};
    offset += r->used;
    if (r->max_chunk > *max_chunk) *max_chunk = r->max_chunk;
    if (r->max_stream > *max_stream) *max_stream = r->max_stream;
  }
  *extent_count = code ? 0 : e.count;
  free(e.ranges);
  return code;
}
