"""The Ray target: jobs for a running cluster, over its REST API."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from trainshed.errors import InputError, NotFound
from trainshed.launch.job import Job, Stage
from trainshed.launch.ray.body import JOB_NAME, job_body, package_name, package_of
from trainshed.launch.ray.dashboard import ENDED, Dashboard, RayNode
from trainshed.launch.ray.resources import bundle_of, fits, named
from trainshed.launch.ray.stage_lines import lines_of_stage
from trainshed.launch.ray.status import stage_states
from trainshed.launch.target import Part, Request, StageState, Submitted
from trainshed.recipe import Cluster

_FOLLOW_SECONDS = 2.0


class RayTarget:
    """A running Ray cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._dashboard = Dashboard(cluster)

    def render(self, job: Job) -> Request:
        """Return the body of the POST that submits the job, and our code as one of Ray's packages."""
        part = Part(f"{job.name}.json", None, job_body(job))
        uploads = {package_name(job.code): package_of(job.code)} if job.code is not None else {}
        return Request("ray", job.name, (part,), uploads, tuple(self._notes(job)))

    def check(self, job: Job) -> Sequence[str]:
        """Say which stages are too large for the cluster as it stands."""
        nodes = self._dashboard.nodes()
        return [sentence for stage in job.stages if (sentence := self._too_large(stage, nodes))]

    def submit(self, request: Request, job: Job) -> Submitted:
        """Put our code among Ray's packages and post the body."""
        for known in self._dashboard.jobs():
            if (known.get("metadata") or {}).get(JOB_NAME) == request.job and known["status"] not in ENDED:
                raise InputError(
                    f"{request.job} is already on the cluster: {known['submission_id']}, {known['status'].lower()}",
                    where=self._cluster.where("ray.address"),
                    hint="follow it with `trainshed logs -f`, or end it with `trainshed cancel` first",
                )
        for name, data in request.uploads.items():
            self._dashboard.put_package(name, data)
        id = self._dashboard.submit(request.text().encode())
        return Submitted(request.job, job.run, "ray", {stage.name: id for stage in job.stages})

    def status(self, submitted: Submitted) -> tuple[StageState, ...]:
        """Say how each stage stands and why."""
        id = _id(submitted)
        return stage_states(tuple(submitted.ids), id, self._dashboard.job(id), self._dashboard.log(id))

    def logs(
        self,
        submitted: Submitted,
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
        id, shown = _id(submitted), 0
        while True:
            job = self._dashboard.job(id)
            if job is None:
                raise NotFound(
                    f"Ray knows no job {id}: its cluster was started anew, or the job was deleted there",
                    where=self._cluster.where("ray.address"),
                    hint=f"its logs are kept in {submitted.run}/logs",
                )
            log = self._dashboard.log(id)
            if follow and job["status"] not in ENDED:
                log = log[: log.rfind("\n") + 1]  # the rest of a line comes with the next look
            lines = lines_of_stage(log, stage)
            yield from lines[shown:]
            shown = len(lines)
            if not follow or job["status"] in ENDED:
                return
            time.sleep(_FOLLOW_SECONDS)

    def cancel(self, submitted: Submitted) -> tuple[str, ...]:
        """Ask the job to stop: its ranks write a checkpoint first."""
        id = _id(submitted)
        job = self._dashboard.job(id)
        if job is None or job["status"] in ENDED:
            return ()
        self._dashboard.stop(id)
        return (f"Ray job {id}: asked to stop; its ranks write a checkpoint first",)

    def _notes(self, job: Job) -> Iterator[str]:
        for image in sorted({stage.image for stage in job.stages if stage.image}):
            yield f"the nodes must run {image}: a running Ray cluster's image cannot be chosen"
        if any(stage.spares for stage in job.stages):
            yield "no spare nodes are held: Ray places a training anew when a node is lost"
        if job.code is not None:
            address = self._cluster.ray.address.rstrip("/") if self._cluster.ray else ""
            yield (
                f"by hand (--out DIR writes both): curl -X PUT --data-binary @store/{package_name(job.code)} "
                f"{address}/api/packages/gcs/{package_name(job.code)}, then within ten minutes "
                f"curl --json @{job.name}.json {address}/api/jobs/"
            )

    def _too_large(self, stage: Stage, nodes: Sequence[RayNode]) -> str | None:
        assert self._cluster.ray is not None
        bundle = bundle_of(stage, self._cluster.ray.gpu_resource)
        large_enough = sum(fits(bundle, node.resources) for node in nodes)
        if large_enough >= stage.nodes:
            return None
        return (
            f"{stage.name} needs {stage.nodes} {'nodes' if stage.nodes > 1 else 'node'} with {named(bundle)}, and "
            f"{large_enough} of the Ray cluster's {len(nodes)} are that large"
        )


def _id(submitted: Submitted) -> str:
    """The id of the one job that all stages are."""
    return next(iter(submitted.ids.values()))
