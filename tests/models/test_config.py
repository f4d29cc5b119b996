"""Configurations mean what they mean to transformers, and what cannot run is refused with the reason."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import transformers
from checkpoint_files import config_json
from model_driver import tiny_config
from muxk.models.config import config_from_folder, config_from_json
from muxk.models.errors import ModelError

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SLIDING = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 20}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "'gpt2' is not supported; supported: llama, mistral, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
            "rope scaling 'dynamic' is not supported",
        ),
        (
            {"rope_scaling": {"type": "longrope"}},
            "rope scaling 'longrope'.*supported: default, linear, llama3",
        ),
        ({"rope_scaling": {"type": "linear"}}, "'factor' is None, wanted a positive number"),
        ({"rope_scaling": {"type": "linear", "factor": "4"}}, "'factor' is '4', wanted a positive number"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor 1.0 is not above"),
        ({"rope_scaling": LLAMA3 | {"factor": float("nan")}}, "'factor' is nan"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ between layers"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"model_type": "mistral", "attention_bias": True}, "attention_bias is not supported for mistral"),
        ({"model_type": "qwen3", "mlp_bias": True}, "mlp_bias is not supported for qwen3"),
        ({"model_type": "mistral", "sliding_window": -1}, "'sliding_window' is -1"),
        (SLIDING | {"layer_types": ["full_attention"]}, "'layer_types' is .*wanted a list of 3"),
        (SLIDING | {"layer_types": ["chunked_attention"] * 3}, "layer type 'chunked_attention'"),
        ({"num_key_value_heads": 4}, "6 heads do not divide into 4"),
        ({"hidden_size": None}, "'hidden_size' is None"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' is 0"),
        ({"head_dim": 7}, "head size 7 is odd"),
    ],
)
def test_a_configuration_that_cannot_run_is_refused_with_the_reason(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=f"somewhere: .*{message}"):
        config_from_json(config_json(tiny_config()) | change, "somewhere")


MISSING = "missing"
FAMILIES = {
    "llama": ("llama", {}),
    "llama without KV heads": ("llama", {"num_key_value_heads": None}),
    "llama 3.1": ("llama", {"rope_scaling": LLAMA3, "rope_theta": 5e5}),
    "llama 3.1 in the older spelling": ("llama", {"rope_scaling": LLAMA3 | {"type": "llama3"}}),
    "a linear scaling in the oldest spelling": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": 40}),
    "mistral with the window it has by default": ("mistral", {"max_position_embeddings": 8192}),
    "mistral without a window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2 with a window that is not used": ("qwen2", {"sliding_window": 20, "use_sliding_window": False}),
    "qwen2 with windows": ("qwen2", SLIDING | {"max_window_layers": 1}),
    "qwen3 with windows": ("qwen3", SLIDING | {"layer_types": ["sliding_attention", "full_attention"] * 2}),
    "qwen3 with YaRN": (
        "qwen3",
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
    ),
    "qwen2 with what it has by default": (
        "qwen2",
        {"num_key_value_heads": MISSING, "num_attention_heads": 64, "rms_norm_eps": MISSING},
    ),
    "qwen3 with the head size it has by default": ("qwen3", {"head_dim": MISSING}),
    "mistral with what it has by default": ("mistral", {"num_key_value_heads": MISSING}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_file_and_what_transformers_makes_of_it_mean_the_same(name: str, tmp_path: Path) -> None:
    """transformers reads each spelling and writes its own newest one, with its defaults filled in."""
    family, fields = FAMILIES[name]
    sizes = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "intermediate_size": 96}
    sizes |= {"vocab_size": 101, "max_position_embeddings": 512, "rms_norm_eps": 1e-5}
    sizes |= {"num_key_value_heads": 4, "head_dim": 16, "model_type": family}
    values = {key: value for key, value in (sizes | fields).items() if value != MISSING}
    transformers.AutoConfig.for_model(**deepcopy(values)).save_pretrained(tmp_path)
    assert config_from_json(values, "given") == config_from_folder(tmp_path)


def test_windows_are_those_of_each_layer_and_none_where_no_context_fills_them() -> None:
    values = config_json(tiny_config("qwen2")) | SLIDING
    assert config_from_json(values | {"max_window_layers": 2}, "x").windows == (None, None, 20)
    assert config_from_json(values | {"max_window_layers": 3}, "x").windows == ()
    assert config_from_json(values | {"max_window_layers": 0, "sliding_window": 512}, "x").windows == ()
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = config_from_json(values | {"layer_types": kinds}, "x")
    assert [config.window(index) for index in range(3)] == [20, None, 20]


@pytest.mark.parametrize(
    ("scaling", "stated", "wanted"),
    [
        (None, 512, 512),
        (LLAMA3, 512, 512),
        ({"type": "linear", "factor": 4.0}, 512, 2048),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 512, 1024),
        ({"type": "yarn", "factor": 4.0}, 512, 2048),
    ],
)
def test_a_scaling_that_stretches_the_context_makes_it_longer(
    scaling: dict[str, Any] | None, stated: int, wanted: int
) -> None:
    values = config_json(tiny_config()) | {"rope_scaling": scaling, "max_position_embeddings": stated}
    assert config_from_json(values, "x").max_context_tokens == wanted
