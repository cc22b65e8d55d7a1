"""`trainshed checkpoints`: what it lists, proves and removes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from support.runs.checkpoint_parts import FOLDER, RUN, save_whole, some_state
from trainshed.checkpoints.mirror import upload_checkpoints
from trainshed.checkpoints.native.folder import BestPointer
from trainshed.cli import run_cli
from trainshed.recipe import load_recipe, to_yaml
from trainshed.storage import LocalStore
from trainshed.storage.attempts import take_attempt


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """Steps 100, 200 and 300 of one attempt, and what a second one has begun."""
    store = LocalStore(tmp_path)
    attempt = take_attempt(store, RUN)
    for step in (100, 200, 300):
        save_whole(attempt, step, some_state())
    store.put(f"{FOLDER}/step-00000250/__0_1.distcp", b"left by the first attempt")
    take_attempt(store, RUN)
    store.put(f"{FOLDER}/step-00000400/__0_2.distcp", b"being written")
    return store


def rot(store: LocalStore, step: int) -> None:
    path = f"{FOLDER}/step-{step:08d}/__0_1.distcp"
    data = bytearray(store.read(path))
    data[len(data) // 2] ^= 1
    store.put(path, bytes(data))


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = run_cli(["checkpoints", *arguments, "-o", "json"])
    return code, json.loads(capsys.readouterr().out)


def test_it_lists_what_is_complete_and_what_is_not(
    store: LocalStore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, data = report(capsys, f"{store.url}/{RUN}")
    assert code == 0
    assert data["schema"] == "trainshed.checkpoints/1"
    assert data["latest"] == 300
    rows = {row["step"]: row for row in data["checkpoints"]}
    assert {step: row["complete"] for step, row in rows.items()} == {
        400: False,
        300: True,
        250: False,
        200: True,
        100: True,
    }
    assert rows[300]["attempt"] == 1
    assert rows[300]["bytes"] > 0
    assert [step for step, row in rows.items() if row["latest"]] == [300]
    assert run_cli(["checkpoints", f"{store.url}/{FOLDER}"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{store.url}/{RUN}: 3 checkpoints, ")
    assert "complete  <- latest" in shown
    assert "incomplete: it has no manifest" in shown
    monkeypatch.chdir(f"{store.url}/{RUN}")
    for here in (".", "checkpoints"):
        assert report(capsys, here)[1]["latest"] == 300


def test_verify_proves_every_byte_and_finds_the_rotten_one(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    code, data = report(capsys, f"{store.url}/{RUN}", "--verify")
    assert code == 0
    assert [row["verified"] for row in data["checkpoints"] if row["complete"]] == [True] * 3
    rot(store, 200)
    code, data = report(capsys, f"{store.url}/{RUN}", "--verify")
    assert code == 1
    assert [row["step"] for row in data["checkpoints"] if row["verified"] is False] == [200]
    assert run_cli(["checkpoints", f"{store.url}/{RUN}", "--verify"]) == 1
    assert "BROKEN: 1 file is not what their manifest says: __0_1.distcp" in capsys.readouterr().out


def test_prune_removes_the_old_the_broken_and_the_abandoned_and_spares_what_is_being_written(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    rot(store, 300)
    code, data = report(capsys, f"{store.url}/{RUN}", "--verify", "--prune", "--keep", "1")
    assert code == 0
    assert data["removed"] == [100, 250, 300]
    assert [row["step"] for row in data["checkpoints"]] == [400, 200]
    assert store.head(f"{FOLDER}/step-00000400/__0_2.distcp") is not None
    folders = sorted(path.name for path in (Path(store.url) / FOLDER).glob("step-*"))
    assert folders == ["step-00000200", "step-00000400"]
    code, data = report(capsys, f"{store.url}/{RUN}", "--prune")
    assert (code, data["removed"]) == (0, [])


def test_the_best_is_shown_with_its_loss_and_no_prune_takes_it(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    store.put(f"{FOLDER}/best", BestPointer(100, 2.34567, 1).to_bytes())
    _, data = report(capsys, f"{store.url}/{RUN}")
    assert data["best"] == {"step": 100, "loss": 2.34567}
    assert [row["step"] for row in data["checkpoints"] if row["best"]] == [100]
    assert run_cli(["checkpoints", f"{store.url}/{RUN}"]) == 0
    assert "complete  <- best, validation loss 2.3457" in capsys.readouterr().out
    code, data = report(capsys, f"{store.url}/{RUN}", "--prune", "--keep", "1")
    assert (code, data["removed"]) == (0, [200, 250])
    rot(store, 100)
    code, data = report(capsys, f"{store.url}/{RUN}", "--verify", "--prune")
    assert (code, data["removed"]) == (1, []), "a broken best is left to a person"
    assert run_cli(["checkpoints", f"{store.url}/{RUN}", "--verify"]) == 1
    assert "  <- best, validation loss 2.3457" in capsys.readouterr().out
    assert (Path(store.url) / FOLDER / "step-00000100" / "manifest.json").is_file()


def test_a_run_is_found_by_its_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from trainshed.recipe import load_recipe, run_id
    from trainshed.workflow import resolve

    root = f"store={tmp_path}/store"
    recipe = resolve(load_recipe("quickstart", [root]))
    store = LocalStore(tmp_path / "store")
    save_whole(take_attempt(store, f"runs/{recipe.name}/{run_id(recipe)}"), 7, some_state())
    code, data = report(capsys, "quickstart", root)
    assert (code, [row["step"] for row in data["checkpoints"]]) == (0, [7])
    save_whole(take_attempt(store, f"runs/{recipe.name}/another"), 9, some_state())
    code, data = report(capsys, "quickstart", root, "--id", "another")
    assert (code, [row["step"] for row in data["checkpoints"]]) == (0, [9])


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--keep", "2"], 2, "write --prune --keep 2"),
        (["--prune", "--keep", "0"], 2, "the newest checkpoint is never removed"),
        (["train.steps=3"], 2, "belongs to a recipe"),
        (["--id", "x"], 2, "belongs to a recipe"),
    ],
)
def test_wrong_input_says_what_to_write(
    store: LocalStore, arguments: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(["checkpoints", f"{store.url}/{RUN}", *arguments]) == code
    assert said in capsys.readouterr().err


def test_a_run_without_checkpoints_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["checkpoints", str(tmp_path)]) == 1
    assert "this run has no checkpoints" in capsys.readouterr().err


def test_another_engines_checkpoints_are_its_own_and_where_they_are_lost_the_copies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "store" / "runs" / "minio-llama3-1-70b-cpt" / "1a2b3c4d"
    folder = run / "checkpoints-megatron" / "iter_0000020"
    folder.mkdir(parents=True)
    for name in (".metadata", "common.pt", "__0_0.distcp"):
        (folder / name).write_bytes(b"content")
    (run / "checkpoints-megatron" / "latest_checkpointed_iteration.txt").write_text("20")
    bucket = tmp_path / "bucket"
    recipe = load_recipe("minio-llama3-1-70b-cpt", [f"checkpoint.to={bucket}"])
    (run / "recipe.yaml").write_text(to_yaml(recipe))
    upload_checkpoints(run, str(bucket / "minio-llama3-1-70b-cpt" / "1a2b3c4d"))
    code, data = report(capsys, str(run))
    assert (code, [row["step"] for row in data["checkpoints"]]) == (0, [20])
    assert str(run) in data["checkpoints"][0]["path"]
    shutil.rmtree(run / "checkpoints-megatron")
    code, data = report(capsys, str(run))
    assert (code, [row["step"] for row in data["checkpoints"]]) == (0, [20])
    assert str(bucket) in data["checkpoints"][0]["path"]
