"""Show what a Vision Transformer looks at, and measure whether its maps can be trusted.

    python examples/explain.py photos/ --weights runs/photos

Without arguments: the bundled network on 10 bundled CIFAR-10 images; about a minute on two CPU cores. Open the page
explain.html in a browser.
"""

import argparse
import tempfile
import zipfile
from importlib import resources
from pathlib import Path

import vitrail


def main() -> None:
    parser = argparse.ArgumentParser(description="Show what a Vision Transformer looks at.")
    parser.add_argument("photos", nargs="?", type=Path, help="a folder of images")
    parser.add_argument("--weights", default="bundled", help="a weights file, a run folder, or hf-hub:owner/name")
    parser.add_argument("--out", type=Path, default=Path("explained/example"))
    parser.add_argument("--measured", type=int, default=10, help="images the maps are judged on: 0, or at least 10")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as unpacked:
        photos = options.photos
        if photos is None:
            photos = Path(unpacked)
            with zipfile.ZipFile(str(resources.files("vitrail") / "data" / "bundled" / "cifar10-3000.zip")) as archive:
                names = sorted(name for name in archive.namelist() if name.startswith("test/"))
                archive.extractall(photos, names[:: max(1, len(names) // 10)][:10])

        # The attention matrices of single images come from the network itself.
        clf = vitrail.load(options.weights)
        first = sorted(path for path in photos.rglob("*") if path.is_file())[:1]
        trace = clf.net.trace(clf.inputs(first), layers=[0, -1])
        for block, attention in trace.attention.items():
            print(f"block {block}: attention of {attention.shape[1]} heads over {attention.shape[-1]} tokens")

        numbers = vitrail.explain(clf, photos, out=options.out, shown=2, measured=options.measured)

    distance = numbers["attention_distance"]["pixels"]
    print(f"mean attention distance: {sum(distance[0]) / len(distance[0]):.1f} px in the first block")
    print(f"the page is {options.out / 'explain.html'}")


if __name__ == "__main__":
    main()
