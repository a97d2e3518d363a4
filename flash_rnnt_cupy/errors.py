"""What can go wrong, as types.

InputError(ValueError)               an argument is wrong; nothing has been launched or written
InputTypeError(TypeError)          ... of a wrong type or dtype
PlanError                          ... the work does not fit the given budget
BackendError(RuntimeError)           the machine could not do it
BackendUnavailableError            ... no such backend here, or it cannot do this problem
"""

from __future__ import annotations


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
