"""What is built, when, and what is kept of it."""

from __future__ import annotations

from ..mutant import Mutant

OP = "mtagen/ops/attention.py"
BUILT, TUNED = "tests/test_eager_builds.py", "tests/test_tuning.py"

MUTANTS = (
    Mutant(
        "build-only-what-was-named",
        OP,
        "in product((False, True)[: packed + 1], (False, True)[: dropout + 1]):",
        "in ((packed, dropout),):",
        "An op for packed documents and dropout builds kernels for documents without dropout in a call, which "
        "torch.compile cannot trace.",
        (f"{BUILT}::test_what_is_asked_for_is_built_at_once",),
    ),
    Mutant(
        "build-dropout-when-it-is-called",
        OP,
        "(False, True)[: dropout + 1]",
        "(False,)",
        "The first call that drops builds kernels.",
        (f"{BUILT}::test_what_is_asked_for_is_built_at_once",),
    ),
    Mutant(
        "build-every-variant",
        OP,
        "(False, True)[: packed + 1]",
        "(False, True)",
        "Builds take twice as long, for packed documents that nobody asked for.",
        (f"{BUILT}::test_what_is_asked_for_is_built_at_once",),
    ),
    Mutant(
        "build-variants-in-every-call",
        OP,
        "if key not in self._built:",
        "if True:",
        "Each call of a variant plans, renders and loads anew.",
        (f"{BUILT}::test_the_rest_is_built_once_when_a_call_needs_it",),
    ),
    Mutant(
        "build-variants-by-any-backend",
        OP,
        'backend = planned.backend if planned.backend in BACKENDS else "auto"',
        'backend = "auto"',
        "Where a backend was named, packed documents may run on another.",
        (f"{BUILT}::test_an_assembled_plan_has_variants_of_its_backend",),
    ),
    Mutant(
        "build-variants-for-the-default-target",
        OP,
        "partial(plan, target=planned.target, backend=backend)",
        "partial(plan, backend=backend)",
        "Kernels for packed documents are those of another GPU.",
        (f"{BUILT}::test_an_assembled_plan_has_variants_of_its_backend",),
    ),
    Mutant(
        "build-variants-of-a-call-without-dropout",
        OP,
        "replace(self._spec, packed=packed, dropout=dropout, page_size=page_size)",
        "replace(self._spec, packed=packed, page_size=page_size)",
        "Calls that drop go to kernels that do not.",
        (f"{BUILT}::test_what_is_asked_for_is_built_at_once",),
    ),
    Mutant(
        "build-dropout-though-it-is-not-asked-for",
        "mtagen/op.py",
        "packed=packed, dropout=dropout, page_size",
        "packed=packed, dropout=packed, page_size",
        "Dropout is built where documents are packed, and is refused elsewhere.",
        (f"{BUILT}::test_what_is_asked_for_is_built_at_once",),
    ),
    Mutant(
        "build-backend-of-the-first-table",
        "mtagen/op.py",
        "target=target, backend=backend, available",
        "target=target, available",
        "A backend that is named is ignored.",
        (f"{BUILT}::test_variants_are_built_like_the_op",),
    ),
    Mutant(
        "export-keeps-what-was-there",
        "mtagen/tuning.py",
        "Table.from_dict(json.loads(path.read_text()), table.source).updated(table)",
        "table.updated(Table.from_dict(json.loads(path.read_text()), table.source))",
        "What is tuned again does not replace what the file says.",
        (f"{TUNED}::test_export_replaces_what_is_tuned_again",),
    ),
    Mutant(
        "export-over-what-was-there",
        "mtagen/tuning.py",
        "if path.exists():",
        "if not path.exists():",
        "Decisions of other shapes are lost.",
        (f"{TUNED}::test_export_adds_to_a_table",),
        within="export",
    ),
    Mutant(
        "export-ratios-of-one-pass",
        "mtagen/planner/tables.py",
        "{*self.cuda_over_triton, *newer.cuda_over_triton}",
        "{*newer.cuda_over_triton}",
        "Ratios of passes that are not tuned again are lost.",
        (f"{TUNED}::test_export_replaces_what_is_tuned_again",),
    ),
    Mutant(
        "export-shapes-replaced-by-one",
        "mtagen/planner/tables.py",
        "{**self.cuda_over_triton.get(name, {}), **newer.cuda_over_triton.get(name, {})}",
        "{**(newer.cuda_over_triton.get(name) or self.cuda_over_triton.get(name, {}))}",
        "Ratios of shapes that are not tuned again are lost.",
        (f"{TUNED}::test_export_replaces_what_is_tuned_again",),
    ),
    Mutant(
        "cache-clears-whatever-is-tagged",
        "mtagen/runtime/disk_cache.py",
        "tag.read_bytes() == TAG_CONTENT",
        'tag.read_bytes().startswith(b"Signature")',
        "`mtagen clear-cache` removes what another program keeps beside it.",
        ("tests/test_cache_tags.py::test_a_folder_with_another_tag_is_left_alone",),
    ),
    Mutant(
        "cache-keeps-a-tag-of-others",
        "mtagen/runtime/disk_cache.py",
        "if not _is_tagged(folder):",
        "if not (folder / TAG).is_file():",
        "Entries beside a changed tag are never cleared.",
        ("tests/test_cache_tags.py::test_a_tag_that_was_changed_is_written_anew",),
    ),
)
