"""Plans: answers to `place` that are a search and no rules, by name, with parameters that a policy sets.

A plan ships with muxk, or another package registers it under the entry point group `muxk.plans`; a policy
names it with `place: {plan: NAME, with: {…}}`. A plan is pure: the same view gives the same answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Protocol

from muxk.kernel.placing import PlaceAnswer, PlaceView
from muxk.policies.answer_checks import in_words
from muxk.policies.units import Type

ENTRY_POINT_GROUP = "muxk.plans"
API_VERSION = 1
"""What a plan states in `api_version` to be used by this muxk."""

Answer = Callable[[PlaceView], PlaceAnswer]


@dataclass(frozen=True, slots=True)
class PlanParam:
    """A parameter of a plan: durations are ns, sizes bytes, and 90% is 0.9."""

    type: Type
    default: float
    least: float
    most: float
    about: str
    whole: bool = False
    """Only whole numbers make sense."""


class Plan(Protocol):
    """What a name of a plan stands for."""

    @property
    def api_version(self) -> int: ...

    @property
    def about(self) -> str:
        """For the reference: what it does, in a few sentences."""

    @property
    def params(self) -> Mapping[str, PlanParam]: ...

    @property
    def labels(self) -> tuple[str, ...]:
        """Those of its answers' rules, each `place/...`."""

    @property
    def devices_min(self) -> int: ...

    def __call__(self, values: Mapping[str, float], /) -> Answer:
        """The plan under values of all its parameters."""


def group_devices_max(plan: Plan, values: Mapping[str, float]) -> int:
    """Devices of the largest group that a plan forms under values of its parameters.

    A plan may have a method of this name; the KV pools of so many devices together hold a context then. One
    that has none is sent no context that is longer than one pool.
    """
    told = getattr(plan, "group_devices_max", None)
    return 1 if told is None else max(1, int(told(values)))


@dataclass(frozen=True, slots=True)
class FoundPlan:
    """A plan by its name."""

    name: str
    plan: Plan
    origin: str = ""
    """Distribution and version of one that does not ship with muxk; part of a policy's identity."""


class NoPlan(Exception):
    """There is no such plan, or it can not be used; the text says why."""


@dataclass(frozen=True)
class Plans:
    """The plans of this machine."""

    shipped: Mapping[str, Plan] = field(default_factory=dict)

    def names(self) -> tuple[str, ...]:
        """All of them; those that ship first."""
        others = sorted(entry.name for entry in metadata.entry_points(group=ENTRY_POINT_GROUP))
        return tuple(dict.fromkeys((*self.shipped, *others)))

    def find(self, name: str) -> FoundPlan | None:
        """A plan, or None when nobody has one of this name. One that ships can not be replaced.

        Raises:
            NoPlan: it can not be loaded, or two packages claim its name.
        """
        if name in self.shipped:
            return FoundPlan(name, self.shipped[name])
        entries = tuple(metadata.entry_points(group=ENTRY_POINT_GROUP, name=name))
        if not entries:
            return None
        if len(entries) > 1:
            raise NoPlan(f"{len(entries)} packages register a plan '{name}': uninstall all but one")
        return _loaded(entries[0])


def _loaded(entry: metadata.EntryPoint) -> FoundPlan:
    origin = "" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
    try:
        plan: Any = entry.load()
    except (Exception, SystemExit) as error:
        raise NoPlan(f"plan '{entry.name}' of {origin} can not be imported: {in_words(error)}") from error
    version = getattr(plan, "api_version", None)
    if version != API_VERSION:
        raise NoPlan(
            f"plan '{entry.name}' of {origin} is written for version {version} of plans, not {API_VERSION}"
        )
    missing = [what for what in ("about", "params", "labels", "devices_min") if not hasattr(plan, what)]
    if missing or not callable(plan):
        raise NoPlan(f"plan '{entry.name}' of {origin} is no plan: it lacks {', '.join(missing) or 'a call'}")
    return FoundPlan(entry.name, plan, origin or entry.value)
