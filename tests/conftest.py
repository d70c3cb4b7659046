"""Shared test setup."""

from __future__ import annotations

import os
import signal
import warnings

# Tests download nothing, and neither read nor write the user's cache.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # test processes run in parallel
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # with more threads, waiting ones do not spin

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as for a background job of a script
    signal.signal(signal.SIGINT, signal.default_int_handler)  # here, and in processes that tests start

import pytest
from _pytest.runner import runtestprotocol

from tests.ranks import Crashed
from vitrail.weights.reference_models import make_torchvision_importable

make_torchvision_importable()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Run a test again, with new fixtures, if one of its processes crashed in torch (see tests/ranks.py), and warn.

    A plugin for this made the whole suite a third slower.
    """
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    crash = f"{Crashed.__module__}.{Crashed.__name__}: "
    messages = [
        getattr(getattr(report.longrepr, "reprcrash", None), "message", "") for report in reports if report.failed
    ]
    if crashed := [message for message in messages if message.startswith(crash)]:
        warnings.warn(f"ran twice, since a process crashed: {item.nodeid}\n{crashed[0]}", stacklevel=1)
        item.session._setupstate.teardown_exact(None)
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
