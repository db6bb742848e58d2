"""The two judges of shape behind the independent scorer, and how they learn from distorted drawings.

A small convolutional network reads an object's crop; a multilayer perceptron reads thirty numbers of its outline.
Axes: B drawings of a training batch; K shape names.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from jagg.optimizers import set_learning_rate
from jagg.randomness import derive_seed, generator
from nodes.backends.shape_contours import (
    CONTOUR_FEATURES,
    CROP,
    Array,
    border_colour,
    contour_features,
    crop_object,
    find_foreground,
)
from nodes.backends.shapes import SHAPES, signed_distance


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassifierTraining:
    """How the classifiers learn; the defaults made the shipped weights."""

    steps: int = 220
    batch: int = 64
    """Drawings per step, all new."""
    lr: float = 3e-3
    """Peak of AdamW's learning rate; 20 steps of warm-up, then a cosine to zero."""
    weight_decay: float = 1e-2
    label_smoothing: float = 0.02


class ShapeClassifiers(nn.Module):
    """Both classifiers: logits over `SHAPES` from crops, and from contour features.

    Weights are drawn from `generator`, layer by layer in module order.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, random: torch.Generator) -> None:
        super().__init__()
        kinds = len(SHAPES)
        self.network = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1, stride=2),
            nn.ReLU(),
            nn.Conv2d(32, 48, 3, padding=1, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(48 * (CROP // 4) ** 2, 96),
            nn.ReLU(),
            nn.Linear(96, kinds),
        )
        self.contour = nn.Sequential(
            nn.Linear(CONTOUR_FEATURES, 64),
            nn.ReLU(),
            nn.Linear(64, 64),
            nn.ReLU(),
            nn.Linear(64, kinds),
        )
        self.register_buffer("mean", torch.zeros(CONTOUR_FEATURES))
        self.register_buffer("scale", torch.ones(CONTOUR_FEATURES))
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_uniform_(module.weight, a=math.sqrt(5), generator=random)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def shape_logits(self, crops: Tensor) -> Tensor:
        """The network's verdict; shape (B, CROP, CROP) to (B, K)."""
        return self.network(crops[:, None] - 0.5)  # type: ignore[no-any-return]

    def contour_logits(self, features: Tensor) -> Tensor:
        """The perceptron's verdict; shape (B, CONTOUR_FEATURES) to (B, K)."""
        standard = ((features - self.mean) / self.scale).clamp(-6, 6)
        return self.contour(standard)  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawingBatch:
    """Objects as the classifiers see them. Shape: crops (B, CROP, CROP); features (B, CONTOUR_FEATURES); kind (B,)."""

    crops: Tensor
    features: Tensor
    kind: Tensor


def draw_batch(count: int, *, seed: int, key: str, tick: int) -> DrawingBatch:
    """New distorted drawings, found again by the scorer's own segmentation; equal keys give equal batches.

    Drawings whose object is not found are drawn again.
    """
    random = np.random.default_rng(derive_seed(seed, "shape_check", key, tick))
    crops: list[Array] = []
    features: list[Array] = []
    kinds: list[int] = []
    while len(kinds) < count:
        kind = int(random.integers(len(SHAPES)))
        image = distorted_drawing(SHAPES[kind], random)
        found = find_foreground(image, border_colour(image))
        if found is None:
            continue
        crop = crop_object(found)
        crops.append(crop)
        features.append(contour_features(crop))
        kinds.append(kind)
    return DrawingBatch(
        crops=torch.from_numpy(np.stack(crops)).float(),
        features=torch.from_numpy(np.stack(features)).float(),
        kind=torch.tensor(kinds),
    )


def distorted_drawing(shape: str, random: np.random.Generator) -> Array:
    """A shape in random colours, turned, stretched, dented, ragged, blurred and noisy; shape (H, W, 3), 24 or 32 pixels."""
    side = int(random.choice((24, 32)))
    radius = float(np.exp(random.uniform(math.log(0.17), math.log(0.42))))
    reach = max(0.0, 0.47 - radius)
    centre = 0.5 + random.uniform(-reach, reach, 2)
    points = (np.arange(side * 3) + 0.5) / (side * 3)
    x, y = np.meshgrid((points - centre[0]) / radius, (points - centre[1]) / radius)
    turn = math.radians(random.uniform(-10, 10))
    stretch = math.exp(random.uniform(-0.13, 0.13))
    x, y = (
        (math.cos(turn) * x - math.sin(turn) * y) * stretch,
        (math.sin(turn) * x + math.cos(turn) * y) / stretch,
    )
    angle = np.arctan2(y, x)
    dents = 1 + sum(
        random.normal(0, 0.04) * np.cos(order * angle + random.uniform(0, 2 * math.pi))
        for order in range(2, 7)
    )
    fine = signed_distance(shape, x * dents, y * dents) * radius * side
    coverage = np.clip(0.5 - fine, 0, 1).reshape(side, 3, side, 3).mean((1, 3))
    ragged = _blurred(random.normal(0, random.uniform(0, 0.3), coverage.shape), 0.2)
    # Only soft edges are ragged: paint and paper keep their levels.
    coverage = np.clip(coverage + ragged * 4 * coverage * (1 - coverage), 0, 1)
    for _ in range(int(random.integers(0, 3))):
        coverage = _blurred(coverage, random.uniform(0, 0.25))
    paper, ink = _contrasting_colours(random)
    image = paper + coverage[..., None] * (ink - paper)
    image = image + random.normal(0, random.uniform(0, 0.06), image.shape)
    return np.asarray(np.clip(image, 0, 1))


def start(seed: int, training: ClassifierTraining) -> tuple[ShapeClassifiers, torch.optim.AdamW]:
    """Untrained classifiers, their features standardised on a batch of their own, and the optimizer."""
    classifiers = ShapeClassifiers(generator(seed, "shape_check", "initial"))
    sample = draw_batch(4 * training.batch, seed=seed, key="standard", tick=0).features
    classifiers.mean.copy_(sample.mean(0))
    classifiers.scale.copy_(sample.std(0).clamp_min(1e-3))
    return classifiers, torch.optim.AdamW(
        classifiers.parameters(), lr=training.lr, weight_decay=training.weight_decay
    )


def train_step(
    classifiers: ShapeClassifiers,
    optimizer: torch.optim.Optimizer,
    *,
    seed: int,
    tick: int,
    training: ClassifierTraining,
) -> dict[str, float]:
    """One step on the drawings of `tick` (from 0); losses and accuracies of the batch before the step."""
    batch = draw_batch(training.batch, seed=seed, key="train", tick=tick)
    set_learning_rate(optimizer, training.lr * _learning_rate_factor(tick, training.steps))
    result: dict[str, float] = {}
    loss = torch.zeros(())
    for name, logits in (
        ("shape", classifiers.shape_logits(batch.crops)),
        ("contour", classifiers.contour_logits(batch.features)),
    ):
        part = nn.functional.cross_entropy(
            logits, batch.kind, label_smoothing=training.label_smoothing
        )
        loss = loss + part
        result[f"{name}_loss"] = float(part.detach())
        result[f"{name}_accuracy"] = float((logits.argmax(1) == batch.kind).double().mean())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return result


def train(seed: int, training: ClassifierTraining) -> ShapeClassifiers:
    """Classifiers after all steps; the same seed gives the same weights, whatever else ran before."""
    classifiers, optimizer = start(seed, training)
    for tick in range(training.steps):
        train_step(classifiers, optimizer, seed=seed, tick=tick, training=training)
    return classifiers


def accuracy(classifiers: ShapeClassifiers, *, count: int, seed: int) -> dict[str, float]:
    """Share of `count` new distorted drawings that each classifier names correctly."""
    batch = draw_batch(count, seed=seed, key="test", tick=0)
    with torch.no_grad():
        return {
            "shape": float(
                (classifiers.shape_logits(batch.crops).argmax(1) == batch.kind).double().mean()
            ),
            "contour": float(
                (classifiers.contour_logits(batch.features).argmax(1) == batch.kind).double().mean()
            ),
        }


def save(classifiers: ShapeClassifiers, path: Path, metadata: dict[str, str]) -> None:
    """Write the weights as float16 safetensors with `metadata` (seed, steps, accuracy) in the header."""
    tensors = {name: t.detach().half().contiguous() for name, t in classifiers.state_dict().items()}
    save_file(tensors, path, metadata={**metadata, "shapes": ",".join(SHAPES)})


def load(path: Path) -> ShapeClassifiers:
    """Classifiers with the weights of `path`, in evaluation mode and without gradients."""
    classifiers = ShapeClassifiers(torch.Generator().manual_seed(0))
    classifiers.load_state_dict({name: tensor.float() for name, tensor in load_file(path).items()})
    return classifiers.eval().requires_grad_(False)


def _learning_rate_factor(tick: int, steps: int) -> float:
    warm = 20
    if tick < warm:
        return (tick + 1) / warm
    # A resumed run may go beyond the steps that it was started with: the rate stays at zero there.
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (tick - warm) / max(1, steps - warm))))


def _blurred(image: Array, weight: float) -> Array:
    """Each pixel mixed with its neighbours along both axes; `weight` goes to each side."""
    for axis in (0, 1):
        padded = np.pad(image, [(1, 1) if a == axis else (0, 0) for a in (0, 1)], mode="edge")
        before, after = (
            np.take(padded, range(image.shape[axis]), axis),
            np.take(padded, range(2, image.shape[axis] + 2), axis),
        )
        image = (1 - 2 * weight) * image + weight * (before + after)
    return image


def _contrasting_colours(random: np.random.Generator) -> tuple[Array, Array]:
    """Two random colours at least 0.45 apart in RGB."""
    while True:
        paper, ink = random.uniform(0, 1, 3), random.uniform(0, 1, 3)
        if np.linalg.norm(paper - ink) > 0.45:
            return paper, ink
