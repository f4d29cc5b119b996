"""transformers' models with our loader's weights, and what they say."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from model_driver import reference_state
from muxk.models.config import ModelConfig
from muxk.models.weights import Weights


def reference_model(weights: Weights) -> Any:
    """transformers' model of the same architecture, with our loader's tensors."""
    config = weights.config
    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    name = names[config.architecture]
    settings = getattr(transformers, f"{name}Config")(**_settings(config))
    model = getattr(transformers, f"{name}ForCausalLM")(settings).eval()
    missing, unexpected = model.load_state_dict(reference_state(weights), strict=False)
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


def reference_output(model: Any, prompt: list[int], steps: int) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=steps, do_sample=False, pad_token_id=0
        )
    return list(found[0, len(prompt) :].tolist())
