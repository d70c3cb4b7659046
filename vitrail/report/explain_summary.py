"""The results of an explanation as sentences: faithfulness of the maps and attention distance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitrail.interpret.distance import AttentionDistances
from vitrail.interpret.faithfulness import FaithfulnessCurves, PairedGain, paired_gain
from vitrail.tasks.result import percent

LOCAL, GLOBAL = 0.5, 0.9  # heads below or above these fractions of the distance of uniform attention
MIN_CORRELATION, MIN_CHANGE = 0.6, 0.05  # of a trend: rank correlation, change as a fraction of uniform attention
MIN_HIT_RATE, MIN_HIT_RATE_LOW = 0.75, 0.5  # of a faithful map: hit rate, lower end of its 95 % interval
MIN_IMAGES = 10  # for any test of faithfulness
MAP_NAMES = {
    "votes": "votes of the patches for the predicted class (the prediction is their mean)",
    "relevance": "relevance (Chefer et al.) for the predicted class",
    "rollout": "attention rollout",
    "last attention": "attention of the last block, mean over heads",
    "random": "random order, for comparison",
}
_CONTRAST = "for the class of the pasted image rather than of the background"
POINTING_NAMES = MAP_NAMES | {"votes": f"votes of the patches {_CONTRAST}", "relevance": f"relevance {_CONTRAST}"}


@dataclass(frozen=True)
class Pointing:
    """The pointing game: how often the highest patch of a map is inside the pasted image."""

    accuracy: float  # the hit rate
    low: float  # of its 95 % interval
    high: float
    share: float  # of the map inside the pasted image
    chance: float  # hit rate of a map that is the same for every image

    @property
    def over_chance(self) -> PairedGain:
        return PairedGain(self.accuracy - self.chance, self.low - self.chance, self.high - self.chance)

    @property
    def passes(self) -> bool:
        """Whether the hit rate is high enough for a faithful map."""
        return self.accuracy >= MIN_HIT_RATE and self.low > MIN_HIT_RATE_LOW

    def to_dict(self) -> dict[str, Any]:
        return vars(self) | {"over_chance": vars(self.over_chance)}


@dataclass(frozen=True)
class MapScore:
    """Faithfulness of one kind of map, compared with a random order of the patches."""

    name: str
    deletion: float
    insertion: float
    deletion_gain: PairedGain | None  # None for the random order itself
    insertion_gain: PairedGain | None
    pointing: Pointing | None

    @property
    def description(self) -> str:
        return MAP_NAMES[self.name]

    @property
    def pointing_description(self) -> str:
        """The map that is used in the pointing game."""
        return POINTING_NAMES[self.name]

    @property
    def verdicts(self) -> list[str]:
        gains = [self.deletion_gain, self.insertion_gain, self.pointing.over_chance if self.pointing else None]
        return [gain.verdict for gain in gains if gain is not None]

    def to_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = {"deletion": self.deletion, "insertion": self.insertion}
        for key, gain in (("deletion_gain", self.deletion_gain), ("insertion_gain", self.insertion_gain)):
            if gain is not None:
                values[key] = vars(gain)
        if self.pointing is not None:
            values["pointing"] = self.pointing.to_dict()
        return values


def score_maps(curves: Mapping[str, FaithfulnessCurves], points: Mapping[str, Pointing]) -> list[MapScore]:
    """Compare every kind of map with the random order, which must be in `curves`."""
    random = curves["random"]
    rows = []
    for name, curve in curves.items():
        gains: tuple[PairedGain | None, PairedGain | None] = None, None
        if name != "random":
            deletion = paired_gain(random.deletion_area, curve.deletion_area)
            gains = deletion, paired_gain(curve.insertion_area, random.insertion_area)
        areas = float(curve.deletion_area.mean()), float(curve.insertion_area.mean())
        rows.append(MapScore(name, *areas, *gains, points.get(name)))
    return rows


def map_verdicts(rows: Sequence[MapScore]) -> list[str]:
    """Return a sentence per kind of map: how faithful it is to this network."""
    return [_verdict(row) for row in rows if row.name != "random"]


def _verdict(row: MapScore) -> str:
    better, worse, total = row.verdicts.count("better"), row.verdicts.count("worse"), len(row.verdicts)
    pointing = row.pointing
    if better < total:
        verdict = "weakly faithful" if better else "not faithful"
    else:
        verdict = "faithful" if pointing and pointing.passes else "partly faithful"
    tests = f"better than random in {better} of {total} tests" + (f", worse in {worse}" if worse else "")
    verb = "are" if row.name == "votes" else "is"
    hits = ""
    if pointing:
        hits = f"; hit rate {percent(pointing.accuracy)} on pasted images (chance: {percent(pointing.chance)})"
    return f"{row.name[0].upper()}{row.name[1:]} {verb} {verdict}: {tests}{hits}."


def distance_sentences(distances: AttentionDistances) -> list[str]:
    """Describe how attention distance changes with depth, and whether early blocks have local and global heads."""
    heads, uniform = distances.renormalised, distances.uniform
    blocks = len(heads)
    means = heads.mean(1)
    sentences = []
    early = max(1, blocks // 3)
    if blocks > 3:
        trend = rank_correlation(np.arange(blocks), means)
        change = means[-early:].mean() - means[:early].mean()
        steady = abs(trend) > MIN_CORRELATION and abs(change) > MIN_CHANGE * uniform and trend * change > 0
        verb = "has no steady trend" if not steady else "grows with depth" if trend > 0 else "shrinks with depth"
        sentences.append(
            f"Attention distance {verb}: {means[0]:.1f} px in the first block, {means[-1]:.1f} px in the last "
            f"(mean over heads; rank correlation with depth {trend:+.2f}; uniform attention: {uniform:.1f} px)."
        )
    first = heads[:early]
    local, far = int((first < LOCAL * uniform).sum()), int((first > GLOBAL * uniform).sum())
    where = "The first block has" if early == 1 else f"The first {early} blocks have"
    spread = f"their attention distances range from {first.min():.1f} to {first.max():.1f} px"
    if local and far:
        kinds = f"both local and global heads ({local} and {far} of {first.size})"
    elif local:
        kinds = f"local heads ({local} of {first.size}), but no global ones"
    elif far:
        kinds = f"global heads ({far} of {first.size}), but no local ones"
    else:
        kinds = "neither local nor global heads"
    sentences.append(
        f"{where} {kinds}: {spread}. A head is local below {LOCAL:g} times the distance of uniform attention, "
        f"and global above {GLOBAL:g} times."
    )
    most = float(distances.elsewhere.max())
    if most > 1e-6:
        sentences.append(
            f"Patches give {percent(float(distances.elsewhere.mean()))} of their attention to the class token and "
            f"registers, and up to {percent(most)} in one head. This is the gap between the two kinds of dots."
        )
    return sentences


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's rank correlation of values without ties; 0 if one of them is constant."""
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return 0.0
    return float(np.corrcoef(a.argsort().argsort(), b.argsort().argsort())[0, 1])
