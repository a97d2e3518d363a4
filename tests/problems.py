"""Small batches with poisoned padding, and their losses and gradients in float64 by `flash_rnnt_cupy.reference`.

Truth is computed from the values as rounded to the tested dtype. Options are those of the public calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from flash_rnnt_cupy import reference

Array = npt.NDArray[Any]

DTYPES = ("float16", "bfloat16", "float32", "float64")
ACTIVATIONS = ("relu", "tanh", "sigmoid", "gelu", "silu", "identity")
REDUCTIONS = ("none", "sum", "mean", "mean_volume", "mean_per_label")
GARBAGE = (-1, 2**31 - 1)  # labels that padding holds

FRAMES, LABELS = (5, 1, 8, 3), (3, 4, 0, 2)  # T > U, T < U, no labels, and the longest two apart


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def epsilon(name: str) -> float:
    """Distance from 1 to the next number."""
    return float(ml_dtypes.finfo(dtype_of(name)).eps)


class Truth(NamedTuple):
    """Losses [B], and gradients in float64, zero in the padding."""

    losses: Array
    gradients: dict[str, Array]


@dataclass(frozen=True)
class Joint:
    """Arguments of a joint-form call, all arrays padded."""

    encoder: Array  # [B, T, H]
    predictor: Array  # [B, U1, H]
    weight: Array  # [V, H]
    bias: Array | None  # [V]
    targets: Array  # [B, U]
    frames: Array  # [B]
    labels: Array  # [B]
    blank: int = -1

    @property
    def args(self) -> tuple[Any, ...]:
        return self.encoder, self.predictor, self.weight, self.bias, self.targets, self.frames, self.labels

    @property
    def n_nodes(self) -> int:
        return int((self.frames * (self.labels + 1)).sum())

    def replace(self, **changes: Any) -> Joint:
        return replace(self, **changes)

    def pick(self, utterances: Sequence[int]) -> Joint:
        """These utterances, in this order, cut to their own longest."""
        chosen = list(utterances)
        T, U = int(self.frames[chosen].max(initial=0)), int(self.labels[chosen].max(initial=0))
        return self.replace(
            encoder=self.encoder[chosen, :T],
            predictor=self.predictor[chosen, : U + 1],
            targets=self.targets[chosen, :U],
            frames=self.frames[chosen],
            labels=self.labels[chosen],
        )

    def packed(self, *names: str) -> Joint:
        counts = {"encoder": self.frames, "predictor": self.labels + 1, "targets": self.labels}
        return self.replace(**{name: pack(getattr(self, name), counts[name]) for name in names})

    def truth(
        self,
        upstream: npt.ArrayLike = 1.0,
        activation: str = "relu",
        kept: Sequence[Array] | None = None,
        fastemit_lambda: float = 0.0,
        clamp: float | None = None,
    ) -> Truth:
        """``upstream`` [B] or a scalar: gradient of the objective to each loss; ``kept`` as in the reference."""
        batch = len(self.frames)
        factor = np.broadcast_to(np.asarray(upstream, np.float64), (batch,))
        weight = self.weight.astype(np.float64)
        bias = np.zeros(len(weight)) if self.bias is None else self.bias.astype(np.float64)
        gradients = {
            name: np.zeros(array.shape)
            for name, array in (
                ("encoder", self.encoder),
                ("predictor", self.predictor),
                ("weight", weight),
                ("bias", bias),
            )
        }
        losses = np.zeros(batch)
        for b, (T, U) in enumerate(zip(self.frames, self.labels, strict=True)):
            result = reference.joint_rnnt_loss(
                self.encoder[b, :T].astype(np.float64),
                self.predictor[b, : U + 1].astype(np.float64),
                weight,
                bias,
                self.targets[b, :U],
                self.blank % len(weight),
                activation=activation,
                kept=None if kept is None else kept[b],
                fastemit_lambda=fastemit_lambda,
                clamp=clamp,
            )
            losses[b] = result.loss
            gradients["encoder"][b, :T] = factor[b] * result.encoder
            gradients["predictor"][b, : U + 1] = factor[b] * result.predictor
            gradients["weight"] += factor[b] * result.weight
            gradients["bias"] += factor[b] * result.bias
        if self.bias is None:
            del gradients["bias"]
        return Truth(losses, gradients)


@dataclass(frozen=True)
class Logits:
    """Arguments of a logits-form call, all arrays padded."""

    logits: Array  # [B, T, U1, V]
    targets: Array  # [B, U]
    frames: Array  # [B]
    labels: Array  # [B]
    blank: int = -1

    @property
    def args(self) -> tuple[Any, ...]:
        return self.logits, self.targets, self.frames, self.labels

    def replace(self, **changes: Any) -> Logits:
        return replace(self, **changes)

    def pick(self, utterances: Sequence[int]) -> Logits:
        """These utterances, in this order, cut to their own longest."""
        chosen = list(utterances)
        T, U = int(self.frames[chosen].max(initial=0)), int(self.labels[chosen].max(initial=0))
        return self.replace(
            logits=self.logits[chosen, :T, : U + 1],
            targets=self.targets[chosen, :U],
            frames=self.frames[chosen],
            labels=self.labels[chosen],
        )

    def nodes(self, padded: Array | None = None) -> Array:
        """[N, V]: the logits, or ``padded`` of their shape, without padding."""
        source = self.logits if padded is None else padded
        grids = [source[b, :T, : U + 1] for b, (T, U) in enumerate(zip(self.frames, self.labels, strict=True))]
        return np.concatenate([grid.reshape(-1, source.shape[-1]) for grid in grids])

    def valid(self) -> Array:
        """[B, T, U1], True at nodes."""
        _, T, U1, _ = self.logits.shape
        in_frames = np.arange(T)[None] < self.frames[:, None]
        in_states = np.arange(U1)[None] <= self.labels[:, None]
        return np.asarray(in_frames[:, :, None] & in_states[:, None])

    def as_log_probs(self) -> Logits:
        """Normalised in float64, then rounded."""
        log_probs = reference.log_softmax(np.where(self.valid()[..., None], self.logits, 0).astype(np.float64))
        return self.replace(logits=log_probs.astype(self.logits.dtype))

    def truth(self, upstream: npt.ArrayLike = 1.0, **options: Any) -> Truth:
        """Options of `reference.rnnt_loss`."""
        batch = len(self.frames)
        factor = np.broadcast_to(np.asarray(upstream, np.float64), (batch,))
        losses, gradient = np.zeros(batch), np.zeros(self.logits.shape)
        for b, (T, U) in enumerate(zip(self.frames, self.labels, strict=True)):
            grid = self.logits[b, :T, : U + 1].astype(np.float64)
            result = reference.rnnt_loss(grid, self.targets[b, :U], self.blank % grid.shape[-1], **options)
            losses[b] = result.loss
            gradient[b, :T, : U + 1] = factor[b] * result.gradient
        return Truth(losses, {"logits": gradient})


def pack(padded: Array, count_b: Array) -> Array:
    """[B, longest, ...] -> [sum of counts, ...]."""
    return np.concatenate([padded[b, :count] for b, count in enumerate(count_b)])


def draw_targets(rng: np.random.Generator, labels: Sequence[int], width: int, V: int, blank: int) -> Array:
    """[B, width] of any label but the blank; garbage beyond each transcript."""
    others = [v for v in range(V) if v != blank % V]
    targets = np.resize(np.array(GARBAGE), (len(labels), width))
    for b, count in enumerate(labels):
        targets[b, :count] = rng.choice(others, count)
    return targets


def draw_joint(
    frames: Sequence[int] = FRAMES,
    labels: Sequence[int] = LABELS,
    H: int = 5,
    V: int = 7,
    *,
    dtype: str = "float64",
    parameter_dtype: str | None = None,
    blank: int = -1,
    scale: float = 1.0,
    padding: int = 0,
    seed: int = 0,
) -> Joint:
    """Normal values; NaN where no one may look, ``padding`` frames and labels more than needed."""
    rng = np.random.default_rng(seed)
    B, T, U = len(frames), max(frames, default=1) + padding, max(labels, default=0) + padding
    encoder, predictor = rng.normal(size=(B, T, H)), rng.normal(size=(B, U + 1, H))
    for b in range(B):
        encoder[b, frames[b] :] = np.nan
        predictor[b, labels[b] + 1 :] = np.nan
    states, parameters = dtype_of(dtype), dtype_of(parameter_dtype or dtype)
    return Joint(
        encoder=encoder.astype(states),
        predictor=predictor.astype(states),
        weight=(scale * rng.normal(size=(V, H))).astype(parameters),
        bias=(scale * rng.normal(size=V)).astype(parameters),
        targets=draw_targets(rng, labels, U, V, blank),
        frames=np.array(frames, np.int64),
        labels=np.array(labels, np.int64),
        blank=blank,
    )


def draw_logits(
    frames: Sequence[int] = FRAMES,
    labels: Sequence[int] = LABELS,
    V: int = 7,
    *,
    dtype: str = "float64",
    blank: int = -1,
    scale: float = 2.0,
    padding: int = 0,
    seed: int = 0,
) -> Logits:
    """Normal values; NaN where no one may look, ``padding`` frames and labels more than needed."""
    rng = np.random.default_rng(seed)
    B, T, U = len(frames), max(frames, default=1) + padding, max(labels, default=0) + padding
    problem = Logits(
        logits=(scale * rng.normal(size=(B, T, U + 1, V))).astype(dtype_of(dtype)),
        targets=draw_targets(rng, labels, U, V, blank),
        frames=np.array(frames, np.int64),
        labels=np.array(labels, np.int64),
        blank=blank,
    )
    problem.logits[~problem.valid()] = np.nan
    return problem


def uniform_logits(T: int, U: int, V: int, *, dtype: str = "float64") -> Logits:
    """One utterance of equal logits, blank last, labels running through the others."""
    targets = np.arange(U)[None] % max(V - 1, 1)
    return Logits(np.zeros((1, T, U + 1, V), dtype_of(dtype)), targets, np.array([T]), np.array([U]))


def joint_of_logits(problem: Logits) -> Joint:
    """A joint network whose logits are the given ones, one utterance: hidden states are one-hot in the node.

    relu(e[t] + p[u]) with e 1 at the nodes of frame t and p -1 at those of other states; so column n of the
    weight gradient is the logit gradient of node n.
    """
    _, T, U1, _ = problem.logits.shape
    t, u = np.divmod(np.arange(T * U1), U1)
    dtype = problem.logits.dtype
    return Joint(
        encoder=(t == np.arange(T)[:, None]).astype(dtype)[None],
        predictor=((u == np.arange(U1)[:, None]) - 1.0).astype(dtype)[None],
        weight=np.ascontiguousarray(problem.nodes().T),
        bias=None,
        targets=problem.targets,
        frames=problem.frames,
        labels=problem.labels,
        blank=problem.blank,
    )
