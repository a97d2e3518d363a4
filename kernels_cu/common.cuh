// What       types, 8-wide loads and stores, reductions of a warp, shared by all kernels
// Constants  set by the launcher:
//   STATE, WORK, PARAMETER, ACCUMULATOR   element types of states or caller's logits, of a tile, of weight and
//                                         bias, of sums and the lattice
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef __half float16;
typedef __nv_bfloat16 bfloat16;
typedef float float32;
typedef double float64;

constexpr u32 kFullWarp = 0xffffffffu;
constexpr int kWarp = 32;
constexpr int kVector = 8;  // columns a thread handles at once: 16 bytes of a two-byte type

#ifndef FRNNT_CPU_SHIM
#define DYNAMIC_SHARED(type, name) extern __shared__ __align__(16) unsigned char name##_bytes[]; \
  type* const name = reinterpret_cast<type*>(name##_bytes)
#endif

template <class A>
__device__ __forceinline__ A infinity();
template <>
__device__ __forceinline__ float infinity<float>() { return __int_as_float(0x7f800000); }
template <>
__device__ __forceinline__ double infinity<double>() { return __longlong_as_double(0x7ff0000000000000ll); }

// ---- conversion ---------------------------------------------------------------------------------------------------
template <class A, class T>
__device__ __forceinline__ A widen(T x) { return static_cast<A>(x); }
template <>
__device__ __forceinline__ float widen<float, float16>(float16 x) { return __half2float(x); }
template <>
__device__ __forceinline__ float widen<float, bfloat16>(bfloat16 x) { return __bfloat162float(x); }
template <>
__device__ __forceinline__ double widen<double, float16>(float16 x) { return __half2float(x); }
template <>
__device__ __forceinline__ double widen<double, bfloat16>(bfloat16 x) { return __bfloat162float(x); }

template <class T, class A>
__device__ __forceinline__ T narrow(A x) { return static_cast<T>(x); }
template <>
__device__ __forceinline__ float16 narrow<float16, float>(float x) { return __float2half_rn(x); }
template <>
__device__ __forceinline__ bfloat16 narrow<bfloat16, float>(float x) { return __float2bfloat16_rn(x); }
template <>
__device__ __forceinline__ float16 narrow<float16, double>(double x) { return __double2half(x); }
template <>
__device__ __forceinline__ bfloat16 narrow<bfloat16, double>(double x) { return __double2bfloat16(x); }

// ---- 8 neighbouring columns -----------------------------------------------------------------------------------------
// kWide: the address is 16-byte aligned and all 8 columns exist. Otherwise columns >= n_left read as `fill`.
template <class T>
__device__ __forceinline__ void copy_vector(const T* from, T (&raw)[kVector]) {
#pragma unroll
  for (int i = 0; i < int(sizeof(T) * kVector / 16); ++i)
    reinterpret_cast<uint4*>(raw)[i] = reinterpret_cast<const uint4*>(from)[i];
}

template <bool kWide, class A, class T>
__device__ __forceinline__ void load_vector(const T* from, int n_left, A fill, A (&x)[kVector]) {
  if (kWide) {
    T raw[kVector];
    copy_vector(from, raw);
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] = widen<A>(raw[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] = i < n_left ? widen<A>(from[i]) : fill;
  }
}

template <bool kWide, class T, class A>
__device__ __forceinline__ void store_vector(T* to, int n_left, const A (&x)[kVector]) {
  if (kWide) {
    T raw[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) raw[i] = narrow<T>(x[i]);
    constexpr int kPieces = sizeof(T) * kVector / 16;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(raw)[i];
  } else {
#pragma unroll
    for (int i = 0; i < kVector; ++i)
      if (i < n_left) to[i] = narrow<T>(x[i]);
  }
}

// ---- two two-byte numbers in a word, the first in its low half -----------------------------------------------------
template <class T>
struct PairOf;
template <>
struct PairOf<float16> { typedef __half2 type; };
template <>
struct PairOf<bfloat16> { typedef __nv_bfloat162 type; };

template <class T>
__device__ __forceinline__ u32 add_pairs(u32 a, u32 b) {
  typedef typename PairOf<T>::type Pair;
  const Pair sum = __hadd2(reinterpret_cast<const Pair&>(a), reinterpret_cast<const Pair&>(b));
  return reinterpret_cast<const u32&>(sum);
}
template <class T>
__device__ __forceinline__ u32 positive_pair(u32 x) {  // max(x, +0); a NaN becomes the positive one
  typedef typename PairOf<T>::type Pair;
  const u32 zero = 0;
  const Pair y = __hmax2_nan(reinterpret_cast<const Pair&>(x), reinterpret_cast<const Pair&>(zero));
  return reinterpret_cast<const u32&>(y);
}

// ---- reductions: a fixed tree, so the same bits every run -----------------------------------------------------------
template <class A>
__device__ __forceinline__ A warp_sum(A x) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step >>= 1) x += __shfl_xor_sync(kFullWarp, x, step);
  return x;
}
template <class A>
__device__ __forceinline__ A warp_max(A x) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step >>= 1) {
    A other = __shfl_xor_sync(kFullWarp, x, step);
    x = x < other ? other : x;
  }
  return x;
}
// The sum over this lane and those before it.
template <class A>
__device__ __forceinline__ A warp_scan(A x) {
#pragma unroll
  for (int step = 1; step < kWarp; step <<= 1) {
    const A before = __shfl_up_sync(kFullWarp, x, step);
    if (static_cast<int>(threadIdx.x) % kWarp >= step) x += before;
  }
  return x;
}
