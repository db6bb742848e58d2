"""The DiT loader: the policy that the rest of the graph samples and trains."""

import difflib
import re
from typing import Annotated, Any, Literal, NamedTuple

from app.graph import Field, Node, Params, RunContext, params
from jagg.errors import JaggError
from jagg.policy import Policy
from nodes.backends.families import SHIPPED, load_family


def _nearest(model: str) -> str:
    close = difflib.get_close_matches(model, SHIPPED, n=1)
    return f" Did you mean {close[0]}?" if close else ""


@params
class DiTLoaderParams(Params):
    """Which weights to load, and which of them learn."""

    model: Annotated[
        str,
        Field(
            tooltip="embedded/noisy or embedded/clean (shipped), embedded/random (untrained), or a .safetensors file of the models folder.",
        ),
    ] = "embedded/noisy"
    train: Annotated[
        Literal["full", "match"],
        Field(
            tooltip="Train every weight of the transformer, or those that `train_patterns` names.",
        ),
    ] = "full"
    train_patterns: Annotated[
        str,
        Field(
            multiline=True,
            tooltip="Regular expressions, one per line, searched in parameter names such as transformer.proj_out.weight. Used when `train` is match.",
        ),
    ] = ""
    train_text_encoder: Annotated[
        bool,
        Field(
            advanced=True,
            tooltip="The text encoder learns too (pretraining). Its outputs are then never cached.",
        ),
    ] = False
    init_seed: Annotated[
        int,
        Field(
            minimum=0,
            maximum=2**31 - 1,
            advanced=True,
            tooltip="Seed of the weights of embedded/random.",
        ),
    ] = 0

    def __post_init__(self) -> None:
        """Check the patterns.

        Raises:
            ValueError: `train` is match without patterns, or a pattern is no regular expression.
        """
        if self.model.startswith("embedded/") and self.model not in SHIPPED:
            msg = f"`model` is {self.model!r}; shipped are {', '.join(SHIPPED)}.{_nearest(self.model)}"
            raise ValueError(msg)
        if self.train == "match" and not self.patterns():
            msg = "`train` is match, but `train_patterns` is empty; name the parameters that learn, one regular expression per line."
            raise ValueError(msg)
        for pattern in self.patterns():
            try:
                re.compile(pattern)
            except re.error as error:
                msg = f"`train_patterns`: {pattern!r} is no regular expression ({error})."
                raise ValueError(msg) from error

    def patterns(self) -> tuple[str, ...]:
        """The patterns, one per non-empty line."""
        return tuple(line.strip() for line in self.train_patterns.splitlines() if line.strip())


class DiTLoader(Node[DiTLoaderParams]):
    """Loads a diffusion transformer with its text encoder and marks what learns."""

    type = "DiTLoader"
    version = 1
    title = "DiT Loader"
    category = "models"
    description = "Loads a diffusion transformer and says which of its weights learn."
    aliases = ("model", "checkpoint loader", "load", "policy", "transformer")
    cacheable = False

    class Outputs(NamedTuple):
        """The policy: one object that sampler and optimizer share."""

        policy: Policy

    def run(self, ctx: RunContext) -> Outputs:
        """Load the weights and freeze what does not learn.

        Raises:
            JaggError: a pattern matches no parameter; the message lists the parameters' common beginnings.
        """
        settings = self.params
        family = load_family(settings.model, ctx.resolve, settings.init_seed, ctx.device)
        policy = Policy(family=family)
        names = [name for name, _ in policy.module.named_parameters()]
        if settings.train == "match":
            chosen = {
                name
                for name in names
                if any(re.search(pattern, name) for pattern in settings.patterns())
            }
            for pattern in settings.patterns():
                if not any(re.search(pattern, name) for name in names):
                    parts = sorted(
                        {part for name in names for part in name.split(".") if not part.isdigit()}
                    )
                    msg = (
                        f"DiT Loader: `train_patterns`: {pattern!r} matches no parameter of {settings.model}. "
                        f"Names are made of: {', '.join(parts)}."
                    )
                    raise JaggError(msg)
        else:
            chosen = set(names)
        if not settings.train_text_encoder:
            chosen = {name for name in chosen if not name.startswith("text_encoder.")}
        for name, parameter in policy.module.named_parameters():
            parameter.requires_grad_(name in chosen)
        if not chosen:
            msg = (
                "DiT Loader: `train_patterns` match the text encoder alone, which does not learn; "
                "switch `train_text_encoder` on or name parameters of the transformer."
            )
            raise JaggError(msg)
        policy.module.eval()
        ctx.prepare(policy.module)
        policy.compute_dtype = ctx.dtype
        self._policy = policy
        return self.Outputs(policy=policy)

    def state(self) -> dict[str, Any]:
        """The learning weights, their average and reference, the version and the plan."""
        policy = self._policy
        return {
            "weights": {name: p.detach() for name, p in policy.trainable().items()},
            "ema": policy.ema,
            "reference": policy.reference,
            "version": policy.version,
            "plan": policy.plan,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned.

        Raises:
            JaggError: the learning weights are others than those of the checkpoint.
        """
        policy = self._policy
        policy.load_trainable(state["weights"])
        # A checkpoint is read on the CPU; lent weights must lie where the model computes.
        own = policy.trainable()
        policy.ema, policy.reference = (
            None
            if state[kept] is None
            else {name: tensor.to(own[name].device) for name, tensor in state[kept].items()}
            for kept in ("ema", "reference")
        )
        policy.version, policy.plan = state["version"], state["plan"]
