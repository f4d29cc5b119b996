"""What swaps of the policy cost the streams that decode meanwhile: gaps near a swap beside all others.

Run `python -m muxk.client.swapbench`. A server on the machine's cores, a few streams, a swap every second.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import anyio
from muxk.client.aio import AsyncClient
from muxk.client.server_process import ServerProcess

POLICIES = ("temporal", "muxwise", "static_split", "muxwise")
SWAPS = 24
STREAMS = 4
TOKENS = 128
WARMUP_S = 8.0
EVERY_S = 1.0
NEAR_S = 0.15
"""A gap that ends so long after the answer to a swap still counts as near it."""


@dataclass
class Seen:
    """Of one run, by the monotonic clock, in seconds."""

    gaps: list[tuple[float, float]] = field(default_factory=list)
    """(end, length)."""
    swaps: list[tuple[float, float]] = field(default_factory=list)
    """(sent, answered)."""
    done: bool = False

    def near(self, end_s: float) -> bool:
        return any(sent <= end_s <= answered + NEAR_S for sent, answered in self.swaps)


async def _stream(client: AsyncClient, seen: Seen, number: int) -> None:
    """One request after another."""
    asked = 0
    while not seen.done:
        prompt = f"Story number {number} {asked}: once upon a time"
        stream = await client.submit(prompt, max_tokens=TOKENS, ignore_eos=True, temperature=0.0)
        last_s: float | None = None
        async for _ in stream:
            now_s = time.monotonic()
            if last_s is not None:
                seen.gaps.append((now_s, now_s - last_s))
            last_s = now_s
        asked += 1


async def _measure(endpoint: str) -> Seen:
    seen = Seen()
    async with AsyncClient(endpoint) as client, anyio.create_task_group() as tasks:
        for number in range(STREAMS):
            tasks.start_soon(_stream, client, seen, number)
        await anyio.sleep(WARMUP_S)
        seen.gaps.clear()
        for number in range(SWAPS):
            await anyio.sleep(EVERY_S)
            sent_s = time.monotonic()
            await client.swap(POLICIES[number % len(POLICIES)])
            seen.swaps.append((sent_s, time.monotonic()))
        await anyio.sleep(EVERY_S)
        seen.done = True
    return seen


def _figures(gaps_s: Sequence[float]) -> str:
    ordered = sorted(gaps_s)
    half, most = ordered[len(ordered) // 2], ordered[int(0.99 * len(ordered))]
    return f"P50 {half * 1e3:.1f}, P99 {most * 1e3:.1f}, max {ordered[-1] * 1e3:.1f} ms ({len(ordered)} gaps)"


def main() -> None:
    with ServerProcess("muxwise", device="cpu") as server:
        seen = anyio.run(_measure, server.wait_ready())
    answers_ms = sorted((answered - sent) * 1e3 for sent, answered in seen.swaps)
    print(f"{len(answers_ms)} swaps, answered after {answers_ms[len(answers_ms) // 2]:.0f} ms")
    print(f"near a swap: {_figures([gap for end, gap in seen.gaps if seen.near(end)])}")
    print(f"elsewhere:   {_figures([gap for end, gap in seen.gaps if not seen.near(end)])}")


if __name__ == "__main__":
    main()
