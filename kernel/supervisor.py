"""The supervisor: starts children, restarts them as one group after a crash, stops them in reverse.

Children that are not permanent share fate: they hold parts of the same live requests, so one of them is
never restarted alone. Nothing of an old generation (inbox, timer, offloaded function) reaches a new one.
A crash of a permanent child, or too many restarts, stops the runtime with a reason.
"""

from __future__ import annotations

import logging
import os
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from muxk.kernel.actor import Actor, ActorSpec, Context, Message, check_contract
from muxk.kernel.messages import EngineFailed
from muxk.kernel.trace import Record, Trace

REPORT_RECORDS = 200
"""Trace records in a crash report."""

REPORT_FILES = 16
"""Crash report files one process keeps; the oldest is overwritten."""

REPORT_CHARACTERS = 4000
"""Characters of the last message, and of the state, in a crash report."""

logger = logging.getLogger(__name__)


class InboxOverflow(RuntimeError):
    """An inbox was sent more messages than its bound: a crash of the receiver."""

    def __init__(self, name: str, bound: int) -> None:
        super().__init__(f"the inbox of {name} is over its bound of {bound} messages")


@dataclass(frozen=True, slots=True)
class RestartLimit:
    """At most `restarts` restarts within `within_ns`; one more stops the runtime."""

    restarts: int = 3
    within_ns: int = 60_000_000_000


@dataclass(eq=False, slots=True)
class Child:
    """One generation of one actor."""

    spec: ActorSpec
    generation: int
    actor: Actor
    handlers: dict[type[Message], Callable[[Any], None]]
    alive: bool = True

    @property
    def name(self) -> str:
        return self.spec.name


@dataclass(frozen=True, slots=True)
class CrashReport:
    """Everything a person needs to see what an actor was doing when it crashed."""

    actor: str
    generation: int
    at_ns: int
    reason: str
    message: Message | None
    """The message it was handling, if any."""
    state: dict[str, Any]
    """What its `describe()` says."""
    traceback: str
    trace: list[Record] = field(repr=False)

    def text(self) -> str:
        """The report as lines of text."""
        lines = [
            f"actor {self.actor} (generation {self.generation}) crashed at {self.at_ns} ns: {self.reason}",
            f"last message: {_cut(self.message)}",
            f"state: {_cut(self.state)}",
            self.traceback.rstrip(),
            f"last {len(self.trace)} trace records:",
            *map(str, self.trace),
        ]
        return "\n".join(lines) + "\n"


class Mailboxes(Protocol):
    """What the supervisor needs from a runtime."""

    def now_ns(self) -> int: ...

    def open_inbox(self, child: Child) -> Context:
        """Make the empty inbox that messages to `child.name` go to from now on."""

    def close_inbox(self, child: Child) -> None:
        """Discard the inbox with its messages; timers and offloads of the child are void. Idempotent."""

    def halt(self, reason: str) -> None:
        """Handle no more messages; the first reason stays."""


class Supervisor:
    """Owns the children of one runtime; every method is called from the runtime's thread."""

    def __init__(
        self,
        specs: Sequence[ActorSpec],
        mailboxes: Mailboxes,
        trace: Trace,
        *,
        limit: RestartLimit | None = None,
        report: Callable[[CrashReport], None] | None = None,
        report_directory: Path | None = None,
    ) -> None:
        assert len({spec.name for spec in specs}) == len(specs), "two actors have the same name"
        self._specs = tuple(specs)
        self._mailboxes = mailboxes
        self._trace = trace
        self._limit = limit or RestartLimit()
        self._report = report or _log_report
        self._report_directory = report_directory
        self._tables = {spec.name: check_contract(spec.actor_class) for spec in specs}
        self._children: dict[str, Child] = {}
        self._restarts_ns: deque[int] = deque(maxlen=self._limit.restarts + 1)
        self._generation = 0
        self._reports = 0
        self._draining = False

    @property
    def generation(self) -> int:
        """1 after the start, one more after every restart."""
        return self._generation

    def actor(self, name: str) -> Actor:
        """The live actor of this name, for tests and for a last look at its state."""
        return self._children[name].actor

    def start(self) -> None:
        """Build and start all children in order; what a factory or `started` raises is raised."""
        self._generation = 1
        for spec in self._specs:
            self._adopt(self._build(spec))
        for child in list(self._children.values()):
            self._begin(child)

    def drain(self) -> None:
        """Ask every child, in order, to finish what it has; only the first call counts."""
        if self._draining:
            return
        self._draining = True
        for child in list(self._children.values()):
            if child.alive:
                self.guard(child, child.actor.draining)

    def idle(self) -> None:
        """Let every child check its invariants; one that raises has crashed."""
        for child in list(self._children.values()):
            if child.alive:
                self.guard(child, child.actor.idle)

    def stop(self) -> None:
        """Stop all children in reverse and discard their inboxes."""
        self._stop_children(lambda _: True)

    def guard(self, child: Child, function: Callable[[], None]) -> None:
        """Call a hook of a child; an exception is a crash of the child."""
        try:
            function()
        except Exception as error:
            self.crash(child, error, None)

    def crash(self, child: Child, error: BaseException, message: Message | None) -> None:
        """Report a crash, then restart the group or stop the runtime. A crash of a dead child is ignored."""
        if not child.alive:
            return
        self._tell(child, error, message)
        if child.spec.permanent:
            self._mailboxes.halt(f"{child.name} crashed: {_reason(error)}")
        else:
            self._restart(child.name, error)

    def _restart(self, name: str, error: BaseException) -> None:
        failed: tuple[str, BaseException] | None = (name, error)
        while failed is not None:
            name, error = failed
            self._stop_children(lambda child: not child.spec.permanent)
            if not self._may_restart():
                self._inform(name, error)
                self._mailboxes.halt(self._gave_up(name, error))
                return
            failed = self._rebuild(name, error)

    def _may_restart(self) -> bool:
        now_ns = self._mailboxes.now_ns()
        self._restarts_ns.append(now_ns)
        full = len(self._restarts_ns) > self._limit.restarts
        return not (full and now_ns - self._restarts_ns[0] <= self._limit.within_ns)

    def _gave_up(self, name: str, error: BaseException) -> str:
        seconds = self._limit.within_ns / 1e9
        return (
            f"{name} crashed: {_reason(error)}; "
            f"gave up after {self._limit.restarts} restarts within {seconds:g} s"
        )

    def _rebuild(self, name: str, error: BaseException) -> tuple[str, BaseException] | None:
        """Build all, tell the permanent ones, start in order; what crashed on the way, if anything.

        The old inboxes are closed while the factories run: what a device still posts then is void.
        """
        self._generation += 1
        built: list[Child] = []
        for spec in self._specs:
            if spec.permanent:
                continue
            try:
                built.append(self._build(spec))
            except Exception as failure:
                self._report_failed_build(spec, failure)
                return spec.name, failure
        for child in built:
            self._adopt(child)
        self._inform(name, error)
        return self._begin_all(built)

    def _begin_all(self, built: list[Child]) -> tuple[str, BaseException] | None:
        for child in built:
            try:
                self._begin(child)
                if self._draining:
                    child.actor.draining()
            except Exception as failure:
                self._tell(child, failure, None)
                return child.name, failure
        return None

    def _inform(self, name: str, error: BaseException) -> None:
        """EngineFailed goes ahead of the queue: what a permanent child handles next may use the new group."""
        for child in list(self._children.values()):
            handler = child.handlers.get(EngineFailed)
            if child.spec.permanent and child.alive and handler is not None:
                message = EngineFailed(actor=name, reason=_reason(error))
                try:
                    handler(message)
                except Exception as failure:
                    self.crash(child, failure, message)

    def _build(self, spec: ActorSpec) -> Child:
        actor = spec.factory()
        assert isinstance(actor, spec.actor_class), f"{spec.name}: the factory made a {type(actor).__name__}"
        table = self._tables[spec.name]
        handlers = {accepted: getattr(actor, method) for accepted, method in table.items()}
        return Child(spec, self._generation, actor, handlers)

    def _adopt(self, child: Child) -> None:
        child.actor.bind(self._mailboxes.open_inbox(child))
        self._children[child.name] = child

    def _begin(self, child: Child) -> None:
        self._trace.record(self._mailboxes.now_ns(), "started", child.name, f"generation {child.generation}")
        child.actor.started()

    def _stop_children(self, chosen: Callable[[Child], bool]) -> None:
        for spec in reversed(self._specs):
            child = self._children.get(spec.name)
            if child is None or not child.alive or not chosen(child):
                continue
            child.alive = False
            self._mailboxes.close_inbox(child)
            now_ns = self._mailboxes.now_ns()
            self._trace.record(now_ns, "stopped", child.name, f"generation {child.generation}")

    def _tell(self, child: Child, error: BaseException, message: Message | None) -> None:
        self._deliver(child.spec, child.generation, error, message, _state(child.actor))

    def _report_failed_build(self, spec: ActorSpec, error: BaseException) -> None:
        self._deliver(spec, self._generation, error, None, {"factory": "failed"})

    def _deliver(
        self,
        spec: ActorSpec,
        generation: int,
        error: BaseException,
        message: Message | None,
        state: dict[str, Any],
    ) -> None:
        now_ns = self._mailboxes.now_ns()
        self._trace.record(now_ns, "crashed", spec.name, _reason(error), message)
        report = CrashReport(
            actor=spec.name,
            generation=generation,
            at_ns=now_ns,
            reason=_reason(error),
            message=message,
            state=state,
            traceback="".join(traceback.format_exception(error)),
            trace=self._trace.recent(REPORT_RECORDS),
        )
        try:
            self._report(report)
        except Exception:  # whoever shows the report must not turn a restart into an exit
            logger.exception("crash report not shown")
        if self._report_directory is not None:
            self._write(self._report_directory, report)

    def _write(self, directory: Path, report: CrashReport) -> None:
        path = directory / f"crash-{os.getpid()}-{self._reports % REPORT_FILES:02d}.txt"
        self._reports += 1
        try:
            path.write_text(report.text(), encoding="utf-8")
        except OSError as error:  # a full disk must not turn a restart into an exit
            logger.error("crash report not written: %s", error)


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _state(actor: Actor) -> dict[str, Any]:
    try:
        return actor.describe()
    except Exception as error:  # its state is broken: that is news too, not a second crash
        return {"describe() failed": _reason(error)}


def _cut(value: object) -> str:
    try:
        text = repr(value)
    except Exception as error:
        text = f"<repr failed: {_reason(error)}>"
    return text if len(text) <= REPORT_CHARACTERS else f"{text[:REPORT_CHARACTERS]}... ({len(text)})"


def _log_report(report: CrashReport) -> None:
    logger.error("%s", report.text())
