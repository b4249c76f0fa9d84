"""Machine files and the catalogue: what they say is in force, what is wrong is named.  Kinds K01 and K19."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from offloadz.config import load_config
from offloadz.plan.catalogue import (
    FOLDER,
    MEMORY_SHARED,
    Figure,
    machine_names,
    part,
    part_names,
    read_machine,
    with_drives,
    with_part,
    with_rates,
)
from offloadz.plan.errors import ConfigError
from offloadz.plan.machine import TYPICAL_RATES, UNVERIFIED, Machine, allowed_cores, host_limit
from offloadz.plan.question import Question, question

GIB = 1 << 30
BOX = Machine("box", 8 * GIB, "a test", device_bytes=8 * GIB, cores=3)
WHOLE = """
name = "desk"
source = "measured 2026-02-01, idle"
[host]
memory = "64GiB"
cores = 16
[rates]
device = 1.5e12
memory = "60GB/s"
h2d = 5e10
d2h = { value = 4e10, source = "a guess" }
cpu = 2000000000
[[drive]]
model = "a drive"
size = "2TB"
read = "7GB/s"
write = 5.5e9
endurance = { value = "1200TB", source = "its maker" }
"""


def written(folder: Path, text: str) -> str:
    path = folder / "box.toml"
    path.write_text(text)
    return str(path)


def test_every_figure_of_a_file_is_taken(tmp_path: Path) -> None:
    found = read_machine(written(tmp_path, WHOLE), BOX)
    assert (found.name, found.host_bytes, found.device_bytes, found.cores) == ("desk", 64 * GIB, 64 * GIB, 16)
    assert found.rates == {
        "device": 1.5e12, "memory": 6e10, "h2d": 5e10, "d2h": 4e10, "cpu": 2e9, "disk_read": 7e9, "disk_write": 5.5e9,
        "memory_shared": MEMORY_SHARED * 6e10, "disk_both": 2 / (1 / 7e9 + 1 / 5.5e9),
    }  # fmt: skip
    assert found.drive is not None and found.drive.size_bytes == 2 * 10**12
    assert (found.drive.endurance_bytes, found.drive.endurance_source) == (1200 * 10**12, "its maker")
    assert "d2h: a guess" in found.rates_source and "disk_write: measured 2026-02-01, idle" in found.rates_source
    assert "measured 2026-02-01, idle" in found.host_source


def test_what_a_file_leaves_out_is_this_box_and_typical(tmp_path: Path) -> None:
    found = read_machine(written(tmp_path, "[rates]\ncpu = 3e9\n"), BOX)
    assert (found.host_bytes, found.cores, found.host_source, found.drive) == (8 * GIB, 3, "a test", None)
    assert found.rates == {**TYPICAL_RATES, "cpu": 3e9}
    assert found.rates_source == f"machine file box.toml ({UNVERIFIED})", "a figure without a source counts as none"
    assert read_machine(written(tmp_path, ""), BOX).rates_source == BOX.rates_source


def test_the_drive_is_the_one_that_holds_the_swap_path(tmp_path: Path) -> None:
    text = "".join(
        f'[[drive]]\npath = "{tmp_path}/{place}"\nwrite = {rate}\nendurance = "{rate}TB"\n'
        for place, rate in (("a", 1), ("a/deep", 2), ("b", 3))
    )
    told = written(tmp_path, text)
    for swap, rate in (("a/swap", 1), ("a/deep/swap", 2), ("b", 3)):
        found = read_machine(told, BOX, [tmp_path / swap])
        assert found.drive is not None and found.drive.endurance_bytes == rate * 10**12
        assert found.rates["disk_write"] == rate
    for elsewhere in ([tmp_path / "c"], [tmp_path / "ab"], [tmp_path / "a", tmp_path / "c"], []):
        found = read_machine(told, BOX, elsewhere)
        assert found.drive is None and found.rates["disk_write"] == TYPICAL_RATES["disk_write"]
    (tmp_path / "b").mkdir()
    beside = read_machine(told, BOX, [tmp_path / "c"])
    assert beside.rates["disk_write"] == 3, "what was measured on a file system holds for all of it"
    assert read_machine(told, BOX, []).drive is None


def test_several_drives_count_as_one(tmp_path: Path) -> None:
    """With three quarters on the fast one and a quarter on the other; two paths on one drive are that drive."""
    text = "".join(
        f'[[drive]]\npath = "{tmp_path}/{place}"\nread = "{rate}GB/s"\nwrite = "{rate}GB/s"\nsize = "2TB"\n'
        f'endurance = "{life}TB"\n'
        for place, rate, life in (("a", 3, 300), ("b", 1, 200))
    )
    told = written(tmp_path, text)
    found = read_machine(told, BOX, [tmp_path / "a/swap", tmp_path / "b/swap"])
    assert found.rates["disk_read"] == found.rates["disk_write"] == 4e9
    assert found.drive is not None and found.drive.size_bytes == 4 * 10**12
    assert found.drive.endurance_bytes == 400 * 10**12  # the fast one is worn first
    found = read_machine(told, BOX, [tmp_path / "a/1", tmp_path / "a/2"])
    assert found.rates["disk_read"] == 3e9 and found.drive is not None and found.drive.size_bytes == 2 * 10**12


def test_what_several_get_at_once_follows_from_what_one_gets(tmp_path: Path) -> None:
    """Unless a file tells it, and then in proportion where one of the two changes."""
    told = "[rates]\nmemory = 4e10\nmemory_shared = 3e10\n[[drive]]\nread = 4e9\nwrite = 4e9\nboth = 5e9\n"
    found = read_machine(written(tmp_path, told), BOX)
    assert (found.rates["memory_shared"], found.rates["disk_both"]) == (3e10, 5e9)
    other = with_rates(found, {"memory": Figure(8e10, "a test"), "disk_write": Figure(2e9, "a test")})
    assert (other.rates["memory_shared"], other.rates["disk_both"]) == (6e10, pytest.approx(5e9 * 2 / 3))
    assert with_rates(found, {"disk_both": Figure(1e9, "a test")}).rates["disk_both"] == 1e9
    assert not {"memory_shared", "disk_both"} & set(with_rates(BOX, {"memory": Figure(1e9, "a test")}).rates)
    ram = with_part(found, "ram", "ddr4-3200-2ch").rates
    assert ram["memory_shared"] == MEMORY_SHARED * ram["memory"]
    both = with_drives(found, ["samsung-990-pro-2tb", "samsung-990-pro-2tb"]).rates
    assert both["disk_both"] == pytest.approx(2 * 2 / (1 / 7.45e9 + 1 / 6.9e9))


def test_a_drive_of_the_catalogue_takes_figures_of_the_file_before_its_own(tmp_path: Path) -> None:
    found = read_machine(written(tmp_path, '[[drive]]\nmodel = "samsung-990-pro-2tb"\nwrite = "2GB/s"\n'), BOX)
    assert found.drive is not None and found.drive.endurance_bytes == 1200 * 10**12
    assert (found.rates["disk_read"], found.rates["disk_write"]) == (7.45e9, 2e9)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[host]\nmemry = 1", "unknown key host.memry; nearest is memory"),
        ("[rate]\ncpu = 1", "unknown key rate; nearest is rates"),
        ("[[drive]]\nendurence = 1", "unknown key drive.endurence; nearest is endurance"),
        ("[host]\nmemory = 0", "host.memory = 0: needs a number above 0"),
        ("[host]\nmemory = '64'", "host.memory = '64': needs a size with a unit"),
        ("[host]\ncores = 2.5", "host.cores = 2.5: needs a whole number"),
        ("[host]\ncores = '2GB'", "host.cores = '2GB': needs a number above 0"),
        ("[rates]\ncpu = -1", "rates.cpu = -1: needs a number above 0"),
        ("[rates]\ndevice = nan", "rates.device = nan: needs"),
        ("[rates]\nmemory = inf", "rates.memory = inf: needs"),
        ("[rates]\nmemory = true", "rates.memory = True: needs"),
        ("[rates]\ncpu = {valu = 1}", 'rates.cpu needs { value = ..., source = "..." }, found the keys valu'),
        ("[[drive]]\nread = 'fast'", "drive.read = 'fast': needs"),
        ("[[drive]]\nmodel = 'samsung-990-pro'", "is not in the catalogue; nearest is samsung-990-pro-2tb"),
        ("drive = 3", "drive needs tables [[drive]], found 3"),
        ("host = 3", "host needs a table, found 3"),
        ("source = 3", "source needs text, found 3"),
        ('device = "cuda:0"', "unknown key device"),
        ("[gpu]\nmodel = 'rtx409'", "gpu.model = 'rtx409' is not in the catalogue; nearest is rtx4090"),
        (
            "[gpu]\nmodel = 'rtx4090'\nlink = 'pcie4'",
            "gpu.link = 'pcie4' is not in the catalogue; nearest is pcie4-x16",
        ),
        ("[gpu]\nmodel = 'rtx4090'", "gpu.h2d is needed"),
        ("[gpu]\nmodel = 'of my own'\neager = 1e14", "gpu.memory is needed"),
        ("[gpu]\neager = '5GB/s'", "gpu.eager = '5GB/s': needs operations a second"),
        ("[host]\nmemory = '64GB/s'", "host.memory = '64GB/s': needs bytes, such as"),
        ("[rates]\nmemory = '64GB/h'", "rates.memory = '64GB/h': needs bytes/s, such as"),
        ("[host]\nram = 'ddr5'", "host.ram = 'ddr5' is not in the catalogue"),
        ("[rates]\nbandwidth = 1", "unknown key rates.bandwidth"),
        ("host", "the machine file"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, words: str) -> None:
    told = written(tmp_path, text)
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        read_machine(told, BOX)
    assert told in str(caught.value)


def test_names_are_of_the_catalogue_or_files_that_are_there(tmp_path: Path) -> None:
    for told, words in (
        ("latop", "nearest is laptop"),
        ("rtx4900", "nearest is rtx4090"),
        ("drives", "is not in the catalogue"),
        (str(tmp_path / "none.toml"), "there is no such file"),
        (str(tmp_path), "there is no such file"),
    ):
        with pytest.raises(ConfigError, match=re.escape(words)):
            read_machine(told, BOX)
    with pytest.raises(ConfigError, match="nearest is samsung-990-pro-2tb"):
        part("drive", "samsung-990-pro", "drive")


def test_the_catalogue_is_whole_and_names_its_sources() -> None:
    from tomllib import loads

    boxes = {"cpu-2core", "cpu-16core", "cpu-64core", "laptop", "rtx3090", "rtx4080", "rtx4090", "rtx5090", "a6000"}
    assert set(machine_names()) == boxes | {"a100-40", "a100-80", "h100", "h200"}
    for name in machine_names():
        found = read_machine(name, BOX)
        assert found.host_bytes != BOX.host_bytes and found.drive is not None and found.drive.size_bytes
        assert found.unified is not ("[gpu]" in (FOLDER / f"{name}.toml").read_text())
        assert UNVERIFIED in found.rates_source
        assert {"memory", "cpu", "h2d", "d2h", "disk_read", "disk_write"} <= set(found.rates)
        assert found.rates["memory_shared"] == MEMORY_SHARED * found.rates["memory"]
        assert found.rates["disk_write"] / 2 < found.rates["disk_both"] < 2 * found.rates["disk_write"]
        assert f"memory_shared: {MEMORY_SHARED} of memory alone ({UNVERIFIED})" in found.rates_source
        assert f"disk_both: as much as in turn ({UNVERIFIED})" in found.rates_source
        assert (found.drive.endurance_bytes is None) == (name == "cpu-2core"), "a virtual drive's is its owner's"
    for kind, file in (("drive", "drives"), ("gpu", "gpus"), ("ram", "memories"), ("link", "links")):
        for name, table in loads((FOLDER / f"parts/{file}.toml").read_text()).items():
            assert all(figure.source for figure in part(kind, name, kind).values()) and table["source"]


def test_parts_have_figures_that_can_be() -> None:
    for name in part_names("drive"):
        found = {key: figure.value for key, figure in part("drive", name, "drive").items()}
        assert 100 < found["endurance"] / found["size"] < 10_000
        assert 1e9 < found["write"] <= found["read"] < 2e10
    for name in part_names("gpu"):
        found = {key: figure.value for key, figure in part("gpu", name, "gpu").items()}
        assert found["float32"] < found["eager"] < found["compile"] < found["liger"] < 1e15, name
        assert 10 * GIB < found["memory"] < 200 * GIB and 5e11 < found["bandwidth"] < 1e13
    for name in part_names("ram"):
        found = {key: figure.value for key, figure in part("ram", name, "ram").items()}
        assert found["cpu"] == pytest.approx(found["memory"] / 26, rel=0.02), "26 bytes a parameter"


def test_a_box_with_a_gpu_takes_its_figures_from_its_parts(tmp_path: Path) -> None:
    found = read_machine("rtx4090", BOX)
    assert (found.device, found.unified, found.gpu) == ("cuda", False, "rtx4090")
    assert found.device_bytes == int(23.52 * GIB) and found.host_bytes == 128 * GIB
    assert (found.rates["eager"], found.rates["h2d"], found.rates["memory"]) == (1.25e14, 2.5e10, 7e10)
    assert found.computing("bfloat16", "eager").rates["device"] == 1.25e14
    assert (
        found.computing("bfloat16", "liger").rates["device"] == found.rates["liger"] > found.rates["compile"] > 1.25e14
    )
    assert found.computing("float32", "eager").rates["device"] == found.rates["float32"] < 1e14
    own = written(tmp_path, '[gpu]\nmodel = "rtx4090"\nlink = "pcie3-x16"\neager = 1e14\nmemory = "20GiB"\nd2h = 9e9\n')
    found = read_machine(own, BOX)
    assert (found.rates["eager"], found.device_bytes, found.rates["h2d"]) == (1e14, 20 * GIB, 1.23e10)
    assert (found.rates["d2h"], found.rates["cpu"], found.host_bytes) == (9e9, TYPICAL_RATES["cpu"], BOX.host_bytes)
    cpu = read_machine("rtx4090", BOX, gpu=False)
    assert (cpu.device, cpu.unified, cpu.gpu, cpu.device_bytes) == ("cpu", True, "rtx4090", 128 * GIB)
    assert cpu.rates["device"] == 1.2e12 and "eager" not in cpu.rates and "bandwidth" not in cpu.rates


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A small model known by its config.json, with a swap path."""
    (tmp_path / "model").mkdir()
    sizes = '"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4'
    (tmp_path / "model/config.json").write_text(f'{{"model_type": "llama", "vocab_size": 512, {sizes}}}')
    (tmp_path / "swap").mkdir()
    path = tmp_path / "run.toml"
    path.write_text(f"""
[model]
path = "{tmp_path}/model"
init = "random"
[data]
max_length = 64
[train]
output = "{tmp_path}/out"
[offload]
swap = ["{tmp_path}/swap"]
""")
    return path


def asked(config: Path, *overrides: str, machine: str | None = None, sets: tuple[str, ...] = ()) -> Question:
    return question(load_config(config, list(overrides)), machine, sets)


def test_a_machine_to_plan_for_is_taken_as_it_stands(config: Path, tmp_path: Path) -> None:
    text = WHOLE.replace("64GiB", "64TiB").replace("cores = 16", "cores = 4096").replace('"2TB"', '"2000TB"')
    found = asked(config, machine=written(tmp_path, text))
    assert found.machine.host_bytes == 64 << 40 and found.machine.cores == 4096
    assert found.wishes.disk_free == found.wishes.checkpoint_free == 2 * 10**15


def test_the_room_of_a_box_elsewhere_is_not_this_boxs(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This box is full; the other has its drive, or one nobody knows."""
    monkeypatch.setattr("offloadz.plan.rooms.disk_free", lambda path: 0)
    none, told = "offload.swap=[]", written(tmp_path, '[host]\nmemory = "64GiB"\n')
    assert not asked(config, none).answer().fits and "train.output has" in asked(config, none).answer().shortage
    for found, room in (
        (asked(config, none, machine="rtx4090"), 2 * 10**12),
        (asked(config, none, machine="rtx4090", sets=("drive=samsung-970-evo-plus-1tb",)), 10**12),
        (asked(config, none, machine="rtx4090", sets=("disk_free=50GB",)), 50 * 10**9),
        (asked(config, machine="rtx4090"), 2 * 10**12),
        (asked(config, none, machine=told), None),
        (asked(config, machine=told), None),
    ):
        assert found.wishes.checkpoint_free == found.wishes.disk_free == room
        assert found.answer().fits, found.answer().refusal()
        assert found.notes == (() if room else (
            "the drive of box is not known: its room counts as unlimited; tell it with --set disk_free=SIZE",
        ))  # fmt: skip


def test_a_file_about_this_box_never_gives_it_more_than_it_has(config: Path, tmp_path: Path) -> None:
    text = WHOLE.replace("64GiB", "64TiB").replace("cores = 16", "cores = 4096").replace('"2TB"', '"2000TB"')
    plain, found = asked(config), asked(config, f"offload.machine={written(tmp_path, text)}")
    assert found.machine.host_bytes <= host_limit().total_bytes and found.machine.cores == allowed_cores()
    assert found.machine.host_source == host_limit().source and found.machine.device_bytes == found.machine.host_bytes
    assert plain.wishes.disk_free is not None and found.wishes.disk_free is not None
    assert abs(found.wishes.disk_free - plain.wishes.disk_free) < GIB, "others write to the drive meanwhile"
    assert found.machine.rates["device"] == 1.5e12, "its rates are taken"


def test_a_file_about_this_box_may_leave_less(config: Path, tmp_path: Path) -> None:
    text = WHOLE.replace("64GiB", "512MiB").replace("cores = 16", "cores = 1").replace('"2TB"', '"3GB"')
    found = asked(config, f"offload.machine={written(tmp_path, text)}")
    assert (found.machine.host_bytes, found.machine.cores, found.wishes.disk_free) == (512 << 20, 1, 3 * 10**9)
    assert found.answer().threads == 1


def test_settings_come_after_the_machine(config: Path, tmp_path: Path) -> None:
    told = written(tmp_path, WHOLE)
    sets = ("host_memory=3GiB", "cores=5", "disk_write=1e9", "disk_read=2GB/s", "cpu=7e8", "endurance=300TB")
    found = asked(config, machine=told, sets=(*sets, "disk_free=50GB")).machine
    assert (found.host_bytes, found.cores, found.rates["cpu"]) == (3 * GIB, 5, 7e8)
    assert (found.rates["disk_write"], found.rates["disk_read"], found.rates["device"]) == (1e9, 2e9, 1.5e12)
    assert found.drive is not None and (found.drive.name, found.drive.endurance_bytes) == ("a drive", 300 * 10**12)
    assert found.rates_source.endswith(" and --set")
    found = asked(config, machine=told, sets=("drive=crucial-t700-2tb",)).machine
    assert found.drive is not None and (found.drive.name, found.rates["disk_read"]) == ("crucial-t700-2tb", 1.24e10)


def test_settings_may_name_parts(config: Path) -> None:
    """Each part of the catalogue, and a box that gets a GPU."""
    sets = ("ram=ddr4-3200-2ch", "gpu=rtx3090", "link=pcie3-x16", "device_memory=20GiB", "liger=70TFLOPS")
    found = asked(config, machine="rtx4090", sets=sets).machine
    assert (found.gpu, found.device_bytes, found.host_bytes) == ("rtx3090", 20 * GIB, 128 * GIB)
    assert (found.rates["memory"], found.rates["h2d"], found.rates["liger"]) == (4.3e10, 1.23e10, 7e13)
    assert found.rates["device"] == found.rates["eager"] == 5.46e13
    found = asked(config, machine="cpu-16core", sets=("gpu=rtx5090",)).machine
    assert (found.device, found.rates["h2d"], found.rates["memory"]) == ("cuda", 2.5e10, 7e10)
    found = asked(config, machine="rtx4090", sets=("device=99TFLOPS",)).machine
    assert found.rates["device"] == 9.9e13, "whatever is computed in"


def test_each_swap_path_has_a_drive(config: Path, tmp_path: Path) -> None:
    """Drives without a path take the swap paths in their order; several count as one with a share on each."""
    one, two = "samsung-970-evo-plus-1tb", "crucial-t700-2tb"
    drives = f'[[drive]]\nmodel = "{one}"\n[[drive]]\nmodel = "{two}"\n'
    told, both = written(tmp_path, drives), f"offload.swap=['{tmp_path}/swap','{tmp_path}/more','{tmp_path}/most']"
    slow = part("drive", one, "drive")
    found = asked(config, machine=told).machine
    assert found.drive is not None and (found.drive.name, found.rates["disk_write"]) == (one, slow["write"].value)
    found = asked(config, both, machine=told).machine
    assert found.drive is not None and found.drive.name == f"{one} + {two}" and found.drive.size_bytes == 3 * 10**12
    assert found.rates["disk_write"] > 6 * slow["write"].value, "each has a share by its speed"
    pair = asked(config, both, machine="rtx4090", sets=(f"drive={two}",))
    assert pair.machine.drive is not None and round(pair.machine.drive.endurance_bytes or 0, -3) == 3600 * 10**12
    assert pair.machine.rates["disk_read"] == pytest.approx(3 * 12.4e9) and pair.wishes.disk_free == 6 * 10**12
    mixed = asked(config, both, machine="rtx4090", sets=(f"drive={one},{two},{two}",)).machine
    assert mixed.drive is not None and mixed.drive.name == f"{one} + {two} + {two}"


def test_a_gpu_computes_where_it_is_found_or_imagined(config: Path) -> None:
    there, here = asked(config, machine="rtx4090"), asked(config, "offload.machine=rtx4090")
    assert there.wishes.compute == "bfloat16" and not there.answer().placement.unified and not there.notes
    assert here.wishes.compute == "float32" and here.answer().placement.unified
    assert here.notes == (
        "rtx4090 has a GPU (rtx4090); this run computes on the CPU: offload.device says so, or torch finds none",
    )
    cpu = asked(config, "offload.device=cpu", machine="rtx4090")
    assert cpu.machine.unified and cpu.machine.rates["device"] == 1.2e12


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("endurence=1TB", "nearest is endurance"),
        ("endurance=600", "--set endurance=600: needs a size with a unit"),
        ("host_memory=64GiB/s", "--set host_memory=64GiB/s: needs bytes, such as"),
        ("cores=0", "--set cores=0: needs a number above 0"),
        ("cores=1.5", "--set cores=1.5: needs a whole number"),
        ("cpu=-1", "--set cpu=-1: needs a number above 0"),
        ("cpu=nan", "--set cpu=nan: needs a number above 0"),
        ("device=7GB/s", "--set device=7GB/s: needs operations a second"),
        ("drive=crucial-t700-2tb,crucial-t700-2tb", "names 2 drives, offload.swap has 1 paths; name one, or one for"),
        ("drive=samsung", "--set drive=samsung: drive 'samsung' is not in the catalogue"),
        ("gpu=rtx409", "--set gpu=rtx409: gpu 'rtx409' is not in the catalogue; nearest is rtx4090"),
        ("hostmemory=64GiB", "nearest is host_memory"),
        ("link=pcie3-x16", "computes on its CPU; name its GPU first"),
        ("device_memory=8GiB", "computes on its CPU: its memory is host_memory"),
    ],
)
def test_settings_that_are_wrong_are_named(config: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        asked(config, sets=(text,))
