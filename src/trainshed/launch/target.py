"""What every target can do: render a job into a request, submit exactly that request, and answer for it afterwards.

Nothing is decided in `submit`: `submit --dry-run` prints `Request.text()`, and that is what is sent. Only the ids that
a scheduler gives to earlier stages are filled in, where the text shows `<id of prepare>`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from trainshed.launch.job import Job

State = Literal["waiting", "running", "serving", "done", "failed", "cancelled", "unknown"]
"""serving: a server answers; it goes on until somebody ends it."""


@dataclass(frozen=True)
class Part:
    """One thing that is sent to the scheduler: a script, a manifest."""

    name: str
    """File name for people: `train.sbatch`, `train.yaml`."""
    stage: str | None
    text: str


@dataclass(frozen=True)
class Request:
    """Everything that is sent for a job, byte for byte, in order."""

    target: str
    job: str
    parts: tuple[Part, ...]
    uploads: Mapping[str, bytes] = field(default_factory=dict)
    """Files that must lie in the store before, by their path there (our packed code)."""
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        """Return what `render` prints."""
        return "".join(part.text for part in self.parts)


@dataclass(frozen=True)
class Submitted:
    """What a scheduler took; kept on the submitting machine so that a run is found again."""

    job: str
    run: str
    target: str
    ids: Mapping[str, str]
    """Stage → the scheduler's id for it."""
    ranks_per_node: int = 1
    """Of training."""
    serve_port: int | None = None
    """Of the stage that serves, on its node; None where it is reached by name (a Service), or there is none."""
    serve_ready: str = "/ready"
    """What that stage answers once it serves."""


@dataclass(frozen=True)
class StageState:
    """How a stage stands, with one sentence that says why."""

    stage: str
    state: State
    reason: str
    """Why it waits or failed, in a sentence; empty where there is nothing to say."""
    id: str = ""
    nodes: tuple[str, ...] = ()
    restarts: int = 0
    exit_code: int | None = None


class Target(Protocol):
    """A scheduler."""

    def render(self, job: Job) -> Request:
        """Turn a job into what is sent; pure: no clock, no randomness, no network."""
        ...

    def check(self, job: Job) -> Sequence[str]:
        """Ask the scheduler whether it could take the job; sentences that say why not (too many nodes, no queue)."""
        ...

    def submit(self, request: Request, job: Job) -> Submitted:
        """Send exactly the request."""
        ...

    def status(self, submitted: Submitted) -> tuple[StageState, ...]:
        """Say how each stage stands and why."""
        ...

    def logs(
        self,
        submitted: Submitted,
        stage: str,
        *,
        rank: int | None = None,
        attempt: int | None = None,
        follow: bool = False,
    ) -> Iterator[str]:
        """Yield the lines of a stage's log as the scheduler has them; the run's folder is asked first."""
        ...

    def cancel(self, submitted: Submitted) -> tuple[str, ...]:
        """End every stage that has not ended; storage is never touched. Says what was ended."""
        ...
