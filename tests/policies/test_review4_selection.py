"""Questions to a journal that goes on meanwhile: they are answered on a thread beside the server."""

from __future__ import annotations

from collections.abc import Iterator

from muxk.kernel.estimates import Estimates
from muxk.kernel.journal import Journal, OrderQuestion, Record
from muxk.kernel.view import DecodeView, FormAnswer, FormView, KvView, OrderAnswer, QueueView, RequestView
from muxk.policies.engine import load_policy
from muxk.policies.explain import Known, explain
from muxk.policies.selection import about


class Forgetting(list[Record]):
    """The requests of each question are forgotten once it was looked at."""

    def __iter__(self) -> Iterator[Record]:
        for record in super().__iter__():
            yield record
            if isinstance(record.view, OrderQuestion):
                Journal()._forget(record)


def test_a_batch_is_told_though_the_journal_forgets_its_order_meanwhile() -> None:
    policy = load_policy("muxwise")
    requests = [RequestView(key, 10 * key, 100, 50, 0, 10, 4, 0, 0) for key in (1, 2)]
    question, answer = OrderQuestion(100, requests, {}), OrderAnswer((1, 0), "order/x")
    order = Record(100, "admission", "order", policy.sha, question, answer, 100, question)
    view = FormView(
        100, requests[1], QueueView(2, 100), DecodeView(0, 0, False, False, 0), KvView(9, 9), Estimates()
    )
    form = Record(100, "admission", "form", policy.sha, view, FormAnswer(1, 100, "form/x"), 100, view)
    assert about(Forgetting([order, form]), [2], 10) == [form]
    told = explain(order, Known(lambda sha: policy))
    assert told.note == "it was about 2 requests, which are not kept any more"
