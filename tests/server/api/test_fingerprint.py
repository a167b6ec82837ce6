"""The fingerprint of a served model."""

from __future__ import annotations

from aiakq.server.api.fingerprint import fingerprint


def test_fingerprints_tell_models_apart(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    same = fingerprint("a", tmp_path, "float32")
    assert same == fingerprint("a", tmp_path, "float32")
    others = [fingerprint("b", tmp_path, "float32"), fingerprint("a", tmp_path, "bfloat16")]
    (tmp_path / "config.json").write_text("{ }")
    others.append(fingerprint("a", tmp_path, "float32"))
    assert len({same, *others}) == 4
