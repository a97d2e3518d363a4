// What       which nodes backward visits: of every frame the shortest run of states [lo, hi) that holds all whose
//            posterior is above min_occupancy, and the posterior mass outside of it
// Grid       a frame a warp
// Reads      column_cn [C, N] ACCUMULATOR, holding posteriors
// Writes     lo_f, hi_f [F], dropped_f [F] float64
// Numbers    a NaN posterior counts as large, so that a broken utterance shows in the gradients
// Constants  OCCUPANCY_COLUMNS: bit set of the columns that add up to a node's posterior
#include "common.cuh"

typedef ACCUMULATOR Acc;
constexpr int kColumnLimit = 32;

struct SelectParams {
  const i64* node_start_b;   // [B + 1]
  const i64* frame_start_b;  // [B + 1]
  const i64* state_start_b;  // [B + 1]
  const int* utterance_f;    // [F]
  const Acc* column_cn;
  int* lo_f;
  int* hi_f;
  double* dropped_f;
  i64 n_nodes, n_frames;
  double min_occupancy;
};

__device__ __forceinline__ double occupancy(const SelectParams& p, i64 node) {
  double sum = 0;
#pragma unroll
  for (int c = 0; c < kColumnLimit; ++c)
    if (OCCUPANCY_COLUMNS >> c & 1u) sum += static_cast<double>(p.column_cn[c * p.n_nodes + node]);
  return sum;
}

extern "C" __global__ void __launch_bounds__(256) select_rows(const __grid_constant__ SelectParams p) {
  const i64 frame = static_cast<i64>(blockIdx.x) * (blockDim.x / kWarp) + threadIdx.x / kWarp;
  if (frame >= p.n_frames) return;
  const int lane = threadIdx.x % kWarp, b = p.utterance_f[frame];
  const int states = static_cast<int>(p.state_start_b[b + 1] - p.state_start_b[b]);
  const i64 first = p.node_start_b[b] + (frame - p.frame_start_b[b]) * states;
  int lo = states, hi = 0;
  double all = 0, kept = 0;
  for (int u = lane; u < states; u += kWarp) {
    const double posterior = occupancy(p, first + u);
    all += posterior;
    if (!(posterior <= p.min_occupancy)) {
      lo = lo < u ? lo : u;
      hi = u + 1;
    }
  }
  lo = -warp_max(-lo);
  hi = warp_max(hi);
  for (int u = lo + lane; u < hi; u += kWarp) kept += occupancy(p, first + u);
  all = warp_sum(all);
  kept = warp_sum(kept);
  if (lane != 0) return;
  p.lo_f[frame] = hi > 0 ? lo : 0;
  p.hi_f[frame] = hi;
  p.dropped_f[frame] = hi > 0 ? all - kept : all;
}
