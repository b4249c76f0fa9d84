"""Kill a run with SIGKILL at many random moments, each time start it again, and compare with a run nobody killed.

    python benchmarks/kills.py CONFIG.toml [--kills 50] [--seed 0] [--json]

The configuration must save in between (`train.save_every`); its output is replaced by directories beside it that end in
`-whole` and `-killed`, which must not exist.  Reported: kills, the most steps that were done and told of and had to be
done again, how often a start went on from the state on disk, and whether weights, moments and metrics are equal in the
end.  Times of the kills are drawn over six tenths of the undisturbed run; where
a run comes to its end before it is killed, the kills that are left go to a new one.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TIMES = {"step_s", "busy_s", "wait_s", "bottleneck", "bytes", "tokens_per_s", "predicted_step_s"}


def start(config: str, output: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "offloadz", "train", config, f"train.output={output}"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def numbers(output: Path) -> list[dict[str, Any]]:
    path = output / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    whole = [json.loads(line) for line in lines if line.endswith("\n")]
    return [{k: v for k, v in line.items() if k not in TIMES} for line in whole]


def same_checkpoints(one: Path, other: Path) -> bool:
    """Whether the newest checkpoints of two runs hold the same bits, whatever their form."""
    import torch

    from offloadz.model.linked import open_tensors
    from offloadz.model.manifest import read_manifest

    newest = [max((output / "checkpoints").glob("step-??????")) for output in (one, other)]
    a, b = (open_tensors(path, read_manifest(path)) for path in newest)
    with a as mine, b as theirs:
        return all(
            held.entries.keys() == wanted.entries.keys()
            and all(torch.equal(held.read(name), wanted.read(name)) for name in held.entries)
            for held, wanted in zip(mine, theirs, strict=True)
        )


def kill_once(config: str, output: Path, after_s: float) -> tuple[int, int, bool] | None:
    """Steps done before this start, the step it went on from, and whether that was state on disk; None where it ended
    before the kill."""
    before = max((line["step"] for line in numbers(output)), default=0)
    process = start(config, output)
    time.sleep(after_s)
    if process.poll() is not None:
        log = process.communicate()[0]
        if process.returncode:
            sys.exit(f"the run ended by itself with {process.returncode}:\n{log}")
        return None
    process.kill()
    log = process.communicate()[0]
    found = re.search(r"resume: \S+, step (\d+) of", log)
    resumed = int(found[1]) if found else before if "step " not in log else 0
    return before, resumed, "going on from the state on disk" in log


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("config")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    from offloadz.config import load_config

    settings = load_config(given.config, training=True)
    base = Path(settings.train.output)
    whole, killed = (base.with_name(base.name + end) for end in ("-whole", "-killed"))
    began_s = time.monotonic()
    process = start(given.config, whole)
    log = process.communicate()[0]
    if process.returncode:
        sys.exit(log)
    length_s, source, lost, num_kills = time.monotonic() - began_s, random.Random(given.seed), [], 0
    num_flips = 0
    while num_kills < given.kills:
        went = kill_once(given.config, killed, source.uniform(0, 0.6 * length_s))
        if went is None:  # it came to its end before the kill: the kills that are left go to a run from the beginning
            shutil.rmtree(killed)
            continue
        num_kills += 1
        lost.append(went[0] - went[1])
        num_flips += went[2]
    process = start(given.config, killed)
    log = process.communicate()[0]
    if process.returncode:
        sys.exit(log)
    files = [p.relative_to(whole) for p in (whole / "final").rglob("*.safetensors")]
    swaps = [p for swap in settings.offload.swap for p in Path(swap).glob("offloadz-*")]
    told = {
        "kills": num_kills,
        "most_steps_lost": max(lost, default=0),
        "from_state_on_disk": num_flips,
        "checkpoints_equal": same_checkpoints(whole, killed),
        "files_equal": all((whole / p).read_bytes() == (killed / p).read_bytes() for p in files),
        "metrics_equal": numbers(whole) == numbers(killed),
        "leftovers": [str(p) for p in [*killed.rglob("*.tmp-*"), *swaps]],
        "whole_run_s": length_s,
    }
    print(json.dumps(told) if given.json else "\n".join(f"{key}: {value}" for key, value in told.items()))


if __name__ == "__main__":
    main()
