"""Sbatch scripts: golden ones, and that nothing a person writes can break out of them."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from support.recipes.golden_files import check_golden
from trainshed.errors import InputError, RecipeError
from trainshed.launch.job import CodeArchive, Job, JobFile, ServingSpec, Stage
from trainshed.launch.slurm.render import render
from trainshed.launch.slurm.sbatch_options import sbatch_option
from trainshed.launch.slurm.target import fill_dependency_ids
from trainshed.recipe import Cluster, load_cluster
from trainshed.recipe.yaml_io import dump_yaml

CODE = CodeArchive("trainshed-0.1.0-0123456789ab.tar.xz", "0123456789abcdef" * 4, b"", "0.1.0")
PLAIN = {"name": "plain", "target": "slurm", "machine": "cpu", "slurm": {"venv": "/shared/venv", "gpus": None}}


def cluster_of(folder: Path, body: dict[str, Any]) -> Cluster:
    file = folder / "cluster.yaml"
    file.write_text(dump_yaml(body), encoding="utf-8")
    return load_cluster(file)


def job_of(cluster: Cluster, *stages: Stage, run: str = "/shared/store/runs/small/1a2b3c4d", **changed: Any) -> Job:
    job_file = JobFile("small-1a2b3c4d", run, stages, 120, "bf16", "0.1.0")
    files = {"job.json": job_file.to_text(), "recipe.yaml": "name: small\n"}
    job = Job(name="small-1a2b3c4d", run=run, cluster=cluster, stages=stages, files=files, code=CODE, grace_seconds=120)
    return replace(job, **changed)


def test_a_line_in_an_environment_on_the_shared_disk(tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path, PLAIN | {"limits": {"hours": 24}, "environment": {"OMP_NUM_THREADS": "8"}})
    stages = (
        Stage("tokenise", parts=4, cpus=8, memory="32Gi"),
        Stage("prepare", cpus=8, memory="32Gi"),
        Stage("train", nodes=2, ranks_per_node=8, restarts=3),
        Stage("export", cpus=8, memory="32Gi"),
    )
    request = render(job_of(cluster, *stages))
    assert [part.name for part in request.parts] == ["files.sh", *(f"{stage.name}.sbatch" for stage in stages)]
    assert list(request.uploads) == [f"code/{CODE.sha256}/{CODE.name}"]
    check_golden("slurm/line.sbatch", request.text())
    assert render(job_of(cluster, *stages)) == request


def test_a_container_on_infiniband_with_spare_nodes_and_secrets(tmp_path: Path) -> None:
    body = {
        "name": "large",
        "target": "slurm",
        "machine": "dgx-h100",
        "image": "nvcr.io/nvidia/pytorch:25.04-py3",
        "volumes": [{"mount": "/corpus", "path": "/lustre/corpus", "read_only": True}],
        "capacity": {"reservation": "march"},
        "secrets": {"HF_TOKEN": {"env": "MY_HF_TOKEN"}, "AWS_SECRET_ACCESS_KEY": {"file": "/home/me/.key"}},
        "slurm": {
            "partition": "gpu",
            "account": "team",
            "qos": "high",
            "constraint": "h100&ib",
            "gpus": "gpu:h100",
            "container": "pyxis",
            "port": 29500,
            "options": ["--mail-type=END,FAIL", "--comment=two words"],
        },
    }
    train = Stage("train", nodes=16, gpus_per_node=8, ranks_per_node=8, restarts=2, spares=1, preflight=True)
    check_golden("slurm/container.sbatch", render(job_of(cluster_of(tmp_path, body), train)).text())


def test_a_foreign_engine(tmp_path: Path) -> None:
    stage = Stage("train", nodes=2, gpus_per_node=8, script="train.sh", environment={"NCCL_DEBUG": "WARN"}, restarts=1)
    body = PLAIN | {"slurm": {"venv": "/shared/venv", "exclusive": False}}
    job = job_of(cluster_of(tmp_path, body), stage, code=None)
    job = replace(job, files={**job.files, "train.sh": "exec torchrun\n", "conf/model.yaml": "a: 1"})
    check_golden("slurm/foreign.sbatch", render(job).text())


def test_a_server_is_queued_again_when_its_time_is_up_or_it_fails(tmp_path: Path) -> None:
    words = ("serve", "/shared/store/it's/export", "--host", "0.0.0.0", "--name", "small", "--grace", "120")
    export = Stage("export", cpus=8, memory="32Gi")
    ours = Stage("serve", gpus_per_node=1, restarts=2, serving=ServingSpec(words=words))
    body = PLAIN | {
        "limits": {"hours": 24},
        "slurm": {"venv": "/shared/venv", "partition": "gpu", "cpu_partition": "c"},
    }
    text = render(job_of(cluster_of(tmp_path, body), export, ours)).parts[-1].text
    foreign = replace(
        ours, gpus_per_node=8, script="serve.sh", image="vllm/vllm-openai:1", serving=ServingSpec(port=9000)
    )
    body = PLAIN | {"machine": "dgx-h100", "image": "a/b", "slurm": {"container": "pyxis"}}
    job = job_of(cluster_of(tmp_path, body), foreign)
    job = replace(job, files={**job.files, "serve.sh": 'exec vllm serve /x --port "$TRAINSHED_PORT"\n'})
    check_golden("slurm/serve.sbatch", text + render(job).text())


def test_a_sites_lines_run_on_the_nodes_or_before_their_container(tmp_path: Path) -> None:
    source = '. "$files"/setup.sh\n'
    bare = render(job_of(cluster_of(tmp_path, PLAIN | {"setup": ["module load cuda"]}), Stage("train", nodes=2)))
    files, script = (part.text for part in bare.parts)
    node = files.partition('cat >"$new"/train.node.sh')[2].partition("END_OF_FILE\n")[0]
    assert node.index(source) < node.index("export VIRTUAL_ENV="), "before the Python environment is entered"
    assert source not in script
    body = {"name": "c", "target": "slurm", "machine": "dgx-h100", "image": "a/b", "setup": ["module load cuda"]}
    inside = render(job_of(cluster_of(tmp_path, body | {"slurm": {"container": "pyxis"}}), Stage("train", nodes=2)))
    files, script = (part.text for part in inside.parts)
    assert source not in files, "a container has no `module`"
    assert script.index(source) < script.index("srun ")


def test_only_the_ids_of_earlier_stages_are_filled_in(tmp_path: Path) -> None:
    stages = (Stage("fetch"), Stage("prepare"), Stage("train"))
    job = job_of(cluster_of(tmp_path, PLAIN), *stages)
    tricky = "#SBATCH --dependency=afterok:<id of prepare>\n"
    text = render(job).parts[-1].text + tricky
    filled = fill_dependency_ids(text, {"fetch": "11", "prepare": "12"})
    assert filled == text.replace("afterok:<id of prepare>", "afterok:12", 1)
    assert filled.endswith(tricky)


BASE = {"name": "c", "target": "slurm", "machine": "cpu"}


@pytest.mark.parametrize(
    ("body", "key", "hint"),
    [
        ({"slurm": {"options": ["--nodes=9"]}}, "slurm.options.0", "write `nodes.default` in place of it"),
        ({"slurm": {"options": ["-pother"]}}, "slurm.options.0", "write `slurm.partition` in place of it"),
        ({"slurm": {"options": ["--requeue"]}}, "slurm.options.0", "delete it"),
        ({"slurm": {"options": ["mail"]}}, "slurm.options.0", "write for example --comment=x"),
        ({"secrets": {"X": {"env": "A B"}}}, "secrets.X", "write for example HF_TOKEN"),
        ({"slurm": {"container": "pyxis"}}, "slurm.container", "write `image: registry/name@sha256:…`"),
    ],
)
def test_what_slurm_cannot_do_is_refused_where_it_is_written(
    tmp_path: Path, body: dict[str, Any], key: str, hint: str
) -> None:
    cluster = cluster_of(tmp_path, BASE | body)
    with pytest.raises(RecipeError) as raised:
        render(job_of(cluster, Stage("train")))
    assert f"({key})" in (raised.value.where or "")
    assert (raised.value.hint or "").startswith(hint)


@pytest.mark.parametrize("run", ["runs/small/1", "/shared/a\nb/runs/small/1", "/shared/a\\b/runs/small/1"])
def test_a_folder_that_no_script_can_name_is_refused(tmp_path: Path, run: str) -> None:
    with pytest.raises(InputError):
        render(job_of(cluster_of(tmp_path, PLAIN), Stage("train"), run=run))


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a//b", "a/../../b", "x\ny"])
def test_no_file_of_a_job_lies_outside_its_folder(tmp_path: Path, name: str) -> None:
    job = job_of(cluster_of(tmp_path, PLAIN), Stage("train"))
    with pytest.raises(InputError, match="not a name for a file"):
        render(replace(job, files={**job.files, name: ""}))


def test_an_option_of_slurm_has_no_line_break() -> None:
    assert sbatch_option("--comment", 'a "b" \\ c') == '#SBATCH "--comment=a \\"b\\" \\\\ c"'
    with pytest.raises(InputError, match="line break"):
        sbatch_option("--comment", "a\n#SBATCH --uid=0", where="cluster.yaml:3")


SRUN = '#!/bin/bash\nwhile [[ "$1" == --* ]]; do shift; done\nexec "$@"\n'
PYTHON = '#!/bin/bash\nenv -0 >"$SEEN/variables"\nprintf "%s\\0" "$@" >"$SEEN/arguments"\nexit 7\n'
HOSTILE = "'\"; touch canary; $(touch canary) `touch canary` ${x} \\\nEND_OF_FILE\ntouch canary\n#SBATCH --nodes=99\n"
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40) | st.sampled_from(
    [HOSTILE, HOSTILE.strip(), "END_OF_FILE", "\n", "a\r\n", "$(touch canary)", "' && touch canary #", "-n", "~"]
)
NAME = st.text(
    st.characters(exclude_characters="\0/\n", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20
).filter(lambda name: name not in (".", "..") and not name.startswith("."))


@pytest.fixture
def stubs(tmp_path: Path) -> Path:
    """Slurm's programs and a Python that writes down how it was called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    scontrol = '#!/bin/bash\n[ "$1" != requeue ] || exit 1\necho node-1\necho node-2\n'
    for name, text in {"srun": SRUN, "scontrol": scontrol, "mypython": PYTHON}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=TEXT, text=TEXT, name=NAME, secret=NAME, folder=NAME)
@example(value=HOSTILE, text=HOSTILE, name="$(touch canary)'\"", secret="a'b$(id)", folder="it's $(touch canary) %j")
@example(value="\x85", text="\u2028", name="0", secret="0", folder="1")
def test_nothing_that_a_person_writes_breaks_out_of_a_script(
    tmp_path: Path, stubs: Path, value: str, text: str, name: str, secret: str, folder: str
) -> None:
    place = tmp_path / "place"
    subprocess.run(["rm", "-rf", str(place)], check=True)
    (place / "work").mkdir(parents=True)
    (place / secret).write_text("of a file")
    if "\\" in folder or folder == secret or folder == "work":
        return
    run = f"{place}/{folder}/runs/small/1a2b3c4d"
    body = BASE | {
        "python": str(stubs / "mypython"),
        "environment": {"VALUE": value},
        "secrets": {"TOKEN": {"file": str(place / secret)}},
        "slurm": {"partition": name},
    }
    job = job_of(cluster_of(tmp_path, body), Stage("train", nodes=2, restarts=1), run=run, code=None)
    job = replace(job, files={**job.files, name: text})
    files_script, script = (part.text for part in render(job).parts)
    (place / "files.sh").write_text(files_script)
    (place / "script").write_text(script)
    for file in ("files.sh", "script"):
        assert subprocess.run(["bash", "-n", str(place / file)], check=False).returncode == 0
    environment = {
        "PATH": f"{stubs}:{os.environ['PATH']}",
        "SEEN": str(place),
        "SLURM_JOB_ID": "5",
        "SLURM_JOB_NODELIST": "node-[1-2]",
    }
    subprocess.run(["bash", str(place / "files.sh")], cwd=place / "work", env=environment, check=True)
    done = subprocess.run(
        ["bash", str(place / "script")], cwd=place / "work", env=environment, capture_output=True, check=False
    )
    assert done.returncode == 7, done.stderr
    variables = dict(each.partition("=")[::2] for each in (place / "variables").read_bytes().decode().split("\0"))
    assert (variables["VALUE"], variables["TOKEN"]) == (value, "of a file")
    assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("node-1", "20005")
    arguments = (place / "arguments").read_text().split("\0")
    assert arguments[:5] == ["-P", "-m", "trainshed", "agent", "train"]
    files = Path(arguments[6])
    assert (files / name).read_bytes().decode() == text
    assert Path(run, "job").resolve() == files
    assert not list(place.rglob("canary"))
    assert [line for line in script.splitlines()[:12] if "--partition" in line] == [sbatch_option("--partition", name)]


def test_programs_come_from_the_store_by_their_hash(tmp_path: Path) -> None:
    program = "print('proven')\n"
    run = f"{tmp_path}/a store/runs/small/1a2b3c4d"
    stage = Stage("image", script="image.sh")
    job = job_of(cluster_of(tmp_path, BASE), stage, run=run, code=None)
    job = replace(job, files={**job.files, "image.sh": "true\n", "programs/prove_image.py": program})
    request = render(job)
    assert program not in request.text()
    ((path, data),) = request.uploads.items()
    assert (path.rpartition("/")[2], data.decode()) == ("prove_image.py", program)
    stored = tmp_path / "a store" / path
    stored.parent.mkdir(parents=True)
    script = request.parts[0].text
    for content, code in (("print('changed')\n", 1), (program, 0), (program, 0)):
        stored.write_text(content)
        done = subprocess.run(["bash", "-s"], input=script, capture_output=True, text=True, check=False)
        assert (done.returncode, f"{path} is not what was submitted" in done.stderr) == (code, code == 1), done.stderr
        assert len(list(Path(run, "jobs").glob("[!.]*"))) == 1 - code, "all files or none"
    (files,) = Path(run, "jobs").glob("[!.]*")
    assert (files / "programs" / "prove_image.py").read_text() == program


def test_a_script_without_its_files_says_how_they_are_written(tmp_path: Path) -> None:
    job = job_of(cluster_of(tmp_path, BASE), Stage("train"), run=f"{tmp_path}/store/runs/small/1a2b3c4d", code=None)
    done = subprocess.run(["bash", "-s"], input=render(job).parts[-1].text, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "is missing; files.sh of `trainshed render --out DIR` writes it" in done.stderr
