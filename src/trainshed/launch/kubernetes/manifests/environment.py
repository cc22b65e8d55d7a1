"""Variables of a container: what the user wrote stays what it is, and a secret is only ever a reference."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

from trainshed.errors import InputError
from trainshed.launch.fabric import FabricSetup
from trainshed.launch.job import Stage
from trainshed.launch.kubernetes.kinds import Object
from trainshed.recipe import Cluster


def literal(text: str) -> str:
    """Write a text so that the kubelet, which puts variables in the place of `$(NAME)`, leaves it as it is."""
    return re.sub(r"\$\$+|\$(?=\()", lambda found: found.group() * 2, text)


def variables(values: Mapping[str, str]) -> list[Object]:
    """Return values as a container's `env`."""
    return [{"name": name, "value": literal(value)} for name, value in values.items()]


def from_label(name: str, label: str) -> Object:
    """Return a variable that has the value of a label of its pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{label}']"}}}


def secret_variables(cluster: Cluster) -> list[Object]:
    """Return the cluster's secrets as references to Kubernetes' own."""
    found = []
    for name, reference in cluster.secrets.items():
        if reference.k8s is None:
            written = "an environment variable" if reference.env is not None else "a file"
            raise InputError(
                f"{written} of this machine is not there in a pod",
                where=cluster.where(f"secrets.{name}"),
                hint=f"kubectl create secret generic NAME --from-literal=KEY=…, then write {name}: {{k8s: NAME/KEY}}",
            )
        secret, _, key = reference.k8s.partition("/")
        found.append({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
    return found


def fabric_script(setup: FabricSetup, cluster: Cluster, stage: Stage) -> str | None:
    """Return what a node sources before its command, None where the fabric asks for nothing.

    The vendor's script sets variables too; what the cluster file says is said once more behind it, so that it holds.
    """
    lines = setup.shell_prologue()
    if not lines:
        return None
    written = cluster.environment | dict(stage.environment)
    again = [f"export {name}={shlex.quote(value)}" for name, value in written.items()]
    head = [f"# {setup.name} {setup.version}: the network between nodes.".replace("  ", " ")]
    if setup.profile_script is not None:
        # Sourcing what is not there would only be a line in the log.
        head.append(f"[ -r {shlex.quote(setup.profile_script)} ] || return 1")
    return "\n".join([*head, *lines, *again]) + "\n"
