"""Memory that is free in the allocator and resident all the same: it must not grow with the depth of a model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MEASURE = """
import ctypes, sys
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
class Info(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]
libc.mallinfo2.restype = Info
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
"""
HOLES = """
from offloadz.memory.heap import SLACK_BYTES, Growth, map_large_blocks
map_large_blocks()
growth = Growth()
growth.check()
old = [libc.malloc(3000 + 16 * (n % 2)) for n in range(1000)]
for block in old[::2]:
    libc.free(block)  # what an import or an interpreter of another day leaves behind
small = []
def compute(blocks):
    large = []
    for _ in range(blocks):
        large.append(libc.malloc(3 << 20)); ctypes.memset(large[-1], 1, 3 << 20)
        small.append(libc.malloc(3000))
        while small[-1] < large[-1]:  # it came out of a hole of before: only one behind keeps the large block there
            small.append(libc.malloc(3000))
    for block in large:
        libc.free(block)
before = resident()
compute(30)
first = resident() - before
growth.check()  # what one computation leaves is the next one's: nothing is given back, nothing is paged in again
print(first >> 20, (resident() - before) >> 20)
compute(64)
held = resident() - before
growth.check()
print(held >> 20, (resident() - before - 3008 * len(small)) >> 20, SLACK_BYTES >> 20)
few = libc.malloc(3 << 20); ctypes.memset(few, 1, 3 << 20); libc.free(few)
held = resident()
growth.check()  # within the slack: nothing is given back, and nothing has to be paged in again
print(abs(resident() - held) < 1 << 20)
growth.close()
"""
AGAIN = """
import torch
from offloadz.memory.heap import map_large_blocks
from offloadz.runtime import native
print(native.shape_heap() if sys.argv[1] == "filled" else map_large_blocks())
small = []
def step(first=False):
    large = []
    for _ in range(24):
        large.append(torch.empty(1024, 768))  # 3 MiB
        small.extend(torch.empty(12 + n % 3 * 8) for n in range(40))
        while first and small[-1].data_ptr() < large[-1].data_ptr():  # as above: one behind keeps large ones apart
            small.append(torch.empty(12))
step(first=True)
first = libc.mallinfo2().arena
for _ in range(6):
    step()
print((libc.mallinfo2().arena - first) >> 20)
"""
LOADED = """
import offloadz, torch
from transformers import AutoModelForCausalLM
before = libc.mallinfo2()
model = offloadz.load(sys.argv[1], dtype=torch.bfloat16, init="random")
after = libc.mallinfo2()
print(sum(p.numel() for p in model.parameters()) * 4 >> 20, (after.arena - before.arena) >> 20)
"""


def said(code: str, *words: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", MEASURE + code, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_holes_between_small_blocks_are_given_back_once_they_are_more_than_one_computation_left() -> None:
    *told, kept = said(HOLES)
    first, let_be, held, left, slack = map(int, told)
    assert first > 60 and let_be > first - 4
    assert held > max(150, first + slack) and left < 20 < slack and kept == "True"


def test_blocks_of_the_next_step_go_where_those_of_the_last_one_were() -> None:
    found, grown = said(AGAIN, "filled")
    assert found == "True" and int(grown) < 48
    _, grown = said(AGAIN, "as it is")
    assert int(grown) > 60, f"glibc fills its holes by itself now ({grown} MiB): csrc/heap.cpp is of no use any more"


def test_building_a_module_leaves_no_holes(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 40, "num_attention_heads": 8}
    told = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 512, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(told))
    weights, grown = map(int, said(LOADED, str(tmp_path)))
    assert weights > 400 and grown < 60, f"parameters of {weights} MiB left a heap {grown} MiB larger"
