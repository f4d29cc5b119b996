"""What a driven load saw: one record a request, on the client's clock."""

from __future__ import annotations

from dataclasses import dataclass, field

SHORT = "short"
LONG = "long"


@dataclass(slots=True)
class Record:
    """One request as its client saw it. Times are `perf_counter_ns`."""

    kind: str
    """`short` or `long`."""
    prompt_tokens: int
    submitted_ns: int
    arrivals_ns: list[int] = field(default_factory=list)
    """One entry for each event that brought tokens, ascending."""
    arrival_tokens: list[int] = field(default_factory=list)
    """Tokens of each of these events."""
    ended_ns: int = 0
    """0 while it goes on."""
    error: str = ""

    def arrived(self, at_ns: int, tokens: int) -> None:
        """Note an event; one that brought only text is no token."""
        if tokens:
            self.arrivals_ns.append(at_ns)
            self.arrival_tokens.append(tokens)


@dataclass(frozen=True)
class Phase:
    """A window of a driven load: [start_ns, end_ns)."""

    name: str
    start_ns: int
    end_ns: int

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9

    def holds(self, at_ns: int) -> bool:
        return self.start_ns <= at_ns < self.end_ns
