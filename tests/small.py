"""Networks small enough for whole runs in tests, known by their names wherever this is imported."""

from vitrail.models.variants import RESNETS, SIZES

SIZES["Toy"] = (48, 2, 96, 3)
RESNETS["8"] = (1, 1)

# Four patches of a 16 px image.
SMALL = ("model.name=Toy/8", "model.image_size=[16, 16]", "train.batch_size=8", "precision.compute=fp32")
