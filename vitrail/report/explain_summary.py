"""What an explanation found, in plain English."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitrail.interpret.distance import AttentionDistances
from vitrail.interpret.faithfulness import FaithfulnessCurves, PairedGain, paired_gain
from vitrail.tasks.result import percent

LOCAL, GLOBAL = 0.5, 0.9  # of the distance of uniform attention: a head below looks nearby, one above everywhere
STEADY, CHANGE = 0.6, 0.05  # rank correlation, and share of uniform attention, from which a trend is called one
TRUSTED, SURELY = 0.75, 0.5  # of pasted pictures found, and the low end of its interval: surely more often than not
FEWEST = 10  # images: fewer judge nothing
PLAIN = {
    "votes": "votes of the patches for the predicted class, of which the answer is the mean",
    "relevance": "relevance (Chefer et al.) for the predicted class",
    "rollout": "attention rollout",
    "last attention": "attention of the last block, mean over heads",
    "random": "a random order, for comparison",
}
_POINTED = "for the pasted picture’s class rather than the background’s"
POINTED = PLAIN | {"votes": f"votes of the patches {_POINTED}", "relevance": f"relevance {_POINTED}"}


@dataclass(frozen=True)
class Pointing:
    """How often the highest patch of a map is inside the pasted picture, and how much of the map is."""

    accuracy: float
    low: float  # of its 95 % interval
    high: float
    share: float
    chance: float  # what a map scores that lights the same patch in every image

    @property
    def over_chance(self) -> PairedGain:
        return PairedGain(self.accuracy - self.chance, self.low - self.chance, self.high - self.chance)

    @property
    def trusted(self) -> bool:
        return self.accuracy >= TRUSTED and self.low > SURELY

    def to_dict(self) -> dict[str, Any]:
        return vars(self) | {"over_chance": vars(self.over_chance)}


@dataclass(frozen=True)
class MapScore:
    """How one kind of map did, beside a random order of the same patches."""

    name: str
    deletion: float
    insertion: float
    deletion_gain: PairedGain | None  # none: the random order itself
    insertion_gain: PairedGain | None
    pointing: Pointing | None

    @property
    def what(self) -> str:
        return PLAIN[self.name]

    @property
    def pointed(self) -> str:
        """What points to pasted pictures."""
        return POINTED[self.name]

    @property
    def verdicts(self) -> list[str]:
        gains = [self.deletion_gain, self.insertion_gain, self.pointing.over_chance if self.pointing else None]
        return [one.verdict for one in gains if one is not None]

    def to_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = {"deletion": self.deletion, "insertion": self.insertion}
        for key, one in (("deletion_gain", self.deletion_gain), ("insertion_gain", self.insertion_gain)):
            if one is not None:
                values[key] = vars(one)
        if self.pointing is not None:
            values["pointing"] = self.pointing.to_dict()
        return values


def score_maps(curves: Mapping[str, FaithfulnessCurves], points: Mapping[str, Pointing]) -> list[MapScore]:
    """Every kind of map measured against the random order among them."""
    random = curves["random"]
    rows = []
    for name, one in curves.items():
        gains: tuple[PairedGain | None, PairedGain | None] = None, None
        if name != "random":
            deletion = paired_gain(random.deletion_area, one.deletion_area)
            gains = deletion, paired_gain(one.insertion_area, random.insertion_area)
        areas = float(one.deletion_area.mean()), float(one.insertion_area.mean())
        rows.append(MapScore(name, *areas, *gains, points.get(name)))
    return rows


def map_verdicts(rows: Sequence[MapScore]) -> list[str]:
    """Which maps deserve trust for this network."""
    return [_verdict(row) for row in rows if row.name != "random"]


def _verdict(row: MapScore) -> str:
    better, worse, total = row.verdicts.count("better"), row.verdicts.count("worse"), len(row.verdicts)
    found = row.pointing
    if better < total:
        word = "little trust" if better else "no trust"
    else:
        word = "trust" if found and found.trusted else "some trust"
    tests = f"better than chance in {better} of {total} tests" + (f", worse in {worse}" if worse else "")
    deserve, finds = ("deserve", "they find") if row.name == "votes" else ("deserves", "it finds")
    pointed = f"; {finds} {percent(found.accuracy)} of pasted pictures, chance {percent(found.chance)}" if found else ""
    return f"{row.name[0].upper()}{row.name[1:]} {deserve} {word} here: {tests}{pointed}."


def distance_sentences(distances: AttentionDistances) -> list[str]:
    """Does distance grow with depth, and do early blocks mix local and global heads?"""
    reach, uniform = distances.renormalised, distances.uniform
    blocks = len(reach)
    means = reach.mean(1)
    sentences = []
    early = max(1, blocks // 3)
    if blocks > 3:
        trend = rank_correlation(np.arange(blocks), means)
        change = means[-early:].mean() - means[:early].mean()
        steady = abs(trend) > STEADY and abs(change) > CHANGE * uniform and trend * change > 0
        word = "has no steady trend" if not steady else "grows with depth" if trend > 0 else "shrinks with depth"
        sentences.append(
            f"Attention distance {word}: {means[0]:.1f} px in the first block, {means[-1]:.1f} px in the last, mean "
            f"over heads (rank correlation with depth {trend:+.2f}; uniform attention: {uniform:.1f} px)."
        )
    first = reach[:early]
    local, far = int((first < LOCAL * uniform).sum()), int((first > GLOBAL * uniform).sum())
    where = "The first block has" if early == 1 else f"The first {early} blocks have"
    spread = f"from {first.min():.1f} to {first.max():.1f} px"
    if local and far:
        kinds = f"both local and global heads ({local} and {far} of {first.size})"
    elif local:
        kinds = f"local heads ({local} of {first.size}), but no global ones"
    elif far:
        kinds = f"global heads ({far} of {first.size}), but no local ones"
    else:
        kinds = "neither local nor global heads"
    sentences.append(f"{where} {kinds}: {spread}. Local is below half of uniform attention, global above nine tenths.")
    most = float(distances.elsewhere.max())
    if most > 1e-6:
        sentences.append(
            f"Patches give {percent(float(distances.elsewhere.mean()))} of their attention to class token and "
            f"registers, up to {percent(most)} in one head; that is the gap between the two kinds of dots."
        )
    return sentences


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's, of numbers without ties; 0 where one of them does not change."""
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return 0.0
    return float(np.corrcoef(a.argsort().argsort(), b.argsort().argsort())[0, 1])
