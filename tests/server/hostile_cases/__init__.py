"""Hostile HTTP inputs, each with its expected response. ``case(seed, index)`` is deterministic.

A family is a function that generates cases of a kind; FAMILIES has their weights. They are malformed HTTP, floods of
headers, chunks and bytes, invalid or deeply nested JSON, invalid text, wrong types and bounds for every field, unknown
fields, odd or expensive schemas and grammars, unusual paths, hosts and origins, pipelining, slow senders, and clients
that disconnect.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from hostile_cases.agents import agent_items, agent_types, agent_values
from hostile_cases.bodies import bad_json, strange_text
from hostile_cases.connections import leaving, mutated, pipelined, slow_senders, smuggled
from hostile_cases.fields import hostile_values, out_of_range, unknown_fields, wrong_types
from hostile_cases.grammars import grammars
from hostile_cases.http import bad_chunks, bodies_too_large, header_floods, malformed_http, odd_headers
from hostile_cases.requests import Case, Draw
from hostile_cases.routes import wrong_hosts, wrong_methods, wrong_origins, wrong_paths

FAMILIES: dict[Callable[[Draw], Case], float] = {
    malformed_http: 14,
    bad_chunks: 4,
    header_floods: 3,
    odd_headers: 5,
    bodies_too_large: 2,
    bad_json: 14,
    wrong_types: 10,
    out_of_range: 8,
    hostile_values: 10,
    unknown_fields: 5,
    strange_text: 4,
    wrong_methods: 4,
    wrong_paths: 4,
    wrong_hosts: 3,
    wrong_origins: 2,
    pipelined: 2,
    smuggled: 3,
    leaving: 4,
    slow_senders: 0.5,
    mutated: 8,
    grammars: 8,
    agent_types: 4,
    agent_values: 3,
    agent_items: 4,
}


def case(seed: int, index: int, families: dict[Callable[[Draw], Case], float] = FAMILIES) -> Case:
    """Return case ``index`` of the run ``seed``."""
    draw = random.Random(f"{seed}/{index}")
    family = draw.choices(list(families), weights=list(families.values()))[0]
    made = family(draw)
    return replace(made, kind=f"{family.__name__}: {made.kind}")
