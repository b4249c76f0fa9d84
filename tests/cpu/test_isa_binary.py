"""Wide instructions stand only in the functions that are guarded by what the processor says it has.

Case G06, kind K06: a library built on a new processor must run on an old one.
"""

import re
import shutil
import subprocess

import pytest

from offloadz.runtime.library import load_library

GUARDED = {"avx2": "offloadz::avx2::", "avx512": "offloadz::avx512::"}
WIDE = re.compile(r"%[yz]mm|%k[1-7]|%xmm(1[6-9]|2\d|3[01])")
VEX = re.compile(r"^v[a-z]")  # an encoding of AVX: no baseline function may hold one


def functions(listing: str) -> dict[str, list[str]]:
    """Instructions by the demangled name of the function they stand in."""
    found: dict[str, list[str]] = {}
    body: list[str] = []
    for line in listing.splitlines():
        if header := re.match(r"[0-9a-f]+ <(.*)>:$", line):
            body = found.setdefault(header[1], [])
        elif "\t" in line:
            body.append(line.split("\t")[-1].strip())
    return found


def unguarded(found: dict[str, list[str]]) -> list[str]:
    """Functions outside the guarded rooms with instructions of AVX or later, and those of avx2 with AVX-512's."""
    wrong = []
    for name, body in found.items():
        if GUARDED["avx512"] in name:
            continue
        text = "\n".join(body)
        if GUARDED["avx2"] in name:
            wrong += [name] if re.search(r"%zmm|%k[1-7]|%[xy]mm(1[6-9]|2\d|3[01])", text) else []
        elif WIDE.search(text) or any(VEX.match(line) for line in body):
            wrong.append(name)
    return wrong


@pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump is not installed")
def test_wide_instructions_are_guarded():
    path = load_library()._name
    done = subprocess.run(["objdump", "-dC", "--no-show-raw-insn", path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = functions(done.stdout)
    if "x86" not in done.stdout.split("\n", 3)[1] + done.stdout[:200]:
        pytest.skip("one instruction set on this processor")
    assert unguarded(found) == []
    for room in GUARDED.values():
        assert any(room in name for name in found), "the names are there to be looked at"
    assert any("%ymm" in line for name, body in found.items() if GUARDED["avx2"] in name for line in body)
    assert any("%zmm" in line for name, body in found.items() if GUARDED["avx512"] in name for line in body)


def test_the_rule_sees_what_breaks_it():
    lines = {"plain": ["mulps  %xmm1,%xmm2"], "offloadz::avx2::f": ["vmulps %ymm1,%ymm2,%ymm3"]}
    assert unguarded(lines) == []
    assert unguarded({"g": ["vmulps %xmm1,%xmm2,%xmm3"]}) == ["g"]
    assert unguarded({"g": ["add %zmm1,%zmm2"]}) == ["g"]
    assert unguarded({"offloadz::avx2::f": ["vmulps %zmm1,%zmm2,%zmm3"]}) == ["offloadz::avx2::f"]
