import pytest
import torch
from torch import nn

from jagg.errors import ShapeError
from jagg.flow_matching import flow_matching_loss, logit_normal_sigma
from jagg.policy import Policy
from jagg.randomness import generator


class _Family:
    """A real, tiny family: v = gain · x + offset[prompt]."""

    name = "line"
    latent_shape = (2,)

    def __init__(self, gain):
        self.transformer = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.transformer.weight, gain)
        self.text_encoder = nn.Identity()

    def encode(self, prompts):
        return {"offset": torch.zeros(len(prompts), 1)}

    def velocity(self, latents, sigma, conditioning):
        return latents * self.transformer.weight + conditioning["offset"]

    def decode(self, latents):
        return latents


def test_the_loss_of_a_known_velocity_is_its_squared_error():
    policy = Policy(family=_Family(2.0))
    x0, noise = torch.tensor([[1.0, -1.0]]), torch.tensor([[3.0, 0.0]])
    loss = flow_matching_loss(
        policy, x0, {"offset": torch.zeros(1, 1)}, sigma=torch.tensor([0.25]), noise=noise
    )
    # x = (1.5, -0.75), v = 2x = (3, -1.5), wanted noise - x0 = (2, 1): errors 1 and -2.5.
    assert loss.item() == pytest.approx((1 + 6.25) / 2)
    loss.backward()
    assert policy.family.transformer.weight.grad.item() == pytest.approx(
        (2 * 1 * 1.5 + 2 * -2.5 * -0.75) / 2
    )


def test_the_exact_velocity_has_no_loss():
    # With x0 = 0 and sigma = 1/2, x = noise / 2, so v = noise = 2x is exact.
    noise = torch.randn(4, 2, generator=generator(0))
    loss = flow_matching_loss(
        Policy(family=_Family(2.0)),
        torch.zeros(4, 2),
        {"offset": torch.zeros(4, 1)},
        sigma=torch.full((4,), 0.5),
        noise=noise,
    )
    assert loss.item() == pytest.approx(0, abs=1e-12)


def test_gradients_reach_the_conditioning():
    offset = torch.zeros(3, 1, requires_grad=True)
    flow_matching_loss(
        Policy(family=_Family(1.0)),
        torch.ones(3, 2),
        {"offset": offset},
        sigma=torch.full((3,), 0.5),
        noise=torch.ones(3, 2),
    ).backward()
    assert offset.grad.abs().min() > 0


@pytest.mark.parametrize(("sigma", "noise"), [((3,), (4, 2)), ((4, 1), (4, 2)), ((4,), (4, 3))])
def test_shapes_that_do_not_fit_are_refused(sigma, noise):
    with pytest.raises(ShapeError, match="flow_matching_loss"):
        flow_matching_loss(
            Policy(family=_Family(1.0)),
            torch.ones(4, 2),
            {},
            sigma=torch.ones(sigma),
            noise=torch.ones(noise),
        )


def test_noise_levels_are_logit_normal_one_per_stratum():
    sigma = logit_normal_sigma(1000, mean=0.5, std=2.0, generator=generator(0))
    assert sigma.dtype == torch.float32
    assert bool((sigma > 0).all() and (sigma < 1).all())
    normal = (torch.logit(sigma.double()) - 0.5) / 2
    quantile = torch.special.ndtr(normal)
    strata = torch.arange(1000) / 1000
    assert bool(((quantile >= strata - 1e-4) & (quantile <= strata + 1.1e-3)).all())
    again = logit_normal_sigma(1000, mean=0.5, std=2.0, generator=generator(0))
    assert torch.equal(sigma, again)
    assert not torch.equal(
        sigma, logit_normal_sigma(1000, mean=0.5, std=2.0, generator=generator(1))
    )
