"""A transducer loss as a table.

A lattice has a node for every frame t < T and state u <= U, and one final node (T, U). An *arc* moves by
(dt, du) and scores the sum of its *columns* plus a constant; a column is one logit of the node minus the
log-sum-exp of its *softmax group*, a range of logits. An arc that lands on (T, U) ends the alignment if it
may; no other arc may leave the grid. The recursion, the posteriors and the gradient rule read this table
and know no loss:

    alpha[t, u]   = sum over arcs k of alpha[t - dt_k, u - du_k] * exp(score_k[t - dt_k, u - du_k])
    dNLL / dz[v]  = mass_g softmax_g[v] - sum over columns c on logit v of posterior_c,     v in group g
    posterior_c   = sum over arcs that use c of their posterior,  mass_g = sum over c in g of posterior_c

Source: Graves 2012 (arXiv:1211.3711), eq. 16-20, for RNN-T.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Logit(Enum):
    """Which logit of a node a column reads."""

    BLANK = "blank"
    LABEL = "label"  # the next label y[u]; absent (minus infinity) at u = U


@dataclass(frozen=True)
class Group:
    """A range of logits that are normalised together; ``stop`` is exclusive, None means V."""

    name: str
    start: int = 0
    stop: int | None = None

    def slice(self) -> slice:
        """The group's logits, as a slice of the last axis of [..., V]."""
        return slice(self.start, self.stop)


@dataclass(frozen=True)
class Column:
    """A normalised score kept at every node: ``logit - logsumexp(group)``."""

    name: str
    logit: Logit | int
    group: int = 0


@dataclass(frozen=True)
class Arc:
    """A step by (dt, du) that scores the sum of ``columns`` plus ``constant``."""

    name: str
    dt: int
    du: int
    columns: tuple[int, ...]
    constant: float = 0.0
    may_end: bool = False

    @property
    def emits(self) -> bool:
        """Whether the arc consumes a label (FastEmit weighs these arcs)."""
        return self.du > 0


@dataclass(frozen=True)
class Topology:
    """A loss: softmax groups, columns kept per node, arcs between nodes."""

    name: str
    groups: tuple[Group, ...]
    columns: tuple[Column, ...]
    arcs: tuple[Arc, ...]

    def __post_init__(self) -> None:
        """Rejects tables on which the recursion would not end or occupancy is undefined."""
        for arc in self.arcs:
            if arc.dt < 0 or arc.du not in (0, 1) or arc.dt + arc.du < 1:
                raise ValueError(f"{self.name}: arc {arc.name} moves by ({arc.dt}, {arc.du})")
        if self.occupancy_columns is None:
            raise ValueError(f"{self.name}: no softmax group is used exactly once by every arc")

    @property
    def reach(self) -> int:
        """How many anti-diagonals t + u the longest arc crosses."""
        return max(arc.dt + arc.du for arc in self.arcs)

    @property
    def occupancy_columns(self) -> tuple[int, ...] | None:
        """Columns whose posteriors add up to the posterior of the node itself."""
        for group in range(len(self.groups)):
            members = tuple(c for c, column in enumerate(self.columns) if column.group == group)
            if all(sum(c in members for c in arc.columns) == 1 for arc in self.arcs):
                return members
        return None


BLANK, LABEL = 0, 1

RNNT = Topology(
    name="rnnt",
    groups=(Group("tokens"),),
    columns=(Column("blank", Logit.BLANK), Column("label", Logit.LABEL)),
    arcs=(Arc("blank", 1, 0, (BLANK,), may_end=True), Arc("label", 0, 1, (LABEL,))),
)
