"""Policies of earlier versions of the language: a table of versions, and how one becomes the next.

A document is converted by edits of its text, so that comments, quotes and layout stay and every place can be
told. What comes out is read again and compared with what it should say; what can not be edited so is refused.
To add a version: a row in `MIGRATIONS`, with a function from a document to what changes in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from muxk.policies.loader import load, normalise
from muxk.policies.marks import MappingNode, Node, Scalar, SequenceNode
from muxk.policies.problems import Mark, Report, Source
from muxk.policies.rewriting import Change, Edit, apply_edits
from muxk.policies.v1alpha1 import from_v1alpha1

CURRENT = "muxk/v1beta1"


@dataclass(frozen=True, slots=True)
class Migration:
    """From one version to the next."""

    old: str
    new: str
    changes: Callable[[MappingNode], Iterator[Change]]
    """What changes in a document, its `apiVersion` apart."""


MIGRATIONS: tuple[Migration, ...] = (Migration("muxk/v1alpha1", "muxk/v1beta1", from_v1alpha1),)
"""In the order of the versions; each leads to the next, the last to `CURRENT`."""
_SEPARATOR = re.compile(r"^---(?=\s|$)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Step:
    """A text before and after one migration, without a byte order mark and with `\\n` as the line ending."""

    before: Source
    after: str
    edits: tuple[Edit, ...]
    """In the order of the text; they do not overlap."""
    version: Mark
    """Where `apiVersion` says the old version."""

    def place(self, mark: Mark) -> Mark:
        """From a place in the text after the migration to the one in the text before it."""
        if mark.source.text != self.after:
            return mark
        lines = self.after.split("\n")
        index = sum(len(line) + 1 for line in lines[: mark.line - 1]) + mark.column - 1
        return self.before.mark(_index_before(index, self.edits))


def _index_before(index: int, edits: Sequence[Edit]) -> int:
    moved = 0
    for edit in edits:
        start = edit.start + moved
        if index < start:
            break
        grown = len(edit.text) - (edit.end - edit.start)
        if index < start + len(edit.text):
            return min(edit.start + max(0, index - start), edit.end)
        moved += grown
    return index - moved


def current(text: str, filename: str, report: Report) -> str:
    """The text of one document in the current version, for the reader of policies.

    A text of an earlier version is converted; the report gets a warning, and tells places as they are in the
    text that was given. What can not be converted is an error.
    """
    if not any(migration.old in text for migration in MIGRATIONS):
        return text
    steps = migrate_document(text, filename, report)
    for step in steps:
        report.translate(_through(steps[: steps.index(step) + 1]))
    if steps:
        hint = "`muxk migrate FILE` shows what changes, `muxk migrate --write FILE` changes it"
        old = steps[0].version.source.line(steps[0].version.line).partition(":")[2].strip().strip("'\"")
        report.warn(steps[0].version, f"{old[:40]} is an earlier version", hint, "old-api-version")
    return steps[-1].after if steps else text


def _through(steps: Sequence[Step]) -> Callable[[Mark], Mark]:
    def place(mark: Mark) -> Mark:
        for step in reversed(steps):
            mark = step.place(mark)
        return mark

    return place


def migrate_document(text: str, filename: str, report: Report) -> list[Step]:
    """All migrations that a document needs, one after the other; none when it is of the current version."""
    steps: list[Step] = []
    text = normalise(text)
    for migration in MIGRATIONS:
        source = Source(filename, text)
        root = load(text, filename, Report())
        version = root.get("apiVersion") if isinstance(root, MappingNode) else None
        if not isinstance(root, MappingNode) or not isinstance(version, Scalar):
            break
        if version.text != migration.old:
            continue
        step = _step(source, root, version, migration, report)
        if step is None:
            break
        steps.append(step)
        text = step.after
    return steps


def _step(
    source: Source, root: MappingNode, version: Scalar, migration: Migration, report: Report
) -> Step | None:
    changes = [Change.of_text(version, migration.new), *migration.changes(root)]
    edits: list[Edit] = []
    for change in changes:
        if change.edits is None:
            report.add(change.node.mark, _REFUSED, f"write {change.text[:200]}", "not-migrated")
        else:
            edits += change.edits
    edits.sort(key=lambda edit: (edit.start, edit.end))
    if any(change.edits is None for change in changes):
        return None
    apart = all(edit.end <= after.start for edit, after in pairwise(edits))
    after = apply_edits(source.text, edits) if apart else ""
    if not _says(load(after, source.filename, Report()), root, changes):
        report.add(version.mark, _REFUSED, f"write it again for {migration.new} by hand", "not-migrated")
        return None
    return Step(source, after, tuple(edits), version.mark)


_REFUSED = "this can not be rewritten for the next version of the language as it is laid out"
_Words: TypeAlias = "str | list[_Words] | list[tuple[str, _Words]] | None"


def _says(found: Node | None, root: Node, changes: Sequence[Change]) -> bool:
    """Whether a text was read as the old document with its changes."""
    new = {(change.node.mark.line, change.node.mark.column): change.text for change in changes}
    return found is not None and _words(found, {}) == _words(root, new)


def _words(node: Node, new: dict[tuple[int, int], str]) -> _Words:
    """What a node says; `new` has what is said instead at some places."""
    changed = new.get((node.mark.line, node.mark.column))
    if changed is not None:
        return changed.strip()
    if isinstance(node, Scalar):
        return node.text.strip()
    if isinstance(node, SequenceNode):
        return [_words(item, new) for item in node.items]
    return [(entry.key.text, _words(entry.value, new)) for entry in node]


@dataclass(frozen=True, slots=True)
class Migrated:
    """A file after its migrations, with its own line endings."""

    text: str
    versions: tuple[str, ...]
    """`apiVersion` of each document, as it was; empty where there was none."""


def migrate_file(text: str, filename: str, report: Report) -> Migrated:
    """Migrate every document of a file. Its line endings and byte order mark stay as they are."""
    plain = normalise(text)
    cuts = [0, *(match.start() for match in _SEPARATOR.finditer(plain)), len(plain)]
    edits: list[Edit] = []
    versions: list[str] = []
    for begin, end in pairwise(cuts):
        line = plain.count("\n", 0, begin)
        padded = "\n" * line + _SEPARATOR.sub("   ", plain[begin:end])
        versions.append(_version(padded, filename))
        for edit in _one_step(padded, migrate_document(padded, filename, report)):
            edits.append(Edit(edit.start - line + begin, edit.end - line + begin, edit.text))
    indices = _raw_indices(text)
    ending = "\r\n" if "\r\n" in text else "\n"
    raw = [Edit(indices[e.start], indices[e.end], e.text.replace("\n", ending)) for e in edits]
    return Migrated(apply_edits(text, raw), tuple(versions))


def _one_step(before: str, steps: Sequence[Step]) -> tuple[Edit, ...]:
    """The edits of one step; those of several as one, from the first character that differs to the last."""
    if len(steps) < 2:
        return steps[0].edits if steps else ()
    after = steps[-1].after
    most = min(len(before), len(after))
    same = next((i for i in range(most) if before[i] != after[i]), most)
    tail = next((i for i in range(most - same) if before[-1 - i] != after[-1 - i]), most - same)
    return (Edit(same, len(before) - tail, after[same : len(after) - tail]),)


def _version(text: str, filename: str) -> str:
    root = load(text, filename, Report())
    version = root.get("apiVersion") if isinstance(root, MappingNode) else None
    return version.text if isinstance(version, Scalar) else ""


def _raw_indices(text: str) -> list[int]:
    """For each character of the normalised text its index in the text as it is, and the end."""
    first = 1 if text.startswith("\ufeff") else 0
    return [i for i in range(first, len(text)) if text[i] != "\n" or i == first or text[i - 1] != "\r"] + [
        len(text)
    ]
