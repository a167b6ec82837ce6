"""Kernels for CPUs, in C++ (src/): a library of operations, its build, and what binds layers to them."""
