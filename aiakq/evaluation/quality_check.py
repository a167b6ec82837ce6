"""Compares a quantized checkpoint with its source on a text that it was not calibrated on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from aiakq.errors import error
from aiakq.evaluation.metrics import Comparison, LoadScorer, Scorer, compare
from aiakq.evaluation.streamed import BlockwiseModel, StreamedScorer
from aiakq.evaluation.text import WINDOW, EvaluationText, load_texts
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.dequantized import dequantized
from aiakq.runtime.device_memory import free_memory

#: ``(folder, scratch folder for hidden states)`` -> the model, which runs block by block.
OpenBlockwise = Callable[[Path, Path], BlockwiseModel]
#: ``(stage, done, total)``
OnStage = Callable[[str, int, int], None]


@dataclass(frozen=True)
class QualityCheck:
    """Compares model folders with their source.

    sources         texts to predict, as ``load_texts`` reads them.
    tokenizer       the source's transformers tokenizer, or None if it has none.
    vocab_size      vocabulary size of the source.
    max_positions   maximum sequence length of the model, if limited.
    open_blockwise  opens a folder to run block by block, if the two models do not fit into memory.
    load            loads a folder; the runtime's own loader if None.
    blockwise       whether to always run block by block, because the source is not only its folder.
    """

    source: Path
    sources: Sequence[str]
    tokenizer: object
    vocab_size: int
    max_positions: int | None
    device: torch.device
    open_blockwise: OpenBlockwise
    load: LoadScorer | None = None
    blockwise: bool = False

    def run(self, folder: Path, scratch: Path, progress: OnStage) -> list[tuple[EvaluationText, Comparison]]:
        """Return each text with the comparison of ``folder`` with the source on it.

        Raises ``evaluation_text``, and the errors of loading the two models.
        """
        if self.tokenizer is None:
            raise error("evaluation_text", reason="the model folder has no tokenizer")
        length = min(WINDOW, self.max_positions or WINDOW)
        texts = load_texts(self.sources, self.tokenizer, length, self.vocab_size)
        if self.load is not None and not self.blockwise:
            loaded: list[Scorer] = [self.load(folder), self.load(self.source)]
        elif self._fits():
            from aiakq.evaluation.scoring import load_for_scoring

            loaded = [load_for_scoring(path, "float32", self.device.type) for path in (folder, self.source)]
        else:
            loaded = []
        results = []
        for text in texts:
            scorers = loaded or self._streamed(folder, scratch, text, progress)
            results.append((text, compare(scorers[0], scorers[1], text.windows, partial(progress, "evaluate"))))
        return results

    def _streamed(self, folder: Path, scratch: Path, text: EvaluationText, progress: OnStage) -> list[Scorer]:
        """Return both models, run block by block on a text."""
        scorers: list[Scorer] = []
        for title, path in (("output", folder), ("source", self.source)):
            scorer = StreamedScorer(self.open_blockwise(path, scratch))
            scorer.prepare(text.windows, partial(progress, f"evaluate {title}"))
            scorers.append(scorer)
        return scorers

    def _fits(self) -> bool:
        """Whether both models may be loaded: in float32 they fit into half of the free memory."""
        if self.blockwise:
            return False
        inventory = dequantized(Checkpoint.open(self.source), torch.float32).inventory
        return fits_whole(sum(math.prod(info.shape) for info in inventory.values()), self.device)


def fits_whole(weights: int, device: torch.device) -> bool:
    """Whether two models of so many weights in float32 fit into half of the free memory."""
    return 2 * 4 * weights < 0.5 * free_memory(device)
