"""The dropout mask: a function of (seed, node, column) alone, the same bits on every backend.

A node's row of draws starts from one Philox4x32-10 call per lane j = (column % 64) // 8, on the counter
(node low, node high, j, 0) under the 64-bit seed. Its four words are the state of a xoshiro128 generator
that steps once for every further 64 columns. Each word, scrambled, gives two 16-bit draws, low half first; a
draw below the threshold drops its column. The scramble is what makes the linear generator's draws
independent: it passes TestU01's SmallCrush in every order of use (bench/NOTES.md).

Source: Salmon et al. 2011 (Philox); Blackman and Vigna 2021 (xoshiro).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

BLOCK = 64  # columns per step of the generator

_MASK = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)
_PHILOX = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_SCRAMBLE = np.uint32(0x9E3779B1)

Words = npt.NDArray[np.uint32]


def keep_mask(seed: int, node_n: npt.NDArray[np.int64], width: int, drop_below: int) -> npt.NDArray[np.bool_]:
    """[len(node_n), width], True where a hidden unit is kept."""
    state = _philox(node_n.astype(np.uint64), seed)  # 4 x [n, 8]
    words = np.empty((len(node_n), -(-width // BLOCK), BLOCK // 8, 4), "<u4")
    for block in range(words.shape[1]):
        words[:, block] = _scrambled(state)
        state = _xoshiro(state)
    draws = words.view("<u2").reshape(len(node_n), -1)  # of a word the low half first
    return draws[:, :width] >= drop_below


def _scrambled(state: list[Words]) -> Words:
    """[n, 8, 4]: each word times a constant plus the next word, its low half exclusive-or its high half."""
    words = np.empty((*state[0].shape, 4), np.uint32)
    for q, word in enumerate(state):
        product = word * _SCRAMBLE
        if q < 3:
            product += state[q + 1]
        product ^= product >> np.uint32(16)
        words[..., q] = product
    return words


def _philox(node_n: npt.NDArray[np.uint64], seed: int) -> list[Words]:
    shape = (len(node_n), BLOCK // 8)
    lane = np.arange(shape[1], dtype=np.uint64)
    zero = np.zeros(shape, np.uint64)
    c0, c1, c2, c3 = node_n[:, None] & _MASK | zero, node_n[:, None] >> _WORD | zero, lane | zero, zero
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        a, b = c0 * _PHILOX[0], c2 * _PHILOX[1]
        k0, k1 = np.uint64(key[0]), np.uint64(key[1])
        c0, c1, c2, c3 = (b >> _WORD) ^ c1 ^ k0, b & _MASK, (a >> _WORD) ^ c3 ^ k1, a & _MASK
        key = [(k + w) & 0xFFFFFFFF for k, w in zip(key, _WEYL, strict=True)]
    return [c.astype(np.uint32) for c in (c0, c1, c2, c3)]


def _xoshiro(state: list[Words]) -> list[Words]:
    s0, s1, s2, s3 = state
    a, b = s2 ^ s0, s3 ^ s1
    return [s0 ^ b, s1 ^ a, a ^ (s1 << np.uint32(9)), (b << np.uint32(11)) | (b >> np.uint32(21))]
