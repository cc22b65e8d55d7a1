"""What a real Slurm makes of our scripts: exit codes, arrays, places, secrets, odd text, and why a job waits."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from support.clusters.slurm_runs import SlurmRuns, write_cluster
from support.recipes.small_recipes import recipe_text
from trainshed.cli import run_cli
from trainshed.errors import TrainshedError
from trainshed.launch.job import Stage
from trainshed.launch.slurm.target import SlurmTarget

pytestmark = pytest.mark.slurm

ODD = 'it\'s "odd" $(touch never) `id` \\ # %j; é\t<id of first>'


def test_the_exit_code_is_kept_and_what_comes_behind_never_runs(slurm_runs: SlurmRuns) -> None:
    job = slurm_runs.script_job((Stage("first"), "echo the last words; exit 7\n"), (Stage("second"), "touch ran\n"))
    run = slurm_runs.submit(job)
    second = run.wait("second")
    first = run.states()["first"]
    assert (first.state, first.exit_code, first.reason) == ("failed", 7, "exit code 7")
    assert (second.state, second.reason) == ("cancelled", "never runs: the stage before it failed")
    assert "the last words\n" in list(run.target.logs(run.submitted, "first"))
    assert not (run.folder / "ran").exists()


def test_every_node_of_a_foreign_engine_finds_its_place(slurm_runs: SlurmRuns) -> None:
    script = 'echo "$NODE_RANK $NNODES $MASTER_ADDR $MASTER_PORT $(hostname) $1" >"place-$NODE_RANK"\n'
    run = slurm_runs.submit(
        slurm_runs.script_job((Stage("train", nodes=3), script), slurm={"port": 23456}, limits={"hours": 0.5})
    )
    assert run.wait().state == "done"
    places = [(run.folder / f"place-{node}").read_text().split() for node in range(3)]
    assert places == [[str(node), "3", places[0][4], "23456", places[node][4]] for node in range(3)]
    assert len({place[4] for place in places}) == 3


def test_parts_run_as_an_array_and_the_next_stage_waits_for_all(slurm_runs: SlurmRuns) -> None:
    job = slurm_runs.script_job(
        (Stage("tokenise", parts=3), 'echo "part $SLURM_ARRAY_TASK_ID"; touch "part-$SLURM_ARRAY_TASK_ID"\n'),
        (Stage("prepare"), "ls part-* >found\n"),
    )
    run = slurm_runs.submit(job)
    assert run.wait("prepare").state == "done"
    assert run.states()["tokenise"].reason == "3 of 3 parts"
    assert (run.folder / "found").read_text().split() == ["part-0", "part-1", "part-2"]
    assert "part 2\n" in list(run.target.logs(run.submitted, "tokenise", rank=2))


def test_odd_text_and_secrets_arrive_as_they_were_written(
    slurm_runs: SlurmRuns, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FROM_HERE", "s3cret of the environment")
    monkeypatch.setenv("NOT_NAMED", "nobody asked for it")
    (tmp_path / "it's a secret").write_text("s3cret of a file\n")
    job = slurm_runs.script_job(
        (Stage("first", environment={"ODD": ODD + "\nand more"}), 'env -0 >"variables"\n'),
        environment={"ALSO": "a b  c"},
        secrets={"TOKEN": {"env": "FROM_HERE"}, "KEY": {"file": str(tmp_path / "it's a secret")}},
        slurm={"options": [f"--comment={ODD.replace(chr(9), ' ')}"]},
    )
    request = SlurmTarget(job.cluster).render(job)
    assert "s3cret" not in request.text()
    run = slurm_runs.submit(job)
    assert run.wait("first").state == "done", run.all_logs()
    pairs = (line.partition("=") for line in (run.folder / "variables").read_text().split("\0"))
    variables = {name: value for name, _, value in pairs}
    assert variables["ODD"] == ODD + "\nand more"
    assert variables["ALSO"] == "a b  c"
    assert (variables["TOKEN"], variables["KEY"]) == ("s3cret of the environment", "s3cret of a file")
    assert "NOT_NAMED" not in variables
    assert "s3cret" not in run.all_logs()
    assert ODD.replace("\t", " ") in run.slurm.run("scontrol", "show", "job", run.id("first"))
    assert not list(tmp_path.rglob("never"))


def test_what_the_site_sets_up_reaches_the_job_and_what_the_shell_has_does_not(
    slurm_runs: SlurmRuns, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "site.sh").write_text(
        'echo "$NEVER_SET" >/dev/null; false; export FROM_SITE="of ${SLURMD_NODENAME:?}"\n'
    )
    monkeypatch.setenv("NOT_NAMED", "nobody asked for it")
    # Slurm takes these before the lines of a script.
    monkeypatch.setenv("SBATCH_EXPORT", "ALL")
    monkeypatch.setenv("SBATCH_PARTITION", "small")
    monkeypatch.setenv("SLURM_NTASKS", "7")
    job = slurm_runs.script_job(
        (Stage("train", nodes=2), 'env >"variables-$NODE_RANK"\n'),
        setup=[f"source {tmp_path}/site.sh", "export BOTH='of a line' ALSO=mine # a comment", "umask 077"],
        environment={"BOTH": "of the file"},
        limits={"restarts": 0},
    )
    run = slurm_runs.submit(job)
    assert run.wait().state == "done", run.all_logs()
    for node in range(2):
        seen = dict(line.partition("=")[::2] for line in (run.folder / f"variables-{node}").read_text().splitlines())
        assert seen["FROM_SITE"] == f"of {seen['SLURMD_NODENAME']}"
        assert (seen["BOTH"], seen["ALSO"]) == ("of the file", "mine")
        assert "NOT_NAMED" not in seen
        assert (seen["SLURM_JOB_PARTITION"], seen["SLURM_NTASKS"]) == ("main", "2")


def test_a_line_of_setup_that_fails_ends_the_job_and_is_named(slurm_runs: SlurmRuns) -> None:
    lines = ["export FINE=1", "source /nowhere/site.sh"]
    run = slurm_runs.submit(slurm_runs.script_job((Stage("first"), "touch ran\n"), setup=lines))
    assert run.wait("first").state == "failed"
    assert "trainshed: setup failed with exit code 1 at line 2: source /nowhere/site.sh" in run.all_logs()
    assert not (run.folder / "ran").exists()


def test_a_job_that_waits_says_why_and_one_that_is_cancelled_ends(slurm_runs: SlurmRuns) -> None:
    long = (Stage("first"), "sleep 600\n")
    run = slurm_runs.submit(slurm_runs.script_job(long, (Stage("second"), "true\n"), slurm={"options": ["--hold"]}))
    assert run.states()["first"].reason == "is held by its owner (`scontrol release ID`)"
    run.slurm.run("scontrol", "release", run.id("first"))
    run.until(lambda: run.states()["first"].state == "running", "the start")
    assert run.states()["first"].nodes[0].startswith("n")
    assert run.target.cancel(run.submitted) == ("first", "second")
    assert run.wait("first").state == "cancelled"
    assert run.wait("second").state == "cancelled"
    assert run.target.cancel(run.submitted) == ()


def test_what_could_never_run_is_refused_before_it_is_submitted(slurm_runs: SlurmRuns) -> None:
    def refusals(stage: Stage, **changed: object) -> list[str]:
        job = slurm_runs.script_job((stage, "true\n"), **changed)
        return list(SlurmTarget(job.cluster).check(job))

    assert refusals(Stage("train", nodes=4)) == []
    assert refusals(Stage("train", nodes=9)) == ["train asks for 9 nodes, and the partition main has 4"]
    assert refusals(Stage("train", nodes=3, spares=2)) == [
        "train asks for 5 nodes (2 of them spare), and the partition main has 4"
    ]
    assert refusals(Stage("train", nodes=2), slurm={"partition": "small"}) == [
        "train asks for 2 nodes, and the partition small gives a job 1 at most"
    ]
    assert refusals(Stage("train"), slurm={"partition": "small"}, limits={"hours": 1.5}) == [
        "train asks for 1.5 hours, and the partition small gives 1 (limits.hours)"
    ]
    assert refusals(Stage("train"), slurm={"partition": "large"}) == [
        "train: there is no partition `large`; there are main, small"
    ]
    assert refusals(Stage("train", gpus_per_node=8), machine="dgx-h100", slurm={"gpus": "gpu:h100"}) == []
    assert refusals(Stage("train", gpus_per_node=8), machine="dgx-h100", slurm={"gpus": "gpu:a100"}) == [
        "train asks for gpu:a100:8 on each node, and the partition main has gpu:h100:8 (slurm.gpus)"
    ]
    assert refusals(Stage("train", gpus_per_node=9), machine="dgx-h100", slurm={"gpus": "gpu"}) == [
        "train asks for gpu:9 on each node, and the partition main has gpu:h100:8 (slurm.gpus)"
    ]
    assert refusals(Stage("train"), secrets={"HF_TOKEN": {"env": "SURELY_NOT_SET"}}) == [
        "the secret SURELY_NOT_SET is not set here, and jobs would be without it"
    ]


def test_a_stage_that_slurm_refuses_leaves_nothing_in_the_queue(slurm_runs: SlurmRuns) -> None:
    job = slurm_runs.script_job(
        (Stage("first"), "sleep 600\n"),
        (Stage("train"), "true\n"),
        slurm={"partition": "nowhere", "cpu_partition": "main"},
    )
    with pytest.raises(TrainshedError, match=r"train was refused: sbatch: .*partition") as raised:
        slurm_runs.submit(job)
    assert raised.value.hint == "nothing is left in the queue"
    assert "scripts-1-first" not in slurm_runs.slurm.run("squeue", "--noheader", "--format=%j %T", "--states=R,PD")


def test_the_same_works_through_ssh(slurm_runs: SlurmRuns, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ssh joins its arguments with spaces and gives them to a shell on the other side; this one stays here."""
    stub = tmp_path / "bin" / "ssh"
    stub.parent.mkdir()
    stub.write_text(
        '#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\n[ "$2" = user@login ] || exit 255\nshift 2\nexec sh -c "$*"\n'
    )
    stub.chmod(stub.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{stub.parent}:{os.environ['PATH']}")
    job = slurm_runs.script_job((Stage("first"), "echo 'far away'\n"), slurm={"login": "user@login"})
    assert SlurmTarget(job.cluster).check(job) == []
    run = slurm_runs.submit(job)
    assert run.wait("first").state == "done"
    assert "far away\n" in list(run.target.logs(run.submitted, "first"))


def test_a_person_submits_looks_and_cancels(
    slurm_runs: SlurmRuns, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "recipe.yaml").write_text(recipe_text("dense"))
    cluster = write_cluster(tmp_path, slurm={"options": ["--hold"]})
    asked = [str(tmp_path / "recipe.yaml"), "layout.dp=2", "--on", str(cluster)]
    assert run_cli(["render", *asked]) == 0
    rendered = capsys.readouterr().out
    assert run_cli(["submit", *asked, "--yes", "-o", "json"]) == 0
    sent = json.loads(capsys.readouterr().out)
    assert list(sent["ids"]) == ["prepare", "train"]
    kept = slurm_runs.slurm.run("scontrol", "write", "batch_script", sent["ids"]["train"], "-")
    assert kept.replace(f"afterok:{sent['ids']['prepare']}", "afterok:<id of prepare>", 1).strip() in rendered
    assert run_cli(["status", "proof"]) == 0
    shown = capsys.readouterr().out
    assert "is held by its owner" in shown
    assert run_cli(["submit", *asked, "--nodes", "9", "layout.dp=9", "train.global_batch=9", "--yes"]) == 2
    assert "train asks for 9 nodes, and the partition main has 4" in capsys.readouterr().err
    assert run_cli(["cancel", "proof"]) == 0
    assert "prepare, train" in capsys.readouterr().out
    assert run_cli(["status", "proof", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "cancelled"


@pytest.mark.full
def test_doctor_takes_nodes_and_says_whether_they_are_ready(
    slurm_runs: SlurmRuns, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert run_cli(["doctor", "--on", str(write_cluster(tmp_path)), "--nodes", "2", "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    verdict = found["groups"]["preflight"][-1]
    assert verdict["verdict"] == "pass"
    assert verdict["what"].startswith("2 nodes are ready: all-reduce of")
