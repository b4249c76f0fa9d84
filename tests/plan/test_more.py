"""What 32 GiB more memory, a second drive or a cheaper format would bring: the plan of just that, in lines and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_command import config as config
from test_command import run
from test_fastest import asked, desktop, fresh, llama

import offloadz.plan.predict as predicting
from offloadz.plan.ahead import found
from offloadz.plan.beside import Queues, SharedLane, settled
from offloadz.plan.footprint import Batch
from offloadz.plan.more import More, more_of
from offloadz.plan.ops import Op, Program
from offloadz.plan.pace import program_of
from offloadz.plan.placement import Placement
from offloadz.plan.predict import step_program, training_phases
from offloadz.plan.question import Question
from offloadz.plan.recipes import STATES, Recipe
from offloadz.plan.shorter import shorter
from offloadz.plan.steps import Owed, leaves
from offloadz.plan.words import human, lasting

GIB = 1 << 30


def told(memory_gib: int, drives: int = 1, **wishes: object) -> tuple[Question, More]:
    machine = desktop(memory_gib, drives)
    question = Question(llama("13B"), machine, asked(machine, **wishes))
    return question, more_of(question, question.answer(), drives)


def test_more_is_the_plan_of_a_box_with_more() -> None:
    question, more = told(64)
    wider = Question(question.spec, desktop(96, 1), question.wishes).answer()
    assert more.host_memory is not None and more.host_memory.step_s == wider.step_s
    two = desktop(64, 2)
    rates = {lane: rate for lane, rate in two.rates.items() if lane.startswith("disk")}
    assert more.drive is not None
    known = Question(question.spec, two, replace(question.wishes, disk_free=2 * (question.wishes.disk_free or 0)))
    assert all(rate == pytest.approx(2 * question.machine.rates[lane]) for lane, rate in rates.items())
    assert more.drive.step_s == pytest.approx(known.answer().step_s)
    lines, gain = list(more.lines()), wider.tokens_per_s / more.plan.tokens_per_s - 1
    speed = f"{wider.tokens_per_s:,.0f} tokens/s (+{gain:.0%}), {lasting(wider.step_s)} a step"
    assert lines[0] == f"with 32GiB more memory: {speed}"
    assert lines[1].startswith("with a second drive: ") and not any("would bring nothing" in line for line in lines)
    assert more.to_json()["second_drive"] == {"tokens_per_s": more.drive.tokens_per_s, "step_s": more.drive.step_s}


def test_a_cheaper_format_is_the_plan_of_a_run_with_it() -> None:
    """In time, memory and wear: a state of 2 bytes a parameter may stay where one of 10 went to the drive."""
    question, more = told(64)
    cheap = replace(question, spec=question.spec.with_recipe(Recipe("int8-sr"))).answer()
    found = more.to_json()["optimizer_state"]
    assert list(found) == ["bf16", "int8", "int8-sr"] and found["int8-sr"]["step_s"] == pytest.approx(cheap.step_s)
    assert found["int8-sr"]["host_peak"] == cheap.peak["host"]
    assert found["int8-sr"]["disk_written_per_step"] == cheap.wear.written_bytes < more.plan.wear.written_bytes
    line = next(line for line in more.lines() if line.startswith('with optimizer.state = "int8-sr": '))
    assert f"{cheap.tokens_per_s:,.0f} tokens/s (+" in line and human(cheap.peak["host"]) in line
    assert told(64, micro_batch_size=2)[1].states["int8"].micro_batch_size == 2, "the batch stays as it is cut"


def test_memory_that_is_not_needed_is_said() -> None:
    _, more = told(512, recompute="all")
    spare = (more.plan.limits["host"] or 0) - more.plan.peak["host"]
    assert more.to_json()["spare_host_memory"] == spare > 200 * GIB
    assert f"{human(spare)} of the host memory that the run may use are not needed" in more.lines()
    _, tight = told(512, host_memory=more.plan.peak["host"] + GIB, recompute="all")
    assert tight.plan.step_s == more.plan.step_s and not any("not needed" in line for line in tight.lines())


def test_what_brings_nothing_is_said_in_one_line() -> None:
    _, more = told(512, 2)
    assert next(more.lines()) == "32GiB more memory or one more drive would bring nothing"


@pytest.mark.parametrize(
    ("name", "gib", "drives", "most"), [("32B", 96, 2, 24), ("32B", 192, 2, 64), ("7B", 64, 2, 84)]
)
def test_a_plan_with_what_more_would_bring_is_little_work(
    monkeypatch: pytest.MonkeyPatch, name: str, gib: int, drives: int, most: int
) -> None:
    """A few dozen short programs, each compiled once, whatever rates and formats of the state it is walked by."""
    programs, walked = list[Program](), list[int]()

    def compiled(*told: Any) -> Program:
        programs.append(program_of(*told))
        return programs[-1]

    def counted(queues: Queues, ops: Sequence[Op], *told: Any) -> dict[str, SharedLane]:
        walked.append(len(ops))
        return settled(queues, ops, *told)

    monkeypatch.setattr(predicting, "program_of", compiled)
    monkeypatch.setattr(predicting, "settled", counted)
    machine = desktop(gib, drives)
    question = Question(fresh(name), machine, asked(machine))
    more = more_of(question, question.answer(), drives)
    assert more.drive and more.host_memory and len(more.states) == 3
    assert len(walked) <= most and len(programs) <= 0.7 * most and sum(walked) <= 900 * most, (len(programs), walked)


def test_formats_of_the_state_share_their_programs() -> None:
    """One program for all, and each has what it would have if it were compiled for itself."""
    spec, batch = llama("13B"), Batch(8, 256, 2)
    places = Placement(optimizer="disk", storage="bfloat16", unified=False), Placement(commit="shadow", copies=2)
    for place in places:
        for state in STATES:
            part = shorter(spec.with_recipe(Recipe(state)))[0]
            due = tuple(range(len(part.units))) if place.commit == "hold" else ()
            left = found(leaves(part, place, training_phases(part, 1, 4)))
            alone = program_of(part, place, training_phases(part, 1, 4), Owed(due, unended=True, left=left))
            shared = step_program(part, place, batch)
            assert shared.ops == alone.ops and any(op.verb.endswith(".s") for op in shared.ops)
    assert spec.with_recipe(Recipe("int8")) is spec.with_recipe(Recipe("bf16")).with_recipe(Recipe("int8"))
    assert spec.with_recipe(Recipe("fp32")) is spec


def test_without_swap_there_is_no_second_drive() -> None:
    _, more = told(512, swap=False, disk_free=None)
    assert next(more.lines()) == "32GiB more memory would bring nothing"
    assert more.to_json()["second_drive"] is None


def test_a_limit_that_is_set_grows_too() -> None:
    _, free = told(128)
    _, set_ = told(256, host_memory=int(0.9 * 128 * GIB))
    assert free.host_memory and set_.host_memory and set_.host_memory.limits["host"] == int(0.9 * 128 * GIB) + 32 * GIB


def test_the_command_tells_it_beside_the_plan(config: Path) -> None:
    words = ("plan", str(config), "--machine", "rtx4090", "--set", "host_memory=3GiB")
    done = run(*words, "--json")
    assert done.returncode == 0, done.stderr
    more = json.loads(done.stdout)["more"]
    keys = {"host_memory_32GiB", "second_drive", "optimizer_state", "spare_host_memory"}
    assert set(more) == keys and more["host_memory_32GiB"]["step_s"] > 0
    assert "with 32GiB more memory: " in run(*words).stdout
    refused = run(*words, "offload.host_memory=600MiB", "--json")
    assert refused.returncode == 3 and not any(json.loads(refused.stdout)["more"].values())
