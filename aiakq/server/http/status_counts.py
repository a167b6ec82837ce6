"""StatusCounts: count the answers of the server by path, method and status."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aiakq.server.http.root_path import route_path

#: Called with the method, the path of a route ("none" for others) and the class of the status, such as 2xx.
OnStatus = Callable[[str, str, str], None]
METHODS = frozenset({"GET", "HEAD", "OPTIONS", "POST"})
#: Paths that vLLM does not count: those that are asked every few seconds, whatever the load.
UNCOUNTED = frozenset({"/metrics", "/health", "/live", "/ready", "/load", "/ping", "/version", "/server_info"})


class StatusCounts:
    """Middleware around everything that answers, also access control and what answers while the model is loading.

    paths      those of the routes: other paths, of which clients may invent any number, are counted as one.
    on_status  called with each answer.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self.app = app
        self.paths: frozenset[str] = frozenset()
        self.on_status: OnStatus | None = None
        self._root_path = root_path

    def start(self, paths: Iterable[str], on_status: OnStatus) -> None:
        """Count from now on."""
        self.paths, self.on_status = frozenset(paths), on_status

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.on_status is None:
            await self.app(scope, receive, send)
            return

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._count(scope, message["status"])
            await send(message)

        await self.app(scope, receive, counting)

    def _count(self, scope: Scope, status: int) -> None:
        assert self.on_status is not None
        path = route_path(scope["path"], self._root_path)
        path = path.removesuffix("/") or "/"
        if path not in UNCOUNTED:
            method = scope["method"] if scope["method"] in METHODS else "other"
            self.on_status(method, path if path in self.paths else "none", f"{status // 100}xx")
