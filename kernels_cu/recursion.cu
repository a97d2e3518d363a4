// What       forward and backward recursion over the lattice, driven by the table of arcs
//              sum_alignments  alpha[t, u] = log of the mass that reaches a node;  log_likelihood = alpha[T, U]
//              posteriors      beta[t, u]  = log of the mass from a node to the end;  columns become posteriors:
//                              sum over arcs with column c of exp(alpha + score + beta behind the arc - total)
//              losses          -log_likelihood, and zero for +inf on request
//            Graves 2012 (arXiv:1211.3711), eq. 16-18
// Grid       an utterance a block; anti-diagonals d = t + u one after another, a state u a thread
// Reads      column_cn [C, N] ACCUMULATOR, checkpoints float64
// Writes     checkpoints, log_likelihood_b; posteriors: column_cn in place
// Memory     sum_alignments keeps alpha of the first kReach diagonals of every `period`; posteriors computes it anew,
//            by the same arithmetic, a period at a time from the last, and walks the period back with beta.
//            Columns of a period come to the tile while the one before is in work, and posteriors leave from there:
//            neighbouring threads take neighbours in a frame, where those of a diagonal lie U_b numbers apart
// Order      tile row d % (2 period) == columns of diagonal d; window row d - first == its sums, alpha and then beta,
//            in the period that begins at `first`. A diagonal reads only those before it, and one __syncthreads()
//            between diagonals covers both its reads and its writes
// Numbers    running sums in float64; for float32 lattices the exponential and logarithm of a log-add in float32, good
//            to 1e-7. What is not in the lattice has sum -inf and column 0. -inf is lawful anywhere; a NaN stays in its
//            utterance. No atomics: the same bits every run
#include "common.cuh"
#include "ptx.cuh"
#include "table.cuh"

typedef ACCUMULATOR Acc;

struct RecursionParams {
  const i64* node_start_b;   // [B + 1]
  const i64* frame_start_b;  // [B + 1]
  const i64* state_start_b;  // [B + 1]
  Acc* column_cn;            // [C, N]
  double* checkpoints;       // those of utterance b from kReach (node_start / period + state_start) on, or null
  double* log_likelihood_b;  // [B]
  Acc* losses_b;             // [B]
  double* diagonals;         // [B, block_words] where shared memory is too small, else null
  i64 n_nodes;
  i64 block_words;           // of window and tile
  Acc emit_weight;           // 1 + fastemit_lambda
  int period;                // diagonals, a power of two, at least kReach; divides the threads of a block
  int pitch;                 // threads of a block, or max U_b + 1 where that is more, and 2
  int batch, zero_infinity;
};

struct __align__(kColumns % 2 ? sizeof(Acc) : 8) Columns {
  Acc of[kColumns];
};

struct Utterance {
  int frames, states;        // T_b, U_b + 1
  int period, log_period, pitch;
  Acc* column_cn;            // of its first node
  double* checkpoints;       // [kReach, ceil(T_b / period), U_b + 1]
  double* window;            // [kReach + period + kReach, pitch] from row -kReach on, state u at u + 1
  Columns* tile;             // [2 period, pitch], likewise
};

// A node, also outside the lattice.
struct Node {
  int t, u, sum, cell;       // its sum in the window, its columns in the tile
};

__device__ __forceinline__ Utterance utterance_of(const RecursionParams& p, double* memory) {
  const int b = blockIdx.x;
  const i64 node_start = p.node_start_b[b];
  Utterance at;
  at.frames = static_cast<int>(p.frame_start_b[b + 1] - p.frame_start_b[b]);
  at.states = static_cast<int>(p.state_start_b[b + 1] - p.state_start_b[b]);
  at.period = p.period, at.log_period = 31 - __clz(p.period), at.pitch = p.pitch;
  at.column_cn = p.column_cn + node_start;
  at.checkpoints = p.checkpoints + kReach * ((node_start >> at.log_period) + p.state_start_b[b]);
  at.window = memory + kReach * p.pitch;
  at.tile = reinterpret_cast<Columns*>(at.window + (p.period + kReach) * p.pitch);
  return at;
}

__device__ __forceinline__ bool in_lattice(const Utterance& at, int t, int u) {
  return static_cast<u32>(t) < static_cast<u32>(u < at.states ? at.frames : 0);
}
__device__ __forceinline__ Columns* tile_of(const Utterance& at, int d) {
  return at.tile + (d & (2 * at.period - 1)) * at.pitch;
}
__device__ __forceinline__ Node node_of(const Utterance& at, int first, int d, int u) {
  const int row = (d - first) * at.pitch;
  return {d - u, u, row + u + 1, (first & (2 * at.period - 1)) * at.pitch + row + u + 1};
}

// e^x and log(1 + x), 0 <= x <= 1; the latter by a polynomial with errors below 1e-7.
__device__ __forceinline__ double exp_of(double x) { return exp(x); }
__device__ __forceinline__ float exp_of(float x) { return exp2_unit(x * 1.4426950408889634f); }
__device__ __forceinline__ double log1p_of(double x) { return log1p(x); }
__device__ __forceinline__ float log1p_of(float x) {
  const float x2 = x * x, x4 = x2 * x2;
  const float p01 = fmaf(x, -0.49997094f, 0.99999933f), p23 = fmaf(x, -0.24672678f, 0.33289666f);
  const float p45 = fmaf(x, -0.1269084f, 0.1856979f), p67 = fmaf(x, -0.023855199f, 0.068084212f);
  const float low = fmaf(x2, p23, p01), high = fmaf(x2, p67, p45);
  return x * fmaf(x4, fmaf(x4, 0.0039303998f, high), low);
}

// log(e^a + e^b)
__device__ __forceinline__ double log_add(double a, double b) {
  const Acc apart = a == b ? Acc(0) : static_cast<Acc>(b - a);  // not NaN for -inf and -inf
  const double high = apart > 0 ? b : a;
  return high + static_cast<double>(log1p_of(exp_of(-fabs(apart))));
}

__device__ __forceinline__ double arc_score(int k, const Columns& column) {
  double score = 0;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const bool first = (kArcColumns[k] & ((1u << c) - 1)) == 0;
    const double part = static_cast<double>(column.of[c]);
    if (kArcColumns[k] >> c & 1) score = first ? part : score + part;
  }
  return kArcConstant[k] == 0 ? score : score + kArcConstant[k];
}

// Runs step(node, prepare(node)) for every state of n diagonals, from d on by `step_d`. What the thread's first state
// needs is prepared a diagonal ahead.
template <int step_d, class Prepare, class Step>
__device__ __forceinline__ void walk(const Utterance& at, int first, int d, int n, Prepare prepare, Step step) {
  Node next = node_of(at, first, d, threadIdx.x);
  auto ahead = prepare(next);
  for (; n > 0; --n) {
    const Node node = next;
    const auto prepared = ahead;
    const int on = step_d > 0 || n > 1 ? step_d * at.pitch : 0;  // nothing may lie before the period
    next.t += step_d, next.sum += on, next.cell += on;
    ahead = prepare(next);
    step(node, prepared);
    for (int more = blockDim.x; more < at.states; more += blockDim.x) {
      const Node other = {node.t - more, node.u + more, node.sum + more, node.cell + more};
      if (other.u < at.states) step(other, prepare(other));
    }
    __syncthreads();
  }
}

// Runs visit(t, first column, cell) for every state of the diagonals of a period, in the same threads for each period.
// Neighbouring threads take neighbours in a frame.
template <class Visit>
__device__ __forceinline__ void each_cell(const Utterance& at, int first, Visit visit) {
  const int row = threadIdx.x & (at.period - 1), frames = blockDim.x >> at.log_period;
  int u = at.states - 1 + row - static_cast<int>(threadIdx.x >> at.log_period);
  while (u >= at.states) u -= frames;
  int t = first + row - u;
  Acc* node = at.column_cn + (static_cast<i64>(t) * at.states + u);
  Columns* cell = at.tile + ((first + row) & (2 * at.period - 1)) * at.pitch + u + 1;
  const i64 step = static_cast<i64>(frames) * (at.states - 1);
#pragma unroll 2
  for (int n = (u + frames) / frames; n > 0; --n, t += frames, cell -= frames, node += step) visit(t, node, cell);
}

template <bool kShared>
__device__ __forceinline__ void begin_load(const RecursionParams& p, const Utterance& at, int first) {
  each_cell(at, first, [&](int t, const Acc* node, Columns* cell) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      begin_copy<kShared>(cell->of + c, node + c * p.n_nodes, in_lattice(at, t, 0));
  });
}
__device__ __forceinline__ void end_load() {
  end_copies();
  __syncthreads();
}

__device__ __forceinline__ void store_posteriors(const RecursionParams& p, const Utterance& at, int first) {
  each_cell(at, first, [&](int t, Acc* node, const Columns* cell) {
    const Columns posterior = *cell;
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      if (in_lattice(at, t, 0)) node[c * p.n_nodes] = posterior.of[c];
  });
}

// No sum and no column is known, and none beside the first and the last state ever will be.
__device__ __forceinline__ void clear(const Utterance& at) {
  double* const from = at.window - kReach * at.pitch;
  for (int i = threadIdx.x; i < (kReach + at.period + kReach) * at.pitch; i += blockDim.x)
    from[i] = -infinity<double>();
  for (int i = threadIdx.x; i < 2 * at.period * at.pitch; i += blockDim.x) at.tile[i] = Columns{};
  __syncthreads();
}

struct Scores {
  double of[kArcs];
};

// Of the arcs that lead to a node; columns(dt + du) points to its state so many diagonals back. Without it, all in its
// period.
template <class ColumnsOf>
__device__ __forceinline__ Scores incoming(ColumnsOf columns) {
  Scores score;
#pragma unroll
  for (int k = 0; k < kArcs; ++k) score.of[k] = arc_score(k, columns(kArcDt[k] + kArcDu[k])[-kArcDu[k]]);
  return score;
}

__device__ __forceinline__ Scores incoming(const Utterance& at, const Node& node) {
  return incoming([&](int back) { return at.tile + node.cell - back * at.pitch; });
}

// Alpha of a node, with kEnd of the end too.
template <bool kEnd>
__device__ __forceinline__ double sum_node(const Utterance& at, const Node& node, const Scores& score) {
  double alpha = -infinity<double>();
#pragma unroll
  for (int k = 0; k < kArcs; ++k) {
    double arriving = at.window[node.sum - (kArcDt[k] + kArcDu[k]) * at.pitch - kArcDu[k]] + score.of[k];
    if (kArcDt[k] > 0 && !kArcMayEnd[k]) arriving = node.t < at.frames ? arriving : -infinity<double>();
    alpha = k == 0 ? arriving : log_add(alpha, arriving);
  }
  const int frames = node.u < at.states ? at.frames + (kEnd && node.u == at.states - 1) : 0;
  return at.window[node.sum] = static_cast<u32>(node.t) < static_cast<u32>(frames) ? alpha : -infinity<double>();
}

// Where alpha of node (t, u) is kept, `row` == t + u modulo period < kReach: frames [i period, (i + 1) period) of a
// state have one such node.
__device__ __forceinline__ double* checkpoint_of(const Utterance& at, int row, int t, int u) {
  const int per_state = (at.frames + at.period - 1) >> at.log_period;
  return at.checkpoints + (static_cast<i64>(row) * per_state + (t >> at.log_period)) * at.states + u;
}

// Runs visit(row, u, sum) for every state of kReach rows from `first_row` on, in the threads of their states.
template <class Visit>
__device__ __forceinline__ void each_sum(const Utterance& at, int first_row, Visit visit) {
  for (int row = 0; row < kReach; ++row)
    for (int u = threadIdx.x; u < at.states; u += blockDim.x)
      visit(row, u, at.window + (first_row + row) * at.pitch + u + 1);
}

template <bool kShared>
__device__ __forceinline__ void sum_alignments_in(const RecursionParams& p, double* memory) {
  const Utterance at = utterance_of(p, memory);
  const int n_diagonals = at.frames + at.states;  // with the end's
  clear(at);
  begin_load<kShared>(p, at, 0);
  if (threadIdx.x == 0 && (at.frames > 0 || at.states == 1)) at.window[1] = 0;
  end_load();
  for (int first = 0; first < n_diagonals; first += at.period) {
    const int begin = max(first, 1), kept = min(first + kReach, n_diagonals), end = min(first + at.period, n_diagonals);
    walk<1>(
        at, first, begin, kept - begin,
        [&](const Node& node) {
          return incoming([&](int back) { return tile_of(at, node.t + node.u - back) + node.u + 1; });
        },
        [&](const Node& node, const Scores& score) {
          const double alpha = sum_node<true>(at, node, score);
          if (p.checkpoints && in_lattice(at, node.t, node.u))
            *checkpoint_of(at, node.t + node.u - first, node.t, node.u) = alpha;
        });
    begin_load<kShared>(p, at, first + at.period);
    walk<1>(
        at, first, kept, end - kept, [&](const Node& node) { return incoming(at, node); },
        [&](const Node& node, const Scores& score) { sum_node<true>(at, node, score); });
    each_sum(at, -kReach, [&](int, int, double* sum) { *sum = sum[at.period * at.pitch]; });
    end_load();
  }
  if (threadIdx.x == 0)
    p.log_likelihood_b[blockIdx.x] = at.window[((n_diagonals - 1) & (at.period - 1)) * at.pitch + at.states];
}

extern "C" __global__ void __launch_bounds__(1024) sum_alignments(const __grid_constant__ RecursionParams p) {
  DYNAMIC_SHARED(double, shared_diagonals);
  if (p.diagonals)
    sum_alignments_in<false>(p, p.diagonals + blockIdx.x * p.block_words);
  else
    sum_alignments_in<true>(p, shared_diagonals);
}

// Columns of a period; alpha of its first diagonals, that of (0, 0) being 0, to the rows before the window.
template <bool kShared>
__device__ __forceinline__ void begin_period(const RecursionParams& p, const Utterance& at, int first) {
  begin_load<kShared>(p, at, first);
  each_sum(at, -kReach, [&](int row, int u, double* sum) {
    const int t = first + row - u;
    begin_copy<kShared>(sum, checkpoint_of(at, row, t, u), in_lattice(at, t, u) && t + u > 0);
  });
}

// Of the arcs that leave a node; and log of its posterior less beta.
struct Leaving {
  Scores score;
  double reached;
};

__device__ __forceinline__ Leaving leaving(const Utterance& at, const Node& node, double total) {
  const Columns column = at.tile[node.cell];
  Leaving all;
#pragma unroll
  for (int k = 0; k < kArcs; ++k) all.score.of[k] = arc_score(k, column);
  all.reached = at.window[node.sum] - total;
  return all;
}

// Beta takes the place of alpha, and posteriors that of the columns.
__device__ __forceinline__ void finish_node(const RecursionParams& p, const Utterance& at, const Node& node,
                                            const Leaving& all) {
  double beta = -infinity<double>();
  Columns posterior = {};
#pragma unroll
  for (int k = 0; k < kArcs; ++k) {
    double mass = all.score.of[k] + at.window[node.sum + (kArcDt[k] + kArcDu[k]) * at.pitch + kArcDu[k]];
    if (kArcDt[k] > 0 && !kArcMayEnd[k]) mass = node.t + kArcDt[k] < at.frames ? mass : -infinity<double>();
    beta = k == 0 ? mass : log_add(beta, mass);
    const Acc weight = kArcDu[k] > 0 ? p.emit_weight : Acc(1);
    const Acc arc_posterior = weight * exp_of(static_cast<Acc>(all.reached + mass));
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      if (kArcColumns[k] >> c & 1) posterior.of[c] += arc_posterior;
  }
  at.window[node.sum] = in_lattice(at, node.t, node.u) ? beta : -infinity<double>();
  at.tile[node.cell] = posterior;
}

template <bool kShared>
__device__ __forceinline__ void posteriors_in(const RecursionParams& p, double* memory) {
  const Utterance at = utterance_of(p, memory);
  const double log_likelihood = p.log_likelihood_b[blockIdx.x];
  const double total = log_likelihood == -infinity<double>() ? 0.0 : log_likelihood;  // then every mass is -inf
  const int n_diagonals = at.frames + at.states - 1;
  if (at.frames == 0) return;
  int first = (n_diagonals - 1) & -at.period, end = n_diagonals;
  clear(at);
  begin_period<kShared>(p, at, first);
  end_load();
  for (; first >= 0; end = first, first -= at.period) {
    each_sum(at, 0, [&](int row, int u, double* sum) {
      if (end < n_diagonals) sum[at.period * at.pitch] = *sum;
      *sum = in_lattice(at, first + row - u, u) ? sum[-kReach * at.pitch] : -infinity<double>();
    });
    if (end == n_diagonals && threadIdx.x == (at.states - 1) % blockDim.x)
      at.window[(end - first) * at.pitch + at.states] = 0;  // beta of the end
    if (end < n_diagonals) store_posteriors(p, at, end);
    if (first > 0) begin_period<kShared>(p, at, first - at.period);
    __syncthreads();
    walk<1>(
        at, first, first + kReach, end - first - kReach, [&](const Node& node) { return incoming(at, node); },
        [&](const Node& node, const Scores& score) { sum_node<false>(at, node, score); });
    walk<-1>(
        at, first, end - 1, end - first, [&](const Node& node) { return leaving(at, node, total); },
        [&](const Node& node, const Leaving& all) { finish_node(p, at, node, all); });
    end_load();
  }
  store_posteriors(p, at, 0);
}

extern "C" __global__ void __launch_bounds__(1024) posteriors(const __grid_constant__ RecursionParams p) {
  DYNAMIC_SHARED(double, shared_diagonals);
  if (p.diagonals)
    posteriors_in<false>(p, p.diagonals + blockIdx.x * p.block_words);
  else
    posteriors_in<true>(p, shared_diagonals);
}

extern "C" __global__ void __launch_bounds__(256) losses(const __grid_constant__ RecursionParams p) {
  const int b = blockIdx.x * blockDim.x + threadIdx.x;
  if (b >= p.batch) return;
  const double loss = -p.log_likelihood_b[b];
  p.losses_b[b] = static_cast<Acc>(loss == infinity<double>() && p.zero_infinity ? 0.0 : loss);
}
