"""The CUDA backend: kernels of `kernels_cu/` on raw device memory, driven through CuPy."""
