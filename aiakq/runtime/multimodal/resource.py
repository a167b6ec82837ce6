"""EncoderCache: which images have embeddings in the executor. The scheduler's part of images."""

from __future__ import annotations

from collections import Counter, OrderedDict

from aiakq.runtime.engine.resources import Resource
from aiakq.runtime.engine.sequence import Sequence
from aiakq.runtime.protocol.command import DropMedia, ExecutorCommand
from aiakq.runtime.protocol.media import MediaItem


class EncoderCache(Resource):
    """Images by key, of which the executor encodes each once, when a step first needs it.

    An image stays while sequences with it run, and then until others need its place, least recently used first. A
    preempted sequence starts again with the images that are still there.

    max_embeddings  tokens of all images together.
    """

    def __init__(self, max_embeddings: int) -> None:
        self.max_embeddings = max_embeddings
        self._users: Counter[str] = Counter()  # running sequences, by key
        self._sizes: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self._dropped: list[str] = []

    def admits(self, sequence: Sequence) -> bool:
        items = sequence.spec.media
        if not items:
            return True
        in_use = {key: self._sizes[key] for key in self._users}
        return sum((in_use | _sizes(items)).values()) <= self.max_embeddings or not in_use

    def acquire(self, sequence: Sequence) -> None:
        items = sequence.spec.media
        if not items:
            return
        for key, size in _sizes(items).items():
            self._users[key] += 1
            self._sizes[key] = size
            self._sizes.move_to_end(key)
        excess = sum(self._sizes.values()) - self.max_embeddings
        for key in [key for key in self._sizes if key not in self._users]:
            if excess <= 0:
                break
            excess -= self._sizes.pop(key)
            self._dropped.append(key)

    def release(self, sequence: Sequence) -> None:
        for key in _sizes(sequence.spec.media):
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]

    def commands(self) -> list[ExecutorCommand]:
        # Only those that no sequence has needed since: a batch applies its commands first.
        dropped = [key for key in self._dropped if key not in self._sizes]
        self._dropped = []
        return [DropMedia(dropped)] if dropped else []

    def check(self) -> None:
        assert self._users.keys() <= self._sizes.keys(), "an image of a running sequence is not counted"
        assert all(count > 0 for count in self._users.values())


def _sizes(items: tuple[MediaItem, ...]) -> dict[str, int]:
    """Return the tokens of each different image."""
    return {item.key: item.num_embeddings for item in items}
