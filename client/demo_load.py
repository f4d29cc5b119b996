"""What the demo asks: chats one after the other on a few lines, and a long report to read now and then."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import anyio
from anyio.abc import TaskGroup
from muxk.client.aio import AsyncClient
from muxk.client.stream import AsyncStream

CHATS = 4
CHAT_TOKENS = 160
LONG_EVERY_S = 8.0
LONG_TOKENS_OUT = 24
LONG_LINES = 51
"""Makes about 1,500 tokens for SmolLM2."""

QUESTIONS = (
    "Tell me a short story about a lighthouse keeper.",
    "Explain to a child why the sky is blue.",
    "Give me three ideas for a rainy Sunday.",
    "Describe how bread is made, step by step.",
    "What should I see on a first visit to Lisbon?",
    "Why do cats purr?",
    "Write a letter from a robot to its maker.",
    "How does a bicycle stay upright?",
)


@dataclass
class ChatLine:
    """One chat as it is shown."""

    question: str = ""
    text: str = ""
    answered: int = 0


@dataclass
class DemoFacts:
    """Everything that the demo measured, on the client's clock. Times in ms."""

    started: float = field(default_factory=time.perf_counter)
    chats: list[ChatLine] = field(default_factory=lambda: [ChatLine() for _ in range(CHATS)])
    gaps: list[float] = field(default_factory=list)
    ttft_short: list[float] = field(default_factory=list)
    ttft_long: list[float] = field(default_factory=list)
    long_tokens: int = 0
    """Prompt tokens of the last long prompt."""
    longs_sent: int = 0
    longs_answered: int = 0
    """First token here, or ended."""
    tokens: int = 0
    recent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=1000))
    """(time, tokens) of the last events."""

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self.started

    @property
    def longs_reading(self) -> int:
        """Long prompts whose first token is not here yet."""
        return self.longs_sent - self.longs_answered

    def came(self, tokens: int) -> None:
        """Note tokens that arrived just now."""
        self.tokens += tokens
        self.recent.append((time.perf_counter(), tokens))

    def tokens_per_s(self, window_s: float = 2.0) -> float:
        """Over the last seconds."""
        since = time.perf_counter() - window_s
        return sum(tokens for at, tokens in self.recent if at >= since) / window_s


def long_report(number: int) -> str:
    """A logbook to sum up; each number gives another one from its first word on."""
    lines = [
        f"Day {day} of voyage {number}: wind {(day * 7 + number) % 11} from the west, {day * 3 % 17} birds "
        f"seen, {(day + number) % 5} sails mended."
        for day in range(1, LONG_LINES + 1)
    ]
    return f"Voyage {number}. Sum up this logbook in one sentence.\n" + "\n".join(lines)


class DemoLoad:
    """Drives the server through the client and notes what comes."""

    def __init__(self, client: AsyncClient, facts: DemoFacts) -> None:
        self._client = client
        self._facts = facts

    async def run(self, seconds: float) -> None:
        """Raises RequestError when a request fails or the server goes."""
        async with anyio.create_task_group() as tasks:
            for number in range(CHATS):
                tasks.start_soon(self._chat, number)
            tasks.start_soon(self._longs, tasks)
            await anyio.sleep(seconds)
            tasks.cancel_scope.cancel()

    async def _chat(self, number: int) -> None:
        """One question after the other."""
        line = self._facts.chats[number]
        while True:
            line.question = QUESTIONS[(number + CHATS * line.answered) % len(QUESTIONS)]
            line.text = ""
            stream = await self._client.submit(
                messages=[{"role": "user", "content": line.question}],
                max_tokens=CHAT_TOKENS,
                temperature=0.7,
                seed=line.answered,
            )

            def show(text: str) -> None:
                line.text += text

            await self._follow(stream, self._first_of_short, show)
            line.answered += 1

    async def _longs(self, tasks: TaskGroup) -> None:
        await anyio.sleep(LONG_EVERY_S / 2)
        while True:
            self._facts.longs_sent += 1
            tasks.start_soon(self._long, self._facts.longs_sent)
            await anyio.sleep(LONG_EVERY_S)

    async def _long(self, number: int) -> None:
        facts = self._facts
        messages = [{"role": "user", "content": long_report(number)}]
        stream = await self._client.submit(messages=messages, max_tokens=LONG_TOKENS_OUT, temperature=0.0)
        facts.long_tokens = await stream.accepted()
        await self._follow(stream, self._first_of_long, lambda _text: None)

    def _first_of_short(self, ttft_ms: float) -> None:
        self._facts.ttft_short.append(ttft_ms)

    def _first_of_long(self, ttft_ms: float) -> None:
        self._facts.ttft_long.append(ttft_ms)
        self._facts.longs_answered += 1

    async def _follow(
        self, stream: AsyncStream, first: Callable[[float], None], show: Callable[[str], None]
    ) -> None:
        """Read a stream to its end and note its times; `first` hears when the first token came."""
        submitted_ns, last_ns = time.perf_counter_ns(), 0
        async with stream:
            async for delta in stream:
                show(delta.text)
                if last_ns:
                    self._facts.gaps.append((delta.arrived_ns - last_ns) / 1e6)
                else:
                    first((delta.arrived_ns - submitted_ns) / 1e6)
                last_ns = delta.arrived_ns
                self._facts.came(len(delta.token_ids))
