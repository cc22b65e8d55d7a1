"""What was submitted from here is found again by name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainshed.errors import NoSuchName
from trainshed.launch.submissions import find_submission, forget_submission, record_submission, submissions
from trainshed.launch.target import SubmittedJob

CLUSTER = "name: mine\ntarget: slurm\nstore: /shared\n"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "trainshed" / "runs"


def submit(name: str, id: str, state: Path, age: int = 0) -> None:
    job = f"{name}-{id}"
    record_submission(name, id, 100, SubmittedJob(job, f"/shared/runs/{name}/{id}", "slurm", {"train": "17"}), CLUSTER)
    at = 1_000_000_000 - age
    os.utime(state / job / "submitted.json", (at, at))


@pytest.mark.parametrize("text", ["night", "night/00000001", "night-00000001", "/shared/runs/night/00000001"])
def test_a_run_is_found_by_whatever_a_person_calls_it(text: str, state: Path) -> None:
    submit("night", "00000001", state)
    found = find_submission(text)
    assert (found.run, found.steps, found.submitted.ids) == ("night/00000001", 100, {"train": "17"})
    assert found.cluster.name == "mine"


def test_of_several_runs_of_one_name_the_newest_is_meant(state: Path) -> None:
    submit("night", "00000001", state, age=60)
    submit("night", "00000002", state)
    assert find_submission("night").id == "00000002"
    assert find_submission("night/00000001").id == "00000001"
    assert [each.id for each in submissions()] == ["00000002", "00000001"]


def test_a_run_that_was_never_submitted_here_is_an_error_that_names_those_that_were(state: Path) -> None:
    submit("night", "00000001", state)
    with pytest.raises(NoSuchName, match="no such run was submitted") as caught:
        find_submission("day")
    assert "night/00000001" in (caught.value.hint or "")


def test_a_run_that_is_forgotten_is_gone_from_the_list(state: Path) -> None:
    submit("night", "00000001", state)
    forget_submission(find_submission("night"))
    assert submissions() == []
