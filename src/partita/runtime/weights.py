"""First weights from files, read by name: only what is asked for, each tensor once.

A file of safetensors, an index of such files, a directory that holds either (as Hugging Face's do),
or a file that ``torch.save`` wrote. A name of the model is found under itself; where all of a model
was saved below another module, or the other way round, one prefix makes up the difference
(``transformer.wte.weight`` of the model is ``wte.weight`` of the file).
"""

import pickle
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from partita.core.codec import parse_json
from partita.errors import FormatError, InvalidInputError, reading
from partita.runtime.parts import Slice
from partita.runtime.safetensors_file import Described, SafetensorsFile, size_of

_USUAL = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)
"""What a directory of Hugging Face calls its weights, the preferred first."""
_WRAPPED = ("state_dict", "model_state_dict", "model")
"""Under which names scripts save the weights beside other things."""
_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedWeights:
    """What came of reading weights.

    Attributes:
        bytes_read: Bytes that were read, with headers.
        names: Tensors of the model that the file has, by all their names.
        remarks: What the file has besides, a sentence.
    """

    bytes_read: int = 0
    names: frozenset[str] = frozenset()
    remarks: tuple[str, ...] = ()


class _File(Protocol):
    """Tensors by name that can be read one by one."""

    described: dict[str, Described]
    bytes_read: int

    def read_into(self, name: str, target: Tensor, part: Slice | None = None) -> None:
        """Read a tensor, or a part of it, into another of its shape, whatever the type of that."""


class _TorchFile:
    """A file of ``torch.save``, mapped into memory: a tensor is read when it is copied."""

    def __init__(self, path: Path) -> None:
        try:
            with reading(path):
                found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except (RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError) as exc:
            if isinstance(exc, FormatError):
                raise
            first = str(exc).strip().partition("\n")[0]
            raise FormatError(f"holds no tensors by torch.save: {first}", path=str(path)) from exc
        self._tensors = _tensors_of(found, path)
        self.described = {name: (t.shape, t.dtype) for name, t in self._tensors.items()}
        self.bytes_read = 0

    def read_into(self, name: str, target: Tensor, part: Slice | None = None) -> None:
        whole = self._tensors[name]
        pairs = [(target, whole)]
        if part is not None:
            ranges = part.ranges(whole.shape[part.dim])
            pairs = [(target.narrow(part.dim, *r), whole.narrow(part.dim, *r)) for r in ranges]
        for into, value in pairs:
            with torch.no_grad():
                into.copy_(value)
            self.bytes_read += size_of((value.shape, value.dtype))


def _tensors_of(found: Any, path: Path) -> dict[str, Tensor]:  # noqa: ANN401  # of a file
    """Return the tensors of what was saved: by name, or below one of the usual names."""
    if isinstance(found, Mapping):
        for values in (found, *(found.get(key) for key in _WRAPPED)):
            if isinstance(values, Mapping):
                tensors = {n: v for n, v in values.items() if isinstance(v, Tensor)}
                if tensors:
                    return tensors
    raise FormatError("holds no tensors by name", path=str(path))


def weights_in(directory: Path) -> Path | None:
    """Return the weights of a directory: a file, an index, or itself; None = it holds none."""
    usual = (directory / name for name in _USUAL)
    first = next((path for path in usual if path.is_file()), None)
    if first is None and any(directory.glob("*.safetensors")):
        return directory
    return first


class _Weights:
    """All tensors of a path; a file of an index is opened when one of its tensors is wanted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open: dict[Path, _File] = {}
        self._index_bytes = 0
        found = weights_in(path) if path.is_dir() else path
        if found is None:
            raise InvalidInputError(f"{path} holds no weights; expected {', '.join(_USUAL)}")
        self._file_of: dict[str, Path] = {}
        if found.suffix == ".json":
            self._read_index(found)
            return
        for file in sorted(found.glob("*.safetensors")) if found.is_dir() else (found,):
            for name in self._opened(file).described:
                if name in self._file_of:
                    raise InvalidInputError(
                        f"{path}: {name!r} is in {self._file_of[name].name} and in {file.name}"
                    )
                self._file_of[name] = file

    def _read_index(self, path: Path) -> None:
        with reading(path):
            text = path.read_text(encoding="utf-8")
            values = parse_json(text)
            files = values.get("weight_map") if isinstance(values, dict) else None
            if not isinstance(files, dict) or not all(isinstance(f, str) for f in files.values()):
                raise FormatError("is no index of weights: it has no weight_map")
        self._index_bytes = len(text.encode())
        self._file_of = {name: path.parent / str(file) for name, file in files.items()}

    def _opened(self, path: Path) -> _File:
        if path not in self._open:
            is_torch = path.suffix in (".bin", ".pt", ".pth", ".ckpt")
            self._open[path] = _TorchFile(path) if is_torch else SafetensorsFile(path)
        return self._open[path]

    @property
    def names(self) -> Collection[str]:
        return self._file_of.keys()

    @property
    def bytes_read(self) -> int:
        return self._index_bytes + sum(file.bytes_read for file in self._open.values())

    def file_of(self, name: str) -> _File:
        """Return the file that holds a tensor.

        Raises:
            FormatError: The index names another.
        """
        path = self._file_of[name]
        file = self._opened(path)
        if name not in file.described:
            raise FormatError(f"lacks {name!r}, which the index has there", path=str(path))
        return file


@dataclass(frozen=True, slots=True)
class _Held:
    """A tensor of a model, with all its names: several where modules share it."""

    names: tuple[str, ...]
    tensor: Tensor


def _held_by(model: nn.Module) -> list[_Held]:
    """Return what a model saves: its parameters and persistent buffers, shared ones once."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            names.setdefault(id(value), []).append(name)
            tensors[id(value)] = value
    return [_Held(tuple(found), tensors[key]) for key, found in names.items()]


def load_weights(
    model: nn.Module,
    path: Path,
    wanted: Collection[str] | None = None,
    slices: Mapping[str, Slice] | None = None,
) -> LoadedWeights:
    """Read weights into a model, each tensor once, in the types that the model has.

    Args:
        model: The model; its tensors keep their places.
        path: The weights.
        wanted: Names of the tensors that are read, under any of their names; None = all.
        slices: Tensors of which a slice is read, by any of their names; the rest of them stays.

    Raises:
        InvalidInputError: The file lacks a tensor of the model, whether it is wanted or not, or
            one that is wanted has another shape.
        FormatError: It cannot be read, or is not what it should be.
    """
    return _taken(model, path, wanted, slices or {}, reads=True)


def check_weights(model: nn.Module, path: Path) -> LoadedWeights:
    """Check that weights are those of a model by names and shapes; only headers are read.

    Raises:
        InvalidInputError: They are not.
        FormatError: They cannot be read.
    """
    return _taken(model, path, None, {}, reads=False)


def _taken(
    model: nn.Module,
    path: Path,
    wanted: Collection[str] | None,
    slices: Mapping[str, Slice],
    *,
    reads: bool,
) -> LoadedWeights:
    weights, held = _Weights(path), _held_by(model)
    sources = match_names([one.names for one in held], weights.names, str(path))
    _check_all_there(held, sources, path)
    found: list[tuple[_Held, str]] = []
    for one in held:
        source = next((sources[name] for name in one.names if name in sources), None)
        if source is not None and (wanted is None or any(name in wanted for name in one.names)):
            found.append((one, source))
    _check_shapes(found, weights)
    if reads:
        for one, source in found:
            part = next((slices[name] for name in one.names if name in slices), None)
            weights.file_of(source).read_into(source, one.tensor.detach(), part)
    unused = sorted(set(weights.names) - set(sources.values()))
    remark = f"{path}: {len(unused)} tensors are not of the model, and not read: {_some(unused)}"
    return LoadedWeights(
        bytes_read=weights.bytes_read,
        names=frozenset(n for one in held if sources.keys() & one.names for n in one.names),
        remarks=(remark,) if unused else (),
    )


def _check_all_there(held: Iterable[_Held], sources: Mapping[str, str], path: Path) -> None:
    """Check that all is there; whole numbers, such as counts and positions, a model has itself."""
    missing = [
        one.names[0]
        for one in held
        if not sources.keys() & one.names
        and (isinstance(one.tensor, nn.Parameter) or one.tensor.is_floating_point())
    ]
    if missing:
        raise InvalidInputError(
            f"{path} lacks {len(missing)} tensors of the model: {_some(missing)}"
        )


def _check_shapes(found: Iterable[tuple[_Held, str]], weights: _Weights) -> None:
    for one, source in found:
        shape = weights.file_of(source).described[source][0]
        if shape != one.tensor.shape:
            raise InvalidInputError(
                f"{weights.path}: {source!r} has shape {tuple(shape)}; in the model "
                f"{one.names[0]!r} has {tuple(one.tensor.shape)}"
            )


def match_names(
    groups: Sequence[tuple[str, ...]], there: Collection[str], path: str
) -> dict[str, str]:
    """Return under which name of a file each name of a model is found, as far as it is.

    A name that the file has means itself. Where some are missing, others are tried without their
    first part, and below a first part that names of the file have: the one prefix by which most are
    found counts, unless two names would then mean the same tensor.

    Args:
        groups: The tensors of a model, each by all its names.
        there: The names of the file.
        path: The file, for errors.

    Raises:
        InvalidInputError: Two prefixes do equally well.
    """
    as_they_are, most = _found_by(lambda name: name, groups, there)
    if most == len(groups):
        return as_they_are
    best = [as_they_are]
    for rename in _renamings((name for names in groups for name in names), there):
        found, count = _found_by(rename, groups, there)
        if count > most:
            best, most = [found], count
        elif count == most and found not in best:
            best.append(found)
    if best[0] is not as_they_are and len(best) > 1:
        one, other = best[:2]
        name = next(name for name in sorted({*one, *other}) if one.get(name) != other.get(name))
        raise InvalidInputError(
            f"{path}: {name!r} of the model may be {one.get(name)!r} or {other.get(name)!r}; save "
            "the weights under the names of the model"
        )
    return best[0]


def _renamings(names: Iterable[str], there: Iterable[str]) -> Iterator[Callable[[str], str]]:
    for first in _first_parts(names):
        yield lambda name, first=first: name.removeprefix(first)  # type: ignore[misc]
    for first in _first_parts(there):
        yield lambda name, first=first: first + name  # type: ignore[misc]


def _first_parts(names: Iterable[str]) -> list[str]:
    return sorted({f"{name.partition('.')[0]}." for name in names if "." in name})


def _found_by(
    rename: Callable[[str], str], groups: Sequence[tuple[str, ...]], there: Collection[str]
) -> tuple[dict[str, str], int]:
    """Return what is found by a renaming, and how many tensors; none if two would be the same."""
    found: dict[str, str] = {}
    taken: dict[str, int] = {}
    for number, names in enumerate(groups):
        for name in names:
            source = name if name in there else rename(name)
            if source not in there:
                continue
            if taken.setdefault(source, number) != number:
                return {}, -1
            found[name] = source
    return found, len(set(taken.values()))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (" ..." if len(names) > _SHOWN else "")
