"""The tutorial: its files are those that it shows, and its commands print what it says."""

from __future__ import annotations

import re
import textwrap

import pytest
from tutorial_blocks import FILES, PAGE, Part, comparable, parts, terminal

YAML = re.compile(r"^```yaml\n(.*?)^```$", re.DOTALL | re.MULTILINE)
TEXT = PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "block", YAML.findall(TEXT), ids=lambda block: block.strip().split("\n")[-1].strip()[:40]
)
def test_a_shown_policy_stands_in_a_file(block: str) -> None:
    wanted = textwrap.dedent(block)
    for path in sorted(FILES.glob("*.yaml")):
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        count = len(wanted.splitlines())
        shown = (textwrap.dedent("".join(lines[at : at + count])) for at in range(len(lines)))
        if wanted in shown:
            return
    pytest.fail(f"in no file of examples/tutorial:\n{block}")


def test_every_file_is_in_the_tutorial() -> None:
    for path in FILES.iterdir():
        assert path.name in TEXT, path.name


def differences(part: Part, output: str) -> str:
    return f"$ {part.command}\n--- the tutorial says\n{part.output}--- it prints\n{output}"


@pytest.mark.slow
def test_commands_print_what_the_tutorial_says() -> None:
    found = parts(TEXT)
    assert len(found) > 10
    with terminal() as shell:
        outputs = [(part, shell.output(part)) for part in found]
    wrong = [differences(part, got) for part, got in outputs if comparable(got) != comparable(part.output)]
    assert not wrong, "\n".join([*wrong, "run `make tutorial` and read what changed"])
