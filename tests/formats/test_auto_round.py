"""AutoRound's config: layers with widths and groups of their own."""

from __future__ import annotations

from aiakq.formats import quantization_config
from aiakq.spec import LayerSpec

DOWN = "model.layers.0.mlp.down_proj"


def test_autoround_extra_config():
    config = {
        "quant_method": "auto-round",
        "bits": 4,
        "group_size": 32,
        "sym": True,
        "packing_format": "auto_round:auto_gptq",
        "extra_config": {
            "lm_head": {"bits": 8, "group_size": 128},
            DOWN: {"bits": 16, "data_type": "float"},
            r"layers\.1\.mlp\..*": {"bits": 8, "sym": False},
        },
    }
    spec = quantization_config.read({**config, "lm_head": True})
    assert spec.for_layer("lm_head").layer == LayerSpec(8, 128)
    assert spec.for_layer(DOWN) is None
    assert spec.for_layer("model.layers.1.mlp.up_proj").layer == LayerSpec(8, 32, symmetric=False)
    assert spec.for_layer("model.layers.0.mlp.up_proj").layer == LayerSpec(4, 32)
