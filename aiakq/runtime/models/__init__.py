"""Model families: ``ARCHITECTURES`` maps a config.json architecture to the module that builds it.

A family is one short file with ``build(config, weights) -> Decoder``: it names the tensors and picks the blocks.
Adding one is that file and one line here, or an entry point of a package; the tests run over this table.
"""

from __future__ import annotations

from aiakq.registry import Registry

_BUILTIN = {
    "LlamaForCausalLM": "aiakq.runtime.models.llama",
    "MistralForCausalLM": "aiakq.runtime.models.mistral",
    "Qwen2ForCausalLM": "aiakq.runtime.models.qwen2",
    "Qwen3ForCausalLM": "aiakq.runtime.models.qwen3",
    "MixtralForCausalLM": "aiakq.runtime.models.mixtral",
    "Qwen2MoeForCausalLM": "aiakq.runtime.models.qwen2_moe",
    "Qwen3MoeForCausalLM": "aiakq.runtime.models.qwen3_moe",
    "OPTForCausalLM": "aiakq.runtime.models.opt",
}

#: Architecture name in config.json -> module.
ARCHITECTURES = Registry("aiakq.architectures", _BUILTIN)

#: The built-in families, for error messages.
FAMILIES = ", ".join(sorted(name.removesuffix("ForCausalLM") for name in _BUILTIN))
