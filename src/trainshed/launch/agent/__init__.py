"""The node agent: one on every node, on every target. It starts what the node runs and stays until that has ended.

main.py      the entry: one node's part of a stage
training.py  the train stage on one node
leader.py    what the first agent decides for all
notices.py   who is told what happens
records.py   the files that agents leave beside an attempt
"""

from trainshed.launch.agent.main import run_agent

__all__ = ["run_agent"]
