"""Runs of a block that are cut short give the same bits as whole ones."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aiakq.quantizers.model.activations import Activations, Call, HiddenStates
from aiakq.quantizers.model.replay import Replay, _copied


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.v_proj, self.o_proj = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.o_proj(torch.tanh(self.v_proj(x))), None


class Mlp(torch.nn.Module):
    def __init__(self, scaled: bool) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
        self.scaled = scaled

    def forward(self, x: Tensor) -> Tensor:
        out = self.down(torch.relu(self.up(x)))
        return out.mul_(2) if self.scaled else out


class Block(torch.nn.Module):
    def __init__(self, scaled: bool) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), Mlp(scaled)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        x = x + self.attention(x)[0]
        return (x + self.mlp(x),)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("spilled", [False, True])
def test_replay_skips_a_module_only_if_its_output_is_that_of_its_last_linear(
    scaled: bool, spilled: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    block = Block(scaled)
    make = torch.Generator().manual_seed(0)
    hidden = HiddenStates([torch.randn(2, 4, 8, generator=make) for _ in range(3)], 0 if spilled else 1e9, tmp_path)
    inputs = Activations(hidden, {(2, 4): [Call((), {})]}, torch.device("cpu"))
    replay = Replay(block, 0, inputs)
    ran: list[str] = []

    def keep(name: str, batch: int) -> Callable[..., None]:
        return lambda module, args: replay.keep(name, batch, args[0])

    with torch.no_grad():
        for batch in range(3):
            handles = [block.get_submodule(name).register_forward_pre_hook(keep(name, batch))
                       for name in ("attention.o_proj", "mlp.down")]  # fmt: skip
            replay.run(batch, run_all=True)
            for handle in handles:
                handle.remove()
        for name in ("attention.o_proj", "mlp.down"):  # rounded since: later runs must see it
            block.get_submodule(name).weight.data.mul_(0.5)
        block.mlp.down.weight.data.mul_(2)
        wanted = [inputs.run(block, 0, batch) for batch in range(3)]
        replay.run(0)  # learns which modules can be cut short
        for name in ("attention.v_proj", "mlp.up"):
            block.get_submodule(name).register_forward_pre_hook(lambda module, args, name=name: ran.append(name))
        block.attention.o_proj.weight.data.mul_(1)
        got = [replay.run(batch) for batch in range(3)]
    assert ran == (["mlp.up"] * 3 if scaled else [])
    if scaled:  # the MLP saw the new attention; nothing of it was cut short
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    ran.clear()
    with torch.no_grad():
        replay.run(0, names=("attention.v_proj",))
        assert ran == (["attention.v_proj", "mlp.up"] if scaled else ["attention.v_proj"])
        ran.clear()
        replay.run(0, run_all=True)
    assert ran == ["attention.v_proj", "mlp.up"]


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "OPTForCausalLM", "GPTNeoXForCausalLM"])
def test_replay_does_not_change_the_output_bytes(
    architecture: str, tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aiakq.quantizers.options import QuantizeOptions
    from aiakq.quantizers.pipeline import quantize_checkpoint

    source = tiny_model(architecture)
    usual: dict[str, Any] = {"samples": 24, "seqlen": 512, "evaluate": False, "device": "cpu", "group_size": 32}

    def weights(name: str) -> bytes:
        quantize_checkpoint(QuantizeOptions(str(source), str(tmp_path / name), "gptq", **usual))
        return (tmp_path / name / "model.safetensors").read_bytes()

    short: list[int] = []
    forward = Replay._linear_forward
    monkeypatch.setattr(Replay, "_linear_forward", lambda self, *args: short.append(args[2]) or forward(self, *args))
    got = weights("short")
    assert short
    monkeypatch.setattr(Replay, "keep", lambda *args: None)
    short.clear()
    assert weights("long") == got
    assert not short


def test_inputs_that_replace_no_module_are_not_kept() -> None:
    torch.manual_seed(0)
    block = Block(scaled=False)
    inputs = Activations([torch.randn(2, 4, 8)], {(2, 4): [Call((), {})]}, torch.device("cpu"))
    replay = Replay(block, 0, inputs)
    names = ("attention.v_proj", "attention.o_proj")
    with torch.no_grad():
        handles = [
            block.get_submodule(name).register_forward_pre_hook(
                lambda module, args, name=name: replay.keep(name, 0, args[0])
            )
            for name in names
        ]
        replay.run(0)
        for handle in handles:
            handle.remove()
        replay.run(0)  # learns that only the output projection ends its module
        replay.run(0)
    assert list(replay._cached_inputs) == ["attention.o_proj"]
    replay.keep("attention.v_proj", 0, torch.zeros(2, 4, 8))
    assert list(replay._cached_inputs) == ["attention.o_proj"]


def test_states_that_are_not_kept_are_absent_and_take_no_memory() -> None:
    hidden = HiddenStates([torch.full((2, 3), float(number)) for number in range(4)])
    copied = hidden.copy()
    copied.keep_only({1, 3})
    assert [copied.has(number) for number in range(4)] == [False, True, False, True]
    assert copied.nbytes * 2 == hidden.nbytes and copied.shapes == hidden.shapes
    assert all(map(hidden.has, range(4)))


def test_tensors_on_a_gpu_stay_there_and_take_no_memory(tmp_path: Path) -> None:
    elsewhere = torch.empty(2, 3, device="meta")
    hidden = HiddenStates([torch.zeros(2, 3)], 24, tmp_path)
    hidden.put(1, elsewhere)
    assert hidden[1] is elsewhere and hidden.bytes_in_memory == 24 and not list(tmp_path.iterdir())
    hidden[1] = torch.ones(2, 3)
    assert torch.equal(hidden[1], torch.ones(2, 3)) and hidden.bytes_in_memory == 24 and len(list(tmp_path.iterdir()))


@pytest.mark.parametrize(("free", "stays"), [(60, True), (59, False)])
def test_inputs_are_cached_on_a_gpu_while_half_of_it_is_free(
    monkeypatch: pytest.MonkeyPatch, free: int, stays: bool
) -> None:
    class OnGpu:
        device, nbytes = torch.device("cuda"), 10

        def clone(self) -> str:
            return "on the GPU"

        def to(self, device: str, copy: bool) -> str:
            return f"on the {device}"

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 100))
    assert _copied(OnGpu()) == ("on the GPU" if stays else "on the cpu")  # type: ignore[arg-type, comparison-overlap]
