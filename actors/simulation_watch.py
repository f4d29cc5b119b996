"""What `simulation.py` puts between a server and its policy and device, to write down what they do.

Neither changes an answer or a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from muxk.kernel.actor import Message, Timer
from muxk.kernel.device import DevicePort, ItemDone, Lane
from muxk.kernel.devices.sim import SimDevice
from muxk.kernel.placing import PlaceAnswer, PlaceView
from muxk.kernel.policy import Policy, widest_group_of
from muxk.kernel.view import (
    AdmitAnswer,
    AdmitView,
    ClassAnswer,
    Decision,
    FormAnswer,
    FormView,
    Limits,
    OrderAnswer,
    RequestClass,
    RequestView,
    RetainAnswer,
    VictimAnswer,
    View,
)
from muxk.kernel.work import DecodeWork, Item, PrefillWork, SamplingColumns
from muxk.policies.run_records import DecisionRecord, ItemRecord, RunRecord

SAMPLED = 122
"""The token that every request gets."""


class Notes:
    """Where both watchers write, once the run has started."""

    def __init__(self, request_name: Callable[[int], str]) -> None:
        """`request_name` gives the client's name of a live request by its number inside."""
        self.run = RunRecord()
        self.start_ns: int | None = None
        """None while the device is measured: nothing is noted."""
        self.classes: dict[int, RequestClass] = {}
        """The first answer for each request, by its number inside."""
        self.victims: list[int] = []
        self._names: dict[int, str] = {}
        self._request_name = request_name

    def name(self, request_id: int) -> str:
        """The client's name of a request, kept from when it was live."""
        if request_id not in self._names:
            self._names[request_id] = self._request_name(request_id)
        return self._names[request_id]

    def named(self) -> Mapping[str, int]:
        """Numbers inside by the client's names."""
        return {name: request_id for request_id, name in self._names.items()}

    def answer(self, sha: str, rules: tuple[str, ...], errors: tuple[str, ...]) -> None:
        """An answer of a policy."""
        hits = self.run.hits_of.setdefault(sha, Counter())
        for rule in rules:
            self.run.hits[rule] += 1
            hits[rule] += 1
        for error in errors:
            self.run.errors[error] += 1

    def item(self, item: Item, lane: Lane, done: ItemDone) -> None:
        if self.start_ns is None or not isinstance(item.work, PrefillWork | DecodeWork):
            return
        self.run.items.append(self._record(item, lane, done, self.start_ns))

    def _record(self, item: Item, lane: Lane, done: ItemDone, start_ns: int) -> ItemRecord:
        work, step = item.work, item.decode
        begins_ns, ends_ns = done.started_ns - start_ns, done.ended_ns - start_ns
        units, layers = len(lane.units), item.last_layer - item.first_layer
        if isinstance(work, PrefillWork):
            phase, rows = ("prefill", 0) if step is None else ("fused", step.rows)
            names = tuple(self.name(request) for request in work.requests)
            tokens = item.last_token - item.first_token
            return ItemRecord(phase, units, begins_ns, ends_ns, names, rows, tokens, layers)
        return ItemRecord("decode", units, begins_ns, ends_ns, (), work.rows, 0, layers)


class WatchedDevice(SimDevice):
    """A simulated device whose items are noted when they end."""

    def __init__(self, notes: Notes, **arguments: Any) -> None:
        """`arguments` are those of SimDevice."""
        super().__init__(**arguments)
        self._notes = notes
        self._items: dict[int, tuple[Item, Lane]] = {}

    def start(self, port: DevicePort) -> None:
        super().start(_WatchedPort(port, self._ended))

    def launch(self, lane: Lane, item: Item, after: Sequence[int]) -> None:
        self._items[item.item_id] = (item, lane)
        super().launch(lane, item, after)

    def _sample(
        self,
        table: npt.NDArray[np.int32],
        rows: list[int],
        lengths: list[int],
        sampling: SamplingColumns,
    ) -> list[int]:
        """Any token will do here, and hashing whole contexts takes a third of the time."""
        return [SAMPLED] * len(rows)

    def _ended(self, done: ItemDone) -> None:
        item, lane = self._items.pop(done.item_id)
        self._notes.item(item, lane, done)


class _WatchedPort:
    """Sees each completion when its time is known, which is at the launch."""

    def __init__(self, port: DevicePort, ended: Callable[[ItemDone], None]) -> None:
        self._port = port
        self._ended = ended

    def now_ns(self) -> int:
        return self._port.now_ns()

    def post(self, message: Message) -> None:
        self._port.post(message)

    def post_after(self, delay_ns: int, message: Message) -> Timer:
        if isinstance(message, ItemDone):
            self._ended(message)
        return self._port.post_after(delay_ns, message)

    def cancel(self, timer: Timer) -> None:
        self._port.cancel(timer)

    def quiet_until_ns(self, beside: Timer) -> int:
        return self._port.quiet_until_ns(beside)


class WatchedPolicy:
    """A policy whose answers are noted; implements `muxk.kernel.policy.Policy`."""

    def __init__(self, policy: Policy, notes: Notes) -> None:
        self._policy = policy
        self._sha = policy.sha
        self._notes = notes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    @property
    def name(self) -> str:
        return self._policy.name

    @property
    def sha(self) -> str:
        return self._sha

    @property
    def limits(self) -> Limits:
        return self._policy.limits

    @property
    def tbt_slo_ns(self) -> int:
        return self._policy.tbt_slo_ns

    @property
    def reads_priority(self) -> bool:
        return self._policy.reads_priority

    @property
    def reads_deadline(self) -> bool:
        return self._policy.reads_deadline

    @property
    def classes(self) -> tuple[str, ...]:
        return self._policy.classes

    @property
    def known_classes(self) -> tuple[str, ...]:
        return self._policy.known_classes

    def classify(self, request: RequestView) -> ClassAnswer:
        answer = self._policy.classify(request)
        self._notes.name(request.request_id)
        self._notes.classes.setdefault(request.request_id, answer.chosen)
        self._notes.answer(self._sha, (answer.rule,), answer.errors)
        return answer

    def admit(self, view: AdmitView) -> AdmitAnswer:
        answer = self._policy.admit(view)
        self._notes.name(view.request.request_id)
        self._notes.answer(self._sha, (answer.rule,), answer.errors)
        return answer

    def order(
        self, requests: Sequence[RequestView], now_ns: int, service: Mapping[str, float]
    ) -> OrderAnswer:
        answer = self._policy.order(requests, now_ns, service)
        self._notes.answer(self._sha, (answer.rule,), answer.errors)
        return answer

    def form(self, view: FormView) -> FormAnswer:
        answer = self._policy.form(view)
        self._notes.answer(self._sha, (answer.rule,), answer.errors)
        return answer

    def decide(self, view: View) -> Decision:
        decision = self._policy.decide(view)
        self._notes.answer(self._sha, decision.rules, decision.errors)
        if self._notes.start_ns is not None:
            at_ns = view.now_ns - self._notes.start_ns
            self._notes.run.decisions.append(DecisionRecord(at_ns, decision.rules))
        return decision

    def victim(self, requests: Sequence[RequestView], now_ns: int) -> VictimAnswer:
        answer = self._policy.victim(requests, now_ns)
        self._notes.victims.append(requests[answer.index].request_id)
        self._notes.answer(self._sha, (answer.rule,), answer.errors)
        return answer

    def retain(self, request: RequestView) -> RetainAnswer:
        answer = self._policy.retain(request)
        self._notes.answer(self._sha, (answer.rule,), answer.errors)
        return answer

    @property
    def places(self) -> bool:
        return self._policy.places

    @property
    def devices_min(self) -> int:
        return self._policy.devices_min

    @property
    def group_devices_max(self) -> int:
        return widest_group_of(self._policy)

    @property
    def fetches_prefix(self) -> bool:
        return self._policy.fetches_prefix

    def place(self, view: PlaceView) -> PlaceAnswer:
        answer = self._policy.place(view)
        self._notes.answer(self._sha, answer.rules, answer.errors)
        return answer
