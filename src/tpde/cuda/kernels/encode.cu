// encode.cu: a tensor's words into chunks of a prefix-coded blob (docs/format.md, sections 2.3, 4 and 5), the bytes that
// the core writes.
//
// The host chooses planes and tables from a sample, which `gather` collects. `expand` makes tables for encoding of those
// for decoding. `measure` reads the words: a warp takes a chunk, lane l the words that the chunk's lane l codes, 16 bytes
// of each group; it finds planes that are constant, the checksum, and what each lane takes under each table, and chooses
// the table. A block looks back at the sums of the blocks before it for where its chunks go. The host then knows all
// sizes and the index map. `encode` reads the words again, and writes raw planes and lanes; a warp's lanes are put
// together in shared memory.
//
// What chunks and lanes take is kept in scratch memory, so that words which others change meanwhile make chunks that are
// wrong, and nothing outside the blob is written.
//
// Macros: WORD bytes of a word; ROTATE; CODED, the planes that may be coded, PAIRS those whose tables hold pairs, one bit
// each.

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

#define ALL 0xFFFFFFFFu
#define IS(mask, plane) ((mask) >> (plane) & 1)
#define V (16u / WORD)                  // words of a lane in a group, format.md 5.1
#define GROUP (32u * V)                 // words
#define BYTES (V < 4 ? 1 : V / 4)       // registers that hold the bytes of a plane in a lane's part of a group
#define CHUNK 8192u                     // words; src/tpde/codec/selection.py
#define GROUPS (CHUNK / GROUP)          // of a whole chunk: a multiple of 16
#define LANE_HEADER 36u                 // 5.2
#define CODED_AT(plane) (IS(CODED, 0) * ((plane) > 0) + IS(CODED, 1) * ((plane) > 1) + IS(CODED, 2) * ((plane) > 2) + \
                         IS(CODED, 3) * ((plane) > 3) + IS(CODED, 4) * ((plane) > 4) + IS(CODED, 5) * ((plane) > 5) + \
                         IS(CODED, 6) * ((plane) > 6) + IS(CODED, 7) * ((plane) > 7)) // coded planes below this one
#define COUNT CODED_AT(8)
#define VALUES(plane) (IS(PAIRS, plane) ? 65536u : 256u)
#define MODE_FILL 1u                    // 4.3
#define MODE_CODED 2u
#define GOLDEN 0x9E3779B1u              // 4.5
#define MEASURE_WARPS 8u
#define ENCODE_WARPS 4u
#define EXPAND_THREADS 256u
#define MEASURE_BLOCKS (COUNT > 1 ? 2 : 3)  // of a multiprocessor, at least: several coded planes take more registers
#define ENCODE_BLOCKS (WORD == 8 ? 4 : 5)
#define SAID 32u                        // bytes of `Said`

// Entries of tables for encoding: what a value takes in bits 0 to 4, and from bit 8 on the codeword, its first bit lowest.
// Of a pair that has none it is the escape's, and the pair follows.
#define ENTRY_BITS(e) ((e) & 31u)
#define ENTRY_ESCAPE 32u

// A table; src/tpde/cuda/encode.py writes these.
struct Table {
  u32 entries;  // for decoding, where in scratch memory
  u32 bits;     // of their index
  u32 escape, escape_bits;
  u32 raw_bits;
  u32 pad;      // what fills a lane beyond the chunk
};

// All there is to know of a tensor; offsets are from the start of scratch memory.
struct Job {
  u64 words, segment_words, chunks;
  u64 states, headers;  // offsets: of each block that measures; of each chunk's coded planes
  u64 planes[8];        // offsets: what each value takes under each table, a byte each; then the tables one by one
  u32 segment_chunks, unit_log2;
  u32 first;            // where chunks start, in units
  u32 blocks;           // that measure
  u8 first_table[8], table_count[8];
  Table tables[16];
};

// What the host reads; records follow.
struct Said {
  u32 end;  // where chunks end, in units
  u32 max_chunk, max_stream;
  u32 ticket;
};

// ---- words and planes, 2.3 and 4.1 ----

struct Chunk {
  const u8* from;
  u32 n;
  bool whole;  // CHUNK words at a multiple of 16
};

__device__ __forceinline__ Chunk chunk_of(const Job& job, u64 words, u64 number) {
  const u64 segment = number / job.segment_chunks, inside = (number - segment * job.segment_chunks) * CHUNK;
  const u64 begin = segment * job.segment_words, left = min(job.words - begin, job.segment_words) - inside;
  Chunk c;
  c.from = (const u8*)(words + (begin + inside) * WORD);
  c.n = (u32)min(left, (u64)CHUNK);
  c.whole = c.n == CHUNK && (u64)c.from % 16 == 0;
  return c;
}

// What a lane has of a group; zeros beyond the chunk.
template <bool WHOLE>
__device__ __forceinline__ uint4 load(const Chunk& c, u32 group) {
  const u32 at = 32 * group + threadIdx.x % 32;
  if (WHOLE) return __ldg((const uint4*)c.from + at);
  u64 half[2] = {0, 0};
#pragma unroll
  for (u32 j = 0; j < V; j++)
    if (V * at + j < c.n) half[j / (V / 2)] |= (u64)((const word*)c.from)[V * at + j] << 8 * WORD * (j % (V / 2));
  return {(u32)half[0], (u32)(half[0] >> 32), (u32)half[1], (u32)(half[1] >> 32)};
}

// Part k of a lane's words, rotated.
__device__ __forceinline__ u32 rotated(u32 x, u32 k) {
  if (!ROTATE || (WORD == 8 && k % 2 == 0)) return x;
  if (WORD == 1) return (x << 1 & 0xFEFEFEFEu) | (x >> 7 & 0x01010101u);
  if (WORD == 2) return (x << 1 & 0xFFFEFFFEu) | (x >> 15 & 0x00010001u);
  return (x & 0x0000FFFFu) | (x << 1 & 0xFFFE0000u) | (x >> 15 & 0x00010000u);
}

struct Words {
  u32 x[4];
};

__device__ __forceinline__ Words rotated(uint4 x) {
  return {{rotated(x.x, 0), rotated(x.y, 1), rotated(x.z, 2), rotated(x.w, 3)}};
}

// The bytes of a plane, V of them.
struct Plane {
  u32 y[BYTES];
};

__device__ __forceinline__ Plane plane_of(const Words& w, u32 plane) {
  Plane p;
  const u32 one = plane % 4 | (plane % 4 + 4) << 4;  // this byte of two registers
  if (WORD == 1) {
#pragma unroll
    for (u32 i = 0; i < BYTES; i++) p.y[i] = w.x[i];
  } else if (WORD == 2) {
#pragma unroll
    for (u32 i = 0; i < BYTES; i++) p.y[i] = __byte_perm(w.x[2 * i], w.x[2 * i + 1], plane ? 0x7531 : 0x6420);
  } else if (WORD == 4) {
    p.y[0] = __byte_perm(__byte_perm(w.x[0], w.x[1], one), __byte_perm(w.x[2], w.x[3], one), 0x5410);
  } else {
    p.y[0] = __byte_perm(w.x[plane / 4], w.x[2 + plane / 4], one) & 0xFFFF;
  }
  return p;
}

// Number `i` of a plane's pairs or symbols.
__device__ __forceinline__ u32 value_of(const Plane& p, u32 plane, u32 i) {
  return IS(PAIRS, plane) ? p.y[i / 2] >> 16 * (i % 2) & 0xFFFF : p.y[i / 4] >> 8 * (i % 4) & 0xFF;
}

// The same where the chunk may end: `at` is the first one's word (5.1).
__device__ __forceinline__ u32 value_or_pad(const Plane& p, u32 plane, u32 i, u32 at, u32 n, u32 pad) {
  const u32 value = value_of(p, plane, i), first = at + (IS(PAIRS, plane) ? 2 * i : i);
  if (first >= n) return pad;
  return IS(PAIRS, plane) && first + 1 == n ? value | value << 8 : value;
}

// ---- the sample ----

// Some ranges of a tensor, one after the other: range i starts at i * a / b times `each`. Of the last there may be less.
extern "C" __global__ void __launch_bounds__(256)
gather(u64 from, u64 to, u64 nbytes, u64 each, u64 a, u64 b) {
  const u64 start = blockIdx.x * a / b * each;
  const u8* source = (const u8*)(from + start);
  u8* target = (u8*)(to + blockIdx.x * each);
  const u32 size = (u32)min(each, nbytes - start);
  const u32 wide = ((u64)source | (u64)target) % 16 == 0 ? size / 16 : 0;
#pragma unroll 4
  for (u32 i = threadIdx.x; i < wide; i += 256) ((uint4*)target)[i] = __ldg((const uint4*)source + i);
  for (u32 i = 16 * wide + threadIdx.x; i < size; i += 256) target[i] = source[i];
}

// ---- tables, 3 ----

// A value's entry where it has no codeword.
__device__ __forceinline__ u32 escaped(const Table& t, bool pairs, u32 value) {
  if (pairs) return t.escape << 8 | ENTRY_ESCAPE | (t.escape_bits + 16);
  const u32 follows = value >> t.raw_bits | (value << (8 - t.raw_bits) & 0xFF);
  return (t.escape | follows << t.escape_bits) << 8 | (t.escape_bits + 8);
}

// Tables for encoding, a block for 256 values of a plane; and zeros where `measure` needs them.
extern "C" __global__ void __launch_bounds__(EXPAND_THREADS)
expand(u8* scratch, const Job* given) {
  __shared__ u32 entries[4][256];
  const Job& job = *given;
  const u32 i = threadIdx.x, part = blockIdx.x % 256;
  const u64 all = (u64)gridDim.x * EXPAND_THREADS;
  for (u64 k = (u64)blockIdx.x * EXPAND_THREADS + i; k < job.blocks + SAID / 8; k += all)
    *(u64*)(k < SAID / 8 ? scratch + 8 * k : scratch + job.states + 8 * (k - SAID / 8)) = 0;
#pragma unroll
  for (u32 plane = 0; plane < WORD; plane++) {
    if (!IS(CODED, plane) || blockIdx.x / 256 != CODED_AT(plane) || 256 * part >= VALUES(plane)) continue;
    const u32 count = job.table_count[plane];
    for (u32 t = 0; t < count; t++)
      entries[t][i] = escaped(job.tables[job.first_table[plane] + t], IS(PAIRS, plane), 256 * part + i);
    __syncthreads();
    for (u32 t = 0; t < count; t++) {
      const Table& table = job.tables[job.first_table[plane] + t];
      const u32* decode = (const u32*)(scratch + table.entries);
      for (u32 k = i; k < 1u << table.bits; k += EXPAND_THREADS) {
        const u32 e = decode[k], bits = e & 31, value = e >> 16;  // an escape's has bit 8
        if (!(e & 0x100) && k >> bits == 0 && value / 256 == part) entries[t][value % 256] = k << 8 | bits;
      }
    }
    __syncthreads();
    u32* to = (u32*)(scratch + job.planes[plane]) + 256 * part + i;
    u32 lengths = 0;
    for (u32 t = 0; t < count; t++) {
      lengths |= ENTRY_BITS(entries[t][i]) << 8 * t;
      to[(t + 1) * VALUES(plane)] = entries[t][i];
    }
    *to = lengths;
  }
}

// ---- measuring ----

__device__ __forceinline__ u32 rotl5(u32 x) { return x << 5 | x >> 27; }

// What a warp finds in a chunk. Sums are of up to four tables, as the core's: of the first and third, and of the others.
struct Found {
  u32 even[COUNT + 1], odd[COUNT + 1], pads[COUNT + 1];  // of this lane
  u32 checksum;
  u32 other[2];  // bits in which words differ from the first
};

template <bool WHOLE>
__device__ __forceinline__ void look(const Chunk& c, const u32* const lengths[COUNT + 1], u32 first_low, u32 first_high,
                                     Found& f) {
  const u32 lane = threadIdx.x % 32, groups = WHOLE ? GROUPS : (c.n + GROUP - 1) / GROUP;
  u32 h[4];
#pragma unroll
  for (u32 k = 0; k < 4; k++) h[k] = (4 * lane + k + 1) * GOLDEN;
#pragma unroll
  for (u32 k = 0; k <= COUNT; k++) f.even[k] = f.odd[k] = f.pads[k] = 0;
  f.other[0] = f.other[1] = 0;
#pragma unroll WHOLE ? 4 : 1
  for (u32 g = 0; g < groups; g++) {
    const uint4 loaded = load<WHOLE>(c, g);
    const u32 x[4] = {loaded.x, loaded.y, loaded.z, loaded.w}, at = GROUP * g + V * lane;
#pragma unroll
    for (u32 k = 0; k < 4; k++) {
      const u32 byte = 512 * g + 16 * lane + 4 * k, left = WHOLE || byte >= c.n * WORD ? 4 : c.n * WORD - byte;
      if (!WHOLE && byte >= c.n * WORD) continue;
      h[k] = (rotl5(h[k]) ^ x[k]) * GOLDEN;
      f.other[k % 2] |= (x[k] ^ (k % 2 ? first_high : first_low)) & (left < 4 ? (1u << 8 * left) - 1 : ALL);
    }
    const Words w = rotated(loaded);
#pragma unroll
    for (u32 plane = 0; plane < WORD; plane++) {
      if (!IS(CODED, plane)) continue;
      const u32 k = CODED_AT(plane), values = IS(PAIRS, plane) ? V / 2 : V;
      const Plane p = plane_of(w, plane);
      u32 sum = 0;
#pragma unroll
      for (u32 i = 0; i < values; i++) {
        if (!WHOLE && at + (IS(PAIRS, plane) ? 2 * i : i) >= c.n) f.pads[k]++;
        else sum += __ldg(lengths[k] + (WHOLE ? value_of(p, plane, i) : value_or_pad(p, plane, i, at, c.n, 0)));
        if (i % 8 == 7 || i == values - 1) {  // eight of 28 bits fit a byte
          f.even[k] += sum & 0x00FF00FFu;
          f.odd[k] += sum >> 8 & 0x00FF00FFu;
          sum = 0;
        }
      }
    }
  }
  f.checksum = 0;
#pragma unroll
  for (u32 k = 0; k < 4; k++) {
    const u32 x = (h[k] ^ h[k] >> 15) * 0x85EBCA77u;
    f.checksum += x ^ x >> 13;
  }
  f.checksum = __reduce_add_sync(ALL, f.checksum);
  f.other[0] = __reduce_or_sync(ALL, f.other[0]);
  f.other[1] = __reduce_or_sync(ALL, f.other[1]);
}

// The first word again and again, or half of it.
__device__ __forceinline__ u32 repeated(word first, u32 half) {
  if (WORD == 1) return first * 0x01010101u;
  if (WORD == 2) return first * 0x00010001u;
  return (u32)((u64)first >> (WORD == 8 ? 32 * half : 0));
}

// Byte `plane` of a word that is rotated, where `low` and `high` hold it again and again, or its halves.
__device__ __forceinline__ u32 byte_of(u32 low, u32 high, u32 plane) {
  return (WORD == 8 && plane >= 4 ? rotated(high, 1) : rotated(low, WORD == 8 ? 0 : 1)) >> 8 * (plane % 4) & 0xFF;
}

// How a coded plane is written (5.2).
struct Lanes {
  u32 shortest, shift, excess, size;  // the excess is this lane's
};

// Of the bits of each lane. They are at most 5120: a shift of 5 and 16 bits for the shortest are enough.
__device__ __forceinline__ Lanes lanes_of(u32 bits) {
  Lanes l;
  l.shortest = __reduce_min_sync(ALL, bits);
  const u32 most = __reduce_max_sync(ALL, bits) - l.shortest;
  l.shift = 0;
  while (((most + (1u << l.shift) - 1) >> l.shift) > 255) l.shift++;
  l.excess = (bits - l.shortest + (1u << l.shift) - 1) >> l.shift;
  const u32 total = __reduce_add_sync(ALL, l.shortest + (l.excess << l.shift));
  l.size = (LANE_HEADER + (total + 7) / 8 + 3) & ~3u;
  return l;
}

// What this lane takes under table `v` of coded plane number `k`.
__device__ __forceinline__ u32 bits_under(const Found& f, const u32* lengths, u32 k, u32 v, u32 pad) {
  const u32 sum = ((v % 2 ? f.odd[k] : f.even[k]) >> (v / 2 ? 16 : 0)) & 0xFFFF;
  return sum + (f.pads[k] ? f.pads[k] * (lengths[pad] >> 8 * v & 31) : 0);
}

__device__ __forceinline__ u32 sum_up_to(u32 sum) {
  for (int d = 1; d < 32; d *= 2) {
    const u32 x = __shfl_up_sync(ALL, sum, d);
    if (threadIdx.x % 32 >= d) sum += x;
  }
  return sum;
}

#define OWN 1ull  // of a block: it says how many units it has
#define SUM 2ull  // and with those of all blocks before

// How many units the blocks before have: see window_encode.cu.
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
    if (sums) break;  // always where `end` is 32 or less
  }
  if (lane == 0 && number) states[number] = SUM << 32 | (u32)(before + own);
  return before;
}

// Few chunks raise what all so far have said.
__device__ __forceinline__ void raise(u32* most, u32 value) {
  if (*(volatile u32*)most < value) atomicMax(most, value);
}

// Sizes, records, and headers of lanes.
extern "C" __global__ void __launch_bounds__(32 * MEASURE_WARPS, MEASURE_BLOCKS)
measure(u64 words, u8* scratch, const Job* given) {
  __shared__ u32 number, before, sums[MEASURE_WARPS];
  const Job& job = *given;
  Said* said = (Said*)scratch;
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) number = atomicAdd(&said->ticket, 1u);
  __syncthreads();
  const u64 chunk = (u64)number * MEASURE_WARPS + warp;
  const bool there = chunk < job.chunks;
  u32 units = 0, checksum = 0, info = 0;
  if (there) {
    const Chunk c = chunk_of(job, words, chunk);
    const u32 raw = (c.n + 15) & ~15u;
    const u32* lengths[COUNT + 1];
    u32 variants = 1;
#pragma unroll
    for (u32 plane = 0; plane < WORD; plane++) {
      if (!IS(CODED, plane)) continue;
      lengths[CODED_AT(plane)] = (const u32*)(scratch + job.planes[plane]);
      variants = job.table_count[plane] > variants ? job.table_count[plane] : variants;
    }
    const word first = *(const word*)c.from;
    const u32 low = repeated(first, 0), high = repeated(first, 1);
    Found f;
    if (c.whole) look<true>(c, lengths, low, high, f);
    else look<false>(c, lengths, low, high, f);
    checksum = f.checksum;
    u32 differ[2] = {f.other[0], f.other[1]}, fill = 0, filled = 0, modes = 0;
    if (WORD < 8) differ[0] = differ[0] | differ[1];
    if (WORD < 4) differ[0] |= differ[0] >> 16 | differ[0] << 16;
    if (WORD < 2) differ[0] |= differ[0] >> 8 | differ[0] << 24;
#pragma unroll
    for (u32 plane = 0; plane < WORD; plane++) {
      if (byte_of(differ[0], differ[1], plane)) continue;
      const u32 value = byte_of(low, high, plane);
      if (!filled++) fill = value;
      if (value == fill) modes |= MODE_FILL << 2 * plane;
    }
    u32 best = 0, least = ALL, bytes = 0, longest = 0;
#pragma unroll 1
    for (u32 v = 0; v < variants; v++) {
      u32 size = 0;
#pragma unroll
      for (u32 plane = 0; plane < WORD; plane++) {
        if (!IS(CODED, plane) || (modes >> 2 * plane & 3) == MODE_FILL) continue;
        const u32 k = CODED_AT(plane), own = min(v, job.table_count[plane] - 1u);
        const u32 pad = job.tables[job.first_table[plane] + own].pad;
        size += min(lanes_of(bits_under(f, lengths[k], k, own, pad)).size, raw);
      }
      if (size < least) {
        least = size;
        best = v;
      }
    }
#pragma unroll
    for (u32 plane = 0; plane < WORD; plane++) {
      if ((modes >> 2 * plane & 3) == MODE_FILL) continue;
      u32 size = raw;
      if (IS(CODED, plane)) {
        const u32 k = CODED_AT(plane), own = min(best, job.table_count[plane] - 1u);
        const u32 pad = job.tables[job.first_table[plane] + own].pad;
        const Lanes l = lanes_of(bits_under(f, lengths[k], k, own, pad));
        if (l.size < raw) {
          u8* header = scratch + job.headers + LANE_HEADER * (COUNT * chunk + k);
          if (lane == 0) *(u32*)header = l.shortest | l.shift << 16;
          header[4 + lane] = (u8)l.excess;
          modes |= MODE_CODED << 2 * plane;
          size = l.size;
          longest = l.size > longest ? l.size : longest;
        }
      }
      bytes += size;
    }
    units = (bytes + (1u << job.unit_log2) - 1) >> job.unit_log2;
    info = modes | best << 16 | fill << 24;
    if (lane == 0) {
      sums[warp] = units;
      raise(&said->max_chunk, units << job.unit_log2);
      if (longest) raise(&said->max_stream, longest);
    }
  } else if (lane == 0) {
    sums[warp] = 0;
  }
  __syncthreads();
  if (warp == 0) {
    const u32 sum = sum_up_to(lane < MEASURE_WARPS ? sums[lane] : 0), own = __shfl_sync(ALL, sum, 31);
    const u32 found = look_back((volatile u64*)(scratch + job.states), number, own);
    __syncwarp();
    if (lane < MEASURE_WARPS) sums[lane] = sum;
    if (lane == 0) before = job.first + found;
    if (lane == 0 && number == job.blocks - 1) said->end = job.first + found + own;
  }
  __syncthreads();
  if (!there || lane) return;
  u32* record = (u32*)(scratch + SAID) + 3 * chunk;
  record[0] = before + sums[warp] - units;
  record[1] = checksum;
  record[2] = info;
}

// ---- writing ----

// A lane's bits, which become words of shared memory. Words that it shares with others are put together at the end.
struct Run {
  u64 held;
  u32 bits;  // of it, fewer than 32
  u32 at;    // number of the word that these belong to
};

#define STAGE (CHUNK / 4) // words: no coded plane has more bytes than a raw one. One more takes what does not fit

__device__ __forceinline__ void put(Run& r, u32* stage, u32 code, u32 bits) {
  r.held |= (u64)code << r.bits;
  r.bits += bits;
  if (r.bits < 32) return;
  stage[r.at] = (u32)r.held;
  r.at = min(r.at + 1, STAGE); // beyond it only if words have changed since they were measured
  r.held >>= 32;
  r.bits -= 32;
}

// Write a lane's part of a group of a raw plane, V bytes.
__device__ __forceinline__ void put_raw(u8* to, const Plane& p) {
  if (WORD == 1) *(uint4*)to = uint4{p.y[0], p.y[BYTES / 4], p.y[BYTES / 2], p.y[BYTES - 1]};
  else if (WORD == 2) *(u64*)to = (u64)p.y[BYTES - 1] << 32 | p.y[0];
  else if (WORD == 4) *(u32*)to = p.y[0];
  else *(u16*)to = (u16)p.y[0];
}

// Code a plane, with what its table is, and write raw planes, one bit each. Without `codes` there is none to code.
template <bool WHOLE>
__device__ __forceinline__ void write_planes(const Chunk& c, u32 plane, const u32* codes, u32 pad, Run& r, u32* stage,
                                             u32 raws, u8* out) {
  const u32 lane = threadIdx.x % 32, raw = (c.n + 15) & ~15u, groups = WHOLE ? GROUPS : (c.n + GROUP - 1) / GROUP;
  const u32 together = WHOLE ? 4 : 1, values = IS(PAIRS, plane) ? V / 2 : V;
#pragma unroll 1
  for (u32 g = 0; g < groups; g += together) {
    uint4 x[together];
#pragma unroll
    for (u32 k = 0; k < together; k++) x[k] = load<WHOLE>(c, g + k);
#pragma unroll
    for (u32 k = 0; k < together; k++) {
      const Words w = rotated(x[k]);
      const u32 at = GROUP * (g + k) + V * lane;
      if (codes) {
        const Plane p = plane_of(w, plane);
#pragma unroll
        for (u32 i = 0; i < values; i++) {
          const u32 value = WHOLE ? value_of(p, plane, i) : value_or_pad(p, plane, i, at, c.n, pad);
          const u32 e = __ldg(codes + value), bits = ENTRY_BITS(e);
          u32 code = e >> 8;
          if (IS(PAIRS, plane) && e & ENTRY_ESCAPE) code |= value << (bits - 16);
          put(r, stage, code, bits);
        }
      }
      u8* to = out + at;
#pragma unroll
      for (u32 p = 0; p < WORD; p++) {
        if (!IS(raws, p)) continue;
        if (WHOLE || at < raw) put_raw(to, plane_of(w, p));
        to += raw;
      }
    }
  }
}

// The chunks, where records say.
extern "C" __global__ void __launch_bounds__(32 * ENCODE_WARPS, ENCODE_BLOCKS)
encode(u64 words, u8* scratch, const Job* given, u8* blob) {
  __shared__ uint4 stages[ENCODE_WARPS][STAGE / 4 + 1];
  const Job& job = *given;
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u64 chunk = (u64)blockIdx.x * ENCODE_WARPS + warp;
  if (chunk >= job.chunks) return;
  const Chunk c = chunk_of(job, words, chunk);
  const u32* record = (const u32*)(scratch + SAID) + 3 * chunk;
  const u32 modes = record[2] & 0xFFFF, variant = record[2] >> 16 & 0xFF;
  u8* out = blob + ((u64)record[0] << job.unit_log2);
  u32 raws = 0;
#pragma unroll
  for (u32 plane = 0; plane < WORD; plane++) raws |= (u32)((modes >> 2 * plane & 3) == 0) << plane;
  u32 at = __popc(raws) * ((c.n + 15) & ~15u); // of the next coded plane
  u32* stage = (u32*)stages[warp];
#pragma unroll
  for (u32 plane = 0; plane < WORD; plane++) {
    if (!IS(CODED, plane) || (modes >> 2 * plane & 3) != MODE_CODED) continue;
    const u32 k = CODED_AT(plane), table = min(variant, job.table_count[plane] - 1u);
    const u32* codes = (const u32*)(scratch + job.planes[plane]) + (table + 1) * VALUES(plane);
    const u32 pad = job.tables[job.first_table[plane] + table].pad;
    const u8* header = scratch + job.headers + LANE_HEADER * (COUNT * chunk + k);
    const u32 head = *(const u32*)header, excess = header[4 + lane];
    const u32 bits = (head & 0xFFFF) + (excess << (head >> 16)), up_to = sum_up_to(bits);
    const u32 size = (LANE_HEADER + (__shfl_sync(ALL, up_to, 31) + 7) / 8 + 3) & ~3u;
    for (u32 i = lane; i < (size + 15) / 16; i += 32) stages[warp][i] = uint4{0, 0, 0, 0};
    __syncwarp();
    if (lane == 0) stage[0] = head;
    ((u8*)stage)[4 + lane] = (u8)excess;
    const u32 start = 8 * LANE_HEADER + up_to - bits;
    Run r = {0, start % 32, start / 32};
    if (c.whole) write_planes<true>(c, plane, codes, pad, r, stage, raws, out);
    else write_planes<false>(c, plane, codes, pad, r, stage, raws, out);
    raws = 0;
    __syncwarp();
    if (r.bits) atomicOr(stage + r.at, (u32)r.held);
    __syncwarp();
    for (u32 i = lane; i < size / 4; i += 32) ((u32*)(out + at))[i] = stage[i];
    __syncwarp();
    at += size;
  }
  if (raws) {
    Run none = {0, 0, 0};
    if (c.whole) write_planes<true>(c, 0, nullptr, 0, none, stage, raws, out);
    else write_planes<false>(c, 0, nullptr, 0, none, stage, raws, out);
  }
  const u32 end = (at + (1u << job.unit_log2) - 1) >> job.unit_log2 << job.unit_log2;
  for (u32 i = at / 4 + lane; i < end / 4; i += 32) ((u32*)out)[i] = 0;
}
