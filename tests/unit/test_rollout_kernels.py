"""What the native engine relies on: with these widths and pieces, a row has the same bits in any company."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from posttrain.engine.rollout.row_products import padded_width, weigh

WIDEST = 1104
SHAPES = [(8, 2), (16, 1), (32, 2), (64, 1), (64, 7), (128, 4), (12, 2)]


@pytest.mark.parametrize(("head_dim", "queries"), SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 5, 24])
def test_attention_over_more_masked_positions_has_the_same_bits(head_dim: int, queries: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(head_dim)
    keys, values = torch.randn(2, 24, WIDEST, head_dim, generator=generator)
    asked = torch.randn(24, queries, head_dim, generator=generator)

    def attend(count: int, seen: int, width: int) -> torch.Tensor:
        scores = torch.bmm(asked[:count], keys[:count, :width].transpose(1, 2))
        scores[:, :, seen:] = float("-inf")
        return weigh(scores.softmax(-1), values[:count, :width])

    for seen in [*range(1, 140), 191, 192, 193, 200, 255, 256, 257, 384, 385, 500, 768, 769, 1000]:
        widest = attend(24, seen, WIDEST)[:rows]
        assert torch.equal(attend(rows, seen, padded_width(seen)), widest), seen
        assert torch.equal(attend(rows, seen, padded_width(seen + 33)), widest), seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), [(32, 61), (64, 384), (128, 512), (384, 128), (896, 1152)])
def test_products_of_sixteen_rows_or_more_have_the_same_bits(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(inputs)
    matrix = torch.randn(outputs, inputs, generator=generator).to(dtype)
    x = torch.randn(200, inputs, generator=generator).to(dtype)
    whole = F.linear(x, matrix)
    for rows in range(16, 200):
        assert torch.equal(F.linear(x[-rows:], matrix), whole[-rows:]), rows


def test_widths_grow_in_steps() -> None:
    assert [padded_width(n) for n in (1, 32, 33, 48, 49, 128, 129)] == [32, 32, 48, 48, 64, 128, 160]
