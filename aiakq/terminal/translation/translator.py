"""Translation of a command line of another server to ``aiakq serve``, option by option."""

from __future__ import annotations

import json
from typing import Any

from aiakq.arguments.argument import Argument
from aiakq.arguments.commands import COMMANDS, CONFIG
from aiakq.arguments.spelling import merged, set_key
from aiakq.errors import AiakqError, error
from aiakq.terminal.translation import ollama
from aiakq.terminal.translation.checking import check_command, value_problem
from aiakq.terminal.translation.command import Found, find, find_words
from aiakq.terminal.translation.llama_server import LLAMA_SERVER
from aiakq.terminal.translation.reading import Given, read
from aiakq.terminal.translation.result import PLACEHOLDER, Note, Translation
from aiakq.terminal.translation.rules import (
    DIFFERS,
    IGNORED,
    KEPT,
    LOST,
    Assumed,
    Changed,
    ServerProgram,
    Unavailable,
    WithoutEffect,
)
from aiakq.terminal.translation.sglang import SGLANG
from aiakq.terminal.translation.shell import EXPANSION, shown
from aiakq.terminal.translation.vllm import vllm

#: Variables that programs below the server read, and that stay in front of the command.
_SHARED_VARIABLES = (
    "CUDA_",
    "NVIDIA_",
    "HF_",
    "HUGGING",
    "TRANSFORMERS_",
    "NCCL_",
    "GLOO_",
    "OMP_",
    "MKL_",
    "PYTORCH_",
)


def translate(words: list[str]) -> Translation:
    """Translate a command, given as one text or as words, or a Modelfile of Ollama, given as its path or text.

    Raises ``usage`` for a command that starts no known server, and for quotation marks without a second one.
    """
    if len(words) == 1 and (modelfile := ollama.modelfile(words[0])) is not None:
        return _Translator(ollama.OLLAMA, Found("ollama", [])).modelfile(modelfile)
    found = find(words[0]) if len(words) == 1 else find_words(words)
    others = {"sglang": SGLANG, "llama-server": LLAMA_SERVER, "ollama": ollama.OLLAMA}
    return _Translator(others.get(found.tool) or vllm(), found).result()


class _Translator:
    """Builds one translation."""

    def __init__(self, tool: ServerProgram, found: Found) -> None:
        self._tool, self._found = tool, found
        self._done = Translation(tool.name, tool.version)
        self._given: set[str] = set()
        self._places: dict[tuple[str, str], int] = {}  # of the note about an option, or about a key of one
        rows = (*COMMANDS["serve"].rows, CONFIG)
        self._rows = {flag: row for row in rows for flag in row.all_flags}
        self._rows |= {row.off_flag: row for row in rows if row.type is bool}

    def result(self) -> Translation:
        words = self._found.words
        if self._tool.name == "Ollama":
            words = self._ollama(words)
        given, unknown = read(words, self._tool)
        self._variables()
        for each in given:
            self._apply(each)
        for word in unknown:
            self._note(word, LOST, reason=f"{self._tool.name} {self._tool.version} has no such option or argument")
        for word, status, reason in self._found.notes:
            self._note(word, status, reason=reason)
        return self._finished()

    def modelfile(self, instructions: list[tuple[str, str, str]]) -> Translation:
        """Translate the instructions of a Modelfile: name of the option in the table, as written, value."""
        rules = self._tool.by_flag
        for flag, written, value in instructions:
            rule = rules.get(flag)
            if rule is None:
                self._note(f"{written} {value}"[:80], LOST, reason="there is no such instruction or parameter")
            else:
                self._apply(Given(rule, written, [value]))
        return self._finished()

    def _ollama(self, words: list[str]) -> list[str]:
        """Return the options of a command of Ollama; apply the Modelfile that it names."""
        command, rest = words[0] if words else "", words[1:]
        if command == "create":
            file = next((rest[i + 1] for i, word in enumerate(rest[:-1]) if word in ("-f", "--file")), "Modelfile")
            instructions = ollama.modelfile(file)
            if instructions is None:
                raise error("usage", reason=f"There is no Modelfile {file!r}.", hint="Translate the Modelfile itself.")
            self.modelfile(instructions)
            return []
        if command in ("serve", "start", "run"):
            if command != "run":
                self._note(f"ollama {command}", LOST, reason="it serves no certain model; give one to aiakq serve")
            return rest[:1] + [word for word in rest[1:] if word.startswith("-")]
        hint = "Translated are ollama run, ollama serve, ollama create, and Modelfiles."
        raise error("usage", reason=f"ollama {command} starts no server.", hint=hint)

    # --- variables ----------------------------------------------------------------------------------------------------

    def _variables(self) -> None:
        rules = self._tool.by_flag
        for name, value in self._found.variables.items():
            flag, reason = self._tool.variables.get(name, (None, ""))
            if flag in rules:
                rule = rules[flag]
                if rule.arity == "switch" and value.lower() in ("0", "false", "off", ""):
                    self._note(f"{name}={value}", IGNORED, reason="it is off")
                else:
                    self._apply(Given(rule, f"{name}=", [] if rule.arity == "switch" else [value]))
            elif flag is not None:
                status = LOST if flag == LOST else IGNORED
                self._note(f"{name}={value}", status, reason=reason)
            elif name in ("VLLM_API_KEY",) or name.startswith(_SHARED_VARIABLES):
                self._done.variables[name] = value
                self._note(f"{name}={value}", KEPT, f"{name}={value}")
            elif prefix := next(
                (p for p in ("VLLM_", "SGLANG_", "SGL_", "LLAMA_", "OLLAMA_", "GGML_") if name.startswith(p)), ""
            ):
                self._note(f"{name}={value}", IGNORED, reason=f"variables {prefix}* set up another program's own code")
            else:
                self._done.variables[name] = value
                self._note(f"{name}={value}", KEPT, f"{name}={value}")

    # --- options ------------------------------------------------------------------------------------------------------

    def _apply(self, given: Given) -> None:
        rule = given.rule
        text = " ".join([given.written, *given.values])
        if rule.flags:
            self._given.update(rule.flags)
        if given.is_off:
            self._apply_off(given, text)
        elif given.values and all(value in rule.silent for value in given.values):
            self._note(text, IGNORED, reason="it is the default")
        elif rule.status != KEPT:
            self._note(text, rule.status, reason=rule.reason)
        elif rule.to.startswith("MODEL"):
            self._model(given, text)
        else:
            self._keep(given, text)

    def _apply_off(self, given: Given, text: str) -> None:
        """Apply ``--no-x``, or a switch that is followed by false."""
        rule = given.rule
        if rule.status != KEPT:
            self._note(text, IGNORED, reason="it turns off what is not there")
        elif rule.to.startswith("--no-"):
            self._set(text, f"--{rule.to.removeprefix('--no-')}", [])
        else:
            row = self._rows.get(rule.to)
            if row is not None and row.type is bool:
                self._set(text, row.off_flag, [])
            else:
                self._note(text, IGNORED, reason="it turns off what is not on")

    def _model(self, given: Given, text: str) -> None:
        model = self._outside(given.values[0])
        try:
            converted = model if given.rule.convert is None else given.rule.convert(model)
        except Unavailable as reason:
            self._done.model = self._done.model or PLACEHOLDER
            self._note(text, LOST, reason=str(reason))
            return
        if self._done.model not in ("", PLACEHOLDER, converted):
            self._note(text, LOST, reason=f"the command names the model {self._done.model} too")
            return
        self._done.model = str(converted)
        self._note(text, KEPT, self._done.model, given.rule.reason)

    def _keep(self, given: Given, text: str) -> None:
        """Convert the values of an option, and set the option that replaces it."""
        rule, status, reason = given.rule, KEPT, given.rule.reason
        values: list[Any] = []
        try:
            if given.keys:
                whole = dict(given.keys)
                values = [whole if rule.convert is None else rule.convert(json.dumps(whole))]
            for value in [] if given.keys else given.values or filter(None, [rule.value]):
                converted: Any = self._outside(value)
                if rule.convert is not None and EXPANSION not in value:
                    try:
                        converted = rule.convert(converted)
                    except Changed as change:
                        converted, status, reason = change.value, DIFFERS, str(change)
                values += converted if isinstance(converted, list) else [converted]
        except Unavailable as problem:
            self._note(text, LOST, reason=str(problem))
            return
        except WithoutEffect as problem:
            self._note(text, IGNORED, reason=str(problem))
            return
        self._set(text, rule.to, values, key=rule.key, status=status, reason=reason, also=rule.also)

    def _set(
        self,
        text: str,
        to: str,
        values: list[Any],
        *,
        key: str = "",
        status: str = KEPT,
        reason: str = "",
        also: tuple[str, ...] = (),
    ) -> None:
        """Set the option ``to`` after a check of its value; note it."""
        row = self._rows.get(to)
        if row is None:
            raise KeyError(to)
        if key:
            value = values[0] if values else True
            set_key(self._done.objects.setdefault(to, {}), key, value, to)
            here = f"{to} {json.dumps({key: value})}"
        elif row.type is dict and values and isinstance(values[0], dict):
            self._done.objects[to] = merged(self._done.objects.get(to, {}), values[0])
            here = f"{to} {json.dumps(values[0])}"
        else:
            texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
            if (problem := value_problem(row, texts)) is not None:
                self._note(text, LOST, reason=problem)
                return
            if row.type is bool:
                self._done.options.pop(row.long_flag, None)
                self._done.options.pop(row.off_flag, None)
            before = self._done.options.get(to, []) if row.type in (list, tuple) else []
            self._done.options[to] = [*before, *texts]
            here = " ".join([to, *texts])
        for word in also:
            self._done.options.setdefault(word, [])
            here += f" {word}"
        self._overrule(row, key, text, shown(here))
        self._note(text, status, here, reason)
        self._places[row.name, key] = len(self._done.notes) - 1

    def _overrule(self, row: Argument, key: str, text: str, here: str) -> None:
        """Note that an earlier value of the same option has no effect."""
        place = self._places.pop((row.name, key), None)
        if place is None or row.type in (list, tuple) or (row.type is dict and not key):
            return
        before = self._done.notes[place]
        if before.here == here:
            return
        repeated = before.option.partition(" ")[0] == text.partition(" ")[0]
        reason = "a later value of the same option counts" if repeated else "a later option sets the same one here"
        self._done.notes[place] = Note(before.option, IGNORED if repeated else DIFFERS, "", reason)

    def _note(self, option: str, status: str, here: str = "", reason: str = "") -> None:
        self._done.notes.append(Note(shown(option), status, shown(here), shown(reason)))

    # --- containers, defaults, and the check --------------------------------------------------------------------------

    def _outside(self, value: str) -> str:
        """Return the path outside a container of a path inside."""
        for inside, outside in self._found.folders.items():
            if value == inside or value.startswith(f"{inside}/"):
                return outside + value.removeprefix(inside)
        return value

    def _finished(self) -> Translation:
        done = self._done
        self._publish()
        for assumed in self._tool.assumed:
            self._assume(assumed)
        if not done.model:
            done.model = PLACEHOLDER
            if done.is_complete:
                self._note("", LOST, PLACEHOLDER, "the command names no model")
        host, keys = done.options.get("--host", [""])[0], {"--api-key", "--api-key-file"} & done.options.keys()
        if host not in ("", "127.0.0.1", "localhost", "::1") and not keys and "VLLM_API_KEY" not in done.variables:
            done.options.setdefault("--allow-no-key", [])
            self._note(
                "",
                KEPT,
                "--allow-no-key",
                f"{self._tool.name} needs no key at any address; better, give --api-key-file",
            )
        self._check()
        return done

    def _publish(self) -> None:
        """Listen where a container publishes its port."""
        ports = self._found.ports
        inside = self._done.options.get("--port", [self._default_port()])[0]
        if inside in ports:
            address, port = ports[inside]
            self._done.options["--host"] = [address or "0.0.0.0"]
            self._done.options["--port"] = [port]
            self._note(
                f"-p {port}:{inside}", KEPT, f"--host {address or '0.0.0.0'} --port {port}", "the container's port"
            )

    def _default_port(self) -> str:
        return next((str(each.value) for each in self._tool.assumed if each.to == "--port"), "8000")

    def _assume(self, assumed: Assumed) -> None:
        done = self._done
        if self._given.intersection(assumed.unless):
            return
        if assumed.key:
            held = done.objects.get(assumed.to, {})
            if assumed.key in held:
                return
            done.objects.setdefault(assumed.to, {})[assumed.key] = assumed.value
            here = f"{assumed.to} {json.dumps({assumed.key: assumed.value})}"
        elif assumed.to in done.options or (assumed.to == "--host" and "--uds" in done.options):
            return
        else:
            done.options[assumed.to] = [] if assumed.value is None else [str(assumed.value)]
            here = f"{assumed.to} {'' if assumed.value is None else assumed.value}".strip()
        self._note("", KEPT, here, assumed.reason)

    def _check(self) -> None:
        """Note what the parser of ``aiakq serve`` does not accept."""
        try:
            check_command(self._done.words[2:])
        except AiakqError as problem:
            self._note("", LOST, reason=f"aiakq serve refuses the options together: {problem.message}")
