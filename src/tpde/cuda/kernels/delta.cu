// delta.cu: what changed between two states of tensors (docs/delta.md, sections 1 to 4): fingerprints, encoding and
// decoding of sparse chunks.
//
// A launch takes tensors of one kind of words. Where a block takes a chunk of 65,536 words, places of words in class
// order (3.2) come from counts: of each class in the groups of 64 words before. The bits of a chunk can only be read
// one after the other: each thread of `decode` has a chunk of its own, so that thousands wait together. Decoding takes
// three launches: `survey` counts the words of each class, which say where tables change; `decode` reads places and
// steps; `locate` finds where these are and what the words there become.
//
// Any bytes are safe: a change beyond the chunk's words, bits that do not end where they should, or more of them than
// the chunk has, are reported; nothing outside the chunk's part of the output is written. Words that others change
// meanwhile are as safe.
//
// Macros: WORD bytes of a word; ROTATE; THREADS of a block, a multiple of 32.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#if WORD == 1
typedef u8 word;
#elif WORD == 2
typedef u16 word;
#elif WORD == 4
typedef u32 word;
#else
typedef u64 word;
#endif

#define CHUNK 65536u     // words, 3.1
#define EACH 8u            // words that a lane loads at a time
#define SHARE (2 * EACH)   // and has of those that a warp loads
#define RUN (32 * SHARE)
#define GROUP (4 * SHARE)  // words of four lanes: what classes are counted in
#define GROUPS (CHUNK / GROUP)
#define CLASSES 16       // 2.1, at most
#define GOLDEN 0x9E3779B97F4A7C15ull
#define ALL 0xFFFFFFFFu
#define ESCAPE 0x100u    // of an entry; bits 0 to 4 are what a codeword takes, of a table for encoding with the token
#define WARPS (THREADS / 32)
#define BLOCKS (WORD == 1 ? 2 : ROTATE && WORD < 8 ? 4 : 3)  // of a multiprocessor: with more, registers are spilled

// src/tpde/cuda/delta_kernels.py writes these.
struct Item {
  u64 base, target;  // addresses; 0 if there is none
  u64 words;
  u64 first;         // chunk of the launch that is its first
};

struct Model {
  u32 classes, folded;
  u8 first[CLASSES];        // the lowest symbol of each class
  u32 at[CLASSES];          // of each class's table, in entries from the end of this
  u32 bits[CLASSES];        // that a table for decoding is looked up by
  u32 escape[CLASSES];      // codewords, lowest bit first
};

// What a chunk is, and where.
struct Chunk {
  const word *base, *target;
  u64 at;  // of its first word in the tensor
  u32 n;
  bool wide;  // both lie at multiples of 16
};

__device__ __forceinline__ Chunk chunk_of(const Item& t, u64 chunk) {
  Chunk c;
  c.at = (chunk - t.first) * CHUNK;
  c.n = (u32)min((u64)CHUNK, t.words - c.at);
  c.base = (const word*)t.base + c.at;
  c.target = (const word*)t.target + c.at;
  c.wide = (t.base | t.target) % 16 == 0;
  return c;
}

__device__ __forceinline__ bool is_whole(const Chunk& c) { return c.wide && c.n == CHUNK; }

// ---- words, 1.1 and 2.3 ----

__device__ __forceinline__ u32 symbol(word w) {
#if WORD == 1
  return ROTATE ? (w << 1 | w >> 7) & 255 : w;
#else
  return (u32)(w >> (8 * WORD - 8 - ROTATE)) & 255;
#endif
}

#define SIGN ((u64)1 << (8 * WORD - 1))
#define WORD_MASK (SIGN | (SIGN - 1))

struct Step { u32 kind; u64 size; };

__device__ __forceinline__ Step step_between(u64 base, u64 target) {
  long long d;
  if (ROTATE) {
    d = (long long)((target & (SIGN - 1)) - (base & (SIGN - 1)));
    if ((base ^ target) & SIGN) return d >= 0 ? Step{2, (u64)d} : Step{3, ~(u64)d};
  } else {
    d = (long long)((target - base) << (64 - 8 * WORD)) >> (64 - 8 * WORD);
  }
  return d > 0 ? Step{0, (u64)d - 1} : Step{1, ~(u64)d};
}

// ---- buckets, 1.2 ----

__device__ __forceinline__ u32 bucket_of(u64 x) {
  if (x < 2) return (u32)x;
  const int k = 63 - __clzll((long long)x);
  return 2 * k + (u32)(x >> (k - 1) & 1);
}

__device__ __forceinline__ u32 extra_bits(u32 bucket) { return bucket < 4 ? 0 : bucket / 2 - 1; }

__device__ __forceinline__ u64 bucket_start(u32 bucket) {
  return bucket < 2 ? bucket : (2ull + (bucket & 1)) << (bucket / 2 - 1);
}

__device__ __forceinline__ u64 low_bits(u64 x, u32 bits) { return x & (((u64)1 << bits) - 1); }

// ---- fingerprints and checks, 4 ----

struct Print { u64 a, b; };

__device__ __forceinline__ u64 key_of(u64 number) { return (number + 1) * GOLDEN; }

__device__ __forceinline__ void add_keyed(Print& p, u64 x, u64 k) {
  const u64 y = x ^ k, z = x + k;
  p.a += (u64)(u32)y * (u32)(y >> 32);
  p.b += (u64)(u32)z * (u32)(z >> 32);
}

__device__ __forceinline__ void add_term(Print& p, u64 x, u64 number) { add_keyed(p, x, key_of(number)); }

// 8 bytes of a chunk; zeros beyond its words, which only a tensor's last chunk can have within them.
__device__ __forceinline__ u64 unit_of(const word* words, u32 n, u32 unit, bool wide) {
  const u32 first = unit * (8 / WORD);
  if (wide && first + 8 / WORD <= n) return __ldg((const u64*)words + unit);
  u64 x = 0;
  for (u32 j = 0; j < 8 / WORD && first + j < n; j++) x |= (u64)words[first + j] << (8 * WORD * j & 63);
  return x;
}

__device__ __forceinline__ u64 sum_of_warp(u64 x) {
  for (int d = 16; d; d /= 2) x += __shfl_xor_sync(ALL, x, d);
  return x;
}

// Of the lanes up to this one.
__device__ __forceinline__ u32 sum_up_to(u32 sum) {
  for (int d = 1; d < 32; d *= 2) {
    const u32 x = __shfl_up_sync(ALL, sum, d);
    if (threadIdx.x % 32 >= d) sum += x;
  }
  return sum;
}

// Add what all threads of the block have.
__device__ __forceinline__ void add_print(u64* sums, Print p) {
  __shared__ Print parts[WARPS];
  __syncthreads(); // others may still read those of a call before
  p.a = sum_of_warp(p.a);
  p.b = sum_of_warp(p.b);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = p;
  __syncthreads();
  if (threadIdx.x) return;
  for (u32 w = 1; w < WARPS; w++) {
    p.a += parts[w].a;
    p.b += parts[w].b;
  }
  atomicAdd(sums, p.a);
  atomicAdd(sums + 1, p.b);
}

// Of a word that changes: a term of the check.
__device__ __forceinline__ u64 mixed(u64 x) {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ x >> 27) * 0x94D049BB133111EBull;
  return x ^ x >> 31;
}

__device__ __forceinline__ u64 check_term(u64 number, word base, word target) {
  return mixed(mixed(base + key_of(number)) + target);
}

__device__ __forceinline__ void add_check(u64* sum, u64 check) {
  check = sum_of_warp(check);
  if (threadIdx.x % 32 == 0) atomicAdd(sum, check);
}

#define UNROLL 4                                   // loads of 16 bytes before they are used
#define LOADS (WORD == 2 ? 4 : WORD == 4 ? 2 : 1)  // of EACH words
#define RUNS (WORD == 2 ? 2 : 1)                   // and of RUN words, by a warp

// Fingerprints of both states, how many words of each chunk differ, and whether the words of a target differ among
// themselves. Of each item `sums` has four numbers: the base's and the target's fingerprint.
extern "C" __global__ void __launch_bounds__(THREADS)
prints(const Item* __restrict__ items, const u32* __restrict__ whose, u64* sums, u32* counts, u32* varied) {
  const u64 number = blockIdx.x;
  const u32 owner = whose[number];
  const Item t = items[owner];
  const Chunk c = chunk_of(t, number);
  const u32 units = (c.n * WORD + 7) / 8, pairs = c.wide ? c.n * WORD / 16 : 0;
  const u64 first = c.at / 8 * WORD;
  Print base = {0, 0}, target = {0, 0};
  u32 changed = 0;
  u64 first_word = 0, other = 0;
  for (u32 j = 0; j < 8; j += WORD) first_word |= (u64)*(const word*)t.target << 8 * j;
  for (u32 i = threadIdx.x; i < pairs; i += UNROLL * THREADS) {
    ulonglong2 x[UNROLL], y[UNROLL];
#pragma unroll
    for (int k = 0; k < UNROLL; k++) {
      const u32 at = i + k * THREADS;
      x[k] = at < pairs ? __ldcs((const ulonglong2*)c.base + at) : ulonglong2{0, 0};
      y[k] = at < pairs ? __ldcs((const ulonglong2*)c.target + at) : ulonglong2{0, 0};
    }
#pragma unroll
    for (int k = 0; k < UNROLL; k++) {
      const u32 at = i + k * THREADS;
      if (at >= pairs) continue;
      add_term(base, x[k].x, first + 2 * at);
      add_term(base, x[k].y, first + 2 * at + 1);
      add_term(target, y[k].x, first + 2 * at);
      add_term(target, y[k].y, first + 2 * at + 1);
      other |= (y[k].x ^ first_word) | (y[k].y ^ first_word);
      const u64 d = x[k].x ^ y[k].x, e = x[k].y ^ y[k].y;
      if (d | e)
        for (u32 j = 0; j < 8; j += WORD)
          changed += ((d >> 8 * j & WORD_MASK) != 0) + ((e >> 8 * j & WORD_MASK) != 0);
    }
  }
  for (u32 i = 2 * pairs + threadIdx.x; i < units; i += THREADS) {
    const u64 x = unit_of(c.base, c.n, i, false), y = unit_of(c.target, c.n, i, false), d = x ^ y;
    add_term(base, x, first + i);
    add_term(target, y, first + i);
    for (u32 j = 0; j < 8 && i * 8 + j < c.n * WORD; j++) other |= (y ^ first_word) >> 8 * j & 255;
    for (u32 j = 0; j < 8; j += WORD) changed += (d >> 8 * j & WORD_MASK) != 0;
  }
  add_print(sums + 4 * owner, base);
  add_print(sums + 4 * owner + 2, target);
  if (other) varied[owner] = 1;
  changed = __reduce_add_sync(ALL, changed);
  if (threadIdx.x % 32 == 0 && changed) atomicAdd(counts + number, changed);
}

// ---- classes, 2.3 ----

// How many of 8 words at most are of each class: 4 bits a class. Two numbers, as no sum carries between them.
struct alignas(8) Counts {
  u32 low, high;
};

// The same of up to 128 words, 8 bits a class: of the even classes below 8, the odd ones, and those from 8 on.
struct Sums {
  u32 even, odd, high_even, high_odd;
};

struct Classes {
  Counts one[256];         // of each symbol: 1 in its class's bits
  u32 first[CLASSES + 1];  // symbol of each class, and the end
};

__device__ __forceinline__ void find_classes(const Model* m, Classes& s) {
  if (threadIdx.x <= m->classes) s.first[threadIdx.x] = threadIdx.x < m->classes ? m->first[threadIdx.x] : 256;
  for (u32 v = threadIdx.x; v < 256; v += THREADS) {
    u32 k = 0;
    while (k + 1 < m->classes && m->first[k + 1] <= v) k++;
    s.one[v] = k < 8 ? Counts{1u << 4 * k, 0} : Counts{0, 1u << 4 * (k - 8)};
  }
  __syncthreads();
}

// One that is in its class's bits, as that class's number.
__device__ __forceinline__ u32 class_number(Counts one) {
  return (63 - __clzll((long long)((u64)one.high << 32 | one.low))) / 4;
}

// WHOLE: there are CHUNK words, at a multiple of 16.
template <bool WHOLE = false>
__device__ __forceinline__ void load_words(const word* p, u32 at, u32 n, bool wide, word w[EACH]) {
  if (WHOLE || (wide && at + EACH <= n)) {
#if WORD == 1
    *(u64*)w = __ldg((const u64*)(p + at));
#else
#pragma unroll
    for (u32 j = 0; j < WORD / 2; j++) ((ulonglong2*)w)[j] = __ldg((const ulonglong2*)(p + at) + j);
#endif
    return;
  }
#pragma unroll
  for (u32 j = 0; j < EACH; j++) w[j] = at + j < n ? p[at + j] : 0;
}

template <bool WHOLE>
__device__ __forceinline__ Counts count_words(const word w[EACH], u32 at, u32 n, const Classes& s) {
  Counts c = {0, 0};
#pragma unroll
  for (u32 j = 0; j < EACH; j++) {
    const Counts one = s.one[symbol(w[j])];
    c.low += one.low;
    c.high += one.high;
  }
  if (WHOLE || at + EACH <= n) return c;
  c = {0, 0};
#pragma unroll
  for (u32 j = 0; j < EACH; j++) {
    if (at + j >= n) break;
    const Counts one = s.one[symbol(w[j])];
    c.low += one.low;
    c.high += one.high;
  }
  return c;
}

#define NIBBLES 0x0F0F0F0Fu

__device__ __forceinline__ void add_counts(Sums& s, Counts c) {
  s.even += c.low & NIBBLES;
  s.odd += c.low >> 4 & NIBBLES;
  s.high_even += c.high & NIBBLES;
  s.high_odd += c.high >> 4 & NIBBLES;
}

// How many of them are of a class, and before the n-th word.
__device__ __forceinline__ u32 count_class(const word w[EACH], u32 at, u32 n, u32 first, u32 size) {
  u32 count = 0;
#pragma unroll
  for (u32 j = 0; j < EACH; j++) count += at + j < n && symbol(w[j]) - first < size;
  return count;
}

template <bool WHOLE>
__device__ __forceinline__ void survey_words(const Chunk& c, u32 classes, const Classes& s, Print& print, u32* found) {
  const u32 units = (c.n * WORD + 7) / 8, share = CHUNK / EACH / THREADS; // a multiple of 16
  u64 key = key_of(c.at / 8 * WORD + threadIdx.x * WORD);
  Sums counted = {0, 0, 0, 0};
  for (u32 i = 0; i < share; i += LOADS) {
    alignas(16) word w[LOADS][EACH];
#pragma unroll
    for (u32 k = 0; k < LOADS; k++)
      load_words<WHOLE>(c.base, ((i + k) * THREADS + threadIdx.x) * EACH, c.n, c.wide, w[k]);
#pragma unroll
    for (u32 k = 0; k < LOADS; k++, key += THREADS * WORD * GOLDEN) {
      const u32 at = ((i + k) * THREADS + threadIdx.x) * EACH;
#pragma unroll
      for (u32 j = 0; j < WORD; j++)
        if (WHOLE || at / 8 * WORD + j < units) add_keyed(print, ((const u64*)w[k])[j], key + j * GOLDEN);
      if (classes > 1) add_counts(counted, count_words<WHOLE>(w[k], at, c.n, s));
    }
    if (classes > 1 && (i + LOADS) % 16 == 0) { // before 8 bits are too few
#pragma unroll
      for (u32 k = 0; k < CLASSES; k++) {
        if (k >= classes) break;
        const u32 four = k < 8 ? (k % 2 ? counted.odd : counted.even) : k % 2 ? counted.high_odd : counted.high_even;
        const u32 sum = __reduce_add_sync(ALL, four >> 8 * (k % 8 / 2) & 255);
        if (threadIdx.x % 32 == 0 && sum) atomicAdd(&found[k], sum);
      }
      counted = {0, 0, 0, 0};
    }
  }
}

// Fingerprints, to the first two of an item's four sums, and, if there is a model of several classes, how many words of
// each class a chunk has: CLASSES numbers for each. They are zeros before.
extern "C" __global__ void __launch_bounds__(THREADS)
survey(const Item* __restrict__ items, const u32* __restrict__ whose, const Model* __restrict__ m, u64* sums,
       u32* totals) {
  __shared__ Classes s;
  __shared__ u32 found[CLASSES];
  const u64 number = blockIdx.x;
  const u32 owner = whose[number], classes = m ? m->classes : 1;
  const Chunk c = chunk_of(items[owner], number);
  if (classes > 1) {
    if (threadIdx.x < CLASSES) found[threadIdx.x] = 0;
    find_classes(m, s);
  }
  Print print = {0, 0};
  if (is_whole(c)) survey_words<true>(c, classes, s, print, found);
  else survey_words<false>(c, classes, s, print, found);
  add_print(sums + 4 * owner, print); // which waits for all threads
  if (classes > 1 && threadIdx.x < classes) totals[number * CLASSES + threadIdx.x] = found[threadIdx.x];
}

// ---- places, 3.2 ----

#define ROW (GROUPS + GROUPS / 32 + 2)  // lanes that each take 32 of them, or those of one run, do not meet in a bank

struct Places {
  Classes classes;
  u32 start[CLASSES + 1];    // the place of each class's first word
  u16 before[CLASSES][ROW];  // words of a class in the groups before one, at `column`
};

__device__ __forceinline__ u32 column(u32 group) { return group + group / 32; }

// A set of places or of positions in a chunk, and how many are below each 32 of them.
struct Marks {
  u32 bits[CHUNK / 32];
  u16 below[CHUNK / 32];
};

// Changed words of a chunk, in any order, and how many there are.
struct Changes {
  u32* list;
  u32 room;
  u32* count;
};

// Where changes between base and target are, if there is a target.
__device__ __forceinline__ void find_changes(const Changes& f, const word old[SHARE], const word now[SHARE], u32 at) {
  u32 changed = 0;
#pragma unroll
  for (u32 j = 0; j < SHARE; j++) changed |= (u32)(old[j] != now[j]) << j;
  if (!changed) return;
  u32 i = atomicAdd(f.count, (u32)__popc(changed));
  for (; changed; changed &= changed - 1, i++)
    if (i < f.room) f.list[i] = at + __ffs(changed) - 1;
}

// What a lane counted becomes the sum over four lanes, of four classes, 8 bits each: the returned one, and every second
// one after it.
__device__ __forceinline__ u32 sum_of_four(const Sums& s, u32& sums) {
  const u32 low = threadIdx.x & 1, odd = threadIdx.x >> 1 & 1;
  const u32 even_to = __shfl_xor_sync(ALL, low ? s.even : s.high_even, 1);
  const u32 odd_to = __shfl_xor_sync(ALL, low ? s.odd : s.high_odd, 1);
  const u32 even_sum = (low ? s.high_even : s.even) + even_to, odd_sum = (low ? s.high_odd : s.odd) + odd_to;
  sums = (odd ? odd_sum : even_sum) + __shfl_xor_sync(ALL, odd ? even_sum : odd_sum, 2);
  return 8 * low + odd;
}

template <bool FIND, bool WHOLE>
__device__ __forceinline__ void scan_words(const Chunk& c, u32 classes, Places& s, const Changes& f) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (u32 run = warp; run < CHUNK / RUN; run += WARPS * RUNS) {
    alignas(16) word old[RUNS][SHARE], now[RUNS][SHARE];
#pragma unroll
    for (u32 i = 0; i < RUNS * 2; i++) {
      const u32 at = (run + i / 2 * WARPS) * RUN + lane * SHARE + i % 2 * EACH;
      load_words<WHOLE>(c.base, at, c.n, c.wide, &old[i / 2][i % 2 * EACH]);
      if constexpr (FIND) load_words<WHOLE>(c.target, at, c.n, c.wide, &now[i / 2][i % 2 * EACH]);
    }
#pragma unroll
    for (u32 k = 0; k < RUNS; k++) {
      const u32 at = (run + k * WARPS) * RUN + lane * SHARE;
      if constexpr (FIND) find_changes(f, old[k], now[k], at);
      if (classes == 1) continue;
      Sums counted = {0, 0, 0, 0};
      add_counts(counted, count_words<WHOLE>(old[k], at, c.n, s.classes));
      add_counts(counted, count_words<WHOLE>(old[k] + EACH, at + EACH, c.n, s.classes));
      u32 sums;
      const u32 first = sum_of_four(counted, sums);
      u16* const to = &s.before[first][column(at / GROUP)];
#pragma unroll
      for (u32 j = 0; j < 4; j++) to[2 * j * ROW] = (u16)(sums >> 8 * j & 255);
    }
  }
}

// Count the words of all classes, and find what changed if FIND.
template <bool FIND>
__device__ void scan(const Chunk& c, const Model* m, Places& s, const Changes& f) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, classes = m->classes;
  if (classes > 1) find_classes(m, s.classes);
  if (is_whole(c)) scan_words<FIND, true>(c, classes, s, f);
  else scan_words<FIND, false>(c, classes, s, f);
  __syncthreads();
  if (classes == 1) return;
  for (u32 k = warp; k < classes; k += WARPS) { // counts become sums of those before
    u16* const row = s.before[k] + column(lane * (GROUPS / 32));
    u32 sum = 0;
    for (u32 j = 0; j < GROUPS / 32; j++) sum += row[j];
    const u32 up = sum_up_to(sum);
    u32 running = up - sum;
    for (u32 j = 0; j < GROUPS / 32; j++) {
      const u32 own = row[j];
      row[j] = (u16)running;
      running += own;
    }
    if (lane == 31) s.start[k + 1] = running;
  }
  __syncthreads();
  if (warp == 0) { // all threads have met: the rows' totals are there
    const u32 up = sum_up_to(lane && lane <= classes ? s.start[lane] : 0);
    if (lane <= classes) s.start[lane] = up;
  }
  __syncthreads();
}

// The class of a place: the last one that begins at it or before.
__device__ __forceinline__ u32 class_of(const Places& s, u32 classes, u32 place) {
  u32 k = 0;
  for (u32 j = 1; j < classes; j++) k += s.start[j] <= place;
  return k;
}

#define PART (WORD == 1 ? EACH : GROUP / 2)  // of a group: what is loaded before it is used

// The place of a word.
__device__ __forceinline__ u32 place_of(const Chunk& c, const Places& s, u32 at) {
  const u32 k = class_number(s.classes.one[symbol(c.base[at])]), start = at / GROUP * GROUP;
  const u32 first = s.classes.first[k], size = s.classes.first[k + 1] - first;
  u32 place = s.start[k] + s.before[k][column(at / GROUP)];
  for (u32 h = start; h < at; h += PART) {
    alignas(16) word w[PART / EACH][EACH];
#pragma unroll
    for (u32 i = 0; i < PART / EACH; i++) load_words(c.base, h + i * EACH, c.n, c.wide, w[i]);
#pragma unroll
    for (u32 i = 0; i < PART / EACH; i++) place += count_class(w[i], h + i * EACH, at, first, size);
  }
  return place;
}

// The position of the word at a place.
__device__ __forceinline__ u32 position_of(const Chunk& c, const Places& s, u32 classes, u32 place) {
  const u32 k = class_of(s, classes, place);
  u32 left = place - s.start[k], group = 0; // the last one that has no more before it
  for (u32 step = GROUPS / 2; step; step /= 2)
    if (s.before[k][column(group + step)] <= left) group += step;
  left -= s.before[k][column(group)];
  const u32 first = s.classes.first[k], size = s.classes.first[k + 1] - first;
  u32 found = ALL, own = 0; // of the class, so far
  for (u32 h = group * GROUP; h < (group + 1) * GROUP && found == ALL; h += PART) {
    alignas(16) word w[PART / EACH][EACH];
#pragma unroll
    for (u32 i = 0; i < PART / EACH; i++) load_words(c.base, h + i * EACH, c.n, c.wide, w[i]);
#pragma unroll
    for (u32 i = 0; i < PART; i++)
      if (symbol(w[i / EACH][i % EACH]) - first < size && own++ == left) found = h + i;
  }
  return min(found, c.n - 1); // within, whatever others write meanwhile
}

__device__ __forceinline__ void clear(Marks& m) {
  for (u32 i = threadIdx.x; i < CHUNK / 32; i += THREADS) m.bits[i] = 0;
}

__device__ __forceinline__ void mark(Marks& m, u32 i) { atomicOr(&m.bits[i / 32], 1u << i % 32); }

// Sum up what is below each 32, once all are marked; returns how many there are.
__device__ u32 sum_up(Marks& m, u32* scratch) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, share = CHUNK / 32 / THREADS;
  u32 sum = 0, total = 0;
  for (u32 j = 0; j < share; j++) sum += __popc(m.bits[threadIdx.x * share + j]);
  const u32 up = sum_up_to(sum);
  if (lane == 31) scratch[warp] = up;
  __syncthreads();
  u32 running = up - sum;
  for (u32 w = 0; w < WARPS; w++) {
    if (w < warp) running += scratch[w];
    total += scratch[w];
  }
  for (u32 j = 0; j < share; j++) {
    m.below[threadIdx.x * share + j] = (u16)running; // 65,536 only where nothing follows
    running += __popc(m.bits[threadIdx.x * share + j]);
  }
  __syncthreads();
  return total;
}

__device__ __forceinline__ u32 rank_of(const Marks& m, u32 i) {
  return m.below[i / 32] + __popc(m.bits[i / 32] & ((1u << i % 32) - 1));
}

// ---- encoding, 3.3 ----

#define MOST_BYTES (5 + WORD)  // of a change: 12 bits, 14 after an escape, 14 of the gap, 8 * WORD - 2 of the size, 1

// Bits lie from the lowest up; nobody else's are touched.
__device__ __forceinline__ void put_bits(u32* out, u32 at, u64 value, u32 bits) {
  if (!bits) return;
  const u32 i = at / 32, shift = at % 32;
  atomicOr(out + i, (u32)value << shift);
  if (shift + bits > 32) atomicOr(out + i + 1, (u32)(value >> (32 - shift)));
  if (shift + bits > 64) atomicOr(out + i + 2, (u32)(value >> 32 >> (32 - shift)));
}

// Chunk i has `counts[i]` changes, two numbers for each in `scratch`, from 2 * lists[i] on, and zeros in `out`, from
// 4 * places[i] on: room for MOST_BYTES a change. `sizes[i]` becomes the bytes that are used, or all bits set where
// words have changed since they were counted: others may write them meanwhile, and must not lead outside. Under a model
// of one class, the changes' check is added to that of the item.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
encode(const Item* __restrict__ items, const u32* __restrict__ whose, const Model* __restrict__ m,
       const u32* __restrict__ counts, const u64* __restrict__ lists, const u64* __restrict__ places, u32* scratch,
       u32* out, u32* sizes, u64* checks) {
  __shared__ Places s;
  __shared__ Marks marks;
  __shared__ u32 sums[WARPS], taken, wrong;
  const u64 number = blockIdx.x;
  const u32 count = counts[number], lane = threadIdx.x % 32, warp = threadIdx.x / 32, classes = m->classes;
  if (!count) return;
  const Item t = items[whose[number]];
  const Chunk c = chunk_of(t, number);
  u32 *const found = scratch + 2 * lists[number], *const sorted = found + count;
  clear(marks);
  if (threadIdx.x == 0) taken = wrong = 0;
  __syncthreads();
  scan<true>(c, m, s, Changes{found, count, &taken});
  for (u32 i = threadIdx.x; i < min(taken, count); i += THREADS) {
    const u32 at = found[i], place = classes > 1 ? place_of(c, s, at) & 0xFFFF : at;
    mark(marks, place);
    found[i] = place << 16 | at;
  }
  __syncthreads();
  if (sum_up(marks, sums) != count || taken != count) {
    if (threadIdx.x == 0) sizes[number] = ALL;
    return;
  }
  for (u32 i = threadIdx.x; i < count; i += THREADS) sorted[rank_of(marks, found[i] >> 16)] = found[i];
  __syncthreads();
  const u32* const tables = (const u32*)(m + 1);
  u32* const to = out + places[number];
  u32 bits = 0;
  u64 check = 0;
  for (u32 start = 0; start < count; start += THREADS) {
    const u32 i = start + threadIdx.x;
    u32 entry = 0, token = 0, fold = 0, take = 0, gap = 0, k = 0;
    Step step = {0, 0};
    if (i < count) {
      const u32 from = i ? (sorted[i - 1] >> 16) + 1 : 0, at = sorted[i] & 0xFFFF;
      gap = (sorted[i] >> 16) - from;
      k = classes > 1 ? class_of(s, classes, from) : 0;
      const word old = c.base[at], becomes = c.target[at];
      step = step_between(old, becomes);
      check += check_term(c.at + at, old, becomes);
      fold = m->folded && step.kind < 2;
      token = bucket_of(gap) << 9 | (fold ? 0 : step.kind) << 7 | bucket_of(step.size);
      entry = __ldg(tables + m->at[k] + token);
      take = (entry & 31) + extra_bits(token >> 9) + extra_bits(token & 127) + fold;
    }
    const u32 up = sum_up_to(take);
    if (lane == 31) sums[warp] = up;
    __syncthreads();
    u32 at = bits + up - take;
    for (u32 w = 0; w < WARPS; w++) {
      if (w < warp) at += sums[w];
      bits += sums[w];
    }
    __syncthreads();
    if (at + take > 8 * MOST_BYTES * count) {
      wrong = 1;
    } else if (i < count) {
      const u32 head = entry & 31, gap_bits = extra_bits(token >> 9), size_bits = extra_bits(token & 127);
      const u64 code = entry & ESCAPE ? (u64)token << (head - 14) | m->escape[k] : (u64)(entry >> (32 - head));
      put_bits(to, at, code | low_bits(gap, gap_bits) << head, head + gap_bits);
      at += head + gap_bits;
      put_bits(to, at, low_bits(step.size, size_bits), size_bits);
      put_bits(to, at + size_bits, fold && step.kind, fold);
    }
  }
  if (classes == 1) add_check(checks + whose[number], check);
  __syncthreads();
  if (threadIdx.x == 0) sizes[number] = wrong ? ALL : (bits + 7) / 8;
}

// The chunks' bytes one after the other, as a payload has them: chunk i goes to byte offsets[i].
extern "C" __global__ void __launch_bounds__(THREADS)
gather(const u32* __restrict__ from, const u64* __restrict__ places, const u32* __restrict__ sizes,
       const u64* __restrict__ offsets, u8* to) {
  const u64 number = blockIdx.x;
  const u8* p = (const u8*)(from + places[number]);
  for (u32 i = threadIdx.x; i < sizes[number]; i += THREADS) to[offsets[number] + i] = p[i];
}

// ---- decoding ----

// The bits of a chunk, from its first one on. `used` may go beyond what the chunk has, by one change at most.
struct Reader {
  const u32* next;
  u64 held;
  u32 have;
  u64 used;
};

__device__ __forceinline__ void refill(Reader& r) {
  if (r.have > 32) return;
  r.held |= (u64)__ldg(r.next++) << r.have;
  r.have += 32;
}

__device__ __forceinline__ u32 take(Reader& r, u32 bits) { // at most 32
  refill(r);
  const u32 x = (u32)low_bits(r.held, bits);
  r.held >>= bits;
  r.have -= bits;
  r.used += bits;
  return x;
}

// The next change, under a table that is looked up by so many bits: its gap is returned.
__device__ __forceinline__ u32 take_change(Reader& r, const u32* table, u32 bits, u32 folded, Step& s) {
  refill(r);
  const u32 entry = __ldg(table + (u32)low_bits(r.held, bits));
  take(r, entry & 31);
  const u32 token = entry & ESCAPE ? take(r, 14) : entry >> 16;
  const u32 size_bits = extra_bits(token & 127);
  const u32 gap = (u32)bucket_start(token >> 9) + take(r, extra_bits(token >> 9));
  s.kind = token >> 7 & 3;
  s.size = bucket_start(token & 127);
  if (size_bits > 32) {
    s.size += take(r, 32);
    s.size += (u64)take(r, size_bits - 32) << 32;
  } else {
    s.size += take(r, size_bits);
  }
  if (folded && !s.kind) s.kind = take(r, 1);
  return gap;
}

// A step as one word: what is added, and in the topmost bit of a word signed in magnitude, whether the sign flips.
__device__ __forceinline__ word step_word(Step s) {
  const u64 d = (s.kind & 1 ? ~s.size : s.size) + !s.kind;
  return (word)(ROTATE ? (d & (SIGN - 1)) | (s.kind >= 2 ? SIGN : 0) : d);
}

__device__ __forceinline__ word take_step(word base, word step) {
  if (!ROTATE) return (word)(base + step);
  return (word)(((base ^ step) & SIGN) | (((u64)base + step) & (SIGN - 1)));
}

// Chunk i has `counts[i]` changes in `sizes[i]` bytes from `offsets[i]` on; 24 bytes may be read beyond the last one's.
// Their places go to `places`, their steps to `steps`, from lists[i] on. `good[i]` becomes how many there are; it and
// they stay as they are, and `bad` of the item becomes 1, where the chunk is damaged. A thread takes a chunk, of which
// there are `chunks`.
extern "C" __global__ void __launch_bounds__(THREADS)
decode(const Item* __restrict__ items, const u32* __restrict__ whose, const Model* __restrict__ m,
       const u32* __restrict__ totals, const u32* __restrict__ counts, const u64* __restrict__ lists,
       const u8* __restrict__ data, const u64* __restrict__ offsets, const u32* __restrict__ sizes, u16* places,
       word* steps, u32* good, u32* bad, u64 chunks) {
  const u64 number = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (number >= chunks || !counts[number]) return;
  const u32 count = counts[number], owner = whose[number], classes = m->classes;
  const Item t = items[owner];
  const u32 n = chunk_of(t, number).n;
  const u32* const total = totals + number * CLASSES;
  const u64 list = lists[number], limit = 8 * (u64)sizes[number], p = (u64)(data + offsets[number]);
  Reader r = {(const u32*)(p & ~(u64)3), 0, 0, 0};
  refill(r);
  r.held >>= 8 * (p & 3);
  r.have -= 8 * (p & 3);
  const u32* const tables = (const u32*)(m + 1);
  const u32* table = tables + m->at[0];
  u32 place = 0, k = 0, end = classes > 1 ? total[0] : n, bits = m->bits[0], i = 0;
  for (; i < count && place < n; i++) {
    while (place >= end && k + 1 < classes) {
      end += total[++k];
      table = tables + m->at[k];
      bits = m->bits[k];
    }
    Step step;
    place += take_change(r, table, bits, m->folded, step);
    if (place >= n || r.used > limit) break;
    places[list + i] = (u16)place++;
    steps[list + i] = step_word(step);
  }
  if (i == count && limit >= r.used && limit - r.used < 8) good[number] = count;
  else bad[owner] = 1;
}

// What `decode` read, `good[i]` changes of chunk i: where they are goes to `positions`, counted from the chunk's first
// word, what the words become to `words`, both from lists[i] on, in memory order. `places` and `steps` are used up.
// What the changes add to an item's fingerprint is added to its last two `sums`; under a model of one class their check
// is added to the item's of `checks`, which may be null.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
locate(const Item* __restrict__ items, const u32* __restrict__ whose, const Model* __restrict__ m,
       const u32* __restrict__ good, const u64* __restrict__ lists, u16* places, word* steps, u16* positions,
       word* words, u64* sums, u64* checks, u32* bad) {
  __shared__ Places s;
  __shared__ Marks marks;
  __shared__ u32 scratch[WARPS];
  const u64 number = blockIdx.x;
  const u32 count = good[number], classes = m->classes;
  if (!count) return;
  const u32 owner = whose[number];
  const Item t = items[owner];
  const Chunk c = chunk_of(t, number);
  const u64 list = lists[number];
  clear(marks);
  __syncthreads();
  if (classes > 1) scan<false>(c, m, s, Changes{nullptr, 0, nullptr});
  for (u32 i = threadIdx.x; i < count; i += THREADS) {
    const u32 place = places[list + i], at = classes > 1 ? position_of(c, s, classes, place) : place;
    mark(marks, at);
    places[list + i] = (u16)at;
    steps[list + i] = take_step(c.base[at], steps[list + i]);
  }
  __syncthreads();
  if (sum_up(marks, scratch) != count) { // others have changed words meanwhile
    if (threadIdx.x == 0) bad[owner] = 1;
    return;
  }
  for (u32 i = threadIdx.x; i < count; i += THREADS) {
    const u32 at = places[list + i], rank = rank_of(marks, at);
    positions[list + rank] = (u16)at;
    words[list + rank] = steps[list + i];
  }
  __syncthreads();
  if (checks && classes == 1) { // in a loop of its own, or registers are spilled on some cards
    u64 check = 0;
    for (u32 i = threadIdx.x; i < count; i += THREADS) {
      const u32 at = positions[list + i];
      check += check_term(c.at + at, c.base[at], words[list + i]);
    }
    add_check(checks + owner, check);
  }
  Print change = {0, 0};
  for (u32 i = threadIdx.x; i < count; i += THREADS) {
    const u32 per = 8 / WORD, unit = positions[list + i] / per;
    if (i && positions[list + i - 1] / per == unit) continue; // the first of a unit has it
    const u64 x = unit_of(c.base, c.n, unit, c.wide), number = c.at / per + unit;
    u64 y = x;
    for (u32 j = i; j < count; j++) {
      const u32 at = positions[list + j];
      if (at / per != unit) break;
      const u32 shift = 8 * WORD * (at % per);
      y = (y & ~(WORD_MASK << shift)) | (u64)words[list + j] << shift;
    }
    Print before = {0, 0}, after = {0, 0};
    add_term(before, x, number);
    add_term(after, y, number);
    change.a += after.a - before.a;
    change.b += after.b - before.b;
  }
  add_print(sums + 4 * owner + 2, change);
}

// What `locate` found becomes the base's words.
extern "C" __global__ void __launch_bounds__(THREADS)
write(const Item* __restrict__ items, const u32* __restrict__ whose, const u32* __restrict__ counts,
      const u64* __restrict__ lists, const u16* __restrict__ positions, const word* __restrict__ words) {
  const u64 number = blockIdx.x;
  const Item t = items[whose[number]];
  word* const to = (word*)t.base + (number - t.first) * CHUNK;
  const u64 list = lists[number];
  for (u32 i = threadIdx.x; i < counts[number]; i += THREADS) to[positions[list + i]] = words[list + i];
}
