import signal

import pytest
from rich.console import Console

from vitrail.errors import UserError
from vitrail.runs.demo import demo
from vitrail.training.interrupt import Interrupted
from vitrail.training.progress import TrainingProgress


def run(folder, log, **options):
    with log.open("w") as file:
        demo(
            folder,
            overrides=("train.steps=4", "precision.compute=fp32"),
            console=Console(file=file, width=300),
            **options,
        )
    return log.read_text()


@pytest.mark.slow
def test_the_demo_trains_measures_predicts_and_says_what_is_next(tmp_path, monkeypatch):
    folder, log = tmp_path / "demo", tmp_path / "log"
    step = TrainingProgress.step

    def stop_at_two(self, number):
        step(self, number)
        if number == 2:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingProgress, "step", stop_at_two)
        with pytest.raises(Interrupted, match="stopped and saved; go on with: vitrail train --resume"):
            run(folder, log)
    assert "to beat:" in log.read_text()

    text = run(folder, log)
    assert "goes on from step 2 of 4" in text
    assert "Measured on 1,000 images of the test split." in text
    assert text.count("%") >= 5 * 3 and " train photos/" in text
    assert len(list((folder / "samples").iterdir())) == 5
    assert (folder / "report.html").stat().st_size > 10_000

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.toml").write_text('recipe = "scratch"')
    with pytest.raises(UserError, match="holds another run"):
        run(tmp_path / "mine", log, again=True)

    again = run(folder, log)
    assert "holds a finished demo" in again and "step" not in again
