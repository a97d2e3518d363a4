"""The fused kernels: when they are chosen, what they save, and that they agree with the generic ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import flash_rnnt_cupy as frc
from flash_rnnt_cupy import backends, pipeline
from flash_rnnt_cupy.backends.cuda import make_backend
from flash_rnnt_cupy.backends.cuda.driver import Driver
from flash_rnnt_cupy.backends.cuda.facts import FUSED_SHARED_BYTES, H200, device_facts
from flash_rnnt_cupy.backends.cuda.memory import DeviceArray, contiguous_strides
from flash_rnnt_cupy.plan import Life, Part, make_plan
from flash_rnnt_cupy.problem import Form, Inputs, Options, Problem
from flash_rnnt_cupy.topology import RNNT
from tests.oracles.checks import assert_close
from tests.problems import Joint, draw_joint

NO_GPU = backends.unavailable("cuda")
on_gpu = pytest.mark.skipif(bool(NO_GPU), reason=NO_GPU)


def problem(H: int = 640, V: int = 1024, dtype: str = "float16", **options: Any) -> Problem:
    shapes = {"encoder": (2, 500, H), "predictor": (2, 101, H), "weight": (V, H), "bias": (V,)}
    lengths = np.array([500, 400]), np.array([100, 90])
    return Problem(Form.JOINT, RNNT, *lengths, V, 0, dtype, shapes, Options(**options), H, "float32")


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (problem(dtype="float32"), "states are float32"),
        (problem(H=20), "H is 20"),
        (problem(H=776), "H is 776"),
        (problem(activation="gelu"), "activation is gelu"),
        (problem(clamp=1.0), "clamped"),
        (dataclasses.replace(problem(), topology=dataclasses.replace(RNNT, name="another")), "loss is another"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_plan_says_why_it_is_not_fused(case: Problem, reason: str) -> None:
    plan = make_plan(case, H200)
    assert not plan.fused
    assert reason in str(plan)


def test_other_devices_have_no_fused_kernels() -> None:
    facts = device_facts("A100", l2_bytes=40 << 20, shared_bytes=163 << 10, multiprocessors=108, capability="80")
    assert "compute capability 8.0, not 9.0" in str(make_plan(problem(), facts))


@pytest.mark.parametrize("tile_rows", ["auto", None, 1000])
def test_forward_of_a_fused_plan_has_no_tile(tile_rows: Any) -> None:
    plan = make_plan(problem(), H200, tile_rows)
    assert plan.fused
    assert "fused kernels" in str(plan)
    assert "fused kernels" in str(plan.account)
    assert not plan.untiled
    tiled = [part for part in plan.account.parts if part.name.startswith("tile ")]
    assert {part.life for part in tiled} == {Life.BACKWARD}
    assert len(tiled) == 3
    n_nodes = 500 * 101 + 400 * 91
    per_node = plan.account.forward_bytes - make_plan(problem(), H200, gradients=frozenset()).account.given_bytes
    assert per_node < 20 * n_nodes + (4 << 20)  # no R V, no R H: lattice, tables, packed weight


def test_auto_tiles_of_a_fused_plan_fill_the_device() -> None:
    assert (
        make_plan(problem(), H200).tile_rows % 128 == 0 or make_plan(problem(), H200).tile_rows == 500 * 101 + 400 * 91
    )
    many = dataclasses.replace(problem(), frames_b=np.full(64, 500), labels_b=np.full(64, 100))
    assert make_plan(many, H200).tile_rows % (128 * 132) == 0
    wide = dataclasses.replace(many, vocabulary=50_000, shapes={**many.shapes, "weight": (50_000, 640)})
    assert make_plan(wide, H200).tile_rows % 128 == 0


class Launches:
    """A device that notes what is asked of it; memory is addresses alone."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.records: dict[str, np.ndarray] = {}
        self.grids: dict[str, set[int]] = {}
        self.next_address = 1 << 20
        driver = Driver(self.kernel, self.gemm, lambda *_: None, self.download, lambda _: None)
        self.backend = make_backend(driver, H200, 132, self.allocate)

    def kernel(self, spec: Any, entry: str, record: np.ndarray, shared_bytes: int, early: bool) -> Any:
        assert early == (entry == "grad_scores")
        del spec

        def launch(grid: tuple[int, ...], block: tuple[int, ...]) -> None:
            assert (shared_bytes == FUSED_SHARED_BYTES) == (block == (512,)), entry
            self.names.append(entry)
            self.records[entry] = record.copy()
            self.grids.setdefault(entry, set()).add(grid[0])

        return launch

    def gemm(self, *arguments: Any) -> None:
        assert arguments[-1] == pytest.approx(1 / 0.9, rel=1e-4)
        self.names.append("gemm")

    def download(self, array: DeviceArray) -> Any:
        raise AssertionError(f"a dense step waits for nothing, not for {array}")

    def array(self, shape: tuple[int, ...], dtype: str) -> DeviceArray:
        array = DeviceArray(self.next_address, shape, dtype, contiguous_strides(shape), None)
        self.next_address += array.nbytes + -array.nbytes % 256
        return array

    def allocate(self, part: Part) -> DeviceArray:
        return self.array(part.shape, part.dtype)


def forward_on(device: Launches, case: Problem) -> pipeline.Saved:
    """A forward step in tiles of 20,000 rows."""
    states = {name: device.array(shape, case.dtype_of(name)) for name, shape in case.shapes.items()}
    inputs = Inputs(np.zeros((2, 100), np.int64), **states)
    return pipeline.forward(make_plan(case, H200, 20_000), inputs, device.backend, device.allocate)[1]


def test_the_launches_of_a_fused_step() -> None:
    device, case = Launches(), problem(V=5000, dropout=0.1, seed=3)
    saved = forward_on(device, case)
    plan = saved.plan
    assert device.names == ["pack", "score", "sum_alignments", "losses"]
    assert device.grids["score"] == {132}
    assert device.records["score"]["n_nodes"] == 500 * 101 + 400 * 91
    assert device.records["score"]["threshold"] == 6554
    device.names.clear()
    gradients = pipeline.backward(saved, device.array((2,), "float64"), frozenset(case.shapes))
    tile = ["grad_scores", "gemm", "gemm", "joint_backward"]
    n_tiles = -(-plan.rows.n_rows // 20_000)
    after_last = [*tile[:1], "bias_add", *tile[1:]]
    expected = ["posteriors", "split_upstream", *tile * (n_tiles - 1), *after_last, "convert", "convert"]
    assert device.names == expected
    record = device.records["grad_scores"]
    assert record["grad_step"] == 5000
    assert record["rows"]["lo_f"] == device.records["score"]["rows"]["lo_f"]
    assert record["tile"]["row_end"] == plan.rows.n_rows
    assert device.grids["grad_scores"] == {132}
    assert gradients.encoder.shape == case.shapes["encoder"]
    assert gradients.rows == gradients.nodes == plan.rows.n_rows


class Selects(Launches):
    """One that keeps 25,000 rows, 50 a frame of the first utterance, and drops a quarter."""

    def download(self, array: DeviceArray) -> Any:
        self.names.append("download")
        words = np.zeros(array.shape[0], np.int64)
        words[1:901] = np.minimum(50 * np.arange(1, 901), 25_000)
        words[-1:].view(np.float64)[:] = 0.25

        def wait() -> np.ndarray:
            self.names.append("wait")
            return words

        return wait


def test_a_step_that_selects_rows_waits_once_before_its_first_tile() -> None:
    device, case = Selects(), problem(dropout=0.1, seed=3, min_occupancy=1e-7)
    saved = forward_on(device, case)
    device.names.clear()
    gradients = pipeline.backward(saved, device.array((2,), "float64"), frozenset(case.shapes))
    tile = ["grad_scores", "gemm", "gemm", "joint_backward"]
    chosen = ["posteriors", "select_rows", "start_rows", "download", "split_upstream", "wait"]
    assert device.names == [*chosen, *tile, tile[0], "bias_add", *tile[1:], "convert", "convert"]
    assert (gradients.rows, gradients.dropped_posterior) == (25_000, 0.25)
    for table in ("lo_f", "row_start_f"):
        written, read = device.records["select_rows"][table], device.records["grad_scores"]["rows"][table]
        assert written == read != device.records["score"]["rows"][table]


# ---- on a GPU ------------------------------------------------------------------------------------------------------


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Every buffer starts as NaN, or -1."""
    import cupy  # noqa: PLC0415

    pool = cupy.cuda.MemoryPool()

    def allocate(size: int) -> Any:
        memory = pool.malloc(size)
        if size:
            memory.memset_async(0xFF, size)
        return memory

    with cupy.cuda.using_allocator(allocate):
        yield


def run(case: Joint, backend: str, **options: Any) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    import cupy  # noqa: PLC0415

    arrays = [cupy.asarray(array) for array in case.args[:4]]
    losses, gradients = frc.joint_rnnt_loss_and_grad(
        *arrays, *case.args[4:], blank=case.blank, reduction="none", backend=backend, **options
    )
    names = ("encoder", "predictor", "weight", "bias")
    return losses.get(), {name: getattr(gradients, name).get() for name in names}


# Few, since each pair is compiled: one panel, two, an odd number, several items a strip; slabs with and without a rest.
NETWORKS = [(8, 2), (64, 29), (72, 128), (128, 129), (200, 300), (640, 1024), (768, 513), (96, 4_100)]


@on_gpu
@pytest.mark.parametrize(("H", "V"), NETWORKS)
def test_random_ragged_batches_agree_with_the_generic_kernels(H: int, V: int) -> None:
    random = np.random.default_rng(H + V)
    with poisoned_memory():
        for trial in range(125):
            batch = int(random.integers(1, 6))
            frames = random.integers(1, 41 if trial % 5 else 200, batch).tolist()
            labels = random.integers(0, 21 if trial % 5 else 90, batch).tolist()
            dtype = "bfloat16" if H == 200 else "float16"
            case = draw_joint(
                frames, labels, H=H, V=V, dtype=dtype, scale=H**-0.5, seed=trial, blank=int(random.integers(V))
            )
            options = {
                "dropout": float(random.choice([0.0, 0.1, 0.5, 0.9])),
                "seed": int(random.integers(2**62)),
                "min_occupancy": float(random.choice([0.0, 1e-8, 1e-4])),
                "tile_rows": [None, "auto", int(random.integers(1, 400))][trial % 3],
                "fastemit_lambda": float(random.choice([0.0, 0.5])),
            }
            losses, gradients = run(case, "cuda", **options)
            generic_losses, generic = run(case, "cuda-generic", **options)
            tolerance = 4e-2 if dtype == "bfloat16" else 5e-3
            assert_close(losses, generic_losses, rtol=tolerance, atol=tolerance, names="losses")
            for name, gradient in gradients.items():
                theirs = generic[name].astype(np.float64)
                atol = tolerance * float(np.abs(theirs).max(initial=0.0)) + 1e-7
                assert_close(gradient.astype(np.float64), theirs, rtol=tolerance, atol=atol, names=f"{name} {trial}")


@on_gpu
@pytest.mark.parametrize(("H", "V"), [(64, 29), (128, 129), (200, 300)])
def test_no_number_of_rows_hangs(H: int, V: int) -> None:
    for n in range(1, 301):
        case = draw_joint([n], [0], H=H, V=V, dtype="float16", seed=n)
        losses, gradients = run(case, "cuda", dropout=0.1, seed=n)
        assert np.isfinite(losses).all()
        assert np.isfinite(gradients["weight"]).all()


@on_gpu
def test_two_runs_of_the_fused_kernels_give_the_same_bits() -> None:
    case = draw_joint([300, 211, 40], [60, 33, 80], H=640, V=1024, dtype="float16")
    first = run(case, "cuda", dropout=0.1, seed=7, tile_rows=5_000)
    for _ in range(3):
        losses, gradients = run(case, "cuda", dropout=0.1, seed=7, tile_rows=5_000)
        np.testing.assert_array_equal(losses, first[0])
        for name, gradient in gradients.items():
            np.testing.assert_array_equal(gradient, first[1][name], err_msg=name)


@on_gpu
def test_states_that_start_between_16_bytes_are_lawful() -> None:
    import cupy  # noqa: PLC0415

    case = draw_joint([20, 11], [6, 9], H=64, V=50, dtype="float16")
    expected, _ = run(case, "cuda")
    odd = cupy.zeros(case.encoder.size + 1, "float16")[1:].reshape(case.encoder.shape)
    odd[:] = cupy.asarray(case.encoder)
    losses = frc.joint_rnnt_loss(
        odd, *map(cupy.asarray, case.args[1:4]), *case.args[4:], blank=case.blank, reduction="none"
    )
    np.testing.assert_array_equal(losses.get(), expected)
