"""`extops.accelerate` and `extops.restore`: what they change of a model. How it computes then: test_contract.py."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import extops
from operators import by_device
from test_rnn import CELLS, FEATURES, LAYERS, STATE, TIME, assert_same, by_layer, random, tensors_of


class Own(nn.LSTM):
    def forward(self, input: Any, hx: Any = None) -> Any:
        return super().forward(2 * input, hx)


class OwnCell(nn.GRUCell):
    def forward(self, input: Any, hx: Any = None) -> Any:
        return -super().forward(input, hx)


class Derived(extops.GRU):
    pass


def test_accelerate() -> None:
    """In place: the modules stay the same objects, with their parameters and hooks."""
    model = nn.ModuleDict({name: getattr(nn, name)(FEATURES, STATE) for name in LAYERS + CELLS})
    model["shared"] = model["LSTM"]
    theirs = copy.deepcopy(model)
    calls = []
    model["LSTM"].register_forward_hook(lambda *_: calls.append("hook"))
    modules, parameters = dict(model.named_modules()), list(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert extops.accelerate(model) is model
        assert extops.accelerate(model) is model
    assert dict(model.named_modules()) == modules
    assert all(x is y for x, y in zip(model.parameters(), parameters, strict=True))
    for name in LAYERS + CELLS:
        assert type(model[name]) is not getattr(nn, name)
        assert model[name].__class__ is getattr(nn, name)
        assert_same(model[name], theirs[name], torch.randn(TIME, FEATURES))
    assert calls == ["hook"]


def test_accelerate_a_layer() -> None:
    layer = nn.GRU(FEATURES, STATE)
    assert extops.accelerate(layer) is layer and type(layer) is not nn.GRU


def test_accelerate_leaves_ours_as_they_are() -> None:
    layer = extops.GRU(FEATURES, STATE)
    assert type(extops.accelerate(layer)) is extops.GRU


@pytest.mark.parametrize("model", [nn.LSTM, [nn.LSTM(FEATURES, STATE)]], ids=["class", "list"])
@pytest.mark.parametrize("function", ["accelerate", "restore"])
def test_accelerate_something_else(function: str, model: Any) -> None:
    name = type(model).__name__
    with pytest.raises(
        TypeError, match=rf"^{function}: expected `model` .*Module, but got {name}$"
    ):
        getattr(extops, function)(model)


def test_what_accelerate_says(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.ModuleDict({"encoder": nn.LSTM(FEATURES, STATE), "head": nn.Linear(STATE, 1)})
    model["cells"] = nn.ModuleList([nn.GRUCell(FEATURES, STATE)])
    with caplog.at_level("INFO", logger="extops"):
        for function in (extops.accelerate, extops.restore):
            function(model)
            function(model)
            function(model["encoder"])
    taken = "`encoder` (LSTM), `cells.0` (GRUCell)", "nothing", "nothing"
    expected = [f"extops.accelerate took: {modules}" for modules in taken]
    expected += [f"extops.restore took: {modules}" for modules in taken]
    assert caplog.messages == expected
    caplog.clear()
    extops.accelerate(nn.GRU(FEATURES, STATE))
    assert caplog.messages == []
    with caplog.at_level("INFO", logger="extops"):
        extops.accelerate(nn.GRU(FEATURES, STATE))
    assert caplog.messages == ["extops.accelerate took: the model (GRU)"]


@by_device
def test_restore(device: str) -> None:
    """In place: torch's modules again, of which nothing tells that they were ours."""
    model = nn.ModuleDict({name: getattr(nn, name)(FEATURES, STATE) for name in LAYERS + CELLS})
    model["made"] = extops.LSTM(FEATURES, STATE, num_layers=2, bidirectional=True)
    model["derived"] = derived = Derived(FEATURES, STATE)
    model["lltm"] = lltm = extops.LLTMLayer(FEATURES, STATE)
    model.double().to(device)
    theirs = copy.deepcopy(model)
    theirs["made"] = nn.LSTM(FEATURES, STATE, num_layers=2, bidirectional=True)
    theirs["made"].double().to(device).load_state_dict(model["made"].state_dict())
    calls = []
    model["LSTM"].register_forward_hook(lambda *_: calls.append("hook"))
    modules, parameters = dict(model.named_modules()), list(model.parameters())
    keys = list(model.state_dict())
    input = random(TIME, FEATURES, device=device)
    names = (*LAYERS, *CELLS, "made")
    for name in names:
        assert_same(extops.accelerate(model)[name], theirs[name], input)
    assert extops.restore(model) is model and extops.restore(model) is model
    assert dict(model.named_modules()) == modules and list(model.state_dict()) == keys
    assert all(x is y for x, y in zip(model.parameters(), parameters, strict=True))
    for name in names:
        assert type(model[name]) is type(theirs[name])
        assert vars(model[name]).keys() == vars(theirs[name]).keys()
        assert_same(model[name], theirs[name], input)
        copied = pickle.loads(pickle.dumps(theirs[name].cpu()))
        copied.load_state_dict(model[name].state_dict())
        assert_same(copied.to(device), model[name], input)
    assert calls == ["hook"] * 3
    assert type(derived) is Derived and type(lltm) is extops.LLTMLayer


@by_layer
def test_restore_after_the_parameters_changed(name: str) -> None:
    """torch's modules keep a list of them."""
    ours = extops.accelerate(getattr(nn, name)(FEATURES, STATE))
    ours.weight_hh_l0 = nn.Parameter(torch.randn_like(ours.weight_hh_l0))
    ours.bias_ih_l0.data = torch.randn_like(ours.bias_ih_l0)
    ours.double()
    input = random(TIME, FEATURES)
    expected = tensors_of(ours(input))
    torch.testing.assert_close(tensors_of(extops.restore(ours)(input)), expected)
    restored = pickle.loads(pickle.dumps(ours))
    assert type(restored) is getattr(nn, name)
    torch.testing.assert_close(tensors_of(restored(input)), expected)


def test_what_accelerate_leaves_alone() -> None:
    left = {
        "projected": (nn.LSTM(FEATURES, STATE, proj_size=2), "which has `proj_size`"),
        "other": (nn.RNNCellBase(FEATURES, STATE, True, 1), "since extops has no RNNCellBase"),
        "traced": (
            torch.jit.trace(nn.GRUCell(FEATURES, STATE), torch.ones(1, FEATURES)),
            "which torch.jit has compiled",
        ),
    }
    model = nn.ModuleDict({name: module for name, (module, _) in left.items()})
    classes = [type(module) for module in model.values()]
    with pytest.warns(UserWarning, match=r"^extops.accelerate left alone: ") as caught:
        extops.accelerate(model)
    assert [type(module) for module in model.values()] == classes
    (warning,) = caught
    for name, (_, reason) in left.items():
        assert f"`{name}`, {reason}" in str(warning.message)


@pytest.mark.parametrize("kind", [Own, OwnCell])
def test_classes_of_users(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their forward calls ours."""
    monkeypatch.setenv("EXTOPS_CHOICES", "extops")
    module = kind(FEATURES, STATE)
    theirs = copy.deepcopy(module)
    calls: list[str] = []
    ours, name = (extops.LSTM, "run_plain") if kind is Own else (extops.GRUCell, "forward")
    run = getattr(ours, name)
    monkeypatch.setattr(ours, name, lambda *x: calls.append("ours") or run(*x))
    shape = (3, FEATURES) if kind is OwnCell else (TIME, 3, FEATURES)
    assert_same(extops.accelerate(module), theirs, torch.randn(shape))
    assert calls == ["ours"]
    for copied in (copy.deepcopy(module), copy.copy(module)):
        assert type(copied) is type(module) and copied.__class__ is kind
    assert type(pickle.loads(pickle.dumps(module))) is kind
    assert type(extops.restore(module)) is kind


def test_weight_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXTOPS_CHOICES", "extops")
    layer = parametrizations.weight_norm(nn.LSTM(FEATURES, STATE), "weight_hh_l0")
    theirs = copy.deepcopy(layer)
    assert_same(extops.accelerate(layer), theirs, torch.randn(TIME, 3, FEATURES))
