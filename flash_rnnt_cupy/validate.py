"""From arguments to a `Problem`: every user error is found here, before anything is launched or written.

Works on shapes, dtypes and host integers alone, so it never waits for a GPU.
"""

from __future__ import annotations

import math
import operator
import secrets
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from flash_rnnt_cupy.errors import InputError, InputTypeError
from flash_rnnt_cupy.plan import Packing, TileRows
from flash_rnnt_cupy.problem import ACTIVATIONS, FLOATS, Form, Options, Problem
from flash_rnnt_cupy.topology import RNNT

REDUCTIONS = ("none", "sum", "mean", "mean_volume", "mean_per_label")

Integers = npt.NDArray[np.int64]


class Facts(Protocol):
    """Shape, dtype name and device ("cpu", "cuda:0") of an array."""

    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def dtype(self) -> str: ...  # noqa: D102
    @property
    def device(self) -> str: ...  # noqa: D102


def joint_problem(
    arrays: Mapping[str, Facts],
    targets: Integers,
    encoder_lengths: Integers,
    target_lengths: Integers,
    blank: int,
    options: Options,
) -> Problem:
    """The problem of a joint-form call; ``arrays`` holds encoder, predictor, weight and perhaps bias."""
    for name in ("encoder", "predictor", "weight"):
        if name not in arrays:
            raise InputTypeError(name, "an array", "None")
    encoder, predictor, weight = arrays["encoder"], arrays["predictor"], arrays["weight"]
    _float_dtypes(arrays)
    _one_device(arrays)
    if len(weight.shape) != 2 or 0 in weight.shape:
        raise InputError("weight", "shape [V, H]", f"shape {weight.shape}")
    vocabulary, width = weight.shape
    if predictor.dtype != encoder.dtype:
        raise InputTypeError("predictor", f"{encoder.dtype}, as encoder", predictor.dtype)
    if "bias" in arrays and arrays["bias"].dtype != weight.dtype:
        raise InputTypeError("bias", f"{weight.dtype}, as weight", arrays["bias"].dtype)
    if "bias" in arrays and arrays["bias"].shape != (vocabulary,):
        raise InputError("bias", f"shape ({vocabulary},), one for each row of weight", arrays["bias"].shape)
    check_lengths({"encoder_lengths": encoder_lengths, "target_lengths": target_lengths}, _batch(encoder, 3))
    packing = Packing(encoder_lengths, target_lengths)
    for name, facts in (("encoder", encoder), ("predictor", predictor)):
        if len(facts.shape) not in (2, 3) or facts.shape[-1] != width:
            raise InputError(name, f"[B, *, H] or packed [*, H] with H = {width}, as weight", facts.shape)
    _covers("encoder", encoder.shape[:-1], encoder_lengths, "frames")
    _covers("predictor", predictor.shape[:-1], packing.states_b, _STATES)
    blank = _blank(blank, vocabulary)
    _labels(targets, packing, vocabulary, blank)
    return Problem(
        form=Form.JOINT,
        topology=RNNT,
        frames_b=encoder_lengths,
        labels_b=target_lengths,
        vocabulary=vocabulary,
        blank=blank,
        dtype=encoder.dtype,
        shapes={name: facts.shape for name, facts in arrays.items()},
        options=options,
        joint_width=width,
        parameter_dtype=weight.dtype,
    )


def logits_problem(
    logits: Facts,
    targets: Integers,
    logit_lengths: Integers,
    target_lengths: Integers,
    blank: int,
    options: Options,
    fused_log_softmax: bool,
) -> Problem:
    """The problem of a logits-form call."""
    _float_dtypes({"logits": logits})
    check_lengths({"logit_lengths": logit_lengths, "target_lengths": target_lengths}, _batch(logits, 4))
    packing = Packing(logit_lengths, target_lengths)
    shape = logits.shape
    if len(shape) not in (2, 4) or shape[-1] == 0:
        raise InputError("logits", "[B, T, U1, V], or packed [sum of T (U + 1), V]", f"shape {shape}")
    if len(shape) == 4:
        _covers("logits", shape[:2], logit_lengths, "frames")
        _covers("logits", (shape[0], shape[2]), packing.states_b, _STATES)
    else:
        _covers("logits", shape[:1], logit_lengths * packing.states_b, "rows, T (U + 1) an utterance")
    blank = _blank(blank, shape[-1])
    _labels(targets, packing, shape[-1], blank)
    return Problem(
        form=Form.LOGITS if fused_log_softmax else Form.LOG_PROBS,
        topology=RNNT,
        frames_b=logit_lengths,
        labels_b=target_lengths,
        vocabulary=shape[-1],
        blank=blank,
        dtype=logits.dtype,
        shapes={"logits": shape},
        options=options,
    )


def check_options(
    *,
    activation: str = "relu",
    dropout: float = 0.0,
    seed: int | None = None,
    fastemit_lambda: float = 0.0,
    clamp: float | None = None,
    zero_infinity: bool = False,
    min_occupancy: float = 0.0,
) -> Options:
    """The options, checked. A clamp of None or <= 0 is off; without a seed a fresh one is drawn."""
    if activation not in ACTIVATIONS:
        raise InputError("activation", f"one of {', '.join(ACTIVATIONS)}", repr(activation))
    _real("dropout", dropout, "0 <= dropout < 1", 0, 1)
    _real("fastemit_lambda", fastemit_lambda, "a finite number >= 0", 0, math.inf)
    _real("min_occupancy", min_occupancy, "0 <= min_occupancy < 1", 0, 1)
    if clamp is not None:
        _real("clamp", clamp, "a number, or None", -math.inf, math.inf)
    if not isinstance(zero_infinity, (bool, np.bool_)):
        raise InputTypeError("zero_infinity", "True or False", repr(zero_infinity))
    if seed is None:
        seed = secrets.randbits(64) if dropout else 0
    seed = _integer("seed", seed, "an integer 0 <= seed < 2**64, or None")
    if not 0 <= seed < 2**64:
        raise InputError("seed", "0 <= seed < 2**64", seed)
    return Options(
        activation=activation,
        dropout=float(dropout),
        seed=seed,
        fastemit_lambda=float(fastemit_lambda),
        clamp=None if clamp is None or clamp <= 0 else float(clamp),
        zero_infinity=bool(zero_infinity),
        min_occupancy=float(min_occupancy),
    )


def check_tiling(tile_rows: Any, workspace_bytes: Any) -> tuple[TileRows, int | None]:
    """Both as ints, or as given where they are "auto" or None."""
    if isinstance(tile_rows, str) and tile_rows != "auto":
        raise InputError("tile_rows", '"auto", None (untiled), or a number of rows', repr(tile_rows))
    if tile_rows is not None and tile_rows != "auto":
        tile_rows = check_size("tile_rows", tile_rows)
    return tile_rows, None if workspace_bytes is None else check_size("workspace_bytes", workspace_bytes)


def check_lengths(lengths: Mapping[str, Integers], batch: int | None) -> None:
    """Frames, then labels: both 1-D of the same size; frames >= 1, labels >= 0."""
    for (name, values), least in zip(lengths.items(), (1, 0), strict=True):
        batch = len(values) if batch is None and values.ndim == 1 else batch
        if values.shape != (batch,):
            raise InputError(name, f"one length an utterance, shape ({batch},)", f"shape {values.shape}")
        _each(name, values, values < least, f"at least {least}")
        _each(name, values, values >= 2**31, "less than 2**31")


def check_size(name: str, value: Any) -> int:
    """A number of things, at least one."""
    size = _integer(name, value, "an integer")
    if size < 1:
        raise InputError(name, "at least 1", size)
    return size


def reduction_weights(reduction: str, target_lengths: Integers) -> npt.NDArray[np.float64] | None:
    """w_b such that the reduced loss is sum over b of w_b NLL_b, [B]; None for "none".

    sum           1
    mean          1 / B
    mean_volume   1 / sum of U_b
    mean_per_label  1 / (B U_b)

    A count of zero divides as one, so that empty batches and transcripts give finite results.
    """
    batch = len(target_lengths)
    if reduction == "none":
        return None
    if reduction == "sum":
        return np.ones(batch)
    if reduction == "mean":
        return np.full(batch, 1 / max(batch, 1))
    if reduction == "mean_volume":
        return np.full(batch, 1 / max(int(target_lengths.sum()), 1))
    if reduction == "mean_per_label":
        return np.asarray(1 / (max(batch, 1) * np.maximum(target_lengths, 1)))
    raise InputError("reduction", f"one of {', '.join(REDUCTIONS)}", repr(reduction))


_STATES = "states; U labels have U + 1, the first follows the start symbol"


def _float_dtypes(arrays: Mapping[str, Facts]) -> None:
    for name, facts in arrays.items():
        if facts.dtype not in FLOATS:
            raise InputTypeError(name, f"one of {', '.join(FLOATS)}", facts.dtype)


def _one_device(arrays: Mapping[str, Facts]) -> None:
    first = arrays["encoder"].device
    for name, facts in arrays.items():
        if facts.device != first:
            raise InputError(name, f"an array on {first}, as encoder", facts.device)


def _batch(facts: Facts, padded_ndim: int) -> int | None:
    """B, where the array shows it."""
    return facts.shape[0] if len(facts.shape) == padded_ndim else None


def _each(name: str, values: Integers, wrong_b: npt.NDArray[np.bool_], expected: str) -> None:
    """Names the first utterance whose value is wrong."""
    if wrong_b.any():
        b = int(np.flatnonzero(wrong_b)[0])
        raise InputError(name, expected, int(values[b]), f"utterance {b}")


def _covers(name: str, shape: tuple[int, ...], needed_b: Integers, unit: str) -> None:
    """A padded [B, longest] or packed [sum] shape holds what each utterance needs."""
    if len(shape) == 2:
        if shape[0] != len(needed_b):
            raise InputError(name, f"B = {len(needed_b)} utterances, as the lengths", shape[0])
        short = needed_b > shape[1]
        if short.any():
            b = int(np.flatnonzero(short)[0])
            raise InputError(name, f"at least {needed_b[b]} {unit}", shape[1], f"utterance {b}")
    elif shape[0] != needed_b.sum():
        raise InputError(name, f"{needed_b.sum()} packed {unit}", shape[0])


def _blank(blank: Any, vocabulary: int) -> int:
    """The blank's index; negative ones count from the end."""
    index = _integer("blank", blank, "an integer")
    if not -vocabulary <= index < vocabulary:
        raise InputError("blank", f"-V <= blank < V = {vocabulary}", index)
    return index % vocabulary


def _labels(targets: Integers, packing: Packing, vocabulary: int, blank: int) -> None:
    """Shape of targets, and every label of a transcript in 0 ... V - 1 and not blank; padding may hold anything."""
    if targets.ndim not in (1, 2):
        raise InputError("targets", "[B, U], or packed [sum of U]", f"shape {targets.shape}")
    _covers("targets", targets.shape, packing.labels_b, "labels")
    if targets.ndim == 2:
        targets = targets[np.arange(targets.shape[1])[None] < packing.labels_b[:, None]]
    wrong = np.flatnonzero((targets < 0) | (targets >= vocabulary) | (targets == blank))
    if len(wrong):
        b = int(np.searchsorted(packing.label_start_b, wrong[0], side="right")) - 1
        where = f"utterance {b}, position {wrong[0] - packing.label_start_b[b]}"
        expected = f"labels in 0 ... {vocabulary - 1} other than blank = {blank}"
        raise InputError("targets", expected, int(targets[wrong[0]]), where)


def _integer(name: str, value: Any, expected: str) -> int:
    if isinstance(value, (bool, np.bool_)):
        raise InputTypeError(name, expected, repr(value))
    try:
        return operator.index(value)
    except TypeError:
        raise InputTypeError(name, expected, repr(value)) from None


def _real(name: str, value: Any, expected: str, least: float, below: float) -> None:
    """A number least <= value < below (NaN is none)."""
    if isinstance(value, (bool, np.bool_, str)) or not hasattr(value, "__float__"):
        raise InputTypeError(name, expected, repr(value))
    if not least <= float(value) < below:
        raise InputError(name, expected, value)
