"""The script that every container starts with, really run."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import trainshed
from support.clusters.bare_python import bare_python
from support.clusters.kubernetes_jobs import cluster_of, train_alone
from trainshed.launch.fabric import FabricSetup
from trainshed.launch.kubernetes.code import CODE_PIECE_BYTES
from trainshed.launch.kubernetes.objects import LOCAL_FOLDER
from trainshed.launch.kubernetes.pod import entry_script, fabric_script
from trainshed.launch.ranks import free_port

SHOWN = 'printf "%s\\n" "$TRAINSHED_NODE_RANK" "$NODE_RANK" "${RANK-unset}" "${TRAINSHED_HOST-}"'


def enter(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    script = folder / "entry.sh"
    script.write_text(entry_script())
    own = {"PATH": os.environ["PATH"], "TRAINSHED_PYTHON": sys.executable, "TRAINSHED_DNS_SECONDS": "0"}
    return subprocess.run(
        ["bash", str(script), *command], env=own | environment, capture_output=True, text=True, timeout=60
    )


def test_the_paths_in_the_script_are_those_in_the_manifests() -> None:
    assert f":-{LOCAL_FOLDER}}}" in entry_script()


def packed_module() -> bytes:
    """An archive as our code is sent, larger than a ConfigMap."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:xz") as archive:
        body = b"WHERE = 'shipped'\n" + b"#" * 200_000 + os.urandom(400_000).hex().encode()
        entry = tarfile.TarInfo("shipped_module.py")
        entry.size = len(body)
        archive.addfile(entry, io.BytesIO(body))
    assert len(data.getvalue()) > CODE_PIECE_BYTES
    return data.getvalue()


ASK = [sys.executable, "-c", "import shipped_module; print(shipped_module.WHERE)"]


def code_variables(folder: Path, place: Path, data: bytes) -> dict[str, str]:
    (folder / "image").mkdir()
    (folder / "image" / "shipped_module.py").write_text("WHERE = 'image'\n")
    (folder / "local").mkdir()
    return {
        "TRAINSHED_CODE": str(place),
        "TRAINSHED_CODE_SHA256": hashlib.sha256(data).hexdigest(),
        "TRAINSHED_LOCAL_FOLDER": str(folder / "local"),
        "PYTHONPATH": str(folder / "image"),
    }


def test_our_code_is_put_together_from_config_maps_and_comes_first(tmp_path: Path) -> None:
    packed, pieces = packed_module(), tmp_path / "code"
    pieces.mkdir()
    for number, start in enumerate(range(0, len(packed), CODE_PIECE_BYTES)):
        (pieces / f"piece-{number:03d}").write_bytes(packed[start : start + CODE_PIECE_BYTES])
    variables = code_variables(tmp_path, pieces, packed)
    for _ in range(2):  # a container that starts again finds it there
        done = enter(tmp_path, *ASK, **variables)
        assert done.stdout == "shipped\n", done.stderr
        shutil.rmtree(pieces, ignore_errors=True)


def test_our_code_is_taken_from_the_store_and_compared_with_its_hash(tmp_path: Path) -> None:
    packed, archive = packed_module(), tmp_path / "code.tar.xz"
    variables = code_variables(tmp_path, archive, packed)
    missing = enter(tmp_path, *ASK, **variables)
    assert missing.returncode == 1
    assert "error: our code cannot be read" in missing.stderr
    archive.write_bytes(packed[:-1] + b"!")
    damaged = enter(tmp_path, *ASK, **variables)
    assert damaged.returncode == 1
    assert f"error: {archive} is not the code that this job was written with" in damaged.stderr
    archive.write_bytes(packed)
    assert enter(tmp_path, *ASK, **variables).stdout == "shipped\n"


@pytest.mark.parametrize("version", ["3.8", "3.12"])
def test_our_code_is_unpacked_by_any_python(tmp_path: Path, version: str) -> None:
    packed, archive = packed_module(), tmp_path / "code.tar.xz"
    archive.write_bytes(packed)
    variables = code_variables(tmp_path, archive, packed) | {"TRAINSHED_PYTHON": str(bare_python(version))}
    done = enter(tmp_path, *ASK, **variables)
    assert (done.stdout, done.stderr) == ("shipped\n", "")


@pytest.mark.parametrize(
    ("given", "rank", "host"),
    [
        ({"JOB_COMPLETION_INDEX": "0", "MASTER_ADDR": "run-train-0-0.run"}, "0", "run-train-0-0.run"),
        ({"JOB_COMPLETION_INDEX": "7", "MASTER_ADDR": "localhost"}, "7", "localhost-7"),
        ({"RANK": "0", "MASTER_ADDR": "run-master-0"}, "0", "run-master-0"),
        ({}, "0", ""),
    ],
)
def test_a_pod_knows_which_node_it_is_and_how_others_call_it(
    tmp_path: Path, given: dict[str, str], rank: str, host: str
) -> None:
    done = enter(tmp_path, "bash", "-c", SHOWN, **given)
    assert done.stdout.splitlines() == [rank, rank, "unset", host], done.stderr


@pytest.mark.parametrize(
    ("master", "rank", "host"),
    [("run-train-0-0.run", "11", "run-train-0-11.run"), ("run-master-0", "3", "run-worker-2")],
)
def test_names_of_other_pods_follow_from_the_first(tmp_path: Path, master: str, rank: str, host: str) -> None:
    # Where nobody answers for node 0 the script ends; what it would have exported is shown by a fabric's script.
    shown = tmp_path / "show.sh"
    shown.write_text('printf "%s\\n" "$TRAINSHED_HOST"\n')
    done = enter(tmp_path, "true", MASTER_ADDR=master, JOB_COMPLETION_INDEX=rank, TRAINSHED_FABRIC=str(shown))
    assert done.stdout == f"{host}\n"
    assert done.returncode == 1
    assert f"node 0 ({master}) has no address after 0 s: is its pod placed?" in done.stderr


@pytest.mark.parametrize("code", [0, 1, 2, 143])
def test_the_exit_code_is_the_commands_own(tmp_path: Path, code: int) -> None:
    assert enter(tmp_path, "bash", "-c", f"exit {code}").returncode == code


def test_arguments_reach_the_command_as_they_are(tmp_path: Path) -> None:
    odd = ["$(touch broken)", 'a "b" c', "x\ny", "`id`", "'; exit 3 #"]
    done = enter(tmp_path, sys.executable, "-c", "import sys; print(sys.argv[1:])", *odd)
    assert done.stdout == f"{odd}\n"


def test_what_the_cluster_file_says_holds_behind_the_vendors_script(tmp_path: Path) -> None:
    vendor = tmp_path / "vendor profile.sh"
    vendor.write_text('export NCCL_TUNER="$UNSET_BY_VENDOR" NCCL_DEBUG=WARN NCCL_ALGO=Ring\nfalse\n')
    setup = FabricSetup("tcpxo", "tcpxo", "v1", environment={"NCCL_NET": "FasTrak"}, profile_script=str(vendor))
    odd = "it's $(touch broken)"
    cluster = cluster_of({"environment": {"NCCL_DEBUG": "INFO", "ODD": odd}})
    script = fabric_script(setup, cluster, train_alone()[0])
    assert script is not None
    (tmp_path / "fabric.sh").write_text(script)
    shown = 'printf "%s\\n" "$NCCL_NET" "$NCCL_DEBUG" "$NCCL_ALGO" "$ODD"'
    done = enter(tmp_path, "bash", "-c", shown, TRAINSHED_FABRIC=str(tmp_path / "fabric.sh"))
    assert done.stdout.splitlines() == ["FasTrak", "INFO", "Ring", odd], done.stderr
    vendor.unlink()
    gone = enter(tmp_path, "true", TRAINSHED_FABRIC=str(tmp_path / "fabric.sh"))
    assert gone.returncode == 1
    assert "the fabric's script failed: was its plugin installed?" in gone.stderr


def test_a_fabric_that_asks_for_nothing_has_no_script() -> None:
    assert fabric_script(FabricSetup("ethernet", "ethernet", ""), cluster_of({}), train_alone()[0]) is None


def test_pods_of_a_pytorchjob_name_their_start_together(tmp_path: Path) -> None:
    # What the operator sets, in two pods of one host.
    given = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "TRAINSHED_MEET": "2", "POD_UID": "uid-of-0"}
    given |= {"TRAINSHED_LOCAL_FOLDER": str(tmp_path), "PYTHONPATH": str(Path(trainshed.__file__).parents[1])}
    show = ["bash", "-c", 'printf "%s" "$TRAINSHED_START"']
    with ThreadPoolExecutor(2) as pool:
        pods = [pool.submit(enter, tmp_path, *show, RANK=str(rank), **given) for rank in (0, 1)]
        done = [pod.result() for pod in pods]
    assert [each.stdout for each in done] == ["uid-of-0-0", "uid-of-0-0"], [each.stderr for each in done]
