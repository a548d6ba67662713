"""The picture of a sensitivity."""

from xml.etree import ElementTree

import numpy as np

from partita.core.fleet import Sensitivity
from partita.report.sensitivity_svg import sensitivity_svg

NAMESPACE = "{http://www.w3.org/2000/svg}"


def picture(**changes):
    settings = {
        "name": "a<b",
        "machine": "here & now",
        "iteration_s": 0.5,
        "batch_size": 8,
        "cpus": np.array([1.0, 1.0, 2.0, 2.0, 4.0, 4.0]),
        "memory_bytes": np.array([1e9, 5e9] * 3),
        "speed": np.array([0.2, 0.3, 0.4, 0.6, 0.5, 1.0]),
        "measured": np.array([False, False, False, True, False, True]),
        **changes,
    }
    return ElementTree.fromstring(sensitivity_svg(Sensitivity(**settings)))


def test_measured_points_are_full_and_filled_in_ones_hollow():
    root = picture()
    dots = root.findall(f"{NAMESPACE}circle")
    assert sum(dot.get("fill") == "none" for dot in dots) == 1
    assert len(dots) == 3 + 2  # the curve of most memory, and the legend
    paths = root.findall(f"{NAMESPACE}path")
    assert [path.get("stroke-dasharray") is not None for path in paths] == [False, True]


def test_all_points_lie_within_the_picture():
    root = picture()
    for dot in root.findall(f"{NAMESPACE}circle"):
        assert 0 <= float(dot.get("cx")) <= 900
        assert 0 <= float(dot.get("cy")) <= 440


def test_text_is_escaped_and_says_the_unit():
    texts = [element.text for element in picture().iter(f"{NAMESPACE}text")]
    assert "a<b: speed over CPUs" in texts
    assert "samples/s" in texts
    assert "5.00 GB a GPU" in texts
    assert "1.00 GB a GPU (modelled)" in texts
    unknown = [element.text for element in picture(batch_size=0).iter(f"{NAMESPACE}text")]
    assert "iterations/s" in unknown


def test_one_amount_of_memory_is_one_curve():
    root = picture(memory_bytes=np.array([5e9] * 6), cpus=np.arange(1.0, 7.0))
    assert len(root.findall(f"{NAMESPACE}path")) == 1
