// What       the weight as score_sm90.cu and grad_sm90.cu read it and as it is multiplied elsewhere, and the bias as
//            they add it
// Grid       16 bytes of the slabs a thread; bias: the first threads
// Reads      weight [V, H], bias [V] PARAMETER
// Writes     slabs [kPanels, kSlabs, 128 rows, 64] STATE, zero beyond V and H;  panel_bias [kPanels * 128];  multiplied
//            [V, H] STATE
// Order      row 32 g + 8 m + 2 q + c of a slab holds column 32 g + 8 q + 2 m + c of its panel, so that a lane's
//            accumulators are neighbours; 16-byte chunk c of row r stands at chunk c ^ (r % 8), as matrix_descriptor says
// Constants  STATE, PARAMETER;  WIDTH, VOCABULARY
#include "common.cuh"

typedef STATE State;
typedef PARAMETER Parameter;
constexpr int kWidth = WIDTH, kVocabulary = VOCABULARY;
constexpr int kSlabs = (kWidth + 63) / 64, kPanels = (kVocabulary + 127) / 128;
constexpr i64 kChunks = static_cast<i64>(kPanels) * kSlabs * 128 * 8;

struct PackParams {
  const Parameter* weight;
  const Parameter* bias;  // or null
  State* slabs;
  float* panel_bias;
  State* multiplied;      // or null
  float keep;
};

extern "C" __global__ void __launch_bounds__(256) pack(const __grid_constant__ PackParams p) {
  const i64 at = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at < kPanels * 128) {
    const float bias = at >= kVocabulary ? -infinity<float>() : p.bias ? widen<float>(p.bias[at]) * p.keep : 0.f;
    p.panel_bias[at] = bias;
  }
  if (at >= kChunks) return;
  const int row = static_cast<int>(at / 8 % 128), chunk = static_cast<int>(at % 8) ^ (row % 8);
  const i64 slab = at / (8 * 128), panel = slab / kSlabs;
  const i64 v = panel * 128 + row / 32 * 32 + row / 2 % 4 * 8 + row / 8 % 4 * 2 + row % 2;
  const int column = static_cast<int>(slab % kSlabs) * 64 + chunk * kVector;
  float x[kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i)
    x[i] = v < kVocabulary && column + i < kWidth ? widen<float>(p.weight[v * kWidth + column + i]) : 0.f;
  store_vector<true>(p.slabs + at * kVector, kVector, x);
  if (p.multiplied && v < kVocabulary && column < kWidth)
    store_vector<kWidth % kVector == 0>(p.multiplied + v * kWidth + column, kWidth - column, x);
}
