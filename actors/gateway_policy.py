"""What the gateway does about policies: swaps by command and by file, and the shadow policy.

A plain helper that the gateway owns, on the gateway's own `GatewayState`. A policy is compiled on a thread of
the runtime; one with a mistake changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from muxk.actors import protocol as wire
from muxk.actors.gateway_owner import Owner
from muxk.actors.gateway_state import (
    GatewayOptions,
    GatewayState,
    PolicyInForce,
    Refusal,
    Swap,
    SwapKind,
    cut,
)
from muxk.actors.policy_compiler import Compile, compiler, opener
from muxk.actors.policy_messages import PolicyCompiled, PolicyFileRead, PolicyFileUnreadable
from muxk.actors.refs import Everybody
from muxk.kernel.messages import PolicyChanged
from muxk.kernel.policy import PolicyBook, PolicyText, widest_group_of
from muxk.kernel.shadow import ShadowTally

SWAPS_MAX = 8
"""Bound on policies that wait to be compiled."""
REPORT_CHARS_MAX = 20_000
FILENAME_CHARS_MAX = 1024

Notice = Callable[[str], None]
"""Told to whoever started the server: files that were read again."""


class GatewayPolicy:
    """One a gateway."""

    def __init__(
        self,
        owner: Owner,
        everybody: Everybody,
        options: GatewayOptions,
        state: GatewayState,
        book: PolicyBook,
        compile_policy: Compile,
        notice: Notice,
    ) -> None:
        self._owner = owner
        self._everybody = everybody
        self._settings = options.settings
        self._options = options
        self._state = state
        self._book = book
        self._compile = compile_policy
        self._notice = notice
        self._next_file: PolicyFileRead | None = None

    @property
    def max_context_tokens(self) -> int:
        """Of a request under the policy in force."""
        widest = widest_group_of(self._book[self._state.policy.sha])
        return self._options.max_context_tokens(widest)

    # --- what may change the policy ---

    def swap(self, peer: bytes, command: wire.SwapPolicy) -> None:
        """A policy that an operator sent, or named."""
        named = command.plugin or command.filename
        self._begin(Swap(SwapKind.COMMAND, named, peer, command.ticket), command)

    def set_shadow(self, peer: bytes, command: wire.SetShadow) -> None:
        """A policy that is to be asked too, or the end of that."""
        swap = Swap(SwapKind.SHADOW, command.plugin or command.filename, peer, command.ticket)
        if command.source is None:
            self._book.shadow = None
            self._withdraw_shadows()
            self._answer(swap, PolicyCompiled(0, "", "", ""))
        else:
            self._begin(swap, command)

    def _withdraw_shadows(self) -> None:
        """Those that are being compiled would come into force after they were ended."""
        for ticket, swap in self._state.swaps.items():
            if swap.kind is SwapKind.SHADOW:
                self._state.swaps[ticket] = replace(swap, withdrawn=True)

    def _begin(self, swap: Swap, command: wire.SwapPolicy | wire.SetShadow) -> None:
        report = self._too_much(swap.source)
        if command.plugin and command.source:
            report = "give either the text of a policy or the name of one that is installed, not both"
        if report:
            self._answer(swap, PolicyCompiled(0, "", "", report))
        elif command.plugin:
            self._open(swap, command.plugin, command.settings)
        else:
            self._start(swap, PolicyText(command.source or "", command.filename, command.settings))

    def file_read(self, message: PolicyFileRead) -> None:
        """The policy's file says something else, or may do so; the settings of the start hold for it too."""
        if any(swap.kind is SwapKind.FILE for swap in self._state.swaps.values()):
            self._next_file = message  # the one before is being compiled; only the latest text counts
            return
        swap = Swap(SwapKind.FILE, message.filename)
        self._start(swap, PolicyText(message.source, message.filename, self._settings))

    def file_unreadable(self, message: PolicyFileUnreadable) -> None:
        """The policy in force goes on."""
        self._refuse(Swap(SwapKind.FILE, message.filename), f"{message.filename}: {message.reason}")

    def _too_much(self, filename: str) -> str:
        if len(self._state.swaps) >= SWAPS_MAX:
            return f"{SWAPS_MAX} policies are being compiled already"
        if len(filename) > FILENAME_CHARS_MAX:
            return f"filename has {len(filename)} characters; at most {FILENAME_CHARS_MAX} are allowed"
        return ""

    def _start(self, swap: Swap, text: PolicyText) -> None:
        ticket = self._state.next_ticket()
        self._state.swaps[ticket] = swap
        function = compiler(self._compile, self._book, text, ticket)
        self._owner.offload(function, size=len(text.source))

    def _open(self, swap: Swap, name: str, settings: Mapping[str, str]) -> None:
        ticket = self._state.next_ticket()
        self._state.swaps[ticket] = swap
        self._owner.offload(opener(name, settings, self._book, ticket), size=len(name))

    # --- what becomes of it ---

    def compiled(self, message: PolicyCompiled) -> None:
        """A policy is ready, or refused."""
        swap = self._state.swaps.pop(message.ticket)
        if swap.withdrawn:
            message = PolicyCompiled(message.ticket, "", "", "the shadow was ended before it was compiled")
        message = self._fitting(message)
        if not message.sha:
            self._refuse(swap, message.report)
        elif swap.kind is SwapKind.SHADOW:
            self._book.shadow = ShadowTally(self._book[message.sha], self._book.text(message.sha))
        else:
            self._accept(swap, message)
        self._answer(swap, message)
        if swap.kind is SwapKind.FILE and self._next_file is not None:
            following, self._next_file = self._next_file, None
            self.file_read(following)

    def _fitting(self, message: PolicyCompiled) -> PolicyCompiled:
        """Refused when this server has too few devices for it."""
        needed = self._book[message.sha].devices_min if message.sha else 1
        if needed <= self._options.devices:
            return message
        report = (
            f"the policy {message.name} needs {needed} devices, and this server has {self._options.devices}"
        )
        return PolicyCompiled(message.ticket, "", "", report)

    def _accept(self, swap: Swap, message: PolicyCompiled) -> None:
        """The same policy again is no swap: it may be laid out in another way, and says the same."""
        state, before = self._state, self._state.policy
        state.last_refused = None
        if message.sha == before.sha:
            return
        self._book.put_in_force(message.sha)
        state.policy = PolicyInForce(
            name=message.name,
            sha=message.sha,
            version=message.version,
            api_version=message.api_version,
            source=swap.source,
            generation=before.generation + 1,
            since_ns=self._owner.now_ns(),
        )
        if self._book.shadow is not None:  # what it was compared with is gone
            self._book.shadow = ShadowTally(self._book.shadow.policy, self._book.shadow.text)
        if swap.kind is SwapKind.FILE:
            self._notice(f"running {message.name} ({message.sha[:12]}) from {swap.source}")
        self.announce()

    def _refuse(self, swap: Swap, report: str) -> None:
        report = cut(report, REPORT_CHARS_MAX)
        if swap.kind is not SwapKind.SHADOW:
            self._state.last_refused = Refusal(self._owner.now_ns(), swap.source, report)
        if swap.kind is SwapKind.FILE:
            self._notice(f"{report}\n{self._state.policy.name} goes on")

    def _answer(self, swap: Swap, message: PolicyCompiled) -> None:
        """Tell whoever asked; nobody asked for a file."""
        report = cut(message.report, REPORT_CHARS_MAX)
        if swap.kind is SwapKind.SHADOW:
            told = wire.ShadowSet(swap.ticket, not report, message.name, message.sha, report)
            self._owner.tell(swap.peer, told)
        elif swap.kind is SwapKind.COMMAND:
            accepted = bool(message.sha)
            answer = wire.PolicySwapped(swap.ticket, accepted, message.name, message.sha, report)
            self._owner.tell(swap.peer, answer)

    def announce(self) -> None:
        """Have the actors use the policy that is in force."""
        changed = PolicyChanged(self._state.policy.sha)
        for ref in self._everybody.deciding:
            self._owner.send(ref, changed)

    def describe(self) -> dict[str, Any]:
        """The state of the shadow and of the recording, where there are such."""
        shadow, sink = self._book.shadow, self._book.journal.sink
        shown: dict[str, Any] = {} if shadow is None else {"shadow": shadow.describe()}
        return shown if sink is None else {**shown, "record": sink.describe()}
