"""What PyTorch's tools do with modules: move, copy, save, clip and parametrise them."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import extops
import extops.reference
from operators import LLTM, Tensors, by_device, by_dtype

Make = Callable[..., nn.Module]


def bidirectional_layers(features: int, state: int, **options: object) -> extops.LLTMLayer:
    return extops.LLTMLayer(features, state, num_layers=2, bidirectional=True, **options)


by_module = pytest.mark.parametrize(
    "make", [extops.LLTM, bidirectional_layers], ids=["LLTM", "LLTMLayer"]
)


def run(module: nn.Module, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensors:
    """All results of a module of 5 features and a state of 4, always for the same inputs."""
    generator = torch.Generator().manual_seed(0)
    input, h, c = (
        torch.randn(3, size, generator=generator).to(device, dtype) for size in (5, 4, 4)
    )
    if isinstance(module, extops.LLTMLayer):
        output, (h_n, c_n) = module(input.unsqueeze(1))
        return output, h_n, c_n
    return tuple(module(input, (h, c)))


def gradients(module: nn.Module, results: Tensors) -> list[Tensor]:
    loss = torch.stack([(result**2).sum() for result in results]).sum()
    return list(torch.autograd.grad(loss, list(module.parameters())))


@by_dtype
@by_device
@by_module
def test_device_and_dtype(make: Make, device: str, dtype: torch.dtype) -> None:
    made = make(5, 4, device=device, dtype=dtype)
    moved = make(5, 4).to(device, dtype)
    for module in (made, moved):
        results = run(module, device, dtype)
        for tensor in (*module.parameters(), *results, *gradients(module, results)):
            assert tensor.device.type == device and tensor.dtype == dtype


@by_device
@by_module
def test_moved_after_use(make: Make, device: str) -> None:
    """To another dtype, device and back: the values stay those of the parameters."""
    module = make(5, 4)
    expected = run(module)
    gradients(module, expected)
    module.to(device).double()
    torch.testing.assert_close(
        [result.float().cpu() for result in run(module, device, torch.float64)], list(expected)
    )
    torch.testing.assert_close(run(module.float().cpu()), expected)


@by_module
def test_copies(make: Make) -> None:
    module = make(5, 4)
    expected = run(module)
    gradients(module, expected)
    saved = io.BytesIO()
    torch.save(module, saved)
    saved.seek(0)
    for twin in (
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        torch.load(saved, weights_only=False),
    ):
        assert type(twin) is type(module)
        torch.testing.assert_close(run(twin), expected, rtol=0, atol=0)
        for theirs, ours in zip(twin.parameters(), module.parameters(), strict=True):
            assert theirs.requires_grad and theirs.data_ptr() != ours.data_ptr()


@by_module
def test_state_dicts(make: Make) -> None:
    """Saved as plain tensors, and refused where a name or a size does not fit."""
    module, twin = make(5, 4), make(5, 4)
    saved = io.BytesIO()
    torch.save(module.state_dict(), saved)
    saved.seek(0)
    state = torch.load(saved, weights_only=True)
    twin.load_state_dict(state)
    torch.testing.assert_close(run(twin), run(module), rtol=0, atol=0)
    name = next(iter(state))
    with pytest.raises(RuntimeError, match=f"(?s)Missing key.*{name}"):
        twin.load_state_dict({key: value for key, value in state.items() if key != name})
    with pytest.raises(RuntimeError, match=f"(?s)size mismatch for {name}"):
        make(6, 4).load_state_dict(state)


@by_device
@pytest.mark.filterwarnings("error::torch.jit.TracerWarning")
def test_trace(device: str) -> None:
    """A traced module serves other sizes and has gradients, before it was saved and after."""
    module = extops.LLTM(5, 4, device=device)
    product = torch.jit.trace(extops.elementwise_mult, (torch.randn(3, 4, device=device),) * 2)
    traced = torch.jit.trace(
        module, (torch.randn(3, 5, device=device), (torch.zeros(3, 4, device=device),) * 2)
    )
    saved = io.BytesIO()
    torch.jit.save(traced, saved)
    saved.seek(0)
    input, *state = (torch.randn(7, size, device=device) for size in (5, 4, 4))
    results = module(input, state)
    for twin in (traced, torch.jit.load(saved)):
        found = twin(input, tuple(state))
        torch.testing.assert_close(found, results)
        torch.testing.assert_close(gradients(twin, found), gradients(module, module(input, state)))
    assert torch.equal(product(*state), state[0] * state[1])


@pytest.mark.parametrize("name", ["LLTM", "LLTMLayer", "LSTM", "GRU", "LSTMCell", "GRUCell"])
def test_script_is_refused(name: str) -> None:
    model = nn.Sequential(getattr(extops, name)(5, 4))
    with pytest.raises(RuntimeError, match=rf"^{name}: torch.jit.script .*; use torch.jit.trace"):
        torch.jit.script(model)


@by_device
@by_module
def test_parameters_as_one_vector(make: Make, device: str) -> None:
    module, twin = make(5, 4, device=device), make(5, 4, device=device)
    vector = nn.utils.parameters_to_vector(module.parameters())
    nn.utils.vector_to_parameters(vector.detach(), twin.parameters())
    torch.testing.assert_close(run(twin, device), run(module, device))


CLIPS: dict[str, Callable[[nn.Module], object]] = {
    "norm": lambda module: nn.utils.clip_grad_norm_(module.parameters(), 0.5),
    "value": lambda module: nn.utils.clip_grad_value_(module.parameters(), 0.02),
    "none": lambda module: None,
}


@by_device
@pytest.mark.parametrize("weight_limit", [None, 0.3], ids=["free", "clipped_weights"])
@pytest.mark.parametrize("clip", CLIPS)
def test_training(clip: str, weight_limit: float | None, device: str) -> None:
    """Steps of an optimiser, gradients or weights clipped, end where the reference's end."""
    ours = extops.LLTM(5, 4, device=device, dtype=torch.float64)
    theirs = extops.reference.LLTM(5, 4, device=device, dtype=torch.float64)
    theirs.load_state_dict(ours.state_dict())
    input, _, _, h, c = LLTM.inputs("small", device)
    losses: list[float] = []
    for module in (ours, theirs):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(10):
            results = module(input, module(input, (h, c)))
            loss = torch.stack([(result**2).sum() for result in results]).sum()
            optimizer.zero_grad()
            loss.backward()
            CLIPS[clip](module)
            optimizer.step()
            if weight_limit is not None:
                with torch.no_grad():
                    for parameter in module.parameters():
                        parameter.clamp_(-weight_limit, weight_limit)
            losses.append(loss.item())
    assert losses[9] < losses[0]
    assert losses[:10] == pytest.approx(losses[10:], rel=1e-10)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


@by_device
@pytest.mark.parametrize(
    "normalise",
    [parametrizations.weight_norm, parametrizations.spectral_norm],
    ids=lambda it: it.__name__.strip("_"),
)
def test_parametrised_weights(normalise: Callable[..., nn.Module], device: str) -> None:
    """Weights that are computed at each call; the gradients reach what they are computed from."""
    found = []
    ours = normalise(extops.LLTM(5, 4, device=device, dtype=torch.float64), "weights").eval()
    theirs = normalise(extops.reference.LLTM(5, 4, device=device, dtype=torch.float64), "weights")
    theirs.eval().load_state_dict(ours.state_dict())
    for module in (ours, theirs):
        results = run(module, device, torch.float64)
        found.append([*results, *gradients(module, results)])
    assert len(found[0]) >= 4
    torch.testing.assert_close(*found)
