// decode.cu: chunks of prefix-coded blobs to words (docs/format.md, sections 2.3, 4 and 5).
//
// A warp decodes a chunk: lane l decodes the chunk's lane l. The coded planes are staged in shared memory, the
// next chunk's while this one is decoded where there is room; raw planes pass through two windows there. Each
// block takes an equal run of the chunks of all items, so that it loads an item's tables once or twice.
//
// Where shared memory is too small for the coded planes of many warps, each lane's bits pass through a ring there
// instead: four pieces of PIECE bytes for each coded plane, filled by the lane itself, ahead of what it looks up.
//
// Any bytes are safe: records are compared with the blob's size, coded planes with what was staged, and what a
// damaged lane reads beyond its bits still lies in shared memory, since the host adds slack at its end; in a ring
// it comes round again. What is too large for shared memory stays in global memory, and takes the slower way of
// the last, short chunks.
//
// Macros: WORD bytes of a word; ROTATE; CODED, the planes that may be coded, PAIRS those whose tables hold
// pairs, SHORT those whose codewords have two bits or one, one bit each; CHECK: compare checksums; WINDOW: groups of
// raw planes staged at a time; PIECE: 0, or the bytes of a ring's piece, 8 or 16; THREADS: the most of a block.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define V (16 / WORD)    // words of a lane in a group, format.md 5.1
#define LANE_HEADER 36u  // format.md 5.2
#define ESCAPE 0x80u     // of an entry; bits 0 to 3 are a codeword's length, of an escape 8 to 10 the raw bits'
#define SYMBOL (PAIRS ? 16 : 8)  // entries of 32 bits with the symbols from bit 16 on, or of 16 with one from bit 8 on
#define GOLDEN 0x9E3779B1u
#define IS(mask, plane) ((mask) >> (plane) & 1)

// One blob; src/tpde/cuda/items.py writes these.
struct Item {
  u64 blob, index, tables;  // addresses: of the blob, from the launch's base; of its index map and expanded tables
  u64 out;                  // offset of its first word in the output
  u64 words, segment_words, chunks;
  u64 low, high;            // which of the blob's bytes are there
  u64 first, begin, count;  // chunk `begin` of the blob is chunk `first` of this launch; `count` follow each other
  u32 chunk_words, segment_chunks, unit_log2, table_bits, tables_bytes, number;
  u8 first_table[8], table_count[8];
};

struct Record { u32 offset, sum, modes, next; };
struct Chunk { u64 begin, word; u32 size, sum, modes, n, raw; bool valid; };

// The host may look at any time: 1 says that the rest is there, 2 that it is being written.
__device__ __forceinline__ void report(u32* status, u32 number, u64 chunk) {
  if (atomicCAS(status, 0u, 2u) == 0u) {
    status[1] = number;
    status[2] = (u32)chunk;
    status[3] = (u32)(chunk >> 32);
    __threadfence_system();
    *(volatile u32*)status = 1u;
  }
}

// Where a record lies is known from the header alone; what it says is not to be trusted.
__device__ __forceinline__ Record load_record(const Item& t, u64 chunk) {
  const u32* p = (const u32*)t.index + 3 * chunk;
  Record r = {__ldg(p), __ldg(p + 1), __ldg(p + 2), 0};
  r.next = chunk + 1 < t.chunks ? __ldg(p + 3) : 0;
  return r;
}

__device__ __forceinline__ Chunk open_chunk(const Item& t, u64 chunk, const Record& r) {
  Chunk c;
  u64 segment = t.words == t.segment_words ? 0 : chunk / t.segment_chunks;
  u64 start = segment * t.segment_words, stop = min(start + t.segment_words, t.words);
  c.word = start + (chunk - segment * t.segment_chunks) * t.chunk_words;
  c.n = (u32)min((u64)t.chunk_words, stop - c.word);
  c.begin = (u64)r.offset << t.unit_log2;
  u64 end = chunk + 1 < t.chunks ? (u64)r.next << t.unit_log2 : t.high;
  c.valid = t.low <= c.begin && c.begin <= end && end <= t.high && end - c.begin <= 1u << 20;
  c.size = (u32)(end - c.begin);
  c.sum = r.sum;
  c.modes = r.modes;
  c.raw = 0;
#pragma unroll
  for (int p = 0; p < WORD; p++) {
    u32 mode = r.modes >> (2 * p) & 3;
    if (mode == 0) c.raw += (c.n + 15) & ~15u;
    if (mode == 3 || (mode == 2 && !IS(CODED, p))) c.valid = false;
  }
  c.valid = c.valid && c.raw <= c.size;
  if (!c.valid) c.raw = c.size = 0;
  return c;
}

// ---- bits of a lane ----

#if PAIRS
typedef u32 Entry;
#else
typedef u16 Entry;
#endif

// What a plane's codewords stand for: a symbol; two; a symbol, where four entries, in registers, are the whole table.
enum Code { SINGLE, PAIR, FEW };
__device__ constexpr Code code_of(int plane) { return IS(PAIRS, plane) ? PAIR : IS(SHORT, plane) ? FEW : SINGLE; }

// Bits that look-ups of n entries take at most (format.md 3): a codeword has 12, or 20 with an escape's value; 28
// for pairs.
#define MOST_BITS(n, pair) ((n) * ((pair) ? 28 : 20))
#define PIECE_BITS (8 * PIECE)
static_assert(!PIECE || (!(CODED & ~PAIRS) || MOST_BITS(V < 4 ? V : 4, false) < PIECE_BITS) &&
                            (!PAIRS || MOST_BITS(V < 8 ? V / 2 : 4, true) < PIECE_BITS),
              "look-ups of four entries must not leave two pieces of a ring");

// Of a ring. Nothing is said to the compiler of memory: `volatile` keeps these in order among themselves, and
// look-ups and writes may move between them. A lane waits for its own copies only.
__device__ __forceinline__ u32 load_ring(u32 shared) {
  u32 x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(shared));
  return x;
}

__device__ __forceinline__ void copy_piece(u32 shared, u64 from) {
  if (PIECE == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(from));
  else asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared), "l"(from));
}

__device__ __forceinline__ void commit_pieces() { asm volatile("cp.async.commit_group;"); }

template <int LEFT>
__device__ __forceinline__ void wait_pieces() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT)); }

// STAGED: words and table lie in shared memory. ANYWHERE: both may lie anywhere, and words end at `limit`. RING: the
// table lies in shared memory, and words pass through a ring there.
enum Place { STAGED, ANYWHERE, RING };

// A lane keeps the words it is at from call to call where a group has 8 look-ups or more: 2 % of fp16, 8 % of E4M3.
__device__ constexpr bool keeps_words(Place place, Code code) { return place == STAGED && code != PAIR && V >= 8; }

template <Place PLACE>
struct Lane {
  const u32* words;  // of the coded planes
  const Entry* table;
  u32 mask, limit;
  u32 lengths, values, up;  // of FEW: a byte for each of four entries; how far left an escape's value is shifted
  u32 at, end;  // bits from the first word
  u32 a, b, c;  // the words from that of bit `at` on, if they are kept
  u32 ring;  // its address in shared memory, a multiple of its size

  __device__ __forceinline__ u32 word(u32 i) const {
    if (PLACE == RING) return load_ring(ring | (4 * i & (4 * PIECE - 4)));
    return PLACE == STAGED || i < limit ? words[i] : 0;
  }

  // The piece that holds bit `bit`, if the lane has such a bit: so nothing beyond the chunk is read.
  __device__ __forceinline__ void ask(u32 bit) const {
    if (bit < end) copy_piece(ring | (bit / 8 & (4 * PIECE - 1)), (u64)words + bit / 8);
  }
  __device__ __forceinline__ void fill_ring() const {
#pragma unroll
    for (u32 i = 0; i < 4; i++) ask((at & ~(PIECE_BITS - 1u)) + i * PIECE_BITS);
    commit_pieces();
  }
  // After a call of `entries`: a piece that was left makes place for the one after those in the ring.
  __device__ __forceinline__ void refill(u32 before) const {
    if ((before ^ at) >= PIECE_BITS) ask((at & ~(PIECE_BITS - 1u)) + 3 * PIECE_BITS);
    commit_pieces();
  }

  __device__ __forceinline__ void look() {
    a = word(at >> 5);
    b = word((at >> 5) + 1);
    c = word((at >> 5) + 2);
  }
  // Half of the symbols of a plane of weights of which half are zeros are escapes, of one bit: a branch would be taken
  // by all warps. An escape's length has bit 7 set, of which the second selection makes a mask.
  __device__ __forceinline__ void open_few() {
    lengths = values = up = 0;
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
      const u32 e = table[i], escape = e & ESCAPE;
      lengths |= ((e & 15) + escape / 16 | escape) << (8 * i);
      if (escape) up = SYMBOL - (e & 15);
      else values |= (e >> SYMBOL & 255) << (8 * i);
    }
  }
  __device__ __forceinline__ u32 select(u32 bytes) const {
    u32 x;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(x) : "r"(lengths), "r"(values), "r"(bytes));
    return x;
  }
  template <Code CODE>
  __device__ __forceinline__ u32 entry(u32 x) const {
    if (CODE != FEW) return table[x & mask];
    const u32 bytes = (x & 3) * 0x1111u;
    return select(bytes + 0x4440u) | (select(bytes + 0x8880u) & x << up);
  }
  // The next N entries one after the other, escapes included: their values are put where entries have their symbols.
  // One pair in 500 is an escape, so one call in four of a warp comes here, and takes all bits from registers.
  template <Code CODE, int N>
  __device__ __forceinline__ void careful(u32 e[N]) {
    constexpr int AT_ONCE = CODE == PAIR ? N : 1, WORDS = (MOST_BITS(AT_ONCE, CODE == PAIR) + 31) / 32;
    u32 x[WORDS];
#pragma unroll
    for (int k = 0; k < N; k++) {
      if (k % AT_ONCE == 0) {
#pragma unroll
        for (int j = 0; j < WORDS; j++)
          x[j] = __funnelshift_r(word((at >> 5) + j), word((at >> 5) + j + 1), at);
      }
      u32 f = table[x[0] & mask], taken = f & 15;
      if (f & ESCAPE) {
        u32 y = x[0] >> taken, r = f >> 8 & 7;
        if (CODE == PAIR) f = y << 16;
        else f = (((y & 255) << r | (y & 255) >> (8 - r)) & 255) << SYMBOL;  // the raw bits come last, and go lowest
        taken += CODE == PAIR ? 16 : 8;
      }
      e[k] = f;
      at += taken;
#pragma unroll
      for (int j = 0; j < WORDS; j++) x[j] = __funnelshift_r(x[j], j + 1 < WORDS ? x[j + 1] : 0, taken);
    }
  }
  // The next N entries, 1, 2 or 4: two fit into 32 bits wherever they start, so a window of 64 serves four.
  template <Code CODE, int N>
  __device__ __forceinline__ void entries(u32 e[N]) {
    // A call takes MOST bits or fewer, which lie in two pieces. Piece q is asked for when a call ends in piece q - 3,
    // at most MOST - 1 bits in, and wanted when one starts MOST - 1 bits before q or later: LAG calls are between,
    // or more, and each commits a group of copies.
    constexpr int MOST = MOST_BITS(N, CODE == PAIR), LAG = (3 * PIECE_BITS - 2 * MOST + 2 + MOST - 1) / MOST;
    constexpr bool KEPT = keeps_words(PLACE, CODE);
    const u32 before = at;
    if constexpr (PLACE == RING) wait_pieces<LAG>();
    u32 i = at >> 5, d = 0, f = 0, any, taken;
    if constexpr (KEPT) {  // what the next call may start with: look-ups wait for each other long enough
      d = word(i + 3);
      f = word(i + 4);
    }
    const u32 low = KEPT ? a : word(i), high = KEPT ? b : word(i + 1);
    u32 x = __funnelshift_r(low, high, at);
    e[0] = entry<CODE>(x);
    any = taken = e[0];
    if (N >= 2) {
      e[1] = entry<CODE>(__funnelshift_r(x, 0, e[0]));  // shifts look at five bits of the entry: its length
      any |= e[1];
      taken += e[1];
    }
    if (N == 4) {
      x = __funnelshift_r(x, __funnelshift_r(high, KEPT ? c : word(i + 2), at), taken);
      e[2] = entry<CODE>(x);
      e[3] = entry<CODE>(__funnelshift_r(x, 0, e[2]));
      any |= e[2] | e[3];
      taken += e[2] + e[3];
    }
    if (CODE != FEW && any & ESCAPE) {  // 1 value of 500 or fewer
      careful<CODE, N>(e);
      if constexpr (KEPT) look();
    } else {
      if constexpr (KEPT) {
        const u32 to = (at & 31) + (taken & 63);  // 79 or less
        a = to < 32 ? a : to < 64 ? b : c;
        b = to < 32 ? b : to < 64 ? c : d;
        c = to < 32 ? c : to < 64 ? d : f;
      }
      at += taken & 63;
    }
    if constexpr (PLACE == RING) refill(before);
  }
  // V symbols as bytes.
  template <Code CODE>
  __device__ __forceinline__ void symbols(u32 out[(V + 3) / 4]) {
    constexpr int COUNT = CODE == PAIR ? V / 2 : V, N = COUNT < 4 ? COUNT : 4;
    u32 e[N];
#pragma unroll
    for (int k = 0; k < COUNT; k += N) {
      entries<CODE, N>(e);
      if (CODE == PAIR) {
        if (N == 1) out[0] = e[0] >> 16;
        if (N >= 2) out[k / 2] = __byte_perm(e[0], e[N >= 2], 0x7632);
        if (N == 4) out[k / 2 + 1] = __byte_perm(e[N / 2], e[N - 1], 0x7632);
      } else {
        u32 low = __byte_perm(e[0], e[1], SYMBOL == 16 ? 0x0062 : 0x0051);
        if (N == 2) out[0] = low & 0xffff;
        else out[k / 4] = __byte_perm(low, __byte_perm(e[N / 2], e[N - 1], SYMBOL == 16 ? 0x0062 : 0x0051), 0x5410);
      }
    }
  }
};

// ---- words of a lane's group: 16 bytes ----

#define NV ((V + 3) / 4)  // u32 that hold V bytes
#define RAW_PLANES (WORD - IS(CODED, 0) - IS(CODED, 1) - IS(CODED, 2) - IS(CODED, 3) - IS(CODED, 4) - IS(CODED, 5) - \
                    IS(CODED, 6) - IS(CODED, 7))
#define WINDOW_BYTES (RAW_PLANES * 32 * V * WINDOW)  // src/tpde/cuda/geometry.py knows it too

__device__ __forceinline__ u32 unrotate16(u32 x) {  // both halves
  return ROTATE ? (x >> 1 & 0x7fff7fffu) | (x << 15 & ~0x7fff7fffu) : x;
}

__device__ __forceinline__ void merge(const u32 p[WORD][NV], u32 q[4]) {
#if WORD == 1
#pragma unroll
  for (int i = 0; i < 4; i++)
    q[i] = ROTATE ? (p[0][i] >> 1 & 0x7f7f7f7fu) | (p[0][i] << 7 & 0x80808080u) : p[0][i];
#elif WORD == 2
#pragma unroll
  for (int i = 0; i < 4; i++)
    q[i] = unrotate16(__byte_perm(p[0][i / 2], p[1][i / 2], i & 1 ? 0x7362 : 0x5140));
#elif WORD == 4
  u32 l0 = __byte_perm(p[0][0], p[1][0], 0x5140), l1 = __byte_perm(p[0][0], p[1][0], 0x7362);
  u32 h0 = unrotate16(__byte_perm(p[2][0], p[3][0], 0x5140)), h1 = unrotate16(__byte_perm(p[2][0], p[3][0], 0x7362));
  q[0] = __byte_perm(l0, h0, 0x5410);
  q[1] = __byte_perm(l0, h0, 0x7632);
  q[2] = __byte_perm(l1, h1, 0x5410);
  q[3] = __byte_perm(l1, h1, 0x7632);
#else
  u32 a = __byte_perm(p[0][0], p[1][0], 0x5140), b = __byte_perm(p[2][0], p[3][0], 0x5140);
  u32 c = __byte_perm(p[4][0], p[5][0], 0x5140), d = unrotate16(__byte_perm(p[6][0], p[7][0], 0x5140));
  q[0] = __byte_perm(a, b, 0x5410);
  q[1] = __byte_perm(c, d, 0x5410);
  q[2] = __byte_perm(a, b, 0x7632);
  q[3] = __byte_perm(c, d, 0x7632);
#endif
}

// V bytes of a raw plane; the plane starts at a multiple of 16.
__device__ __forceinline__ void load_raw(const u8* p, u32 out[NV]) {
#if V == 16
  uint4 x = *(const uint4*)p;
  out[0] = x.x; out[1] = x.y; out[2] = x.z; out[3] = x.w;
#elif V == 8
  uint2 x = *(const uint2*)p;
  out[0] = x.x; out[1] = x.y;
#elif V == 4
  out[0] = *(const u32*)p;
#else
  out[0] = *(const u16*)p;
#endif
}

// ---- the checksum, format.md 4.5: a lane keeps its four of the 128 accumulators ----

struct Sum {
  u32 h[4];
  __device__ __forceinline__ void open(u32 lane) {
#pragma unroll
    for (int i = 0; i < 4; i++) h[i] = (lane * 4 + i + 1) * GOLDEN;
  }
  __device__ __forceinline__ void absorb(int i, u32 x) { h[i] = (__funnelshift_l(h[i], h[i], 5) ^ x) * GOLDEN; }
  __device__ __forceinline__ u32 close() const {
    u32 sum = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      u32 g = (h[i] ^ (h[i] >> 15)) * 0x85EBCA77u;
      sum += g ^ (g >> 13);
    }
    return __reduce_add_sync(~0u, sum);
  }
};

// Find the lanes of every coded plane; false if one does not fit into `bytes` bytes.
template <Place PLACE>
__device__ __forceinline__ bool open_lanes(const Item& t, const Chunk& c, const u32* words, const void* tables,
                                           u32 bytes, u32 lane, Lane<PLACE> lanes[WORD]) {
  u32 at = 0, variant = c.modes >> 16 & 255;
#pragma unroll
  for (int p = 0; p < WORD; p++) {
    if (!IS(CODED, p) || (c.modes >> (2 * p) & 3) != 2) continue;
    Lane<PLACE>& a = lanes[p];
    if (bytes - at < LANE_HEADER) return false;
    u32 head = words[at / 4], shift = head >> 16;
    u32 excess = ((const u8*)words)[at + 4 + lane];
    if (shift > 8) return false;
    u32 length = (head & 0xffff) + (excess << shift), end = length;
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
      u32 y = __shfl_up_sync(~0u, end, o);
      if (lane >= o) end += y;
    }
    u32 took = (LANE_HEADER + (__shfl_sync(~0u, end, 31) + 7) / 8 + 3) & ~3u;
    if (took > bytes - at) return false;
    u32 count = t.table_count[p], number = t.first_table[p] + min(variant, count - 1);
    a.words = words;
    a.limit = bytes / 4;
    a.table = (const Entry*)tables + (number << t.table_bits);
    a.mask = (1u << t.table_bits) - 1;
    a.end = (at + LANE_HEADER) * 8 + end;
    a.at = a.end - length;
    if (code_of(p) == FEW) a.open_few();
    if (keeps_words(PLACE, code_of(p))) a.look();
    at += took;
  }
  return true;
}

template <Place PLACE>
__device__ __forceinline__ bool overran(const Lane<PLACE> lanes[WORD], u32 modes) {
  bool bad = false;
#pragma unroll
  for (int p = 0; p < WORD; p++) {
    if (!IS(CODED, p) || (modes >> (2 * p) & 3) != 2) continue;
    const Lane<PLACE>& a = lanes[p];
    bad |= a.at > a.end;
  }
  return __any_sync(~0u, bad);
}

// The plane is known when this is compiled: loops over planes are unrolled.
template <Place PLACE>
__device__ __forceinline__ void coded_symbols(int plane, Lane<PLACE>& lane, u32 out[NV]) {
  if (code_of(plane) == PAIR) lane.template symbols<PAIR>(out);
  else if (code_of(plane) == FEW) lane.template symbols<FEW>(out);
  else lane.template symbols<SINGLE>(out);
}

// ---- staging ----

__device__ __forceinline__ void copy_async(u32 shared, u64 from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

__device__ __forceinline__ void stage(const Item& t, const Chunk& c, u32* to, u32 room, u32 lane) {
  u64 from = t.blob + c.begin + c.raw;
  u32 bytes = min(c.size - c.raw, room), shared = (u32)__cvta_generic_to_shared(to);
  for (u32 i = lane * 16; i < bytes; i += 512) copy_async(shared + i, from + i);
  commit_copies();
}

template <int LEFT>
__device__ __forceinline__ void wait_staged() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
  __syncwarp();
}

__device__ __forceinline__ void load_item(const Item* from, Item* to, u64 base) {
  u32 i = threadIdx.x;
  if (i < sizeof(Item) / 8) ((u64*)to)[i] = __ldg((const u64*)from + i) + (i == 0 ? base : 0);  // `blob` comes first
}

__device__ __forceinline__ void load_tables(const Item& t, u32* to, u32 room) {
  if (t.tables_bytes > room) return;
  u32 shared = (u32)__cvta_generic_to_shared(to);
  for (u32 i = threadIdx.x * 16; i < t.tables_bytes; i += blockDim.x * 16) copy_async(shared + i, t.tables + i);
  commit_copies();  // here: a warp without a chunk stages nothing, and copies that belong to no group are not waited for
}

// Groups of copies that a group of words commits for its rings.
__device__ constexpr int ring_commits() {
  int count = 0;
  for (int p = 0; p < WORD; p++)
    if (PIECE && IS(CODED, p)) count += IS(PAIRS, p) ? (V + 7) / 8 : (V + 3) / 4;
  return count;
}

// Raw planes go through two windows in shared memory, one filled while the other is used: a warp's loads are then
// long and far ahead, and the loop over a window's groups small, for the instruction cache's sake. How many windows a
// chunk has: 0 if the last would not be full.
__device__ __forceinline__ u32 windows_of(const Chunk& c) {
  return c.valid && c.n % (32 * V * WINDOW) == 0 ? c.n / (32 * V * WINDOW) : 0;
}

__device__ __forceinline__ void fill_window(const Item& t, const Chunk& c, u32* windows, u32 step, u32 lane) {
  u32 to = (u32)__cvta_generic_to_shared(windows) + (step & 1) * WINDOW_BYTES, steps = windows_of(c);
  u64 from = t.blob + c.begin + (u64)step * (32 * V * WINDOW);
#pragma unroll
  for (int p = 0; p < WORD; p++) {
    if (IS(CODED, p)) continue;
    if ((c.modes >> (2 * p) & 3) == 0) {
      if (step < steps)
        for (u32 i = lane * 16; i < 32 * V * WINDOW; i += 512) copy_async(to + i, from + i);
      from += c.n;
    }
    to += 32 * V * WINDOW;
  }
  commit_copies();
}

// Look-ups of a lane for a group.
__device__ constexpr int group_entries() {
  int count = 0;
  for (int p = 0; p < WORD; p++)
    if (IS(CODED, p)) count += IS(PAIRS, p) ? (V + 1) / 2 : V;
  return count;
}

// A whole chunk whose planes in CODED are all coded, its output aligned to 16 bytes. `mine`: the staged planes, or
// the warp's rings; `filled`: the first window is on its way.
__device__ __forceinline__ bool decode_whole(const Item& t, const Chunk& c, u32* mine, const u32* tables, u32 bytes,
                                             bool more, bool filled, u32* windows, u8* out, u32 lane) {
  const u32 steps = windows_of(c);
  const u32 fill = (c.modes >> 24) * 0x01010101u;
  if (!filled) fill_window(t, c, windows, 0, lane);
  fill_window(t, c, windows, 1, lane);
  const u32* words = mine;
  if (PIECE) words = (const u32*)(t.blob + c.begin + c.raw);
  // Copies are done in order: after this chunk's streams come two windows and perhaps the next chunk's streams.
  else if (more) wait_staged<3>();
  else wait_staged<2>();
  Lane<PIECE ? RING : STAGED> lanes[WORD];
  if (!open_lanes(t, c, words, tables, bytes, lane, lanes)) {
    wait_staged<0>();  // the next chunk's windows are the same memory
    return false;
  }
  if constexpr (PIECE != 0) {
    u32 ring = (u32)__cvta_generic_to_shared(mine) + lane * (4 * PIECE);
#pragma unroll
    for (int p = 0; p < WORD; p++) {
      if (!IS(CODED, p)) continue;
      lanes[p].ring = ring;
      lanes[p].fill_ring();
      ring += 32 * 4 * PIECE;
    }
    wait_staged<0>();
  }
  Sum sum;
  if (CHECK) sum.open(lane);
  uint4* to = (uint4*)out + lane;
  u32 planes[WORD][NV];
  auto read = [&](u32 step, u32 group) {
    u32 at = (step & 1) * WINDOW_BYTES + group * (32 * V) + lane * V;
#pragma unroll
    for (int p = 0; p < WORD; p++) {
      if (IS(CODED, p)) continue;
      load_raw((const u8*)windows + at, planes[p]);
      at += 32 * V * WINDOW;
      if ((c.modes >> (2 * p) & 3) == 1) {
#pragma unroll
        for (int i = 0; i < NV; i++) planes[p][i] = fill;
      }
    }
#pragma unroll
    for (int p = 0; p < WORD; p++)
      if (IS(CODED, p)) coded_symbols(p, lanes[p], planes[p]);
  };
  auto write = [&] {
    u32 q[4];
    merge(planes, q);
    if (CHECK) {
#pragma unroll
      for (int i = 0; i < 4; i++) sum.absorb(i, q[i]);
    }
    __stcs(to, make_uint4(q[0], q[1], q[2], q[3]));
    to += 32;
  };
  // A group is written while the next one's codewords are looked up, since those wait for each other. There is no
  // branch between a window's groups where few look-ups make one; elsewhere instructions would not fit their cache.
  constexpr int UNROLL = !PIECE && group_entries() <= 4 ? WINDOW : 1;
  if (WINDOW_BYTES) wait_staged<1>();
  read(0, 0);
#pragma unroll 1
  for (u32 step = 0;;) {
#pragma unroll UNROLL
    for (u32 group = 1; group < WINDOW; group++) {
      write();
      read(step, group);
    }
    if (++step == steps) break;
    if (WINDOW_BYTES) {
      __syncwarp();
      fill_window(t, c, windows, step + 1, lane);
      wait_staged<1 + WINDOW * ring_commits()>();
    }
    write();
    read(step, 0);
  }
  write();
  if (PIECE) wait_staged<0>();  // a lane may have asked for more than it took, and the next chunk's rings are the same
  return !CHECK || (sum.close() == c.sum && !overran(lanes, c.modes));
}

// Any chunk; of its words only `lo` to `hi - 1` are written, word w to out + (w - lo) * WORD.
__device__ __noinline__ bool decode_any(const Item& t, Chunk c, const u32* words, const void* tables, u32 count, u8* out,
                                        u32 lo, u32 hi, u32 lane) {
  Lane<ANYWHERE> lanes[WORD];
  if (!open_lanes(t, c, words, tables, count, lane, lanes)) return false;
  u32 groups = (c.n + 32 * V - 1) / (32 * V), bytes = c.n * WORD;
  u32 fill = (c.modes >> 24) * 0x01010101u;
  Sum sum;
  if (CHECK) sum.open(lane);
  bool aligned = ((u64)out - (u64)lo * WORD & 15) == 0;
  for (u32 g = 0; g < groups; g++) {
    u32 base = (g * 32 + lane) * V, at = 0, planes[WORD][NV], q[4];
#pragma unroll
    for (int p = 0; p < WORD; p++) {
      u32 mode = c.modes >> (2 * p) & 3;
      if (IS(CODED, p) && mode == 2) {
        coded_symbols(p, lanes[p], planes[p]);
      } else if (mode == 1) {
#pragma unroll
        for (int i = 0; i < NV; i++) planes[p][i] = fill;
      } else {
        const u8* source = (const u8*)(t.blob + c.begin) + at + base;
        if (base + V <= c.n) {
          load_raw(source, planes[p]);
        } else {
#pragma unroll
          for (int i = 0; i < NV; i++) {
            u32 x = 0;
#pragma unroll
            for (int j = 0; j < 4; j++)
              if (i * 4 + j < V && base + i * 4 + j < c.n) x |= (u32)source[i * 4 + j] << (8 * j);
            planes[p][i] = x;
          }
        }
        at += (c.n + 15) & ~15u;
      }
    }
    merge(planes, q);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      u32 first = base * WORD + 4 * i;  // byte of the chunk
      u32 have = first < bytes ? min(bytes - first, 4u) : 0;
      if (CHECK && have) sum.absorb(i, have == 4 ? q[i] : q[i] & ((1u << (8 * have)) - 1));
    }
    if (aligned && base >= lo && base + V <= hi) {
      *(uint4*)(out + (u64)(base - lo) * WORD) = make_uint4(q[0], q[1], q[2], q[3]);
    } else {
#pragma unroll
      for (int i = 0; i < 16; i++) {
        u32 w = base + i / WORD;
        if (w >= lo && w < hi) out[(u64)(w - lo) * WORD + i % WORD] = (u8)(q[i / 4] >> (8 * (i % 4)));
      }
    }
  }
  return !CHECK || (sum.close() == c.sum && !overran(lanes, c.modes));
}

// Words `lo` to `hi - 1` of a chunk.
__device__ __forceinline__ bool decode_part(const Item& t, const Chunk& c, const u32* staged, const u32* tables,
                                            u32 room, u32 table_room, u8* out, u32 lo, u32 hi, u32 lane) {
  u32 bytes = c.size - c.raw;
  // Bytes beyond the room may be padding to a unit of more than 16 bytes.
  bool fits = !PIECE && bytes <= room && t.tables_bytes <= table_room;
  const u32* words = fits ? staged : (const u32*)(t.blob + c.begin + c.raw);
  return c.valid && decode_any(t, c, words, fits ? tables : (const void*)t.tables, bytes, out, lo, hi, lane);
}

// A chunk whose streams are being staged, or pass through rings; `more`: the next one's are staged too; `filled`: so
// is its first window.
__device__ __forceinline__ bool decode(const Item& t, const Chunk& c, u32* mine, const u32* tables, u32 room,
                                       u32 table_room, bool more, bool filled, u32* windows, u8* out, u32 lane) {
  u32 bytes = c.size - c.raw;
  bool whole = windows_of(c) && ((u64)out & 15) == 0;
#pragma unroll
  for (int p = 0; p < WORD; p++)
    if (IS(CODED, p) && (c.modes >> (2 * p) & 3) != 2) whole = false;
  const u32 most = PIECE ? ~0u : room;  // any plane passes through a ring
  if (whole && bytes <= most && t.tables_bytes <= table_room)
    return decode_whole(t, c, mine, tables, bytes, more, filled, windows, out, lane);
  wait_staged<0>();
  return decode_part(t, c, mine, tables, room, table_room, out, 0, c.n, lane);
}

// All chunks of `items`. Shared memory: tables, and for each warp one or two buffers (`ahead`) of `room` bytes for
// the coded planes of a chunk, or its rings, which take `room` bytes.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
decode_items(const Item* __restrict__ items, u32 count, u64 total, u64 base, u64 out, u32* status, u32 room,
             u32 table_room, u32 ahead) {
  extern __shared__ __align__(PIECE ? 4 * PIECE : 16) u32 shared[];
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  u32* tables = shared;
  u32* windows = shared + (table_room + warp * 2 * WINDOW_BYTES) / 4;
  u32* mine = shared + (table_room + warps * 2 * WINDOW_BYTES + warp * (1 + ahead) * room) / 4;
  // Multiplied before divided: the product of 2^48 chunks and 2^16 blocks fits.
  u64 at = total * blockIdx.x / gridDim.x, stop = total * (blockIdx.x + 1) / gridDim.x;
  u32 number = 0;
  for (u32 high = count; high - number > 1;) {
    u32 middle = (number + high) / 2;
    if (items[middle].first <= at) number = middle; else high = middle;
  }
  // In shared memory: in registers its fields would not leave enough for the loop.
  __shared__ Item t;
  for (; at < stop; number++) {
    load_item(items + number, &t, base);
    __syncthreads();
    u64 next = min(t.first + t.count, stop), end = next - t.first + t.begin, k = at - t.first + t.begin + warp;
    Record now = {0, 0, 0, 0};
    u32 side = 0;
    bool filled = true;
    if (k < end) now = load_record(t, k);  // before the tables: they are asked for while it comes
    load_tables(t, tables, table_room);
    if (k < end) {
      Chunk c = open_chunk(t, k, now);
      if (!PIECE) stage(t, c, mine, room, lane);
      fill_window(t, c, windows, 0, lane);
      wait_staged<PIECE ? 1 : 2>();  // for the tables; the rest is for this warp alone
    } else {
      wait_staged<0>();
    }
    __syncthreads();
    for (; k < end; k += warps) {
      Record after = now;
      if (k + warps < end) after = load_record(t, k + warps);
      bool more = !PIECE && ahead && k + warps < end;
      if (more) stage(t, open_chunk(t, k + warps, after), mine + (side ^ room / 4), room, lane);
      Chunk c = open_chunk(t, k, now);
      u8* to = (u8*)(out + t.out) + c.word * WORD;
      bool ok = decode(t, c, mine + side, tables, room, table_room, more, filled, windows, to, lane);
      filled = false;
      if (!ok && lane == 0) report(status, t.number, k);
      __syncwarp();
      now = after;
      if (ahead) side ^= room / 4;
      else if (!PIECE && k + warps < end) stage(t, open_chunk(t, k + warps, now), mine, room, lane);
    }
    __syncthreads();
    at = next;
  }
}

// Rows `ids[0 .. count - 1]` of a matrix of one segment to rows 0 to count - 1 of `out`; where that is 0, their chunks
// are checked only. A warp takes a chunk of a row; `per_row` is the most chunks that a row can touch.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
decode_rows(const Item* __restrict__ items, u64 rows, u64 row_words, const long long* __restrict__ ids, u64 count,
            u64 per_row, u64 out, u32* status, u32 room, u32 table_room) {
  extern __shared__ __align__(PIECE ? 4 * PIECE : 16) u32 shared[];
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  u32* buffer = shared + table_room / 4 + warp * (room / 4);
  __shared__ Item t;
  load_item(items, &t, 0);
  __syncthreads();
  load_tables(t, shared, table_room);
  wait_staged<0>();
  __syncthreads();
  for (u64 i = (u64)blockIdx.x * warps + warp; i < count * per_row; i += (u64)gridDim.x * warps) {
    u64 row = i / per_row, id = (u64)ids[row];
    if (id >= rows) __trap();  // as the framework's own kernel does
    u64 begin = id * row_words, end = begin + row_words, k = begin / t.chunk_words + i % per_row;
    if (k >= t.chunks || k * t.chunk_words >= end) continue;
    Chunk c = open_chunk(t, k, load_record(t, k));
    stage(t, c, buffer, room, lane);
    wait_staged<0>();
    u32 lo = (u32)(max(begin, c.word) - c.word), hi = out ? (u32)(min(end, c.word + c.n) - c.word) : lo;
    u8* to = (u8*)(out + (row * row_words + c.word + lo - begin) * WORD);
    if (!decode_part(t, c, buffer, shared, room, table_room, to, lo, hi, lane) && lane == 0) report(status, t.number, k);
    __syncwarp();
  }
}
