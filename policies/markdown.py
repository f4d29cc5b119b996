"""Tables and links of Markdown, for documents that are made from the tables of the language."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def code(text: str) -> str:
    """Text as it is written in a file."""
    return f"`{text}`"


def codes(texts: Iterable[str], between: str = ", ") -> str:
    """Several of them."""
    return between.join(map(code, texts))


def anchor(title: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-")


def link(title: str, text: str = "") -> str:
    """A link to a heading of the same document."""
    return f"[{text or title}](#{anchor(title)})"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; columns that are empty in every row are left out."""
    body = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    kept = [column for column in range(len(header)) if any(row[column] for row in body)]
    lines = [list(header), ["---"] * len(header), *body]
    return "\n".join(f"| {' | '.join(line[column] for column in kept)} |" for line in lines)


def blocks(*parts: str) -> str:
    """Paragraphs, tables and headings with an empty line between; empty ones are left out."""
    return "\n\n".join(part for part in parts if part)
