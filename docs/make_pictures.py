"""Draw the pictures of the documentation from the code they are about.

    python docs/make_pictures.py

`timeline.svg` is a simulated step, span by span, of a small model on a made-up machine, `gpu.svg` one of blocks of a
13B on a GPU of the catalogue, `hidden.svg` whole steps of a 13B that hide nearly everything; `memory.svg` is what the
plan says of four placements of one model; `recipes.svg` the bytes of an update by recipe; `tiers.svg` and `disk.svg`
are drawn by hand, `copies.svg` by the code that chooses copies.  Plain SVG, no library.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path

from make_tables import HIDDEN_CASES, hidden_case

from offloadz.memory.copies import Copies
from offloadz.memory.tier import Extent
from offloadz.plan.catalogue import read_machine
from offloadz.plan.footprint import Batch, footprint
from offloadz.plan.headers import spec_from_formula
from offloadz.plan.machine import Machine, probe_machine
from offloadz.plan.placement import Placement
from offloadz.plan.predict import Prediction, predict
from offloadz.plan.recipes import STATES, Recipe
from offloadz.plan.spec import ModelSpec
from offloadz.plan.timeline import Span, Timeline

PICTURES = Path(__file__).parent / "pictures"
INK, FAINT, PAPER = "#24292f", "#8c959f", "#ffffff"
COLOURS = {
    "computation": "#0969da", "weights": "#57ab5a", "gradients": "#cf222e", "state and update": "#bf8700",
    "saved inputs": "#8250df",
}  # fmt: skip
KIND_OF_LETTER = {
    "w": "weights", "g": "gradients", "x": "saved inputs", "s": "state and update", "p": "state and update",
    "h": "state and update",
}  # fmt: skip
GIB = 1 << 30


def text(
    x: float, y: float, words: str, size: int = 13, colour: str = INK, anchor: str = "start", bold: bool = False
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}" text-anchor="{anchor}"{weight}>{words}</text>'


def note(x: float, y: float, words: str, colour: str = INK) -> str:
    return text(x, y, words, 12, colour, "middle")


def box(x: float, y: float, width: float, height: float, fill: str, edge: str = "", round_: int = 0) -> str:
    shape = f'<rect x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{height:g}" fill="{fill}"'
    return shape + (f' rx="{round_}"' if round_ else "") + (f' stroke="{edge}"/>' if edge else "/>")


def arrow(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return (
        f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}" stroke-width="2.5" '
        f'marker-end="url(#{colour[1:]})"/>'
    )


def picture(width: int, height: int, parts: list[str]) -> str:
    """An SVG document on white paper with an arrow head for each colour."""
    heads = "".join(
        f'<marker id="{c[1:]}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        f'orient="auto-start-reverse"><path d="M 0 0 L 10 5 L 0 10 z" fill="{c}"/></marker>'
        for c in (*COLOURS.values(), INK)
    )
    start = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="Helvetica, Arial, sans-serif"><defs>{heads}</defs>'
    )
    return "\n".join([start, box(0, 0, width, height, PAPER), *parts, "</svg>\n"])


def spec_of(hidden: int, inner: int, layers: int, heads: int, words: int) -> ModelSpec:
    """A Llama of these sizes in bfloat16."""
    shapes = {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "vocab_size": words, "tie_word_embeddings": False,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(shapes), encoding="utf-8")
        return spec_from_formula(Path(directory), "bfloat16")


# ---- the timeline ------------------------------------------------------------------------------------------------


def simulated(slots: int) -> Prediction:
    """A steady step of five blocks with everything on disk, on a machine whose lanes are nearly even."""
    rates = {
        "device": 8e12, "h2d": 4e9, "d2h": 4e9, "memory": 4e10, "cpu": 1e9, "disk_read": 6e9, "disk_write": 5e9,
    }  # fmt: skip
    machine = Machine("made up", 64 * GIB, "made up", cores=8, rates=rates)
    placement = Placement("disk", "disk", "disk", "disk", slots=slots, storage="bfloat16")
    return predict(spec_of(2048, 5632, 5, 16, 8000), placement, Batch(16, 512, 16), machine)


def colour_of(span: Span) -> str:
    verb = span.text.split()[0]
    if verb in ("forward", "backward", "scatter", "norm"):
        return COLOURS["computation"]
    letter = verb.partition(".")[2][:1]
    return COLOURS[KIND_OF_LETTER.get(letter, "state and update")]


def timeline_rows(timeline: Timeline, top: int, title: str, scale: float, left: int = 90) -> list[str]:
    """One step: a row per lane, a box per span."""
    parts = [text(8, top + 2, title, 14, bold=True)]
    lanes = [load.lane for load in timeline.loads()]
    for row, lane in enumerate(lanes):
        y = top + 14 + row * 24
        parts += [text(8, y + 14, lane, 12), box(left, y, scale * timeline.length_s, 18, "#f6f8fa")]
        for span in (s for s in timeline.spans if s.lane == lane):
            x = left + scale * (span.start_s - timeline.start_s)
            parts.append(box(x, y, max(0.6, scale * (span.end_s - span.start_s) - 0.3), 18, colour_of(span)))
    return parts


def legend(y: int) -> list[str]:
    """What each colour is."""
    parts, x = list[str](), 90
    for name, colour in COLOURS.items():
        parts += [box(x, y, 14, 14, colour), text(x + 20, y + 12, name, 12)]
        x += 60 + 7 * len(name)
    return parts


def timeline_picture() -> str:
    one, two = simulated(1), simulated(2)
    scale = 780 / one.timeline.length_s
    first = f"one slot: {one.step_s:.1f} s a step, everything that shares a slot in turn"
    second = f"two slots: {two.step_s:.1f} s a step, the next block arrives during this one"
    parts = timeline_rows(one.timeline, 22, first, scale) + timeline_rows(two.timeline, 212, second, scale)
    return picture(900, 420, parts + legend(392))


def gpu_picture() -> str:
    """A steady step of eight blocks of a 13B on the catalogue's RTX 4090, everything in host memory."""
    box_ = read_machine("rtx4090", probe_machine()).computing("bfloat16", "eager")
    placement = Placement(slots=2, unified=False, compute="bfloat16", storage="bfloat16")
    found = predict(spec_of(5120, 13824, 8, 40, 8000), placement, Batch(16, 1024, 4), box_)
    title = f"simulated: eight blocks of a 13B, 16,384 tokens: {found.step_s:.1f} s a step on an RTX 4090"
    parts = timeline_rows(found.timeline, 22, title, 780 / found.timeline.length_s)
    return picture(900, 180, parts + legend(152))


def hidden_picture() -> str:
    """Whole steps of a 13B on the catalogue's RTX 4090, those of the table in docs/step.md."""
    parts, top = list[str](), 22
    for case, wishes in HIDDEN_CASES:
        asked = hidden_case(*case, **wishes)
        found = asked.step_of(asked.answer())
        ratio = found.step_s / found.busy_s["device"]
        title = f"{case[0]} GiB, {case[1]}, {case[2]:,} tokens: {found.step_s:.1f} s, {ratio:.2f} times the computation"
        parts += timeline_rows(merged(found.timeline), top, title, 780 / found.timeline.length_s)
        top += 50 + 24 * len(found.timeline.loads())
    return picture(900, top + 8, [*parts, *legend(top - 20)])


def merged(timeline: Timeline) -> Timeline:
    """The same with spans of one colour taken together that lie closer than can be seen."""
    close_s, spans = timeline.length_s / 780 / 2, list[Span]()
    for span in sorted(timeline.spans, key=lambda span: (span.lane, span.start_s)):
        same = spans and (spans[-1].lane, colour_of(spans[-1])) == (span.lane, colour_of(span))
        if same and span.start_s - spans[-1].end_s < close_s:
            spans[-1] = replace(spans[-1], end_s=span.end_s)
        else:
            spans.append(span)
    return Timeline(tuple(spans))


# ---- the memory plan ---------------------------------------------------------------------------------------------


def memory_picture() -> str:
    """Host memory of a step of a 6.7B model, as more kinds go to disk."""
    spec = spec_of(4096, 11008, 32, 32, 32000)
    batch = Batch(16, 1024, 4)
    homes = [("host", "host", "host"), ("host", "host", "disk"), ("host", "disk", "disk"), ("disk", "disk", "disk")]
    names = ["all in memory", "optimizer state on disk", "+ gradients on disk", "+ parameters on disk"]
    colours = {"parameters": "#57ab5a", "gradients": "#cf222e", "optimizer": "#bf8700", "slots": "#0969da"}
    parts = [text(10, 24, "host memory of a step, 6.7B in bfloat16, 16 rows of 1,024 tokens", 14, bold=True)]
    for row, ((weights, grads, state), name) in enumerate(zip(homes, names, strict=True)):
        placement = Placement(weights, grads, state, "host", storage="bfloat16")
        terms = footprint(spec, placement, batch).terms["step"]["host"]
        x, y = 190.0, 44 + row * 40
        parts.append(text(10, y + 18, name, 13))
        for kind, colour in [*colours.items(), ("the rest", FAINT)]:
            nbytes = sum(n for t, n in terms.items() if belongs(t) == kind)
            parts.append(box(x, y, nbytes / GIB * 5.6, 26, colour, PAPER))
            x += nbytes / GIB * 5.6
        parts.append(text(x + 8, y + 18, f"{sum(terms.values()) / GIB:.1f} GiB", 13))
    x = 190
    for kind, label in [(c, k) for k, c in colours.items()] + [(FAINT, "computation, saved inputs, interpreter")]:
        parts += [box(x, 212, 14, 14, kind), text(x + 20, 224, label, 12)]
        x += 56 + 6 * len(label)
    return picture(900, 240, parts)


def belongs(term: str) -> str:
    """The colour group of an entry of the footprint."""
    if term.startswith("slots"):
        return "slots"
    return term if term in ("parameters", "gradients", "optimizer") else "the rest"


# ---- the tiers ---------------------------------------------------------------------------------------------------


def tiers_picture() -> str:
    """How a step moves bytes between disk, memory and computation."""
    weights, grads, state, inputs = (COLOURS[k] for k in ("weights", "gradients", "state and update", "saved inputs"))
    parts = [
        box(20, 50, 200, 330, "#f6f8fa", FAINT, 8), text(120, 40, "disk (or memory)", 14, anchor="middle", bold=True),
        box(350, 50, 200, 330, "#f6f8fa", FAINT, 8), text(450, 40, "host slots", 14, anchor="middle", bold=True),
        box(680, 50, 200, 330, "#f6f8fa", FAINT, 8), text(780, 40, "computation", 14, anchor="middle", bold=True),
    ]  # fmt: skip
    rows = {"weights": (weights, 70), "saved inputs": (inputs, 150), "gradients": (grads, 230)}
    rows["optimizer state"] = (state, 310)
    for name, (colour, y) in rows.items():
        parts += [box(40, y, 160, 50, colour, round_=6), text(120, y + 30, name, 14, PAPER, "middle", bold=True)]
        for x in (370, 455):
            parts.append(box(x, y, 75, 50, PAPER, colour, 6))
    parts += [
        box(700, 70, 160, 130, COLOURS["computation"], round_=6),
        *(note(780, y, words, PAPER) for y, words in (
            (118, "one block at a time:"), (140, "forward, then backward"), (162, "with its forward again"),
        )),
        box(700, 230, 160, 50, grads, round_=6), note(780, 260, "gradient slot, fp32", PAPER),
        box(700, 310, 160, 50, state, round_=6), note(780, 340, "AdamW in C++", PAPER),
        note(450, 408, "two slots a pool are a double buffer; every arrow is an op on an in-order lane, "
             "and all lanes run at once"),
    ]  # fmt: skip
    ways = (
        (95, weights, True, "load", "fetch, widen"), (165, inputs, False, "store", "save"), (187, inputs, True, "", ""),
        (255, grads, False, "store", "drain: round, sum"), (325, state, True, "load", "update"),
        (347, state, False, "", ""),
    )  # fmt: skip
    for y, colour, inward, left, right in ways:
        for (x1, x2), words in (((202, 366), left), ((534, 696), right)):
            parts += [
                arrow(x1 if inward else x2, y, x2 if inward else x1, y, colour),
                note((x1 + x2) / 2, y - 8, words),
            ]
    return picture(900, 424, parts)


# ---- one transfer ------------------------------------------------------------------------------------------------


def disk_picture() -> str:
    """One read by io_uring: requests under way, and the caller that hands them in and sums what has come."""
    moving, summing = COLOURS["weights"], COLOURS["state and update"]
    num_requests, depth, start, each, sums = 12, 4, 150, 52, 15
    ends = [start + each * (i + 1.6) for i in range(num_requests)]
    left = [num_requests - i for i in range(num_requests)]
    beside = [max(0, min(depth - 1, 3 * n - 4)) for n in left]  # as csrc/io_uring.cpp has it
    begins = [ends[i - beside[i] - 1] + 4 if i > beside[i] else start + 4.0 * i for i in range(num_requests)]
    parts = [text(20, 24, "one call: read 48 MiB into a slot, four requests of 4 MiB under way", 14, bold=True)]
    for way in range(depth):
        parts.append(text(20, 66 + 30 * way, f"under way {way + 1}", 12))
    for i, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        y = 50 + 30 * (i % depth)
        parts += [box(begin, y, end - begin, 22, moving, PAPER, 3), note((begin + end) / 2, y + 16, str(i + 1), PAPER)]
        parts.append(box(end + 4, 178, sums, 22, summing, PAPER, 3))
    parts += [
        text(20, 194, "caller: sums", 12),
        text(start, 230, "a request that ends is replaced first and summed then, so the drive never waits for a sum;",
             12, FAINT),
        text(start, 248, "of what is left at most three quarters are under way, so only the last sum stands alone.",
             12, FAINT),
    ]  # fmt: skip
    return picture(900, 266, parts)


def recipe_picture() -> str:
    """Bytes that an AdamW update of one bf16 parameter reads and writes, per recipe."""
    start, scale = 110, 24
    parts = [text(20, 24, "bytes an update moves for each parameter, every one once", 14, bold=True)]
    for row, state in enumerate(STATES):
        recipe, y, x = Recipe(state), 44 + 34 * row, float(start)
        pieces = [("gradient", 2.0, COLOURS["gradients"]), ("weight in, out", 4.0, COLOURS["weights"])]
        pieces += [("low half in, out", 2.0 * recipe.low_item_bytes("bfloat16"), COLOURS["computation"])]
        each = (recipe.moved_bytes("bfloat16") - sum(size for _, size, _ in pieces)) / 2
        pieces += [("m in, out", each, COLOURS["state and update"]), ("v in, out", each, COLOURS["saved inputs"])]
        parts.append(text(20, y + 17, state, 13, bold=True))
        for name, size, colour in pieces:
            if size:
                parts += [box(x, y, size * scale, 24, colour, PAPER, 3)]
                parts += [note(x + size * scale / 2, y + 16, name, PAPER)] if size >= 4 else []
                x += size * scale
        moved = recipe.moved_bytes("bfloat16")
        gain = Recipe("fp32").moved_bytes("bfloat16") / moved
        parts.append(
            text(x + 8, y + 17, f"{moved:.3g}" + (f" (limit {gain:.2f} x fp32)" if gain > 1 else ""), 12, FAINT)
        )
    return picture(820, 186, parts)


def copies_picture() -> str:
    """Three steps over three copies of one extent, with a checkpoint after the first; by the code that chooses them."""
    copies, extent = Copies(3), Extent("state/weights.bin", 0, 4096, "a part")
    copies.add(extent)
    parts = [text(20, 24, "three copies of every extent: one valid, one written beside it, one held", 14, bold=True)]
    parts += [note(250 + 190 * copy, 50, f"weights.{copy}.bin", FAINT) for copy in range(3)]
    live, kept, y = -1, -1, 62
    for step in (1, 2, 3):
        written = copies.to_write(extent)
        parts += _copies_row(y, f"step {step} is stored", live, kept, written)
        copies.flip()
        live, y = written, y + 36
        parts += _copies_row(y, f"flip: step {step} is valid", live, kept)
        y += 36
        if step == 1:
            copies.pins[Path("checkpoint")], kept = copies.choice(), written
            parts += _copies_row(y, "checkpoint of step 1", live, kept)
            y += 36
    parts.append(text(20, y + 16, "A kill in any row leaves what is green; the checkpoint is a hard link.", 12, FAINT))
    return picture(740, y + 32, parts)


def _copies_row(y: int, title: str, live: int, kept: int, written: int = -1) -> list[str]:
    parts = [text(20, y + 20, title, 12)]
    for copy in range(3):
        names = [name for name, of in (("valid", live), ("held by the checkpoint", kept)) if of == copy]
        names += ["being written"] if copy == written else []
        colour = COLOURS["weights"] if copy == live else COLOURS["computation"] if copy == kept else ""
        colour = COLOURS["state and update"] if copy == written else colour
        parts.append(box(160 + 190 * copy, y, 180, 30, colour or PAPER, INK if colour else FAINT, 3))
        parts.append(note(250 + 190 * copy, y + 20, ", ".join(names) or "free", PAPER if colour else FAINT))
    return parts


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    drawn = {"timeline": timeline_picture(), "memory": memory_picture(), "tiers": tiers_picture()}
    drawn |= {
        "hidden": hidden_picture(),
        "gpu": gpu_picture(),
        "disk": disk_picture(),
        "recipes": recipe_picture(),
        "copies": copies_picture(),
    }
    for name, svg in drawn.items():
        (PICTURES / f"{name}.svg").write_text(svg, encoding="utf-8")
