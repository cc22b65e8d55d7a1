"""Kubernetes: a job as manifests, sent by server-side apply, watched and explained.

`manifests/` turns a job into objects, `live/` talks to a cluster, `helm/` writes a chart of the same objects.
`driver.py` runs inside the cluster and creates a stage when the one before has succeeded.
"""
