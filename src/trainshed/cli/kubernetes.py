"""`trainshed kubernetes`: what runs inside pods and is not for people."""

from __future__ import annotations

from pathlib import Path

from cyclopts import App

app = App(name="kubernetes", help="What runs inside the pods of a job.")


@app.command
def drive(*, manifests: Path) -> int:
    """Create the stages of a job one after another, each when the one before has succeeded.

    Parameters
    ----------
    manifests
        The folder with the stages' manifests, in the order of their names.
    """
    import os

    from trainshed.cli.console import reporter
    from trainshed.errors import InputError
    from trainshed.launch.kubernetes.driver import drive as drive_stages
    from trainshed.launch.kubernetes.live.api import connect_in_cluster

    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT")
    if not host or not port:
        raise InputError("this is no pod of a cluster", hint="`trainshed submit` makes one that runs this")
    with connect_in_cluster(host, port) as api:
        drive_stages(api, manifests, reporter=reporter())
    return 0


@app.command
def meet() -> int:
    """Agree with the other pods of a PyTorchJob on a name for this start, and print it."""
    import os
    import sys

    from trainshed.launch.kubernetes.manifests.naming import LOCAL_FOLDER
    from trainshed.launch.kubernetes.meeting import give_start, next_start, take_start

    rank, pods = int(os.environ["TRAINSHED_NODE_RANK"]), int(os.environ["TRAINSHED_MEET"])
    port = int(os.environ["MASTER_PORT"]) + 1
    if rank:
        start = take_start(os.environ["MASTER_ADDR"], port, rank)
    else:
        folder = Path(os.environ.get("TRAINSHED_LOCAL_FOLDER", LOCAL_FOLDER))
        start = next_start(folder, os.environ["POD_UID"])
        give_start(port, pods, start)
    sys.stdout.write(start)
    return 0
