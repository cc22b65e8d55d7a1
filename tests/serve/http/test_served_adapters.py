"""`trainshed serve BASE --adapter NAME=ADDRESS …` as a person runs it: OpenAI's client chooses, PEFT is the oracle."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import torch

from support.models.lora_checkpoints import save_lora_checkpoint
from support.models.served_letters import Served, wait_until
from support.models.tiny_chat_model import TEMPLATE, save_tiny_chat_model
from support.models.tiny_models import hf_model
from trainshed.checkpoints.hf.weights import HfWeights
from trainshed.checkpoints.lora.export import export_adapter
from trainshed.recipe import Lora
from trainshed.serve.http.server_state import ServedModel

NAMES = ("tiny", "terse", "run/two")


@dataclass
class AdapterServer:
    base: Path
    adapters: dict[str, Path]
    """PEFT's folders."""
    http: httpx2.Client
    openai: openai.OpenAI


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdapterServer]:
    """The base with a PEFT folder that has a chat template of its own, and with a LoRA run."""
    folder = tmp_path_factory.mktemp("served")
    base = save_tiny_chat_model(folder / "tiny")
    with HfWeights(base) as weights:
        config = weights.config
    adapters = {}
    for seed, name in enumerate(("terse", "run")):
        lora = Lora(rank=4 + seed, alpha=16.0, targets=("attn", "mlp"), dora=bool(seed))
        run = save_lora_checkpoint(folder / f"{name}-run", config, lora, base, seed=seed)
        export_adapter(str(run), str(folder / name), dtype="fp32")
        adapters[name] = folder / name
    words = json.loads((base / "tokenizer_config.json").read_text())
    own = words | {"chat_template": TEMPLATE.replace("<|assistant|>", "=> ")}
    (folder / "terse" / "tokenizer_config.json").write_text(json.dumps(own))
    (folder / "terse" / "tokenizer.json").write_bytes((base / "tokenizer.json").read_bytes())
    command = [sys.executable, "-m", "trainshed", "serve", str(base), "--port", "0", "--grace", "0.2"]
    command += ["--adapter", f"terse={folder / 'terse'}", "--adapter", f"run/two={folder / 'run-run'}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    lines: list[str] = []
    reader = threading.Thread(target=_gather, args=(process, lines))
    reader.start()
    try:
        wait_until(lambda: any("serving tiny" in line for line in lines) or process.poll() is not None)
        (url,) = re.findall(r"serving tiny, terse, run/two at (http://\S+)", "".join(lines)) or [
            pytest.fail("".join(lines))
        ]
        with (
            httpx2.Client(base_url=url, timeout=60) as http,
            openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client,
        ):
            yield AdapterServer(base, {"terse": adapters["terse"], "run/two": adapters["run"]}, http, client)
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


def oracle(server: AdapterServer, name: str) -> Any:
    if name == "tiny":
        return hf_model(server.base)
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(hf_model(server.base), server.adapters[name]).eval()


def test_the_model_of_a_request_chooses_the_adapter(server: AdapterServer) -> None:
    assert [model.id for model in server.openai.models.list()] == list(NAMES)
    described = server.openai.models.retrieve("run/two").model_dump()
    assert (described["id"], described["parent"]) == ("run/two", "tiny")
    assert server.http.get("/ready").json()["adapters"] == {"terse": True, "run/two": True}
    prompt = [256, *range(40, 60)]
    texts = set()
    for name in NAMES:
        answer: Any = server.openai.completions.create(
            model=name, prompt=prompt, echo=True, logprobs=1, max_tokens=6, temperature=0
        )
        assert answer.model == name
        texts.add(answer.choices[0].text)
        with torch.no_grad():
            scores = oracle(server, name)(torch.tensor([prompt])).logits[0].log_softmax(-1)
        wanted = [float(scores[at, token]) for at, token in enumerate(prompt[1:])]
        assert answer.choices[0].logprobs.token_logprobs[1 : len(prompt)] == pytest.approx(wanted, abs=1e-5)
    assert len(texts) == 3


def test_another_name_is_not_found_and_the_names_are_said(server: AdapterServer) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        server.openai.completions.create(model="third", prompt="a", max_tokens=1)
    assert caught.value.code == "model_not_found"
    assert "`tiny`, `terse`, `run/two` are served" in caught.value.message
    with pytest.raises(openai.NotFoundError):
        server.openai.models.retrieve("third")
    assert server.http.post("/completions", json={"model": "x", "prompt": "a", "max_tokens": 1}).status_code == 404


def test_many_requests_of_different_adapters_at_once_answer_as_each_alone(server: AdapterServer) -> None:
    def ask(number: int) -> str:
        name = NAMES[number % 3]
        answer = server.openai.completions.create(model=name, prompt="hello", seed=number, max_tokens=20)
        return answer.choices[0].text

    alone = [ask(number) for number in range(9)]
    with ThreadPoolExecutor(9) as pool:
        assert list(pool.map(ask, range(9))) == alone
    assert len(set(alone)) == 9


def test_a_chat_is_written_with_the_template_that_the_adapter_brings(server: AdapterServer) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    for name, end in (("tiny", "<|assistant|>"), ("terse", "=> "), ("run/two", "<|assistant|>")):
        chat = server.openai.chat.completions.create(model=name, messages=messages, max_tokens=8, temperature=0)
        prompt = [256, *f"<|user|>hi\n{end}".encode()]
        tokens = [server_token(server, byte) for byte in prompt[1:]]
        text = server.openai.completions.create(model=name, prompt=[256, *tokens], max_tokens=8, temperature=0)
        assert chat.choices[0].message.content == text.choices[0].text
        assert chat.usage is not None
        assert chat.usage.prompt_tokens == len(prompt)


def server_token(server: AdapterServer, byte: int) -> int:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(server.base / "tokenizer.json")).encode(chr(byte), add_special_tokens=False).ids[0]


def test_megatrons_route_takes_the_name_too(server: AdapterServer) -> None:
    body = {"prompt": "hello", "max_tokens": 6, "top_k": 1}
    answers = {
        name: server.http.post("/completions", json=body | {"model": name}).json()["choices"][0]["text"]
        for name in NAMES
    }
    assert len(set(answers.values())) == 3
    assert server.http.post("/completions", json=body).json()["choices"][0]["text"] == answers["tiny"]


def test_the_generator_is_told_the_adapter(served: Served) -> None:
    model = ServedModel("letters", served.generator, served.tokenizer, {"other": served.tokenizer})
    served.state.loaded(model)
    served.openai.completions.create(model="other", prompt="a", max_tokens=1)
    served.openai.chat.completions.create(model="letters", messages=[{"role": "user", "content": "a"}], max_tokens=1)
    assert [asked.adapter for asked in served.generator.said] == ["other", None]
