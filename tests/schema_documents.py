"""A policy and a test of one that say everything that may be said."""

from __future__ import annotations

from typing import Any

from muxk.policies import policy_test, schema

VALID: dict[str, Any] = {
    "apiVersion": schema.API_VERSION,
    "kind": "SchedulingPolicy",
    "metadata": {"name": "all-of-it", "version": 1.2, "description": "says everything"},
    "spec": {
        "extends": "muxwise",
        "slo": {"tbt": "50ms", "ttft": "500ms + 10ms/token"},
        "params": {
            "burst": {"type": "number", "default": 1.5, "min": 1, "max": "4k", "description": "so much"},
            "floor": {"type": "duration", "default": "1s"},
            "room": {"type": "size", "default": "4GiB"},
            "part": {"type": "percent", "default": "50%"},
            "on": {"type": "bool", "default": True},
        },
        "variables": {"pressure": "1 - kv.free / kv.total"},
        "classes": [
            {"name": "chat", "when": "request.class == 'chat'", "slo": {"tbt": "30ms"}, "share": 3},
            {"name": "batch", "share": "1", "max_wait": "60s"},
        ],
        "limits": {
            "backlog": 2,
            "decode_ahead": 1,
            "decode_floor": "params.floor",
            "queue": "1k",
            "preemptions": 16,
            "parked": "1GiB",
        },
        "on_error": "base",
        "admit": [
            {"name": "large", "when": "request.pages > kv.total", "then": {"refuse": "too large"}},
            {"name": "rest", "then": "accept"},
        ],
        "order": {"by": ["class.rank", "-request.arrival"]},
        "form": {"requests": 8, "tokens": "max(512, head.prompt_tokens)"},
        "split": [
            {"name": "idle", "when": "decode.batch == 0 and params.on", "then": {"prefill": "all"}},
            {
                "name": "fit",
                "then": {
                    "decode": "fewest where estimate.decode(units) <= 0.9 * slo.tbt",
                    "prefill": "rest",
                    "otherwise": {"decode": "50%", "prefill": "rest"},
                },
            },
        ],
        "slice": {"tokens": "params.burst", "fuse": "decode"},
        "preempt": [{"name": "never", "then": "continue"}],
        "victim": {"by": "request.priority"},
        "retain": "keep",
    },
}
VALID_TEST: dict[str, Any] = {
    "apiVersion": policy_test.API_VERSION,
    "kind": "PolicyTest",
    "metadata": {"name": "keeps-its-slo", "description": "shows it"},
    "spec": {
        "policy": "muxwise",
        "set": {},
        "seed": 3,
        "device": {
            "units": 16,
            "layers": 32,
            "granularity": 1,
            "kv_tokens": "64k",
            "calibrate": True,
            "costs": {"decode_base": "60ms", "decode_saturation": "25%"},
        },
        "timeout": "60s",
        "arrivals": [
            {
                "name": "chat",
                "at": "1s",
                "count": 3,
                "every": "50ms to 150ms",
                "prompt": "100 to 4k",
                "output": 20,
                "class": "chat",
                "priority": -1,
                "deadline": "3s",
                "prefix": "1k of system",
                "abort_after": "9s",
            }
        ],
        "actions": [{"at": "2s", "swap": "chunked", "set": {"budget": 64}}],
        "expect": ["finished == 3", {"for": ["chat"], "that": "tbt.max <= 50ms", "because": "of this"}],
    },
}
