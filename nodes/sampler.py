"""Samplers: a stochastic one that can be learned from, and a deterministic one for looking."""

from typing import Annotated, NamedTuple

from app.graph import Field, Node, Params, RunContext, params
from jagg.policy import Policy
from jagg.rollout import rollout, sample_ode
from jagg.schedule import sigma_schedule
from jagg.transitions import Transition, TransitionKind
from jagg.values import PromptBatch, Rollout, Samples


@params
class SDESamplerParams(Params):
    """Schedule, noise and batching of a stochastic rollout."""

    steps: Annotated[int, Field(minimum=1, maximum=1000, tooltip="Denoising steps.")] = 10
    shift: Annotated[
        float,
        Field(
            minimum=0.01,
            maximum=100.0,
            step=0.1,
            tooltip="Timestep shift; above 1 spends more steps at high noise.",
        ),
    ] = 3.0
    transition: Annotated[
        TransitionKind,
        Field(
            tooltip="How a noisy step is drawn: Flow-GRPO's SDE, DanceGRPO's SDE, or Flow-CPS.",
        ),
    ] = "flow_sde"
    noise_level: Annotated[
        float,
        Field(
            minimum=0.0,
            maximum=10.0,
            step=0.05,
            tooltip="Noise of a noisy step: a of Flow-SDE and CPS, eta of Dance-SDE.",
        ),
    ] = 0.7
    noise_start: Annotated[
        int, Field(minimum=0, maximum=999, tooltip="First step that gets noise and is trained.")
    ] = 0
    noise_stop: Annotated[
        int,
        Field(
            minimum=1,
            maximum=1000,
            tooltip="Step at which noise ends (not included). The last step of a schedule may be noisy with flow_sde alone.",
        ),
    ] = 9
    guidance_scale: Annotated[
        float,
        Field(
            minimum=0.0,
            maximum=50.0,
            step=0.1,
            tooltip="Classifier-free guidance; 1 is none and one forward per step.",
        ),
    ] = 1.0
    shared_noise: Annotated[
        bool, Field(tooltip="All images of a prompt start from the same noise.")
    ] = False
    micro_batch: Annotated[
        int,
        Field(
            minimum=1,
            maximum=65536,
            tooltip="Samples per forward; the optimizer follows the same boundaries.",
        ),
    ] = 96

    def __post_init__(self) -> None:
        """Check the noisy range against the number of steps."""
        if not self.noise_start < self.noise_stop <= self.steps:
            msg = (
                f"`noise_start` = {self.noise_start}, `noise_stop` = {self.noise_stop} and `steps` = {self.steps}: "
                "expected noise_start < noise_stop <= steps."
            )
            raise ValueError(msg)
        if self.noise_stop == self.steps and self.transition != "flow_sde":
            why = (
                "Flow-CPS draws without noise"
                if self.transition == "cps"
                else "Dance-SDE needs for its image prediction"
            )
            msg = (
                f"`noise_stop` = {self.noise_stop} reaches the last of {self.steps} `steps`, which {why}; "
                f"set `noise_stop` to {self.steps - 1} or less."
            )
            raise ValueError(msg)
        if self.transition == "cps" and self.noise_level > 1:
            msg = f"`noise_level` is {self.noise_level}, expected at most 1 where `transition` is cps."
            raise ValueError(msg)
        if self.noise_level == 0:
            msg = "`noise_level` is 0: such steps have no log-prob and cannot be trained; use a value above 0, or the ODE sampler."
            raise ValueError(msg)


class SDESampler(Node[SDESamplerParams]):
    """Draws a stochastic rollout that an optimizer can score again."""

    type = "SDESampler"
    version = 1
    title = "SDE Sampler"
    category = "sampling"
    description = "Samples G images per prompt with noise in the steps `noise_start`..`noise_stop`, and keeps what an update needs."
    aliases = ("rollout", "sampler", "flow sde", "cps", "dance")

    class Outputs(NamedTuple):
        """The rollout."""

        rollout: Rollout

    def run(self, ctx: RunContext, *, policy: Policy, prompts: PromptBatch) -> Outputs:
        """Sample with the raw weights as they are now."""
        settings = self.params
        return self.Outputs(
            rollout=rollout(
                policy,
                prompts,
                id=f"{ctx.node}:{ctx.tick}",
                sigmas=sigma_schedule(settings.steps, shift=settings.shift),
                transition=Transition(kind=settings.transition, noise_level=settings.noise_level),
                noise_start=settings.noise_start,
                noise_stop=settings.noise_stop,
                guidance_scale=settings.guidance_scale,
                shared_noise=settings.shared_noise,
                micro_batch=settings.micro_batch,
                generator=ctx.generator,
                on_step=ctx.progress,
            )
        )


@params
class ODESamplerParams(Params):
    """Schedule and batching of deterministic sampling."""

    steps: Annotated[int, Field(minimum=1, maximum=1000, tooltip="Denoising steps.")] = 20
    shift: Annotated[
        float,
        Field(
            minimum=0.01,
            maximum=100.0,
            step=0.1,
            tooltip="Timestep shift; above 1 spends more steps at high noise.",
        ),
    ] = 3.0
    guidance_scale: Annotated[
        float,
        Field(
            minimum=0.0,
            maximum=50.0,
            step=0.1,
            tooltip="Classifier-free guidance; 1 is none and one forward per step.",
        ),
    ] = 1.0
    micro_batch: Annotated[int, Field(minimum=1, maximum=65536, tooltip="Samples per forward.")] = (
        64
    )


class ODESampler(Node[ODESamplerParams]):
    """Draws images without noise, for looking at them."""

    type = "ODESampler"
    version = 1
    title = "ODE Sampler"
    category = "sampling"
    description = "Samples without noise (Euler). Its images carry no log-probs, so they cannot train a policy."
    aliases = ("euler", "deterministic", "images")

    class Outputs(NamedTuple):
        """The images."""

        samples: Samples

    def run(self, ctx: RunContext, *, policy: Policy, prompts: PromptBatch) -> Outputs:
        """Sample with the raw weights as they are now."""
        settings = self.params
        return self.Outputs(
            samples=sample_ode(
                policy,
                prompts,
                id=f"{ctx.node}:{ctx.tick}",
                sigmas=sigma_schedule(settings.steps, shift=settings.shift),
                guidance_scale=settings.guidance_scale,
                micro_batch=settings.micro_batch,
                generator=ctx.generator,
                on_step=ctx.progress,
            )
        )
