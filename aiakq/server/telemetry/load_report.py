"""The load of the server in a header of responses: ORCA (Open Request Cost Aggregation), which load balancers read."""

from __future__ import annotations

import json
from collections.abc import Mapping

#: Header of a request that asks for the report, and that of the response.
FORMAT_HEADER, REPORT_HEADER = "endpoint-load-metrics-format", "endpoint-load-metrics"


def load_report(format: str, metrics: Mapping[str, float]) -> str | None:
    """Return the header for ``metrics`` in ``format``, TEXT or JSON in any case; None for any other format."""
    if format.upper() == "TEXT":
        return "TEXT " + ", ".join(f"named_metrics.{name}={float(value)}" for name, value in metrics.items())
    if format.upper() == "JSON":
        return "JSON " + json.dumps({"named_metrics": {name: float(value) for name, value in metrics.items()}})
    return None
