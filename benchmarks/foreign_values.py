"""Compares a value of each foreign wheel's CUDA kernels with plain torch in float64; a line for each wheel.

    python -m benchmarks.foreign_values FOLDER [--device cpu]   # of wheels for this Python and torch

The file also runs by itself, beside wheels, where the rest of this repository is not: FOLDER is then its own.
Each wheel gets a folder and a process of its own, so that one that fails does not stop the others. Nothing is
installed: what a wheel requires must be there. Where `OUT` names a folder, records of the runs are left there,
for `python -m benchmarks.foreign --add`.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Tensors = tuple[Tensor, ...]
Draw = Callable[..., Tensor]


@dataclass(frozen=True)
class Value:
    """What a wheel computed, and what is right."""

    what: str
    computed: Tensors
    expected: Tensors
    tolerance: float = 1e-4
    """How far a value may be off, as a part of the largest one of its tensor."""

    def differences(self) -> list[float]:
        """The largest difference in each tensor, as a part of the largest value."""
        found = []
        for computed, expected in zip(self.computed, self.expected, strict=True):
            assert computed.shape == expected.shape, f"{computed.shape}, not {expected.shape}"
            most = expected.double().abs().max().item()
            off = (computed.double() - expected.double()).abs().nan_to_num(nan=float("inf"))
            found.append(off.max().item() / (most or 1))
        return found


def weights_of(value: Tensor) -> Tensor:
    """Those of the sum whose gradients are compared, in float64."""
    weights = torch.linspace(0.5, 1.5, value.numel(), dtype=torch.float64, device=value.device)
    return weights.view(value.shape)


def with_gradients(function: Callable[..., Tensor], *given: Tensor) -> Tensors:
    """The value of a function, and the gradients of a weighted sum of it."""
    given = tuple(each.detach().requires_grad_() for each in given)
    value = function(*given)
    total = (value.double() * weights_of(value)).sum()
    return (value.detach(), *torch.autograd.grad(total, given))


def compare(
    what: str,
    ours: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    *given: Tensor,
    tolerance: float = 1e-4,
) -> Value:
    """The value and the gradients by a wheel, and by plain torch in float64."""
    expected = with_gradients(reference, *(each.double() for each in given))
    return Value(
        f"{what} and gradients", with_gradients(ours, *given), expected, tolerance=tolerance
    )


def beamgrad(draw: Draw) -> Value:
    """The best scores of sequences, where each step keeps the best four so far."""
    package = importlib.import_module("beamgrad")

    def reference(steps: Tensor) -> Tensor:
        best = steps[:, 0, 0].topk(4).values
        for t in range(1, steps.shape[1]):
            best = (best[:, :, None] + steps[:, t]).flatten(1).topk(4).values
        return best

    options = package.BeamOptions(beam_size=4)
    return compare(
        "scores", lambda x: package.final_scores(x, options), reference, draw(3, 7, 4, 50)
    )


def causal_conv1d(draw: Draw) -> Value:
    """A causal convolution of each channel, and SiLU."""
    package = importlib.import_module("causal_conv1d")

    def reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.silu(F.conv1d(F.pad(x, (3, 0)), weight[:, None], bias, groups=weight.shape[0]))

    def ours(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return package.causal_conv1d_fn(x, weight, bias, activation="silu")

    return compare("convolution", ours, reference, draw(2, 64, 100), draw(64, 4), draw(64))


def chamferdist(draw: Draw) -> Value:
    """The sum of squared distances to the nearest point."""
    package = importlib.import_module("chamferdist")

    def reference(x: Tensor, y: Tensor) -> Tensor:
        return (x[:, :, None] - y[:, None]).square().sum(-1).amin(-1).sum(-1).mean()

    return compare(
        "distance", package.ChamferDistance(), reference, draw(2, 200, 3), draw(2, 150, 3)
    )


def clic_inference_extensions(draw: Draw) -> Value:
    """A block of convolutions, whose bias, activation and depthwise convolution are one kernel."""
    package = importlib.import_module("clic_inference_extensions._C")
    shapes = [(16, 16, 1, 1), (16,), (16, 1, 3, 3), (16,), (16, 16, 1, 1), (16,)]
    shapes += [(32, 16, 1, 1), (32,), (16, 16, 1, 1), (16,)]
    x, *weights = draw(1, 16, 40, 36), *(draw(*shape) / 4 for shape in shapes)

    def activation(x: Tensor) -> Tensor:
        return x * (4 * x).sigmoid()

    def reference(x: Tensor, *weights: Tensor) -> Tensor:
        first, depthwise, second, third, fourth = zip(weights[::2], weights[1::2], strict=True)
        inner = activation(F.conv2d(x, *first))
        x = x + F.conv2d(F.conv2d(inner, *depthwise, padding=1, groups=16), *second)
        return x + F.conv2d(activation(F.conv2d(x, *third)).view(1, 2, 16, 40, 36).sum(1), *fourth)

    block = package.DepthConvProxy()
    with torch.backends.cudnn.flags(enabled=False):  # which would multiply in TF32
        block.set_param(*weights, False)
        computed = block.forward(x)
    expected = reference(*(each.double() for each in (x, *weights)))
    return Value("block of convolutions", (computed,), (expected,))


def dcnv4(draw: Draw) -> Value:
    """A deformable convolution without its weights: a weighted sum of nine interpolated values."""
    package = importlib.import_module("DCNv4.ext")
    size, groups, channels, points = 8, 4, 16, 9
    x, offsets, masks = (
        draw(1, size, size, groups * channels),
        draw(size * size, groups, points, 2),
        draw(size * size, groups, points),
    )
    packed = torch.cat([offsets.flatten(2), masks], dim=2).flatten(1)
    packed = F.pad(packed, (0, -packed.shape[1] % 8)).view(1, size, size, -1).contiguous()
    computed = package.dcnv4_forward(
        x, packed, 3, 3, 1, 1, 1, 1, 1, 1, groups, channels, 1.0, 256, 0, 8, 64, False
    )
    column, row = torch.meshgrid(torch.arange(3), torch.arange(3), indexing="ij")
    taps = torch.stack([column, row], dim=-1).view(1, 1, points, 2).to(offsets) - 1
    y, x_of = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    pixels = torch.stack([x_of, y], dim=-1).view(-1, 1, 1, 2).to(offsets)
    places = (pixels + taps + offsets).double().transpose(0, 1)  # group, pixel, point, (x, y)
    images = x.double().view(size, size, groups, channels).permute(2, 3, 0, 1)
    sampled = F.grid_sample(images, (2 * places + 1) / size - 1, align_corners=False)
    expected = torch.einsum("gcqk,qgk->qgc", sampled, masks.double()).reshape(x.shape)
    return Value("deformable convolution", (computed,), (expected,))


def diso(draw: Draw) -> Value:
    """Vertices of a surface, where a grid's edges change sign, summed: their order is left open."""
    package = importlib.import_module("diso")
    size = 16
    lines = torch.linspace(-1, 1, size, dtype=torch.float64)
    x, y, z = torch.meshgrid(lines, lines, lines, indexing="ij")
    grid = (x - 0.1).square() + 1.5 * (y + 0.07).square() + 2 * z.square() - 0.4
    weights = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)

    def reference(grid: Tensor) -> Tensor:
        total = grid.new_zeros(2)
        places = torch.cartesian_prod(*3 * [torch.arange(size)]).view(size, size, size, 3)
        for axis in range(3):
            a, b = grid.narrow(axis, 0, size - 1), grid.narrow(axis, 1, size - 1)
            crossed = a * b < 0
            vertices = places.narrow(axis, 0, size - 1)[crossed.cpu()].to(grid)
            step = torch.zeros_like(vertices)
            step[:, axis] = 1
            vertices = vertices + (a[crossed] / (a[crossed] - b[crossed]))[:, None] * step
            total = total + torch.stack(
                [(vertices / (size - 1) @ weights.to(grid)).sum(), crossed.sum()]
            )
        return total

    def ours(grid: Tensor) -> Tensor:
        vertices = package.DiffMC(dtype=torch.float32)(grid)[0]
        return torch.stack(
            [(vertices @ weights.to(vertices)).sum(), vertices.new_tensor(len(vertices))]
        )

    return compare("vertices of a surface", ours, reference, grid.to(draw(1)), tolerance=1e-3)


def fpscan(draw: Draw) -> Value:
    """A sum that is multiplied by a gate before each step."""
    package = importlib.import_module("fpscan")

    def reference(gates: Tensor, tokens: Tensor) -> Tensor:
        state, steps = torch.zeros_like(tokens[..., 0]), []
        for gate, token in zip(gates.unbind(-1), tokens.unbind(-1), strict=True):
            state = gate * state + token
            steps.append(state)
        return torch.stack(steps, dim=-1)

    given = draw(2, 3, 256).sigmoid(), draw(2, 3, 256)
    return compare("scan", package.pscan, reference, *given)


def fused_ssim(draw: Draw) -> Value:
    """The similarity of two images, by means, variances and covariance under a Gaussian window."""
    package = importlib.import_module("fused_ssim")
    window = torch.exp(-(torch.arange(-5, 6, dtype=torch.float64).square()) / (2 * 1.5**2))
    window = (window[:, None] * window / window.sum().square()).expand(3, 1, 11, 11)

    def reference(x: Tensor, y: Tensor) -> Tensor:
        def mean(values: Tensor) -> Tensor:
            return F.conv2d(values, window.to(values), padding=5, groups=3)

        of_x, of_y = mean(x), mean(y)
        variances = mean(x * x) - of_x.square(), mean(y * y) - of_y.square()
        both = mean(x * y) - of_x * of_y
        above = (2 * of_x * of_y + 0.01**2) * (2 * both + 0.03**2)
        return (
            above / (of_x.square() + of_y.square() + 0.01**2) / (sum(variances) + 0.03**2)
        ).mean()

    x, y = draw(2, 3, 40, 50).sigmoid(), draw(2, 3, 40, 50).sigmoid()
    return compare(
        "similarity",
        lambda x: package.fused_ssim(x, y),
        lambda x: reference(x, y.double()),
        x,
        tolerance=1e-3,
    )


def gsplat(draw: Draw) -> Value:
    """Covariances of Gaussians, from quaternions and scales."""
    folder = importlib.util.find_spec("gsplat").submodule_search_locations[0]
    spec = importlib.util.spec_from_file_location("csrc", Path(folder) / "csrc.so")
    package = importlib.util.module_from_spec(spec)  # without what the rest of gsplat requires
    spec.loader.exec_module(package)
    given = draw(100, 4), draw(100, 3).abs()

    def reference(quaternions: Tensor, scales: Tensor) -> Tensor:
        w, *v = F.normalize(quaternions, dim=-1)[..., None, None].unbind(-3)
        zero = torch.zeros_like(w)
        rows = (zero, -v[2], v[1]), (v[2], zero, -v[0]), (-v[1], v[0], zero)
        cross = torch.cat([torch.cat(row, dim=-1) for row in rows], dim=-2)
        rotation = torch.eye(3, device=w.device) + 2 * w * cross + 2 * cross @ cross
        half = rotation * scales[:, None]
        return half @ half.mT

    covariances, _ = package.quat_scale_to_covar_preci_fwd(*given, True, False, False)
    weights = weights_of(covariances).float()
    gradients = package.quat_scale_to_covar_preci_bwd(*given, False, weights, None)
    expected = with_gradients(reference, *(each.double() for each in given))
    return Value("covariances and gradients", (covariances, *gradients), expected)


def inplace_abn(draw: Draw) -> Value:
    """Batch normalization and a leaky rectifier."""
    package = importlib.import_module("inplace_abn.functions")

    def reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.leaky_relu(
            F.batch_norm(x, None, None, weight.abs() + 1e-5, bias, training=True), 0.01
        )

    def ours(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        statistics = x.new_zeros(16), x.new_ones(16)
        return package.inplace_abn(x * 1, weight, bias, *statistics)

    return compare(
        "normalization",
        ours,
        reference,
        draw(4, 16, 9, 9),
        draw(16).abs() + 0.5,
        draw(16),
        tolerance=1e-3,
    )


def lanms_pytorch(draw: Draw) -> Value:
    """Quadrangles that overlap, merged to the mean of their corners by their scores."""
    package = importlib.import_module("lanms")
    square = torch.tensor([0.0, 0, 4, 0, 4, 4, 0, 4])
    shifts = torch.arange(6).repeat_interleave(5)[:, None] * 10.0
    quads = (square + shifts + 0.2 * draw(30, 8).tanh().cpu()).double()
    scores = draw(30, 1).sigmoid().cpu().double()
    computed = package.merge_quadrangle_n9(torch.cat([quads, scores], dim=1))
    sums = scores.view(6, 5, 1).sum(1)
    means = (quads * scores).view(6, 5, 8).sum(1) / sums
    expected = torch.cat([means, sums], dim=1)
    return Value("merged quadrangles", (computed[computed[:, 0].argsort()],), (expected,))


def mamba_ssm(draw: Draw) -> Value:
    """A selective scan."""
    package = importlib.import_module("selective_scan_cuda")
    u, delta, a = draw(2, 16, 64), draw(2, 16, 64).sigmoid(), -draw(16, 8).exp()
    given = u, delta, a, draw(2, 1, 8, 64), draw(2, 1, 8, 64), draw(16)

    def reference(u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        state, steps = u.new_zeros(2, 16, 8), []
        for t in range(u.shape[2]):
            step = delta[..., t, None]
            state = state * (step * a).exp() + step * b[..., t] * u[..., t, None]
            steps.append((state * c[..., t]).sum(-1))
        return torch.stack(steps, dim=-1) + u * d[:, None]

    output, states, *_ = package.fwd(*given, None, None, False)
    weights = weights_of(output).float()
    *gradients, _ = package.bwd(*given, None, None, weights, states, None, None, False, False)
    expected = with_gradients(reference, *(each.double() for each in given))
    return Value("scan and gradients", (output, *gradients[:6]), expected)


def pointnet2_ops(draw: Draw) -> Value:
    """Distances to the three nearest points, and what is interpolated between those."""
    package = importlib.import_module("pointnet2_ops.pointnet2_utils")
    points, known, features = draw(2, 100, 3), draw(2, 60, 3), draw(2, 8, 60)
    distances, indices = package.three_nn(points, known)
    weights = distances.softmax(-1)

    def reference(features: Tensor) -> Tensor:
        nearest = indices.long()[:, None].expand(-1, 8, -1, -1).flatten(2)
        return (features.gather(2, nearest).view(2, 8, 100, 3) * weights[:, None].double()).sum(-1)

    found = compare(
        "interpolation, distances,",
        lambda x: package.three_interpolate(x, indices, weights),
        reference,
        features,
    )
    expected = torch.cdist(points.double(), known.double()).topk(3, largest=False).values
    return Value(found.what, (*found.computed, distances), (*found.expected, expected))


def quad_iou(draw: Draw) -> Value:
    """The part of two rectangles that they share."""
    package = importlib.import_module("quad_iou")
    low = 0.5 * draw(2, 20, 2)
    high = low + draw(2, 20, 2).abs() + 0.5
    left, bottom, right, top = *low.unbind(-1), *high.unbind(-1)
    corners = [(left, bottom), (right, bottom), (right, top), (left, top)]
    turn = torch.tensor([[0.8, 0.6], [-0.6, 0.8]]).to(low)
    quads = torch.stack([torch.stack(each, dim=-1) for each in corners], dim=2) @ turn
    low, high = low.double(), high.double()
    sides = torch.minimum(high[0, :, None], high[1]) - torch.maximum(low[0, :, None], low[1])
    shared = sides.clamp(min=0).prod(-1)
    areas = (high - low).prod(-1)
    expected = shared / (areas[0][:, None] + areas[1] - shared)
    computed = package.calculate_iou(quads[0].contiguous(), quads[1].contiguous())
    return Value("shared part", (computed,), (expected,), tolerance=1e-3)


def rotary_emb(draw: Draw) -> Value:
    """Pairs of values that are rotated."""
    package = importlib.import_module("rotary_emb")
    x, y, angle = draw(3, 64, 8, 16), draw(3, 64, 8, 16), draw(64, 1, 16)
    cos, sin = (each.expand(64, 8, 16).expand_as(x) for each in (angle.cos(), angle.sin()))
    computed = torch.empty_like(x), torch.empty_like(y)
    package.apply_rotary(x, y, cos, sin, *computed, False)
    x, y, cos, sin = (each.double() for each in (x, y, cos, sin))
    return Value("rotation", computed, (x * cos - y * sin, x * sin + y * cos))


def simple_knn(draw: Draw) -> Value:
    """The mean of the squared distances to the three nearest other points."""
    package = importlib.import_module("simple_knn._C")
    points = draw(1000, 3)
    squares = (points.double()[:, None] - points.double()).square().sum(-1)
    expected = squares.topk(4, largest=False).values[:, 1:].mean(-1)
    return Value("mean of squared distances", (package.distCUDA2(points),), (expected,))


def spatial_correlation_sampler(draw: Draw) -> Value:
    """Products of pixels and of the neighbors of their likes."""
    package = importlib.import_module("spatial_correlation_sampler")

    def reference(x: Tensor, y: Tensor) -> Tensor:
        around = F.pad(y, (1, 1, 1, 1))
        rows = [
            [(x * around[:, :, i : i + 10, j : j + 12]).sum(1) for j in range(3)] for i in range(3)
        ]
        return torch.stack([torch.stack(row, dim=1) for row in rows], dim=1)

    return compare(
        "correlation",
        lambda x, y: package.spatial_correlation_sample(x, y, patch_size=3),
        reference,
        draw(2, 5, 10, 12),
        draw(2, 5, 10, 12),
    )


def st_attn(draw: Draw) -> Value:
    """Attention whose window holds all tiles; 64 of its queries are compared."""
    package = importlib.import_module("st_attn")
    query, key, value = (draw(1, 1, 69120, 128).bfloat16() for _ in range(3))
    computed = package.sliding_tile_attention(query, key, value, [(3, 6, 10)], 0, False, "18x48x80")
    chosen = torch.arange(0, 69120, 1080, device=query.device)
    query, key, value = (each[0, 0].double() for each in (query, key, value))
    expected = (query[chosen] @ key.T / 128**0.5).softmax(-1) @ value
    return Value("attention", (computed[0, 0, chosen],), (expected,), tolerance=2e-2)


def torch_cluster(draw: Draw) -> Value:
    """Which points are nearest, by their distances."""
    folder = importlib.util.find_spec("torch_cluster").submodule_search_locations[0]
    torch.ops.load_library(Path(folder) / "_knn_cuda.so")  # without scipy, which the rest requires
    x, y = draw(200, 3), draw(50, 3)
    of_y, of_x = torch.ops.torch_cluster.knn(x, y, None, None, 4, False, 1)
    computed = (x[of_x].double() - y[of_y].double()).norm(dim=-1).view(50, 4).sort().values
    expected = torch.cdist(y.double(), x.double()).topk(4, largest=False).values
    return Value("distances of neighbors", (computed,), (expected,))


def torch_discounted_cumsum(draw: Draw) -> Value:
    """A sum in which what lies farther right counts less."""
    package = importlib.import_module("torch_discounted_cumsum")

    def reference(x: Tensor, gamma: Tensor) -> Tensor:
        n = torch.arange(x.shape[1], device=x.device)
        powers = gamma[:, None, None] ** (n - n[:, None]).clamp(min=0) * (n >= n[:, None])
        return torch.einsum("bt,bst->bs", x, powers)

    ours = package.discounted_cumsum_right
    return compare("sum", ours, reference, draw(3, 70), draw(3).sigmoid(), tolerance=1e-3)


def torch_linear_assignment(draw: Draw) -> Value:
    """The least cost of an assignment, which is found by trying all."""
    package = importlib.import_module("torch_linear_assignment")
    cost = draw(3, 5, 5)
    chosen = package.batch_linear_assignment(cost)
    computed = cost.gather(2, chosen[:, :, None]).sum((1, 2))
    orders = torch.tensor(list(itertools.permutations(range(5))), device=cost.device)
    every = cost.double()[:, torch.arange(5, device=cost.device), orders].sum(-1)
    return Value("least cost", (computed,), (every.amin(1),))


def torch_ms_deform_attn(draw: Draw) -> Value:
    """Interpolated values of two images, summed by their weights."""
    package = importlib.import_module("torch_ms_deform_attn")
    sizes = [(6, 5), (4, 3)]
    shapes = torch.tensor(sizes).to(draw(1).device)
    starts = torch.tensor([0, 30]).to(shapes)

    def reference(value: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        parts = []
        for level, (size, part) in enumerate(zip(sizes, value.split([30, 12], dim=1), strict=True)):
            images = part.permute(0, 2, 3, 1).reshape(4, 8, *size)  # batch and head, channel
            grid = 2 * places[:, :, :, level].transpose(1, 2).flatten(0, 1) - 1
            sampled = F.grid_sample(images, grid, align_corners=False).view(2, 2, 8, 7, 4)
            parts.append(torch.einsum("bmcqp,bqmp->bqmc", sampled, weights[:, :, :, level]))
        return sum(parts[1:], parts[0]).flatten(2)

    def ours(value: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        return package.ms_deform_attn(value, shapes, starts, places, weights)

    places, weights = draw(2, 7, 2, 2, 4, 2).sigmoid(), draw(2, 7, 2, 2, 4)
    return compare("attention", ours, reference, draw(2, 42, 2, 8), places, weights, tolerance=1e-3)


def torch_spline_conv(draw: Draw) -> Value:
    """A convolution whose weights are interpolated between five knots."""
    package = importlib.import_module("torch_spline_conv")
    pseudo, x, weight = draw(40, 1).sigmoid(), draw(40, 3), draw(5, 3, 6)

    def reference(x: Tensor, weight: Tensor) -> Tensor:
        place = pseudo[:, 0].double() * 4
        knot = place.floor().long().clamp(max=3)
        part = (place - knot)[:, None, None]
        between = (1 - part) * weight[knot] + part * weight[knot + 1]
        return torch.einsum("ec,eco->eo", x, between)

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        size, is_open = torch.tensor([5]).to(x.device), torch.tensor([1]).to(x.device, torch.uint8)
        return package.spline_weighting(x, weight, *package.spline_basis(pseudo, size, is_open, 1))

    return compare("convolution", ours, reference, x, weight)


def torchcompactradius(draw: Draw) -> Value:
    """Which points are near each other, by a table of cells."""
    package = importlib.import_module("torchCompactRadius")
    util = importlib.import_module("torchCompactRadius.util")
    x, y = draw(200, 2).sigmoid(), draw(300, 2).sigmoid()
    clouds = (util.PointCloud(each, torch.full_like(each[:, 0], 0.1)) for each in (x, y))
    found = package.radiusSearch(*clouds, algorithm="compact")
    computed = torch.zeros(200, 300).to(x)
    computed[found.row.long(), found.col.long()] = 1
    return Value("neighbors", (computed,), (torch.cdist(x.double(), y.double()) <= 0.1,))


def torchdtw(draw: Draw) -> Value:
    """The least cost of a way through a table, divided by its steps."""
    package = importlib.import_module("torchdtw")
    distances = draw(30, 40).abs()
    ways: dict[tuple[int, int], tuple[float, int]] = {}
    for at in itertools.product(range(30), range(40)):
        before = [(at[0] - 1, at[1]), (at[0], at[1] - 1), (at[0] - 1, at[1] - 1)]
        cost, steps = min((ways[x] for x in before if x in ways), default=(0.0, 0))
        ways[at] = cost + distances[at].item(), steps + 1
    cost, steps = ways[29, 39]
    expected = torch.tensor(cost / steps, dtype=torch.float64)
    return Value("cost", (package.dtw(distances).cpu(),), (expected,))


def torchlpc(draw: Draw) -> Value:
    """A recursive filter of order three whose coefficients change."""
    package = importlib.import_module("torchlpc")

    def reference(x: Tensor, a: Tensor, start: Tensor) -> Tensor:
        y = [*start.flip(1).unbind(1)]
        for t in range(x.shape[1]):
            y.append(x[:, t] - sum(a[:, t, i] * y[-1 - i] for i in range(3)))
        return torch.stack(y[3:], dim=1)

    coefficients = 0.3 * draw(2, 64, 3).tanh()
    return compare(
        "filter", package.sample_wise_lpc, reference, draw(2, 64), coefficients, draw(2, 3)
    )


def torchsort(draw: Draw) -> Value:
    """Ranks, which are soft by next to nothing."""
    package = importlib.import_module("torchsort")
    x = 10 * draw(3, 20)
    computed = package.soft_rank(x, regularization_strength=1e-3)
    return Value("ranks", (computed,), (x.argsort().argsort() + 1,))


def triple_walk(draw: Draw) -> Value:
    """Walks where each node has one way out, and the triples that they consist of."""
    package = importlib.import_module("triple_walk.rw")
    nodes = torch.arange(50).to(draw(1).device)
    relations, tails = 50 + nodes % 7, draw(50).argsort()
    triples = torch.stack([nodes, relations, tails], dim=1)
    ways = torch.stack([nodes, nodes], dim=1)  # the first and the last triple of each node
    walks = package.walk_triples(triples, ways, nodes, 6, 57, 0, restart=False)
    steps = [nodes]
    for _ in range(6):
        steps += [relations[steps[-1]], tails[steps[-1]]]
    targets = package.to_windows_triples_sg(walks, 2, 57, 57, triples, 0)[0]
    expected = torch.stack(steps, dim=1)
    return Value("walks", (walks, targets), (expected, expected.unfold(1, 3, 2).flatten(0, 1)))


CHECKS = {
    name: each
    for name, each in globals().items()
    if getattr(each, "__annotations__", {}).get("draw") == "Draw"
}


def check(name: str, device: str) -> dict[str, Any]:
    """What a wheel that can be imported computes, and whether it is right."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    value = CHECKS[name](draw)
    difference = max(value.differences())
    return {"what": value.what, "difference": difference, "right": difference <= value.tolerance}


def check_wheel(wheel: Path, name: str, device: str) -> dict[str, Any]:
    """The same of a wheel in a folder and a process of its own; where it fails, the end of its error."""
    if name not in CHECKS:
        return {"what": "there is no check of it", "right": False}
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
        alone = [sys.executable, str(Path(__file__).resolve()), f"--only={name}"]
        path = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
        for command in ([*pip, f"--target={folder}", str(wheel)], [*alone, f"--device={device}"]):
            done = subprocess.run(
                command,
                env={**os.environ, "PYTHONPATH": path},
                cwd=folder,
                capture_output=True,
                text=True,
            )
            if done.returncode:
                said = [f"exit status {done.returncode}", *done.stderr.strip().splitlines()]
                return {"what": said[-1], "right": False}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Checks the wheels of a folder."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--only", choices=sorted(CHECKS), help="one that can be imported")
    given = parser.parse_args()
    if given.only:
        print(json.dumps(check(given.only, given.device)))
        return
    device = torch.cuda.get_device_name() if given.device == "cuda" else "CPU"
    runs = []
    for wheel in sorted(given.folder.resolve().glob("*.whl")):
        name = wheel.name.partition("-")[0].lower()
        run = check_wheel(wheel, name, given.device)
        off = f", off by {run['difference']:.1e} of the largest" if "difference" in run else ""
        print(f"{name}: {run['what']}: {'right' if run['right'] else 'wrong'}{off}", flush=True)
        sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
        runs.append({"project": name, "sha256": sha256, "device": device, **run})
    if out := os.environ.get("OUT"):
        (Path(out) / "values.json").write_text(json.dumps(runs, indent=2))
    sys.exit(not runs or not all(run["right"] for run in runs))


if __name__ == "__main__":
    main()
