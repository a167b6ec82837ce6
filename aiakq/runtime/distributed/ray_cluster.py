"""The Ray cluster: connects to one or starts one, and reserves a slot for every rank."""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aiakq.errors import error, first_line

logger = logging.getLogger("aiakq.runtime")

#: Time limit in seconds until the cluster has room for all ranks (it may have to start nodes), and seconds until the
#: first warning.
PLACEMENT_SECONDS, PATIENCE_SECONDS = 300.0, 10.0
#: Number of processors that each rank reserves and uses.
CPUS_VARIABLE = "AIAKQ_RAY_CPUS_PER_RANK"
#: Hexadecimal id of the placement group to use, where the engine's process is not in it itself.
GROUP_VARIABLE = "AIAKQ_RAY_PLACEMENT_GROUP"
#: Disables Ray's usage statistics, and its override of CUDA_VISIBLE_DEVICES in processes without GPUs.
_SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
#: Size in bytes of Ray's object store, which ranks do not use.
_OBJECT_STORE_BYTES = 80 << 20


@dataclass(frozen=True)
class Slot:
    """The resources reserved for one rank.

    bundle   index of its bundle in the placement group; None if it is outside the group.
    host     address of its node.
    threads  number of threads it may use.
    """

    bundle: int | None
    host: str
    threads: int


def import_ray() -> Any:
    """Import and return the ray module. Raises ``ray_missing``."""
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
    """This process's connection to a Ray cluster, which stays open until the process exits.

    ray  the ray module.
    """

    def __init__(self) -> None:
        """Use the existing connection, or connect. Raises ``ray_missing`` and ``ray_unavailable``."""
        self.ray = import_ray()
        _join(self.ray)
        self._job = self.ray.get_runtime_context().get_job_id()

    @property
    def is_current(self) -> bool:
        """Whether this is still the process's connection; if it is not, calling Ray could start another cluster."""
        return bool(self.ray.is_initialized() and self.ray.get_runtime_context().get_job_id() == self._job)


def _join(ray: Any) -> None:
    """Connect to the cluster at RAY_ADDRESS or the one running on this machine, or start a local one."""
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
        raise error("ray_unavailable", reason=f"{address}: {first_line(failure)}") from failure


class Placement:
    """Slots for ``count`` ranks in stages of ``size`` ranks; rank 0 is this process.

    slots  slot of each rank, [count].
    group  Ray's placement group.
    """

    def __init__(self, session: Session, count: int, size: int) -> None:
        """Reserve a placement group, or use the one that this process was given.

        Raises ``ray_resources`` and ``ray_unavailable``.
        """
        self._session, self._ray = session, session.ray
        group = _given_group(self._ray)
        self._is_own = group is None
        self.group = group or self._reserve(count, size)
        try:
            self.slots = self._order(count)
        except BaseException:
            self.close()
            raise

    def strategy(self, slot: Slot) -> object:
        """Return Ray's scheduling strategy for an actor in ``slot``."""
        scheduling = self._ray.util.scheduling_strategies
        return scheduling.PlacementGroupSchedulingStrategy(self.group, slot.bundle)

    def close(self) -> None:
        """Remove the placement group if this object has reserved it."""
        if self._is_own and self._session.is_current:
            with contextlib.suppress(Exception):  # the cluster may be gone
                self._ray.util.remove_placement_group(self.group)

    def _reserve(self, count: int, size: int) -> Any:
        nodes = _nodes(self._ray)
        here = self._ray.get_runtime_context().get_node_id()
        own = nodes.get(here, {})
        cpus = cpus_per_rank([int(node.get("CPU", 0)) for node in nodes.values()], int(own.get("CPU", 0)), count, size)
        bundles: list[dict[str, float]] = [{"CPU": cpus}] * count
        if own.get("CPU", 0) >= cpus:  # otherwise rank 0 runs outside the placement group
            pin = next((name for name in own if name.startswith("node:") and "__" not in name), None)
            bundles[0] = {"CPU": cpus} | ({} if pin is None else {pin: 0.001})
        else:
            bundles = bundles[1:]
        group = self._ray.util.placement_group(bundles, strategy="PACK")
        if group.wait(min(PATIENCE_SECONDS, PLACEMENT_SECONDS)):
            return group
        needed = f"{len(bundles)} x {cpus} CPU"
        if PLACEMENT_SECONDS > PATIENCE_SECONDS:
            logger.warning("Ray has not placed the processes yet: they need %s; %s are free", needed, self._free())
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
        """Return the slots in rank order: rank 0's first, the others grouped by node to keep stages on one node."""
        specs = self.group.bundle_specs
        here = self._ray.get_runtime_context().get_node_id()
        addresses = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in self._ray.nodes()}
        own = Slot(None, addresses.get(here) or str(self._ray.util.get_node_ip_address()), 0)
        nodes = self._ray.util.placement_group_table(self.group)["bundles_to_node_id"]
        has_own = not self._is_own or len(specs) == count
        needed = count if has_own else count - 1
        if len(specs) < needed:
            free = f"{len(specs)} bundles in the placement group of this process"
            raise error("ray_resources", count=count, limit=0, needed=f"{needed} bundles", free=free)
        others = sorted(range(1 if has_own else 0, needed), key=lambda bundle: (nodes[bundle] != here, nodes[bundle]))
        threads = [max(1, int(spec.get("CPU", 1))) for spec in specs]
        slots = [Slot(bundle, addresses[nodes[bundle]], threads[bundle]) for bundle in others]
        return [Slot(0 if has_own else None, own.host, threads[0]), *slots]

    def ranks_on(self, host: str) -> int:
        """Return the number of ranks on the node with address ``host``."""
        return Counter(slot.host for slot in self.slots)[host]


def cpus_per_rank(nodes: Sequence[int], own: int, count: int, size: int) -> int:
    """Return the number of processors that each of ``count`` ranks reserves.

    It is AIAKQ_RAY_CPUS_PER_RANK if that is set. Otherwise it is the number with which a stage of ``size`` ranks fills
    a node, reduced until all ranks fit into the cluster.

    nodes  number of processors of each node.
    own    number of processors of rank 0's node.
    """
    value = os.environ.get(CPUS_VARIABLE, "")
    if value:
        if not value.isdecimal() or int(value) < 1:
            hint = "It is the number of processors of each rank."
            raise error("bad_option", option=CPUS_VARIABLE, value=value, expected="a whole number above 0", hint=hint)
        return int(value)
    wanted = max(1, (own or max(nodes, default=1)) // size)
    placed = count if own else count - 1
    fitting = (cpus for cpus in range(wanted, 0, -1) if sum(node // cpus for node in nodes) >= placed)
    return next(fitting, 1)


def _nodes(ray: Any) -> dict[str, dict[str, float]]:
    """Return the resources of every node that is alive, by node id."""
    return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}


def _given_group(ray: Any) -> Any:
    """Return the placement group that this process is in or that GROUP_VARIABLE names; None if there is none."""
    group = ray.util.get_current_placement_group()
    name = os.environ.get(GROUP_VARIABLE)
    if group is not None or not name:
        return group
    from ray.util.placement_group import PlacementGroup

    try:
        group = PlacementGroup(ray.PlacementGroupID(bytes.fromhex(name)))
        if not group.wait(PATIENCE_SECONDS):
            raise ValueError("it is not ready")
    except Exception as failure:
        raise error("ray_unavailable", reason=f"{GROUP_VARIABLE}={name} names no placement group: {failure}") from None
    return group
