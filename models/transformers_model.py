"""The peer that tests and benchmarks compare with: transformers' model, with the weights our loader gives."""

from __future__ import annotations

from typing import Any

import torch
from muxk.models.config import ModelConfig
from muxk.models.llama import tensor_names
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
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "attn_implementation": "sdpa",
        "dtype": torch.float32,
        **({"sliding_window": None} if config.architecture == "mistral" else {}),
        "bos_token_id": None,
        "eos_token_id": None,
    }


def greedy_output(model: Any, prompt: list[int], steps: int) -> list[int]:
    """What transformers' `generate` says to a prompt, greedily, without the prompt."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=steps, do_sample=False, pad_token_id=0
        )
    return list(found[0, len(prompt) :].tolist())
