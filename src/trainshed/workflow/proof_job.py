"""A job that takes nodes and proves them, without training anything: `trainshed doctor --on CLUSTER --nodes 4`."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, replace

import orjson

import trainshed
from trainshed.launch.here import PLAN_SCHEMA
from trainshed.launch.job import JOB_FILE, Code, Job, JobFile
from trainshed.launch.preflight import preflight_stage
from trainshed.launch.shipping import pack_code
from trainshed.plan import RankLayout
from trainshed.recipe import Cluster, to_yaml
from trainshed.workflow.layout import refuse_too_many
from trainshed.workflow.runnable import store_on

NAME = "doctor"
_GRACE_SECONDS = 60


def proof_job(cluster: Cluster, nodes: int, *, full: bool = False, code: Code | None = None) -> Job:
    """Return the job; the same nodes of the same cluster are proven in the same run, one attempt after the other."""
    refuse_too_many(cluster, nodes, "--nodes")
    text = to_yaml(cluster)
    id = hashlib.sha256(f"{nodes}\n{full}\n{text}".encode()).hexdigest()[:8]
    run = f"{store_on(cluster)}/runs/{NAME}/{id}"
    stage = replace(preflight_stage(cluster, nodes=nodes), only_preflight=True, full_preflight=full)
    job_file = JobFile(
        name=f"{NAME}-{id}",
        run=run,
        stages=(stage,),
        grace_seconds=_GRACE_SECONDS,
        precision="fp32",
        version=trainshed.__version__,
    )
    # Nothing is trained on it; an attempt has a layout all the same.
    layout = RankLayout(1, 1, 1, 1, 1, 1, stage.world_size, 1, "none", 1, "none", None, (1,))
    plan = {"schema": PLAN_SCHEMA, "layout": asdict(layout), "reasons": ["only preflight"]}
    files = {
        "cluster.yaml": text,
        "plan.json": orjson.dumps(plan, option=orjson.OPT_INDENT_2).decode() + "\n",
        JOB_FILE: job_file.to_text(),
    }
    return Job(job_file.name, run, cluster, (stage,), files, code or pack_code(), grace_seconds=_GRACE_SECONDS)
