"""The plan `loongserve`: groups of devices that grow for prefill and shrink for decode.

LoongServe (Wu et al., SOSP 2024), its four steps each time something changes. *Dispatch* takes requests of
the queue, on idle devices, or on those of a group that decodes and pauses for them. *Allocation* empties
devices by moving what decodes together, where that is faster than to prefill without them. *Batching* cuts
requests and idle devices into groups (`loongserve_batching.py`). The *scaling plan* says how many devices a
group keeps when its prompts are computed, and gives a group that decodes another one when its pages run
short or its batch is so large that decode is bound by arithmetic.

While prompts are computed it is a *macro-iteration*: devices that come free meanwhile take requests that are
done before it ends, and all else is decided anew when it has ended. Requests that came earlier are overtaken
in a bounded number of dispatches in a row; then they go in order until one of them has.

What differs from the paper, and why. A round begins whenever something changes, not every ten decode steps
of all groups: here groups step on their own, so `max_wait_steps` is counted for each that is to pause.
Several groups pause in one round, each for prompts of its own: a prompt is never computed by the devices of
two groups whose KV stays, since a group has one pool and one running batch; to give it those devices one
group moves into the other first, which costs a copy where the paper's merge costs none. For the same reason
a group that runs short of pages moves as a whole. What is computed beside a group that decodes joins it at
once, where it has room, and not in the next round. Worst cases are sums of longest answers, not the paper's
schedule of who ends when. How far answers are is not told: it follows from when they began and the estimate
of a step. A pause is told by the mean length of what the rows have said, where the paper sums over rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from muxk.kernel.placing import Assign, Grow, Move, PlaceAnswer, PlaceView, Shrink
from muxk.policies.loongserve_planner import Planner, Settings
from muxk.policies.plans import API_VERSION, Answer, PlanParam
from muxk.policies.units import Type

LABEL = "place/loongserve"

_PARAMS: Mapping[str, PlanParam] = {
    "max_prefill": PlanParam(
        Type.DURATION,
        500e6,
        1,
        1e15,
        "longest prefill of several requests (5s in the paper)",
    ),
    "max_out_of_order": PlanParam(
        Type.NUMBER, 10, 0, 1e6, "dispatches in a row that may pass a request over", whole=True
    ),
    "max_wait_steps": PlanParam(
        Type.NUMBER, 10, 0, 1e6, "decode steps of a group between two times that it pauses", whole=True
    ),
    "max_batch_tokens": PlanParam(Type.NUMBER, 65_536, 1, 1e9, "prompt tokens of a batch", whole=True),
    "decode_batch": PlanParam(
        Type.NUMBER,
        100,
        1,
        1e6,
        "rows a device from which arithmetic bounds decode (128 in the paper)",
        True,
    ),
    "max_width": PlanParam(Type.NUMBER, 8, 1, 8, "devices of one group, at most", whole=True),
    "decode_width": PlanParam(Type.NUMBER, 1, 1, 8, "devices that a group keeps for decode, at least", True),
}


_STEPS: Mapping[type, str] = {
    Assign: f"{LABEL}-dispatch",
    Grow: f"{LABEL}-scale-up",
    Shrink: f"{LABEL}-scale-down",
    Move: f"{LABEL}-consolidate",
}


@dataclass(frozen=True)
class LoongServe:
    """Implements `plans.Plan`."""

    api_version: int = API_VERSION
    devices_min: int = 2
    labels: tuple[str, ...] = tuple(_STEPS.values())
    params: Mapping[str, PlanParam] = field(default_factory=lambda: _PARAMS)
    about: str = (
        "LoongServe: elastic sequence parallelism. Groups of devices that grow for prefill and shrink for "
        "decode; groups that decode pause for a prefill, or move together, where that is worth it. Devices "
        "that can not form groups are used one by one."
    )

    def group_devices_max(self, values: Mapping[str, float]) -> int:
        """See `plans.group_devices_max`."""
        return int(values["max_width"])

    def __call__(self, values: Mapping[str, float], /) -> Answer:
        """The plan under values of its parameters."""
        settings = Settings(**{each.name: values[each.name] for each in fields(Settings)})
        return lambda view: plan(view, settings)


def plan(view: PlaceView, settings: Settings) -> PlaceAnswer:
    """What is done now."""
    actions = tuple(Planner(view, settings).actions())
    labels = dict.fromkeys(_STEPS[type(action)] for action in actions)
    return PlaceAnswer(actions, tuple(labels))
