"""What processors and memory do: products of a block's shapes, updates, and copies, alone and together.

Copies are made as the lanes of a run make them: bfloat16 weights are widened on their way to where a block computes,
gradients rounded on their way home, each on one thread.  The trade-off: `products` are those of a forward pass alone;
norms, attention and what autograd adds are in `blocks.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from offloadz.bench.rounds import Sizes, seconds
from offloadz.bench.update import Update
from offloadz.memory.host import HostPool
from offloadz.runtime import native
from offloadz.runtime.devices import Device

COPY_FLOATS = 1 << 20
"""A copy beside an update is stopped between pieces of this length."""
Rate = Callable[[], float]


def products(dtype: torch.dtype, sizes: Sizes) -> Rate:
    """Flop/s of tokens times the matrices of a block: one of attention, up and down of the feed-forward.

    A processor without instructions for bfloat16 can take a thousand times as long: rows are added while time is left.
    """
    shapes = [(sizes.hidden, sizes.hidden), (sizes.inner, sizes.hidden), (sizes.hidden, sizes.inner)]
    weights = [torch.randn(shape).mul_(0.02).to(dtype) for shape in shapes]
    inputs = {width: torch.randn(sizes.tokens, width).to(dtype) for width in (sizes.hidden, sizes.inner)}

    def multiply(tokens: int) -> None:
        for weight in weights:
            torch.nn.functional.linear(inputs[weight.shape[1]][:tokens], weight)

    tokens = 1
    while tokens < sizes.tokens and 2 * seconds(partial(multiply, tokens)) < sizes.product_s:
        tokens = min(2 * tokens, sizes.tokens)
    flops = 2 * tokens * sum(weight.numel() for weight in weights)
    return lambda: flops / seconds(partial(multiply, tokens))


def in_place(nbytes: int, device: Device | None = None) -> Rate:
    """Bytes/s that a multiplication in place reads and writes in memory, on all of torch's threads; in the memory of a
    `device` where one is given."""
    array = _floats(nbytes) if device is None else torch.ones(nbytes // 4, device=device.torch)

    def work() -> None:
        array.mul_(1.0001)
        if device is not None:
            device.ask(array[:1])

    return lambda: 2 * nbytes / seconds(work)


def fetching(nbytes: int) -> Rate:
    """Bytes/s of weights on their way to a block, as a plan counts them: one byte read and one written for each.

    Widening `n` bytes reads them and writes two for each, 1.5 times what a copy of them moves.
    """
    source, out = _floats(nbytes).view(torch.bfloat16), _floats(2 * nbytes)
    return lambda: 1.5 * nbytes / seconds(lambda: native.widen_(out, source))


def draining(nbytes: int) -> Rate:
    """Bytes/s of gradients on their way home, in bytes of their bfloat16 form."""
    grad, out = _floats(2 * nbytes), _floats(nbytes).view(torch.bfloat16)
    return lambda: nbytes / seconds(lambda: native.drain_(out, grad))


def together(update: Update, nbytes: int) -> Rate:
    """Bytes/s that an update and copies beside it read and write in memory."""
    pieces = list(zip(_floats(nbytes).split(COPY_FLOATS), _floats(nbytes).split(COPY_FLOATS), strict=True))

    def copy(stop: threading.Event) -> int:
        """Copies until told to stop; bytes copied."""
        done = 0
        for to, of in cycle(pieces):
            if stop.is_set():
                break
            native.copy_(to, of)
            done += to.nbytes
        return done

    def both() -> float:
        stop = threading.Event()
        with ThreadPoolExecutor(1) as other:
            try:
                copying = other.submit(copy, stop)
                took_s = seconds(update)
            finally:
                stop.set()
            return (update.moved_bytes + 2 * copying.result()) / took_s

    return both


def _floats(nbytes: int) -> Tensor:
    """Float32 ones on huge pages; the memory goes with the tensor."""
    return HostPool(nbytes).take("floats", nbytes).view(torch.float32).fill_(1.0)
