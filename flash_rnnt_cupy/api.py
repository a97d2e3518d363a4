"""The public functions, on plain arrays.

Letters: B utterances, T frames, U labels, U1 = U + 1 states, H joint width, V vocabulary with blank,
N = sum of T_b (U_b + 1) lattice nodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flash_rnnt_cupy import backends, pipeline, validate
from flash_rnnt_cupy.adapters.arrays import Opened, array_of, buffer_of, host_integers, open_array
from flash_rnnt_cupy.errors import InputError, InputTypeError
from flash_rnnt_cupy.pipeline import Gradients
from flash_rnnt_cupy.plan import MemoryAccount, TileRows, make_plan
from flash_rnnt_cupy.problem import DEFAULT_MIN_OCCUPANCY, FLOATS, Form, Inputs, Options, Problem
from flash_rnnt_cupy.topology import RNNT


def joint_rnnt_loss(
    encoder: Any,
    predictor: Any,
    weight: Any,
    bias: Any,
    targets: Any,
    encoder_lengths: Any,
    target_lengths: Any,
    *,
    blank: int = -1,
    activation: str = "relu",
    dropout: float = 0.0,
    seed: int | None = None,
    fastemit_lambda: float = 0.0,
    clamp: float | None = None,
    reduction: str = "mean",
    zero_infinity: bool = False,
    tile_rows: TileRows = "auto",
    workspace_bytes: int | None = None,
    min_occupancy: float = DEFAULT_MIN_OCCUPANCY,
    backend: str = "auto",
) -> Any:
    """Joint network and transducer loss, without the [B, T, U1, V] scores.

    Equals, for every utterance b, in float64::

        hidden = dropout(activation(encoder[b, :T, None] + predictor[b, None, :U1]))     # [T, U1, H]
        log_probs = log_softmax(hidden @ weight.T + bias)                                # [T, U1, V]
        loss[b] = -log(sum over all alignments of targets[b, :U] of their probability)

    Args:
        encoder: [B, T, H] projected encoder states, or packed [sum of T_b, H]. float16, bfloat16, float32 or
            float64. Rows t >= encoder_lengths[b] are never read and may hold anything.
        predictor: [B, U1, H] projected predictor states, or packed [sum of U1_b, H]; same dtype. State u has
            seen the first u labels: a transcript of U labels has U + 1 states. Rows u > target_lengths[b] are
            never read.
        weight: [V, H] output layer; any of the dtypes.
        bias: [V] in the weight's dtype, or None.
        targets: [B, U] labels, or packed [sum of U_b]; int32 or int64, in 0 ... V - 1 and not blank. What lies
            beyond target_lengths[b] is never read.
        encoder_lengths: [B] frames, int32 or int64, each >= 1.
        target_lengths: [B] labels, int32 or int64, each >= 0; more labels than frames are lawful.
        blank: row of weight that is the blank; negative counts from the end, -1 is the last.
        activation: "relu", "tanh", "sigmoid", "gelu" (with erf), "silu" or "identity".
        dropout: probability 0 <= p < 1 of dropping a hidden unit, in steps of 1/65536; kept ones are divided by
            1 - p. The mask depends on seed, lattice node and column alone.
        seed: 0 <= seed < 2**64; None draws a fresh one.
        fastemit_lambda: label posteriors are scaled by 1 + lambda in the gradient; the loss stays the plain NLL.
        clamp: every logit gradient at unit upstream gradient is clipped to [-clamp, clamp]; None or <= 0 is off.
        reduction: "none" (losses [B]), "sum", "mean" (over B), "mean_volume" (sum / sum of U_b),
            "mean_per_label" (mean over B of loss_b / U_b); counts of 0 divide as 1.
        zero_infinity: an utterance without any possible alignment has loss 0 instead of +inf. Its gradient is
            zero either way.
        tile_rows: rows of a tile, "auto", or None: one tile, kept from forward to backward unless the kernels are
            fused, which keep none.
        workspace_bytes: bound for a tile's hidden states, logits and active bits.
        min_occupancy: backward leaves out nodes whose posterior is below it; 0 visits all.
        backend: "auto", a name that ``python -m flash_rnnt_cupy info`` lists, or "cuda-generic": "cuda" without its
            fused kernels.

    Returns:
        float32 losses (float64 for float64 states): [B], or reduced to a scalar.

    Raises:
        InputError: names the argument, what was expected and what came; nothing has been computed then.
        PlanError: a tile does not fit workspace_bytes.
        BackendUnavailableError: the backend is missing here.

    A NaN or +inf score makes its utterance's loss NaN and no other's; -inf scores are lawful.

    Memory: C N + N numbers for the lattice (C = 2 columns) and one tile, nothing of size N x H or N x V;
    `plan_memory` adds it up. Products accumulate in float32 (float64 for float64 states), the recursion in
    float64.

    Source: Graves 2012 (arXiv:1211.3711), eq. 12-18; FastEmit: Yu et al. 2021 (arXiv:2010.11148).
    """
    options = validate.check_options(
        activation=activation,
        dropout=dropout,
        seed=seed,
        fastemit_lambda=fastemit_lambda,
        clamp=clamp,
        zero_infinity=zero_infinity,
        min_occupancy=min_occupancy,
    )
    opened = _open_joint(encoder, predictor, weight, bias, targets, encoder_lengths, target_lengths, blank, options)
    return _run(opened, reduction, backend, tile_rows, workspace_bytes)[0]


def joint_rnnt_loss_and_grad(
    encoder: Any,
    predictor: Any,
    weight: Any,
    bias: Any,
    targets: Any,
    encoder_lengths: Any,
    target_lengths: Any,
    *,
    blank: int = -1,
    activation: str = "relu",
    dropout: float = 0.0,
    seed: int | None = None,
    fastemit_lambda: float = 0.0,
    clamp: float | None = None,
    reduction: str = "mean",
    zero_infinity: bool = False,
    tile_rows: TileRows = "auto",
    workspace_bytes: int | None = None,
    min_occupancy: float = DEFAULT_MIN_OCCUPANCY,
    backend: str = "auto",
    grad_losses: Any = None,
) -> tuple[Any, Gradients]:
    """The losses of `joint_rnnt_loss`, and the gradients of encoder, predictor, weight and bias.

    Args beyond those of `joint_rnnt_loss`:
        grad_losses: upstream gradient, [B] with reduction "none" and a scalar otherwise; default 1.

    Returns:
        (losses, gradients): ``gradients.encoder`` and so on have the shape and dtype of their input, zero in the
        padding; ``gradients.bias`` is None without a bias. ``gradients.rows`` of ``gradients.nodes`` nodes were
        visited, the rest holds ``gradients.dropped_posterior`` of the posterior mass.

    Raises, memory and source as `joint_rnnt_loss`; the sums over tiles are kept in float32 (float64 for float64
    states) and rounded once to the input's dtype.
    """
    options = validate.check_options(
        activation=activation,
        dropout=dropout,
        seed=seed,
        fastemit_lambda=fastemit_lambda,
        clamp=clamp,
        zero_infinity=zero_infinity,
        min_occupancy=min_occupancy,
    )
    opened = _open_joint(encoder, predictor, weight, bias, targets, encoder_lengths, target_lengths, blank, options)
    wanted = frozenset(opened.problem.shapes)
    return _run(opened, reduction, backend, tile_rows, workspace_bytes, wanted, grad_losses)


def rnnt_loss(
    logits: Any,
    targets: Any,
    logit_lengths: Any,
    target_lengths: Any,
    blank: int = -1,
    clamp: float | None = -1.0,
    reduction: str = "mean",
    fused_log_softmax: bool = True,
    *,
    fastemit_lambda: float = 0.0,
    zero_infinity: bool = False,
    backend: str = "auto",
) -> Any:
    """Transducer loss of given scores; takes the arguments of ``torchaudio.functional.rnnt_loss`` in its order.

    Equals ``-log(sum over all alignments of their probability)`` for every utterance, with
    ``log_probs = log_softmax(logits)``, or ``log_probs = logits`` if not ``fused_log_softmax``.

    Args:
        logits: [B, T, U1, V] scores before the softmax, or packed [N, V] in the order (b, t, u). float16,
            bfloat16, float32 or float64. Padding is never read.
        targets: [B, U] or packed [sum of U_b], as in `joint_rnnt_loss`.
        logit_lengths: [B] frames, each >= 1.
        target_lengths: [B] labels, each >= 0.
        blank: as in `joint_rnnt_loss`.
        clamp: as in `joint_rnnt_loss`.
        reduction: as in `joint_rnnt_loss`.
        fused_log_softmax: False if ``logits`` are log-probabilities already. They are used as they are: scores
            before the softmax, passed so, give a wrong loss that may even be negative.
        fastemit_lambda: as in `joint_rnnt_loss`.
        zero_infinity: as in `joint_rnnt_loss`.
        backend: as in `joint_rnnt_loss`.

    Returns:
        float32 losses (float64 for float64 scores): [B], or reduced to a scalar.

    Raises: as `joint_rnnt_loss`.

    A model with extra outputs (TDT durations, say) must not be passed whole: this loss cannot tell them from
    labels.

    Memory: 2 N + N numbers for the lattice beside the scores. Source: Graves 2012 (arXiv:1211.3711), eq. 12-18.
    """
    options = validate.check_options(fastemit_lambda=fastemit_lambda, clamp=clamp, zero_infinity=zero_infinity)
    opened = _open_logits(logits, targets, logit_lengths, target_lengths, blank, options, fused_log_softmax)
    return _run(opened, reduction, backend)[0]


def rnnt_loss_and_grad(
    logits: Any,
    targets: Any,
    logit_lengths: Any,
    target_lengths: Any,
    blank: int = -1,
    clamp: float | None = -1.0,
    reduction: str = "mean",
    fused_log_softmax: bool = True,
    *,
    fastemit_lambda: float = 0.0,
    zero_infinity: bool = False,
    backend: str = "auto",
    grad_losses: Any = None,
    overwrite_logits: bool = False,
) -> tuple[Any, Any]:
    """The losses of `rnnt_loss`, and the gradient to what was given: logits, or log-probabilities.

    Args beyond those of `rnnt_loss`:
        grad_losses: upstream gradient, [B] with reduction "none" and a scalar otherwise; default 1.
        overwrite_logits: the gradient takes the place of the scores; saves their size in memory.

    Returns:
        (losses, gradient): the gradient has the shape and dtype of ``logits`` and is zero in the padding. For
        log-probabilities it is minus the posterior at blank and label and zero elsewhere.
    """
    options = validate.check_options(fastemit_lambda=fastemit_lambda, clamp=clamp, zero_infinity=zero_infinity)
    opened = _open_logits(logits, targets, logit_lengths, target_lengths, blank, options, fused_log_softmax)
    if overwrite_logits and not opened.first.is_writeable():
        raise InputError("logits", "an array that can be overwritten", "a read-only one, or one with gaps in its rows")
    losses, gradients = _run(
        opened,
        reduction,
        backend,
        wanted=frozenset({"logits"}),
        grad_losses=grad_losses,
        overwrite_logits=overwrite_logits,
    )
    return losses, gradients.logits


def plan_memory(
    encoder_lengths: Any,
    target_lengths: Any,
    joint_width: int,
    vocabulary: int,
    *,
    dtype: str = "float32",
    parameter_dtype: str = "float32",
    bias: bool = True,
    gradients: bool = True,
    tile_rows: TileRows = "auto",
    workspace_bytes: int | None = None,
    min_occupancy: float = DEFAULT_MIN_OCCUPANCY,
    backend: str = "auto",
) -> MemoryAccount:
    """What a call of `joint_rnnt_loss_and_grad` will take, part by part, before anything is allocated.

    ``print`` the result for a table; ``.peak_bytes`` and the parts' ``.nbytes`` are numbers. Encoder and predictor
    states are taken as padded to the longest utterance.

    Args:
        encoder_lengths: [B] frames.
        target_lengths: [B] labels.
        joint_width: H.
        vocabulary: V.
        dtype: of encoder and predictor states.
        parameter_dtype: of weight and bias.
        bias: whether there is one.
        gradients: False for the loss alone.
        tile_rows: as in `joint_rnnt_loss`.
        workspace_bytes: as in `joint_rnnt_loss`.
        min_occupancy: as in `joint_rnnt_loss`.
        backend: as in `joint_rnnt_loss`; "cuda" plans for an H200 where there is no GPU.

    Raises: InputError, PlanError.
    """
    frames_b = host_integers("encoder_lengths", encoder_lengths)
    labels_b = host_integers("target_lengths", target_lengths)
    validate.check_lengths({"encoder_lengths": frames_b, "target_lengths": labels_b}, None)
    for name, value in (("dtype", dtype), ("parameter_dtype", parameter_dtype)):
        if value not in FLOATS:
            raise InputError(name, f"one of {', '.join(FLOATS)}", repr(value))
    for name, size in (("joint_width", joint_width), ("vocabulary", vocabulary)):
        validate.check_size(name, size)
    longest = frames_b.max(initial=0), labels_b.max(initial=0) + 1
    shapes: dict[str, tuple[int, ...]] = {
        "encoder": (len(frames_b), int(longest[0]), joint_width),
        "predictor": (len(frames_b), int(longest[1]), joint_width),
        "weight": (vocabulary, joint_width),
    }
    if bias:
        shapes["bias"] = (vocabulary,)
    problem = Problem(
        form=Form.JOINT,
        topology=RNNT,
        frames_b=frames_b,
        labels_b=labels_b,
        vocabulary=vocabulary,
        blank=vocabulary - 1,
        dtype=dtype,
        shapes=shapes,
        options=validate.check_options(min_occupancy=min_occupancy),
        joint_width=joint_width,
        parameter_dtype=parameter_dtype,
    )
    tiling = validate.check_tiling(tile_rows, workspace_bytes)
    wanted = frozenset(shapes if gradients else ())
    return make_plan(problem, backends.planning_facts(backend), *tiling, wanted).account


@dataclass(frozen=True)
class _Opened:
    """A checked call: the problem, the arrays as the backend takes them, and their library."""

    problem: Problem
    inputs: Inputs
    arrays: Mapping[str, Opened]

    @property
    def first(self) -> Opened:
        """Encoder or logits: says where the call runs and what the losses come back as."""
        return next(iter(self.arrays.values()))


def _open_joint(
    encoder: Any,
    predictor: Any,
    weight: Any,
    bias: Any,
    targets: Any,
    encoder_lengths: Any,
    target_lengths: Any,
    blank: int,
    options: Options,
) -> _Opened:
    given = {"encoder": encoder, "predictor": predictor, "weight": weight, "bias": bias}
    arrays = {name: open_array(name, value) for name, value in given.items() if value is not None}
    labels = host_integers("targets", targets)
    problem = validate.joint_problem(
        {name: opened.facts for name, opened in arrays.items()},
        labels,
        host_integers("encoder_lengths", encoder_lengths),
        host_integers("target_lengths", target_lengths),
        blank,
        options,
    )
    buffers = {name: opened.buffer(name in ("weight", "bias"), aligned=True) for name, opened in arrays.items()}
    return _Opened(problem, Inputs(labels, **buffers), arrays)


def _open_logits(
    logits: Any,
    targets: Any,
    logit_lengths: Any,
    target_lengths: Any,
    blank: int,
    options: Options,
    fused_log_softmax: bool,
) -> _Opened:
    opened = open_array("logits", logits)
    labels = host_integers("targets", targets)
    problem = validate.logits_problem(
        opened.facts,
        labels,
        host_integers("logit_lengths", logit_lengths),
        host_integers("target_lengths", target_lengths),
        blank,
        options,
        fused_log_softmax,
    )
    return _Opened(problem, Inputs(labels, logits=opened.buffer()), {"logits": opened})


def _run(
    opened: _Opened,
    reduction: str,
    backend_name: str,
    tile_rows: TileRows = "auto",
    workspace_bytes: int | None = None,
    wanted: frozenset[str] = frozenset(),
    grad_losses: Any = None,
    overwrite_logits: bool = False,
) -> tuple[Any, Gradients]:
    """Reduced losses and the wanted gradients."""
    problem, first = opened.problem, opened.first
    weights = validate.reduction_weights(reduction, problem.labels_b)
    backend = backends.choose(backend_name, problem, first.facts.device)
    plan = make_plan(problem, backend.facts, *validate.check_tiling(tile_rows, workspace_bytes), wanted)
    with first.device_context():
        scale = None if weights is None else first.library.asarray(weights)
        upstream = _upstream(first, grad_losses, scale, problem.batch) if wanted else None
        losses_b, saved = pipeline.forward(plan, opened.inputs, backend, backend.allocate)
        losses = array_of(losses_b)
        reduced = losses if scale is None else (scale * losses).sum().astype(losses.dtype)
        if upstream is None:
            return first.restore(reduced), Gradients()
        gradients = pipeline.backward(saved, upstream, wanted, overwrite_logits)
        restored = {name: opened.arrays[name].restore(array_of(getattr(gradients, name))) for name in wanted}
        return first.restore(reduced), dataclasses.replace(gradients, **restored)


def _upstream(first: Opened, grad_losses: Any, weights: Any, batch: int) -> Any:
    """Gradient of the caller's objective to each utterance's loss, a float64 buffer [B]."""
    shape = (batch,) if weights is None else ()
    given = open_array("grad_losses", np.ones(shape) if grad_losses is None else grad_losses)
    if given.facts.dtype not in (*FLOATS, "int32", "int64"):
        raise InputTypeError("grad_losses", "real numbers", given.facts.dtype)
    if given.facts.shape != shape:
        expected = f"shape {shape}, as the losses" if shape else "a scalar, as the reduced loss"
        raise InputError("grad_losses", expected, f"shape {given.facts.shape}")
    upstream = first.library.asarray(given.array).astype(np.float64)
    return buffer_of(upstream if weights is None else upstream * weights)
