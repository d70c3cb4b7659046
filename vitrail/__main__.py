"""Entry point of `vitrail` and `python -m vitrail`."""

from vitrail.interrupt import exit_on_signals


def main() -> None:
    with exit_on_signals():  # set before the slow imports
        from vitrail.cli.main import main

        main()


if __name__ == "__main__":
    main()
