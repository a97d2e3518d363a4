// What       forward and backward recursion over the lattice, driven by the table of arcs
//              sum_alignments  alpha[t, u] = log of the mass that reaches a node;  log_likelihood = alpha[T, U]
//              posteriors      beta[t, u]  = log of the mass from a node to the end;  columns become posteriors:
//                              sum over arcs with column c of exp(alpha + score + beta behind the arc - total)
//              losses          -log_likelihood, and zero for +inf on request
//            Graves 2012 (arXiv:1211.3711), eq. 16-18
// Grid       an utterance a block; anti-diagonals d = t + u one after another, a state u a thread
// Reads      column_cn [C, N] ACCUMULATOR, checkpoints float64
// Writes     checkpoints, log_likelihood_b; posteriors: column_cn in place (a thread's own node only)
// Memory     sum_alignments keeps alpha of the first kReach diagonals of every `period`; posteriors computes it anew,
//            by the same arithmetic, a period at a time from the last, and walks the period back with beta.
//            A period reads scores of its own nodes only, which its betas overwrite afterwards
// Order      ring slot d % kRing == the sums of diagonal d; window slot d - first == alpha of diagonal d in the
//            period that begins at `first`. A diagonal reads only those before it, and one __syncthreads() between
//            diagonals covers both its reads and its writes
// Numbers    running sums in float64; for float32 lattices the exponential and logarithm of a log-add in float32, good
//            to 1e-7. -inf is lawful anywhere; a NaN stays in its utterance. No atomics: the same bits every run
#include "common.cuh"
#include "ptx.cuh"
#include "table.cuh"

typedef ACCUMULATOR Acc;
constexpr int kAhead = 4;  // diagonals whose scores are on their way to registers

struct RecursionParams {
  const i64* node_start_b;   // [B + 1]
  const i64* frame_start_b;  // [B + 1]
  const i64* state_start_b;  // [B + 1]
  Acc* column_cn;            // [C, N]
  double* checkpoints;       // those of utterance b from kReach (node_start / period + state_start) on, or null
  double* log_likelihood_b;  // [B]
  Acc* losses_b;             // [B]
  double* diagonals;         // [B, kRing + period, max_states] where shared memory is too small, else null
  i64 n_nodes;
  double emit_weight;        // 1 + fastemit_lambda
  int period;                // diagonals, a power of two, at least kReach
  int max_states, batch, zero_infinity;
};

struct Utterance {
  int frames, states;        // T_b, U_b + 1
  i64 node_start;
  double* checkpoints;       // [kReach, ceil(T_b / period), U_b + 1]
  double* ring;              // [kRing, max_states]
  double* window;            // [period, max_states]
};

__device__ __forceinline__ Utterance utterance_of(const RecursionParams& p, double* shared_diagonals) {
  const int b = blockIdx.x;
  Utterance at;
  at.frames = static_cast<int>(p.frame_start_b[b + 1] - p.frame_start_b[b]);
  at.states = static_cast<int>(p.state_start_b[b + 1] - p.state_start_b[b]);
  at.node_start = p.node_start_b[b];
  at.checkpoints = p.checkpoints + kReach * (at.node_start / p.period + p.state_start_b[b]);
  at.ring = p.diagonals ? p.diagonals + static_cast<i64>(b) * (kRing + p.period) * p.max_states : shared_diagonals;
  at.window = at.ring + kRing * p.max_states;
  return at;
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
  const double high = a < b ? b : a, low = a < b ? a : b;  // a NaN ends up in one of them
  const Acc apart = low == high ? Acc(0) : static_cast<Acc>(low - high);  // not NaN for -inf and -inf
  return high + static_cast<double>(log1p_of(exp_of(apart)));
}

__device__ __forceinline__ double arc_score(int k, const Acc (&column)[kColumns]) {
  double score = 0;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const bool first = (kArcColumns[k] & ((1u << c) - 1)) == 0;
    const double part = static_cast<double>(column[c]);
    if (kArcColumns[k] >> c & 1) score = first ? part : score + part;
  }
  return kArcConstant[k] == 0 ? score : score + kArcConstant[k];
}

__device__ __forceinline__ bool in_lattice(const Utterance& at, int t, int u) {
  return t >= 0 && t < at.frames && u >= 0 && u < at.states;
}
__device__ __forceinline__ bool is_final(const Utterance& at, int t, int u) {
  return t == at.frames && u == at.states - 1;
}

__device__ __forceinline__ int ring_slot(int d) { return static_cast<int>(static_cast<u32>(d) % kRing); }

__device__ __forceinline__ i64 node_of(const Utterance& at, int t, int u) {
  return at.node_start + static_cast<i64>(t) * at.states + u;
}

// Runs step(d, u, ahead) for every state u of n diagonals, from d on by `step_d`. For the thread's first state `ahead`
// holds what load(d, u, ahead) began to fetch kAhead diagonals before; begin_walk begins with the first ones.
template <int step_d, class Ahead, class Load, class Step>
__device__ __forceinline__ void walk(const Utterance& at, int d, int n, Ahead (&ahead)[kAhead], Load load,
                                     Step step) {
  const int first_u = threadIdx.x;
  for (int base = 0; base < n; base += kAhead) {
#pragma unroll
    for (int j = 0; j < kAhead; ++j)
      if (base + j < n) {  // the same for all threads
        step(d, first_u, ahead[j]);
        if (base + j + kAhead < n) load(d + step_d * kAhead, first_u, ahead[j]);
        for (int u = first_u + blockDim.x; u < at.states; u += blockDim.x) {
          Ahead now;
          load(d, u, now);
          step(d, u, now);
        }
        __syncthreads();
        d += step_d;
      }
  }
}
template <int step_d, class Ahead, class Load>
__device__ __forceinline__ void begin_walk(int d, int n, Ahead (&ahead)[kAhead], Load load) {
#pragma unroll
  for (int j = 0; j < kAhead; ++j)
    if (j < n) load(d + step_d * j, static_cast<int>(threadIdx.x), ahead[j]);
}

// Columns of the arcs that lead into a node, of the nodes that they leave; -inf where there is none.
struct Incoming {
  Acc column[kArcs][kColumns];
};

__device__ __forceinline__ void load_incoming(const RecursionParams& p, const Utterance& at, int d, int u,
                                              Incoming& incoming) {
  const int t = d - u;
  const Acc* const own = p.column_cn + node_of(at, t, u);
#pragma unroll
  for (int k = 0; k < kArcs; ++k) {
    const bool exists = in_lattice(at, t - kArcDt[k], u - kArcDu[k]) && (t < at.frames || kArcMayEnd[k]);
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      if (kArcColumns[k] >> c & 1)
        incoming.column[k][c] =
            exists ? own[c * p.n_nodes - (kArcDt[k] * at.states + kArcDu[k])] : -infinity<Acc>();
  }
}

// Of a node or the end; before(dt + du) is alpha of the diagonal so far back.
template <class Before>
__device__ __forceinline__ double alpha_of(const Utterance& at, int t, int u, const Incoming& incoming,
                                           Before before) {
  if (t + u == 0) return 0;
  double alpha = -infinity<double>();
#pragma unroll
  for (int k = 0; k < kArcs; ++k) {
    const int from_u = u - kArcDu[k];
    if (!in_lattice(at, t - kArcDt[k], from_u)) continue;
    const double arriving = before(kArcDt[k] + kArcDu[k])[from_u] + arc_score(k, incoming.column[k]);
    alpha = k == 0 ? arriving : log_add(alpha, arriving);
  }
  return alpha;
}

// Where alpha of node (d - u, u) is kept, `slot` == d modulo period < kReach: frames [i period, (i + 1) period) of a
// state have one such node.
__device__ __forceinline__ double* checkpoint_of(const RecursionParams& p, const Utterance& at, int slot, int d,
                                                 int u) {
  const int per_state = (at.frames + p.period - 1) / p.period;
  return at.checkpoints + (static_cast<i64>(slot) * per_state + (d - u) / p.period) * at.states + u;
}

extern "C" __global__ void __launch_bounds__(1024) sum_alignments(const __grid_constant__ RecursionParams p) {
  DYNAMIC_SHARED(double, shared_diagonals);
  const Utterance at = utterance_of(p, shared_diagonals);
  const int n_diagonals = at.frames + at.states;  // with the end's
  Incoming ahead[kAhead];
  const auto load = [&](int d, int u, Incoming& incoming) { load_incoming(p, at, d, u, incoming); };
  begin_walk<1>(0, n_diagonals, ahead, load);
  walk<1>(at, 0, n_diagonals, ahead, load, [&](int d, int u, const Incoming& incoming) {
    const bool ends = is_final(at, d - u, u);
    if (!in_lattice(at, d - u, u) && !ends) return;
    const double alpha =
        alpha_of(at, d - u, u, incoming, [&](int back) { return at.ring + ring_slot(d - back) * p.max_states; });
    at.ring[ring_slot(d) * p.max_states + u] = alpha;
    const int slot = d & (p.period - 1);
    if (ends)
      p.log_likelihood_b[blockIdx.x] = alpha;
    else if (p.checkpoints && slot < kReach)
      *checkpoint_of(p, at, slot, d, u) = alpha;
  });
}

// Alpha of the first diagonals of the period that begins at `first`.
__device__ __forceinline__ void restore(const RecursionParams& p, const Utterance& at, int first) {
#pragma unroll
  for (int slot = 0; slot < kReach; ++slot)
    for (int u = threadIdx.x; u < at.states; u += blockDim.x)
      if (in_lattice(at, first + slot - u, u))
        at.window[slot * p.max_states + u] = *checkpoint_of(p, at, slot, first + slot, u);
  __syncthreads();
}

// A node's own columns.
struct Own {
  Acc column[kColumns];
};

__device__ __forceinline__ void load_own(const RecursionParams& p, const Utterance& at, int d, int u, Own& own) {
  const int t = d - u;
  if (!in_lattice(at, t, u)) return;
  const i64 node = node_of(at, t, u);
#pragma unroll
  for (int c = 0; c < kColumns; ++c) own.column[c] = p.column_cn[c * p.n_nodes + node];
}

__device__ __forceinline__ void beta_at(const RecursionParams& p, const Utterance& at, int d, int u, const Own& own,
                                        double alpha, double total) {
  const int t = d - u;
  double beta = -infinity<double>();
  Acc posterior[kColumns] = {};
#pragma unroll
  for (int k = 0; k < kArcs; ++k) {
    const int to_t = t + kArcDt[k], to_u = u + kArcDu[k];
    const bool ends = is_final(at, to_t, to_u) && kArcMayEnd[k];
    if (!ends && !in_lattice(at, to_t, to_u)) continue;
    const int slot = ring_slot(d + kArcDt[k] + kArcDu[k]);
    const double mass = arc_score(k, own.column) + (ends ? 0.0 : at.ring[slot * p.max_states + to_u]);
    beta = k == 0 ? mass : log_add(beta, mass);
    const Acc weight = kArcDu[k] > 0 ? static_cast<Acc>(p.emit_weight) : Acc(1);
    const Acc arc_posterior = weight * exp_of(static_cast<Acc>(alpha + mass - total));
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      if (kArcColumns[k] >> c & 1) posterior[c] += arc_posterior;
  }
  at.ring[ring_slot(d) * p.max_states + u] = beta;
  const i64 node = node_of(at, t, u);
#pragma unroll
  for (int c = 0; c < kColumns; ++c) p.column_cn[c * p.n_nodes + node] = posterior[c];
}

extern "C" __global__ void __launch_bounds__(1024) posteriors(const __grid_constant__ RecursionParams p) {
  DYNAMIC_SHARED(double, shared_diagonals);
  const Utterance at = utterance_of(p, shared_diagonals);
  const double log_likelihood = p.log_likelihood_b[blockIdx.x];
  const double total = log_likelihood == -infinity<double>() ? 0.0 : log_likelihood;  // then every mass is -inf
  const auto incoming = [&](int d, int u, Incoming& ahead) { load_incoming(p, at, d, u, ahead); };
  const auto own = [&](int d, int u, Own& ahead) { load_own(p, at, d, u, ahead); };
  const int n_diagonals = at.frames + at.states - 1;
  int first = (n_diagonals - 1) / p.period * p.period, end = n_diagonals;
  Incoming ahead[kAhead];
  begin_walk<1>(first + kReach, end - first - kReach, ahead, incoming);
  for (; first >= 0; end = first, first -= p.period) {
    Own behind[kAhead];
    begin_walk<-1>(end - 1, end - first, behind, own);
    restore(p, at, first);
    walk<1>(at, first + kReach, end - first - kReach, ahead, incoming, [&](int d, int u, const Incoming& now) {
      double* alpha = at.window + (d - first) * p.max_states;
      if (in_lattice(at, d - u, u))
        alpha[u] = alpha_of(at, d - u, u, now, [&](int back) { return alpha - back * p.max_states; });
    });
    begin_walk<1>(first - p.period + kReach, p.period - kReach, ahead, incoming);  // of the period before
    walk<-1>(at, end - 1, end - first, behind, own, [&](int d, int u, const Own& now) {
      if (in_lattice(at, d - u, u)) beta_at(p, at, d, u, now, at.window[(d - first) * p.max_states + u], total);
    });
  }
}

extern "C" __global__ void __launch_bounds__(256) losses(const __grid_constant__ RecursionParams p) {
  const int b = blockIdx.x * blockDim.x + threadIdx.x;
  if (b >= p.batch) return;
  const double loss = -p.log_likelihood_b[b];
  p.losses_b[b] = static_cast<Acc>(loss == infinity<double>() && p.zero_infinity ? 0.0 : loss);
}
