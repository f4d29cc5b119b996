"""Names with a meaning to the runtimes, and the error for names without one."""

from __future__ import annotations

from muxk.kernel.actor import Ref
from muxk.kernel.messages import SendFrame

GATEWAY_NAME = "gateway"
"""The actor that receives what the ingress hears."""

INGRESS_NAME = "ingress"
"""Where the gateway sends `SendFrame`; not an actor."""

INGRESS: Ref[SendFrame] = Ref(INGRESS_NAME)


class UnknownRef(LookupError):
    """There is no actor of this name: an error of the sender."""

    def __init__(self, name: str) -> None:
        super().__init__(f"there is no actor named {name!r}")
