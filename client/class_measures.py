"""What each class of requests got, judged by the SLOs that the policy gives that class."""

from __future__ import annotations

import msgspec
from muxk.client.measures import MS, Judgement, Measures, Objectives, Served
from muxk.client.traffic import TrafficRequest
from muxk.kernel.policy import Policy
from muxk.kernel.view import RequestClass, RequestView


class ClassMeasures:
    """Of a policy with several classes; for others it stays empty."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._classed = len(policy.classes) > 1
        self.by_name: dict[str, Measures] = {}
        """Of the classes that requests came for, in the order in which the first of each ended."""

    def class_of(self, request: TrafficRequest, prompt_tokens: int) -> RequestClass | None:
        """The class of a request when it is sent; None where there is only one."""
        if not self._classed:
            return None
        view = RequestView(
            request_id=0,
            arrival_ns=0,
            deadline_ns=0,
            prompt_tokens=prompt_tokens,
            generated_tokens=0,
            max_tokens=request.output_tokens,
            pages=0,
            priority=0,
            recomputes=0,
            request_class=request.request_class,
        )
        return self._policy.classify(view).chosen

    def add(self, served: Served, chosen: RequestClass | None) -> None:
        """Count a request in its class."""
        if chosen is None:
            return
        if chosen.name not in self.by_name:
            self.by_name[chosen.name] = Measures(Objectives(tbt_ms=chosen.tbt_slo_ns / MS))
        self.by_name[chosen.name].add(served)


def judge(overall: Measures, classes: dict[str, Measures]) -> Judgement:
    """By the objectives of all, or by those of each class where there are several.

    Then strict: the queue is stable and each class keeps its own TBT SLO at P99; joint: 90 % of all requests
    meet the TTFT and TPOT of their class.
    """
    judged = overall.judge()
    if not classes:
        return judged
    limits, requests = overall.objectives, overall.totals.requests
    good = sum(one.totals.good for one in classes.values()) / requests if requests else 0.0
    shares = [one.judge().gaps_over_share for one in classes.values()]
    return msgspec.structs.replace(
        judged,
        strict=judged.stable and max(shares) <= limits.gaps_over_max,
        joint=good >= limits.joint_share,
        gaps_over_share=max(shares),
        good_share=good,
    )
