"""How the generator treats whoever asks: in order, each by itself, and told when something is over."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from support.models.tiny_models import tiny_config
from support.runs.small_generators import PATIENCE_SECONDS, Answered, ask, begin, fresh_chunk, generating
from trainshed.errors import InputError, TrainshedError
from trainshed.models.decoder import DecoderStage
from trainshed.serve.kv_cache import ServingLimits
from trainshed.serve.request import (
    GenerationEvent,
    GenerationFailed,
    GenerationFinished,
    OutputToken,
    PrefillDone,
    SamplingParams,
)
from trainshed.serve.scheduler import ModelGenerator

CONFIG = tiny_config("llama", max_positions=512)
LONG = {"max_tokens": 400, "temperature": 0.0}


@pytest.fixture(scope="module")
def chunk() -> DecoderStage:
    return fresh_chunk(CONFIG)


@pytest.fixture
def generator(chunk: DecoderStage, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelGenerator]:
    monkeypatch.setattr("trainshed.serve.runner.PREFILL_CHUNK_TOKENS", {"cpu": 64})
    with generating(chunk, room=ServingLimits(2, 512, 1024)) as made:
        yield made


class Held(Answered):
    """An answer whose reader stops at the first token, and with it the generator, until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.go_on = threading.Event(), threading.Event()

    def tell(self, event: GenerationEvent) -> None:
        super().tell(event)
        if isinstance(event, OutputToken) and not self.first.is_set():
            self.first.set()
            assert self.go_on.wait(PATIENCE_SECONDS)


def hold(generator: ModelGenerator, **sampling: Any) -> Held:
    held = Held()
    held.ticket = generator.submit([1], SamplingParams(**sampling), held.tell)
    assert held.first.wait(PATIENCE_SECONDS)
    return held


def test_a_cancelled_answer_ends_and_leaves_its_room_to_others(generator: ModelGenerator) -> None:
    held = hold(generator, **LONG)
    second, waiting = begin(generator, [2], **LONG), begin(generator, [3], max_tokens=2, temperature=0.0)
    assert generator.load().waiting == 2
    assert held.ticket is not None
    held.ticket.cancel()
    held.go_on.set()
    assert held.wait().end == GenerationFinished("cancelled")
    assert waiting.wait().end == GenerationFinished("length")
    assert second.ticket is not None
    second.ticket.cancel()
    second.wait()
    assert (generator.load().running, generator.load().cached_tokens) == (0, 0)


def test_who_is_cancelled_while_waiting_is_never_answered(generator: ModelGenerator) -> None:
    held = hold(generator, **LONG)
    asked = [begin(generator, [2], **LONG) for _ in range(2)]
    assert asked[1].ticket is not None
    asked[1].ticket.cancel()
    for each in (held, asked[0]):
        assert each.ticket is not None
        each.ticket.cancel()
    held.go_on.set()
    assert asked[1].wait().events == [GenerationFinished("cancelled")]


def test_first_come_first_served(generator: ModelGenerator) -> None:
    held = hold(generator, max_tokens=3, temperature=0.0)
    order: list[int] = []
    over = threading.Event()

    def tell(number: int, event: GenerationEvent) -> None:
        if isinstance(event, OutputToken):
            order.append(number)
        if isinstance(event, GenerationFinished) and number == 5:
            over.set()

    for number in range(6):
        # A large one in the middle: nobody small overtakes it for having room.
        sampling = SamplingParams(max_tokens=400 if number == 2 else 1)
        generator.submit([1], sampling, lambda event, number=number: tell(number, event))
    held.go_on.set()
    assert over.wait(PATIENCE_SECONDS)
    assert list(dict.fromkeys(order)) == [0, 1, 2, 3, 4, 5]


def test_a_long_prompt_does_not_stop_the_others(generator: ModelGenerator) -> None:
    """While 500 tokens are read, chunk by chunk, somebody else's answer goes on and ends first."""
    held = hold(generator, max_tokens=5, temperature=0.0)
    long = Answered()
    ended_before: list[bool] = []

    def tell(event: GenerationEvent) -> None:
        if isinstance(event, OutputToken):
            ended_before.append(GenerationFinished("length") in held.events)
        long.tell(event)

    generator.submit([1] * 500, SamplingParams(max_tokens=1, temperature=0.0), tell)
    held.go_on.set()
    held.wait()
    long.wait()
    # The last four tokens of the other came beside at most four chunks of the eight.
    assert ended_before == [True]
    assert generator.load().prompt_tokens_total == 501


def test_prompts_are_read_in_turn_so_that_a_short_one_passes_a_long_one(chunk: DecoderStage) -> None:
    order: list[str] = []

    def note(name: str, event: GenerationEvent) -> None:
        if isinstance(event, PrefillDone):
            order.append(name)

    with generating(chunk, room=ServingLimits(3, 512, 2000)) as generator:
        held = hold(generator, max_tokens=2, temperature=0.0)
        over = Answered()

        def tell(event: GenerationEvent) -> None:
            note("long", event)
            over.tell(event)

        generator.submit([1] * 500, SamplingParams(max_tokens=1), tell)
        generator.submit([2] * 50, SamplingParams(max_tokens=1), lambda event: note("short", event))
        held.go_on.set()
        over.wait()
    assert order == ["short", "long"]


def test_a_failure_is_told_to_everybody_and_stays(generator: ModelGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    held = hold(generator, **LONG)
    others = [begin(generator, [2], **LONG) for _ in range(3)]

    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(generator._runner, "decode", broken)
    held.go_on.set()
    for answer in (held, *others):
        assert answer.wait().end == GenerationFailed("RuntimeError: the device is gone")
    assert generator.failure() == "RuntimeError: the device is gone"
    with pytest.raises(TrainshedError, match="nothing is answered any more: RuntimeError: the device is gone"):
        begin(generator, [1])
    assert generator.load().running == 0


def test_weights_that_are_no_numbers_are_told_and_not_answered() -> None:
    chunk = fresh_chunk(CONFIG)
    # One word is broken: whoever uses it fails, and nobody else does.
    chunk.embedding.weight.data[7] = torch.nan
    with generating(chunk) as generator:
        broken, sound = begin(generator, [1, 7], max_tokens=4), begin(generator, [1, 2], max_tokens=4, top_k=1)
        assert isinstance(failed := broken.wait().end, GenerationFailed)
        assert "are not numbers" in failed.reason
        assert sound.wait().end == GenerationFinished("length")
        assert generator.failure() is None


def test_closing_ends_what_runs_and_what_waits(chunk: DecoderStage) -> None:
    with generating(chunk, room=ServingLimits(1, 512, 512)) as generator:
        held = hold(generator, **LONG)
        waiting = begin(generator, [2], **LONG)
        closing = threading.Thread(target=generator.close)
        closing.start()
        held.go_on.set()
        closing.join(PATIENCE_SECONDS)
    assert (held.end, waiting.events) == (GenerationFinished("cancelled"), [GenerationFinished("cancelled")])
    assert generator.failure() is None
    with pytest.raises(TrainshedError, match="the generator is closed"):
        begin(generator, [1])


def test_a_listener_that_breaks_ends_its_own_answer_only(generator: ModelGenerator) -> None:
    heard = threading.Event()

    def broken(event: GenerationEvent) -> None:
        heard.set()
        raise ValueError("gone")

    generator.submit([1], SamplingParams(max_tokens=400), broken)
    answer = begin(generator, [1], max_tokens=5)
    assert answer.wait().end == GenerationFinished("length")
    assert heard.is_set()
    assert generator.failure() is None


@pytest.mark.parametrize(
    ("prompt", "sampling", "said"),
    [
        ([], {}, "the prompt is empty"),
        ([3, 96], {}, "holds the token 96, and the model knows 0 to 95"),
        ([-1], {}, "holds the token -1"),
        ([1] * 512, {}, "the prompt has 512 tokens, and prompt and answer have room for 512"),
        ([1], {"temperature": -0.5}, "`temperature: -0.5` means nothing"),
        ([1], {"temperature": float("nan")}, "`temperature: nan` means nothing"),
        ([1], {"top_p": 0.0}, "`top_p: 0.0` means nothing"),
        ([1], {"top_k": -1}, "`top_k: -1` means nothing"),
        ([1], {"stop": ("",)}, "`stop: "),
        ([1], {"logprobs": 101}, "`logprobs: 101`"),
        ([1], {"frequency_penalty": float("inf")}, "`frequency_penalty: inf`"),
        ([1], {"max_tokens": -1}, "`max_tokens: -1`"),
    ],
)
def test_what_cannot_be_answered_is_refused(
    generator: ModelGenerator, prompt: list[int], sampling: dict[str, object], said: str
) -> None:
    with pytest.raises(InputError) as refused:
        begin(generator, prompt, **sampling)
    assert said in refused.value.what
    assert refused.value.hint


def test_a_prompt_that_fills_the_model_can_be_read_but_not_answered(generator: ModelGenerator) -> None:
    assert ask(generator, [1] * 512, max_tokens=0).end == GenerationFinished("length")
