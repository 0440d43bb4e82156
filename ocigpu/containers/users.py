"""Containers of other users, for root: looked for with their owner's rights, and only shown.

A user can put anything where the own runtimes keep states, and mount a file system that never answers.  So root does
not look there: a child with the user's rights, a deadline and a limit does, and what it answers is text to be shown.
``ps`` and ``explain`` show it, and nothing else follows: no command takes these containers, or their names, for one.
"""

import json
import os
import pwd
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ocigpu.containers.find import USER_DIRECTORIES, USER_NAMES, Places, find_containers
from ocigpu.containers.report import make_reports
from ocigpu.core.facts import HostFacts
from ocigpu.core.record import NamedTuple
from ocigpu.core.settings import Settings
from ocigpu.gpus.vendors import parse_request
from ocigpu.system.child import Child, drop_rights, end_with, isolate

MAX_USERS = 64
MAX_CONTAINERS = 256
"""Of one user."""
MAX_ANSWER = 4 << 20
SECONDS = 5.0


class OfUser(NamedTuple):
    """A container as its user's files describe it; ``gpus``: indices and UUIDs of this host's devices, with states."""

    user: str
    name: str
    engine: str
    status: str
    pid: int
    mode: str
    gpus: tuple[tuple[str, str, str], ...]
    unanswered: str
    refused: str


def find_of_users(facts: HostFacts, settings: Settings) -> tuple[list[OfUser], list[str]]:
    """Return the containers of all users that are logged in but root's, and notes; needs root."""
    parse_request({}, settings, "")  # loads what a user could not: we may be installed where root alone may read
    answers, notes = ask_users(partial(_look_for_containers, facts, settings), SECONDS)
    found: list[OfUser] = []
    for user, rows in answers.items():
        try:
            found += [shown for item in rows[:MAX_CONTAINERS] if (shown := _checked(user, item, facts))]
        except (ValueError, TypeError):
            notes.append(_NOT_LOOKED_AT.format(user))
    return found, notes


_NOT_LOOKED_AT = "containers of user {} could not be inspected"


def ask_users(look: Callable[[Places], Any], seconds: float) -> tuple[dict[str, Any], list[str]]:
    """Return for each user that is logged in, but root, what ``look`` answers as JSON with their rights; and notes.

    Those are the users with a directory of their own in /run/user (pam_systemd(8)).  ``look`` gets where their
    containers are; what it answers is the user's word.  Needs root.
    """
    answers: dict[str, Any] = {}
    notes: list[str] = []
    users = [uid for uid in _uids() if uid]
    if len(users) > MAX_USERS:
        notes.append(f"{USER_DIRECTORIES}: more than {MAX_USERS} users: containers of the others are not shown")
    asked = []
    for uid in users[:MAX_USERS]:
        try:
            entry = pwd.getpwuid(uid)
            user, gid = entry.pw_name, entry.pw_gid
        except KeyError:
            user, gid = str(uid), uid
        asked.append((user, Child(partial(_look_as, uid, gid, look, os.getpid()), seconds)))
    for user, child in asked:
        try:
            answers[user] = json.loads(child.collect(MAX_ANSWER)[0])
        except (OSError, OverflowError, ValueError, RecursionError):
            notes.append(_NOT_LOOKED_AT.format(user))
    return {user: answer for user, answer in answers.items() if answer is not None}, notes


def _uids() -> Sequence[int]:
    """Return the users that have a directory, by its name: whose it is their child looks at, with a deadline."""
    try:
        return sorted(int(name) for name in os.listdir(USER_DIRECTORIES) if name.isdecimal() and int(name))
    except OSError:
        return ()


def _look_as(uid: int, gid: int, look: Callable[[Places], Any], parent: int, pipe: int) -> bytes:
    """Return what ``look`` finds; in the child, which becomes the user."""
    isolate(pipe)
    drop_rights(uid, gid)
    if os.getresuid() != (uid, uid, uid) or os.getresgid() != (gid, gid, gid):
        raise PermissionError
    if os.stat(f"{USER_DIRECTORIES}/{uid}", follow_symlinks=False).st_uid != uid:
        return b"null"
    end_with(parent)
    os.register_at_fork(after_in_child=partial(end_with, os.getpid()))  # children of its own do not outlive it
    return json.dumps(look(Places(tuple(f"{USER_DIRECTORIES}/{uid}/{name}" for name in USER_NAMES)))).encode()


def _look_for_containers(facts: HostFacts, settings: Settings, places: Places) -> list[Any]:
    reports = make_reports(find_containers(places)[0][:MAX_CONTAINERS], facts, settings)
    rows = []
    for report in reports:
        gpus = [(gpu.uuid, gpu.state) for gpu in report.gpus]
        one = report.container
        why = report.unanswered, report.refused
        rows.append((one.name, one.engine or one.runtime, one.status, one.pid, report.mode, gpus, *why))
    return rows


def _checked(user: str, item: Any, facts: HostFacts) -> OfUser | None:
    """Return a row of a child's answer, if it is one."""
    names = {gpu.uuid: str(gpu.index) for gpu in facts.gpus}
    names |= {mig.uuid: f"{gpu.index}:{mig.index}" for gpu in facts.gpus for mig in gpu.mig_devices}
    name, engine, status, pid, mode, gpus, unanswered, refused = item
    texts = (name, engine, status, mode, unanswered, refused)
    if not all(isinstance(text, str) and len(text) <= 4096 for text in texts) or type(pid) is not int:
        return None
    known = tuple((names[uuid], uuid, str(state)[:40]) for uuid, state in gpus if uuid in names)
    return OfUser(user, name, engine, status, pid, mode, known, unanswered, refused)
