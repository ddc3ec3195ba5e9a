/* fuzz_decode.c: tensors from a hostile file. They are either made of the fuzzer's bytes throughout, or encoded
 * and then damaged at places of the fuzzer's choice; decoding stays inside exactly sized buffers, and all SIMD
 * paths agree on the error or on the words.
 *
 * Licence: Apache-2.0.
 */
#include "fuzz.h"

typedef struct tensor {
  tpde_layout layout;
  uint8_t *section, *index, *data;
  uint32_t section_bytes, max_chunk;
  uint64_t chunks, offset, bytes; /* of the chunks: where they start, and how many bytes they have */
} tensor;

/* Tables, records and chunks of the fuzzer's bytes. */
static void make_raw(input *in, tensor *t, uint32_t mode) {
  uint8_t made[TPDE_MAX_TABLE_SECTION];
  tpde_layout *l = &t->layout;
  uint64_t at, total;
  if (mode & 2) {
    l->tables = (uint8_t)take(in, 1) % 4;
    t->section_bytes = (uint32_t)take(in, 1);
    take_bytes(in, made, t->section_bytes);
  } else {
    t->section_bytes = take_section(in, l, 0, made);
  }
  take_planes(in, l);
  t->section = exact(t->section_bytes);
  memcpy(t->section, made, t->section_bytes);
  t->chunks = tpde_chunk_count(l);
  t->index = exact(t->chunks * TPDE_RECORD_BYTES);
  t->offset = at = take(in, 1) << l->unit_log2;
  for (uint64_t i = 0; i < t->chunks; i++) {
    uint8_t *r = t->index + TPDE_RECORD_BYTES * i;
    take_bytes(in, r, TPDE_RECORD_BYTES);
    if (mode & 4 && i) continue; /* offsets as they come */
    store32(r, (uint32_t)(at >> l->unit_log2));
    if (at - t->offset < MAX_OUTPUT) at += take(in, 1) << l->unit_log2;
  }
  t->max_chunk = mode & 8 ? (uint32_t)take(in, 4) : UINT32_MAX;
  /* The data: what is left of the input, over and over, or once, however much the records promise. */
  total = at - t->offset;
  if (mode & 16) total = in->left;
  t->bytes = total;
  t->data = exact(total);
  for (uint64_t i = 0; i < total; i++) t->data[i] = in->left ? in->at[i % in->left] : (uint8_t)i;
}

/* A valid tensor, with up to 7 damages. */
static void make_damaged(input *in, tensor *t, uint32_t mode) {
  uint8_t made[TPDE_MAX_TABLE_SECTION];
  tpde_layout *l = &t->layout;
  tpde_error error = {0};
  tpde_codec *codec = NULL;
  uint64_t estimate;
  uint8_t *words = take_words(in, l);
  if (mode & 6) { /* hand-made tables mostly: planning takes longer than all the rest */
    t->section_bytes = take_section(in, l, 1, made);
    take_planes(in, l);
  } else {
    CHECK(!tpde_plan(l, words, l->words, 1 + (mode >> 3) % 4, made, &t->section_bytes, &estimate, &error));
  }
  CHECK(!tpde_codec_open(l, made, t->section_bytes, 1, &codec, &error));
  t->offset = take(in, 1) << l->unit_log2;
  encoded e = encode_all(codec, l, words, t->offset, 1);
  tpde_codec_close(codec);
  free(words);
  t->section = exact(t->section_bytes);
  memcpy(t->section, made, t->section_bytes);
  t->index = e.index;
  t->data = e.data;
  t->chunks = e.chunks;
  t->bytes = e.bytes;
  t->max_chunk = e.max_chunk;
  for (uint32_t i = (uint32_t)take(in, 1) % 8; i; i--) {
    uint32_t where = (uint32_t)take(in, 1), at = (uint32_t)take(in, 3), flip = (uint32_t)take(in, 1);
    uint64_t chunk = at % t->chunks, start = (uint64_t)load32(t->index + TPDE_RECORD_BYTES * chunk) << l->unit_log2;
    if (where < 32 && t->section_bytes) {
      t->section[at % t->section_bytes] ^= (uint8_t)flip;
    } else if (where < 96) {
      t->index[at % (TPDE_RECORD_BYTES * t->chunks)] ^= (uint8_t)flip;
    } else if (where < 176 && start >= t->offset && start - t->offset + (where & 63) < t->bytes) {
      t->data[start - t->offset + (where & 63)] ^= (uint8_t)flip; /* lane headers, where there is no raw plane */
    } else if (where < 248 && t->bytes) {
      t->data[at % t->bytes] ^= (uint8_t)flip;
    } else if (t->bytes) { /* the file was cut */
      t->bytes -= at % t->bytes;
      uint8_t *cut = exact(t->bytes);
      memcpy(cut, t->data, t->bytes);
      free(t->data);
      t->data = cut;
    }
  }
}

static int decode(const tensor *t, const tpde_codec *codec, const uint8_t *data, uint64_t first, uint64_t count,
                  int threads, uint8_t *out, uint64_t out_bytes, tpde_error *error) {
  uint64_t end = t->offset + t->bytes;
  if (first + count < t->chunks)
    end = (uint64_t)load32(t->index + TPDE_RECORD_BYTES * (first + count)) << t->layout.unit_log2;
  uint8_t *index = exact(count * TPDE_RECORD_BYTES);
  memcpy(index, t->index + TPDE_RECORD_BYTES * first, count * TPDE_RECORD_BYTES);
  int code = tpde_decode(codec, index, first, count, data, t->offset, t->bytes, end, out, out_bytes, threads, error);
  free(index);
  CHECK(!code || code == error->code);
  return code;
}

/* Make the checksums those of what the chunks decode to, so that damage does not end at the first one. */
static void fix_checksums(const tensor *t, const tpde_codec *codec) {
  for (uint64_t i = 0; i < t->chunks; i++) {
    uint64_t start, bytes = (uint64_t)tpde_chunk_words(&t->layout, i, &start) * t->layout.word_bytes;
    uint8_t *out = exact(bytes);
    tpde_error error = {0};
    if (decode(t, codec, t->data, i, 1, 1, out, bytes, &error) == TPDE_E_CHECKSUM)
      store32(t->index + TPDE_RECORD_BYTES * i + 4, (uint32_t)error.found);
    free(out);
  }
}

static void check_paths(const tensor *t, const tpde_codec *codec, uint32_t mode) {
  char names[MAX_PATHS][16];
  int paths = simd_paths(names), expected = 0;
  uint64_t n = t->layout.words * t->layout.word_bytes;
  uint8_t *words = exact(n);
  tpde_error why = {0};
  if (mode & 32) {
    CHECK(!tpde_simd_select(names[paths - 1]));
    fix_checksums(t, codec);
  }
  for (int i = paths - 1; i >= 0; i--) {
    uint8_t *out = exact(n);
    const uint8_t *data = mode & 64 ? guarded(t->data, t->bytes) : t->data;
    tpde_error error = {0};
    CHECK(!tpde_simd_select(names[i]));
    memset(out, i, n); /* what a path forgets to write differs */
    int code = decode(t, codec, data, 0, t->chunks, 1, out, n, &error);
    if (i == paths - 1) {
      expected = code;
      why = error;
      memcpy(words, out, n);
    }
    CHECK(code == expected);
    if (code)
      CHECK(error.chunk == why.chunk && error.plane == why.plane && error.found == why.found &&
            error.needed == why.needed && !strcmp(error.what, why.what));
    else
      CHECK(!memcmp(out, words, n));
    free(out);
  }
  if ((mode & 0x300) == 0x300 && t->chunks > 8) { /* rarely: starting threads is slow */
    uint8_t *out = exact(n);
    tpde_error error = {0};
    int code = decode(t, codec, t->data, 0, t->chunks, 3, out, n, &error);
    CHECK(!code == !expected); /* which of several damaged chunks is met first may vary */
    if (!code) CHECK(!memcmp(out, words, n));
    free(out);
  }
  free(words);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
  input in = {bytes, size};
  uint32_t mode = (uint32_t)take(&in, 2);
  tensor t = {0};
  tpde_codec *codec = NULL;
  tpde_error error = {0};
  t.layout = take_layout(&in, 96);
  if (mode & 1) make_damaged(&in, &t, mode);
  else make_raw(&in, &t, mode);
  if (!tpde_codec_open(&t.layout, t.section, t.section_bytes, 0, &codec, &error)) {
    int code = tpde_index_check(&t.layout, t.index, t.offset, t.offset + t.bytes, t.max_chunk, &error);
    if (!code || mode & 128) check_paths(&t, codec, mode);
  }
  tpde_codec_close(codec);
  free(t.section);
  free(t.index);
  free(t.data);
  return 0;
}
