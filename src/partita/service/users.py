"""Who may do what: users by their tokens, with a role, and tenants whose jobs they deal with.

A file of users is YAML that nobody else may read:

    ana:     {role: submit, tenants: [vision], token: 5f0c...}
    ops:     {role: operate, token: 91ab...}
    grafana: {role: read, token: c77e...}

A role may do what those before it may: *read* looks, *submit* submits and cancels jobs and takes
part in energy jobs, *operate* does everything. Whoever is bound to tenants knows the jobs of these
alone.
"""

import hashlib
import hmac
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from partita.errors import FormatError, InvalidInputError
from partita.names import check_plain, suggest
from partita.yaml_nodes import (
    Table,
    at_line,
    parse_yaml,
    read_items,
    read_table,
    read_text,
)

SHORTEST = 16
"""Characters of a token in a file of users, at least: shorter ones can be guessed."""


class Role(StrEnum):
    """What a user may do; each role includes those before it."""

    READ = "read"
    SUBMIT = "submit"
    OPERATE = "operate"

    def includes(self, other: "Role") -> bool:
        """Return whether this role may do what another may."""
        order = list(Role)
        return order.index(self) >= order.index(other)


SUBMITTING: Mapping[str, Sequence[str]] = {
    "POST": (
        "/fleet/jobs",
        "/register_job",
        "/register_rank",
        "/register_rank/{job_id}",
        "/result/{job_id}",
        "/straggler/{job_id}",
    ),
    "DELETE": ("/fleet/jobs/{job}", "/straggler/{job_id}"),
}
"""Routes that change something and need no more than the role ``submit``, by method."""
_LOOKING = ("GET", "HEAD", "OPTIONS")
_PATTERNS = {
    method: re.compile("|".join(re.sub(r"\{\w+\}", "[^/]+", path) for path in paths))
    for method, paths in SUBMITTING.items()
}


def needed_role(method: str, path: str) -> Role:
    """Return the role that a request needs: what changes something, ``operate`` unless listed."""
    if method in _LOOKING:
        return Role.READ
    pattern = _PATTERNS.get(method)
    return Role.SUBMIT if pattern is not None and pattern.fullmatch(path) else Role.OPERATE


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """Somebody who asks.

    Attributes:
        name: As logs and jobs call the user; empty = the server's own token, or none is asked for.
        role: What the user may do.
        tenants: Tenants whose jobs the user knows; empty = all.
    """

    name: str = ""
    role: Role = Role.OPERATE
    tenants: tuple[str, ...] = ()

    def knows(self, tenant: str) -> bool:
        """Return whether the jobs of a tenant are this user's business."""
        return not self.tenants or tenant in self.tenants


ANYBODY = User()
"""Who asks a server that wants no token."""


class Users:
    """Users by the digests of their tokens; tokens themselves are not kept."""

    def __init__(self, token: str = "", users: Mapping[str, User] | None = None) -> None:
        """Take the server's own token and those of users.

        Args:
            token: Token of the operator; empty = there is none.
            users: Further users, by token.
        """
        own = {token: User()} if token else {}
        self._digests = [(_digest(text.encode()), user) for text, user in own.items()]
        self._digests += [(_digest(text.encode()), user) for text, user in (users or {}).items()]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def find(self, token: bytes) -> User | None:
        """Return whose token it is; None = nobody's. Takes the same time for all of one length."""
        shown, found = _digest(token), None
        for digest, user in self._digests:
            if hmac.compare_digest(digest, shown):
                found = user
        return found


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def read_users(text: str) -> Mapping[str, User]:
    """Return the users of a file, by their tokens.

    Raises:
        FormatError: It is no such file; knows the line.
    """
    table = read_table(parse_yaml(text), "the users")
    found: dict[str, User] = {}
    for name, node in table.entries.items():
        entry = read_table(node, f"user {name}", ("role", "tenants", "token"))
        with at_line(node.line):
            token, user = _user(name, entry)
            if token in found:
                raise InvalidInputError(f"users {found[token].name} and {name} have one token")
        found[token] = user
    return found


def _user(name: str, entry: Table) -> tuple[str, User]:
    check_plain(name, "user")
    for key in ("role", "token"):
        if key not in entry.entries:
            raise InvalidInputError(f"user {name}: the key {key} is missing")
    token = read_text(entry.entries["token"], "token")
    if len(token) < SHORTEST or not token.isascii():
        raise InvalidInputError(
            f"user {name}: a token has {SHORTEST} ASCII characters or more; 'openssl rand -hex 32' "
            "makes one"
        )
    role = read_text(entry.entries["role"], "role")
    if role not in list(Role):
        raise InvalidInputError(
            f"user {name}: there is no role {role!r}{suggest(role, [str(known) for known in Role])}"
        )
    tenants: tuple[str, ...] = ()
    if "tenants" in entry.entries:
        nodes = read_items(entry.entries["tenants"], "tenants")
        tenants = tuple(read_text(node, "a tenant") for node in nodes)
        if not tenants or "" in tenants:
            raise InvalidInputError(f"user {name}: tenants are names, one or more")
        for tenant in tenants:
            check_plain(tenant, "tenant")
    return token, User(name=name, role=Role(role), tenants=tenants)


def load_users(file: str | None) -> Mapping[str, User]:
    """Return the users of a file that only its owner may read; without a file there are none.

    Raises:
        InvalidInputError: The file cannot be read, is wrong, or others may read it.
    """
    if file is None:
        return {}
    path = Path(file)
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidInputError(f"--users {file} cannot be read: {exc}") from exc
    if mode & 0o077:
        raise InvalidInputError(
            f"--users {file} has mode {mode:04o}, so others may read its tokens; chmod 600"
        )
    try:
        return read_users(text)
    except FormatError as exc:
        raise (exc if exc.path else exc.at(file)) from exc
