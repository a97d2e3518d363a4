"""The modules of `adapters.pytorch`: options that stay, training against decoding, other projects' checkpoints."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flash_rnnt_cupy import InputError
from flash_rnnt_cupy.adapters.pytorch import FlashRNNTLoss, JointNetwork, RNNTLoss, joint_rnnt_loss, rnnt_loss
from tests import torch_problems as problems
from tests.torch_problems import ACTIVATIONS, B, H, T, U, V, near

JOINT_OPTIONS = {
    "blank": 1,
    "activation": "silu",
    "dropout": 0.25,
    "seed": 11,
    "fastemit_lambda": 0.01,
    "clamp": 0.5,
    "reduction": "sum",
    "zero_infinity": True,
    "tile_rows": 7,
    "workspace_bytes": 1 << 20,
    "min_occupancy": 1e-6,
    "backend": "numpy",
}
LOGITS_OPTIONS = {
    "blank": 1,
    "clamp": 0.5,
    "reduction": "sum",
    "fused_log_softmax": False,
    "fastemit_lambda": 0.01,
    "zero_infinity": True,
    "backend": "numpy",
    "overwrite_logits": True,
}
EACH_LOSS = pytest.mark.parametrize(
    ("module", "function", "options"),
    [(FlashRNNTLoss, joint_rnnt_loss, JOINT_OPTIONS), (RNNTLoss, rnnt_loss, LOGITS_OPTIONS)],
    ids=["FlashRNNTLoss", "RNNTLoss"],
)


@EACH_LOSS
def test_options_and_defaults_are_the_functions(module: Any, function: Any, options: dict[str, Any]) -> None:
    parameters = inspect.signature(function).parameters
    expected = {name: parameters[name].default for name in options}
    assert module().options == expected
    assert [name for name, p in parameters.items() if p.default is not p.empty] == list(options)
    assert {name: p.default for name, p in inspect.signature(module).parameters.items()} == expected


@EACH_LOSS
def test_options_survive(module: Any, function: Any, options: dict[str, Any]) -> None:
    del function
    loss = module(**options)
    assert all(options[name] != value for name, value in module().options.items())
    for other in (loss, copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert other.options == options
        assert all(f"{name}={value!r}" in repr(other) for name, value in options.items())
    loss.fastemit_lambda = 0.5
    assert loss.options == options | {"fastemit_lambda": 0.5}


@EACH_LOSS
def test_wrong_options_are_refused_at_once(module: Any, function: Any, options: dict[str, Any]) -> None:
    del function
    for wrong in ({"reduction": "max"}, {"fastemit_lambda": -1.0}, {"clamp": "no"}, {"dropout": 1.0}, {"tile_rows": 0}):
        if wrong.keys() <= options.keys():
            with pytest.raises(InputError, match=next(iter(wrong))):
                module(**wrong)


def test_modules_call_the_functions() -> None:
    problem, scores = problems.joint(), problems.logits()
    options = JOINT_OPTIONS | {"blank": -1}
    loss = FlashRNNTLoss(**options)
    assert torch.equal(loss(*problem), joint_rnnt_loss(*problem, **options))
    assert torch.equal(loss.eval()(*problem), joint_rnnt_loss(*problem, **options | {"dropout": 0.0}))
    assert torch.equal(
        RNNTLoss(clamp=0.1, reduction="none")(*scores), rnnt_loss(*scores, -1, 0.1, "none")
    )  # as torchaudio.transforms.RNNTLoss


def small_network(**options: Any) -> JointNetwork:
    torch.manual_seed(0)
    return JointNetwork(6, 4, H, V, **options).double()


def features() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return tuple(torch.randn(B, n, width, generator=draw, dtype=torch.float64) for n, width in ((T, 6), (U + 1, 4)))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("blank", [0, -1])
def test_training_and_decoding_agree(activation: str, blank: int) -> None:
    network = small_network(activation=activation, blank=blank, dropout=0.5).eval()
    encoder_out, predictor_out = features()
    integers = problems.joint()[4:]
    targets = integers[0] + (blank == 0)
    ours = network.loss(encoder_out, predictor_out, targets, *integers[1:], reduction="none")
    logits = network(encoder_out[:, :, None], predictor_out[:, None])
    assert logits.shape == (B, T, U + 1, V)
    near(ours, problems.plain_losses(problems.Logits(logits, targets, *integers[1:]), blank), 1e-12)
    log_probs = network.log_probs(encoder_out[0, 0], predictor_out[0, 0])
    near(log_probs, logits[0, 0, 0].log_softmax(-1), 1e-14)
    assert network.bfloat16().log_probs(*features_in(torch.bfloat16)).dtype == torch.float32


def features_in(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    encoder_out, predictor_out = features()
    return encoder_out[:, 0].to(dtype), predictor_out[:, 0].to(dtype)


def test_dropout_in_training_only() -> None:
    network = small_network(dropout=0.5)
    arguments = (*features(), *problems.joint()[4:])
    first, second = network.loss(*arguments), network.loss(*arguments)
    assert first != second
    assert not torch.equal(*(network(*features_in(torch.float64)) for _ in range(2)))
    network.eval()
    assert network.loss(*arguments) == network.loss(*arguments)
    assert torch.equal(*(network(*features_in(torch.float64)) for _ in range(2)))


def test_network_is_an_ordinary_module() -> None:
    network = small_network(activation="tanh", dropout=0.1, blank=2)
    assert "activation='tanh', dropout=0.1, blank=2" in repr(network)
    for other in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        assert torch.equal(other.eval()(*features_in(torch.float64)), network.eval()(*features_in(torch.float64)))
    assert all(isinstance(part, nn.Linear) for part in network.children())
    with pytest.raises(InputError, match="activation"):
        JointNetwork(6, 4, H, V, activation="elu")
    network.blank = -1
    network.loss(*features(), *problems.joint()[4:], fastemit_lambda=0.1, reduction="sum").backward()
    assert all(parameter.grad is not None for parameter in network.parameters())


LAYOUTS = {
    "ours": ("encoder_projection", "predictor_projection", "output"),
    "NeMo": ("joint.enc", "joint.pred", "joint.joint_net.2"),
    "icefall": ("joiner.encoder_proj", "joiner.decoder_proj", "joiner.output_linear"),
    "ESPnet": ("joint_network.lin_enc", "joint_network.lin_dec", "joint_network.lin_out"),
    "SpeechBrain": ("proj_enc.w", "proj_dec.w", "transducer_lin.w"),
}


def renamed(network: JointNetwork, names: tuple[str, ...]) -> dict[str, Tensor]:
    parts = zip(names, network.children(), strict=True)
    return {f"{name}.{key}": value for name, part in parts for key, value in part.state_dict().items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_state_dicts_of_other_projects(layout: str) -> None:
    network = small_network()
    state = renamed(network, LAYOUTS[layout])
    state |= {"encoder.layers.0.weight": torch.zeros(2), "joint.temperature": torch.zeros(1)}  # a whole model's
    for other in (small_network(), JointNetwork.from_joint_state_dict(state)):
        nn.init.zeros_(other.output.weight)
        other.load_joint_state_dict(state)
        assert torch.equal(other(*features_in(torch.float64)), network(*features_in(torch.float64)))
    made = JointNetwork.from_joint_state_dict(state, activation="tanh", dropout=0.1, blank=0)
    assert (made.activation, made.dropout, made.blank) == ("tanh", 0.1, 0)


def test_missing_biases_are_zero() -> None:
    network = small_network()
    state = renamed(network, LAYOUTS["ESPnet"])
    del state["joint_network.lin_dec.bias"]
    made = JointNetwork.from_joint_state_dict(state)
    assert not made.predictor_projection.bias.any()
    assert torch.equal(made.output.bias, network.output.bias)


def test_unknown_and_doubtful_state_dicts() -> None:
    network = small_network()
    for state, message in (
        ({"a.weight": torch.zeros(2), "enc.weight": torch.zeros(2)}, "got none among the keys a.weight, enc.weight"),
        ({}, r"got none among the keys \(no keys\)"),
        (renamed(network, LAYOUTS["icefall"]) | renamed(network, LAYOUTS["ESPnet"]), "got 2 among the keys joiner"),
        (renamed(network, LAYOUTS["NeMo"]) | {"joint.joint_net.4.weight": torch.zeros(2)}, "got none among the keys"),
    ):
        with pytest.raises(InputError, match="NeMo: enc, pred, joint_net.*" + message):
            network.load_joint_state_dict(state)
    with pytest.raises(RuntimeError, match=r"size mismatch for output\.weight"):
        JointNetwork(6, 4, H, V + 1).load_joint_state_dict(renamed(network, LAYOUTS["NeMo"]))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # the call under test
def test_torchscript_says_why_not() -> None:
    for module in (RNNTLoss(), FlashRNNTLoss()):
        with pytest.raises(torch.jit.frontend.NotSupportedError, match="keyword-arg expansion is not supported"):
            torch.jit.script(module)
