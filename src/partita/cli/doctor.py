"""``partita doctor``: what this machine has and lacks."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import click

from partita.cli.options import output_options

PACKAGES = (
    ("torch", "run plans (the interpreter)", "partita[torch]"),
    ("transformers", "Hugging Face models", "partita[models]"),
    ("fastapi", "the HTTP service", "partita[serve]"),
    ("pynvml", "reading GPU power and clocks", "partita[energy]"),
)


@click.command(epilog="Example: partita doctor --why")
@click.option(
    "--why", is_flag=True, help="Say for each missing part what it is for and how to get it."
)
@click.option("-o", "--output", help="Write the findings to a JSON file.")
@output_options
def command(why: bool, output: str | None, as_json: bool, **rest: Any) -> None:
    """Say what this machine has and lacks."""
    del rest
    found = examine()
    if output is not None or as_json:
        import json  # noqa: PLC0415 (only for JSON)

        from partita.documents import write_text  # noqa: PLC0415 (only for a file)

        text = json.dumps(found, indent=1) + "\n"
        write_text(output or "-", text)
        if as_json:
            if output is not None:
                click.echo(text, nl=False)
            return
    torch = found["packages"]["torch"]["version"]
    gpus = found["gpus"]
    memory = (
        f"{found['memory_bytes'] / 1e9:.0f} GB" if found["memory_bytes"] else "memory not known"
    )
    click.echo(
        " · ".join(
            [
                f"python {found['python']}",
                f"torch {torch}" if torch else "no torch",
                f"{found['cores']} cores, {memory}",
                f"{len(gpus)} GPUs ({', '.join(sorted(set(gpus)))})" if gpus else "no GPU",
                f"energy: {'RAPL' if found['rapl'] else 'modelled only (no NVML, no RAPL)'}"
                if not gpus
                else "energy: NVML",
            ]
        )
    )
    ok = [name for name, ready in found["ready"].items() if ready]
    missing = [name for name, ready in found["ready"].items() if not ready]
    click.echo(f"ok: {', '.join(ok)}")
    if missing:
        hint = "" if why else "  -> partita doctor --why"
        click.echo(f"not here: {', '.join(missing)}{hint}")
    if why:
        for name, package in found["packages"].items():
            if package["version"] is None:
                click.echo(
                    f"  {name}: for {package['purpose']}; pip install {package['install']!r}"
                )
        if not gpus:
            click.echo("  GPUs: none is visible (nvidia-smi); everything runs on CPU processes")
        if not found["rapl"]:
            click.echo("  RAPL: no readable energy counter of the CPU under /sys/class/powercap")


def examine() -> dict[str, Any]:
    """Return what this machine has, as JSON values."""
    packages = {
        name: {"version": _version(name), "purpose": purpose, "install": install}
        for name, purpose, install in PACKAGES
    }
    gpus = _gpus()
    torch = packages["torch"]["version"] is not None
    return {
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "gpus": gpus,
        "rapl": _has_rapl(),
        "packages": packages,
        "ready": {
            "plan": True,
            "simulate": True,
            "convert": True,
            "interpret on CPU": torch,
            "GPU clocks": bool(gpus) and packages["pynvml"]["version"] is not None,
        },
    }


def _version(name: str) -> str | None:
    if importlib.util.find_spec(name) is None:
        return None
    try:
        return importlib.metadata.version({"pynvml": "nvidia-ml-py"}.get(name, name))
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0


def _gpus() -> list[str]:
    """Return the names of the GPUs that the driver's own tool lists."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        result = subprocess.run(
            [tool, "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in result.stdout.splitlines() if result.returncode == 0 and line]


def _has_rapl() -> bool:
    counters = Path("/sys/class/powercap").glob("*/energy_uj")
    return any(os.access(path, os.R_OK) for path in counters)
