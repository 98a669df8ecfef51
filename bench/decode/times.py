"""`python -m bench.decode.times`: microseconds at the points of bench.attention, K and V cold, in CUDA graphs.

"<": within 1.15 of max(launch, min(FA3 with automatic splits, 1.1 x floor)). "/n": n rows differ from the reference.
"""

from __future__ import annotations

from functools import partial

import torch

from bench.attention import KV_BYTES, TARGET, decode_points, fa3_auto
from bench.attention_points import Call, Heads, Pool, copy_bandwidth, launch_seconds, paged, seconds
from bench.decode.common import Attend, different_rows, kernels
from exactrl.ops.cuda import determinism


def line(pool: Pool, name: str, lengths: list[int], bandwidth: float, launch: float) -> str:
    point, (reference, others) = paged(pool, [1] * len(lengths), lengths, 64), kernels()

    def call(attend: Attend, cache: tuple[torch.Tensor, torch.Tensor]) -> None:
        attend(point.q, *cache, point.rows, point.out, point.lse, point.sequences)

    calls: dict[str, Call] = {n: partial(call, attend) for n, attend in others.items()}
    call(reference, point.caches[0])
    right, wrong = (point.out.clone(), point.lse.clone()), {}
    for n, function in calls.items():
        point.out.fill_(torch.nan)
        function(point.caches[0])
        wrong[n] = int(different_rows(point.out, point.lse, *right).sum())
    t = seconds({**calls, **fa3_auto(point)}, point, 9)
    floor, auto = sum(lengths) * pool.shape.key_bytes / bandwidth, min(t[n] for n in t if n.startswith("fa3_auto"))
    most = TARGET * max(launch, min(auto, 1.1 * floor))
    cells = [f"{t[n] * 1e6:.1f}{'<' if t[n] <= most else ''}{f'/{wrong[n]}' if wrong[n] else ''}" for n in calls]
    return f"{name:16} {floor * 1e6:8.1f} {auto * 1e6:8.1f} {most * 1e6:8.1f}  " + "  ".join(f"{c:>9}" for c in cells)


def main() -> None:
    determinism.apply()
    pool, bandwidth, launch = (
        Pool(Heads(), KV_BYTES // Heads().key_bytes // 256 * 256),
        copy_bandwidth(),
        launch_seconds(),
    )
    print("point, floor, FA3, limit, " + ", ".join(kernels()[1]))
    for name, lengths in sorted(decode_points(), key=lambda point: sum(point[1])):
        print(line(pool, name, lengths, bandwidth, launch), flush=True)


if __name__ == "__main__":
    main()
