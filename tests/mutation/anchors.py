"""Find code in a source file without regard to comments, blank lines and layout.

A mutant names the code that it changes. The code is found by its tokens, so that a comment in or beside it may be
reworded and its lines may be wrapped or indented otherwise. A comma before a closing bracket counts as layout, because
formatters put it there when they wrap a call.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import PurePath
from typing import NamedTuple

_STRING = re.compile(
    r"""\"{3}(?:\\.|[^\\])*?(?:\"{3}|\Z)|'{3}(?:\\.|[^\\])*?(?:'{3}|\Z)|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?""",
    re.DOTALL,
)
_TOKEN = re.compile(
    r"\w+|<<=|>>=|\*\*=|//=|\.\.\.|->|::|:=|[-+*/%&|^<>=!]=|&&|\|\||<<|>>|\*\*|//|\+\+|--|\S",
)
_JINJA_TOKEN = re.compile(r"\{\{|\}\}|\{%|%\}|" + _TOKEN.pattern)
_COMMENTS = {
    "python": re.compile(r"#[^\n]*"),
    "c": re.compile(r"//[^\n]*|/\*.*?(?:\*/|\Z)", re.DOTALL),
}
_JINJA_COMMENT = re.compile(r"\{#.*?(?:#\}|\Z)", re.DOTALL)
_OPENS, _CLOSES = ("{{", "{%"), ("}}", "%}")
_BRACKETS = {"(": ")", "[": "]", "{": "}"}


class AnchorError(Exception):
    """A file has no code, or too much code, that an anchor could mean."""


class Language(NamedTuple):
    """How a file is read.

    Attributes:
        comments: ``python`` or ``c``.
        jinja: whether it is a template.
    """

    comments: str
    jinja: bool


class Token(NamedTuple):
    """A word or an operator, and the part of the text that it is."""

    text: str
    begin: int
    end: int


def language_of(file: str) -> Language:
    """The language of a file of this name. Templates below a folder ``cuda`` are C++ unless they end in ``.py.j2``."""
    path = PurePath(file)
    c = path.suffix in (".cuh", ".cu", ".h", ".cpp") or (path.suffix == ".j2" and "cuda" in path.parts)
    return Language("c" if c and not file.endswith(".py.j2") else "python", path.suffix == ".j2")


@lru_cache
def tokens(text: str, language: Language) -> tuple[Token, ...]:
    """The code of a file, or of a part of one. Words and operators in strings are tokens, too.

    A part may begin in a Jinja expression: then it closes one before it opens one.
    """
    return tuple(_tokens(text, language))


def _tokens(text: str, language: Language) -> Iterator[Token]:
    token = _JINJA_TOKEN if language.jinja else _TOKEN
    delimiter = re.search(r"\{\{|\}\}|\{%|%\}", text) if language.jinja else None
    in_jinja = delimiter is not None and delimiter[0] in _CLOSES
    at = 0
    while at < len(text):
        comment = _comment(text, at, language, in_jinja)
        if comment:
            at = comment.end()
        elif string := _STRING.match(text, at):
            yield from (Token(one[0], one.start(), one.end()) for one in token.finditer(text, at, string.end()))
            at = string.end()
        elif text.startswith("\\\n", at):
            at += 2
        elif one := token.match(text, at):
            yield Token(one[0], one.start(), one.end())
            in_jinja = language.jinja and (one[0] in _OPENS or (in_jinja and one[0] not in _CLOSES))
            at = one.end()
        else:
            at += 1


def _comment(text: str, at: int, language: Language, in_jinja: bool) -> re.Match[str] | None:
    """The comment that begins there. In a Jinja expression ``//`` divides."""
    jinja = _JINJA_COMMENT.match(text, at) if language.jinja else None
    return jinja or (None if in_jinja else _COMMENTS[language.comments].match(text, at))


def replace(text: str, file: str, old: str, new: str, within: str = "") -> str:
    """The text of a file with ``new`` where it has the code ``old``.

    Args:
        text: what is in the file.
        file: its name, which says how it is read.
        old: code that occurs once in the file, or in the definition that ``within`` names.
        new: what stands there instead. If the file indents the code otherwise than ``old`` does, ``new`` follows.
        within: the name of a function, class or macro, or several with dots between them, the outer one first.

    Raises:
        AnchorError: the code is absent or is there more than once; there is no such definition.
    """
    language = language_of(file)
    spans = find(text, language, old, within)
    if len(spans) != 1:
        lines = ", ".join(str(1 + text.count("\n", 0, begin)) for begin, _ in spans)
        where = f"{file}, {within}" if within else file
        remedy = f", in lines {lines}; take more of the code around it, or name its function in `within`"
        raise AnchorError(f"{old!r} is {len(spans)} times in the code of {where}{remedy if spans else ''}")
    begin, end = spans[0]
    found = tokens(old, language)
    before, after = old[: found[0].begin], old[found[-1].end :]
    new = new.removeprefix(before).removesuffix(after)
    indentation = text[text.rfind("\n", 0, begin) + 1 : begin]
    if before and not before.strip() and not indentation.strip():
        new = _indented(new, len(indentation) - len(before.rpartition("\n")[2]))
    return text[:begin] + new + text[end:]


def find(text: str, language: Language, old: str, within: str = "") -> list[tuple[int, int]]:
    """Where the code ``old`` is: begin and end of each place.

    Raises:
        AnchorError: ``old`` holds no code, or nothing of the name ``within`` is defined.
    """
    wanted = [one.text for one in tokens(old, language)]
    if not wanted:
        raise AnchorError(f"{old!r} has no code: what it says is a comment")
    there = tokens(text, language)
    spans = set()
    for first, last in _definitions(text, there, language, within):
        for start in range(first, last):
            if there[start].text == wanted[0] and (stop := _match(there[:last], start, wanted)):
                spans.add((there[start].begin, there[stop - 1].end))
    return sorted(spans)


def _match(there: Sequence[Token], start: int, wanted: Sequence[str]) -> int | None:
    """The index behind the tokens from ``start`` on if they are those wanted, but for commas before a bracket."""
    at = position = 0
    closes = frozenset(_BRACKETS.values())
    while position < len(wanted):
        if start + at == len(there):
            return None
        got = there[start + at].text
        if got == wanted[position]:
            position += 1
        elif got == "," and there[start + at + 1 : start + at + 2] and there[start + at + 1].text in closes:
            pass
        elif wanted[position] == "," and got in closes and got in wanted[position + 1 : position + 2]:
            position += 1
            continue
        else:
            return None
        at += 1
    return start + at


def _indented(code: str, columns: int) -> str:
    """Code whose lines after the first begin so many columns further right, or left if they are less than 0."""
    first, *others = code.split("\n")
    moved = (
        " " * columns + line if columns > 0 else line[min(-columns, len(line) - len(line.lstrip())) :]
        for line in others
    )
    return "\n".join((first, *(line if line.strip() else "" for line in moved)))


def _definitions(text: str, there: Sequence[Token], language: Language, within: str) -> list[tuple[int, int]]:
    """The tokens of each definition of a dotted name, from the first to the one behind the last; all for no name."""
    ranges = [(0, len(there))]
    for name in filter(None, within.split(".")):
        ranges = [
            (start, last)
            for begin, end in ranges
            for start in range(begin, end)
            if there[start].text == name and (last := _end_of_definition(text, there[:end], start, language))
        ]
    if not ranges:
        raise AnchorError(f"{within!r} is no function, class or macro that is defined there")
    return ranges


def _end_of_definition(text: str, there: Sequence[Token], name: int, language: Language) -> int | None:
    """The index behind the last token of what a token is the name of, if it is defined there."""
    keyword = there[name - 1].text if name else ""
    if language.jinja and keyword == "macro":
        return next((at for at in range(name, len(there)) if there[at].text == "endmacro"), None)
    if language.comments == "python":
        return _end_of_block(text, there, name) if keyword in ("def", "class") else None
    following = [one.text for one in there[name + 1 : name + 3]]
    if keyword in ("struct", "class"):
        at = name + 1
    elif following[:1] == ["("]:
        at = _behind_bracket(there, name + 1)
    elif following == ["=", "["]:  # a lambda
        at = _behind_bracket(there, _behind_bracket(there, name + 2))
    else:
        return None
    while at < len(there) and there[at].text not in ("{", ";", ")", ",", "="):  # such as: const, : public Base
        at += 1
    return _behind_bracket(there, at) if at < len(there) and there[at].text == "{" else None


def _behind_bracket(there: Sequence[Token], at: int) -> int:
    """The index behind the bracket that closes the one at ``at``."""
    depth = 0
    opening = there[at].text
    closing = _BRACKETS[opening]
    for index in range(at, len(there)):
        depth += (there[index].text == opening) - (there[index].text == closing)
        if depth == 0:
            return index + 1
    return len(there)


def _end_of_block(text: str, there: Sequence[Token], name: int) -> int:
    """The index behind the last token of a Python function or class. Jinja's own lines are of no indentation."""
    body = next(at for at in range(name, len(there)) if there[at].text in ("(", ":"))
    if there[body].text == "(":
        body = _behind_bracket(there, body)
    column = _column(text, there[name])
    line = text.count("\n", 0, there[body].begin)
    for index in range(body, len(there)):
        one = there[index]
        begins = text.rfind("\n", 0, one.begin) + 1
        ends = not text[begins : one.begin].strip() and one.begin - begins <= column and one.text not in _OPENS
        if ends and text.count("\n", 0, one.begin) > line:
            return index
    return len(there)


def _column(text: str, token: Token) -> int:
    """How far the line of a token is indented."""
    line = text[text.rfind("\n", 0, token.begin) + 1 : token.begin]
    return len(line) - len(line.lstrip())
