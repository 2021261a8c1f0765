import pytest
import torch

from cute_ep.compare import assert_bits, assert_prefix_and_poison


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.uint32])
def test_bits_reports_first_difference_and_count(dtype):
    expected = torch.arange(24).reshape(2, 3, 4).to(dtype)
    actual = expected.clone()
    assert_bits(actual, expected, "t")
    actual[1, 0, 2] = 3
    actual[1, 2, 3] = 3
    with pytest.raises(AssertionError, match=r"t\[1, 0, 2\].*2 of 24 elements differ"):
        assert_bits(actual, expected, "t")


def test_bits_sees_signed_zero_and_nan_payload():
    assert_bits(torch.tensor([torch.nan]), torch.tensor([torch.nan]), "t")
    with pytest.raises(AssertionError, match=r"0x8000 .*0x0000"):
        assert_bits(torch.tensor(-0.0, dtype=torch.bfloat16), torch.tensor(0.0, dtype=torch.bfloat16), "t")
    nans = torch.tensor([0x7FFF, 0x7FC0], dtype=torch.int16).view(torch.bfloat16)
    with pytest.raises(AssertionError, match=r"0x7fff .*0x7fc0"):
        assert_bits(nans[0], nans[1], "t")


@pytest.mark.parametrize("other", [torch.zeros(2, 1), torch.zeros(2, dtype=torch.float64), torch.zeros(3)])
def test_bits_compares_shape_and_type(other):
    with pytest.raises(AssertionError, match=r"t: is .*expected"):
        assert_bits(torch.zeros(2), other, "t")


@pytest.mark.parametrize("shape", [(4,), (4, 3), (4, 3, 2)])
@pytest.mark.parametrize("rows", [0, 2, 4])
def test_poison(shape, rows):
    actual = torch.full(shape, 0xA5A5A5A5 - (1 << 32), dtype=torch.int32)
    expected = torch.ones(rows, *shape[1:], dtype=torch.int32)
    actual[:rows] = 1
    assert_prefix_and_poison(actual, expected, 0xA5, "t")
    with pytest.raises(AssertionError):
        assert_prefix_and_poison(actual, torch.ones(5, *shape[1:], dtype=torch.int32), 0xA5, "t")
    if rows:
        actual[rows - 1] = 2
        with pytest.raises(AssertionError, match=f"t.{rows - 1}"):
            assert_prefix_and_poison(actual, expected, 0xA5, "t")
        actual[rows - 1] = 1
    if rows < 4:
        actual.view(torch.uint8).view(-1)[-1] = 0xA4
        with pytest.raises(AssertionError, match=r"t\[3\] byte .*0xa4.*1 of the"):
            assert_prefix_and_poison(actual, expected, 0xA5, "t")
