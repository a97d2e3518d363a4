"""`selfcheck`: passes here, and fails where a result is wrong or not a number."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

import flash_rnnt_cupy as frc
from flash_rnnt_cupy import backends, selfcheck
from flash_rnnt_cupy.selfcheck import Check
from tests.conftest import BackendUnderTest


def test_it_passes_and_prints_a_line_a_check(backend: BackendUnderTest, capsys: pytest.CaptureFixture[str]) -> None:
    assert selfcheck(backend.name)
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == f"{backend.name}: all checks pass"
    assert len(lines) == 8
    assert all(line.startswith("  ok  ") for line in lines)


def test_it_can_be_quiet_and_finds_a_backend(capsys: pytest.CaptureFixture[str]) -> None:
    assert selfcheck(verbose=False)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("wrong", [lambda losses: 1.001 * losses, lambda losses: np.nan * losses])
def test_it_fails_where_losses_are_wrong(
    wrong: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = frc.rnnt_loss
    module = sys.modules[Check.__module__]  # the package's name for it is the function
    monkeypatch.setattr(module, "rnnt_loss", lambda *args, **options: wrong(right(*args, **options)))
    assert not selfcheck("numpy")
    out = capsys.readouterr().out
    assert out.startswith("numpy: FAILED\n")
    assert "  FAIL equal scores" in out


def test_a_check_that_gives_nan_has_not_passed() -> None:
    assert Check("a sum", 1e-6, 1e-5).passed
    assert not Check("a sum", float("nan"), 1e-5).passed


def test_a_missing_backend_is_named() -> None:
    if not backends.unavailable("cuda"):
        pytest.skip("there is a GPU")
    with pytest.raises(frc.BackendUnavailableError, match="cuda: "):
        selfcheck("cuda")
