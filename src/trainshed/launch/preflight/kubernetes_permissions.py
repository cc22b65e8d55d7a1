"""Whether we have the permissions in a namespace that a job needs; the API server is asked for each of them."""

from __future__ import annotations

import os
from pathlib import Path

import httpx2
from lightkube import ApiError, Client, KubeConfig
from lightkube.core.exceptions import ConfigError
from lightkube.models.authorization_v1 import ResourceAttributes, SelfSubjectAccessReviewSpec
from lightkube.resources.authorization_v1 import SelfSubjectAccessReview

from trainshed.launch.kubernetes.kinds import (
    CONFIG_MAP,
    DEPLOYMENT,
    JOB,
    POD,
    ROLE,
    ROLE_BINDING,
    SERVICE,
    SERVICE_ACCOUNT,
    TRAINING_KINDS,
    KubeKind,
)
from trainshed.launch.preflight.verdict import CheckResult
from trainshed.recipe import Cluster


def check_permissions(cluster: Cluster) -> CheckResult:
    """Check each permission that submitting, following and cancelling a job needs."""
    kubernetes = cluster.on_kubernetes
    training = TRAINING_KINDS[kubernetes.kind]
    kinds = dict.fromkeys((training, JOB, CONFIG_MAP, *((SERVICE,) if training is JOB else ())))
    needed = [(verb, kind, "") for kind in kinds for verb in ("create", "patch", "delete")]
    needed += [("list", POD, ""), ("get", POD, "log")]
    # Our own account for the driver, unless somebody has made one; GKE's Developer may create no roles, for instance.
    of_driver = () if kubernetes.driver_account is not None else (SERVICE_ACCOUNT, ROLE, ROLE_BINDING)
    needed_for_driver = [(verb, kind, "") for kind in of_driver for verb in ("create", "patch", "delete")]
    needed_to_serve = [(verb, kind, "") for kind in (DEPLOYMENT, SERVICE) for verb in ("create", "patch", "delete")]
    file = Path(os.environ.get("KUBECONFIG") or Path.home() / ".kube" / "config").expanduser()
    try:
        configuration = KubeConfig.from_file(file) if file.is_file() else KubeConfig.from_env()
        client = Client(config=configuration.get(kubernetes.context), namespace=kubernetes.namespace)
        denied, denied_for_driver, denied_to_serve = (
            [
                f"{verb} {kind.plural}{f'/{subresource}' if subresource else ''}"
                for verb, kind, subresource in permissions
                if not _is_allowed(client, kubernetes.namespace, verb, kind, subresource)
            ]
            for permissions in (needed, needed_for_driver, needed_to_serve)
        )
    except (ConfigError, ApiError, httpx2.HTTPError, OSError) as error:
        return CheckResult("rights", "skipped", f"cannot be asked: {error}")
    if denied:
        what = f"you may not {', '.join(denied)} in namespace {kubernetes.namespace}"
        return CheckResult("rights", "fail", what, "ask whoever runs the cluster for a role that allows it")
    if denied_for_driver:
        rights = ", ".join(denied_for_driver)
        what = f"you may not {rights} in namespace {kubernetes.namespace}, which the driver's own account takes"
        hint = "let an administrator make an account for drivers once, and write `kubernetes: {driver_account: NAME}`"
        return CheckResult("rights", "fail", what, hint)
    if denied_to_serve:
        what = f"you may submit jobs in namespace {kubernetes.namespace}, and not {', '.join(denied_to_serve)}"
        return CheckResult("rights", "warn", what, "recipes with `serve` need a role that allows it")
    return CheckResult("rights", "pass", f"you may submit, follow and cancel jobs in namespace {kubernetes.namespace}")


def _is_allowed(client: Client, namespace: str, verb: str, kind: KubeKind, subresource: str) -> bool:
    attributes = ResourceAttributes(
        group=kind.group, namespace=namespace, resource=kind.plural, subresource=subresource or None, verb=verb
    )
    spec = SelfSubjectAccessReviewSpec(resourceAttributes=attributes)
    review = client.create(
        SelfSubjectAccessReview(apiVersion="authorization.k8s.io/v1", kind="SelfSubjectAccessReview", spec=spec)
    )
    return bool(review.status and review.status.allowed)
