"""Kill a run at random moments, start it again with the same command, and compare with a run that was left alone.

    python benchmarks/kills.py [CONFIG] [--kills 20] [--seed 0] [--work DIR] [section.key=value ...]

Every kill is SIGKILL to the process of `offloadz train`.  At the end the exported weights must be equal byte for byte,
and metrics.jsonl must hold each step once.  Exit status 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", default="examples/quickstart.toml")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", default="runs/kills")
    args = parser.parse_args()
    work = Path(args.work)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    began = time.monotonic()
    calm = start(args, work / "calm")
    if calm.wait() != 0:
        raise SystemExit("the run that was left alone failed")
    whole_s = time.monotonic() - began
    killed = hunt(args, work / "hunted", whole_s)
    report(work / "calm", work / "hunted", killed)


def start(args: argparse.Namespace, output: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "offloadz", "train", args.config, *args.overrides]
    places = [f"train.output={output}", f"offload.swap=[{json.dumps(str(output) + '-swap')}]", "train.save_every=5"]
    with open(f"{output}.log", "ab") as log:
        return subprocess.Popen([*command, *places], stdout=log, stderr=log)


def hunt(args: argparse.Namespace, output: Path, whole_s: float) -> int:
    """Kill at random moments of the whole run's length divided among the kills; then let it end."""
    dice, killed = random.Random(args.seed), 0
    while killed < args.kills:
        process = start(args, output)
        try:
            status = process.wait(timeout=dice.uniform(0.5, max(8.0, 2.5 * whole_s / args.kills)))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            killed += 1
            print(f"kill {killed}: {num_lines(output)} steps written", flush=True)
            continue
        if status != 0:
            raise SystemExit(f"the run did not go on after {killed} kills: status {status}, see {output}.log")
        print(f"finished after {killed} kills; beginning anew")
        shutil.rmtree(output)
    if start(args, output).wait() != 0:
        raise SystemExit(f"the run did not go on after {killed} kills, see {output}.log")
    return killed


def num_lines(output: Path) -> int:
    path = output / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def report(calm: Path, hunted: Path, killed: int) -> None:
    """Compare weights and metrics of both runs."""
    same = all(
        (hunted / "final" / f.name).read_bytes() == f.read_bytes() for f in (calm / "final").glob("*.safetensors")
    )
    steps = [json.loads(line)["step"] for line in (hunted / "metrics.jsonl").read_text().splitlines()]
    once = steps == sorted(set(steps)) and steps[0] == 1
    losses = [
        [json.loads(line).get("loss") for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (calm, hunted)
    ]
    equal = losses[0] == losses[1]
    print(f"{killed} kills: weights equal: {same}; each step once: {once} ({len(steps)} steps); losses equal: {equal}")
    raise SystemExit(0 if same and once and equal else 1)


if __name__ == "__main__":
    main()
