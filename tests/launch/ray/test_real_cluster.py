"""A real Ray cluster of three nodes: jobs over its REST API, dead actors, spares, a stop, and too little room."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import signal
import subprocess
import tarfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest
import yaml

import trainshed
from support.clusters.ray_cluster import SECRET
from support.recipes.small_recipes import recipe_text, small_recipe
from trainshed.errors import InputError
from trainshed.launch.attempt import PLAN_SCHEMA
from trainshed.launch.job import JOB_FILE, CodeArchive, Job, JobFile, Stage
from trainshed.launch.packaging import pack_code
from trainshed.launch.ray.target import ENDED_STATUSES, RayDashboard, RayTarget
from trainshed.launch.target import StageState, SubmittedJob
from trainshed.observe.event_log import read_events, read_steps
from trainshed.plan import resolve_layout
from trainshed.recipe import Cluster, Layout, load_cluster, parse_recipe, to_yaml
from trainshed.storage import LocalStore


@pytest.fixture
def cluster(address: str, tmp_path: Path) -> Cluster:
    body = {
        "name": "three-nodes",
        "target": "ray",
        "machine": "cpu",
        "store": str(tmp_path / "store"),
        "nodes": {"default": 2},
        "ray": {"address": address, "gpu_resource": "CPU"},
        "limits": {"cpu_stage_cpus": 1, "cpu_stage_memory": "100Mi", "restarts": 0, "grace_seconds": 60},
        "secrets": {"TOKEN": {"env": "NODE_SECRET"}},
        "environment": {
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "OMP_NUM_THREADS": "1",
            "TRAINSHED_FAILURE_GRACE_SECONDS": "5",
        },
        "setup": ["export SITE='of a line' TORCH_CPP_LOG_LEVEL=line # the file's own wins"],
    }
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(body))
    return load_cluster(tmp_path / "cluster.yaml")


def training(
    tmp_path: Path,
    cluster: Cluster,
    *overrides: str,
    code: CodeArchive | None = None,
    preflight: bool = False,
    spares: int = 0,
    restarts: int = 0,
) -> Job:
    """A job that prepares and trains a small model on two nodes, data parallel."""
    recipe = parse_recipe(recipe_text("dense"), ["layout.dp=2", "layout.micro_batch=2", *overrides])
    assert isinstance(recipe.layout, Layout)
    train = Stage("train", nodes=2, spares=spares, restarts=restarts, preflight=preflight)
    stages = (Stage("prepare", cpus=1, memory="100Mi"), train)
    files = {
        "recipe.yaml": to_yaml(recipe),
        "plan.json": plan_text(recipe.layout),
    }
    return crafted(tmp_path, cluster, stages, files, name=recipe.name, code=code)


def plan_text(layout: Layout) -> str:
    config = small_recipe("dense").model.config
    assert config is not None
    body = {"schema": PLAN_SCHEMA, "layout": asdict(resolve_layout(layout, config)), "reasons": []}
    return orjson.dumps(body).decode()


def until(done: Callable[[], Any], what: str, seconds: float = 180) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := done():
            return found
        time.sleep(0.1)
    raise AssertionError(f"waited in vain for {what}")


def ended(target: RayTarget, submitted: SubmittedJob) -> dict[str, StageState]:
    def look() -> dict[str, StageState] | None:
        states = {state.stage: state for state in target.status(submitted)}
        over = states["train"].state in ("done", "failed", "cancelled")
        return states if over else None

    return until(look, "the end of the job")


def hosts(job: Job, attempt: int = 1) -> list[dict[str, Any]]:
    return orjson.loads((Path(job.run) / f"health/attempt-{attempt:04d}/hosts.json").read_bytes())["nodes"]


def actors(job: Job) -> list[dict[str, Any]]:
    """Where the actors of the newest start of a training run, by slot."""
    files = sorted(Path(job.run).glob("starts/*/ray.json"), key=lambda file: file.stat().st_mtime_ns)
    return orjson.loads(files[-1].read_bytes())["nodes"]


def kill_actor(job: Job, slot: int) -> None:
    os.kill(actors(job)[slot]["process"], signal.SIGKILL)


def kill_agent(job: Job, slot: int) -> None:
    for child in psutil.Process(actors(job)[slot]["process"]).children():
        child.kill()


def first_step(job: Job, attempt: int) -> dict[str, Any]:
    """Wait until an attempt trains."""

    def step() -> dict[str, Any] | None:
        steps = (event for event in events(job) if event["kind"] == "step" and event["attempt"] == attempt)
        return next(steps, None)

    return until(step, f"a step of attempt {attempt}")


def events(job: Job) -> list[dict[str, Any]]:
    return list(read_events(LocalStore(job.run), ""))


def trains(job: Job) -> bool:
    return bool(read_steps(LocalStore(job.run), ""))


def rank_processes(job: Job) -> list[int]:
    """The processes that train a run, wherever they are."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        words = process.info["cmdline"] or []
        if "worker" in words and job.run in words and process.info["status"] != "zombie":
            found.append(process.info["pid"])
    return found


@pytest.mark.parametrize("preflight", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_recipe_goes_through_its_stages_on_two_of_three_nodes(
    tmp_path: Path, cluster: Cluster, preflight: bool
) -> None:
    code = marked_code()
    job = training(tmp_path, cluster, code=code, preflight=preflight)
    target = RayTarget(cluster)
    assert target.check(job) == []
    submitted = target.submit(target.render(job), job)
    states = ended(target, submitted)
    log = "\n".join(target.logs(submitted, "train"))
    assert [(state.stage, state.state) for state in states.values()] == [("prepare", "done"), ("train", "done")], log
    assert len({node["ray_node"] for node in actors(job)}) == 2, "each on a node of its own"
    assert [node["ranks"] for node in hosts(job)] == [[0], [1]]
    assert [event["step"] for event in read_steps(LocalStore(job.run), "")] == list(range(20))
    start = next(event for event in events(job) if event["kind"] == "start")
    assert start["world_size"] == 2
    assert start["versions"]["trainshed"] == code.version, "ranks run the code that travelled"
    proven = [event["verdict"] in ("pass", "warn") for event in events(job) if event["kind"] == "preflight"]
    assert proven == [True] * preflight
    assert "step 20/20" in log
    assert (Path(job.run) / "logs/prepare/part-0000.log").exists()
    assert (Path(job.run) / "logs/attempt-0001/rank-00001.log").exists()
    assert not rank_processes(job)


@pytest.mark.full
def test_a_stopped_job_saves_and_goes_on_by_curl_until_more_actors_are_killed_than_it_has_spares(
    tmp_path: Path, cluster: Cluster, address: str
) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("no curl")
    job = training(tmp_path, cluster, "train.steps=1000000", "checkpoint.every=20", spares=1)
    target = RayTarget(cluster)
    submitted = target.submit(target.render(job), job)
    until(lambda: trains(job), "a step")
    with pytest.raises(InputError, match="already on the cluster"):
        target.submit(target.render(job), job)
    assert "asked to stop" in target.cancel(submitted)[0]
    assert ended(target, submitted)["train"].state == "cancelled"
    assert not rank_processes(job)
    stopped = events(job)
    saved = [event for event in stopped if event["kind"] == "checkpoint" and event["phase"] == "committed"]
    assert saved, "the ranks were told in time"
    assert [event["name"] for event in stopped if event["kind"] == "signal"] == ["SIGTERM"]
    assert target.cancel(submitted) == (), "it has ended"

    post = [curl, "-fsS", "-H", "Content-Type: application/json", "--data-binary", "@-", f"{address}/api/jobs/"]
    answer = subprocess.run(post, input=target.render(job).text().encode(), check=True, capture_output=True)
    id = orjson.loads(answer.stdout)["submission_id"]
    again = SubmittedJob(job.name, job.run, "ray", {stage.name: id for stage in job.stages})
    resumed = until(lambda: [event for event in events(job) if event["kind"] == "resume"], "a resume")
    assert resumed[0]["step"] == saved[-1]["step"]

    assert [node["slot"] for node in hosts(job, attempt=2)] == [0, 1]
    kill_agent(job, 1)
    first_step(job, attempt=3)
    assert [node["slot"] for node in hosts(job, attempt=3)] == [0, 2], "the spare node has taken its place"

    kill_actor(job, 2)
    states = ended(target, again)
    assert states["prepare"].state == "done"
    assert (states["train"].state, states["train"].exit_code) == ("failed", 1)
    assert "rank 1 was lost: its Ray actor" in states["train"].reason
    assert "1 of 3 nodes are left, and 2 are needed" in states["train"].reason
    log = "\n".join(target.logs(again, "train", follow=True))
    assert "was lost: its node agent was killed by SIGKILL: a spare node steps in" in log
    assert until(lambda: not rank_processes(job), "the ranks to be gone")


@pytest.mark.full
@pytest.mark.full
def test_a_lost_first_node_ends_the_start_and_the_next_one_goes_on(tmp_path: Path, cluster: Cluster) -> None:
    job = training(tmp_path, cluster, "train.steps=1000000", restarts=1)
    target = RayTarget(cluster)
    submitted = target.submit(target.render(job), job)
    first_step(job, attempt=1)
    kill_actor(job, 0)
    first_step(job, attempt=2)
    failures = [event["what"] for event in events(job) if event["kind"] == "failure"]
    assert [what for what in failures if what.startswith("rank 0 was lost: its Ray actor")]
    assert "1 of 1 restarts left" in "\n".join(target.logs(submitted, "train"))
    target.cancel(submitted)
    assert ended(target, submitted)["train"].state == "cancelled"
    assert not rank_processes(job)


@pytest.mark.parametrize("preflight", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_foreign_engines_script_runs_once_a_node_and_its_exit_code_is_told(
    tmp_path: Path, cluster: Cluster, preflight: bool
) -> None:
    script = """
echo "node $NODE_RANK of $NNODES meets at $MASTER_ADDR:$MASTER_PORT"
test ${#TOKEN} = LENGTH || exit 9
test "$SITE $TORCH_CPP_LOG_LEVEL" = "of a line ERROR" || exit 8
if test "$NODE_RANK" = 0; then
  test -e "$RUN/again" && sleep 600
  touch "$RUN/again"
  exit 0
fi
echo "the engine is broken" >&2
exit 3
""".replace("LENGTH", str(len(SECRET)))
    environment = {"RUN": str(tmp_path)}
    stage = Stage("train", nodes=2, script="train.sh", restarts=1, environment=environment, preflight=preflight)
    job = crafted(tmp_path, cluster, (stage,), {"train.sh": script, "plan.json": plan_text(Layout(dp=2))})
    target = RayTarget(cluster)
    request = target.render(job)
    submitted = target.submit(request, job)
    state = ended(target, submitted)["train"]
    log = "\n".join(target.logs(submitted, "train"))
    assert "train failed: node 1 exited with 3" in state.reason
    assert log.count("the engine is broken") == 2, "it was started again once"
    assert "1 of 1 restarts left" in log
    assert len([event for event in events(job) if event["kind"] == "preflight"]) == 2 * preflight
    assert SECRET not in request.text() + log


@pytest.mark.full
def test_parts_take_turns_and_a_stage_without_room_says_what_is_missing(tmp_path: Path, cluster: Cluster) -> None:
    # Seven parts of two CPUs each: three at a time.
    parts = Stage("tokenise", parts=7, cpus=2, script="part.sh")
    scripts = {"part.sh": 'test "$SITE" = "of a line" && mkdir "$RUN/part-$$"', "train.sh": "exit 0"}
    stages = (
        Stage(**{**vars(parts), "environment": {"RUN": str(tmp_path)}}),
        Stage("train", nodes=5, script="train.sh"),
    )
    job = crafted(tmp_path, cluster, stages, scripts)
    target = RayTarget(cluster)
    missing = "5 nodes with 1 CPU, and 3 of the "
    assert [sentence for sentence in target.check(job) if missing in sentence]
    submitted = target.submit(target.render(job), job)

    def waits() -> StageState | None:
        states = {state.stage: state for state in target.status(submitted)}
        return states["train"] if "it takes" in states["train"].reason else None

    state = until(waits, "a reason")
    assert state.state == "waiting"
    assert "it takes 5 nodes with 1 CPU, and 3 of the cluster's 3 nodes are that large" in state.reason
    assert len(list(tmp_path.glob("part-*"))) == 7
    target.cancel(submitted)
    assert ended(target, submitted)["train"].state == "cancelled"


@pytest.mark.full
def test_a_stage_without_gpus_that_fails_once_is_tried_again(tmp_path: Path, cluster: Cluster) -> None:
    script = 'if mkdir "$RUN/first" 2>/dev/null; then echo "no answer" >&2; exit 1; fi'
    stages = (
        Stage("prepare", cpus=1, script="prepare.sh", environment={"RUN": str(tmp_path)}),
        Stage("train", nodes=1, script="train.sh"),
    )
    job = crafted(tmp_path, cluster, stages, {"prepare.sh": script, "train.sh": "exit 0"})
    target = RayTarget(cluster)
    submitted = target.submit(target.render(job), job)
    states = ended(target, submitted)
    log = "\n".join(target.logs(submitted, "prepare"))
    assert [state.state for state in states.values()] == ["done", "done"], log
    assert "starting again in 10 s, 3 of 3 retries left" in log


RESERVE = """
import ray
from trainshed.launch.ray.placement import count_fitting_nodes, reserve_nodes

ray.init(address="auto")
bad = ray.nodes()[0]["NodeID"]
options = {"is_stopping": lambda: False, "on_wait": print}
with reserve_nodes(2, {"CPU": 1}, avoided_nodes=[bad], **options) as group:
    placed = ray.util.placement_group_table(group)["bundles_to_node_id"].values()
assert len(set(placed)) == 2 and bad not in placed, placed
assert (count_fitting_nodes({"CPU": 1}), count_fitting_nodes({"CPU": 1}, [bad])) == (3, 2)
"""


def test_a_new_start_is_kept_off_bad_nodes(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "reserve.py").write_text(RESERVE)
    dashboard = RayDashboard(cluster)
    id = dashboard.submit(orjson.dumps({"entrypoint": f"python3 {tmp_path}/reserve.py"}))

    def status() -> str | None:
        job = dashboard.job(id)
        return job["status"] if job is not None and job["status"] in ENDED_STATUSES else None

    assert until(status, "the end of the script") == "SUCCEEDED", dashboard.log(id)


def crafted(
    tmp_path: Path,
    cluster: Cluster,
    stages: tuple[Stage, ...],
    files: dict[str, str],
    *,
    name: str = "crafted",
    code: CodeArchive | None = None,
) -> Job:
    """A job by hand; its id is the test's."""
    id = f"{tmp_path.name[-30:]}-{tmp_path.parent.name}"
    run = str(tmp_path / "store" / "runs" / name / id)
    version = code.version if code is not None else trainshed.__version__
    file = JobFile(f"{name}-{id}", run, stages, 60, "fp64", version)
    files = {JOB_FILE: file.to_text(), "cluster.yaml": to_yaml(cluster), **files}
    return Job(name=file.name, run=run, cluster=cluster, stages=stages, files=files, code=code, grace_seconds=60)


def marked_code() -> CodeArchive:
    """Our own code as it travels, with a version that is installed nowhere."""
    code, changed = pack_code(), io.BytesIO()
    version = f"{code.version}+travelled"
    with tarfile.open(fileobj=io.BytesIO(code.data)) as old, tarfile.open(fileobj=changed, mode="w:gz") as new:
        for entry in old:
            opened = old.extractfile(entry)
            assert opened is not None
            content = opened.read()
            if entry.name == "trainshed/__init__.py":
                content = content.replace(f'"{code.version}"'.encode(), f'"{version}"'.encode())
                entry.size = len(content)
            new.addfile(entry, io.BytesIO(content))
    data = changed.getvalue()
    return CodeArchive("trainshed.tar.gz", hashlib.sha256(data).hexdigest(), data, version)
