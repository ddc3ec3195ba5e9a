/* deltas.inc.h: the inner loops of deltas (delta.md 2.3, 3.2, 4) in portable C, included by kernels.inc.h. Sets of words
 * are bitmaps, 64 words a number. */

/* ---- symbols, delta.md 2.3 ---- */

static void symbols(int word_bytes, int rotate, const uint8_t *restrict w, size_t n, uint8_t *restrict out) {
  if (word_bytes == 1) split1(rotate, w, n, out);
  else if (word_bytes == 2 && rotate)
    for (size_t i = 0; i < n; i++) out[i] = (uint8_t)(load16(w + 2 * i) >> 7);
  else if (word_bytes == 4 && rotate)
    for (size_t i = 0; i < n; i++) out[i] = (uint8_t)(load32(w + 4 * i) >> 23);
  else if (rotate)
    for (size_t i = 0; i < n; i++) out[i] = (uint8_t)(load64(w + 8 * i) >> 55);
  else
    for (size_t i = 0; i < n; i++) out[i] = w[(i + 1) * (size_t)word_bytes - 1];
}

/* ---- bitmaps ---- */

/* 64 bytes of 0 and 1 become bits. */
static inline uint64_t pack_flags(const uint8_t flags[64]) {
  uint64_t mask = 0;
  for (int i = 0; i < 8; i++) mask |= (load64(flags + 8 * i) * 0x0102040810204080ull >> 56) << (8 * i);
  return mask;
}

#ifndef CLASS_MASK
#define CLASS_MASK class_mask
/* Which of 64 symbols are at least `first`, and by no more than `width`. */
static inline uint64_t class_mask(const uint8_t *s, uint8_t first, uint8_t width) {
  uint8_t flags[64];
  for (int i = 0; i < 64; i++) flags[i] = (uint8_t)(s[i] - first) <= width;
  return pack_flags(flags);
}
#endif

/* Which of 64 words differ, n of them from a short end. */
static inline uint64_t differing(int word_bytes, const uint8_t *restrict a, const uint8_t *restrict b, size_t n) {
  uint8_t flags[64] = {0};
  if (word_bytes == 1)
    for (size_t i = 0; i < n; i++) flags[i] = a[i] != b[i];
  else if (word_bytes == 2)
    for (size_t i = 0; i < n; i++) flags[i] = load16(a + 2 * i) != load16(b + 2 * i);
  else if (word_bytes == 4)
    for (size_t i = 0; i < n; i++) flags[i] = load32(a + 4 * i) != load32(b + 4 * i);
  else
    for (size_t i = 0; i < n; i++) flags[i] = load64(a + 8 * i) != load64(b + 8 * i);
  return pack_flags(flags);
}

#ifndef CHANGED_BLOCK
#define CHANGED_BLOCK changed_block
static inline uint64_t changed_block(int word_bytes, const uint8_t *a, const uint8_t *b) {
  return memcmp(a, b, 64 * (size_t)word_bytes) ? differing(word_bytes, a, b, 64) : 0;
}
#endif

/* Which of n words differ; returns how many. */
static uint32_t changed(int word_bytes, const uint8_t *a, const uint8_t *b, size_t n, uint64_t *masks) {
  uint32_t count = 0;
  size_t i = 0, block = 64 * (size_t)word_bytes;
  for (; i + 64 <= n; i += 64, a += block, b += block) {
    uint64_t mask = masks[i / 64] = CHANGED_BLOCK(word_bytes, a, b);
    count += (uint32_t)__builtin_popcountll(mask);
  }
  if (i < n) {
    masks[i / 64] = differing(word_bytes, a, b, n - i);
    count += (uint32_t)__builtin_popcountll(masks[i / 64]);
  }
  return count;
}

/* ---- fingerprints, delta.md 4 ---- */

#ifndef ADD_TERMS
#define ADD_TERMS add_terms
/* Add the terms of n values, the first of which has the number `first`. */
static void add_terms(const uint8_t *data, size_t n, uint64_t first, uint64_t sum[2]) {
  uint64_t a = 0, b = 0, k = (first + 1) * GOLDEN64;
  for (size_t i = 0; i < n; i++, k += GOLDEN64) {
    uint64_t x = load64(data + 8 * i), y = x ^ k, z = x + k;
    a += (y & 0xffffffff) * (y >> 32);
    b += (z & 0xffffffff) * (z >> 32);
  }
  sum[0] += a;
  sum[1] += b;
}
#endif

/* ---- places, delta.md 3.2 ---- */

/* What a class's symbols are: at least `first`, and by no more than `width`. */
typedef struct range {
  uint8_t first, width;
} range;

static inline range range_of(const classes *c, int number) {
  const int last = number + 1 < c->count ? c->first[number + 1] - 1 : 255;
  return (range){c->first[number], (uint8_t)(last - c->first[number])};
}

/* The words of a class among 64, of which a chunk's last block may have fewer. */
static inline __attribute__((always_inline)) uint64_t words_of_class(range r, int all, const uint8_t *sym, uint32_t block,
                                                                     uint32_t words) {
  const uint64_t in = all ? ~0ull : CLASS_MASK(sym + 64 * (size_t)block, r.first, r.width);
  return __builtin_expect(words - 64 * block < 64, 0) ? in & ((1ull << (words % 64)) - 1) : in;
}

static inline __attribute__((always_inline)) void each_change(const classes *c, int all, const altered *chunk,
                                                              take_change take, void *context) {
  const uint32_t words = chunk->words, blocks = (words + 63) / 64;
  const uint8_t *const sym = chunk->symbols;
  const uint64_t *const changes = chunk->changed;
  uint32_t gap = 0, count = chunk->count;
  int from = -1; /* the class of the place after the last change, once it is known */
  for (int number = 0, end = all ? 1 : c->count; number < end && count; number++) {
    const range r = range_of(c, number);
    for (uint32_t b = 0; b < blocks; b++) {
      uint64_t in = words_of_class(r, all, sym, b, words), found = in & changes[b];
      if (from < 0 && in) from = number;
      for (; __builtin_expect(found != 0, 0); found &= found - 1) {
        const uint64_t bit = found & -found;
        gap += (uint32_t)__builtin_popcountll(in & (bit - 1));
        take(context, from, gap, 64 * b + (uint32_t)__builtin_ctzll(bit));
        in &= ~(bit | (bit - 1));
        gap = 0;
        from = in ? number : -1;
        count--;
      }
      gap += (uint32_t)__builtin_popcountll(in);
    }
  }
}

static void tell_changes(const classes *c, const altered *chunk, take_change take, void *context) {
  if (c->count == 1) each_change(c, 1, chunk, take, context);
  else each_change(c, 0, chunk, take, context);
}

/* ---- checks, delta.md 4 ---- */

static inline uint64_t mixed(uint64_t x) {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ x >> 27) * 0x94D049BB133111EBull;
  return x ^ x >> 31;
}

/* Of a word that changes, with its number in the tensor. */
static inline uint64_t check_term(uint64_t number, uint64_t base, uint64_t target) {
  return mixed(mixed(base + (number + 1) * GOLDEN64) + target);
}

/* ---- writing, delta.md 3.3 ---- */

static inline void put_bits(writer *w, uint64_t value, uint32_t bits) { /* at most 56 */
  w->held |= value << w->bits;
  w->bits += bits;
  store64(w->at, w->held);
  w->at += w->bits / 8;
  w->held = w->bits < 64 ? w->held >> (w->bits & ~7u) : 0;
  w->bits &= 7;
}

static void put_change(void *context, int class, uint32_t gap, uint32_t position) {
  writer *w = context;
  const tpde_delta_model *m = w->model;
  if (w->at > w->end) {
    w->full = 1;
    return;
  }
  const size_t at = (size_t)position * (size_t)m->word_bytes;
  const uint64_t base = load_word(w->base + at, m->word_bytes), target = load_word(w->target + at, m->word_bytes);
  const word_step s = step_between(base, target, m->word_bytes, m->rotate);
  if (m->classes.count == 1) w->check += check_term(w->first + position, base, target);
  const int fold = m->folded && s.kind < 2;
  const uint32_t token = token_of(gap, (word_step){fold ? 0 : s.kind, s.size});
  const table *t = &m->tables[class];
  const uint32_t entry = t->encode[token], bits = ENTRY_BITS(entry);
  if (entry & ENTRY_ESCAPE) put_bits(w, (uint64_t)token << t->escape_bits | t->escape, bits);
  else put_bits(w, entry >> (32 - bits), bits);
  const uint32_t gap_bits = extra_bits(token >> 9), size_bits = extra_bits(token & 127);
  put_bits(w, low_bits(gap, gap_bits), gap_bits);
  if (size_bits > 32) {
    put_bits(w, low_bits(s.size, 32), 32);
    put_bits(w, low_bits(s.size >> 32, size_bits - 32), size_bits - 32);
  } else if (size_bits) {
    put_bits(w, low_bits(s.size, size_bits), size_bits);
  }
  if (fold) put_bits(w, s.kind, 1);
}

static void write_changes(writer *w, const altered *chunk) {
  const classes *c = &w->model->classes;
  if (c->count == 1) each_change(c, 1, chunk, put_change, w);
  else each_change(c, 0, chunk, put_change, w);
}

/* ---- reading ---- */

typedef struct reader {
  const tpde_delta_model *model;
  const uint8_t *at, *limit; /* of the chunk, and of all bytes that may be read */
  uint64_t pos;              /* in bits */
} reader;

/* At least 57 bits from the position on; zeros beyond the limit. */
static inline uint64_t look(const reader *r) {
  const uint8_t *p = r->at + (r->pos >> 3);
  uint64_t w = 0;
  if (__builtin_expect(r->limit - p >= 8, 1)) w = load64(p);
  else if (p < r->limit) memcpy(&w, p, (size_t)(r->limit - p));
  return w >> (r->pos & 7);
}

static inline uint64_t take_bits(reader *r, uint32_t bits) { /* at most 56 */
  const uint64_t w = low_bits(look(r), bits);
  r->pos += bits;
  return w;
}

/* The next change: its gap is returned. */
static inline uint64_t take_change_of(reader *r, int class, word_step *s) {
  const table *t = &r->model->tables[class];
  uint64_t w = look(r);
  const uint32_t entry = t->decode[low_bits(w, t->index_bits)];
  uint32_t token = entry >> 16, used = ENTRY_BITS(entry);
  if (entry & ENTRY_ESCAPE) {
    token = (uint32_t)low_bits(w >> used, 14);
    used += 14;
  }
  w >>= used;
  const uint32_t gap_bits = extra_bits(token >> 9), size_bits = extra_bits(token & 127);
  const uint64_t gap = bucket_start(token >> 9) + low_bits(w, gap_bits);
  s->kind = token >> 7 & 3;
  s->size = bucket_start(token & 127);
  const int fold = r->model->folded && !s->kind;
  r->pos += used + gap_bits;
  if (used + gap_bits + size_bits + 1 <= 57) {
    w >>= gap_bits;
    s->size += low_bits(w, size_bits);
    if (fold) s->kind = (uint32_t)(w >> size_bits) & 1;
    r->pos += size_bits + (uint32_t)fold;
  } else {
    const uint32_t first = size_bits > 32 ? 32 : size_bits;
    s->size += take_bits(r, first);
    if (size_bits > 32) s->size += take_bits(r, size_bits - 32) << 32;
    if (fold) s->kind = (uint32_t)take_bits(r, 1);
  }
  return gap;
}

#if defined(__BMI2__)
static inline uint32_t select_bit(uint64_t x, uint32_t n) { return (uint32_t)__builtin_ctzll(_pdep_u64(1ull << n, x)); }
#else
/* Where the set bit is that has n before it. */
static inline uint32_t select_bit(uint64_t x, uint32_t n) {
  uint32_t at = 0;
  for (uint32_t half = 32; half; half /= 2) {
    const uint32_t below = (uint32_t)__builtin_popcountll(x & ((1ull << half) - 1));
    if (n < below) {
      x &= (1ull << half) - 1;
    } else {
      n -= below;
      x >>= half;
      at += half;
    }
  }
  return at;
}
#endif

static inline void change(const tpde_delta_model *m, uint8_t *words, uint32_t position, word_step s, int check) {
  uint8_t *p = words + (size_t)position * (size_t)m->word_bytes;
  if (!check) store_word(p, take_step(load_word(p, m->word_bytes), s, m->word_bytes, m->rotate), m->word_bytes);
}

/* The changes of a chunk in memory order. Returns how many are left: beyond the last word. */
static inline __attribute__((always_inline)) uint32_t apply_plainly(reader *r, uint64_t bits, uint8_t *words, uint32_t n,
                                                                    uint32_t changes, int check, listing *list) {
  uint64_t place = 0;
  word_step s;
  for (; changes; changes--) {
    if (place >= n) break;
    place += take_change_of(r, 0, &s);
    if (place >= n || r->pos > bits) break;
    if (list) {
      const tpde_delta_model *m = r->model;
      const uint64_t base = load_word(words + place * (uint64_t)m->word_bytes, m->word_bytes);
      const uint64_t target = take_step(base, s, m->word_bytes, m->rotate);
      list->check += check_term(list->first + place, base, target);
      *list->positions++ = list->first + place;
      store_word(list->targets, target, m->word_bytes);
      list->targets += m->word_bytes;
    }
    change(r->model, words, (uint32_t)place++, s, check);
  }
  return changes;
}

static uint32_t apply_by_class(reader *r, uint64_t bits, uint8_t *words, uint32_t n, uint32_t changes, int check,
                               uint8_t *sym) {
  const tpde_delta_model *m = r->model;
  const uint32_t blocks = (n + 63) / 64;
  uint64_t gap = 0; /* words to pass before the change that is pending; none before it is read */
  int pending = 0;
  word_step s = {0};
  symbols(m->word_bytes, m->rotate, words, n, sym);
  for (int number = 0; number < m->classes.count && changes; number++) {
    const range in_class = range_of(&m->classes, number);
    for (uint32_t b = 0; b < blocks; b++) {
      uint64_t in = words_of_class(in_class, 0, sym, b, n);
      uint32_t here = (uint32_t)__builtin_popcountll(in);
      while (__builtin_expect(gap < here, 0)) {
        if (pending) {
          const uint32_t at = select_bit(in, (uint32_t)gap);
          change(m, words, 64 * b + at, s, check);
          if (!--changes) return 0;
          pending = 0;
          gap = 0;
          in &= ~1ull << at;
          here = (uint32_t)__builtin_popcountll(in);
          if (!here) break;
        }
        gap = take_change_of(r, number, &s);
        if (r->pos > bits) return changes;
        pending = 1;
      }
      gap -= here;
    }
  }
  return changes;
}

static int apply_changes(const tpde_delta_model *m, const uint8_t *at, uint64_t bits, const uint8_t *limit, uint8_t *words,
                         uint32_t n, uint32_t changes, int check, uint8_t *sym) {
  reader r = {m, at, limit, 0};
  uint32_t left;
  if (m->classes.count == 1) left = apply_plainly(&r, bits, words, n, changes, check, NULL);
  else left = apply_by_class(&r, bits, words, n, changes, check, sym);
  return !left && r.pos <= bits && bits - r.pos < 8;
}

static int list_changes(const tpde_delta_model *m, const uint8_t *at, uint64_t bits, const uint8_t *limit,
                        const uint8_t *words, uint32_t n, uint32_t changes, listing *list) {
  reader r = {m, at, limit, 0};
  const uint32_t left = apply_plainly(&r, bits, (uint8_t *)words, n, changes, 1, list);
  return !left && r.pos <= bits && bits - r.pos < 8;
}
