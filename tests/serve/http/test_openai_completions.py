"""`/v1/completions` through OpenAI's own client, against the real server."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from support.models.served_letters import Served


def complete(served: Served, **keys: Any) -> Any:
    return served.openai.completions.create(**{"model": "letters", "prompt": "say", **keys})


def asked_of(served: Served) -> Any:
    return served.generator.said[-1].sampling


def test_a_completion_says_what_the_model_said_and_what_it_took(served: Served) -> None:
    answer = complete(served, max_tokens=64)
    assert answer.object == "text_completion"
    assert answer.model == "letters"
    assert answer.id.startswith("cmpl-")
    assert answer.created > 1_700_000_000
    (choice,) = answer.choices
    assert (choice.index, choice.text, choice.finish_reason, choice.logprobs) == (0, "hello world", "stop", None)
    assert answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 3,
        "completion_tokens": 11,
        "total_tokens": 14,
    }


def test_without_a_bound_an_answer_has_sixteen_tokens(served: Served) -> None:
    served.generator.script = "x" * 100
    answer = complete(served)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("x" * 16, "length")


def test_every_option_reaches_the_generator(served: Served) -> None:
    complete(
        served,
        temperature=0.5,
        top_p=0.9,
        max_tokens=7,
        stop=["z", "y"],
        seed=11,
        frequency_penalty=0.25,
        presence_penalty=-0.5,
        logprobs=2,
        echo=True,
        user="somebody",
        extra_body={"top_k": 40, "ignore_eos": True},
    )
    sampling = asked_of(served)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.5, 0.9, 40, 7)
    assert (sampling.stop, sampling.seed, sampling.ignore_eos) == (("z", "y"), 11, True)
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.25, -0.5)
    assert (sampling.logprobs, sampling.prompt_logprobs) == (2, True)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [[97, 98]]),
        (["ab", "c"], [[97, 98], [99]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ],
)
def test_a_prompt_is_text_or_tokens_one_or_many(served: Served, prompt: Any, expected: list[list[int]]) -> None:
    answer = complete(served, prompt=prompt, echo=True, max_tokens=1)
    assert [asked.prompt for asked in served.generator.said] == expected
    texts = ["".join(map(chr, tokens)) + "h" for tokens in expected]
    assert [choice.text for choice in answer.choices] == texts
    assert answer.usage.prompt_tokens == sum(map(len, expected))


def test_n_answers_to_each_prompt_stand_in_order_and_have_seeds_of_their_own(served: Served) -> None:
    answer = complete(served, prompt=["a", "b"], n=3, seed=5, max_tokens=2, echo=True)
    assert [(choice.index, choice.text) for choice in answer.choices] == [
        *((number, "ahe") for number in range(3)),
        *((number, "bhe") for number in range(3, 6)),
    ]
    assert answer.usage.prompt_tokens == 2
    seeds = [asked.sampling.seed for asked in served.generator.said]
    assert seeds[0] == 5
    assert len(set(seeds)) == 3
    assert seeds[:3] == seeds[3:]


def test_a_stop_text_ends_the_answer_and_is_not_part_of_it(served: Served) -> None:
    answer = complete(served, stop="o", max_tokens=64)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("hell", "stop")
    assert answer.usage.completion_tokens == 5


def test_logprobs_are_columns_whose_offsets_are_into_the_text(served: Served) -> None:
    answer = complete(served, prompt="ab", echo=True, logprobs=2, max_tokens=2)
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text == "abhe"
    assert logprobs.tokens == ["a", "b", "h", "e"]
    assert logprobs.token_logprobs == [None, -0.25, -0.25, -0.25]
    assert logprobs.text_offset == [0, 1, 2, 3]
    assert logprobs.top_logprobs == [
        None,
        {"b": -0.25, "c": -0.5},
        {"h": -0.25, "i": -0.5},
        {"e": -0.25, "f": -0.5},
    ]


def test_no_tokens_and_echo_scores_a_prompt(served: Served) -> None:
    answer = complete(served, prompt="abc", echo=True, logprobs=0, max_tokens=0)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("abc", "length")
    assert answer.choices[0].logprobs.token_logprobs == [None, -0.25, -0.25]


def test_a_stream_says_the_same_in_pieces_and_ends_with_what_it_took(served: Served) -> None:
    chunks = list(complete(served, stream=True, max_tokens=64, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "hello world"
    assert len({chunk.id for chunk in chunks}) == 1
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 11


def test_a_stream_with_echo_and_logprobs_adds_up_to_the_whole_answer(served: Served) -> None:
    keys = {"prompt": ["ab", "c"], "n": 2, "echo": True, "logprobs": 1, "max_tokens": 3}
    whole = complete(served, **keys)
    texts, tokens, offsets = [[""] * 4, [[], [], [], []], [[], [], [], []]]
    for chunk in complete(served, stream=True, **keys):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        if choice.logprobs:
            tokens[choice.index] += choice.logprobs.tokens
            offsets[choice.index] += choice.logprobs.text_offset
    assert texts == [choice.text for choice in whole.choices]
    assert tokens == [choice.logprobs.tokens for choice in whole.choices]
    assert offsets == [choice.logprobs.text_offset for choice in whole.choices]


def test_a_stream_is_server_sent_events_that_end_with_done(served: Served) -> None:
    body = {"model": "letters", "prompt": "say", "stream": True, "max_tokens": 2}
    response = served.http.post("/v1/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-accel-buffering"] == "no"
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: {") for event in events[:-2])


def test_the_model_is_listed_with_its_length(served: Served) -> None:
    (model,) = served.openai.models.list()
    assert (model.id, model.object, model.owned_by) == ("letters", "model", "trainshed")
    assert served.http.get("/v1/models").json()["data"][0]["max_model_len"] == 256
    assert served.openai.models.retrieve("letters").id == "letters"
    with pytest.raises(openai.NotFoundError, match="`letters` is served"):
        served.openai.models.retrieve("other")
