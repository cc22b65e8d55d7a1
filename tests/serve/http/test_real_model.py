"""`trainshed serve` as a person runs it, with a tiny real model: OpenAI's client and transformers are the oracles."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import torch

from support.models.served_letters import wait_until
from support.models.tiny_chat_model import save_tiny_chat_model
from support.models.tiny_models import hf_model

HELLO: Any = [{"role": "user", "content": "hello"}]
KEY = "sesame"


@dataclass
class RealServer:
    folder: Path
    http: httpx2.Client
    openai: openai.OpenAI


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """A process of its own on any free port; it must end well when it is asked to."""
    folder = save_tiny_chat_model(tmp_path_factory.mktemp("model") / "tiny")
    command = [sys.executable, "-m", "trainshed", "serve", str(folder), "--port", "0", "--grace", "0.2"]
    environment = os.environ | {"SERVER_KEY": KEY, "OMP_NUM_THREADS": "1"}
    options = ["--name", "tiny/model", "--api-key-env", "SERVER_KEY"]
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True, env=environment)
    lines: list[str] = []
    reader = threading.Thread(target=_gather, args=(process, lines))
    reader.start()
    try:
        wait_until(lambda: any("serving tiny/model" in line for line in lines) or process.poll() is not None)
        (url,) = re.findall(r"serving tiny/model at (http://\S+)", "".join(lines)) or [pytest.fail("".join(lines))]
        with (
            httpx2.Client(base_url=url, timeout=60, headers={"authorization": f"Bearer {KEY}"}) as http,
            openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60) as client,
        ):
            yield RealServer(folder, http, client)
        process.send_signal(signal.SIGTERM)
        assert process.wait(240) == 0, "".join(lines)
    finally:
        process.kill()
        process.wait()
        reader.join()


def _gather(process: subprocess.Popen[str], lines: list[str]) -> None:
    assert process.stderr is not None
    with process.stderr as stream:
        for line in stream:
            lines.append(line)


def test_the_likeliest_tokens_are_those_of_transformers(real: RealServer) -> None:
    body = {"prompts": ["hello", "a longer prompt"], "tokens_to_generate": 12, "top_k": 1, "logprobs": True}
    answer = real.http.put("/api", json=body).json()
    model = hf_model(real.folder)
    for tokens, logprobs in zip(answer["tokens"], answer["logprobs"], strict=True):
        prompt = torch.tensor([tokens[:-12]])
        expected = model.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None)
        assert tokens == expected[0].tolist()
        with torch.no_grad():
            scores = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        wanted = scores[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logprobs), wanted, atol=1e-4, rtol=1e-4)


def test_a_chat_is_the_template_and_what_follows_it(real: RealServer) -> None:
    chat = real.openai.chat.completions.create(model="tiny/model", messages=HELLO, max_tokens=8, temperature=0)
    prompt = "<s><|user|>hello\n<|assistant|>"
    tokens = real.http.put("/api", json={"prompts": [prompt], "tokens_to_generate": 1, "top_k": 1}).json()["tokens"][0]
    assert tokens[:2] == [256, 256]  # the prompt's own <s> and the one that a text gets: a chat has one
    text = real.openai.completions.create(model="tiny/model", prompt=tokens[1:-1], max_tokens=8, temperature=0)
    assert chat.choices[0].message.content == text.choices[0].text
    assert chat.usage is not None
    assert chat.usage.prompt_tokens == len(tokens) - 2


def test_a_stream_adds_up_to_the_same_answer_and_no_character_comes_in_halves(real: RealServer) -> None:
    keys: Any = {"model": "tiny/model", "messages": HELLO, "max_tokens": 30, "seed": 3}
    whole = real.openai.chat.completions.create(**keys)
    chunks = list(real.openai.chat.completions.create(**keys, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_a_seed_gives_the_same_answer_among_many_as_alone(real: RealServer) -> None:
    def ask(seed: int) -> str:
        answer = real.openai.completions.create(model="tiny/model", prompt="hello", seed=seed, max_tokens=20)
        return answer.choices[0].text

    alone = [ask(seed) for seed in range(6)]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(ask, [*range(6), *range(6)]))
    assert together == alone * 2
    assert len(set(alone)) > 1


def test_a_prompt_is_scored_and_a_choice_is_among_the_alternatives(real: RealServer) -> None:
    answer: Any = real.openai.completions.create(
        model="tiny/model", prompt="hello", echo=True, logprobs=3, max_tokens=4, temperature=0
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens[:6] == ["<s>", "h", "e", "l", "l", "o"]
    assert logprobs.text_offset[:7] == [0, 0, 1, 2, 3, 4, 5]
    assert logprobs.token_logprobs[0] is None
    for chosen, top in zip(logprobs.token_logprobs[6:], logprobs.top_logprobs[6:], strict=True):
        assert chosen == max(top.values())


def test_what_does_not_fit_or_is_no_conversation_is_refused(real: RealServer) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        real.openai.completions.create(model="tiny/model", prompt="x" * 60)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="knows 0 to 257"):
        real.openai.completions.create(model="tiny/model", prompt=[1000], max_tokens=1)
    with pytest.raises(openai.BadRequestError, match="the user must begin"):
        real.openai.chat.completions.create(model="tiny/model", messages=[{"role": "assistant", "content": "a"}])


def test_an_answer_left_behind_makes_room(real: RealServer) -> None:
    stream = real.openai.completions.create(
        model="tiny/model", prompt="hello", max_tokens=58, n=8, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()

    def running() -> int:
        return int(re.findall(r"^trainshed_questions_running (\d+)", real.http.get("/metrics").text, re.MULTILINE)[0])

    wait_until(lambda: running() == 0)
