"""Write what the documentation says about bytes, programs and keys, from the code that decides them.

    python docs/make_tables.py

The table of machines is what `offloadz plan` answers for three published shapes on machines of four sizes, the program
in docs/step.md what `offloadz show` prints, the reference of keys the configuration's own rules, the catalogue the
files it consists of.
tests/cpu/test_quickstart.py fails when one is out of date.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tempfile
import tomllib
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from offloadz.config import NOT_BUILT
from offloadz.config.sections import RULES, SECTIONS, GroupConfig, rules
from offloadz.config.values import shown, to_toml
from offloadz.plan.answer import Plan
from offloadz.plan.catalogue import FOLDER, machine_names, part, part_names, read_machine, sources_told
from offloadz.plan.footprint import Batch
from offloadz.plan.headers import spec_from_formula
from offloadz.plan.machine import Machine
from offloadz.plan.placement import Placement, home_bytes
from offloadz.plan.predict import predict
from offloadz.plan.question import Question
from offloadz.plan.recipes import STATES, Recipe
from offloadz.plan.search import decide
from offloadz.plan.share import Share
from offloadz.plan.spec import ModelSpec
from offloadz.plan.waits import FULL
from offloadz.plan.wishes import Wishes
from offloadz.plan.words import human

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- table: begin (python docs/make_tables.py) -->", "<!-- table: end -->"
GIB = 1 << 30
ROWS, LENGTH = 16, 1024
MEMORIES_GIB = (16, 32, 64, 128)
COLUMNS = {
    "gpu": {
        "memory, GiB": ("memory", GIB), "float32, TFLOPS": ("float32", 1e12), "eager": ("eager", 1e12),
        "compile": ("compile", 1e12), "liger": ("liger", 1e12), "own memory, GB/s": ("bandwidth", 1e9),
    },
    "link": {"up, GB/s": ("h2d", 1e9), "down, GB/s": ("d2h", 1e9)},
    "ram": {"memory, GB/s": ("memory", 1e9), "update, 10⁹ parameters/s": ("cpu", 1e9)},
    "drive": {
        "size, TB": ("size", 1e12), "read, GB/s": ("read", 1e9), "write, GB/s": ("write", 1e9),
        "endurance, TB": ("endurance", 1e12),
    },
}  # fmt: skip
"""Columns of the catalogue's tables by kind of part: the key, and what it is shown in."""
PIPE = "\\|"
"""A bar inside a cell of Markdown."""


def llama(hidden: int, inner: int, layers: int, heads: int, groups: int, words: int, tied: bool) -> dict[str, Any]:
    """config.json of a Llama, as far as shapes go."""
    return {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": groups, "vocab_size": words, "tie_word_embeddings": tied,
    }  # fmt: skip


MODELS = {
    "1.2B": llama(2048, 8192, 16, 32, 8, 128256, True),
    "6.7B": llama(4096, 11008, 32, 32, 32, 32000, False),
    "13B": llama(5120, 13824, 40, 40, 40, 32000, False),
}

LARGE = {
    "7B": MODELS["6.7B"],
    "13B": MODELS["13B"],
    "32B": llama(5120, 27648, 64, 40, 8, 152064, False),
    "70B": llama(8192, 28672, 80, 64, 8, 32000, False),
}
"""Llama-2 7B, 13B and 70B, and the shape of Qwen2.5 32B."""
CARD, CARD_ROWS, CARD_MEMORIES_GIB, CARD_DRIVE = "rtx4090", 32, (64, 96, 128, 192), "samsung-990-pro-2tb"
OTHERS = {
    "Qwen3-14B": llama(5120, 17408, 40, 40, 8, 151936, False),
    "Qwen3-8B": llama(4096, 12288, 36, 32, 8, 151936, False),
    "Llama-3.1-8B": llama(4096, 14336, 32, 32, 8, 128256, False),
    "Llama-2-13B": MODELS["13B"],
    "Qwen2.5-14B": llama(5120, 13824, 48, 40, 8, 152064, False),
    "Qwen2.5-7B": llama(3584, 18944, 28, 28, 4, 152064, False),
}
PUBLISHED = (
    ("Qwen3-14B", 8192, 0, "fp32", 1259, "SlideFormer, states in memory (its GPU span only) [1]"),
    ("Qwen3-14B", 65536, 0, "fp32", 1405, "SlideFormer, states in memory [1]"),
    ("Qwen3-8B", 65536, 0, "fp32", 2398, "SlideFormer, states in memory [1]"),
    ("Llama-3.1-8B", 8192, 0, "fp32", 914, "DeepSpeed ZeRO-3, states in memory [2]"),
    ("Llama-3.1-8B", 16384, 0, "fp32", 1373, "DeepSpeed ZeRO-3, states in memory [2]"),
    ("Llama-3.1-8B", 32768, 0, "fp32", 1791, "DeepSpeed ZeRO-3, states in memory [2]"),
    ("Llama-2-13B", 32768, 1, "fp32", 481, "LoHan, states on one drive: 37.5 TFLOPS [3]"),
    ("Llama-2-13B", 65536, 1, "fp32", 901, "LoHan, states on one drive: 70.3 TFLOPS [3]"),
    ("Llama-2-13B", 32768, 2, "fp32", 824, "LoHan, states on two drives: 64.3 TFLOPS [3]"),
    ("Llama-2-13B", 65536, 2, "fp32", 1432, "LoHan, states on two drives: 111.7 TFLOPS [3]"),
    ("Qwen2.5-14B", 524288, 0, "bf16", 1348, "LLMQ, bfloat16 products, bfloat16 states in memory [4]"),
    ("Qwen2.5-7B", 524288, 0, "bf16", 2777, "LLMQ, bfloat16 products, bfloat16 states in memory [4]"),
)
"""Model, tokens a step, drives (0: all in memory), format of the state, tokens/s, and who measured them on what."""
HIDDEN_CASES: tuple[tuple[tuple[int, str, int, int], dict[str, Any]], ...] = (
    ((128, "int8-sr", 10240, 0), {}),
    ((128, "int8", 12288, 0), {}),
    ((64, "int8-sr", 49152, 1), {"activations": "disk"}),
)
"""Memory, format of the state, tokens a step, drives; and what is fixed."""
RESULTS_CASES = (("GiB", 192, "int8-sr"), ("GB", 192, "int8-sr"), ("GiB", 192, "int8"), ("GiB", 320, "fp32"))
"""Memory of a box, of which 5 are left to the system, and format of the state."""
PREDICTED: dict[str, tuple[str, dict[str, Any]]] = {
    "predicted, eager": ("eager", {}), "predicted, liger": ("liger", {}),
    "liger, in place": ("liger", {"commit": "in_place", "clipping": False}),
}  # fmt: skip
"""Columns of the published runs: kernels, and how a step is committed."""


def on_card(*told: Any, **wishes: Any) -> Plan:
    """The plan for a model in bfloat16 on the box with an RTX 4090, with this much memory and so many drives."""
    return asked_of_card(*told, **wishes).answer()


def asked_of_card(
    model: dict[str, Any], tokens: int, memory_gib: float, drives: int, kernels: str = "eager", state: str = "fp32",
    **wishes: Any,
) -> Question:  # fmt: skip
    """What `on_card` answers."""
    base = Machine("any", GIB, "the table", device_bytes=GIB)
    box = read_machine(CARD, base, [Path(f"/{n}") for n in range(max(1, drives))])
    box = dataclasses.replace(box, host_bytes=int(memory_gib * GIB)).computing("bfloat16", kernels)
    size = box.drive.size_bytes if box.drive is not None and drives else None
    asked = {"swap": drives > 0, "keep": 1, "linkable": True, "compute": "bfloat16", "disk_free": size, "copies": 0}
    asked["opaque"] = kernels != "eager"
    spec = spec_of(model).with_recipe(Recipe(state))
    return Question(spec, box, Wishes(tokens // LENGTH, LENGTH, **(asked | wishes)))


def card_table() -> str:
    """Markdown: predicted speed with the busiest lane, by memory and drives."""
    lines = ["| memory, drives | " + " | ".join(LARGE) + " |", "|---" * (len(LARGE) + 1) + "|"]
    for memory in CARD_MEMORIES_GIB:
        for drives in (1, 2):
            cells = [speed(on_card(model, CARD_ROWS * LENGTH, memory, drives)) for model in LARGE.values()]
            lines.append(f"| {memory} GiB, {'one' if drives == 1 else 'two'} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def speed(plan: Plan) -> str:
    """Tokens a second, and while clipping fires seldom; what is busy longest, with its share where that is no nine
    tenths."""
    if not plan.fits:
        return "does not fit"
    share = (plan.busy_s or {}).get(plan.bottleneck, plan.step_s) / plan.step_s
    seldom = f"; {plan.batch.tokens / plan.seldom_s:,.0f}" if plan.seldom_s else ""
    return f"{plan.tokens_per_s:,.0f}{seldom} ({plan.bottleneck}{f' {share:.0%}' if share < FULL else ''})"


def published_table() -> str:
    """Markdown: published runs beside what is predicted for the same model, tokens and layout."""
    heads = ("model", "tokens a step", "published, tokens/s", *PREDICTED, "whose")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    return "\n".join([*lines, *(published_row(*run) for run in PUBLISHED)])


def published_row(name: str, tokens: int, drives: int, state: str, known: int, whose: str) -> str:
    """A published run beside its plans."""
    told = (OTHERS[name], tokens, 128 if drives else 256, drives)
    more = {"optimizer": "disk"} if drives else {}
    plans = [on_card(*told, kernels, state, **commit, **more) for kernels, commit in PREDICTED.values()]
    return f"| {name} | {tokens:,} | {known:,} | {' | '.join(map(speed, plans))} | {whose} |"


def hidden_case(memory_gib: int, state: str, tokens: int, drives: int, **wishes: Any) -> Question:
    """What a 13B that clips exactly is asked, with 5 GiB of memory left to the system."""
    limit = {"host_memory": (memory_gib - 5) * GIB, "commit": "hold"}
    return asked_of_card(MODELS["13B"], tokens, memory_gib, drives, state=state, **limit, **wishes)


def hidden_table() -> str:
    """Markdown: steps of a 13B beside the seconds of their computation."""
    lines = ["| memory | state | tokens a step | placed | step | computation | ratio |", "|---" * 7 + "|"]
    for case, wishes in HIDDEN_CASES:
        plan = hidden_case(*case, **wishes).answer()
        device_s = (plan.busy_s or {})["device"]
        told = f"{plan.step_s:.1f} s | {device_s:.1f} s | {plan.step_s / device_s:.2f}"
        lines.append(f"| {case[0]} GiB | `{case[1]}` | {case[2]:,} | {on_disk(plan) or 'all in memory'} | {told} |")
    return "\n".join(lines)


def least_table() -> str:
    """Markdown: the fewest tokens a step that hide everything, by format of the state and memory."""
    lines = ["| state | " + " | ".join(f"{gib} GiB" for gib in CARD_MEMORIES_GIB) + " |", "|---" * 5 + "|"]
    for state in STATES:
        cells = []
        for gib in CARD_MEMORIES_GIB:
            plan = hidden_case(gib, state, CARD_ROWS * LENGTH, 1).answer()
            tokens = plan.hiding.tokens if plan.hiding is not None else None
            cells.append(f"{tokens:,} ({on_disk(plan) or 'all in memory'})" if tokens else "none of 16 M")
        lines.append(f"| `{state}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def results_table() -> str:
    """Markdown: steps of a 14B that keep results of products, beside those that make all of them again."""
    heads = ("memory", "state", "blocks", "sweeps", "in use", "computation, up, down", "tokens/s", "else", "ratio")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for unit, size, state in RESULTS_CASES:
        each = GIB if unit == "GiB" else 10**9
        told = (OTHERS["Qwen3-14B"], 65536, size * each / GIB, 0, "eager", state)
        plan, again = (on_card(*told, host_memory=(size - 5) * each, recompute=how) for how in ("auto", "all"))
        busy = ", ".join(f"{(plan.busy_s or {})[lane]:.1f}" for lane in ("device", "h2d", "d2h"))
        cells = f"{plan.placement.cheap} | {plan.sweeps} | {human(plan.peak['host'])} | {busy} of {plan.step_s:.1f} s"
        speeds = f"{plan.tokens_per_s:,.0f} | {again.tokens_per_s:,.0f} | {again.step_s / plan.step_s:.2f}"
        lines.append(f"| {size} {unit} | `{state}` | {cells} | {speeds} |")
    return "\n".join(lines)


def planned(model: dict[str, Any], memory_gib: int, copies: int = 0) -> Plan:
    """The plan for a model in bfloat16 on a machine without a GPU that has this much free memory and any disk."""
    machine = Machine("any", memory_gib * GIB, "the table", device_bytes=memory_gib * GIB, cores=8)
    asked = Wishes(ROWS, LENGTH, swap=True, keep=0, copies=copies, linkable=True, recompute="all")
    return decide(spec_of(model), machine, asked)


def spec_of(model: dict[str, Any]) -> ModelSpec:
    """Units and seats of a model in bfloat16."""
    return _spec_of(json.dumps(model))


@cache
def _spec_of(config: str) -> ModelSpec:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(config, encoding="utf-8")
        return spec_from_formula(Path(directory), "bfloat16")


def cell(plan: Plan) -> str:
    """One cell: what is on disk, and the peaks."""
    if not plan.fits:
        return "does not fit"
    memory, down = f"memory {human(plan.peak['host'], up=True)}", on_disk(plan)
    links = ", checkpoints in it" if plan.linked else ""
    return f"{down}: {memory}, swap {human(plan.peak['disk'], up=True)}{links}" if down else f"all in memory: {memory}"


def on_disk(plan: Plan) -> str:
    """Which kinds are on disk; empty where none is."""
    names = {"optimizer": "optimizer state", "activations": "saved inputs"}
    kinds = ("optimizer", "gradients", "parameters", "activations")
    down = [names.get(kind, kind) for kind in kinds if getattr(plan.placement, kind) == "disk"]
    return f"{'all four' if len(down) == 4 else ', '.join(down)} on disk" if down else ""


def machine_table() -> str:
    """Markdown: a row per size of memory, a column per model, and what checkpoints take."""
    plans = {name: [planned(model, gib) for gib in MEMORIES_GIB] for name, model in MODELS.items()}
    lines = ["| free host memory | " + " | ".join(MODELS) + " |", "|---" * (len(MODELS) + 1) + "|"]
    for row, gib in enumerate(MEMORIES_GIB):
        lines.append(f"| {gib} GiB | " + " | ".join(cell(plans[name][row]) for name in MODELS) + " |")
    kept = [human(planned(model, MEMORIES_GIB[0], copies=1).peak["checkpoint"], up=True) for model in MODELS.values()]
    lines.append("| else, under `train.output` | " + " | ".join(kept) + " |")
    return "\n".join(lines)


def zero_table() -> str:
    """Markdown: bytes a parameter that each rank keeps of a 6.7B in bfloat16, by stage and number of ranks."""
    spec, kinds = spec_of(MODELS["6.7B"]), ("parameters", "gradients", "optimizer")
    lines = ["| stage | ranks | " + " | ".join(kinds) + " | together |", "|---" * 6 + "|"]
    for stage, ranks in ((0, 1), *((stage, ranks) for stage in (1, 2, 3) for ranks in (2, 4, 8))):
        share = Share(0, ranks, stage)
        held = home_bytes(spec.shared_by(share), Placement(storage="bfloat16", share=share))["host"]
        each = [held[kind] / spec.num_elements for kind in kinds]
        cells = [f"{number:.2f}" for number in (*each, sum(each))]
        lines.append(f"| {stage} | {ranks if stage else 'any'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def step_page(text: str) -> str:
    """docs/step.md with a whole program, and with steps that hide nearly everything."""
    text = between(text, f"```\n{program_text()}\n```")
    return between(between(between(text, hidden_table(), 1), least_table(), 2), results_table(), 3)


def zero_page(text: str) -> str:
    """docs/zero.md with what each rank keeps, and with what is predicted for GPUs, as `benchmarks/ranks.py` asks it."""
    spec = spec_from_file_location("ranks", ROOT / "benchmarks" / "ranks.py")
    assert spec is not None and spec.loader is not None
    ranks = module_from_spec(spec)
    spec.loader.exec_module(ranks)
    text = between(text, zero_table())
    text = between(text, "\n".join(ranks.simulated_table(list(ranks.simulated()))), 1)
    return between(text, "\n".join(ranks.gains_table(list(ranks.gains()))), 2)


def configuration_page() -> str:
    """docs/configuration.md: every section and key with its default and meaning, and what is refused by name."""
    lines = [
        "# Configuration",
        "",
        "<!-- made by docs/make_tables.py; do not edit -->",
        "",
        "A TOML file; `section.key=value` on the command line replaces a value. Unknown keys are errors that name the",
        "nearest one, and so are the names of other trainers, with what to write here instead. Paths are relative to",
        "the directory you start in. Keys marked ● may differ from those of a checkpoint, since they never change a",
        "number of the run, but for the rounding of sums: under another kind of `device`, and where clipping is on",
        "another `zero_stage`. The others may only where `train.resume_with` names them.",
    ]
    for section, kind in SECTIONS.items():
        lines += ["", f"## [{section}]", "", (kind.__doc__ or "").strip(), "", *key_table(kind, section)]
    lines += ["", "## Entries of `optimizer.groups`", "", (GroupConfig.__doc__ or "").strip(), ""]
    lines += [f"- `{key}`: {rule.doc}" for key, rule in rules(GroupConfig).items()]
    lines += ["", "## Refused by name", "", "These values are not built, and stop a run before it starts:", ""]
    lines += [f"- {refusal}" for refusal in refusals()]
    return "\n".join(lines) + "\n"


def key_table(kind: type, section: str) -> list[str]:
    """Markdown rows of a section."""
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(kind):
        rule = RULES[section][field.name]
        meaning = f"{rule.doc} ({' | '.join(rule.choices)})" if rule.choices else rule.doc
        mark = " ●" if rule.free else ""
        lines.append(f"| `{field.name}`{mark} | `{to_toml(field.default)}` | {meaning.replace('|', PIPE)} |")
    return lines


def refusals() -> list[str]:
    """One line per key with values that are refused."""
    found = []
    for key, values, reason, instead in NOT_BUILT:
        what = " or ".join(f"`{shown(value)}`" for value in values) if values else "anything but the default"
        found.append(f"`{key}`: {what} {reason}; write {instead}")
    more = {
        "model.attention": 'anything but `"auto"`, `"eager"` and `"sdpa"`',
        "offload.device": "a device that torch does not find on this machine",
    }
    return found + [f"`{key}`: {what}" for key, what in more.items()]


def program_text() -> str:
    """The program of a steady step of two blocks; weights and optimizer state on disk, two slots a pool."""
    spec = spec_of(llama(64, 176, 2, 4, 4, 256, False))
    placement = Placement("disk", "host", "disk", "device", slots=2, storage="bfloat16")
    batch = Batch(8, 64, 8)
    found = predict(spec, placement, batch, Machine("any", GIB, "any", cores=2))
    return f"{found.program.text()}\n\n{found.timeline.table()}\n{found.timeline.gantt(80)}"


def catalogue_tables() -> str:
    """Markdown: the boxes of the catalogue, then its parts by kind, with what each figure rests on."""
    boxes = ["| box | host | GPU | drives |", "|---|---|---|---|"]
    for name in machine_names():
        told = tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
        host, gpu = told["host"], told.get("gpu", {})
        has = f"{host['memory']}, {host['cores']} cores, {host.get('ram', 'memory of its own')}"
        card = f"{gpu['model']} on {gpu['link']}" if gpu else "-"
        boxes.append(f"| `{name}` | {has} | {card} | {_drives(told)} |")
    for kind, columns in COLUMNS.items():
        boxes += ["", f"| `{kind}` | {' | '.join(columns)} | rests on |", "|---" * (len(columns) + 2) + "|"]
        for name in part_names(kind):
            found = part(kind, name, kind)
            cells = [f"{found[key].value / size:.5g}" for key, size in columns.values()]
            boxes.append(f"| `{name}` | {' | '.join(cells)} | {sources_told(found)} |")
    return "\n".join(boxes)


def _drives(told: dict[str, Any]) -> str:
    names = [drive["model"] for drive in told["drive"]]
    return f"one or two {names[0]}" if len(names) == 2 else names[0]


def between(text: str, content: str, number: int = 0) -> str:
    """`text` with what stands between its marks replaced, of several tables the one with this number."""
    found = list(re.finditer(re.escape(BEGIN) + ".*?" + re.escape(END), text, flags=re.DOTALL))
    if len(found) <= number:
        raise ValueError(f"{len(found)} times {BEGIN} ... {END} found, {number + 1} needed")
    return f"{text[: found[number].start()]}{BEGIN}\n{content}\n{END}{text[found[number].end() :]}"


def made() -> dict[Path, str]:
    """What each file should hold."""
    names, readme = ("step", "machine", "zero", "published"), ROOT / "README.md"
    step, machine, zero, published = (ROOT / "docs" / f"{name}.md" for name in names)
    return {
        readme: between(between(readme.read_text(encoding="utf-8"), machine_table()), card_table(), 1),
        published: between(published.read_text(encoding="utf-8"), published_table()),
        step: step_page(step.read_text(encoding="utf-8")),
        machine: between(machine.read_text(encoding="utf-8"), catalogue_tables()),
        zero: zero_page(zero.read_text(encoding="utf-8")),
        ROOT / "docs" / "configuration.md": configuration_page(),
    }


if __name__ == "__main__":
    for path, content in made().items():
        path.write_text(content, encoding="utf-8")
