"""The node agent: one on every node, on every target. It starts what the node runs and sees it through to its end."""

from trainshed.launch.agent.main import run_agent

__all__ = ["run_agent"]
