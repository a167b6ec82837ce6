"""Calibration samples: sequences of token ids from files, data sets or the bundled text.

Nothing is padded or dropped: long texts and long samples are cut into pieces of ``seqlen``. The choice of pieces
depends on the seed and on the content of the data, not on the order of its lines.
"""

from __future__ import annotations

import hashlib
import json
import re
import statistics
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aiakq.data.documents import HINT, Document, bad, read_dataset, read_file, read_text, sources
from aiakq.data.tokens import render_documents, tokenize
from aiakq.errors import AiakqError
from aiakq.formats.model_folder import check_files
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.paths import TOKENS_HINT, is_path
from aiakq.runtime.text.tokenizer import Tokenizer, is_panic
from aiakq.runtime.text.tokenizer_files import why_unreadable

_SPLIT = re.compile(r"[,\s]+")
#: Characters read per requested token; a token is about four, so that there is a choice.
_CHARACTERS = 16


@dataclass
class Samples:
    """The calibration samples of a model.

    samples  token ids, each [T] int64 with T at most seqlen.
    source   name of the data in reports.
    """

    samples: list[Tensor]
    source: str
    warnings: list[str] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(len(sample) for sample in self.samples)

    @property
    def digest(self) -> str:
        """Return the sha256 of all samples, which identifies them in the output's metadata."""
        state = hashlib.sha256()
        for sample in self.samples:
            state.update(len(sample).to_bytes(8, "little"))
            state.update(sample.numpy().tobytes())
        return state.hexdigest()

    @property
    def lengths(self) -> tuple[int, int, int]:
        """Return the number of tokens of the shortest, the median and the longest sample."""
        sizes = sorted(len(sample) for sample in self.samples)
        return sizes[0], statistics.median_low(sizes), sizes[-1]


def load_samples(options: QuantizeOptions, tokenizer: Any, vocab_size: int) -> Samples:
    """Load the calibration samples that the options specify.

    ``tokenizer`` is a transformers tokenizer, or None if the model folder has none (then only ids work). Raises
    ``calibration`` for anything unusable in the data, with the line.
    """
    if options.token_ids is not None:
        path = Path(options.token_ids)
        source = f"token ids of {path.name}"
        lines = sorted(read_token_ids(path, vocab_size), key=lambda ids: _rank(json.dumps(ids), options.seed))
        pieces = [piece for ids in lines for piece in _cut(ids, options.seqlen)]
        chosen = pick(pieces, options.samples, options.seed)
    else:
        if tokenizer is None:
            raise bad("in words", "the model folder has no tokenizer", "Give token ids with -token FILE.")
        chosen, names = [], sources(options.calibration)
        for number, name in enumerate(names):
            share = options.samples // len(names) + (number < options.samples % len(names))
            if share:
                chosen += _from_texts(name, replace(options, samples=share), tokenizer, vocab_size)
        source = " and ".join("the bundled text" if name is None else title_of(name) for name in names)
    if not chosen:
        raise bad(source, "it holds no token", TOKENS_HINT if options.token_ids is not None else HINT)
    samples = Samples([torch.tensor(sample, dtype=torch.int64) for sample in chosen], source)
    wanted = options.samples * options.seqlen
    if samples.tokens < wanted // 2:
        samples.warnings.append(
            f"Calibration has {samples.tokens} tokens in {len(chosen)} samples of {source}; {wanted} "
            f"({options.samples} x {options.seqlen}) were asked for. Few tokens make poor statistics."
        )
    return samples


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> Any:
    """The folder's tokenizer as transformers loads it, or None if it has none. Raises ``model_malformed``."""
    import transformers

    check_files(folder)

    if not any(
        (folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
    ):
        return None
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
        Tokenizer(tokenizer).check_growth()
        return tokenizer
    except AiakqError:
        raise
    except BaseException as problem:
        if not isinstance(problem, Exception) and not is_panic(problem):
            raise
        # Tokenizer code may raise anything; the model itself may still work with token ids.
        raise why_unreadable(folder, problem) from problem


# --- token ids --------------------------------------------------------------------------------------------------------


def read_token_ids(path: Path, vocab_size: int) -> list[list[int]]:
    """Read samples from a file of token ids, detecting its format.

    Lines of integers separated by commas or white space, each optionally in brackets, ``#`` starting a comment; or a
    JSON list of lists; or JSON lines, each a list or an object with ``input_ids``. Raises ``calibration``.
    """
    text = read_text(path, TOKENS_HINT)
    whole = _as_json(text) if text.lstrip().startswith("[") else None
    samples: list[list[int]] = []
    if whole is not None and isinstance(whole, list) and any(isinstance(item, list) for item in whole):
        for number, item in enumerate(whole, 1):
            samples.append(_ids(item, f"sample {number}", path, vocab_size))
    else:
        for number, line in enumerate(text.splitlines(), 1):
            content = line.strip()
            if not content.startswith("{"):
                content = content.partition("#")[0].strip()
            if content:
                samples.append(_ids(_line(content, number, path), f"line {number}", path, vocab_size))
    samples = [sample for sample in samples if sample]
    if not samples:
        raise bad(path.name, "it holds no sample", TOKENS_HINT)
    return samples


def _line(content: str, number: int, path: Path) -> Any:
    if content.startswith("{"):
        value = _as_json(content)
        if not isinstance(value, dict) or not isinstance(value.get("input_ids"), list):
            raise bad(path.name, f"line {number} is no JSON object with a list 'input_ids'", TOKENS_HINT)
        return value["input_ids"]
    if content.startswith("["):
        content = content[1:].rstrip(", ").removesuffix("]")
    words = [word for word in _SPLIT.split(content) if word]
    for word in words:
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", word):
            raise bad(path.name, f"line {number} holds {word[:40]!r}, which is no integer", TOKENS_HINT)
    return [int(word) for word in words]


def _ids(value: Any, where: str, path: Path, vocab_size: int) -> list[int]:
    if not isinstance(value, list):
        raise bad(path.name, f"{where} is no list of ids", TOKENS_HINT)
    for item in value:
        if type(item) is not int:
            raise bad(path.name, f"{where} holds {str(item)[:40]!r}, which is no integer", TOKENS_HINT)
        if not 0 <= item < vocab_size:
            raise bad(
                path.name,
                f"{where} holds the id {item}, outside 0..{vocab_size - 1}",
                "Make the ids with this model's own tokenizer.",
            )
    return value


def _as_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


# --- text -------------------------------------------------------------------------------------------------------------


def title_of(name: str) -> str:
    """Return the name of a source for reports, without local folder names."""
    folder, colon, split = name.rpartition(":")
    if colon and Path(folder).is_dir():
        return f"{Path(folder).name}:{split}"
    return Path(name).name if Path(name).exists() else name


def _from_texts(name: str | None, options: QuantizeOptions, tokenizer: Any, vocab_size: int) -> list[list[int]]:
    """Return selected windows of one source."""
    start = _bos(tokenizer)
    wanted = options.samples * options.seqlen * _CHARACTERS
    documents = _documents(name, wanted, options.seed)
    ranks = [_rank(document.text or json.dumps(document.messages), options.seed) for document in documents]
    enough: list[int] = []
    for number in sorted(range(len(documents)), key=ranks.__getitem__):
        if wanted <= 0:
            break
        enough.append(number)
        wanted -= documents[number].size
    # Rendered in file order, so that an error names the first offending line.
    inside = sorted(enough)
    title = "text" if name is None else title_of(name)
    rendered = dict(
        zip(inside, render_documents([documents[number] for number in inside], tokenizer, title), strict=True)
    )
    texts = [rendered[number] for number in enough]
    # The template writes the start of a text, and so does every window.
    again = getattr(tokenizer, "bos_token", None) or "" if start else ""
    ids = tokenize([text.removeprefix(again) for text in texts], tokenizer)
    _check_ids(ids, vocab_size)
    return _windows(ids, options, start)


def _documents(name: str | None, characters: int, seed: int) -> list[Document]:
    """Read the documents of a source; of a data set about as many characters as needed."""
    if name is None:
        import aiakq.data

        return [Document("it", aiakq.data.text("calibration"))]
    path = Path(name)
    if path.is_file():
        return list(read_file(path))
    if not path.is_dir() and is_path(name):
        raise bad(name, "there is no such file")
    return list(read_dataset(name, characters, seed))


def _rank(content: str, seed: int) -> bytes:
    """Return the sort key of a document: pseudo-random and independent of the order of documents."""
    return hashlib.sha256(f"{seed} {content}".encode("utf-8", "surrogatepass")).digest()


def _bos(tokenizer: Any) -> list[int]:
    """Return the tokens that this tokenizer puts before a text, which models expect at the start of a window."""
    ids = tokenizer("", verbose=False)["input_ids"]
    return ids[:1] if ids and ids[0] == tokenizer.bos_token_id else []


def _check_ids(documents: list[list[int]], vocab_size: int) -> None:
    highest = max((max(ids) for ids in documents if ids), default=0)
    if highest >= vocab_size:
        reason = f"the tokenizer made the id {highest}, outside 0..{vocab_size - 1}"
        raise bad("text", reason, "The tokenizer does not belong to this model.")


# --- choosing ---------------------------------------------------------------------------------------------------------


def _windows(documents: list[list[int]], options: QuantizeOptions, bos: list[int]) -> list[list[int]]:
    """Return selected windows of at most seqlen tokens, each starting with the tokens in ``bos``."""
    body = options.seqlen - len(bos)
    joined: list[int] = []
    for ids in documents:
        joined.extend(ids)
    pieces = _cut(joined, body)
    # The last, shorter piece is only used if there is nothing else.
    whole = [piece for piece in pieces if len(piece) == body] or pieces
    return [bos + piece for piece in pick(whole, options.samples, options.seed)]


def _cut(ids: list[int], length: int) -> list[list[int]]:
    return [ids[start : start + length] for start in range(0, len(ids), length)]


def pick(pieces: list[list[int]], count: int, seed: int) -> list[list[int]]:
    """Select ``count`` pieces by ``seed``, in their original order; all of them if there are fewer."""
    if len(pieces) <= count:
        return pieces
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(pieces), generator=generator)[:count]
    return [pieces[index] for index in sorted(chosen.tolist())]
