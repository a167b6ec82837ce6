"""aiakq: quantize a Hugging Face model, check it, serve it, measure it.

``from aiakq import LLM, SamplingParams`` is the offline API; importing this package alone loads nothing heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from aiakq.runtime.llm import LLM
    from aiakq.runtime.lora.requests import LoRARequest
    from aiakq.runtime.pooling_params import PoolingParams
    from aiakq.runtime.sampling_params import SamplingParams
    from aiakq.runtime.structured.grammars import GuidedDecodingParams, StructuredOutputsParams
    from aiakq.runtime.text.outputs import CompletionOutput, RequestOutput

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
    "PoolingParams": "aiakq.runtime.pooling_params",
    "SamplingParams": "aiakq.runtime.sampling_params",
    "GuidedDecodingParams": "aiakq.runtime.structured.grammars",
    "StructuredOutputsParams": "aiakq.runtime.structured.grammars",
    "RequestOutput": "aiakq.runtime.text.outputs",
    "CompletionOutput": "aiakq.runtime.text.outputs",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'aiakq' has no attribute {name!r}")
