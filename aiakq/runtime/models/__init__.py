"""Model families: ``ARCHITECTURES`` maps an architecture of config.json to the module that builds it.

A family is one short file with ``build(config, weights) -> Decoder``: it names the tensors and picks the blocks.
Adding one is that file and one line here, or an entry point of a package; the tests run over this table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiakq.registry import Registry
from aiakq.runtime.models.encoders import ENCODERS, UNUSED

if TYPE_CHECKING:
    from aiakq.runtime.models.decoder import FamilyModule

#: Architecture name in config.json -> module.
ARCHITECTURES: Registry[FamilyModule] = Registry(
    "aiakq.architectures",
    {
        "LlamaForCausalLM": "aiakq.runtime.models.llama",
        "MistralForCausalLM": "aiakq.runtime.models.mistral",
        "Qwen2ForCausalLM": "aiakq.runtime.models.qwen2",
        "MiMoV2FlashForCausalLM": "aiakq.runtime.models.mimo_v2_flash",
        "MiMoForCausalLM": "aiakq.runtime.models.qwen2",
        "Qwen3ForCausalLM": "aiakq.runtime.models.qwen3",
        "MixtralForCausalLM": "aiakq.runtime.models.mixtral",
        "Qwen2MoeForCausalLM": "aiakq.runtime.models.qwen2_moe",
        "Qwen3MoeForCausalLM": "aiakq.runtime.models.qwen3_moe",
        "OPTForCausalLM": "aiakq.runtime.models.opt",
        "XGLMForCausalLM": "aiakq.runtime.models.xglm",
        "GemmaForCausalLM": "aiakq.runtime.models.gemma",
        "RecurrentGemmaForCausalLM": "aiakq.runtime.models.recurrent_gemma",
        "Gemma3ForCausalLM": "aiakq.runtime.models.gemma3",
        "Gemma2ForCausalLM": "aiakq.runtime.models.gemma2",
        "Gemma3nForCausalLM": "aiakq.runtime.models.gemma3n",
        "Gemma4ForCausalLM": "aiakq.runtime.models.gemma4",
        "GptOssForCausalLM": "aiakq.runtime.models.gpt_oss",
        "Llama4ForCausalLM": "aiakq.runtime.models.llama4",
        "GlmForCausalLM": "aiakq.runtime.models.glm4",
        "Glm4ForCausalLM": "aiakq.runtime.models.glm4",
        "CohereForCausalLM": "aiakq.runtime.models.cohere",
        "Cohere2ForCausalLM": "aiakq.runtime.models.cohere",
        "GPTJForCausalLM": "aiakq.runtime.models.gptj",
        "BloomForCausalLM": "aiakq.runtime.models.bloom",
        "MptForCausalLM": "aiakq.runtime.models.mpt",
        "FalconForCausalLM": "aiakq.runtime.models.falcon",
        "Phi3ForCausalLM": "aiakq.runtime.models.phi3",
        "PhiForCausalLM": "aiakq.runtime.models.phi",
        "PhimoeForCausalLM": "aiakq.runtime.models.phimoe",
        "Olmo2ForCausalLM": "aiakq.runtime.models.olmo2",
        "Olmo3ForCausalLM": "aiakq.runtime.models.olmo2",
        "OlmoHybridForCausalLM": "aiakq.runtime.models.olmo_hybrid",
        "OlmoeForCausalLM": "aiakq.runtime.models.olmoe",
        "Exaone4ForCausalLM": "aiakq.runtime.models.exaone4",
        "GraniteForCausalLM": "aiakq.runtime.models.granite",
        "GraniteMoeForCausalLM": "aiakq.runtime.models.granitemoe",
        "SmolLM3ForCausalLM": "aiakq.runtime.models.smollm3",
        "Starcoder2ForCausalLM": "aiakq.runtime.models.starcoder2",
        "GPT2LMHeadModel": "aiakq.runtime.models.gpt2",
        "GPTBigCodeForCausalLM": "aiakq.runtime.models.gpt2",
        "Glm4MoeForCausalLM": "aiakq.runtime.models.glm4_moe",
        "DeepseekV2ForCausalLM": "aiakq.runtime.models.deepseek",
        "DeepseekV3ForCausalLM": "aiakq.runtime.models.deepseek",
        "DeepseekV32ForCausalLM": "aiakq.runtime.models.deepseek_v32",
        "AXK2ForCausalLM": "aiakq.runtime.models.axk2",
        "HYV4ForCausalLM": "aiakq.runtime.models.hy_v4",
        "GlmMoeDsaForCausalLM": "aiakq.runtime.models.deepseek_v32",
        "BambaForCausalLM": "aiakq.runtime.models.bamba",
        "FalconH1ForCausalLM": "aiakq.runtime.models.falcon_h1",
        "NemotronHForCausalLM": "aiakq.runtime.models.nemotron_h",
        "GraniteMoeHybridForCausalLM": "aiakq.runtime.models.granitemoehybrid",
        "Lfm2ForCausalLM": "aiakq.runtime.models.lfm2",
        "MambaForCausalLM": "aiakq.runtime.models.mamba",
        "FalconMambaForCausalLM": "aiakq.runtime.models.mamba",
        "JambaForCausalLM": "aiakq.runtime.models.jamba",
        "Mamba2ForCausalLM": "aiakq.runtime.models.mamba2",
        "Qwen3NextForCausalLM": "aiakq.runtime.models.qwen3_next",
        "Qwen3_5ForCausalLM": "aiakq.runtime.models.qwen3_5",
        "Qwen3_5MoeForCausalLM": "aiakq.runtime.models.qwen3_5",
        "Lfm2MoeForCausalLM": "aiakq.runtime.models.lfm2_moe",
        "Lfm3ForCausalLM": "aiakq.runtime.models.lfm3",
        "StableLmForCausalLM": "aiakq.runtime.models.stablelm",
        "CodeGenForCausalLM": "aiakq.runtime.models.codegen",
        "GPTNeoForCausalLM": "aiakq.runtime.models.gpt_neo",
        "SeedOssForCausalLM": "aiakq.runtime.models.seed_oss",
        "Ernie4_5ForCausalLM": "aiakq.runtime.models.ernie4_5",
        "Ernie4_5_MoeForCausalLM": "aiakq.runtime.models.ernie4_5",
        "MinistralForCausalLM": "aiakq.runtime.models.ministral",
        "Ministral3ForCausalLM": "aiakq.runtime.models.ministral",
        "Glm4MoeLiteForCausalLM": "aiakq.runtime.models.deepseek",
        "Dots1ForCausalLM": "aiakq.runtime.models.dots1",
        "SolarOpenForCausalLM": "aiakq.runtime.models.glm4_moe",
        "MiniMaxM2ForCausalLM": "aiakq.runtime.models.minimax_m2",
        "MiniMaxForCausalLM": "aiakq.runtime.models.minimax",
        "KimiLinearForCausalLM": "aiakq.runtime.models.kimi_linear",
        "ZambaForCausalLM": "aiakq.runtime.models.zamba",
        "Zamba2ForCausalLM": "aiakq.runtime.models.zamba2",
        "HunYuanDenseV1ForCausalLM": "aiakq.runtime.models.hunyuan",
        "HunYuanMoEV1ForCausalLM": "aiakq.runtime.models.hunyuan",
    },
)

#: Architecture of a model with an encoder of audio -> module that builds its decoder.
TRANSCRIBERS: Registry[FamilyModule] = Registry(
    "aiakq.transcribers", {"WhisperForConditionalGeneration": "aiakq.runtime.models.whisper"}
)

#: All families, those of plugins included, for error messages.
FAMILIES = ", ".join(sorted(name.removesuffix("ForCausalLM") for name in ARCHITECTURES))


def is_native(architecture: str) -> bool:
    """Whether aiakq computes ``architecture`` itself: a decoder, also one beside an encoder, or an encoder without its
    head.
    """
    return architecture in ARCHITECTURES or architecture in ENCODERS or architecture in TRANSCRIBERS


def unused_tensors(architecture: str) -> tuple[str, ...]:
    """Return prefixes of tensors that files of ``architecture`` may have and the model does not compute with."""
    return UNUSED if architecture in ENCODERS else ()


def family_module(architecture: str) -> FamilyModule:
    """Return the module that builds ``architecture``. Raises KeyError for one that is not native, and ``plugin``."""
    registry = next((each for each in (ENCODERS, TRANSCRIBERS) if architecture in each), ARCHITECTURES)
    return registry.load(architecture)
