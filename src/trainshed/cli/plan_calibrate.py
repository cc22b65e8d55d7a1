"""`trainshed plan calibrate`: learn from a measured run how far predictions are off, and keep it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from trainshed.cli.completion import ClusterName, GpuName, MachineName, ModelName
from trainshed.cli.console import Output
from trainshed.run_folder import RECIPE_FILE

if TYPE_CHECKING:
    from trainshed.observe.measured_run import MeasuredRun
    from trainshed.plan.calibration import Calibration
    from trainshed.plan.layout import RankLayout
    from trainshed.plan.performance.prediction import LayoutPrediction
    from trainshed.plan.training_shape import TrainingShape
    from trainshed.workflow.plan_request import PlanFlags


_PLAUSIBLE = (0.5, 2.0)
"""Outside of this it is more likely that the log and the job do not belong together."""


@dataclass(frozen=True)
class _LearntCalibration:
    measured: MeasuredRun
    training: TrainingShape
    layout: RankLayout
    prediction: LayoutPrediction
    calibration: Calibration


def calibrate(
    run: Path,
    *overrides: str,
    to: Path = Path("calibration.yaml"),
    like: str | None = None,
    on: ClusterName | None = None,
    model: ModelName | None = None,
    gpu: GpuName | None = None,
    machine: MachineName | None = None,
    gpus: int | None = None,
    seq: int | None = None,
    global_batch: int | None = None,
    precision: str | None = None,
    layout: str | None = None,
    engine: str | None = None,
    engine_version: str | None = None,
    output: Annotated[Output, Parameter(name=["-o", "--output"])] = "text",
) -> int:
    """Compare a run's step time with its prediction and keep the factor; `plan --calibration FILE` uses it.

    Parameters
    ----------
    run
        The folder of one of our runs, or a log of Megatron-LM, NeMo (DLLogger too), Megatron-Bridge or torchtune.
    overrides
        With --like: keys of that recipe to change, as in `plan`.
    to
        The file that the factor is added to.
    like
        For a log: the recipe that says what was trained; or describe it with the flags below, as in `plan`.
    on
        The cluster it ran on.
    model
        A preset.
    gpu
        The GPU; of our own runs the events say it.
    machine
        The machine, by name or file; `plan probe` writes one.
    gpus
        How many GPUs it ran on.
    seq
        Sequence length.
    global_batch
        Sequences per step; where the log says it, it need not be written.
    precision
        The dtype of the products.
    layout
        The layout it ran with, for example tp=4,pp=4.
    engine
        What stepped the model; a log of Megatron-LM says so itself.
    engine_version
        The engine's version, kept with the factor; of our own runs the events say it.
    output
        Report as text or json.
    """
    from trainshed.cli.console import print_report, reporter
    from trainshed.plan.calibration import store_calibration
    from trainshed.workflow.plan_request import PlanFlags

    flags = PlanFlags(
        recipe=like,
        overrides=overrides,
        on=on,
        model=model,
        gpu=gpu,
        machine=machine,
        gpus=None if gpus is None else str(gpus),
        seq=seq,
        global_batch=global_batch,
        precision=precision,
        layout=layout,
        engine=engine,
    )
    learnt = _from_run(run, flags) if run.is_dir() else _from_log(run, flags, engine_version)
    factor = learnt.calibration.factor
    if not _PLAUSIBLE[0] <= factor <= _PLAUSIBLE[1]:
        reporter().warn(f"a factor of {factor:g} is a lot: does the measured run belong to this job and layout?")
    stored = store_calibration(to, learnt.calibration)
    data = {
        "schema": "trainshed.plan.calibration/1",
        "file": str(to),
        "sha256": stored.digest,
        **_plain(learnt),
    }
    print_report(data, output, _text(learnt, to))
    return 0


def _from_run(folder: Path, flags: PlanFlags) -> _LearntCalibration:
    from trainshed.errors import InputError
    from trainshed.launch.attempt import read_plan
    from trainshed.observe.measured_run import measure_run
    from trainshed.plan.model_shape import model_shape
    from trainshed.plan.performance.engine_constants import engine_constants
    from trainshed.plan.training_shape import TrainingShape
    from trainshed.plugins import plugins_not_run
    from trainshed.recipe import load_recipe
    from trainshed.storage import LocalStore

    if not (folder / RECIPE_FILE).is_file():
        raise InputError("holds no recipe.yaml, so it is not a run", where=str(folder), hint="write STORE/runs/NAME/ID")
    unwanted = [f"--{name.replace('_', '-')}" for name in _LOG_FLAGS if getattr(flags, name) is not None]
    if unwanted or flags.overrides:
        raise InputError(
            "the run's folder says what was trained",
            where=", ".join(unwanted) or flags.overrides[0],
            hint="leave it out; --gpu, --machine and --on may say where it ran",
        )
    measured = measure_run(LocalStore(folder), "")
    with plugins_not_run():
        recipe, hardware = load_recipe(str(folder / RECIPE_FILE)), _where_it_ran(measured, flags)
    config = recipe.model.config
    assert config is not None, "a run's recipe is resolved"
    assert measured.attempt is not None, "our events say it"
    layout = read_plan(folder, measured.attempt)
    training = TrainingShape(
        model=model_shape(recipe.trained_architecture(config)),
        sequence_length=recipe.data.sequence_length or config.max_positions,
        global_batch=recipe.train.global_batch,
        precision=recipe.train.precision,
        hardware=hardware,
        gpus=layout.world_size,
        constants=engine_constants(recipe.engine.name),
    )
    return _learn_factor(
        measured, training, layout, recipe.engine.name, measured.version, f"{recipe.name}/{folder.absolute().name}"
    )


_LOG_FLAGS = ("recipe", "model", "gpus", "seq", "global_batch", "precision", "layout", "engine")


def _where_it_ran(measured: MeasuredRun, flags: PlanFlags) -> Any:
    """The machine that flags name, or the usual one of the GPU that the run's events name."""
    from trainshed.catalog.gpus import gpu_by_device_name
    from trainshed.catalog.machines import find_machine
    from trainshed.errors import InputError
    from trainshed.plan.training_shape import hardware_of, hardware_of_gpu
    from trainshed.recipe import as_cluster

    machine = flags.machine or (as_cluster(flags.on).gpu_machine if flags.on else None)
    if machine is not None:
        return hardware_of(find_machine(machine))
    if flags.gpu is not None:
        return hardware_of_gpu(flags.gpu)
    known = gpu_by_device_name(measured.device or "")
    if known is None:
        raise InputError(
            f"the run was on `{measured.device}`, which the catalog does not know",
            hint="`trainshed plan probe --to machine.yaml` there, then --machine machine.yaml here",
        )
    return hardware_of_gpu(known.name)


def _from_log(path: Path, flags: PlanFlags, version: str | None) -> _LearntCalibration:
    from dataclasses import replace

    from trainshed.errors import InputError
    from trainshed.observe.measured_run import measure_log
    from trainshed.plan.layout import resolve_layout
    from trainshed.workflow.plan_request import request_from_flags

    measured = measure_log(path)
    if flags.recipe is None and flags.global_batch is None:
        flags = replace(flags, global_batch=measured.global_batch)
    if flags.recipe is None and flags.engine is None:
        flags = replace(flags, engine=_engine_of(measured, path))
    request = request_from_flags(flags)
    if request.layout is None:
        raise InputError(
            "a log does not say which layout it ran with", where="--layout", hint="write for example --layout tp=4,pp=4"
        )
    training = request.training
    layout = resolve_layout(request.layout, request.config, world_size=training.gpus)
    if measured.global_batch not in (None, training.global_batch):
        raise InputError(
            f"the log is of a global batch of {measured.global_batch}, the job of {training.global_batch}",
            where=str(path),
            hint=f"write --global-batch {measured.global_batch}",
        )
    return _learn_factor(measured, training, layout, request.engine, version, path.name)


_ENGINES = {"megatron": "megatron", "torchtune": "torchtune"} | dict.fromkeys(
    ("nemo", "dllogger", "megatron-bridge"), "nemo"
)


def _engine_of(measured: MeasuredRun, path: Path) -> str:
    """The engine that writes such a log."""
    from trainshed.errors import InputError

    if measured.kind not in _ENGINES:
        raise InputError(
            f"{path} is a log of {measured.kind}, which is not an engine here",
            where="--engine",
            hint="write --engine with the one that its factor is for",
        )
    return _ENGINES[measured.kind]


def _learn_factor(
    measured: MeasuredRun,
    training: TrainingShape,
    layout: RankLayout,
    engine: str,
    version: str | None,
    learnt_from: str,
) -> _LearntCalibration:
    from trainshed.plan.calibration import Calibration, round_factor, utc_day
    from trainshed.plan.performance.prediction import predict

    prediction = predict(training, layout)
    # Our events are rank 0's, of the first stage; a foreign log's peak is the largest it prints.
    stages = prediction.stages[:1] if measured.kind == "torch" else prediction.stages
    allocated = max(stage.memory.allocated for stage in stages)
    memory = None if measured.memory_gib is None else round_factor(measured.memory_gib / allocated)
    entry = {
        "gpu": training.hardware.gpu_name,
        "engine": engine,
        "version": version,
        "factor": round_factor(measured.step_seconds / prediction.step_seconds),
        "memory_factor": memory,
        "from": learnt_from,
        "steps": measured.steps,
        "date": utc_day(measured.time) if measured.time is not None else measured.day,
    }
    return _LearntCalibration(measured, training, layout, prediction, Calibration.model_validate(entry))


def _plain(learnt: _LearntCalibration) -> dict[str, Any]:
    measured, prediction = learnt.measured, learnt.prediction
    return {
        "calibration": learnt.calibration.model_dump(by_alias=True),
        "measured": {"step_seconds": measured.step_seconds, "memory_gib": measured.memory_gib, "kind": measured.kind},
        "predicted": {"step_seconds": prediction.step_seconds, "memory_gib": prediction.memory.allocated},
        "layout": str(learnt.layout),
    }


def _text(learnt: _LearntCalibration, to: Path) -> str:
    calibration, measured = learnt.calibration, learnt.measured
    version = f" {calibration.version}" if calibration.version else ""
    lines = [
        f"{calibration.engine}{version} on {learnt.training.gpus} x {calibration.gpu}, {learnt.layout}",
        f"  measured   {measured.step_seconds:.4g} s a step, median of {measured.steps}",
        f"  predicted  {learnt.prediction.step_seconds:.4g} s",
        f"  factor     {calibration.factor:g}"
        + (f", memory {calibration.memory_factor:g}" if calibration.memory_factor else ""),
        f"kept in {to}; a plan uses it with --calibration {to}, or `calibration: {to}` in the cluster file",
    ]
    return "\n".join(lines)
