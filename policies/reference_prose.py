"""What the policy reference says in sentences: introductions, words of answers, and what happens by itself.

Everything that has a table of its own elsewhere is taken from there; a point, a word or a limit that is added
there and has no text here stops the reference from being made.
"""

from __future__ import annotations

from collections.abc import Mapping

from muxk.policies.names import Often
from muxk.policies.rules import OnError
from muxk.policies.splits import Word

TITLE = """\
# Policy reference

<!-- Made by `make reference` from the tables that muxk reads policies with. What is edited here is lost. -->

Everything that a policy and a test of a policy can say, to look up. If this is the first page that you
read, read [policy-language.md](policy-language.md) or the [tutorial](tutorial.md) instead."""

DOCUMENT = """\
A policy is one YAML document. A file may hold several, with `---` between them, and tests among them. YAML
is read by the rules of YAML 1.2: `on` and `no` are words, `1:30` is no number. A key that is written twice,
an anchor or an alias, and a tag are mistakes, so an expression that starts with `!`, `&` or `*` needs
quotes. So does one that holds a comma inside `{ }`.

```yaml
apiVersion: muxk/v1beta1
kind: SchedulingPolicy
metadata: {name: mine, version: "1.2", description: muxwise with a tighter SLO}
spec:
  extends: muxwise
  slo: {tbt: 50ms}
```"""

SPEC = """\
All sections are optional. A section that a policy leaves out comes from the policy that it `extends`, in
the end from `defaults`, which is shown with each section below. Some sections are taken over key by key, so
that `limits: {queue: 64}` changes one limit; all others are replaced as a whole."""

SLO = """\
What is wanted. `tbt` is the longest time between two tokens of a request, and rules read it as `slo.tbt`.
`ttft` is the longest time from a request's arrival to its first token: a time, a time per prompt token, or
the sum of both. It makes the `deadline` of a request. `tbt` may be computed from `params`; `ttft` is
literal.

```yaml
slo: {tbt: 50ms, ttft: 500ms + 10ms/token}
```"""

PARAMS = """\
Values that whoever runs the policy may change: `muxk run mine.yaml --set burst=2`. Rules read them as
`params.burst`. They are constants: changing one means swapping the policy.

```yaml
params:
  burst: {type: number, default: 1.5, min: 1, max: 4, description: how far decode may overshoot}
  patience: {type: duration, default: 2s}
```"""

VARIABLES = """\
Expressions with a name, which rules read as `vars.pressure`. A variable may use `params`, names of decision
points, and variables above it. It is put in where it is used, as if it stood there in parentheses: it has a
value only where all of its names are known, it costs as much at each use, and it fails where it would.

```yaml
variables:
  pressure: 1 - kv.free / kv.total
  crowded: vars.pressure > 90% or queue.requests > 100
admit:
  - {name: full, when: vars.crowded, then: {shed: the pool is nearly full}}
  - {name: otherwise, then: accept}
```"""

CLASSES = """\
Every request is in one class: the first whose `when` holds. The last class has no `when` and takes the
rest. A policy without this section has one class, `default`. A class whose condition fails does not match.

```yaml
classes:
  - name: interactive
    when: request.class == 'chat' and request.prompt_tokens < 4k
    slo: {tbt: 30ms}
    share: 3
  - {name: batch, share: 1, max_wait: 60s}
```

- In the conditions of classes, `request.class` is what the client named, `''` when it named none.
  Everywhere else it is the class that the policy chose. There a name in quotes must be a class of this
  policy.
- `slo`: what a class does not say is the policy's. Where decode is decided, `slo.tbt` is the tightest TBT
  SLO of the requests that decode at that time.
- `share` weighs the prefill tokens of classes that compete: with 3 and 1, the first gets three tokens where
  the second gets one. A class with nothing to do leaves its part to the others and saves nothing up. If no
  class has a share nothing is weighed; if some have, the others have 1.
- `max_wait`: a request that waited longer goes before all others, of whatever class."""

LIMITS = """\
Bounds that the kernel keeps whatever the rules say. A limit may be computed from `params`.

```yaml
limits: {queue: 256, parked: 512MiB, decode_floor: 500ms}
```"""

ESTIMATOR = """\
How decode steps are predicted. `estimate.decode` is the time of a step alone times a factor, so that a rule
which keeps it within `slo.tbt` keeps the SLO. `guard` chooses the factor.

```yaml
estimator: {guard: worst_case}
```

A profile is what `muxk profile` measured on this device and model. `worst_case` without one is `quantile`,
and `muxk state` says so: a largest slowdown that nobody measured would be a guess."""

GUARDS: Mapping[str, str] = {
    "quantile": "What 95 % of the recent steps on so many units kept, alone or beside a prefill. It needs no "
    "profile, follows the load, and forgets.",
    "worst_case": "The largest slowdown measured beside such a prefill: for each cell of its new and reused "
    "tokens, the batch, its context and the units of decode. It is raised by what is seen while serving, and "
    "never lowered. It needs a profile.",
}

ON_ERROR = """\
A rule fails when it divides by zero, overflows, or reads a batch or an estimate that is not there. The
failure is counted and shown in `muxk state`, and `on_error` says who answers. Nothing that a policy
computes stops serving. A sort key that fails gives the order of arrival."""

RULES = """\
A decision point holds a list of rules. The first whose `when` holds gives its `then` as the answer. The
last rule has no `when`: it is the catch-all. A point with one answer needs no list: `preempt: continue`. A
list may end in `base` instead, and then goes on with the rules of the policy that this one extends:

```yaml
extends: muxwise
preempt:
  - {name: never-a-long-one, when: candidate.new_tokens >= 4k, then: continue}
  - base
```"""

POINTS = """\
The scheduler asks these questions, and no others. What a point may name depends on how often it is asked:
nothing that is asked at each step can look at every waiting request."""

OFTEN: Mapping[Often, str] = {
    Often.ONCE: "once, when the policy is compiled",
    Often.REQUEST: "each request",
    Often.BATCH: "each batch",
    Often.STEP: "each step",
}

POINT_TEXTS: Mapping[str, str] = {
    "admit": """\
`refuse` tells the client that asking again is useless, `shed` that it is not. Both may give a reason for
the client: `{refuse: prompts over 8k are not served here}`. A policy that restates `admit` should keep the
two rules that `defaults` has: the kernel refuses what can never fit and what is over `limits.queue` anyway,
with words of its own.""",
    "order": """\
Up to 8 expressions to sort by, ascending; `-` before a whole key makes it descending. Requests that are
equal in all keys keep the order in which they came. Classes with shares and `max_wait` have their say after
the keys: see [classes](#classes).

```yaml
order: {by: [class.rank, request.deadline, -request.priority]}
```""",
    "form": """\
Requests are taken from the head of the queue while both bounds hold. The head is always taken, however long
it is. Numbers are rounded up.

```yaml
form: {requests: 8, tokens: "max(512, head.prompt_tokens)"}
```""",
    "split": """\
A split gives units to decode and to prefill. A phase that is left out gets none. Every answer becomes a
split that the device offers: numbers are rounded up, where both phases have one that of decode counts, and
a disjoint answer on a device that can not be split means `{decode: all, prefill: all}`. That shares the
whole device in time, decode first.

```yaml
split:
  - {name: decode-only, when: not prefill.pending and prefill.in_flight == 0, then: {decode: all}}
  - {name: cold-start, when: not estimate.known, then: {decode: 50%, prefill: rest}}
  - name: half-of-the-slo
    then:
      decode: fewest where estimate.decode(units) <= slo.tbt / 2
      prefill: rest
      otherwise: {decode: most, prefill: rest}
```""",
    "slice": """\
`{layers: n}` runs n layers of all tokens that are left, rounded up. `{tokens: n}` runs a chunk of n tokens
through all layers, rounded down. `{layers: n, tokens: m}` runs n layers of a chunk of m. Both are at least
1, `all` is all that is left, and a chunk that was begun is finished before the next. `{tokens: n, fuse:
decode}` runs the chunk and a decode step in one pass; while requests decode, prefill then runs in no other
way.

```yaml
slice:
  - {name: alone, when: decode.batch == 0, then: {layers: all}}
  - {name: beside-decode, then: {tokens: 256 - decode.batch, fuse: decode}}
```""",
    "preempt": """\
`park` sets the running batch aside between two layers and starts the candidate; the parked batch goes on
later where it stopped and loses no work. One batch can be parked at a time. `limits.preemptions` and
`limits.parked` hold whatever the rules say.

```yaml
preempt:
  - {name: short-first, when: candidate.new_tokens < 1k and running.depth == 0, then: park}
  - {name: otherwise, then: continue}
```""",
    "victim": """\
The same answer as `order`. The first request of the sorted list loses its pages and is computed again
later. Classes have no say here, but keys may name `class.rank`.

```yaml
victim: {by: [-class.rank, -request.arrival]}
```""",
    "retain": """\
Pages that are kept serve later requests with the same prefix, and are given up when others need them.

```yaml
classes:
  - {name: batch, when: request.class == 'batch'}
  - {name: rest}
retain:
  - {name: one-off, when: request.class == 'batch', then: free}
  - {name: otherwise, then: keep}
```""",
}
"""By decision point."""

FALLBACKS: Mapping[str, str] = {
    "admit": "refuse what can never fit, shed over `limits.queue`, accept the rest",
    "order": "by arrival",
    "form": "one request",
    "split": "share the device in time",
    "slice": "one layer",
    "preempt": "continue",
    "victim": "who came last",
    "retain": "keep",
}
"""The built-in answer of a point whose rules fail."""

WORDS: Mapping[str, str] = {
    Word.NUMBER: "so many units; a percentage is a share of `units.total`",
    Word.ALL: "all units; for both phases: the device is shared in time",
    Word.REST: "what the other phase leaves",
    Word.NONE: "nothing, as if the phase were left out",
    Word.MOST: "the most units that a split offers",
    Word.FASTEST: "the units with the shortest estimated decode step; of decode only",
    "fewest where": "the fewest units for which the condition after it holds; it may name `units`, the units "
    "tried. Needs `otherwise`",
    "fit": "the fewest units on which a decode step keeps `slo.tbt` by its estimate; of decode only. "
    "Needs `otherwise`",
}
"""Units of a split, by word."""

ANSWER_WORDS: Mapping[str, str] = {
    "accept": "the request waits for prefill",
    "refuse": "it can never be served; the client gets the reason",
    "shed": "not now; the client gets the reason and may retry",
    "park": "set the running batch aside and start the candidate",
    "continue": "let the running batch go on",
    "keep": "for requests with the same prefix",
    "free": "give the pages back at once",
}

ON_ERRORS: Mapping[OnError, str] = {
    OnError.DEFAULT: "the built-in answer of the point",
    OnError.NEXT: "the next rule that matches: a rule that fails counts as one that does not match",
    OnError.BASE: "the rules of the policy that this one extends",
}

EXPRESSIONS = """\
Expressions look like Python's: `and or not` (also `&& || !`), comparisons, which may be chained (`0 < a <=
b`), `+ - * / // %`, `a if c else b`, parentheses, and the functions below. There are no attributes,
strings, loops or powers. Every expression has a static type, and a mistake is told before the policy runs.
A remainder needs a space before its sign, as in `7 % 3`: `7%` is a percentage."""

TYPES = """\
Types do not mix by themselves: a time needs its unit, and comparing a size with a number is a mistake. A
percentage is a number wherever it is computed with or compared, but where a count is wanted (tokens,
requests, layers) it is a mistake. A moment is a point in time: the difference of two is a duration."""

TYPE_TEXTS: Mapping[str, str] = {
    "number": "`8`, `0.5`, `16k`",
    "duration": "`50ms`, `1.5s`",
    "moment": "no literal; `now`, `request.arrival`",
    "size": "`512kB`, `4GiB`",
    "percent": "`90%`, which is 0.9",
    "bool": "`true`, `false`",
    "name": "`'interactive'` or `\"interactive\"`; knows `==` and `!=` only",
}

FUNCTIONS = """\
The functions of the first table can be called everywhere, with arguments of one type. Estimates, in the
second table, have no value until something was measured, which `estimate.known` tells: a rule before them
should say what to do until then."""

NAMES = """\
Each name has a value in some places only. A name that stands in another place is a mistake, which says
where it is known."""

COSTS = """\
An expression has a cost that is bounded: a name or an operator costs 1, a function of an estimate what the
table says."""

TESTS = """\
`muxk test` runs a policy in virtual time, on a simulated device of given costs. It needs no server and no
model, and the same test gives the same figures on every machine. Tests of `mine.yaml` stand in
`mine.test.yaml`, or in the same file after a line `---`.

```yaml
apiVersion: muxk/v1beta1
kind: PolicyTest
metadata: {name: mine, description: Nobody waits for a long prompt}
spec:
  policy: muxwise
  arrivals:
    - {name: chat, count: 8, prompt: 100, output: 200}
    - {name: long, at: 500ms, prompt: 8k, output: 10}
  expect:
    - {for: chat, that: tbt.late == 0, because: people read along}
    - {at: 900ms, that: decode.batch == 8}
    - {rule: split/best-fit, that: hits > 0}
    - finished == 9 and errors == 0
```"""

DEVICE = """\
All of it is optional. Costs are those of the whole device; prefill takes longer on fewer units in
proportion, and so does decode below its saturation. Several devices have a KV pool each, and links between
them. Those that work together share a prefill out, and of a decode step all but its base."""

ARRIVALS = """\
Each row is a group of requests. A range, such as `100 to 4k`, is drawn evenly for each request from `seed`.
Requests of the group `chat` are `chat-1`, `chat-2` and so on."""

EXPECTATIONS = """\
An expectation is an expression that must be true. Written alone it is about all requests and the whole run.
`for` and `class` choose requests, `at` a moment, `rule` a rule; these do not go together. Figures over
nothing have no value: the expectation fails and says so."""

EXPECTED: Mapping[str, str] = {
    "an expectation": "Of requests and of the run",
    "an expectation with 'at'": "At a moment (`at`)",
    "an expectation with 'rule'": "Of a rule (`rule`)",
}

BOUNDS = """\
A file is read within bounds, so that none can stop a server that swaps to it."""
