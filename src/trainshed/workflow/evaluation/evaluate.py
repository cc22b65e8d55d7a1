"""Measuring weights: perplexity, tasks of lm-eval, questions. Each measure is an artefact of its own.

`evaluate` is what the command line, the `eval` stage of a run and Python call. Scores are stored beside the weights, or
in the folder of their run, with a manifest that is written last. A measure that was computed before is found by the
hash of its spec and not computed again, so a killed evaluation goes on with what is missing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import orjson

from trainshed.checkpoints.formats import detect_format
from trainshed.checkpoints.lora.checkpoint_spec import run_folder_of
from trainshed.checkpoints.native.folder import find_checkpoint
from trainshed.data.tokens.token_files import shard_prefixes
from trainshed.data.tokens.token_source import fingerprint_file
from trainshed.errors import InputError, MissingExtra, NotFound, RecipeError, TrainshedError
from trainshed.observe.evaluations import EvaluationRecord, format_score
from trainshed.recipe import Recipe
from trainshed.recipe.evaluation import VALIDATION
from trainshed.redaction import shown_address
from trainshed.reporting import SILENT, Reporter
from trainshed.run_folder import EVALUATIONS, evaluations_folder
from trainshed.storage import StoreOptions, open_folder, open_store, parse
from trainshed.workflow.evaluation.measures import (
    EvaluationRequest,
    Evaluator,
    MeasuredWeights,
    ModelLoading,
    token_prefix,
)


@dataclass(frozen=True)
class EvaluationReport:
    """The scores of some weights; `computed` are those that were not stored before."""

    checkpoint: str
    step: int | None
    records: tuple[EvaluationRecord, ...]
    computed: int
    at_least: float | None = None

    @property
    def question_score(self) -> float | None:
        """The share of questions that were answered as expected; None where none were asked."""
        return next((record.scores["score"] for record in self.records if record.kind == "questions"), None)

    @property
    def passed(self) -> bool:
        """Whether enough questions were answered as expected."""
        return self.at_least is None or (self.question_score or 0.0) >= self.at_least

    def text(self) -> str:
        """Return the main scores on one line."""
        parts = [
            f"{record.label}: {name} {format_score(value)}"
            for record in self.records
            for name, value in [record.main_score]
        ]
        return "; ".join(parts)

    def gate_text(self) -> str | None:
        """Say whether the gate is passed; None where there is no gate."""
        if self.at_least is None or self.question_score is None:
            return None
        verb = "passed" if self.passed else "NOT passed"
        return f"gate {verb}: {self.question_score:.2f} of the questions, at least {self.at_least:.2f} are wanted"


def check_eval_installed(*, tasks: bool) -> None:
    """Raise where this machine lacks what an evaluation needs."""
    if find_spec("torch") is None:
        raise MissingExtra.named("serve", "evaluating a model")
    if tasks and find_spec("lm_eval") is None:
        raise MissingExtra.named("eval", "tasks of lm-eval")


def check_eval_inputs(recipe: Recipe, options: StoreOptions | None = None) -> None:
    """Raise what is wrong with a recipe's `eval` where it runs, before anything is trained: packages, tokens, tasks."""
    section = recipe.eval
    if section is None:
        return
    check_eval_installed(tasks=bool(section.tasks))
    for address in section.perplexity or ():
        if address != VALIDATION:
            with _errors_at(recipe, "eval.perplexity"):
                shard_prefixes(token_prefix(address, options), options)
    if section.tasks:
        from trainshed.serve.evaluation.lm_eval import find_tasks

        with _errors_at(recipe, "eval.tasks"):
            find_tasks(section.tasks, section.include_path)


@contextmanager
def _errors_at(recipe: Recipe, key: str) -> Iterator[None]:
    """Report an error about something that a recipe names at its key, in the recipe's words."""
    try:
        yield
    except (InputError, NotFound) as error:
        what = f"{error.where}: {error.what}" if error.where else error.what
        hint = (error.hint or "").replace("--include-path FOLDER", "`eval.include_path`")
        raise RecipeError(what, where=recipe.where(key), hint=hint or None) from None


def evaluate(
    checkpoint: str,
    request: EvaluationRequest,
    *,
    loading: ModelLoading | None = None,
    home: Path | None = None,
    run: Path | None = None,
    step: int | None = None,
    options: StoreOptions | None = None,
    reporter: Reporter = SILENT,
) -> EvaluationReport:
    """Measure weights at an address by everything that is asked for; what is stored already is not computed again.

    `run` is the run that the weights belong to, and `step` its step (default: as their own folder says). `home` is the
    folder of the scores (default: that of the run's step, otherwise `evaluations` beside the weights).
    """
    request.check()
    check_eval_installed(tasks=bool(request.tasks))
    loading = loading or ModelLoading()
    weights = _find_weights(checkpoint, loading, home, run, step, options)
    evaluator = Evaluator(weights, request, loading, options, reporter)
    with evaluator:
        records = tuple(evaluator.run())
    return EvaluationReport(
        shown_address(checkpoint), weights.step, records, evaluator.computed, request.at_least if records else None
    )


def _find_weights(
    address: str,
    loading: ModelLoading,
    home: Path | None,
    run: Path | None,
    step: int | None,
    options: StoreOptions | None,
) -> MeasuredWeights:
    identity, own_step = _identify(address, options)
    if loading.base is not None:
        identity += f"+{_identify(loading.base, options)[0]}"
    step = own_step if step is None else step
    owner = run or run_folder_of(address)
    if home is None and owner is not None and (step is not None or run is not None):
        home = owner / (EVALUATIONS if step is None else evaluations_folder(step))
    elif home is None:
        if parse(address).scheme != "file":
            raise InputError(
                "scores are stored beside the weights, and these are not on a disk",
                where=shown_address(address),
                hint="write --to FOLDER",
            )
        home = Path(os.path.abspath(str(parse(address)))) / EVALUATIONS
    return MeasuredWeights(address, identity, step, owner, home)


def _identify(address: str, options: StoreOptions | None) -> tuple[str, int | None]:
    """Return a hash of the weights at an address, and the step of a checkpoint of ours.

    A checkpoint is what its manifest says. Other files on a disk are known by their fingerprints, those elsewhere by
    their versions.
    """
    try:
        format = detect_format(address, options)
    except NotFound:
        format = "adapter"  # PEFT's folder
    if format == "native":
        checkpoint = find_checkpoint(*open_store(address, options))
        return checkpoint.manifest.sha256, checkpoint.step
    store = open_folder(address, options)
    own = [info for info in store.list() if not info.path.startswith(f"{EVALUATIONS}/")]
    if not own:
        raise NotFound("there are no weights", where=shown_address(address))
    if parse(address).scheme == "file":
        root = str(parse(address))
        facts: list[Any] = [[info.path, *fingerprint_file(os.path.join(root, info.path)).content] for info in own]
    else:
        facts = [store.url, *([info.path, info.size, info.version] for info in own)]
    return hashlib.sha256(orjson.dumps(sorted(facts, key=str))).hexdigest(), None


def require_passed(report: EvaluationReport) -> EvaluationReport:
    """Raise where too few questions were answered as expected."""
    if not report.passed:
        text = report.gate_text() or ""
        raise TrainshedError(
            text, where=report.checkpoint, hint="the answers are in evaluation.json beside the weights"
        )
    return report
