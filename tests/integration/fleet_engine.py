"""Stands for docker: runs the command of a container here, with paths taken out of the mount."""

import os
import subprocess
import sys
from pathlib import Path

arguments = sys.argv[1:]
with Path(os.environ["FLEET_ENGINE_LOG"]).open("a") as log:
    log.write(" ".join(arguments[:2] if arguments[:1] != ["run"] else arguments) + "\n")
if arguments[:2] == ["image", "inspect"]:
    sys.exit(1)
if arguments[0] != "run":
    sys.exit(0)
entry = arguments.index("--entrypoint")
environment = dict(os.environ)
for place, word in enumerate(arguments[:entry]):
    if word == "--env":
        name, _, value = arguments[place + 1].partition("=")
        environment[name] = value.replace("/datadrive/", "/")
inside = [word.replace("/datadrive/", "/") for word in arguments[entry + 3 :]]
folder = arguments[arguments.index("--workdir") + 1].replace("/datadrive/", "/")
command = [sys.executable, *inside]
sys.exit(subprocess.run(command, env=environment, cwd=folder, check=False).returncode)
