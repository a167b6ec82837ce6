"""Calibration samples: sequences of token ids from files, data sets or the bundled text.

Nothing is padded, and only padding and empty rows are left out: long texts and long samples are cut into pieces of
``seqlen``. The choice of pieces depends on the seed and on the content of the data, not on the order of its lines.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aiakq.data.documents import read_dataset, read_file, sources
from aiakq.data.files import HINT, bad
from aiakq.data.rows import Document, RowOptions
from aiakq.data.tokens import render_documents, tokenize
from aiakq.evaluation.wording import counted
from aiakq.quantizers.calibration.image_samples import ImageSamples, load_image_samples
from aiakq.quantizers.calibration.model_tokenizer import load_tokenizer
from aiakq.quantizers.calibration.padding import PaddingIds, parts
from aiakq.quantizers.calibration.token_ids import check_tokenized, read_token_file, read_token_ids
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.paths import TOKENS_HINT, is_path

__all__ = ["Samples", "load_image_samples", "load_samples", "load_tokenizer", "pick", "read_token_ids", "title_of"]

#: Characters read per requested token; a token is about four, so that there is a choice.
_CHARACTERS = 16


@dataclass
class Samples:
    """The calibration samples of a model.

    samples  token ids, each [T] int64 with T at most seqlen.
    source   name of the data in reports.
    images   samples with images, which are among ``samples``; their ids may be above the vocabulary.
    """

    samples: list[Tensor]
    source: str
    warnings: list[str] = field(default_factory=list)
    images: ImageSamples | None = None

    def with_images(self, images: ImageSamples) -> Samples:
        """Return the samples with those of ``images`` before them."""
        source = f"{images.source} and {self.source}" if self.samples else images.source
        return Samples([*images.samples, *self.samples], source, self.warnings, images)

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
        if self.images is not None:
            state.update(self.images.digest)
        return state.hexdigest()

    @property
    def lengths(self) -> tuple[int, int, int]:
        """Return the number of tokens of the shortest, the median and the longest sample."""
        sizes = sorted(len(sample) for sample in self.samples)
        return sizes[0], statistics.median_low(sizes), sizes[-1]


def load_samples(
    options: QuantizeOptions, tokenizer: object, vocab_size: int, pad_token_id: int | None = None
) -> Samples:
    """Load the calibration samples that the options specify.

    tokenizer     a transformers tokenizer, or None if the model folder has none (then only ids work).
    pad_token_id  the id of padding in the model's config, if any.
    Raises ``calibration`` for anything unusable in the data, with the line.
    """
    warnings: list[str] = []
    if options.token_ids is not None:
        path = Path(options.token_ids)
        source = f"token ids of {path.name}"
        padding = PaddingIds.of(tokenizer, pad_token_id)
        found = read_token_file(path, vocab_size, padding)
        warnings += found.warnings(path.name, padding)
        lines = sorted(found.samples, key=lambda ids: _rank(json.dumps(ids), options.seed))
        pieces = [piece for ids in lines for piece in _cut(ids, options.seqlen)]
        chosen = pick(pieces, options.samples, options.seed)
    else:
        if tokenizer is None:
            raise bad("in words", "the model folder has no tokenizer", "Give token ids with -token FILE.")
        chosen, names = [], sources(options.calibration)
        for number, name in enumerate(names):
            share = options.samples // len(names) + (number < options.samples % len(names))
            if share:
                chosen += _from_texts(name, replace(options, samples=share), tokenizer, vocab_size, warnings)
        source = " and ".join("the bundled text" if name is None else title_of(name) for name in names)
    if not chosen:
        raise bad(source, "it holds no token", TOKENS_HINT if options.token_ids is not None else HINT)
    samples = Samples([torch.tensor(sample, dtype=torch.int64) for sample in chosen], source, warnings)
    wanted = options.samples * options.seqlen
    if samples.tokens < wanted // 2:
        samples.warnings.append(
            f"Calibration has {counted(samples.tokens, 'token')} in {counted(len(chosen), 'sample')} of {source}; "
            f"{wanted:,} ({options.samples} x {options.seqlen}) were asked for. Few tokens make poor statistics."
        )
    return samples


# --- text -------------------------------------------------------------------------------------------------------------


def title_of(name: str) -> str:
    """Return the name of a source for reports, without local folder names."""
    folder, colon, split = name.rpartition(":")
    if colon and Path(folder).is_dir():
        return f"{Path(folder).name}:{split}"
    return Path(name).name if Path(name).exists() else name


def _from_texts(
    name: str | None, options: QuantizeOptions, tokenizer: object, vocab_size: int, warnings: list[str]
) -> list[list[int]]:
    """Return selected windows of one source; sentences about rows that were left out are added to ``warnings``."""
    start = _bos(tokenizer)
    wanted = options.samples * options.seqlen * _CHARACTERS
    rows = RowOptions(options.calibration_column)
    documents = _documents(name, wanted, options.seed, rows)
    title = "text" if name is None else title_of(name)
    if rows.num_rows and not documents:
        raise bad(title, f"none of its {rows.num_rows} rows has a text", HINT)
    warnings += rows.warnings(title)
    ranks = [_rank(document.text or json.dumps(document.messages), options.seed) for document in documents]
    enough: list[int] = []
    for number in sorted(range(len(documents)), key=ranks.__getitem__):
        if wanted <= 0:
            break
        enough.append(number)
        wanted -= documents[number].size
    # Rendered in file order, so that an error names the first offending line.
    inside = sorted(enough)
    rendered = dict(
        zip(inside, render_documents([documents[number] for number in inside], tokenizer, title), strict=True)
    )
    texts = [rendered[number] for number in enough]
    # The template writes the start of a text, and so does every window.
    again = getattr(tokenizer, "bos_token", None) or "" if start else ""
    ids = tokenize([text.removeprefix(again) for text in texts], tokenizer)
    check_tokenized(ids, vocab_size)
    return _windows(_without_padding(ids, PaddingIds.of(tokenizer), title, warnings), options, start)


def _without_padding(
    documents: list[list[int]], padding: PaddingIds, title: str, warnings: list[str]
) -> list[list[int]]:
    """Return documents without long runs of the padding id, as in texts that were decoded with their padding."""
    kept = [[token for part in parts(ids, padding) for token in part] for ids in documents]
    if lost := sum(map(len, documents)) - sum(map(len, kept)):
        warnings.append(f"{lost} tokens of {title} were left out as padding: runs of the id {padding.pad}.")
    return kept


def _documents(name: str | None, characters: int, seed: int, rows: RowOptions) -> list[Document]:
    """Read the documents of a source; of a data set about as many characters as needed."""
    if name is None:
        import aiakq.data

        return [Document("it", aiakq.data.text("calibration"))]
    path = Path(name)
    if path.is_file():
        return list(read_file(path, rows))
    if not path.is_dir() and is_path(name):
        raise bad(name, "there is no such file")
    return list(read_dataset(name, characters, seed, rows))


def _rank(content: str, seed: int) -> bytes:
    """Return the sort key of a document: pseudo-random and independent of the order of documents."""
    return hashlib.sha256(f"{seed} {content}".encode("utf-8", "surrogatepass")).digest()


def _bos(tokenizer: Any) -> list[int]:
    """Return the tokens that this tokenizer puts before a text, which models expect at the start of a window."""
    ids = tokenizer("", verbose=False)["input_ids"]
    return ids[:1] if ids and ids[0] == tokenizer.bos_token_id else []


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
