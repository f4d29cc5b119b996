"""Explaining a recorded run: the answers that its server gave, from its file and the policies in that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from muxk.client.commands import ExplainQuestion
from muxk.kernel.journal import Record
from muxk.kernel.policy import Policy
from muxk.kernel.record_frames import NotARecording
from muxk.kernel.record_reader import Recorded, read_recording
from muxk.policies.explain import Known, explain
from muxk.policies.explanation import Explanation
from muxk.policies.selection import about, around, latest

RECORDS_MAX = 1_000_000
"""Decisions that are looked at: the last ones of a longer run."""


class RecordError(Exception):
    """The file, or what is asked of it, makes no sense."""


@dataclass(frozen=True)
class Explained:
    """What a recorded run says to a question."""

    decisions: tuple[Explanation, ...]
    notes: tuple[str, ...] = ()
    """What was missing in the file."""


@dataclass
class _Policies:
    """Policies of a run, compiled when they are first asked for."""

    recorded: Recorded
    compiled: dict[str, Policy | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def find(self, sha: str) -> Policy | None:
        if sha not in self.compiled:
            self.compiled[sha] = self._compile(sha)
        return self.compiled[sha]

    def _compile(self, sha: str) -> Policy | None:
        from muxk.policies.engine import compile_policy
        from muxk.policies.problems import PolicyError

        text = self.recorded.policies.get(sha)
        name = self.recorded.policy_names.get(sha) or sha[:12]
        if text is None:
            self.notes.append(f"the policy {name} is not in the file: only its answers are known")
            return None
        try:
            policy = compile_policy(text.source, text.filename, text.settings)
        except PolicyError:
            policy = None
        if policy is None or policy.sha != sha:
            run = self.recorded.header.muxk
            self.notes.append(f"muxk {run} recorded {name}, and this muxk reads it otherwise: only answers")
            return None
        return policy


def explain_recorded(path: Path, question: ExplainQuestion) -> Explained:
    """Answer a question of `muxk explain` from a file. Raises RecordError."""
    try:
        recorded = read_recording(path, RECORDS_MAX)
    except NotARecording as error:
        raise RecordError(str(error)) from error
    policies = _Policies(recorded)
    asked_about: list[int] = []
    if question.get("about") == "request":
        asked_about = _ids(recorded, question.get("request_id", ""))
    known = Known(policies.find, recorded.names, recorded.header.zero_ns, frozenset(asked_about))
    decisions = tuple(explain(record, known) for record in _chosen(recorded, question, asked_about))
    notes = ["the end of the file is cut off; what is before it is shown"] if recorded.cut_off else []
    return Explained(decisions, (*notes, *policies.notes))


def _chosen(recorded: Recorded, question: ExplainQuestion, asked_about: Sequence[int]) -> Sequence[Record]:
    count = question.get("count", 20)
    records = recorded.records
    match question.get("about"):
        case "request":
            return about(records, asked_about, count)
        case "moment":
            at_ns = recorded.header.zero_ns + round(question.get("at", 0.0) * 1e9)
            return around(records, at_ns, count)
        case "differences":
            return latest([record for record in records if record.shadow is not None], count)
        case _:
            return latest(records, count)


def _ids(recorded: Recorded, name: str) -> list[int]:
    """By the client's name, or by the server's id as in `#12`."""
    found = [key for key, known in recorded.names.items() if known == name or known.startswith(f"{name}[")]
    if not found and name.removeprefix("#").isdecimal():
        found = [int(name.removeprefix("#"))]
    if not found:
        raise RecordError(f"no request {name!r} in this recording")
    return found
