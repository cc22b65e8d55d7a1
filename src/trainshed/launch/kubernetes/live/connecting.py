"""A connection from a person's machine, with the credentials that kubectl would use."""

from __future__ import annotations

import os
from pathlib import Path

from trainshed.errors import InputError, MissingExtra
from trainshed.launch.kubernetes.live.api import TIMEOUT_SECONDS, Api
from trainshed.recipe import Cluster


def connect(cluster: Cluster) -> Api:
    """Connect to the cluster's API server by the context that the cluster file names, or the current one."""
    try:
        from lightkube.config.client_adapter import Client, ConnectionParams
        from lightkube.config.kubeconfig import KubeConfig
        from lightkube.core.exceptions import ConfigError
    except ImportError:
        raise MissingExtra.named("k8s", "Kubernetes") from None
    import httpx2

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
    return Api(client, cluster.on_kubernetes.namespace)
