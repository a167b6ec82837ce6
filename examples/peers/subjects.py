"""The models of ``make quality``: each with calibration samples and the windows that its checkpoints are scored on."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from dialogues import dialogues
from model_shapes import RECIPES

from aiakq.data.tokens import read_documents, tokenize
from aiakq.evaluation import metrics
from aiakq.quantizers.calibration import samples as calibration

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE, HELDOUT = ROOT / "examples" / "tinybooks", ROOT / "examples" / "heldout.txt"
BUNDLED = ROOT / "aiakq" / "data" / "calibration.txt"
#: The models that examples/training/train_models.py trains.
TRAINED = Path(os.environ.get("MODELS", ROOT / "out" / "models")).resolve()
WINDOW, WINDOWS = 512, 64
#: Calibration samples, tokens in each, and the seeds that select them from the text.
SAMPLES, SEQLEN, SEEDS = 128, 256, {"s0": 0, "s1": 1}


@dataclass(frozen=True)
class Subject:
    """A model to quantize.

    calibrations  sampling -> a JSON file of lists of token ids, all of one length.
    windows       [W, T] int64, of text that it was not trained on.
    """

    key: str
    folder: Path
    calibrations: dict[str, Path]
    windows: torch.Tensor

    @cached_property
    def digest(self) -> str:
        """A hash of the config and the weights."""
        state = hashlib.sha256()
        for path in [self.folder / "config.json", *sorted(self.folder.glob("*.safetensors"))]:
            with path.open("rb") as file:
                state.update(hashlib.file_digest(file, "sha256").digest())
        return state.hexdigest()


def folders(real: list[Path]) -> dict[str, Path]:
    """The folders of all models by key: the example model, the trained ones, and those of ``real`` by name."""
    known = {"books": EXAMPLE, **{name: TRAINED / name for name in RECIPES}}
    return {**known, **{folder.resolve().name: folder.resolve() for folder in real}}


def train_missing(keys: Iterable[str]) -> None:
    """Train those of the models that have to be trained and are not."""
    missing = [name for name in RECIPES if name in keys and not (TRAINED / name / "training.json").is_file()]
    if missing:
        script = ROOT / "examples" / "training" / "train_models.py"
        words = [sys.executable, str(script), "--out", str(TRAINED), "--only", *missing]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


def load_subject(key: str, folder: Path, out: Path) -> Subject:
    """A model with samples of the bundled text and windows of the held-out book, or of the dialogues in both."""
    in_turns = key in RECIPES and RECIPES[key].dialogues
    tokenizer: Any = calibration.load_tokenizer(folder)
    ids = token_ids(BUNDLED, tokenizer, in_turns)
    pieces = torch.tensor(ids[: len(ids) // SEQLEN * SEQLEN]).view(-1, SEQLEN)
    calibrations = {}
    for name, seed in SEEDS.items():
        order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(seed))
        calibrations[name] = out / "calibration" / f"{key}-{name}.json"
        _write(calibrations[name], json.dumps(pieces[order[:SAMPLES]].tolist()))
    return Subject(key, folder, calibrations, metrics.windows(token_ids(HELDOUT, tokenizer, in_turns), WINDOW, WINDOWS))


def token_ids(file: Path, tokenizer: Any, in_turns: bool) -> list[int]:
    """The ids of a text, or of the dialogues in it, rendered with the chat template."""
    texts = read_documents(file)
    if in_turns:
        turns = dialogues("\n".join(texts))
        texts = ["".join(tokenizer.apply_chat_template(dialogue, tokenize=False) for dialogue in turns)]
    return [token for ids in tokenize(texts, tokenizer) for token in ids]


def _write(file: Path, text: str) -> None:
    if not file.is_file() or file.read_text() != text:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
