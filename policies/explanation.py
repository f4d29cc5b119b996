"""Explanations of decisions as plain data: what `muxk explain` shows, and what travels to it."""

from __future__ import annotations

import msgspec


class ShownValue(msgspec.Struct, frozen=True):
    """A name or call that a rule mentions, and its value as people write it."""

    name: str
    value: str


class TriedRule(msgspec.Struct, frozen=True):
    """A rule that was looked at."""

    rule: str
    """`point/name`."""
    outcome: str
    """`matched`, `not matched`, or `failed`."""
    why: str = ""
    """Of one that failed."""
    when: str = ""
    """Its condition as written; empty for one that always matches."""
    then: str = ""
    """Its answer as written."""
    place: str = ""
    """`file:line`."""
    values: tuple[ShownValue, ...] = ()


class AskedPoint(msgspec.Struct, frozen=True):
    """One decision point of a decision, with the rules that were tried in their order."""

    point: str
    rules: tuple[TriedRule, ...]
    answer: str
    """In words."""


class SortedRequest(msgspec.Struct, frozen=True):
    """A request in the answer of `order` or `victim`."""

    place: int
    """1 goes first, or is recomputed first."""
    request: str
    """As its client named it where that is known, else `#` and the server's id."""
    keys: tuple[ShownValue, ...]
    class_name: str = ""
    service: str = ""
    """What its class got, over its share."""
    overdue: bool = False
    """It waited longer than the `max_wait` of its class."""


class Explanation(msgspec.Struct, frozen=True):
    """One decision, or a run of equal ones."""

    at_ns: int
    """Since the server started."""
    last_at_ns: int
    count: int
    """Decisions with this answer in a row; the values are those of the latest."""
    actor: str
    question: str
    """`classify`, `admit`, `order`, `form`, `decide`, `victim` or `retain`."""
    policy: str
    sha: str
    answer: str
    """In words."""
    points: tuple[AskedPoint, ...] = ()
    sorted: tuple[SortedRequest, ...] = ()
    """The first requests of `order`, and those that were asked about; the one that `victim` chose."""
    errors: tuple[str, ...] = ()
    """Of rules, in the answer itself."""
    note: str = ""
    """What could not be explained, and why."""
    differs: tuple[str, ...] = ()
    """Points at which the shadow policy said something else."""
    shadow: Explanation | None = None
    """Its own explanation."""
