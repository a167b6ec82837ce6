"""What quantization cost: the output, before it is published, against its source on a text it was not fitted to."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aiakq.errors import error
from aiakq.evaluation.metrics import Comparison, Scorer, compare, windows
from aiakq.formats.checkpoint import Checkpoint
from aiakq.quantizers.calibration.samples import read_documents, tokenize
from aiakq.quantizers.model.activations import HiddenStates
from aiakq.quantizers.model.streamed import StreamedScorer
from aiakq.quantizers.options import QuantizeOptions
from aiakq.runtime.device_memory import free_memory

#: Windows of this many tokens, at most this many of them.
WINDOW = 512
WINDOWS = 64

LoadScorer = Callable[[Path], Scorer]
#: stage, done, total.
OnStage = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Evaluator:
    """Compares folders with the source.

    load      loads a folder for scoring; None for the runtime's own loader, or block by block if memory is short.
    budget    bytes of hidden states held in memory, when block by block.
    """

    options: QuantizeOptions
    source: Path
    tokenizer: Any
    max_positions: int | None
    device: torch.device
    load: LoadScorer | None
    budget: float

    def run(self, folder: Path, scratch: Path, progress: OnStage) -> tuple[Comparison, str]:
        """Perplexity of both, KL divergence and top-1 agreement, and the name of the text. Raises ``evaluation_text``
        and whatever loading the output raises."""
        ids, name = self._ids()
        if self.load is not None:
            scorers: list[Scorer] = [self.load(folder), self.load(self.source)]
        elif self._fits():
            from aiakq.evaluation.scoring import load_for_scoring

            device = self.device.type
            scorers = [load_for_scoring(path, "float32", device) for path in (folder, self.source)]
        else:
            scorers = []
            for title, path in (("output", folder), ("source", self.source)):
                states = HiddenStates((), self.budget / 2, scratch)
                scorer = StreamedScorer(path, self.device, self.options.trust_remote_code, states)
                scorer.prepare(ids, partial(progress, f"evaluate {title}"))
                scorers.append(scorer)
        result = compare(scorers[0], scorers[1], ids, partial(progress, "evaluate"))
        return result, name

    def _fits(self) -> bool:
        """Whether both models fit into half of the free memory in float32."""
        inventory = Checkpoint.open(self.source).inventory
        weights = sum(math.prod(info.shape) for info in inventory.values())
        return 2 * 4 * weights < 0.5 * free_memory(self.device)

    def _ids(self) -> tuple[Tensor, str]:
        """Windows of the text to evaluate on, and its name."""
        if self.tokenizer is None:
            raise error("evaluation_text", reason="the model folder has no tokenizer")
        if self.options.eval_text is not None:
            path = Path(self.options.eval_text)
            documents, name = read_documents(path, self.tokenizer), path.name
        else:
            import aiakq.data

            documents, name = [aiakq.data.text("heldout")], "the bundled held-out text"
        ids = [token for document in tokenize(documents, self.tokenizer) for token in document]
        return windows(ids, min(WINDOW, self.max_positions or WINDOW), WINDOWS), name
