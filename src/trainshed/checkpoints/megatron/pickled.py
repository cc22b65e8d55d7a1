"""Reading pickles that torch.save and Megatron wrote, without running anything in them.

A pickle names classes and functions to be called. Here every name either is one of a few plain containers, or becomes
an inert `Record` that keeps what it was given, or is refused. So neither torch nor Megatron is needed to read them.
"""

from __future__ import annotations

import io
import pickle
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from trainshed.errors import CorruptData, InputError

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""The dtypes whose tensors are found in files, and their width."""
_STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "UntypedStorage": "uint8",
}  # fmt: skip
# Who may be named, and becomes a Record: what lies beside the weights in Megatron's checkpoints (arguments, random
# states, the optimizer's settings) and in the tables of torch.distributed.checkpoint.
_PACKAGES = ("megatron.", "transformer_engine.", "torch.distributed.checkpoint.")
_MODULES = frozenset(
    {"torch.serialization", "torch.storage", "torch.torch_version", "numpy", "numpy.dtypes", "pathlib", "signal"}
    | {"numpy.core.multiarray", "numpy._core.multiarray", "numpy.core.numeric", "numpy._core.numeric"}
)
_NAMES = frozenset(
    {("torch", name) for name in ("device", "Generator", "strided", "ScriptObject")}
    | {("_codecs", "encode"), ("_io", "BytesIO"), ("builtins", "getattr"), ("builtins", "slice")}
    | {("functools", "partial"), ("datetime", "timedelta"), ("enum", "Enum"), ("copyreg", "_reconstructor")}
)

_OLD_NAMES = {"__builtin__": "builtins", "copy_reg": "copyreg"}  # as protocol 2, which torch.save uses, has them


@dataclass(frozen=True)
class PickledTensor:
    """A tensor as a pickle tells of it; its bytes are in the storage of this key."""

    storage: str
    dtype: str
    start: int
    """Elements of the storage before the first."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Record:
    """Something that was named in a pickle and is not made: its state alone is kept."""

    kind = ""

    state: Any = None

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        """A list of some kind, which nobody asks for."""

    def extend(self, values: Any) -> None:
        """As `append`."""

    def __getitem__(self, key: str) -> Any:
        return self.state[key]


def unpickle(data: bytes, where: str) -> Any:
    """Return what a pickle holds: plain values, `PickledTensor`s and `Record`s. Anything not known is an error."""
    try:
        return _Unpickler(io.BytesIO(data), where).load()
    except (InputError, CorruptData):
        raise
    except Exception as error:
        raise CorruptData(
            f"holds a broken pickle: {error}", where=where, hint="fetch or write the file again"
        ) from None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, where: str) -> None:
        super().__init__(file)
        self._where = where

    def find_class(self, module: str, name: str) -> Any:
        module = _OLD_NAMES.get(module, module)
        found = _PLAIN.get((module, name))
        if found is not None:
            return found
        if module == "torch" and name in DTYPE_BYTES:
            return name
        if module in ("torch", "torch.cuda", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        if module.startswith(_PACKAGES) or module in _MODULES or (module, name) in _NAMES:
            return _record_class(f"{module}.{name}")
        raise InputError(
            f"its pickle asks for `{module}.{name}`, which no checkpoint of Megatron needs",
            where=self._where,
            hint="it is not opened: a pickle can run anything; ask where this file comes from",
        )

    def persistent_load(self, pid: Any) -> tuple[str, str]:
        kind, dtype, key, *_ = pid
        if kind != "storage" or not isinstance(dtype, str):
            raise CorruptData(f"names a storage of an unknown kind: {pid!r}", where=self._where)
        return str(key), dtype


@cache
def _record_class(kind: str) -> type[Record]:
    return type("Record", (Record,), {"kind": kind})


def _tensor(storage: tuple[str, str], start: int, shape: Any, strides: Any, *_: Any) -> PickledTensor:
    key, dtype = storage
    return PickledTensor(key, dtype, start, tuple(shape), tuple(strides))


def _parameter(tensor: Any, *_: Any) -> Any:
    return tensor


def _size(lengths: Any = ()) -> tuple[int, ...]:
    return tuple(lengths)


_PLAIN: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch", "Size"): _size,
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "defaultdict"): dict,
    ("argparse", "Namespace"): Namespace,
    ("types", "SimpleNamespace"): Namespace,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "dict"): dict,
    ("builtins", "list"): list,
    ("builtins", "tuple"): tuple,
}
