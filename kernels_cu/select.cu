// What       which nodes backward visits: of every frame the shortest run of states [lo, hi) that holds all whose
//            posterior is above min_occupancy, and the posterior mass outside of it
//              select_rows  lo_f, the run's length, dropped_f
//              start_rows   where each frame's rows begin, from the lengths in place; the sum of dropped_f
// Grid       select_rows: a frame a warp; start_rows: one block
// Reads      column_cn [C, N] ACCUMULATOR, holding posteriors
// Writes     lo_f [F], row_start_f [F + 1], dropped_f [F], dropped [1]
// Numbers    a NaN posterior counts as large, so that a broken utterance shows in the gradients
// Constants  OCCUPANCY_COLUMNS: bit set of the columns that add up to a node's posterior
#include "common.cuh"

typedef ACCUMULATOR Acc;
constexpr int kColumnLimit = 32;
constexpr int kRun = 4;  // frames that a thread of start_rows has in work

struct SelectParams {
  const i64* node_start_b;   // [B + 1]
  const i64* frame_start_b;  // [B + 1]
  const i64* state_start_b;  // [B + 1]
  const int* utterance_f;    // [F]
  const Acc* column_cn;
  int* lo_f;
  i64* row_start_f;
  double* dropped_f;
  double* dropped;
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
  const i64 first_node = p.node_start_b[b] + (frame - p.frame_start_b[b]) * states;
  int lo = 0, hi = 0;
  double outside = 0, behind = 0;  // this lane's posteriors before the run, and behind its last state so far
  for (int base = 0; base < states; base += kWarp) {
    const int u = base + lane;
    const double posterior = u < states ? occupancy(p, first_node + u) : 0;
    const u32 matters = __ballot_sync(kFullWarp, u < states && !(posterior <= p.min_occupancy));
    if (matters == 0) {
      behind += posterior;
      continue;
    }
    const int first = __ffs(matters) - 1, last = kWarp - 1 - __clz(matters);
    if (hi == 0) {
      lo = base + first;
      outside = behind + (lane < first ? posterior : 0);
    }
    hi = base + last + 1;
    behind = lane > last ? posterior : 0;
  }
  outside = warp_sum(outside + behind);
  if (lane != 0) return;
  p.lo_f[frame] = lo;
  p.row_start_f[frame + 1] = hi - lo;
  p.dropped_f[frame] = outside;
}

extern "C" __global__ void __launch_bounds__(1024) start_rows(const __grid_constant__ SelectParams p) {
  __shared__ i64 rows_w[kWarp];
  __shared__ double dropped_w[kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  i64 frame = warp * kRun * kWarp + lane, counts[kRun];  // a warp's frames stand together, those of a run kWarp apart
  double masses[kRun];
  const auto load = [&] {
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const bool exists = frame + i * kWarp < p.n_frames;
      counts[i] = exists ? p.row_start_f[frame + i * kWarp + 1] : 0;
      masses[i] = exists ? p.dropped_f[frame + i * kWarp] : 0;
    }
  };
  load();
  i64 rows = 0;  // of the frames before those in work
  double dropped = 0;
  for (i64 base = 0; base < p.n_frames; base += kRun * blockDim.x) {
    i64* const starts = p.row_start_f + frame + 1;
    const i64 n_left = p.n_frames - frame;
    i64 ends[kRun], through = 0;  // of the warp's frames
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      ends[i] = through + warp_scan(counts[i]);
      through = __shfl_sync(kFullWarp, ends[i], kWarp - 1);
      dropped += masses[i];
    }
    frame += kRun * blockDim.x;
    load();  // on their way while the block adds these up
    if (lane == 0) rows_w[warp] = through;
    __syncthreads();
    const i64 of_warp = rows_w[lane], through_warps = warp_scan(of_warp);
    const i64 before = rows + __shfl_sync(kFullWarp, through_warps - of_warp, warp);
    rows += __shfl_sync(kFullWarp, through_warps, kWarp - 1);
#pragma unroll
    for (int i = 0; i < kRun; ++i)
      if (i * kWarp < n_left) starts[i * kWarp] = before + ends[i];
    __syncthreads();
  }
  dropped = warp_sum(dropped);
  if (lane == 0) dropped_w[warp] = dropped;
  __syncthreads();
  dropped = warp_sum(dropped_w[lane]);
  if (threadIdx.x != 0) return;
  p.row_start_f[0] = 0;
  *p.dropped = dropped;
}
