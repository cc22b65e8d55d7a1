"""The body of a Ray job: all there is to read, the same bytes for the same job, and nothing breaks out of it."""

from __future__ import annotations

import io
import json
import random
import subprocess
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from golden_files import check_golden
from trainshed.errors import InputError
from trainshed.launch.job import Job, Stage, job_folder
from trainshed.launch.packaging import pack_code
from trainshed.launch.ray.target import RayTarget, ray_job_body, ray_package, ray_package_name
from trainshed.recipe import Cluster, load_cluster

CLUSTER = """\
name: lab
target: ray
store: /data
machine: mi300x-8
nodes: {default: 2, max: 4}
environment: {NCCL_DEBUG: WARN}
secrets:
  HF_TOKEN: {env: LAB_HF_TOKEN}
  AWS_SECRET_ACCESS_KEY: {file: /run/secrets/minio}
ray: {address: "http://head:8265"}
"""
STAGES = (
    Stage("prepare", cpus=8, memory="32Gi"),
    Stage("train", nodes=2, gpus_per_node=8, ranks_per_node=8, restarts=3),
)


def lab(tmp_path: Path, text: str = CLUSTER) -> Cluster:
    (tmp_path / "lab.yaml").write_text(text)
    return load_cluster(tmp_path / "lab.yaml")


def small_job(cluster: Cluster, files: dict[str, str], **changed: object) -> Job:
    keys = {"name": "tiny-1a2b", "run": "/data/runs/tiny/1a2b", "code": None, "grace_seconds": 240, **changed}
    return Job(cluster=cluster, stages=STAGES, files=files, **keys)  # type: ignore[arg-type]


def test_the_body_is_what_it_was(tmp_path: Path) -> None:
    files = {"recipe.yaml": "name: 'tiny'\n", "job.json": "{}\n", "scripts/clean.py": "print('it''s')\n"}
    check_golden("ray/train_on_mi300x.json", ray_job_body(small_job(lab(tmp_path), files)))


def written_by(body: str, folder: Path) -> dict[str, str]:
    """Run an entrypoint with a Python that does nothing; what lies in the folder then, apart from it."""
    (folder / "python3").write_text("#!/bin/sh\necho ran\n")
    (folder / "python3").chmod(0o755)
    script = json.loads(body)["entrypoint"]
    done = subprocess.run(["/bin/sh", "-c", script], env={"PATH": f"{folder}:/usr/bin:/bin"}, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"ran\n", b""), done
    return {str(path): path.read_bytes().decode() for path in folder.rglob("*") if path.is_file()}


@given(
    text=st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)))
    | st.sampled_from(["$(touch x)", "`touch x`", "'; touch x; '", "\nEOF\n", "\\", "%s%n", "-n", "x" * 20000]),
    name=st.text(st.sampled_from("ab$'\"` ;\n()&"), min_size=1, max_size=8).map(lambda text: text + ".yaml"),
)
@settings(max_examples=25)
def test_no_name_and_no_text_of_a_file_breaks_out_of_the_entrypoint(
    tmp_path_factory: pytest.TempPathFactory, text: str, name: str
) -> None:
    folder = tmp_path_factory.mktemp("job")
    run = str(folder / "it's a $(run)")
    job = small_job(lab(tmp_path_factory.getbasetemp()), {name: text}, run=run)
    found = written_by(ray_job_body(job), folder)
    assert found == {f"{job_folder(run)}/{name}": text, str(folder / "python3"): "#!/bin/sh\necho ran\n"}


def test_a_long_file_is_packed_and_one_that_no_entrypoint_holds_is_refused(tmp_path: Path) -> None:
    long = "a line of a diff\n" * 7000
    job = small_job(lab(tmp_path), {"provenance.json": long}, run=str(tmp_path / "run"))
    assert written_by(ray_job_body(job), tmp_path)[f"{tmp_path}/run/job/provenance.json"] == long
    random_like = random.Random(0).randbytes(200_000).hex()
    with pytest.raises(InputError, match="an entrypoint of Ray holds 127") as refused:
        ray_job_body(small_job(lab(tmp_path), {"big.txt": random_like}))
    assert refused.value.where == "big.txt"
    with pytest.raises(InputError, match="NUL"):
        ray_job_body(small_job(lab(tmp_path), {"nul.txt": "a\0b"}))


def test_our_code_travels_as_a_package_that_ray_unpacks(tmp_path: Path) -> None:
    code = pack_code()
    job = small_job(lab(tmp_path), {"job.json": "{}"}, code=code)
    request = RayTarget(job.cluster).render(job)
    assert json.loads(request.text())["runtime_env"]["py_modules"] == [f"gcs://{ray_package_name(code)}"]
    assert request.uploads == {ray_package_name(code): ray_package(code)}, "the same bytes each time"
    with zipfile.ZipFile(io.BytesIO(ray_package(code))) as package:
        assert "trainshed/launch/ray/target.py" in package.namelist()
        assert b"def ray_job_body" in package.read("trainshed/launch/ray/target.py")
    assert [note for note in request.notes if "curl -X PUT" in note]


def test_secrets_are_references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAB_HF_TOKEN", "hf_never_shown")
    job = small_job(lab(tmp_path), {"job.json": "{}"})
    assert "hf_never_shown" not in RayTarget(job.cluster).render(job).text()
