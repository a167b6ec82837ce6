"""Checks of adapters: the adapters of one client do not keep those of another waiting."""

from __future__ import annotations

import asyncio

from aiakq.runtime.protocol.adapters import AdapterRef
from aiakq.server.process.adapter_calls import AdapterCalls
from aiakq.server.process.ipc import AdapterChecked, CheckAdapter, ToEngine


def test_the_engine_has_one_adapter_of_each_client_at_a_time() -> None:
    async def run() -> None:
        calls, sent = AdapterCalls(), list[CheckAdapter]()

        def send(record: ToEngine) -> None:
            assert isinstance(record, CheckAdapter)
            sent.append(record)

        calls.send = send
        greedy = [asyncio.create_task(calls.check(f"greedy {n}", "/a", None, "first")) for n in range(20)]
        await asyncio.sleep(0)
        other = asyncio.create_task(calls.check("other", "/b", None, "second"))
        await asyncio.sleep(0)
        assert [record.name for record in sent] == ["greedy 0", "other"]
        for record in sent:
            calls.on_checked(AdapterChecked(record.number, AdapterRef("key", record.name, record.path, 1)))
        assert (await other).name == "other"
        assert (await greedy[0]).name == "greedy 0"
        await asyncio.sleep(0)
        assert [record.name for record in sent][2:] == ["greedy 1"]
        for task in greedy[1:]:
            task.cancel()
        await asyncio.gather(*greedy, return_exceptions=True)

    asyncio.run(run())
