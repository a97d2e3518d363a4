// What       convert        to[i] = from[i] * scale, of one element type to another
//            split_upstream scale = the power of two below max |g_b| (1 where that is 0 or not finite), unit_b =
//                           g_b / scale: gradients in two-byte types neither overflow nor vanish under a loss
//                           scale; `convert` puts it back
// Grid       convert: 1024 elements a block of 256;  split_upstream: one block
// Constants  FROM, TO, ACCUMULATOR; SCALED
#include "common.cuh"

typedef FROM From;
typedef TO To;
typedef ACCUMULATOR Acc;
constexpr int kPerThread = 4;

struct ConvertParams {
  const From* from;
  To* to;  // may be from
  const Acc* scale;
  i64 n;
};

extern "C" __global__ void __launch_bounds__(256) convert(const __grid_constant__ ConvertParams p) {
  const Acc scale = SCALED ? *p.scale : Acc(1);
  const i64 first = static_cast<i64>(blockIdx.x) * blockDim.x * kPerThread + threadIdx.x;
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    const i64 i = first + k * blockDim.x;
    if (i < p.n) p.to[i] = narrow<To>(widen<Acc>(p.from[i]) * scale);
  }
}

struct UpstreamParams {
  const double* grad_losses_b;  // [B], of utterance b at b step
  Acc* unit_b;                  // [B]
  Acc* scale;                   // [1]
  i64 step;
  int batch, split;             // split 0: scale 1
};

extern "C" __global__ void __launch_bounds__(256) split_upstream(const __grid_constant__ UpstreamParams p) {
  __shared__ double parts[256];
  double top = 0;
  for (int b = threadIdx.x; b < p.batch; b += blockDim.x) top = fmax(top, fabs(p.grad_losses_b[b * p.step]));
  parts[threadIdx.x] = top;
  __syncthreads();
  for (int i = 0; i < blockDim.x; ++i) top = fmax(top, parts[i]);
  const bool usable = p.split && top > 0 && top < infinity<double>();
  const double scale = usable ? scalbn(1.0, ilogb(top)) : 1.0;
  for (int b = threadIdx.x; b < p.batch; b += blockDim.x)
    p.unit_b[b] = static_cast<Acc>(p.grad_losses_b[b * p.step] / scale);
  if (threadIdx.x == 0) *p.scale = static_cast<Acc>(scale);
}
