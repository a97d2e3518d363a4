"""Exact transducer (RNN-T) joint network and loss, with all gradients, without the B x T x U x V scores.

The letters used everywhere, in docstrings, array names and kernels:

    B  utterances                 N  packed lattice nodes, sum of T_b (U_b + 1)
    T  frames                     R  rows of a tile
    U  labels                     C  score columns kept per node
    U1 states, U + 1              G  softmax groups
    H  joint width                K  arcs
    V  vocabulary with blank

Array names carry their axes (``column_cn``); ends are exclusive; lengths are counts.
"""

from flash_rnnt_cupy.api import (
    joint_rnnt_loss,
    joint_rnnt_loss_and_grad,
    plan_memory,
    rnnt_loss,
    rnnt_loss_and_grad,
)
from flash_rnnt_cupy.errors import (
    BackendError,
    BackendUnavailableError,
    CompileError,
    InputError,
    InputTypeError,
    LaunchError,
    OutOfMemoryError,
    PlanError,
)
from flash_rnnt_cupy.pipeline import Gradients
from flash_rnnt_cupy.selfcheck import selfcheck

__version__ = "0.1.0"

__all__ = [
    "BackendError",
    "BackendUnavailableError",
    "CompileError",
    "Gradients",
    "InputError",
    "InputTypeError",
    "LaunchError",
    "OutOfMemoryError",
    "PlanError",
    "joint_rnnt_loss",
    "joint_rnnt_loss_and_grad",
    "plan_memory",
    "rnnt_loss",
    "rnnt_loss_and_grad",
    "selfcheck",
]
