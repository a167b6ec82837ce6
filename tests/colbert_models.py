"""Tiny random ColBERT models, in the files of PyLate and of ColBERT's authors, and what they compute."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import torch
from encoder_models import save_encoder
from safetensors.torch import load_file, save_file
from torch import Tensor

WIDTH = 24
SETTINGS = "config_sentence_transformers.json"
PYLATE: dict[str, Any] = {
    **{"model_type": "ColBERT", "query_prefix": "[Q] ", "document_prefix": "[D] ", "query_length": 20},
    **{"document_length": 30, "attend_to_expansion_tokens": False, "do_query_expansion": True},
    **{"skiplist_words": list(string.punctuation), "similarity_fn_name": "MaxSim", "prompts": {"query": ""}},
}
METADATA: dict[str, Any] = {
    **{"query_token_id": "[unused0]", "doc_token_id": "[unused1]", "query_maxlen": 20, "doc_maxlen": 30},
    **{"dim": WIDTH, "mask_punctuation": True, "attend_to_mask_tokens": False, "similarity": "cosine"},
}


def add_tokens(folder: Path, tokens: tuple[str, str]) -> None:
    """Add ``tokens`` and a mask token to the tokenizer in ``folder``."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(list(tokens))
    tokenizer.add_special_tokens({"mask_token": "[MASK]"})
    tokenizer.save_pretrained(folder)


def save_pylate(name: str, folder: Path, residual: bool = False, **settings: Any) -> Path:
    """Save a model of the encoder ``name`` as PyLate does."""
    save_encoder(name, folder)
    add_tokens(folder, ("[Q] ", "[D] "))
    kinds = [("", "sentence_transformers.models.Transformer"), ("1_Dense", "pylate.models.Dense.Dense")]
    modules = [{"idx": n, "name": str(n), "path": path, "type": kind} for n, (path, kind) in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / SETTINGS).write_text(json.dumps(PYLATE | settings))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 19, "do_lower_case": false}')
    dense = {"in_features": 128, "out_features": WIDTH, "bias": False, "use_residual": residual}
    (folder / "1_Dense").mkdir()
    identity = {"activation_function": "torch.nn.modules.linear.Identity"}
    (folder / "1_Dense" / "config.json").write_text(json.dumps(dense | identity))
    torch.manual_seed(3)
    tensors = {"linear.weight": torch.randn(WIDTH, 128) / 9}
    if residual:
        tensors["residual.weight"] = torch.randn(WIDTH, 128) / 9
    save_file(tensors, folder / "1_Dense" / "model.safetensors")
    return folder


def as_multi_vector_encoder(folder: Path, **expansion: Any) -> Path:
    """Write the files of PyLate as sentence-transformers' MultiVectorEncoder does; return the folder.

    PyLate's settings remain in pylate.json, for ``token_vectors``.
    """
    settings = json.loads((folder / SETTINGS).read_text())
    kinds = {"": "Transformer", "1_Dense": "Dense", "2_MultiVectorMask": "MultiVectorMask", "3_Normalize": "Normalize"}
    modules = [
        {"idx": n, "name": str(n), "path": path, "type": f"s.{kind}"} for n, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    filled = {"strategy": "fixed", "attend": False, "token": None, "length": settings["query_length"]} | expansion
    (folder / "pylate.json").write_text(json.dumps(settings | {"filled_length": filled["length"]}))
    lengths = {name: settings[name] for name in ("query_length", "document_length")}
    (folder / "sentence_bert_config.json").write_text(json.dumps({"query_expansion": filled, **lengths}))
    prompts = {"query": settings["query_prefix"], "document": settings["document_prefix"]}
    (folder / SETTINGS).write_text(json.dumps({"prompts": prompts, "model_type": "MultiVectorEncoder"}))
    for path, content in {
        "2_MultiVectorMask": {"skiplist_words": settings["skiplist_words"], "skiplist_tasks": ["document"]},
        "3_Normalize": {"module_input_name": "token_embeddings"},
    }.items():
        (folder / path).mkdir()
        (folder / path / "config.json").write_text(json.dumps(content))
    return folder


def save_authors(folder: Path, **metadata: Any) -> Path:
    """Save a model as ColBERT's authors do."""
    save_encoder("BertModel", folder)
    add_tokens(folder, ("[unused0]", "[unused1]"))
    torch.manual_seed(3)
    tensors = {f"bert.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors | {"linear.weight": torch.randn(WIDTH, 128) / 9}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["HF_ColBERT"]}))
    (folder / "artifact.metadata").write_text(json.dumps(METADATA | metadata))
    return folder


def token_vectors(folder: Path, text: str, role: str) -> Tensor:
    """The vectors [rows, WIDTH] of a query or document, by transformers and the published algorithm."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer, is_query = AutoTokenizer.from_pretrained(folder), role == "query"
    if (folder / "modules.json").exists():
        file = folder / "pylate.json"
        settings = json.loads((file if file.exists() else folder / SETTINGS).read_text())
        length = settings["query_length" if is_query else "document_length"]
        marker = settings["query_prefix" if is_query else "document_prefix"]
        expands, attends = settings["do_query_expansion"], settings["attend_to_expansion_tokens"]
        skipped = settings["skiplist_words"]
        projections = list(load_file(folder / "1_Dense" / "model.safetensors").values())
        model = AutoModel.from_pretrained(folder, dtype=torch.float32)
    else:
        settings, expands = json.loads((folder / "artifact.metadata").read_text()), True
        length, attends = settings["query_maxlen" if is_query else "doc_maxlen"], settings["attend_to_mask_tokens"]
        marker = settings["query_token_id" if is_query else "doc_token_id"]
        skipped = string.punctuation if settings["mask_punctuation"] else ""
        tensors = load_file(folder / "model.safetensors")
        projections = [tensors.pop("linear.weight")]
        model = AutoModel.from_config(
            __import__("transformers").AutoConfig.from_pretrained(folder), dtype=torch.float32
        )
        model.load_state_dict({name.removeprefix("bert."): tensor for name, tensor in tensors.items()}, strict=False)
    ids = tokenizer(text, truncation=True, max_length=length - 1 if marker else length)["input_ids"]
    if marker:
        ids.insert(1, tokenizer.convert_tokens_to_ids(marker))
    num_read = len(ids)
    if is_query and expands:
        ids += [tokenizer.mask_token_id] * (settings.get("filled_length", length) - len(ids))
    mask = torch.tensor([[1] * num_read + [int(attends)] * (len(ids) - num_read)])
    with torch.no_grad():
        states = model.eval()(torch.tensor([ids]), attention_mask=mask).last_hidden_state[0]
    rows = torch.nn.functional.normalize(sum(states @ each.T for each in projections), dim=-1)
    left_out = set() if is_query else {tokenizer.convert_tokens_to_ids(word) for word in skipped}
    return rows[[at for at, id in enumerate(ids) if id not in left_out]]


def max_similarity(query: Tensor, document: Tensor) -> float:
    return float((query @ document.T).max(1).values.sum())
