"""An abort, two of them, a client that leaves, a stranger's abort, the same name again: in every state.

Each state is one that the actors can tell, not a time after arrival: the clock moves until the request is in
it. Whatever happens then, the request has one end, its pages are back as soon as no item in flight may touch
them, and its neighbour says what it says alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from muxk.actors import protocol as wire
from muxk.actors.decode_rows import Row
from muxk.kernel.devices.sim import END_TOKEN
from muxk.kernel.jobs import PrefillJob
from virtual_server import MS, S, VirtualServer, expected_tokens

START_NS = 2 * S
MOMENT_NS = 20_000
LAYERS = 8
CLIENT, NEIGHBOUR, STRANGER = b"client", b"neighbour", b"stranger"
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
NEIGHBOURS: dict[str, Any] = {"prompt_token_ids": [65] * 30, "max_tokens": 40, **GREEDY}

PARKING = """
  preempt:
    - {name: shorter, when: candidate.new_tokens < 100 and running.depth == 0, then: park}
    - {name: otherwise, then: continue}
"""
# Prefill waits for the stream's end, in the middle.
HELD = """
  split:
    - name: hold
      when: decode.batch > 0 and running.active and {held}
      then: {{decode: all}}
    - {{name: share, then: {{decode: all, prefill: all}}}}
  slice: {{layers: {layers}, tokens: 64}}
"""
HELD_IN_A_CHUNK = HELD.format(held="running.layers_left < 5", layers=1)
HELD_BETWEEN_CHUNKS = HELD.format(
    held="running.chunk_tokens == 0 and running.tokens_left < 300", layers="all"
)


def prompt_that_ends(least: int, most: int) -> list[int]:
    """A prompt whose answer ends by itself after so many tokens."""
    for number in range(5000):
        prompt = [97 + number % 26, 97 + number // 26 % 26, 97 + number // 676]
        if least <= len(expected_tokens(prompt, most + 1, stop_at_end=True)) <= most:
            return prompt
    raise AssertionError("no such prompt")


@dataclass(frozen=True)
class Place:
    """How a request gets into a state, and how it is known to be there."""

    there: Callable[[Look], bool]
    policy: str = "muxwise"
    rules: str = ""
    """What the policy says besides."""
    it: dict[str, Any] = field(default_factory=lambda: {"prompt_token_ids": [66] * 400, "max_tokens": 6})
    others: tuple[dict[str, Any], ...] = ()
    """Requests of the neighbour that arrive just before it."""
    late: tuple[dict[str, Any], ...] = ()
    """Those that arrive a little after it."""
    kv_tokens: int = 4096
    after_ms: int = 30
    """When it arrives, after the neighbour's stream."""


class Look:
    """What the actors know of the request `it`."""

    def __init__(self, server: VirtualServer) -> None:
        self.server = server
        self.request_id = 0

    def state(self, actor: str) -> Any:
        return self.server.runtime.actor(actor).state  # type: ignore[attr-defined]

    def find(self) -> None:
        live = self.state("gateway").names.get(CLIENT, {}).get("it")
        if live is not None:
            [self.request_id] = live.choices

    @property
    def row(self) -> Row | None:
        row = self.state("decode").batch.rows.get(self.request_id)
        assert row is None or isinstance(row, Row)
        return row

    @property
    def steps(self) -> int:
        """Versions of decode steps with it that may still run."""
        found: int = self.state("decode").flow.versions_with(self.request_id)
        return found

    @property
    def job(self) -> PrefillJob | None:
        for job in self.state("arbiter").jobs.values():
            if self.request_id in job.work.requests:
                assert isinstance(job, PrefillJob)
                return job
        return None

    @property
    def fused(self) -> bool:
        flights = self.server.runtime.actor("arbiter")._lanes.flights.values()  # type: ignore[attr-defined]
        return any(flight.decode and self.request_id in flight.work.requests for flight in flights)

    @property
    def queued(self) -> Any:
        return self.state("admission").waiting.get(self.request_id)

    @property
    def prefilled_again(self) -> bool:
        return any(
            reserved.request.request_id == self.request_id and reserved.request.recomputes
            for batch in self.state("prefill").batches.values()
            for reserved in batch.left
        )

    @property
    def pages(self) -> int:
        return len(self.state("kv_pool").pool.pages_of(self.request_id))


def layers_in_flight(look: Look) -> bool:
    job = look.job
    return job is not None and job.in_flight > 0 and 0 < job.next_layer < LAYERS


def last_layer_in_flight(look: Look) -> bool:
    return look.job is not None and look.job.launched and look.job.in_flight > 0


def between_layers(look: Look) -> bool:
    return look.job is not None and look.job.in_flight == 0 and 0 < look.job.next_layer < LAYERS


def parked(look: Look) -> bool:
    return look.job is not None and look.state("arbiter").parked is look.job


def between_chunks(look: Look) -> bool:
    job = look.job
    return job is not None and job.in_flight == 0 and job.between_chunks and 0 < job.chunk.stop < 400


def decoding_before_its_batch_is_read(look: Look) -> bool:
    batches = look.state("prefill").batches.values()
    return look.row is not None and any(
        reserved.request.request_id == look.request_id for batch in batches for reserved in batch.requests
    )


def evicted(look: Look) -> bool:
    return look.row is not None and look.row.ending is not None and look.row.ending.recompute


def last_step(look: Look) -> bool:
    row = look.row
    return row is not None and row.ending is None and not row.goes_on


def over_but_in_a_step(look: Look) -> bool:
    row = look.row
    return row is not None and row.ending is not None and look.steps > 0


SHORT_POOL: dict[str, Any] = {
    "kv_tokens": 192,
    "it": {"prompt_token_ids": [66] * 40, "max_tokens": 70},
    "others": ({"prompt_token_ids": [67] * 40, "max_tokens": 70, **GREEDY},),
}
TEXTS: dict[str, Any] = {
    "it": {"prompt": "B" * 900, "max_tokens": 6},
    "others": ({"prompt": "C" * 900, "max_tokens": 3, **GREEDY},) * 2,
}
STREAM = {"prompt_token_ids": [66] * 40, "max_tokens": 30}

PLACES = {
    "waits for the tokenizer": Place(
        lambda look: look.request_id in look.state("tokenizer").waiting,
        **TEXTS,
    ),
    "is tokenised": Place(lambda look: look.state("tokenizer").encoding == look.request_id, it=TEXTS["it"]),
    "waits for pages": Place(
        lambda look: look.queued is not None,
        kv_tokens=512,
        others=({"prompt_token_ids": [67] * 300, "max_tokens": 40, **GREEDY},),
    ),
    "some layers run": Place(layers_in_flight),
    "its last layer runs": Place(last_layer_in_flight),
    "between layers": Place(between_layers, rules=HELD_IN_A_CHUNK),
    "parked": Place(
        parked, rules=PARKING, late=({"prompt_token_ids": [68] * 9, "max_tokens": 3, **GREEDY},), after_ms=31
    ),
    "between chunks": Place(between_chunks, rules=HELD_BETWEEN_CHUNKS),
    "a fused step runs": Place(lambda look: look.fused, policy="chunked"),
    "decodes while its batch is read": Place(
        decoding_before_its_batch_is_read,
        policy="chunked",
        it=STREAM,
        late=({"prompt_token_ids": [68] * 500, "max_tokens": 3, **GREEDY},),
        others=({"prompt_token_ids": [67] * 200, "max_tokens": 3, **GREEDY},),
    ),
    "its first token is held back": Place(
        lambda look: any(row.request_id == look.request_id for _, row in look.state("decode").held.rows)
    ),
    "two steps in flight": Place(
        lambda look: look.row is not None and look.row.ahead > 0 and look.steps > 1, it=STREAM
    ),
    "evicted, a step runs": Place(evicted, **SHORT_POOL),
    "evicted, in the queue": Place(
        lambda look: look.queued is not None and look.queued.recomputes > 0, **SHORT_POOL
    ),
    "computed again": Place(lambda look: look.prefilled_again, **SHORT_POOL),
    "its last step runs": Place(last_step, it=STREAM),
    "over, a step runs": Place(
        over_but_in_a_step,
        it={"prompt_token_ids": prompt_that_ends(4, 20), "max_tokens": 40, "ignore_eos": False},
    ),
    "over": Place(lambda look: bool(look.server.outcome("it").terminal), it=STREAM),
}
ENDED = ("over, a step runs", "over")


def stage(place: Place, seed: int) -> tuple[VirtualServer, Look]:
    """A server in which the request is in its place now."""
    server = VirtualServer(
        place.policy, kv_tokens=place.kv_tokens, layers=LAYERS, calibrate=False, seed=seed, jitter=seed > 0
    )
    if place.rules:
        head = "apiVersion: muxk/v1alpha1\nkind: SchedulingPolicy\nmetadata: {name: staged}\n"
        source = f"{head}spec:\n  extends: {place.policy}\n{place.rules}"
        server.send(S, wire.SwapPolicy(source, "staged.yaml"))
    server.submit(START_NS, "stream", NEIGHBOUR, **NEIGHBOURS)
    arrival_ns = START_NS + place.after_ms * MS
    for index, fields in enumerate(place.others):
        server.submit(arrival_ns, f"other{index}", NEIGHBOUR, **fields)
    server.submit(arrival_ns, "it", **(GREEDY | place.it))
    for index, fields in enumerate(place.late):
        server.submit(arrival_ns + MS // 2, f"late{index}", NEIGHBOUR, **fields)
    look = Look(server)
    server.run_until(arrival_ns)
    assert not place.rules or server.describe("arbiter")["policy"] == "staged"
    while server.runtime.now_ns() < arrival_ns + 2 * S:
        look.find()
        if look.request_id and place.there(look):
            return server, look
        next_ns = server.runtime._agenda.next_ns()
        assert next_ns is not None
        server.run_until(next_ns)
    raise AssertionError("it was never there")


def answer(fields: dict[str, Any]) -> list[int]:
    prompt = fields.get("prompt_token_ids") or list(fields["prompt"].encode())
    return expected_tokens(prompt, fields["max_tokens"], stop_at_end=not fields.get("ignore_eos", True))


def check_neighbour(server: VirtualServer, place: Place) -> None:
    """All its requests say what they say alone, and end once."""
    named = {"stream": NEIGHBOURS}
    named |= {f"other{index}": fields for index, fields in enumerate(place.others)}
    named |= {f"late{index}": fields for index, fields in enumerate(place.late)}
    for name, fields in named.items():
        outcome = server.outcome(name, NEIGHBOUR)
        assert outcome.tokens == answer(fields), name
        assert [end.finish_reason for end in outcome.terminal] == ["length"]


def pages_are_due_ns(server: VirtualServer) -> int:
    """When the items end that are in flight now."""
    return max(server.runtime.now_ns(), *server.device._ends_ns.values()) + MS


@pytest.mark.parametrize("how", ["abort twice", "leave"])
@pytest.mark.parametrize("name", PLACES)
def test_an_end_from_outside_frees_all_it_held_by_the_end_of_what_runs(name: str, how: str) -> None:
    place = PLACES[name]
    server, look = stage(place, seed=0)
    now_ns = server.runtime.now_ns()
    before = list(server.outcome("it").tokens)
    for _ in range(2 if how == "abort twice" else 1):
        server.leave(now_ns, CLIENT) if how == "leave" else server.abort(now_ns, "it")
    server.run_until(pages_are_due_ns(server))
    assert look.pages == 0
    server.run_until(now_ns + 10 * S)
    outcome = server.outcome("it")
    if name in ENDED:
        assert [end.finish_reason for end in outcome.terminal] == ["stop" if "step" in name else "length"]
        assert outcome.tokens == answer(GREEDY | place.it)
    else:
        assert [end.finish_reason for end in outcome.terminal] == ([] if how == "leave" else ["abort"])
        assert outcome.tokens == before
        assert server.describe("gateway")["aborts"] == 1
    check_neighbour(server, place)
    server.check_whole()


@pytest.mark.parametrize("name", PLACES)
def test_a_stranger_can_end_nothing_and_a_name_is_free_at_once_after_an_abort(name: str) -> None:
    place = PLACES[name]
    server, _ = stage(place, seed=1)
    now_ns = server.runtime.now_ns()
    server.abort(now_ns, "it", STRANGER)
    server.leave(now_ns, STRANGER)
    server.run_until(now_ns + MOMENT_NS)
    assert name in ENDED or not server.outcome("it").terminal
    server.abort(now_ns + MOMENT_NS, "it")
    server.run_until(now_ns + MOMENT_NS)
    first = server.outcomes.pop((CLIENT, "it"))
    assert len(first.terminal) == 1
    server.submit(now_ns + MOMENT_NS, "it", **(GREEDY | place.it))
    server.run_until(now_ns + 20 * S)
    again = server.outcome("it")
    assert again.tokens == answer(GREEDY | place.it)
    assert [type(end) for end in again.terminal] == [wire.Finished]
    check_neighbour(server, place)
    server.check_whole()


@pytest.mark.parametrize("seed", range(1, 9))
def test_an_abort_that_crosses_an_eviction_on_its_way_ends_all_work_for_it(seed: int) -> None:
    server, look = stage(PLACES["evicted, a step runs"], seed)
    while look.row is not None:  # message by message: now it is on its way to the queue
        server.step()
    server.abort(server.runtime.now_ns(), "it")
    server.run_until(server.runtime.now_ns())
    assert (look.queued, look.job, look.row, look.pages) == (None, None, None, 0)
    assert [end.finish_reason for end in server.outcome("it").terminal] == ["abort"]
    server.run_until(server.runtime.now_ns() + 10 * S)
    check_neighbour(server, PLACES["evicted, a step runs"])
    server.check_whole()


@pytest.mark.parametrize("name", ["some layers run", "its last layer runs", "two steps in flight"])
def test_pages_that_an_item_in_flight_may_touch_are_not_given_to_the_next_one(name: str) -> None:
    place = replace(PLACES[name], kv_tokens=512, after_ms=5)
    server, look = stage(place, seed=0)
    now_ns, held = server.runtime.now_ns(), look.state("kv_pool").pool.pages_of(look.request_id)
    server.abort(now_ns, "it")
    for index in range(3):
        server.submit(now_ns, f"next{index}", prompt_token_ids=[68 + index] * 120, max_tokens=20, **GREEDY)
    server.run_until(now_ns + 10 * S)
    assert len(held) > 3
    for index in range(3):  # a page that two requests had would change what one of them says
        assert server.outcome(f"next{index}").tokens == expected_tokens([68 + index] * 120, 20)
    assert server.describe("gateway")["failed"] == 0
    check_neighbour(server, place)
    server.check_whole()


@pytest.mark.parametrize("seed", range(5))
def test_an_abort_at_the_moment_of_the_last_token_ends_it_once_either_way(seed: int) -> None:
    def serve(abort_ns: int | None) -> VirtualServer:
        server = VirtualServer(calibrate=False, seed=seed, jitter=True)
        server.submit(START_NS, "it", **(GREEDY | STREAM))
        if abort_ns is not None:
            server.abort(abort_ns, "it")
        server.run_until(START_NS + 5 * S)
        return server

    last_ns = serve(None).outcome("it").times_ns[-1]
    server = serve(last_ns)
    outcome = server.outcome("it")
    [end] = outcome.terminal
    whole = answer(GREEDY | STREAM)
    assert outcome.tokens == (whole if end.finish_reason == "length" else whole[: len(outcome.tokens)])
    assert end.completion_tokens == len(outcome.tokens)
    shown = server.describe("gateway")
    assert shown["aborts"] + shown["finished"] == 1
    server.check_whole()


def test_aborts_of_names_that_nobody_knows_cost_no_work() -> None:
    server = VirtualServer(calibrate=False)
    server.submit(START_NS, "stream", NEIGHBOUR, **NEIGHBOURS)
    for index in range(500):
        server.abort(START_NS + index * MS, f"nobody{index % 7}", STRANGER)
    server.run_until(START_NS + 5 * S)
    assert server.outcome("stream", NEIGHBOUR).tokens == answer(NEIGHBOURS)
    assert server.describe("gateway")["aborts"] == 0
    assert not [event for _, peer, event in server.events if peer == STRANGER]
    server.check_whole()


def test_the_end_token_is_none_of_the_text_of_a_request_that_ends_by_itself() -> None:
    """What `over, a step runs` relies on: the answer of that prompt ends by its end token."""
    tokens = answer(GREEDY | PLACES["over, a step runs"].it)
    assert tokens[-1] == END_TOKEN
