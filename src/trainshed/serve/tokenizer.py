"""A model's tokenizer: text to tokens and back, conversations by its own chat template, text token by token.

Templates are programs from wherever the model came from: they run in Jinja's sandbox, and no other code of a
model is ever run. Text that streams out holds whole characters only, and nothing that may still turn out to be a
stop string.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from trainshed.checkpoints.hf.companion_files import special_token_ids
from trainshed.data.tokenize.tokenizer import TOKENIZER_FILES, Tokenizer, tokenizer_from_files
from trainshed.errors import InputError, MissingExtra, TokenizerError

_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatTokenizer:
    """A tokenizer with what stood beside it: `files` are a folder's companions (`hf/companion_files.py`)."""

    def __init__(self, address: str, files: Mapping[str, bytes]) -> None:
        self._files = files
        known = {name: data for name, data in files.items() if name in TOKENIZER_FILES}
        self.tokenizer: Tokenizer = tokenizer_from_files(address, known)

    @cached_property
    def beginning(self) -> int | None:
        """The token that begins a text; None where the tokenizer has none."""
        text = self._special_texts.get("bos_token")
        return None if text is None else self.tokenizer.backend.token_to_id(text)

    @cached_property
    def ends(self) -> frozenset[int]:
        """The tokens that end an answer: what the model's settings say, else what its tokenizer calls its end."""
        told = special_token_ids(self._files).get("eos_token_id")
        if told is not None:
            return frozenset(told if isinstance(told, list) else [told])
        try:
            return frozenset([self.tokenizer.end_of_document().id])
        except TokenizerError:
            return frozenset()

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt, with what the tokenizer itself puts around a text."""
        return self.tokenizer.backend.encode(text).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return self.tokenizer.decode(list(tokens))

    def plain(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens as an answer shows it: without special ones."""
        return self.tokenizer.backend.decode(list(tokens), skip_special_tokens=True)

    @property
    def can_chat(self) -> bool:
        """Whether the tokenizer says how a conversation is written."""
        return self._template is not None

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the tokens of a conversation up to where the answer begins; raises `InputError`."""
        if self._template is None:
            raise InputError(
                "this model's tokenizer has no chat template",
                where=self.tokenizer.address,
                hint="ask it to go on with a text instead, or put a chat_template.jinja beside its tokenizer",
            )
        text = _render_chat(self._template, messages, self._special_texts)
        return self.tokenizer.backend.encode(text, add_special_tokens=False).ids

    @cached_property
    def _special_texts(self) -> dict[str, str]:
        named = {role: self.tokenizer.config.get(role) for role in _SPECIAL_TOKENS}
        texts = {role: each.get("content") if isinstance(each, dict) else each for role, each in named.items()}
        return {role: text for role, text in texts.items() if isinstance(text, str)}

    @cached_property
    def _template(self) -> str | None:
        """The template: a file of its own, or in the tokenizer's config, there one or several by name."""
        if "chat_template.jinja" in self._files:
            return self._files["chat_template.jinja"].decode()
        found = self.tokenizer.config.get("chat_template")
        if found is None and "chat_template.json" in self._files:
            found = json.loads(self._files["chat_template.json"]).get("chat_template")
        if isinstance(found, list):
            found = next((each.get("template") for each in found if each.get("name") == "default"), None)
        return found if isinstance(found, str) else None


def _render_chat(template: str, messages: Sequence[Mapping[str, str]], special: Mapping[str, str]) -> str:
    """Write a conversation as transformers does: the same settings of Jinja, the same functions in it."""
    try:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise MissingExtra.named("serve", "writing a conversation") from None

    def refuse(text: str) -> None:
        raise jinja2.TemplateError(text)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    functions: dict[str, Any] = {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    try:
        return environment.from_string(template, functions).render(
            messages=[dict(message) for message in messages], add_generation_prompt=True, **special
        )
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise InputError(
            f"the chat template does not take this conversation: {error}",
            hint="messages have a `role` (system, user, assistant) and a `content`",
        ) from None


def _to_json(value: Any, indent: int | None = None) -> str:
    """JSON as people read it; Jinja's own would escape what HTML does not take."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


REPLACEMENT_CHARACTER = "\ufffd"
"""What decoders write where bytes are no character (yet)."""
# A character has at most four bytes, so at most three of an unfinished one can stand at the end.
_MAX_UNFINISHED = 3
# Decoders look at the token before (a space is written or not), so some tokens stay in sight.
_CONTEXT_TOKENS = 8

DecodeTokens = Callable[[Sequence[int]], str]


class IncrementalDetokenizer:
    """Turns an answer's tokens into text. `prompt` is what stands before it: its end decides about a first space."""

    def __init__(self, decode: DecodeTokens, prompt: Sequence[int] = ()) -> None:
        self._decode = decode
        # Not from the middle of a character on, if a few tokens more avoid it.
        ends = [list(prompt[-_CONTEXT_TOKENS - more :]) for more in range(_MAX_UNFINISHED + 1)]
        self._tokens = next((end for end in ends if end and REPLACEMENT_CHARACTER not in decode(end)), ends[0])
        self._told = len(decode(self._tokens).rstrip(REPLACEMENT_CHARACTER)) if self._tokens else 0
        self._unfinished = 0
        """How many tokens have come since the text last ended with a whole character."""

    def push(self, token: int) -> str:
        """Add a token; returns the text that is certain now."""
        self._tokens.append(token)
        whole = self._decode(self._tokens)
        new = self._new(self._finished(whole))
        if len(self._tokens) >= 2 * _CONTEXT_TOKENS and REPLACEMENT_CHARACTER not in whole:
            self._forget()
        return new

    def finish(self) -> str:
        """Return what is left at the end: bytes that never became a character, as the decoder writes them."""
        return self._new(self._decode(self._tokens)) if self._tokens else ""

    def _finished(self, text: str) -> str:
        """Cut what may be the beginning of a character off the end.

        Decoders that know bytes as tokens show a whole row of them as broken until its last character is there, so
        all of it waits; but not for longer than a character can take.
        """
        self._unfinished = self._unfinished + 1 if text.endswith(REPLACEMENT_CHARACTER) else 0
        settled = len(text.rstrip(REPLACEMENT_CHARACTER))
        if self._unfinished > _MAX_UNFINISHED:
            settled = max(settled, len(text) - _MAX_UNFINISHED)
        return text[:settled]

    def _new(self, text: str) -> str:
        new = text[self._told :]
        self._told = max(self._told, len(text))
        return new

    def _forget(self) -> None:
        """Drop tokens whose text is told, where the rest reads as before: not in the middle of a character."""
        kept = self._tokens[-_CONTEXT_TOKENS:]
        text = self._decode(kept)
        if REPLACEMENT_CHARACTER not in text:
            self._tokens, self._told = kept, len(text)


class StopStrings:
    """Holds back what may begin a stop text, and finds the one that is complete first."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """Add text; returns what is surely part of the answer."""
        if not self._stops:
            return text
        self._held += text
        found = [(place + len(stop), place) for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            # The one that ends first: so it does not matter how the text was cut into tokens.
            self.found = True
            told, self._held = self._held[: min(found)[1]], ""
            return told
        kept = max(_overlap(self._held, stop) for stop in self._stops)
        cut = len(self._held) - kept
        told, self._held = self._held[:cut], self._held[cut:]
        return told

    def finish(self) -> str:
        """Return what was held back and is part of the answer after all."""
        told, self._held = self._held, ""
        return told


def _overlap(text: str, stop: str) -> int:
    """How many of a text's last characters are the first of a stop text."""
    return next(
        (count for count in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:count])),
        0,
    )
