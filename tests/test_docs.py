"""The site's pages: their code and commands run as printed, and what they say of the package is so."""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from pages import ROOT, blocks, commands, execute, page
from typer.testing import CliRunner

from mtagen import TARGETS
from mtagen.cli import app
from mtagen.config import Config

pytestmark = pytest.mark.usefixtures("one_thread")

PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
RUN_ELSEWHERE = ("docs/trainers.md",)  # by test_trainers.py
WITH_CODE = [name for name in PAGES if blocks(name, "python") and name not in RUN_ELSEWHERE]
COMMANDS = sorted({tuple(words) for name in PAGES for words in commands(name)})
NOT_RUN = ("on a GPU", "on two GPUs", "once")  # titles of blocks of commands that no test runs


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MTAGEN_CACHE_DIR", str(tmp_path / "cache"))
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)  # as torchrun does
    monkeypatch.chdir(tmp_path)


def check_index(names: dict[str, Any]) -> None:
    assert names["out"].shape == (1, 4, 200, 64)
    assert names["exact"].dtype == torch.float64


def check_tutorial(names: dict[str, Any]) -> None:
    """What the page says of the two models; other processors add up in other orders, so that figures differ."""
    assert names["errors"]["plain"] > 0.75
    assert names["errors"]["multi-token"] < 0.5
    assert [kernel.shape for name, kernel in names["models"]["multi-token"].named_parameters() if "mta" in name] == [
        (2, 1, 2, 5)
    ] * 2


def check_layer(names: dict[str, Any]) -> None:
    heads, head_dim = names["heads"], names["head_dim"]
    assert names["out"].shape == (2, 100, heads * head_dim)
    assert names["packed"].shape == (100, heads * head_dim)
    assert names["first"].lengths.tolist() == [12]
    assert all(x.isfinite().all() for x in names["empty"].parameters())


def check_transformers(names: dict[str, Any]) -> None:
    assert names["out"].shape == (2, 32)
    assert names["loss"].isfinite()
    assert names["model"].model.layers[0].self_attn.stages.weight.grad.any()


def check_distributed(names: dict[str, Any]) -> None:
    assert names["whole"].shape == (1, 4, 1000, 64)
    assert names["error"] < 1e-5
    assert names["y"].shape == (1, 200, 128)
    assert names["block"]["attention"].mta_kernel.grad.full_tensor().any()


def check_existing_code(names: dict[str, Any]) -> None:
    assert names["packed"].shape == (50, 4, 64)
    assert names["generated"].shape == (2, 50, 256)
    assert names["model"].stages["weight"].grad.full_tensor().any()


def check_tools(names: dict[str, Any]) -> None:
    """The merge has left a model without adapters, and the layer has computed though its weights are elsewhere."""
    assert names["out"].shape == (2, 32, 64)
    assert names["out"].isfinite().all()
    assert not any("modules_to_save" in name or "lora" in name for name in names["merged"].state_dict())
    assert names["merged"].model.layers[0].self_attn.stages.weight.any()
    assert names["layer"].mta_kernel.is_meta


CHECKS = {
    "docs/existing-code.md": check_existing_code,
    "docs/distributed.md": check_distributed,
    "docs/index.md": check_index,
    "docs/tutorial.md": check_tutorial,
    "docs/layer.md": check_layer,
    "docs/tools.md": check_tools,
    "docs/transformers.md": check_transformers,
}


@pytest.mark.parametrize("name", WITH_CODE)
def test_code(name: str) -> None:
    """All blocks of a page, one after the other, but those for a GPU."""
    names = execute(name)
    if check := CHECKS.get(name):
        check(names)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in WITH_CODE if any(b.needs_gpu for b in blocks(name, "python"))])
def test_code_on_a_gpu(name: str) -> None:
    execute(name, gpu=True)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_command(words: tuple[str, ...]) -> None:
    assert words[0] == "mtagen"
    result = CliRunner().invoke(app, list(words[1:]))
    assert result.exit_code == 0, result.output
    assert result.stdout


def test_every_command_is_shown() -> None:
    shown = [*commands("docs/commands.md"), *commands("docs/commands.md", "bash")]
    assert {words[1] for words in shown} == set(typer.main.get_group(app).commands)


@pytest.mark.parametrize("name", PAGES)
def test_commands_that_are_not_run_say_so(name: str) -> None:
    titles = re.findall(r"^```bash(.*)$", page(name), flags=re.MULTILINE)
    assert set(titles) <= {f' title="{title}"' for title in NOT_RUN}


def test_every_environment_variable_is_listed() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \|$", page("docs/environment.md"), flags=re.MULTILINE)
    described = Config.from_env().describe()
    assert [name for name, _, _ in rows] == [setting.name for setting in described]
    for (_, default, meaning), setting in zip(rows, described, strict=True):
        assert default.replace("`", "") == setting.default
        assert meaning.startswith(setting.meaning)


def test_every_target_is_named() -> None:
    (row,) = re.findall(r"^\| targets \|.*$", page("docs/limits.md"), flags=re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", row)) == set(TARGETS)


# ---- Troubleshooting: every message has its remedy, and no remedy is of a message that is no more

RAISED = ("SpecError", "InputError", "PlanError", "BackendError", "UntrustedError", "ValueError", "RuntimeError")


def texts(node: ast.expr, scope: ast.AST) -> list[str]:
    """What an expression may be, with … for what is filled in; a name is all that its function assigns to it."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=parts):
            made = [texts(part.value if isinstance(part, ast.FormattedValue) else part, scope) for part in parts]
            return ["".join(one) for one in itertools.product(*made)]
        case ast.IfExp(body=body, orelse=other):
            return [*texts(body, scope), *texts(other, scope)]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return ["".join(pair) for pair in itertools.product(texts(left, scope), texts(right, scope))]
        case ast.Name(id=name):
            return [text for value in assigned(name, scope) for text in texts(value, scope)] or ["…"]
    return ["…"]


def assigned(name: str, scope: ast.AST) -> list[ast.expr]:
    """What a function assigns to a name."""
    found = []
    for node in ast.walk(scope):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=True))
            found += [value for to, value in pairs if isinstance(to, ast.Name) and to.id == name]
    return found


def messages() -> dict[str, list[str]]:
    """Rules of all calls of ``explain`` and ``check_choice``, and texts of all other errors and warnings, by place."""
    found: dict[str, list[str]] = {}
    for path in sorted(
        path for name in ("mtagen", "examples", "integrations") for path in ROOT.glob(f"{name}/**/*.py")
    ):
        for scope in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for node in ast.walk(scope) if isinstance(scope, ast.FunctionDef) else ():
                if not isinstance(node, ast.Call):
                    continue
                name = ast.unparse(node.func)
                if name == "explain" and path.name != "errors.py":
                    rules = texts(node.args[2], scope)
                    made = rules if rules != ["…"] else texts(node.args[0], scope)  # a rule that callers give
                elif name == "self._error":  # of the language of expressions, which calls explain
                    made = texts(node.args[1], scope)
                elif name == "check_choice":
                    made = texts(node.args[3], scope) if len(node.args) > 3 else ["is not supported"]
                elif name in (*RAISED, "warnings.warn") and isinstance(node.args[0], (ast.Constant, ast.JoinedStr)):
                    made = texts(node.args[0], scope)
                else:
                    continue
                found[f"{path.relative_to(ROOT)}:{node.lineno}"] = made
    return found


def remedies() -> set[str]:
    """The words of messages that the page explains, which stand in the first cell of a row."""
    rows = re.findall(r"^\| (`.*?) \| .* \|$", page("docs/troubleshooting.md"), flags=re.MULTILINE)
    return {words for cell in rows for words in re.findall(r"`([^`]+)`", cell)} - set(RAISED)


def test_every_message_has_a_remedy() -> None:
    found, explained = messages(), remedies()
    assert len(found) > 120
    missing = {
        place: text
        for place, made in found.items()
        for text in made
        if re.search(r"\w", text) and not any(words in text for words in explained)
    }
    assert not missing


def test_every_remedy_is_of_a_message() -> None:
    made = list(itertools.chain(*messages().values()))
    made += re.findall(r'f?"(.*?)"', page("mtagen/planner/lift/tiling.py"))  # _shortfall, whose text is handed on
    assert [words for words in remedies() if not any(words in text for text in made)] == []


def test_every_class_of_errors_is_explained() -> None:
    from mtagen import errors

    classes = {
        name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__
    }
    assert all(f"`{name}`" in page("docs/troubleshooting.md") or name == "MtagenError" for name in classes)


def test_pictures_are_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """``python docs/pictures.py`` would change nothing."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    import pictures

    for name, drawing in pictures.pictures():
        assert str(drawing) == page(f"docs/pictures/{name}.svg"), name
