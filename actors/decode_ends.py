"""How a row of the running batch ends, and what becomes of its request then."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from muxk.actors.decode_batch import DecodeBatch
from muxk.actors.decode_rows import Ending, Row
from muxk.actors.group_messages import MigrateRequest
from muxk.actors.messages import ReleasePages, Request, ReservedRequest
from muxk.actors.request_views import request_view
from muxk.kernel.decider import Decider
from muxk.kernel.view import RequestView
from muxk.kernel.work import int32_bytes


class Finish(NamedTuple):
    """What a new token means for its request."""

    reason: str | None
    """`stop`, `length`, or None while it goes on."""
    stop_token: int | None
    """The member of `stop_token_ids` that ended it, if one did."""


GOES_ON, AT_END, AT_LENGTH = Finish(None, None), Finish("stop", None), Finish("length", None)


def finish_of(row: Row, token: int, end_ids: frozenset[int]) -> Finish:
    """Whether the token that was appended last ends the row."""
    params = row.request.params
    generated = row.count
    if generated > params.min_tokens or not params.min_tokens:
        if token in params.stop_token_ids:
            return Finish("stop", token)
        if token in end_ids and not params.ignore_eos:
            return AT_END
    return AT_LENGTH if generated >= params.max_tokens else GOES_ON


def view_of(row: Row) -> RequestView:
    """As the policy sees it."""
    view = request_view(row.request)
    return msgspec.structs.replace(view, generated_tokens=row.count, pages=row.pages)


def ending_elsewhere(row: Row, group: int, decider: Decider) -> Ending:
    """It goes on in another group. What it leaves here is of use to nobody where prefixes are kept on the
    device that decodes."""
    keep = not decider.policy.fetches_prefix and decider.retain(view_of(row)).keep
    return Ending(keep=keep, recompute=False, to_group=group)


def to_compute_again(row: Row) -> Request:
    """The request with all that was generated."""
    request = row.request
    generated = int32_bytes(row.generated)
    return msgspec.structs.replace(request, generated=generated, recomputes=request.recomputes + 1)


def to_release(row: Row, ending: Ending) -> ReleasePages:
    """Its pages go back, and may be found again by whoever has the same tokens."""
    request = row.request
    written = request.prompt + int32_bytes(row.generated[:-1])
    kept = written if ending.keep or ending.recompute else b""
    return ReleasePages(request.request_id, kept, to_compute_again(row) if ending.recompute else None)


def to_move(batch: DecodeBatch, row: Row, source: int, target: int, keep: bool) -> MigrateRequest:
    """The request with its pages, as another group goes on with it."""
    written = int32_bytes(row.generated[:-1])
    request = msgspec.structs.replace(row.request, generated=written, decode_group=target)
    reserved = ReservedRequest(request, batch.pages_of(row), row.reused_tokens)
    return MigrateRequest(source, target, reserved, row.generated[-1], keep)
