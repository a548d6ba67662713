"""A cluster from what a user types: a shorthand, or the name of a file."""

from collections.abc import Callable
from pathlib import PurePath

from partita.catalogue.catalogue import Catalogue
from partita.catalogue.overrides import apply_overrides
from partita.catalogue.shorthand import read_shorthand
from partita.core.cluster import Cluster
from partita.core.codec import decode_as, parse_json
from partita.errors import FormatError, InvalidInputError, PartitaError, reason_of
from partita.names import short

_SUFFIXES = frozenset({".yaml", ".yml", ".json"})


def parse_cluster(
    spec: str,
    open_text: Callable[[str], str],
    catalogue: Catalogue,
    *,
    bandwidth: str | None = None,
    latency: str | None = None,
) -> Cluster:
    """Return the cluster that a user names.

    A name with a slash or with the suffix ``.yaml``, ``.yml`` or ``.json`` is a file. Any other is
    a shorthand, or a file if it is none.

    Args:
        spec: Text that the user typed, such as ``2x4xa100`` or ``lab.yaml``.
        open_text: Returns the text of a file.
        catalogue: Has the device types and links.
        bandwidth: Other bandwidths, such as ``host=1e10,rack=1e9``.
        latency: Other latencies, such as ``host=5us``.

    Raises:
        FormatError: The file cannot be read; knows path and line.
        InvalidInputError: The shorthand or an override is wrong.
    """
    if "/" in spec or "\\" in spec or PurePath(spec).suffix.lower() in _SUFFIXES:
        cluster = _read_file(spec, open_text, catalogue)
    else:
        try:
            cluster = read_shorthand(spec, catalogue)
        except InvalidInputError as not_shorthand:
            try:
                text = _opened(spec, open_text)
            except PartitaError:
                problem = f"{not_shorthand}; nor can it be read as a file"
                raise InvalidInputError(problem) from not_shorthand
            cluster = _read_text(spec, text, catalogue)
    return apply_overrides(cluster, bandwidth=bandwidth, latency=latency)


def read_cluster(text: str, catalogue: Catalogue) -> Cluster:
    """Return the cluster of a text: a ``partita.cluster`` document in JSON, or YAML.

    Raises:
        FormatError: The text is neither, or wrong.
    """
    if text.removeprefix("\ufeff").lstrip().startswith("{") and '"format"' in text:
        return decode_as(parse_json(text), Cluster)
    from partita.catalogue.cluster_yaml.reader import (  # noqa: PLC0415 (a shorthand needs none)
        read_cluster_yaml,
    )

    return read_cluster_yaml(text, catalogue)


def _read_file(path: str, open_text: Callable[[str], str], catalogue: Catalogue) -> Cluster:
    return _read_text(path, _opened(path, open_text), catalogue)


def _read_text(path: str, text: str, catalogue: Catalogue) -> Cluster:
    try:
        return read_cluster(text, catalogue)
    except FormatError as exc:
        raise exc.at(path) from exc


def _opened(path: str, open_text: Callable[[str], str]) -> str:
    try:
        return open_text(path)
    except PartitaError:
        raise
    except OSError as exc:
        reason = reason_of(exc)
        raise FormatError(f"cannot read the cluster: {reason.lower()}", path=path) from exc
    except ValueError as exc:
        raise FormatError(f"cannot read the cluster: {short(str(exc))}", path=path) from exc
