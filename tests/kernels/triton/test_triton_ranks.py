"""Shares of a layer that ranks compute have the bits of the whole layer: programs divide sums as for the whole one.

On a GPU the place of a row or a column within a tile does not matter. Triton's interpreter multiplies tiles by numpy,
where it does; there, shares are such that everything keeps its place.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from aiakq import LLM, SamplingParams
from aiakq.kernels.ops.sharded import head_shares
from aiakq.kernels.selection import BACKENDS
from aiakq.kernels.triton import attention, configs, latent_attention, linear
from aiakq.kernels.types import AttentionContext, AttentionSpec, QWeight
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.pipeline import quantize_checkpoint
from aiakq.runtime.distributed import child_ranks, starting


def some_weight(n: int, k: int, group: int) -> QWeight:
    return QWeight(
        "w4a16",
        torch.randint(0, 16, (n, k), dtype=torch.uint8),
        ((torch.rand(n, k // group) + 0.5) * torch.randn(n, k // group).sign()).half(),
        torch.randint(0, 16, (n, k // group), dtype=torch.uint8),
        torch.randperm(k),
        torch.randn(n),
        group,
    )


@pytest.mark.parametrize("m", [1, 5, 20, 40])
def test_rows_of_a_linear_layer(m, device, request):
    if device.type == "cpu" and m > 32:  # one program fills the only multiprocessor of the interpreter's GPU
        known = configs.gpu(device)
        request.addfinalizer(lambda: configs.assume(known))
        configs.assume(known._replace(processors=2))
    whole = some_weight(256, 2048, 64).to(device)
    x = torch.randn(m, 2048, device=device).half()
    wanted = linear.prepare(whole, whole.problem(x.dtype, device.type, uncut_n=256))(x)
    splits = set()
    shares = ((0, 64), (64, 160), (160, 256)) if device.type == "cuda" else ((0, 128), (128, 256))
    for first, end in shares:
        share = whole.with_rows(torch.arange(first, end, device=device))
        layer = linear.prepare(share, share.problem(x.dtype, device.type, uncut_n=256))
        assert torch.equal(layer(x), wanted[:, first:end])
        splits.add(linear.choose(linear.prepare(share, share.problem(x.dtype, device.type)), m).split)
    if device.type == "cpu" and "KERNEL_PTX" not in os.environ:  # a GPU of one multiprocessor
        assert splits != {linear.choose(layer, m).split}, "a share by itself is divided in another way"


def test_torch_multiplies_no_share(device):
    """What it computes of an output depends on how many others there are."""
    whole = some_weight(64, 128, 64).to(device)
    alone = linear.prepare(whole, whole.problem(torch.float16, device.type))
    share = linear.prepare(whole, whole.problem(torch.float16, device.type, uncut_n=256))
    assert linear.choose(alone, 5000).dense and not linear.choose(share, 5000).dense


@pytest.fixture
def by_programs(monkeypatch) -> None:
    """Parts of sequences as on a GPU: fewer where there are more programs."""
    for module in (attention, latent_attention):
        monkeypatch.setattr(module, "num_splits", lambda device, sequences, heads, share: -(-12 // heads))


LENGTHS = [(40, 1), (7, 1), (0, 33), (50, 6)]


def case(heads: int, kv_heads: int, size: int, device: torch.device):
    """Queries, keys as the whole cache, and the context of sequences of (cached, new) tokens."""
    counts = [-(-sum(pair) // 16) for pair in LENGTHS]
    pages = (torch.arange(sum(counts)) + 1).split(counts)
    starts = [0, *torch.tensor([new for _, new in LENGTHS]).cumsum(0).tolist()]
    lengths = [sum(pair) for pair in LENGTHS]
    context = AttentionContext(
        torch.tensor(starts, dtype=torch.int32, device=device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        torch.empty(0, dtype=torch.int64, device=device),
        torch.nn.utils.rnn.pad_sequence(list(pages), batch_first=True).to(torch.int32).to(device),
        2,
        starts,
        lengths,
    )
    query = torch.randn(starts[-1], heads, size, device=device).half()
    cache = torch.randn(2, sum(counts) + 1, 16, kv_heads, size, device=device).half()
    return query, cache, context


def attended(spec, query, cache, context):
    out = torch.empty(*query.shape[:2], spec.value_dim, dtype=query.dtype, device=query.device)
    module = latent_attention if spec.latent else attention
    for function in (module.decode, module.prefill):
        function(query.contiguous(), out, [each.contiguous() for each in cache], replace(context, plans={}), spec)
    return out


def check(found, wanted, same_places):
    """The same bits; where rows have other places in their tile, only on a GPU."""
    if found.is_cuda or same_places:
        assert torch.equal(found, wanted)
    else:
        assert torch.allclose(found, wanted, atol=1e-3)


@pytest.mark.parametrize("heads, kv_heads, ranks", [(4, 2, 2), (8, 2, 4), (6, 3, 2), (4, 4, 3)])
def test_heads_of_attention(heads, kv_heads, ranks, device, by_programs):
    query, cache, context = case(heads, kv_heads, 32, device)
    spec = AttentionSpec(heads, kv_heads, 32, 32**-0.5, sliding_window=20)
    wanted, group = attended(spec, query, cache, context), heads // kv_heads
    bounds = head_shares(heads, kv_heads, ranks)
    for first, end in zip(bounds, bounds[1:], strict=False):
        kv_first, kv_count = first // group, max(1, (end - first) // group)
        local = replace(spec, num_heads=end - first, num_kv_heads=kv_count)
        assert local.uncut_heads == (heads, kv_heads)
        own = cache[:, :, :, kv_first : kv_first + kv_count]
        found = attended(local, query[:, first:end], own, context)
        check(found, wanted[:, first:end], same_places=(end - first) % group == 0)


def test_heads_of_attention_over_latents(device, by_programs):
    query, cache, context = case(5, 1, 48, device)
    spec = AttentionSpec(5, 1, 48, 0.2, value_dim=32, latent=True)
    wanted = attended(spec, query, cache[:1], context)
    for first, end in ((0, 3), (3, 5)):
        local = replace(spec, num_heads=end - first)
        found = attended(local, query[:, first:end], cache[:1], context)
        check(found, wanted[:, first:end], same_places=first == 0)


@pytest.mark.skipif(configs.gpu(torch.device("cpu"))[1] != 1 or torch.cuda.is_available(), reason="for the interpreter")
def test_two_processes_give_the_bits_of_one(tiny_model, tmp_path, monkeypatch):
    """A quantized model whose kernels, in ranks that communicate through torch.distributed, are Triton's."""
    out, ids = tmp_path / "out", tmp_path / "ids.txt"
    ids.write_text("\n".join(" ".join(str(3 + (7 * row + at) % 300) for at in range(32)) for row in range(8)))
    model = tiny_model("LlamaForCausalLM", tie_word_embeddings=True)
    quantize_checkpoint(
        QuantizeOptions(str(model), str(out), "gptq", token_ids=ids, seqlen=32, group_size=32, evaluate=False)
    )
    monkeypatch.setenv("AIAKQ_KERNELS", "triton,triton-fp8,triton-floats,triton-w8a8")
    monkeypatch.setitem(BACKENDS, "cpu", BACKENDS["cuda"])
    start = "from aiakq.runtime.build.rank_process import main; main()"
    patch = "from aiakq.kernels.selection import BACKENDS; BACKENDS['cpu'] = BACKENDS['cuda']"
    monkeypatch.setattr(child_ranks, "_CODE", f"{patch}\n{start}")
    monkeypatch.setattr(starting, "transport_of", lambda config: "torch")

    def answers(size: int):
        llm = LLM(str(out), dtype="float16", device="cpu", max_model_len=64, tensor_parallel_size=size)
        assert "triton" in llm.engine.facts["linear layers"] and "triton" in llm.engine.facts["attention"]
        prompts = [{"prompt_token_ids": list(range(start, start + length))} for start, length in ((3, 1), (10, 9))]
        params = SamplingParams(temperature=0, max_tokens=3, logprobs=5)
        found = llm.generate(prompts, params, use_tqdm=False)
        return [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in found]

    assert answers(2) == answers(1)
