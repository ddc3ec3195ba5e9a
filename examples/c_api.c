// c_api.c: the C API in one page. Packs bf16 weights in memory, and unpacks them.
//
//     cc -Icsrc examples/c_api.c csrc/*.c -lpthread -o c_api && ./c_api

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tpde.h"

enum { WORDS = 100000 };

static void check(int code, const tpde_error *error) {
  if (!code) return;
  fprintf(stderr, "error %d: %s (found %llu, needed %llu)\n", code, error->what,
          (unsigned long long)error->found, (unsigned long long)error->needed);
  exit(1);
}

int main(void) {
  /* Words whose exponents are skewed as those of weights are: each step down is half as likely. */
  uint16_t *words = malloc(WORDS * sizeof *words), *again = malloc(WORDS * sizeof *again);
  uint32_t seed = 1;
  for (int i = 0; i < WORDS; i++) {
    uint32_t exponent = 122;
    seed = seed * 1664525u + 1013904223u;
    for (uint32_t bits = seed >> 9; bits & 1 && exponent > 100; bits >>= 1) exponent--;
    words[i] = (uint16_t)((seed >> 31) << 15 | exponent << 7 | (seed >> 24 & 127));
  }

  /* What docs/format.md says of a bf16 tensor: words of two bytes, rotated. */
  tpde_layout layout = {.words = WORDS, .segment_words = WORDS, .chunk_words = 8192, .word_bytes = 2,
                        .rotate = 1, .unit_log2 = 4};
  tpde_error error = {0};
  uint8_t section[TPDE_MAX_TABLE_SECTION];
  uint32_t section_bytes, max_chunk = 0, max_stream = 0;
  uint64_t estimate;
  check(tpde_plan(&layout, words, WORDS, 4, section, &section_bytes, &estimate, &error), &error);

  tpde_codec *codec;
  check(tpde_codec_open(&layout, section, section_bytes, 1, &codec, &error), &error);
  uint64_t chunks = tpde_chunk_count(&layout), bound = tpde_encode_bound(&layout, WORDS, chunks);
  uint8_t *packed = malloc(bound), *index = malloc(chunks * TPDE_RECORD_BYTES);
  uint64_t bytes;
  check(tpde_encode(codec, words, 0, chunks, 0, packed, bound, &bytes, index, &max_chunk, &max_stream, 1, &error),
        &error);

  /* Bytes from elsewhere are checked before they are decoded. */
  check(tpde_index_check(&layout, index, 0, bytes, max_chunk, &error), &error);
  check(tpde_decode(codec, index, 0, chunks, packed, 0, bytes, bytes, again, WORDS * sizeof *again, 1,
                    &error),
        &error);
  if (memcmp(words, again, WORDS * sizeof *words)) return 1;
  printf("%d bytes packed into %llu, and back, bit for bit (%s)\n", (int)(WORDS * sizeof *words),
         (unsigned long long)(bytes + section_bytes + chunks * TPDE_RECORD_BYTES), tpde_simd());
  tpde_codec_close(codec);
  free(words);
  free(again);
  free(packed);
  free(index);
  return 0;
}
