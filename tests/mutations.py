"""Faults put into the algorithm on purpose: each must make a named acceptance test fail.

`python tests/mutations.py [WORD ...]` copies the tree for each fault, applies it, and runs its test there; with words, only faults
whose row contains one of them. The exit code is the number of faults that no test noticed.
"""

import logging
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("jagg", "tests/unit/jagg", "tests/conftest.py", "pyproject.toml")
UNIT = "tests/unit/jagg"
TESTS_FAILED = 1  # pytest's exit code; others mean that the test did not run
_log = logging.getLogger("mutations")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutation:
    """One fault."""

    row: str
    """The acceptance row that it violates."""
    file: str
    original: str
    """A snippet that occurs exactly once in the file."""
    mutated: str
    test: str
    """The test that must fail, relative to the unit tests of the library."""


def mutation(row: str, file: str, original: str, mutated: str, test: str) -> Mutation:
    return Mutation(
        row=row,
        file=f"jagg/{file}.py",
        original=original,
        mutated=mutated,
        test=f"{UNIT}/test_{test}",
    )


MUTATIONS = (
    mutation(
        "T1 ODE limit",
        "transitions",
        "return StepCoefficients(b=1.0, k=sigma_next - sigma, sd=0.0, std_dev=0.0)",
        "return StepCoefficients(b=1.0, k=sigma - sigma_next, sd=0.0, std_dev=0.0)",
        "transitions.py::test_t1_zero_noise_is_the_diffusers_euler_step",
    ),
    mutation(
        "T1 no log-prob without noise",
        "transitions",
        "if noise is None or numbers.sd == 0:",
        "if noise is None:",
        "transitions.py::test_t1_zero_noise_is_the_diffusers_euler_step",
    ),
    mutation(
        "T2 marginals (drift correction)",
        "transitions",
        "b=1 + variance / (2 * sigma) * dt,",
        "b=1 + variance / sigma * dt,",
        "transitions.py::test_t2_final_marginal",
    ),
    mutation(
        "T2 marginals (CPS coefficient)",
        "transitions",
        "kept = math.sqrt(sigma_next * sigma_next - std * std)",
        "kept = sigma_next",
        "transitions.py::test_t2_final_marginal",
    ),
    mutation(
        "T3 coefficient test",
        "transitions",
        "b=(1 - sigma_next) + kept,",
        "b=(1 - sigma_next) + sigma_next,",
        "transitions.py::test_t3_point_mass_before_the_last_step",
    ),
    mutation(
        "T4 Gaussian log-prob",
        "transitions",
        "return -squares_ND.mean(1) / (2 * sd * sd) - math.log(sd) - 0.5 * math.log(2 * math.pi)",
        "return -squares_ND.mean(1) / (2 * sd * sd) - 0.5 * math.log(2 * math.pi)",
        "transitions.py::test_t4_flow_sde_log_prob_is_the_gaussian_one",
    ),
    mutation(
        "T4 mean over latent elements (CPS)",
        "transitions",
        "return -squares_ND.mean(1)\n",
        "return -squares_ND.sum(1)\n",
        "transitions.py::test_t4_cps_log_prob_is_the_plain_mean_square",
    ),
    mutation(
        "T5 expected log-prob of own samples",
        "transitions",
        "- math.log(sd) - 0.5 * math.log(2 * math.pi)",
        "- math.log(sd) - math.log(2 * math.pi)",
        "transitions.py::test_t5_expected_log_prob_of_own_samples",
    ),
    mutation(
        "section 12: sd holds sqrt(-dt)",
        "transitions",
        "sd=std_dev * math.sqrt(-dt),",
        "sd=std_dev * -dt,",
        "transitions.py::test_section_12_weights",
    ),
    mutation(
        "T6 rounding before scoring",
        "transitions",
        "drawn = (mean + numbers.sd * _wide(noise)).to(latents.dtype)\n"
        "    scored = log_prob(drawn.detach(), mean, numbers.sd, kind=kind)",
        "exact = mean + numbers.sd * _wide(noise)\n"
        "    drawn = exact.to(latents.dtype)\n"
        "    scored = log_prob(exact.detach(), mean, numbers.sd, kind=kind)",
        "transitions.py::test_states_are_rounded_to_storage_before_they_are_scored",
    ),
    mutation(
        "T6 the same guidance in training as in the rollout",
        "gradients",
        "latents, sigma, conditional, unconditional, rollout.guidance_scale",
        "latents, sigma, conditional, unconditional, 1.0",
        "rollout.py::test_t6_first_update_ratio_in_float32",
    ),
    mutation(
        "T6 the same sigma in training as in the rollout",
        "gradients",
        "levels[self.rollout.noise_start : self.rollout.noise_stop]",
        "levels[self.rollout.noise_start + 1 : self.rollout.noise_stop + 1]",
        "rollout.py::test_t6_first_update_ratio_in_bfloat16_is_exactly_zero",
    ),
    mutation(
        "T7 gradient at ratio 1 (sign of k)",
        "losses",
        "scale = numbers.k / (terms.count * elements)",
        "scale = -numbers.k / (terms.count * elements)",
        "losses.py::test_t7_gradient_at_ratio_one",
    ),
    mutation(
        "T7 gradient at ratio 1 (1/D)",
        "losses",
        "elements = residual[0].numel()",
        "elements = 1",
        "losses.py::test_t7_gradient_at_ratio_one",
    ),
    mutation(
        "closed-form g, CPS",
        "losses",
        'lam = 2.0 if terms.kind == "cps" else 1 / numbers.sd**2',
        "lam = 1 / numbers.sd**2",
        "losses.py::test_closed_form_equals_autograd_at_ratio_one",
    ),
    mutation(
        "closed-form g with KL",
        "losses",
        "pull = terms.kl_weight * 2 * _kl_scale(terms.kl_form, numbers) * numbers.k * scale",
        "pull = terms.kl_weight * _kl_scale(terms.kl_form, numbers) * numbers.k * scale",
        "losses.py::test_closed_form_equals_autograd_at_ratio_one",
    ),
    mutation(
        "r != 1 and clipping (chi)",
        "losses",
        "clipped_N = above_N | below_N",
        "clipped_N = above_N",
        "losses.py::test_closed_form_equals_autograd_off_policy_with_clipping_on_both_sides",
    ),
    mutation(
        "r != 1 (ratio in g)",
        "losses",
        "pull_N = (-terms.advantages * log_ratio_N.exp() * (scale * lam))",
        "pull_N = (-terms.advantages * (scale * lam))",
        "losses.py::test_closed_form_equals_autograd_off_policy_with_clipping_on_both_sides",
    ),
    mutation(
        "T8 zero variance",
        "advantages",
        "if members.max() == members.min():",
        "if members.std(correction=0) < 0:",
        "advantages.py::test_t8_a_constant_group_is_exactly_zero",
    ),
    mutation(
        "T8 centred by group",
        "advantages",
        "centred = members - members.mean()",
        "centred = members - values_N[values_N.isfinite()].mean()",
        "advantages.py::test_t8_groups_sum_to_zero_before_the_clamp",
    ),
    mutation(
        "T8 population standard deviation",
        "advantages",
        "scale = members.std(correction=0) + epsilon",
        "scale = members.std(correction=1) + epsilon",
        "advantages.py::test_t8_group_std_is_one",
    ),
    mutation(
        "T8 NaN members leave their group",
        "advantages",
        "finite_N = member_N & values_N.isfinite()",
        "finite_N = member_N",
        "advantages.py::test_nan_members_get_zero_and_do_not_count",
    ),
    mutation(
        "T9 sign",
        "update",
        "values=values.to(device=device, dtype=rollout.log_probs.dtype),",
        "values=-values.to(device=device, dtype=rollout.log_probs.dtype),",
        "update.py::test_t9_reward_rises_with_its_sign_and_falls_against_it",
    ),
    mutation(
        "T9 constant reward leaves weights unchanged",
        "update",
        "        if norm == 0:\n            return\n",
        "",
        "update.py::test_zero_advantages_give_a_zero_gradient_and_no_step_even_when_a_step_is_forced",
    ),
    mutation(
        "T9 constant reward takes no forwards",
        "update",
        "if not advantages.all_zero or config.kl_weight > 0 or reduce is not None:",
        "if True:",
        "update.py::test_t9_constant_reward_without_kl_leaves_weights_bitwise_unchanged",
    ),
    mutation(
        "T9 shuffled control",
        "advantages",
        "result[index] = advantages[index[order]]",
        "result[index] = advantages[index]",
        "update.py::test_t9_shuffled_advantages_do_not_learn",
    ),
    mutation(
        "T10 clip, upper side",
        "losses",
        "above_N = (terms.advantages > 0) & (ratio_N > 1 + terms.clip)",
        "above_N = ratio_N > 1 + terms.clip",
        "losses.py::test_t10_clip_holds_only_the_profitable_side",
    ),
    mutation(
        "T10 clip, lower side",
        "losses",
        "below_N = (terms.advantages < 0) & (ratio_N < 1 - terms.clip)",
        "below_N = ratio_N < 1 - terms.clip",
        "losses.py::test_t10_clip_holds_only_the_profitable_side",
    ),
    mutation(
        "T11 exact KL",
        "losses",
        "return 1 / (2 * coefficients.sd**2)",
        "return 1 / (2 * coefficients.std_dev**2)",
        "losses.py::test_t11_exact_kl_is_that_of_two_gaussians",
    ),
    mutation(
        "T11 KL has a gradient",
        "update",
        "            objective = _with(objective, reference=reference)\n",
        "            objective = replace(objective, reference=reference, kl_weight=0.0)\n",
        "update.py::test_constant_reward_with_kl_pulls_back_to_the_reference",
    ),
    mutation(
        "T12 ratio statistics",
        "transitions",
        "squares_ND = (_wide(next_latents) - mean).square().flatten(1)",
        "squares_ND = (_wide(next_latents) - mean).abs().flatten(1)",
        "losses.py::test_t12_ratio_statistics",
    ),
    mutation(
        "clip in nats",
        "losses",
        "return clip_nats / elements",
        "return clip_nats / elements**0.5",
        "losses.py::test_clip_in_nats_at_the_latent_size_of_the_literature",
    ),
    mutation(
        "section 12: first step of Flow-SDE",
        "transitions",
        "(1 - (sigma_max if sigma == 1 else sigma))",
        "(1 - min(sigma, 0.999))",
        "transitions.py::test_section_12_weights",
    ),
    mutation(
        "T15 affine v on a straight path (weights in sigma)",
        "gradients",
        "alpha = (sigmas[step] - sigmas[first]) / (sigmas[last] - sigmas[first])",
        "alpha = (step - first) / (last - first)",
        "gradients.py::test_straight_path_of_an_affine_velocity_is_exact",
    ),
    mutation(
        "noise on the path breaks exactness (interior is not forwarded)",
        "gradients",
        "nodes.extend((first, last) if flag and last - first > 1 else range(first, last + 1))",
        "nodes.extend(range(first, last + 1))",
        "gradients.py::test_noise_on_the_path_breaks_exactness",
    ),
    mutation(
        "T15 W = 2 equals exact",
        "gradients",
        "rows.append(((number[step], 1.0),))",
        "rows.append(((number[step], 1.0 if last == first else 0.999),))",
        "gradients.py::test_window_of_two_is_exact",
    ),
    mutation(
        "K = T equals exact bit for bit",
        "gradients",
        "rows.append(((number[step], 1.0),))",
        "rows.append(((number[step], 1.0 + 1e-7 * (window > 1)),))",
        "gradients.py::test_every_step_a_node_equals_exact_bit_for_bit",
    ),
    mutation(
        "f = 0 equals exact bit for bit",
        "gradients",
        "aggregated = [self.jagg_frac == 1] * len(spans)",
        "aggregated = [True] * len(spans)",
        "gradients.py::test_every_step_a_node_equals_exact_bit_for_bit",
    ),
    mutation(
        "T not divisible by W",
        "gradients",
        "return [(first, min(first + window, steps) - 1) for first in range(0, steps, window)]",
        "return [(first, first + window - 1) for first in range(0, steps - window + 1, window)]",
        "gradients.py::test_windows_and_remainders",
    ),
    mutation(
        "joint against separate (rows of the joint batch)",
        "gradients",
        "return velocity.view(len(steps), size, *velocity.shape[1:])",
        "return velocity.view(size, len(steps), *velocity.shape[1:]).transpose(0, 1)",
        "gradients.py::test_joint_separate_and_chunked_agree",
    ),
    mutation(
        "every signal aggregated (w)",
        "gradients",
        "rows.append(((number[first], 1 - alpha), (number[last], alpha)))",
        "rows.append(((number[first], alpha), (number[last], 1 - alpha)))",
        "gradients.py::test_aggregation_follows_the_written_formula",
    ),
    mutation(
        "CFG through both branches",
        "policy",
        "return v_u + guidance_scale * (v_c - v_u)",
        "return v_u.detach() + guidance_scale * (v_c - v_u.detach())",
        "gradients.py::test_guidance_flows_through_both_branches",
    ),
    mutation(
        "routing by velocity cosine",
        "gradients",
        "key=lambda w: (-score[w], w)",
        "key=lambda w: (score[w], w)",
        "gradients.py::test_routing_sends_the_most_parallel_windows_to_jagg",
    ),
    mutation(
        "T19 micro-batches (NaN samples keep N)",
        "update",
        "samples = sum(stop - start for start, stop in group)",
        "samples = sum(int(objective.weights[a:b].sum()) for a, b in group)",
        "update.py::test_samples_of_weight_zero_count_in_n",
    ),
    mutation(
        "T19 micro-batches",
        "gradients",
        "weights=self.weights[start:stop],",
        "weights=self.weights[start:stop] / (stop - start),",
        "update.py::test_t19_update_does_not_depend_on_micro_batches",
    ),
    mutation(
        "the guard falls back and reports",
        "update",
        "if fresh and not float(tally.velocity_error) <= self.tolerance:",
        "if fresh and float(tally.velocity_error) < 0:",
        "update.py::test_perturbed_velocities_trip_the_guard_and_fall_back_to_real_forwards",
    ),
    mutation(
        "later epochs forward for real",
        "update",
        "fresh = self.policy.version == objective.rollout.policy_version",
        "fresh = self.steps >= 0",
        "update.py::test_inner_epochs_are_off_policy_after_the_first",
    ),
    mutation(
        "stale rollouts are refused",
        "update",
        "if policy.version != rollout.policy_version:",
        "if policy.version < rollout.policy_version:",
        "update.py::test_a_stale_rollout_is_refused",
    ),
    mutation(
        "NaN gradients leave the weights alone",
        "update",
        "if not math.isfinite(norm):",
        "if math.isinf(norm):",
        "update.py::test_nan_gradients_are_refused_and_weights_left_alone",
    ),
    mutation(
        "parity gate",
        "parity",
        "worst = torch.maximum(worst, delta)",
        "worst = delta",
        "parity.py::test_log_probs_of_every_trained_step_count",
    ),
    mutation(
        "T17 resume",
        "optimizers",
        "    optimizer.state.clear()\n    for name, entry in state.items():",
        "    optimizer.state.clear()\n    for name, entry in list(state.items())[:-1]:",
        "update.py::test_t17_ten_steps_equal_five_saved_loaded_and_five",
    ),
    mutation(
        "T17 resume (average)",
        "ema",
        'self.updates = int(state["updates"])',
        "self.updates = 0",
        "update.py::test_t17_ten_steps_equal_five_saved_loaded_and_five",
    ),
    mutation(
        "noise keyed by prompt and member",
        "rollout",
        'torch.stack([_draw(generator("noise", key), shape) for key in members], 1)',
        'torch.stack([_draw(generator("noise", key[:1]), shape) for key in members], 1)',
        "rollout.py::test_stored_states_replay_the_transition_and_its_log_prob",
    ),
)


def copy_tree(target: Path) -> None:
    """Copy what the library's tests need."""
    for name in COPIED:
        source, goal = ROOT / name, target / name
        if source.is_dir():
            shutil.copytree(source, goal, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            goal.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, goal)


def run_tests(tree: Path, tests: list[str]) -> tuple[int, str]:
    """Exit code and output of tests run in a tree of their own, so that nothing of the checkout is imported."""
    arguments = ["-q", "-x", "-p", "no:cacheprovider", *tests]
    if not hasattr(os, "fork"):
        command = [sys.executable, "-m", "pytest", *arguments]
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout
    # A child that starts with torch imported takes a tenth of the time of a fresh interpreter.
    output = tree / "output.txt"
    child = os.fork()
    if child == 0:
        os.chdir(tree)
        with output.open("w") as stream:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
            code = int(pytest.main(arguments))
            sys.stdout.flush()
        os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), output.read_text()


def apply(change: Mutation, tree: Path) -> None:
    """Put the fault into a tree."""
    path = tree / change.file
    path.write_text(path.read_text().replace(change.original, change.mutated, 1))


def unnoticed(changes: tuple[Mutation, ...]) -> list[str]:
    """The rows whose fault made no test fail, each with what happened instead."""
    result = []
    for change in changes:
        with tempfile.TemporaryDirectory() as folder:
            tree = Path(folder)
            copy_tree(tree)
            apply(change, tree)
            code, output = run_tests(tree, [change.test])
        noticed = code == TESTS_FAILED
        _log.info("%s  %s", "noticed  " if noticed else "UNNOTICED", change.row)
        if not noticed:
            result.append(f"{change.row}: {change.test} ended with {code}\n{output[-800:]}")
    return result


def main(words: list[str]) -> int:
    """Check the faults whose row contains a word; all without words."""
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    chosen = tuple(m for m in MUTATIONS if not words or any(word in m.row for word in words))
    with tempfile.TemporaryDirectory() as folder:
        copy_tree(Path(folder))
        code, output = run_tests(Path(folder), sorted({change.test for change in chosen}))
    if code != 0:
        _log.info("The tests fail without a fault:\n%s", output[-2000:])
        return len(chosen)
    missed = unnoticed(chosen)
    for line in missed:
        _log.info("%s", line)
    return len(missed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
