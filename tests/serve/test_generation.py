"""What is generated is what the model says: the tokens and log-probabilities of transformers, for every family."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.models.one_process import token_rows
from support.models.tiny_models import VARIANTS, hf_model, save_tiny_hf
from support.runs.small_generators import Answered, ask, begin, generating
from trainshed.checkpoints.convert.convert import convert_weights
from trainshed.checkpoints.formats import TargetFormat
from trainshed.recipe import ModelConfig
from trainshed.serve.generate import generate_text
from trainshed.serve.kv_cache import ServingLimits
from trainshed.serve.request import GenerationFinished, OutputToken, PrefillDone, SamplingParams

LENGTHS = (3, 17, 1, 40)
"""Prompts of different lengths, one longer than the window of the model that has one, one of a single token."""
GREEDY = {"max_tokens": 16, "temperature": 0.0, "ignore_eos": True, "logprobs": 3}


def prompts(config: ModelConfig) -> list[list[int]]:
    return [token_rows(config, 1, length, seed=length)[0].tolist() for length in LENGTHS]


def check_against(theirs: Any, prompt: list[int], answer: Answered) -> None:
    """Tokens as transformers generates them, log-probabilities as one pass over the whole text gives them."""
    theirs.generation_config.eos_token_id = None
    with torch.no_grad():
        expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False, pad_token_id=0)
        whole = theirs(torch.tensor([prompt + answer.tokens])).logits[0].log_softmax(-1)
    rope = getattr(theirs.config, "rope_parameters", None) or {}
    if (
        rope.get("rope_type") == "longrope"
        and len(prompt) <= rope["original_max_position_embeddings"] < len(prompt) + 16
    ):
        # transformers begins with the frequencies of short texts and again with others where the text becomes long. We
        # take those of the whole request, so the tokens are those of one pass over the whole text.
        expected[0, len(prompt) :] = whole.argmax(-1)[len(prompt) - 1 : -1]
    assert answer.tokens == expected[0, len(prompt) :].tolist()
    assert answer.end == GenerationFinished("length")
    for piece, logprobs in zip(answer.pieces, whole[len(prompt) - 1 :], strict=False):
        assert piece.logprob == pytest.approx(float(logprobs[piece.token]), abs=2e-5)
        best = logprobs.topk(3)
        assert [each.token for each in piece.top_logprobs] == best.indices.tolist()
        assert [each.logprob for each in piece.top_logprobs] == pytest.approx(best.values.tolist(), abs=2e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_many_answers_at_once_are_those_of_transformers(variant: str, tmp_path: Path) -> None:
    config = save_tiny_hf(variant, tmp_path, seed=2)
    theirs = hf_model(tmp_path)
    with generating(tmp_path) as generator:
        asked = [(prompt, begin(generator, prompt, **GREEDY)) for prompt in prompts(config)]
        for prompt, answer in asked:
            check_against(theirs, prompt, answer.wait())


@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        # Heads of latent attention whose part without positions is odd.
        ("deepseek-plain", {"heads": 3, "mla": {"kv_rank": 7, "nope_dim": 3, "rope_dim": 2, "value_dim": 9}}),
        # Matrices of experts whose rows are not a multiple of 16 bytes.
        ("qwen3_moe", {"heads": 7, "kv_heads": 1, "hidden": 21, "moe": {"experts": 3, "top_k": 2, "ffn": 5}}),
    ],
)
def test_odd_shapes_are_those_of_transformers(variant: str, changes: dict[str, Any], tmp_path: Path) -> None:
    config = save_tiny_hf(variant, tmp_path / "hf", seed=2, **changes)
    assert convert_weights(str(tmp_path / "hf"), str(tmp_path / "native"), TargetFormat("native")).verdict.passed
    theirs = hf_model(tmp_path / "hf")
    if hasattr(theirs, "set_experts_implementation"):
        theirs.set_experts_implementation("eager")  # its grouped products refuse such widths
    with generating(tmp_path / "native") as generator:
        for prompt in prompts(config)[:2]:
            check_against(theirs, prompt, ask(generator, prompt, **GREEDY))


@pytest.mark.parametrize("variant", ["llama", "mixtral", "gpt2", "mistral"])
def test_an_answer_is_the_same_to_the_bit_alone_and_among_others(variant: str, tmp_path: Path) -> None:
    config = save_tiny_hf(variant, tmp_path, seed=3)
    drawn = {"max_tokens": 12, "temperature": 0.9, "seed": 5, "logprobs": 2, "ignore_eos": True}
    with generating(tmp_path) as generator:
        alone = [ask(generator, prompt, **drawn) for prompt in prompts(config)]
        among = [begin(generator, prompt, **drawn) for prompt in prompts(config)]
        for one, other in zip(alone, among, strict=True):
            assert other.wait().events == one.events


def test_a_prompt_read_in_chunks_is_the_prompt_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = save_tiny_hf("mistral", tmp_path, seed=4)
    prompt = prompts(config)[-1]
    answers = []
    for chunk_tokens in (64, 7, 1):
        monkeypatch.setattr("trainshed.serve.runner.PREFILL_CHUNK_TOKENS", {"cpu": chunk_tokens})
        with generating(tmp_path) as generator:
            answers.append(ask(generator, prompt, **GREEDY, prompt_logprobs=True))
    for answer in answers[1:]:
        assert answer.tokens == answers[0].tokens
        for told in ("pieces", "prompt_pieces"):
            found = [piece.logprob for piece in getattr(answer, told)]
            assert found == pytest.approx([piece.logprob for piece in getattr(answers[0], told)], abs=1e-5)


def test_the_prompt_is_told_token_by_token(tmp_path: Path) -> None:
    config = save_tiny_hf("qwen3", tmp_path, seed=5)
    prompt = prompts(config)[1]
    with torch.no_grad():
        whole = hf_model(tmp_path)(torch.tensor([prompt])).logits[0].log_softmax(-1)
    with generating(tmp_path) as generator:
        answer = ask(generator, prompt, max_tokens=0, prompt_logprobs=True, logprobs=2)
    assert [piece.token for piece in answer.prompt_pieces] == prompt[1:]
    expected = [float(whole[at, token]) for at, token in enumerate(prompt[1:])]
    assert [piece.logprob for piece in answer.prompt_pieces] == pytest.approx(expected, abs=2e-5)
    best = whole[0].topk(2).indices.tolist()
    assert [each.token for each in answer.prompt_pieces[0].top_logprobs] == best
    assert answer.events[-1] == GenerationFinished("length")
    assert answer.pieces == []


def test_an_answer_ends_where_the_model_is_full(tmp_path: Path) -> None:
    config = save_tiny_hf("gpt2", tmp_path, seed=2)
    prompt = token_rows(config, 1, config.max_positions - 3)[0].tolist()
    with generating(tmp_path) as generator:
        for most in (None, 50):
            answer = ask(generator, prompt, max_tokens=most, temperature=0.0)
            assert (len(answer.tokens), answer.end) == (3, GenerationFinished("length"))


def test_more_answers_than_rows_and_than_cache_are_all_given(tmp_path: Path) -> None:
    config = save_tiny_hf("llama", tmp_path, seed=6)
    asked = [token_rows(config, 1, 1 + number % 9, seed=number)[0].tolist() for number in range(12)]
    with (
        generating(tmp_path, room=ServingLimits(4, 64, 256)) as roomy,
        generating(tmp_path, room=ServingLimits(4, 64, 64)) as cramped,
    ):
        answers = [[begin(each, prompt, **GREEDY) for prompt in asked] for each in (roomy, cramped)]
        for one, other in zip(*answers, strict=True):
            assert one.wait().events == other.wait().events
        assert cramped.load().cached_tokens == 0
        assert cramped.load().generated_tokens_total == 12 * 16
        assert cramped.load().prompt_tokens_total == sum(map(len, asked))


def test_the_seconds_of_an_answer_are_those_of_the_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that asks may be given the events only when all are there."""
    now = [100.0]
    monkeypatch.setattr("trainshed.serve.generate.time", SimpleNamespace(perf_counter=lambda: now[0]))
    events = [PrefillDone(), OutputToken(5, "a"), OutputToken(6, "b"), GenerationFinished("length")]

    class AllAtOnce:
        def submit(self, prompt: list[int], sampling: SamplingParams, on_event: Any) -> None:
            for event in events:
                now[0] += 1.0
                on_event(event)

        def close(self) -> None:
            pass

    model = SimpleNamespace(config=SimpleNamespace(max_positions=8), generator=lambda **_: AllAtOnce())
    output = generate_text(model, [1], SamplingParams(max_tokens=2))  # type: ignore[arg-type]
    assert (output.text, output.seconds) == ("ab", 3.0)
