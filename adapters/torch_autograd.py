"""The loss in torch's autograd.

Eager calls run as an ``autograd.Function``. Its lattice is held as saved tensors, so that autograd frees it after
backward, and backward turns it into posteriors in place. Under ``torch.compile`` the same two steps run as operators
without side effects, ``flash_rnnt_cupy::transducer_loss`` and ``flash_rnnt_cupy::transducer_loss_backward``: backward
copies the columns first, and an untiled call recomputes its tile.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flash_rnnt_cupy.adapters.torch_call import Call, Settings, prepare


def transducer_loss(
    settings: Settings,
    arrays: Mapping[str, Tensor],
    integers: Sequence[Any],
    seed: int | None = None,
    overwrite_logits: bool = False,
) -> Tensor:
    """The losses [B], or their reduction.

    ``arrays`` holds what can get a gradient, in the order of `Problem.shapes`; ``integers`` targets, frames and
    labels. Without a seed dropout draws one from torch's CPU generator.
    """
    tensors = tuple(arrays.values())
    wanted = [tensor.requires_grad and torch.is_grad_enabled() for tensor in tensors]
    drawn = torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu") if seed is None and settings.dropout else None
    if torch.compiler.is_compiling():
        seed_tensor = _signed(seed or 0) if drawn is None else drawn
        losses, weights = _traced(settings, tensors, integers, seed_tensor, any(wanted))
        return losses if settings.reduction == "none" else (weights * losses).sum()
    call = prepare(settings, tensors, wanted, integers, seed if drawn is None else int(drawn), overwrite_logits)
    return _apply(TransducerLoss, call, *tensors)[0] if any(wanted) else call.reduce(call.forward(tensors)[0])


class TransducerLoss(torch.autograd.Function):
    """The reduced losses of (call, *tensors); the stash follows as outputs that autograd saves and frees."""

    @staticmethod
    def forward(call: Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        """(reduced losses, *stash)."""
        losses, stash = call.forward(tensors)
        return (call.reduce(losses), *stash)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keeps tensors as saved tensors only: whatever else is kept outlives backward."""
        ctx.call, *tensors = inputs
        ctx.spent = False
        ctx.save_for_backward(*tensors, *output[1:])
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        """Gradients of the tensors that need one."""
        grad, wanted = grad_outputs[0], ctx.needs_input_grad[1:]
        if grad is None:
            return (None,) * (1 + len(wanted))
        spent, ctx.spent = ctx.spent, True
        arguments = (ctx.call, wanted, spent, ctx.call.upstream(grad), *ctx.saved_tensors)
        if torch.is_grad_enabled():  # create_graph=True
            return (None, *_spread(_apply(TransducerGradients, *arguments), wanted))
        return (None, *_spread(TransducerGradients.forward(*arguments), wanted))


# torch asks for it at every call, and would work it out anew
TransducerLoss.forward.__signature__ = inspect.signature(TransducerLoss.forward)  # type: ignore[attr-defined]


class TransducerGradients(torch.autograd.Function):
    """First derivatives; a function of its own only to say that there are no second ones."""

    @staticmethod
    def forward(
        call: Call, wanted: tuple[bool, ...], spent: bool, upstream: Tensor, *saved: Tensor
    ) -> tuple[Tensor, ...]:
        """Gradients of the wanted tensors."""
        tensors, stash = saved[: len(wanted)], saved[len(wanted) :]
        gradients = call.backward(tensors, stash, spent, upstream, wanted)
        if call.overwrite_logits:
            torch.autograd.graph.increment_version(tensors)
        return gradients

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keeps nothing."""

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """There is none."""
        return _no_second_derivative(ctx, *grad_outputs)


def _no_second_derivative(ctx: Any, *grad_outputs: Any) -> Any:
    del ctx, grad_outputs
    raise NotImplementedError(
        "the transducer loss has no second derivative: its gradients, made with create_graph=True, cannot be "
        "differentiated again; detach() them, or leave the loss out of what is differentiated twice"
    )


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> tuple[Tensor, ...]:
    """``function.apply``, which torch leaves untyped."""
    outputs: tuple[Tensor, ...] = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return outputs


def _spread(gradients: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor | None]:
    """One entry a tensor, None where no gradient is wanted."""
    following = iter(gradients)
    return [next(following) if want else None for want in wanted]


_AUTO_ROWS = -(2**62)  # tile_rows="auto" in the schema, where None is the untiled mode
_ARGUMENTS = (
    "Tensor targets, Tensor frames, Tensor labels, Tensor seed, bool[] wanted, str form, int blank, str activation, "
    "float dropout, float fastemit_lambda, float? clamp, str reduction, bool zero_infinity, int? tile_rows, "
    "int? workspace_bytes, float min_occupancy, str backend"
)
_N_TENSORS, _WANTED, _SETTINGS = 4, 4, 5  # of the arguments: how many tensors, where the others stand


def _traced(
    settings: Settings, tensors: Sequence[Tensor], integers: Sequence[Any], seed: Tensor, need_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Losses and reduction weights by the operator, which validates when it runs."""
    tile_rows = _AUTO_ROWS if settings.tile_rows == "auto" else settings.tile_rows
    arguments = [*map(torch.as_tensor, integers), seed, [need_gradient] * len(tensors)]
    outputs = loss_operator(list(tensors), *arguments, *settings._replace(tile_rows=tile_rows))
    return outputs[0], outputs[1]


def _signed(seed: int) -> Tensor:
    """The 64 bits of a seed as int64 []."""
    return torch.tensor(seed - 2**64 if seed >= 2**63 else seed)


def _call(tensors: Sequence[Tensor], arguments: Sequence[Any]) -> Call:
    """What the operators' arguments after the tensors describe."""
    settings = Settings(*arguments[_SETTINGS:])
    if settings.tile_rows == _AUTO_ROWS:
        settings = settings._replace(tile_rows="auto")
    *integers, seed = arguments[:_N_TENSORS]
    return prepare(settings, tensors, arguments[_WANTED], integers, int(seed) % 2**64)


@torch.library.custom_op(
    "flash_rnnt_cupy::transducer_loss",
    mutates_args=(),
    schema=f"(Tensor[] tensors, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.cudagraph_unsafe,),  # reads lengths on the host
)
def loss_operator(tensors: Sequence[Tensor], *arguments: Any) -> tuple[Tensor, ...]:
    """(losses, reduction weights, the stash's block)."""
    call = _call(tensors, arguments)
    losses, stash = call.forward(tensors, clean=True)
    block = stash[0] if any(arguments[_WANTED]) else losses.new_empty(0, dtype=torch.uint8)
    return losses, call.weights(losses), block


@loss_operator.register_fake
def _(tensors: Sequence[Tensor], *arguments: Any) -> tuple[Tensor, ...]:
    B = arguments[1].shape[0]
    losses = tensors[0].new_empty(B, dtype=torch.promote_types(tensors[0].dtype, torch.float32))
    weights = losses.new_empty(0 if Settings(*arguments[_SETTINGS:]).reduction == "none" else B)
    context = torch.library.get_ctx()
    size = context.new_dynamic_size() if any(arguments[_WANTED]) else 0  # N is in lengths
    return losses, weights, losses.new_empty(size, dtype=torch.uint8)


@torch.library.custom_op(
    "flash_rnnt_cupy::transducer_loss_backward",
    mutates_args=(),
    schema=f"(Tensor[] tensors, Tensor stash, Tensor grad_losses, {_ARGUMENTS}) -> Tensor[]",
    tags=(torch.Tag.cudagraph_unsafe,),
)
def gradients_operator(tensors: Sequence[Tensor], stash: Tensor, grad_losses: Tensor, *arguments: Any) -> list[Tensor]:
    """Gradients of the wanted tensors; the stash stays as it is."""
    call = _call(tensors, arguments)
    upstream = grad_losses.to(torch.float64)
    return list(call.backward(tensors, [stash.clone()], False, upstream, arguments[_WANTED]))


@gradients_operator.register_fake
def _(tensors: Sequence[Tensor], _stash: Tensor, _grad: Tensor, *arguments: Any) -> list[Tensor]:
    return [tensor.new_empty(tensor.shape) for tensor, want in zip(tensors, arguments[_WANTED], strict=True) if want]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, *arguments = inputs
    ctx.settings = arguments[_SETTINGS:]
    ctx.save_for_backward(*tensors, *arguments[:_N_TENSORS], output[2])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _operator_backward(ctx: Any, grad_losses: Tensor | None, *_: Any) -> tuple[Any, ...]:
    wanted = list(ctx.needs_input_grad[0])
    gradients: list[Tensor | None] = [None] * len(wanted)
    if grad_losses is not None:
        saved, n = ctx.saved_tensors, len(wanted)
        tensors, arguments, stash = saved[:n], saved[n : n + _N_TENSORS], saved[-1]
        found = gradients_operator(list(tensors), stash, grad_losses, *arguments, wanted, *ctx.settings)
        gradients = _spread(found, wanted)
    return (gradients, *(None for _ in range(_SETTINGS + len(ctx.settings))))


loss_operator.register_autograd(_operator_backward, setup_context=_save)
gradients_operator.register_autograd(_no_second_derivative)
