"""What the supervisor promises on both runtimes: restart as a group, tell, give up with a reason."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from muxk.kernel.actor import Actor, ActorSpec, Message, Ref
from muxk.kernel.messages import EngineFailed
from muxk.kernel.supervisor import RestartLimit

MS = 1_000_000


class Word(Message, frozen=True):
    text: str


class Stop(Message, frozen=True):
    pass


class Scripted(Actor):
    """Does what a test says when it starts."""

    Accepts: ClassVar = Word

    def __init__(self, script: Any) -> None:
        self._script = script

    def started(self) -> None:
        self._script(self)

    def on_word(self, message: Word) -> None: ...


def spec(name: str, actor: Actor) -> ActorSpec:
    return ActorSpec(name, lambda: actor, type(actor))


class Gate(Actor):
    """A permanent child that is told of crashes."""

    Accepts: ClassVar = EngineFailed | Word | Stop

    def __init__(self, log: list[Any], on_failed: Any = None) -> None:
        self.log = log
        self._failed = on_failed

    def on_engine_failed(self, message: EngineFailed) -> None:
        self.log.append((message.actor, message.reason))
        if self._failed is not None:
            self._failed(self)

    def on_word(self, message: Word) -> None:
        self.log.append(message.text)

    def on_stop(self, message: Stop) -> None:
        self.stop("done")


class Worker(Actor):
    """Crashes on the word `crash`; each life gets a number."""

    Accepts: ClassVar = Word

    def __init__(self, name: str, lives: list[str]) -> None:
        self.life = sum(life.startswith(name) for life in lives)
        self.handled: list[str] = []
        lives.append(f"{name}{self.life}")

    def on_word(self, message: Word) -> None:
        self.handled.append(message.text)
        if message.text == "crash":
            self.send(Ref("worker"), Word("of an old life"))
            self.send_after(2 * MS, Ref("worker"), Word("timer of an old life"))
            self.send_after(2 * MS, Ref("gate"), Word("timer of an old life"))
            self.offload(lambda: Word("offload of an old life"), size=1)
            raise RuntimeError("worker broke")

    def describe(self) -> dict[str, Any]:
        return {"life": self.life}


def crash_specs(log: list[Any], lives: list[str], on_failed: Any, words: tuple[str, ...]) -> list[ActorSpec]:
    def script(actor: Actor) -> None:
        if not log:
            for word in words:
                actor.send(Ref("worker"), Word(word))

    return [
        ActorSpec("gate", lambda: Gate(log, on_failed), Gate, permanent=True),
        ActorSpec("worker", lambda: Worker("worker", lives), Worker),
        ActorSpec("other", lambda: Worker("other", lives), Worker),
        ActorSpec("script", lambda: Scripted(script), Scripted),
    ]


def test_a_crash_rebuilds_the_group_and_tells_the_permanent_children(run: Any) -> None:
    log: list[Any] = []
    lives: list[str] = []

    def failed(gate: Gate) -> None:
        gate.send(Ref("worker"), Word("new"))
        gate.send_after(10 * MS, Ref("gate"), Stop())

    outcome = run(crash_specs(log, lives, failed, ("crash", "old")))
    assert outcome.reason == "done"
    assert log == [("worker", "RuntimeError: worker broke")]
    assert lives == ["worker0", "other0", "worker1", "other1"]
    # Neither a message, a timer nor an offloaded function of the old generation got through.
    assert outcome.runtime.actor("worker").handled == ["new"]
    assert outcome.recorded("stopped")[:3] == ["script", "other", "worker"]


def test_a_crash_report_shows_the_actor_its_message_its_state_and_the_trace(run: Any, tmp_path: Any) -> None:
    outcome = run(
        crash_specs([], [], lambda gate: gate.stop("done"), ("fine", "crash")), report_directory=tmp_path
    )
    (report,) = outcome.reports
    assert (report.actor, report.generation, report.message) == ("worker", 1, Word("crash"))
    assert report.state == {"life": 0}
    assert any(record.detail == Word("fine") for record in report.trace)
    (path,) = tmp_path.iterdir()
    text = path.read_text()
    assert "worker broke" in text
    assert "Word(text='crash')" in text
    assert "on_word" in text


def test_too_many_restarts_stop_the_run_with_a_reason(run: Any) -> None:
    log: list[Any] = []

    def failed(gate: Gate) -> None:
        gate.send(Ref("worker"), Word("crash"))

    limit = RestartLimit(restarts=3, within_ns=60_000 * MS)
    outcome = run(crash_specs(log, [], failed, ("crash",)), limit=limit)
    assert (
        outcome.reason == "worker crashed: RuntimeError: worker broke; gave up after 3 restarts within 60 s"
    )
    assert len(outcome.reports) == 4
    assert len(log) == 4, "the permanent child hears of the last crash too"


def test_restarts_that_are_far_apart_never_stop_the_run(run: Any) -> None:
    log: list[Any] = []

    def failed(gate: Gate) -> None:
        if len(log) == 6:
            gate.stop("still alive")
        else:
            gate.send_after(2 * MS, Ref("worker"), Word("crash"))

    limit = RestartLimit(restarts=1, within_ns=1 * MS)
    assert run(crash_specs(log, [], failed, ("crash",)), limit=limit).reason == "still alive"


def test_a_crash_of_a_permanent_child_stops_the_run(run: Any) -> None:
    def failed(gate: Gate) -> None:
        raise KeyError("gone")

    outcome = run(crash_specs([], [], failed, ("crash",)))
    assert outcome.reason == "gate crashed: KeyError: 'gone'"


class StartsOnce(Actor):
    """Its first `fails` restarts crash while starting."""

    Accepts: ClassVar = Word

    def __init__(self, lives: list[int], fails: int, in_factory: bool) -> None:
        lives.append(len(lives))
        self._life, self._fails = lives[-1], fails
        if in_factory:
            self._maybe_fail()

    def started(self) -> None:
        self._maybe_fail()
        if self._life == 0:
            self.send(Ref("a"), Word("crash"))

    def _maybe_fail(self) -> None:
        if 0 < self._life <= self._fails:
            raise OSError("device is lost")

    def on_word(self, message: Word) -> None:
        raise RuntimeError("crash")


@pytest.mark.parametrize("in_factory", [False, True])
def test_a_crash_during_a_restart_is_tried_again_within_the_limit(run: Any, in_factory: bool) -> None:
    lives: list[int] = []
    log: list[Any] = []

    def failed(gate: Gate) -> None:
        if len(lives) == 3:
            gate.send_after(0, Ref("gate"), Stop())

    outcome = run(
        [
            ActorSpec("gate", lambda: Gate(log, failed), Gate, permanent=True),
            ActorSpec("a", lambda: StartsOnce(lives, 1, in_factory), StartsOnce),
        ]
    )
    assert outcome.reason == "done"
    assert [report.reason for report in outcome.reports] == ["RuntimeError: crash", "OSError: device is lost"]


@pytest.mark.parametrize("in_factory", [False, True])
def test_a_device_that_stays_lost_stops_the_run(run: Any, in_factory: bool) -> None:
    lives: list[int] = []
    outcome = run([ActorSpec("a", lambda: StartsOnce(lives, 99, in_factory), StartsOnce)])
    assert outcome.reason.startswith("a crashed: OSError: device is lost; gave up after 3 restarts")


def test_an_exception_in_the_first_start_is_raised(run: Any) -> None:
    def script(actor: Actor) -> None:
        raise OSError("no such model")

    with pytest.raises(OSError, match="no such model"):
        run([spec("a", Scripted(script))])


class Checked(Actor):
    """Its invariant breaks with the first message."""

    Accepts: ClassVar = Word

    def __init__(self) -> None:
        self.words = 0

    def started(self) -> None:
        self.send(Ref("a"), Word("one"))

    def on_word(self, message: Word) -> None:
        self.words += 1

    def idle(self) -> None:
        assert self.words == 0, "pages are lost"


def test_an_invariant_that_fails_when_all_is_quiet_is_a_crash(run: Any) -> None:
    outcome = run([ActorSpec("a", Checked, Checked, permanent=True)])
    assert outcome.reason.startswith("a crashed: AssertionError: pages are lost")


def test_a_port_reaches_the_generation_that_lives_and_never_a_later_one(run: Any) -> None:
    log: list[Any] = []

    def then(runtime: Any) -> None:
        port = runtime.port("worker")
        port.post_after(4 * MS, Word("posted before the crash"))
        port.post(Word("crash"))

    def failed(gate: Gate) -> None:
        gate.send_after(20 * MS, Ref("gate"), Stop())

    outcome = run(crash_specs(log, [], failed, ()), then=then)
    assert outcome.reason == "done"
    assert outcome.runtime.actor("worker").handled == []
