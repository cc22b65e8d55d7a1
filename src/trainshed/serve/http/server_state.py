"""The state of the server: loading, ready, draining or failed; and the model that it serves. Probes ask for it, and
requests are let in by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from trainshed.reporting import ProgressTask, Reporter
from trainshed.serve.http.dispatcher import RequestDispatcher
from trainshed.serve.http.errors import ApiError
from trainshed.serve.http.metrics import ServerMetrics
from trainshed.serve.request import Generator


class TokenizerLike(Protocol):
    """A model's tokenizer, as the API uses it."""

    @property
    def beginning(self) -> int | None:
        """The token that begins a text; None where the tokenizer has none."""
        ...

    @property
    def can_chat(self) -> bool:
        """Whether the tokenizer says how a conversation is written."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt, with what the tokenizer itself puts around a text."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        ...

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the tokens of a conversation up to where the answer begins; raises `InputError`."""
        ...


@dataclass(frozen=True)
class ServedModel:
    """A model that can be asked."""

    name: str
    generator: Generator
    words: TokenizerLike


@dataclass
class LoadStep:
    """The part of loading that is under way."""

    label: str
    total: float | None
    unit: str
    done: float = 0.0


class ServerState:
    """The one object that the loading thread, the signal handlers and every route share."""

    def __init__(self, *, max_questions: int) -> None:
        self.metrics = ServerMetrics()
        self.step: LoadStep | None = None
        self.draining = False
        """Not ready any more; still answers those that have not heard of it."""
        self.closed = False
        """Takes no new question."""
        self._max_questions = max_questions
        self._model: ServedModel | None = None
        self._desk: RequestDispatcher | None = None

    def loaded(self, model: ServedModel) -> None:
        """Begin to serve a model."""
        self._desk = RequestDispatcher(model.generator, self.metrics, self._max_questions)
        self._model = model

    @property
    def model(self) -> ServedModel | None:
        """The model, once it is loaded."""
        return self._model

    @property
    def busy(self) -> bool:
        """Whether somebody still waits for an answer."""
        return self._desk is not None and self._desk.busy

    def cancel_all(self) -> None:
        """Stop answering everybody."""
        if self._desk is not None:
            self._desk.cancel_all()

    @property
    def failure(self) -> str | None:
        """Why nothing can be answered any more."""
        return self._model.generator.failure() if self._model else None

    def serving(self) -> tuple[ServedModel, RequestDispatcher]:
        """Return what answers a question, or refuse it."""
        if self._model is None or self._desk is None:
            raise ApiError(503, "the model is being loaded: GET /ready says how far it is", code="model_loading")
        if self.closed:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        if (why := self.failure) is not None:
            raise ApiError(503, f"the model can answer nothing any more: {why}", code="model_failed")
        return self._model, self._desk

    def health(self) -> tuple[int, dict[str, Any]]:
        """Answer the liveness probe: whether a restart would help."""
        if (why := self.failure) is not None:
            return 503, {"status": "failed", "reason": why}
        return 200, {"status": self._status()}

    def readiness(self) -> tuple[int, dict[str, Any]]:
        """Answer the readiness probe: whether questions are welcome, and if not why."""
        if (why := self.failure) is not None:
            return 503, {"status": "failed", "reason": why}
        status = self._status()
        if self._model is not None and status == "ready":
            return 200, {"status": status, "model": self._model.name, "chat": self._model.words.can_chat}
        if status == "draining":
            return 503, {"status": status, "reason": "the server was asked to stop"}
        report: dict[str, Any] = {"status": status, "reason": "the model is being loaded"}
        if (step := self.step) is not None:
            report["step"] = {"label": step.label, "done": step.done, "total": step.total, "unit": step.unit}
        return 503, report

    @property
    def is_ready(self) -> bool:
        """Whether questions are welcome."""
        return self._status() == "ready" and self.failure is None

    def _status(self) -> str:
        if self.draining:
            return "draining"
        return "ready" if self._model is not None else "loading"


class LoadProgress:
    """A reporter that also keeps how far loading is, for `/ready`."""

    def __init__(self, shown: Reporter, condition: ServerState) -> None:
        self._shown, self._condition = shown, condition

    def note(self, text: str) -> None:
        """Tell a choice that was made, and why."""
        self._shown.note(text)

    def warn(self, text: str) -> None:
        """Tell something that is legal and probably not wanted."""
        self._shown.warn(text)

    @contextmanager
    def task(self, label: str, *, total: float | None, unit: str) -> Iterator[ProgressTask]:
        """Open a measured task."""
        step = self._condition.step = LoadStep(label, total, unit)
        with self._shown.task(label, total=total, unit=unit) as shown:
            yield _LoadTask(shown, step)


class _LoadTask:
    def __init__(self, shown: ProgressTask, step: LoadStep) -> None:
        self._shown, self._step = shown, step

    def advance(self, amount: float) -> None:
        self._step.done += amount
        self._shown.advance(amount)

    def describe(self, text: str) -> None:
        self._shown.describe(text)
