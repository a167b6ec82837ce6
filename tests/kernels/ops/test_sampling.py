"""Samplers of other packages: one that does not fit is refused when it is loaded."""

from __future__ import annotations

import sys

import pytest
import torch

from aiakq.kernels.ops import Ops, sampling
from aiakq.kernels.registry import PluginError
from aiakq.kernels.selection import Implementations


@pytest.fixture
def install(tmp_path, monkeypatch):
    """``install(text)`` installs a package whose module with this text is the only sampler besides the reference."""

    def install(text: str) -> None:
        info = tmp_path / "zoo-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: zoo\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text("[aiakq.implementations.sampling]\nzebra = zoo_sampling\n")
        (tmp_path / "zoo_sampling.py").write_text("from aiakq.kernels.ops.sampling import *\n" + text)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(
            sampling, "IMPLEMENTATIONS", Implementations("sampling", {"torch": "aiakq.kernels.ops.sampling"})
        )
        monkeypatch.delitem(sys.modules, "zoo_sampling", raising=False)

    return install


OLD = """
class Old:
    def __call__(self, raw, rows, modified=None, masks=None):
        return None

def prepare(problem):
    return Old()
"""
OLD_RESULTS = """
class Old(TorchSampler):
    def __call__(self, *given):
        self.collect = lambda: [super(Old, self).__call__(*given).collect()]
        return self

def prepare(problem):
    return Old(8)
"""


@pytest.mark.parametrize(
    ("text", "reason"), [(OLD, "too many positional arguments"), (OLD_RESULTS, "collect.. returned list")]
)
def test_a_sampler_with_another_interface_is_refused_by_name(text, reason, install):
    install(text)
    pattern = (
        rf"^'zebra' \(aiakq.implementations.sampling\) of the package zoo 1.2 .*uniforms.*SampleResults; .*{reason}"
    )
    with pytest.raises(PluginError, match=pattern):
        Ops(torch.device("cpu"), torch.float32).sampler()


def test_a_sampler_that_fits_is_used(install):
    install("def prepare(problem):\n    return TorchSampler(8)\n")
    sampler = Ops(torch.device("cpu"), torch.float32).sampler()
    assert sampler(torch.eye(3), [sampling.SampleRow()] * 3).collect().tokens == [0, 1, 2]
