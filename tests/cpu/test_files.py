"""Safetensors in pieces: the same files as the library's, refused where header and bytes disagree (kind K13)."""

from __future__ import annotations

import json
import random
import stat
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from offloadz.model.aside import appearing, clean_leftovers, free_bytes, join_crc, require_room
from offloadz.model.files import DTYPES, StreamReader, StreamWriter, verify_file
from offloadz.plan.errors import DamagedState, DiskFailed
from offloadz.plan.words import human

SHAPES = {"vector": (7,), "odd": (13, 5, 3), "one": (1,), "none": (0, 4), "scalar": ()}


def some(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    values = torch.randint(0, 2 if dtype == torch.bool else 100, shape)
    return values.to(dtype)


def all_tensors() -> dict[str, torch.Tensor]:
    return {f"{name}.{code}": some(dtype, shape) for name, shape in SHAPES.items() for code, dtype in DTYPES.items()}


def write(path: Path, tensors: dict[str, torch.Tensor], piece: int, seed: int = 0, verify: bool = True) -> Any:
    """All tensors through the writer in pieces, in random order."""
    writer = StreamWriter(path, {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()}, {"format": "pt"})
    cuts = [(n, s) for n, t in tensors.items() for s in range(0, max(1, t.numel()), piece)]
    random.Random(seed).shuffle(cuts)
    for name, start in cuts:
        writer.write(name, start, tensors[name].reshape(-1)[start : start + piece])
    return writer.finish(verify=verify)


@pytest.mark.parametrize("piece", [1, 4, 10_000])
def test_library_reads_what_we_write(tmp_path: Path, piece: int) -> None:
    tensors = all_tensors()
    record = write(tmp_path / "a.safetensors", tensors, piece, seed=piece)
    found = load_file(tmp_path / "a.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
        raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert record.tensors[name][2] == zlib.crc32(raw), name
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert stat.S_IMODE((tmp_path / "a.safetensors").stat().st_mode) == 0o600


def test_we_read_what_the_library_writes(tmp_path: Path) -> None:
    tensors = all_tensors()
    save_file(tensors, tmp_path / "a.safetensors", metadata={"who": "library"})
    with StreamReader(tmp_path / "a.safetensors") as reader:
        assert reader.metadata == {"who": "library"}
        for name, tensor in tensors.items():
            flat = tensor.reshape(-1)
            for start, stop in ((0, flat.numel()), (flat.numel() // 3, flat.numel() // 2)):
                assert torch.equal(reader.read(name, start, stop - start), flat[start:stop]), name
            assert torch.equal(torch.cat([p for _, p in reader.pieces(name, 4)] or [flat]), flat)
        with pytest.raises(ValueError, match=r"odd\.F32.*195 elements"):
            reader.read("odd.F32", 190, 6)
        with pytest.raises(ValueError, match="no tensor"):
            reader.read("nobody")


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300), st.binary(max_size=300), st.binary(max_size=9))
def test_checksums_join(first: bytes, second: bytes, third: bytes) -> None:
    joined = join_crc(join_crc(zlib.crc32(first), zlib.crc32(second), len(second)), zlib.crc32(third), len(third))
    assert joined == zlib.crc32(first + second + third)


def test_each_element_exactly_once(tmp_path: Path) -> None:
    def writer(name: str) -> StreamWriter:
        return StreamWriter(tmp_path / name, {"a": (torch.float32, (10,)), "b": (torch.bfloat16, (2,))})

    half = torch.zeros(5)
    with pytest.raises(ValueError, match=r"a in .*5:10 were never written"):
        (w := writer("1")).write("a", 0, half)
        w.finish()
    with pytest.raises(ValueError, match="0:3 were never written"):
        (w := writer("2")).write("a", 3, half)
        w.finish()
    with pytest.raises(ValueError, match="3:5 were written twice"):
        (w := writer("3")).write("a", 0, half)
        w.write("a", 3, half)
        w.finish()
    with pytest.raises(ValueError, match="element 0 was written twice"):
        (w := writer("4")).write("a", 0, half)
        w.write("a", 0, half)
    for start, flat in ((6, half), (-1, half), (0, half.double())):
        with pytest.raises(ValueError, match=r"a in .*10 elements of torch\.float32"):
            writer(f"x{start}{flat.dtype}").write("a", start, flat)
    with pytest.raises(ValueError, match="not planned to hold c"):
        writer("5").write("c", 0, half)


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def put_header(path: Path, header: Any, data: bytes, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)


def edit(key: str, value: Any) -> Any:
    def change(header: dict[str, Any]) -> None:
        header["b"][key] = value

    return change


HOSTILE_HEADERS = {
    "overlap": (edit("data_offsets", [36, 76]), r"b in .* overlaps a"),
    "gap": (edit("data_offsets", [44, 84]), r"b in .* leaves a gap after a"),
    "beyond the end": (edit("data_offsets", [40, 80000]), r"b in .*79960 bytes.*needs 40"),
    "wrong size": (edit("shape", [11]), r"b in .*40 bytes for F32 of shape \(11,\), which needs 44"),
    "huge shape": (edit("shape", [1 << 62, 1 << 62]), r"b in .*needs"),
    "negative shape": (edit("shape", [-10]), r"b in .*not readable"),
    "float shape": (edit("shape", [10.0]), r"b in .*not readable"),
    "true in shape": (edit("shape", [True, 10]), r"b in .*not readable"),
    "strange dtype": (edit("dtype", "F8_E4M3"), r"b in .*has dtype F8_E4M3"),
    "offsets missing": (lambda h: h["b"].pop("data_offsets"), r"b in .*not readable"),
    "three offsets": (edit("data_offsets", [40, 60, 80]), r"b in .*not readable"),
    "entry is a list": (lambda h: h.update(b=[1, 2]), r"b in .*not readable"),
    "tensor forgotten": (lambda h: h.pop("b"), r"belong to no tensor.*80 bytes|belong to no tensor"),
    "metadata is text": (lambda h: h.update(__metadata__="x"), "not an object"),
}


@pytest.mark.parametrize("what", HOSTILE_HEADERS)
def test_hostile_headers(tmp_path: Path, what: str) -> None:
    path = tmp_path / "a.safetensors"
    write(path, {"a": torch.zeros(10), "b": torch.ones(10)}, 4)
    header, data = header_of(path)
    change, message = HOSTILE_HEADERS[what]
    put_header(path, header, data)
    StreamReader(path).close()  # the edit alone is what is refused
    change(header)
    put_header(path, header, data)
    with pytest.raises(DamagedState, match=message) as caught:
        StreamReader(path)
    assert str(path) in str(caught.value)


def test_hostile_lengths(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write(path, {"a": torch.zeros(10), "b": torch.ones(10)}, 4)
    header, data = header_of(path)
    whole = path.read_bytes()
    for size in (0, 3, 8, 20, len(whole) - 80, len(whole) - 41, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(DamagedState, match=r"cut off"):
            StreamReader(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(DamagedState, match="belong to no tensor"):
        StreamReader(path)
    for length in (1 << 63, 100_000_001, 2 * len(whole)):
        put_header(path, header, data, length)
        with pytest.raises(DamagedState, match="no safetensors file or is cut off"):
            StreamReader(path)
    for text in (b"{", b"[]", b"\xff\xfe", b'{"a": 1, "a": 2}', b""):
        put_header(path, text, b"")
        with pytest.raises(DamagedState, match="header is not"):
            StreamReader(path)


def test_verification_sees_one_bit(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    record = write(path, {"a": torch.zeros(1000), "b": torch.ones(1000)}, 300)
    verify_file(path, record)
    whole = bytearray(path.read_bytes())
    for at, message in ((len(whole) - 1, "b in .*CRC-32"), (len(whole) - 5000, "a in .*CRC-32"), (12, "header")):
        spoiled = bytearray(whole)
        spoiled[at] ^= 4
        path.write_bytes(spoiled)
        with pytest.raises(DamagedState, match=message):
            verify_file(path, record)


def test_file_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write(path, {"a": torch.zeros(5000)}, 5000)
    with StreamReader(path) as reader:
        with open(path, "r+b") as file:
            file.truncate(9000)
        with pytest.raises(DamagedState, match=r"a in .*the file ends at byte 9000"):
            reader.read("a")


def test_no_room_is_said_with_numbers(tmp_path: Path) -> None:
    free = free_bytes(tmp_path / "not" / "yet")
    require_room(tmp_path / "not" / "yet", free // 2, "a checkpoint")
    with pytest.raises(DiskFailed, match=rf"a checkpoint in .* needs {human(free * 4, up=True)}, "):
        require_room(tmp_path, free * 4, "a checkpoint")
    with pytest.raises(DiskFailed, match=r"big\.safetensors: .*\([\d.]+[KMGT]?i?B free\)"):
        StreamWriter(tmp_path / "big.safetensors", {"a": (torch.float32, (1 << 50,))})


def test_directories_appear_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt), appearing(target) as scratch:
        (scratch / "half").write_text("x")
        assert not target.exists()
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    for text in ("first", "second"):
        with appearing(target) as scratch:
            (scratch / "sub").mkdir()
            (scratch / "sub" / "file").write_text(text)
            assert clean_leftovers(tmp_path, "out") == []  # a live writer's scratch is left alone
        assert (target / "sub" / "file").read_text() == text
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_leftovers_of_the_dead(tmp_path: Path) -> None:
    (tmp_path / "out.tmp-1").mkdir()  # process 1 is alive, but it holds no lock
    (tmp_path / "out.old-77").mkdir()
    (tmp_path / "out.old-77" / "file").write_text("moved aside, its replacement never came")
    (tmp_path / "other.tmp-9").mkdir()
    assert clean_leftovers(tmp_path, "out") == [tmp_path / "out.tmp-1"]
    assert (tmp_path / "out" / "file").exists() and (tmp_path / "other.tmp-9").exists()
