"""Policies by name: those that ship, and those of other packages, found through the same entry points.

A name belongs to one distribution. Who shadows a shipped name or another's is named in the error, and no
policy is run in the place of another. A checkout whose metadata is older than the code, or has none, still
finds what ships.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

from muxk.kernel.policy import Policy
from muxk.policies import shipped
from muxk.policies.answer_checks import WrongAnswer, described, in_words
from muxk.policies.api import API_VERSION, ENTRY_POINT_GROUP, BasePolicy, YamlPolicy
from muxk.policies.engine import CompiledPolicy, compile_policy, load_policy, shipped_policies
from muxk.policies.guarded import GuardedPolicy
from muxk.policies.problems import PolicyError, Problem, did_you_mean, one_of
from muxk.policies.schema import API_VERSION as LANGUAGE_VERSION
from muxk.policies.schema import KIND

OWN = "muxk"
"""The distribution whose names nobody else may use."""
_SHIPPED_MODULE = f"{shipped.__name__}:"
_QUESTIONS = ("classify", "admit", "order", "form", "decide", "victim", "retain")
_FACTS = ("name", "limits", "tbt_slo_ns", "reads_priority", "reads_deadline", "classes", "known_classes")
_DEFAULTS = f"apiVersion: {LANGUAGE_VERSION}\nkind: {KIND}\nmetadata: {{name: built-in}}\nspec: {{}}\n"


class PluginError(PolicyError):
    """A policy of a package can not be used; the text names the distribution and what to do."""

    def __init__(self, origin: str, message: str, hint: str = "") -> None:
        super().__init__([Problem(origin, 1, 1, message, hint, "", code="plugin")])
        self.args = (f"{origin}: {message}" + (f"\n      hint: {hint}" if hint else ""),)


@dataclass(frozen=True)
class Installed:
    """A policy that has a name on this machine; it was not loaded yet."""

    name: str
    distribution: str
    version: str
    """Of the distribution; empty when it is not known."""
    target: str
    """`module:attribute` of its provider."""
    load: Callable[[], Any]

    @property
    def origin(self) -> str:
        """Who brought it, for people."""
        return f"{self.distribution} {self.version}".strip()

    def __str__(self) -> str:
        return f"policy '{self.name}' of {self.origin} ({self.target})"


@dataclass(frozen=True)
class Listing:
    """A row of `muxk policy list`."""

    name: str
    origin: str
    version: str
    description: str
    sha: str
    problem: str
    """Why it can not be used; empty when it can."""


def installed_policies() -> tuple[Installed, ...]:
    """All of this machine, by name; a name that two distributions claim is there twice."""
    found = [_installed(entry) for entry in metadata.entry_points(group=ENTRY_POINT_GROUP)]
    ours = shipped_policies()
    # Older metadata may name policies that are gone, and not those that are new.
    kept = [one for one in found if not one.target.startswith(_SHIPPED_MODULE) or one.name in ours]
    registered = [one.name for one in kept if one.distribution == OWN]
    kept += [_unregistered(name) for name in ours if name not in registered]
    return tuple(sorted(kept, key=lambda one: (one.name, one.distribution != OWN, one.distribution)))


def open_policy(name_or_path: str | Path, settings: Mapping[str, str] | None = None) -> Policy:
    """A policy by the name under which it ships or is installed, or a file by path.

    Raises:
        PolicyError: there is none, it is wrong, or it can not be loaded.
    """
    known = installed_policies()
    text = str(name_or_path)
    if any(one.name == text for one in known):
        return _open(text, known, settings)
    hint = did_you_mean(text, [one.name for one in known if one.distribution != OWN])
    if hint and not Path(text).exists():
        raise PluginError(text, "there is no such policy and no such file", hint)
    return load_policy(name_or_path, settings)


def open_installed(name: str, settings: Mapping[str, str] | None = None) -> Policy:
    """A policy by name and never by path: what a client may ask a server for.

    Raises:
        PolicyError: there is none, or it can not be loaded.
    """
    known = installed_policies()
    names = dict.fromkeys(one.name for one in known)
    if name not in names:
        hint = did_you_mean(name, names, f"installed there: {', '.join(names)}")
        raise PluginError(name[:80], "no policy of this name is installed where the server runs", hint)
    return _open(name, known, settings)


def list_policies() -> tuple[Listing, ...]:
    """Every policy with a name, loaded under its defaults; what can not be loaded says why."""
    known = installed_policies()
    return tuple(_listing(one, known) for one in known)


def _installed(entry: metadata.EntryPoint) -> Installed:
    distribution = entry.dist
    name = distribution.name if distribution is not None else "an unknown distribution"
    version = distribution.version if distribution is not None else ""
    return Installed(entry.name, name, version, entry.value, entry.load)


def _unregistered(name: str) -> Installed:
    provider = YamlPolicy("muxk.policies", f"{name}.yaml", api_version=API_VERSION)
    try:
        version = metadata.version(OWN)
    except metadata.PackageNotFoundError:
        version = ""
    return Installed(name, OWN, version, f"{_SHIPPED_MODULE}{name}", lambda: provider)


def _open(name: str, known: tuple[Installed, ...], settings: Mapping[str, str] | None) -> Policy:
    claims = [one for one in known if one.name == name]
    if len(claims) > 1:
        raise _claimed_twice(claims)
    return _build(claims[0], settings or {})


def _claimed_twice(claims: list[Installed]) -> PluginError:
    first, *others = claims
    hint = f"uninstall {one_of(one.distribution for one in others)}"
    if first.distribution == OWN:
        message = "this is the name of a policy that ships with muxk"
        return PluginError(str(others[0]), message, f"{hint}, or give its policy another name")
    owners = " and ".join(f"{one.origin} ({one.target})" for one in claims)
    message = f"two distributions register this name: {owners}"
    return PluginError(f"policy '{first.name}'", message, f"uninstall one of them: {hint}")


def _build(one: Installed, settings: Mapping[str, str]) -> Policy:
    """Load the provider, have it make the policy, and guard what is not compiled from YAML."""
    provider = _provider(one)
    try:
        policy = provider(MappingProxyType(dict(settings)))
    except PolicyError:
        raise
    except (Exception, SystemExit) as error:
        raise PluginError(str(one), f"it can not be made: {in_words(error)}") from error
    _check_name(one, policy)
    return policy if isinstance(policy, CompiledPolicy) else _guarded(one, policy, settings)


def _provider(one: Installed) -> Any:
    try:
        provider = one.load()
    except (Exception, SystemExit) as error:
        hint = f"reinstall {one.distribution}, or report this to its authors"
        raise PluginError(str(one), f"it can not be imported: {in_words(error)}", hint) from error
    version = getattr(provider, "api_version", None)
    if type(version) is not int:
        hint = f"state `api_version = {API_VERSION}` in the class"
        raise PluginError(
            str(one), "it does not say for which version of muxk.policies.api it was written", hint
        )
    if version != API_VERSION:
        newer = version > API_VERSION
        hint = "install a newer muxk" if newer else f"install a newer {one.distribution}"
        message = f"it is written for version {version} of muxk.policies.api, and this muxk has {API_VERSION}"
        raise PluginError(str(one), message, hint)
    if not callable(provider):
        raise PluginError(str(one), "a provider must be a class or a function that takes settings")
    return provider


def _check_name(one: Installed, policy: Any) -> None:
    missing = [what for what in (*_FACTS, *_QUESTIONS) if not _has(policy, what)]
    if missing:
        derived = isinstance(policy, BasePolicy)
        hint = "call super().__init__(settings)" if derived else "derive it from muxk.policies.api.BasePolicy"
        raise PluginError(str(one), f"what it makes is no policy: it has no {', '.join(missing)}", hint)
    if policy.name != one.name:
        message = f"the policy calls itself {str(policy.name)[:64]!r}"
        raise PluginError(str(one), message, "give the policy and its entry point the same name")


def _has(policy: Any, attribute: str) -> bool:
    try:
        return hasattr(policy, attribute)
    except (Exception, SystemExit):  # a property that fails is there; the guard tells how it fails
        return True


def _guarded(one: Installed, policy: Any, settings: Mapping[str, str]) -> GuardedPolicy:
    rules = policy.base if isinstance(policy, BasePolicy) else None
    fallback = rules if isinstance(rules, CompiledPolicy) else compile_policy(_DEFAULTS)
    try:
        sha = _sha(one, policy, fallback, settings)
        return GuardedPolicy(policy, fallback, one.name, sha, version=one.version)
    except WrongAnswer as error:
        raise PluginError(str(one), str(error)) from error


def _sha(one: Installed, policy: Any, rules: CompiledPolicy, settings: Mapping[str, str]) -> str:
    """Of all that can change an answer: who wrote it, its version, its code, its rules and settings."""
    content = {
        "api": API_VERSION,
        "distribution": [one.distribution, one.version, one.target],
        "rules": rules.sha,
        "settings": dict(settings),
        "source": _sources(type(policy)),
    }
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _sources(policy: type) -> list[str]:
    """Digests of the files that define a class and those it derives from, muxk's own left out."""
    digests: dict[str, str] = {}
    for kind in policy.__mro__:
        if kind.__module__.startswith("muxk.policies.") or kind is object:
            continue
        try:
            path = inspect.getsourcefile(kind)
            text = Path(path).read_bytes() if path is not None else b""
        except (OSError, TypeError):
            text = b""
        digests[kind.__module__] = hashlib.sha256(text).hexdigest()
    return [f"{module} {digest}" for module, digest in digests.items()]


def _listing(one: Installed, known: tuple[Installed, ...]) -> Listing:
    claims = [other for other in known if other.name == one.name]
    try:
        if len(claims) > 1:
            raise _claimed_twice(claims)
        policy = _build(one, {})
    except PolicyError as error:
        return Listing(one.name, one.origin, "", "", "", str(error))
    version = described(policy, "version") or one.version
    return Listing(one.name, one.origin, version, described(policy, "description"), policy.sha, "")
