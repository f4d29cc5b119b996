"""What both runtimes promise to actors."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from muxk.kernel.actor import Actor, ActorSpec, ContractError, Message, Ref, Timer

MS = 1_000_000


class Number(Message, frozen=True):
    sender: str
    value: int


class Word(Message, frozen=True):
    text: str


class Stop(Message, frozen=True):
    pass


class Sink(Actor):
    """Keeps everything; stops on Stop, or when it has seen `enough` messages."""

    Accepts: ClassVar = Number | Word | Stop

    def __init__(self, enough: int = 0) -> None:
        self.seen: list[Any] = []
        self.enough = enough

    def _keep(self, thing: Any) -> None:
        self.seen.append(thing)
        if len(self.seen) == self.enough:
            self.stop("enough")

    def on_number(self, message: Number) -> None:
        self._keep((message.sender, message.value))

    def on_word(self, message: Word) -> None:
        self._keep(message.text)

    def on_stop(self, message: Stop) -> None:
        self.stop("stopped by message")

    def describe(self) -> dict[str, Any]:
        return {"seen": len(self.seen)}


class Scripted(Actor):
    """Does what a test says when it starts, and on each Word."""

    Accepts: ClassVar = Word | Number

    def __init__(self, script: Any = None, on_word: Any = None) -> None:
        self._script = script
        self._word = on_word

    def started(self) -> None:
        if self._script is not None:
            self._script(self)

    def on_word(self, message: Word) -> None:
        if self._word is not None:
            self._word(self, message)

    def on_number(self, message: Number) -> None:
        pass


SINK: Ref[Number | Word | Stop] = Ref("sink")


def spec(name: str, actor: Actor, **options: Any) -> ActorSpec:
    return ActorSpec(name, lambda: actor, type(actor), **options)


def test_messages_of_one_sender_arrive_in_the_order_they_were_sent(run: Any) -> None:
    def send_all(name: str) -> Any:
        def script(actor: Actor) -> None:
            for value in range(200):
                actor.send(SINK, Number(name, value))

        return script

    sink = Sink(enough=400)
    outcome = run(
        [spec("sink", sink), spec("a", Scripted(send_all("a"))), spec("b", Scripted(send_all("b")))]
    )
    assert outcome.reason == "enough"
    for name in "ab":
        assert [value for sender, value in sink.seen if sender == name] == list(range(200))


def test_each_message_reaches_the_handler_of_its_type_as_an_equal_copy(run: Any) -> None:
    def script(actor: Actor) -> None:
        actor.send(SINK, Word("héllo\0"))
        actor.send(SINK, Number("a", -(2**62)))

    sink = Sink(enough=2)
    run([spec("sink", sink), spec("a", Scripted(script))])
    assert sink.seen == ["héllo\0", ("a", -(2**62))]


def test_an_actor_can_send_to_itself_and_to_one_that_starts_after_it(run: Any) -> None:
    def script(actor: Actor) -> None:
        actor.send(Ref("a"), Word("to me"))

    def forward(actor: Actor, message: Word) -> None:
        actor.send(SINK, message)

    sink = Sink(enough=1)
    run([spec("a", Scripted(script, forward)), spec("sink", sink)])
    assert sink.seen == ["to me"]


def test_timers_fire_by_deadline_and_equal_ones_in_the_order_they_were_set(run: Any) -> None:
    def script(actor: Actor) -> None:
        for index, delay_ms in enumerate((0, 0, 0, 120, 60)):
            actor.send_after(delay_ms * MS, SINK, Number(str(delay_ms), index))

    sink = Sink(enough=5)
    run([spec("sink", sink), spec("a", Scripted(script))])
    assert [value for _, value in sink.seen] == [0, 1, 2, 4, 3]


def test_a_timer_never_fires_early(run: Any) -> None:
    times: list[int] = []

    def script(actor: Actor) -> None:
        times.append(actor.now_ns())
        actor.send_after(5 * MS, Ref("a"), Word("later"))

    def arrived(actor: Actor, message: Word) -> None:
        times.append(actor.now_ns())
        actor.stop("done")

    run([spec("a", Scripted(script, arrived))])
    assert times[1] - times[0] >= 5 * MS


def test_a_cancelled_timer_does_not_fire_and_cancelling_a_fired_one_is_ignored(run: Any) -> None:
    timers: list[Timer] = []

    def script(actor: Actor) -> None:
        timers.append(actor.send_after(1 * MS, Ref("a"), Word("first")))
        actor.cancel(actor.send_after(2 * MS, SINK, Word("never")))

    def arrived(actor: Actor, message: Word) -> None:
        actor.cancel(timers[0])
        actor.send_after(5 * MS, SINK, Stop())

    sink = Sink()
    outcome = run([spec("sink", sink), spec("a", Scripted(script, arrived))])
    assert outcome.reason == "stopped by message"
    assert sink.seen == []


def test_a_handler_can_set_a_timer_that_is_earlier_than_all_others(run: Any) -> None:
    def script(actor: Actor) -> None:
        actor.send_after(3_600_000 * MS, SINK, Word("in an hour"))
        actor.send_after(5 * MS, Ref("a"), Word("soon"))

    def arrived(actor: Actor, message: Word) -> None:
        actor.send_after(1 * MS, SINK, Stop())

    outcome = run([spec("sink", Sink()), spec("a", Scripted(script, arrived))])
    assert outcome.reason == "stopped by message"


def test_the_message_of_an_offloaded_function_arrives_at_the_actor_that_asked(run: Any) -> None:
    def script(actor: Actor) -> None:
        for value in range(20):
            actor.offload(lambda value=value: Word(str(value)), size=10)

    seen: list[str] = []

    def arrived(actor: Actor, message: Word) -> None:
        seen.append(message.text)
        if len(seen) == 20:
            actor.stop("done")

    run([spec("a", Scripted(script, arrived))])
    assert seen == [str(value) for value in range(20)]


def test_an_exception_in_an_offloaded_function_is_a_crash_of_the_actor(run: Any) -> None:
    def script(actor: Actor) -> None:
        def fail() -> Message:
            raise ValueError("no such token")

        actor.offload(fail, size=1)

    outcome = run([spec("a", Scripted(script), permanent=True)])
    assert outcome.reason == "a crashed: ValueError: no such token"


def test_stop_gives_its_reason_and_lets_no_later_message_be_handled(run: Any) -> None:
    def script(actor: Actor) -> None:
        actor.send(SINK, Stop())
        actor.send(SINK, Word("too late"))

    sink = Sink()
    outcome = run([spec("sink", sink), spec("a", Scripted(script))])
    assert outcome.reason == "stopped by message"
    assert sink.seen == []


def test_children_start_in_order_and_stop_in_reverse(run: Any) -> None:
    def script(actor: Actor) -> None:
        actor.stop("done")

    outcome = run([spec("first", Sink()), spec("second", Sink()), spec("third", Scripted(script))])
    assert outcome.recorded("started") == ["first", "second", "third"]
    assert outcome.recorded("stopped") == ["third", "second", "first"]


class Draining(Actor):
    """Notes the call; the last one stops the run."""

    Accepts: ClassVar = Word

    def __init__(self, name: str, log: list[str], stops: str) -> None:
        self._name, self._log, self._stops = name, log, stops

    def on_word(self, message: Word) -> None:
        self._log.append(message.text)

    def draining(self) -> None:
        self._log.append(self._name)
        if self._name == self._stops:
            self.stop("drained")


def test_draining_is_called_once_on_every_actor_in_order(run: Any) -> None:
    log: list[str] = []

    def then(runtime: Any) -> None:
        runtime.request_drain()
        runtime.request_drain()

    outcome = run([spec(name, Draining(name, log, "b")) for name in "ab"], then=then)
    assert outcome.reason == "drained"
    assert log == ["a", "b"]


def test_a_stop_that_is_asked_for_from_outside_is_the_reason(run: Any) -> None:
    def then(runtime: Any) -> None:
        runtime.request_stop("interrupted")
        runtime.request_stop("later reasons do not count")

    assert run([spec("sink", Sink())], then=then).reason == "interrupted"


class Unhandled(Actor):
    Accepts: ClassVar = Number | Word

    def on_number(self, message: Number) -> None: ...


class Unaccepted(Actor):
    Accepts: ClassVar = Number

    def on_number(self, message: Number) -> None: ...

    def on_word(self, message: Word) -> None: ...


@pytest.mark.parametrize("actor_class", [Unhandled, Unaccepted])
def test_a_runtime_refuses_actors_whose_handlers_and_accepts_differ(
    run: Any, actor_class: type[Actor]
) -> None:
    with pytest.raises(ContractError, match="word"):
        run([ActorSpec("a", actor_class, actor_class)])


def test_a_send_to_nobody_is_a_crash_of_the_sender(run: Any) -> None:
    def on_word(actor: Actor, message: Word) -> None:
        actor.send(Ref("nobody"), message)

    def script(actor: Actor) -> None:
        actor.send(Ref("a"), Word("go"))

    outcome = run([spec("a", Scripted(script, on_word), permanent=True)])
    assert outcome.reason == "a crashed: UnknownRef: there is no actor named 'nobody'"


def test_a_send_that_the_receiver_does_not_accept_is_a_crash_of_the_sender(run: Any) -> None:
    def on_word(actor: Actor, message: Word) -> None:
        actor.send(Ref("a"), Stop())

    def script(actor: Actor) -> None:
        actor.send(Ref("a"), Word("go"))

    outcome = run([spec("a", Scripted(script, on_word), permanent=True)])
    assert outcome.reason == "a crashed: ContractError: a does not accept Stop"


def test_a_field_of_the_wrong_type_is_a_crash_that_names_the_field(run: Any) -> None:
    def script(actor: Actor) -> None:
        actor.send(SINK, Word(text=17))  # type: ignore[arg-type]

    outcome = run([spec("sink", Sink(), permanent=True), spec("a", Scripted(script))])
    assert "sink crashed: ValidationError" in outcome.reason
    assert "$.text" in outcome.reason


@pytest.mark.parametrize(("messages", "overflows"), [(8, False), (9, True)])
def test_one_message_over_the_bound_of_an_inbox_is_a_crash_of_the_receiver(
    run: Any, messages: int, overflows: bool
) -> None:
    def script(actor: Actor) -> None:
        for value in range(messages - 1):
            actor.send(SINK, Number("a", value))
        actor.send(SINK, Stop())

    outcome = run([spec("sink", Sink(), inbox_bound=8, permanent=True), spec("a", Scripted(script))])
    over = "sink crashed: InboxOverflow: the inbox of sink is over its bound of 8 messages"
    assert outcome.reason == (over if overflows else "stopped by message")


def test_an_inbox_that_is_emptied_in_time_takes_any_number_of_messages(run: Any) -> None:
    def on_word(actor: Actor, message: Word) -> None:
        left = int(message.text)
        if left == 0:
            actor.stop("done")
        else:
            actor.send(Ref("a"), Word(str(left - 1)))

    def script(actor: Actor) -> None:
        for _ in range(5):
            actor.send(Ref("a"), Word("400"))

    assert run([spec("a", Scripted(script, on_word), inbox_bound=6)]).reason == "done"
