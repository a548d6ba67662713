"""Jobs in containers: the command line of an engine, built without one.

The root of the host is mounted at ``mount``, as Synergy does it, but read-only; the working
directory and the directory of the run can be written. No container is privileged, none needs a
terminal, and none is left when its run ends.
"""

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from partita.errors import UnsupportedError, WorkerError

ENGINES = ("docker", "podman")
_ASK_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """What the containers of a job have in common.

    Attributes:
        engine: ``docker`` or ``podman``.
        image: The image.
        mount: Where the root of the host is seen inside.
        python: The interpreter inside.
        gpus: Whether the GPUs of the host are passed on.
    """

    engine: str
    image: str
    mount: str = "/datadrive"
    python: str = "python"
    gpus: bool = False

    def inside(self, path: Path) -> str:
        """Return where a path of the host is seen inside."""
        return str(PurePosixPath(self.mount) / str(path.absolute()).lstrip("/"))


def host_path(path: str, mount: str) -> str:
    """Return the path of the host for one below the mount; any other is returned as it is."""
    root = PurePosixPath(mount)
    pure = PurePosixPath(path)
    if root.parts and pure.is_relative_to(root):
        return str(PurePosixPath("/") / pure.relative_to(root)) + ("/" if path[-1] == "/" else "")
    return path


def container_command(  # noqa: PLR0913 (keyword-only, one for each setting of a container)
    container: Container,
    arguments: Sequence[str],
    *,
    name: str,
    folder: Path,
    writable: Sequence[Path],
    environment: Mapping[str, str],
    cpus: float,
    cpu_numbers: Sequence[int],
    memory_bytes: int | None,
) -> list[str]:
    """Return the command that runs Python in a container with limits.

    Args:
        container: The engine and the image.
        arguments: Those of the interpreter, paths as seen inside.
        name: Of the container, so that it can be ended.
        folder: Working directory on the host; can be written.
        writable: Further directories of the host that can be written.
        environment: Variables of the job.
        cpus: CPU time, in CPUs.
        cpu_numbers: CPUs that it may run on.
        memory_bytes: Memory; None = no limit.
    """
    command = [container.engine, "run", "--rm", "--name", name, "--ipc=host", "--network=host"]
    command += [f"--cpus={cpus:g}", f"--cpuset-cpus={','.join(map(str, cpu_numbers))}"]
    if memory_bytes is not None:
        command.append(f"--memory={memory_bytes}b")
    if container.gpus:
        nvidia = ["--device", "nvidia.com/gpu=all"]
        command += ["--gpus", "all"] if container.engine == "docker" else nvidia
    command += ["--mount", f"type=bind,src=/,target={container.mount},readonly"]
    for path in dict.fromkeys((folder.absolute(), *(path.absolute() for path in writable))):
        command += ["--mount", f"type=bind,src={path},target={container.inside(path)}"]
    for key, value in environment.items():
        command += ["--env", f"{key}={value}"]
    command += ["--workdir", container.inside(folder), "--entrypoint", container.python]
    return [*command, container.image, *arguments]


def find_engine() -> str | None:
    """Return the first engine that answers; None where there is none."""
    return next((name for name in ENGINES if shutil.which(name) and _answers(name)), None)


def _answers(engine: str) -> bool:
    try:
        return not _ask([engine, "info"], _ASK_S).returncode
    except subprocess.TimeoutExpired:
        return False


def pull_if_absent(engine: str, image: str, *, limit_s: float) -> bool:
    """Pull an image that is not here; returns whether it was pulled.

    Raises:
        UnsupportedError: It cannot be pulled.
        WorkerError: That takes longer than the limit.
    """
    if not _ask([engine, "image", "inspect", image], limit_s).returncode:
        return False
    try:
        done = _ask([engine, "pull", image], limit_s)
    except subprocess.TimeoutExpired as exc:
        raise WorkerError(f"{engine} pull {image} did not end within {limit_s:g} s") from exc
    if done.returncode:
        words = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UnsupportedError(f"{engine} cannot pull {image}: {words}")
    return True


def kill_container(engine: str, name: str) -> None:
    """End a container that has not ended by itself; one that is gone is fine."""
    _ask([engine, "kill", name], _ASK_S)


def _ask(command: Sequence[str], limit_s: float) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command, capture_output=True, text=True, timeout=limit_s, check=False, errors="replace"
    )
