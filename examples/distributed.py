"""Train on several processes: the same call as on one, started by torchrun.

    torchrun --standalone --nproc-per-node 2 examples/distributed.py

On a machine without GPUs the processes share its CPU cores and talk through gloo; with GPUs there is one process per
GPU, and NCCL. Uses the bundled CIFAR-10 images; about a minute on two CPU cores. Started with plain `python`, it
trains the same weights (but for rounding) on one process.
"""

import argparse
import os
from importlib import resources

import vitrail

BUNDLED = str(resources.files("vitrail") / "data" / "bundled" / "cifar10-3000.zip")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on several processes.")
    parser.add_argument("photos", nargs="?", default=BUNDLED, help="a folder with one folder of images per class")
    parser.add_argument("--out", default="runs/example-distributed")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=64, help="images in a step, of all processes together")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()

    # Every process makes the same call. vitrail reads the variables that torchrun sets, gives each process its part of
    # every batch, and sums the gradients. The first process writes the run folder and prints.
    result = vitrail.train(
        options.photos,
        model="Ti/8",
        recipe="scratch",
        out=options.out,
        overwrite=True,
        steps=options.steps,
        batch_size=options.batch_size,
        image_size=32,
        precision="fp32",
        device=options.device,
        seed=0,
    )
    if os.environ.get("RANK", "0") == "0":
        processes = os.environ.get("WORLD_SIZE", "1")
        print(f"{processes} processes: {result.scores.headline:.1%} of {result.scores.n} test images are correct")
        print(f"weights: {result.weights}")


if __name__ == "__main__":
    main()
