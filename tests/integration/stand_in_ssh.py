"""Stands for ssh: ``python stand_in_ssh.py FOLDER HOST COMMAND`` runs a command on this machine.

As with ssh the command has an environment of its own, another folder and another session. FOLDER
gets the number of its process, by the name of the host; a host whose name begins with ``no`` cannot
be reached.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

folder, host, remote = sys.argv[1:]
sys.stdout.write(f"welcome to {host}\n")  # as a login shell may greet
sys.stdout.flush()
if host.startswith("no"):
    sys.exit(f"ssh: connect to host {host} port 22: Connection refused")
words = shlex.split(remote)
assert words[0] == "exec"
environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
environment["STAND_IN_HOST"] = host
rest = words[1:]
if rest[0] == "env":
    name, _, value = rest[1].partition("=")
    environment[name] = value
    rest = rest[2:]
process = subprocess.Popen(rest, env=environment, cwd="/", start_new_session=True)
(Path(folder) / host).write_text(str(process.pid))
sys.exit(process.wait())
