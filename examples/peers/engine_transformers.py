"""Generate greedily from token ids with transformers; see check_elsewhere.py."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # see peer_gptqmodel.py

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AwqConfig, GPTQConfig


@torch.inference_mode()
def main() -> None:
    """``engine_transformers.py REQUEST RESULT``, both JSON."""
    request = json.loads(Path(sys.argv[1]).read_text())
    how = {"dtype": getattr(torch, request["dtype"]), "device_map": "cpu"}
    stored = getattr(AutoConfig.from_pretrained(request["model"]), "quantization_config", None) or {}
    # gptqmodel's default CPU kernels compute in bfloat16 for every dtype of the model.
    if stored.get("quant_method") == "gptq":
        how["quantization_config"] = GPTQConfig(bits=stored["bits"], backend="gptq_torch")
    elif stored.get("quant_method") == "awq":
        how["quantization_config"] = AwqConfig(backend="torch_awq")
        compute_awq_in_the_inputs_dtype()
    model = AutoModelForCausalLM.from_pretrained(request["model"], **how).eval()
    # All prompts have the same length. The whole text is recomputed for every token, so that only the model takes part.
    ids, scores = torch.tensor(request["prompts"]), []
    for _ in range(request["max_tokens"]):
        logits = model(ids, use_cache=False).logits[:, -1].float()
        token = logits.argmax(-1, keepdim=True)
        scores.append(torch.log_softmax(logits, -1).gather(-1, token))
        ids = torch.cat([ids, token], dim=1)
    answer = {"tokens": ids[:, -len(scores) :].tolist(), "logprobs": torch.cat(scores, dim=1).tolist()}
    versions = {name: importlib.metadata.version(name) for name in ("transformers", "gptqmodel", "compressed-tensors")}
    Path(sys.argv[2]).write_text(json.dumps({**answer, "versions": versions}))


def compute_awq_in_the_inputs_dtype() -> None:
    """gptqmodel's plain AWQ layer converts float32 to float16; use its unpacking with a product in float32."""
    from gptqmodel.nn_modules.qlinear import torch_awq

    def forward(self: torch_awq.AwqTorchLinear, x: torch.Tensor) -> torch.Tensor:
        weight = torch_awq.dequantize_gemm(
            qweight=self.qweight,
            qzeros=self.qzeros,
            scales=self.scales.to(x.dtype),
            bits=self.bits,
            group_size=self.group_size,
        )
        out = x @ weight.to(x.dtype)
        return out if self.bias is None else out + self.bias.to(x.dtype)

    torch_awq.AwqTorchLinear.forward = forward


if __name__ == "__main__":
    main()
