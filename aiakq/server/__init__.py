"""The server: an OpenAI-compatible HTTP API, with the engine in a separate process.

Imports inside the server go one way (``.importlinter.toml``):

    background, launch  ->  api  ->  http, process  ->  telemetry, errors

``http`` and ``process`` do not import each other: ``http`` knows nothing of engines and tokens, ``process`` nothing of
HTTP. What they exchange is wired up in ``api`` and ``launch``.
"""
