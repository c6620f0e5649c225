// Constants, shared memory and the order of the q tiles of the Hopper forward.
#pragma once
#include "params_sm90.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"
#include "tile/mask.cuh"

constexpr int Q_TILE = DC_Q_TILE, KV_TILE = DC_KV_TILE;
constexpr int N_CONSUMER = DC_CONSUMERS;  // warpgroups
constexpr int WARPGROUP_ROWS = 64;        // of q, for one consumer
constexpr int N_THREAD = (1 + N_CONSUMER) * WARPGROUP_SIZE;
constexpr int STAGES = DC_STAGES;      // tiles of k, and of v, in shared memory
constexpr int Q_STAGES = DC_Q_STAGES;  // q tiles
constexpr int COLUMNS = DC_HEAD_DIM_PAD;  // of q, k, v in the products; from DC_HEAD_DIM on zeros
constexpr int PANELS = ceil_div(COLUMNS, PANEL_COLUMNS);
// Whether row maxima are looked at in a row's first tiles only; see the header of fwd_sm90.cu.
constexpr bool FIXED_REFERENCE = DC_FIXED_REFERENCE;

static_assert(DC_HEAD_DIM % 8 == 0 && DC_HEAD_DIM > 0, "head_dim: 16-byte strides");
static_assert(DC_HEAD_DIM <= COLUMNS && COLUMNS % 32 == 0 && COLUMNS <= 256, "head_dim");
static_assert(Q_TILE == N_CONSUMER * WARPGROUP_ROWS, "a warpgroup has 64 rows");
static_assert(KV_TILE % 16 == 0 && KV_TILE <= 256, "whole k steps of P v; rows of a box");
static_assert(STAGES >= 2 && Q_STAGES >= 1 && Q_STAGES <= 3, "stages");
static_assert(DC_CAUSAL == 0 || DC_CAUSAL == 1, "mask");

constexpr int Q_PANEL_BYTES = WARPGROUP_ROWS * PANEL_ROW_BYTES;
constexpr int Q_BYTES = PANELS * Q_PANEL_BYTES;  // one warpgroup's rows
constexpr int KV_PANEL_BYTES = KV_TILE * PANEL_ROW_BYTES;
constexpr int KV_BYTES = PANELS * KV_PANEL_BYTES;

constexpr int N_SLOT = 4;
// Slots whose verdict or out can be signalled and not yet looked at: one for each q tile that is on
// its way, and with one stage the slot after it, which may be no q tile.
constexpr int N_OPEN = max_int(Q_STAGES, 2);
static_assert(N_OPEN < N_SLOT, "a slot is read until its out is stored");

// Everything a CTA keeps in shared memory. Tiles are panels of 64 columns, see ptx/wgmma.cuh.
struct alignas(1024) SharedStorage {
  u8 q[Q_STAGES][N_CONSUMER][Q_BYTES];  // out on its way to global memory, once q is done with
  u8 k[STAGES][KV_BYTES], v[STAGES][KV_BYTES];
  // Of a finished q tile, while the next one starts: sums of the threads, references of the rows.
  float2 sums[Q_STAGES == 1 ? 1 : N_CONSUMER * WARPGROUP_SIZE];
  float references[Q_STAGES == 1 ? 1 : Q_TILE];
  int4 slots[N_SLOT];                        // Works handed to the consumers and the storer
  int4 coming;                               // the Work of coming_tile, for the producer
  u64 k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
  u64 q_full[Q_STAGES], q_empty[Q_STAGES];
  u64 out_full[N_OPEN], verdict[N_OPEN];
  u64 coming_full, coming_empty;
  u32 failed[N_OPEN];  // of the q tile of that verdict: a sum or an out has left the safe range
  int posted[N_OPEN];  // that q tile, for the producer
  int coming_tile;     // a q tile that was never posted, or END
  u32 sink;            // target of a store that never happens
};
static_assert(sizeof(SharedStorage) == DC_SMEM_BYTES, "config.py counts another size");

DC_FN SharedStorage& shared_storage() {
  extern __shared__ __align__(1024) u8 smem_bytes[];
  return *reinterpret_cast<SharedStorage*>(smem_bytes);
}

DC_FN u32 address(const u64& barrier) { return smem_address(&barrier); }

// Named barriers; 0 is __syncthreads.
constexpr int TURN = 1;                   // + consumer: it may issue its products
constexpr int Q_DONE = TURN + N_CONSUMER;  // + consumer: its four warps are done with their q rows
static_assert(Q_DONE + N_CONSUMER <= 16, "16 named barriers");

// What a slot says: a q tile of a head, or one of two words.
struct Work {
  int q_row0;       // first row, or HOLD, END
  int head, batch;  // of q
  int n_tile;       // kv tiles; | TRACK_MAXIMUM
};
constexpr int END = -1;   // no more q tiles
constexpr int HOLD = -2;  // nothing to go on with yet: finish what is there
constexpr int TRACK_MAXIMUM = int(1u << 31);

// Heads go in groups whose k and v fit into L2 together; in a group all heads' longest q tiles come
// first, so that the last ones to run are short, and the heads of one q tile come one after
// another, so that q heads of one kv head read its keys together.
DC_FN Work work_of(const ForwardSm90Params& params, u32 index) {
  const u32 n_q = ceil_div(params.q_len, Q_TILE), n_head = params.batch * params.n_q_head;
  const u32 group_tiles = params.head_group * n_q, group = index / group_tiles;
  const u32 in_group = index - group * group_tiles, first = group * params.head_group;
  const u32 rest = n_head - first, n = min_int(params.head_group, rest);
  const u32 turn = in_group / n, head = first + in_group - turn * n;

  Work work;
  work.q_row0 = int(DC_CAUSAL ? n_q - 1 - turn : turn) * Q_TILE;
  work.batch = head / params.n_q_head;
  work.head = head - work.batch * params.n_q_head;
  const Mask mask{params.q_len, params.kv_len, params.mask_offset};
  const int row_end = mask.key_end(min_int(work.q_row0 + Q_TILE, params.q_len) - 1);
  // A q tile that sees no key takes one kv tile, all of it masked.
  work.n_tile = max_int(ceil_div(row_end, KV_TILE), 1);
  return work;
}

DC_FN void write_work(int4& place, const Work& work) {
  const u32 words[4] = {u32(work.q_row0), u32(work.head), u32(work.batch), u32(work.n_tile)};
  st_shared_v4(smem_address(&place), words);
}

DC_FN Work read_work(const int4& place) {
  u32 words[4];
  ld_shared_v4(words, smem_address(&place));
  return {int(words[0]), int(words[1]), int(words[2]), int(words[3])};
}
