"""The dropout mask: published generator vectors, a second implementation in plain integers, and its use."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from flash_rnnt_cupy.backends.numpy_cpu import dropout
from flash_rnnt_cupy.problem import Options
from tests.conftest import BackendUnderTest
from tests.oracles import finite_differences
from tests.oracles.checks import assert_close
from tests.problems import Array, Joint, draw_joint

# github.com/DEShawResearch/random123, tests/kat_vectors, philox4x32 with 10 rounds: counter, key, result
KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]
SEEDS = [0, 1, 2**32 - 1, 2**32, 0x299F31D0A4093822, 2**64 - 1]
NODES = [0, 1, 63, 2**31, 2**32 + 5, 2**40 + 7]


def plain_philox(counter: list[int], key: list[int]) -> list[int]:
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(10):
        p, q = 0xD2511F53 * x0, 0xCD9E8D57 * x2
        x0, x1, x2, x3 = (q >> 32) ^ x1 ^ k0, q % 2**32, (p >> 32) ^ x3 ^ k1, p % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [x0, x1, x2, x3]


def plain_xoshiro(s: list[int]) -> list[int]:
    """One step of xoshiro128, as its authors write it."""
    s = list(s)
    shifted = (s[1] << 9) % 2**32
    s[2] ^= s[0]
    s[3] ^= s[1]
    s[1] ^= s[2]
    s[0] ^= s[3]
    s[2] ^= shifted
    s[3] = (s[3] << 11) % 2**32 | s[3] >> 21
    return s


def plain_keeps(seed: int, node: int, column: int, drop_below: int) -> bool:
    in_block = column % 64
    state = plain_philox([node % 2**32, node >> 32, in_block // 8, 0], [seed % 2**32, seed >> 32])
    for _ in range(column // 64):
        state = plain_xoshiro(state)
    at = in_block % 8 // 2
    product = (state[at] * 0x9E3779B1 + (state[at + 1] if at < 3 else 0)) % 2**32
    word = product ^ product >> 16
    draw = word >> 16 if in_block % 2 else word & 0xFFFF
    return draw >= drop_below


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_the_plain_generator_gives_the_published_vectors(
    counter: list[int], key: list[int], expected: list[int]
) -> None:
    assert plain_philox(counter, key) == expected


def test_the_generator_gives_the_published_vector_that_its_counter_can_express() -> None:
    words = dropout._philox(np.zeros(1, np.uint64), 0)
    assert [int(word[0, 0]) for word in words] == KNOWN_ANSWERS[0][2]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_generator_is_the_plain_one(seed: int) -> None:
    words = dropout._philox(np.array(NODES, np.uint64), seed)
    for i, node in enumerate(NODES):
        for lane in range(8):
            expected = plain_philox([node % 2**32, node >> 32, lane, 0], [seed % 2**32, seed >> 32])
            assert [int(word[i, lane]) for word in words] == expected


@pytest.mark.parametrize("width", [1, 7, 8, 64, 65, 200])
@pytest.mark.parametrize("seed", [0, 2**64 - 1])
def test_the_mask_is_the_plain_one(seed: int, width: int) -> None:
    for drop_below in (1, 6554, 32768, 65535):
        mask = dropout.keep_mask(seed, np.array(NODES), width, drop_below)
        expected = [[plain_keeps(seed, node, h, drop_below) for h in range(width)] for node in NODES]
        np.testing.assert_array_equal(mask, expected)


@pytest.mark.parametrize(
    ("probability", "expected"),
    [(0.0, 0), (1 / 65536, 1), (0.1, 6554), (0.5, 32768), (1e-9, 0), (0.999999, 65535)],
)
def test_thresholds(probability: float, expected: int) -> None:
    options = Options(dropout=probability)
    assert options.drop_below == expected
    assert options.keep_scale == 65536 / (65536 - expected)


@pytest.mark.parametrize("probability", [0.01, 0.1, 0.5, 0.9])
def test_the_drop_rate_is_within_four_sigma(probability: float) -> None:
    n_nodes, width = 2000, 200
    for seed in range(3):
        kept = dropout.keep_mask(seed, np.arange(n_nodes), width, Options(dropout=probability).drop_below)
        for counts, n in ((kept.sum(), n_nodes * width), (kept[:, 64:128].sum(), n_nodes * 64)):
            sigma = math.sqrt(n * probability * (1 - probability))
            assert abs(counts - n * (1 - probability)) <= 4 * sigma + n / 65536


def test_columns_and_nodes_are_uncorrelated() -> None:
    kept = dropout.keep_mask(5, np.arange(4000), 130, 32768) - 0.5
    correlation = kept.T @ kept / (4000 * 0.25)
    assert np.abs(correlation - np.eye(130)).max() <= 5 / math.sqrt(4000)
    assert abs((kept[1:] * kept[:-1]).sum()) <= 4 * 0.25 * math.sqrt(kept.size)


def plain_kept(problem: Joint, seed: int, probability: float) -> list[Array]:
    """For every utterance the mask over the keep probability, [T, U1, H]."""
    drop_below = round(probability * 65536)
    factor, node, masks = 65536 / (65536 - drop_below), 0, []
    H = problem.encoder.shape[-1]
    for T, U in zip(problem.frames, problem.labels, strict=True):
        mask = np.zeros((T, U + 1, H))
        for t, u in np.ndindex(T, U + 1):
            mask[t, u] = [factor * plain_keeps(seed, node, h, drop_below) for h in range(H)]
            node += 1
        masks.append(mask)
    return masks


@pytest.mark.parametrize("H", [6, 7, 8, 65])
@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_forward_and_backward_use_the_mask_of_seed_node_and_column(
    backend: BackendUnderTest, activation: str, H: int
) -> None:
    problem, seed = draw_joint((3, 2, 4), (2, 3, 0), H=H), 0x1234567890ABCDEF
    truth = problem.truth(activation=activation, kept=plain_kept(problem, seed, 0.3))
    options = {"activation": activation, "dropout": 0.3, "seed": seed}
    for tile_rows in (1, 5, None, "auto"):
        losses, gradients = backend.joint(problem, tile_rows=tile_rows, **options)
        backend.assert_near(losses, truth.losses, "float64")
        backend.assert_gradients(gradients, truth, "float64")


@pytest.mark.parametrize("H", [6, 7, 8, 65])
def test_gradients_are_finite_differences_at_a_fixed_seed(backend: BackendUnderTest, H: int) -> None:
    problem = draw_joint((3, 2), (2, 1), H=H, V=4)
    options = {"activation": "tanh", "dropout": 0.4, "seed": 7, "reduction": "sum", "tile_rows": 4}
    _, gradients = backend.joint(problem, **options)
    for name in ("encoder", "predictor", "weight", "bias"):

        def loss(x: Array, name: str = name) -> float:
            return float(backend.joint_loss(replace(problem, **{name: x}), **options))

        at = np.nan_to_num(getattr(problem, name))
        claimed = np.asarray(getattr(gradients, name))
        measured, expected = finite_differences.along_random_directions(loss, at, claimed, n_directions=2, step=0.02)
        assert_close(measured, expected, rtol=1e-7, atol=1e-8, names=name)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_mask_is_the_same_in_every_dtype(backend: BackendUnderTest, dtype: str) -> None:
    problem = draw_joint((40, 25), (0, 0), H=65, V=3, dtype=dtype, scale=0.1)  # one node a frame
    _, gradients = backend.joint(problem, activation="identity", dropout=0.5, seed=11)
    kept = np.concatenate(plain_kept(problem, 11, 0.5)).reshape(-1, 65)
    packed = problem.replace(encoder=gradients.encoder).packed("encoder").encoder
    np.testing.assert_array_equal(packed != 0, kept != 0)


def test_no_dropout_is_bitwise_the_plain_loss(backend: BackendUnderTest) -> None:
    problem = draw_joint(dtype="float32")
    expected_losses, expected = backend.joint(problem)
    losses, gradients = backend.joint(problem, dropout=0.0, seed=123)
    np.testing.assert_array_equal(losses, expected_losses)
    for name in ("encoder", "predictor", "weight", "bias"):
        np.testing.assert_array_equal(getattr(gradients, name), getattr(expected, name))


def test_seeds_differ_and_a_missing_one_is_drawn_afresh(backend: BackendUnderTest) -> None:
    problem = draw_joint(H=32)
    drawn = [backend.joint_loss(problem, dropout=0.5, seed=seed, reduction="sum") for seed in (1, 2, None, None)]
    assert len({float(loss) for loss in drawn}) == 4
    assert backend.joint_loss(problem, dropout=0.5, seed=1, reduction="sum") == drawn[0]
