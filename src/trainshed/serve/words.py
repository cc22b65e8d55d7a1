"""A model's words: text to tokens and back, conversations as the tokenizer's own template writes them.

Templates are programs from wherever the model came from: they run in Jinja's sandbox, and no other code of a model is
ever run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from trainshed.checkpoints.converting.companions import token_ids
from trainshed.data.encode.tokenizer import TOKENIZER_FILES, Tokenizer, tokenizer_from_files
from trainshed.errors import InputError, MissingExtra, TokenizerError

_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")


class Words:
    """A tokenizer with what stood beside it: `files` are a folder's companions (`converting/companions.py`)."""

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
        told = token_ids(self._files).get("eos_token_id")
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
        text = _rendered(self._template, messages, self._special_texts)
        return self.tokenizer.backend.encode(text, add_special_tokens=False).ids

    @cached_property
    def _special_texts(self) -> dict[str, str]:
        named = {role: self.tokenizer.config.get(role) for role in _ROLES}
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


def _rendered(template: str, messages: Sequence[Mapping[str, str]], special: Mapping[str, str]) -> str:
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
