"""The answers to one request in OpenAI's shapes: `choices` of a completion and of a chat, whole and in chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from trainshed.serve.asking import Ended, Event, Failed, Piece, PromptRead
from trainshed.serve.http.answers import Answer, Question
from trainshed.serve.http.logprobs import Columns, rows
from trainshed.serve.http.model import Words
from trainshed.serve.http.openai_requests import ChatRequest, CompletionRequest


class Choices(Protocol):
    """What the two routes differ in. Choice `number` is answer `number % n` to prompt `number // n`."""

    id_prefix: str
    kind: str
    chunk_kind: str
    prompts: Sequence[Sequence[int]]

    def questions(self) -> list[Question]:
        """Return what to ask the generator, one question for each choice."""
        ...

    def whole(self, number: int, answer: Answer) -> dict[str, Any]:
        """Return a choice whose answer is there."""
        ...

    def opening(self, number: int) -> dict[str, Any] | None:
        """Return what a stream says of a choice before anything has happened."""
        ...

    def chunks(self, number: int, event: Event) -> Iterator[dict[str, Any]]:
        """Yield what a stream says of an event."""
        ...


class CompletionChoices:
    """Choices of `/v1/completions`."""

    id_prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"

    def __init__(self, request: CompletionRequest, words: Words, prompts: Sequence[Sequence[int]]) -> None:
        self.prompts = prompts
        self._request, self._words = request, words
        # Where the text of each choice's stream stands.
        self._offsets = [0] * (len(prompts) * request.n)

    def questions(self) -> list[Question]:
        """Ask each prompt n times."""
        sampling = [self._request.sampling(choice) for choice in range(self._request.n)]
        return [Question(prompt, each) for prompt in self.prompts for each in sampling]

    def whole(self, number: int, answer: Answer) -> dict[str, Any]:
        """Return a choice whose answer is there."""
        before = self._echoed(number)
        logprobs = self._columns()
        if logprobs is not None:
            if self._request.echo:
                logprobs.add_prompt(self._prompt(number), answer.prompt_pieces, before)
            logprobs.add(answer.pieces, len(before))
        return _completion(number, before + answer.text, logprobs, answer.reason)

    def opening(self, number: int) -> None:
        """A completion's stream begins with its text."""

    def chunks(self, number: int, event: Event) -> Iterator[dict[str, Any]]:
        """Yield what a stream says of an event."""
        logprobs = self._columns()
        offset = self._offsets[number]
        match event:
            case PromptRead() if self._request.echo:
                text = self._echoed(number)
                if logprobs is not None:
                    logprobs.add_prompt(self._prompt(number), event.logprobs, text)
                self._offsets[number] += len(text)
                yield _completion(number, text, logprobs, None)
            case Piece() if event.text or logprobs is not None:
                if logprobs is not None:
                    logprobs.add([event], offset)
                self._offsets[number] += len(event.text)
                yield _completion(number, event.text, logprobs, None)
            case Ended():
                yield _completion(number, event.text, None, event.reason)

    def _prompt(self, number: int) -> Sequence[int]:
        return self.prompts[number // self._request.n]

    def _echoed(self, number: int) -> str:
        if not self._request.echo:
            return ""
        written = self._request.prompt[number // self._request.n]
        return written if isinstance(written, str) else self._words.decode(list(written))

    def _columns(self) -> Columns | None:
        return None if self._request.logprobs is None else Columns(self._words)


def _completion(number: int, text: str, logprobs: Columns | None, reason: str | None) -> dict[str, Any]:
    told = None if logprobs is None else logprobs.body()
    return {"index": number, "text": text, "logprobs": told, "finish_reason": reason}


class ChatChoices:
    """Choices of `/v1/chat/completions`."""

    id_prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, request: ChatRequest, words: Words, prompt: Sequence[int]) -> None:
        self.prompts: Sequence[Sequence[int]] = [prompt]
        self._request, self._words = request, words

    def questions(self) -> list[Question]:
        """Ask the conversation n times."""
        return [Question(self.prompts[0], self._request.sampling(choice)) for choice in range(self._request.n)]

    def whole(self, number: int, answer: Answer) -> dict[str, Any]:
        """Return a choice whose answer is there."""
        return {
            "index": number,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": rows(self._words, answer.pieces) if self._request.logprobs else None,
            "finish_reason": answer.reason,
        }

    def opening(self, number: int) -> dict[str, Any]:
        """A chat's stream begins with who speaks."""
        return self._delta(number, {"role": "assistant", "content": "", "refusal": None})

    def chunks(self, number: int, event: Event) -> Iterator[dict[str, Any]]:
        """Yield what a stream says of an event."""
        match event:
            case Piece() if event.text or self._request.logprobs:
                yield self._delta(number, {"content": event.text}, pieces=[event])
            case Ended():
                yield self._delta(number, {"content": event.text} if event.text else {}, reason=event.reason)
            case PromptRead() | Failed():
                pass

    def _delta(
        self, number: int, delta: dict[str, Any], *, pieces: Sequence[Piece] = (), reason: str | None = None
    ) -> dict[str, Any]:
        logprobs = rows(self._words, pieces) if self._request.logprobs and pieces else None
        return {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
