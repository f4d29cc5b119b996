"""Chat templates: Jinja from a model's files, which is somebody else's code and runs in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser
from muxk.models.errors import ModelError


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}`, which marks an assistant's words for training: here it is what it holds."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so.

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template with the special tokens that it may name."""

    def __init__(self, source: str, bos_token: str, eos_token: str, name: str) -> None:
        """ModelError when the template does not compile; `name` is for errors."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        self._name = name
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"{name}: its chat template does not compile ({error})") from None

    def render(self, turns: Sequence[tuple[str, str]]) -> str:
        """The text of (role, content) turns with the head of the assistant's turn after them."""
        messages = [{"role": role, "content": content} for role, content in turns]
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._tokens)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise ModelError(f"{self._name}: its chat template refuses these turns ({error})") from None


def _raise(message: str) -> None:
    """What templates call when roles do not alternate or the like."""
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    """JSON as transformers writes it: Jinja's own filter would escape HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _strftime_now(pattern: str) -> str:
    """Today, for templates that tell the model the date."""
    return datetime.now().strftime(pattern)
