/* table.c: prefix-code tables, format.md 3: checking, and expanding for decoding and encoding. */
#include <stdlib.h>

#include "internal.h"

static int parse(const uint8_t *p, size_t bytes, table *t, const uint8_t **values, size_t *used, uint64_t number,
                 tpde_error *error) {
  uint64_t codes = 0, sum = 0;
  memset(t, 0, sizeof *t);
  if (bytes < 4) return tpde_fail(error, TPDE_E_TABLE, "the section ends inside a table", number, -1, bytes, 4);
  t->kind = p[0];
  t->max_bits = p[1];
  t->raw_bits = p[2];
  t->escape_bits = p[3];
  if (t->kind < 1 || t->kind > KIND_TOKENS)
    return tpde_fail(error, TPDE_E_TABLE, "unknown kind of table", number, -1, t->kind, KIND_TOKENS);
  if (t->max_bits < 1 || t->max_bits > MAX_BITS)
    return tpde_fail(error, TPDE_E_TABLE, "longest codeword out of range", number, -1, t->max_bits, MAX_BITS);
  if (t->raw_bits > 7 || t->max_bits + t->raw_bits > MAX_BITS || (t->kind != 1 && t->raw_bits))
    return tpde_fail(error, TPDE_E_TABLE, "raw bits out of range", number, -1, t->raw_bits,
                     t->kind != 1 ? 0 : (uint64_t)(MAX_BITS - t->max_bits));
  if (t->escape_bits > t->max_bits)
    return tpde_fail(error, TPDE_E_TABLE, "escape longer than the longest codeword", number, -1,
                     t->escape_bits, t->max_bits);
  t->index_bits = (uint8_t)(t->max_bits + t->raw_bits);
  if (bytes < 4 + 2u * t->max_bits)
    return tpde_fail(error, TPDE_E_TABLE, "the section ends inside a table", number, -1, bytes,
                     4 + 2u * t->max_bits);
  for (int l = 1; l <= t->max_bits; l++) {
    uint64_t n = load16(p + 4 + 2 * (l - 1));
    codes += n;
    if (l == t->escape_bits) n++;
    sum += n << (t->max_bits - l);
  }
  if (sum != 1ull << t->max_bits)
    return tpde_fail(error, TPDE_E_TABLE, "code lengths are not complete", number, -1, sum,
                     1ull << t->max_bits);
  if (!codes) return tpde_fail(error, TPDE_E_TABLE, "a table without values", number, -1, 0, 1);
  *used = align_up((uint32_t)(4 + 2u * t->max_bits + codes * VALUE_BYTES(t->kind)), 4);
  if (*used > bytes)
    return tpde_fail(error, TPDE_E_TABLE, "the section ends inside a table", number, -1, bytes, *used);
  *values = p + 4 + 2 * t->max_bits;
  for (size_t i = 4 + 2u * t->max_bits + codes * t->kind; i < *used; i++)
    if (p[i]) return tpde_fail(error, TPDE_E_TABLE, "padding after a table is not zero", number, -1, p[i], 0);
  return TPDE_OK;
}

static uint32_t reverse(uint32_t code, int bits) {
  uint32_t r = 0;
  for (int i = 0; i < bits; i++) r |= ((code >> i) & 1u) << (bits - 1 - i);
  return r;
}

static void expand_decode(table *t, uint32_t entry, uint32_t code, int bits) {
  for (uint32_t i = code; i < 1u << t->index_bits; i += 1u << bits) t->decode[i] = entry;
}

static uint32_t encode_entry(uint32_t code, int bits) { return code << (32 - bits) | (uint32_t)bits; }

static int expand(table *t, const uint8_t *values, int encode, uint64_t number, tpde_error *error) {
  uint32_t symbols = 1u << VALUE_BITS(t->kind), raw = 1u << t->raw_bits, code = 0, at = 0;
  uint8_t seen[65536 / 8] = {0};
  t->decode = malloc(sizeof(uint32_t) << t->index_bits);
  if (encode) t->encode = malloc(sizeof(uint32_t) * symbols);
  if (!t->decode || (encode && !t->encode))
    return tpde_fail(error, TPDE_E_MEMORY, "out of memory", number, -1, 0, 4 * symbols);
  if (encode) memset(t->encode, 0, sizeof(uint32_t) * symbols);
  for (int bits = 1; bits <= t->max_bits; bits++) {
    const uint8_t *counts = (const uint8_t *)values - 2 * t->max_bits;
    uint32_t n = load16(counts + 2 * (bits - 1));
    for (uint32_t k = 0; k < n; k++, at++, code++) {
      uint32_t v = VALUE_BYTES(t->kind) == 2 ? load16(values + 2 * at) : values[at], r = reverse(code, bits);
      if (v >= symbols >> t->raw_bits)
        return tpde_fail(error, TPDE_E_TABLE, "a value out of range", number, -1, v, symbols >> t->raw_bits);
      if (seen[v / 8] >> (v % 8) & 1)
        return tpde_fail(error, TPDE_E_TABLE, "a value has two codewords", number, -1, v, 1);
      seen[v / 8] |= (uint8_t)(1u << (v % 8));
      if (at == 0) t->pad = (uint16_t)(v << t->raw_bits);
      for (uint32_t low = 0; low < raw; low++) {
        uint32_t whole = r | (low << bits), symbol = (v << t->raw_bits) | low;
        int taken = bits + t->raw_bits;
        expand_decode(t, symbol << 16 | (uint32_t)taken, whole, taken);
        if (encode) t->encode[symbol] = encode_entry(whole, taken);
      }
    }
    if (bits == t->escape_bits) {
      t->escape = (uint16_t)reverse(code, bits);
      expand_decode(t, ENTRY_ESCAPE | (uint32_t)bits, t->escape, bits);
      code++;
    }
    code <<= 1;
  }
  if (!encode) return TPDE_OK;
  for (uint32_t s = 0; s < symbols; s++) {
    if (t->encode[s]) continue;
    if (!t->escape_bits)
      return tpde_fail(error, TPDE_E_ARGUMENT, "a table without an escape cannot write every value", number, -1,
                       s, symbols);
    t->encode[s] = ENTRY_ESCAPE | (uint32_t)(t->escape_bits + VALUE_BITS(t->kind));
  }
  return TPDE_OK;
}

int tpde_table_open(const uint8_t *p, size_t bytes, int encode, table *t, size_t *used, uint64_t number,
                    tpde_error *error) {
  const uint8_t *values = NULL;
  int code = parse(p, bytes, t, &values, used, number, error);
  return code ? code : expand(t, values, encode, number, error);
}

/* Collect the lengths of all tables, for counting. */
static int share_lengths(tpde_codec *c, tpde_error *error) {
  for (int i = 0; i < c->layout.tables; i++) {
    table *t = &c->tables[i];
    const table *before = i ? t - 1 : NULL;
    uint32_t symbols = t->kind == 2 ? 65536 : 256;
    if (before && before->kind == t->kind && before->counted < TABLES_AT_ONCE - 1) {
      t->lengths = before->lengths;
      t->counted = before->counted + 1;
    } else if (!(t->lengths = calloc(symbols, sizeof *t->lengths))) {
      return tpde_fail(error, TPDE_E_MEMORY, "out of memory", (uint64_t)i, -1, 0, 4 * symbols);
    }
    for (uint32_t s = 0; s < symbols; s++) t->lengths[s] |= ENTRY_BITS(t->encode[s]) << 8 * t->counted;
  }
  return TPDE_OK;
}

int tpde_codec_open(const tpde_layout *layout, const uint8_t *section, uint32_t section_bytes, int encode,
                    tpde_codec **codec, tpde_error *error) {
  size_t at = 0;
  if (!codec) return tpde_fail(error, TPDE_E_ARGUMENT, "no place for the codec", UINT64_MAX, -1, 0, 0);
  *codec = NULL;
  if (!layout || !tpde_layout_valid(layout) || ((section_bytes || layout->tables) && !section))
    return tpde_fail(error, TPDE_E_ARGUMENT, "the layout is not valid", UINT64_MAX, -1, 0, 0);
  tpde_codec *c = calloc(1, sizeof *c);
  if (!c) return tpde_fail(error, TPDE_E_MEMORY, "out of memory", UINT64_MAX, -1, 0, sizeof *c);
  c->layout = *layout;
  int code = TPDE_OK;
  for (int i = 0; i < layout->tables && !code; i++) {
    size_t used = 0;
    table *t = &c->tables[i];
    code = tpde_table_open(section + at, section_bytes - at, encode, t, &used, (uint64_t)i, error);
    if (!code && t->kind == KIND_TOKENS)
      code = tpde_fail(error, TPDE_E_TABLE, "a table of a delta's tokens", (uint64_t)i, -1, t->kind, 2);
    at += code ? 0 : used;
  }
  if (!code && align_up((uint32_t)at, 16) != section_bytes)
    code = tpde_fail(error, TPDE_E_TABLE, "the section's size does not fit its tables", UINT64_MAX, -1,
                     section_bytes, align_up((uint32_t)at, 16));
  for (; !code && at < section_bytes; at++)
    if (section[at])
      code = tpde_fail(error, TPDE_E_TABLE, "padding after the tables is not zero", UINT64_MAX, -1, section[at], 0);
  if (!code && encode) code = share_lengths(c, error);
  if (code) {
    tpde_codec_close(c);
    return code;
  }
  *codec = c;
  return TPDE_OK;
}

int tpde_codec_table(const tpde_codec *codec, int number, int *kind, int *raw_bits, int *index_bits,
                     const uint32_t **entries) {
  if (!codec || number < 0 || number >= codec->layout.tables) return TPDE_E_ARGUMENT;
  const table *t = &codec->tables[number];
  *kind = t->kind;
  *raw_bits = t->raw_bits;
  *index_bits = t->index_bits;
  *entries = t->decode;
  return TPDE_OK;
}

void tpde_codec_close(tpde_codec *codec) {
  if (!codec) return;
  for (int i = 0; i < TPDE_MAX_TABLES; i++) {
    free(codec->tables[i].decode);
    free(codec->tables[i].encode);
    if (!codec->tables[i].counted) free(codec->tables[i].lengths);
  }
  free(codec);
}
