"""Layers that several threads of Python call at once, and a recording in one thread beside calls in another."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from aiakq.kernels.cpu import activation, dense, embedding, linear, norm
from aiakq.kernels.cpu.recording import Recording
from aiakq.kernels.types import ActivationProblem, DenseProblem, EmbeddingProblem, NormProblem

F32 = torch.float32


def test_threads_that_share_a_layer_get_their_own_results(native, make_weight):
    weight = make_weight(64, 128, 4, 32)
    table = torch.randn(128, 96)
    layers = {
        "linear": linear.prepare(weight, weight.problem(F32, "cpu", exact=True)),
        "dense": dense.prepare(table, None, DenseProblem(128, 96, F32, F32, "cpu")),
        "norm": norm.prepare(torch.ones(128), None, 1e-5, NormProblem("rms", 128, F32, "cpu")),
        "activation": activation.prepare(ActivationProblem("silu", F32, "cpu")).gated,
    }
    widths = {"linear": 128, "dense": 96, "norm": 128, "activation": 128}
    inputs = {name: [torch.randn(1 + n % 5, widths[name]) for n in range(8)] for name in layers}
    expected = {name: [layer(x) for x in inputs[name]] for name, layer in layers.items()}
    rows = embedding.prepare(table, EmbeddingProblem(F32, F32, "cpu"))

    def work(number: int) -> bool:
        equal = True
        for _ in range(300):
            for name, layer in layers.items():
                equal &= torch.equal(layer(inputs[name][number]), expected[name][number])
            ids = torch.arange(number + 1)
            equal &= torch.equal(rows(ids), table[ids])
        return equal

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_a_recording_takes_only_what_its_own_thread_runs(native):
    layer = norm.prepare(torch.ones(16), None, 1e-5, NormProblem("rms", 16, F32, "cpu"))
    x = torch.randn(2, 16)
    expected = layer(x)
    with ThreadPoolExecutor(1) as pool, Recording() as recording:
        elsewhere = pool.submit(layer, x).result()
        layer(x)
    assert torch.equal(elsewhere, expected)
    assert len(recording.ops) == 1
