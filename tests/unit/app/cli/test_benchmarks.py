"""Benchmarks: the arithmetic of their reports, and a small real measurement of the gradient estimators."""

import json

import pytest

from app.cli import bench, main
from app.cli.bench_quickstart import Result, paired, summarise, table


def _result(arm, seed, before, after):
    measures = ("fully right (CNN)", "fully right (contour)", "reward")
    return Result(
        arm=arm,
        seed=seed,
        wall=10.0 + seed,
        cpu=20.0,
        before=dict.fromkeys(measures, before),
        after=dict.fromkeys(measures, after),
    )


RESULTS = [
    _result("jagg", 0, 0.2, 0.8),
    _result("jagg", 1, 0.2, 0.6),
    _result("exact", 0, 0.2, 0.9),
    _result("exact", 1, 0.2, 0.5),
    _result("shuffled", 1, 0.2, 0.1),
]


def test_summary_has_means_and_sample_deviations_over_seeds():
    summary = summarise(RESULTS)
    jagg = summary["jagg"]["measures"]["reward"]
    assert jagg["rise"] == pytest.approx(0.5)
    assert jagg["rise_sd"] == pytest.approx(0.1 * 2**0.5)
    assert summary["jagg"]["wall_seconds"] == 10.5
    assert summary["shuffled"]["measures"]["reward"]["rise_sd"] == 0.0


def test_pairs_are_of_equal_seeds_alone():
    exact = paired(RESULTS, "jagg", "exact")["reward"]
    assert (exact["seeds"], exact["mean"]) == (2, pytest.approx(0.0))
    assert exact["sd"] == pytest.approx(0.1 * 2**0.5)
    shuffled = paired(RESULTS, "jagg", "shuffled")["reward"]
    assert (shuffled["seeds"], shuffled["mean"]) == (1, pytest.approx(0.5))


def test_the_table_shows_every_arm_and_pair():
    report = {
        "summary": summarise(RESULTS),
        "paired": {"jagg - exact": paired(RESULTS, "jagg", "exact")},
    }
    text = table(report)
    assert "| jagg (2) | 0.200 → 0.700 (rise +0.500, sd 0.141) |" in text
    assert "| jagg - exact | +0.000 (sd 0.141) |" in text


def test_every_benchmark_module_exists():
    assert set(bench.BENCHMARKS) == {"jagg", "quickstart"}
    for name in bench.BENCHMARKS:
        assert bench._find(name) is not None, name


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_gradient_benchmark_measures_what_it_says(capsys):
    assert main(["bench", "jagg", "--json", "--batches", "1", "--rounds", "1"]) == 0
    report = json.loads(capsys.readouterr().out)
    rows = {row["method"]: row for row in report["rows"]}
    assert list(rows) == ["exact", "jagg_released", "jagg_paper", "jagg_windows"]
    assert rows["exact"]["cosine"] == pytest.approx(1.0)
    assert (rows["exact"]["backward_passes"], rows["jagg_paper"]["backward_passes"]) == (4, 2)
    # Three ways to the same estimate: they differ in cost, not in value.
    for name in ("jagg_released", "jagg_windows"):
        assert rows[name]["cosine"] == pytest.approx(rows["jagg_paper"]["cosine"], abs=1e-4)
        assert rows[name]["rel_error"] == pytest.approx(rows["jagg_paper"]["rel_error"], abs=1e-4)
    assert 0.4 < rows["jagg_paper"]["cosine"] < 0.999
    # A joint batch of both ends keeps twice the activations of one end.
    ratio = rows["jagg_paper"]["peak_activation_mib"] / rows["jagg_released"]["peak_activation_mib"]
    assert ratio == pytest.approx(2.0, rel=0.1)
