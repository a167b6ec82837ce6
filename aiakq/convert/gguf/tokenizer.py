"""The tokenizer of a model as keys of a GGUF file, the inverse of formats/gguf_model/tokenizer.py, with its proof.

Byte-level BPE becomes ``gpt2``, with the name of how it splits texts; BPE with fallback to bytes ``llama``, with
scores in the order of its merges. The reader's tokenizer must give the same ids for many texts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from aiakq.errors import AiakqError, error
from aiakq.formats.gguf_model.keys import Metadata
from aiakq.formats.gguf_model.pre_tokenizers import PRE_TOKENIZERS
from aiakq.formats.gguf_model.tokenizer import tokenizer_files
from aiakq.formats.gguf_model.vocabulary import BYTE, CONTROL, NORMAL, SPECIAL, UNKNOWN, UNUSED, USER_DEFINED
from aiakq.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

_SPACE = "\u2581"
_PREFIX = "tokenizer.ggml."
#: Most tokens of the vocabulary whose text is encoded again.
_SAMPLED = 4000
#: Texts for which ids must be the same: white space, digits, contractions, marks, scripts, code.
_TEXTS = (
    *(
        "",
        " ",
        "  ",
        "\n",
        " \n\n\t x",
        "a",
        " a",
        "Hello there,  world!",
        "It's we'LL they'd I'm.",
        "HELLO World hElLo",
    ),
    *("1 12 123 1234 12345678 3.14 1,000", "a1b22c333", "x_y-z/w\\v", "foo(bar)[0] = {'a': 1};\n\tif x:\n\t\treturn"),
    *(
        "de\u0301ja\u0300 vu d\u00e9j\u00e0",
        "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8\u3002",
        "\ud55c\uad6d\uc5b4",
    ),
    *(
        "\u0420\u0443\u0441\u0441\u043a\u0438\u0439 \u0442\u0435\u043a\u0441\u0442",
        "\u0627\u0644\u0639\u0631\u0628\u064a\u0629",
    ),
    *(
        "\U0001f389\U0001f44d\U0001f3fd z\u200dw",
        "a\r\n b\r\r\n",
        "... !!! ?? \u2014 \u201cquoted\u201d",
        "\u00a0\u2003x",
        "   \n  y   ",
    ),
)


def tokenizer_keys(tokenizer: Tokenizer, rows: int, end_ids: Iterable[int] = ()) -> tuple[dict[str, object], list[str]]:
    """Return the keys of a tokenizer, by full name, and notes on what programs other than aiakq do with them.

    rows     number of tokens of the model: more than those of the tokenizer are unused.
    end_ids  ids that end an answer, besides the tokenizer's own.

    Raises ``gguf_not_written`` for a tokenizer that such files do not hold.
    """
    backend = getattr(tokenizer.hf, "backend_tokenizer", None)
    if backend is None:
        raise _refused("it is no tokenizer of the tokenizers library")
    content = json.loads(backend.to_str())
    model = content["model"]
    if model.get("type") != "BPE" or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise _refused(f"it is of the kind {model.get('type')!r:.40}, and aiakq writes BPE")
    keys = _sentencepiece(content) if model.get("byte_fallback") else _byte_level(content)
    keys |= _tokens(content, rows, is_spm=bool(model.get("byte_fallback")))
    ids = {token: id for id, token in enumerate(keys[_PREFIX + "tokens"])}
    for name, attribute in SPECIAL.items():
        token = getattr(tokenizer.hf, attribute, None)
        if token is not None and str(token) in ids:
            keys[f"{_PREFIX}{name}_token_id"] = ids[str(token)]
    keys |= _added_ends(tokenizer, keys)
    keys |= _more_ends(keys, end_ids)
    keys |= _templates(tokenizer.hf.chat_template)
    return keys, check_tokenizer(keys, backend, end_ids)


def _refused(reason: str) -> AiakqError:
    return error("gguf_not_written", what="Its tokenizer", reason=reason)


# --- how texts are split ----------------------------------------------------------------------------------------------


def _parts(part: Any, name: str) -> list[Any]:
    """Return the steps of a normalizer or pre-tokenizer."""
    if part is None:
        return []
    return [step for each in part[name] for step in _parts(each, name)] if part.get("type") == "Sequence" else [part]


def _comparable(step: Mapping[str, Any]) -> dict[str, Any]:
    """Return a step without what changes no id."""
    return {key: value for key, value in step.items() if key != "trim_offsets"}


def _byte_level(content: Mapping[str, Any]) -> dict[str, Any]:
    normalizers = [step["type"] for step in _parts(content["normalizer"], "normalizers")]
    steps = [_comparable(step) for step in _parts(content["pre_tokenizer"], "pretokenizers")]
    ignore = bool(content["model"].get("ignore_merges"))
    for name, pre in PRE_TOKENIZERS.items():
        same = [_comparable(step) for step in pre.steps] == steps
        if same and normalizers == ([pre.normalizer] if pre.normalizer else []) and pre.ignore_merges == ignore:
            merges = [each if isinstance(each, str) else " ".join(each) for each in content["model"]["merges"]]
            return {_PREFIX + "model": "gpt2", _PREFIX + "pre": name, _PREFIX + "merges": merges}
    raise _refused("the way in which it splits texts before merging has no name that llama.cpp and aiakq know")


def _sentencepiece(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the kind, whether texts begin with a space, and the scores' source. Raises ``gguf_not_written``."""
    normalizers = _parts(content["normalizer"], "normalizers")
    steps = _parts(content["pre_tokenizer"], "pretokenizers")
    kinds = {step["type"] for step in (*normalizers, *steps)}
    if not kinds <= {"Prepend", "Replace", "Metaspace", "Split"} or len(steps) > 1:
        raise _refused(f"it changes or splits texts in a way that such files do not hold ({', '.join(sorted(kinds))})")
    prefix = any(step["type"] == "Prepend" for step in normalizers)
    prefix = prefix or any(step.get("prepend_scheme", "never") != "never" for step in steps)
    return {_PREFIX + "model": "llama", _PREFIX + "pre": "default", _PREFIX + "add_space_prefix": prefix}


# --- tokens -----------------------------------------------------------------------------------------------------------


def _tokens(content: Mapping[str, Any], rows: int, is_spm: bool) -> dict[str, Any]:
    """Return tokens, their kinds and, for SentencePiece, their scores. Raises ``gguf_not_written`` for too many."""
    model = content["model"]
    added = {each["id"]: each for each in content["added_tokens"]}
    tokens = {id: token for token, id in model["vocab"].items()} | {id: each["content"] for id, each in added.items()}
    count = max(tokens, default=-1) + 1
    if count > rows:
        raise _refused(f"it has {count} tokens, and the model {rows}")
    kinds = {}
    for id in range(rows):
        token = tokens.setdefault(id, f"[PAD{id}]")
        if id in added:
            kinds[id] = CONTROL if added[id]["special"] else USER_DEFINED
        else:
            kinds[id] = NORMAL if id < count and token in model["vocab"] else UNUSED
        if is_spm and token == model.get("unk_token"):
            kinds[id] = UNKNOWN
        elif is_spm and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            kinds[id] = BYTE
        elif is_spm and kinds[id] == USER_DEFINED:
            tokens[id] = token.replace(_SPACE, " ")
    keys: dict[str, Any] = {
        _PREFIX + "tokens": [tokens[id] for id in range(rows)],
        _PREFIX + "token_type": [kinds[id] for id in range(rows)],
    }
    return keys | ({_PREFIX + "scores": _scores(model, rows, kinds)} if is_spm else {})


def _scores(model: Mapping[str, Any], rows: int, kinds: Mapping[int, int]) -> list[float]:
    """Return scores that put the pieces in the order in which their merges come."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(model["merges"]):
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        ranks.setdefault(left + right, rank)
    scores = [0.0 if kinds[id] in (UNKNOWN, CONTROL, BYTE) else -1000.0 for id in range(rows)]
    for token, id in model["vocab"].items():
        if kinds[id] == NORMAL:
            scores[id] = -float(ranks.get(token, len(model["merges"])))
    return scores


# --- special tokens and templates -------------------------------------------------------------------------------------


def _added_ends(tokenizer: Tokenizer, keys: Mapping[str, Any]) -> dict[str, bool]:
    """Return whether bos and eos are added to texts. Raises ``gguf_not_written`` for other tokens."""
    plain, whole = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    bos, eos = keys.get(_PREFIX + "bos_token_id"), keys.get(_PREFIX + "eos_token_id")
    for adds_bos in (False, True):
        for adds_eos in (False, True):
            if whole == [bos] * adds_bos + plain + [eos] * adds_eos:
                return {_PREFIX + "add_bos_token": adds_bos, _PREFIX + "add_eos_token": adds_eos}
    raise _refused(f"it makes {whole!r:.60} of {plain!r:.60}, and such files only add bos and eos")


def _more_ends(keys: Mapping[str, Any], end_ids: Iterable[int]) -> dict[str, int]:
    """Return keys for ids that end an answer and that are not the tokenizer's eos."""
    known = {keys.get(_PREFIX + "eos_token_id")}
    others = [id for id in end_ids if id not in known]
    found: dict[str, int] = {}
    if None in known and others:
        found[_PREFIX + "eos_token_id"] = others.pop(0)
    # Those for which there is no key may still end answers by their names or the template: the proof decides.
    return found | {f"{_PREFIX}{name}_token_id": id for name, id in zip(("eot", "eom"), others, strict=False)}


def _templates(template: Any) -> dict[str, object]:
    if isinstance(template, str):
        return {"tokenizer.chat_template": template}
    named = dict(template) if isinstance(template, Mapping) else {}
    keys: dict[str, object] = {}
    if "default" in named:
        keys["tokenizer.chat_template"] = named.pop("default")
    if named:
        keys["tokenizer.chat_templates"] = list(named)
    return keys | {f"tokenizer.chat_template.{name}": text for name, text in named.items()}


# --- the proof --------------------------------------------------------------------------------------------------------


def check_tokenizer(keys: Mapping[str, object], backend: RustTokenizer, end_ids: Iterable[int] = ()) -> list[str]:
    """Compare the reader's tokenizer with ``backend``: ids of texts, texts of ids, and ends of answers; return notes.

    Raises ``gguf_not_written`` if one of them differs, and for what the reader cannot read.
    """
    from tokenizers import Tokenizer as RustTokenizer

    metadata = Metadata({"general.architecture": "llama", **keys}, "the new file")
    try:
        files = tokenizer_files(metadata)
    except AiakqError as problem:
        raise _refused(str(problem.fields.get("reason", problem))) from problem
    found = RustTokenizer.from_str(json.dumps(files["tokenizer.json"]))
    vocabulary = sorted(backend.get_vocab(with_added_tokens=False).items(), key=lambda item: item[1])
    step = max(1, len(vocabulary) // _SAMPLED)
    sampled = [backend.decode([id], skip_special_tokens=False) for _, id in vocabulary[::step]]
    added = backend.get_added_tokens_decoder()
    if words := [each.content for each in added.values() if each.single_word]:
        raise _refused(f"its token {words[0]!r:.40} is found as a whole word only, which such files do not say")
    special = {each.content for each in added.values()}
    texts = [
        *_TEXTS,
        *(text for text in sampled if not any(token in text for token in special)),
        " ".join(sampled[-200:]),
    ]
    texts = [text for text in texts if not any(token in text for token in special)]
    for ours, theirs, text in zip(found.encode_batch(texts), backend.encode_batch(texts), texts, strict=True):
        if ours.ids != theirs.ids:
            raise _refused(f"{text!r:.60} would become {ours.ids!r:.60} there, and is {theirs.ids!r:.60}")
        said, wanted = (each.decode(theirs.ids, skip_special_tokens=False) for each in (found, backend))
        if said != wanted:
            raise _refused(f"the tokens of {text!r:.60} would say {said!r:.60} there, and say {wanted!r:.60}")
    return [*_white_space_note(found, backend, sorted(special)), *_ends_note(files["generation_config.json"], end_ids)]


def _ends_note(generation: Mapping[str, Any], end_ids: Iterable[int]) -> list[str]:
    """Return a note if answers end at more tokens than ``end_ids``. Raises ``gguf_not_written`` if at fewer."""
    wanted, found = set(end_ids), set(generation["eos_token_id"])
    if missing := sorted(wanted - found):
        raise _refused(f"answers end at {len(wanted)} tokens, and those of such a file would not at {missing!r:.60}")
    if not wanted or found == wanted:
        return []
    return [f"Answers from the file also end at the tokens {sorted(found - wanted)!r:.60}, as GGUF files mean it."]


def _white_space_note(found: RustTokenizer, backend: RustTokenizer, special: list[str]) -> list[str]:
    around = [f"a{token} b" for token in special[:_SAMPLED]]
    pairs = zip(found.encode_batch(around), backend.encode_batch(around), around, strict=True)
    other = [text for ours, theirs, text in pairs if ours.ids != theirs.ids]
    if not other:
        return []
    return [
        f"White space around {len(other)} special tokens is read otherwise from the file, as in {other[0]!r:.60}: such "
        "files do not hold which of it belongs to the token."
    ]
