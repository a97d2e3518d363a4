// What       the dropout mask as a function of (seed, node, column), the same bits on every backend
//
// One Philox4x32-10 call per node and lane j = (column % 64) / 8, on counter (node low, node high, j, 0) under the
// seed, gives the state of a xoshiro128 generator that steps once per further 64 columns. Each of its four words,
// scrambled by an odd constant, its neighbour and its own high half (bench/NOTES.md says why), holds two 16-bit draws,
// low half first; a draw below the threshold drops its column.
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

// A threshold, ready for two draws at once.
struct DrawPair {
  u32 low_bits;  // its low 15 bits, in both halves of a word
  u32 either;    // all ones where the draw's high bit alone keeps: a threshold below 1 << 15
};

__device__ __forceinline__ DrawPair draw_pair(u32 threshold) {
  return {(threshold & 0x7fffu) * 0x10001u, threshold < 0x8000u ? ~0u : 0u};
}

constexpr u32 kSigns = 0x80008000u;

// Signs (bits 15 and 31) of word q say that columns 2 q and 2 q + 1 are kept; its other bits mean nothing. A draw is
// kept if its high bit and its low 15 bits, by a difference that cannot borrow, are both, or either is, enough.
__device__ __forceinline__ void kept_signs(const DropoutState& state, const DrawPair& threshold, u32 (&kept)[4]) {
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const u32 product = state.s[q] * 0x9E3779B1u + (q < 3 ? state.s[q + 1] : 0);
    const u32 x = product ^ product >> 16, d = (x | kSigns) - threshold.low_bits;
    kept[q] = (x & d) | ((x | d) & threshold.either);
  }
}
