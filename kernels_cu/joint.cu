// What       joint network of a tile
//              joint_forward        h[t, u] = mask f(e[t] + p[u]), without the factor 1 / keep, which the products
//                                   have; and the active bits
//              encoder_gradient     de[t] = sum over u of dh[t, u] mask f'(e[t] + p[u]), times the scale of the
//                                   upstream gradients
//              predictor_gradient   dp[u] = its sum over t, likewise
// Grid       joint_forward: 4 rows a warp, 8 lanes a row; a lane has columns 64 k + 8 j ... + 8, so that it draws its
//            dropout state once
//            encoder_gradient: a frame x 128 columns a warp, neighbouring columns first; every other row a half warp
//            predictor_gradient: a state x 128 columns a block; every eighth frame a half warp
// Reads      encoder [.., H], predictor [.., H] STATE; hidden [R, H] WORK, in backward the gradient dh; active
// Writes     hidden; active [R, ceil(H / 8)], a byte for 8 columns: bit q for column 2 q, bit 4 + q for 2 q + 1,
//            0 beyond H. It says h != 0 for ReLU, else that dropout keeps the unit. Without dropout and ReLU there is
//            no such buffer. Gradients [.., H] STATE, contiguous. One thread owns each sum and adds in a fixed order:
//            no atomics, the same bits every run
// Order      a sum that the tile's end cuts (of one frame, and of one utterance's states) goes on in the next tile:
//            its part so far stands in a carry buffer, which tiles write and read in turns, two to a buffer
// Numbers    forward of two-byte types with ReLU or identity in that type, one rounding of the sum; else in
//            ACCUMULATOR, as all sums, with one rounding to WORK or to a gradient. What is not active adds 0,
//            whatever dh holds there
// Constants  WIDTH (H);  ACTIVATION (see Activation);  DROPOUT 0 or 1;  WIDE 1 if all rows are 16-byte aligned and
//            H % 8 == 0
#include "common.cuh"
#include "dropout.cuh"
#include "ptx.cuh"
#include "rows.cuh"

typedef STATE State;
typedef WORK Work;
typedef ACCUMULATOR Acc;
constexpr bool kWide = WIDE;

enum class Activation { relu, tanh, sigmoid, gelu, silu, identity };
constexpr Activation kActivation = Activation::ACTIVATION;
constexpr bool kRelu = kActivation == Activation::relu;
constexpr bool kSmooth = !kRelu && kActivation != Activation::identity;  // the slope depends on e + p
constexpr bool kMasked = DROPOUT || kRelu;                               // there are active bits
constexpr bool kPaired = sizeof(Work) == 2 && !kSmooth;                  // forward works on two columns at once
constexpr int kRowsPerWarp = kWarp / kDropoutLanes;  // of joint_forward
constexpr int kWidth = WIDTH;
constexpr int kBytes = (kWidth + kVector - 1) / kVector;         // of active, a row
constexpr int kSumLanes = kWarp / 2;                             // of a row in sums
constexpr int kSlice = kSumLanes * kVector;                      // columns of a warp or block that sums
constexpr int kSlices = (kWidth + kSlice - 1) / kSlice;
constexpr int kSumWarps = 4;                                     // of a block of predictor_gradient
constexpr int kStreams = 2 * kSumWarps;                          // its half warps
constexpr int kPieceWords = kVector * (kWide || sizeof(Work) > 4 ? int(sizeof(Work)) : 4) / 4;  // registers of 8 columns
constexpr int kInFlight = (kSmooth ? 16 : 32) / kPieceWords;  // rows whose loads are on their way, a lane
static_assert(kSlice == kSumWarps * kWarp, "a thread finishes one column");

struct JointParams {
  Rows rows;
  Tile tile;
  const State* encoder;       // row of (b, t): encoder_offset_b[b] + t encoder_step, in elements
  const State* predictor;     // row of (b, u): predictor_offset_b[b] + u predictor_step
  const i64* encoder_offset_b;
  const i64* predictor_offset_b;
  i64 encoder_step, predictor_step;
  Work* hidden;               // [R, H]
  unsigned char* active;      // [R, ceil(H / 8)], or null
  State* grad_encoder;        // row of (b, t): encoder_grad_row_b[b] + t
  State* grad_predictor;      // likewise by (b, u)
  const i64* encoder_grad_row_b;
  const i64* predictor_grad_row_b;
  Acc* encoder_carry;         // [2, H]
  Acc* predictor_carry;       // [2, longest U1, H]
  const Acc* grad_scale;      // of the upstream gradients
  i64 tile_rows;              // R
  i64 predictor_carry_size;   // longest U1 x H
  u64 seed;
  u32 threshold;              // draws below it drop
};

__device__ __forceinline__ Acc logistic(Acc x) { return Acc(1) / (Acc(1) + exp(-x)); }

__device__ __forceinline__ Acc activate(Acc x) {
  switch (kActivation) {
    case Activation::relu: return x < Acc(0) ? Acc(0) : x;  // NaN stays NaN
    case Activation::tanh: return tanh(x);
    case Activation::sigmoid: return logistic(x);
    case Activation::gelu: return x * normcdf(x);
    case Activation::silu: return x * logistic(x);
    default: return x;
  }
}

__device__ __forceinline__ Acc derivative(Acc x) {  // of the smooth ones
  switch (kActivation) {
    case Activation::tanh: { const Acc y = tanh(x); return Acc(1) - y * y; }
    case Activation::sigmoid: { const Acc y = logistic(x); return y * (Acc(1) - y); }
    case Activation::gelu: return normcdf(x) + x * exp(Acc(-0.5) * x * x) * Acc(0.3989422804014327);
    case Activation::silu: { const Acc y = logistic(x); return y * (Acc(1) + x * (Acc(1) - y)); }
    default: return Acc(1);
  }
}

__device__ __forceinline__ const State* encoder_row(const JointParams& p, int b, int t) {
  return p.encoder + p.encoder_offset_b[b] + t * p.encoder_step;
}
__device__ __forceinline__ const State* predictor_row(const JointParams& p, int b, int u) {
  return p.predictor + p.predictor_offset_b[b] + u * p.predictor_step;
}

// Bits of a byte of active for columns < n_left.
__device__ __forceinline__ u32 bits_within(int n_left) {
  return n_left >= kVector ? 0xffu : ((1u << (n_left + 1) / 2) - 1) | ((1u << n_left / 2) - 1) << 4;
}

// Hidden units of 8 columns, of which the signs of `kept` say what dropout leaves; their active bits.
template <bool paired>
__device__ __forceinline__ u32 make_hidden(const State* e, const State* q, int n_left, const u32 (&kept)[4], Work* h) {
  u32 active = 0;  // bit i for column 2 i, bit 16 + i for column 2 i + 1
  if constexpr (paired) {
    alignas(16) State x[kVector], y[kVector];
    load_vector<kWide>(e, n_left, narrow<State>(Acc(0)), x);
    load_vector<kWide>(q, n_left, narrow<State>(Acc(0)), y);
    u32 *word = reinterpret_cast<u32*>(x), *other = reinterpret_cast<u32*>(y);
#pragma unroll
    for (int i = 0; i < kVector / 2; ++i) {
      word[i] = add_pairs<State>(word[i], other[i]);
      if (kRelu) word[i] = positive_pair<State>(word[i]);
      if (DROPOUT) word[i] &= spread_signs(kept[i]);
      const u32 counts = kRelu ? word[i] + ~kSigns : kept[i];  // not negative: its sign is set unless it is 0
      active |= (counts & kSigns) >> (15 - i);
    }
    store_vector<kWide>(h, n_left, x);
  } else {
    Acc x[kVector], y[kVector];
    load_vector<kWide>(e, n_left, Acc(0), x);
    load_vector<kWide>(q, n_left, Acc(0), y);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const bool keeps = !DROPOUT || kept[i / 2] >> (15 + i % 2 * 16) & 1;
      x[i] = keeps ? activate(x[i] + y[i]) : Acc(0);
      if (kRelu ? x[i] != Acc(0) : keeps) active |= 1u << (i / 2 + i % 2 * 16);
    }
    store_vector<kWide>(h, n_left, x);
  }
  active = (active | active >> 12) & 0xffu;
  return kWide ? active : active & bits_within(n_left);
}

extern "C" __global__ void __launch_bounds__(256) joint_forward(const __grid_constant__ JointParams p) {
  const int lane = threadIdx.x % kWarp, j = lane % kDropoutLanes;
  const i64 warp = static_cast<i64>(blockIdx.x) * (blockDim.x / kWarp) + threadIdx.x / kWarp;
  const i64 first = p.tile.row_begin + warp * kRowsPerWarp, row = first + lane / kDropoutLanes;
  if (first >= p.tile.row_end) return;  // the whole warp
  i64 frame = find_frame(p.rows, first, p.tile.frame_begin, p.tile.frame_end);
  if (row >= p.tile.row_end) return;
  while (p.rows.row_start_f[frame + 1] <= row) ++frame;
  const Place at = place_of(p.rows, frame, row);
  const State *e = encoder_row(p, at.b, at.t), *q = predictor_row(p, at.b, at.u);
  Work* h = p.hidden + (row - p.tile.row_begin) * kWidth;
  unsigned char* active = p.active + (row - p.tile.row_begin) * kBytes;
  DropoutState state;
  if (DROPOUT) state = dropout_state(p.seed, node_of(p.rows, at), j);
  const DrawPair threshold = draw_pair(p.threshold);
#pragma unroll(8 / sizeof(Work))
  for (int column = j * kVector; column < kWidth; column += kDropoutBlock) {
    u32 kept[4] = {};
    if (DROPOUT) {
      kept_signs(state, threshold, kept);
      dropout_step(state);
    }
    const u32 bits = make_hidden<kPaired>(e + column, q + column, kWidth - column, kept, h + column);
    if (kMasked) active[column / kVector] = static_cast<unsigned char>(bits);
  }
}

// ---- sums ----------------------------------------------------------------------------------------------------------
// One row of a sum: its row of the tile, and the states that it does not share with the sum's other rows.
struct Term {
  bool exists;
  i64 in_tile;
  const State* states;
};

// 8 columns of it as loaded.
struct Piece {
  alignas(16) Work grad[kVector];
  alignas(16) State states[kVector];
  u32 active;
};

__device__ __forceinline__ void load_piece(const JointParams& p, const Term& term, int column, Piece& piece) {
  const int n_left = kWidth - column;
  load_vector<kWide>(p.hidden + term.in_tile * kWidth + column, n_left, narrow<Work>(Acc(0)), piece.grad);
  if (kSmooth) load_vector<kWide>(term.states + column, n_left, narrow<State>(Acc(0)), piece.states);
  if (kMasked) piece.active = p.active[term.in_tile * kBytes + column / kVector];
}

__device__ __forceinline__ void add_piece(Piece& piece, const Acc (&shared)[kVector], Acc (&sum)[kVector]) {
#pragma unroll
  for (int i = 0; i < kVector * int(sizeof(Work)) / 4; ++i) keep_packed(reinterpret_cast<u32*>(piece.grad)[i]);
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    Acc grad = widen<Acc>(piece.grad[i]);
    if (kSmooth) grad *= derivative(shared[i] + widen<Acc>(piece.states[i]));
    if (!kMasked || piece.active >> (i / 2 + i % 2 * 4) & 1) sum[i] += grad;
  }
}

// Adds kInFlight rows in order, all loads before the first use. term(r) is the r-th, shared the states common to all.
template <class TermOf>
__device__ __forceinline__ void add_terms(const JointParams& p, int column, const Acc (&shared)[kVector], TermOf term,
                                          Acc (&sum)[kVector]) {
  Piece pieces[kInFlight];
  bool exists[kInFlight];
#pragma unroll
  for (int r = 0; r < kInFlight; ++r) {
    const Term next = term(r);
    exists[r] = next.exists && column < kWidth;
    if (exists[r]) load_piece(p, next, column, pieces[r]);
  }
#pragma unroll
  for (int r = 0; r < kInFlight; ++r)
    if (exists[r]) add_piece(pieces[r], shared, sum);
}

// Adds the sum of the warp's other half: all rows of the warp.
__device__ __forceinline__ void join_halves(Acc (&sum)[kVector]) {
#pragma unroll
  for (int i = 0; i < kVector; ++i) sum[i] += __shfl_xor_sync(kFullWarp, sum[i], kSumLanes);
}

// Where the sum of rows [sum_begin, sum_end) stands, of which the tile has a part.
struct Progress {
  bool begins, ends;
  int turn;  // 0 or 1: which carry buffer this tile reads; it writes the other
};

__device__ __forceinline__ Progress progress_of(const JointParams& p, i64 sum_begin, i64 sum_end) {
  const int turn = static_cast<int>(p.tile.row_begin / p.tile_rows % 2);
  return {sum_begin >= p.tile.row_begin, sum_end <= p.tile.row_end, turn};
}

extern "C" __global__ void __launch_bounds__(256) encoder_gradient(const __grid_constant__ JointParams p) {
  const int lane = threadIdx.x % kWarp;
  const i64 warp = static_cast<i64>(blockIdx.x) * (blockDim.x / kWarp) + threadIdx.x / kWarp;
  const i64 frame = p.tile.frame_begin + warp / kSlices;
  const int column = static_cast<int>(warp % kSlices) * kSlice + lane % kSumLanes * kVector, n_left = kWidth - column;
  if (frame >= p.tile.frame_end) return;
  const i64 sum_begin = p.rows.row_start_f[frame], sum_end = p.rows.row_start_f[frame + 1];
  const i64 begin = max(sum_begin, p.tile.row_begin), end = min(sum_end, p.tile.row_end);
  if (begin >= end) return;
  const Place at = place_of(p.rows, frame, begin);
  Acc e[kVector] = {}, sum[kVector] = {};
  if (kSmooth && n_left > 0) load_vector<kWide>(encoder_row(p, at.b, at.t) + column, n_left, Acc(0), e);
  for (i64 row = begin + lane / kSumLanes; row < end; row += 2 * kInFlight)
    add_terms(p, column, e, [&](int r) {
      const i64 at_row = row + 2 * r;
      const State* q = kSmooth ? predictor_row(p, at.b, at.u + static_cast<int>(at_row - begin)) : nullptr;
      return Term{at_row < end, at_row - p.tile.row_begin, q};
    }, sum);
  join_halves(sum);
  if (lane >= kSumLanes || n_left <= 0) return;
  const Progress progress = progress_of(p, sum_begin, sum_end);
  if (!progress.begins) {
    Acc before[kVector];
    load_vector<kWide>(p.encoder_carry + progress.turn * kWidth + column, n_left, Acc(0), before);
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum[i] += before[i];
  }
  if (progress.ends) {
    const Acc scale = *p.grad_scale;
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum[i] *= scale;
    store_vector<kWide>(p.grad_encoder + (p.encoder_grad_row_b[at.b] + at.t) * kWidth + column, n_left, sum);
  } else {
    store_vector<kWide>(p.encoder_carry + (1 - progress.turn) * kWidth + column, n_left, sum);
  }
}

// blockIdx.x counts the states of the tile's utterances, from the first state of the first one. A half warp finds the
// rows of its state among 16 frames at once: with narrow bands most frames have none.
extern "C" __global__ void __launch_bounds__(kSlice) predictor_gradient(const __grid_constant__ JointParams p) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int half = lane & kSumLanes, in_half = lane % kSumLanes, stream = threadIdx.x / kSumLanes;
  const i64 first_b = p.rows.utterance_f[p.tile.frame_begin], last_b = p.rows.utterance_f[p.tile.frame_end - 1];
  const i64 state = p.rows.state_start_b[first_b] + blockIdx.x;
  const int b = static_cast<int>(find_start(p.rows.state_start_b, state, first_b, last_b + 1));
  const int u = static_cast<int>(state - p.rows.state_start_b[b]);
  const int column = blockIdx.y * kSlice + in_half * kVector, n_left = kWidth - column;
  const i64 first_frame = p.rows.frame_start_b[b], last_frame = p.rows.frame_start_b[b + 1];
  const i64 begin = max(first_frame, p.tile.frame_begin), end = min(last_frame, p.tile.frame_end);
  Acc q[kVector] = {}, sum[kVector] = {};
  if (kSmooth && n_left > 0) load_vector<kWide>(predictor_row(p, b, u) + column, n_left, Acc(0), q);
  for (i64 base = begin; base < end; base += kStreams * kSumLanes) {
    const i64 frame = base + in_half * kStreams + stream;
    int found = -1;  // the row of (frame, u) in the tile
    if (frame < end) {
      const i64 first = p.rows.row_start_f[frame], row = first + u - p.rows.lo_f[frame];
      const i64 row_begin = max(first, p.tile.row_begin), row_end = min(p.rows.row_start_f[frame + 1], p.tile.row_end);
      if (row >= row_begin && row < row_end) found = static_cast<int>(row - p.tile.row_begin);
    }
    const u32 hits = __ballot_sync(kFullWarp, found >= 0);
    u32 left = hits >> half & 0xffffu;  // lanes of this half with a row to add
    for (int n = max(__popc(hits & 0xffffu), __popc(hits >> kSumLanes)); n > 0; n -= kInFlight)
      add_terms(p, column, q, [&](int) {
        const int source = __ffs(left) - 1;
        const int in_tile = __shfl_sync(kFullWarp, found, half | (source & (kSumLanes - 1)));
        left &= left - 1;
        const int t = static_cast<int>(base - first_frame) + source * kStreams + stream;
        return Term{source >= 0, in_tile, kSmooth && source >= 0 ? encoder_row(p, b, t) : nullptr};
      }, sum);
  }
  join_halves(sum);
  __shared__ Acc parts[kSumWarps][kSlice];
  if (half == 0) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) parts[warp][in_half * kVector + i] = sum[i];
  }
  __syncthreads();
  const int own = blockIdx.y * kSlice + threadIdx.x;
  if (own >= kWidth) return;
  const Progress progress = progress_of(p, p.rows.row_start_f[first_frame], p.rows.row_start_f[last_frame]);
  Acc* carry = p.predictor_carry + static_cast<i64>(u) * kWidth + own;
  Acc total = progress.begins ? Acc(0) : carry[progress.turn * p.predictor_carry_size];
#pragma unroll
  for (int w = 0; w < kSumWarps; ++w) total += parts[w][threadIdx.x];
  if (progress.ends)
    p.grad_predictor[(p.predictor_grad_row_b[b] + u) * kWidth + own] = narrow<State>(total * *p.grad_scale);
  else
    carry[(1 - progress.turn) * p.predictor_carry_size] = total;
}
