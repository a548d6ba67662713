"""The HTTP app: one router a part, with authentication, limits and error bodies in common."""
