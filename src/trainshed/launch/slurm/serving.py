"""Whether a server answers: Slurm knows only that its job runs, so that its node is asked."""

from __future__ import annotations

from dataclasses import replace

from trainshed.launch.slurm.client import SlurmClient
from trainshed.launch.slurm.fields import fields_of
from trainshed.launch.target import StageState

# bash itself can speak to a port, so that this needs no program which a login node may lack.
_ASK = 'exec 3<>"/dev/tcp/$1/$2" && printf "GET %s HTTP/1.0\\r\\nHost: %s\\r\\n\\r\\n" "$3" "$1" >&3 && head -n 1 <&3'
_ANSWER_SECONDS = "5"


def serving_state(client: SlurmClient, state: StageState, port: int, ready: str) -> StageState:
    """Return how a stage that serves stands: a running job serves once its server says that it is ready."""
    if state.state == "done":
        return replace(state, reason="Its server was told to end, and has.")
    if state.state != "running" or not state.nodes:
        return state
    node = state.nodes[0]
    code = _answer(client, _address(client, node), port, ready)
    if code == "200":
        return replace(state, state="serving", reason=f"Serving at {node}:{port}, 1 of 1 ready.")
    said = f"answers {code} at {ready}" if code else f"does not answer at {node}:{port} yet"
    return replace(state, reason=f"Its server {said}: it starts, loads its weights or drains.")


def _address(client: SlurmClient, node: str) -> str:
    """Where Slurm itself reaches a node; its name where Slurm has no other."""
    done = client.attempt("scontrol", "--oneliner", "show", "node", node)
    return fields_of(done.stdout.decode(errors="replace")).get("NodeAddr") or node


def _answer(client: SlurmClient, address: str, port: int, path: str) -> str:
    """The code of an answer; empty where there is none."""
    done = client.attempt("timeout", _ANSWER_SECONDS, "bash", "-c", _ASK, "bash", address, str(port), path)
    words = done.stdout.decode(errors="replace").split()
    return words[1] if len(words) > 1 and words[0].startswith("HTTP/") else ""
