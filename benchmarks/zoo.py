"""Models with recurrent layers, with random weights: those of packages, and some in the shape of well-known ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

Made = tuple[nn.Module, tuple[Any, ...]]
"""A model and its inputs."""


def call(model: nn.Module, *inputs: Any) -> Tensor:
    """The first result of a model."""
    found = model(*inputs)
    return found if isinstance(found, Tensor) else found[0]


@dataclass(frozen=True)
class Model:
    """One model; it cannot be made where its package is missing."""

    name: str
    package: str
    """Empty where the model is written here, in the shape of a well-known one."""
    make: Callable[[bool], Made]
    """Of a small size, for a CPU, or not."""
    run: Callable[..., Tensor] = call
    in_training: bool = False
    """Whether it computes nothing recurrent in evaluation, or no gradients."""
    has_gradients: bool = True


# -- of torchaudio


def _tacotron2(small: bool) -> Made:
    from torchaudio.models import Tacotron2

    batch, tokens, frames = (2, 20, 8) if small else (32, 120, 100)
    lengths = torch.linspace(tokens, tokens // 2, batch).long()
    inputs = (
        torch.randint(0, 148, (batch, tokens)),
        lengths,
        torch.randn(batch, 80, frames),
        torch.full((batch,), frames),
    )
    return Tacotron2(), inputs


def _speaking(model: Any, tokens: Tensor, lengths: Tensor) -> Tensor:
    found: Tensor = model.infer(tokens, lengths)[0]
    return found


def _speech(small: bool) -> Made:
    from torchaudio.models import Tacotron2

    steps = 8 if small else 60
    model = Tacotron2(decoder_max_step=steps, gate_threshold=1.1)
    return model, (torch.randint(0, 148, (1, 60)), torch.tensor([60]))


def _wavernn(small: bool) -> Made:
    from torchaudio.models import WaveRNN

    model = WaveRNN(upsample_scales=[5, 5, 8], n_classes=512, hop_length=200)
    batch, frames = (2, 6) if small else (32, 11)
    return model, (
        torch.randn(batch, 1, (frames - 4) * 200),
        torch.randn(batch, 1, 128, frames),
    )


def _hdemucs(small: bool) -> Made:
    from torchaudio.models import hdemucs_low

    batch, samples = (1, 44_100) if small else (4, 44_100 * 4)
    return hdemucs_low(["drums", "bass", "other", "vocals"]), (torch.randn(batch, 2, samples),)


# -- of transformers


def _encodec(small: bool) -> Made:
    from transformers import EncodecConfig, EncodecModel

    batch, samples = (1, 12_000) if small else (16, 24_000 * 4)
    return EncodecModel(EncodecConfig()).encoder, (torch.randn(batch, 1, samples),)


def _parakeet(small: bool) -> Made:
    from transformers.models.parakeet.configuration_parakeet import ParakeetRNNTConfig
    from transformers.models.parakeet.modeling_parakeet import ParakeetRNNTDecoder

    model = ParakeetRNNTDecoder(ParakeetRNNTConfig())
    sizes = (2, 10) if small else (32, 60)
    return model, (torch.randint(0, model.embedding.num_embeddings, sizes),)


# -- of torch_geometric


def _graph(small: bool, graphs: int, features: int) -> tuple[Tensor, Tensor, Tensor]:
    nodes = 25 * graphs
    batch = torch.arange(graphs).repeat_interleave(25)
    start = torch.randint(0, nodes, (2 * nodes,))
    end = 25 * (start // 25) + torch.randint(0, 25, (2 * nodes,))
    return torch.randn(nodes, features), torch.stack((start, end)), batch


def _set2set(small: bool) -> Made:
    from torch_geometric.nn import Set2Set

    x, _, batch = _graph(small, 8 if small else 128, 64)
    return Set2Set(64, processing_steps=6), (x, batch)


def _attentive_fp(small: bool) -> Made:
    from torch_geometric.nn import AttentiveFP

    x, edges, batch = _graph(small, 8 if small else 200, 39)
    model = AttentiveFP(39, 200, 1, edge_dim=10, num_layers=2, num_timesteps=2, dropout=0.2)
    return model, (x, edges, torch.randn(edges.shape[1], 10), batch)


def _gated_graph(small: bool) -> Made:
    from torch_geometric.nn import GatedGraphConv

    x, edges, _ = _graph(small, 8 if small else 400, 128)
    return GatedGraphConv(128, num_layers=4), (x, edges)


def _jumping(small: bool) -> Made:
    from torch_geometric.nn import GCN

    x, edges, _ = _graph(small, 8 if small else 400, 64)
    return GCN(64, 64, num_layers=4, jk="lstm", out_channels=32), (x, edges)


def _sage_lstm(small: bool) -> Made:
    from torch_geometric.nn import SAGEConv

    x, edges, _ = _graph(small, 8 if small else 100, 64)
    edges = edges[:, edges[1].argsort()]
    return SAGEConv(64, 128, aggr="lstm"), (x, edges)


def _tgn(small: bool) -> Made:
    from torch_geometric.nn import TGNMemory
    from torch_geometric.nn.models.tgn import IdentityMessage, LastAggregator

    nodes, events = (100, 50) if small else (5000, 2000)
    message = IdentityMessage(172, 100, 100)
    model = TGNMemory(nodes, 172, 100, 100, message, LastAggregator())
    src, dst = torch.randint(0, nodes, (2, events)).unbind(0)
    return model, (src, dst, torch.arange(events), torch.randn(events, 172))


def _remember(model: Any, src: Tensor, dst: Tensor, time: Tensor, message: Tensor) -> Tensor:
    model.reset_state()
    with torch.no_grad():
        model.update_state(src, dst, time, message)
    found: Tensor = model(torch.cat((src, dst)).unique())[0]
    return found


# -- of others


def _open_unmix(small: bool) -> Made:
    from openunmix.model import OpenUnmix

    batch, frames = (1, 40) if small else (16, 255)
    model = OpenUnmix(nb_bins=2049, nb_channels=2, hidden_size=512, max_bin=1487)
    return model, (torch.rand(batch, 2, 2049, frames),)


def _demucs(small: bool) -> Made:
    from demucs.demucs import Demucs

    batch, samples = (1, 11_025) if small else (4, 44_100 * 3)
    model = Demucs(["drums", "bass", "other", "vocals"], channels=32, resample=False)
    return model, (torch.randn(batch, 2, samples),)


# -- in the shape of well-known ones, written here


class _WordModel(nn.Module):
    def __init__(self, tokens: int, size: int, drop: float) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(tokens, size), nn.Dropout(drop)
        self.rnn = nn.LSTM(size, size, 2, dropout=drop)
        self.decode = nn.Linear(size, tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.decode(self.drop(self.rnn(self.drop(self.embed(tokens)))[0]))
        return found


def _word_model(small: bool) -> Made:
    tokens, batch = (1000, 4) if small else (10_000, 20)
    return _WordModel(tokens, 650, 0.5), (torch.randint(0, tokens, (35, batch)),)


class _Reader(nn.Module):
    """Convolutions, then two recurrent layers over the columns of an image."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        pools = 2, 2, (2, 1), (2, 1)
        for number, pool in enumerate(pools):
            channels = 64 * 2**number
            convolution = nn.Conv2d(channels // 2 if number else 1, channels, 3, padding=1)
            layers += [convolution, nn.BatchNorm2d(channels), nn.ReLU(), nn.MaxPool2d(pool)]
        self.convolutions = nn.Sequential(*layers)
        self.rnn = nn.LSTM(1024, 256, 2, bidirectional=True)
        self.decode = nn.Linear(512, 37)

    def forward(self, image: Tensor) -> Tensor:
        columns = self.convolutions(image).flatten(1, 2).permute(2, 0, 1)
        found: Tensor = self.decode(self.rnn(columns)[0])
        return found


def _reader(small: bool) -> Made:
    return _Reader(), (torch.randn(*((2, 1, 32, 64) if small else (64, 1, 32, 128))),)


class _Forecaster(nn.Module):
    """An autoregressive forecast: a layer over the past, then step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(20, 40, 2, batch_first=True, dropout=0.1)
        self.mean, self.into = nn.Linear(40, 1), nn.Linear(1, 20)

    def forward(self, past: Tensor) -> Tensor:
        output, state = self.rnn(past)
        found = [self.mean(output[:, -1:])]
        for _ in range(23):
            output, state = self.rnn(self.into(found[-1]), state)
            found.append(self.mean(output))
        return torch.cat(found, dim=1)


def _forecaster(small: bool) -> Made:
    return _Forecaster(), (torch.randn(8 if small else 128, 168, 20),)


class _Policy(nn.Module):
    """Of reinforcement learning: one step for many environments."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Sequential(nn.Linear(64, 256), nn.Tanh())
        self.rnn, self.actions = nn.LSTM(256, 256), nn.Linear(256, 18)

    def forward(self, steps: Tensor, h: Tensor, c: Tensor) -> Tensor:
        found: Tensor = self.actions(self.rnn(self.into(steps), (h, c))[0])
        return found


def _policy(small: bool) -> Made:
    batch = 8 if small else 256
    states = torch.zeros(2, 1, batch, 256).unbind(0)
    return _Policy(), (torch.randn(1, batch, 64), *states)


def _rollout(small: bool) -> Made:
    states = torch.zeros(2, 1, 8, 256).unbind(0)
    return _Policy(), (torch.randn(128, 8, 64), *states)


class _Tagger(nn.Module):
    """Sentences of differing lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5000, 100)
        self.rnn = nn.LSTM(100, 200, 1, bidirectional=True, batch_first=True)
        self.tags = nn.Linear(400, 17)

    def forward(self, tokens: Tensor, lengths: list[int]) -> Tensor:
        packed = pack_padded_sequence(
            self.embed(tokens), lengths, batch_first=True, enforce_sorted=False
        )
        found: Tensor = self.tags(pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0])
        return found


def _tagger(small: bool) -> Made:
    batch = 8 if small else 32
    lengths = torch.randint(5, 40, (batch,))
    lengths[0] = 40
    return _Tagger(), (torch.randint(0, 5000, (batch, 40)), lengths.tolist())


# -- of text to speech and voice activity, which serve one sentence or piece at a time


class _Encoder(nn.Module):
    """Of text, as StyleTTS2's and Kokoro's: convolutions, then a layer over packed rows."""

    def __init__(self, size: int = 512) -> None:
        super().__init__()
        self.embed = nn.Embedding(178, size)
        self.convolutions = nn.ModuleList(nn.Conv1d(size, size, 5, padding=2) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(size) for _ in range(3))
        self.rnn = nn.LSTM(size, size // 2, batch_first=True, bidirectional=True)

    def forward(self, tokens: Tensor, lengths: list[int]) -> Tensor:
        x = self.embed(tokens)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = nn.functional.leaky_relu(norm(convolution(x.transpose(1, 2)).transpose(1, 2)), 0.2)
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]


class _Prosody(nn.Module):
    """Kokoro's predictor: durations from packed rows, then pitch and energy of the frames."""

    def __init__(self, size: int = 512, style: int = 128) -> None:
        super().__init__()
        both, half = size + style, size // 2
        options: dict[str, bool] = {"batch_first": True, "bidirectional": True}
        self.encoders = nn.ModuleList(nn.LSTM(both, half, **options) for _ in range(3))
        self.scales = nn.ModuleList(nn.Linear(style, 2 * size) for _ in range(3))
        self.rnn, self.frames = nn.LSTM(both, half, **options), nn.LSTM(both, half, **options)
        self.durations = nn.Linear(size, 50)
        self.convolutions = nn.ModuleList(nn.Conv1d(size, size, 3, padding=1) for _ in range(6))
        self.heads = nn.ModuleList(nn.Conv1d(size, 1, 1) for _ in range(2))

    def packed(self, rnn: nn.Module, x: Tensor, lengths: list[int]) -> Tensor:
        rows = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(rnn(rows)[0], batch_first=True)[0]

    def forward(self, text: Tensor, lengths: list[int], style: Tensor, aligned: Tensor) -> Tensor:
        of_tokens = style.unsqueeze(1).expand(-1, text.shape[1], -1)
        for encoder, scale in zip(self.encoders, self.scales, strict=True):
            text = self.packed(encoder, torch.cat((text, of_tokens), dim=2), lengths)
            gamma, beta = scale(style).unsqueeze(1).chunk(2, dim=2)
            text = nn.functional.layer_norm(text, text.shape[-1:]) * (1 + gamma) + beta
        text = torch.cat((text, of_tokens), dim=2)
        durations = self.durations(self.packed(self.rnn, text, lengths)).sigmoid().sum(2)
        frames = self.frames((text.transpose(1, 2) @ aligned).transpose(1, 2))[0].transpose(1, 2)
        found = []
        for number, head in enumerate(self.heads):
            x = frames
            for convolution in self.convolutions[3 * number : 3 * number + 3]:
                x = x + nn.functional.leaky_relu(convolution(x), 0.2)
            found.append(head(x).flatten())
        return torch.cat((durations.flatten(), *found))


def _encoder(small: bool) -> Made:
    tokens = 20 if small else 120
    return _Encoder(), (torch.randint(0, 178, (1, tokens)), [tokens])


def _prosody(small: bool) -> Made:
    tokens = 20 if small else 120
    aligned = torch.eye(tokens).repeat_interleave(2, dim=1).unsqueeze(0)
    return _Prosody(), (torch.randn(1, tokens, 512), [tokens], torch.randn(1, 128), aligned)


class _Voice(nn.Module):
    """Voice activity, as Silero's: of each piece of sound a spectrum, convolutions and one step of a cell."""

    def __init__(self) -> None:
        super().__init__()
        sizes = 129, 128, 64, 64, 128
        self.spectrum = nn.Conv1d(1, 258, 256, stride=128, bias=False)
        self.convolutions = nn.ModuleList(
            nn.Conv1d(a, b, 3, stride=1 + (n in (1, 2)), padding=1)
            for n, (a, b) in enumerate(itertools.pairwise(sizes))
        )
        self.rnn, self.decode = nn.LSTMCell(128, 128), nn.Linear(128, 1)

    def forward(self, sound: Tensor, h: Tensor, c: Tensor) -> Tensor:
        found = []
        for piece in sound.unbind(0):
            real, imaginary = self.spectrum(piece.unsqueeze(1)).chunk(2, dim=1)
            x = (real.square() + imaginary.square() + 1e-9).sqrt()
            for convolution in self.convolutions:
                x = convolution(x).relu()
            h, c = self.rnn(x.mean(2), (h, c))
            found.append(self.decode(h.relu()).sigmoid())
        return torch.stack(found)


def _voice(small: bool) -> Made:
    states = torch.zeros(2, 1, 128).unbind(0)
    return _Voice(), (torch.randn(2 if small else 16, 1, 576), *states)


MODELS = (
    Model("Tacotron2", "torchaudio", _tacotron2),
    Model("Tacotron2, speaking", "torchaudio", _speech, _speaking, has_gradients=False),
    Model("WaveRNN", "torchaudio", _wavernn),
    Model("HDemucs", "torchaudio", _hdemucs),
    Model("Encodec", "transformers", _encodec),
    Model("Parakeet's RNN-T decoder", "transformers", _parakeet),
    Model("Set2Set", "torch_geometric", _set2set),
    Model("AttentiveFP", "torch_geometric", _attentive_fp),
    Model("GatedGraphConv", "torch_geometric", _gated_graph),
    Model("GCN, jumping knowledge", "torch_geometric", _jumping),
    Model("SAGEConv by LSTM", "torch_geometric", _sage_lstm),
    Model("TGN", "torch_geometric", _tgn, _remember, in_training=True),
    Model("Open-Unmix", "openunmix", _open_unmix),
    Model("Demucs", "demucs", _demucs),
    Model("word model, 650 x 2", "", _word_model),
    Model("OCR, CRNN", "", _reader),
    Model("forecast, DeepAR", "", _forecaster),
    Model("policy, one step", "", _policy),
    Model("policy, a rollout", "", _rollout),
    Model("tagger, packed", "", _tagger),
    Model("text encoder, StyleTTS2", "", _encoder),
    Model("prosody predictor, Kokoro", "", _prosody),
    Model("voice activity, Silero", "", _voice),
)
