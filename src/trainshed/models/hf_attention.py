"""How Hugging Face's `config.json` says positions and windows: rotary tables, and which layers look how far back.

transformers 4 writes `rope_theta` and `rope_scaling`, 5 all of it into `rope_parameters`; families whose layers with a
window have a rotary table of their own have one entry for each kind of layer there. Both styles are read, and what is
written both read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from trainshed.errors import InputError
from trainshed.recipe import ModelConfig
from trainshed.recipe.model import AttentionKind, shortest_pattern
from trainshed.recipe.model_parts import RopeScaling
from trainshed.recipe.yaml_io import KeyPath

if TYPE_CHECKING:
    from trainshed.models.families import HfFamily

WindowStyle = Literal["none", "all", "switched", "pattern", "chunked"]
"""How a family says windows: it has none; `sliding_window` is for all layers; so it is, with `use_sliding_window`;
`layer_types` says which layers have it; layers with rotary positions have chunks, and others have neither."""
LAYER_TYPES: dict[str, AttentionKind] = {"sliding_attention": "window", "full_attention": "full"}
_CHUNKED = "chunked_attention"
"""Words of `layer_types`, and ours."""
_TYPE_OF = {kind: name for name, kind in LAYER_TYPES.items()}
# Our keys of a stretch by transformers', with what it takes where a key is left out.
_SCALING_KEYS: dict[str, dict[str, tuple[str, Any]]] = {
    "linear": {},
    "llama3": {
        "low_freq_factor": ("low_frequency_factor", None),
        "high_freq_factor": ("high_frequency_factor", None),
        "original_max_position_embeddings": ("original_positions", None),
    },
    "yarn": {
        "original_max_position_embeddings": ("original_positions", None),
        "beta_fast": ("beta_fast", 32),
        "beta_slow": ("beta_slow", 1),
        "attention_factor": ("attention_factor", None),
        "truncate": ("truncate", True),
        "mscale": ("mscale", None),
        "mscale_all_dim": ("mscale_all_dim", None),
    },
    "longrope": {
        "original_max_position_embeddings": ("original_positions", None),
        "attention_factor": ("attention_factor", None),
        "short_factor": ("short_factors", None),
        "long_factor": ("long_factors", None),
    },
}
_ORIGINAL = "original_max_position_embeddings"


class HfAttentionReader:
    """Reads positions and windows of one `config.json`; remembers which keys were read."""

    def __init__(self, config: Mapping[str, Any], family: HfFamily, where: str, unread_hint: str) -> None:
        self._config, self._family, self._where, self._unread_hint = config, family, where, unread_hint
        self.read: set[str] = set()
        self.key_locations: dict[KeyPath, str] = {}

    def rope(self, *, windowed: bool) -> dict[str, Any]:
        """Return the keys of `rope`; `windowed`: some layer has a window."""
        self.read.update(("rope_scaling", "rope_parameters", "rope_theta"))
        by_type = self._config.get("rope_parameters")
        if isinstance(by_type, Mapping) and set(by_type) <= set(LAYER_TYPES) and by_type:
            return self._rope_by_layer_type(by_type, windowed=windowed)
        written = [key for key in ("rope_scaling", "rope_parameters") if self._config.get(key)]
        if len(written) == 2 and self._config["rope_scaling"] != self._config["rope_parameters"]:
            raise self._error("`rope_scaling` and `rope_parameters` contradict each other", "keep one of them")
        name = written[0] if written else "rope_scaling"
        written_scaling = self._config.get(name) or self._family.default_scaling
        if not isinstance(written_scaling, Mapping):
            raise self._error(f"`{name}: {as_json(written_scaling)}` is not an object", "write an object or null")
        nested = dict(written_scaling)
        bases = {base for base in (self._config.get("rope_theta"), nested.pop("rope_theta", None)) if base is not None}
        if len(bases) > 1:
            raise self._error(f"`rope_theta` stands there twice, as {' and '.join(map(str, bases))}", "keep one")
        base = next(iter(bases), self._family.rope_base)
        rope: dict[str, Any] = {
            "base": base,
            "fraction": self._fraction(nested),
            "scaling": self._scaling(nested, name),
        }
        local = self._family.local_rope_base
        if local is not None:
            self.read.add("rope_local_base_freq")
            local = base if local == "base" else self._config.get("rope_local_base_freq", local)
        return rope | {"local_base": _local_base(rope, local, windowed=windowed)}

    def _rope_by_layer_type(self, by_type: Mapping[str, Any], *, windowed: bool) -> dict[str, Any]:
        """What transformers 5 writes for layers that differ: a table for each kind of layer."""
        if self._family.local_rope_base is None:
            raise self._error(
                f"`rope_parameters: {as_json(by_type)}` gives kinds of layers tables of their own", self._unread_hint
            )
        self.read.add("rope_local_base_freq")  # in both styles at once, as `write_rope` writes it
        name = "rope_parameters.full_attention"
        full = dict(by_type.get("full_attention") or {})
        base = full.pop("rope_theta", self._family.rope_base)
        rope: dict[str, Any] = {"base": base, "fraction": self._fraction(full), "scaling": self._scaling(full, name)}
        window = dict(by_type.get("sliding_attention") or {})
        local = window.pop(
            "rope_theta", base if self._family.local_rope_base == "base" else self._family.local_rope_base
        )
        if self._scaling(window, "rope_parameters.sliding_attention") is not None:
            raise self._error("layers with a window have stretched rotary positions", "only other layers may")
        return rope | {"local_base": _local_base(rope, local, windowed=windowed)}

    def _fraction(self, nested: dict[str, Any]) -> float:
        usual = self._family.rope_fraction
        if usual is None:
            return 1.0
        self.read.add("partial_rotary_factor")
        inner, outer = nested.pop("partial_rotary_factor", None), self._config.get("partial_rotary_factor")
        if inner is not None and outer is not None and inner != outer:
            raise self._error(f"`partial_rotary_factor` stands there twice, as {inner} and {outer}", "keep one")
        return float(next((value for value in (inner, outer) if value is not None), usual))

    def _scaling(self, nested: dict[str, Any], name: str) -> dict[str, Any] | None:
        """Take the keys of a stretch out of the rest of its table, of which nothing may remain."""
        legacy = nested.pop("type", None)
        kind = nested.pop("rope_type", None) or legacy or "default"
        kind = self._family.rope_kind_names.get(kind, kind)
        known = [kind for kind in _SCALING_KEYS if kind not in self._family.refused_rope_kinds]
        if kind != "default" and kind not in known:
            raise self._error(
                f"`{name}.rope_type: {kind}` is not known for {self._family.architecture}",
                f"known are {', '.join(['default', *known])}",
            )
        scaling: dict[str, Any] | None = None
        if kind != "default":
            scaling = {"kind": kind, "factor": nested.pop("factor", None)}
            self.key_locations[("rope", "scaling")] = name
            for theirs, (ours, usual) in _SCALING_KEYS[kind].items():
                value = nested.pop(theirs, None)
                scaling[ours] = None if value == usual else value
            if kind == "yarn" and scaling["original_positions"] is None:
                scaling["original_positions"] = self._config.get("max_position_embeddings")
            if kind == "longrope":
                original = scaling["original_positions"] or self._config.get(_ORIGINAL)
                longest = self._config.get("max_position_embeddings")
                scaling["original_positions"] = original
                if scaling["factor"] is None and original and longest:
                    scaling["factor"] = longest / original
        rest = [key for key, value in nested.items() if value is not None and (key, value) != _FULL_ROTARY]
        if rest:
            shown = ", ".join(f"`{name}.{key}: {as_json(nested[key])}`" for key in rest)
            raise self._error(f"rotary positions of kind {kind} have nothing for {shown}", self._unread_hint)
        return scaling

    def windows(self, layers: int) -> dict[str, Any]:
        """Return `sliding_window` and `attention_pattern`; a family without the keys has none."""
        match self._family.window_style:
            case "chunked":
                return self._chunks(layers)
            case "none":
                return {"sliding_window": None, "attention_pattern": None}
            case "all":
                self.read.add("sliding_window")
                window = self._config.get("sliding_window", self._family.defaults["sliding_window"])
                return {"sliding_window": window, "attention_pattern": None}
        self.read.update(("use_sliding_window", "sliding_window", "layer_types"))
        self.read.update(("sliding_window_pattern", "_sliding_window_pattern"))  # what `layer_types` is made of
        if self._family.window_style == "switched":
            switched_on = self._config.get("use_sliding_window")
            window = self._config.get("sliding_window", 4096) if switched_on else None
        else:
            window = self._config.get("sliding_window", self._family.defaults["sliding_window"])
        pattern = shortest_pattern(self._attention_kinds(layers, window))
        if window is None or pattern == ("full",):
            return {"sliding_window": None, "attention_pattern": None}
        return {"sliding_window": window, "attention_pattern": None if pattern == ("window",) else pattern}

    def _chunks(self, layers: int) -> dict[str, Any]:
        """Return `attention_chunk` and `attention_pattern`; layers without positions (NoPE) see all."""
        self.read.update(("attention_chunk_size", "no_rope_layers", "no_rope_layer_interval", "layer_types"))
        every = self._config.get("no_rope_layer_interval", 4)
        flags = self._config.get("no_rope_layers") or [int((layer + 1) % every != 0) for layer in range(layers)]
        kinds: list[AttentionKind] = ["chunk" if flag else "full" for flag in flags[:layers]]
        if len(kinds) < layers or "chunk" not in kinds:
            raise self._error(
                f"`no_rope_layers: {as_json(flags)}` leaves no layer of {layers} with positions, or does not name all",
                "write a 1 for each layer with rotary positions, and a 0 for others",
            )
        types = [_CHUNKED if kind == "chunk" else "full_attention" for kind in kinds]
        if (self._config.get("layer_types") or types) != types:
            raise self._error(
                f"`layer_types: {as_json(self._config['layer_types'])}` is not what `no_rope_layers` gives",
                "read are chunks in layers with rotary positions, and in no others",
            )
        chunk = self._config.get("attention_chunk_size", self._family.defaults["attention_chunk_size"])
        if chunk is None:
            raise self._error("`attention_chunk_size` is null", "write how many tokens a chunk has")
        pattern = shortest_pattern(kinds)
        return {"attention_chunk": chunk, "attention_pattern": None if pattern == ("chunk",) else pattern}

    def _attention_kinds(self, layers: int, window: int | None) -> list[AttentionKind]:
        """Return the kind of each layer, by `layer_types` or by the family's rule."""
        written = self._config.get("layer_types")
        if written:
            if len(written) != layers or not set(written) <= set(LAYER_TYPES):
                raise self._error(
                    f"`layer_types: {as_json(written)}` is not one kind of attention for each of {layers} layers",
                    f"known are {', '.join(LAYER_TYPES)}",
                )
            return [LAYER_TYPES[name] for name in written]
        if self._family.window_style == "switched":
            full = min(self._config.get("max_window_layers", 28), layers) if self._family.asks_window_layers else 0
            return ["full" if window is None or layer < full else "window" for layer in range(layers)]
        every = self._config.get("sliding_window_pattern") or self._family.full_attention_every
        return ["window" if (layer + 1) % every else "full" for layer in range(layers)]

    def _error(self, what: str, hint: str) -> InputError:
        return InputError(what, where=self._where, hint=hint)


_FULL_ROTARY = ("partial_rotary_factor", 1.0)


def _local_base(rope: Mapping[str, Any], local: float | None, *, windowed: bool) -> float | None:
    """Return the base of layers with a window, None where they turn as all others do."""
    alike = local == rope["base"] and rope["scaling"] is None
    return None if alike or not windowed else local


def write_rope(config: ModelConfig, family: HfFamily) -> dict[str, Any]:
    """Return the keys of rotary positions, as transformers 4 and 5 read them."""
    assert config.rope is not None, "only asked where positions are rotary"
    rope, scaling = config.rope, _written_scaling(config.rope.scaling)
    if scaling is None and family.default_scaling:
        scaling = {"rope_type": "default"}
    written: dict[str, Any] = {"rope_theta": rope.base, "rope_scaling": scaling}
    if rope.scaling is not None and rope.scaling.kind == "longrope":
        # By this key transformers' generation knows where to begin anew with the other divisors.
        written[_ORIGINAL] = rope.scaling.original_positions
    if family.rope_fraction is not None:
        written["partial_rotary_factor"] = rope.fraction
    if family.local_rope_base is None:
        return written
    local = rope.local_base or rope.base
    if family.local_rope_base != "base":
        return written | {"rope_local_base_freq": local}
    # transformers 5 reads `rope_theta` alone for one kind of layers only.
    full = {"rope_theta": rope.base, **(scaling or {"rope_type": "default"})}
    window = {"rope_theta": local, "rope_type": "default"}
    return written | {"rope_parameters": {"full_attention": full, "sliding_attention": window}}


def _written_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    written: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    keys = {theirs: getattr(scaling, ours) for theirs, (ours, _) in _SCALING_KEYS[scaling.kind].items()}
    lists = {key: list(value) if isinstance(value, tuple) else value for key, value in keys.items()}
    return written | {key: value for key, value in lists.items() if value is not None}


def write_windows(config: ModelConfig, family: HfFamily) -> dict[str, Any]:
    """Return the keys that say which layers have a window."""
    if family.window_style == "chunked":
        flags = [int(config.layer_chunk(layer) is not None) for layer in range(config.layers)]
        types = [_CHUNKED if flag else "full_attention" for flag in flags]
        return {"attention_chunk_size": config.attention_chunk, "no_rope_layers": flags, "layer_types": types}
    window, kinds = config.sliding_window, [config.layer_window(layer) for layer in range(config.layers)]
    layer_types = [_TYPE_OF["full" if of_layer is None else "window"] for of_layer in kinds]
    match family.window_style:
        case "none":
            return {}
        case "all":
            return {"sliding_window": window}
        case "pattern":
            # transformers makes the mask of a window even where no layer has one.
            return {"sliding_window": window or family.defaults["sliding_window"], "layer_types": layer_types}
        case "switched":
            written: dict[str, Any] = {"use_sliding_window": window is not None, "sliding_window": window}
            if family.asks_window_layers:
                written["max_window_layers"] = sum(of_layer is None for of_layer in kinds)
                if config.attention_pattern is not None:
                    written["layer_types"] = layer_types
            return written


def as_json(value: Any) -> str:
    """Return a value as it stands in a config."""
    return json.dumps(value, default=str)
