"""Every request of a run by itself, with the keys and units of `vllm bench serve --save-detailed`."""

from __future__ import annotations

from typing import Any

from muxk.client.measures import Served

S = 1_000_000_000


class PerRequest:
    """Takes requests as they end. Memory grows with their number and that of their tokens."""

    def __init__(self) -> None:
        self._ended: list[Served] = []

    def add(self, served: Served) -> None:
        """Keep one."""
        self._ended.append(served)

    def arrays(self) -> dict[str, list[Any]]:
        """In the order of arrival; times in seconds. One without a token has a TTFT and a latency of 0."""
        rows = sorted(self._ended, key=lambda served: served.arrival_ns)
        return {
            "start_times": [row.arrival_ns / S for row in rows],
            "input_lens": [row.prompt_tokens for row in rows],
            "output_lens": [len(row.token_ns) for row in rows],
            "ttfts": [(row.token_ns[0] - row.arrival_ns) / S if row.token_ns else 0.0 for row in rows],
            "itls": [
                [(later - before) / S for before, later in zip(row.token_ns, row.token_ns[1:], strict=False)]
                for row in rows
            ],
            "latencies": [(row.token_ns[-1] - row.arrival_ns) / S if row.token_ns else 0.0 for row in rows],
            "errors": [row.error for row in rows],
        }
