"""The Ray target: a job as the JSON body of Ray's REST API, and Ray's dashboard as the HTTP server that takes it.

`curl --data-binary @job.json http://head:8265/api/jobs/` submits the same body. Its entrypoint writes the job's files
into the run's folder, which every node mounts. So the body is complete, and whoever submits it does not need the `ray`
wheel.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import posixpath
import shlex
import tarfile
import time
import zipfile
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from trainshed.errors import InputError, NotFound, TrainshedError
from trainshed.launch.fabric import fabric_setup
from trainshed.launch.job import CodeArchive, Job, Stage, job_folder
from trainshed.launch.ray.placement import bundle_fits, format_bundle, stage_bundle
from trainshed.launch.ray.status import stage_log_lines, stage_states
from trainshed.launch.target import RequestPart, StageState, SubmitRequest, SubmittedJob
from trainshed.recipe import Cluster

if TYPE_CHECKING:
    import httpx2


_FOLLOW_SECONDS = 2.0


class RayTarget:
    """A running Ray cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._dashboard = RayDashboard(cluster)

    def render(self, job: Job) -> SubmitRequest:
        """Return the body of the POST that submits the job, and our code as one of Ray's packages."""
        part = RequestPart(f"{job.name}.json", None, ray_job_body(job))
        uploads = {ray_package_name(job.code): ray_package(job.code)} if job.code is not None else {}
        return SubmitRequest("ray", job.name, (part,), uploads, tuple(self._notes(job)))

    def check(self, job: Job) -> Sequence[str]:
        """Return which stages are too large for the cluster as it is now."""
        nodes = self._dashboard.nodes()
        return [sentence for stage in job.stages if (sentence := self._too_large(stage, nodes))]

    def submit(self, request: SubmitRequest, job: Job) -> SubmittedJob:
        """Upload our code as one of Ray's packages and post the body."""
        for known in self._dashboard.jobs():
            if (known.get("metadata") or {}).get(JOB_NAME_KEY) == request.job and known["status"] not in ENDED_STATUSES:
                raise InputError(
                    f"{request.job} is already on the cluster: {known['submission_id']}, {known['status'].lower()}",
                    where=self._cluster.where("ray.address"),
                    hint="follow it with `trainshed logs -f`, or end it with `trainshed cancel` first",
                )
        for name, data in request.uploads.items():
            self._dashboard.put_package(name, data)
        id = self._dashboard.submit(request.text().encode())
        return SubmittedJob(request.job, job.run, "ray", {stage.name: id for stage in job.stages})

    def status(self, submitted: SubmittedJob) -> tuple[StageState, ...]:
        """Return the state of each stage and why."""
        id = _submission_id(submitted)
        return stage_states(tuple(submitted.ids), id, self._dashboard.job(id), self._dashboard.log(id))

    def logs(
        self,
        submitted: SubmittedJob,
        stage: str,
        *,
        rank: int | None = None,
        attempt: int | None = None,
        follow: bool = False,
    ) -> Iterator[str]:
        """Yield what the driver printed during a stage."""
        if rank is not None or attempt is not None:
            raise InputError(
                "Ray has the driver's log only; those of ranks lie with the run",
                where=f"{submitted.run}/logs",
                hint="leave --rank and --attempt out, or read them where the run's folder is mounted",
            )
        id, shown = _submission_id(submitted), 0
        while True:
            job = self._dashboard.job(id)
            if job is None:
                raise NotFound(
                    f"Ray knows no job {id}: its cluster was started anew, or the job was deleted there",
                    where=self._cluster.where("ray.address"),
                    hint=f"its logs are kept in {submitted.run}/logs",
                )
            log = self._dashboard.log(id)
            if follow and job["status"] not in ENDED_STATUSES:
                log = log[: log.rfind("\n") + 1]  # the rest of a line comes with the next poll
            lines = stage_log_lines(log, stage)
            yield from lines[shown:]
            shown = len(lines)
            if not follow or job["status"] in ENDED_STATUSES:
                return
            time.sleep(_FOLLOW_SECONDS)

    def cancel(self, submitted: SubmittedJob) -> tuple[str, ...]:
        """Ask the job to stop: its ranks write a checkpoint first."""
        id = _submission_id(submitted)
        job = self._dashboard.job(id)
        if job is None or job["status"] in ENDED_STATUSES:
            return ()
        self._dashboard.stop(id)
        return (f"Ray job {id}: asked to stop; its ranks write a checkpoint first",)

    def _notes(self, job: Job) -> Iterator[str]:
        for image in sorted({stage.image for stage in job.stages if stage.image}):
            yield f"the nodes must run {image}: a running Ray cluster's image cannot be chosen"
        if job.code is not None:
            address = self._cluster.ray.address.rstrip("/") if self._cluster.ray else ""
            yield (
                f"by hand (--out DIR writes both): curl -X PUT --data-binary @store/{ray_package_name(job.code)} "
                f"{address}/api/packages/gcs/{ray_package_name(job.code)}, then within ten minutes "
                f"curl --json @{job.name}.json {address}/api/jobs/"
            )

    def _too_large(self, stage: Stage, nodes: Sequence[RayNode]) -> str | None:
        assert self._cluster.ray is not None
        bundle = stage_bundle(stage, self._cluster.ray.gpu_resource)
        large_enough = sum(bundle_fits(bundle, node.resources) for node in nodes)
        needed = stage.nodes + stage.spares
        if large_enough >= needed:
            return None
        return (
            f"{stage.name} needs {needed} {'nodes' if needed > 1 else 'node'} with {format_bundle(bundle)}, "
            f"and {large_enough} of the Ray cluster's {len(nodes)} are that large"
        )


def _submission_id(submitted: SubmittedJob) -> str:
    """The id of the one Ray job that runs all stages."""
    return next(iter(submitted.ids.values()))


# Ray hands the entrypoint to `sh -c`, and Linux takes no argument longer than 128 KiB (MAX_ARG_STRLEN).
_MAX_ENTRYPOINT_BYTES = 128 * 1024 - 1
_MAX_PLAIN_FILE_BYTES = 16 * 1024  # longer files (a diff) are packed, so that what people read stays readable
_STOP_MARGIN_SECONDS = 60
JOB_NAME_KEY = "job_name"
"""The key of a job's metadata that Ray itself shows as its name."""


def ray_job_body(job: Job) -> str:
    """Return the body of the POST; the same job gives the same bytes."""
    nodes = max(stage.nodes for stage in job.stages)
    runtime_env: dict[str, object] = {
        "env_vars": {
            **fabric_setup(job.cluster, nodes=nodes).environment,
            **job.cluster.environment,
            # By default `ray job stop` kills 3 s after TERM, in the middle of the last checkpoint.
            "RAY_JOB_STOP_WAIT_TIME_S": str(job.grace_seconds + _STOP_MARGIN_SECONDS),
        }
    }
    if job.code is not None:
        runtime_env["py_modules"] = [f"gcs://{ray_package_name(job.code)}"]
    body = {
        "entrypoint": _entrypoint(job),
        # No submission_id: Ray makes one. With the same id for a run that is submitted again, Ray (2.60) takes the end
        # of the old job for that of the new one.
        "metadata": {JOB_NAME_KEY: job.name, "run": job.run},
        "runtime_env": runtime_env,
    }
    return orjson.dumps(body, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS).decode() + "\n"


def ray_package_name(code: CodeArchive) -> str:
    """Return the name of our code as one of Ray's packages."""
    return f"_ray_pkg_{code.sha256[:32]}.zip"


def ray_package(code: CodeArchive) -> bytes:
    """Repack our code as the zip file that Ray unpacks on every node and puts on PYTHONPATH."""
    packed = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(code.data)) as archive,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as package,
    ):
        for entry in archive:
            if (content := archive.extractfile(entry)) is not None:
                file = zipfile.ZipInfo(entry.name)  # its default time makes the same bytes each time
                file.external_attr = 0o644 << 16
                file.compress_type = zipfile.ZIP_DEFLATED
                package.writestr(file, content.read())
    return packed.getvalue()


def _entrypoint(job: Job) -> str:
    folder = job_folder(job.run)
    lines = ["set -eu"]
    lines += [
        f"mkdir -p {shlex.quote(parent)}"
        for parent in sorted({posixpath.dirname(f"{folder}/{name}") for name in job.files})
    ]
    for name in sorted(job.files):
        path = f"{folder}/{name}"
        # Renamed into place: an earlier job of the run may still be reading them.
        lines.append(f"{_print_command(job, name)} > {shlex.quote(path + '.new')}")
        lines.append(f"mv -f {shlex.quote(path + '.new')} {shlex.quote(path)}")
    # -P: a file of the user's named like one of Python's modules must not be taken for it.
    lines.append(f"exec {shlex.join([job.cluster.python, '-P', '-m', 'trainshed', 'ray-driver', '--job', folder])}")
    text = "\n".join(lines) + "\n"
    if len(text.encode()) > _MAX_ENTRYPOINT_BYTES:
        largest = max(job.files, key=lambda name: len(job.files[name]))
        raise InputError(
            f"the job's files take {len(text.encode()) // 1024} KiB, and an entrypoint of Ray holds 127",
            where=largest,
            hint="make it shorter; what is large belongs into the store",
        )
    return text


def _print_command(job: Job, name: str) -> str:
    """The shell command that prints a file."""
    text = job.files[name]
    if "\0" in text or "\0" in name:
        raise InputError("holds a NUL byte, which no shell can write", where=name, hint="write text only")
    if len(text.encode()) <= _MAX_PLAIN_FILE_BYTES:
        return f"printf %s {shlex.quote(text)}"
    packed = b64encode(gzip.compress(text.encode(), mtime=0)).decode()
    return f"printf %s {packed} | base64 -d | gzip -d"


ENDED_STATUSES = frozenset({"SUCCEEDED", "FAILED", "STOPPED"})
_REQUEST_SECONDS = 60.0


@dataclass(frozen=True)
class RayNode:
    """A living node and its resources in all."""

    address: str
    resources: Mapping[str, float]


class RayDashboard:
    """One cluster's dashboard."""

    def __init__(self, cluster: Cluster) -> None:
        assert cluster.ray is not None, "the schema asks for the section"
        self._address = cluster.ray.address.rstrip("/")
        self._where = cluster.where("ray.address")

    def job(self, id: str) -> dict[str, Any] | None:
        """Return what Ray knows of a job; None where there is no such job."""
        answer = self._request("GET", f"/api/jobs/{id}", missing=True)
        return None if answer is None else answer.json()

    def submit(self, body: bytes) -> str:
        """Post a job's body; returns its id."""
        answer = self._request("POST", "/api/jobs/", body)
        assert answer is not None
        return answer.json()["submission_id"]

    def stop(self, id: str) -> None:
        """Ask a job to stop."""
        self._request("POST", f"/api/jobs/{id}/stop")

    def jobs(self) -> list[dict[str, Any]]:
        """Return all jobs that Ray remembers."""
        answer = self._request("GET", "/api/jobs/")
        assert answer is not None
        return answer.json()

    def log(self, id: str) -> str:
        """Return all that the job's driver has printed, without Ray's echo of the entrypoint."""
        answer = self._request("GET", f"/api/jobs/{id}/logs", missing=True)
        text = "" if answer is None else answer.json().get("logs") or ""
        entrypoint = (self.job(id) or {}).get("entrypoint") or ""
        _, echoed, rest = text.partition(f"Running entrypoint for job {id}: {entrypoint}\n")
        return rest if echoed else text

    def put_package(self, name: str, data: bytes) -> None:
        """Upload a package, which every node finds as gcs://NAME; one that exists is kept."""
        # The GET also keeps Ray from deleting it until the job that needs it is posted.
        if self._request("GET", f"/api/packages/gcs/{name}", missing=True) is None:
            self._request("PUT", f"/api/packages/gcs/{name}", data)

    def nodes(self) -> list[RayNode]:
        """Return the living nodes."""
        answer = self._request("GET", "/api/v0/nodes?detail=true&limit=10000")
        assert answer is not None
        listed = answer.json()["data"]["result"]["result"]
        return [RayNode(node["node_ip"], node["resources_total"]) for node in listed if node["state"] == "ALIVE"]

    def _request(self, method: str, path: str, content: bytes | None = None, *, missing: bool = False) -> Any:
        """Send one request; None after a 404 if `missing` allows it."""
        import httpx2

        headers = _user_headers()
        if method == "POST" and content is not None:
            headers["Content-Type"] = "application/json"
        try:
            answer = httpx2.request(
                method, f"{self._address}{path}", content=content, headers=headers, timeout=_REQUEST_SECONDS
            )
        except httpx2.HTTPError as error:
            raise TrainshedError(
                f"no Ray dashboard answers at {self._address}: {error or type(error).__name__}",
                where=self._where,
                hint="is the cluster up, and its port 8265 reachable from here (ssh -L, kubectl port-forward)?",
            ) from None
        if missing and answer.status_code == 404:
            return None
        if answer.status_code >= 300:
            raise self._refused(method, path, answer)
        return answer

    def _refused(self, method: str, path: str, answer: httpx2.Response) -> TrainshedError:
        # Ray answers with a traceback, whose last line says what is wrong.
        last_line = answer.text.strip().splitlines()[-1:] or [answer.reason_phrase]
        hint = "RAY_JOB_HEADERS holds headers for every request, as JSON" if answer.status_code in (401, 403) else None
        what = f"Ray refused {method} {path.partition('?')[0]} ({answer.status_code}): {last_line[0][:500]}"
        return TrainshedError(what, where=self._where, hint=hint)


def _user_headers() -> dict[str, str]:
    """Headers for a dashboard behind a proxy, from the variable that Ray's own command line reads."""
    text = os.environ.get("RAY_JOB_HEADERS")
    if not text:
        return {}
    try:
        headers = json.loads(text)
    except ValueError:
        headers = None
    if not isinstance(headers, dict) or not all(isinstance(value, str) for value in headers.values()):
        raise InputError(
            "RAY_JOB_HEADERS is not a JSON object of texts",
            where="the environment",
            hint='write RAY_JOB_HEADERS=\'{"Authorization": "Bearer …"}\'',
        )
    return headers
