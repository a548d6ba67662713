"""First weights from files: read by name, once, only what is wanted."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from partita.errors import FormatError, InvalidInputError
from partita.runtime.parts import Slice
from partita.runtime.safetensors_file import write_weights
from partita.runtime.weights import check_weights, load_weights, match_names, weights_in


class Tied(nn.Module):
    """An embedding whose weights are those of the last layer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"words": nn.Embedding(10, 4), "norm": nn.BatchNorm1d(4)})
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.body["words"].weight


def drawn(seed: int) -> Tied:
    torch.manual_seed(seed)
    model = Tied()
    model.body["norm"].running_mean.normal_()
    return model


def saved(path: Path, tensors: Mapping[str, Tensor]) -> Path:
    described = {name: (value.shape, value.dtype) for name, value in tensors.items()}
    write_weights(path, described, tensors.items())
    return path


def untied(model: Tied) -> dict[str, Tensor]:
    return {n: t for n, t in model.state_dict().items() if n != "head.weight"}


def same(one: Tied, other: Tied) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def indexed(folder: Path, tensors: Mapping[str, Tensor]) -> Path:
    """Write a file for each tensor, with their index."""
    files = {}
    for number, (name, value) in enumerate(tensors.items()):
        files[name] = f"model-{number}.safetensors"
        saved(folder / files[name], {name: value})
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return index


@pytest.mark.parametrize(
    "form", ["file", "directory", "index", "no-index", "torch", "wrapped", "bin"]
)
def test_weights_are_read_from_every_form(form: str, tmp_path: Path) -> None:
    wanted = drawn(1)
    path = tmp_path
    if form in ("file", "directory"):
        path = saved(tmp_path / "model.safetensors", untied(wanted))
    elif form in ("index", "no-index"):
        path = indexed(tmp_path, untied(wanted))
    elif form in ("torch", "wrapped"):
        path = tmp_path / "weights.pt"
        state = wanted.state_dict()
        torch.save({"model": state, "step": 3} if form == "wrapped" else state, path)
    else:
        torch.save(wanted.state_dict(), tmp_path / "pytorch_model.bin")
    if form == "no-index":
        path.unlink()
    model = drawn(2)
    loaded = load_weights(
        model, path if form in ("file", "index", "torch", "wrapped") else tmp_path
    )
    assert same(model, wanted)
    assert model.head.weight is model.body["words"].weight
    assert "head.weight" in loaded.names
    tensors = sum(value.nbytes for value in untied(wanted).values())
    assert tensors <= loaded.bytes_read < tensors + 4096  # each once, and headers
    assert not loaded.remarks


def test_only_what_is_wanted_is_read_and_other_files_stay_closed(tmp_path: Path) -> None:
    first, wanted = drawn(2), drawn(1)
    indexed(tmp_path, untied(wanted))
    (tmp_path / "model-1.safetensors").unlink()  # that of norm.weight
    model = drawn(2)
    loaded = load_weights(model, tmp_path, {"head.weight"})
    assert torch.equal(model.body["words"].weight, wanted.head.weight)
    assert torch.equal(model.body["norm"].running_mean, first.body["norm"].running_mean)
    assert loaded.bytes_read < wanted.head.weight.nbytes + 1000
    with pytest.raises(FormatError, match=r"model-1\.safetensors.*cannot"):
        load_weights(model, tmp_path)


def test_types_become_those_of_the_model_and_headers_are_enough_for_a_check(
    tmp_path: Path,
) -> None:
    wanted, model = drawn(1), drawn(2).double()
    narrow = {n: t.bfloat16() if t.is_floating_point() else t for n, t in untied(wanted).items()}
    path = saved(tmp_path / "narrow.safetensors", narrow)
    assert check_weights(model, path).bytes_read < path.stat().st_size - 80
    assert not torch.equal(model.head.weight, wanted.head.weight.bfloat16().double())
    load_weights(model, path)
    assert model.head.weight.dtype is torch.float64
    assert torch.equal(model.head.weight, wanted.head.weight.bfloat16().double())


@pytest.mark.parametrize("prefix", ["module.", "model.", "-body."])
def test_one_prefix_may_be_missing_or_too_much(prefix: str, tmp_path: Path) -> None:
    wanted, model = drawn(1), drawn(2)
    if prefix == "-body.":  # saved from the inner module, without the head that shares its weights
        tensors = dict(wanted.body.state_dict())
    else:
        tensors = {prefix + name: value for name, value in untied(wanted).items()}
    load_weights(model, saved(tmp_path / "model.safetensors", tensors))
    assert same(model, wanted)


def test_a_prefix_that_may_be_either_of_two_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"'w'.*'a\.w'.*'b\.w'"):
        match_names([("w",)], {"a.w", "b.w"}, "file")


def test_a_prefix_by_which_two_tensors_would_be_one_does_not_count() -> None:
    assert match_names([("w",), ("a.w",)], {"w"}, "file") == {"w": "w"}


def test_missing_and_unexpected_names_and_other_shapes_are_said_in_a_line(tmp_path: Path) -> None:
    tensors = untied(drawn(1))
    path = tmp_path / "model.safetensors"
    saved(path, {**tensors, "lost.weight": torch.ones(2)})
    (remark,) = load_weights(drawn(2), path).remarks
    assert remark == f"{path}: 1 tensors are not of the model, and not read: lost.weight"
    saved(path, {n: t for n, t in tensors.items() if n != "body.norm.weight"})
    with pytest.raises(InvalidInputError, match=r"1.*body\.norm\.weight"):
        load_weights(drawn(2), path)
    saved(path, {**tensors, "body.norm.weight": torch.ones(5)})
    with pytest.raises(InvalidInputError, match=r"\(5,\);.*\(4,\)"):
        load_weights(drawn(2), path)
    # Counts and positions a model has itself.
    saved(path, {n: t for n, t in tensors.items() if "num_batches" not in n})
    load_weights(drawn(2), path)


def test_files_that_are_none_or_not_whole_are_refused_with_their_path(tmp_path: Path) -> None:
    path = saved(tmp_path / "model.safetensors", untied(drawn(1)))
    whole = path.read_bytes()
    for text, message in (
        (whole[:-10], "is not whole: it ends within"),
        (whole[:100], "its header is cut off"),
        (b"", "its header is cut off"),
        (b"\x02" + bytes(7) + b"[]", "is no JSON object"),
        (b"\x02" + bytes(7) + b"x ", "is not JSON"),
    ):
        path.write_bytes(text)
        with pytest.raises(FormatError, match=message) as found:
            load_weights(drawn(2), path)
        assert str(path) in str(found.value)
    other = tmp_path / "weights.pt"
    other.write_bytes(b"no zip file")
    with pytest.raises(FormatError, match=r"weights\.pt: holds no tensors by torch\.save"):
        load_weights(drawn(2), other)
    torch.save({"step": 1}, other)
    with pytest.raises(FormatError, match=r"tensors.*name"):
        load_weights(drawn(2), other)
    with pytest.raises(FormatError, match=r"cannot.*file"):
        load_weights(drawn(2), tmp_path / "nowhere.safetensors")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert weights_in(empty) is None
    with pytest.raises(InvalidInputError, match="holds no weights"):
        load_weights(drawn(2), empty)


@pytest.mark.parametrize("form", ["safetensors", "pt"])
@pytest.mark.parametrize("dim", [0, 1])
def test_of_a_slice_only_its_bytes_are_read(dim: int, form: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    whole = torch.randn(64, 48)
    path = tmp_path / f"model.{form}"
    if form == "pt":
        torch.save({"weight": whole}, path)
    else:
        saved(path, {"weight": whole})
    read = []
    for index in range(3):
        model = nn.Linear(48, 64, bias=False)
        before = model.weight.detach().clone()
        part = Slice(dim, index, 3, (32, 32) if dim == 0 else (48,))
        loaded = load_weights(model, path, slices={"weight": part})
        assert torch.equal(part.of(model.weight), part.of(whole))
        others = [Slice(part.dim, n, 3, part.blocks) for n in range(3) if n != index]
        assert all(torch.equal(other.of(model.weight), other.of(before)) for other in others)
        read.append(loaded.bytes_read)
    header = path.stat().st_size - whole.nbytes if form == "safetensors" else 0
    assert sum(read) == whole.nbytes + 3 * header
