"""The policies that a PolicyTest names: shipped ones, files beside it, and documents of its own file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from muxk.kernel.policy import Policy
from muxk.policies.engine import CompiledPolicy, compile_policy, shipped_policies
from muxk.policies.loader import MAX_CHARACTERS, load, normalise
from muxk.policies.marks import MappingNode, Node, Scalar
from muxk.policies.placing import RulePlacing
from muxk.policies.problems import Mark, PolicyError, Problem, Report, did_you_mean
from muxk.policies.registry import installed_policies, open_policy
from muxk.policies.shipped_files import shipped_text

FILES_MAX = 200
"""Of a folder that may be meant where a path is wrong."""
_SEPARATOR = re.compile(r"^---(?=\s|$)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Document:
    """One document of a file, with all lines before it blank, so that every place in it stays right."""

    text: str
    root: Node

    @property
    def kind(self) -> str:
        return _scalar(self.root, "kind")

    @property
    def name(self) -> str:
        metadata = self.root.get("metadata") if isinstance(self.root, MappingNode) else None
        return "" if metadata is None else _scalar(metadata, "name")


def _scalar(node: Node, key: str) -> str:
    value = node.get(key) if isinstance(node, MappingNode) else None
    return value.text if isinstance(value, Scalar) else ""


def split_documents(text: str, filename: str, report: Report) -> list[Document]:
    """The documents of a file that `---` lines part; those that can not be read are reported."""
    text = normalise(text)
    if len(text) > MAX_CHARACTERS:
        load(text, filename, report)
        return []
    places = [match.start() for match in _SEPARATOR.finditer(text)]
    parts = [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]
    documents: list[Document] = []
    line = 0
    for part in parts:
        padded = "\n" * line + _SEPARATOR.sub("   ", part)
        line += part.count("\n")
        if not _says_nothing(padded) or len(parts) == 1:
            root = load(padded, filename, report)
            if root is not None:
                documents.append(Document(padded, root))
    return documents


def _says_nothing(text: str) -> bool:
    return all(not line.strip() or line.lstrip().startswith("#") for line in text.split("\n"))


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """A policy with values of its params, ready to run."""

    label: str
    """How it was named: a shipped name, a path, or the name of a document."""
    policy: Policy
    source: str | None
    """Its YAML text; None for one that is written in Python."""
    filename: str
    settings: Mapping[str, str] = field(default_factory=dict)
    own_rules: tuple[str, ...] = ()
    """`point/rule` of the points that its own text answers, which leaves out what it inherits."""

    @property
    def rules(self) -> tuple[str, ...] | None:
        """All labels that its answers may bear; None when they are not known."""
        policy = self.policy
        if not isinstance(policy, CompiledPolicy):
            return None
        labels = [rule.label for point in policy.points.values() for rule in point.rules]
        labels += [f"{point}/default" for point in policy.points]
        return (*labels, *(() if policy.placing is None else policy.placing.labels))


class Policies:
    """Finds and compiles what the tests of one file name. Mistakes of policies are collected."""

    def __init__(self, documents: Sequence[Document], filename: str, directory: Path | None) -> None:
        """`directory` is where relative paths begin; None where there are no files."""
        self._documents = documents
        self._filename = filename
        self._directory = directory
        self.problems: list[Problem] = []

    def find(
        self, name: str, place: Mark, settings: Mapping[str, Scalar], report: Report
    ) -> PolicyChoice | None:
        """The policy of a name; an empty one means the only policy document of the file."""
        values = {key: node.text for key, node in settings.items()}
        try:
            source = self._text(name, place, report)
            if source is None:
                return None
            label, filename, text = source
            if text is None:
                return PolicyChoice(label, open_policy(name, values), None, filename, values)
            return choose(text, filename, label, values)
        except PolicyError as error:
            self._note(error, settings, place, report)
            return None

    def _text(self, name: str, place: Mark, report: Report) -> tuple[str, str, str | None] | None:
        """(label, file name, text) of a policy; no text for one in Python."""
        if not name:
            if len(self._documents) == 1:
                return self._documents[0].name, self._filename, self._documents[0].text
            many = "several policies are in this file" if self._documents else "no policy is in this file"
            report.add(
                place, f"'policy' is missing, and {many}", "write policy: muxwise, or policy: mine.yaml"
            )
            return None
        for document in self._documents:
            if document.name == name:
                return name, self._filename, document.text
        if name in shipped_policies():
            return name, f"{name}.yaml", shipped_text(name)
        path = self._directory / name if self._directory is not None else None
        if path is not None and path.is_file():
            return name, str(path), read_text(path)
        return self._in_python(name, place, report)

    def _in_python(self, name: str, place: Mark, report: Report) -> tuple[str, str, None] | None:
        installed = [one.name for one in installed_policies()]
        if name in installed:
            return name, name, None
        known = [*(document.name for document in self._documents), *installed, *self._files_beside()]
        hint = did_you_mean(name, known, f"policies with a name: {', '.join(installed)}")
        report.add(place, f"there is no policy '{name[:60]}'", hint)
        return None

    def _files_beside(self) -> list[str]:
        """Names of files that may be meant: those beside the test that are no tests themselves."""
        if self._directory is None or not self._directory.is_dir():
            return []
        names = sorted(path.name for path in self._directory.glob("*.yaml"))
        return [name for name in names if not name.endswith(".test.yaml")][:FILES_MAX]

    def _note(self, error: PolicyError, settings: Mapping[str, Scalar], place: Mark, report: Report) -> None:
        """Mistakes of the policy where they are; those of a setting where it is written."""
        for problem in error.problems:
            if problem.file == "--set":
                node = settings.get(problem.source_line.partition("=")[0])
                report.add(node.mark if node is not None else place, problem.message, problem.hint)
            elif problem not in self.problems:
                self.problems.append(problem)

    def check_all(self) -> None:
        """Compile every policy of the file, so that none of them hides a mistake."""
        for document in self._documents:
            try:
                compile_policy(document.text, self._filename)
            except PolicyError as error:
                self.problems += [problem for problem in error.problems if problem not in self.problems]


def choose(text: str, filename: str, label: str, settings: Mapping[str, str]) -> PolicyChoice:
    """A policy from its text. Raises PolicyError."""
    policy = compile_policy(text, filename, settings)
    return PolicyChoice(label, policy, text, filename, settings, _own_rules(policy))


def read_text(path: Path) -> str:
    """A file of at most the size that the loader takes. Raises PolicyError."""
    try:
        with path.open("rb") as file:
            return file.read(4 * MAX_CHARACTERS).decode("utf-8")
    except OSError as error:
        message = f"can not be read: {error.strerror or error}"
    except UnicodeDecodeError as error:
        message = f"is not UTF-8 text: byte {error.start}"
    raise PolicyError([Problem(str(path), 1, 1, message, "", "")])


def _own_rules(policy: CompiledPolicy) -> tuple[str, ...]:
    assert policy.source is not None, "compiled from YAML"
    spec = policy.source.spec
    written = [point for point in policy.points.values() if spec.get(point.name) is not None]
    rules = [rule for point in written for rule in point.rules]
    labels = [rule.label for rule in rules if rule.mark.source is spec.mark.source]
    if isinstance(policy.placing, RulePlacing):
        labels += [rule.label for rule in policy.placing.rules if rule.mark.source is spec.mark.source]
    return tuple(labels)


def open_choice(name: str, settings: Mapping[str, str]) -> PolicyChoice:
    """A shipped or installed policy by name, or a file by path. Raises PolicyError."""
    if name in shipped_policies():
        return choose(shipped_text(name), f"{name}.yaml", name, settings)
    path = Path(name)
    if path.is_file():
        return choose(read_text(path), name, name, settings)
    return PolicyChoice(name, open_policy(name, settings), None, name, settings)
