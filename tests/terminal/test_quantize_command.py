"""``aiakq quantize --recipe``: options of the file, overridden by those of the command line."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from aiakq.quantizers import pipeline


class Stop(Exception):
    pass


def options_of(monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    """The options with which the command calls the quantizers."""
    from aiakq import cli
    from aiakq.terminal.options import add_options

    found = []

    def note(options: Any, *_: Any) -> Any:
        found.append(options)
        raise Stop

    monkeypatch.setattr(pipeline, "quantize_checkpoint", note)
    add_options(["quantize"])
    result = CliRunner().invoke(cli.app, ["quantize", *words])
    assert isinstance(result.exception, Stop), result.output
    return found[0]


def test_the_command_line_overrides_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("quant_type: gptq\nbits: 3\nsamples: 64\nseed: 5\nrounder: {name: gptq, sweeps: 1}\n")
    found = options_of(monkeypatch, "-i", "in", "-o", "out", "--recipe", str(path), "--bits", "4", "--samples", "128")
    assert (found.method, found.bits, found.samples, found.seed) == ("gptq", 4, 128, 5)
    assert found.resolved_recipe.rounder.sweeps == 1
    assert found.recipe == str(path)
