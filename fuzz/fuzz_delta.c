/* fuzz_delta.c: models and chunks of deltas (docs/delta.md 2 and 3): two states of a tensor, encoded under a model that is
 * planned for them or for others, and applied, as they are or damaged. The words must come back, all SIMD paths agree on
 * bytes and errors, and nothing outside of exactly sized buffers is touched.
 *
 * Licence: Apache-2.0.
 */
#include "fuzz.h"

typedef struct states {
  int word_bytes, rotate;
  uint64_t words;
  uint8_t *base, *target;
} states;

/* Two states whose words are the fuzzer's, or a few of them again and again; some differ. */
static states take_states(input *in) {
  states s = {.word_bytes = 1 << (take(in, 1) & 3), .rotate = (int)take(in, 1) & 1};
  const uint32_t mode = (uint32_t)take(in, 1);
  s.words = mode & 1 ? take(in, 3) % 150000 : take(in, 2) % 700;
  const size_t n = (size_t)s.words * (size_t)s.word_bytes;
  s.base = exact(n);
  s.target = exact(n);
  const uint64_t a = take(in, 8), b = take(in, 8);
  for (uint64_t i = 0; i < s.words; i++)
    store_word(s.base + i * (uint64_t)s.word_bytes, (i * 0x9E3779B97F4A7C15ull >> 60 & 1 ? a : b) + (i % 7) * (a >> 32),
               s.word_bytes);
  if (mode & 2) take_bytes(in, s.base, in->left / 2 < n ? in->left / 2 : n);
  memcpy(s.target, s.base, n);
  const uint64_t every = 1 + take(in, 2), by = take(in, 8);
  if (mode & 4)
    for (uint64_t i = by % every; i < s.words; i += every)
      store_word(s.target + i * (uint64_t)s.word_bytes, load_word(s.base + i * (uint64_t)s.word_bytes, s.word_bytes) + by,
                 s.word_bytes);
  if (mode & 8) take_bytes(in, s.target, in->left / 2 < n ? in->left / 2 : n);
  return s;
}

static uint32_t plan(const states *s, int max_classes, uint8_t *model) {
  tpde_error error = {0};
  uint32_t size = 0;
  tpde_delta_plan *p = tpde_delta_plan_new(s->word_bytes, s->rotate, max_classes);
  CHECK(p);
  for (int pass = 0; pass < 2; pass++) {
    for (uint64_t at = 0; at < s->words; at += TPDE_DELTA_CHUNK_WORDS) {
      const uint64_t n = s->words - at < TPDE_DELTA_CHUNK_WORDS ? s->words - at : TPDE_DELTA_CHUNK_WORDS;
      const uint8_t *base = s->base + at * (uint64_t)s->word_bytes, *target = s->target + at * (uint64_t)s->word_bytes;
      CHECK(!(pass ? tpde_delta_plan_count : tpde_delta_plan_survey)(p, base, target, n, &error));
    }
    if (!pass) CHECK(!tpde_delta_plan_classes(p, 1, &error));
  }
  CHECK(!tpde_delta_plan_model(p, 1, model, &size, &error));
  CHECK(size <= TPDE_MAX_MODEL);
  tpde_delta_plan_free(p);
  return size;
}

/* Apply under every path; they must agree. */
static int apply_all(const tpde_delta_model *m, const states *s, const uint8_t *data, uint64_t bytes,
                     const uint32_t *changes, const uint32_t *sizes, uint8_t *out) {
  char names[MAX_PATHS][16];
  const int paths = simd_paths(names);
  const size_t n = (size_t)s->words * (size_t)s->word_bytes;
  int first = 0;
  uint64_t sum = 0;
  uint8_t *other = exact(n);
  for (int i = 0; i < paths; i++) {
    tpde_error error = {0};
    uint8_t *to = i ? other : out;
    CHECK(!tpde_simd_select(names[i]));
    memcpy(to, s->base, n);
    const int dry = tpde_delta_apply(m, data, bytes, changes, sizes, to, s->words, 1, 1 + i, &error);
    CHECK(!memcmp(to, s->base, n));
    const int code = tpde_delta_apply(m, data, bytes, changes, sizes, to, s->words, 0, 1, &error);
    CHECK(code == dry && (!code || code == TPDE_E_CHUNK));
    if (!i) first = code;
    CHECK(code == first && (code || !memcmp(to, out, n)));
    uint64_t check = 0, total = 0;
    for (uint64_t k = 0; k < tpde_delta_chunks(s->words); k++) total += changes[k];
    if (total > s->words) continue; /* which callers refuse */
    uint64_t *positions = exact(8 * total);
    uint8_t *targets = exact(total * (size_t)s->word_bytes);
    memcpy(other, s->base, n);
    const int listed = tpde_delta_list(m, data, bytes, changes, sizes, other, s->words, positions, targets, &check, 1 + i,
                                       &error);
    CHECK(!memcmp(other, s->base, n));
    CHECK(listed == TPDE_E_ARGUMENT || listed == code);
    for (uint64_t k = 0; k < total && !listed; k++)
      memcpy(other + positions[k] * (size_t)s->word_bytes, targets + k * (size_t)s->word_bytes, (size_t)s->word_bytes);
    CHECK(listed || !memcmp(other, out, n));
    if (!i) sum = check;
    CHECK(check == sum);
    free(positions);
    free(targets);
  }
  free(other);
  return first;
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
  input in = {bytes, size};
  uint8_t made[TPDE_MAX_MODEL];
  tpde_error error = {0};
  const uint32_t mode = (uint32_t)take(&in, 1);
  char names[MAX_PATHS][16];
  const int paths = simd_paths(names);
  states s = take_states(&in), plan_for = mode & 1 ? take_states(&in) : s;
  plan_for.word_bytes = s.word_bytes; /* no more words than there are bytes for */
  if (mode & 1) plan_for.words = plan_for.words / 8;
  uint32_t model_bytes = plan(&plan_for, mode & 2 ? 1 : 1 + (int)(take(&in, 1) % TPDE_MAX_CLASSES), made);
  if (mode & 4)
    for (uint32_t i = take(&in, 1) % 5; i; i--) made[(uint32_t)take(&in, 2) % model_bytes] ^= (uint8_t)take(&in, 1);
  if (mode & 8) model_bytes = (uint32_t)take(&in, 2) % (model_bytes + 1);
  uint8_t *model = exact(model_bytes), *out = exact((size_t)s.words * (size_t)s.word_bytes);
  memcpy(model, made, model_bytes);
  tpde_delta_model *m = NULL;
  const int code = tpde_delta_model_open(model, model_bytes, 1, &m, &error);
  CHECK(!code == (m != NULL));
  CHECK((mode & 12) || !code);
  if (m && (int)made[0] == s.word_bytes) {
    const uint64_t chunks = tpde_delta_chunks(s.words), room = chunks * (13ull * TPDE_DELTA_CHUNK_WORDS + 64);
    uint64_t used = 0, check = 0;
    uint8_t *data = exact(room), *again = exact(room);
    uint32_t *changes = exact(4 * chunks), *sizes = exact(4 * chunks);
    CHECK(!tpde_simd_select(names[0]));
    CHECK(!tpde_delta_encode(m, s.base, s.target, s.words, data, room, &used, changes, sizes, 5, &check, 1, &error));
    for (int i = 1; i < paths; i++) {
      uint64_t other = 0, checked = 0;
      CHECK(!tpde_simd_select(names[i]));
      CHECK(!tpde_delta_encode(m, s.base, s.target, s.words, again, room, &other, changes, sizes, 5, &checked, 3, &error));
      CHECK(checked == check && other == used && !memcmp(data, again, used));
    }
    free(again);
    again = exact(used);
    memcpy(again, data, used);
    CHECK(!apply_all(m, &s, again, used, changes, sizes, out));
    CHECK(!memcmp(out, s.target, (size_t)s.words * (size_t)s.word_bytes));
    for (uint32_t i = take(&in, 1) % 8; i && used; i--) again[take(&in, 4) % used] ^= (uint8_t)take(&in, 1);
    if (mode & 16 && chunks) changes[take(&in, 1) % chunks] += (uint32_t)take(&in, 2) - 100;
    if (mode & 32 && chunks) sizes[take(&in, 1) % chunks] += (uint32_t)take(&in, 2) - 100;
    apply_all(m, &s, again, used, changes, sizes, out);
    free(data);
    free(again);
    free(changes);
    free(sizes);
  }
  tpde_delta_model_close(m);
  if (mode & 1) {
    free(plan_for.base);
    free(plan_for.target);
  }
  free(s.base);
  free(s.target);
  free(model);
  free(out);
  return 0;
}
