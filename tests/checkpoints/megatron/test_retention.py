"""`checkpoint.keep` of Megatron's checkpoints: the newest is never touched, and a removal may be killed anywhere."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainshed.checkpoints.megatron import retention
from trainshed.checkpoints.megatron.retention import (
    is_complete,
    is_newest_attempt,
    iteration_folders,
    removable_iterations,
    remove_old,
)


def save(folder: Path, iteration: int, *, commit: bool = True, legacy: bool = False) -> None:
    """Write an iteration as Megatron does: data, then its table, then the pointer."""
    path = folder / f"iter_{iteration:07d}"
    names = ["mp_rank_00/model_optim_rng.pt"] if legacy else ["__0_0.distcp", "__1_0.distcp"]
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(b"data")
    if commit:
        for name in () if legacy else ("common.pt", ".metadata", "metadata.json"):
            (path / name).write_bytes(b"{}")
        (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for iteration in (100, 200, 300, 400):
        save(tmp_path, iteration)
    return tmp_path


def iterations(folder: Path) -> list[int]:
    return sorted(iteration_folders(folder))


@pytest.mark.parametrize(("keep", "left"), [(1, [400]), (3, [200, 300, 400]), (9, [100, 200, 300, 400])])
def test_the_newest_are_kept(folder: Path, keep: int, left: list[int]) -> None:
    remove_old(folder, keep, lambda: True)
    assert iterations(folder) == left


def test_none_keeps_all_that_are_complete(folder: Path) -> None:
    (folder / "iter_0000200" / ".metadata").unlink()
    assert remove_old(folder, None, lambda: True) == [200]


def test_a_save_that_has_not_ended_is_left_alone_and_does_not_count(folder: Path) -> None:
    save(folder, 500, commit=False)
    assert remove_old(folder, 2, lambda: True) == [100, 200]
    assert iterations(folder) == [300, 400, 500]


def test_the_older_format_is_known(tmp_path: Path) -> None:
    for iteration in (100, 200):
        save(tmp_path, iteration, legacy=True)
    assert is_complete(tmp_path / "iter_0000100")
    assert remove_old(tmp_path, 1, lambda: True) == [100]


@pytest.mark.parametrize("pointer", [None, "release", "900", ""])
def test_nothing_goes_where_it_is_not_known_what_megatron_would_load(folder: Path, pointer: str | None) -> None:
    file = folder / "latest_checkpointed_iteration.txt"
    file.unlink() if pointer is None else file.write_text(pointer)
    assert removable_iterations(folder, 1) == []


def test_a_broken_latest_keeps_all_others(folder: Path) -> None:
    (folder / "iter_0000400" / ".metadata").unlink()
    assert removable_iterations(folder, 1) == []


def test_after_a_fall_back_what_is_newer_than_the_pointer_is_left(folder: Path) -> None:
    (folder / "latest_checkpointed_iteration.txt").write_text("300")
    assert remove_old(folder, 1, lambda: True) == [100, 200]
    assert iterations(folder) == [300, 400]


def test_an_attempt_that_was_overtaken_removes_nothing_more(folder: Path, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    for name in ("attempt-0001", "attempt-0002", "index"):
        (logs / name).mkdir(parents=True)
    assert is_newest_attempt(logs / "attempt-0002")
    assert not is_newest_attempt(logs / "attempt-0001")
    answers = iter([True, False])
    assert remove_old(folder, 1, lambda: next(answers)) == [100]
    assert iterations(folder) == [200, 300, 400]


@pytest.mark.parametrize("calls", range(6))
def test_a_removal_that_is_killed_leaves_no_half_checkpoint(
    folder: Path, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each folder that is left is whole or is not a checkpoint, and the next removal takes the rest."""
    done = 0

    def dying(work: object) -> object:
        def call(*arguments: object, **options: object) -> object:
            nonlocal done
            if done == calls:
                raise KeyboardInterrupt
            done += 1
            return work(*arguments, **options)  # type: ignore[operator]

        return call

    def remove_half(path: str, **_: object) -> None:
        next(Path(path).glob("*.distcp")).unlink()
        shutil_rmtree(path)

    shutil_rmtree = shutil.rmtree
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", dying(Path.unlink))
        patch.setattr(retention.shutil, "rmtree", dying(remove_half))
        with pytest.raises(KeyboardInterrupt):
            remove_old(folder, 1, lambda: True)
    for path in iteration_folders(folder).values():
        assert not is_complete(path) or len(list(path.glob("*"))) == 5
    assert is_complete(folder / "iter_0000400")
    remove_old(folder, 1, lambda: True)
    assert iterations(folder) == [400]


def test_as_a_program_of_the_job_it_needs_the_standard_library_alone(folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "keep_checkpoints.py"
    shutil.copy(retention.__file__, script)
    logs = tmp_path / "logs" / "attempt-0001"
    logs.mkdir(parents=True)
    command = [sys.executable, "-I", str(script), str(folder), "2", str(logs)]
    done = subprocess.run([*command, "--once"], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "trainshed: removed the checkpoint of step 100, 2 are kept",
        "trainshed: removed the checkpoint of step 200, 2 are kept",
    ]
    assert iterations(folder) == [300, 400]


def test_a_removal_that_is_really_killed_leaves_the_newest(folder: Path, tmp_path: Path) -> None:
    for iteration in (100, 200, 300):
        for number in range(400):
            (folder / f"iter_{iteration:07d}" / f"__{number}_1.distcp").write_bytes(b"data")
    script = tmp_path / "keep_checkpoints.py"
    shutil.copy(retention.__file__, script)
    logs = tmp_path / "logs" / "attempt-0001"
    logs.mkdir(parents=True)
    running = subprocess.Popen([sys.executable, "-I", str(script), str(folder), "1", str(logs)])
    while is_complete(folder / "iter_0000100"):
        time.sleep(0.001)
    running.kill()
    running.wait()
    for iteration, path in iteration_folders(folder).items():
        whole = 5 + (400 if iteration < 400 else 0)
        assert not is_complete(path) or len(list(path.iterdir())) == whole
    assert is_complete(folder / "iter_0000400")
    assert remove_old(folder, 1, lambda: True) is not None
    assert iterations(folder) == [400]
