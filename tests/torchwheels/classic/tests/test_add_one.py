import classic_extension
import pytest
import torch


def test_cpu():
    assert classic_extension.add_one(torch.ones(1)).item() == 2.0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_cuda():
    x = torch.ones(3, device="cuda")
    assert classic_extension.add_one_cuda(x).tolist() == [2.0] * 3
