"""Methods of speculative decoding: the registry, and those that are refused."""

from __future__ import annotations

from aiakq.errors import AiakqError, error
from aiakq.registry import Registry

NGRAM, SUFFIX, DRAFT_MODEL, EAGLE3, MTP = "ngram", "suffix", "draft_model", "eagle3", "mtp"

#: Method -> a ``Proposer`` (runtime/speculation/proposers.py), or a module where the method needs a model
#: (runtime/speculation/draft_model/loading.py).
PROPOSERS: Registry[object] = Registry(
    "aiakq.proposers",
    {
        NGRAM: "aiakq.runtime.speculation.ngram:NgramProposer",
        SUFFIX: "aiakq.runtime.speculation.suffix:SuffixProposer",
        DRAFT_MODEL: "aiakq.runtime.speculation.draft_model.loading",
        EAGLE3: "aiakq.runtime.speculation.eagle3.loading",
        MTP: "aiakq.runtime.speculation.mtp.loading",
    },
)

#: Parts of the names of other methods and of the architectures of their heads, and why they are refused. The first part
#: that is found in a name counts.
_REFUSED = {
    "medusa": "Medusa heads predict each position without the draft token before it, and rely on typical acceptance of "
    "a tree of tokens, which changes the output",
    "mlpspeculator": "an MLP speculator reads the last hidden state only, so that fewer of its draft tokens are "
    "accepted than of an EAGLE-3 head's",
    "lstmspeculator": "an LSTM speculator reads the last hidden state only, so that fewer of its draft tokens are "
    "accepted than of an EAGLE-3 head's",
    "peagle": "P-EAGLE heads predict all draft tokens at once from mask tokens, and not one after another",
    "dflash": "DFlash heads predict a block of draft tokens at once, which attend to each other in both directions",
    "dspark": "DSpark heads predict a block of draft tokens at once, which attend to each other in both directions",
    "domino": "Domino heads predict a block of draft tokens at once, which attend to each other in both directions",
    "eagle": "heads of EAGLE-1 and EAGLE-2 predict hidden states and are trained for one draft token only, so that few "
    "tokens of a chain are accepted",
    "mtp": "layers for multi-token prediction are read from the target's checkpoint, by the method mtp without a model",
}

#: vLLM has a name for the layers of each family (``deepseek_mtp``), all of which mean this method.
_MTP_SUFFIX = "_mtp"


def check_supported(name: str) -> None:
    """Raise ``unsupported`` for a method, or the architecture of a head, that is known and refused."""
    normalized = name.lower().replace("_", "").replace("-", "")
    if "eagle3" in normalized or name == MTP:
        return
    for kind, reason in _REFUSED.items():
        if kind in normalized:
            hint = f"Methods that work: {', '.join(PROPOSERS)}."
            raise error("unsupported", what=f"Speculative decoding with {name} ({reason})", hint=hint)


def resolve(method: str | None, model: str | None, option: str) -> tuple[str, str | None]:
    """The method and its model, if it needs one, of a configuration; ``[ngram]`` as a model names a method. The model
    of ``mtp`` is the target, or None. Raises ``bad_option``, ``unsupported`` and ``plugin``.
    """
    named = model[1:-1] if model is not None and model.startswith("[") and model.endswith("]") else model
    if named is not None and named in PROPOSERS and not _needs_model(named) and method in (None, named):
        return named, None
    resolved = method or DRAFT_MODEL
    if isinstance(resolved, str) and resolved.endswith(_MTP_SUFFIX) and resolved not in PROPOSERS:
        resolved = MTP
    if resolved == MTP and not (model or "").startswith("["):
        return MTP, model
    if isinstance(resolved, str) and not (model or "").startswith("["):
        check_supported(resolved)
        if resolved in PROPOSERS and _needs_model(resolved) == (model is not None):
            return resolved, model
    raise _bad(method, model, option)


def _needs_model(method: str) -> bool:
    """Whether ``method`` needs a model."""
    if method in (NGRAM, SUFFIX, MTP):
        return False
    return method in (DRAFT_MODEL, EAGLE3) or hasattr(PROPOSERS.load(method), "configure")


def _bad(method: str | None, model: str | None, option: str) -> AiakqError:
    without = [name for name in PROPOSERS if not _needs_model(name)]
    within = [name for name in PROPOSERS if _needs_model(name)]
    if option == "--speculative-config":
        expected = f"the method {', '.join(without)}, or with a model {' or '.join(within)}"
    else:
        expected = f"{', '.join(f'[{name}]' for name in without)} or a model"
    value = method if option == "--speculative-config" else model
    return error("bad_option", option=option, value=value, expected=expected, hint="")
