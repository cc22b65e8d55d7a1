"""The images and Python environments that jobs run in, written from pinned parts (`images.yaml`) and built.

`engine: torch` and `torchtune` get PyTorch's public image and what else our stages import; the PyTorch of a base
stays as it is, since vendors build theirs for their GPUs and networks. `megatron` and `nemo` get the vendor's own image
and nothing of ours: their stages that run our code have the cluster's `image`. A fabric adds its user-space libraries,
except on GKE, where its plug-in is mounted from the node.

What is written follows hadolint's rules. No name that a person gives reaches a file or a command unchecked.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from importlib.metadata import requires
from pathlib import Path
from typing import Any, Literal, get_args

from trainshed.engines.megatron.arguments import KNOWN_VERSIONS
from trainshed.errors import InputError
from trainshed.recipe.yaml_io import parse_yaml
from trainshed.shipped import shipped_file

ImageEngine = Literal["torch", "megatron", "nemo", "torchtune"]
ImageFabric = Literal["tcpxo", "gib", "efa", "infiniband", "roce"]
ImageGpu = Literal["cuda", "rocm"]
BuildTool = Literal["docker", "podman", "buildah", "kaniko"]
CONTAINERFILE = "Containerfile"
NODE_EXTRAS = ("data", "train", "serve", "health", "tensorboard")
"""What a node needs besides the core: to tokenise, train and serve, to read devices and stacks, to show pages."""
_KANIKO = "/kaniko/executor"
# An image reference: registry, name, tag or digest; nothing that means more to a shell or a Containerfile.
_IMAGE_REFERENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*")
_EXTRA = re.compile(r"""extra\s*==\s*['"]([\w-]+)['"]""")
_ONLY_NVIDIA: dict[str, str] = {"tcpxo": "GKE's H100 nodes", "gib": "GKE's H200 nodes", "efa": "EKS's NVIDIA nodes"}
_MEGATRON_FOLDER = "/opt/megatron-lm"


@cache
def _parts() -> dict[str, Any]:
    file = Path(__file__).with_name("images.yaml")
    return parse_yaml(file.read_text(encoding="utf-8"), file.name).value


@dataclass(frozen=True)
class ImageRequest:
    """What an image or an environment is for; `version` is the engine's (None: the newest that is rendered for)."""

    engine: ImageEngine = "torch"
    fabric: ImageFabric | None = None
    gpu: ImageGpu = "cuda"
    ray: bool = False
    version: str | None = None
    base: str | None = None

    def __post_init__(self) -> None:
        for key, kinds in (("engine", ImageEngine), ("fabric", ImageFabric), ("gpu", ImageGpu)):
            given = getattr(self, key)
            if given is not None and given not in get_args(kinds):
                raise InputError(
                    f"`{given}` is not known", where=f"--{key}", hint=f"one of {', '.join(get_args(kinds))}"
                )
        if self.base is not None and not _IMAGE_REFERENCE.fullmatch(self.base):
            raise InputError(
                f"`{self.base}` is not an image", where="--base", hint="write for example registry/name:tag"
            )
        if self.gpu == "rocm" and self.engine == "nemo":
            raise InputError("NeMo's image is for NVIDIA's GPUs", where="--gpu", hint="--engine megatron or torch")
        if self.gpu == "rocm" and self.fabric in _ONLY_NVIDIA:
            raise InputError(
                f"{self.fabric} is the fabric of {_ONLY_NVIDIA[self.fabric]}",
                where="--fabric",
                hint="infiniband or roce",
            )
        if self.version is not None and self.version not in self._versions:
            known = ", ".join(self._versions) or "none: it is this package"
            raise InputError(f"{self.engine} {self.version} is not known here", where="--version", hint=known)

    @property
    def _versions(self) -> tuple[str, ...]:
        if self.engine == "torch" or (self.engine == "megatron" and self.gpu == "rocm"):
            return ()
        return tuple(_parts()[self.engine])

    @property
    def engine_version(self) -> str | None:
        """The version of the engine, None for our own and for AMD's Megatron-LM, whose image has one."""
        return self.version or (_parts()[f"{self.engine}_default"] if self._versions else None)

    @property
    def unknown_arguments(self) -> str | None:
        """Say what to write in a recipe for an engine whose arguments are not known; None where they are."""
        version = self.engine_version
        if self.engine != "megatron" or version is None or version in KNOWN_VERSIONS:
            return None
        return (
            f"the arguments of Megatron-LM {version} are not known here: write the nearest of "
            f"{', '.join(KNOWN_VERSIONS)} as engine.version; the stage `image` holds every argument against the parser "
            "of the image"
        )

    @property
    def base_image(self) -> str:
        """The image that it is built on."""
        if self.base is not None:
            return self.base
        if self.engine == "nemo":
            return _parts()["nemo"][self.engine_version]
        if self.engine == "megatron":
            by_version = _parts()["megatron"]
            return (_parts()["megatron_rocm"] if self.gpu == "rocm" else by_version[self.engine_version])["image"]
        if self.gpu == "rocm":
            raise InputError(
                "no public image for ROCm is known here whose PyTorch is 2.11 or newer",
                where="--gpu",
                hint="name one: --base rocm/pytorch:…",
            )
        # The plug-in for EFA is built in the image: headers and nvcc are needed.
        return _parts()["bases"]["cuda"]["devel" if self.fabric == "efa" else "image"]

    @property
    def packages(self) -> list[str]:
        """What pip installs, besides PyTorch: what our stages and the engine import, and Ray."""
        parts = _parts()
        ours = [_pinned(line) for line in node_requirements() if not line.startswith("torch")]
        wanted: list[str] = []
        if self.engine in ("torch", "torchtune"):
            wanted += ours
        if self.engine == "torchtune":
            pinned = [*parts["torchtune"][self.engine_version], *parts["torchtune_packages"]]
            named = {_package_name(line) for line in pinned}
            wanted = [line for line in wanted if _package_name(line) not in named] + pinned
        if self.engine == "megatron" and self.gpu == "cuda":
            wanted += parts["megatron_packages"]
        if self.ray:
            wanted.append(parts["ray"])
        return wanted


@cache
def _tested_versions() -> dict[str, str]:
    """Return the versions that the tests run with, by package."""
    lines = shipped_file("constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = (line.partition("==") for line in lines if "==" in line and not line.startswith("#"))
    return {_package_name(name): version.split()[0].rstrip(";") for name, _, version in pins}


def _pinned(requirement: str) -> str:
    """Return a requirement with the version that the tests run with, where they have one."""
    version = _tested_versions().get(_package_name(requirement))
    return requirement if version is None else f"{re.split(r'[=<>~! ;@]', requirement, maxsplit=1)[0]}=={version}"


def _package_name(requirement: str) -> str:
    return re.split(r"[\[=<>~! ;@]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def node_requirements() -> list[str]:
    """Return what our own stages import, as pip takes it, PyTorch included."""
    requirements = []
    for line in requires("trainshed") or []:
        requirement, _, marker = line.partition(";")
        extra = _EXTRA.search(marker)
        if (extra is None or extra[1] in NODE_EXTRAS) and "trainshed[" not in requirement:
            requirements.append(requirement.strip().replace(" ", ""))
    return sorted(set(requirements))


def containerfile(request: ImageRequest) -> str:
    """Write the Containerfile of an image."""
    named = " ".join(filter(None, (request.engine, request.engine_version)))
    lines = [
        "# Written by `trainshed image build`: what jobs need besides our code, which travels with each of them.",
        f"# {named} for {request.gpu}, fabric: {request.fabric or 'none'}" + (", with Ray" if request.ray else ""),
        f"FROM {request.base_image}",
        'SHELL ["/bin/bash", "-euo", "pipefail", "-c"]',
        *_fabric_lines(request),
        *_ray_lines(request),
        *_engine_lines(request),
        *_pip_lines(request),
        *_check_lines(request),
        "WORKDIR /workspace",
    ]
    return "\n".join(lines) + "\n"


def _fabric_lines(request: ImageRequest) -> list[str]:
    if request.fabric in ("infiniband", "roce"):
        return [*_rdma_lines(request), *_topology_lines(request)]
    if request.fabric == "efa":
        return _efa_lines()
    if request.fabric in ("tcpxo", "gib"):
        return ["# GKE mounts the plug-in of this fabric from the node: nothing of it is in the image."]
    return []


def _rdma_lines(request: ImageRequest) -> list[str]:
    # NVIDIA's images bring the libraries of RDMA; AMD's and PyTorch's do not.
    if request.engine in ("megatron", "nemo") and request.gpu == "cuda":
        return []
    packages = [*_parts()["rdma_packages"], *(["ca-certificates", "curl"] if _topology_lines(request) else [])]
    return [
        # The distribution of the base fixes their versions, and no other is in its archive.
        "# hadolint ignore=DL3008",
        "RUN apt-get update \\",
        f" && apt-get install -y --no-install-recommends {' '.join(packages)} \\",
        " && rm -rf /var/lib/apt/lists/*",
    ]


def _topology_lines(request: ImageRequest) -> list[str]:
    """Return the lines for the files that NCCL_TOPO_FILE names on Azure's ND machines."""
    if request.fabric != "infiniband" or request.gpu != "cuda":
        return []
    topology = _parts()["azure_topology"]
    files: dict[str, str] = topology["files"]
    place = "https://raw.githubusercontent.com/Azure/azhpc-images/${AZHPC_COMMIT}/topology"
    fetched = [f'curl -fsSL "{place}/{name}" -o /etc/{name}' for name in files]
    return [
        "# The PCI tree of Azure's ND machines, which a virtual machine does not show to NCCL.",
        f"ARG AZHPC_COMMIT={topology['commit']}",
        f"RUN {fetched[0]} \\",
        *(f" && {command} \\" for command in fetched[1:]),
        " && printf '%s  /etc/%s\\n' \\",
        *(f"    {hash} {name} \\" for name, hash in files.items()),
        "  | sha256sum --check",
    ]


def _ray_lines(request: ImageRequest) -> list[str]:
    """Return the lines for what KubeRay calls in the image besides Ray: `wget` to probe it, `python` to submit."""
    if not request.ray:
        return []
    return [
        "# hadolint ignore=DL3008",
        "RUN apt-get update \\",
        " && apt-get install -y --no-install-recommends wget \\",
        " && rm -rf /var/lib/apt/lists/* \\",
        ' && { command -v python || ln -s "$(command -v python3)" /usr/local/bin/python; }',
    ]


def _efa_lines() -> list[str]:
    versions = _parts()["efa"]
    return [
        f"ARG EFA_INSTALLER_VERSION={versions['installer']}",
        f"ARG AWS_OFI_NCCL_VERSION={versions['ofi_nccl']}",
        "WORKDIR /tmp/efa",
        "# libfabric from Amazon's installer; the kernel module is the node's.",
        "# hadolint ignore=DL3008",
        "RUN apt-get update \\",
        " && apt-get install -y --no-install-recommends ca-certificates curl g++ libhwloc-dev make pciutils \\",
        ' && curl -fsSL "https://efa-installer.amazonaws.com/aws-efa-installer-${EFA_INSTALLER_VERSION}.tar.gz" \\',
        "  | tar -xz --strip-components=1 \\",
        " && ./efa_installer.sh -y --skip-kmod --skip-limit-conf --no-verify \\",
        " && rm -rf /tmp/efa/* /opt/amazon/ofi-nccl /var/lib/apt/lists/*",
        "# NCCL's plug-in for it, of one version and not the installer's.",
        'RUN curl -fsSL "https://github.com/aws/aws-ofi-nccl/releases/download/v${AWS_OFI_NCCL_VERSION}/'
        'aws-ofi-nccl-${AWS_OFI_NCCL_VERSION}.tar.gz" \\',
        "  | tar -xz --strip-components=1 \\",
        " && ./configure --prefix=/opt/aws-ofi-nccl --with-libfabric=/opt/amazon/efa --with-cuda=/usr/local/cuda"
        " --enable-platform-aws --disable-tests \\",
        ' && make -j "$(nproc)" install \\',
        " && rm -rf /tmp/efa/* \\",
        " && printf '%s\\n' /opt/amazon/efa/lib /opt/aws-ofi-nccl/lib >/etc/ld.so.conf.d/efa.conf \\",
        " && ldconfig",
        'ENV LD_LIBRARY_PATH="/opt/aws-ofi-nccl/lib:/opt/amazon/efa/lib:${LD_LIBRARY_PATH}"',
    ]


def _engine_lines(request: ImageRequest) -> list[str]:
    if request.engine != "megatron":
        return []
    if request.gpu == "rocm":
        # Where recipes look for pretrain_gpt.py in every image that is built here.
        folder = _parts()["megatron_rocm"]["folder"]
        return [
            f"RUN test -f {folder}/pretrain_gpt.py && ln -s {folder} {_MEGATRON_FOLDER}",
            f'ENV PYTHONPATH="{_MEGATRON_FOLDER}"',
        ]
    commit = _parts()["megatron"][request.engine_version]["commit"]
    source = f"https://github.com/NVIDIA/Megatron-LM/archive/{commit}.tar.gz"
    return [
        f"ARG MEGATRON_COMMIT={commit}",
        f"WORKDIR {_MEGATRON_FOLDER}",
        f'RUN curl -fsSL "{source.replace(commit, "${MEGATRON_COMMIT}")}" \\',
        "  | tar -xz --strip-components=1 \\",
        " && make -C megatron/core/datasets",
        f'ENV PYTHONPATH="{_MEGATRON_FOLDER}"',
    ]


def _pip_lines(request: ImageRequest) -> list[str]:
    if not request.packages:
        return []
    print_torch = "import importlib.metadata as m; print('torch==' + m.version('torch'))"
    packages = " \\\n      ".join(shlex.quote(package) for package in request.packages)
    # A vendor's PyTorch calls itself 2.9.0a0+…, which only a constraint keeps pip from replacing. Bases on Ubuntu 24.04
    # (pytorch/pytorch since 2.10) have Debian's Python, where pip installs nothing unless it is told to; older pip's
    # have no such option and read no such variable.
    return [
        f'RUN python3 -c "{print_torch}" >/tmp/kept.txt \\',
        " && PIP_CONSTRAINT='' PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-cache-dir -c /tmp/kept.txt \\",
        f"      {packages} \\",
        " && rm /tmp/kept.txt",
    ]


_IMPORTS = {
    "torch": ("torch", "pydantic", "tokenizers", "safetensors"),
    "megatron": ("torch", "megatron.core", "megatron.training"),
    "nemo": ("torch", "nemo"),
    "torchtune": ("torch", "torchao", "torchtune.training", "tensorboard"),
}


def _check_lines(request: ImageRequest) -> list[str]:
    """Return the line that fails the build where a part cannot be imported; a GPU is not there when it is built."""
    modules = [*_IMPORTS[request.engine], *(["ray"] if request.ray else [])]
    if request.engine == "megatron":
        # Its other modules load kernels, which ask for a GPU.
        modules = [name for name in modules if name != "megatron.training"]
        if request.gpu == "cuda":
            modules.append("transformer_engine")
    missing = f"[n for n in {modules!r} if u.find_spec(n) is None]"
    return [f'RUN python3 -c "import importlib.util as u; missing = {missing}; assert not missing, missing"']


def find_tool(wanted: str | None = None) -> BuildTool | None:
    """Return the program that builds images here, None where there is none that works."""
    tools: tuple[BuildTool, ...] = get_args(BuildTool)
    if wanted is not None and wanted not in tools:
        raise InputError(f"`{wanted}` is not known", where="--tool", hint=f"one of {', '.join(tools)}")
    return next((tool for tool in tools if wanted in (None, tool) and _is_usable(tool)), None)


def _is_usable(tool: BuildTool) -> bool:
    if tool == "kaniko":
        return Path(_KANIKO).is_file()
    if shutil.which(tool) is None:
        return False
    # Docker's client needs a running daemon.
    return tool != "docker" or subprocess.run([tool, "info"], capture_output=True, check=False).returncode == 0


def build_commands(tag: str, folder: str, *, tool: BuildTool = "docker", push: bool = False) -> list[list[str]]:
    """Return the commands that build an image from the folder of its Containerfile, and push it."""
    if not _IMAGE_REFERENCE.fullmatch(tag):
        raise InputError(f"`{tag}` is not a name of an image", where="TAG", hint="write registry/name:tag")
    file = f"{folder}/{CONTAINERFILE}"
    if tool == "kaniko":
        where = (
            ["--destination", tag] if push else ["--no-push", "--tar-path", f"{folder}/image.tar", "--destination", tag]
        )
        return [[_KANIKO, "--dockerfile", file, "--context", f"dir://{folder}", *where]]
    commands = [[tool, "build", "--file", file, "--tag", tag, folder]]
    return [*commands, [tool, "push", tag]] if push else commands


def environment_packages(request: ImageRequest) -> list[str]:
    """Return what an environment without an image installs, PyTorch included."""
    if request.engine in ("megatron", "nemo") or request.gpu == "rocm" or request.base is not None:
        what = f"--engine {request.engine}" if request.engine in ("megatron", "nemo") else "--gpu rocm or --base"
        raise InputError(
            f"an environment of pip's packages is not made for {what}: its parts are built by their vendor",
            where="--venv",
            hint="build an image, and write `container: pyxis` in the cluster file",
        )
    torch = _parts()["torch"] if request.engine == "torchtune" else None
    own = [line for line in node_requirements() if line.startswith("torch")]
    return [*([torch] if torch is not None else own), *request.packages]


def venv_script(path: str, python: str = "python3", request: ImageRequest | None = None) -> str:
    """Write the script that makes a Python environment on a shared disk; it appears when it is complete."""
    request = request or ImageRequest()
    partial = shlex.quote(f"{path}.partial")
    requirements = " ".join(shlex.quote(requirement) for requirement in environment_packages(request))
    imports = ", ".join(name for name in _IMPORTS[request.engine] if name != "torch")
    return (
        "set -euo pipefail\n"
        f"if [ -e {shlex.quote(path)} ]; then echo {shlex.quote(f'{path} is already there')} >&2; exit 2; fi\n"
        f"rm -rf {partial}\n"
        f"mkdir -p -- {shlex.quote(path.rsplit('/', 1)[0] or '/')}\n"
        # The files of an environment contain its path: it is made beside its place, then the path in them is changed.
        f"{shlex.quote(python)} -m venv --copies {partial}\n"
        f"{partial}/bin/python -m pip install --disable-pip-version-check {requirements}\n"
        f"{partial}/bin/python -c 'import torch, {imports}; print(torch.__version__)'\n"
        f"grep -rlIZ -- {partial} {partial}/bin | xargs -0 -r "
        f"sed -i 's|{_quote_for_sed(path)}\\.partial|{_quote_for_sed(path)}|g'\n"
        f"mv -- {partial} {shlex.quote(path)}\n"
    )


def _quote_for_sed(path: str) -> str:
    if not re.fullmatch(r"/[A-Za-z0-9._/+-]+", path):
        raise InputError(
            f"`{path}` cannot hold a Python environment: its programs begin with that path",
            where="--venv",
            hint="write an absolute path of letters, digits, dots and dashes",
        )
    return path.replace(".", "\\.")
