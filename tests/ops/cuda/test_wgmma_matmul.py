"""How the CUDA C++ kernel cuts a product, and where it is offered. The kernel itself needs a GPU: tests/gpu."""

from __future__ import annotations

import re

import pytest
import torch

from exactrl.contract import LinearShape
from exactrl.ops.cuda import nvrtc, wgmma_matmul
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
            rows = -(-m // row_tiles)
            assert rows <= (cut.wide(rows) if cut.swap else 64)
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


def test_one_row_tile_has_stages_of_two_lengths() -> None:
    """Long ones where few rows wait for the chain of products, short ones where x fills much of a stage."""
    narrow = [cut for cut in cuts(LinearShape(2560, 9728)) if cut.columns == one_wave(2560, 1)]
    assert {cut.chunks for cut in narrow} == {2, 4}
    assert {cut.chunks for cut in cuts(LinearShape(2560, 9600)) if cut.columns == 24} == {2}, "K in whole stages only"


def test_the_list_of_implementations_names_every_cut_once() -> None:
    names = [str(cut) for cut in every_cut()]
    assert len(set(names)) == len(names)
    assert {cut for shape in SHAPES for cut in cuts(shape)} <= set(every_cut())


@pytest.mark.parametrize("row_tiles", [1, 2])
@pytest.mark.parametrize("rows", [1, 8, 33, 64, 88])
def test_stages_and_what_is_read_beyond_the_last_fit_into_shared_memory(rows: int, row_tiles: int) -> None:
    for cut in (cut for cut in every_cut() if cut.swap or rows <= 64):
        padded_rows = cut.padded(rows, row_tiles)
        depth = stages(cut, padded_rows)
        stage = cut.chunks * (padded_rows + cut.columns) * 128
        assert padded_rows % 8 == 0
        assert padded_rows >= rows
        assert depth >= 3, cut  # one being multiplied, one being released, one on its way
        # barriers, alignment, the ring, and 64 rows read from where the last stage's x, or w for a warpgroup, begins
        last_x = depth * stage - stage + (cut.chunks - 1) * padded_rows * 128
        last_w = depth * stage - (cut.columns - 64 * (cut.warpgroups - 1)) * 128
        assert 1024 + 1024 + max(depth * stage, (last_w if cut.swap else last_x) + 64 * 128) <= nvrtc.MAX_SHARED, cut


@pytest.mark.parametrize(("n", "widths"), [(5120, {120, 128}), (4096, {96, 128}), (2560, {64}), (1024, set())])
def test_weights_are_swapped_where_they_fill_their_side_of_the_matrix_unit(n: int, widths: set[int]) -> None:
    assert {cut.columns for cut in cuts(LinearShape(n, 8192)) if cut.swap} == widths


@pytest.mark.parametrize(("m", "wide"), [(1, 40), (120, 40), (121, 48), (144, 48), (145, 56), (200, 72), (256, 88)])
def test_swapped_tiles_multiply_no_eight_rows_of_x_that_are_not_there(m: int, wide: int) -> None:
    cut = Cut(120, swap=True)
    row_tiles, _ = tiles(cut, m, 5120)
    rows = -(-m // row_tiles)
    assert (cut.wide(rows), cut.padded(rows, row_tiles)) == (wide, wide)


def test_the_instruction_names_as_many_registers_as_a_thread_has_accumulators() -> None:
    for cut, wide in ((Cut(40, 2), 40), (Cut(120, swap=True), 72)):
        text = source(cut, wide, "float")
        assert f"m64n{wide}k16" in text
        (registers,) = re.findall(rf"bf16\.bf16 \{{([^}}]*)\}}, %{wide // 2}, %{wide // 2 + 1}", text)
        assert registers.split(", ") == [f"%{i}" for i in range(wide // 2)]
        assert text.count('"+f"(acc[') - text.count('"+f"(acc[i])') == wide // 2
        assert f"#define WIDE {wide}\n" in text
        assert f"#define SWAP {int(cut.swap)}\n" in text
        assert f"#define WARPGROUPS {cut.warpgroups}\n" in text


class Launched:
    """Stands in for the kernel and for tensor maps: what is launched, and the boxes it copies."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capturing: bool = False) -> None:
        monkeypatch.setattr(wgmma_matmul, "_kernel", lambda *of: self)
        monkeypatch.setattr(nvrtc, "tensor_map", lambda t, shape, strides, box: (shape, box))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)

    def launch(self, grid, threads, arguments, cluster, early) -> None:
        self.x_map, self.w_map, _, *sizes, self.settled = arguments
        names = ("m", "n", "steps", "rows", "x_rows", "padded_rows", "row_tiles", "stages")
        self.sizes, self.early = dict(zip(names, sizes, strict=True)), early


@pytest.mark.parametrize("shape", [LinearShape(2560, 1024), LinearShape(6144, 512), LinearShape(1024, 512)], ids=str)
def test_a_stage_is_one_copy_of_each_and_begins_where_the_swizzle_does(shape: LinearShape, monkeypatch) -> None:
    launched, tried = Launched(monkeypatch), 0
    w = torch.zeros(shape.n, shape.k, dtype=torch.bfloat16)
    for m in (1, 7, 64, 65, 130, 200, 256):
        x = torch.zeros(m, shape.k, dtype=torch.bfloat16)
        for cut in (cut for cut in cuts(shape) if fits(cut, shape, m)):
            wgmma_matmul.matmul(x, w, torch.bfloat16, 1, cut)
            sizes, (_, x_box), (_, w_box) = launched.sizes, launched.x_map, launched.w_map
            assert x_box == (64, sizes["x_rows"], cut.chunks)
            assert w_box == (64, cut.columns, cut.chunks)
            assert sizes["steps"] * cut.chunks * 64 == shape.k
            assert sizes["rows"] <= sizes["x_rows"] <= sizes["padded_rows"]
            if cut.chunks > 1:  # the kernel finds chunk c of x at c times the padded rows, in whole groups of eight
                assert sizes["x_rows"] == sizes["padded_rows"]
                assert sizes["x_rows"] % 8 == cut.columns % 8 == 0
            tried += 1
    assert tried > 20


@pytest.mark.parametrize("capturing", [False, True])
@pytest.mark.parametrize("m", [1, 64, 65, 128, 129, 256])
def test_weights_are_fetched_early_in_graphs_only_and_by_single_row_tiles(m: int, capturing: bool, monkeypatch) -> None:
    """Outside a graph a kernel under way may be writing them; row tiles that share weights had better stay together."""
    launched = Launched(monkeypatch, capturing)
    x, w = torch.zeros(m, 512, dtype=torch.bfloat16), torch.zeros(2560, 512, dtype=torch.bfloat16)
    y = wgmma_matmul.matmul(x, w, torch.bfloat16, 1, Cut(80, 2))
    assert y.shape == (m, 2560)
    row_tiles = -(-m // 64)
    assert launched.sizes["row_tiles"] == row_tiles
    assert launched.early is (capturing and row_tiles <= 2)
    assert launched.settled == int(capturing and row_tiles == 1)


def test_only_weights_are_copied_before_the_kernels_before_are_done() -> None:
    """Of the one thread that waits; the others write only after what it copies has come."""
    text = source(Cut(24, 4), 24, "bfloat16")
    loader, multipliers = text[text.index("if (warpgroup == WARPGROUPS)") :].split("} else {", 1)
    before, after = loader.split("griddepcontrol.wait", 1)
    assert "&x_map" not in before
    assert "&w_map" in before
    assert re.search(r"copy<false>\([^;]*&x_map", after)
    start = text[text.index("wgmma_matmul(const") : text.index("if (warpgroup == WARPGROUPS)")]
    assert set(re.findall(r"[xw]_map|\by\b", start.split(") {", 1)[1])) == {"x_map", "w_map"}
    assert start.count("prefetch.tensormap") == 2
    assert start.count("_map") == 2 + 2, "as parameters, and to have their descriptors fetched"
    assert "wait(full" in multipliers.split("store(", 1)[0]


def test_without_a_gpu_none_is_offered() -> None:
    pytest.importorskip("triton")
    from exactrl.ops.cuda.matmul import implementations

    if not nvrtc.available():
        assert not [name for name in implementations() if name.startswith("cuda:")]
