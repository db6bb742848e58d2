import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from jagg.errors import JaggError
from jagg.policy import Policy
from jagg.randomness import generator, generator_factory
from jagg.rollout import sample_ode
from jagg.schedule import sigma_schedule
from jagg.values import PromptBatch
from nodes.backends import tiny_dit
from nodes.backends.shapes import (
    BACKGROUNDS,
    COLOURS,
    POSITIONS,
    SHAPES,
    Scene,
    ShapeObject,
    composition_split,
    held_out_prompts,
    held_out_scenes,
    render,
    render_batch,
)
from nodes.backends.tiny_dit import VOCABULARY, TinyDiT, TinyDiTConfig, tokenise

SMALL = TinyDiTConfig(size_px=8, layers=1, heads=2, head_width=8, text_width=16, text_layers=1)
PROMPTS = (
    "a large red star on a white background",
    "",
    "a green ring and an orange cross on a black background",
)


@pytest.fixture(scope="module")
def family():
    return TinyDiT.build(SMALL, seed=0)


def _velocity(family, prompts=PROMPTS, seed=0):
    latents = torch.randn(len(prompts), *family.latent_shape, generator=generator(seed))
    with torch.no_grad():
        return family.velocity(latents, torch.full((len(prompts),), 0.5), family.encode(prompts))


def test_the_default_sizes_are_those_of_the_shipped_weights():
    family = TinyDiT.build(seed=0)
    assert sum(p.numel() for p in family.transformer.parameters()) == 967_344
    assert sum(p.numel() for p in family.text_encoder.parameters()) == 105_216
    assert family.latent_shape == (3, 24, 24)


def test_velocity_has_the_shape_of_the_latents_and_depends_on_everything(family):
    velocity = _velocity(family)
    assert velocity.shape == (3, 3, 8, 8)
    latents = torch.randn(1, *family.latent_shape, generator=generator(0))
    with torch.no_grad():
        text = family.encode(("a",))
        one = family.velocity(latents, torch.tensor([0.5]), text)
        assert not torch.equal(one, family.velocity(latents, torch.tensor([0.6]), text))
        assert not torch.equal(
            one, family.velocity(latents, torch.tensor([0.5]), family.encode(("red",)))
        )
        assert not torch.equal(one, family.velocity(latents + 1, torch.tensor([0.5]), text))


def test_the_timestep_is_a_thousand_sigma(family):
    seen = []
    hook = family.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["timestep"]), with_kwargs=True
    )
    _velocity(family)
    hook.remove()
    assert seen[0].tolist() == [500.0] * 3


def test_equal_seeds_build_equal_weights_and_leave_the_global_stream_alone(family):
    before = torch.get_rng_state()
    again, other = TinyDiT.build(SMALL, seed=0), TinyDiT.build(SMALL, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(_velocity(again), _velocity(family))
    assert not torch.equal(_velocity(other), _velocity(family))


def test_every_parameter_gets_a_gradient_from_random_weights():
    family = TinyDiT.build(SMALL, seed=0)
    policy = Policy(family=family)
    latents = torch.randn(3, *family.latent_shape, generator=generator(0))
    policy.velocity(
        latents, torch.full((3,), 0.5), family.encode(PROMPTS)
    ).square().sum().backward()
    without = {
        name for name, p in policy.module.named_parameters() if p.grad is None or not p.grad.any()
    }
    # The last block of an SD3 transformer reads the text but does not change it: no query is made from it.
    assert without <= {
        name
        for name, _ in policy.module.named_parameters()
        if "add_q_proj" in name or "norm_added_q" in name
    }


def test_encode_builds_a_graph_only_where_grad_is_enabled(family):
    assert family.encode(("a",))["text"].requires_grad
    assert not Policy(family=family).encode(("a",))["text"].requires_grad


def test_a_caption_is_encoded_alike_alone_and_in_company(family):
    with torch.no_grad():
        alone, company = family.encode(PROMPTS[2:]), family.encode(PROMPTS)
    torch.testing.assert_close(alone["text"][0], company["text"][2])
    torch.testing.assert_close(alone["pooled"][0], company["pooled"][2])
    assert not torch.allclose(company["pooled"][0], company["pooled"][1])


def test_decode_maps_latents_to_the_unit_range(family):
    latents = torch.tensor([-3.0, -1.0, 0.0, 1.0, 3.0]).expand(1, 3, 8, 5)
    assert family.decode(latents)[0, 0, 0].tolist() == [0, 0, 0.5, 1, 1]


def test_every_caption_of_the_grammar_fits_and_is_known():
    for prompt in held_out_prompts(300, composition_split(0), 0):
        tokens = tokenise(prompt, TinyDiTConfig().tokens)
        assert len(tokens) == 14
        assert VOCABULARY.index("<unk>") not in tokens
        assert tokens.count(VOCABULARY.index("<eos>")) == 1
    words = {*COLOURS, *SHAPES, *POSITIONS, *BACKGROUNDS}
    assert words <= set(VOCABULARY)
    assert len(set(VOCABULARY)) == len(VOCABULARY) <= TinyDiTConfig().vocabulary


def test_tokens_of_unknown_long_and_empty_texts():
    assert tokenise("A zebra, red.", 6) == [
        2,
        VOCABULARY.index("a"),
        1,
        VOCABULARY.index("red"),
        3,
        0,
    ]
    assert tokenise("", 4) == [2, 3, 0, 0]
    assert tokenise("red " * 50, 5) == [2, *[VOCABULARY.index("red")] * 3, 3]


def test_saved_weights_load_in_half_precision_with_their_notes(family, tmp_path):
    path = tmp_path / "weights.safetensors"
    family.save(path, metadata={"note": "x"})
    loaded = TinyDiT.load(path)
    assert loaded.metadata["note"] == "x"
    assert loaded.config == SMALL
    torch.testing.assert_close(_velocity(loaded), _velocity(family), atol=5e-3, rtol=5e-3)
    for name, tensor in loaded.transformer.named_parameters():
        assert torch.equal(tensor, dict(family.transformer.named_parameters())[name].half().float())
    family.save(path, dtype=torch.float32)
    assert torch.equal(_velocity(TinyDiT.load(path)), _velocity(family))


def test_lent_weights_are_saved_in_place_of_the_own_ones(family, tmp_path):
    name = "transformer.proj_out.bias"
    family.save(tmp_path / "w.safetensors", {name: torch.full((48,), 7.0)})
    assert load_file(tmp_path / "w.safetensors")[name].tolist() == [7.0] * 48
    assert not bool((family.transformer.proj_out.bias == 7).any())


def test_files_of_other_families_sizes_or_names_are_refused(family, tmp_path):
    path = tmp_path / "w.safetensors"
    save_file({"a": torch.zeros(1)}, path, metadata={"family": "flux"})
    with pytest.raises(JaggError, match="family 'flux'"):
        TinyDiT.load(path)
    family.save(path)
    good = TinyDiT.load(path).metadata
    save_file(load_file(path), path, metadata={**good, "config": json.dumps({"size_px": 16})})
    with pytest.raises(JaggError, match="other sizes or words"):
        TinyDiT.load(path)
    save_file({"a": torch.zeros(1)}, path, metadata=good)
    with pytest.raises(JaggError, match="missing or unknown"):
        TinyDiT.load(path)


@pytest.mark.parametrize("name", ["clean", "noisy"])
def test_shipped_weights_point_from_noise_to_the_picture(name):
    path = Path(tiny_dit.__file__).parent / "weights" / f"{name}.safetensors"
    family = TinyDiT.load(path)
    assert path.stat().st_size < 2.5e6
    assert {"licence", "recipe", "scores", "cpu_seconds"} <= family.metadata.keys()
    assert family.config == TinyDiTConfig()
    scenes = held_out_scenes(16, composition_split(0), 0)
    x0 = torch.from_numpy(render_batch(scenes, 24)).permute(0, 3, 1, 2).float() * 2 - 1
    noise = torch.randn(x0.shape, generator=generator(0))
    with torch.no_grad():
        conditioning = family.encode([scene.prompt() for scene in scenes])
        for sigma in (0.1, 0.3, 0.7):
            x = (1 - sigma) * x0 + sigma * noise
            velocity = family.velocity(x, torch.full((16,), sigma), conditioning)
            distance = [
                (guess - x0).square().mean()
                for guess in (x - sigma * velocity, x, x + sigma * velocity)
            ]
            assert 4 * distance[0] < distance[1] < distance[2]


def test_the_clean_base_heeds_its_caption_more_than_the_noisy_one():
    weights = Path(tiny_dit.__file__).parent / "weights"
    scene = Scene(
        objects=(ShapeObject(colour="blue", shape="circle", size="large", position="center"),),
        background="white",
    )
    share = {}
    for name in ("clean", "noisy"):
        policy = Policy(family=TinyDiT.load(weights / f"{name}.safetensors"))
        images = sample_ode(
            policy,
            PromptBatch(prompts=(scene.prompt(),), group_size=24),
            id="test",
            sigmas=sigma_schedule(8, shift=1.0),
            guidance_scale=1.0,
            micro_batch=24,
            generator=generator_factory(0),
            on_step=None,
        ).images
        distance = (
            (images - torch.from_numpy(render(scene, 24)).permute(2, 0, 1).float())
            .square()
            .mean((1, 2, 3))
        )
        share[name] = float((distance < 0.02).float().mean())
    assert share["clean"] > 0.9
    assert share["noisy"] < share["clean"]
