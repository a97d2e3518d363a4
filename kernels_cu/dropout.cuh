// What       the dropout mask as a function of (seed, node, column), the same bits on every backend
//
// One Philox4x32-10 call per node and lane j = (column % 64) / 8, on counter (node low, node high, j, 0) under the
// seed, gives the state of a xoshiro128 generator that steps once per further 64 columns. Each of its four words
// times an odd constant holds two 16-bit draws, low half first; a draw below the threshold drops its column.
// Source     Salmon et al. 2011 (Philox); Blackman and Vigna 2021 (xoshiro)
#pragma once
#include "common.cuh"

constexpr int kDropoutBlock = 64;   // columns per step
constexpr int kDropoutLanes = kDropoutBlock / kVector;

struct DropoutState {
  u32 s[4];
};

__device__ __forceinline__ DropoutState dropout_state(u64 seed, i64 node, int lane) {
  u32 c0 = static_cast<u32>(node), c1 = static_cast<u32>(node >> 32), c2 = lane, c3 = 0;
  u32 k0 = static_cast<u32>(seed), k1 = static_cast<u32>(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const u64 a = static_cast<u64>(0xD2511F53u) * c0, b = static_cast<u64>(0xCD9E8D57u) * c2;
    c0 = static_cast<u32>(b >> 32) ^ c1 ^ k0;
    c1 = static_cast<u32>(b);
    c2 = static_cast<u32>(a >> 32) ^ c3 ^ k1;
    c3 = static_cast<u32>(a);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

__device__ __forceinline__ void dropout_step(DropoutState& state) {
  u32(&s)[4] = state.s;
  const u32 t = s[1] << 9, a = s[2] ^ s[0], b = s[3] ^ s[1];
  s[1] ^= a;
  s[0] ^= b;
  s[2] = a ^ t;
  s[3] = (b << 11) | (b >> 21);
}

// x[i] = kept ? x[i] * scale : 0 for the state's 8 columns.
template <class A>
__device__ __forceinline__ void dropout_apply(const DropoutState& state, u32 threshold, A scale, A (&x)[kVector]) {
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    const u32 draws = state.s[word] * 0x9E3779B1u;
    x[2 * word] = (draws & 0xffffu) >= threshold ? x[2 * word] * scale : A(0);
    x[2 * word + 1] = (draws >> 16) >= threshold ? x[2 * word + 1] * scale : A(0);
  }
}
