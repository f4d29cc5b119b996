"""The code keeps the rules of architecture_rules.py, and every rule can still fail."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from architecture_rules import (
    RULES,
    Rule,
    Source,
    all_sources,
    folders_import_only_what_they_may,
    functions_and_files_are_short,
    no_clocks_and_no_chance,
    no_hash_of_objects,
    no_iteration_over_sets,
    no_mutable_state_in_modules,
    no_threads,
    nothing_that_runs_foreign_code,
    product_sources,
    torch_stays_in_models_and_devices,
)


@pytest.fixture(scope="module", autouse=True)
def parsed_once() -> Iterator[None]:
    yield
    all_sources.cache_clear()  # The trees of all files are large, and no other test wants them.


@pytest.mark.parametrize(("rule", "prefixes"), RULES, ids=lambda value: getattr(value, "__name__", ""))
def test_the_code_keeps_the_rule(rule: Rule, prefixes: tuple[str, ...]) -> None:
    complaints = [complaint for source in product_sources(prefixes) for complaint in rule(source)]
    assert not complaints, "\n" + "\n".join(complaints)


BAD_AND_GOOD: tuple[tuple[Rule, str, str, str], ...] = (
    (
        folders_import_only_what_they_may,
        "kernel/a.py",
        "import muxk.actors.gateway",
        "import muxk.kernel.view",
    ),
    (
        folders_import_only_what_they_may,
        "policies/a.py",
        "from muxk import models",
        "from muxk import kernel",
    ),
    (
        folders_import_only_what_they_may,
        "models/a.py",
        "from ..profiles import b",
        "from ..kernel import view",
    ),
    (
        folders_import_only_what_they_may,
        "actors/a.py",
        "from muxk.client import b",
        "from muxk.models import b",
    ),
    (
        folders_import_only_what_they_may,
        "kernel/devices/a.py",
        "import importlib\nimportlib.import_module('muxk.models.llama')",
        "import importlib\nimportlib.import_module('muxk.kernel.devices.cpu')",
    ),
    (
        torch_stays_in_models_and_devices,
        "actors/a.py",
        "def f():\n    from torch import nn",
        "import torchlight",
    ),
    (
        no_clocks_and_no_chance,
        "actors/a.py",
        "import time as t\nt.monotonic_ns()",
        "def f(self): self.now_ns()",
    ),
    (no_clocks_and_no_chance, "actors/a.py", "from time import perf_counter as p\np()", "perf_counter = 1"),
    (no_clocks_and_no_chance, "actors/a.py", "import datetime\ndatetime.datetime.now()", "import datetime"),
    (
        no_clocks_and_no_chance,
        "actors/a.py",
        "import random\nrandom.random()",
        "import random\nrandom.Random(7)",
    ),
    (
        no_clocks_and_no_chance,
        "actors/a.py",
        "from random import Random\nRandom()",
        "from random import Random",
    ),
    (no_clocks_and_no_chance, "policies/a.py", "import secrets\nsecrets.token_hex()", "secret = 1"),
    (
        no_clocks_and_no_chance,
        "policies/a.py",
        "import numpy as np\nnp.random.default_rng()",
        "import numpy as np\nnp.random.Generator(np.random.Philox(key=7))",
    ),
    (no_hash_of_objects, "policies/a.py", "x = hash('a')", "import hashlib\nx = hashlib.blake2b(b'a')"),
    (no_hash_of_objects, "policies/a.py", "x = sorted(y, key=hash)", "x.hash(1)"),
    (no_iteration_over_sets, "actors/a.py", "for x in {1, 2}: pass", "for x in (1, 2): pass"),
    (no_iteration_over_sets, "actors/a.py", "for x in set(y) | z: pass", "for x in sorted(set(y)): pass"),
    (
        no_iteration_over_sets,
        "actors/a.py",
        "x = [y for y in {z for z in a}]",
        "x = {y for y in {z for z in a}}",
    ),
    (
        no_iteration_over_sets,
        "actors/a.py",
        "def f():\n s = set()\n return list(s)",
        "def f():\n return len(set())",
    ),
    (
        no_iteration_over_sets,
        "actors/a.py",
        "class S:\n waiting: set[int]\n def f(self):\n  return self.waiting.pop()",
        "class S:\n waiting: set[int]\n def f(self):\n  return sum(1 for x in self.waiting)",
    ),
    (no_mutable_state_in_modules, "actors/a.py", "CACHE = {}", "LIMITS: Mapping[str, int] = {'a': 1}"),
    (
        no_mutable_state_in_modules,
        "actors/a.py",
        "seen: list[int] = []",
        "__all__ = ['a']\nNAMES = ('a', 'b')",
    ),
    (
        no_mutable_state_in_modules,
        "actors/a.py",
        "from collections import deque\nq = deque()",
        "def f(): q = []",
    ),
    (no_mutable_state_in_modules, "actors/a.py", "n = 0\ndef f():\n global n\n n = 1", "X = frozenset({1})"),
    (no_threads, "actors/a.py", "from concurrent.futures import ThreadPoolExecutor", "import concurrency"),
    (no_threads, "actors/a.py", "from anyio import to_thread", "from anyio import Path"),
    (nothing_that_runs_foreign_code, "kernel/a.py", "import pickle", "import msgspec"),
    (nothing_that_runs_foreign_code, "kernel/a.py", "eval('1')", "model.eval()"),
    (nothing_that_runs_foreign_code, "client/a.py", "from zmq import asyncio", "import asyncio, zmq"),
    (
        nothing_that_runs_foreign_code,
        "policies/a.py",
        "import yaml as y\ny.load('')",
        "import yaml\nyaml.safe_load('')",
    ),
    (nothing_that_runs_foreign_code, "client/a.py", "socket.recv_pyobj()", "socket.recv_multipart()"),
    (nothing_that_runs_foreign_code, "a.py", "load(p, allow_pickle=True)", "load(p, allow_pickle=False)"),
    (functions_and_files_are_short, "a.py", "def f():\n" + " x = 1\n" * 70, "def f():\n" + " x = 1\n" * 69),
    (functions_and_files_are_short, "a.py", "x = 1\n" * 401, "x = 1\n" * 400),
)


@pytest.mark.parametrize(("rule", "path", "bad", "good"), BAD_AND_GOOD)
def test_the_rule_finds_the_bad_snippet_and_passes_the_good_one(
    rule: Rule, path: str, bad: str, good: str
) -> None:
    assert list(rule(Source(path, bad)))
    assert not list(rule(Source(path, good)))


def test_every_rule_has_a_snippet_and_the_scan_sees_the_kernel() -> None:
    assert {rule for rule, _ in RULES} == {rule for rule, *_ in BAD_AND_GOOD}
    assert "kernel/actor.py" in {source.path for source in product_sources()}


def test_a_relative_import_is_resolved_to_its_absolute_name() -> None:
    source = Source("kernel/devices/cpu.py", "from ..view import View\nfrom . import sim")
    assert [name for _, name in source.imported_modules()] == [
        "muxk.kernel.view.View",
        "muxk.kernel.devices.sim",
    ]
