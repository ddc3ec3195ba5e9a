/* fuzz_table.c: table sections (format.md 3): any bytes, and valid ones with a few bytes changed. What opens
 * must be a code that takes every symbol there and back.
 *
 * Licence: Apache-2.0.
 */
#include "fuzz.h"

/* A decoder follows any entry, so that each must consume bits, and no more than were looked up. */
static void check_decoding(const tpde_codec *codec) {
  for (int i = 0; i < codec->layout.tables; i++) {
    const table *t = &codec->tables[i];
    for (int k = 0; k < tpde_table_entries(t); k++) {
      uint32_t e = t->decode[k];
      CHECK(ENTRY_BITS(e) >= 1 && ENTRY_BITS(e) <= t->index_bits);
      CHECK(t->kind == 2 || (e & 0xffff) < 256);
    }
  }
}

static void check_encoding(const tpde_codec *codec) {
  for (int i = 0; i < codec->layout.tables; i++) {
    const table *t = &codec->tables[i];
    uint32_t symbols = t->kind == 2 ? 65536 : 256, raw = t->raw_bits;
    for (uint32_t s = 0; s < symbols; s++) {
      uint32_t bits = t->encode[s] >> CODE_SHIFT, code = t->encode[s] & CODE_MASK;
      uint32_t e = t->decode[code & (uint32_t)(tpde_table_entries(t) - 1)], used = ENTRY_BITS(e);
      CHECK(bits <= CODE_SHIFT && code >> bits == 0);
      if (!(e & ENTRY_ESCAPE)) {
        CHECK((e & 0xffff) == s && used == bits);
      } else if (t->kind == 2) {
        CHECK(code >> used == s && bits == used + 16);
      } else { /* the value, then its raw bits */
        uint32_t v = code >> used & ((256u >> raw) - 1), low = code >> (used + 8 - raw);
        CHECK((v << raw | low) == s && bits == used + 8);
      }
    }
  }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
  input in = {bytes, size};
  tpde_layout l = {.words = 1, .segment_words = 1, .chunk_words = 512, .word_bytes = 1, .unit_log2 = 4};
  uint8_t made[TPDE_MAX_TABLE_SECTION], *section;
  uint32_t mode = (uint32_t)take(&in, 1), n;
  if (mode & 1) {
    n = take_section(&in, &l, mode & 16, made);
    for (uint32_t i = mode >> 1 & 3; i; i--) {
      uint32_t at = (uint32_t)take(&in, 2) % n;
      made[at] ^= (uint8_t)take(&in, 1);
    }
    if (mode & 8) n = (uint32_t)take(&in, 2) % (n + 1);
    section = exact(n);
    memcpy(section, made, n);
  } else {
    l.tables = (uint8_t)((mode >> 1) % 18); /* 17 are too many */
    n = (uint32_t)in.left;
    section = exact(n);
    take_bytes(&in, section, n);
  }
  tpde_codec *reader = NULL, *writer = NULL;
  tpde_error error = {0}, again = {0};
  int code = tpde_codec_open(&l, n ? section : NULL, n, 0, &reader, &error);
  int both = tpde_codec_open(&l, n ? section : NULL, n, 1, &writer, &again);
  CHECK(code == error.code && both == again.code);
  CHECK(!code == (reader != NULL) && !both == (writer != NULL));
  /* A writer may refuse tables that a reader takes, as the caller's mistake; never the other way round. */
  CHECK(both == code || both == TPDE_E_ARGUMENT);
  if (reader) check_decoding(reader);
  if (writer) {
    check_decoding(writer);
    check_encoding(writer);
  }
  tpde_codec_close(reader);
  tpde_codec_close(writer);
  free(section);
  return 0;
}
