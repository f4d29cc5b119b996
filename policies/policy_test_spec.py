"""What a PolicyTest says, once it was read: plain frozen data."""

from __future__ import annotations

from dataclasses import dataclass, field

from muxk.kernel.devices.sim import SimCosts
from muxk.policies.expressions import Expression
from muxk.policies.policy_choice import PolicyChoice
from muxk.policies.policy_test_values import Between
from muxk.policies.problems import Mark


@dataclass(frozen=True, slots=True)
class DeviceText:
    """The device of a test; the defaults are those of a test that says nothing."""

    units: int = 16
    layers: int = 32
    granularity: int = 1
    kv_tokens: int = 65_536
    calibrate: bool = True
    costs: SimCosts = field(default_factory=SimCosts)
    devices: int = 1


@dataclass(frozen=True, slots=True)
class Arrivals:
    """A group of requests."""

    name: str
    at_ns: int
    count: int
    every: Between
    """Time between two of them, in ns."""
    prompt: Between
    """Tokens of each, after the prefix."""
    output: Between
    request_class: str
    priority: int
    deadline_ns: int | None
    prefix_tokens: int
    prefix_of: str
    """Requests that name the same share these tokens; empty for none."""
    abort_after_ns: int | None


@dataclass(frozen=True, slots=True)
class Swap:
    """A change of the policy in the middle of a run."""

    at_ns: int
    choice: PolicyChoice


@dataclass(frozen=True, slots=True)
class Expectation:
    """An expression that must hold."""

    text: str
    mark: Mark
    expression: Expression
    groups: tuple[str, ...] = ()
    """Groups of arrivals, or single requests; empty for all."""
    class_name: str = ""
    at_ns: int | None = None
    rule: str = ""
    because: str = ""


@dataclass(frozen=True, slots=True)
class PolicyTest:
    """One test, ready to run."""

    name: str
    description: str
    mark: Mark
    choice: PolicyChoice
    seed: int
    device: DeviceText
    timeout_ns: int
    arrivals: tuple[Arrivals, ...]
    swaps: tuple[Swap, ...]
    expectations: tuple[Expectation, ...]

    @property
    def filename(self) -> str:
        return self.mark.source.filename
