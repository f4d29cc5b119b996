"""Recent token gaps and first-token times, for the state that clients can ask for."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

GAPS_KEPT = 2048
FIRST_TOKENS_KEPT = 256


@dataclass
class LatencyWindow:
    """The last gaps and first tokens of all requests, in ns."""

    gaps_ns: deque[int] = field(default_factory=lambda: deque(maxlen=GAPS_KEPT))
    first_tokens_ns: deque[int] = field(default_factory=lambda: deque(maxlen=FIRST_TOKENS_KEPT))

    def describe(self) -> dict[str, Any]:
        """Milliseconds; empty windows are left out."""
        shown: dict[str, Any] = {}
        if self.gaps_ns:
            gaps = sorted(self.gaps_ns)
            shown["tbt_ms"] = {"p50": _ms(gaps, 0.5), "p99": _ms(gaps, 0.99), "max": _ms(gaps, 1.0)}
        if self.first_tokens_ns:
            firsts = sorted(self.first_tokens_ns)
            shown["ttft_ms"] = {"p50": _ms(firsts, 0.5), "p99": _ms(firsts, 0.99), "max": _ms(firsts, 1.0)}
        return shown


def _ms(ordered: list[int], share: float) -> float:
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))] / 1e6, 1)
