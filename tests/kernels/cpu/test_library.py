"""The description of the operations, from which Python's structs are made, and constants that Python restates."""

from __future__ import annotations

import ctypes
import json

import pytest
import torch

from aiakq.kernels.cpu import activation, attention, dense, gptq, library, linear

#: C types of src/ops.def and their sizes in a struct.
SIZES = {"int32": 4, "int64": 8, "float": 4, "double": 8, "pointer": ctypes.sizeof(ctypes.c_void_p)}


@pytest.fixture
def description(native) -> dict:
    return json.loads(native.cdll.aiakq_ops())["structs"]


def test_every_field_of_python_is_where_the_compiler_put_it(native, description):
    assert description.keys() == native.structs.keys()
    for name, struct in description.items():
        made, end = native.structs[name], 0
        assert ctypes.sizeof(made) == struct["size"]
        for field, type_name, offset in struct["fields"]:
            placed = getattr(made, field)
            assert (placed.offset, placed.size) == (offset, SIZES[type_name]), (name, field)
            assert offset >= end, "fields overlap"
            end = offset + SIZES[type_name]
        assert end <= struct["size"]


def test_operations_begin_with_kind_and_rows_and_are_numbered_in_order(native, description):
    operations = [name for name, struct in description.items() if struct["kind"] is not None]
    assert [native.kinds[name] for name in operations] == list(range(len(operations)))
    for name in operations:
        assert description[name]["fields"][:2] == [["kind", "int32", 0], ["m", "int32", 4]]
        assert library.new_op(name).kind == native.kinds[name]
    assert {name for name in native.structs if name not in operations} == {
        "LoraPart",
        "LoraSegments",
        "LoraWeights",
        "RankGroup",
        "RankStream",
        "SampleRow",
        "Step",
        "TokenPenalties",
    }


@pytest.mark.parametrize("change", ["offset", "size"])
def test_a_struct_that_python_would_lay_out_differently_is_refused(description, change):
    norm = description["norm"]
    if change == "size":
        norm["size"] += 8
    else:
        norm["fields"][-1][2] += 8
    with pytest.raises(library.LibraryMismatchError, match="norm"):
        library.structures({"norm": norm})


def test_constants_that_python_restates_are_the_librarys(native):
    constants = native.constants
    assert [constants[name] for name in ("EXACT", "BLOCKS", "ROWS")] == [library.EXACT, library.BLOCKS, library.ROWS]
    types = {"FLOAT32": torch.float32, "FLOAT16": torch.float16, "BFLOAT16": torch.bfloat16}
    types |= {"UINT8": torch.uint8, "INT8": torch.int8}
    assert {dtype: constants[name] for name, dtype in types.items()} == library.TYPES
    assert constants["INT8"] == attention.CACHE_TYPES[torch.int8]
    assert [constants[name.upper()] for name in activation.FUNCTIONS] == list(range(len(activation.FUNCTIONS)))
    assert constants["TILE"] == linear.TILE == dense.TILE and constants["BLOCK"] == linear.BLOCK
    assert constants["GPTQ_BLOCK"] == gptq.LONGEST
    assert constants["MAX_HEAD_SIZE"] == attention.MAX_HEAD_SIZE
    assert (constants["SEGMENT"], constants["TILE_ROWS"]) == (attention.SEGMENT, attention.TILE_ROWS)
