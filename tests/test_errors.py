"""Every user error: its type, and a message that names the argument, what was expected, what came, and where."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flash_rnnt_cupy as frc
from flash_rnnt_cupy import InputError, InputTypeError, PlanError, backends, validate
from flash_rnnt_cupy.adapters.arrays import Facts
from tests.problems import draw_joint, draw_logits

JOINT = draw_joint((4, 3), (2, 1), H=5, V=7, dtype="float32", padding=1)  # [2, 5, 5], [2, 4, 5], targets [2, 3]
LOGITS = draw_logits((4, 3), (2, 1), V=7, dtype="float32", padding=1)  # [2, 5, 4, 7]
PACKED = JOINT.packed("encoder", "predictor", "targets")  # [7, 5], [5, 5], [3]

DEFAULTS = {"reduction": "none", "backend": "numpy"}
JOINT_NAMES = ("encoder", "predictor", "weight", "bias", "targets", "encoder_lengths", "target_lengths")
LOGITS_NAMES = ("logits", "targets", "logit_lengths", "target_lengths")


def call_joint(arguments: dict[str, Any]) -> Any:
    given = dict(zip(JOINT_NAMES, JOINT.args, strict=True)) | DEFAULTS | arguments
    return frc.joint_rnnt_loss_and_grad(**given)


def call_packed(arguments: dict[str, Any]) -> Any:
    return call_joint(dict(zip(JOINT_NAMES, PACKED.args, strict=True)) | arguments)


def call_logits(arguments: dict[str, Any]) -> Any:
    given = dict(zip(LOGITS_NAMES, LOGITS.args, strict=True)) | DEFAULTS | arguments
    return frc.rnnt_loss_and_grad(**given)


def with_label(label: int, b: int, u: int) -> Any:
    targets = JOINT.targets.copy()
    targets[b, u] = label
    return targets


def zeros(*shape: int, dtype: str = "float32") -> Any:
    return np.zeros(shape, dtype)


WRONG_JOINT = {
    # arrays
    "encoder dtype": ({"encoder": zeros(2, 5, 5, dtype="int32")}, r"encoder: expected one of float16.*got int32"),
    "complex weight": ({"weight": zeros(7, 5, dtype="complex64")}, r"weight: expected one of float16.*got complex64"),
    "states of two dtypes": (
        {"predictor": zeros(2, 4, 5, dtype="float16")},
        r"predictor: expected float32, as encoder, got float16",
    ),
    "parameters of two dtypes": (
        {"bias": zeros(7, dtype="float64")},
        r"bias: expected float32, as weight, got float64",
    ),
    "weight shape": ({"weight": zeros(7)}, r"weight: expected shape \[V, H\], got shape \(7,\)"),
    "empty weight": ({"weight": zeros(0, 5), "bias": None}, r"weight: expected shape \[V, H\], got shape \(0, 5\)"),
    "bias shape": ({"bias": zeros(5)}, r"bias: expected shape \(7,\), one for each row of weight, got \(5,\)"),
    "encoder width": ({"encoder": zeros(2, 5, 6)}, r"encoder: expected .* with H = 5, as weight, got \(2, 5, 6\)"),
    "predictor width": ({"predictor": zeros(2, 4, 4)}, r"predictor: expected .* H = 5, as weight, got \(2, 4, 4\)"),
    "predictor axes": ({"predictor": zeros(5)}, r"predictor: expected .*packed.*got \(5,\)"),
    "too few frames": (
        {"encoder": zeros(2, 3, 5)},
        r"encoder: expected at least 4 frames, got 3 at utterance 0",
    ),
    "states as many as labels": (
        {"predictor": zeros(2, 2, 5)},
        r"predictor: expected at least 3 states; U labels have U \+ 1.*got 2 at utterance 0",
    ),
    "predictor batch": ({"predictor": zeros(3, 4, 5)}, r"predictor: expected B = 2 utterances.*got 3"),
    "an object": ({"encoder": {}}, r"encoder: expected an array .*got dict"),
    "no encoder": ({"encoder": None}, r"encoder: expected an array, got None"),
    "no weight": ({"weight": None}, r"weight: expected an array, got None"),
    "a ragged list": ({"targets": [[1, 2], [3]]}, r"targets: expected rows of equal length"),
    # targets
    "target batch": ({"targets": JOINT.targets[:1]}, r"targets: expected B = 2 utterances.*got 1"),
    "target width": ({"targets": JOINT.targets[:, :1]}, r"targets: expected at least 2 labels, got 1 at utterance 0"),
    "target axes": ({"targets": JOINT.targets[..., None]}, r"targets: expected \[B, U\], or packed.*shape \(2, 3, 1\)"),
    "label of V": ({"targets": with_label(7, 0, 1)}, r"targets: .*0 \.\.\. 6.*got 7 at utterance 0, position 1"),
    "label beyond V": ({"targets": with_label(12, 1, 0)}, r"targets: .*got 12 at utterance 1, position 0"),
    "negative label": ({"targets": with_label(-1, 0, 0)}, r"targets: .*got -1 at utterance 0, position 0"),
    "huge label": ({"targets": with_label(2**40, 0, 0)}, r"targets: .*got 1099511627776 at utterance 0"),
    "blank as label": ({"targets": with_label(6, 1, 0)}, r"targets: .*other than blank = 6, got 6 at utterance 1"),
    "blank 2 as label": ({"blank": 2, "targets": [[1, 2], [1, 1]]}, r"targets: .*blank = 2, got 2 at .*position 1"),
    "float targets": ({"targets": JOINT.targets.astype("float32")}, r"targets: expected int32 or int64, got float32"),
    "byte targets": ({"targets": np.ones((2, 3), np.uint8)}, r"targets: expected int32 or int64, got uint8"),
    "lengths as floats": ({"target_lengths": [2.0, 1.0]}, r"target_lengths: expected int32 or int64, got float64"),
    # lengths
    "frames beyond T": ({"encoder_lengths": [4, 6]}, r"encoder: expected at least 6 frames, got 5 at utterance 1"),
    "labels beyond U": ({"target_lengths": [2, 4]}, r"predictor: expected at least 5 states.*got 4 at utterance 1"),
    "no frames": ({"encoder_lengths": [4, 0]}, r"encoder_lengths: expected at least 1, got 0 at utterance 1"),
    "negative frames": ({"encoder_lengths": [-3, 4]}, r"encoder_lengths: expected at least 1, got -3 at utterance 0"),
    "negative labels": ({"target_lengths": [2, -1]}, r"target_lengths: expected at least 0, got -1 at utterance 1"),
    "lengths that would wrap": (
        {"encoder_lengths": [4, 2**32 + 3]},
        r"encoder_lengths: .*got 4294967299 at utterance 1",
    ),
    "too many lengths": ({"encoder_lengths": [4, 3, 1]}, r"encoder_lengths: .*shape \(2,\), got shape \(3,\)"),
    "a single length": ({"target_lengths": 2}, r"target_lengths: .*shape \(2,\), got shape \(\)"),
    # options
    "blank of V": ({"blank": 7}, r"blank: expected -V <= blank < V = 7, got 7"),
    "blank of V + 1": ({"blank": 8}, r"blank: expected .*got 8"),
    "blank below -V": ({"blank": -8}, r"blank: expected .*got -8"),
    "blank True": ({"blank": True}, r"blank: expected an integer, got True"),
    "blank 1.0": ({"blank": 1.0}, r"blank: expected an integer, got 1\.0"),
    "activation": ({"activation": "softplus"}, r"activation: expected one of relu, .*got 'softplus'"),
    "dropout 1": ({"dropout": 1}, r"dropout: expected 0 <= dropout < 1, got 1"),
    "dropout -0.1": ({"dropout": -0.1}, r"dropout: expected 0 <= dropout < 1, got -0\.1"),
    "dropout nan": ({"dropout": float("nan")}, r"dropout: .*got nan"),
    "dropout text": ({"dropout": "0.1"}, r"dropout: .*got '0\.1'"),
    "dropout True": ({"dropout": True}, r"dropout: .*got True"),
    "seed -1": ({"seed": -1}, r"seed: expected 0 <= seed < 2\*\*64, got -1"),
    "seed 2**64": ({"seed": 2**64}, r"seed: expected 0 <= seed < 2\*\*64, got 18446744073709551616"),
    "seed 0.5": ({"seed": 0.5}, r"seed: expected an integer.*got 0\.5"),
    "fastemit -1": ({"fastemit_lambda": -1}, r"fastemit_lambda: expected a finite number >= 0, got -1"),
    "fastemit inf": ({"fastemit_lambda": np.inf}, r"fastemit_lambda: expected a finite number >= 0, got inf"),
    "clamp nan": ({"clamp": np.nan}, r"clamp: expected a number, or None, got nan"),
    "clamp text": ({"clamp": "1"}, r"clamp: expected a number, or None, got '1'"),
    "min_occupancy 1": ({"min_occupancy": 1.0}, r"min_occupancy: expected 0 <= min_occupancy < 1, got 1\.0"),
    "min_occupancy None": ({"min_occupancy": None}, r"min_occupancy: .*got None"),
    "zero_infinity 1": ({"zero_infinity": 1}, r"zero_infinity: expected True or False, got 1"),
    "reduction": ({"reduction": "avg"}, r"reduction: expected one of none, sum, mean, .*got 'avg'"),
    "tile_rows 0": ({"tile_rows": 0}, r"tile_rows: expected at least 1, got 0"),
    "tile_rows text": ({"tile_rows": "all"}, r'tile_rows: expected "auto", None .*got \'all\''),
    "tile_rows 2.0": ({"tile_rows": 2.0}, r"tile_rows: expected an integer, got 2\.0"),
    "workspace 0": ({"workspace_bytes": 0}, r"workspace_bytes: expected at least 1, got 0"),
    "workspace too small": (
        {"workspace_bytes": 48},
        r"workspace_bytes: expected at least 49 bytes.*got 48 \(give more",
    ),
    "backend": ({"backend": "tpu"}, r"backend: expected one of auto, .*numpy.*got 'tpu'"),
    "upstream shape": (
        {"grad_losses": zeros(3)},
        r"grad_losses: expected shape \(2,\), as the losses, got shape \(3,\)",
    ),
    "upstream scalar": ({"grad_losses": 1.0}, r"grad_losses: expected shape \(2,\), as the losses, got shape \(\)"),
    "upstream vector": (
        {"grad_losses": zeros(2), "reduction": "sum"},
        r"grad_losses: expected a scalar, as the reduced loss, got shape \(2,\)",
    ),
    "complex upstream": ({"grad_losses": np.ones(2, complex)}, r"grad_losses: expected real numbers, got complex128"),
}
WRONG_PACKED = {
    "frames": ({"encoder": zeros(8, 5)}, r"encoder: expected 7 packed frames, got 8"),
    "states": ({"predictor": zeros(3, 5)}, r"predictor: expected 5 packed states; U labels have U \+ 1.*got 3"),
    "labels": ({"targets": [1, 2]}, r"targets: expected 3 packed labels, got 2"),
    "label": ({"targets": [1, 2, 9]}, r"targets: .*got 9 at utterance 1, position 0"),
    "lengths": (
        {"encoder_lengths": [[4, 3]]},
        r"encoder_lengths: expected one length an utterance.*got shape \(1, 2\)",
    ),
    "two batches": ({"target_lengths": [2, 1, 1]}, r"target_lengths: .*shape \(2,\), got shape \(3,\)"),
}
WRONG_LOGITS = {
    "dtype": ({"logits": zeros(2, 5, 4, 7, dtype="int64")}, r"logits: expected one of float16.*got int64"),
    "axes": ({"logits": zeros(2, 5, 7)}, r"logits: expected \[B, T, U1, V\], or packed .*got shape \(2, 5, 7\)"),
    "no classes": ({"logits": zeros(2, 5, 4, 0)}, r"logits: expected \[B, T, U1, V\].*got shape \(2, 5, 4, 0\)"),
    "frames": ({"logit_lengths": [4, 9]}, r"logits: expected at least 9 frames, got 5 at utterance 1"),
    "U in place of U + 1": (
        {"logits": zeros(2, 5, 2, 7)},
        r"logits: expected at least 3 states; U labels have U \+ 1.*got 2 at utterance 0",
    ),
    "packed without rows": (
        {"logits": zeros(17, 7)},
        r"logits: expected 18 packed rows, T \(U \+ 1\) an utterance, got 17",
    ),
    "batch": ({"logits": zeros(3, 5, 4, 7)}, r"logit_lengths: .*shape \(3,\), got shape \(2,\)"),
    "no frames": ({"logit_lengths": [4, 0]}, r"logit_lengths: expected at least 1, got 0 at utterance 1"),
    "blank": ({"blank": 7}, r"blank: expected -V <= blank < V = 7, got 7"),
    "label": ({"targets": with_label(7, 1, 0)}, r"targets: .*got 7 at utterance 1, position 0"),
    "reduction": ({"reduction": "batchmean"}, r"reduction: expected one of"),
    "clamp": ({"clamp": "off"}, r"clamp: expected a number, or None, got 'off'"),
}

TYPE_ERRORS = {
    "encoder dtype", "complex weight", "states of two dtypes", "parameters of two dtypes", "an object",
    "no encoder", "no weight", "float targets", "byte targets", "lengths as floats", "blank True", "blank 1.0",
    "dropout text", "dropout True", "seed 0.5", "clamp text", "min_occupancy None", "zero_infinity 1",
    "tile_rows 2.0", "complex upstream", "dtype", "clamp",
}  # fmt: skip

CASES = [
    (call, name, *case)
    for call, cases in ((call_joint, WRONG_JOINT), (call_packed, WRONG_PACKED), (call_logits, WRONG_LOGITS))
    for name, case in cases.items()
]


@pytest.mark.parametrize(
    ("call", "name", "arguments", "message"), CASES, ids=[f"{call.__name__[5:]}, {name}" for call, name, *_ in CASES]
)
def test_a_wrong_argument_is_named(
    call: Callable[[dict[str, Any]], Any], name: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        call(arguments)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, TypeError) == (name in TYPE_ERRORS)
    assert str(caught.value).startswith(f"{caught.value.argument}: expected {caught.value.expected}, got ")


@pytest.mark.parametrize(
    ("call", "arguments"), [(call, arguments) for call, _, arguments, _ in CASES], ids=range(len(CASES))
)
def test_nothing_is_computed_before_an_error(
    call: Callable[[dict[str, Any]], Any], arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_reached(*_: Any) -> None:
        raise AssertionError("the pipeline was started")

    monkeypatch.setattr("flash_rnnt_cupy.pipeline.forward", not_reached)
    with pytest.raises(InputError):
        call(arguments)


def test_a_wrong_upstream_gradient_of_the_logits_leaves_them_as_they_were() -> None:
    logits = np.nan_to_num(LOGITS.logits)
    before = logits.copy()
    with pytest.raises(InputError, match="grad_losses"):
        call_logits({"logits": logits, "grad_losses": zeros(3), "overwrite_logits": True})
    np.testing.assert_array_equal(logits, before)


def test_text_is_no_upstream_gradient() -> None:
    with pytest.raises(InputError, match="grad_losses: expected real numbers"):
        call_joint({"grad_losses": ["a", "b"]})


def test_read_only_logits_cannot_be_overwritten() -> None:
    logits = np.nan_to_num(LOGITS.logits)
    logits.flags.writeable = False
    with pytest.raises(InputError, match="logits: expected an array that can be overwritten, got a read-only one"):
        call_logits({"logits": logits, "overwrite_logits": True})


def test_a_tile_that_does_not_fit_is_a_plan_error() -> None:
    with pytest.raises(PlanError, match="workspace_bytes"):
        call_joint({"workspace_bytes": 100, "tile_rows": 10})


def test_garbage_beyond_a_transcript_is_no_label() -> None:
    assert np.isfinite(call_joint({"targets": with_label(99, 1, 1)})[0]).all()


def test_arrays_on_two_devices_are_refused() -> None:
    arrays = {
        "encoder": Facts((2, 5, 5), "float32", "cuda:0"),
        "predictor": Facts((2, 4, 5), "float32", "cuda:0"),
        "weight": Facts((7, 5), "float32", "cuda:1"),
    }
    with pytest.raises(InputError, match="weight: expected an array on cuda:0, as encoder, got cuda:1"):
        validate.joint_problem(arrays, JOINT.targets, JOINT.frames, JOINT.labels, -1, validate.check_options())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"encoder_lengths": [5, 0]}, "encoder_lengths: expected at least 1, got 0 at utterance 1"),
        ({"target_lengths": [3]}, r"target_lengths: .*shape \(2,\), got shape \(1,\)"),
        ({"joint_width": 0}, "joint_width: expected at least 1, got 0"),
        ({"vocabulary": 1.5}, r"vocabulary: expected an integer, got 1\.5"),
        ({"dtype": "int8"}, "dtype: expected one of float16.*got 'int8'"),
        ({"parameter_dtype": "half"}, "parameter_dtype: expected one of float16.*got 'half'"),
        ({"tile_rows": -1}, "tile_rows: expected at least 1, got -1"),
        ({"workspace_bytes": 8}, "workspace_bytes: expected at least .*got 8"),
        ({"backend": "tpu"}, "backend: expected one of auto"),
    ],
)
def test_plan_memory_names_a_wrong_argument(arguments: dict[str, Any], message: str) -> None:
    given = {"encoder_lengths": [5, 4], "target_lengths": [3, 2], "joint_width": 6, "vocabulary": 9, "backend": "numpy"}
    with pytest.raises(InputError, match=message):
        frc.plan_memory(**given | arguments)


def test_an_error_says_where_and_what_to_do() -> None:
    error = InputTypeError("x", "a number", "text", where="utterance 3", remedy="write one")
    assert str(error) == "x: expected a number, got text at utterance 3 (write one)"
    assert isinstance(error, InputError)


def test_a_missing_backend_is_no_silent_fallback() -> None:
    reason = backends.unavailable("cuda")
    if not reason:
        pytest.skip("there is a GPU")
    with pytest.raises(frc.BackendUnavailableError, match=r"no backend for rnnt joint: B=2.*cuda: "):
        call_joint({"backend": "cuda"})


def test_every_option_has_a_check() -> None:
    checked = {re.split(r":", message.replace("\\", ""))[0] for _, message in WRONG_JOINT.values()}
    wanted = {"blank", "activation", "dropout", "seed", "fastemit_lambda", "clamp", "reduction", "zero_infinity"}
    assert wanted | {"tile_rows", "workspace_bytes", "min_occupancy", "backend", "grad_losses"} <= checked
    assert set(JOINT_NAMES) <= checked
