"""What the figures of runs do not say by themselves: whose SLOs they are judged by, and rules that failed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from muxk.client.sim_report import errors_in_words


class RunNotes:
    """Takes the figures of runs in any order, under the name of their policy."""

    def __init__(self) -> None:
        self._errors: dict[str, dict[str, int]] = {}
        self._classes: dict[str, dict[str, float]] = {}

    def add(self, name: str, figures: Mapping[str, Any]) -> None:
        """The JSON of `muxk sim`; one of a run that failed may be empty."""
        for text, count in figures.get("policy_errors", {}).items():
            errors = self._errors.setdefault(name, {})
            errors[text] = errors.get(text, 0) + count
        for one, measured in figures.get("classes", {}).items():
            self._classes.setdefault(name, {})[one] = measured["slo"]["tbt_ms"]

    def lines(self) -> Iterator[str]:
        """Sentences, in the order of the names."""
        for name, slos in sorted(self._classes.items()):
            listed = ", ".join(f"{one} {tbt_ms:g} ms" for one, tbt_ms in sorted(slos.items()))
            yield (
                f"{name} has classes: strict, joint and goodputs judge each class by its own TTFT and TBT "
                f"SLO (TBT: {listed}), whatever --tbt and --ttft say."
            )
        for name, errors in sorted(self._errors.items()):
            yield f"{name}: {errors_in_words(errors)}"
