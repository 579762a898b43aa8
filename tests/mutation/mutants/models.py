"""Models for transformers."""

from __future__ import annotations

from ..mutant import Mutant

MUTANTS = (
    Mutant(
        "model-repeats-the-batch",
        "mtagen/transformers/cache.py",
        ".repeat_interleave(repeats)",
        ".repeat(repeats)",
        "Sequences go on with the keys of other prompts.",
        ("tests/test_transformers.py::test_what_a_cache_does",),
    ),
    Mutant(
        "model-beams-keep-their-keys",
        "mtagen/transformers/cache.py",
        "self._select(beam_idx)",
        "self._select(torch.arange(len(beam_idx)))",
        "A beam that takes another's place goes on with the other's keys.",
        ("tests/test_transformers.py::test_what_a_cache_does",),
    ),
    Mutant(
        "model-positions-of-padding",
        "mtagen/transformers/cache.py",
        "positions = None if at is None else _at(places, at)",
        "positions = None if at is None else at[:1, : _at(places, x).shape[1]] if places else at",
        "Tokens after padding are turned by the angles of padding.",
        ("tests/test_transformers.py::test_generation_with_and_without_a_cache",),
    ),
)
