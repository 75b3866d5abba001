"""Load what the arguments name; an error if that reached beyond their folders and the installed packages."""

import pickle
import socket
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch  # noqa: F401  # what imports it does is not in question here

import pmvit
import pmvit.loading

FORBIDDEN = (
    *("socket.", "urllib.", "http.", "ftplib.", "subprocess.", "pty.", "os.system", "os.exec", "os.fork", "os.spawn"),
    *("os.posix_spawn", "os.startfile", "os.remove", "os.rename", "os.mkdir", "shutil.", "pickle.find_class"),
)


def main(paths: list[str]) -> None:
    places = [*paths, "/proc", "/sys", *sysconfig.get_paths().values(), sys.prefix, sys.base_prefix, pmvit.__path__[0]]
    allowed = [Path(place).resolve() for place in places]
    seen: list[str] = []

    def guard(event: str, arguments: tuple[Any, ...]) -> None:
        what = ""
        if event.startswith(FORBIDDEN):
            what = f"{event} {arguments}"
        elif event == "open" and isinstance(arguments[0], (str, bytes)):
            path, mode, _ = arguments
            place = Path(path.decode() if isinstance(path, bytes) else path).resolve()
            writes = mode is not None and set(mode) & set("wax+")
            if writes or not any(place.is_relative_to(root) for root in allowed):
                what = f"open {path!r} {mode}"
        if what:
            seen.append(what)
            raise RuntimeError(what)

    sys.dont_write_bytecode = True
    tempfile.tempdir = "/nowhere"
    sys.addaudithook(guard)
    for path in paths:
        try:
            told = f"loaded {type(pmvit.loading.create_model(path)).__name__}"
        except pmvit.PmvitError as error:
            told = f"refused {str(error).splitlines()}"
        sys.stdout.write(f"{path}\t{told}\n")
        sys.stdout.flush()
    if seen:
        sys.exit("\n".join(seen))
    beyond = (
        socket.socket,
        lambda: Path("/etc/hosts").read_text(),
        lambda: pickle.loads(pickle.dumps(Path())),  # noqa: S301  # what is forbidden, to see that it is
        lambda: subprocess.run([sys.executable, "-V"], check=True),
    )
    for reach in beyond:
        try:
            reach()
        except RuntimeError:
            continue
        sys.exit("the guard let something through")


if __name__ == "__main__":
    main(sys.argv[1:])
