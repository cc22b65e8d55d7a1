"""A running Ray cluster as a target.

    client side, no `ray` needed     target.py  body.py  dashboard.py  status.py
    inside the cluster               driver.py  placing.py  crew.py  host.py

Ray knows no jobs that wait for others, so that one Ray job runs all stages of a job in order: its entrypoint is the
driver. The same driver is the entrypoint of a RayJob on Kubernetes.
"""
