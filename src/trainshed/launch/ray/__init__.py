"""A running Ray cluster as a target.

    client side, no `ray` needed     target.py  status.py
    inside the cluster               driver.py  actors.py
    both                             placement.py

Ray knows no jobs that wait for others, so that one Ray job runs all stages of a job in order: its entrypoint is the
driver. The same driver is the entrypoint of a RayJob on Kubernetes.
"""
