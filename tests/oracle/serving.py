"""A process that answers lines of JSON: the name of a function and its arguments in, what it returns out.

MaxText and transformers take 10 to 20 seconds to import: one process of each answers for all families. Needs
nothing but the standard library: it runs where this package is not installed.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

_MOST_WORDS = 600


def serve(functions: Mapping[str, Callable[..., Any]]) -> None:
    """Answers until standard input ends. What libraries print goes to standard error."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            asked = json.loads(line)
            answer = _answer(functions[asked["function"]], asked["arguments"])
            print(json.dumps(answer), file=answers, flush=True)


def _answer(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {"value": function(**arguments)}
    except BaseException as error:  # MaxText refuses in many ways, SystemExit among them
        traceback.print_exc()
        return {"refused": words(error)}


def words(error: BaseException) -> str:
    """What an error says, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_MOST_WORDS]}"
