"""The embedded policy: a pixel-space SD3 transformer with a small CLIP text encoder over the shapes vocabulary.

Axes: N samples; C, H, W channels, height and width; S tokens of a caption.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from jagg.errors import JaggError
from jagg.values import Conditioning
from nodes.backends.shapes import BACKGROUNDS, COLOURS, POSITIONS, RADII, SHAPES

# The order is part of every weights file: append only.
_SPECIAL = ("<pad>", "<unk>", "<bos>", "<eos>")
_GLUE = ("a", "an", "and", "at", "the", "on", "background")
VOCABULARY = (*_SPECIAL, *_GLUE, *RADII, *COLOURS, *SHAPES, *POSITIONS, *BACKGROUNDS)
_PAD, _UNKNOWN, _BEGIN, _END = range(4)
_TOKEN = {word: index for index, word in enumerate(VOCABULARY)}

# SD3 was built for timesteps in 0..1000.
_TIMESTEPS = 1000.0
# Adaptive norms and the output layer start near zero (adaLN-zero, Peebles & Xie 2023), but not at it: gradients of
# every parameter are then non-zero from the first step on.
_SMALL_INIT = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyDiTConfig:
    """Sizes of the model; the defaults are those of the shipped weights."""

    size_px: int = 24
    patch: int = 4
    channels: int = 3
    layers: int = 3
    heads: int = 3
    head_width: int = 32
    text_width: int = 64
    text_layers: int = 2
    text_heads: int = 2
    tokens: int = 14
    """Caption length S, with begin and end; the longest caption of the shapes grammar has 13."""
    vocabulary: int = 64
    """Rows of the token embedding; those beyond the known words are spare."""

    def digest(self) -> str:
        """Twelve hexadecimal digits that change with any size or word."""
        text = json.dumps([asdict(self), VOCABULARY], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


class TinyDiT:
    """The family of the embedded policy. Latents are pixels in [-1, 1].

    Conditioning: `text` (N, S, text_width), `pooled` (N, text_width).
    """

    family = "tiny_dit"

    def __init__(self, config: TinyDiTConfig) -> None:
        """Modules with the weights that the global random stream gives; use `build` or `load`."""
        # Seconds of imports that only a run needs: validating a graph must not wait for them.
        from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
        from transformers.models.clip.configuration_clip import CLIPTextConfig
        from transformers.models.clip.modeling_clip import CLIPTextModel

        self.name = self.family
        self.config = config
        self.metadata: dict[str, str] = {}
        """What the weights file says of its making; empty for new weights."""
        self.latent_shape: tuple[int, ...] = (config.channels, config.size_px, config.size_px)
        width = config.heads * config.head_width
        self.transformer: nn.Module = SD3Transformer2DModel(
            sample_size=config.size_px,
            patch_size=config.patch,
            in_channels=config.channels,
            out_channels=config.channels,
            num_layers=config.layers,
            num_attention_heads=config.heads,
            attention_head_dim=config.head_width,
            joint_attention_dim=config.text_width,
            caption_projection_dim=width,
            pooled_projection_dim=config.text_width,
            pos_embed_max_size=config.size_px // config.patch,
            qk_norm="rms_norm",
        )
        self.text_encoder: nn.Module = CLIPTextModel(
            CLIPTextConfig(
                vocab_size=config.vocabulary,
                hidden_size=config.text_width,
                projection_dim=config.text_width,
                intermediate_size=4 * config.text_width,
                num_hidden_layers=config.text_layers,
                num_attention_heads=config.text_heads,
                max_position_embeddings=config.tokens + 2,
                pad_token_id=_PAD,
                bos_token_id=_BEGIN,
                eos_token_id=_END,
            )
        )
        self.transformer.eval()
        self.text_encoder.eval()

    @classmethod
    def build(cls, config: TinyDiTConfig | None = None, *, seed: int) -> Self:
        """Random weights that depend on `seed` alone; the caller's random stream does not move."""
        with torch.random.fork_rng(devices=[]):
            # The libraries' initialisers take no generator; the fork keeps this seed inside the block.
            torch.default_generator.manual_seed(seed)
            result = cls(config or TinyDiTConfig())
            for name, parameter in result.transformer.named_parameters():
                if ("norm" in name and "linear" in name) or name.startswith("proj_out"):
                    nn.init.normal_(parameter, std=_SMALL_INIT)
        return result

    @classmethod
    def load(cls, path: Path) -> Self:
        """The family of a file that `save` wrote, in float32.

        Raises:
            JaggError: the file is of another family, or its names or sizes do not fit.
        """
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118  no mapping
        if metadata.get("family") != cls.family:
            msg = f"TinyDiT: {path.name} is of family {metadata.get('family')!r}, expected {cls.family!r}."
            raise JaggError(msg)
        config = TinyDiTConfig(**json.loads(metadata["config"]))
        if metadata.get("config_digest") != config.digest():
            msg = (
                f"TinyDiT: {path.name} was written with other sizes or words (digest {metadata.get('config_digest')}, "
                f"expected {config.digest()}). Train the weights again with this version."
            )
            raise JaggError(msg)
        result = cls.build(config, seed=0)
        own = result._parameters()
        if own.keys() != tensors.keys():
            odd = sorted(own.keys() ^ tensors.keys())[:3]
            msg = f"TinyDiT: {path.name} does not hold the model's parameters; missing or unknown: {', '.join(odd)}."
            raise JaggError(msg)
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(tensors[name])
        result.metadata = metadata
        return result

    def save(
        self,
        path: Path,
        weights: Mapping[str, Tensor] | None = None,
        metadata: Mapping[str, str] | None = None,
        dtype: torch.dtype = torch.float16,
    ) -> None:
        """Write every parameter, those of `weights` instead of the model's own, rounded to `dtype`.

        `metadata` joins what the file must say to be loaded again: family, sizes and a digest.
        """
        chosen = {**self._parameters(), **(weights or {})}
        save_file(
            {
                name: tensor.detach().to("cpu", dtype).contiguous()
                for name, tensor in chosen.items()
            },
            path,
            metadata={
                **(metadata or {}),
                "family": self.family,
                "config": json.dumps(asdict(self.config)),
                "config_digest": self.config.digest(),
            },
        )

    def to(self, device: torch.device | str) -> Self:
        """Itself, with its modules moved to `device`."""
        self.transformer.to(device)
        self.text_encoder.to(device)
        return self

    def encode(self, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Token states and the state at the caption's end; an empty prompt is the unconditional one.

        Words are lower-cased and split at spaces; unknown ones share a token. Equal captions get equal results.
        """
        rows = [tokenise(prompt, self.config.tokens) for prompt in prompts]
        ids = torch.tensor(rows, device=next(self.text_encoder.parameters()).device)
        output = self.text_encoder(input_ids=ids)
        return {"text": output.last_hidden_state, "pooled": output.pooler_output}

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """The velocity noise - x0; shape latents and result (N, C, H, W), sigma (N,) in [0, 1]."""
        output: Tensor = self.transformer(
            hidden_states=latents,
            encoder_hidden_states=conditioning["text"],
            pooled_projections=conditioning["pooled"],
            timestep=sigma * _TIMESTEPS,
            return_dict=False,
        )[0]
        return output

    def decode(self, latents: Tensor) -> Tensor:
        """Pixels in [-1, 1] to images in [0, 1], clamped; shape (N, C, H, W)."""
        return ((latents + 1) / 2).clamp(0, 1)

    def _parameters(self) -> dict[str, nn.Parameter]:
        """Every parameter by the name that a policy gives it."""
        parts = (("transformer", self.transformer), ("text_encoder", self.text_encoder))
        return {
            f"{part}.{name}": p for part, module in parts for name, p in module.named_parameters()
        }


def tokenise(text: str, length: int) -> list[int]:
    """Token indices of a caption between begin and end, padded to `length`; words that do not fit are cut off."""
    words = text.lower().replace(",", " ").replace(".", " ").split()[: length - 2]
    tokens = [_BEGIN, *(_TOKEN.get(word, _UNKNOWN) for word in words), _END]
    return tokens + [_PAD] * (length - len(tokens))
