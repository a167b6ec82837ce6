"""The Ray cluster: finding or starting one, and reserving a place for every rank."""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aiakq.errors import error

logger = logging.getLogger("aiakq.runtime")

#: Seconds for a cluster to have room for all ranks, which may have to start nodes first, and after how many to say so.
PLACEMENT_SECONDS, PATIENCE_SECONDS = 300.0, 10.0
#: Processors that each rank reserves and computes with.
CPUS_VARIABLE = "AIAKQ_RAY_CPUS_PER_RANK"
#: The id, in hexadecimal digits, of a placement group to use, where the engine is not in it itself.
GROUP_VARIABLE = "AIAKQ_RAY_PLACEMENT_GROUP"
#: Ray tells nobody how it is used, and nothing about GPUs that are hidden from processes without any.
_SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
#: Bytes for Ray's own objects; ranks have none.
_OBJECT_STORE_BYTES = 80 << 20


@dataclass(frozen=True)
class Slot:
    """The place of one rank.

    bundle   of the placement group; None: outside of it.
    host     the address of its node.
    threads  that it may compute with.
    """

    bundle: int | None
    host: str
    threads: int


def import_ray() -> Any:
    """Ray. Raises ``ray_missing``."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        import ray
        import ray.util.placement_group
        import ray.util.scheduling_strategies
    except ImportError:
        raise error("ray_missing") from None
    return ray


class Session:
    """This process's connection to a cluster, which lasts as long as the process.

    ray  the module.
    """

    def __init__(self) -> None:
        """Use the connection that there is, or connect. Raises ``ray_missing`` and ``ray_unavailable``."""
        self.ray = import_ray()
        _join(self.ray)
        self._job = self.ray.get_runtime_context().get_job_id()

    @property
    def is_current(self) -> bool:
        """Whether the connection has not ended, nor been replaced; else Ray's functions would start another cluster."""
        return self.ray.is_initialized() and self.ray.get_runtime_context().get_job_id() == self._job


def _join(ray: Any) -> None:
    """Connect to the cluster of RAY_ADDRESS or of this machine, or else start one of this machine alone."""
    if ray.is_initialized():
        if ray.util.client.ray.is_connected():
            reason = "this process uses it through Ray Client, and rank 0 has to run on a node of the cluster"
            raise error("ray_unavailable", reason=reason)
        return
    address = os.environ.get("RAY_ADDRESS") or "auto"
    if "://" in address:
        raise error(
            "ray_unavailable", reason=f"{address} is not the address of a node of the cluster, like 10.0.0.1:6379"
        )
    quiet = {"logging_level": logging.ERROR, "log_to_driver": True}
    try:
        try:
            ray.init(address=address, **quiet)
        except ConnectionError:
            if address != "auto":
                raise
            local = {"include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
            ray.init(address="local", _node_ip_address="127.0.0.1", **local, **quiet)
    except Exception as failure:
        reason = (str(failure).strip().splitlines() or [type(failure).__name__])[0].rstrip(".")
        raise error("ray_unavailable", reason=f"{address}: {reason}") from failure


class Placement:
    """Places for ``count`` ranks, ``size`` of which share each layer; rank 0 is this process.

    slots  [count].
    group  the placement group.
    """

    def __init__(self, session: Session, count: int, size: int) -> None:
        """Reserve them, or find those that this process was given. Raises ``ray_resources``, ``ray_unavailable``."""
        self._session, self._ray = session, session.ray
        given = _given_group(self._ray)
        self._is_own = given is None
        self.group = given or self._reserve(count, size)
        try:
            self.slots = self._order(count)
        except BaseException:
            self.close()
            raise

    def strategy(self, slot: Slot) -> Any:
        """How Ray schedules what belongs into ``slot``."""
        scheduling = self._ray.util.scheduling_strategies
        return scheduling.PlacementGroupSchedulingStrategy(self.group, slot.bundle)

    def close(self) -> None:
        """Give the places back, unless they were given to this process."""
        if self._is_own and self._session.is_current:
            with contextlib.suppress(Exception):  # the cluster is gone
                self._ray.util.remove_placement_group(self.group)

    def _reserve(self, count: int, size: int) -> Any:
        nodes = _nodes(self._ray)
        here = self._ray.get_runtime_context().get_node_id()
        own = nodes.get(here, {})
        cpus = cpus_per_rank([int(node.get("CPU", 0)) for node in nodes.values()], int(own.get("CPU", 0)), count, size)
        bundles: list[dict[str, float]] = [{"CPU": cpus}] * count
        if own.get("CPU", 0) >= cpus:  # else rank 0 takes nothing that Ray distributes
            pin = next((name for name in own if name.startswith("node:") and "__" not in name), None)
            bundles[0] = {"CPU": cpus} | ({} if pin is None else {pin: 0.001})
        else:
            bundles = bundles[1:]
        group = self._ray.util.placement_group(bundles, strategy="PACK")
        if group.wait(min(PATIENCE_SECONDS, PLACEMENT_SECONDS)):
            return group
        needed = f"{len(bundles)} x {cpus} CPU"
        if PLACEMENT_SECONDS > PATIENCE_SECONDS:
            logger.warning("Ray has not placed the processes yet: needed are %s; free are %s", needed, self._free())
            if group.wait(PLACEMENT_SECONDS - PATIENCE_SECONDS):
                return group
        free = self._free()
        self._ray.util.remove_placement_group(group)
        raise error("ray_resources", count=count, limit=PLACEMENT_SECONDS, needed=needed, free=free)

    def _free(self) -> str:
        nodes = _nodes(self._ray)
        total = int(sum(node.get("CPU", 0) for node in nodes.values()))
        free = int(self._ray.available_resources().get("CPU", 0))
        return f"{free} of {total} CPU on {len(nodes)} node{'s' if len(nodes) != 1 else ''}"

    def _order(self, count: int) -> list[Slot]:
        """Bundles of one node, and so the ranks of one stage as far as possible, next to each other; rank 0's first."""
        specs = self.group.bundle_specs
        here = self._ray.get_runtime_context().get_node_id()
        addresses = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in self._ray.nodes()}
        own = Slot(None, addresses.get(here) or str(self._ray.util.get_node_ip_address()), 0)
        nodes = self._ray.util.placement_group_table(self.group)["bundles_to_node_id"]
        has_own = not self._is_own or len(specs) == count
        needed = count if has_own else count - 1
        if len(specs) < needed:
            found = f"{len(specs)} bundles of the placement group that this process is in"
            raise error("ray_resources", count=count, limit=0, needed=f"{needed} bundles", free=found)
        others = sorted(range(1 if has_own else 0, needed), key=lambda bundle: (nodes[bundle] != here, nodes[bundle]))
        threads = [max(1, int(spec.get("CPU", 1))) for spec in specs]
        slots = [Slot(bundle, addresses[nodes[bundle]], threads[bundle]) for bundle in others]
        return [Slot(0 if has_own else None, own.host, threads[0]), *slots]

    def ranks_on(self, host: str) -> int:
        """How many ranks are on the machine with an address."""
        return Counter(slot.host for slot in self.slots)[host]


def cpus_per_rank(nodes: Sequence[int], own: int, count: int, size: int) -> int:
    """Processors that each of ``count`` ranks reserves: so many that a stage, of ``size`` ranks, fills one node, or as
    many as all ranks find room with; AIAKQ_RAY_CPUS_PER_RANK if that is set.

    nodes  processors of each node; own: those of rank 0's.
    """
    given = os.environ.get(CPUS_VARIABLE, "")
    if given:
        if not given.isdecimal() or int(given) < 1:
            hint = "It is how many processors each rank has."
            raise error("bad_option", option=CPUS_VARIABLE, value=given, expected="a whole number above 0", hint=hint)
        return int(given)
    wanted = max(1, (own or max(nodes, default=1)) // size)
    placed = count if own else count - 1
    fitting = (cpus for cpus in range(wanted, 0, -1) if sum(node // cpus for node in nodes) >= placed)
    return next(fitting, 1)


def _nodes(ray: Any) -> dict[str, dict[str, float]]:
    """Resources of every node that is there."""
    return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}


def _given_group(ray: Any) -> Any:
    """The placement group that this process, or the one that started it, is in; None if there is none."""
    group = ray.util.get_current_placement_group()
    name = os.environ.get(GROUP_VARIABLE)
    if group is not None or not name:
        return group
    from ray.util.placement_group import PlacementGroup

    try:
        found = PlacementGroup(ray.PlacementGroupID(bytes.fromhex(name)))
        if not found.wait(PATIENCE_SECONDS):
            raise ValueError("it is not ready")
    except Exception as failure:
        raise error("ray_unavailable", reason=f"{GROUP_VARIABLE}={name} names no placement group: {failure}") from None
    return found
