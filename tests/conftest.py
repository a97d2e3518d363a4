"""The backends under test. A test that takes ``backend`` gives and gets NumPy arrays, and runs on each."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any

import hypothesis
import numpy as np
import numpy.typing as npt
import pytest

import flash_rnnt_cupy as frc
from flash_rnnt_cupy import backends
from tests import problems
from tests.oracles.checks import assert_close
from tests.problems import Array, Joint, Logits, Truth

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_pytorch_*.py", "test_demo.py"]

hypothesis.settings.register_profile("tests", deadline=None, max_examples=25, derandomize=True)
hypothesis.settings.load_profile("tests")

Layout = Callable[[ModuleType, Any], Any]  # (array module, array) -> the same values, laid out otherwise


def as_given(module: ModuleType, array: Any) -> Any:
    del module
    return array


@dataclasses.dataclass(frozen=True)
class BackendUnderTest:
    """The public calls on one backend; floating-point arrays go to its device, results come back.

    Losses are not reduced and backward is dense, unless a test asks for something else.
    """

    name: str
    module: ModuleType  # of the device's arrays

    def joint(self, problem: Joint, *, layout: Layout = as_given, **options: Any) -> tuple[Array, frc.Gradients]:
        arguments = self._moved(problem.args, layout)
        options = self._options(problem, options)
        losses, gradients = frc.joint_rnnt_loss_and_grad(*arguments, **options)
        fields = {field.name: getattr(gradients, field.name) for field in dataclasses.fields(gradients)}
        return self._host(losses), frc.Gradients(**{name: self._host(value) for name, value in fields.items()})

    def joint_loss(self, problem: Joint, *, layout: Layout = as_given, **options: Any) -> Array:
        arguments = self._moved(problem.args, layout)
        return self._host(frc.joint_rnnt_loss(*arguments, **self._options(problem, options)))

    def logits(self, problem: Logits, *, layout: Layout = as_given, **options: Any) -> tuple[Array, Array]:
        arguments = self._moved(problem.args, layout)
        losses, gradient = frc.rnnt_loss_and_grad(*arguments, **self._options(problem, options))
        return self._host(losses), self._host(gradient)

    def logits_loss(self, problem: Logits, *, layout: Layout = as_given, **options: Any) -> Array:
        arguments = self._moved(problem.args, layout)
        return self._host(frc.rnnt_loss(*arguments, **self._options(problem, options)))

    def logits_overwritten(self, problem: Logits, **options: Any) -> tuple[Array, Array, Array]:
        """Losses, gradient, and what the caller's logits hold afterwards."""
        logits, *rest = self._moved((problem.logits.copy(), *problem.args[1:]), as_given)
        options = self._options(problem, options) | {"overwrite_logits": True}
        losses, gradient = frc.rnnt_loss_and_grad(logits, *rest, **options)
        return self._host(losses), self._host(gradient), self._host(logits)

    def workspace_dtype(self, dtype: str) -> str:
        return backends.load(self.name, "cpu" if self.name == "numpy" else "cuda:0").facts.workspace_dtype(dtype)

    def assert_near(
        self, actual: npt.ArrayLike, truth: npt.ArrayLike, dtype: str, *, names: str = "array", factor: float = 100.0
    ) -> None:
        """Within ``factor`` roundings of the workspace, relative to the largest value, and 2 of the result."""
        ours, exact = np.asarray(actual, np.float64), np.asarray(truth, np.float64)
        largest = float(np.abs(exact[np.isfinite(exact)]).max(initial=0.0))
        atol = factor * problems.epsilon(self.workspace_dtype(dtype)) * largest
        rtol = 2 * problems.epsilon(dtype)
        assert_close(ours, exact, rtol=rtol, atol=atol, names=names)

    def assert_gradients(self, gradients: frc.Gradients, truth: Truth, dtype: str, *, factor: float = 100.0) -> None:
        for name, expected in truth.gradients.items():
            self.assert_near(getattr(gradients, name), expected, dtype, names=name, factor=factor)

    def _moved(self, arguments: tuple[Any, ...], layout: Layout) -> list[Any]:
        return [self._device(argument, layout) for argument in arguments]

    def _device(self, value: Any, layout: Layout = as_given) -> Any:
        """Integers may stay on the host."""
        if not isinstance(value, np.ndarray) or value.dtype.kind in "iu":
            return value
        return layout(self.module, self.module.asarray(value))

    def _host(self, value: Any) -> Any:
        return value.get() if hasattr(value, "get") else value

    def _options(self, problem: Joint | Logits, options: dict[str, Any]) -> dict[str, Any]:
        moved = {name: self._device(value) for name, value in options.items()}
        defaults: dict[str, Any] = {"blank": problem.blank, "backend": self.name, "reduction": "none"}
        if isinstance(problem, Joint):
            defaults["min_occupancy"] = 0
        return defaults | moved


@pytest.fixture(scope="session", params=["numpy", "cuda", "cuda-generic"])
def backend(request: pytest.FixtureRequest) -> BackendUnderTest:
    if request.param == "numpy":
        return BackendUnderTest("numpy", np)
    if reason := backends.unavailable(request.param):
        pytest.skip(reason)
    import cupy  # noqa: PLC0415

    return BackendUnderTest(request.param, cupy)
