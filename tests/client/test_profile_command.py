"""`muxk profile`, and who uses what it writes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from muxk.actors.backends import Backend, open_backend
from muxk.actors.gpu_backend import open_gpu_backend
from muxk.actors.profiling import key_of, measure, plan_profile, profiled, run_profile
from muxk.client.cli import build_app
from muxk.kernel.work import PrefillShape
from muxk.profiles.gpu import load_gpu
from muxk.profiles.grid import QUICK
from muxk.profiles.profile_file import (
    Partial,
    PartialHeader,
    PartialLine,
    ProfileError,
    ProfileKey,
    check_key,
    default_path,
    make_key,
    read_profile,
    write_profile,
)
from typer.testing import CliRunner

TINY = replace(
    QUICK,
    repeats=1,
    solo_rows=(1, 64, 65),
    solo_context=(512, 32768),
    solo_new=(64, 512, 2048, 8192),
    new=(512, 8192),
    reused=(0,),
    rows=(1, 64),
    context=(2048,),
)


def backend_of(device: str = "sim:a100", model: str = "llama-3.1-8b") -> Backend:
    return open_gpu_backend(device, model).backend


@pytest.fixture(scope="module")
def profile_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    backend = backend_of()
    path: Path = tmp_path_factory.mktemp("profiles") / default_path(key_of(backend)).name
    write_profile(path, measure(backend, TINY))
    return path


def test_the_command_writes_a_profile_that_a_simulation_uses(tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    command = ["profile", "--device", "sim:a100", "--model", "llama-3.1-8b", "--quick", "--out", str(out)]
    result = CliRunner().invoke(build_app(), command)
    assert result.exit_code == 0, result.output
    assert "co-runs; the largest slowdown is 1." in result.output
    assert not list(tmp_path.glob("*.partial")), "nothing is left of what was unfinished"
    found = read_profile(out)
    assert found.estimates.contention is not None
    assert found.co_runs > 100
    assert found.cut_short == 0
    command = ["sim", "muxwise", "--device", "sim:a100", "--model", "llama-3.1-8b", "--requests", "3"]
    result = CliRunner().invoke(build_app(), [*command, "--workload", "sharegpt", "--profile", str(out)])
    assert result.exit_code == 0, result.output


def test_a_co_run_is_slower_than_a_step_alone_where_both_draw_bandwidth(profile_file: Path) -> None:
    estimates = profiled(backend_of(), profile_file)
    alone_ns = estimates.decode_ns(60, 64, 2048)
    assert estimates.decode_ns(60, 64, 2048, PrefillShape(512, 0)) > 1.02 * alone_ns
    assert estimates.decode_ns(60, 64, 2048, PrefillShape(512, 0)) < 2.0 * alone_ns


@pytest.mark.parametrize(
    ("device", "model", "field"),
    [
        ("sim:h100", "llama-3.1-8b", "its device is 'sim:a100', here it is 'sim:h100'"),
        ("sim:a100", "qwen3-8b", "its model is 'llama-3.1-8b', here it is 'qwen3-8b'"),
        ("sim:a100,off=15%:1", "llama-3.1-8b", "its fingerprint is"),
    ],
)
def test_a_profile_of_something_else_is_refused_with_the_field_that_differs(
    profile_file: Path, device: str, model: str, field: str
) -> None:
    with pytest.raises(ProfileError, match="is no profile of this device and model") as caught:
        profiled(backend_of(device, model), profile_file)
    assert field in str(caught.value)
    assert "muxk profile --device" in str(caught.value), "what would be right"


def test_the_command_line_tells_a_refused_profile(profile_file: Path) -> None:
    command = ["sim", "muxwise", "--device", "sim:h200", "--profile", str(profile_file)]
    result = CliRunner().invoke(build_app(), command)
    assert result.exit_code == 2
    assert "--profile:" in result.output
    assert "its device is 'sim:a100'" in result.output


def change(text: bytes, what: str) -> bytes:
    data = msgspec.json.decode(text)
    tables = data["estimates"]
    match what:
        case "format":
            data["key"]["format"] = 99
        case "factors":
            tables["contention"]["factors"] = tables["contention"]["factors"][:-8]
        case "knots":
            tables["decode"][0]["rows"]["knots"].pop()
        case "nothing":
            tables["decode"] = []
        case "unknown":
            data["surprise"] = 1
        case "huge":
            tables["decode"][0]["rows"]["values"][0] = 1e300
        case "negative":
            tables["prefill"][0]["per_pair_ns"] = -1.5
    return msgspec.json.encode(data)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("format", "format 99, this muxk reads 1"),
        ("factors", "tables do not fit together"),
        ("knots", "tables do not fit together"),
        ("nothing", "tables do not fit together"),
        ("unknown", "damaged profile"),
        ("huge", r"estimates.decode\[0\].rows.values\[0\] is 1e\+300; it must lie between 0 and 1e\+15"),
        ("negative", r"estimates.prefill\[0\].per_pair_ns is -1.5"),
    ],
)
def test_a_damaged_or_stale_profile_is_refused(
    profile_file: Path, tmp_path: Path, what: str, message: str
) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(change(profile_file.read_bytes(), what))
    with pytest.raises(ProfileError, match=message):
        profiled(backend_of(), path)


@pytest.mark.parametrize("text", [b"", b"{}", b"[1, 2]", b"\xff\xfe", b'{"key": {"format": 1}}'])
def test_what_is_no_profile_is_refused(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(text)
    with pytest.raises(ProfileError, match=r"p\.json is"):
        read_profile(path)
    with pytest.raises(ProfileError, match="can not be read"):
        read_profile(tmp_path / "missing.json")


class Killed(Exception):
    """The process ends here."""


def test_a_run_that_was_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "p.json.partial"
    header = PartialHeader(key_of(backend_of()), TINY.name)
    first = Partial(path, header)

    def dies(line: PartialLine) -> None:
        if sum(len(lines) for lines in first.found.values()) == 100:
            raise Killed
        first.add(line)

    with pytest.raises(Exception, match=r"Killed|failed"):
        run_profile(plan_profile(backend_of(), TINY, 512, first.found, dies), quiet, first.flush)
    first.close()
    with path.open("ab") as file:
        file.write(b'["decode 12 1 1')  # the line that was being written
    second = Partial(path, header)
    taken = []

    def keep(line: PartialLine) -> None:
        taken.append(line)
        second.add(line)

    profiling = plan_profile(backend_of(), TINY, 512, second.found, keep)
    profile = run_profile(profiling, quiet, second.flush)
    second.close()
    assert len(taken) == profiling.measurements - 100, "nothing is measured twice"
    assert profile.decode.samples + profile.prefill.samples + profile.co_runs == profiling.measurements


def quiet(what: str, share: float) -> None:
    """A test has no bar."""


def test_an_unfinished_profile_of_something_else_is_refused_unless_it_is_to_begin_anew(
    tmp_path: Path,
) -> None:
    path = tmp_path / "p.json.partial"
    Partial(path, PartialHeader(key_of(backend_of()), "quick")).close()
    other = PartialHeader(key_of(backend_of("sim:h100")), "quick")
    with pytest.raises(ProfileError, match="its device is 'sim:a100'"):
        Partial(path, other)
    with pytest.raises(ProfileError, match="of a quick profile, not of a full one"):
        Partial(path, PartialHeader(key_of(backend_of()), "full"))
    Partial(path, other, fresh=True).close()
    Partial(path, other).close()


def test_a_device_in_real_time_is_measured_as_well() -> None:
    """The fixed-cost device, whose items last as long as they say."""
    backend = open_backend("sim:4", "sim", "auto", 2048, quiet)
    small = replace(
        TINY, solo_rows=(1, 4), solo_context=(64,), solo_new=(32,), new=(32,), rows=(2,), context=(64,)
    )
    profile = measure(backend, small, 8)
    assert profile.estimates.known
    assert [model.units for model in profile.estimates.decode] == [1, 2, 3, 4]
    assert profile.co_runs == 3


def test_a_profile_of_a_model_whose_sizes_have_lists_is_of_the_same_model_when_it_is_read_again(
    tmp_path: Path, profile_file: Path
) -> None:
    # As on the CPU device, where a model's windows by layer are a tuple.
    wanted = made_key({"hidden": 576, "windows": ()})
    path = tmp_path / "p.json"
    write_profile(path, msgspec.structs.replace(read_profile(profile_file), key=wanted))
    check_key(read_profile(path).key, made_key({"hidden": 576, "windows": ()}), path)
    with pytest.raises(ProfileError) as refused:
        check_key(read_profile(path).key, made_key({"hidden": 576, "windows": (8,)}), path)
    assert """its model dims is '{"windows":[]}', here it is '{"windows":[8]}'""" in str(refused.value)
    other = msgspec.structs.replace(wanted, fingerprint="other")
    with pytest.raises(ProfileError, match="another processor, or native operators"):
        check_key(wanted, other, path)


def made_key(dims: dict[str, Any]) -> ProfileKey:
    return make_key("cpu:2", 2, (), "m", 30, dims, "auto", "processor")


def test_errors_that_are_published_of_a_card_make_no_profile_of_it_stale(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = key_of(backend_of("sim:h100", "qwen3-8b"))
    card = load_gpu("h100")
    worse = msgspec.structs.replace(card.held_out[0], median=0.5)
    monkeypatch.setattr(
        "muxk.actors.gpu_backend.load_gpu", lambda name: msgspec.structs.replace(card, held_out=(worse,))
    )
    assert key_of(backend_of("sim:h100", "qwen3-8b")) == before
    assert key_of(backend_of("sim:h100,all_reduce.floor_ns*1.1", "qwen3-8b")) != before
