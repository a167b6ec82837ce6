"""Families of encoders: ``ENCODERS`` maps the class of an encoder without its head to the module that builds it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiakq.registry import Registry

if TYPE_CHECKING:
    from aiakq.runtime.models.decoder import FamilyModule

#: Class without a head -> module.
ENCODERS: Registry[FamilyModule] = Registry(
    "aiakq.encoders",
    {
        "BertModel": "aiakq.runtime.models.encoders.bert",
        "RobertaModel": "aiakq.runtime.models.encoders.roberta",
        "XLMRobertaModel": "aiakq.runtime.models.encoders.roberta",
        "CamembertModel": "aiakq.runtime.models.encoders.roberta",
        "DistilBertModel": "aiakq.runtime.models.encoders.distilbert",
        "MPNetModel": "aiakq.runtime.models.encoders.mpnet",
        "ModernBertModel": "aiakq.runtime.models.encoders.modernbert",
        "NomicBertModel": "aiakq.runtime.models.encoders.nomic_bert",
        "GteModel": "aiakq.runtime.models.encoders.gte",
        "JinaBertModel": "aiakq.runtime.models.encoders.jina_bert",
        "JinaEmbeddingsV3Model": "aiakq.runtime.models.encoders.jina_roberta",
    },
)
#: Modules around an encoder in files with a head.
OUTER = ("bert.", "roberta.", "distilbert.", "mpnet.", "nomic_bert.", "new.", "gte.")
#: Prefixes of tensors of encoders that nothing is computed with: the pooler, unless the head reads it, and buffers.
UNUSED = tuple(
    f"{outer}{name}"
    for outer in ("", *OUTER)
    for name in ("pooler.", "embeddings.position_ids", "embeddings.token_type_ids")
)
