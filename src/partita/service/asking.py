"""Who asks a route, and for which tenant."""

from typing import Annotated

from fastapi import Depends, Request

from partita.service.errors import Refusal
from partita.service.users import User


def _asking(request: Request) -> User:
    """Return who asks, as the check of tokens has found out."""
    user: User = request.scope["user"]
    return user


Asking = Annotated[User, Depends(_asking)]


def tenant_for(user: User, tenant: str) -> str:
    """Return the tenant of what a user submits: the first of the user's own where none is named.

    Raises:
        Refusal: 403: the user is not bound to that one.
    """
    if not tenant and user.tenants:
        return user.tenants[0]
    if not user.knows(tenant):
        bound = ", ".join(user.tenants)
        raise Refusal(403, f"user {user.name} submits for {bound}, not for {tenant!r}")
    return tenant
