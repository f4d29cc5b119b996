"""The seam between mechanism and scheduling rules: the questions a policy answers, all of them pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from muxk.kernel.journal import Journal
from muxk.kernel.placing import PlaceAnswer, PlaceView
from muxk.kernel.view import (
    AdmitAnswer,
    AdmitView,
    ClassAnswer,
    Decision,
    FormAnswer,
    FormView,
    Limits,
    OrderAnswer,
    RequestView,
    RetainAnswer,
    VictimAnswer,
    View,
)

GUARDS = ("quantile", "worst_case")
"""Guards of decode estimates that a policy can choose: `muxk.actors.guards` has them."""
DEFAULT_GUARD = GUARDS[0]


def guard_of(policy: Policy) -> str:
    """The guard that a policy chose; a policy need not have an opinion."""
    guard = getattr(policy, "guard", DEFAULT_GUARD)
    return guard if guard in GUARDS else DEFAULT_GUARD


def widest_group_of(policy: Policy) -> int:
    """Devices of the largest group that a policy's `place` forms; one that does not say forms none."""
    return max(1, getattr(policy, "group_devices_max", 1))


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
    def classes(self) -> tuple[str, ...]:
        """Names of its classes of requests, by rank; at least one."""

    @property
    def known_classes(self) -> tuple[str, ...]:
        """What clients can name as the class of a request to any effect; another name is like none."""

    def classify(self, request: RequestView) -> ClassAnswer:
        """The class of a request; asked when it arrives, and again after a swap."""

    def admit(self, view: AdmitView) -> AdmitAnswer: ...

    def order(
        self, requests: Sequence[RequestView], now_ns: int, service: Mapping[str, float]
    ) -> OrderAnswer:
        """The waiting queue in the order in which to serve it; ties keep the given sequence.

        `service` says how many prefill tokens each class got, divided by its share: by name, and levelled
        when a class comes back after it wanted nothing.
        """

    def form(self, view: FormView) -> FormAnswer: ...

    def decide(self, view: View) -> Decision: ...

    def victim(self, requests: Sequence[RequestView], now_ns: int) -> VictimAnswer:
        """Who to recompute later when the KV pool is exhausted; `requests` holds at least one."""

    def retain(self, request: RequestView) -> RetainAnswer:
        """Whether to keep the pages of a finished request in the prefix index."""

    @property
    def places(self) -> bool:
        """Whether it says where requests go on a server of several devices; else `place` does nothing."""

    @property
    def devices_min(self) -> int:
        """Devices that it needs: 2 where prefill and decode have some of their own."""

    @property
    def fetches_prefix(self) -> bool:
        """Whether a prefill first fetches what of its prefix lies where the request will decode."""

    def place(self, view: PlaceView) -> PlaceAnswer:
        """Where requests that wait are computed and where they decode, and what groups devices form."""


if TYPE_CHECKING:
    from muxk.kernel.shadow import ShadowTally

BOOK_POLICIES = 16


@dataclass(frozen=True, slots=True)
class PolicyText:
    """What a policy was compiled from."""

    source: str
    filename: str
    settings: Mapping[str, str] = field(default_factory=dict)


class PolicyBook:
    """Compiled policies by sha: messages carry the sha, actors look the policy up.

    It keeps the first one, which a rebuilt engine starts with, the one in force, which it is told then, and
    the latest BOOK_POLICIES. With it come the journal of what all of them decided, and the tally of the
    shadow policy, if there is one.
    """

    def __init__(self, journal: Journal | None = None) -> None:
        self._policies: dict[str, Policy] = {}
        self._texts: dict[str, PolicyText] = {}
        self._in_force: str | None = None
        self.journal = journal if journal is not None else Journal()
        self.shadow: ShadowTally | None = None
        """Whom every actor asks too from its next decision on; set by the gateway, and nobody acts on it."""

    def text(self, sha: str) -> PolicyText | None:
        """What a policy was compiled from; None for one in Python, or that is not in the book any more."""
        shadow = self.shadow
        return shadow.text if shadow is not None and shadow.policy.sha == sha else self._texts.get(sha)

    def find(self, sha: str) -> Policy | None:
        """A policy, or the shadow; None when it has left the book."""
        shadow = self.shadow
        return shadow.policy if shadow is not None and shadow.policy.sha == sha else self._policies.get(sha)

    def add(self, policy: Policy, text: PolicyText | None = None) -> str:
        """Register a policy as the latest and return its sha."""
        if text is not None and text.source:
            self._texts[policy.sha] = text
        first = next(iter(self._policies), policy.sha)
        if policy.sha != first:
            self._policies.pop(policy.sha, None)
        self._policies.setdefault(policy.sha, policy)
        if len(self._policies) > BOOK_POLICIES + 1:
            oldest = next(sha for sha in self._policies if sha not in (first, self._in_force))
            del self._policies[oldest]
            self._texts.pop(oldest, None)
        return policy.sha

    def put_in_force(self, sha: str) -> None:
        """Keep this policy, however many are added, until another one is put in force."""
        assert sha in self._policies, sha
        self._in_force = sha

    def __getitem__(self, sha: str) -> Policy:
        return self._policies[sha]
