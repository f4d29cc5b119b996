"""Why requests wait in admission, for whoever asks."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from muxk.actors.admission_state import AdmissionState
from muxk.actors.messages import Request
from muxk.actors.request_views import class_of, is_overdue, request_view
from muxk.kernel.decider import NO_SERVICE
from muxk.kernel.statuses import Reason, StatusReport
from muxk.kernel.view import RequestView


def queue_report(state: AdmissionState, now_ns: int, asked: Collection[int]) -> StatusReport:
    """The requests whose batch is being formed, then the queue in the policy's order."""
    report = StatusReport("admission", asked)
    for request_id in state.reserving:
        if request_id not in state.aborted_reserving and report.wants(request_id):
            report.add(request_id, Reason.FORMING, "pages are being reserved for its batch")
    requests = list(state.waiting)
    views = state.waiting.views
    answer = state.decider.peek_order(views, now_ns, state.service.by_class)
    unweighed = _places(state, views, now_ns)
    for place, index in enumerate(answer.order):
        request = requests[index]
        if report.wants(request.request_id):
            reason, detail = _why(state, request, place, unweighed[index], now_ns)
            report.add(request.request_id, reason, detail, answer.rule)
    return report


def _places(state: AdmissionState, views: Sequence[RequestView], now_ns: int) -> list[int]:
    """The place of each request if all classes had got the same so far."""
    places = [0] * len(views)
    for place, index in enumerate(state.decider.peek_order(views, now_ns, NO_SERVICE).order):
        places[index] = place
    return places


def _why(
    state: AdmissionState, request: Request, place: int, unweighed: int, now_ns: int
) -> tuple[Reason, str]:
    chosen = class_of(request)
    if place == 0:
        return _why_the_first(state, request)
    ahead = f"{place} of {len(state.waiting)} waiting requests go first"
    if state.short_of_pages:
        ahead += "; the first of them waits for pages"
    if is_overdue(request, now_ns):
        return Reason.QUEUED, f"it waited longer than the max_wait of class {chosen.name}; {ahead}"
    if request.recomputes:
        return Reason.EVICTED, f"its pages went to others, it is to be computed again; {ahead}"
    if place > unweighed:
        return Reason.CLASS_SHARE, f"class {chosen.name} got more than its share so far; {ahead}"
    return Reason.QUEUED, ahead


def _why_the_first(state: AdmissionState, request: Request) -> tuple[Reason, str]:
    if not state.short_of_pages:
        return Reason.QUEUED, "it is the first of the queue"
    needs, kv = request_view(request).pages, state.kv
    detail = f"it is first and needs up to {needs} pages, and each running request one to go on"
    return Reason.NO_PAGES, f"{detail}; {kv.pages_free} of {kv.pages_total} are free"
