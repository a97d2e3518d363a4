"""The memory promise of the NumPy backend: it takes what the plan says, and reads nothing it has not written."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import flash_rnnt_cupy as frc
from flash_rnnt_cupy import pipeline, validate
from flash_rnnt_cupy.adapters.arrays import Facts
from flash_rnnt_cupy.backends import numpy_cpu
from flash_rnnt_cupy.backends.numpy_cpu import BACKEND
from flash_rnnt_cupy.plan import Life, MemoryAccount, Part, Plan, TileRows, make_plan
from flash_rnnt_cupy.problem import Inputs
from tests.oracles.checks import assert_close
from tests.problems import Array, Joint, Logits, draw_joint, draw_logits

GUARD = 64  # elements behind each buffer
OWN_TEMPORARIES = ("recursion frontier", "stage temporaries")  # parts that NumPy's operators allocate themselves


class Recorder:
    """An allocator of buffers whose bits are all set, NaN or -1, and must not be written beyond their end."""

    def __init__(self) -> None:
        self.taken: list[tuple[tuple[int, ...], str]] = []
        self.buffers: list[tuple[Array, int]] = []

    def __call__(self, part: Part) -> Array:
        self.taken.append((part.shape, part.dtype))
        size = int(np.prod(part.shape, dtype=int))
        flat = np.empty(size + GUARD, numpy_cpu.numpy_dtype(part.dtype))
        flat.view(np.uint8)[...] = 0xFF
        self.buffers.append((flat, size))
        return flat[:size].reshape(part.shape)

    def guards_hold(self) -> bool:
        return all((flat[size:].view(np.uint8) == 0xFF).all() for flat, size in self.buffers)


def facts(array: Array) -> Facts:
    return Facts(array.shape, array.dtype.name, "cpu")


def planned_joint(problem: Joint, tile_rows: TileRows, wanted: frozenset[str]) -> tuple[Plan, Inputs]:
    arrays = {name: getattr(problem, name) for name in ("encoder", "predictor", "weight", "bias")}
    checked = validate.joint_problem(
        {name: facts(array) for name, array in arrays.items()},
        problem.targets,
        problem.frames,
        problem.labels,
        problem.blank,
        validate.check_options(min_occupancy=1e-8),
    )
    plan = make_plan(checked, BACKEND.facts, tile_rows, gradients=wanted)
    return plan, Inputs(problem.targets, **arrays)


def planned_logits(problem: Logits, wanted: frozenset[str]) -> tuple[Plan, Inputs]:
    options = validate.check_options()
    checked = validate.logits_problem(
        facts(problem.logits), problem.targets, problem.frames, problem.labels, problem.blank, options, True
    )
    plan = make_plan(checked, BACKEND.facts, gradients=wanted)
    return plan, Inputs(problem.targets, logits=problem.logits)


def parts(account: MemoryAccount, *lives: Life) -> Counter[tuple[tuple[int, ...], str]]:
    return Counter(
        (part.shape, part.dtype) for part in account.parts if part.life in lives and part.name not in OWN_TEMPORARIES
    )


ALL = frozenset({"encoder", "predictor", "weight", "bias"})


@pytest.mark.parametrize(
    "wanted", [ALL, frozenset({"encoder"}), frozenset({"weight", "predictor"}), frozenset()], ids=len
)
@pytest.mark.parametrize("tile_rows", [1, 7, "auto", None])
@pytest.mark.parametrize(
    "dtypes", [("float32", "float32"), ("float16", "float32"), ("bfloat16", "bfloat16")], ids="-".join
)
def test_the_joint_form_takes_exactly_the_parts_of_its_account(
    dtypes: tuple[str, str], tile_rows: TileRows, wanted: frozenset[str]
) -> None:
    problem = draw_joint(dtype=dtypes[0], parameter_dtype=dtypes[1])
    plan, inputs = planned_joint(problem, tile_rows, wanted)
    recorder = Recorder()
    losses, saved = pipeline.forward(plan, inputs, BACKEND, recorder)
    assert Counter(recorder.taken) == parts(plan.account, Life.SAVED, Life.TILE, Life.FORWARD)
    assert_close(losses, problem.truth().losses, rtol=1e-5, atol=0)
    if wanted:
        recorder.taken.clear()
        gradients = pipeline.backward(saved, np.ones(4), wanted)
        assert Counter(recorder.taken) == parts(plan.account, Life.BACKWARD, Life.TILE)
        for name in ALL:
            gradient = getattr(gradients, name)
            assert (gradient is not None) == (name in wanted)
            if name in wanted:
                expected = problem.truth().gradients[name]
                assert_close(gradient, expected, rtol=1e-2, atol=1e-4, names=name)
    assert recorder.guards_hold()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("wanted", [True, False])
def test_the_logits_form_takes_exactly_the_parts_of_its_account(wanted: bool, dtype: str) -> None:
    problem = draw_logits(dtype=dtype, padding=1)
    plan, inputs = planned_logits(problem, frozenset({"logits"} if wanted else ()))
    recorder = Recorder()
    losses, saved = pipeline.forward(plan, inputs, BACKEND, recorder)
    assert Counter(recorder.taken) == parts(plan.account, Life.SAVED, Life.TILE, Life.FORWARD)
    assert_close(losses, problem.truth().losses, rtol=1e-5, atol=0)
    if wanted:
        recorder.taken.clear()
        gradients = pipeline.backward(saved, np.ones(4), frozenset({"logits"}))
        assert Counter(recorder.taken) == parts(plan.account, Life.BACKWARD, Life.TILE)
        assert_close(gradients.logits, problem.truth().gradients["logits"], rtol=2e-3, atol=1e-5)
    assert recorder.guards_hold()


def test_overwriting_the_logits_takes_no_gradient_buffer() -> None:
    problem = draw_logits()
    plan, inputs = planned_logits(problem, frozenset({"logits"}))
    recorder = Recorder()
    _, saved = pipeline.forward(plan, inputs, BACKEND, recorder)
    recorder.taken.clear()
    gradients = pipeline.backward(saved, np.ones(4), frozenset({"logits"}), overwrite_logits=True)
    assert recorder.taken == []
    assert gradients.logits is problem.logits


@pytest.mark.parametrize("tile_rows", [7, None])
def test_a_second_backward_gives_the_same_gradients(tile_rows: TileRows) -> None:
    plan, inputs = planned_joint(draw_joint(dtype="float32"), tile_rows, ALL)
    _, saved = pipeline.forward(plan, inputs, BACKEND, Recorder())
    first, second = (pipeline.backward(saved, np.ones(4), ALL) for _ in range(2))
    for name in ALL:
        np.testing.assert_array_equal(getattr(second, name), getattr(first, name))


def measured(problem: Joint, **options: Any) -> tuple[int, int, MemoryAccount]:
    """Peak, and what is left at the end, of all that the call allocates; and its account."""
    H, V = problem.encoder.shape[-1], len(problem.weight)
    dtypes = {"dtype": problem.encoder.dtype.name, "parameter_dtype": problem.weight.dtype.name}
    tiling = {name: options[name] for name in ("tile_rows",) if name in options}
    account = frc.plan_memory(problem.frames, problem.labels, H, V, backend="numpy", **dtypes, **tiling)
    tracemalloc.start()
    try:
        result = frc.joint_rnnt_loss_and_grad(*problem.args, backend="numpy", **options)
        left, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert np.isfinite(result[0])
    return peak, left, account


def test_the_peak_is_the_plan_where_the_scores_would_take_two_gibibytes() -> None:
    problem = draw_joint((256,), (127,), H=1, V=8192)
    problem = replace(problem, encoder=5 * problem.encoder)  # a narrow band: a quick backward
    peak, _, account = measured(problem)
    assert account.dense_bytes >= 2 << 30
    assert peak <= 1.1 * (account.peak_bytes - account.given_bytes)
    assert peak <= 0.05 * account.dense_bytes


@pytest.mark.parametrize(
    ("frames", "labels", "H", "V", "options"),
    [
        ((1000,), (200,), 2, 3, {"tile_rows": 4000}),  # the lattice is most of it
        ((1,) * 200, (200,) * 200, 2, 3, {"tile_rows": 4000}),  # the frontier of the recursion
        ((60, 40), (40, 30), 64, 256, {"tile_rows": None}),  # the kept tile
        ((16,), (8,), 500, 3000, {}),  # the parameters
        ((100,), (40,), 64, 4, {"activation": "gelu", "min_occupancy": 0}),  # temporaries of the activations
        ((100,), (40,), 2, 4, {"dropout": 0.1, "min_occupancy": 0}),  # temporaries of the mask
    ],
)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_peak_is_within_the_plan_whatever_part_is_largest(
    frames: tuple[int, ...], labels: tuple[int, ...], H: int, V: int, options: dict[str, Any], dtype: str
) -> None:
    peak, left, account = measured(draw_joint(frames, labels, H, V, dtype=dtype), **options)
    assert peak <= 1.1 * (account.peak_bytes - account.given_bytes)
    gradients = sum(part.nbytes for part in account.parts if part.name.startswith("gradient of"))
    assert left <= gradients + 100_000


def test_a_batch_that_breaks_others_needs_little() -> None:
    B, T, U, V = 16, 455, 20, 4233
    account = frc.plan_memory([T] * B, [U] * B, 640, V, dtype="float32", backend="numpy", workspace_bytes=32 << 20)
    logits_bytes = B * T * (U + 1) * V * 4
    parameters = sum(part.nbytes for part in account.parts if "weight" in part.name)
    assert account.peak_bytes - account.given_bytes - parameters < 0.05 * logits_bytes


def test_a_narrower_dtype_never_needs_more() -> None:
    sizes = ([500, 300], [80, 60], 512, 1024)
    peaks = [
        frc.plan_memory(*sizes, dtype=dtype, parameter_dtype=dtype, backend="numpy", tile_rows=1000).peak_bytes
        for dtype in ("float64", "float32")
    ]
    assert peaks[0] > peaks[1]
