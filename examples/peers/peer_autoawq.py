"""AutoAWQ: AWQ on a CPU. ``config`` in the request goes to its quant_config."""

from __future__ import annotations

from typing import Any

import job
import torch
from awq import AutoAWQForCausalLM
from awq.quantize.quantizer import AwqQuantizer
from transformers import AutoTokenizer


class OnCpu(AwqQuantizer):
    """AutoAWQ whose search restores the original weights also on a CPU.

    It restores them from ``state_dict()`` moved to the CPU. On a CPU that is not a copy, so nothing is restored, each
    candidate is applied on top of the previous one, and the error of the checkpoint is three times that of RTN. Here
    it is a copy, as with a GPU.
    """

    def _compute_best_scale(
        self, x: Any, w_mean: Any, x_mean: Any, module2inspect: Any, *others: Any, **more: Any
    ) -> Any:
        original = module2inspect.state_dict
        module2inspect.state_dict = lambda: {name: tensor.clone() for name, tensor in original().items()}
        try:
            return super()._compute_best_scale(x, w_mean, x_mean, module2inspect, *others, **more)
        finally:
            del module2inspect.state_dict


def quantize(request: dict[str, Any]) -> None:
    samples = job.calibration(request)
    # It warns that only float16 may work: bfloat16 is too coarse for its packing, and float16 is slow on a CPU.
    model = AutoAWQForCausalLM.from_pretrained(request["model"], device_map="cpu", torch_dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(request["model"])
    model.quantize(
        tokenizer,
        quant_config=request["config"],
        calib_data=samples,
        max_calib_samples=len(samples),
        max_calib_seq_len=max(map(len, samples)),
        quantizer_cls=OnCpu,
    )
    model.save_quantized(request["output"])
    tokenizer.save_pretrained(request["output"])


if __name__ == "__main__":
    job.run(("autoawq", "torch", "transformers"), quantize)
