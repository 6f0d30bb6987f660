"""Number formats, by the names that plans and graphs use."""

from __future__ import annotations

from typing import Literal

DTYPE_BYTES = {
    "complex128": 16,
    "complex64": 8,
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
EXACT_BYTES = 4
"""Numbers of so many bytes may be added to on their way from rank to rank; smaller ones would be rounded each time."""
WireDtype = Literal["same", "float32", "bfloat16", "float16"]
"""How numbers may be sent: as they lie in memory, or in another format."""


def averaged_dtype(dtype: str) -> str:
    """In which format averages over ranks are added up: in 16 bits, rounding would move what is alike on all."""
    return "float32" if dtype in ("float16", "bfloat16") else dtype


def wide_dtype(dtype: str) -> str:
    """In which format numbers of this one are added up over many steps, or coded: never in 16 bits."""
    return "float64" if dtype == "float64" else "float32"
