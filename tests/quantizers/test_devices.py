"""Several devices: each takes its share of the calibration batches, and the output is the same."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from aiakq.errors import AiakqError
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.pipeline import quantize_checkpoint


@pytest.mark.parametrize(
    ("method", "importance"),
    [("weight_only_int8", None), ("smooth_quant", None), ("awq", None), ("gptq", None), ("gptq", "gradient")],
)
def test_two_devices_give_the_same_bytes(
    method: str, importance: str | None, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """The processor counts as two devices here: copies of the block, threads and the order of results are real."""
    source = tiny_model("LlamaForCausalLM")
    ids = tmp_path / "ids.txt"
    rows = torch.randint(3, 250, (96, 128), generator=torch.Generator().manual_seed(0)).tolist()
    ids.write_text("\n".join(" ".join(map(str, row)) for row in rows))
    for name, device in (("one", "cpu"), ("two", "cpu,cpu")):
        options = QuantizeOptions(
            str(source), str(tmp_path / name), method, group_size=32 if method in ("awq", "gptq") else None,
            token_ids=ids, evaluate=False, device=device, importance=importance,
        )  # fmt: skip
        quantize_checkpoint(options)
    one, two = (tmp_path / name / "model.safetensors" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()


def test_an_absent_device_is_refused(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    for device in ("cpu,nowhere", "nowhere", "cpu,"):
        with pytest.raises(AiakqError) as caught:
            options = QuantizeOptions(str(tiny_model("LlamaForCausalLM")), str(tmp_path / "o"), "gptq", device=device)
            quantize_checkpoint(options)
        assert caught.value.id == "device"
