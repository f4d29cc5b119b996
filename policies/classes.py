"""Classes of requests: what a policy makes of a request, and what each class is owed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from muxk.kernel.view import RequestClass
from muxk.policies.units import TtftSlo


@dataclass(frozen=True, slots=True)
class PolicyClass:
    """One class; a request is in the first whose condition holds."""

    name: str
    rank: int
    """Its place among the classes, from 0."""
    tbt_ns: int
    ttft: TtftSlo
    share: float | None = None
    """Weight of its prefill tokens while classes compete; None where the policy gives it none."""
    max_wait_ns: int | None = None

    @property
    def weight(self) -> float:
        """Its share, 1 where none is given."""
        return 1.0 if self.share is None else self.share

    def of(self, prompt_tokens: int) -> RequestClass:
        """The class as a request with such a prompt gets it."""
        ttft_ns = self.ttft.at(prompt_tokens)
        return RequestClass(self.name, self.rank, self.tbt_ns, ttft_ns, self.weight, self.max_wait_ns)


@dataclass(frozen=True)
class Classes:
    """The classes of a policy, by rank; the last takes every request that no other took."""

    rows: tuple[PolicyClass, ...]
    tbt_ns: int
    """TBT SLO of the policy itself."""

    def __post_init__(self) -> None:
        assert self.rows, "every policy has a class"

    @cached_property
    def by_name(self) -> Mapping[str, PolicyClass]:
        return {row.name: row for row in self.rows}

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(row.name for row in self.rows)

    @cached_property
    def has_shares(self) -> bool:
        """Whether classes compete by weight; else the keys of `order` alone say who goes first."""
        return len(self.rows) > 1 and any(row.share is not None for row in self.rows)

    @cached_property
    def has_max_wait(self) -> bool:
        return any(row.max_wait_ns is not None for row in self.rows)

    @cached_property
    def has_own_tbt(self) -> bool:
        """Whether the TBT SLO depends on who decodes."""
        return any(row.tbt_ns != self.tbt_ns for row in self.rows)

    def named(self, name: str) -> PolicyClass:
        """The class of a name; the last for a name of no class, as of a request that was not classified."""
        return self.by_name.get(name) or self.rows[-1]


DEFAULT_CLASS = "default"


def only_class(tbt_ns: int, ttft: TtftSlo) -> Classes:
    """The one class of a policy that has no section `classes`."""
    return Classes((PolicyClass(DEFAULT_CLASS, 0, tbt_ns, ttft),), tbt_ns)
