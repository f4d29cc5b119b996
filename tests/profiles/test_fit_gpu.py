"""The fitting command: tables are read and checked, a third is held out, the published page is in step."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from muxk.profiles import fit_gpu, gpu
from muxk.profiles.fit_judge import Judged, Trial, pooled
from muxk.profiles.fit_report import gpu_models_page
from muxk.profiles.fit_tables import Row, TableError, infersim_decode, vidur_all_reduce, vidur_layers
from muxk.profiles.gpu import load_gpu, read_gpu

ROOT = Path(__file__).resolve().parent.parent.parent
LAYER_TIMES = (
    "attn_pre_proj",
    "attn_post_proj",
    "mlp_up_proj",
    "mlp_down_proj",
    "input_layernorm",
    "attn_rope",
)
HEADER = ",".join(
    [f"time_stats.{name}.median" for name in (*LAYER_TIMES, "mlp_act", "add")]
    + ["n_head", "n_kv_head", "n_embd", "n_expanded_embd", "num_tokens", "num_tensor_parallel_workers"]
)
LAYER = "0.03,0.02,0.1,0.05,0.005,0.004,0.007,,32,8,4096,14336,64,2"


def table(folder: Path, *lines: str) -> Path:
    path = folder / "table.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_vidur_row_gives_the_products_and_streams_of_one_gpus_share(tmp_path: Path) -> None:
    gemms, streams = vidur_layers(table(tmp_path, HEADER, LAYER))
    assert [(row.operator, row.arguments, row.ns) for row in gemms] == [
        ("qkv", (64, 3072, 4096), 30_000.0),
        ("o", (64, 4096, 2048), 20_000.0),
        ("gate_up", (64, 14336, 4096), 100_000.0),
        ("down", (64, 4096, 7168), 50_000.0),
    ]
    assert [row.operator for row in streams] == ["norm", "rope", "activation"], (
        "a hole in the table is left out"
    )
    assert streams[0].arguments == ("norm", 64, 2.0 * 2 * 4096 * 64)
    assert not streams[0].judged, "5 us in a table of whole microseconds"


def test_all_reduce_is_the_mean_over_ranks_of_a_size(tmp_path: Path) -> None:
    path = table(
        tmp_path, "time_stats.all_reduce.median,num_workers,size", "0.02,8,2048", "0.04,8,2048", "0.1,2,4096"
    )
    rows = vidur_all_reduce(path)
    assert [row.arguments for row in rows] == [(2, 4096.0), (8, 2048.0)]
    assert [row.ns for row in rows] == pytest.approx([100_000.0, 30_000.0])


def test_decode_attention_rows_carry_the_sum_of_their_contexts(tmp_path: Path) -> None:
    [row] = infersim_decode(table(tmp_path, "batch_size,kv_len,latency_us", "16,4096,99.5"))
    assert row.arguments == (16.0, 65536.0, 32, 8, 128)
    assert row.ns == 99_500.0


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (
            (HEADER, LAYER, LAYER.replace("0.02", "fast")),
            r"table\.csv:3: time_stats\.attn_post_proj\.median is 'fast'",
        ),
        ((HEADER, "0.03,0.02"), r"table\.csv:2: n_embd is None"),
        ((HEADER, LAYER.replace("0.02", "nan")), r"table\.csv:2: .* out of range"),
        (("a,b", "1,2"), r"table\.csv:2: n_embd is None"),
        ((HEADER, LAYER.replace("4096", "0")), r"table\.csv:2: n_embd"),
    ],
)
def test_a_damaged_table_is_refused_with_file_and_line(
    tmp_path: Path, lines: tuple[str, ...], reason: str
) -> None:
    with pytest.raises(TableError, match=reason):
        vidur_layers(table(tmp_path, *lines))


def test_a_missing_folder_is_an_error_for_the_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit_gpu.main(["--data", str(tmp_path), "--gpu", "a100"]) == 1
    assert "error: vidur_a100_llama3-8b_mlp.csv" in capsys.readouterr().err


def test_a_shape_is_held_out_whole_and_about_a_third_of_all_are() -> None:
    rows = [Row("gemm", f"{shape}x4096", (tokens,), 1.0) for shape in range(900) for tokens in (1, 2)]
    held = [row.shape for row in rows if row.held_out]
    assert 0.28 < len(held) / len(rows) < 0.39
    assert all(held.count(shape) == 2 for shape in held[:20])


def test_a_fit_finds_again_the_card_that_made_the_table() -> None:
    """On rows that the fit did not see, with 3 % of noise in all."""
    pytest.importorskip("scipy", reason="needs the fit extra")
    truth = load_gpu("h100")
    fit = fit_gpu._all_reduce_fit(8)
    noise = np.random.default_rng(5)
    rows = []
    for size in np.geomspace(2048, 1 << 27, 200).round():
        row = Row("all_reduce", f"8/{size:.0f}", (8, float(size)), 1.0)
        rows.append(
            Row(row.operator, row.shape, row.arguments, fit.formula(truth, row) * noise.normal(1, 0.03))
        )
    sizes = {**truth.all_reduce.by_tp, 8: gpu.AllReduceSize(5_000.0, 100.0, 4.0)}
    wrong = msgspec.structs.replace(truth, all_reduce=msgspec.structs.replace(truth.all_reduce, by_tp=sizes))
    _, [found] = Trial().fitted_and_judged(wrong, fit, rows, "made up")
    judged = found.held_out
    assert judged.fitted_rows + judged.held_out_rows == 200
    assert judged.median < 0.03
    assert judged.p90 < 0.07


def test_a_profile_that_is_written_reads_back_the_same(tmp_path: Path) -> None:
    for name in gpu.known_gpus():
        profile = load_gpu(name)
        fit_gpu.write_profile(tmp_path / "x.yaml", profile)
        assert read_gpu((tmp_path / "x.yaml").read_text(), "x.yaml") == profile


def test_the_published_page_is_the_one_that_the_profiles_give() -> None:
    """`python -m muxk.profiles.fit_gpu --docs docs/gpu-models.md` writes it."""
    assert (ROOT / "docs" / "gpu-models.md").read_text("utf-8") == gpu_models_page()


def test_constants_that_are_only_judged_stay_as_they_are() -> None:
    truth = load_gpu("h100")
    fit = fit_gpu._all_reduce_fit(8)
    rows = [Row("all_reduce", f"8/{size}", (8, float(size)), 1e5) for size in range(2048, 204_800, 2048)]
    profile, [judged] = Trial(fits=False).fitted_and_judged(truth, fit, rows, "made up")
    assert profile == truth
    assert judged.fitted_rows + judged.held_out.held_out_rows == len(rows)


def test_to_judge_a_card_writes_nothing_but_its_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = load_gpu("h100")
    fit_gpu.write_profile(tmp_path / "h100.yaml", before)
    monkeypatch.setattr(gpu, "GPUS_FOLDER", tmp_path)

    def fitter(profile: gpu.GpuProfile, trial: Trial, data: Path) -> tuple[gpu.GpuProfile, list[Judged]]:
        claimed = msgspec.structs.replace(profile.gemm, source="another", assumed=not profile.gemm.assumed)
        judged = Judged("gemm", "a table", 3, np.full(9, 0.02))
        return msgspec.structs.replace(profile, gemm=claimed), [judged]

    monkeypatch.setattr(fit_gpu, "FITTERS", {"h100": fitter})
    assert fit_gpu.main(["--data", str(tmp_path), "--gpu", "h100", "--judge"]) == 0
    after = read_gpu((tmp_path / "h100.yaml").read_text("utf-8"), "h100.yaml")
    assert [row.median for row in after.held_out] == [0.02]
    assert msgspec.structs.replace(after, held_out=()) == msgspec.structs.replace(before, held_out=())
    with pytest.raises(SystemExit):
        fit_gpu.main(["--docs", str(tmp_path / "x.md"), "--judge"])


def test_a_class_without_a_row_to_judge_is_told() -> None:
    with pytest.raises(TableError, match="gemm, all"):
        pooled("gemm, all", [])


def test_a_class_of_operators_counts_each_row_alike() -> None:
    few = Judged("o", "a table", 3, np.array([0.5]))
    many = Judged("down", "a table", 4, np.full(9, 0.02))
    together = pooled("gemm, all", [few, many]).held_out
    assert (together.operator, together.fitted_rows, together.held_out_rows) == ("gemm, all", 7, 10)
    assert together.median == 0.02
    assert 0.02 < together.p90 < 0.1


def test_every_class_of_operators_that_stands_on_a_table_is_within_the_aim() -> None:
    """Median under 8 %, P90 under 20 %, per class and card."""
    classes = {"gemm", "gemm, all", "elementwise, all", "all_reduce", "decode_attention", "prefill_attention"}
    judged = [(profile.name, row) for profile in map(load_gpu, gpu.known_gpus()) for row in profile.held_out]
    of_classes = [(name, row) for name, row in judged if row.operator in classes and row.fitted_rows]
    assert {name for name, row in of_classes if row.operator.startswith("gemm")} == {"a100", "h100", "h200"}
    assert not [(name, row) for name, row in of_classes if row.median >= 0.08 or row.p90 >= 0.2]


def test_every_gemm_and_attention_that_stands_on_a_table_is_within_the_aim_but_those_named_here() -> None:
    """Median under 8 %, P90 under 20 %. What is over it is marked on the page; nothing else may join."""
    over = {
        (profile.name, row.operator)
        for profile in map(load_gpu, gpu.known_gpus())
        for row in profile.held_out
        if row.fitted_rows and (row.median >= 0.08 or row.p90 >= 0.2)
    }
    assert over <= {("h100", "down")}
