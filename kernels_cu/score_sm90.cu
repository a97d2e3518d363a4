// What       joint + product + normalisation in one kernel: from the states of every node to its columns
//              h = mask f(e[t] + p[u]),  z = W h / keep + bias
//              normalizer = log2 of the sum of 2^(z log2 e),  column_c = z[v_c] - normalizer / log2 e
// Grid       a block a multiprocessor; items of 128 rows go round them (fused.cuh)
// Reads      encoder, predictor STATE; slabs, panel_bias
// Writes     column_cn, normalizer_n at the nodes of the tile's rows; rows are all nodes, so row == node
// Order      fused.cuh; merge_full: the group that does not have the item's last panel has left its part of each row,
//            and goes on; the other waits, reads, and lets merge_free follow before the next part overwrites it
// Numbers    products, bias and sums in float32: scores are never rounded. The normaliser of 2^ is relative to 0, not to
//            the largest score: float32 sums of products hold no more digits. Columns of a row that holds NaN or +inf
//            are NaN, of -inf scores -inf
// Constants  fused.cuh
#include "fused.cuh"

constexpr u32 kMergeAt = kRowsAt + kStripRows * sizeof(int);  // 3 floats a row, behind the labels
constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr float kLowest = -1e30f;  // finite, so that a lane without a score keeps out NaN

// One of a row's 32 scores, by its column of the panel; this lane must have it.
template <int i>
__device__ __forceinline__ float pick(Scores& scores, int column) {
  float x[16];
#pragma unroll
  for (int m = 0; m < 16; ++m) x[m] = column & 1 ? scores.at(i, m / 4, m % 4 * 2 + 1) : scores.at(i, m / 4, m % 4 * 2);
#pragma unroll
  for (int m = 0; m < 8; ++m) x[m] = column & 2 ? x[2 * m + 1] : x[2 * m];
#pragma unroll
  for (int m = 0; m < 4; ++m) x[m] = column & 4 ? x[2 * m + 1] : x[2 * m];
#pragma unroll
  for (int m = 0; m < 2; ++m) x[m] = column & 32 ? x[2 * m + 1] : x[2 * m];
  return column & 64 ? x[1] : x[0];
}

// Sets `found` if the column is this lane's.
template <int i>
__device__ __forceinline__ void pick_into(float& found, Scores& scores, int column) {
  const bool mine = static_cast<u32>(column) < kPanelColumns && column / 8 % 4 == static_cast<int>(threadIdx.x % 4);
  if (!__any_sync(kFullWarp, mine)) return;
  const float score = pick<i>(scores, column);
  if (mine) found = score;
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(kFullWarp, x, 1);
  return x + __shfl_xor_sync(kFullWarp, x, 2);
}
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, 1));
  return fmaxf(x, __shfl_xor_sync(kFullWarp, x, 2));
}

// log2(2^a + 2^b); NaN stays NaN.
__device__ __forceinline__ float add_exponents(float a, float b) {
  const float apart = a == b ? 0.f : fabsf(a - b);
  return fmaxf(a, b) + log2_unit(1.f + exp2_unit(-apart));
}

__device__ __forceinline__ float column_of(float score, float normalizer) {
  return normalizer == -infinity<float>() ? normalizer : (score - normalizer) * kLn2;
}

__device__ __forceinline__ void consume(const FusedParams& p, u32 shared, int n_items, int group) {
  const int quad_lane = threadIdx.x % 4;
  const float scale = kLog2e * p.scale;  // from accumulators to exponents of 2
  Scores scores;
  i64 panels_before = 0;
  for (int turn = 0; turn < n_items; ++turn, panels_before += kPanels) {
    float top[4], sum[4], at_label[4], at_blank[4];
    int label[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      top[i] = kLowest;
      sum[i] = at_label[i] = at_blank[i] = 0;
      label[i] = -1;
    }
    const int first = static_cast<int>(panels_before ^ group) & 1;
    for (int panel = first; panel < kPanels; panel += 2) {
      const bool final = turn + 1 == n_items && panel + 1 == kPanels;
      const Position at = {panels_before + panel, panel == first, panel + 2 >= kPanels, final, turn & 1u};
      multiply(p, shared, group, panel, at, scores, [&] {
#pragma unroll
        for (int i = 0; i < 4; ++i) label[i] = *shared_at<int>(shared + kRowsAt, row_in_strip(i));
      });
      float shift[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float peak = top[i];
#pragma unroll
        for (int g = 0; g < 4; ++g)
#pragma unroll
          for (int j = 0; j < kVector; ++j) peak = fmaxf(peak, scores.at(i, g, j));
        sum[i] *= exp2_unit((top[i] - peak) * scale);
        top[i] = peak;
        shift[i] = -peak * scale;
      }
      const int panel_start = panel * kPanelColumns;
      pick_into<0>(at_label[0], scores, label[0] - panel_start);
      pick_into<1>(at_label[1], scores, label[1] - panel_start);
      pick_into<2>(at_label[2], scores, label[2] - panel_start);
      pick_into<3>(at_label[3], scores, label[3] - panel_start);
      if (p.blank / kPanelColumns == panel) {
        pick_into<0>(at_blank[0], scores, p.blank - panel_start);
        pick_into<1>(at_blank[1], scores, p.blank - panel_start);
        pick_into<2>(at_blank[2], scores, p.blank - panel_start);
        pick_into<3>(at_blank[3], scores, p.blank - panel_start);
      }
#pragma unroll
      for (int g = 0; g < 4; ++g)
#pragma unroll
        for (int j = 0; j < kVector; ++j)
#pragma unroll
          for (int i = 0; i < 4; ++i) sum[i] += exp2_unit(fmaf(scores.at(i, g, j), scale, shift[i]));
    }
    if (kPanels == 1 && first != 0) continue;  // the item was the other group's

    // The four lanes of a row, then both groups; lane q of a quad goes on with row q.
    float normalizer = 0, own_label_score = 0, own_blank_score = 0;
    int own_label = -1;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float row_top = quad_max(top[i]);
      const float row_sum = quad_sum(sum[i] * exp2_unit((top[i] - row_top) * scale));
      const float label_score = quad_sum(at_label[i]) * scale, blank_score = quad_sum(at_blank[i]) * scale;
      if (quad_lane != i) continue;
      normalizer = row_top * scale + log2_unit(row_sum);
      own_label_score = label_score;
      own_blank_score = blank_score;
      own_label = label[i];
    }
    const int row = row_in_strip(quad_lane);
    const i64 node = item_at(p, turn).first_row + row;
    const bool finishes = (static_cast<int>(panels_before + kPanels - 1) & 1) == group;
    float* const part = shared_at<float>(shared + kMergeAt, 3 * row);
    if (!finishes) {
      if (turn > 0 && kPanels % 2 == 0) named_sync(kMergeFreeBarrier, 2 * kGroupThreads);
      part[0] = normalizer;
      part[1] = own_label_score;
      part[2] = own_blank_score;
      named_arrive(kMergeFullBarrier, 2 * kGroupThreads);
      continue;
    }
    if (kPanels > 1) {
      named_sync(kMergeFullBarrier, 2 * kGroupThreads);
      normalizer = add_exponents(normalizer, part[0]);
      own_label_score += part[1];
      own_blank_score += part[2];
      if (turn + 1 < n_items && kPanels % 2 == 0) named_arrive(kMergeFreeBarrier, 2 * kGroupThreads);
    }
    if (node >= p.tile.row_end) continue;
    p.column_cn[node] = column_of(own_blank_score, normalizer);
    p.column_cn[p.n_nodes + node] = own_label < 0 ? -infinity<float>() : column_of(own_label_score, normalizer);
    if (p.normalizer_n) p.normalizer_n[node] = normalizer;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) score(const __grid_constant__ FusedParams p) {
  run_roles(
      p,
      [&](u32 shared, int n_items) {
        build_hidden<false>(p, shared, n_items, [](const RowFound& found) { return found.label; });
      },
      [&](u32 shared, int n_items, int group) { consume(p, shared, n_items, group); });
}
