"""Training on a real Slurm of four virtual nodes: interrupted, killed and placed anew, it ends with the same losses."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from support.clusters.slurm_cluster import SlurmCluster
from support.clusters.slurm_runs import SlurmRun, SlurmRuns, write_cluster
from support.recipes.small_recipes import recipe_text
from support.runs.small_runs import difference, figures
from trainshed.cli import run_cli
from trainshed.launch.attempt import read_plan
from trainshed.launch.slurm.target import SlurmTarget
from trainshed.launch.target import SubmittedJob
from trainshed.observe.event_log import read_events, read_steps
from trainshed.recipe import load_cluster
from trainshed.storage import LocalStore

pytestmark = pytest.mark.slurm

SHORT = ("layout.dp=2", "train.steps=40", "checkpoint.every=10")


@pytest.fixture(scope="module")
def line(slurm_daemons: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmRun]:
    """The whole line of the recipe, submitted and left alone: the others are held against it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", slurm_daemons.conf)
        runs = SlurmRuns(slurm_daemons, tmp_path_factory.mktemp("line"))
        yield runs.submit(runs.job(*SHORT, "export={}", code=True, preflight=True))
        runs.end()


@pytest.fixture
def undisturbed(line: SlurmRun) -> list[dict[str, Any]]:
    """The steps of the same recipe without any trouble."""
    assert line.wait().state == "done", line.all_logs()
    return trained(line.folder)


def trained(folder: Path) -> list[dict[str, Any]]:
    return read_steps(LocalStore(folder), "")


def resumed_after(folder: Path, attempt: int) -> list[int]:
    """Return the step after which an attempt went on, once it has."""
    events = read_events(LocalStore(folder), "", attempt=attempt)
    return [event["step"] for event in events if event["kind"] == "resume"]


def kill_agent(run: SlurmRun, node: str) -> None:
    """End an agent so that it can tell nobody, and its ranks with it."""
    agents = run.slurm.processes(node, run.id(), "trainshed agent train")
    assert agents
    for process in agents:
        os.kill(process, signal.SIGKILL)


def hosts(run: SlurmRun, attempt: int, kind: str = "nodes") -> list[str]:
    found = orjson.loads((run.folder / f"health/attempt-{attempt:04d}/hosts.json").read_bytes())
    return [node["host"] for node in found[kind]]


def test_the_whole_line_runs_as_jobs_that_wait_for_each_other(line: SlurmRun, slurm: SlurmCluster) -> None:
    state = line.wait("export")
    assert {stage: found.state for stage, found in line.states().items()} == {
        "prepare": "done",
        "train": "done",
        "export": "done",
    }, line.all_logs()
    assert state.exit_code == 0
    assert len(trained(line.folder)) == 40
    assert (line.folder / "export" / "verdict.json").exists()
    # The code that ran is the one that travelled.
    assert list(line.folder.parents[2].glob("code/*/unpacked/trainshed/__init__.py"))
    phases = [event["name"] for event in read_events(LocalStore(line.folder), "") if event["kind"] == "phase"]
    before = ["install", "image", "meeting", "preflight"]
    assert phases == [*before, "rendezvous", "process_groups", "load", "first_step"]
    verdict = orjson.loads((line.folder / "health/attempt-0001/preflight/verdict.json").read_bytes())
    assert verdict["verdict"] in ("pass", "warn")
    assert list(verdict["hosts"].values()) == hosts(line, 1)


def test_what_render_writes_trains_the_same_by_hand_with_plain_sbatch(
    slurm_runs: SlurmRuns, undisturbed: list[dict[str, Any]], tmp_path: Path
) -> None:
    recipe, scripts = tmp_path / "recipe.yaml", tmp_path / "scripts"
    recipe.write_text(recipe_text("dense"))
    cluster = write_cluster(tmp_path)
    assert run_cli(["render", str(recipe), *SHORT, "--on", str(cluster), "--out", str(scripts)]) == 0
    shutil.copytree(scripts / "store", tmp_path / "store")
    subprocess.run(["bash", scripts / "files.sh"], check=True)
    ids: dict[str, str] = {}
    for stage in ("prepare", "train"):
        script = scripts / f"{stage}.sbatch"
        script.write_text(script.read_text().replace("<id of prepare>", ids.get("prepare", "")))
        ids[stage] = slurm_runs.slurm.run("sbatch", "--parsable", str(script)).strip()
    (folder,) = (tmp_path / "store").glob("runs/*/*")
    submitted = SubmittedJob("by hand", str(folder), "slurm", ids)
    slurm_runs.keep(submitted)
    run = SlurmRun(slurm_runs.slurm, SlurmTarget(load_cluster(cluster)), submitted)
    assert run.wait().state == "done", run.all_logs()
    assert figures(trained(folder)) == figures(undisturbed)


def test_a_run_that_is_asked_to_save_and_then_loses_a_node_ends_as_if_nothing_had_happened(
    slurm_runs: SlurmRuns, undisturbed: list[dict[str, Any]]
) -> None:
    run = slurm_runs.submit(slurm_runs.job(*SHORT))
    run.until_saved()
    # What Slurm does before the time limit.
    run.slurm.run("scancel", "--signal=USR1", run.id())
    run.until(lambda: resumed_after(run.folder, 2), "the second attempt to go on")
    second = hosts(run, 2)[1]
    kill_agent(run, second)  # at once: it has only so many steps to do
    (stopped,) = resumed_after(run.folder, 2)
    assert 10 <= stopped < 40
    state = run.wait()
    assert (state.state, state.restarts, state.exit_code) == ("done", 2, 0), run.all_logs()
    assert figures(trained(run.folder)) == figures(undisturbed)

    # Every attempt has left its own account and its own logs.
    for attempt in (1, 2, 3):
        assert len(hosts(run, attempt)) == 2
        assert len(list((run.folder / f"logs/attempt-{attempt:04d}").glob("rank-*.log"))) == 2
    lost = orjson.loads((run.folder / "health/attempt-0002/node-00001.json").read_bytes())
    assert (lost["ended"], lost["host"]) == ("lost", second)
    printed = "".join(run.target.logs(run.submitted, "train", follow=True))
    assert "saved before the time limit; queued again" in printed
    assert f"rank 1 was on {second}, which shows no sign of life" in printed
    assert "(1 of 2 restarts); queued again" in printed
    # The node that was lost is there again, and avoided all the same.
    assert f"the next start avoids {second}" in printed
    assert second not in hosts(run, 3)
    failed = "".join(run.target.logs(run.submitted, "train", rank=0, attempt=2))
    assert f"going on after step {stopped} from" in failed


@pytest.mark.full
def test_a_spare_node_steps_in_for_one_that_dies_without_the_job_being_queued_again(
    slurm_runs: SlurmRuns, undisturbed: list[dict[str, Any]]
) -> None:
    run = slurm_runs.submit(slurm_runs.job(*SHORT, "elastic={min_nodes: 2, spares: 1}"))
    run.until_saved()
    first, second = hosts(run, 1)
    (spare,) = hosts(run, 1, "spares")
    kill_agent(run, second)
    state = run.wait()
    assert (state.state, state.restarts) == ("done", 0), run.all_logs()
    assert hosts(run, 2) == [first, spare]
    assert figures(trained(run.folder)) == figures(undisturbed)


@pytest.mark.full
def test_with_no_spare_left_the_run_is_planned_anew_for_the_nodes_that_remain(
    slurm_runs: SlurmRuns, undisturbed: list[dict[str, Any]]
) -> None:
    run = slurm_runs.submit(slurm_runs.job(*SHORT, "elastic={min_nodes: 1}"))
    run.until_saved()
    first, second = hosts(run, 1)
    kill_agent(run, second)
    state = run.wait()
    assert (state.state, state.restarts) == ("done", 0), run.all_logs()
    assert (read_plan(run.folder, 1).dp, read_plan(run.folder, 2).dp) == (2, 1)
    assert hosts(run, 2) == [first]
    found = trained(run.folder)
    assert [step["batch_hash"] for step in found] == [step["batch_hash"] for step in undisturbed]
    assert difference(found, undisturbed, "loss") < 1e-9


@pytest.mark.full
def test_a_node_that_is_set_down_has_the_job_queued_again_by_slurm_itself(
    slurm_runs: SlurmRuns, undisturbed: list[dict[str, Any]]
) -> None:
    run = slurm_runs.submit(slurm_runs.job(*SHORT))
    run.until_saved()
    # It registers anew and is given back by itself.
    run.slurm.run("scontrol", "update", f"nodename={hosts(run, 1)[1]}", "state=down", "reason=test")
    state = run.wait()
    assert (state.state, state.restarts) == ("done", 1), run.all_logs()
    assert figures(trained(run.folder)) == figures(undisturbed)
