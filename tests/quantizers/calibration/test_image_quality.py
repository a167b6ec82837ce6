"""Calibration with images serves prompts with images: their predictions change less than with text alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.dequantized import open_dequantized
from aiakq.quantizers.calibration.image_samples import ImageSamples, load_image_samples
from aiakq.quantizers.model.activations import HiddenStates
from aiakq.quantizers.model.source import SourceModel
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.tuning.models import Teacher
from tests.vision_models import save_vision_model

#: Of the vocabulary of the models.
VOCABULARY = 320


def save_waves(folder: Path, seeds: range) -> Path:
    """Images of waves in three colours."""
    folder.mkdir()
    for seed in seeds:
        draw = np.random.default_rng(seed)
        y, x = np.mgrid[0:20, 0:30]
        waves = [np.sin(draw.uniform(0.1, 0.6) * x + draw.uniform(0.1, 0.6) * y + draw.uniform(0, 6)) for _ in range(3)]
        Image.fromarray((128 + 90 * np.stack(waves, axis=-1)).astype(np.uint8)).save(folder / f"{seed}.png")
    return folder


def predictions(checkpoint: Any, found: ImageSamples) -> Tensor:
    """Log-probabilities of all samples, [tokens, V] float64."""
    model = SourceModel(checkpoint, torch.float32, torch.device("cpu"))
    model.features = found.features
    teacher = Teacher(model, found.samples, HiddenStates(), lambda done, total: None)
    return torch.cat([teacher.log_probabilities([number])[0].double() for number in range(len(found.samples))])


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl"])
def test_predictions_about_images_are_nearer_than_with_text_alone(kind: str, quantize: Any, tmp_path: Path) -> None:
    folder = save_vision_model(kind, tmp_path / "model")
    pictures, held_out = save_waves(tmp_path / "pictures", range(12)), save_waves(tmp_path / "held", range(100, 108))
    options = QuantizeOptions(str(folder), "out", "gptq", calibration_images=str(held_out), device="cpu", seqlen=256)
    held = load_image_samples(options, Checkpoint.open(folder), VOCABULARY, 8)
    original = predictions(Checkpoint.open(folder), held)
    divergence = {}
    for name, more in (("text", {}), ("images", {"calibration_images": str(pictures)})):
        quantize(folder, tmp_path / name, "gptq", bits=4, samples=24, seqlen=96, sweeps=0, **more)
        quantized = predictions(open_dequantized(tmp_path / name, torch.float32), held)
        divergence[name] = float((original.exp() * (original - quantized)).sum(-1).mean())
    assert divergence["images"] < 0.7 * divergence["text"], divergence
