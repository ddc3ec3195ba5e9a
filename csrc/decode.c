/* decode.c: chunks to words, format.md 4 and 5. */
#include <stdatomic.h>
#include <stdlib.h>

#include "internal.h"

#define BATCH 8u           /* chunks that a thread takes at least */
#ifndef HUGE_PAGE            /* less in fuzzing, whose tensors are small */
#define HUGE_PAGE (2u << 20) /* two threads that fault in one would both clear it */
#endif

typedef struct decoding {
  const tpde_codec *codec;
  const kernels *k;
  const uint8_t *index, *data;
  uint64_t first, count, data_offset, data_bytes, end_offset, out_start;
  uint8_t *out;
  uint64_t threads;
  atomic_uint_fast64_t next;
  atomic_flag failed;
  tpde_error error;
} decoding;

/* Read one coded plane from p, which has `bytes` bytes of its chunk left, of which and of what follows in
 * memory `readable` may be touched: into words at once, or where `to` is NULL into `plane`. Returns the bytes it
 * took, or 0 with *error set. */
static size_t read_plane(const decoding *d, const table *t, const uint8_t *p, size_t bytes, size_t readable,
                         uint32_t n, uint8_t *plane, halves *to, uint8_t *spare, uint64_t chunk, int number,
                         tpde_error *error) {
  uint32_t start[TPDE_LANES + 1], places = 16u / d->codec->layout.word_bytes;
  int groups = (int)((n + TPDE_LANES * places - 1) / (TPDE_LANES * places));
  if (bytes < LANE_HEADER) {
    tpde_fail(error, TPDE_E_CHUNK, "the chunk ends inside a coded plane", chunk, number, bytes, LANE_HEADER);
    return 0;
  }
  if (p[2] > MAX_SHIFT || p[3]) {
    tpde_fail(error, TPDE_E_CHUNK, "a coded plane's header is not valid", chunk, number, p[2], MAX_SHIFT);
    return 0;
  }
  start[0] = 0;
  for (int l = 0; l < TPDE_LANES; l++) start[l + 1] = start[l] + load16(p) + ((uint32_t)p[4 + l] << p[2]);
  size_t stream = (start[TPDE_LANES] + 7) / 8, took = align_up((uint32_t)(LANE_HEADER + stream), 4);
  if (took > bytes) {
    tpde_fail(error, TPDE_E_CHUNK, "the chunk ends inside a coded plane", chunk, number, bytes, took);
    return 0;
  }
  const uint8_t *bits = p + LANE_HEADER;
  size_t slack = LANE_SLACK((uint32_t)groups * places);
  if (readable < LANE_HEADER + stream + slack) { /* one of the last chunks: reads would leave the buffer */
    memcpy(spare, bits, stream);
    memset(spare + stream, 0, slack);
    bits = spare;
  }
  int lane = to ? d->k->read_halves(t, bits, start, groups, to)
                : d->k->read_lanes(t, bits, start, (int)places, groups, plane);
  if (lane) {
    tpde_fail(error, TPDE_E_CHUNK, "a lane's codewords run past its bits", chunk, number, (uint64_t)lane - 1,
              TPDE_LANES);
    return 0;
  }
  return took;
}

/* Ask for the next chunk's bytes before this one is decoded: 4 % faster on tensors larger than the caches. */
static void prefetch(const uint8_t *p, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i);
}

static int decode_chunk(const decoding *d, uint64_t i, uint8_t *scratch, tpde_error *error) {
  const tpde_layout *l = &d->codec->layout;
  const uint8_t *r = d->index + TPDE_RECORD_BYTES * (i - d->first);
  uint64_t begin = (uint64_t)load32(r) << l->unit_log2, word;
  uint64_t end = i + 1 - d->first < d->count ? (uint64_t)load32(r + TPDE_RECORD_BYTES) << l->unit_log2
                                             : d->end_offset;
  uint32_t n = tpde_chunk_words(l, i, &word), modes = load16(r + 8), raw = align_up(n, 16);
  uint8_t *planes[TPDE_MAX_PLANES], *spare = scratch + (size_t)l->word_bytes * l->chunk_words;
  uint8_t *out = d->out + (word - d->out_start) * l->word_bytes;
  if (begin < d->data_offset || end < begin || end > d->data_offset + d->data_bytes)
    return tpde_fail(error, TPDE_E_INDEX, "a chunk lies outside the bytes at hand", i, -1, end,
                     d->data_offset + d->data_bytes);
  const uint8_t *p = d->data + (begin - d->data_offset), *stop = d->data + (end - d->data_offset),
                *limit = d->data + d->data_bytes;
  size_t ahead = (size_t)(stop - p) < (size_t)(limit - stop) ? (size_t)(stop - p) : (size_t)(limit - stop);
  for (int plane = 0; plane < l->word_bytes; plane++) {
    uint32_t mode = modes >> (2 * plane) & 3;
    planes[plane] = scratch + (size_t)plane * l->chunk_words;
    if (mode == MODE_FILL) memset(planes[plane], r[11], n);
    if (mode > MODE_CODED)
      return tpde_fail(error, TPDE_E_INDEX, "unknown mode of a plane", i, plane, mode, MODE_CODED);
    if (mode != MODE_RAW) continue;
    if ((size_t)(stop - p) < raw)
      return tpde_fail(error, TPDE_E_CHUNK, "the chunk ends inside a raw plane", i, plane,
                       (uint64_t)(stop - p), raw);
    planes[plane] = (uint8_t *)(uintptr_t)p; /* merged straight from the file's bytes, never written */
    p += raw;
  }
  halves to = {.low = planes[0], .words = out, .ahead = stop, .ahead_bytes = ahead};
  int at_once = d->k->read_halves && l->word_bytes == 2 && l->rotate && modes == (MODE_RAW | MODE_CODED << 2) &&
                n % (16 * TPDE_LANES / 2) == 0;
  if (!at_once) prefetch(stop, ahead);
  for (int plane = 0; plane < l->word_bytes; plane++) {
    if ((modes >> (2 * plane) & 3) != MODE_CODED) continue;
    if (!l->table_count[plane])
      return tpde_fail(error, TPDE_E_INDEX, "a coded plane without a table", i, plane, 0, 1);
    int v = r[10] < l->table_count[plane] ? r[10] : l->table_count[plane] - 1;
    size_t took = read_plane(d, &d->codec->tables[l->first_table[plane] + v], p, (size_t)(stop - p),
                             (size_t)(limit - p), n, planes[plane], at_once ? &to : NULL, spare, i, plane, error);
    if (!took) return error->code;
    p += took;
  }
  if (!at_once) {
    d->k->merge(l->word_bytes, l->rotate, planes, n, out);
    to.checksum = d->k->checksum(out, (size_t)n * l->word_bytes);
  }
  if (to.checksum != load32(r + 4))
    return tpde_fail(error, TPDE_E_CHECKSUM, "the checksum does not match", i, -1, to.checksum, load32(r + 4));
  return TPDE_OK;
}

/* How much of the output's huge page lies before chunk i. */
static uint64_t in_page(const decoding *d, uint64_t i) {
  uint64_t word;
  tpde_chunk_words(&d->codec->layout, d->first + i, &word);
  return ((uintptr_t)d->out + (word - d->out_start) * d->codec->layout.word_bytes) % HUGE_PAGE;
}

static uint64_t chunk_bytes(const decoding *d) {
  return (uint64_t)d->codec->layout.chunk_words * d->codec->layout.word_bytes;
}

/* Where the batch of chunks ends that begins with chunk i: before the one that reaches into the output's next huge
 * page, and after a few chunks at the end, so that no thread waits long. The first may reach over from the page before. */
static uint64_t batch_end(const decoding *d, uint64_t i) {
  const uint64_t page = HUGE_PAGE;
  uint64_t chunk = chunk_bytes(d), left = d->count - i, end = in_page(d, i) + chunk;
  if (left * chunk <= d->threads * page) return left < BATCH ? d->count : i + BATCH;
  if (end > page) end -= page; /* as of the next page's chunks: this one comes with them */
  return i + 1 + (end < page ? (page - end) / chunk : 0);
}

static void job(void *context, int thread) {
  decoding *d = context;
  tpde_error error = {0};
  (void)thread;
  /* The planes, and room for a coded plane of any valid size: never larger than its chunk's largest plane
   * plus the lane header, or the chunk is refused when it is copied. */
  size_t spare = 4u * 131072u + 64 + LANE_SLACK(MAX_PREFIX_CHUNK_WORDS / TPDE_LANES);
  uint8_t *scratch = malloc((size_t)d->codec->layout.word_bytes * d->codec->layout.chunk_words + spare);
  if (!scratch) tpde_fail(&error, TPDE_E_MEMORY, "out of memory", UINT64_MAX, -1, 0, d->codec->layout.chunk_words);
  while (!error.code) {
    uint64_t i = atomic_load(&d->next), stop;
    do stop = i < d->count ? batch_end(d, i) : i;
    while (!atomic_compare_exchange_weak(&d->next, &i, stop));
    if (i == stop) break;
    /* What reaches over comes last: threads begin at about the same time, and two that write to one new page both clear
     * all of it. With 64 MiB of new memory that took two threads of a Xeon of 2023 a tenth of their time. */
    uint64_t last = d->threads > 1 && in_page(d, i) + chunk_bytes(d) > HUGE_PAGE ? i++ : stop;
    for (; i < stop && !error.code; i++) decode_chunk(d, d->first + i, scratch, &error);
    if (last < stop && !error.code) decode_chunk(d, d->first + last, scratch, &error);
  }
  if (error.code) {
    atomic_store(&d->next, d->count); /* the others stop too */
    if (!atomic_flag_test_and_set(&d->failed)) d->error = error;
  }
  free(scratch);
}

int tpde_decode(const tpde_codec *codec, const uint8_t *index, uint64_t first, uint64_t count,
                const uint8_t *data, uint64_t data_offset, uint64_t data_bytes, uint64_t end_offset, void *out,
                uint64_t out_bytes, int threads, tpde_error *error) {
  decoding d = {.codec = codec, .k = tpde_active(), .index = index, .data = data, .first = first,
                .count = count, .data_offset = data_offset, .data_bytes = data_bytes,
                .end_offset = end_offset, .out = out, .failed = ATOMIC_FLAG_INIT};
  if (!codec || !index || !data || !out || threads < 1)
    return tpde_fail(error, TPDE_E_ARGUMENT, "a null pointer or no thread", UINT64_MAX, -1, 0, 0);
  const tpde_layout *l = &codec->layout;
  uint64_t chunks = tpde_chunk_count(l), last;
  if (first > chunks || count > chunks - first)
    return tpde_fail(error, TPDE_E_ARGUMENT, "no such chunks", UINT64_MAX, -1, first + count, chunks);
  if (l->chunk_words > MAX_PREFIX_CHUNK_WORDS)
    return tpde_fail(error, TPDE_E_ARGUMENT, "chunks too large for lanes", UINT64_MAX, -1, l->chunk_words,
                     MAX_PREFIX_CHUNK_WORDS);
  if (!count) return TPDE_OK;
  uint32_t n = tpde_chunk_words(l, first + count - 1, &last);
  tpde_chunk_words(l, first, &d.out_start);
  if ((last + n - d.out_start) * l->word_bytes != out_bytes)
    return tpde_fail(error, TPDE_E_ARGUMENT, "the output's size does not fit the chunks", UINT64_MAX, -1,
                     out_bytes, (last + n - d.out_start) * l->word_bytes);
  atomic_init(&d.next, 0);
  if ((uint64_t)threads > (count + BATCH - 1) / BATCH) threads = (int)((count + BATCH - 1) / BATCH);
  d.threads = (uint64_t)threads;
  tpde_parallel(threads, job, &d);
  if (d.error.code) {
    if (error) *error = d.error;
    return d.error.code;
  }
  return TPDE_OK;
}
