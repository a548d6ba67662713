"""The type of the catalogue that a GPU's name means, as drivers, schedulers and people write it."""

import re

from partita.catalogue.catalogue import Catalogue
from partita.names import product_words

_OTHER_PRODUCT = frozenset({"ti", "super", "laptop", "mobile"})
"""Words that make a product of its own of one that the catalogue may have."""
_SLICE = re.compile(r"\bmig\b|(?<![0-9])[1-7]g[._][0-9]+gb", re.IGNORECASE)
_LEAST, _MOST = 0.85, 1.15
"""Memory that a driver reports, as shares of the round figure of a data sheet."""


def is_slice(title: str) -> bool:
    """Return whether a name is of a part of a GPU (MIG), such as ``a100_1g.5gb``."""
    return _SLICE.search(title) is not None


def gpu_type(title: str, catalogue: Catalogue, *, memory_bytes: float = 0.0) -> str:
    """Return the type of the catalogue that a GPU's own name says; empty if none.

    The name with most words of it counts. A part of a GPU is of no type.

    Args:
        title: Name by a driver (``NVIDIA A100-SXM4-80GB``) or an administrator (``a100``).
        catalogue: The catalogue.
        memory_bytes: Memory that the GPU is said to have, which tells products of one name apart;
            0 = not known.

    >>> from partita.catalogue.catalogue import load_catalogue
    >>> gpu_type("NVIDIA A100-SXM4-80GB", load_catalogue())
    'a100'
    >>> gpu_type("NVIDIA GeForce RTX 3090", load_catalogue())
    'rtx3090'
    >>> gpu_type("a100", load_catalogue(), memory_bytes=40960 * 2**20)
    'a100-sxm-40gb'
    """
    words = re.findall(r"[a-z0-9]+", title.lower())
    if is_slice(title) or _OTHER_PRODUCT & set(words):
        return ""
    joined = product_words(title)

    def fits(name: str) -> bool:
        first, *others = name.split("-")
        return first in joined and all(any(w.startswith(o) for w in words) for o in others)

    found = [name for name in catalogue.devices if fits(name)]
    best = max(found, key=lambda name: (name.count("-"), -len(name)), default="")
    if not best or not memory_bytes or _has(catalogue, best, memory_bytes):
        return best
    link, stem = catalogue.devices[best].link, f"{best.split('-')[0]}-"
    others = [
        name
        for name, kind in catalogue.devices.items()
        if name.startswith(stem) and kind.link == link and _has(catalogue, name, memory_bytes)
    ]
    return others[0] if others else best


def _has(catalogue: Catalogue, name: str, memory_bytes: float) -> bool:
    return _LEAST <= memory_bytes / catalogue.devices[name].memory_bytes <= _MOST
