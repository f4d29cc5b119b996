"""Known ways out of expression sandboxes and YAML loaders: each is refused with a place, and quickly.

Nothing that a policy says is ever executed as Python, imported, opened or looked up by name at run time; the
tests at the end see to that with the interpreter's audit events.
"""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from muxk.policies.engine import compile_policy, load_policy, shipped_policies
from muxk.policies.expressions import compile_expression
from muxk.policies.marks import Scalar, Style
from muxk.policies.names import PLACES, vocabulary
from muxk.policies.problems import PolicyError, Problem, Report, Source
from muxk.policies.schema import API_VERSION, KIND
from muxk.policies.units import Type

HEAD = f"apiVersion: {API_VERSION}\nkind: {KIND}\nmetadata: {{name: sandbox}}\nspec:\n"
ATTRIBUTES = (
    "().__class__", "().__class__.__bases__[0].__subclasses__()", "now.__class__", "now.real",
    "decode.__class__", "decode.batch.__class__.__mro__", "decode.batch.bit_length()",
    "estimate.decode.__globals__", "estimate.decode.__code__.co_consts", "estimate.__self__",
    "running.__init__.__globals__", "kv.free.__doc__", "running.__struct_fields__", "slo.tbt.__add__",
    "params.__dict__", "vars.__class__", "view", "view.estimates", "scope.view", "now.imag", "1 .__class__",
    "1.0.hex()", "true.__class__", "'a'.__class__", "'a'.upper()", "(now).real", "min.__self__",
    "min.__self__.eval('1')", "abs.__name__", "not.real", "n0", "n1.real",
)  # fmt: skip
FRAMES = (
    "(x for x in (1,)).gi_frame", "(x for x in (1,)).gi_frame.f_back.f_globals", "[x for x in (1, 2)]",
    "{x: 1 for x in (1,)}", "{x for x in (1,)}", "(lambda: (yield))().gi_frame", "(yield)", "yield now",
    "await now", "async now", "(await now).cr_frame", "now.gi_code", "estimate.decode.gi_frame",
    "now.__traceback__.tb_frame",
)  # fmt: skip
FORMATS = (
    "'{0.__class__}'.format(1)", "'{}'.format_map(now)", "'%s' % now", "'%(a)s' % 1", "f'{now}'",
    "f'{now.real}'", "f'{now!r:>{now}}'", "rf'x'", "b'x'", "u'x' == u'x'", "t'{now}'", "'a'.join('b')",
    "str(now)", "repr(now)", "ascii(1)", "'a' 'b'", "'a' + 'b'", "'a' < 'b'", "'''now'''", '"""now"""',
    "'a\\x00' == 1", "'a\\\n'", "format(now, 'x')",
)  # fmt: skip
DUNDERS = (
    "__import__('os')", "__import__", "__builtins__", "__name__", "__file__", "__debug__", "__class__",
    "__loader__", "__spec__", "_", "__", "self", "cls", "Ellipsis", "...", "None", "NotImplemented",
    "__builtins__.eval", "__builtins__['eval']('1')", "getattr(now, 'real')", "setattr(now, 'a', 1)",
    "delattr(now, 'a')", "hasattr(now, 'a')", "globals()", "locals()", "vars()", "vars(now)", "dir()",
    "type(now)", "object()", "super()", "eval('1')", "exec('1')", "compile('1', '', 'eval')",
    "open('/etc/passwd')", "input()", "print(1)", "breakpoint()", "help()", "exit()", "quit()",
    "memoryview(1)", "bytes(9)", "bytearray(9)", "range(9)", "list(1)", "map(abs, now)", "id(now)",
    "sum(1, 2)", "int(now)", "pow(9, 9)", "round(now)", "hash(now)", "iter(now)", "next(now)",
    "classmethod(now)",
)  # fmt: skip
POWERS = (
    "9**9**9**9", "2 ** 2", "now ** 2", "-2 ** 2", "2 **= 2", "1 << 1000000", "1 >> 1", "1 | 2", "1 & 2",
    "1 ^ 2", "~1", "'a' * 1000000000", "1000000000 * 'a'", "'a' * 2", "(1,) * 9", "[0] * 9",
    "1e308 * 1e308", "1e999", "1e309ms", "9" * 5000, "9" * 400 + " % 2 == 0", "0." + "0" * 5000 + "1",
    "1e-99999999999", "9e" + "9" * 300, "1" * 3000 + "ms", "1_000", "1__0", "0x10", "0o7", "0b1", "1j",
    "1.e", "1.2.3", "1e5e5", "5parsecs", "1L", "0xFFms",
)  # fmt: skip
SYNTAX = (
    "lambda: 1", "lambda x: x", "(lambda: 1)()", "now := 1", "(now := 1)", "now = 1", "now == 1; now",
    "now, now", "(now, now)", "()", "[]", "{}", "[now]", "{now}", "{now: 1}", "now[0]", "now[0:1]",
    "now[::]", "min(*now)", "min(**now)", "min(a=1, b=2)", "min(1, *())", "abs", "abs()", "abs(1)(2)",
    "(abs)(1)", "min", "min(1 for x in now)", "now()", "estimate.decode", "estimate.decode(1)(2)",
    "import os", "from os import path", "import('os')", "del now", "pass", "return 1", "raise now",
    "assert now", "global now", "with now", "while 1", "for x in now", "if now", "else", "1 if", "1 if now",
    "def f()", "class A", "try", "match now", "print now", "@now", "now@now", "now @ 1", "now -> 1", "now?",
    "now ? 1 : 2", "`now`", "$now", "now # comment", "# comment", "now\nnow", "now\\\nnow", "\\N{BULLET}",
    "is now", "now is now", "now in now", "1 in (1,)", "not in now", "now <> now", "now !== now",
    "now === now", "=now", "&now", "|",
)  # fmt: skip
UNICODE = (
    "\uff4eow == now", "__\uff43lass__", "\ufb01t", "de\u0441ode.batch > 1", "\u1d49val('1')",
    "\U0001d4c3ow", "\uff11 + 1", "now \uff1d= now", "now\u200b == now", "now == \u200dnow",
    "now\u00a0\u2003== now", "now\u2028== now", "now == now\u0085", "\u0663 == 3", "\u00b2 == 2",
    "1 \u2264 2", "now\u0301 == now", "\u00aa", "\u2118", "estimate\u2024decode(1)", "\u201cnow\u201d",
    "\u2018now\u2019 == 'now'", "now \u2212 now", "1\u00d72", "1\u2044 2", "\u037e", "\U000e0001now",
    "\ue000", "\U0010ffff", "\ufffd",
)  # fmt: skip
DEEP = (
    "(" * 5000 + "1" + ")" * 5000, "(" * 33 + "1" + ")" * 33, "-" * 5000 + "1", "- " * 900 + "1",
    "!" * 1500 + "true", "not " * 490 + "true", "min(1, " * 300 + "1" + ")" * 300, "a" + ".a" * 1500,
    "now == " * 250 + "now", "1 if true else " * 130 + "1", "1 + " * 900 + "1", "1 +" * 500 + "1",
    "true and (" * 200 + "true" + ")" * 200, "+" * 1000 + "1", "now." * 400 + "now",
    "estimate.chunk(1, 1s) + " * 10 + "1", "estimate.decode(" * 30 + "1" + ")" * 30,
)  # fmt: skip
EXPRESSIONS = ATTRIBUTES + FRAMES + FORMATS + DUNDERS + POWERS + SYNTAX + UNICODE + DEEP
QUICK_S = 1.0


def yaml_quoted(text: str) -> str:
    """In double quotes every character can be written by its code, whatever YAML thinks of it."""
    return json.dumps(text, ensure_ascii=not any(ord(one) > 0xFFFF for one in text))


def refused(text: str, filename: str = "sandbox.yaml") -> tuple[Problem, ...]:
    gc.disable()  # over what all tests of the process hold, which is no time of the loader's
    try:
        start = time.thread_time()
        with pytest.raises(PolicyError) as error:
            compile_policy(text, filename)
        took_s = time.thread_time() - start
    finally:
        gc.enable()
    assert took_s < QUICK_S
    return error.value.problems


@pytest.mark.parametrize("expression", EXPRESSIONS, ids=lambda text: ascii(text[:30]))
def test_an_expression_that_is_known_to_escape_is_refused_at_its_place(expression: str) -> None:
    line = f"    - {{name: escape, when: {yaml_quoted(expression)}, then: {{layers: 1}}}}"
    problems = refused(f"{HEAD}  slice:\n{line}\n    - {{name: last, then: {{layers: 1}}}}\n")
    assert {problem.line for problem in problems} == {6}
    for problem in problems:
        assert problem.file == "sandbox.yaml"
        assert line.index("when: ") < problem.column <= len(line)
        assert len(problem.message) < 300
        assert problem.message.isprintable()


def test_it_is_not_refused_for_its_type_alone() -> None:
    """Where a value of any type would do, only a number that is 0 in the end is left."""
    taken = []
    for text in EXPRESSIONS:
        scalar = Scalar(text, Style.PLAIN, Source("p", text).mark(0), 0, len(text))
        if compile_expression(scalar, Type.ANY, vocabulary("slice", {}), Report()) is not None:
            taken.append(text)
    assert taken == ["1e-99999999999"]


@pytest.mark.parametrize("place", sorted(PLACES))
@pytest.mark.parametrize(
    "expression", ["().__class__", "__import__('os')", "'a' * 9", "9**9**9", "now.real", "f'{1}'"]
)
def test_no_place_of_the_language_takes_an_escape(place: str, expression: str) -> None:
    quoted, fewest = yaml_quoted(expression), yaml_quoted(f"fewest where {expression}")
    sections = {
        "classes": f"classes: [{{name: a, when: {quoted}}}, {{name: b}}]",
        "a class": f"classes: [{{name: a, share: {quoted}}}]",
        "limits": f"limits: {{queue: {quoted}}}",
        "slo": f"slo: {{tbt: {quoted}, ttft: {quoted}}}",
        "form": f"form: {{requests: {quoted}, tokens: {quoted}}}",
        "split": f"split: {{decode: {quoted}, prefill: rest}}",
        "fewest": f"split: {{decode: {fewest}, prefill: rest, otherwise: {{decode: all}}}}",
        "a key of order": f"order: {{by: {quoted}}}",
        "a key of victim": f"victim: {{by: {quoted}}}",
    }
    section = sections.get(place, f"{place}: [{{name: a, when: {quoted}, then: x}}, {{name: b, then: x}}]")
    problems = refused(f"{HEAD}  {section}\n")
    assert {problem.line for problem in problems} == {5}
    text = f"{HEAD}  variables: {{v: {quoted}}}\n  params: {{p: {{type: number, default: {quoted}}}}}\n"
    assert {problem.line for problem in refused(text)} == {5, 6}


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
FILES: tuple[tuple[str, str], ...] = (
    ("!!python/object/apply:os.system ['true']", "tags are not allowed"),
    ("spec: !!python/name:os.system x", "tags are not allowed"),
    ("spec: !!python/object/new:os.system [x]", "tags are not allowed"),
    ("spec: !!binary aGk=", "tags are not allowed"),
    ("spec: !ruby/object x", "tags are not allowed"),
    ("spec: !<tag:yaml.org,2002:python/none> x", "tags are not allowed"),
    ("%TAG ! tag:yaml.org,2002:python/\n---\nspec: !none x", "tags are not allowed"),
    (LAUGHS, "are not allowed"),
    ("a: &a [*a]", "are not allowed"),
    ("a: *nobody", "aliases are not allowed"),
    ("base: &b {x: 1}\nspec: {<<: *b}", "are not allowed"),
    ("spec: {<<: {extends: muxwise}}", "unknown key '<<'"),
    ("? [a, b]\n: c", "a key must be a word"),
    ("? {a: b}\n: c", "a key must be a word"),
    ("spec: {a: 1, a: 2}", "duplicate key 'a'"),
    ("[" * 5000, "nested"),
    ("{a: " * 5000, "nested"),
    ("- " * 5000, "nested"),
    ("a: " + "[" * 33 + "]" * 33, "nested"),
    ("a: [" + "x, " * 30_000 + "]", "nodes"),
    ("a: " + "x" * 2_000_000, "larger than"),
    ("a: b\x00c", "does not allow"),
    ("a: \x1b[31mred", "does not allow"),
    ("a: \ud800", "does not allow"),
    ("a: \ufffe", "does not allow"),
    ('a: "\\ud800"', ""),
    ('a: "\\UFFFFFFFF"', "not valid YAML"),
    ("# \u202egnillac fo rule\na: b", "changes the direction"),
    ("a: b \u2066# c\u2069", "changes the direction"),
    ("a: b\u200f", "changes the direction"),
    ("a: b\n---\nc: d", "one document"),
    ("a:\tb\n\tc: d", ""),
    ("%YAML 9.9\n---\na: b", ""),
    ("", "empty"),
    ("---\n...\n", ""),
    ("x", ""),
    ("'", ""),
    ("|", ""),
    ("!", ""),
    ("&", ""),
    ("a: @b", ""),
    ("a: `b`", ""),
    ("a: on\nb: 1:30\nc: 017", "unknown key"),
)  # fmt: skip


@pytest.mark.parametrize(("text", "complaint"), FILES, ids=lambda text: ascii(text[:24]))
def test_a_file_that_attacks_the_loader_is_refused_at_its_place(text: str, complaint: str) -> None:
    problems = refused(text)
    lines = text.replace("\r", "\n").split("\n")
    assert any(complaint in problem.message for problem in problems), problems
    for problem in problems:
        assert 1 <= problem.line <= len(lines)
        assert 1 <= problem.column <= len(lines[problem.line - 1]) + 1
        assert problem.message.isprintable()


@pytest.mark.parametrize(
    "content", [b"\xff\xfea\x00", b"a: \xc0\xaf", b"\x80", b"a: \xed\xa0\x80", "a: é".encode("latin-1")]
)
def test_a_file_that_is_not_utf8_is_refused_with_its_name(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bytes.yaml"
    path.write_bytes(content)
    with pytest.raises(PolicyError, match=r"bytes\.yaml.*not UTF-8"):
        load_policy(path)


# --- what runs: nothing but closures over what the language declares ---

BANNED = (
    "eval",
    "exec",
    "compile",
    "open",
    "__import__",
    "globals",
    "locals",
    "vars",
    "setattr",
    "delattr",
    "input",
)
LIBRARIES = ("builtins", "operator", "math", "functools")
RICH = f"""{HEAD}
  extends: muxwise
  params: {{burst: {{type: number, default: 1.5}}}}
  variables: {{pressure: "1 - kv.free / max(1, kv.total)"}}
  classes:
    - {{name: gold, when: "request.class == 'gold' and request.priority < 1", share: 2, slo: {{tbt: 20ms}}}}
    - {{name: rest, max_wait: 5s}}
  admit:
    - {{name: a, when: vars.pressure > 90% or class.requests > 10 * params.burst, then: {{shed: full}}}}
    - {{name: b, then: accept}}
  order: {{by: [class.rank, request.slack, -request.prompt_tokens]}}
  form: {{requests: "clamp(8, 1, 16) if decode.batch > 0 else 4", tokens: "floor(512 * params.burst)"}}
  victim: {{by: "-request.age"}}
"""


@cache
def policies() -> tuple[Any, ...]:
    return (compile_policy(RICH), *(load_policy(name) for name in shipped_policies()))


def reachable_functions(policy: Any) -> Iterator[Any]:
    """Functions that a compiled policy may call: those of its rules, and what their closures hold."""
    todo = [
        part for point in policy.points.values() for rule in point.rules for part in (rule.when, rule.then)
    ]
    todo += [point.fallback for point in policy.points.values()]
    seen: set[int] = set()
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, tuple | list):
            todo += one
        elif hasattr(one, "runs"):
            todo += one.runs
        elif hasattr(one, "__code__"):
            yield one
            todo += [cell.cell_contents for cell in one.__closure__ or ()]
        elif callable(one):
            yield one


def test_closures_of_compiled_policies_name_nothing_that_runs_code() -> None:
    found = [function for policy in policies() for function in reachable_functions(policy)]
    assert len(found) > 100
    for function in found:
        module = getattr(function, "__module__", None) or type(function).__module__
        assert module.startswith("muxk.policies.") or module in LIBRARIES, function
        if hasattr(function, "__code__"):
            names = (*function.__code__.co_names, *function.__code__.co_varnames)
            assert not [name for name in names if name in (*BANNED, "getattr") or name.startswith("__")]


AUDITED = """
import json, re, sys
from random import Random
sys.path.insert(0, sys.argv[1])
from muxk.policies.engine import compile_policy
from muxk.policies.problems import PolicyError
from policy_views import ViewMaker, ask_everything
texts, expressions, head = json.load(sys.stdin)
events, watching = [], False
def hook(event, arguments):
    if watching:
        first = arguments[0] if arguments else ""
        events.append((event, first.decode("latin-1") if isinstance(first, bytes) else str(first)))
sys.addaudithook(hook)
ask_everything(compile_policy(texts[0]), ViewMaker(Random(0), True))  # whatever is imported late
watching = True
compiled = [compile_policy(text) for text in texts]
refused = 0
for expression in expressions:
    try:
        quoted = json.dumps(expression, ensure_ascii=True)
        rule = "{name: a, when: " + quoted + ", then: keep}"
        compile_policy(head + f"  retain: [{rule}, {{name: b, then: keep}}]")
    except PolicyError:
        refused += 1
watching = False
compiling = list(events)
events.clear()
for policy in compiled:
    for seed in range(20):
        maker = ViewMaker(Random(seed), seed % 2 == 0)
        watching = True
        ask_everything(policy, maker)
        watching = False
print(json.dumps({"compiling": compiling, "answering": events, "refused": refused}))
"""


def test_compiling_runs_no_code_of_a_policy_and_answering_runs_none_at_all() -> None:
    """The only event is `ast.parse` of a text in which every word of the user is a placeholder."""
    tests = str(Path(__file__).parents[1])
    shipped = [
        Path(__file__).parents[2].joinpath(f"policies/{name}.yaml").read_text("utf-8")
        for name in shipped_policies()
    ]
    stdin = json.dumps([[RICH, *shipped], EXPRESSIONS, HEAD])
    command = [sys.executable, "-c", AUDITED, tests]
    ran = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    heard = json.loads(ran.stdout)
    assert heard["refused"] == len(EXPRESSIONS)
    assert heard["answering"] == []
    words = re.compile(r"n[0-9]+|and|or|not|if|else|[-+*/%<>=!~(), ]")
    assert heard["compiling"], "the hook hears ast.parse"
    for event, argument in heard["compiling"]:
        assert event == "compile", (event, argument)
        assert words.sub("", argument) == "", argument


def test_the_audit_would_hear_code_that_runs() -> None:
    code = AUDITED.replace(
        "ask_everything(policy, maker)", "eval('1'); open('/dev/null').close(); import colorsys"
    )
    stdin = json.dumps([[RICH], [], HEAD])
    command = [sys.executable, "-c", code, str(Path(__file__).parents[1])]
    ran = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    assert {"compile", "exec", "open", "import"} <= {
        event for event, _ in json.loads(ran.stdout)["answering"]
    }
