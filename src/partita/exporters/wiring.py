"""What goes from which stage to which, as JSON values."""

from collections.abc import Mapping, Sequence
from typing import Any

from partita.exporters.blueprint import Blueprint
from partita.exporters.stage_source import StageSource

VERSION = 1


def wiring_of(
    blueprint: Blueprint, crossing: Mapping[int, str], sources: Sequence[StageSource]
) -> dict[str, Any]:
    """Return inputs, stages, replicas and what they exchange."""
    plan = blueprint.plan
    maker = {row: number for number, s in enumerate(blueprint.stages) for row in s.leaving}

    def told(row: int) -> dict[str, Any]:
        info = blueprint.values[row]
        return {
            "tensor": blueprint.names[row],
            "variable": crossing[row],
            "shape": list(info.shape) if blueprint.has_shapes else None,
            "dtype": str(info.dtype).removeprefix("torch.") if blueprint.has_shapes else None,
            "gradient": info.requires_grad,
            "from": f"stage{maker[row]}" if row in maker else "input",
        }

    readers: dict[int, list[int]] = {}
    for number, stage in enumerate(blueprint.stages):
        for row in stage.inputs:
            readers.setdefault(row, []).append(number)
    stages = [
        {
            "name": f"stage{number}",
            "devices": [[plan.devices[d] for d in group] for group in placed.devices],
            "replicas": placed.num_replicas,
            "shares": list(placed.shares),
            "inputs": [told(row) for row in stage.inputs],
            "outputs": [
                {**told(row), "to": [f"stage{s}" for s in readers.get(row, [])]}
                for row in stage.leaving
            ],
            "parameters": list(source.parameters),
        }
        for number, (stage, placed, source) in enumerate(
            zip(blueprint.stages, plan.stages, sources, strict=True)
        )
    ]
    holders: dict[str, list[str]] = {}
    for number, source in enumerate(sources):
        for name in source.parameters:
            holders.setdefault(name, []).append(f"stage{number}")
    return {
        "format": "partita.export",
        "version": VERSION,
        "model": blueprint.name,
        "fingerprint": plan.fingerprint,
        "schedule": plan.schedule.value,
        "microbatch_sizes": plan.microbatch_sizes.tolist(),
        "modes": list(blueprint.modes),
        "needs": sorted({"torch"}.union(*(source.needs for source in sources))),
        "inputs": [{**told(row), "optional": row in blueprint.labels} for row in blueprint.inputs],
        "outputs": [told(row) for row in blueprint.outputs],
        "loss": told(blueprint.loss) if blueprint.loss >= 0 else None,
        "stages": stages,
        "shared_parameters": {n: where for n, where in holders.items() if len(where) > 1},
        "aliases": dict(blueprint.aliases),
    }
