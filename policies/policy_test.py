"""The document `kind: PolicyTest`: a policy, a device of given costs, arrivals, and what is expected.

It is read with the loader, the marks and the expressions of policies, so that every mistake of a file is told
in one run, with its place. `actors/policy_tests.py` runs what is read here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from muxk.policies.loader import fields
from muxk.policies.marks import MappingNode, Node, Scalar, describe
from muxk.policies.policy_choice import Document, Policies, PolicyChoice, split_documents
from muxk.policies.policy_test_expect import ExpectationReader, Known
from muxk.policies.policy_test_load import LoadReader, items_of
from muxk.policies.policy_test_spec import Arrivals, Expectation, PolicyTest, Swap
from muxk.policies.policy_test_values import Values
from muxk.policies.problems import Mark, PolicyError, Report, did_you_mean

API_VERSION = "muxk/v1beta1"
KIND = "PolicyTest"
POLICY_KIND = "SchedulingPolicy"
TIMEOUT_NS = 600_000_000_000

DOCUMENT: Mapping[str, str] = dict.fromkeys(("apiVersion", "kind", "metadata", "spec"), "")
SPEC: Mapping[str, str] = dict.fromkeys(
    ("policy", "set", "seed", "device", "timeout", "arrivals", "actions", "expect"), ""
)
METADATA: Mapping[str, str] = {"name": "", "description": ""}
ACTION: Mapping[str, str] = dict.fromkeys(("at", "swap", "set"), "")


def read_tests(
    text: str, filename: str, directory: Path | None = None, instead: PolicyChoice | None = None
) -> tuple[PolicyTest, ...]:
    """The tests of a file, which may hold policies too.

    Args:
        directory: where paths of policies begin; None where only shipped ones can be named.
        instead: a policy to run in place of the one that each test names.

    Raises:
        PolicyError: with every mistake that was found.
    """
    report = Report()
    documents = split_documents(text, filename, report)
    policies = Policies([each for each in documents if each.kind == POLICY_KIND], filename, directory)
    policies.check_all()
    tests = [
        _TestReader(document, policies, instead, report).test()
        for document in documents
        if document.kind != POLICY_KIND
    ]
    found = tuple(test for test in tests if test is not None)
    _check_names(found, report)
    if report or policies.problems:
        problems = [*report.problems, *policies.problems]
        raise PolicyError(sorted(problems, key=lambda problem: (problem.file != filename, problem.line)))
    return found


def _check_names(tests: Sequence[PolicyTest], report: Report) -> None:
    lines: dict[str, int] = {}
    for test in tests:
        if test.name in lines:
            report.add(
                test.mark, f"two tests are named '{test.name}'", f"the other is on line {lines[test.name]}"
            )
        lines.setdefault(test.name, test.mark.line)


class _TestReader:
    """One document."""

    def __init__(
        self, document: Document, policies: Policies, instead: PolicyChoice | None, report: Report
    ) -> None:
        self._root = document.root
        self._policies = policies
        self._instead = instead
        self._report = report
        self._values = Values(report)
        self._load = LoadReader(report)

    def test(self) -> PolicyTest | None:
        """The whole document; None when it has mistakes."""
        document = fields(self._root, DOCUMENT, "a test file", self._report)
        if not isinstance(self._root, MappingNode):
            return None
        self._fixed(document, "apiVersion", API_VERSION)
        self._fixed(document, "kind", KIND)
        spec_node = document.get("spec")
        if not isinstance(spec_node, MappingNode):
            mark = spec_node.mark if spec_node is not None else self._root.mark
            self._report.add(mark, "a test needs a 'spec' mapping", "with policy, arrivals and expect")
            return None
        name, description, mark = self._metadata(document.get("metadata"))
        spec = fields(spec_node, SPEC, "the spec of a test", self._report)
        choice = self._choice(spec, spec_node)
        arrivals = self._load.arrivals(spec.get("arrivals"), spec_node)
        swaps = self._swaps(spec.get("actions"))
        timeout_ns = self._values.duration(spec.get("timeout"), "timeout", TIMEOUT_NS)
        seed = self._values.count(spec.get("seed"), "seed", 1, 0, (1 << 63) - 1)
        device = self._load.device(spec.get("device"))
        self._check_devices(spec, device.devices, choice, swaps)
        known = None if self._instead is not None else Known.of(choice, swaps)
        expectations = ExpectationReader(arrivals, known, self._report).expectations(
            spec.get("expect"), spec_node
        )
        self._check_times(spec, timeout_ns, arrivals, swaps, expectations)
        if choice is None:
            return None
        return PolicyTest(
            name, description, mark, choice, seed, device, timeout_ns, arrivals, swaps, expectations
        )

    def _check_devices(
        self,
        spec: Mapping[str, Node],
        devices: int,
        choice: PolicyChoice | None,
        swaps: Sequence[Swap],
    ) -> None:
        """A policy may need several."""
        chosen = [] if choice is None else [("policy", choice)]
        for key, one in (*chosen, *(("actions", swap.choice) for swap in swaps)):
            needed = one.policy.devices_min
            if needed > devices and key in spec:
                message = f"{one.label} needs {needed} devices, and the test has {devices}"
                self._report.add(spec[key].mark, message, f"write device: {{devices: {needed}}}")

    def _check_times(
        self,
        spec: Mapping[str, Node],
        timeout_ns: int,
        arrivals: Sequence[Arrivals],
        swaps: Sequence[Swap],
        expectations: Sequence[Expectation],
    ) -> None:
        """Nothing is to happen when the run is given up."""
        late = "after the timeout of the test"
        for expectation in expectations:
            if expectation.at_ns is not None and expectation.at_ns > timeout_ns:
                self._report.add(expectation.mark, f"this moment is {late}")
        for group in arrivals:
            if group.at_ns > timeout_ns:
                self._report.add(spec["arrivals"].mark, f"'{group.name}' arrives {late}")
        for swap in swaps:
            if swap.at_ns > timeout_ns:
                self._report.add(spec["actions"].mark, f"the swap to {swap.choice.label} is {late}")

    def _fixed(self, document: Mapping[str, Node], key: str, wanted: str) -> None:
        node = document.get(key)
        if node is None:
            self._report.add(self._root.mark, f"'{key}' is missing", f"write {key}: {wanted}")
        elif not isinstance(node, Scalar) or node.text != wanted:
            known = (KIND, POLICY_KIND) if key == "kind" else (wanted,)
            hint = did_you_mean(node.text, known) if isinstance(node, Scalar) else ""
            self._report.add(node.mark, f"{key} must be {wanted}, not {describe(node)}", hint)

    def _metadata(self, node: Node | None) -> tuple[str, str, Mark]:
        if node is None:
            self._report.add(
                self._root.mark, "'metadata' is missing", "write metadata: {name: keeps-its-slo}"
            )
            return "", "", self._root.mark
        found = fields(node, METADATA, "metadata", self._report)
        name = found.get("name")
        if name is None and isinstance(node, MappingNode):
            self._report.add(node.mark, "metadata needs a 'name'")
        description = self._values.text(found.get("description"), "a description")
        mark = node.mark if name is None else name.mark
        return self._values.word(name, "a test's name"), description, mark

    # --- policies ---

    def _choice(self, spec: Mapping[str, Node], spec_node: Node) -> PolicyChoice | None:
        node = spec.get("policy")
        settings = self._values.settings(spec.get("set"))
        if self._instead is not None:
            return self._instead
        name = self._values.text(node, "'policy'")
        if node is not None and not name:
            return None
        place = node.mark if node is not None else spec_node.mark
        return self._policies.find(name, place, settings, self._report)

    def _swaps(self, node: Node | None) -> tuple[Swap, ...]:
        swaps = [self._swap(item) for item in items_of(node, "actions", self._report)]
        return tuple(swap for swap in swaps if swap is not None)

    def _swap(self, node: Node) -> Swap | None:
        found = fields(node, ACTION, "an action", self._report)
        if not isinstance(node, MappingNode):
            return None
        for key in ("at", "swap"):
            if key not in found:
                self._report.add(node.mark, f"an action needs '{key}'", "write {at: 2s, swap: chunked}")
        at_ns = self._values.duration(found.get("at"), "at", 0)
        name = self._values.text(found.get("swap"), "'swap'")
        settings = self._values.settings(found.get("set"))
        if not name:
            return None
        choice = self._policies.find(name, found["swap"].mark, settings, self._report)
        return None if choice is None else Swap(at_ns, choice)
