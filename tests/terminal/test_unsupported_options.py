"""Unsupported options on the command line: not in the help, accepted with a line or refused."""

from __future__ import annotations


def test_they_are_accepted_with_a_line_and_not_in_the_help(process):
    assert "--swap-space" not in process("serve", "--help").out
    done = process("serve", "./no-such-model", "--swap-space", "8", "--enable-lora-bias", "--task", "generate")
    assert "--swap-space does nothing here: nothing is swapped" in done.err
    assert "--enable-lora-bias does nothing here" in done.err
    assert "--task" not in done.err and "error[model_missing]" in done.err


def test_what_is_not_supported_is_refused_in_one_line(process):
    done = process("serve", "./no-such-model", "--long-lora-scaling-factors", "4.0")
    assert done.code == 2
    assert done.err.strip() == (
        "aiakq: error[option_refused]: --long-lora-scaling-factors 4.0 is not available: LongLoRA's context needs "
        "--rope-scaling for all requests. Leave it out."
    )


def test_options_of_newer_servers_are_known(process):
    """What vLLM 0.11's scripts pass: accepted with the reason why it has no effect, or silently as the default."""
    options = """--runner generate --attention-backend X --stream-interval 4 --attention-config.backend Y
        --convert auto --api-server-count 2 --enable-server-load-tracking
        --disable-hybrid-kv-cache-manager --disable-cascade-attn --prefix-caching-hash-algo builtin
        --chat-template-content-format openai --mm-processor-cache-gb 0 --disable-frontend-multiprocessing
        --disable-uvicorn-access-log --disable-fastapi-docs"""
    done = process("serve", "./no-such-model", *options.split())
    assert "error[model_missing]" in done.err, done.err
    for flag in ("--api-server-count", "--disable-cascade-attn", "--prefix-caching-hash-algo"):
        assert f"{flag} does nothing here: " in done.err
    assert "--runner" not in done.err and "--disable-fastapi-docs" not in done.err
    assert "--attention-backend does nothing here" in done.err and "--stream-interval" not in done.err
    assert process("serve", "m", "--enable-prompt-embeds").code == 2
