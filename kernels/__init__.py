"""Kernels: implementations of a model's operations for CPUs and GPUs. Imported as ``aiakq.kernels``; imports nothing
from aiakq.

Each operation has one module in ``ops/``: its interface, a reference in torch, and the registry of its implementations
in order of preference. ``cpu/`` and ``triton/`` hold the implementations for those devices under the same names:
``<op>.py`` launches, ``<op>_kernel`` computes. Every implementation is a module that offers

    supports(problem) -> None, or one sentence why not
    prepare(..., problem) -> an object that is called at every step; its interface is in ops/<op>.py

``ops.Ops`` is created once per device when a model is loaded and binds every layer to the best implementation that
supports it.
"""

# This module must import nothing: transformers imports it when it looks for another package named "kernels" and finds
# this folder.
__version__ = "0.1.0"  # transformers reads the version of a package of this name
