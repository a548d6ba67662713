import pytest

from partita.catalogue.catalogue import load_catalogue
from partita.errors import FormatError
from partita.flows.offers import Offer, catalogue_offers, mixtures, read_offers

CATALOGUE = load_catalogue()


def test_a_file_gives_prices_of_machines_and_of_devices() -> None:
    found = read_offers(
        "mix: true\n"
        "machines:\n"
        "  - {machine: dgx-h100, price_per_hour: $24, count: 3}\n"
        "  - {name: old, device: A100, devices_per_host: 4, price_per_device_hour: 1.5}\n"
        "  - machine: p5\n",
        CATALOGUE,
    )
    assert found.mix
    assert found.offers[0] == Offer(
        name="dgx-h100", machine="dgx-h100", devices=8, price_per_hour=24.0, count=3
    )
    assert found.offers[1] == Offer(name="old", machine="4xa100", devices=4, price_per_hour=6.0)
    assert found.offers[2].price_per_hour == CATALOGUE.hosts["p5"].price_per_hour
    assert found.offers[1].cluster(2) == "2x4xa100"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- {machine: dgx-h100, device: h100}", "line 1: machine: expected either"),
        ("- {price_per_hour: 3}", "expected either 'machine' or 'device'"),
        ("- {machine: dgx-h1000}", "line 1: machine 'dgx-h1000' is not in the catalogue"),
        ("- {machine: dgx-h100, devices_per_host: 4}", "goes with 'device'"),
        ("- {machine: dgx-h100, price_per_hour: 1, price_per_device_hour: 2}", "one price"),
        ("- {machine: dgx-h100, price_per_hour: cheap}", "line 1: price_per_hour 'cheap'"),
        ("- {machine: dgx-h100, cout: 3}", "unknown key 'cout'"),
        ("- {device: cpu}", "is no accelerator"),
        ("- {machine: dgx-h100}\n- {machine: dgx-h100}", "stands twice"),
        ("mix: true", "key 'machines' is missing"),
        ("[]", "there are no machines"),
    ],
)
def test_wrong_files_are_refused_with_their_line(text: str, words: str) -> None:
    with pytest.raises(FormatError, match=words):
        read_offers(text, CATALOGUE)


def test_all_machines_with_a_price_are_on_offer_but_for_those_that_others_beat() -> None:
    found = catalogue_offers(CATALOGUE)
    names = {offer.name for offer in found.offers}
    assert "lambda-h100" in names
    assert "nd-h100-v5" in found.left_out
    assert not names & set(found.left_out)
    rack = next(offer for offer in found.offers if offer.name == "gb200-nvl72")
    assert rack.devices == 72
    assert rack.price_per_hour == 72 * CATALOGUE.devices["gb200"].price_per_hour


def test_few_machines_are_tried_in_every_number() -> None:
    few = Offer(name="few", machine="8xh100", devices=8, price_per_hour=1.0, count=7)
    assert few.counts(1024) == [1, 2, 3, 4, 5, 6, 7]
    assert few.counts(24) == [1, 2, 3]
    assert few.counts(4) == []


def test_mixtures_are_pairs_within_the_number_of_devices() -> None:
    one = Offer(name="one", machine="8xh100", devices=8, price_per_hour=1.0, count=3)
    two = Offer(name="two", machine="4xa100", devices=4, price_per_hour=1.0, count=2)
    found = [(left, right) for (_, left), (_, right) in mixtures((one, two), 20)]
    assert found == [(1, 1), (1, 2), (2, 1)]
