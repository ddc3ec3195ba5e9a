// window_encode.cu: a bf16 matrix into the window layout (docs/windows.md), the bytes that the core writes.
//
// The matrix is read twice. `plan` counts the exponents of each row and chooses its window, for both values of the flag,
// and adds up which XORs escapes would have. Of these counts the host chooses table and flag, and knows the blob's size.
// `encode` writes the blob: a warp takes a chunk, four high bytes at a time. High bytes and a bit for each escape stay in
// shared memory, until it is known where the chunk's entries go: a block takes eight chunks, waits for the sum of the
// blocks before, which these hand on, and so nobody reads the matrix a third time to count.
//
// Rows of any stride and alignment are encoded; 16 bytes are loaded at a time where all rows start at multiples of 16.
// Words that others change meanwhile make a blob that is none, and nothing outside it is written.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define ALL 0xFFFFFFFFu
#define WARPS 8u
#define THREADS 256u
#define EXPONENTS 256u
#define XORS 128u
#define STRIPE_ROWS 16u  // 2.1
#define HEADER_BYTES 128u
#define PAIR_BYTES 1408u   // 3.1
#define CHUNK_BYTES 5632u
#define PLACES 4096u
#define MAGIC 0x1A0A0D5744505489ull  // 5.1
#define VERSION 1u

struct Matrix {
  const u16* words;
  u64 stride;  // between rows, in words
  u32 rows, columns;
};

// ---- plan, 6.1 ----

#define UNROLL 4  // loads of 16 bytes before they are used
#define LAST 249u // the highest exponent that a window begins at, 1.3
// Lanes of either parity count for themselves: weights have few exponents, and all lanes of a warp count at a time. What
// a copy has of an exponent lies half of all banks away from the other's.
#define COPIES 2u
#define APART 16u

// Where a copy of a row's counts has an exponent's.
__device__ __forceinline__ u32 count_at(u32 copy, u32 exponent) { return EXPONENTS * copy + (exponent ^ APART * copy); }

// Count two words. `own` is where a thread's counts are, in bytes: a multiple of their size, and which banks.
__device__ __forceinline__ void count_two(u8* counts, u32 own, u32 two) {
  atomicAdd((u32*)(counts + ((two >> 5 & 0x3FC) ^ own)), 1u);
  atomicAdd((u32*)(counts + ((two >> 21 & 0x3FC) ^ own)), 1u);
}

__device__ __forceinline__ void count_one(u8* counts, u32 own, u32 word) {
  atomicAdd((u32*)(counts + ((word >> 5 & 0x3FC) ^ own)), 1u);
}

// Count a row's exponents; `member` of so many threads.
template <u32 MEMBERS>
__device__ __forceinline__ void count_row(const u16* row, u32 columns, u32 member, u8* counts, u32 own) {
  const u32 head = min((u32)(-(u64)row % 16 / 2), columns), octets = (columns - head) / 8, tail = head + 8 * octets;
  const uint4* from = (const uint4*)(row + head);
  for (u32 i = member; i < octets; i += UNROLL * MEMBERS) {
    uint4 x[UNROLL];
#pragma unroll
    for (u32 k = 0; k < UNROLL; k++)
      if (i + k * MEMBERS < octets) x[k] = __ldg(from + i + k * MEMBERS);
#pragma unroll
    for (u32 k = 0; k < UNROLL; k++) {
      if (i + k * MEMBERS >= octets) break;
      count_two(counts, own, x[k].x);
      count_two(counts, own, x[k].y);
      count_two(counts, own, x[k].z);
      count_two(counts, own, x[k].w);
    }
  }
  if (member < head) count_one(counts, own, row[member]);
  if (member < columns - tail) count_one(counts, own, row[tail + member]);
}

// A row's record, and which XORs its escapes have. A lane has the counts of eight exponents, and of the next eight.
template <bool ZERO>
__device__ __forceinline__ u32 choose(const u32 counts[16], bool even, u32 lane, u32* xors) {
  const u32 width = ZERO ? 6 : 8, low = ZERO && lane == 0 ? 2 : 0; // 6.1: exponents 0 and 1 are not counted
  u32 sum = 0, most = 0, at = 8 * lane;
#pragma unroll
  for (u32 i = 0; i < width; i++) sum += i < low ? 0 : counts[i];
#pragma unroll
  for (u32 i = 0; i < 8; i++) {
    if (sum > most && 8 * lane + i <= LAST && !(even && i % 2)) {
      most = sum;
      at = 8 * lane + i;
    }
    sum += counts[i + width] - (i < low ? 0 : counts[i]);
  }
  const u32 best = __reduce_max_sync(ALL, most), record = __reduce_min_sync(ALL, most == best ? at : EXPONENTS);
  const u32 base = record >> 1, parity = record & 1;
#pragma unroll
  for (u32 i = 0; i < 8; i++) {
    if (!counts[i]) continue;
    const u32 pair = (8 * lane + i - parity) >> 1;
    if (ZERO ? pair == 0 || pair - base < 3 : pair - base < 4) continue;
    atomicAdd(xors + (ZERO ? pair : pair ^ base), counts[i]);
  }
  return record;
}

// Windows of rows, TEAM warps a row. A block counts escapes in 32 bits: fewer than 2^32 words are a block's.
template <u32 TEAM>
__device__ __forceinline__ void plan_rows(const Matrix& m, u8* records, u64* counts) {
  __shared__ uint4 exponents[WARPS / TEAM][COPIES * EXPONENTS / 4];
  __shared__ u32 xors[2 * XORS];
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, team = warp / TEAM;
  u32* mine = (u32*)exponents[team];
  const u32 own = 4 * (COPIES * EXPONENTS * team + count_at(lane % COPIES, 0));
  for (u32 i = threadIdx.x; i < WARPS / TEAM * COPIES * EXPONENTS; i += THREADS) ((u32*)exponents)[i] = 0;
  xors[threadIdx.x] = 0;
  __syncthreads();
  const u64 padded = (m.rows + STRIPE_ROWS - 1ull) / STRIPE_ROWS * STRIPE_ROWS, step = (u64)gridDim.x * (WARPS / TEAM);
  for (u64 first = (u64)blockIdx.x * (WARPS / TEAM); first < m.rows; first += step) {
    const u64 row = first + team;
    const bool there = row < m.rows;
    if (there)
      count_row<32 * TEAM>(m.words + row * m.stride, m.columns, threadIdx.x % (32 * TEAM), (u8*)exponents, own);
    if (TEAM > 1) __syncthreads();
    else __syncwarp();
    if (there && warp % TEAM == 0) {
      u32 c[16];
#pragma unroll
      for (u32 i = 0; i < 16; i++) {
        c[i] = 0;
        if (8 * lane + i < EXPONENTS)
          for (u32 k = 0; k < COPIES; k++) c[i] += mine[count_at(k, 8 * lane + i)];
      }
      const bool even = __shfl_sync(ALL, c[0], 0) != 0;
      __syncwarp(); // all have read
#pragma unroll
      for (u32 i = 0; i < COPIES * EXPONENTS / 4; i += 32) ((uint4*)mine)[i + lane] = uint4{0, 0, 0, 0};
      const u32 clear = choose<false>(c, even, lane, xors), set = choose<true>(c, even, lane, xors + XORS);
      if (lane == 0) {
        records[row] = (u8)clear;
        records[padded + row] = (u8)set;
      }
    }
    if (TEAM > 1) __syncthreads();
    else __syncwarp();
  }
  __syncthreads();
  if (xors[threadIdx.x]) atomicAdd(counts + threadIdx.x, (u64)xors[threadIdx.x]);
}

// ---- words, 1 ----

#define EACH 0x01010101u

// Four high bytes: their codes, a byte each, and bit 6 of each that is an escape.
struct Four {
  u32 codes, escapes;
};

template <bool ZERO>
__device__ __forceinline__ Four code(u32 high, u32 base) {
  const u32 from = (high | 0x80 * EACH) - base;                 // 128 + pair - base: no byte borrows
  const u32 far = (from >> 2 & 0x3F * EACH) ^ 0x20 * EACH;      // zero if that is 128 to 131
  u32 escapes = (far + 0x3F * EACH) & 0x40 * EACH, n = from & 0x03 * EACH, first = 0;
  if (ZERO) { // the pairs are 0, base, base + 1, base + 2
    const u32 some = ((high & 0x7F * EACH) + 0x7F * EACH) >> 1 & 0x40 * EACH;
    escapes = (escapes | (from & from >> 1 & EACH) << 6) & some;
    first = some ^ 0x40 * EACH;
    n = (n + EACH) & 0x03 * EACH;
  }
  const u32 none = escapes | first;
  n &= ~(none >> 5 | none >> 6);
  return {n | (high >> 5 & 0x04 * EACH), escapes};
}

// What a lane has of half a tile.
struct Octet {
  u32 codes, low[2], high[2];
  u32 escapes;  // a bit each
};

template <bool ZERO>
__device__ __forceinline__ Octet code_octet(uint4 x, u32 base, u32 less) {
  const u32 a = x.x - less, b = x.y - less, c = x.z - less, d = x.w - less; // 1.1: no word borrows
  Octet o;
  o.low[0] = __byte_perm(a, b, 0x6420);
  o.low[1] = __byte_perm(c, d, 0x6420);
  o.high[0] = __byte_perm(a, b, 0x7531);
  o.high[1] = __byte_perm(c, d, 0x7531);
  const Four first = code<ZERO>(o.high[0], base), second = code<ZERO>(o.high[1], base);
  o.codes = __byte_perm(first.codes | first.codes >> 4, second.codes | second.codes >> 4, 0x6420);
  // Bits 6, 14, 22, 30 become bits 28 to 31; nothing else that is added gets there.
  o.escapes = first.escapes * 0x00408102u >> 28 | second.escapes * 0x00408102u >> 28 << 4;
  return o;
}

// ---- bodies, 2 and 3 ----

// Where a lane's words are in a body, 3.4.
__device__ __forceinline__ u32 code_at(u32 pairs, u32 k, u32 lane) {
  return pairs == 4 ? 512 * (k / 4) + 16 * lane + 4 * (k % 4) : 128 * k + 4 * lane;
}

__device__ __forceinline__ u32 low_at(u32 pairs, u32 m, u32 lane) {
  return pairs == 4 ? 1536 + 512 * (m / 4) + 16 * lane + 4 * (m % 4) : 384 * pairs + 128 * m + 4 * lane;
}

// What a lane has of the rows of a half.
struct Row {
  u32 base, less;  // four times, and two times
  u32 padding;     // two words, 2.3
};

template <bool ZERO>
__device__ __forceinline__ Row row_of(u32 record) {
  const u32 base = record >> 1, less = (record & 1) << 7;
  return {base * EACH, less * 0x10001, ((ZERO ? 0 : base << 8) + less) * 0x10001};
}

// Where a lane's words are: its rows of both halves, from its first octet on.
struct Lane {
  const u16 *from[2];
  u32 left[2];  // words of these rows from there on, 0 if there is none
  bool wide;    // at multiples of 16
};

// Eight words of a half, of which some may not be there.
__device__ __forceinline__ uint4 load_some(const Lane& l, u32 half, u32 at, u32 padding) {
  const u16* from = (half ? l.from[1] : l.from[0]) + at;
  const u32 left = half ? l.left[1] : l.left[0];
  if (l.wide && at + 8 <= left) return __ldg((const uint4*)from);
  u32 x[4];
#pragma unroll
  for (u32 i = 0; i < 4; i++) {
    x[i] = padding;
    if (at + 2 * i < left) x[i] = (padding & 0xFFFF0000u) | from[2 * i];
    if (at + 2 * i + 1 < left) x[i] = (x[i] & 0xFFFFu) | (u32)from[2 * i + 1] << 16;
  }
  return {x[0], x[1], x[2], x[3]};
}

// A chunk's places, in shared memory.
struct Places {
  uint4 high[PLACES / 16];      // a byte each
  uint4 escapes[PLACES / 128];  // a bit each
  u32 first[STRIPE_ROWS];       // pairs of windows of rows
};

__device__ __forceinline__ void put(Places& places, u32 octet, const Octet& o) {
  const u32 at = 32 * octet + threadIdx.x % 32;
  ((u64*)places.high)[at] = (u64)o.high[1] << 32 | o.high[0];
  ((u8*)places.escapes)[at] = (u8)o.escapes;
}

// The codes of the fourth octet, a bit in each nibble of the others (3.2).
__device__ __forceinline__ void add_fourth(u32 three[3], u32 codes) {
  three[0] |= (codes & 0x11111111u) << 3;
  three[1] |= (codes & 0x22222222u) << 2;
  three[2] |= (codes & 0x44444444u) << 1;
}

// Write the body of a chunk all of whose words are there, at multiples of 16, and what is at its places. An octet of the
// next pair of tiles is loaded where one was used up.
template <bool ZERO>
__device__ __forceinline__ void encode_whole(const Lane& l, const Row rows[2], u8* body, Places& places) {
  u32 codes[12];
  uint4 x[4], low;
  uint4* to = (uint4*)body + threadIdx.x % 32;
#pragma unroll
  for (u32 k = 0; k < 4; k++) x[k] = __ldg((const uint4*)(l.from[k % 2] + 32 * (k / 2)));
#pragma unroll
  for (u32 p = 0; p < 4; p++) {
    u32* three = codes + 3 * p;
#pragma unroll
    for (u32 k = 0; k < 4; k++) {
      const Octet o = code_octet<ZERO>(x[k], rows[k % 2].base, rows[k % 2].less);
      if (p < 3) x[k] = __ldg((const uint4*)(l.from[k % 2] + 64 * (p + 1) + 32 * (k / 2)));
      put(places, 4 * p + k, o);
      if (k < 3) three[k] = o.codes;
      else add_fourth(three, o.codes);
      if (k % 2 == 0) {
        low.x = o.low[0];
        low.y = o.low[1];
      } else {
        low.z = o.low[0];
        low.w = o.low[1];
        to[96 + 32 * (2 * p + k / 2)] = low;
      }
    }
  }
#pragma unroll
  for (u32 k = 0; k < 3; k++)
    to[32 * k] = uint4{codes[4 * k], codes[4 * k + 1], codes[4 * k + 2], codes[4 * k + 3]};
}

// Any chunk's.
template <bool ZERO>
__device__ __forceinline__ void encode_some(const Lane& l, u32 pairs, const Row rows[2], u8* body, Places& places) {
  const u32 lane = threadIdx.x % 32;
#pragma unroll 1
  for (u32 p = 0; p < 4; p++) {
    u32 three[3];
#pragma unroll
    for (u32 k = 0; k < 4; k++) {
      if (p >= pairs) {  // none of it has a place
        ((u8*)places.escapes)[32 * (4 * p + k) + lane] = 0;
        continue;
      }
      const Row& row = rows[k % 2];
      const uint4 x = load_some(l, k % 2, 64 * p + 32 * (k / 2), row.padding);
      const Octet o = code_octet<ZERO>(x, row.base, row.less);
      put(places, 4 * p + k, o);
      if (k < 3) three[k] = o.codes;
      else add_fourth(three, o.codes);
      const u32 m = 4 * (2 * p + k / 2) + 2 * (k % 2);
      *(u32*)(body + low_at(pairs, m, lane)) = o.low[0];
      *(u32*)(body + low_at(pairs, m + 1, lane)) = o.low[1];
    }
    for (u32 k = 0; k < 3 && p < pairs; k++) *(u32*)(body + code_at(pairs, 3 * p + k, lane)) = three[k];
  }
}

// ---- entries, 4 ----

// What is XORed to the high byte of a place's word.
__device__ __forceinline__ u32 xor_of(const Places& places, u32 place) {
  return (((const u8*)places.high)[place] & 127) ^ places.first[(place >> 5 & 7) | (place >> 5 & 8)];
}

// Of the escapes at a lane's 128 places: how many entries these take.
__device__ __forceinline__ u32 count_entries(const Places& places, const u16* said) {
  const u32 lane = threadIdx.x % 32;
  const uint4 e = places.escapes[lane];
  const u32 escapes[4] = {e.x, e.y, e.z, e.w};
  u32 count = 0;
#pragma unroll
  for (u32 k = 0; k < 4; k++)
    for (u32 set = escapes[k]; set; set &= set - 1)
      count += __popc(said[xor_of(places, 128 * lane + 32 * k + __ffs(set) - 1)]);
  return count;
}

// Write them, from number `at` on.
__device__ __forceinline__ void write_entries(const Places& places, const u16* said, u32 at, u32 limit, u16* to) {
  const u32 lane = threadIdx.x % 32;
  const uint4 e = places.escapes[lane];
  const u32 escapes[4] = {e.x, e.y, e.z, e.w};
#pragma unroll
  for (u32 k = 0; k < 4; k++)
    for (u32 set = escapes[k]; set; set &= set - 1) {
      const u32 place = 128 * lane + 32 * k + __ffs(set) - 1;
      for (u32 way = said[xor_of(places, place)]; way; way &= way - 1, at++)
        if (at < limit) to[at] = (u16)(place | (__ffs(way) - 1) << 12);
    }
}

// Of the lanes up to this one.
__device__ __forceinline__ u32 sum_up_to(u32 sum) {
  for (int d = 1; d < 32; d *= 2) {
    const u32 x = __shfl_up_sync(ALL, sum, d);
    if (threadIdx.x % 32 >= d) sum += x;
  }
  return sum;
}

// ---- offsets, 5.2 ----

#define OWN 1ull  // of a block: it says how many entries it has
#define SUM 2ull  // and with those of all blocks before

// How many entries the blocks before have. A block's state is one word, so that nothing is read in parts; blocks are
// numbered as they start, so that all that are waited for run.
__device__ __forceinline__ u32 look_back(volatile u64* states, u32 number, u32 own) {
  const u32 lane = threadIdx.x % 32;
  u32 before = 0;
  if (lane == 0) states[number] = (number ? OWN : SUM) << 32 | own;
  for (u32 end = number; end; end -= 32) {
    u64 state;
    do {
      state = lane < end ? states[end - 1 - lane] : SUM << 32;
    } while (__ballot_sync(ALL, state == 0));
    const u32 sums = __ballot_sync(ALL, state >> 32 == SUM), last = sums ? __ffs(sums) - 1 : 31;
    before += __reduce_add_sync(ALL, lane <= last ? (u32)state : 0);
    if (sums) break; // always where `end` is 32 or less
  }
  if (lane == 0 && number) states[number] = SUM << 32 | (u32)(before + own);
  return before;
}

// ---- blobs, 5 ----

struct Blob {
  u8* at;
  u64 offsets, entries, bodies;  // where sections start
  u64 count;                     // of entries
  u64 table[2];
};

// The header, and zeros between sections.
template <bool ZERO>
__device__ __forceinline__ void write_head(const Matrix& m, const Blob& blob, u64 stripes, u64 chunks) {
  const u32 i = threadIdx.x;
  if (i < HEADER_BYTES / 8)
    ((u64*)blob.at)[i] = i == 0   ? MAGIC
                         : i == 1 ? VERSION | (ZERO ? 1u : 0u) << 16
                         : i == 2 ? m.rows
                         : i == 3 ? m.columns
                         : i == 4 ? blob.count
                         : i == 6 ? blob.table[0]
                         : i == 7 ? blob.table[1]
                                  : 0;
  for (u64 at = HEADER_BYTES + STRIPE_ROWS * stripes + i; at < blob.offsets; at += THREADS) blob.at[at] = 0;
  for (u64 at = blob.offsets + 4 * (chunks + 1) + i; at < blob.entries; at += THREADS) blob.at[at] = 0;
  for (u64 at = blob.entries + 2 * blob.count + i; at < blob.bodies; at += THREADS) blob.at[at] = 0;
}

// `ticket` and `states` are zeros before.
template <bool ZERO>
__device__ __forceinline__ void encode_blob(const Matrix& m, const u8* records, const u16* ways, u32* ticket,
                                            volatile u64* states, const Blob& blob) {
  __shared__ Places places[WARPS];
  __shared__ u16 said[XORS];
  __shared__ u32 number, before, sums[WARPS];  // sums of entries, of warps up to each
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 stripe_chunks = (m.columns + 255) / 256, stripe_pairs = (m.columns + 63) / 64;
  const u32 stripes = (m.rows + STRIPE_ROWS - 1) / STRIPE_ROWS, chunks = stripes * stripe_chunks;
  const bool wide = (u64)m.words % 16 == 0 && m.stride % 8 == 0;
  if (threadIdx.x == 0) number = atomicAdd(ticket, 1u);
  if (threadIdx.x < XORS) said[threadIdx.x] = ways[threadIdx.x];
  __syncthreads();
  if (number == 0) write_head<ZERO>(m, blob, stripes, chunks);
  const u32 chunk = number * WARPS + warp, stripe = chunk / stripe_chunks, column = chunk % stripe_chunks * 256;
  const bool there = chunk < chunks;
  Places& mine = places[warp];
  u32 count = 0, up_to = 0;
  if (there) {
    const u8* own = records + (u64)STRIPE_ROWS * stripe;
    if (lane < STRIPE_ROWS) {
      mine.first[lane] = ZERO ? 0 : own[lane] >> 1;
      if (column == 0) blob.at[HEADER_BYTES + (u64)STRIPE_ROWS * stripe + lane] = own[lane];
    }
    const Row rows[2] = {row_of<ZERO>(own[lane / 4]), row_of<ZERO>(own[lane / 4 + 8])};
    u8* body = blob.at + blob.bodies + (u64)PAIR_BYTES * stripe_pairs * stripe + CHUNK_BYTES * (u64)(column / 256);
    const u32 pairs = min(4u, stripe_pairs - column / 64), first = column + 8 * (lane % 4);
    const u64 row = (u64)STRIPE_ROWS * stripe + lane / 4, end = STRIPE_ROWS * (stripe + 1ull);
    Lane l;
    l.wide = wide;
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
      l.from[half] = m.words + (row + 8 * half) * m.stride + first;
      l.left[half] = row + 8 * half < m.rows && first < m.columns ? m.columns - first : 0;
    }
    if (wide && end <= m.rows && column + 256 <= m.columns) encode_whole<ZERO>(l, rows, body, mine);
    else encode_some<ZERO>(l, pairs, rows, body, mine);
    __syncwarp();
    count = count_entries(mine, said);
    up_to = sum_up_to(count);
  }
  if (lane == 31) sums[warp] = up_to;
  __syncthreads();
  if (warp == 0) {
    const u32 sum = sum_up_to(lane < WARPS ? sums[lane] : 0);
    const u32 found = look_back(states, number, __shfl_sync(ALL, sum, 31));
    if (lane < WARPS) sums[lane] = sum;
    if (lane == 0) before = found;
  }
  __syncthreads();
  if (!there) return;
  const u32 at = before + (warp ? sums[warp - 1] : 0);
  u32* offsets = (u32*)(blob.at + blob.offsets);
  if (lane == 0) offsets[chunk] = at;
  if (lane == 31 && chunk == chunks - 1) offsets[chunks] = at + up_to;
  write_entries(mine, said, at + up_to - count, (u32)blob.count, (u16*)(blob.at + blob.entries));
}

// ---- kernels: of one of the two steps, and for one value of the flag ----

#ifdef FLAG

// Four blocks leave 64 registers, with which the rarer kernel would spill.
extern "C" __global__ void __launch_bounds__(THREADS, FLAG ? 3 : 4)
encode(const u16* words, u64 stride, u64 rows, u64 columns, const u8* records, const u16* said, u32* ticket,
       u64* states, u8* out, u64 offsets, u64 entries, u64 bodies, u64 count, u64 table_low, u64 table_high) {
  encode_blob<FLAG>(Matrix{words, stride, (u32)rows, (u32)columns}, records, said, ticket, states,
                    Blob{out, offsets, entries, bodies, count, {table_low, table_high}});
}

#else

// Records with the flag clear and set, padded to stripes, and 2 x 128 counts of XORs. All are zeros before.
extern "C" __global__ void __launch_bounds__(THREADS, 4)
plan(const u16* words, u64 stride, u64 rows, u64 columns, u8* records, u64* counts) {
  plan_rows<1>(Matrix{words, stride, (u32)rows, (u32)columns}, records, counts);
}

// The same of few or long rows: a block a row.
extern "C" __global__ void __launch_bounds__(THREADS, 4)
plan_long(const u16* words, u64 stride, u64 rows, u64 columns, u8* records, u64* counts) {
  plan_rows<WARPS>(Matrix{words, stride, (u32)rows, (u32)columns}, records, counts);
}

#endif
