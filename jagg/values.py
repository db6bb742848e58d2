"""Values that travel on the links of a training graph: frozen, and each knows where it came from.

Axes: N = P·G samples of P prompts with G images each, T denoising steps; `*latent` is the shape of one sample's latent.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from jagg.errors import ShapeError, StaleRolloutError

if TYPE_CHECKING:
    from jagg.transitions import Transition

Conditioning = Mapping[str, Tensor]
"""What a model family needs to know of the prompts; every tensor has the batch on axis 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptBatch:
    """P prompts, each to be drawn G times; sample n belongs to prompt n // G.

    Example:
        >>> batch = PromptBatch(prompts=("a red circle", "a blue star"), group_size=3)
        >>> batch.group().tolist()
        [0, 0, 0, 1, 1, 1]
    """

    prompts: tuple[str, ...]
    group_size: int = 1
    metadata: tuple[Mapping[str, Any], ...] = ()
    """One mapping per prompt for scorers that need more than the text; empty, or as long as `prompts`."""
    negative_prompt: str = ""
    """The text of the unconditional branch of classifier-free guidance."""

    def __post_init__(self) -> None:
        """Check that the fields fit together.

        Raises:
            ShapeError: no prompts, a group size below 1, or metadata of another length than `prompts`.
        """
        if not self.prompts:
            msg = "PromptBatch: `prompts` is empty, expected at least one prompt."
            raise ShapeError(msg)
        if self.group_size < 1:
            msg = f"PromptBatch: `group_size` is {self.group_size}, expected 1 or more."
            raise ShapeError(msg)
        if self.metadata and len(self.metadata) != len(self.prompts):
            msg = f"PromptBatch: `metadata` has {len(self.metadata)} entries for {len(self.prompts)} prompts."
            raise ShapeError(msg)

    def __len__(self) -> int:
        """The number of samples N = P·G."""
        return len(self.prompts) * self.group_size

    def group(self) -> Tensor:
        """The prompt index of every sample; shape (N,), int64."""
        return torch.arange(len(self.prompts)).repeat_interleave(self.group_size)

    def sample_prompts(self) -> tuple[str, ...]:
        """The prompt of every sample, length N."""
        return tuple(prompt for prompt in self.prompts for _ in range(self.group_size))

    def sample_metadata(self) -> tuple[Mapping[str, Any], ...]:
        """The metadata of every sample, length N; empty mappings where the batch carries none."""
        metadata = self.metadata or tuple({} for _ in self.prompts)
        return tuple(entry for entry in metadata for _ in range(self.group_size))


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """One stochastic rollout of a policy: everything that an update needs to score it again.

    Latents, velocities and log-probs are float32. The trained (noisy) steps are the half-open range
    `noise_start`..`noise_stop` of the schedule's steps; T below is their number.

    Shape: sigmas (steps+1,); latents (T+1, N, *latent), the states before and after each trained step;
    final_latents (N, *latent); log_probs (T, N); velocities (T, N, *latent), guidance applied.
    """

    id: str
    prompts: PromptBatch
    conditioning: Conditioning
    unconditional: Conditioning | None
    """Conditioning of the unconditional branch; None where guidance is off."""
    guidance_scale: float
    """v = v_u + guidance_scale · (v_c - v_u); 1 means no guidance and a single forward."""
    transition: "Transition"
    sigmas: Tensor
    noise_start: int
    noise_stop: int
    latents: Tensor
    final_latents: Tensor
    log_probs: Tensor
    velocities: Tensor
    micro_batches: tuple[tuple[int, int], ...]
    """Half-open sample ranges that were forwarded together; the update follows them."""
    policy_version: int
    decode: Callable[[Tensor], Tensor] = field(repr=False)
    """Latents (n, *latent) to images (n, C, H, W) in [0, 1]."""

    def __len__(self) -> int:
        """The number of samples N."""
        return len(self.prompts)

    @property
    def trained_steps(self) -> int:
        """The number of trained steps T."""
        return self.noise_stop - self.noise_start

    def images(self, prompt: int) -> Tensor:
        """The images of one prompt group, decoded now; shape (G, C, H, W), float in [0, 1]."""
        size = self.prompts.group_size
        return self.decode(self.final_latents[prompt * size : (prompt + 1) * size])


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """Images of a deterministic (ODE) sampler; they carry no log-probs and cannot train a policy.

    Shape: latents (N, *latent); images (N, C, H, W), float in [0, 1].
    """

    id: str
    prompts: PromptBatch
    latents: Tensor
    images: Tensor
    policy_version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreRequest:
    """What a scorer gets to see: images and the prompts that they were drawn for.

    Shape: images (N, C, H, W), float in [0, 1], C = 3 or 4; prompts and metadata have length N.
    """

    images: Tensor
    prompts: Sequence[str]
    metadata: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreResult:
    """What a scorer answers. A sample that could not be scored is NaN, never 0.

    Shape: values (N,), in [0, 1] or NaN; raw (N,), native units; every part (N,).
    """

    values: Tensor
    raw: Tensor
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    """Named sub-terms for charts, such as `colour` or `texture`."""
    notes: tuple[str, ...] = ()
    """One remark per sample, such as the reason for a NaN; empty, or of length N."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scorer:
    """A reward model: a name for charts and a function that scores images one by one."""

    name: str
    version: int
    score: Callable[[ScoreRequest], ScoreResult] = field(repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardComponent:
    """One scorer's verdict on a rollout.

    Shape: values and raw (N,); NaN = could not score; every part (N,).
    """

    name: str
    weight: float
    values: Tensor
    raw: Tensor
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Reward:
    """The rewards of one rollout, one component per scorer."""

    rollout_id: str
    components: tuple[RewardComponent, ...]
    aggregation: Literal["sum"] = "sum"

    def total(self) -> Tensor:
        """The weighted mean of the components, sum(w·r)/sum(w); shape (N,), NaN where any weighted component is NaN.

        Components of weight 0 are only reported: their NaN does not count.
        """
        weighted = [c for c in self.components if c.weight != 0]
        scale = sum(c.weight for c in weighted)
        total = sum(
            (c.weight * c.values.double() for c in weighted),
            torch.zeros(len(self), dtype=torch.float64),
        )
        return total / scale if scale else total

    def __len__(self) -> int:
        """The number of samples N."""
        return len(self.components[0].values)

    def check_belongs_to(self, rollout: Rollout) -> None:
        """Refuse a reward that was given for another rollout.

        Raises:
            StaleRolloutError: the rollout ids differ.
            ShapeError: the number of values differs from the rollout's N.
        """
        if self.rollout_id != rollout.id:
            msg = (
                f"Reward: it scores rollout {self.rollout_id!r}, but the optimizer reads rollout {rollout.id!r}. "
                "Feed the optimizer the reward of the card that reads its own rollout."
            )
            raise StaleRolloutError(msg)
        if len(self) != len(rollout):
            msg = (
                f"Reward: values have shape ({len(self)},), expected (N,) = ({len(rollout)},) from the rollout "
                f"(P={len(rollout.prompts.prompts)}, G={rollout.prompts.group_size})."
            )
            raise ShapeError(msg)


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateStats:
    """Scalars that describe one update or evaluation, by metric name (README lists the names and units)."""

    values: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A handle of weights on disk: immutable, and never a live object.

    `path` is relative to the run directory; `digest` is the SHA-256 of the file.
    """

    path: str
    tick: int
    policy_version: int
    digest: str
