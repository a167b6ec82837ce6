"""Why a mutant that changes nothing could not: checks of the kernel itself, as texts that have to run without a fault.

A kernel's tiles are powers of two and its sizes are constants, so that some of what it computes is never stored, and
some of its masks hide nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ptx.mutants import ORDERING, Mutant

_STATEMENT = re.compile(r"^\s*(?:@!?%p\d+ )?([a-z]\S*)\s+(%\w+), (.*);")
_MASKED = re.compile(r"^\s*@(!?)(%p\d+) (\S+)\s+(.*)$")
_REGISTER = re.compile(r"%[a-z]+\d*(?:\.[xyz])?")
_MEMORY = re.compile(r"\s*(?:@!?%p\d+ )?(?:ld|st|atom|red|cp\.async)\.")
#: Whose result follows from the operands of a thread, or of the lanes of its warp.
_SIMPLE = re.compile(
    r"(?:add|sub|mul|mad|and|or|xor|not|shl|shr|bfe|lop3|selp|mov|cvt|setp|min|max|shfl\.sync\.idx)\.(?!.*unpack)"
)
_NOT_USED = "what masked lanes would read is within a tensor, and nothing that is stored depends on it"
_TYPES = {"%p": "pred", "%r": "b32", "%rd": "b64", "%rs": "b16"}


#: What no check of a kernel can show, by kernel, kind and beginning of the instruction.
KNOWN = {
    ("combine_kernel", "mask dropped", "ld.global.v4"):
        "splits without positions hold zeros, and their share is zero: the mask saves reads",
}  # fmt: skip


def reason(text: str, mutant: Mutant, unchanged: Callable[[str], bool]) -> str | None:
    """Say why ``mutant`` is equivalent, or return None if an input may be missing that shows the difference.

    unchanged  whether all launches leave memory as before and without a fault with another text of the kernel.
    """
    if mutant.kind in ORDERING:
        return "no access depends on it in any order that was tried"
    if mutant.kind == "mask dropped":
        return _of_mask(text, mutant, unchanged) or _known(text, mutant)
    if mutant.kind == "mask of a copy dropped":
        marked = mutant.old.replace("shared.global", "shared.global.marked", 1)
        return _NOT_USED if unchanged(Mutant("", mutant.line, mutant.old, marked).apply(text)) else None
    if unchanged(Mutant(mutant.kind, mutant.line, mutant.old, "").apply(text)):
        return "nothing that is stored depends on its result"
    statement = _STATEMENT.match(mutant.new)
    if statement and _of_thread(text, statement[2]):
        if unchanged(_compared(text, mutant)):
            return "it has the same result in every thread, whatever the inputs"
        by_users = _compared_by_users(text, mutant)
        if by_users is not None and unchanged(by_users):
            return "all that takes its result has the same one in every thread, whatever the inputs"
        by_stores = _compared_where_used(text, mutant)
        if by_stores is not None and unchanged(by_stores):
            return "threads that store, or load, anything with it do the same, whatever the inputs"
        if _masks_stores(text, statement[2]) and unchanged(_always(text, mutant)):
            return "all threads that it could let store would store the same"
    return None


def _known(text: str, mutant: Mutant) -> str | None:
    for (kernel, kind, beginning), why in KNOWN.items():
        if f".entry {kernel}(" in text and kind == mutant.kind and mutant.new.split()[0].startswith(beginning):
            return why
    return None


def _of_mask(text: str, mutant: Mutant, unchanged: Callable[[str], bool]) -> str | None:
    match = _MASKED.match(mutant.old)
    assert match is not None
    negated, mask, name, _ = match.groups()
    off = f"@{'' if negated else '!'}{mask} trap;"
    if _of_thread(text, mask) and unchanged(Mutant("", mutant.line, mutant.old, off + mutant.old).apply(text)):
        return "the mask is set in every thread, whatever the inputs"
    if name.startswith("st.shared") or (name.startswith("st.global") and _of_thread(text, mask)):
        return "what masked threads would store is what others do, or nobody reads it"
    if name.startswith("ld.") and unchanged(_undefined_where_masked(text, mutant.line)):
        return _NOT_USED
    return None


def _undefined_where_masked(text: str, number: int) -> str:
    """Remove what masked lanes have instead of what they would load: the moves before the load."""
    lines = text.split("\n")
    while re.match(r"\s*mov\.\w+\s+%\w+, %?\w+;$", lines[number - 1]):
        number -= 1
        lines[number] = ""
    return "\n".join(lines)


def _compared(text: str, mutant: Mutant) -> str:
    """The kernel, giving up where the mutant has another result."""
    return Mutant("", mutant.line, mutant.old, mutant.old.partition("//")[0] + _check(mutant.new)).apply(text)


def _compared_by_users(text: str, mutant: Mutant) -> str | None:
    """The kernel, giving up where an instruction that takes the mutant's result has another one; None if one is not
    simple.
    """
    statement = _STATEMENT.match(mutant.new)
    assert statement is not None
    result, lines = statement[2], text.split("\n")
    declared = f".reg .{_type(result)} mutated; {mutant.new.replace(result, 'mutated', 1)}"
    for number, line in enumerate(lines):
        code = line.partition("//")[0]
        if number == mutant.line:
            lines[number] = f"{code} {declared}"
        elif re.search(rf"{result}\b", code):
            user = _STATEMENT.match(code)
            if user is None or user[1].startswith(("st.", "ld.", "atom.")) or user[2] == result or "@" in code:
                return None
            lines[number] = code + _check(re.sub(rf"{result}\b", "mutated", code))
    return "\n".join(lines)


def _compared_where_used(text: str, mutant: Mutant) -> str | None:
    """The kernel beside all that follows from the mutant's result, giving up where a thread whose mask is set uses
    memory in another way; None if something is not simple.
    """
    statement = _STATEMENT.match(mutant.new)
    assert statement is not None
    shadows = {statement[2]: "shadow0"}
    lines = text.split("\n")
    lines[mutant.line] = f"{_code(mutant.old)} {_shadowed(mutant.new, statement[2], shadows)}"
    for number, line in enumerate(lines):
        code = _code(line)
        used = [name for name in shadows if number != mutant.line and re.search(rf"{name}\b", code)]
        if not used:
            continue
        masked, user = _MASKED.match(code), _STATEMENT.match(code)
        if number < mutant.line or (masked and (masked[2] in used or not _of_thread(text, masked[2]))):
            return None
        if _MEMORY.match(code):
            mask = f" {'not.pred' if masked[1] else 'mov.pred'} there, {masked[2]};" if masked else (
                " setp.eq.s32 there, 0, 0;"
            )  # fmt: skip
            checks = [_unequal(name, shadows[name]) + " and.pred unequal, unequal, there;" for name in used]
            lines[number] = " ".join(
                [*(f"{{ .reg .pred there, unequal;{mask} {check} @unequal trap; }}" for check in checks), code]
            )
        elif masked is None and user is not None and _SIMPLE.match(user[1]) and _defined_once(text, user[2]):
            shadows[user[2]] = f"shadow{len(shadows)}"
            lines[number] = f"{code} {_shadowed(code, user[2], shadows)}"
        else:
            return None
    return "\n".join(lines)


def _shadowed(code: str, result: str, shadows: dict[str, str]) -> str:
    """An instruction with these registers instead, and the declaration of its result."""
    for name, shadow in shadows.items():
        code = re.sub(rf"{name}\b", shadow, code)
    return f".reg .{_type(result)} {shadows[result]}; {code}"


def _code(line: str) -> str:
    return line.partition("//")[0]


def _defined_once(text: str, register: str) -> bool:
    found = (_STATEMENT.match(line) for line in text.split("\n"))
    return sum(statement is not None and statement[2] == register for statement in found) == 1


def _masks_stores(text: str, register: str) -> bool:
    """Whether a predicate does nothing but mask stores."""
    if not register.startswith("%p"):
        return False
    for line in text.split("\n"):
        code = _code(line)
        if re.search(rf"{register}\b", code):
            statement, masked = _STATEMENT.match(code), _MASKED.match(code)
            if masked and masked[2] == register and masked[3].startswith("st."):
                continue
            if statement is None or (statement[2] != register and statement[1] != "and.pred"):
                return False
            if statement[2] != register and not _masks_stores(text, statement[2]):
                return False
    return True


def _always(text: str, mutant: Mutant) -> str:
    """The kernel with a predicate that is set in every thread."""
    statement = _STATEMENT.match(mutant.new)
    assert statement is not None
    return Mutant("", mutant.line, mutant.old, f"setp.eq.s32 {statement[2]}, 0, 0;").apply(text)


def _type(register: str) -> str:
    return _TYPES[re.sub(r"\d+$", "", register)]


def _check(changed: str) -> str:
    """Give up if ``changed`` has another result than the instruction before."""
    statement = _STATEMENT.match(changed)
    assert statement is not None
    kind = _type(statement[2])
    other = changed.replace(statement[2], "other", 1)
    unequal = _unequal(statement[2], "other")
    return f" {{ .reg .{kind} other; .reg .pred unequal; {other} {unequal} @unequal trap; }}"


def _unequal(register: str, other: str) -> str:
    """Set the predicate ``unequal``."""
    kind = _type(register)
    name = "xor.pred" if kind == "pred" else f"setp.ne.{kind}"
    return f"{name} unequal, {other}, {register};"


def _of_thread(text: str, register: str) -> bool:
    """Whether a register depends on the numbers of thread and block alone, and on constants, such as sizes that the
    kernel is compiled for: then the grid follows from them, too.
    """
    sources: dict[str, list[str] | None] = {}
    for line in text.split("\n"):
        statement = _STATEMENT.match(line)
        if statement:
            found = _REGISTER.findall(statement[3])
            memory = statement[1].startswith(("ld.", "atom.", "shfl.")) or line.lstrip().startswith("@")
            known = sources.get(statement[2], [])
            sources[statement[2]] = None if memory or known is None else known + found
    waiting, seen = [register], set()
    while waiting:
        name = waiting.pop()
        if name in seen or name.startswith(("%tid", "%ctaid")):
            continue
        seen.add(name)
        more = sources.get(name)
        if more is None:
            return False
        waiting += more
    return True
