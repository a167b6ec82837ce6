"""The formats of aiakq by what their files hold, for tests that write weights of one kind."""

from __future__ import annotations

from aiakq import formats

#: Formats that are only read.
READ_ONLY = {"gguf", "bitsandbytes", "mlx", "hqq", "marlin", "quanto", "torchao", "qqq", "bitnet"} | {
    *("aqlm", "squeezellm", "vptq")
}
#: Formats of integers with scales, which aiakq writes. The others have the same cases in tests of their own.
INTEGERS = sorted(set(formats.FORMATS) - READ_ONLY - {"fp8", "modelopt"})
