"""The tools below `observe` that figures are sent to: Prometheus, Weights & Biases, MLflow, trackio."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from trainshed.recipe.section import Port, Problem, Section, Text
from trainshed.redaction import credentials_in

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")


class PrometheusServer(Section):
    """An address of rank 0 from which Prometheus reads the figures of a training: http://HOST:PORT/metrics."""

    port: Port = Field(9400, description="Port on the node of rank 0")
    host: Text = Field(
        "127.0.0.1",
        description="Address it listens on; `0.0.0.0`: all of its node's, so that a Prometheus elsewhere can read it",
    )

    @property
    def is_reachable(self) -> bool:
        """Whether another machine can read it."""
        return self.host not in LOOPBACK_HOSTS


class WandbProject(Section):
    """A run of Weights & Biases, with the run's own id, so that a restart goes on in it."""

    project: Text = Field(description="Project", examples=["llama3-8b"])
    entity: Text | None = Field(None, description="User or team; left out: the default one of the API key")
    mode: Literal["online", "offline"] = Field(
        "online", description="offline: files in the run's folder, which `wandb sync` sends later"
    )


class MlflowExperiment(Section):
    """A run of MLflow, found again by the run's id after a restart."""

    uri: Text = Field(
        description="Address of the tracking server, or a folder",
        examples=["http://mlflow.example:5000", "/shared/mlruns"],
    )
    experiment: Text | None = Field(None, description="Experiment; left out: the recipe's name")

    def problems(self) -> Iterator[Problem]:
        """An address holds no credentials."""
        if (secret := credentials_in(self.uri)) is not None:
            yield Problem(
                ("uri",),
                f"credentials do not belong into an address: this one has {secret}",
                "give MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD by the cluster's `secrets`, or export them",
            )


class TrackioProject(Section):
    """A run of trackio, with the run's own name, so that a restart goes on in it."""

    project: Text = Field(description="Project", examples=["llama3-8b"])
    space: Text | None = Field(
        None, description="A Space of the Hub; left out: trackio's own folder on this machine", examples=["me/trackio"]
    )


def expand_prometheus(value: Any) -> Any:
    """Let `true` stand for a server with its defaults, and `false` for none."""
    if isinstance(value, bool):
        return {} if value else None
    return value
