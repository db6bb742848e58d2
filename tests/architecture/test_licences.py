"""Every runtime dependency is permissive or MPL-2.0, and every one is pinned."""

import email.message
import importlib.metadata
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]

ALLOWED = {
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "CNRI-Python",
    "HPND",
    "ISC",
    "MIT",
    "MIT-CMU",
    "MPL-2.0",
    "PSF-2.0",
    "Unlicense",
    "Zlib",
}

REVIEWED = {
    # what a License field or a classifier says in words -> the SPDX expression it stands for
    "Apache": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD": "BSD-3-Clause",
    "BSD License": "BSD-3-Clause",
    "ISC License": "ISC",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
}
"""Reviewed by reading the licence files of the packages that say so."""

VENDOR = re.compile(r"(nvidia|cuda|rocm|intel)-|(triton|pytorch-triton|setuptools|tbb|mkl)\b")
"""Libraries that a PyTorch build for an accelerator brings; whoever picks the build accepts their
terms, and none is in requirements.txt."""


def requirements() -> list[Requirement]:
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    texts = [line.split("#")[0].strip() for line in lines]
    return [Requirement(text) for text in texts if text]


def closure() -> set[str]:
    """Names of the installed runtime dependencies, followed from requirements.txt."""
    wanted = [
        (r.name, r.extras or {""})
        for r in requirements()
        if r.marker is None or r.marker.evaluate()
    ]
    seen: set[tuple[str, str]] = set()
    while wanted:
        name, extras = wanted.pop()
        for extra in {"", *extras}:
            key = (canonicalize_name(name), extra)
            if key in seen or VENDOR.match(key[0]):
                continue
            seen.add(key)
            for text in importlib.metadata.distribution(name).requires or []:
                needed = Requirement(text)
                if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                    wanted.append((needed.name, needed.extras or {""}))
    return {name for name, _ in seen}


def evaluate(expression: str) -> bool:
    """Whether an SPDX expression can be met with allowed licences alone."""
    tokens = re.findall(r"[()]|[^\s()]+", canonicalize_license_expression(expression))

    def alternatives() -> bool:
        met = conjunction()
        while tokens[:1] == ["OR"]:
            tokens.pop(0)
            met = conjunction() or met
        return met

    def conjunction() -> bool:
        met = term()
        while tokens[:1] == ["AND"]:
            tokens.pop(0)
            met = term() and met
        return met

    def term() -> bool:
        licence = tokens.pop(0)
        if licence == "(":
            met = alternatives()
            tokens.pop(0)
            return met
        if tokens[:1] == ["WITH"]:
            tokens.pop(0)
            licence = f"{licence} WITH {tokens.pop(0)}"
        return licence in ALLOWED

    return alternatives()


def statements(metadata: importlib.metadata.PackageMetadata) -> Iterator[str]:
    """The licence statements of a distribution that count: the most exact kind it has."""
    fields = {
        key.lower(): value for key, value in metadata.items() if key.lower().startswith("license")
    }
    if fields.get("license-expression"):
        yield fields["license-expression"]
        return
    text = (fields.get("license") or "").strip()
    if text and "\n" not in text:
        yield text
        return
    for classifier in metadata.get_all("Classifier") or []:
        if classifier.startswith("License :: "):
            yield classifier.split(" :: ")[-1]


def problem(metadata: importlib.metadata.PackageMetadata) -> str | None:
    """What is wrong with a distribution's licence, or None."""
    said = list(statements(metadata))
    if not said:
        return "states no licence"
    for text in said:
        try:
            allowed = evaluate(REVIEWED.get(text, text))
        except InvalidLicenseExpression:
            return f"states {text[:80]!r}, which is neither SPDX nor in the reviewed table"
        if not allowed:
            return f"is under {text[:80]!r}, which is neither permissive nor MPL-2.0"
    return None


def metadata_of(**fields: str) -> importlib.metadata.PackageMetadata:
    message = email.message.Message()
    for key, value in fields.items():
        message[key.replace("_", "-")] = value
    return message


def test_runtime_dependencies_are_permissive_or_mpl() -> None:
    names = closure()
    assert {"torch", "diffusers", "numpy", "certifi"} <= names
    found = {
        name: problem(importlib.metadata.distribution(name).metadata) for name in sorted(names)
    }
    assert {name: text for name, text in found.items() if text} == {}


def test_requirements_pin_the_whole_closure() -> None:
    loose = [str(r) for r in requirements() if not re.fullmatch(r"==[^*,]+", str(r.specifier))]
    assert loose == []
    pinned = {canonicalize_name(r.name) for r in requirements()}
    assert closure() - pinned == set()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"License_Expression": "MIT"}, None),
        ({"License_Expression": "MIT OR GPL-3.0-only"}, None),
        ({"License_Expression": "(MIT OR GPL-3.0-only) AND MPL-2.0"}, None),
        ({"License_Expression": "MIT AND LGPL-2.1-only"}, "neither permissive nor MPL-2.0"),
        ({"License_Expression": "GPL-2.0-only WITH Classpath-exception-2.0"}, "neither permissive"),
        ({"License": "Apache"}, None),
        ({"License": "as is"}, "nor in the reviewed table"),
        ({"License": "long\ntext", "Classifier": "License :: OSI Approved :: BSD License"}, None),
        (
            {"Classifier": "License :: OSI Approved :: GNU General Public License (GPL)"},
            "neither SPDX",
        ),
        ({"Name": "x"}, "states no licence"),
    ],
)
def test_the_judgement_itself(fields: dict[str, str], expected: str | None) -> None:
    found = problem(metadata_of(**fields))
    assert (found is None) if expected is None else (found is not None and expected in found)
