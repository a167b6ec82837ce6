"""Models whose blocks cannot run one by one are refused by name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from aiakq.errors import AiakqError
from aiakq.formats.checkpoint import Checkpoint
from aiakq.quantizers.model.skeleton import skeleton


def test_blocks_that_share_weights_are_refused(tiny_model: Callable[..., Path]) -> None:
    with pytest.raises(AiakqError, match="Zamba2ForCausalLM block by block, of which some share their weights"):
        skeleton(Checkpoint.open(tiny_model("Zamba2ForCausalLM")), False, {}, tied=True)


def test_a_model_type_that_transformers_lacks_has_the_class_that_computes_it(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MiMo's files name code of their own, which is not run."""
    from transformers import CONFIG_MAPPING

    source = tiny_model("MiMoForCausalLM")
    shutil.copy(source / "model.safetensors", tmp_path)
    config = json.loads((source / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "configuration_mimo.MiMoConfig"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.delitem(CONFIG_MAPPING._extra_content, "mimo")
    model = skeleton(Checkpoint.open(tmp_path), False, {}, tied=False)
    assert type(model).__name__ == "MiMoForCausalLM" and model.model.layers[0].self_attn.q_proj.bias is not None


def test_blocks_that_share_an_index_are_refused(tiny_model: Callable[..., Path]) -> None:
    with pytest.raises(
        AiakqError, match="GlmMoeDsaForCausalLM block by block, of which some share the index"
    ) as caught:
        skeleton(Checkpoint.open(tiny_model("GlmMoeDsaForCausalLM")), False, {}, tied=False)
    assert caught.value.id == "unsupported"
    own = tiny_model("GlmMoeDsaForCausalLM", indexer_types=["full"] * 3)
    skeleton(Checkpoint.open(own), False, {}, tied=False)
