// What       instructions that have no C++ name, one function each, with a plain twin for the CPU shim
#pragma once
#include "common.cuh"

// Bits 15 and 31, each spread over its half of the word.
__device__ __forceinline__ u32 spread_signs(u32 x) {
#ifdef FRNNT_CPU_SHIM
  return (x >> 15 & 1) * 0xffffu | (x >> 31) * 0xffff0000u;
#else
  u32 y;
  asm("prmt.b32 %0, %1, %1, 0xBB99;" : "=r"(y) : "r"(x));
  return y;
#endif
}

// What depends on x is computed after this, not earlier, where it would take more registers.
__device__ __forceinline__ void hold_back(u32& x) {
#ifndef FRNNT_CPU_SHIM
  asm("" : "+r"(x));
#endif
}

// The next kernel may begin where it was launched early, as soon as all blocks of this one have come here.
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// 2^x by the special function unit: 2 ulp, subnormals flushed to zero.
__device__ __forceinline__ float exp2_unit(float x) {
#ifdef FRNNT_CPU_SHIM
  return exp2f(x);
#else
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

// to = exists ? *from : 0, at the latest when end_copies returns; to shared memory in the background.
template <bool kShared, class T>
__device__ __forceinline__ void begin_copy(T* to, const T* from, bool exists) {
#if !defined(FRNNT_CPU_SHIM) && __CUDA_ARCH__ >= 800
  if (kShared) {
    const u32 address = static_cast<u32>(__cvta_generic_to_shared(to)), bytes = exists ? sizeof(T) : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(address), "l"(from), "n"(int(sizeof(T))),
                 "r"(bytes) : "memory");
    return;
  }
#endif
  *to = exists ? *from : T(0);
}
__device__ __forceinline__ void end_copies() {
#if !defined(FRNNT_CPU_SHIM) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}
