"""Models of which only some parameters take memory: those that a rank owns.

A model is built twice. On the meta device, which costs nothing, its parameters get their names and
the order in which modules register them. Then it is built for real, and a parameter that is not
wanted becomes a *stand-in* as soon as it is registered: a tensor of its shape whose elements all
lie in one place of memory. Whoever initialises a stand-in draws the same random numbers as for a
real one, into a tensor that is dropped at once, so that the parameters that are wanted get the
values of a whole build. At any time at most one parameter that is not wanted takes memory.

Stand-ins can be read: a model with them is captured as any other, as the ops of a model do not
depend on the values of its parameters.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from partita.capture.trace import GETTERS, kind_of
from partita.capture.tree import tensors_of
from partita.errors import InvalidInputError

logger = logging.getLogger(__name__)

_CONVERSIONS = frozenset(
    ("to", "float", "double", "half", "bfloat16", "type", "cpu", "cuda", "contiguous", "clone")
)
_OTHER_DRAWS = frozenset(
    ["bernoulli_", "exponential_", "random_", "log_normal_", "cauchy_", "geometric_"]
)
_DRAWN_AT_ONCE = 2**20


def build_partly(
    build: Callable[[str], nn.Module], wanted: Collection[str], device: str = "cpu"
) -> nn.Module:
    """Return a model in which only some parameters take memory; the others are stand-ins.

    Args:
        build: Builds the model on a device: on ``meta``, then for real.
        wanted: The names of the parameters that are wanted, under any of their names.
        device: Where it is built.

    Raises:
        InvalidInputError: The model registers other parameters when it is built again.
    """
    drawn = torch.random.get_rng_state()
    with _registered() as seen:
        shell = build("meta")
    names = _names_of(shell)
    unwanted = {
        place
        for place, parameter in enumerate(seen)
        if not any(name in wanted for name in names.get(id(parameter), ()))
    }
    # Parameters that are replaced on the way have no name in the end.
    replaced = {place for place, parameter in enumerate(seen) if id(parameter) not in names}
    shapes = {name: parameter.shape for name, parameter in shell.named_parameters()}
    try:
        model = _built_with_stand_ins(build, device, drawn, (unwanted, replaced))
    except _ReadError:
        model = _built_with_stand_ins(build, device, drawn, (unwanted - replaced, set()))
    found = {name: parameter.shape for name, parameter in model.named_parameters()}
    hidden = {name for name, parameter in model.named_parameters() if is_stand_in(parameter)}
    if found != shapes or hidden & set(wanted):
        raise InvalidInputError(
            f"{type(model).__name__} registers other parameters when it is built again; it cannot "
            "be built in parts"
        )
    return model


def build_for_stages(
    build: Callable[[], nn.Module],
    held: Collection[str],
    used: Collection[str],
    device: torch.device,
) -> nn.Module:
    """Return a model with memory for what a rank's stages hold, the whole where that fails.

    Args:
        build: Builds the model; called on the meta device first.
        held: Parameters that the rank holds.
        used: Parameters that any stage uses. What none uses is built everywhere: nobody else has
            its values.
        device: Where it is built.
    """
    drawn = torch.random.get_rng_state()

    def build_on(place: str) -> nn.Module:
        with torch.device(place):
            return build()

    try:
        shell = build_on("meta")
        torch.random.set_rng_state(drawn)
        wanted = {
            name
            for names in _names_of(shell).values()
            if not any(name in used for name in names) or any(name in held for name in names)
            for name in names
        }
        return build_partly(build_on, wanted, str(device))
    except Exception as exc:  # noqa: BLE001  # a user's code may not know the meta device
        logger.info("the model is built whole: %s", exc)
        torch.random.set_rng_state(drawn)
        return build_on(str(device))


def materialise(
    model: nn.Module, device: torch.device, held: Collection[str], used: Collection[str]
) -> list[str]:
    """Give what is on the meta device memory, without values: stand-ins what others hold.

    Args:
        model: The model.
        device: Where the memory is.
        held: Parameters that the rank holds.
        used: Parameters that any stage uses; the rank has the others, too.

    Returns:
        The names of the buffers that have no values now.
    """
    names = _names_of(model)
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):  # noqa: SLF001  # objects, not copies
            for key, tensor in table.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in made:
                    known = names.get(id(tensor), ())
                    is_others = any(n in used for n in known) and not any(n in held for n in known)
                    made[id(tensor)] = _with_memory(tensor, device, is_stand_in=is_others)
                table[key] = made[id(tensor)]  # type: ignore[assignment]  # a parameter is one
    found = dict(model.named_buffers())
    filled = {id(tensor) for tensor in made.values()}
    return [name for name, tensor in found.items() if id(tensor) in filled]


def _with_memory(like: Tensor, device: torch.device, *, is_stand_in: bool) -> Tensor:
    is_parameter = isinstance(like, nn.Parameter)
    if is_stand_in and is_parameter:
        made = torch.full((), 0.01, dtype=like.dtype, device=device).expand(like.shape)
    else:
        made = torch.empty(like.shape, dtype=like.dtype, device=device)
    return nn.Parameter(made, like.requires_grad) if is_parameter else made


def _names_of(model: nn.Module) -> dict[int, list[str]]:
    """Return all names of each parameter, by its identity."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def _built_with_stand_ins(
    build: Callable[[str], nn.Module],
    device: str,
    drawn: Tensor,
    places: tuple[set[int], set[int]],
) -> nn.Module:
    """Return a model with stand-ins at some places, some of which may not be read."""
    hidden, unread = places
    torch.random.set_rng_state(drawn)
    mode = _StandIns()
    with mode, _registered(hidden.__contains__) as seen:
        mode.is_unread = lambda tensor: any(tensor is seen[p] for p in unread if p < len(seen))
        return build(device)


@contextmanager
def without_saved_tensors() -> Iterator[None]:
    """Let forwards keep nothing for a backward, which must not come.

    For captures: an output still tells whether it has a gradient.
    """
    with torch.autograd.graph.saved_tensors_hooks(lambda _: None, lambda _: torch.empty(0)):
        yield


def is_stand_in(tensor: Tensor) -> bool:
    """Return whether a tensor takes no memory of its own."""
    return tensor.numel() > 1 and not any(tensor.stride())


def stand_in(like: Tensor) -> Tensor:
    """Return a tensor that looks like another and takes no memory."""
    return torch.full((), 0.01, dtype=like.dtype, device=like.device).expand(like.shape)


class _ReadError(Exception):
    """A model looks at a parameter that it replaces afterwards."""


class _StandIns(TorchFunctionMode):
    """Lets what changes or converts stand-ins go on without memory.

    Attributes:
        is_unread: Returns whether a tensor is a stand-in that nobody may read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_unread: Callable[[Tensor], bool] = lambda _: False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,  # noqa: ANN401  # torch's
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401  # torch's
        del types
        options, name = dict(kwargs or {}), getattr(func, "__name__", "")
        # Functions of torch.nn.init come with their tensor by keyword.
        first = args[0] if args else options.get("tensor")
        is_change = name.endswith("_") and not name.endswith("__")
        reads = not is_change and kind_of(func) not in GETTERS
        if reads and any(map(self.is_unread, tensors_of((args, options)))):
            raise _ReadError
        if not (isinstance(first, Tensor) and is_stand_in(first)):
            return func(*args, **options)
        if name in _CONVERSIONS:
            return func(first.as_strided((), ()), *args[1:], **options).expand(first.shape)
        if name == "__setitem__":
            return None
        if not is_change:
            return func(*args, **options)
        # The same numbers are drawn as for a real one, and dropped.
        if name in _OTHER_DRAWS:
            func(torch.empty(first.shape, dtype=first.dtype, device=first.device), *args[1:])
        elif "normal" in name or "uniform" in name:  # torch's methods, and those of torch.nn.init
            _draw(first, options.get("generator"), normal="normal" in name)
        return first  # other changes, such as zero_ and copy_, draw nothing


def _draw(like: Tensor, generator: torch.Generator | None, *, normal: bool) -> None:
    """Draw as many numbers as a tensor has elements, some at a time.

    torch draws normal numbers by 16, and the last 16 again if the elements are no multiple of it:
    the last part is no shorter than that.
    """
    left = like.numel()
    while left:
        size = left if left < 2 * _DRAWN_AT_ONCE else _DRAWN_AT_ONCE
        part = torch.empty(size, dtype=like.dtype, device=like.device)
        part.normal_(generator=generator) if normal else part.uniform_(generator=generator)
        left -= size


@contextmanager
def _registered(
    hides: Callable[[int], bool] = lambda _: False,
) -> Iterator[list[nn.Parameter]]:
    """Note the parameters that modules register; those that ``hides`` names become stand-ins."""
    seen: list[nn.Parameter] = []
    known: set[int] = set()
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and id(parameter) not in known:
            known.add(id(parameter))
            if hides(len(seen)) and parameter.numel() > 1:
                parameter.data = stand_in(parameter)
            seen.append(parameter)  # held, so that no other gets its id
        original(module, name, parameter)

    nn.Module.register_parameter = register  # type: ignore[assignment,method-assign]
    try:
        yield seen
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]
