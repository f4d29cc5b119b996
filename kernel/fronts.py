"""The two fronts of a server: the socket of clients, and the one of whoever runs it."""

from __future__ import annotations

from enum import StrEnum


class Front(StrEnum):
    """Which socket of the ingress a peer is connected to."""

    CLIENT = "client"
    ADMIN = "admin"


ADMIN_PREFIX = b"\x01"
CLIENT_PREFIX = b"\x00"
"""A `peer` is one byte for its front, then its ROUTER identity, so that a client can not forge a front."""


def front_of(peer: bytes) -> Front:
    """Where a peer is connected; one without a prefix, as simulations use, is a client."""
    return Front.ADMIN if peer.startswith(ADMIN_PREFIX) else Front.CLIENT
