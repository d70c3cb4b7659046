"""`vitrail`, and `python -m vitrail`."""

from vitrail.interrupt import ended_by_signals


def main() -> None:
    with ended_by_signals():  # before anything that takes long to import
        from vitrail.cli.main import main

        main()


if __name__ == "__main__":
    main()
