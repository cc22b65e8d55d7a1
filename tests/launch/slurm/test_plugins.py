"""A plugin travels to the nodes of a real Slurm with the code: it is not read where the recipe was."""

from __future__ import annotations

import shutil

import pytest

from support import TESTS
from support.clusters.slurm_runs import SlurmRuns
from trainshed.observe.event_log import read_events
from trainshed.storage import LocalStore

pytestmark = pytest.mark.slurm


@pytest.mark.full
def test_nodes_train_with_an_optimizer_that_travelled_with_the_job(slurm_runs: SlurmRuns) -> None:
    beside = slurm_runs.folder / "sgd_optimizer.py"
    shutil.copy(TESTS.parent / "docs" / "examples" / "sgd_optimizer.py", beside)
    job = slurm_runs.job("plugins=[sgd_optimizer]", "train.optimizer={name: sgd, lr: 0.05}", "train.steps=3", code=True)
    beside.unlink()
    run = slurm_runs.submit(job)
    state = run.wait()
    assert (state.state, state.exit_code) == ("done", 0), run.all_logs()
    events = list(read_events(LocalStore(run.folder), ""))
    (start,) = [event for event in events if event["kind"] == "start"]
    assert list(start["plugins"]) == ["sgd_optimizer"]
    assert sum(event["kind"] == "step" for event in events) == 3
