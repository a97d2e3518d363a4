// What       what score_sm90.cu and grad_sm90.cu share: hidden states of 128 rows built in shared memory, and their
//            product with the weight, panel by panel, in the registers of the warpgroup that goes on with it
//
// Strip      128 rows, in work at once;  panel: 128 columns of the scores;  slab: 64 columns of the hidden states
// Item       a strip and a run of panels; items go round the blocks, one block a multiprocessor
// Roles      warpgroup 0   one thread streams the weight's slabs through kStages buffers
//            warpgroup 1   looks rows up and builds the hidden states of the next item, as slabs come free
//            warpgroup 2,3 take turns: panel g of the block's run belongs to group g % 2, which multiplies it by itself
//                          and works on the scores while the other multiplies
// Order      who waits on what, how many arrive, and why the phase is known (a wait names a parity, so a waiter may be
//            at most one phase behind):
//
//            barrier            arrivals          waits for it           phase
//            hidden_ready[k]    128 builders      consumers, first       one an item; a group's first panel of the next
//                                                 panel of an item       item comes after its turn, and so after the other
//                                                                        group has seen this item's phase
//            hidden_free[k]     a warp each of    builder, before slab   one an item
//                               those that read   k of the next item
//                               it: 8, or 4 if
//                               items have 1 panel
//            weight_ready[s]    1 + bytes         consumers, each slab   one per use of the buffer; only the group whose
//                                                                        turn it is waits, slabs in order
//            weight_free[s]     4 warps of the    streamer, before it    one per use of the buffer
//                               group that read   uses the buffer again
//            turn[group]        256 (named)       the group              given when the other has issued its last product
//            (score: merge_full, merge_free: see there)
//
// Constants  STATE, PAIR, OPERAND;  WIDTH (H), VOCABULARY (V);  ITEM_PANELS;  ACTIVATION;  DROPOUT;  SHARED_BYTES
#pragma once
#include "common.cuh"
#include "dropout.cuh"
#include "ptx.cuh"
#include "rows.cuh"
#include "sm90.cuh"

typedef STATE State;
enum class Activation { relu, tanh, sigmoid, silu, identity };
constexpr Activation kActivation = Activation::ACTIVATION;
constexpr bool kDropout = DROPOUT;
constexpr bool kHasBits = kDropout || kActivation == Activation::relu;

constexpr int kWidth = WIDTH, kVocabulary = VOCABULARY;
constexpr int kStripRows = 128, kPanelColumns = 128, kSlabColumns = 64;
constexpr int kGroupThreads = 128, kThreads = 4 * kGroupThreads;
constexpr int kSlabs = (kWidth + kSlabColumns - 1) / kSlabColumns;
constexpr int kPanels = (kVocabulary + kPanelColumns - 1) / kPanelColumns;
constexpr int kSplits = (kPanels + ITEM_PANELS - 1) / ITEM_PANELS;  // items of a strip
constexpr int kLeastPanels = kPanels / kSplits;                     // of an item
static_assert(kWidth % kVector == 0, "rows are loaded 16 bytes at a time");
static_assert(kLeastPanels > 1 || kPanels == 1, "both groups must have a panel of every item, or only one exists");

// Shared memory, in bytes from its start.
constexpr u32 kSlabBytes = 128 * kSlabColumns * sizeof(State);  // of 128 rows of hidden states, or 128 of the weight
constexpr u32 kRowBytes = kStripRows * 16;                      // what the builder tells of each row
constexpr u32 kBarrierBytes = 8;
constexpr u32 kHiddenAt = 0, kWeightAt = kSlabs * kSlabBytes;
constexpr u32 kFixedBytes = kWeightAt + kRowBytes + 2 * kSlabs * kBarrierBytes;
constexpr int kMaxStages = (SHARED_BYTES - kFixedBytes) / (kSlabBytes + 2 * kBarrierBytes);
constexpr int kStages = kMaxStages < 8 ? kMaxStages : 8;
static_assert(kStages >= 2, "the strip's hidden states leave no room for the weight");
constexpr u32 kRowsAt = kWeightAt + kStages * kSlabBytes;
constexpr u32 kHiddenReadyAt = kRowsAt + kRowBytes, kHiddenFreeAt = kHiddenReadyAt + kSlabs * kBarrierBytes;
constexpr u32 kWeightReadyAt = kHiddenFreeAt + kSlabs * kBarrierBytes;
constexpr u32 kWeightFreeAt = kWeightReadyAt + kStages * kBarrierBytes;
constexpr u32 kSharedEnd = kWeightFreeAt + kStages * kBarrierBytes;
static_assert(kSharedEnd <= SHARED_BYTES, "shared memory");

// Named barriers.
constexpr int kTurnBarrier = 1, kMergeFullBarrier = 3, kMergeFreeBarrier = 4;  // kTurnBarrier + group

// Registers a thread of each role, of 65,536 / 512 at entry.
constexpr int kStreamRegisters = 24, kBuildRegisters = 120, kConsumeRegisters = 184;

struct FusedParams {
  Rows rows;
  Tile tile;
  const State* encoder;       // row of (b, t): encoder_offset_b[b] + t encoder_step, in elements
  const State* predictor;     // row of (b, u): predictor_offset_b[b] + u predictor_step
  const i64* encoder_offset_b;
  const i64* predictor_offset_b;
  i64 encoder_step, predictor_step;
  const unsigned char* slabs; // [kPanels, kSlabs, 128 rows x 64] the weight as pack_sm90.cu lays it out
  const float* panel_bias;    // [kPanels * 128] bias times keep probability; -inf beyond V
  const int* labels;          // packed; label u of utterance b at label_start_b[b] + u
  const i64* label_start_b;   // [B + 1]
  float* column_cn;           // [2, N]: blank, label
  float* normalizer_n;        // [N] log2 of the sum of 2^(z log2 e), or null
  const float* upstream_b;    // [B]
  State* hidden;              // [R, H], unscaled
  unsigned char* active;      // [R, H / 8], see joint.cu
  State* grad_logits;         // [R, grad_step]
  float* bias_partials;       // [8 gridDim.x, V], or null
  i64 grad_step, n_nodes;
  u64 seed;
  float scale;                // 1 / keep probability
  u32 threshold;              // draws below it drop
  int blank;
};

template <class T>
__device__ __forceinline__ T* shared_at(u32 address, int index) {
  return static_cast<T*>(__cvta_shared_to_generic(address)) + index;
}

// ---- the run of a block -------------------------------------------------------------------------------------------

struct Item {
  i64 first_row;              // of the strip
  int first_panel, n_panels;
};

__device__ __forceinline__ int count_items(const FusedParams& p) {
  const i64 n_strips = (p.tile.row_end - p.tile.row_begin + kStripRows - 1) / kStripRows;
  const int n_items = static_cast<int>(n_strips) * kSplits, block = blockIdx.x;
  return block < n_items ? (n_items - block - 1) / static_cast<int>(gridDim.x) + 1 : 0;
}
__device__ __forceinline__ Item item_at(const FusedParams& p, int turn) {
  const int item = blockIdx.x + turn * gridDim.x, strip = item / kSplits, split = item % kSplits;
  const int first_panel = kPanels * split / kSplits;
  return {p.tile.row_begin + static_cast<i64>(strip) * kStripRows, first_panel,
          kPanels * (split + 1) / kSplits - first_panel};
}

// A buffer of the weight's ring and the parity of its use.
struct Stage {
  int index;
  u32 parity;
};
__device__ __forceinline__ Stage stage_of(i64 slab) {
  return {static_cast<int>(slab % kStages), static_cast<u32>(slab / kStages) & 1};
}
__device__ __forceinline__ void advance(Stage& stage) {
  if (++stage.index == kStages) stage = {0, stage.parity ^ 1};
}

__device__ __forceinline__ void stream_weight(const FusedParams& p, u32 shared, int n_items) {
  Stage stage = {0, 0};
  for (int turn = 0; turn < n_items; ++turn) {
    const Item item = item_at(p, turn);
    const unsigned char* from = p.slabs + static_cast<i64>(item.first_panel) * kSlabs * kSlabBytes;
    for (int slab = 0; slab < item.n_panels * kSlabs; ++slab, from += kSlabBytes) {
      const u32 ready = shared + kWeightReadyAt + stage.index * kBarrierBytes;
      barrier_wait(shared + kWeightFreeAt + stage.index * kBarrierBytes, stage.parity ^ 1);
      barrier_expect(ready, kSlabBytes);
      bulk_copy(shared + kWeightAt + stage.index * kSlabBytes, from, kSlabBytes, ready);
      advance(stage);
    }
  }
}

// ---- hidden states --------------------------------------------------------------------------------------------------

constexpr u32 kOnes = sizeof(State) == 2 && static_cast<int>(OPERAND[0]) == 'b' ? 0x3F803F80u : 0x3C003C00u;

__device__ __forceinline__ float widen_low(u32 pair) {
  const unsigned short bits = static_cast<unsigned short>(pair);
  return widen<float>(*reinterpret_cast<const State*>(&bits));
}
__device__ __forceinline__ float widen_high(u32 pair) { return widen_low(pair >> 16); }

__device__ __forceinline__ float activate(float x) {
  constexpr float kLog2e = 1.4426950408889634f;
  if (kActivation == Activation::tanh) {
    const float y = 1.f - 2.f * reciprocal_unit(exp2_unit(2.f * kLog2e * x) + 1.f);
    return fabsf(x) < 0.03f ? x - x * x * x * (1.f / 3.f) : y;  // 1 - 2 / (1 + ...) loses small ones
  }
  const float y = reciprocal_unit(1.f + exp2_unit(-kLog2e * x));
  return kActivation == Activation::sigmoid ? y : x * y;
}

// f(e + p) of two columns.
__device__ __forceinline__ u32 activate_pair(u32 e, u32 q) {
  if (kActivation == Activation::relu) return pair_add_relu(e, q, kOnes);
  if (kActivation == Activation::identity) return pair_add(e, q, kOnes);
  return pair_of(activate(widen_low(e) + widen_low(q)), activate(widen_high(e) + widen_high(q)));
}

// The keep bits of this thread's 8 chunks in every slab: word [half][k] has those of rows first_row + 64 half + 16 i,
// the sign bits of columns 2 q and 2 q + 1 shifted right by 4 i + q.
struct KeepBits {
  u32 word[2 * kSlabs];

  // Word [half][0] is the one of the slab in work: a run-time index would move the array to memory.
  __device__ __forceinline__ void push(u32 last) {
#pragma unroll
    for (int j = 0; j < 2 * kSlabs - 1; ++j) word[j] = word[j + 1];
    word[2 * kSlabs - 1] = last;
  }
  __device__ __forceinline__ u32 pair(int half, int i, int q) const { return word[half * kSlabs] << (4 * i + q); }
};

// What a lane looks up of its row.
struct RowFound {
  u32 encoder, predictor;  // offsets in 16 bytes
  i64 node;
  int b, label;            // label -1: the utterance's last state
  bool exists;
};

// By a whole warp, a row a lane; `first` and `last` are the strip's. Rows beyond the last repeat it.
__device__ __forceinline__ RowFound find_row(const FusedParams& p, i64 first, i64 last, i64 row) {
  i64 begin = find_frame(p.rows, first, p.tile.frame_begin, p.tile.frame_end);
  i64 end = find_frame(p.rows, last, begin, p.tile.frame_end) + 1;
  while (end - begin > 1) {
    const i64 middle = (begin + end) / 2;
    if (p.rows.row_start_f[middle] <= min(row, last)) begin = middle;
    else end = middle;
  }
  const Place at = place_of(p.rows, begin, min(row, last));
  RowFound found;
  found.encoder = static_cast<u32>((p.encoder_offset_b[at.b] + at.t * p.encoder_step) / kVector);
  found.predictor = static_cast<u32>((p.predictor_offset_b[at.b] + at.u * p.predictor_step) / kVector);
  found.node = node_of(p.rows, at);
  found.b = at.b;
  found.exists = row <= last;
  found.label = at.u + 1 < at.states ? p.labels[p.label_start_b[at.b] + at.u] : -1;
  return found;
}

// A byte of 8 columns from the sign bits of each pair: bit q column 2 q, bit 4 + q column 2 q + 1.
__device__ __forceinline__ unsigned char byte_of_signs(const u32 (&signs)[4]) {
  u32 bits = 0;
#pragma unroll
  for (int q = 0; q < 4; ++q) bits |= signs[q] >> (15 - q) & 0x00010001u << q;
  return static_cast<unsigned char>(bits | bits >> 12);
}
__device__ __forceinline__ u32 not_zero_signs(u32 pair) { return (pair & 0x7FFF7FFFu) + 0x7FFF7FFFu; }

// Builds the hidden states of every item. tell(found) is what consumers get to know of a row.
// kStore: hidden states and active bits go to memory, too, with the strip's first item.
template <bool kStore, class Tell>
__device__ __forceinline__ void build_hidden(const FusedParams& p, u32 shared, int n_items, Tell tell) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp % 4, sub = lane / 8, chunk = lane % 8;
  const int found_row = 16 * (lane / 4) + 4 * warp + lane % 4;  // of the strip: the row this lane looks up
  const int first_row = 4 * warp + sub;                         // chunk i of a slab lies in row first_row + 16 i
  const u32 to = shared + kHiddenAt + first_row * 128 + ((chunk ^ (first_row % 8)) << 4);
  const DrawPair threshold = draw_pair(p.threshold);
  auto inside = [&](int k) { return kWidth % kSlabColumns == 0 || k * kSlabColumns + chunk * kVector < kWidth; };
  const uint4 *encoder = reinterpret_cast<const uint4*>(p.encoder);
  const uint4 *predictor = reinterpret_cast<const uint4*>(p.predictor);

  for (int turn = 0; turn < n_items; ++turn) {
    const Item item = item_at(p, turn);
    const i64 last = min(item.first_row + kStripRows, p.tile.row_end) - 1;
    const RowFound found = find_row(p, item.first_row, last, item.first_row + found_row);

    KeepBits keep;
    if (kDropout) {
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        DropoutState state[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          state[i] = dropout_state(p.seed, __shfl_sync(kFullWarp, found.node, (4 * half + i) * 4 + sub), chunk);
#pragma unroll 1
        for (int k = 0; k < kSlabs; ++k) {
          u32 word = 0;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            u32 kept[4];
            kept_signs(state[i], threshold, kept);
#pragma unroll
            for (int q = 0; q < 4; ++q) word |= (kept[q] & kSigns) >> (4 * i + q);
            dropout_step(state[i]);
          }
          keep.push(word);
        }
      }
    }
    if (kStore && turn == 0) wait_for_kernels_before();  // what they write is read, and what they read written, below
    const auto told = tell(found);

    uint4 e[8], q[8];  // of the next slab, on their way
    auto load_slab = [&](int k) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const u32 from_e = __shfl_sync(kFullWarp, found.encoder, i * 4 + sub);
        const u32 from_q = __shfl_sync(kFullWarp, found.predictor, i * 4 + sub);
        if (inside(k)) {
          q[i] = load_16(predictor + from_q + k * 8 + chunk);
          e[i] = load_16(encoder + from_e + k * 8 + chunk);
        }
      }
    };
    load_slab(0);
#pragma unroll 1
    for (int k = 0; k < kSlabs; ++k) {
      if (turn > 0) barrier_wait(shared + kHiddenFreeAt + k * kBarrierBytes, (turn - 1) & 1);
      if (k == 0) *shared_at<decltype(tell(found))>(shared + kRowsAt, found_row) = told;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const u32 from_e[4] = {e[i].x, e[i].y, e[i].z, e[i].w}, from_q[4] = {q[i].x, q[i].y, q[i].z, q[i].w};
        u32 pairs[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          pairs[j] = inside(k) ? activate_pair(from_e[j], from_q[j]) : 0;
          if (kDropout) pairs[j] &= spread_signs(keep.pair(i / 4, i % 4, j));
        }
        store_shared(to + k * kSlabBytes + i * 16 * 128, make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
      }
      fence_async_proxy();
      barrier_arrive(shared + kHiddenReadyAt + k * kBarrierBytes);
      if (k + 1 < kSlabs) load_slab(k + 1);
      if (kDropout) keep.push(keep.word[0]);
    }
    if (!kStore || item.first_panel != 0) continue;

    // Out of shared memory, while the consumers are at it: storing while building would keep them waiting.
    const i64 row = item.first_row - p.tile.row_begin + first_row;
    const int n_chunks = (static_cast<int>(last - item.first_row) - first_row + 16) / 16;  // rows there are
    State* hidden = p.hidden + row * kWidth + chunk * kVector;
    unsigned char* active = p.active + row * (kWidth / kVector) + chunk;
#pragma unroll 1
    for (int k = 0; k < kSlabs; ++k, hidden += kSlabColumns, active += kSlabColumns / kVector) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (i >= n_chunks || !inside(k)) continue;
        const uint4 pairs = load_shared(to + k * kSlabBytes + i * 16 * 128);
        *reinterpret_cast<uint4*>(hidden + i * 16 * kWidth) = pairs;
        if (!kHasBits) continue;
        u32 signs[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
        for (int j = 0; j < 4; ++j)  // the halves have changed places: every word was pushed back once
          signs[j] = kActivation == Activation::relu ? not_zero_signs(signs[j]) : keep.pair(1 - i / 4, i % 4, j);
        active[i * 16 * (kWidth / kVector)] = byte_of_signs(signs);
      }
      if (kDropout && kActivation != Activation::relu) keep.push(keep.word[0]);
    }
  }
}

// ---- products -------------------------------------------------------------------------------------------------------

// The scores of a strip x panel in the registers of a warpgroup. Row 64 (i / 2) + 8 (i % 2) + row_in_half() and column
// 32 group + 8 (lane % 4) + j of the panel, both within the strip and panel, stand in at(i, group, j): the weight's
// rows are packed so that a lane's columns are neighbours, 8 at a time.
struct Scores {
  float half[2][64];

  __device__ __forceinline__ float& at(int i, int group, int j) {
    return half[i / 2][16 * group + 4 * (j / 2) + 2 * (i % 2) + j % 2];
  }
};
__device__ __forceinline__ int row_in_half() { return threadIdx.x / kWarp % 4 * 16 + threadIdx.x % kWarp / 4; }
__device__ __forceinline__ int row_in_strip(int i) { return 64 * (i / 2) + 8 * (i % 2) + row_in_half(); }

// A consumer's place in the block's run.
struct Position {
  i64 panel;      // counted over the whole run
  bool first;     // the group's first panel of the item
  bool last;      // and its last
  bool final;     // the run's last panel
  u32 parity;     // of the item
};

// scores = strip x panel + bias, in units of the keep probability. Waits for the group's turn and hands it on.
// read_rows() is called when what the builder tells of the rows can be read, in the group's first panel of an item.
template <class ReadRows>
__device__ __forceinline__ void multiply(const FusedParams& p, u32 shared, int group, int panel, const Position& at,
                                         Scores& scores, ReadRows read_rows) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int g = 0; g < 4; ++g) {
    float bias[kVector];
    load_vector<true>(p.panel_bias + panel * kPanelColumns + g * 32 + lane % 4 * kVector, kVector, 0.f, bias);
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < kVector; ++j) scores.at(i, g, j) = bias[j];
  }
  pin(scores.half[0]);
  pin(scores.half[1]);
  named_sync(kTurnBarrier + group, 2 * kGroupThreads);

  Stage stage = stage_of(at.panel * kSlabs);
  auto give_back = [&](int k, int used) {
    if (lane != 0) return;
    barrier_arrive(shared + kWeightFreeAt + used * kBarrierBytes);
    if (at.last) barrier_arrive(shared + kHiddenFreeAt + k * kBarrierBytes);
  };
  int used = 0;
#pragma unroll
  for (int k = 0; k < kSlabs; ++k) {
    if (at.first) {
      barrier_wait(shared + kHiddenReadyAt + k * kBarrierBytes, at.parity);
      if (k == 0) read_rows();
    }
    barrier_wait(shared + kWeightReadyAt + stage.index * kBarrierBytes, stage.parity);
    const u64 a = matrix_descriptor(shared + kHiddenAt + k * kSlabBytes);
    const u64 b = matrix_descriptor(shared + kWeightAt + stage.index * kSlabBytes);
    products_begin();
#pragma unroll
    for (int step = 0; step < kSlabColumns / 16; ++step) {
      multiply_add(scores.half[0], a + 2 * step, b + 2 * step);
      multiply_add(scores.half[1], a + 512 + 2 * step, b + 2 * step);
    }
    products_commit();
    products_wait<1>();
    if (k > 0) give_back(k - 1, used);
    used = stage.index;
    advance(stage);
  }
  if (!at.final) named_arrive(kTurnBarrier + (group ^ 1), 2 * kGroupThreads);
  products_wait<0>();
  pin(scores.half[0]);
  pin(scores.half[1]);
  give_back(kSlabs - 1, used);
}

// ---- roles ----------------------------------------------------------------------------------------------------------

// build(shared, n_items) and consume(shared, n_items, group) are the kernels' own.
template <class Build, class Consume>
__device__ __forceinline__ void run_roles(const FusedParams& p, Build build, Consume consume) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 shared = shared_address(memory);
  const int role = __shfl_sync(kFullWarp, threadIdx.x / kGroupThreads, 0);  // known uniform
  const int n_items = count_items(p);
  if (threadIdx.x == 0) {
    for (int k = 0; k < kSlabs; ++k) {
      barrier_init(shared + kHiddenReadyAt + k * kBarrierBytes, kGroupThreads);
      barrier_init(shared + kHiddenFreeAt + k * kBarrierBytes, kPanels > 1 ? 8 : 4);
    }
    for (int s = 0; s < kStages; ++s) {
      barrier_init(shared + kWeightReadyAt + s * kBarrierBytes, 1);
      barrier_init(shared + kWeightFreeAt + s * kBarrierBytes, 4);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (role == 0) {
    give_registers<kStreamRegisters>();
    if (threadIdx.x == 0) stream_weight(p, shared, n_items);
  } else if (role == 1) {
    give_registers<kBuildRegisters>();
    build(shared, n_items);
  } else {
    take_registers<kConsumeRegisters>();
    if (role == 3 && n_items > 0) named_arrive(kTurnBarrier, 2 * kGroupThreads);  // the first turn is group 0's
    consume(shared, n_items, role - 2);
  }
}
