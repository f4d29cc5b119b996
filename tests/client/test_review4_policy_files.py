"""Files that are no policies, given to a command that would send them to a server."""

from __future__ import annotations

from pathlib import Path

import pytest
from muxk.client import PolicyNotFound
from muxk.client.policy_files import swap_command
from muxk.policies.loader import MAX_CHARACTERS


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"# " + 18_000_000 * b"x", "is larger than 250,000 characters"),
        (MAX_CHARACTERS * b"\xc3\xa9" + b"x", "is larger than 250,000 characters"),
        (b"a\x90", "is not UTF-8 text: byte 1$"),
    ],
)
def test_a_file_that_no_server_takes_is_refused_before_it_is_sent(
    tmp_path: Path, content: bytes, message: str
) -> None:
    file = tmp_path / "policy.yaml"
    file.write_bytes(content)
    with pytest.raises(PolicyNotFound, match=message):
        swap_command(file, None)


def test_a_device_that_never_ends_is_not_read_to_its_end() -> None:
    with pytest.raises(PolicyNotFound, match="larger than"):
        swap_command(Path("/dev/zero"), None)


def test_a_folder_is_told_in_words(tmp_path: Path) -> None:
    with pytest.raises(PolicyNotFound, match=r"can not be read: Is a directory$"):
        swap_command(tmp_path, None)
    with pytest.raises(PolicyNotFound, match="is no path: embedded null byte"):
        swap_command("a\0b/c", None)
