"""The generator that `bench/rng.c` puts through statistical tests is the library's, word for word."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from bench import rng
from flash_rnnt_cupy.backends.numpy_cpu import dropout

SEED = 0x299F31D0A4093822
N = 1000

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="cc is not installed")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rng.compile_program(tmp_path_factory.mktemp("rng"))


def words(seed: int, node: np.ndarray, n_steps: int) -> np.ndarray:
    """[n, steps, lanes, 4]: the words whose halves are the draws."""
    state, steps = dropout._philox(node.astype(np.uint64), seed), []
    for _ in range(n_steps):
        steps.append(dropout._scrambled(state))
        state = dropout._xoshiro(state)
    return np.stack(steps, 1)


EXPECTED = {
    "columns": lambda: words(SEED, np.arange(4), 10),
    "nodes": lambda: words(SEED, np.arange(250), 6)[:, 5, 3],
    "column": lambda: words(SEED, np.arange(N), 6)[:, 5, 3, 2],
    "lanes": lambda: words(SEED, np.arange(4), 10).swapaxes(1, 2),
    "wide": lambda: words(SEED, np.arange(1), 64).swapaxes(1, 2),
    "seeds": lambda: np.stack([words(seed, np.arange(1), 10)[0] for seed in range(8)]).transpose(2, 1, 0, 3),
    "high": lambda: words(2**64 - 1, 2**32 - 4096 + np.arange(4), 10),
}


@pytest.mark.parametrize("order", rng.ORDERS)
def test_the_words_are_the_backends(program: Path, order: str) -> None:
    done = subprocess.run(
        [program, "words", "added", order, "words", str(N)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [f"{word:08x}" for word in EXPECTED[order]().ravel()[:N]]


def test_drops_are_the_complement_of_the_mask(program: Path) -> None:
    done = subprocess.run(
        [program, "words", "added", "columns", "drops", "100"], capture_output=True, text=True, check=True
    )
    bits = "".join(f"{int(word, 16):032b}" for word in done.stdout.split())
    kept = dropout.keep_mask(SEED, np.arange(5), 640, 0x8000)
    assert bits == "".join("01"[not keep] for keep in kept.ravel()[: len(bits)])
