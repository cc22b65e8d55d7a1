"""The script that starts a foreign engine: what torchrun gets, whose exit code counts, what signals do."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.recipes.golden_files import check_golden
from trainshed.engines.launch import NETWORK_FILE, NODE_NUMBER, EngineLaunch, EngineSite, launcher_script
from trainshed.engines.profiles import NSYS_SCRIPT, nsys_script, nsys_stage
from trainshed.errors import InputError
from trainshed.recipe import Profile

# In place of Python: writes its arguments and one variable down, says something, ends as it is told.
FAKE = """#!/bin/sh
printf '%s\\0' "$@" > "$RECORD"
printf '%s' "${SECRET_OF_MINE-unset}" > "$RECORD.env"
echo "from stdout"; echo "from stderr" >&2
exit "${FAKE_EXIT:-0}"
"""


def fake_python(folder: Path, body: str = FAKE) -> str:
    path = folder / "fake python"
    path.write_text(body)
    path.chmod(0o755)
    return str(path)


def environment(folder: Path, **more: str) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "NODE_RANK": "1",
        "MASTER_ADDR": "node-0",
        "MASTER_PORT": "29500",
        "RECORD": str(folder / "record"),
        **more,
    }


def run(
    folder: Path, launch: EngineLaunch, site: EngineSite, **more: str
) -> tuple[subprocess.CompletedProcess[bytes], list[str]]:
    script = launcher_script(launch, site, python=fake_python(folder))
    done = subprocess.run(["bash", "-c", script], env=environment(folder, **more), cwd=folder, capture_output=True)
    record = folder / "record"
    return done, record.read_bytes().decode().split("\0")[:-1] if record.exists() else []


def place_at(folder: Path) -> EngineSite:
    return EngineSite(run_folder=str(folder / "run"), job_folder=str(folder), nodes=2, gpus_per_node=8)


def test_torchrun_gets_static_ranks_and_the_engines_words(tmp_path: Path) -> None:
    launch = EngineLaunch("/opt/pretrain.py", ("--lr", "1e-4"), environment={"SECRET_OF_MINE": "a b"})
    done, words = run(tmp_path, launch, place_at(tmp_path))
    assert done.returncode == 0
    assert words == [
        *("-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", "1"),
        *("--master-addr", "node-0", "--master-port", "29500", "--nproc-per-node", "8"),
        *("/opt/pretrain.py", "--lr", "1e-4"),
    ]
    assert (tmp_path / "record.env").read_text() == "a b"


def test_every_node_writes_a_file_of_its_own(tmp_path: Path) -> None:
    launch = EngineLaunch("p", ("--lr", "1"), node_arguments=(f"++json=/it's/rank-{NODE_NUMBER}/a.json",))
    for node in ("0", "1", "08"):
        _, words = run(tmp_path, launch, place_at(tmp_path), NODE_RANK=node)
        assert words[-3:] == ["--lr", "1", f"++json=/it's/rank-{int(node)}/a.json"]


def test_a_script_is_as_it_was() -> None:
    launch = EngineLaunch(
        "/opt/pretrain.py",
        ("--name", "it's $HOME"),
        environment={"A": "1"},
        late_arguments={"++model.data.data_prefix=": "/run/engine/data_prefix.txt"},
    )
    site = EngineSite("/store/runs/demo/1a2b3c4d", "/job", nodes=2, gpus_per_node=8)
    check_golden("engines/megatron/launcher.sh", launcher_script(launch, site))


def test_a_failed_training_fails_the_job_and_leaves_its_log(tmp_path: Path) -> None:
    done, _ = run(tmp_path, EngineLaunch("p", ()), place_at(tmp_path), FAKE_EXIT="7", TRAINSHED_ATTEMPT="3")
    assert done.returncode == 7
    log = tmp_path / "run" / "logs" / "attempt-0003" / "node-00001.log"
    assert log.read_text().split("\n")[:2] == ["from stdout", "from stderr"]
    assert done.stdout == log.read_bytes()


def test_an_attempt_that_is_repeated_adds_to_its_log(tmp_path: Path) -> None:
    for _ in range(2):
        run(tmp_path, EngineLaunch("p", ()), place_at(tmp_path), SLURM_RESTART_COUNT="1")
    log = tmp_path / "run" / "logs" / "attempt-0002" / "node-00001.log"
    assert log.read_text().count("from stdout") == 2


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"NODE_RANK": ""}, "NODE_RANK is not a number"),
        ({"NODE_RANK": "a[$(touch hurt)]"}, "NODE_RANK is not a number"),
        ({"TRAINSHED_ATTEMPT": "x[$(touch hurt)]"}, "TRAINSHED_ATTEMPT is not a number"),
        ({"MASTER_ADDR": ""}, "the address of node 0 is not set"),
    ],
)
def test_a_node_that_does_not_know_its_place_stops(tmp_path: Path, variables: Mapping[str, str], said: str) -> None:
    done, words = run(tmp_path, EngineLaunch("p", ()), place_at(tmp_path), **variables)
    assert done.returncode != 0
    assert said in done.stderr.decode()
    assert not words
    assert not (tmp_path / "hurt").exists()


@pytest.mark.parametrize("name", ["SLURM_NODEID", "JOB_COMPLETION_INDEX", "TRAINSHED_NODE_RANK"])
def test_schedulers_may_call_the_node_what_they_do(tmp_path: Path, name: str) -> None:
    _, words = run(tmp_path, EngineLaunch("p", ()), place_at(tmp_path), NODE_RANK="", **{name: "09"})
    assert words[words.index("--node-rank") + 1] == "09"


def test_late_arguments_are_read_when_the_job_starts(tmp_path: Path) -> None:
    (tmp_path / "prefix.txt").write_text("[1.0,a b]\n")
    late = {"++data=": str(tmp_path / "prefix.txt"), "--also": str(tmp_path / "prefix.txt")}
    _, words = run(tmp_path, EngineLaunch("p", ("x",), late_arguments=late), place_at(tmp_path))
    assert words[-4:] == ["x", "++data=[1.0,a b]", "--also", "[1.0,a b]"]
    (tmp_path / "record").unlink()
    (tmp_path / "prefix.txt").unlink()
    done, words = run(tmp_path, EngineLaunch("p", ("x",), late_arguments=late), place_at(tmp_path))
    assert done.returncode != 0
    assert not words


def test_a_module_is_started_as_one(tmp_path: Path) -> None:
    _, words = run(tmp_path, EngineLaunch("torchtune._cli", (), is_module=True), place_at(tmp_path))
    assert words[-2:] == ["--module", "torchtune._cli"]


AWKWARD = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20) | st.sampled_from(
    [
        "$(touch hurt)",
        "`touch hurt`",
        "'; touch hurt; '",
        '"; touch hurt; "',
        "a\nb",
        "\\",
        "${HOME}",
        "!!",
        "~",
        "*",
        "-n",
    ]
)


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(words=st.lists(AWKWARD, max_size=4), value=AWKWARD, late=AWKWARD, key=AWKWARD, folder=AWKWARD)
def test_no_name_and_no_value_breaks_out(words: list[str], value: str, late: str, key: str, folder: str) -> None:
    with tempfile.TemporaryDirectory() as base:
        at = Path(base)
        (at / "late").write_text(late, encoding="utf-8", newline="")
        name = folder.replace("/", "_").strip() or "run"
        site = EngineSite(f"{at}/{name if name not in ('.', '..') else 'run'}", base, nodes=1, gpus_per_node=1)
        launch = EngineLaunch(
            f"/opt/{value}",
            tuple(words),
            environment={"SECRET_OF_MINE": value},
            late_arguments={f"{key}=": str(at / "late")},
        )
        done, seen = run(at, launch, site)
        assert done.returncode == 0, done.stderr
        assert seen[-len(words) - 2 :] == [
            f"/opt/{value}",
            *words,
            f"{key}={late}".rstrip("\n") if late.strip("\n") else f"{key}=",
        ]
        assert (at / "record.env").read_bytes().decode() == value
        assert not (at / "hurt").exists()
        assert Path(site.run_folder, "logs", "attempt-0001", "node-00001.log").exists()


def test_a_variable_needs_a_name() -> None:
    site = EngineSite("/r", "/j", nodes=1, gpus_per_node=1)
    with pytest.raises(InputError, match="is not the name of a variable"):
        launcher_script(EngineLaunch("p", (), environment={"A=1; rm": "x"}), site)


# Two ranks that save and go when they are told to, under a torchrun that waits for them and dies when it is told.
RANKS = """#!/bin/bash
rank() { trap 'echo "saved $1"; exit 0' TERM; echo "up $1"; while true; do sleep 0.05; done; }
rank 0 & rank 1 &
trap 'echo torchrun was told; exit 1' TERM
wait; wait; wait
exit 0
"""


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_ranks_are_told_to_stop_and_are_waited_for(tmp_path: Path, sent: signal.Signals, code: int) -> None:
    script = launcher_script(EngineLaunch("p", ()), place_at(tmp_path), python=fake_python(tmp_path, RANKS))
    running = subprocess.Popen(
        ["bash", "-c", script], env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    log = tmp_path / "run" / "logs" / "attempt-0001" / "node-00001.log"
    while not log.exists() or log.read_text().count("up") < 2:
        assert running.poll() is None
        time.sleep(0.02)
    running.send_signal(sent)
    output, _ = running.communicate(timeout=60)
    assert running.returncode == code
    assert sorted(line for line in output.decode().splitlines() if "saved" in line) == ["saved 0", "saved 1"]
    assert "torchrun was told" not in output.decode()


# A rank that fails, and leaves a process in a session of its own that writes to the log and never ends.
LEAVING = """#!/bin/bash
setsid bash -c 'echo $$ > "$RECORD"; echo left; while true; do sleep 0.1; done' &
while [[ ! -s $RECORD ]]; do sleep 0.05; done
exit 1
"""


def test_what_outlives_the_ranks_is_killed_and_the_job_ends(tmp_path: Path) -> None:
    script = launcher_script(EngineLaunch("p", ()), place_at(tmp_path), python=fake_python(tmp_path, LEAVING))
    done = subprocess.run(["bash", "-c", script], env=environment(tmp_path), capture_output=True, text=True)
    left = int((tmp_path / "record").read_text())
    assert done.returncode == 1
    assert done.stderr.count(f"process {left} outlived the ranks and was killed") == 1
    assert "left" in (tmp_path / "run" / "logs" / "attempt-0001" / "node-00001.log").read_text()
    assert not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE


STEPPING = EngineLaunch("p", (), step_line=r"\|Loss: ")
# In place of torchrun: prints what it is told, and fails.
FAILING = """#!/bin/sh
printf '%s\\n' "$PRINTED"
exit 1
"""


@pytest.mark.parametrize(
    ("printed", "before", "code"),
    [
        ("ImportError: no module named torchtune", "", 2),
        ("1|1|Loss: 2.5: 10%", "", 1),
        ("1|1|Loss: 2.5: 10%\nImportError", "1|1|Loss: 2.5: 10%\n", 1),
        # Steps of an earlier job that has the same number of attempts.
        ("ImportError", "1|1|Loss: 2.5: 10%\n", 2),
        # torchrun's summary of a rank that was killed: another start may succeed.
        ("  exitcode  : -9 (pid: 3)", "", 1),
        # torchrun itself ends the others by a signal; the last in its summary is the rank that failed.
        ("  exitcode  : -15 (pid: 3)\n  exitcode  : 1 (pid: 4)", "", 2),
    ],
)
def test_an_error_before_the_first_step_is_not_started_again(
    tmp_path: Path, printed: str, before: str, code: int
) -> None:
    log = tmp_path / "run" / "logs" / "attempt-0001" / "node-00001.log"
    log.parent.mkdir(parents=True)
    log.write_text(before)
    script = launcher_script(STEPPING, place_at(tmp_path), python=fake_python(tmp_path, FAILING))
    done = subprocess.run(
        ["bash", "-c", script], env=environment(tmp_path, PRINTED=printed), capture_output=True, text=True
    )
    assert done.returncode == code, done.stderr
    assert ("before its first step" in done.stderr) == (code == 2)
    assert log.with_suffix(".exit-code").read_text() == f"{code}\n"


TORCHRUN_BOX = """\
[rank1]: AssertionError: Only Adam is supported.
[rank0]: RuntimeError: Connection closed by peer
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 3)
Root Cause (first observed failure):
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 4)
============="""


@pytest.mark.parametrize(
    ("printed", "last"),
    [
        (TORCHRUN_BOX, "trainshed: [rank1]: AssertionError: Only Adam is supported."),
        ("ImportError: no module\nChildFailedError\n====", "trainshed: ImportError: no module"),
    ],
)
def test_the_error_of_the_rank_that_failed_is_said_after_torchruns_summary(
    tmp_path: Path, printed: str, last: str
) -> None:
    launch = replace(STEPPING, step_line=None)
    script = launcher_script(launch, place_at(tmp_path), python=fake_python(tmp_path, FAILING))
    variables = environment(tmp_path, PRINTED=printed)
    done = subprocess.run(["bash", "-c", script], env=variables, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == last


# In place of torchrun: NCCL writes its log where it is asked to, and the ranks fail.
LOGGING = """#!/bin/sh
echo "$NCCL_DEBUG $NCCL_DEBUG_SUBSYS"
if [ -n "$NCCL_DEBUG_FILE" ]; then
  printf 'NCCL INFO Using network IB\\nNCCL WARN Call to ibv_create_qp failed\\n' >"${NCCL_DEBUG_FILE%\\%p.log}7.log"
fi
exit "$FAKE_EXIT"
"""


@pytest.mark.parametrize(
    ("expects", "variables", "code", "printed"),
    [
        (True, {}, "0", "INFO INIT,NET\n"),
        (True, {}, "1", "INFO INIT,NET\nNCCL WARN Call to ibv_create_qp failed\n"),
        (True, {"NCCL_DEBUG": "WARN"}, "1", "WARN \n"),
        (False, {}, "1", " \n"),
    ],
)
def test_nccl_logs_beside_training_where_nobody_else_asked_it_to_and_its_warnings_are_kept_of_a_failure(
    tmp_path: Path, expects: bool, variables: dict[str, str], code: str, printed: str
) -> None:
    if expects:
        (tmp_path / NETWORK_FILE).write_text("{}")
    script = launcher_script(EngineLaunch("p", ()), place_at(tmp_path), python=fake_python(tmp_path, LOGGING))
    here = environment(tmp_path, FAKE_EXIT=code, TMPDIR=str(tmp_path / "tmp"), **variables)
    (tmp_path / "tmp").mkdir()
    done = subprocess.run(["bash", "-c", script], env=here, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (int(code), printed)
    assert list((tmp_path / "tmp").iterdir()) == [], "nothing is left on the node"


# In place of torchrun: prints what it is told, and ends without an error.
ENDING = """#!/bin/sh
printf '%s\\n' "$PRINTED"
"""


@pytest.mark.parametrize(
    ("printed", "newest", "node", "code"),
    [
        ("1|8|Loss: 2.5", "8", "0", 0),
        ("Unable to load rng state from checkpoint", "4", "0", 2),
        ("no checkpoint was found", None, "0", 2),
        ("1|5|Loss: 2.5", "4", "0", 1),
        # A node that does not write the file may see it late.
        ("1|8|Loss: 2.5", "4", "1", 0),
    ],
)
def test_an_engine_that_ends_before_its_length_has_not_finished(
    tmp_path: Path, printed: str, newest: str | None, node: str, code: int
) -> None:
    file = tmp_path / "latest"
    if newest is not None:
        file.write_text(newest)
    launch = replace(STEPPING, last_checkpoint=(str(file), "8"))
    script = launcher_script(launch, place_at(tmp_path), python=fake_python(tmp_path, ENDING))
    variables = environment(tmp_path, PRINTED=printed, NODE_RANK=node)
    done = subprocess.run(["bash", "-c", script], env=variables, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert (f"its newest checkpoint is {newest or 'none'} instead of 8" in done.stderr) == (code > 0)


def test_a_step_that_another_node_tells_of_is_one(tmp_path: Path) -> None:
    other = tmp_path / "run" / "logs" / "attempt-0001" / "node-00000.log"
    other.parent.mkdir(parents=True)
    other.write_text("1|1|Loss: 2.5: 10%\n")
    script = launcher_script(STEPPING, place_at(tmp_path), python=fake_python(tmp_path, FAILING))
    done = subprocess.run(["bash", "-c", script], env=environment(tmp_path, PRINTED="NCCL error"), capture_output=True)
    assert done.returncode == 1


@pytest.mark.parametrize(("saves", "code", "said"), [(True, 138, "goes on from its last"), (False, 2, "no further")])
def test_an_engine_that_does_not_save_is_queued_again_only_where_it_got_further(
    tmp_path: Path, saves: bool, code: int, said: str
) -> None:
    launch = EngineLaunch("p", (), saves_when_stopped=False)
    old = tmp_path / "run" / "checkpoints" / "epoch_0" / "model.safetensors"
    old.parent.mkdir(parents=True)
    old.touch()
    os.utime(old, (0, 0))
    script = launcher_script(launch, place_at(tmp_path), python=fake_python(tmp_path, RANKS))
    running = subprocess.Popen(
        ["bash", "-c", script], env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    log = tmp_path / "run" / "logs" / "attempt-0001" / "node-00001.log"
    while not log.exists() or log.read_text().count("up") < 2:
        assert running.poll() is None
        time.sleep(0.02)
    if saves:
        new = tmp_path / "run" / "checkpoints" / "epoch_1" / "model.safetensors"
        new.parent.mkdir()
        new.touch()
    running.send_signal(signal.SIGUSR1)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == code
    assert said in errors.decode()


# In place of nsys: says how it was started, and runs what follows its options.
NSYS = """#!/bin/bash
echo "nsys $*" > "$RECORD.nsys"
while [[ $1 != -o ]]; do shift; done
shift 2
exec "$@"
"""
RANK = """#!/bin/bash
trap 'echo "rank $RANK saved"; exit 0' TERM
echo "up $RANK: $*"
while [[ -n ${WAIT-} ]]; do sleep 0.05; done
exit "${FAKE_EXIT:-0}"
"""


def nsys_site(folder: Path, **more: str) -> tuple[list[str], dict[str, str]]:
    """The command of a rank under the script, and its environment."""
    tools = folder / "tools"
    tools.mkdir()
    for name, body in (("nsys", NSYS), ("python3", RANK)):
        (tools / name).write_text(body)
        (tools / name).chmod(0o755)
    script = folder / NSYS_SCRIPT
    script.write_text(nsys_script(Profile(ranks=(0, 9))))
    place = {"PATH": f"{tools}:{os.environ['PATH']}", "RECORD": str(folder / "record"), **more}
    return ["bash", str(script), "python3", "train.py", "a b"], place | {"TRAINSHED_PROFILE": f"{folder}/the profile"}


@pytest.mark.parametrize(("rank", "exit_code"), [("9", 0), ("9", 7), ("1", 0)])
def test_ranks_that_the_recipe_names_are_started_by_nsys(tmp_path: Path, rank: str, exit_code: int) -> None:
    command, place = nsys_site(tmp_path, RANK=rank, FAKE_EXIT=str(exit_code))
    done = subprocess.run(command, env=place, capture_output=True, text=True)
    assert done.returncode == exit_code
    assert done.stdout == f"up {rank}: train.py a b\n"
    record = tmp_path / "record.nsys"
    assert record.exists() == (rank == "9")
    if rank == "9":
        words = record.read_text()
        assert "profile -t cuda,nvtx -s none -c cudaProfilerApi --capture-range-end=stop --kill=none" in words
        assert f"-o {tmp_path}/the profile/rank-00009" in words


def test_a_rank_under_nsys_is_told_to_stop_and_saves(tmp_path: Path) -> None:
    command, place = nsys_site(tmp_path, RANK="0", WAIT="1")
    running = subprocess.Popen(command, env=place, stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None
    assert running.stdout.readline().startswith("up 0")
    running.send_signal(signal.SIGTERM)
    output, _ = running.communicate(timeout=60)
    assert (running.returncode, output) == (0, "rank 0 saved\n")


def test_torchrun_starts_the_script_that_starts_ranks(tmp_path: Path) -> None:
    launch = EngineLaunch("/opt/train.py", ("--lr", "1"), rank_script="nsys_rank.sh")
    done, words = run(tmp_path, launch, place_at(tmp_path))
    assert done.returncode == 0
    python = fake_python(tmp_path)
    assert words[-6:] == ["--no-python", "bash", f"{tmp_path}/nsys_rank.sh", python, "/opt/train.py", "--lr", "1"][-6:]


@pytest.mark.parametrize(("found", "code"), [(True, 0), (False, 2)])
def test_an_image_without_nsys_is_found_before_gpus_are_asked_for(tmp_path: Path, found: bool, code: int) -> None:
    if found:
        (tmp_path / "nsys").write_text("")
        (tmp_path / "nsys").chmod(0o755)
    bash = shutil.which("bash") or "bash"
    done = subprocess.run([bash, *nsys_stage().argv[1:]], env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == code
    assert ("this image has no nsys" in done.stderr) != found


@pytest.mark.parametrize(("node", "runs"), [("0", 2), ("1", 0)])
def test_the_first_node_runs_a_companion_beside_training_and_once_after(tmp_path: Path, node: str, runs: int) -> None:
    companion = tmp_path / "companion.sh"
    companion.write_text(f'echo "$@" >> {tmp_path}/companion; [[ $* == *--once* ]] || exec sleep 600\n')
    launch = EngineLaunch("p", (), companion=("bash", str(companion), "it's"))
    body = "#!/bin/bash\nwhile [[ $NODE_RANK == 0 && ! -s $COMPANION ]]; do sleep 0.02; done\nexit 3\n"
    script = launcher_script(launch, place_at(tmp_path), python=fake_python(tmp_path, body))
    place = environment(tmp_path, NODE_RANK=node, COMPANION=str(tmp_path / "companion"))
    done = subprocess.run(["bash", "-c", script], env=place, cwd=tmp_path, capture_output=True, timeout=60)
    assert done.returncode == 3
    lines = (tmp_path / "companion").read_text().splitlines() if runs else []
    logs = f"{tmp_path}/run/logs/attempt-0001"
    assert lines == [f"it's {logs}", f"it's {logs} --once"][:runs]
