"""The memory account: every buffer of a call as a named part, known before anything is allocated.

The pipeline allocates exactly these parts, by name, so the account cannot drift from the code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from flash_rnnt_cupy.problem import ITEMSIZE


class Life(Enum):
    """When a part exists."""

    GIVEN = "given"  # the caller's
    SAVED = "saved"  # from forward to the end of backward
    TILE = "tile"  # in forward, and anew in backward
    FORWARD = "forward"
    BACKWARD = "backward"


class Part(NamedTuple):
    """One buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    life: Life

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class MemoryAccount:
    """All parts of a call. ``str()`` of it is a table."""

    title: str
    parts: tuple[Part, ...]
    dense_bytes: int  # the [N, V] scores that are never held, for comparison

    @cached_property
    def _named(self) -> dict[str, Part]:
        return {part.name: part for part in self.parts}

    def __getitem__(self, name: str) -> Part:
        """The part of that name."""
        return self._named[name]

    def __contains__(self, name: str) -> bool:
        """Whether there is such a part."""
        return name in self._named

    def _bytes(self, *lives: Life) -> int:
        return sum(part.nbytes for part in self.parts if part.life in lives)

    @property
    def given_bytes(self) -> int:
        """The caller's arrays."""
        return self._bytes(Life.GIVEN)

    @property
    def saved_bytes(self) -> int:
        """What lives between forward and backward, beside the caller's arrays."""
        return self._bytes(Life.SAVED)

    @property
    def forward_bytes(self) -> int:
        """Peak while forward runs."""
        return self._bytes(Life.GIVEN, Life.SAVED, Life.TILE, Life.FORWARD)

    @property
    def backward_bytes(self) -> int:
        """Peak while backward runs."""
        return self._bytes(Life.GIVEN, Life.SAVED, Life.TILE, Life.BACKWARD)

    @property
    def peak_bytes(self) -> int:
        """The larger of the two, or forward's where there is no backward."""
        has_backward = any(part.life is Life.BACKWARD for part in self.parts)
        return max(self.forward_bytes, self.backward_bytes) if has_backward else self.forward_bytes

    def __str__(self) -> str:
        """A table of parts and sums."""
        rows = [(p.name, " x ".join(map(str, p.shape)), p.dtype, p.life.value, p.nbytes) for p in self.parts]
        names, shapes = (max(len(str(row[i])) for row in rows) for i in (0, 1))
        lines = [self.title]
        lines += [f"  {n:<{names}}  {s:>{shapes}}  {d:<8}  {life:<8}  {_mib(b)}" for n, s, d, life, b in rows]
        sums = [("forward peak", self.forward_bytes), ("saved for backward", self.saved_bytes)]
        sums += [("backward peak", self.backward_bytes), ("dense scores, never held", self.dense_bytes)]
        width = names + shapes + 22
        return "\n".join(lines + [f"  {name:<{width}}  {_mib(nbytes)}" for name, nbytes in sums])


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:12,.2f} MiB"
