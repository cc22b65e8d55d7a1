"""The cluster file: where a recipe runs. It holds places and names, never secrets."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr

from trainshed.errors import RecipeError
from trainshed.recipe.address import Address
from trainshed.recipe.load import SUFFIXES, check_format
from trainshed.recipe.messages import validate
from trainshed.recipe.overrides import apply_overrides
from trainshed.recipe.places import Places
from trainshed.recipe.schema import FORMAT, LONGEST_NAME, NAME_PATTERN
from trainshed.recipe.section import PositiveFloat, PositiveInt, Problem, Section, Text, wrong
from trainshed.recipe.yaml_source import decode, parse
from trainshed.shipped import shipped_folder

DEFAULT_CLUSTER = "local"
LOCAL_STORE = "./store"
Target = Literal["local", "slurm", "kubernetes", "ray"]
_STORE_KEY = re.compile(r"^(s3|gs|az|hf|https?)(://[^/]+(/[^/]+)*)?$")


class StoreEndpoint(Section):
    """How to reach a store that is not where its scheme says."""

    endpoint: Text | None = Field(None, description="URL of the server", examples=["http://minio.default.svc:9000"])
    region: Text | None = Field(None, description="Region the server expects")
    anonymous: bool = Field(False, description="Read without credentials")
    addressing: Literal["path", "virtual"] | None = Field(
        None,
        description="Where the bucket's name stands in the URL; left out: path where an endpoint is given",
    )

    def problems(self) -> Iterator[Problem]:
        """An endpoint is a URL."""
        if self.endpoint is not None and not self.endpoint.startswith(("http://", "https://")):
            yield Problem(("endpoint",), f"`{self.endpoint}` has no scheme", f"write https://{self.endpoint}")


class SecretReference(Section):
    """Where a secret is found when it is needed: exactly one of the keys."""

    env: Text | None = Field(None, description="Name of an environment variable")
    file: Text | None = Field(None, description="Path of a file that holds it")
    k8s: Text | None = Field(None, description="A Kubernetes secret, as name/key")

    def problems(self) -> Iterator[Problem]:
        """One reference."""
        if sum(value is not None for value in (self.env, self.file, self.k8s)) != 1:
            yield Problem((), "needs exactly one of env, file and k8s", "write for example {env: HF_TOKEN}")
        if self.k8s is not None and not re.match(r"^[^/]+/[^/]+$", self.k8s):
            yield Problem(("k8s",), "names no key of a secret", "write name/key")


def _refuse_literal(value: Any) -> Any:
    # The value itself is not repeated: it may be the secret.
    if not isinstance(value, dict | SecretReference):
        raise wrong(
            "a secret is never written into a file: cluster files are shared and kept with every run",
            "write where to find it: {env: NAME}, {file: PATH} or {k8s: name/key}",
        )
    return value


class Nodes(Section):
    """How many nodes a run gets."""

    default: PositiveInt = Field(1, description="Where neither `--nodes` nor the recipe says a number")
    max: PositiveInt | None = Field(None, description="More are refused before anything is submitted")

    def problems(self) -> Iterator[Problem]:
        """The default is allowed."""
        if self.max is not None and self.default > self.max:
            yield Problem(("default",), f"{self.default} is more than max: {self.max}", "write a smaller one")


class ClusterStorage(Section):
    """The storage that checkpoints and tokens lie on, as the planner must know it."""

    tier: Text = Field(description="Kind of storage, by its name in the catalog", examples=["amlfs-250"])
    size_tib: PositiveFloat | None = Field(None, description="How much of it there is, where its speed depends on that")
    servers: PositiveInt | None = Field(None, description="How many servers it stands on, where that decides its speed")


class Cluster(Section):
    """Where to run."""

    trainshed: Annotated[int, Field(ge=1, le=FORMAT)] = Field(FORMAT, description="Version of the format")
    name: Annotated[str, Field(pattern=NAME_PATTERN, max_length=LONGEST_NAME)] = Field(
        description="Name of the cluster", examples=["local"]
    )
    target: Target = Field(
        description="What schedules the work; this version runs on `local` only and plans for all", examples=["local"]
    )
    store: Address | None = Field(None, description="Root of artefacts and runs; left out on `local`: ./store")
    stores: dict[str, StoreEndpoint] = Field(
        default_factory=dict, description="Endpoints, by scheme (`s3`) or by bucket (`s3://bucket`)"
    )
    secrets: dict[str, Annotated[SecretReference, BeforeValidator(_refuse_literal)]] = Field(
        default_factory=dict, description="Secrets by reference: {HF_TOKEN: {env: HF_TOKEN}}"
    )
    nodes: Nodes = Field(default_factory=Nodes, description="How many nodes a run gets")
    machine: Text | None = Field(
        None, description="Kind of machine: a name in the catalog, an instance type, or a file that describes it"
    )
    storage: ClusterStorage | None = Field(None, description="Where checkpoints and tokens lie, for the plan")
    calibration: Text | None = Field(None, description="A file that `trainshed plan calibrate` wrote here")
    price_per_gpu_hour: PositiveFloat | None = Field(None, description="US dollars; left out: the list price")
    mtbf_hours: PositiveFloat | None = Field(
        None, description="Mean time between failures of one node; left out: Llama 3's, by its GPUs"
    )

    _places: Places = PrivateAttr(default_factory=Places)

    @property
    def store_root(self) -> str:
        """Return the root of artefacts and runs."""
        return self.store or LOCAL_STORE

    @property
    def places(self) -> Places:
        """Return where each key was written."""
        return self._places

    def where(self, key: str) -> str:
        """Return the place of a key for an error: `cluster.yaml:12 (nodes.max)`."""
        return self._places.where(tuple(key.split(".")))

    def check_runs_here(self) -> None:
        """Refuse to run where this version cannot; a plan can be made for every cluster."""
        if self.target != "local":
            raise RecipeError(
                f"this version cannot run on {self.target} yet: it runs on `local` only",
                where=self.where("target"),
                hint=f"`trainshed plan RECIPE --on {self.name}` plans for it; leave --on out to run on this machine",
            )

    def problems(self) -> Iterator[Problem]:
        """Endpoints are for stores that exist."""
        for key in self.stores:
            if not _STORE_KEY.match(key):
                yield Problem(("stores", key), f"`{key}` is neither a scheme nor a bucket", "write s3, or s3://bucket")


def load_cluster(name_or_path: str | os.PathLike[str] = DEFAULT_CLUSTER, overrides: Iterable[str] = ()) -> Cluster:
    """Load a cluster file by path, or by name from the project, the user's own folder or the shipped ones."""
    file = find_cluster(name_or_path)
    try:
        data = file.read_bytes()
    except OSError as error:
        raise RecipeError(f"cannot be read: {error.strerror}", where=str(file)) from None
    document = parse(decode(data, str(file)), str(file))
    apply_overrides(document, overrides, prefix="cluster.")
    check_format(document)
    cluster = validate(Cluster, document)
    cluster._places = document.places
    return cluster


def cluster_folders() -> list[Path]:
    """Return where cluster files are looked for: the project, the user's configuration, the shipped ones."""
    configuration = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return [Path("clusters"), Path(configuration) / "trainshed" / "clusters", shipped_folder("clusters")]


def known_clusters() -> dict[str, Path]:
    """Return every cluster file that a name would find."""
    found: dict[str, Path] = {}
    for folder in cluster_folders():
        for file in sorted(folder.iterdir()) if folder.is_dir() else []:
            if file.suffix in SUFFIXES:
                found.setdefault(file.stem, file)
    return found


def find_cluster(name_or_path: str | os.PathLike[str]) -> Path:
    """Return the file of a cluster."""
    text = os.fspath(name_or_path)
    known = known_clusters()
    if text in known:
        return known[text]
    if ("/" in text or Path(text).suffix in SUFFIXES) and Path(text).is_file():
        return Path(text)
    near = difflib.get_close_matches(text, known, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else f"known clusters: {', '.join(known)}"
    raise RecipeError("there is no such cluster file", where=text, hint=hint)
