"""The engine's own time for draft tokens is measured with real draft tokens, by every kind of proposer."""

from __future__ import annotations

import pytest
from scheduler_configs import scheduler_config

from aiakq.runtime.speculation import bookkeeping_costs
from aiakq.runtime.speculation.config import SpeculationConfig


@pytest.mark.parametrize("method", ["ngram", "suffix", "draft_model"])
def test_every_other_step_has_rejected_draft_tokens(method, monkeypatch):
    seen = []
    inner = bookkeeping_costs._Sampled.collect

    def collect(self):
        result = inner(self)
        seen.extend(
            (len(chunk.drafts), chunk.drafts[:1] == [found.sampled[0].token])
            for chunk, found in zip(self._chunks, result.chunks, strict=True)
        )
        return result

    monkeypatch.setattr(bookkeeping_costs._Sampled, "collect", collect)
    model = "folder" if method == "draft_model" else None
    config = scheduler_config(speculation=SpeculationConfig(method=method, model=model))
    step, drafts = bookkeeping_costs.measure_bookkeeping(config)
    assert step > 0 and drafts >= 0
    assert sum(count > 0 for count, _ in seen) >= 10, "with draft tokens"
    assert sum(count == 0 for count, _ in seen) >= 30, "without"
    assert not any(is_accepted for _, is_accepted in seen)
