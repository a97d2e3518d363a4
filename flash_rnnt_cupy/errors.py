"""What can go wrong, as types.

InputError(ValueError)               an argument is wrong; nothing has been launched or written
InputTypeError(TypeError)          ... of a wrong type or dtype
PlanError                          ... the work does not fit the given budget
BackendError(RuntimeError)           the machine could not do it
BackendUnavailableError            ... no such backend here, or it cannot do this problem
CompileError                       ... a kernel's text does not compile
LaunchError                        ... a kernel could not be launched, or failed
OutOfMemoryError(MemoryError)      ... the device has too little memory left
"""

from __future__ import annotations

import re


class InputError(ValueError):
    """An argument is wrong: names it, what was expected and what came.

    ``where`` places a wrong value inside an array, e.g. ``"utterance 3, position 5"``.
    """

    def __init__(self, argument: str, expected: str, got: object, where: str = "", remedy: str = "") -> None:
        """Builds the message ``argument: expected ..., got ... at where (remedy)``."""
        self.argument, self.expected, self.got, self.where = argument, expected, got, where
        place = f" at {where}" if where else ""
        hint = f" ({remedy})" if remedy else ""
        super().__init__(f"{argument}: expected {expected}, got {got}{place}{hint}")


class InputTypeError(InputError, TypeError):
    """An argument has a wrong type or dtype."""


class PlanError(InputError):
    """The work does not fit the budget it was given."""


class BackendError(RuntimeError):
    """The machine could not do what was asked."""


class BackendUnavailableError(BackendError):
    """A backend is missing on this machine, or cannot do this problem; the message says why."""


class CompileError(BackendError):
    """A kernel's text does not compile: names the first error's ``file`` and ``line``, and the ``spec``.

    ``log`` is the compiler's own report; ``file`` is empty where it names none.
    """

    def __init__(self, spec: str, log: str) -> None:
        """Builds the message ``file:line: error (compiling spec)``, followed by the log."""
        first = re.search(r"^(.+)\((\d+)\): .*?error: (.*)$", log, re.MULTILINE)
        self.file, self.line = (first[1], int(first[2])) if first else ("", 0)
        self.spec, self.log = spec, log
        headline = f"{self.file}:{self.line}: {first[3]}" if first else "the compiler failed"
        super().__init__(f"{headline} (compiling {spec})\n{log}")


class LaunchError(BackendError):
    """A CUDA call failed: names the ``kernel`` (or library call), its ``sizes``, the ``device`` and the cause."""

    def __init__(self, kernel: str, sizes: str, device: str, cause: object) -> None:
        """Builds the message ``kernel (sizes) on device: cause``."""
        self.kernel, self.sizes, self.device = kernel, sizes, device
        super().__init__(f"{kernel} ({sizes}) on {device}: {cause}")


class OutOfMemoryError(BackendError, MemoryError):
    """The device has too little memory left; the message says for what, and how much was asked for."""
