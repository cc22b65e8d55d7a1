"""The figures of a run, or of a log of any engine; what differs between the recipes of several runs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainshed.observe.metrics import RunMetrics, TrainingFacts
    from trainshed.storage import StoreOptions
    from trainshed.workflow.known_runs import KnownRun


@dataclass(frozen=True)
class MetricsFlags:
    """What the command line says about a training."""

    batch_size: int | None = None
    gpus: int | None = None
    gpu: str | None = None
    precision: str | None = None
    model: str | None = None
    sequence_length: int | None = None

    def __post_init__(self) -> None:
        """Refuse what no training has."""
        from trainshed.errors import InputError

        for name in ("batch_size", "gpus", "sequence_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{value} is not a number of anything", where=f"--{name.replace('_', '-')}")


@dataclass(frozen=True)
class MeasuredTraining:
    """One run or log with its figures."""

    name: str
    kind: str
    """`run`, or the program that wrote the log."""
    metrics: RunMetrics
    recipe: dict[str, Any] = field(default_factory=dict)
    """The keys of a run's recipe, flat; empty for a log."""
    notes: tuple[str, ...] = ()


def measure(
    text: str, flags: MetricsFlags, *, start: int | None = None, end: int | None = None, on: str = "local"
) -> MeasuredTraining:
    """Measure what `text` names: a log where it is a file, otherwise a run."""
    from trainshed.recipe import load_cluster
    from trainshed.workflow.known_runs import find_run
    from trainshed.workflow.prepare import store_options

    options = store_options(load_cluster(on))
    if _is_file(text, options):
        return _measure_log(text, flags, start, end, options)
    return measure_run(find_run(text, on=on), flags, start=start, end=end, options=options)


def _is_file(text: str, options: StoreOptions) -> bool:
    from trainshed.storage import open_store

    if "://" not in text:
        path = Path(text).expanduser()
        # A recipe file stands for its run.
        return path.is_file() and path.suffix not in (".yaml", ".yml")
    store, path = open_store(text, options)
    return store.head(path) is not None


def _measure_log(
    text: str, flags: MetricsFlags, start: int | None, end: int | None, options: StoreOptions
) -> MeasuredTraining:
    from trainshed.errors import InputError
    from trainshed.observe.engine_logs.run_logs import ReadLog
    from trainshed.observe.metrics import TrainingFacts

    log = ReadLog(str(Path(text).expanduser()) if "://" not in text else text, options)
    if flags.batch_size is not None and log.facts.global_batch not in (None, flags.batch_size):
        raise InputError(
            f"the log is of a global batch of {log.facts.global_batch}, not {flags.batch_size}",
            where="--batch-size",
            hint="leave it out",
        )
    facts, notes = _flag_facts(TrainingFacts(), flags)
    facts = log.training_facts(facts)
    if facts.sequence_length is None and facts.config is not None:
        notes.append(f"--sequence-length is not written: {facts.config.max_positions}, the longest of {facts.model}")
        facts = replace(facts, sequence_length=facts.config.max_positions)
    if log.program in ("nemo", "dllogger"):
        notes.append("NeMo's step time is itself a running mean (exp_manager.step_timing_kwargs.buffer_size)")
    elif log.program == "torchtune":
        notes.append("torchtune's step time is tqdm's, which smooths it; its rates count tokens with a label only")
    figures = _figures(log.events(facts), facts, start, end, text)
    return MeasuredTraining(Path(text).name, log.program, figures, notes=tuple(notes))


def measure_run(
    known: KnownRun,
    flags: MetricsFlags,
    *,
    start: int | None = None,
    end: int | None = None,
    options: StoreOptions | None = None,
) -> MeasuredTraining:
    """Measure a run by its events; `options` reach a bucket that the run itself does not say how to reach."""
    from trainshed.observe.engine_logs.run_logs import read_run_events
    from trainshed.observe.run_facts import read_run_recipe, run_facts
    from trainshed.recipe.load import to_plain
    from trainshed.storage import open_folder

    address = known.address if "://" in known.address else str(known.local_folder().absolute())
    store = open_folder(address, known.options or options)
    events = read_run_events(store, "")
    facts, notes = _flag_facts(run_facts(store, "", events), flags)
    recipe = read_run_recipe(store, "")
    if recipe is None:
        notes.append("the run's recipe.yaml cannot be read by this version: what was trained is not known")
    figures = _figures(events, facts, start, end, address)
    plain = {} if recipe is None else _flat(to_plain(recipe))
    return MeasuredTraining(known.run, "run", figures, plain, tuple(notes))


def _figures(
    events: list[dict[str, Any]], facts: TrainingFacts, start: int | None, end: int | None, where: str
) -> RunMetrics:
    """Return the figures; an impossible one is reported as an error in the flags or the log."""
    from trainshed.errors import InputError, TrainshedError
    from trainshed.observe.metrics import measure_events

    try:
        return measure_events(events, facts, start=start, end=end, where=where)
    except InputError:
        raise
    except TrainshedError as error:
        raise InputError(error.what, where=where, hint=error.hint) from None


def _flag_facts(facts: TrainingFacts, flags: MetricsFlags) -> tuple[TrainingFacts, list[str]]:
    """Return the facts with what flags add; a flag that contradicts the run is refused."""
    from trainshed.catalog import find_gpu, model_preset
    from trainshed.catalog.gpus import DenseTflops
    from trainshed.errors import InputError

    known_and_written = {
        "--batch-size": (facts.global_batch, flags.batch_size),
        "--gpus": (facts.gpus, flags.gpus),
        "--precision": (facts.precision, flags.precision),
        "--model": (facts.model, flags.model),
        "--sequence-length": (facts.sequence_length, flags.sequence_length),
    }
    for flag, (own, written) in known_and_written.items():
        if own is not None and written is not None and own != written:
            raise InputError(f"the run's folder says {own}, not {written}", where=flag, hint="leave it out")
    if flags.precision is not None and flags.precision not in DenseTflops.model_fields:
        known_precisions = ", ".join(DenseTflops.model_fields)
        raise InputError(
            f"`{flags.precision}` is not a precision", where="--precision", hint=f"one of {known_precisions}"
        )
    notes: list[str] = []
    if flags.gpu is not None:
        known = find_gpu(flags.gpu)
        if facts.gpu is not None and facts.gpu.name != known.name:
            raise InputError(f"the run was on {facts.gpu.name}, not {known.name}", where="--gpu", hint="leave it out")
        if facts.device is not None and facts.gpu is None:
            notes.append(f"the run's device is `{facts.device}`; its peak is that of {known.name}, as --gpu says")
        facts = replace(facts, gpu=known, device=known.name)
    if flags.model is not None and facts.config is None:
        facts = replace(facts, config=model_preset(flags.model), model=flags.model)
    return replace(
        facts,
        global_batch=facts.global_batch or flags.batch_size,
        gpus=facts.gpus or flags.gpus,
        precision=facts.precision or flags.precision,
        sequence_length=facts.sequence_length or flags.sequence_length,
    ), notes


def recipe_differences(measured: list[MeasuredTraining]) -> dict[str, list[Any]]:
    """Return the keys in which the recipes of runs differ, with the value of each; none where one is only a log."""
    recipes = [run.recipe for run in measured]
    if len(recipes) < 2 or not all(recipes):
        return {}
    keys = dict.fromkeys(key for recipe in recipes for key in recipe)
    values = {key: [recipe.get(key) for recipe in recipes] for key in keys if key != "name"}
    return {key: row for key, row in values.items() if any(value != row[0] for value in row)}


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {key: leaf for name, inner in value.items() for key, leaf in _flat(inner, f"{prefix}{name}.").items()}
    return {prefix.rstrip("."): value}
