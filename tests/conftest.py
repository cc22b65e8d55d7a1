"""What all tests share: their settings, and real parts such as an S3 server, started once for the whole session."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))
# Tiny tensors need no threads: on busy cores, several of them wait for each other longer than they compute. Set before
# PyTorch is loaded, and for the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from support.missing_parts import missing_part, session_folder
from support.servers.s3_server import S3Server, missing_binaries, shared_server
from trainshed import plugins

# Whoever starts the tests with nohup or in the background of a shell ignores these, and so would every process here.
for ignorable in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(ignorable) == signal.SIG_IGN:
        signal.signal(ignorable, signal.default_int_handler if ignorable == signal.SIGINT else signal.SIG_DFL)

# How long an example takes says how busy the machine is; what hangs is ended by pytest's own timeout.
settings.register_profile("trainshed", deadline=None)
settings.load_profile("trainshed")

_FIRST_ROOMS = ("recipe", "catalog", "plan")
_LONG_ROOMS = ("workflow", "engines/torch", "launch/agent", "plugins")
_LONG_MARKERS = {"full", "ray", "s3", "slurm"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests so that the first minute says most, and that no long one is left for the end.

    First what is quick and about everything: files, pages, shipped recipes, plans. Then what trains or needs a real
    server, while there is still other work for a second process. Then the rest, which is short. Tests of one file stay
    together, as they share fixtures.
    """
    folder = Path(__file__).parent
    files = {item.path: item.path.relative_to(folder).as_posix() for item in items}
    long_files = {item.path for item in items if _LONG_MARKERS & {marker.name for marker in item.iter_markers()}}

    def turn(item: pytest.Item) -> int:
        file = files[item.path]
        if item.path in long_files or file.startswith(tuple(f"{room}/" for room in _LONG_ROOMS)):
            return 1
        is_first = "/" not in file or file.startswith(tuple(f"{room}/" for room in _FIRST_ROOMS))
        return 0 if is_first else 2

    items.sort(key=turn)
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            # The compiler has advice for fp32 on a GPU, and a warning that is an error would end the compilation.
            item.add_marker(pytest.mark.filterwarnings("ignore"))


_STORE_VARIABLES = ("AWS_", "BUCKET_STORAGE_", "GOOGLE_", "STORAGE_EMULATOR", "AZURE_", "HF_", "HUGGING_FACE")


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A Ceph RADOS gateway; `radosgw ceph-mon ceph-osd ceph-mgr` from apt."""
    missing = missing_binaries()
    if missing:
        missing_part(
            f"no S3 server: {', '.join(missing)} not installed (apt-get install radosgw ceph-mon ceph-osd ceph-mgr)"
        )
    with shared_server(session_folder(tmp_path_factory) / "s3") as server:
        yield server


@pytest.fixture(autouse=True)
def no_plugins_left() -> Iterator[None]:
    """Forget what a test's plugins have registered: error messages name the known classes."""
    yield
    for package in {package for registry in plugins._REGISTRIES.values() for package in registry.packages()}:
        plugins._forget(package)


@pytest.fixture
def no_cloud(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """None of the credentials or endpoints of whoever runs the tests."""
    for name in list(os.environ):
        if name.startswith(_STORE_VARIABLES):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


@pytest.fixture
def s3_bucket(s3_server: S3Server, no_cloud: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty bucket, with the variables set that let our store reach it."""
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    return s3_server.make_bucket(f"bucket-{uuid.uuid4().hex[:12]}")


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """One megabyte of tmpfs."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("only root may mount a tmpfs; what can be tested without one is")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
