"""Measure OpenVINO through transformers' interface (optimum-intel)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
from speed_transformers import Generator
from timing import run


def load(request: dict[str, Any]) -> Generator:
    options = {"INFERENCE_NUM_THREADS": str(request["threads"]), "PERFORMANCE_HINT": "LATENCY"}
    return Generator(OVModelForCausalLM.from_pretrained(request["model"], ov_config=options))


def convert(request: dict[str, Any]) -> None:
    """Convert ``source`` to OpenVINO's format at ``model``: 8 bits per channel, or 4 bits in groups of 128."""
    how = {"bits": 4, "group_size": 128, "sym": True, "ratio": 1.0} if request["bits"] == 4 else {"bits": 8}
    model = OVModelForCausalLM.from_pretrained(
        request["source"], export=True, compile=False, quantization_config=OVWeightQuantizationConfig(**how)
    )
    model.save_pretrained(request["model"])


if __name__ == "__main__":
    if sys.argv[1] == "convert":
        convert(json.loads(Path(sys.argv[2]).read_text()))
    else:
        run(("openvino", "optimum-intel", "nncf", "torch"), load)
