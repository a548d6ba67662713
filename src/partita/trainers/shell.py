"""The commands of a shell script with their words, found without running anything.

Enough of the language of scripts that start trainers: quotes, comments, lines that a backslash
joins, variables and arrays that the file sets itself (also by default, ``${TP:-2}``), arithmetic
over whole numbers, and commands within a quoted word (``bash -c "..."``). What comes from outside
(arguments, the environment, output of commands) stays as it is written, with its dollar sign.

Nothing is decided: a word that a branch (``if``, ``case``, ``&&``) sets although the variable has
another value, or adds to one, keeps the line of that branch, so that a reader can refuse it.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from partita.errors import FormatError

MAX_TEXT = 200_000
"""Characters of a script, and of what a variable may grow to."""
_MOST_WORDS = 200_000
"""Words of all commands."""
_DEPTH = 4
"""Commands within words of commands, and variables within defaults of variables."""
_NESTED = 16
"""Brackets within brackets of one value."""
_LITERAL = "\ue000"
"""Stands for a dollar sign that is no variable: quoted, or after a backslash."""
_BLANK = "\ue001"
"""Stands for a blank within what is not resolved, which must not divide a word."""
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_BRACED = re.compile(r"(\w+)(?:\[[@*0-9]+\])?(?:(:?[-=])(.*))?", re.DOTALL)
_REDIRECTION = re.compile(r"\d*(?:&>>?|>>?|<<?<?)(.*)")
_OPENS = ("if", "while", "until", "for", "case", "select")
_CLOSES = ("fi", "done", "esac")
_SKIPPED = ("then", "else", "elif", "do", "{", "}", "!", "time", "function", "exec", "env")
_DECLARES = ("export", "declare", "readonly", "local", "typeset")


class Word(NamedTuple):
    """A word of a command.

    Attributes:
        text: Its text, with the values of variables that the script sets.
        line: Where it stands.
        branch: Line of a branch that it depends on; 0 = it does not.
    """

    text: str
    line: int
    branch: int = 0


class _Piece(NamedTuple):
    text: str
    branch: int


@dataclass(frozen=True, slots=True)
class _Token:
    """A word, an array (``words``), or what ends a command (``ends``)."""

    text: str
    line: int
    ends: bool = False
    words: "tuple[_Token, ...] | None" = None


def commands(text: str) -> list[list[Word]]:
    """Return the words of each command of a script; then those of each variable that has flags.

    The variables stand last and count only for a file without commands, such as a list of
    arguments to be sourced.

    Raises:
        FormatError: A quote is not closed, or the script is too large.
    """
    if len(text) > MAX_TEXT:
        raise FormatError(f"a script of {len(text)} characters; expected {MAX_TEXT} at most")
    script = _Script({})
    script.walk(_tokens(text.removeprefix("\ufeff").replace("\r\n", "\n")))
    return script.commands or script.assigned


def _tokens(text: str) -> Iterator[_Token]:
    at, line = 0, 1
    while at < len(text):
        token, at, line = _next(text, at, line)
        if token is not None:
            yield token
    yield _Token("\n", line, ends=True)


def _next(  # noqa: PLR0911 (a kind of token each)
    text: str, at: int, line: int
) -> tuple[_Token | None, int, int]:
    """Return the token at a place, if there is one, and where to go on."""
    here = text[at]
    joined = re.compile(r"\\[ \t]*\n").match(text, at)
    if joined:
        return None, joined.end(), line + 1
    if here == "\n":
        return _Token("\n", line, ends=True), at + 1, line + 1
    if here.isspace():
        return None, at + 1, line
    if here == "#":
        end = text.find("\n", at)
        return None, len(text) if end < 0 else end, line
    if here in ";|()" or (here == "&" and text[at : at + 2] != "&>"):
        double = here * 2 if text.startswith(here * 2, at) and here in ";|&" else here
        return _Token(double, line, ends=True), at + len(double), line
    word, end = _word(text, at, line)
    after = line + text.count("\n", at, end)
    if re.fullmatch(r"[A-Za-z_]\w*\+?=", word) and text.startswith("(", end):
        inner: list[_Token] = []
        end += 1
        while end < len(text) and text[end] != ")":
            token, end, after = _next(text, end, after)
            if token is not None and not token.ends:
                inner.append(token)
        return _Token(word, line, words=tuple(inner)), end + 1, after
    return _Token(word, line), end, after


def _word(text: str, at: int, line: int) -> tuple[str, int]:
    """Return the word at a place without its quotes, and where it ends."""
    start, parts = at, []
    while at < len(text):
        here = text[at]
        if here in "'\"":
            inner, at = _quoted(text, at, line)
            parts.append(inner)
        elif here == "\\":
            if re.compile(r"\\[ \t]*\n").match(text, at):
                break
            parts.append(text[at + 1 : at + 2].replace("$", _LITERAL))
            at += 2
        elif here in "$`":
            end = _end_of_value(text, at)
            parts.append(_as_value(text[at:end]))
            at = end
        elif here.isspace() or here in ";|()" or (here == "&" and text[at - 1 : at] not in "<>"):
            # 2>&1 and &> are one word.
            if not (here == "&" and at == start):
                break
            parts.append(here)
            at += 1
        else:
            parts.append(here)
            at += 1
    return "".join(parts), max(at, start + 1)


def _quoted(text: str, at: int, line: int) -> tuple[str, int]:
    """Return what stands within quotes and where they end."""
    sign = text[at]
    at += 1
    parts: list[str] = []
    while at < len(text) and text[at] != sign:
        here = text[at]
        if sign == "'":
            parts.append(_LITERAL if here == "$" else here)
            at += 1
        elif here == "\\" and text[at + 1 : at + 2] in ("$", '"', "\\", "`", "\n"):
            parts.append(text[at + 1].replace("$", _LITERAL).replace("\n", " "))
            at += 2
        elif here in "$`":
            end = _end_of_value(text, at)
            parts.append(_as_value(text[at:end]))
            at = end
        else:
            parts.append(here)
            at += 1
    if at >= len(text):
        raise FormatError("a quote is not closed", line=line)
    return "".join(parts), at + 1


def _end_of_value(text: str, at: int) -> int:
    """Return where a variable, a sum or a command within a word ends."""
    if text[at] == "`":
        end = text.find("`", at + 1)
        return end + 1 if end > 0 else at + 1
    for opening, closing in (("${", "}"), ("$(", ")")):
        if text.startswith(opening, at):
            depth = 0
            for end in range(at + 1, min(len(text), at + 2000)):
                depth += (text[end] == opening[1]) - (text[end] == closing)
                if not depth:
                    return end + 1
                if depth > _NESTED:
                    break
            return at + 1
    found = re.compile(r"\$(?:[A-Za-z_]\w*|.)?").match(text, at)
    return found.end() if found else at + 1


def _as_value(text: str) -> str:
    """Return a variable, a sum or a command as one word."""
    if text.startswith("`"):
        text = f"$({text.strip('`')})"
    return re.sub(r"\s", _BLANK, text) if text.startswith("$(") else text


class _Script:
    """Variables of a script, and the commands found so far."""

    def __init__(self, variables: Mapping[str, list[_Piece]], depth: int = 0) -> None:
        self._variables = dict(variables)
        self._depth = depth
        self._words = 0
        self._branches: list[int] = []
        self.commands: list[list[Word]] = []
        self.assigned: list[list[Word]] = []

    def walk(self, tokens: Iterable[_Token]) -> None:
        """Take all tokens."""
        held: list[_Token] = []
        after = ""
        for token in tokens:
            if not token.ends:
                held.append(token)
                continue
            if held:
                self._take(held, is_asked=after in ("&&", "||"))
            held, after = [], token.text

    def _take(self, tokens: list[_Token], *, is_asked: bool) -> None:
        """Take a command; ``is_asked`` = another one decides whether it runs."""
        while tokens and tokens[0].words is None:
            first = tokens[0].text
            if first in _OPENS:
                self._branches.append(tokens[0].line)
                if first == "for" and len(tokens) > 1:
                    self._variables.pop(tokens[1].text, None)
                    return
                if first == "case":
                    return
            elif first in _CLOSES:
                self._branches = self._branches[:-1]
            elif first not in _SKIPPED:
                break
            tokens = tokens[1:]
        if not tokens:
            return
        branch = tokens[0].line if is_asked else self._branches[-1] if self._branches else 0
        if tokens[0].text in _DECLARES:
            tokens = [token for token in tokens[1:] if not token.text.startswith("-")]
        while tokens and self._is_assigned(tokens[0], branch):
            tokens = tokens[1:]
        if tokens:
            self._run(tokens)

    def _is_assigned(self, token: _Token, branch: int) -> bool:
        """Set a variable where a token does so, and return whether it does."""
        found = _ASSIGNED.fullmatch(token.text)
        if not found:
            return False
        name, adds, text = found.groups()
        texts = [text] if token.words is None else [word.text for word in token.words]
        value: list[_Piece] = []
        for number, part in enumerate(texts):
            blank = [_Piece(" ", 0)] if number else []
            value += [*blank, *self._expanded(part, branch)]
        before = self._variables.get(name)
        if adds:
            value = [*(before or ()), _Piece(" ", 0), *value]
        elif branch and (before is None or _text(before) == _text(value)):
            # The only value that the file has for it.
            value = before or [_Piece(piece.text, 0) for piece in value]
        if sum(len(piece.text) for piece in value) > MAX_TEXT:
            raise FormatError(f"variable {name[:40]} grows over all bounds", line=token.line)
        self._variables[name] = value
        self.assigned.append(list(_split(value, token.line)))
        return True

    def _run(self, tokens: list[_Token]) -> None:
        words: list[Word] = []
        is_target = False
        for token in tokens:
            away = _REDIRECTION.fullmatch(token.text)
            if is_target or away or token.words is not None:
                is_target = bool(away) and not is_target and not (away and away[1])
                continue
            has_value = "$" in token.text
            pieces = self._expanded(token.text, 0)
            if not has_value and " --" not in token.text and "\n--" not in token.text:
                words.append(Word(_shown(token.text), token.line))
                continue
            if not has_value or (words and words[-1].text in ("-c", "-lc")):
                self._inner(_text(pieces).replace(_LITERAL, "$"), token.line)
                continue
            words += _split(pieces, token.line)
        self._add(words)

    def _add(self, words: list[Word]) -> None:
        self._words += len(words)
        if self._words > _MOST_WORDS:
            raise FormatError(
                f"the commands have more than {_MOST_WORDS} words", line=words[0].line
            )
        self.commands.append(words)

    def _inner(self, text: str, line: int) -> None:
        """Take the commands within a word."""
        if self._depth >= _DEPTH:
            return
        script = _Script(self._variables, self._depth + 1)
        script.walk(_tokens(text))
        for command in script.commands:
            self._add([word._replace(line=line) for word in command])

    def _expanded(self, text: str, branch: int, depth: int = 0) -> list[_Piece]:
        """Return a text with the values of variables that the script itself sets."""
        pieces: list[_Piece] = []
        at = 0
        while at < len(text):
            start = text.find("$", at)
            if start < 0:
                start = len(text)
            if start > at:
                pieces.append(_Piece(text[at:start], branch))
            if start == len(text):
                break
            end = _end_of_value(text, start)
            pieces += self._value(text[start:end], branch, depth)
            at = max(end, start + 1)
        return pieces

    def _value(self, text: str, branch: int, depth: int) -> list[_Piece]:
        """Return the value of a variable or of a sum; one from outside stays as it is written."""
        unknown = [_Piece(text, branch)]
        if text.startswith("$((") and text.endswith("))"):
            return self._sum(text[3:-2], branch) or unknown
        if text.startswith(f"$(expr{_BLANK}"):
            return self._sum(text[7:-1].replace("\\", ""), branch) or unknown
        inner = text[2:-1] if text.startswith("${") and text.endswith("}") else text[1:]
        found = _BRACED.fullmatch(inner)
        if not found:
            return unknown
        name, sign, usual = found.groups()
        if name in self._variables:
            return self._variables[name]
        if sign is None or depth >= _DEPTH:
            return unknown
        value = self._expanded(usual, branch, depth + 1)
        if sign.endswith("="):
            self._variables[name] = value
        return value

    def _sum(self, text: str, branch: int) -> list[_Piece] | None:
        """Return the value of arithmetic over whole numbers; None = a variable is not set."""
        from_branch = branch

        def number(found: re.Match[str]) -> str:
            nonlocal from_branch
            pieces = self._variables.get(found[1])
            from_branch = from_branch or max((p.branch for p in pieces or ()), default=0)
            value = _text(pieces or []).strip()
            return value if re.fullmatch(r"[0-9]{1,9}", value) else "?"

        plain = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\b\}?", number, text.replace(_BLANK, " "))
        value = _computed(plain)
        return None if value is None else [_Piece(str(value), from_branch)]


def _computed(text: str) -> int | None:
    """Return the value of a sum of whole numbers; None = it is none.

    >>> _computed("2 + 3 * (4 - 1) / 2")
    6
    """
    if not re.fullmatch(r"[0-9+\-*/%() ]{1,200}", text) or "**" in text or "//" in text:
        return None
    try:
        return _evaluated(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError, RecursionError, ValueError):
        return None


def _evaluated(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluated(node.operand)
    if not isinstance(node, ast.BinOp):
        raise ValueError(ast.dump(node)[:40])
    left, right = _evaluated(node.left), _evaluated(node.right)
    if isinstance(node.op, ast.Add):
        return left + right
    if isinstance(node.op, ast.Sub):
        return left - right
    if isinstance(node.op, ast.Mult):
        return left * right
    # The shell rounds towards zero.
    quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
    return quotient if isinstance(node.op, ast.Div) else left - right * quotient


def _text(pieces: Iterable[_Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def _shown(text: str) -> str:
    return text.replace(_LITERAL, "$").replace(_BLANK, " ")


def _split(pieces: Iterable[_Piece], line: int) -> Iterator[Word]:
    """Yield the words of a value; one that a branch wrote a part of depends on it."""
    text, branch = "", 0
    for piece in pieces:
        for part in re.split(r"([ \t\n]+)", piece.text):
            if part and part.isspace():
                if text:
                    yield Word(_shown(text), line, branch)
                text, branch = "", 0
            elif part:
                text, branch = text + part, branch or piece.branch
    if text:
        yield Word(_shown(text), line, branch)
