"""Messages about policies that come to the gateway (sender -> receiver)."""

from __future__ import annotations

from muxk.actors.protocol import Explained
from muxk.kernel.actor import Message


class PolicyCompiled(Message, frozen=True):
    """gateway -> gateway, from its thread: the outcome of compiling a policy that a client sent."""

    ticket: int
    sha: str
    """Empty when it was refused."""
    name: str
    report: str
    """What was wrong, as file:line:col with hints; empty when it compiled."""
    version: str = ""
    """As `metadata.version` has it."""
    api_version: str = ""
    """Of the language it is written in; empty for a policy in Python."""


class PolicyFileRead(Message, frozen=True):
    """policy watch -> gateway: the policy's file has changed, or somebody asked to read it again."""

    source: str
    filename: str


class PolicyFileUnreadable(Message, frozen=True):
    """policy watch -> gateway: the policy's file is not there, or is no text."""

    filename: str
    reason: str


class ExplanationMade(Message, frozen=True):
    """gateway -> gateway, from its thread: the answer to `Explain`."""

    ticket: int
    """The gateway's own."""
    explained: Explained
