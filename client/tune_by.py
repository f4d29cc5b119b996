"""What params are tuned for. Imports next to nothing, for the command line reads it."""

from __future__ import annotations

from enum import StrEnum

from muxk.client.study_goals import Goal


class By(StrEnum):
    """What is best."""

    STRICT = "strict"
    JOINT = "joint"
    P99_TBT = "p99-tbt"
    P99_TTFT = "p99-ttft"

    @property
    def is_goodput(self) -> bool:
        return self in (By.STRICT, By.JOINT)

    @property
    def goal(self) -> Goal:
        """Of a goodput."""
        return Goal(self.value)

    @property
    def figure(self) -> str:
        """Of a P99: its name in the JSON of a run."""
        return {By.P99_TBT: "p99_itl_ms", By.P99_TTFT: "p99_ttft_ms"}[self]

    @property
    def unit(self) -> str:
        return "requests/s" if self.is_goodput else "ms"
