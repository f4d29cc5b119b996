"""Messages as MessagePack frames: one encoder, and one decoder for each actor class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from muxk.kernel.actor import Actor, Message

encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode
"""One message as one frame; raises TypeError for a field that MessagePack has no form for."""


def decoder(actor_class: type[Actor]) -> Callable[[bytes], Message]:
    """The decoder of the tagged union `Accepts`; it raises msgspec.ValidationError for anything else."""
    decode: Callable[[bytes], Message] = msgspec.msgpack.Decoder(actor_class.Accepts).decode
    return decode
