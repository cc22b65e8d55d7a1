"""The driver of a foreign engine, as one file, on a real Ray cluster: nothing of Trainshed can be imported there."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest

from support.clusters.kubernetes_jobs import cluster_of
from trainshed.launch.job import JobFile, Stage
from trainshed.launch.ray import script_driver
from trainshed.launch.ray.target import ENDED_STATUSES, RayDashboard
from trainshed.storage import LocalStore
from trainshed.storage.attempts import newest_attempt_record, take_attempt

SCRIPT = """\
name=$TRAINSHED_ATTEMPT-$NODE_RANK
mkdir -p "$RUN/seen"
printf '%s %s %s %s' "$TRAINSHED_ATTEMPT" "$NODE_RANK" "$NNODES" "$MASTER_PORT" >"$RUN/seen/$name"
echo "node $NODE_RANK of attempt $TRAINSHED_ATTEMPT"
setsid sleep 86399 &  # as torchrun starts its ranks
"""
DIES_ONCE = f"""{SCRIPT}
if [ "$name" = 1-1 ]; then exit 7; fi
if [ "$TRAINSHED_ATTEMPT" = 1 ]; then sleep 600; fi
"""
WAITS = f"""{SCRIPT}
trap 'touch "$RUN/seen/saved-$NODE_RANK"; exit 143' TERM
sleep 600 &
wait
"""


class RayRun:
    """A job of two nodes whose training is a script."""

    def __init__(self, address: str, folder: Path, script: str, restarts: int = 2) -> None:
        cluster = cluster_of({"target": "kubernetes"}).model_copy(
            update={"target": "ray", "ray": _ray(address), "kubernetes": None}
        )
        self.dashboard, self.run = RayDashboard(cluster), folder / "run"
        self.run.mkdir()
        self.files = folder / "job"
        self.files.mkdir()
        stage = Stage(
            "train", nodes=2, script="train.sh", restarts=restarts, environment={"RUN": str(self.run), "ODD": "a 'b'"}
        )
        (self.files / "job.json").write_text(JobFile("j", str(self.run), (stage,), 20, "bf16", "0").to_text())
        (self.files / "train.sh").write_text(script)
        shutil.copy(script_driver.__file__, self.files / "ray_driver.py")
        # Whatever of ours is on the path there cannot be imported.
        block = "import sys; sys.modules.update(dict.fromkeys(['trainshed', 'orjson', 'cyclopts', 'obstore']))"
        start = f"{block}; import runpy; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
        entrypoint = f'{sys.executable} -c "{start}" {self.files}/ray_driver.py train --job {self.files}'
        variables = {"TRAINSHED_FAILURE_GRACE_SECONDS": "1"}
        body = {"entrypoint": entrypoint, "runtime_env": {"env_vars": variables}}
        self.id = self.dashboard.submit(orjson.dumps(body))

    def ended(self) -> tuple[str, str]:
        """How it ended, and what the driver printed."""
        while (job := self._job())["status"] not in ENDED_STATUSES:
            time.sleep(0.2)
        return job["status"], self.dashboard.log(self.id)

    def _job(self) -> dict[str, Any]:
        job = self.dashboard.job(self.id)
        assert job is not None
        return job

    def seen(self) -> list[str]:
        return sorted(file.name for file in (self.run / "seen").glob("*"))


def started_by(run: Path) -> list[int]:
    """What scripts of a run have started in sessions of their own."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        with suppress(psutil.Error):
            if process.info["cmdline"] == ["sleep", "86399"] and process.environ().get("RUN") == str(run):
                found.append(process.pid)
    return found


PLAYED_ACTOR = """
import subprocess, sys, time
from trainshed.launch.ray.script_driver import ScriptActor
ScriptActor().run(sys.argv[1], {"RUN": sys.argv[2], "TRAINSHED_ATTEMPT": "1", "NODE_RANK": "0", "NNODES": "1",
    "MASTER_PORT": "1"})
"""


def test_an_actor_that_is_killed_takes_with_it_what_its_script_has_started(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(SCRIPT + "sleep 86399\n")
    with subprocess.Popen([sys.executable, "-c", PLAYED_ACTOR, tmp_path / "train.sh", tmp_path]) as actor:
        while len(started_by(tmp_path)) < 2:
            assert actor.poll() is None
            time.sleep(0.05)
        for child in psutil.Process(actor.pid).children():
            child.kill()  # as Ray does
        actor.kill()
    while started_by(tmp_path):
        time.sleep(0.05)


def _ray(address: str) -> Any:
    from trainshed.recipe.cluster.schema import Ray

    return Ray(address=address, gpu_resource="CPU")


def test_a_script_that_dies_once_is_started_again_on_all_nodes(address: str, tmp_path: Path) -> None:
    run = RayRun(address, tmp_path, DIES_ONCE)
    status, log = run.ended()
    assert status == "SUCCEEDED", log
    assert run.seen() == ["1-0", "1-1", "2-0", "2-1"]
    texts = [(run.run / "seen" / name).read_text().split() for name in ("2-0", "2-1")]
    assert [words[:3] for words in texts] == [["2", "0", "2"], ["2", "1", "2"]]
    assert texts[0][3] == texts[1][3], "all nodes have the port of the first"
    assert "train failed with 7; starting again, 2 restarts left" in log
    while left := started_by(run.run):
        time.sleep(0.1)
    assert not left, "what a script has started ends with it, or with its actor"
    assert "node 0 of attempt 2" in log, "what a script prints is in the log of the job"
    # The attempts are those of every other way to train the run.
    record = newest_attempt_record(LocalStore(run.run), "")
    assert record is not None
    assert record["attempt"] == 2
    assert take_attempt(LocalStore(run.run), "").number == 3
    assert script_driver.take_attempt(run.run) == 4


def test_wrong_input_is_not_tried_again(address: str, tmp_path: Path) -> None:
    run = RayRun(address, tmp_path, SCRIPT + "exit 2\n")
    status, log = run.ended()
    assert (status, run.seen()) == ("FAILED", ["1-0", "1-1"]), log


def test_a_request_to_stop_reaches_every_script_and_is_waited_for(address: str, tmp_path: Path) -> None:
    run = RayRun(address, tmp_path, WAITS)
    while not (run.run / "seen").is_dir() or len(run.seen()) < 2:
        time.sleep(0.1)
    run.dashboard.stop(run.id)
    status, log = run.ended()
    assert status in ("STOPPED", "FAILED")
    assert {"saved-0", "saved-1"} <= set(run.seen()), log
    assert len(list((run.run / "attempts").iterdir())) == 1


def test_its_attempts_are_numbered_as_all_others_are(tmp_path: Path) -> None:
    assert script_driver.take_attempt(tmp_path) == 1
    assert take_attempt(LocalStore(tmp_path), "").number == 2
    written = [json.loads(file.read_text()) for file in sorted((tmp_path / "attempts").iterdir())]
    assert [sorted(record) for record in written] == [["attempt", "host", "pid", "writer"]] * 2


@pytest.mark.parametrize("script", ["train.sh", None])
def test_a_job_without_such_a_stage_is_refused(script: str | None, tmp_path: Path) -> None:
    stage = Stage("train", nodes=2, script=script)
    (tmp_path / "job.json").write_text(JobFile("j", str(tmp_path), (stage,), 20, "bf16", "0").to_text())
    asked = "export" if script else "train"
    assert script_driver.main([asked, "--job", str(tmp_path)]) == script_driver.WRONG_INPUT
