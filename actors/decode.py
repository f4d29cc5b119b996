"""decode: the executor of the continuous batch.

Requests join after prefill and leave at their end; each step is one work for the arbiter and one message to
the tokenizer, or to the gateway for requests that want no text. Pages are asked for ahead of need; when the
pool is exhausted the policy's victim is computed again later, with the same tokens. Where the device can, the
next step is submitted while one runs, and takes its tokens there; a row that ends in the first then wastes a
token of the second. Invariants: at most one step is outstanding behind the one on a lane; a row leaves, and
its pages go back, only when no step that was submitted with it can still run; the arbiter's step or batch
always gets exactly one answer, `SubmitDecode` or `DecodeIdle`, unless a step is outstanding already.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from muxk.actors.decode_batch import DecodeBatch
from muxk.actors.decode_ends import ending_elsewhere, finish_of, to_move, to_release, view_of
from muxk.actors.decode_output import Emitted, Held, by_row, emitted_row
from muxk.actors.decode_report import decode_report
from muxk.actors.decode_rows import Ending, Row
from muxk.actors.decode_steps import Steps
from muxk.actors.group_messages import MoveDecode, RequestsJoined, ResumeDecode
from muxk.actors.messages import (
    AbortRequest,
    EarlierIds,
    EmittedRow,
    JoinDecode,
    PagesGrown,
    RequestAborted,
    RequestFailed,
    StopRequest,
)
from muxk.actors.refs import DecodeInbox, Refs
from muxk.actors.request_views import classified, in_its_class
from muxk.kernel.actor import Actor
from muxk.kernel.decider import Decider
from muxk.kernel.messages import (
    DecodeFailed,
    DecodeIdle,
    DecodeStepDone,
    PolicyChanged,
    ReportRequests,
    ReportState,
    RequestsReported,
    StateReported,
    StepLaunched,
    StepsRan,
    SubmitDecode,
)
from muxk.kernel.policy import PolicyBook
from muxk.kernel.work import RowLogprobs, int32_values

Logprobs = tuple[RowLogprobs, ...]
ABORT_LAPS_MAX = 3
"""Times an abort follows a request that may be evicted again and again; then it has surely ended."""


@dataclass
class DecodeActorState:
    decider: Decider
    batch: DecodeBatch
    flow: Steps = field(default_factory=Steps)
    held: Held = field(default_factory=Held)
    early: JoinDecode | None = None
    """With a step that ended after one whose end has not arrived."""
    steps: int = 0
    tokens: int = 0
    recomputes: int = 0
    late_events: int = 0


class Decode(Actor):
    """One a device."""

    Accepts = DecodeInbox

    def __init__(
        self,
        refs: Refs,
        book: PolicyBook,
        policy_sha: str,
        end_ids: frozenset[int],
        foreseeing: bool = False,
    ) -> None:
        """`foreseeing`: its device takes many steps at a time (`kernel/steady.py`)."""
        self._refs = refs
        self._end_ids = end_ids
        decider = Decider(book, policy_sha, "decode", self.now_ns)
        self.state = DecodeActorState(decider, DecodeBatch(foreseeing))

    def on_join_decode(self, message: JoinDecode) -> None:
        """New rows, and what the decode step brought that ran in the same item, if it was a fused one."""
        if message.step is not None and not self.state.flow.is_oldest(message.step.step_id):
            self.state.early = message  # it came by way of prefill, the end of the step before comes directly
            return
        stepped = Emitted() if message.step is None else self._take_step(message.step)
        joined = self._add_rows(message)
        if not self.state.flow.outstanding:
            self._next_step()
        elif message.requests or stepped.advanced:
            self._submit()  # a newer version of the step that waits, or ignored if it runs already
        self._hold_or_emit(stepped, joined, message)
        self._settle()

    def _add_rows(self, message: JoinDecode) -> list[EmittedRow]:
        self._rows_changed()
        logprobs = by_row(message.logprobs)
        joined = []
        for place, token in enumerate(int32_values(message.tokens)):
            reserved = in_its_class(message.requests[place], self.state.decider)
            row = self.state.batch.add(reserved, token, self._end_ids)
            prompt = [found for found in message.prompt_logprobs if found.row == place]
            joined.append(self._account(row, token, logprobs.get(place, ()), tuple(prompt)))
            self._send_away(row)
        if joined and self._refs.placement is not None:
            ids = tuple([row.request_id for row in joined])
            self.send(self._refs.placement, RequestsJoined(self._refs.group, ids))
        return joined

    def _send_away(self, row: Row) -> None:
        """A row that was only computed here, and decodes elsewhere."""
        target = row.request.decode_group
        if row.ending is None and target is not None and target != self._refs.group:
            self._leave_for(row, target)

    def _leave_for(self, row: Row, group: int) -> None:
        self.state.batch.end(row, ending_elsewhere(row, group, self.state.decider))

    def on_move_decode(self, message: MoveDecode) -> None:
        """What is held of them goes first: the other group does not wait for a step of this one."""
        self._rows_changed()
        leaving = [row for row in self.state.batch.rows.values() if row.ending is None]
        for row in leaving:
            self._leave_for(row, message.to)
        self._emit(Emitted(self.state.held.take_of({row.request_id for row in leaving})))
        self._settle()

    def on_resume_decode(self, message: ResumeDecode) -> None:
        """A row that decoded elsewhere; its client has all its tokens."""
        self._rows_changed()
        self.state.batch.add(in_its_class(message.reserved, self.state.decider), message.token, self._end_ids)
        self._submit()  # unasked, a newer version of the step that waits, or ignored if it runs already
        self._settle()

    def _hold_or_emit(self, stepped: Emitted, joined: list[EmittedRow], message: JoinDecode) -> None:
        """Send first tokens with those of the step that runs, as an engine does that works in steps.

        Sent at once they would be followed by what is left of this step and the whole next one: the longest
        gap of the request, and right at its beginning.
        """
        running = self.state.flow.running(message.decode_running)
        rows = self.state.batch.rows
        at_once = [row for row in joined if running is None or rows[row.request_id].ending is not None]
        before = self.state.held.take_of({row.request_id for row in at_once})
        if running is not None:
            self.state.held.add(running, [row for row in joined if rows[row.request_id].ending is None])
        stepped.rows += before + at_once
        self._emit(stepped)

    def on_step_launched(self, message: StepLaunched) -> None:
        """Submit the step after one that runs with this version: it takes its tokens on the device."""
        if not self.state.flow.launch(message.step_id, message.version, self.state.batch):
            self.state.late_events += 1
            return
        self._submit()
        self._settle()

    def on_steps_ran(self, message: StepsRan) -> None:
        self._emit(Emitted(earlier=self._take_earlier(message)))
        if not self._settle():  # else it is said with the new pages
            self._grant()

    def on_decode_step_done(self, message: DecodeStepDone) -> None:
        earlier = None if message.before is None else self._take_earlier(message.before)
        emitted = self._take_step(message)
        emitted.earlier = earlier
        # The next step first: what follows runs while it does.
        self._go_on(emitted)
        self._emit(emitted)
        self._settle()
        self._join_early()

    def _join_early(self) -> None:
        early, self.state.early = self.state.early, None
        if early is not None:
            self.on_join_decode(early)

    def _take_earlier(self, ran: StepsRan) -> EarlierIds:
        """Steps that ended before, which had nothing but a token for each row."""
        rows = self.state.flow.ran(ran, self.state.batch)
        self.state.tokens += rows * len(ran.known_ns)
        self.state.steps += len(ran.known_ns)
        return EarlierIds(ran.on_lane[0].requests, ran.tokens, ran.known_ns)

    def _take_step(self, message: DecodeStepDone) -> Emitted:
        """Advance the rows of a step that ended."""
        batch = self.state.batch
        work, rows, _ = self.state.flow.end(message.step_id, message.version, batch)
        logprobs = by_row(message.logprobs)
        emitted = Emitted(self.state.held.take_until(message.step_id), advanced=True)
        others = batch.advance(rows, message.tokens)
        tokens = int32_values(message.tokens) if others else ()
        for place in others:
            row, token = rows[place], tokens[place]
            if row.ending is not None:
                if row.ending.to_group is None:
                    continue
                row.append(token)  # it goes on elsewhere behind it
            emitted.rows.append(self._account(row, token, logprobs.get(place, ()), ()))
        self.state.tokens += emitted.take_plain(work.requests, message.tokens, others)
        self.state.steps += 1
        return emitted

    def on_decode_failed(self, message: DecodeFailed) -> None:
        batch = self.state.batch
        for row in self.state.flow.end(message.step_id, message.version, batch).rows:
            if row.ending is None:
                batch.end(row, Ending(keep=False, recompute=False))
                failed = RequestFailed(row.request_id, "engine_failed", f"decode failed: {message.reason}")
                self.send(self._refs.tokenizer, failed)
        emitted = Emitted(self.state.held.take_until(message.step_id))
        self._go_on(emitted)
        self._emit(emitted)
        self._settle()
        self._join_early()

    def _account(self, row: Row, token: int, logprobs: Logprobs, prompt_logprobs: Logprobs) -> EmittedRow:
        """Note a new token and see whether it ends the request."""
        self.state.tokens += 1
        finish = finish_of(row, token, self._end_ids)
        if finish.reason is not None:
            keep = self.state.decider.retain(view_of(row)).keep
            self.state.batch.end(row, Ending(keep=keep, recompute=False))
        return emitted_row(row, token, finish, logprobs, prompt_logprobs)

    def _emit(self, emitted: Emitted) -> None:
        if (message := emitted.for_tokenizer(self._refs.group)) is not None:
            self.send(self._refs.tokenizer, message)
        if (ids := emitted.for_gateway()) is not None:
            self.send(self._refs.gateway, ids)

    # --- steps ---

    def _go_on(self, emitted: Emitted) -> None:
        """After a step: the next one, or a newer version of one that waits and has rows which just ended."""
        flow = self.state.flow
        if not flow.outstanding:
            self._next_step()
        elif flow.waiting is None or emitted.ends_some:
            self._submit()

    def _next_step(self) -> None:
        """Answer the arbiter: the next step, or nothing to do."""
        assert not self.state.flow.outstanding
        if not self._submit():
            self.send(self._refs.arbiter, DecodeIdle())

    def _submit(self) -> bool:
        """Submit the next step, or a newer version of the one that waits; False when no row can take it."""
        submitted = self.state.flow.submit(self.state.batch)
        if submitted is None:
            return False
        # Who waits for the end of a step has something to say after it.
        self.state.flow.granted = 0 if self.state.held.rows else submitted.more
        tbt_slo_ns = self.state.batch.tbt_slo_ns
        self.send(self._refs.arbiter, SubmitDecode(submitted.work, tbt_slo_ns, self.state.flow.granted))
        return True

    def _grant(self) -> None:
        """Tell the arbiter what may follow the steps that are on lanes, without being asked."""
        if not self.state.held.rows and (more := self.state.flow.grant(self.state.batch)) is not None:
            self.send(self._refs.arbiter, more)

    def _rows_changed(self) -> None:
        """Steps that may follow unasked would have other rows, or another SLO."""
        if self.state.flow.granted:
            self.send(self._refs.arbiter, self.state.flow.revoke())

    def _settle(self) -> bool:
        """Let go of ended rows and ask for pages; whether there will be an answer."""
        batch, flow = self.state.batch, self.state.flow
        wanting = batch.take_wanting()
        for row in batch.ending_rows():
            if not flow.versions_with(row.request_id):
                self._let_go(row)
        if wanting is not None:
            self.send(self._refs.kv_pool, wanting)
        return wanting is not None

    def _let_go(self, row: Row) -> None:
        ending = row.ending
        assert ending is not None
        self.state.batch.remove(row)
        if ending.to_group is not None:
            assert self._refs.migration is not None
            moved = to_move(self.state.batch, row, self._refs.group, ending.to_group, ending.keep)
            self.send(self._refs.migration, moved)
        else:
            self.send(self._refs.kv_pool, to_release(row, ending))

    # --- pages ---

    def on_pages_grown(self, message: PagesGrown) -> None:
        rows = self.state.batch.rows
        for request_id, page in zip(message.request_ids, message.pages, strict=True):
            row = rows.get(request_id)
            if row is None:
                # It ended meanwhile; its release, sent before, gave this page back as well.
                self.state.late_events += 1
            else:
                self.state.batch.add_page(row, page)
        for request_id in (*message.denied, *message.later):
            if request_id in rows:
                self.state.batch.deny_page(rows[request_id])
        if message.later:
            self.state.batch.ask_apart()
        if message.denied and self.state.batch.stalled:
            self._evict()
        if not self.state.flow.outstanding:
            self._submit()  # unasked: all rows had stalled, so that the arbiter was told `DecodeIdle`
        self._grant()

    def _evict(self) -> None:
        """Choose who is computed again later; nobody while pages of an earlier choice are to come back."""
        batch = self.state.batch
        rows = list(batch.rows.values())
        if batch.endings or not rows:
            return
        self._rows_changed()
        answer = self.state.decider.victim([view_of(row) for row in rows], self.now_ns())
        batch.end(rows[answer.index], Ending(keep=True, recompute=True, rule=answer.rule))
        self.state.recomputes += 1
        self._settle()

    # --- ends from outside ---

    def on_stop_request(self, message: StopRequest) -> None:
        row = self.state.batch.rows.get(message.request_id)
        if row is None:  # it ended by itself, or was just evicted: nobody wants it to be computed again
            self.state.late_events += 1
            self._chase(message.request_id, 1)
            return
        if row.ending is not None and not row.ending.goes_elsewhere:
            self.state.late_events += 1
            return
        keep = self.state.decider.retain(view_of(row)).keep
        self._rows_changed()
        self.state.batch.end(row, Ending(keep=keep, recompute=False))
        self._settle()

    def on_abort_request(self, message: AbortRequest) -> None:
        row = self.state.batch.rows.get(message.request_id)
        if row is None:
            self._pass_on(message)
            return
        self.send(self._refs.gateway, RequestAborted(message.request_id))
        self._rows_changed()
        self.state.batch.end(row, Ending(keep=False, recompute=False))
        self._settle()

    def _pass_on(self, message: AbortRequest) -> None:
        """It may be on its way round for a recompute: along the chain again, until it must have ended."""
        if message.lap < ABORT_LAPS_MAX:
            self._chase(message.request_id, message.lap + 1)
        else:
            self.send(self._refs.gateway, RequestAborted(message.request_id))
            self.state.late_events += 1

    def _chase(self, request_id: int, lap: int) -> None:
        self.send(self._refs.chased, AbortRequest(request_id, lap, returning=True, group=self._refs.group))

    def on_policy_changed(self, message: PolicyChanged) -> None:
        """Rows get the classes of the new policy; a step that waits tells the arbiter of their SLO."""
        self._rows_changed()
        decider = self.state.decider
        decider.use(message.sha)
        self.state.batch.put_into_classes(lambda request: classified(request, decider))
        if self.state.flow.waiting is not None:
            self._submit()
            self._settle()

    def on_report_requests(self, message: ReportRequests) -> None:
        report = decode_report(self.state.batch.rows.values(), message.request_ids)
        self.send(self._refs.gateway, RequestsReported.of(report, message.ticket))

    def on_report_state(self, message: ReportState) -> None:
        self.send(self._refs.gateway, StateReported(message.ticket, self._refs.decode.name, self.describe()))

    def describe(self) -> dict[str, Any]:
        state = self.state
        return {
            "rows": len(state.batch.rows),
            "steps": state.steps,
            "tokens": state.tokens,
            "recomputes": state.recomputes,
            "late_events": state.late_events,
            "rules": dict(sorted(state.decider.counts.items())),
        }
