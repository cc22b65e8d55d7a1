"""The first stage proves the image that trains: with real old Pythons, real engines, and images that lack something."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support import TESTS
from support.clusters.bare_python import bare_python
from support.clusters.no_driver import packages_that_need_a_driver
from support.clusters.slurm_runs import NO_CODE, write_cluster
from support.recipes.small_recipes import recipe_text
from support.runs.job_files import write_files
from support.runs.megatron_lm import environment, unpacked
from trainshed.engines import prove_image
from trainshed.errors import InputError
from trainshed.launch.image_proof import IMAGE_STAGE, PROGRAM_FILE, REQUEST_FILE
from trainshed.launch.job import MOUNTED_JOB, Job
from trainshed.recipe import load_cluster, load_recipe
from trainshed.run_folder import IMAGE_CHECKS
from trainshed.workflow.stages import run_stage
from trainshed.workflow.submit import build_job

IMAGE = "image=registry.example/trainshed@sha256:" + "1" * 64


def seed_job(recipe: str, cluster: str, folder: Path, *overrides: str) -> Job:
    """A shipped recipe on a shipped cluster whose store is a folder here."""
    store = folder / "store"
    store.mkdir(exist_ok=True)
    volumes = f"volumes=[{{mount: {store}, pvc: shared}}]"
    # MinIO's cluster names the cards of its fabric, which plain Ethernet has none of.
    cards = ["environment={}"] if cluster.startswith("minio") else []
    there = load_cluster(cluster, [f"store={store}", volumes, "storage=null", "fabric=ethernet", IMAGE, *cards])
    return build_job(load_recipe(recipe, overrides), there, offline=True, code=NO_CODE)


def write_job(job: Job, folder: Path, **changed: Any) -> Path:
    """Write a job's files as a pod sees them, with some keys of what is expected of the image changed."""
    place = folder / "job"
    place.mkdir()
    write_files(place, {name: text.replace(MOUNTED_JOB, str(place)) for name, text in job.files.items()})
    asked = json.loads((place / REQUEST_FILE).read_text()) | changed
    (place / REQUEST_FILE).write_text(json.dumps(asked))
    return place


def prove(place: Path, variables: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the stage by its own script."""
    return subprocess.run(
        ["bash", place / f"{IMAGE_STAGE}.sh"],
        env=variables or {"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def with_python(python: Path, folder: Path) -> dict[str, str]:
    """The variables of an image whose python3 is this one, with nothing but its standard library."""
    programs = folder / "programs"
    programs.mkdir()
    (programs / "python3").write_text(f'#!/bin/sh\nexec "{python}" -I -S "$@"\n')
    (programs / "python3").chmod(0o755)
    return {"PATH": f"{programs}:/usr/bin:/bin"}


def test_it_is_the_first_stage_of_every_foreign_engine_and_asks_for_no_gpu(tmp_path: Path) -> None:
    for recipe, cluster in {"gke-llama3-70b": "gke-a3-mega", "aks-gpt-175b": "aks-nd-h100-v5"}.items():
        job = seed_job(recipe, cluster, tmp_path, "data.stage=direct")
        first = job.stages[0]
        assert (first.name, first.gpus_per_node, first.image) == (IMAGE_STAGE, 0, job.stage("train").image)


@pytest.mark.parametrize("version", ["3.8", "3.13"])
def test_a_bare_python_says_all_that_its_image_lacks(version: str, tmp_path: Path) -> None:
    place = write_job(seed_job("aks-gpt-175b", "aks-nd-h100-v5", tmp_path), tmp_path, libraries=["libfabric.so.1"])
    done = prove(place, with_python(bare_python(version), tmp_path))
    assert done.returncode == 2, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"ok    python        {version}.")
    assert any(line.startswith("ok    store") for line in lines)
    for words in (
        "FAIL  module        there is no torch in this image",
        "FAIL  module        there is no megatron.core in this image",
        "FAIL  library       there is no libfabric.so.1",
        "FAIL  program       there is no /megatron-lm/pretrain_gpt.py in this image",
    ):
        assert any(line.startswith(words) for line in lines), f"{words}\n{done.stdout}"
    run = Path(json.loads((place / REQUEST_FILE).read_text())["run"])
    kept = json.loads((run / IMAGE_CHECKS).read_text())["checks"]
    assert [check["name"] for check in kept if check["verdict"] == "fail"].count("module") == 3


def test_an_image_without_ray_is_named_before_a_rayjob_holds_gpus(tmp_path: Path) -> None:
    place = write_job(seed_job("minio-llama3-1-70b-cpt", "minio-mi300x-ray", tmp_path, "serve=null"), tmp_path)
    with_python(bare_python("3.10"), tmp_path)
    (tmp_path / "programs" / "bash").symlink_to("/bin/bash")
    done = prove(place, {"PATH": str(tmp_path / "programs")})
    assert done.returncode == 2, done.stderr
    assert done.stdout.splitlines()[0].startswith("ok    python        3.10.")
    assert "FAIL  module        there is no ray in this image" in done.stdout
    for name in ("ray", "wget", "python"):
        assert f"warn  command       there is no {name} in this image: KubeRay" in done.stdout
    # A job that Ray does not start asks for none of them.
    other = json.loads(seed_job("aks-gpt-175b", "aks-nd-h100-v5", tmp_path).files[REQUEST_FILE])
    assert ("programs" in other, "ray" in other["modules"]) == (False, False)


def test_an_image_without_the_topology_that_its_fabric_names_is_found_before_gpus_are(tmp_path: Path) -> None:
    """Without it NCCL only warns, and pairs GPUs with far cards."""
    topology, other = tmp_path / "ndv5-topo.xml", tmp_path / "other.xml"
    checks = {}
    for engine in ("megatron", "torch"):
        keys = () if engine == "megatron" else ("engine=torch", "train.precision=bf16")
        job = build_job(
            load_recipe("aks-gpt-175b", keys), load_cluster("aks-nd-h100-v5", [IMAGE]), offline=True, code=NO_CODE
        )
        asked = json.loads(job.files[REQUEST_FILE])
        assert asked["files"] == {"NCCL_TOPO_FILE": "/etc/ndv5-topo.xml"}
        (checks[engine],) = [prove_image.check_file(name, str(topology), asked) for name in asked["files"]]
    assert {check.verdict for check in checks.values()} == {"fail"}
    assert checks["megatron"].what == f"there is no {topology}, which NCCL_TOPO_FILE names for infiniband-ndr"
    topology.touch()
    assert prove_image.check_file("NCCL_TOPO_FILE", str(topology), asked).verdict == "pass"
    # The cluster file may name another one, and a folder of the node is not the image's.
    for keys, files in (
        ((f"environment.NCCL_TOPO_FILE={other}",), {"NCCL_TOPO_FILE": str(other)}),
        (("environment.NCCL_TOPO_FILE=/node/topo.xml", "volumes.1={mount: /node, host: /opt/microsoft}"), None),
    ):
        there = load_cluster("aks-nd-h100-v5", [IMAGE, *keys])
        written = build_job(load_recipe("aks-gpt-175b"), there, offline=True, code=NO_CODE).files[REQUEST_FILE]
        assert json.loads(written).get("files") == files


def test_an_image_without_python_or_with_an_older_one_is_named(tmp_path: Path) -> None:
    place = write_job(seed_job("aks-gpt-175b", "aks-nd-h100-v5", tmp_path), tmp_path)
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "bash").symlink_to("/bin/bash")
    done = prove(place, {"PATH": str(programs)})
    assert (done.returncode, "this image has no python3" in done.stderr) == (2, True)
    old = programs / "python3"
    old.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo Python 3.6.9 && exit 0\nexit 1\n'.replace("#!/bin/sh", "#!/bin/bash")
    )
    old.chmod(0o755)
    done = prove(place, {"PATH": str(programs)})
    assert (done.returncode, "Python 3.6.9 in this image, and 3.8 or newer is needed" in done.stderr) == (2, True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_mount_that_is_read_only_is_named(tmp_path: Path) -> None:
    place = write_job(seed_job("aks-gpt-175b", "aks-nd-h100-v5", tmp_path), tmp_path)
    store = tmp_path / "store"
    inside = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && exec bash "$2"'
    script = place / f"{IMAGE_STAGE}.sh"
    command = ["unshare", "--mount", "sh", "-c", inside, "sh", str(store), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    assert f"FAIL  mount {store}  cannot be written: Read-only file system" in done.stdout
    assert "FAIL  store" in done.stdout
    # What is wrong comes last: schedulers show the last line of a job that failed.
    marks = [line.split()[0] for line in done.stdout.splitlines() if not line.startswith(" ")]
    assert marks[marks.index("FAIL") :] == ["FAIL"] * marks.count("FAIL")


@pytest.mark.parametrize(
    ("rendered_for", "source", "refused"),
    [("878d65f", "878d65f", None), ("0.19.0", "0.12.3", "unrecognized arguments")],
)
def test_every_argument_passes_the_real_parser_of_the_image(
    rendered_for: str, source: str, refused: str | None, tmp_path: Path
) -> None:
    tree = unpacked(source, tmp_path / "megatron")
    # Transformer Engine is not here: its precision and its overlaps are left out.
    job = seed_job(
        "aks-gpt-175b",
        "aks-nd-h100-v5",
        tmp_path,
        f"engine.version={rendered_for}",
        f"engine.program={tree / 'pretrain_gpt.py'}",
        "engine.args={transformer-impl: local}",
    )
    done = prove(write_job(job, tmp_path), environment(tree, tmp_path))
    if refused is None:
        assert done.returncode == 0, done.stdout + done.stderr
        assert "ok    arguments     Megatron-LM's parser takes all" in done.stdout
        return
    assert done.returncode == 2, done.stdout
    assert refused in done.stderr
    assert "FAIL  arguments" in done.stdout
    assert "warn  version       megatron.core 0.12." in done.stdout


@pytest.mark.parametrize("argument", [None, "--no-such-argument"])
def test_arguments_are_held_against_the_parser_where_kernels_cannot_be_loaded(
    argument: str | None, tmp_path: Path
) -> None:
    """The AKS recipe as it is shipped, on a node without a GPU: its image has Triton 3.2."""
    tree = unpacked("878d65f", tmp_path / "megatron")
    job = seed_job("aks-gpt-175b", "aks-nd-h100-v5", tmp_path, f"engine.program={tree / 'pretrain_gpt.py'}")
    place = write_job(job, tmp_path)
    if argument is not None:
        asked = json.loads((place / REQUEST_FILE).read_text())
        (place / REQUEST_FILE).write_text(json.dumps(asked | {"arguments": [*asked["arguments"], argument]}))
    variables = environment(tree, tmp_path)
    variables["PYTHONPATH"] = f"{packages_that_need_a_driver(tmp_path)}:{variables['PYTHONPATH']}"
    done = prove(place, variables)
    assert done.returncode == (0 if argument is None else 2), done.stdout + done.stderr
    if argument is None:
        said = "whether they fit together cannot be told without a GPU (transformer_engine)"
        assert said in done.stdout
    else:
        assert f"unrecognized arguments: {argument}" in done.stderr


@pytest.mark.parametrize("option", ["lr", "no_such_option"])
def test_torchtune_holds_its_components_against_their_signatures(option: str, tmp_path: Path) -> None:
    pytest.importorskip("torchtune")
    store = tmp_path / "store"
    cluster = load_cluster("soperator-h100", [f"store={store}"])
    job = build_job(load_recipe("soperator-llama3-3-70b"), cluster, offline=True, code=NO_CODE)
    job_files = dict(job.files)
    written = job_files["torchtune.yaml"]
    assert "\n  lr: " in written
    job_files["torchtune.yaml"] = written.replace("\n  lr: ", f"\n  {option}: ", 1)
    place = tmp_path / "job"
    place.mkdir()
    write_files(place, job_files)
    asked = json.loads(job_files[REQUEST_FILE]) | {"config": str(place / "torchtune.yaml"), "program": None}
    (place / REQUEST_FILE).write_text(json.dumps(asked))
    done = subprocess.run(
        [sys.executable, place / PROGRAM_FILE, place / REQUEST_FILE],
        env=os.environ | {"PYTHONPATH": str(TESTS / "support/clusters/cpu_torchtune"), "TINY_VOCABULARY": "9"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == (0 if option == "lr" else 2), done.stdout + done.stderr
    assert f"{'ok   ' if option == 'lr' else 'FAIL '} arguments" in done.stdout
    assert option == "lr" or "no_such_option" in done.stdout


@pytest.mark.parametrize(
    "error",
    [
        OSError("libcuda.so.1: cannot open shared object file: No such file or directory"),
        RuntimeError("0 active drivers ([]). There should only be one."),
    ],
)
def test_what_a_missing_driver_hides_is_said_and_is_no_failure(error: Exception) -> None:
    def parser(asked: dict[str, Any]) -> str:
        raise error

    check = prove_image.ask_parser(parser, {"environment": {}, "world_size": 1})
    assert (check.verdict, check.what.partition(":")[0]) == ("skipped", "cannot be told without a GPU")


def test_our_own_image_is_proven_by_the_first_stage(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(recipe_text("dense"))
    cluster = load_cluster(write_cluster(tmp_path))
    job = build_job(load_recipe(str(tmp_path / "recipe.yaml"), ["layout.dp=2"]), cluster, code=NO_CODE)
    assert [stage.name for stage in job.stages] == ["prepare", "train"]
    place = write_job(job, tmp_path, modules=["torch", "no_such_module"], image="registry/image")
    with pytest.raises(InputError, match="there is no no_such_module in this image"):
        run_stage("prepare", place)
    assert not list((tmp_path / "store").glob("artefacts/*")), "no data is prepared in an image that cannot train"
    asked = json.loads((place / REQUEST_FILE).read_text()) | {"modules": ["torch"]}
    (place / REQUEST_FILE).write_text(json.dumps(asked))
    run_stage("prepare", place)
    assert json.loads((Path(job.run) / IMAGE_CHECKS).read_text())["checks"]
