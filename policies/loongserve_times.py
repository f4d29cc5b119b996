"""LoongServe's estimates of groups at work: when a prefill ends, and what is left of answers.

A group's own clock is not told. What is known is when its prompts were sent to it, when its rows began to
decode (on the mean), and how long answers were that ended; steps are as long as their estimate says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from muxk.kernel.placing import GroupView, PlaceView
from muxk.policies.loongserve_batching import PrefillTimes

STEPS_LEFT_LEAST = 10
"""Decode steps that are taken to be left at least (LoongServe's code)."""
SHARE_LEFT_LEAST = 0.1
"""And of answers that are longer than the mean already, this share of what they have."""


@dataclass(frozen=True, slots=True)
class GroupTimes:
    """Of the groups of a view."""

    view: PlaceView
    prefill: PrefillTimes

    def step_ns(self, group: GroupView) -> float:
        """Of a decode step."""
        return self.view.estimates.decode_ns(self.view.units, group.decoding, group.context_tokens)

    def answered(self, group: GroupView) -> float:
        """Tokens that a row has said, on the mean; at least 1."""
        return self._steps_since(group, group.answers_since_ns)

    def _steps_since(self, group: GroupView, since_ns: int) -> float:
        return max(1.0, (self.view.now_ns - since_ns) / max(1.0, self.step_ns(group)))

    def left_ns(self, group: GroupView) -> float:
        """Until what a group does now is done: the longest of its answers, which is that of the newest row,
        as answers go. Infinite while nothing is known of them."""
        if group.waiting:
            return self.prefill_left_ns(group)
        mean = self.view.answer_tokens
        if not group.decoding or not mean:
            return math.inf
        newest, answered = self._steps_since(group, group.newest_since_ns), self.answered(group)
        steps = max(STEPS_LEFT_LEAST, mean - newest, SHARE_LEFT_LEAST * answered)
        return self.step_ns(group) * steps

    def prefill_left_ns(self, group: GroupView) -> float:
        """Until the prompts that were sent to it are computed; 0 when they are late."""
        tokens = group.pending_tokens
        each = tokens // max(1, group.waiting)
        pairs = group.waiting * each * (each + 1) // 2
        ends_ns = group.prefill_since_ns + self.prefill.time_ns(len(group.devices), tokens, pairs)
        return max(0.0, ends_ns - self.view.now_ns)

    def wait_ns(self, groups: Sequence[GroupView]) -> float:
        """Until the last of these is done; infinite where there are none, for then nobody is worth a wait."""
        return max(map(self.left_ns, groups), default=math.inf)

    def slowdown(self, group: GroupView, pause_ns: float) -> float:
        """What a pause adds to each token of the answers that it holds up, summed over the rows."""
        return group.decoding * pause_ns / self.answered(group)
