"""Measure prompt lookup decoding of llama-cpp-python on given texts, alternating with and without draft tokens."""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding


class Counted(LlamaPromptLookupDecoding):
    """Counts its draft tokens."""

    num_drafts = 0

    def __call__(self, input_ids: Any, /, **keywords: Any) -> Any:
        """The draft tokens."""
        found = super().__call__(input_ids, **keywords)
        self.num_drafts += len(found)
        return found


class Forced(llama_cpp.Llama):
    """Computes and samples as usual, but replaces the sampled token with that of ``text``."""

    text: list[int]

    def sample(self, *args: Any, idx: int | None = None, **keywords: Any) -> int:
        """Return the token of the text after position ``idx``."""
        super().sample(*args, idx=idx, **keywords)
        assert idx is not None
        return self.text[idx + 1] if idx + 1 < len(self.text) else 0


def main() -> None:
    """``lookup_llamacpp.py REQUEST RESULT``. The request: ``model`` (a GGUF file), ``threads``, ``texts`` of token ids,
    ``prompt`` (their first tokens), ``num_pred_tokens`` (a list) and ``repeats``.
    """
    request = json.loads(Path(sys.argv[1]).read_text())
    model = Forced(
        request["model"], n_ctx=512, n_threads=request["threads"], n_threads_batch=request["threads"],
        logits_all=True, verbose=False,
    )  # fmt: skip

    def run(text: list[int], draft: Counted | None) -> tuple[float, int]:
        """Return the seconds per token after the first one, and the evaluations of the model."""
        model.text, model.draft_model = text, draft
        model.reset()
        evaluations, inner = 0, model.eval

        def evaluate(tokens: Any) -> None:
            nonlocal evaluations
            evaluations += 1
            inner(tokens)

        model.eval = evaluate
        generated = model.generate(text[: request["prompt"]], temp=0.0)
        next(generated)
        started, count = time.perf_counter(), len(text) - request["prompt"] - 1
        for expected in text[request["prompt"] + 1 :]:
            assert next(generated) == expected
        took = time.perf_counter() - started
        del model.eval
        return took / count, evaluations - 1

    rows = []
    for tokens in request["num_pred_tokens"]:
        times: dict[bool, list[float]] = {True: [], False: []}
        steps = 0
        for number in range(request["repeats"]):
            for with_drafts in (True, False) if number % 2 else (False, True):
                draft = Counted(num_pred_tokens=tokens) if with_drafts else None
                took = [run(text, draft) for text in request["texts"]]
                times[with_drafts].append(statistics.fmean(seconds for seconds, _ in took))
                steps = sum(count for _, count in took) if with_drafts else steps
        num_tokens = sum(len(text) - request["prompt"] - 1 for text in request["texts"])
        ratios = [plain / drafting for drafting, plain in zip(times[True], times[False], strict=True)]
        rows.append(
            {
                "num_pred_tokens": tokens,
                "without_tok_s": 1 / statistics.median(times[False]),
                "with_tok_s": 1 / statistics.median(times[True]),
                "speedup": statistics.median(ratios),
                "speedups": ratios,
                "tokens_per_step": num_tokens / steps,
            }
        )
    Path(sys.argv[2]).write_text(json.dumps({"version": llama_cpp.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
