"""The choice of a backend: by name, by where the arrays are, and with the reasons of those that cannot."""

from __future__ import annotations

import ctypes
import dataclasses
import sys

import numpy as np
import pytest

from flash_rnnt_cupy import BackendUnavailableError, InputError, InputTypeError, backends, plan_memory
from flash_rnnt_cupy.backends import numpy_cpu
from flash_rnnt_cupy.backends.cuda import tables
from flash_rnnt_cupy.backends.cuda.facts import H200, PERIOD, diagonals
from flash_rnnt_cupy.backends.cuda.memory import DeviceArray, contiguous_strides
from flash_rnnt_cupy.dtypes import numpy_dtype
from flash_rnnt_cupy.plan import Packing, accumulator_dtype
from flash_rnnt_cupy.problem import ITEMSIZE, Form, Inputs, Options, Problem
from flash_rnnt_cupy.topology import RNNT

ONE = np.ones(1, np.int64)
PROBLEM = Problem(Form.LOGITS, RNNT, ONE, ONE, 5, 4, "float32", {"logits": (2, 5)}, Options())


@pytest.mark.parametrize("requested", ["auto", "numpy"])
def test_arrays_in_host_memory_go_to_numpy(requested: str) -> None:
    assert backends.choose(requested, PROBLEM, "cpu") is numpy_cpu.BACKEND


def test_a_backend_is_refused_where_the_arrays_are_not() -> None:
    with pytest.raises(BackendUnavailableError, match=r"no backend for rnnt logits.*numpy: the arrays are in cuda:1"):
        backends.choose("numpy", PROBLEM, "cuda:1")
    with pytest.raises(BackendUnavailableError, match="cuda: the arrays are in host memory"):
        backends.choose("cuda", PROBLEM, "cpu")


def test_every_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    picky = dataclasses.replace(numpy_cpu.BACKEND, supports=lambda problem: (f"V = {problem.vocabulary}", "Mondays"))
    monkeypatch.setattr(numpy_cpu, "BACKEND", picky)
    message = "cuda: the arrays are in host memory, numpy: V = 5; Mondays"
    with pytest.raises(BackendUnavailableError, match=message):
        backends.choose("auto", PROBLEM, "cpu")


def test_an_unusable_gpu_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flash_rnnt_cupy.backends.cuda.unavailable", lambda: "no driver")
    with pytest.raises(BackendUnavailableError, match="cuda: no driver, numpy: the arrays are in cuda:0"):
        backends.choose("auto", PROBLEM, "cuda:0")
    assert backends.planning_facts("cuda") is H200
    assert backends.planning_facts("auto") is numpy_cpu.FACTS
    assert plan_memory([500], [100], 640, 1024, backend="cuda").peak_bytes > 0


def test_without_cupy_the_reason_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert "CuPy is not installed" in backends.unavailable("cuda")
    assert "pip install" in backends.unavailable("cuda")
    assert backends.unavailable("numpy") == ""


def test_names() -> None:
    assert backends.load("numpy", "cpu") is numpy_cpu.BACKEND
    for call in (lambda: backends.planning_facts("metal"), lambda: backends.choose("metal", PROBLEM, "cpu")):
        with pytest.raises(InputError, match="backend: expected one of auto, cuda, numpy, cuda-generic, got 'metal'"):
            call()


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64", "int64"])
def test_dtypes_have_their_names(name: str) -> None:
    assert numpy_dtype(name).name == name


def test_bfloat16_without_ml_dtypes_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(InputTypeError, match="expected ml_dtypes to be installed for bfloat16"):
        numpy_dtype("bfloat16")


FRAMES, LABELS = np.array([5, 3, 8]), np.array([2, 0, 7])


def cuda_problem(form: Form, shapes: dict[str, tuple[int, ...]]) -> tuple[Problem, Inputs]:
    arrays = {name: DeviceArray(0, shape, "float32", contiguous_strides(shape), None) for name, shape in shapes.items()}
    inputs = Inputs(np.ones((3, 7), np.int64), **arrays)
    return Problem(form, RNNT, FRAMES, LABELS, 9, 0, "float32", shapes, Options(), 4, "float32"), inputs


@pytest.mark.parametrize(
    ("form", "shapes"),
    [
        (Form.JOINT, {"encoder": (3, 8, 4), "predictor": (3, 8, 4), "weight": (9, 4)}),
        (Form.JOINT, {"encoder": (16, 4), "predictor": (12, 4), "weight": (9, 4)}),
        (Form.LOGITS, {"logits": (3, 8, 8, 9)}),
        (Form.LOGITS, {"logits": (82, 9)}),
    ],
    ids=["padded states", "packed states", "padded logits", "packed logits"],
)
def test_index_tables_have_the_sizes_by_which_they_are_found(form: Form, shapes: dict[str, tuple[int, ...]]) -> None:
    problem, inputs = cuda_problem(form, shapes)
    packing = Packing(FRAMES, LABELS)
    words = tables.index_words(problem, packing)
    arrays = tables.index_tables(packing.all_rows(), inputs)
    assert {name: tables.whole_words(array.nbytes) // 8 for name, array in arrays.items()} == words
    found = tables.addresses(words, 800)
    ends = [found[name] + 8 * size for name, size in words.items()]
    assert [*found.values(), ends[-1]] == [800, *ends]


def test_band_tables_come_back_as_rows() -> None:
    packing = Packing(FRAMES, LABELS)
    words = tables.band_words(packing)
    memory = np.zeros(sum(words.values()), np.int64)
    at = tables.addresses(words, memory.ctypes.data)
    lo_f = np.arange(16, dtype=np.int32)
    expected = packing.band_rows(lo_f, lo_f + lo_f % 3)
    for name, values in {"row_start_f": expected.row_start_f, "lo_f": lo_f, "dropped": np.array([0.25])}.items():
        ctypes.memmove(at[name], values.ctypes.data, values.nbytes)
    rows, dropped = tables.band_rows(packing, memory)
    np.testing.assert_array_equal(rows.row_start_f, expected.row_start_f)
    np.testing.assert_array_equal(rows.lo_f, expected.lo_f)
    assert dropped == 0.25


@pytest.mark.parametrize("rows_that_fit", [0, 4, 5, 7, 8, 14, 26, 49, 50, 1000])
def test_the_period_of_alpha_is_the_largest_power_of_two_that_fits(rows_that_fit: int) -> None:
    problem, _ = cuda_problem(Form.LOGITS, {"logits": (82, 9)})
    columns = 2 * ITEMSIZE[accumulator_dtype(problem.dtype)] // 8  # in numbers of 8 bytes
    rows = {period: period + 2 + 2 * period * columns for period in (1, 2, 4, 8, 16)}
    found = diagonals(8 * 34 * rows_that_fit, problem, Packing(FRAMES, LABELS))
    assert (found.threads, found.pitch) == (32, 34)
    assert found.shared == (rows[2] <= rows_that_fit)  # a period of 1 would keep all of alpha
    assert found.period == max(p for p in rows if rows[p] <= rows_that_fit or not found.shared) <= PERIOD
    assert found.words == 34 * rows[found.period]
