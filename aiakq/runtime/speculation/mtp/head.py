"""MtpHead: a model's layer for multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2) as a draft head."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from aiakq.kernels.ops.embedding import EmbeddingLayer
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.ops.norm import Norm
from aiakq.kernels.ops.scaling import Scaling
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.attention import LayerCache
from aiakq.runtime.models import family_module
from aiakq.runtime.models.decoder import Decoder, Weights
from aiakq.runtime.models.interface import ModelInput, StageOutput
from aiakq.runtime.models.stage import Stage
from aiakq.runtime.speculation.draft_head import DraftHead, plain
from aiakq.runtime.speculation.mtp.layout import MtpLayout
from aiakq.runtime.speculation.mtp.weights import LayerWeights


@dataclass(kw_only=True)
class MtpHead(DraftHead):
    """The layer as the last stage of its model, with the layer's own norm and the output layer.

    It reads hidden states behind a final norm: the target model's, then its own, as in SGLang.

    fc              from token embedding and hidden state, side by side, to the width of the model.
    embedding_norm, hidden_norm  of the two.
    copy            a Scaling that changes nothing.
    token_embedding  of the target model, or its own.
    masks_first, hidden_first  see MtpLayout.
    target_norm     final norm of the target model; None if the layer reads hidden states before it.
    """

    fc: LinearLayer
    embedding_norm: Norm
    hidden_norm: Norm
    copy: Scaling
    token_embedding: EmbeddingLayer
    masks_first: bool
    hidden_first: bool
    target_norm: Norm | None = None

    def fuse(self, aux_hidden_states: list[Tensor]) -> Tensor:
        """The target model's last hidden states [T, hidden] before its final norm -> those [T, hidden] to read."""
        [states] = aux_hidden_states
        return states if self.target_norm is None else plain(self.target_norm(states))

    def stage_input(self, step: ModelInput, states: Tensor) -> StageOutput:
        """See DraftHead: states [T, hidden], and the embeddings [T, hidden] of the tokens of ``step``."""
        embedded = self.token_embedding(step.token_ids)
        if self.masks_first:
            embedded = embedded.masked_fill((step.positions == 0)[:, None], 0)
        return StageOutput(states, embedded)

    def compute(self, step: ModelInput, caches: list[LayerCache]) -> Tensor:
        """Logits [R, V] in the activation dtype; see DraftHead."""
        assert step.hidden is not None and step.hidden.residual is not None
        assert self.norm is not None and self.head is not None
        [block], [cache] = self.blocks, caches
        states, embedded = step.hidden.x, step.hidden.residual
        width = embedded.shape[1]
        both = torch.empty(len(embedded), 2 * width, dtype=embedded.dtype, device=embedded.device)
        left, right = both[:, :width], both[:, width:]
        of_embedding, of_hidden = (right, left) if self.hidden_first else (left, right)
        self.copy(plain(self.embedding_norm(embedded)), out=of_embedding)
        self.copy(plain(self.hidden_norm(states)), out=of_hidden)
        x, residual = block(self.fc(both), None, step.positions, cache, step.context)
        x = self._select_rows(x, step.logit_rows)
        residual = None if residual is None else self._select_rows(residual, step.logit_rows)
        last = plain(self.norm(x, residual))
        step.aux_hidden_states.append(last)
        return self.head(last)


def build_head(
    config: ModelConfig, layout: MtpLayout, weights: Weights, shared: tuple[EmbeddingLayer, LinearLayer] | None
) -> MtpHead:
    """Build the layer that ``config`` has behind those of the target model (``with_layer``), with the builder of the
    model's family.

    shared  embedding and output layer of the target model; None: they are read. The layer's own go first.

    Raises what the family's ``build`` raises.
    """
    last, D = config.num_layers - 1, config.hidden_size
    has_head = weights.has(f"{layout.head}.weight") or weights.is_packed(layout.head)
    has_embedding = weights.has(f"{layout.embedding}.weight") or weights.is_packed(layout.embedding)
    names = {name: other for name, other in layout.renamed(config).items() if has_head or name != "lm_head"}
    stage = Stage(last, last + 1, last + 1)
    source = LayerWeights(weights, stage, names, None if has_head else shared)
    own = replace(config, tie_word_embeddings=False) if has_head else config
    decoder = family_module(config.architecture).build(own, source)

    def norm(name: str) -> Norm:
        weight = weights.tensor(f"{name}.weight", D)
        weight = weight.float() + layout.norm_offset if layout.norm_offset else weight
        return weights.ops.rms_norm(weight, config.norm_eps)

    if shared is None or has_embedding:
        name = layout.embedding if has_embedding else "model.embed_tokens"
        embedding = weights.embedding(f"{name}.weight", config.vocab_size, D, tied=False)[0]
    else:
        embedding = shared[0]
    parts = {field.name: getattr(decoder, field.name) for field in fields(Decoder) if field.init}
    return MtpHead(
        **parts,
        fc=weights.linear(layout.fc, D, 2 * D),
        embedding_norm=norm(layout.embedding_norm),
        hidden_norm=norm(layout.hidden_norm),
        copy=weights.ops.scaling(),
        token_embedding=embedding,
        masks_first=layout.masks_first,
        hidden_first=layout.hidden_first,
    )
