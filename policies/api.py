"""The public, versioned surface for policies written in Python.

A package registers a subclass of `BasePolicy` under the entry point group `muxk.policies`; the guide is
docs/python-policies.md. What this module exports keeps its meaning as long as API_VERSION stays: fields may
be added to views and answers, always with a default, and nothing is renamed, removed or reordered. A change
that breaks a policy raises API_VERSION, and muxk then refuses what was written for another version, with a
clear message.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, ClassVar, Protocol

from msgspec.structs import replace
from muxk.kernel.estimates import DecodeModel, Estimates, PrefillModel
from muxk.kernel.placing import (
    Assign,
    GroupView,
    Grow,
    Move,
    PlaceAnswer,
    PlaceView,
    Shrink,
)
from muxk.kernel.policy import Policy
from muxk.kernel.view import (
    AdmitAnswer,
    AdmitView,
    ClassAnswer,
    Decision,
    DecodeView,
    FormAnswer,
    FormView,
    KvView,
    Limits,
    OrderAnswer,
    PrefillView,
    QueueView,
    RequestClass,
    RequestView,
    RetainAnswer,
    VictimAnswer,
    View,
)
from muxk.kernel.work import Split
from muxk.policies.engine import CompiledPolicy, compile_policy
from muxk.policies.problems import PolicyError
from muxk.policies.schema import API_VERSION as LANGUAGE_VERSION
from muxk.policies.schema import KIND

__all__ = [
    "API_VERSION",
    "ENTRY_POINT_GROUP",
    "AdmitAnswer",
    "AdmitView",
    "Assign",
    "BasePolicy",
    "ClassAnswer",
    "Decision",
    "DecodeModel",
    "DecodeView",
    "Estimates",
    "FormAnswer",
    "FormView",
    "GroupView",
    "Grow",
    "KvView",
    "Limits",
    "Move",
    "OrderAnswer",
    "PlaceAnswer",
    "PlaceView",
    "Policy",
    "PolicyError",
    "PolicyProvider",
    "PrefillModel",
    "PrefillView",
    "QueueView",
    "RequestClass",
    "RequestView",
    "RetainAnswer",
    "Shrink",
    "Split",
    "VictimAnswer",
    "View",
    "YamlPolicy",
    "replace",
]

API_VERSION = 1
"""What a policy states in `api_version` to be loaded by this muxk."""
ENTRY_POINT_GROUP = "muxk.policies"


class PolicyProvider(Protocol):
    """What an entry point names: a subclass of `BasePolicy`, or anything else of this shape."""

    @property
    def api_version(self) -> int:
        """The API_VERSION that it was written for, as a literal."""

    def __call__(self, settings: Mapping[str, str], /) -> Policy:
        """The policy under values of its params, as `--set` gives them.

        Raises:
            PolicyError: a setting is wrong.
        """


@dataclass(frozen=True)
class YamlPolicy:
    """A policy file of a package, as a provider: how a package ships YAML under a name."""

    package: str
    file: str
    """Its name in the package."""
    api_version: int = field(kw_only=True)
    """The API_VERSION that it was written for."""

    def __call__(self, settings: Mapping[str, str], /) -> CompiledPolicy:
        """Compile the file.

        Raises:
            PolicyError: it or a setting is wrong.
        """
        text = resources.files(self.package).joinpath(self.file).read_text(encoding="utf-8")
        return compile_policy(text, self.file, settings)


class BasePolicy:
    """A policy whose questions are answered by YAML rules, until a subclass overrides a method.

    The declarative half is written in the policy language, in `spec`: what to extend, SLOs, limits, params,
    classes, and rules for any question. The other half is methods: each gets a frozen view and returns a
    frozen answer, and `super()` gives what the rules would have answered.

    One object answers for all actors of a server. A method must be pure: the same view gives the same answer,
    without clocks, chance, I/O or memory of earlier calls, or recorded runs can not be explained. It runs
    between two device launches, so it must also be fast. What it raises, and what it answers wrongly, is
    counted as an error of the rule, and the rules' answer is used in its place.

    A subclass states `api_version` itself; the version of the muxk that happens to be installed says nothing.
    """

    name: str = ""
    """As its entry point: letters, digits, `-`, `_` and `.`."""
    version: str = ""
    """Of the policy, for people; the distribution's when it is empty."""
    description: str = ""
    spec: ClassVar[str] = ""
    """YAML of the `spec` of a policy, such as `extends: muxwise`; empty: the built-in answers."""
    reads_priority: bool = True
    """False tells clients that a priority has no effect."""
    reads_deadline: bool = True
    """The same of a deadline."""

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        """Compile `spec`.

        Raises:
            PolicyError: `spec` or a setting is wrong.
        """
        text = _document(self.name, type(self).spec)
        self.base: CompiledPolicy = compile_policy(text, f"<spec of {self.name}>", settings)
        """The rules of `spec`: what answers where no method does."""

    @property
    def sha(self) -> str:
        """Of the rules; the registry adds the distribution and its source."""
        return self.base.sha

    @property
    def limits(self) -> Limits:
        return self.base.limits

    @property
    def params(self) -> Mapping[str, Any]:
        """Values of the params in force, by name: durations are ns, sizes bytes, and 90% is 0.9."""
        return self.base.params

    @property
    def tbt_slo_ns(self) -> int:
        return self.base.tbt_slo_ns

    @property
    def guard(self) -> str:
        """The guard of decode estimates, one of `muxk.kernel.policy.GUARDS`."""
        return self.base.guard

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes that `classify` puts requests in, by rank."""
        return self.base.classes

    @property
    def known_classes(self) -> tuple[str, ...]:
        """What clients can name as the class of a request to any effect."""
        return self.base.known_classes

    def classify(self, request: RequestView) -> ClassAnswer:
        """The class of a request that arrives; asked again after a swap."""
        return self.base.classify(request)

    def admit(self, view: AdmitView) -> AdmitAnswer:
        """Accept, refuse or shed a request."""
        return self.base.admit(view)

    def order(
        self, requests: Sequence[RequestView], now_ns: int, service: Mapping[str, float]
    ) -> OrderAnswer:
        """The waiting queue: indices of `requests`, first to be served first.

        `service` has the prefill tokens that each class got, divided by its share.
        """
        return self.base.order(requests, now_ns, service)

    def form(self, view: FormView) -> FormAnswer:
        """How large the next prefill batch may be."""
        return self.base.form(view)

    def decide(self, view: View) -> Decision:
        """Split, preemption and the next slice; `replace(super().decide(view), layers=2)` changes one."""
        return self.base.decide(view)

    def victim(self, requests: Sequence[RequestView], now_ns: int) -> VictimAnswer:
        """Who to recompute later when the KV pool is exhausted; `requests` holds at least one."""
        return self.base.victim(requests, now_ns)

    def retain(self, request: RequestView) -> RetainAnswer:
        """Whether to keep the pages of a finished request in the prefix index."""
        return self.base.retain(request)

    @property
    def places(self) -> bool:
        """Whether it says where requests go on a server of several devices: `spec` or `place` does."""
        return self.base.places or type(self).place is not BasePolicy.place

    @property
    def devices_min(self) -> int:
        """Devices that it needs."""
        return self.base.devices_min

    @property
    def group_devices_max(self) -> int:
        """Devices of the largest group that `place` forms: their KV pools together hold a context, at most.
        One that forms groups without saying so is sent no context that is longer than one pool."""
        return self.base.group_devices_max

    @property
    def fetches_prefix(self) -> bool:
        """Whether a prefill first fetches what of its prefix lies where the request will decode."""
        return self.base.fetches_prefix

    def place(self, view: PlaceView) -> PlaceAnswer:
        """Where requests that wait are computed and decode; asked on a server of several devices."""
        return self.base.place(view)


def _document(name: str, spec: str) -> str:
    """A whole policy file around a spec."""
    body = textwrap.indent(textwrap.dedent(spec).strip("\n"), "  ")
    head = f"apiVersion: {LANGUAGE_VERSION}\nkind: {KIND}\nmetadata: {{name: {json.dumps(name)}}}\n"
    return f"{head}spec:\n{body}\n" if body.strip() else f"{head}spec: {{}}\n"
