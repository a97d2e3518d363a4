"""The choice of a backend: by name, by where the arrays are, and with the reasons of those that cannot."""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
import pytest

from flash_rnnt_cupy import BackendUnavailableError, InputError, InputTypeError, backends, plan_memory
from flash_rnnt_cupy.backends import numpy_cpu
from flash_rnnt_cupy.backends.cuda.facts import H200
from flash_rnnt_cupy.dtypes import numpy_dtype
from flash_rnnt_cupy.problem import Form, Options, Problem
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
