"""Kubernetes: a job as manifests, sent by server-side apply, watched and explained.

`render.py` turns a job into objects (`pod.py`, `placement.py` and `workloads.py` build them), `target.py` submits
them through `api.py`, `status.py` explains how they are, and `helm.py` writes a chart of the same objects.
`driver.py` runs inside the cluster and creates each stage when the one before it has succeeded.
"""
