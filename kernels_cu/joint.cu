// What       joint network of a tile
//              joint_forward    h[t, u] = mask f(e[t] + p[u]) / keep
//              joint_backward       dh[t, u] becomes dh[t, u] mask / keep f'(e[t] + p[u]), in place, and
//                                   de[t] = its sum over u, times the scale of the upstream gradients
//              predictor_gradient   dp[u] = its sum over t, likewise
// Grid       joint_forward: 4 rows a warp, 8 lanes a row; a lane has columns 64 k + 8 j ... + 8, so that it draws its
//            dropout state once
//            joint_backward: a frame a block, rows strided over its 8 warps, 256 columns a warp at once
//            predictor_gradient: a state x 32 column vectors a block
// Reads      encoder [.., H], predictor [.., H] STATE; hidden [R, H] WORK
// Writes     hidden; gradients [.., H] STATE, contiguous. One thread owns each sum and adds in a fixed order: no
//            atomics, the same bits every run
// Order      a sum that the tile's end cuts (of one frame, and of one utterance's states) goes on in the next tile:
//            its part so far stands in a carry buffer, which tiles write and read in turns, two to a buffer
// Numbers    arithmetic in ACCUMULATOR, one rounding to WORK or to a gradient
// Constants  WIDTH (H);  ACTIVATION (see Activation);  DROPOUT 0 or 1;  WIDE 1 if all rows are 16-byte aligned and
//            H % 8 == 0
#include "common.cuh"
#include "dropout.cuh"
#include "rows.cuh"

typedef STATE State;
typedef WORK Work;
typedef ACCUMULATOR Acc;
constexpr bool kWide = WIDE;

enum class Activation { relu, tanh, sigmoid, gelu, silu, identity };
constexpr Activation kActivation = Activation::ACTIVATION;
constexpr int kRowsPerWarp = kWarp / kDropoutLanes;  // of joint_forward
constexpr int kGroups = 8;                                         // warps of a block, and thread rows of sums
constexpr int kWidth = WIDTH;
constexpr int kStride = kWarp * kVector;                           // columns of a warp at once
constexpr int kSteps = (kWidth + kStride - 1) / kStride;

struct JointParams {
  Rows rows;
  Tile tile;
  const State* encoder;       // row of (b, t): encoder_offset_b[b] + t encoder_step, in elements
  const State* predictor;     // row of (b, u): predictor_offset_b[b] + u predictor_step
  const i64* encoder_offset_b;
  const i64* predictor_offset_b;
  i64 encoder_step, predictor_step;
  Work* hidden;               // [R, H]
  State* grad_encoder;        // row of (b, t): encoder_grad_row_b[b] + t; or null
  State* grad_predictor;      // likewise by (b, u)
  const i64* encoder_grad_row_b;
  const i64* predictor_grad_row_b;
  Acc* encoder_carry;         // [2, H]
  Acc* predictor_carry;       // [2, longest U1, H]
  const Acc* grad_scale;      // of the upstream gradients
  i64 tile_rows;              // R
  i64 predictor_carry_size;   // longest U1 x H
  u64 seed;
  Acc scale;                  // 1 / keep probability
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

__device__ __forceinline__ Acc derivative(Acc x) {
  switch (kActivation) {
    case Activation::relu: return x > Acc(0) ? Acc(1) : Acc(0);
    case Activation::tanh: { const Acc y = tanh(x); return Acc(1) - y * y; }
    case Activation::sigmoid: { const Acc y = logistic(x); return y * (Acc(1) - y); }
    case Activation::gelu: return normcdf(x) + x * exp(Acc(-0.5) * x * x) * Acc(0.3989422804014327);
    case Activation::silu: { const Acc y = logistic(x); return y * (Acc(1) + x * (Acc(1) - y)); }
    default: return Acc(1);
  }
}

// e[t] + p[u] for 8 columns.
__device__ __forceinline__ void load_sum(const State* e, const State* q, int column, Acc (&x)[kVector]) {
  Acc y[kVector];
  load_vector<kWide>(e + column, kWidth - column, Acc(0), x);
  load_vector<kWide>(q + column, kWidth - column, Acc(0), y);
#pragma unroll
  for (int i = 0; i < kVector; ++i) x[i] += y[i];
}

__device__ __forceinline__ const State* encoder_row(const JointParams& p, const Place& at) {
  return p.encoder + p.encoder_offset_b[at.b] + at.t * p.encoder_step;
}
__device__ __forceinline__ const State* predictor_row(const JointParams& p, int b, int u) {
  return p.predictor + p.predictor_offset_b[b] + u * p.predictor_step;
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
  const State *e = encoder_row(p, at), *q = predictor_row(p, at.b, at.u);
  Work* h = p.hidden + (row - p.tile.row_begin) * kWidth;
  DropoutState state;
  if (DROPOUT) state = dropout_state(p.seed, node_of(p.rows, at), j);
#pragma unroll 4
  for (int column = j * kVector; column < kWidth; column += kDropoutBlock) {
    Acc x[kVector];
    load_sum(e, q, column, x);
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] = activate(x[i]);
    if (DROPOUT) {
      dropout_apply(state, p.threshold, p.scale, x);
      dropout_step(state);
    }
    store_vector<kWide>(h + column, kWidth - column, x);
  }
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

// Adds the groups' partial sums in order of the groups, one column a thread, over kStride columns; then on to the
// gradient, or to the carry.
__device__ __forceinline__ void finish_sum(const JointParams& p, const Progress& progress, int group, int lane,
                                           const Acc (&part)[kVector], State* grad, Acc* carry, i64 carry_size,
                                           int n_left) {
  __shared__ Acc parts[kGroups][kStride];
  __syncthreads();  // the last call's readers are done
#pragma unroll
  for (int i = 0; i < kVector; ++i) parts[group][lane * kVector + i] = part[i];
  __syncthreads();
  const int column = group * kWarp + lane;
  if (column >= n_left) return;
  Acc total = progress.begins ? Acc(0) : carry[progress.turn * carry_size + column];
#pragma unroll
  for (int g = 0; g < kGroups; ++g) total += parts[g][column];
  if (progress.ends)
    grad[column] = narrow<State>(total * *p.grad_scale);
  else
    carry[(1 - progress.turn) * carry_size + column] = total;
}

extern "C" __global__ void __launch_bounds__(256) joint_backward(const __grid_constant__ JointParams p) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const i64 frame = p.tile.frame_begin + blockIdx.x;
  const i64 begin = max(p.rows.row_start_f[frame], p.tile.row_begin);
  const i64 end = min(p.rows.row_start_f[frame + 1], p.tile.row_end);
  if (begin >= end) return;
  Place at = place_of(p.rows, frame, begin);
  const int first_u = at.u;
  const State* e = encoder_row(p, at);
  Acc sum[kSteps][kVector] = {};
  for (i64 row = begin + warp; row < end; row += kGroups) {
    at.u = first_u + static_cast<int>(row - begin);
    const State* q = predictor_row(p, at.b, at.u);
    Work* h = p.hidden + (row - p.tile.row_begin) * kWidth;
    DropoutState state;
    if (DROPOUT) {
      state = dropout_state(p.seed, node_of(p.rows, at), lane % kDropoutLanes);
      for (int k = 0; k < lane / kDropoutLanes; ++k) dropout_step(state);
    }
    Acc grad[kSteps][kVector];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {  // all loads before the first store
      const int column = s * kStride + lane * kVector;
      if (column < kWidth) load_vector<kWide>(h + column, kWidth - column, Acc(0), grad[s]);
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int column = s * kStride + lane * kVector;
      if (column < kWidth) {
        Acc x[kVector];
        load_sum(e, q, column, x);
#pragma unroll
        for (int i = 0; i < kVector; ++i) grad[s][i] *= derivative(x[i]);
        if (DROPOUT) dropout_apply(state, p.threshold, p.scale, grad[s]);
        store_vector<kWide>(h + column, kWidth - column, grad[s]);
#pragma unroll
        for (int i = 0; i < kVector; ++i) sum[s][i] += grad[s][i];
      }
      if (DROPOUT && s + 1 < kSteps)
        for (int k = 0; k < kWarp / kDropoutLanes; ++k) dropout_step(state);
    }
  }
  if (!p.grad_encoder) return;
  const Progress progress = progress_of(p, p.rows.row_start_f[frame], p.rows.row_start_f[frame + 1]);
  State* grad = p.grad_encoder + (p.encoder_grad_row_b[at.b] + at.t) * kWidth;
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
    finish_sum(p, progress, warp, lane, sum[s], grad + s * kStride, p.encoder_carry + s * kStride, kWidth,
               kWidth - s * kStride);
}

// blockIdx.x counts the states of the tile's utterances, from the first state of the first one.
extern "C" __global__ void __launch_bounds__(256) predictor_gradient(const __grid_constant__ JointParams p) {
  const int first_b = p.rows.utterance_f[p.tile.frame_begin], last_b = p.rows.utterance_f[p.tile.frame_end - 1];
  const i64 state = p.rows.state_start_b[first_b] + blockIdx.x;
  int b = first_b;
  while (b < last_b && state >= p.rows.state_start_b[b + 1]) ++b;
  const int u = static_cast<int>(state - p.rows.state_start_b[b]);
  const int column = (blockIdx.y * kWarp + threadIdx.x) * kVector, n_left = kWidth - column;
  const i64 begin = max(p.rows.frame_start_b[b], p.tile.frame_begin);
  const i64 end = min(p.rows.frame_start_b[b + 1], p.tile.frame_end);
  Acc sum[kVector] = {};
  if (n_left > 0) {
#pragma unroll 4
    for (i64 frame = begin + threadIdx.y; frame < end; frame += kGroups) {
      const i64 first = p.rows.row_start_f[frame], row = first + u - p.rows.lo_f[frame];
      const i64 row_begin = max(first, p.tile.row_begin);
      const i64 row_end = min(p.rows.row_start_f[frame + 1], p.tile.row_end);
      Acc x[kVector] = {};
      if (row >= row_begin && row < row_end)
        load_vector<kWide>(p.hidden + (row - p.tile.row_begin) * kWidth + column, n_left, Acc(0), x);
#pragma unroll
      for (int i = 0; i < kVector; ++i) sum[i] += x[i];
    }
  }
  const Progress progress = progress_of(p, p.rows.row_start_f[p.rows.frame_start_b[b]],
                                        p.rows.row_start_f[p.rows.frame_start_b[b + 1]]);
  const int block_column = blockIdx.y * kStride;
  State* grad = p.grad_predictor + (p.predictor_grad_row_b[b] + u) * kWidth + block_column;
  Acc* carry = p.predictor_carry + static_cast<i64>(u) * kWidth + block_column;
  finish_sum(p, progress, threadIdx.y, threadIdx.x, sum, grad, carry, p.predictor_carry_size, kWidth - block_column);
}
