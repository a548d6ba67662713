"""Machines and shapes that the tests of this room share."""

from collections.abc import Callable

import pytest

from partita.catalogue.catalogue import load_catalogue
from partita.catalogue.shorthand import read_shorthand
from partita.core.precision import parse_precision
from partita.cost.links import fabric_of
from partita.transformer.kernels import Case, Machine, load_constants, machine_of, software_of
from partita.transformer.layout import Layout, columns_of
from partita.transformer.price import job_of
from partita.transformer.shape import Shape, sizes_of


@pytest.fixture(scope="session")
def h100() -> Machine:
    cluster = read_shorthand("2xdgx-h100", load_catalogue())
    return machine_of(cluster.devices[0], fabric_of(cluster))


@pytest.fixture(scope="session")
def llama3_8b() -> Shape:
    return Shape(hidden=4096, layers=32, heads=32, kv_heads=8, ffn=14336, vocab=128256)


@pytest.fixture(scope="session")
def make_case(h100: Machine) -> Callable[..., Case]:
    def make(shape: Shape, *layouts: Layout, batch: int = 128, sequence_length: int = 8192) -> Case:
        job = job_of(
            parse_precision(layouts[0].precision), batch=batch, sequence_length=sequence_length
        )
        software = software_of(layouts[0], h100)
        return Case(sizes_of(shape), columns_of(layouts), job, h100, software, load_constants())

    return make
