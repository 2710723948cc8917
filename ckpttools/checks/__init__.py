"""Checks of one model directory: whether its parts agree, and whether consumers can load it.

`doctor` reports the findings of all checks. Commands that write run them on the output before they write a
byte: findings that block writing become an error, other findings become notes. A check is a pure function of
a `ckpttools.checks.base.ModelDirectory`: the configuration, the arrays without their values, and the files
next to the weights.

To add a check, add one module to this package with

    CHECK = ModelCheck("name", "what it reports, in a line", _check)

`_check` takes a `ModelDirectory` and yields `ModelFinding`s. `ckpttools.checks.registry` finds the module.
Add the name to the table in docs/internals.md, and a test with input that the check reports and input that it
does not (tests/diagnosis/test_model_checks.py).
"""
