"""Policies of earlier versions: read, told where they stand, and rewritten without a change of meaning."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from muxk.client import cli
from muxk.kernel.view import View
from muxk.policies.engine import compile_policy
from muxk.policies.migrations import CURRENT, MIGRATIONS, Migrated, migrate_file
from muxk.policies.problems import PolicyError, Report
from muxk.policies.schema import API_VERSION
from typer.testing import CliRunner, Result

HEAD = "apiVersion: muxk/v1alpha1\nkind: SchedulingPolicy\nmetadata: {name: old}\nspec:\n"

OLD = """\
# My policy
apiVersion: 'muxk/v1alpha1'   # since spring
kind: SchedulingPolicy
metadata: {name: old}

spec:
  extends: static_split
  params:
    room: {type: size, default: 4KiB, min: 1kB}    # a count
    part: {type: percent, default: 5%}
  limits: {queue: 1kB, backlog: 100%}
  admit:
    - {name: large, when: 'request.pages > 1MiB', then: {shed: "over 1MiB of pages"}}
    - {name: rest, then: accept}
  split:
    - name: first
      when: >-
        kv.free < params.room
        and queue.tokens > 4KiB
      then: {decode: {fewest: "estimate.decode(units) <= slo.tbt"}, prefill: rest, otherwise: {decode: most, prefill: rest}}
    - name: second
      when: decode.batch > 4
      then:
        decode:
          fewest: "max(units, 3) >= 4"  # three is too few
        prefill: rest
        otherwise: {decode: 50%, prefill: rest}
    - name: third
      when: decode.batch > 2
      then:
        decode:
          fewest: >-
            units > 2
            and units < 8
        prefill: rest
        otherwise: {decode: params.part + 1%, prefill: rest}
    - name: fourth
      when: decode.batch > 1
      then:
        decode: { fewest: units >= 2 , }
        prefill: rest
        otherwise: {decode: params.decode_share, prefill: rest}
    - name: fifth
      then:
        decode:
          fewest:
            units >= 2kB or
              units < 4
        prefill: rest
        otherwise: {decode: 1, prefill: rest}
"""  # noqa: E501

NEW = """\
# My policy
apiVersion: 'muxk/v1beta1'   # since spring
kind: SchedulingPolicy
metadata: {name: old}

spec:
  extends: static_split
  params:
    room: {type: number, default: 4Ki, min: 1k}    # a count
    part: {type: percent, default: 5%}
  limits: {queue: 1k, backlog: 1.0}
  admit:
    - {name: large, when: 'request.pages > 1Mi', then: {shed: "over 1MiB of pages"}}
    - {name: rest, then: accept}
  split:
    - name: first
      when: >-
        kv.free < params.room
        and queue.tokens > 4Ki
      then: {decode: fewest where estimate.decode(units) <= slo.tbt, prefill: rest, otherwise: {decode: most, prefill: rest}}
    - name: second
      when: decode.batch > 4
      then:
        decode:
          "fewest where max(units, 3) >= 4"  # three is too few
        prefill: rest
        otherwise: {decode: 0.5, prefill: rest}
    - name: third
      when: decode.batch > 2
      then:
        decode:
          >-
            fewest where units > 2
            and units < 8
        prefill: rest
        otherwise: {decode: 1 * (params.part + 1%), prefill: rest}
    - name: fourth
      when: decode.batch > 1
      then:
        decode: fewest where units >= 2
        prefill: rest
        otherwise: {decode: 1 * params.decode_share, prefill: rest}
    - name: fifth
      then:
        decode:
          fewest where units >= 2k or
              units < 4
        prefill: rest
        otherwise: {decode: 1, prefill: rest}
"""  # noqa: E501


def migrated(text: str) -> Migrated:
    report = Report()
    found = migrate_file(text, "old.yaml", report)
    assert report.problems == ()
    return found


def test_a_migration_keeps_comments_quotes_and_layout() -> None:
    assert migrated(OLD).text == NEW


def test_what_was_migrated_is_of_the_current_version_and_stays_as_it_is() -> None:
    compile_policy(NEW)
    assert migrated(NEW) == Migrated(NEW, (API_VERSION,))


def test_line_endings_and_a_byte_order_mark_stay() -> None:
    windows = "\ufeff" + OLD.replace("\n", "\r\n")
    assert migrated(windows).text == "\ufeff" + NEW.replace("\n", "\r\n")


def test_every_document_of_a_file_is_migrated_at_its_own_place() -> None:
    text = f"{OLD}--- # the second\n{OLD}---\n{NEW}"
    assert migrated(text).text == f"{NEW}--- # the second\n{NEW}---\n{NEW}"
    assert migrated(text).versions == ("muxk/v1alpha1", "muxk/v1alpha1", CURRENT)


def test_the_table_of_versions_leads_to_the_current_one() -> None:
    links = [MIGRATIONS[0].old, *(migration.new for migration in MIGRATIONS)]
    assert [migration.old for migration in MIGRATIONS] == links[:-1]
    assert links[-1] == CURRENT == API_VERSION


DECIDED_BEFORE = {
    2: "111111111111111111111111111111111111",
    7: "161611161611262622363633464644464644",
    16: "181811181811282822383833484844484844",
}
"""Units for decode that the reader of the earlier version itself chose for OLD, by units of the device;
recorded before that reader was replaced."""


@pytest.mark.parametrize("text", [OLD, NEW], ids=["converted when it is read", "rewritten"])
@pytest.mark.parametrize("units", [2, 7, 16])
def test_the_policy_decides_as_before(make_view: Callable[..., View], units: int, text: str) -> None:
    policy, view = compile_policy(text), make_view(units)
    found = ""
    for batch, free, tokens in itertools.product((0, 1, 2, 3, 5, 8), (0, 1000, 5000), (0, 5000)):
        decision = policy.decide(
            msgspec.structs.replace(
                view,
                decode=msgspec.structs.replace(view.decode, batch=batch),
                kv=msgspec.structs.replace(view.kv, pages_free=free),
                queue=msgspec.structs.replace(view.queue, tokens=tokens),
            )
        )
        assert decision.errors == ()
        found += str(decision.split.decode_units)
    assert found == DECIDED_BEFORE[units]


def test_percentages_that_counted_as_fractions_still_do(make_view: Callable[..., View]) -> None:
    """50% as units was 0.5, so one unit; in the current version it is half of the device."""
    old = compile_policy(HEAD + "  split: {decode: 50%, prefill: rest}\n")
    assert old.decide(make_view(16)).split.decode_units == 1
    new = compile_policy(HEAD.replace("v1alpha1", "v1beta1") + "  split: {decode: 50%, prefill: rest}\n")
    assert new.decide(make_view(16)).split.decode_units == 8


@pytest.mark.parametrize(
    ("spec", "line", "column"),
    [
        ("split:\n    - name: a\n"
         "      then: {decode: {fewest: 'units > nothing'}, prefill: rest, otherwise: {decode: all}}", 7, 40),
        ("split: {decode: {fewest: units > 3 and kv.fre > 4KiB}, prefill: rest, otherwise: {decode: all}}",
         5, 42),
        ("slice: {tokens: 4KiB + oops}", 5, 26),
        ("limits: {queue: 2kB, backlog: 9}", 5, 33),
    ],
)  # fmt: skip
def test_a_mistake_in_an_old_policy_is_told_where_it_stands(spec: str, line: int, column: int) -> None:
    with pytest.raises(PolicyError) as raised:
        compile_policy(HEAD + f"  {spec}\n", "old.yaml")
    (problem,) = raised.value.problems
    assert (problem.line, problem.column) == (line, column)
    assert problem.source_line == (HEAD + f"  {spec}\n").split("\n")[line - 1]


@pytest.mark.parametrize(
    "decode",
    [
        "{fewest: # why\n        units > 3}",
        "{fewest: units > 3 # why\n        }",
        "{? fewest : units > 3}",
    ],
)
def test_what_can_not_be_rewritten_in_place_is_refused_with_its_place(decode: str) -> None:
    text = HEAD + f"  split: {{decode: {decode}, prefill: rest, otherwise: {{decode: all}}}}\n"
    report = Report()
    assert migrate_file(text, "old.yaml", report).text == text
    assert [problem.code for problem in report.problems] == ["not-migrated"]
    with pytest.raises(PolicyError, match="can not be rewritten"):
        compile_policy(text)


# --- any policy ---

counts = st.sampled_from(["3", "4kB", "1KiB", "2.5MB", "1TiB", "1.5GiB", "7k", "12Mi"])
conditions = st.builds(
    "{} {} {}".format,
    st.sampled_from(["units", "kv.free", "queue.tokens", "max(units, 2)", "decode.batch * 50%"]),
    st.sampled_from(["<", ">=", "=="]),
    counts,
)
scalars = st.sampled_from(['"{}"', "'{}'", "{}"])


FLOWS = ["{{fewest: {}}}", "{{ fewest:   {} }}", "{{fewest: {},}}", "{{\n      fewest: {}\n      }}"]
BLOCKS = ["fewest: {}", "fewest:   {}  # note", "fewest: >-\n            {}", "fewest:\n            {}"]


@st.composite
def old_policies(draw: st.DrawFn) -> str:
    """A policy of the earlier version, laid out in many ways."""
    condition = draw(conditions)
    quoted = draw(scalars).format(condition)
    if "," in condition and quoted == condition:
        quoted = f'"{condition}"'
    flow = draw(st.sampled_from(FLOWS))
    decode = flow.format(quoted)
    units = draw(st.sampled_from(["most", "50%", "25% + 5%", "2", "params.part", "units.total * 50%"]))
    rule = f"{{name: a, when: {draw(scalars).format('kv.free < ' + draw(counts))}, then: {{decode: {decode},"
    rule += f" prefill: rest, otherwise: {{decode: {units}, prefill: rest}}}}}}"
    block = draw(st.sampled_from(BLOCKS))
    sought = block.format(condition if ">-" in block else quoted)
    later = f"      then:\n        decode:\n          {sought}\n"
    later += "        prefill: rest\n        otherwise: {decode: all, prefill: all}"
    return (
        HEAD
        + "  params:\n    part: {type: percent, default: 30%}\n"
        + f"    room: {{type: size, default: {draw(counts)}}}\n"
        f"  form: {{requests: {draw(counts)}, tokens: params.room}}\n"
        f"  split:\n    - {rule}\n    - name: b\n{later}\n"
    )


@settings(max_examples=60, deadline=None)
@given(old_policies())
def test_any_policy_is_rewritten_once_and_reads_as_before(text: str) -> None:
    found = migrated(text)
    assert "v1beta1" in found.text
    assert migrated(found.text).text == found.text
    assert [line.partition("#")[2] for line in found.text.splitlines() if "#" in line] == [
        line.partition("#")[2] for line in text.splitlines() if "#" in line
    ]
    assert compile_policy(text).sha == compile_policy(found.text).sha


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet=st.sampled_from(list("{}[]:,#\"'-|> \nabfewst%4kB\\x")), max_size=120))
def test_no_text_makes_a_migration_fall_over(noise: str) -> None:
    text = HEAD + f"  split: {{decode: {{fewest: 4kB}}}}\n{noise}"
    found = migrate_file(text, "old.yaml", Report())
    assert found.text == text or "v1beta1" in found.text


# --- the command ---


def muxk(*arguments: str, typed: str | None = None) -> Result:
    return CliRunner().invoke(cli.build_app(), ["migrate", *arguments], input=typed)


def test_the_command_shows_what_would_change_and_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "old.yaml"
    file.write_text(OLD, encoding="utf-8")
    shown = muxk(str(file))
    assert shown.exit_code == 0
    assert "-apiVersion: 'muxk/v1alpha1'   # since spring" in shown.stdout
    assert "+apiVersion: 'muxk/v1beta1'   # since spring" in shown.stdout
    assert file.read_text(encoding="utf-8") == OLD


def test_the_command_rewrites_in_place_once(tmp_path: Path) -> None:
    file = tmp_path / "old.yaml"
    file.write_text(OLD, encoding="utf-8")
    file.chmod(0o640)
    assert muxk(str(file), "--check").exit_code == 1
    assert muxk(str(file), "--write").stdout == f"{file}: rewritten\n"
    assert file.read_text(encoding="utf-8") == NEW
    assert file.stat().st_mode & 0o777 == 0o640
    assert [path.name for path in tmp_path.iterdir()] == ["old.yaml"]
    assert muxk(str(file), "--check").exit_code == 0
    assert muxk(str(file)).stdout == ""


def test_the_command_converts_a_pipe() -> None:
    assert muxk("-", typed=OLD).stdout == NEW


def test_the_command_refuses_what_it_can_not_do(tmp_path: Path) -> None:
    file = tmp_path / "old.yaml"
    text = HEAD + "  split: {decode: {? fewest : units > 3}, prefill: rest, otherwise: {decode: all}}\n"
    file.write_text(text, encoding="utf-8")
    shown = muxk(str(file), "--write")
    assert shown.exit_code == 1
    assert f"{file}:5:19: " in shown.stderr
    assert file.read_text(encoding="utf-8") == text
    assert muxk(str(file), "--write", "--check").exit_code == 2
    assert muxk(str(tmp_path / "none.yaml")).exit_code == 2
    file.write_text("apiVersion: muxk/v9\n", encoding="utf-8")
    shown = muxk(str(file))
    assert (shown.exit_code, "'muxk/v9' is no apiVersion" in shown.stderr) == (1, True)
