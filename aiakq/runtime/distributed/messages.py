"""Control messages between rank 0 and the other ranks, the records of a channel (system/channel.py).

Rank 0 runs the engine; the other ranks execute the steps that it sends.
"""

from __future__ import annotations

import msgspec

from aiakq.arguments.engine import EngineArguments
from aiakq.runtime.protocol.command import Preparation
from aiakq.runtime.protocol.step import StepBatch, StepResult
from aiakq.system.channel import Channel


class Load(msgspec.Struct, tag="load"):
    """The first message to a rank: what to load, and its position among the ranks.

    arguments   engine arguments.
    rank        global rank; ranks are numbered stage by stage.
    size        number of ranks per stage (tensor parallel size).
    num_stages  number of stages (pipeline parallel size).
    host_ranks  number of ranks on this machine.
    transport   transport of the collectives of the stage; see collectives.py.
    memory      inherited descriptor of the memory that the stage shares; None if the stage has one rank.
    gpu         GPU index in this process; None if the rank computes on the CPU.
    link_in     inherited descriptor of the socket from the previous stage; None in the first stage.
    link_out    inherited descriptor of the socket to the next stage; None in the last stage.
    threads     number of threads of this rank.
    cpus        processors that this rank may use; empty for all.
    time_limit  time limit of a step in seconds.
    addresses   addresses of the listeners of all ranks, if descriptors cannot be inherited.
    """

    arguments: EngineArguments
    rank: int
    size: int
    num_stages: int
    host_ranks: int
    transport: str
    threads: int
    time_limit: float
    memory: int | None = None
    gpu: int | None = None
    link_in: int | None = None
    link_out: int | None = None
    cpus: list[int] = []
    addresses: list[tuple[str, int]] = []

    @property
    def stage(self) -> int:
        """Index of the rank's stage."""
        return self.rank // self.size

    @property
    def stage_rank(self) -> int:
        """Rank within the stage (tensor parallel rank)."""
        return self.rank % self.size


class Listening(msgspec.Struct, tag="listening"):
    """First message of a rank that inherits no descriptors: other ranks can connect to it at this address."""

    host: str
    port: int


class RankLoaded(msgspec.Struct, tag="loaded"):
    """The rank has loaded the model.

    version     version of aiakq, which must equal rank 0's.
    checkpoint  ``checkpoint_digest`` of the loaded files, which must equal rank 0's.
    sharing     description of how layers are sharded, which must be equal for all ranks of a stage.
    """

    version: str
    checkpoint: str
    sharing: str


class CountPages(msgspec.Struct, tag="count"):
    """Request for the number of KV cache pages that fit into the rank's free memory; answered with ``PagesCounted``."""


class PagesCounted(msgspec.Struct, tag="counted"):
    """The number of KV cache pages that fit into the rank's free memory."""

    pages: int


class Configure(msgspec.Struct, tag="configure"):
    """The sizes that rank 0 has chosen for all ranks; answered with ``RankReady``.

    num_pages  pages of the KV cache.
    num_slots  slots of recurrent states.
    tokens     maximum number of tokens in a step.
    rows       maximum number of rows with logits in a step.
    length     maximum length of a sequence in tokens.
    """

    num_pages: int
    num_slots: int
    tokens: int
    rows: int
    length: int


class RankReady(msgspec.Struct, tag="ready"):
    """The rank is ready to execute steps.

    captures  whether it has captured its steps, which must be equal for all ranks of a stage.
    """

    captures: bool


class Batch(msgspec.Struct, tag="batch"):
    """The next batch. If it has chunks, ``Launch`` or ``Abandon`` follows."""

    batch: StepBatch


class Launch(msgspec.Struct, tag="launch"):
    """Request to run the step whose batch was sent.

    number          number of the step, counted from 0.
    unknown_tokens  input tokens that were sampled by the previous step, in the order of the rows that need them; empty
                    if the collective broadcasts them.
    digest          digest of the step's inputs on rank 0.
    """

    number: int
    unknown_tokens: list[int]
    digest: int


class Abandon(msgspec.Struct, tag="abandon"):
    """Request to drop the steps from ``number`` on, even if they are running; answered with ``Abandoned``."""

    number: int


class Abandoned(msgspec.Struct, tag="abandoned"):
    """The rank has dropped the abandoned steps and waits for the next one."""


class Resume(msgspec.Struct, tag="resume"):
    """All ranks have abandoned their steps, so that collectives can be reset; answered with ``Resumed``."""


class Resumed(msgspec.Struct, tag="resumed"):
    """The rank's stage can run collectives again."""


class Prepare(msgspec.Struct, tag="prepare"):
    """What sequences of later steps need, to be prepared while steps run."""

    preparation: Preparation


class Sampled(msgspec.Struct, tag="sampled"):
    """The tokens sampled in the oldest pending step, as one list per chunk."""

    tokens: list[list[int]]


class Results(msgspec.Struct, tag="results"):
    """The result of a step, from the rank of the last stage that samples."""

    number: int
    result: StepResult


class OutOfMemory(msgspec.Struct, tag="out_of_memory"):
    """The rank ran out of memory in a step, which rank 0 will abandon."""

    number: int


ToRank = Load | CountPages | Configure | Batch | Launch | Abandon | Resume | Sampled | Prepare
FromRank = Listening | RankLoaded | PagesCounted | RankReady | Abandoned | Resumed | Results | OutOfMemory

#: Rank 0's end of a channel, and the other rank's.
RankChannel = Channel[ToRank, FromRank]
FollowerChannel = Channel[FromRank, ToRank]
