"""Copies between host and GPU: the engine's, chunk by chunk, against bare pinned copies; and how far they overlap.

python benchmarks/gpu_moves.py [--chunk 64MiB] [--rounds 9]
Rates are taken with events on the copies' own streams. For the overlap a matrix product of known length runs beside a
copy up and one down: the share of their time that is hidden is (compute + copies - together) / copies.
"""

import argparse
from statistics import median

import torch
from report import publish

from patrickstar.layout.sizes import format_size, parse_size
from patrickstar.memory.chunk import Chunk
from patrickstar.memory.copies import Copies
from patrickstar.memory.hardware import Hardware
from patrickstar.memory.host import HostTier


def timed_ms(work, stream: torch.cuda.Stream) -> float:
    """The time that `work` takes on a stream."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record(stream)
    work()
    end.record(stream)
    end.synchronize()
    return begin.elapsed_time(end)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunk", default="64MiB")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    device, nbytes = torch.device("cuda"), parse_size(options.chunk)
    host, copies = HostTier(2 * nbytes, 2 * nbytes, Hardware(device).slab, poison=False), Copies(device)
    up, down = (Chunk("param16", index, nbytes // 2, "bfloat16", device) for index in range(2))
    for chunk in (up, down):
        host.take(chunk).zero_()
        chunk.take_device()
    pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    bare = torch.empty(nbytes, dtype=torch.uint8, device=device)
    compute = torch.cuda.current_stream()
    matrix = torch.randn(8192, 8192, dtype=torch.bfloat16, device=device)
    assert copies.up_stream is not None and copies.down_stream is not None

    def product() -> None:
        for _ in range(4):
            torch.mm(matrix, matrix)

    def together() -> None:
        moves = (copies.up(up), copies.down(down))
        product()
        for move in moves:
            move.order()

    sides = {
        "up": lambda: timed_ms(lambda: copies.up(up), copies.up_stream),
        "bare up": lambda: timed_ms(lambda: bare.copy_(pinned, non_blocking=True), compute),
        "down": lambda: timed_ms(lambda: copies.down(down), copies.down_stream),
        "bare down": lambda: timed_ms(lambda: pinned.copy_(bare, non_blocking=True), compute),
        "compute": lambda: timed_ms(product, compute),
        "together": lambda: timed_ms(together, compute),
    }
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(options.rounds + 1):
        for name, side in sides.items():
            torch.cuda.synchronize()
            taken[name].append(side())
    ms = {name: median(times[1:]) for name, times in taken.items()}
    copying = max(ms["up"], ms["down"])
    hidden = (ms["compute"] + copying - ms["together"]) / copying
    rows = [
        [name, f"{nbytes / ours / 1e6:.1f}", f"{nbytes / bare / 1e6:.1f}", f"{bare / ours:.2f}"]
        for name, ours, bare in (("up", ms["up"], ms["bare up"]), ("down", ms["down"], ms["bare down"]))
    ]
    publish(
        "gpu_moves",
        "cuda",
        f"Chunks of {format_size(nbytes)} between the host's slab and the GPU. Beside a matrix product of "
        f"{ms['compute']:.2f} ms, a copy each way ({copying:.2f} ms) took {ms['together']:.2f} ms in all: "
        f"{100 * hidden:.0f} % of it hidden.",
        ["direction", "GB/s", "bare pinned copy, GB/s", "share"],
        rows,
    )


if __name__ == "__main__":
    main()
