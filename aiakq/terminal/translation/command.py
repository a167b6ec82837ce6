"""Which server a command line starts, in or outside a container, and with which words and variables."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from aiakq.errors import AiakqError, error
from aiakq.terminal.translation.rules import DIFFERS, IGNORED, LOST
from aiakq.terminal.translation.shell import Statement, statements

#: Modules and programs of the servers -> name of the table.
_MODULES = {
    "vllm.entrypoints.openai.api_server": "vllm",
    "vllm.entrypoints.api_server": "vllm",
    "sglang.launch_server": "sglang",
}
_DEMO = "vllm.entrypoints.api_server"
#: Words in front of a command that only say how it runs.
_AROUND = ("sudo", "nohup", "time", "exec", "env", "uv", "uvx", "poetry", "pdm", "run", "stdbuf", "caffeinate", "then")
#: Options of docker run without a value.
_DOCKER_SWITCHES = frozenset(
    "-d --detach -i --interactive -t --tty --rm --init --privileged --read-only -P --publish-all --no-healthcheck "
    "--oom-kill-disable -q --quiet --sig-proxy --disable-content-trust --replace --tls-verify".split()
)
#: A container is replaced by a process of the same machine, with its networks, files and memory.
_NO_CONTAINER = "there is no container; the server uses this machine's files, network and memory"


@dataclass
class Found:
    """A command of a server.

    tool       name of its table.
    words      its options and arguments.
    variables  of its environment.
    notes      (word, status, reason) of what is not an option of the server.
    ports      port inside a container -> (address outside or "", port outside).
    folders    path inside a container -> path outside.
    """

    tool: str
    words: list[str]
    variables: dict[str, str] = field(default_factory=dict)
    notes: list[tuple[str, str, str]] = field(default_factory=list)
    ports: dict[str, tuple[str, str]] = field(default_factory=dict)
    folders: dict[str, str] = field(default_factory=dict)


def find(text: str) -> Found:
    """Return the command of a server in a text. Raises ``usage`` if there is none, or if it starts no server."""
    return _first(statements(text))


def find_words(words: list[str]) -> Found:
    """Return the command of a server that a shell has already split into words. Raises ``usage``."""
    return _first([Statement(words)])


def _first(commands: list[Statement]) -> Found:
    for command in commands:
        found = _server(command)
        if found is not None:
            return found
    named = " ".join(commands[0].words[:3]) if commands else ""
    raise _unknown(named)


def _unknown(named: str) -> AiakqError:
    hint = (
        "Known are vllm serve, python -m vllm.entrypoints.openai.api_server, docker run, sglang, llama-server, ollama."
    )
    return error("usage", reason=f"{named[:80]!r} starts no server that is known.", hint=hint)


def _server(command: Statement) -> Found | None:
    words = _unwrapped(list(command.words))
    if not words:
        return None
    program, rest = re.sub(r"\.exe$", "", re.split(r"[/\\]", words[0])[-1]), words[1:]
    if program in ("bash", "sh", "zsh") and (script := _script(rest)):
        inner = _first(statements(script))
        return replace(inner, variables={**command.variables, **inner.variables})
    if program in ("docker", "podman", "nerdctl"):
        return _container(rest, command.variables)
    tool = _tool(program, rest)
    if tool is None:
        return None
    name, rest = tool
    notes = [(_DEMO, DIFFERS, "it has a route /generate, and not the OpenAI API")] if _DEMO in words else []
    return Found(name, rest, dict(command.variables), notes)


def _tool(program: str, rest: list[str]) -> tuple[str, list[str]] | None:
    """Return the table and the options of a program."""
    if re.fullmatch(r"python(3(\.\d+)?)?", program):
        return _python(rest)
    if program == "vllm":
        return _subcommand("vllm", "vllm serve", rest, ("serve",))
    if program == "sglang":
        return _subcommand("sglang", "sglang serve", rest, ("serve",))
    if program in ("llama-server", "llama-cpp-server") or (program == "server" and "-m" in rest):
        return "llama-server", rest
    if program == "ollama":
        return "ollama", rest
    return None


def _subcommand(name: str, example: str, rest: list[str], known: tuple[str, ...]) -> tuple[str, list[str]]:
    if rest[:1] and rest[0] in known:
        return name, rest[1:]
    raise error("usage", reason=f"{' '.join([name, *rest[:1]])} starts no server.", hint=f"Translated is {example}.")


def _python(rest: list[str]) -> tuple[str, list[str]] | None:
    for position, word in enumerate(rest):
        if word == "-m":
            module = rest[position + 1] if position + 1 < len(rest) else ""
            if module in _MODULES:
                return _MODULES[module], rest[position + 2 :]
            if module in ("vllm", "vllm.entrypoints.cli.main") and rest[position + 2 : position + 3] == ["serve"]:
                return "vllm", rest[position + 3 :]
            return None
        if word.endswith(".py"):
            name = re.split(r"[/\\]", word)[-1]
            known = {"api_server.py": "vllm", "launch_server.py": "sglang"}.get(name)
            return (known, rest[position + 1 :]) if known else None
        if not word.startswith("-"):
            return None
    return None


def _unwrapped(words: list[str]) -> list[str]:
    """Leave out programs that run another one, with their options."""
    while words:
        if words[0] in _AROUND:
            words = words[1:]
            while words and (words[0].startswith("-") or re.fullmatch(r"[A-Za-z_]\w*=.*", words[0])):
                words = words[1:]
        elif words[0] == "start":
            words = words[1:]
            while words and (not words[0] or words[0].startswith("/")):
                words = words[1:]
        elif words[0] in ("numactl", "taskset"):
            words = words[1:]
            while words and (words[0].startswith("-") or re.fullmatch(r"[0-9a-fx,\- ]+", words[0])):
                words = words[1:]
        else:
            break
    return words


def _script(words: list[str]) -> str | None:
    """Return the text after ``-c``."""
    for position, word in enumerate(words[:-1]):
        if re.fullmatch(r"-[a-z]*c", word):
            return words[position + 1]
    return None


# --- containers -------------------------------------------------------------------------------------------------------


def _container(words: list[str], variables: dict[str, str]) -> Found | None:
    while words and words[0] != "run":
        if not words[0].startswith("-") and words[0] not in ("container",):
            raise error("usage", reason=f"docker {words[0]} starts no server.", hint="Translated is docker run.")
        words = words[1:]
    words = words[1:]
    options: list[tuple[str, str]] = []
    while words and words[0].startswith("-"):
        name, equals, value = words.pop(0).partition("=")
        if name in _DOCKER_SWITCHES or re.fullmatch(r"-[ditP]+", name):
            options.append((name, ""))
        elif equals:
            options.append((name, value))
        elif re.fullmatch(r"-[pvewu].+", name):
            options.append((name[:2], name[2:]))
        else:
            options.append((name, words.pop(0) if words else ""))
    if not words:
        raise error("usage", reason="docker run names no image.", hint="Give the whole command.")
    image, rest = words[0], words[1:]
    entry = next((value for name, value in options if name == "--entrypoint"), None)
    found = _of_image(image, [entry, *rest] if entry else rest)
    found.variables = {**variables, **found.variables}
    for name, value in options:
        _apply(found, name, value)
    return found


def _of_image(image: str, words: list[str]) -> Found:
    """Return the command of an image: the words after it, or that of the image itself with them."""
    if words and not words[0].startswith("-"):
        try:
            inner = _server(Statement(words))
        except AiakqError:
            if "ollama" not in image:
                raise
            inner = None
        if inner is not None:
            return inner
    name = image.rpartition("/")[2]
    if "vllm" in name or "/vllm" in image:
        return Found("vllm", words[1:] if words[:1] == ["serve"] else words)
    if "sglang" in image:
        return Found("sglang", words[1:] if words[:1] == ["serve"] else words)
    if "llama.cpp" in image:
        return Found("llama-server", words[1:] if words[:1] in (["-s"], ["--server"]) else words)
    if "ollama" in image:
        return Found("ollama", words or ["serve"])
    raise _unknown(f"docker run {image}")


def _apply(found: Found, name: str, value: str) -> None:
    """Carry an option of docker run over to ``found``."""
    word = f"{name} {value}".strip()
    if name in ("-e", "--env"):
        key, equals, text = value.partition("=")
        if equals:
            found.variables[key] = text
        else:
            found.notes.append((word, IGNORED, "the server reads this machine's environment"))
    elif name in ("-p", "--publish"):
        parts = value.split("/")[0].rsplit(":", 2)
        if len(parts) >= 2:
            found.ports[parts[-1]] = (parts[0] if len(parts) == 3 else "", parts[-2])
    elif name in ("-v", "--volume") and value.count(":"):
        outside, inside = value.split(":")[:2]
        found.folders[inside.rstrip("/")] = outside.rstrip("/")
    elif name == "--mount":
        mount = {part.partition("=")[0]: part.partition("=")[2] for part in value.split(",")}
        target = mount.get("target") or mount.get("dst") or mount.get("destination")
        source = mount.get("source") or mount.get("src")
        if target and source:
            found.folders[target.rstrip("/")] = source.rstrip("/")
    elif name == "--gpus" and (devices := re.search(r"device=([\w,-]+)", value)):
        found.variables["CUDA_VISIBLE_DEVICES"] = devices[1]
    elif name == "--env-file":
        found.notes.append((word, LOST, "variables of a file are not read; set them before the command"))
    elif name not in ("--entrypoint", "--gpus"):
        found.notes.append((word, IGNORED, _NO_CONTAINER))
