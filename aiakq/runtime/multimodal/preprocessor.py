"""MediaPreprocessor: media and the tokens of a prompt become ``MediaItem``s. No torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from aiakq.runtime.multimodal.images import refused
from aiakq.runtime.protocol.media import PLURALS, MediaItem, MediaKind, TensorRecord, media_key

if TYPE_CHECKING:
    from aiakq.runtime.config.multimodal import MultimodalConfig
    from aiakq.runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Processed:
    """One item, preprocessed.

    tensors  arguments of the encoder by name.
    text     what takes the place of its placeholder, with a token for each embedding; "" for nothing but ``count`` of
             these tokens.
    grid     see ``MediaItem``.
    """

    tensors: dict[str, TensorRecord]
    text: str = ""
    count: int = 0
    grid: tuple[int, int] | None = None


class MediaPreprocessor(ABC):
    """Preprocesses the media of a model, one at a time: what the tensors of an item are does not depend on the others
    of its prompt.

    kind              of the media.
    is_whole          see ``MediaItem``.
    placeholder       token of prompts that stands for an item.
    placeholder_text  the same with the tokens around it, for chat templates that take no parts.
    """

    kind: ClassVar[MediaKind]
    is_whole = False

    def __init__(self, config: MultimodalConfig, tokenizer: Tokenizer, placeholder_id: int) -> None:
        self._token_id, self._placeholder_id = config.token_id, placeholder_id
        [self.placeholder] = tokenizer.raw_tokens([placeholder_id])
        self.placeholder_text = self.placeholder
        self._tokenizer = tokenizer
        self._newlines = Newlines(tokenizer)

    @abstractmethod
    def _processed(self, media: Any, param: str) -> Processed:
        """Preprocess a file, or what is decoded already; ``param`` is its name in errors. Raises ``media_refused``."""

    def expanded(
        self, token_ids: Sequence[int], media: Sequence[Any], params: Sequence[str], prompt: str = "prompt"
    ) -> tuple[list[int], tuple[MediaItem, ...]]:
        """Return the tokens of a prompt with each placeholder replaced by the tokens of its item, and the items.

        media   files; or images in RGB, or samples.
        params  their names in errors.
        prompt  that of the prompt.

        Raises ``media_refused`` for an item that is damaged or too large or that the model does not read, and unless
        there are as many placeholders.
        """
        found, named = token_ids.count(self._placeholder_id), PLURALS[self.kind]
        if self._placeholder_id != self._token_id and self._token_id in token_ids:
            raise refused(prompt, f"it has the token {self._token_id}, which stands for a part of an {self.kind}")
        if found != len(media):
            raise refused(prompt, f"there are {len(media)} {named} for its {found} placeholders {self.placeholder}")
        ids: list[int] = []
        items = []
        begin = 0
        for each, param in zip(media, params, strict=True):
            at = token_ids.index(self._placeholder_id, begin)
            ids += token_ids[begin:at]
            processed = self._processed(each, param)
            text, begin = processed.text, at + 1
            if text.endswith("\n"):  # a tokenizer has tokens for several line ends
                text, begin = self._joined(text, ids, token_ids, begin, param)
            own = self._tokenizer.encode(text, False) if text else [self._token_id] * processed.count
            key, places = media_key(self.kind, processed.tensors), self._places(own, len(ids))
            items.append(MediaItem(self.kind, key, places, processed.tensors, processed.grid, self.is_whole))
            ids += own
        return ids + list(token_ids[begin:]), tuple(items)

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

    def _places(self, ids: list[int], start: int) -> list[tuple[int, int]]:
        """Return the runs of the token of embeddings in the tokens of an item, which are at ``start`` of the prompt."""
        places: list[tuple[int, int]] = []
        for number, token in enumerate(ids, start):
            if token != self._token_id:
                continue
            if places and sum(places[-1]) == number:
                places[-1] = (places[-1][0], places[-1][1] + 1)
            else:
                places.append((number, 1))
        return places


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
