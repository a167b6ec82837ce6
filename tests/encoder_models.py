"""Tiny random encoders of every native family, with tokenizers that frame texts as those of the families do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

_SIZES = {"vocab_size": 320, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
_BERT = {**_SIZES, "intermediate_size": 256, "max_position_embeddings": 96, "hidden_act": "gelu"}
_ROBERTA = {**_BERT, "max_position_embeddings": 98, "pad_token_id": 1, "type_vocab_size": 1}
#: Class without a head -> model_type, and what its config has.
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "BertModel": ("bert", _BERT),
    "RobertaModel": ("roberta", _ROBERTA),
    "XLMRobertaModel": ("xlm-roberta", {**_ROBERTA, "layer_norm_eps": 1e-5}),
    "CamembertModel": ("camembert", _ROBERTA),
    "DistilBertModel": (
        "distilbert",
        {
            **{"vocab_size": 320, "dim": 128, "n_layers": 2, "n_heads": 4, "hidden_dim": 256},
            "max_position_embeddings": 96,
        },
    ),
    "MPNetModel": ("mpnet", {**_BERT, "max_position_embeddings": 98}),
    "ModernBertModel": (
        "modernbert",
        {
            **{**_SIZES, "num_hidden_layers": 4, "intermediate_size": 192, "max_position_embeddings": 600},
            **{"local_attention": 16, "pad_token_id": 1, "cls_token_id": 0, "sep_token_id": 2, "bos_token_id": 0},
            "eos_token_id": 2,
        },
    ),
    "NomicBertModel": ("nomic_bert", {**_BERT, "hidden_act": "silu"}),
    "GteModel": ("gte", {**_BERT, "type_vocab_size": 1, "pad_token_id": 1}),
    "JinaEmbeddingsV3Model": ("jina_embeddings_v3", {**_BERT, "pad_token_id": 1}),
}
#: Those whose tokenizers tell the texts of a pair apart.
WITH_SEGMENTS = ("BertModel", "NomicBertModel")


def encoder_tokenizer(with_segments: bool) -> Any:
    """A tokenizer of single bytes, which frames texts: <s> text </s>, and <s> one </s> other </s>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["<s>", "<pad>", "</s>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: id for id, token in enumerate([*special, *alphabet])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    second = int(with_segments)
    pair = f"<s>:0 $A:0 </s>:0 $B:{second} </s>:{second}"
    frame = [("<s>", 0), ("</s>", 2)]
    backend.post_processor = processors.TemplateProcessing("<s> $A </s>", pair, frame)
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if with_segments else [])]
    tokens = {"bos_token": "<s>", "cls_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_input_names=names, **tokens)


def save_encoder(name: str, folder: Path, head: str = "AutoModel", **changes: Any) -> Path:
    """Save a tiny random model of the encoder ``name`` with its tokenizer; ``head`` is transformers' class for it."""
    import transformers

    kind, numbers = ENCODERS[name]
    config = transformers.AutoConfig.for_model(kind, **{**numbers, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, head).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, 1.5 / parameter.shape[-1] ** 0.5)
            elif key.endswith("bias"):
                parameter.normal_(0.0, 0.1)
            else:
                parameter.add_(torch.randn(parameter.shape) * 0.2)
    model.save_pretrained(folder)
    encoder_tokenizer(name in WITH_SEGMENTS).save_pretrained(folder)
    return folder
