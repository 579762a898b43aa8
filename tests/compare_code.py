"""Compare the machine code of all kinds of kernels with that of another commit, for changes that must not change it.

Run from the repository's root::

    python -m tests.compare_code main            # the working tree against the commit `main`
    python -m tests.compare_code main --only 'lift*' --folder ../code

Each case is a spec on a target by a backend. The sources of both trees are rendered first. Where they differ in more
than comments, both are compiled, and the instructions of each kernel are compared. A line for each kernel that differs
says how registers, stack, shared memory and the number of instructions changed. The folder keeps the listings, for a
look at a difference. The exit status is 1 if some kernel differs, else 0.

Both trees must have this module, and each is compiled by its own.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from mtagen import Spec, plan
from mtagen.codegen import render
from mtagen.planner import Plan
from mtagen.runtime.nvrtc import cached_cubin
from mtagen.runtime.offline import Usage, compile_offline, usage_of_cubins

_PAPER = Spec((6, 11), 64)
_MIXED = Spec(None, 64, mixed_heads=16, post_mixed_heads=16)
_ALL = Spec((6, 11), 64, mixed_heads=16, post_kernel=(6, 11), post_mixed_heads=16)
_PAIRS = Spec((6, 11), 128, post_mixed_heads=2)
_CONVOLVED = {
    "paper": _PAPER,
    "d128": replace(_PAPER, head_dim=128, value_head_dim=128),
    "plain": Spec(None, 64),
    "odd": Spec((5, 2), 64, dtype="fp16"),
    "full": replace(_PAPER, causal=False),
    "window": replace(_PAPER, window=(127, -1)),
    "both-edges": replace(_PAPER, causal=False, window=(40, 30)),
    "output": replace(_PAPER, mask="output"),
    "packed": replace(_PAPER, packed=True),
    "packed-window": replace(_PAPER, packed=True, window=(127, -1)),
    "dropout": replace(_PAPER, dropout=True),
    "logits": replace(_PAPER, logits="50 * tanh(s / 50)"),
    "left-keys": Spec((3, 3), 96, key_padding="left"),
    "narrow-values": Spec((4, 10), 80, value_head_dim=48),
    "large": Spec((16, 17), 128, dtype="fp16"),
}
_IN_TRITON = {"fp32": replace(_PAPER, dtype="fp32")}
_IN_STRIPS = {
    "mixed": _MIXED,
    "mixed-packed-dropout": replace(_MIXED, packed=True, dropout=True),
    "all": _ALL,
    "all-window": replace(_ALL, window=(127, -1)),
    "all-packed": replace(_ALL, packed=True),
    "all-dropout": replace(_ALL, dropout=True),
    "all-logits": replace(_ALL, logits="50 * tanh(s / 50)"),
    "pairs": _PAIRS,
}
_ADA = ("paper", "window", "packed", "dropout", "mixed", "all-packed")  # cases of sm_89, whose tiles are smaller


@dataclass(frozen=True)
class Case:
    """Kernels to compare: those of a spec, on a target, by a backend."""

    spec: Spec
    target: str
    backend: str

    @property
    def plan(self) -> Plan:
        """The plan of all passes."""
        return plan(self.spec, self.target, self.backend)


def _only_ada(specs: dict[str, Spec]) -> dict[str, Spec]:
    return {name: spec for name, spec in specs.items() if name in _ADA}


def _cases() -> Iterator[tuple[str, Case]]:
    tables = (
        ("tile", _CONVOLVED, "cuda", ("sm_90a", "sm_80", "sm_89")),
        ("lift", _CONVOLVED | _IN_TRITON, "triton", ("sm_90a", "sm_80")),
        ("lift", _only_ada(_CONVOLVED), "triton", ("sm_89",)),
        ("strips", _IN_STRIPS, "triton", ("sm_90a", "sm_80")),
        ("strips", _IN_STRIPS, "cuda", ("sm_90a", "sm_80")),
        ("strips", _only_ada(_IN_STRIPS), "cuda", ("sm_89",)),
        ("strips", _only_ada(_IN_STRIPS), "triton", ("sm_89",)),
    )
    for lowering, specs, backend, targets in tables:
        for target in targets:
            for name, spec in specs.items():
                yield f"{lowering}-{name}-{backend}-{target}", Case(spec, target, backend)


CASES = dict(_cases())


def sources(names: Iterable[str], folder: Path) -> None:
    """Write the sources of cases, ``folder/<case>/<file>``, without comments."""
    for name in names:
        for file, text in render(CASES[name].plan).files.items():
            path = folder / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(uncommented(file, text), encoding="utf-8")


def uncommented(file: str, text: str) -> str:
    """Source text without comments, docstrings and line ends that mean nothing."""
    if file.endswith(".py"):
        tree = ast.parse(text)
        for node in ast.walk(tree):
            body: list[Any] = getattr(node, "body", [])
            if isinstance(body, list) and body and isinstance(body[0], ast.Expr) and _is_text(body[0].value):
                body[0] = ast.Pass()
        return ast.unparse(tree)
    lines = (re.sub(r"//.*", "", line).strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def compiled(names: Iterable[str], folder: Path) -> None:
    """Compile cases, and write the listing of each kernel, ``folder/<case>/<kernel>.sass``, and what it uses."""
    for name in names:
        made = CASES[name].plan
        kernels: dict[str, Usage] = {}
        for file, text in render(made).files.items():
            if file.endswith(".cu"):
                kernels |= usage_of_cubins(cached_cubin(text, made.target, file))
        if made.triton:
            kernels |= compile_offline(made)
        for kernel, usage in kernels.items():
            path = folder / name / f"{kernel}.sass"
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = instructions(usage.assembly)
            path.write_text("\n".join(lines), encoding="utf-8")
            used = [usage.registers, usage.stack, usage.shared, len(lines)]
            path.with_suffix(".json").write_text(json.dumps(used), encoding="utf-8")


def instructions(listing: str) -> list[str]:
    """The instructions of cuobjdump's listing, without their addresses and their encoding."""
    return re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(.*?;)", listing, re.MULTILINE)


def differing(before: Path, now: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Files with these suffixes, as relative paths, that two folders do not have alike."""
    names = {
        path.relative_to(folder) for folder in (before, now) for path in folder.rglob("*") if path.suffix in suffixes
    }
    return sorted(name for name in names if _text(before / name) != _text(now / name))


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


def report(name: Path, before: Path, now: Path) -> str:
    """Say how the machine code of a kernel changed."""
    if not (before / name).exists() or not (now / name).exists():
        return f"{name.with_suffix('')}: only {'now' if (now / name).exists() else 'before'}"
    used = [json.loads((folder / name).with_suffix(".json").read_text(encoding="utf-8")) for folder in (before, now)]
    changes = zip(("registers", "stack", "shared", "instructions"), *used, strict=True)
    said = ", ".join(f"{what} {a} -> {b}" for what, a, b in changes if a != b) or "other instructions"
    return f"{name.with_suffix('')}: {said}"


def compare(commit: str, names: list[str], folder: Path) -> int:
    """Compare cases with those of a commit; return how many kernels differ."""
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "tree"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, commit], check=True)
        try:
            trees = {"before": tree, "now": Path.cwd()}
            before, now = (folder / which for which in trees)

            def run(step: str, names: Iterable[str]) -> None:
                for which, root in trees.items():
                    command = [sys.executable, "-m", "tests.compare_code", "--step", step, "--folder"]
                    subprocess.run([*command, folder.resolve() / which / step, *names], cwd=root, check=True)

            run("sources", names)
            changed = differing(before / "sources", now / "sources", (".py", ".cu"))
            cases = sorted({path.parts[0] for path in changed} & {*names})
            print(f"{len(names)} cases: {len(names) - len(cases)} have the same sources", flush=True)
            if cases:
                run("compiled", cases)
            kernels = differing(before / "compiled", now / "compiled", (".sass",))
            found = [path for path in kernels if path.parts[0] in cases]  # the folder may have other cases
            total = sum(len([*(now / "compiled" / case).glob("*.sass")]) for case in cases)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], check=True)
    for name in found:
        print(report(name, before / "compiled", now / "compiled"))
    if cases:
        print(f"{total} kernels of the others were compiled: {len(found)} differ. Listings: {folder}")
    return len(found)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tests.compare_code", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="*", metavar="PATTERN", help="names of cases; default all")
    parser.add_argument("--folder", type=Path, help="keep sources and listings here; default a new temporary folder")
    parser.add_argument("--step", choices=("sources", "compiled"), help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="+", metavar="COMMIT", help="the commit to compare with")
    options = parser.parse_args(arguments)
    if options.step:
        {"sources": sources, "compiled": compiled}[options.step](options.names, options.folder)
        return 0
    chosen = [name for name in CASES if fnmatch(name, options.only)]
    (commit,) = options.names
    return int(compare(commit, chosen, options.folder or Path(tempfile.mkdtemp())) > 0)


if __name__ == "__main__":
    sys.exit(main())
