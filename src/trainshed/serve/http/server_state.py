"""The state of the server: loading, ready, draining or failed; and the model that it serves. Probes report it, and it
decides whether requests are accepted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from trainshed.reporting import ProgressTask, Reporter
from trainshed.serve.http.dispatcher import RequestDispatcher
from trainshed.serve.http.errors import ApiError
from trainshed.serve.http.metrics import ServerMetrics
from trainshed.serve.request import Generator


class TokenizerLike(Protocol):
    """A model's tokenizer, as the API uses it."""

    @property
    def bos_token(self) -> int | None:
        """The BOS token; None if the tokenizer has none."""
        ...

    @property
    def can_chat(self) -> bool:
        """Whether the tokenizer has a chat template."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt, with the special tokens that the tokenizer adds."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        ...

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the tokens of a conversation with the generation prompt; raises `InputError`."""
        ...


@dataclass(frozen=True)
class ServedModel:
    """A model that takes requests: the base, or an adapter over it, which is served under a name of its own."""

    name: str
    generator: Generator
    tokenizer: TokenizerLike
    adapters: Mapping[str, TokenizerLike] = field(default_factory=dict)
    """Of the base: the adapters by name, each with the tokenizer that it was trained with."""
    adapter: str | None = None
    """Of an adapter: its name for the generator."""
    base: str | None = None
    """Of an adapter: the name of the model that it changes."""

    @property
    def all_names(self) -> list[str]:
        """The names that requests may call: the base first."""
        return [self.name, *self.adapters]

    def find(self, name: str) -> ServedModel | None:
        """Return the model of a name: this one, or an adapter over it."""
        if name == self.name:
            return self
        if name not in self.adapters:
            return None
        return ServedModel(name, self.generator, self.adapters[name], adapter=name, base=self.name)


@dataclass
class LoadStep:
    """The part of loading that runs now."""

    label: str
    total: float | None
    unit: str
    done: float = 0.0


class ServerState:
    """The one object that the loading thread, the signal handlers and every route share."""

    def __init__(self, *, max_requests: int) -> None:
        self.metrics = ServerMetrics()
        self.step: LoadStep | None = None
        self.draining = False
        """Not ready any more; requests are still accepted until load balancers have noticed."""
        self.closed = False
        """Accepts no new request."""
        self._max_requests = max_requests
        self._model: ServedModel | None = None
        self._dispatcher: RequestDispatcher | None = None

    def loaded(self, model: ServedModel) -> None:
        """Begin to serve a model."""
        self._dispatcher = RequestDispatcher(model.generator, self.metrics, self._max_requests)
        self._model = model

    @property
    def model(self) -> ServedModel | None:
        """The model, once it is loaded."""
        return self._model

    @property
    def busy(self) -> bool:
        """Whether a request is still running."""
        return self._dispatcher is not None and self._dispatcher.busy

    def cancel_all(self) -> None:
        """Cancel all requests."""
        if self._dispatcher is not None:
            self._dispatcher.cancel_all()

    @property
    def failure(self) -> str | None:
        """Why no request can run any more."""
        return self._model.generator.failure() if self._model else None

    def serving(self) -> tuple[ServedModel, RequestDispatcher]:
        """Return what runs a request, or refuse it."""
        if self._model is None or self._dispatcher is None:
            raise ApiError(503, "the model is being loaded: GET /ready says how far it is", code="model_loading")
        if self.closed:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        if (why := self.failure) is not None:
            raise ApiError(503, f"the model can answer nothing any more: {why}", code="model_failed")
        return self._model, self._dispatcher

    def health(self) -> tuple[int, dict[str, Any]]:
        """Answer the liveness probe: whether a restart would help."""
        if (why := self.failure) is not None:
            return 503, {"status": "failed", "reason": why}
        return 200, {"status": self._status()}

    def readiness(self) -> tuple[int, dict[str, Any]]:
        """Answer the readiness probe: whether requests are accepted, and if not why."""
        if (why := self.failure) is not None:
            return 503, {"status": "failed", "reason": why}
        status = self._status()
        if self._model is not None and status == "ready":
            model = self._model
            names = {name: words.can_chat for name, words in model.adapters.items()}
            report = {"status": status, "model": model.name, "chat": model.tokenizer.can_chat}
            return 200, report | ({"adapters": names} if names else {})
        if status == "draining":
            return 503, {"status": status, "reason": "the server was asked to stop"}
        loading: dict[str, Any] = {"status": status, "reason": "the model is being loaded"}
        if (step := self.step) is not None:
            loading["step"] = {"label": step.label, "done": step.done, "total": step.total, "unit": step.unit}
        return 503, loading

    @property
    def is_ready(self) -> bool:
        """Whether requests are accepted."""
        return self._status() == "ready" and self.failure is None

    def _status(self) -> str:
        if self.draining:
            return "draining"
        return "ready" if self._model is not None else "loading"


class LoadProgress:
    """A reporter that also stores how far loading is, for `/ready`."""

    def __init__(self, shown: Reporter, state: ServerState) -> None:
        self._shown, self._state = shown, state

    def note(self, text: str) -> None:
        """Report a choice and its reason."""
        self._shown.note(text)

    def warn(self, text: str) -> None:
        """Report something that is legal and probably not intended."""
        self._shown.warn(text)

    @contextmanager
    def task(self, label: str, *, total: float | None, unit: str) -> Iterator[ProgressTask]:
        """Open a measured task."""
        step = self._state.step = LoadStep(label, total, unit)
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
