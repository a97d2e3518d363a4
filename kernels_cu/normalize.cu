// What       scores of a node to its columns, and back to the gradient of the scores
//              normalize_forward    normalizer_g = logsumexp of z over group g;  column_c = z[v_c] - normalizer_g(c)
//              normalize_backward   dz[v] = mass_g exp(z[v] - normalizer_g) - sum of posterior_c over columns c on v,
//                                   clipped, times the utterance's upstream gradient
//              bias_partials, bias_add   grad_bias += sum of dz over the tile's rows
//              zero_padding         zero beyond each utterance's frames and states in a [B, T, U1, V] gradient
// Grid       a row a warp (ROW_THREADS 32) or a row a block;  bias_partials: 256 columns x a run of rows a block
// Reads      logits LOGIT (a tile's, or the caller's), bias [V] ACCUMULATOR, columns and normalizers [.., N]
// Writes     columns, normalizers; grad_logits LOGIT, which may be logits: a thread writes only what it has read
// Numbers    sums in ACCUMULATOR by a fixed tree; exp2 on scaled scores, one exponential a score. -inf scores get
//            gradient zero, a node of only -inf passes nothing on; NaN and +inf make the node's columns NaN
// Constants  GRID 1: padded [B, T, U1, V] of any strides, 0: rows one after another;  HAS_BIAS;  LOG_PROBS: scores are
//            log-probabilities already;  CLAMPED;  WIDE as in joint.cu
#include "common.cuh"
#include "ptx.cuh"
#include "rows.cuh"
#include "table.cuh"

typedef LOGIT Logit;
typedef ACCUMULATOR Acc;
constexpr bool kWide = WIDE;
constexpr int kRowThreads = ROW_THREADS;
constexpr int kRowWarps = kRowThreads / kWarp;
constexpr int kBlock = kRowThreads > 256 ? kRowThreads : 256;
constexpr int kRowsPerBlock = kRowThreads == kWarp ? kBlock / kWarp : 1;
static_assert(kRowThreads == kWarp || kRowThreads == kBlock, "a row a warp, or a row a block");
constexpr int kBiasRows = 8;  // thread rows of bias_partials

struct NormalizeParams {
  Rows rows;
  Tile tile;
  const Logit* logits;
  Logit* grad_logits;
  const i64* logits_offset_b;       // GRID: cell (b, t, u) at offset_b[b] + t step_t + u step_u, in elements;
                                    // else row r of the tile at r step_u
  i64 logits_step_t, logits_step_u;
  const i64* grad_offset_b;         // the same for grad_logits
  i64 grad_step_t, grad_step_u;
  const Acc* bias;                  // [V]
  const int* labels;                // packed; label u of utterance b at label_start_b[b] + u
  const i64* label_start_b;         // [B + 1]
  Acc* column_cn;                   // [C, N]
  Acc* normalizer_gn;               // [G, N], or null
  const Acc* upstream_b;            // [B]
  Acc* bias_partials;               // [bias_chunks, V]
  Acc* bias_sums;                   // [V]
  i64 n_nodes;
  Acc clamp;
  int vocabulary, blank, batch, bias_chunks, padded_frames, padded_states;
};

__device__ __forceinline__ float exp_base(float x) { return exp2_unit(x); }
__device__ __forceinline__ double exp_base(double x) { return exp2(x); }
constexpr Acc kLog2e = Acc(1.4426950408889634), kLn2 = Acc(0.6931471805599453);

// Warps of a row agree on a maximum or sum; every thread gets it.
template <class Op>
__device__ __forceinline__ Acc across_row(Acc x, Op op) {
  if (kRowWarps == 1) return x;
  __shared__ Acc parts[kRowWarps];
  __syncthreads();  // the last call's readers are done
  if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = x;
  __syncthreads();
  Acc total = parts[0];
  for (int w = 1; w < kRowWarps; ++w) total = op(total, parts[w]);
  return total;
}
__device__ __forceinline__ Acc row_max(Acc x) {
  return across_row(warp_max(x), [](Acc a, Acc b) { return a < b ? b : a; });
}
__device__ __forceinline__ Acc row_sum(Acc x) {
  return across_row(warp_sum(x), [](Acc a, Acc b) { return a + b; });
}

// One row of the tile: where it lies, and which logit each column reads (-1: none).
struct Cell {
  bool exists;
  Place at;
  i64 node;
  const Logit* from;
  Logit* to;
  int column_logit[kColumns];
};

__device__ __forceinline__ Cell cell_of(const NormalizeParams& p) {
  Cell cell;
  const int row_in_block = kRowThreads == kWarp ? threadIdx.x / kWarp : 0;
  const i64 row = p.tile.row_begin + static_cast<i64>(blockIdx.x) * kRowsPerBlock + row_in_block;
  cell.exists = row < p.tile.row_end;
  if (!cell.exists) return cell;
  const i64 frame = find_frame(p.rows, row, p.tile.frame_begin, p.tile.frame_end);
  cell.at = place_of(p.rows, frame, row);
  cell.node = node_of(p.rows, cell.at);
  const Place& at = cell.at;
  const i64 in_tile = row - p.tile.row_begin;
  cell.from = p.logits + (GRID ? p.logits_offset_b[at.b] + at.t * p.logits_step_t + at.u * p.logits_step_u
                               : in_tile * p.logits_step_u);
  cell.to = p.grad_logits + (GRID ? p.grad_offset_b[at.b] + at.t * p.grad_step_t + at.u * p.grad_step_u
                                 : in_tile * p.grad_step_u);
  const int label = at.u + 1 < at.states ? p.labels[p.label_start_b[at.b] + at.u] : -1;
#pragma unroll
  for (int c = 0; c < kColumns; ++c)
    cell.column_logit[c] =
        kColumnLogit[c] == kBlank ? p.blank : kColumnLogit[c] == kLabel ? label : kColumnLogit[c];
  return cell;
}

__device__ __forceinline__ bool in_group(int g, int v) {
  return (kGroupStart[g] == 0 || v >= kGroupStart[g]) && (kGroupStop[g] < 0 || v < kGroupStop[g]);
}

// The row's scores from `column` on, bias added, -inf beyond V.
__device__ __forceinline__ void load_scores(const NormalizeParams& p, const Cell& cell, int column, Acc (&z)[kVector]) {
  load_vector<kWide>(cell.from + column, p.vocabulary - column, -infinity<Acc>(), z);
  if (HAS_BIAS) {
    Acc bias[kVector];
    load_vector<kWide>(p.bias + column, p.vocabulary - column, Acc(0), bias);
#pragma unroll
    for (int i = 0; i < kVector; ++i) z[i] += bias[i];
  }
}

__device__ __forceinline__ Acc score(const NormalizeParams& p, const Cell& cell, int v) {
  return widen<Acc>(cell.from[v]) + (HAS_BIAS ? p.bias[v] : Acc(0));
}

// log-sum-exp over group g in one pass: a running maximum per thread, merged at the end.
__device__ __forceinline__ Acc logsumexp(const NormalizeParams& p, const Cell& cell, int g) {
  Acc top = -infinity<Acc>(), sum = 0;  // sum of 2^((z - top) log2 e)
  for (int column = threadIdx.x % kRowThreads * kVector; column < p.vocabulary; column += kRowThreads * kVector) {
    Acc z[kVector];
    load_scores(p, cell, column, z);
    Acc new_top = top;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (!in_group(g, column + i)) z[i] = -infinity<Acc>();
      new_top = new_top < z[i] ? z[i] : new_top;
    }
    const Acc shift = new_top == -infinity<Acc>() ? Acc(0) : new_top * kLog2e;
    sum *= top == -infinity<Acc>() ? Acc(0) : exp_base(top * kLog2e - shift);
    top = new_top;
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum += exp_base(z[i] * kLog2e - shift);
  }
  const Acc row_top = row_max(top);
  const Acc shift = row_top == -infinity<Acc>() ? Acc(0) : row_top * kLog2e;
  const Acc scaled = top == -infinity<Acc>() ? sum : sum * exp_base(top * kLog2e - shift);
  return (shift + log2(row_sum(scaled))) * kLn2;
}

extern "C" __global__ void __launch_bounds__(kBlock) normalize_forward(const __grid_constant__ NormalizeParams p) {
  const Cell cell = cell_of(p);
  if (!cell.exists) return;
  const int thread = threadIdx.x % kRowThreads;
  if (LOG_PROBS) {
    if (thread < kColumns) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        if (c == thread) {
          const Acc z = cell.column_logit[c] < 0 ? -infinity<Acc>() : score(p, cell, cell.column_logit[c]);
          p.column_cn[c * p.n_nodes + cell.node] = z == infinity<Acc>() ? z - z : z;
        }
    }
    return;
  }
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const Acc normalizer = logsumexp(p, cell, g);
    if (thread != 0) continue;
    if (p.normalizer_gn) p.normalizer_gn[g * p.n_nodes + cell.node] = normalizer;
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      if (kColumnGroup[c] == g) {
        const Acc z = cell.column_logit[c] < 0 ? -infinity<Acc>() : score(p, cell, cell.column_logit[c]);
        p.column_cn[c * p.n_nodes + cell.node] = normalizer == -infinity<Acc>() ? normalizer : z - normalizer;
      }
  }
}

extern "C" __global__ void __launch_bounds__(kBlock) normalize_backward(const __grid_constant__ NormalizeParams p) {
  const Cell cell = cell_of(p);
  if (!cell.exists) return;
  Acc posterior[kColumns], mass[kGroups] = {}, offset[kGroups];
#pragma unroll
  for (int c = 0; c < kColumns; ++c) posterior[c] = p.column_cn[c * p.n_nodes + cell.node];
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      if (kColumnGroup[c] == g) mass[g] += posterior[c];
    offset[g] = LOG_PROBS ? Acc(0) : p.normalizer_gn[g * p.n_nodes + cell.node] * kLog2e;
  }
  const Acc upstream = p.upstream_b[cell.at.b];
  for (int column = threadIdx.x % kRowThreads * kVector; column < p.vocabulary; column += kRowThreads * kVector) {
    Acc z[kVector], grad[kVector] = {};
    if (!LOG_PROBS) {
      load_scores(p, cell, column, z);
#pragma unroll
      for (int g = 0; g < kGroups; ++g)
        if (mass[g] != Acc(0)) {
#pragma unroll
          for (int i = 0; i < kVector; ++i)
            if (in_group(g, column + i)) grad[i] += mass[g] * exp_base(z[i] * kLog2e - offset[g]);
        }
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int hit = cell.column_logit[c] - column;
      if (cell.column_logit[c] >= 0 && hit >= 0 && hit < kVector) {
#pragma unroll
        for (int i = 0; i < kVector; ++i)
          if (i == hit) grad[i] -= posterior[c];
      }
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (CLAMPED) grad[i] = grad[i] > p.clamp ? p.clamp : grad[i] < -p.clamp ? -p.clamp : grad[i];
      grad[i] *= upstream;
    }
    store_vector<kWide>(cell.to + column, p.vocabulary - column, grad);
  }
}

// bias_partials[chunk][v] = sum of dz[r][v] over the chunk's rows: grid (V / 256, bias_chunks), block (32, 8).
extern "C" __global__ void __launch_bounds__(256) bias_partials(const __grid_constant__ NormalizeParams p) {
  __shared__ Acc parts[kBiasRows][kWarp][kVector];
  const int column = (blockIdx.x * kWarp + threadIdx.x) * kVector, n_left = p.vocabulary - column;
  const i64 n_rows = p.tile.row_end - p.tile.row_begin;
  const i64 begin = n_rows * blockIdx.y / p.bias_chunks, end = n_rows * (blockIdx.y + 1) / p.bias_chunks;
  Acc sum[kVector] = {};
  if (n_left > 0)
    for (i64 row = begin + threadIdx.y; row < end; row += kBiasRows) {
      Acc x[kVector];
      load_vector<kWide>(p.grad_logits + row * p.vocabulary + column, n_left, Acc(0), x);
#pragma unroll
      for (int i = 0; i < kVector; ++i) sum[i] += x[i];
    }
#pragma unroll
  for (int i = 0; i < kVector; ++i) parts[threadIdx.y][threadIdx.x][i] = sum[i];
  __syncthreads();
  if (threadIdx.y != 0) return;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    Acc total = 0;
    for (int r = 0; r < kBiasRows; ++r) total += parts[r][threadIdx.x][i];
    if (i < n_left) p.bias_partials[static_cast<i64>(blockIdx.y) * p.vocabulary + column + i] = total;
  }
}

extern "C" __global__ void __launch_bounds__(256) bias_add(const __grid_constant__ NormalizeParams p) {
  const int v = blockIdx.x * blockDim.x + threadIdx.x;
  if (v >= p.vocabulary) return;
  Acc total = 0;
  for (int chunk = 0; chunk < p.bias_chunks; ++chunk) total += p.bias_partials[static_cast<i64>(chunk) * p.vocabulary + v];
  p.bias_sums[v] += total;
}

// A cell (t, u) of the padded grid a warp, utterances along blockIdx.y.
extern "C" __global__ void __launch_bounds__(256) zero_padding(const __grid_constant__ NormalizeParams p) {
  const i64 cell = static_cast<i64>(blockIdx.x) * (blockDim.x / kWarp) + threadIdx.x / kWarp;
  if (cell >= static_cast<i64>(p.padded_frames) * p.padded_states) return;
  const int t = static_cast<int>(cell / p.padded_states), u = static_cast<int>(cell % p.padded_states);
  for (int b = blockIdx.y; b < p.batch; b += gridDim.y) {
    const bool inside = t < p.rows.frame_start_b[b + 1] - p.rows.frame_start_b[b] &&
                        u < p.rows.state_start_b[b + 1] - p.rows.state_start_b[b];
    if (inside) continue;
    Logit* to = p.grad_logits + p.grad_offset_b[b] + t * p.grad_step_t + u * p.grad_step_u;
    for (int v = threadIdx.x % kWarp; v < p.vocabulary; v += kWarp) to[v] = narrow<Logit>(Acc(0));
  }
}
