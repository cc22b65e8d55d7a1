"""Which family here is nearest to one that is not, for the error that refuses it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

# Families that are not here, by the beginning of their `model_type`, and what is nearest to them.
_NEAREST_FAMILY = {
    "gemma3n": "gemma3_text",
    "gemma": "gemma2",
    "phi": "phi3",
    "olmo": "olmo2",
    "nemotron": "nemotron",
    "gpt": "gpt2",
    "qwen3": "qwen3",
    "qwen": "qwen2",
    "mixtral": "mixtral",
    "ministral": "mistral",
    "deepseek_v2": "deepseek_v3",
    "llama4": "llama4_text",
    "llama": "llama",
    "smollm": "llama",
    "granite": "llama",
    "yi": "llama",
}


def nearest_family(model_type: Any, families: Iterable[str]) -> str:
    """Say which of these families is nearest to a `model_type` that is none of them."""
    names = list(families)
    known = f"known are {', '.join(names)}"
    if not isinstance(model_type, str):
        return known
    begins = [nearest for start, nearest in _NEAREST_FAMILY.items() if model_type.startswith(start)]
    candidates = [*begins, *difflib.get_close_matches(model_type, names, n=1, cutoff=0.5)]
    near = next((name for name in candidates if name in names), None)
    return known if near is None else f"the nearest here is {near}, which computes something else; {known}"
