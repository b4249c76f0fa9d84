"""The list that makes a directory a checkpoint: its files, tensors and checksums, and what else a resume must know.

Reading and checking live here, below both `export.py` and `train/checkpoint.py`, which writes the list last.
Values are JSON; tensors among them are base64, so nothing is unpickled.  The trade-off: a check reads every byte of the
checkpoint once more before a resume reads it again (12 bytes a parameter), and in return a rotten newest one is known
before the run's state has been touched.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy
import torch

from offloadz.model.aside import write_text
from offloadz.model.files import FileRecord, verify_file
from offloadz.plan.cut import MANIFEST as MANIFEST
from offloadz.plan.errors import DamagedState

FORMAT = "offloadz checkpoint 1"
LINKED_FORMAT = "offloadz linked checkpoint 1"
WEIGHTS = "weights.safetensors"
MOMENTS = "optimizer.safetensors"
BUFFERS = "model/buffers.safetensors"
MODEL = "model"
NEEDED = ("order", "step", "parameters", "written", "files", "small_files", "steps", "groups", "random", "extra")


def write_manifest(
    directory: Path, told: Mapping[str, Any], records: Mapping[str, FileRecord], small: Sequence[str] = ()
) -> None:
    """Write the list of a finished directory: what `told` says, the records, and the small files: all in `model/`, and
    those named."""
    small_files = {}
    for name in small:
        data = (directory / name).read_bytes()
        small_files[name] = [len(data), zlib.crc32(data)]
    for path in sorted((directory / MODEL).iterdir()):
        if path.suffix != ".safetensors":
            data = path.read_bytes()
            small_files[f"{MODEL}/{path.name}"] = [len(data), zlib.crc32(data)]
    files = {name: asdict(record) for name, record in records.items()}
    form = LINKED_FORMAT if "linked" in told else FORMAT
    body = encode({**told, "format": form, "files": files, "small_files": small_files})
    body["checksum"] = _checksum(body)
    write_text(directory / MANIFEST, json.dumps(body, indent=1) + "\n")


def read_manifest(directory: Path) -> dict[str, Any]:
    """The list of a checkpoint, checked against its own checksum; DamagedState says what is wrong with it."""
    path = directory / MANIFEST
    if not path.is_file():
        if not directory.is_dir():
            raise DamagedState(f"{directory} does not exist; needed: a checkpoint such as RUN/checkpoints/step-000100")
        inside = [p.parent for top in ("checkpoints/", "") for p in sorted(directory.glob(f"{top}step-*/{MANIFEST}"))]
        hint = f"; in it are {', '.join(map(str, inside))}: give one of these" if inside else ""
        raise DamagedState(f"{directory} is no finished checkpoint: it has no {MANIFEST}{hint}")
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        stated = body.pop("checksum")
        if body.get("format") not in (FORMAT, LINKED_FORMAT):
            raise DamagedState(f"{path} is of format {body.get('format')}, this version reads {FORMAT}")
        if _checksum(body) != stated:
            raise DamagedState(f"{path} is not the one that was written (CRC-32)")
        told: dict[str, Any] = decode(body)
        missing = [key for key in NEEDED if key not in told]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedState(f"{path} is not readable: {error!r}") from error
    if missing:
        raise DamagedState(f"{path} lacks {', '.join(missing)}")
    return told


def verify(directory: Path, told: Mapping[str, Any]) -> None:
    """Compare every file of a checkpoint with its list, sizes first; DamagedState names the first that differs."""
    sizes = {name: record["size_bytes"] for name, record in told["files"].items()}
    sizes |= {name: size for name, (size, _) in told["small_files"].items()}
    sizes |= told.get("linked", {})
    for name, size in sizes.items():
        path = directory / name
        if not path.is_file():
            raise DamagedState(f"{path} is missing")
        if path.stat().st_size != size:
            raise DamagedState(f"{path} has {path.stat().st_size} bytes, {size} were written")
    for name, (_, crc) in told["small_files"].items():
        if zlib.crc32((directory / name).read_bytes()) != crc:
            raise DamagedState(f"{directory / name} is not the one that was written (CRC-32)")
    for name, record in told["files"].items():
        verify_file(directory / name, FileRecord(**record))
    if "linked" in told:
        from offloadz.model.linked import SavedState  # it names the files of this list

        with SavedState(directory) as state:
            state.verify()


def encode(value: Any) -> Any:
    """A value of plain Python, torch tensors and numpy arrays as JSON that `decode` gives back alike."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous()
        raw = flat.reshape(-1).view(torch.uint8).numpy().tobytes()
        return {"$tensor": base64.b64encode(raw).decode(), "dtype": str(flat.dtype)[6:], "shape": list(flat.shape)}
    if isinstance(value, numpy.generic):
        return encode(value.item())
    if isinstance(value, numpy.ndarray):
        return {
            "$array": base64.b64encode(value.tobytes()).decode(),
            "dtype": value.dtype.str,
            "shape": list(value.shape),
        }
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, tuple):
        return {"$tuple": [encode(item) for item in value]}
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: encode(item) for key, item in value.items()}
        return {"$items": [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, Path):
        return str(value)
    raise ValueError(f"a checkpoint cannot hold a {type(value).__name__}: {value!r:.100}; use plain values or tensors")


def decode(value: Any) -> Any:
    """What `encode` was given."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        raw = torch.frombuffer(bytearray(base64.b64decode(value["$tensor"])) or bytearray(1), dtype=torch.uint8)
        dtype = getattr(torch, value["dtype"])
        count = len(base64.b64decode(value["$tensor"]))
        return raw[:count].view(dtype).reshape(value["shape"])
    if "$array" in value:
        return numpy.frombuffer(base64.b64decode(value["$array"]), value["dtype"]).reshape(value["shape"]).copy()
    if "$bytes" in value:
        return base64.b64decode(value["$bytes"])
    if "$tuple" in value:
        return tuple(decode(item) for item in value["$tuple"])
    if "$items" in value:
        return {decode(key): decode(item) for key, item in value["$items"]}
    return {key: decode(item) for key, item in value.items()}


def _checksum(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
