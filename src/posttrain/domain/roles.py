"""Roles in a project: each may do what those before it may."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """What a principal may do in a project."""

    VIEWER = "viewer"  # look
    SUBMITTER = "submitter"  # run things, register things
    APPROVER = "approver"  # answer for what is live
    ADMIN = "admin"  # say who may do what, and what every release must pass

    def covers(self, other: Role) -> bool:
        """Whether whoever has this role may do what the other may."""
        return _RANK[self] >= _RANK[other]


_RANK = {role: place for place, role in enumerate(Role)}


def lower(first: Role, second: Role) -> Role:
    """The one that may do less."""
    return second if first.covers(second) else first
