// What       scores of a node to its columns, and back to the gradient of the scores
//              normalize_forward    normalizer_g = log of the sum of exp(z - top_g), top_g = max of z over group g
//                                   column_c = (z[v_c] - top_g) - normalizer_g,  g = group of c
//              normalize_backward   dz[v] = mass_g exp((z[v] - top_g) - normalizer_g) - sum of posterior_c over
//                                   columns c on v, clipped, times the utterance's upstream gradient
//              bias_partials, bias_add   grad_bias += sum of dz over rows
//              zero_padding         zero beyond each utterance's frames and states in a [B, T, U1, V] gradient
// Grid       a run of rows a warp (ROW_THREADS 32) or a block, over a fixed number of blocks;
//            bias_partials: 256 columns x a run of rows a block
// Reads      logits LOGIT (a tile's, or the caller's), bias [V] ACCUMULATOR, columns and normalizers [.., N]
// Writes     columns, normalizers; grad_logits LOGIT, which may be logits: a thread writes only what it has read.
//            bias_partials [bias_chunks, V]: a block adds to its own row; bias_add sums the rows once a call
// Numbers    sums in ACCUMULATOR by a fixed tree; scores enter relative to the largest, so that large ones keep
//            their digits; one exponential a score. -inf scores get
//            gradient zero, a node of only -inf passes nothing on; NaN and +inf make the node's columns NaN
// Constants  VOCABULARY;  GRID 1: padded [B, T, U1, V] of any strides, 0: rows one after another;  HAS_BIAS;
//            LOG_PROBS: scores are log-probabilities already;  CLAMPED;  WIDE 1 if all rows are 16-byte aligned and
//            have memory for V rounded up to 8 columns; those beyond V may hold anything and are overwritten
#include "common.cuh"
#include "ptx.cuh"
#include "rows.cuh"
#include "table.cuh"

typedef LOGIT Logit;
typedef ACCUMULATOR Acc;
constexpr bool kWide = WIDE;
constexpr int kVocabulary = VOCABULARY;
constexpr bool kWhole = kVocabulary % kVector == 0;  // no 8 columns reach beyond V
constexpr int kRowThreads = ROW_THREADS;
constexpr int kRowWarps = kRowThreads / kWarp;
constexpr int kBlock = kRowThreads > 256 ? kRowThreads : 256;
constexpr int kRowsPerBlock = kRowThreads == kWarp ? kBlock / kWarp : 1;
static_assert(kRowThreads == kWarp || kRowThreads == kBlock, "a row a warp, or a row a block");
constexpr int kStride = kRowThreads * kVector;                          // columns of a row in flight at once
constexpr int kSteps = (kVocabulary + kStride - 1) / kStride;
constexpr bool kResident = kSteps <= 8 && kBlock == 256;                // a thread's part of a row fits registers
constexpr int kKept = kResident ? kSteps : 1;
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
  int blank, batch, bias_chunks, padded_states;
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
  int b;
  i64 node;
  const Logit* from;
  Logit* to;
  int column_logit[kColumns];
};

__device__ __forceinline__ Cell cell_of(const NormalizeParams& p, const Cursor& cursor) {
  Cell cell;
  const Place& at = cursor.at;
  cell.b = at.b;
  cell.node = cursor.node;
  const i64 in_tile = cursor.row - p.tile.row_begin;
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

__device__ __forceinline__ int column_of(int step) {
  return step * kStride + static_cast<int>(threadIdx.x % kRowThreads) * kVector;
}

__device__ __forceinline__ bool in_group(int g, int v) {
  return (kGroupStart[g] == 0 || v >= kGroupStart[g]) && (kGroupStop[g] < 0 || v < kGroupStop[g]);
}

// 8 scores as stored, from `column` on; -inf beyond V.
__device__ __forceinline__ void load_raw(const Cell& cell, int column, Logit (&raw)[kVector]) {
  const int n_left = kVocabulary - column;
  if (kWide && (kVocabulary % kStride == 0 || n_left > 0)) {
    copy_vector(cell.from + column, raw);
#pragma unroll
    for (int i = 0; i < kVector; ++i)
      if (!kWhole && i >= n_left) raw[i] = narrow<Logit>(-infinity<Acc>());
  } else {
#pragma unroll
    for (int i = 0; i < kVector; ++i) raw[i] = i < n_left ? cell.from[column + i] : narrow<Logit>(-infinity<Acc>());
  }
}

// The same in Acc, bias added.
__device__ __forceinline__ void add_bias(const NormalizeParams& p, int column, const Logit (&raw)[kVector],
                                         Acc (&z)[kVector]) {
#pragma unroll
  for (int i = 0; i < kVector; ++i) z[i] = widen<Acc>(raw[i]);
  const int n_left = kVocabulary - column;
  if (!HAS_BIAS || (kVocabulary % kStride && n_left <= 0)) return;
  Acc bias[kVector];
  if (kWide && (kWhole || n_left >= kVector))
    load_vector<true>(p.bias + column, n_left, Acc(0), bias);
  else
    load_vector<false>(p.bias + column, n_left, Acc(0), bias);
#pragma unroll
  for (int i = 0; i < kVector; ++i) z[i] += bias[i];
}

__device__ __forceinline__ void load_scores(const NormalizeParams& p, const Cell& cell, int column, Acc (&z)[kVector]) {
  Logit raw[kVector];
  load_raw(cell, column, raw);
  add_bias(p, column, raw, z);
}

// A thread's part of a row, as stored; with kResident all of it, and on its way while the row before is in work.
struct Part {
  Logit z[kKept][kVector];
};

__device__ __forceinline__ void load_part(const Cell& cell, Part& part) {
  if (!kResident) return;
#pragma unroll
  for (int s = 0; s < kKept; ++s) load_raw(cell, column_of(s), part.z[s]);
}

// Calls body(cell, part) for every row of the warp's (or block's) run.
template <class Body>
__device__ __forceinline__ void for_each_row(const NormalizeParams& p, Body body) {
  const i64 n_rows = p.tile.row_end - p.tile.row_begin, n_runs = static_cast<i64>(gridDim.x) * kRowsPerBlock;
  const i64 run = static_cast<i64>(blockIdx.x) * kRowsPerBlock + (kRowThreads == kWarp ? threadIdx.x / kWarp : 0);
  const i64 begin = p.tile.row_begin + n_rows * run / n_runs, end = p.tile.row_begin + n_rows * (run + 1) / n_runs;
  if (begin >= end) return;
  Cursor cursor = cursor_at(p.rows, begin, find_frame(p.rows, begin, p.tile.frame_begin, p.tile.frame_end));
  Cell next_cell = cell_of(p, cursor);
  Part next_part;
  load_part(next_cell, next_part);
  while (true) {
    const Cell cell = next_cell;
    const Part part = next_part;
    const bool more = cursor.row + 1 < end;
    if (more) {
      advance(p.rows, cursor, 1);
      next_cell = cell_of(p, cursor);
      load_part(next_cell, next_part);
    }
    body(cell, part);
    if (!more) return;
  }
}

__device__ __forceinline__ void store_scores(const Cell& cell, int column, const Acc (&z)[kVector]) {
  if (kVocabulary % kStride && column >= kVocabulary) return;
  store_vector<kWide>(cell.to + column, kVocabulary - column, z);
}

__device__ __forceinline__ Acc score(const NormalizeParams& p, const Cell& cell, int v) {
  return widen<Acc>(cell.from[v]) + (HAS_BIAS ? p.bias[v] : Acc(0));
}

__device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }  // a NaN shows in the sum instead
__device__ __forceinline__ double larger(double a, double b) { return fmax(a, b); }

// The larger of `top` and the scores of group g; those outside the group become -inf.
__device__ __forceinline__ Acc max_in_group(int g, int column, Acc (&z)[kVector], Acc top) {
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (!in_group(g, column + i)) z[i] = -infinity<Acc>();
    top = larger(top, z[i]);
  }
  return top;
}
__device__ __forceinline__ Acc finite_top(Acc top) { return top == -infinity<Acc>() ? Acc(0) : top; }

__device__ __forceinline__ Acc sum_of_exponentials(const Acc (&z)[kVector], Acc top, Acc sum) {
#pragma unroll
  for (int i = 0; i < kVector; ++i) sum += exp_base((z[i] - top) * kLog2e);
  return sum;
}

struct Normalizer {
  Acc top, log_sum;
};

// Of group g. A resident row is read once and kept; a longer one is read once too, with a running maximum a thread
// that is merged at the end.
__device__ __forceinline__ Normalizer normalizer_of(const NormalizeParams& p, const Cell& cell, const Part& part,
                                                    int g) {
  Acc top = -infinity<Acc>(), sum = 0;
  if (kResident) {
    Acc z[kKept][kVector];
#pragma unroll
    for (int s = 0; s < kKept; ++s) add_bias(p, column_of(s), part.z[s], z[s]);
#pragma unroll
    for (int s = 0; s < kKept; ++s) top = max_in_group(g, column_of(s), z[s], top);
    top = finite_top(row_max(top));
#pragma unroll
    for (int s = 0; s < kKept; ++s) sum = sum_of_exponentials(z[s], top, sum);
    return {top, log2(row_sum(sum)) * kLn2};
  }
  for (int s = 0; s < kSteps; ++s) {
    Acc z[kVector];
    load_scores(p, cell, column_of(s), z);
    const Acc new_top = max_in_group(g, column_of(s), z, top);
    if (new_top != top) sum *= exp_base((finite_top(top) - new_top) * kLog2e);  // 0 stays 0
    top = new_top;
    sum = sum_of_exponentials(z, finite_top(top), sum);
  }
  const Acc row_top = finite_top(row_max(top));
  const Acc scaled = top == -infinity<Acc>() ? sum : sum * exp_base((top - row_top) * kLog2e);
  return {row_top, log2(row_sum(scaled)) * kLn2};
}

__device__ __forceinline__ Acc column_score(const NormalizeParams& p, const Cell& cell, int c) {
  return cell.column_logit[c] < 0 ? -infinity<Acc>() : score(p, cell, cell.column_logit[c]);
}

__device__ __forceinline__ void normalize_row(const NormalizeParams& p, const Cell& cell, const Part& part) {
  const bool writes = threadIdx.x % kRowThreads == 0;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const Normalizer normalizer = LOG_PROBS ? Normalizer{0, 0} : normalizer_of(p, cell, part, g);
    if (!writes) continue;
    if (!LOG_PROBS && p.normalizer_gn) p.normalizer_gn[g * p.n_nodes + cell.node] = normalizer.log_sum;
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      if (kColumnGroup[c] == g) {
        const Acc z = column_score(p, cell, c);
        const bool masked = normalizer.log_sum == -infinity<Acc>();
        const Acc column = masked ? normalizer.log_sum : (z - normalizer.top) - normalizer.log_sum;
        p.column_cn[c * p.n_nodes + cell.node] = column == infinity<Acc>() ? column - column : column;
      }
  }
}

extern "C" __global__ void __launch_bounds__(kBlock) normalize_forward(const __grid_constant__ NormalizeParams p) {
  for_each_row(p, [&](const Cell& cell, const Part& part) { normalize_row(p, cell, part); });
}

// What a row's gradient is made of, beside its scores.
struct Weights {
  Acc posterior[kColumns], mass[kGroups], top[kGroups], offset[kGroups], upstream;
};

__device__ __forceinline__ Weights weights_of(const NormalizeParams& p, const Cell& cell) {
  Weights w;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) w.posterior[c] = p.column_cn[c * p.n_nodes + cell.node];
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    w.mass[g] = 0;
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      if (kColumnGroup[c] == g) w.mass[g] += w.posterior[c];
    w.top[g] = 0;
    w.offset[g] = LOG_PROBS ? Acc(0) : p.normalizer_gn[g * p.n_nodes + cell.node] * kLog2e;
  }
  w.upstream = p.upstream_b[cell.b];
  return w;
}

// The largest score of each group; get(s, z) gives the thread's scores of step s.
template <class Get>
__device__ __forceinline__ void find_tops(Weights& w, Get get) {
  if (LOG_PROBS) return;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    Acc top = -infinity<Acc>();
#pragma unroll(kResident ? kSteps : 1)
    for (int s = 0; s < kSteps; ++s) {
      Acc z[kVector];
      get(s, z);
      top = max_in_group(g, column_of(s), z, top);
    }
    w.top[g] = finite_top(row_max(top));
  }
}

// z becomes its gradient.
__device__ __forceinline__ void differentiate(const NormalizeParams& p, const Cell& cell, const Weights& w, int column,
                                              Acc (&z)[kVector]) {
  Acc grad[kVector] = {};
  if (!LOG_PROBS) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
      if (w.mass[g] != Acc(0)) {
#pragma unroll
        for (int i = 0; i < kVector; ++i)
          if (in_group(g, column + i)) grad[i] += w.mass[g] * exp_base((z[i] - w.top[g]) * kLog2e - w.offset[g]);
      }
  }
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const int hit = cell.column_logit[c] - column;
    if (cell.column_logit[c] >= 0 && hit >= 0 && hit < kVector) {
#pragma unroll
      for (int i = 0; i < kVector; ++i)
        if (i == hit) grad[i] -= w.posterior[c];
    }
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (CLAMPED) grad[i] = grad[i] > p.clamp ? p.clamp : grad[i] < -p.clamp ? -p.clamp : grad[i];
    z[i] = grad[i] * w.upstream;
  }
}

// Adds the block's sums to its row of bias_partials, warps in order.
__device__ __forceinline__ void add_bias_sums(const NormalizeParams& p, const Acc (&sums)[kKept][kVector]) {
  __shared__ Acc parts[kRowsPerBlock][kRowThreads][kVector];
  Acc* to = p.bias_partials + static_cast<i64>(blockIdx.x) * kVocabulary;
  const int group = threadIdx.x / kRowThreads, thread = threadIdx.x % kRowThreads;
#pragma unroll
  for (int s = 0; s < kKept; ++s) {
    __syncthreads();  // the last step's readers are done
#pragma unroll
    for (int i = 0; i < kVector; ++i) parts[group][thread][i] = sums[s][i];
    __syncthreads();
    const Acc* flat = &parts[0][0][0];
    for (int i = threadIdx.x; i < kStride; i += kBlock) {
      Acc total = 0;
#pragma unroll
      for (int r = 0; r < kRowsPerBlock; ++r) total += flat[r * kStride + i];
      if (s * kStride + i < kVocabulary) to[s * kStride + i] += total;
    }
  }
}

extern "C" __global__ void __launch_bounds__(kBlock) normalize_backward(const __grid_constant__ NormalizeParams p) {
  Acc bias_sums[kKept][kVector] = {};
  for_each_row(p, [&](const Cell& cell, const Part& part) {
    Weights w = weights_of(p, cell);
    if (kResident) {
      Acc z[kKept][kVector];
#pragma unroll
      for (int s = 0; s < kKept; ++s) add_bias(p, column_of(s), part.z[s], z[s]);
      find_tops(w, [&](int s, Acc(&copy)[kVector]) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) copy[i] = z[s][i];
      });
#pragma unroll
      for (int s = 0; s < kKept; ++s) {
        differentiate(p, cell, w, column_of(s), z[s]);
        store_scores(cell, column_of(s), z[s]);
#pragma unroll
        for (int i = 0; i < kVector; ++i) bias_sums[s][i] += z[s][i];
      }
    } else {
      find_tops(w, [&](int s, Acc(&z)[kVector]) { load_scores(p, cell, column_of(s), z); });
      for (int s = 0; s < kSteps; ++s) {
        Acc z[kVector];
        load_scores(p, cell, column_of(s), z);
        differentiate(p, cell, w, column_of(s), z);
        store_scores(cell, column_of(s), z);
      }
    }
  });
  if (kResident && p.bias_partials) add_bias_sums(p, bias_sums);
}

// bias_partials[chunk][v] += sum of dz[r][v] over the chunk's rows, for rows too long to be resident: grid
// (V / 256, bias_chunks), block (32, 8).
extern "C" __global__ void __launch_bounds__(256) bias_partials(const __grid_constant__ NormalizeParams p) {
  __shared__ Acc parts[kBiasRows][kWarp][kVector];
  const int column = (blockIdx.x * kWarp + threadIdx.x) * kVector, n_left = kVocabulary - column;
  const i64 n_rows = p.tile.row_end - p.tile.row_begin;
  const i64 begin = n_rows * blockIdx.y / p.bias_chunks, end = n_rows * (blockIdx.y + 1) / p.bias_chunks;
  Acc sum[kVector] = {};
  if (n_left > 0)
    for (i64 row = begin + threadIdx.y; row < end; row += kBiasRows) {
      Acc x[kVector];
      load_vector<kWide>(p.grad_logits + row * p.grad_step_u + column, n_left, Acc(0), x);
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
    if (i < n_left) p.bias_partials[static_cast<i64>(blockIdx.y) * kVocabulary + column + i] += total;
  }
}

// grad_bias[v] += sum over chunks, in order: 32 columns x 8 thread rows a block.
extern "C" __global__ void __launch_bounds__(256) bias_add(const __grid_constant__ NormalizeParams p) {
  __shared__ Acc parts[kBiasRows][kWarp];
  const int v = blockIdx.x * kWarp + threadIdx.x;
  Acc sum = 0;
  if (v < kVocabulary)
    for (int chunk = threadIdx.y; chunk < p.bias_chunks; chunk += kBiasRows)
      sum += p.bias_partials[static_cast<i64>(chunk) * kVocabulary + v];
  parts[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || v >= kVocabulary) return;
  Acc total = 0;
  for (int r = 0; r < kBiasRows; ++r) total += parts[r][threadIdx.x];
  p.bias_sums[v] += total;
}

// A frame a block, utterances along blockIdx.y; a state a warp.
extern "C" __global__ void __launch_bounds__(256) zero_padding(const __grid_constant__ NormalizeParams p) {
  const int t = blockIdx.x, lane = threadIdx.x % kWarp;
  for (int b = blockIdx.y; b < p.batch; b += gridDim.y) {
    const bool inside = t < p.rows.frame_start_b[b + 1] - p.rows.frame_start_b[b];
    const int states = inside ? static_cast<int>(p.rows.state_start_b[b + 1] - p.rows.state_start_b[b]) : 0;
    for (int u = states + threadIdx.x / kWarp; u < p.padded_states; u += blockDim.x / kWarp) {
      Logit* to = p.grad_logits + p.grad_offset_b[b] + t * p.grad_step_t + u * p.grad_step_u;
      if (kWide) {
        const Acc zeros[kVector] = {};
        for (int v = lane * kVector; v < kVocabulary; v += kWarp * kVector) store_vector<kWide>(to + v, kVector, zeros);
      } else {
        for (int v = lane; v < kVocabulary; v += kWarp) to[v] = narrow<Logit>(Acc(0));
      }
    }
  }
}
