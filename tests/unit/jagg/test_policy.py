import pytest
import torch

from jagg.errors import JaggError
from jagg.policy import Policy
from jagg.toy import toy_policy


def inputs(policy, n=3):
    x = torch.linspace(-1, 1, n * 16).view(n, 1, 4, 4)
    return x, torch.full((n,), 0.5), policy.encode([f"p{i}" for i in range(n)])


def shift(policy):
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(0.25)


def test_velocity_is_float32_from_a_half_precision_model():
    policy = toy_policy(dtype=torch.bfloat16)
    assert policy.velocity(*inputs(policy)).dtype == torch.float32
    double = toy_policy(dtype=torch.float64)
    assert double.velocity(*inputs(double)).dtype == torch.float64


def test_trainable_names_follow_the_contract(policy):
    assert list(policy.trainable()) == [
        "transformer.0.weight",
        "transformer.0.bias",
        "transformer.2.weight",
        "transformer.2.bias",
    ]
    policy.trainable()["transformer.0.bias"].requires_grad_(False)
    assert "transformer.0.bias" not in policy.trainable()


def test_reference_weights_are_lent_and_not_written_in_place(policy):
    x, sigma, conditioning = inputs(policy)
    before = policy.velocity(x, sigma, conditioning)
    policy.keep_reference()
    shift(policy)
    policy.keep_reference()  # a second call changes nothing
    raw = policy.velocity(x, sigma, conditioning)  # a graph that must survive the loan
    with policy.weights("reference"):
        assert torch.equal(policy.velocity(x, sigma, conditioning), before)
        with policy.weights("raw"):
            assert torch.equal(policy.velocity(x, sigma, conditioning), raw)
        assert torch.equal(policy.velocity(x, sigma, conditioning), before)
    raw.sum().backward()
    assert all(p.grad is not None for p in policy.trainable().values())


def test_a_loan_ends_with_an_error_too(policy):
    x, sigma, conditioning = inputs(policy)
    policy.keep_reference()
    shift(policy)
    raw = policy.velocity(x, sigma, conditioning)
    with pytest.raises(RuntimeError), policy.weights("reference"):
        raise RuntimeError
    assert torch.equal(policy.velocity(x, sigma, conditioning), raw)


@pytest.mark.parametrize(
    ("which", "advice"), [("ema", "ema_decay"), ("reference", "keep_reference")]
)
def test_weights_that_are_not_kept_are_refused_with_advice(policy, which, advice):
    with pytest.raises(JaggError, match=advice), policy.weights(which):
        pass


def test_guidance_of_scale_one_and_zero(policy):
    x, sigma, conditioning = inputs(policy)
    empty = policy.encode([""] * 3)
    conditional = policy.velocity(x, sigma, conditioning)
    unconditional = policy.velocity(x, sigma, empty)

    def guided(scale):
        return policy.guided_velocity(x, sigma, conditioning, empty, scale)

    assert torch.allclose(guided(1.0), conditional, atol=1e-6)
    assert torch.allclose(guided(0.0), unconditional, atol=1e-6)
    assert torch.allclose(guided(3.0), 3 * conditional - 2 * unconditional, atol=1e-5)
    assert torch.equal(policy.guided_velocity(x, sigma, conditioning, None, 3.0), conditional)


def test_encoding_builds_no_graph(policy):
    assert not policy.encode(["a"])["text"].requires_grad


class _TextFamily:
    """A family whose text encoder learns: its velocity is the encoded text."""

    name = "text"
    latent_shape = (3,)

    def __init__(self) -> None:
        self.transformer = torch.nn.Identity()
        self.text_encoder = torch.nn.Linear(1, 3)

    def encode(self, prompts):
        return {"text": self.text_encoder(torch.tensor([[float(len(p))] for p in prompts]))}

    def velocity(self, latents, sigma, conditioning):
        return conditioning["text"]

    def decode(self, latents):
        return latents


def test_lent_weights_encode_prompts_too():
    """Averaged weights of a text encoder that learns must not meet the raw text encoder."""
    policy = Policy(family=_TextFamily())
    before = policy.encode(["a", "bc"])["text"]
    policy.keep_reference()
    shift(policy)
    raw = policy.encode(["a", "bc"])["text"]
    assert not torch.equal(raw, before)
    with policy.weights("reference"):
        assert torch.equal(policy.encode(["a", "bc"])["text"], before)
        assert not policy.encode(["a"])["text"].requires_grad
    assert torch.equal(policy.encode(["a", "bc"])["text"], raw)
