"""The CUDA kernels on the CPU: each stage against the NumPy backend's, then the shared suite, then under sanitizers.

Threads and blocks run in both orders, so that a missing barrier or a race shows as a difference in bits.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flash_rnnt_cupy import api, backends, validate
from flash_rnnt_cupy.backends import Backend, Lattice
from flash_rnnt_cupy.backends.cuda import facts, stages
from flash_rnnt_cupy.plan import Plan, accumulator_dtype, make_plan
from flash_rnnt_cupy.problem import Form, Inputs, Options, Problem
from flash_rnnt_cupy.topology import RNNT, Topology
from tests import shim
from tests.conftest import BackendUnderTest
from tests.oracles.checks import assert_close
from tests.problems import FRAMES, LABELS, Array, Joint, draw_joint, dtype_of, epsilon
from tests.shim.backend import SANITIZE, SHARED_BYTES, make_numpy_backend
from tests.test_topology import CASES as TOPOLOGIES

pytestmark = pytest.mark.skipif(bool(shim.missing()), reason=shim.missing())

# of the shared suite, lattices of millions of nodes: minutes on fibers
LARGE = (
    "test_the_table_of_uniform_losses",
    "test_posteriors_of_large_uniform_lattices",
    "test_the_loss_of_a_very_large_lattice",
)


@dataclass(frozen=True)
class Case:
    """A batch, its joint network, and options; dropout and a band of rows unless said otherwise."""

    dtype: str
    H: int
    V: int
    tile_rows: int
    frames: tuple[int, ...] = FRAMES
    labels: tuple[int, ...] = LABELS
    options: dict[str, Any] = field(default_factory=lambda: {"dropout": 0.3, "seed": 5, "min_occupancy": 0.05})
    bias: bool = True
    shared_bytes: int = SHARED_BYTES

    def __str__(self) -> str:
        return f"{self.dtype} H={self.H} V={self.V} tiles of {self.tile_rows}"


# Widths: odd; of whole vectors, more than one step of a warp or of a block. Vocabularies: a row a warp, a row a block
# of 256 threads and of 1024, held in registers or not.
CASES = [
    Case("float64", 5, 7, 4),
    Case("float32", 67, 261, 7, options={"activation": "gelu", "dropout": 0.7, "seed": 5}),
    Case("bfloat16", 67, 261, 7, options={"activation": "tanh", "clamp": 0.1, "fastemit_lambda": 0.2}),
    Case("float16", 264, 72, 11),
    Case("float64", 264, 520, 100, bias=False, shared_bytes=0),
    Case("float32", 8, 2056, 3, (1, 3), (2, 0)),
    Case("bfloat16", 16, 2051, 3, (1, 3), (2, 0), {"activation": "identity", "dropout": 0.5, "seed": 5}),
    Case("float16", 8, 16400, 2, (1, 2), (1, 0)),
    Case("float32", 8, 5, 3000, (4100, 3), (1, 2)),  # more frames than start_rows adds up in one round
]
UNIT = 512.0  # the power of two below the largest upstream gradient, by which `finish` multiplies
SANITIZED = [CASES[0], CASES[2], CASES[3], CASES[4], CASES[7]]


class Side:
    """One backend at work on a case."""

    def __init__(self, backend: Backend, case: Case, problem: Joint) -> None:
        options = validate.check_options(**case.options)
        opened = api._open_joint(*problem.args, problem.blank, options)
        self.backend, self.wanted = backend, frozenset(opened.problem.shapes)
        self.plan: Plan = make_plan(opened.problem, backend.facts, case.tile_rows, None, self.wanted)
        self.call = backend.begin(self.plan, opened.inputs, backend.allocate, {})
        self.lattice = Lattice(self.take("scores"), self.take("normalizers"), self.take("alpha"))
        self.log_likelihood_b = self.take("log likelihoods")

    def take(self, part: str, values: Array | None = None) -> Array:
        """Memory for a part of the account; with values, rounded to its dtype, in its first rows and columns."""
        memory: Array = self.backend.allocate(self.plan.account[part])
        memory = getattr(memory, "owner", memory)
        if values is not None:
            memory[: len(values), : values.shape[1]] = values
        return memory

    def take_active(self) -> Array | None:
        """Memory for the active bits, if the problem has them."""
        return self.take("tile active") if "tile active" in self.plan.account else None

    def zeroed_sums(self, call: Any) -> dict[str, Array]:
        """Buffers of the wanted gradients' sums."""
        sums = {
            name: self.take(f"sums of {name}" if self.is_apart(name) else f"gradient of {name}") for name in self.wanted
        }
        for buffer in sums.values():
            self.backend.fill_zero(call, buffer)
        return sums

    def is_apart(self, name: str) -> bool:
        return f"sums of {name}" in self.plan.account

    def finished(self, call: Any, name: str, sums: Array) -> Array:
        """The gradient of its sums."""
        gradient = self.take(f"gradient of {name}") if self.is_apart(name) else sums
        self.backend.finish(call, name, sums, gradient)
        return gradient


def rounded(values: Array, dtype: str) -> Array:
    return values.astype(dtype_of(dtype)).astype(np.float64)


def active_columns(active: Array, width: int) -> Array:
    """[R, H] of the kernels' active bits [R, ceil(H / 8)]; bits beyond H must be 0."""
    bits = np.unpackbits(active, bitorder="little").reshape(len(active), -1, 2, 4)  # even columns, then odd ones
    columns = bits.swapaxes(2, 3).reshape(len(active), -1)
    assert not columns[:, width:].any()
    return columns[:, :width] != 0


class Walk:
    """All stages in order. Each side gets the same inputs, rounded as ours are; ``results`` keeps what ours gave."""

    def __init__(self, case: Case, reverse: bool) -> None:
        self.case, self.rng, self.results = case, np.random.default_rng(3), list[Array]()
        problem = draw_joint(case.frames, case.labels, case.H, case.V, dtype=case.dtype)
        problem = problem if case.bias else problem.replace(bias=None)
        arrays = ("encoder", "predictor", "weight", *(["bias"] if case.bias else []))
        exact = problem.replace(**{name: getattr(problem, name).astype(np.float64) for name in arrays})
        self.ours = Side(make_numpy_backend(reverse, case.shared_bytes), case, problem)
        self.truth = Side(backends.load("numpy", "cpu"), case, exact)
        self.sides = self.ours, self.truth
        self.work = self.ours.backend.facts.workspace_dtype(case.dtype)
        self.keep_scale = self.ours.plan.problem.options.keep_scale

    def compare(self, what: str, ours: Array, truth: Array, dtype: str, factor: float = 8.0) -> None:
        """Within ``factor`` roundings of the largest value."""
        self.results.append(np.array(ours))
        finite = truth[np.isfinite(truth)]
        atol = factor * epsilon(dtype) * float(np.abs(finite).max(initial=0))
        assert_close(ours.astype(np.float64), truth, rtol=0, atol=atol, names=f"{self.case}: {what}", equal_nan=True)

    def draw(self, rows: int, width: int, scale: float = 1.0) -> Array:
        return rounded(scale * self.rng.normal(size=(rows, width)), self.work)

    def forward(self) -> None:
        for tile in self.ours.plan.tiles:
            hidden = [side.take("tile hidden") for side in self.sides]
            scores = self.draw(tile.n_rows, self.case.V, 3.0)
            scores[self.rng.random(scores.shape) < 0.05] = -np.inf
            active = [side.take_active() for side in self.sides]
            for side, buffer, bits in zip(self.sides, hidden, active, strict=True):
                side.backend.joint_forward(side.call, tile, buffer, bits)
                side.backend.normalize_forward(side.call, tile, side.take("tile logits", scores), side.lattice)
            ours, truth = (buffer[: tile.n_rows] for buffer in hidden)
            self.compare("hidden", ours, truth / self.keep_scale, self.work)
            if active[0] is not None:
                np.testing.assert_array_equal(active_columns(active[0][: tile.n_rows], self.case.H), truth != 0)

    def lattices(self) -> None:
        acc = accumulator_dtype(self.case.dtype)
        ours, truth = self.ours.lattice, self.truth.lattice
        self.compare("columns", ours.column_cn, truth.column_cn, acc)
        self.compare("normalizers", ours.normalizer_gn, truth.normalizer_gn, acc)
        truth.column_cn[...] = self.rng.uniform(-3, -0.1, truth.column_cn.shape)
        for name in ("column_cn", "normalizer_gn"):
            getattr(truth, name)[...] = rounded(getattr(truth, name), acc)
            getattr(ours, name)[...] = getattr(truth, name)
        for side in self.sides:
            side.backend.sum_alignments(side.call, side.lattice, side.log_likelihood_b)
        self.compare("log-likelihoods", self.ours.log_likelihood_b, self.truth.log_likelihood_b, acc)
        losses = [side.backend.losses(side.call, side.log_likelihood_b) for side in self.sides]
        self.compare("losses", losses[0], losses[1], acc)
        for side in self.sides:
            side.backend.posteriors(side.call, side.lattice, side.log_likelihood_b)
        self.compare("posteriors", ours.column_cn, truth.column_cn, acc, 64)
        truth.column_cn[...] = rounded(truth.column_cn, acc)
        ours.column_cn[...] = truth.column_cn

    def start_backward(self) -> list[Any]:
        """Both sides' calls, over the same rows."""
        upstream = np.resize([700.0, -3.0, 0.0, 40.0], len(self.case.frames))
        calls = [side.backend.select_rows(side.call, side.lattice) for side in self.sides]
        calls = [side.backend.start_backward(call, upstream) for side, call in zip(self.sides, calls, strict=True)]
        selections = [side.backend.rows_in_work(call) for side, call in zip(self.sides, calls, strict=True)]
        (our_call, dropped), (true_call, expected) = selections
        ours, truth = our_call.rows, true_call.rows
        np.testing.assert_array_equal(ours.row_start_f, truth.row_start_f)
        counts = np.diff(ours.row_start_f)
        np.testing.assert_array_equal(ours.lo_f[counts > 0], truth.lo_f[counts > 0])
        assert_close(dropped, expected, rtol=0, atol=1e-14 * ours.packing.n_frames, names="dropped")  # of 1 a frame
        return [our_call, true_call]

    def backward(self, calls: list[Any]) -> None:
        sums = [side.zeroed_sums(call) for side, call in zip(self.sides, calls, strict=True)]
        alone = self.ours.zeroed_sums(calls[0])
        for tile in self.ours.plan.cut(calls[0].rows):
            scores, grad_hidden = self.draw(tile.n_rows, self.case.V, 3.0), self.draw(tile.n_rows, self.case.H)
            logits = [side.take("tile logits", scores) for side in self.sides]
            active = [side.take_active() for side in self.sides]
            for side, call, bits in zip(self.sides, calls, active, strict=True):
                side.backend.joint_forward(call, tile, side.take("tile hidden"), bits)
            hidden = [side.take("tile hidden", grad_hidden) for side in self.sides]
            if active[0] is not None:  # what is not active counts for nothing
                hidden[0][: tile.n_rows][~active_columns(active[0][: tile.n_rows], self.case.H)] = np.nan
            hidden[1][: tile.n_rows] *= UNIT / self.keep_scale
            given = zip(self.sides, calls, logits, hidden, active, sums, strict=True)
            for side, call, z, h, bits, total in given:
                side.backend.normalize_backward(call, tile, z, side.lattice, z, total.get("bias"))
                side.backend.joint_backward(call, tile, h, bits, total["encoder"], total["predictor"])
            for wanted in ((alone["encoder"], None), (None, alone["predictor"])):
                self.ours.backend.joint_backward(calls[0], tile, hidden[0], active[0], *wanted)
            unit, exact = (z[: tile.n_rows, : self.case.V].astype(np.float64) for z in logits)
            self.compare("gradient of logits", unit, exact / UNIT, self.work)
        for name in ("encoder", "predictor"):
            np.testing.assert_array_equal(alone[name], sums[0][name])
        for name in sorted(self.ours.wanted - {"weight"}):
            gradients = [
                side.finished(call, name, total[name])
                for side, call, total in zip(self.sides, calls, sums, strict=True)
            ]
            self.compare(f"gradient of {name}", gradients[0], gradients[1], self.case.dtype, 64)


def walk(case: Case, reverse: bool) -> list[Array]:
    steps = Walk(case, reverse)
    steps.forward()
    steps.lattices()
    steps.backward(steps.start_backward())
    return steps.results


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_stage_is_the_numpy_stage_in_either_order(case: Case) -> None:
    for there, back in zip(walk(case, False), walk(case, True), strict=True):
        np.testing.assert_array_equal(there, back)


@pytest.mark.parametrize("bounds", [(0, 0), (0, 1 << 20), (1 << 20, 1 << 20)], ids=["block", "warps", "warp"])
@pytest.mark.parametrize("case", [CASES[1], CASES[2], CASES[4]], ids=str)
def test_sums_of_any_length(case: Case, bounds: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "SHORT_SUM", bounds[0])
    monkeypatch.setattr(stages, "LONG_SUM", bounds[1])
    for there, back in zip(walk(case, False), walk(case, True), strict=True):
        np.testing.assert_array_equal(there, back)


@pytest.mark.skipif(SANITIZE, reason="this is the sanitized run")
def test_no_stage_reads_or_writes_out_of_bounds() -> None:
    """The stages once more in a process of its own, with guards around every NumPy array and shared array."""
    chosen = [
        f"{__file__}::{test_every_stage_is_the_numpy_stage_in_either_order.__name__}[{case}]" for case in SANITIZED
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-s", "-p", "no:cacheprovider", *chosen],
        env=os.environ | shim.sanitizer_environment(),
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    assert f"{len(SANITIZED)} passed" in done.stdout


# ---- alpha, kept of some diagonals ---------------------------------------------------------------------------------

LONG, MANY = (41, 1, 20, 3, 17), (11, 5, 0, 19, 14)  # frames and labels: several periods, and less than one


def recursion(
    backend: Backend, topology: Topology, dtype: str, frames: tuple[int, ...] = LONG, labels: tuple[int, ...] = MANY
) -> tuple[Array, Array, int]:
    """Log-likelihoods and posteriors of the same random columns, and how many numbers of alpha were kept."""
    problem = Problem(Form.LOGITS, topology, np.array(frames), np.array(labels), 9, 0, dtype, {}, options=Options())
    plan = make_plan(problem, backend.facts, gradients=frozenset({"logits"}))
    columns = np.random.default_rng(0).uniform(-3, -0.1, plan.account["scores"].shape).astype(dtype)
    targets = np.zeros((len(frames), max(labels)), np.int64)
    call = backend.begin(plan, Inputs(targets, logits=columns), backend.allocate, {})
    alpha = np.full(plan.account["alpha"].shape, np.nan)
    lattice, log_likelihood_b = Lattice(columns, None, alpha), np.full(len(frames), np.nan)
    backend.sum_alignments(call, lattice, log_likelihood_b)
    backend.posteriors(call, lattice, log_likelihood_b)
    return log_likelihood_b, columns, alpha.size


@pytest.mark.parametrize("shared_bytes", [2 * SHARED_BYTES, 0])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("topology", [case.topology for case in TOPOLOGIES.values()], ids=TOPOLOGIES.keys())
def test_alpha_of_few_diagonals_gives_the_bits_of_all(
    topology: Topology, dtype: str, shared_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    *expected, n_nodes = recursion(backends.load("numpy", "cpu"), topology, dtype)
    monkeypatch.setattr(facts, "PERIOD", 1)
    *every, _ = recursion(make_numpy_backend(shared_bytes=shared_bytes), topology, dtype)
    for ours, truth in zip(every, expected, strict=True):
        assert_close(ours, truth, rtol=1e-5 if dtype == "float32" else 1e-12, atol=1e-6)
    for period in (4, 16):
        monkeypatch.setattr(facts, "PERIOD", period)
        for reverse in (False, True):
            *few, kept = recursion(make_numpy_backend(reverse, shared_bytes), topology, dtype)
            assert kept <= topology.reach * (n_nodes // period + sum(MANY) + len(MANY))
            for ours, same in zip(few, every, strict=True):
                np.testing.assert_array_equal(ours, same)


@pytest.mark.parametrize("shared_bytes", [4 * SHARED_BYTES, 0])
@pytest.mark.parametrize("frames", [(3, 2), (0, 20)])
def test_a_thread_has_several_states_where_a_block_has_too_few(frames: tuple[int, ...], shared_bytes: int) -> None:
    sides = backends.load("numpy", "cpu"), make_numpy_backend(shared_bytes=shared_bytes)
    expected, ours = (recursion(side, RNNT, "float64", frames, (1100, 2)) for side in sides)
    for found, truth in zip(ours[:2], expected[:2], strict=True):
        assert_close(found, truth, rtol=1e-12, atol=1e-9)


# ---- the shared suite ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def backend() -> Iterator[BackendUnderTest]:
    """The kernels behind the public calls, on NumPy arrays."""
    ours, choose, load = make_numpy_backend(), backends.choose, backends.load
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "load", lambda name, device: ours if name == ours.name else load(name, device))
        patch.setattr(backends, "choose", lambda name, *rest: ours if name == ours.name else choose(name, *rest))
        yield BackendUnderTest(ours.name, np)


def shared(suite: str) -> type:
    """A class of the module's tests that take a backend."""
    tests = vars(importlib.import_module(f"tests.test_{suite}")).items()
    chosen = {name: staticmethod(test) for name, test in tests if name.startswith("test_") and name not in LARGE}
    return type(suite, (), chosen)


TestJoint = shared("joint")
TestLogits = shared("logits")
TestOptions = shared("options")
TestOccupancy = shared("occupancy")
TestDropout = shared("dropout")
TestInvariants = shared("invariants")
TestShapes = shared("shapes")
TestNumerics = shared("numerics")
