"""DraftHead: a decoder layer that proposes draft tokens from hidden states of a target model.

At position i it reads the hidden state of the target model there and the token at i + 1, and predicts the token at
i + 2. Behind the last hidden state it reads its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from aiakq.runtime.models.decoder import Decoder
from aiakq.runtime.models.interface import ModelInput, StageOutput


@dataclass(kw_only=True)
class DraftHead(Decoder):
    """The head as a model of one layer, as ``HeadProposer`` runs it. ``compute`` also adds the head's own hidden states
    [R, hidden], which it reads at the next position, to ``ModelInput.aux_hidden_states``.
    """

    @property
    def takes_hidden(self) -> bool:
        """True: it reads the target model's."""
        return True

    def fuse(self, aux_hidden_states: list[Tensor]) -> Tensor:
        """Hidden states [T, target hidden] of the target model's layers -> [T, hidden], for ``stage_input``."""
        raise NotImplementedError

    def stage_input(self, step: ModelInput, states: Tensor) -> StageOutput:
        """``ModelInput.hidden`` of ``step`` from hidden states [T, hidden], the target model's or its own."""
        return StageOutput(states, None)

    def whole_vocabulary(self, logits: Tensor, vocab_size: int) -> Tensor:
        """Logits [R, V] of the head as those [R, vocab_size] float32 of the target model's tokens."""
        return logits.float()


def plain(x: object) -> Tensor:
    """Return x [T, D], which an operation returned that was given no layout."""
    assert isinstance(x, Tensor)
    return x
