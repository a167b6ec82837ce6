"""The keys of a new file that its tokenizer and its defaults for sampling need, from the files of a model."""

from __future__ import annotations

from typing import Any

from aiakq.convert.gguf.tokenizer import tokenizer_keys
from aiakq.errors import AiakqError, error
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.gguf_model.tokenizer import SAMPLING
from aiakq.formats.gguf_model.written import file_of
from aiakq.formats.model_folder import read_json
from aiakq.runtime.config.generation_keys import not_applied, of_model_config
from aiakq.runtime.config.hf_config import check_generation_config
from aiakq.runtime.text.tokenizer import Tokenizer

_GENERATION = "generation_config.json"
_EOS = "eos_token_id"
_PREFIX = "general.sampling."
_SAMPLED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def vocabulary_keys(checkpoint: Checkpoint, rows: int) -> tuple[dict[str, object], list[str]]:
    """Return the keys, and notes on what other programs do with them. Those of a GGUF file are taken as they are.

    rows  number of tokens of the model.

    Raises ``gguf_not_written`` for a tokenizer that such files do not hold, ``generation_config`` for values that no
    server takes, and what ``Tokenizer.load`` raises.
    """
    if (file := file_of(checkpoint.foreign)) is not None:
        kept = ("tokenizer.", _PREFIX)
        return {key: value for key, value in file.metadata.items() if key.startswith(kept)}, []
    check_generation_config(checkpoint.path, checkpoint.config)
    path = checkpoint.path / _GENERATION
    generation: dict[str, Any] = read_json(path, _GENERATION) if path.is_file() else {}
    generation = generation or of_model_config(checkpoint.config)
    ends = next((each for each in (generation.get(_EOS), checkpoint.config.get(_EOS)) if each not in (None, [])), None)
    ids = [id for id in (ends if isinstance(ends, list) else [ends]) if type(id) is int and 0 <= id < rows]
    try:
        tokenizer = Tokenizer.load(checkpoint.path)
    except AiakqError as problem:
        if problem.id != "tokenizer_missing":
            raise
        reason = "the folder has no tokenizer, without which no program can use the file; copy it there"
        raise error("gguf_not_written", what=checkpoint.named_path.name, reason=reason) from problem
    keys, notes = tokenizer_keys(tokenizer, rows, ids)
    names = {hf: name for name, hf in SAMPLING.items()}
    for name in _SAMPLED:
        value = generation.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            # No limit is -1 in requests and 0 in files.
            keys[_PREFIX + names.get(name, name)] = max(0, int(value)) if name == "top_k" else float(value)
    left_out = not_applied(generation) | {
        name: value for name, value in generation.items() if name == "max_new_tokens" and value is not None
    }
    if left_out:
        notes.append(f"Defaults of requests that such files do not hold: {', '.join(sorted(left_out))[:200]}.")
    return keys, notes
