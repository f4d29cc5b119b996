"""The seam between mechanism and scheduling rules: the questions a policy answers, all of them pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from muxk.kernel.view import (
    AdmitAnswer,
    AdmitView,
    Decision,
    FormAnswer,
    FormView,
    Limits,
    RequestView,
    View,
)


class Policy(Protocol):
    """A compiled policy. Immutable; the same view gives the same answer, and no answer raises."""

    @property
    def name(self) -> str: ...

    @property
    def sha(self) -> str:
        """Hex digest of the policy's text and parameters: its identity in messages and traces."""

    @property
    def limits(self) -> Limits: ...

    @property
    def tbt_slo_ns(self) -> int: ...

    @property
    def reads_priority(self) -> bool:
        """Whether any rule looks at the priority of a request; else a priority has no effect."""

    @property
    def reads_deadline(self) -> bool:
        """Whether any rule looks at the deadline of a request or batch, or at what is left until it."""

    @property
    def known_classes(self) -> tuple[str, ...]:
        """Classes of requests that it tells apart; a request of another class is like one without."""

    def ttft_slo_ns(self, prompt_tokens: int) -> int:
        """Time a request with this prompt may wait for its first token, in ns."""

    def admit(self, view: AdmitView) -> AdmitAnswer: ...

    def order(self, requests: Sequence[RequestView], now_ns: int) -> list[int]:
        """Indices of `requests`, first to be served first; ties keep the given sequence."""

    def form(self, view: FormView) -> FormAnswer: ...

    def decide(self, view: View) -> Decision: ...

    def victim(self, requests: Sequence[RequestView], now_ns: int) -> int:
        """Index of the request to recompute later when the KV pool is exhausted."""

    def retain(self, request: RequestView) -> bool:
        """Keep the pages of a finished request in the prefix index."""


BOOK_POLICIES = 16


class PolicyBook:
    """Compiled policies by sha: messages carry the sha, actors look the policy up.

    It keeps the first one, which a rebuilt engine starts with, and the latest BOOK_POLICIES.
    """

    def __init__(self) -> None:
        self._policies: dict[str, Policy] = {}

    def add(self, policy: Policy) -> str:
        """Register a policy as the latest and return its sha."""
        first = next(iter(self._policies), policy.sha)
        if policy.sha != first:
            self._policies.pop(policy.sha, None)
        self._policies.setdefault(policy.sha, policy)
        if len(self._policies) > BOOK_POLICIES + 1:
            del self._policies[list(self._policies)[1]]
        return policy.sha

    def __getitem__(self, sha: str) -> Policy:
        return self._policies[sha]
