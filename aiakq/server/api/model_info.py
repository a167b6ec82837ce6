"""ModelInfo: the served model as clients see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from aiakq.arguments.server import ServerArguments
from aiakq.errors import error
from aiakq.runtime.protocol.adapters import AdapterRef
from aiakq.runtime.protocol.limits import ModelLimits
from aiakq.server.api.adapters import AdapterRegistry
from aiakq.server.api.fingerprint import fingerprint


@dataclass(frozen=True)
class ModelInfo:
    """The model as clients see it.

    names             names accepted in requests; responses use the first.
    path              model path as given on the command line.
    dtype             dtype of activations.
    limits            limits for the validation of requests.
    default_sampling  sampling values of generation_config.json.
    response_role     role of chat responses.
    adapters          LoRA adapters that requests may name as their model.
    fingerprint       the system_fingerprint, equal for equal models, dtypes and versions.
    """

    names: tuple[str, ...]
    path: str
    dtype: str
    limits: ModelLimits
    default_sampling: Mapping[str, object]
    response_role: str
    adapters: AdapterRegistry = field(default_factory=AdapterRegistry)
    fingerprint: str = ""

    @staticmethod
    def from_args(
        args: ServerArguments, dtype: str, limits: ModelLimits, default_sampling: Mapping[str, object]
    ) -> ModelInfo:
        """Return the model of ``args``."""
        path, names = args.model or "", tuple(args.served_names)
        return ModelInfo(
            names,
            path,
            dtype,
            limits,
            default_sampling,
            response_role=args.response_role,
            fingerprint=fingerprint(names[0], Path(path), dtype),
        )

    def check_name(self, name: str | None) -> None:
        """Raise ``unknown_model`` unless ``name`` is served. None selects the model itself."""
        if name is not None and name not in self.names and self.adapters.get(name) is None:
            raise error("unknown_model", param="model", name=name[:64], known=", ".join(self.all_names))

    @property
    def all_names(self) -> list[str]:
        """Names of the model, then of its adapters."""
        return [*self.names, *self.adapters.names]

    def adapter(self, name: str | None) -> AdapterRef | None:
        """Return the adapter for requests that name the model ``name``; None for the model itself.

        Raises ``unknown_model``: an adapter may have been unloaded since the request was read.
        """
        self.check_name(name)
        return self.adapters.get(name)

    def shown_name(self, name: str | None) -> str:
        """Return the model name in responses to a request for the model ``name``."""
        return self.names[0] if name is None or name in self.names else name
