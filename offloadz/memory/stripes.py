"""One extent over several swap paths: how many of its bytes lie on each, and moving all its shares at once.

Each path holds one contiguous *share* of every extent, in whole pieces, as large as its weight says.  Not a round robin
of small stripes: lanes move whole extents, and a contiguous share is one transfer with its requests in order, while a
stripe of a few MiB would be a call of its own.  A share is an extent itself, in a file whose name says the path, so
what lies below (copies, records, links) knows no stripes.  Left to others: the files, and where the weights are kept
(`layout.json`: they are stored with the state and never measured again).  The trade-off: rows read from one place of a
table come from one path, and an extent below `SMALL_BYTES` lies whole on the path whose turn it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

from offloadz.memory.tier import PIECE_BYTES

SMALL_BYTES = 8 * PIECE_BYTES  # two requests: less does not keep two drives busy
WEIGHT_SUM = 1000


def file_on(path: int, file: str) -> str:
    """The name of a file's part on the swap path with this number: `state/weights.bin`, 1 -> `state/weights@1.bin`."""
    stem, _, end = file.rpartition(".")
    return f"{stem}@{path}.{end}" if path else file


def path_of(file: str) -> int:
    """The number of the swap path that a file lies on, copies (`state/weights@1.0.bin`) too."""
    return int(file.partition("@")[2].partition(".")[0] or 0)


def weights_of(speeds: Sequence[tuple[float, float]], most: Sequence[float] = ()) -> tuple[int, ...]:
    """Whole weights with the sum 1000 from (read, write) bytes per second of each path.

    A step reads a share and writes it back, so the time per byte is the sum of both; every path gets at least 1.
    `most`: the largest weight that each path has room for; what one cannot take goes to the others by their speed.
    """
    if not speeds or any(read <= 0 or write <= 0 for read, write in speeds):
        raise ValueError(f"speeds of swap paths are {list(speeds)}; each needs a read and a write rate above 0")
    if most and (sum(most) < WEIGHT_SUM or min(most) < 1):
        raise ValueError(f"weights of swap paths are at most {list(most)}; each needs 1 and all together {WEIGHT_SUM}")
    exact = _limited([1 / (1 / read + 1 / write) for read, write in speeds], most or [WEIGHT_SUM] * len(speeds))
    weights = [max(1, int(share)) for share in exact]
    for _ in range(WEIGHT_SUM - sum(weights)):
        worst = max(range(len(exact)), key=lambda i: exact[i] - weights[i])
        weights[worst] += 1
    while sum(weights) > WEIGHT_SUM:
        weights[weights.index(max(weights))] -= 1
    return tuple(weights)


def _limited(rates: Sequence[float], most: Sequence[float]) -> list[float]:
    """Shares of `WEIGHT_SUM` by `rates`, none above its `most`."""
    found, left, free = [0.0] * len(rates), float(WEIGHT_SUM), set(range(len(rates)))
    while free:
        total = sum(rates[i] for i in free)
        full = {i for i in free if left * rates[i] / total > most[i]}
        for i in full or free:
            found[i] = float(most[i]) if full else left * rates[i] / total
        left -= sum(found[i] for i in full)
        free = free - full if full else set()
    return found


def shares(nbytes: int, weights: Sequence[int], turn: int = 0) -> tuple[int, ...]:
    """Bytes of an extent of `nbytes` per path, in the order of the paths; their sum is `nbytes`.

    All but the last share that is not empty are whole pieces.  `turn` counts extents: small ones take turns, and
    borders are rounded up as often as is right, so that paths fill up by their weights.
    """
    if nbytes < 0 or not weights or min(weights) < 0 or not sum(weights):
        raise ValueError(f"shares of {nbytes} bytes by weights {tuple(weights)}: weights of 0 or more, not all 0")
    if nbytes < SMALL_BYTES:
        chosen = _whose_turn(weights, turn)
        return tuple(nbytes if i == chosen else 0 for i in range(len(weights)))
    num_pieces, total, phase = -(-nbytes // PIECE_BYTES), sum(weights), _phase(weights, turn)
    wanted = [num_pieces * sum(weights[: i + 1]) + phase for i in range(len(weights))]
    borders = [min(nbytes, pieces // total * PIECE_BYTES) for pieces in wanted]
    return tuple(end - start for start, end in zip([0, *borders], borders, strict=False))


def _whose_turn(weights: Sequence[int], turn: int) -> int:
    """Turns by weight: of any `sum(weights)` turns in a row, each path has its weight's number, spread evenly."""
    at = _phase(weights, turn)
    for i, weight in enumerate(weights):
        if at < weight:
            return i
        at -= weight
    raise AssertionError("the weights sum to more than the turn")


def _phase(weights: Sequence[int], turn: int) -> int:
    total = sum(weights)
    # 617 is prime to 1000 and near the golden share of it: neighbours land far apart.
    return turn * (617 if total == WEIGHT_SUM else 1) % total


class Together:
    """Runs the shares of one transfer at the same time: one on the calling thread, the others on threads of its own.

    `num_callers` transfers may be under way at once without waiting for one another.
    """

    def __init__(self, num_paths: int, num_callers: int = 2) -> None:
        num_threads = (num_paths - 1) * num_callers
        self._threads = ThreadPoolExecutor(num_threads, "share") if num_threads else None

    def run(self, moves: Sequence[Callable[[], None]]) -> None:
        """Do all of `moves`; when this returns or raises (the first move's error in their order), none is under way."""
        if not moves:
            return
        others = [self._threads.submit(move) for move in moves[1:]] if self._threads else []
        try:
            moves[0]()
            for move in [] if self._threads else moves[1:]:
                move()
        finally:
            wait(others)
        for other in others:
            other.result()

    def close(self) -> None:
        """End the threads; a second call does nothing."""
        if self._threads:
            self._threads.shutdown()
