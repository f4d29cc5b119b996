"""Short prompts first, unless somebody waited too long; everything else as `muxwise` does it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from muxk.policies.api import BasePolicy, OrderAnswer, RequestView


class ShortestFirst(BasePolicy):
    """Overrides one question; the rules of `spec` answer all others."""

    api_version = 1
    name = "shortest-first"
    description = "The shortest prompt first; who waited longer than `patience` goes before all"
    spec = """
    extends: muxwise
    slo: {tbt: 100ms, ttft: 500ms + 10ms/token}
    params:
      patience: {type: duration, default: 2s, min: 10ms, max: 10min, description: wait behind shorter ones}
    """

    def order(
        self, requests: Sequence[RequestView], now_ns: int, service: Mapping[str, float]
    ) -> OrderAnswer:
        """Who lost patience by arrival, then everybody else by the length of the prompt."""
        patience_ns = self.params["patience"]

        def key(index: int) -> tuple[bool, int]:
            request = requests[index]
            patient = now_ns - request.arrival_ns < patience_ns
            return patient, request.prompt_tokens if patient else request.arrival_ns

        order = tuple(sorted(range(len(requests)), key=key))
        return OrderAnswer(order, rule="shortest-first" if order else "nobody")
