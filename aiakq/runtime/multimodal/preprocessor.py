"""MediaPreprocessor: media and the tokens of a prompt become ``MediaItem``s. No torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from aiakq.runtime.multimodal.images import refused
from aiakq.runtime.protocol.media import PLURALS, MediaItem, MediaKind, TensorRecord, media_key

if TYPE_CHECKING:
    from aiakq.runtime.config.multimodal import MultimodalConfig
    from aiakq.runtime.text.tokenizer import Tokenizer

#: NumPy's names of dtypes -> those that ``TensorRecord`` has.
_DTYPES = {"float32": "float32", "float64": "float32", "int64": "int64", "int32": "int64", "bool": "bool"}


@dataclass(frozen=True)
class Processed:
    """One item, preprocessed.

    tensors  arguments of the encoder by name.
    text     what takes the place of its placeholder, with a token for each embedding; "" for nothing but ``count`` of
             these tokens.
    grid     see ``MediaItem``.
    times    see ``MediaItem``; they are a part of its key.
    begins_alone  whether its text would be tokenized together with text before it.
    """

    tensors: dict[str, TensorRecord]
    text: str = ""
    count: int = 0
    grid: tuple[int, int] | None = None
    times: list[int] = field(default_factory=list)
    begins_alone: bool = False


class MediaPreprocessor(ABC):
    """Preprocesses the media of a model, one at a time: what the tensors of an item are does not depend on the others
    of its prompt.

    kind              of the media.
    is_whole          see ``MediaItem``.
    placeholder       token of prompts that stands for an item.
    placeholder_texts  by kind, the same with the tokens around it, for chat templates that take no parts.
    """

    kind: ClassVar[MediaKind]
    is_whole = False

    def __init__(self, config: MultimodalConfig, tokenizer: Tokenizer, placeholder_id: int) -> None:
        self._token_id, self._placeholder_id = config.token_id, placeholder_id
        [self.placeholder] = tokenizer.raw_tokens([placeholder_id])
        self.placeholder_texts = {str(self.kind): self.placeholder}
        # Kind of an item -> its placeholder, and the token for a part of it.
        self._tokens: dict[MediaKind, tuple[int, int]] = {self.kind: (placeholder_id, config.token_id)}
        self._tokenizer = tokenizer
        self._newlines = Newlines(tokenizer)

    @abstractmethod
    def _processed(self, media: Any, param: str) -> Processed:
        """Preprocess a file, or what is decoded already; ``param`` is its name in errors. Raises ``media_refused``."""

    def kind_of(self, media: Any) -> MediaKind:
        """Return what ``media`` are."""
        return self.kind

    def expanded(
        self, token_ids: Sequence[int], media: Sequence[Any], params: Sequence[str], prompt: str = "prompt"
    ) -> tuple[list[int], tuple[MediaItem, ...]]:
        """Return the tokens of a prompt with each placeholder replaced by the tokens of its item, and the items.

        media   files; or images in RGB, videos, or samples; those of each kind in the order of their placeholders.
        params  their names in errors.
        prompt  that of the prompt.

        Raises ``media_refused`` for an item that is damaged or too large or that the model does not read, and unless
        there are as many placeholders.
        """
        waiting = self._by_placeholder(token_ids, media, params, prompt)
        ids: list[int] = []
        items = []
        begin = 0
        for at, token in enumerate(token_ids):
            if token not in waiting:
                continue
            ids += token_ids[begin:at]
            each, param = waiting[token].popleft()
            processed, kind, begin = self._processed(each, param), self.kind_of(each), at + 1
            text, (_, token_id) = processed.text, self._tokens[kind]
            if processed.begins_alone and ids and not self._newlines.ends_word(ids[-1]):
                raise refused(param, f"text before a {kind} has to end with a line end or a special token")
            if text.endswith("\n"):  # a tokenizer has tokens for several line ends
                text, begin = self._joined(text, ids, token_ids, begin, param)
            own = self._tokenizer.encode(text, False) if text else [token_id] * processed.count
            hashed = processed.tensors | ({"times": record(np.array(processed.times))} if processed.times else {})
            key, places = media_key(kind, hashed), _places(token_id, own, len(ids))
            grid, times = processed.grid, processed.times
            items.append(MediaItem(kind, key, places, processed.tensors, grid, self.is_whole, times=times))
            ids += own
        return ids + list(token_ids[begin:]), tuple(items)

    def _by_placeholder(
        self, token_ids: Sequence[int], media: Sequence[Any], params: Sequence[str], prompt: str
    ) -> dict[int, deque[tuple[Any, str]]]:
        """Return ``media`` and their names by their placeholders. Raises as ``expanded``."""
        waiting: dict[int, deque[tuple[Any, str]]] = {token: deque() for token, _ in self._tokens.values()}
        for each, param in zip(media, params, strict=True):
            kind = self.kind_of(each)
            if kind not in self._tokens:
                raise refused(param, f"{PLURALS[kind]} are not read")
            waiting[self._tokens[kind][0]].append((each, param))
        for kind, (placeholder, token) in self._tokens.items():
            found, given = token_ids.count(placeholder), len(waiting[placeholder])
            if placeholder != token and token in token_ids:
                raise refused(prompt, f"it has the token {token}, which stands for a part of an {kind}")
            if found != given:
                [named] = self._tokenizer.raw_tokens([placeholder])
                raise refused(prompt, f"there are {given} {PLURALS[kind]} for its {found} placeholders {named}")
        return waiting

    def _joined(self, text: str, ids: list[int], token_ids: Sequence[int], begin: int, param: str) -> tuple[str, int]:
        """Return the text of an image with the line ends around it, which are removed from ``ids``, and the first token
        behind these: transformers' processor tokenizes all of them together.

        Raises ``media_refused`` if ``text`` begins with a word that could be the end of another one.
        """
        if not text.startswith("\n") and ids and not self._newlines.ends_word(ids[-1]):
            raise refused(param, "with pan and scan, an image has to begin a line")
        before = after = 0
        while text.startswith("\n") and ids and (count := self._newlines.count(ids[-1])):
            before += count
            ids.pop()
        while begin < len(token_ids) and (count := self._newlines.count(token_ids[begin])):
            after += count
            begin += 1
        return "\n" * before + text + "\n" * after, begin


def _places(token_id: int, ids: list[int], start: int) -> list[tuple[int, int]]:
    """Return the runs of the token of embeddings in the tokens of an item, which are at ``start`` of the prompt."""
    places: list[tuple[int, int]] = []
    for number, token in enumerate(ids, start):
        if token != token_id:
            continue
        if places and sum(places[-1]) == number:
            places[-1] = (places[-1][0], places[-1][1] + 1)
        else:
            places.append((number, 1))
    return places


def record(array: Any) -> TensorRecord:
    """Return an array of NumPy as a ``TensorRecord``."""
    found = np.asarray(array)
    dtype = _DTYPES[found.dtype.name]
    converted = np.ascontiguousarray(found.astype(dtype, copy=False))
    return TensorRecord(dtype, list(converted.shape), converted.tobytes())


class Newlines:
    """Which tokens are line ends."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._counts: dict[int, int] = {}

    def count(self, token: int) -> int:
        """Return the number of line ends that ``token`` consists of; 0 for any other token."""
        found = self._counts.get(token)
        if found is None:
            text = self._tokenizer.decode([token], skip_special_tokens=False)
            found = self._counts[token] = len(text) if text.strip("\n") == "" else 0
        return found

    def ends_word(self, token: int) -> bool:
        """Whether no word of text goes on behind ``token``."""
        return self.count(token) > 0 or token in self._tokenizer.special_ids
