"""A call on tensors: its options, its checks and plan on the host, and the pipeline run on the tensors' memory.

Tensors are taken as they lie in memory, every buffer is allocated by torch, and nothing is copied either way. On a
GPU all work goes to the caller's current stream; device and stream are what they were after every step, also after
an exception.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flash_rnnt_cupy import backends, pipeline, validate
from flash_rnnt_cupy.adapters.arrays import Facts, host_integers
from flash_rnnt_cupy.backends import Allocate, Backend, Buffer, Lattice
from flash_rnnt_cupy.backends.cuda.memory import DeviceArray, contiguous_strides, is_aligned_or_odd
from flash_rnnt_cupy.dtypes import numpy_dtype
from flash_rnnt_cupy.errors import InputError, InputTypeError
from flash_rnnt_cupy.plan import Life, Part, Plan, TileRows, make_plan
from flash_rnnt_cupy.problem import FLOATS, Form, Inputs, Options

Integers = npt.NDArray[np.int64]

LATTICE_PARTS = ("scores", "normalizers", "alpha", "log likelihoods")  # of the memory account
TILE_PARTS = ("tile hidden", "tile logits", "tile active")
ALIGNMENT = 256  # bytes


class Settings(NamedTuple):
    """The options of a call, in the order of the operators' schema."""

    form: str
    blank: int = -1
    activation: str = "relu"
    dropout: float = 0.0
    fastemit_lambda: float = 0.0
    clamp: float | None = None
    reduction: str = "mean"
    zero_infinity: bool = False
    tile_rows: TileRows = "auto"
    workspace_bytes: int | None = None
    min_occupancy: float = 0.0
    backend: str = "auto"

    def options(self, seed: int | None) -> Options:
        """Those that change the numbers; checks all that need no problem to be checked."""
        validate.check_tiling(self.tile_rows, self.workspace_bytes)
        validate.reduction_weights(self.reduction, np.zeros(0, np.int64))
        return validate.check_options(
            activation=self.activation,
            dropout=self.dropout,
            seed=seed,
            fastemit_lambda=self.fastemit_lambda,
            clamp=self.clamp,
            zero_infinity=self.zero_infinity,
            min_occupancy=self.min_occupancy,
        )


def check_tensors(arrays: Mapping[str, Any]) -> None:
    """Every one is a dense tensor on a device that we know."""
    for name, value in arrays.items():
        if not isinstance(value, Tensor):
            raise InputTypeError(name, "a torch.Tensor", type(value).__name__)
        if value.layout is not torch.strided or value.device.type not in ("cpu", "cuda"):
            raise InputError(name, "a dense tensor on the CPU or a CUDA device", f"{value.layout} on {value.device}")


def promoted(encoder: Tensor, predictor: Tensor) -> tuple[Tensor, Tensor]:
    """Both states in one dtype: that of their sum, or under autocast the autocast dtype, unless it is float64."""
    if not {_dtype_name(encoder), _dtype_name(predictor)} <= set(FLOATS):
        return encoder, predictor  # for validation to refuse
    dtype = torch.promote_types(encoder.dtype, predictor.dtype)
    if torch.is_autocast_enabled(encoder.device.type) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(encoder.device.type)
    return encoder.to(dtype), predictor.to(dtype)


def prepare(
    settings: Settings,
    tensors: Sequence[Tensor],
    wanted: Sequence[bool],
    integers: Sequence[Any],
    seed: int | None,
    overwrite_logits: bool = False,
) -> Call:
    """Checks and plans a call; ``integers`` are targets, frames and labels, tensors or lists."""
    options = settings.options(seed)
    joint = settings.form == Form.JOINT.value
    names = ("encoder", "predictor", "weight", "bias")[: len(tensors)] if joint else ("logits",)
    facts = {name: _facts(name, tensor) for name, tensor in zip(names, tensors, strict=True)}
    integer_names = ("targets", "encoder_lengths" if joint else "logit_lengths", "target_lengths")
    targets, frames_b, labels_b = _host(dict(zip(integer_names, integers, strict=True)))
    if joint:
        problem = validate.joint_problem(facts, targets, frames_b, labels_b, settings.blank, options)
    else:
        fused = settings.form == Form.LOGITS.value
        problem = validate.logits_problem(facts["logits"], targets, frames_b, labels_b, settings.blank, options, fused)
    backend = backends.choose(settings.backend, problem, str(tensors[0].device))
    tiling = validate.check_tiling(settings.tile_rows, settings.workspace_bytes)
    gradients = frozenset(name for name, want in zip(names, wanted, strict=True) if want)
    plan = make_plan(problem, backend.facts, *tiling, gradients)
    return Call(plan, backend, targets, validate.reduction_weights(settings.reduction, labels_b), overwrite_logits)


@dataclass(frozen=True, eq=False)
class Call:
    """A checked and planned call; the tensors travel apart, so that autograd can free them.

    The *stash* is what forward leaves for backward: a block of bytes with the parts of the memory account that are
    saved (the lattice's, and those that the backend made when it began) and, in untiled mode, the tile: hidden states
    [N, H], logits [N, V] and active bits [N, H / 8].
    """

    plan: Plan
    backend: Backend
    targets: Integers
    weights_b: npt.NDArray[np.float64] | None
    overwrite_logits: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tensors, in order."""
        return tuple(self.plan.problem.shapes)

    def weights(self, like: Tensor) -> Tensor:
        """w_b such that the reduced loss is the sum of w_b loss_b; empty for no reduction."""
        return torch.from_numpy(np.zeros(0) if self.weights_b is None else self.weights_b).to(like)

    def reduce(self, losses: Tensor) -> Tensor:
        """The losses [B], or their weighted sum."""
        if self.weights_b is None:
            return losses
        weight = self._common_weight
        return (losses * (self.weights(losses) if weight is None else weight)).sum()

    def upstream(self, grad: Tensor) -> Tensor:
        """Gradients of the losses [B], in float64, from that of what `reduce` gives."""
        if self.weights_b is None:
            return grad.to(torch.float64)
        weight = self._common_weight
        weighted = (grad * (self.weights(grad) if weight is None else weight)).to(torch.float64)
        return weighted.expand(len(self.weights_b))

    @cached_property
    def _common_weight(self) -> float | None:
        """The weight of every utterance, if all have the same: no array has to go to the device then."""
        weights_b = self.weights_b
        same = weights_b is not None and len(weights_b) > 0 and bool((weights_b == weights_b[0]).all())
        return float(weights_b[0]) if weights_b is not None and same else None

    @cached_property
    def _saved(self) -> list[Part]:
        """Parts that stand in the stash's one block of memory."""
        return [part for part in self.plan.account.parts if part.life is Life.SAVED and part.name not in TILE_PARTS]

    def forward(self, tensors: Sequence[Tensor], clean: bool = False) -> tuple[Tensor, list[Tensor]]:
        """Losses [B], and the stash (of no use if the call was planned without gradients).

        ``clean``: bytes of the stash that no part has are zero.
        """
        device = tensors[0].device
        with _on(device):
            block, ready = _block(device, self._saved)
            if clean:
                block.zero_()
            allocate = _allocator(device, ready)
            losses, saved = pipeline.forward(self.plan, self._inputs(tensors), self.backend, allocate)
            kept = saved.workspace
            tile = [kept.hidden, kept.logits, kept.active] if kept else []
            return _tensor(losses), [block, *(_tensor(buffer) for buffer in tile if buffer is not None)]

    def backward(
        self,
        tensors: Sequence[Tensor],
        stash: Sequence[Tensor],
        spent: bool,
        upstream: Tensor,
        wanted: Sequence[bool],
    ) -> tuple[Tensor, ...]:
        """Gradients of the wanted tensors at ``upstream`` [B] float64, of any strides.

        Uses up the stash; ``spent`` says that an earlier backward did.
        """
        device, inputs = tensors[0].device, self._inputs(tensors)
        names = [name for name, want in zip(self.names, wanted, strict=True) if want]
        with _on(device):
            block, *tile = stash
            kept = _buffers_in(block, self._saved)
            *lattice, log_likelihoods = (kept.pop(name) for name in LATTICE_PARTS)
            _, ready = _block(device, self._scratch if device.type == "cuda" else [])
            allocate = _allocator(device, ready)
            saved = pipeline.Saved(
                plan=self.plan,
                inputs=inputs,
                backend=self.backend,
                allocate=allocate,
                call=self.backend.begin(self.plan, inputs, allocate, kept),
                lattice=Lattice(*lattice),
                log_likelihood_b=log_likelihoods,
                workspace=pipeline.Workspace(*map(_buffer, tile)) if tile and not spent else None,
                spent=spent,
            )
            gradients = pipeline.backward(saved, _buffer(upstream), frozenset(names), self.overwrite_logits)
            return tuple(_tensor(getattr(gradients, name)) for name in names)

    @property
    def _scratch(self) -> list[Part]:
        """Parts that live in backward alone; together, since an allocation costs the host as much as a launch."""
        lives = (Life.TILE, Life.BACKWARD)
        return [p for p in self.plan.account.parts if p.life in lives and not p.name.startswith("gradient of")]

    def _inputs(self, tensors: Sequence[Tensor]) -> Inputs:
        """On a GPU rows, and weight and bias as a whole, must be contiguous; a tensor is copied if it is not.

        So is one of states or parameters whose rows of whole groups of 8 columns do not start on 16 bytes.
        """
        ready = {}
        for name, tensor in zip(self.names, tensors, strict=True):
            gaps = tensor.is_cuda and (tensor.stride(-1) != 1 or name in ("weight", "bias"))
            ready[name] = _buffer(tensor.contiguous() if gaps else tensor)
            if tensor.is_cuda and name != "logits" and not is_aligned_or_odd(ready[name]):
                ready[name] = _buffer(tensor.clone(memory_format=torch.contiguous_format))
        return Inputs(self.targets, **ready)


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _facts(name: str, tensor: Tensor) -> Facts:
    if tensor.dtype == torch.bfloat16 and not tensor.is_cuda and importlib.util.find_spec("ml_dtypes") is None:
        raise InputTypeError(name, "a dtype that NumPy can hold", "bfloat16", remedy="pip install ml_dtypes")
    return Facts(tuple(tensor.shape), _dtype_name(tensor), str(tensor.device))


def _host(values: Mapping[str, Any]) -> list[Integers]:
    """Integer tensors or lists in host memory, as int64; what is on a device comes in one copy."""
    away = {name: value for name, value in values.items() if isinstance(value, Tensor) and value.device.type != "cpu"}
    for name, value in away.items():
        if value.dtype not in (torch.int32, torch.int64):
            raise InputTypeError(name, "int32 or int64", _dtype_name(value))
    if away:
        device = next(iter(away.values())).device
        flat = torch.cat([value.to(device).reshape(-1) for value in away.values()]).cpu()
        pieces = torch.split(flat, [value.numel() for value in away.values()])
        away = {name: piece.view(away[name].shape) for name, piece in zip(away, pieces, strict=True)}
    return [host_integers(name, _shown(away.get(name, value))) for name, value in values.items()]


def _shown(value: Any) -> Any:
    """An integer tensor's memory as a NumPy array, sooner than DLPack gives it; what has none to show stays as it is.

    That are wrappers of torch.func (RuntimeError) and sparse tensors (TypeError).
    """
    if isinstance(value, Tensor) and value.dtype in (torch.int32, torch.int64):
        with contextlib.suppress(RuntimeError, TypeError):
            return value.numpy()
    return value


@contextlib.contextmanager
def _on(device: torch.device) -> Iterator[None]:
    """The device and torch's current stream on it, as torch's and CuPy's current ones; both are restored."""
    if device.type != "cuda":
        yield
        return
    import cupy  # noqa: PLC0415  CuPy is imported on demand

    stream = cupy.cuda.Stream.from_external(torch.cuda.current_stream(device))
    with cupy.cuda.Device(device.index), stream:  # the runtime's current device is torch's, too
        yield


def _block(device: torch.device, parts: Sequence[Part]) -> tuple[Tensor, dict[str, Buffer]]:
    """Memory for all parts, and the buffer of each in it."""
    block = torch.empty(sum(map(_aligned_bytes, parts)), dtype=torch.uint8, device=device)
    return block, _buffers_in(block, parts)


def _buffers_in(block: Tensor, parts: Sequence[Part]) -> dict[str, Buffer]:
    """Buffers one behind another in a block."""
    buffers: dict[str, Buffer] = {}
    begin, pointer, host = 0, block.data_ptr(), None if block.is_cuda else block.detach().numpy()
    for part in parts:
        if host is None:
            strides = contiguous_strides(part.shape)
            buffers[part.name] = DeviceArray(pointer + begin, part.shape, part.dtype, strides, block)
        else:
            memory = host[begin : begin + part.nbytes]
            buffers[part.name] = memory.view(numpy_dtype(part.dtype)).reshape(part.shape)
        begin += _aligned_bytes(part)
    return buffers


def _aligned_bytes(part: Part) -> int:
    """Bytes from a part's beginning to the next one's."""
    return -(-part.nbytes // ALIGNMENT) * ALIGNMENT


def _allocator(device: torch.device, ready: Mapping[str, Buffer]) -> Allocate:
    """Parts that are ready, and new memory for all others."""

    def allocate(part: Part) -> Buffer:
        if part.name in ready:
            return ready[part.name]
        return _buffer(torch.empty(part.shape, dtype=getattr(torch, part.dtype), device=device))

    return allocate


def _buffer(tensor: Tensor) -> Buffer:
    """The tensor's memory as the backend takes it: a NumPy view, or a DeviceArray."""
    tensor = tensor.detach()
    if tensor.is_cuda:
        return DeviceArray(tensor.data_ptr(), tuple(tensor.shape), _dtype_name(tensor), tensor.stride(), tensor)
    if tensor.dtype == torch.bfloat16:  # NumPy knows it through ml_dtypes only
        import ml_dtypes  # noqa: PLC0415  only those who use bfloat16 need it

        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def _tensor(buffer: Buffer) -> Tensor:
    """The tensor on a buffer's memory."""
    if not isinstance(buffer, np.ndarray):
        owner: Tensor = buffer.owner
        return owner
    if buffer.dtype.name == "bfloat16":
        return torch.from_numpy(buffer.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(buffer)
