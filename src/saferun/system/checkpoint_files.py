"""Whether a checkpoint's file is complete, as far as its format shows; torch is not needed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, BinaryIO

_HDF5 = b"\x89HDF\r\n\x1a\n"
_ZIP = b"PK\x03\x04"
_ZIP_END = b"PK\x05\x06"
_ZIP_END_BYTES = 22  # size of the end record without its comment
_HEADER_BYTES = 100_000_000  # longest header that safetensors itself reads
_LEAST = 8  # bytes; no weights file in any format is smaller


def problem(path: str) -> str:
    """Return why a file is incomplete, as a clause for people; "" if it is complete or unknown."""
    name = os.path.basename(path)
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(8)
        if name.endswith(".json"):
            return _json_problem(name, path)
        if name.endswith(".safetensors"):
            return _safetensors_problem(name, file, head, size)
        if head[:4] == _ZIP:
            return _zip_problem(name, file, size)
        if head == _HDF5:
            return _hdf5_problem(name, file, size)
    weights = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".distcp")
    return f"{name} has only {size} bytes" if size < _LEAST and name.endswith(weights) else ""


def _json_problem(name: str, path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except (ValueError, RecursionError):
        return f"{name} is not JSON: it was cut"
    if not name.endswith(".index.json") or not isinstance(content, dict):
        return ""
    shards: Mapping[str, Any] = content.get("weight_map") or {}
    folder = os.path.dirname(path)
    missing = sorted({s for s in shards.values() if not os.path.exists(os.path.join(folder, s))})
    return f"{missing[0]} is missing, which {name} names" if missing else ""


def _safetensors_problem(name: str, file: BinaryIO, head: bytes, size: int) -> str:
    """Check length, header and tensors (https://huggingface.co/docs/safetensors)."""
    length = int.from_bytes(head, "little")
    if len(head) < 8 or length > min(size, _HEADER_BYTES):
        return f"{name} was cut within its header"
    try:
        header = json.loads(file.read(length))
        ends = [tensor["data_offsets"][1] for k, tensor in header.items() if k != "__metadata__"]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return f"{name} has no header that can be read"
    whole = 8 + length + max(ends, default=0)
    return f"{name} has {size} of {whole} bytes" if size < whole else ""


def _hdf5_problem(name: str, file: BinaryIO, size: int) -> str:
    """Read the end of the file from the superblock, as HDF5 does when it opens a file (Keras).

    https://support.hdfgroup.org/documentation/hdf5/latest/_f_m_t3.html
    """
    block = file.read(48)  # after the signature
    at = {0: 32, 1: 36, 2: 20, 3: 20}.get(block[0] if block else -1)
    whole = int.from_bytes(block[at : at + 8], "little") if at else 0
    short = len(block) < 48 or size < whole
    return f"{name} has {size} of {whole} bytes" if short else ""


def _zip_problem(name: str, file: BinaryIO, size: int) -> str:
    import zipfile  # it costs a launch 8 ms, and most have no checkpoint to check

    try:
        with zipfile.ZipFile(file) as archive:
            comment = len(archive.comment)
            bodies = [entry.header_offset + entry.compress_size for entry in archive.infolist()]
            whole = max(bodies, default=0) <= archive.start_dir
        file.seek(size - _ZIP_END_BYTES - comment)
        if whole and file.read(4) == _ZIP_END:
            return ""
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError):
        pass
    return f"{name} was cut: the end of the file is missing or damaged"
