"""Ray's dashboard over HTTP: its Jobs API, its packages, its list of nodes. The `ray` wheel is not needed here."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainshed.errors import InputError, TrainshedError
from trainshed.recipe import Cluster

if TYPE_CHECKING:
    import httpx2

ENDED = frozenset({"SUCCEEDED", "FAILED", "STOPPED"})
_SECONDS = 60.0


@dataclass(frozen=True)
class RayNode:
    """A living node and what Ray hands out of it in all."""

    address: str
    resources: Mapping[str, float]


class Dashboard:
    """One cluster's dashboard."""

    def __init__(self, cluster: Cluster) -> None:
        assert cluster.ray is not None, "the schema asks for the section"
        self._address = cluster.ray.address.rstrip("/")
        self._where = cluster.where("ray.address")

    def job(self, id: str) -> dict[str, Any] | None:
        """Return what Ray knows of a job; None where there is no such job."""
        answer = self._ask("GET", f"/api/jobs/{id}", missing=True)
        return None if answer is None else answer.json()

    def submit(self, body: bytes) -> str:
        """Post a job's body; returns its id."""
        answer = self._ask("POST", "/api/jobs/", body)
        assert answer is not None
        return answer.json()["submission_id"]

    def stop(self, id: str) -> None:
        """Ask a job to stop."""
        self._ask("POST", f"/api/jobs/{id}/stop")

    def jobs(self) -> list[dict[str, Any]]:
        """Return all jobs that Ray remembers."""
        answer = self._ask("GET", "/api/jobs/")
        assert answer is not None
        return answer.json()

    def log(self, id: str) -> str:
        """Return all that the job's driver has printed, without Ray's echo of the entrypoint."""
        answer = self._ask("GET", f"/api/jobs/{id}/logs", missing=True)
        text = "" if answer is None else answer.json().get("logs") or ""
        entrypoint = (self.job(id) or {}).get("entrypoint") or ""
        _, echoed, rest = text.partition(f"Running entrypoint for job {id}: {entrypoint}\n")
        return rest if echoed else text

    def put_package(self, name: str, data: bytes) -> None:
        """Put a package where every node finds it as gcs://NAME; one that is there is kept."""
        # Asking also keeps Ray from dropping it until the job that needs it is posted.
        if self._ask("GET", f"/api/packages/gcs/{name}", missing=True) is None:
            self._ask("PUT", f"/api/packages/gcs/{name}", data)

    def nodes(self) -> list[RayNode]:
        """Return the living nodes."""
        answer = self._ask("GET", "/api/v0/nodes?detail=true&limit=10000")
        assert answer is not None
        listed = answer.json()["data"]["result"]["result"]
        return [RayNode(node["node_ip"], node["resources_total"]) for node in listed if node["state"] == "ALIVE"]

    def _ask(self, method: str, path: str, content: bytes | None = None, *, missing: bool = False) -> Any:
        """Send one request; None where nothing is there and `missing` allows it."""
        import httpx2

        headers = {**_user_headers()}
        if method == "POST" and content is not None:
            headers["Content-Type"] = "application/json"
        try:
            answer = httpx2.request(
                method, f"{self._address}{path}", content=content, headers=headers, timeout=_SECONDS
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
        said = answer.text.strip().splitlines()[-1:] or [answer.reason_phrase]
        hint = "RAY_JOB_HEADERS holds headers for every request, as JSON" if answer.status_code in (401, 403) else None
        what = f"Ray refused {method} {path.partition('?')[0]} ({answer.status_code}): {said[0][:500]}"
        return TrainshedError(what, where=self._where, hint=hint)


def _user_headers() -> dict[str, str]:
    """Headers for a dashboard behind a proxy, from the variable that Ray's own command line reads."""
    text = os.environ.get("RAY_JOB_HEADERS")
    if not text:
        return {}
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise InputError(
            "RAY_JOB_HEADERS is not a JSON object of texts",
            where="the environment",
            hint='write RAY_JOB_HEADERS=\'{"Authorization": "Bearer …"}\'',
        )
    return found
