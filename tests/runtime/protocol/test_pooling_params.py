"""The parameters of pooling requests, and how results are sent."""

from __future__ import annotations

import array

import pytest

from aiakq import PoolingParams
from aiakq.errors import AiakqError
from aiakq.runtime.protocol.pooling_params import MAX_NUMBERS, Pooled, Pooling, PoolingLimits, paired, similarity

EMBEDS = PoolingLimits("embed", Pooling("LAST", normalize=True), 8, dimensions=[])
SCORES = PoolingLimits("score", Pooling("LAST", activation="sigmoid"), 1, labels=["good"])


@pytest.mark.parametrize(
    ("kind", "first", "end", "expected"),
    [
        ("LAST", 0, 3, []),
        ("LAST", 3, 5, [4]),
        ("CLS", 0, 3, [0]),
        ("CLS", 3, 5, []),
        ("MEAN", 1, 3, [1, 2]),
        ("ALL", 1, 3, [1, 2]),
        ("STEP", 0, 5, [1, 3]),
    ],
)
def test_positions_that_are_needed_of_a_chunk(kind, first, end, expected):
    pooling = Pooling(kind, step_tag_id=7 if kind == "STEP" else None)
    assert list(pooling.positions([1, 7, 2, 7, 5], first, end, 5)) == expected
    assert pooling.reads_every_token is (kind != "LAST")


def test_dimensions_need_a_model_that_was_trained_for_them():
    assert EMBEDS.resolve(PoolingParams(dimensions=5)).dimensions == 5
    assert EMBEDS.resolve(PoolingParams(dimensions=8)).dimensions is None
    for wrong in (0, -1, 9):
        with pytest.raises(AiakqError) as caught:
            EMBEDS.resolve(PoolingParams(dimensions=wrong))
        assert caught.value.id == "value_out_of_range" and caught.value.param == "dimensions"
    listed = PoolingLimits("embed", Pooling("LAST"), 8, dimensions=[2, 4])
    assert listed.resolve(PoolingParams(dimensions=4)).dimensions == 4
    with pytest.raises(AiakqError, match="one of 2, 4"):
        listed.resolve(PoolingParams(dimensions=3))
    plain = PoolingLimits("embed", Pooling("LAST"), 8)
    assert plain.resolve(PoolingParams(dimensions=8)) == Pooling("LAST")
    with pytest.raises(AiakqError, match="is_matryoshka"):
        plain.resolve(PoolingParams(dimensions=4))


def test_normalization_and_activation_are_the_requests_choice():
    assert EMBEDS.resolve(PoolingParams()) == Pooling("LAST", normalize=True)
    assert not EMBEDS.resolve(PoolingParams(normalize=False)).normalize
    assert SCORES.resolve(PoolingParams(activation=False)).activation == ""
    assert SCORES.resolve(PoolingParams(activation=True)).activation == "sigmoid"
    raw = PoolingLimits("score", Pooling("LAST"), 1, labels=["good"])
    for limits, params in (
        (SCORES, PoolingParams(normalize=True)),
        (EMBEDS, PoolingParams(activation=True)),
        (raw, PoolingParams(activation=True)),
    ):
        with pytest.raises(AiakqError) as caught:
            limits.resolve(params)
        assert caught.value.id == "unsupported_parameter"


@pytest.mark.parametrize("wrong", [{"dimensions": True}, {"dimensions": 2.0}, {"normalize": 1}, {"activation": "yes"}])
def test_pooling_params_of_a_wrong_type_are_refused(wrong):
    with pytest.raises(AiakqError) as caught:
        PoolingParams(**wrong)
    assert caught.value.id == "invalid_type" and caught.value.param == next(iter(wrong))


def test_a_result_has_rows_of_float32():
    pooled = Pooled(array.array("f", [0.5, 1.5, 2.5, 3.5]).tobytes(), 2)
    assert (
        pooled.num_rows == 2 and pooled.rows() == [[0.5, 1.5], [2.5, 3.5]] and pooled.vector() == [0.5, 1.5, 2.5, 3.5]
    )


def test_texts_are_paired_one_with_all_or_one_by_one():
    assert paired(["a"], ["x", "y"]) == [("a", "x"), ("a", "y")]
    assert paired(["a", "b"], ["x", "y"]) == [("a", "x"), ("b", "y")]
    for ones, twos, param in ((["a", "b"], ["x"], "text_1"), ([], ["x"], "text_1"), (["a"], [], "text_2")):
        with pytest.raises(AiakqError) as caught:
            paired(ones, twos)
        assert caught.value.param == param


def test_similarity_is_the_cosine():
    assert similarity([3.0, 4.0], [3.0, 4.0]) == pytest.approx(1)
    assert similarity([1.0, 0.0], [0.0, 2.0]) == 0
    assert similarity([0.0, 0.0], [0.0, 2.0]) == 0


def test_the_rows_of_one_request_are_limited():
    every = PoolingLimits("reward", Pooling("ALL"), 8)
    assert every.pooling.num_rows([1, 2, 3]) == 3 and EMBEDS.pooling.num_rows([1, 2, 3]) == 1
    assert Pooling("STEP", step_tag_id=2).num_rows([1, 2, 3, 2]) == 2
    most = MAX_NUMBERS // 8
    every.check_rows(most, "prompt")
    EMBEDS.check_rows(most + 1, "prompt")
    with pytest.raises(AiakqError, match=f"at most {most} together") as caught:
        every.check_rows(most + 1, "prompt")
    assert caught.value.id == "value_out_of_range"
