"""Whatever a client sends, it gets an answer or an error of its own making, never a fault of ours."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.models.served_letters import Served
from trainshed.serve.http.openai_requests import ChatRequest, CompletionRequest

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
MESSAGES = st.lists(
    st.dictionaries(st.sampled_from(["role", "content", "name"]), JSON | st.sampled_from(["user", "system"])),
    max_size=3,
)
RIGHT: dict[str, dict[str, Any]] = {
    "POST /v1/completions": {"model": "letters", "prompt": "say", "max_tokens": 2},
    "POST /v1/chat/completions": {"model": "letters", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "PUT /api": {"prompts": ["a"], "tokens_to_generate": 2},
    "POST /completions": {"prompt": "a", "max_tokens": 2},
}
MEGATRON = (
    *("prompts", "tokens_to_generate", "logprobs", "temperature", "top_k", "top_p", "top_p_decay", "top_p_bound"),
    *("add_BOS", "stop_on_double_eol", "stop_on_eol", "prevent_newline_after_colon", "random_seed", "stop_token"),
    *("length_penalty", "no_log", "prompt", "max_tokens", "echo", "seed", "n", "best_of", "stop", "model"),
)
KEYS = {
    "POST /v1/completions": [*CompletionRequest.model_fields, *CompletionRequest.UNSUPPORTED],
    "POST /v1/chat/completions": [*ChatRequest.model_fields, *ChatRequest.UNSUPPORTED],
    "PUT /api": MEGATRON,
    "POST /completions": MEGATRON,
}


@pytest.mark.parametrize("route", RIGHT)
def test_no_body_is_a_fault_of_ours(served: Served, route: str) -> None:
    method, path = route.split()

    @settings(max_examples=60, suppress_health_check=list(HealthCheck))
    @given(st.dictionaries(st.sampled_from(KEYS[route]), JSON | MESSAGES, min_size=1, max_size=2))
    def ask(changes: dict[str, Any]) -> None:
        # As Python writes JSON: with NaN, huge numbers and half characters.
        data, headers = json.dumps(RIGHT[route] | changes), {"content-type": "application/json"}
        response = served.http.request(method, path, content=data, headers=headers)
        assert response.status_code in (200, 400, 404), (changes, response.text)

    ask()
    assert served.http.request(method, path, json=RIGHT[route]).status_code == 200
