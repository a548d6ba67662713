"""FLOPs and bytes moved by one kernel of a device, from the call of an ATen function.

A kernel is priced by what it computes and what it reads and writes: every input and output once,
an expanded tensor only as far as it is stored. Views move nothing and are no kernels. Products of
matrices keep their sizes, because a device computes them tile by tile.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


class KernelClass(StrEnum):
    """Class of a kernel, as far as the share of the peak that it reaches depends on it."""

    MATMUL = "matmul"
    WEIGHT_GRADIENT = "weight_gradient"
    BATCHED_MATMUL = "batched_matmul"
    CONVOLUTION = "convolution"
    CONVOLUTION_WEIGHT_GRADIENT = "convolution_weight_gradient"
    ELEMENTWISE = "elementwise"
    REDUCTION = "reduction"
    HOST = "host"


class Tiles:
    """Sizes of a product of matrices: number of products, rows, columns, inner length."""

    __slots__ = ("columns", "inner", "number", "rows")

    def __init__(self, number: int, rows: int, columns: int, inner: int) -> None:
        self.number, self.rows, self.columns, self.inner = number, rows, columns, inner


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One launch on a device, or several that are alike.

    Attributes:
        kind: Its class.
        flops: Floating-point operations.
        work: The part of ``flops`` that is computed: half of them in causal attention.
        read_write_bytes: Bytes moved; of floating-point tensors in ``floating_bytes``.
        floating_bytes: The part of these that are floating-point numbers.
        launches: Number of launches.
        tiles: Sizes, if it is a product of matrices.
        image: Pixels of an image, if it is a convolution.
    """

    kind: KernelClass
    flops: float = 0.0
    work: float = 1.0
    read_write_bytes: float = 0.0
    floating_bytes: float = 0.0
    launches: int = 1
    tiles: Tiles | None = None
    image: int = 0


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_VIEWS = _words(
    "alias as_strided broadcast_to detach diagonal expand expand_as permute select slice split "
    "split_with_sizes squeeze t transpose unbind unfold unsqueeze view view_as_real _unsafe_view "
    "_reshape_alias view_as_complex lift_fresh unsqueeze_ squeeze_ transpose_ t_ detach_ "
    "new_empty empty empty_like empty_strided new_empty_strided is_same_size sym_size "
    "_reshape_copy chunk numpy_T swapaxes _conj real imag"
)
_MATMULS = _words("mm addmm bmm baddbmm addbmm addmv mv dot")
_REDUCTIONS = _words(
    "sum mean amax amin max min var std var_mean norm linalg_vector_norm logsumexp cumsum argmax "
    "prod any all _softmax _log_softmax _softmax_backward_data _log_softmax_backward_data "
    "native_layer_norm native_layer_norm_backward native_batch_norm native_batch_norm_backward "
    "_native_batch_norm_legit _native_batch_norm_legit_functional cudnn_batch_norm "
    "batch_norm_backward "
    "native_group_norm native_group_norm_backward _fused_rms_norm _fused_rms_norm_backward "
    "nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward "
    "_adaptive_avg_pool2d avg_pool2d topk sort mse_loss"
)
_EXTRA_READS: Mapping[str, float] = {
    "native_batch_norm": 1.0,
    "_native_batch_norm_legit": 1.0,
    "cudnn_batch_norm": 1.0,
    "native_group_norm": 1.0,
    "native_layer_norm": 1.0,
}
"""Passes over the first input beyond one: statistics first, then the result."""


_WIDE_ROW = 1024
"""Rows of a softmax up to this length stay in registers; longer ones are read again."""


def bytes_of(tensors: Sequence[Tensor]) -> tuple[float, float]:
    """Return the stored bytes of tensors, and those of floating-point ones."""
    total = floating = 0.0
    for tensor in tensors:
        count = 1
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            count *= size if stride else 1
        held = float(count * tensor.element_size())
        total += held
        floating += held if tensor.is_floating_point() else 0.0
    return total, floating


def kernels_of(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: object
) -> list[Kernel]:
    """Return the kernels of a call of an ATen function.

    Args:
        name: Its name without name space and overload, such as ``"addmm"``.
        args: Its positional arguments.
        kwargs: Its arguments by name.
        out: Its result.
    """
    if name in _VIEWS:
        return []
    if name in _MATMULS:
        return _matmul(name, args, out)
    special = _SPECIAL.get(name)
    if special is not None:
        return special(args, out)
    read = _tensors((args, kwargs))
    made = _tensors(out)
    if not made:
        return []
    extra = _EXTRA_READS.get(name, 0.0)
    moved, floating = bytes_of([*read, *made])
    if extra:
        again, again_floating = bytes_of(read[:1])
        moved, floating = moved + extra * again, floating + extra * again_floating
    kind = KernelClass.REDUCTION if name in _REDUCTIONS else KernelClass.ELEMENTWISE
    return [Kernel(kind=kind, read_write_bytes=moved, floating_bytes=floating)]


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _matmul(name: str, args: Sequence[Any], out: object) -> list[Kernel]:
    added = [args[0]] if name in ("addmm", "baddbmm", "addbmm", "addmv") else []
    left, right = args[len(added)], args[len(added) + 1]
    number = left.shape[0] if left.dim() == 3 else 1
    rows = left.shape[-2] if left.dim() > 1 else 1
    inner = left.shape[-1]
    columns = right.shape[-1] if right.dim() > 1 else 1
    moved, floating = bytes_of([left, right, *_tensors(out)])
    batched = name in ("bmm", "baddbmm", "addbmm")
    return [
        Kernel(
            kind=KernelClass.BATCHED_MATMUL if batched else KernelClass.MATMUL,
            flops=2.0 * number * rows * columns * inner,
            read_write_bytes=moved,
            floating_bytes=floating,
            tiles=Tiles(number, rows, columns, inner),
        )
    ]


def _convolution(args: Sequence[Any], out: object) -> list[Kernel]:
    made = _tensors(out)[0]
    kernel = _one_convolution(args[0], args[1], made, args[6], KernelClass.CONVOLUTION)
    return [kernel, *_reordered([args[0], args[1], made])]


def _convolution_backward(args: Sequence[Any], out: object) -> list[Kernel]:
    made, source, weight = args[0], args[1], args[2]
    transposed, mask = args[7], args[10]
    kinds = (KernelClass.CONVOLUTION, KernelClass.CONVOLUTION_WEIGHT_GRADIENT)
    found = []
    for kind, wanted in zip(kinds, mask, strict=False):
        if wanted:
            found.append(_one_convolution(source, weight, made, transposed, kind))
            found += _reordered([source, weight, made])
    if mask[2]:
        moved, floating = bytes_of([made])
        found.append(
            Kernel(kind=KernelClass.REDUCTION, read_write_bytes=moved, floating_bytes=floating)
        )
    return found


def _reordered(tensors: Sequence[Tensor]) -> list[Kernel]:
    """Return the copies that bring images into the order of tensor cores, channels last."""
    return [
        _moved(2 * bytes_of([tensor])[0], 2 * bytes_of([tensor])[1])
        for tensor in tensors
        if tensor.dim() == 4
        and max(tensor.shape[2:]) > 1
        and not tensor.is_contiguous(memory_format=torch.channels_last)
    ]


def _one_convolution(
    source: Tensor, weight: Tensor, made: Tensor, transposed: bool, kind: KernelClass
) -> Kernel:
    pixels = source if transposed else made
    image = math.prod(pixels.shape[2:])
    moved, floating = bytes_of([source, weight, made])
    return Kernel(
        kind=kind,
        flops=2.0 * pixels.shape[0] * image * weight.numel(),
        read_write_bytes=moved,
        floating_bytes=floating,
        image=image,
    )


def _embedding(args: Sequence[Any], out: object) -> list[Kernel]:
    made, floating = bytes_of(_tensors(out))
    numbers, _ = bytes_of([args[1]])
    return [_moved(2 * made + numbers, 2 * floating)]


def _embedding_backward(args: Sequence[Any], out: object) -> list[Kernel]:
    """Sort the numbers, clear the gradient of the table, add each row to it."""
    rows, floating = bytes_of([args[0]])
    table, table_floating = bytes_of(_tensors(out))
    numbers, _ = bytes_of([args[1]])
    return [
        _moved(8 * numbers, 0.0),
        _moved(table, table_floating),
        _moved(3 * rows, 3 * floating),
    ]


def _moved(moved: float, floating: float) -> Kernel:
    return Kernel(kind=KernelClass.ELEMENTWISE, read_write_bytes=moved, floating_bytes=floating)


def _batch_norm_backward(args: Sequence[Any], out: object) -> list[Kernel]:
    """Sum gradients and their products with the input, then read both again."""
    gradient, source = _tensors(args)[:2]
    moved, floating = bytes_of([gradient, source])
    made, made_floating = bytes_of(_tensors(out))
    return [
        Kernel(kind=KernelClass.REDUCTION, read_write_bytes=moved, floating_bytes=floating),
        Kernel(
            kind=KernelClass.REDUCTION,
            read_write_bytes=moved + made,
            floating_bytes=floating + made_floating,
        ),
    ]


def _filled(args: Sequence[Any], out: object) -> list[Kernel]:
    return [_moved(*bytes_of(_tensors(out)))]


def _softmax(args: Sequence[Any], out: object) -> list[Kernel]:
    """Find the largest, sum, and write: a row that is too long is read each time."""
    return [_over_rows(_tensors(out)[0], 2 if _row(args[0], args[1]) <= _WIDE_ROW else 4)]


def _softmax_backward(args: Sequence[Any], out: object) -> list[Kernel]:
    return [_over_rows(_tensors(out)[0], 3 if _row(args[0], args[2]) <= _WIDE_ROW else 4)]


def _row(tensor: Tensor, dimension: int) -> int:
    return tensor.shape[dimension] if tensor.dim() else 1


def _over_rows(tensor: Tensor, passes: int) -> Kernel:
    moved, floating = bytes_of([tensor])
    return Kernel(
        kind=KernelClass.REDUCTION,
        read_write_bytes=passes * moved,
        floating_bytes=passes * floating,
    )


def _loss(args: Sequence[Any], out: object) -> list[Kernel]:
    """Read one number of each row."""
    return [_moved(*bytes_of([args[1]]))]


_SPECIAL: Mapping[str, Callable[[Sequence[Any], object], list[Kernel]]] = {
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    "native_batch_norm_backward": _batch_norm_backward,
    "batch_norm_backward": _batch_norm_backward,
    "_softmax": _softmax,
    "_log_softmax": _softmax,
    "_softmax_backward_data": _softmax_backward,
    "_log_softmax_backward_data": _softmax_backward,
    "nll_loss_forward": _loss,
    "nll_loss_backward": _filled,
    **dict.fromkeys(("zeros", "ones", "full", "zeros_like", "ones_like", "full_like"), _filled),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full", "fill_", "zero_", "arange"), _filled),
}


def attention_kernels(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], *, causal: bool, item: int
) -> tuple[list[Kernel], list[Kernel]]:
    """Return the kernels of fused attention, forward and backward (Dao et al. 2022, section 3).

    Forward is two products; backward is five, because the scores are computed again. FLOPs count
    the whole of the scores and four products in backward, as is usual, also where a causal mask or
    recomputation changes what is computed.
    """
    heads = math.prod(query[:-2])
    rows, width = query[-2], query[-1]
    columns, out_width = key[-2], value[-1]
    flops = 2.0 * heads * rows * columns * (width + out_width)
    ends = heads * item * (rows * (width + out_width) + columns * (width + out_width))
    share = 0.5 if causal else 1.0

    def kernel(times: float, work: float, moved: float) -> Kernel:
        return Kernel(
            kind=KernelClass.BATCHED_MATMUL,
            flops=times * flops,
            work=work * share,
            read_write_bytes=moved,
            floating_bytes=moved,
        )

    return [kernel(1.0, 1.0, ends)], [kernel(2.0, 1.25, 2.0 * ends)]


def aten_name(func: object) -> str:
    """Return the name of an ATen function without name space and overload."""
    packet = getattr(func, "overloadpacket", None)
    return str(func) if packet is None else str(packet.__name__)
