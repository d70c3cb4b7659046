"""Registers networks that are small enough for whole runs in tests. Importing this module is enough."""

from vitrail.models.variants import RESNETS, SIZES

SIZES["Toy"] = (48, 2, 96, 3)
RESNETS["8"] = (1, 1)

# Four patches per image.
SMALL = ("model.name=Toy/8", "model.image_size=[16, 16]", "train.batch_size=8", "precision.compute=fp32")
