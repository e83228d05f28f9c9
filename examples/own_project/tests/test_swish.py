"""The tests of the wheel; with `--require-gpu` none may be skipped."""

import own_project
import pytest
import torch

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_swish(device, dtype):
    x = torch.linspace(-5, 5, 1001, device=device, dtype=dtype)
    torch.testing.assert_close(own_project.swish(x), torch.nn.functional.silu(x))
