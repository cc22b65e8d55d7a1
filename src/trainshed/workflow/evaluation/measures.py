"""What weights are measured by, and the measures themselves; `evaluate.py` finds the weights and the stored scores."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import orjson

import trainshed
from trainshed.checkpoints.formats import detect_format
from trainshed.data.order import DataOrder, build_order, hash_batch, packed_order
from trainshed.data.sampling.packing import PackRule
from trainshed.data.sampling.schedule import BatchSchedule
from trainshed.data.tokens.token_files import shard_prefixes
from trainshed.data.tokens.token_source import TokenSource, fingerprint_shard, has_learned
from trainshed.errors import InputError
from trainshed.observe.evaluations import (
    EvaluationKind,
    EvaluationRecord,
    evaluation_folder,
    finite_scores,
    read_evaluation,
    write_evaluation,
)
from trainshed.observe.events import EventWriter
from trainshed.observe.stages import NO_ATTEMPT
from trainshed.recipe import Recipe
from trainshed.recipe.evaluation import VALIDATION, Question, load_questions
from trainshed.redaction import shown_address
from trainshed.reporting import Reporter
from trainshed.storage import LocalStore, StoreOptions, open_folder, parse
from trainshed.workflow.prepare import PreparedRun, open_run_folder

if TYPE_CHECKING:
    import numpy as np

    from trainshed.serve.evaluation.completions_client import CompletionsServer
    from trainshed.serve.evaluation.lm_eval import LoadedTask, ServedLM, ServerLM, TaskOptions
    from trainshed.serve.evaluation.perplexity import MeasuredLoss
    from trainshed.serve.loading import LoadedModel
    from trainshed.serve.scheduler import ModelGenerator
    from trainshed.serve.tokenizer import ChatTokenizer

DEFAULT_ANSWER_TOKENS = 64
EVALUATION_VERSION = 1
"""Rises when the same weights and measure would give other scores; it is part of every spec."""
_SHOWN_SETS = 4


@dataclass(frozen=True)
class EvaluationRequest:
    """What weights are measured by.

    `perplexity` names `validation` (the sets of `validation_run`, or of the weights' own run) or prepared tokens.
    `sequence_length` and `document_mask` are for prepared tokens; left out: as the run of the weights was trained.
    """

    perplexity: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    questions: tuple[Question, ...] = ()
    questions_name: str = "questions"
    include_path: str | None = None
    fewshot: int | None = None
    limit: int | None = None
    chat: bool = False
    answer_tokens: int = DEFAULT_ANSWER_TOKENS
    at_least: float | None = None
    sequence_length: int | None = None
    document_mask: bool | None = None
    validation_run: Path | None = None
    url: str | None = None
    """A server that answers tasks and questions in place of this process."""
    api_key: str | None = field(default=None, repr=False)
    """What its requests bring; it is stored nowhere."""

    @classmethod
    def of_recipe(cls, recipe: Recipe, folder: Path) -> EvaluationRequest:
        """Return what a recipe's `eval` asks for; `folder` holds the file of questions."""
        section = recipe.eval
        assert section is not None, "only a recipe with `eval` is evaluated"
        asked = section.questions
        return cls(
            perplexity=section.perplexity or (),
            tasks=section.tasks or (),
            questions=load_questions(folder / asked) if asked is not None else (),
            questions_name=Path(asked).stem if asked is not None else "questions",
            include_path=section.include_path,
            fewshot=section.fewshot,
            limit=section.limit,
            answer_tokens=section.answer_tokens or DEFAULT_ANSWER_TOKENS,
            at_least=section.at_least,
        )

    def check(self) -> None:
        """Refuse a request that measures nothing, or that a server cannot answer."""
        if not (self.perplexity or self.tasks or self.questions):
            raise InputError(
                "there is nothing to measure",
                hint="write --perplexity validation or a prefix, --tasks NAME, or --questions FILE",
            )
        if self.url is not None and self.perplexity:
            raise InputError(
                "perplexity is measured on the weights themselves, not through a server",
                where="--url",
                hint="leave out --perplexity, or --url",
            )
        if self.at_least is not None and not self.questions:
            raise InputError("--at-least is about questions, and there are none", hint="write --questions FILE")


@dataclass(frozen=True)
class ModelLoading:
    """How weights are loaded, where an evaluation has to be computed."""

    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    device: str | None = None
    tokenizer: str | None = None
    base: str | None = None
    vocab_size: int | None = None
    ignore_verdict: bool = False
    eager: bool = False


@dataclass(frozen=True)
class MeasuredWeights:
    """Which weights are measured: their address, what identifies them, and where their scores are kept."""

    address: str
    identity: str
    step: int | None
    run: Path | None
    home: Path

    @property
    def shown(self) -> str:
        """What they are called in a record: the run of a checkpoint, wherever it is held, or their address."""
        if self.run is not None and self.step is not None:
            run = self.run.absolute()
            return f"{run.parent.name}/{run.name}"
        return shown_address(self.address)


@dataclass(frozen=True)
class _Measure:
    """One measure: its spec decides its scores, `compute` computes them."""

    kind: EvaluationKind
    name: str
    spec: Mapping[str, Any]
    compute: Any
    """Returns the scores and the details."""


@dataclass
class Evaluator:
    """Computes what is not stored; the model is loaded when it is first needed."""

    weights: MeasuredWeights
    request: EvaluationRequest
    loading: ModelLoading
    options: StoreOptions | None
    reporter: Reporter
    computed: int = 0
    _stack: ExitStack = field(default_factory=ExitStack)
    _model: LoadedModel | None = None
    _lm: ServedLM | None = None
    _opened_generator: ModelGenerator | None = None
    _opened_run: PreparedRun | None = None

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self) -> Iterator[EvaluationRecord]:
        """Yield every evaluation, stored or computed."""
        for measure in self._measures():
            folder = evaluation_folder(measure.kind, measure.name, measure.spec)
            store = LocalStore(self.weights.home)
            record = read_evaluation(store, folder)
            if record is not None:
                self.reporter.note(f"{record.label} was measured before: {self.weights.home / folder}")
                yield record
                continue
            began = time.monotonic()
            scores, details = measure.compute()
            record = EvaluationRecord(
                kind=measure.kind,
                name=measure.name,
                scores=finite_scores(scores),
                spec=measure.spec,
                checkpoint=self.weights.shown,
                step=self.weights.step,
                details=details,
                versions=_versions(),
            )
            write_evaluation(store, folder, record)
            self.computed += 1
            self._emit(record, time.monotonic() - began)
            yield record

    def _emit(self, record: EvaluationRecord, seconds: float) -> None:
        """Tell those who follow the run."""
        if self.weights.run is None or record.step is None or not self.weights.home.is_relative_to(self.weights.run):
            return
        with EventWriter(LocalStore(self.weights.run), "", attempt=NO_ATTEMPT, rank=None) as events:
            events.emit("evaluation", record.step, name=record.label, scores=dict(record.scores), seconds=seconds)

    def _measures(self) -> Iterator[_Measure]:
        for name in self.request.perplexity:
            yield from self._validation_measures() if name == VALIDATION else [self._token_measure(name)]
        if self.request.tasks:
            from trainshed.serve.evaluation.lm_eval import load_tasks

            with self.reporter.task("tasks", total=len(self.request.tasks), unit="tasks") as task:
                loaded = load_tasks(self.request.tasks, self.request.include_path)
                task.advance(len(loaded))
            yield from (self._task_measure(one) for one in loaded)
        if self.request.questions:
            yield self._question_measure()

    def _spec(self, **own: Any) -> dict[str, Any]:
        """Return what every spec holds, and what is one measure's own."""
        spec = {
            "version": EVALUATION_VERSION,
            "weights": self.weights.identity,
            "dtype": self._dtype_name(),
            "tokenizer": self.loading.tokenizer,
            **own,
        }
        if self.request.url is not None:
            spec["url"] = shown_address(self._server(self.request.url).root)
        return {key: value for key, value in spec.items() if value is not None}

    def _dtype_name(self) -> str:
        if self.loading.dtype is not None:
            return self.loading.dtype
        import torch

        on_gpu = torch.cuda.is_available() and self.loading.device != "cpu"
        return "as stored" if on_gpu else "fp32"

    def _validation_measures(self) -> Iterator[_Measure]:
        run = self._run()
        step = self.weights.step
        phases = [phase for phase in run.phases if step is None or step <= phase.span.end]
        validations = phases[0].validations if phases else run.validations
        if not validations:
            raise InputError("the run has no validation set", where=str(run.folder), hint="name prepared tokens")
        for name, order in validations.items():
            batches = run.recipe.data.validations[name].batches
            samples = [order.sample_indices(batch) for batch in range(batches)]
            digest = hashlib.sha256("".join(hash_batch(order.read(part)) for part in samples).encode()).hexdigest()
            yield self._loss_measure(name, order, samples, {"batches": batches, "tokens": digest})

    def _run(self) -> PreparedRun:
        if self._opened_run is None:
            folder = self.request.validation_run or self.weights.run
            if folder is None:
                raise InputError(
                    "these weights belong to no run here, so `validation` names no tokens",
                    where=shown_address(self.weights.address),
                    hint="write --validation-of RUN, or name prepared tokens: --perplexity PREFIX",
                )
            self._opened_run = open_run_folder(folder)
        return self._opened_run

    def _token_measure(self, address: str) -> _Measure:
        prefix = token_prefix(address, self.options)
        shards = shard_prefixes(prefix, self.options)
        files = [
            list(fingerprint.content)
            for shard in shards
            for fingerprint in fingerprint_shard(shard, None, self.options)
        ]
        own = self._own_recipe()
        length = self.request.sequence_length or (own.data.sequence_length if own is not None else None)
        mask = self.request.document_mask
        if mask is None:
            mask = own.document_mask if own is not None else False
        length = length or self._loaded().config.max_positions
        learned = has_learned(shards[0], None, self.options)
        spec = {"tokens": hashlib.sha256(orjson.dumps(files)).hexdigest(), "document_mask": mask or learned}
        order = self._order(prefix, length, mask=mask, learned=learned)
        from trainshed.serve.evaluation.perplexity import every_row

        return self._loss_measure(os.path.basename(prefix), order, every_row(order), spec)

    def _own_recipe(self) -> Recipe | None:
        from trainshed.plugins import plugins_not_run
        from trainshed.recipe import load_recipe
        from trainshed.run_folder import RECIPE_FILE

        if self.weights.run is None:
            return None
        with plugins_not_run():
            return load_recipe(str(self.weights.run / RECIPE_FILE))

    def _order(self, prefix: str, length: int, *, mask: bool, learned: bool) -> DataOrder:
        source = TokenSource.open("evaluated", [prefix], name=prefix, options=self.options)
        indexes = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="trainshed-eval-")))
        shared: dict[str, Any] = {
            "indexes": indexes,
            "seed": 0,
            "sequence_length": length,
            "schedule": BatchSchedule(1),
            "options": self.options,
            "reporter": self.reporter,
        }
        if learned:
            return packed_order([source], rule=PackRule(packed=True, pairs=False), build=True, **shared)
        rows = max(0, source.tokens - 1) // length
        if rows == 0:
            raise InputError(
                f"there are {source.tokens:,} tokens, and a row takes {length + 1:,}",
                where=prefix,
                hint="write a smaller --sequence-length",
            )
        return build_order([source], steps=rows, document_mask=mask, **shared)

    def _loss_measure(
        self, name: str, order: DataOrder, samples: Sequence[np.ndarray], own: Mapping[str, Any]
    ) -> _Measure:
        spec = self._spec(kind="perplexity", sequence_length=order.sequence_length, **own)

        def compute() -> tuple[dict[str, float], dict[str, Any]]:
            loss = self._measured_loss(name, order, samples)
            return loss.scores(), {"tokens": loss.tokens, "bytes": loss.bytes}

        return _Measure("perplexity", name, spec, compute)

    def _measured_loss(self, name: str, order: DataOrder, samples: Sequence[np.ndarray]) -> MeasuredLoss:
        import numpy as np

        from trainshed.data.tokenize.token_bytes import token_byte_lengths
        from trainshed.serve.evaluation.perplexity import measure_loss

        model = self._loaded()
        lengths = None if model.tokenizer is None else token_byte_lengths(model.tokenizer.tokenizer)
        if lengths is not None:
            missing = max(0, model.config.vocab_size - len(lengths))
            lengths = np.pad(lengths, (0, missing))
        return measure_loss(
            model.decoder, order, samples, token_bytes=lengths, label=f"perplexity {name}", reporter=self.reporter
        )

    def _task_measure(self, task: LoadedTask) -> _Measure:
        from trainshed.serve.evaluation.lm_eval import TaskOptions

        asked = TaskOptions(self.request.fewshot, self.request.limit, self.request.chat)
        spec = self._spec(
            kind="task",
            task=task.sha256,
            fewshot=asked.fewshot,
            limit=asked.limit,
            chat=asked.chat or None,
            lm_eval=version("lm_eval"),
        )
        return _Measure("task", task.name, spec, lambda: self._task_scores(task, asked))

    def _task_scores(self, task: LoadedTask, asked: TaskOptions) -> tuple[dict[str, float], dict[str, Any]]:
        from trainshed.serve.evaluation.lm_eval import run_task

        if self.request.url is None:
            result = run_task(self._served_lm().named(task.name), task, asked)
        else:
            with self._server_lm(self._server(self.request.url), task.name) as model:
                result = run_task(model, task, asked)
        return result.scores, result.details

    def _served_lm(self) -> ServedLM:
        if self._lm is None:
            from trainshed.serve.evaluation.likelihood import LikelihoodScorer
            from trainshed.serve.evaluation.lm_eval import ServedLM

            model, words = self._loaded(), self._words()
            generator = self._generator()
            scorer = LikelihoodScorer(model.decoder, max_length=generator.max_length)
            self._lm = ServedLM(generator, scorer, words, reporter=self.reporter)
        return self._lm

    def _server(self, url: str) -> CompletionsServer:
        from trainshed.serve.evaluation.completions_client import CompletionsServer

        return CompletionsServer(url, self.request.api_key)

    @contextmanager
    def _server_lm(self, server: CompletionsServer, task: str) -> Iterator[ServerLM]:
        from trainshed.serve.evaluation.lm_eval import ServerLM, quiet, tokenizer_for_transformers

        served = server.model()
        # A server may be started with fewer positions than the model has.
        longest = min(self._max_length(), served.max_length or self._max_length())
        with tokenizer_for_transformers(self._words()) as folder:
            with quiet():
                model = ServerLM(
                    server,
                    model=served.name,
                    tokenizer_folder=folder,
                    max_length=longest,
                    name=task,
                    reporter=self.reporter,
                )
            yield model

    def _max_length(self) -> int:
        from trainshed.checkpoints.inspection import inspect_weights

        return inspect_weights(self.weights.address, self.options).config.max_positions

    def _question_measure(self) -> _Measure:
        asked = [[question.ask, *question.expect] for question in self.request.questions]
        spec = self._spec(kind="questions", questions=asked, answer_tokens=self.request.answer_tokens)
        return _Measure("questions", self.request.questions_name, spec, self._question_scores)

    def _question_scores(self) -> tuple[dict[str, float], dict[str, Any]]:
        from trainshed.serve.evaluation.questions import (
            ask_questions,
            generator_answers,
            question_details,
            question_scores,
        )

        most = self.request.answer_tokens
        if self.request.url is not None:
            from trainshed.serve.evaluation.completions_client import server_answers

            answer = server_answers(self._server(self.request.url), max_tokens=most, chat=self._words().can_chat)
        else:
            answer = generator_answers(self._generator(), self._words(), max_tokens=most)
        asked = ask_questions(self.request.questions, answer, self.reporter)
        return question_scores(asked), question_details(asked)

    def _generator(self) -> ModelGenerator:
        if self._opened_generator is None:
            model, sequences = self._loaded(), None
            if self.request.tasks and model.decoder.spec.device.type == "cpu":
                from trainshed.serve.evaluation.lm_eval import CPU_SEQUENCES

                sequences = CPU_SEQUENCES
            self._opened_generator = model.generator(
                max_sequences=sequences, eager=self.loading.eager, reporter=self.reporter
            )
            self._stack.callback(self._opened_generator.close)
        return self._opened_generator

    def _loaded(self) -> LoadedModel:
        if self._model is None:
            from trainshed.serve.loading import load_model

            self._model = load_model(
                self.weights.address,
                dtype=self.loading.dtype,
                device=self.loading.device,
                tokenizer=self.loading.tokenizer,
                base=self.loading.base,
                vocab_size=self.loading.vocab_size,
                ignore_verdict=self.loading.ignore_verdict,
                options=self.options,
                reporter=self.reporter,
            )
        return self._model

    def _words(self) -> ChatTokenizer:
        from trainshed.serve.loading import find_tokenizer, no_tokenizer

        if self._model is not None:
            words, format = self._model.tokenizer, self._model.format
        else:
            address = self.weights.address
            format = detect_format(address, self.options)
            words = find_tokenizer(address, format, tokenizer=self.loading.tokenizer, options=self.options)
        if words is None:
            raise no_tokenizer(shown_address(self.weights.address), format)
        return words


def token_prefix(address: str, options: StoreOptions | None) -> str:
    """Return the prefix of prepared tokens: as it is written, or the one in a folder (an artefact's, say)."""
    store = open_folder(address, options) if parse(address).scheme != "file" or Path(address).is_dir() else None
    if store is None:
        return address
    names = sorted(info.path.removesuffix(".idx") for info in store.list() if info.path.endswith(".idx"))
    if not names:
        return address
    from trainshed.data.tokens.token_files import set_prefix

    prefixes = {set_prefix(name) or name for name in names}
    if len(prefixes) > 1:
        raise InputError(
            f"there are several sets of tokens: {', '.join(sorted(prefixes)[:_SHOWN_SETS])}",
            where=shown_address(address),
            hint="name one of them",
        )
    return f"{address.rstrip('/')}/{prefixes.pop()}"


def _versions() -> dict[str, str]:
    versions = {"trainshed": trainshed.__version__}
    for name in ("torch", "lm_eval"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
