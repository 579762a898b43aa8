"""The comparison of machine code: what counts as a difference. Compilation itself is tested elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compare_code import CASES, compiled, differing, instructions, report, sources, uncommented


def test_comments_are_no_difference() -> None:
    python = 'def f(x):\n    """Add one."""\n    return x + 1  # a comment\n'
    assert uncommented("a.py", python) == uncommented(
        "a.py", python.replace("Add one", "Other").replace("a comment", "")
    )
    assert uncommented("a.py", python) != uncommented("a.py", python.replace("+ 1", "+ 2"))
    cuda = "// why\nint f(int x) {\n  return x + 1;  // one more\n}\n"
    assert uncommented("a.cu", cuda) == uncommented("a.cu", cuda.replace("one more", "other").replace("// why\n", ""))
    assert uncommented("a.cu", cuda) != uncommented("a.cu", cuda.replace("+ 1", "+ 2"))


def test_instructions_have_no_addresses() -> None:
    listing = "\t\tFunction : f\n        /*0010*/                   MOV R1, c[0x0][0x28] ;  /* 0x00000a0000017a02 */\n"
    assert instructions(listing) == ["MOV R1, c[0x0][0x28] ;"]


def test_kernels_that_differ_are_reported(tmp_path: Path) -> None:
    before, now = tmp_path / "before", tmp_path / "now"
    for folder, code, used in ((before, "MOV", "[40, 0, 0, 1]"), (now, "MOV\nADD", "[42, 0, 0, 2]")):
        folder.mkdir()
        (folder / "f.sass").write_text(code)
        (folder / "f.json").write_text(used)
        (folder / "same.sass").write_text("RET")
    (now / "new.sass").write_text("RET")
    found = differing(before, now, (".sass",))
    assert [str(name) for name in found] == ["f.sass", "new.sass"]
    assert report(found[0], before, now) == "f: registers 40 -> 42, instructions 1 -> 2"
    assert report(found[1], before, now) == "new: only now"


@pytest.mark.parametrize("part", ["tile", "lift", "strips"])
def test_every_lowering_has_cases(part: str, tmp_path: Path) -> None:
    names = [name for name in CASES if name.startswith(part)]
    assert len(names) >= 12
    sources(names[:1], tmp_path)
    assert {path.suffix for path in tmp_path.rglob("*.*")} & {".py", ".cu"}


def test_cuda_strips_are_compiled_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of CUDA and Triton kernels, whose host functions load CUDA kernels before they launch Triton's."""
    monkeypatch.setenv("MTAGEN_CACHE_DIR", str(tmp_path / "cache"))
    name = "strips-mixed-cuda-sm_90a"
    compiled([name], tmp_path)
    kernels = {kernel.name for one in CASES[name].plan.passes for kernel in one.plan.kernels}
    assert {path.stem for path in (tmp_path / name).glob("*.sass")} == kernels
