"""Every native family by its model_type, see family_keys.py."""

from __future__ import annotations

from collections.abc import Mapping

from aiakq.runtime.config.dense_families import DENSE
from aiakq.runtime.config.family_keys import Family
from aiakq.runtime.config.gemma4 import GEMMA4
from aiakq.runtime.config.recurrent_families import RECURRENT_FAMILIES
from aiakq.runtime.config.shared_experts_families import SHARED_EXPERTS
from aiakq.runtime.config.sparse_families import SPARSE

FAMILIES: Mapping[str, Family] = {**DENSE, "gemma4_text": GEMMA4, **SPARSE, **RECURRENT_FAMILIES, **SHARED_EXPERTS}
