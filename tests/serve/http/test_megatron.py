"""Megatron's two routes as its own clients ask them: bodies, answers and sentences of megatron-core 0.16.1."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from support.models.scripted_model import BEGINNING
from support.models.served_letters import Served


def put(served: Served, **body: Any) -> tuple[int, Any]:
    response = served.http.put("/api", json=body)
    return response.status_code, response.json()


def complete(served: Served, **body: Any) -> tuple[int, Any]:
    response = served.http.post("/completions", json={"prompt": "ab", "max_tokens": 3, **body})
    return response.status_code, response.json()


def test_an_answer_is_the_prompt_and_what_follows_as_text_segments_and_tokens(served: Served) -> None:
    status, answer = put(served, prompts=["ab", "c"], tokens_to_generate=2)
    assert status == 200
    assert answer == {
        "text": ["abhe", "che"],
        "segments": [["a", "b", "h", "e"], ["c", "h", "e"]],
        "tokens": [[97, 98, 104, 101], [99, 104, 101]],
    }


def test_logprobs_begin_with_the_second_token(served: Served) -> None:
    _, answer = put(served, prompts=["abc"], tokens_to_generate=2, logprobs=True)
    assert answer["logprobs"] == [[-0.25] * 4]
    _, scored = put(served, prompts=["abc"], tokens_to_generate=0, logprobs=True)
    assert (scored["text"], scored["logprobs"]) == (["abc"], [[-0.25] * 2])


def test_without_a_bound_sixty_four_tokens_are_generated(served: Served) -> None:
    served.generator.script = "x" * 100
    assert put(served, prompts=["a"])[1]["text"] == ["a" + "x" * 64]


def test_options_that_megatron_takes_reach_the_generator(served: Served) -> None:
    put(served, prompts=["a", "b"], temperature=2, top_k=7, random_seed=3, no_log=True, length_penalty=1.0)
    first, second = (asked.sampling for asked in served.generator.said)
    assert (first.temperature, first.top_k, first.top_p, first.seed) == (2.0, 7, 1.0, 3)
    assert second.seed not in (None, 3)
    put(served, prompts=["a"], top_p=0.5)
    assert (served.generator.said[-1].sampling.top_p, served.generator.said[-1].sampling.seed) == (0.5, None)


def test_options_that_megatron_drops_are_honoured(served: Served) -> None:
    served.generator.script = "one\ntwo\n\nthree"
    assert put(served, prompts=["a"], stop_on_eol=True)[1]["text"] == ["aone\n"]
    assert put(served, prompts=["a"], stop_on_double_eol=True)[1]["text"] == ["aone\ntwo\n\n"]
    assert put(served, prompts=["a"], stop_token=ord("w"))[1]["text"] == ["aone\ntw"]
    assert served.generator.said[-1].cancelled.is_set()
    _, begun = put(served, prompts=["", "a"], tokens_to_generate=1, add_BOS=True)
    assert begun["tokens"] == [[BEGINNING, ord("o")], [BEGINNING, ord("a"), ord("o")]]
    assert begun["text"] == ["o", "ao"]
    served.tokenizer.bos_token = None
    assert put(served, prompts=["a"], add_BOS=True)[0] == 400


MEGATRONS: list[tuple[dict[str, Any], str]] = [
    ({}, "prompts argument required"),
    ({"prompts": ["a"], "max_len": 3}, "max_len is no longer used.  Replace with tokens_to_generate"),
    ({"prompts": ["a"], "sentences": ["b"]}, "sentences is no longer used.  Replace with prompts"),
    ({"prompts": ["a"], "beam_width": 2}, "Beam search is no longer supported."),
    ({"prompts": "a"}, "prompts is not a list of strings"),
    ({"prompts": []}, "prompts is empty"),
    ({"prompts": ["a"] * 129}, "Maximum number of prompts is 128"),
    (
        {"prompts": ["a"], "tokens_to_generate": -1},
        "tokens_to_generate must be an integer greater than or equal to 0",
    ),
    ({"prompts": ["a"], "tokens_to_generate": "9"}, "tokens_to_generate must be an integer greater than 0"),
    ({"prompts": ["a"], "tokens_to_generate": 0}, "tokens_to_generate=0 implies logprobs should be True"),
    ({"prompts": ["a"], "logprobs": 1}, "logprobs must be a boolean value"),
    ({"prompts": ["a"], "temperature": 0}, "temperature must be a positive number less than or equal to 100.0"),
    (
        {"prompts": ["a"], "top_k": 1001},
        "top_k must be equal to or greater than 0 and less than or equal to 1000",
    ),
    ({"prompts": ["a"], "top_p": 1}, "top_p must be a positive float less than or equal to 1.0"),
    ({"prompts": ["a"], "top_p": 1.5}, "top_p must be less than or equal to 1.0"),
    ({"prompts": ["a"], "top_p": 0.5, "top_k": 2}, "cannot set both top-k and top-p samplings."),
    ({"prompts": ["a", ""]}, "Empty prompts require add_BOS=true"),
    ({"prompts": ["a"], "random_seed": -1}, "random_seed must be a positive integer"),
    ({"prompts": ["a"], "stop_token": "x"}, "stop_token must be an integer"),
    ({"prompts": ["a"], "stop_on_eol": 1}, "stop_on_eol must be a boolean value"),
    ({"prompts": ["a"], "random_seed": "x"}, "random_seed must be integer"),
]
"""What both refuse, in the same words."""
OURS: list[tuple[dict[str, Any], str]] = [
    ({"prompts": [1]}, "prompts is not a list of strings"),
    ({"prompts": ["a"], "tokens_to_generate": 256}, "Length of prompt + tokens_to_generate longer than allowed"),
    (
        {"prompts": ["a"], "top_p": 0.5, "top_p_decay": 0.1},
        "top_p_decay is not supported by this server: leave it out",
    ),
    (
        {"prompts": ["a"], "prevent_newline_after_colon": True},
        "prevent_newline_after_colon is not supported by this server: leave it out",
    ),
    ({"prompts": ["a"], "length_penalty": 2.0}, "length_penalty is not supported by this server: leave it out"),
    ({"prompts": ["a"], "token_to_generate": 5}, "unknown argument: token_to_generate"),
]


@pytest.mark.parametrize(("body", "sentence"), MEGATRONS + OURS)
def test_a_wrong_question_gets_megatrons_sentence_and_always_400(served: Served, body: Any, sentence: str) -> None:
    assert put(served, **body) == (400, sentence)
    assert served.generator.said == []


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_the_sentences_are_those_of_megatron_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.inference.text_generation_server import text_generation_server as megatron

    for body, sentence in MEGATRONS:
        # Its handler without Flask around it.
        monkeypatch.setattr(megatron, "request", SimpleNamespace(get_json=lambda body=body: body), raising=False)
        said = megatron.MegatronGenerate(None, None).put()
        assert (said if isinstance(said, str) else said[0]) == sentence


def test_broken_json_and_a_full_queue_are_bare_sentences_too(served: Served) -> None:
    response = served.http.put("/api", content="{", headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json().startswith("the body is not JSON")
    assert put(served, prompts=["a"] * 9) == (400, "this asks for 9 answers at once; this server takes 8")


def test_completions_have_choices_and_nothing_else(served: Served) -> None:
    status, answer = complete(served)
    assert status == 200
    assert answer == {
        "choices": [
            {
                "index": 0,
                "text": "hel",
                "logprobs": {
                    "tokens": ["h", "e", "l"],
                    "token_logprobs": [-0.25] * 3,
                    "text_offset": [2, 3, 4],
                    "top_logprobs": None,
                },
            }
        ]
    }


def test_completions_score_a_prompt_as_lm_eval_asks_it(served: Served) -> None:
    body = {"prompt": [[97, 98], [99]], "max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 0, "seed": 1}
    _, answer = complete(served, **body)
    first, second = answer["choices"]
    assert (first["text"], second["text"]) == ("ab", "c")
    assert first["logprobs"]["token_logprobs"] == [None, -0.25]
    assert first["logprobs"]["top_logprobs"] == [None, {"b": -0.25}]


def test_completions_take_stops_and_seeds(served: Served) -> None:
    assert complete(served, stop="l", max_tokens=9, seed=4)[1]["choices"][0]["text"] == "he"
    assert served.generator.said[-1].sampling.seed == 4
    assert complete(served, stop=None, seed=-1)[1]["choices"][0]["text"] == "hel"
    assert served.generator.said[-1].sampling.seed is None


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        ({"max_tokens": 0}, 400, "echo=False not supported when tokens_to_generate == 0"),
        ({"best_of": 2}, 400, "best_of > 1 not supported"),
        ({"n": 2}, 400, "num_completions > 1 not supported"),
        ({"logprobs": 1}, 400, "cannot return top-k unless tokens_to_generate=0 at this time"),
        ({"logprobs": 11, "max_tokens": 0, "echo": True}, 400, "return_topk_logprobs > 10 not supported"),
        ({"max_tokens": None}, 400, "max_tokens must be an integer greater than or equal to 0"),
        ({"debug_fname": "x"}, 400, "unknown argument: debug_fname"),
        ({"stop": 3}, 400, "stop must be a string or a list of strings"),
        ({"model": "other"}, 404, "there is no model `other`: `letters` is served"),
    ],
)
def test_wrong_completions_get_megatrons_sentences(served: Served, body: Any, status: int, sentence: str) -> None:
    assert complete(served, **body) == (status, sentence)
