"""Every kernel once or more on small ragged lattices, for compute-sanitizer: `python -m tests.sanitizer_workload`.

Arrays end where their allocations end, so that a read past the last label or row is seen.
"""

import cupy
import numpy as np

import flash_rnnt_cupy as frc
from flash_rnnt_cupy.backends.cuda import stages

FRAMES, LABELS = np.array([5, 1, 7]), np.array([3, 0, 9])


def exact(array: np.ndarray) -> cupy.ndarray:
    """On the device, in an allocation of its own and of its own size."""
    memory = cupy.cuda.Memory(max(array.nbytes, 1))
    device = cupy.ndarray(array.shape, array.dtype, cupy.cuda.MemoryPointer(memory, 0))
    device.set(array)
    return device


def main() -> None:
    cupy.cuda.set_allocator(None)  # no pool: every buffer an allocation
    random = np.random.default_rng(0)
    cases = (
        ("float16", 16, 24, "cuda"),
        ("float16", 72, 300, "cuda"),
        ("float16", 16, 24, "cuda-generic"),
        ("float32", 13, 11, "cuda"),
        ("float64", 8, 2_100, "cuda"),
    )
    for dtype, H, V, backend in cases:
        shapes = ((3, 7, H), (3, 10, H), (V, H), (V,))
        arrays = [exact(random.normal(size=shape).astype(dtype)) for shape in shapes]
        labels = random.integers(0, V - 1, (3, 9))
        for tile_rows, stages.SHORT_SUM, stages.LONG_SUM in ((4, 9, 9), (7, 0, 9), (None, 0, 0)):
            losses, gradients = frc.joint_rnnt_loss_and_grad(
                *arrays,
                labels,
                FRAMES,
                LABELS,
                dropout=0.1,
                seed=3,
                tile_rows=tile_rows,
                reduction="none",
                backend=backend,
            )
            assert np.isfinite(losses.get()).all()
            assert np.isfinite(gradients.weight.get()).all()
        logits = exact(random.normal(size=(3, 7, 10, V)).astype(dtype))
        for fused in (True, False):
            _, gradient = frc.rnnt_loss_and_grad(logits, labels, FRAMES, LABELS, fused_log_softmax=fused, clamp=0.5)
            assert np.isfinite(gradient.get()).all()
    print("workload done")


if __name__ == "__main__":
    main()
