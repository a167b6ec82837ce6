"""The loop over blocks on several workers, as threads: experts, methods from outside, absent batches."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aiakq.formats.checkpoint import Checkpoint
from aiakq.quantizers.block_loop import BlockLoop, Calibration
from aiakq.quantizers.model.source import SourceModel
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.prepared import block_plan
from aiakq.quantizers.recipe import Recipe, Transform
from aiakq.quantizers.rounders.gptq import Gptq
from aiakq.quantizers.rounders.rtn import Rtn
from aiakq.quantizers.workers.protocol import Workers
from aiakq.quantizers.workers.worker_group import FirstWorker
from aiakq.quantizers.writing import results_of

#: transformers replaces functions of torch while it makes a model without weights.
MAKING_MODELS = threading.Lock()


@dataclass(frozen=True)
class Watcher(Transform):
    """A transform that knows nothing of workers: it shows what it saw by changing weights."""

    name = "watcher"

    def apply(self, block: Any, part: Any) -> None:
        seen: dict[str, Tensor] = {}

        def see(name: str) -> Callable[[Tensor], None]:
            def note(x: Tensor) -> None:
                seen[name] = seen.get(name, 0) * 0.5 + x.sum(0)  # depends on the order of batches

            return note

        names = [group[0] for group in part.groups]
        block.inputs.observe({name: see(name) for name in names}, keep=False)
        for name in names:
            block.weight(name)[0] += seen[name] * 1e-3


def run(source: Path, recipe: Recipe, method: str, scratch: Path, workers: Workers) -> dict[str, Tensor]:
    """The codes and scales of every linear of the model at ``source``."""
    checkpoint = Checkpoint.open(source)
    with MAKING_MODELS:
        model = SourceModel(checkpoint, torch.float32, torch.device("cpu"))
    options = QuantizeOptions(str(source), "out", method, group_size=32)
    plan = block_plan(options.spec("", model.other_linears()), torch.float32, model)
    samples = list(torch.randint(3, 250, (96, 64), generator=torch.Generator().manual_seed(0)))
    calibration = Calibration(model, recipe, plan, samples, 1e9, scratch)
    found: dict[str, Tensor] = {}

    class Loop(BlockLoop):
        def _finish(self, block: Any, last: bool) -> None:
            super()._finish(block, last)
            absent = [batch for batch in range(8) if not block.inputs.activations.hidden.has(batch)]
            assert bool(absent) == (self.workers.size > 1)
            for name, weight in block.result.finished.items():
                found[f"{block.index}.{name}.codes"], found[f"{block.index}.{name}.scales"] = (
                    weight.codes,
                    weight.scales,
                )
            found[f"{block.index}.report"] = repr((results_of(block)[0].remarks, block.experts, block.result.warnings))

    Loop(calibration, workers, lambda _: None).run()
    return found


@pytest.mark.parametrize(
    ("architecture", "recipe", "method"),
    [
        ("LlamaForCausalLM", Recipe((Watcher(),), Rtn()), "gptq"),
        ("Qwen2MoeForCausalLM", Recipe((), Gptq()), "gptq"),
        ("Qwen2MoeForCausalLM", Recipe((), Gptq(importance="gradient")), "gptq"),
        ("Qwen2MoeForCausalLM", Recipe((), Gptq(importance="gradient-rows")), "gptq"),
    ],
    ids=["a transform from outside", "experts", "weights of tokens", "factors of rows"],
)
def test_codes_are_those_of_one_worker(
    architecture: str,
    recipe: Recipe,
    method: str,
    tiny_model: Callable[..., Path],
    together: Callable[..., Any],
    tmp_path: Path,
) -> None:
    source = tiny_model(architecture)
    alone = run(source, recipe, method, tmp_path, FirstWorker())
    for found in together(3, lambda workers: run(source, recipe, method, tmp_path, workers)):
        assert found.keys() == alone.keys()
        for name, wanted in alone.items():
            same = found[name] == wanted if isinstance(wanted, str) else torch.equal(found[name], wanted)
            assert same, name
