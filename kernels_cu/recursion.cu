// What       forward and backward recursion over the lattice, driven by the table of arcs
//              sum_alignments  alpha[t, u] = log of the mass that reaches a node;  log_likelihood = alpha[T, U]
//              posteriors      beta[t, u]  = log of the mass from a node to the end;  columns become posteriors:
//                              sum over arcs with column c of exp(alpha + score + beta behind the arc - total)
//              losses          -log_likelihood, and zero for +inf on request
//            Graves 2012 (arXiv:1211.3711), eq. 16-18
// Grid       an utterance a block; anti-diagonals d = t + u one after another, a state u a thread
// Reads      column_cn [C, N] ACCUMULATOR, alpha_n [N] float64
// Writes     alpha_n, log_likelihood_b; posteriors: column_cn in place (a thread's own node only)
// Order      ring slot d % kRing == the running sums of diagonal d; a diagonal reads only earlier slots, and one
//            __syncthreads() between diagonals covers both its reads and its writes
// Numbers    running sums in float64; for float32 lattices the exponential and logarithm of a log-add in float32.
//            -inf is lawful anywhere; a NaN stays in its utterance. No atomics: the same bits every run
#include "common.cuh"
#include "table.cuh"

typedef ACCUMULATOR Acc;
constexpr int kAhead = 4;  // diagonals whose scores are on their way to registers

struct RecursionParams {
  const i64* node_start_b;   // [B + 1]
  const i64* frame_start_b;  // [B + 1]
  const i64* state_start_b;  // [B + 1]
  Acc* column_cn;            // [C, N]
  double* alpha_n;           // [N], or null: not wanted
  double* log_likelihood_b;  // [B]
  Acc* losses_b;             // [B]
  double* ring;              // [B, kRing, max_states] where shared memory is too small, else null
  i64 n_nodes;
  double emit_weight;        // 1 + fastemit_lambda
  int max_states, batch, zero_infinity;
};

struct Utterance {
  int frames, states;        // T_b, U_b + 1
  i64 node_start;
  double* ring;              // [kRing, max_states]
};

__device__ __forceinline__ Utterance utterance_of(const RecursionParams& p, double* shared_ring) {
  const int b = blockIdx.x;
  Utterance at;
  at.frames = static_cast<int>(p.frame_start_b[b + 1] - p.frame_start_b[b]);
  at.states = static_cast<int>(p.state_start_b[b + 1] - p.state_start_b[b]);
  at.node_start = p.node_start_b[b];
  at.ring = p.ring ? p.ring + static_cast<i64>(b) * kRing * p.max_states : shared_ring;
  return at;
}

__device__ __forceinline__ double log_add(double a, double b) {
  const double high = a < b ? b : a, low = a < b ? a : b;  // a NaN ends up in one of them
  if (low == -infinity<double>()) return high;
  const Acc ratio = exp(static_cast<Acc>(low - high));
  return high + static_cast<double>(log1p(ratio));
}

__device__ __forceinline__ double arc_score(int k, const Acc (&column)[kColumns]) {
  double score = kArcConstant[k];
#pragma unroll
  for (int c = 0; c < kColumns; ++c)
    if (kArcColumns[k] >> c & 1) score += static_cast<double>(column[c]);
  return score;
}

__device__ __forceinline__ bool in_lattice(const Utterance& at, int t, int u) {
  return t >= 0 && t < at.frames && u >= 0 && u < at.states;
}
__device__ __forceinline__ bool is_final(const Utterance& at, int t, int u) {
  return t == at.frames && u == at.states - 1;
}

// Scores of the arcs that lead into node (d - u, u), read at the nodes that they leave; -inf where there is none.
__device__ __forceinline__ void load_incoming(const RecursionParams& p, const Utterance& at, int d, int u,
                                              double (&score)[kArcs]) {
  const int t = d - u;
#pragma unroll
  for (int k = 0; k < kArcs; ++k) {
    score[k] = -infinity<double>();
    const int from_t = t - kArcDt[k], from_u = u - kArcDu[k];
    if (!in_lattice(at, from_t, from_u) || (t >= at.frames && !kArcMayEnd[k])) continue;
    const i64 node = at.node_start + static_cast<i64>(from_t) * at.states + from_u;
    Acc column[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      if (kArcColumns[k] >> c & 1) column[c] = p.column_cn[c * p.n_nodes + node];
    score[k] = arc_score(k, column);
  }
}

__device__ __forceinline__ void alpha_at(const RecursionParams& p, const Utterance& at, int d, int u,
                                         const double (&score)[kArcs]) {
  const int t = d - u;
  if (!in_lattice(at, t, u) && !is_final(at, t, u)) return;
  double alpha = d == 0 ? 0.0 : -infinity<double>();
#pragma unroll
  for (int k = 0; k < kArcs; ++k) {
    const int from_t = t - kArcDt[k], from_u = u - kArcDu[k];
    if (!in_lattice(at, from_t, from_u)) continue;
    const int slot = (d - kArcDt[k] - kArcDu[k]) % kRing;
    alpha = log_add(alpha, at.ring[slot * p.max_states + from_u] + score[k]);
  }
  at.ring[d % kRing * p.max_states + u] = alpha;
  if (is_final(at, t, u))
    p.log_likelihood_b[blockIdx.x] = alpha;
  else if (p.alpha_n)
    p.alpha_n[at.node_start + static_cast<i64>(t) * at.states + u] = alpha;
}

extern "C" __global__ void __launch_bounds__(1024) sum_alignments(const __grid_constant__ RecursionParams p) {
  DYNAMIC_SHARED(double, shared_ring);
  const Utterance at = utterance_of(p, shared_ring);
  const int last = at.frames + at.states - 1, first_u = threadIdx.x;
  double ahead[kAhead][kArcs];
#pragma unroll
  for (int j = 0; j < kAhead; ++j) load_incoming(p, at, j, first_u, ahead[j]);
  for (int base = 0; base <= last; base += kAhead) {
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int d = base + j;
      if (d <= last) {  // the same for all threads
        alpha_at(p, at, d, first_u, ahead[j]);
        load_incoming(p, at, d + kAhead, first_u, ahead[j]);
        for (int u = first_u + blockDim.x; u < at.states; u += blockDim.x) {
          double score[kArcs];
          load_incoming(p, at, d, u, score);
          alpha_at(p, at, d, u, score);
        }
        __syncthreads();
      }
    }
  }
}

// What a node's own step needs: its columns and alpha.
struct Own {
  Acc column[kColumns];
  double alpha;
};

__device__ __forceinline__ void load_own(const RecursionParams& p, const Utterance& at, int d, int u, Own& own) {
  const int t = d - u;
  if (!in_lattice(at, t, u)) return;
  const i64 node = at.node_start + static_cast<i64>(t) * at.states + u;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) own.column[c] = p.column_cn[c * p.n_nodes + node];
  own.alpha = p.alpha_n[node];
}

__device__ __forceinline__ void beta_at(const RecursionParams& p, const Utterance& at, int d, int u, const Own& own,
                                        double total) {
  const int t = d - u;
  if (!in_lattice(at, t, u)) return;
  double beta = -infinity<double>();
  Acc posterior[kColumns] = {};
#pragma unroll
  for (int k = 0; k < kArcs; ++k) {
    const int to_t = t + kArcDt[k], to_u = u + kArcDu[k];
    const bool ends = is_final(at, to_t, to_u) && kArcMayEnd[k];
    if (!ends && !in_lattice(at, to_t, to_u)) continue;
    const int slot = (d + kArcDt[k] + kArcDu[k]) % kRing;
    const double mass = arc_score(k, own.column) + (ends ? 0.0 : at.ring[slot * p.max_states + to_u]);
    beta = log_add(beta, mass);
    const Acc weight = kArcDu[k] > 0 ? static_cast<Acc>(p.emit_weight) : Acc(1);
    const Acc arc_posterior = weight * exp(static_cast<Acc>(own.alpha + mass - total));
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      if (kArcColumns[k] >> c & 1) posterior[c] += arc_posterior;
  }
  at.ring[d % kRing * p.max_states + u] = beta;
  const i64 node = at.node_start + static_cast<i64>(t) * at.states + u;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) p.column_cn[c * p.n_nodes + node] = posterior[c];
}

extern "C" __global__ void __launch_bounds__(1024) posteriors(const __grid_constant__ RecursionParams p) {
  DYNAMIC_SHARED(double, shared_ring);
  const Utterance at = utterance_of(p, shared_ring);
  const int last = at.frames + at.states - 2, first_u = threadIdx.x;
  const double log_likelihood = p.log_likelihood_b[blockIdx.x];
  const double total = log_likelihood == -infinity<double>() ? 0.0 : log_likelihood;  // then every mass is -inf
  Own ahead[kAhead];
#pragma unroll
  for (int j = 0; j < kAhead; ++j) load_own(p, at, last - j, first_u, ahead[j]);
  for (int base = last; base >= 0; base -= kAhead) {
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int d = base - j;
      if (d >= 0) {
        beta_at(p, at, d, first_u, ahead[j], total);
        load_own(p, at, d - kAhead, first_u, ahead[j]);
        for (int u = first_u + blockDim.x; u < at.states; u += blockDim.x) {
          Own own;
          load_own(p, at, d, u, own);
          beta_at(p, at, d, u, own, total);
        }
        __syncthreads();
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(256) losses(const __grid_constant__ RecursionParams p) {
  const int b = blockIdx.x * blockDim.x + threadIdx.x;
  if (b >= p.batch) return;
  const double loss = -p.log_likelihood_b[b];
  p.losses_b[b] = static_cast<Acc>(loss == infinity<double>() && p.zero_infinity ? 0.0 : loss);
}
