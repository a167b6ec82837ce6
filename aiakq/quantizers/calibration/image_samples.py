"""Calibration samples with images: their tokens, and the embeddings that the model's encoder gives the images."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from aiakq.data.files import MAX_BYTES, bad, read_text
from aiakq.data.messages import sound
from aiakq.errors import AiakqError, error
from aiakq.quantizers.calibration.image_features import ImageFeatures, ImageKind
from aiakq.quantizers.calibration.token_ids import check_tokenized
from aiakq.system.files import lines_of, read_named

if TYPE_CHECKING:
    from aiakq.formats.checkpoint import Checkpoint
    from aiakq.quantizers.options import QuantizeOptions
    from aiakq.runtime.config.engine import EngineConfig

#: What a user asks about images that come without a text.
_QUESTION = "Describe this image in detail."
_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".webp")
_HINT = 'Give a folder of images, or JSON lines like {"image": "a.jpg", "text": "What is this?", "answer": "A cat."}.'


@dataclass(frozen=True)
class ImageSamples:
    """Samples of conversations about images.

    samples     ids, each [T] int64 with T at most seqlen. Those of tokens are below the size V of the vocabulary; V + r
                stands for row r of ``features``.
    features    embeddings of all images, of which it has R.
    num_images  how many images that are.
    source      name of the data in reports.
    """

    samples: list[Tensor]
    features: ImageFeatures
    num_images: int
    source: str

    @property
    def digest(self) -> bytes:
        """Return the sha256 of the embeddings and their places."""
        state = hashlib.sha256()
        for tensor in self.features.tensors:
            state.update(tensor.numpy().tobytes())
        return state.digest()


@dataclass(frozen=True)
class _Row:
    where: str
    image: Path
    text: str
    answer: str

    def read(self) -> bytes:
        """Return the file of the image. Raises ``calibration``."""
        return read_named(self.image, MAX_BYTES, lambda reason: bad(self.where, reason, _HINT))


def load_image_samples(options: QuantizeOptions, checkpoint: Checkpoint, vocab_size: int, count: int) -> ImageSamples:
    """Return up to ``count`` samples with an image each, chosen by the seed and the files, not by their order.

    checkpoint  the model, whose encoder computes the embeddings in float32, as it does when it is served in that.

    Raises ``calibration`` for data that cannot be used, ``option_conflict`` for a model whose images are not computed
    here, and what loading its encoder raises.
    """
    from aiakq.runtime.multimodal.encoder import load_encoder
    from aiakq.runtime.multimodal.preprocessor import MediaInput, PromptMedia
    from aiakq.runtime.multimodal.processor import ImagePreprocessor
    from aiakq.runtime.text.tokenizer import Tokenizer

    given, source = Path(str(options.calibration_images)), checkpoint.path
    config = _checked_config(options, checkpoint)
    assert config.multimodal is not None
    rows = sorted(_rows(given), key=lambda row: _rank(row, options.seed))[:count]
    if not rows:
        raise bad(given.name, "it holds no image", _HINT)
    tokenizer = Tokenizer.load(source, options.trust_remote_code)
    preprocessor = ImagePreprocessor.load(config.multimodal, tokenizer)
    prompts = PromptMedia(tokenizer, [preprocessor])
    encoder = load_encoder(config)
    samples: list[Tensor] = []
    features: list[Tensor] = []
    places: list[Tensor] = []
    begin = vocab_size
    for row in rows:
        prompt = _prompt(tokenizer, preprocessor.placeholder, row)
        try:
            ids, [item] = prompts.expanded(prompt, [MediaInput("image", row.read(), row.where)], row.where)
        except AiakqError as problem:
            raise bad(row.where, str(problem.message).rstrip("."), _HINT) from None
        check_tokenized([[token for token in ids if token != preprocessor.token_id]], vocab_size)
        features.append(encoder(item).float().cpu())
        if item.grid is not None:
            places.append(torch.cartesian_prod(*map(torch.arange, item.grid)))
        sample, done = torch.tensor(ids, dtype=torch.int64), 0
        for first, length in item.places:
            sample[first : first + length] = torch.arange(begin + done, begin + done + length)
            done += length
        begin += done
        samples.append(sample[: options.seqlen].clone())
    kind: ImageKind = "grid" if places else "whole" if config.multimodal.whole_tokens else "plain"
    found = ImageFeatures(torch.cat(features, dim=1), vocab_size, kind, torch.cat(places) if places else None)
    return ImageSamples(samples, found, len(samples), f"{len(samples)} images of {given.name}")


def _checked_config(options: QuantizeOptions, checkpoint: Checkpoint) -> EngineConfig:
    """Return how the model is served. Raises ``option_conflict`` if its images cannot be computed here."""
    from aiakq.runtime.config.engine import EngineConfig
    from aiakq.runtime.config.text_part import has_text_part
    from aiakq.runtime.multimodal.encoder_files import encoder_refusal

    def refuse(reason: str) -> AiakqError:
        given, hint = "--calibration-images", "Leave it away: calibration on text works."
        return error("option_conflict", option=given, other=options.input, reason=reason, hint=hint)

    if not has_text_part(checkpoint.config):
        raise refuse("the model reads text only")
    device = "cpu" if options.device == "auto" else options.device.partition(",")[0].partition(":")[0]
    arguments = {"model": str(checkpoint.path), "dtype": "float32", "device": device}
    config = EngineConfig.from_args(arguments | {"trust_remote_code": options.trust_remote_code})
    multimodal = config.multimodal
    if multimodal is None or multimodal.kind != "image":
        raise refuse("the model reads no images")
    if refusal := multimodal.refusals.get("image") or encoder_refusal(config):
        raise refuse(refusal)
    return config


def _prompt(tokenizer: object, image_token: str, row: _Row) -> list[int]:
    """Return the tokens of a conversation about an image, with a placeholder for it."""
    from aiakq.runtime.text.tokenizer import Tokenizer

    assert isinstance(tokenizer, Tokenizer)
    if not tokenizer.has_chat_template:
        return tokenizer.encode(" ".join(filter(None, (image_token, row.text, row.answer))))
    parts = [{"type": "image", "image": "data:,"}, {"type": "text", "text": row.text}]
    messages: list[dict[str, object]] = [{"role": "user", "content": parts}]
    if row.answer:
        messages.append({"role": "assistant", "content": row.answer})
    prompt = tokenizer.chat_prompt(messages, add_generation_prompt=not row.answer, placeholders={"image": image_token})
    return tokenizer.encode(prompt, add_special_tokens=False)


def _rows(given: Path) -> Iterator[_Row]:
    """Yield the images of a folder, or of JSON lines whose files are relative to theirs. Raises ``calibration``."""
    if given.is_dir():
        for path in sorted(given.iterdir()):
            if path.suffix.lower() in _SUFFIXES:
                yield _Row(path.name, path, _QUESTION, "")
        return
    for number, line in enumerate(lines_of(read_text(given, _HINT)), 1):
        if line.strip():
            yield _row(line, f"{given.name}, line {number}", given.parent)


def _row(line: str, where: str, folder: Path) -> _Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise bad(where, "it is no JSON", _HINT) from None
    if not isinstance(row, dict) or not isinstance(row.get("image"), str):
        raise bad(where, "it names no image", _HINT)
    if unknown := row.keys() - {"image", "text", "answer"}:
        raise bad(where, f"it has {sorted(unknown)[0]!r:.80}", _HINT)
    texts = [row.get("text") or _QUESTION, row.get("answer") or ""]
    if not all(isinstance(text, str) for text in texts):
        raise bad(where, "its text or answer is no text", _HINT)
    for text in texts:
        sound(text, where, "its text or answer")
    image = folder / row["image"]
    if not os.path.isfile(image):
        raise bad(where, f"there is no file {row['image']:.200}", _HINT)
    return _Row(where, image, *texts)


def _rank(row: _Row, seed: int) -> bytes:
    """Return the sort key of a row: pseudo-random, and independent of the order and the names of the files."""
    content = hashlib.sha256(row.read()).digest()
    return hashlib.sha256(f"{seed} {json.dumps([row.text, row.answer])}".encode() + content).digest()
