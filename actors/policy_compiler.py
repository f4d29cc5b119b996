"""Compiling a policy that a client sent, on the runtime's thread: a large one must not hold up tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from muxk.actors import protocol as wire
from muxk.actors.messages import PolicyCompiled
from muxk.kernel.policy import Policy, PolicyBook

Compile = Callable[[str, str, Mapping[str, str]], Policy]
"""(text, file name, settings) -> policy; raises an exception whose text is a report for the user."""


def compiler(
    compile_policy: Compile, book: PolicyBook, command: wire.SwapPolicy, ticket: int
) -> Callable[[], PolicyCompiled]:
    """A function for the runtime's thread; it adds what it compiled to the book."""

    def run() -> PolicyCompiled:
        try:
            policy = compile_policy(command.source, command.filename, command.settings)
        except Exception as error:  # whatever is wrong with it, the old policy goes on
            return PolicyCompiled(ticket, "", "", str(error))
        return PolicyCompiled(ticket, book.add(policy), policy.name, "")

    return run
