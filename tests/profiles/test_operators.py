"""Dimensions of models: public ones as data, any other from its config.json, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from muxk.profiles.operators import (
    Experts,
    ShapeError,
    active_experts,
    attention_flops,
    check_tp,
    known_models,
    layer_gemms,
    load_shape,
    shape_of_config,
)

LLAMA: dict[str, Any] = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
PARAMETERS = {
    "codellama-34b": 33.74e9,
    "llama-3.1-70b": 70.55e9,
    "llama-3.1-8b": 8.03e9,
    "qwen3-235b-a22b": 235.1e9,
    "qwen3-8b": 8.19e9,
    "smollm2-135m-instruct": 0.1345e9,
}


def test_every_model_that_ships_has_the_parameters_that_its_name_says() -> None:
    assert {name: load_shape(name).weight_bytes(1) / 2 for name in known_models()} == pytest.approx(
        PARAMETERS, rel=0.002
    )


def test_a_config_json_gives_the_dimensions_that_ship(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    ours, read = load_shape("llama-3.1-8b"), load_shape(str(tmp_path))
    assert layer_gemms(read, 2) == layer_gemms(ours, 2)
    assert read.kv_bytes_per_token(1) == ours.kv_bytes_per_token(1) == 128 * 1024
    assert load_shape(str(path)) == read
    assert load_shape("Llama-3.1-8B") == ours


def test_a_mixture_of_experts_is_read_from_the_keys_of_qwen_and_of_mixtral() -> None:
    qwen = {**LLAMA, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536}
    mixtral = {**LLAMA, "num_local_experts": 8, "num_experts_per_tok": 2}
    assert shape_of_config(qwen, "q").experts == Experts(128, 8, 1536)
    assert shape_of_config(mixtral, "m").experts == Experts(8, 2, 14336)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_size": None}, "hidden_size is None"),
        ({"hidden_size": "4096"}, "hidden_size is '4096'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"vocab_size": 1 << 40}, "vocab_size is"),
        ({"num_key_value_heads": 5}, "32 heads do not divide by 5 KV heads"),
        ({"kv_lora_rank": 512}, r"MLA\) \(kv_lora_rank\) is not modelled"),
        ({"sliding_window": 4096}, "attention other than over the full context"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "attention other than"),
        ({"n_shared_experts": 1}, "shared experts"),
        ({"num_experts": 4, "num_experts_per_tok": 8}, "8 of 4 experts"),
        ({"num_experts": 4}, "num_experts_per_tok is None"),
        ({"mlp_only_layers": [0]}, "layers of different kinds"),
    ],
)
def test_a_config_that_is_wrong_or_not_modelled_is_refused_with_the_key(
    change: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ShapeError, match=reason):
        shape_of_config({**LLAMA, **change}, "m")


@pytest.mark.parametrize("text", [b"{", b"[1]", b"\xff\xfe", b"[" * 100_000])
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(ShapeError, match=r"config\.json"):
        load_shape(str(tmp_path))


def test_an_unknown_model_is_told_which_ones_there_are() -> None:
    with pytest.raises(ShapeError, match=r"llama-3\.1-70b, llama-3\.1-8b"):
        load_shape("llama-9")


def test_tensor_parallelism_divides_heads_and_columns_and_keeps_the_work() -> None:
    shape = load_shape("llama-3.1-70b")
    for tp in (1, 2, 4, 8):
        check_tp(shape, tp)
        one, all_of = layer_gemms(shape, tp), layer_gemms(shape, 1)
        for gemm, whole in zip(one, all_of, strict=True):
            assert gemm.columns * gemm.inner * tp == whole.columns * whole.inner
        assert attention_flops(shape, tp, 100) * tp == attention_flops(shape, 1, 100)


def test_fewer_kv_heads_than_gpus_are_kept_by_each() -> None:
    shape = load_shape("qwen3-235b-a22b")
    assert shape.kv_bytes_per_token(8) == shape.kv_bytes_per_token(4)


@pytest.mark.parametrize(("tp", "reason"), [(3, "use 1, 2, 4 or 8"), (0, "use 1"), (16, "use 1")])
def test_a_tp_that_is_not_modelled_is_refused(tp: int, reason: str) -> None:
    with pytest.raises(ShapeError, match=reason):
        check_tp(load_shape("qwen3-8b"), tp)


def test_heads_that_do_not_divide_are_refused() -> None:
    shape = shape_of_config(
        {**LLAMA, "num_attention_heads": 36, "num_key_value_heads": 36, "head_dim": 64}, "m"
    )
    with pytest.raises(ShapeError, match="36 heads"):
        check_tp(shape, 8)


def test_the_number_of_active_experts_grows_from_one_tokens_to_all() -> None:
    experts = Experts(128, 8, 1536)
    assert active_experts(experts, 1) == pytest.approx(8)
    assert 100 < active_experts(experts, 32) < 128
    assert active_experts(experts, 10_000) == pytest.approx(128)
