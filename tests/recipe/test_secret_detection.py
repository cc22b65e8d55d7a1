"""Secrets that somebody wrote out: found by name and by shape, never repeated, and honest values pass."""

from __future__ import annotations

import base64
import random
from pathlib import Path

import pytest

from support.recipes.small_recipes import recipe_text
from trainshed.catalog.fabrics import fabric_setup_file, fabric_setup_names, refused_variables
from trainshed.catalog.machines import machine_names
from trainshed.cli import run_cli
from trainshed.launch.fabric import fabric_setup
from trainshed.recipe import known_clusters, load_cluster
from trainshed.recipe.cluster import Cluster
from trainshed.recipe.secret_detection import find_secret, secret_arguments, secret_shape

DRAWN = random.Random(14)
RANDOM = [base64.b64encode(b"A" + DRAWN.randbytes(29)).decode() for _ in range(50)]
HEX = [DRAWN.randbytes(20).hex() for _ in range(50)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_TOKEN", "anything"),
        ("HUGGING_FACE_HUB_TOKEN", "anything"),
        ("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"),
        ("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE"),
        ("AWS_SESSION_TOKEN", "anything"),
        ("WANDB_API_KEY", "local-0123"),
        ("AZURE_CLIENT_SECRET", "x y"),
        ("AZURE_STORAGE_KEY", "abc"),
        ("AZURE_STORAGE_CONNECTION_STRING", "DefaultEndpointsProtocol=https;AccountName=x"),
        ("PGPASSWORD", "hunter2"),
        ("DB_PASSWD", "hunter2"),
        ("X_SECRET_Y", "hunter2"),
        ("GOOGLE_APPLICATION_CREDENTIALS", '{"type": "service_account"}'),
        ("NOTE", "hf_" + "aB3" * 11),
        ("NOTE", "ghp_" + "aB3" * 12),
        ("NOTE", "sk-proj-" + "aB3" * 12),
        ("NOTE", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"),
        ("NOTE", "-----BEGIN OPENSSH PRIVATE KEY-----"),
        ("PROXY", "http://me:hunter2@proxy:3128"),
        ("NOTE", "https://b.s3.amazonaws.com/x?X-Amz-Signature=0123"),
    ],
)
def test_secrets_are_found(name: str, value: str) -> None:
    assert find_secret(name, value) is not None


def test_long_random_text_is_a_key_whatever_its_name() -> None:
    assert [value for value in (*RANDOM, *HEX) if find_secret("NOTE", value) is None] == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKENIZERS_PARALLELISM", "false"),
        ("MAX_TOKENS", "100000"),
        ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1"),
        ("HF_TOKEN_PATH", "/run/secrets/hf"),
        ("AWS_WEB_IDENTITY_TOKEN_FILE", "/var/run/secrets/eks.amazonaws.com/serviceaccount/token"),
        ("GOOGLE_APPLICATION_CREDENTIALS", "/etc/google/key.json"),
        ("AZURE_CLIENT_ID", "5ebe9f43-ac33-420d-be7d-6a1c0e9d2f10"),
        ("NCCL_IB_HCA", "mlx5_0:1,mlx5_1:1,mlx5_2:1,mlx5_3:1,mlx5_4:1,mlx5_5:1,mlx5_6:1,mlx5_7:1"),
        ("NCCL_TOPO_FILE", "/opt/microsoft/ndv5-topo.xml"),
        ("NCCL_IB_PKEY", "0x8001"),
        ("UCX_TLS", "rc,cuda_copy,gdr_copy,cuda_ipc"),
        (
            "LD_LIBRARY_PATH",
            "/usr/local/nvidia/lib64:/opt/amazon/efa/lib:/usr/cuda-12.8/targets/x86_64-linux/lib",
        ),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,garbage_collection_threshold:0.8,max_split_size_mb:512"),
        ("XLA_FLAGS", "--xla_gpu_enable_latency_hiding_scheduler=true --xla_gpu_graph_level=0"),
        ("IMAGE", "nvcr.io/nvidia/pytorch@sha256:" + "0123456789abcdef" * 4),
        ("GIT_COMMIT", HEX[0]),
        ("HTTPS_PROXY", "http://proxy.example:3128"),
        ("NO_PROXY", "localhost,127.0.0.1,169.254.169.254,.svc.cluster.local,10.0.0.0/8"),
        ("NVIDIA_VISIBLE_DEVICES", "GPU-5ebe9f43-ac33-420d-be7d-6a1c0e9d2f10"),
        ("WANDB_PROJECT", "llama3-8b-continued-pretraining-on-technical-text-2026"),
        ("MLFLOW_TRACKING_URI", "https://mlflow.example.com/api/2.0/experiments/TechnicalText2026Run12"),
    ],
)
def test_honest_values_pass(name: str, value: str) -> None:
    assert find_secret(name, value) is None


def test_no_variable_that_a_fabric_sets_is_taken_for_a_secret() -> None:
    seen = 0
    for name in machine_names():
        setup = fabric_setup(Cluster(name="c", target="slurm", machine=name), nodes=2)
        for variable, value in setup.environment.items():
            assert find_secret(variable, value) is None, (variable, value)
            seen += 1
    assert seen > 100
    for name in fabric_setup_names():
        assert not [known for known in fabric_setup_file(name).refused if find_secret(known, "eth0")]
    assert not [known for known in refused_variables().everywhere if find_secret(known, "some text")]
    for name in known_clusters():
        assert load_cluster(name)


def test_a_shape_is_known_wherever_it_stands() -> None:
    assert secret_shape("--header=Bearer hf_" + "aB3" * 11) == "a token of Hugging Face"
    assert secret_shape("--comment=two words") is None


def test_arguments_of_programs_are_secrets_by_the_option_before_them() -> None:
    secret = ("--api-key=abcdefgh", "--password", "open-sesame", "--hf-token", "abcdefgh")
    assert [number for number, _ in secret_arguments(secret)] == [0, 2, 4]
    honest = (
        "--eod-token",
        "<|end|>",
        "--text-key",
        "body",
        "--password-file",
        "x.txt",
        "--api-key",
        "$KEY",
        "--token",
    )
    assert list(secret_arguments((*honest, "--verbose", "--password=", "corpus"))) == []


def test_a_secret_in_a_cluster_file_is_refused_with_the_line_to_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.yaml").write_text(recipe_text("dense"))
    base = "name: c\ntarget: slurm\nmachine: cpu\nstore: /data\n"
    hidden = "hf_" + "hunter2" * 5

    def refused(text: str, *overrides: str) -> str:
        (tmp_path / "mine.yaml").write_text(text)
        asked = ["render", str(tmp_path / "recipe.yaml"), "layout.dp=1", "--on", str(tmp_path / "mine.yaml")]
        assert run_cli([*asked, *overrides]) == 2
        said = capsys.readouterr()
        assert "hunter2" not in said.out + said.err
        return said.err

    said = refused(f"{base}environment:\n  HF_TOKEN: {hidden}\n")
    assert "mine.yaml:6 (environment.HF_TOKEN): holds a token of Hugging Face, which would stand in scripts" in said
    assert "delete it and write below `secrets`: `HF_TOKEN: {env: HF_TOKEN}`, or `{file: PATH}`" in said
    assert "a secret by its name" in refused(f"{base}environment: {{WANDB_API_KEY: hunter2}}\n")
    said = refused(base, f"cluster.environment.MINE={hidden}")
    assert "cluster.environment.MINE=…: holds a token of Hugging Face" in said
    assert "(setup.1): holds a secret by its name" in refused(base + "setup: ['true', 'export DB_PASSWORD=hunter2']\n")
    assert "(setup.0): holds a token" in refused(f"{base}setup: ['curl -H Bearer:{hidden} http://x']\n")
    assert "(slurm.options.0): holds a token" in refused(f"{base}slurm: {{options: ['--comment={hidden}']}}\n")
    pods = base.replace("slurm", "kubernetes") + "image: x\nvolumes: [{mount: /data, pvc: x}]\n"
    said = refused(f"{pods}environment: {{HF_TOKEN: {hidden}}}\n")
    assert (
        "`HF_TOKEN: {k8s: hf-token/key}`, after `kubectl create secret generic hf-token --from-literal=key=…`" in said
    )
    (tmp_path / "mine.yaml").write_text(f"{base}setup: ['export HF_TOKEN=$(cat /run/hf)', 'source /x']\n")
    assert load_cluster(tmp_path / "mine.yaml").setup
