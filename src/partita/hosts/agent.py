"""The agent of one host: starts the ranks of its devices, and sends back all that they leave.

``python -m partita.hosts.agent`` is started by a driver, through ssh, Slurm or Ray. It says that it
has come before it imports anything heavy, waits to be told what to run, and runs it by
``runtime.launch``, which starts fresh ranks under torch's agent. When standard input ends, its
driver or the way to it is gone: the ranks end, and so does the agent.
"""

import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import BinaryIO

from partita.core.codec import encode_part, parse_json
from partita.errors import PartitaError, WorkerError
from partita.hosts.messages import (
    Beat,
    Chunk,
    Done,
    End,
    Failed,
    Hello,
    Message,
    Remark,
    Start,
    Stop,
    read_message,
    write_message,
)
from partita.processes import ended_by_signals, loopback_identity
from partita.ranks.failures import write_error

BEAT_S = 1.0
"""An agent says that often that it lives."""
_LOOK_S = 0.1
_GRACE_S = 10.0
"""How long ending the ranks may take before the agent ends without, and the system ends them."""
_CHUNK_BYTES = 2**18


class _Voice:
    """Sends messages to the driver, from several threads."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._lock = stream, threading.Lock()

    def send(self, message: Message) -> None:
        """Send a message; a driver that is gone is seen at the end of standard input."""
        with self._lock:
            try:
                self._stream.write(write_message(message))
                self._stream.flush()
            except (OSError, ValueError):
                pass


class _Ear:
    """Hears what the driver says, in a thread of its own.

    Attributes:
        started: Gets what is to be run; None = nothing is.
        why: Why the ranks are to stop; empty = they are not.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.started: SimpleQueue[Start | None] = SimpleQueue()
        self.why = ""
        self._thread = threading.Thread(target=self._listen, daemon=True, name="driver")
        self._thread.start()

    def reason(self) -> str:
        """Return why the ranks are to stop."""
        return self.why

    def _listen(self) -> None:
        for line in self._stream:
            message = read_message(line)
            if isinstance(message, Start):
                self.started.put(message)
            elif isinstance(message, Stop):
                self.why = message.why
            elif isinstance(message, End):
                break
        self.started.put(None)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_GRACE_S)
        os._exit(WorkerError.exit_code)


class _Mirror:
    """Sends what the ranks leave in the job directory, as they leave it."""

    def __init__(self, root: Path, voice: _Voice) -> None:
        self._root, self._voice = root, voice
        self._sent: dict[Path, int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="mirror")

    def __enter__(self) -> "_Mirror":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._send("logs/**/*.log", "ranks/**/*.news", "ranks/**/*.error")

    def _watch(self) -> None:
        beat_s = time.monotonic()
        while not self._stop.wait(_LOOK_S):
            self._send("logs/**/*.log", "ranks/**/*.news")
            if time.monotonic() - beat_s >= BEAT_S:
                beat_s = time.monotonic()
                self._voice.send(Beat())

    def send_reports(self) -> None:
        """Send what all ranks saw; the first host has it."""
        self._send("ranks/**/*.pt")

    def _send(self, *patterns: str) -> None:
        for path in sorted(found for each in patterns for found in self._root.glob(each)):
            name, begin = path.relative_to(self._root).as_posix(), self._sent.get(path, 0)
            if path not in self._sent:
                self._voice.send(Chunk.of(name, b""))  # also an empty file is there
            with path.open("rb") as file:
                file.seek(begin)
                while data := file.read(_CHUNK_BYTES):
                    self._voice.send(Chunk.of(name, data))
                    begin += len(data)
            self._sent[path] = begin


def main() -> int:
    """Be the agent of this host; returns the exit code."""
    voice = _Voice(os.fdopen(os.dup(1), "wb"))
    os.dup2(2, 1)  # what others print must not be among the messages
    with socket.create_server(("", 0)) as listener:
        port = listener.getsockname()[1]
    loopback, hostname = loopback_identity(), socket.gethostname()
    voice.send(Hello(pid=os.getpid(), hostname=hostname, loopback=loopback, port=port))
    try:
        with ended_by_signals():
            start = _await_start(ear := _Ear(sys.stdin.buffer), voice)
            if start is None:
                return 0
            with _job_directory(start) as root, _Mirror(root, voice) as mirror:
                answer = _run(start, root, ear, voice)
                if isinstance(answer, Done) and start.index == 0:
                    mirror.send_reports()
            voice.send(answer)
    except (KeyboardInterrupt, SystemExit):
        voice.send(Failed(error=write_error(WorkerError("its agent was told to end"))))
        return WorkerError.exit_code
    return 0


def _await_start(ear: _Ear, voice: _Voice) -> Start | None:
    """Return what is to be run; None = nothing is."""
    while True:
        try:
            return ear.started.get(timeout=BEAT_S)
        except Empty:
            voice.send(Beat())


@contextmanager
def _job_directory(start: Start) -> Iterator[Path]:
    """Make the job directory of this host, which is gone afterwards, and go to the user's folder.

    A user's script that is not here stands in the job directory.
    """
    root = Path(tempfile.mkdtemp(prefix="partita-agent-"))
    try:
        os.environ.update(start.environment)
        os.chdir(start.folder if start.folder and Path(start.folder).is_dir() else root)
        for name, text in start.files.items():
            (root / name).write_text(text, encoding="utf-8")
        if start.script:
            _put_script(root, start.script)
        yield root
    finally:
        os.chdir("/")
        shutil.rmtree(root, ignore_errors=True)


def _put_script(root: Path, text: str) -> None:
    """Put a user's script beside the job where this host does not have it."""
    values = parse_json((root / "job.json").read_text(encoding="utf-8"))
    name, *arguments = values["script"]
    if not Path(name).is_file():
        here = root / Path(name).name
        here.write_text(text, encoding="utf-8")
        values["script"] = [str(here), *arguments]
        (root / "job.json").write_text(json.dumps(values), encoding="utf-8")


def _run(start: Start, root: Path, ear: _Ear, voice: _Voice) -> Message:
    """Run the ranks of this host; returns how they ended."""
    from partita.runtime.job import JobDirectory  # noqa: PLC0415 (torch: the driver waits for hello)
    from partita.runtime.launch import launch  # noqa: PLC0415 (torch)
    from partita.runtime.rendezvous import Host  # noqa: PLC0415 (torch)
    from partita.runtime.restarts import RestartLimit, Survival, never  # noqa: PLC0415 (torch)

    host = Host(
        index=start.index,
        num_hosts=len(start.names),
        address=start.address,
        port=start.port,
        names=start.names,
    )

    def tell(text: str) -> None:
        if start.index == 0:
            voice.send(Remark(text=text))

    try:
        job = JobDirectory(root).read_job()
        limit = RestartLimit(restarts=start.restarts)
        stop = ear.reason if job.checkpoints else never
        ended = launch(root, host, survival=Survival(limit=limit, stop=stop, say=tell))
    except PartitaError as exc:
        rank = exc.rank if isinstance(exc, WorkerError) else -1
        return Failed(error=write_error(exc), rank=rank)
    return Done(ended=json.dumps(encode_part(ended)))


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # threads of torch may still wait for other hosts
