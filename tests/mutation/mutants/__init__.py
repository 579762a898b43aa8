"""The mutants: bugs of one line, each of which some test must see; a module for each subject.

A new kernel, pass or rule comes with the mistakes that are easily made in it. A mutant finds its code by its tokens
(:mod:`..anchors`), so comments and layout may change freely. If the code itself changes, ``tests/test_mutation.py``
names the mutants that no longer apply.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from ..mutant import Mutant

MUTANTS: tuple[Mutant, ...] = tuple(
    mutant for module in iter_modules(__path__) for mutant in import_module(f"{__name__}.{module.name}").MUTANTS
)
