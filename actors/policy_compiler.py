"""Compiling a policy while the server runs, on the runtime's thread: a large one must not hold up tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial

from muxk.actors.policy_messages import PolicyCompiled
from muxk.kernel.policy import Policy, PolicyBook, PolicyText
from muxk.policies.registry import open_installed

Compile = Callable[[str, str, Mapping[str, str]], Policy]
"""(text, file name, settings) -> policy; raises an exception whose text is a report for the user."""


def compiler(
    compile_policy: Compile, book: PolicyBook, text: PolicyText, ticket: int
) -> Callable[[], PolicyCompiled]:
    """A function for the runtime's thread; it adds what it compiled to the book."""
    return _adding(partial(compile_policy, text.source, text.filename, text.settings), book, text, ticket)


def opener(
    name: str, settings: Mapping[str, str], book: PolicyBook, ticket: int
) -> Callable[[], PolicyCompiled]:
    """The same for a policy that is installed where the server runs: importing it may take a while too."""
    return _adding(partial(open_installed, name, settings), book, None, ticket)


def _adding(
    make: Callable[[], Policy], book: PolicyBook, text: PolicyText | None, ticket: int
) -> Callable[[], PolicyCompiled]:
    def run() -> PolicyCompiled:
        try:
            policy = make()
        except Exception as error:  # whatever is wrong with it, the old policy goes on
            return PolicyCompiled(ticket, "", "", str(error) or type(error).__name__)
        version, api_version = versions(policy, text)
        return PolicyCompiled(ticket, book.add(policy, text), policy.name, "", version, api_version)

    return run


def versions(policy: Policy, text: PolicyText | None) -> tuple[str, str]:
    """What its author numbers it, and the language that it is written in; empty where there is none."""
    written = None if text is None else _API_VERSION.search(text.source)
    return str(getattr(policy, "version", "")), "" if written is None else written[1]


_API_VERSION = re.compile(r"^apiVersion:\s*[\"']?([\w./-]{1,64})", re.MULTILINE)
