"""The optimizer card: GRPO with JAGG's aggregated backward passes."""

from typing import Annotated, Any, Literal, NamedTuple

from app.graph import (
    Changes,
    Field,
    NeedsEvery,
    Node,
    Params,
    RunContext,
    default_of,
    doc_of,
    params,
)
from jagg.advantages import Normalise
from jagg.ema import Ema
from jagg.errors import JaggError
from jagg.losses import KlForm
from jagg.optimizers import (
    Decay,
    adamw,
    learning_rate,
    load_optimizer_state,
    optimizer_state,
    set_learning_rate,
)
from jagg.parity import check_parity
from jagg.policy import Policy
from jagg.probe import probe
from jagg.update import GrpoConfig, JaggConfig, grpo_update
from jagg.values import Reward, Rollout, UpdateStats


@params
class GRPOJAGGOptimizerParams(Params):
    """Learning rate, advantages, clipping, and how many backward passes an update costs."""

    learning_rate: Annotated[
        float,
        Field(
            minimum=0.0,
            maximum=1.0,
            step=1e-5,
            live=True,
            tooltip="AdamW's learning rate after the warm-up.",
        ),
    ] = 3e-4
    warmup: Annotated[
        int,
        Field(
            minimum=0,
            maximum=1_000_000,
            unit="ticks",
            tooltip="Ticks over which the rate rises to its full value.",
        ),
    ] = 0
    decay: Annotated[
        Decay,
        Field(
            tooltip="How the rate falls after the warm-up.",
        ),
    ] = "constant"
    final_fraction: Annotated[
        float,
        Field(
            minimum=0.0,
            maximum=1.0,
            step=0.05,
            tooltip="Share of the rate that is left at the end of the decay.",
        ),
    ] = 0.1
    decay_ticks: Annotated[
        int,
        Field(
            minimum=0,
            maximum=1_000_000,
            unit="ticks",
            advanced=True,
            tooltip="Tick at which the decay ends; 0 = the run's last, as recorded when it started.",
        ),
    ] = 0
    beta_1: Annotated[
        float,
        Field(
            minimum=0.0,
            maximum=0.99999,
            advanced=True,
            tooltip="AdamW's decay of the mean of gradients.",
        ),
    ] = 0.9
    beta_2: Annotated[
        float,
        Field(
            minimum=0.0,
            maximum=0.99999,
            advanced=True,
            tooltip="AdamW's decay of the mean of squared gradients.",
        ),
    ] = 0.999
    weight_decay: Annotated[
        float, Field(minimum=0.0, maximum=10.0, advanced=True, tooltip="AdamW's weight decay.")
    ] = 1e-4
    adam_epsilon: Annotated[
        float,
        Field(minimum=1e-30, maximum=1.0, advanced=True, tooltip="Added to AdamW's denominator."),
    ] = 1e-8
    ema_decay: Annotated[
        float,
        Field(
            minimum=0.0,
            maximum=0.999999,
            step=0.01,
            tooltip="Decay of the running average of the weights; 0 keeps none.",
        ),
    ] = 0.0

    estimator: Annotated[
        Literal["exact", "windows"], Field(tooltip=doc_of(JaggConfig, "estimator"))
    ] = default_of(JaggConfig, "estimator")
    window: Annotated[int, Field(minimum=1, maximum=1000, tooltip=doc_of(JaggConfig, "window"))] = (
        default_of(JaggConfig, "window")
    )
    jagg_frac: Annotated[
        float,
        Field(
            minimum=0.0, maximum=1.0, step=0.05, live=True, tooltip=doc_of(JaggConfig, "jagg_frac")
        ),
    ] = default_of(JaggConfig, "jagg_frac")
    node_chunk: Annotated[
        int, Field(minimum=0, maximum=1000, advanced=True, tooltip=doc_of(JaggConfig, "node_chunk"))
    ] = default_of(JaggConfig, "node_chunk")
    probe_every: Annotated[
        int,
        Field(
            minimum=0,
            maximum=1_000_000,
            unit="ticks",
            advanced=True,
            tooltip="Compare with the exact gradient on one micro-batch this often; 0 = never.",
        ),
    ] = 0

    normalise: Annotated[
        Normalise,
        Field(tooltip=doc_of(GrpoConfig, "normalise")),
    ] = default_of(GrpoConfig, "normalise")
    advantage_epsilon: Annotated[
        float,
        Field(
            minimum=0.0, maximum=1.0, advanced=True, tooltip=doc_of(GrpoConfig, "advantage_epsilon")
        ),
    ] = default_of(GrpoConfig, "advantage_epsilon")
    advantage_clamp: Annotated[
        float,
        Field(
            minimum=0.01, maximum=1000.0, step=0.5, tooltip=doc_of(GrpoConfig, "advantage_clamp")
        ),
    ] = default_of(GrpoConfig, "advantage_clamp")
    advantage_control: Annotated[
        Literal["none", "shuffle"],
        Field(
            advanced=True,
            tooltip=doc_of(GrpoConfig, "advantage_control"),
        ),
    ] = default_of(GrpoConfig, "advantage_control")
    clip_nats: Annotated[
        float,
        Field(minimum=1e-9, maximum=1e9, unit="nats", tooltip=doc_of(GrpoConfig, "clip_nats")),
    ] = default_of(GrpoConfig, "clip_nats")
    clip_native: Annotated[
        float, Field(minimum=1e-9, maximum=1e9, tooltip=doc_of(GrpoConfig, "clip_native"))
    ] = default_of(GrpoConfig, "clip_native")
    kl_weight: Annotated[
        float,
        Field(
            minimum=0.0,
            maximum=1000.0,
            step=0.01,
            live=True,
            tooltip=doc_of(GrpoConfig, "kl_weight"),
        ),
    ] = default_of(GrpoConfig, "kl_weight")
    kl_form: Annotated[
        KlForm,
        Field(
            advanced=True,
            tooltip=doc_of(GrpoConfig, "kl_form"),
        ),
    ] = default_of(GrpoConfig, "kl_form")
    inner_epochs: Annotated[
        int,
        Field(minimum=1, maximum=100, advanced=True, tooltip=doc_of(GrpoConfig, "inner_epochs")),
    ] = default_of(GrpoConfig, "inner_epochs")
    accumulation: Annotated[
        int,
        Field(minimum=0, maximum=65536, advanced=True, tooltip=doc_of(GrpoConfig, "accumulation")),
    ] = default_of(GrpoConfig, "accumulation")
    max_grad_norm: Annotated[
        float,
        Field(minimum=0.0, maximum=1e6, step=0.1, tooltip=doc_of(GrpoConfig, "max_grad_norm")),
    ] = default_of(GrpoConfig, "max_grad_norm")
    max_nan_fraction: Annotated[
        float,
        Field(
            minimum=0.0, maximum=1.0, advanced=True, tooltip=doc_of(GrpoConfig, "max_nan_fraction")
        ),
    ] = default_of(GrpoConfig, "max_nan_fraction")

    def grpo(self) -> GrpoConfig:
        """The part of the widgets that is GRPO's."""
        return GrpoConfig(**{name: getattr(self, name) for name in GrpoConfig.__dataclass_fields__})

    def jagg(self) -> JaggConfig:
        """The part of the widgets that is the gradient estimator's."""
        return JaggConfig(
            estimator=self.estimator,
            window=self.window,
            jagg_frac=self.jagg_frac,
            node_chunk=self.node_chunk,
        )


class GRPOJAGGOptimizer(Node[GRPOJAGGOptimizerParams]):
    """Trains the policy on one rollout and its reward."""

    type = "GRPOJAGGOptimizer"
    version = 1
    title = "GRPO + JAGG Optimizer"
    category = "training"
    description = (
        "Group-relative policy optimisation with AdamW. JAGG aggregates the backward passes of a window of steps into two; "
        "`exact` makes one per step."
    )
    aliases = ("grpo", "jagg", "train", "optimizer", "adamw", "update")
    output = True

    class Outputs(NamedTuple):
        """The same policy, changed, and what the update did."""

        policy: Policy
        stats: UpdateStats

    def open(self, ctx: RunContext) -> None:  # noqa: ARG002  the context is part of the method
        """Start without an optimizer: it is made for the first policy that arrives."""
        self._optimizer: Any = None
        self._ema: Ema | None = None
        self._restored: dict[str, Any] | None = None
        self._checked = False

    def run(
        self,
        ctx: RunContext,
        *,
        policy: Annotated[Policy, Changes()],
        rollout: Annotated[Rollout, NeedsEvery()],
        reward: Annotated[Reward, NeedsEvery()],
    ) -> Outputs:
        """One update; before the first of a run or resume the parity gate must pass.

        Raises:
            JaggError: the KL weight rose from 0 after training began: the weights from before are gone.
        """
        settings, grpo = self.params, self.params.grpo()
        self._prepare(policy)
        if grpo.kl_weight > 0 and policy.reference is None:
            msg = (
                f"GRPO + JAGG Optimizer: `kl_weight` is {grpo.kl_weight}, but training began with 0, so the weights from before it, "
                "which the KL term refers to, were not kept. Set it back to 0, or start a new run with a weight above 0."
            )
            raise JaggError(msg)
        if not self._checked:
            clip = grpo.clip(rollout.transition, rollout.final_latents[0].numel())
            measured = check_parity(policy, rollout, clip=clip)
            # Not a metric: a resumed run passes the gate once more, and its metrics must equal an uninterrupted run's.
            ctx.progress(0, 1, f"parity gate passed: max |delta log-prob| = {measured:.2g}")
            self._checked = True
        total = reward.total()
        finite = total[total.isfinite()]
        if len(finite):
            ctx.metric("reward/mean", float(finite.mean()))
            ctx.metric("reward/std", float(finite.std(correction=0)))
        if settings.probe_every and ctx.tick % settings.probe_every == 0:
            compared = probe(
                policy, rollout, reward, config=grpo, jagg=settings.jagg(), generator=ctx.generator
            )
            for name, value in compared.items():
                ctx.metric(name, value)
        rate = learning_rate(
            ctx.tick,
            lr=settings.learning_rate,
            warmup=settings.warmup,
            total=settings.decay_ticks or ctx.total_ticks,
            decay=settings.decay,
            final_fraction=settings.final_fraction,
        )
        set_learning_rate(self._optimizer, rate)
        stats = grpo_update(
            policy,
            rollout,
            reward,
            config=grpo,
            jagg=settings.jagg(),
            optimizer=self._optimizer,
            generator=ctx.generator,
            on_step=ctx.progress,
            backward=ctx.backward,
            ema=self._ema,
        )
        stats = UpdateStats(values={**stats.values, "learning_rate": rate})
        for name, value in stats.values.items():
            ctx.metric(name, value)
        return self.Outputs(policy=policy, stats=stats)

    def refuse_live(self, params: GRPOJAGGOptimizerParams) -> str | None:
        """A KL term needs the weights from before training, which are kept only where it had a weight from the start."""
        if self._optimizer is not None:
            kept = self._policy.reference is not None
        else:
            kept = self._restored is None or self.params.kl_weight > 0
        if params.kl_weight > 0 and not kept:
            return (
                "`kl_weight` cannot rise from 0, because training began without it and the weights that the KL term "
                "refers to were not kept; start a new run with a weight above 0."
            )
        return None

    def _prepare(self, policy: Policy) -> None:
        """Make optimizer and average for the policy once, and put a checkpoint's state into them."""
        if self._optimizer is not None:
            return
        settings = self.params
        if any(name.startswith("text_encoder.") for name in policy.trainable()):
            msg = (
                "GRPO + JAGG Optimizer: the policy's text encoder is set to learn, but a rollout keeps its output, not its "
                "graph. Switch `train_text_encoder` off on the DiT Loader."
            )
            raise JaggError(msg)
        self._optimizer = adamw(
            policy,
            lr=settings.learning_rate,
            betas=(settings.beta_1, settings.beta_2),
            weight_decay=settings.weight_decay,
            eps=settings.adam_epsilon,
        )
        self._policy = policy
        if settings.kl_weight > 0:
            policy.keep_reference()
        if settings.ema_decay > 0:
            self._ema = Ema(policy, decay=settings.ema_decay)
        if self._restored is not None:
            load_optimizer_state(policy, self._optimizer, self._restored["optimizer"])
            if self._ema is not None and self._restored["ema"] is not None:
                self._ema.load_state(policy, self._restored["ema"])
            self._restored = None

    def state(self) -> dict[str, Any]:
        """Moments and step counts by parameter name, and the running average."""
        if self._optimizer is None:
            return self._restored or {"optimizer": {}, "ema": None}
        return {
            "optimizer": optimizer_state(self._policy, self._optimizer),
            "ema": None if self._ema is None else self._ema.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Keep the state until the policy arrives."""
        self._restored = state
