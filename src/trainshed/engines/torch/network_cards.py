"""Which network cards a machine has, as Linux lists them; nothing is sent."""

from __future__ import annotations

import re
from pathlib import Path

_RATE = re.compile(r"([\d.]+) Gb/sec")


def find_network(root: Path = Path("/sys/class")) -> tuple[str | None, float | None]:
    """Return the fabric between nodes by its name in the catalog, and the cards' rates together in Gbit a second.

    Cards that GPUs reach each other through (InfiniBand, RoCE, EFA) come before plain Ethernet; None where there is no
    card, or where a virtual one does not know its rate.
    """
    rates: dict[str, list[float]] = {}
    for port in sorted(root.glob("infiniband/*/ports/*")):
        found = _RATE.search(_text(port / "rate"))
        if found and "ACTIVE" in _text(port / "state"):
            rates.setdefault(_fabric(port, float(found[1])), []).append(float(found[1]))
    if rates:
        fabric = max(rates, key=lambda name: sum(rates[name]))
        return fabric, sum(rates[fabric])
    # Only real cards have a device behind them; their speed is in megabits, -1 where it is unknown.
    speeds = [_text(card / "speed") for card in sorted(root.glob("net/*")) if (card / "device").exists()]
    known = [int(speed) / 1000 for speed in speeds if speed.isdecimal() and int(speed)]
    return ("ethernet", sum(known)) if known else (None, None)


def _fabric(port: Path, rate: float) -> str:
    card, layer = port.parents[1], _text(port / "link_layer")
    if (card / "device" / "driver").resolve().name == "efa":
        return "efa-v3" if rate >= 200 else "efa-v1"
    if layer == "Ethernet":
        return "roce"
    return "infiniband-xdr" if rate >= 800 else "infiniband-ndr" if rate >= 400 else "infiniband-hdr"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
