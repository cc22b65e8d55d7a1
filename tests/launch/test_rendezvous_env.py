"""A node finds its place from what its target has set, and says by name what is missing."""

from __future__ import annotations

import socket

import pytest

from trainshed.errors import InputError
from trainshed.launch.job import Stage
from trainshed.launch.rendezvous import AgentTimeouts, NodeEnv, stage_part, startup_phases, unused_port

TWO = Stage("train", nodes=2, spares=1)
PLACE = {"TRAINSHED_START": "s", "MASTER_ADDR": "first", "MASTER_PORT": "29500", "TRAINSHED_HOST": "here"}


@pytest.mark.parametrize("name", ["TRAINSHED_NODE_RANK", "SLURM_NODEID", "JOB_COMPLETION_INDEX"])
def test_every_target_says_in_its_own_way_which_node_this_is(name: str) -> None:
    node_env = NodeEnv.from_environment(TWO, PLACE | {name: "2"})
    assert node_env == NodeEnv(2, 3, "here", ("first", 29500), "s")
    assert not node_env.is_leader


def test_our_own_variable_goes_before_the_schedulers() -> None:
    node_env = NodeEnv.from_environment(TWO, PLACE | {"TRAINSHED_NODE_RANK": "0", "SLURM_NODEID": "1"})
    assert node_env.is_leader


def test_slurm_says_under_which_name_a_node_is_reached() -> None:
    environment = {name: value for name, value in PLACE.items() if name != "TRAINSHED_HOST"}
    node_env = NodeEnv.from_environment(TWO, environment | {"SLURM_NODEID": "1", "SLURMD_NODENAME": "n7"})
    assert node_env.host == "n7"


def test_a_node_alone_needs_nothing() -> None:
    node_env = NodeEnv.from_environment(Stage("train"), {})
    assert (node_env.slot, node_env.slots, node_env.master[0]) == (0, 1, "127.0.0.1")
    assert node_env.start != NodeEnv.from_environment(Stage("train"), {}).start


@pytest.mark.parametrize(
    ("environment", "what"),
    [
        ({}, "TRAINSHED_NODE_RANK is not set: nothing says which of the 3 nodes this is"),
        ({"SLURM_NODEID": "3"}, "SLURM_NODEID is `3`, and there are 3"),
        ({"SLURM_NODEID": "1", "MASTER_ADDR": ""}, "MASTER_ADDR is not set: nothing says where rank 0 listens"),
        ({"SLURM_NODEID": "1", "MASTER_PORT": "x"}, "MASTER_PORT is not set: nothing says where rank 0 listens"),
        ({"SLURM_NODEID": "1", "TRAINSHED_START": ""}, "TRAINSHED_START is not set: nothing says which start"),
    ],
)
def test_what_is_missing_is_named(environment: dict[str, str], what: str) -> None:
    with pytest.raises(InputError) as raised:
        NodeEnv.from_environment(TWO, PLACE | environment)
    assert raised.value.what.startswith(what)


def test_a_part_is_told_or_found() -> None:
    cut = Stage("tokenise", parts=4)
    assert stage_part(Stage("prepare"), "0/1", {}) is None
    assert stage_part(cut, "3/4", {"SLURM_ARRAY_TASK_ID": "1"}) == "3/4"
    assert stage_part(cut, None, {"SLURM_ARRAY_TASK_ID": "1"}) == "1/4"
    assert stage_part(cut, None, {"JOB_COMPLETION_INDEX": "2"}) == "2/4"
    for wrong in ("4/4", "1/3", "x", "1"):
        with pytest.raises(InputError, match="is not a part of tokenise, which has 4"):
            stage_part(cut, wrong, {})
    with pytest.raises(InputError, match="TRAINSHED_PART is not set"):
        stage_part(cut, None, {})


def test_patience_can_be_changed_by_name() -> None:
    assert AgentTimeouts.from_environment({}) == AgentTimeouts()
    assert AgentTimeouts.from_environment({"TRAINSHED_LOST_SECONDS": "7.5"}).lost_seconds == 7.5
    with pytest.raises(InputError, match="TRAINSHED_LOST_SECONDS is `soon`, which is not a number of seconds"):
        AgentTimeouts.from_environment({"TRAINSHED_LOST_SECONDS": "soon"})


def test_what_came_before_the_agent_is_timed_where_the_script_says_when() -> None:
    assert startup_phases({}) == {}
    found = startup_phases({"TRAINSHED_BEGAN": "100", "TRAINSHED_INSTALLED": "103"})
    assert found["install"] == 3
    assert found["image"] > 0


def test_a_port_that_somebody_listens_on_is_passed_over() -> None:
    with socket.create_server(("", 0)) as listener:
        taken = listener.getsockname()[1]
        assert unused_port(taken) > taken
    assert unused_port(taken) == taken
