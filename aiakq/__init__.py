"""aiakq: quantize a Hugging Face model, check it, serve it, measure it.

``from aiakq import LLM, SamplingParams`` is the offline API; importing this package alone loads nothing heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from aiakq.runtime.llm import LLM
    from aiakq.runtime.lora.requests import LoRARequest
    from aiakq.runtime.protocol.grammar import GuidedDecodingParams, StructuredOutputsParams
    from aiakq.runtime.protocol.pooling_params import PoolingParams
    from aiakq.runtime.protocol.request_output import CompletionOutput, RequestOutput
    from aiakq.runtime.protocol.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "LoRARequest",
    "GuidedDecodingParams",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]

_LAZY = {
    "LLM": "aiakq.runtime.llm",
    "LoRARequest": "aiakq.runtime.lora.requests",
    "PoolingParams": "aiakq.runtime.protocol.pooling_params",
    "SamplingParams": "aiakq.runtime.protocol.sampling_params",
    "GuidedDecodingParams": "aiakq.runtime.protocol.grammar",
    "StructuredOutputsParams": "aiakq.runtime.protocol.grammar",
    "RequestOutput": "aiakq.runtime.protocol.request_output",
    "CompletionOutput": "aiakq.runtime.protocol.request_output",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'aiakq' has no attribute {name!r}")
