"""How the CUDA C++ kernel cuts a product, and where it is offered. The kernel itself needs a GPU: tests/gpu."""

from __future__ import annotations

import re

import pytest

from exactrl.contract import LinearShape
from exactrl.ops.cuda import nvrtc
from exactrl.ops.cuda.wgmma_matmul import AT_ONCE, Cut, cuts, every_cut, fits, one_wave, source, stages, tiles

SHAPES = [
    LinearShape(1024, 3072),
    LinearShape(2560, 9728),
    LinearShape(4096, 12288),
    LinearShape(5120, 25600),
    LinearShape(6144, 2560),
    LinearShape(24, 256),
]


@pytest.mark.parametrize(("n", "row_tiles", "columns"), [(2560, 1, 24), (5120, 2, 80), (5120, 4, 160), (4096, 3, 96)])
def test_the_narrowest_tile_whose_blocks_run_at_once(n: int, row_tiles: int, columns: int) -> None:
    assert one_wave(n, row_tiles) == columns
    assert -(-n // columns) * row_tiles <= AT_ONCE < -(-n // (columns - 8)) * row_tiles


def test_no_instruction_is_wide_enough_for_a_large_output_in_one_wave() -> None:
    assert one_wave(51200, 1) is None
    assert not cuts(LinearShape(151936, 5120, "float32"))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_offered_fits_the_machine_and_stays_offered_for_fewer_rows(shape: LinearShape) -> None:
    for cut in cuts(shape):
        served = [m for m in range(1, 300) if fits(cut, shape, m)]
        assert served == list(range(1, len(served) + 1)), "an implementation must serve every smaller number of rows"
        assert served[-1] <= 256, "beyond, libraries are faster and the sample is too thin"
        assert shape.k % (64 * cut.chunks) == 0
        for m in served:
            row_tiles, column_tiles = tiles(cut, m, shape.n)
            assert row_tiles % cut.tall == 0, "a pair is whole"
            assert row_tiles * column_tiles <= AT_ONCE
            assert row_tiles * cut.rows >= m
            assert column_tiles * cut.columns >= shape.n


def test_every_number_of_rows_to_256_is_served_at_long_k() -> None:
    for shape in SHAPES[1:4]:
        assert all(any(fits(cut, shape, m) for cut in cuts(shape)) for m in range(1, 257)), shape
        assert not any(fits(cut, shape, 257) for cut in cuts(shape))


@pytest.mark.parametrize(
    "shape",
    [LinearShape(2560, 9728, leaves=2), LinearShape(2561, 9728), LinearShape(2560, 9727), LinearShape(2560, 9696)],
    ids=str,
)
def test_what_the_kernel_cannot_compute_is_not_offered(shape: LinearShape) -> None:
    assert not cuts(shape)


def test_the_list_of_implementations_names_every_cut_once() -> None:
    names = [str(cut) for cut in every_cut()]
    assert len(set(names)) == len(names)
    assert {cut for shape in SHAPES for cut in cuts(shape)} <= set(every_cut())


@pytest.mark.parametrize("rows", [1, 8, 33, 64])
def test_stages_and_what_is_read_beyond_the_last_fit_into_shared_memory(rows: int) -> None:
    for cut in every_cut():
        depth, padded_rows = stages(cut, rows), cut.padded(rows)
        stage = cut.chunks * (padded_rows + cut.columns) * 128
        assert depth >= 3, cut  # one being multiplied, one being released, one on its way
        # barriers, alignment, the ring, and a tile of 64 rows read from where the last stage's x begins
        last_chunk = depth * stage - stage + (cut.chunks - 1) * padded_rows * 128
        assert 1024 + 1024 + max(depth * stage, last_chunk + 64 * 128) <= nvrtc.MAX_SHARED, cut


def test_the_instruction_names_as_many_registers_as_the_tile_has_accumulators() -> None:
    text = source(Cut(40, 2), "float")
    assert "m64n40k16" in text
    (registers,) = re.findall(r"bf16\.bf16 \{([^}]*)\}, %20, %21", text)
    assert registers.split(", ") == [f"%{i}" for i in range(20)]
    assert text.count('"+f"(acc[') - text.count('"+f"(acc[i])') == 20
    assert (
        "#define COLUMNS 40\n#define ROWS 64\n#define SWAP 0\n#define CHUNKS 2\n#define WARPGROUPS 1\n#define TALL 1\n"
        in text
    )


def test_without_a_gpu_none_is_offered() -> None:
    pytest.importorskip("triton")
    from exactrl.ops.cuda.matmul import implementations

    if not nvrtc.available():
        assert not [name for name in implementations() if name.startswith("cuda:")]
