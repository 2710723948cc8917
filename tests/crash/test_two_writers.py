"""If two commands write to one DST at once, one of them completes it and the other reports why it did not."""

import pytest

from crash.effort import ALL
from crash.pairs import staged, together
from crash.scenarios import MODEL, OTHER, SCENARIOS
from crash.verdict import WrongError, spoken

_BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
_NEW = (_BY_NAME["hf-to-maxtext"], _BY_NAME["maxtext-to-hf"])
_OVER = tuple(_BY_NAME[f"hf-to-maxtext-overwrite{how}"] for how in ("", "-no-exchange"))
# Scenario, the two models, how many interleavings: 200 of each kind, or a few of them.
KINDS = [
    *((scenario, (MODEL, MODEL), 100 if ALL else 4) for scenario in _NEW),
    *((scenario, (MODEL, OTHER), 100 if ALL else 4) for scenario in _NEW),
    *((scenario, (MODEL, OTHER), 100 if ALL else 4) for scenario in _OVER),
    (_OVER[0], (MODEL, MODEL), 100 if ALL else 2),
]


@pytest.mark.parametrize(("scenario", "models", "count"), KINDS, ids=lambda item: getattr(item, "name", None))
def test_two_writers_do_not_damage_each_other(cases, scenario, models, count):
    case = cases(scenario)
    length = len(case.recorded.notes.calls)
    wrong = []
    for number in range(count):
        case.begin()
        commands = [scenario.args(case.runner.root, model) for model in models]
        ended = together(case.runner, commands, staged((length, length), number), scenario.exchange)
        try:
            _judge(case, models, ended)
        except WrongError as error:
            wrong.append(f"interleaving {number}: {error}\n" + "\n".join(map(str, ended)))
    assert not wrong, f"{len(wrong)} of {scenario.name}\n\n" + "\n\n".join(wrong[:20])


def _judge(case, models, ended):
    for item in ended:
        spoken(item, 0, 2)
    case.foreign()
    done = [model for model, item in zip(models, ended, strict=True) if item.code == 0]
    if not done:
        raise WrongError("both were refused")
    if len(done) == 2 and not case.scenario.replaces:
        raise WrongError("both say that they made it")
    case.tidy(case.whole(*done))
