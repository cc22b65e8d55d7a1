"""The prompts of `data.validation`, which the model answers at every validation: as tokens, and answers as text again.

Ranks need no tokenizer. Preparing a run writes the prompts as tokens into `prepared.json`, and the tokenizer beside
where the answers will be. Rank 0 decodes them if it has the `tokenizers` package; otherwise whoever reads them does.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import orjson

from trainshed.data.chat.answers import ANCHOR
from trainshed.data.chat.template import ChatTemplate, TemplateSource, find_template
from trainshed.data.recipe_keys import errors_with_recipe_keys
from trainshed.data.tokenize.tokenizer import Tokenizer
from trainshed.errors import InputError, MissingExtra, NotFound, TokenizerError
from trainshed.recipe import Recipe
from trainshed.run_folder import ANSWERS, ANSWERS_TOKENIZER, PREPARED_FILE, read_prepared, step_number
from trainshed.storage import Store, StoreOptions, join

DEFAULT_ANSWER_TOKENS = 64
ANSWERS_SCHEMA = "trainshed.answers/1"


@dataclass(frozen=True)
class ValidationPrompts:
    """Prompts, each as it is written and as the tokens that the model gets.

    An answer has at most `answer_tokens` tokens, and ends before that with one of `end_tokens`.
    """

    texts: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]
    answer_tokens: int
    end_tokens: frozenset[int]

    def to_plain(self) -> dict[str, Any]:
        """The prompts as `prepared.json` holds them."""
        return {
            "prompts": [
                {"text": text, "tokens": list(tokens)} for text, tokens in zip(self.texts, self.tokens, strict=True)
            ],
            "answer_tokens": self.answer_tokens,
            "end_tokens": sorted(self.end_tokens),
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> ValidationPrompts:
        """Read what `to_plain` returned."""
        prompts = plain["prompts"]
        return cls(
            tuple(prompt["text"] for prompt in prompts),
            tuple(tuple(prompt["tokens"]) for prompt in prompts),
            plain["answer_tokens"],
            frozenset(plain["end_tokens"]),
        )


def encode_prompts(
    recipe: Recipe, tokenizer: Tokenizer | None, options: StoreOptions | None = None
) -> ValidationPrompts | None:
    """Return the prompts of a recipe as tokens; None where it has none.

    Where the run learns from conversations, a prompt is what a user says, written by the chat template of the run after
    its system prompt. Otherwise it is a text to go on with, encoded as `trainshed generate` does.
    """
    if recipe.data.prompted is None or tokenizer is None:
        return None
    key, validation = recipe.data.prompted
    assert validation.prompts is not None
    answer_tokens = validation.answer_tokens or DEFAULT_ANSWER_TOKENS
    if recipe.sample_format == "text":
        encoded = [tuple(tokenizer.backend.encode(text).ids) for text in validation.prompts]
        eod = recipe.data.eod
        end_tokens = {tokenizer.end_of_document(eod if isinstance(eod, str) else None).id} if eod else set()
    else:
        with errors_with_recipe_keys(recipe.where("data.template")):
            encoded, end_tokens = _encode_chat(recipe, tokenizer, validation.prompts, options)
    for number, tokens in enumerate(encoded):
        _check_length(recipe, f"{key}.prompts.{number}", len(tokens), answer_tokens)
    return ValidationPrompts(validation.prompts, tuple(encoded), answer_tokens, frozenset(end_tokens))


def _encode_chat(
    recipe: Recipe, tokenizer: Tokenizer, prompts: Sequence[str], options: StoreOptions | None
) -> tuple[list[tuple[int, ...]], set[int]]:
    """Return the tokens of each prompt up to where its answer begins, and the tokens that end an answer.

    Those are the tokenizer's own end token, and the one that the template writes after an answer.
    """
    answers = recipe.data.answers
    source = find_template(answers.template, tokenizer, folder=recipe.folder, options=options)
    template = ChatTemplate(source.text, tokenizer.special_texts)
    system = [] if answers.system is None else [{"role": "system", "content": answers.system}]
    encoded = []
    for text in prompts:
        rendered = template.render([*system, {"role": "user", "content": text}], add_generation_prompt=True).text
        encoded.append(tuple(tokenizer.backend.encode(rendered, add_special_tokens=False).ids))
    end_tokens = set(_answer_end(source, tokenizer, answers.system))
    with suppress(TokenizerError):  # a template may end answers by a token of its own
        end_tokens.add(tokenizer.end_of_document().id)
    return encoded, end_tokens


def chat_format(
    recipe: Recipe, tokenizer: Tokenizer, options: StoreOptions | None = None
) -> tuple[str | None, tuple[int, ...]]:
    """Return what a model that learned conversations needs beside its tokenizer, so that it is asked as it was trained.

    These are the chat template of the run, where it is not the tokenizer's own, and the tokens that end an answer.
    """
    template = recipe.data.template
    if recipe.sample_format == "text" or (template is None and "default" not in tokenizer.chat_templates):
        return None, ()
    with errors_with_recipe_keys(recipe.where("data.template")):
        source = find_template(template, tokenizer, folder=recipe.folder, options=options)
        return (None if template is None else source.text), _answer_end(source, tokenizer, recipe.data.system)


def _answer_end(source: TemplateSource, tokenizer: Tokenizer, system: str | None) -> tuple[int, ...]:
    """Return the token that a template writes after an answer, where it is a special or an added one."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages += [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANCHOR}]
    text = ChatTemplate(source.text, tokenizer.special_texts).render(messages).text
    after = tokenizer.backend.encode(text.partition(ANCHOR)[2], add_special_tokens=False).ids
    # Some tokenizers have runs of white space as added tokens, which end nothing.
    whole = {id for id, token in tokenizer.backend.get_added_tokens_decoder().items() if token.content.strip()}
    return tuple(id for id in after[:1] if id in whole)


def _check_length(recipe: Recipe, key: str, length: int, answer_tokens: int) -> None:
    where = recipe.where(key)
    if length == 0:
        raise InputError("this prompt has no tokens", where=where, hint="write a text")
    room = recipe.data.sequence_length
    assert room is not None, "only synthetic data may leave it out, which has no validation"
    # The last token of an answer is never read by the model.
    longest = room - length + 1
    if answer_tokens <= longest:
        return
    hint = f"write `answer_tokens: {longest}` or less, or a shorter prompt" if longest > 0 else "write a shorter prompt"
    raise InputError(
        f"this prompt has {length} tokens and its answer up to {answer_tokens}: that is more than `sequence_length`, "
        f"{room}",
        where=where,
        hint=hint,
    )


@dataclass(frozen=True)
class StepAnswers:
    """The answers after a step, as its file holds them: `{prompt, answer, tokens, ended}` each."""

    step: int
    answers: list[dict[str, Any]]


def read_answers(store: Store, folder: str) -> list[StepAnswers]:
    """Read all answers of a run, in the order of the steps; those that are tokens alone are decoded where that works.

    Without the `tokenizers` package such answers stay None.
    """
    prefix = f"{folder}/".lstrip("/")
    steps = []
    for info in store.list(f"{prefix}{ANSWERS}"):
        if step_number(info.path.rpartition("/")[2].removesuffix(".json")) is None:
            continue
        body = orjson.loads(store.read(info.path))
        steps.append(StepAnswers(body["step"], body["answers"]))
    missing = [answer for step in steps for answer in step.answers if answer["answer"] is None]
    if missing:
        _decode_missing(store, folder, missing)
    return sorted(steps, key=lambda step: step.step)


def _decode_missing(store: Store, folder: str, answers: list[dict[str, Any]]) -> None:
    try:
        decoder = AnswerDecoder.open(store, folder)
    except (MissingExtra, NotFound):
        return
    place = f"{folder}/{PREPARED_FILE}".lstrip("/")
    plain = read_prepared(store.read(place), join(store.url, place)).get("prompts")
    prompts = ValidationPrompts.from_plain(plain) if plain else None
    tokens = {} if prompts is None else dict(zip(prompts.texts, prompts.tokens, strict=True))
    for answer in answers:
        answer["answer"] = decoder.decode(tokens.get(answer["prompt"], ()), answer["tokens"])


class AnswerDecoder:
    """Turns answers into text, by the tokenizer that a run keeps for it."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    @classmethod
    def open(cls, store: Store, folder: str) -> AnswerDecoder:
        """Open that of a run's folder; raises `MissingExtra` where the `tokenizers` package is not installed."""
        try:
            import tokenizers
        except ImportError:
            raise MissingExtra.named("data", "decoding answers") from None
        return cls(tokenizers.Tokenizer.from_buffer(store.read(f"{folder}/{ANSWERS_TOKENIZER}".lstrip("/"))))

    def decode(self, prompt: Sequence[int], answer: Sequence[int]) -> str:
        """Return the text of an answer; what comes before it decides whether it begins with a space."""
        before, whole = (self._decode(tokens) for tokens in (list(prompt), [*prompt, *answer]))
        return whole[len(before) :] if whole.startswith(before) else self._decode(list(answer))

    def _decode(self, tokens: list[int]) -> str:
        return self._backend.decode(tokens, skip_special_tokens=True)
