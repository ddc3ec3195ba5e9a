/* fuzz_index.c: layouts at their limits (2^60 bytes, segments of one word, invalid fields), the arithmetic of
 * chunks, index maps in exact buffers, and single chunks far inside a huge tensor.
 *
 * Licence: Apache-2.0.
 */
#include "fuzz.h"

typedef unsigned __int128 wide;

/* A number near a power of two or near `near`, or any. */
static uint64_t take_extreme(input *in, uint64_t near) {
  uint32_t how = (uint32_t)take(in, 1);
  if (how < 64) return (1ull << how) + (uint64_t)(int8_t)take(in, 1);
  if (how < 128) return near + (uint64_t)(int8_t)take(in, 1);
  return take(in, how < 192 ? 2 : 8);
}

static void check_chunks(const tpde_layout *l, uint64_t chunks, uint64_t i) {
  uint64_t start, next;
  uint32_t n = tpde_chunk_words(l, i, &start);
  CHECK(n >= 1 && n <= l->chunk_words && start < l->words && n <= l->words - start);
  CHECK(start / l->segment_words == (start + n - 1) / l->segment_words);
  if (i) CHECK(start > 0);
  else CHECK(start == 0);
  if (i + 1 < chunks) {
    tpde_chunk_words(l, i + 1, &next);
    CHECK(next == start + n);
  } else {
    CHECK(start + n == l->words);
  }
}

/* format.md 4.3, told in another way than in the core. */
static int index_right(const tpde_layout *l, const uint8_t *index, uint64_t chunks, uint64_t first_offset,
                       uint64_t blob_bytes, uint32_t max_chunk) {
  for (uint64_t i = 0; i < chunks; i++) {
    const uint8_t *r = index + TPDE_RECORD_BYTES * i;
    wide offset = (wide)load32(r) << l->unit_log2, end = blob_bytes;
    if (i + 1 < chunks) end = (wide)load32(r + TPDE_RECORD_BYTES) << l->unit_log2;
    if (i == 0 && offset != first_offset) return 0;
    if (end < offset || end > blob_bytes || end - offset > max_chunk) return 0;
    int fills = 0, coded = 0;
    for (int p = 0; p < 8; p++) {
      int mode = r[8 + p / 4] >> (2 * (p % 4)) & 3;
      if (mode == 3 || (mode && p >= l->word_bytes)) return 0;
      fills += mode == 1;
      coded += mode == 2;
    }
    if (r[10] && !(coded && l->tables)) return 0;
    if (!fills && r[11]) return 0;
  }
  return 1;
}

static void check_index(input *in, const tpde_layout *l, uint64_t chunks) {
  uint8_t *index = exact(chunks * TPDE_RECORD_BYTES);
  uint64_t first = take(in, 1) << l->unit_log2, at = first;
  uint32_t mode = (uint32_t)take(in, 1), max_chunk = mode & 1 ? (uint32_t)take(in, 4) : UINT32_MAX;
  for (uint64_t i = 0; i < chunks; i++) {
    uint8_t *r = index + TPDE_RECORD_BYTES * i;
    take_bytes(in, r, TPDE_RECORD_BYTES);
    if (mode & 2) continue;
    store32(r, (uint32_t)(at >> l->unit_log2));
    at += (uint64_t)take(in, 1) << l->unit_log2;
    store16(r + 8, (uint16_t)(load16(r + 8) & 0x5555 & ((1u << 2 * l->word_bytes) - 1)));
    r[10] = 0;
    if (!load16(r + 8)) r[11] = 0;
  }
  if (mode & 4) at = take_extreme(in, at);
  if (mode & 8) first = take_extreme(in, first);
  tpde_error error = {0};
  int code = tpde_index_check(l, index, first, at, max_chunk, &error);
  CHECK(code == (index_right(l, index, chunks, first, at, max_chunk) ? TPDE_OK : TPDE_E_INDEX));
  free(index);
}

/* Encode and decode up to 3 chunks anywhere in the tensor: offsets of words are near 2^60. */
static void check_window(input *in, const tpde_layout *l, uint64_t chunks) {
  uint64_t count = 1 + take(in, 1) % 3, first = take_extreme(in, chunks - 1) % chunks, begin, last, end, used = 0;
  if (count > chunks - first) count = chunks - first;
  tpde_chunk_words(l, first, &begin);
  uint32_t n = tpde_chunk_words(l, first + count - 1, &last);
  uint64_t words = last + n - begin, bytes = words * l->word_bytes, bound = tpde_encode_bound(l, words, count);
  if (bytes > MAX_OUTPUT) return;
  CHECK(bound >= bytes);
  uint8_t *from = exact(bytes), *to = exact(bytes), *out = exact(bound), *index = exact(count * TPDE_RECORD_BYTES);
  tpde_layout plain = *l; /* without tables: chunks of raw and filled planes */
  plain.tables = 0;
  memset(plain.first_table, 0, sizeof plain.first_table);
  memset(plain.table_count, 0, sizeof plain.table_count);
  tpde_codec *codec = NULL;
  tpde_error error = {0};
  int code;
  uint32_t max_chunk = 0, max_stream = 0;
  uint64_t offset = take_extreme(in, 1ull << 44) >> l->unit_log2 << l->unit_log2;
  take_bytes(in, from, bytes);
  CHECK(!tpde_codec_open(&plain, NULL, 0, 1, &codec, &error));
  code = tpde_encode(codec, from, first, count, offset, out, bound, &used, index, &max_chunk, &max_stream, 1,
                     &error);
  if (l->chunk_words > MAX_PREFIX_CHUNK_WORDS) CHECK(code == TPDE_E_ARGUMENT);
  else CHECK(!code || code == TPDE_E_SPACE || (code == TPDE_E_ARGUMENT && offset >> l->unit_log2 > UINT32_MAX));
  if (!code) {
    end = offset + used;
    CHECK(end >= offset);
    CHECK(!tpde_decode(codec, index, first, count, out, offset, used, end, to, bytes, 1, &error));
    CHECK(!memcmp(from, to, bytes));
    /* A caller's wrong numbers are refused, or harmless. */
    uint64_t wrong[4] = {take_extreme(in, first), take_extreme(in, offset), take_extreme(in, end),
                         take_extreme(in, bytes)};
    if (wrong[3] != bytes)
      CHECK(tpde_decode(codec, index, first, count, out, offset, used, end, to, wrong[3], 1, &error));
    tpde_decode(codec, index, first, count, out, wrong[1], used, wrong[2], to, bytes, 1, &error);
    tpde_decode(codec, index, wrong[0], count, out, offset, used, end, to, bytes, 1, &error);
  }
  tpde_codec_close(codec);
  free(from);
  free(to);
  free(out);
  free(index);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
  input in = {bytes, size};
  tpde_layout l = {0};
  uint32_t mode = (uint32_t)take(&in, 1);
  l.word_bytes = (uint8_t)(1u << (mode & 3));
  l.words = mode & 4 ? take_extreme(&in, (1ull << 60) / l.word_bytes) : take(&in, 3);
  l.segment_words = take_extreme(&in, l.words);
  if (mode & 8 && l.words) l.segment_words = 1 + l.segment_words % l.words;
  l.chunk_words = 512u << take(&in, 1) % 8;
  l.rotate = mode >> 4 & 1;
  l.unit_log2 = (uint8_t)(4 + take(&in, 1) % 9);
  if (mode >= 224) { /* fields that cannot be */
    l.word_bytes = (uint8_t)take(&in, 1);
    l.rotate = (uint8_t)take(&in, 1);
    l.unit_log2 = (uint8_t)take(&in, 1);
    l.tables = (uint8_t)take(&in, 1);
    l.chunk_words = (uint32_t)take_extreme(&in, 65536);
    take_bytes(&in, l.first_table, sizeof l.first_table);
    take_bytes(&in, l.table_count, sizeof l.table_count);
  }
  uint64_t chunks = tpde_chunk_count(&l), some = take(&in, 4);
  tpde_encode_bound(&l, l.words, some);
  if (!tpde_layout_valid(&l) || !l.words) {
    CHECK(!chunks);
    return 0;
  }
  wide full = l.words / l.segment_words, rest = l.words % l.segment_words, size_of = l.chunk_words;
  CHECK(chunks == full * ((l.segment_words + size_of - 1) / size_of) + (rest + size_of - 1) / size_of);
  check_chunks(&l, chunks, 0);
  check_chunks(&l, chunks, chunks - 1);
  check_chunks(&l, chunks, take_extreme(&in, chunks / 2) % chunks);
  if (chunks <= 2048) check_index(&in, &l, chunks);
  check_window(&in, &l, chunks);
  return 0;
}
