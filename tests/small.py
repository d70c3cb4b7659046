"""A network small enough for whole runs in tests, known by its name wherever this is imported."""

from vitrail.model.variants import SIZES

SIZES["Toy"] = (48, 2, 96, 3)

# Four patches of a 16 px image.
SMALL = ("model.name=Toy/8", "model.image_size=[16, 16]", "train.batch_size=8", "precision.compute=fp32")
