// What       joint network of a tile
//              joint_forward    h[t, u] = mask f(e[t] + p[u]), without the factor 1 / keep, which the products have;
//                               and the active bits
//              joint_backward   de[t] = sum over u of dh[t, u] mask f'(e[t] + p[u]), times the scale of the upstream
//                               gradients; dp[u] = its sum over t, likewise
// Grid       joint_forward: 4 rows a warp, 8 lanes a row; a lane has columns 64 k + 8 j ... + 8, so that it draws its
//            dropout state once
//            joint_backward: blockDim.y warps a sum and blockDim.z sums a block, 4 warps in all; gridDim.y blocks share
//            its slices of 128 columns, a slice a half warp. An utterance's frames and states are neighbours and a
//            slice of them all comes before the next, so that the second to read a row finds it in the L2 cache
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
constexpr int kSlice = kSumLanes * kVector;                      // columns of a half warp that sums
constexpr int kSlices = (kWidth + kSlice - 1) / kSlice;
constexpr int kSumWarps = 4;                                     // of a block that sums
constexpr int kSumBlocks = sizeof(Acc) > 4 ? 3 : kSmooth ? 5 : 6;  // of a multiprocessor, at its registers
constexpr int kPieceWords = kVector * (kWide || sizeof(Work) > 4 ? int(sizeof(Work)) : 4) / 4;  // registers of 8 columns
constexpr int kInFlight = (kSmooth ? 16 : 32) / kPieceWords;  // rows whose loads are on their way, a lane
constexpr int kFew = kInFlight > 2 ? 2 : kInFlight;           // likewise, where a half warp finds no more
static_assert(kSlice == kSumWarps * kWarp, "threads of a block that sums");

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
  load_vector<kWide>(p.hidden + column + term.in_tile * kWidth, n_left, narrow<Work>(Acc(0)), piece.grad);
  if (kSmooth) load_vector<kWide>(term.states + column, n_left, narrow<State>(Acc(0)), piece.states);
  if (kMasked) piece.active = (p.active + column / kVector)[term.in_tile * kBytes];
}

__device__ __forceinline__ void add_piece(Piece& piece, const Acc (&shared)[kVector], Acc (&sum)[kVector]) {
#pragma unroll
  for (int i = 0; i < kVector * int(sizeof(Work)) / 4; ++i) hold_back(reinterpret_cast<u32*>(piece.grad)[i]);
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    Acc grad = widen<Acc>(piece.grad[i]);
    if (kSmooth) grad *= derivative(shared[i] + widen<Acc>(piece.states[i]));
    if (!kMasked || piece.active >> (i / 2 + i % 2 * 4) & 1) sum[i] += grad;
  }
}

// Adds n rows in order. term() is the next, shared the states common to all. All loads go before the first use: a
// branch keeps them there, and zeros where there is no row free their registers in between.
template <int n, class NextTerm>
__device__ __forceinline__ void add_terms(const JointParams& p, int column, const Acc (&shared)[kVector], NextTerm term,
                                          Acc (&sum)[kVector]) {
  Piece pieces[n] = {};
  bool exists[n];
#pragma unroll
  for (int r = 0; r < n; ++r) {
    const Term next = term();
    exists[r] = next.exists && column < kWidth;
    if (exists[r]) load_piece(p, next, column, pieces[r]);
  }
  __syncwarp();
  if (!exists[0]) return;  // then there is none
#pragma unroll
  for (int r = 0; r < n; ++r)
    if (kMasked && !kSmooth || exists[r]) add_piece(pieces[r], shared, sum);  // of no row, no bit is active
}

// Adds the parts of the block's other warps, for the first one.
__device__ __forceinline__ void join_warps(Acc (&sum)[kVector]) {
  __shared__ Acc parts[kSumWarps][kVector][kWarp];
#pragma unroll
  for (int i = 0; i < kVector; ++i) parts[threadIdx.y][i][threadIdx.x] = sum[i];
  __syncthreads();
  for (int w = 1; threadIdx.y == 0 && w < blockDim.y; ++w)
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum[i] += parts[w][i][threadIdx.x];
  __syncthreads();
}

// Sums in order: of each utterance its frames in the tile, then all its states, as far as they are wanted; the last
// goes first, as what wrote the rows left the last of them in the L2 cache. The rows of a frame are known, those of a
// state are looked for in the utterance's frames, 16 at once a half warp: with narrow bands most frames have none.
extern "C" __global__ void __launch_bounds__(kSlice, kSumBlocks) joint_backward(const __grid_constant__ JointParams p) {
  let_next_begin();
  const int lane = threadIdx.x, half = lane & kSumLanes, in_half = lane % kSumLanes;
  const int streams = 2 * blockDim.y, stream = 2 * threadIdx.y + lane / kSumLanes;  // half warps of a sum
  const Rows& rows = p.rows;
  const Tile& tile = p.tile;
  const auto frame_start = [&](i64 b) { return min(max(rows.frame_start_b[b], tile.frame_begin), tile.frame_end); };
  const auto sum_start = [&](i64 b) {
    return (p.grad_encoder ? frame_start(b) : 0) + (p.grad_predictor ? rows.state_start_b[b] : 0);
  };
  const i64 first_b = rows.utterance_f[tile.frame_begin], end_b = rows.utterance_f[tile.frame_end - 1] + 1;
  const i64 number = sum_start(end_b) - 1 - (static_cast<i64>(blockIdx.x) * blockDim.z + threadIdx.z);
  if (number < sum_start(first_b)) return;
  const int b = static_cast<int>(find_start(sum_start, number, first_b, end_b));
  const i64 first_frame = rows.frame_start_b[b], frame_begin = frame_start(b), frame_end = frame_start(b + 1);
  const i64 in_utterance = number - sum_start(b), n_frames = p.grad_encoder ? frame_end - frame_begin : 0;
  const i64 frame = frame_begin + in_utterance;
  u32 of_frame = in_utterance < n_frames;
  u32 own = static_cast<u32>(of_frame ? frame - first_frame : in_utterance - n_frames);  // t or u
  const i64 sum_begin = rows.row_start_f[of_frame ? frame : first_frame];
  const i64 sum_end = rows.row_start_f[of_frame ? frame + 1 : rows.frame_start_b[b + 1]];
  const bool begins = sum_begin >= tile.row_begin, ends = sum_end <= tile.row_end;
  const int turn = begins && ends ? 0 : static_cast<int>(tile.row_begin / p.tile_rows % 2);  // of the carry to read
  // its terms: the n rows from `begin` on, or of the n frames from `begin` on those that have one
  const i64 begin = of_frame ? max(sum_begin, tile.row_begin) : frame_begin;
  const int n = static_cast<int>((of_frame ? min(sum_end, tile.row_end) : frame_end) - begin);
  const int other = static_cast<int>(of_frame ? rows.lo_f[frame] + begin - sum_begin : begin - first_frame);  // u or t
  if (n <= 0) return;
  const auto row_at = [&](int k) {  // of the k-th term, in the tile; or -1
    if (k >= n) return -1;
    if (of_frame) return static_cast<int>(begin - tile.row_begin) + k;
    const i64 first = rows.row_start_f[begin + k], row = first + own - rows.lo_f[begin + k];
    const i64 row_begin = max(first, tile.row_begin), row_end = min(rows.row_start_f[begin + k + 1], tile.row_end);
    return row >= row_begin && row < row_end ? static_cast<int>(row - tile.row_begin) : -1;
  };

  for (int slice = blockIdx.y; slice < kSlices; slice += gridDim.y) {
    const int column = slice * kSlice + in_half * kVector, n_left = kWidth - column;
    Acc shared[kVector] = {}, sum[kVector] = {};
    if (kSmooth && n_left > 0) {
      const State* states = of_frame ? encoder_row(p, b, own) : predictor_row(p, b, own);
      load_vector<kWide>(states + column, n_left, Acc(0), shared);
    }
    for (int base = 0; base < n; base += streams * kSumLanes) {
      const int found = row_at(base + in_half * streams + stream);
      const u32 hits = __ballot_sync(kFullWarp, found >= 0);
      u32 left = hits & 0xffffu << half;  // lanes of this half with a row to add
      const auto next = [&] {
        const int source = __ffs(left) - 1;
        const int in_tile = __shfl_sync(kFullWarp, found, source & (kWarp - 1));
        left &= left - 1;
        const int k = other + base + (source - half) * streams + stream;
        const State* states = nullptr;
        if (kSmooth && source >= 0) states = of_frame ? predictor_row(p, b, k) : encoder_row(p, b, k);
        return Term{source >= 0, in_tile, states};
      };
      int most = max(__popc(hits & 0xffffu), __popc(hits >> kSumLanes));
      for (; most > kFew; most -= kInFlight) add_terms<kInFlight>(p, column, shared, next, sum);
      if (most > 0) add_terms<kFew>(p, column, shared, next, sum);
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum[i] += __shfl_xor_sync(kFullWarp, sum[i], kSumLanes);
    if (blockDim.y > 1) join_warps(sum);
    hold_back(of_frame), hold_back(own);
    if (threadIdx.y || half || n_left <= 0) continue;
    Acc* carry = of_frame ? p.encoder_carry : p.predictor_carry + static_cast<i64>(own) * kWidth;
    const i64 carry_size = of_frame ? kWidth : p.predictor_carry_size;
    if (!begins) {
      Acc before[kVector];
      load_vector<kWide>(carry + turn * carry_size + column, n_left, Acc(0), before);
#pragma unroll
      for (int i = 0; i < kVector; ++i) sum[i] += before[i];
    }
    if (ends) {
      State* grad = of_frame ? p.grad_encoder : p.grad_predictor;
      const i64 row = (of_frame ? p.encoder_grad_row_b : p.predictor_grad_row_b)[b] + own;
      const Acc scale = *p.grad_scale;
#pragma unroll
      for (int i = 0; i < kVector; ++i) sum[i] *= scale;
      store_vector<kWide>(grad + row * kWidth + column, n_left, sum);
    } else {
      store_vector<kWide>(carry + (1 - turn) * carry_size + column, n_left, sum);
    }
  }
}
