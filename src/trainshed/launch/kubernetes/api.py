"""The few requests that we send to an API server, over plain HTTPS.

The same client is used on a person's machine (`connect`, with kubectl's credentials, read by lightkube) and by the
driver in a pod (`connect_in_cluster`, with the credentials of its service account). Objects are sent as exactly the
text that `render` prints: server-side apply takes YAML.

The driver runs in any image that has Python (`driver_program.py`): what it uses of this file needs the standard library
of Python 3.8 only, and what a person's machine needs besides is imported where it is used.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from trainshed.errors import InputError, MissingExtra, TrainshedError
from trainshed.launch.kubernetes.kinds import KUEUE, KubeKind, KubeObject, kind_of

if TYPE_CHECKING:
    import httpx2

    from trainshed.recipe import Cluster

FIELD_MANAGER = "trainshed"
SERVICE_ACCOUNT_FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT_SECONDS = 30.0
_PAGE_SIZE = 500
_TOO_MANY_REQUESTS = 429
"""An API server that is busy, or that has just got a new kind, says so and wants to be asked again."""
_BUSY_TRIES = 10
BUSY_SECONDS = 1.0
"""What API servers ask for in `Retry-After`."""


class KubeApi:
    """An API server, and the namespace of a job."""

    def __init__(
        self, client: httpx2.Client | PodClient, namespace: str, errors: tuple[type[Exception], ...] = (OSError,)
    ) -> None:
        """`errors` are what the client raises if nobody answers."""
        self.namespace = namespace
        self._client, self._errors = client, errors
        self._versions: dict[str, list[str]] = {}

    def __enter__(self) -> KubeApi:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def apply(self, text: str) -> str:
        """Apply one object, sent byte for byte; returns its Kind/name."""
        from trainshed.launch.kubernetes.objects import read_documents

        (obj,) = read_documents(text)
        return self.apply_as(kind_of(obj), obj["metadata"]["name"], text, obj["metadata"].get("namespace"))

    def apply_as(self, kind: KubeKind, name: str, text: str, namespace: str | None = None) -> str:
        """Apply an object whose kind and name are known."""
        namespace = namespace or self.namespace
        response = self._send(
            "PATCH",
            kind.path(namespace, name),
            params={"fieldManager": FIELD_MANAGER, "force": "true", "fieldValidation": "Strict"},
            headers={"Content-Type": "application/apply-patch+yaml"},
            content=text.encode(),
        )
        if response.status_code == 404:
            raise InputError(
                f"the cluster has no {kind.name} ({kind.api_version}), or no namespace {namespace}",
                where=str(self._client.base_url),
                hint=f"install what serves {kind.group or 'it'}; `trainshed doctor --on CLUSTER` says what is missing",
            )
        self._check(response, f"{kind.name}/{name}")
        return f"{kind.name}/{name}"

    def annotate(self, kind: KubeKind, name: str, annotations: Mapping[str, str]) -> None:
        """Write annotations of an object; `apply` leaves them, since they have another field manager."""
        self._merge(kind, name, {"annotations": dict(annotations)})

    def own(self, kind: KubeKind, name: str, owner: KubeObject) -> None:
        """Let an object be deleted when its owner is."""
        reference = {"apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": owner["metadata"]["name"]}
        self._merge(kind, name, {"ownerReferences": [{**reference, "uid": owner["metadata"]["uid"]}]})

    def _merge(self, kind: KubeKind, name: str, metadata: KubeObject) -> None:
        response = self._send(
            "PATCH",
            kind.path(self.namespace, name),
            params={"fieldManager": f"{FIELD_MANAGER}-driver"},
            headers={"Content-Type": "application/merge-patch+json"},
            content=json.dumps({"metadata": metadata}).encode(),
        )
        self._check(response, f"{kind.name}/{name}")

    def get(self, kind: KubeKind, name: str) -> KubeObject | None:
        """Return an object, None if it or its kind does not exist."""
        response = self._send("GET", self._served_version(kind).path(self.namespace, name))
        return None if response.status_code == 404 else self._check(response, f"{kind.name}/{name}").json()

    def list(self, kind: KubeKind, selector: str = "", *, fields: str = "") -> list[KubeObject]:
        """Return all objects of a kind that match the label and field selectors; none if the kind does not exist."""
        items: list[KubeObject] = []
        selectors = {"labelSelector": selector, "fieldSelector": fields}
        params = {"limit": str(_PAGE_SIZE), **{key: value for key, value in selectors.items() if value}}
        while True:
            response = self._send("GET", self._served_version(kind).path(self.namespace), params=params)
            if response.status_code == 404:
                return []
            body = self._check(response, kind.plural).json()
            # The items of a list do not contain their kind.
            items += [{"apiVersion": kind.api_version, "kind": kind.name, **item} for item in body["items"]]
            token = body.get("metadata", {}).get("continue")
            if not token:
                return items
            params["continue"] = token

    def delete(self, kind: KubeKind, name: str) -> None:
        """Delete an object and what it owns; one that is gone already is not an error."""
        response = self._send("DELETE", kind.path(self.namespace, name), params={"propagationPolicy": "Background"})
        if response.status_code != 404:
            self._check(response, f"{kind.name}/{name}")

    def served_kinds(self, kind: KubeKind) -> set[str]:
        """Return the names of all kinds in the API group and version of a kind; none if it is not installed."""
        response = self._send("GET", kind.base)
        if response.status_code == 404:
            return set()
        return {resource["kind"] for resource in self._check(response, kind.base).json().get("resources", [])}

    def log(self, pod: str, container: str, *, follow: bool = False, previous: bool = False) -> Iterator[str]:
        """Yield the lines of a container's log; not for the driver in a pod."""
        import httpx2

        assert isinstance(self._client, httpx2.Client)
        flags = {"follow": follow, "previous": previous}
        params = {"container": container, **{key: "true" for key, value in flags.items() if value}}
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod}/log"
        timeout = httpx2.Timeout(TIMEOUT_SECONDS, read=None) if follow else httpx2.Timeout(TIMEOUT_SECONDS)
        try:
            with self._client.stream("GET", path, params=params, timeout=timeout) as response:
                if response.status_code >= 400:
                    response.read()
                    self._check(response, f"the log of {pod}")
                for line in response.iter_lines():
                    yield f"{line}\n"
        except httpx2.HTTPError as error:
            raise self._unreachable(error) from None

    def _served_version(self, kind: KubeKind) -> KubeKind:
        """Return a kind of Kueue in a version that this cluster serves: clusters have different versions of Kueue."""
        if kind.group != KUEUE:
            return kind
        if kind.group not in self._versions:
            response = self._send("GET", f"/apis/{kind.group}")
            versions = [] if response.status_code >= 400 else response.json().get("versions", [])
            self._versions[kind.group] = [version["groupVersion"] for version in versions]
        served = self._versions[kind.group]
        return kind if not served or kind.api_version in served else replace(kind, api_version=served[0])

    def _send(self, method: str, path: str, **request: Any) -> httpx2.Response | PodResponse:
        for attempt in range(_BUSY_TRIES):
            try:
                response = self._client.request(method, path, **request)
            except self._errors as error:
                raise self._unreachable(error) from None
            if response.status_code != _TOO_MANY_REQUESTS or attempt == _BUSY_TRIES - 1:
                break
            time.sleep(BUSY_SECONDS)
        return response

    def _unreachable(self, error: Exception) -> TrainshedError:
        return TrainshedError(
            f"the API server does not answer: {error or type(error).__name__}", where=str(self._client.base_url)
        )

    def _check(self, response: httpx2.Response | PodResponse, subject: str) -> httpx2.Response | PodResponse:
        if response.status_code < 400:
            return response
        try:
            message = response.json().get("message", response.text)
        except ValueError:
            message = response.text
        if response.status_code in (401, 403):
            raise ApiForbidden(
                f"{subject}: {message}", where=str(self._client.base_url), hint="ask for the right to do that"
            )
        if response.status_code in (400, 422):
            raise InputError(f"the API server refuses {subject}: {message}", where=str(self._client.base_url))
        raise ApiServerError(f"{subject}: {message} (HTTP {response.status_code})", where=str(self._client.base_url))


class ApiForbidden(TrainshedError):
    """The API server refused the credentials."""


class ApiServerError(TrainshedError):
    """The API server failed; another try may succeed."""


@dataclass(frozen=True)
class PodResponse:
    """What an API server answered."""

    status_code: int
    text: str

    def json(self) -> Any:
        """Return the answer as JSON."""
        return json.loads(self.text)


class PodClient:
    """Sends requests from inside a pod, as its service account."""

    def __init__(self, base_url: str, folder: Path) -> None:
        self.base_url = base_url
        self._token_file = folder / "token"
        https = urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=str(folder / "ca.crt")))
        # Without proxies: variables of the image must not send requests out of the cluster.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), https)

    def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        content: bytes | None = None,
    ) -> PodResponse:
        """Send a request; an answer that refuses it is an answer. Raises OSError if nobody answers."""
        url = self.base_url + path + (f"?{urllib.parse.urlencode(params)}" if params else "")
        # Read again for each request: the kubelet replaces the token every hour.
        token = self._token_file.read_text().strip()
        request = urllib.request.Request(
            url, data=content, headers={**(headers or {}), "Authorization": f"Bearer {token}"}, method=method
        )
        try:
            with self._opener.open(request, timeout=TIMEOUT_SECONDS) as response:
                return PodResponse(response.status, response.read().decode())
        except urllib.error.HTTPError as error:
            with error:
                return PodResponse(error.code, error.read().decode(errors="replace"))

    def close(self) -> None:
        """Do nothing: each request has its own connection."""


def connect_in_cluster(host: str, port: str, folder: Path = SERVICE_ACCOUNT_FOLDER) -> KubeApi:
    """Connect from inside a pod, as its service account."""
    host_in_url = f"[{host}]" if ":" in host else host
    client = PodClient(f"https://{host_in_url}:{port}", folder)
    # A connection that breaks off within an answer is an HTTPException, which is not an OSError.
    return KubeApi(client, (folder / "namespace").read_text().strip(), (OSError, http.client.HTTPException))


def connect(cluster: Cluster) -> KubeApi:
    """Connect to the cluster's API server by the context that the cluster file names, or the current one."""
    try:
        import httpx2
        from lightkube.config.client_adapter import Client, ConnectionParams
        from lightkube.config.kubeconfig import KubeConfig
        from lightkube.core.exceptions import ConfigError
    except ImportError:
        raise MissingExtra.named("k8s", "Kubernetes") from None
    context = cluster.on_kubernetes.context
    file = Path(os.environ.get("KUBECONFIG") or Path.home() / ".kube" / "config").expanduser()
    try:
        config = (KubeConfig.from_file(file) if file.is_file() else KubeConfig.from_env()).get(context)
        if config is None or config.user is None:
            raise ConfigError("the context names no user")
        client = Client(config, ConnectionParams(timeout=httpx2.Timeout(TIMEOUT_SECONDS)))
    except (ConfigError, OSError, KeyError) as error:
        raise InputError(
            f"no way to the cluster: {error}",
            where=f"{file}, {cluster.where('kubernetes.context')}",
            hint="`kubectl config get-contexts` lists what is there; write kubernetes: {context: NAME}",
        ) from None
    return KubeApi(client, cluster.on_kubernetes.namespace, (httpx2.HTTPError,))
