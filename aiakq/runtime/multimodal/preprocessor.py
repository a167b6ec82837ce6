"""PromptMedia: media and the tokens of a prompt become ``MediaItem``s. No torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from aiakq.errors import AiakqError
from aiakq.runtime.multimodal.images import refused
from aiakq.runtime.multimodal.processed import Processed
from aiakq.runtime.protocol.media import PLURALS, MediaItem, MediaKind, media_key

if TYPE_CHECKING:
    from aiakq.runtime.config.multimodal import MultimodalConfig
    from aiakq.runtime.text.tokenizer import Tokenizer


#: Largest value that an encoder reads: a hundred times those of pixels that are not rescaled.
_MAX_VALUE = 1e5


class MediaInput(NamedTuple):
    """An image, video or audio of a prompt.

    value  its file, or a video's files; or what is decoded already: an image in RGB, a ``Video``, samples.
    param  its name in errors.
    """

    kind: MediaKind
    value: Any
    param: str


class MediaPreprocessor(ABC):
    """Preprocesses media of one kind, one at a time: what the tensors of an item are does not depend on the others of
    its prompt.

    kind              of the media.
    is_whole          see ``MediaItem``.
    begins_alone      whether an item's text would be tokenized together with text before it.
    token_id          token that stands for an embedding.
    placeholder_id    token of prompts that stands for an item.
    placeholder       its text.
    placeholder_text  the same with the tokens around it, for chat templates that take no parts.
    """

    kind: ClassVar[MediaKind]
    is_whole = False
    begins_alone = False

    def __init__(self, config: MultimodalConfig, tokenizer: Tokenizer, placeholder_id: int | None = None) -> None:
        """placeholder_id: that of ``config`` if not given."""
        self.token_id = config.token_ids[self.kind]
        self.placeholder_id = self.token_id if placeholder_id is None else placeholder_id
        [self.placeholder] = tokenizer.raw_tokens([self.placeholder_id])
        self.placeholder_text = self.placeholder

    @abstractmethod
    def processed(self, media: Any, param: str) -> Processed:
        """Preprocess the ``value`` of a ``MediaInput``; ``param`` is its name in errors. Raises ``media_refused``."""

    def item(self, processed: Processed, ids: Sequence[int], start: int) -> MediaItem:
        """Return the item whose tokens ``ids`` are at ``start`` of the prompt."""
        places: list[tuple[int, int]] = []
        for number, token in enumerate(ids, start):
            if token != self.token_id:
                continue
            if places and sum(places[-1]) == number:
                places[-1] = (places[-1][0], places[-1][1] + 1)
            else:
                places.append((number, 1))
        key, times = media_key(self.kind, processed.hashed), processed.times
        return MediaItem(self.kind, key, places, processed.tensors, processed.grid, self.is_whole, times=times)


class PromptMedia:
    """Puts the media of a model into its prompts.

    placeholders  kind -> text of its placeholder, for chat templates that take no parts.
    failures      kind -> why its items cannot be preprocessed, although the model reads them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        preprocessors: Sequence[MediaPreprocessor],
        failures: Mapping[MediaKind, AiakqError] | None = None,
    ) -> None:
        self._preprocessors = {each.kind: each for each in preprocessors}
        self.placeholders: dict[MediaKind, str] = {each.kind: each.placeholder_text for each in preprocessors}
        self.failures = dict(failures or {})
        self._tokenizer = tokenizer
        self._newlines = Newlines(tokenizer)

    def expanded(
        self, token_ids: Sequence[int], media: Sequence[MediaInput], prompt: str = "prompt"
    ) -> tuple[list[int], tuple[MediaItem, ...]]:
        """Return the tokens of a prompt with each placeholder replaced by the tokens of its item, and the items.

        media   those of each kind in the order of their placeholders.
        prompt  name of the prompt in errors.

        Raises ``media_refused`` for an item that is damaged or too large or that the model does not read, and unless
        there are as many placeholders; and the ``failures`` of the kinds.
        """
        waiting = self._by_placeholder(token_ids, media, prompt)
        ids: list[int] = []
        items = []
        begin = 0
        for at, token in enumerate(token_ids):
            if token not in waiting:
                continue
            ids += token_ids[begin:at]
            begin, (kind, value, param) = at + 1, waiting[token].popleft()
            preprocessor = self._preprocessors[kind]
            processed = _checked(preprocessor.processed(value, param), param)
            text = processed.text
            if preprocessor.begins_alone and ids and not self._newlines.ends_word(ids[-1]):
                raise refused(param, f"text before a {kind} has to end with a line end or a special token")
            if text.endswith("\n"):  # a tokenizer has tokens for several line ends
                text, begin = self._joined(text, ids, token_ids, begin, param)
            own = self._tokenizer.encode(text, False) if text else [preprocessor.token_id] * processed.count
            items.append(preprocessor.item(processed, own, len(ids)))
            ids += own
        return ids + list(token_ids[begin:]), tuple(items)

    def _by_placeholder(
        self, token_ids: Sequence[int], media: Sequence[MediaInput], prompt: str
    ) -> dict[int, deque[MediaInput]]:
        """Return ``media`` by their placeholders. Raises as ``expanded``."""
        waiting: dict[int, deque[MediaInput]] = {each.placeholder_id: deque() for each in self._preprocessors.values()}
        for each in media:
            if each.kind not in self._preprocessors:
                raise self.failures.get(each.kind) or refused(each.param, f"{PLURALS[each.kind]} are not read")
            waiting[self._preprocessors[each.kind].placeholder_id].append(each)
        for kind, one in self._preprocessors.items():
            if one.placeholder_id != one.token_id and one.token_id in token_ids:
                raise refused(prompt, f"it has the token {one.token_id}, which stands for a part of an {kind}")
            given, found = len(waiting[one.placeholder_id]), token_ids.count(one.placeholder_id)
            if given != found:
                reason = f"there are {given} {PLURALS[kind]} for its {found} placeholders {one.placeholder}"
                raise refused(prompt, reason)
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


def _checked(processed: Processed, param: str) -> Processed:
    """Return ``processed``. Raises ``media_refused`` for values that are not finite, or so large that those of the
    encoder may not be, which arguments of the processor may cause.
    """
    for tensor in processed.tensors.values():
        if tensor.dtype == "float32" and tensor.data:
            values = np.frombuffer(tensor.data, "<f4")
            if not (-_MAX_VALUE <= values.min() and values.max() <= _MAX_VALUE):
                raise refused(param, f"its values for the encoder are not within {_MAX_VALUE:g} of 0")
    return processed


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
