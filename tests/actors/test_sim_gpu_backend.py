"""`--device sim:<card>` opens a modelled card, and says what is wrong with one that it can not open."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from muxk.actors.backends import Backend, StartupError, open_backend
from muxk.kernel.devices.sim import SimDevice


def opened(device: str, model: str = "qwen3-8b", kv_tokens: int | None = None) -> Backend:
    return open_backend(device, model, "auto", kv_tokens, lambda what, share: None)


def test_a_card_opens_with_its_units_and_the_models_layers() -> None:
    backend = opened("sim:h200")
    assert (backend.device.name, backend.device.units, backend.device.layers) == ("sim:h200", 132, 36)
    assert backend.model == "qwen3-8b"
    assert backend.max_context_tokens == 40_960


def test_several_gpus_work_as_one_with_more_room_for_kv() -> None:
    one, four = opened("sim:a100", "llama-3.1-8b"), opened("sim:a100,tp=4", "llama-3.1-8b")
    assert four.device.name == "sim:a100,tp=4"
    assert four.device.pages > 4 * one.device.pages


def test_the_pool_has_the_size_that_is_asked_for() -> None:
    backend = opened("sim:h100", kv_tokens=1600)
    assert backend.device.pages == 101
    assert backend.max_context_tokens == 1600


def test_the_model_that_the_cpu_serves_by_default_is_simulated_as_well() -> None:
    assert opened("sim:h200", "smollm2-135m-instruct").device.layers == 30


def test_the_small_device_of_n_units_is_as_it_was() -> None:
    assert isinstance(opened("sim:4").device, SimDevice)
    assert opened("sim").device.units == 8


def test_a_config_json_is_a_model(tmp_path: Path) -> None:
    config = {
        "num_hidden_layers": 3,
        "hidden_size": 1024,
        "num_attention_heads": 8,
        "intermediate_size": 4096,
        "vocab_size": 32000,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert opened("sim:h200", str(tmp_path)).device.layers == 3


@pytest.mark.parametrize(
    ("device", "model", "kv_tokens", "reason"),
    [
        ("sim:h200", "gpt-9", None, "no model 'gpt-9': use one of codellama-34b"),
        ("sim:h200,tp=3", "qwen3-8b", None, "after the card comes tp=1, 2, 4, 8"),
        ("sim:h200,tp=2,tp=4", "qwen3-8b", None, "after the card comes"),
        ("sim:h200,", "qwen3-8b", None, "after the card comes"),
        ("sim:a100", "llama-3.1-70b", None, "does not fit on a100 with tp=1: of 85,899,345,920 bytes"),
        ("sim:a100", "qwen3-8b", 10**9, "KV pages do not fit"),
        ("sim:a100", "qwen3-8b", 3, "less than one page"),
        ("sim:h200,tp=2", "smollm2-135m-instruct", None, "9 heads and MLP width 1536 do not divide by tp=2"),
        ("sim:b300", "qwen3-8b", None, "'b300' is not a number of units, nor one of a100, h100, h200"),
    ],
)
def test_what_can_not_be_opened_is_refused_with_the_reason(
    device: str, model: str, kv_tokens: int | None, reason: str
) -> None:
    with pytest.raises(StartupError, match=reason):
        opened(device, model, kv_tokens)
