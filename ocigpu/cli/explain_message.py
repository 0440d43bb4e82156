"""What ``ocigpu explain`` says of messages of other programs, and of findings of the doctor."""

import re

from ocigpu.cli.common import print_fields, print_json, print_table
from ocigpu.core.codes import CODES
from ocigpu.core.errors import UsageError, quoted
from ocigpu.doctor.messages import MESSAGES, find_messages
from ocigpu.doctor.table import CHECKS


def is_finding(name: str) -> bool:
    """Tell whether the doctor has a check of that name."""
    return any(check.name == name for check in CHECKS)


def explain_finding(name: str, json: bool) -> None:
    """Print what a check of the doctor finds, and why it matters."""
    check = next(check for check in CHECKS if check.name == name)
    if json:
        print_json({"finding": check.name, "title": check.title, "meaning": check.meaning})
    else:
        print_fields(
            [("finding", check.name), ("finds", check.title), ("meaning", check.meaning), ("look", "ocigpu doctor")]
        )


def explain_message(text: str, json: bool) -> None:
    """Print what is known of a message, or of part of a log, our codes in it first; raises UsageError for neither."""
    found = find_messages(text)
    codes = [code for code in dict.fromkeys(re.findall(r"OCIGPU-[A-Z]+-[0-9]+", text)) if code in CODES]
    if not found and not codes:
        raise UsageError(
            f"nothing is known of the message {quoted(text)}",
            "known messages: ocigpu explain --messages; or: ocigpu doctor",
        )
    if json:
        explained: list[dict[str, object]] = [{"code": code, **CODES[code]._asdict()} for code in codes]
        print_json(explained + [entry._asdict() for entry in found])
        return
    for code in codes:
        print_fields([("code", code), ("cause", CODES[code].cause), ("fix", CODES[code].fix)])
    for number, entry in enumerate(found):
        if number or codes:
            print()
        fields = [("message", entry.texts[0]), ("meaning", entry.meaning)]
        fields += [("" if place else "what to do", step) for place, step in enumerate(entry.steps)]
        fields += [("" if place else "doctor", name) for place, name in enumerate(entry.findings)]
        print_fields(fields)


def list_messages(json: bool) -> None:
    """Print all messages that are known."""
    if json:
        print_json([entry._asdict() for entry in MESSAGES])
    else:
        print_table(("message", "what"), [(text, entry.title) for entry in MESSAGES for text in entry.texts])
