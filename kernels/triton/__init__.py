"""Kernels in Triton, for NVIDIA GPUs. Imported only where they run: nothing here is queried or tuned at import."""
