"""The other side of :class:`support.programs.AskedProgram`, for programs that are run by their path."""

import json
import sys
from typing import Any

import grpc


def answer_calls(target: Any, refusal: type[Exception] = AssertionError) -> None:
    """Say that ``target`` is ready, and call its methods as standard input asks, until that is closed.

    ``refusal``: an error that is an answer in its own words.
    """
    print("ready", flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer = {"result": getattr(target, name)(*arguments)}
        except grpc.RpcError as error:
            answer = {"error": f"{error.code().name}: {error.details()}"}
        except (KeyError, AssertionError, refusal) as error:
            named = isinstance(error, (KeyError, AssertionError))
            answer = {"error": f"{type(error).__name__}: {error}" if named else str(error)}
        print(json.dumps(answer), flush=True)
