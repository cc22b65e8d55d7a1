"""The events of a run, which every exporter, the terminal view and the page read.

One event is one line of JSON: `{v, time, attempt, rank, kind, step, …}` with the keys of its kind, which are defined
here and nowhere else. `time` is in seconds since 1970; a rank of null is the launcher. JSON has no NaN: a loss that is
not finite is null, and a `non_finite` event says what it was.

Rank 0 writes into the store as it goes. The other ranks keep their last events in a ring buffer that they `dump` when
they fail.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import orjson

from trainshed.observe.event_log import EVENT_VERSION, SegmentWriter, events_folder, open_segment_writer, ring_dump_path
from trainshed.storage import Store


@dataclass(frozen=True, kw_only=True)
class Event:
    """The base of all kinds; a field with a default is left out of the line if it is None."""

    kind: ClassVar[str]
    needs_step: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class StartEvent(Event):
    """An attempt begins: what runs, and on what."""

    kind = "start"
    run: str
    layout: str
    world_size: int
    versions: Mapping[str, str]
    device: str
    parameters: int
    plugins: Mapping[str, str] | None = None
    """The recipe's plugins, with the hash of their source."""
    engine: str | None = None
    """What trains, if it is not our own engine."""
    hosts: list[str] | None = None
    """The host of each node, in the order of node ranks."""


@dataclass(frozen=True, kw_only=True)
class StageEvent(Event):
    """A stage of the workflow before or after training; `what` says what came out, or why it was skipped or failed.

    Those of `attempt: 0` belong to no attempt: they are done before the first one, and by `run` after the last.
    """

    kind = "stage"
    name: str
    """`prepare`, `index`, `export`, …: as the stages of a job are called."""
    state: Literal["started", "done", "skipped", "failed"]
    seconds: float | None = None
    what: str | None = None


@dataclass(frozen=True, kw_only=True)
class PhaseEvent(Event):
    """One phase of the start is done. Up to `preflight` the node agent reports it, after that rank 0."""

    kind = "phase"
    name: Literal[
        "install",
        "image",
        "meeting",
        "preflight",
        "rendezvous",
        "process_groups",
        "load",
        "compile",
        "first_step",
    ]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class StepEvent(Event):
    """One optimizer step. `tokens` is what the run has consumed so far; MFU is a fraction, null if it is unknown.

    Steps that are read from another engine's log (`engine_logs/`) have null for what that log does not say, and no
    `batch_hash`. Where it has one line for several steps, `steps` is how many, and the figures are their means;
    `global_batch` is the number of sequences in a step, where the log has it.

    `learned_tokens` are the tokens of this step that carried a label, where not all of them do.

    With `mode: dpo` the loss is that of the step's `pairs` of answers, and the last keys are means over them. The
    reward of an answer is beta · (its log-probability - that of the reference model): `reward_chosen` is that of the
    better one, `reward_margin` the difference, `reward_accuracy` the share of pairs in which the better one has the
    higher reward. `logp_chosen` and `logp_rejected` are the log-probabilities themselves: sums over an answer's tokens,
    or means with `train.dpo.length_normalized`.
    """

    kind = "step"
    needs_step = True
    loss: float | None
    grad_norm: float | None
    lr: float | None
    tokens: int | None
    step_seconds: float | None
    tokens_per_second_per_gpu: float | None
    mfu: float | None
    mfu_full_attention: float | None
    skipped: bool
    batch_hash: str | None = None
    steps: int | None = None
    global_batch: int | None = None
    learned_tokens: int | None = None
    pairs: int | None = None
    moe_balance: float | None = None
    moe_z: float | None = None
    z_loss: float | None = None
    mtp_loss: float | None = None
    reward_chosen: float | None = None
    reward_rejected: float | None = None
    reward_margin: float | None = None
    reward_accuracy: float | None = None
    logp_chosen: float | None = None
    logp_rejected: float | None = None
    memory_gib: float | None = None
    source_losses: Mapping[str, float | None] | None = None
    """The loss of each source that the batch has samples of, where there are several."""
    train_phase: str | None = None
    """The part of `train.phases` that it belongs to."""
    samples: int | None = None
    """What the run has consumed so far, where phases have samples of different lengths."""


@dataclass(frozen=True, kw_only=True)
class TrainPhaseEvent(Event):
    """A part of `train.phases` begins, or goes on after a restart; its first step (from 0) is `first_step`."""

    kind = "train_phase"
    needs_step = True
    name: str
    number: int
    of: int
    first_step: int
    last_step: int
    """The step before which it ends."""
    sequence_length: int
    global_batch: int
    layout: str


@dataclass(frozen=True, kw_only=True)
class RanksEvent(Event):
    """All ranks over the last `steps` steps, gathered by rank 0: lists with one item a rank, null for what is unknown.

    A rank that is slow has long `compute_seconds`, and the others wait for it.
    """

    kind = "ranks"
    needs_step = True
    steps: int
    compute_seconds: list[float | None]
    """Seconds of a step that the rank itself computed: without collectives, without waiting. The mean of the window."""
    wait_seconds: list[float | None] | None = None
    """Seconds of a step in which it waited for other ranks."""
    memory_gib: list[float | None] | None = None


@dataclass(frozen=True, kw_only=True)
class DevicesEvent(Event):
    """What the nodes' agents read off the hardware: lists with one item a rank, null for what cannot be read."""

    kind = "devices"
    temperature_celsius: list[float | None]
    power_watts: list[float | None]
    utilization: list[float | None]
    """Fraction of the time in which a kernel ran."""
    memory_gib: list[float | None]
    clock_mhz: list[float | None] | None = None
    throttled: list[str | None] | None = None
    """Why the clock is held down: `power`, `temperature`, `hardware`."""
    nvlink_gb_per_s: list[float | None] | None = None
    network_gb_per_s: list[float | None] | None = None
    """Received and sent by the node's network cards; each rank of a node has the node's figure."""


@dataclass(frozen=True, kw_only=True)
class AlarmEvent(Event):
    """Something that a person should look at; training goes on."""

    kind = "alarm"
    name: Literal["loss_spike", "divergence", "straggler", "throttling", "gpu_error", "low_goodput", "fabric"]
    what: str
    ranks: list[int] | None = None
    hosts: list[str] | None = None


@dataclass(frozen=True, kw_only=True)
class ProfileEvent(Event):
    """A profile was written, after the last of its `steps` steps; these are slower than others, and so is the next.

    `step` is how many steps the run had done then. `summary` are the figures of `profile_summary.py`, where rank 0
    itself was profiled; those of other ranks lie beside their traces.
    """

    kind = "profile"
    needs_step = True
    steps: int
    path: str
    """In the run's folder."""
    rank_profiled: int
    summary: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class ValidationEvent(Event):
    """The loss on the validation batches after a step; with `mode: dpo` the keys of `StepEvent` on their pairs too."""

    kind = "validation"
    needs_step = True
    loss: float | None
    batches: int | None = None
    seconds: float | None = None
    set_losses: Mapping[str, float | None] | None = None
    """The losses of named sets that were measured; `loss` is that of the first."""
    reward_chosen: float | None = None
    reward_rejected: float | None = None
    reward_margin: float | None = None
    reward_accuracy: float | None = None
    logp_chosen: float | None = None
    logp_rejected: float | None = None


@dataclass(frozen=True, kw_only=True)
class AnswersEvent(Event):
    """The model's answers to `data.validation.prompts` after a step: `{prompt, answer, tokens, ended}` each.

    `answer` is null where rank 0 cannot decode `tokens`; readers do it by the run's `answers/tokenizer.json`. `ended`
    says whether the model ended the answer itself.
    """

    kind = "answers"
    needs_step = True
    answers: list[Mapping[str, Any]]
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class EvaluationEvent(Event):
    """The checkpoint of a step was measured (`eval`): the scores by one measure. It belongs to no attempt."""

    kind = "evaluation"
    needs_step = True
    name: str
    """`perplexity validation`, the name of a task, `questions gate`."""
    scores: Mapping[str, float | None]
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class EarlyStopEvent(Event):
    """The run ends before its last step, because validation no longer improves (`train.early_stop`)."""

    kind = "early_stop"
    needs_step = True
    reason: str
    best_step: int | None
    best_loss: float | None


@dataclass(frozen=True, kw_only=True)
class CheckpointEvent(Event):
    """A phase of writing a checkpoint; `stall_seconds` is how long training stopped for it."""

    kind = "checkpoint"
    needs_step = True
    phase: Literal["staged", "committed", "best", "failed", "pruned"]
    """`best`: it has the lowest validation loss so far, which is `loss`."""
    seconds: float | None = None
    bytes: int | None = None
    stall_seconds: float | None = None
    path: str | None = None
    what: str | None = None
    loss: float | None = None


@dataclass(frozen=True, kw_only=True)
class ResumeEvent(Event):
    """Training goes on after `step` from a checkpoint."""

    kind = "resume"
    needs_step = True
    from_attempt: int | None
    checkpoint: str
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class ProbeEvent(Event):
    """The loss of the base weights on a fixed batch, and what it was when they were converted."""

    kind = "probe"
    loss: float | None
    expected: float
    bound: float


@dataclass(frozen=True, kw_only=True)
class NonFiniteEvent(Event):
    """A loss or gradient that is not finite, and what was done about it."""

    kind = "non_finite"
    needs_step = True
    policy: Literal["stop", "skip"]
    what: str


@dataclass(frozen=True, kw_only=True)
class SpikeEvent(Event):
    """A step that was skipped because its loss or gradient norm is far above those of the last steps."""

    kind = "spike"
    needs_step = True
    what: str
    in_a_row: int
    """How many steps in a row were skipped for this, this one included."""


@dataclass(frozen=True, kw_only=True)
class SignalEvent(Event):
    """A signal has asked the run to stop."""

    kind = "signal"
    name: str


@dataclass(frozen=True, kw_only=True)
class StallEvent(Event):
    """Ranks that make no progress, and the collective in which the others wait for them."""

    kind = "stall"
    ranks: list[int]
    collective: str | None
    what: str


@dataclass(frozen=True, kw_only=True)
class FailureEvent(Event):
    """Ranks that failed, and the collective the others were in."""

    kind = "failure"
    ranks: list[int]
    collective: str | None
    what: str


@dataclass(frozen=True, kw_only=True)
class PreflightEvent(Event):
    """The result of preflight, before the ranks start; `nodes` are those to replace."""

    kind = "preflight"
    verdict: Literal["pass", "warn", "replace", "fail"]
    nodes: list[int]
    what: str
    seconds: float
    fabric: str | None = None
    bus_gb_per_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class NoteEvent(Event):
    """A choice that Trainshed made, and why."""

    kind = "note"
    text: str


@dataclass(frozen=True, kw_only=True)
class WarningEvent(Event):
    """Something legal and probably not wanted."""

    kind = "warning"
    text: str


@dataclass(frozen=True, kw_only=True)
class EndEvent(Event):
    """The attempt is over."""

    kind = "end"
    reason: Literal["finished", "signal", "failed"]
    exit_code: int


REWARD_KEYS = (
    "reward_chosen",
    "reward_rejected",
    "reward_margin",
    "reward_accuracy",
    "logp_chosen",
    "logp_rejected",
)
"""Keys that the steps and validations of `mode: dpo` have."""
EVENT_KINDS: dict[str, type[Event]] = {kind.kind: kind for kind in Event.__subclasses__()}
"""Every kind by its name in the line."""


class EventWriter:
    """Writes the events of one attempt, from one process.

    `folder` is the run's folder inside the store. Rank 0 and the launcher (rank None) write segments. On a disk each
    event is in the file when `emit` returns. In a bucket a thread puts it within `segment_seconds`. `emit` raises for
    an event that is not in the schema, never for a store that fails; `flush` and `close` raise for that. It may be
    used from several threads.
    """

    def __init__(
        self,
        store: Store,
        folder: str,
        *,
        attempt: int,
        rank: int | None,
        segment_seconds: float = 30.0,
        ring: int = 256,
    ) -> None:
        self._store, self._run_folder = store, folder
        self.attempt, self.rank = attempt, rank
        self._ring: deque[bytes] = deque(maxlen=ring)
        self._lock = threading.RLock()  # a signal handler may emit in the middle of an emit
        self._segments: SegmentWriter | None = None
        if not rank:
            self._segments = open_segment_writer(
                store, events_folder(folder, attempt), segment_seconds, self._warn_recovered
            )

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def emit(self, kind: str, step: int | None = None, **values: Any) -> None:
        """Write one event; a kind, key or value that is not in the schema is a ValueError."""
        with self._lock:
            line = encode_event(kind, step, values, attempt=self.attempt, rank=self.rank)
            if self._segments is None:
                self._ring.append(line)
            else:
                self._segments.append(line)

    def flush(self, timeout_seconds: float | None = None) -> None:
        """Wait until everything emitted so far is stored; a rank with a ring buffer has nothing to store."""
        if self._segments is not None:
            self._segments.flush(timeout_seconds)

    def dump(self, timeout_seconds: float | None = None) -> None:
        """Store the last events after a failure: the ring buffer as `rank-00003.jsonl`, or the open segment."""
        if self._segments is not None or self.rank is None:
            self.flush(timeout_seconds)
            return
        with self._lock:
            lines = b"".join(self._ring)
        self._store.put(ring_dump_path(self._run_folder, self.attempt, self.rank), lines)

    def close(self) -> None:
        """Store everything and end; raise if something could not be stored."""
        if self._segments is not None:
            self._segments.close()

    def _warn_recovered(self, text: str) -> None:
        self.emit("warning", text=text)


def encode_event(kind: str, step: int | None, values: Mapping[str, Any], *, attempt: int, rank: int | None) -> bytes:
    """Return one event as its line, checked against the schema."""
    schema = EVENT_KINDS.get(kind)
    if schema is None:
        raise ValueError(f"there is no kind of event named '{kind}'; there are {', '.join(sorted(EVENT_KINDS))}")
    required, optional, choices = _schema_keys(schema)
    if unknown := values.keys() - required - optional:
        raise ValueError(f"'{kind}' events have no key '{min(unknown)}'")
    if missing := required - values.keys():
        raise ValueError(f"a '{kind}' event needs the key '{min(missing)}'")
    if schema.needs_step and step is None:
        raise ValueError(f"a '{kind}' event needs its step")
    for key, allowed in choices.items():
        if values[key] not in allowed:
            raise ValueError(f"{key} of a '{kind}' event is one of {', '.join(allowed)}, not {values[key]!r}")
    event: dict[str, Any] = {"v": EVENT_VERSION, "time": time.time(), "attempt": attempt, "rank": rank}
    event |= {"kind": kind, "step": step}
    event |= {key: value for key, value in values.items() if value is not None or key in required}
    try:
        return orjson.dumps(event, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)
    except TypeError as error:
        raise ValueError(f"a value of a '{kind}' event cannot be written: {error}") from error


@cache
def _schema_keys(schema: type[Event]) -> tuple[frozenset[str], frozenset[str], dict[str, tuple[str, ...]]]:
    """Return the keys that an event must have, those it may have, and the allowed values of literals."""
    own = fields(schema)
    required = frozenset(field.name for field in own if field.default is MISSING)
    hints = get_type_hints(schema)
    choices = {field.name: get_args(hints[field.name]) for field in own if get_origin(hints[field.name]) is Literal}
    return required, frozenset(field.name for field in own) - required, choices
