"""A job that only proves nodes: what `trainshed doctor --on CLUSTER --nodes N` sends."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainshed.errors import InputError
from trainshed.launch.job import CodeArchive, JobFile
from trainshed.launch.target import target_of
from trainshed.recipe import load_cluster
from trainshed.workflow.submit import doctor_job

CODE = CodeArchive("trainshed-0-0.tar.xz", "0" * 64, b"x")


@pytest.mark.parametrize("name", ["slurm-h100", "gke-a3-mega", "eks-p5", "aks-nd-h100-v5", "minio-mi300x-ray"])
def test_every_target_takes_it_with_the_gpus_and_fabric_of_a_training(name: str, tmp_path: Path) -> None:
    image = [] if name.startswith("slurm") else ["image=registry.example/x"]
    job = doctor_job(load_cluster(name, image), 4, full=True, code=CODE)
    (tmp_path / "job.json").write_text(job.files["job.json"])
    (stage,) = JobFile.read(tmp_path).stages
    assert (stage.nodes, stage.gpus_per_node) == (4, 8)
    assert stage.preflight
    assert stage.only_preflight
    assert stage.full_preflight
    assert target_of(job.cluster).render(job).text()


def test_the_same_nodes_are_proven_in_the_same_run_and_others_in_another() -> None:
    cluster = load_cluster("slurm-h100")
    assert doctor_job(cluster, 4, code=CODE).run == doctor_job(cluster, 4, code=CODE).run
    assert doctor_job(cluster, 4, code=CODE).run != doctor_job(cluster, 8, code=CODE).run


def test_more_nodes_than_there_are_is_refused() -> None:
    with pytest.raises(InputError, match="65 nodes, and the cluster slurm-h100 has 64 at most"):
        doctor_job(load_cluster("slurm-h100"), 65, code=CODE)
