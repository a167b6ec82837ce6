"""Reads the files of ColBERT models, of its authors and of PyLate: markers, lengths, projections of token vectors."""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from aiakq.constraints import Constraint
from aiakq.errors import AiakqError, error
from aiakq.formats.model_folder import read_json
from aiakq.runtime.pooling.sentence_transformers import (
    SETTINGS,
    DenseModule,
    check_transformer,
    listed_modules,
    read_dense,
    read_object,
    read_prompts,
)
from aiakq.runtime.pooling.token_names import ids_by_token, special_token
from aiakq.runtime.protocol.late_interaction import LateInteraction
from aiakq.runtime.protocol.text_prompts import TextPrompts

#: Architecture of the files of ColBERT's authors: BERT and a projection ``linear``.
ARCHITECTURE = "HF_ColBERT"
METADATA = "artifact.metadata"
_MASK, _TRANSFORMER = "MultiVectorMask", "sentence_bert_config.json"
_LONGEST = 2**20
_LENGTH = Constraint(type=int, low=4, high=_LONGEST)
_WIDTH = Constraint(type=int, low=1, high=2**16)
_FLAG, _TEXT = Constraint(type=bool), Constraint(type=str)


@dataclass(frozen=True)
class ColBERT:
    """A ColBERT model.

    texts       how it reads queries and documents.
    dense       modules applied to the hidden state of each token.
    projection  number of columns of the layer ``linear`` of the checkpoint; 0: there is none.
    prompts     texts before queries and documents.
    normalize   whether vectors have the length 1.
    """

    texts: LateInteraction
    dense: tuple[DenseModule, ...] = ()
    projection: int = 0
    prompts: TextPrompts = TextPrompts()
    normalize: bool = True


def read_colbert(folder: Path, architecture: str) -> ColBERT | None:
    """Read the ColBERT model in ``folder``; return None for another model.

    Raises ``unsupported`` for settings that are not computed exactly, and ``model_malformed``.
    """
    if (folder / "modules.json").exists():
        modules = listed_modules(folder)
        if [name for name, _ in modules[:2]] != ["Transformer", "Dense"]:
            return None
        settings = read_object(folder, SETTINGS) if (folder / SETTINGS).exists() else {}
        read = _of_sentence_transformers if any(name == _MASK for name, _ in modules) else _of_pylate
        return read(folder, modules, _Settings(SETTINGS, settings))
    if architecture != ARCHITECTURE:
        return None
    if not (folder / METADATA).exists():
        hint = "Its markers and lengths are there; download the file, too."
        raise error("unsupported", what=f"A model of the class {ARCHITECTURE} without {METADATA}", hint=hint)
    return _of_authors(folder, _Settings(METADATA, read_json(folder / METADATA, METADATA)))


@dataclass(frozen=True)
class _Settings:
    """The values of a file."""

    file: str
    values: Mapping[str, Any]

    def read(self, constraint: Constraint, name: str, default: Any) -> Any:
        """Return a value. Raises ``model_malformed``."""
        value = self.values.get(name)
        if value is None:
            return default
        if (refused := constraint.refusal(value)) is not None:
            raise error("model_malformed", file=self.file, reason=f"{name} is {value!r:.64}, not {refused.expected}")
        return value

    def words(self, name: str, default: Iterable[str]) -> list[str]:
        """Return a list of texts. Raises ``model_malformed``."""
        value = self.values.get(name)
        words = list(default) if value is None else value
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise error("model_malformed", file=self.file, reason=f"{name} is no list of texts")
        return words

    def check(self, name: str, *allowed: object) -> None:
        """Raise ``unsupported`` for another value than ``allowed``."""
        if (value := self.values.get(name)) not in (None, *allowed):
            raise _unsupported(f"{name} {value!r:.64}")


def _of_authors(folder: Path, metadata: _Settings) -> ColBERT:
    metadata.check("similarity", "cosine")
    metadata.check("interaction", "colbert")
    punctuation = list(string.punctuation) if metadata.read(_FLAG, "mask_punctuation", True) else []
    texts = _texts(
        folder,
        markers=(
            metadata.read(_TEXT, "query_token_id", "[unused0]"),
            metadata.read(_TEXT, "doc_token_id", "[unused1]"),
        ),
        lengths=(metadata.read(_LENGTH, "query_maxlen", 32), metadata.read(_LENGTH, "doc_maxlen", 220)),
        expands=True,
        is_read=metadata.read(_FLAG, "attend_to_mask_tokens", False),
        skipped=punctuation,
    )
    return ColBERT(texts, projection=metadata.read(_WIDTH, "dim", 128))


def _of_pylate(folder: Path, modules: list[tuple[str, str]], settings: _Settings) -> ColBERT:
    (_, path), *others = modules
    names = [name for name, _ in others]
    if path not in ("", ".") or set(names) != {"Dense"}:
        raise _unsupported(f"the modules Transformer, {', '.join(names)}")
    check_transformer(folder)
    settings.check("similarity_fn_name", "MaxSim", "cosine", "dot")
    prompts = settings.values.get("prompts") or {}
    if not isinstance(prompts, Mapping) or any(prompts.values()):
        raise _unsupported("prompts beside its markers")
    texts = _texts(
        folder,
        markers=(
            settings.read(_TEXT, "query_prefix", "[Q] "),
            settings.read(_TEXT, "document_prefix", "[D] "),
        ),
        lengths=(settings.read(_LENGTH, "query_length", 32), settings.read(_LENGTH, "document_length", 180)),
        expands=settings.read(_FLAG, "do_query_expansion", True),
        is_read=settings.read(_FLAG, "attend_to_expansion_tokens", False),
        skipped=settings.words("skiplist_words", string.punctuation),
    )
    return ColBERT(texts, tuple(read_dense(folder, path, of_tokens=True) for _, path in others))


def _of_sentence_transformers(folder: Path, modules: list[tuple[str, str]], settings: _Settings) -> ColBERT:
    """Read a ``MultiVectorEncoder``."""
    (_, path), *others = modules
    names = [name for name, _ in others]
    behind = [name for name in names if name != "Dense"]
    if path not in ("", ".") or names[-len(behind) :] != behind or behind not in ([_MASK], [_MASK, "Normalize"]):
        raise _unsupported(f"the modules Transformer, {', '.join(names)}")
    check_transformer(folder)
    settings.check("similarity_fn_name", "MaxSim")
    if behind[-1] == "Normalize":
        _module(folder, others[-1][1]).check("module_input_name", "token_embeddings")
    mask = _module(folder, others[len(names) - len(behind)][1])
    mask.check("keep_only_token_ids", [])
    words = mask.words("skiplist_words", [])
    if words:
        mask.check("skiplist_tasks", ["document"], "document")
    stated = read_object(folder, _TRANSFORMER) if (folder / _TRANSFORMER).exists() else {}
    transformer = _Settings(_TRANSFORMER, stated)
    transformer.check("processing_kwargs", {})
    longest_query = transformer.read(_LENGTH, "query_length", _LONGEST)
    longest_document = transformer.read(_LENGTH, "document_length", _LONGEST)
    expansion = _Settings(_TRANSFORMER, transformer.read(Constraint(type=dict), "query_expansion", {}))
    expansion.check("strategy", "fixed", "min")
    filled = expansion.read(_LENGTH, "length", 0)
    if filled:
        is_fixed = expansion.values.get("strategy") == "fixed"
        longest_query = filled if is_fixed else max(longest_query, filled)
    texts = _texts(
        folder,
        markers=("", ""),
        lengths=(longest_query, longest_document),
        expands=bool(filled),
        is_read=expansion.read(_FLAG, "attend", False),
        skipped=words,
        token=expansion.read(_TEXT, "token", ""),
    )
    dense = tuple(read_dense(folder, path, of_tokens=True) for name, path in others if name == "Dense")
    texts = msgspec.structs.replace(texts, filled_length=filled)
    return ColBERT(texts, dense, prompts=read_prompts(folder), normalize="Normalize" in behind)


def _module(folder: Path, path: str) -> _Settings:
    file = f"{path}/config.json"
    return _Settings(file, read_object(folder, file))


def _texts(
    folder: Path,
    markers: tuple[str, str],
    lengths: tuple[int, int],
    expands: bool,
    is_read: bool,
    skipped: list[str],
    token: str = "",
) -> LateInteraction:
    """Return the settings with the ids of tokens. Raises ``unsupported`` for a marker that is no token.

    token  with which queries are filled up; "": the tokenizer's mask token.
    """
    ids = ids_by_token(folder)
    for marker in markers:
        if marker and marker not in ids:
            raise _unsupported(f"the marker {marker!r:.64}, which its tokenizer lacks")
    expansion = None
    if expands:
        mask = token or special_token(folder, "mask_token")
        if mask is None or mask not in ids:
            raise _unsupported("queries that are filled up with a mask token, which its tokenizer lacks")
        expansion = ids[mask]
    query, document = (ids[marker] if marker else None for marker in markers)
    # Words that are no token occur in no text.
    left_out = tuple(ids[word] for word in skipped if word in ids)
    return LateInteraction(query, document, *lengths, expansion, is_read, left_out)


def _unsupported(what: str) -> AiakqError:
    hint = "aiakq computes encoders of PyLate, sentence-transformers and ColBERT's authors."
    return error("unsupported", what=f"A ColBERT model with {what}", hint=hint)
