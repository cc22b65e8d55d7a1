"""A model's tokenizer: text to tokens and back, conversations by its own chat template, incremental detokenizing.

Templates are programs that come with the model: they run in the sandbox of `data/chat`, and no other code of a model is
ever run.
Streamed text has whole characters only, and nothing that may still become a stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from functools import cached_property

from trainshed.checkpoints.hf.companion_files import special_token_ids, with_chat_template
from trainshed.data.chat.template import ChatTemplate
from trainshed.data.tokenize.added_tokens import REPLACED_FILES, added_token_files
from trainshed.data.tokenize.tokenizer import TEMPLATE_FILES, TOKENIZER_FILES, Tokenizer, tokenizer_from_files
from trainshed.errors import InputError, TokenizerError


class ChatTokenizer:
    """A tokenizer with its chat template and special tokens; `files` are those of `hf/companion_files.py`."""

    def __init__(self, address: str, files: Mapping[str, bytes]) -> None:
        self._files = files
        known = {name: data for name, data in files.items() if name in (*TOKENIZER_FILES, *TEMPLATE_FILES)}
        self.tokenizer: Tokenizer = tokenizer_from_files(address, known)

    def with_chat_template(self, template: str | None, end_tokens: Collection[int]) -> ChatTokenizer:
        """Return it with the text of another chat template, and with further tokens that end an answer."""
        return ChatTokenizer(self.tokenizer.address, with_chat_template(self._files, template, end_tokens))

    def with_added_tokens(self, texts: Sequence[str]) -> ChatTokenizer:
        """Return it with further tokens, as a run with `model.added_tokens` has it."""
        kept = {name: data for name, data in self._files.items() if name not in REPLACED_FILES}
        return ChatTokenizer(self.tokenizer.address, kept | added_token_files(self.tokenizer, texts))

    @cached_property
    def bos_token(self) -> int | None:
        """The BOS token; None if the tokenizer has none."""
        text = self.tokenizer.special_texts.get("bos_token")
        return None if text is None else self.tokenizer.backend.token_to_id(text)

    @cached_property
    def eos_tokens(self) -> frozenset[int]:
        """The EOS tokens: those of the model's config, else that of its tokenizer."""
        configured = special_token_ids(self._files).get("eos_token_id")
        if configured is not None:
            return frozenset(configured if isinstance(configured, list) else [configured])
        try:
            return frozenset([self.tokenizer.end_of_document().id])
        except TokenizerError:
            return frozenset()

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt, with the special tokens that the tokenizer adds."""
        return self.tokenizer.backend.encode(text).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return self.tokenizer.decode(list(tokens))

    def decode_plain(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens without special ones."""
        return self.tokenizer.backend.decode(list(tokens), skip_special_tokens=True)

    @property
    def can_chat(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return self._template is not None

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the tokens of a conversation with the generation prompt; raises `InputError`."""
        text = self.chat_text(messages, add_generation_prompt=True)
        return self.tokenizer.backend.encode(text, add_special_tokens=False).ids

    def chat_text(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
        """Return a conversation as the chat template writes it; raises `InputError`."""
        if self._template is None:
            raise InputError(
                "this model's tokenizer has no chat template",
                where=self.tokenizer.address,
                hint="ask it to go on with a text instead, or put a chat_template.jinja beside its tokenizer",
            )
        return self._template.render(messages, add_generation_prompt=add_generation_prompt).text

    @cached_property
    def _template(self) -> ChatTemplate | None:
        source = self.tokenizer.chat_templates.get("default")
        return None if source is None else ChatTemplate(source, self.tokenizer.special_texts, now=datetime.now)


REPLACEMENT_CHARACTER = "\ufffd"
"""What decoders write for bytes that are not (yet) a character."""
# A character has at most four bytes, so at most three bytes of an unfinished one can be at the end.
_MAX_UNFINISHED = 3
# Decoders look at the token before (to write a space or not), so some tokens are kept as context.
_CONTEXT_TOKENS = 8

DecodeTokens = Callable[[Sequence[int]], str]


class IncrementalDetokenizer:
    """Turns output tokens into text, one by one. The end of the `prompt` decides if the text begins with a space."""

    def __init__(self, decode: DecodeTokens, prompt: Sequence[int] = ()) -> None:
        self._decode = decode
        # The context does not begin in the middle of a character, if a few tokens more avoid that.
        eos_tokens = [list(prompt[-_CONTEXT_TOKENS - more :]) for more in range(_MAX_UNFINISHED + 1)]
        self._tokens = next(
            (end for end in eos_tokens if end and REPLACEMENT_CHARACTER not in decode(end)), eos_tokens[0]
        )
        self._emitted = len(decode(self._tokens).rstrip(REPLACEMENT_CHARACTER)) if self._tokens else 0
        self._unfinished = 0
        """How many tokens were added since the text last ended with a whole character."""

    def push(self, token: int) -> str:
        """Add a token; returns the text that is certain now."""
        self._tokens.append(token)
        whole = self._decode(self._tokens)
        new = self._new(self._finished(whole))
        if len(self._tokens) >= 2 * _CONTEXT_TOKENS and REPLACEMENT_CHARACTER not in whole:
            self._forget()
        return new

    def finish(self) -> str:
        """Return the rest of the text: bytes that never became a character, as the decoder writes them."""
        return self._new(self._decode(self._tokens)) if self._tokens else ""

    def _finished(self, text: str) -> str:
        """Cut off the end of the text that may be the beginning of a character.

        Decoders with byte tokens show a whole row of bytes as broken until its last character is complete. So all of
        the row is held back, but not for longer than a character can be.
        """
        self._unfinished = self._unfinished + 1 if text.endswith(REPLACEMENT_CHARACTER) else 0
        settled = len(text.rstrip(REPLACEMENT_CHARACTER))
        if self._unfinished > _MAX_UNFINISHED:
            settled = max(settled, len(text) - _MAX_UNFINISHED)
        return text[:settled]

    def _new(self, text: str) -> str:
        new = text[self._emitted :]
        self._emitted = max(self._emitted, len(text))
        return new

    def _forget(self) -> None:
        """Drop tokens whose text was emitted, unless the rest would then begin in the middle of a character."""
        kept = self._tokens[-_CONTEXT_TOKENS:]
        text = self._decode(kept)
        if REPLACEMENT_CHARACTER not in text:
            self._tokens, self._emitted = kept, len(text)


class StopStrings:
    """Holds back text that may begin a stop string, and finds the stop string that is complete first."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """Add text; returns what is certainly part of the output."""
        if not self._stops:
            return text
        self._held += text
        matches = [(start + len(stop), start) for stop in self._stops if (start := self._held.find(stop)) >= 0]
        if matches:
            # The one that ends first, so that it does not matter how the text was cut into tokens.
            self.found = True
            certain, self._held = self._held[: min(matches)[1]], ""
            return certain
        kept = max(_overlap(self._held, stop) for stop in self._stops)
        cut = len(self._held) - kept
        certain, self._held = self._held[:cut], self._held[cut:]
        return certain

    def finish(self) -> str:
        """Return the text that was held back."""
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """Return how many of a text's last characters are the first ones of a stop string."""
    return next(
        (count for count in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:count])),
        0,
    )
