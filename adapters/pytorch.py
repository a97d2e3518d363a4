"""PyTorch: differentiable functions, loss modules and a joint network.

Letters: B utterances, T frames, U labels, U1 = U + 1 states, H joint width, V vocabulary with blank, N nodes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flash_rnnt_cupy import validate
from flash_rnnt_cupy.adapters.torch_autograd import transducer_loss
from flash_rnnt_cupy.adapters.torch_call import Settings, check_tensors, promoted
from flash_rnnt_cupy.errors import InputError
from flash_rnnt_cupy.plan import TileRows
from flash_rnnt_cupy.problem import DEFAULT_MIN_OCCUPANCY, Form

__all__ = ["FlashRNNTLoss", "JointNetwork", "RNNTLoss", "joint_rnnt_loss", "rnnt_loss"]


def joint_rnnt_loss(
    encoder: Tensor,
    predictor: Tensor,
    weight: Tensor,
    bias: Tensor | None,
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
) -> Tensor:
    """Joint network and transducer loss, differentiable, without the [B, T, U1, V] scores.

    Equals, but for memory and rounding, with an rnnt_loss that takes scores::

        hidden = dropout(activation(encoder[:, :, None] + predictor[:, None]))      # [B, T, U1, H]
        loss = rnnt_loss(hidden @ weight.T + bias, targets, encoder_lengths, target_lengths)

    Args:
        encoder: [B, T, H] projected encoder states, or packed [sum of T_b, H]. float16, bfloat16 (on a CPU with
            ml_dtypes installed), float32 or float64. Rows t >= encoder_lengths[b] are never read.
        predictor: [B, U1, H] projected predictor states, or packed [sum of U1_b, H]. Rows u > target_lengths[b]
            are never read. If its dtype is not the encoder's, both are promoted as by ``encoder + predictor``;
            under autocast both are cast to the autocast dtype, unless float64 is among them.
        weight: [V, H] output layer, of any of these dtypes.
        bias: [V] in the weight's dtype, or None.
        targets: [B, U] labels, or packed [sum of U_b]; int32 or int64, a tensor on any device or a list, as are
            the lengths. What lies beyond target_lengths[b] is never read.
        encoder_lengths: [B] frames, each >= 1.
        target_lengths: [B] labels, each >= 0.
        seed: of the dropout mask, 0 <= seed < 2**64. None draws one from torch's CPU generator, so that
            ``torch.manual_seed`` and activation checkpointing reproduce the mask.
        blank: as `flash_rnnt_cupy.joint_rnnt_loss`, as are all options that follow it.
        activation: see there.
        dropout: see there; unlike in the modules it is on whenever it is not 0.
        fastemit_lambda: see there.
        clamp: see there.
        reduction: see there.
        zero_infinity: see there.
        tile_rows: see there.
        workspace_bytes: see there.
        min_occupancy: see there.
        backend: see there.

    Returns:
        float32 losses (float64 for float64 states): [B], or reduced to a scalar. Gradients come for what requires
        them among encoder, predictor, weight and bias, each in its own dtype, zero in the padding; what requires
        none is not computed. A second backward (``retain_graph=True``) is possible; it scores the tiles anew.

    Raises:
        InputError: names the argument, what was expected and what came; nothing has been computed then.
        PlanError: a tile does not fit workspace_bytes.
        BackendUnavailableError: the backend is missing here.
        NotImplementedError: on a second derivative.

    Memory: 3 N numbers and alpha (float64: N on the CPU, about N / 16 on a GPU) between forward and backward, one tile
    while backward runs and, without fused kernels, while forward does; none of it outlives backward,
    and without gradients nothing is kept. Products accumulate in float32 (float64 for float64 states), the sums
    of weight and bias gradients too; each is rounded once to its parameter's dtype.

    Lengths and targets are checked on the host: on a GPU that is one small copy, and the call waits for it.

    Source: Graves 2012 (arXiv:1211.3711), eq. 12-18; FastEmit: Yu et al. 2021 (arXiv:2010.11148).
    """
    settings = Settings(
        form=Form.JOINT.value,
        blank=blank,
        activation=activation,
        dropout=dropout,
        fastemit_lambda=fastemit_lambda,
        clamp=clamp,
        reduction=reduction,
        zero_infinity=zero_infinity,
        tile_rows=tile_rows,
        workspace_bytes=workspace_bytes,
        min_occupancy=min_occupancy,
        backend=backend,
    )
    arrays = {"encoder": encoder, "predictor": predictor, "weight": weight}
    if bias is not None:
        arrays["bias"] = bias
    check_tensors(arrays)
    arrays["encoder"], arrays["predictor"] = promoted(encoder, predictor)
    return transducer_loss(settings, arrays, (targets, encoder_lengths, target_lengths), seed)


def rnnt_loss(
    logits: Tensor,
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
    overwrite_logits: bool = False,
) -> Tensor:
    """Transducer loss of given scores, differentiable; takes the place of ``torchaudio.functional.rnnt_loss``.

    Equals ``-log(sum over all alignments of their probability)`` for every utterance, with
    ``log_probs = log_softmax(logits)``, or ``log_probs = logits`` if not ``fused_log_softmax``.

    Args:
        logits: [B, T, U1, V] scores before the softmax, or packed [N, V] in the order (b, t, u). float16, bfloat16
            (on a CPU with ml_dtypes installed), float32 or float64. Padding is never read.
        targets: [B, U] or packed [sum of U_b]; int32 or int64, a tensor on any device or a list, as are the lengths.
        logit_lengths: [B] frames, each >= 1.
        target_lengths: [B] labels, each >= 0.
        blank: as `flash_rnnt_cupy.rnnt_loss`, as are all options that follow it.
        clamp: see there.
        reduction: see there.
        fused_log_softmax: see there.
        fastemit_lambda: see there.
        zero_infinity: see there.
        backend: see there.
        overwrite_logits: backward writes the gradient over the scores, which saves their size in memory. They must
            be contiguous and the result of an operation; autograd raises if anything needs them afterwards. Without
            effect under torch.compile.

    Returns:
        float32 losses (float64 for float64 scores): [B], or reduced to a scalar. The gradient has the dtype of
        ``logits`` and is zero in the padding.

    Raises and remarks as `joint_rnnt_loss`. Memory: 3 N numbers and alpha beside the scores, freed by
    backward.

    Source: Graves 2012 (arXiv:1211.3711), eq. 12-18.
    """
    settings = Settings(
        form=(Form.LOGITS if fused_log_softmax else Form.LOG_PROBS).value,
        blank=blank,
        fastemit_lambda=fastemit_lambda,
        clamp=clamp,
        reduction=reduction,
        zero_infinity=zero_infinity,
        backend=backend,
    )
    check_tensors({"logits": logits})
    recorded = logits.requires_grad and torch.is_grad_enabled()
    if overwrite_logits and recorded and (logits.is_leaf or not logits.is_contiguous()):
        expected = "the contiguous result of an operation, to be overwritten"
        raise InputError("logits", expected, "a leaf" if logits.is_leaf else f"strides {logits.stride()}")
    integers = (targets, logit_lengths, target_lengths)
    return transducer_loss(settings, {"logits": logits}, integers, overwrite_logits=overwrite_logits)


class _LossModule(nn.Module):
    """A loss whose options are attributes: they show in ``repr`` and travel with pickle and deepcopy."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.option_names = tuple(options)
        for name, value in options.items():
            setattr(self, name, value)
        known = {name: options[name] for name in Settings._fields if name in options}
        Settings(Form.JOINT.value, **known).options(options.get("seed"))  # raises what can be known now

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of the loss function."""
        return {name: getattr(self, name) for name in self.option_names}

    def extra_repr(self) -> str:
        """The options."""
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class FlashRNNTLoss(_LossModule):
    """`joint_rnnt_loss` as a module: options once, tensors at every call. Dropout is on in training mode only.

    Takes all options of `joint_rnnt_loss`, with the same defaults; they may be changed as attributes.
    """

    def __init__(
        self,
        blank: int = -1,
        *,
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
    ) -> None:
        options = locals()
        super().__init__({name: options[name] for name in inspect.getfullargspec(joint_rnnt_loss).kwonlyargs})

    def forward(
        self,
        encoder: Tensor,
        predictor: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Any,
        encoder_lengths: Any,
        target_lengths: Any,
    ) -> Tensor:
        """`joint_rnnt_loss` of these."""
        options = self.options
        if not self.training:
            options["dropout"] = 0.0
        return joint_rnnt_loss(encoder, predictor, weight, bias, targets, encoder_lengths, target_lengths, **options)


class RNNTLoss(_LossModule):
    """`rnnt_loss` as a module, in the place of ``torchaudio.transforms.RNNTLoss``.

    Takes all options of `rnnt_loss`, with the same defaults; they may be changed as attributes.
    """

    def __init__(
        self,
        blank: int = -1,
        clamp: float | None = -1.0,
        reduction: str = "mean",
        fused_log_softmax: bool = True,
        *,
        fastemit_lambda: float = 0.0,
        zero_infinity: bool = False,
        backend: str = "auto",
        overwrite_logits: bool = False,
    ) -> None:
        options = locals()
        super().__init__({name: options[name] for name in list(inspect.signature(rnnt_loss).parameters)[4:]})

    def forward(self, logits: Tensor, targets: Any, logit_lengths: Any, target_lengths: Any) -> Tensor:
        """`rnnt_loss` of these."""
        return rnnt_loss(logits, targets, logit_lengths, target_lengths, **self.options)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "gelu": nn.functional.gelu,
    "silu": nn.functional.silu,
    "identity": nn.Identity(),
}


class JointNetwork(nn.Module):
    """The joint network of a transducer: trained through `joint_rnnt_loss`, decoded step by step.

    ``logits = output(dropout(activation(encoder_projection(enc) + predictor_projection(pred))))``

    Args:
        encoder_dim: width of the encoder's output, De.
        predictor_dim: width of the predictor's output, Dp.
        joint_dim: H.
        vocab_size: V, the blank counted.
        activation: "relu", "tanh", "sigmoid", "gelu" (with erf), "silu" or "identity".
        dropout: probability of dropping a hidden unit, in training mode only.
        blank: row of the output layer that is the blank; -1 is the last.
    """

    def __init__(
        self,
        encoder_dim: int,
        predictor_dim: int,
        joint_dim: int,
        vocab_size: int,
        activation: str = "relu",
        dropout: float = 0.0,
        blank: int = -1,
    ) -> None:
        super().__init__()
        validate.check_options(activation=activation, dropout=dropout, seed=0)
        self.encoder_projection = nn.Linear(encoder_dim, joint_dim)
        self.predictor_projection = nn.Linear(predictor_dim, joint_dim)
        self.output = nn.Linear(joint_dim, vocab_size)
        self.activation, self.dropout, self.blank = activation, dropout, blank

    def loss(
        self,
        encoder_out: Tensor,
        predictor_out: Tensor,
        targets: Any,
        encoder_lengths: Any,
        target_lengths: Any,
        **options: Any,
    ) -> Tensor:
        """`joint_rnnt_loss` of encoder_out [B, T, De] and predictor_out [B, U1, Dp], or packed.

        ``options`` are those of `joint_rnnt_loss` but blank, activation and dropout, which the module has. Padding
        passes through the projections, so it may hold any finite number.
        """
        return joint_rnnt_loss(
            self.encoder_projection(encoder_out),
            self.predictor_projection(predictor_out),
            self.output.weight,
            self.output.bias,
            targets,
            encoder_lengths,
            target_lengths,
            blank=self.blank,
            activation=self.activation,
            dropout=self.dropout if self.training else 0.0,
            **options,
        )

    def forward(self, enc_t: Tensor, pred_u: Tensor) -> Tensor:
        """Logits [..., V] of enc_t [..., De] and pred_u [..., Dp], whose leading axes broadcast."""
        hidden = _ACTIVATIONS[self.activation](self.encoder_projection(enc_t) + self.predictor_projection(pred_u))
        logits: Tensor = self.output(nn.functional.dropout(hidden, self.dropout, self.training))
        return logits

    def log_probs(self, enc_t: Tensor, pred_u: Tensor) -> Tensor:
        """log_softmax of `forward`, in float32 at least."""
        logits: Tensor = self(enc_t, pred_u)
        return logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))

    def load_joint_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Loads a state dict in our layout, or in that of NeMo, icefall, ESPnet or SpeechBrain.

        Keys may have any common prefix, and may lie among those of a whole model. Biases that are not there
        become zero. The blank and the activation are not in a state dict: say them to the constructor (blank is
        0 in icefall, ESPnet and SpeechBrain, -1 in NeMo).

        Raises: InputError, with the keys, where no layout fits or more than one part does.
        """
        found = _joint_parameters(state_dict)
        self.load_state_dict({name: found.get(name, torch.zeros_like(own)) for name, own in self.state_dict().items()})

    @classmethod
    def from_joint_state_dict(
        cls, state_dict: Mapping[str, Tensor], activation: str = "relu", dropout: float = 0.0, blank: int = -1
    ) -> JointNetwork:
        """A joint network of the sizes and dtype of a state dict that `load_joint_state_dict` takes."""
        found = _joint_parameters(state_dict)
        (joint_dim, encoder_dim), predictor_dim = (
            found["encoder_projection.weight"].shape,
            found["predictor_projection.weight"].shape[1],
        )
        weight = found["output.weight"]
        joint = cls(encoder_dim, predictor_dim, joint_dim, weight.shape[0], activation, dropout, blank)
        joint.to(weight.dtype).load_joint_state_dict(found)
        return joint

    def extra_repr(self) -> str:
        """What the submodules do not show."""
        return f"activation={self.activation!r}, dropout={self.dropout!r}, blank={self.blank!r}"


_PARTS = ("encoder_projection", "predictor_projection", "output")
_LAYOUTS = {  # patterns of the names of the three parts
    "flash_rnnt_cupy": _PARTS,
    "NeMo": ("enc", "pred", r"joint_net\.\d+"),
    "icefall": ("encoder_proj", "decoder_proj", "output_linear"),
    "ESPnet": ("lin_enc", "lin_dec", "lin_out"),
    "SpeechBrain": (r"proj_enc\.w", r"proj_dec\.w", r"transducer_lin\.w"),
}


def _joint_parameters(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights and biases of the three parts under our names."""
    complete = []
    for layout in _LAYOUTS.values():
        at_prefix: dict[str, list[tuple[str, Tensor]]] = {}
        for part, pattern in zip(_PARTS, layout, strict=True):
            for key, value in state_dict.items():
                if match := re.fullmatch(rf"((?:.+\.)?){pattern}\.(weight|bias)", key):
                    at_prefix.setdefault(match[1], []).append((f"{part}.{match[2]}", value))
        for found in at_prefix.values():
            weights = sorted(name for name, _ in found if name.endswith("weight"))
            if weights == sorted(f"{part}.weight" for part in _PARTS):
                complete.append(dict(found))
    if len(complete) != 1:
        layouts = "; ".join(f"{name}: {', '.join(layout)}" for name, layout in _LAYOUTS.items())
        raise InputError(
            "state_dict",
            f"encoder projection, predictor projection and output layer of one joint network ({layouts})",
            f"{len(complete) or 'none'} among the keys {', '.join(state_dict) or '(no keys)'}",
        )
    return complete[0]
