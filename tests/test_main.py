"""The command line."""

import runpy
import sys

import pytest

import flash_rnnt_cupy as frc
from flash_rnnt_cupy import backends
from flash_rnnt_cupy.__main__ import main

SIZES = ["-B", "2", "-T", "30", "-U", "5", "-H", "8", "-V", "11"]


def test_info_says_which_backend_is_active_and_why_others_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    assert frc.__version__ in printed
    active = next(name for name in backends.NAMES if not backends.unavailable(name))
    assert f"* {active}" in printed
    for name in backends.NAMES:
        assert backends.unavailable(name) in printed


def test_selfcheck_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selfcheck", "--backend", "numpy"]) == 0
    assert "numpy: all checks pass" in capsys.readouterr().out


def test_selfcheck_that_fails_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frc, "selfcheck", lambda _: False)
    assert main(["selfcheck"]) == 1


@pytest.mark.parametrize("backend", ["numpy", "cuda"])
def test_plan_prints_the_account(capsys: pytest.CaptureFixture[str], backend: str) -> None:
    assert main(["plan", *SIZES, "--backend", backend, "--dtype", "float32"]) == 0
    account = frc.plan_memory([30, 30], [5, 5], 8, 11, backend=backend)
    assert capsys.readouterr().out == f"{account}\n"


@pytest.mark.parametrize(("text", "expected"), [("none", None), ("7", 7), ("auto", "auto")])
def test_plan_takes_every_kind_of_tile(capsys: pytest.CaptureFixture[str], text: str, expected: object) -> None:
    assert main(["plan", *SIZES, "--backend", "numpy", "--dtype", "float32", "--tile-rows", text]) == 0
    account = frc.plan_memory([30, 30], [5, 5], 8, 11, backend="numpy", tile_rows=expected)
    assert capsys.readouterr().out == f"{account}\n"


def test_wrong_sizes_are_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SIZES[:2], "-T", "0", *SIZES[4:]]) == 2
    assert capsys.readouterr().err == "encoder_lengths: expected at least 1, got 0 at utterance 0\n"


def test_the_module_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["flash_rnnt_cupy", "info"])
    with pytest.warns(RuntimeWarning), pytest.raises(SystemExit) as exit_status:  # it is imported above already
        runpy.run_module("flash_rnnt_cupy", run_name="__main__")
    assert exit_status.value.code == 0
    assert "Python" in capsys.readouterr().out
