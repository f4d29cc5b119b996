"""What goes wrong between a client and a server, as exceptions with messages for people."""

from __future__ import annotations


class ClientError(Exception):
    """Base of everything that `muxk.client` raises on purpose."""


class ConnectError(ClientError):
    """No server answers at the endpoint."""

    def __init__(self, endpoint: str, reason: str) -> None:
        super().__init__(
            f"no muxk server answers at {endpoint}: {reason}\nstart one with:  muxk run policies/muxwise.yaml"
        )
        self.endpoint = endpoint
        self.reason = reason


class RequestError(ClientError):
    """A request was refused or broke, or the server is gone.

    `code` is one of the server's (`invalid`, `never_fits`, `overloaded`, `draining`, `engine_failed`,
    `slow_reader`) or the client's own: `server_gone`, `server_silent`, `timeout`, `protocol`, `closed`.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{message} ({code})")
        self.code = code
        self.message = message


class PolicyRefused(ClientError):
    """The server kept its old policy; the text lists every mistake as file:line:col."""

    def __init__(self, report: str) -> None:
        super().__init__(report)
        self.report = report


class PolicyNotFound(ClientError):
    """Neither a file nor the name of a shipped policy."""
