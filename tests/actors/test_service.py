"""The account of what classes got: fair queueing by shares, with no credit for having been away."""

from __future__ import annotations

from muxk.actors.service import Service
from muxk.kernel.view import RequestClass

HEAVY = RequestClass("heavy", 0, 1, 1, share=3.0)
LIGHT = RequestClass("light", 1, 1, 1, share=1.0)
OTHER = RequestClass("other", 2, 1, 1, share=1.0)
CLASSES = ("heavy", "light", "other")


def service() -> Service:
    made = Service()
    made.restart(CLASSES, ())
    return made


def serve(account: Service, request_class: RequestClass, tokens: int) -> None:
    account.wants(request_class)
    account.served(request_class, tokens)


def test_tokens_count_by_the_share() -> None:
    account = service()
    account.wants(HEAVY)
    account.wants(LIGHT)
    serve(account, HEAVY, 300)
    serve(account, LIGHT, 100)
    assert account.by_class == {"heavy": 100.0, "light": 100.0}


def test_a_class_that_was_away_comes_back_at_the_least_of_those_that_compete() -> None:
    account = service()
    account.wants(HEAVY)
    account.wants(OTHER)
    serve(account, HEAVY, 3000)
    serve(account, OTHER, 700)
    account.wants(LIGHT)
    assert account.by_class["light"] == 700


def test_nobody_gets_credit_from_a_time_when_nobody_else_wanted_anything() -> None:
    account = service()
    serve(account, HEAVY, 3000)  # alone, and gone
    account.wants(LIGHT)
    assert account.by_class["light"] == 1000
    account.wants(HEAVY)
    assert account.by_class["heavy"] == 1000


def test_a_class_that_is_ahead_stays_ahead_when_it_comes_back() -> None:
    account = service()
    account.wants(LIGHT)
    serve(account, HEAVY, 3000)
    account.wants(HEAVY)
    assert account.by_class == {"light": 0.0, "heavy": 1000.0}


def test_a_request_whose_pages_were_denied_does_not_make_its_class_a_newcomer() -> None:
    account = service()
    account.wants(LIGHT)
    account.wants(HEAVY)
    serve(account, HEAVY, 3000)
    # `light` is being reserved all this time: it still wants what it was denied.
    assert account.by_class["light"] == 0.0
    account.left(LIGHT)
    account.wants(LIGHT)
    assert account.by_class["light"] == 1000.0


def test_a_policy_with_the_same_classes_keeps_the_account_and_another_forgets_it() -> None:
    account = service()
    account.wants(HEAVY)
    account.wants(LIGHT)
    serve(account, HEAVY, 3000)
    account.restart(CLASSES, [HEAVY, LIGHT])
    assert account.by_class == {"heavy": 1000.0, "light": 0.0}
    account.restart(("heavy", "light"), [HEAVY, LIGHT])
    assert account.by_class == {"heavy": 0.0, "light": 0.0}
