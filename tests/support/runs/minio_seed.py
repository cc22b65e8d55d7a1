"""The MinIO and Ray seed as a user scales it down: its shipped recipe and cluster file with overrides, nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import psutil
import pyarrow
import pyarrow.parquet
import yaml
from tokenizers import Tokenizer

from support.models.made_tokenizers import CONFIGS, docstrings, gpt2, save
from support.models.tiny_models import save_tiny_hf
from support.runs.megatron_lm import CPU_ARGS, engine_programs, unpacked
from support.runs.seed_images import cpu_overrides, pod_overrides
from support.servers.shared_daemons import free_ports
from trainshed.catalog import find_machine
from trainshed.launch.job import Job
from trainshed.launch.ray.target import RayTarget
from trainshed.launch.target import StageState, SubmittedJob
from trainshed.observe.event_log import read_steps
from trainshed.recipe import load_cluster, load_recipe, split_overrides
from trainshed.storage import LocalStore, copy_tree, open_folder
from trainshed.storage.checksum import Hasher
from trainshed.storage.manifest import Manifest
from trainshed.workflow.submit import build_job

RECIPE, CLUSTER = "minio-llama3-1-70b-cpt", "minio-mi300x-ray"
MODEL = "models/meta-llama/Llama-3.1-70B"
"""Where the seed has the model in its bucket."""
CORPUS = "datasets/fineweb-edu"
CHECKPOINTS = "experiments/megatron-lm"
QUESTIONS = {"What is the capital of France?": 32, "2 + 2 = ?": 8, "Write a short greeting.": 16}
"""The seed's three questions, and how many tokens it asks for."""
_ENDED = ("done", "failed", "cancelled")


def written(value: Any) -> str:
    """A value as a person writes it after `key=`."""
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("...\n").strip()


def fill_bucket(bucket: str, folder: Path, documents: int = 400) -> Tokenizer:
    """Put a tiny Llama and a corpus where the seed has the 70B and FineWeb-Edu; returns the tokenizer."""
    tokenizer = gpt2()
    model = save(tokenizer, CONFIGS["gpt2"], folder / "hf")
    save_tiny_hf("llama", model, seed=1, vocab_size=tokenizer.get_vocab_size())
    copy_tree(str(model), f"s3://{bucket}/{MODEL}")
    texts = docstrings()[:documents]
    for number in range(2):
        content = BytesIO()
        pyarrow.parquet.write_table(pyarrow.table({"text": texts[number::2]}), content)
        open_folder(f"s3://{bucket}/{CORPUS}").put(f"000_{number:05d}.parquet", content.getvalue())
    return tokenizer


@dataclass(frozen=True)
class MinioSeed:
    """One scaled-down user of the seed: a bucket, a Ray cluster, a folder that its nodes share."""

    bucket: str
    endpoint: str
    address: str
    """Of Ray's dashboard."""
    folder: Path
    secrets: dict[str, str]
    megatron: Path | None = None
    """The sources of Megatron-LM; None: our own engine trains."""
    store: Path = field(default=None)  # type: ignore[assignment]
    checkpoints: str = CHECKPOINTS
    """Where checkpoints go in the bucket."""

    def __post_init__(self) -> None:
        """The store lies in the folder unless it is said otherwise."""
        if self.store is None:
            object.__setattr__(self, "store", self.folder / "store")

    def overrides(self, *, kubernetes: bool = False) -> list[str]:
        """What differs from the shipped files.

        `shard: none`: Megatron's distributed optimizer cannot resume with PyTorch's Adam, which stands in for Apex's.
        """
        model = f"s3://{self.bucket}/{MODEL}"
        words = [
            f"model={written({'from': model})}",
            f"tokenizer={model}",
            "data.sequence_length=32",
            f"data.train.0.path=s3://{self.bucket}/{CORPUS}/000_*.parquet",
            "data.split={train: 0.9, validation: 0.1}",
            *("data.validation.every=2", "data.validation.batches=1"),
            *("train.global_batch=4", "train.precision=fp32", "layout.tp=2", "layout.micro_batch=2"),
            *("layout.recompute=none", "layout.shard=none"),
            *("checkpoint.every=2", "checkpoint.async=false", "serve=null", "export.to=null"),
            # So that a step that differs shows in the weights.
            *("train.optimizer.lr=1.0e-3", "train.schedule.min_lr=1.0e-4", "export.dtype=fp32"),
            f"checkpoint.to=s3://{self.bucket}/{self.checkpoints}",
            *self._engine(kubernetes=kubernetes),
        ]
        return [*words, *(f"cluster.{word}" for word in (self._kubernetes() if kubernetes else self._cluster()))]

    def _engine(self, *, kubernetes: bool) -> list[str]:
        if self.megatron is None:
            return ["engine=torch"]
        program = self.megatron / "pretrain_gpt.py"
        args = {**CPU_ARGS, "no-bias-swiglu-fusion": True, "no-rope-fusion": True}
        if kubernetes:  # image, version and program are the shipped ones
            return [f"engine.args={json.dumps(args)}"]
        return [
            "engine.image=null",
            f"engine.program={program}",
            "engine.version=0.16.1",
            f"engine.args={json.dumps(args)}",
        ]

    def _kubernetes(self) -> list[str]:
        """The cluster as it is shipped, with nodes as large as this machine can play."""
        machine = find_machine(str(load_cluster(CLUSTER).machine))
        own = cpu_overrides() if self.megatron is None else pod_overrides(self.folder, machine.gpu, machine.fabric)
        variables = {"TRAINSHED_UPLOAD_SECONDS": "0.5", "TRAINSHED_FAILURE_GRACE_SECONDS": "5"}
        return [
            *own,
            f"stores.s3.endpoint={self.endpoint}",
            *(f"environment.{name}={value}" for name, value in variables.items()),
        ]

    def _environment(self) -> dict[str, str]:
        environment = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "TRAINSHED_FAILURE_GRACE_SECONDS": "5"}
        environment["TRAINSHED_UPLOAD_SECONDS"] = "0.5"
        if self.megatron is not None:
            environment["PATH"] = engine_programs(self.megatron, self.folder)
        return environment

    def _cluster(self) -> list[str]:
        secrets = {}
        for name, value in self.secrets.items():
            file = self.folder / name
            file.write_text(value)
            secrets[name] = {"file": str(file)}
        return [
            *("target=ray", "kubernetes=null", "image=null", "volumes=[]", "machine=cpu", "storage=null"),
            f"ray={written({'address': self.address, 'gpu_resource': 'CPU'})}",
            f"store={self.store}",
            f"stores.s3.endpoint={self.endpoint}",
            f"secrets={written(secrets)}",
            f"environment={written(self._environment())}",
            f"python={sys.executable}",
            "limits={cpu_stage_cpus: 1, cpu_stage_memory: 100Mi, restarts: 1, grace_seconds: 60}",
            "preflight=false",
        ]

    def job(self, *changes: str, id: str | None = None, kubernetes: bool = False) -> Job:
        """The job that `submit` sends, to a running Ray cluster or to Kubernetes."""
        for_recipe, for_cluster = split_overrides([*self.overrides(kubernetes=kubernetes), *changes])
        return build_job(load_recipe(RECIPE, for_recipe), load_cluster(CLUSTER, for_cluster), id=id)


class RayLine:
    """A job on the Ray cluster, from submission to its end."""

    def __init__(self, job: Job) -> None:
        self.job, self.target = job, RayTarget(job.cluster)
        self.submitted: SubmittedJob = self.target.submit(self.target.render(job), job)

    @property
    def run(self) -> Path:
        return Path(self.job.run)

    def states(self) -> dict[str, StageState]:
        return {state.stage: state for state in self.target.status(self.submitted)}

    def has_ended(self) -> bool:
        states = list(self.states().values())
        return states[-1].state in _ENDED or any(state.state in ("failed", "cancelled") for state in states)

    def ended(self, seconds: float = 900) -> dict[str, StageState]:
        """Wait for the end."""
        end = time.monotonic() + seconds
        while not self.has_ended():
            assert time.monotonic() < end, f"{self.states()}\n{self.log()[-4000:]}"
            time.sleep(0.5)
        return self.states()

    def log(self) -> str:
        id = next(iter(self.submitted.ids.values()))
        return self.target._dashboard.log(id)


def processes_of(line: RayLine) -> dict[int, list[str]]:
    """The processes that work for a run, wherever they are, with their command lines.

    They name its folder, or somebody above them does; so do the actors that started them.
    """
    processes: dict[int, list[str]] = {}
    for process in psutil.process_iter(["pid", "cmdline"]):
        if process.pid == os.getpid() or not any(line.job.run in word for word in process.info["cmdline"] or []):
            continue
        with suppress(psutil.Error):
            parent = process.parent()
            family = [process, *process.children(recursive=True)]
            # Ray adds the method that runs: `ray::ProcessActor.run`.
            family += [parent] if parent is not None and parent.cmdline()[0].startswith("ray::ProcessActor") else []
            for member in family:
                with suppress(psutil.Error):
                    if member.status() != psutil.STATUS_ZOMBIE:
                        processes[member.pid] = member.cmdline()
    return processes


def role_of(words: list[str]) -> str:
    """What a process does for a line, by its command line."""
    text = " ".join(words)
    for role, part in (
        ("driver", "ray-driver"),
        ("uploader", "upload --follow"),
        ("agent", "trainshed agent"),
        ("rank", "worker train"),
        ("rank", "pretrain_gpt.py"),
        ("index", "build_index.py"),
        ("actor", "ray::"),
        ("script", ".sh"),
    ):
        if part in text:
            return role
    return "helper"


def check_committed(seed: MinioSeed) -> None:
    """Whatever has a manifest, in the store or in the bucket, is what its manifest says."""
    for file in seed.store.glob("artefacts/*/*/*manifest.json"):
        folder = file.parent / "files" if (file.parent / "files").is_dir() else file.parent
        Manifest.from_bytes(file.read_bytes()).verify_files(LocalStore(folder))
    checkpoints = f"s3://{seed.bucket}/{seed.checkpoints}"
    for info in list(open_folder(checkpoints).list()):
        if info.path.endswith(".manifest.json"):
            committed = json.loads(open_folder(checkpoints).read(info.path))
            place = open_folder(f"{checkpoints}/{info.path.removesuffix('.manifest.json')}")
            for path, checksum in committed["files"].items():
                hasher = Hasher.like(checksum)
                hasher.update(place.read(path))
                assert hasher.checksum == checksum, f"{info.path}: {path}"


def kill_everything(line: RayLine) -> int:
    """End all processes of a run at once, as when the power goes; returns how many."""
    killed: set[int] = set()
    while processes := processes_of(line):
        for id in processes:
            with suppress(ProcessLookupError):
                os.kill(id, signal.SIGKILL)
        killed |= set(processes)
        time.sleep(0.05)
    return len(killed)


def losses(run: Path) -> dict[int, float]:
    """The loss of every step of a run, as its events have it."""
    return {event["step"]: event["loss"] for event in read_steps(LocalStore(run), "")}


def same_weights(one: Path, other: Path) -> bool:
    """Whether two exports have the same tensors, bit by bit."""
    contents = []
    for folder in (one, other):
        files = sorted(folder.glob("*.safetensors"))
        assert files
        contents.append([file.read_bytes() for file in files])
    return contents[0] == contents[1]


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Our own server for an exported model, as the seed's page tells to start it."""
    (port,) = free_ports(1, 20000, 30000)
    command = [sys.executable, "-m", "trainshed", "serve", str(folder), "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(os.environ))
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            assert process.poll() is None
            try:
                urllib.request.urlopen(f"{url}/ready", timeout=5).close()
                break
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def ask(url: str, body: dict[str, Any]) -> Any:
    """Send a request as the seed's `curl -X PUT` does."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/api", json.dumps(body).encode(), headers, method="PUT")
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def check_answers(folder: Path, tokenizer: Tokenizer) -> None:
    """Ask the seed's three questions of a server that is started for it."""
    with served(folder) as url:
        check_answers_of(url, tokenizer)


def check_answers_of(url: str, tokenizer: Tokenizer) -> None:
    """Ask the seed's three questions; each is answered, with no more tokens than it asks for."""
    for question, tokens in QUESTIONS.items():
        answer = ask(url, {"prompts": [question], "tokens_to_generate": tokens})
        assert answer["text"][0].startswith(question)
        asked = len(tokenizer.encode(question).ids)
        assert asked < len(answer["tokens"][0]) <= asked + tokens


def megatron_sources(folder: Path) -> Path:
    """Real Megatron-LM 0.16.1, unpacked."""
    return unpacked("0.16.1", folder / "megatron")
