"""What the native engine relies on: with these widths and pieces, a row has the same bits in any company."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from posttrain.engine.models.language_model import float32_logits
from posttrain.engine.rollout.page_attention import padded_width, weigh

WIDEST = 1104
SHAPES = [
    (16, 1),
    (64, 7),
    (12, 2),
    *(pytest.param(*one, marks=pytest.mark.slow) for one in ((8, 2), (32, 2), (64, 1), (128, 4))),
]


@pytest.mark.parametrize(("head_dim", "queries"), SHAPES)
def test_attention_over_more_masked_positions_has_the_same_bits(head_dim: int, queries: int) -> None:
    generator = torch.Generator().manual_seed(head_dim)
    keys, values = torch.randn(2, 24, WIDEST, head_dim, generator=generator)
    asked = torch.randn(24, queries, head_dim, generator=generator)

    def attend(count: int, seen: int, width: int) -> torch.Tensor:
        scores = torch.bmm(asked[:count], keys[:count, :width].transpose(1, 2))
        scores[:, :, seen:] = float("-inf")
        return weigh(scores.softmax(-1), values[:count, :width])

    for seen in [*range(1, 140), 191, 192, 193, 200, 255, 256, 257, 384, 385, 500, 768, 769, 1000]:
        widest = attend(24, seen, WIDEST)
        for rows in (1, 2, 5, 24):
            assert torch.equal(attend(rows, seen, padded_width(seen)), widest[:rows]), (seen, rows)
            assert torch.equal(attend(rows, seen, padded_width(seen + 33)), widest[:rows]), (seen, rows)


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


@pytest.mark.parametrize(("vocabulary", "hidden"), [(61, 32), (5000, 64)])
def test_logits_of_bfloat16_weights_are_added_up_and_told_in_float32(
    vocabulary: int, hidden: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against float64, within the rounding of a float32 sum; told in bfloat16 they would be 0.06 off."""
    monkeypatch.setattr("posttrain.engine.models.language_model._BLOCK", 1000 * hidden)
    generator = torch.Generator().manual_seed(vocabulary)
    head = torch.randn(vocabulary, hidden, generator=generator).bfloat16()
    states = torch.randn(17, hidden, generator=generator).bfloat16()
    wanted = states.double() @ head.double().t()
    found = float32_logits(states, head)
    assert found.dtype == torch.float32
    assert float((found - wanted).abs().max()) < 1e-5
    assert float((F.linear(states, head) - wanted).abs().max()) > 0.02


def test_wider_logits_are_one_product() -> None:
    head, states = torch.randn(61, 32), torch.randn(17, 32)
    assert torch.equal(float32_logits(states, head), F.linear(states, head))
    assert float32_logits(states.double(), head.double()).dtype == torch.float64


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_logits_on_cuda_are_those_of_the_cpu() -> None:
    head, states = torch.randn(5000, 64).bfloat16(), torch.randn(17, 64).bfloat16()
    found = float32_logits(states.cuda(), head.cuda())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.cpu(), float32_logits(states, head), atol=1e-4, rtol=0)
