/* delta.c: what changed between two states of a tensor (delta.md 1 to 3), and fingerprints (4). */
#include <stdatomic.h>
#include <stdlib.h>

#include "internal.h"

/* ---- fingerprints ---- */

void tpde_fingerprint(const void *data, uint64_t bytes, uint64_t offset, uint64_t sum[2]) {
  const kernels *k = tpde_active();
  uint8_t rest[8] = {0};
  k->add_terms(data, (size_t)(bytes / 8), offset / 8, sum);
  if (bytes % 8 == 0) return;
  memcpy(rest, (const uint8_t *)data + bytes / 8 * 8, bytes % 8);
  k->add_terms(rest, 1, (offset + bytes) / 8, sum);
}

/* ---- models ---- */

static int open_model(tpde_delta_model *m, const uint8_t *p, uint32_t size, int encode, tpde_error *error) {
  if (size < 4) return tpde_fail(error, TPDE_E_MODEL, "it ends inside its header", UINT64_MAX, -1, size, 4);
  m->word_bytes = p[0];
  m->rotate = p[1];
  m->classes.count = p[2];
  m->folded = p[3];
  if ((p[0] != 1 && p[0] != 2 && p[0] != 4 && p[0] != 8) || p[1] > 1 || p[3] > 1)
    return tpde_fail(error, TPDE_E_MODEL, "a field of its header cannot be", UINT64_MAX, -1, load32(p), 0);
  if (p[2] < 1 || p[2] > TPDE_MAX_CLASSES)
    return tpde_fail(error, TPDE_E_MODEL, "its number of classes is out of range", UINT64_MAX, -1, p[2],
                     TPDE_MAX_CLASSES);
  uint32_t at = align_up(4u + p[2], 4);
  if (size < at) return tpde_fail(error, TPDE_E_MODEL, "it ends inside its classes", UINT64_MAX, -1, size, at);
  for (uint32_t i = 4; i < at; i++) {
    int right = i < 4u + p[2] ? (i == 4 ? !p[i] : p[i] > p[i - 1]) : !p[i];
    if (!right) return tpde_fail(error, TPDE_E_MODEL, "its classes do not ascend from 0", i - 4, -1, p[i], 0);
    if (i < 4u + p[2]) m->classes.first[i - 4] = p[i];
  }
  for (int c = 0; c < m->classes.count; c++) {
    size_t used = 0;
    table *t = &m->tables[c];
    int code = tpde_table_open(p + at, size - at, encode, t, &used, (uint64_t)c, error);
    if (code) return code;
    if (t->kind != KIND_TOKENS || !t->escape_bits)
      return tpde_fail(error, TPDE_E_MODEL, "a table that cannot write every change", (uint64_t)c, -1, t->kind,
                       KIND_TOKENS);
    const uint32_t end = at + 4u + 2u * t->max_bits;
    uint32_t values = 0;
    for (uint32_t i = at + 4; i < end; i += 2) values += load16(p + i);
    for (uint32_t i = end + 2 * values; i < at + used; i++)
      if (p[i]) return tpde_fail(error, TPDE_E_MODEL, "padding is not zero", (uint64_t)c, -1, p[i], 0);
    at += (uint32_t)used;
  }
  if (at != size) return tpde_fail(error, TPDE_E_MODEL, "its tables end before it does", UINT64_MAX, -1, at, size);
  return TPDE_OK;
}

int tpde_delta_model_open(const uint8_t *bytes, uint32_t size, int encode, tpde_delta_model **model,
                          tpde_error *error) {
  if (!model || (size && !bytes))
    return tpde_fail(error, TPDE_E_ARGUMENT, "no place for the model", UINT64_MAX, -1, 0, 0);
  *model = NULL;
  tpde_delta_model *m = calloc(1, sizeof *m);
  if (!m) return tpde_fail(error, TPDE_E_MEMORY, "out of memory", UINT64_MAX, -1, 0, sizeof *m);
  int code = open_model(m, bytes, size, encode, error);
  if (code) {
    tpde_delta_model_close(m);
    return code;
  }
  *model = m;
  return TPDE_OK;
}

void tpde_delta_model_close(tpde_delta_model *model) {
  if (!model) return;
  for (int c = 0; c < TPDE_MAX_CLASSES; c++) {
    free(model->tables[c].decode);
    free(model->tables[c].encode);
  }
  free(model);
}

int tpde_delta_model_table(const tpde_delta_model *model, int number, int *index_bits, uint32_t *escape,
                           const uint32_t **decode, const uint32_t **encode) {
  if (!model || number < 0 || number >= model->classes.count) return TPDE_E_ARGUMENT;
  const table *t = &model->tables[number];
  *index_bits = t->index_bits;
  *escape = t->escape;
  *decode = t->decode;
  *encode = t->encode;
  return TPDE_OK;
}

/* ---- what chunks have in common ---- */

uint64_t tpde_delta_chunks(uint64_t words) { return words / DELTA_CHUNK_WORDS + (words % DELTA_CHUNK_WORDS != 0); }

static uint32_t words_in(uint64_t words, uint64_t chunk) {
  const uint64_t left = words - chunk * DELTA_CHUNK_WORDS;
  return left < DELTA_CHUNK_WORDS ? (uint32_t)left : DELTA_CHUNK_WORDS;
}

/* What a thread needs for encoding. */
typedef struct scratch {
  uint8_t symbols[DELTA_CHUNK_WORDS];
  uint64_t changed[DELTA_BLOCKS];
} scratch;

static int is_valid(const tpde_delta_model *m, uint64_t words) {
  return m && words < (1ull << 60) / (uint64_t)m->word_bytes;
}

/* ---- encoding ---- */

typedef struct encoding {
  const tpde_delta_model *model;
  const kernels *k;
  const uint8_t *base, *target;
  uint64_t words, chunks, room; /* of a chunk in the output */
  uint8_t *out;
  uint32_t *changes, *sizes;
  scratch *scratch;
  uint64_t first; /* words of the tensor before these */
  _Atomic uint64_t next, check;
  _Atomic int full;
} encoding;

static void encode_job(void *context, int thread) {
  encoding *e = context;
  const tpde_delta_model *m = e->model;
  scratch *s = e->scratch + thread;
  uint64_t check = 0;
  for (uint64_t i; (i = e->next++) < e->chunks && !e->full;) {
    const uint32_t n = words_in(e->words, i);
    const size_t at = (size_t)i * DELTA_CHUNK_WORDS * (size_t)m->word_bytes;
    uint8_t *out = e->out + i * e->room;
    writer w = {.model = m, .base = e->base + at, .target = e->target + at, .at = out,
                .end = out + e->room - MOST_BYTES - 16, .first = e->first + i * DELTA_CHUNK_WORDS};
    altered chunk = {s->symbols, n, e->k->changed(m->word_bytes, w.base, w.target, n, s->changed), s->changed};
    e->changes[i] = chunk.count;
    e->sizes[i] = 0;
    if (!chunk.count) continue;
    if (m->classes.count > 1) e->k->symbols(m->word_bytes, m->rotate, w.base, n, s->symbols);
    e->k->write_changes(&w, &chunk);
    if (w.full) e->full = 1;
    if (w.bits) *w.at++ = (uint8_t)w.held;
    e->sizes[i] = (uint32_t)(w.at - out);
    check += w.check;
  }
  e->check += check;
}

int tpde_delta_encode(const tpde_delta_model *model, const void *base, const void *target, uint64_t words, uint8_t *out,
                      uint64_t out_bytes, uint64_t *used, uint32_t *changes, uint32_t *sizes, uint64_t first,
                      uint64_t *check, int threads, tpde_error *error) {
  if (!is_valid(model, words) || !used || !check || threads < 1 || (words && (!base || !target || !out || !changes || !sizes)))
    return tpde_fail(error, TPDE_E_ARGUMENT, "a null pointer, no thread, or too many words", UINT64_MAX, -1, 0, 0);
  if (!model->tables[0].encode)
    return tpde_fail(error, TPDE_E_ARGUMENT, "the model was opened for decoding only", UINT64_MAX, -1, 0, 1);
  encoding e = {.model = model, .k = tpde_active(), .base = base, .target = target, .words = words,
                .chunks = tpde_delta_chunks(words), .out = out, .changes = changes, .sizes = sizes,
                .first = first};
  *used = *check = 0;
  if (!e.chunks) return TPDE_OK;
  e.room = out_bytes / e.chunks; /* every chunk has its part of the output, and moves up in the end */
  const uint64_t most = MOST_BYTES * (uint64_t)DELTA_CHUNK_WORDS + 64;
  if (e.room > most) e.room = most;
  if (e.room < MOST_BYTES + 16)
    return tpde_fail(error, TPDE_E_SPACE, "the output buffer is too small", UINT64_MAX, -1, out_bytes,
                     e.chunks * (MOST_BYTES + 16));
  if (threads > TPDE_MAX_THREADS) threads = TPDE_MAX_THREADS;
  if ((uint64_t)threads > e.chunks) threads = (int)e.chunks;
  e.scratch = calloc((size_t)threads, sizeof *e.scratch);
  if (!e.scratch)
    return tpde_fail(error, TPDE_E_MEMORY, "out of memory", UINT64_MAX, -1, 0, (uint64_t)threads * sizeof *e.scratch);
  if (threads == 1) encode_job(&e, 0);
  else tpde_parallel(threads, encode_job, &e);
  free(e.scratch);
  if (e.full)
    return tpde_fail(error, TPDE_E_SPACE, "the changes take more than there is room", UINT64_MAX, -1, out_bytes, 0);
  for (uint64_t i = 0; i < e.chunks; i++) {
    memmove(out + *used, out + i * e.room, sizes[i]);
    *used += sizes[i];
  }
  *check = e.check;
  return TPDE_OK;
}

/* ---- decoding ---- */

typedef struct applying {
  const tpde_delta_model *model;
  const uint8_t *data;
  uint64_t data_bytes;
  const uint32_t *changes, *sizes;
  const uint64_t *offsets; /* of every run of chunks that a thread takes */
  uint8_t *words;
  uint64_t count, chunks, run;
  int check;
  uint8_t *symbols; /* room for those of a chunk, for each thread */
  uint64_t *positions; /* of the tensor's changes, or NULL; what the words become */
  uint8_t *targets;
  const uint64_t *starts; /* of changes before every run */
  _Atomic uint64_t sum;
  _Atomic uint64_t next, failed; /* the lowest chunk that is damaged */
} applying;

static int apply_chunk(const applying *a, uint64_t i, uint64_t offset, uint8_t *symbols, listing *list) {
  const uint32_t n = words_in(a->count, i);
  const uint64_t bits = 8 * (uint64_t)a->sizes[i];
  uint8_t *words = a->words + (size_t)i * DELTA_CHUNK_WORDS * (size_t)a->model->word_bytes;
  if (a->changes[i] > n) return 0;
  if (!a->changes[i]) return !bits;
  if (list) {
    list->first = i * DELTA_CHUNK_WORDS;
    return tpde_active()->list_changes(a->model, a->data + offset, bits, a->data + a->data_bytes, words, n,
                                       a->changes[i], list);
  }
  return tpde_active()->apply_changes(a->model, a->data + offset, bits, a->data + a->data_bytes, words, n, a->changes[i],
                                      a->check, symbols);
}

static void apply_job(void *context, int thread) {
  applying *a = context;
  uint64_t sum = 0;
  for (uint64_t turn; (turn = a->next++) * a->run < a->chunks;) {
    uint64_t offset = a->offsets[turn], end = (turn + 1) * a->run;
    if (end > a->chunks) end = a->chunks;
    listing list = {0, NULL, NULL, 0};
    if (a->positions) {
      list.positions = a->positions + a->starts[turn];
      list.targets = a->targets + a->starts[turn] * (uint64_t)a->model->word_bytes;
    }
    for (uint64_t i = turn * a->run; i < end; offset += a->sizes[i++]) {
      if (apply_chunk(a, i, offset, a->symbols + (size_t)thread * DELTA_CHUNK_WORDS, a->positions ? &list : NULL))
        continue;
      uint64_t lowest = a->failed;
      while (i < lowest && !atomic_compare_exchange_weak(&a->failed, &lowest, i)) {}
      return;
    }
    sum += list.check;
  }
  a->sum += sum;
}

/* `positions` not NULL: changes are listed, their check becomes *check_sum, and nothing is written. */
static int apply(const tpde_delta_model *model, const uint8_t *data, uint64_t data_bytes, const uint32_t *changes,
                 const uint32_t *sizes, const void *words, uint64_t count, int check, uint64_t *positions, uint8_t *targets,
                 uint64_t *check_sum, int threads, tpde_error *error) {
  if (!is_valid(model, count) || threads < 1 || (count && (!changes || !sizes || !words)) || (data_bytes && !data))
    return tpde_fail(error, TPDE_E_ARGUMENT, "a null pointer, no thread, or too many words", UINT64_MAX, -1, 0, 0);
  applying a = {.model = model, .data = data, .data_bytes = data_bytes, .changes = changes, .sizes = sizes,
                .words = (uint8_t *)words, .count = count, .chunks = tpde_delta_chunks(count), .check = check,
                .positions = positions, .targets = targets, .failed = UINT64_MAX};
  uint64_t sum = 0, found = 0;
  if (threads > TPDE_MAX_THREADS) threads = TPDE_MAX_THREADS;
  a.run = a.chunks / (16 * (uint64_t)threads) + 1;
  const uint64_t runs = (a.chunks + a.run - 1) / a.run;
  if (runs < (uint64_t)threads) threads = runs ? (int)runs : 1;
  /* Zeros: symbols beyond the last word of a short block are looked at, and masked. */
  uint64_t *memory = calloc(1, 16 * (size_t)runs + (size_t)threads * DELTA_CHUNK_WORDS), *offsets = memory;
  if (!memory)
    return tpde_fail(error, TPDE_E_MEMORY, "out of memory", UINT64_MAX, -1, 0,
                     16 * runs + (uint64_t)threads * DELTA_CHUNK_WORDS);
  uint64_t *starts = offsets + runs;
  a.offsets = offsets;
  a.starts = starts;
  a.symbols = (uint8_t *)(starts + runs);
  for (uint64_t i = 0; i < a.chunks; i++) {
    if (i % a.run == 0) offsets[i / a.run] = sum;
    if (i % a.run == 0) starts[i / a.run] = found;
    found += changes[i];
    if (sizes[i] > data_bytes - sum) {
      free(memory);
      return tpde_fail(error, TPDE_E_CHUNK, "a chunk ends beyond its tensor's bytes", i, -1, sum + sizes[i], data_bytes);
    }
    sum += sizes[i];
  }
  if (sum == data_bytes) {
    if (threads == 1) apply_job(&a, 0);
    else tpde_parallel(threads, apply_job, &a);
  }
  free(memory);
  if (sum != data_bytes)
    return tpde_fail(error, TPDE_E_CHUNK, "bytes that belong to no chunk", UINT64_MAX, -1, data_bytes, sum);
  if (a.failed != UINT64_MAX)
    return tpde_fail(error, TPDE_E_CHUNK, "its changes do not end where its bytes and words do", a.failed, -1,
                     changes[a.failed], sizes[a.failed]);
  if (check_sum) *check_sum = a.sum;
  return TPDE_OK;
}

int tpde_delta_apply(const tpde_delta_model *model, const uint8_t *data, uint64_t data_bytes, const uint32_t *changes,
                     const uint32_t *sizes, void *words, uint64_t count, int check, int threads, tpde_error *error) {
  return apply(model, data, data_bytes, changes, sizes, words, count, check, NULL, NULL, NULL, threads, error);
}

int tpde_delta_list(const tpde_delta_model *model, const uint8_t *data, uint64_t data_bytes, const uint32_t *changes,
                    const uint32_t *sizes, const void *words, uint64_t count, uint64_t *positions, void *targets,
                    uint64_t *check_sum, int threads, tpde_error *error) {
  if (!check_sum || !positions || !targets || !model || model->classes.count != 1)
    return tpde_fail(error, TPDE_E_ARGUMENT, "no place for the changes, or a model of several classes", UINT64_MAX, -1,
                     model ? (uint64_t)model->classes.count : 0, 1);
  return apply(model, data, data_bytes, changes, sizes, words, count, 1, positions, targets, check_sum, threads, error);
}
