"""Ids of tokens by their names in a tokenizer's files, before the tokenizer is loaded."""

from __future__ import annotations

from pathlib import Path

from aiakq.formats.model_folder import read_json


def ids_by_token(folder: Path) -> dict[str, int]:
    """Return the ids of all tokens of tokenizer.json. Raises ``model_*``."""
    tokenizer = read_json(folder / "tokenizer.json", "tokenizer.json")
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids: dict[str, int] = {}
    if isinstance(vocabulary, dict):
        ids = {token: id for token, id in vocabulary.items() if type(id) is int}
    elif isinstance(vocabulary, list):  # of Unigram: each token with its score
        ids = {str(entry[0]): id for id, entry in enumerate(vocabulary) if isinstance(entry, list) and entry}
    for entry in added if isinstance(added, list) else []:
        if isinstance(entry, dict) and isinstance(entry.get("content"), str) and type(entry.get("id")) is int:
            ids[entry["content"]] = entry["id"]
    return ids


def special_token(folder: Path, name: str) -> str | None:
    """Return the token of a role, such as mask_token; None if the files name none. Raises ``model_*``."""
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        if not (folder / file).exists():
            continue
        token = read_json(folder / file, file).get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            return token
    return None
