"""Cases G03 and G05 (kinds K03, K05) at the level of a run: odd sizes on a bad drive, and a drive without direct I/O.

Blocks of one Linear 37 x 53 with a bias of 53, in bf16, so that no byte count is a multiple of anything.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from shims import main, mounted, run_file, spoiled
from torch import nn

import offloadz


class Odd(nn.Module):
    """There and back again: an odd number of rows, columns and bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(37, 53), nn.Linear(53, 37), nn.Linear(37, 53), nn.Linear(53, 37)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def trained(swap: Path, tier: str = "disk", mode: str = "", io: str = "threads") -> dict[str, Any]:
    """Three steps with everything on one tier; the losses and a hash of all weights and states."""
    torch.manual_seed(0)
    model, xs = Odd(), torch.randn(3, 4, 37)
    places = dict.fromkeys(("parameters", "gradients", "optimizer_state", "activations"), tier)
    places["activations"] = "host" if mode == "stuck_write" else tier  # there a parameter is to fail first
    with offloadz.offload(
        model, offloadz.AdamW(lr=1e-2), swap=swap, dtype=torch.bfloat16, micro_batch_size=2, io=io, **places
    ) as run:
        if mode:
            with spoiled(mode) as count:
                losses = [float(run.step({"x": x}, loss_fn=lambda m, b: m(b["x"]).square().mean())) for x in xs]
                run.flush()
                spoiled_calls = count()
        else:
            losses = [float(run.step({"x": x}, loss_fn=lambda m, b: m(b["x"]).square().mean())) for x in xs]
            spoiled_calls = 0
        digest = hashlib.sha256()
        for view in run.session.parts():
            for tensor in (view.weight, view.low, *view.moments.values()):
                digest.update(b"" if tensor is None else tensor.view(torch.uint8).numpy().tobytes())
    return {"losses": losses, "digest": digest.hexdigest(), "spoiled": spoiled_calls}


def odd(directory: Path) -> dict[str, Any]:
    """In memory, on a good drive, on drives that write or read halves; and what a stuck one says."""
    found = {"memory": trained(directory / "m", "host"), "disk": trained(directory / "d")}
    found["auto"] = trained(directory / "a", io="auto")
    found |= {mode: trained(directory / mode, mode=mode) for mode in ("short_write", "short_read")}
    try:
        trained(directory / "stuck", mode="stuck_write")
    except (offloadz.DiskFailed, offloadz.UpdateFailed) as error:
        found["stuck"] = f"{type(error).__name__}: {error}"
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_file(__file__, "odd", tmp_path_factory.mktemp("odd"))  # type: ignore[no-any-return]


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return (a["losses"], a["digest"]) == (b["losses"], b["digest"])


def test_odd_sizes_are_the_same_on_disk(found: dict[str, Any]) -> None:
    assert same(found["disk"], found["memory"]) and same(found["auto"], found["memory"])


@pytest.mark.parametrize("mode", ["short_write", "short_read"])
def test_halves_are_resumed(found: dict[str, Any], mode: str) -> None:
    assert found[mode]["spoiled"] > 0 and same(found[mode], found["memory"])


def test_a_stuck_drive_is_an_error_with_names(found: dict[str, Any]) -> None:
    assert "/blocks." in found["stuck"] and ".bin" in found["stuck"] and "wanted" in found["stuck"], found["stuck"]


def test_a_ram_backed_path_gives_the_same_weights(tmp_path: Path) -> None:
    with mounted(tmp_path / "ram", "size=64m") as ram:
        assert same(trained(ram / "swap"), trained(tmp_path / "memory", "host"))


if __name__ == "__main__":
    main(globals())
