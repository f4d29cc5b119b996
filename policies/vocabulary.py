"""The kinds of things that an expression may name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from muxk.policies.closures import Run
from muxk.policies.marks import Scalar
from muxk.policies.terms import Part
from muxk.policies.units import Type

MAX_COST = 400
"""Of one expression: an operator or a name costs 1, a function of a decision point what it declares."""


@dataclass(frozen=True, slots=True)
class Name:
    """A dotted name that a decision point declares."""

    type: Type
    read: Run
    """From the scope of the decision to the value."""
    about: str
    """One line for people, with what the value is."""
    needs: str = ""
    """The boolean that says whether the value is there, such as `candidate.waiting`."""
    least: float | None = None
    """It is never less, in the base unit of its type; None when that is not known."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function that a decision point declares."""

    parameters: tuple[tuple[str, Type], ...]
    """Name and type of each argument, one or two of them."""
    result: Type
    call: Callable[..., Any]
    """From the scope and the arguments to the value; raises RuleError when there is none."""
    about: str
    cost: int
    """About how many names could be read in its time."""
    least: float | None = None
    """It never gives less, in the base unit of its type."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A name whose value is known when the policy is compiled: a param or an SLO."""

    type: Type
    value: Any
    about: str = ""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What an expression of one place may name."""

    place: str
    """Such as `split`, for messages."""
    names: Mapping[str, Name | Constant]
    functions: Mapping[str, Function]
    elsewhere: Mapping[str, str]
    """Names and functions of other places, each with one place that offers it."""
    words: tuple[str, ...] | None = None
    """Names that may stand in quotes, the classes of the policy; None where any may."""
    variables: Mapping[str, Scalar] = field(default_factory=dict)
    """Expressions of the policy by name, in the order in which they are written."""
    max_cost: int = MAX_COST
    parts: dict[str, Part] = field(default_factory=dict)
    """Variables compiled for this place so far."""
