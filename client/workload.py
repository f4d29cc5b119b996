"""The mixed load: streams that decode without a pause, and long prompts that come at fixed times.

Short requests follow each other on every stream. Prompts are random token ids from a seed, all distinct, so
that no prefix is shared; outputs go on to their full length, so that every run does the same work.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import anyio
import numpy as np
from anyio.abc import TaskGroup
from muxk.client.aio import AsyncClient
from muxk.client.errors import RequestError
from muxk.client.records import LONG, SHORT, Phase, Record

FIRST_ORDINARY_ID = 32
"""Vocabularies keep their control tokens in front of this."""

PAUSE_BETWEEN_PHASES_S = 2.0
"""For items of aborted prompts to end."""

PAUSE_AFTER_ERROR_S = 0.1
"""Before a stream goes on after a refusal, so that a refusing server is not flooded."""


@dataclass(frozen=True)
class LongPrompts:
    """A phase in which prompts of one length arrive. Lengths in tokens, times in seconds."""

    tokens: int = 1500
    every_s: float = 10.0
    seconds: float = 90.0

    @property
    def phase(self) -> str:
        """The name of the phase."""
        return f"mixed {self.tokens}"


@dataclass(frozen=True)
class MixedLoad:
    """What is asked of the server. Lengths in tokens, times in seconds."""

    streams: int = 4
    short_in: int = 32
    short_out: int = 128
    longs: tuple[LongPrompts, ...] = (LongPrompts(),)
    """One phase each, in this order, after the solo phase."""
    long_out: int = 8
    warmup_s: float = 5.0
    solo_s: float = 30.0
    seed: int = 0


class Prompts:
    """Random prompts; the same seed gives the same ones."""

    def __init__(self, vocabulary_size: int, seed: int) -> None:
        assert vocabulary_size > FIRST_ORDINARY_ID
        self._vocabulary_size = vocabulary_size
        self._random = np.random.default_rng(seed)

    def draw(self, tokens: int) -> list[int]:
        """int[tokens]."""
        drawn: list[int] = self._random.integers(FIRST_ORDINARY_ID, self._vocabulary_size, tokens).tolist()
        return drawn


class Driver:
    """Drives one server through warm-up, solo phase and mixed phase, and keeps the records."""

    def __init__(self, client: AsyncClient, load: MixedLoad) -> None:
        self._client = client
        self._load = load
        size = client.server.vocabulary_size
        self._short_prompts = [Prompts(size, load.seed * 1000 + stream) for stream in range(load.streams)]
        self._long_prompts = Prompts(size, load.seed * 1000 + 999)
        self.records: list[Record] = []

    async def run(self, tell: Callable[[str], None] = lambda _text: None) -> list[Phase]:
        """The phases that were driven. Requests that are cut at the end are aborted.

        A request that the server refuses is a record with an error. Raises RequestError when the server goes.
        """
        try:
            return await self._run(tell)
        except ExceptionGroup as group:
            gone = group.subgroup(RequestError)
            raise (gone or group).exceptions[0] from None

    async def _run(self, tell: Callable[[str], None]) -> list[Phase]:
        load = self._load
        phases = []
        async with anyio.create_task_group() as tasks:
            for stream in range(load.streams):
                tasks.start_soon(self._stream, self._short_prompts[stream])
            await anyio.sleep(load.warmup_s)
            if load.solo_s:
                tell("solo")
                phases.append(await _phase("solo", load.solo_s))
            for longs in load.longs:
                tell(longs.phase)
                phases.append(await self._mixed(longs))
            tasks.cancel_scope.cancel()
        return phases

    async def _mixed(self, longs: LongPrompts) -> Phase:
        """One phase of long prompts; those that are not answered at its end are aborted."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._longs, tasks, longs)
            phase = await _phase(longs.phase, longs.seconds)
            tasks.cancel_scope.cancel()
        await anyio.sleep(PAUSE_BETWEEN_PHASES_S)
        return phase

    async def _stream(self, prompts: Prompts) -> None:
        """One request after the other."""
        while True:
            await self._request(SHORT, prompts.draw(self._load.short_in), self._load.short_out)

    async def _longs(self, tasks: TaskGroup, longs: LongPrompts) -> None:
        """One long prompt at each multiple of the interval, whether the last one was answered or not."""
        started = time.perf_counter()
        for number in range(1, 1 + int(np.ceil(longs.seconds / longs.every_s))):
            prompt = self._long_prompts.draw(longs.tokens)
            tasks.start_soon(self._request, LONG, prompt, self._load.long_out)
            await anyio.sleep(max(0.0, started + number * longs.every_s - time.perf_counter()))

    async def _request(self, kind: str, prompt: list[int], max_tokens: int) -> None:
        record = Record(kind, len(prompt), time.perf_counter_ns())
        self.records.append(record)
        try:
            await self._follow(record, prompt, max_tokens)
        except RequestError as error:
            record.error = str(error)
            if not self._client.connected:
                raise
            await anyio.sleep(PAUSE_AFTER_ERROR_S)

    async def _follow(self, record: Record, prompt: list[int], max_tokens: int) -> None:
        stream = await self._client.submit(
            token_ids=prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True
        )
        async with stream:
            while deltas := await stream.deltas():
                for delta in deltas:
                    record.arrived(delta.arrived_ns, len(delta.token_ids))
        record.ended_ns = time.perf_counter_ns()


async def _phase(name: str, seconds: float) -> Phase:
    started_ns = time.perf_counter_ns()
    await anyio.sleep(seconds)
    return Phase(name, started_ns, time.perf_counter_ns())
