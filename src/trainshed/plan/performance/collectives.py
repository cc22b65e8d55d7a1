"""Seconds of collectives: latency per step of a ring, bytes at what the slowest link of the group gives.

Ranks are placed with tensor parallel closest, then context, expert and data parallel, the pipeline outermost, so the
stride of a group in the mesh decides how many of its members share a node. Each GPU brings its own share of the node's
network: a ring that has g members on a node enters and leaves it through g of those shares, up to the speed of the
links inside.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainshed.plan.performance.hardware import Hardware
from trainshed.plan.performance.reach import reach_of
from trainshed.plan.performance.stacks import Stack

_NEAR = 8.0
"""A hop inside a node takes an eighth of one between nodes: about 3 us of NVLink against 20 to 30 of a network."""


@dataclass(frozen=True)
class Group:
    """Ranks that communicate, as far as speed goes."""

    size: int
    near: int
    """Members that the links of one node or rack join."""
    gb_per_s: float
    """What a ring over all members moves, per member and direction."""
    hops_us: float
    """Latency of one turn around the ring."""

    def ring_seconds(self, volume: float) -> float:
        """All-gather or reduce-scatter of `volume` bytes in all (the gathered side); an all-reduce is two of them."""
        if self.size == 1:
            return 0.0
        return volume * (self.size - 1) / self.size / (self.gb_per_s * 1e9) + self.hops_us * 1e-6


def group_of(size: int, stride: int, hardware: Hardware, stack: Stack) -> Group:
    """Return a group of ranks that stand `stride` apart."""
    near = min(size, max(1, hardware.link_domain // stride))
    link = hardware.link_gb_per_s * stack.link * reach_of(hardware.gpu_name).link
    if near == size:
        return Group(size, near, link, (size - 1) * stack.hop_us / _NEAR)
    nodes = -(-size // near)
    network = hardware.network_gb_per_s * stack.network
    # Inside a domain wider than a node (a rack of NVLink) members still bring their own network share.
    hops = (nodes - 1) * stack.hop_us + (near - 1) * stack.hop_us / _NEAR
    return Group(size, near, min(link, (1 + (near - 1) * stack.rails) * network), hops)


def tensor_group(size: int, hardware: Hardware, stack: Stack) -> Group:
    """Return a tensor-parallel group: neighbours, and where it leaves the node, with latencies and rails of its own."""
    group = group_of(size, 1, hardware, stack)
    if group.near == size:
        return group
    nodes = -(-size // group.near)
    speed = min(group.gb_per_s, group.near * hardware.network_gb_per_s * stack.network * stack.far_rails)
    return Group(size, group.near, speed, (nodes - 1) * stack.far_tp_us)


def all_to_all_seconds(volume: float, group: Group, hardware: Hardware, stack: Stack, *, copies: float = 1.0) -> float:
    """Every member sends `volume` bytes, spread evenly over all members.

    `copies` is how many of a token's experts lie on one node, on average: a dispatcher that crosses the network once
    per node and token sends that many times less.
    """
    if group.size == 1:
        return 0.0
    far = 1 - group.near / group.size
    near = (group.near - 1) / group.size
    seconds = near * volume / (hardware.link_gb_per_s * stack.ep_link * 1e9)
    if far:
        across = far * volume / copies / (hardware.network_gb_per_s * stack.ep_network * 1e9)
        seconds = max(seconds, across)
    return seconds + stack.hop_us * 1e-6 * (1 if far else 0.5)
