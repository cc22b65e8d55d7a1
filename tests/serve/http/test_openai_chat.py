"""`/v1/chat/completions` through OpenAI's own client, against the real server."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from support.models.served_letters import Served

HELLO = [{"role": "user", "content": "hello"}]


def chat(served: Served, **keys: Any) -> Any:
    return served.openai.chat.completions.create(**{"model": "letters", "messages": HELLO, **keys})


def prompt_of(served: Served) -> str:
    return served.tokenizer.decode(served.generator.said[-1].prompt)


def test_a_chat_is_answered_by_the_assistant(served: Served) -> None:
    answer = chat(served)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "hello world", "stop")
    assert answer.usage.total_tokens == len("user:hello\nassistant:") + 11


def test_a_conversation_is_written_as_the_model_was_taught(served: Served) -> None:
    answer = chat(served).choices[0].message
    chat(
        served,
        messages=[
            {"role": "developer", "content": "be kind"},
            {"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]},
            answer.model_dump(),
            {"role": "user", "content": "again"},
        ],
    )
    assert prompt_of(served) == "system:be kind\nuser:hello\nassistant:hello world\nuser:again\nassistant:"


def test_an_answer_is_bounded_only_where_it_is_asked(served: Served) -> None:
    chat(served)
    assert served.generator.said[-1].sampling.max_tokens is None
    assert chat(served, max_tokens=3).choices[0].message.content == "hel"
    cut = chat(served, max_completion_tokens=4)
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("hell", "length")
    with pytest.raises(openai.BadRequestError, match="say different things"):
        chat(served, max_tokens=3, max_completion_tokens=4)


def test_logprobs_are_rows_with_the_bytes_of_each_token(served: Served) -> None:
    served.generator.script = "é�"
    answer = chat(served, logprobs=True, top_logprobs=2)
    first, half = answer.choices[0].logprobs.content
    assert (first.token, first.logprob, first.bytes) == ("é", -0.25, [0xC3, 0xA9])
    assert [(each.token, each.logprob) for each in first.top_logprobs] == [("é", -0.25), ("ê", -0.5)]
    assert half.bytes is None


def test_a_streamed_chat_says_who_speaks_then_what_then_why_it_ended(served: Served) -> None:
    chunks = list(chat(served, stream=True, n=2, stream_options={"include_usage": True}))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert [chunk.choices[0].delta.role for chunk in chunks[:2]] == ["assistant", "assistant"]
    said = ["", ""]
    reasons = {}
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        said[choice.index] += choice.delta.content or ""
        if choice.finish_reason:
            reasons[choice.index] = choice.finish_reason
    assert said == ["hello world", "hello world"]
    assert reasons == {0: "stop", 1: "stop"}
    assert chunks[-1].usage.completion_tokens == 22


def test_a_streamed_chat_tells_logprobs_token_by_token(served: Served) -> None:
    chunks = list(chat(served, stream=True, logprobs=True, max_tokens=3))
    rows = [row.token for chunk in chunks if (told := chunk.choices[0].logprobs) for row in told.content]
    assert rows == ["h", "e", "l"]


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "`tools` is not supported"),
        ({"tool_choice": "auto"}, "`tool_choice` is not supported"),
        ({"response_format": {"type": "json_object"}}, "`response_format` is not supported"),
        ({"logit_bias": {"50256": -100}}, "`logit_bias` is not supported"),
        ({"store": True}, "`store` is not supported"),
        ({"reasoning_effort": "low"}, "`reasoning_effort` is not supported"),
        ({"top_logprobs": 2}, "`top_logprobs` needs `logprobs: true`"),
        ({"messages": []}, "at least 1 item"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": "x", "name": "ann"}]}, "unknown parameter `messages.0.name`"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "image_url"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "must begin with the user"),
    ],
)
def test_what_we_do_not_do_is_refused_by_name(served: Served, keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(openai.BadRequestError, match=sentence):
        chat(served, **keys)
    assert served.generator.said == []


def test_what_asks_for_nothing_is_no_reason_to_refuse(served: Served) -> None:
    neutral = {"tools": [], "response_format": {"type": "text"}, "store": False, "logit_bias": {}, "n": 1}
    assert chat(served, **neutral, user="ann", metadata={"team": "a"}, seed=None).choices[0].finish_reason == "stop"


def test_a_model_without_a_chat_template_says_where_to_ask_instead(served: Served) -> None:
    served.tokenizer.can_chat = False
    with pytest.raises(openai.BadRequestError, match=r"no chat template: ask /v1/completions"):
        chat(served)
