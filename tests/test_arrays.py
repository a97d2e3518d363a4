"""Arrays of other libraries: they come in as views and results go back as what came."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flash_rnnt_cupy as frc
from flash_rnnt_cupy import InputError, InputTypeError
from flash_rnnt_cupy.adapters.arrays import host_integers, open_array
from tests.problems import draw_joint, draw_logits


class Foreign:
    """An array of some other library, with the protocol alone."""

    def __init__(self, array: Any, device: tuple[int, int] = (1, 0)) -> None:
        self.array, self.device = array, device

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


class WithGradient(Foreign):
    requires_grad = True


class Refusing(Foreign):
    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("no such dtype")


def test_numpy_arrays_are_taken_as_they_are() -> None:
    array = np.ones((2, 3), np.float32)
    opened = open_array("x", array)
    assert opened.array is array
    assert opened.facts == ((2, 3), "float32", "cpu")
    assert opened.restore(array) is array


def test_other_libraries_arrays_are_views() -> None:
    array = np.zeros((2, 3))
    opened = open_array("x", Foreign(array))
    assert np.shares_memory(opened.array, array)
    assert isinstance(opened.restore(array), np.ndarray)


@pytest.mark.parametrize("value", [[[1, 2], [3, 4]], (1.5, 2.5), 3, 2.5, np.float32(1)])
def test_lists_and_scalars_become_arrays(value: Any) -> None:
    np.testing.assert_array_equal(open_array("x", value).array, value)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (object(), InputTypeError, "x: expected an array .*got object"),
        (None, InputTypeError, "x: expected an array .*got NoneType"),
        ("text", InputTypeError, "x: expected an array .*got str"),
        ([[1, 2], [3]], InputError, "x: expected rows of equal length"),
        (Foreign(np.ones(2), device=(8, 0)), InputError, "x: expected an array in host.*got DLPack device type 8"),
        (WithGradient(np.ones(2)), InputError, "x: expected an array that needs no gradient.*adapters.pytorch"),
        (Refusing(np.ones(2)), InputTypeError, "x: expected a dtype that NumPy can hold, got no such dtype"),
    ],
    ids=lambda value: getattr(value, "__name__", None) or type(value).__name__,
)
def test_what_is_no_usable_array_is_refused(value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        open_array("x", value)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_integers_become_int64(dtype: str) -> None:
    integers = host_integers("n", np.array([1, 2], dtype))
    assert integers.dtype == np.int64
    assert integers.tolist() == [1, 2]


@pytest.mark.parametrize("empty", [[], [[], []], ()])
def test_empty_lists_are_integers(empty: Any) -> None:
    assert host_integers("n", empty).dtype == np.int64


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint64", "float32", "bool"])
def test_other_dtypes_are_no_integers(dtype: str) -> None:
    with pytest.raises(InputTypeError, match=f"n: expected int32 or int64, got {dtype}"):
        host_integers("n", np.zeros(3, dtype))


def test_torch_tensors_in_and_out() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    problem = draw_joint(dtype="float32")
    tensors = [torch.from_numpy(np.ascontiguousarray(array)) for array in problem.args]
    losses, gradients = frc.joint_rnnt_loss_and_grad(*tensors, reduction="none", backend="numpy")
    expected_losses, expected = frc.joint_rnnt_loss_and_grad(*problem.args, reduction="none", backend="numpy")
    assert isinstance(losses, torch.Tensor)
    np.testing.assert_array_equal(losses.numpy(), expected_losses)
    for name in ("encoder", "predictor", "weight", "bias"):
        assert isinstance(getattr(gradients, name), torch.Tensor)
        np.testing.assert_array_equal(getattr(gradients, name).numpy(), getattr(expected, name))
    logits = draw_logits(dtype="float32")
    loss = frc.rnnt_loss(*(torch.from_numpy(array) for array in logits.args), backend="numpy")
    assert isinstance(loss, torch.Tensor)
    assert loss.shape == ()
    with pytest.raises(InputError, match="encoder: expected an array that needs no gradient"):
        frc.joint_rnnt_loss(tensors[0].requires_grad_(), *tensors[1:])
