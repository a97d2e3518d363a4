// What       joint + product + gradient of the scores in one kernel, for the rows that matter
//              h = mask f(e[t] + p[u]),  z = W h / keep + bias
//              dz[v] = upstream_b ((posterior_blank + posterior_label) softmax(z)[v] - posterior of the column on v)
// Grid       a block a multiprocessor; items of 128 rows go round them (fused.cuh)
// Reads      encoder, predictor STATE; slabs, panel_bias; column_cn (posteriors), normalizer_n of score_sm90.cu
// Writes     grad_logits, hidden, active bits of the tile's rows; bias_partials: each warp adds to a row of its own
// Order      fused.cuh
// Numbers    the factor of the softmax goes into its exponent: one exponential a score. One rounding, to STATE. A column
//            of bias_partials has one writer, which adds in the order of the block's run: the same bits every run
// Constants  fused.cuh
#include "fused.cuh"

constexpr float kLog2e = 1.4426950408889634f;

// What consumers need of a row. With grad = upstream posterior and mass = the sum of |grad| over both columns,
// |dz[v]| = 2^(z[v] log2 e + shift) - |grad| of the column on v, where shift = log2(mass) - normalizer.
struct RowWeights {
  float shift, blank, label_weight;  // both signed as the upstream gradient is
  int label;
};
static_assert(sizeof(RowWeights) * kStripRows == kRowBytes, "shared memory");

__device__ __forceinline__ RowWeights weights_of(const FusedParams& p, const RowFound& found) {
  if (!found.exists) return {-infinity<float>(), 0.f, 0.f, -1};
  const float upstream = p.upstream_b[found.b];
  RowWeights row;
  row.blank = upstream * p.column_cn[found.node];
  row.label_weight = upstream * p.column_cn[p.n_nodes + found.node];
  const float mass = fabsf(row.blank + row.label_weight);
  row.shift = mass == 0.f ? -infinity<float>() : log2_unit(mass) - p.normalizer_n[found.node];
  row.label = found.label;
  return row;
}

// Sums of 8 columns over the 8 lanes that hold other rows of them; lane l / 4 gets the one of column l / 4.
__device__ __forceinline__ float sum_over_rows(float (&x)[kVector]) {
  const int row_lane = threadIdx.x % kWarp / 4;
#pragma unroll
  for (int step = 4; step > 0; step /= 2) {
    const bool upper = row_lane & step;
#pragma unroll
    for (int j = 0; j < step; ++j) {
      const float kept = upper ? x[j + step] : x[j], sent = upper ? x[j] : x[j + step];
      x[j] = kept + __shfl_xor_sync(kFullWarp, sent, 4 * step);
    }
  }
  return x[0];
}

__device__ __forceinline__ void consume(const FusedParams& p, u32 shared, int n_items, int group) {
  const int lane = threadIdx.x % kWarp, quad_lane = lane % 4;
  const float scale = kLog2e * p.scale;
  const int writer = blockIdx.x * 8 + group * 4 + threadIdx.x / kWarp % 4;
  float* const bias_sums = p.bias_partials + static_cast<i64>(writer) * kVocabulary;
  Scores scores;
  i64 panels_before = 0;
  for (int turn = 0; turn < n_items; ++turn) {
    const Item item = item_at(p, turn);
    RowWeights row[4];
    const int first = static_cast<int>(panels_before ^ group) & 1;
    for (int i = first; i < item.n_panels; i += 2) {
      const int panel = item.first_panel + i;
      const bool final = turn + 1 == n_items && i + 1 == item.n_panels;
      const Position at = {panels_before + i, i == first, i + 2 >= item.n_panels, final, turn & 1u};
      multiply(p, shared, group, panel, at, scores, [&] {
#pragma unroll
        for (int r = 0; r < 4; ++r) row[r] = *shared_at<RowWeights>(shared + kRowsAt, row_in_strip(r));
      });
#pragma unroll
      for (int g = 0; g < 4; ++g) {
        const int column = panel * kPanelColumns + g * 32 + quad_lane * kVector;
        float sums[kVector] = {};
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const i64 in_tile = item.first_row + row_in_strip(r) - p.tile.row_begin;
          const float sign = row[r].blank + row[r].label_weight < 0.f ? -1.f : 1.f;
          float grad[kVector];
#pragma unroll
          for (int j = 0; j < kVector; ++j) grad[j] = sign * exp2_unit(fmaf(scores.at(r, g, j), scale, row[r].shift));
          const int at_blank = p.blank - column, at_label = row[r].label - column;
          if (static_cast<u32>(at_blank) < kVector) {
#pragma unroll
            for (int j = 0; j < kVector; ++j) grad[j] -= j == at_blank ? row[r].blank : 0.f;
          }
          if (static_cast<u32>(at_label) < kVector) {
#pragma unroll
            for (int j = 0; j < kVector; ++j) grad[j] -= j == at_label ? row[r].label_weight : 0.f;
          }
          if (in_tile < p.tile.row_end - p.tile.row_begin && column < p.grad_step)
            store_vector<true>(p.grad_logits + in_tile * p.grad_step + column, kVector, grad);
#pragma unroll
          for (int j = 0; j < kVector; ++j) sums[j] += grad[j];
        }
        if (p.bias_partials) {
          const float sum = sum_over_rows(sums);
          const int own_column = column + lane / 4;
          if (own_column < kVocabulary) atomicAdd(bias_sums + own_column, sum);
        }
      }
    }
    panels_before += item.n_panels;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) grad_scores(const __grid_constant__ FusedParams p) {
  run_roles(
      p,
      [&](u32 shared, int n_items) {
        build_hidden<true>(p, shared, n_items, [&](const RowFound& found) { return weights_of(p, found); });
      },
      [&](u32 shared, int n_items, int group) { consume(p, shared, n_items, group); });
}
