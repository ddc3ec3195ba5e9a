// window_wide.cu: products of up to 128 rows with a matrix in the window layout (docs/windows.md 9), on Hopper GPUs.
//
// Eight blocks, a cluster, take four stripes at a time together, a turn, each of them one part of their columns. Some
// warps of a block decode: each writes one stripe's chunk to shared memory, as `wgmma` takes it, and waits for nothing but
// its bytes and room. Others multiply: a group of four has 64 rows of x, in registers, as the first factor, and what is
// decoded as the second one. So no weight is decoded twice, and decoding waits for no product. `wgmma` adds 16 products at
// a time to the bits that `mma.m16n8k16` gives. The eight partial sums of eight rows of the matrix go to one block of the
// cluster, whose warps that multiply end them.
//
// All wait for each other by barriers in shared memory ("mbarrier"). A tile here is a chunk of four stripes, a piece a
// quarter of it, 64 rows x 64 columns.
//
// Macros: those of window.cuh; NB, the most rows of x: 64 or 128; DECODERS, the warps that decode, 12 or 8; OWN, the chunks
// that a part has at most, 1 or 2, or 0 for any number: then x is loaded again for every EACH turns, a round, whose sums a
// warp keeps beside each other.

#include "window.cuh"
#include "hopper.cuh"

#define SENDERS (NB / 16u)  // warps that multiply: each has 16 rows of x
#define ALL_WARPS (SENDERS + DECODERS)
#define SETS (DECODERS / 4u)            // tiles that are decoded at a time, each where no other one goes
#define HELD (DECODERS == 12 ? 1u : 2u)  // chunks that a warp has fetched at a time
#define PIECE 8192u                     // bytes: 64 rows x 64 columns
#define STEP 2048u                      // of them, 16 columns
#define STEP_HALF 1024u                 // bytes between the words that wgmma takes of columns 0 to 7 and 8 to 15
#define PAIR_PLANE 1024u                // bytes: the places of a pair of tiles
#define INBOXES 2u                      // turns' partial sums that there is room for
#define INBOX (SENDERS * PARTS * 512u)  // bytes: 16 a lane of each part
#define STREAMS (OWN == 0)
#define EACH (STREAMS ? 2u : 1u)
#define KEPT (STREAMS ? 1u : OWN)  // chunks of x in registers
// Registers of threads that multiply, and of others: 64 Ki are there. Two chunks of x take 128.
#define MULTIPLIER_REGISTERS (SENDERS == 4 ? 240 : OWN == 2 ? 192 : 184)
#define DECODER_REGISTERS (SENDERS == 4 ? 88 : OWN == 2 ? 64 : 72)

// ---- x ----

// What a lane has of 64 columns of x: of rows g and g + 8 of its warp's 16, an octet of each of two tiles.
struct Columns {
  uint4 v[2][2];
};

// Where a lane's octets of x begin, and how many columns there are from there on. Instead of rows that x does not have, it
// takes the last one: those sums go nowhere.
struct X {
  const u16* rows[2];
  u32 columns;
};

__device__ __forceinline__ Columns load_x(const X& x, u32 chunk, u32 piece) {
  Columns c;
#pragma unroll
  for (u32 t = 0; t < 2; t++)
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
      const u16* const from = x.rows[half] + 256 * chunk;
      const u32 column = 64 * piece + 32 * t;
      if (!TAIL || 256 * chunk + column < x.columns) c.v[t][half] = load_16(from + column);
      else c.v[t][half] = make_uint4(0, 0, 0, 0);
    }
  return c;
}

// As wgmma takes them: four words for each of four products of 16 columns. With `zero`, which the assembler does not know,
// they are not moved before that is there: it would have them wait for their load.
__device__ __forceinline__ void set_x(u32 (*f)[4], const Columns& c, u32 zero) {
#pragma unroll
  for (u32 t = 0; t < 2; t++) {
    const uint4 &a = c.v[t][0], &b = c.v[t][1];
    const u32 words[8] = {a.x, b.x, a.y, b.y, a.z, b.z, a.w, b.w};
#pragma unroll
    for (u32 i = 0; i < 8; i++) f[2 * t + i / 4][i % 4] = words[i] ^ zero;
  }
}

// ---- decoding ----

// An entry as it is put: its place, or NOWHERE, and what is XORed to the word there.
struct Put {
  u32 place, value;
};

#define NOWHERE 0x1000u

__device__ __forceinline__ Put put_of(const Matrix& m, u32 entry, bool there) {
  return {there ? entry & 4095 : NOWHERE, xor_of(m, entry) << entry % 4 * 8};
}

__device__ __forceinline__ void put_pair(u8* plane, const Put& a, u32 pair) {
  if (a.place >> 10 == pair) atomicXor((u32*)plane + (a.place & 1023) / 4, a.value);
}

__device__ __forceinline__ void wipe_pair(u8* plane, const Put& a, u32 pair) {
  if (a.place >> 10 == pair) plane[a.place & 1023] = 0;
}

// Have a function take the entries after a chunk's first 64.
template <typename F>
__device__ __forceinline__ void for_more(const Matrix& m, u32 stripe, u32 chunk, u32 lane, const F& take) {
  const Range r = range_of(m, stripe, chunk);
#pragma unroll 1
  for (u32 i = r.at + lane + 64; i < r.end; i += 32) take(__ldg((const u16*)m.entries + i));
}

// Four code words of a lane, from the one numbered k on. Words of columns beyond a chunk's pairs are as padding is, finite
// numbers.
__device__ __forceinline__ uint4 take_codes(const u8* from, u32 pairs, u32 k, u32 lane) {
  if (pairs == 4) return *(const uint4*)(from + 128 * k + 16 * lane);
  uint4 c = make_uint4(0, 0, 0, 0);
#if TAIL
  const u32* const p = (const u32*)from + lane + 32 * k;
  if (k < 3 * pairs) c.x = p[0];
  if (k + 1 < 3 * pairs) c.y = p[32];
  if (k + 2 < 3 * pairs) c.z = p[64];
  if (k + 3 < 3 * pairs) c.w = p[96];
#endif
  return c;
}

// The low bytes of tile j.
__device__ __forceinline__ uint4 take_low(const u8* from, u32 pairs, u32 j, u32 lane) {
  if (pairs == 4) return *(const uint4*)(from + 1536 + 512 * j + 16 * lane);
#if TAIL
  const u32* const p = (const u32*)from + lane + 96 * pairs + 128 * j;
  if (j < 2 * pairs) return make_uint4(p[0], p[32], p[64], p[96]);
#endif
  return make_uint4(0, 0, 0, 0);
}

// What a block takes: of each stripe the chunks `part`, `part + PARTS`, ..., `own` of them; of the stripes four from `start`
// on, four from `start + step` on, and so on, in so many turns.
struct Share {
  u32 part, own, start, step, turns;
};

// Each warp finds it where it needs it: what all have found before takes registers from all.
__device__ __forceinline__ Share share_of(const Matrix& m) {
  Share s;
  u32 stripes = (m.rows + 15) / 16;
  forget(stripes);
  s.part = rank_in_cluster();
  s.own = (m.chunks - s.part + PARTS - 1) / PARTS;
  s.step = gridDim.x / CLUSTER * 4, s.start = blockIdx.x / CLUSTER * 4;
  s.turns = (stripes - s.start + s.step - 1) / s.step;
  return s;
}

// A tile of a block: of which turn, and which of the part's chunks.
struct Place {
  u32 turn, own;
};

// As `product` of window.cu.
extern "C" __global__ void __launch_bounds__(32 * ALL_WARPS, 1)
wide_product(MATRIX, const u16* __restrict__ x_at, u64 x_stride, u32 n, u16* __restrict__ y, u64 y_stride,
             const u16* __restrict__ bias) {
  DYNAMIC_SHARED;
  const Matrix m = THE_MATRIX;
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u8* const pieces = shared;                          // [SETS][4] pieces that are decoded
  u8* const inbox = pieces + SETS * 4 * PIECE;        // [INBOXES][PARTS] partial sums that this block adds up
  u8* const planes = inbox + INBOXES * INBOX;         // [DECODERS] planes of a pair of tiles, each before HELD chunks
  // Barriers: an inbox is full, all have read theirs, a piece is decoded, nobody reads it, a chunk has come.
  const u32 full = shared_address(planes + DECODERS * (PAIR_PLANE + HELD * CHUNK_BYTES)), read = full + 8 * INBOXES;
  const u32 decoded = read + 8 * INBOXES, emptied = decoded + 8 * 4 * SETS, come = emptied + 8 * 4 * SETS;
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < INBOXES; i++) make_barrier(full + 8 * i, 1), make_barrier(read + 8 * i, CLUSTER * SENDERS);
    for (u32 i = 0; i < 4 * SETS; i++) make_barrier(decoded + 8 * i, 4), make_barrier(emptied + 8 * i, SENDERS);
    for (u32 i = 0; i < HELD * DECODERS; i++) make_barrier(come + 8 * i, 1);
    fence_barriers();
    for (u32 i = 0; i < INBOXES; i++) expect(full + 8 * i, INBOX);
  }
  __syncthreads();
  arrive();
  if (warp >= SENDERS) {
    take_registers<DECODER_REGISTERS, false>();
    const auto [part_, own_, start_, step_, turns_] = share_of(m);
    const u32 part = part_, own = own_, start = start_, step = step_, turns = turns_, last = (m.rows + 15) / 16 - 1;
    const auto chunk_of = [&](u32 i) { return part + PARTS * i; };
    // To the block's next tile.
    const auto advance = [&](Place& p) {
      if (++p.turn % EACH && p.turn < turns) return;
      if (++p.own == own) p.own = 0, p.turn = (p.turn + EACH - 1) / EACH * EACH;
      else p.turn = (p.turn - 1) / EACH * EACH;
    };
    const u32 number = warp - SENDERS, set = number / 4, beside = number % 4;
    u8 *const plane = planes + number * (PAIR_PLANE + HELD * CHUNK_BYTES), *const held = plane + PAIR_PLANE;
    const u32 came = come + 8 * HELD * number, theirs = decoded + 8 * 4 * set, room = emptied + 8 * 4 * set;
    const auto stripe_of = [&](const Place& p) { return min(start + p.turn * step + beside, last); };  // or the last again
    // To this warp's next tile.
    const auto skip = [&](Place& p) {
#pragma unroll
      for (u32 i = 0; i < SETS; i++)
        if (p.turn < turns) advance(p);
    };
    const auto fetch_of = [&](const Place& p, u32 i) {
      if (p.turn < turns)
        bring(shared_address(held + i * CHUNK_BYTES), came + 8 * i, m, stripe_of(p), chunk_of(p.own), lane);
    };
    for (u32 i = lane; i < PAIR_PLANE / 16; i += 32) ((uint4*)plane)[i] = make_uint4(0, 0, 0, 0);
    __syncwarp();
    Place here = {0, 0};
    for (u32 i = 0; i < set; i++)
      if (here.turn < turns) advance(here);
    Place next = here;
    skip(next);
    fetch_of(here, 0);
    if (HELD == 2) fetch_of(next, 1);
    Entries coming = {0, 0, 0, 0};
    Range after = {0, 0};
    Records ahead = {0, 0};
    if (here.turn < turns) {
      coming = load_entries(m, range_of(m, stripe_of(here), chunk_of(here.own)), lane);
      ahead = records_of(m, stripe_of(here), lane);
      if (next.turn < turns) after = range_of(m, stripe_of(next), chunk_of(next.own));
    }
    follow_early();
    // Where `stmatrix` has a lane write: a row of 16 bytes of one of four blocks of 8 x 8 words.
    const u32 to = shared_address(pieces) + set * 4 * PIECE + lane / 16 * STEP_HALF + (2 * beside + lane / 8 % 2) * 128 + lane % 8 * 16;
    const uint2* const escapes = (const uint2*)plane + lane;
#pragma unroll 1
    for (u32 count = 0; here.turn < turns; count++) {
      const Put a = put_of(m, coming.first, lane < coming.count), b = put_of(m, coming.second, lane + 32 < coming.count);
      const bool more = coming.count > 64;
      const Records records = ahead;
      const u32 pairs = pairs_of(m, chunk_of(here.own));
      if (next.turn < turns) {
        Place far = next;
        skip(far);
        coming = load_entries(m, after, lane);
        ahead = records_of(m, stripe_of(next), lane);
        if (far.turn < turns) after = range_of(m, stripe_of(far), chunk_of(far.own));
      }
      const u32 which = count % HELD;
      const u8* const from = held + which * CHUNK_BYTES;
      wait_on(came + 8 * which, count / HELD % 2);
      const Rows r = rows_of(records, m.zero);
      uint4 codes[3] = {};
      const auto code = [&](u32 k) { return k % 4 == 0 ? codes[k / 4].x : k % 4 == 1 ? codes[k / 4].y : k % 4 == 2 ? codes[k / 4].z : codes[k / 4].w; };
#pragma unroll
      for (u32 p = 0; p < 4; p++) {
        if (p < 3) codes[p] = take_codes(from, pairs, 4 * p, lane);
        // The plane is XORed with the entries of a pair of tiles.
        put_pair(plane, a, p), put_pair(plane, b, p);
        if (more) for_more(m, stripe_of(here), chunk_of(here.own), lane, [&](u32 entry) { put_pair(plane, put_of(m, entry, true), p); });
        __syncwarp();
#pragma unroll
        for (u32 t = 0; t < 2; t++) {
          u32 w[8];
          tile_of(t, code(3 * p), code(3 * p + 1), code(3 * p + 2), take_low(from, pairs, 2 * p + t, lane), r, escapes + 64 * t, w);
          if (t == 0) wait_on(room + 8 * p, (count + 1) % 2);
#pragma unroll
          for (u32 f = 0; f < 2; f++)
            store_blocks(to + p * PIECE + (2 * t + f) * STEP, w[2 * f], w[4 + 2 * f], w[2 * f + 1], w[5 + 2 * f]);
        }
        fence_shared();  // wgmma reads them; the next chunk comes where this one was read
        __syncwarp();
        if (lane == 0) arrive_at(theirs + 8 * p);
        wipe_pair(plane, a, p), wipe_pair(plane, b, p);
        if (more) for_more(m, stripe_of(here), chunk_of(here.own), lane, [&](u32 entry) { wipe_pair(plane, {entry & 4095, 0}, p); });
        __syncwarp();
      }
      here = next;
      forget(next.turn);  // what was found from it above takes registers
      skip(next);
      fetch_of(HELD == 2 ? next : here, which);
    }
  } else {
    take_registers<MULTIPLIER_REGISTERS, true>();
    const auto [part_, own_, start_, step_, turns_] = share_of(m);
    const u32 part = part_, own = own_, start = start_, step = step_, turns = turns_;
    const auto chunk_of = [&](u32 i) { return part + PARTS * i; };
    follow_early();
    wait_for_last();  // x is the last kernel's; the weights are not
    X x;
#pragma unroll
    for (u32 half = 0; half < 2; half++)
      x.rows[half] = x_at + min(16 * warp + 8 * half + lane / 4, n - 1) * x_stride + lane % 4 * 8;
    x.columns = (m.columns + 7) / 8 * 8 - lane % 4 * 8;
    Columns c[KEPT][4];  // as they lie in x; all loads are under way at a time
#pragma unroll
    for (u32 i = 0; i < 4 * KEPT; i++) c[i / 4][i % 4] = load_x(x, chunk_of(min(i / 4, own - 1)), i % 4);
#if !STREAMS
    u32 f[KEPT][4][4][4];
#pragma unroll
    for (u32 i = 0; i < 4 * KEPT; i++) set_x(f[i / 4][i % 4], c[i / 4][i % 4], 0);
#endif
    wait_for_cluster();  // all have their barriers
    const u32 slot = 512 * warp + 16 * lane;  // of an inbox, of each part
    // Add up a turn's partial sums, and store y.
    const auto end = [&](u32 turn) {
      const u32 box = turn % INBOXES;
      wait_on(full + 8 * box, turn / INBOXES % 2);
      const float4* const p = (const float4*)(inbox + box * INBOX + slot);
      float4 v[PARTS];
#pragma unroll
      for (u32 j = 0; j < PARTS; j++) v[j] = p[32 * SENDERS * j];
      float4 s = pairwise(v);
      if (turn + INBOXES < turns) {
        if (warp + lane == 0) expect(full + 8 * box, INBOX);
        keep_register(s.x), keep_register(s.y), keep_register(s.z), keep_register(s.w);  // all have been read
        __syncwarp();
        if (lane < CLUSTER) arrive_in(read + 8 * box, lane);
      }
      const u32 row = 16 * (start + turn * step) + 8 * part + lane % 4 * 2;
#pragma unroll
      for (u32 half = 0; half < 2; half++) {
        const u32 k = 16 * warp + 8 * half + lane / 4;
        if (k >= n || row >= m.rows) continue;
        u16* const to = y + k * y_stride + row;
        const u16 one = ended(half ? s.z : s.x, bias, row);
        if (row + 1 == m.rows) {
          to[0] = one;
          continue;
        }
        const u16 two = ended(half ? s.w : s.y, bias, row + 1);
        if (((u64)y | y_stride * 2) % 4 == 0) *(u32*)to = one | (u32)two << 16;
        else to[0] = one, to[1] = two;
      }
    };
    u32 tiles = 0;
#pragma unroll 1
    for (u32 round = 0; round < turns; round += EACH) {
      float sum[EACH][32];
#pragma unroll
      for (u32 h = 0; h < EACH; h++)
#pragma unroll
        for (u32 t = 0; t < 32; t++) sum[h][t] = 0;
      // Wait for piece p of a tile.
      const auto wait_for = [&](u32 tile, u32 p) { wait_on(decoded + 8 * (tile % SETS * 4 + p), tile / SETS % 2); };
      const auto multiply = [&](float* d, const u32 (*f)[4], u32 tile, u32 p) {
        const u32 at = shared_address(pieces) + (tile % SETS * 4 + p) * PIECE;
        registers_are_set();
#pragma unroll
        for (u32 k = 0; k < 4; k++) wgmma_64(d, f[k][0], f[k][1], f[k][2], f[k][3], descriptor(at + k * STEP, STEP_HALF));
        commit();
      };
      const auto leave = [&](u32 tile, u32 p) {
        if (lane == 0) arrive_at(emptied + 8 * (tile % SETS * 4 + p));
      };
#if STREAMS
#pragma unroll 1
      for (u32 i = 0; i < own; i++) {
        const u32 next = chunk_of(i + 1 < own ? i + 1 : 0);
        const bool two = EACH == 2 && round + 1 < turns;  // tiles, for which x is loaded once
#pragma unroll
        for (u32 p = 0; p < 4; p++) {
          u32 f[4][4];
          wait_for(tiles, p);
          set_x(f, c[0][p], zero_later());
          multiply(sum[0], f, tiles, p);
          if (two) wait_for(tiles + 1, p), multiply(sum[EACH - 1], f, tiles + 1, p);
          wait_for_products<0>();  // with fewer registers than two pieces' x would take
          leave(tiles, p);
          if (two) leave(tiles + 1, p);
          c[0][p] = load_x(x, next, p);
        }
        tiles += 1 + two;
      }
#else
#pragma unroll
      for (u32 i = 0; i < OWN; i++) {
        if (i == own) break;
#pragma unroll
        for (u32 p = 0; p < 4; p++) {
          wait_for(tiles, p);
          multiply(sum[0], f[i][p], tiles, p);
          wait_for_products<1>();  // those of the piece before have ended
          if (i + p) leave(p ? tiles : tiles - 1, (p + 3) % 4);
        }
        tiles++;
      }
      wait_for_products<0>();
      leave(tiles - 1, 3);
#endif
#pragma unroll
      for (u32 h = 0; h < EACH; h++) {
        const u32 turn = round + h, box = turn % INBOXES, to = shared_address(inbox) + box * INBOX + 512 * SENDERS * part + slot;
        if (turn >= turns) break;
#pragma unroll
        for (u32 t = 0; t < 32; t++) keep_register(sum[h][t]);  // they are read below, not above
        if (EACH > 1 && turn >= INBOXES) end(turn - INBOXES);  // all blocks do, before they wait for room
        if (turn >= INBOXES) wait_on(read + 8 * box, (turn / INBOXES - 1) % 2);
#pragma unroll
        for (u32 t = 0; t < CLUSTER; t++) send(in_block(to, t), in_block(full + 8 * box, t), sum[h] + 4 * t);
      }
      if (EACH == 1 && round) end(round - 1);  // most likely all have sent theirs
    }
    for (u32 turn = turns < EACH ? 0 : turns - EACH; turn < turns; turn++) end(turn);
  }
  __syncwarp();
  if (warp >= SENDERS) wait_for_cluster();
  arrive();  // no block ends while another one sends to it
  wait_for_cluster();
}
