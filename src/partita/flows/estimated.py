"""Models that are priced by their shapes alone: nothing is allocated, nothing runs."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from partita.catalogue.catalogue import Catalogue, DeviceType, check_rates, load_catalogue
from partita.catalogue.examples import EXAMPLES
from partita.core.cluster import Cluster
from partita.core.graph import DeviceKind, Graph
from partita.core.precision import parse_precision
from partita.core.problem import Mode
from partita.errors import InvalidInputError
from partita.flows.extras import torch_needed
from partita.flows.fields import ShapeFields, SourceFields, StepFields, is_python
from partita.flows.summary import AS_USED, estimate_basis
from partita.names import nearest
from partita.planners.pipeline import main_devices_of
from partita.requests import fields_of

if TYPE_CHECKING:
    from partita.capture.origin import ModelOrigin
    from partita.capture.sources import SourceOptions

USUAL = ("bfloat16", "tfloat32")
"""Arithmetic that accelerators are used with, the first that all of them have."""


def find_modules_here() -> None:
    """Let package.module:callable name modules of the current directory, as python -m would."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)


def source_options(
    request: ShapeFields, *, batch_size: int | None = None, device: str = "cpu", seed: int = 0
) -> "SourceOptions":
    """Return what a request wants of a model that is built by name."""
    from partita.capture.sources import SourceOptions  # noqa: PLC0415 (imports torch)

    return SourceOptions(
        batch_size=batch_size or 0,
        sequence_length=request.sequence_length or 0,
        scale=request.scale,
        dtype=request.dtype or "",
        device=device,
        seed=seed,
    )


def origin_of(
    text: str, request: ShapeFields, mode: str | None, *, batch_size: int | None, seed: int = 0
) -> "ModelOrigin":
    """Return what a graph remembers of the model that it is made from."""
    from partita.capture.captured import CaptureMode, Granularity  # noqa: PLC0415 (torch)
    from partita.capture.origin import ModelOrigin  # noqa: PLC0415 (likewise)

    infers = mode == Mode.INFERENCE.value
    return ModelOrigin(
        text=text,
        options=source_options(request, batch_size=batch_size, seed=seed),
        granularity=Granularity(request.granularity),
        mode=CaptureMode.EVAL if infers else CaptureMode.TRAINING,
    )


def estimate_origin(
    text: str, request: ShapeFields, mode: str | None, graph: Graph, *, seed: int = 0
) -> "ModelOrigin":
    """Return what an estimated graph remembers of its model: the sizes that it was estimated at.

    A configuration has its own dtype and length where it is estimated and others where it is
    measured; a run of the plan must have those that were planned for.
    """
    from partita.capture.sources import is_configuration  # noqa: PLC0415 (imports torch)

    basis = estimate_basis(graph)
    if basis is not None and is_configuration(text):
        request = replace(request, dtype=basis["dtype"], sequence_length=basis["tokens_per_sample"])
    return origin_of(text, request, mode, batch_size=graph.batch_size, seed=seed)


def usual_arithmetic(types: Sequence[DeviceType]) -> str:
    """Return the arithmetic that devices are used with where nobody names one; empty = float32.

    Mixed precision in bfloat16 where all of them compute in it, else TF32 where all do. CPUs
    compute in float32.
    """
    if any(device.kind is DeviceKind.CPU for device in types):
        return ""
    ranked = (
        dtype for dtype in USUAL if all(device.peak_flop_per_s.get(dtype) for device in types)
    )
    return next(ranked, "")


def estimator_of(
    text: str,
    request: SourceFields,
    mode: str | None,
    *,
    batch_size: int | None = None,
    seed: int = 0,
    as_used: bool = True,
) -> Callable[..., Graph]:
    """Return a function of types of devices that prices a model by shapes alone.

    It also takes ``batch_size`` and ``catalogue``.

    Args:
        text: Name of the model.
        request: What it is built as, and how it is priced.
        mode: Training or inference.
        batch_size: Samples of the microbatch; None = as the source has it.
        seed: Seed of weights and data.
        as_used: Whether the arithmetic is that which the devices are used with where neither the
            request nor the model's configuration says one; else that of the weights.

    Raises:
        UnsupportedError: torch is not there.
    """
    with torch_needed("estimates need"):
        from partita.capture.captured import CaptureMode, Granularity  # noqa: PLC0415 (torch)
        from partita.capture.graph import arithmetic_of  # noqa: PLC0415 (likewise)
        from partita.capture.sources import load_source  # noqa: PLC0415 (likewise)
        from partita.profiler.estimate.estimate import (  # noqa: PLC0415 (likewise)
            ANNOTATION,
            EstimateOptions,
            estimate_source,
        )
        from partita.profiler.estimate.trace import Kernels  # noqa: PLC0415 (likewise)
    find_modules_here()
    options = EstimateOptions(
        kernels=Kernels(request.kernels),
        arithmetic=request.arithmetic,
        recompute=request.recomputes_blocks,
        granularity=Granularity(request.granularity),
        mode=CaptureMode.EVAL if mode == Mode.INFERENCE.value else CaptureMode.TRAINING,
    )
    wanted = source_options(request, batch_size=batch_size, device="meta", seed=seed)
    source = load_source(text, wanted)
    is_free = as_used and not (request.arithmetic or request.dtype or source.dtype)
    if not is_free or arithmetic_of(source.model.parameters()) != "float32":
        return partial(estimate_source, source, options=options)

    def estimated(
        types: Sequence[str], *, batch_size: int = 0, catalogue: Catalogue | None = None
    ) -> Graph:
        known = catalogue or load_catalogue()
        usual = usual_arithmetic([known.device_type(name) for name in types])
        how = replace(options, arithmetic=usual)
        graph = estimate_source(source, types, how, batch_size=batch_size, catalogue=known)
        notes = {
            name: {**note, AS_USED: True} if usual else note
            for name, note in graph.annotations[ANNOTATION].items()
        }
        return replace(graph, annotations={**graph.annotations, ANNOTATION: notes})

    return estimated


def estimated_graphs(
    text: str,
    request: SourceFields,
    mode: str | None,
    cluster: Cluster,
    catalogue: Catalogue,
    *,
    seed: int = 0,
) -> Callable[[int], Graph]:
    """Return a function that gives the graph for a microbatch size; 0 = the usual one.

    Args:
        text: Name of the model.
        request: What it is built as, and how it is priced; whether blocks are recomputed is not
            looked at.
        mode: Training or inference.
        cluster: Its types of devices are estimated for, those that the catalogue has.
        catalogue: What is known of types of devices.
        seed: Seed of weights and data, which the graph remembers.

    Raises:
        InvalidInputError: There is no such model, or the catalogue has no type of the cluster.
        UnsupportedError: torch is not there.
    """
    text = check_model(text, examples=tuple(EXAMPLES))
    types = list(dict.fromkeys(cluster.devices[i].type for i in main_devices_of(cluster)))
    known = [name for name in types if name in catalogue.devices]
    if not known:
        raise InvalidInputError(
            f"cluster {cluster.name!r} has devices of type {', '.join(map(repr, types))}, of which "
            "the catalogue has none to estimate for; describe them in a --catalogue file"
        )
    plain = _as_policy_says(request)
    for dtype in filter(None, (plain.arithmetic or plain.dtype,)):
        check_rates([catalogue.device_type(name) for name in known], dtype)
    estimated = estimator_of(text, plain, mode, seed=seed)
    sizes: dict[int, Graph] = {}

    def graph_at(size: int) -> Graph:
        if size not in sizes:
            graph = estimated(known, batch_size=size, catalogue=catalogue)
            origin = estimate_origin(text, plain, mode, graph, seed=seed)
            sizes[size] = sizes[graph.batch_size] = origin.recorded_in(graph)
        return sizes[size]

    return graph_at


def _as_policy_says(request: SourceFields) -> SourceFields:
    """Return the fields of a source, without recomputation, with the dtypes of the precision.

    Raises:
        InvalidInputError: A dtype is given that contradicts the precision.
    """
    plain = SourceFields(
        **{
            field.name: getattr(request, field.name)
            for field in fields_of(SourceFields)
            if field.name != "recompute"
        }
    )
    text = request.precision if isinstance(request, StepFields) else None
    if text is None:
        return plain
    policy = parse_precision(text)
    for option, given, part in (
        ("dtype", plain.dtype, "weights"),
        ("arithmetic", plain.arithmetic, "compute"),
    ):
        own = getattr(policy, part)
        if given and given != own:
            raise InvalidInputError(
                f"--{option} {given} contradicts --precision {text}, whose {part} are in {own}; "
                f"leave one out, or say --precision {text},{part}={given}"
            )
    return replace(plain, dtype=policy.weights, arithmetic=policy.compute)


def check_model(model: str, *, examples: Sequence[str] = ()) -> str:
    """Return the name of a model that can be built; of a file of Python that of its callable.

    A plain name that no such model has is refused.

    Args:
        model: The name; files, callables and configurations are left to whoever loads them.
        examples: Built-in graphs that it could have been as well.

    Raises:
        InvalidInputError: There is none; says where a model of this name is a large one, which is
            planned by its shape and never built.
    """
    if is_python(model):
        with torch_needed(f"the model of {model} needs"):
            from partita.capture.sources import callable_in  # noqa: PLC0415 (imports torch)
        find_modules_here()
        return callable_in(model)
    if ":" in model or "/" in model or Path(model).exists():
        return model
    with torch_needed(f"{model!r} is no file and no built-in example; building a model needs"):
        from partita.models.zoo import MODELS, find_model  # noqa: PLC0415 (imports torch)
    try:
        find_model(model)
    except InvalidInputError as exc:
        from partita.transformer.named import near_shape  # noqa: PLC0415 (YAML of all shapes)

        near = near_shape(model)
        if near == model.lower():
            raise InvalidInputError(
                f"{model!r} is planned by its shape: see partita plan, estimate and recommend"
            ) from exc
        if near is not None and nearest(model, MODELS) is None:
            raise InvalidInputError(
                f"there is no model {model!r}; did you mean {near!r}? (partita models large lists "
                "them)"
            ) from exc
        close = nearest(model.lower(), [*examples, *MODELS])
        meant = f"; did you mean {close!r}?" if close else ""
        graphs = f", built-in graphs are {', '.join(examples)}" if examples else ""
        raise InvalidInputError(
            f"there is no model {model!r}, nor such a file{meant} (partita models lists models"
            f"{graphs})"
        ) from exc
    return model
