"""Policies of other packages: found by name, refused with the name of who brought them, told apart by sha."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from muxk.policies import api, registry, shipped
from muxk.policies.engine import load_policy, shipped_policies
from muxk.policies.guarded import GuardedPolicy
from muxk.policies.problems import PolicyError
from muxk.policies.registry import installed_policies, list_policies, open_installed, open_policy
from plugin_packages import install, install_example

ROOT = Path(__file__).parents[2]
LAZY = """
from muxk.policies.api import BasePolicy
class Lazy(BasePolicy):
    api_version = 1
    name = "lazy"
    description = "one layer at a time"
"""
FACTORY = "class Lazy:\n api_version = 1\n def __init__(self, s): "
Install = Callable[..., None]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a distribution into a folder of its own that is on the path."""
    before = set(sys.modules)

    def add(distribution: str, entries: dict[str, str], version: str = "1.0", **modules: str) -> None:
        monkeypatch.syspath_prepend(
            install(tmp_path / f"{distribution}-{version}", distribution, entries, modules, version)
        )

    yield add
    for name in set(sys.modules) - before:
        del sys.modules[name]


def refusal(name: str, **settings: str) -> str:
    with pytest.raises(PolicyError) as refused:
        open_policy(name, settings)
    assert refused.value.problems
    return str(refused.value)


def test_a_class_with_a_name_and_a_version_is_a_policy_that_answers_as_its_rules(
    installed: Install, make_view: Any
) -> None:
    installed("lazy-dist", {"lazy": "lazy:Lazy"}, lazy=LAZY)
    policy = open_policy("lazy")
    assert isinstance(policy, GuardedPolicy)
    assert (policy.name, policy.classes) == ("lazy", ("default",))
    assert policy.limits.queue_bound == 1024
    assert policy.decide(make_view()).errors == ()
    assert policy.decide(make_view()).rules == ("split/always",)


def test_the_example_serves_short_prompts_first_until_somebody_lost_patience(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_request: Any
) -> None:
    monkeypatch.syspath_prepend(install_example(tmp_path))
    second = 1_000_000_000
    waiting = [
        make_request(prompt_tokens=900, arrival_ns=0),
        make_request(prompt_tokens=10, arrival_ns=second),
        make_request(prompt_tokens=50, arrival_ns=second),
    ]
    patient = open_policy("shortest-first", {"patience": "5s"})
    assert patient.order(waiting, 2 * second, {}).order == (1, 2, 0)
    impatient = open_policy("shortest-first", {"patience": "1500ms"})
    assert impatient.order(waiting, 2 * second, {}).order == (0, 1, 2)
    assert impatient.order(waiting, 2 * second, {}).rule == "order/shortest-first"
    assert patient.sha != impatient.sha
    assert "below the least value" in refusal("shortest-first", patience="1ms")
    assert "did you mean 'patience'" in refusal("shortest-first", patienc="1s")


@pytest.mark.parametrize(
    ("module", "complaint"),
    [
        ("import nowhere_at_all", r"can not be imported: ModuleNotFoundError: .*nowhere_at_all"),
        ("x = 1", r"can not be imported: AttributeError"),
        ("raise SystemExit(3)", r"can not be imported: SystemExit: 3"),
        ("class Lazy: pass", r"does not say for which version .*\n.*hint: state `api_version = 1`"),
        ("class Lazy: api_version = 2", r"for version 2 .* this muxk has 1\n.*hint: install a newer muxk"),
        ("class Lazy: api_version = 0", r"version 0 .*\n.*hint: install a newer lazy-dist"),
        ("class Lazy: api_version = True", r"does not say for which version"),
        ("class L: api_version = 1\nLazy = L()", r"must be a class or a function"),
        (FACTORY + "1 / 0", r"can not be made: ZeroDivisionError"),
        (FACTORY + "pass", r"is no policy: it has no name, limits"),
        (LAZY + "    def __init__(self, settings): pass", r"it has no limits, .*\n.*call super"),
        (LAZY.replace('"lazy"', '"other"'), r"calls itself 'other'\n.*same name"),
        (LAZY + "    limits = None", r"limits must be Limits, not None"),
        (LAZY + "    classes = ()", r"classes must be a tuple of 1 to"),
        (LAZY + "    tbt_slo_ns = 1.5", r"tbt_slo_ns must be a whole number, not 1.5"),
        (LAZY + "    @property\n    def reads_priority(self): return 1 / 0", r"ZeroDivisionError"),
    ],
)  # fmt: skip
def test_a_policy_that_can_not_be_used_is_refused_with_the_name_of_its_distribution(
    installed: Install, module: str, complaint: str
) -> None:
    installed("lazy-dist", {"lazy": "lazy:Lazy"}, "2.5", lazy=module)
    text = refusal("lazy")
    assert text.startswith("policy 'lazy' of lazy-dist 2.5 (lazy:Lazy): ")
    assert re.search(complaint, text), text
    [row] = [row for row in list_policies() if row.name == "lazy"]
    assert row.problem == text


def test_a_mistake_in_the_spec_has_a_place_in_the_spec(installed: Install) -> None:
    installed("lazy-dist", {"lazy": "lazy:Lazy"}, lazy=LAZY + '    spec = "slice: {layers: lairs.total}"\n')
    text = refusal("lazy")
    assert text.startswith("<spec of lazy>:5:19: ")
    assert "slice: {layers: lairs.total}" in text
    assert "did you mean 'layers.total'?" in text


def test_two_distributions_of_one_name_are_both_named_and_neither_is_run(installed: Install) -> None:
    installed("first-dist", {"lazy": "lazy:Lazy"}, lazy=LAZY)
    installed("second-dist", {"lazy": "other:Lazy"}, other=LAZY)
    text = refusal("lazy")
    assert "first-dist 1.0 (lazy:Lazy) and second-dist 1.0 (other:Lazy)" in text
    assert {row.origin for row in list_policies() if row.problem == text} == {
        "first-dist 1.0",
        "second-dist 1.0",
    }


def test_who_shadows_a_shipped_policy_is_named_and_other_names_still_work(installed: Install) -> None:
    installed("bad-dist", {"muxwise": "lazy:Lazy", "lazy": "lazy:Lazy"}, lazy=LAZY)
    text = refusal("muxwise")
    assert text.startswith(
        "policy 'muxwise' of bad-dist 1.0 (lazy:Lazy): this is the name of a policy that ships"
    )
    assert "uninstall bad-dist" in text
    assert open_policy("chunked").name == "chunked"
    assert open_policy("lazy").name == "lazy"


def test_a_name_that_is_nearly_that_of_a_plugin_gets_a_hint(installed: Install) -> None:
    installed("lazy-dist", {"lazy-chat": "lazy:Lazy"}, lazy=LAZY)
    assert "did you mean 'lazy-chat'?" in refusal("lazy-chta")
    assert "shipped policies: " in refusal("nothing-like-it.yaml")


def test_a_package_can_ship_a_yaml_file(installed: Install, tmp_path: Path) -> None:
    text = (ROOT / "policies/temporal.yaml").read_text("utf-8").replace("name: temporal", "name: mine")
    package = tmp_path / "mine-1.0" / "mine_rules"
    package.mkdir(parents=True)
    (package / "mine.yaml").write_text(text, encoding="utf-8")
    provider = "mine = YamlPolicy('mine_rules', 'mine.yaml', api_version=1)"
    module = f"from muxk.policies.api import YamlPolicy\n{provider}\n"
    (package / "__init__.py").write_text(module, encoding="utf-8")
    installed("mine", {"mine": "mine_rules:mine"})
    policy = open_policy("mine")
    assert (policy.name, policy.limits) == ("mine", load_policy("temporal").limits)


def test_the_sha_changes_with_settings_source_and_version_and_with_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = '    spec = "params: {a: {type: number, default: 1}}"\n'

    def sha(folder: str, text: str, version: str, **settings: str) -> str:
        with monkeypatch.context() as patch:
            patch.syspath_prepend(
                install(tmp_path / folder, "lazy-dist", {"lazy": "lazy:Lazy"}, {"lazy": text}, version)
            )
            patch.delitem(sys.modules, "lazy", raising=False)
            return open_policy("lazy", settings).sha

    first = sha("a", LAZY + spec, "1.0")
    assert sha("b", LAZY + spec, "1.0") == first
    others = [
        sha("c", LAZY + spec + "    # changed\n", "1.0"),
        sha("d", LAZY + spec, "1.1"),
        sha("e", LAZY + spec, "1.0", a="2"),
        sha("f", LAZY + spec.replace("default: 1", "default: 2"), "1.0"),
    ]
    assert len({first, *others}) == 5


def test_a_name_that_a_client_sends_is_never_a_path(tmp_path: Path) -> None:
    path = tmp_path / "secret.yaml"
    path.write_text((ROOT / "policies/temporal.yaml").read_text("utf-8"), encoding="utf-8")
    assert open_policy(path).name == "temporal"
    for name in (str(path), "../policies/temporal.yaml", "defaults", "", "temporal.yaml"):
        with pytest.raises(PolicyError, match="no policy of this name is installed where the server runs"):
            open_installed(name)
    assert open_installed("temporal").sha == load_policy("temporal").sha


def test_what_ships_is_registered_under_the_entry_points_that_plugins_use() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    registered = project["entry-points"][api.ENTRY_POINT_GROUP]
    assert registered == {name: f"muxk.policies.shipped:{name}" for name in shipped_policies()}
    for name in registered:
        provider = getattr(shipped, name)
        assert provider.api_version == api.API_VERSION
        assert provider({}).sha == load_policy(name).sha


def test_metadata_older_than_the_code_hides_nothing_that_ships(installed: Install) -> None:
    entries = {"muxwise": "muxk.policies.shipped:muxwise", "gone": "muxk.policies.shipped:gone"}
    installed("muxk", entries, version="0.0.1")
    found = {one.name: one.origin for one in installed_policies()}
    assert set(found) == set(shipped_policies())
    assert all(row.problem == "" for row in list_policies())
    assert open_policy("chunked").sha == load_policy("chunked").sha


def test_every_exported_name_is_there_and_public_views_keep_their_order() -> None:
    assert all(hasattr(api, name) for name in api.__all__)
    assert registry.OWN == "muxk"
    fields = {
        "Decision": ("split", "layers", "preempt", "rules", "errors", "tokens", "fuse"),
        "AdmitAnswer": ("action", "reason", "rule", "errors"),
        "OrderAnswer": ("order", "rule", "errors"),
        "FormAnswer": ("max_requests", "max_tokens", "rule", "errors"),
        "VictimAnswer": ("index", "rule", "errors"),
        "RetainAnswer": ("keep", "rule", "errors"),
        "ClassAnswer": ("chosen", "rule", "errors"),
        "RequestClass": ("name", "rank", "tbt_slo_ns", "ttft_slo_ns", "share", "max_wait_ns"),
    }
    for name, promised in fields.items():
        assert getattr(api, name).__struct_fields__[: len(promised)] == promised


def test_the_class_of_the_guide_is_a_policy(installed: Install, make_request: Any) -> None:
    guide = (ROOT / "docs/python-policies.md").read_text("utf-8")
    [text] = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    installed("guide", {"longest-first": "guide:LongestFirst"}, guide=text)
    policy = open_policy("longest-first", {"least": "100"})
    waiting = [make_request(prompt_tokens=tokens) for tokens in (99, 100, 300, 1)]
    assert policy.order(waiting, 0, {}).order == (2, 1, 0, 3)
    assert policy.tbt_slo_ns == 50_000_000
