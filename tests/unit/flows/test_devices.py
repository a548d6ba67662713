"""What the catalogue has, as a list."""

import pytest

import partita
from partita.errors import FormatError, InvalidInputError


def test_all_types_and_machines_are_listed():
    found = partita.list_devices()
    values = found.to_json()
    assert {"a100", "h200", "b200", "mi300x", "rtx4090"} <= {
        row["name"] for row in values["devices"]
    }
    assert {"dgx-h100", "gb200-nvl72", "p5"} <= {row["name"] for row in values["hosts"]}
    assert len(found.rows()) == len(values["devices"]) + len(values["hosts"])
    assert all(row["sources"] for rows in values.values() for row in rows)


def test_a_name_gives_all_details_and_a_part_of_one_a_list():
    one = partita.list_devices("H100")
    assert one.is_detailed
    assert "float8 1979 T" in repr(one)
    assert "source of price_per_hour: assumption" in repr(one)
    machine = partita.list_devices("gb200-nvl72")
    assert "18 x 4xgb200, 4 x infiniband-ndr" in repr(machine)
    assert partita.list_devices("h100").to_json()["devices"][0]["network"]["name"] == (
        "infiniband-ndr"
    )
    several = partita.list_devices("dgx")
    assert not several.is_detailed
    assert not several.devices
    assert all("dgx" in host.name for host in several.hosts)


def test_a_name_that_is_not_there_is_refused_with_a_near_one():
    with pytest.raises(InvalidInputError, match="'h900'"):
        partita.list_devices("h900")


def test_own_types_are_listed_too(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "devices:\n  x1: {kind: gpu, memory_bytes: 8GB, link: pcie4, "
        "sources: {memory_bytes: label, link: label}}\n"
        "hosts:\n  box: {device: x1, num_devices: 2, network: ethernet-100g, num_ports: 1, "
        "sources: {machine: label}}\n"
    )
    found = partita.list_devices("box", catalogue=str(path))
    assert found.hosts[0].device == "x1"
    path.write_text("hosts:\n  box: {device: x9, num_devices: 2, network: pcie4, num_ports: 1}\n")
    with pytest.raises(FormatError, match=r"mine\.yaml:"):
        partita.list_devices(catalogue=str(path))
