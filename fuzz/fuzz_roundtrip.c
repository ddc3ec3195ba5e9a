/* fuzz_roundtrip.c: words of any layout, encoded and decoded. The words must come back, whatever the tables
 * are, and neither the number of threads nor the SIMD path may change a byte of what is written.
 *
 * Licence: Apache-2.0.
 */
#include "fuzz.h"

static void check_same(const encoded *a, const encoded *b) {
  CHECK(a->bytes == b->bytes && a->chunks == b->chunks);
  CHECK(a->max_chunk == b->max_chunk && a->max_stream == b->max_stream);
  CHECK(!memcmp(a->data, b->data, a->bytes));
  CHECK(!memcmp(a->index, b->index, a->chunks * TPDE_RECORD_BYTES));
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
  input in = {bytes, size};
  uint8_t made[TPDE_MAX_TABLE_SECTION];
  char names[MAX_PATHS][16];
  int paths = simd_paths(names);
  uint32_t mode = (uint32_t)take(&in, 1), section_bytes = 0;
  tpde_error error = {0};
  CHECK(!tpde_simd_select(names[paths - 1]));
  tpde_layout l = take_layout(&in, 256);
  uint8_t *words = take_words(&in, &l);
  if (mode & 128) { /* the fuzzer's own words, as many as there are */
    uint64_t n = l.words * l.word_bytes;
    take_bytes(&in, words, in.left < n ? in.left : n);
  }
  if (mode & 1) {
    section_bytes = take_section(&in, &l, !(mode & 2), made);
    take_planes(&in, &l);
  } else {
    uint64_t estimate, sample = mode & 2 ? 1 + take(&in, 3) % l.words : l.words;
    uint8_t *part = exact(sample * l.word_bytes);
    memcpy(part, words, sample * l.word_bytes);
    CHECK(!tpde_plan(&l, part, sample, 1 + (mode >> 2) % 4, made, &section_bytes, &estimate, &error));
    free(part);
    CHECK(section_bytes <= TPDE_MAX_TABLE_SECTION);
    if (mode & 16) take_planes(&in, &l); /* tables that do not suit their planes, in other numbers */
  }
  uint8_t *section = exact(section_bytes);
  memcpy(section, made, section_bytes);
  tpde_codec *codec = NULL;
  int code = tpde_codec_open(&l, section, section_bytes, 1, &codec, &error);
  CHECK(!code || (code == TPDE_E_ARGUMENT && (mode & 3) == 3)); /* not every table can be written with */
  if (!code) {
    uint64_t offset = take(&in, 1) << l.unit_log2, n = l.words * l.word_bytes;
    encoded one = encode_all(codec, &l, words, offset, 1), three = encode_all(codec, &l, words, offset, 3);
    check_same(&one, &three);
    encoded_free(&three);
    for (int i = 0; i + 1 < paths; i++) {
      CHECK(!tpde_simd_select(names[i]));
      encoded other = encode_all(codec, &l, words, offset, 1);
      check_same(&one, &other);
      encoded_free(&other);
    }
    uint64_t end = offset + one.bytes;
    CHECK(!tpde_index_check(&l, one.index, offset, end, one.max_chunk, &error));
    for (int i = 0; i < paths; i++) {
      uint8_t *out = exact(n);
      CHECK(!tpde_simd_select(names[i]));
      CHECK(!tpde_decode(codec, one.index, 0, one.chunks, one.data, offset, one.bytes, end, out, n, 1 + 2 * (i & 1),
                         &error));
      CHECK(!memcmp(out, words, n));
      free(out);
    }
    encoded_free(&one);
  }
  tpde_codec_close(codec);
  free(section);
  free(words);
  return 0;
}
