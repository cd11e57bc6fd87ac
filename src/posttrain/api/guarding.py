"""The one place where it is checked whether somebody may do what they ask: in front of `Control`, verb by verb."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from posttrain.api.access import Whoami
from posttrain.domain.errors import AccessError
from posttrain.domain.ids import TYPES, Id
from posttrain.domain.principals import Role

if TYPE_CHECKING:
    from posttrain.api.control import Control

_LOOK = (
    *("plan", "lock", "ids", "run", "manifest", "ls", "status", "scores", "outcome", "driver", "why", "diff"),
    *(
        "compare",
        "comparison",
        "queue",
        "watcher",
        "vigil",
        "logs",
        "report",
        "write_report",
        "write_trace",
        "samples",
        "sample",
        "trackers",
    ),
    *("channels", "live", "channel_record", "channel", "channel_trackers", "policy", "policies", "channel_events"),
    *("approval_requests", "lineage", "downstream", "verify", "dead", "assets", "asset", "asset_status", "recalled"),
    *("curves", "plan_sweep", "rank", "whoami", "sinks", "images", "history"),
)
_RUN = (
    *("submit", "evaluate", "drive", "detach", "signal", "stop", "retry", "track", "follow", "track_channel"),
    *("look_again", "add_dataset", "add_external", "add_model", "add_reward", "create_model"),
    *("import_trl_output", "import_mlflow", "import_wandb_export", "ask", "export", "submit_point"),
)
_ANSWER_FOR = ("approve", "reject", "promote", "rollback", "freeze", "unfreeze", "mark")
_RULE = (
    *("set_policy", "remove_policy", "protect", "erase", "gc", "assume_dead"),
    *(
        "add_project",
        "allow_image",
        "remove_image",
        "members",
        "set_member",
        "tokens",
        "issue_token",
        "rotate_token",
        "revoke_token",
    ),
    *("add_sink", "test_sink", "pause_sink", "resume_sink", "remove_sink"),
)
NEEDS: Mapping[str, Role | None] = {  # verb → the least role that it needs; a verb that is not here is refused
    "close": None,
    **dict.fromkeys(_LOOK, Role.VIEWER),
    **dict.fromkeys(_RUN, Role.SUBMITTER),
    **dict.fromkeys(_ANSWER_FOR, Role.APPROVER),
    **dict.fromkeys(_RULE, Role.ADMIN),
}


_TYPED: Mapping[str, str] = {  # verb → the command that people type for it, where that is another word
    **{"ids": "ls", "run": "get", "status": "get", "submit": "run", "evaluate": "eval", "drive": "attach"},
    **{"detach": "run --detach", "ask": "sample", "submit_point": "sweep", "plan_sweep": "sweep", "rank": "sweep"},
    **{"add_dataset": "asset add", "add_external": "asset add", "add_model": "asset add", "add_reward": "asset add"},
    **{"create_model": "init", "mark": "asset recall", "assets": "asset ls", "asset": "asset get"},
    **{"import_trl_output": "import trl-output", "import_mlflow": "import mlflow"},
    **{"import_wandb_export": "import wandb-export", "look_again": "dead --retry", "assume_dead": "dead --assume-dead"},
    **{"set_policy": "channel set-policy", "remove_policy": "channel remove-policy", "policy": "channel policy"},
    **{"protect": "channel protect", "freeze": "channel freeze", "unfreeze": "channel unfreeze"},
    **{"add_project": "project add", "members": "member ls", "set_member": "member set", "tokens": "token ls"},
    **{"images": "project images", "allow_image": "project allow-image", "remove_image": "project remove-image"},
    **{"issue_token": "token issue", "rotate_token": "token rotate", "revoke_token": "token revoke"},
    **{"add_sink": "sink add", "test_sink": "sink test", "pause_sink": "sink pause", "resume_sink": "sink resume"},
    **{"remove_sink": "sink remove", "sinks": "sink ls", "write_report": "get --report", "write_trace": "trace"},
    **{
        "track_channel": "track",
        "channel": "get",
        "history": "get",
        "channels": "ls",
        "live": "ls",
        "manifest": "lock",
    },
}


def typed(verb: str) -> str:
    """The command that people type for a verb."""
    return f"posttrain {_TYPED.get(verb, verb.replace('_', ' '))}"


class Guarded:
    """A `Control` that asks for every verb whether whoever is behind it may.

    Args:
        who: as errors name them.
        role: their role at this moment; None: they have none.
    """

    def __init__(self, control: Control, who: str, project: str, role: Callable[[], Role | None]) -> None:
        self._control, self._who, self._project, self._role = control, who, project, role

    def __getattr__(self, verb: str) -> Any:
        if verb not in NEEDS:
            raise AttributeError(f"Control has no {verb}")
        does, needed = getattr(self._control, verb), NEEDS[verb]
        if needed is None:
            return does

        def asked(*words: Any, **options: Any) -> Any:
            self._refuse(verb, needed)
            check_ids(verb, words, options)
            found = does(*words, **options)
            if isinstance(found, Whoami):  # the role that holds here, a token's limit included
                role = self._role()
                return replace(found, role=role and str(role))
            return found

        return asked

    def refuse(self, verb: str) -> None:
        """Raise AccessError where whoever is behind it may not ask this verb."""
        needed = NEEDS[verb]
        if needed is not None:
            self._refuse(verb, needed)

    def _refuse(self, verb: str, needed: Role) -> None:
        role = self._role()
        if role is None or not role.covers(needed):
            has = f"is {role}" if role else "has no role"
            raise AccessError(
                f"project {self._project}: {typed(verb)} needs the role {needed}, and {self._who} {has} "
                "there; ask an admin of it"
            )


@functools.cache
def _ids_of(verb: str) -> tuple[tuple[str, ...], bool, Mapping[str, Id]]:
    """The parameters of a verb; whether the first takes every word; what those must be that hold ids or names."""
    from posttrain.api.control import Control

    _, *called = inspect.signature(getattr(Control, verb)).parameters.values()
    written = {one.name: re.findall(r"\w+", str(one.annotation)) for one in called}
    ids = {name: TYPES[word] for name, words in written.items() for word in words if word in TYPES}
    return tuple(written), bool(called) and called[0].kind is inspect.Parameter.VAR_POSITIONAL, ids


def check_ids(verb: str, words: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Check the ids and names that a verb is called with.

    Raises:
        InputError: one is no such id or name.
    """
    names, many, ids = _ids_of(verb)
    given = {**dict(zip(names, [words] if many else words, strict=False)), **options}
    for name, kind in ids.items():
        kind.check(given.get(name), f"{typed(verb)}: {name}")


def guarded(control: Control, who: str, project: str, role: Callable[[], Role | None]) -> Control:
    """See `Guarded`: each verb that whoever is behind it may not do raises AccessError."""
    return cast("Control", Guarded(control, who, project, role))


def refuse(control: Control, verb: str) -> None:
    """Raise AccessError where whoever is behind a guarded control may not ask a verb; ask nothing."""
    cast("Guarded", control).refuse(verb)
