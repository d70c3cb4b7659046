"""Train any torch module on a loss of your own: here a Vision Transformer on the focal loss (Lin et al., 2017).

    python examples/custom_loss.py --epochs 5

Uses the bundled CIFAR-10 images; about a minute on two CPU cores. The same call with `resume=True` resumes a run.
"""

import argparse
import zipfile
from importlib import resources

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import vitrail


def bundled(split: str, count: int) -> TensorDataset:
    """`count` images of a split, evenly over the classes: pixels (N, 3, 32, 32) from -1 to 1, and labels."""
    with zipfile.ZipFile(str(resources.files("vitrail") / "data" / "bundled" / "cifar10-3000.zip")) as archive:
        names = sorted(name for name in archive.namelist() if name.startswith(f"{split}/") and name.endswith(".webp"))
        names = names[:: max(1, len(names) // count)]
        pixels = np.stack([np.asarray(Image.open(archive.open(name)).convert("RGB")) for name in names])
    classes = [name.split("/")[1] for name in names]
    labels = [sorted(set(classes)).index(name) for name in classes]
    return TensorDataset(torch.from_numpy(pixels).permute(0, 3, 1, 2) / 127.5 - 1, torch.tensor(labels))


def focal_loss(net: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Cross-entropy, weighted down for images with a high probability of the right class."""
    losses = F.cross_entropy(net(batch[0]), batch[1], reduction="none")
    return ((1 - torch.exp(-losses)) ** 2 * losses).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on a loss of your own.")
    parser.add_argument("--out", default="runs/example-loss", help="the run folder")
    parser.add_argument("--epochs", type=float, default=5)
    parser.add_argument("--images", type=int, default=2000)
    options = parser.parse_args()
    train, test = bundled("train", options.images), bundled("test", options.images // 2)

    def accuracy(net: torch.nn.Module) -> dict[str, float]:
        pixels, labels = (tensor.to(next(net.parameters()).device) for tensor in test.tensors)
        return {"val_top1": float((net(pixels).argmax(1) == labels).float().mean())}

    torch.manual_seed(0)
    net = vitrail.create("Ti/8", num_classes=10, image_size=32)
    batches = DataLoader(train, batch_size=64, shuffle=True)
    where = {"out": options.out, "overwrite": True}
    result = vitrail.fit(net, focal_loss, batches, evaluate=accuracy, epochs=options.epochs, lr=0.001, **where)
    print(f"{result.scores['val_top1']:.1%} of {len(test)} test images are correct; weights: {result.weights}")


if __name__ == "__main__":
    main()
