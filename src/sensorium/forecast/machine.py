"""Rates of a machine: published peaks of a kind of GPU, and the shares of them that were measured.

    assets/forecast/gpus.json          peaks of each kind, as published, and its memory, as torch reports it
    assets/forecast/calibration.json   constants fitted to measurements, each with where it comes from

Figures for other kinds of GPU are scaled: the same shares of their peaks are assumed.
"""

import json
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from sensorium.recipe.plan import GIB
from sensorium.recipe.schema import ModelSection
from sensorium.recipe.shape import ModelShape, read_shape, shape_by_config
from sensorium.vocabulary.errors import RecipeError, nearest

FOLDER = Path(__file__).resolve().parents[1] / "assets" / "forecast"
MEASURED_KIND = "h200"


@dataclass(frozen=True)
class Kind:
    """A kind of GPU, in bytes and operations a second. ``link`` and ``network`` are of one GPU, one way."""

    name: str
    title: str
    flops: float
    bandwidth: float
    memory: float
    link: float
    gpus_per_machine: int

    @property
    def measured(self) -> bool:
        """True if the constants were measured on this kind."""
        return self.name == MEASURED_KIND


@dataclass(frozen=True)
class Constants:
    """Fitted constants of one machine: seconds, or shares of a peak (of a CPU: rates, its peaks being 1).

    A decode step: ``decode_layer_s`` per layer, reads of weights, keys and values at a share of the bandwidth, operations
    of each row at a share of the peak. An update: operations at a share, those of experts at another, and
    ``microbatch_s`` per micro-batch.
    ``rank_times``: an update on one of several ranks, relative to one process with the same work.
    """

    decode_fixed_s: float
    decode_layer_s: float
    weight_reads: float
    kv_reads: float
    decode_flops: float
    prefill_fixed_s: float
    prefill_flops: float
    update_fixed_s: float
    microbatch_s: float
    update_flops: float
    expert_flops: float
    attention_flops: float
    rollout_fixed_s: float
    other_s: float
    other_episode_s: float
    push_fixed_s: float
    push_bytes: float
    rank_fixed_s: float
    rank_times: float


@dataclass(frozen=True)
class Machine:
    """A kind of GPU with its constants. ``network``: bytes a second between machines, a GPU's share."""

    kind: Kind
    constants: Constants
    network: float
    buckets: tuple[int, ...]

    def bucket(self, rows: int) -> int:
        """How many rows a decode step computes for so many live rows."""
        return next((size for size in self.buckets if size >= rows), rows)


@cache
def calibration() -> dict[str, Any]:
    """The committed constants with their sources."""
    found: dict[str, Any] = json.loads((FOLDER / "calibration.json").read_text())
    return found


@cache
def kinds() -> dict[str, Kind]:
    """The kinds of GPU that are known, by name."""
    listed = json.loads((FOLDER / "gpus.json").read_text())["kinds"]
    known = (kind | {"name": name, "memory": kind["memory_gib"] * GIB} for name, kind in listed.items())
    return {kind["name"]: Kind(**{field.name: kind[field.name] for field in fields(Kind)}) for kind in known}


def kind_named(name: str) -> Kind:
    """A kind of GPU by name."""
    if name not in kinds():
        raise RecipeError(f"--kind '{name}': its peaks are not in the table{nearest(name, list(kinds()))}")
    return kinds()[name]


def machine(kind: Kind, *, network: float | None = None) -> Machine:
    """A kind of GPU with the constants that were measured on an H200, taken as shares of peaks."""
    found = calibration()
    assumed = found["assumed"]
    return Machine(
        kind,
        Constants(**{name: one["value"] for name, one in found["gpu"].items()}),
        assumed["network"]["value"] if network is None else network,
        tuple(found["buckets"]["value"]),
    )


def assumed(name: str) -> float:
    """A number that was not measured here; calibration.json has its source."""
    return float(calibration()["assumed"][name]["value"])


VARIANTS = ("-Instruct", "-Thinking")


@cache
def published_configs() -> dict[str, dict[str, Any]]:
    """Configs by the name of the model."""
    found: dict[str, dict[str, Any]] = json.loads((FOLDER / "shapes.json").read_text())["shapes"]
    return found


def planned_shape(section: ModelSection, named: str = "") -> tuple[ModelShape, str]:
    """The shape to plan with and its source: the given name, the checkpoint on this disk, or the hub id's name."""
    if named:
        return shape_by_config(_config(named, f"--shape {named}")), f"the published sizes of {_plain(named)}"
    found = read_shape(section.path, section.revision, unused=section.unused_weights)
    if found is not None:
        return found, "the checkpoint on this disk"
    name = section.path.rstrip("/").rpartition("/")[2]
    place = f"model.path '{section.path}' is not on this disk, and its sizes are not known by that name"
    return shape_by_config(_config(name, place)), f"the published sizes of {_plain(name)}"


def _config(name: str, place: str) -> dict[str, Any]:
    by_name = {known.lower(): config for known, config in published_configs().items()}
    if _plain(name).lower() not in by_name:
        raise RecipeError(
            f"{place}{nearest(_plain(name), list(published_configs()))} Name the nearest with --shape: "
            f"{', '.join(published_configs())}."
        )
    return by_name[_plain(name).lower()]


def _plain(name: str) -> str:
    for variant in VARIANTS:
        name = name.removesuffix(variant)
    return name
