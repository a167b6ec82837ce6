"""The registry of proposers, and which methods are refused."""

from __future__ import annotations

import pytest

from aiakq.runtime.speculation.config import SpeculationConfig
from aiakq.runtime.speculation.ngram import NgramProposer
from aiakq.runtime.speculation.proposers import proposer_of
from aiakq.runtime.speculation.suffix import SuffixProposer


def test_a_config_names_its_proposer():
    assert proposer_of(None) is None
    assert isinstance(proposer_of(SpeculationConfig()), NgramProposer)
    assert isinstance(proposer_of(SpeculationConfig(method="suffix")), SuffixProposer)


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_what_needs_a_model_proposes_in_the_executor(method):
    assert proposer_of(SpeculationConfig(method=method, model="a folder")) is None
