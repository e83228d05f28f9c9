"""Models with recurrent layers of other packages, with random weights, in the sizes that these have by default.

`zoo_requirements.txt` names the packages. What is not installed is left out, and `benchmarks.models` says so.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.zoo import Made, Model, call


class _Nothing(ModuleType):
    """Has every name, as an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Unused(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules, and nothing in them."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        self.modules = modules

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        known = any(name == x or name.startswith(f"{x}.") for x in self.modules)
        return ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Nothing(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def bare(package: str) -> Any:
    """A package without what its `__init__` does, unless it is imported already."""
    if package not in sys.modules:
        spec = importlib.util.find_spec(package)
        if spec is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        sys.modules[package] = importlib.util.module_from_spec(spec)
    return sys.modules[package]


def load(name: str, *unused: str) -> Any:
    """A module of a package; the packages around it stay bare, since what they import is more than the model needs.

    So do the modules that it imports and the model does not use, installed or not: they are empty.
    """
    parts = name.split(".")
    for depth in range(1, len(parts)):
        bare(".".join(parts[:depth]))
    finder = _Unused(unused)
    sys.meta_path.insert(0, finder)
    try:
        return importlib.import_module(name)
    finally:
        sys.meta_path.remove(finder)
        for each in [x for x, module in sys.modules.items() if isinstance(module, _Nothing)]:
            del sys.modules[each]


def _lengths(batch: int, longest: int) -> list[int]:
    """From the longest down to half of it, as a list: the lengths of packed rows stay on the CPU."""
    lengths: list[int] = torch.linspace(longest, longest // 2, batch).int().tolist()
    return lengths


def _result(which: int | str, model: nn.Module, *inputs: Any) -> Tensor:
    found: Tensor = model(*inputs)[which]
    return found


def _all_results(model: nn.Module, *inputs: Any) -> Tensor:
    return torch.cat(list(model(*inputs).values()), -1)


# -- speech and sound


def _denoiser(batch: int, small: bool) -> Made:
    # 4 s at 16 kHz.
    model = load("denoiser.demucs").Demucs()
    return model, (torch.randn(batch, 1, 4_000 if small else 64_000),)


def _asteroid(name: str, batch: int, small: bool) -> Made:
    # For two speakers, 2 s at 8 kHz.
    module = load(f"asteroid.models.{name.lower()}_tasnet", "soundfile")
    return getattr(module, f"{name}TasNet")(2), (torch.randn(batch, 1_600 if small else 16_000),)


def _piano(batch: int, small: bool) -> Made:
    # 10 s at 16 kHz, 100 frames a second: `config.py`.
    module = load("piano_transcription_inference.models", "matplotlib")
    model = module.Regress_onset_offset_frame_velocity_CRNN(100, 88)
    return model, (torch.randn(batch, 8_000 if small else 160_000),)


def _deep_filter(batch: int, small: bool) -> Made:
    # 3 s of frames of 10 ms.
    load("df.config").config.use_defaults(allow_reload=True)
    model = load("df.deepfilternet3", "libdf").DfNet(torch.rand(481, 32), torch.rand(32, 481))
    frames = 20 if small else 300
    sizes = (481, 2), (32,), (96, 2)
    return model, tuple(torch.randn(batch, 1, frames, *size) for size in sizes)


def _voice_encoder(batch: int, small: bool) -> Made:
    # Partial utterances of 1.6 s: `hparams.py`. The weights that the package has are not read.
    module = load("resemblyzer.voice_encoder", "webrtcvad", "librosa")
    with tempfile.NamedTemporaryFile() as file:
        torch.save({"model_state": {}}, file.name)
        model = module.VoiceEncoder("cpu", False, file.name)
    return model, (torch.rand(batch, 160, 40),)


def _summed_up(model: nn.Module, *inputs: Any) -> Tensor:
    # The vectors have the length 1, so that the mean of their squares has no gradient.
    found: Tensor = model(*inputs).cumsum(1)
    return found


def _pyannote(batch: int, small: bool) -> Made:
    # 10 s at 16 kHz, seven classes as in the pipeline for three speakers.
    bare("pyannote.audio").__version__ = ""
    unused = "pyannote.audio.telemetry", "torch_audiomentations"
    model = load("pyannote.audio.models.segmentation.PyanNet", *unused).PyanNet()
    model.classifier, model.activation = nn.Linear(128, 7), nn.LogSoftmax(-1)
    return model, (torch.randn(batch, 1, 16_000 if small else 160_000),)


def _tf_gridnet(batch: int, small: bool) -> Made:
    # 2 s at 8 kHz.
    model = load("espnet2.enh.separator.tfgridnet_separator").TFGridNet(None)
    samples = 1_000 if small else 16_000
    return model, (torch.randn(batch, samples), torch.full((batch,), samples))


def _skim(batch: int, small: bool) -> Made:
    model = load("espnet2.enh.separator.skim_separator").SkiMSeparator(64)
    frames = 100 if small else 2_000
    return model, (torch.randn(batch, frames, 64), torch.full((batch,), frames))


def _bsrnn(batch: int, small: bool) -> Made:
    # 1 s at 48 kHz.
    model = load("espnet2.enh.separator.bsrnn_separator", "librosa").BSRNNSeparator(481)
    frames = 10 if small else 100
    spectrum = torch.randn(batch, frames, 481, dtype=torch.complex64)
    return model, (spectrum, torch.full((batch,), frames))


def _first_separated(model: nn.Module, *inputs: Any) -> Tensor:
    found = model(*inputs)[0]
    return torch.stack([torch.view_as_real(x) if x.is_complex() else x for x in found])


def _vgg_rnn(batch: int, small: bool) -> Made:
    # 10 s of 80 bands, some utterances shorter.
    frames = 100 if small else 1_000
    model = load("espnet2.asr.encoder.vgg_rnn_encoder").VGGRNNEncoder(80)
    return model, (torch.randn(batch, frames, 80), torch.tensor(_lengths(batch, frames)))


def _pitch(batch: int, small: bool) -> Made:
    # 192 frames of 80 bands.
    model = load("styletts2.Utils.JDC.model").JDCNet(num_class=1)
    return model, (torch.randn(batch, 1, 80, 32 if small else 192),)


def _aligner(batch: int, small: bool) -> Made:
    # As `Utils/ASR/config.yml` has it; it decodes a token at a time by a cell.
    module = load("styletts2.Utils.ASR.models")
    model = module.ASRCNN(n_token=178, token_embedding_dim=512)
    frames, tokens = (40, 6) if small else (192, 50)
    mask = torch.zeros(batch, frames // 2, dtype=torch.bool)
    return model, (torch.randn(batch, 80, frames), mask, torch.randint(3, 178, (batch, tokens)))


def _prosody(batch: int, small: bool) -> Made:
    # The sizes of Kokoro-82M; each token lasts two frames. Modules with torch's older weight norm cannot be copied.
    model = load("kokoro.modules").ProsodyPredictor(128, 512, 3)
    for module in model.modules():
        if hasattr(module, "weight_g"):
            nn.utils.remove_weight_norm(module)
    tokens = 10 if small else 120
    lengths = torch.tensor(_lengths(batch, tokens))
    aligned = torch.eye(tokens).repeat_interleave(2, dim=1).expand(batch, -1, -1)
    mask = torch.arange(tokens) >= lengths[:, None]
    return model, (torch.randn(batch, 512, tokens), torch.randn(batch, 128), lengths, aligned, mask)


def _speak(model: Any, text: Tensor, style: Tensor, *more: Tensor) -> Tensor:
    duration, aligned = model(text, style, *more)
    pitch, energy = model.F0Ntrain(aligned, style)
    return torch.cat((duration.flatten(1), pitch, energy), dim=1)


def _bonito(batch: int, small: bool) -> Made:
    # Chunks of 4,000 samples, and `features` as in `dna_r9.4.1@v3.toml`.
    model = load("bonito.crf.model", "koi").rnn_encoder(4, 5)
    return model, (torch.randn(batch, 1, 500 if small else 4_000),)


# -- reading


def _easy_ocr(batch: int, small: bool) -> Made:
    # English of the second generation: `config.py`.
    model = load("easyocr.model.vgg_model").Model(1, 256, 256, 97)
    return model, (torch.randn(batch, 1, 64, 80 if small else 600), None)


def _kraken(batch: int, small: bool) -> Made:
    # The layers that `configs/vgsl.py` proposes, and 100 characters.
    spec = load("kraken.configs").VGSLRecognitionTrainingConfig().spec
    unused = "coremltools", "kraken.models.ctc", "kraken.lib.vgsl.spred"
    model = load("kraken.lib.vgsl.model", *unused).TorchVGSLModel(vgsl=f"{spec[:-1]} O1c100]")
    return model.nn, (torch.rand(batch, 1, 120, 100 if small else 1_200),)


def _doctr(name: str, batch: int, small: bool) -> Made:
    # Words of eight letters.
    unused = "anyascii cv2 pypdfium2 pyclipper shapely validators defusedxml langdetect rapidfuzz"
    kind = name.partition("_")[0]
    make = getattr(load(f"doctr.models.recognition.{kind}.pytorch", *unused.split()), name)
    model = make(pretrained=False, pretrained_backbone=False, exportable=True)
    return model, (torch.randn(batch, *model.cfg["input_shape"]), ["reliable"] * batch)


# -- forecasts


def _forecast(file: str, name: str, batch: int, small: bool) -> Made:
    # A year of months from three.
    make = getattr(load(f"neuralforecast.models.{file}"), name)
    others = dict.fromkeys(("futr_exog", "hist_exog", "stat_exog"))
    return make(h=12, input_size=36), ({"insample_y": torch.randn(batch, 36, 1)} | others,)


def _deep_ar(batch: int, small: bool) -> Made:
    # A day of hours from a day and what lies up to a month before.
    from gluonts.torch.distributions import NormalOutput
    from gluonts.torch.model.deepar.module import DeepARModel

    model = DeepARModel("h", 24, 24, distr_output=NormalOutput())
    past = model.past_length
    static = torch.zeros(batch, 1, dtype=torch.long), torch.zeros(batch, 1)
    seen = torch.randn(batch, past, 1), torch.rand(batch, past), torch.ones(batch, past)
    return model, (*static, *seen, torch.randn(batch, 24, 1), torch.rand(batch, 24))


def _likelihood(model: Any, *inputs: Any) -> Tensor:
    return torch.stack(model.unroll_lagged_rnn(*inputs)[0])


def _draw(model: Any, *inputs: Any) -> Tensor:
    found: Tensor = model(*inputs[:-1])
    return found


# -- what to recommend


def _recommender(name: str, batch: int, small: bool) -> Made:
    # `properties/model/*.yaml`; the last 50 items of 3,417, of MovieLens-1M.
    module = load(f"recbole.model.sequential_recommender.{name.lower()}", "colorlog", "texttable")
    sizes = {"embedding_size": 64, "hidden_size": 128, "num_layers": 1, "n_layers": 1}
    rates = {"dropout_prob": 0.3, "dropout_probs": (0.25, 0.5), "loss_type": "CE"}
    fields = {"ITEM_ID_FIELD": "item", "LIST_SUFFIX": "s", "ITEM_LIST_LENGTH_FIELD": "length"}
    config = defaultdict(str, sizes | rates | fields)
    model = getattr(module, name)(config, SimpleNamespace(num=lambda _: 3_417))
    items = torch.randint(1, 3_417, (batch, 50))
    return model, ({"items": items, "length": torch.tensor(_lengths(batch, 50))},)


def _rank(model: Any, given: dict[str, Tensor]) -> Tensor:
    found: Tensor = model.full_sort_predict(given)
    return found


def _dien(batch: int, small: bool) -> Made:
    # Eight dimensions a feature, as the package's example has them, and the last 50 items.
    inputs = load("deepctr_torch.inputs")
    past = inputs.SparseFeat("hist_item", 10_000, 8, embedding_name="item")
    past = inputs.VarLenSparseFeat(past, 50, length_name="length")
    features = [inputs.SparseFeat("user", 1_000, 8), inputs.SparseFeat("item", 10_000, 8), past]
    model = load("deepctr_torch.models.dien").DIEN(features, ["item"])
    columns = torch.randint(1, 1_000, (batch, 53))
    columns[:, model.feature_index["length"][0]] = torch.tensor(_lengths(batch, 50))
    return model, (columns.float(),)


# -- language


def _character_model(batch: int, small: bool) -> Made:
    # `models/charlm.py`.
    sizes = {"char_emb_dim": 100, "char_hidden_dim": 1024, "char_num_layers": 1}
    rates = {"char_dropout": 0.05, "char_unit_dropout": 1e-5, "char_rec_dropout": 0.0}
    module = load("stanza.models.common.char_model", "udtools", "udapi")
    length = 10 if small else 250
    model = module.CharacterLanguageModel(sizes | rates, {"char": range(1_000)})
    return model, (torch.randint(2, 1_000, (batch, length)), [length] * batch)


def _highway(batch: int, small: bool) -> Made:
    # Of the parser: `models/parser.py`.
    length = 10 if small else 40
    switches = {"batch_first": True, "bidirectional": True, "pad": True}
    make = load("stanza.models.common.hlstm").HighwayLSTM
    model = make(375, 400, 3, dropout=0.5, highway_func=torch.tanh, **switches)
    return model, (torch.randn(batch, length, 375), _lengths(batch, length))


def _lemmatizer(batch: int, small: bool) -> Made:
    # `models/lemmatizer.py`, words of up to 15 letters.
    sizes = {"vocab_size": 100, "emb_dim": 50, "hidden_dim": 200, "num_layers": 1}
    more = {"dropout": 0.5, "emb_dropout": 0.5, "attn_type": "soft", "max_dec_len": 50}
    tags = {"pos": True, "pos_dim": 50, "pos_vocab_size": 20, "pos_dropout": 0.5, "copy": True}
    module = load("stanza.models.common.seq2seq_model", "udtools", "udapi")
    model = module.Seq2SeqModel(sizes | more | tags)
    mask = torch.arange(15) >= torch.tensor(_lengths(batch, 15))[:, None]
    letters = torch.randint(4, 100, (batch, 15)).masked_fill(mask, 0)
    lemmas, kinds = torch.randint(4, 100, (batch, 15)), torch.randint(4, 20, (batch,))
    return model, (letters, mask, lemmas, kinds)


def _flair(batch: int, small: bool) -> Made:
    # The character model of its embeddings: one layer of 2,048 units over 250 characters.
    bare("flair").device = "cpu"
    load("flair.nn.recurrent")
    module = load("flair.models.language_model", "flair.data")
    model = module.LanguageModel(range(275), True, 512 if small else 2048, 1)
    bare("flair").device = "cpu" if small else "cuda"  # where each copy of a model is made
    tokens = torch.randint(0, 275, (10 if small else 250, batch))
    return model, (tokens, torch.zeros(2, 1, batch, model.hidden_size).unbind(0))


def _translator(batch: int, small: bool) -> Made:
    # The defaults of `onmt/opts.py` for recurrent layers: two of 500 units, the attention fed into the next step.
    length = 6 if small else 30
    encoders, decoders = load("onmt.encoders.rnn_encoder"), load("onmt.decoders.decoder")
    embed = [load("onmt.modules.embeddings").Embeddings(500, 10_000, 1) for _ in range(2)]
    encoder = encoders.RNNEncoder("LSTM", False, 2, 500, 0.3, embed[0])
    decoder = decoders.InputFeedRNNDecoder("LSTM", False, 2, 500, dropout=0.3, embeddings=embed[1])
    model = load("onmt.models.model").NMTModel(encoder, decoder)
    tokens = torch.randint(2, 10_000, (2, batch, length, 1)).unbind(0)
    return model, (*tokens, torch.tensor(_lengths(batch, length)))


def _laser(batch: int, small: bool) -> Made:
    # The encoder of 93 languages: five layers both ways, padded on the left.
    length = 8 if small else 40
    make = load("laserembeddings.encoder").Encoder
    model = make(73_640, 1, num_layers=5, bidirectional=True)
    lengths = torch.tensor(_lengths(batch, length))
    pads = torch.arange(length) < length - lengths[:, None]
    tokens = torch.randint(2, 73_640, (batch, length))
    return model, (tokens.masked_fill(pads, 1), lengths)


def _smiles(batch: int, small: bool) -> Made:
    # `char_rnn/config.py`.
    config = load("moses.char_rnn.config").get_parser().parse_args([])

    class Letters(list[int]):
        pad = 0

    length = 10 if small else 50
    model = load("moses.char_rnn.model").CharRNN(Letters(range(30)), config)
    return model, (torch.randint(1, 30, (batch, length)), _lengths(batch, length))


# -- tables and actions


def _par(batch: int, small: bool) -> Made:
    # The hidden size of `PARModel`.
    model = load("deepecho.models.par", "pandas", "tqdm").PARNet(20, 5, 128)
    return model, (torch.randn(10 if small else 100, batch, 20), torch.randn(batch, 5))


def _recurrent_ppo(steps: int, batch: int, small: bool) -> Made:
    from gymnasium import spaces

    make = load("sb3_contrib.common.recurrent.policies").RecurrentActorCriticPolicy
    model = make(spaces.Box(-1, 1, (64,)), spaces.Discrete(18), lambda _: 3e-4)
    states = torch.zeros(4, 1, batch, 256).unbind(0)
    pairs = load("sb3_contrib.common.recurrent.type_aliases").RNNStates(states[:2], states[2:])
    rows = steps * batch
    return model, (torch.randn(rows, 64), torch.randint(0, 18, (rows,)), pairs, torch.zeros(rows))


def _judge(model: Any, *inputs: Any) -> Tensor:
    values, likely, entropy = model.evaluate_actions(*inputs)
    return torch.cat((values.flatten(), likely, entropy))


def _both(
    name: str,
    package: str,
    make: Callable[[int, bool], Made],
    training: int,
    run: Callable[..., Tensor] = call,
    serving: int = 1,
    in_training: bool = False,
) -> tuple[Model, Model]:
    """A training step's batch, and what is served at a time."""
    return (
        Model(name, package, lambda small: make(2 if small else training, small), run, in_training),
        Model(f"{name}, serving", package, partial(make, serving), run, has_gradients=False),
    )


MODELS = (
    *_both("denoiser", "denoiser", _denoiser, 64),
    *_both("LSTM-TasNet", "asteroid", partial(_asteroid, "LSTM"), 8),
    *_both("DPRNN-TasNet", "asteroid", partial(_asteroid, "DPRNN"), 8),
    *_both("piano transcription", "piano_transcription_inference", _piano, 12, _all_results),
    *_both("DeepFilterNet3", "deepfilternet", _deep_filter, 32),
    *_both("Resemblyzer", "resemblyzer", _voice_encoder, 640, _summed_up),
    *_both("PyanNet", "pyannote.audio", _pyannote, 32),
    *_both("TF-GridNet", "espnet", _tf_gridnet, 2, _first_separated),
    *_both("SkiM", "espnet", _skim, 8, _first_separated),
    *_both("BSRNN", "espnet", _bsrnn, 8, _first_separated),
    *_both("VGG-RNN encoder", "espnet", _vgg_rnn, 20),
    *_both("pitch, JDC", "styletts2", _pitch, 32),
    *_both("text aligner", "styletts2", _aligner, 32, partial(_result, 1), in_training=True),
    *_both("Kokoro's prosody", "kokoro", _prosody, 16, _speak),
    *_both("Bonito", "ont-bonito", _bonito, 64),
    *_both("EasyOCR", "easyocr", _easy_ocr, 32),
    *_both("kraken", "kraken", _kraken, 32),
    *_both("docTR's CRNN", "python-doctr", partial(_doctr, "crnn_vgg16_bn"), 64, _all_results),
    *_both("docTR's SAR", "python-doctr", partial(_doctr, "sar_resnet31"), 64, _all_results),
    *_both("LSTM forecast", "neuralforecast", partial(_forecast, "lstm", "LSTM"), 128),
    *_both("DilatedRNN", "neuralforecast", partial(_forecast, "dilated_rnn", "DilatedRNN"), 128),
    *_both("GRU4Rec", "recbole", partial(_recommender, "GRU4Rec"), 2_048, _rank),
    *_both("NARM", "recbole", partial(_recommender, "NARM"), 2_048, _rank),
    *_both("DIEN", "deepctr-torch", _dien, 256),
    *_both("stanza's characters", "stanza", _character_model, 100, partial(_result, 2)),
    *_both("stanza's HighwayLSTM", "stanza", _highway, 125),
    *_both("stanza's lemmatizer", "stanza", _lemmatizer, 50),
    *_both("flair's characters", "flair", _flair, 100),
    *_both("translation, LSTM", "OpenNMT-py", _translator, 64),
    *_both("LASER", "laserembeddings", _laser, 64, partial(_result, "sentemb")),
    *_both("molecules, CharRNN", "molsets", _smiles, 64),
    *_both("tables, PAR", "deepecho", _par, 32),
    _both("DeepAR", "gluonts", _deep_ar, 32, _likelihood)[0],
    _both("DeepAR", "gluonts", _deep_ar, 32, _draw)[1],
    _both("recurrent PPO", "sb3-contrib", partial(_recurrent_ppo, 128), 8, _judge)[0],
    _both("recurrent PPO", "sb3-contrib", partial(_recurrent_ppo, 1), 8, _judge, serving=8)[1],
)
