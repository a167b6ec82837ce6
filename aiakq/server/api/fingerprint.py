"""The system_fingerprint of responses: equal for equal models, dtypes and versions."""

from __future__ import annotations

import hashlib
from pathlib import Path

import aiakq
from aiakq.formats.model_folder import read_file


def fingerprint(name: str, model: Path, dtype: str) -> str:
    """Return ``aiakq-<version>-<8 hex digits of a hash of model name, config.json, dtype and version>``."""
    digest = hashlib.sha256(f"{name}\0{dtype}\0".encode())
    config = model / "config.json"
    if config.is_file():
        digest.update(read_file(model, config.name))
    return f"aiakq-{aiakq.__version__}-{digest.hexdigest()[:8]}"
