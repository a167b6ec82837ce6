"""Eagle3Head: the decoder layer of an EAGLE-3 head (Li et al. 2025, arXiv:2503.01840), which proposes draft tokens from
hidden states of a target model.

At position i it reads the hidden state of the target model there and the token at i + 1, and predicts the token at
i + 2. Behind the last hidden state it reads its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aiakq.errors import error
from aiakq.kernels.ops.embedding import EmbeddingLayer
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.ops.norm import Norm
from aiakq.kernels.ops.scaling import Scaling
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.layers.attention import LayerCache
from aiakq.runtime.loader.opening import open_weights
from aiakq.runtime.models.builder import DecoderBuilder
from aiakq.runtime.models.decoder import Block, Decoder, Weights
from aiakq.runtime.models.interface import ModelInput
from aiakq.runtime.models.stage import whole_model
from aiakq.runtime.speculation.draft_head import DraftHead, plain
from aiakq.runtime.speculation.eagle3.config import Eagle3Config

#: The embedding of the target model, for heads that have none and cannot share the one in memory.
_EMBEDDING = "model.embed_tokens.weight"
#: The logit of tokens that the head cannot propose; finite, so that rows are.
_IMPOSSIBLE = -1e30
#: What the decoder layer is called in checkpoints, and what all names may begin with.
_LAYERS, _ROOTS = ("midlayer", "layers.0"), ("", "model.")


@dataclass(kw_only=True)
class Eagle3Head(DraftHead):
    """The head as a model of one layer over hidden states of the target model (``ModelInput.hidden``).

    fc                    from the auxiliary hidden states, side by side, to the width of the head.
    hidden_norm           of the hidden states.
    copy                  a Scaling that changes nothing.
    input_norm            of the auxiliary hidden states side by side, or None (norm_before_fc).
    aux_norms             of those of each layer, or none (fc_norm).
    norm_before_residual, norm_output  see Eagle3Config.
    target_ids            [draft vocabulary] int64, the ids of its tokens in the target model; None: they are the same.
    """

    fc: LinearLayer
    hidden_norm: Norm
    copy: Scaling
    input_norm: Norm | None
    aux_norms: list[Norm]
    norm_before_residual: bool
    norm_output: bool
    target_ids: Tensor | None

    def fuse(self, aux_hidden_states: list[Tensor]) -> Tensor:
        """Hidden states [T, target hidden] of the target model's auxiliary layers -> [T, hidden], for ``compute``."""
        if self.aux_norms:
            aux_hidden_states = [
                plain(norm(states)) for norm, states in zip(self.aux_norms, aux_hidden_states, strict=True)
            ]
        side_by_side = torch.cat(aux_hidden_states, dim=1)
        return self.fc(side_by_side if self.input_norm is None else plain(self.input_norm(side_by_side)))

    def compute(self, step: ModelInput, caches: list[LayerCache]) -> Tensor:
        """Logits [R, draft vocabulary] in the activation dtype; also adds the head's own hidden states [R, hidden],
        which it reads at the next position, to ``step.aux_hidden_states``.
        """
        assert self.embedding is not None and step.hidden is not None
        [block], [cache] = self.blocks, caches
        assert isinstance(block, Block) and block.mlp is not None and self.norm is not None and self.head is not None
        fused = step.hidden.x
        normed = plain(self.hidden_norm(fused))
        embedded = plain(block.attention_norm(self.embedding(step.token_ids)))
        width = embedded.shape[1]
        both = torch.empty(len(embedded), 2 * width, dtype=embedded.dtype, device=embedded.device)
        self.copy(embedded, out=both[:, :width])
        self.copy(normed, out=both[:, width:])
        x = self.copy(normed if self.norm_before_residual else fused)
        attended = block.attention(both, step.positions, cache, step.context)
        out = block.mlp(block.mlp_norm(x, attended, block.mlp.input_layout(len(x))))
        # The norm adds the second to the first, in place.
        x, out = self._select_rows(x, step.logit_rows), self._select_rows(out, step.logit_rows)
        last = plain(self.norm(x, out))
        step.aux_hidden_states.append(last if self.norm_output else x)
        return self.head(last)

    def whole_vocabulary(self, logits: Tensor, vocab_size: int) -> Tensor:
        """Logits [R, draft vocabulary] of the head as those [R, vocab_size] float32 of the target model's tokens."""
        if self.target_ids is None:
            return logits.float()
        whole = torch.full((len(logits), vocab_size), _IMPOSSIBLE, dtype=torch.float32, device=logits.device)
        return whole.index_copy_(1, self.target_ids, logits.float())


class Eagle3Builder(DecoderBuilder):
    """Builds a head from tensors with the published names.

    embedding  the target model's, for heads without one of their own.
    """

    def __init__(self, eagle: Eagle3Config, weights: Weights, embedding: EmbeddingLayer | None) -> None:
        super().__init__(eagle.model, weights)
        self._eagle, self._target_embedding = eagle, embedding
        locations = [(root, layer) for root in _ROOTS for layer in _LAYERS if self._has_layer(f"{root}{layer}")]
        self._root, self._layer = locations[0] if locations else ("", _LAYERS[0])
        self.qkv_bias = weights.has(self.layer_name(0, "self_attn.q_proj.bias"))
        self.output_bias = weights.has(self.layer_name(0, "self_attn.o_proj.bias"))
        self.mlp_bias = weights.has(self.layer_name(0, "mlp.gate_proj.bias"))
        self.has_head_norms = weights.has(self.layer_name(0, "self_attn.q_norm.weight"))

    def _has_layer(self, name: str) -> bool:
        return self.weights.has(f"{name}.hidden_norm.weight")

    def layer_name(self, layer: int, name: str) -> str:
        """The full name of a part of its layer."""
        return f"{self._root}{self._layer}.{name}"

    def qkv(self, layer: int) -> LinearLayer:
        """The projection of embeddings and hidden states side by side."""
        names = [self.layer_name(layer, name) for name in self.names.qkv]
        widths = self.qkv_widths()
        return self.weights.stacked(
            list(zip(names, widths, strict=True)), 2 * self.config.hidden_size, bias=self.qkv_bias, role=self.qkv_role
        )

    @property
    def has_embedding(self) -> bool:
        """Whether the head has an embedding of its own."""
        return self.weights.has(f"{self._root}embed_tokens.weight")

    def head_embedding(self) -> EmbeddingLayer | None:
        """The head's own embedding, or the target model's."""
        if not self.has_embedding:
            return self._target_embedding
        name, config = f"{self._root}embed_tokens.weight", self.config
        return self.weights.embedding(name, config.vocab_size, config.hidden_size, tied=False)[0]

    def target_ids(self) -> Tensor | None:
        """[draft vocabulary] int64, see Eagle3Head; values are not checked. Raises ``tensor_mismatch``."""
        count, vocab = self._eagle.draft_vocab_size, self.config.vocab_size
        if self.weights.has("d2t"):  # target id less the head's own
            offsets = self.weights.tensor("d2t", count, dtype=torch.int64)
            return offsets + torch.arange(count, device=offsets.device)
        if count != vocab:
            reason = f"it has no d2t, which says which {count} of {vocab} tokens it proposes"
            raise error("tensor_mismatch", path="--speculative-model", reason=reason)
        return None

    def build(self) -> Eagle3Head:
        """The head."""
        eagle, width = self._eagle, self.config.hidden_size
        aux_width, num_aux = eagle.target_hidden_size, eagle.num_aux_layers
        aux_norms = [f"{self._root}fc_norm.{at}" for at in range(num_aux)] if eagle.fc_norm else []
        return Eagle3Head(
            config=self.config,
            ops=self.ops,
            stage=whole_model(1),
            embedding=self.head_embedding(),
            blocks=[self.block(0)],
            norm=self.norm(f"{self._root}norm"),
            head=self.weights.linear("lm_head", eagle.draft_vocab_size, width),
            output_width=eagle.draft_vocab_size,
            fc=self.weights.linear(f"{self._root}fc", width, num_aux * aux_width),
            hidden_norm=self.norm(self.layer_name(0, "hidden_norm")),
            copy=self.ops.scaling(),
            input_norm=self.norm(f"{self._root}input_norm", num_aux * aux_width) if eagle.norm_before_fc else None,
            aux_norms=[self.norm(name, aux_width) for name in aux_norms],
            norm_before_residual=eagle.norm_before_residual,
            norm_output=eagle.norm_output,
            target_ids=self.target_ids(),
        )


def shared_embedding(config: EngineConfig, draft: EngineConfig, target: Decoder) -> EmbeddingLayer:
    """The embedding of the target model, for a head without one. Raises ``unsupported``."""
    reason = ""
    if draft.model.hidden_size != config.model.hidden_size or target.project_in is not None:
        reason = "and of another width than the model"
    elif config.parallel.tensor_parallel_size == 1:
        assert target.embedding is not None
        return target.embedding
    else:  # every rank has a part of it
        weights = open_weights(config)
        if weights.has(_EMBEDDING):
            return weights.embedding(_EMBEDDING, draft.model.vocab_size, draft.model.hidden_size, tied=False)[0]
        reason = f"for a model without {_EMBEDDING}, over several ranks"
    hint = "Add the embedding to the head's checkpoint as embed_tokens.weight."
    raise error("unsupported", what=f"An EAGLE-3 head without an embedding, {reason},", hint=hint)
