"""Ways into a job are commands of the user's own ssh, srun and kubectl."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainshed.errors import InputError
from trainshed.launch.target import StageState, SubmittedJob, shell_command, tunnel_command
from trainshed.recipe import Cluster

SUBMITTED = SubmittedJob("r-1", "/s/runs/r/1", "slurm", {"train": "7"}, ranks_per_node=8)
RUNNING = StageState("train", "running", "", id="7", nodes=("n1", "n2"))


def cluster(**keys: object) -> Cluster:
    return Cluster.model_validate({"name": "c", "target": "slurm", **keys})


def test_a_shell_opens_on_the_node_of_the_rank_inside_its_job() -> None:
    way = shell_command(cluster(), SUBMITTED, RUNNING, 12)
    assert way.command[:3] == ("srun", "--jobid=7", "--overlap")
    assert "--nodelist=n2" in way.command
    assert way.command[-1] == "bash"


def test_words_with_spaces_reach_the_login_node_as_one_word() -> None:
    way = shell_command(cluster(slurm={"login": "login"}), SUBMITTED, RUNNING, 0, ("echo", "a b; rm -rf /"))
    assert way.command[:4] == ("ssh", "-t", "--", "login")
    assert way.command[4].endswith("echo 'a b; rm -rf /'")


def test_on_kubernetes_both_name_the_context_and_namespace() -> None:
    place = cluster(target="kubernetes", kubernetes={"context": "prod", "namespace": "team"})
    pods = StageState("train", "running", "", nodes=("pod-0", "pod-1"))
    server = StageState("serve", "serving", "", id="Deployment/r-1-serve", nodes=("pod-0",))
    assert tunnel_command(place, SUBMITTED, server).command == (
        *("kubectl", "--context", "prod", "--namespace", "team"),
        *("port-forward", "service/r-1-serve", "8000:80"),
    )
    assert shell_command(place, SUBMITTED, pods, 9, ("nvidia-smi",)).command[-4:] == (
        "-it",
        "pod-1",
        "--",
        "nvidia-smi",
    )


def test_a_server_is_reached_by_its_service_or_on_the_port_of_its_node() -> None:
    place = cluster(target="kubernetes", kubernetes={"namespace": "team"})
    pods = StageState("serve", "serving", "", id="Deployment/r-1-serve", nodes=("pod-0", "pod-1"))
    assert tunnel_command(place, SUBMITTED, pods).command[-3:] == ("port-forward", "service/r-1-serve", "8000:80")
    assert shell_command(place, SUBMITTED, pods, 1).command[-4:] == ("-it", "pod-1", "--", "bash")
    on_slurm = replace(SUBMITTED, serve_port=20123)
    node = StageState("serve", "serving", "", id="9", nodes=("n3",))
    way = tunnel_command(cluster(slurm={"login": "login"}), on_slurm, node, 9000)
    assert way.command == ("ssh", "-N", "-L", "9000:n3:20123", "--", "login")
    assert way.description == "serve at http://localhost:9000"


@pytest.mark.parametrize(
    ("state", "rank", "what"),
    [
        (StageState("train", "waiting", "it waits for two nodes"), 0, "train is not running: it waits for two nodes"),
        (RUNNING, 16, "train runs on 2 nodes"),
    ],
)
def test_there_is_no_way_to_what_does_not_run(state: StageState, rank: int, what: str) -> None:
    with pytest.raises(InputError, match=what):
        shell_command(cluster(), SUBMITTED, state, rank)
