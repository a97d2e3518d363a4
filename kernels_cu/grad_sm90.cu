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
  float shift, blank, label_weight;  // |grad|; the sign of blank is that of the row's dz
  int label;
};
static_assert(sizeof(RowWeights) * kStripRows == kRowBytes, "shared memory");

__device__ __forceinline__ RowWeights weights_of(const FusedParams& p, const RowFound& found) {
  if (!found.exists) return {-infinity<float>(), 0.f, 0.f, -1};
  const float upstream = p.upstream_b[found.b];
  const float blank = upstream * p.column_cn[found.node];
  const float label_weight = upstream * p.column_cn[p.n_nodes + found.node];
  const float sum = blank + label_weight, mass = fabsf(sum);  // both have the sign of upstream
  const float shift = mass == 0.f ? -infinity<float>() : log2_unit(mass) - p.normalizer_n[found.node];
  return {shift, sum < 0.f ? -fabsf(blank) : fabsf(blank), fabsf(label_weight), found.label};
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

// Scores become gradients by quarters of a panel, 8 columns of 4 rows a lane. A scheduler has one such warp at a time,
// which waits for all that does not overlap: so no branches within a quarter, and only uniform ones between them.
constexpr int kQuarterColumns = kPanelColumns / 4;
static_assert(kQuarterColumns == 32, "a shift by 5 finds the quarter");

__device__ __forceinline__ void exponentials(Scores& scores, int g, float scale, const RowWeights (&row)[4]) {
#pragma unroll
  for (int r = 0; r < 4; ++r)
#pragma unroll
    for (int j = 0; j < kVector; ++j) scores.at(r, g, j) = exp2_unit(fmaf(scores.at(r, g, j), scale, row[r].shift));
}

// Off a column of the quarter, counted from the lane's first. Selects: conditional stores would move scores to memory.
__device__ __forceinline__ void take_off(Scores& scores, int r, int g, int at, float weight) {
#pragma unroll
  for (int j = 0; j < kVector; ++j) scores.at(r, g, j) = j == at ? scores.at(r, g, j) - weight : scores.at(r, g, j);
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

      const int column = panel * kPanelColumns + quad_lane * kVector;  // in quarter 0; what follows is of row 0
      const i64 in_tile = item.first_row - p.tile.row_begin + row_in_half();
      State* const to = p.grad_logits + in_tile * p.grad_step + column;
      const i64 rows = p.tile.row_end - p.tile.row_begin - in_tile, columns = p.grad_step - column;
      const int rows_left = min(rows, static_cast<i64>(kStripRows));
      const int columns_left = min(columns, static_cast<i64>(kPanelColumns));
      float column_sums[4];
      exponentials(scores, 0, scale, row);
#pragma unroll
      for (int g = 0; g < 4; ++g) {
        const int before = g * kQuarterColumns, quarter = panel * 4 + g;  // columns of the panel before, and its number
        const bool has_blank = p.blank >> 5 == quarter;
        bool has_label = false;
#pragma unroll
        for (int r = 0; r < 4; ++r) has_label |= row[r].label >> 5 == quarter;  // never of label -1
        if (__any_sync(kFullWarp, has_blank || has_label)) {
          if (has_blank) {
#pragma unroll
            for (int r = 0; r < 4; ++r) take_off(scores, r, g, p.blank - column - before, fabsf(row[r].blank));
          }
#pragma unroll
          for (int r = 0; r < 4; ++r) take_off(scores, r, g, row[r].label - column - before, row[r].label_weight);
        }
        if (g < 3) exponentials(scores, g + 1, scale, row);  // while this quarter is stored and summed
        float sums[kVector] = {};
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const u32 sign = __float_as_uint(row[r].blank) & 0x80000000u;
          const float signed_one = __uint_as_float(sign | __float_as_uint(1.f));
          u32 pairs[4];
#pragma unroll
          for (int q = 0; q < 4; ++q)
            pairs[q] = pair_of(scores.at(r, g, 2 * q), scores.at(r, g, 2 * q + 1)) ^ (sign | sign >> 16);
          const int further = row_in_strip(r) - row_in_half();
          store_16(to + further * p.grad_step + before, make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]),
                   further < rows_left && before < columns_left);
#pragma unroll
          for (int j = 0; j < kVector; ++j) sums[j] = fmaf(signed_one, scores.at(r, g, j), sums[j]);
        }
        column_sums[g] = sum_over_rows(sums);
      }
      if (p.bias_partials) {
        const int own_column = column + lane / 4;
#pragma unroll
        for (int g = 0; g < 4; ++g)
          if (kVocabulary % kPanelColumns == 0 || own_column + g * kQuarterColumns < kVocabulary)
            atomicAdd(bias_sums + own_column + g * kQuarterColumns, column_sums[g]);
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
