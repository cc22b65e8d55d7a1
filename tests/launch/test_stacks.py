"""Stacks of a job's ranks: the commands that read them on its nodes, and what comes back."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from trainshed.errors import InputError, TrainshedError
from trainshed.launch.stacks import parse_stacks, read_remote_stacks, stack_commands, stack_script
from trainshed.launch.target import RemoteCommand, StageState, SubmittedJob
from trainshed.recipe import Cluster

SUBMITTED = SubmittedJob("r-1", "/s/runs/r/1", "slurm", {"train": "7"}, ranks_per_node=8)
RUNNING = StageState("train", "running", "", id="7", nodes=("n1", "n2"))


def cluster(**keys: object) -> Cluster:
    return Cluster.model_validate({"name": "c", "target": "slurm", **keys})


def test_one_step_of_slurm_reaches_all_nodes_and_a_rank_its_own() -> None:
    (every,) = stack_commands(cluster(), SUBMITTED, RUNNING)
    assert every.text() == "srun --jobid=7 --overlap --ntasks-per-node=1 python3 - /s/runs/r/1"
    (one,) = stack_commands(cluster(slurm={"login": "login"}), SUBMITTED, RUNNING, rank=12)
    assert one.command[:3] == ("ssh", "--", "login")
    assert one.command[3] == "srun --jobid=7 --overlap --nodes=1 --ntasks=1 --nodelist=n2 python3 - /s/runs/r/1 12"


def test_on_kubernetes_each_pod_is_asked() -> None:
    place = cluster(target="kubernetes", kubernetes={"context": "prod", "namespace": "team"}, python="/opt/python")
    pods = StageState("train", "running", "", nodes=("pod-0", "pod-1"))
    texts = [command.text() for command in stack_commands(place, SUBMITTED, pods)]
    head = "kubectl --context prod --namespace team exec -i"
    assert texts == [f"{head} pod-{number} -- /opt/python - /s/runs/r/1" for number in range(2)]
    assert [command.command[-4:] for command in stack_commands(place, SUBMITTED, pods, 9)] == [
        ("/opt/python", "-", "/s/runs/r/1", "9")
    ]


def test_ray_has_no_way_to_its_ranks_and_says_so() -> None:
    with pytest.raises(InputError, match="Ray has no way") as raised:
        stack_commands(cluster(target="ray", ray={"address": "http://head:8265"}), SUBMITTED, RUNNING)
    assert "trainshed stacks" in (raised.value.hint or "")


def test_a_rank_that_the_job_does_not_have_is_refused() -> None:
    with pytest.raises(InputError, match="train runs on 2 nodes"):
        stack_commands(cluster(), SUBMITTED, RUNNING, rank=16)


def node(tmp_path: Path, name: str, body: str) -> RemoteCommand:
    """A command that stands for srun or kubectl: it gets the script and prints what a node would."""
    program = tmp_path / name
    program.write_text(f"#!/bin/sh\ncat > {tmp_path}/{name}.input\n{body}\n")
    program.chmod(0o755)
    return RemoteCommand((str(program),), f"the ranks in {name}")


def test_every_node_gets_the_script_and_one_that_fails_is_named(tmp_path: Path) -> None:
    line = orjson.dumps({"host": "n1", "ranks": [{"rank": 1, "host": "n1", "pid": 5, "stack": ["a.py:1 in f"]}]})
    commands = [
        node(tmp_path, "pod-0", f"echo 'a site greets'; echo '{line.decode()}'"),
        node(tmp_path, "pod-1", "echo 'pods is forbidden' >&2; exit 1"),
    ]
    stacks, problems = read_remote_stacks(commands)
    assert [(stack.rank, stack.stack) for stack in stacks] == [(1, ["a.py:1 in f"])]
    assert problems == ["the ranks in pod-1: pods is forbidden"]
    assert (tmp_path / "pod-0.input").read_bytes() == stack_script().read_bytes()


def test_a_program_that_is_missing_here_is_named_with_the_command() -> None:
    with pytest.raises(InputError, match="there is no `no-such-srun` on this machine"):
        read_remote_stacks([RemoteCommand(("no-such-srun", "x"), "all")])


def test_an_answer_that_is_none_is_an_error() -> None:
    with pytest.raises(TrainshedError, match="not a list of stacks"):
        parse_stacks(b'{"another": 1}\n')
