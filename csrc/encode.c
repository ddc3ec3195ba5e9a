/* encode.c: words to chunks, format.md 4.4 and 5. */
#include <pthread.h>
#include <stdlib.h>

#include "internal.h"

#ifndef BATCH_BYTES              /* less in fuzzing, whose tensors are small */
#define BATCH_BYTES (128u << 10) /* for what a thread makes at a time: it stays in its cache until it is copied */
#endif
#define HELD 16u /* batches for each thread that may wait for their place: others go on while one is held up */
#define NOT_MADE UINT64_MAX

typedef struct encoding {
  const tpde_codec *codec;
  const kernels *k;
  const uint8_t *words, *words_end;
  uint64_t first, count, words_start, offset;
  uint8_t *out, *index;
  const uint8_t *out_end; /* where chunks go straight to their place, else NULL */
  uint64_t batch, batches, held; /* chunks in one, how many there are, how many may be taken and not placed */
  uint8_t *scratch;              /* of each thread */
  size_t scratch_bytes, made_bytes;
  pthread_mutex_t lock; /* of what follows */
  pthread_cond_t moved;
  uint64_t next, placed, used; /* batches taken, batches at their place, and the bytes of these */
  uint64_t *sizes;             /* of batch i in [i % held], until it is placed */
  uint8_t **made, **spare;     /* its buffer there; buffers without one, of which the last to come goes first: it is
                                * in a cache */
  uint64_t spares;
  int placing; /* whether a thread does */
  uint32_t max_chunk, max_stream;
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

static void write_lane_header(const lanes *c, uint8_t *out) {
  store16(out, (uint16_t)c->shortest);
  out[2] = c->shift;
  out[3] = 0;
  for (int l = 0; l < TPDE_LANES; l++) out[4 + l] = (uint8_t)((c->bits[l] - c->shortest) >> c->shift);
}

/* Bytes of a coded plane at most: an escape takes 20 bits, or 28 for two words. */
static size_t coded_bytes(const tpde_layout *l) { return LANE_HEADER + 3u * (size_t)l->chunk_words + 16; }

/* What a thread needs to encode a chunk: its planes, and those with one table coded. */
static size_t scratch_bytes(const tpde_layout *l) {
  size_t bytes = (size_t)l->word_bytes * l->chunk_words;
  for (int p = 0; p < l->word_bytes; p++) bytes += l->table_count[p] == 1 ? coded_bytes(l) : 0;
  return bytes;
}

/* What is asked for while the first of `planes` planes is written: a part of what follows a chunk of so many bytes. */
static upcoming after(const encoding *e, const uint8_t *words, const uint8_t *out, size_t bytes, uint32_t planes) {
  upcoming next = {words + bytes, NULL, (size_t)(e->words_end - words) - bytes};
  if (next.bytes > bytes) next.bytes = bytes;
  if (e->out_end && (size_t)(e->out_end - out) >= 2 * bytes) next.write = out + bytes;
  if (planes) next.bytes /= planes;
  return next;
}

static void move_on(upcoming *next) {
  next->read += next->bytes;
  if (next->write) next->write += next->bytes;
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
  uint8_t *planes[TPDE_MAX_PLANES], *coded[TPDE_MAX_PLANES] = {0}, *at = out, fill = 0;
  lanes sized[TPDE_MAX_PLANES], kept[TPDE_MAX_PLANES]; /* of this variant, and of the best */
  uint32_t counted[TPDE_MAX_PLANES][TABLES_AT_ONCE][TPDE_LANES]; /* for the tables that share these lengths: */
  const uint32_t *lengths[TPDE_MAX_PLANES] = {0};

  for (int p = 0; p < b; p++, scratch += l->chunk_words) planes[p] = scratch;
  for (int p = 0; p < b; p++) {
    if (l->table_count[p] != 1) continue;
    coded[p] = scratch;
    scratch += coded_bytes(l);
  }
  e->k->split(b, l->rotate, words, n, planes);
  for (int p = 0, filled = 0; p < b; p++) {
    if (memcmp(planes[p], planes[p] + 1, n - 1)) continue;
    if (!filled++) fill = planes[p][0];
    if (planes[p][0] == fill) modes |= MODE_FILL << (2 * p);
  }
  uint32_t coding = 0;
  for (int p = 0; p < b; p++) {
    if (l->table_count[p] > variants) variants = l->table_count[p];
    coding += l->table_count[p] && (modes >> (2 * p) & 3) != MODE_FILL;
  }
  upcoming next = after(e, words, out, (size_t)n * b, coding);
  for (uint32_t v = 0; v < variants; v++) {
    uint64_t size = 0;
    for (int p = 0; p < b; p++) {
      if ((modes >> (2 * p) & 3) == MODE_FILL || !l->table_count[p]) continue;
      if (v < l->table_count[p]) { /* else as with the variant before */
        const table *t = &tables[l->first_table[p] + v];
        pad_plane(t, planes[p], n, padded);
        if (coded[p]) { /* nothing to choose from: bits are counted as they are written */
          memset(sized[p].bits, 0, sizeof sized[p].bits);
          e->k->write_lanes(t, planes[p], places, groups, sized[p].bits, coded[p] + LANE_HEADER, &next);
          move_on(&next);
        } else {
          if (t->lengths != lengths[p] || padded != n) { /* what it is padded with may differ */
            e->k->lane_bits(t, planes[p], places, groups, counted[p]);
            lengths[p] = t->lengths;
          }
          memcpy(sized[p].bits, counted[p][t->counted], sizeof sized[p].bits);
        }
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
    if (coded[p] && !kept[p].shift) { /* as it was written: lanes' lengths are not rounded */
      memcpy(at + LANE_HEADER, coded[p] + LANE_HEADER, kept[p].size - LANE_HEADER);
    } else {
      pad_plane(t, planes[p], n, padded);
      if (coded[p]) next.bytes = 0; /* this plane's part was asked for */
      e->k->write_lanes(t, planes[p], places, groups, kept[p].bits, at + LANE_HEADER, &next);
      move_on(&next);
    }
    write_lane_header(&kept[p], at);
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

/* Encode chunks i to stop, counted from the first, one after the other; returns their bytes. */
static uint64_t encode_chunks(const encoding *e, uint64_t i, uint64_t stop, uint8_t *scratch, uint8_t *out,
                              uint32_t *max_chunk, uint32_t *max_stream) {
  uint64_t used = 0;
  for (; i < stop; i++) {
    uint8_t *record = e->index + TPDE_RECORD_BYTES * i;
    uint32_t size = encode_chunk(e, e->first + i, scratch, out + used, record, max_stream);
    store32(record, (uint32_t)(used >> e->codec->layout.unit_log2)); /* made absolute by set_offsets */
    used += size;
    if (size > *max_chunk) *max_chunk = size;
  }
  return used;
}

/* Chunks i to stop, one after the other, begin at `at` in the output. */
static void set_offsets(const encoding *e, uint64_t i, uint64_t stop, uint64_t at) {
  for (; i < stop; i++) {
    uint8_t *record = e->index + TPDE_RECORD_BYTES * i;
    store32(record, load32(record) + (uint32_t)((e->offset + at) >> e->codec->layout.unit_log2));
  }
}

static uint64_t batch_start(const encoding *e, uint64_t number) {
  return number < e->batches ? number * e->batch : e->count;
}

/* Copy the batches that are made to their place, in order, as far as none is missing. One thread at a time does it,
 * since two that write to one new huge page would both clear it; none waits for it. Called and left with the lock. */
static void place(encoding *e) {
  if (e->placing) return; /* that thread looks again before it stops */
  e->placing = 1;
  for (uint64_t i, size; (size = e->sizes[(i = e->placed) % e->held]) != NOT_MADE;) {
    pthread_mutex_unlock(&e->lock);
    e->k->copy_out(e->out + e->used, e->made[i % e->held], size);
    set_offsets(e, batch_start(e, i), batch_start(e, i + 1), e->used);
    pthread_mutex_lock(&e->lock);
    e->sizes[i % e->held] = NOT_MADE;
    e->spare[e->spares++] = e->made[i % e->held];
    e->used += size;
    e->placed++;
    pthread_cond_broadcast(&e->moved);
  }
  e->placing = 0;
}

/* Threads take one batch after the other; one that is held up does not hold up the others until they have made all
 * that may be held. */
static void job(void *context, int thread) {
  encoding *e = context;
  uint32_t max_chunk = 0, max_stream = 0;
  pthread_mutex_lock(&e->lock);
  while (e->next < e->batches) {
    if (!e->spares) {
      pthread_cond_wait(&e->moved, &e->lock);
      continue;
    }
    uint64_t i = e->next++, size;
    uint8_t *made = e->made[i % e->held] = e->spare[--e->spares];
    pthread_mutex_unlock(&e->lock);
    size = encode_chunks(e, batch_start(e, i), batch_start(e, i + 1),
                         e->scratch + (size_t)thread * e->scratch_bytes, made, &max_chunk, &max_stream);
    pthread_mutex_lock(&e->lock);
    e->sizes[i % e->held] = size;
    place(e);
  }
  if (max_chunk > e->max_chunk) e->max_chunk = max_chunk;
  if (max_stream > e->max_stream) e->max_stream = max_stream;
  pthread_mutex_unlock(&e->lock);
}

uint64_t tpde_encode_bound(const tpde_layout *layout, uint64_t words, uint64_t chunks) {
  if (!layout || !tpde_layout_valid(layout)) return 0;
  /* Every plane raw and padded, the chunk padded to a unit, and what write_lanes may touch beyond. */
  return words * layout->word_bytes + chunks * (16u * layout->word_bytes + (1u << layout->unit_log2) + 16u);
}

int tpde_encode(const tpde_codec *codec, const void *words, uint64_t first, uint64_t count, uint64_t offset,
                uint8_t *out, uint64_t out_bytes, uint64_t *used, uint8_t *index, uint32_t *max_chunk,
                uint32_t *max_stream, int threads, tpde_error *error) {
  encoding e = {.codec = codec, .k = tpde_active(), .words = words, .first = first, .count = count,
                .offset = offset, .out = out, .index = index, .lock = PTHREAD_MUTEX_INITIALIZER,
                .moved = PTHREAD_COND_INITIALIZER};
  if (!codec || !words || !out || !used || !index || !max_chunk || !max_stream || threads < 1)
    return tpde_fail(error, TPDE_E_ARGUMENT, "a null pointer or no thread", UINT64_MAX, -1, 0, 0);
  const tpde_layout *l = &codec->layout;
  uint64_t chunks = tpde_chunk_count(l), unit = 1ull << l->unit_log2, start;
  if (first > chunks || count > chunks - first || offset % unit || offset >> l->unit_log2 > UINT32_MAX ||
      l->chunk_words > MAX_PREFIX_CHUNK_WORDS)
    return tpde_fail(error, TPDE_E_ARGUMENT, "no such chunks, or an offset or chunk size that cannot be",
                     UINT64_MAX, -1, first + count, chunks);
  for (int t = 0; t < l->tables; t++)
    if (!codec->tables[t].encode)
      return tpde_fail(error, TPDE_E_ARGUMENT, "the codec was opened for decoding only", UINT64_MAX, -1, 0, 1);
  *used = 0;
  if (!count) return TPDE_OK;
  tpde_chunk_words(l, first, &e.words_start);
  uint64_t end = tpde_chunk_words(l, first + count - 1, &start) + start;
  e.words_end = e.words + (end - e.words_start) * l->word_bytes;
  uint64_t bound = tpde_encode_bound(l, end - e.words_start, count);
  if (bound > out_bytes)
    return tpde_fail(error, TPDE_E_SPACE, "the output buffer is too small", UINT64_MAX, -1, out_bytes, bound);
  e.scratch_bytes = scratch_bytes(l);
  e.made_bytes = tpde_encode_bound(l, l->chunk_words, 1);
  e.batch = e.made_bytes < BATCH_BYTES ? BATCH_BYTES / e.made_bytes : 1;
  e.made_bytes *= e.batch;
  e.batches = (count + e.batch - 1) / e.batch;
  if (threads > TPDE_MAX_THREADS) threads = TPDE_MAX_THREADS;
  if ((uint64_t)threads > e.batches) threads = (int)e.batches;
  e.held = threads == 1 ? 0 : (uint64_t)threads * HELD;
  if (e.held > e.batches) e.held = e.batches;
  size_t each = sizeof *e.sizes + sizeof *e.made + sizeof *e.spare + e.made_bytes;
  size_t memory = (size_t)threads * e.scratch_bytes + e.held * each;
  e.sizes = malloc(memory);
  if (!e.sizes) return tpde_fail(error, TPDE_E_MEMORY, "out of memory", UINT64_MAX, -1, 0, memory);
  e.made = (uint8_t **)(e.sizes + e.held);
  e.spare = e.made + e.held;
  e.scratch = (uint8_t *)(e.spare + e.held);
  uint8_t *buffers = e.scratch + (size_t)threads * e.scratch_bytes;
  for (; e.spares < e.held; e.spares++) {
    e.sizes[e.spares] = NOT_MADE;
    e.spare[e.spares] = buffers + e.spares * e.made_bytes;
  }
  if (threads == 1) { /* straight to its place */
    e.out_end = out + out_bytes;
    e.used = encode_chunks(&e, 0, count, e.scratch, out, &e.max_chunk, &e.max_stream);
    set_offsets(&e, 0, count, 0);
  } else {
    tpde_parallel(threads, job, &e);
  }
  free(e.sizes);
  if ((offset + e.used) >> l->unit_log2 > UINT32_MAX)
    return tpde_fail(error, TPDE_E_SPACE, "the blob outgrows its 32-bit offsets", first, -1, offset + e.used,
                     (uint64_t)UINT32_MAX << l->unit_log2);
  *used = e.used;
  if (e.max_chunk > *max_chunk) *max_chunk = e.max_chunk;
  if (e.max_stream > *max_stream) *max_stream = e.max_stream;
  return TPDE_OK;
}
