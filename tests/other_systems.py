"""Run vitrail commands as on Windows: `python -m tests.other_systems '[["--version"], ["plan", "S/16"]]'`.

Removes the modules and functions that only POSIX systems have, and refuses to remove or replace a file that this
process has open. The last line of the output is a JSON list of the exit codes.
"""

from __future__ import annotations

import asyncio  # noqa: F401  imported here since it uses what is removed below
import importlib
import json
import mmap
import multiprocessing
import os
import select
import signal
import sys
import threading
import uuid  # noqa: F401  likewise
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIBRARIES = (
    "torch",
    "torch.distributed",
    "numpy",
    "PIL.Image",
    "pyarrow.parquet",
    "matplotlib.figure",
    "huggingface_hub",
)
REFUSE_OPEN = ("replace", "rename", "remove", "unlink")
MODULES = ("fcntl", "resource", "pwd", "grp", "termios", "pty", "tty", "syslog")
NAMES = {
    os: """O_NOFOLLOW O_NONBLOCK O_DIRECTORY O_CLOEXEC O_SYNC chown fchmod fchown fork forkpty getloadavg getpgid
        getpgrp getsid getuid geteuid getgid getgroups initgroups killpg lchown mkfifo mknod nice openpty posix_fadvise
        posix_fallocate pread preadv pwrite pwritev pathconf sched_getaffinity sched_setaffinity sched_yield sendfile
        setpgid setsid setuid statvfs sync sysconf uname wait wait3 wait4""",
    signal: """SIGALRM SIGCHLD SIGCONT SIGHUP SIGKILL SIGPIPE SIGQUIT SIGSTOP SIGTSTP SIGUSR1 SIGUSR2 SIG_BLOCK
        SIG_SETMASK SIG_UNBLOCK alarm pause pthread_kill pthread_sigmask setitimer siginterrupt sigpending
        sigtimedwait sigwait""",
    select: "poll epoll kqueue",
    mmap: "MAP_SHARED MAP_PRIVATE MAP_ANON MAP_ANONYMOUS PROT_READ PROT_WRITE MADV_DONTNEED",
    threading: "pthread_getcpuclockid",
}


def remove_posix() -> None:
    for name in LIBRARIES:
        importlib.import_module(name)
    for module, names in NAMES.items():
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
    for name in MODULES:
        sys.modules[name] = None  # type: ignore[assignment]  # makes `import` fail
    multiprocessing.get_all_start_methods = lambda: ["spawn"]  # type: ignore[method-assign]
    for name in REFUSE_OPEN:
        setattr(os, name, not_while_open(getattr(os, name)))


def not_while_open(function: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(*paths: Any, **options: Any) -> Any:
        for path in paths if options.get("dir_fd") is None else ():
            if str(Path(path).absolute()) in _open_files():
                raise PermissionError(13, "the file is in use", str(path))
        return function(*paths, **options)

    return guarded


def _open_files() -> set[str]:
    """Files that this process has open or mapped; empty where there is no /proc."""
    paths = set()
    for link in Path("/proc/self/fd").glob("*"):
        try:
            paths.add(str(link.readlink()))
        except OSError:  # the descriptor of this listing
            continue
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.is_file() else []
    return paths | {columns[5] for line in lines if len(columns := line.split(maxsplit=5)) > 5}


def main() -> None:
    remove_posix()
    import tests.small  # noqa: F401  a network of two small blocks by the name Toy/8
    from vitrail.cli.main import main as vitrail

    codes = []
    for words in json.loads(sys.argv[1]):
        sys.argv = ["vitrail", *words]
        try:
            vitrail()
            codes.append(0)
        except SystemExit as ended:
            codes.append(int(ended.code or 0))
    print(json.dumps(codes))


if __name__ == "__main__":
    main()
