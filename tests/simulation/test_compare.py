"""`muxk compare` as a person meets it: its tables, the report, what fails and what is refused."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest
from muxk.client.charts import Bar, Curve, Part, Stack, bars, curves, stacks
from muxk.client.cli import build_app
from muxk.client.contenders import Contender, ContenderError, parse_contender
from muxk.client.quantiles import pooled, quantile_ms
from processes import ends
from study_data import short_requests
from typer.testing import CliRunner, Result

MARKUP = "<img src=x onerror=alert(1)> & 'quoted'"
HOSTILE = "<img src=x onerror=alert(1)> & 'quoted' \x1b[31m\x01"
MINE = """apiVersion: muxk/v1beta1
kind: SchedulingPolicy
metadata: {name: mine}
spec: {extends: chunked, slice: {tokens: 256, fuse: decode}}
"""


def compare(*arguments: str, columns: int = 200) -> Result:
    return CliRunner().invoke(build_app(), ["compare", *arguments], env={"COLUMNS": str(columns)})


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += attrs


def test_policies_are_compared_a_failure_stands_in_its_place_and_the_report_is_safe(tmp_path: Path) -> None:
    policy = tmp_path / f"{HOSTILE}.yaml"
    policy.write_text(MINE)
    html, out, again = (tmp_path / name for name in ("report.html", "out.json", "again.json"))
    trace = str(short_requests(tmp_path))
    done = compare(
        *("chunked:budget=512", "chunked:budget=512@sim:a100", str(policy)),
        *("--kv-tokens", "600000", "--workload", trace, "--rate", "8", "--quick"),
        *("--requests", "12", "--seeds", "1", "--tolerance", "0.5", "--goal", "strict", "--tbt", "50ms"),
        *("--jobs", "1", "--html", str(html), "--json", str(out)),
    )
    assert done.exit_code == 0, done.output
    made = json.loads(out.read_bytes())
    assert made["requests"] == 12
    assert [note for note in made["notes"] if note.startswith("COARSE")]
    assert "COARSE" in html.read_text()
    first, failed, mine = made["entries"]
    assert "do not fit on a100" in failed["error"]
    assert "do not fit on a100" in done.output
    for entry in (first, mine):
        assert entry["error"] == ""
        assert entry["goodput"]["strict"]["seeds"][0]["runs"]
        assert entry["rates"][0]["pooled"]["p99_itl_ms"] > 0
    check_page(html.read_text())
    # What the report says to type gives the figures that it shows.
    words = shlex.split(first["rates"][0]["command"])
    assert CliRunner().invoke(build_app(), [*words[1:], "--json", str(again)]).exit_code == 0
    repeated = json.loads(again.read_bytes())
    del repeated["wall"]
    assert repeated == first["rates"][0]["seeds"][0]


def check_page(page: str) -> None:
    tags = Tags()
    tags.feed(page)
    assert "script" not in tags.names
    assert "img" not in tags.names
    assert not [name for name, _ in tags.attributes if name.startswith("on") or name in ("src", "href")]
    assert "http" not in page.replace("http-equiv", "")
    assert "onerror=alert(1)&gt;" in page
    assert not [letter for letter in page if not letter.isprintable() and letter != "\n"]
    charts = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(charts) >= 4
    for chart in charts:
        ET.fromstring(chart)
    assert "do not fit on a100" in page


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("muxwize",), "muxwise"),
        (("muxwise", "muxwise"), "compare it once"),
        (("chunked:budgt=512",), "did you mean 'budget'?"),
        (("chunked:budget",), "chunked:budget"),
        (("chunked@sim:h20",), "did you mean 'sim:h200'?"),
        (("chunked:budget=1,x",), "'x' is no setting"),
        (("muxwise", "--rate", "0"), "--rate: rate is 0.0"),
        (("muxwise", "--workload", "sharegtp"), "did you mean sharegpt?"),
        (("muxwise", "--tbt", "50"), "write 50ms or 50s"),
        (("muxwise", "--ttft", "soon"), "--ttft soon"),
        (("muxwise", "--html", "/nowhere/at/all.html"), "there is no folder"),
        (("muxwise", "--workload", "a\udcff.csv"), "the name is no UTF-8 text"),
        (("muxwise", "--seeds", "0"), "--seeds"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_runs(
    arguments: tuple[str, ...], complaint: str
) -> None:
    done = compare(*arguments)
    assert done.exit_code == 2, done.output
    assert complaint in done.output
    assert "Traceback" not in done.output


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="it looks for children in /proc")
def test_ctrl_c_ends_the_command_and_every_process_that_it_started(tmp_path: Path) -> None:
    trace = str(short_requests(tmp_path))
    command = [sys.executable, "-m", "muxk.client.cli", "compare", "chunked", "--workload", trace]
    process = subprocess.Popen(
        [*command, "--requests", "20", "--seeds", "100", "--jobs", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Whoever runs the tests in the background of a shell has it ignored, and passes that on.
        preexec_fn=_heed_ctrl_c,
    )
    try:
        assert process.stderr is not None
        assert "about" in process.stderr.readline()
        children = children_of(process.pid)
        assert children
        os.kill(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130
    assert said.strip() == "muxk: stopped"
    assert all(ends(child) for child in children)


def _heed_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def children_of(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(after_name[1]) == pid:
            found.append(int(path.parent.name))
    return found


def test_a_narrow_terminal_shows_every_figure_whole(tmp_path: Path) -> None:
    arguments = (
        *("chunked:budget=512", "chunked:budget=256", "--workload", str(short_requests(tmp_path))),
        *("--kv-tokens", "600000", "--rate", "8", "--requests", "6", "--seeds", "1", "--tolerance", "0.5"),
        *("--goal", "strict", "--tbt", "50ms", "--jobs", "1", "--cache", str(tmp_path / "kept")),
    )
    wide, narrow = compare(*arguments), compare(*arguments, columns=80)
    assert wide.exit_code == narrow.exit_code == 0, wide.output + narrow.output
    rows = [line.split("│")[3:-1] for line in wide.output.splitlines() if line.startswith("│ 8 ")]
    figures = [cell.strip() for row in rows for cell in row]
    assert len(figures) == 20
    shown = [cell.strip() for line in narrow.output.splitlines() for cell in line.split("│")]
    assert [figure for figure in figures if figure not in shown] == []
    assert max(map(len, narrow.output.splitlines())) <= 80


def test_a_contender_has_settings_and_a_device_of_its_own(tmp_path: Path) -> None:
    shared = {"budget": "1", "other": "2"}
    assert parse_contender("chunked:budget=512@sim:a100,tp=4,devices=2", "sim:h200", shared) == Contender(
        "chunked:budget=512@sim:a100,tp=4,devices=2",
        "chunked",
        (("budget", "512"), ("other", "2")),
        "sim:a100,tp=4,devices=2",
    )
    odd = tmp_path / "a:b=c@sim:d.yaml"
    odd.write_text(MINE)
    assert parse_contender(str(odd), "sim:h200", {}).policy == str(odd)
    with pytest.raises(ContenderError, match="a policy comes first"):
        parse_contender("@sim:h200", "sim:h200", {})


def test_pooled_quantiles_are_those_of_all_values() -> None:
    both = pooled([((1e6, 90), (4e6, 1)), ((4e6, 9),)])
    assert both == ((1e6, 90), (4e6, 10))
    assert quantile_ms(both, 0.5) == pytest.approx(1, rel=0.01)
    assert quantile_ms(both, 0.95) == pytest.approx(4, rel=0.01)
    assert quantile_ms((), 0.5) == 0


def test_every_mark_and_note_of_a_chart_is_inside_of_its_picture() -> None:
    note = "over 1.23e+04: met at every rate, 0.53 a GPU"
    curve = Curve("a", tuple((share, 1.0 + 4_000 * share) for share in (0.0, 0.5, 0.99, 0.999)))
    for chart in (
        bars("goodput", [Bar("a", 4.0, 3.0, 9.0, note)]),
        stacks("split", [Part("a", "red"), Part("b", "blue")], [Stack("a", [0.25, 0.75])]),
        curves("TBT", [curve], 50.0),
    ):
        picture = ET.fromstring(chart)
        _, _, width, height = map(float, picture.attrib["viewBox"].split())
        for text in picture.iter("text"):
            shown = "".join(part for part in text.itertext() if part)
            half = 0.5 if text.get("text-anchor") == "middle" else 1.0
            room = 6.2 * len(text[-1].tail or "" if len(text) else shown) * half
            assert float(text.attrib["x"]) + room <= width, shown
            assert float(text.attrib["y"]) <= height, shown


def test_times_between_two_and_nine_ms_take_the_whole_height() -> None:
    chart = ET.fromstring(curves("TBT", [Curve("a", ((0.01, 2.1), (0.99, 9.0)))], None))
    assert [text.text for text in chart.iter("text") if (text.text or "").endswith(" ms")] == []
    marks = ["".join(text.itertext()) for text in chart.iter("text")]
    assert {mark[: len(mark) // 2] for mark in marks if mark.endswith("ms")} == {"2 ms", "5 ms", "10 ms"}


def test_charts_are_well_formed_with_nothing_to_show_and_with_hostile_names() -> None:
    made = (
        bars(MARKUP, []),
        bars("goodput", [Bar(MARKUP, 0.0, 0.0, 0.0, "never met"), Bar("b", 2.0, 1.0, 3.0, "2")]),
        stacks("split", [Part(MARKUP, "red"), Part("others", "blue")], [Stack("a", [0.25, 0.75])]),
        curves(MARKUP, [], None),
        curves("TBT", [Curve(MARKUP, ((0.5, 1.0), (0.99, 20.0), (0.999, 0.0)))], 50.0),
    )
    for chart in made:
        root = ET.fromstring(chart)
        assert not [element for element in root.iter() if element.tag == "img"]
    widths = [float(rect.attrib["width"]) for rect in ET.fromstring(made[2]).iter("rect")][-2:]
    assert widths[1] == pytest.approx(3 * widths[0], rel=0.01)
