"""The `eval` of a recipe: its last checkpoint in a stage after training, others while the training goes on.

On this machine a process of its own evaluates checkpoints beside the training, at a low priority and without its GPUs.
A checkpoint that is due is held by hard links as soon as it is committed, so it may be pruned at any time. Whatever is
held when the training ends is evaluated in the stage, and so is what a killed start has left. On a cluster the stage
evaluates every checkpoint that is due.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from trainshed.checkpoints.native.folder import checkpoints_folder, complete_checkpoints
from trainshed.checkpoints.native.hold import hold_checkpoint, is_due, must_be_held, release_checkpoint
from trainshed.errors import TrainshedError
from trainshed.launch.attempt import worker_command
from trainshed.observe.events import EventWriter
from trainshed.observe.stages import NO_ATTEMPT
from trainshed.recipe import Recipe, load_recipe
from trainshed.reporting import SILENT, Reporter
from trainshed.run_folder import (
    CHECKPOINTS,
    EVALUATING,
    LOGS,
    PREPARED_FILE,
    RECIPE_FILE,
    step_name,
    step_number,
)
from trainshed.storage import LocalStore, StoreOptions, join
from trainshed.storage.manifest import MANIFEST
from trainshed.workflow.evaluation.evaluate import EvaluationReport, evaluate, require_passed
from trainshed.workflow.evaluation.measures import EvaluationRequest, ModelLoading
from trainshed.workflow.prepare import prepared_steps
from trainshed.workflow.run_checkpoints import checkpoint_home
from trainshed.workflow.serve import export_address
from trainshed.workflow.stages import trained_weights

EVALUATION_LOG = f"{LOGS}/eval/part-0000.log"
"""What the process beside the training prints."""
_END = "end"
_NICE = 10
"""The process beside the training takes what the training leaves."""


def evaluate_run(
    recipe: Recipe, run: Path, *, options: StoreOptions | None = None, reporter: Reporter = SILENT
) -> EvaluationReport:
    """Evaluate what `eval.every` asks for and is not evaluated yet, then the weights of the run.

    They are those that `export` takes: of the best checkpoint where the run keeps one, otherwise of the last. Raises
    where too few questions are answered as expected.
    """
    request, loading = EvaluationRequest.of_recipe(recipe, run), run_loading(recipe)
    for step, address in due_checkpoints(recipe, run, options).items():
        reporter.note(f"evaluating the checkpoint of step {step:,}")
        evaluate(address, request, loading=loading, run=run, step=step, options=options, reporter=reporter)
        release_checkpoint(run, step)
    address, step = _final_weights(recipe, run, options)
    report = evaluate(address, request, loading=loading, run=run, step=step, options=options, reporter=reporter)
    return require_passed(report)


def run_loading(recipe: Recipe) -> ModelLoading:
    """Return how a recipe's checkpoints are loaded: on processors unless a GPU is asked for."""
    assert recipe.eval is not None, "only a recipe with `eval` is evaluated"
    return ModelLoading(device="cuda" if recipe.eval.gpus else "cpu")


def due_checkpoints(recipe: Recipe, run: Path, options: StoreOptions | None = None) -> dict[int, str]:
    """Return the checkpoints that `eval.every` names and that are there, by step: those that are held first."""
    if recipe.eval is None or recipe.eval.every is None:
        return {}
    held = {
        step: str(folder)
        for folder in sorted((run / EVALUATING).glob("step-*"))
        if (step := step_number(folder.name)) is not None and (folder / MANIFEST).is_file()
    }
    store, folder = checkpoint_home(recipe, run.name, options) or (LocalStore(run), "")
    kept = complete_checkpoints(store, checkpoints_folder(folder))
    stored = {one.step: join(store.url, one.path) for one in kept if is_due(recipe, one.step)}
    if checkpoint_home(recipe, run.name, options) is None:
        stored = {step: str(run / CHECKPOINTS / step_name(step)) for step in stored}
    return dict(sorted((stored | held).items()))


def _final_weights(recipe: Recipe, run: Path, options: StoreOptions | None) -> tuple[str, int | None]:
    """Return where the weights of a run are, and their step; None: as their checkpoint says."""
    if recipe.engine.name == "torch":
        apart = checkpoint_home(recipe, run.name, options)
        return (str(run) if apart is None else join(apart[0].url, apart[1])), None
    step = prepared_steps(run) if (run / PREPARED_FILE).is_file() else recipe.train.steps
    address = export_address(recipe, str(run)) if recipe.export is not None else trained_weights(recipe, run)
    return address, step


class EvaluationBesideTraining:
    """Has a process of its own evaluate checkpoints while the training goes on.

    A process that fails does not end the training: the stage after it evaluates what is still held, and says why it
    cannot.
    """

    def __init__(self, recipe: Recipe, run: Path, reporter: Reporter = SILENT) -> None:
        self._on_gpu = recipe.eval is not None and recipe.eval.gpus > 0
        self._recipe, self._run, self._reporter = recipe, run, reporter
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> EvaluationBesideTraining:
        for step in due_checkpoints(self._recipe, self._run):
            if must_be_held(self._recipe, step):
                hold_checkpoint(self._run, step)
            self._take(step)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        with suppress(OSError):
            if kind is None:
                process.stdin.write(f"{_END}\n".encode())
            process.stdin.close()  # without `end` before it, the process stops at once
        if kind is None and process.poll() is None:
            self._reporter.note(f"an evaluation is still under way beside the training ({EVALUATION_LOG})")
        process.wait()

    def on_event(self, event: dict[str, Any]) -> None:
        """Take an event of the training."""
        committed = event["kind"] == "checkpoint" and event.get("phase") == "committed"
        if committed and is_due(self._recipe, event["step"]):
            self._take(event["step"])

    def _take(self, step: int) -> None:
        try:
            process = self._process = self._process or self._start()
            assert process.stdin is not None
            process.stdin.write(f"{step}\n".encode())
            process.stdin.flush()
        except OSError as error:
            self._reporter.warn(f"nothing is evaluated beside the training ({error}); it is done afterwards")

    def _start(self) -> subprocess.Popen[bytes]:
        log = self._run / EVALUATION_LOG
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = {"PYTHONUNBUFFERED": "1", **os.environ}
        if not self._on_gpu:
            environment |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
        with log.open("ab") as output:
            return subprocess.Popen(
                worker_command("eval", "--run", str(self._run)),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C in the terminal is for the training
            )


def evaluate_held(run: Path, reporter: Reporter = SILENT) -> int:
    """Evaluate checkpoints as their steps are read from stdin; what `EvaluationBesideTraining` starts.

    Ends after the word `end` with the evaluation that is under way, and at once when stdin is closed: whoever started
    it is gone then, and the next start of the run finds what is still held.
    """
    with suppress(OSError):
        os.nice(_NICE)
    steps: SimpleQueue[int] = SimpleQueue()
    ending = threading.Event()

    def read() -> None:
        for line in sys.stdin:
            if line.strip() == _END:
                ending.set()
                steps.put(-1)
                return
            steps.put(int(line))
        os._exit(1)

    threading.Thread(target=read, name="evaluated-steps", daemon=True).start()
    recipe = load_recipe(str(run / RECIPE_FILE))
    request, loading = EvaluationRequest.of_recipe(recipe, run), run_loading(recipe)
    while not ending.is_set() and (step := steps.get()) >= 0:
        address = due_checkpoints(recipe, run).get(step)
        if address is None:
            continue
        reporter.note(f"evaluating the checkpoint of step {step:,}")
        try:
            evaluate(address, request, loading=loading, run=run, step=step, reporter=reporter)
        except TrainshedError as error:
            text = f"the checkpoint of step {step:,} could not be evaluated beside the training: {error.what}"
            reporter.warn(text)
            with EventWriter(LocalStore(run), "", attempt=NO_ATTEMPT, rank=None) as events:
                events.emit("warning", text=text)
        else:
            release_checkpoint(run, step)
    return 0
