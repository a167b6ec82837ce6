"""YAML of files that a user or a model brings: plain values without aliases, which could stand for any amount."""

from __future__ import annotations


class InvalidYaml(Exception):
    """Raised for text that is not YAML, with the reason, like ``line 3 is not valid YAML``."""


def parse_yaml(text: str) -> object:
    """Return the value of a YAML document. Raises InvalidYaml, also for aliases."""
    import yaml

    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                raise InvalidYaml(f"line {event.start_mark.line + 1} has an alias, which is not allowed")
        value: object = yaml.safe_load(text)
    except yaml.YAMLError as problem:
        mark = getattr(problem, "problem_mark", None)
        raise InvalidYaml(f"line {mark.line + 1} is not valid YAML" if mark else "it is not valid YAML") from None
    except (RecursionError, ValueError, TypeError):
        raise InvalidYaml("it is not valid YAML") from None
    return value
