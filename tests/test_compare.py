"""`extops.compare`."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import extops
from extops import comparing
from operators import by_device


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(5, 7, batch_first=True)
        self.cell = nn.GRUCell(7, 6)

    def forward(self, input: Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        output, states = self.layer(scale * input)
        return {"last": self.cell(output[:, -1]), "states": states}


@by_device
@pytest.mark.parametrize("way", ["torch", "extops"])
def test_a_model(way: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXTOPS_CHOICES", way)
    model = Model().to(device)
    before, attributes = copy.deepcopy(model.state_dict()), set(vars(model.layer))
    found = extops.compare(model, torch.randn(3, 4, 5, device=device), seconds=0.1, scale=2.0)
    assert [(name, served) for name, served, _ in found.layers] == [
        (f"{name}, {work}", way) for work in ("forward", "training") for name in ("layer", "cell")
    ]
    for work in found.works:
        assert {len(samples) for samples in work.samples.values()} == {len(work.ratios("extops"))}
        assert list(work.samples) == ["torch", "torch again", "extops"]
        assert (work.difference == 0) if way == "torch" else (0 < work.difference < 1e-2)
        assert set(work.memory) == ({"torch", "extops"} if device == "cuda" else set())
    text = str(found)
    assert re.search(rf"^cell, training +by {way} ", text, re.M), text
    assert re.search(r"^forward  torch again .* times as fast \(", text, re.M), text
    assert re.search(r"^training extops .* differs by \S+ of the largest", text, re.M), text
    # The model is as it was.
    assert type(model.layer) is nn.LSTM and set(vars(model.layer)) == attributes
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(x.grad is None for x in model.parameters())


def test_a_model_without_parameters_that_want_gradients() -> None:
    model = nn.Sequential(nn.Linear(3, 2)).requires_grad_(False)
    with pytest.warns(UserWarning, match="found no LSTM"):
        found = extops.compare(model, torch.randn(4, 3), seconds=0.0)
    assert [work.name for work in found.works] == ["forward"]
    assert "no call of a recurrent layer" in str(found)


def test_something_else() -> None:
    with pytest.raises(
        TypeError, match=r"^compare: expected `model` to be a torch.nn.Module, but got str$"
    ):
        extops.compare("model")  # type: ignore[arg-type]


def test_a_model_whose_results_want_no_gradients() -> None:
    class Argmax(Model):
        def forward(self, input: Tensor, *, scale: float = 1.0) -> Any:
            return super().forward(input, scale=scale)["last"].argmax(-1)

    found = extops.compare(Argmax(), torch.randn(3, 4, 5), seconds=0.0)
    assert [work.name for work in found.works] == ["forward"]


def test_the_users_random_numbers_stay_what_they_were() -> None:
    model = Model()
    before = torch.get_rng_state()
    extops.compare(model, torch.zeros(3, 4, 5), seconds=0.0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("ours", "said"), [(10.0, True), (5.0, False), (20.0, False)])
def test_what_is_noise_is_said(ours: float, said: bool) -> None:
    """What lies within what torch's own calls differ by."""
    samples = {"torch": [10.0] * 3, "torch again": [9.0, 10.0, 11.0], "extops": [ours] * 3}
    found = comparing.Comparison("CPU", [], [comparing.Work("forward", samples, {}, 0.0)])
    (line,) = (x for x in str(found).splitlines() if x.startswith("forward  extops"))
    assert (", within the noise; differs by" in line) == said
