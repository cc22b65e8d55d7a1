"""A running Ray cluster as a target.

    client side, no `ray` needed     target.py  status.py
    inside the cluster               driver.py  context.py  engine_scripts.py  actors.py
    both                             placement.py

A Ray job cannot wait for another, so one Ray job runs all stages in order. Its entrypoint is the driver, which is also
the entrypoint of a RayJob on Kubernetes. On each node of a training the driver starts the node agent (`launch/agent`).
"""
