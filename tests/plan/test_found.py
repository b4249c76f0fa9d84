"""A device that was found on this box: when torch is asked, which card of the catalogue it is, and what may be used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tiny import make_model, tables

from offloadz.config import config_from_tables
from offloadz.plan.candidates import MEMORY_SHARE
from offloadz.plan.footprint import DRIVER_BYTES
from offloadz.plan.found import catalogued, with_found, worth_asking
from offloadz.plan.machine import DeviceFacts, probe_machine
from offloadz.plan.question import asked_machine, question

GIB = 1 << 30
CARD = DeviceFacts("cuda:0", "NVIDIA GeForce RTX 4090", 20 * GIB, 24 * GIB)


@pytest.mark.parametrize("file", ["dev/nvidiactl", "dev/kfd", "dev/dri/renderD128"])
def test_torch_is_asked_where_a_driver_shows_a_device(file: str, tmp_path: Path) -> None:
    assert not worth_asking("auto", tmp_path) and worth_asking("cuda:0", tmp_path)
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).touch()
    assert worth_asking("auto", tmp_path) and not worth_asking("cpu", tmp_path)


def test_a_card_is_known_by_its_drivers_name() -> None:
    names = {
        "NVIDIA GeForce RTX 4090": "rtx4090", "NVIDIA H100 80GB HBM3": "h100", "NVIDIA RTX A6000": "a6000",
        "AMD Instinct MI300X": "", "NVIDIA A100-SXM4-80GB": "",
    }  # fmt: skip
    assert {name: catalogued(name) for name in names} == names


def test_its_rates_are_the_catalogues_and_its_memory_what_is_free() -> None:
    found = with_found(probe_machine(), CARD)
    assert (found.device, found.unified, found.device_bytes) == ("cuda:0", False, 20 * GIB)
    assert found.rates["bandwidth"] == 1.008e12 and "rtx4090 of the catalogue" in found.rates_source
    other = with_found(probe_machine(), replace(CARD, gpu="of nobody"))
    assert "the GPU: typical, unverified" in other.rates_source


def config_of(folder: Path, **changes: object) -> object:
    if not (folder / "model").exists():
        make_model(folder / "model", weights=False)
    return config_from_tables(tables(folder, model__init="random", **changes))


def test_a_machine_file_gives_rates_and_never_more_memory_than_is_free(tmp_path: Path) -> None:
    config = config_of(tmp_path, offload__machine="rtx4090")
    machine = asked_machine(config, None, CARD)  # type: ignore[arg-type]
    assert (machine.device, machine.device_bytes, machine.rates["eager"]) == ("cuda:0", 20 * GIB, 1.25e14)
    small = asked_machine(config_of(tmp_path, offload__machine="cpu-2core"), None, CARD)  # type: ignore[arg-type]
    assert not small.unified and small.device_bytes == 20 * GIB and small.host_bytes <= probe_machine().host_bytes


@pytest.mark.parametrize(("bfloat16", "compute"), [(True, "bfloat16"), (False, "float32")])
def test_a_plan_for_it(tmp_path: Path, bfloat16: bool, compute: str) -> None:
    facts = replace(CARD, bfloat16=bfloat16)
    asked = question(config_of(tmp_path), find=lambda told: facts)  # type: ignore[arg-type]
    plan = asked.answer()
    assert plan.fits and plan.device == "cuda:0" and not plan.placement.unified
    assert plan.placement.compute == compute and plan.limits["device"] == int(20 * GIB * MEMORY_SHARE)
    assert plan.footprint.terms["step"]["device"]["driver and libraries"] == DRIVER_BYTES
    told = question(config_of(tmp_path, offload__device_memory="700MiB"), find=lambda told: facts)  # type: ignore[arg-type]
    assert told.answer().limits["device"] == 700 << 20
