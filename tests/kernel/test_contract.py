"""The contract between an actor class and its messages."""

from __future__ import annotations

from typing import ClassVar

import msgspec
import pytest
from muxk.kernel import codec
from muxk.kernel.actor import Actor, Message, accepted_types, check_contract, handler_name


class PagesReserved(Message, frozen=True):
    pages: tuple[int, ...]


class PagesFreed(Message, frozen=True):
    pass


class Both(Actor):
    Accepts: ClassVar = PagesReserved | PagesFreed

    def on_pages_reserved(self, message: PagesReserved) -> None: ...

    def on_pages_freed(self, message: PagesFreed) -> None: ...


class One(Actor):
    Accepts: ClassVar = PagesReserved

    def on_pages_reserved(self, message: PagesReserved) -> None: ...


def test_a_handler_is_named_after_its_message() -> None:
    assert handler_name(PagesReserved) == "on_pages_reserved"
    assert check_contract(Both) == {PagesReserved: "on_pages_reserved", PagesFreed: "on_pages_freed"}


@pytest.mark.parametrize(("actor", "types"), [(Both, (PagesReserved, PagesFreed)), (One, (PagesReserved,))])
def test_accepts_may_be_one_type_or_a_union(actor: type[Actor], types: tuple[type[Message], ...]) -> None:
    assert accepted_types(actor) == types


@pytest.mark.parametrize("actor", [Both, One])
def test_a_message_survives_the_codec_as_an_equal_one_of_the_same_type(actor: type[Actor]) -> None:
    message = PagesReserved(pages=(1, 2**40))
    assert codec.decoder(actor)(codec.encode(message)) == message


def test_a_message_that_is_not_accepted_does_not_decode() -> None:
    with pytest.raises(msgspec.ValidationError):
        codec.decoder(One)(codec.encode(PagesFreed()))
