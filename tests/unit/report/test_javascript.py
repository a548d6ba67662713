"""Our modules of JavaScript pass a lint: names that nobody declares, what nobody uses, bad habits.

It reads tokens, not scopes: what is declared anywhere in a module counts as known in all of it.
That finds what a browser would find on the first click only: a misspelt name, a lost import.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from partita import report, service

_TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*|/\*.*?\*/)
    |(?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
    |(?P<number>\d[\w.]*)
    |(?P<name>[A-Za-z_$][\w$]*)
    |(?P<sign>=>|\.\.\.|\?\.|===|!==|==|!=|[{}()\[\];,<>+\-*/%&|^!~?:=.@\#`])""",
    re.VERBOSE | re.DOTALL,
)
_REGEX = re.compile(r"/(?:[^/\\\n\[]|\\.|\[(?:[^\]\\\n]|\\.)*\])+/[a-z]*")
_WORDS = frozenset(
    re.findall(
        r"\w+",
        """
    as async await break case catch class const constructor continue default delete do else
    export extends false finally for from function get if import in instanceof let new null
    of return set static super switch this throw true try typeof undefined void while yield
    NaN Infinity
    """,
    )
)
_GLOBALS = frozenset(
    re.findall(
        r"\w+",
        """
    Array Blob Boolean Date DecompressionStream Error Event EventSource FormData Float64Array
    ImageData Int32Array JSON Map Math Number Object Promise ResizeObserver Response Set
    String URL URLSearchParams Uint16Array Uint32Array Uint8Array Uint8ClampedArray WeakMap
    AbortController atob clearTimeout decodeURIComponent document encodeURIComponent fetch
    getComputedStyle history isFinite isNaN localStorage location navigator parseFloat
    parseInt performance queueMicrotask requestAnimationFrame setInterval clearInterval
    setTimeout structuredClone window
    """,
    )
)
_BANNED = {"var": "let or const", "debugger": "nothing", "console": "nothing", "eval": "nothing"}


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    line: int


def _tokens(text: str, line: int = 1) -> Iterator[_Token]:
    at, before = 0, None
    while at < len(text):
        if text[at] == "`":
            end, inside = _template(text, at)
            for begin, part in inside:
                yield _Token("sign", "(", line)
                yield from _tokens(part, line + text.count("\n", at, begin))
                yield _Token("sign", ")", line)
            found, kind = text[at:end], "string"
        elif text[at] == "/" and text[at + 1] not in "/*" and _begins_regex(before):
            match = _REGEX.match(text, at)
            assert match, text[at : at + 40]
            found, kind = match[0], "string"
        else:
            match = _TOKEN.match(text, at)
            assert match, f"line {line}: {text[at : at + 40]!r}"
            found, kind = match[0], str(match.lastgroup)
        if kind != "space":
            before = _Token(kind, found, line)
            yield before
        line += found.count("\n")
        at += len(found)


def _begins_regex(before: _Token | None) -> bool:
    if before is None:
        return True
    return before.text in ("return", "=>") or (before.kind == "sign" and before.text not in ")]}")


def _template(text: str, at: int) -> tuple[int, list[tuple[int, str]]]:
    """Return where a template ends, and what stands between its braces."""
    parts, place = [], at + 1
    while text[place] != "`":
        if text[place] == "\\":
            place += 1
        elif text.startswith("${", place):
            begin, depth = place + 2, 1
            place = begin
            while depth:
                if text[place] == "`":
                    place = _template(text, place)[0]
                    continue
                depth += {"{": 1, "}": -1}.get(text[place], 0)
                place += 1
            parts.append((begin, text[begin : place - 1]))
            continue
        place += 1
    return place + 1, parts


def lint(name: str, text: str) -> list[str]:
    """Return what is wrong with a module, a line each."""
    tokens = list(_tokens(text))
    close = _partners(tokens)
    known = _declared(tokens, close) | _GLOBALS | _WORDS
    uses: dict[str, int] = {}
    found = []
    for at, token in enumerate(tokens):
        before = tokens[at - 1].text if at else ""
        after = tokens[at + 1].text if at + 1 < len(tokens) else ""
        where = f"{name}:{token.line}"
        if token.text in ("==", "!="):
            found.append(f"{where}: {token.text}; expected {token.text}=")
        if token.kind == "string" and token.text.startswith("'") and '"' not in token.text:
            found.append(f"{where}: {token.text}; expected double quotes")
        if token.kind != "name":
            continue
        uses[token.text] = uses.get(token.text, 0) + 1
        if before in (".", "?."):
            continue
        if token.text in _BANNED:
            found.append(f"{where}: {token.text}; expected {_BANNED[token.text]}")
        is_key = after == ":" and before in ("{", ",")
        is_method = after == "(" and _opens_body(tokens, close, at + 1)
        if token.text not in known and not is_key and not is_method and before != "function":
            found.append(f"{where}: {token.text} is declared nowhere")
    for word, line in _unexported(tokens):
        if uses[word] == 1:
            found.append(f"{name}:{line}: {word} is used nowhere")
    lines = enumerate(text.splitlines(), 1)
    found += [f"{name}:{at}: blank or tab at the end" for at, row in lines if row != row.rstrip()]
    return found


def _partners(tokens: list[_Token]) -> dict[int, int]:
    """Return where each bracket that opens is closed."""
    stack, result = [], {}
    for at, token in enumerate(tokens):
        if token.kind == "sign" and token.text in "([{":
            stack.append(at)
        elif token.kind == "sign" and token.text in ")]}":
            result[stack.pop()] = at
    assert not stack
    return result


def _opens_body(tokens: list[_Token], close: dict[int, int], at: int) -> bool:
    end = close[at] + 1
    return end < len(tokens) and tokens[end].text == "{"


def _names(tokens: list[_Token]) -> set[str]:
    return {token.text for token in tokens if token.kind == "name"}


def _declared(tokens: list[_Token], close: dict[int, int]) -> set[str]:
    """Return names that are declared: by words, imports, and as what functions take."""
    known: set[str] = set()
    for at, token in enumerate(tokens):
        following = tokens[at + 1] if at + 1 < len(tokens) else token
        if token.text in ("const", "let", "class", "function"):
            if following.text in ("{", "["):
                known |= _names(tokens[at + 1 : close[at + 1]])
            else:
                known.add(following.text)
        elif token.text == "import" and following.text == "{":
            known |= _names(tokens[at + 1 : close[at + 1]])
        elif token.text == "(" and at in close:
            end = tokens[close[at] + 1].text if close[at] + 1 < len(tokens) else ""
            word = tokens[at - 1].text if at else ""
            takes = end == "{" and word not in ("if", "for", "while", "switch", "catch")
            if end == "=>" or takes or word == "catch":
                known |= _names(tokens[at + 1 : close[at]])
        elif token.kind == "name" and following.text == "=>":
            known.add(token.text)
    return known


def _unexported(tokens: list[_Token]) -> Iterator[tuple[str, int]]:
    """Yield what a module declares or imports for itself."""
    for at, token in enumerate(tokens[:-1]):
        following = tokens[at + 1]
        if token.text in ("const", "let", "class", "function") and following.kind == "name":
            before = [each.text for each in tokens[max(0, at - 2) : at]]
            if "export" not in before:
                yield following.text, following.line
        elif token.text == "import" and following.text == "{":
            for each in tokens[at + 2 :]:
                if each.text == "}":
                    break
                if each.kind == "name":
                    yield each.text, each.line


def _modules() -> list[Path]:
    return [
        path
        for room in (report, service)
        for path in sorted(Path(str(room.__path__[0])).rglob("static/*.js"))
    ]


@pytest.mark.parametrize("path", _modules(), ids=lambda path: path.name)
def test_modules_pass_the_lint(path: Path) -> None:
    assert lint(path.name, path.read_text(encoding="utf-8")) == []


def test_the_lint_finds_what_a_browser_would_find_on_the_first_click() -> None:
    text = """import { a, b } from "./x.js";
const lost = 1;
export function f(x) {
  if (a == null) return misspelt(x);
  return { key: `${wrong} and ${x.known + `${inner}`}`, run(y) { return /[`"/]/.test(y); } };
}
"""
    found = " ".join(lint("m.js", text))
    for what in ("4: ==", "misspelt is", "wrong is", "inner is", "b is used", "lost is used"):
        assert what in found
    assert found.count("m.js:") == 6
