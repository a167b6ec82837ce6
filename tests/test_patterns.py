"""Layer patterns: the same matches as Python's ``re``, and a time limit where that takes exponential time."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiakq.errors import AiakqError
from aiakq.patterns import is_plain, matches, time_limit

NAMES = [
    "lm_head",
    "model.layers.0.self_attn.q_proj",
    "model.layers.10.mlp.down_proj",
    "model.layers.1.mlp.experts.17.gate_proj",
    "model.layers.1.mlp.gate",
    "visual.blocks.3.attn.qkv",
    "",
]
#: Spellings met in real configs, and odd ones.
PATTERNS = [
    ".*",
    "lm_head",
    r".*\.1\..*",
    r".*down.*",
    r".*lm_head",
    r".*mlp\.gate$",
    r"visual.*",
    r"^model\.layers\.(0|1|2|10)\..*proj$",
    r".*\.layers\.(?:1|10)\.mlp\.(?!experts).*",
    r".*(?=down)",
    r".*layers\.\d+\.(self_attn|mlp)\.[a-z_]+_proj",
    r".*layers\.[0-9]{1,2}\.mlp.*",
    r"model\.layers\.\d{2,}\..*",
    r"[^v].*gate(_proj)?$",
    r"(a|b|)*lm",
    r"(model|lm)[._].*?\bq_proj",
    r"\w+\.\w+",
    r"[\w.]+gate",
    r"x?y*z+|model",
    "model.layers.10.mlp.down_proj$",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_same_as_python(pattern):
    for name in NAMES:
        assert matches(f"re:{pattern}", name) == (re.match(pattern, name) is not None), name


@given(
    st.recursive(
        st.sampled_from(["a", "b", ".", "[ab]", "[^a]", r"\.", "^", "$", "c"]),
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=3).map("".join),
            st.lists(inner, min_size=1, max_size=3).map(lambda parts: "(" + "|".join(parts) + ")"),
            st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{0,}", "*?"])).map(
                lambda pair: f"(?:{pair[0]}){pair[1]}"
            ),
            inner.map(lambda text: f"(?!{text})"),
        ),
        max_leaves=6,
    ),
    st.text("ab.c", max_size=8),
)
def test_random_patterns_agree_with_python(pattern, name):
    assert matches(f"re:{pattern}", name) == (re.match(pattern, name) is not None)


def test_globs_and_names():
    assert matches("model.layers.0.*", "model.layers.0.mlp.up_proj")
    assert not matches("model.layers.0.*", "model.layers.10.mlp.up_proj")
    assert matches("*.layers.?.mlp.*", "model.layers.3.mlp.up_proj")
    assert not matches("*.layers.?.mlp", "model.layers.3.mlp.up_proj")
    assert matches("lm_head", "lm_head") and not matches("lm_head", "lm_head2")
    assert not matches("lm.head", "lm_head") and not matches("*.head", "lm_head")
    assert [is_plain(text) for text in ("a.b", "a.*", "a?", "re:a")] == [True, False, False, False]


@pytest.mark.parametrize(
    "pattern",
    [
        r"(a+)+$",
        r"(a*)*b",
        r"(a|aa)+$",
        r"(.*.*.*.*.*.*.*.*)*x$",
        r".*.*.*.*.*.*.*.*.*.*x",
        r"((((a*)*)*)*)*x",
        r"(a{0,900}){0,900}x",
        r"(?:(?!(a+)+b)a)+c",
        "(a?){900}" + "a" * 900 + "x",
    ],
)
def test_malicious_patterns_end_in_time(pattern):
    started = time.process_time()
    try:
        assert not matches(f"re:{pattern}", "a" * 200 + "!")
    except AiakqError as problem:
        assert problem.id == "format_unsupported"
    assert time.process_time() - started < 5


@pytest.mark.parametrize("pattern", ["(a", "a)", "[a", "*a", "a" * 9000, "(?P<x", "\\"])
def test_what_is_not_understood_is_refused(pattern):
    with pytest.raises(AiakqError) as caught:
        matches(f"re:{pattern}", "aaa")
    assert caught.value.id == "format_unsupported" and "\n" not in str(caught.value)


def test_all_patterns_of_a_file_have_one_time_limit_together():
    names = ["a" * 24 + f"{number}!" for number in range(10_000)]
    started = time.process_time()
    with pytest.raises(AiakqError, match="the patterns of this file take too long to match"), time_limit(0.2):
        for name in names:
            matches(r"re:(?:a|aa){1,12}$", name)
            matches(r"re:(.*.*.*.*)x$", name)
    assert time.process_time() - started < 3
    assert not matches(r"re:(a|aa)+$", "ab"), "without a limit outside"
