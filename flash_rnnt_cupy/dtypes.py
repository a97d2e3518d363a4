"""NumPy's objects for the dtype names that the library uses."""

from __future__ import annotations

from typing import Any

import numpy as np

from flash_rnnt_cupy.errors import InputTypeError


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of that name; bfloat16 comes from ml_dtypes."""
    kind: Any = name
    if name == "bfloat16":
        try:
            import ml_dtypes  # noqa: PLC0415  only bfloat16 needs it
        except ImportError as error:
            raise InputTypeError("dtype", "ml_dtypes to be installed for bfloat16", str(error)) from error
        kind = ml_dtypes.bfloat16
    dtype: np.dtype[Any] = np.dtype(kind)
    return dtype
