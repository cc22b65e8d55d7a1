"""Kubernetes as a target: render, check, apply exactly what was rendered, and answer for it afterwards."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from trainshed.errors import NotFound, TrainshedError
from trainshed.launch.job import Job
from trainshed.launch.kubernetes.kinds import CLAIM, CREATED, JOB, STORAGE_CLASS, VOLUME, Kind, kind_named
from trainshed.launch.kubernetes.live.api import Api, Forbidden
from trainshed.launch.kubernetes.live.checking import refusals
from trainshed.launch.kubernetes.live.connecting import connect
from trainshed.launch.kubernetes.live.listing import Listing, list_job
from trainshed.launch.kubernetes.live.standing import standing
from trainshed.launch.kubernetes.live.status import stage_states
from trainshed.launch.kubernetes.manifests.driver_objects import DRIVER
from trainshed.launch.kubernetes.manifests.naming import COMPONENT, INSTANCE
from trainshed.launch.kubernetes.manifests.yaml_text import documents
from trainshed.launch.kubernetes.render import render, stage_ids
from trainshed.launch.target import Request, StageState, Submitted
from trainshed.recipe import Cluster

_KEPT = (CLAIM, VOLUME, STORAGE_CLASS)
_GONE_SECONDS = 120.0


class KubernetesTarget:
    """A namespace of a Kubernetes cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def render(self, job: Job) -> Request:
        """Turn a job into manifests."""
        return render(job)

    def check(self, job: Job) -> Sequence[str]:
        """Ask whether the cluster could take the job."""
        with connect(self.cluster) as api:
            return refusals(api, job)

    def submit(self, request: Request, job: Job) -> Submitted:
        """Apply the request's objects in order; what an earlier, ended submission of the same run left is removed."""
        submitted = Submitted(job.name, job.run, "kubernetes", stage_ids(job))
        with connect(self.cluster) as api:
            _clear(api, submitted)
            for part in request.parts:
                for document in documents(part.text):
                    api.apply(document)
        return submitted

    def status(self, submitted: Submitted) -> tuple[StageState, ...]:
        """Say how each stage stands and why."""
        with connect(self.cluster) as api:
            return stage_states(submitted.ids, list_job(api, submitted.job, submitted.ids))

    def logs(
        self,
        submitted: Submitted,
        stage: str,
        *,
        rank: int | None = None,
        attempt: int | None = None,
        follow: bool = False,
    ) -> Iterator[str]:
        """Yield a pod's log: the one of a rank's node. Pods of earlier attempts are gone; their logs are in the run."""
        with connect(self.cluster) as api:
            pods = list_job(api, submitted.job, submitted.ids).pods_of(stage)
            ranks = submitted.ranks_per_node if stage == "train" else 1
            place = (rank or 0) // ranks
            if attempt is not None:
                raise NotFound(
                    f"Kubernetes keeps no logs of attempt {attempt} of {stage}",
                    where=submitted.run,
                    hint="they are in the run's folder, which is not reachable from here",
                )
            if place >= len(pods):
                raise NotFound(
                    f"{stage} has {len(pods)} pods now, none for rank {rank or 0}",
                    where=submitted.job,
                    hint="`trainshed status RUN` says what it waits for",
                )
            pod = pods[place]
            yield from api.log(pod["metadata"]["name"], pod["spec"]["containers"][0]["name"], follow=follow)

    def cancel(self, submitted: Submitted) -> tuple[str, ...]:
        """Delete everything of the job, the driver first; claims and volumes are never touched."""
        with connect(self.cluster) as api:
            return tuple(_delete_all(api, submitted.job))


def _clear(api: Api, submitted: Submitted) -> None:
    """Remove what an earlier submission left; names are the run's, so that two cannot be under way at once."""
    listing = list_job(api, submitted.job, submitted.ids)
    active = _active(listing)
    if active is not None:
        raise TrainshedError(
            f"{submitted.job} is under way already: {active} has not ended",
            where=f"namespace {api.namespace}",
            hint="`trainshed status` says how it stands, `trainshed cancel` ends it",
        )
    removed = _delete_all(api, submitted.job)
    deadline = time.monotonic() + _GONE_SECONDS
    while removed and any(_there(api, each) for each in removed):
        if time.monotonic() > deadline:
            raise TrainshedError(
                f"what an earlier submission of {submitted.job} left does not go away",
                where=f"namespace {api.namespace}",
                hint=f"kubectl get all --selector {INSTANCE}={submitted.job}",
            )
        time.sleep(0.5)


def _active(listing: Listing) -> str | None:
    """What has not ended: a stage, or the driver that would create the next."""
    found = {**listing.stages, DRIVER: listing.driver}
    ended = ("done", "failed")
    return next((name for name, each in found.items() if each is not None and standing(each).phase not in ended), None)


def _delete_all(api: Api, job: str) -> list[str]:
    removed = []
    # The driver first: it would create the next stage while this one is being removed.
    for kind in (JOB, *(each for each in CREATED if each not in (JOB, *_KEPT))):
        for found in _listed(api, kind, f"{INSTANCE}={job}"):
            if kind is JOB and found["metadata"].get("ownerReferences"):
                continue  # goes with what owns it
            api.delete(kind, found["metadata"]["name"])
            removed.append(f"{kind.name}/{found['metadata']['name']}")
    return removed


def _listed(api: Api, kind: Kind, selector: str) -> list[dict]:
    try:
        found = api.list(kind, selector)
    except Forbidden:
        return []
    return sorted(found, key=lambda each: each["metadata"].get("labels", {}).get(COMPONENT) != DRIVER)


def _there(api: Api, written: str) -> bool:
    kind, _, name = written.partition("/")
    return api.get(kind_named(kind), name) is not None
