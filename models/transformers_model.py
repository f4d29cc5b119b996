"""The peer that tests and benchmarks compare with: transformers' model, with the weights our loader gives."""

from __future__ import annotations

from typing import Any

import torch
from muxk.models.config import ModelConfig
from muxk.models.llama import tensor_names
from muxk.models.rope_scaling import FrequencyFactors, LinearScaling, Llama3Scaling, YarnScaling
from muxk.models.weights import Weights


def as_transformers_model(weights: Weights) -> Any:
    """transformers' float32 model of the same architecture, with our loader's (dequantised) tensors."""
    import transformers

    config = weights.config
    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    name = names[config.architecture]
    state = {tensor: weights.tensor(tensor) for tensor in tensor_names(config)}
    settings = getattr(transformers, f"{name}Config")(**_settings(config))
    model = getattr(transformers, f"{name}ForCausalLM")(settings).eval()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    if isinstance(config.rope_scaling, FrequencyFactors):  # A form that no `config.json` has.
        rotary = model.model.rotary_emb
        rotary.inv_freq = rotary.inv_freq / torch.tensor(config.rope_scaling.divisors)
    return model


def _settings(config: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocabulary,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_context_tokens,
        "rms_norm_eps": config.rms_epsilon,
        "tie_word_embeddings": config.tied_embeddings,
        "rope_parameters": {"rope_theta": config.rope_theta, **_rope_settings(config)},
        "attention_bias": config.output_bias,
        "mlp_bias": config.mlp_bias,
        "attn_implementation": "sdpa",
        "dtype": torch.float32,
        **_window_settings(config),
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _rope_settings(config: ModelConfig) -> dict[str, Any]:
    match config.rope_scaling:
        case LinearScaling(factor):
            return {"rope_type": "linear", "factor": factor}
        case Llama3Scaling(factor, low, high, original):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
        case YarnScaling(factor, original, attention_factor, fast, slow, truncate):
            return {
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": original,
                "attention_factor": attention_factor,
                "beta_fast": fast,
                "beta_slow": slow,
                "truncate": truncate,
            }
        case _:
            return {"rope_type": "default"}


def _window_settings(config: ModelConfig) -> dict[str, Any]:
    """Only mistral and qwen have windows; mistral the same one in every layer."""
    sizes = [config.window(index) for index in range(config.layers)]
    size = next((size for size in sizes if size is not None), None)
    if config.architecture == "mistral":
        return {"sliding_window": size}
    if size is None:
        return {}
    kinds = ["full_attention" if size is None else "sliding_attention" for size in sizes]
    return {"use_sliding_window": True, "sliding_window": size, "layer_types": kinds}


def greedy_output(model: Any, prompt: list[int], steps: int) -> list[int]:
    """What transformers' `generate` says to a prompt, greedily, without the prompt."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=steps, do_sample=False, pad_token_id=0
        )
    return list(found[0, len(prompt) :].tolist())
