/* delta_plan.c: choosing a model (delta.md 2) for what changed. Integers only, so that every machine writes the same. */
#include <stdlib.h>

#include "internal.h"

#define SIZES 512u              /* kinds and buckets of sizes, as a token has them in its lowest bits */
#define MAX_WORDS (1ull << 30)  /* counters have 32 bits, and products stay below 2^63 */
#define CLASS_BYTES 50          /* that a class must save: about what its table takes in a file */
#define LOG_BITS 12             /* of a logarithm's fraction */

struct tpde_delta_plan {
  int word_bytes, rotate, max_classes;
  classes classes;
  uint64_t surveyed, counted;
  uint32_t words[256];          /* of each symbol */
  uint32_t sizes[256][SIZES];   /* of the changes among them */
  uint32_t (*tokens)[TOKENS];   /* of each class */
  uint8_t symbols[DELTA_CHUNK_WORDS];
  uint64_t changed[DELTA_BLOCKS];
};

tpde_delta_plan *tpde_delta_plan_new(int word_bytes, int rotate, int max_classes) {
  if ((word_bytes != 1 && word_bytes != 2 && word_bytes != 4 && word_bytes != 8) || rotate < 0 || rotate > 1 ||
      max_classes < 1 || max_classes > TPDE_MAX_CLASSES)
    return NULL;
  tpde_delta_plan *p = calloc(1, sizeof *p);
  if (!p) return NULL;
  p->word_bytes = word_bytes;
  p->rotate = rotate;
  p->max_classes = max_classes;
  p->classes.count = 1;
  return p;
}

void tpde_delta_plan_free(tpde_delta_plan *plan) {
  if (plan) free(plan->tokens);
  free(plan);
}

tpde_delta_plan *tpde_delta_plan_fork(const tpde_delta_plan *plan) {
  tpde_delta_plan *p = plan ? tpde_delta_plan_new(plan->word_bytes, plan->rotate, plan->max_classes) : NULL;
  if (p) p->classes = plan->classes;
  return p;
}

/* ---- counting ---- */

static int own_tokens(tpde_delta_plan *p, tpde_error *error) {
  if (!p->tokens && !(p->tokens = calloc((size_t)p->classes.count, sizeof *p->tokens)))
    return tpde_fail(error, TPDE_E_MEMORY, "out of memory", UINT64_MAX, -1, 0, sizeof *p->tokens);
  return TPDE_OK;
}

int tpde_delta_plan_add(tpde_delta_plan *p, const tpde_delta_plan *other, tpde_error *error) {
  if (!p || !other || p == other || p->word_bytes != other->word_bytes || p->rotate != other->rotate ||
      p->classes.count != other->classes.count ||
      memcmp(p->classes.first, other->classes.first, (size_t)p->classes.count))
    return tpde_fail(error, TPDE_E_ARGUMENT, "no two plans of the same words and classes", UINT64_MAX, -1, 0, 0);
  if (p->surveyed + other->surveyed > MAX_WORDS || p->counted + other->counted > MAX_WORDS)
    return tpde_fail(error, TPDE_E_ARGUMENT, "too many words", UINT64_MAX, -1, p->surveyed + other->surveyed, MAX_WORDS);
  if (other->tokens) {
    const int code = own_tokens(p, error);
    if (code) return code;
    for (int k = 0; k < p->classes.count; k++)
      for (uint32_t t = 0; t < TOKENS; t++) p->tokens[k][t] += other->tokens[k][t];
  }
  for (int v = 0; v < 256; v++) {
    p->words[v] += other->words[v];
    if (other->words[v])
      for (uint32_t i = 0; i < SIZES; i++) p->sizes[v][i] += other->sizes[v][i];
  }
  p->surveyed += other->surveyed;
  p->counted += other->counted;
  return TPDE_OK;
}

static int check(const tpde_delta_plan *p, const void *base, const void *target, uint64_t words, uint64_t before,
                 tpde_error *error) {
  if (!p || (words && (!base || !target)) || words > DELTA_CHUNK_WORDS || before + words > MAX_WORDS)
    return tpde_fail(error, TPDE_E_ARGUMENT, "no plan or words, or too many", UINT64_MAX, -1, before + words, MAX_WORDS);
  return TPDE_OK;
}

int tpde_delta_plan_survey(tpde_delta_plan *p, const void *base, const void *target, uint64_t words, tpde_error *error) {
  const kernels *k = tpde_active();
  int code = check(p, base, target, words, p ? p->surveyed : 0, error);
  if (code || !words) return code;
  uint32_t part[4][256] = {{0}}, i = 0, n = (uint32_t)words; /* four counters each: runs of one symbol do not wait */
  k->symbols(p->word_bytes, p->rotate, base, n, p->symbols);
  for (; i + 4 <= n; i += 4)
    for (uint32_t j = 0; j < 4; j++) part[j][p->symbols[i + j]]++;
  for (; i < n; i++) part[0][p->symbols[i]]++;
  for (int v = 0; v < 256; v++) p->words[v] += part[0][v] + part[1][v] + part[2][v] + part[3][v];
  k->changed(p->word_bytes, base, target, n, p->changed);
  for (uint32_t b = 0; b < (n + 63) / 64; b++)
    for (uint64_t m = p->changed[b]; m; m &= m - 1) {
      const uint32_t at = 64 * b + (uint32_t)__builtin_ctzll(m);
      const size_t byte = (size_t)at * (size_t)p->word_bytes;
      const word_step s = step_between(load_word((const uint8_t *)base + byte, p->word_bytes),
                                  load_word((const uint8_t *)target + byte, p->word_bytes), p->word_bytes, p->rotate);
      p->sizes[p->symbols[at]][s.kind << 7 | bucket_of(s.size)]++;
    }
  p->surveyed += words;
  return TPDE_OK;
}

typedef struct counting {
  tpde_delta_plan *plan;
  const uint8_t *base, *target;
} counting;

static void count_change(void *context, int class, uint32_t gap, uint32_t position) {
  const counting *c = context;
  tpde_delta_plan *p = c->plan;
  const size_t at = (size_t)position * (size_t)p->word_bytes;
  p->tokens[class][token_of(gap, step_between(load_word(c->base + at, p->word_bytes),
                                              load_word(c->target + at, p->word_bytes), p->word_bytes, p->rotate))]++;
}

int tpde_delta_plan_count(tpde_delta_plan *p, const void *base, const void *target, uint64_t words, tpde_error *error) {
  const kernels *k = tpde_active();
  int code = check(p, base, target, words, p ? p->counted : 0, error);
  if (code || !words) return code;
  if ((code = own_tokens(p, error))) return code;
  counting c = {p, base, target};
  altered chunk = {p->symbols, (uint32_t)words, k->changed(p->word_bytes, base, target, (size_t)words, p->changed),
                   p->changed};
  if (p->classes.count > 1) k->symbols(p->word_bytes, p->rotate, base, (size_t)words, p->symbols);
  k->tell_changes(&p->classes, &chunk, count_change, &c);
  p->counted += words;
  return TPDE_OK;
}

/* ---- classes ---- */

/* x times its binary logarithm, in units of 2^-LOG_BITS; x is at most MAX_WORDS. */
static uint64_t times_log(uint64_t x) {
  if (x < 2) return 0;
  const int whole = 63 - __builtin_clzll(x);
  uint64_t log = (uint64_t)whole, y = (x << 31) >> whole; /* 1 to 2, with 31 bits after the point */
  for (int i = 0; i < LOG_BITS; i++) {
    y = y * y >> 31;
    log = log << 1 | y >> 32;
    y >>= y >> 32;
  }
  return x * log;
}

/* Symbols that follow each other, taken as one class. */
typedef struct segment {
  int first;
  uint64_t words, changes, cost;
  uint32_t sizes[SIZES];
} segment;

/* The bits that positions and steps take under one code. */
static uint64_t cost_of(const segment *s) {
  uint64_t sizes = 0;
  for (uint32_t i = 0; i < SIZES; i++) sizes += times_log(s->sizes[i]);
  const uint64_t positions = times_log(s->words) - times_log(s->words - s->changes);
  return positions > sizes ? positions - sizes : 0; /* not below, but for what logarithms lose */
}

static void join(const segment *a, const segment *b, segment *out) {
  *out = *a;
  out->words += b->words;
  out->changes += b->changes;
  for (uint32_t i = 0; i < SIZES; i++) out->sizes[i] += b->sizes[i];
  out->cost = cost_of(out);
}

int tpde_delta_plan_classes(tpde_delta_plan *p, uint64_t scale, tpde_error *error) {
  if (!p || !scale || p->tokens)
    return tpde_fail(error, TPDE_E_ARGUMENT, "no plan, no scale, or classes after tokens", UINT64_MAX, -1, scale, 1);
  if (p->max_classes == 1) return TPDE_OK;
  segment *s = malloc(257 * sizeof *s);
  if (!s) return tpde_fail(error, TPDE_E_MEMORY, "out of memory", UINT64_MAX, -1, 0, 257 * sizeof *s);
  segment *joined = s + 256;
  uint64_t loss[256]; /* of joining a segment and the next one */
  int n = 0;
  for (int v = 0; v < 256; v++) {
    if (!p->words[v]) continue;
    segment *it = &s[n++];
    *it = (segment){.first = v, .words = p->words[v]};
    memcpy(it->sizes, p->sizes[v], sizeof it->sizes);
    for (uint32_t i = 0; i < SIZES; i++) it->changes += it->sizes[i];
    it->cost = cost_of(it);
  }
  for (int i = 0, from = 0, to = n - 2; n > 1;) {
    for (i = from; i <= to; i++) {
      join(&s[i], &s[i + 1], joined);
      const uint64_t apart = s[i].cost + s[i + 1].cost;
      loss[i] = joined->cost > apart ? joined->cost - apart : 0;
    }
    int best = 0;
    for (i = 1; i < n - 1; i++)
      if (loss[i] < loss[best]) best = i;
    if (n <= p->max_classes && loss[best] > (CLASS_BYTES * 8ull << LOG_BITS) / scale) break;
    join(&s[best], &s[best + 1], joined);
    s[best] = *joined;
    memmove(&s[best + 1], &s[best + 2], (size_t)(n - best - 2) * sizeof *s);
    memmove(&loss[best], &loss[best + 1], (size_t)(n - best - 2) * sizeof *loss);
    n--;
    from = best ? best - 1 : 0;
    to = best < n - 1 ? best : n - 2;
  }
  p->classes.count = n ? n : 1;
  for (int i = 1; i < n; i++) p->classes.first[i] = (uint8_t)s[i].first;
  free(s);
  return TPDE_OK;
}

/* ---- tables ---- */

/* The code of a class's tokens; returns the bits that they take, in the sample. */
static uint64_t code_of(const uint32_t *tokens, int folded, uint64_t scale, counted_value *found, prefix_code *c) {
  uint64_t total = 0, raw = 0;
  int distinct = 0;
  for (uint32_t t = 0; t < TOKENS; t++) {
    const uint32_t kind = t >> 7 & 3;
    uint32_t count = tokens ? tokens[t] : 0;
    if (folded && kind == 0 && tokens) count += tokens[t | 1u << 7];
    if (folded && kind < 2) raw += kind ? 0 : count;
    if ((folded && kind == 1) || !count) continue;
    found[distinct++] = (counted_value){count, (uint16_t)t};
    total += count;
  }
  if (!distinct) { /* there must be a value: the change that is most likely anywhere */
    found[distinct++] = (counted_value){1, 0};
    total = 1;
  }
  return tpde_code_build(c, found, distinct, total, KIND_TOKENS, 0, scale) + raw;
}

int tpde_delta_plan_model(const tpde_delta_plan *p, uint64_t scale, uint8_t *model, uint32_t *model_bytes,
                          tpde_error *error) {
  if (!p || !scale || !model || !model_bytes)
    return tpde_fail(error, TPDE_E_ARGUMENT, "no plan, no scale, or no place", UINT64_MAX, -1, scale, 1);
  counted_value *found = malloc(TOKENS * sizeof *found);
  prefix_code *codes = malloc(2 * TPDE_MAX_CLASSES * sizeof *codes);
  if (!found || !codes) {
    free(found);
    free(codes);
    return tpde_fail(error, TPDE_E_MEMORY, "out of memory", UINT64_MAX, -1, 0, TOKENS * sizeof *found);
  }
  if (scale > MAX_WORDS) scale = MAX_WORDS;
  uint64_t bits[2] = {0};
  for (int folded = 0; folded < 2; folded++)
    for (int c = 0; c < p->classes.count; c++) {
      prefix_code *it = &codes[folded * TPDE_MAX_CLASSES + c];
      bits[folded] += code_of(p->tokens ? p->tokens[c] : NULL, folded, scale, found, it) * scale +
                      8u * tpde_code_bytes(it);
    }
  const int folded = bits[1] <= bits[0];
  uint32_t at = align_up(4u + (uint32_t)p->classes.count, 4);
  memset(model, 0, at);
  model[0] = (uint8_t)p->word_bytes;
  model[1] = (uint8_t)p->rotate;
  model[2] = (uint8_t)p->classes.count;
  model[3] = (uint8_t)folded;
  for (int c = 0; c < p->classes.count; c++) {
    model[4 + c] = p->classes.first[c];
    at += tpde_code_write(&codes[folded * TPDE_MAX_CLASSES + c], model + at);
  }
  *model_bytes = at;
  free(found);
  free(codes);
  return TPDE_OK;
}
